"""`generate` for slime: budgets, aborts, evaluation, repeated samples, and every error of an episode."""

import asyncio
import base64
import copy
import gc
import importlib
import inspect
import json
import logging
import math
import os
import subprocess
import sys
import threading
from array import array
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings, strategies as st
from strands import tool
from strands.agent.conversation_manager import SlidingWindowConversationManager
from strands.types.exceptions import MaxTokensReachedException

from strands_sglang import OUTCOMES, TerminationReason, Trajectory
from strands_sglang.protocol.generation import joined_mask, to_json
from strands_sglang.testing import ScriptedAnswer, ScriptedFault
from strands_sglang.trainers import slime
from strands_sglang.trainers.slime import (
    SlimeExportError,
    check_reward_nonzero_std,
    generate,
    grpo_rewards_by_group,
    make_generate,
    make_reward,
    to_slime_samples,
)
from support.agents import call, make_agent, make_tools
from support.histories import PLANS, Player
from support.pages import blocks
from support.slime import (
    ANSWER,
    CALL,
    CUT,
    ENDS,
    EXPERTS,
    LONG,
    LONG_TEXT,
    QUESTION,
    Rollouts,
    Sample,
    SpecInfo,
    check_against_server,
    check_rollouts,
    checked,
    export,
    forked,
    install_slime,
    moe_args,
    play,
    slime_args,
    slime_sampling_params,
    stale_sample,
    tell_top_p,
)


def outcome_of(sample):
    """Why its episode ended."""
    return sample.metadata["strands_sglang"]["outcome"]


# --- where slime finds it ---


async def test_documented_path_is_a_function_that_slime_calls(chatml_tokenizer, monkeypatch):
    module, _, name = "strands_sglang.trainers.slime.generate".rpartition(".")
    assert getattr(importlib.import_module(module), name) is generate
    assert list(inspect.signature(generate).parameters) == ["args", "sample", "sampling_params", "evaluation"]
    install_slime(monkeypatch, chatml_tokenizer)
    rollouts = Rollouts([ANSWER])
    with rollouts.server.serve() as url:
        sample = await generate(slime_args(url), Sample(index=0, prompt=QUESTION), slime_sampling_params())
    assert checked(sample, rollouts).status.name == "COMPLETED"


# --- an episode ---


async def test_an_agent_runs_its_tools_and_the_sample_is_completed():
    rollouts = Rollouts([CALL, ANSWER])
    given = Sample(index=3, prompt=QUESTION)
    sample = await rollouts.checked(given)
    assert sample is given
    assert (sample.status.name, sample.reward, rollouts.ran) == ("COMPLETED", None, ["25 * 17"])
    facts = sample.metadata["strands_sglang"]
    assert (facts["tool_iterations"], facts["tool_calls"], facts["model_calls"]) == (1, 1, 2)
    assert sample.non_generation_time > 0
    check_against_server(sample, rollouts.server, all_trained=True)


async def test_first_opened_episode_belongs_to_the_sample():
    async def episode(model, sample):
        with model.episode():
            with model.episode():
                await make_agent(model).invoke_async("Play the user.")
            with pytest.raises(MaxTokensReachedException):
                await make_agent(model).invoke_async(sample.prompt)
        return slime.EpisodeEnd(TerminationReason.MAX_TOKENS_REACHED, 1.0)

    rollouts = Rollouts(["I am one.", LONG_TEXT], episode=episode)
    sample = await rollouts(params=slime_sampling_params(max_new_tokens=12))
    asked, sampled = rollouts.server.requests[1].input_ids, rollouts.server.responses[1].body["output_ids"]
    assert (sample.tokens, sample.loss_mask) == ([*asked, *sampled], [1] * 12)


async def test_episode_with_a_rejected_first_request_has_its_prompt(chatml_tokenizer):
    async def episode(model, sample):
        with model.episode():
            await make_agent(model).invoke_async(sample.prompt)

    sample = await Rollouts([], server={"context_length": 10}, episode=episode)()
    assert (sample.status.name, sample.remove_sample) == ("FAILED", True)
    assert QUESTION in chatml_tokenizer.decode(sample.tokens)


async def test_prompts_are_texts_or_chat_messages():
    rollouts = Rollouts(lambda request: ANSWER)
    messages = [
        {"role": "system", "content": "Use digits."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
    ]
    await rollouts.checked(Sample(prompt=messages))
    text = rollouts.server.requests[0].text
    assert "Be brief.\n\nUse digits." in text
    assert text.index("Hi") < text.index("Hello") < text.index(QUESTION)


@pytest.mark.parametrize(
    ("prompt", "args", "message"),
    [
        ("<|im_start|>user", {"apply_chat_template": True}, "remove --apply-chat-template"),
        (7, {}, "a text or a list of chat messages"),
        ([{"role": "assistant", "content": "x"}], {}, "must have the role user"),
        ([{"role": "tool", "content": "x"}], {}, "not 'tool'"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], {}, "prompt="),
    ],
)
async def test_prompts_that_do_not_suit_an_agent_are_errors(prompt, args, message):
    with pytest.raises(SlimeExportError, match=message):
        await Rollouts([ANSWER])(Sample(prompt=prompt), **args)


async def test_factory_makes_an_agent_that_the_reward_sees():
    async def agent_factory(model, sample):
        return make_agent(model, make_tools()[0], system_prompt=f"Task {sample.label}.")

    rollouts = Rollouts(
        [CALL, ANSWER],
        agent_factory=agent_factory,
        prompt=lambda sample: f"{sample.prompt}!",
        reward=lambda agent, sample: float(len(agent.messages)),
    )
    sample = await rollouts.checked(Sample(prompt=QUESTION, label="A"))
    assert sample.reward == 4.0
    assert "Task A." in rollouts.server.requests[0].text and f"{QUESTION}!" in rollouts.server.requests[0].text


@pytest.mark.parametrize(
    "score",
    [lambda: math.nan, lambda: 1 / 0, lambda: "good", lambda: [1.0], object],
    ids=["nan", "raises", "a text", "a list", "an object"],
)
async def test_a_reward_that_fails_or_is_no_finite_number_removes_the_sample(score):
    sample = await Rollouts([ANSWER], reward=lambda agent, sample: score()).checked()
    assert (sample.reward, sample.remove_sample) == (0.0, True)


async def test_failed_episode_is_not_scored():
    rollouts = Rollouts([CALL], reward=lambda agent, sample: pytest.fail("asked for a reward"))
    assert (await rollouts.checked()).status.name == "FAILED"


# --- budgets ---


async def test_budget_is_for_the_whole_response():
    params = slime_sampling_params(max_new_tokens=150)
    before = copy.deepcopy(params)
    rollouts = Rollouts([CALL, LONG_TEXT])
    sample = await rollouts.checked(params=params)
    assert (sample.status.name, sample.response_length, params) == ("TRUNCATED", 150, before)
    first, second = rollouts.server.requests
    used = len(second.input_ids) - len(first.input_ids)
    asked = [request.sampling_params["max_new_tokens"] for request in (first, second)]
    assert asked == [150, 150 - used]
    assert outcome_of(sample) == "max_tokens_reached"


async def test_no_request_once_tool_results_used_up_the_budget():
    @tool
    def lookup(key: str) -> str:
        """Look up a key."""
        return LONG_TEXT

    rollouts = Rollouts([call("lookup", key="x")], tools=[lookup])
    sample = await rollouts.checked(params=slime_sampling_params(max_new_tokens=60))
    assert (sample.status.name, sample.loss_mask[-1]) == ("TRUNCATED", 1)
    assert outcome_of(sample) == "token_budget_reached"
    assert sample.response_length <= 60 and not rollouts.server.refusals


