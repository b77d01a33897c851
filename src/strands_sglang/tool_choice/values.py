"""The grammar of argument values, in JSON and in the notations of formats that have their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ..tool_parsers.reading.schemas import same_json
from ..tool_parsers.reading.values import InvalidValueError, typed_value
from .grammar import (
    Element,
    constant_text,
    either,
    free_text,
    json_number,
    json_string,
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
    constants,
    number_bounds,
    object_properties,
    string_pattern,
)

_MOST_VALUES = 5000  # of one grammar; the server would compile more of them for too long
_SPELLED_OUT: dict[str, tuple[str, ...]] = {"boolean": ("true", "false"), "null": ("null",)}
_PYTHON_SPELLINGS = {"boolean": ("True", "False"), "null": ("None",)}
_ANY_TYPE = ("string", "number", "boolean", "null")
"""What stands for a value of any type: objects would have keys that no schema declares."""


class Notation(ABC):
    """How values are written; one object writes one call."""

    def __init__(self) -> None:
        """Begin to count."""
        self._written = 0

    @abstractmethod
    def string(self, schema: Schema) -> Element:
        """Return what matches a string by its schema."""

    @abstractmethod
    def array(self, first: Sequence[Element], item: Element | None, least: int, most: int | None) -> Element:
        """Return what matches a list of the `first` items, or else of `least` to `most` others."""

    @abstractmethod
    def object(self, properties: Sequence[tuple[Property, Element]]) -> Element:
        """Return what matches an object of these properties and their values."""

    @abstractmethod
    def constant(self, value: Any, schema: Schema) -> Element:
        """Return what matches a constant."""

    def value(self, schema: Schema) -> Element:
        """Return what matches a value by its schema.

        Raises:
            NotImplementedError: There is no grammar for that.
        """
        return either([self.alternative(option) for option in alternatives(schema)])

    def alternative(self, schema: Schema) -> Element:
        """Return what matches one of the `alternatives` of a schema.

        Raises:
            NotImplementedError: There is no grammar for that.
        """
        self._written += 1
        if self._written > _MOST_VALUES:
            raise schema.unsupported("the schema is too large for a grammar")
        if (values := constants(schema)) is not None:
            return either([self.constant(value, schema) for value in values])
        kind = schema.value.get("type")
        if kind is None:
            return either([self.alternative(schema.at({"type": name})) for name in _ANY_TYPE])
        if kind == "string":
            return self.string(schema)
        if kind in ("number", "integer"):
            return json_number(number_bounds(schema), whole=kind == "integer")
        if kind == "object":
            return self.object([(found, self.value(found.schema)) for found in object_properties(schema)])
        if kind == "array":
            first, item, least, most = array_items(schema)
            items = None if item is None else self.value(item)
            return self.array([self.value(each) for each in first], items, least, most)
        return either(_SPELLED_OUT[kind])


class JSONNotation(Notation):
    """JSON, spaced as chat templates write it.

    Args:
        space: Most white space at one place of what the server spells out.
    """

    escapes = '["\\\\/bfnrt]'
    """What may follow a backslash; no `u`, which could write half of a surrogate pair."""

    def __init__(self, space: int = 1) -> None:
        """Keep the limit of white space."""
        super().__init__()
        # As templates space JSON, or with any line breaks and indentation.
        self.gap = literal("") if space == 1 else matching(rf"[ \n]{{0,{space}}}")
        self.comma = literal(", ") if space == 1 else sequence(",", self.gap)

    def string(self, schema: Schema) -> Element:
        """Return what matches a JSON string."""
        if (pattern := string_pattern(schema)) is not None:
            return sequence('"', matching(pattern), '"')
        return json_string(*schema.sizes("minLength", "maxLength"), escapes=self.escapes)

    def array(self, first: Sequence[Element], item: Element | None, least: int, most: int | None) -> Element:
        """Return what matches a JSON list."""
        return sequence("[", self.gap, separated(first, item, self.comma, least, most), self.gap, "]")

    def object(self, properties: Sequence[tuple[Property, Element]]) -> Element:
        """Return what matches a JSON object."""
        parts = [(sequence(f"{constant_text(found.name)}: ", value), found.required) for found, value in properties]
        return sequence("{", self.gap, members(parts, self.comma), self.gap, "}")

    def constant(self, value: Any, schema: Schema) -> Element:
        """Return what matches a constant as JSON."""
        return literal(constant_text(value))


class PythonNotation(JSONNotation):
    """Python's literals, as far as they are JSON's as well (parsers read `true`, `false` and `null` too)."""

    escapes = '["\\\\bfnrt]'
    """Python has no escape for `/`."""


class GemmaNotation(Notation):
    """Gemma 4's: `{path:<|"|>a.txt<|"|>,lines:3}`, keys in alphabetical order."""

    QUOTE = '<|"|>'

    def string(self, schema: Schema) -> Element:
        """Return what matches a string between its marks."""
        return sequence(self.QUOTE, text(schema, (self.QUOTE,)), self.QUOTE)

    def array(self, first: Sequence[Element], item: Element | None, least: int, most: int | None) -> Element:
        """Return what matches a list."""
        return sequence("[", separated(first, item, ",", least, most), "]")

    def object(self, properties: Sequence[tuple[Property, Element]]) -> Element:
        """Return what matches an object, sorted as the chat template does."""
        parts = []
        for found, value in sorted(properties, key=lambda item: item[0].name.lower()):
            if not found.name or len(found.name) > 256 or set(found.name) & set(":,{}[]<>\n"):
                raise found.schema.unsupported(f"the format cannot write the key {found.name!r}")
            parts.append((sequence(f"{found.name}:", value), found.required))
        return sequence("{", members(parts, ","), "}")

    def constant(self, value: Any, schema: Schema) -> Element:
        """Return what matches a constant."""
        if isinstance(value, (list, dict)):
            raise schema.unsupported("a grammar of this format cannot hold a list or an object as a constant")
        if not isinstance(value, str):
            return literal(constant_text(value))
        return sequence(self.QUOTE, plain_constant(value, (self.QUOTE,), schema), self.QUOTE)


