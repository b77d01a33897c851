"""What is known of recorded episodes, whichever file it comes from.

A file or folder becomes `Group`s: the episodes of one prompt. An `Episode` is a forest of `TurnRecord`s, as in a
trajectory. Each turn holds its own tokens once: those that its prompt added, and those that it sampled. A
`SequenceRecord` is a path through the turns with what belongs to the exported sequence: loss mask, advantages, weights,
the trainer's own logprobs. Files without turns become turns, too: each run of sampled tokens with what precedes it.

Columns are numpy arrays of shape `(T,)`; None where a file does not record them, NaN where a value is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from ..messages.said import Said
from ..reasons import Reason

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ids = NDArray[np.int32]
    Floats = NDArray[np.float64]
    Flags = NDArray[np.uint8]


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


class Branching(str, Enum):
    """How a turn is attached to the forest."""

    OPENS = "opens"
    """It opens a sequence."""
    EXTENDS = "extends"
    """It extends the turn before it."""
    FORKS = "forks"
    """It extends a turn that another turn extends too, or one inside its answer."""


class Span(NamedTuple):
    """Tokens that one version of the weights sampled, as positions from `start` to `stop`."""

    version: str
    start: int
    stop: int


@dataclass(eq=False)
class Tokens:
    """Tokens that belong together: what a turn's prompt added, or what it sampled.

    Attributes:
        ids: Ids in the vocabulary.
        logprobs: Logprobs as the server reported them.
        writers: `Writer` of each token.
        versions: Which weights sampled which tokens; empty if unknown.
        entropy: Entropy of the distribution that a token was sampled from.
        experts: Routed experts, shape `(rows, layers * top_k)`, of the whole sequence up to the turn.
        sampling_logprobs: Logprobs among the ids that truncated sampling kept.
        kept_counts: Number of ids that truncated sampling kept for each token.
    """

    ids: Ids
    logprobs: Floats | None = None
    writers: Flags | None = None
    versions: tuple[Span, ...] = ()
    entropy: Floats | None = None
    experts: Ids | None = None
    sampling_logprobs: Floats | None = None
    kept_counts: Ids | None = None

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)


@dataclass(frozen=True)
class Image:
    """An image of a prompt.

    Attributes:
        data: Content of the image file.
        format: Format, such as "png".
        where: Position in the conversation, in words.
    """

    data: bytes = field(repr=False)
    format: str = ""
    where: str = ""


@dataclass(eq=False)
class TurnRecord:
    """One model call, or one run of sampled tokens of a file without calls.

    Attributes:
        number: Number of the call, `Turn.index`; it may differ from the position in `Episode.turns`.
        prompt: Tokens that its prompt added.
        sampled: Tokens that it sampled; empty without an answer.
        parent: Position of the turn that it extends in `Episode.turns`; None if it opens a sequence.
        kept: Number of the parent's sampled tokens that precede it; None for all.
        branching: How it is attached.
        reason: Why it extends, forks or opens, in words.
        status: Status, as of `TurnStatus`; empty if unknown.
        note: Why the answer was discarded, or in which form it was kept.
        failure: The error that failed or cut it.
        agent: Id of the agent that asked.
        cycle: Event-loop cycle that asked.
        is_auxiliary: Whether it is not part of the rollout: a summary, a judge.
        is_constrained: Whether a grammar constrained it.
        is_resumed: Whether its answer was sampled in several parts, because the server aborted it.
        waits_to_go_on: Whether it was cut, and the next call that asks the same continues it.
        clamped: Whether the context, not the caller, limited its answer.
        ends_at_context: Whether its answer ended because the context was full.
        finish: "stop", "length" or "abort"; None without an answer.
        prompt_tokens: Number of prompt tokens of its request, as the server counted; None if unknown.
        cached_tokens: Number of them that were in the prefix cache; None if unknown.
        seconds: Seconds of the request; None if unknown.
        text: Text of the sampled tokens, as decoded when they were sampled; None if not recorded.
        said: What its prompt added to the conversation, as people read it.
        answered: Its answer, as people read it.
        tool_calls: Its tool calls, each as `{"toolUseId", "name", "id"}`.
        images: Images of its prompt.
        reward: Reward of the turn itself; None if it has none.
        facts: Further facts of the file's own, by name.
        problems: What the reader noticed: `(kind, why)`, with kinds of `doctor.KINDS`.
    """

    number: int
    prompt: Tokens
    sampled: Tokens
    parent: int | None = None
    kept: int | None = None
    branching: Branching = Branching.OPENS
    reason: str = ""
    status: str = ""
    note: str = ""
    failure: str | None = None
    agent: str | None = None
    cycle: str | None = None
    is_auxiliary: bool = False
    is_constrained: bool = False
    is_resumed: bool = False
    waits_to_go_on: bool = False
    clamped: bool = False
    ends_at_context: bool = False
    finish: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    seconds: float | None = None
    text: str | None = None
    said: Sequence[Said] = ()
    answered: Sequence[Said] = ()
    tool_calls: Sequence[Mapping[str, Any]] = ()
    images: Sequence[Image] = ()
    reward: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_discarded(self) -> bool:
        """Whether the agent threw the answer away."""
        return self.status == "discarded"

    @property
    def is_cut(self) -> bool:
        """Whether the request was aborted, or its answer could not be parsed."""
        return self.status == "cut"

    @property
    def is_answered(self) -> bool:
        """Whether the server has answered."""
        return self.finish is not None


class Step(NamedTuple):
    """A turn in a sequence.

    Attributes:
        turn: Position in `Episode.turns`.
        start: Position of its first prompt token in the sequence.
        sampled: Position of its first sampled token.
        stop: Position after the last sampled token that the sequence has.
    """

    turn: int
    start: int
    sampled: int
    stop: int


@dataclass(eq=False)
class SequenceRecord:
    """One exported sequence: a path through the turns, T tokens long.

    Attributes:
        steps: Its turns.
        mask: 1 where a token is trained, else 0.
        advantages: Advantage of each token.
        weights: Weight of each token in the loss; the row's weight w_s everywhere if the file has one per row.
        trainer_logprobs: Logprobs by the trainer's own forward pass.
        row: The columns of a trainer's file for this sequence, by name; empty if it is derived from the turns. They
            are compared with the turns, which are the record.
        number: Number of the row in its file; None if it is derived.
        reward: Reward that the file gives this very sequence; None without one.
        facts: Further facts of the file's own, by name.
    """

    steps: Sequence[Step]
    mask: Flags
    advantages: Floats | None = None
    weights: Floats | None = None
    trainer_logprobs: Floats | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    number: int | None = None
    reward: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.mask)


@dataclass(eq=False)
class Episode:
    """One episode.

    Attributes:
        id: Its name, unique in its group.
        turns: Its turns in the order of calls; parents precede.
        sequences: Its sequences.
        file: The file that it was read from.
        outcome: How it ended, a value of `TerminationReason`; None if unknown.
        reward: Its reward; None without one.
        reward_error: Why it has no reward.
        error: The error that ended it.
        left_out: Why it is kept out of the update; None if it is not.
        seconds: Seconds that it took; None if unknown.
        said: The conversation with its system prompt as people read it, if the file has it apart from the turns.
        messages: The messages in the form of the file, if it has them.
        facts: Further facts of the file's own, by name.
        problems: What the reader noticed: `(kind, why)`, with kinds of `doctor.KINDS`.
    """

    id: str
    turns: list[TurnRecord]
    sequences: list[SequenceRecord]
    file: str = ""
    outcome: str | None = None
    reward: float | None = None
    reward_error: str | None = None
    error: str | None = None
    left_out: Reason | None = None
    seconds: float | None = None
    said: Sequence[Said] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def steps(self, leaf: int) -> list[Step]:
        """Return the steps of the sequence that ends with a turn, as positions of its tokens."""
        path: list[tuple[int, int | None]] = []
        position: int | None = leaf
        kept: int | None = None
        while position is not None:
            path.append((position, kept))
            kept, position = self.turns[position].kept, self.turns[position].parent
        steps, start = [], 0
        for position, kept in reversed(path):
            turn = self.turns[position]
            sampled = start + len(turn.prompt)
            stop = sampled + (len(turn.sampled) if kept is None else kept)
            steps.append(Step(position, start, sampled, stop))
            start = stop
        return steps

    def column(self, sequence: SequenceRecord, name: str, fill: float = float("nan")) -> NDArray[Any]:
        """Return a column of the turns for all tokens of a sequence.

        Args:
            sequence: One of the episode's sequences.
            name: Name of an array of `Tokens`: `"ids"`, `"logprobs"`, `"writers"`, `"entropy"`, ...
            fill: Value where it is not recorded.
        """
        import numpy as np

        parts: list[Any] = []
        for step in sequence.steps:
            turn = self.turns[step.turn]
            for tokens, count in ((turn.prompt, step.sampled - step.start), (turn.sampled, step.stop - step.sampled)):
                values = getattr(tokens, name)
                parts.append(np.full(count, fill) if values is None else values[:count])
        return np.concatenate(parts) if parts else np.zeros(0)

    def versions(self, sequence: SequenceRecord) -> list[Span]:
        """Return which weights sampled which tokens of a sequence."""
        spans = []
        for step in sequence.steps:
            count = step.stop - step.sampled
            for version, start, stop in self.turns[step.turn].sampled.versions:
                if start < min(stop, count):
                    spans.append(Span(version, step.sampled + start, step.sampled + min(stop, count)))
        return spans


@dataclass(eq=False)
class Group:
    """The episodes of one prompt.

    Attributes:
        id: Its name.
        episodes: Its episodes.
        kind: Kind of file: a key of `reading.KINDS`.
        file: The file or folder.
        vocabulary: Text of token ids, as bytes; empty if the file has none and no tokenizer is given.
        is_scored: Whether its advantages compare the episodes' rewards, so that equal rewards train nothing.
        facts: Further facts, by name: the settings of `training_rows`, the trainer, the step.
        problems: What the reader noticed: `(kind, why)`, with kinds of `doctor.KINDS`.
    """

    id: str
    episodes: list[Episode]
    kind: str = ""
    file: str = ""
    vocabulary: Mapping[int, bytes] = field(default_factory=dict)
    is_scored: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)


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
        sequence: Position of the sequence in `Episode.sequences`; None if it concerns no sequence.
        token: Position of the first token: in the sequence if there is one, else among the turn's sampled tokens.
        count: Number of tokens from there.
    """

    kind: str
    why: str
    file: str
    group: str | None = None
    episode: str | None = None
    turn: int | None = None
    sequence: int | None = None
    token: int | None = None
    count: int = 0

    @property
    def where(self) -> str:
        """The place in words, from the file to the token."""
        return ", ".join(self._places())

    def _places(self) -> Iterator[str]:
        yield self.file
        if self.episode is None and self.group is not None:
            yield f"group {self.group}"
        if self.episode is not None:
            yield f"episode {self.episode}"
        if self.sequence is not None:
            yield f"sequence {self.sequence}"
        if self.turn is not None:
            yield f"turn {self.turn}"
        if self.token is not None:
            yield f"token {self.token}" + (f" to {self.token + self.count - 1}" if self.count > 1 else "")
