"""What is read from recorded episodes of every kind."""

import numpy as np
import pytest

from strands_sglang.inspection.reading import UnreadableError, read
from support.agents import call, make_agent


def test_a_trajectory_is_read_with_its_turns_and_sequences(rollout, tmp_path):
    _, model = rollout([call(expression="2+2"), "The answer is 4."])
    make_agent(model)("What is 2+2?")
    model.trajectory.save(tmp_path / "one.safetensors")

    (group,) = read([tmp_path / "one.safetensors"])

    (episode,) = group.episodes
    (sequence,) = episode.sequences
    (exact,) = model.trajectory.sequences()
    assert episode.column(sequence, "ids").tolist() == exact.token_ids
    assert sequence.mask.tolist() == exact.loss_mask
    assert [turn.branching.value for turn in episode.turns] == ["opens", "extends"]
    sampled = np.concatenate([turn.sampled.logprobs for turn in episode.turns]).tolist()
    assert sampled == [value for value, mask in zip(exact.logprobs, exact.loss_mask, strict=True) if mask]


def test_a_file_of_another_kind_is_named_in_one_line(tmp_path):
    (tmp_path / "notes.safetensors").write_bytes(b"hello")

    with pytest.raises(UnreadableError, match=r"notes\.safetensors: not a safetensors file"):
        read([tmp_path / "notes.safetensors"])
