"""How far the sampler's logprobs are from the trainer's, and that a sampling mask removes what truncation adds."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from strands_sglang.credit import Episode, training_rows
from strands_sglang.mismatch import masked_logprobs, measure_mismatch, mismatch_by_episode, under_sampling_mask
from support.agents import call, make_agent, make_tools, user
from support.recorder import Recorder


def rows_with(*differences):
    """Rows of sibling episodes of two trained tokens, and what the trainer's logprobs differ by."""
    episodes = []
    for number in range(len(differences)):
        recorder = Recorder()
        recorder.call([user("q")], "a")
        episodes.append(Episode(recorder.trajectory, float(number), "g", id=f"e{number}"))
    rows = []
    for row, own in zip(training_rows(episodes, baseline=None), differences, strict=True):
        steps = iter(own)
        trainer = [
            logprob + next(steps) if mask else 7.0 for logprob, mask in zip(row.logprobs, row.loss_mask, strict=True)
        ]
        rows.append(replace(row, trainer_logprobs=trainer))
    return rows


def test_mismatch_is_over_trained_tokens_only():
    (row,) = rows_with([0.0, math.log(3)])
    found = measure_mismatch([row])
    assert found.tokens == 2
    assert found.k1 == pytest.approx(-math.log(3) / 2)
    assert found.k3 == pytest.approx((3 - 1 - math.log(3)) / 2)
    assert found.mean_difference == pytest.approx(math.log(3) / 2)
    assert (found.min_ratio, found.max_ratio) == pytest.approx((1.0, 3.0))
    assert found.max_difference == found.log_sequence_ratio == pytest.approx(math.log(3))
    assert found.outside == 0.5
    assert measure_mismatch([row], band=(0.1, 4.0)).outside == 0.0


def test_mismatch_of_each_episode():
    rows = rows_with([0.1, 0.1], [-0.2, 0.0])
    found = mismatch_by_episode(rows)
    assert list(found) == ["e0", "e1"]
    assert [one.log_sequence_ratio for one in found.values()] == pytest.approx([0.2, -0.2])
    assert measure_mismatch(rows).tokens == 4


def test_rows_without_trainer_logprobs_are_named():
    (row,) = rows_with([0.0, 0.0])
    with pytest.raises(ValueError, match="a row of episode e0 has no trainer's logprobs"):
        measure_mismatch([replace(row, trainer_logprobs=None)])
    with pytest.raises(ValueError, match="no trained token"):
        measure_mismatch([])


@given(
    st.lists(st.lists(st.integers(0, 8), max_size=6, unique=True), min_size=1, max_size=6),
    st.floats(0.3, 2.0),
    st.integers(0, 100),
)
def test_logprobs_under_a_mask_sum_to_one(rows, temperature, seed):
    """Every row is a distribution over its own ids; rows without ids are over the whole vocabulary."""
    logits = torch.randn(len(rows), 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    totals = torch.zeros(len(rows), dtype=torch.float64)
    for token in range(9):
        possible = [not ids or token in ids for ids in rows]
        mask = [ids if is_possible else [token] for ids, is_possible in zip(rows, possible, strict=True)]
        found = masked_logprobs(logits, torch.full((len(rows),), token), mask, temperature=temperature)
        totals += found.exp() * torch.tensor(possible)
    assert totals == pytest.approx(torch.ones(len(rows)).numpy())


def test_no_mask_is_the_whole_vocabulary():
    logits, ids = torch.randn(5, 11, dtype=torch.float64), torch.tensor([0, 3, 10, 3, 7])
    expected = torch.log_softmax(logits / 0.7, dim=-1).gather(1, ids[:, None])[:, 0]
    assert masked_logprobs(logits, ids, None, temperature=0.7) == pytest.approx(expected)
    assert masked_logprobs(logits, ids, [[]] * 5, temperature=0.7) == pytest.approx(expected)


def test_gradient_stays_among_the_kept_ids():
    logits = torch.randn(2, 6, requires_grad=True)
    masked_logprobs(logits, torch.tensor([1, 4]), [[1, 2], [4]]).sum().backward()
    assert torch.nonzero(logits.grad).tolist() == [[0, 1], [0, 2]]


def test_mask_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="2 tokens came with 1 rows"):
        masked_logprobs(torch.randn(2, 6), torch.tensor([1, 4]), [[1]])
    with pytest.raises(ValueError, match="token 4 at position 1 is not in its own"):
        masked_logprobs(torch.randn(2, 6), torch.tensor([1, 4]), [[1], [2, 3]])


async def test_rows_under_the_mask_have_the_samplers_logprobs(rollout):
    masks = {"request_fields": {"return_sampling_mask": True}, "sampling_params": {"top_k": 5, "top_p": 0.9}}
    _, model = rollout([call(expression="2 * 3"), "Six."], **masks)
    await make_agent(model, make_tools()[0]).invoke_async("2 times 3?")
    (row,) = training_rows([Episode(model.trajectory, 1.0, "g")], baseline=None)
    under = under_sampling_mask(row)
    known = row.tokens.sampling_logprobs
    assert [value for value, mask in zip(under.logprobs, row.loss_mask, strict=True) if mask] == [
        value for value in known if value is not None
    ]
    assert under.token_ids == row.token_ids
    assert under.logprobs != row.logprobs


async def test_rows_without_a_mask_are_refused(rollout):
    _, model = rollout(["Six."])
    await make_agent(model).invoke_async("2 times 3?")
    (row,) = training_rows([Episode(model.trajectory, 1.0, "g", id="e")], baseline=None)
    with pytest.raises(ValueError, match="trained tokens of episode e have no sampling mask"):
        under_sampling_mask(row)
