"""Recorded episodes in a terminal: their turns as a tree, and the tokens of one turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby, product

import numpy as np

from .. import terminal
from ..reasons import of_turns
from ..shown import counted, visible
from ..terminal import SHADES, has_colors, paint
from ..trajectory.explain import explained
from ..trajectory.turn import Turn, TurnStatus
from .records import Group, Inspected, UnreadableError, Writer, count_tokens, halves, spans_of
from .texts import writers_of

COLORS = ("writer", "mask", "logprob", "version", "advantage")

_LABEL = 10
"""Width of the column with what a run of tokens has in common."""

_MOST, _EDGE = 240, 60
"""A longer run of tokens is shown by its first and last `_EDGE` tokens."""

_TOLD = (TurnStatus.CUT, TurnStatus.FAILED, TurnStatus.DISCARDED)


def episode_lines(
    groups: Sequence[Group], episode: str | None = None, turn: int | None = None, color: str = "writer"
) -> Iterator[str]:
    """Show the trees of episodes, and the tokens of one turn of the first.

    Args:
        groups: What `reading.read` returned.
        episode: Name of the only episode to show, such as "task-00#0", or the key of its record; None for all.
        turn: Number of the turn whose tokens are shown; None for the last with a sampled token.
        color: What the color of a token tells, one of `COLORS`.

    Raises:
        UnreadableError: There is no such episode or turn.
    """
    held = list(chain.from_iterable(product([group], group.episodes) for group in groups))
    found = [(group, listed) for group, listed in held if episode is None or _is_called(listed, episode)]
    if not found:
        known = ", ".join(f"'{listed.name}'" for _, listed in held[:8])
        raise UnreadableError(f"--episode '{episode}': there is none of this name; some are {known}")
    for _, listed in found:
        yield from _painted(_heading(listed), "bold")
        for called, line in explained(listed.turns):
            yield from _painted(of_turns(line), "red" if called.status in _TOLD else None)
        yield ""
    group, first = found[0]
    answered = [candidate for candidate in first.turns if candidate.output_ids] or first.turns
    chosen = [candidate for candidate in first.turns if candidate.index == turn] if turn is not None else answered[-1:]
    if not chosen:
        if turn is None:
            return
        numbers = ", ".join(str(listed.index) for listed in first.turns[:20])
        raise UnreadableError(
            f"--turn {turn}: episode {first.name} has no such turn; its turns are {numbers or 'none'}"
        )
    yield from _painted(f"tokens of turn {chosen[0].index} of episode {first.name}, by {color}", "bold")
    yield from token_lines(group, first, chosen[0], color)


def _painted(line: str, color: str | None) -> list[str]:
    return [paint(part, color) for part in terminal.wrapped(line)]


def _is_called(episode: Inspected, name: str) -> bool:
    names = (episode.id, episode.name, episode.record.get("key"))
    return name.replace(" ", "") in [str(known_name).replace(" ", "") for known_name in names if known_name is not None]


def _heading(episode: Inspected) -> str:
    end = episode.end
    facts = [
        end.outcome,
        None if end.reward is None else f"reward {end.reward:g}",
        None if not episode.seconds else f"{episode.seconds:.1f} s",
        counted(len(episode.turns), "turn"),
        counted(count_tokens(episode.turns), "token"),
        counted(len(episode.sequences), "sequence"),
        None if episode.left_out is None else f"left out: {episode.left_out}",
        *(why for _, why in episode.problems),
    ]
    return f"episode {episode.name}: {', '.join(fact for fact in facts if fact)}"


def token_lines(group: Group, episode: Inspected, turn: Turn, color: str) -> Iterator[str]:
    """Show the tokens of a turn: what its prompt added, then what it sampled, in runs that have something in common.

    Args:
        group: Has the text of ids.
        episode: The episode.
        turn: The turn.
        color: What a run has in common, one of `COLORS`.
    """
    writers = [Writer(writer).name.lower() for writer in writers_of(turn, group.vocabulary).tolist()]
    labels, pushed_up = _labels(episode, turn, color)
    labels = labels or writers
    ids = (*turn.prompt_ids, *turn.output_ids)
    tints = map(_tint, writers, pushed_up)
    tokens = [(_piece(token, group), tint) for token, tint in zip(ids, tints, strict=True)]
    if color == "logprob":
        if has_colors():
            yield f"{'at least':<{_LABEL}}" + " ".join(paint(f" {least:g} ", shade) for least, shade in SHADES)
        for at, logprob in enumerate(np.concatenate([*halves(turn, "logprobs")]).tolist()):
            if logprob == logprob:
                tokens[at] = _shaded(tokens[at][0], logprob)
    position = 0
    for label, run in groupby(labels):
        count = len(list(run))
        shown = tokens[position : position + count]
        position += count
        if len(shown) > _MOST:
            shown = [*shown[:_EDGE], (f"... {len(shown) - 2 * _EDGE} tokens ...", None), *shown[-_EDGE:]]
        for number, line in enumerate(terminal.token_lines(shown, terminal.width() - _LABEL)):
            head = label[: _LABEL - 1] if number == 0 else ""
            yield f"{head:<{_LABEL}}{line}"


def _shaded(piece: str, logprob: float) -> tuple[str, str]:
    """Return a token with its logprob as a color; as a number where there are no colors."""
    shade = next((shade for least, shade in SHADES if logprob >= least), SHADES[-1][1])
    return (piece if has_colors() else f"{piece}({logprob:.2f})", shade)


def _labels(episode: Inspected, turn: Turn, color: str) -> tuple[list[str], list[bool]]:
    """Return what each token of a turn has, nothing for what its writer tells; and whether training makes it likelier.

    Where the color says nothing about training, all count as likelier.
    """
    prompt, count = len(turn.prompt_ids), len(turn.output_ids)
    any_way = [True] * (prompt + count)
    if color == "version":
        versions = ["-"] * (prompt + count)
        for version, start, stop in spans_of(turn):
            start, stop = max(0, start), min(stop, count)
            versions[prompt + start : prompt + stop] = [visible(version)] * (stop - start)
        return versions, any_way
    if color not in ("mask", "advantage"):
        return [], any_way
    trained = np.zeros(prompt + count, np.uint8)
    advantages = np.zeros(prompt + count)
    for sequence in episode.sequences:
        given = sequence.given("advantages")
        for step in sequence.steps:
            if step.turn is turn:
                trained[: step.stop - step.start] |= sequence.mask[step.start : step.stop]
                if given is not None:
                    advantages[: step.stop - step.start] += given[step.start : step.stop]
    if color == "mask":
        return ["trained" if mask else "mask 0" for mask in trained], (trained > 0).tolist()
    values = [f"{value:+.3g}" if mask else "-" for value, mask in zip(advantages.tolist(), trained, strict=True)]
    return values, ((trained > 0) & ~np.signbit(advantages)).tolist()


def _tint(writer: str, pushed_up: bool) -> str | None:
    if writer == "model":
        return "green" if pushed_up else "yellow"
    return "bold" if writer in ("user", "tool", "system") else None


def _piece(token_id: int, group: Group) -> str:
    piece = group.vocabulary.get(token_id)
    return str(token_id) if piece is None else visible(piece.decode("utf-8", "replace"))
