"""The format of Gemma 4: `<|tool_call>call:f{path:<|"|>a.txt<|"|>,lines:3}<tool_call|>`.

Values are typed. Strings are between `<|"|>` marks and not escaped; numbers, `true`, `false` and `null` are JSON
(`None` in the first template); lists and objects have brackets; keys are bare. Reasoning is between `<|channel>thought`
with a newline and `<channel|>`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from ..base import Element, Grammar, ToolParser, Writer, register_tool_parser
from ..reading import (
    MAX_JSON_DEPTH,
    BrokenCallError,
    Call,
    CallSpan,
    InvalidValueError,
    Mark,
    MarkedText,
    MarkKind,
    property_schema,
    shorten,
    strict_json,
)

_QUOTE = '<|"|>'
_NAME = re.compile(r"call:([^\s{}<>:]{1,256})\{")
_KEY = re.compile(r"([^:,{}\[\]<>\n]{0,256}):")
_NUMBER_ITEM = re.compile(r"(-?(?:0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?),")
_SCALAR = re.compile(r"[-+.a-zA-Z0-9]+")


@register_tool_parser("gemma4")
class Gemma4ToolParser(ToolParser):
    """Parser for Gemma 4: a name and an object in Gemma's own notation.

    Strings are between `<|"|>` marks and not escaped; keys are bare:

    ```text
    <|tool_call>call:search{query:<|"|>x<|"|>,limit:3}<tool_call|>
    ```
    """

    DEFAULT_TOOL_START_TOKEN = "<|tool_call>"
    DEFAULT_TOOL_END_TOKEN = "<tool_call|>"
    DEFAULT_THINK_START_TOKEN = "<|channel>"
    DEFAULT_THINK_END_TOKEN = "<channel|>"
    THOUGHT = "thought\n"
    MORE_MARKS = {_QUOTE: _QUOTE}
    BEFORE_CALL = ""

    def kinds_of_marks(self) -> dict[str, str]:
        """Return the marks; the name of the reasoning channel is part of its mark."""
        kinds = super().kinds_of_marks()
        if self.think_start_token:
            kinds[f"{self.think_start_token}{self.THOUGHT}"] = MarkKind.THINK_START
        return kinds

    def read_call(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read the call after a start mark."""
        name = _NAME.match(turn.text, start.end)
        if name is None:
            raise BrokenCallError(start.end, f"{self.tool_start_token} must be followed by call:NAME{{")
        try:
            arguments, end = _object(turn, name.end(), MAX_JSON_DEPTH)
            schema = (turn.schemas or {}).get(name.group(1))
            declared = partial(property_schema, schema, root=schema, declared=True)
            for key in arguments:  # Strands ignores an unknown argument, and would run the tool without it
                bare = key.strip(" \t'\"")
                if declared(key) is None and declared(bare) is not None:
                    raise InvalidValueError(f"the key {shorten(key)} is not bare: write {bare}", end)
            close = turn.mark_at(MarkKind.CALL_END, end)
            if close is None:
                raise InvalidValueError(f"expected {self.tool_end_token}", end)
        except InvalidValueError as error:
            problem = f"{error} (character {error.position - start.end})"
            raise BrokenCallError(error.position, problem, name.group(1)) from None
        return CallSpan(close.end, True, (Call(name.group(1), arguments).result(turn.text[start.end : close.start]),))

    def write_call(self, call: Writer, grammar: Grammar) -> Element:
        """Write a call."""
        call.properties()
        notation = grammar.Notation(
            quote=_QUOTE,
            escapes="",
            excludes=(_QUOTE,),
            keys=r"[^:,{}\[\]<>\n]{1,256}",
            member=("{}:", ""),
            comma=",",
            is_sorted=True,
        )
        return grammar.sequence(f"{call.start}call:{call.name}", call.json(notation), call.end)


def _value(turn: MarkedText, position: int, depth: int) -> tuple[Any, int]:
    """Return the value at `position`, and its end."""
    text = turn.text
    if (opened := turn.mark_at(_QUOTE, position)) is not None:
        closed = turn.find(_QUOTE, opened.end)
        if closed is None:
            raise InvalidValueError("a string does not end", opened.end)
        return text[opened.end : closed.start], closed.end
    if text.startswith(("{", "["), position):
        if depth == 0:
            raise InvalidValueError("it is nested too deeply", position)
        read = _object if text[position] == "{" else _list
        return read(turn, position + 1, depth - 1)
    if (scalar := _SCALAR.match(text, position)) is None:
        raise InvalidValueError("expected a value", position)
    if scalar.group() == "None":
        return None, scalar.end()
    try:
        return strict_json(scalar.group()), scalar.end()
    except InvalidValueError as error:
        raise InvalidValueError(f"{shorten(scalar.group())} is not a value: {error}", position) from None


def _object(turn: MarkedText, position: int, depth: int) -> tuple[dict[str, Any], int]:
    """Return the object whose content begins at `position`, and its end."""
    found: dict[str, Any] = {}
    while not turn.text.startswith("}", position):
        position = _past_comma(turn.text, position, bool(found))
        key = _KEY.match(turn.text, position)
        if key is None:
            raise InvalidValueError("expected a key and a colon", position)
        if key.group(1) in found:
            raise InvalidValueError(f"the key {shorten(key.group(1))} appears more than once", position)
        found[key.group(1)], position = _value(turn, key.end(), depth)
    return found, position + 1


def _list(turn: MarkedText, position: int, depth: int) -> tuple[list[Any], int]:
    """Return the list whose content begins at `position`, and its end."""
    found: list[Any] = []
    while (number := _NUMBER_ITEM.match(turn.text, position)) is not None:  # lists may have many of these
        found.append(float(number[1]) if number[2] else int(number[1]))
        position = number.end()
    if found:
        item, position = _value(turn, position, depth)
        found.append(item)
    while not turn.text.startswith("]", position):
        position = _past_comma(turn.text, position, bool(found))
        item, position = _value(turn, position, depth)
        found.append(item)
    return found, position + 1


def _past_comma(text: str, position: int, expected: bool) -> int:
    if expected and not text.startswith(",", position):
        raise InvalidValueError("expected a comma or the closing bracket", position)
    return position + expected
