"""Aborts under slime: episodes stop at once, are run again, or go on as partial rollouts from the tokens they had."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager

from strands_sglang.testing import ScriptedAnswer, ScriptedFault
from support.agents import call
from support.slime_checker import check_against_server, check_rollouts
from support.slime_episodes import ANSWER, CALL, CUT, EXPERTS, LONG_TEXT, Rollouts, checked, moe_args, tell_top_p
from support.slime_stub import Sample, slime_args, slime_sampling_params


async def test_nothing_is_asked_once_slime_aborts(chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [])
    rollouts.state.aborted = True
    sample = await rollouts()
    assert (sample.status.name, sample.reward, rollouts.server.requests) == ("ABORTED", None, [])


@pytest.mark.parametrize("answer", [CALL, CUT], ids=["between two turns", "in the middle of an answer"])
async def test_an_episode_stops_at_once_when_slime_aborts(answer, chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [])
    rollouts.server._script = type(rollouts.server._script)([CALL, rollouts.aborts_with(answer)])
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
    rollouts.server._script = type(rollouts.server._script)(answers)
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
    rollouts.server._script = type(rollouts.server._script)([CALL, rollouts.aborts_with(CUT), rest])
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
    rollouts.server._script = type(rollouts.server._script)(answers)
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
    rollouts.server._script = type(rollouts.server._script)(answers)
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
    rollouts.server._script = type(rollouts.server._script)([rollouts.aborts_with(CUT)])
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
    rollouts.server._script = type(rollouts.server._script)([CALL, rollouts.aborts_with(CUT), CALL, ANSWER])
    sample = await rollouts(**PARTIAL)
    rollouts.state.aborted = False
    sample.strands_sglang_kept["trajectory"] = "AAAA"
    with caplog.at_level(logging.WARNING):
        done = await rollouts(sample, **PARTIAL)
    assert done.status.name == "COMPLETED" and "cannot be read" in caplog.text
