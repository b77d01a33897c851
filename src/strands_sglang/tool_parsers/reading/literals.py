"""Values and calls written as Python: literals and keyword arguments, nothing that would have to be evaluated.

Python's own parser takes seconds for a hostile megabyte and warns about odd escapes, so literals are read here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from .values import MAX_JSON_DEPTH, InvalidValueError, shorten, skip_space

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
    """Return the literal that begins at `position`, and where it ends.

    Strings, numbers, lists, dictionaries with string keys, `True`, `False`, `None` and JSON's spelling of those.

    Raises:
        InvalidValueError: There is no such literal, or JSON could not hold it.
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
    raise InvalidValueError("a literal is expected", position)


def read_arguments(text: str, position: int) -> tuple[dict[str, Any], int]:
    """Return the keyword arguments of a call and where they end, from behind `(` to behind `)`.

    Raises:
        InvalidValueError: There is anything but `name=literal`, or a name twice.
    """
    arguments: dict[str, Any] = {}
    position = skip_space(text, position)
    while not text.startswith(")", position):
        name = _NAME.match(text, position)
        if name is None:
            raise InvalidValueError("arguments are written as name=value", position)
        if name.group() in arguments:
            raise InvalidValueError(f"the argument {shorten(name.group())} is there twice", position)
        position = _expect("=", text, name.end())
        arguments[name.group()], position = read_literal(text, position)
        position = _next_item(")", text, position)
    return arguments, position + 1


def _read_list(text: str, position: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    position = skip_space(text, position + 1)
    while (simple := _SIMPLE_ITEM.match(text, position)) is not None:  # many items are nearly always of this kind
        items.append(_SIMPLE_VALUE[simple.lastindex or 0](simple[simple.lastindex or 0]))
        position = simple.end()
    while not text.startswith("]", position):
        item, position = read_literal(text, position, depth - 1)
        items.append(item)
        position = _next_item("]", text, position)
    return items, position + 1


def _read_dict(text: str, position: int, depth: int) -> tuple[dict[str, Any], int]:
    items: dict[str, Any] = {}
    position = skip_space(text, position + 1)
    while not text.startswith("}", position):
        if text[position : position + 1] not in ('"', "'"):
            raise InvalidValueError("a key must be a string", position)
        key, end = _read_string(text, position)
        if key in items:
            raise InvalidValueError(f"the key {shorten(key)} is there more than once", position)
        items[key], position = read_literal(text, _expect(":", text, end), depth - 1)
        position = _next_item("}", text, position)
    return items, position + 1


def _next_item(close: str, text: str, position: int) -> int:
    """Return where the next item begins, or where `close` stands."""
    position = skip_space(text, position)
    return position if text.startswith(close, position) else _expect(",", text, position)


def _expect(character: str, text: str, position: int) -> int:
    position = skip_space(text, position)
    if not text.startswith(character, position):
        raise InvalidValueError(f"{character!r} is expected", position)
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
        goes_on = quote not in _STRINGS and "\n" in text[position:]
        raise InvalidValueError("a string must end on its line" if goes_on else "unterminated string", position)
    body: str = match.group(1)
    if "\\" in body:
        body = _ESCAPE.sub(lambda escape: _unescape(escape, position), body)
        if not body.isprintable():
            try:
                body.encode()
            except UnicodeEncodeError:
                raise InvalidValueError("a string holds half of a surrogate pair", position) from None
    return body, match.end()


def _unescape(escape: re.Match[str], position: int) -> str:
    octal, two, four, eight, other = escape.groups()
    if other is None:
        code = int(octal, 8) if octal else int(two or four or eight, 16)
        if code > 0x10FFFF:
            raise InvalidValueError("an escape is no character", position)
        return chr(code)
    if other in "xuUN":
        raise InvalidValueError(f"the escape {escape.group()!r} is incomplete", position)
    return _ESCAPED.get(other, escape.group())  # Python keeps the backslash of what is no escape
