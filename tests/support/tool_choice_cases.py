"""Tools whose calls are forced, and a check of what came out."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from strands_sglang.tool_parsers import ParsedTurn

ARGUMENTS: dict[str, Any] = {"key": 'a "b"\nc', "n": 3, "deep": {"l": [1, 2], "s": "x"}, "flag": True}

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

TOOLS: list[dict[str, Any]] = [
    {"name": "look_up", "description": "Looks something up.", "inputSchema": {"json": _LOOK_UP}},
    {
        "name": "now",
        "description": "Tells the time.",
        "inputSchema": {"json": {"type": "object", "properties": {}, "additionalProperties": False}},
    },
]


def assert_one_call(turn: ParsedTurn, names: tuple[str, ...], tools: list[dict[str, Any]] = TOOLS) -> None:
    """Fail unless a turn is one call of one of these tools, with arguments that fit its schema, and nothing else."""
    assert [(call.error, call.raw) for call in turn.tool_calls] == [(None, None)]
    (call,) = turn.tool_calls
    assert call.name in names
    (schema,) = (tool["inputSchema"]["json"] for tool in tools if tool["name"] == call.name)
    # Bytes that are no UTF-8, which noise may sample, are no characters to the grammar and so do not count.
    arguments = json.loads(json.dumps(call.input, ensure_ascii=False).replace("\ufffd", ""))
    jsonschema.validate(arguments, schema)
    assert turn.text == ""
