"""`generate` for slime: budgets, aborts, evaluation, samples that are handed in again, and all that episodes raise."""

from __future__ import annotations

import asyncio
import copy
import gc
import importlib
import inspect
import json
import logging
import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager, SlidingWindowConversationManager

from strands_sglang import TerminationReason
from strands_sglang.testing import ScriptedAnswer, ScriptedFault
from strands_sglang.trainers import slime
from strands_sglang.trainers.slime import SlimeExportError, generate, make_generate, samples, to_slime_samples
from support.agents import call, make_tools
from support.histories import PLANS, Player
from support.slime import (
    ANSWER,
    CALL,
    CUT,
    EXPERTS,
    LONG_TEXT,
    QUESTION,
    Rollouts,
    Sample,
    check_against_server,
    check_rollouts,
    checked,
    install_slime,
    moe_args,
    slime_args,
    slime_sampling_params,
    tell_top_p,
)

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


async def test_nothing_is_asked_once_slime_aborts(chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [])
    rollouts.state.aborted = True
    sample = await rollouts()
    assert (sample.status.name, sample.reward, rollouts.server.requests) == ("ABORTED", None, [])


@pytest.mark.parametrize("answer", [CALL, CUT], ids=["between two turns", "in the middle of an answer"])
async def test_an_episode_stops_at_once_when_slime_aborts(answer, chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [])
    rollouts.answers.extend([CALL, rollouts.aborts_with(answer)])
    sample = checked(await rollouts(), rollouts)
    assert (sample.status.name, sample.reward, len(rollouts.server.requests)) == ("ABORTED", None, 2)


async def test_fully_asynchronous_rollouts_get_aborted_samples_and_run_them_again(chatml_tokenizer):
    args = {"rollout_function_path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async"}
    rollouts = Rollouts(chatml_tokenizer, [CALL, CUT, CALL, ANSWER])
    sample = checked(await rollouts(**args), rollouts)
    assert (sample.status.name, sample.reward) == ("ABORTED", None)
    again = await rollouts(sample, **args)
    assert again is sample and again.status.name == "COMPLETED"
    check_rollouts(again, slime_args(), chatml_tokenizer)
    assert again.tokens == [*rollouts.server.requests[-1].input_ids, *rollouts.server.responses[-1].body["output_ids"]]
    assert len(again.weight_versions) == 2


async def test_an_agent_that_cancels_itself_is_not_run_again(chatml_tokenizer):
    def agent_factory(model: Any, sample: Sample) -> Agent:
        @tool(context=True)
        def give_up(tool_context: Any) -> str:
            """Give up."""
            tool_context.agent.cancel()
            return "gone"

        return Agent(model=model, tools=[give_up], callback_handler=None)

    args = {"rollout_function_path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async"}
    rollouts = Rollouts(chatml_tokenizer, [call("give_up")], agent_factory=agent_factory)
    sample = checked(await rollouts(**args), rollouts)
    assert (sample.status.name, sample.remove_sample) == ("TRUNCATED", True)


async def test_lists_are_never_aborted_unless_slime_aborts_everything(chatml_tokenizer):
    args = {"rollout_function_path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async"}
    rollouts = Rollouts(chatml_tokenizer, [CALL, CUT], fan_out=True)
    [sample] = checked(await rollouts(**args), rollouts)
    assert (sample.status.name, sample.remove_sample, sample.reward) == ("TRUNCATED", True, 0.0)


# --- partial rollouts ---

PARTIAL = {"partial_rollout": True}


def in_storage(sample: Sample) -> Sample:
    """A sample that was in slime's buffer, and in a file in between."""
    kept = sample.to_dict()
    json.dumps(kept.get("strands_sglang_kept"))  # plain data
    return Sample.from_dict(copy.deepcopy(kept))


async def two_parts(rollouts: Rollouts, answers: list[Any], **args: Any) -> tuple[Sample, Sample]:
    """The sample that the first part left, and the one that the second made of it."""
    rollouts.answers.extend(answers)
    first = await rollouts(**PARTIAL, **args)
    left = copy.deepcopy(first)
    rollouts.state.aborted = False
    return left, await rollouts(in_storage(first), **PARTIAL, **args)


