"""From the folder of a training step to `Group`s: its rows, and the trajectories that they are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...credit import FORMAT, READABLE, RowsFileError
from ...reasons import read_reason
from ..records import Episode, Group, SequenceRecord, Span, Step, Tokens, TurnRecord, Writer
from .trajectories import episode_of, load_trajectory

ROWS = "rows.safetensors"

COLUMNS = ("token_ids", "loss_mask", "logprobs", "versions", "advantages")


def read_step(folder: Path) -> list[Group]:
    """Read the folder of a training step.

    Raises:
        OSError: A file cannot be read.
        RowsFileError: The file of rows is not one, or damaged.
        TrajectoryFileError: A trajectory is damaged.
    """
    tensors, description = read_rows(folder / ROWS)
    try:
        return _groups(folder, tensors, description)
    except (LookupError, TypeError, AttributeError) as error:
        raise RowsFileError(f"{folder / ROWS}: damaged: {type(error).__name__}: {error}") from error


def read_rows(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the tensors and the description of training rows; `TrainingRows.load` would take ten times the memory.

    Raises:
        OSError: The file cannot be read.
        RowsFileError: The file is not one of rows, or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT or metadata.get("version") not in READABLE:
                found = f"{metadata.get('format')!r}, version {metadata.get('version')!r}"
                raise RowsFileError(f"{path}: holds {found}, not {FORMAT!r}, version {' or '.join(READABLE)}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        description = json.loads(tensors.pop("description").tobytes())
        total, offsets = len(tensors["token_ids"]), tensors["row_offsets"].tolist()
        if offsets[0] != 0 or offsets[-1] != total or offsets != sorted(offsets):
            raise RowsFileError(f"{path}: damaged: row_offsets do not cut the tokens into rows")
        for name in (*COLUMNS, "trainer_logprobs"):
            if len(tensors.get(name, tensors["token_ids"])) != total:
                raise RowsFileError(f"{path}: damaged: {total} token ids came with {len(tensors[name])} {name}")
        if len(description["rows"]) != len(offsets) - 1 or len(tensors.get("loss_weights", offsets[1:])) + 1 != len(
            offsets
        ):
            raise RowsFileError(f"{path}: damaged: the file describes another number of rows than it holds")
    except RowsFileError:
        raise
    except SafetensorError as error:
        raise RowsFileError(f"{path}: not a safetensors file, or truncated: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RowsFileError(f"{path}: damaged: {type(error).__name__}: {error}") from error
    return tensors, description


def _groups(folder: Path, tensors: Mapping[str, Any], description: Mapping[str, Any]) -> list[Group]:
    file = folder / ROWS
    known: dict[str, Mapping[str, Any]] = description.get("episodes") or {}
    by_episode: dict[str, list[int]] = {}
    for number, facts in enumerate(description["rows"]):
        by_episode.setdefault(facts["episode"], []).append(number)
    names = list(dict.fromkeys([*known, *by_episode, *description["left_out"]]))
    if not all(isinstance(name, str) for name in names):
        raise TypeError("the id of an episode is not a string")
    groups: dict[str, Group] = {}
    vocabulary: dict[int, bytes] = {}
    files = {path.stem for path in (folder / "trajectories").glob("*.safetensors")}
    for name in names:
        numbers = by_episode.get(name, [])
        own = known.get(name) or {}
        group = own.get("group", description["rows"][numbers[0]]["group"] if numbers else None)
        path = folder / "trajectories" / f"{name}.safetensors"
        if path.is_file():
            trajectory = load_trajectory(path)
            episode = episode_of(trajectory, name, file=str(path))
            vocabulary |= trajectory.pieces
        else:
            episode = Episode(name, [], [], file=str(file))
            episode.facts["has_no_trajectory"] = True
            if files.intersection(names):
                episode.problems.append(("structure", f"its file trajectories/{name}.safetensors is missing"))
        for number in numbers:
            if description["rows"][number]["group"] != group:
                told = f"row {number} is of group {description['rows'][number]['group']}, and its episode of {group}"
                episode.problems.append(("group", told))
        episode.facts["derived"] = list(episode.sequences)
        reason = description["left_out"].get(name)
        episode.left_out = None if reason is None else read_reason(reason)
        if name in known:
            episode.reward = own["reward"]
            episode.outcome = own["outcome"] or episode.outcome
            for turn in episode.turns:
                turn.reward = own["turn_rewards"].get(str(turn.number))
            episode.facts["turn_rewards"] = {int(turn): reward for turn, reward in own["turn_rewards"].items()}
        elif name in description["rewards"]:
            episode.reward = description["rewards"][name]
        episode.facts["in_batch"] = name in known
        _add_rows(episode, [_row(tensors, description, number) for number in numbers])
        shown = group if isinstance(group, str) else json.dumps(group)
        groups.setdefault(shown, Group(shown, [], kind="step", file=str(file), is_scored=True)).episodes.append(episode)
    for group_of in groups.values():
        group_of.vocabulary = vocabulary
        group_of.facts = {
            "step": folder.name,
            "description": description,
            "settings": description.get("settings") or {},
            "strays": sorted(files.difference(names)),
        }
    return list(groups.values())


def _row(tensors: Mapping[str, Any], description: Mapping[str, Any], number: int) -> dict[str, Any]:
    start, stop = tensors["row_offsets"][number : number + 2].tolist()
    row: dict[str, Any] = {name: tensors[name][start:stop] for name in COLUMNS}
    if "trainer_logprobs" in tensors:
        row["trainer_logprobs"] = tensors["trainer_logprobs"][start:stop]
    weight = float(tensors["loss_weights"][number]) if "loss_weights" in tensors else None
    return {**row, **description["rows"][number], "number": number, "weight": weight, "names": description["versions"]}


def _add_rows(episode: Episode, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace sequences by the rows that were made of them."""
    derived = {sequence.steps[-1].turn: sequence for sequence in episode.sequences if sequence.steps}
    numbers = {turn.number: position for position, turn in enumerate(episode.turns)}
    recorded = []
    for row in rows:
        steps = _steps(row, numbers)
        leaf = steps[-1].turn if steps else None
        own = derived.get(leaf) if leaf is not None else None
        if own is not None and list(own.steps) == steps:
            derived.pop(own.steps[-1].turn)
        elif not steps or episode.steps(steps[-1].turn) != steps:  # no path through the turns: the row is all there is
            if episode.turns:
                why = f"row {row['number']} is said to have the turns {[span[0] for span in row['spans']]}, which is no"
                episode.problems.append(("row-turns", f"{why} sequence of this trajectory"))
            steps = turns_of_row(episode, row)
        weight = row["weight"]
        recorded.append(
            SequenceRecord(
                steps,
                row["loss_mask"],
                row["advantages"],
                None if weight is None else np.full(len(row["loss_mask"]), weight),
                row.get("trainer_logprobs"),
                row=row,
                number=row["number"],
            )
        )
    episode.sequences = [*recorded, *derived.values()]


