"""The base of the formats in which all calls of a turn stand in one section between a start mark and an end mark."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

from ...exceptions import PortableError
from ..base import MAX_CALLS, ToolParseResult
from .json_calls import json_call
from .marked import ToolSchemas, too_many_calls
from .nested import NestedText, NestedToolParser
from .structure import (
    CallSpan,
    Mark,
    MarkedText,
    MarkKind,
    Span,
    SpanKind,
)
from .values import InvalidValueError, decode_json, skip_space


class BrokenCallError(PortableError, ValueError):
    """A call in a section stops following its format.

    Attributes:
        position: Where, as an index into the text.
        name: The tool that it seems to call, as far as it can be told.
        native_id: The id that the model wrote for it.
    """

    def __init__(self, position: int, error: str, name: str | None = None, native_id: str | None = None) -> None:
        """Keep what is known of the call beside the message."""
        super().__init__(error)
        self.position = position
        self.name = name
        self.native_id = native_id


class SectionCall(NamedTuple):
    """A complete call in a section, and the half-open range `[start, end)` that it covers."""

    start: int
    end: int
    result: ToolParseResult


class SectionToolParser(NestedToolParser):
    """A format whose calls stand in one section; `tool_start_token` and `tool_end_token` are the section's marks.

    Calls before one that is broken stand; that one and what is behind it in the section are one error. In a section
    that is never closed the last call is unterminated.

    Attributes:
        WRAPPERS: Marks around the visible text, which are no part of it.
    """

    WRAPPERS: ClassVar[re.Pattern[str] | None] = None

    @abstractmethod
    def read_inner_call(self, turn: NestedText, position: int, tools: ToolSchemas | None) -> SectionCall:
        """Read the call that begins at `position`.

        Raises:
            BrokenCallError: There is none, or it is not complete.
        """

    def read_call(self, turn: MarkedText, start: Mark, tools: ToolSchemas | None, truncated: bool) -> CallSpan:
        """Read the section behind its start mark; the span's `call` is a tuple of results."""
        assert isinstance(turn, NestedText)
        calls: list[SectionCall] = []
        position = skip_space(turn.text, start.end)
        try:
            while (close := turn.mark_at(MarkKind.CALL_END, position)) is None:
                if len(calls) == MAX_CALLS:
                    rest = too_many_calls(turn.text[position:])
                    return CallSpan(len(turn.text), False, (*(call.result for call in calls), rest))
                calls.append(self.read_inner_call(turn, position, tools))
                position = skip_space(turn.text, calls[-1].end)
            if not calls:
                raise BrokenCallError(position, f"there is no call before {self.tool_end_token}")
        except BrokenCallError as broken:
            error, name, native_id = str(broken), broken.name, broken.native_id
            if calls and self.tool_end_token.startswith(turn.text[position : position + len(self.tool_end_token) + 1]):
                position, _, last = calls.pop()
                error = "the mark behind the last call is missing"
                name, native_id = last.attempted_name or last.name, last.native_id
            # What is shown as the failed call begins behind those that stand.
            unread = Mark(MarkKind.CALL_START, position, position)
            failed = self.broken_call(turn, unread, broken.position, error, truncated=truncated, attempted_name=name)
            results = [call.result for call in calls] + [replace(failed.call, native_id=native_id)]
            return CallSpan(failed.end, False, tuple(results))
        return CallSpan(close.end, True, tuple(call.result for call in calls))

    def shown_spans(self, turn: MarkedText, spans: Sequence[Span]) -> Sequence[Span]:
        """Return the spans with the wrappers cut out of the visible text."""
        assert isinstance(turn, NestedText)
        kept: list[Span] = []
        for span in spans:
            if span.kind is not SpanKind.TEXT or self.WRAPPERS is None:
                kept.append(span)
                continue
            position = span.start
            for match in self.WRAPPERS.finditer(turn.text, span.start, span.end):
                if turn.is_real(*match.span()):
                    kept.append(Span(SpanKind.TEXT, position, match.start()))
                    position = match.end()
            kept.append(Span(SpanKind.TEXT, position, span.end))
        return [span for span in kept if span.start < span.end]


class JSONSectionToolParser(SectionToolParser):
    """A format whose calls are a JSON object between a head that names the tool and a tail.

    The JSON is strict, and a mark inside a JSON string belongs to the string: a call ends where its JSON ends.

    Attributes:
        HEAD: What stands before the JSON; its group `name` is the tool, its group `id` the model's own id.
        TAIL: What stands behind the JSON.
        SHAPE: The head in words, for errors.
    """

    HEAD: ClassVar[re.Pattern[str]]
    TAIL: ClassVar[re.Pattern[str]]
    SHAPE: ClassVar[str]

    def read_inner_call(self, turn: NestedText, position: int, tools: ToolSchemas | None) -> SectionCall:
        """Read one call; see `SectionToolParser.read_inner_call`."""
        head = turn.match(self.HEAD, position)
        if head is None:
            raise BrokenCallError(position, f"a call begins with {self.SHAPE}")
        name = head["name"]
        native_id = head["id"] if "id" in self.HEAD.groupindex else None
        try:
            decoded = decode_json(turn.text, head.end())
        except InvalidValueError as error:
            what = f"the arguments are not valid JSON: {error} (character {error.position - head.end()} of them)"
            raise BrokenCallError(error.position, what, name, native_id) from None
        tail = turn.match(self.TAIL, decoded.end)
        if tail is None:
            raise BrokenCallError(decoded.end, "the JSON of its arguments is not the end of the call", name, native_id)
        result = json_call(name, decoded, turn.text[position : tail.end()])
        return SectionCall(position, tail.end(), replace(result, native_id=native_id))
