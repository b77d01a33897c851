"""The pieces of which the grammar of a forced call is made: SGLang's structural tags, as xgrammar reads them.

Everything matches characters, never token ids. The elements that match ids share one cache in xgrammar 0.2, which
confuses them once a server has compiled two grammars that have some; so a mark may be sampled as its own token or
spelled with others, and what was sampled under such a grammar has to be parsed by its characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Element = dict[str, Any]
"""A part of a structural tag: what SGLang's documentation calls a format."""

JSON_SPACE = 1
"""White space allowed at one place of JSON. Chat templates write `{"a": 1, "b": 2}`; without a limit a model could go
on with white space until its tokens run out."""

_CONTROL_CHARACTERS = tuple(f'"\\x{code:02x}"' for code in range(32))  # EBNF, since a grammar must not hold a real NUL
_PLAIN = r'[^"\\\x00-\x1f]'  # characters that JSON strings hold as they are
_ESCAPES = r'["\\/bfnrt]'
_SPECIAL_IN_CLASS = re.compile(r"[\\\]\[^-]")


def structural_tag(element: Element) -> dict[str, str]:
    """Return the sampling parameters that make a model write this and stop."""
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": element}, ensure_ascii=False)}


def literal(text: str) -> Element:
    """Return what matches exactly this text."""
    return {"type": "const_string", "value": text}


def matching(pattern: str) -> Element:
    """Return what matches a regular expression as a whole."""
    return {"type": "regex", "pattern": pattern}


def sequence(*parts: Element | str) -> Element:
    """Return what matches its parts in order; a string stands for itself."""
    elements: list[Element] = []
    for part in parts:
        element = literal(part) if isinstance(part, str) else part
        inner = element["elements"] if element["type"] == "sequence" else [element]
        for found in inner:
            if found == literal(""):
                continue
            if elements and found["type"] == elements[-1]["type"] == "const_string":
                elements[-1] = literal(elements[-1]["value"] + found["value"])
            else:
                elements.append(found)
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def either(options: Iterable[Element | str]) -> Element:
    """Return what matches one of the options; the same option twice counts once."""
    elements: list[Element] = []
    for option in options:
        element = literal(option) if isinstance(option, str) else option
        for found in element["elements"] if element["type"] == "or" else [element]:
            if found not in elements:
                elements.append(found)
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


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
        rest["max_chars"] = max(most - least, 0)
    if not least:
        return rest
    # The first characters begin none of the excluded texts, so that none of those can begin among them.
    firsts = "".join(sorted({_SPECIAL_IN_CLASS.sub(r"\\\g<0>", text[0]) for text in excludes}))
    return sequence(matching(rf"[^{firsts}\x00]{{{least}}}"), rest)


def json_value(schema: Any, space: int = JSON_SPACE) -> Element:
    """Return what matches JSON by its schema, with at most `space` characters of white space at one place."""
    limit = {"max_whitespace_cnt": space} if space else {}  # scalars have none, and the server takes no 0
    return {"type": "json_schema", "json_schema": schema, **limit}


def json_string(least: int = 0, most: int | None = None, *, escapes: str = _ESCAPES) -> Element:
    """Return what matches a JSON string of `least` to `most` characters.

    xgrammar's own strings of a bounded length have no escapes, may hold control characters, which JSON forbids, and
    take ten seconds to compile. Here an escape may use up two of the characters. It never stands among the first
    `least`.

    Args:
        least: Fewest characters.
        most: Most characters; None for no limit.
        escapes: What may follow a backslash, as a class of characters.
    """
    limit = "" if most is None else f"[max_chars={max(most - least, 0)}]"
    excluded = ", ".join(('"\\""', *_CONTROL_CHARACTERS))
    rest = (
        f'root{limit} ::= TagDispatch(("\\\\", escape), loop_after_dispatch=true, excludes=({excluded}))\n'
        f"escape ::= {escapes}\n"
    )
    first = matching(f"{_PLAIN}{{{least}}}") if least else literal("")
    return sequence('"', first, {"type": "grammar", "grammar": rest}, '"')


def members(parts: Sequence[tuple[Element, bool]], separator: Element | str = "") -> Element:
    """Return what matches parts in order, those that are not required perhaps left out.

    Args:
        parts: Every part, and whether it is required.
        separator: What stands between two of them.
    """
    if not separator:
        return sequence(*(part if required else optional(part) for part, required in parts))
    first = next((index for index, (_, required) in enumerate(parts) if required), None)
    if first is not None:
        before = [optional(sequence(part, separator)) for part, _ in parts[:first]]
        return sequence(*before, parts[first][0], *_behind(parts[first + 1 :], separator))
    starts = [sequence(part, *_behind(parts[index + 1 :], separator)) for index, (part, _) in enumerate(parts)]
    return optional(either(starts)) if starts else literal("")


def _behind(parts: Sequence[tuple[Element, bool]], separator: Element | str) -> list[Element]:
    found = []
    for part, required in parts:
        separated = sequence(separator, part)
        found.append(separated if required else optional(separated))
    return found


def constant_text(value: Any) -> str:
    """Return a constant as chat templates write it in JSON."""
    return json.dumps(value, ensure_ascii=False)


def json_object(values: Mapping[str, Element | str]) -> Element:
    """Return what matches a JSON object with these keys in this order, spaced as chat templates do."""
    pieces: list[Element | str] = []
    for key, value in values.items():
        pieces += [", " if pieces else "{", f"{constant_text(key)}: ", value]
    return sequence(*pieces, "}")
