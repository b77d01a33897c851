"""Recorded episodes in a terminal: their turns as a tree, and the tokens of one turn."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from ..terminal import WIDTH, counted, paint, visible
from .reading import UnreadableError
from .records import Episode, Group, SequenceRecord, TurnRecord, Writer

COLORS = ("writer", "mask", "logprob", "version", "advantage")

_LABEL = 10
"""Width of the column with what a run of tokens has in common."""

_MOST, _EDGE = 240, 60
"""A longer run of tokens is shown by its first and last `_EDGE` tokens."""

_TOLD = ("cut", "failed", "discarded")


def episode_lines(
    groups: Sequence[Group], episode: str | None = None, turn: int | None = None, color: str = "writer"
) -> Iterator[str]:
    """Show the trees of episodes, and the tokens of one turn of the first.

    Args:
        groups: What `reading.read` returned.
        episode: Id of the only episode to show; None for all.
        turn: Number of the turn whose tokens are shown; None for the last with a sampled token.
        color: What the color of a token tells, one of `COLORS`.

    Raises:
        UnreadableError: There is no such episode or turn.
    """
    found = [(group, one) for group in groups for one in group.episodes if episode in (None, one.id)]
    if not found:
        known = ", ".join(one.id for group in groups for one in group.episodes[:8])
        raise UnreadableError(f"--episode {episode}: there is none of this id; some are {known}")
    for _, one in found:
        yield from _wrapped(_heading(one), "bold")
        yield from tree_lines(one)
        yield ""
    group, first = found[0]
    answered = [one for one in first.turns if len(one.sampled)] or first.turns
    chosen = [one for one in first.turns if one.number == turn] if turn is not None else answered[-1:]
    if not chosen and turn is None:
        return
    if not chosen:
        numbers = ", ".join(str(one.number) for one in first.turns[:20])
        raise UnreadableError(f"--turn {turn}: episode {first.id} has no such turn; its turns are {numbers or 'none'}")
    yield from _wrapped(f"tokens of turn {chosen[0].number} of episode {visible(first.id)}, by {color}", "bold")
    yield from token_lines(group, first, chosen[0], color)


def _heading(episode: Episode) -> str:
    tokens = sum(len(turn.prompt) + len(turn.sampled) for turn in episode.turns)
    facts = [
        episode.outcome,
        None if episode.reward is None else f"reward {episode.reward:g}",
        None if not episode.seconds else f"{episode.seconds:.1f} s",
        *(counted(len(episode.turns), "turn"), counted(tokens, "token"), counted(len(episode.sequences), "sequence")),
        None if episode.left_out is None else f"left out: {episode.left_out}",
    ]
    return visible(f"episode {episode.id}: {', '.join(fact for fact in facts if fact)}")


def tree_lines(episode: Episode) -> Iterator[str]:
    """Describe each turn. Turns of a sequence are below its first one, and forks are indented."""
    depths: dict[int, int] = {}
    extended: set[int] = set()
    for position, turn in enumerate(episode.turns):
        parent = turn.parent
        if parent is None:
            depths[position] = 0
        else:
            is_fork = parent in extended or episode.turns[parent].parent is None
            depths[position] = depths[parent] + is_fork
            extended.add(parent)
        indent = "  " * min(depths[position], 12)
        yield from _wrapped(indent + _turn_line(turn), "red" if turn.status in _TOLD else None)


def _turn_line(turn: TurnRecord) -> str:
    end = "" if turn.finish is None else f", {turn.finish}"
    cached = f", {turn.cached_tokens} cached" if turn.cached_tokens else ""
    flags = {
        "auxiliary": turn.is_auxiliary,
        "constrained": turn.is_constrained,
        "resumed": turn.is_resumed,
        "waits to be resumed": turn.waits_to_go_on,
    }
    marks = [turn.status, *(flag for flag, holds in flags.items() if holds)]
    notes = "".join(f": {note}" for note in (turn.note, turn.failure) if note)
    counts = f"{len(turn.prompt)} prompt and {len(turn.sampled)} sampled tokens{cached}{end}"
    told = ", ".join(mark for mark in marks if mark)
    return visible(f"turn {turn.number} {turn.reason} ({counts})" + (f" [{told}]" if told else "") + notes)


def token_lines(group: Group, episode: Episode, turn: TurnRecord, color: str) -> Iterator[str]:
    """Show the tokens of a turn: what its prompt added, then what it sampled, in runs that have something in common.

    Args:
        group: Has the text of ids.
        episode: The episode.
        turn: The turn.
        color: What a run has in common, one of `COLORS`.
    """
    writers = [
        Writer(int(writer)).name.lower()
        for tokens in (turn.prompt, turn.sampled)
        for writer in (np.full(len(tokens), Writer.PROMPT) if tokens.writers is None else tokens.writers)
    ]
    labels = _labels(episode, turn, color) or writers
    ids = [*turn.prompt.ids.tolist(), *turn.sampled.ids.tolist()]
    pieces = [_piece(token_id, group) for token_id in ids]
    if color == "logprob":
        known = [tokens.logprobs for tokens in (turn.prompt, turn.sampled)]
        counts = (len(turn.prompt), len(turn.sampled))
        values = [np.full(n, np.nan) if own is None else own for own, n in zip(known, counts, strict=True)]
        logprobs = np.concatenate(values).tolist()
        pieces = [
            piece if logprob != logprob else f"{piece}({logprob:.2f})"
            for piece, logprob in zip(pieces, logprobs, strict=True)
        ]
    position = 0
    for label, run in groupby(labels):
        count = len(list(run))
        own = pieces[position : position + count]
        tint = _tint(label, writers[position])
        position += count
        if len(own) > _MOST:
            own = [*own[:_EDGE], f"... {len(own) - 2 * _EDGE} tokens ...", *own[-_EDGE:]]
        for number, line in enumerate(_filled(own, WIDTH - _LABEL)):
            yield f"{label[: _LABEL - 1] if number == 0 else '':<{_LABEL}}{paint(line, tint) if tint else line}"


def _labels(episode: Episode, turn: TurnRecord, color: str) -> list[str]:
    """Return what each token of a turn has; nothing for what its writer tells."""
    prompt, count = len(turn.prompt), len(turn.sampled)
    if color == "version":
        versions = ["-"] * (prompt + count)
        for version, start, stop in turn.sampled.versions:
            start, stop = max(0, start), min(stop, count)
            versions[prompt + start : prompt + stop] = [visible(str(version))] * (stop - start)
        return versions
    if color not in ("mask", "advantage"):
        return []
    trained = np.zeros(prompt + count, np.uint8)
    advantages = np.zeros(prompt + count)
    for sequence, start, stop in _places(episode, turn):
        own = sequence.mask[start:stop]
        trained[: stop - start] |= own
        if sequence.advantages is not None:
            advantages[: stop - start] += sequence.advantages[start:stop]
    if color == "mask":
        return ["trained" if mask else "mask 0" for mask in trained]
    return [f"{value:+.3g}" if mask else "-" for value, mask in zip(advantages.tolist(), trained, strict=True)]


def _places(episode: Episode, turn: TurnRecord) -> Iterator[tuple[SequenceRecord, int, int]]:
    for sequence in episode.sequences:
        for step in sequence.steps:
            if episode.turns[step.turn] is turn:
                yield sequence, step.start, step.stop


def _tint(label: str, writer: str) -> str | None:
    if writer == "model":
        return "yellow" if label in ("mask 0", "-") or label.startswith("-") else "green"
    return "bold" if writer in ("user", "tool", "system") else None


def _piece(token_id: int, group: Group) -> str:
    piece = group.vocabulary.get(token_id)
    return str(token_id) if piece is None else visible(piece.decode("utf-8", "replace"))


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _filled(pieces: Sequence[str], width: int) -> Iterator[str]:
    """Yield lines of pieces with marks between them; a piece that is wider than a line is broken."""
    line, used = "", 0
    for piece in pieces:
        mark = "|" if line else ""
        needed = _columns(piece) + len(mark)
        if line and used + needed > width:
            yield line
            line, used, mark = "", 0, ""
        line, used = line + mark + piece, used + _columns(piece) + len(mark)
        while used > width:
            cut = next(i for i in range(1, len(line) + 1) if _columns(line[:i]) >= width)
            yield line[:cut]
            line = line[cut:]
            used = _columns(line)
    if line:
        yield line


def _wrapped(line: str, color: str | None = None) -> Iterator[str]:
    """Yield a line in parts of the terminal's width, with its indentation."""
    indent = line[: len(line) - len(line.lstrip())]
    for part in textwrap.wrap(line, WIDTH, subsequent_indent=indent + "  ", break_on_hyphens=False):
        yield part if color is None else paint(part, color)
