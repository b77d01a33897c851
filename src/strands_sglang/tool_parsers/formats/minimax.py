"""The formats of MiniMax: tags in M2, elements that may nest in M3.

M2 (to M2.5): values are plain text between tags, typed by the tool's JSON schema.

<minimax:tool_call>
<invoke name="search">
<parameter name="query">x</parameter>
</invoke>
</minimax:tool_call>

M3: values are elements that may nest, and one token precedes every tag.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="search">]<]minimax[>[<query>x]<]minimax[>[</query>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

The elements of a list are named `item`. Types come from the tool's JSON schema, on every level. An empty element is an
empty string, list or object, whichever the schema allows. A text ends at the first tag after that token. If the token
ids are known, ordinary tokens that spell it are text.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any, Union

from ..base import Element, Grammar, ToolParser, Writer, register_tool_parser
from ..reading import (
    MAX_JSON_DEPTH,
    BrokenCallError,
    Call,
    CallSpan,
    InvalidValueError,
    Mark,
    MarkedText,
    TaggedCalls,
    allowed_types,
    item_schema,
    property_schema,
    read_section,
    shorten,
    skip_space,
    typed_value,
)


@register_tool_parser("minimax_m2")
class MiniMaxM2ToolParser(ToolParser):
    """Parser for MiniMax M2 (to M2.5).

    All calls are in one section. Values are plain text; their types come from the tool's JSON schema:

    ```text
    <minimax:tool_call>
    <invoke name="search">
    <parameter name="query">x</parameter>
    </invoke>
    </minimax:tool_call>
    ```

    A declared string is kept unchanged. Without a schema, a value that is JSON (other than a JSON string) is decoded;
    any other value is its text. A value with a line that begins with `<parameter name="...">` is rejected.
    """

    DEFAULT_TOOL_START_TOKEN = "<minimax:tool_call>"
    DEFAULT_TOOL_END_TOKEN = "</minimax:tool_call>"
    CALLS = TaggedCalls(
        call='<invoke name="{name}">',
        call_end="</invoke>",
        parameter='<parameter name="{key}">',
        parameter_end="</parameter>",
        name=r'[^"\n]+',
        key=r'[^"\n]+',
        tag_before="\n",
    )


_ITEM = "item"  # the elements of a list
# The text of an element without child elements, or its child elements by name, in order.
_Content = Union[str, "list[tuple[str, _Content]]"]

_TOKEN = "]<]minimax[>["
_TAG = re.compile(re.escape(_TOKEN) + r"(?=</?[^<>\n]+>)")
_CALL = re.compile(re.escape(_TOKEN) + r'<invoke name="(?P<name>[^"\n]+)">')
_OPEN = re.compile(re.escape(_TOKEN) + r"<(?P<key>[^/<>\n][^<>\n]*)>")


@register_tool_parser("minimax_m3")
class MiniMaxM3ToolParser(ToolParser):
    """Parser for MiniMax M3.

    All calls are in one section. Every argument is an element, which may nest; the token `]<]minimax[>[` precedes every
    tag (here shown as `¤`):

    ```text
    ¤<tool_call>
    ¤<invoke name="search">¤<query>x¤</query>¤</invoke>
    ¤</tool_call>
    ```

    Types come from the tool's JSON schema. A declared string is kept unchanged, white space included. Without a schema,
    text that is JSON (other than a JSON string) is decoded, and elements that are all named `item` are a list.
    """

    DEFAULT_TOOL_START_TOKEN = f"{_TOKEN}<tool_call>"
    DEFAULT_TOOL_END_TOKEN = f"{_TOKEN}</tool_call>"
    DEFAULT_THINK_START_TOKEN = "<mm:think>"
    DEFAULT_THINK_END_TOKEN = "</mm:think>"
    FORMAT_TOKENS = (_TOKEN,)

    def read_call(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read the section after its start mark."""
        return read_section(turn, start, _read_call)

    def write_call(self, call: Writer, grammar: Grammar) -> Element:
        """Write a section of one call."""
        call.properties()
        notation = grammar.Notation(
            quote="",
            escapes="",
            excludes=(_TOKEN,),
            keys=r"(?!/)[^<>\n]+",
            member=(f"{_TOKEN}<{{}}>", f"{_TOKEN}</{{}}>"),
            item=(f"{_TOKEN}<{_ITEM}>", f"{_TOKEN}</{_ITEM}>"),
            brackets=("", ""),
            comma="",
            is_typed=True,
        )
        opened = f'{call.start}\n{_TOKEN}<invoke name="{call.name}">'
        return grammar.sequence(opened, call.json(notation), f"{_TOKEN}</invoke>\n{call.end}")


