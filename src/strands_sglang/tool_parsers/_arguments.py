"""Arguments of a call whose format leaves types to the tool's JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._values import InvalidValueError, resolve_reference, shorten, typed_value
from .base import ToolCallStatus, ToolParseResult, new_tool_call_id
from .marked import ToolSchemas, check_name, failed_call


def typed_call(name: str, values: Mapping[str, str], raw: str, tools: ToolSchemas | None) -> ToolParseResult:
    """Return the result for a call that is complete, its values typed by the tool's schema.

    Args:
        name: Name of the tool as it was written.
        values: Text of every argument, without what belongs to the format.
        raw: The call as it was written.
        tools: Schema of every tool by name; None if the tools are not known.
    """
    if (wrong := check_name(name, tools)) is not None:
        return failed_call(raw, wrong[1], wrong[0], name)
    schema = tools[name] if tools is not None else None
    arguments: dict[str, Any] = {}
    for key, text in values.items():
        try:
            arguments[key] = typed_value(text, parameter_schema(schema, key), schema)
        except InvalidValueError as error:
            return failed_call(raw, f"parameter {shorten(key)} is wrong: {error}", ToolCallStatus.MALFORMED, name)
    return ToolParseResult(new_tool_call_id(), name, arguments)


def parameter_schema(schema: Any, key: str) -> Any:
    """Return the schema of one parameter; None if the tool's schema does not say."""
    if isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
        schema = resolve_reference(reference, schema)
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return schema.get("additionalProperties")
