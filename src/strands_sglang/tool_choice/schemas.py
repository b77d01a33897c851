"""JSON schemas of tools, split into alternatives of one type each for a grammar.

The server interprets no schema itself, except for the bounds of a number: it would ignore some keywords and read others
differently. Keywords that no grammar enforces are rejected, because arguments could silently violate them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain, combinations, count, product
from typing import Any, NamedTuple

from ..tool_parsers.reading.schemas import (
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
_CONSTRAINTS = {*chain.from_iterable(_OF_TYPE.values())} | {"$ref", "anyOf", "oneOf", "allOf"}
# Keywords that belong together: two schemas are joined only if they agree on each group.
_TOGETHER = (
    *(("properties", "additionalProperties"), ("items", "prefixItems")),
    *((keyword,) for keyword in sorted(_CONSTRAINTS | _NOT_ENFORCED | {"type", "enum", "const"})),
)
# The types of an untyped value; an object would have keys that no schema declares.
_ANY_TYPE = ("string", "number", "boolean", "null")
_LEVELS = 64  # nested references, alternatives and properties; a deeper schema counts as recursive
_LONGEST = 256  # most characters or items that a schema may require or a pattern may repeat: each is a state
_MOST_ALTERNATIVES = 256
_UNROLLED = 3  # how often a value may contain another of the same recursive schema
# Characters without a meaning in regular expressions, JSON strings and any format; also within a class.
_ATOM = re.compile(
    r"[A-Za-z0-9 _@:,/=#%&~!;'-]|\\[dw.+*?()/$^|-]|"
    r"\[(?:[A-Z]-[A-Z]|[a-z]-[a-z]|[0-9]-[0-9]|[A-Za-z0-9 _@:,/.+*?=#%]|\\[dw.-])+-?\]"
)
_TERM = rf"(?:{_ATOM.pattern})(?:[?*+]|\{{[0-9]{{1,3}}(?:,(?:[0-9]{{1,3}})?)?\}})?"
_GROUP = rf"\((?:\?:)?(?:{_TERM})+(?:\|(?:{_TERM})+)*\)\??"  # not repeated: its own repetitions would multiply
_PATTERN = re.compile(rf"\^(?:{_TERM}|{_GROUP})*\$")
_REPEATED = re.compile(r"\{([0-9]+)(?:,([0-9]*))?\}")


class TooDeepError(NotImplementedError):
    """A value of a recursive schema would contain too many of the same; a grammar leaves it out where it may."""


class Schema(NamedTuple):
    """A JSON schema and its context.

    Attributes:
        value: Schema as an object; one that allows nothing has an empty `enum`.
        root: Schema that references point into.
        path: Path of the schema, for error messages.
        written: Counter of the values in the grammar.
        level: Number of references, lists and objects around the schema.
        references: References that led to the schema.
    """

    value: Mapping[str, Any]
    root: Any
    path: str
    written: Iterator[int]
    level: int = 0
    references: tuple[str, ...] = ()

    def at(self, value: Any, *keys: str) -> Schema:
        """Return a schema inside this one.

        Raises:
            NotImplementedError: The value is not a schema, or is nested too deeply.
        """
        if self.level == _LEVELS:
            raise self.unsupported("the schema is nested too deeply for a grammar")
        inner = self._replace(value=value, path="/".join((self.path, *keys)), level=self.level + 1)
        if isinstance(value, bool):
            return inner._replace(value={} if value else {"enum": []})
        if not isinstance(value, Mapping):
            raise inner.unsupported(f"{value!r} is not a schema")
        return inner

    def unsupported(self, what: str) -> NotImplementedError:
        """Return the error that explains why this schema has no grammar."""
        path = self.path if len(self.path) <= 200 else f"{self.path[:200]}..."
        return NotImplementedError(f"{path}: {what}")

    def sizes(self, least: str, most: str) -> tuple[int, int | None]:
        """Return the fewest and the most characters, items or properties; None means no limit.

        Raises:
            NotImplementedError: The limits contradict each other, or a grammar cannot count that far.
        """
        given = {keyword: self.value[keyword] for keyword in (least, most) if self.value.get(keyword) is not None}
        for keyword, value in given.items():
            if type_name(value) != "integer" or value < 0:
                raise self.unsupported(f"{value!r} is not a valid {keyword!r}")
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
        spec: Strands tool spec; its `inputSchema` is the schema, or contains it under `json`.
    """
    given = tool_schemas([spec])[spec["name"]]
    value = {"type": "object", **(given if isinstance(given, Mapping) else {})}
    if not any(value.get(key) for key in ("$ref", "allOf", "anyOf", "oneOf", "additionalProperties")):
        value.setdefault("properties", {})  # a tool without declared parameters takes none
    return Schema(value, value, f"the schema of the tool {spec['name']!r}", count())


