"""The formats of Kimi: JSON arguments after an id in K2, typed tags in K3.

K2 (Instruct, Thinking, K2.5): JSON arguments after an id that names the tool.

`<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "x"}
<|tool_call_end|><|tool_calls_section_end|>`, without the line break. The number counts the calls of the conversation.

K3: every tag consists of three tokens, and names the type of its value.

`<|open|>tools<|sep|><|open|>call tool="search" index="1"<|sep|><|open|>argument key="query" type="string"<|sep|>x
<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>`, without the line break. Instead of arguments, a call
may contain one JSON object: `<|open|>json type="object"<|sep|>{"query": "x"}<|close|>json<|sep|>`. The visible text is
between `response` tags, reasoning between `think` tags. Attributes escape `&` and `"`; nothing else is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from ..base import Element, Grammar, ToolParser, Writer, register_tool_parser
from ..reading import (
    JSON_TYPES,
    Call,
    InvalidValueError,
    JSONSection,
    MarkedText,
    MarkKind,
    TaggedCalls,
    read_json_call,
)


@register_tool_parser("kimi_k2")
class KimiK2ToolParser(ToolParser):
    """Parser for Kimi K2 (Instruct, Thinking, K2.5).

    All calls are in one section. Each is an id such as `functions.search:0` and a JSON object (line breaks added):

    ```text
    <|tool_calls_section_begin|>
    <|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "x"}<|tool_call_end|>
    <|tool_calls_section_end|>
    ```

    The id becomes the `native_id` of the result, also for failed calls, because tool results refer to it.
    """

    DEFAULT_TOOL_START_TOKEN = "<|tool_calls_section_begin|>"
    DEFAULT_TOOL_END_TOKEN = "<|tool_calls_section_end|>"
    FORMAT_TOKENS = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    CALLS = JSONSection(
        head=re.compile(
            r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<|:]+):[0-9]+)"
            r"\s*<\|tool_call_argument_begin\|>\s*"
        ),
        tail=re.compile(r"\s*<\|tool_call_end\|>"),
        shape="<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>",
        written_head="<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
        written_tail="<|tool_call_end|>",
    )


_JSON_CALL = re.compile(
    r'<\|open\|>call tool="(?P<name>[^"\n]+)" index="[0-9]+"<\|sep\|><\|open\|>json type="object"<\|sep\|>\s*'
)
_JSON_END = re.compile(r"\s*<\|close\|>json<\|sep\|><\|close\|>call<\|sep\|>")


class _KimiK3Calls(TaggedCalls):
    """A value of type `string` is its text, any other value is strict JSON of its type."""

    def unescape(self, attribute: str) -> str:
        """Return the text of an attribute."""
        return attribute.replace("&quot;", '"').replace("&amp;", "&")

    def escape(self, attribute: str) -> str:
        """Return the spelling of an attribute."""
        return attribute.replace("&", "&amp;").replace('"', "&quot;")

    def schema_of(self, parameter: re.Match[str], schema: Any) -> Any:
        """Return the schema that the opening tag implies."""
        return {"type": parameter["type"]}

    def value(self, text: str, parameter: re.Match[str], schema: Any, root: Any) -> Any:
        """Return the value of a parameter's text."""
        if parameter["type"] not in JSON_TYPES:
            raise InvalidValueError(f"there is no type {parameter['type']}", 0)
        return super().value(text, parameter, schema, root)

    def read_call(self, turn: MarkedText, position: int) -> tuple[Call, int]:
        """Return the call at `position`, whose arguments may be one JSON object, and its end."""
        head = turn.match(_JSON_CALL, position)
        if head is None:
            return super().read_call(turn, position)
        return read_json_call(turn, head.end(), _JSON_END, self.unescape(head["name"]))

    def written_values(self, call: Writer, grammar: Grammar, schema: Any) -> Mapping[str, Any]:
        """Return the grammar elements of a parameter's values by type."""
        return cast(Mapping[str, Any], grammar.values_by_type(schema, self.excludes))

    def write(self, call: Writer, grammar: Grammar) -> Element:
        """Write a call with the tags around it."""
        response = grammar.optional("<|open|>response<|sep|><|close|>response<|sep|>")
        return grammar.sequence(response, super().write(call, grammar), "<|close|>message<|sep|>")


@register_tool_parser("kimi_k3")
class KimiK3ToolParser(ToolParser):
    """Parser for Kimi K3.

    All calls are in one section. Each has typed arguments, or one JSON object instead of them (line breaks added):

    ```text
    <|open|>tools<|sep|>
    <|open|>call tool="search" index="1"<|sep|>
    <|open|>argument key="query" type="string"<|sep|>x<|close|>argument<|sep|>
    <|close|>call<|sep|>
    <|close|>tools<|sep|>
    ```
    """

    DEFAULT_TOOL_START_TOKEN = "<|open|>tools<|sep|>"
    DEFAULT_TOOL_END_TOKEN = "<|close|>tools<|sep|>"
    DEFAULT_THINK_START_TOKEN = "<|open|>think<|sep|>"
    DEFAULT_THINK_END_TOKEN = "<|close|>think<|sep|>"
    FORMAT_TOKENS = ("<|open|>", "<|close|>", "<|sep|>")
    MORE_MARKS = dict.fromkeys(
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"), MarkKind.WRAPPER
    )
    BEFORE_CALL = ""
    CALLS = _KimiK3Calls(
        call='<|open|>call tool="{name}" index="{index}"<|sep|>',
        call_end="<|close|>call<|sep|>",
        parameter='<|open|>argument key="{key}" type="{type}"<|sep|>',
        parameter_end="<|close|>argument<|sep|>",
        name=r'[^"\n]+',
        key="",
        types="[a-z]+",
        line="",
    )
