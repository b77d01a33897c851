"""What is known of recorded episodes, whichever file it comes from.

A file or folder becomes `Group`s: the episodes of one prompt. Each is a `Trajectory` and the sequences that its files
export: paths through its turns, with the row of a trainer if there is one. Episodes of files without turns get turns,
too: each run of sampled tokens with what precedes it.

Columns are numpy arrays of shape `(T,)`; NaN where a value is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..credit import Episode, TrainingRow, TrainingRows
from ..messages.said import Said
from ..protocol.generation import VersionSpan
from ..reasons import Reason
from ..trajectory.trajectory import EpisodeEnd, Trajectory
from ..trajectory.turn import Turn

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..templates.encoder import Encoder

Problem = tuple[str, str]
"""What a reader noticed: a kind of `doctor.KINDS`, and why in a sentence."""


class UnreadableError(ValueError):
    """A path cannot be read as recorded episodes; the message names it and says why."""


class Writer(IntEnum):
    """Who wrote a token."""

    PROMPT = 0
    """A part of a prompt; the file does not tell which."""
    TEMPLATE = 1
    """The chat template: marks between messages, the declaration of tools."""
    SYSTEM = 2
    """The system prompt."""
    USER = 3
    """A user message."""
    TOOL = 4
    """A tool's result."""
    MODEL = 5
    """The model sampled it."""
    HISTORY = 6
    """An assistant message that is part of a prompt: an example, or a turn that was rendered again."""


class Step(NamedTuple):
    """A turn in a sequence.

    Attributes:
        turn: The turn.
        start: Position of its first prompt token in the sequence.
        sampled: Position of its first sampled token.
        stop: Position after the last sampled token that the sequence has.
    """

    turn: Turn
    start: int
    sampled: int
    stop: int


def steps_to(leaf: Turn) -> list[Step]:
    """Return the steps of the sequence that ends with a turn."""
    steps, start = [], 0
    for turn, kept in leaf.steps():
        sampled = start + len(turn.prompt_ids)
        steps.append(Step(turn, start, sampled, sampled + kept))
        start = sampled + kept
    return steps


def halves(turn: Turn, name: str) -> Iterator[NDArray[Any]]:
    """Yield a column of a turn's prompt, then of its sampled tokens; NaN where it is not recorded.

    Args:
        turn: The turn.
        name: "ids", "logprobs", "sampling_logprobs" or "kept_counts".
    """
    import numpy as np

    given: Any = turn.prompt_logprobs if name == "logprobs" else None
    sampled: Any = getattr(turn.generation, "sampling_mask" if name == "kept_counts" else name, None)
    if name == "kept_counts" and sampled is not None:
        sampled = sampled.lengths
    if name == "ids":
        given, sampled = turn.prompt_ids, turn.output_ids
    for values, ids in ((given, turn.prompt_ids), (sampled, turn.output_ids)):
        yield np.full(len(ids), np.nan) if values is None else np.asarray(values)


