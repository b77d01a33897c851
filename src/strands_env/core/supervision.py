"""Supervision of an episode's code: it always ends and is cleaned up, however its caller is interrupted.

An episode runs in one task, from `reset` to `cleanup`: cancel scopes and context variables that one part of it enters
can be left in another. The caller and timers interrupt it only through the `Supervisor`, so that the episode can tell
the two apart.

Each call of a blocking function runs in its own thread. The default threads of an event loop are few and shared:
functions that hang would block other users of the pool, and the process would wait for them when it exits. Only the
caller waits for a thread of its own.

Episodes take turns: each begins its model calls in its own iterations of the event loop. What else is ready runs in
between.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import anyio

logger = logging.getLogger(__name__)

T = TypeVar("T")

RECANCEL_AFTER = 5.0
"""Seconds after which code that ignores its cancellation is cancelled again."""
ABANDON_AFTER = 1.0
"""Seconds after which a cleanup that ignores its cancellation is abandoned."""

_running: set[asyncio.Task[Any]] = set()  # an event loop holds only weak references to its tasks


class Supervisor:
    """Runs and interrupts one task.

    Attributes:
        is_cancelled: Whether the caller was cancelled.
    """

    def __init__(self) -> None:
        """Create a supervisor without a task."""
        self.is_cancelled = False
        self._abandoned_with: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[Any] | None = None
        self._may_interrupt = True

    @property
    def is_abandoned(self) -> bool:
        """Whether the task still runs but its result is no longer awaited."""
        return self._abandoned_with.done()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in its own task until it ends or is abandoned.

        Raises:
            CancelledError: The caller was cancelled; the task has ended.
        """
        self._task = task = asyncio.ensure_future(coroutine)
        _running.add(task)
        task.add_done_callback(_forget)
        cancelled: asyncio.CancelledError | None = None
        while not (task.done() or self.is_abandoned):
            try:
                # Once is enough: anyio's cancel scopes cancel again in every iteration of the event loop.
                with anyio.CancelScope(shield=self.is_cancelled):
                    await asyncio.wait(
                        {task, self._abandoned_with},
                        timeout=RECANCEL_AFTER if self.is_cancelled else None,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
            except asyncio.CancelledError as error:
                cancelled = error
                self.is_cancelled = True
            if self.is_cancelled and self._may_interrupt and not task.done():
                task.cancel()
        if cancelled is not None:
            raise cancelled
        result: T = task.result() if task.done() else self._abandoned_with.result()
        return result

    async def within(
        self,
        seconds: float | None,
        coroutine: Coroutine[Any, Any, T],
        *,
        what: str,
        uninterrupted: bool = False,
        outcome: Any = None,
    ) -> T:
        """Await a coroutine in the task, with a time limit.

        Args:
            seconds: Time limit in seconds; None for no limit.
            coroutine: Coroutine to await.
            what: Name for messages.
            uninterrupted: Whether the caller's cancellation is deferred until the coroutine ends.
            outcome: Return value of `run` if the coroutine ignores its cancellation after the time limit; None to wait
                for it.

        Raises:
            asyncio.TimeoutError: The coroutine exceeded the time limit.
            CancelledError: The caller was cancelled.
        """
        if self.is_cancelled and not uninterrupted:
            coroutine.close()
            raise asyncio.CancelledError
        task, is_late = self._task, False
        assert task is not None

        def interrupt(timer: _Timer) -> None:
            nonlocal is_late
            if is_late and outcome is not None:
                logger.warning("%s was cancelled but did not end, and is abandoned", what)
                self._abandoned_with.set_result(outcome)
                return
            is_late = True
            task.cancel()
            timer.start(ABANDON_AFTER if outcome is not None else RECANCEL_AFTER)

        timer = None if seconds is None else _Timer(seconds, interrupt, _timer.get())
        before = _timer.set(timer)
        self._may_interrupt = not uninterrupted
        try:
            return await coroutine
        except asyncio.CancelledError:
            # The cancellation is handled here; cleanup code may use its own timeouts.
            for _ in range(getattr(task, "cancelling", int)()):
                task.uncancel()  # type: ignore[attr-defined, unused-ignore]  # Python 3.11
            if is_late and (uninterrupted or not self.is_cancelled):
                raise asyncio.TimeoutError(f"{what} took longer than {seconds:g} seconds") from None
            raise
        finally:
            self._may_interrupt = False
            _timer.reset(before)
            if timer is not None:
                timer.cancel()


@contextmanager
def queued() -> Iterator[Callable[[], None]]:
    """Pause the timeouts of the current task while it waits for a busy worker.

    Yields:
        Function that resumes them, to be called in the event loop; the end of the block resumes them at the latest.
    """
    timer = _timer.get()
    with ExitStack() as waiting:
        if timer is not None:
            timer.pause()
            waiting.callback(timer.resume)
        yield waiting.close


def start_limited(
    coroutine: Coroutine[Any, Any, T], seconds: float | None, call: Callable[[], None]
) -> asyncio.Task[T]:
    """Start a task, and call a function if it has not ended in time. Time in queues does not count.

    Args:
        coroutine: What the task runs.
        seconds: Time limit in seconds; None for no limit.
        call: Function to call in the event loop.
    """
    outer = _timer.get()
    timer = None if seconds is None else _Timer(seconds, lambda _: call(), outer)
    before = _timer.set(timer or outer)
    task = asyncio.ensure_future(coroutine)
    _timer.reset(before)
    if timer is not None:
        task.add_done_callback(lambda _: timer.cancel())
    return task


class _Timer:
    """Calls a function after some seconds, not counting time in queues."""

    def __init__(self, seconds: float, call: Callable[[_Timer], None], outer: _Timer | None) -> None:
        self._call = call
        self._outer = outer
        self._queued = 0
        self._loop = asyncio.get_running_loop()
        self.start(seconds)

    def start(self, seconds: float) -> None:
        self._left = seconds
        self._is_over = False
        self._began = self._loop.time()
        self._handle = self._loop.call_later(seconds, self._end)

    def _end(self) -> None:
        self._is_over = True
        self._call(self)

    def pause(self) -> None:
        self._queued += 1
        if self._queued == 1:
            self._left -= self._loop.time() - self._began
            self._handle.cancel()
        if self._outer is not None:
            self._outer.pause()

    def resume(self) -> None:
        self._queued -= 1
        if self._queued == 0 and not self._is_over:
            self.start(self._left)  # below 0 if the loop was busy beyond the limit
        if self._outer is not None:
            self._outer.resume()

    def cancel(self) -> None:
        self._is_over = True
        self._handle.cancel()


_timer: ContextVar[_Timer | None] = ContextVar("timer", default=None)


def _forget(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # mark the exception as retrieved


# --- turns on the event loop ---


_waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, deque[asyncio.Future[None]]] = WeakKeyDictionary()
"""What waits for its turn, by event loop."""


async def take_turn() -> None:
    """Wait until the event loop has run what else is ready, and no other caller resumes in the same iteration.

    An episode computes for milliseconds before its first request and before each later one. When a thousand start at
    once, or their answers arrive together, the loop would stop for seconds, with all requests and timers. Timeouts of
    the current task are paused.
    """
    loop = asyncio.get_running_loop()
    waiting, turn = _waiting.setdefault(loop, deque()), loop.create_future()
    waiting.append(turn)
    if len(waiting) == 1:
        loop.call_soon(_give_turn, loop, waiting)
    with queued():
        await turn


def _give_turn(loop: asyncio.AbstractEventLoop, waiting: deque[asyncio.Future[None]]) -> None:
    while waiting:
        turn = waiting.popleft()
        if not turn.done():  # its caller may be cancelled
            turn.set_result(None)
            break
    if waiting:
        loop.call_soon(_give_turn, loop, waiting)


# --- functions of the user ---


async def run_in_thread(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Run a function in its own thread, in a copy of the current context.

    A cancelled caller does not wait for the thread.

    Args:
        function: Function to call.
        *args: Positional arguments.
        **kwargs: Keyword arguments.

    Raises:
        RuntimeError: The function raised an exception that would end the task or the event loop.
    """
    context, outcome = contextvars.copy_context(), Future[T]()
    outcome.set_running_or_notify_cancel()

    def work() -> None:
        try:
            outcome.set_result(context.run(function, *args, **kwargs))
        except BaseException as error:
            outcome.set_exception(as_exception(error))

    threading.Thread(target=work, name=getattr(function, "__name__", None), daemon=True).start()
    return await asyncio.wrap_future(outcome)


async def invoke(function: Callable[..., Any], /, *args: Any, grace: float | None = 0.0, **kwargs: Any) -> Any:
    """Call a user's function: await an async one, run a sync one in its own thread.

    Args:
        function: Function to call.
        *args: Positional arguments.
        grace: Seconds for which a cancelled caller waits for a sync function; None to wait until it ends.
        **kwargs: Keyword arguments.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    running = asyncio.ensure_future(run_in_thread(function, *args, **kwargs))
    try:
        value = await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running}, timeout=grace)
        running.cancel()
        raise
    return await maybe_await(value)


