"""The Pythonic format (Llama 4, Llama 3.2): a turn that is nothing but `[f(a=1), g(b="x")]`.

Arguments are Python literals by name; nothing is evaluated. No mark announces the list: a turn that begins with `[`, a
name and `(` is one. `<|python_start|>` and `<|python_end|>` may stand around it. Templates put every value between
double quotes as it is, so that what they show of numbers, and of quotes inside strings, is not what was called.
"""

from __future__ import annotations

import re
from typing import ClassVar

from ..base import MAX_CALLS, ToolParser, ToolParseResult
from ..reading.json_calls import call_from_json
from ..reading.listed import ListedToolParser, is_cut
from ..reading.literals import read_arguments
from ..reading.marked import ToolSchemas
from ..reading.structure import CallSpan, Mark, MarkedText, MarkKind
from ..reading.values import InvalidValueError, skip_space
from ..registry import register_tool_parser

_CALL = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]{0,255})\(")


@register_tool_parser("llama4_pythonic")
class Llama4PythonicToolParser(ListedToolParser):
    """Reads calls written as a Python list of calls with literal arguments."""

    OPENER: ClassVar[re.Pattern[str] | None] = re.compile(r"\s{0,8}(?=\[\s{0,8}[A-Za-z_][A-Za-z0-9_.-]{0,255}\()")

    def __init__(
        self,
        tool_start_token: str = "<|python_start|>",
        tool_end_token: str = "<|python_end|>",
        think_start_token: str = ToolParser.DEFAULT_THINK_START_TOKEN,
        think_end_token: str = ToolParser.DEFAULT_THINK_END_TOKEN,
    ) -> None:
        """Name the marks; an empty one is never found."""
        super().__init__(tool_start_token, tool_end_token, think_start_token, think_end_token)

    def read_call(self, turn: MarkedText, start: Mark, tools: ToolSchemas | None, truncated: bool) -> CallSpan:
        """Read the list up to the end of the turn; see `ListedToolParser`."""
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
                raw = text[position:end]
                calls.append(call_from_json({"name": name, "arguments": arguments}, None, raw))
                position = skip_space(text, end)
                if not text.startswith("]", position):
                    position = _expect(",", text, position)
        except InvalidValueError as error:
            wrong = f"the turn is not a list of calls: {error}"
            return self.broken_list(text, start, wrong, cut=is_cut(text, error), truncated=truncated, name=name)
        end = skip_space(text, position + 1)
        close = turn.mark_at(MarkKind.CALL_END, end)
        end = skip_space(text, end if close is None else close.end)
        if end != len(text):
            return self.broken_list(text, start, "nothing may follow the list of calls", cut=False, name=name)
        return CallSpan(end, True, tuple(calls))


def _expect(character: str, text: str, position: int) -> int:
    if not text.startswith(character, position):
        raise InvalidValueError(f"{character!r} is expected", position)
    return skip_space(text, position + 1)
