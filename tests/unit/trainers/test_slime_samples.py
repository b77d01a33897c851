"""`to_slime_samples`: every end of an episode becomes samples that slime can use."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import pytest
import torch

from strands_sglang import OUTCOMES, TerminationReason, Trajectory
from strands_sglang.trainers.slime import SlimeExportError, to_slime_samples
from support.slime_checker import check_against_server, check_rollouts
from support.slime_episodes import (
    ANSWER,
    CALL,
    CUT,
    ENDS,
    LONG,
    export,
    forked,
    moe_args,
    play,
    stale_sample,
)
from support.slime_stub import Sample, SpecInfo, slime_args


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
