"""Elements of the grammar of a forced call: SGLang's structural tags, as xgrammar reads them.

All elements match characters, never token ids. In xgrammar 0.2, elements that match ids share one cache, which mixes
them up after a server has compiled two grammars with such elements. A mark may thus be sampled as its own token or
spelled with others, so text that was sampled under a grammar must be parsed by its characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..tool_parsers.reading.schemas import allowed_types, same_json, type_name
from ..tool_parsers.reading.values import InvalidValueError, typed_value
from .schemas import (
    Schema,
    TooDeepError,
    alternatives,
    array_items,
    number_bounds,
    object_properties,
    string_pattern,
    undeclared_properties,
)

Element = dict[str, Any]  # a part of a structural tag, which SGLang's documentation calls a format

_CONTROL_CHARACTERS = tuple(f'"\\x{code:02x}"' for code in range(32))  # in EBNF, since a grammar must not contain a NUL
_PLAIN = r'[^"\\\x00-\x1f]'  # characters that JSON strings contain without escapes
_SPECIAL_IN_CLASS = re.compile(r"[\\\]\[^-]")
_MOST_VALUES = 5000  # per grammar; the server would take too long to compile more
_SPELLED_OUT: dict[str, tuple[str, ...]] = {"boolean": ("true", "false"), "null": ("null",)}
_PYTHON_SPELLINGS = {"boolean": ("True", "False"), "null": ("None",)}


def structural_tag(element: Element) -> dict[str, str]:
    """Return the sampling parameters that make a model write an element and stop."""
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": element}, ensure_ascii=False)}


def literal(text: str) -> Element:
    """Return the element that matches exactly this text."""
    return {"type": "const_string", "value": text}


def matching(pattern: str) -> Element:
    """Return the element that matches a whole regular expression."""
    return {"type": "regex", "pattern": pattern} if pattern else literal("")  # the server rejects an empty pattern


def sequence(*parts: Element | str) -> Element:
    """Return the element that matches parts in order; a string matches itself."""
    elements: list[Element] = []
    for found in _flat(parts, "sequence"):
        if elements and found["type"] == elements[-1]["type"] == "const_string":
            elements[-1] = literal(elements[-1]["value"] + found["value"])
        elif found != literal(""):
            elements.append(found)
    return {"type": "sequence", "elements": elements} if len(elements) > 1 else next(iter(elements), literal(""))


def either(options: Iterable[Element | str]) -> Element:
    """Return the element that matches one of the options, without duplicates."""
    elements: list[Element] = []
    for found in _flat(options, "or"):
        if found not in elements:
            elements.append(found)
    if literal("") in elements:  # which the server rejects
        elements.remove(literal(""))
        return optional(either(elements)) if elements else literal("")
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _flat(parts: Iterable[Element | str], kind: str) -> list[Element]:
    """Return parts as elements, with nested sequences or alternatives flattened."""
    elements = [literal(part) if isinstance(part, str) else part for part in parts]
    return list(chain.from_iterable(each["elements"] if each["type"] == kind else [each] for each in elements))


def optional(part: Element | str) -> Element:
    """Return the element that matches a part or nothing."""
    return {"type": "optional", "content": literal(part) if isinstance(part, str) else part}


def repeated(part: Element, least: int, most: int | None) -> Element:
    """Return the element that matches a part `least` to `most` times; None sets no limit."""
    return {"type": "repeat", "min": least, "max": -1 if most is None else most, "content": part}


def free_text(excludes: Sequence[str], least: int = 0, most: int | None = None) -> Element:
    """Return the element that matches `least` to `most` characters without any of `excludes`."""
    rest: Element = {"type": "any_text", "excludes": list(excludes)}
    if most is not None:
        rest["max_chars"] = most - least
    # None of the first characters begins an excluded text, so no excluded text can begin among them.
    firsts = "".join(sorted({_SPECIAL_IN_CLASS.sub(r"\\\g<0>", text[0]) for text in excludes}))
    first = matching(rf"[^{firsts}\x00]{{{least}}}" if least else "")
    return first if most == least else sequence(first, rest)


_INTEGER = "-?(?:0|[1-9][0-9]{0,17})"


def json_number(bounds: Mapping[str, Any] | None = None, *, whole: bool = False) -> Element:
    """Return the element that matches a JSON number, neither infinite nor too long for a reader.

    Args:
        bounds: Schema with a bound on both sides, which the server can match; None for any number.
        whole: Whether to match only integers.
    """
    if bounds is not None:
        return {"type": "json_schema", "json_schema": bounds}
    return matching(_INTEGER if whole else rf"{_INTEGER}(?:\.[0-9]{{1,17}})?(?:[eE][+-]?[0-9]{{1,2}})?")


def json_characters(least: int, most: int | None, escapes: str) -> Element:
    """Return the element that matches `least` to `most` characters of a JSON string.

    xgrammar's own strings may contain a lone surrogate. Those of a bounded length have no escapes, may contain control
    characters, which JSON forbids, and take ten seconds to compile. Here, an escape may count as two characters of a
    bounded length, bytes that are not UTF-8 do not count, and the first `least` characters contain no escape.

    Args:
        least: Fewest characters.
        most: Maximum number of characters; None for no limit.
        escapes: Character class of what may follow a backslash.
    """
    first = matching(f"{_PLAIN}{{{least}}}" if least else "")
    if most == least:
        return first
    if most is None:
        return sequence(first, matching(rf"{_PLAIN}*(?:\\{escapes}{_PLAIN}*)*"))
    excluded = ", ".join(('"\\""', *_CONTROL_CHARACTERS))
    dispatch = f'TagDispatch(("\\\\", escape), loop_after_dispatch=true, excludes=({excluded}))'
    grammar = f"root[max_chars={most - least}] ::= {dispatch}\nescape ::= {escapes}\n"
    return sequence(first, {"type": "grammar", "grammar": grammar})


def members(parts: Sequence[tuple[Element, bool]], separator: Element | str = "") -> Element:
    """Return the element that matches parts in order, of which some are optional.

    Args:
        parts: Each part, and whether it is required.
        separator: Separator of two parts.
    """
    if not separator:
        return sequence(*(part if required else optional(part) for part, required in parts))
    first = next((index for index, (_, required) in enumerate(parts) if required), None)
    if first is None:
        return optional(_some([part for part, _ in parts], separator)) if parts else literal("")
    before = [(sequence(part, separator), False) for part, _ in parts[:first]]
    after = [(sequence(separator, part), required) for part, required in parts[first + 1 :]]
    return members([*before, parts[first], *after])


def _some(parts: Sequence[Element], separator: Element | str) -> Element:
    """Return the element that matches at least one part, in order; in halves, or each would appear once per part."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    left, right = _some(parts[:half], separator), _some(parts[half:], separator)
    return either([sequence(left, optional(sequence(separator, right))), right])


