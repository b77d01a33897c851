"""The end of a call: at its deadline, or once its caller's cancel signal is set.

The signal is a `threading.Event`, which Strands sets from any thread. One timer per event loop checks all signals, and
only while calls run. A call whose signal was seen set ends, even if the signal is cleared again.
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ..exceptions import SGLangCancelledError, SGLangDeadlineError

T = TypeVar("T")

POLL_INTERVAL_S = 0.05
"""Seconds between checks of the cancel signals."""

CLOCK_TOLERANCE_S = 0.001
"""Seconds by which an event loop may fire a timer early."""


class Cancellation:
    """Deadline and cancel signal of one call in one event loop; the call may take several requests.

    Attributes:
        deadline: Seconds for the whole call from its start; None for no limit.
        signal: Event that ends the call once set; None for none.
    """

    def __init__(self, deadline: float | None = None, signal: threading.Event | None = None) -> None:
        """Start the clock."""
        self.deadline = deadline
        self.signal = signal
        self._loop = asyncio.get_running_loop()
        self._signaled = self._loop.create_future()
        self._ends_at = math.inf if deadline is None else self._loop.time() + deadline

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; infinite without one."""
        return self._ends_at - self._loop.time()

    def is_signaled(self) -> bool:
        """Check the signal; return whether it is set, or was at an earlier check."""
        if self.signal is not None and self.signal.is_set() and not self._signaled.done():
            self._signaled.set_result(None)
        return self._signaled.done()

    @contextmanager
    def watched(self) -> Iterator[frozenset[asyncio.Future[Any]]]:
        """Check the signal periodically; yields the future that is done once it is set, to wait for with others."""
        if self.signal is None:
            yield frozenset()
            return
        with _lock:
            watch = _watches.setdefault(self._loop, _Watch())
        place = watch.add(self)
        try:
            yield frozenset({self._signaled})
        finally:
            watch.remove(place)

    async def wait(self, work: asyncio.Future[Any]) -> None:
        """Wait for work that others may share; it continues if the call ends first.

        Raises:
            SGLangCancelledError: The signal was set.
            SGLangDeadlineError: The deadline has passed.
        """
        limit = None if self.deadline is None else max(self.seconds_left, 0.0)
        with self.watched() as signaled:
            await asyncio.wait({work, *signaled}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return
        if self.is_signaled():
            raise SGLangCancelledError("the call was cancelled by its signal before its answer began")
        raise SGLangDeadlineError(f"the deadline of {self.deadline:g} s has passed before the answer began")

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, and cancel it if the call ends first.

        Raises:
            SGLangCancelledError: The signal was set.
            SGLangDeadlineError: The deadline has passed.
        """
        task = asyncio.ensure_future(work)
        try:
            await self.wait(task)
            return task.result()
        finally:
            discard(task)


def discard(task: asyncio.Task[Any]) -> None:
    """Cancel a task whose result is no longer needed."""
    if not task.done():
        task.add_done_callback(consume)
        task.cancel()


def settle(over: asyncio.Future[None], *_: object) -> None:
    """Set a future that only says that something is over, unless it is set or cancelled."""
    if not over.done():
        over.set_result(None)


def consume(done: asyncio.Task[Any]) -> None:
    """Retrieve a finished task's exception, so that asyncio does not report it as never retrieved."""
    if not done.cancelled():
        done.exception()


class _Watch:
    """The calls of one event loop whose signals are checked."""

    def __init__(self) -> None:
        self._calls: dict[object, Cancellation] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: Cancellation) -> object:
        place = object()
        self._calls[place] = call
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_INTERVAL_S, self._look)
        return place

    def remove(self, place: object) -> None:
        del self._calls[place]
        if not self._calls and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        for call in self._calls.values():
            call.is_signaled()
        self._timer = asyncio.get_running_loop().call_later(POLL_INTERVAL_S, self._look)


# A watch only references its loop while a timer runs, so it is collected with the loop.
_watches: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
