"""From a recorded trajectory to an `Inspected` episode."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...trajectory.journal import Journal
from ...trajectory.storage import DamagedTrajectoryError
from ...trajectory.trajectory import EpisodeEnd, Trajectory
from ..records import Group, Inspected, TokenSequence, steps_to


def read_trajectory_file(path: Path) -> Group:
    """Read one trajectory as a group of one episode.

    Raises:
        OSError: The file cannot be read.
        TrajectoryFileError: It is not a trajectory.
    """
    return _group(path.stem, inspect_file(path, path.stem))


def as_group(name: str, trajectories: Mapping[str, Trajectory]) -> Group:
    """Return trajectories of one prompt as a group.

    Args:
        name: Id of the group.
        trajectories: The trajectories by the id of their episode.
    """
    return _group(name, *(inspect(trajectory, episode) for episode, trajectory in trajectories.items()))


def _group(name: str, *episodes: Inspected) -> Group:
    vocabulary: dict[int, bytes] = {}
    for episode in episodes:
        vocabulary |= episode.trajectory.pieces
    return Group(name, [*episodes], kind="trajectory", file=episodes[0].file, vocabulary=vocabulary)


def inspect_file(path: Path, name: str) -> Inspected:
    """Read a trajectory, also one that was changed since it was written; of a damaged one nothing but its problem.

    Raises:
        OSError: The file cannot be read.
        TrajectoryFileError: It is not a trajectory.
    """
    try:
        if path.suffix == ".journal":  # one that has just been opened is empty
            trajectory = Trajectory.of_entries(Journal(path).entries())
        else:
            trajectory = Trajectory.from_bytes(path.read_bytes(), name=str(path), changed_too=True)
    except DamagedTrajectoryError as error:
        return Inspected(name, Trajectory(), str(path), has_trajectory=False, problems=[("structure", str(error))])
    return inspect(trajectory, name, file=str(path))


def inspect(trajectory: Trajectory, name: str, *, file: str = "") -> Inspected:
    """Return a trajectory as an episode, with its exported sequences.

    Args:
        trajectory: The trajectory.
        name: Id of the episode.
        file: The file that it comes from.
    """
    derived = []
    for leaf, sequence in trajectory.branches():
        masks = [np.full(len(segment), segment.loss_mask, np.uint8) for segment in sequence.segments]
        derived.append(TokenSequence(steps_to(leaf), np.concatenate([np.zeros(0, np.uint8), *masks])))
    answers = [turn.generation for turn in trajectory.turns if turn.generation is not None]
    return Inspected(
        name,
        trajectory,
        file,
        list(derived),
        derived,
        trajectory.end or EpisodeEnd(),
        seconds=sum(answer.latency_s for answer in answers) if trajectory.turns else None,
    )
