"""Texts that a structural tag lets through, as a hypothesis strategy; no grammar engine is needed for that.

Written from the documentation of the elements, for those that forced calls are made of.
"""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import strategies as st

_PIECES = ("<b>", "</b>", "x < y", "\n", " ", '"', "\\", "{", "}", "é", "123", "null", "<think>", "</think>")


def texts_of(element: dict[str, Any]) -> st.SearchStrategy[str]:
    """Texts that an element of a structural tag lets through."""
    kind = element["type"]
    if kind == "const_string":
        return st.just(element["value"])
    if kind == "sequence":
        return st.tuples(*map(texts_of, element["elements"])).map("".join)
    if kind == "or":
        return st.one_of(*map(texts_of, element["elements"]))
    if kind == "optional":
        return st.just("") | texts_of(element["content"])
    if kind == "repeat":
        most = element["max"] if element["max"] >= 0 else element["min"] + 2
        return st.lists(texts_of(element["content"]), min_size=element["min"], max_size=most).map("".join)
    if kind == "regex":
        # Without what decoding puts in place of bytes that are no UTF-8: `assert_one_call` does not count it.
        matches = st.from_regex(re.compile(element["pattern"]), fullmatch=True)
        return matches.filter(lambda text: "\ufffd" not in text)
    if kind == "any_text":
        return _free_text(element["excludes"], element.get("max_chars", 30))
    if kind == "json_schema":
        return _numbers(element["json_schema"]).map(json.dumps)
    assert kind == "grammar", kind
    found = re.search(r"max_chars=(\d+)", element["grammar"])
    plain = st.text(st.characters(exclude_characters='"\\\ufffd', exclude_categories=("Cc", "Cs")), max_size=20)
    most = 20 if found is None else int(found[1])
    escaped = st.just('\\n\\"') if most >= 4 and '"' in element["grammar"].partition("escape ::=")[2] else st.just("")
    return plain.map(lambda text: text[:most]) | escaped


def _free_text(excludes: list[str], most: int) -> st.SearchStrategy[str]:
    pieces = st.lists(
        st.sampled_from(_PIECES)
        | st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd"), max_size=4)
    )
    texts = pieces.map(lambda found: "".join(found)[:most])
    return texts.filter(lambda text: not any(mark in text for mark in excludes))


def _numbers(schema: dict[str, Any]) -> st.SearchStrategy[float]:
    """Numbers within the bounds of a schema, which are the only schemas in a grammar."""
    if schema["type"] == "integer":
        return st.integers(schema["minimum"], schema["maximum"])
    return st.sampled_from([schema["minimum"], schema["maximum"]])
