"""The formats of Phi-4-mini: JSON between `<|tool_call|>` and `<|/tool_call|>`, or a list after `functools`.

Between the marks is one call or a list of calls, each `{"name": ..., "arguments": {...}}`, either plain or as the
`function` of `{"type": "function", "function": {...}}`. If the prompt asks for it, models begin their turn with
`functools[...]` instead, which no mark ends. The template that asks for that shows earlier calls in another form, which
models may copy: the whole turn is such objects, separated by commas, with arguments as Python writes them
(`{'x': True}`). A turn that begins with an object with a name and arguments is a call, any other object is text.
Objects are read as JSON, or else as Python.
"""

from __future__ import annotations

import re
from typing import Any

from ..base import Element, Grammar, ToolParser, Writer, register_tool_parser
from ..reading import (
    BrokenCallError,
    Call,
    CallSpan,
    DecodedJSON,
    InvalidValueError,
    Mark,
    MarkedText,
    MarkKind,
    ToolParseResult,
    call_from_json,
    check_count,
    decode_json,
    failed_call,
    is_cut,
    json_or_python,
    name_of,
    read_json_list,
    read_list_to_end,
    skip_space,
)

_FUNCTOOLS = "functools["
_OBJECT = re.compile(r'\{\s{0,8}"name"\s{0,8}:\s{0,8}"([^"\\\n]{1,64})"\s{0,8},\s{0,8}"arguments"\s{0,8}:')
_NEXT_OBJECT = re.compile(r",\s{0,8}(?:\{|\Z)")


@register_tool_parser("phi4")
class Phi4ToolParser(ToolParser):
    """Parser for Phi-4-mini: JSON objects or lists of objects.

    They are between marks, after `functools`, or the whole turn:

    ```text
    <|tool_call|>[{"name": "search", "arguments": {"query": "x"}}]<|/tool_call|>
    functools[{"name": "search", "arguments": {"query": "x"}}]
    {"name": "search", "arguments": {"query": "x"}}
    ```
    """

    DEFAULT_TOOL_START_TOKEN = "<|tool_call|>"
    DEFAULT_TOOL_END_TOKEN = "<|/tool_call|>"
    OPENER = re.compile(rf"\s{{0,8}}(?=functools\[|{_OBJECT.pattern})")
    BEFORE_CALL = ""

    def read_call(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read the JSON after a start mark or after `functools`, or a turn of objects."""
        text, begin = turn.text, skip_space(turn.text, start.end)
        if start.end == start.start and text.startswith("{", begin):
            return _read_objects(text, begin)
        if start.end == start.start:
            return read_list_to_end(turn, begin + len(_FUNCTOOLS) - 1, _call, "the call is not valid JSON")
        calls: tuple[ToolParseResult, ...]
        try:
            if text.startswith("[", begin):
                calls, end = read_json_list(text, begin, _call)
            else:
                item = decode_json(text, begin)
                calls, end = (_call(item).result(text[begin : item.end]),), item.end
        except InvalidValueError as error:
            raise BrokenCallError(error.position, f"the call is not valid JSON: {error}") from None
        end = skip_space(text, end)
        close = turn.mark_at(MarkKind.CALL_END, end)
        if close is None:
            raise BrokenCallError(end, f"expected {turn.call_end} after the JSON", name_of(calls))
        return CallSpan(close.end, True, calls or (failed_call(text[start.end : end], "the list of calls is empty"),))

    def write_call(self, call: Writer, grammar: Grammar) -> Element:
        """Write a call between marks, alone or in a list, or after `functools`."""
        plain = call.object()
        typed = grammar.json_object({"type": '"function"', "function": plain})
        listed = grammar.sequence("[", grammar.either([plain, typed]), "]")
        marked = grammar.sequence(call.start, grammar.either([plain, listed]), call.end)
        return grammar.either([marked, grammar.sequence(_FUNCTOOLS, plain, "]")])


def _read_objects(text: str, position: int) -> CallSpan:
    """Read a turn of objects."""
    calls: list[ToolParseResult] = []
    name = None
    try:
        while True:
            check_count(len(calls) + 1, position)
            begins = _OBJECT.match(text, position)
            if begins is None:
                raise InvalidValueError("a call must begin with its name and arguments", position)
            name = name or begins.group(1)
            item = json_or_python(text, position)
            calls.append(_call(item).result(text[position : item.end]))
            position = skip_space(text, item.end)
            if position == len(text):
                return CallSpan(position, True, tuple(calls))
            if _NEXT_OBJECT.match(text, position) is None:
                raise BrokenCallError(position, "nothing may follow the calls", name, cut=False)
            position = skip_space(text, position + 1)
    except InvalidValueError as error:
        problem = f"the turn is not a call: {error}"
        raise BrokenCallError(error.position, problem, name, cut=is_cut(text, error)) from None


def _call(item: DecodedJSON) -> Call:
    call: Any = item.value
    if isinstance(call, dict) and call.keys() == {"type", "function"} and call["type"] == "function":
        item = item._replace(value=call["function"])
    return call_from_json(item)
