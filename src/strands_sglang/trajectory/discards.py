"""What became of an agent's answers: built on, kept in another form, or thrown away.

Where an agent has the model's hooks (`hooks`), Strands tells which message comes into its history for an answer, and
what is left to find out is whether that message was edited later. Elsewhere the agent's later calls show it, and at the
end its messages: by what stands behind a question that was answered. The rules:

- Attempts at one question in one turn of the agent's loop are rivals (a hook retried, middleware took the best of
  several): one stands, the others were thrown away. Attempts in other turns of its loop are not judged by it: the agent
  began anew, or a copy of it was asked.
- An answer is kept in another form where one of its tool calls stands, or where it has none its texts, with more or
  less beside them (a hook took the reasoning out): what was sampled was used, and is trained.
- An answer whose text was replaced was thrown away.
- An answer in whose place a user's message stands was thrown away if that came in the same turn of the loop (a guide).
  Else the agent went back to the question, as between attempts at a goal, and the answer is an attempt like the others.
- An answer that was cut at `max_new_tokens` is rewritten by Strands, and not thrown away.
- An answer whose question is gone from the history (shortened, summed up, redacted) is not judged; its note says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strands.types.content import Message, Messages

from ..messages import Conversation, block_difference, block_digests, message_digest
from .turn import Turn, TurnStatus

_OPEN = TurnStatus.ANSWERED

UNKNOWN = "whether the agent kept it is not known: nothing that it asked later tells; its model.hooks would"
"""The note of an answer of which nothing tells what became. It is trained: it was sampled, and given to the agent."""


class AnsweredTurns:
    """The answered turns of a trajectory, by what they answered. The trajectory locks."""

    def __init__(self) -> None:
        """Start with none."""
        self._by_answer: dict[bytes, list[Turn]] = {}
        self._by_question: dict[tuple[str, bytes], list[Turn]] = {}
        self._latest: dict[str, Turn] = {}
        self._digests: set[bytes] = set()

    def add(self, turn: Turn) -> None:
        """Take in a turn whose answer is recorded; one without an answer is left out."""
        if turn.answer_key is None or turn.answer_digest is None:
            return
        self._by_answer.setdefault(turn.answer_key, []).append(turn)
        self._digests.add(turn.answer_digest)
        if turn.agent is not None:
            self._by_question.setdefault((turn.agent, turn.key), []).append(turn)
            self._latest[turn.agent] = turn

    def find(self, answer_key: bytes, agent: str | None) -> Turn | None:
        """The latest turn that ended a conversation with its answer, the agent's own one if there is one."""
        same = self._by_answer.get(answer_key)
        return next((turn for turn in reversed(same) if turn.agent == agent), same[-1]) if same else None

    def knows(self, agent: str | None) -> bool:
        """Whether an agent was answered, so that Strands remembers its id."""
        return agent in self._latest

    # --- by the message that came into the history ---

    def judge_by_message(self, turns: Sequence[Turn], message: Message, position: int) -> list[Turn]:
        """Settle which of the answers to one model call an agent took, where its hooks tell.

        Args:
            turns: The turns with these answers, in their order.
            message: The message that came into the history in their place.
            position: Of the message in it.

        Returns:
            The turns in whose place stands an answer that nobody sampled.
        """
        behind = _Behind((message_digest(message),), [message], position)
        turns = [turn for turn in turns if turn.status is _OPEN]
        fits = (
            [turn for turn in turns if turn.answer_digest in behind.digests],
            [turn for turn in turns if _is_kept_in_another_form(turn, behind)],
            [turn for turn in turns if turn.is_cut_short],
        )
        standing = next((group[-1] for group in fits if group), None)
        rewritten = []
        for turn in turns:
            if turn is standing:
                turn.was_added = True
                if turn.answer_digest not in behind.digests and not turn.is_cut_short:
                    _note_form(turn, behind)
            else:
                rewritten += _judge(turn, behind, taken=standing is not None, kept=_OPEN)
        return rewritten

    # --- by a later call ---

    def judge_by_call(
        self, conversation: Conversation, new_messages: Messages, extended: Turn | None, agent: str, cycle: str | None
    ) -> list[Turn]:
        """Settle which answers an agent threw away, from a call that it makes now.

        Args:
            conversation: What it asks.
            new_messages: The last messages of it, those that no recorded turn covers.
            extended: The turn that the call extends.
            agent: Who asks.
            cycle: The turn of its loop that it asks in.

        Returns:
            The turns in whose place stands an answer that nobody sampled.
        """
        rewritten = []
        for known, link in enumerate(conversation.chain):
            turns = self._by_question.get((agent, link))
            if turns is None:
                continue
            after = conversation.chain[known + 1] if known < len(conversation.digests) else None
            standing = [turn for turn in turns if turn.answer_key == after]
            if standing or after is None or any(turn.cycle == cycle for turn in turns):
                judged_cycle = standing[-1].cycle if standing else cycle
            else:
                judged_cycle = turns[-1].cycle
            for turn in turns:
                if turn.status is not _OPEN or turn is extended or turn.was_added is False:
                    continue  # hooks that were not told yet are told once the call is over
                if turn.cycle != judged_cycle:
                    _say_unknown(turn)
                    continue
                behind = _Behind(conversation.digests[known:], new_messages, known)
                taken = bool(standing) and turn is not standing[-1]
                is_guide = turn.cycle == cycle
                rewritten += self._judge(turn, behind, taken=taken, kept=TurnStatus.COMMITTED, is_guide=is_guide)
        latest = self._latest.get(agent)
        if latest is not None and latest is not extended and latest.key not in conversation.chain:
            if latest.answer_digest not in conversation.digests:
                _say_unknown(latest)
        return rewritten

    # --- by the messages at the end ---

    def judge_by_messages(self, turns: Sequence[Turn], messages: Messages) -> list[Turn]:
        """Settle which answers an agent kept, from the messages that it ended with.

        Args:
            turns: All turns in the order of their calls.
            messages: The agent's messages.

        Returns:
            The turns in whose place stands an answer that nobody sampled.
        """
        digests = tuple(message_digest(message) for message in messages)
        lengths = covered(turns, digests)
        asked = [
            (turn, lengths[id(turn)])
            for turn in turns
            if id(turn) in lengths and turn.answer_digest and not turn.is_auxiliary
        ]
        kept = [turn for turn, known in asked if digests[known : known + 1] == (turn.answer_digest,)]
        # The messages are whose question is the longest one in them, and whose answer stands there if any does.
        longest = max((known for _, known in asked), default=0)
        last = [turn for turn, known in asked if known == longest]
        agents = {turn.agent for turn in [turn for turn in last if turn in kept] or last}
        if len(agents) > 1:  # several have asked the same, and nothing tells them apart
            for turn in kept:
                if turn.status is _OPEN:
                    settle(turn, TurnStatus.FINAL)
            for turn in last:
                _say_unknown(turn)
            return []
        rewritten = []
        rivals: dict[bytes, list[tuple[Turn, int]]] = {}
        for turn, known in asked:
            if turn.agent in agents:
                rivals.setdefault(turn.key, []).append((turn, known))
            elif turn in kept and turn.status is _OPEN:
                settle(turn, TurnStatus.FINAL)
        for attempts in rivals.values():
            standing = _that_stands([turn for turn, _ in attempts if turn in kept])
            judged_cycle = (standing or attempts[-1][0]).cycle
            for turn, known in attempts:
                if turn is standing:
                    if turn.status in (_OPEN, TurnStatus.DISCARDED):
                        turn.status, turn.note = TurnStatus.FINAL, ""
                elif turn.status is _OPEN and turn.cycle == judged_cycle:
                    behind = _Behind(digests[known:], messages, known)
                    rewritten += self._judge(turn, behind, taken=standing is not None, kept=TurnStatus.FINAL)
                else:
                    _say_unknown(turn)
        for agent in agents or (self._latest if len(self._latest) == 1 else ()):
            latest = self._latest.get(agent) if agent is not None else None
            if latest is not None and id(latest) not in lengths and latest.answer_digest not in digests:
                _say_unknown(latest)
        return rewritten

    def _judge(
        self, turn: Turn, behind: _Behind, *, taken: bool, kept: TurnStatus, is_guide: bool = False
    ) -> list[Turn]:
        """As the function of this name; another recorded answer does not replace one that came into the history."""
        if (
            turn.was_added
            and turn.answer_digest not in behind.digests
            and self._digests.intersection(behind.digests[:1])
        ):
            return []  # the agent has begun again, in another history or with other tools
        return _judge(turn, behind, taken=taken, kept=kept, is_guide=is_guide)


