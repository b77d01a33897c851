"""Spreads bursts over the iterations of an event loop.

A thousand agents that ask at once all become ready in one iteration of their loop. If all of them encoded their
requests in it, nothing else would run until the last had: no timer, no tool, no answer of another agent. So a call
passes a turnstile before it encodes or decodes. In a burst it lets through, in order, as many per iteration as the
iterations before have shown to take a few milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

BUDGET_S = 0.008
"""Seconds that an iteration of the loop should take while others wait."""

MIN_BATCH, MAX_BATCH = 4, 256


class Turnstile:
    """The turnstile of the running event loop."""

    def __init__(self) -> None:
        """Start with no one waiting."""
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._batch = 16  # how many pass per iteration, and per `BUDGET_S` before anyone has to wait
        self._free: int | None = None  # how many still do; None if no call has passed of late
        self._began = 0.0

    async def enter(self) -> None:
        """Return at once, or in a later iteration if too many want to pass."""
        if self._free is None:
            self._free = self._batch
            self._loop.call_later(BUDGET_S, self._refill)  # never within the same iteration, however long it takes
        if self._free and not self._waiting:
            self._free -= 1
            return
        if not self._waiting:
            self._began = time.thread_time()
            self._loop.call_soon(self._turn)
        place = self._loop.create_future()
        self._waiting.append(place)
        await place

    def _refill(self) -> None:
        self._free = None

    def _turn(self) -> None:
        """Let the next ones through, after an iteration of the loop."""
        now = time.thread_time()  # not that of the machine's other programs
        is_late = now - self._began > BUDGET_S
        self._batch = max(self._batch // 2, MIN_BATCH) if is_late else min(self._batch * 2, MAX_BATCH)
        self._began = now
        for _ in range(min(self._batch, len(self._waiting))):
            place = self._waiting.popleft()
            if not place.done():  # its task may be cancelled
                place.set_result(None)
        if self._waiting:
            self._loop.call_soon(self._turn)
