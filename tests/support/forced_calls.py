"""Forced calls: tools, a check of their calls, and texts that their grammars match."""

import functools
import json
import os
import re
import subprocess
from pathlib import Path

import jsonschema
from hypothesis import strategies as st

ARGUMENTS = {"key": 'a "b"\nc', "n": 3, "deep": {"l": [1, 2], "s": "x"}, "flag": True}

_LOOK_UP = {
    "type": "object",
    "properties": {
        "key": {"type": "string"},
        "n": {"type": "integer", "minimum": 1, "maximum": 500},
        "deep": {"$ref": "#/$defs/Deep"},
        "flag": {"type": "boolean", "default": False},
        "unit": {"enum": ["km", "mile"]},
        "short": {"type": "string", "minLength": 1, "maxLength": 6},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "share": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 10}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
    },
    "required": ["key"],
    "$defs": {
        "Deep": {
            "type": "object",
            "properties": {
                "l": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}},
                "s": {"type": "string"},
            },
            "required": ["l"],
        }
    },
}

TOOLS = [
    {"name": "look_up", "description": "Looks something up.", "inputSchema": {"json": _LOOK_UP}},
    {
        "name": "now",
        "description": "Tells the time.",
        "inputSchema": {"json": {"type": "object", "properties": {}, "additionalProperties": False}},
    },
]


def wrong_with(turn, names, tools=TOOLS):
    """Return why a turn is not exactly one call of one of these tools that fits its schema; None if it is."""
    found = [(call.attempted_name or call.name, call.error, call.raw) for call in turn.tool_calls]
    if turn.text or found not in [[(name, None, None)] for name in names]:
        return f"it is read as {found} with the text {turn.text!r}"
    (schema,) = (tool["inputSchema"]["json"] or {} for tool in tools if tool["name"] == found[0][0])
    # Bytes that are not UTF-8, which noise may sample, are not characters to the grammar and do not count.
    arguments = json.loads(json.dumps(turn.tool_calls[0].input, ensure_ascii=False).replace("\ufffd", ""))
    declared = set(declared_names(schema))
    undeclared = arguments.keys() - declared if declared else set()
    errors = [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(arguments)]
    return f"{errors}, undeclared: {undeclared}" if errors or undeclared else None


def declared_names(schema):
    """Return the names of the properties that any part of a schema declares."""
    own = schema.get("properties") if isinstance(schema, dict) else None
    inside = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    return [*(own if isinstance(own, dict) else ()), *(name for inner in inside for name in declared_names(inner))]


_PIECES = ("<b>", "</b>", "x < y", "\n", " ", '"', "\\", "{", "}", "é", "123", "null", "<think>", "</think>")


def texts_of(element):
    """Return a strategy for texts that an element of a structural tag matches, without a grammar engine.

    It follows the documentation of the elements, and covers those that forced calls consist of.
    """
    return _texts_of(json.dumps(element))


@functools.lru_cache(maxsize=1000)  # of one test, whose examples all draw from it
def _texts_of(element):
    match element := json.loads(element):
        case {"type": "const_string", "value": value}:
            return st.just(value)
        case {"type": "sequence", "elements": elements}:
            return st.tuples(*map(texts_of, elements)).map("".join)
        case {"type": "or", "elements": elements}:
            return st.one_of(*map(texts_of, elements))
        case {"type": "optional", "content": content}:
            return st.just("") | texts_of(content)
        case {"type": "repeat", "content": content, "min": least, "max": most}:
            found = st.lists(texts_of(content), min_size=least, max_size=most if most >= 0 else least + 2)
            return found.map("".join)
        case {"type": "regex", "pattern": pattern}:
            # Without the replacement character for bytes that are not UTF-8, which `wrong_with` does not count.
            return st.from_regex(re.compile(pattern), fullmatch=True).filter(lambda text: "\ufffd" not in text)
        case {"type": "any_text", "excludes": excludes}:
            characters = st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd")
            texts = st.lists(st.sampled_from(_PIECES) | st.text(characters, max_size=4))
            cut = texts.map(lambda pieces: "".join(pieces)[: element.get("max_chars", 30)])
            return cut.filter(lambda text: not any(mark in text for mark in excludes))
        case {"type": "json_schema", "json_schema": {"type": "integer", "minimum": least, "maximum": most}}:
            return st.integers(least, most).map(json.dumps)
        case {"type": "json_schema", "json_schema": {"type": "number", "minimum": least, "maximum": most}}:
            return st.sampled_from([least, most]).map(json.dumps)
    assert element["type"] == "grammar", element
    most = int(re.search(r"max_chars=(\d+)", element["grammar"])[1])
    plain = st.text(
        st.characters(exclude_characters='"\\\ufffd', exclude_categories=("Cc", "Cs")), max_size=min(most, 20)
    )
    return plain | st.just('\\n\\"' if most >= 4 else "")


def run_grammars(sglang_python, asked):
    """Return jobs with their results from the grammar engine of the supported SGLang; see `grammar_engine`."""
    done = subprocess.run(
        [sglang_python, "-P", Path(__file__).with_name("grammar_engine.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout)
    return [
        [{**job, **answer} for job, answer in zip(each["jobs"], found, strict=True)]
        for each, found in zip(asked, answers, strict=True)
    ]
