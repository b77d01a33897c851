"""`generate` for slime: budgets, aborts, evaluation, samples that are handed in again, and all that episodes raise."""

from __future__ import annotations

import asyncio
import copy
import gc
import importlib
import inspect
from typing import Any

import httpx
import pytest
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager, SlidingWindowConversationManager

from strands_sglang.testing import ScriptedAnswer, ScriptedFault
from strands_sglang.trainers.slime import SlimeExportError, generate, make_generate
from support.agents import call, make_tools
from support.slime_checker import check_against_server, check_rollouts
from support.slime_episodes import (
    ANSWER,
    CALL,
    CUT,
    EXPERTS,
    LONG_TEXT,
    QUESTION,
    Rollouts,
    checked,
    moe_args,
    tell_top_p,
)
from support.slime_stub import Sample, install_slime, slime_args, slime_sampling_params

# --- where slime finds it ---


async def test_the_documented_path_is_a_function_as_slime_calls_it(chatml_tokenizer, monkeypatch):
    module, _, name = "strands_sglang.trainers.slime.generate".rpartition(".")
    assert getattr(importlib.import_module(module), name) is generate
    assert list(inspect.signature(generate).parameters) == ["args", "sample", "sampling_params", "evaluation"]
    install_slime(monkeypatch, chatml_tokenizer)
    rollouts = Rollouts(chatml_tokenizer, [ANSWER])
    with rollouts.server.serve() as url:
        sample = await generate(slime_args(url), Sample(index=0, prompt=QUESTION), slime_sampling_params())
    assert checked(sample, rollouts).status.name == "COMPLETED"


# --- an episode ---


async def test_an_agent_runs_its_tools_and_the_sample_is_completed(chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [CALL, ANSWER])
    given = Sample(index=3, prompt=QUESTION)
    sample = checked(await rollouts(given), rollouts)
    assert sample is given
    assert (sample.status.name, sample.reward, rollouts.ran) == ("COMPLETED", None, ["25 * 17"])
    facts = sample.metadata["strands_sglang"]
    assert (facts["tool_iterations"], facts["tool_calls"], facts["model_calls"]) == (1, 1, 2)
    assert sample.non_generation_time > 0
    check_against_server(sample, rollouts.server, all_trained=True)


async def test_prompts_are_texts_or_chat_messages_with_a_system_prompt_behind_the_agents(chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, lambda request: ANSWER)
    messages = [
        {"role": "system", "content": "Use digits."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
    ]
    checked(await rollouts(Sample(prompt=messages)), rollouts)
    text = rollouts.server.requests[0].text
    assert "Be brief.\n\nUse digits." in text
    assert text.index("Hi") < text.index("Hello") < text.index(QUESTION)


@pytest.mark.parametrize(
    ("prompt", "args", "message"),
    [
        ("<|im_start|>user", {"apply_chat_template": True}, "leave --apply-chat-template out"),
        (7, {}, "a text or a list of chat messages"),
        ([{"role": "assistant", "content": "x"}], {}, "must be a user's"),
        ([{"role": "tool", "content": "x"}], {}, "not of 'tool'"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], {}, "prompt="),
    ],
)
async def test_prompts_that_no_agent_can_be_given_are_errors(prompt, args, message, chatml_tokenizer):
    with pytest.raises(SlimeExportError, match=message):
        await Rollouts(chatml_tokenizer, [ANSWER])(Sample(prompt=prompt), **args)


async def test_an_agent_can_come_from_a_factory_and_be_scored_while_it_is_there(chatml_tokenizer):
    async def agent_factory(model: Any, sample: Sample) -> Agent:
        return Agent(
            model=model,
            tools=make_tools()[0],
            system_prompt=f"Task {sample.label}.",
            callback_handler=None,
            conversation_manager=NullConversationManager(),
        )

    rollouts = Rollouts(
        chatml_tokenizer,
        [CALL, ANSWER],
        agent_factory=agent_factory,
        prompt=lambda sample: f"{sample.prompt}!",
        reward=lambda agent, sample: float(len(agent.messages)),
    )
    sample = checked(await rollouts(Sample(prompt=QUESTION, label="A")), rollouts)
    assert sample.reward == 4.0
    assert "Task A." in rollouts.server.requests[0].text and f"{QUESTION}!" in rollouts.server.requests[0].text


@pytest.mark.parametrize("score", [lambda agent, sample: float("nan"), lambda agent, sample: 1 / 0])
async def test_a_reward_that_fails_removes_the_sample(score, chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [ANSWER], reward=score)
    sample = checked(await rollouts(), rollouts)
    assert (sample.reward, sample.remove_sample) == (0.0, True)


async def test_nobody_scores_an_episode_that_failed(chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [CALL], reward=lambda agent, sample: pytest.fail("asked for a reward"))
    assert checked(await rollouts(), rollouts).status.name == "FAILED"