async def expendable(function: Callable[..., Coroutine[Any, Any, T]], /, *args: Any) -> T:
    """Await an async function whose caller need not wait for it: one that ignores its cancellation is ended.

    Args:
        function: Function to call, in its own task.
        *args: Positional arguments.
    """

    async def contained() -> T:
        try:
            return await function(*args)
        except (SystemExit, GeneratorExit) as error:  # they would end the event loop
            raise as_exception(error) from error

    work = contained()
    task = asyncio.ensure_future(work)
    task.add_done_callback(_forget)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=RECANCEL_AFTER)
        finally:
            if not task.done():
                logger.warning("%s was cancelled but did not end, and is abandoned", function.__name__)
                with suppress(RuntimeError):  # it ignores this, too
                    work.close()
                task.cancel()  # wake the task, which finds its coroutine closed
        raise


async def maybe_await(value: Any) -> Any:
    """Await a value if it is awaitable; return it otherwise."""
    return await value if inspect.isawaitable(value) else value


def as_exception(error: BaseException) -> Exception:
    """Convert exits, interrupts, cancellations and ends of iterators to an exception that only reports a failure."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    if isinstance(error, SystemExit):
        failure = RuntimeError(f"SystemExit: the code called exit ({error.code!r})")
    else:
        try:
            text = f": {error}" if str(error) else ""
        except Exception:  # its __str__ raises; the caller must not wait forever
            text = ""
        failure = RuntimeError(f"the code raised {type(error).__name__}{text}")
    if not isinstance(error, asyncio.CancelledError):  # as a cause it would make the failure look like a cancellation
        failure.__cause__ = error
    return failure
