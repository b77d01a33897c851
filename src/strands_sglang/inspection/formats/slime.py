"""From slime's rollout dumps (`--save-debug-rollout-data`) to `Group`s."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...credit import TrainingRow, TurnSpan
from ...trajectory.tokens import TokenManager
from ...trajectory.trajectory import EpisodeEnd, Trajectory
from ..records import Group, Inspected, TokenSequence, UnreadableError, group_of
from .steps import turns_of_row


def read_dump(path: Path) -> list[Group]:
    """Read a rollout dump: a group per `group_index`, an episode per rollout, a sequence per sample.

    Raises:
        OSError: The file cannot be read.
        UnreadableError: It is not a rollout dump.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise UnreadableError(f"{path}: a rollout dump of slime needs PyTorch: pip install torch") from error
    groups: dict[Hashable, Group] = {}
    episodes: dict[tuple[str, Any], Inspected] = {}
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)  # runs no code of the file
        for place, sample in enumerate(content["samples"]):
            group = group_of(groups, sample.get("group_index"), "slime", path)
            rollout = next((sample[key] for key in ("rollout_id", "index") if sample.get(key) is not None), place)
            if (group.id, rollout) not in episodes:
                episode = Inspected(str(rollout), Trajectory(), str(path), has_trajectory=False)
                episodes[group.id, rollout] = episode
                group.episodes.append(episode)
            _add_sample(episodes[group.id, rollout], sample)
    except OSError:
        raise
    except Exception as error:  # a pickle of anything
        what = str(error).strip().splitlines() or [""]
        raise UnreadableError(f"{path}: not a slime rollout dump: {type(error).__name__}: {what[0][:200]}") from error
    return list(groups.values())


def _add_sample(episode: Inspected, sample: Mapping[str, Any]) -> None:
    ids = np.asarray(sample["tokens"], np.int32).reshape(-1).tolist()
    count = int(sample["response_length"])
    prompt = len(ids) - count
    if not 0 <= count <= len(ids):
        raise ValueError(f"response_length {count} of {len(ids)} tokens")
    columns = {"loss_mask": sample.get("loss_mask"), "rollout_log_probs": sample.get("rollout_log_probs")}
    for name, values in columns.items():
        if values is not None and len(values) != count:
            why = f"{len(values)} entries of {name} came with {count} response tokens"
            episode.problems.append(("structure", why))
            columns = {"loss_mask": [0] * count, "rollout_log_probs": None}
    known, mask = columns["rollout_log_probs"], columns["loss_mask"]
    mask = [1] * count if mask is None else np.asarray(mask, np.uint8).tolist()
    reward = sample.get("reward")
    if isinstance(reward, Mapping):
        reward = next((value for value in reward.values() if isinstance(value, int | float)), None)
    metadata = sample.get("metadata") or {}
    facts = metadata.get("strands_sglang") or {} if isinstance(metadata, Mapping) else {}
    outcome = facts.get("outcome") or episode.end.outcome
    episode.end = EpisodeEnd(outcome, None if reward is None else float(reward))
    row = TrainingRow(
        episode=episode.id,
        group=None,
        tokens=TokenManager(),
        token_ids=ids,
        loss_mask=[0] * prompt + mask,
        logprobs=[math.nan] * len(ids) if known is None else [math.nan] * prompt + np.asarray(known, float).tolist(),
        versions=[None] * len(ids),
        advantages=[math.nan] * len(ids),
        prompt_length=prompt,
        trained=sum(mask),
        episode_trained=sum(mask),
        episode_version=None,
        # Nothing tells what the model sampled if nothing is trained: the response is then one turn.
        spans=[] if any(mask) else [TurnSpan(0, prompt, count, None)],
    )
    steps = turns_of_row(row)
    episode.turns += [step.turn for step in steps]
    number = len(episode.sequences)
    about = {name: value for name, value in sample.items() if name not in ("tokens", "loss_mask")}
    episode.sequences.append(TokenSequence(steps, np.asarray(row.loss_mask, np.uint8), row, number, about))
