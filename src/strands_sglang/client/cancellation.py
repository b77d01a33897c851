"""How one call waits: for an answer, for a free connection, for its next attempt; and what ends the waiting.

A call can be ended by its deadline and by a cancel signal (a `threading.Event`, which Strands sets from any thread).
Promises: what is waited for is never cancelled by the waiting; signals are looked at by one timer per event loop, not
one per call, and only while there is something to look at.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from enum import Enum
from typing import Any, TypeVar

from ..exceptions import SGLangCancelledError, SGLangDeadlineError

T = TypeVar("T")

POLL_INTERVAL_S = 0.05
"""How often cancel signals are looked at."""

_CLOCK_TOLERANCE_S = 0.001  # an event loop may call a little early


class AttemptTimeoutError(Exception):
    """The time limit of one attempt has passed."""


class End(Enum):
    """What ended a wait."""

    DONE = "done"
    """What was waited for."""
    TIME_OVER = "time_over"
    """The time limit of this wait, or `wake` was called."""
    DEADLINE = "deadline"
    """The deadline of the whole call."""
    SIGNALLED = "signalled"
    """The caller's cancel signal."""


class Cancellation:
    """The waiting of one call in one event loop, for one thing at a time.

    Attributes:
        deadline: Seconds from its start for everything; None for no limit.
        signal: Ends the waiting once it is set; None for none.
    """

    def __init__(self, deadline: float | None = None, signal: threading.Event | None = None) -> None:
        """Start the clock.

        Args:
            deadline: See the class.
            signal: See the class.
        """
        self.deadline = deadline
        self.signal = signal
        self._loop = asyncio.get_running_loop()
        self._ends_at = None if deadline is None else self._loop.time() + deadline
        self._waiter: asyncio.Future[None] | None = None

    @property
    def seconds_left(self) -> float:
        """Until the deadline; infinite without one."""
        return float("inf") if self._ends_at is None else self._ends_at - self._loop.time()

    async def until(self, work: asyncio.Future[Any] | None, timeout: float | None = None) -> End:
        """Wait until `work` is done, for at most `timeout` seconds and until the call is to end.

        Args:
            work: What is waited for; it goes on if the wait ends without it, or is cancelled. None: only time passes.
            timeout: Seconds, None for no limit.
        """
        if (end := self._end(work)) is not None:
            return end
        limits = [] if timeout is None else [self._loop.time() + timeout]
        if self._ends_at is not None:
            limits.append(self._ends_at)
        self._waiter = self._loop.create_future()
        timer = self._loop.call_at(min(limits), self.wake) if limits else None
        if work is not None:
            work.add_done_callback(self.wake)
        watch = None if self.signal is None else _watch_of(self._loop)
        if watch is not None and self.signal is not None:
            watch.add(self, self.signal)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if watch is not None:
                watch.remove(self)
            if timer is not None:
                timer.cancel()
            if work is not None:
                work.remove_done_callback(self.wake)
        return self._end(work) or End.TIME_OVER

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which is cancelled if the call is to end before it is done.

        Raises:
            SGLangCancelledError: The signal was set.
            SGLangDeadlineError: The deadline has passed.
        """
        task = self._loop.create_task(work)
        try:
            end = await self.until(task)
        finally:
            if not task.done():
                task.add_done_callback(consume)
                task.cancel()
        if end is End.DONE:
            return task.result()
        if end is End.SIGNALLED:
            raise SGLangCancelledError("the call was cancelled by its signal before its answer began")
        raise SGLangDeadlineError(f"the deadline of {self.deadline:g} s has passed before the answer began")

    def over(self) -> End | None:
        """What has ended the call already, `End.DEADLINE` or `End.SIGNALLED`; None if nothing has."""
        return self._end(None)

    def wake(self, _: Any = None) -> None:
        """End the present wait, if there is one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self, work: asyncio.Future[Any] | None) -> End | None:
        if work is not None and work.done():
            return End.DONE
        if self.signal is not None and self.signal.is_set():
            return End.SIGNALLED
        if self._ends_at is not None and self._loop.time() >= self._ends_at - _CLOCK_TOLERANCE_S:
            return End.DEADLINE
        return None


async def within(work: Coroutine[Any, Any, T], timeout: float | None) -> T:
    """Await `work` for at most `timeout` seconds.

    `asyncio.wait_for` before Python 3.12 loses a cancellation that arrives together with the result.

    Raises:
        AttemptTimeoutError: The time has passed; `work` was cancelled and has ended.
    """
    if timeout is None:
        return await work
    task = asyncio.get_running_loop().create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
        if not done:
            task.cancel()
            await asyncio.wait({task})
    except asyncio.CancelledError:
        task.add_done_callback(consume)
        task.cancel()
        raise
    if task.cancelled():
        raise AttemptTimeoutError(f"the limit is {timeout:g} s")
    return task.result()


def consume(done: asyncio.Task[Any]) -> None:
    """Take note of a finished task's exception, so that asyncio does not report it as never retrieved."""
    if not done.cancelled():
        done.exception()


class _Watch:
    """The signals that one event loop's calls wait for."""

    def __init__(self) -> None:
        self.signals: dict[Cancellation, threading.Event] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, waiting: Cancellation, signal: threading.Event) -> None:
        self.signals[waiting] = signal
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_INTERVAL_S, self._look)

    def remove(self, waiting: Cancellation) -> None:
        self.signals.pop(waiting, None)
        if not self.signals and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        for waiting, signal in tuple(self.signals.items()):
            if signal.is_set():
                waiting.wake()
        self._timer = asyncio.get_running_loop().call_later(POLL_INTERVAL_S, self._look)


# A watch does not hold its loop (but for the time of a timer), so it goes with it.
_watches: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _watch_of(loop: asyncio.AbstractEventLoop) -> _Watch:
    with _lock:
        watch = _watches.get(loop)
        if watch is None:
            watch = _watches[loop] = _Watch()
        return watch
