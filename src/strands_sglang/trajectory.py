"""All model calls of an episode, as a forest of turns.

A *turn* is one model call: the prompt tokens that it added, and the tokens that it sampled. A call extends the recorded
turn whose conversation (what it was asked, plus its own answer) is an exact prefix of what arrived; anything else
starts a new sequence, with the reason why. The key is the conversation itself, never a cursor, so rewritten histories,
retries, several agents and several threads on one model object cannot corrupt a recorded sequence.

Invariants:
- A turn's token ids are fixed once it is answered; failed turns hold no sampled token.
- The ids sent for a turn are `sequence_ids(parent) + prompt_ids`.
- In `sequences()` every sampled token has loss mask 1 in exactly one sequence, the first that contains it, unless its
  turn was sampled under a grammar (off-policy), which has mask 0 everywhere.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from strands.types.content import Message, Messages

from .generation import Generation
from .messages import Conversation, message_digest, next_link
from .tokens import Segment, TokenManager

_COMPARED_TURNS = 64  # how many recorded turns an explanation looks at; more would make forests of thousands slow


class TurnStatus(str, Enum):
    """How far a turn has come."""

    ASKED = "asked"
    """The request is on its way."""
    ANSWERED = "answered"
    """The answer is recorded; no later call has built on it yet."""
    COMMITTED = "committed"
    """A later call has built on the answer."""
    CUT = "cut"
    """The server aborted the request, or the answer could not be read; what was sampled until then is recorded."""
    FAILED = "failed"
    """No answer came. A retry of the same call replaces the turn."""


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
        sampling_params: As they were sent.
        status: How far it has come.
        generation: The server's answer, None until it came.
        clamped: Whether `max_new_tokens` was lowered to what the context still had room for.
        cause: The error that failed the turn.
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
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    status: TurnStatus = TurnStatus.ASKED
    generation: Generation | None = None
    clamped: bool = False
    cause: BaseException | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    result_notices: Mapping[str, str] = field(default_factory=dict)
    answer_key: bytes | None = None
    answer_digest: bytes | None = None
    _prompt_logprobs: array[float] | None = None
    _root: Turn | None = None

    @property
    def output_ids(self) -> array[int]:
        """The sampled ids, shape (T,); empty until the turn is answered."""
        return self.generation.output_ids if self.generation is not None else array("i")

    @property
    def is_answered(self) -> bool:
        """Whether sampled tokens (perhaps none, perhaps cut off) are recorded."""
        return self.generation is not None

    @property
    def ends_at_context_limit(self) -> bool:
        """Whether the answer was cut off because the context was full, not because `max_new_tokens` was reached.

        SGLang ends a request a few tokens before the context's end and calls that "length" too.
        """
        if self.generation is None or self.generation.finish_type != "length":
            return False
        asked = self.sampling_params.get("max_new_tokens")
        return self.clamped or (asked is not None and self.generation.completion_tokens < asked)

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

    def path(self) -> list[Turn]:
        """The turns from the root to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def token_ids(self) -> list[int]:
        """The ids of the sequence up to and including this turn's answer, shape (T,)."""
        ids: list[int] = []
        for turn in self.path():
            ids.extend(turn.prompt_ids)
            ids.extend(turn.output_ids)
        return ids


@dataclass(frozen=True)
class Place:
    """Where a call belongs.

    Attributes:
        turn: The turn that it extends; None if it opens a sequence.
        new_messages: The messages that came since.
        reason: Why, for people.
    """

    turn: Turn | None
    new_messages: Messages
    reason: str


