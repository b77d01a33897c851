"""What a JSON schema says of the type of a value: enough to tell text from JSON, and no validation.

Where several parts of a schema speak of one value, all of them count (`$ref`, `allOf`), or any of them (`anyOf`,
`oneOf`); a part that says nothing of it leaves the others alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote

JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})

_Said = TypeVar("_Said")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_DEPENDING = ("dependentSchemas", "dependencies")
_OF_STRINGS = ("minLength", "maxLength", "pattern")
_TYPE_NAMES = ((bool, "boolean"), (int, "integer"), (str, "string"), (Mapping, "object"), (type(None), "null"))


def _read(
    schema: Any,
    root: Any,
    own: Callable[[Any], _Said | None],
    all_of: Callable[[Any, list[_Said]], _Said],
    any_of: Callable[[list[_Said]], _Said],
) -> _Said | None:
    """Return what a schema and its parts say; None if they say nothing. Every reference is read once.

    Args:
        schema: The schema.
        root: The schema that references point into.
        own: What a part says by itself.
        all_of: Joins what all counts for a part.
        any_of: Joins what the alternatives say.
    """
    referred: dict[str, _Said | None] = {}

    def read(part: Any) -> _Said | None:
        alone = own(part)
        if not isinstance(part, Mapping):
            return alone
        said = [alone]
        for reference in (part[keyword] for keyword in _REFERENCES if isinstance(part.get(keyword), str)):
            if reference not in referred:
                referred[reference] = None  # while it is read, for schemas may refer to themselves
                referred[reference] = read(resolve_reference(reference, root))
            said.append(referred[reference])
        said += map(read, _listed(part, "allOf"))
        choices = [_listed(part, "anyOf"), _listed(part, "oneOf")]
        if all(each is None for each in said):  # a condition only tells something where nothing else does
            choices.append([part[keyword] for keyword in ("then", "else") if keyword in part])
            choices[-1] += [inner for depending in _DEPENDING for inner in _mapped(part, depending).values()]
        for some in choices:
            found = [each for each in map(read, some) if each is not None]
            said += [any_of(found)] if found else []
        found = [each for each in said if each is not None]
        return all_of(part, found) if found else None

    return read(schema)


def allowed_types(schema: Any, root: Any = None) -> frozenset[str]:
    """Return the JSON types that a schema allows, all of them where it does not say.

    Args:
        schema: The schema; None if it is not known.
        root: The schema that references point into.
    """

    def own(part: Any) -> frozenset[str] | None:
        if not isinstance(part, Mapping):
            return frozenset() if part is False else JSON_TYPES
        listed = _constants(part)
        types = _types_named(part.get("type")) & _types_named(listed and [*map(type_name, listed)])
        return None if types == JSON_TYPES and any(isinstance(part.get(key), str) for key in _REFERENCES) else types

    def all_of(part: Any, said: list[frozenset[str]]) -> frozenset[str]:
        types = JSON_TYPES.intersection(*said)
        # Strands writes `int | None = None` as an integer whose default is null.
        is_optional = "default" in part and part["default"] is None and "string" not in types
        return types | {"null"} if is_optional else types

    types = _read(schema, root, own, all_of, lambda said: frozenset().union(*said))
    if types == JSON_TYPES and isinstance(schema, Mapping) and any(key in schema for key in _OF_STRINGS):
        return frozenset({"string"})  # without a type, but plainly about strings
    # A schema that allows nothing, or types of another vocabulary, says nothing that could be used.
    return types or JSON_TYPES


def _types_named(names: Any) -> frozenset[str]:
    """Return the types behind a schema's type names; every integer is a number as well."""
    if not isinstance(names, (str, list, tuple)):
        return JSON_TYPES
    named = frozenset(name for name in ([names] if isinstance(names, str) else names) if isinstance(name, str))
    return named | {"integer"} if "number" in named else named


