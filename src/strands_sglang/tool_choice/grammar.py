"""The pieces of which the grammar of a forced call is made: SGLang's structural tags, as xgrammar reads them.

Everything matches characters, never token ids. The elements that match ids share one cache in xgrammar 0.2, which
confuses them once a server has compiled two grammars that have some; so a mark may be sampled as its own token or
spelled with others, and what was sampled under such a grammar has to be parsed by its characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..tool_parsers.reading.values import InvalidValueError, same_json, type_name, typed_value
from .schemas import Schema, alternatives, array_items, number_bounds, object_properties, string_pattern

Element = dict[str, Any]  # a part of a structural tag: what SGLang's documentation calls a format

_CONTROL_CHARACTERS = tuple(f'"\\x{code:02x}"' for code in range(32))  # EBNF, since a grammar must not hold a real NUL
_PLAIN = r'[^"\\\x00-\x1f]'  # characters that JSON strings hold as they are
_SPECIAL_IN_CLASS = re.compile(r"[\\\]\[^-]")
_MOST_VALUES = 5000  # of one grammar; the server would compile more of them for too long
_SPELLED_OUT: dict[str, tuple[str, ...]] = {"boolean": ("true", "false"), "null": ("null",)}
_PYTHON_SPELLINGS = {"boolean": ("True", "False"), "null": ("None",)}


def structural_tag(element: Element) -> dict[str, str]:
    """Return the sampling parameters that make a model write this and stop."""
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": element}, ensure_ascii=False)}


def literal(text: str) -> Element:
    """Return what matches exactly this text."""
    return {"type": "const_string", "value": text}


def matching(pattern: str) -> Element:
    """Return what matches a regular expression as a whole."""
    return {"type": "regex", "pattern": pattern} if pattern else literal("")  # the server takes no empty pattern


def sequence(*parts: Element | str) -> Element:
    """Return what matches its parts in order; a string stands for itself."""
    elements: list[Element] = []
    for found in _flat(parts, "sequence"):
        if elements and found["type"] == elements[-1]["type"] == "const_string":
            elements[-1] = literal(elements[-1]["value"] + found["value"])
        elif found != literal(""):
            elements.append(found)
    return {"type": "sequence", "elements": elements} if len(elements) > 1 else next(iter(elements), literal(""))


def either(options: Iterable[Element | str]) -> Element:
    """Return what matches one of the options; the same option twice counts once."""
    elements: list[Element] = []
    for found in _flat(options, "or"):
        if found not in elements:
            elements.append(found)
    if literal("") in elements:  # which the server takes for a mistake
        elements.remove(literal(""))
        return optional(either(elements)) if elements else literal("")
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _flat(parts: Iterable[Element | str], kind: str) -> list[Element]:
    """Return the parts of a sequence or of alternatives, with those of parts that are such themselves."""
    elements = [literal(part) if isinstance(part, str) else part for part in parts]
    return [found for each in elements for found in (each["elements"] if each["type"] == kind else [each])]


def optional(part: Element | str) -> Element:
    """Return what matches a part or nothing."""
    return {"type": "optional", "content": literal(part) if isinstance(part, str) else part}


def repeated(part: Element, least: int, most: int | None) -> Element:
    """Return what matches a part `least` to `most` times (None: without limit)."""
    return {"type": "repeat", "min": least, "max": -1 if most is None else most, "content": part}


def free_text(excludes: Sequence[str], least: int = 0, most: int | None = None) -> Element:
    """Return what matches any text of `least` to `most` characters that holds none of `excludes`."""
    rest: Element = {"type": "any_text", "excludes": list(excludes)}
    if most is not None:
        rest["max_chars"] = most - least
    # The first characters begin none of the excluded texts, so that none of those can begin among them.
    firsts = "".join(sorted({_SPECIAL_IN_CLASS.sub(r"\\\g<0>", text[0]) for text in excludes}))
    first = matching(rf"[^{firsts}\x00]{{{least}}}" if least else "")
    return first if most == least else sequence(first, rest)


_INTEGER = "-?(?:0|[1-9][0-9]{0,17})"


def json_number(bounds: Mapping[str, Any] | None = None, *, whole: bool = False) -> Element:
    """Return what matches a JSON number that is neither infinite nor too long for any reader.

    Args:
        bounds: A schema with a bound on either side, which the server knows how to match; None for any number.
        whole: An integer.
    """
    if bounds is not None:
        return {"type": "json_schema", "json_schema": bounds}
    return matching(_INTEGER if whole else rf"{_INTEGER}(?:\.[0-9]{{1,17}})?(?:[eE][+-]?[0-9]{{1,2}})?")


def json_characters(least: int, most: int | None, escapes: str) -> Element:
    """Return what matches `least` to `most` characters of a JSON string.

    xgrammar's own strings may hold half of a surrogate pair, and those of a bounded length have no escapes, may hold
    control characters, which JSON forbids, and take ten seconds to compile. Where the length is bounded here, an escape
    may use up two of the characters, and bytes that are no UTF-8 count as none. An escape never stands among the first
    `least`.

    Args:
        least: Fewest characters.
        most: Most characters; None for no limit.
        escapes: What may follow a backslash, as a class of characters.
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
    """Return what matches parts in order, those that are not required perhaps left out.

    Args:
        parts: Every part, and whether it is required.
        separator: What stands between two of them.
    """
    if not separator:
        return sequence(*(part if required else optional(part) for part, required in parts))
    first = next((index for index, (_, required) in enumerate(parts) if required), None)
    if first is None:
        return optional(_some([part for part, _ in parts], separator)) if parts else literal("")
    before = [(sequence(part, separator), False) for part, _ in parts[:first]]
    behind = [(sequence(separator, part), required) for part, required in parts[first + 1 :]]
    return members([*before, parts[first], *behind])


