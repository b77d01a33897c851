"""The formats of DeepSeek: JSON arguments after the tool's name up to V3.1, tags from V3.2 on.

V3 and R1: JSON arguments in a fenced block after the tool's name.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search
```json
{"query": "x"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1: JSON arguments after the tool's name.

`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>`

DSML, the format of DeepSeek V3.2 and V4: values stand between tags as plain text and say if they are strings.

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
from typing import Any

from ..base import Grammar, ToolParser, Writer, register_tool_parser
from ..reading import InvalidValueError, JSONSection, TaggedCalls, strict_json


@register_tool_parser("deepseek_v3")
class DeepSeekV3ToolParser(ToolParser):
    """Reads calls written as a name and a fenced JSON object, all of them in one section."""

    DEFAULT_TOOL_START_TOKEN = "<｜tool▁calls▁begin｜>"
    DEFAULT_TOOL_END_TOKEN = "<｜tool▁calls▁end｜>"
    FORMAT_TOKENS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    CALLS = JSONSection(
        head=re.compile(r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\s<`]+)\s*```json\s*"),
        tail=re.compile(r"\s*```\s*<｜tool▁call▁end｜>"),
        shape="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME and a line ```json",
        written_head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        written_tail="\n```<｜tool▁call▁end｜>",
    )


@register_tool_parser("deepseek_v3_1")
class DeepSeekV31ToolParser(ToolParser):
    """Reads calls written as a name and a JSON object, all of them in one section."""

    DEFAULT_TOOL_START_TOKEN = "<｜tool▁calls▁begin｜>"
    DEFAULT_TOOL_END_TOKEN = "<｜tool▁calls▁end｜>"
    FORMAT_TOKENS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    CALLS = JSONSection(
        head=re.compile(r"<｜tool▁call▁begin｜>\s*(?P<name>[^\s<]+)\s*<｜tool▁sep｜>\s*"),
        tail=re.compile(r"\s*<｜tool▁call▁end｜>"),
        shape="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        written_head="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        written_tail="<｜tool▁call▁end｜>",
    )


class _DSMLCalls(TaggedCalls):
    """The value of a parameter with `string="true"` is its text, that of one with `string="false"` is strict JSON."""

    def schema_of(self, parameter: re.Match[str], schema: Any) -> Any:
        """Return what the opening tag says of the type."""
        return {"type": ["string"] if parameter["type"] == "true" else ["array", "object"]}

    def value(self, text: str, parameter: re.Match[str], schema: Any, root: Any) -> Any:
        """Return the value that a text means."""
        if parameter["type"] == "true":
            return text
        try:
            return strict_json(text)
        except InvalidValueError as error:
            raise InvalidValueError(f'with string="false" it is not valid JSON: {error}', error.position) from None

    def written_values(self, call: Writer, grammar: Grammar, schema: Any) -> dict[str, Any]:
        """Return what matches the strings, and what matches all other values."""
        values = grammar.values_by_type(schema, self.excludes)
        others = [value for kind, value in values.items() if kind != "string"]
        strings = {"true": values["string"]} if "string" in values else {}
        return {**strings, "false": grammar.either(others)} if others else strings


_DSML = _DSMLCalls(
    call='<｜DSML｜invoke name="{name}">',
    call_end="</｜DSML｜invoke>",
    parameter='<｜DSML｜parameter name="{key}" string="{type}">',
    parameter_end="</｜DSML｜parameter>",
    name=r'[^"\n]+',
    key=r'[^"\n]+',
    types="true|false",
)


@register_tool_parser("deepseek_v3_2")
class DeepSeekV32ToolParser(ToolParser):
    """Reads calls written in DSML, all of them in one section."""

    DEFAULT_TOOL_START_TOKEN = "<｜DSML｜function_calls>"
    DEFAULT_TOOL_END_TOKEN = "</｜DSML｜function_calls>"
    FORMAT_TOKENS = ("｜DSML｜",)
    CALLS = _DSML


@register_tool_parser("deepseek_v4")
class DeepSeekV4ToolParser(ToolParser):
    """Reads calls written in the DSML of DeepSeek V4."""

    DEFAULT_TOOL_START_TOKEN = "<｜DSML｜tool_calls>"
    DEFAULT_TOOL_END_TOKEN = "</｜DSML｜tool_calls>"
    FORMAT_TOKENS = ("｜DSML｜",)
    CALLS = _DSML
