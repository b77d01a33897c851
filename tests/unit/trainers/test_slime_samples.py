"""`to_slime_samples`: every end of an episode becomes samples that slime can use."""

from __future__ import annotations

import asyncio
import math
import threading
from array import array
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang import OUTCOMES, TerminationReason, Trajectory
from strands_sglang.protocol.generation import joined_mask
from strands_sglang.testing import ScriptedAnswer
from strands_sglang.trainers.slime import (
    SlimeExportError,
    check_reward_nonzero_std,
    grpo_rewards_by_group,
    make_reward,
    to_slime_samples,
)
from support.slime import (
    ANSWER,
    CALL,
    CUT,
    ENDS,
    EXPERTS,
    LONG,
    Sample,
    SpecInfo,
    check_against_server,
    check_rollouts,
    export,
    forked,
    moe_args,
    play,
    slime_args,
    stale_sample,
    tell_top_p,
)


@pytest.mark.parametrize("fan_out", [False, True])
@pytest.mark.parametrize("end", ENDS)
async def test_every_end_is_a_sample_that_slime_can_use(end, fan_out, chatml_tokenizer):
    answers, settings, status, removed, reward = ENDS[end]
    episode = await play(chatml_tokenizer, answers, **settings)
    samples = export(episode, chatml_tokenizer, fan_out=fan_out)
    assert isinstance(samples, list) is fan_out
    sample = samples[0] if fan_out else samples
    assert (sample.status.name, sample.remove_sample, sample.reward) == (status, removed, reward)
    assert any(sample.loss_mask) is not removed
    assert (sample.rollout_id == 3) is fan_out
    assert sample.metadata["own"] == 1
    assert sample.metadata["strands_sglang"]["outcome"] == episode.reason.value


@pytest.mark.parametrize("sampled", [True, False], ids=["something sampled", "nothing sampled"])
@pytest.mark.parametrize("abort_requested", [True, False])
@pytest.mark.parametrize("reason", TerminationReason)
async def test_every_reason_has_a_status_and_a_reward(reason, abort_requested, sampled, chatml_tokenizer):
    episode = await play(chatml_tokenizer, [CALL, ANSWER] if sampled else [])
    sample = export(episode, chatml_tokenizer, reason, abort_requested=abort_requested)
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


async def test_all_that_was_sampled_is_trained_and_ends_the_sample(chatml_tokenizer):
    episode = await play(chatml_tokenizer, [CALL, ANSWER])
    sample = export(episode, chatml_tokenizer)
    check_against_server(sample, episode.server, all_trained=True)
    last = episode.server.requests[-1]
    assert sample.tokens == [*last.input_ids, *episode.server.responses[-1].body["output_ids"]]
    assert sample.weight_versions == ["default", "default"]
    cached = sum(request.cached_tokens for request in episode.server.requests)
    prompts = sum(len(request.input_ids) for request in episode.server.requests)
    assert (sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.total_prompt_tokens) == (cached, prompts)
    assert sample.spec_info == SpecInfo()
    assert sample.non_generation_time == 0.0


async def test_tool_results_that_the_model_never_saw_are_not_in_the_sample(chatml_tokenizer):
    sample = export(await play(chatml_tokenizer, [CALL] * 3), chatml_tokenizer)
    assert sample.loss_mask[-1] == 1
    assert sample.response.count("<tool_response>") == 2


async def test_a_partial_answer_is_not_trained_unless_slime_continues_it(chatml_tokenizer):
    episode = await play(chatml_tokenizer, [CALL, CUT])
    kept = export(episode, chatml_tokenizer, abort_requested=True)
    assert kept.status.name == "ABORTED" and kept.reward is None and kept.loss_mask[-1] == 1
    check_against_server(kept, episode.server, all_trained=True)
    masked = export(episode, chatml_tokenizer, "max_tokens_reached")
    assert masked.status.name == "TRUNCATED" and not masked.remove_sample
    assert any(masked.loss_mask) and masked.loss_mask[-1] == 0


