"""`to_slime_samples`: every end of an episode becomes samples that slime can use."""

from __future__ import annotations

import copy
import math
from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from strands_sglang import OUTCOMES, TerminationReason, Trajectory
from strands_sglang.testing import ScriptedAnswer
from strands_sglang.trainers.slime import SlimeExportError, to_slime_samples
from support.slime_checker import check_against_server, check_rollouts
from support.slime_episodes import ANSWER, CALL, EXPERTS, QUESTION, moe_args, play, tell_top_p
from support.slime_stub import PrefixCacheInfo, Sample, SpecInfo, slime_args

CUT = ScriptedAnswer("25 * 17 is", finish_reason="abort")
LONG = ScriptedAnswer("25 * 17 is", finish_reason="length")


def stale_sample(**overrides: Any) -> Sample:
    """A sample that an earlier run has filled with what is wrong now."""
    fields = {
        "index": 3,
        "group_index": 1,
        "prompt": QUESTION,
        "tokens": [9] * 50,
        "response": "stale",
        "response_length": 40,
        "loss_mask": [1] * 7,
        "rollout_log_probs": [math.nan] * 3,
        "weight_versions": ["stale"],
        "reward": 7.0,
        "remove_sample": True,
        "teacher_log_probs": [0.5],
        "rollout_top_p_token_ids": [1],
        "rollout_top_p_token_offsets": [0, 1],
        "rollout_routed_experts": [[1]],
        "multimodal_train_inputs": {"pixel_values": torch.zeros(1)},
        "prefix_cache_info": PrefixCacheInfo(5, 6),
        "spec_info": SpecInfo(1, 2, 3, 4),
        "non_generation_time": 99.0,
        "metadata": {"own": 1},
    }
    return Sample(**{**fields, **overrides})


def export(episode: Any, tokenizer: Any, outcome: Any = None, *, args: Any = None, **kwargs: Any) -> Any:
    """The samples of an episode, checked against slime's needs and against the server's log."""
    args = slime_args() if args is None else args
    outcome = episode.reason if outcome is None else outcome
    samples = to_slime_samples(episode.trajectory, stale_sample(), outcome, tokenizer=tokenizer, args=args, **kwargs)
    rollouts = [samples] if isinstance(samples, list) else samples
    check_rollouts(rollouts, args, tokenizer, replayed=not kwargs.get("evaluation"))
    check_against_server(samples, episode.server, experts=EXPERTS)
    return samples


ENDS: dict[str, tuple[list[Any], dict[str, Any], str, bool, Any]] = {
    "an answer": ([CALL, ANSWER], {}, "COMPLETED", False, None),
    "a limit on tokens": ([CALL, LONG], {}, "TRUNCATED", False, None),
    "a limit on tools": ([CALL] * 3, {}, "TRUNCATED", False, None),
    "a full context": ([CALL, LONG], {"server": {"context_length": 330}}, "TRUNCATED", False, None),
    "an abort nobody asked for": ([CALL, CUT], {}, "TRUNCATED", True, 0.0),
    "a first call that was aborted": ([CUT], {}, "TRUNCATED", True, 0.0),
    "an error of the server": ([CALL], {}, "FAILED", True, 0.0),
    "an error in the first call": ([], {}, "FAILED", True, 0.0),
    "a prompt that does not fit": ([], {"server": {"context_length": 20}}, "FAILED", True, 0.0),
    "an abort in the queue": ([ScriptedAnswer("", finish_reason="abort")], {}, "FAILED", True, 0.0),
}


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
    unfinished = copy.copy(last)
    unfinished.parent, unfinished.generation, unfinished.index = last, None, 2
    unfinished.status = type(last.status).ASKED
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


async def forked(tokenizer: Any, **settings: Any) -> Any:
    """An episode whose history was rewritten, so that it has two sequences with a common beginning."""
    episode = await play(tokenizer, [CALL, ANSWER, "Other words."], **settings)
    agent = episode.agent
    agent.messages[2]["content"][0]["toolResult"]["content"] = [{"text": "(shortened)"}]
    await agent.invoke_async("And now?")
    return episode


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
    tell_top_p(None, monkeypatch)
    args = slime_args(rollout_top_p=0.9)
    episode = await play(chatml_tokenizer, [CALL, CALL, ANSWER], sampling_params=TOP_P)
    sample = export(episode, chatml_tokenizer, args=args)
    offsets, ids = sample.rollout_top_p_token_offsets.tolist(), sample.rollout_top_p_token_ids.tolist()
    response = sample.tokens[-sample.response_length :]
    for number, (token, mask) in enumerate(zip(response, sample.loss_mask, strict=True)):
        assert ids[offsets[number] : offsets[number + 1]] == ([token, *range(token % 3)] if mask else [])
    branches = export(await forked(chatml_tokenizer, sampling_params=TOP_P), chatml_tokenizer, args=args, fan_out=True)
    assert len(branches) == 2


@pytest.mark.parametrize("end", ENDS)
async def test_every_end_has_top_p_ids_in_slimes_shapes(end, chatml_tokenizer, monkeypatch):
    tell_top_p(None, monkeypatch)
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