# --- budgets ---


async def test_the_budget_is_for_the_whole_response_and_sampling_parameters_are_left_alone(chatml_tokenizer):
    params = slime_sampling_params(max_new_tokens=150)
    before = copy.deepcopy(params)
    rollouts = Rollouts(chatml_tokenizer, [CALL, LONG_TEXT])
    sample = checked(await rollouts(params=params), rollouts)
    assert (sample.status.name, sample.response_length, params) == ("TRUNCATED", 150, before)
    first, second = rollouts.server.requests
    used = len(second.input_ids) - len(first.input_ids)
    asked = [request.sampling_params["max_new_tokens"] for request in (first, second)]
    assert asked == [150, 150 - used]
    assert sample.metadata["strands_sglang"]["outcome"] == "max_tokens_reached"


async def test_no_request_is_made_once_tool_results_have_used_up_the_budget(chatml_tokenizer):
    @tool
    def lookup(key: str) -> str:
        """Look up a key."""
        return LONG_TEXT

    rollouts = Rollouts(chatml_tokenizer, [call("lookup", key="x")], tools=[lookup])
    sample = checked(await rollouts(params=slime_sampling_params(max_new_tokens=60)), rollouts)
    assert (sample.status.name, sample.loss_mask[-1]) == ("TRUNCATED", 1)
    assert sample.metadata["strands_sglang"]["outcome"] == "token_budget_reached"
    assert sample.response_length <= 60 and not rollouts.server.refusals


async def test_a_budget_without_room_for_min_new_tokens_is_used_up(chatml_tokenizer):
    """A7: what is left of a budget is no reason for the server to refuse a request."""
    rollouts = Rollouts(chatml_tokenizer, [CALL])
    params = slime_sampling_params(max_new_tokens=60, min_new_tokens=50)
    sample = checked(await rollouts(params=params), rollouts)
    assert (sample.status.name, len(rollouts.server.requests)) == ("TRUNCATED", 1)
    assert sample.metadata["strands_sglang"]["outcome"] == "token_budget_reached"
    assert not rollouts.server.refusals


@pytest.mark.parametrize(
    ("args", "evaluation", "limit"),
    [
        ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 200, "context_parallel_size": 2}, False, 400),
        ({"rollout_max_context_len": 390}, False, 390),
        ({"rollout_max_context_len": 390, "eval_max_context_len": 395}, True, 395),
    ],
)
async def test_a_sample_fits_what_slime_trains_on(args, evaluation, limit, chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [LONG_TEXT])
    params = slime_sampling_params(max_new_tokens=4000)
    sample = checked(await rollouts(params=params, evaluation=evaluation, **args), rollouts, **args)
    assert (sample.status.name, len(sample.tokens)) == ("TRUNCATED", limit)
    assert sample.metadata["strands_sglang"]["outcome"] == "context_window_overflow"


async def test_a_prompt_that_training_cannot_take_is_a_removed_sample(chatml_tokenizer):
    args = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40}
    rollouts = Rollouts(chatml_tokenizer, [])
    sample = checked(await rollouts(**args), rollouts, **args)
    assert (sample.status.name, len(sample.tokens)) == ("FAILED", 40)
    assert rollouts.server.requests == []


async def test_a_history_that_is_shortened_starts_a_sequence_within_the_same_budget(chatml_tokenizer):
    def agent_factory(model: Any, sample: Sample) -> Agent:
        manager = SlidingWindowConversationManager(window_size=2)
        return Agent(model=model, tools=make_tools()[0], callback_handler=None, conversation_manager=manager)

    rollouts = Rollouts(chatml_tokenizer, lambda request: CALL, agent_factory=agent_factory, fan_out=True)
    samples = checked(await rollouts(params=slime_sampling_params(max_new_tokens=200)), rollouts)
    sampled = sum(len(response.body["output_ids"]) for response in rollouts.server.responses)
    assert sampled <= 200 and all(sample.response_length <= 200 for sample in samples)
    check_against_server(samples, rollouts.server, all_trained=True)


@pytest.mark.parametrize(
    ("limits", "outcome", "calls"),
    [
        ({"max_tool_iters": 2}, "max_tool_iterations_reached", 2),
        ({"max_tool_calls": 3}, "max_tool_calls_reached", 3),
        ({"max_turns": 2}, "max_turns_reached", 2),
        ({"max_messages": 5}, "max_messages_reached", 2),
    ],
)
async def test_limits_truncate(limits, outcome, calls, chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, lambda request: CALL, **limits)
    sample = checked(await rollouts(params=slime_sampling_params(max_new_tokens=4000)), rollouts)
    assert (sample.status.name, sample.metadata["strands_sglang"]["outcome"]) == ("TRUNCATED", outcome)
    assert len(rollouts.server.requests) == calls


