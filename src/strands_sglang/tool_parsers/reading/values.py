"""Argument values as the model wrote them: strict JSON, text typed by a tool's JSON schema, and Python literals.

JSON: nothing is repaired or guessed. Values are rejected, with the reason, if they are ambiguous (a duplicate key), not
JSON (`NaN`), or cannot be passed to a tool (a lone surrogate, a number that overflows, very deep nesting).

Python: literals and keyword arguments are read; nothing is evaluated. Python's own parser needs seconds for a hostile
megabyte and warns about invalid escapes, so this module has its own.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

from ...exceptions import PortableError
from .schemas import allowed_types, listed_values, same_json, type_name

MAX_JSON_DEPTH = 64
"""Deepest nesting of lists and objects. Agents copy their history recursively and would fail on deeper values."""

_FIRST_WINDOW = 1024
# A window that ends inside a literal, a number or an escape fails at most this many characters before its end.
_CUT_MARGIN = 16
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
# Qwen3-Coder's chat template writes these values with Python's `str`. JSON's spellings are read too.
_TEMPLATE_LITERALS: dict[str, Any] = {"True": True, "False": False, "None": None}


class InvalidValueError(PortableError, ValueError):
    """A value was rejected; the message completes "the arguments are not valid: ...".

    Attributes:
        position: Position where reading the value failed, as an index into the text.
        is_open: Whether a string is not closed.
    """

    def __init__(self, message: str, position: int, *, is_open: bool = False) -> None:
        """Store the facts with the message."""
        super().__init__(message)
        self.position = position
        self.is_open = is_open


class DecodedJSON(NamedTuple):
    """A JSON value, its end in the text, and a problem with the value despite its correct syntax."""

    value: Any
    end: int
    problem: str | None


def decode_json(text: str, start: int = 0) -> DecodedJSON:
    """Decode the JSON value that begins at `start`, and ignore the text after it.

    The work is linear in the length of the value, or of its readable part, not in the length of the text.

    Raises:
        InvalidValueError: There is no JSON value at `start`.
    """
    window = _FIRST_WINDOW
    while True:
        # Decode a slice: for every error, the decoder counts lines from the start of its text.
        cut = text[start : start + window]
        whole = start + window >= len(text)
        try:
            value, end, problem = _DECODER.decode(cut)
        except json.JSONDecodeError as error:
            is_open = error.msg.startswith("Unterminated")  # the standard library tells it by no other means
            if whole or not (is_open or error.pos >= len(cut) - _CUT_MARGIN):
                message = error.msg[:1].lower() + error.msg[1:]
                raise InvalidValueError(message, start + error.pos, is_open=is_open) from None
        except RecursionError:
            raise InvalidValueError("it is nested too deeply", start) from None
        else:
            if whole or end < len(cut) - _CUT_MARGIN:
                return DecodedJSON(value, start + end, problem or _value_problem(value, cut[:end]))
        window *= 4


def strict_json(text: str) -> Any:
    """Return the value of a text that is one JSON value, with optional white space around it.

    Raises:
        InvalidValueError: The text is not JSON, or this module rejects the value.
    """
    start = skip_space(text, 0)
    decoded = decode_json(text, start)
    end = skip_space(text, decoded.end)
    if end != len(text):
        raise InvalidValueError("text follows the JSON value", end)
    if decoded.problem is not None:
        raise InvalidValueError(decoded.problem, start)
    return decoded.value


_SPACE = re.compile(r"[ \t\n\r]*")  # JSON's definition of white space


def skip_space(text: str, position: int) -> int:
    """Return the position of the first character at or after `position` that is not white space."""
    match = _SPACE.match(text, position)
    return match.end() if match is not None else position


def typed_value(text: str, schema: Any, root: Any = None) -> Any:
    """Return the value of an untyped text, by the JSON schema of its parameter.

    - The schema declares a string: the value is the text.
    - The schema allows strings among other types, or is unknown: text that is JSON of another allowed type is decoded,
      unless the schema lists the text as a constant and not the decoded value. Any other text is the value.
    - The schema allows no strings: the text must be JSON of a declared type. `True`, `False` and `None` are accepted,
      because chat templates write them.

    Args:
        text: Text of the value.
        schema: Schema of the parameter; None if unknown.
        root: Schema that references point into.

    Raises:
        InvalidValueError: The text is not a value of a declared type.
    """
    types = allowed_types(schema, root)
    if types == {"string"}:
        return text
    try:
        if "string" not in types and text.strip() in _TEMPLATE_LITERALS:
            value = _TEMPLATE_LITERALS[text.strip()]
        else:
            value = strict_json(text)
    except InvalidValueError as error:
        if "string" in types:
            return text
        raise InvalidValueError(f"it must be {_one_of(types)}, but {error}", error.position) from None
    if isinstance(value, str) or type_name(value) not in types:
        if "string" in types:
            return text
        raise InvalidValueError(f"it must be {_one_of(types)}", 0)
    if "string" in types and text in (listed := listed_values(schema, root)):
        return value if any(same_json(value, other) for other in listed) else text
    return value


_TYPE_WORDS = {"integer": "an integer", "array": "an array", "object": "an object", "null": "null"}


def _one_of(types: frozenset[str]) -> str:
    named = types - {"integer"} if "number" in types else types
    return " or ".join(_TYPE_WORDS.get(name, f"a {name}") for name in sorted(named))


class _RecordingDecoder(threading.local):
    """A decoder that records problems and continues, so that the end of the value is always known; per thread."""

    def __init__(self) -> None:
        self._problems: list[str] = []
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._take_pairs,
            parse_constant=lambda name: self._problems.append(f"{name} is not JSON"),
            parse_float=self._take_float,
            parse_int=self._take_int,
        )

    def decode(self, text: str) -> tuple[Any, int, str | None]:
        """Return the value at the start of `text`, its end, and its first problem."""
        self._problems.clear()
        value, end = self._decoder.raw_decode(text)
        return value, end, self._problems[0] if self._problems else None

    def _take_pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        taken = dict(pairs)
        if len(taken) != len(pairs):
            keys = Counter(key for key, _ in pairs)
            self._problems.append(f"the key {shorten(keys.most_common(1)[0][0])} appears more than once")
        return taken

    def _take_float(self, digits: str) -> float:
        number = float(digits)
        if math.isinf(number):
            self._problems.append(f"the number {shorten(digits)} is too large")
        return number

    def _take_int(self, digits: str) -> int:
        try:
            return int(digits)
        except ValueError:  # more digits than Python converts
            self._problems.append(f"the number {shorten(digits)} is too large")
            return 0


_DECODER = _RecordingDecoder()


def _value_problem(value: Any, text: str) -> str | None:
    """Return the problem with a value whose syntax is correct; None if there is none."""
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _is_deeper(value, MAX_JSON_DEPTH):
        return "it is nested too deeply"
    if _SURROGATE_ESCAPE.search(text) is not None:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return "a string contains a lone surrogate"
    return None


def _is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects are nested more than `depth` levels deep."""
    level = [value]
    for _ in range(depth):
        inside = chain.from_iterable(outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [inner for inner in inside if isinstance(inner, (dict, list))]
        if not level:
            return False
    return True


def shorten(text: str, limit: int = 60) -> str:
    """Return the `repr` of the first `limit` characters of a text."""
    return repr(text) if len(text) <= limit else repr(text[:limit]) + "..."


_NAMES: dict[str, Any] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)\Z")
_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![0-9A-Za-z_.])")
_SIMPLE_ITEM = re.compile(
    r"""(?:(-?(?:0|[1-9][0-9]{0,17}))|"([^"\\\n]*)"|'([^'\\\n]*)'|(-?[0-9]{1,17}\.[0-9]{0,17}|-?\.[0-9]{1,17})"""
    r"""|(\[\])|(\{\}))[ \t\n\r]*,[ \t\n\r]*"""
)
_SIMPLE_VALUE: tuple[Callable[[str], Any], ...] = (str, int, str, str, float, lambda _: [], lambda _: {})
_STRINGS = {
    quote: re.compile(rf"{quote}([^{quote[0]}\\{line}]*(?:(?:\\.{inner})[^{quote[0]}\\{line}]*)*){quote}", re.DOTALL)
    for quote, line, inner in (
        ('"""', "", '|"(?!"")'),
        ("'''", "", "|'(?!'')"),
        ('"', r"\n", ""),
        ("'", r"\n", ""),
    )
}
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_ESCAPED.update({character: character for character in "\\'\""})