class Trajectory:
    """The recorded turns of an episode. Safe to use from several threads."""

    def __init__(self) -> None:
        """Start empty."""
        self._turns: list[Turn] = []
        self._answers: dict[bytes, Turn] = {}
        self._failures: dict[tuple[int, bytes], Turn] = {}
        self._lock = threading.RLock()
        self._calls = 0

    # --- recording ---

    def attach(self, conversation: Conversation, messages: Messages) -> Place:
        """Find the deepest recorded turn whose conversation and answer are an exact prefix of what arrived."""
        with self._lock:
            for known in range(len(messages), 0, -1):
                turn = self._answers.get(conversation.chain[known])
                if turn is not None:
                    return Place(turn, messages[known:], self._why_here(turn, known, conversation))
            return Place(None, messages, self._why_new(conversation))

    def ask(
        self,
        place: Place,
        conversation: Conversation,
        prompt_ids: Iterable[int],
        *,
        reasoning_open: bool = False,
        constrained: bool = False,
        sampling_params: Mapping[str, Any] | None = None,
        clamped: bool = False,
    ) -> Turn:
        """Record that a call is about to be made: its prompt is known from here on.

        A failed turn that asked the same is replaced, so that retrying never duplicates anything.

        Args:
            place: Where the call belongs.
            conversation: What it asks.
            prompt_ids: The prompt tokens that it adds, shape (P,).
            reasoning_open: Whether the prompt ends inside reasoning.
            constrained: Whether a grammar constrains the sampling.
            sampling_params: As they will be sent.
            clamped: Whether `max_new_tokens` was lowered to the room that the context has left.
        """
        known = len(conversation.digests) - len(place.new_messages)
        with self._lock:
            replaced = self._failures.pop((id(place.turn), conversation.key), None)
            if replaced is not None:
                self._turns.remove(replaced)
            turn = Turn(
                index=self._calls,
                parent=place.turn,
                reason=place.reason,
                key=conversation.key,
                parts=conversation.parts,
                digests=conversation.digests[known:],
                roles=conversation.roles[known:],
                prompt_ids=array("i", prompt_ids),
                reasoning_open=reasoning_open,
                constrained=constrained,
                sampling_params=dict(sampling_params or {}),
                clamped=clamped,
                _root=None if place.turn is None else place.turn.root,
            )
            self._calls += 1
            self._turns.append(turn)
            return turn

    def answer(
        self,
        turn: Turn,
        generation: Generation,
        message: Message,
        *,
        tool_calls: Iterable[Mapping[str, Any]] = (),
        result_notices: Mapping[str, str] | None = None,
    ) -> None:
        """Record a turn's answer.

        Args:
            turn: The turn that was asked.
            generation: What the server returned.
            message: The answer as the agent will hand it back.
            tool_calls: Its tool uses, `{"toolUseId", "name", "id"}` in order.
            result_notices: By toolUseId, the text that replaces the result of a call that did not parse.
        """
        with self._lock:
            turn.tool_calls = tuple(tool_calls)
            turn.result_notices = dict(result_notices or {})
            turn.answer_digest = message_digest(message)
            turn.answer_key = next_link(turn.key, turn.answer_digest)
            self._record(turn, generation, TurnStatus.ANSWERED)
            self._answers[turn.answer_key] = turn

    def cut(self, turn: Turn, generation: Generation, cause: BaseException) -> None:
        """Record what a turn had sampled when it was aborted or found unreadable. Nothing extends a cut turn."""
        with self._lock:
            turn.cause = cause
            if generation.output_ids:
                self._record(turn, generation, TurnStatus.CUT)
            else:
                self.fail(turn, cause)

    def fail(self, turn: Turn, cause: BaseException) -> None:
        """Record that a turn got no answer."""
        with self._lock:
            turn.cause = cause
            turn.status = TurnStatus.FAILED
            self._failures[id(turn.parent), turn.key] = turn

    def _record(self, turn: Turn, generation: Generation, status: TurnStatus) -> None:
        turn.generation = generation
        turn.status = status
        logprobs = generation.prompt_logprobs[-len(turn.prompt_ids) :]
        if len(logprobs) == len(turn.prompt_ids):
            turn._prompt_logprobs = array("d", (float("nan") if value is None else value for value in logprobs))
        parent = turn.parent
        if parent is not None and parent.status is TurnStatus.ANSWERED:
            parent.status = TurnStatus.COMMITTED

    # --- reading ---

    @property
    def turns(self) -> list[Turn]:
        """All turns in the order of their calls."""
        with self._lock:
            return list(self._turns)

    def __len__(self) -> int:
        """Number of turns."""
        return len(self._turns)

    def sequences(self) -> list[TokenManager]:
        """The sequences from each root to each leaf, in the order of their last call.

        Turns without an answer are left out. Every sampled token has loss mask 1 in exactly one of the sequences.
        """
        with self._lock:
            answered = [turn for turn in self._turns if turn.is_answered]
            inner = {id(turn.parent) for turn in answered if turn.parent is not None}
            trained: set[int] = set()
            sequences = []
            for leaf in (turn for turn in answered if id(turn) not in inner):
                path = leaf.path()
                sequences.append(_sequence(path, already_trained=trained))
                trained.update(id(turn) for turn in path)
            return sequences

    def latest_main_sequence(self) -> TokenManager:
        """The latest sequence of the main conversation, with its own full mask.

        The main conversation is the first one since the start that was answered, structured-output calls left aside;
        before any answer it is the latest one that was asked, so that its opening prompt can be seen.
        """
        with self._lock:
            roots = [turn for turn in self._turns if turn.parent is None and not turn.constrained]
            root = next((turn for turn in roots if turn.is_answered), roots[-1] if roots else None)
            if root is None:
                return TokenManager()
            leaf = root
            for turn in self._turns:
                if turn.is_answered and turn.root is root:
                    leaf = turn
            return _sequence(leaf.path(), already_trained=())

    # --- explaining ---

    def _why_here(self, turn: Turn, known: int, conversation: Conversation) -> str:
        """Why a conversation extends a turn, and if another call extended it before, what differs from that one."""
        if turn.status is TurnStatus.COMMITTED:
            later = [leaf for leaf in self._leaves() if turn in leaf.path()[:-1]]
            differences = [_first_difference(leaf, conversation) for leaf in later]
            if differences:
                return f"forks after call {turn.index}: {max(reversed(differences), key=_agreement)[1]}"
        return f"extends call {turn.index} with {len(conversation.digests) - known} new message(s)"

    def _leaves(self) -> list[Turn]:
        """The latest answered turns that no other turn extends, structured-output calls left aside."""
        recent = self._turns[-_COMPARED_TURNS:]
        inner = {id(turn.parent) for turn in recent}
        return [turn for turn in recent if turn.answer_digest and id(turn) not in inner and not turn.constrained]

    def _why_new(self, conversation: Conversation) -> str:
        """Why nothing recorded is a prefix of this conversation: the first thing that differs from the closest one."""
        leaves = self._leaves()
        if not leaves:
            return "opens the first sequence"
        differences = [_first_difference(leaf, conversation) for leaf in leaves]
        return "opens a sequence: " + max(reversed(differences), key=_agreement)[1]


