"""The base of the formats in which every call stands between a start mark and an end mark."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..base import (
    MAX_CALLS,
    ParsedTurn,
    ToolCallStatus,
    ToolParser,
    ToolParseResult,
    new_tool_call_id,
)
from .structure import (
    CallSpan,
    Mark,
    MarkedText,
    MarkKind,
    Span,
    doubtful_calls,
    take_apart,
)
from .texts import reasoning_text, visible_text

ToolSchemas = Mapping[str, Any]
"""The JSON schema of every tool's input, by tool name."""


class MarkedToolParser(ToolParser):
    """A format in which every call stands between a start mark and an end mark.

    A subclass says how one call is read; reasoning, text and the order of things are taken care of here.
    """

    def __init__(
        self,
        tool_start_token: str = ToolParser.DEFAULT_TOOL_START_TOKEN,
        tool_end_token: str = ToolParser.DEFAULT_TOOL_END_TOKEN,
        think_start_token: str = ToolParser.DEFAULT_THINK_START_TOKEN,
        think_end_token: str = ToolParser.DEFAULT_THINK_END_TOKEN,
    ) -> None:
        """Name the marks.

        Raises:
            ValueError: The mark before or behind calls is empty.
        """
        if not tool_start_token or not tool_end_token:
            raise ValueError(f"{type(self).__name__} needs a mark before and a mark behind every call")
        super().__init__(tool_start_token, tool_end_token, think_start_token, think_end_token)

    @abstractmethod
    def read_call(self, turn: MarkedText, start: Mark, tools: ToolSchemas | None, truncated: bool) -> CallSpan:
        """Read the call behind its start mark.

        Args:
            turn: The whole turn.
            start: The call's start mark.
            tools: Schema of every tool by name; None if the tools are not known.
            truncated: The turn was cut off.
        """

    def parse(
        self,
        text: str,
        *,
        token_ids: Sequence[int] | None = None,
        tokenizer: Any = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_open: bool = False,
    ) -> list[ToolParseResult]:
        """Return the tool calls of a turn; see `ToolParser.parse`."""
        parsed = self.parse_turn(
            text, token_ids=token_ids, tokenizer=tokenizer, tools=tools, reasoning_open=reasoning_open
        )
        return list(parsed.tool_calls)

    def parse_turn(
        self,
        text: str,
        *,
        token_ids: Sequence[int] | None = None,
        tokenizer: Any = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_open: bool = False,
        truncated: bool = False,
    ) -> ParsedTurn:
        """Take a sampled turn apart; see `ToolParser.parse_turn`."""
        turn = self.locate_marks(text, token_ids, tokenizer)
        schemas = None if tools is None else tool_schemas(tools)
        calls_read = 0

        def read_call(start: Mark) -> CallSpan:
            nonlocal calls_read
            calls_read += 1
            if calls_read > MAX_CALLS:
                return CallSpan(len(turn.text), False, too_many_calls(turn.text[start.start :]))
            return self.read_call(turn, start, schemas, truncated)

        spans, unclosed = take_apart(turn, read_call, reasoning_open=reasoning_open)
        doubtful = doubtful_calls(turn, spans)
        calls = tuple(
            self._refused(turn.text[span.start : span.end], call) if index in doubtful else call
            for index, span in enumerate(spans)
            for call in _calls_of(span)
        )
        shown = visible_text(turn, self.shown_spans(turn, spans))
        return ParsedTurn(reasoning_text(turn, spans), shown, calls, unclosed)

    def shown_spans(self, turn: MarkedText, spans: Sequence[Span]) -> Sequence[Span]:
        """Return the spans whose text is what a user sees: all, unless a format wraps its calls in more markup."""
        return spans

    def _refused(self, raw: str, call: ToolParseResult) -> ToolParseResult:
        """Return a call as an error because its end cannot be told."""
        error = f"a {self.tool_end_token} behind this call closes nothing, so it cannot be told where the call ends"
        attempted = call.attempted_name if call.is_error else call.name
        refused = call if call.is_error else failed_call(raw, error, ToolCallStatus.MALFORMED, attempted)
        return replace(refused, native_id=call.native_id)

    def broken_call(
        self,
        turn: MarkedText,
        start: Mark,
        position: int,
        error: str,
        *,
        truncated: bool = False,
        attempted_name: str | None = None,
    ) -> CallSpan:
        """Return the span of a call that stops following its format at `position`.

        It goes up to the first end mark behind that position: whatever is before was read as part of the call. If that
        mark stood in a string of the call, another end mark follows that closes nothing; `doubtful_calls` sees it.
        """
        end = turn.find(MarkKind.CALL_END, position)
        if end is None:
            cut = "the turn was cut off" if truncated else "the turn ended"
            error = f"{cut} before {self.tool_end_token} ({error})"
            status, stop, resume = ToolCallStatus.UNTERMINATED, len(turn.text), len(turn.text)
        else:
            status, stop, resume = ToolCallStatus.MALFORMED, end.start, end.end
        failed = failed_call(turn.text[start.end : stop], error, status, attempted_name)
        return CallSpan(resume, False, failed)


def _calls_of(span: Span) -> Iterable[ToolParseResult]:
    """Return the calls of a span: none, one, or in formats with several calls between two marks a tuple of them."""
    if span.call is None:
        return ()
    return span.call if isinstance(span.call, tuple) else (span.call,)


def failed_call(raw: str, error: str, status: ToolCallStatus, attempted_name: str | None = None) -> ToolParseResult:
    """Return the result for a call that must not run."""
    return ToolParseResult(
        new_tool_call_id(),
        ToolParseResult.UNKNOWN_NAME,
        raw=raw,
        error=error,
        status=status,
        attempted_name=attempted_name,
    )


def too_many_calls(raw: str) -> ToolParseResult:
    """Return the one result for all calls of a turn behind the first `MAX_CALLS`."""
    return failed_call(raw, f"a turn may hold {MAX_CALLS} calls, and this one holds more", ToolCallStatus.MALFORMED)


def tool_schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of every tool's input by name, from Strands tool specs.

    A spec's `inputSchema` is either the schema itself or the schema under `json`.
    """
    schemas = {}
    for tool in tools:
        schema = tool.get("inputSchema")
        schemas[tool["name"]] = schema["json"] if isinstance(schema, Mapping) and "json" in schema else schema
    return schemas
