"""Moving the event loop's clock on: a limit is over at the moment that a test chooses, however slow the machine is."""

from __future__ import annotations

import asyncio


def advance(seconds: float) -> None:
    """Let this much time pass on the running loop: every timer that ends within it is due at once."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]
