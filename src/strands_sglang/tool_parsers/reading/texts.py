"""The texts of a turn that was taken apart: its reasoning, and what a user sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .structure import MarkedText, Span, SpanKind


def reasoning_text(turn: MarkedText, spans: Iterable[Span]) -> str | None:
    """Return the reasoning of a turn, or None if there is none but white space.

    Several stretches are joined by a newline; the white space at the marks is left out.
    """
    parts = [_trim(turn.text[s.start : s.end], True, True)[1] for s in spans if s.kind is SpanKind.REASONING]
    return "\n".join(part for part in parts if part) or None


def visible_text(turn: MarkedText, spans: Sequence[Span]) -> str:
    """Return the text of a turn that a user sees.

    White space that only separated the text from removed markup goes with the markup; indentation of the line behind it
    stays. Two stretches of text are joined by the white space that stood on one side of the markup between them: that
    with more line breaks, or else the first.
    """
    pieces: list[str] = []
    gap = ""
    for span in spans:
        if span.kind is not SpanKind.TEXT:
            continue
        at_markup = span.start > 0, span.end < len(turn.text)
        before, piece, after = _trim(turn.text[span.start : span.end], *at_markup)
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
