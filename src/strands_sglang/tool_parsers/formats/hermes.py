"""The Hermes format (Hermes, Qwen2.5, Qwen3, ...): a JSON object between marks.

For example `<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>`, with any white space
around the JSON.
"""

from __future__ import annotations

import re

from ..reading.json_calls import call_from_json
from ..reading.marked import MarkedToolParser, ToolSchemas
from ..reading.structure import CallSpan, Mark, MarkedText, MarkKind
from ..reading.values import InvalidValueError, decode_json, skip_space
from ..registry import register_tool_parser

_NAME_IN_BROKEN_JSON = re.compile(r'"name"\s{0,8}:\s{0,8}"([^"\\]{1,64})"')
_NAME_SEARCHED = 500  # characters


@register_tool_parser("hermes")
class HermesToolParser(MarkedToolParser):
    """Reads calls written as `{"name": ..., "arguments": {...}}` between marks.

    The JSON is strict. `name` is required and `arguments` may be left out, as models do for tools without parameters;
    there is no third key. A mark inside a JSON string belongs to the string: a call ends where its JSON ends.
    """

    def read_call(self, turn: MarkedText, start: Mark, tools: ToolSchemas | None, truncated: bool) -> CallSpan:
        """Read the JSON object behind a start mark; see `MarkedToolParser.read_call`."""
        text = turn.text

        def broken(position: int, error: str) -> CallSpan:
            name = _NAME_IN_BROKEN_JSON.search(text, start.end, start.end + _NAME_SEARCHED)
            attempted = name.group(1) if name is not None else None
            return self.broken_call(turn, start, position, error, truncated=truncated, attempted_name=attempted)

        begin = skip_space(text, start.end)
        if not text.startswith("{", begin):
            return broken(begin, f"a JSON object must follow {self.tool_start_token}")
        try:
            decoded = decode_json(text, begin)
        except InvalidValueError as error:
            where = f"character {error.position - start.end}"
            return broken(error.position, f"the call is not valid JSON: {error} ({where})")
        end = skip_space(text, decoded.end)
        close = turn.mark_at(MarkKind.CALL_END, end)
        if close is None:
            behind = "nothing follows its JSON" if end == len(text) else "there is other text behind its JSON"
            return broken(end, f"{behind}, where {self.tool_end_token} belongs")
        raw = text[start.end : close.start]
        return CallSpan(close.end, True, call_from_json(decoded.value, decoded.problem, raw))
