"""Functions that block, each in a thread of its own.

An event loop's default threads are few and shared: functions that hang take them from everybody else, and the process
waits for them when it ends. A thread of its own is waited for by nobody but its caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run a function in a thread of its own, in this context. If the caller is cancelled, the thread ends by itself.

    Args:
        function: The function.
        *args: Its arguments.
        **kwargs: Its arguments by name.

    Raises:
        RuntimeError: It raised what would end a task or an event loop rather than say that something failed.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function, *args, **kwargs)
        except BaseException as raised:
            error = as_failure(raised)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=getattr(function, "__name__", None), daemon=True).start()
    return await done


async def called(function: Callable[..., Any], *args: Any, grace: float = 0.0, **kwargs: Any) -> Any:
    """Call a function of the user's that may be async; one that is not may block.

    Args:
        function: The function.
        *args: Its arguments.
        grace: Seconds for which a caller that is cancelled waits for one that blocks.
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
