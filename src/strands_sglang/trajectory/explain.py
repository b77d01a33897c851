"""Why a call extends a recorded turn or opens a sequence: the first difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from strands.types.content import Messages

from ..messages import Conversation, block_difference
from ..reasons import Reason
from .turn import Turn, TurnStatus

_COMPARED_TURNS = 64  # recorded turns that an explanation compares; more would be slow in forests of thousands


def reason_to_extend(
    turns: Sequence[Turn], turn: Turn, known: int, conversation: Conversation, messages: Messages
) -> Reason:
    """Explain why a conversation extends a turn, and how it differs from another call that extended the turn before.

    Args:
        turns: All recorded turns.
        turn: The turn that is extended.
        known: Number of messages of the conversation that the turn covers.
        conversation: Fingerprint of the conversation.
        messages: The messages of the conversation.
    """
    if turn.status is TurnStatus.COMMITTED:
        later = [(leaf, leaf.path(turn)) for leaf in _leaves(turns)]
        differences = [_first_difference(leaf, path, known, conversation) for leaf, path in later if path]
        if differences:
            return Reason("forks", turn.index, detail=(_deepest(differences, messages),))
    return Reason("extends", turn.index, detail=(str(len(conversation.digests) - known),))


def reason_to_open(turns: Sequence[Turn], conversation: Conversation, messages: Messages) -> Reason:
    """Explain why no recorded turn is a prefix of a conversation: the first difference from the closest one.

    Args:
        turns: All recorded turns.
        conversation: Fingerprint of the conversation.
        messages: The messages of the conversation.
    """
    leaves = _leaves(turns)
    if not leaves:
        return Reason("first")
    differences = [_first_difference(leaf, leaf.path(), 0, conversation) for leaf in leaves]
    return Reason("opens_because", detail=(_deepest(differences, messages),))


def explain(turns: Iterable[Turn]) -> str:
    """Describe each turn in one line. Turns of a sequence are below its first one, and forks are indented."""
    return "\n".join(line for _, line in explained(turns))


def explained(turns: Iterable[Turn]) -> Iterator[tuple[Turn, str]]:
    """Yield each turn with its line, as in `explain`."""
    depths: dict[int, int] = {}
    extended: set[int] = set()
    for turn in turns:
        parent = turn.parent
        if parent is None:
            depths[id(turn)] = 0
        else:
            is_fork = id(parent) in extended or parent.parent is None
            depths[id(turn)] = depths[id(parent)] + is_fork
            extended.add(id(parent))
        indent = "  " * min(depths[id(turn)], 12)
        yield turn, f"{indent}call {turn.index} {_line(turn)}"


def _line(turn: Turn) -> str:
    counts = f"{len(turn.prompt_ids)} prompt and {len(turn.output_ids)} sampled tokens"
    if turn.generation is not None:
        cached = turn.generation.cached_tokens
        counts += (f", {cached} cached" if cached else "") + f", {turn.generation.finish_type}"
    flags = {
        "auxiliary": turn.is_auxiliary,
        "constrained": turn.constrained,
        "resumed": turn.generation is not None and bool(turn.generation.resumed_ids),
        "waits to be resumed": turn.waits_to_go_on,
    }
    marks = [turn.status.value, *(flag for flag, holds in flags.items() if holds)]
    notes = "".join(f": {note}" for note in (turn.note, turn.failure) if note)
    return f"{turn.reason} ({counts}) [{', '.join(marks)}]{notes}"


def _leaves(turns: Sequence[Turn]) -> list[Turn]:
    """Return the latest answered turns that no other turn extends, without auxiliary ones."""
    recent = turns[-_COMPARED_TURNS:]
    inner = {id(turn.parent) for turn in recent}
    return [turn for turn in recent if turn.answer_digest and id(turn) not in inner and not turn.is_auxiliary]


class _Difference(NamedTuple):
    """The first difference between a conversation and a recorded one.

    Attributes:
        depth: Number of matching parts, counting the one that differs.
        what: What differs; its `turn` is the last one of the recorded conversation.
        answer: The turn whose answer differs; None if it is no answer.
    """

    depth: int
    what: Reason
    answer: Turn | None = None


def _first_difference(leaf: Turn, path: Sequence[Turn], known: int, conversation: Conversation) -> _Difference:
    """Find the first difference between a conversation and a recorded one.

    Args:
        leaf: The last turn of the recorded conversation.
        path: Its turns, without those whose messages are known to match.
        known: Number of messages that are known to match.
        conversation: Fingerprint of the conversation.
    """
    for name in {**leaf.parts, **conversation.parts}:
        if conversation.parts.get(name) != leaf.parts.get(name):
            return _Difference(0, Reason("part_changed", leaf.index, detail=(name,)))
    i = known
    for turn in path:
        for recorded, role in (*zip(turn.digests, turn.roles, strict=True), (turn.answer_digest, "assistant")):
            if i == len(conversation.digests):
                return _Difference(i + 1, Reason("stops", leaf.index, i - 1))
            if recorded != conversation.digests[i]:
                what = Reason("message_changed", leaf.index, i, (conversation.roles[i], role))
                is_answer = recorded == turn.answer_digest and conversation.roles[i] == role
                return _Difference(i + 1, what, turn if is_answer else None)
            i += 1
    return _Difference(i + 1, Reason("goes_on", leaf.index, i - 1))


def _deepest(differences: Sequence[_Difference], messages: Messages) -> Reason:
    """Return the difference from the recorded conversation that matches the furthest, the latest of several."""
    chosen = max(reversed(differences), key=lambda difference: difference.depth)
    _, leaf, position, _ = what = chosen.what
    if chosen.answer is None or position is None:
        return what
    difference = block_difference(chosen.answer.answer_blocks, messages[position])
    return Reason("answer_changed", leaf, position, (difference,))
