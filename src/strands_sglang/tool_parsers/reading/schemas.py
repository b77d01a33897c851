"""The types that a JSON schema allows: enough to distinguish text from JSON, without validation.

If several parts of a schema describe one value, all of them apply (`$ref`, `allOf`) or any of them (`anyOf`, `oneOf`).
A part that does not describe the value is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import unquote

JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})

_Fact = TypeVar("_Fact")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_DEPENDING = ("dependentSchemas", "dependencies")
_OF_STRINGS = ("minLength", "maxLength", "pattern")
_TYPE_NAMES = ((bool, "boolean"), (int, "integer"), (str, "string"), (Mapping, "object"), (type(None), "null"))


def _read_schema(
    schema: Any,
    root: Any,
    read_part: Callable[[Any], _Fact | None],
    all_of: Callable[[Any, list[_Fact]], _Fact],
    any_of: Callable[[list[_Fact]], _Fact],
) -> _Fact | None:
    """Combine a fact over a schema and its parts; None if no part states it. Each reference is read once.

    Args:
        schema: Schema to read.
        root: Schema that references point into.
        read_part: Returns the fact that a part states directly.
        all_of: Combines the facts that all apply to a part.
        any_of: Combines the facts of alternatives.
    """
    referred: dict[str, _Fact | None] = {}

    def read(part: Any) -> _Fact | None:
        alone = read_part(part)
        if not isinstance(part, Mapping):
            return alone
        facts = [alone]
        for reference in (part[keyword] for keyword in _REFERENCES if isinstance(part.get(keyword), str)):
            if reference not in referred:
                referred[reference] = None  # while it is read, since schemas may refer to themselves
                referred[reference] = read(resolve_reference(reference, root))
            facts.append(referred[reference])
        facts += map(read, _listed(part, "allOf"))
        choices = [_listed(part, "anyOf"), _listed(part, "oneOf")]
        if all(each is None for each in facts):  # conditions only count if nothing else applies
            choices.append([part[keyword] for keyword in ("then", "else") if keyword in part])
            choices[-1] += chain.from_iterable(_mapped(part, depending).values() for depending in _DEPENDING)
        for some in choices:
            found = [each for each in map(read, some) if each is not None]
            facts += [any_of(found)] if found else []
        found = [each for each in facts if each is not None]
        return all_of(part, found) if found else None

    return read(schema)


def allowed_types(schema: Any, root: Any = None) -> frozenset[str]:
    """Return the JSON types that a schema allows; all types if it does not restrict them.

    Args:
        schema: Schema of the value; None if unknown.
        root: Schema that references point into.
    """

    def read_part(part: Any) -> frozenset[str] | None:
        if not isinstance(part, Mapping):
            return frozenset() if part is False else JSON_TYPES
        listed = _constants(part)
        types = _types_named(part.get("type")) & _types_named(listed and [*map(type_name, listed)])
        return None if types == JSON_TYPES and any(isinstance(part.get(key), str) for key in _REFERENCES) else types

    def all_of(part: Any, facts: list[frozenset[str]]) -> frozenset[str]:
        types = JSON_TYPES.intersection(*facts)
        # Strands writes `int | None = None` as an integer whose default is null.
        is_optional = "default" in part and part["default"] is None and "string" not in types
        return types | {"null"} if is_optional else types

    types = _read_schema(schema, root, read_part, all_of, lambda facts: frozenset().union(*facts))
    if types == JSON_TYPES and isinstance(schema, Mapping) and any(key in schema for key in _OF_STRINGS):
        return frozenset({"string"})  # no type, but keywords of strings
    # A schema that allows nothing, or only types of another vocabulary, restricts nothing.
    return types or JSON_TYPES


def _types_named(names: Any) -> frozenset[str]:
    """Return the JSON types that a schema's `type` names; `number` includes `integer`."""
    if not isinstance(names, (str, list, tuple)):
        return JSON_TYPES
    named = frozenset(name for name in ([names] if isinstance(names, str) else names) if isinstance(name, str))
    return named | {"integer"} if "number" in named else named


def type_name(value: Any) -> str:
    """Return the JSON type of a value; as in JSON Schema, `1.0` is an integer."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return next((name for kind, name in _TYPE_NAMES if isinstance(value, kind)), "array")


def same_json(first: Any, second: Any) -> bool:
    """Return whether two values are equal in JSON Schema: `1` equals `1.0`, and neither equals `true`."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(same_json, first, second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same_json(value, second[key]) for key, value in first.items())
    return bool(first == second)


