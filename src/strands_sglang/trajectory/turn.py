"""One model call of an episode: what it added to the prompt, what it sampled, and how far it has come."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..protocol.generation import Generation
from ..templates.image_tokens import ImageInputs

if TYPE_CHECKING:
    from .trajectory import Trajectory


class TurnStatus(str, Enum):
    """How far a turn has come."""

    ASKED = "asked"
    """The request is on its way."""
    ANSWERED = "answered"
    """The answer is recorded; no later call has built on it yet."""
    COMMITTED = "committed"
    """A later call has built on the answer."""
    FINAL = "final"
    """The agent's messages end with the answer, or kept it in another form; see `Trajectory.settle`."""
    DISCARDED = "discarded"
    """The agent threw the answer away: a hook retried the call, or a guide, a cancel, another text took its place."""
    CUT = "cut"
    """The server aborted the request, or the answer could not be read; what was sampled until then is recorded."""
    FAILED = "failed"
    """No answer came. A retry of the call by the same agent replaces the turn."""


class RecordedError(Exception):
    """The error that failed a turn, as far as a file tells: its kind and its message."""


@dataclass(eq=False, repr=False)
class Turn:
    """One model call.

    Attributes:
        index: Position in the order of the calls of the trajectory.
        parent: The turn that it extends; None if it opens a sequence.
        reason: Why it extends or opens, for people.
        key: Identifies the conversation that it was asked with.
        parts: Digests of what stands before the messages (system prompt, tools, template).
        digests: Digests of the messages that came since the parent's answer.
        roles: Their roles.
        prompt_ids: The prompt tokens that it added, shape (P,).
        reasoning_open: Whether the prompt ends inside reasoning.
        constrained: Whether the tokens are sampled under a grammar.
        agent: Who asked; None for a call from outside an agent's loop.
        cycle: The turn of the agent's loop that it asked in, as Strands names it; retries have the same.
        is_auxiliary: Whether the call is none of a rollout's own: a summary, a judge, structured output outside a loop.
        sampling_params: As they were sent.
        request_fields: The further fields of the request that the user had given, as they were sent.
        status: How far it has come.
        generation: The server's answer, None until it came.
        clamped: Whether `max_new_tokens` was lowered to what the context still had room for.
        parent_kept: How many of the parent's sampled ids stand before this turn's prompt; None for all of them. One
            less than all where the parent stopped with another token than the chat template puts there.
        ends_in_reasoning: Whether the answer ends inside reasoning that nothing closed.
        has_reasoning: Whether the answer holds reasoning.
        cause: The error that failed the turn.
        images: The images of its prompt; None where it has none.
        tool_calls: The answer's tool calls, `{"toolUseId", "name", "id"}` in order; the model knows them by `id`.
        answer_key: Identifies the conversation with the answer; None until it came.
        answer_digest: Digest of the answer as the agent hands it back.
        answer_blocks: Kinds and digests of its content blocks (see `messages.block_digests`).
        was_added: Whether the agent's hooks saw the answer, perhaps edited, come into its history; None where it has
            no hooks that tell (see `hooks`).
        note: Why the answer was discarded, or what the agent made of it; empty if there is nothing to say.
        trajectory: The trajectory that records it; None for a turn on its own.
        requests_s: Seconds that its requests took so far; not saved.
        resumes: What an earlier attempt at this call had sampled, where it goes on from there.
        prompt_logprobs: Logprobs of `prompt_ids`, shape (P,); None if they were not asked for.
    """

    index: int
    parent: Turn | None
    reason: str
    key: bytes
    parts: Mapping[str, bytes]
    digests: tuple[bytes, ...]
    roles: tuple[str, ...]
    prompt_ids: array[int]
    reasoning_open: bool = False
    constrained: bool = False
    agent: str | None = None
    cycle: str | None = None
    is_auxiliary: bool = False
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    request_fields: Mapping[str, Any] = field(default_factory=dict)
    status: TurnStatus = TurnStatus.ASKED
    generation: Generation | None = None
    clamped: bool = False
    parent_kept: int | None = None
    ends_in_reasoning: bool = False
    has_reasoning: bool = False
    cause: BaseException | None = None
    images: ImageInputs | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    answer_key: bytes | None = None
    answer_digest: bytes | None = None
    answer_blocks: tuple[tuple[str, bytes], ...] = ()
    was_added: bool | None = None
    note: str = ""
    prompt_logprobs: array[float] | None = None
    resumes: Generation | None = None
    requests_s: float = 0.0
    trajectory: Trajectory | None = None
    _root: Turn | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Find the root once: walking up from every turn would be quadratic."""
        self._root = None if self.parent is None else self.parent.root

    def __reduce__(self) -> Any:
        """Pickle and copy the turn as a part of its trajectory.

        A chain of parents would recurse once per turn; a trajectory is flat, and all its turns share one copy.

        Raises:
            TypeError: No trajectory records it, or a retry has replaced it there.
        """
        if self.trajectory is None or self not in self.trajectory.turns:
            raise TypeError(f"{self!r} is part of no trajectory, so it cannot be pickled or copied")
        return _turn_of, (self.trajectory, self.index)

    @property
    def output_ids(self) -> array[int]:
        """The sampled ids, shape (T,); empty until the turn is answered."""
        return self.generation.output_ids if self.generation is not None else array("i")

    @property
    def is_answered(self) -> bool:
        """Whether sampled tokens (perhaps none, perhaps cut off) are recorded."""
        return self.generation is not None

    @property
    def waits_to_go_on(self) -> bool:
        """Whether the call that asks the same next goes on from the tokens of this cut turn."""
        return self.resumes is not None and self.generation is self.resumes

    @property
    def ends_at_context_limit(self) -> bool:
        """Whether the answer was cut off because the context was full, not because `max_new_tokens` was reached.

        SGLang ends a request a few tokens before the context's end and calls that "length" too.
        """
        if self.generation is None or self.generation.finish_type != "length":
            return False
        asked = self.sampling_params.get("max_new_tokens")
        return self.clamped or (asked is not None and self.generation.completion_tokens < asked)

    @property
    def is_cut_short(self) -> bool:
        """Whether the answer ended at `max_new_tokens` or at the end of the context."""
        return self.generation is not None and self.generation.finish_type == "length"

    @property
    def failure(self) -> str | None:
        """Kind and message of the error that failed the turn; None if there was none."""
        if self.cause is None or isinstance(self.cause, RecordedError):
            return None if self.cause is None else str(self.cause)
        return f"{type(self.cause).__name__}: {self.cause}"

    def __repr__(self) -> str:
        """Counts and the reason; never the tokens, which may be many."""
        return (
            f"Turn({self.index}, {self.status.value}, {len(self.prompt_ids)} prompt and {len(self.output_ids)} sampled "
            f"tokens, {self.reason!r})"
        )

    @property
    def root(self) -> Turn:
        """The turn that opened the sequence."""
        return self if self._root is None else self._root

    def path(self, after: Turn | None = None) -> list[Turn]:
        """The turns from the root to this one, or those after one of them; none if that is not on the way."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None and (after is None or turn.index > after.index):  # a turn is younger than its parent
            turns.append(turn)
            turn = turn.parent
        return turns[::-1] if turn is after else []

    @property
    def calls_before(self) -> int:
        """How many tool calls the recorded turns before this one have made."""
        return sum(len(turn.tool_calls) for turn in self.path()[:-1])

    def asked(self) -> tuple[bytes, ...]:
        """Digests of the messages that it was asked with."""
        path = self.path()
        earlier = [(*turn.digests, turn.answer_digest or b"") for turn in path[:-1]]
        return tuple(digest for digests in (*earlier, self.digests) for digest in digests)

    def steps(self) -> list[tuple[Turn, int]]:
        """The turns from the root to this one, each with how many of its sampled ids stand in this sequence."""
        path = self.path()
        kept = [turn.parent_kept for turn in path[1:]]
        return [
            (turn, len(turn.output_ids) if count is None else count)
            for turn, count in zip(path, [*kept, None], strict=True)
        ]

    def token_ids(self, *, as_sent: bool = False) -> list[int]:
        """The ids of the sequence up to and including this turn's answer, shape (T,).

        Args:
            as_sent: Whether every image has its placeholder once, as the server takes them.
        """
        ids: list[int] = []
        for turn, kept in self.steps():
            ids.extend(turn.images.sent_ids if as_sent and turn.images is not None else turn.prompt_ids)
            ids.extend(turn.output_ids[:kept])
        return ids

    def image_inputs(self) -> list[ImageInputs]:
        """The images of the sequence up to this turn, by the turns that have any."""
        return [turn.images for turn in self.path() if turn.images is not None]

    def sent_ids(self) -> list[int]:
        """The ids of `token_ids` with every image's placeholder once, as the server takes them."""
        return self.token_ids(as_sent=True)


def _turn_of(trajectory: Trajectory, index: int) -> Turn:
    return next(turn for turn in trajectory.turns if turn.index == index)
