"""From episodes of other libraries, OpenEnv and verifiers, to `Group`s."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...credit import Episode
from ...trainers.records import RecordError
from ...trajectory.trajectory import EpisodeEnd, Trajectory
from ..records import Group, Inspected, Problem
from .trajectories import inspect


class ImportedFileError(ValueError):
    """A file holds no episodes of a supported library."""


def read_imported(path: Path) -> list[Group]:
    """Read a JSON file, or one of JSON lines, of OpenEnv `TrainingTrace`s or verifiers records.

    Raises:
        OSError: The file cannot be read.
        ImportedFileError: It holds something else.
    """
    groups: dict[str, Group] = {}
    for where, value in _values(path):
        try:
            library, episodes = _imported(value)
        except (ImportError, ImportedFileError) as error:
            raise ImportedFileError(f"{path}{where}: {error}") from error
        except ValueError as error:  # the file is of this kind, but what it says cannot be
            name = where.strip(", ")
            kind = error.kind if isinstance(error, RecordError) else "structure"
            lost = Inspected(name or path.stem, Trajectory(), str(path), problems=[(kind, str(error))])
            groups.setdefault(where, Group(name, [], kind="imported", file=str(path))).episodes.append(lost)
            continue
        traces = [value] if library == "openenv" or "nodes" in value else value["traces"]
        for one, trace in zip(episodes, traces, strict=True):
            name = str(one.group)
            group = groups.setdefault(name, Group(name, [], kind=library, file=str(path)))
            episode = inspect(one.trajectory, one.id, file=str(path))
            outcome = None if one.outcome is None else one.outcome.value
            episode.end = EpisodeEnd(outcome, one.reward, one.turn_rewards)
            episode.problems += _untrained(trace) if library == "openenv" else _misplaced(trace)
            group.episodes.append(episode)
    return list(groups.values())


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the JSON values of a file with their place."""
    text = path.read_bytes()
    try:
        value = json.loads(text)
        yield from ((f", entry {n}", one) for n, one in enumerate(value)) if isinstance(value, list) else [("", value)]
        return
    except ValueError as error:
        if path.suffix != ".jsonl":
            raise ImportedFileError(f"{path}: not JSON, or truncated: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield f", line {number}", json.loads(line)
            except ValueError as error:
                raise ImportedFileError(f"{path}, line {number}: not JSON, or truncated: {error}") from error


def _imported(value: Any) -> tuple[str, list[Episode]]:
    if isinstance(value, dict) and "schema_version" in value and "turns" in value:
        from ...trainers.openenv import from_trace

        return "openenv", [from_trace(value)]
    if isinstance(value, dict) and ("traces" in value or "nodes" in value):
        from ...trainers.verifiers import from_record

        return "verifiers", from_record(value)
    raise ImportedFileError("neither an OpenEnv TrainingTrace nor a verifiers episode or trace")


def _untrained(trace: Any) -> list[Problem]:
    """Compare what our export says of an episode of OpenEnv with its masks: it is trained, or left out."""
    turns = trace["turns"]
    about = (turns[0].get("metadata") or {}).get("episode") or {} if turns else {}
    trains = any(any(turn["loss_mask"]) for turn in turns)
    if "left_out" not in about or trains == (about["left_out"] is None):
        return []
    why = f"it is said to be left out ({about['left_out']}), but is trained"
    return [("left-out", why if trains else "none of its tokens is trained, and nothing says why")]


def _misplaced(trace: Any) -> list[Problem]:
    """Check what is not imported of a trace of verifiers: advantages of nodes, and where its calls belong."""
    problems = []
    for number, node in enumerate(trace["nodes"]):
        advantages, trained = node.get("advantages"), sum(node.get("mask") or ())
        if advantages is not None and (len(advantages) != trained or not all(map(math.isfinite, advantages))):
            why = f"node {number} has {len(advantages)} advantages for {trained} trained tokens, or one is not finite"
            problems.append(("advantage", why))
    for number, call in enumerate(trace.get("calls") or ()):
        place = call.get("node")
        if place is not None and not (0 <= place < len(trace["nodes"]) and trace["nodes"][place].get("sampled")):
            problems.append(("structure", f"call {number} is said to have sampled node {place}, which was not sampled"))
    return problems
