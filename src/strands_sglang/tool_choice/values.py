"""The grammar of argument values, in JSON and in the notations of formats that have their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from .grammar import (
    Element,
    constant_text,
    either,
    free_text,
    json_string,
    json_value,
    literal,
    matching,
    members,
    optional,
    repeated,
    sequence,
)
from .schemas import Property, Schema, alternatives, constants, has_to_be_spelled_out, is_string, object_properties

_LEVELS = 24  # lists and objects within each other before a schema counts as one that refers to itself
_NOT_A_STRING = {"type": ["number", "boolean", "null", "array", "object"]}
_SCALAR = {"type": ["number", "boolean", "null"]}
_PYTHON_SPELLINGS = {"boolean": ("True", "False"), "null": ("None",)}


class Notation(ABC):
    """How values are written."""

    @abstractmethod
    def string(self, schema: Schema) -> Element:
        """Return what matches a string by its schema."""

    @abstractmethod
    def array(self, item: Element, least: int, most: int | None) -> Element:
        """Return what matches a list of `least` to `most` items."""

    @abstractmethod
    def object(self, properties: Sequence[tuple[Property, Element]]) -> Element:
        """Return what matches an object of these properties and their values."""

    @abstractmethod
    def anything(self, schema: Schema) -> Element:
        """Return what matches values of a schema without a type."""

    @abstractmethod
    def constant(self, value: Any, schema: Schema) -> Element:
        """Return what matches a constant."""

    def as_a_whole(self, schema: Schema) -> Element | None:
        """Return what matches a list or an object if the server can be handed its schema."""
        return None

    def value(self, schema: Schema, levels: int = _LEVELS) -> Element:
        """Return what matches a value by its schema.

        Raises:
            NotImplementedError: There is no grammar for that.
        """
        if levels == 0:
            raise schema.unsupported("a grammar of this format cannot follow a schema that refers to itself")
        return either([self._one(option, levels) for option in alternatives(schema)])

    def _one(self, schema: Schema, levels: int) -> Element:
        if (values := constants(schema)) is not None:
            return either([self.constant(value, schema) for value in values])
        kind = schema.value.get("type")
        if kind is None:
            return self.anything(schema)
        if kind == "string":
            return self.string(schema)
        if kind not in ("array", "object"):
            return json_value(schema.standalone(), 0)
        if (whole := self.as_a_whole(schema)) is not None:
            return whole
        if kind == "object":
            properties = object_properties(schema)
            return self.object([(found, self.value(found.schema, levels - 1)) for found in properties])
        if "prefixItems" in schema.value:
            raise schema.unsupported("a grammar of this format cannot express 'prefixItems'")
        item = self.value(schema.at(schema.value.get("items", {}), "items"), levels - 1)
        return self.array(item, schema.value.get("minItems", 0), schema.value.get("maxItems"))


class JSONNotation(Notation):
    """JSON, spaced as chat templates write it.

    Args:
        space: Most white space at one place of what the server spells out.
    """

    def __init__(self, space: int = 1) -> None:
        """Keep the limit of white space."""
        self.space = space
        # As templates space JSON, or with any line breaks and indentation.
        self.gap = literal("") if space == 1 else matching(rf"[ \n]{{0,{space}}}")
        self.comma = literal(", ") if space == 1 else sequence(",", self.gap)

    def string(self, schema: Schema) -> Element:
        """Return what matches a JSON string."""
        if "minLength" in schema.value or "maxLength" in schema.value:
            return json_string(schema.value.get("minLength", 0), schema.value.get("maxLength"))
        # xgrammar lets a string end only before what may follow one inside JSON.
        return json_value(schema.standalone(), 0) if "pattern" in schema.value else json_string()

    def array(self, item: Element, least: int, most: int | None) -> Element:
        """Return what matches a JSON list."""
        return sequence("[", self.gap, separated(item, self.comma, least, most), self.gap, "]")

    def object(self, properties: Sequence[tuple[Property, Element]]) -> Element:
        """Return what matches a JSON object."""
        parts = [(sequence(f"{constant_text(found.name)}: ", value), found.required) for found, value in properties]
        return sequence("{", self.gap, members(parts, self.comma), self.gap, "}")

    def anything(self, schema: Schema) -> Element:
        """Return what matches any JSON."""
        return either([json_value(_NOT_A_STRING, self.space), json_string()])

    def constant(self, value: Any, schema: Schema) -> Element:
        """Return what matches a constant as JSON."""
        return literal(constant_text(value))

    def as_a_whole(self, schema: Schema) -> Element | None:
        """Hand the schema to the server, unless the server would read it badly."""
        return None if has_to_be_spelled_out(schema) else json_value(schema.standalone(), self.space)

    def value(self, schema: Schema, levels: int = _LEVELS) -> Element:
        """Return what matches a value, handed to the server without being taken apart where possible."""
        return self.as_a_whole(schema) or super().value(schema, levels)


class PythonNotation(JSONNotation):
    """Python's literals, as far as they are JSON's as well (parsers read `true`, `false` and `null` too).

    The server is handed scalars only: strings of its JSON may be written in ways that mean something else in Python.
    """

    def string(self, schema: Schema) -> Element:
        """Return what matches a string; Python has no escape for `/`."""
        if "pattern" in schema.value:
            raise schema.unsupported("a grammar of this format cannot hold a string to a pattern")
        return json_string(schema.value.get("minLength", 0), schema.value.get("maxLength"), escapes='["\\\\bfnrt]')

    def anything(self, schema: Schema) -> Element:
        """Return what matches a single value."""
        return either([json_value(_SCALAR, 0), self.string(schema.at({}))])

    def as_a_whole(self, schema: Schema) -> Element | None:
        """Return nothing: lists and objects are spelled out."""
        return None


class GemmaNotation(Notation):
    """Gemma 4's: `{path:<|"|>a.txt<|"|>,lines:3}`, keys in alphabetical order."""

    QUOTE = '<|"|>'

    def string(self, schema: Schema) -> Element:
        """Return what matches a string between its marks."""
        return sequence(self.QUOTE, text(schema, (self.QUOTE,)), self.QUOTE)

    def array(self, item: Element, least: int, most: int | None) -> Element:
        """Return what matches a list."""
        return sequence("[", separated(item, ",", least, most), "]")

    def object(self, properties: Sequence[tuple[Property, Element]]) -> Element:
        """Return what matches an object, sorted as the chat template does."""
        parts = []
        for found, value in sorted(properties, key=lambda item: item[0].name.lower()):
            if not found.name or set(found.name) & set(":,{}[]<>\n"):
                raise found.schema.unsupported(f"the format cannot write the key {found.name!r}")
            parts.append((sequence(f"{found.name}:", value), found.required))
        return sequence("{", members(parts, ","), "}")

    def anything(self, schema: Schema) -> Element:
        """Return what matches a single value."""
        scalar = json_value(_SCALAR, 0)
        return either([sequence(self.QUOTE, free_text((self.QUOTE,)), self.QUOTE), scalar])

    def constant(self, value: Any, schema: Schema) -> Element:
        """Return what matches a constant."""
        if isinstance(value, (list, dict)):
            raise schema.unsupported("a grammar of this format cannot hold a list or an object as a constant")
        if not isinstance(value, str):
            return literal(constant_text(value))
        return sequence(self.QUOTE, constant(value, (self.QUOTE,), schema), self.QUOTE)


