"""Arguments of a call whose format leaves types to the tool's JSON schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..base import ToolCallStatus, ToolParseResult, new_tool_call_id
from .marked import ToolSchemas, failed_call
from .schemas import allowed_types, property_schema
from .structure import MarkedText
from .values import (
    InvalidValueError,
    decode_json,
    shorten,
    skip_space,
    typed_value,
)


def typed_call(name: str, values: Mapping[str, str], raw: str, tools: ToolSchemas | None) -> ToolParseResult:
    """Return the result for a call that is complete, its values typed by the tool's schema.

    Args:
        name: Name of the tool as it was written.
        values: Text of every argument, without what belongs to the format.
        raw: The call as it was written.
        tools: Schema of every tool by name; None if the tools are not known.
    """
    schema = tools.get(name) if tools is not None else None
    arguments: dict[str, Any] = {}
    for key, text in values.items():
        try:
            arguments[key] = typed_value(text, property_schema(schema, key, schema), schema)
        except InvalidValueError as error:
            return failed_call(raw, f"parameter {shorten(key)} is wrong: {error}", ToolCallStatus.MALFORMED, name)
    return ToolParseResult(new_tool_call_id(), name, arguments)


def nested_value_end(text: str, position: int, schema: Any, root: Any = None) -> int | None:
    """Return where a list or an object ends, for a parameter that can be no string; None for any other value.

    Its JSON says where it ends, so that tags inside its strings belong to them. However many values are asked for, the
    work is linear in the length of the text: a value inside the strings of two others would have to begin in a string
    of both, and of two values one of which begins in a string of the other, one is outside its strings anywhere.

    Args:
        text: The turn.
        position: Where the value begins, perhaps with white space.
        schema: Schema of the parameter; None if it is not known.
        root: The schema that `$ref`s point into.
    """
    begin = skip_space(text, position)
    if text[begin : begin + 1] not in ("[", "{") or "string" in allowed_types(schema, root):
        return None
    try:
        return skip_space(text, decode_json(text, begin).end)
    except InvalidValueError:
        return None


Tag = tuple[re.Pattern[str], Callable[[MarkedText, re.Match[str]], bool]]
"""How a tag is written, and whether a match of that is one."""


def find_value_end(
    turn: MarkedText, begin: int, nested_end: int | None, end_tags: Sequence[Tag], unclosed: Tag
) -> tuple[re.Match[str] | None, int]:
    """Find the end tag of a value.

    Args:
        turn: The turn.
        begin: Where the value begins.
        nested_end: Where the value ends by itself, if that is known.
        end_tags: What ends a value, the strictest spelling first: a looser one counts where there is no stricter one.
        unclosed: What cannot be part of a value: an end tag must stand before it.

    Returns:
        The end tag, None if there is none; and where reading failed in that case.
    """
    if nested_end is not None:
        end = turn.find_match(end_tags[-1][0], nested_end, end_tags[-1][1])
        if end is not None and end.start() == nested_end:
            return end, begin
    other = turn.find_match(unclosed[0], begin, unclosed[1])
    for pattern, is_one in end_tags:
        end = turn.find_match(pattern, begin, is_one)
        if end is not None and (other is None or end.start() <= other.start()):
            return end, begin
    return None, begin if other is None else other.start()