async def test_what_did_not_finish_is_never_completed(chatml_tokenizer):
    for answers in ([CALL, LONG], [CALL, CUT]):
        episode = await play(chatml_tokenizer, answers)
        assert export(episode, chatml_tokenizer, "task_complete").status.name == "TRUNCATED"


async def test_a_call_that_is_on_its_way_is_left_out_and_the_sample_unfinished(chatml_tokenizer):
    episode = await play(chatml_tokenizer, [CALL, ANSWER])
    last = episode.trajectory.turns[-1]
    unfinished = replace(last, parent=last, generation=None, index=2, status=type(last.status).ASKED)
    episode.trajectory._turns.append(unfinished)  # as while a request is on its way
    sample = export(episode, chatml_tokenizer, "task_complete")
    assert sample.status.name == "TRUNCATED"
    assert sample.tokens == last.token_ids()


async def test_time_that_ran_out_has_a_reward_only_behind_an_answer(chatml_tokenizer):
    answered = export(await play(chatml_tokenizer, [CALL, ANSWER]), chatml_tokenizer, "timeout", reward=1.0)
    assert (answered.status.name, answered.reward, answered.remove_sample) == ("TRUNCATED", 1.0, False)
    without = export(await play(chatml_tokenizer, [CALL]), chatml_tokenizer, "timeout", reward=1.0)
    assert (without.status.name, without.reward, without.remove_sample) == ("TRUNCATED", 0.0, True)


# --- rewards ---


@pytest.mark.parametrize(("reward", "kept"), [(None, None), (1, 1.0), (0.5, 0.5), (torch.tensor(0.25), 0.25)])
async def test_a_reward_is_kept_and_none_is_left_to_slime(reward, kept, chatml_tokenizer):
    episode = await play(chatml_tokenizer, [ANSWER])
    samples = export(episode, chatml_tokenizer, reward=reward, fan_out=True)
    assert [sample.reward for sample in samples] == [kept]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
async def test_a_reward_that_is_no_finite_number_removes_the_sample(reward, chatml_tokenizer, caplog):
    sample = export(await play(chatml_tokenizer, [ANSWER]), chatml_tokenizer, reward=reward)
    assert (sample.status.name, sample.reward, sample.remove_sample) == ("COMPLETED", 0.0, True)
    assert "no finite number" in caplog.text


async def test_a_dictionary_of_rewards_needs_a_number_at_slimes_key(chatml_tokenizer):
    args = slime_args(reward_key="score")
    episode = await play(chatml_tokenizer, [ANSWER])
    good = {"score": 1.0, "pred": None}
    sample = export(episode, chatml_tokenizer, args=args, reward=good)
    assert sample.reward == good and sample.reward is not good
    for bad in ({"score": math.nan}, {"score": None}, {}):
        sample = export(episode, chatml_tokenizer, args=args, reward=bad)
        assert (sample.reward, sample.remove_sample) == ({"score": 0.0}, True)
    failed = export(await play(chatml_tokenizer, []), chatml_tokenizer, args=args, failure_reward=-1.0)
    assert failed.reward == {"score": -1.0}


# --- several sequences ---


async def test_without_fan_out_the_latest_sequence_is_the_sample(chatml_tokenizer):
    episode = await forked(chatml_tokenizer)
    sample = export(episode, chatml_tokenizer)
    assert sample.tokens == episode.trajectory.latest_main_sequence().token_ids
    assert sample.metadata["strands_sglang"]["other_sequences"] == 1


async def test_fan_out_trains_every_token_once_and_keeps_the_sample_object(chatml_tokenizer):
    episode = await forked(chatml_tokenizer)
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
    episode = await forked(chatml_tokenizer)
    samples = to_slime_samples(episode.trajectory, Sample(), episode.reason, tokenizer=chatml_tokenizer, fan_out=True)
    check_rollouts([samples], slime_args(), chatml_tokenizer)


async def test_a_cut_answer_that_was_asked_for_again_is_no_sample_of_its_own(chatml_tokenizer):
    episode = await play(chatml_tokenizer, [CALL, CUT, ANSWER])
    await episode.agent.invoke_async([])
    [sample] = export(episode, chatml_tokenizer, "task_complete", fan_out=True)
    assert sample.status.name == "COMPLETED" and sample.loss_mask[-1] == 1


