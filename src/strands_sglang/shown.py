"""Texts as people may see them: no credentials, nothing that a terminal interprets, nouns with their numbers."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

_NAMES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\N{NO-BREAK SPACE}": "\\u{a0}"}


def without_credentials(text: str) -> str:
    """A text whose URLs show no user information: `http://host` instead of `http://user:password@host`."""
    return re.sub(r"(?<=://)[^/?#\s]*@", "", text) if "://" in text else text


def visible(text: str) -> str:
    """Return a text in which nothing is interpreted by a terminal: control characters are written out.

    Args:
        text: Any text, also of a hostile model.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character
        if character == " " or unicodedata.category(character)[0] not in "CZ"
        else _NAMES.get(character) or f"\\u{{{ord(character):x}}}"
        for character in text
    )


def one_line(value: object, most: int | None = None) -> str:
    """Return a text in one line, of so many characters at most."""
    return " ".join(str(value).split())[:most]


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, which takes an "s" for all numbers but 1."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def first_difference(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return where two texts or lists of tokens begin to differ; the shorter length if one begins the other."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (here, there) in pairs if here != there), min(len(first), len(second)))
