"""Texts that would take long to read if reading them were not linear, and how long a parser may take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from strands_sglang.tool_parsers import ToolParser

if TYPE_CHECKING:
    from support.parser_checks import Format

MEGABYTE = 1 << 20


def hostile_texts(form: Format) -> Iterator[tuple[str, str, str]]:
    """What to repeat, and what to put before and behind it."""
    text = form.write([("f", {"a": "x"})])
    inner = text[text.index(form.start) + len(form.start) : text.rindex(form.end)]
    pieces = [*form.tokens, *form.tags, form.end, *form.think, inner, "[", "{", '{"', " \n", "<", "1", "\\"]
    parts = [inner[: len(inner) * part // 6] for part in range(1, 6)]
    for unit in [*pieces, *(form.start + piece for piece in (*pieces, *parts))]:
        yield "", unit, ""
    for unit in pieces:
        yield form.start + inner[: inner.index("x")], unit, inner[inner.index("x") :] + form.end
    for part in parts:
        yield "", form.start + part + form.end, ""
        yield "", form.start + part + form.think[1], form.end


def assert_cheap(
    parser: ToolParser, unit: str, length: int, before: str = "", behind: str = "", **keywords: Any
) -> None:
    """Fail if a turn of this length costs more CPU time than a second per megabyte."""
    text = before + unit * (length // len(unit)) + behind

    def seconds(reasoning_open: bool) -> float:
        begin = time.process_time()
        parser.parse_turn(text, reasoning_open=reasoning_open, **keywords)
        return time.process_time() - begin

    # A busy machine makes a run slower, never faster: one fast run shows that the work is small.
    for reasoning_open in (False, True):
        assert any(seconds(reasoning_open) < length / MEGABYTE for _ in range(5)), (before, unit, behind)
