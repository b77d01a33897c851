"""The format of Gemma 4: `<|tool_call>call:f{path:<|"|>a.txt<|"|>,lines:3}<tool_call|>`.

Values are typed: strings stand between `<|"|>` marks and are not escaped, numbers, `true`, `false` and `null` are
JSON's (`None` in the first template), lists and objects have brackets, and keys are bare. Reasoning stands between
`<|channel>thought` with a newline and `<channel|>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from ..base import ToolParseResult, new_tool_call_id
from ..reading.marked import MarkedToolParser, ToolSchemas
from ..reading.marks import DetailedText, locate_details
from ..reading.structure import CallSpan, Mark, MarkedText, MarkKind
from ..reading.values import MAX_JSON_DEPTH, InvalidValueError, shorten, strict_json
from ..registry import register_tool_parser

_QUOTE = '<|"|>'
_THOUGHT = "thought\n"
_NAME = re.compile(r"call:([^\s{}<>:]{1,256})\{")
_KEY = re.compile(r"([^:,{}\[\]<>\n]{0,256}):")
_NUMBER_ITEM = re.compile(r"(-?(?:0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?),")
_SCALAR = re.compile(r"[-+.a-zA-Z0-9]+")


@register_tool_parser("gemma4")
class Gemma4ToolParser(MarkedToolParser):
    """Reads Gemma 4's calls: a name and an object in Gemma's own notation between marks."""

    def __init__(
        self,
        tool_start_token: str = "<|tool_call>",
        tool_end_token: str = "<tool_call|>",
        think_start_token: str = "<|channel>",
        think_end_token: str = "<channel|>",
    ) -> None:
        """Name the marks."""
        super().__init__(tool_start_token, tool_end_token, think_start_token, think_end_token)

    def locate_marks(self, text: str, token_ids: Sequence[int] | None, tokenizer: Any) -> DetailedText:
        """Find the marks, the name of the channel as part of its mark; see `ToolParser.locate_marks`."""
        spellings = {
            self.tool_start_token: MarkKind.CALL_START,
            self.tool_end_token: MarkKind.CALL_END,
            self.think_start_token: MarkKind.THINK_START,
            self.think_end_token: MarkKind.THINK_END,
            _QUOTE: None,
        }
        turn = locate_details(text, spellings, token_ids=token_ids, tokenizer=tokenizer)
        for kind, start in zip(turn.kinds, turn.starts, strict=True):
            if kind is MarkKind.THINK_START and turn.text.startswith(_THOUGHT, turn.mark(kind, start).end):
                turn.ends[start] = turn.mark(kind, start).end + len(_THOUGHT)
        return turn

    def read_call(self, turn: MarkedText, start: Mark, tools: ToolSchemas | None, truncated: bool) -> CallSpan:
        """Read the call behind a start mark; see `MarkedToolParser.read_call`."""
        name = _NAME.match(turn.text, start.end)
        if name is None:
            wrong = f"{self.tool_start_token} must be followed by call:NAME{{"
            return self.broken_call(turn, start, start.end, wrong, truncated=truncated)
        attempted = name.group(1)
        try:
            arguments, end = _object(cast(DetailedText, turn), name.end(), MAX_JSON_DEPTH)
            close = turn.mark_at(MarkKind.CALL_END, end)
            if close is None:
                raise InvalidValueError(f"{self.tool_end_token} is expected", end)
        except InvalidValueError as error:
            wrong = f"{error} (character {error.position - start.end})"
            return self.broken_call(turn, start, error.position, wrong, truncated=truncated, attempted_name=attempted)
        return CallSpan(close.end, True, ToolParseResult(new_tool_call_id(), attempted, arguments))


def _value(turn: DetailedText, position: int, depth: int) -> tuple[Any, int]:
    """Return the value at `position` and where it ends."""
    text = turn.text
    if turn.detail_at(_QUOTE, position):
        begin = position + len(_QUOTE)
        close = turn.find_detail(_QUOTE, begin)
        if close is None:
            raise InvalidValueError("a string does not end", begin)
        return text[begin:close], close + len(_QUOTE)
    if text.startswith(("{", "["), position):
        if depth == 0:
            raise InvalidValueError("it is nested too deeply", position)
        read = _object if text[position] == "{" else _list
        return read(turn, position + 1, depth - 1)
    if (scalar := _SCALAR.match(text, position)) is None:
        raise InvalidValueError("a value is expected", position)
    if scalar.group() == "None":
        return None, scalar.end()
    try:
        return strict_json(scalar.group()), scalar.end()
    except InvalidValueError as error:
        raise InvalidValueError(f"{shorten(scalar.group())} is no value: {error}", position) from None


def _object(turn: DetailedText, position: int, depth: int) -> tuple[dict[str, Any], int]:
    """Return the object whose brace ends before `position`, and where it ends."""
    found: dict[str, Any] = {}
    while not turn.text.startswith("}", position):
        position = _past_comma(turn.text, position, bool(found))
        key = _KEY.match(turn.text, position)
        if key is None:
            raise InvalidValueError("a key and a colon are expected", position)
        if key.group(1) in found:
            raise InvalidValueError(f"the key {shorten(key.group(1))} is there more than once", position)
        found[key.group(1)], position = _value(turn, key.end(), depth)
    return found, position + 1


def _list(turn: DetailedText, position: int, depth: int) -> tuple[list[Any], int]:
    """Return the list whose bracket ends before `position`, and where it ends."""
    found: list[Any] = []
    while (number := _NUMBER_ITEM.match(turn.text, position)) is not None:  # lists may have very many of these
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
        raise InvalidValueError("a comma or the closing bracket is expected", position)
    return position + expected
