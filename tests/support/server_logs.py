"""What a real SGLang server says of its requests in its own log: a judge that is independent of the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LOG_EVERYTHING = ("--log-requests", "--log-requests-level", "3", "--log-requests-format", "json")
"""Arguments with which a server logs every request and its whole answer."""


def logged(path: Path, event: str) -> list[dict[str, Any]]:
    """The log's entries of one kind, `request.received` or `request.finished`."""
    entries = []
    for line in path.read_text(errors="replace").splitlines():
        start = line.find('{"')
        if f'"{event}"' in line and start >= 0:
            entries.append(json.loads(line[start:]))
    return entries
