"""Tinker's own data type holds our rows, shifted by one, with an advantage per token."""

from dataclasses import replace

import pytest

from strands_sglang.credit import training_rows
from strands_sglang.trainers.tinker import to_data
from trainers import paper


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    first, *others = paper.episodes(paper.tiny_model(tmp_path_factory.mktemp("model")))
    return [replace(first, turn_rewards={0: 0.5}), *others]


@pytest.mark.parametrize("loss", ["tinker", "tinker:skyrl:weights"])
@pytest.mark.parametrize("normalizer", paper.NORMALIZERS)
def test_data_hold_the_rows(episodes, loss, normalizer):
    rows = training_rows(episodes)
    data = to_data(rows, normalizer, loss=loss, constant=paper.CONSTANT)
    weights = rows.weights(normalizer, loss, constant=paper.CONSTANT)
    assert len(data) == len(rows) == 8
    for datum, row, weight in zip(data, rows, weights, strict=True):
        inputs = {name: column.tolist() for name, column in datum.loss_fn_inputs.items()}
        assert datum.model_input.to_ints() == row.token_ids[:-1]
        assert inputs["target_tokens"] == row.token_ids[1:]
        assert inputs["logprobs"] == pytest.approx(row.logprobs[1:], rel=1e-6)
        assert inputs["advantages"] == pytest.approx([weight * one for one in row.advantages[1:]], rel=1e-6)
        assert ("weights" in inputs) == (loss == "tinker:skyrl:weights")
        assert inputs.get("weights", row.loss_mask[1:]) == row.loss_mask[1:]


def test_losses_of_other_trainers_are_refused(episodes):
    with pytest.raises(ValueError, match="is not one of Tinker's"):
        to_data(training_rows(episodes), loss="trl:grpo")
