"""From paths to `Group`s: which kind of file each is, and the converter that reads it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .records import Group


class UnreadableError(ValueError):
    """A path cannot be read as recorded episodes; the message names it and says why."""


KINDS = {
    "trajectory": "a trajectory (.safetensors)",
    "step": "a training step (rows.safetensors and trajectories/)",
    "evaluation": "the folder of an evaluation",
    "openenv": "OpenEnv TrainingTraces (.json, .jsonl)",
    "verifiers": "verifiers episodes (.json, .jsonl)",
    "slime": "a slime rollout dump (.pt)",
}
"""The kinds of files that are read."""


def read(paths: Iterable[str | os.PathLike[str]], *, tokenizer: str | None = None) -> list[Group]:
    """Read files and folders.

    Args:
        paths: Files and folders.
        tokenizer: Folder of the model's tokenizer, for files without the text of their tokens; None for none.

    Returns:
        Groups in the order of the paths; the episodes of one prompt are one group.

    Raises:
        UnreadableError: A path is none of these, or damaged, or there is nothing in it.
    """
    from ..trajectory.storage import TrajectoryFileError
    from .formats.trajectories import read_trajectory_file

    groups: list[Group] = []
    for name in paths:
        path = Path(name)
        try:
            groups.append(read_trajectory_file(path))
        except OSError as error:
            raise UnreadableError(f"{path}: {error.strerror or error}") from error
        except TrajectoryFileError as error:
            raise UnreadableError(str(error)) from error
    return groups
