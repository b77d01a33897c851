"""Calls that are a JSON object between marks: Hermes, SmolLM3 and Granite.

The Hermes format (Hermes, Qwen2.5, Qwen3, ...): a JSON object between marks.

For example `<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>`, with any white space
around the JSON.

SmolLM3 writes Hermes' calls. Its template describes tools given as `xml_tools` and asks for `<tool_call>{"name": ...,
"arguments": {...}}` and `</tool_call>`. It drops the calls of earlier turns, so that what it asks for is all there is
to go by. Python code between `<code>` and `</code>`, for its `python_tools`, is text here: nothing runs it.

Granite 4 writes Hermes' calls, Granite 3 a JSON list after `<|tool_call|>`.

Granite 4: `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`, once per call. Granite 3:
`<|tool_call|>[{"name": "f", "arguments": {"x": 1}}, ...]` (in 3.1 after `<tool_call>`), which ends the turn; its
template only asks for that and writes no call itself.
"""

from __future__ import annotations

import re

from ..base import Element, Grammar, ToolParser, Writer, register_tool_parser
from ..reading import (
    BrokenCallError,
    CallSpan,
    InvalidValueError,
    Mark,
    MarkedText,
    MarkKind,
    call_from_json,
    decode_json,
    read_list_to_end,
    skip_space,
)

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
        call = call_from_json(decoded)
        return CallSpan(close.end, True, (call.result(text[start.end : close.start]),))

    def write(self, call: Writer, grammar: Grammar) -> Element:
        """Write a call."""
        return grammar.sequence(f"{call.start}\n", call.object(), f"\n{call.end}")


@register_tool_parser("hermes")
class HermesToolParser(ToolParser):
    """Reads calls written as `{"name": ..., "arguments": {...}}` between marks.

    The JSON is strict. `name` is required and `arguments` may be left out, as models do for tools without parameters;
    there is no third key. A mark inside a JSON string belongs to the string: a call ends where its JSON ends.
    """

    CALLS = JSONObject()


@register_tool_parser("smollm3")
class SmolLM3ToolParser(ToolParser):
    """Reads SmolLM3's calls; see `HermesToolParser`."""

    CALLS = JSONObject()


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
        return read_list_to_end(turn, begin, call_from_json)

    def write_call(self, call: Writer, grammar: Grammar) -> Element:
        """Write a call in either way; Granite 3's template indents its JSON."""
        space = grammar.INDENTED_JSON.gap
        name = f'"name": {grammar.constant_text(call.name)},'
        listed = grammar.sequence(
            *("<|tool_call|>[", space, "{", space, name, space, '"arguments": '),
            *(call.json(grammar.INDENTED_JSON), space, "}", space, "]"),
        )
        return grammar.either([_OBJECT.write(call, grammar), listed])