class ElementNotation(Notation):
    """MiniMax M3's: elements in each other, those of a list called `item`."""

    TOKEN = "]<]minimax[>["

    def value(self, schema: Schema) -> Element:
        """Return what matches a value that the parser reads as the schema has it."""
        options = alternatives(schema)
        nested = [option for option in options if _is_nested(option)]
        if len(nested) > 1 or (nested and any(_is_free_string(option) for option in options)):
            raise schema.unsupported("the format does not tell the alternatives of this schema apart")
        return plain_text(schema, (self.TOKEN,), self.alternative)

    def string(self, schema: Schema) -> Element:
        """Return what matches a string."""
        return text(schema, (self.TOKEN,))

    def array(self, first: Sequence[Element], item: Element | None, least: int, most: int | None) -> Element:
        """Return what matches the items of a list."""
        if item is None:
            return sequence(*(self.element("item", each) for each in first))
        return repeated(self.element("item", item), least, most)

    def object(self, properties: Sequence[tuple[Property, Element]]) -> Element:
        """Return what matches the elements of an object."""
        parts = []
        for found, value in properties:
            if not found.name or found.name.startswith("/") or set(found.name) & set("<>\n"):
                raise found.schema.unsupported(f"the format cannot write the key {found.name!r}")
            parts.append((self.element(found.name, value), found.required))
        return members(parts)

    def constant(self, value: Any, schema: Schema) -> Element:
        """Return what matches a constant."""
        if isinstance(value, (list, dict)):
            raise schema.unsupported("a grammar of this format cannot hold a list or an object as a constant")
        return plain_constant(value if isinstance(value, str) else constant_text(value), (self.TOKEN,), schema)

    def element(self, name: str, content: Element) -> Element:
        """Return what matches an element."""
        return sequence(f"{self.TOKEN}<{name}>", content, f"{self.TOKEN}</{name}>")


def separated(
    first: Sequence[Element], item: Element | None, separator: Element | str, least: int, most: int | None
) -> Element:
    """Return what matches the `first` items, or else `least` to `most` others, with a separator between them."""
    if item is None or most == 0:
        parts = [part for each in first for part in (separator, each)]
        return sequence(*parts[1:])
    more = repeated(sequence(separator, item), max(least - 1, 0), None if most is None else most - 1)
    some = item if most == 1 else sequence(item, more)
    return some if least else optional(some)


