"""One model call of an episode: what it added to the prompt, what it sampled, and its status."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..messages import ChatTools
from ..messages.said import Said
from ..outcomes import TerminationReason, termination_reason
from ..protocol.generation import Generation
from ..protocol.wire import EncodedIds
from ..reasons import Reason
from ..templates.image_tokens import ImageInputs

if TYPE_CHECKING:
    from .trajectory import Trajectory


class TurnStatus(str, Enum):
    """The status of a turn."""

    ASKED = "asked"
    """The request is under way."""
    ANSWERED = "answered"
    """The answer is recorded; no later call has built on it yet."""
    COMMITTED = "committed"
    """A later call has built on the answer."""
    FINAL = "final"
    """The agent's messages end with the answer or hold it in another form; see `Trajectory.settle`."""
    DISCARDED = "discarded"
    """The agent threw the answer away: a hook retried the call, or a guide, a cancel or another text replaced it."""
    CUT = "cut"
    """The request was aborted, or the answer could not be parsed; the sampled tokens are recorded."""
    FAILED = "failed"
    """No answer came. A retry of the call by the same agent replaces the turn."""


class RecordedError(Exception):
    """The error that failed a turn, as read from a file: its type and its message.

    Attributes:
        outcome: Outcome of an episode that it ends; None if the file does not tell.
    """

    def __init__(self, message: str, outcome: TerminationReason | None = None) -> None:
        """Initialize with the message and the outcome."""
        super().__init__(message)
        self.outcome = outcome