def read_literal(text: str, position: int, depth: int = MAX_JSON_DEPTH) -> tuple[Any, int]:
    """Return the Python literal that begins at `position`, and its end.

    Strings, numbers, lists, dicts with string keys, `True`, `False` and `None`, in Python's or JSON's spelling.

    Raises:
        InvalidValueError: There is no literal at `position`, or JSON cannot represent it.
    """
    first = text[position : position + 1]
    if first in ('"', "'"):
        return _read_string(text, position)
    if first in ("[", "{"):
        if depth == 0:
            raise InvalidValueError("it is nested too deeply", position)
        return _read_list(text, position, depth) if first == "[" else _read_dict(text, position, depth)
    if (number := _NUMBER.match(text, position)) is not None:
        return _number(number.group(), position), number.end()
    if (name := _NAME.match(text, position)) is not None and name.group() in _NAMES:
        return _NAMES[name.group()], name.end()
    raise InvalidValueError("expected a literal", position)


def json_or_python(text: str, start: int = 0) -> DecodedJSON:
    """Return the value at `start`, read as JSON or else as a Python literal.

    Raises:
        InvalidValueError: There is neither at `start`.
    """
    try:
        return decode_json(text, start)
    except InvalidValueError:
        value, end = read_literal(text, start)
        return DecodedJSON(value, end, None)


