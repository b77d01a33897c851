"""Requests that are being answered, and how an abort ends them.

A request whose client went away counts as running until it is aborted: a real server goes on sampling for a client that
has gone, so a test sees a client that forgets to abort.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable

from .script import Answer


class Flight:
    """One request in flight."""

    def __init__(self, rid: str, weight_version: str) -> None:
        """Start it with the weights that the server has."""
        self.rid = rid
        self.weight_version = weight_version
        self.aborted = False
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Future[Answer] | None = None

    async def wait(self, answer: Awaitable[Answer]) -> Answer:
        """Wait for an answer that is being computed.

        Returns:
            The answer; for an aborted request what the computation returned on being cancelled, else an empty answer.

        Raises:
            Exception: What the computation raised.
            asyncio.CancelledError: The caller was cancelled; the computation is cancelled too.
        """
        task = asyncio.ensure_future(answer)
        with self._lock:
            self._loop, self._task = asyncio.get_running_loop(), task
            if self.aborted:
                task.cancel()
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            task.add_done_callback(_look_at_its_exception)
            raise
        if not task.cancelled():
            return task.result()
        if not self.aborted:
            raise RuntimeError("the answer function cancelled itself")
        return ""

    def abort(self) -> None:
        """End it; to be called from any thread."""
        with self._lock:
            self.aborted = True
            if self._loop is not None and self._task is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._task.cancel)


def _look_at_its_exception(task: asyncio.Future[Answer]) -> None:
    """Nobody waits for it any more; asyncio would log an exception that was never looked at."""
    if not task.cancelled():
        task.exception()
