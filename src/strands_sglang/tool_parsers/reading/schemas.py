"""What a JSON schema says of the type of a value: enough to tell text from JSON, and no validation.

Where several parts of a schema speak of one value, all of them count (`$ref`, `allOf`), or any of them (`anyOf`,
`oneOf`); a part that says nothing of it leaves the others alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_OF_STRINGS = ("minLength", "maxLength", "pattern")
_Parts = Callable[[Mapping[str, Any]], list[Any]]


def allowed_types(schema: Any, root: Any = None) -> frozenset[str]:
    """Return the JSON types that a schema allows, all of them where it does not say.

    Args:
        schema: The schema; None if it is not known.
        root: The schema that references point into.
    """
    types = _Types(root).of(schema)
    if types == JSON_TYPES and isinstance(schema, Mapping) and any(key in schema for key in _OF_STRINGS):
        return frozenset({"string"})  # without a type, but plainly about strings
    # A schema that allows nothing, or types of another vocabulary, says nothing that could be used.
    return types or JSON_TYPES


class _Types:
    """Reads types; every reference once, for schemas may refer to themselves."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._referred: dict[str, frozenset[str] | None] = {}

    def of(self, schema: Any) -> frozenset[str] | None:
        """The types of a schema; None for one that is being read already."""
        if not isinstance(schema, Mapping):
            return frozenset() if schema is False else JSON_TYPES
        types = JSON_TYPES
        refers_to_itself = False
        for keyword in _REFERENCES:
            if isinstance(reference := schema.get(keyword), str):
                referred = self._of_reference(reference)
                refers_to_itself |= referred is None
                types = _both(types, referred)
        declared = schema.get("type")
        if isinstance(declared, str):
            types &= _types_named([declared])
        elif isinstance(declared, (list, tuple)):
            types &= _types_named(declared)
        if (listed := _listed(schema)) is not None:
            types &= _types_named(type_name(value) for value in listed)
        for choices in _choices(schema):
            found = [known for choice in choices if (known := self.of(choice)) is not None]
            types &= frozenset().union(*found) if found else types
        for part in _parts(schema):
            types = _both(types, self.of(part))
        if "default" in schema and schema["default"] is None and "string" not in types:
            types |= {"null"}  # Strands writes `int | None = None` as an integer whose default is null
        return None if refers_to_itself and types == JSON_TYPES else types

    def _of_reference(self, reference: str) -> frozenset[str] | None:
        if reference not in self._referred:
            self._referred[reference] = None
            self._referred[reference] = self.of(resolve_reference(reference, self._root))
        return self._referred[reference]


def _both(types: frozenset[str], others: frozenset[str] | None) -> frozenset[str]:
    return types if others is None else types & others


def _types_named(names: Iterable[Any]) -> frozenset[str]:
    """Return the types behind a schema's type names; every integer is a number as well."""
    named = frozenset(name for name in names if isinstance(name, str))
    return named | {"integer"} if "number" in named else named


def type_name(value: Any) -> str:
    """Return the JSON type of a value; JSON Schema takes a whole number for an integer, however it is written."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "integer" if math.isfinite(value) and value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def same_json(one: Any, other: Any) -> bool:
    """Tell whether two values are equal as JSON Schema has it: `1` is `1.0`, and neither is `true`."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_json, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_json(value, other[key]) for key, value in one.items())
    return bool(one == other)


def listed_values(schema: Any, root: Any = None) -> list[Any]:
    """Return the constants that a schema, or any part of it, lists."""
    found: list[Any] = []
    waiting, followed = [schema], set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        found += _listed(part) or ()
        waiting += [*_parts(part), *(choice for choices in _choices(part) for choice in choices)]
        for keyword in _REFERENCES:
            reference = part.get(keyword)
            if isinstance(reference, str) and reference not in followed:
                followed.add(reference)
                waiting.append(resolve_reference(reference, root))
    return found


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the only values that a schema allows, if it lists them itself."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return list(values) if isinstance(values, (list, tuple)) else None


