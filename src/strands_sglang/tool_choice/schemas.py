"""JSON schemas of tools, taken apart into alternatives of one type each, of which a grammar is made.

Nothing of a schema is left to the server, which would ignore some keywords and read others in its own way. A keyword
that no grammar here enforces is refused, since arguments that do not fit would come out without a word.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import combinations, count, product
from typing import Any, NamedTuple

from ..tool_parsers.reading.values import (
    JSON_TYPES,
    allowed_types,
    resolve_reference,
    same_json,
    tool_schemas,
    type_name,
)

_NOT_ENFORCED = frozenset(
    ["$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas"]
    + ["disallow", "divisibleBy", "else", "extends", "if", "maxContains", "minContains", "multipleOf", "not"]
    + ["patternProperties", "propertyNames", "then", "unevaluatedItems", "uniqueItems"]
)
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern"),
    "number": _OF_NUMBERS,
    "integer": _OF_NUMBERS,
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
}
_CONSTRAINTS = {key for keys in _OF_TYPE.values() for key in keys} | {"$ref", "anyOf", "oneOf", "allOf"}
# Keywords with one meaning together: two schemas are joined only where they agree on all of them.
_TOGETHER = (
    *(("properties", "additionalProperties"), ("items", "prefixItems")),
    *((keyword,) for keyword in sorted(_CONSTRAINTS | _NOT_ENFORCED | {"type", "enum", "const"})),
)
# What stands for a value of any type: objects would have keys that no schema declares.
_ANY_TYPE = ("string", "number", "boolean", "null")
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
        value: The schema, an object; one that allows nothing lists no values.
        root: The schema that its references point into.
        path: Where it stands, for errors.
        written: Counts the values of its grammar.
        level: How many references, lists and objects it stands in.
    """

    value: Mapping[str, Any]
    root: Any
    path: str
    written: Iterator[int]
    level: int = 0

    def at(self, value: Any, *keys: str) -> Schema:
        """Return a schema that stands in this one.

        Raises:
            NotImplementedError: It is none, or stands too deep, as in a schema that refers to itself.
        """
        if self.level == _LEVELS:
            raise self.unsupported("a grammar cannot follow a schema that refers to itself")
        inner = self._replace(value=value, path="/".join((self.path, *keys)), level=self.level + 1)
        if isinstance(value, bool):
            return inner._replace(value={} if value else {"enum": []})
        if not isinstance(value, Mapping):
            raise inner.unsupported(f"{value!r} is no schema")
        return inner

    def unsupported(self, what: str) -> NotImplementedError:
        """Return the error that says why a grammar for this schema cannot be made."""
        path = self.path if len(self.path) <= 200 else f"{self.path[:200]}..."
        return NotImplementedError(f"{path}: {what}")

    def sizes(self, least: str, most: str) -> tuple[int, int | None]:
        """Return the fewest and the most characters, items or properties; None for no limit.

        Raises:
            NotImplementedError: No value is that large and that small, or a grammar cannot count that far.
        """
        given = {keyword: self.value[keyword] for keyword in (least, most) if self.value.get(keyword) is not None}
        for keyword, value in given.items():
            if type_name(value) != "integer" or value < 0:
                raise self.unsupported(f"{value!r} is no {keyword!r}")
        low, high = int(given.get(least, 0)), int(given[most]) if most in given else None
        if low > (_LONGEST if high is None else min(high, _LONGEST)):
            raise self.unsupported(f"a grammar cannot count {least!r} of {low} and {most!r} of {high}")
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
    given = tool_schemas([spec])[spec["name"]]
    value = {"type": "object", **(given if isinstance(given, Mapping) else {})}
    if not any(value.get(key) for key in ("$ref", "allOf", "anyOf", "oneOf", "additionalProperties")):
        value.setdefault("properties", {})  # a tool that declares nothing takes nothing
    return Schema(value, value, f"the schema of the tool {spec['name']!r}", count())


def alternatives(schema: Schema) -> list[Schema]:
    """Return the schemas of one type, or of constants (an `enum` alone), that a schema consists of.

    Raises:
        NotImplementedError: It allows no value, or cannot be taken apart.
    """
    found = _alternatives(schema)
    if not found:
        raise schema.unsupported("the schema allows no value")
    any_type = [schema.at({"type": kind}) for kind in _ANY_TYPE]
    return [option for each in found for option in ([each] if each.value else any_type)]


