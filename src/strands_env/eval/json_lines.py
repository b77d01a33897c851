"""Values as lines of JSON: whatever an episode held becomes a line, and a line is read back.

An environment may put anything into a task or a message (sets, bytes, numpy numbers, half of a surrogate pair). A
result that cannot be written would be a result that is lost, so writing never refuses a value: what JSON has no form
for is written in the nearest one. `digest` is over the canonical form: sorted keys, so equal values have equal digests.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Set
from typing import Any

import orjson
from pydantic import BaseModel

_DEEPEST = 100
"""Levels. Deeper values, those that contain themselves among them, are written as text from there on."""


def encode(value: Any) -> bytes:
    """One line of JSON, newline included."""
    try:
        return orjson.dumps(value, default=nearest, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE)
    except (TypeError, RecursionError, ValueError):  # a lone surrogate, an integer of more than 64 bits, a cycle
        return json.dumps(_plain(value), separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def decode(line: bytes) -> Any:
    """The value of a line.

    Raises:
        ValueError: It is not JSON.
    """
    try:
        return orjson.loads(line)
    except ValueError:
        return json.loads(line)  # takes escaped lone surrogates and large integers


def digest(value: Any) -> str:
    """32 hexadecimal digits that equal values share, whatever the order of their keys."""
    text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def nearest(value: Any) -> Any:
    """The nearest value that JSON has a form for; text as the last resort."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Set):
        return sorted(value, key=repr)
    if isinstance(value, Mapping):
        return dict(value)
    for name in ("tolist", "isoformat"):  # numpy's arrays and numbers, torch's tensors; dates
        if callable(convert := getattr(value, name, None)) and not isinstance(value, type):
            return convert()
    return str(value)


def _plain(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if value - value == 0 else None  # JSON has no infinity; orjson writes null as well
    if depth >= _DEEPEST:
        return str(type(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return _plain(nearest(value), depth + 1)