async def test_helpers_do_not_use_up_the_budget():
    def agent_factory(model, sample):
        @tool
        async def ask(question: str) -> str:
            """Ask a helper."""
            await make_agent(model.auxiliary).invoke_async(question)
            return "6"

        return make_agent(model, [ask])

    verdict = "It is right. " * 6
    rollouts = Rollouts([call("ask", question="x"), verdict, "Done."], agent_factory=agent_factory)
    sample = await rollouts.checked(params=slime_sampling_params(max_new_tokens=120))
    assert (sample.status.name, outcome_of(sample)) == ("COMPLETED", "task_complete")
    first, helped, last = rollouts.server.requests
    assert helped.sampling_params["max_new_tokens"] == 120
    assert last.sampling_params["max_new_tokens"] == 120 - (len(last.input_ids) - len(first.input_ids))


async def test_budget_below_min_new_tokens_is_used_up():
    """The rest of a budget never makes the server reject a request."""
    rollouts = Rollouts([CALL])
    params = slime_sampling_params(max_new_tokens=60, min_new_tokens=50)
    sample = await rollouts.checked(params=params)
    assert (sample.status.name, len(rollouts.server.requests)) == ("TRUNCATED", 1)
    assert outcome_of(sample) == "token_budget_reached"
    assert not rollouts.server.refusals


@pytest.mark.parametrize(
    ("args", "evaluation", "limit"),
    [
        ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 200, "context_parallel_size": 2}, False, 400),
        ({"rollout_max_context_len": 390}, False, 390),
        ({"rollout_max_context_len": 390, "eval_max_context_len": 395}, True, 395),
    ],
)
async def test_a_sample_fits_what_slime_trains_on(args, evaluation, limit):
    rollouts = Rollouts([LONG_TEXT])
    params = slime_sampling_params(max_new_tokens=4000)
    sample = await rollouts.checked(params=params, evaluation=evaluation, **args)
    assert (sample.status.name, len(sample.tokens)) == ("TRUNCATED", limit)
    assert outcome_of(sample) == "context_window_overflow"


async def test_prompt_too_long_for_training_is_a_removed_sample():
    args = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40}
    rollouts = Rollouts([])
    sample = await rollouts.checked(**args)
    assert (sample.status.name, len(sample.tokens)) == ("FAILED", 40)
    assert rollouts.server.requests == []


async def test_shortened_history_stays_within_the_budget():
    def agent_factory(model, sample):
        manager = SlidingWindowConversationManager(window_size=2)
        return make_agent(model, make_tools()[0], conversation_manager=manager)

    rollouts = Rollouts(lambda request: CALL, agent_factory=agent_factory, fan_out=True)
    samples = await rollouts.checked(params=slime_sampling_params(max_new_tokens=200))
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
async def test_limits_truncate(limits, outcome, calls):
    rollouts = Rollouts(lambda request: CALL, **limits)
    sample = await rollouts.checked(params=slime_sampling_params(max_new_tokens=4000))
    assert (sample.status.name, outcome_of(sample)) == ("TRUNCATED", outcome)
    assert len(rollouts.server.requests) == calls


async def test_episode_that_takes_too_long_is_truncated():
    rollouts = Rollouts([CALL, ScriptedAnswer(ANSWER, latency_s=60)], timeout=1.0)
    sample = await rollouts.checked()
    assert (sample.status.name, sample.remove_sample) == ("TRUNCATED", True)
    assert outcome_of(sample) == "timeout"


# --- whatever is raised ---


def raising(error):
    def agent_factory(model, sample):
        raise error

    return agent_factory


ERRORS = {
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
async def test_error_in_an_episode_gives_a_removed_sample(error, fan_out):
    answers, settings, outcome = ERRORS[error]
    rollouts = Rollouts(answers, fan_out=fan_out, **settings)
    result = await rollouts.checked()
    assert isinstance(result, list) is fan_out
    for sample in result if fan_out else [result]:
        assert sample.remove_sample and sample.reward == 0.0
        assert outcome_of(sample) == outcome


async def test_error_in_a_tool_goes_to_the_model():
    rollouts = Rollouts([call("broken", reason="x"), ANSWER])
    assert (await rollouts.checked()).status.name == "COMPLETED"


async def test_cancellation_propagates_to_the_caller():
    asked = asyncio.Event()

    async def never(request):
        asked.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(Rollouts([never])())
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- handed in again, evaluated, fanned out ---


@pytest.mark.parametrize("status", ["COMPLETED", "TRUNCATED"])
async def test_finished_sample_is_returned_unchanged(status):
    sample = Sample(status=Sample.Status[status], tokens=[1, 2], reward=1.0)
    before = copy.deepcopy(sample)
    assert await Rollouts([])(sample) == before
    assert await Rollouts([], fan_out=True)(sample) == [before]


@pytest.mark.parametrize("fan_out", [False, True])
async def test_failed_sample_is_generated_again_without_a_trace(fan_out):
    rollouts = Rollouts([CALL, ScriptedFault("drop"), CALL, ANSWER], fan_out=fan_out)
    given = Sample(index=3, group_index=1, prompt=QUESTION, session_id="s")
    await rollouts(given)
    again = await rollouts(given)
    fresh = await Rollouts([CALL, ANSWER], fan_out=fan_out)(
        Sample(index=3, group_index=1, prompt=QUESTION, session_id="s")
    )
    for one, other in zip(again if fan_out else [again], fresh if fan_out else [fresh], strict=True):
        one.non_generation_time = other.non_generation_time = 0.0
        one.prefix_cache_info = other.prefix_cache_info
        assert one == other


async def test_evaluation_gives_one_sample_without_a_session(chatml_tokenizer, monkeypatch):
    params = slime_sampling_params(top_p=0.7)
    before = copy.deepcopy(params)
    rollouts = Rollouts(lambda request: ANSWER, fan_out=True)
    args = {"rollout_top_p": 0.9, "custom_reward_post_process_path": "x", **moe_args()}
    samples = await asyncio.gather(
        *(rollouts(Sample(index=i, prompt=QUESTION), params=params, evaluation=True, **args) for i in range(3))
    )
    check_rollouts(list(samples), slime_args(**args), chatml_tokenizer, replayed=False)
    assert params == before
    assert len({sample.session_id for sample in samples}) == 3 and all(sample.session_id for sample in samples)


async def test_session_from_slime_is_kept():
    sample = await Rollouts([ANSWER])(Sample(prompt=QUESTION, session_id="given"))
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
async def test_fan_out_that_slime_does_not_support_is_an_error(args, message):
    with pytest.raises(SlimeExportError, match=message):
        await Rollouts([], fan_out=True)(**args)


@pytest.mark.parametrize("args", [{"advantage_estimator": "ppo"}, {"rewards_normalization": False}])
async def test_fan_out_needs_no_post_process_without_normalization(args):
    """PPO and unnormalized rewards were rejected."""
    rollouts = Rollouts([ANSWER], fan_out=True)
    assert len(await rollouts(custom_reward_post_process_path=None, **args)) == 1


async def test_fanned_out_samples_can_be_read_like_a_sample():
    """slime's fully asynchronous rollout raised TypeError, because it sorts groups by their members' index."""
    samples = await Rollouts([ANSWER], fan_out=True)()
    assert isinstance(samples, list) and samples.index == samples[0].index == 3
    samples[0].reward = {"score": 0.5}
    assert samples.get_reward_value(slime_args(reward_key="score")) == 0.5


async def test_failed_episode_has_its_cause_in_metadata_and_log(caplog):
    """The cause of a failed episode was only in the log, once per sample."""

    def agent_factory(model, sample):
        raise LookupError("there is no such agent")

    rollouts = Rollouts([], agent_factory=agent_factory)
    for _ in range(3):
        sample = await rollouts()
        assert sample.metadata["strands_sglang"]["error"] == "LookupError: there is no such agent"
    assert (
        sum("no such agent" in record.getMessage() for record in caplog.records if record.levelname == "WARNING") == 1
    )


async def test_data_for_replay_is_requested(monkeypatch):
    tell_top_p(monkeypatch)
    params = slime_sampling_params(top_p=0.9, custom_params={"return_top_p_token_ids": True})
    args = {"rollout_top_p": 0.9, **moe_args()}
    rollouts = Rollouts([CALL, ANSWER], server={"experts": EXPERTS})
    sample = await rollouts.checked(params=params, **args)
    assert sample.rollout_routed_experts.shape[0] == len(sample.tokens) - 1
    failed = Rollouts([], server={"experts": EXPERTS})
    await failed.checked(params=params, **args)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agent_factory": lambda model, sample: None, "tools": [1]}, "agent_factory makes the whole agent"),
        ({"model_config": {"return_logprob": False}}, "return_logprob"),
        ({"model_config": {"sampling_params": {}}}, "come from slime"),
        ({"model_config": {"lora_path": "a"}}, "'lora_path' belongs in request_fields"),
        ({"model_config": {"request_fields": {"lorapath": "a"}}}, "did you mean 'lora_path'"),
        ({"max_turns": 0}, "max_turns"),
        ({"timeout": 0}, "timeout"),
        ({"max_tool_iters": -1}, "max_tool_iters"),
    ],
)
def test_invalid_settings_are_errors_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        make_generate(**settings)


