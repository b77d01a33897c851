"""From paths to `Group`s: which kind of file each is, and the converter that reads it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from ..shown import one_line
from .records import Group, UnreadableError, turns_of

KINDS = {
    "trajectory": "a trajectory (.safetensors), or a folder of them",
    "journal": "the journal of an episode (.journal), perhaps one that still runs, or a folder of them",
    "step": "a training step (a folder with rows.safetensors), or a run with its step folders",
    "evaluation": "the folder of an evaluation, or its results.jsonl",
    "openenv": "TrainingTraces of OpenEnv (.json, .jsonl)",
    "verifiers": "episodes or traces of verifiers (.json, .jsonl)",
    "atif": "ATIF documents of Harbor with token ids (.json)",
    "slime": "a rollout dump of slime (.pt)",
}
"""The kinds of files that are read."""


def read(paths: Iterable[str | os.PathLike[str]], *, tokenizer: str | None = None) -> list[Group]:
    """Read files and folders.

    Args:
        paths: Files and folders.
        tokenizer: Folder or name of the model's tokenizer, for drift and the text that files lack; None for none.

    Returns:
        Groups in the order of the paths; the episodes of one prompt are one group.

    Raises:
        UnreadableError: A path is none of these kinds, is damaged, or holds nothing.
    """
    groups: list[Group] = []
    for name in paths:
        path = Path(name)
        found = _read_path(path)
        if not any(group.episodes for group in found):
            raise UnreadableError(f"{path}: no episode is recorded in it")
        groups.extend(found)
    groups = _siblings(groups)
    if tokenizer is not None:
        _use_tokenizer(groups, tokenizer)
    return groups


def held_in(path: Path) -> Path:
    """Return a path, or the only folder in it that has recorded episodes, if it has none itself.

    Raises:
        UnreadableError: Several folders in it have episodes; the message names them.
    """
    if _has_episodes(path):
        return path
    found = [folder for folder in sorted(path.glob("[!.]*")) if folder.is_dir() and _has_episodes(folder)]
    if len(found) > 1:
        some = ", ".join(map(str, found[:8]))
        raise UnreadableError(f"{path}: no recorded episodes, but these folders in it have some: {some}")
    return found[0] if found else path


def _has_episodes(path: Path) -> bool:
    return path.is_file() or any(next(path.glob(pattern), None) for pattern in _PATTERNS)


_TRAJECTORIES = (".safetensors", ".journal")

_PATTERNS = ("*.run.json", "*.safetensors", "*.journal", "*/rows.safetensors", "steps/*/rows.safetensors")
"""Files of folders with recorded episodes."""


def _read_path(path: Path) -> list[Group]:
    from ..credit import RowsFileError
    from ..trajectory.storage import TrajectoryFileError

    try:
        return _read_folder(path) if path.is_dir() else _read_file(path)
    except OSError as error:
        where = str(path) if error.filename is None else str(error.filename)
        raise UnreadableError(f"{where}: {error.strerror or error}") from error
    except (RowsFileError, TrajectoryFileError, UnreadableError) as error:
        raise UnreadableError(one_line(error)) from error
    except Exception as error:  # a damaged file may hold anything
        raise UnreadableError(f"{path}: damaged: {type(error).__name__}: {one_line(error, 200)}") from error


def _read_folder(folder: Path) -> list[Group]:
    from .formats.evaluations import read_evaluation
    from .formats.steps import ROWS, read_step
    from .formats.trajectories import read_trajectory_file

    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    if ROWS in names:
        return read_step(folder)
    plans = [name.removesuffix(".run.json") for name in names if name.endswith(".run.json")]
    if plans:
        return list(chain.from_iterable(read_evaluation(folder / f"{name}.jsonl") for name in plans))
    steps = [folder / name for name in names if (folder / name / ROWS).is_file()]
    if steps:
        return list(chain.from_iterable(map(read_step, steps)))
    if (folder / "steps").is_dir():
        return _read_folder(folder / "steps")
    files = [folder / name for name in names if name.endswith(_TRAJECTORIES)]
    if files:
        return [read_trajectory_file(file) for file in files]
    held = (
        "it is empty"
        if not names
        else "it has no rows.safetensors, step folder, *.run.json, *.safetensors or *.journal"
    )
    raise UnreadableError(f"{folder}: no recorded episodes: {held}")


def _read_file(path: Path) -> list[Group]:
    from .formats.evaluations import read_evaluation
    from .formats.imported import read_imported
    from .formats.slime import read_dump
    from .formats.steps import ROWS, read_step
    from .formats.trajectories import read_trajectory_file

    if path.name == ROWS:
        return read_step(path.parent)
    readers: dict[str, Callable[[Path], Any]] = {
        **dict.fromkeys(_TRAJECTORIES, lambda file: [read_trajectory_file(file)]),
        ".pt": read_dump,
        ".json": read_imported,
        ".jsonl": read_imported,
    }
    plan = path.with_name(path.name.removesuffix(".jsonl").removesuffix(".run.json") + ".run.json")
    if path.suffix in (".jsonl", ".json") and plan.is_file():
        return read_evaluation(plan.with_name(plan.name.removesuffix(".run.json") + ".jsonl"))
    if not path.exists():
        raise UnreadableError(f"{path}: no such file or folder")
    if path.suffix not in readers:
        raise UnreadableError(f"{path}: not one of: {'; '.join(KINDS.values())}")
    groups: list[Group] = readers[path.suffix](path)
    return groups


def _siblings(groups: list[Group]) -> list[Group]:
    """Join trajectories that opened with the same conversation to one group."""
    joined: dict[Any, Group] = {}
    for number, group in enumerate(groups):
        turn = next(turns_of([group]), None) if group.kind == "trajectory" else None
        known = joined.setdefault(number if turn is None else turn.key, group)
        if known is not group:
            known.vocabulary = {**known.vocabulary, **group.vocabulary}
            for episode in group.episodes:
                if episode.id in (known_episode.id for known_episode in known.episodes):
                    episode.id = episode.file
            known.episodes += group.episodes
    return list(joined.values())


def _use_tokenizer(groups: list[Group], name: str) -> None:
    """Take the text of ids from a tokenizer, where a file does not have it.

    Raises:
        UnreadableError: There is no such tokenizer.
    """
    from ..client.shared import get_tokenizer
    from ..templates.encoder import get_encoder

    try:
        encoder = get_encoder(get_tokenizer(name))
    except (OSError, ValueError) as error:
        message = one_line(error).removeprefix(f"{name}: ")
        raise UnreadableError(f"--tokenizer {name}: {message[:200]}") from error
    size = len(encoder.tokenizer)
    for group in groups:
        used: set[int] = set()
        for turn in turns_of([group]):
            used.update(turn.prompt_ids, turn.output_ids)
        known = encoder.pieces(sorted(token_id for token_id in used if 0 <= token_id < size))
        group.encoder = encoder
        group.vocabulary = {**known, **group.vocabulary}