async def test_an_episode_that_takes_too_long_is_cut_off(chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [CALL, ScriptedAnswer(ANSWER, latency_s=60)], timeout=1.0)
    sample = checked(await rollouts(), rollouts)
    assert (sample.status.name, sample.remove_sample) == ("TRUNCATED", True)
    assert sample.metadata["strands_sglang"]["outcome"] == "timeout"


# --- whatever is raised ---


def raising(error: BaseException) -> Any:
    def agent_factory(model: Any, sample: Sample) -> Agent:
        raise error

    return agent_factory


ERRORS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "the agent cannot be made": ([], {"agent_factory": raising(RuntimeError("no sandbox"))}, "agent_error"),
    "the prompt cannot be made": ([], {"prompt": lambda sample: 1 / 0}, "agent_error"),
    "HTTP 400": ([ScriptedFault("status", status=400)], {}, "infrastructure_error"),
    "HTTP 400 later": ([CALL, ScriptedFault("status", status=400)], {}, "infrastructure_error"),
    "a connection that breaks": ([CALL, ScriptedFault("drop")], {}, "infrastructure_error"),
    "half an answer": ([CALL, ScriptedFault("half")], {}, "infrastructure_error"),
    "no JSON": ([ScriptedFault("garbage", message="<html>")], {}, "infrastructure_error"),
    "too busy": (
        [ScriptedFault("status", status=503)],
        {"client_settings": {"max_retries": 1, "retry_delay": 0.0}},
        "infrastructure_error",
    ),
    "an abort": ([CUT], {}, "aborted"),
}


@pytest.mark.parametrize("fan_out", [False, True])
@pytest.mark.parametrize("error", ERRORS)
async def test_whatever_an_episode_raises_ends_in_a_removed_sample(error, fan_out, chatml_tokenizer):
    answers, settings, outcome = ERRORS[error]
    rollouts = Rollouts(chatml_tokenizer, answers, fan_out=fan_out, **settings)
    result = checked(await rollouts(), rollouts)
    assert isinstance(result, list) is fan_out
    for sample in result if fan_out else [result]:
        assert sample.remove_sample and sample.reward == 0.0
        assert sample.metadata["strands_sglang"]["outcome"] == outcome


async def test_a_tool_that_raises_is_the_models_to_handle(chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [call("broken", reason="x"), ANSWER])
    assert checked(await rollouts(), rollouts).status.name == "COMPLETED"


async def test_a_cancellation_goes_on_to_the_caller(chatml_tokenizer):
    asked = asyncio.Event()

    async def never(request: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(Rollouts(chatml_tokenizer, [never])())
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- handed in again, evaluated, fanned out ---


@pytest.mark.parametrize("status", ["COMPLETED", "TRUNCATED"])
async def test_a_finished_sample_comes_back_as_it_is(status, chatml_tokenizer):
    sample = Sample(status=Sample.Status[status], tokens=[1, 2], reward=1.0)
    before = copy.deepcopy(sample)
    assert await Rollouts(chatml_tokenizer, [])(sample) == before
    assert await Rollouts(chatml_tokenizer, [], fan_out=True)(sample) == [before]


@pytest.mark.parametrize("fan_out", [False, True])
async def test_a_failed_sample_is_generated_anew_without_a_trace(fan_out, chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [CALL, ScriptedFault("drop"), CALL, ANSWER], fan_out=fan_out)
    given = Sample(index=3, group_index=1, prompt=QUESTION, session_id="s")
    await rollouts(given)
    again = await rollouts(given)
    fresh = await Rollouts(chatml_tokenizer, [CALL, ANSWER], fan_out=fan_out)(
        Sample(index=3, group_index=1, prompt=QUESTION, session_id="s")
    )
    for one, other in zip(again if fan_out else [again], fresh if fan_out else [fresh], strict=True):
        one.non_generation_time = other.non_generation_time = 0.0
        one.prefix_cache_info = other.prefix_cache_info
        assert one == other


async def test_evaluations_share_parameters_have_no_session_and_one_sample_each(chatml_tokenizer, monkeypatch):
    params = slime_sampling_params(top_p=0.7)
    before = copy.deepcopy(params)
    rollouts = Rollouts(chatml_tokenizer, lambda request: ANSWER, fan_out=True)
    args = {"rollout_top_p": 0.9, "custom_reward_post_process_path": "x", **moe_args()}
    samples = await asyncio.gather(
        *(rollouts(Sample(index=i, prompt=QUESTION), params=params, evaluation=True, **args) for i in range(3))
    )
    check_rollouts(list(samples), slime_args(**args), chatml_tokenizer, replayed=False)
    assert params == before
    assert len({sample.session_id for sample in samples}) == 3 and all(sample.session_id for sample in samples)


async def test_a_session_that_slime_gave_is_kept(chatml_tokenizer):
    sample = await Rollouts(chatml_tokenizer, [ANSWER])(Sample(prompt=QUESTION, session_id="given"))
    assert sample.session_id == "given"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"partial_rollout": True}, "partial_rollout"),
        ({"group_rm": True}, "group_rm"),
        ({"custom_reward_post_process_path": None}, "grpo_rewards_by_group"),
        ({"log_passrate": True}, "log_passrate"),
    ],
)
async def test_fan_out_where_slime_cannot_have_it_is_an_error(args, message, chatml_tokenizer):
    with pytest.raises(SlimeExportError, match=message):
        await Rollouts(chatml_tokenizer, [], fan_out=True)(**args)


