"""The formats of DeepSeek: JSON arguments after the tool's name up to V3.1, tags since V3.2.

V3 and R1: JSON arguments in a fenced block after the tool's name.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search
```json
{"query": "x"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1: JSON arguments after the tool's name.

`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>`

V3.2 and V4 (DSML): plain text between tags, each of which says whether its value is a string.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="search">
    <｜DSML｜parameter name="query" string="true">x</｜DSML｜parameter>
    <｜DSML｜parameter name="limit" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V4 names the section `tool_calls`, and is otherwise the same.
"""

from __future__ import annotations

import re
from typing import Any

from ..base import Grammar, ToolParser, Writer, register_tool_parser
from ..reading import InvalidValueError, JSONSection, TaggedCalls, strict_json


@register_tool_parser("deepseek_v3")
class DeepSeekV3ToolParser(ToolParser):
    """Parser for DeepSeek V3 and R1.

    All calls are in one section. Each is a name and a fenced JSON object:

    ````text
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search
    ```json
    {"query": "x"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    ````
    """

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
class DeepSeekV31ToolParser(DeepSeekV3ToolParser):
    """Parser for DeepSeek V3.1.

    All calls are in one section. Each is a name and a JSON object:

    ```text
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    ```
    """

    CALLS = JSONSection(
        head=re.compile(r"<｜tool▁call▁begin｜>\s*(?P<name>[^\s<]+)\s*<｜tool▁sep｜>\s*"),
        tail=re.compile(r"\s*<｜tool▁call▁end｜>"),
        shape="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        written_head="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        written_tail="<｜tool▁call▁end｜>",
    )


class _DSMLCalls(TaggedCalls):
    """A value is its text if the tag has `string="true"`, and strict JSON if it has `string="false"`."""

    def schema_of(self, parameter: re.Match[str], schema: Any) -> Any:
        """Return the schema that the opening tag implies."""
        return {"type": ["string"] if parameter["type"] == "true" else ["array", "object"]}

    def value(self, text: str, parameter: re.Match[str], schema: Any, root: Any) -> Any:
        """Return the value of a parameter's text."""
        if parameter["type"] == "true":
            return text
        try:
            return strict_json(text)
        except InvalidValueError as error:
            raise InvalidValueError(f'it has string="false" but is not valid JSON: {error}', error.position) from None

    def written_values(self, call: Writer, grammar: Grammar, schema: Any) -> dict[str, Any]:
        """Return the grammar elements of strings and of all other values."""
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
    """Parser for DeepSeek V3.2, which writes DSML.

    All calls are in one section. A value with `string="true"` is its text, any other value is strict JSON:

    ```text
    <｜DSML｜function_calls>
    <｜DSML｜invoke name="search">
    <｜DSML｜parameter name="query" string="true">x</｜DSML｜parameter>
    <｜DSML｜parameter name="limit" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>
    ```
    """

    DEFAULT_TOOL_START_TOKEN = "<｜DSML｜function_calls>"
    DEFAULT_TOOL_END_TOKEN = "</｜DSML｜function_calls>"
    FORMAT_TOKENS = ("｜DSML｜",)
    CALLS = _DSML


@register_tool_parser("deepseek_v4")
class DeepSeekV4ToolParser(DeepSeekV32ToolParser):
    """Parser for DeepSeek V4, which writes DSML.

    The format is that of `DeepSeekV32ToolParser`, in a section `<｜DSML｜tool_calls>`.
    """

    DEFAULT_TOOL_START_TOKEN = "<｜DSML｜tool_calls>"
    DEFAULT_TOOL_END_TOKEN = "</｜DSML｜tool_calls>"
