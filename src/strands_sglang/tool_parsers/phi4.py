"""The formats of Phi-4-mini: JSON between `<|tool_call|>` and `<|/tool_call|>`, or a list behind `functools`.

Between the marks stands one call or a list of calls, each `{"name": ..., "arguments": {...}}`, by itself or as the
`function` of `{"type": "function", "function": {...}}`. Models that are prompted for it begin their turn with
`functools[...]` instead, which no mark ends.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from ._values import DecodedJSON, InvalidValueError, decode_json, skip_space
from .base import ToolCallStatus, ToolParser, ToolParseResult, register_tool_parser
from .listed import ListedToolParser, call_from_json, is_cut, name_of, read_json_list
from .marked import ToolSchemas, failed_call
from .structure import CallSpan, Mark, MarkedText, MarkKind

_FUNCTOOLS = "functools["


@register_tool_parser("phi4")
class Phi4ToolParser(ListedToolParser):
    """Reads Phi-4-mini's calls: JSON objects or lists of them between marks, or behind `functools`."""

    OPENER: ClassVar[re.Pattern[str] | None] = re.compile(r"\s{0,8}(?=functools\[)")

    def __init__(
        self,
        tool_start_token: str = "<|tool_call|>",
        tool_end_token: str = "<|/tool_call|>",
        think_start_token: str = ToolParser.DEFAULT_THINK_START_TOKEN,
        think_end_token: str = ToolParser.DEFAULT_THINK_END_TOKEN,
    ) -> None:
        """Name the marks; an empty one is never found."""
        super().__init__(tool_start_token, tool_end_token, think_start_token, think_end_token)

    def read_call(self, turn: MarkedText, start: Mark, tools: ToolSchemas | None, truncated: bool) -> CallSpan:
        """Read the JSON behind a start mark or behind `functools`; see `ListedToolParser`."""
        text = turn.text
        marked = start.end > start.start
        begin = skip_space(text, start.end) if marked else start.end + len(_FUNCTOOLS) - 1
        try:
            if text.startswith("[", begin):
                items, end = read_json_list(text, begin)
            else:
                items = [(decode_json(text, begin), begin)]
                end = items[0][0].end
        except InvalidValueError as error:
            wrong = f"the call is not valid JSON: {error}"
            if marked:
                span = self.broken_call(turn, start, error.position, wrong, truncated=truncated)
                return span._replace(call=(span.call,))
            return self.broken_list(text, start, wrong, cut=is_cut(text, error), truncated=truncated)
        calls = tuple(_result(item, text[at : item.end], tools) for item, at in items)
        end = skip_space(text, end)
        close = turn.mark_at(MarkKind.CALL_END, end)
        if marked and close is None:
            wrong = f"{self.tool_end_token} must follow the JSON"
            span = self.broken_call(turn, start, end, wrong, truncated=truncated, attempted_name=name_of(calls))
            return span._replace(call=(span.call,))
        if not marked and end != len(text):
            wrong = "nothing may follow the list of calls"
            return self.broken_list(text, start, wrong, cut=False, name=name_of(calls))
        if not calls:
            wrong, raw = "the list of calls is empty", text[start.end : end]
            calls = (failed_call(raw, wrong, ToolCallStatus.MALFORMED),)
        return CallSpan(end if close is None else close.end, True, calls)


def _result(item: DecodedJSON, raw: str, tools: ToolSchemas | None) -> ToolParseResult:
    call: Any = item.value
    if isinstance(call, dict) and call.keys() == {"type", "function"} and call["type"] == "function":
        call = call["function"]
    return call_from_json(call, item.problem, raw, tools)
