"""The Pythonic format (Llama 4, Llama 3.2): a turn that is nothing but `[f(a=1), g(b="x")]`.

Arguments are Python literals by name; nothing is evaluated. No mark announces the list: a turn that begins with `[`, a
name and `(` is one. `<|python_start|>` and `<|python_end|>` may stand around it. Templates put every value between
double quotes as it is, so that what they show of numbers, and of quotes inside strings, is not what was called.
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
    call_from_json,
    end_of_turn,
    is_cut,
    read_arguments,
    skip_space,
)
from ..registry import register_tool_parser
from ..results import MAX_CALLS, ToolParseResult

_NAME = r"[A-Za-z_][A-Za-z0-9_.-]{0,255}"
_CALL = re.compile(rf"({_NAME})\(")


@register_tool_parser("llama4_pythonic")
class Llama4PythonicToolParser(ToolParser):
    """Reads calls written as a Python list of calls with literal arguments."""

    DEFAULT_TOOL_START_TOKEN = "<|python_start|>"
    DEFAULT_TOOL_END_TOKEN = "<|python_end|>"
    OPENER = re.compile(rf"\s{{0,8}}(?=\[\s{{0,8}}{_NAME}\()")
    BEFORE_CALL = ""

    def read_call(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read the list up to the end of the turn."""
        text = turn.text
        calls: list[ToolParseResult] = []
        name = None
        try:
            position = _expect("[", text, skip_space(text, start.end))
            while not (calls and text.startswith("]", position)):
                if len(calls) == MAX_CALLS:
                    raise InvalidValueError(f"there are more than {MAX_CALLS} calls", position)
                call = _CALL.match(text, position)
                if call is None:
                    raise InvalidValueError("a call must begin with a name and '('", position)
                name = call.group(1)
                arguments, end = read_arguments(text, call.end())
                calls.append(call_from_json({"name": name, "arguments": arguments}).result(text[position:end]))
                position = skip_space(text, end)
                if not text.startswith("]", position):
                    position = _expect(",", text, position)
        except InvalidValueError as error:
            wrong = f"the turn is not a list of calls: {error}"
            raise BrokenCallError(error.position, wrong, name, cut=is_cut(text, error)) from None
        return CallSpan(end_of_turn(turn, position + 1, "the list of calls", tuple(calls[-1:])), True, tuple(calls))

    def write_call(self, call: Any) -> Any:
        """Write a list of one call."""
        if re.fullmatch(_NAME, call.name) is None:
            raise call.schema.unsupported("the format cannot write the tool's name")
        arguments = [
            (call.sequence(f"{found.name}=", call.PYTHON.value(found.schema)), found.required)
            for found in call.properties(r"[A-Za-z_][A-Za-z0-9_]*")
        ]
        return call.sequence(f"[{call.name}(", call.members(arguments, ", "), ")]")


def _expect(character: str, text: str, position: int) -> int:
    if not text.startswith(character, position):
        raise InvalidValueError(f"{character!r} is expected", position)
    return skip_space(text, position + 1)