async def test_facts_about_a_server_outlive_a_rollout(small_heap):
    rollouts, asked = Rollouts(lambda request: ANSWER), []
    answer = rollouts.server.transport().handle_async_request

    async def note(request):
        asked.append(request.url.path)
        return await answer(request)

    generate = make_generate(
        generate_state=lambda args: rollouts.state,
        client_settings={"max_retries": 0, "transport": httpx.MockTransport(note)},
    )
    for index in range(2):
        await generate(slime_args(), Sample(index=index, prompt=QUESTION), slime_sampling_params())
        gc.collect()
    assert (asked.count("/generate"), asked.count("/tokenize")) == (2, 1)


async def test_no_request_is_sent_once_slime_aborts():
    rollouts = Rollouts([])
    rollouts.state.aborted = True
    sample = await rollouts()
    assert (sample.status.name, sample.reward, rollouts.server.requests) == ("ABORTED", None, [])


@pytest.mark.parametrize("answer", [CALL, CUT], ids=["between two turns", "in the middle of an answer"])
async def test_an_episode_stops_at_once_when_slime_aborts(answer):
    rollouts = Rollouts([])
    rollouts.answers.extend([CALL, rollouts.aborts_with(answer)])
    sample = await rollouts.checked()
    assert (sample.status.name, sample.reward, len(rollouts.server.requests)) == ("ABORTED", None, 2)


FULLY_ASYNC = {"rollout_function_path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async"}


async def test_fully_async_rollouts_rerun_aborted_samples(chatml_tokenizer):
    rollouts = Rollouts([CALL, CUT, CALL, ANSWER])
    sample = await rollouts.checked(**FULLY_ASYNC)
    assert (sample.status.name, sample.reward) == ("ABORTED", None)
    again = await rollouts(sample, **FULLY_ASYNC)
    assert again is sample and again.status.name == "COMPLETED"
    check_rollouts(again, slime_args(), chatml_tokenizer)
    assert again.tokens == [*rollouts.server.requests[-1].input_ids, *rollouts.server.responses[-1].body["output_ids"]]
    assert len(again.weight_versions) == 2


async def test_an_agent_that_cancels_itself_is_not_run_again():
    def agent_factory(model, sample):
        @tool(context=True)
        def give_up(tool_context: Any) -> str:
            """Give up."""
            tool_context.agent.cancel()
            return "gone"

        return make_agent(model, [give_up])

    rollouts = Rollouts([call("give_up")], agent_factory=agent_factory)
    sample = await rollouts.checked(**FULLY_ASYNC)
    assert (sample.status.name, sample.remove_sample) == ("TRUNCATED", True)


async def test_lists_are_aborted_only_if_slime_aborts_everything():
    rollouts = Rollouts([CALL, CUT], fan_out=True)
    [sample] = await rollouts.checked(**FULLY_ASYNC)
    assert (sample.status.name, sample.remove_sample, sample.reward) == ("TRUNCATED", True, 0.0)


# --- partial rollouts ---

PARTIAL = {"partial_rollout": True}


def in_storage(sample):
    """A sample that was in slime's buffer, and in a file in between."""
    kept = sample.to_dict()
    json.dumps(kept.get("strands_sglang_kept"))  # plain data
    return Sample.from_dict(copy.deepcopy(kept))


async def two_parts(rollouts, answers, **args):
    """Return the sample after the first part, and after the second."""
    rollouts.answers.extend(answers)
    first = await rollouts(**PARTIAL, **args)
    left = copy.deepcopy(first)
    rollouts.state.aborted = False
    return left, await rollouts(in_storage(first), **PARTIAL, **args)


@pytest.mark.parametrize("mask_off_policy", [False, True])
@pytest.mark.parametrize("replayed", [False, True])
async def test_partial_rollout_continues_from_its_tokens(replayed, mask_off_policy, chatml_tokenizer, monkeypatch):
    args = {"mask_offpolicy_in_partial_rollout": mask_off_policy}
    params = slime_sampling_params()
    if replayed:
        tell_top_p(monkeypatch)
        params["custom_params"] = {"return_top_p_token_ids": True}
        args |= {"rollout_top_p": 0.9, **moe_args()}
    rollouts = Rollouts([], server={"experts": EXPERTS})
    rest = ScriptedAnswer(" 425, which is my answer.")
    rollouts.answers.extend([CALL, rollouts.aborts_with(CUT), rest])
    left = copy.deepcopy(await rollouts(params=params, **PARTIAL, **args))
    check_rollouts(left, slime_args(**PARTIAL, **args), chatml_tokenizer)
    rollouts.state.aborted, rollouts.server.weight_version = False, "2"
    done = await rollouts.checked(in_storage(left), params=params, **PARTIAL, **args)
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


async def test_limits_and_the_budget_count_over_all_parts():
    params = slime_sampling_params(max_new_tokens=230)
    rollouts = Rollouts([], max_tool_iters=3)
    _, done = await two_parts(rollouts, [CALL, CALL, rollouts.aborts_with(CUT), LONG_TEXT], params=params)
    checked(done, rollouts)
    assert (done.status.name, done.response_length) == ("TRUNCATED", 230)

    rollouts = Rollouts([], max_tool_iters=4)
    _, done = await two_parts(rollouts, [CALL, CALL, rollouts.aborts_with(CALL), CALL])
    assert done.metadata["strands_sglang"]["tool_iterations"] == 4
    rollouts = Rollouts([], max_turns=3)
    _, done = await two_parts(rollouts, [CALL, rollouts.aborts_with(CUT), CALL, CALL])
    assert outcome_of(done) == "max_turns_reached"
    assert len(rollouts.server.requests) == 4  # three turns, one of them in two requests