async def test_a_failed_rollout_fans_out_to_one_removed_sample(chatml_tokenizer):
    episode = await forked(chatml_tokenizer)
    [sample] = export(episode, chatml_tokenizer, "infrastructure_error", fan_out=True)
    assert sample.remove_sample


async def test_samples_share_nothing_with_the_trajectory(chatml_tokenizer):
    episode = await play(chatml_tokenizer, [CALL, ANSWER])
    first, second = (export(episode, chatml_tokenizer) for _ in range(2))
    first.tokens[:], first.loss_mask[:], first.rollout_log_probs[:] = [], [], []
    assert second == export(episode, chatml_tokenizer)


# --- what is missing ---


def test_an_empty_trajectory_is_a_masked_sample(chatml_tokenizer):
    args = slime_args(rollout_top_p=0.9, **moe_args())
    for reason in TerminationReason:
        sample = to_slime_samples(Trajectory(), stale_sample(), reason, tokenizer=chatml_tokenizer, args=args)
        check_rollouts(sample, args, chatml_tokenizer)
        assert (sample.status.name, sample.loss_mask, len(sample.tokens)) == ("FAILED", [0], 2)


async def test_a_prompt_that_nothing_was_sampled_for_is_cut_to_what_training_takes(chatml_tokenizer):
    episode = await play(chatml_tokenizer, [])
    args = slime_args(use_dynamic_batch_size=True, max_tokens_per_gpu=50)
    assert len(export(episode, chatml_tokenizer, args=args).tokens) == 50


async def test_a_trajectory_without_logprobs_is_an_error_that_says_what_to_set(chatml_tokenizer):
    episode = await play(chatml_tokenizer, [CALL, ANSWER], return_logprob=False)
    with pytest.raises(SlimeExportError, match="return_logprob"):
        export(episode, chatml_tokenizer)


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
async def test_a_token_whose_logprob_is_not_finite_is_not_trained(logprob, chatml_tokenizer):
    episode = await play(chatml_tokenizer, [CALL, ANSWER])
    turn = episode.trajectory.turns[-1]
    logprobs = array("d", turn.generation.logprobs)
    logprobs[2] = logprob
    turn.generation = replace(turn.generation, logprobs=logprobs)
    sample = export(episode, chatml_tokenizer)
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
def test_arguments_of_another_kind_are_errors(arguments, message, chatml_tokenizer):
    with pytest.raises((TypeError, ValueError), match=message):
        to_slime_samples(*arguments, tokenizer=chatml_tokenizer)


def test_a_reward_of_another_kind_is_an_error(chatml_tokenizer):
    with pytest.raises(TypeError, match="reward must be"):
        to_slime_samples(Trajectory(), Sample(), "task_complete", tokenizer=chatml_tokenizer, reward="1")


# --- what slime replays beside the tokens: routed experts, and the ids that top-p kept ---


# --- routed experts ---

MOE = {"server": {"experts": EXPERTS}, "return_routed_experts": True}


async def test_routed_experts_have_the_row_of_every_token_but_the_last(chatml_tokenizer):
    args = slime_args(**moe_args())
    episode = await play(chatml_tokenizer, [CALL, CALL, ANSWER], **MOE)
    sample = export(episode, chatml_tokenizer, args=args)
    assert sample.rollout_routed_experts.dtype == torch.int32
    assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, EXPERTS.layers, EXPERTS.top_k)
    last = torch.from_numpy(episode.trajectory.turns[-1].generation.expert_ids().copy())
    assert sample.rollout_routed_experts.reshape(last.shape).equal(last)


async def test_sequences_that_fork_have_their_own_rows(chatml_tokenizer):
    episode = await forked(chatml_tokenizer, **MOE)
    samples = export(episode, chatml_tokenizer, args=slime_args(**moe_args()), fan_out=True)
    assert len(samples) == 2


