"""Nested elements without types, typed by a JSON schema."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Union

from .schemas import allowed_types, item_schema, property_schema
from .values import InvalidValueError, shorten, typed_value

Element = Union[str, "list[tuple[str, Element]]"]
"""The text of an element without elements in it, or the elements in it by name, in order."""

ITEM = "item"
"""Name of the elements of a list."""


def typed_element(element: Element, schema: Any, root: Any, types: Set[str] | None = None) -> Any:
    """Return the value that an element means, by the JSON schema for it.

    Args:
        element: The element.
        schema: Its schema; None if it is not known.
        root: The schema that `$ref`s point into.
        types: The JSON types that it may have; those of the schema if left out.

    Raises:
        InvalidValueError: It is no value of a type that the schema allows, or names something twice.
    """
    types = allowed_types(schema, root) if types is None else types
    if isinstance(element, str):
        if not element and "string" not in types and types & {"array", "object"}:
            return [] if "array" in types else {}
        return typed_value(element, schema, root)
    is_list = "array" in types and all(name == ITEM for name, _ in element) and bool(element)
    if is_list and not ("object" in types and property_schema(schema, ITEM, root, declared=True) is not None):
        return [
            typed_element(inner, item_schema(schema, index, root), root) for index, (_, inner) in enumerate(element)
        ]
    if "object" not in types:
        raise InvalidValueError("it holds elements, but must be " + " or ".join(sorted(types)), 0)
    values: dict[str, Any] = {}
    for name, inner in element:
        if name in values:
            raise InvalidValueError(f"{shorten(name)} is there twice", 0)
        try:
            values[name] = typed_element(inner, property_schema(schema, name, root), root)
        except InvalidValueError as error:
            raise InvalidValueError(f"{shorten(name)} is wrong: {error}", 0) from None
    return values
