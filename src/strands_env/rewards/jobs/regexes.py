"""Matching of regular expressions, in a worker: a pattern can take exponential time and block the interpreter."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def handle(request: dict[str, Any], stage: Callable[[str], None]) -> dict[str, Any]:
    """Match a pattern.

    Args:
        request: `pattern`, `flags`, `text`, `whole` (whether the whole text must match), and the `group` to return.
        stage: Unused.
    """
    pattern = re.compile(request["pattern"], request["flags"])
    last = None
    if request["whole"]:
        last = pattern.fullmatch(request["text"])
    elif request["group"] is None:
        last = pattern.search(request["text"])
    else:
        for match in pattern.finditer(request["text"]):
            last = match
    return {"matched": None if last is None else last[request["group"] or 0] or ""}
