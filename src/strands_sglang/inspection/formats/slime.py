"""From slime's rollout dumps (`--save-debug-rollout-data`) to `Group`s."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..records import Episode, Group, SequenceRecord
from .steps import turns_of_row


class DumpFileError(ValueError):
    """A file is not a slime rollout dump, or cannot be read without running code that is in it."""


def read_dump(path: Path) -> list[Group]:
    """Read a rollout dump: a group per `group_index`, an episode per rollout, a sequence per sample.

    Raises:
        OSError: The file cannot be read.
        DumpFileError: It is not a rollout dump.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise DumpFileError(f"{path}: a rollout dump of slime needs PyTorch: pip install torch") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)  # runs no code of the file
        samples = content["samples"]
        groups: dict[str, Group] = {}
        episodes: dict[tuple[str, Any], Episode] = {}
        for place, sample in enumerate(samples):
            name = str(sample.get("group_index"))
            group = groups.setdefault(name, Group(name, [], kind="slime", file=str(path), is_scored=True))
            rollout = next((sample[key] for key in ("rollout_id", "index") if sample.get(key) is not None), place)
            episode = episodes.get((name, rollout))
            if episode is None:
                episode = episodes[name, rollout] = Episode(str(rollout), [], [], file=str(path))
                group.episodes.append(episode)
            _add_sample(episode, sample)
    except OSError:
        raise
    except Exception as error:  # a pickle of anything
        what = str(error).strip().splitlines() or [""]
        raise DumpFileError(f"{path}: not a slime rollout dump: {type(error).__name__}: {what[0][:200]}") from error
    for group in groups.values():
        group.facts["rollout_id"] = content.get("rollout_id")
        group.facts["has_versions"] = any(sample.get("weight_versions") for sample in samples)
        group.facts["is_scored"] = any(sample.get("reward") is not None for sample in samples)
    return list(groups.values())


def _add_sample(episode: Episode, sample: Mapping[str, Any]) -> None:
    ids = np.asarray(sample["tokens"], np.int32).reshape(-1)
    count = int(sample["response_length"])
    prompt = len(ids) - count
    if not 0 <= count <= len(ids):
        raise ValueError(f"response_length {count} of {len(ids)} tokens")
    given = sample.get("loss_mask")
    own_mask = np.ones(count, np.uint8) if given is None else np.asarray(given, np.uint8)
    known = sample.get("rollout_log_probs")
    reward = sample.get("reward")
    if isinstance(reward, Mapping):
        reward = next((value for value in reward.values() if isinstance(value, int | float)), None)
    metadata = sample.get("metadata") or {}
    facts = metadata.get("strands_sglang") or {} if isinstance(metadata, Mapping) else {}
    episode.outcome = facts.get("outcome") or episode.outcome
    episode.reward = None if reward is None else float(reward)
    lengths = {"loss_mask": len(own_mask), "rollout_log_probs": count if known is None else len(known)}
    for name, length in lengths.items():
        if length != count:
            episode.problems.append(("row-turns", f"{length} entries of {name} came with {count} response tokens"))
            own_mask, known = np.zeros(count, np.uint8), None
    # A removed sample is not trained, whatever its mask.
    mask = np.concatenate([np.zeros(prompt, np.uint8), own_mask])
    logprobs = None if known is None else np.concatenate([np.full(prompt, np.nan), np.asarray(known, np.float64)])
    row = {"token_ids": ids, "loss_mask": mask, "logprobs": logprobs}
    # The model's own start is unknown if its first tokens are masked: the response is then one turn.
    if not own_mask.any():
        steps = turns_of_row(episode, {**row, "spans": [(0, prompt, count, None)]})
    else:
        steps = turns_of_row(episode, row)
    episode.sequences.append(
        SequenceRecord(
            steps,
            mask,
            row=row,
            number=len(episode.sequences),
            reward=episode.reward,
            facts={"sample": {key: value for key, value in sample.items() if key not in ("tokens", "loss_mask")}},
        )
    )