class ElementNotation(Notation):
    """MiniMax M3's: elements in each other, those of a list called `item`."""

    TOKEN = "]<]minimax[>["

    def string(self, schema: Schema) -> Element:
        """Return what matches a string."""
        return text(schema, (self.TOKEN,))

    def array(self, item: Element, least: int, most: int | None) -> Element:
        """Return what matches the items of a list."""
        return repeated(self.element("item", item), least, most)

    def object(self, properties: Sequence[tuple[Property, Element]]) -> Element:
        """Return what matches the elements of an object."""
        parts = []
        for found, value in properties:
            if not found.name or found.name.startswith("/") or set(found.name) & set("<>\n"):
                raise found.schema.unsupported(f"the format cannot write the key {found.name!r}")
            parts.append((self.element(found.name, value), found.required))
        return members(parts)

    def anything(self, schema: Schema) -> Element:
        """Return what matches a text."""
        return free_text((self.TOKEN,))

    def constant(self, value: Any, schema: Schema) -> Element:
        """Return what matches a constant."""
        if isinstance(value, (list, dict)):
            raise schema.unsupported("a grammar of this format cannot hold a list or an object as a constant")
        return constant(value if isinstance(value, str) else constant_text(value), (self.TOKEN,), schema)

    def element(self, name: str, content: Element) -> Element:
        """Return what matches an element."""
        return sequence(f"{self.TOKEN}<{name}>", content, f"{self.TOKEN}</{name}>")