def constant_text(value: Any) -> str:
    """Return a constant in the JSON that chat templates write."""
    return json.dumps(value, ensure_ascii=False)


def json_object(values: Mapping[str, Element | str]) -> Element:
    """Return the element that matches a JSON object with these keys in order, spaced as in chat templates."""
    parts = [(sequence(f"{constant_text(key)}: ", value), True) for key, value in values.items()]
    return sequence("{", members(parts, ", "), "}")


@dataclass(frozen=True)
class Notation:
    """The notation of a format's values; by default JSON, spaced as in chat templates.

    Attributes:
        quote: Text before and after a string.
        escapes: Character class of what may follow a backslash in a string, without `u`, which could write a lone
            surrogate. Empty if strings are not escaped.
        excludes: Marks that a string must not contain if strings are not escaped.
        keys: Pattern of the keys that the format can write; empty if keys are JSON strings.
        member: Text before and after the value of a property, with `{}` for the key.
        item: Text before and after an item of a list.
        brackets: Brackets of a list and of an object.
        comma: Separator of items and of properties.
        gap: White space inside brackets.
        is_sorted: Whether the properties of an object are in alphabetical order.
        is_typed: Whether the parser types text by the schema.
        nested: Notation of lists and objects; None for this notation.
    """

    quote: str = '"'
    escapes: str = '["\\\\/bfnrt]'
    excludes: Sequence[str] = ()
    keys: str = ""
    member: tuple[str, str] = ("{}: ", "")
    item: tuple[str, str] = ("", "")
    brackets: Sequence[str] = ("[]", "{}")
    comma: Element | str = ", "
    gap: Element | str = ""
    is_sorted: bool = False
    is_typed: bool = False
    nested: Notation | None = None

    def value(self, schema: Schema) -> Element:
        """Return the element that matches a value of a schema.

        Raises:
            NotImplementedError: No grammar can express the schema, or the parser could read another value.
        """
        options = alternatives(schema)
        if self.is_typed:
            options = self._distinguishable(schema, options)
        found = []
        too_deep: TooDeepError | None = None
        for option in options:
            try:
                found.append(self.alternative(option))
            except TooDeepError as error:
                too_deep = error
        if too_deep is not None and not found:
            raise too_deep
        return either(found)

    def alternative(self, schema: Schema) -> Element:
        """Return the element that matches one of the `alternatives` of a schema.

        Raises:
            NotImplementedError: No grammar can express the alternative.
        """
        if next(schema.written) > _MOST_VALUES:
            raise schema.unsupported("the schema is too large for a grammar")
        if "enum" in schema.value:
            return either([self._constant(value, schema) for value in schema.value["enum"]])
        kind = schema.value["type"]
        if kind == "string":
            pattern, sizes = string_pattern(schema), schema.sizes("minLength", "maxLength")
            if pattern is not None:
                characters = matching(pattern)
            elif self.escapes:
                characters = json_characters(*sizes, self.escapes)
            else:
                characters = free_text(self.excludes, *sizes)
            return sequence(self.quote, characters, self.quote)
        if kind in ("number", "integer"):
            return json_number(number_bounds(schema), whole=kind == "integer")
        if kind == "array":
            return (self.nested or self)._array(schema)
        if kind == "object":
            return (self.nested or self)._object(schema)
        return either(_SPELLED_OUT[kind])

    def _distinguishable(self, schema: Schema, options: list[Schema]) -> list[Schema]:
        """Return the alternatives of a schema that typed text distinguishes; a free string covers all others."""
        for option in options:
            for value in option.value.get("enum", ()):
                if not _reads(value, schema):
                    raise schema.unsupported(f"the format does not distinguish the value {value!r} from others")
        strings = [option for option in options if option.value.get("type") == "string"]
        nested = [option for option in options if option.value.get("type") in ("array", "object")]
        if len(nested) > 1 and self.nested is None:
            raise schema.unsupported("the format does not distinguish the alternatives of this schema")
        if nested and not strings and "string" in allowed_types(schema.value, schema.root):
            raise schema.unsupported("the format does not distinguish an object or a list without a 'type' from text")
        plain = [option for option in options if option.value.keys() == {"type"} and option not in nested]
        if strings and any(option not in plain and option not in strings for option in options):
            raise schema.unsupported("the format does not distinguish strings from the other values of this schema")
        free = [option for option in strings if option in plain]
        return free[:1] or options

    def _array(self, schema: Schema) -> Element:
        first, item, least, most = array_items(schema)
        begin, end = self.item
        if item is None:
            items = members([(sequence(begin, self.value(each), end), True) for each in first], self.comma)
        else:
            items = self._repeated(begin, item, end, least, most)
        return self._bracketed(self.brackets[0], items)

    def _object(self, schema: Schema) -> Element:
        others = undeclared_properties(schema)
        if others is None or self.keys:
            content = self._declared(schema)
        else:  # a key that is written twice is left to the parser, which rejects it
            begin, end = (around.format("") for around in self.member)
            key = sequence(self.quote, json_characters(0, None, self.escapes), self.quote, begin)
            content = self._repeated(key, others, end, *schema.sizes("minProperties", "maxProperties"))
        return self._bracketed(self.brackets[1], content)

    def _repeated(self, begin: Element | str, inner: Schema, end: str, least: int, most: int | None) -> Element:
        """Return the element that matches `least` to `most` values of a schema, each between `begin` and `end`."""
        if most == 0:
            return literal("")
        try:
            item = sequence(begin, self.value(inner), end)
        except TooDeepError:
            if least:
                raise
            return literal("")
        if not self.comma:
            return repeated(item, least, most)
        more = repeated(sequence(self.comma, item), max(least - 1, 0), None if most is None else most - 1)
        items = item if most == 1 else sequence(item, more)
        return items if least else optional(items)

    def _declared(self, schema: Schema) -> Element:
        properties = object_properties(schema)
        if self.is_sorted:
            properties.sort(key=lambda found: found.name.lower())
        parts = []
        for found in properties:
            key = found.name if self.keys else constant_text(found.name)
            if self.keys and re.fullmatch(self.keys, key) is None:
                raise found.schema.unsupported(f"the format cannot write the key {key!r}")
            begin, end = (around.format(key) for around in self.member)
            try:
                parts.append((sequence(begin, self.value(found.schema), end), found.required))
            except TooDeepError:
                if found.required:
                    raise
        return members(parts, self.comma)

    def _bracketed(self, brackets: str, content: Element) -> Element:
        return sequence(brackets[:1], self.gap, content, self.gap, brackets[1:])

    def _constant(self, value: Any, schema: Schema) -> Element:
        if self.keys and isinstance(value, (list, dict)):
            raise schema.unsupported("a grammar of this format cannot contain a list or an object as a constant")
        if self.escapes or not isinstance(value, str):
            return literal(constant_text(value))
        if "\x00" in value or any(mark in value for mark in self.excludes):
            raise schema.unsupported(f"the format cannot write the value {value!r}")
        return sequence(self.quote, value, self.quote)


