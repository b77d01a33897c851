"""Why a call extends a recorded turn or opens a sequence, in words: the first thing that differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from strands.types.content import Messages

from ..messages import Conversation, block_difference
from .turn import Turn, TurnStatus

_COMPARED_TURNS = 64  # how many recorded turns an explanation looks at; more would make forests of thousands slow


def why_here(turns: Sequence[Turn], turn: Turn, known: int, conversation: Conversation, messages: Messages) -> str:
    """Why a conversation extends a turn, and if another call extended it before, what differs from that one.

    Args:
        turns: All recorded turns.
        turn: The one that is extended.
        known: How many messages of the conversation it covers.
        conversation: What arrived.
        messages: The same as messages.
    """
    if turn.status is TurnStatus.COMMITTED:
        later = [(leaf, leaf.path(turn)) for leaf in _leaves(turns)]
        differences = [_first_difference(leaf, path, known, conversation) for leaf, path in later if path]
        if differences:
            return f"forks after call {turn.index}: {_deepest(differences, messages)}"
    return f"extends call {turn.index} with {len(conversation.digests) - known} new message(s)"


def why_new(turns: Sequence[Turn], conversation: Conversation, messages: Messages) -> str:
    """Why nothing recorded is a prefix of a conversation: the first thing that differs from the closest one.

    Args:
        turns: All recorded turns.
        conversation: What arrived.
        messages: The same as messages.
    """
    leaves = _leaves(turns)
    if not leaves:
        return "opens the first sequence"
    differences = []
    for leaf in leaves:
        # Most differ in their first message, and long paths are worth their walk only where they do not.
        path = [leaf.root] if leaf.root.digests[:1] != conversation.digests[:1] else leaf.path()
        differences.append(_first_difference(leaf, path, 0, conversation))
    return "opens a sequence: " + _deepest(differences, messages)


def explain(turns: Iterable[Turn]) -> str:
    """One line per turn; those of a sequence stand below its first one, and those of a fork one step further in."""
    lines = []
    steps: dict[int, int] = {}
    extended: set[int] = set()
    for turn in turns:
        parent = turn.parent
        if parent is None:
            steps[id(turn)] = 0
        else:
            is_fork = id(parent) in extended or parent.parent is None
            steps[id(turn)] = steps[id(parent)] + is_fork
            extended.add(id(parent))
        sampled = f"{len(turn.prompt_ids)} prompt and {len(turn.output_ids)} sampled tokens"
        end = "" if turn.generation is None else f", {turn.generation.finish_type}"
        flags = {
            "auxiliary": turn.is_auxiliary,
            "constrained": turn.constrained,
            "waits to go on": turn.waits_to_go_on,
        }
        marks = [turn.status.value, *(flag for flag, is_set in flags.items() if is_set)]
        notes = "".join(f": {note}" for note in (turn.note, turn.failure) if note)
        indent = "  " * steps[id(turn)]
        lines.append(f"{indent}call {turn.index} {turn.reason} ({sampled}{end}) [{', '.join(marks)}]{notes}")
    return "\n".join(lines)


def _leaves(turns: Sequence[Turn]) -> list[Turn]:
    """The latest answered turns that no other turn extends, those outside the agents' loops left aside."""
    recent = turns[-_COMPARED_TURNS:]
    inner = {id(turn.parent) for turn in recent}
    return [turn for turn in recent if turn.answer_digest and id(turn) not in inner and not turn.is_auxiliary]


class _Difference(NamedTuple):
    """What differs first between a conversation and a recorded one.

    Attributes:
        agreement: How far they agree; the part that differs counts.
        what: What differs, in words.
        leaf: The last turn of the recorded one.
        answer: The turn whose answer differs, and the position of the message in its place; None if it is no answer.
    """

    agreement: int
    what: str
    leaf: Turn
    answer: tuple[Turn, int] | None = None


def _first_difference(leaf: Turn, path: Sequence[Turn], known: int, conversation: Conversation) -> _Difference:
    """How far a conversation agrees with a recorded one, and what differs first.

    Args:
        leaf: The last turn of the recorded one.
        path: Its turns, those left out whose messages are known to agree.
        known: How many messages that are.
        conversation: What arrived.
    """
    for name in {**leaf.parts, **conversation.parts}:
        if conversation.parts.get(name) != leaf.parts.get(name):
            return _Difference(0, f"the {name} changed", leaf)
    i = known
    for turn in path:
        for recorded, role in (*zip(turn.digests, turn.roles, strict=True), (turn.answer_digest, "assistant")):
            if i == len(conversation.digests):
                return _Difference(i + 1, f"it stops after message {i - 1}, before the recorded answer", leaf)
            if recorded != conversation.digests[i]:
                what = f"message {i} ({conversation.roles[i]}) is not the recorded one ({role})"
                is_answer = recorded == turn.answer_digest and conversation.roles[i] == role
                return _Difference(i + 1, what, leaf, (turn, i) if is_answer else None)
            i += 1
    return _Difference(i + 1, f"it goes on after message {i - 1}", leaf)


def _deepest(differences: Sequence[_Difference], messages: Messages) -> str:
    """The difference from the recorded conversation that agrees the furthest, the latest of several, in words."""
    chosen = max(reversed(differences), key=lambda difference: difference.agreement)
    what = chosen.what
    if chosen.answer is not None:
        turn, position = chosen.answer
        what += f": {block_difference(turn.answer_blocks, messages[position])}"
    return f"{what} (compared with call {chosen.leaf.index})"