def separated(item: Element, separator: Element | str, least: int, most: int | None) -> Element:
    """Return what matches `least` to `most` items with a separator between them."""
    if most == 0:
        return literal("")
    more = repeated(sequence(separator, item), max(least - 1, 0), None if most is None else max(most, 1) - 1)
    some = item if most == 1 else sequence(item, more)
    return some if least else optional(some)


def text(schema: Schema, excludes: Sequence[str]) -> Element:
    """Return what matches the text of a string that stands between marks and is not escaped."""
    if "pattern" in schema.value:
        return matching(schema.value["pattern"])
    return free_text(excludes, schema.value.get("minLength", 0), schema.value.get("maxLength"))


def constant(value: str, excludes: Sequence[str], schema: Schema) -> Element:
    """Return what matches a constant text that stands between marks.

    Raises:
        NotImplementedError: A mark stands in it.
    """
    if any(mark in value for mark in excludes):
        raise schema.unsupported(f"the format cannot write the value {value!r}")
    return literal(value)


def string_value(schema: Schema, excludes: Sequence[str]) -> Element | None:
    """Return what matches the strings that a schema allows, as plain text between marks; None if it allows none."""
    found = []
    for option in alternatives(schema):
        if (values := constants(option)) is not None:
            found += [constant(value, excludes, option) for value in values if isinstance(value, str)]
        elif is_string(option):
            found.append(text(option, excludes))
        elif option.value.get("type") is None:
            found.append(free_text(excludes))
    return either(found) if found else None


def other_values(schema: Schema) -> dict[str, Element]:
    """Return what matches the values of a schema that are no strings, as JSON, by their JSON type."""
    found: dict[str, list[Element]] = {}
    notation = JSONNotation()

    def add(kind: str, element: Element) -> None:
        found.setdefault("number" if kind == "integer" else kind, []).append(element)

    for option in alternatives(schema):
        kind = option.value.get("type")
        if (values := constants(option)) is not None:
            for value in values:
                if not isinstance(value, str):
                    add(_json_type(value), literal(constant_text(value)))
        elif kind is None:
            for any_kind in _NOT_A_STRING["type"]:
                add(any_kind, json_value({"type": any_kind}))
        elif kind != "string":
            add(kind, notation.value(option))
    return {kind: either(elements) for kind, elements in found.items()}


def plain_value(schema: Schema, excludes: Sequence[str], *, python_spellings: bool = False) -> Element:
    """Return what matches a value as plain text between marks, its type left to the schema.

    Args:
        schema: The schema.
        excludes: Marks that no string may hold.
        python_spellings: `True`, `False` and `None` too, which some chat templates write.
    """
    strings, others = string_value(schema, excludes), other_values(schema)
    if strings is not None and strings["type"] == "any_text" and "max_chars" not in strings:
        return strings  # any other value is such a text as well
    spellings = [
        word for kind, words in _PYTHON_SPELLINGS.items() if python_spellings and kind in others for word in words
    ]
    if strings is not None or any(constants(option) is not None for option in alternatives(schema)):
        spellings = []
    return either([*([strings] if strings is not None else []), *others.values(), *spellings])


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return {int: "number", float: "number", list: "array"}.get(type(value), "object")