async def test_abort_between_turns_continues_with_the_next_turn():
    rollouts = Rollouts([])
    left, done = await two_parts(rollouts, [CALL, rollouts.aborts_with(CALL), ANSWER])
    checked(done, rollouts)
    assert done.tokens[: len(left.tokens)] == left.tokens and len(rollouts.server.requests) == 3
    assert rollouts.ran == ["25 * 17"] * 2
    check_against_server(done, rollouts.server, all_trained=True)


async def test_abort_before_any_token_requests_again():
    rollouts = Rollouts([])
    queued = ScriptedAnswer("", finish_reason="abort")
    left, done = await two_parts(rollouts, [rollouts.aborts_with(queued), CALL, ANSWER])
    assert left.status.name == "ABORTED" and left.reward is None
    check_against_server(checked(done, rollouts), rollouts.server, all_trained=True)


async def test_a_rollout_can_be_aborted_again_and_again(chatml_tokenizer):
    rollouts = Rollouts([])
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
    done = await rollouts.checked(in_storage(sample), **PARTIAL)
    assert done.response.endswith("25 * 17 is 425.<|im_end|>")
    check_against_server(done, rollouts.server, all_trained=True)


async def test_cut_answer_that_fills_the_budget_is_truncated(chatml_tokenizer):
    rollouts = Rollouts([])
    count = len(chatml_tokenizer.encode("25 * 17 is", add_special_tokens=False))
    rollouts.answers.extend([rollouts.aborts_with(CUT)])
    left = await rollouts(params=slime_sampling_params(max_new_tokens=count + 5), **PARTIAL)
    rollouts.state.aborted = False
    done = await rollouts(in_storage(left), params=slime_sampling_params(max_new_tokens=count), **PARTIAL)
    checked(done, rollouts)
    assert (done.status.name, done.tokens, len(rollouts.server.requests)) == ("TRUNCATED", left.tokens, 1)


async def test_failed_part_is_removed_and_starts_again(chatml_tokenizer):
    rollouts = Rollouts([])
    _, failed = await two_parts(rollouts, [CALL, rollouts.aborts_with(CUT), ScriptedFault("drop"), CALL, ANSWER])
    assert (failed.status.name, failed.remove_sample) == ("FAILED", True)
    done = await rollouts(failed, **PARTIAL)
    check_rollouts(done, slime_args(), chatml_tokenizer)
    assert (done.status.name, done.remove_sample, done.reward) == ("COMPLETED", False, None)


async def test_abort_in_an_agent_tool_starts_the_sample_again():
    def agent_factory(model, sample):
        @tool
        async def delegate(task: str) -> str:
            """Have someone else do it."""
            return str(await make_agent(model).invoke_async(task))

        return make_agent(model, [delegate])

    delegated = call("delegate", task="Multiply.")
    rollouts = Rollouts([], agent_factory=agent_factory)
    _, done = await two_parts(rollouts, [delegated, rollouts.aborts_with(CUT), delegated, "425", ANSWER])
    assert done.status.name == "COMPLETED" and len(rollouts.server.requests) == 5
    assert "425" in rollouts.server.requests[-1].text and "abort" not in done.response


async def test_partial_rollout_keeps_the_agents_state():
    seen = []

    def agent_factory(model, sample):
        @tool(context=True)
        def count(tool_context: Any) -> str:
            """Count."""
            number = (tool_context.agent.state.get("number") or 0) + 1
            tool_context.agent.state.set("number", number)
            seen.append(number)
            return str(number)

        return make_agent(model, [count])

    rollouts = Rollouts([], agent_factory=agent_factory)
    await two_parts(rollouts, [call("count"), rollouts.aborts_with(call("count")), call("count"), ANSWER])
    assert seen == [1, 2, 3]


async def test_unreadable_partial_rollout_starts_again(caplog):
    rollouts = Rollouts([])
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
        call("unknown", x=1),
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
def test_every_failed_episode_becomes_a_sample(
    script, fan_out, partial, masked, replayed, window, budget, chatml_tokenizer
):
    def agent_factory(model, sample):
        shortens = {} if window is None else {"conversation_manager": SlidingWindowConversationManager(window)}
        return make_agent(model, make_tools()[0], **shortens)

    partial = partial and not fan_out
    args = {"partial_rollout": partial, "mask_offpolicy_in_partial_rollout": masked}
    params = slime_sampling_params(max_new_tokens=budget)
    if replayed:
        args |= {"rollout_top_p": 0.9, **moe_args()}
        params["custom_params"] = {"return_top_p_token_ids": True}
    rollouts = Rollouts([], server={"experts": EXPERTS}, agent_factory=agent_factory, fan_out=fan_out, max_turns=6)
    entries = [rollouts.aborts_with(answer) if aborts else answer for answer, aborts in script]
    rollouts.answers.extend([*entries, *([ANSWER] * 20)])

    async def play():
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


# --- docs/guides/slime.md says what the code does ---


ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/guides/slime.md").read_text(encoding="utf-8")


