"""The grammar of argument values, in JSON and in the notations of formats that have their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..tool_parsers.reading.schemas import same_json, type_name
from ..tool_parsers.reading.values import InvalidValueError, typed_value
from .grammar import (
    Element,
    constant_text,
    either,
    free_text,
    json_characters,
    json_number,
    literal,
    matching,
    members,
    optional,
    repeated,
    sequence,
)
from .schemas import (
    Property,
    Schema,
    alternatives,
    array_items,
    number_bounds,
    object_properties,
    string_pattern,
)

_MOST_VALUES = 5000  # of one grammar; the server would compile more of them for too long
_SPELLED_OUT: dict[str, tuple[str, ...]] = {"boolean": ("true", "false"), "null": ("null",)}
_PYTHON_SPELLINGS = {"boolean": ("True", "False"), "null": ("None",)}


class JSONNotation:
    """How values are written: JSON, spaced as chat templates write it. One object writes one call."""

    quote = '"'
    colon = ": "
    comma = literal(", ")
    gap = literal("")
    escapes = '["\\\\/bfnrt]'
    """What may follow a backslash; no `u`, which could write half of a surrogate pair."""

    def __init__(self) -> None:
        """Begin to count."""
        self._written = 0

    def value(self, schema: Schema) -> Element:
        """Return what matches a value by its schema.

        Raises:
            NotImplementedError: There is no grammar for that.
        """
        return either(map(self.alternative, alternatives(schema)))

    def alternative(self, schema: Schema) -> Element:
        """Return what matches one of the `alternatives` of a schema.

        Raises:
            NotImplementedError: There is no grammar for that.
        """
        self._written += 1
        if self._written > _MOST_VALUES:
            raise schema.unsupported("the schema is too large for a grammar")
        if "enum" in schema.value:
            return either([self.constant(value, schema) for value in schema.value["enum"]])
        kind = schema.value["type"]
        if kind == "string":
            pattern = string_pattern(schema)
            sizes = schema.sizes("minLength", "maxLength")
            return self.quoted(self.characters(*sizes) if pattern is None else matching(pattern))
        if kind in ("number", "integer"):
            return json_number(number_bounds(schema), whole=kind == "integer")
        if kind == "object":
            return self.object([(found, self.value(found.schema)) for found in object_properties(schema)])
        if kind == "array":
            first, item, least, most = array_items(schema)
            return self.array([*map(self.value, first)], None if item is None else self.value(item), least, most)
        return either(_SPELLED_OUT[kind])

    def quoted(self, content: Element | str) -> Element:
        """Return what matches a string by what matches its characters."""
        return sequence(self.quote, content, self.quote)

    def characters(self, least: int, most: int | None) -> Element:
        """Return what matches a number of characters in a string."""
        return json_characters(least, most, escapes=self.escapes)

    def array(self, first: Sequence[Element], item: Element | None, least: int, most: int | None) -> Element:
        """Return what matches a list of the `first` items, or else of `least` to `most` others."""
        if item is None or most == 0:
            items = members([(each, True) for each in first], self.comma)
        else:
            more = repeated(sequence(self.comma, item), max(least - 1, 0), None if most is None else most - 1)
            items = item if most == 1 else sequence(item, more)
            items = items if least else optional(items)
        return sequence("[", self.gap, items, self.gap, "]")

    def object(self, properties: Sequence[tuple[Property, Element]]) -> Element:
        """Return what matches an object of these properties and their values."""
        parts = [(sequence(f"{self.key(found)}{self.colon}", value), found.required) for found, value in properties]
        return sequence("{", self.gap, members(parts, self.comma), self.gap, "}")

    def key(self, found: Property) -> str:
        """Return the name of a property as it is written."""
        return constant_text(found.name)

    def constant(self, value: Any, schema: Schema) -> Element:
        """Return what matches a constant."""
        return literal(constant_text(value))


class IndentedNotation(JSONNotation):
    """JSON with any line breaks and indentation, of 32 characters at most."""

    gap = matching(r"[ \n]{0,32}")
    comma = sequence(",", gap)


class PythonNotation(JSONNotation):
    """Python's literals, as far as they are JSON's as well (parsers read `true`, `false` and `null` too)."""

    escapes = '["\\\\bfnrt]'
    """Python has no escape for `/`."""


class MarkedNotation(JSONNotation):
    """Strings are not escaped; they stand between marks, none of which they may hold."""

    quote = ""
    excludes: Sequence[str] = ()
    keys = r"(?s:.*)"
    """Pattern of the keys that the notation can write."""

    def characters(self, least: int, most: int | None) -> Element:
        """Return what matches a number of characters in a string."""
        return free_text(self.excludes, least, most)

    def key(self, found: Property) -> str:
        """Return the name of a property as it is written."""
        if re.fullmatch(self.keys, found.name) is None:
            raise found.schema.unsupported(f"the format cannot write the key {found.name!r}")
        return found.name

    def constant(self, value: Any, schema: Schema) -> Element:
        """Return what matches a constant."""
        if isinstance(value, (list, dict)):
            raise schema.unsupported("a grammar of this format cannot hold a list or an object as a constant")
        if not isinstance(value, str):
            return super().constant(value, schema)
        if "\x00" in value or any(mark in value for mark in self.excludes):
            raise schema.unsupported(f"the format cannot write the value {value!r}")
        return self.quoted(value)


class GemmaNotation(MarkedNotation):
    """Gemma 4's: `{path:<|"|>a.txt<|"|>,lines:3}`, keys in alphabetical order."""

    quote = '<|"|>'
    excludes = (quote,)
    colon = ":"
    comma = literal(",")
    keys = r"[^:,{}\[\]<>\n]{1,256}"

    def object(self, properties: Sequence[tuple[Property, Element]]) -> Element:
        """Return what matches an object, sorted as the chat template does."""
        return super().object(sorted(properties, key=lambda item: item[0].name.lower()))


