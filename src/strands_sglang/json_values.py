"""User-supplied values that are sent and saved: converted to plain JSON values, or rejected before anything runs.

Every accepted value can be written by any JSON encoder later. Values of numpy and torch become Python's. A value that
JSON would lose or change (NaN, sets, objects) is an error that names its path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_DEEPEST = 100


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return a copy of a value that consists of dict, list, str, int, float, bool and None only.

    Args:
        value: Value to copy. Arrays and tensors become lists, or numbers if they have no dimension. Integer keys become
            strings, as in JSON.
        where: Path of the value in error messages, such as "sampling_params['stop']".
        depth: Number of enclosing containers.

    Raises:
        ValueError: JSON has no such value. The message names its path.
    """
    if depth > _DEEPEST:
        raise ValueError(f"{where} is nested more than {_DEEPEST} deep")
    if hasattr(value, "tolist"):  # numpy, torch, array
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"{where} is an integer that does not fit into 64 bits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}, and JSON has only finite numbers")
        return float(value)
    if isinstance(value, Mapping):
        return {_key(key, where): plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{position}]", depth + 1) for position, item in enumerate(value)]
    raise ValueError(f"{where} is {value!r} ({type(value).__name__}), which JSON cannot hold")


def dumps(value: Any, **options: Any) -> str:
    """Return `json.dumps(value, **options)`; integers with more digits than Python writes (4,300) become texts."""
    try:
        return json.dumps(value, **options)
    except ValueError:
        return json.dumps(_long_as_text(value), **options)


def _long_as_text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_long_as_text(key): _long_as_text(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_long_as_text(entry) for entry in value]
    return f"{Decimal(value):f}" if isinstance(value, int) and value.bit_length() > 2_000 else value


def _key(key: Any, where: str) -> str:
    key = key.tolist() if hasattr(key, "tolist") else key
    if isinstance(key, str):
        return _text(key, f"a key of {where}")
    if isinstance(key, int) and not isinstance(key, bool):
        return str(int(key))
    raise ValueError(f"{where} has the key {key!r} ({type(key).__name__}); JSON has only strings there")


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is {text!r}, which is not Unicode text: {error.reason}") from None
    return str.__str__(text)  # the value of an enumeration member, not its name
