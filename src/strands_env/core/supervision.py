"""Running the code of an episode so that it has an end and is cleaned up however its caller is interrupted.

All of an episode, from `reset` to `cleanup`, runs in one task: what is entered in one place of it can be left in
another, as cancel scopes and context variables want it. Whoever interrupts it, the caller or a timer, says so here,
so that the episode can tell one from the other.

Functions that block have a thread of their own each. An event loop's default threads are few and shared: functions
that hang take them from everybody else, and the process waits for them when it ends. A thread of its own is waited for
by nobody but its caller.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import anyio

logger = logging.getLogger(__name__)

T = TypeVar("T")

INSIST_AFTER = 5.0
"""Seconds after which code that went on although it was interrupted is interrupted again."""
ABANDON_AFTER = 1.0
"""Seconds after which cleaning up that goes on although it was interrupted is left to itself."""

_running: set[asyncio.Task[Any]] = set()  # an event loop holds its tasks weakly


class Supervisor:
    """Interrupts one task.

    Attributes:
        is_cancelled: Whether the caller has cancelled.
    """

    def __init__(self) -> None:
        """Begin with nothing to interrupt."""
        self.is_cancelled = False
        self._abandoned_with: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[Any] | None = None
        self._may_interrupt = True

    @property
    def is_abandoned(self) -> bool:
        """Whether the task goes on for nobody."""
        return self._abandoned_with.done()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in a task of its own, to its end or until it is abandoned.

        Raises:
            CancelledError: The caller was cancelled; the task has ended, too.
        """
        self._task = task = asyncio.ensure_future(coroutine)
        _running.add(task)
        task.add_done_callback(_forget)
        cancelled: asyncio.CancelledError | None = None
        while not (task.done() or self.is_abandoned):
            try:
                # Once is enough: a cancel scope of anyio's cancels again in every round of the event loop.
                with anyio.CancelScope(shield=self.is_cancelled):
                    await asyncio.wait(
                        {task, self._abandoned_with},
                        timeout=INSIST_AFTER if self.is_cancelled else None,
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
        """Await a coroutine in the task, for so long.

        Args:
            seconds: How long; None for any time.
            coroutine: What to await.
            what: Its name, for the error.
            uninterrupted: Whether the caller's cancellation waits until it has ended.
            outcome: What `run` is to return should the coroutine not end although its time is up; None to wait for it.

        Raises:
            asyncio.TimeoutError: The time is up.
            CancelledError: The caller has cancelled.
        """
        if self.is_cancelled and not uninterrupted:
            coroutine.close()
            raise asyncio.CancelledError
        task, is_late = self._task, False
        assert task is not None

        def interrupt(timer: _Timer) -> None:
            nonlocal is_late
            if is_late and outcome is not None:
                logger.warning("%s does not end although it was cancelled, and is left to itself", what)
                self._abandoned_with.set_result(outcome)
                return
            is_late = True
            task.cancel()
            timer.start(ABANDON_AFTER if outcome is not None else INSIST_AFTER)

        timer = None if seconds is None else _Timer(seconds, interrupt, _timer.get())
        before = _timer.set(timer)
        self._may_interrupt = not uninterrupted
        try:
            return await coroutine
        except asyncio.CancelledError:
            # It has been noticed, and what cleans up may use timeouts of its own.
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
    """What waits inside, for a worker that others keep busy, does not count as time of its own.

    Yields:
        What to call, in the event loop, when the waiting is over; the end of the block at the latest.
    """
    timer = _timer.get()
    with ExitStack() as waiting:
        if timer is not None:
            timer.pause()
            waiting.callback(timer.resume)
        yield waiting.close


class _Timer:
    """Calls a function once its seconds are over, those in queues not counted."""

    def __init__(self, seconds: float, call: Callable[[_Timer], None], outer: _Timer | None) -> None:
        self._call = call
        self._outer = outer
        self._queued = 0
        self._loop = asyncio.get_running_loop()
        self.start(seconds)

    def start(self, seconds: float) -> None:
        self._left = seconds
        self._began = self._loop.time()
        self._handle = self._loop.call_later(seconds, self._call, self)

    def pause(self) -> None:
        self._queued += 1
        if self._queued == 1:
            self._left -= self._loop.time() - self._began
            self._handle.cancel()
        if self._outer is not None:
            self._outer.pause()

    def resume(self) -> None:
        self._queued -= 1
        if self._queued == 0 and self._left > 0:
            self.start(self._left)
        if self._outer is not None:
            self._outer.resume()

    def cancel(self) -> None:
        self._left = 0.0
        self._handle.cancel()


_timer: ContextVar[_Timer | None] = ContextVar("timer", default=None)


def _forget(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # seen, so that nobody complains that it was not


# --- functions of the user ---


async def in_thread(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Run a function in a thread of its own, in this context. If the caller is cancelled, the thread ends by itself.

    Args:
        function: The function.
        *args: Its arguments.
        **kwargs: Its arguments by name.

    Raises:
        RuntimeError: It raised what would end a task or an event loop rather than say that something failed.
    """
    context, outcome = contextvars.copy_context(), Future[T]()
    outcome.set_running_or_notify_cancel()

    def work() -> None:
        try:
            outcome.set_result(context.run(function, *args, **kwargs))
        except BaseException as error:
            outcome.set_exception(as_failure(error))

    threading.Thread(target=work, name=getattr(function, "__name__", None), daemon=True).start()
    return await asyncio.wrap_future(outcome)


async def called(function: Callable[..., Any], /, *args: Any, grace: float | None = 0.0, **kwargs: Any) -> Any:
    """Call a function of the user's that may be async; one that is not may block.

    Args:
        function: The function.
        *args: Its arguments.
        grace: Seconds for which a caller that is cancelled waits for one that blocks; None to wait for its end.
        **kwargs: Its arguments by name.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    running = asyncio.ensure_future(in_thread(function, *args, **kwargs))
    try:
        value = await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running}, timeout=grace)
        running.cancel()
        raise
    return await settled(value)


async def settled(value: Any) -> Any:
    """What a function of the user's that may be async has returned."""
    return await value if inspect.isawaitable(value) else value


def as_failure(error: BaseException) -> Exception:
    """An error as one that says that something failed: no exit, interrupt, cancellation or end of an iterator."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    if isinstance(error, SystemExit):
        failure = RuntimeError(f"SystemExit: it asked for the process to exit ({error.code!r})")
    else:
        try:
            said = f": {error}" if str(error) else ""
        except Exception:  # a text that cannot be made must not keep the caller waiting
            said = ""
        failure = RuntimeError(f"it raised {type(error).__name__}{said}")
    if not isinstance(error, asyncio.CancelledError):  # nobody has cancelled what goes on with this error
        failure.__cause__ = error
    return failure