@dataclass(eq=False, repr=False, slots=True)
class Turn:
    """One model call of an episode.

    Attributes:
        index: Position in the order of the calls.
        parent: The turn that it extends; None if it opens a sequence.
        why: Why it extends that turn, forks or opens a sequence.
        key: Digest of the conversation that was asked.
        parts: Digests of what precedes the messages (system prompt, tools, template), by name.
        digests: Digests of the messages since the parent's answer, shape `(M,)`.
        roles: Roles of those messages, shape `(M,)`.
        prompt_ids: Ids of the prompt tokens that the call added, shape `(P,)`.
        reasoning_open: Whether the prompt ends inside reasoning.
        constrained: Whether the answer was sampled under a grammar. Such tokens are off-policy and have loss mask 0.
        agent: Id of the agent that asked; None for a call from outside an agent's loop.
        cycle: Strands' id of the event-loop cycle that asked. Retries share it.
        is_auxiliary: Whether the call is not part of the rollout itself: a summary, a judge, structured output outside
            an agent's loop, or any call of `model.auxiliary`.
        sampling_params: The sampling parameters, as sent.
        request_fields: The `request_fields` of the configuration, as sent.
        status: The status of the turn.
        generation: The server's answer, with `output_ids`, `logprobs`, `finish_type`, `weight_version`, `cached_tokens`
            and more; None until it arrives.
        clamped: Whether `max_new_tokens` was lowered to fit the context.
        parent_kept: Number of the parent's sampled ids that precede this turn's prompt; None for all. It is all but the
            last if the parent stopped with a different token than the chat template writes there.
        ends_in_reasoning: Whether the answer ends inside unclosed reasoning.
        has_reasoning: Whether the answer holds reasoning, even if that is empty.
        cause: The error that failed or cut the turn.
        images: The images of the prompt; None without images.
        tool_calls: The answer's tool calls in order, each as `{"toolUseId", "name", "id"}`. The model knows a call by
            its `id`.
        answer_key: Digest of the conversation with the answer; None until it arrives.
        answer_digest: Digest of the answer as the agent hands it back; None until it arrives.
        answer_blocks: Kind and digest of each content block of the answer.
        was_added: Whether the answer, perhaps edited, entered the agent's history; None without `model.hooks`.
        fate: Why the answer was discarded, in which other form the agent kept it, or that neither is known; often None.
        prompt_logprobs: Logprobs of `prompt_ids`, shape `(P,)`; None if they were not requested.
        resumes: What an earlier attempt at this call sampled, if the call continues from it.
        said: What the prompt added to the conversation, as people read it.
        answered: The answer, as people read it.
        text: Text of the sampled ids, if the trajectory was read from a file; saving a new one decodes it.
        requests_s: Seconds that its requests took so far; not saved.
        chat_tools: The tools in the form of chat templates, shared by the turns with the same tools; not saved.
        trajectory: The trajectory that records it; None for a turn on its own.
    """

    index: int
    parent: Turn | None
    why: Reason
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
    fate: Reason | None = None
    prompt_logprobs: array[float] | None = None
    resumes: Generation | None = None
    said: tuple[Said, ...] = ()
    answered: tuple[Said, ...] = ()
    text: str | None = None
    requests_s: float = 0.0
    chat_tools: ChatTools | None = None
    trajectory: Trajectory | None = None
    _root: Turn | None = field(default=None, init=False)
    _before: int = field(default=0, init=False)
    _added: EncodedIds | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Look up the root and count the ids once: walking up from every turn would be quadratic."""
        parent = self.parent
        if parent is not None:
            self._root = parent.root
            kept = len(parent.output_ids) if self.parent_kept is None else self.parent_kept
            self._before = parent.prompt_tokens + kept

    def __reduce__(self) -> Any:
        """Pickle and copy the turn as part of its trajectory.

        A chain of parents would recurse once per turn. A trajectory is flat, and all its turns share one copy.

        Raises:
            TypeError: No trajectory records the turn, or a retry has replaced it there.
        """
        if self.trajectory is None or self not in self.trajectory.turns:
            raise TypeError(f"{self!r} belongs to no trajectory, so it cannot be pickled or copied")
        return _turn_of, (self.trajectory, self.index)

    @property
    def prompt_tokens(self) -> int:
        """Number of ids of the whole prompt: those before `prompt_ids`, and these."""
        return self._before + len(self.prompt_ids)

    @property
    def output_ids(self) -> array[int]:
        """Ids of the sampled tokens, shape `(T,)`; empty until the turn is answered."""
        return self.generation.output_ids if self.generation is not None else array("i")

    @property
    def is_answered(self) -> bool:
        """Whether an answer is recorded, even an empty or a cut one."""
        return self.generation is not None

    @property
    def waits_to_go_on(self) -> bool:
        """Whether the next call that asks the same continues from the tokens of this cut turn.

        `Trajectory.resume` sets it.
        """
        return self.resumes is not None and self.generation is self.resumes

    @property
    def is_whole(self) -> bool:
        """Whether the whole answer is recorded, even if the agent has not got it."""
        return self.generation is not None and self.generation.finish_type != "abort"

    @property
    def ends_at_context_limit(self) -> bool:
        """Whether the end of the context, not `max_new_tokens`, cut the answer off.

        SGLang ends a request a few tokens before the end of the context and reports `"length"` for that too.
        """
        if self.generation is None or self.generation.finish_type != "length":
            return False
        asked = self.sampling_params.get("max_new_tokens")
        return self.clamped or (asked is not None and self.generation.completion_tokens < asked)

    @property
    def is_cut_short(self) -> bool:
        """Whether `max_new_tokens` or the end of the context cut the answer off."""
        return self.generation is not None and self.generation.finish_type == "length"

    @property
    def reason(self) -> str:
        """Why it extends its parent, forks or opens a sequence, in words."""
        return str(self.why)

    @property
    def note(self) -> str:
        """Its `fate` in words; often empty."""
        return "" if self.fate is None else str(self.fate)

    @property
    def failure(self) -> str | None:
        """Type and message of the error that failed or cut the turn; None without one."""
        if self.cause is None or isinstance(self.cause, RecordedError):
            return None if self.cause is None else str(self.cause)
        return f"{type(self.cause).__name__}: {self.cause}"

    @property
    def failure_outcome(self) -> TerminationReason | None:
        """Outcome of an episode that the error ends; None without one, or if the file does not tell."""
        if isinstance(self.cause, RecordedError):
            return self.cause.outcome
        return None if self.cause is None else termination_reason(self.cause)

    def __repr__(self) -> str:
        """Show counts and the reason, never the tokens, which may be many."""
        return (
            f"Turn({self.index}, {self.status.value}, {len(self.prompt_ids)} prompt and {len(self.output_ids)} sampled "
            f"tokens, {self.reason!r})"
        )

    @property
    def root(self) -> Turn:
        """The turn that opened the sequence."""
        return self if self._root is None else self._root

    def path(self, after: Turn | None = None) -> list[Turn]:
        """Return the turns from the root to this one.

        Args:
            after: Return only the turns after this one; none if it is not on the path.
        """
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None and (after is None or turn.index > after.index):  # a turn is younger than its parent
            turns.append(turn)
            turn = turn.parent
        return turns[::-1] if turn is after else []

    @property
    def has_calls_before(self) -> bool:
        """Whether there are tool calls in the earlier turns of the sequence."""
        turn = self.parent
        while turn is not None and not turn.tool_calls:
            turn = turn.parent
        return turn is not None

    def asked(self) -> tuple[bytes, ...]:
        """Return the digests of all messages that were asked."""
        path = self.path()
        earlier = [(*turn.digests, turn.answer_digest or b"") for turn in path[:-1]]
        return tuple(chain(*earlier, self.digests))

    def steps(self) -> list[tuple[Turn, int]]:
        """Return the turns from the root to this one, each with the number of its sampled ids in this sequence."""
        path = self.path()
        kept = [turn.parent_kept for turn in path[1:]]
        return [
            (turn, len(turn.output_ids) if count is None else count)
            for turn, count in zip(path, [*kept, None], strict=True)
        ]

    def token_ids(self, *, as_sent: bool = False) -> list[int]:
        """Return the ids of the sequence, up to and including this turn's answer, shape `(T,)`.

        Args:
            as_sent: Whether each image has a single placeholder, as in requests to the server.
        """
        ids: list[int] = []
        for turn, kept in self.steps():
            ids.extend(turn.images.sent_ids if as_sent and turn.images is not None else turn.prompt_ids)
            ids.extend(turn.output_ids[:kept])
        return ids

    def encoded_ids(self, vocab_size: int) -> EncodedIds:
        """Return the ids of this turn's request as JSON, with a single placeholder per image.

        Each turn keeps what it added to the request of its parent, so only new ids are checked and encoded.

        Args:
            vocab_size: Number of token ids of the model, which bounds this turn's prompt. What the server sampled may
                be padding beyond it.

        Raises:
            ValueError: An id cannot be sent.
        """
        parent: Turn | None = None
        parts = []  # another thread may call `forget_encoded_ids` meanwhile
        for turn in self.path():
            added = turn._added
            if added is None:
                answer = EncodedIds() if parent is None else EncodedIds.encode(parent.output_ids[: turn.parent_kept])
                prompt_ids = turn.prompt_ids if turn.images is None else turn.images.sent_ids
                added = turn._added = answer.plus(prompt_ids, vocab_size if turn is self else None)
            parts.append(added)
            parent = turn
        return EncodedIds.joined(parts)

    def forget_encoded_ids(self) -> None:
        """Free the memory that `encoded_ids` has taken for this turn; the next request encodes it again."""
        self._added = None

    def image_inputs(self) -> list[ImageInputs]:
        """Return the images of the sequence up to this turn, one entry per turn with images."""
        return [turn.images for turn in self.path() if turn.images is not None]

    def sent_ids(self) -> list[int]:
        """Return `token_ids(as_sent=True)`."""
        return self.token_ids(as_sent=True)


def ids_in(turns: Iterable[Turn]) -> set[int]:
    """Return the ids of the tokens that turns added."""
    ids: set[int] = set()
    for turn in turns:
        ids.update(turn.prompt_ids, turn.output_ids)
    return ids


def _turn_of(trajectory: Trajectory, index: int) -> Turn:
    return next(turn for turn in trajectory.turns if turn.index == index)