def _steps(row: Mapping[str, Any], numbers: Mapping[int, int]) -> list[Step]:
    """Return the steps of a row; none if its spans name unknown turns or do not cover it."""
    steps, start = [], 0
    for turn, prompt_tokens, sampled_tokens, _ in row["spans"]:
        if turn not in numbers:
            return []
        sampled = start + prompt_tokens
        steps.append(Step(numbers[turn], start, sampled, sampled + sampled_tokens))
        start = sampled + sampled_tokens
    return steps if start == len(row["token_ids"]) else []


def turns_of_row(episode: Episode, row: Mapping[str, Any]) -> list[Step]:
    """Add turns to an episode that are made of a row alone, and return the row's steps.

    Args:
        episode: The episode.
        row: `token_ids`, `loss_mask`, `logprobs`, and `spans` or none.
    """
    ids, mask = np.asarray(row["token_ids"], np.int32), np.asarray(row["loss_mask"], np.uint8)
    logprobs = None if row.get("logprobs") is None else np.asarray(row["logprobs"], np.float64)
    spans = [(prompt, sampled) for _, prompt, sampled, _ in row.get("spans") or ()]
    if sum(map(sum, spans)) != len(ids):
        spans = _runs(mask)
    steps, start, parent = [], 0, None
    for prompt, count in spans:
        sampled, stop = start + prompt, start + prompt + count
        turn = TurnRecord(
            number=len(episode.turns),
            prompt=Tokens(ids[start:sampled], writers=np.full(prompt, Writer.PROMPT, np.uint8)),
            sampled=Tokens(
                ids[sampled:stop],
                None if logprobs is None else logprobs[sampled:stop],
                np.full(count, Writer.MODEL, np.uint8),
                versions=_version_spans(row, sampled, stop),
            ),
            parent=parent,
        )
        parent = len(episode.turns)
        episode.turns.append(turn)
        steps.append(Step(parent, start, sampled, stop))
        start = stop
    return steps


def _runs(mask: Any) -> list[tuple[int, int]]:
    """Return the lengths of each run without mask and of the run with mask after it."""
    changes = np.flatnonzero(np.diff(mask)) + 1
    edges = [0, *changes.tolist(), len(mask)]
    lengths = [stop - start for start, stop in zip(edges[:-1], edges[1:], strict=True)]
    if len(mask) and mask[0]:
        lengths.insert(0, 0)
    if len(lengths) % 2:
        lengths.append(0)
    return list(zip(lengths[::2], lengths[1::2], strict=True))


def _version_spans(row: Mapping[str, Any], start: int, stop: int) -> tuple[Span, ...]:
    versions, names = row.get("versions"), row.get("names") or ()
    if versions is None or stop == start:
        return ()
    own = np.asarray(versions)[start:stop]
    edges = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), len(own)]
    return tuple(
        Span(str(names[int(own[first])]), first, last)
        for first, last in zip(edges[:-1], edges[1:], strict=True)
        if 0 <= own[first] < len(names)
    )