async def test_a_sequence_that_forks_one_token_before_an_odd_stop_has_its_own_rows(chatml_tokenizer):
    stops = [chatml_tokenizer.convert_tokens_to_ids(stop) for stop in ("<|im_end|>", "<|endoftext|>")]
    odd = ScriptedAnswer(CALL, stop_token_id=stops[1])
    episode = await play(
        chatml_tokenizer,
        [odd, odd, ANSWER],
        server={"experts": EXPERTS, "stop_token_ids": stops},
        return_routed_experts=True,
    )
    samples = export(episode, chatml_tokenizer, args=slime_args(**moe_args()), fan_out=True)
    assert len(samples) == 3
    check_against_server(samples, episode.server, experts=EXPERTS, all_trained=True)


async def test_rows_of_sampled_tokens_are_those_of_the_call_that_sampled_them(chatml_tokenizer):
    episode = await play(chatml_tokenizer, [CALL, ANSWER], **MOE)
    first, second = (turn.generation.expert_ids() for turn in episode.trajectory.turns)
    episode.trajectory.turns[0].generation = replace(
        episode.trajectory.turns[0].generation,
        routed_experts=_encoded((first + 1) % EXPERTS.experts),
    )
    sample = to_slime_samples(
        episode.trajectory, Sample(), "task_complete", tokenizer=chatml_tokenizer, args=slime_args(**moe_args())
    )
    rows = sample.rollout_routed_experts.reshape(len(second), -1).numpy()
    assert (rows[: len(first)] == (first + 1) % EXPERTS.experts).all()
    assert (rows[len(first) :] == second[len(first) :]).all()


def _encoded(rows: Any) -> str:
    import base64

    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


@pytest.mark.parametrize("missing", [0, 1])
async def test_rows_that_one_call_left_out_are_in_the_next_or_the_sample_is_removed(missing, chatml_tokenizer):
    args = slime_args(**moe_args())
    episode = await play(chatml_tokenizer, [CALL, CUT], **MOE)
    turn = episode.trajectory.turns[missing]
    turn.generation = replace(turn.generation, routed_experts=None)
    sample = to_slime_samples(
        episode.trajectory, stale_sample(), "max_tokens_reached", tokenizer=chatml_tokenizer, args=args
    )
    check_rollouts(sample, args, chatml_tokenizer)
    assert sample.remove_sample is (missing == 1)


async def test_experts_of_another_model_are_an_error(chatml_tokenizer):
    episode = await play(chatml_tokenizer, [ANSWER], **MOE)
    with pytest.raises(SlimeExportError, match="another model's"):
        export(episode, chatml_tokenizer, args=slime_args(**moe_args(num_layers=2)))


async def test_experts_that_were_not_asked_for_are_an_error(chatml_tokenizer):
    episode = await play(chatml_tokenizer, [ANSWER])
    with pytest.raises(SlimeExportError, match="return_routed_experts"):
        export(episode, chatml_tokenizer, args=slime_args(**moe_args()))
    with pytest.raises(SlimeExportError, match="num_layers"):
        export(episode, chatml_tokenizer, args=slime_args(use_rollout_routing_replay=True))
    assert export(episode, chatml_tokenizer, args=slime_args(**moe_args()), evaluation=True)


# --- top-p ---

TOP_P = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}


async def test_top_p_ids_are_those_of_the_trained_tokens(chatml_tokenizer, monkeypatch):
    tell_top_p(monkeypatch)
    args = slime_args(rollout_top_p=0.9)
    episode = await play(chatml_tokenizer, [CALL, CALL, ANSWER], sampling_params=TOP_P)
    sample = export(episode, chatml_tokenizer, args=args)
    offsets, ids = sample.rollout_top_p_token_offsets.tolist(), sample.rollout_top_p_token_ids.tolist()
    response = sample.tokens[-sample.response_length :]
    for number, (token, mask) in enumerate(zip(response, sample.loss_mask, strict=True)):
        assert ids[offsets[number] : offsets[number + 1]] == ([token, *range(token % 3)] if mask else [])
    branches = export(await forked(chatml_tokenizer, sampling_params=TOP_P), chatml_tokenizer, args=args, fan_out=True)
    assert len(branches) == 2


STOCK = {"request_fields": {"return_sampling_mask": True}, "sampling_params": {"top_p": 0.9, "top_k": 7}}


