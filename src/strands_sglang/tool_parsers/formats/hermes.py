"""The Hermes format (Hermes, Qwen2.5, Qwen3, ...): a JSON object between marks.

For example `<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>`, with any white space
around the JSON.
"""

from __future__ import annotations

import re
from typing import Any

from ..base import ToolParser
from ..reading import (
    BrokenCallError,
    CallSpan,
    InvalidValueError,
    Mark,
    MarkedText,
    MarkKind,
    call_from_json,
    decode_json,
    skip_space,
)
from ..registry import register_tool_parser

_NAME_IN_BROKEN_JSON = re.compile(r'"name"\s{0,8}:\s{0,8}"([^"\\]{1,64})"')
_NAME_SEARCHED = 500  # characters


class JSONObject:
    """A call that is a JSON object of a name and arguments between marks."""

    def read(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read a call."""
        text, begin = turn.text, skip_space(turn.text, start.end)
        try:
            if not text.startswith("{", begin):
                raise InvalidValueError(f"a JSON object must follow {text[start.start : start.end]}", begin)
            try:
                decoded = decode_json(text, begin)
            except InvalidValueError as error:
                wrong = f"the call is not valid JSON: {error} (character {error.position - start.end})"
                raise InvalidValueError(wrong, error.position) from None
            end = skip_space(text, decoded.end)
            close = turn.mark_at(MarkKind.CALL_END, end)
            if close is None:
                found = "nothing follows its JSON" if end == len(text) else "there is other text behind its JSON"
                raise InvalidValueError(f"{found}, where {turn.call_end} belongs", end)
        except InvalidValueError as error:
            name = _NAME_IN_BROKEN_JSON.search(text, start.end, start.end + _NAME_SEARCHED)
            raise BrokenCallError(error.position, str(error), name and name.group(1)) from None
        call = call_from_json(decoded.value, decoded.problem)
        return CallSpan(close.end, True, (call.result(text[start.end : close.start]),))

    def write(self, call: Any) -> Any:
        """Write a call."""
        return call.sequence(f"{call.start}\n", call.object(), f"\n{call.end}")


@register_tool_parser("hermes")
class HermesToolParser(ToolParser):
    """Reads calls written as `{"name": ..., "arguments": {...}}` between marks.

    The JSON is strict. `name` is required and `arguments` may be left out, as models do for tools without parameters;
    there is no third key. A mark inside a JSON string belongs to the string: a call ends where its JSON ends.
    """

    CALLS = JSONObject()
