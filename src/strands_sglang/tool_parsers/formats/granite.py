"""The formats of Granite: Granite 4 writes Hermes' calls, Granite 3 a JSON list after `<|tool_call|>`.

Granite 4: `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`, once per call. Granite 3:
`<|tool_call|>[{"name": "f", "arguments": {"x": 1}}, ...]` (in 3.1 after `<tool_call>`), which ends the turn; its
template only asks for that and writes no call itself.
"""

from __future__ import annotations

from typing import Any

from ..base import ToolParser
from ..reading import CallSpan, DecodedJSON, Mark, MarkedText, MarkKind, call_from_json, read_list_to_end, skip_space
from ..reading.calls import Call
from ..registry import register_tool_parser
from .hermes import JSONObject

_OBJECT = JSONObject()


@register_tool_parser("granite")
class GraniteToolParser(ToolParser):
    """Reads Granite's calls: JSON objects between marks, or one JSON list after a mark."""

    MORE_MARKS = {"<|tool_call|>": MarkKind.CALL_START}

    def read_call(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read the object or the list after a start mark."""
        begin = skip_space(turn.text, start.end)
        if not turn.text.startswith("[", begin) and turn.text.startswith(self.tool_start_token, start.start):
            return _OBJECT.read(turn, start)
        return read_list_to_end(turn, begin, _call)

    def write_call(self, call: Any) -> Any:
        """Write a call in either way; Granite 3's template indents its JSON."""
        space = call.INDENTED_JSON.gap
        name = f'"name": {call.constant(call.name)},'
        listed = call.sequence(
            *("<|tool_call|>[", space, "{", space, name, space, '"arguments": '),
            *(call.json(call.INDENTED_JSON), space, "}", space, "]"),
        )
        return call.either([_OBJECT.write(call), listed])


def _call(item: DecodedJSON) -> Call:
    return call_from_json(item.value, item.problem)
