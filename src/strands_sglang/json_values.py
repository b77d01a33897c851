"""Values that users hand in and that are sent and saved: as JSON has them, or refused before anything runs.

Whatever enters here can be written as JSON later, by any encoder. Values of numpy and torch become Python's; what JSON
would lose, or write as something else (NaN, sets, objects), is an error that names its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_DEEPEST = 100


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of a value, made of dict, list, str, int, float, bool and None alone.

    Args:
        value: What was handed in. Arrays and tensors become lists, or numbers if they have no dimension; whole numbers
            as keys become strings, as in JSON.
        where: What an error calls it, such as "sampling_params['stop']".
        depth: In how many others it stands.

    Raises:
        ValueError: JSON has no such value; names its place.
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
            raise ValueError(f"{where} is {value}, which does not fit into 64 bits")
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
        raise ValueError(f"{where} is {text!r}, which is no Unicode text: {error.reason}") from None
    return str.__str__(text)  # of an enumeration's member the text, not its name