def read_arguments(text: str, position: int) -> tuple[dict[str, Any], int]:
    """Return the keyword arguments of a call from the position after `(`, and the position after `)`.

    Raises:
        InvalidValueError: The arguments are not `name=literal` pairs, or a name appears more than once.
    """
    arguments: dict[str, Any] = {}
    position = skip_space(text, position)
    while not text.startswith(")", position):
        name = _NAME.match(text, position)
        if name is None:
            raise InvalidValueError("arguments must be written as name=value", position)
        if name.group() in arguments:
            raise InvalidValueError(f"the argument {shorten(name.group())} appears more than once", position)
        position = expect("=", text, name.end())
        arguments[name.group()], position = read_literal(text, position)
        position = next_item(")", text, position)
    return arguments, position + 1


def _read_list(text: str, position: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    position = skip_space(text, position + 1)
    while (simple := _SIMPLE_ITEM.match(text, position)) is not None:  # long lists consist of such items
        items.append(_SIMPLE_VALUE[simple.lastindex or 0](simple[simple.lastindex or 0]))
        position = simple.end()
    while not text.startswith("]", position):
        item, position = read_literal(text, position, depth - 1)
        items.append(item)
        position = next_item("]", text, position)
    return items, position + 1


def _read_dict(text: str, position: int, depth: int) -> tuple[dict[str, Any], int]:
    items: dict[str, Any] = {}
    position = skip_space(text, position + 1)
    while not text.startswith("}", position):
        if text[position : position + 1] not in ('"', "'"):
            raise InvalidValueError("a key must be a string", position)
        key, end = _read_string(text, position)
        if key in items:
            raise InvalidValueError(f"the key {shorten(key)} appears more than once", position)
        items[key], position = read_literal(text, expect(":", text, end), depth - 1)
        position = next_item("}", text, position)
    return items, position + 1


def next_item(close: str, text: str, position: int) -> int:
    """Return the position of the next item, or of `close`."""
    position = skip_space(text, position)
    return position if text.startswith(close, position) else expect(",", text, position)


def expect(character: str, text: str, position: int) -> int:
    """Return the position after `character`, with white space around it skipped."""
    position = skip_space(text, position)
    if not text.startswith(character, position):
        raise InvalidValueError(f"expected {character!r}", position)
    return skip_space(text, position + 1)


def _number(digits: str, position: int) -> int | float:
    try:
        number: int | float = int(digits) if _INTEGER.match(digits) else float(digits)
    except ValueError:  # more digits than Python converts
        number = math.inf
    if isinstance(number, float) and math.isinf(number):
        raise InvalidValueError(f"the number {shorten(digits)} is too large", position)
    return number


def _read_string(text: str, position: int) -> tuple[str, int]:
    quote = text[position : position + 3]
    match = _STRINGS[quote if quote in _STRINGS else quote[0]].match(text, position)
    if match is None:
        if quote not in _STRINGS and "\n" in text[position:]:
            raise InvalidValueError("a string must end on its line", position)
        raise InvalidValueError("unterminated string", position, is_open=True)
    body: str = match.group(1)
    if "\\" in body:
        body = _ESCAPE.sub(lambda escape: _unescape(escape, position), body)
        if not body.isprintable():
            try:
                body.encode()
            except UnicodeEncodeError:
                raise InvalidValueError("a string contains a lone surrogate", position) from None
    return body, match.end()


def _unescape(escape: re.Match[str], position: int) -> str:
    octal, two, four, eight, other = escape.groups()
    if other is None:
        code = int(octal, 8) if octal else int(two or four or eight, 16)
        if code > 0x10FFFF:
            raise InvalidValueError("an escape is not a valid character", position)
        return chr(code)
    if other in "xuUN":
        raise InvalidValueError(f"the escape {escape.group()!r} is incomplete", position)
    return _ESCAPED.get(other, escape.group())  # Python keeps the backslash of an unknown escape
