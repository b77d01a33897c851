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

Element = dict[str, Any]  # a part of a structural tag: what SGLang's documentation calls a format

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


def json_characters(least: int = 0, most: int | None = None, *, escapes: str = _ESCAPES) -> Element:
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