def _first_difference(leaf: Turn, conversation: Conversation) -> tuple[int, str]:
    """How far a conversation agrees with a recorded one, and what differs first."""
    compared = f"(compared with call {leaf.index})"
    for name, digest in leaf.parts.items():
        if conversation.parts.get(name) != digest:
            return 0, f"the {name} changed {compared}"
    recorded = [
        (digest, role)
        for turn in leaf.path()
        for digest, role in (*zip(turn.digests, turn.roles, strict=True), (turn.answer_digest, "assistant"))
    ]
    arrived = list(zip(conversation.digests, conversation.roles, strict=True))
    for i, ((known, known_role), (new, new_role)) in enumerate(zip(recorded, arrived, strict=False)):
        if known != new:
            return i + 1, f"message {i} ({new_role}) is not the recorded one ({known_role}) {compared}"
    return len(arrived) + 1, f"it stops after message {len(arrived) - 1}, before the recorded answer {compared}"


def _agreement(difference: tuple[int, str]) -> int:
    return difference[0]


def _sequence(path: list[Turn], already_trained: Iterable[int]) -> TokenManager:
    """The tokens of a path of turns."""
    trained = set(already_trained)
    return TokenManager(segment for turn in path for segment in _segments(turn, train=id(turn) not in trained))


def _segments(turn: Turn, *, train: bool) -> Iterator[Segment]:
    logprobs: array[float] | None = turn._prompt_logprobs
    if logprobs is None and turn.parent is not None:
        # Observations carry logprob 0.0, which trainers ask for; the opening prompt's are unknown.
        logprobs = array("d", bytes(8 * len(turn.prompt_ids)))
    yield Segment(turn.prompt_ids, logprobs, is_response=False)
    if turn.generation is not None:
        yield Segment(
            turn.generation.output_ids,
            turn.generation.logprobs,
            is_response=True,
            loss_mask=int(train and not turn.constrained),
            finish_reason=turn.generation.finish_type,
            weight_version=turn.generation.weight_version,
        )


__all__ = ["Place", "Trajectory", "Turn", "TurnStatus"]
