"""What an agent did with its answers: built on them, kept them in another form, or threw them away.

With the model's hooks, Strands reports which message enters the history for an answer; only later edits of that message
remain to be found. Without hooks, the agent's later calls show it, and at the end its messages: what follows a question
that was answered. The rules:

- Attempts at one question in one cycle of the agent's loop are rivals (a hook retried, middleware took the best of
  several): one was kept, the others were thrown away. Attempts in other cycles are not judged by it: the agent started
  over, or a copy of it was asked.
- An answer is kept in another form if one of its tool calls is in the history or, without tool calls, its texts are,
  with more or fewer blocks next to them (a hook removed the reasoning). What was sampled was used, so it is trained.
- An answer whose text was replaced was thrown away.
- If a user message replaces an answer, the answer was thrown away if the message came in the same cycle of the loop (a
  guide). Otherwise the agent went back to the question, as between attempts at a goal, and the answer is an attempt
  like the others.
- An answer that was cut off at `max_new_tokens` is rewritten by Strands, not thrown away.
- If the question of an answer is gone from the history (shortened, summarized, redacted), its note says that the answer
  is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from strands.types.content import Message, Messages

from ..messages import block_difference, block_digests, blocks_of, message_digest
from ..reasons import Reason
from .turn import Turn, TurnStatus

_OPEN = TurnStatus.ANSWERED

UNKNOWN = Reason("unknown")
"""The fate of an answer is unknown. It is trained: it was sampled, and given to the agent."""


@dataclass(frozen=True)
class After:
    """What follows a question in an agent's history.

    Attributes:
        digests: Digests of the messages after the question.
        messages: The last messages, as far as they are available.
        position: Position of the first message after the question.
        kept_status: Status of an answer that the agent kept: committed if a later call shows it, final if the last
            messages do, still answered if the message that entered the history does.
        cycle: Event-loop cycle in which a later call is made.
    """

    digests: tuple[bytes, ...]
    messages: Messages
    position: int
    kept_status: TurnStatus
    cycle: str | None = None

    @property
    def first(self) -> Message | None:
        """The first message after the question, if available."""
        at = len(self.messages) - len(self.digests)
        return self.messages[at] if 0 <= at < len(self.messages) else None

    def is_in_cycle_of(self, turn: Turn) -> bool:
        """Whether this is a later call in the event-loop cycle in which the question was asked."""
        return self.kept_status is TurnStatus.COMMITTED and turn.cycle == self.cycle


def judge(attempts: Sequence[Turn], undecided: Sequence[Turn], after: After) -> Iterator[Turn]:
    """Settle which answers to one question an agent kept.

    Args:
        attempts: All answered turns that asked the question, in order.
        undecided: The turns to settle.
        after: What follows the question.

    Yields:
        The turns whose answers were replaced by text that was not sampled.
    """
    if not undecided:
        return
    standing = _standing_answer(attempts, after)
    if standing is not None:
        judged_cycle = standing.cycle
    else:
        in_cycle = [turn for turn in attempts if after.is_in_cycle_of(turn)]
        asks_again = after.kept_status is TurnStatus.COMMITTED and not after.digests
        judged_cycle = after.cycle if in_cycle or asks_again else attempts[-1].cycle
    for turn in undecided:
        if turn.cycle != judged_cycle:
            _note_unknown(turn)
        elif _is_replaced(turn, after, taken=standing not in (None, turn)):
            yield turn
    if standing is not None and after.kept_status is _OPEN:
        standing.was_added = True


def judge_end(turns: Sequence[Turn], messages: Messages) -> Iterator[Turn]:
    """Settle which answers an agent kept, from the messages that it ended with.

    Args:
        turns: All turns in the order of their calls.
        messages: The agent's messages.

    Yields:
        The turns whose answers were replaced by text that was not sampled.
    """
    digests = tuple(message_digest(message) for message in messages)
    lengths = covered(turns, digests)
    asked = [turn for turn in turns if id(turn) in lengths and turn.answer_digest and not turn.is_auxiliary]
    kept = [turn for turn in asked if (turn.answer_digest,) == digests[lengths[id(turn)] :][:1]]
    # The messages belong to the agent with the longest question in them, and whose answer follows it if any does.
    longest = max((lengths[id(turn)] for turn in asked), default=0)
    last = [turn for turn in asked if lengths[id(turn)] == longest]
    agents = {turn.agent for turn in [turn for turn in last if turn in kept] or last}
    is_known = len(agents) <= 1  # else several asked the same, and nothing tells them apart
    for turn in kept:
        if turn.status is _OPEN and not (is_known and turn.agent in agents):
            settle(turn, TurnStatus.FINAL)
    if not is_known:
        for turn in last:
            _note_unknown(turn)
        return
    rivals: dict[bytes, list[Turn]] = {}
    for turn in asked:
        if turn.agent in agents:
            rivals.setdefault(turn.key, []).append(turn)
    for attempts in rivals.values():
        known = lengths[id(attempts[0])]
        after = After(digests[known:], messages, known, TurnStatus.FINAL)
        standing = _standing_answer(attempts, after)
        if standing is not None and standing.status is TurnStatus.DISCARDED:
            standing.status, standing.fate = _OPEN, None
        yield from judge(attempts, [turn for turn in attempts if turn.status is _OPEN], after)
    latest = {turn.agent: turn for turn in turns if turn.answer_digest and turn.agent is not None}
    for agent in agents or (latest if len(latest) == 1 else ()):
        if agent in latest and id(latest[agent]) not in lengths:
            note_if_gone(latest[agent], digests)


def covered(turns: Sequence[Turn], digests: Sequence[bytes]) -> dict[int, int]:
    """Return the length in messages of each question that a history begins with, by `id` of its turn.

    Args:
        turns: All turns in the order of their calls.
        digests: Digests of the messages of the history.
    """
    known = tuple(digests)
    lengths: dict[int, int] = {}
    for turn in turns:
        start = 0
        if turn.parent is not None:
            before = lengths.get(id(turn.parent))
            if before is None or known[before : before + 1] != (turn.parent.answer_digest,):
                continue
            start = before + 1
        end = start + len(turn.digests)
        if known[start:end] == turn.digests:
            lengths[id(turn)] = end
    return lengths


def settle(turn: Turn, status: TurnStatus) -> None:
    """Set the status of a turn, whose fate is now known."""
    turn.status = status
    if turn.fate == UNKNOWN:
        turn.fate = None


def note_if_gone(turn: Turn, digests: Sequence[bytes]) -> None:
    """Note that the fate of an answer is unknown if its question is gone, unless the answer is in a history."""
    if turn.answer_digest not in digests:
        _note_unknown(turn)


def _note_unknown(turn: Turn) -> None:
    if turn.status is _OPEN and turn.was_added is None and turn.fate is None:
        turn.fate = UNKNOWN


def _is_replaced(turn: Turn, after: After, *, taken: bool) -> bool:
    """Settle the status of an answer, and return whether text that was not sampled replaced it.

    Args:
        turn: The turn.
        after: What follows its question.
        taken: Whether another recorded answer was kept there.
    """
    first = after.first
    stands = turn.answer_digest in after.digests
    recorded = turn.trajectory.turns if turn.trajectory is not None and turn.was_added and not stands else ()
    if any(other.answer_digest in after.digests[:1] for other in recorded if other.answer_digest):
        return False  # the agent started over, in another history or with other tools
    if not taken and (stands or _is_kept_in_another_form(turn, after)):
        settle(turn, after.kept_status)
        if not stands and first is not None and first["role"] == "assistant":
            difference = block_difference(turn.answer_blocks, first)
            turn.fate = Reason("other_form", None, after.position, (difference,))
        return False
    if turn.is_cut_short:
        if after.kept_status is TurnStatus.FINAL:
            settle(turn, TurnStatus.FINAL)
        return False
    role = None if first is None else first["role"]
    if role == "user" and not (taken or after.is_in_cycle_of(turn)):
        _note_unknown(turn)
        return False
    if turn.was_added and (taken or role != "assistant"):
        return False  # it entered the history, and the agent then went back to before it
    turn.status = TurnStatus.DISCARDED
    if not after.digests:
        ends = after.kept_status is TurnStatus.FINAL
        turn.fate = Reason("ended_before") if ends else Reason("asked_again")
    elif taken or first is None:
        turn.fate = Reason("another_kept")
    elif role == "assistant":
        difference = block_difference(turn.answer_blocks, first)
        turn.fate = Reason("replaced_with", None, after.position, (difference,))
        return True
    else:
        turn.fate = Reason("replaced", None, after.position, (str(role),))
    return False


def _is_kept_in_another_form(turn: Turn, after: After) -> bool:
    """Whether one of its tool calls is in the history or, without tool calls, its texts are."""
    calls = {call["toolUseId"] for call in turn.tool_calls}
    if calls:
        blocks = blocks_of(after.messages)
        return any("toolUse" in block and block["toolUse"]["toolUseId"] in calls for block in blocks)
    first = after.first
    if first is None or first["role"] != "assistant":
        return False
    sampled, there = set(turn.answer_blocks), set(block_digests(first))
    texts = {block for block in sampled if block[0] == "text"}
    return texts <= there if texts else bool(sampled & there)


def _standing_answer(attempts: Sequence[Turn], after: After) -> Turn | None:
    """Return the attempt at a question whose answer follows it, and was most likely kept."""
    same = [turn for turn in attempts if turn.answer_digest in after.digests[:1]]
    groups = [
        [turn for turn in same if turn.status is TurnStatus.COMMITTED],
        [turn for turn in same if turn.status is not TurnStatus.DISCARDED],
        same,
    ]
    if after.kept_status is _OPEN:  # the message in the history was made from one of these answers, or from none
        groups.append([turn for turn in attempts if _is_kept_in_another_form(turn, after)])
        groups.append([turn for turn in attempts if turn.is_cut_short])
    return next((group[-1] for group in groups if group), None)