@pytest.mark.parametrize("mask_off_policy", [False, True])
@pytest.mark.parametrize("replayed", [False, True])
async def test_a_partial_rollout_goes_on_from_the_tokens_that_it_had(
    replayed, mask_off_policy, chatml_tokenizer, monkeypatch
):
    args: dict[str, Any] = {"mask_offpolicy_in_partial_rollout": mask_off_policy}
    params = slime_sampling_params()
    if replayed:
        tell_top_p(monkeypatch)
        params["custom_params"] = {"return_top_p_token_ids": True}
        args |= {"rollout_top_p": 0.9, **moe_args()}
    rollouts = Rollouts(chatml_tokenizer, [], server={"experts": EXPERTS})
    rest = ScriptedAnswer(" 425, which is my answer.")
    rollouts.answers.extend([CALL, rollouts.aborts_with(CUT), rest])
    left = copy.deepcopy(await rollouts(params=params, **PARTIAL, **args))
    check_rollouts(left, slime_args(**PARTIAL, **args), chatml_tokenizer)
    rollouts.state.aborted, rollouts.server.weight_version = False, "2"
    done = checked(await rollouts(in_storage(left), params=params, **PARTIAL, **args), rollouts, **args)
    assert done.status.name == "COMPLETED" and rollouts.ran == ["25 * 17"]
    assert done.tokens[: len(left.tokens)] == left.tokens
    assert rollouts.server.requests[-1].input_ids == left.tokens
    assert done.weight_versions == ["default", "default", "2"]
    assert done.strands_sglang_kept is None
    facts = done.metadata["strands_sglang"]
    assert (facts["model_calls"], facts["other_sequences"]) == (2, 0)  # what was cut is a part of the second call
    if mask_off_policy:
        old = left.response_length
        assert not any(done.loss_mask[:old]) and all(done.loss_mask[old:])
    else:
        check_against_server(done, rollouts.server, all_trained=True)


async def test_limits_and_the_budget_count_over_all_parts(chatml_tokenizer):
    params = slime_sampling_params(max_new_tokens=230)
    rollouts = Rollouts(chatml_tokenizer, [], max_tool_iters=3)
    answers = [CALL, CALL, rollouts.aborts_with(CUT), ScriptedAnswer(LONG_TEXT)]
    rollouts.answers.extend(answers)
    left = await rollouts(params=params, **PARTIAL)
    rollouts.state.aborted = False
    done = checked(await rollouts(in_storage(left), params=params, **PARTIAL), rollouts)
    assert (done.status.name, done.response_length) == ("TRUNCATED", 230)

    rollouts = Rollouts(chatml_tokenizer, [], max_tool_iters=4)
    _, done = await two_parts(rollouts, [CALL, CALL, rollouts.aborts_with(CALL), CALL])
    assert done.metadata["strands_sglang"]["tool_iterations"] == 4
    rollouts = Rollouts(chatml_tokenizer, [], max_turns=3)
    _, done = await two_parts(rollouts, [CALL, rollouts.aborts_with(CUT), CALL, CALL])
    assert done.metadata["strands_sglang"]["outcome"] == "max_turns_reached"
    assert len(rollouts.server.requests) == 4  # three turns, one of them in two requests


async def test_an_abort_between_two_turns_goes_on_with_the_next_turn(chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [])
    left, done = await two_parts(rollouts, [CALL, rollouts.aborts_with(CALL), ANSWER])
    checked(done, rollouts)
    assert done.tokens[: len(left.tokens)] == left.tokens and len(rollouts.server.requests) == 3
    assert rollouts.ran == ["25 * 17"] * 2
    check_against_server(done, rollouts.server, all_trained=True)


async def test_an_abort_before_anything_was_sampled_is_aborted_and_asks_again(chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [])
    queued = ScriptedAnswer("", finish_reason="abort")
    left, done = await two_parts(rollouts, [rollouts.aborts_with(queued), CALL, ANSWER])
    assert left.status.name == "ABORTED" and left.reward is None
    check_against_server(checked(done, rollouts), rollouts.server, all_trained=True)


async def test_a_rollout_can_be_aborted_again_and_again(chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [])
    parts = [ScriptedAnswer(text, finish_reason="abort") for text in ("25 *", " 17", " is")]
    answers = [CALL, *(rollouts.aborts_with(part) for part in parts), ScriptedAnswer(" 425.")]
    rollouts.answers.extend(answers)
    sample = await rollouts(**PARTIAL)
    for _ in range(2):
        rollouts.state.aborted = True  # handed in while slime still aborts: nothing changes
        before = copy.deepcopy(sample)
        assert await rollouts(sample, **PARTIAL) == before
        rollouts.state.aborted = False
        sample = await rollouts(in_storage(sample), **PARTIAL)
        check_rollouts(sample, slime_args(), chatml_tokenizer)
        assert sample.status.name == "ABORTED" and sample.tokens[: len(before.tokens)] == before.tokens
    rollouts.state.aborted = False
    done = checked(await rollouts(in_storage(sample), **PARTIAL), rollouts)
    assert done.response.endswith("25 * 17 is 425.<|im_end|>")
    check_against_server(done, rollouts.server, all_trained=True)


