"""The format of Llama 3.1 to 3.3: a turn that is nothing but `{"name": ..., "parameters": {...}}`.

No mark announces it. A turn that begins with a JSON object of a name and parameters is a call, any other object is
text. Behind `<|python_tag|>`, which the template writes for built-in tools, there must be a call, either such an
object or `name.call(argument="value")`. The template writes one call per turn; models write several with `;` between.
Llama 4 with a template that asks for this form writes the same, with `<|python_start|>` and `<|python_end|>` around it
or without.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from ..base import MAX_CALLS, ToolParser, ToolParseResult
from ..reading.json_calls import call_from_json
from ..reading.listed import ListedToolParser, is_cut, name_of
from ..reading.literals import read_arguments
from ..reading.marked import ToolSchemas
from ..reading.structure import CallSpan, Mark, MarkedText, MarkKind
from ..reading.values import InvalidValueError, decode_json, skip_space
from ..registry import register_tool_parser

_BROKEN_CALL = re.compile(
    r'\{\s{0,8}(?:"type"\s{0,8}:\s{0,8}"function"\s{0,8},\s{0,8})?"name"\s{0,8}:\s{0,8}"([^"]{0,64})'
)
_BUILT_IN = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,63})\.call\(")


@register_tool_parser("llama3_json")
class Llama3JSONToolParser(ListedToolParser):
    """Reads Llama 3's calls: a turn of JSON objects of `name` and `parameters`."""

    MORE_MARKS: ClassVar[Mapping[str, MarkKind | None]] = {
        "<|python_start|>": MarkKind.CALL_START,
        "<|python_end|>": MarkKind.CALL_END,
    }
    OPENER: ClassVar[re.Pattern[str] | None] = re.compile(r"\s{0,8}(?=\{)")

    def __init__(
        self,
        tool_start_token: str = "<|python_tag|>",
        tool_end_token: str = "",
        think_start_token: str = ToolParser.DEFAULT_THINK_START_TOKEN,
        think_end_token: str = ToolParser.DEFAULT_THINK_END_TOKEN,
    ) -> None:
        """Name the marks; an empty one is never found."""
        super().__init__(tool_start_token, tool_end_token, think_start_token, think_end_token)

    def opens_call(self, text: str, position: int) -> bool:
        """Tell whether the object there is one of a name and parameters; see `ListedToolParser.opens_call`."""
        try:
            call = decode_json(text, position).value
        except InvalidValueError:
            return _BROKEN_CALL.match(text, position) is not None
        return isinstance(call.get("name"), str) and not call.keys().isdisjoint({"parameters", "arguments"})

    def read_call(self, turn: MarkedText, start: Mark, tools: ToolSchemas | None, truncated: bool) -> CallSpan:
        """Read the calls up to the end of the turn; see `ListedToolParser`."""
        text = turn.text
        position = skip_space(text, start.end)
        calls: list[ToolParseResult] = []
        try:
            built_in = _BUILT_IN.match(text, position) if start.end > start.start else None
            if built_in is not None:
                arguments, end = read_arguments(text, built_in.end())
                call = {"name": built_in.group(1), "parameters": arguments}
                calls.append(call_from_json(call, None, text[position:end], arguments="parameters"))
                position = skip_space(text, end)
            while built_in is None:
                if len(calls) == MAX_CALLS:
                    raise InvalidValueError(f"there are more than {MAX_CALLS} calls", position)
                decoded = decode_json(text, position)
                raw = text[position : decoded.end]
                others = {"type": lambda value: value == "function"}
                calls.append(call_from_json(decoded.value, decoded.problem, raw, arguments="parameters", others=others))
                position = skip_space(text, decoded.end)
                if position == len(text) or turn.mark_at(MarkKind.CALL_END, position) is not None:
                    break
                position = skip_space(text, position + text.startswith(";", position))
                if position < len(text) and not text.startswith("{", position):
                    return self.broken_list(text, start, "nothing may follow the calls", cut=False, name=name_of(calls))
        except InvalidValueError as error:
            name = _BROKEN_CALL.match(text, skip_space(text, start.end))
            return self.broken_list(
                text,
                start,
                f"the turn is not a call: {error}",
                cut=is_cut(text, error),
                truncated=truncated,
                name=name.group(1) if name is not None else None,
            )
        close = turn.mark_at(MarkKind.CALL_END, position)
        position = skip_space(text, position if close is None else close.end)
        if position != len(text):
            return self.broken_list(text, start, "nothing may follow the call", cut=False, name=name_of(calls))
        return CallSpan(position, True, tuple(calls))