def rows(text, first):
    """The rows of the table whose header begins with a cell."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.lower().startswith(f"| {first}"))
    return list(takewhile(lambda line: line.startswith("|"), lines[start + 2 :]))


# What brings about each row of the table of ends: the server's answers, why the episode ended, and further arguments.
EPISODES = [
    ([CALL, ANSWER], None, {}),
    ([CALL, LONG], None, {}),
    ([CALL], "timeout", {}),
    ([CALL, CUT], None, {"abort_requested": True}),
    ([CALL, CUT], None, {}),
    ([CALL], None, {}),
    ([], None, {}),
    ([CALL, ANSWER], None, {"reward": math.nan}),
    ([CALL, CUT], "max_tokens_reached", {"args": slime_args(**moe_args())}),
]


async def test_samples_match_the_documented_table():
    documented = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows(TEXT, "the episode")]
    for (_, status, tokens, reward, removed), (answers, outcome, others) in zip(documented, EPISODES, strict=True):
        episode = await play(answers)
        sample = export(episode, outcome, failure_reward=-1.0, **others)
        assert sample.status.name == status.replace("as above", "COMPLETED")
        assert sample.remove_sample is (removed == "yes")
        assert any(sample.loss_mask) is ("masked" not in tokens)
        assert (sample.response_length == 1) is ("one masked token" in tokens)
        assert sample.loss_mask[-1] or "partial" not in tokens
        assert sample.reward == (-1.0 if reward == "`failure_reward`" else None)


def test_the_tryout_runs_in_a_process_of_its_own(chatml_tokenizer, tmp_path):
    """With the checkout of slime that SLIME_SRC names, or with what it needs of slime."""
    page = ROOT / "docs/guides/slime.md"
    chatml_tokenizer.save_pretrained(tmp_path / "model")
    source = os.environ.get("SLIME_SRC") or tmp_path
    if source is tmp_path:
        (tmp_path / "slime" / "utils").mkdir(parents=True)
        (tmp_path / "slime" / "utils" / "types.py").write_text("from support.slime import Sample\n")
    for block in blocks(None, page):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    [tryout] = [block.text for block in blocks("python", page) if block.section == "Try it before you launch"]
    done = subprocess.run(
        [sys.executable, "-c", tryout.replace("Qwen/Qwen3-4B-Instruct-2507", str(tmp_path / "model"))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(source), str(tmp_path)])},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("COMPLETED 1.0 "), done.stderr


# --- `to_slime_samples`: every end of an episode becomes samples that slime can use ---


@pytest.mark.parametrize("fan_out", [False, True])
@pytest.mark.parametrize("end", ENDS)
async def test_every_outcome_gives_a_usable_sample(end, fan_out):
    answers, settings, status, removed, reward = ENDS[end]
    episode = await play(answers, **settings)
    samples = export(episode, fan_out=fan_out)
    assert isinstance(samples, list) is fan_out
    sample = samples[0] if fan_out else samples
    assert (sample.status.name, sample.remove_sample, sample.reward) == (status, removed, reward)
    assert any(sample.loss_mask) is not removed
    assert (sample.rollout_id == 3) is fan_out
    assert sample.metadata["own"] == 1
    assert outcome_of(sample) == episode.reason.value


@pytest.fixture(scope="module")
def played():
    """Episodes in which something was sampled, or nothing; an export leaves them as they are."""
    return {True: asyncio.run(play([CALL, ANSWER])), False: asyncio.run(play([]))}


@pytest.mark.parametrize("sampled", [True, False], ids=["something sampled", "nothing sampled"])
@pytest.mark.parametrize("abort_requested", [True, False])
@pytest.mark.parametrize("reason", TerminationReason)
def test_every_reason_has_a_status_and_a_reward(reason, abort_requested, sampled, played, chatml_tokenizer):
    episode = played[sampled]
    sample = export(episode, reason, abort_requested=abort_requested)
    aborted = OUTCOMES[reason].slime_status == "ABORTED"
    if aborted and abort_requested:
        assert (sample.status.name, sample.remove_sample) == ("ABORTED", False)
    elif not sampled or OUTCOMES[reason].slime_status == "FAILED":
        assert (sample.status.name, sample.remove_sample) == ("FAILED", True)
    elif aborted:
        assert (sample.status.name, sample.remove_sample) == ("TRUNCATED", True)
    else:
        assert (sample.status.name, sample.remove_sample) == (OUTCOMES[reason].slime_status, False)
    as_outcome = to_slime_samples(
        episode.trajectory,
        Sample(),
        OUTCOMES[reason],
        tokenizer=chatml_tokenizer,
        abort_requested=abort_requested,
    )
    assert (as_outcome.status, as_outcome.remove_sample) == (sample.status, sample.remove_sample)


async def test_every_sampled_token_is_trained():
    episode = await play([CALL, ANSWER])
    sample = export(episode)
    check_against_server(sample, episode.server, all_trained=True)
    last = episode.server.requests[-1]
    assert sample.tokens == [*last.input_ids, *episode.server.responses[-1].body["output_ids"]]
    assert sample.weight_versions == ["default", "default"]
    cached = sum(request.cached_tokens for request in episode.server.requests)
    prompts = sum(len(request.input_ids) for request in episode.server.requests)
    assert (sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.total_prompt_tokens) == (cached, prompts)
    assert sample.spec_info == SpecInfo()
    assert sample.non_generation_time == 0.0


async def test_unseen_tool_results_are_not_in_the_sample():
    sample = export(await play([CALL] * 3))
    assert sample.loss_mask[-1] == 1
    assert sample.response.count("<tool_response>") == 2


async def test_partial_answer_is_trained_only_if_continued():
    episode = await play([CALL, CUT])
    kept = export(episode, abort_requested=True)
    assert kept.status.name == "ABORTED" and kept.reward is None and kept.loss_mask[-1] == 1
    check_against_server(kept, episode.server, all_trained=True)
    masked = export(episode, "max_tokens_reached")
    assert masked.status.name == "TRUNCATED" and not masked.remove_sample
    assert any(masked.loss_mask) and masked.loss_mask[-1] == 0


async def test_unfinished_episode_is_never_completed():
    for answers in ([CALL, LONG], [CALL, CUT]):
        episode = await play(answers)
        assert export(episode, "task_complete").status.name == "TRUNCATED"


async def test_call_in_flight_leaves_the_sample_unfinished():
    episode = await play([CALL, ANSWER])
    last = episode.trajectory.turns[-1]
    unfinished = replace(last, parent=last, generation=None, index=2, status=type(last.status).ASKED)
    episode.trajectory._turns.append(unfinished)  # as while a request is on its way
    sample = export(episode, "task_complete")
    assert sample.status.name == "TRUNCATED"
    assert sample.tokens == last.token_ids()


async def test_timeout_has_a_reward_only_after_an_answer():
    answered = export(await play([CALL, ANSWER]), "timeout", reward=1.0)
    assert (answered.status.name, answered.reward, answered.remove_sample) == ("TRUNCATED", 1.0, False)
    without = export(await play([CALL]), "timeout", reward=1.0)
    assert (without.status.name, without.reward, without.remove_sample) == ("TRUNCATED", 0.0, True)


# --- rewards ---


@pytest.mark.parametrize(("reward", "kept"), [(None, None), (1, 1.0), (0.5, 0.5), (torch.tensor(0.25), 0.25)])
async def test_reward_is_kept_and_none_is_left_to_slime(reward, kept):
    episode = await play([ANSWER])
    samples = export(episode, reward=reward, fan_out=True)
    assert [sample.reward for sample in samples] == [kept]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e308])
async def test_nonfinite_reward_removes_the_sample(reward, caplog):
    sample = export(await play([ANSWER]), reward=reward)
    assert (sample.status.name, sample.reward, sample.remove_sample) == ("COMPLETED", 0.0, True)
    assert "not a finite number" in caplog.text


async def test_reward_dictionary_needs_a_number_at_slimes_key():
    args = slime_args(reward_key="score")
    episode = await play([ANSWER])
    good = {"score": 1.0, "pred": None}
    sample = export(episode, args=args, reward=good)
    assert sample.reward == good and sample.reward is not good
    for bad in ({"score": math.nan}, {"score": None}, {}):
        sample = export(episode, args=args, reward=bad)
        assert (sample.reward, sample.remove_sample) == ({"score": 0.0}, True)
    failed = export(await play([]), args=args, failure_reward=-1.0)
    assert failed.reward == {"score": -1.0}


# --- several sequences ---


async def test_without_fan_out_the_latest_sequence_is_the_sample():
    episode = await forked()
    sample = export(episode)
    assert sample.tokens == episode.trajectory.latest_main_sequence().token_ids
    assert sample.metadata["strands_sglang"]["other_sequences"] == 1


async def test_fan_out_trains_every_token_once(chatml_tokenizer):
    episode = await forked()
    given = stale_sample(metadata={"own": []})
    samples = to_slime_samples(
        episode.trajectory, given, episode.reason, tokenizer=chatml_tokenizer, fan_out=True, reward=1.0
    )
    check_rollouts([samples], slime_args(), chatml_tokenizer)
    check_against_server(samples, episode.server, all_trained=True)
    assert len(samples) == 2 and samples[-1] is given
    assert {sample.rollout_id for sample in samples} == {3}
    assert [sample.metadata["strands_sglang"]["is_main"] for sample in samples] == [False, True]
    assert [sample.reward for sample in samples] == [1.0, 1.0]
    assert samples[0].metadata["own"] is not samples[1].metadata["own"]


async def test_fan_out_without_an_index_still_has_a_rollout_id(chatml_tokenizer):
    episode = await forked()
    samples = to_slime_samples(episode.trajectory, Sample(), episode.reason, tokenizer=chatml_tokenizer, fan_out=True)
    check_rollouts([samples], slime_args(), chatml_tokenizer)


async def test_retried_cut_answer_is_not_a_separate_sample():
    episode = await play([CALL, CUT, ANSWER])
    await episode.agent.invoke_async([])
    [sample] = export(episode, "task_complete", fan_out=True)
    assert sample.status.name == "COMPLETED" and sample.loss_mask[-1] == 1


async def test_a_failed_rollout_fans_out_to_one_removed_sample():
    episode = await forked()
    [sample] = export(episode, "infrastructure_error", fan_out=True)
    assert sample.remove_sample


async def test_samples_share_nothing_with_the_trajectory():
    episode = await play([CALL, ANSWER])
    first, second = (export(episode) for _ in range(2))
    first.tokens[:], first.loss_mask[:], first.rollout_log_probs[:] = [], [], []
    assert second == export(episode)


# --- what is missing ---


def test_an_empty_trajectory_is_a_masked_sample(chatml_tokenizer):
    args = slime_args(rollout_top_p=0.9, **moe_args())
    for reason in TerminationReason:
        sample = to_slime_samples(Trajectory(), stale_sample(), reason, tokenizer=chatml_tokenizer, args=args)
        check_rollouts(sample, args, chatml_tokenizer)
        assert (sample.status.name, sample.loss_mask, len(sample.tokens)) == ("FAILED", [0], 2)


async def test_missing_logprobs_are_an_error_with_a_remedy():
    episode = await play([CALL, ANSWER], return_logprob=False)
    with pytest.raises(SlimeExportError, match="return_logprob"):
        export(episode)


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
async def test_token_with_a_nonfinite_logprob_is_not_trained(logprob):
    episode = await play([CALL, ANSWER])
    turn = episode.trajectory.turns[-1]
    logprobs = array("d", turn.generation.logprobs)
    logprobs[2] = logprob
    turn.generation = replace(turn.generation, logprobs=logprobs)
    sample = export(episode)
    assert sample.loss_mask[-len(logprobs) :] == [1, 1, 0, *[1] * (len(logprobs) - 3)]
    assert sample.metadata["strands_sglang"]["problems"] == ["1 tokens of call 1 have no finite logprob"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], Sample(), "task_complete"), "must be a Trajectory"),
        ((Trajectory(), {}, "task_complete"), "must be slime's Sample"),
        ((Trajectory(), Sample(), "finished"), "is not a valid TerminationReason"),
    ],
)
def test_arguments_of_a_wrong_type_are_errors(arguments, message, chatml_tokenizer):
    with pytest.raises((TypeError, ValueError), match=message):
        to_slime_samples(*arguments, tokenizer=chatml_tokenizer)


def test_reward_of_a_wrong_type_is_an_error(chatml_tokenizer):
    with pytest.raises(TypeError, match="reward must be"):
        to_slime_samples(Trajectory(), Sample(), "task_complete", tokenizer=chatml_tokenizer, reward="1")


# --- what slime replays: routed experts, and the ids kept by top-p ---


# --- routed experts ---

MOE = {"server": {"experts": EXPERTS}, "return_routed_experts": True}


async def test_routed_experts_have_a_row_per_token_but_the_last():
    args = slime_args(**moe_args())
    episode = await play([CALL, CALL, ANSWER], **MOE)
    sample = export(episode, args=args)
    assert sample.rollout_routed_experts.dtype == torch.int32
    assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, EXPERTS.layers, EXPERTS.top_k)
    last = torch.from_numpy(episode.trajectory.turns[-1].generation.expert_ids().copy())
    assert sample.rollout_routed_experts.reshape(last.shape).equal(last)


async def test_sequences_that_fork_have_their_own_rows():
    episode = await forked(**MOE)
    samples = export(episode, args=slime_args(**moe_args()), fan_out=True)
    assert len(samples) == 2


async def test_sequence_forked_before_an_odd_stop_has_its_own_rows(chatml_tokenizer):
    stops = [chatml_tokenizer.convert_tokens_to_ids(stop) for stop in ("<|im_end|>", "<|endoftext|>")]
    odd = ScriptedAnswer(CALL, stop_token_id=stops[1])
    episode = await play(
        [odd, odd, ANSWER],
        server={"experts": EXPERTS, "stop_token_ids": stops},
        return_routed_experts=True,
    )
    samples = export(episode, args=slime_args(**moe_args()), fan_out=True)
    assert len(samples) == 3
    check_against_server(samples, episode.server, experts=EXPERTS, all_trained=True)


async def test_sampled_tokens_have_the_rows_of_their_own_call(chatml_tokenizer):
    def encoded(rows):
        return base64.b64encode(rows.astype("<i4").tobytes()).decode()

    episode = await play([CALL, ANSWER], **MOE)
    first, second = (turn.generation.expert_ids() for turn in episode.trajectory.turns)
    episode.trajectory.turns[0].generation = replace(
        episode.trajectory.turns[0].generation,
        routed_experts=encoded((first + 1) % EXPERTS.experts),
    )
    sample = to_slime_samples(
        episode.trajectory, Sample(), "task_complete", tokenizer=chatml_tokenizer, args=slime_args(**moe_args())
    )
    rows = sample.rollout_routed_experts.reshape(len(second), -1).numpy()
    assert (rows[: len(first)] == (first + 1) % EXPERTS.experts).all()
    assert (rows[len(first) :] == second[len(first) :]).all()


@pytest.mark.parametrize("missing", [0, 1])
async def test_missing_rows_come_from_the_next_call_or_fail(missing):
    episode = await play([CALL, CUT], **MOE)
    turn = episode.trajectory.turns[missing]
    turn.generation = replace(turn.generation, routed_experts=None)
    sample = export(episode, "max_tokens_reached", args=slime_args(**moe_args()))
    assert sample.remove_sample is (missing == 1)


async def test_experts_of_another_model_are_an_error():
    episode = await play([ANSWER], **MOE)
    with pytest.raises(SlimeExportError, match="another model's"):
        export(episode, args=slime_args(**moe_args(num_layers=2)))


async def test_experts_that_were_not_requested_are_an_error():
    episode = await play([ANSWER])
    with pytest.raises(SlimeExportError, match="return_routed_experts"):
        export(episode, args=slime_args(**moe_args()))
    with pytest.raises(SlimeExportError, match="num_layers"):
        export(episode, args=slime_args(use_rollout_routing_replay=True))
    assert export(episode, args=slime_args(**moe_args()), evaluation=True)


# --- top-p ---

TOP_P = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}


async def test_top_p_ids_are_those_of_the_trained_tokens(monkeypatch):
    tell_top_p(monkeypatch)
    args = slime_args(rollout_top_p=0.9)
    episode = await play([CALL, CALL, ANSWER], sampling_params=TOP_P)
    sample = export(episode, args=args)
    offsets, ids = sample.rollout_top_p_token_offsets.tolist(), sample.rollout_top_p_token_ids.tolist()
    response = sample.tokens[-sample.response_length :]
    for number, (token, mask) in enumerate(zip(response, sample.loss_mask, strict=True)):
        assert ids[offsets[number] : offsets[number + 1]] == ([token, *range(token % 3)] if mask else [])
    branches = export(await forked(sampling_params=TOP_P), args=args, fan_out=True)
    assert len(branches) == 2


STOCK = {"request_fields": {"return_sampling_mask": True}, "sampling_params": {"top_p": 0.9, "top_k": 7}}


@pytest.mark.parametrize("answers", [[CALL, CALL, ANSWER], [CALL, CUT, ANSWER]], ids=["whole", "resumed"])
async def test_sampling_masks_of_the_stock_server_are_replayed(answers):
    """slime's top-p replay works without slime's SGLang."""
    episode = await play(answers, on_abort="resume", **STOCK)
    sample = export(episode, args=slime_args(rollout_top_p=0.9))
    offsets, ids = sample.rollout_top_p_token_offsets.tolist(), sample.rollout_top_p_token_ids.tolist()
    told = [
        row for response in episode.server.responses for row in response.body["meta_info"]["output_token_sampling_mask"]
    ]
    rows = [ids[start:stop] for start, stop in pairwise(offsets)]
    assert [row for row, mask in zip(rows, sample.loss_mask, strict=True) if mask] == told
    assert not any(row for row, mask in zip(rows, sample.loss_mask, strict=True) if not mask)


async def test_tokens_without_top_p_ids_are_masked():
    episode = await play([CUT, ANSWER], on_abort="resume", **STOCK)
    (turn,) = episode.trajectory.turns
    cut = len(episode.server.responses[0].body["output_ids"])
    mask = turn.generation.sampling_mask
    unknown = joined_mask([(None, cut), (mask.part(cut, len(mask)), len(mask) - cut)])
    turn.generation = replace(turn.generation, sampling_mask=unknown)
    sample = export(episode, args=slime_args(rollout_top_p=0.9))
    assert sample.loss_mask == [0] * cut + [1] * (len(mask) - cut)


@pytest.mark.parametrize("end", ENDS)
async def test_every_outcome_has_top_p_ids_in_slimes_shapes(end, monkeypatch):
    tell_top_p(monkeypatch)
    answers, settings, *_ = ENDS[end]
    episode = await play(answers, sampling_params=TOP_P, **settings)
    export(episode, args=slime_args(rollout_top_p=0.9))


async def test_top_p_ids_that_were_not_requested_are_an_error():
    args = slime_args(rollout_top_p=0.9)
    with pytest.raises(SlimeExportError, match="top_p_token_ids"):
        export(await play([ANSWER]), args=args)
    sample = export(await play([CUT]), args=args, abort_requested=True)
    assert not any(sample.loss_mask)
    assert export(await play([ANSWER]), args=args, evaluation=True)


async def test_inconsistent_top_p_ids_mask_their_tokens():
    episode = await play([CALL, ANSWER])
    for turn in episode.trajectory.turns:
        meta = {**turn.generation.meta_info, "top_p_token_ids": [1], "top_p_token_offsets": [0, 1]}
        turn.generation = replace(turn.generation, meta_json=to_json(meta))
    sample = export(episode, "max_tokens_reached", args=slime_args(rollout_top_p=0.9))
    assert not any(sample.loss_mask)


@pytest.mark.parametrize("missing", ["top_p", "experts", "logprobs"])
async def test_resumed_answer_with_missing_data_is_not_an_error(missing):
    """One abort in the server's waiting queue failed the whole rollout."""
    answers = [ScriptedAnswer("One half", finish_reason="abort"), ScriptedAnswer(" and the other.")]
    episode = await play(answers, on_abort="resume")
    (turn,) = episode.trajectory.turns
    assert turn.generation.resumed_ids
    args = {"top_p": {"rollout_top_p": 0.9}, "experts": moe_args(), "logprobs": {}}[missing]
    if missing == "logprobs":
        turn.generation = replace(turn.generation, logprobs=None)
    sample = export(episode, args=slime_args(**args))
    assert not any(sample.loss_mask) or sample.remove_sample
    assert sample.metadata["strands_sglang"]["problems"]