async def test_a_cut_answer_that_fills_the_budget_is_truncated_without_another_request(chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [])
    count = len(chatml_tokenizer.encode("25 * 17 is", add_special_tokens=False))
    rollouts.answers.extend([rollouts.aborts_with(CUT)])
    left = await rollouts(params=slime_sampling_params(max_new_tokens=count + 5), **PARTIAL)
    rollouts.state.aborted = False
    done = await rollouts(in_storage(left), params=slime_sampling_params(max_new_tokens=count), **PARTIAL)
    checked(done, rollouts)
    assert (done.status.name, done.tokens, len(rollouts.server.requests)) == ("TRUNCATED", left.tokens, 1)


async def test_a_part_that_fails_is_a_removed_sample_that_starts_again(chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [])
    _, failed = await two_parts(rollouts, [CALL, rollouts.aborts_with(CUT), ScriptedFault("drop"), CALL, ANSWER])
    assert (failed.status.name, failed.remove_sample) == ("FAILED", True)
    done = await rollouts(failed, **PARTIAL)
    check_rollouts(done, slime_args(), chatml_tokenizer)
    assert (done.status.name, done.remove_sample, done.reward) == ("COMPLETED", False, None)


async def test_an_agent_that_is_a_tool_and_was_aborted_starts_the_sample_again(chatml_tokenizer):
    def agent_factory(model: Any, sample: Sample) -> Agent:
        @tool
        async def delegate(task: str) -> str:
            """Have somebody else do it."""
            return str(await Agent(model=model, callback_handler=None).invoke_async(task))

        return Agent(
            model=model, tools=[delegate], callback_handler=None, conversation_manager=NullConversationManager()
        )

    delegated = call("delegate", task="Multiply.")
    rollouts = Rollouts(chatml_tokenizer, [], agent_factory=agent_factory)
    _, done = await two_parts(rollouts, [delegated, rollouts.aborts_with(CUT), delegated, "425", ANSWER])
    assert done.status.name == "COMPLETED" and len(rollouts.server.requests) == 5
    assert "425" in rollouts.server.requests[-1].text and "abort" not in done.response


async def test_the_agents_state_goes_on_too(chatml_tokenizer):
    seen = []

    def agent_factory(model: Any, sample: Sample) -> Agent:
        @tool(context=True)
        def count(tool_context: Any) -> str:
            """Count."""
            number = (tool_context.agent.state.get("number") or 0) + 1
            tool_context.agent.state.set("number", number)
            seen.append(number)
            return str(number)

        return Agent(model=model, tools=[count], callback_handler=None, conversation_manager=NullConversationManager())

    rollouts = Rollouts(chatml_tokenizer, [], agent_factory=agent_factory)
    await two_parts(rollouts, [call("count"), rollouts.aborts_with(call("count")), call("count"), ANSWER])
    assert seen == [1, 2, 3]


async def test_what_was_kept_and_cannot_be_read_is_started_again(chatml_tokenizer, caplog):
    rollouts = Rollouts(chatml_tokenizer, [])
    rollouts.answers.extend([CALL, rollouts.aborts_with(CUT), CALL, ANSWER])
    sample = await rollouts(**PARTIAL)
    rollouts.state.aborted = False
    sample.strands_sglang_kept["trajectory"] = "AAAA"
    with caplog.at_level(logging.WARNING):
        done = await rollouts(sample, **PARTIAL)
    assert done.status.name == "COMPLETED" and "cannot be read" in caplog.text


# --- whatever is done to a history, and however often an episode is aborted, its samples are what slime can use ---