def _alternatives(schema: Schema) -> list[Schema]:
    """Return the same; an empty one allows anything."""
    value = schema.value
    for keyword in sorted(_NOT_ENFORCED.intersection(value)):
        if value[keyword] is not False or keyword not in ("not", "uniqueItems"):
            raise schema.unsupported(f"a grammar cannot express the keyword {keyword!r}")
    if "$id" in value and schema.level:
        raise schema.unsupported("a grammar cannot follow a schema with an '$id' of its own")
    if "$ref" in value:
        target = resolve_reference(str(value["$ref"]), schema.root)
        if target is None:
            raise schema.unsupported(f"the reference {value['$ref']!r} leads nowhere")
        return _alternatives(_joined(schema, "$ref", [target]))
    for keyword in ("anyOf", "oneOf"):
        if keyword in value:
            return _choices(schema, keyword)
    if "allOf" in value:
        return _alternatives(_joined(schema, "allOf", _listed(schema, "allOf")))
    if "const" in value or "enum" in value:
        return _constants(schema)
    if "type" not in value:
        keywords_of = {kind: keywords for kind, keywords in _OF_TYPE.items() if kind != "integer"}
        kinds = [kind for kind, keywords in keywords_of.items() if not value.keys().isdisjoint(keywords)]
        if not kinds:
            return [schema.at({})]
        if len(kinds) > 1:
            raise schema.unsupported("a grammar needs a 'type' beside keywords of several types")
    else:
        kinds = _kinds(schema)
    return [
        schema.at({"type": kind, **{key: value[key] for key in _OF_TYPE.get(kind, ()) if key in value}})
        for kind in kinds
    ]


def _kinds(schema: Schema) -> list[str]:
    """Return the types that a schema names itself; all of them where it names none."""
    declared = schema.value.get("type", [*JSON_TYPES])
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, (list, tuple)) or not all(name in JSON_TYPES for name in names):
        raise schema.unsupported(f"{declared!r} is no 'type'")
    return [name for name in dict.fromkeys(names) if name != "integer" or "number" not in names]


def _joined(schema: Schema, keyword: str, parts: list[Any], *keys: str) -> Schema:
    """Return a schema that asks for what some parts ask for, in place of a keyword; annotations do not matter."""
    whole = {key: inner for key, inner in schema.value.items() if key not in (keyword, "$id")}
    for part in (schema.at(part, *keys).value for part in parts):
        for together in _TOGETHER:
            mine, theirs = ({key: each[key] for key in together if key in each} for each in (whole, part))
            if mine and theirs and not same_json(mine, theirs):
                raise schema.unsupported(f"a grammar cannot join two schemas that differ in {min(mine)!r}")
        whole.update(part)
    return schema.at(whole, *keys)


def _choices(schema: Schema, keyword: str) -> list[Schema]:
    """Return the alternatives of all that `anyOf` or `oneOf` lists."""
    parts: list[list[Schema]] = []
    for index, choice in enumerate(_listed(schema, keyword)):
        parts.append(_alternatives(_joined(schema, keyword, [choice], keyword, str(index))))
        if sum(map(len, parts)) > _MOST_ALTERNATIVES:
            raise schema.unsupported(f"a grammar has at most {_MOST_ALTERNATIVES} alternatives at one place")
    pairs = ((first, second) for one, other in combinations(parts, 2) for first in one for second in other)
    if keyword == "oneOf" and not all(_exclusive(*pair) for pair in pairs):
        raise schema.unsupported("the alternatives of 'oneOf' do not exclude each other plainly")
    return [found for part in parts for found in part]


def _constants(schema: Schema) -> list[Schema]:
    """Return a schema that lists the constants of a schema which are of its type."""
    value, kinds = schema.value, _kinds(schema)
    listed = [value["const"]] if "const" in value else _listed(schema, "enum")
    others = sorted(_CONSTRAINTS.intersection(value))
    if others and listed:
        raise schema.unsupported(f"a grammar cannot join constants and {others[0]!r}")
    if "const" in value and "enum" in value:
        listed = [constant for constant in listed if any(same_json(constant, one) for one in value["enum"])]
    named = {*kinds, "integer"} if "number" in kinds else {*kinds}
    kept = [constant for constant in listed if type_name(constant) in named]
    if not all(map(_is_json, kept)):
        raise schema.unsupported("a constant is no JSON")
    return [schema.at({"enum": kept})] if kept else []


def _exclusive(one: Schema, other: Schema) -> bool:
    """Tell whether no value fits both of two alternatives, as far as that is plain to see."""
    if not allowed_types(one.value) & allowed_types(other.value):
        return True
    if "enum" in one.value and "enum" in other.value:
        return not any(same_json(value, listed) for value in one.value["enum"] for listed in other.value["enum"])
    if not one.value.get("type") == other.value.get("type") == "object":
        return False
    mine, theirs = (
        {found.name: found.schema for found in object_properties(each) if found.required} for each in (one, other)
    )
    return any(
        all(
            "enum" in a.value and "enum" in b.value and _exclusive(a, b)
            for a, b in product(_alternatives(mine[name]), _alternatives(theirs[name]))
        )
        for name in mine.keys() & theirs.keys()
    )


