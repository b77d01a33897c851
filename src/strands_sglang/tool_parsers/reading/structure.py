"""Where reasoning, visible text and tool calls lie in one sampled turn.

Parsers see a turn's structure before they see its calls, because what stands inside reasoning is never a call. The
work is linear in the length of the turn, also for hostile text.

The reasoning rules: text after an opening mark (or after a prompt that opened reasoning) is reasoning up to the next
closing mark, or up to the end if there is none. A closing mark that nothing opened closes reasoning that must have
been opened out of sight: all that precedes it is reasoning, draft calls included. Inside a call that parses, marks
are part of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from ..results import ToolParseResult
from .marks import Mark, MarkedText, MarkKind


class CallSpan(NamedTuple):
    """What a format read after the start mark of calls.

    Attributes:
        end: Where reading continues: after the end mark, or at the end of the text.
        sound: It has the shape of calls from its start mark to its end, so that marks inside it are arguments.
        calls: The calls; None if it is text after all.
    """

    end: int
    sound: bool
    calls: tuple[ToolParseResult, ...] | None


class SpanKind(str, Enum):
    """What a stretch of a turn is."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class Span(NamedTuple):
    """A stretch `[start, end)` of a turn's text: reasoning without the marks around it, calls with theirs."""

    kind: SpanKind
    start: int
    end: int
    calls: tuple[ToolParseResult, ...] = ()


ReadCall = Callable[[Mark], CallSpan]
"""Reads calls from their start mark on; returns an `end` after that mark."""


def take_apart(turn: MarkedText, read_call: ReadCall, reasoning_open: bool) -> tuple[list[Span], bool]:
    """Cut a turn into reasoning, visible text and calls.

    Args:
        turn: The turn with its marks.
        read_call: Reads calls.
        reasoning_open: The prompt ended inside reasoning.

    Returns:
        The spans that are not empty, in order of position (marks around reasoning belong to none, stray end marks of
        calls are text), and whether the turn ends inside reasoning that nothing closed, be it empty.
    """
    text = turn.text
    spans: list[Span] = []
    unclosed = False
    settled = 0  # spans before this index stand before a closing mark and are reasoning for good
    position = 0

    def add(kind: SpanKind, start: int, end: int) -> None:
        if start < end:
            spans.append(Span(kind, start, end))

    def reason(start: int) -> int:
        """Add the reasoning that begins at `start`; return where it stops."""
        nonlocal unclosed
        close = turn.find(MarkKind.THINK_END, start)
        unclosed = close is None
        add(SpanKind.REASONING, start, len(text) if close is None else close.start)
        return len(text) if close is None else close.end

    if reasoning_open:
        opening = turn.find(MarkKind.THINK_START, 0)
        # Some models repeat the mark that the prompt ended with.
        position = reason(opening.end if opening is not None and not text[: opening.start].strip() else 0)

    for index, mark in enumerate(turn.marks):
        if mark.start < position or mark.kind is MarkKind.CALL_END:  # inside what was read already, or stray
            continue
        add(SpanKind.TEXT, position, mark.start)
        if mark.kind is MarkKind.CALL_START:
            end, sound, calls = read_call(mark)
            broken_off = None if sound else _closing_mark_inside(turn, index, end)
            if broken_off is None:
                spans.append(Span(SpanKind.TEXT if calls is None else SpanKind.CALL, mark.start, end, calls or ()))
                position = end
                continue
            add(SpanKind.TEXT, mark.start, broken_off.start)
            mark = broken_off
        if mark.kind is MarkKind.THINK_START:
            position = reason(mark.end)
            continue
        if mark.kind is MarkKind.THINK_END and settled < len(spans):
            spans[settled:] = _as_reasoning(spans[settled:])
            settled = len(spans)
        position = mark.end
    add(SpanKind.TEXT, position, len(text))
    return spans, unclosed


