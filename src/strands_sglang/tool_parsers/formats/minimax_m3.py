"""The format of MiniMax M3: values are elements that may nest, and one token stands before every tag.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="search">]<]minimax[>[<query>x]<]minimax[>[</query>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

The elements of a list are called `item`. Types come from the tool's JSON schema, on every level. An empty element is an
empty string, list or object, whichever the schema allows. A text ends at the first tag with the token before it; with
the ids known, ordinary tokens that spell the token are text.
"""

from __future__ import annotations

import re
from typing import Any

from ..base import ToolCallStatus, ToolParseResult, new_tool_call_id
from ..reading.elements import Element, typed_element
from ..reading.marked import ToolSchemas, failed_call
from ..reading.nested import NestedText
from ..reading.sections import BrokenCallError, SectionCall, SectionToolParser
from ..reading.structure import MarkedText
from ..reading.values import MAX_JSON_DEPTH, InvalidValueError, shorten, skip_space
from ..registry import register_tool_parser

_TOKEN = "]<]minimax[>["
_TAG = re.compile(re.escape(_TOKEN) + r"(?=</?[^<>\n]+>)")
_CALL = re.compile(re.escape(_TOKEN) + r'<invoke name="(?P<name>[^"\n]+)">')
_OPEN = re.compile(re.escape(_TOKEN) + r"<(?P<key>[^/<>\n][^<>\n]*)>")


@register_tool_parser("minimax_m3")
class MiniMaxM3ToolParser(SectionToolParser):
    """Reads calls written as `<invoke name="...">` with one element for every argument, all of them in one section.

    A declared string is kept as it is, white space included. Without a schema, a text that is JSON (other than a JSON
    string) is that value, and elements that are all called `item` are a list.
    """

    DEFAULT_TOOL_START_TOKEN = f"{_TOKEN}<tool_call>"
    DEFAULT_TOOL_END_TOKEN = f"{_TOKEN}</tool_call>"
    DEFAULT_THINK_START_TOKEN = "<mm:think>"
    DEFAULT_THINK_END_TOKEN = "</mm:think>"
    FORMAT_TOKENS = (_TOKEN,)

    def read_inner_call(self, turn: NestedText, position: int, tools: ToolSchemas | None) -> SectionCall:
        """Read one call; see `SectionToolParser.read_inner_call`."""
        call = turn.match(_CALL, position)
        if call is None:
            raise BrokenCallError(position, f'{_TOKEN}<invoke name="NAME"> belongs here')
        name = call["name"]
        arguments, end = _read_elements(turn, call.end(), "invoke", name, MAX_JSON_DEPTH)
        raw = turn.text[position:end]
        schema = None if tools is None else tools.get(name)
        try:
            # Whatever the schema says of itself: arguments are an object.
            values: dict[str, Any] = typed_element(arguments, schema, schema, {"object"})
        except InvalidValueError as error:
            failed = failed_call(raw, str(error), ToolCallStatus.MALFORMED, name)
            return SectionCall(position, end, failed)
        return SectionCall(position, end, ToolParseResult(new_tool_call_id(), name, values))


def _read_elements(
    turn: NestedText, position: int, parent: str, name: str, depth: int
) -> tuple[list[tuple[str, Element]], int]:
    """Read elements up to the end tag of `parent`; return them and where that tag ends."""
    if depth == 0:
        raise BrokenCallError(position, "it is nested too deeply", name)
    elements: list[tuple[str, Element]] = []
    while True:
        position = skip_space(turn.text, position)
        opened = turn.match(_OPEN, position)
        if opened is None:
            return elements, _behind_end_tag(turn, position, parent, name)
        key = opened["key"]
        element: Element
        inner = skip_space(turn.text, opened.end())
        if turn.match(_OPEN, inner) is not None:
            element, position = _read_elements(turn, inner, key, name, depth - 1)
        else:
            end = turn.find_match(_TAG, opened.end(), _is_real)
            if end is None:
                raise BrokenCallError(opened.end(), f"{shorten(key)} is not closed", name)
            element, position = turn.text[opened.end() : end.start()], _behind_end_tag(turn, end.start(), key, name)
        elements.append((key, element))


def _behind_end_tag(turn: NestedText, position: int, key: str, name: str) -> int:
    """Return where the end tag of `key` at `position` ends."""
    tag = f"{_TOKEN}</{key}>"
    if not turn.text.startswith(tag, position) or not turn.is_real(position, position + len(tag)):
        raise BrokenCallError(position, f"the end tag of {shorten(key)} belongs here", name)
    return position + len(tag)


def _is_real(turn: MarkedText, match: re.Match[str]) -> bool:
    assert isinstance(turn, NestedText)
    return turn.is_real(*match.span())