def alternatives(schema: Schema) -> list[Schema]:
    """Return the alternatives of a schema: each has one type, or constants (only an `enum`).

    Raises:
        NotImplementedError: The schema allows no value, or cannot be split.
    """
    found = _alternatives(schema)
    if not found:
        raise schema.unsupported("the schema allows no value")
    any_type = [schema.at({"type": kind}) for kind in _ANY_TYPE]
    return list(chain.from_iterable([each] if each.value else any_type for each in found))


def _alternatives(schema: Schema) -> list[Schema]:
    """Return the alternatives of a schema; an empty schema allows anything."""
    value = schema.value
    for keyword in sorted(_NOT_ENFORCED.intersection(value)):
        if value[keyword] is not False or keyword not in ("not", "uniqueItems"):
            raise schema.unsupported(f"a grammar cannot express the keyword {keyword!r}")
    if "$id" in value and schema.level:
        raise schema.unsupported("a grammar cannot express an inner schema with an '$id'")
    if "$ref" in value:
        reference = str(value["$ref"])
        target = resolve_reference(reference, schema.root)
        if target is None:
            raise schema.unsupported(f"the reference {reference!r} leads nowhere")
        if schema.references.count(reference) > _UNROLLED:
            raise TooDeepError(str(schema.unsupported("a value of the recursive schema has no end")))
        inner = _joined(schema, "$ref", [target])
        return _alternatives(inner._replace(references=(*schema.references, reference)))
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
            raise schema.unsupported("a grammar needs a 'type' for keywords of several types")
    else:
        kinds = _kinds(schema)
    return [
        schema.at({"type": kind, **{key: value[key] for key in _OF_TYPE.get(kind, ()) if key in value}})
        for kind in kinds
    ]


def _kinds(schema: Schema) -> list[str]:
    """Return the types that a schema names; all types if it names none."""
    declared = schema.value.get("type", [*JSON_TYPES])
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, (list, tuple)) or not all(name in JSON_TYPES for name in names):
        raise schema.unsupported(f"{declared!r} is not a valid 'type'")
    return [name for name in dict.fromkeys(names) if name != "integer" or "number" not in names]


def _joined(schema: Schema, keyword: str, parts: list[Any], *keys: str) -> Schema:
    """Return a schema with a keyword replaced by the requirements of its parts; annotations are ignored."""
    whole = {key: inner for key, inner in schema.value.items() if key not in (keyword, "$id")}
    for part in (schema.at(part, *keys).value for part in parts):
        for together in _TOGETHER:
            mine, theirs = ({key: each[key] for key in together if key in each} for each in (whole, part))
            if mine and theirs and not same_json(mine, theirs):
                raise schema.unsupported(f"a grammar cannot join two schemas that differ in {min(mine)!r}")
        whole.update(part)
    return schema.at(whole, *keys)


def _choices(schema: Schema, keyword: str) -> list[Schema]:
    """Return the alternatives of the schemas in `anyOf` or `oneOf`."""
    parts: list[list[Schema]] = []
    too_deep: TooDeepError | None = None
    for index, choice in enumerate(_listed(schema, keyword)):
        try:
            parts.append(_alternatives(_joined(schema, keyword, [choice], keyword, str(index))))
        except TooDeepError as error:
            too_deep = error
        if sum(map(len, parts)) > _MOST_ALTERNATIVES:
            raise schema.unsupported(f"a grammar may have at most {_MOST_ALTERNATIVES} alternatives in one place")
    if too_deep is not None and not any(parts):
        raise too_deep
    pairs = chain.from_iterable(product(first, second) for first, second in combinations(parts, 2))
    if keyword == "oneOf" and not all(_exclusive(*pair) for pair in pairs):
        raise schema.unsupported("the alternatives of 'oneOf' do not obviously exclude each other")
    return list(chain.from_iterable(parts))


def _constants(schema: Schema) -> list[Schema]:
    """Return a schema with the constants that have the schema's type; none if there are none."""
    value, kinds = schema.value, _kinds(schema)
    listed = [value["const"]] if "const" in value else _listed(schema, "enum")
    others = sorted(_CONSTRAINTS.intersection(value))
    if others and listed:
        raise schema.unsupported(f"a grammar cannot join constants and {others[0]!r}")
    if "const" in value and "enum" in value:
        listed = [constant for constant in listed if any(same_json(constant, allowed) for allowed in value["enum"])]
    named = {*kinds, "integer"} if "number" in kinds else {*kinds}
    kept = [constant for constant in listed if type_name(constant) in named]
    if not all(map(_is_json, kept)):
        raise schema.unsupported("a constant is not valid JSON")
    return [schema.at({"enum": kept})] if kept else []