@pytest.mark.parametrize("answers", [[CALL, CALL, ANSWER], [CALL, CUT, ANSWER]], ids=["whole", "resumed"])
async def test_sampling_masks_of_the_stock_server_are_replayed(answers, chatml_tokenizer):
    """Item 6: slime's top-p replay without slime's SGLang."""
    episode = await play(chatml_tokenizer, answers, on_abort="resume", **STOCK)
    sample = export(episode, chatml_tokenizer, args=slime_args(rollout_top_p=0.9))
    offsets, ids = sample.rollout_top_p_token_offsets.tolist(), sample.rollout_top_p_token_ids.tolist()
    told = [
        row for response in episode.server.responses for row in response.body["meta_info"]["output_token_sampling_mask"]
    ]
    rows = [ids[start:stop] for start, stop in pairwise(offsets)]
    assert [row for row, mask in zip(rows, sample.loss_mask, strict=True) if mask] == told
    assert not any(row for row, mask in zip(rows, sample.loss_mask, strict=True) if not mask)


async def test_tokens_of_an_aborted_part_without_top_p_ids_are_masked_and_the_others_trained(chatml_tokenizer):
    episode = await play(chatml_tokenizer, [CUT, ANSWER], on_abort="resume", **STOCK)
    (turn,) = episode.trajectory.turns
    cut = len(episode.server.responses[0].body["output_ids"])
    mask = turn.generation.sampling_mask
    unknown = joined_mask([(None, cut), (mask.part(cut, len(mask)), len(mask) - cut)])
    turn.generation = replace(turn.generation, sampling_mask=unknown)
    sample = export(episode, chatml_tokenizer, args=slime_args(rollout_top_p=0.9))
    assert sample.loss_mask == [0] * cut + [1] * (len(mask) - cut)


@pytest.mark.parametrize("end", ENDS)
async def test_every_end_has_top_p_ids_in_slimes_shapes(end, chatml_tokenizer, monkeypatch):
    tell_top_p(monkeypatch)
    answers, settings, *_ = ENDS[end]
    episode = await play(chatml_tokenizer, answers, sampling_params=TOP_P, **settings)
    export(episode, chatml_tokenizer, args=slime_args(rollout_top_p=0.9))


async def test_top_p_ids_that_nobody_asked_for_are_an_error_and_those_of_an_abort_are_masked(chatml_tokenizer):
    args = slime_args(rollout_top_p=0.9)
    with pytest.raises(SlimeExportError, match="top_p_token_ids"):
        export(await play(chatml_tokenizer, [ANSWER]), chatml_tokenizer, args=args)
    sample = export(await play(chatml_tokenizer, [CUT]), chatml_tokenizer, args=args, abort_requested=True)
    assert not any(sample.loss_mask)
    assert export(await play(chatml_tokenizer, [ANSWER]), chatml_tokenizer, args=args, evaluation=True)


async def test_top_p_ids_that_do_not_belong_to_the_tokens_take_them_out_of_the_mask(chatml_tokenizer):
    episode = await play(chatml_tokenizer, [CALL, ANSWER])
    for turn in episode.trajectory.turns:
        meta = {**turn.generation.meta_info, "top_p_token_ids": [1], "top_p_token_offsets": [0, 1]}
        turn.generation = replace(turn.generation, meta_info=meta)
    sample = export(episode, chatml_tokenizer, "max_tokens_reached", args=slime_args(rollout_top_p=0.9))
    assert not any(sample.loss_mask)


@pytest.mark.parametrize("missing", ["top_p", "experts", "logprobs"])
async def test_a_resumed_answer_whose_aborted_part_lacks_something_is_no_error(missing, chatml_tokenizer):
    """C1: one abort in the server's waiting queue failed the whole rollout."""
    answers = [ScriptedAnswer("One half", finish_reason="abort"), ScriptedAnswer(" and the other.")]
    episode = await play(chatml_tokenizer, answers, on_abort="resume")
    (turn,) = episode.trajectory.turns
    assert turn.generation.resumed_ids
    args = {"top_p": {"rollout_top_p": 0.9}, "experts": moe_args(), "logprobs": {}}[missing]
    if missing == "logprobs":
        turn.generation = replace(turn.generation, logprobs=None)
    sample = export(episode, chatml_tokenizer, args=slime_args(**args))
    assert not any(sample.loss_mask) or sample.remove_sample
    assert sample.metadata["strands_sglang"]["problems"]