def property_schema(schema: Any, name: str, root: Any = None, *, declared: bool = False) -> Any:
    """Return the schema of a property; None where nothing is said of it.

    Args:
        schema: The schema of the object.
        name: The property.
        root: The schema that references point into.
        declared: Only if the property is declared by its name.
    """

    def own(part: Mapping[str, Any]) -> list[Any]:
        properties, patterns = part.get("properties"), part.get("patternProperties")
        found = [properties[name]] if isinstance(properties, Mapping) and name in properties else []
        if declared:
            return found
        if isinstance(patterns, Mapping):
            found += [inner for pattern, inner in patterns.items() if _matches(pattern, name)]
        others = part.get("additionalProperties")
        return found or ([others] if isinstance(others, Mapping) else [])

    return _joined(_said(schema, root, own, set()))


def item_schema(schema: Any, index: int, root: Any = None) -> Any:
    """Return the schema of an item of a list; None where nothing is said of it."""

    def own(part: Mapping[str, Any]) -> list[Any]:
        items = part.get("items")
        first, others = (items, part.get("additionalItems")) if isinstance(items, (list, tuple)) else (None, items)
        first = first or part.get("prefixItems")
        if isinstance(first, (list, tuple)) and index < len(first):
            return [first[index]]
        return [others] if isinstance(others, Mapping) else []

    return _joined(_said(schema, root, own, set()))


def _said(schema: Any, root: Any, own: _Parts, followed: set[str]) -> list[Any]:
    """Return what a schema and its parts say, all of which counts; `own` tells what one says by itself."""
    if not isinstance(schema, Mapping):
        return []
    said = own(schema)
    for keyword in _REFERENCES:
        reference = schema.get(keyword)
        if isinstance(reference, str) and reference not in followed:
            said += _said(resolve_reference(reference, root), root, own, followed | {reference})
    for part in _parts(schema):
        said += _said(part, root, own, followed)
    choices = [*_choices(schema)]
    if not said:  # what holds under a condition only tells something where nothing else does
        choices.append([schema.get("then"), schema.get("else"), *_values(schema, "dependentSchemas", "dependencies")])
    for some in choices:
        found = [told for choice in some if (told := _joined(_said(choice, root, own, followed))) is not None]
        said += [{"anyOf": found}] if found else []
    return said


def _joined(said: list[Any]) -> Any:
    return {"allOf": said} if len(said) > 1 else next(iter(said), None)


def _choices(schema: Mapping[str, Any]) -> Iterator[list[Any]]:
    for keyword in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(keyword), (list, tuple)):
            yield list(choices)


def _parts(schema: Mapping[str, Any]) -> list[Any]:
    parts = schema.get("allOf")
    return list(parts) if isinstance(parts, (list, tuple)) else []


def _values(schema: Mapping[str, Any], *keywords: str) -> list[Any]:
    found = [schema.get(keyword) for keyword in keywords]
    return [inner for values in found if isinstance(values, Mapping) for inner in values.values()]


def _matches(pattern: str, name: str) -> bool:
    """Tell whether a pattern of `patternProperties` speaks of a name; one that Python cannot read may well do so."""
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


def resolve_reference(reference: str, root: Any) -> Any:
    """Follow a reference to a part of `root`; None where it leads nowhere.

    A JSON pointer (through lists too, percent-encoded or not), an anchor, or the `$id` of a part with one of those.
    """
    base, _, fragment = reference.partition("#")
    resource = _named(root, ("$id", "id"), base) if base else root
    for spelled in (unquote(fragment), fragment):
        found = _pointed(spelled, resource) if not spelled or spelled.startswith("/") else None
        if found is None and spelled:
            found = _named(resource, ("$anchor", "$dynamicAnchor"), spelled)
        if found is not None:
            return found
    return None


def _pointed(pointer: str, resource: Any) -> Any:
    found = resource
    for key in pointer.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, (list, tuple)) and re.fullmatch("0|[1-9][0-9]{0,8}", key) and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def _named(root: Any, keywords: Iterable[str], name: str) -> Any:
    """Return the part of a schema that has a name, by the whole of it or by its last segments."""
    waiting = [root]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            for keyword in keywords:
                own = part.get(keyword)
                if isinstance(own, str) and (own.rstrip("#") == name or own.rstrip("#").endswith(f"/{name}")):
                    return part
            waiting += part.values()
        elif isinstance(part, (list, tuple)):
            waiting += part
    return None
