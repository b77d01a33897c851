"""When a call has to end: at its deadline, or once its caller's cancel signal is set.

The signal is a `threading.Event`, which Strands sets from any thread. Promises: one timer per event loop looks at all
signals, not one per call, and only while calls run; a call whose signal was seen ends, also if the signal is cleared.
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
"""How often cancel signals are looked at."""

CLOCK_TOLERANCE_S = 0.001
"""How much too early an event loop may call."""


class Cancellation:
    """The end of one call in one event loop; the call may take several requests.

    Attributes:
        deadline: Seconds from its start for everything; None for no limit.
        signal: Ends the call once it is set; None for none.
    """

    def __init__(self, deadline: float | None = None, signal: threading.Event | None = None) -> None:
        """Start the clock."""
        self.deadline = deadline
        self.signal = signal
        self._loop = asyncio.get_running_loop()
        self._signalled = self._loop.create_future()
        self._ends_at = math.inf if deadline is None else self._loop.time() + deadline

    @property
    def seconds_left(self) -> float:
        """Until the deadline; infinite without one."""
        return self._ends_at - self._loop.time()

    def is_signalled(self) -> bool:
        """Look at the signal: whether it is set, or was at an earlier look."""
        if self.signal is not None and self.signal.is_set() and not self._signalled.done():
            self._signalled.set_result(None)
        return self._signalled.done()

    @contextmanager
    def watched(self) -> Iterator[frozenset[asyncio.Future[Any]]]:
        """Look at the signal from time to time; gives what is done once it is set, to be waited for beside others."""
        if self.signal is None:
            yield frozenset()
            return
        with _lock:
            watch = _watches.setdefault(self._loop, _Watch())
        place = watch.add(self)
        try:
            yield frozenset({self._signalled})
        finally:
            watch.remove(place)

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which is cancelled if the call is to end before it is done.

        Raises:
            SGLangCancelledError: The signal was set.
            SGLangDeadlineError: The deadline has passed.
        """
        task = asyncio.ensure_future(work)
        limit = None if self.deadline is None else max(self.seconds_left, 0.0)
        try:
            with self.watched() as signalled:
                await asyncio.wait({task, *signalled}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            let_go(task)
        if self.is_signalled():
            raise SGLangCancelledError("the call was cancelled by its signal before its answer began")
        raise SGLangDeadlineError(f"the deadline of {self.deadline:g} s has passed before the answer began")


def let_go(task: asyncio.Task[Any]) -> None:
    """Cancel a task that nobody waits for any more."""
    if not task.done():
        task.add_done_callback(consume)
        task.cancel()


def consume(done: asyncio.Task[Any]) -> None:
    """Take note of a finished task's exception, so that asyncio does not report it as never retrieved."""
    if not done.cancelled():
        done.exception()


class _Watch:
    """The calls of one event loop whose signals are looked at."""

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
            call.is_signalled()
        self._timer = asyncio.get_running_loop().call_later(POLL_INTERVAL_S, self._look)


# A watch does not hold its loop (but for the time of a timer), so it goes with it.
_watches: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
