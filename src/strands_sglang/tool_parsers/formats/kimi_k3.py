"""The format of Kimi K3: every tag is made of three tokens, values say their type.

`<|open|>tools<|sep|><|open|>call tool="search" index="1"<|sep|><|open|>argument key="query" type="string"<|sep|>x
<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>`, without the line break. In place of arguments, a
call may hold one JSON object: `<|open|>json type="object"<|sep|>{"query": "x"}<|close|>json<|sep|>`. The visible text
stands between `response` tags, reasoning between `think` tags. Attributes escape `&` and `"`; nothing else is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..base import ToolCallStatus, ToolParseResult, new_tool_call_id
from ..reading.arguments import nested_value_end
from ..reading.json_calls import json_call
from ..reading.marked import ToolSchemas, failed_call
from ..reading.nested import NestedText
from ..reading.schemas import JSON_TYPES
from ..reading.sections import BrokenCallError, SectionCall
from ..reading.tagged import TaggedToolParser, Tags
from ..reading.values import InvalidValueError, decode_json, shorten, typed_value
from ..registry import register_tool_parser

_CALL = r'<\|open\|>call tool="(?P<name>[^"\n]+)" index="[0-9]+"<\|sep\|>'
_JSON_CALL = re.compile(rf'{_CALL}<\|open\|>json type="object"<\|sep\|>\s*')
_JSON_END = re.compile(r"\s*<\|close\|>json<\|sep\|><\|close\|>call<\|sep\|>")


@register_tool_parser("kimi_k3")
class KimiK3ToolParser(TaggedToolParser):
    """Reads calls written as `<|open|>call ...<|sep|>` with typed arguments or one JSON object, all in one section.

    The text of a value is a string if its type says so, strict JSON of that type otherwise.
    """

    DEFAULT_TOOL_START_TOKEN = "<|open|>tools<|sep|>"
    DEFAULT_TOOL_END_TOKEN = "<|close|>tools<|sep|>"
    DEFAULT_THINK_START_TOKEN = "<|open|>think<|sep|>"
    DEFAULT_THINK_END_TOKEN = "<|close|>think<|sep|>"
    FORMAT_TOKENS = ("<|open|>", "<|close|>", "<|sep|>")
    WRAPPERS = re.compile(r"<\|(?:open|close)\|>response<\|sep\|>|<\|close\|>message<\|sep\|>")
    TAGS = Tags.of(
        call=_CALL,
        call_end="<|close|>call<|sep|>",
        parameter=r'<\|open\|>argument key="(?P<key>[^"]*)" type="(?P<type>[a-z]+)"<\|sep\|>',
        parameter_end="<|close|>argument<|sep|>",
    )

    def read_inner_call(self, turn: NestedText, position: int, tools: ToolSchemas | None) -> SectionCall:
        """Read one call; see `SectionToolParser.read_inner_call`."""
        head = turn.match(_JSON_CALL, position)
        if head is None:
            return super().read_inner_call(turn, position, tools)
        name = _unescape(head["name"])
        try:
            decoded = decode_json(turn.text, head.end())
        except InvalidValueError as error:
            raise BrokenCallError(error.position, f"the arguments are not valid JSON: {error}", name) from None
        tail = turn.match(_JSON_END, decoded.end)
        if tail is None:
            raise BrokenCallError(decoded.end, "the JSON of its arguments is not the end of the call", name)
        raw = turn.text[position : tail.end()]
        return SectionCall(position, tail.end(), json_call(name, decoded, raw))

    def nested_end(self, text: str, parameter: re.Match[str], schema: Any) -> int | None:
        """Return where a list or an object ends; see `TaggedToolParser.nested_end`."""
        return nested_value_end(text, parameter.end(), {"type": parameter["type"]})

    def make_result(
        self, name: str, values: Mapping[str, tuple[str | None, str]], raw: str, tools: ToolSchemas | None
    ) -> ToolParseResult:
        """Return the result for a call that is complete; see `TaggedToolParser.make_result`."""
        name = _unescape(name)
        arguments: dict[str, Any] = {}
        for key, (kind, text) in values.items():
            try:
                if kind not in JSON_TYPES:
                    raise InvalidValueError(f"there is no type {kind}", 0)
                if (unescaped := _unescape(key)) in arguments:
                    raise InvalidValueError("it is there twice", 0)
                arguments[unescaped] = typed_value(text, {"type": kind})
            except InvalidValueError as error:
                what = f"argument {shorten(_unescape(key))} is wrong: {error}"
                return failed_call(raw, what, ToolCallStatus.MALFORMED, name)
        return ToolParseResult(new_tool_call_id(), name, arguments)


def _unescape(attribute: str) -> str:
    return attribute.replace("&quot;", '"').replace("&amp;", "&")