def _read_call(turn: MarkedText, position: int) -> tuple[Call, int]:
    """Return the call at `position`, and its end."""
    head = turn.match(_CALL, position)
    if head is None:
        raise BrokenCallError(position, f'expected {_TOKEN}<invoke name="NAME">')
    name = head["name"]
    arguments, end = _read_elements(turn, head.end(), "invoke", name, MAX_JSON_DEPTH)
    schema = None if turn.schemas is None else turn.schemas.get(name)
    try:
        # The arguments are an object, whatever the schema declares.
        return Call(name, _typed_element(arguments, schema, schema, {"object"})), end
    except InvalidValueError as error:
        return Call(name, error=str(error)), end


def _read_elements(
    turn: MarkedText, position: int, parent: str, name: str, depth: int
) -> tuple[list[tuple[str, _Content]], int]:
    """Return the elements up to the end tag of `parent`, and the end of that tag."""
    if depth == 0:
        raise BrokenCallError(position, "it is nested too deeply", name)
    elements: list[tuple[str, _Content]] = []
    while True:
        position = skip_space(turn.text, position)
        opened = turn.match(_OPEN, position)
        if opened is None:
            return elements, _after_end_tag(turn, position, parent, name)
        key = opened["key"]
        element: _Content
        inner = skip_space(turn.text, opened.end())
        if turn.match(_OPEN, inner) is not None:
            element, position = _read_elements(turn, inner, key, name, depth - 1)
        else:
            end = turn.find_match(_TAG, opened.end())
            if end is None:
                raise BrokenCallError(opened.end(), f"{shorten(key)} is not closed", name)
            element, position = turn.text[opened.end() : end.start()], _after_end_tag(turn, end.start(), key, name)
        elements.append((key, element))


def _after_end_tag(turn: MarkedText, position: int, key: str, name: str) -> int:
    """Return the end of the end tag of `key` at `position`."""
    tag = f"{_TOKEN}</{key}>"
    if not turn.text.startswith(tag, position) or not turn.is_real(position, position + len(tag)):
        raise BrokenCallError(position, f"expected the end tag of {shorten(key)}", name)
    return position + len(tag)


def _typed_element(element: _Content, schema: Any, root: Any, types: Set[str] | None = None) -> Any:
    """Return the value of an element, by its JSON schema.

    Args:
        element: Content of the element.
        schema: Schema of the value; None if unknown.
        root: Schema that `$ref`s point into.
        types: Allowed JSON types; None uses those of the schema.

    Raises:
        InvalidValueError: The element has no type that the schema allows, or two child elements have the same name.
    """
    types = allowed_types(schema, root) if types is None else types
    if isinstance(element, str):
        if not element and "string" not in types and types & {"array", "object"}:
            return [] if "array" in types else {}
        return typed_value(element, schema, root)
    is_list = "array" in types and all(name == _ITEM for name, _ in element) and bool(element)
    if is_list and not ("object" in types and property_schema(schema, _ITEM, root, declared=True) is not None):
        return [
            _typed_element(inner, item_schema(schema, index, root), root) for index, (_, inner) in enumerate(element)
        ]
    if "object" not in types:
        raise InvalidValueError("it contains elements, but must be " + " or ".join(sorted(types)), 0)
    values: dict[str, Any] = {}
    for name, inner in element:
        if name in values:
            raise InvalidValueError(f"{shorten(name)} appears more than once", 0)
        try:
            values[name] = _typed_element(inner, property_schema(schema, name, root), root)
        except InvalidValueError as error:
            raise InvalidValueError(f"{shorten(name)} is invalid: {error}", 0) from None
    return values
