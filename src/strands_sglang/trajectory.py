"""All model calls of an episode, as a forest of turns.

A *turn* is one model call: the prompt tokens that it added, and the tokens that it sampled. A call extends the recorded
turn whose conversation (what it was asked, plus its own answer) is an exact prefix of what arrived; anything else
starts a new sequence, with the reason why. The key is the conversation itself, never a cursor, so rewritten histories,
retries, several agents and several threads on one model object cannot corrupt a recorded sequence.

Invariants:
- A turn's token ids are fixed once it is answered; failed turns hold no sampled token.
- The ids sent for a turn are `parent.token_ids() + prompt_ids`.
- In `sequences()` every sampled token has loss mask 1 in exactly one sequence, the first that contains it, unless its
  turn was sampled under a grammar (off-policy), which has mask 0 everywhere.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from strands.types.content import Message, Messages

from .generation import Generation
from .messages import Conversation, message_digest, next_link
from .tokens import Segment, TokenManager
from .turns import Turn, TurnStatus

_COMPARED_TURNS = 64  # how many recorded turns an explanation looks at; more would make forests of thousands slow


@dataclass(frozen=True)
class Place:
    """Where a call belongs.

    Attributes:
        turn: The turn that it extends; None if it opens a sequence.
        new_messages: The messages that came since.
        reason: Why, for people.
        kept: How many of that turn's sampled ids stay before the call's prompt; None for all of them.
    """

    turn: Turn | None
    new_messages: Messages
    reason: str
    kept: int | None = None

    def token_ids(self) -> list[int]:
        """The ids that stand before the call's prompt, shape (T,)."""
        if self.turn is None:
            return []
        ids = self.turn.token_ids()
        return ids if self.kept is None else ids[: len(ids) - len(self.turn.output_ids) + self.kept]


class Trajectory:
    """The recorded turns of an episode. Safe to use from several threads.

    Attributes:
        tool_parse_errors: How many tool calls did not parse, by the name that they seemed to mean.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._turns: list[Turn] = []
        self._answers: dict[bytes, Turn] = {}
        self._failures: dict[tuple[int, bytes], Turn] = {}
        self._notices: dict[str, str] = {}
        self._call_ids: dict[str, str] = {}
        self.tool_parse_errors: dict[str, int] = {}
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
                parent_kept=place.kept,
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
        parse_errors: Iterable[str] = (),
        ends_in_reasoning: bool = False,
    ) -> None:
        """Record a turn's answer.

        Args:
            turn: The turn that was asked.
            generation: What the server returned.
            message: The answer as the agent will hand it back.
            tool_calls: Its tool uses, `{"toolUseId", "name", "id"}` in order.
            result_notices: By toolUseId, the text that replaces the result of a call that did not parse.
            parse_errors: The names that the calls which did not parse seemed to mean.
            ends_in_reasoning: Whether the answer ends inside reasoning that nothing closed.
        """
        with self._lock:
            turn.tool_calls = tuple(tool_calls)
            turn.ends_in_reasoning = ends_in_reasoning
            self._call_ids.update((call["toolUseId"], call["id"]) for call in turn.tool_calls)
            self._notices.update(result_notices or {})
            for name in parse_errors:
                self.tool_parse_errors[name] = self.tool_parse_errors.get(name, 0) + 1
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
            turn._prompt_logprobs = logprobs
        parent = turn.parent
        if parent is not None and parent.status is TurnStatus.ANSWERED and not turn.constrained:
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
        """The sequences from each root to each leaf, in the order of their last call, cut and constrained ones last.

        Turns without an answer are left out. Every sampled token has loss mask 1 in exactly one of the sequences, the
        first that contains it.
        """
        with self._lock:
            answered = [turn for turn in self._turns if turn.is_answered]
            # A turn whose last token no later call kept ends a sequence of its own, where that token is trained.
            inner = {id(turn.parent) for turn in answered if turn.parent_kept is None and not turn.constrained}
            leaves = [turn for turn in answered if id(turn) not in inner]
            leaves.sort(key=lambda leaf: (leaf.constrained or leaf.status is TurnStatus.CUT, leaf.index))
            trained: set[int] = set()
            sequences = []
            for leaf in leaves:
                sequences.append(_sequence(leaf, already_trained=trained))
                trained.update(id(turn) for turn in leaf.path())
            return sequences

    def latest_main_sequence(self) -> TokenManager:
        """The latest sequence of the main conversation, with its own full mask.

        The main conversation is the first one since the start that was answered, every attempt at its first call
        included, structured-output calls left aside; before any answer it is the latest one that was asked, so that its
        opening prompt can be seen.
        """
        with self._lock:
            roots = [turn for turn in self._turns if turn.parent is None and not turn.constrained]
            first = next((turn for turn in roots if turn.is_answered), None)
            if first is None:
                return _sequence(roots[-1], already_trained=()) if roots else TokenManager()
            leaf = first
            for turn in self._turns:
                if turn.is_answered and not turn.constrained and turn.root.key == first.key:
                    leaf = turn
            return _sequence(leaf, already_trained=())

    def result_notice(self, tool_use_id: str) -> str | None:
        """What the model is told instead of the result of a tool call, if that call did not parse."""
        return self._notices.get(tool_use_id)

    def call_id(self, tool_use_id: str) -> str | None:
        """The id by which the model knows a recorded tool call; None for a call that is not recorded."""
        return self._call_ids.get(tool_use_id)

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
    i = 0
    for turn in leaf.path():
        for known, role in (*zip(turn.digests, turn.roles, strict=True), (turn.answer_digest, "assistant")):
            if i == len(conversation.digests):
                return i + 1, f"it stops after message {i - 1}, before the recorded answer {compared}"
            if known != conversation.digests[i]:
                return i + 1, f"message {i} ({conversation.roles[i]}) is not the recorded one ({role}) {compared}"
            i += 1
    return i + 1, f"it goes on after message {i - 1} {compared}"


def _agreement(difference: tuple[int, str]) -> int:
    return difference[0]


def _sequence(leaf: Turn, already_trained: Iterable[int]) -> TokenManager:
    """The tokens from the root to a turn."""
    trained = set(already_trained)
    return TokenManager(
        segment for turn, kept in leaf.steps() for segment in _segments(turn, kept, train=id(turn) not in trained)
    )


def _segments(turn: Turn, kept: int, *, train: bool) -> Iterator[Segment]:
    """A turn's prompt, and the first `kept` of its sampled tokens."""
    logprobs: array[float] | None = turn._prompt_logprobs
    if logprobs is None and turn.parent is not None:
        # Observations carry logprob 0.0, which trainers ask for; the opening prompt's are unknown.
        logprobs = array("d", bytes(8 * len(turn.prompt_ids)))
    yield Segment(turn.prompt_ids, logprobs, is_response=False)
    generation = turn.generation
    if generation is not None:
        yield Segment(
            generation.output_ids[:kept],
            None if generation.logprobs is None else generation.logprobs[:kept],
            is_response=True,
            loss_mask=int(train and not turn.constrained),
            finish_reason=generation.finish_type,
            weight_version=generation.weight_version,
        )


__all__ = ["Place", "Trajectory", "Turn", "TurnStatus"]