# --- rewards under slime: one per rollout, asked for once, normalized within the prompt's group ---


ARGS = slime_args(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True)


def sample(group=0, rollout=0, reward=None, **fields):
    return Sample(group_index=group, index=rollout, rollout_id=rollout, reward=reward, **fields)


async def test_reward_is_computed_once_per_rollout():
    asked = []

    async def score(args, one, **kwargs):
        asked.append((one.label, kwargs))
        return float(one.label)

    main = {"strands_sglang": {"is_main": True}}
    side = sample(rollout=1, label="5")
    samples = [sample(rollout=1, label="1", metadata=main), side, sample(rollout=2, label="3")]
    reward = make_reward(score)
    assert await reward(ARGS, samples, extra=1) == [1.0, 1.0, 3.0]
    assert asked == [("1", {"extra": 1}), ("3", {"extra": 1})]
    assert await reward(ARGS, side) == 5.0


async def test_sync_reward_function_works():
    assert await make_reward(lambda args, one: 2)(ARGS, sample()) == 2


@pytest.mark.parametrize("value", [np.bool_(True), np.array([1.0]), torch.tensor(1.0), torch.tensor([True])])
async def test_slime_can_round_a_reward_of_any_kind_of_number(value):
    """Its metrics do, once a prompt's rewards are equal."""
    keyed = slime_args(reward_key="score")
    assert round(await make_reward(lambda args, one: value)(ARGS, sample()), 1) == 1.0
    scored = {"score": value, "kind": "a"}
    for made in (
        await make_reward(lambda args, one: scored)(keyed, sample()),
        export(await play([ANSWER]), args=keyed, reward=scored).reward,
    ):
        assert round(made["score"], 1) == 1.0 and made["kind"] == "a"