def listed_values(schema: Any, root: Any = None) -> list[Any]:
    """Return the constants that a schema or any of its parts lists."""

    def merge(facts: list[list[Any]]) -> list[Any]:
        return list({id(value): value for value in chain.from_iterable(facts)}.values())

    def read_part(part: Any) -> list[Any]:
        return list((_constants(part) if isinstance(part, Mapping) else None) or ())

    return _read_schema(schema, root, read_part, lambda _, facts: merge(facts), merge) or []


def _constants(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the constants that a schema lists itself; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, (list, tuple)) else None


def property_schema(schema: Any, name: str, root: Any = None, *, declared: bool = False) -> Any:
    """Return the schema of a property; None if the object's schema does not describe it.

    Args:
        schema: Schema of the object.
        name: Name of the property.
        root: Schema that references point into.
        declared: Whether to ignore everything but a declaration by name.
    """

    def read_part(part: Mapping[str, Any]) -> list[Any]:
        properties, others = _mapped(part, "properties"), part.get("additionalProperties")
        found = [properties[name]] if name in properties else []
        if declared:
            return found
        found += [inner for pattern, inner in _mapped(part, "patternProperties").items() if _matches(pattern, name)]
        return found or ([others] if isinstance(others, Mapping) else [])

    return _inner_schema(schema, root, read_part)


def item_schema(schema: Any, index: int, root: Any = None) -> Any:
    """Return the schema of a list item; None if the list's schema does not describe it."""

    def read_part(part: Mapping[str, Any]) -> list[Any]:
        first, others = _listed(part, "items") or _listed(part, "prefixItems"), part.get("items")
        if isinstance(others, (list, tuple)):
            others = part.get("additionalItems")
        return first[index : index + 1] or ([others] if isinstance(others, Mapping) else [])

    return _inner_schema(schema, root, read_part)


def _inner_schema(schema: Any, root: Any, read_part: Callable[[Mapping[str, Any]], list[Any]]) -> Any:
    """Return the schema of an inner value, joined from all parts of a schema that describe it."""

    def all_of(facts: list[Any]) -> Any:
        return {"allOf": facts} if len(facts) > 1 else next(iter(facts), None)

    return _read_schema(
        schema,
        root,
        lambda part: all_of(read_part(part)) if isinstance(part, Mapping) else None,
        lambda _, facts: all_of(facts),
        lambda facts: {"anyOf": facts},
    )


def _listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    values = schema.get(keyword)
    return list(values) if isinstance(values, (list, tuple)) else []


def _mapped(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    values = schema.get(keyword)
    return values if isinstance(values, Mapping) else {}


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern of `patternProperties` matches a name; assume so if Python cannot compile it."""
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


def resolve_reference(reference: str, root: Any) -> Any:
    """Return the part of `root` that a reference points to; None if there is none.

    A reference is a JSON pointer (also into lists, percent-encoded or not), an anchor, or the `$id` of a part followed
    by one of those.
    """
    base, _, fragment = reference.partition("#")
    resource = _find_named(root, ("$id", "id"), base) if base else root
    candidates = (
        _follow_pointer(spelled, resource)
        if spelled[:1] in ("", "/")
        else _find_named(resource, ("$anchor", "$dynamicAnchor"), spelled)
        for spelled in (unquote(fragment), fragment)
    )
    return next((found for found in candidates if found is not None), None)


def _follow_pointer(pointer: str, resource: Any) -> Any:
    for key in pointer.split("/")[1:]:
        if isinstance(resource, (list, tuple)):
            resource = {str(index): item for index, item in enumerate(resource)}
        resource = resource.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(resource, Mapping) else None
    return resource


def _find_named(root: Any, keywords: Iterable[str], name: str) -> Any:
    """Return the part of a schema with a name; the last segments of the name suffice."""
    if isinstance(root, Mapping):
        if any(f"/{root.get(keyword, '')}".rstrip("#").endswith(f"/{name}") for keyword in keywords):
            return root
        root = list(root.values())
    inner = (_find_named(part, keywords, name) for part in root) if isinstance(root, (list, tuple)) else ()
    return next((found for found in inner if found is not None), None)


def tool_schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of each tool's input by tool name, from Strands tool specs.

    A spec's `inputSchema` is the schema itself, or contains it under `json`.
    """
    schemas = {}
    for tool in tools:
        schema = tool.get("inputSchema")
        schemas[tool["name"]] = schema["json"] if isinstance(schema, Mapping) and "json" in schema else schema
    return schemas