def test_random_histories_become_samples(chatml_tokenizer, tmp_path):
    found = []

    @seed(0)
    @settings(max_examples=150, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(PLANS)
    def check(plan):
        player = Player(chatml_tokenizer, tmp_path)
        asyncio.run(player.play(plan))
        reason = list(TerminationReason)[len(found) % len(TerminationReason)]
        for fan_out in (False, True):
            given = Sample(index=len(found), group_index=0, reward=7.0, tokens=[1], loss_mask=[1])
            trajectory = player.model.trajectory
            samples = to_slime_samples(trajectory, given, reason, tokenizer=chatml_tokenizer, fan_out=fan_out)
            check_rollouts([samples], slime_args(), chatml_tokenizer)
            check_against_server(samples, player.server)
        found.append(len(samples))

    check()
    assert sum(samples > 1 for samples in found) > len(found) / 10


ANSWERS = st.sampled_from(
    [
        CALL,
        f"{CALL}\n{CALL}",
        call("nobody", x=1),
        "<tool_call>\nno JSON\n</tool_call>",
        ANSWER,
        ScriptedAnswer("25 * 17", finish_reason="length"),
        ScriptedAnswer("25 * 17", finish_reason="abort"),
        ScriptedAnswer("", finish_reason="abort"),
        ScriptedFault("drop"),
        ScriptedFault("status", status=400),
    ]
)
ABORTS = st.booleans()


@settings(max_examples=80)
@given(
    script=st.lists(st.tuples(ANSWERS, ABORTS), min_size=1, max_size=8),
    fan_out=st.booleans(),
    partial=st.booleans(),
    masked=st.booleans(),
    replayed=st.booleans(),
    window=st.sampled_from([None, 2, 3]),
    budget=st.sampled_from([40, 150, 2000]),
)
def test_episodes_that_go_wrong_in_every_way_become_samples(
    script, fan_out, partial, masked, replayed, window, budget, chatml_tokenizer
):
    def agent_factory(model: Any, sample: Sample) -> Agent:
        manager = NullConversationManager() if window is None else SlidingWindowConversationManager(window_size=window)
        return Agent(model=model, tools=make_tools()[0], callback_handler=None, conversation_manager=manager)

    partial = partial and not fan_out
    args = {"partial_rollout": partial, "mask_offpolicy_in_partial_rollout": masked}
    params = slime_sampling_params(max_new_tokens=budget)
    if replayed:
        args |= {"rollout_top_p": 0.9, **moe_args()}
        params["custom_params"] = {"return_top_p_token_ids": True}
    rollouts = Rollouts(
        chatml_tokenizer, [], server={"experts": EXPERTS}, agent_factory=agent_factory, fan_out=fan_out, max_turns=6
    )
    entries = [rollouts.aborts_with(answer) if aborts else answer for answer, aborts in script]
    rollouts.answers.extend([*entries, *([ANSWER] * 20)])

    async def play() -> None:
        sample = Sample(index=1, group_index=0, prompt=QUESTION)
        for _ in range(len(script) + 1):
            before = len(rollouts.server.requests)
            given = copy.deepcopy(params)
            result = await rollouts(sample, params=params, **args)
            assert params == given
            check_rollouts([result], slime_args(**args), chatml_tokenizer)
            log = rollouts.server
            if partial:
                check_against_server(result, log, experts=EXPERTS if replayed else None)
            else:
                this_time = copy.copy(log)
                this_time.requests, this_time.responses = log.requests[before:], log.responses[before:]
                check_against_server(result, this_time, experts=EXPERTS if replayed else None)
            rollouts.state.aborted = False
            sample = result[-1] if fan_out else result
            if sample.status.name != "ABORTED":
                return
            sample = Sample.from_dict(copy.deepcopy(sample.to_dict()))
        raise AssertionError("the rollout never ended")

    with pytest.MonkeyPatch.context() as patch:
        tell_top_p(patch)
        asyncio.run(play())


# --- docs/slime.md says what the code does ---


ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "slime.md").read_text(encoding="utf-8")


def rows(text: str, first: str) -> list[str]:
    """The rows of the table whose header begins with a cell."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.lower().startswith(f"| {first}"))
    return list(takewhile(lambda line: line.startswith("|"), lines[start + 2 :]))


def test_the_table_of_ends_is_the_modules():
    documented = rows(TEXT, "the episode")
    assert documented == rows(inspect.getdoc(samples) or "", "the episode")
    assert len(documented) == 9


def test_all_public_names_are_there():
    named = re.findall(r"^\| `(\w+)", "\n".join(rows(TEXT, "name")), re.MULTILINE)
    assert sorted(named) == sorted(slime.__all__)


def test_links_lead_to_files():
    for target in re.findall(r"\]\((?!https:)([^)]+)\)", TEXT):
        assert (ROOT / "docs" / target).is_file(), target