class TypedNotation(MarkedNotation):
    """Text between marks that the parser types by the schema."""

    def value(self, schema: Schema) -> Element:
        """Return what matches a value that the parser reads as the schema has it.

        Raises:
            NotImplementedError: There is no grammar for that, or the parser would not always read what it lets through.
        """
        options = alternatives(schema)
        for option in options:
            for value in option.value.get("enum", ()):
                if not _reads(value, schema):
                    raise schema.unsupported(f"the format cannot tell the value {value!r} from others")
        strings = [option for option in options if option.value.get("type") == "string"]
        others = [option for option in options if option.value.get("type") != "string"]
        if strings and any(option.value.keys() != {"type"} or _is_nested(option) for option in others):
            raise schema.unsupported("the format does not tell strings from the other values of this schema")
        if any(option.value == {"type": "string"} for option in strings):
            return free_text(self.excludes)  # any other value is such a text as well
        return either(map(self.alternative, options))


class PlainNotation(TypedNotation):
    """Lists and objects are JSON, all else is plain text.

    Args:
        excludes: Marks that no string may hold.
    """

    def __init__(self, excludes: Sequence[str]) -> None:
        """Keep the marks."""
        super().__init__()
        self.excludes = excludes
        self._json = JSONNotation()

    def alternative(self, schema: Schema) -> Element:
        """Return what matches one of the `alternatives` of a schema."""
        return self._json.alternative(schema) if _is_nested(schema) else super().alternative(schema)

    def constant(self, value: Any, schema: Schema) -> Element:
        """Return what matches a constant."""
        if isinstance(value, (list, dict)):
            return self._json.constant(value, schema)
        return super().constant(value, schema)


class ElementNotation(TypedNotation):
    """MiniMax M3's: elements in each other, those of a list called `item`."""

    TOKEN = "]<]minimax[>["
    excludes = (TOKEN,)
    keys = r"(?!/)[^<>\n]+"

    def value(self, schema: Schema) -> Element:
        """Return what matches a value that the parser reads as the schema has it."""
        if sum(map(_is_nested, alternatives(schema))) > 1:
            raise schema.unsupported("the format does not tell the alternatives of this schema apart")
        return super().value(schema)

    def array(self, first: Sequence[Element], item: Element | None, least: int, most: int | None) -> Element:
        """Return what matches the items of a list."""
        if item is None:
            return sequence(*(self.element("item", each) for each in first))
        return repeated(self.element("item", item), least, most)

    def object(self, properties: Sequence[tuple[Property, Element]]) -> Element:
        """Return what matches the elements of an object."""
        return members([(self.element(self.key(found), value), found.required) for found, value in properties])

    def element(self, name: str, content: Element) -> Element:
        """Return what matches an element."""
        return sequence(f"{self.TOKEN}<{name}>", content, f"{self.TOKEN}</{name}>")


def plain_value(schema: Schema, excludes: Sequence[str], *, python_spellings: bool = False) -> Element:
    """Return what matches a value as plain text between marks, its type left to the schema; the rest is JSON.

    Args:
        schema: The schema.
        excludes: Marks that no string may hold.
        python_spellings: `True`, `False` and `None` too, which some chat templates write, where no text can be meant.

    Raises:
        NotImplementedError: There is no grammar for that.
    """
    written = PlainNotation(excludes).value(schema)
    kinds = [option.value.get("type", "constants") for option in alternatives(schema)]
    if not python_spellings or "string" in kinds or "constants" in kinds:
        return written
    return either([written, *(word for kind in kinds for word in _PYTHON_SPELLINGS.get(kind, ()))])


def values_by_type(schema: Schema, excludes: Sequence[str]) -> dict[str, Element]:
    """Return what matches the values of a schema by their JSON type: strings as plain text between marks, or JSON."""
    notation = PlainNotation(excludes)
    found: dict[str, list[Element]] = {}
    for option in alternatives(schema):
        constants: dict[str, list[Any]] = {}
        for value in option.value.get("enum", ()):
            constants.setdefault(type_name(value), []).append(value)
        typed = {kind: option.at({"enum": values}) for kind, values in constants.items()}
        for kind, part in (typed or {option.value["type"]: option}).items():
            found.setdefault("number" if kind == "integer" else kind, []).append(notation.alternative(part))
    return {kind: either(elements) for kind, elements in found.items()}


def _reads(value: Any, schema: Schema) -> bool:
    """Tell whether the parser reads a constant as itself."""
    written = value if isinstance(value, str) else constant_text(value)
    try:
        return same_json(typed_value(written, schema.value, schema.root), value)
    except InvalidValueError:
        return False


def _is_nested(schema: Schema) -> bool:
    return schema.value.get("type") in ("array", "object")