def _some(parts: Sequence[Element], separator: Element | str) -> Element:
    """Return what matches at least one of the parts, in order; in halves, or each would be there once per part."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    left, right = _some(parts[:half], separator), _some(parts[half:], separator)
    return either([sequence(left, optional(sequence(separator, right))), right])


def constant_text(value: Any) -> str:
    """Return a constant as chat templates write it in JSON."""
    return json.dumps(value, ensure_ascii=False)


def json_object(values: Mapping[str, Element | str]) -> Element:
    """Return what matches a JSON object with these keys in this order, spaced as chat templates do."""
    parts = [(sequence(f"{constant_text(key)}: ", value), True) for key, value in values.items()]
    return sequence("{", members(parts, ", "), "}")


@dataclass(frozen=True)
class Notation:
    """How a format writes values; without arguments as JSON, spaced as chat templates write it.

    Attributes:
        quote: What stands on both sides of a string.
        escapes: What may follow a backslash in a string, as a class of characters; no `u`, which could write half of a
            surrogate pair. Empty where strings are not escaped.
        excludes: Marks that no string may hold where strings are not escaped.
        keys: Pattern of the keys that can be written, as they are; empty where keys are JSON strings.
        member: What stands around the value of an object's property, with `{}` for the key.
        item: What stands around an item of a list.
        brackets: What stands around a list and around an object.
        comma: What stands between items and between properties.
        gap: White space inside of brackets.
        is_sorted: The properties of an object are in alphabetical order.
        is_typed: The parser types text by the schema.
        nested: What lists and objects are written in; None for the same notation.
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
        """Return what matches a value by its schema.

        Raises:
            NotImplementedError: There is no grammar for that, or the parser would not always read what it lets through.
        """
        options = alternatives(schema)
        if self.is_typed:
            options = self._told_apart(schema, options)
        return either(map(self.alternative, options))

    def alternative(self, schema: Schema) -> Element:
        """Return what matches one of the `alternatives` of a schema.

        Raises:
            NotImplementedError: There is no grammar for that.
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

    def _told_apart(self, schema: Schema, options: list[Schema]) -> list[Schema]:
        """Return the alternatives of a schema that a typed text is one of; any other value is a free text as well."""
        for option in options:
            for value in option.value.get("enum", ()):
                if not _reads(value, schema):
                    raise schema.unsupported(f"the format cannot tell the value {value!r} from others")
        strings = [option for option in options if option.value.get("type") == "string"]
        nested = [option for option in options if option.value.get("type") in ("array", "object")]
        if len(nested) > 1 and self.nested is None:
            raise schema.unsupported("the format does not tell the alternatives of this schema apart")
        plain = [option for option in options if option.value.keys() == {"type"} and option not in nested]
        if strings and any(option not in plain and option not in strings for option in options):
            raise schema.unsupported("the format does not tell strings from the other values of this schema")
        free = [option for option in strings if option in plain]
        return free[:1] or options

    def _array(self, schema: Schema) -> Element:
        first, item, least, most = array_items(schema)
        begin, end = self.item
        one = literal("") if item is None else sequence(begin, self.value(item), end)
        if item is None or most == 0:
            items = members([(sequence(begin, self.value(each), end), True) for each in first], self.comma)
        elif not self.comma:
            items = repeated(one, least, most)
        else:
            more = repeated(sequence(self.comma, one), max(least - 1, 0), None if most is None else most - 1)
            items = one if most == 1 else sequence(one, more)
            items = items if least else optional(items)
        return self._bracketed(self.brackets[0], items)

    def _object(self, schema: Schema) -> Element:
        properties = object_properties(schema)
        if self.is_sorted:
            properties.sort(key=lambda found: found.name.lower())
        parts = []
        for found in properties:
            key = found.name if self.keys else constant_text(found.name)
            if self.keys and re.fullmatch(self.keys, key) is None:
                raise found.schema.unsupported(f"the format cannot write the key {key!r}")
            begin, end = (around.format(key) for around in self.member)
            parts.append((sequence(begin, self.value(found.schema), end), found.required))
        return self._bracketed(self.brackets[1], members(parts, self.comma))

    def _bracketed(self, brackets: str, content: Element) -> Element:
        return sequence(brackets[:1], self.gap, content, self.gap, brackets[1:])

    def _constant(self, value: Any, schema: Schema) -> Element:
        if self.keys and isinstance(value, (list, dict)):
            raise schema.unsupported("a grammar of this format cannot hold a list or an object as a constant")
        if self.escapes or not isinstance(value, str):
            return literal(constant_text(value))
        if "\x00" in value or any(mark in value for mark in self.excludes):
            raise schema.unsupported(f"the format cannot write the value {value!r}")
        return sequence(self.quote, value, self.quote)


JSON = Notation()
INDENTED_JSON = Notation(comma=sequence(",", matching(r"[ \n]{0,32}")), gap=matching(r"[ \n]{0,32}"))
PYTHON = Notation(escapes='["\\\\bfnrt]')  # no escape for `/`; parsers read `true`, `false` and `null` too


def plain_text(excludes: Sequence[str]) -> Notation:
    """Return the notation of formats that write a value as plain text between marks, lists and objects as JSON."""
    return Notation(quote="", escapes="", excludes=excludes, is_typed=True, nested=JSON)


def plain_value(schema: Schema, excludes: Sequence[str], *, python_spellings: bool = False) -> Element:
    """Return what matches a value as plain text between marks, its type left to the schema; the rest is JSON.

    Args:
        schema: The schema.
        excludes: Marks that no string may hold.
        python_spellings: `True`, `False` and `None` too, which some chat templates write, where no text can be meant.

    Raises:
        NotImplementedError: There is no grammar for that.
    """
    written = plain_text(excludes).value(schema)
    kinds = [option.value.get("type", "constants") for option in alternatives(schema)]
    if not python_spellings or "string" in kinds or "constants" in kinds:
        return written
    return either([written, *(word for kind in kinds for word in _PYTHON_SPELLINGS.get(kind, ()))])


def values_by_type(schema: Schema, excludes: Sequence[str]) -> dict[str, Element]:
    """Return what matches the values of a schema by their JSON type: strings as plain text between marks, or JSON."""
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
    """Tell whether the parser reads a constant as itself."""
    written = value if isinstance(value, str) else constant_text(value)
    try:
        return same_json(typed_value(written, schema.value, schema.root), value)
    except InvalidValueError:
        return False