def object_properties(schema: Schema) -> list[Property]:
    """Return the properties of an object that a grammar lets through: those that are declared.

    Raises:
        NotImplementedError: It allows others and declares none, requires one that is not declared, or counts them.
    """
    properties = schema.value.get("properties") or {}
    others = schema.value.get("additionalProperties", "properties" not in schema.value)
    if not properties and others is not False:
        raise schema.unsupported("a grammar needs the properties of an object to be declared")
    required = schema.value.get("required", ())
    if not isinstance(properties, Mapping) or not isinstance(required, (list, tuple)):
        raise schema.unsupported("'properties' must be an object and 'required' a list")
    if missing := [name for name in required if name not in properties]:
        raise schema.unsupported(f"the required property {missing[0]!r} is not declared")
    found = [
        Property(name, schema.at(inner, "properties", name), name in required)
        for name, inner in properties.items()
        if inner is not False or name in required
    ]
    for each in found:
        if "\x00" in each.name or not _is_json(each.name):
            raise each.schema.unsupported("a grammar cannot write the name of the property")
    least, most = schema.sizes("minProperties", "maxProperties")
    if least > sum(each.required for each in found) or (most is not None and most < len(found)):
        raise schema.unsupported("a grammar cannot count the properties of an object")
    return found


def array_items(schema: Schema) -> tuple[list[Schema], Schema | None, int, int | None]:
    """Return the first items of a list, the schema of those behind, and the fewest and the most of those behind.

    Raises:
        NotImplementedError: No list fits, or a grammar cannot express it.
    """
    least, most = schema.sizes("minItems", "maxItems")
    items = schema.value.get("items", True)
    others = schema.at(items, "items")
    first = [schema.at(item, "prefixItems", str(index)) for index, item in enumerate(_listed(schema, "prefixItems"))]
    if not first and items is not False:
        return [], others, least, most if most is None else min(most, max(least, _LONGEST))
    if least > len(first) or (most is not None and most < len(first)):
        what = "a grammar cannot express this number of items beside 'prefixItems'"
        raise schema.unsupported(what if first else "the schema allows no value")
    return first, None, 0, 0  # all of them, and nothing behind


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
    try:
        is_plain = _PATTERN.fullmatch(pattern) is not None and re.compile(pattern) is not None
    except (TypeError, re.error):  # no text, or a range or a repetition from more to less
        is_plain = False
    if not is_plain or sum(int(most or least) for least, most in _REPEATED.findall(pattern)) > _LONGEST:
        raise schema.unsupported(f"a grammar cannot hold a string to the pattern {pattern!r}")
    return _ATOM.sub(_spelled_out, pattern[1:-1])


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
    given = {keyword: schema.value[keyword] for keyword in _OF_NUMBERS if schema.value.get(keyword) is not None}
    for keyword, value in given.items():
        if type_name(value) not in ("integer", "number") or not -(10**30) < value < 10**30 or round(value, 6) != value:
            raise schema.unsupported(f"a grammar cannot hold a number to {keyword!r} of {value!r}")
    if not given:
        return None
    widest = 10**18 if kind == "integer" else 10**15
    minimum, maximum = max(-widest, given.get("minimum", -widest)), min(widest, given.get("maximum", widest))
    least, above = max((minimum, False), (given.get("exclusiveMinimum", -math.inf), True))
    most, included = min((maximum, True), (given.get("exclusiveMaximum", math.inf), False))
    if kind == "integer":
        bounds = {
            "minimum": math.floor(least) + 1 if above else math.ceil(least),
            "maximum": math.floor(most) if included else math.ceil(most) - 1,
        }
    else:
        bounds = {
            "exclusiveMinimum" if above else "minimum": least,
            "maximum" if included else "exclusiveMaximum": most,
        }
    least, most = bounds.values()
    if least > most or (least == most and not bounds.keys() <= {"minimum", "maximum"}):
        raise schema.unsupported("a grammar knows no number within these bounds")
    return {"type": kind, **bounds}


def _listed(schema: Schema, keyword: str) -> list[Any]:
    values = schema.value.get(keyword, ())
    if not isinstance(values, (list, tuple)):
        raise schema.unsupported(f"{keyword!r} must be a list")
    return list(values)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError):
        return False
    return True