@pytest.mark.parametrize("args", [{"advantage_estimator": "ppo"}, {"rewards_normalization": False}])
async def test_fan_out_needs_no_post_process_where_slime_normalises_no_groups(args, chatml_tokenizer):
    """C4: PPO and unnormalised rewards were refused."""
    rollouts = Rollouts(chatml_tokenizer, [ANSWER], fan_out=True)
    assert len(await rollouts(custom_reward_post_process_path=None, **args)) == 1


async def test_fanned_out_samples_are_read_like_a_sample(chatml_tokenizer):
    """C3: slime's fully asynchronous rollout raised TypeError, for it sorts groups by their members' index."""
    samples = await Rollouts(chatml_tokenizer, [ANSWER], fan_out=True)()
    assert isinstance(samples, list) and samples.index == samples[0].index == 3
    samples[0].reward = {"score": 0.5}
    assert samples.get_reward_value(slime_args(reward_key="score")) == 0.5


async def test_a_failed_episode_says_why_in_its_metadata_and_once_in_the_log(chatml_tokenizer, caplog):
    """C7."""

    def agent_factory(model: Any, sample: Any) -> Any:
        raise LookupError("there is no such agent")

    rollouts = Rollouts(chatml_tokenizer, [], agent_factory=agent_factory)
    for _ in range(3):
        sample = await rollouts()
        assert sample.metadata["strands_sglang"]["error"] == "LookupError: there is no such agent"
    assert (
        sum("no such agent" in record.getMessage() for record in caplog.records if record.levelname == "WARNING") == 1
    )


@pytest.mark.parametrize("reward", ["good", [1.0], object()])
async def test_a_reward_that_is_no_number_removes_its_sample(reward, chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [ANSWER], reward=lambda agent, sample: reward)
    sample = checked(await rollouts(), rollouts)
    assert (sample.reward, sample.remove_sample) == (0.0, True)


async def test_what_is_replayed_is_asked_for(chatml_tokenizer, monkeypatch):
    tell_top_p(monkeypatch)
    params = slime_sampling_params(top_p=0.9, custom_params={"return_top_p_token_ids": True})
    args = {"rollout_top_p": 0.9, **moe_args()}
    rollouts = Rollouts(chatml_tokenizer, [CALL, ANSWER], server={"experts": EXPERTS})
    sample = checked(await rollouts(params=params, **args), rollouts, **args)
    assert sample.rollout_routed_experts.shape[0] == len(sample.tokens) - 1
    failed = Rollouts(chatml_tokenizer, [], server={"experts": EXPERTS})
    checked(await failed(params=params, **args), failed, **args)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agent_factory": lambda model, sample: None, "tools": [1]}, "agent_factory makes the whole agent"),
        ({"model_config": {"return_logprob": False}}, "return_logprob"),
        ({"model_config": {"sampling_params": {}}}, "come from slime"),
        ({"model_config": {"lora_path": "a"}}, "'lora_path' goes into request_fields"),
        ({"model_config": {"request_fields": {"lorapath": "a"}}}, "did you mean 'lora_path'"),
        ({"max_turns": 0}, "max_turns"),
        ({"timeout": 0}, "timeout"),
        ({"max_tool_iters": -1}, "max_tool_iters"),
    ],
)
def test_settings_that_cannot_work_are_errors_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        make_generate(**settings)


async def test_what_is_known_of_a_server_outlives_the_rollout_that_asked(chatml_tokenizer):
    rollouts, asked = Rollouts(chatml_tokenizer, lambda request: ANSWER), []
    answer = rollouts.server.transport().handle_async_request

    async def note(request):
        asked.append(request.url.path)
        return await answer(request)

    generate = make_generate(
        generate_state=lambda args: rollouts.state,
        client_settings={"max_retries": 0, "transport": httpx.MockTransport(note)},
    )
    for index in range(3):
        await generate(slime_args(), Sample(index=index, prompt=QUESTION), slime_sampling_params())
        gc.collect()
    assert (asked.count("/generate"), asked.count("/tokenize")) == (3, 1)
