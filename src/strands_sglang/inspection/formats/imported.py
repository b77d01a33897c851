"""From episodes of other libraries, OpenEnv, verifiers and Harbor, to `Group`s."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from ...credit import Episode
from ...trainers.records import RecordError
from ...trajectory.trajectory import EpisodeEnd, Trajectory
from ..records import Group, Inspected, UnreadableError, group_of
from .trajectories import inspect


def read_imported(path: Path) -> list[Group]:
    """Read a JSON file, or one of JSON lines, of OpenEnv `TrainingTrace`s, verifiers records or ATIF documents.

    Raises:
        OSError: The file cannot be read.
        UnreadableError: It holds something else.
    """
    groups: dict[Hashable, Group] = {}
    for where, value in _values(path):
        try:
            library, episodes = _imported(value)
        except (ImportError, UnreadableError) as error:
            raise UnreadableError(f"{path}{where}: {error}") from error
        except ValueError as error:  # the file is of this kind, but what it says cannot be
            name = where.strip(", ")
            kind = error.kind if isinstance(error, RecordError) else "structure"
            lost = Inspected(name or path.stem, Trajectory(), str(path), problems=[(kind, str(error))])
            group_of(groups, name, "imported", path).episodes.append(lost)
            continue
        for imported in episodes:
            episode = inspect(imported.trajectory, imported.id, file=str(path))
            outcome = None if imported.outcome is None else imported.outcome.value
            episode.end = EpisodeEnd(outcome, imported.reward, imported.turn_rewards)
            group_of(groups, imported.group, library, path).episodes.append(episode)
    return list(groups.values())


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the JSON values of a file with their place."""
    text = path.read_bytes()
    try:
        value = json.loads(text)
        if not isinstance(value, list):
            yield "", value
            return
        for number, entry in enumerate(value):
            yield f", entry {number}", entry
        return
    except ValueError as error:
        if path.suffix != ".jsonl":
            raise UnreadableError(f"{path}: not JSON, or truncated: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield f", line {number}", json.loads(line)
            except ValueError as error:
                raise UnreadableError(f"{path}, line {number}: not JSON, or truncated: {error}") from error


def _imported(value: Any) -> tuple[str, list[Episode]]:
    if isinstance(value, dict) and "schema_version" in value and "turns" in value:
        from ...trainers.openenv import from_trace

        return "openenv", [from_trace(value)]
    if isinstance(value, dict) and str(value.get("schema_version")).startswith("ATIF"):
        from ...trainers.atif import from_atif

        return "atif", [from_atif(value)]
    if isinstance(value, dict) and ("traces" in value or "nodes" in value):
        from ...trainers.verifiers import from_record

        return "verifiers", from_record(value)
    raise UnreadableError("no OpenEnv TrainingTrace, verifiers episode or trace, nor ATIF document")
