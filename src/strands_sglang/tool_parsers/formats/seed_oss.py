"""The format of Seed-OSS: values stand between tags as plain text, typed by the tool's JSON schema.

    <seed:tool_call>
    <function=write_file>
    <parameter=path>notes.txt</parameter>
    <parameter=lines>3</parameter>
    </function>
    </seed:tool_call>

The template writes lists and objects as Python does, so that those are read as JSON or else as Python literals.
Reasoning stands between `<seed:think>` and `</seed:think>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..base import ToolParseResult
from ..reading.arguments import typed_call
from ..reading.literals import read_literal
from ..reading.marked import ToolSchemas
from ..reading.nested import NestedText
from ..reading.schemas import allowed_types, property_schema
from ..reading.sections import BrokenCallError, SectionCall
from ..reading.structure import MarkKind
from ..reading.tagged import TaggedToolParser, Tags
from ..reading.values import InvalidValueError, skip_space, strict_json
from ..registry import register_tool_parser


@register_tool_parser("seed_oss")
class SeedOSSToolParser(TaggedToolParser):
    """Reads calls written as `<function=...>` with `<parameter=...>` values, each between marks of its own.

    A string is kept as it is, white space included. Without a schema, a value that is JSON (other than a JSON string)
    is that value; any other is its text. A value with a line that begins with `<parameter=...>` is refused.
    """

    DEFAULT_TOOL_START_TOKEN = "<seed:tool_call>"
    DEFAULT_TOOL_END_TOKEN = "</seed:tool_call>"
    DEFAULT_THINK_START_TOKEN = "<seed:think>"
    DEFAULT_THINK_END_TOKEN = "</seed:think>"
    TAGS = Tags.of(
        call=r"<function=(?P<name>[^<>\n]+)>",
        call_end="</function>",
        parameter=r"<parameter=(?P<key>[^<>\n]+)>",
        parameter_end="</parameter>",
        before_parameter="\n",
    )

    def read_inner_call(self, turn: NestedText, position: int, tools: ToolSchemas | None) -> SectionCall:
        """Read the one call between two marks; see `SectionToolParser.read_inner_call`."""
        call = super().read_inner_call(turn, position, tools)
        if turn.mark_at(MarkKind.CALL_END, skip_space(turn.text, call.end)) is None:
            name = call.result.attempted_name or call.result.name
            raise BrokenCallError(call.end, f"{self.tool_end_token} must follow the call", name)
        return call

    def nested_end(self, text: str, parameter: re.Match[str], schema: Any) -> int | None:
        """Return where a list or an object ends, in JSON or in Python; see `TaggedToolParser.nested_end`."""
        end = super().nested_end(text, parameter, schema)
        begin = skip_space(text, parameter.end())
        types = allowed_types(property_schema(schema, parameter["key"], schema), schema)
        if end is not None or text[begin : begin + 1] not in ("[", "{") or "string" in types:
            return end
        try:
            return skip_space(text, read_literal(text, begin)[1])
        except InvalidValueError:
            return None

    def make_result(
        self, name: str, values: Mapping[str, tuple[str | None, str]], raw: str, tools: ToolSchemas | None
    ) -> ToolParseResult:
        """Return the result for a call that is complete; see `TaggedToolParser.make_result`."""
        schema = None if tools is None else tools.get(name)
        texts = {key: _as_json(text, property_schema(schema, key, schema), schema) for key, (_, text) in values.items()}
        return typed_call(name, texts, raw, tools)


def _as_json(text: str, schema: Any, root: Any) -> str:
    """Return a value that is a Python list or dictionary as JSON, any other as it is."""
    if text[:1] not in ("[", "{") or "string" in allowed_types(schema, root):
        return text
    try:
        strict_json(text)
    except InvalidValueError:
        try:
            value, end = read_literal(text, 0)
        except InvalidValueError:
            return text
        return json.dumps(value) if end == len(text) else text
    return text
