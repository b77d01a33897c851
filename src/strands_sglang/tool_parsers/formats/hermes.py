"""The format of Hermes, SmolLM3 and Granite: a JSON object between marks.

Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>`, with
any white space around the JSON.

SmolLM3: the same. Its template asks for this format for tools in `xml_tools`, and omits the calls of earlier turns.
Code between `<code>` and `</code>`, for `python_tools`, is text here: nothing runs it.

Granite 4: the same, once per call. Granite 3: `<|tool_call|>[{"name": "f", "arguments": {"x": 1}}, ...]` (in 3.1 after
`<tool_call>`), which ends the turn. Its template asks for that and writes no call itself.
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
    """A call that is a JSON object with a name and arguments, between marks."""

    def read(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read a call."""
        text, begin = turn.text, skip_space(turn.text, start.end)

        def broken(position: int, problem: str) -> BrokenCallError:
            marks = (turn.find(kind, start.end) for kind in (MarkKind.CALL_START, MarkKind.CALL_END))
            stop = min((mark.start for mark in marks if mark is not None), default=len(text))
            name = _NAME_IN_BROKEN_JSON.search(text, start.end, min(stop, start.end + _NAME_SEARCHED))
            return BrokenCallError(position, problem, name and name.group(1))

        if not text.startswith("{", begin):
            raise broken(begin, f"expected a JSON object after {text[start.start : start.end]}")
        try:
            decoded = decode_json(text, begin)
        except InvalidValueError as error:
            problem = f"the call is not valid JSON: {error} (character {error.position - start.end})"
            raise broken(error.position, problem) from None
        end = skip_space(text, decoded.end)
        close = turn.mark_at(MarkKind.CALL_END, end)
        if close is None:
            follows = "the turn ends" if end == len(text) else "other text follows"
            raise broken(end, f"expected {turn.call_end} after the JSON, but {follows}")
        call = call_from_json(decoded)
        return CallSpan(close.end, True, (call.result(text[start.end : close.start]),))

    def write(self, call: Writer, grammar: Grammar) -> Element:
        """Write a call."""
        return grammar.sequence(f"{call.start}\n", call.object(), f"\n{call.end}")


_OBJECT = JSONObject()


@register_tool_parser("hermes")
class HermesToolParser(ToolParser):
    """Parser for Hermes, Qwen2.5, Qwen3, Granite 4 and others: a JSON object between marks.

    ```text
    <tool_call>
    {"name": "search", "arguments": {"query": "x"}}
    </tool_call>
    ```

    The JSON is strict. `name` is required; `arguments` may be missing, as models omit it for tools without parameters.
    There is no third key. A call ends where its JSON ends, so a mark inside a JSON string belongs to the string.
    """

    CALLS = _OBJECT


@register_tool_parser("smollm3")
class SmolLM3ToolParser(HermesToolParser):
    """Parser for SmolLM3; the format is that of `HermesToolParser`."""


@register_tool_parser("granite")
class GraniteToolParser(ToolParser):
    """Parser for Granite 3: one JSON list after a mark, which ends the turn.

    ```text
    <|tool_call|>[{"name": "search", "arguments": {"query": "x"}}]
    ```

    The format of Granite 4, a JSON object between `<tool_call>` marks for each call, is parsed too.
    """

    MORE_MARKS = {"<|tool_call|>": MarkKind.CALL_START}

    def read_call(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read the object or the list after a start mark."""
        begin = skip_space(turn.text, start.end)
        if not turn.text.startswith("[", begin) and turn.text.startswith(self.tool_start_token, start.start):
            return _OBJECT.read(turn, start)
        return read_list_to_end(turn, begin, call_from_json)

    def write_call(self, call: Writer, grammar: Grammar) -> Element:
        """Write a call in either format; Granite 3's template indents its JSON."""
        space = grammar.INDENTED_JSON.gap
        name = f'"name": {grammar.constant_text(call.name)},'
        listed = grammar.sequence(
            *("<|tool_call|>[", space, "{", space, name, space, '"arguments": '),
            *(call.json(grammar.INDENTED_JSON), space, "}", space, "]"),
        )
        return grammar.either([_OBJECT.write(call, grammar), listed])
