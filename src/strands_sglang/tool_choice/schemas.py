"""JSON schemas of tools, taken apart into alternatives of one type each, of which a grammar is made.

Nothing of a schema is left to the server, which would ignore some keywords and read others in its own way. A keyword
that no grammar here enforces is refused, since arguments that do not fit would come out without a word.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any, NamedTuple

from ..tool_parsers.reading.schemas import JSON_TYPES, resolve_reference, same_json, type_name

_NOT_ENFORCED = frozenset(
    ["$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas"]
    + ["disallow", "divisibleBy", "else", "extends", "if", "maxContains", "minContains", "multipleOf", "not"]
    + ["patternProperties", "propertyNames", "then", "unevaluatedItems", "uniqueItems"]
)
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
}
# Keywords that mean something else beside each other, so that two schemas are joined only where they agree on all.
_TOGETHER = (frozenset(["properties", "additionalProperties"]), frozenset(["items", "prefixItems"]))
_CONSTRAINTS = frozenset(
    ["$ref", "type", "enum", "const", "anyOf", "oneOf", "allOf", *(key for keys in _OF_TYPE.values() for key in keys)]
)
_LEVELS = 64  # references, alternatives and properties in each other before a schema counts as referring to itself
_LONGEST = 256  # characters or items that a schema may require, or a pattern repeat: each is a state of the grammar
_MOST_ALTERNATIVES = 256
# Characters that mean nothing in regular expressions, in JSON strings and in any format; the same in a class.
_ATOM = re.compile(
    r"[A-Za-z0-9 _@:,/=#%&~!;'-]|\\[dw.+*?()/$^|-]|"
    r"\[(?:[A-Z]-[A-Z]|[a-z]-[a-z]|[0-9]-[0-9]|[A-Za-z0-9 _@:,/.+*?=#%]|\\[dw.-])+-?\]"
)
_PATTERN = re.compile(rf"\^(?:(?:{_ATOM.pattern})(?:[?*+]|\{{[0-9]{{1,3}}(?:,(?:[0-9]{{1,3}})?)?\}})?)*\$")
_REPEATED = re.compile(r"\{([0-9]+)(?:,([0-9]*))?\}")


class Schema(NamedTuple):
    """A JSON schema, and what it takes to read it.

    Attributes:
        value: The schema.
        root: The schema that its references point into.
        path: Where it stands, for errors.
        level: How many references, lists and objects it stands in.
    """

    value: Any
    root: Any
    path: str
    level: int = 0

    def at(self, value: Any, *keys: str) -> Schema:
        """Return a schema that stands in this one.

        Raises:
            NotImplementedError: It stands too deep, as in a schema that refers to itself.
        """
        if self.level == _LEVELS:
            raise self.unsupported("a grammar cannot follow a schema that refers to itself")
        return Schema(value, self.root, "/".join((self.path, *keys)), self.level + 1)

    def unsupported(self, what: str) -> NotImplementedError:
        """Return the error that says why a grammar for this schema cannot be made."""
        path = self.path if len(self.path) <= 200 else f"{self.path[:200]}..."
        return NotImplementedError(f"{path}: {what}")

    def size(self, keyword: str) -> int | None:
        """Return a number of characters, items or properties; None if there is none.

        Raises:
            NotImplementedError: It is no such number.
        """
        value = self.value.get(keyword)
        if value is None:
            return None
        if type_name(value) != "integer" or value < 0:
            raise self.unsupported(f"{value!r} is no {keyword!r}")
        return int(value)

    def sizes(self, least: str, most: str) -> tuple[int, int | None]:
        """Return the fewest and the most of something; None for no limit.

        Raises:
            NotImplementedError: No value is that large and that small, or a grammar cannot count that far.
        """
        low, high = self.size(least) or 0, self.size(most)
        if high is not None and low > high:
            raise self.unsupported(f"no value has {least!r} of {low} and {most!r} of {high}")
        if low > _LONGEST:
            raise self.unsupported(f"a grammar cannot count {low} for {least!r}; it counts to {_LONGEST}")
        return low, high


class Property(NamedTuple):
    """A property of an object."""

    name: str
    schema: Schema
    required: bool


def argument_schema(spec: Mapping[str, Any]) -> Schema:
    """Return the schema of a tool's arguments.

    Args:
        spec: A Strands tool spec; its `inputSchema` is the schema, or holds it under `json`.
    """
    given = spec.get("inputSchema")
    value = given["json"] if isinstance(given, Mapping) and "json" in given else given
    value = dict(value) if isinstance(value, Mapping) else {}
    value.setdefault("type", "object")
    if not any(value.get(key) for key in ("$ref", "allOf", "anyOf", "oneOf", "additionalProperties")):
        value.setdefault("properties", {})  # a tool that declares nothing takes nothing
    return Schema(value, value, f"the schema of the tool {spec['name']!r}")


def alternatives(schema: Schema) -> list[Schema]:
    """Return the schemas of one type, or of constants, that a schema consists of; an empty one allows anything.

    Raises:
        NotImplementedError: It allows no value, or cannot be taken apart.
    """
    found = _alternatives(schema)
    if not found:
        raise schema.unsupported("the schema allows no value")
    return found


def _alternatives(schema: Schema) -> list[Schema]:
    value = schema.value
    if isinstance(value, bool):
        return [schema.at({})] if value else []
    if not isinstance(value, Mapping):
        raise schema.unsupported(f"{value!r} is no schema")
    for keyword in sorted(_NOT_ENFORCED.intersection(value)):
        if value[keyword] is not False or keyword not in ("not", "uniqueItems"):
            raise schema.unsupported(f"a grammar cannot express the keyword {keyword!r}")
    if "$id" in value and value is not schema.root and schema.level:
        raise schema.unsupported("a grammar cannot follow a schema with an '$id' of its own")
    if "$ref" in value:
        target = resolve_reference(value["$ref"], schema.root) if isinstance(value["$ref"], str) else None
        if target is None:
            raise schema.unsupported(f"the reference {value['$ref']!r} leads nowhere")
        return _alternatives(schema.at(_merged(schema, _without(value, "$ref"), target)))
    for keyword in ("anyOf", "oneOf"):
        if keyword in value:
            choices = _listed(schema, keyword)
            rest = _without(value, keyword)
            parts = []
            for index, choice in enumerate(choices):
                parts.append(_alternatives(schema.at(_merged(schema, rest, choice), keyword, str(index))))
                if sum(map(len, parts)) > _MOST_ALTERNATIVES:
                    raise schema.unsupported(f"a grammar has at most {_MOST_ALTERNATIVES} alternatives at one place")
            if keyword == "oneOf":
                for one, other in combinations(parts, 2):
                    if not all(_exclusive(first, second) for first in one for second in other):
                        raise schema.unsupported("the alternatives of 'oneOf' do not exclude each other plainly")
            return [found for part in parts for found in part]
    if "allOf" in value:
        whole: Any = _without(value, "allOf")
        for part in _listed(schema, "allOf"):
            whole = _merged(schema, whole, part)
        return _alternatives(schema.at(whole))
    kinds = _kinds(schema)
    if "const" in value or "enum" in value:
        return _constants(schema, kinds)
    if kinds is None:
        kinds = [kind for kind, keywords in _OF_TYPE.items() if any(keyword in value for keyword in keywords)]
        if len(kinds) > 1:
            raise schema.unsupported("a grammar needs a 'type' beside keywords of several types")
        return [schema.at(_typed(value, kind)) for kind in kinds] or [schema.at({})]
    return [schema.at(_typed(value, kind)) for kind in kinds]


def _kinds(schema: Schema) -> list[str] | None:
    """Return the types that a schema names itself."""
    declared = schema.value.get("type")
    if declared is None and "type" not in schema.value:
        return None
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, (list, tuple)) or not all(name in JSON_TYPES for name in names):
        raise schema.unsupported(f"{declared!r} is no 'type'")
    return [name for name in dict.fromkeys(names) if name != "integer" or "number" not in names]


def _typed(value: Mapping[str, Any], kind: str) -> dict[str, Any]:
    keywords = _OF_TYPE.get("number" if kind == "integer" else kind, ())
    return {"type": kind, **{key: value[key] for key in keywords if key in value}}


def _constants(schema: Schema, kinds: list[str] | None) -> list[Schema]:
    """Return a schema that lists the constants of a schema which are of its type."""
    value = schema.value
    listed = [value["const"]] if "const" in value else _listed(schema, "enum")
    if others := sorted(_CONSTRAINTS.intersection(value) - {"type", "enum", "const"}):
        raise schema.unsupported(f"a grammar cannot join constants and {others[0]!r}")
    if "const" in value and "enum" in value:
        listed = [constant for constant in listed if any(same_json(constant, one) for one in value["enum"])]
    named = None if kinds is None else {*kinds, *(["integer"] if "number" in kinds else [])}
    kept = [constant for constant in listed if named is None or type_name(constant) in named]
    for constant in kept:
        try:
            json.dumps(constant, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError):
            raise schema.unsupported("a constant is no JSON") from None
    return [schema.at({"enum": kept})] if kept else []


def _exclusive(one: Schema, other: Schema) -> bool:
    """Tell whether no value fits both of two alternatives, as far as that is plain to see."""
    first, second = constants(one), constants(other)
    if first is not None and second is not None:
        return not any(same_json(value, listed) for value in first for listed in second)
    kinds = [
        {"integer" if kind == "number" else kind for kind in (map(type_name, listed or ()) if listed else [kind])}
        for listed, kind in ((first, one.value.get("type")), (second, other.value.get("type")))
    ]
    if None in kinds[0] | kinds[1]:
        return False
    if not kinds[0] & kinds[1]:
        return True
    if kinds != [{"object"}, {"object"}] or first or second:
        return False
    told = [{found.name: found.schema for found in object_properties(part) if found.required} for part in (one, other)]
    for name in told[0].keys() & told[1].keys():
        pairs = [(a, b) for a in _alternatives(told[0][name]) for b in _alternatives(told[1][name])]
        if all(constants(a) and constants(b) and _exclusive(a, b) for a, b in pairs):
            return True
    return False


def object_properties(schema: Schema) -> list[Property]:
    """Return the properties of an object that a grammar lets through: those that are declared.

    Raises:
        NotImplementedError: It allows others and declares none, requires one that is not declared, or counts them.
    """
    properties = schema.value.get("properties")
    others = schema.value.get("additionalProperties")
    if (properties is None and others is not False) or (not properties and others not in (None, False)):
        raise schema.unsupported("a grammar needs the properties of an object to be declared")
    required = schema.value.get("required", ())
    if not isinstance(properties or {}, Mapping) or not isinstance(required, (list, tuple)):
        raise schema.unsupported("'properties' must be an object and 'required' a list")
    if missing := [name for name in required if name not in (properties or {})]:
        raise schema.unsupported(f"the required property {missing[0]!r} is not declared")
    found = [
        Property(name, schema.at(inner, "properties", name), name in required)
        for name, inner in (properties or {}).items()
        if inner is not False or name in required
    ]
    for each in found:
        if "\x00" in each.name or not _is_unicode(each.name):
            raise each.schema.unsupported("a grammar cannot write the name of the property")
    most = schema.size("maxProperties")
    if (schema.size("minProperties") or 0) > sum(each.required for each in found) or (
        most is not None and most < len(found)
    ):
        raise schema.unsupported("a grammar cannot count the properties of an object")
    return found


def array_items(schema: Schema) -> tuple[list[Schema], Schema | None, int, int | None]:
    """Return the first items of a list, the schema of those behind, and the fewest and the most of those behind.

    Raises:
        NotImplementedError: No list fits, or a grammar cannot express it.
    """
    least, most = schema.sizes("minItems", "maxItems")
    first = _listed(schema, "prefixItems") if "prefixItems" in schema.value else []
    items = schema.value.get("items", True)
    if isinstance(items, (list, tuple)):
        raise schema.unsupported("a grammar takes 'prefixItems' rather than a list of 'items'")
    if first:  # all of them, and nothing behind
        if least > len(first) or (most is not None and most < len(first)):
            raise schema.unsupported("a grammar cannot express this number of items beside 'prefixItems'")
        return [schema.at(item, "prefixItems", str(index)) for index, item in enumerate(first)], None, 0, 0
    if items is False:
        if least:
            raise schema.unsupported("the schema allows no value")
        return [], None, 0, 0
    return [], schema.at(items, "items"), least, most if most is None else min(most, max(least, _LONGEST))


def string_pattern(schema: Schema) -> str | None:
    """Return the regular expression that a string has to match as a whole; None if any will do.

    Raises:
        NotImplementedError: The pattern is not one that a grammar matches exactly as JSON Schema does, in every format:
            `^`, characters that no format has a meaning for, classes of them, repetitions, `$`.
    """
    pattern = schema.value.get("pattern")
    if pattern is None:
        return None
    if "minLength" in schema.value or "maxLength" in schema.value:
        raise schema.unsupported("a grammar cannot hold a string to a pattern and to a length")
    if not isinstance(pattern, str) or _PATTERN.fullmatch(pattern) is None or not _compiles(pattern):
        raise schema.unsupported(f"a grammar cannot hold a string to the pattern {pattern!r}")
    counts = [(int(low), int(high or low)) for low, high in _REPEATED.findall(pattern)]
    if sum(high for _, high in counts) > _LONGEST or any(low > high for low, high in counts):
        raise schema.unsupported(f"a grammar cannot count as far as the pattern {pattern!r}")
    return _ATOM.sub(_spelled_out, pattern[1:-1])


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _spelled_out(atom: re.Match[str]) -> str:
    r"""Return a part of a pattern with `\d` and `\w` as JSON Schema's dialect has them."""
    found = atom.group().replace(r"\d", "0-9").replace(r"\w", "A-Za-z0-9_")
    return f"[{found}]" if found != atom.group() and not found.startswith("[") else found


