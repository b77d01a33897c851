"""Why a call extends a recorded turn or opens a sequence, in words: the first thing that differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .messages import Conversation
from .turns import Turn, TurnStatus

_COMPARED_TURNS = 64  # how many recorded turns an explanation looks at; more would make forests of thousands slow


def why_here(turns: Sequence[Turn], turn: Turn, known: int, conversation: Conversation) -> str:
    """Why a conversation extends a turn, and if another call extended it before, what differs from that one.

    Args:
        turns: All recorded turns.
        turn: The one that is extended.
        known: How many messages of the conversation it covers.
        conversation: What arrived.
    """
    if turn.status is TurnStatus.COMMITTED:
        later = [leaf for leaf in _leaves(turns) if turn in leaf.path()[:-1]]
        differences = [_first_difference(leaf, conversation) for leaf in later]
        if differences:
            return f"forks after call {turn.index}: {max(reversed(differences), key=_agreement)[1]}"
    return f"extends call {turn.index} with {len(conversation.digests) - known} new message(s)"


def why_new(turns: Sequence[Turn], conversation: Conversation) -> str:
    """Why nothing recorded is a prefix of a conversation: the first thing that differs from the closest one.

    Args:
        turns: All recorded turns.
        conversation: What arrived.
    """
    leaves = _leaves(turns)
    if not leaves:
        return "opens the first sequence"
    differences = [_first_difference(leaf, conversation) for leaf in leaves]
    return "opens a sequence: " + max(reversed(differences), key=_agreement)[1]


def explain(turns: Iterable[Turn]) -> str:
    """One line per turn, indented by what it extends."""
    lines = []
    for turn in turns:
        depth = len(turn.path()) - 1
        sampled = f"{len(turn.prompt_ids)} prompt and {len(turn.output_ids)} sampled tokens"
        end = "" if turn.generation is None else f", {turn.generation.finish_type}"
        marks = [turn.status.value, *(["auxiliary"] if turn.is_auxiliary else [])]
        marks += ["constrained"] if turn.constrained else []
        cause = "" if turn.cause is None else f": {type(turn.cause).__name__}: {turn.cause}"
        lines.append(f"{'  ' * depth}call {turn.index} {turn.reason} ({sampled}{end}) [{', '.join(marks)}]{cause}")
    return "\n".join(lines)


def _leaves(turns: Sequence[Turn]) -> list[Turn]:
    """The latest answered turns that no other turn extends, those outside the agents' loops left aside."""
    recent = turns[-_COMPARED_TURNS:]
    inner = {id(turn.parent) for turn in recent}
    return [turn for turn in recent if turn.answer_digest and id(turn) not in inner and not turn.is_auxiliary]


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
