"""The data of a page: values as base64 of deflated bytes, in script blocks that a browser never runs.

An array is stored byte plane by byte plane: first the lowest bytes of all values, then the next ones. So the bytes that
hardly change are adjacent and compress well. Floats keep 15 bits of their fraction, which is more than four digits.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

Packed = dict[str, Any]
"""A reference to a block, as in `front/data.mjs`."""


class Blocks:
    """The blocks of a page.

    Attributes:
        html: The blocks so far.
    """

    def __init__(self) -> None:
        """Start without blocks."""
        self.html: list[str] = []

    def array(self, values: NDArray[Any]) -> Packed | None:
        """Add an array of unsigned integers or floats; a column in which nothing is known is None."""
        import numpy as np

        if values.dtype.kind == "f":
            values = values.astype("<f4")
            if not len(values) or np.isnan(values).all():
                return None
            bits = values.view("<u4").astype(np.uint64)
            whole = np.isfinite(values)
            values = np.where(whole, (bits + 0x80) & 0xFFFFFF00, bits).astype("<u4")
            kind = "f4"
        else:
            top = int(values.max()) if len(values) else 0
            width = next(width for width in (1, 2, 4) if top < 1 << 8 * width)
            kind = f"u{width}"
            values = values.astype(f"<{kind}")
        planes = values.view(np.uint8).reshape(-1, values.dtype.itemsize).T
        return {"at": self._add(zlib.compress(np.ascontiguousarray(planes).tobytes(), 6)), "type": kind}

    def json(self, value: Any, name: str | None = None) -> Packed:
        """Add a JSON value, in a block of this name if there is one."""
        text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        return {"at": self._add(zlib.compress(text.encode(), 6), name), "type": "json"}

    def file(self, content: bytes) -> str:
        """Add the content of a file as it is, and return the name of its block."""
        return self._add(content)

    def _add(self, content: bytes, name: str | None = None) -> str:
        name = name or f"b{len(self.html)}"
        text = base64.b64encode(content).decode()
        self.html.append(f'<script type="application/octet-stream" id="{name}">{text}</script>')
        return name
