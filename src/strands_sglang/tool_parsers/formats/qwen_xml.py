"""The XML-like format of Qwen3-Coder, Qwen3.5 and later: values stand between tags as plain text.

    <tool_call>
    <function=write_file>
    <parameter=path>
    notes.txt
    </parameter>
    <parameter=lines>
    3
    </parameter>
    </function>
    </tool_call>

The format escapes nothing and types nothing. Types come from the tool's JSON schema. A list or an object, where the
schema allows no string, ends where its JSON does, whatever stands in its strings. Any other value that begins on a line
of its own ends at the first line `</parameter>` behind which the call goes on as a call does: with a line
`<parameter=...>`, or with `</function>` and the end mark. Where there is no such line, and for a value on the line of
its tag, white space does not count. All other text may stand in a value, with two exceptions that could as well be the
rest of a call whose value was never closed: `</function>` followed by the end mark, and a line `<parameter=...>`. Such
a call is refused. A string that holds the very lines that end one parameter and begin the next is two parameters:
nothing in the format tells them apart.
"""

from __future__ import annotations

import re

from ..base import (
    ToolCallStatus,
)
from ..reading.arguments import find_value_end, nested_value_end, typed_call
from ..reading.marked import MarkedToolParser, ToolSchemas, failed_call
from ..reading.schemas import property_schema
from ..reading.structure import CallSpan, Mark, MarkedText, MarkKind
from ..reading.values import shorten, skip_space
from ..registry import register_tool_parser

_FUNCTION_END = "</function>"
_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
_VALUE_END = re.compile(r"</parameter>[ \t\n\r]*(?=<parameter=[^>\n]+>|</function>([ \t\n\r]*))")
_VALUE_END_LINE = re.compile(r"(?<=\n)</parameter>\n(?=<parameter=[^>\n]+>\n|</function>([ \t\n\r]*))")
_UNCLOSED = re.compile(r"\n<parameter=[^>\n]+>(?=\n)|</function>([ \t\n\r]*)")


@register_tool_parser("qwen_xml")
class QwenXMLToolParser(MarkedToolParser):
    """Reads calls written as `<function=...>` with `<parameter=...>` values between marks.

    One newline on either side of a value belongs to the format; the rest of a string is kept as it is, indentation
    included. Without a schema, a value that is JSON (other than a JSON string) is that value; any other is its text.
    """

    def read_call(self, turn: MarkedText, start: Mark, tools: ToolSchemas | None, truncated: bool) -> CallSpan:
        """Read the function behind a start mark; see `MarkedToolParser.read_call`."""
        text = turn.text
        name: str | None = None
        values: dict[str, str] = {}
        repeated: str | None = None

        def broken(position: int, error: str) -> CallSpan:
            return self.broken_call(turn, start, position, error, truncated=truncated, attempted_name=name)

        position = skip_space(text, start.end)
        function = _FUNCTION.match(text, position)
        if function is None:
            return broken(position, f"{self.tool_start_token} must be followed by <function=NAME>")
        name = function.group(1)
        schema = None if tools is None else tools.get(name)
        position = skip_space(text, function.end())
        while (parameter := _PARAMETER.match(text, position)) is not None:
            key = parameter.group(1)
            # A call with a key twice is refused anyway.
            nested = (
                None
                if key in values
                else nested_value_end(text, parameter.end(), property_schema(schema, key, schema), schema)
            )
            on_lines = [_VALUE_END_LINE] if text.startswith("\n", parameter.end()) else []
            ends = [(pattern, _goes_on) for pattern in (*on_lines, _VALUE_END)]
            value_end, failed_at = find_value_end(turn, parameter.end(), nested, ends, (_UNCLOSED, _goes_on))
            if value_end is None:
                return broken(failed_at, f"the value of parameter {shorten(key)} is not closed by </parameter>")
            if key in values and repeated is None:
                repeated = key
            values[key] = _without_newlines(text[parameter.end() : value_end.start()])
            position = value_end.end()
        if not text.startswith(_FUNCTION_END, position):
            return broken(position, f"only <parameter=NAME> or {_FUNCTION_END} may follow here")
        position = skip_space(text, position + len(_FUNCTION_END))
        close = turn.mark_at(MarkKind.CALL_END, position)
        if close is None:
            return broken(position, f"{_FUNCTION_END} must be followed by {self.tool_end_token}")

        raw = text[start.end : close.start]
        if repeated is not None:
            result = failed_call(raw, f"parameter {shorten(repeated)} is there twice", ToolCallStatus.MALFORMED, name)
        else:
            result = typed_call(name, values, raw, tools)
        return CallSpan(close.end, True, result)


def _goes_on(turn: MarkedText, match: re.Match[str]) -> bool:
    """Tell whether a tag that looks like the end of a function is one: the end mark follows."""
    return match.group(1) is None or turn.mark_at(MarkKind.CALL_END, match.end(1)) is not None


def _without_newlines(value: str) -> str:
    """Remove the one newline on either side that belongs to the format."""
    return value.removeprefix("\n").removesuffix("\n")
