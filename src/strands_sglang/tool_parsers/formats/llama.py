"""The formats of Llama: JSON objects or a Python list of calls, without a start mark.

JSON (Llama 3.1 to 3.3): the whole turn is `{"name": ..., "parameters": {...}}`. A turn that begins with a JSON object
with a name and parameters is a call; any other object is text. After `<|python_tag|>`, which the template writes for
built-in tools, there must be a call: either such an object or `name.call(argument="value")`. The template writes one
call per turn; models write several, with `;` between them. Llama 4 with a template that asks for this format writes
the same, with or without `<|python_start|>` and `<|python_end|>` around it.

Pythonic (Llama 4, Llama 3.2): the whole turn is `[f(a=1), g(b="x")]`. Arguments are Python literals by name; nothing is
evaluated. A turn that begins with `[`, a name and `(` is a list of calls, with or without `<|python_start|>` and
`<|python_end|>` around it. Templates write every value between double quotes without escapes, so numbers and quotes
inside strings do not survive a template.
"""

from __future__ import annotations

import re

from ..base import Element, Grammar, ToolParser, Writer, register_tool_parser
from ..reading import (
    BrokenCallError,
    Call,
    CallSpan,
    InvalidValueError,
    Mark,
    MarkedText,
    MarkKind,
    ToolParseResult,
    call_from_json,
    check_count,
    decode_json,
    end_of_turn,
    expect,
    is_cut,
    name_of,
    next_item,
    read_arguments,
    skip_space,
)

_BROKEN_CALL = re.compile(
    r'\{\s{0,8}(?:"type"\s{0,8}:\s{0,8}"function"\s{0,8},\s{0,8})?"name"\s{0,8}:\s{0,8}"([^"]{0,64})'
)
_BUILT_IN = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,63})\.call\(")


@register_tool_parser("llama3_json")
class Llama3JSONToolParser(ToolParser):
    """Parser for the JSON calls of Llama 3.1 to 3.3: the whole turn is one or more JSON objects.

    ```text
    {"name": "search", "parameters": {"query": "x"}}
    ```

    A turn that begins with such an object is a call, any other object is text. After `<|python_tag|>` there must be a
    call: an object, or `name.call(argument="value")`. `;` may separate several calls.
    """

    DEFAULT_TOOL_START_TOKEN = "<|python_tag|>"
    DEFAULT_TOOL_END_TOKEN = ""
    MORE_MARKS = {"<|python_start|>": MarkKind.CALL_START, "<|python_end|>": MarkKind.CALL_END}
    OPENER = re.compile(r"\s{0,8}(?=\{)")
    BEFORE_CALL = ""

    def opens_call(self, text: str, position: int) -> bool:
        """Return whether the object has a name and parameters; see `ToolParser.opens_call`."""
        try:
            call = decode_json(text, position).value
        except InvalidValueError:
            return _BROKEN_CALL.match(text, position) is not None
        return isinstance(call.get("name"), str) and not call.keys().isdisjoint({"parameters", "arguments"})

    def read_call(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read calls up to the end of the turn."""
        text = turn.text
        begin = end = skip_space(text, start.end)
        built_in = _BUILT_IN.match(text, begin) if start.end > start.start else None
        calls: list[ToolParseResult] = []
        try:
            if built_in is not None:
                arguments, end = read_arguments(text, built_in.end())
                calls.append(Call(built_in.group(1), arguments).result(text[begin:end]))
            while built_in is None:
                check_count(len(calls) + 1, end)
                item = decode_json(text, end)
                call = call_from_json(item, arguments="parameters", extra={"type": lambda kind: kind == "function"})
                calls.append(call.result(text[end : item.end]))
                end = skip_space(text, item.end)
                if end == len(text) or turn.mark_at(MarkKind.CALL_END, end) is not None:
                    break
                end = skip_space(text, end + text.startswith(";", end))
                if end < len(text) and not text.startswith("{", end):
                    raise BrokenCallError(end, "nothing may follow the calls", name_of(calls), cut=False)
        except InvalidValueError as error:
            name = _BROKEN_CALL.match(text, begin)
            problem = f"the turn is not a call: {error}"
            raise BrokenCallError(error.position, problem, name and name.group(1), cut=is_cut(text, error)) from None
        return CallSpan(end_of_turn(turn, end, "the call", tuple(calls)), True, tuple(calls))

    def write_call(self, call: Writer, grammar: Grammar) -> Element:
        """Write a call with or without its type."""
        name, parameters = grammar.constant_text(call.name), call.json()
        typed = grammar.json_object({"type": '"function"', "name": name, "parameters": parameters})
        return grammar.either([grammar.json_object({"name": name, "parameters": parameters}), typed])


_NAME = r"[A-Za-z_][A-Za-z0-9_.-]{0,255}"
_CALL = re.compile(rf"({_NAME})\(")


@register_tool_parser("llama4_pythonic")
class Llama4PythonicToolParser(ToolParser):
    """Parser for Llama 4 and Llama 3.2: the whole turn is a Python list of calls.

    ```text
    [search(query="x", limit=3)]
    ```

    Arguments are literals by name; nothing is evaluated. `<|python_start|>` and `<|python_end|>` may enclose the list.
    """

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
            position = expect("[", text, start.end)
            while not (calls and text.startswith("]", position)):
                check_count(len(calls) + 1, position)
                call = _CALL.match(text, position)
                if call is None:
                    raise InvalidValueError("a call must begin with a name and '('", position)
                name = call.group(1)
                arguments, end = read_arguments(text, call.end())
                calls.append(Call(name, arguments).result(text[position:end]))
                position = next_item("]", text, end)
        except InvalidValueError as error:
            problem = f"the turn is not a list of calls: {error}"
            raise BrokenCallError(error.position, problem, name, cut=is_cut(text, error)) from None
        return CallSpan(end_of_turn(turn, position + 1, "the list of calls", tuple(calls[-1:])), True, tuple(calls))

    def write_call(self, call: Writer, grammar: Grammar) -> Element:
        """Write a list of one call."""
        if re.fullmatch(_NAME, call.name) is None:
            raise call.schema.unsupported("the format cannot write the tool's name")
        arguments = [
            (grammar.sequence(f"{found.name}=", grammar.PYTHON.value(found.schema)), found.required)
            for found in call.properties(r"[A-Za-z_][A-Za-z0-9_]*")
        ]
        return grammar.sequence(f"[{call.name}(", grammar.members(arguments, ", "), ")]")
