"""The format of GLM-4.5 to GLM-5: keys and values stand between tags as plain text, typed by the tool's JSON schema.

    <tool_call>search
    <arg_key>query</arg_key>
    <arg_value>x</arg_value>
    </tool_call>

GLM-4.7 and later leave the line breaks out. Nothing is escaped. A list or an object, where the schema allows no string,
ends where its JSON does, whatever stands in its strings. Any other value ends at the first `</arg_value>` behind which
the call goes on as a call does: with `<arg_key>...</arg_key>`, or with the end mark. All other text may stand in a
value, except a key with the opening tag of its value: that could as well follow a value that was never closed. Such a
call is refused.
"""

from __future__ import annotations

import re

from ..base import ToolCallStatus
from ..reading.arguments import find_value_end, nested_value_end, typed_call
from ..reading.marked import ToolSchemas, failed_call
from ..reading.nested import NestedText, NestedToolParser
from ..reading.schemas import property_schema
from ..reading.structure import CallSpan, Mark, MarkedText, MarkKind
from ..reading.values import shorten, skip_space
from ..registry import register_tool_parser

_NAME = re.compile(r"[^\s<]+")
_ARGUMENT = re.compile(r"<arg_key>(?P<key>[^<\n]+)</arg_key>[ \t\n\r]*<arg_value>")
_VALUE_END = re.compile(r"</arg_value>[ \t\n\r]*")


@register_tool_parser("glm")
class GLMToolParser(NestedToolParser):
    """Reads calls written as a name with `<arg_key>` and `<arg_value>` pairs between marks.

    A string is kept as it is, white space included. Without a schema, a value that is JSON (other than a JSON string)
    is that value; any other is its text.
    """

    FORMAT_TOKENS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def read_call(self, turn: MarkedText, start: Mark, tools: ToolSchemas | None, truncated: bool) -> CallSpan:
        """Read the call behind a start mark; see `MarkedToolParser.read_call`."""
        assert isinstance(turn, NestedText)
        text = turn.text
        name: str | None = None
        values: dict[str, str] = {}
        repeated: str | None = None

        def broken(position: int, error: str) -> CallSpan:
            return self.broken_call(turn, start, position, error, truncated=truncated, attempted_name=name)

        position = skip_space(text, start.end)
        named = turn.match(_NAME, position)
        if named is None:
            return broken(position, f"the name of a tool must follow {self.tool_start_token}")
        name = named.group()
        schema = None if tools is None else tools.get(name)
        position = skip_space(text, named.end())
        while (argument := turn.match(_ARGUMENT, position)) is not None:
            key = argument["key"]
            # A call with a key twice is refused anyway.
            nested = (
                None
                if key in values
                else nested_value_end(text, argument.end(), property_schema(schema, key, schema), schema)
            )
            value_end, _ = find_value_end(turn, argument.end(), nested, [(_VALUE_END, _goes_on)], (_ARGUMENT, _is_real))
            if value_end is None:
                return broken(argument.end(), f"the value of {shorten(key)} is not closed by </arg_value>")
            repeated = key if key in values and repeated is None else repeated
            values[key] = text[argument.end() : value_end.start()]
            position = value_end.end()
        close = turn.mark_at(MarkKind.CALL_END, position)
        if close is None:
            return broken(position, f"only <arg_key> or {self.tool_end_token} may follow here")

        raw = text[start.end : close.start]
        if repeated is not None:
            result = failed_call(raw, f"argument {shorten(repeated)} is there twice", ToolCallStatus.MALFORMED, name)
        else:
            result = typed_call(name, values, raw, tools)
        return CallSpan(close.end, True, result)


def _is_real(turn: MarkedText, match: re.Match[str]) -> bool:
    assert isinstance(turn, NestedText)
    return turn.is_real(*match.span())


def _goes_on(turn: MarkedText, match: re.Match[str]) -> bool:
    """Tell whether `</arg_value>` ends a value: it is real, and another argument or the end mark follows."""
    assert isinstance(turn, NestedText)
    if not turn.is_real(*match.span()):
        return False
    end_mark = turn.mark_at(MarkKind.CALL_END, match.end())
    return end_mark is not None or turn.match(_ARGUMENT, match.end()) is not None
