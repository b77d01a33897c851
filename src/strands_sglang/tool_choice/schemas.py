"""JSON schemas of tools, as far as the grammar of a call has to look into them.

Most of a schema is handed to the server as it is. What xgrammar would ignore is refused here, since arguments that do
not fit would come out without a word. Formats that are not JSON need the schema taken apart: into properties, and into
alternatives of one type each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_IGNORED_BY_XGRAMMAR = frozenset(
    ["contains", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "multipleOf"]
    + ["not", "then", "uniqueItems"]
)
_ANNOTATIONS = frozenset("$comment default deprecated description examples readOnly title writeOnly".split())
_BESIDE_OTHERS = _ANNOTATIONS | {"$defs", "$id", "$schema", "definitions"}
_LEVELS = 12  # references and alternatives that are followed before a schema counts as one that refers to itself
_OF_STRINGS = ("minLength", "maxLength", "pattern")
_TYPE_OF_KEYWORD = {"properties": "object", "items": "array", **dict.fromkeys(_OF_STRINGS, "string")}
_ONE_SCHEMA = ("additionalProperties", "contentSchema", "items", "propertyNames", "unevaluatedProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "patternProperties", "properties")


class Schema(NamedTuple):
    """A JSON schema, and what it takes to read it.

    Attributes:
        value: The schema.
        root: The schema that its references point into.
        path: Where it stands, for errors.
    """

    value: Any
    root: Any
    path: str

    def at(self, value: Any, *keys: str) -> Schema:
        """Return a schema that stands in this one."""
        return Schema(value, self.root, "/".join((self.path, *keys)))

    def unsupported(self, what: str) -> NotImplementedError:
        """Return the error that says why a grammar for this schema cannot be made."""
        return NotImplementedError(f"{self.path}: {what}")

    def standalone(self) -> Any:
        """Return the schema with the definitions that its references need."""
        if self.value is self.root or not isinstance(self.value, Mapping):
            return {} if self.value is None else self.value
        references = {reference for reference in _references(self.value)}
        outside = [name for name in references if not name.startswith(("#/$defs/", "#/definitions/"))]
        if outside:
            raise self.unsupported(f"the reference {outside[0]!r} points to no definition")
        definitions = {key: self.root[key] for key in ("$defs", "definitions") if references and key in self.root}
        return {**self.value, **definitions}


class Property(NamedTuple):
    """A property of an object."""

    name: str
    schema: Schema
    required: bool


def argument_schema(spec: Mapping[str, Any]) -> Schema:
    """Return the schema of a tool's arguments.

    Args:
        spec: A Strands tool spec; its `inputSchema` is the schema, or holds it under `json`.

    Raises:
        NotImplementedError: It has a keyword that the server would ignore.
    """
    given = spec.get("inputSchema")
    value = given["json"] if isinstance(given, Mapping) and "json" in given else given
    value = dict(value) if isinstance(value, Mapping) and value else {"type": "object"}
    value.setdefault("type", "object")
    schema = Schema(value, value, f"the schema of the tool {spec['name']!r}")
    for inner in subschemas(schema):
        ignored = sorted(_IGNORED_BY_XGRAMMAR.intersection(inner.value))
        if ignored:
            raise inner.unsupported(f"a grammar cannot express the keyword {ignored[0]!r}")
        if "pattern" in inner.value and ("minLength" in inner.value or "maxLength" in inner.value):
            raise inner.unsupported("a grammar cannot hold a string to a pattern and to a length")
    return schema


def subschemas(schema: Schema) -> Iterator[Schema]:
    """Yield a schema and all that stand in it, without following references."""
    if not isinstance(schema.value, Mapping):
        return
    yield schema
    for keyword in _ONE_SCHEMA:
        if isinstance(inner := schema.value.get(keyword), Mapping):
            yield from subschemas(schema.at(inner, keyword))
    for keyword in _LISTS:
        if isinstance(choices := schema.value.get(keyword), (list, tuple)):
            for index, choice in enumerate(choices):
                yield from subschemas(schema.at(choice, keyword, str(index)))
    for keyword in _MAPS:
        if isinstance(named := schema.value.get(keyword), Mapping):
            for name, inner in named.items():
                yield from subschemas(schema.at(inner, keyword, name))


def has_to_be_spelled_out(schema: Schema) -> bool:
    """Tell whether xgrammar would read a schema, or one that it refers to, badly or only in part.

    It ignores what stands beside `anyOf`, `oneOf` and `$ref` and all of an `allOf` of several schemas; see
    `grammar.json_string` for strings of a bounded length.
    """
    seen: set[str] = set()
    waiting = [schema]
    while waiting:
        for inner in subschemas(waiting.pop()):
            value = inner.value
            if "minLength" in value or "maxLength" in value or len(value.get("allOf") or ()) > 1:
                return True
            joined = [keyword for keyword in ("anyOf", "oneOf", "allOf", "$ref") if keyword in value]
            if joined and not _BESIDE_OTHERS.issuperset(value.keys() - joined[:1]):
                return True
            reference = value.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                waiting.append(inner.at(_target(inner)))
    return False


def alternatives(schema: Schema, levels: int = _LEVELS) -> list[Schema]:
    """Return the schemas of one type each that a schema consists of; one without a type allows anything.

    Raises:
        NotImplementedError: It cannot be taken apart, e.g. because it refers to itself.
    """
    value = schema.value
    if not isinstance(value, Mapping):
        return [schema.at({})]
    if levels == 0:
        raise schema.unsupported("a grammar of this format cannot follow a schema that refers to itself")
    if "$ref" in value:
        return alternatives(schema.at(_merged(schema, _without(value, "$ref"), _target(schema))), levels - 1)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(choices := value.get(keyword), (list, tuple)) and choices:
            rest = {key: kept for key, kept in _without(value, keyword).items() if key not in _ANNOTATIONS}
            merged = [schema.at(_merged(schema, rest, choice), keyword, str(i)) for i, choice in enumerate(choices)]
            return [found for choice in merged for found in alternatives(choice, levels - 1)]
    if isinstance(parts := value.get("allOf"), (list, tuple)):
        whole = _without(value, "allOf")
        for part in parts:
            whole = _merged(schema, whole, part)
        return alternatives(schema.at(whole), levels - 1)
    if "const" in value or "enum" in value:
        return [schema]
    declared = value.get("type")
    if isinstance(declared, (list, tuple)):
        return [schema.at({**value, "type": name}) for name in declared]
    if declared is None:
        told = next((kind for keyword, kind in _TYPE_OF_KEYWORD.items() if keyword in value), None)
        return [schema if told is None else schema.at({**value, "type": told})]
    return [schema]


def object_properties(schema: Schema) -> list[Property]:
    """Return the properties of an object.

    Raises:
        NotImplementedError: It may have any others, and none is declared, or one is required that is not declared.
    """
    properties = schema.value.get("properties") or {}
    required = set(schema.value.get("required") or ())
    if missing := sorted(required.difference(properties)):
        raise schema.unsupported(f"the required property {missing[0]!r} is not declared")
    if not properties and (schema.value.get("additionalProperties") or schema.value.get("patternProperties")):
        raise schema.unsupported("a grammar of this format needs the properties of an object to be declared")
    return [
        Property(name, schema.at(inner, "properties", name), name in required) for name, inner in properties.items()
    ]


def is_string(schema: Schema) -> bool:
    """Tell whether one of the `alternatives` is a string."""
    return schema.value.get("type") == "string"


def constants(schema: Schema) -> list[Any] | None:
    """Return the only values that one of the `alternatives` allows, if it lists them."""
    if "const" in schema.value:
        return [schema.value["const"]]
    listed = schema.value.get("enum")
    return list(listed) if isinstance(listed, (list, tuple)) else None


def _target(schema: Schema) -> Any:
    """Follow the local reference of a schema."""
    reference = schema.value["$ref"]
    found = schema.root
    for key in reference.removeprefix("#/").split("/") if reference != "#" else ():
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    if found is None:
        raise schema.unsupported(f"the reference {reference!r} leads nowhere")
    return found


def _merged(schema: Schema, value: Any, other: Any) -> Any:
    """Return a schema that asks for what both ask for; annotations do not matter."""
    if not isinstance(other, Mapping):
        return value
    if not isinstance(value, Mapping):
        return other
    kept = {key: inner for key, inner in value.items() if key not in _ANNOTATIONS}
    for key, inner in other.items():
        if key not in _ANNOTATIONS and kept.get(key, inner) != inner:
            raise schema.unsupported(f"a grammar of this format cannot join two schemas that differ in {key!r}")
    return {**kept, **other}


def _without(value: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if key != keyword}


def _references(value: Any) -> Iterator[str]:
    """Yield the references of a schema and all that stand in it."""
    for inner in subschemas(Schema(value, value, "")):
        if isinstance(reference := inner.value.get("$ref"), str):
            yield reference