JSON = Notation()
INDENTED_JSON = Notation(comma=sequence(",", matching(r"[ \n]{0,32}")), gap=matching(r"[ \n]{0,32}"))
PYTHON = Notation(escapes='["\\\\bfnrt]')  # Python does not escape `/`; parsers read `true`, `false` and `null`


def plain_text(excludes: Sequence[str]) -> Notation:
    """Return the notation of formats that write values as plain text, and lists and objects as JSON."""
    return Notation(quote="", escapes="", excludes=excludes, is_typed=True, nested=JSON)


def plain_value(schema: Schema, excludes: Sequence[str], *, python_spellings: bool = False) -> Element:
    """Return the element that matches a value as plain text, typed by the schema; lists and objects are JSON.

    Args:
        schema: Schema of the value.
        excludes: Marks that a string must not contain.
        python_spellings: Whether `True`, `False` and `None` also match if the value cannot be a string, as some chat
            templates write them.

    Raises:
        NotImplementedError: No grammar can express the schema.
    """
    written = plain_text(excludes).value(schema)
    kinds = [option.value.get("type", "constants") for option in alternatives(schema)]
    if not python_spellings or "string" in kinds or "constants" in kinds:
        return written
    return either([written, *chain.from_iterable(_PYTHON_SPELLINGS.get(kind, ()) for kind in kinds)])


def values_by_type(schema: Schema, excludes: Sequence[str]) -> dict[str, Element]:
    """Return the elements that match the values of a schema, by JSON type; strings are plain text."""
    notation = plain_text(excludes)
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
    """Return whether the parser reads a constant as itself."""
    written = value if isinstance(value, str) else constant_text(value)
    try:
        return same_json(typed_value(written, schema.value, schema.root), value)
    except InvalidValueError:
        return False