def covered(turns: Sequence[Turn], digests: Sequence[bytes]) -> dict[int, int]:
    """The lengths in messages of the questions that stand at the beginning of a history, by `id` of their turns.

    Args:
        turns: All turns in the order of their calls.
        digests: Of the messages of the history.
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


@dataclass(frozen=True)
class _Behind:
    """What stands behind a question.

    Attributes:
        digests: Of the messages behind it.
        messages: As many of the last messages as are at hand.
        position: Of the first message behind it.
    """

    digests: tuple[bytes, ...]
    messages: Messages
    position: int

    @property
    def first(self) -> Message | None:
        """The first message behind it, if it is at hand."""
        at = len(self.messages) - len(self.digests)
        return self.messages[at] if 0 <= at < len(self.messages) else None


def settle(turn: Turn, status: TurnStatus) -> None:
    """Fix the status of a turn, of which nothing is unknown now."""
    turn.status = status
    if turn.note == UNKNOWN:
        turn.note = ""


def _judge(turn: Turn, behind: _Behind, *, taken: bool, kept: TurnStatus, is_guide: bool = False) -> list[Turn]:
    """Settle the status of an answer; return its turn if an answer that nobody sampled stands in its place.

    Args:
        turn: The turn.
        behind: What stands behind its question.
        taken: Whether another recorded answer stands there.
        kept: The status of an answer that the agent kept.
        is_guide: Whether a user's message that stands there came in the turn of the loop in which the turn was asked.
    """
    first = behind.first
    if not taken and turn.answer_digest in behind.digests:
        settle(turn, kept)
        return []
    if not taken and _is_kept_in_another_form(turn, behind):
        settle(turn, kept)
        _note_form(turn, behind)
        return []
    if turn.is_cut_short:
        if kept is TurnStatus.FINAL:
            settle(turn, kept)
        return []
    if first is not None and first["role"] == "user" and not (taken or is_guide):
        _say_unknown(turn)
        return []
    if turn.was_added and (taken or first is None or first["role"] != "assistant"):
        return []  # it has come into the history, and the agent went back behind it
    turn.status = TurnStatus.DISCARDED
    if not behind.digests:
        ends = kept is TurnStatus.FINAL
        turn.note = "the agent's messages end before it" if ends else "the agent asked the same again"
    elif taken or first is None:
        turn.note = "another answer was kept"
    elif first["role"] != "assistant":
        turn.note = f"message {behind.position} ({first['role']}) stands in its place"
    else:
        difference = block_difference(turn.answer_blocks, first)
        turn.note = f"message {behind.position} (assistant) stands in its place, with {difference}"
        return [turn]
    return []


def _note_form(turn: Turn, behind: _Behind) -> None:
    """Note what the agent made of an answer that it kept."""
    first = behind.first
    if first is not None and first["role"] == "assistant":
        difference = block_difference(turn.answer_blocks, first)
        turn.note = f"kept in another form: message {behind.position} (assistant) holds {difference}"


def _is_kept_in_another_form(turn: Turn, behind: _Behind) -> bool:
    """Whether one of its tool calls stands in the history, or where it has none its texts, more or less beside them."""
    calls = {call["toolUseId"] for call in turn.tool_calls}
    if calls:
        blocks = (block for message in behind.messages for block in message["content"])
        return any("toolUse" in block and block["toolUse"]["toolUseId"] in calls for block in blocks)
    first = behind.first
    if first is None or first["role"] != "assistant":
        return False
    sampled, there = set(turn.answer_blocks), set(block_digests(first))
    texts = {block for block in sampled if block[0] == "text"}
    return texts <= there if texts else bool(sampled & there)


def _that_stands(turns: Sequence[Turn]) -> Turn | None:
    """Of several turns with one and the same answer, the one that the agent has most likely kept."""
    committed = [turn for turn in turns if turn.status is TurnStatus.COMMITTED]
    open_ones = [turn for turn in turns if turn.status is not TurnStatus.DISCARDED]
    return next((group[-1] for group in (committed, open_ones, turns) if group), None)


def _say_unknown(turn: Turn) -> None:
    """Note of an answer that nothing tells what became of it."""
    if turn.status is _OPEN and turn.was_added is None and not turn.note:
        turn.note = UNKNOWN