# --- rewards under slime: one per rollout, asked for once, normalised within the prompt's group ---


ARGS = slime_args(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True)


def sample(group: int = 0, rollout: int = 0, reward: Any = None, **fields: Any) -> Sample:
    return Sample(group_index=group, index=rollout, rollout_id=rollout, reward=reward, **fields)


async def test_a_reward_function_is_asked_once_per_rollout_for_the_main_conversation():
    asked = []

    async def score(args: Any, one: Sample, **kwargs: Any) -> float:
        asked.append((one.label, kwargs))
        return float(one.label)

    main = {"strands_sglang": {"is_main": True}}
    side = sample(rollout=1, label="5")
    samples = [sample(rollout=1, label="1", metadata=main), side, sample(rollout=2, label="3")]
    reward = make_reward(score)
    assert await reward(ARGS, samples, extra=1) == [1.0, 1.0, 3.0]
    assert asked == [("1", {"extra": 1}), ("3", {"extra": 1})]
    assert await reward(ARGS, side) == 5.0


async def test_a_function_that_is_not_async_will_do():
    assert await make_reward(lambda args, one: 2)(ARGS, sample()) == 2


@pytest.mark.parametrize("result", [None, math.nan, math.inf, "good", {"other": 1.0}, ValueError("no")])
async def test_a_reward_that_is_none_removes_the_rollout(result, caplog):
    def score(args: Any, one: Sample) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    samples = [sample(rollout=1), sample(rollout=1)]
    assert await make_reward(score)(ARGS, samples) == [0.0, 0.0]
    assert all(one.remove_sample for one in samples) and "reward" in caplog.text
    keyed = slime_args(reward_key="score")
    assert await make_reward(score, failure_reward=-1.0)(keyed, sample()) == {"score": -1.0}


async def test_removed_samples_keep_their_reward_and_are_not_scored():
    def score(args: Any, one: Sample) -> float:
        raise AssertionError("asked")

    assert await make_reward(score)(ARGS, sample(reward=0.5, remove_sample=True)) == 0.5
    assert await make_reward(score)(ARGS, [sample(remove_sample=True)]) == [0.0]


def test_groups_are_those_of_the_prompts_and_a_rollout_counts_once():
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


def test_a_rollout_whose_main_sample_was_removed_counts_by_its_others():
    main = {"strands_sglang": {"is_main": True}}
    samples = [sample(0, 1, 9.0, metadata=main, remove_sample=True), sample(0, 1, 1.0), sample(0, 2, 0.0)]
    args = slime_args(advantage_estimator="grpo", grpo_std_normalization=False)
    assert grpo_rewards_by_group(args, samples)[1] == [0.0, 0.5, -0.5]


@pytest.mark.parametrize("reward", [None, math.nan])
def test_a_sample_that_comes_without_a_reward_is_removed(reward):
    samples = [sample(0, 1, 1.0), sample(0, 2, reward), sample(0, 3, 0.0)]
    raw, trained = grpo_rewards_by_group(ARGS, samples)
    assert samples[1].remove_sample and raw[1] == trained[1] == 0.0
    assert trained[0] == -trained[2] > 0


def test_rewards_are_left_alone_where_slime_does_not_normalise_them():
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
def test_how_often_a_rollout_fans_out_changes_nobodys_advantage(groups):
    def batch(fan_out: bool) -> list[Sample]:
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
        centred = rewards - rewards.mean()
        scaled = centred / (centred.std() + 1e-6)
        own = [expected[10 * number + place] for place in range(len(group))]
        assert own == pytest.approx(scaled.tolist(), abs=1e-6)