@pytest.mark.parametrize("other", [None, "not asked"])
async def test_what_slime_does_not_read_of_a_reward_is_kept(other):
    keyed = slime_args(reward_key="score", eval_reward_key="accuracy")
    scored = {"score": np.float32(0.5), "accuracy": other}
    assert await make_reward(lambda args, one: scored)(keyed, sample()) == {"score": 0.5, "accuracy": other}


async def test_a_sample_without_ids_that_comes_twice_is_one_rollout():
    asked = []
    one = sample(rollout=None)
    assert await make_reward(lambda args, sample: asked.append(sample) or 0.5)(ARGS, [one, one]) == [0.5, 0.5]
    assert asked == [one]


@pytest.mark.parametrize(
    "result",
    [
        *(None, math.nan, math.inf, 10**400, 1e300, "good", {"other": 1.0}),
        *(ValueError("no"), SystemExit(1), KeyboardInterrupt(), StopIteration(), asyncio.CancelledError()),
    ],
)
async def test_a_reward_that_fails_removes_the_rollout(result, caplog):
    def score(args, one):
        if isinstance(result, BaseException):
            raise result
        return result

    samples = [sample(rollout=1), sample(rollout=1)]
    assert await make_reward(score)(ARGS, samples) == [0.0, 0.0]
    assert all(one.remove_sample for one in samples) and "reward" in caplog.text
    keyed = slime_args(reward_key="score")
    assert await make_reward(score, failure_reward=-1.0)(keyed, sample()) == {"score": -1.0}


async def test_removed_samples_keep_their_reward_and_are_not_scored():
    def score(args, one):
        raise AssertionError("asked")

    assert await make_reward(score)(ARGS, sample(reward=0.5, remove_sample=True)) == 0.5
    assert await make_reward(score)(ARGS, [sample(remove_sample=True)]) == [0.0]