@dataclass(eq=False)
class TokenSequence:
    """One exported sequence: a path through the turns, T tokens long.

    Attributes:
        steps: Its turns.
        mask: 1 where a token is trained, else 0.
        row: The row of a trainer's file; None if the sequence follows from the turns.
        number: Number of the row in its file; None without one.
        sample: slime's sample besides its tokens; empty for other files.
    """

    steps: Sequence[Step]
    mask: NDArray[Any]
    row: TrainingRow | None = None
    number: int | None = None
    sample: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.mask)

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of the turns for all tokens, as for `halves`."""
        import numpy as np

        parts: list[Any] = [np.zeros(0, np.int32 if name == "ids" else np.float64)]
        for step in self.steps:
            prompt, sampled = halves(step.turn, name)
            parts += [prompt, sampled[: step.stop - step.sampled]]
        return np.concatenate(parts)

    def given(self, name: str) -> NDArray[Any] | None:
        """Return a column of the row, such as "advantages"; None if the file has none."""
        import numpy as np

        values = None if self.row is None else getattr(self.row, name)
        if values is None:
            return None
        column = np.asarray(values)
        return None if column.dtype.kind == "f" and len(column) and np.isnan(column).all() else column

    def at(self, position: int) -> Step | None:
        """Return the step that holds a position."""
        return next((step for step in self.steps if step.start <= position < step.stop), None)


@dataclass(eq=False)
class Inspected:
    """One episode, as its files tell it.

    Attributes:
        id: Its name, unique in its group.
        trajectory: The record of its calls.
        file: The file that it was read from.
        sequences: Its sequences, those of a trainer's file first.
        derived: The sequences that follow from its trajectory.
        end: How it ended, by the file that counts: that of the rows or results, else the trajectory's.
        left_out: Why it is kept out of the update; None if it is not.
        seconds: Seconds that it took; None if unknown.
        has_trajectory: Whether the calls are recorded; else its turns are made of rows.
        in_batch: Whether the file of rows describes it.
        record: The record of the sample in the file of an evaluation; empty elsewhere.
        messages: The messages of that record.
        said: The conversation with its system prompt as people read it, if the file has it apart from the turns.
        problems: What the reader noticed.
        step: Name of the training step that it is part of; empty elsewhere.
    """

    id: str
    trajectory: Trajectory
    file: str = ""
    sequences: list[TokenSequence] = field(default_factory=list)
    derived: list[TokenSequence] = field(default_factory=list)
    end: EpisodeEnd = field(default_factory=EpisodeEnd)
    left_out: Reason | None = None
    seconds: float | None = None
    has_trajectory: bool = True
    in_batch: bool = False
    record: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    said: Sequence[Said] = ()
    problems: list[Problem] = field(default_factory=list)
    step: str = ""
    turns: list[Turn] = field(init=False)

    def __post_init__(self) -> None:
        """List the turns once."""
        self.turns = self.trajectory.turns

    @property
    def name(self) -> str:
        """What people call it, such as `task-12 #3 of step-000002`: other steps may have an episode of its id."""
        return f"{self.id} of {self.step}" if self.step else self.id

    def as_episode(self, group: Hashable) -> Episode:
        """Return it in the form that is trained."""
        end = self.end
        return Episode(
            self.trajectory,
            end.reward,
            group,
            self.id,
            end.turn_rewards,
            end.outcome,  # type: ignore[arg-type]
        )

    def other_leaves(self) -> list[Turn]:
        """Return the last turns of the paths that no sequence shows: discarded, failed and auxiliary calls."""
        shown = {id(step.turn) for step in chain.from_iterable(sequence.steps for sequence in self.sequences)}
        others = [turn for turn in self.turns if id(turn) not in shown]
        inner = {id(turn.parent) for turn in others}
        return [turn for turn in others if id(turn) not in inner]


@dataclass(eq=False)
class Group:
    """The episodes of one prompt.

    Attributes:
        id: Its name, unique in its file.
        episodes: Its episodes.
        kind: Kind of file: a key of `reading.KINDS`.
        file: The file or folder.
        vocabulary: Text of token ids, as bytes; empty if the file has none and no tokenizer is given.
        encoder: Encodes and decodes, if a tokenizer is given.
        is_scored: Whether its advantages compare the episodes' rewards, so that equal rewards train nothing.
        batch: The rows of the training step that it is part of, those of other groups included.
        strays: Names of its trajectories that belong to no episode.
        config: Configuration of most samples of the evaluation.
        key: What the file has as the group.
    """

    id: str
    episodes: list[Inspected]
    kind: str = ""
    file: str = ""
    vocabulary: Mapping[int, bytes] = field(default_factory=dict)
    encoder: Encoder | None = None
    is_scored: bool = False
    batch: TrainingRows | None = None
    strays: Sequence[str] = ()
    config: str | None = None
    key: Hashable = None


def group_of(groups: dict[Hashable, Group], key: Hashable, kind: str, file: Path) -> Group:
    """Return the group of a file that has a key; a new one if there is none yet."""
    if key not in groups:
        name = key if isinstance(key, str) else json.dumps(key)
        if name in (group.id for group in groups.values()):
            name += f" ({type(key).__name__})"
        groups[key] = Group(name, [], kind, str(file), is_scored=kind in ("step", "slime"), key=key)
    return groups[key]


def turns_of(groups: Iterable[Group]) -> Iterator[Turn]:
    """Yield the turns of all episodes."""
    for group in groups:
        for episode in group.episodes:
            yield from episode.turns


def spans_of(turn: Turn) -> Sequence[VersionSpan]:
    """Return which version of the weights sampled each token of a turn, as far as it is known."""
    return () if turn.generation is None else turn.generation.weight_versions


def count_tokens(turns: Iterable[Turn]) -> int:
    """Return the number of tokens that turns hold, each once."""
    return sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in turns)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        kind: A key of `doctor.KINDS`.
        why: Why, in one sentence.
        file: The file.
        group: Group; None if it concerns the whole file.
        episode: Id of the episode; None if it concerns the group.
        turn: Number of the turn; None if it concerns the episode.
        sequence: Position of the sequence in `Inspected.sequences`; None if it concerns no sequence.
        token: Position of the first token: in the sequence if there is one, else among the turn's sampled tokens.
        count: Number of tokens from there.
    """

    kind: str
    why: str
    file: str = ""
    group: str | None = None
    episode: str | None = None
    turn: int | None = None
    sequence: int | None = None
    token: int | None = None
    count: int = 0

    def inside(self, **place: Any) -> Finding:
        """Return it with the parts of its place that it does not tell itself."""
        return replace(self, **{name: value for name, value in place.items() if getattr(self, name) in (None, "")})

    @property
    def where(self) -> str:
        """The place in words, from the file to the token."""
        places = [self.file]
        if self.episode is None and self.group is not None:
            places.append(f"group {self.group}")
        for name in ("episode", "sequence", "turn", "token"):
            value = getattr(self, name)
            if value is not None:
                places.append(f"{name} {value}")
        if self.token is not None and self.count > 1:
            places[-1] += f" to {self.token + self.count - 1}"
        return ", ".join(places)


def stretch(positions: NDArray[Any]) -> dict[str, Any]:
    """Return the tokens from the first to the last of some positions, as a part of a finding's place."""
    return {"token": int(positions[0]), "count": int(positions[-1] - positions[0]) + 1}


def within(found: Iterable[Finding], **place: Any) -> Iterator[Finding]:
    """Yield findings with the parts of their place that they do not tell themselves."""
    for finding in found:
        yield finding.inside(**place)