def _closing_mark_inside(turn: MarkedText, index: int, end: int) -> Mark | None:
    """Return the mark that shows the "call" up to `end` to be a draft (or only talk of one) in reasoning, if any.

    That is a closing mark that nothing in the call opened. All up to the last closing mark is reasoning then;
    continuing after the first one would read the same stretch again and again.

    Args:
        turn: The turn.
        index: Which of the turn's marks starts the call.
        end: Where the call ends.
    """
    for later in range(index + 1, len(turn.marks)):
        kind, start, _ = turn.marks[later]
        if start >= end or kind is MarkKind.THINK_START:
            return None
        if kind is MarkKind.THINK_END:
            return turn.find_last(MarkKind.THINK_END, end)
    return None


def _as_reasoning(spans: Iterable[Span]) -> list[Span]:
    """Turn all spans into reasoning, joining those that touch."""
    joined: list[Span] = []
    for span in spans:
        touches = bool(joined) and joined[-1].end == span.start
        start = joined.pop().start if touches else span.start
        joined.append(Span(SpanKind.REASONING, start, span.end))
    return joined


def doubtful_calls(turn: MarkedText, spans: Sequence[Span]) -> set[int]:
    """Return the indices of the calls after which an end mark follows that closes nothing.

    Such a mark says that a call was taken to end too early, at an end mark inside one of its strings, so that what was
    taken for a call of its own after it may be part of that string. Which one it was cannot be told. Reasoning between
    a call and the mark separates them.

    Args:
        turn: The turn.
        spans: All of its spans.
    """
    doubtful = set()
    doubt = False
    for index in range(len(spans) - 1, -1, -1):
        span = spans[index]
        if span.kind is SpanKind.REASONING:
            doubt = False
        elif span.kind is SpanKind.CALL and doubt:
            doubtful.add(index)
        elif span.kind is SpanKind.TEXT and not doubt:
            stray = turn.find(MarkKind.CALL_END, span.start)
            doubt = stray is not None and stray.start < span.end
    return doubtful


def reasoning_text(turn: MarkedText, spans: Iterable[Span]) -> str:
    """Return the reasoning of a turn.

    Several stretches are joined by a newline; the white space at the marks is left out.
    """
    parts = [_trim(turn.text[s.start : s.end], True, True)[1] for s in spans if s.kind is SpanKind.REASONING]
    return "\n".join(part for part in parts if part)


def visible_text(turn: MarkedText, spans: Iterable[Span]) -> str:
    """Return the text of a turn that a user sees.

    White space that only separated the text from removed markup goes with the markup; indentation of the line after it
    stays. Two stretches of text are joined by the white space that stood on one side of the markup between them: that
    with more line breaks, or else the first.
    """
    pieces: list[str] = []
    gap = ""
    for span in spans:
        if span.kind is not SpanKind.TEXT:
            continue
        before, piece, after = _trim(turn.text[span.start : span.end], span.start > 0, span.end < len(turn.text))
        if not piece:
            gap = _wider(gap, before)
            continue
        if pieces:
            pieces.append(_wider(gap, before))
        pieces.append(piece)
        gap = after
    return "".join(pieces)


def _wider(first: str, second: str) -> str:
    return second if not first or second.count("\n") > first.count("\n") else first


def _trim(text: str, at_start: bool, at_end: bool) -> tuple[str, str, str]:
    """Split off white space next to a mark: (leading, rest, trailing). Indentation of the first line stays."""
    if text and not (text[0].isspace() or text[-1].isspace()):
        return "", text, ""
    leading = ""
    if at_start:
        blank = text[: len(text) - len(text.lstrip())]
        leading = blank if len(blank) == len(text) else blank[: blank.rfind("\n") + 1] or blank
    rest = text[len(leading) :]
    kept = rest.rstrip() if at_end else rest
    return leading, kept, rest[len(kept) :]


def without_reasoning(turn: MarkedText, spans: Iterable[Span]) -> str:
    """Return the turn without reasoning, a newline in its place so that what was around it cannot grow into a mark."""
    stretches: list[list[str]] = [[]]
    for span in spans:
        if span.kind is SpanKind.REASONING:
            stretches.append([])
        else:
            stretches[-1].append(turn.text[span.start : span.end])
    return "\n".join(stretch for pieces in stretches if (stretch := "".join(pieces)))