def type_name(value: Any) -> str:
    """Return the JSON type of a value; JSON Schema takes a whole number for an integer, however it is written."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return next((name for kind, name in _TYPE_NAMES if isinstance(value, kind)), "array")


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

    def together(said: list[list[Any]]) -> list[Any]:
        return list({id(value): value for listed in said for value in listed}.values())

    def own(part: Any) -> list[Any]:
        return list((_constants(part) if isinstance(part, Mapping) else None) or ())

    return _read(schema, root, own, lambda _, said: together(said), together) or []


def _constants(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the only values that a schema allows, if it lists them itself."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, (list, tuple)) else None


def property_schema(schema: Any, name: str, root: Any = None, *, declared: bool = False) -> Any:
    """Return the schema of a property; None where nothing is said of it.

    Args:
        schema: The schema of the object.
        name: The property.
        root: The schema that references point into.
        declared: Only if the property is declared by its name.
    """

    def own(part: Mapping[str, Any]) -> list[Any]:
        properties, others = _mapped(part, "properties"), part.get("additionalProperties")
        found = [properties[name]] if name in properties else []
        if declared:
            return found
        found += [inner for pattern, inner in _mapped(part, "patternProperties").items() if _matches(pattern, name)]
        return found or ([others] if isinstance(others, Mapping) else [])

    return _inner_schema(schema, root, own)


def item_schema(schema: Any, index: int, root: Any = None) -> Any:
    """Return the schema of an item of a list; None where nothing is said of it."""

    def own(part: Mapping[str, Any]) -> list[Any]:
        first, others = _listed(part, "items") or _listed(part, "prefixItems"), part.get("items")
        if isinstance(others, (list, tuple)):
            others = part.get("additionalItems")
        return first[index : index + 1] or ([others] if isinstance(others, Mapping) else [])

    return _inner_schema(schema, root, own)


def _inner_schema(schema: Any, root: Any, own: Callable[[Mapping[str, Any]], list[Any]]) -> Any:
    """Return the schema that joins what a schema and its parts say of something in its values."""

    def all_of(said: list[Any]) -> Any:
        return {"allOf": said} if len(said) > 1 else next(iter(said), None)

    return _read(
        schema,
        root,
        lambda part: all_of(own(part)) if isinstance(part, Mapping) else None,
        lambda _, said: all_of(said),
        lambda said: {"anyOf": said},
    )


def _listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    values = schema.get(keyword)
    return list(values) if isinstance(values, (list, tuple)) else []


def _mapped(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    values = schema.get(keyword)
    return values if isinstance(values, Mapping) else {}


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
    candidates = (
        _pointed(spelled, resource)
        if spelled[:1] in ("", "/")
        else _named(resource, ("$anchor", "$dynamicAnchor"), spelled)
        for spelled in (unquote(fragment), fragment)
    )
    return next((found for found in candidates if found is not None), None)


def _pointed(pointer: str, resource: Any) -> Any:
    for key in pointer.split("/")[1:]:
        if isinstance(resource, (list, tuple)):
            resource = {str(index): item for index, item in enumerate(resource)}
        resource = resource.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(resource, Mapping) else None
    return resource


def _named(root: Any, keywords: Iterable[str], name: str) -> Any:
    """Return the part of a schema that has a name, by the whole of it or by its last segments."""
    if isinstance(root, Mapping):
        if any(f"/{root.get(keyword, '')}".rstrip("#").endswith(f"/{name}") for keyword in keywords):
            return root
        root = list(root.values())
    inner = (_named(part, keywords, name) for part in root) if isinstance(root, (list, tuple)) else ()
    return next((found for found in inner if found is not None), None)


def tool_schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of every tool's input by name, from Strands tool specs.

    A spec's `inputSchema` is either the schema itself or the schema under `json`.
    """
    schemas = {}
    for tool in tools:
        schema = tool.get("inputSchema")
        schemas[tool["name"]] = schema["json"] if isinstance(schema, Mapping) and "json" in schema else schema
    return schemas
