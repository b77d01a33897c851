"""From a recorded trajectory to an `Episode`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from ...trajectory.trajectory import Trajectory
from ...trajectory.turn import Turn
from ..records import Branching, Episode, Group, Image, SequenceRecord, Span, Tokens, TurnRecord, Writer


def read_trajectory_file(path: Path) -> Group:
    """Read one trajectory as a group of one episode.

    Raises:
        OSError: The file cannot be read.
        TrajectoryFileError: It is not a trajectory, or damaged.
    """
    trajectory = load_trajectory(path)
    episode = episode_of(trajectory, path.stem, file=str(path))
    return Group(path.stem, [episode], kind="trajectory", file=str(path), vocabulary=trajectory.pieces)


def load_trajectory(path: Path) -> Trajectory:
    """Load a trajectory, also one that was changed since it was written.

    Raises:
        OSError: The file cannot be read.
        TrajectoryFileError: It is not a trajectory, or damaged.
    """
    return Trajectory.from_bytes(path.read_bytes(), name=str(path), changed_too=True)


def episode_of(trajectory: Trajectory, name: str, *, file: str = "") -> Episode:
    """Return a trajectory as an episode, with its exported sequences.

    Args:
        trajectory: The trajectory.
        name: Id of the episode.
        file: The file that it comes from.
    """
    turns = trajectory.turns
    positions = {id(turn): position for position, turn in enumerate(turns)}
    episode = Episode(name, [turn_record(turn, positions) for turn in turns], [], file=file)
    extended: set[int] = set()
    for turn in episode.turns:
        if turn.parent is None:
            continue
        is_fork = turn.kept is not None or turn.parent in extended
        turn.branching = Branching.FORKS if is_fork else Branching.EXTENDS
        if turn.is_answered:
            extended.add(turn.parent)
    for turn in episode.turns:
        most = 0 if turn.parent is None else len(episode.turns[turn.parent].sampled)
        if turn.kept is not None and not 0 <= turn.kept <= most:
            why = f"turn {turn.number} keeps {turn.kept} of the {most} tokens that the turn before it sampled"
            episode.problems.append(("structure", why))
            turn.kept = None
    episode.facts["is_changed"] = trajectory.is_changed
    if trajectory.pieces:
        episode.facts["pieces"] = trajectory.pieces
    end = trajectory.end
    if end is not None:
        episode.outcome, episode.reward = end.outcome, end.reward
        episode.error, episode.reward_error = end.error, end.reward_error
        episode.facts["end"] = end
        for turn in episode.turns:
            turn.reward = end.turn_rewards.get(turn.number)
    episode.seconds = None if not turns else sum(turn.seconds or 0.0 for turn in episode.turns)
    for leaf, sequence in trajectory.branches():
        masks = [np.full(len(segment), segment.loss_mask, np.uint8) for segment in sequence.segments]
        steps = episode.steps(positions[id(leaf)])
        episode.sequences.append(SequenceRecord(steps, np.concatenate([np.zeros(0, np.uint8), *masks])))
    return episode


def turn_record(turn: Turn, positions: Mapping[int, int]) -> TurnRecord:
    """Return a turn as a record.

    Args:
        turn: The turn.
        positions: Position of each turn of the trajectory by `id`.
    """
    answer = turn.generation
    prompt = Tokens(
        np.asarray(turn.prompt_ids, np.int32),
        None if turn.prompt_logprobs is None else np.asarray(turn.prompt_logprobs, np.float64),
        np.full(len(turn.prompt_ids), Writer.PROMPT, np.uint8),
    )
    output_ids = np.asarray(turn.output_ids, np.int32)
    sampled = Tokens(output_ids, writers=np.full(len(output_ids), Writer.MODEL, np.uint8))
    facts: dict[str, Any] = {
        "sampling_params": dict(turn.sampling_params),
        "request_fields": dict(turn.request_fields),
        "turn": turn,
    }
    if answer is not None:
        mask = answer.sampling_mask
        sampled.logprobs = _floats(answer.logprobs)
        sampled.sampling_logprobs = _floats(answer.sampling_logprobs)
        sampled.kept_counts = None if mask is None else np.asarray(mask.lengths, np.int32)
        sampled.versions = tuple(Span(*span) for span in answer.weight_versions)
        if answer.routed_experts is not None:
            try:
                sampled.experts = answer.expert_ids()
            except ValueError:  # rows are missing, which the doctor finds
                sampled.experts = None
    return TurnRecord(
        number=index(turn.index),
        prompt=prompt,
        sampled=sampled,
        parent=None if turn.parent is None else positions[id(turn.parent)],
        kept=turn.parent_kept,
        reason=turn.reason,
        status=turn.status.value,
        note=turn.note,
        failure=turn.failure,
        agent=turn.agent,
        cycle=turn.cycle,
        is_auxiliary=turn.is_auxiliary,
        is_constrained=turn.constrained,
        is_resumed=bool(answer is not None and answer.resumed_ids),
        waits_to_go_on=turn.waits_to_go_on,
        clamped=turn.clamped,
        ends_at_context=turn.ends_at_context_limit,
        finish=None if answer is None else answer.finish_type,
        prompt_tokens=None if answer is None else answer.prompt_tokens,
        cached_tokens=None if answer is None else answer.cached_tokens,
        seconds=None if answer is None else answer.latency_s,
        text=turn.text,
        said=turn.said,
        answered=turn.answered,
        tool_calls=turn.tool_calls,
        images=[] if turn.images is None else [_image(picture) for picture in turn.images.pictures],
        facts=facts,
    )


def _floats(values: Sequence[float] | None) -> Any:
    return None if values is None else np.asarray(values, np.float64)


def _image(picture: Any) -> Image:
    return Image(picture.data, str(picture.format), str(picture.where))
