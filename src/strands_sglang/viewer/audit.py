"""The credit audit: what each turn contributes to an update, and what each trainer receives of it.

The amounts are sums over trained tokens of |advantage x weight|. A trainer receives each advantage times the weight w_s
of its row, and its loss then scales the sum by its own factor; the product is the same for every trainer. Losses
with the same factor share a column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from ..credit import LARGEST_REWARD, Batch, Normalizer, TrainingRow, TrainingRows, group_advantages, losses
from ..inspection.records import Group, TokenSequence
from ..trajectory.tokens import TokenManager
from .stores import short_name

NORMALIZERS: tuple[Normalizer, ...] = ("episode_mean", "token_mean", "constant")


def advantages_of(group: Group) -> dict[str, float]:
    """Return the advantages of a group's episodes by id, from their rewards.

    They are the rewards minus the group's mean: what a file without advantages implies. An evaluation trains nothing.
    """
    if group.kind == "evaluation":
        return {}
    rewards = {
        episode.id: episode.end.reward
        for episode in group.episodes
        if episode.end.reward is not None and abs(episode.end.reward) <= LARGEST_REWARD and not episode.left_out
    }
    if len(rewards) < 2:
        return {}
    return dict(zip(rewards, group_advantages(list(rewards.values())), strict=True))


def audit_credit(groups: Sequence[Group], numbers: Mapping[tuple[str, str, str], int]) -> list[dict[str, Any]]:
    """Return the audits, one per file that trains.

    Args:
        groups: The episodes.
        numbers: Number of each episode in the page, by file, group and id.
    """
    files: dict[str, list[Group]] = {}
    for group in groups:
        files.setdefault(group.file, []).append(group)
    if all(len(groups) == 1 and len(groups[0].episodes) == 1 for groups in files.values()):
        return []
    audits = [_audit(file, groups, numbers) for file, groups in files.items()]
    return [audit for audit in audits if audit is not None]


def _audit(file: str, groups: Sequence[Group], numbers: Mapping[tuple[str, str, str], int]) -> dict[str, Any] | None:
    rows: list[TrainingRow] = []
    trained_sequences: list[TokenSequence] = []
    episodes: list[dict[str, Any]] = []
    for group in groups:
        computed = advantages_of(group)
        for episode in group.episodes:
            entries = []
            positions = {id(turn): position for position, turn in enumerate(episode.turns)}
            trained = sum(int((sequence.mask > 0).sum()) for sequence in episode.sequences)
            for at, sequence in enumerate(episode.sequences):
                amounts = _amounts(sequence, computed.get(episode.id), positions)
                if amounts is not None:
                    entries.append({"sequence": at, "row": len(rows), **amounts})
                    trained_sequences.append(sequence)
                    rows.append(_sized_row(f"{group.id}/{episode.id}", len(sequence), amounts["tokens"], trained))
            note = "no advantage, or no trained token" if episode.left_out is None else str(episode.left_out)
            episodes.append(
                {
                    "name": episode.name,
                    "episode": numbers[(group.file, group.id, episode.id)],
                    "rows": entries,
                    "note": None if entries else note,
                }
            )
    if not rows:
        return None
    given = [sequence.row.loss_weight if sequence.row is not None else None for sequence in trained_sequences]
    longest = max(map(len, rows))
    batch = Batch(rows, micro_batches=[list(range(len(rows)))], max_length=longest)
    normalizers: dict[str, Any] = {name: _normalized(rows, batch, name) for name in NORMALIZERS}
    return {
        "name": short_name(file),
        "trainer": _trainer(given, normalizers),
        "caption": (
            f"{batch.episodes} episodes in {len(rows)} rows, {batch.trained:,} trained tokens. Weights are those of "
            f"one micro-batch and a maximum length of {longest:,} tokens; advantages are the file's, else the reward "
            "minus the mean of its group."
        ),
        "recorded": any("recorded" in row for row in chain.from_iterable(episode["rows"] for episode in episodes)),
        "normalizers": normalizers,
        "episodes": episodes,
    }


def _trainer(given: Sequence[float | None], normalizers: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the normalizer and the losses whose weights most rows of a file have; None if there are none such."""
    known, most = None, len(given) // 2
    for name, normalized in normalizers.items():
        for loss in normalized["losses"]:
            pairs = zip(given, loss["weights"], strict=True)
            fitting = sum(weight is not None and math.isclose(weight, wanted, rel_tol=1e-6) for weight, wanted in pairs)
            if fitting > most:
                known, most = {"normalizer": name, "loss": loss["names"]}, fitting
    return known


def _amounts(sequence: TokenSequence, computed: float | None, positions: Mapping[int, int]) -> dict[str, Any] | None:
    """Return the sums of |advantage| of a sequence and its turns; None if nothing is trained or known."""
    import numpy as np

    given = sequence.given("advantages")
    weight = None if sequence.row is None else sequence.row.loss_weight
    if not sequence.mask.any() or (given is None and computed is None):
        return None
    sizes = np.full(len(sequence), abs(computed or 0.0))
    if given is not None:
        sizes = np.abs(np.nan_to_num(given, posinf=0.0, neginf=0.0))
    turns = []
    for step in sequence.steps:
        trained = np.flatnonzero(sequence.mask[step.start : step.stop]) + step.start
        turn: dict[str, Any] = {"turn": positions[id(step.turn)], "number": step.turn.index, "tokens": len(trained)}
        turn["abs"] = float(sizes[trained].sum())
        if weight is not None and given is not None:
            turn["recorded"] = turn["abs"] * abs(weight) if math.isfinite(weight) else 0.0
        if len(trained):
            turns.append(turn)
    names = [name for name in ("tokens", "abs", "recorded") if name in turns[0]]
    sums: dict[str, Any] = {name: sum(turn[name] for turn in turns) for name in names}
    return {**sums, "turns": turns}


def _sized_row(episode: str, length: int, trained: int, episode_trained: int) -> TrainingRow:
    """Return a row with what its weight depends on: its length and the numbers of trained tokens."""
    return TrainingRow(
        episode=episode,
        group=None,
        tokens=TokenManager(),
        token_ids=[0] * max(2, length),  # a lone token has no target, and no loss could take its row
        loss_mask=[],
        logprobs=[],
        versions=[],
        advantages=[],
        spans=[],
        prompt_length=0,
        trained=trained,
        episode_trained=episode_trained,
        episode_version=None,
    )


def _normalized(rows: Sequence[TrainingRow], batch: Batch, normalizer: Normalizer) -> dict[str, Any]:
    """Return per loss the weights of the rows and the factors of its reduction, and the exact factors."""
    reductions: dict[Callable[[Batch, int], float], list[str]] = {}
    for name, reduction in losses().items():
        reductions.setdefault(reduction, []).append(name)
    training = TrainingRows(rows, {}, [], {}, {})
    reduced: list[dict[str, Any]] = []
    for reduction, names in reductions.items():
        weights = training.weights(
            normalizer,
            names[0],
            constant=batch.max_length,
            micro_batches=batch.micro_batches,
            max_length=batch.max_length,
        )
        reduced.append(
            {"names": names, "weights": weights, "reductions": [reduction(batch, at) for at in range(len(rows))]}
        )
    first = reduced[0]
    exact = [weight * factor for weight, factor in zip(first["weights"], first["reductions"], strict=True)]
    return {"losses": reduced, "exact": exact}