def test_each_rollout_counts_once_in_its_prompts_group():
    samples = [
        sample(0, 1, 1.0),
        sample(0, 1, 1.0),
        sample(0, 1, 1.0),
        sample(0, 2, 0.0),
        sample(1, 3, 1.0),
        sample(1, 4, 0.0),
    ]
    raw, trained = grpo_rewards_by_group(ARGS, samples)
    assert raw == [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert trained == pytest.approx([half, half, half, -half, half, -half])


def test_removed_samples_do_not_move_the_baseline():
    samples = [sample(0, 1, 1.0), sample(0, 2, 0.5), sample(0, 3, 0.0, remove_sample=True)]
    args = slime_args(advantage_estimator="grpo", grpo_std_normalization=False)
    raw, trained = grpo_rewards_by_group(args, samples)
    assert (raw, trained) == ([1.0, 0.5, 0.0], [0.25, -0.25, 0.0])


def test_rollout_without_its_main_sample_still_counts():
    main = {"strands_sglang": {"is_main": True}}
    samples = [sample(0, 1, 9.0, metadata=main, remove_sample=True), sample(0, 1, 1.0), sample(0, 2, 0.0)]
    args = slime_args(advantage_estimator="grpo", grpo_std_normalization=False)
    assert grpo_rewards_by_group(args, samples)[1] == [0.0, 0.5, -0.5]


@pytest.mark.parametrize("reward", [None, math.nan])
def test_sample_without_a_reward_is_removed(reward):
    samples = [sample(0, 1, 1.0), sample(0, 2, reward), sample(0, 3, 0.0)]
    raw, trained = grpo_rewards_by_group(ARGS, samples)
    assert samples[1].remove_sample and raw[1] == trained[1] == 0.0
    assert trained[0] == -trained[2] > 0


def test_rewards_are_unchanged_without_normalization():
    samples = [sample(0, 1, 1.0), sample(0, 2, 0.5), sample(0, 3, 2.0, remove_sample=True)]
    for args in (
        slime_args(advantage_estimator="ppo"),
        slime_args(advantage_estimator="grpo", rewards_normalization=False),
    ):
        assert grpo_rewards_by_group(args, samples) == ([1.0, 0.5, 2.0], [1.0, 0.5, 0.0])
    args = slime_args(advantage_estimator="reinforce_plus_plus_baseline", grpo_std_normalization=True)
    assert grpo_rewards_by_group(args, samples)[1] == [0.25, -0.25, 0.0]


def test_rewards_are_read_by_slimes_key():
    samples = [sample(0, 1, {"score": 1.0}), sample(0, 2, {"score": 0.0})]
    args = slime_args(reward_key="score", advantage_estimator="grpo", grpo_std_normalization=False)
    assert grpo_rewards_by_group(args, samples) == ([1.0, 0.0], [0.5, -0.5])


def test_a_sample_without_a_group_is_an_error():
    with pytest.raises(ValueError, match="group_index"):
        grpo_rewards_by_group(ARGS, [Sample(reward=1.0)])


@given(
    st.lists(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 4)), min_size=2, max_size=6), min_size=1, max_size=4)
)
def test_fan_out_changes_no_advantage(groups):
    def batch(fan_out):
        return [
            sample(number, 10 * number + place, reward)
            for number, group in enumerate(groups)
            for place, (reward, count) in enumerate(group)
            for _ in range(count if fan_out else 1)
        ]

    lone, spread = batch(False), batch(True)
    expected = {one.index: value for one, value in zip(lone, grpo_rewards_by_group(ARGS, lone)[1], strict=True)}
    trained = grpo_rewards_by_group(ARGS, spread)[1]
    assert trained == [expected[one.index] for one in spread]
    for number, group in enumerate(groups):  # slime's own way, where it is right
        rewards = torch.tensor([reward for reward, _ in group], dtype=torch.double)
        centered = rewards - rewards.mean()
        scaled = centered / (centered.std() + 1e-6)
        own = [expected[10 * number + place] for place in range(len(group))]
        assert own == pytest.approx(scaled.tolist(), abs=1e-6)


async def test_hanging_rewards_occupy_no_shared_thread():
    """A sync reward ran in the loop's few threads, which the whole process shares."""
    release = threading.Event()
    hanging = [asyncio.ensure_future(make_reward(lambda args, one: release.wait())(ARGS, sample())) for _ in range(64)]
    try:
        assert await asyncio.wait_for(make_reward(lambda args, one: 0.5)(ARGS, sample()), 60) == 0.5
    finally:
        release.set()
        await asyncio.gather(*hanging)


# --- what slime reads of rewards that failed ---

KEYS = {"reward_key": "score", "eval_reward_key": "acc", "log_reward_category": "pred"}


@pytest.mark.parametrize("names", [set(), {"reward_key"}, {"reward_key", "eval_reward_key"}, set(KEYS)])
@pytest.mark.parametrize("evaluation", [False, True])
async def test_a_failed_reward_has_every_key_that_slime_reads(names, evaluation):
    """One failed episode raised KeyError or TypeError in slime."""

    def check_reward_is_readable(args, reward, *, evaluation):
        """Read a reward as slime does, in training, in evaluations and in its metrics."""
        key = (getattr(args, "eval_reward_key", None) if evaluation else None) or getattr(args, "reward_key", None)
        assert (reward[key] if key else reward) == 0.0
        if getattr(args, "log_reward_category", None):
            assert reward[args.log_reward_category] == "failed"

    args = slime_args(**{name: KEYS[name] for name in names})

    def broken(args, one):
        raise RuntimeError("the grader is down")

    failed = export(await play([]), args=args, evaluation=evaluation)
    ungraded = export(await play([ANSWER]), args=args, evaluation=evaluation)
    for reward in (failed.reward, await make_reward(broken)(args, failed), await make_reward(broken)(args, ungraded)):
        check_reward_is_readable(args, reward, evaluation=evaluation)


async def test_evaluation_may_have_its_own_reward_key():
    """slime raised KeyError where evaluations have their own reward key."""
    args = slime_args(eval_reward_key="acc")
    episode = await play([ANSWER])
    failed = export(await play([]), args=args, evaluation=True)
    assert failed.reward == {"acc": 0.0}
    graded = export(episode, args=args, evaluation=True)
    assert await make_reward(lambda args, one: {"acc": True})(args, graded) == {"acc": True}
    assert export(await play([]), args=args).reward == 0.0


# --- the filter ---


def test_filter_ignores_removed_samples():
    """Seven right answers and one failure passed slime's own filter, although every advantage is 0."""
    right = [sample(rollout=n, reward=1.0) for n in range(7)]
    failed = sample(rollout=7, reward=0.0, remove_sample=True)
    assert not check_reward_nonzero_std(ARGS, [*right, failed])
    assert not any(grpo_rewards_by_group(ARGS, [*right, failed])[1])
    assert check_reward_nonzero_std(ARGS, [*right, sample(rollout=8, reward=0.0)])
    assert not check_reward_nonzero_std(ARGS, [failed]) and not check_reward_nonzero_std(ARGS, right[:1])


def test_filter_accepts_lists_and_counts_a_rollout_once():
    """slime's filter raised AttributeError with `fan_out`."""
    one = [sample(rollout=1, reward=1.0), sample(rollout=1, reward=1.0)]
    keyed = slime_args(reward_key="score")
    assert not check_reward_nonzero_std(ARGS, [one])
    assert check_reward_nonzero_std(ARGS, [one, [sample(rollout=2, reward=0.5)]])
    assert check_reward_nonzero_std(keyed, [sample(rollout=n, reward={"score": float(n)}) for n in range(2)])
