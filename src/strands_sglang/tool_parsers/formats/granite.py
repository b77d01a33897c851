"""The formats of Granite: Granite 4 writes Hermes' calls, Granite 3 a JSON list behind `<|tool_call|>`.

Granite 4: `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`, once per call. Granite 3:
`<|tool_call|>[{"name": "f", "arguments": {"x": 1}}, ...]` (in 3.1 behind `<tool_call>`), which ends the turn; its
template only asks for that and writes no call itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..base import ToolParser
from ..reading.json_calls import call_from_json
from ..reading.listed import ListedToolParser, is_cut, name_of, read_json_list
from ..reading.marked import ToolSchemas
from ..reading.structure import CallSpan, Mark, MarkedText, MarkKind
from ..reading.values import InvalidValueError, skip_space
from ..registry import register_tool_parser
from .hermes import HermesToolParser


@register_tool_parser("granite")
class GraniteToolParser(ListedToolParser):
    """Reads Granite's calls: JSON objects between marks, or one JSON list behind a mark."""

    MORE_MARKS: ClassVar[Mapping[str, MarkKind | None]] = {"<|tool_call|>": MarkKind.CALL_START}

    def __init__(
        self,
        tool_start_token: str = ToolParser.DEFAULT_TOOL_START_TOKEN,
        tool_end_token: str = ToolParser.DEFAULT_TOOL_END_TOKEN,
        think_start_token: str = ToolParser.DEFAULT_THINK_START_TOKEN,
        think_end_token: str = ToolParser.DEFAULT_THINK_END_TOKEN,
    ) -> None:
        """Name the marks; an empty one is never found."""
        super().__init__(tool_start_token, tool_end_token, think_start_token, think_end_token)
        self._objects = HermesToolParser(tool_start_token, tool_end_token, think_start_token, think_end_token)

    def read_call(self, turn: MarkedText, start: Mark, tools: ToolSchemas | None, truncated: bool) -> CallSpan:
        """Read the object or the list behind a start mark; see `ListedToolParser`."""
        text = turn.text
        begin = skip_space(text, start.end)
        if not text.startswith("[", begin) and text.startswith(self.tool_start_token, start.start):
            span = self._objects.read_call(turn, start, tools, truncated)
            return span._replace(call=(span.call,))
        try:
            items, end = read_json_list(text, begin)
        except InvalidValueError as error:
            cut = is_cut(text, error)
            return self.broken_list(text, start, f"not a JSON list: {error}", cut=cut, truncated=truncated)
        calls = tuple(call_from_json(item.value, item.problem, text[at : item.end]) for item, at in items)
        close = turn.mark_at(MarkKind.CALL_END, skip_space(text, end))
        end = skip_space(text, end if close is None else close.end)
        if end != len(text):
            wrong = "nothing may follow the list of calls"
            return self.broken_list(text, start, wrong, cut=False, name=name_of(calls))
        if not calls:
            return self.broken_list(text, start, "the list of calls is empty", cut=False)
        return CallSpan(end, True, calls)