async def test_rewards_that_hang_take_no_thread_from_others():
    """B8: a sync reward ran in the loop's few threads, which everything in the process shares."""
    release = threading.Event()
    hanging = [asyncio.ensure_future(make_reward(lambda args, one: release.wait())(ARGS, sample())) for _ in range(64)]
    try:
        assert await asyncio.wait_for(make_reward(lambda args, one: 0.5)(ARGS, sample()), 60) == 0.5
    finally:
        release.set()
        await asyncio.gather(*hanging)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), StopIteration(), asyncio.CancelledError()])
async def test_whatever_a_reward_raises_removes_its_sample(error):
    def score(args: Any, one: Sample) -> Any:
        raise error

    one = sample()
    assert await make_reward(score)(ARGS, one) == 0.0 and one.remove_sample


# --- what slime reads of rewards that failed ---

KEYS = {"reward_key": "score", "eval_reward_key": "acc", "log_reward_category": "pred"}


@pytest.mark.parametrize("names", [set(), {"reward_key"}, {"reward_key", "eval_reward_key"}, set(KEYS)])
@pytest.mark.parametrize("evaluation", [False, True])
async def test_a_failed_reward_has_every_key_that_slime_reads(names, evaluation, chatml_tokenizer):
    """C2: one failed episode raised KeyError or TypeError in slime."""
    args = slime_args(**{name: KEYS[name] for name in names})

    def broken(args: Any, one: Sample) -> Any:
        raise RuntimeError("the grader is down")

    failed = export(await play(chatml_tokenizer, []), chatml_tokenizer, args=args, evaluation=evaluation)
    ungraded = export(await play(chatml_tokenizer, [ANSWER]), chatml_tokenizer, args=args, evaluation=evaluation)
    for reward in (failed.reward, await make_reward(broken)(args, failed), await make_reward(broken)(args, ungraded)):
        check_reward_is_readable(args, reward, evaluation=evaluation)


def check_reward_is_readable(args: Any, reward: Any, *, evaluation: bool) -> None:
    """Read a reward as slime does, in training, in evaluations and in its metrics."""
    key = (getattr(args, "eval_reward_key", None) if evaluation else None) or getattr(args, "reward_key", None)
    assert (reward[key] if key else reward) == 0.0
    if getattr(args, "log_reward_category", None):
        assert reward[args.log_reward_category] == "failed"


async def test_an_evaluation_may_have_a_reward_key_of_its_own(chatml_tokenizer):
    """C2."""
    args = slime_args(eval_reward_key="acc")
    episode = await play(chatml_tokenizer, [ANSWER])
    failed = export(await play(chatml_tokenizer, []), chatml_tokenizer, args=args, evaluation=True)
    assert failed.reward == {"acc": 0.0}
    graded = export(episode, chatml_tokenizer, args=args, evaluation=True)
    assert await make_reward(lambda args, one: {"acc": True})(args, graded) == {"acc": True}
    assert export(await play(chatml_tokenizer, []), chatml_tokenizer, args=args).reward == 0.0


# --- the filter ---


def test_the_filter_leaves_removed_samples_out():
    """C6: seven right answers and one failure passed slime's own filter, and no advantage was left."""
    right = [sample(rollout=n, reward=1.0) for n in range(7)]
    failed = sample(rollout=7, reward=0.0, remove_sample=True)
    assert not check_reward_nonzero_std(ARGS, [*right, failed])
    assert not any(grpo_rewards_by_group(ARGS, [*right, failed])[1])
    assert check_reward_nonzero_std(ARGS, [*right, sample(rollout=8, reward=0.0)])
    assert not check_reward_nonzero_std(ARGS, [failed]) and not check_reward_nonzero_std(ARGS, right[:1])


def test_the_filter_takes_lists_and_counts_a_rollout_once():
    """C3: slime's filter raised AttributeError with `fan_out`."""
    one = [sample(rollout=1, reward=1.0), sample(rollout=1, reward=1.0)]
    keyed = slime_args(reward_key="score")
    assert not check_reward_nonzero_std(ARGS, [one])
    assert check_reward_nonzero_std(ARGS, [one, [sample(rollout=2, reward=0.5)]])
    assert check_reward_nonzero_std(keyed, [sample(rollout=n, reward={"score": float(n)}) for n in range(2)])