def number_bounds(schema: Schema) -> dict[str, Any] | None:
    """Return a schema of the bounds of a number, on both sides; None if it has none.

    Raises:
        NotImplementedError: No number fits, or a bound is not one that the server reads exactly.
    """
    kind = schema.value["type"]
    widest = 10**18 if kind == "integer" else 10**15
    low: list[tuple[float, bool]] = [(-widest, False)]
    high: list[tuple[float, bool]] = [(widest, False)]
    for found, keyword, excluded in (
        (low, "minimum", False),
        (low, "exclusiveMinimum", True),
        (high, "maximum", False),
        (high, "exclusiveMaximum", True),
    ):
        value = schema.value.get(keyword)
        if value is None:
            continue
        if type_name(value) not in ("integer", "number") or not -(10**30) < value < 10**30 or round(value, 6) != value:
            raise schema.unsupported(f"a grammar cannot hold a number to {keyword!r} of {value!r}")
        found.append((value, excluded))
    if len(low) == len(high) == 1:
        return None
    bottom, top = max(low), min(high, key=lambda bound: (bound[0], not bound[1]))
    if kind == "integer":
        bounds: dict[str, float] = {
            "minimum": math.floor(bottom[0]) + 1 if bottom[1] else math.ceil(bottom[0]),
            "maximum": math.ceil(top[0]) - 1 if top[1] else math.floor(top[0]),
        }
    else:
        bounds = {"exclusiveMinimum" if bottom[1] else "minimum": bottom[0]}
        bounds["exclusiveMaximum" if top[1] else "maximum"] = top[0]
    least, most = bounds.values()
    if least > most or (least == most and len(bounds.keys() & {"minimum", "maximum"}) < 2):
        raise schema.unsupported("a grammar knows no number within these bounds")
    return {"type": kind, **bounds}


