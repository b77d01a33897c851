"""What slime replays beside the tokens: routed experts, and the ids that top-p kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from strands_sglang.protocol.generation import joined_mask
from strands_sglang.testing import ScriptedAnswer
from strands_sglang.trainers.slime import SlimeExportError, to_slime_samples
from support.slime_checker import check_against_server, check_rollouts
from support.slime_episodes import (
    ANSWER,
    CALL,
    CUT,
    ENDS,
    EXPERTS,
    export,
    forked,
    moe_args,
    play,
    stale_sample,
    tell_top_p,
)
from support.slime_stub import Sample, slime_args

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
