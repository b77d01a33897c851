"""Calls whose arguments are JSON, once they are decoded: what is wrong with them, or the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..base import ToolCallStatus, ToolParseResult, new_tool_call_id
from .marked import failed_call
from .values import DecodedJSON, shorten


def json_call(name: str, arguments: DecodedJSON, raw: str) -> ToolParseResult:
    """Return the result for a complete call whose arguments are JSON.

    Args:
        name: Name of the tool as it was written.
        arguments: The decoded arguments.
        raw: The call as it was written.
    """
    if arguments.problem is not None:
        error = f"the arguments are not valid JSON: {arguments.problem}"
        return failed_call(raw, error, ToolCallStatus.MALFORMED, name)
    if not isinstance(arguments.value, dict):
        return failed_call(raw, "the arguments must be a JSON object", ToolCallStatus.NOT_AN_OBJECT, name)
    return ToolParseResult(new_tool_call_id(), name, arguments.value)


def call_from_json(
    call: Any,
    problem: str | None,
    raw: str,
    *,
    arguments: str = "arguments",
    others: Mapping[str, Callable[[Any], bool]] = {},  # noqa: B006 - never changed
    native_id: str | None = None,
) -> ToolParseResult:
    """Return the result for a call that is a JSON object of a name and arguments.

    Args:
        call: The decoded object.
        problem: What is wrong with it although its syntax is right.
        raw: Exactly what was written.
        arguments: The key of the arguments, which may be left out.
        others: Further keys that may be there, each with a test of its value.
        native_id: The id that the model wrote.
    """
    name = call.get("name") if isinstance(call, dict) else None
    attempted = name if isinstance(name, str) and name else None

    def refuse(error: str, status: ToolCallStatus = ToolCallStatus.MALFORMED) -> ToolParseResult:
        return failed_call(raw, error, status, attempted)

    if not isinstance(call, dict):
        return refuse("a call must be a JSON object")
    if problem is not None:
        return refuse(f"the call is not valid JSON: {problem}")
    if attempted is None:
        return refuse('the call must have a "name" that is a string')
    for key, value in call.items():
        if key not in ("name", arguments) and not (key in others and others[key](value)):
            return refuse(
                f'a call has only "name" and "{arguments}", but this one has {shorten(key)}: {shorten(str(value))}'
            )
    values = call.get(arguments, {})
    if not isinstance(values, dict):
        return refuse(f'"{arguments}" must be a JSON object', ToolCallStatus.NOT_AN_OBJECT)
    return ToolParseResult(new_tool_call_id(), attempted, values, native_id=native_id)