def constants(schema: Schema) -> list[Any] | None:
    """Return the only values that one of the `alternatives` allows, if it lists them."""
    listed: list[Any] | None = schema.value.get("enum")
    return listed


def _listed(schema: Schema, keyword: str) -> list[Any]:
    values = schema.value[keyword]
    if not isinstance(values, (list, tuple)):
        raise schema.unsupported(f"{keyword!r} must be a list")
    return list(values)


def _merged(schema: Schema, value: Any, other: Any) -> Any:
    """Return a schema that asks for what both ask for; annotations do not matter."""
    if isinstance(value, bool) or isinstance(other, bool):
        return False if value is False or other is False else other if value is True else value
    if not isinstance(value, Mapping) or not isinstance(other, Mapping):
        raise schema.unsupported(f"{other!r} is no schema")
    for together in _TOGETHER:
        mine, theirs = ({key: part[key] for key in together if key in part} for part in (value, other))
        if mine and theirs and mine != theirs:
            raise schema.unsupported(f"a grammar cannot join two schemas that differ in {sorted(mine)[0]!r}")
    for key in (_CONSTRAINTS | _NOT_ENFORCED).intersection(value, other):
        if not same_json(value[key], other[key]):
            raise schema.unsupported(f"a grammar cannot join two schemas that differ in {key!r}")
    return {**value, **other}


def _without(value: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if key not in (keyword, "$id")}


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
