"""The formats of Phi-4-mini: JSON between `<|tool_call|>` and `<|/tool_call|>`, or a list behind `functools`.

Between the marks stands one call or a list of calls, each `{"name": ..., "arguments": {...}}`, by itself or as the
`function` of `{"type": "function", "function": {...}}`. Models that are prompted for it begin their turn with
`functools[...]` instead, which no mark ends. The template that prompts for that shows earlier calls in yet another
form, which models may copy: a turn that is nothing but such objects, with commas between, and with arguments as Python
writes them (`{'x': True}`). A turn that begins with the name and arguments of such an object is a call, any other
object is text; it is read as JSON, or as Python where it is no JSON.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from ..base import MAX_CALLS, ToolCallStatus, ToolParser, ToolParseResult
from ..reading.json_calls import call_from_json
from ..reading.listed import ListedToolParser, is_cut, name_of, read_json_list
from ..reading.literals import read_literal
from ..reading.marked import ToolSchemas, failed_call
from ..reading.structure import CallSpan, Mark, MarkedText, MarkKind
from ..reading.values import DecodedJSON, InvalidValueError, decode_json, skip_space
from ..registry import register_tool_parser

_FUNCTOOLS = "functools["
_OBJECT = re.compile(r'\{\s{0,8}"name"\s{0,8}:\s{0,8}"([^"\\\n]{1,64})"\s{0,8},\s{0,8}"arguments"\s{0,8}:')
_NEXT_OBJECT = re.compile(r",\s{0,8}(?:\{|\Z)")


@register_tool_parser("phi4")
class Phi4ToolParser(ListedToolParser):
    """Reads Phi-4-mini's calls: JSON objects or lists of them between marks, behind `functools` or as a whole turn."""

    OPENER: ClassVar[re.Pattern[str] | None] = re.compile(rf"\s{{0,8}}(?=functools\[|{_OBJECT.pattern})")

    def __init__(
        self,
        tool_start_token: str = "<|tool_call|>",
        tool_end_token: str = "<|/tool_call|>",
        think_start_token: str = ToolParser.DEFAULT_THINK_START_TOKEN,
        think_end_token: str = ToolParser.DEFAULT_THINK_END_TOKEN,
    ) -> None:
        """Name the marks; an empty one is never found."""
        super().__init__(tool_start_token, tool_end_token, think_start_token, think_end_token)

    def read_call(self, turn: MarkedText, start: Mark, tools: ToolSchemas | None, truncated: bool) -> CallSpan:
        """Read the JSON behind a start mark or behind `functools`; see `ListedToolParser`."""
        text = turn.text
        marked = start.end > start.start
        if not marked and text.startswith("{", start.start):
            return self._objects(text, start, truncated)
        begin = skip_space(text, start.end) if marked else start.end + len(_FUNCTOOLS) - 1
        try:
            if text.startswith("[", begin):
                items, end = read_json_list(text, begin)
            else:
                items = [(decode_json(text, begin), begin)]
                end = items[0][0].end
        except InvalidValueError as error:
            wrong = f"the call is not valid JSON: {error}"
            if marked:
                span = self.broken_call(turn, start, error.position, wrong, truncated=truncated)
                return span._replace(call=(span.call,))
            return self.broken_list(text, start, wrong, cut=is_cut(text, error), truncated=truncated)
        calls = tuple(_result(item, text[at : item.end]) for item, at in items)
        end = skip_space(text, end)
        close = turn.mark_at(MarkKind.CALL_END, end)
        if marked and close is None:
            wrong = f"{self.tool_end_token} must follow the JSON"
            span = self.broken_call(turn, start, end, wrong, truncated=truncated, attempted_name=name_of(calls))
            return span._replace(call=(span.call,))
        if not marked and end != len(text):
            wrong = "nothing may follow the list of calls"
            return self.broken_list(text, start, wrong, cut=False, name=name_of(calls))
        if not calls:
            wrong, raw = "the list of calls is empty", text[start.end : end]
            calls = (failed_call(raw, wrong, ToolCallStatus.MALFORMED),)
        return CallSpan(end if close is None else close.end, True, calls)

    def _objects(self, text: str, start: Mark, truncated: bool) -> CallSpan:
        """Read the objects that a turn consists of."""
        calls: list[ToolParseResult] = []
        position = start.start
        name = None
        try:
            while True:
                if len(calls) == MAX_CALLS:
                    raise InvalidValueError(f"there are more than {MAX_CALLS} calls", position)
                begins = _OBJECT.match(text, position)
                if begins is None:
                    raise InvalidValueError("a call must begin with its name and arguments", position)
                name = name or begins.group(1)
                item = _json_or_python(text, position)
                calls.append(_result(item, text[position : item.end]))
                position = skip_space(text, item.end)
                if position == len(text):
                    break
                if _NEXT_OBJECT.match(text, position) is None:
                    return self.broken_list(text, start, "nothing may follow the calls", cut=False, name=name)
                position = skip_space(text, position + 1)
        except InvalidValueError as error:
            wrong = f"the turn is not a call: {error}"
            return self.broken_list(text, start, wrong, cut=is_cut(text, error), truncated=truncated, name=name)
        return CallSpan(len(text), True, tuple(calls))


def _json_or_python(text: str, position: int) -> DecodedJSON:
    """Return the object at `position`, as JSON or else as a Python literal.

    Raises:
        InvalidValueError: It is neither.
    """
    try:
        return decode_json(text, position)
    except InvalidValueError:
        value, end = read_literal(text, position)
        return DecodedJSON(value, end, None)


def _result(item: DecodedJSON, raw: str) -> ToolParseResult:
    call: Any = item.value
    if isinstance(call, dict) and call.keys() == {"type", "function"} and call["type"] == "function":
        call = call["function"]
    return call_from_json(call, item.problem, raw)
