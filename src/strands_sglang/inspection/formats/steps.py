"""From the folder of a training step to `Group`s: its rows, and the trajectories that they are made of."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ...credit import TrainingRow, TrainingRows
from ...protocol.generation import Generation, VersionSpan
from ...reasons import Reason
from ...trajectory.trajectory import EpisodeEnd, Trajectory
from ...trajectory.turn import Turn, TurnStatus
from ..records import Group, Inspected, Step, TokenSequence, group_of, steps_to
from .trajectories import inspect_file

ROWS = "rows.safetensors"


def read_step(folder: Path) -> list[Group]:
    """Read the folder of a training step.

    Raises:
        OSError: A file cannot be read.
        RowsFileError: The file of rows is not one, or damaged.
        TrajectoryFileError: A file among the trajectories is none.
    """
    file = folder / ROWS
    batch = TrainingRows.load(file, changed_too=True)
    by_episode: dict[str, list[tuple[int, TrainingRow]]] = {}
    for number, row in enumerate(batch):
        by_episode.setdefault(row.episode, []).append((number, row))
    names = list(dict.fromkeys([*batch.episodes, *by_episode, *batch.left_out]))
    files = {path.stem for path in (folder / "trajectories").glob("*.safetensors")}
    groups: dict[Hashable, Group] = {}
    vocabulary: dict[int, bytes] = {}
    for name in names:
        path = folder / "trajectories" / f"{name}.safetensors"
        if path.is_file():
            episode = inspect_file(path, name)
            vocabulary |= episode.trajectory.pieces
        else:
            episode = Inspected(name, Trajectory(), str(file), has_trajectory=False)
            if files.intersection(names):
                episode.problems.append(("structure", f"its file trajectories/{name}.safetensors is missing"))
        episode.step = folder.absolute().name
        rows = by_episode.get(name, [])
        known: Mapping[str, Any] = batch.episodes.get(name) or {}
        group = known.get("group", rows[0][1].group if rows else None)
        for number, row in rows:
            if row.group != group:
                problem = f"row {number} is of group {row.group!r}, and its episode of {group!r}"
                episode.problems.append(("group", problem))
        episode.left_out = batch.left_out.get(name)
        episode.in_batch = name in batch.episodes
        if known:
            episode.end = replace(
                episode.end,
                outcome=known["outcome"] or episode.end.outcome,
                reward=known["reward"],
                turn_rewards=known["turn_rewards"],
            )
        else:
            episode.end = EpisodeEnd(episode.end.outcome, batch.rewards.get(name, episode.end.reward))
        _add_rows(episode, rows)
        group_of(groups, group, "step", file).episodes.append(episode)
    for step_group in groups.values():
        step_group.vocabulary, step_group.batch, step_group.strays = vocabulary, batch, sorted(files.difference(names))
    return list(groups.values())


def _add_rows(episode: Inspected, rows: Sequence[tuple[int, TrainingRow]]) -> None:
    """Replace sequences by the rows that were made of them."""
    turns = {turn.index: turn for turn in episode.turns}
    recorded, taken = [], set()
    for number, row in rows:
        steps = _steps(row, turns)
        if steps and steps == steps_to(steps[-1].turn):
            taken.add(steps[-1].turn.index)
        else:  # no path through the turns: the row is all there is
            steps = turns_of_row(row)
            episode.turns += [step.turn for step in steps]
        recorded.append(TokenSequence(steps, np.asarray(row.loss_mask, np.uint8), row, number))
    derived = (sequence for sequence in episode.derived if sequence.steps[-1].turn.index not in taken)
    episode.sequences = [*recorded, *derived]
    if not episode.has_trajectory:
        episode.trajectory = Trajectory.of_turns(episode.turns)


def _steps(row: TrainingRow, turns: Mapping[int, Turn]) -> list[Step]:
    """Return the steps of a row; none if its spans name unknown turns."""
    steps, start = [], 0
    for span in row.spans:
        if span.turn not in turns:
            return []
        sampled = start + span.prompt_tokens
        steps.append(Step(turns[span.turn], start, sampled, sampled + span.sampled_tokens))
        start = steps[-1].stop
    return steps


def turns_of_row(row: TrainingRow) -> list[Step]:
    """Return turns that are made of a row alone, as the steps of its sequence."""
    spans = [(span.turn, span.prompt_tokens, span.sampled_tokens) for span in row.spans]
    steps: list[Step] = []
    start = 0
    for index, prompt, count in spans or _runs(row.loss_mask):
        sampled, stop = start + prompt, start + prompt + count
        versions = _versions(row.versions[sampled:stop])
        logprobs = row.logprobs[sampled:stop]
        turn = Turn(
            index=index,
            parent=steps[-1].turn if steps else None,
            why=Reason("continues", detail=("the row",)) if steps else Reason("opens"),
            key=b"",
            parts={},
            digests=(),
            roles=(),
            prompt_ids=array("i", row.token_ids[start:sampled]),
            status=TurnStatus.FINAL,
            generation=Generation(
                output_ids=array("i", row.token_ids[sampled:stop]),
                logprobs=None if np.isnan(logprobs).all() else array("d", logprobs),
                finish_type="",
                weight_version=versions[-1].version if versions else None,
                weight_versions=versions,
            ),
        )
        steps.append(Step(turn, start, sampled, stop))
        start = stop
    return steps


def _runs(mask: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return each run of untrained tokens with the trained ones after it, as numbered lengths."""
    lengths = [(is_trained, len(list(run))) for is_trained, run in groupby(mask, bool)]
    if lengths and lengths[0][0]:
        lengths.insert(0, (False, 0))
    counts = [count for _, count in lengths] + [0]
    return [(number, *counts[2 * number : 2 * number + 2]) for number in range(len(counts) // 2)]  # type: ignore[misc]


def _versions(names: Sequence[str | None]) -> tuple[VersionSpan, ...]:
    spans, start = [], 0
    for name, run in groupby(names):
        stop = start + len(list(run))
        if name is not None:
            spans.append(VersionSpan(name, start, stop))
        start = stop
    return tuple(spans)