def _exclusive(first: Schema, second: Schema) -> bool:
    """Return whether two alternatives obviously exclude each other."""
    if not allowed_types(first.value) & allowed_types(second.value):
        return True
    if "enum" in first.value and "enum" in second.value:
        return not any(same_json(*pair) for pair in product(first.value["enum"], second.value["enum"]))
    if not first.value.get("type") == second.value.get("type") == "object":
        return False
    mine, theirs = (
        {found.name: found.schema for found in object_properties(each) if found.required} for each in (first, second)
    )
    return any(
        all(
            "enum" in a.value and "enum" in b.value and _exclusive(a, b)
            for a, b in product(_alternatives(mine[name]), _alternatives(theirs[name]))
        )
        for name in mine.keys() & theirs.keys()
    )


def object_properties(schema: Schema) -> list[Property]:
    """Return the declared properties of an object, which are those that a grammar matches.

    Raises:
        NotImplementedError: The schema declares no properties but allows some, requires an undeclared property, or
            limits the number of properties.
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


def undeclared_properties(schema: Schema) -> Schema | None:
    """Return the schema of the properties of an object that declares none; None if it declares some or allows none."""
    value = schema.value
    others = value.get("additionalProperties", "properties" not in value)
    if value.get("properties") or value.get("required") or others is False:
        return None
    return schema.at(others, "additionalProperties")


def array_items(schema: Schema) -> tuple[list[Schema], Schema | None, int, int | None]:
    """Return the first items of a list, the schema of all later items, and the fewest and the most later items.

    Raises:
        NotImplementedError: No list fits the schema, or a grammar cannot express it.
    """
    least, most = schema.sizes("minItems", "maxItems")
    items = schema.value.get("items", True)
    others = schema.at(items, "items")
    first = [schema.at(item, "prefixItems", str(index)) for index, item in enumerate(_listed(schema, "prefixItems"))]
    if not first and items is not False:
        return [], others, least, most if most is None else min(most, max(least, _LONGEST))
    if least > len(first) or (most is not None and most < len(first)):
        what = "a grammar cannot express this number of items with 'prefixItems'"
        raise schema.unsupported(what if first else "the schema allows no value")
    return first, None, 0, 0  # exactly these


def string_pattern(schema: Schema) -> str | None:
    """Return the regular expression that a whole string must match; None if there is none.

    Raises:
        NotImplementedError: A grammar cannot match the pattern exactly as JSON Schema does in every format. Supported
            are `^`, characters without a meaning in any format, classes of them, repetitions, and `$`.
    """
    pattern = schema.value.get("pattern")
    if pattern is None:
        return None
    if "minLength" in schema.value or "maxLength" in schema.value:
        raise schema.unsupported("a grammar cannot limit a string by a pattern and a length")
    try:
        is_plain = _PATTERN.fullmatch(pattern) is not None and re.compile(pattern) is not None
    except (TypeError, re.error):  # not a string, or a reversed range or repetition
        is_plain = False
    if not is_plain or sum(int(most or least) for least, most in _REPEATED.findall(pattern)) > _LONGEST:
        raise schema.unsupported(f"a grammar cannot express the pattern {pattern!r}")
    return _ATOM.sub(_spelled_out, pattern[1:-1])


def _spelled_out(atom: re.Match[str]) -> str:
    r"""Return a part of a pattern with `\d` and `\w` spelled out as in JSON Schema's dialect."""
    found = atom.group().replace(r"\d", "0-9").replace(r"\w", "A-Za-z0-9_")
    return f"[{found}]" if found != atom.group() and not found.startswith("[") else found


def number_bounds(schema: Schema) -> dict[str, Any] | None:
    """Return a schema with a bound on both sides of a number; None if it has no bounds.

    Raises:
        NotImplementedError: No number fits, or the server cannot represent a bound exactly.
    """
    kind = schema.value["type"]
    given = {keyword: schema.value[keyword] for keyword in _OF_NUMBERS if schema.value.get(keyword) is not None}
    for keyword, value in given.items():
        if type_name(value) not in ("integer", "number") or not -(10**30) < value < 10**30 or round(value, 6) != value:
            raise schema.unsupported(f"a grammar cannot express {keyword!r} of {value!r}")
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
        raise schema.unsupported("a grammar can write no number within these bounds")
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
