"""The credit audit: what each turn contributes to an update, and what each trainer receives of it.

The amounts are sums over trained tokens of |advantage x weight|. A trainer receives each advantage times the weight w_s
of its row, and its loss then scales the sum by its own factor; the product is the same for every trainer. Losses
with the same factor share a column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..credit import LARGEST_REWARD, LOSSES, Batch, Normalizer, TrainingRow, TrainingRows, group_advantages
from ..inspection.records import Episode, Group, SequenceRecord
from ..trajectory.tokens import TokenManager
from .stores import fitted, short_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

NORMALIZERS: tuple[Normalizer, ...] = ("episode_mean", "token_mean", "constant")


def advantages_of(group: Group) -> dict[str, dict[int, float]]:
    """Return the advantages of the turns of a group's episodes, by id and position of the turn, from their rewards.

    They are the rewards minus the group's mean: what a file without advantages implies.
    """
    scored = [
        episode
        for episode in group.episodes
        if episode.reward is not None and abs(episode.reward) <= LARGEST_REWARD and not episode.left_out
    ]
    if len(scored) < 2:
        return {}
    values = group_advantages([episode.reward or 0.0 for episode in scored])
    return {
        episode.id: dict.fromkeys(range(len(episode.turns)), value)
        for episode, value in zip(scored, values, strict=True)
    }


def audit_credit(groups: Sequence[Group], numbers: Mapping[tuple[str, str, str], int]) -> list[dict[str, Any]]:
    """Return the audits, one per file that trains.

    Args:
        groups: The episodes.
        numbers: Number of each episode in the page, by file, group and id.
    """
    files: dict[str, list[Group]] = {}
    for group in groups:
        files.setdefault(group.file, []).append(group)
    if all(len(own) == 1 and len(own[0].episodes) == 1 for own in files.values()):
        return []
    audits = [_audit(file, own, numbers) for file, own in files.items()]
    return [audit for audit in audits if audit is not None]


def _audit(file: str, groups: Sequence[Group], numbers: Mapping[tuple[str, str, str], int]) -> dict[str, Any] | None:
    rows: list[TrainingRow] = []
    episodes: list[dict[str, Any]] = []
    for group in groups:
        computed = advantages_of(group)
        for episode in group.episodes:
            own = []
            for at, sequence in enumerate(episode.sequences):
                amounts = _amounts(episode, sequence, computed.get(episode.id))
                if amounts is not None:
                    own.append({"sequence": at, "row": len(rows), **amounts})
                    rows.append(_row(group, episode, sequence))
            episodes.append(
                {
                    "name": episode.id,
                    "episode": numbers[(group.file, group.id, episode.id)],
                    "rows": own,
                    "note": None if own else episode.left_out or "no advantage, or no trained token",
                }
            )
    if not rows:
        return None
    longest = max(map(len, rows))
    batch = Batch(rows, micro_batches=[list(range(len(rows)))], max_length=longest)
    return {
        "name": short_name(file),
        "caption": (
            f"{batch.episodes} episodes in {len(rows)} rows, {batch.trained:,} trained tokens. Weights are those of "
            f"one micro-batch and a maximum length of {longest:,} tokens; advantages are the file's, else the reward "
            "minus the mean of its group."
        ),
        "recorded": any("recorded" in row for episode in episodes for row in episode["rows"]),
        "normalizers": {name: _normalized(rows, batch, name) for name in NORMALIZERS},
        "episodes": episodes,
    }


def _amounts(episode: Episode, sequence: SequenceRecord, computed: Mapping[int, float] | None) -> dict[str, Any] | None:
    """Return the sums of |advantage| of a sequence and its turns; None if nothing is trained or known."""
    import numpy as np

    mask = np.asarray(sequence.mask) > 0
    if not mask.any() or (sequence.advantages is None and computed is None):
        return None
    if sequence.advantages is None:
        given = computed or {}
        sizes = np.concatenate(
            [np.full(step.stop - step.start, abs(given.get(step.turn, 0.0))) for step in sequence.steps]
        )
    else:
        sizes = _sizes(sequence.advantages, len(mask))
    weighted = None
    if sequence.weights is not None and sequence.advantages is not None:
        weighted = sizes * _sizes(sequence.weights, len(mask))
    turns = []
    for step in sequence.steps:
        own = np.flatnonzero(mask[step.start : step.stop]) + step.start
        turn: dict[str, Any] = {
            "turn": step.turn,
            "number": episode.turns[step.turn].number,
            "tokens": len(own),
            "abs": float(sizes[own].sum()),
        }
        if weighted is not None:
            turn["recorded"] = float(weighted[own].sum())
        if turn["tokens"]:
            turns.append(turn)
    sums = {name: sum(turn[name] for turn in turns) for name in ("tokens", "abs")}
    if turns and "recorded" in turns[0]:
        sums["recorded"] = sum(turn["recorded"] for turn in turns)
    return {**sums, "turns": turns}


def _sizes(values: NDArray[Any], length: int) -> NDArray[Any]:
    """Return the sizes of a column's values, 0.0 where a value is unknown."""
    import numpy as np

    return np.abs(np.nan_to_num(fitted(np.asarray(values, np.float64), length, 0.0), posinf=0.0, neginf=0.0))


def _row(group: Group, episode: Episode, sequence: SequenceRecord) -> TrainingRow:
    """Return a row with what its weight depends on: its length and the numbers of trained tokens."""
    trained = int((sequence.mask > 0).sum())
    return TrainingRow(
        episode=f"{group.id}/{episode.id}",
        group=group.id,
        tokens=TokenManager(),
        token_ids=[0] * max(2, len(sequence)),  # a lone token has no target, and no loss could take its row
        loss_mask=[],
        logprobs=[],
        versions=[],
        advantages=[],
        spans=[],
        prompt_length=0,
        trained=trained,
        episode_trained=sum(int((one.mask > 0).sum()) for one in episode.sequences),
        episode_version=None,
    )


def _normalized(rows: Sequence[TrainingRow], batch: Batch, normalizer: Normalizer) -> dict[str, Any]:
    """Return per loss the weights of the rows and the factors of its reduction, and the exact factors."""
    reductions: dict[Callable[[Batch, int], float], list[str]] = {}
    for name, reduction in LOSSES.items():
        reductions.setdefault(reduction, []).append(name)
    training = TrainingRows(rows, {}, [], {}, {})
    losses: list[dict[str, Any]] = []
    for reduction, names in reductions.items():
        weights = training.weights(
            normalizer,
            names[0],
            constant=batch.max_length,
            micro_batches=batch.micro_batches,
            max_length=batch.max_length,
        )
        losses.append(
            {"names": names, "weights": weights, "reductions": [reduction(batch, at) for at in range(len(rows))]}
        )
    first = losses[0]
    exact = [weight * factor for weight, factor in zip(first["weights"], first["reductions"], strict=True)]
    return {"losses": losses, "exact": exact}
