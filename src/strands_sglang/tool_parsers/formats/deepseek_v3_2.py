"""DSML, the format of DeepSeek V3.2 and V4: values stand between tags as plain text and say if they are strings.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="search">
    <｜DSML｜parameter name="query" string="true">x</｜DSML｜parameter>
    <｜DSML｜parameter name="limit" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V4 calls the section `tool_calls`; nothing else is different.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..base import ToolCallStatus, ToolParseResult, new_tool_call_id
from ..reading.arguments import nested_value_end
from ..reading.marked import ToolSchemas, failed_call
from ..reading.tagged import TaggedToolParser, Tags
from ..reading.values import InvalidValueError, shorten, strict_json
from ..registry import register_tool_parser


@register_tool_parser("deepseek_v3_2")
class DeepSeekV32ToolParser(TaggedToolParser):
    """Reads calls written in DSML, all of them in one section.

    The value of a parameter with `string="true"` is its text, that of one with `string="false"` is strict JSON.
    """

    DEFAULT_TOOL_START_TOKEN = "<｜DSML｜function_calls>"
    DEFAULT_TOOL_END_TOKEN = "</｜DSML｜function_calls>"
    FORMAT_TOKENS = ("｜DSML｜",)
    TAGS = Tags.of(
        call=r'<｜DSML｜invoke name="(?P<name>[^"\n]+)">',
        call_end="</｜DSML｜invoke>",
        parameter=r'<｜DSML｜parameter name="(?P<key>[^"\n]+)" string="(?P<type>true|false)">',
        parameter_end="</｜DSML｜parameter>",
    )

    def nested_end(self, text: str, parameter: re.Match[str], schema: Any) -> int | None:
        """Return where a list or an object ends; see `TaggedToolParser.nested_end`."""
        types = ["string"] if parameter["type"] == "true" else ["array", "object"]
        return nested_value_end(text, parameter.end(), {"type": types})

    def make_result(
        self, name: str, values: Mapping[str, tuple[str | None, str]], raw: str, tools: ToolSchemas | None
    ) -> ToolParseResult:
        """Return the result for a call that is complete; see `TaggedToolParser.make_result`."""
        arguments: dict[str, Any] = {}
        for key, (is_string, text) in values.items():
            try:
                arguments[key] = text if is_string == "true" else strict_json(text)
            except InvalidValueError as error:
                what = f'parameter {shorten(key)} with string="false" is not valid JSON: {error}'
                return failed_call(raw, what, ToolCallStatus.MALFORMED, name)
        return ToolParseResult(new_tool_call_id(), name, arguments)


@register_tool_parser("deepseek_v4")
class DeepSeekV4ToolParser(DeepSeekV32ToolParser):
    """Reads calls written in the DSML of DeepSeek V4."""

    DEFAULT_TOOL_START_TOKEN = "<｜DSML｜tool_calls>"
    DEFAULT_TOOL_END_TOKEN = "</｜DSML｜tool_calls>"
