"""Nested elements without types, typed by a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any, Union

from ._values import InvalidValueError, allowed_types, resolve_reference, shorten, typed_value

Element = Union[str, "list[tuple[str, Element]]"]
"""The text of an element without elements in it, or the elements in it by name, in order."""

ITEM = "item"
"""Name of the elements of a list."""

_SCHEMA_LEVELS = 6  # references and alternatives that are followed; schemas may refer to themselves


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
    if is_list and not ("object" in types and _property(schema, root, ITEM, exact=True) is not None):
        items = _items(schema, root)
        return [typed_element(inner, items, root) for _, inner in element]
    if "object" not in types:
        raise InvalidValueError("it holds elements, but must be " + " or ".join(sorted(types)), 0)
    values: dict[str, Any] = {}
    for name, inner in element:
        if name in values:
            raise InvalidValueError(f"{shorten(name)} is there twice", 0)
        try:
            values[name] = typed_element(inner, _property(schema, root, name), root)
        except InvalidValueError as error:
            raise InvalidValueError(f"{shorten(name)} is wrong: {error}", 0) from None
    return values


def _property(schema: Any, root: Any, name: str, *, exact: bool = False) -> Any:
    """Return the schema of a property; unless `exact`, that of additional ones where it is not declared."""
    for option in _options(schema, root, _SCHEMA_LEVELS):
        properties = option.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
    if exact:
        return None
    additional = (option.get("additionalProperties") for option in _options(schema, root, _SCHEMA_LEVELS))
    return next((found for found in additional if isinstance(found, Mapping)), None)


def _items(schema: Any, root: Any) -> Any:
    """Return the schema of the elements of a list."""
    found = (option.get("items") for option in _options(schema, root, _SCHEMA_LEVELS))
    return next((items for items in found if isinstance(items, Mapping)), None)


def _options(schema: Any, root: Any, levels_left: int) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, what it refers to and its alternatives."""
    if not isinstance(schema, Mapping) or levels_left == 0:
        return
    yield schema
    if isinstance(reference := schema.get("$ref"), str):
        yield from _options(resolve_reference(reference, root), root, levels_left - 1)
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(choices := schema.get(keyword), (list, tuple)):
            for choice in choices:
                yield from _options(choice, root, levels_left - 1)