def text(schema: Schema, excludes: Sequence[str]) -> Element:
    """Return what matches the text of a string that stands between marks and is not escaped."""
    if (pattern := string_pattern(schema)) is not None:
        return matching(pattern)
    return free_text(excludes, *schema.sizes("minLength", "maxLength"))


def plain_constant(value: str, excludes: Sequence[str], schema: Schema) -> Element:
    """Return what matches a constant text that stands between marks.

    Raises:
        NotImplementedError: A mark stands in it.
    """
    if "\x00" in value or any(mark in value for mark in excludes):
        raise schema.unsupported(f"the format cannot write the value {value!r}")
    return literal(value)


def string_value(schema: Schema, excludes: Sequence[str]) -> Element | None:
    """Return what matches the strings that a schema allows, as plain text between marks; None if it allows none."""
    found = []
    for option in alternatives(schema):
        if (values := constants(option)) is not None:
            found += [plain_constant(value, excludes, option) for value in values if isinstance(value, str)]
        elif _is_free_string(option):
            found.append(text(option, excludes))
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
            for name in _ANY_TYPE[1:]:
                add(name, notation.alternative(option.at({"type": name})))
        elif kind != "string":
            add(kind, notation.alternative(option))
    return {kind: either(elements) for kind, elements in found.items()}


def plain_value(schema: Schema, excludes: Sequence[str], *, python_spellings: bool = False) -> Element:
    """Return what matches a value as plain text between marks, its type left to the schema; the rest is JSON.

    Args:
        schema: The schema.
        excludes: Marks that no string may hold.
        python_spellings: `True`, `False` and `None` too, which some chat templates write.

    Raises:
        NotImplementedError: There is no grammar for that.
    """
    notation = JSONNotation()

    def write(option: Schema) -> Element:
        if (values := constants(option)) is not None:
            return either(
                plain_constant(value, excludes, option) if isinstance(value, str) else constant_text(value)
                for value in values
            )
        if _is_free_string(option):
            return text(option, excludes)
        return notation.alternative(option)

    return plain_text(schema, excludes, write, python_spellings=python_spellings)


def plain_text(
    schema: Schema, excludes: Sequence[str], write: Callable[[Schema], Element], *, python_spellings: bool = False
) -> Element:
    """Return what matches the text of a value that the parser types by the schema.

    Args:
        schema: The schema.
        excludes: Marks that no string may hold.
        write: Returns what matches one of the `alternatives`.
        python_spellings: `True`, `False` and `None` too, where no text can be meant.

    Raises:
        NotImplementedError: The parser would not always read a value that the schema allows.
    """
    options = alternatives(schema)
    for option in options:
        for value in constants(option) or ():
            written = value if isinstance(value, str) else constant_text(value)
            if not _reads(written, value, schema):
                raise schema.unsupported(f"the format cannot tell the value {value!r} from others")
    strings = [option for option in options if _is_free_string(option)]
    others = [option for option in options if not _is_free_string(option)]
    if strings and any(option.value.keys() != {"type"} or _is_nested(option) for option in others):
        raise schema.unsupported("the format does not tell strings from the other values of this schema")
    if any(not option.value or option.value == {"type": "string"} for option in strings):
        return free_text(excludes)  # any other value is such a text as well
    words: list[str] = []
    if python_spellings and not strings and not any(constants(option) is not None for option in options):
        words = [word for option in options for word in _PYTHON_SPELLINGS.get(option.value["type"], ())]
    return either([*map(write, options), *words])


def _reads(written: str, value: Any, schema: Schema) -> bool:
    """Tell whether the parser reads a constant as itself."""
    try:
        found = typed_value(written, schema.value, schema.root)
    except InvalidValueError:
        return False
    return isinstance(found, str) is isinstance(value, str) and same_json(found, value)


def _is_nested(schema: Schema) -> bool:
    return schema.value.get("type") in ("array", "object")


def _is_free_string(schema: Schema) -> bool:
    """Tell whether one of the `alternatives` takes strings that it does not list."""
    return schema.value.get("type", "string") == "string" and constants(schema) is None


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return {int: "number", float: "number", list: "array"}.get(type(value), "object")
