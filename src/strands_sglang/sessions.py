"""HTTP connections to one server, one pool per running event loop, and the requests in flight over them.

Why per loop: a connection belongs to the event loop that opened it, and Strands' synchronous `agent(...)` makes a new
loop for every call. Promises: a pool is closed when its loop ends, without "Unclosed client session" warnings; an abort
gets out even when the pool is full, the caller is being cancelled, or the loop is shutting down.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

import httpx
import orjson

from .transports import (
    KEEPALIVE_EXPIRY_S,
    AttemptTimeoutError,
    LentTransport,
    Transport,
    TransportSource,
    aiohttp_transport,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

ABORT_TIMEOUT_S = 2.0
"""How long one `/abort_request` may take."""
ABORT_WAIT_S = 1.0
"""How long a cancelled caller is held back for the abort to get out."""

JSON_HEADERS = {"content-type": "application/json"}


class LoopSession:
    """The connections of one event loop.

    Attributes:
        closed: Set once the session is closing; nothing new is sent over it.
    """

    def __init__(
        self, http: httpx.AsyncClient, *, base_url: str, max_connections: int, drop: Callable[[], None]
    ) -> None:
        """Wrap an HTTP client of the running loop.

        Args:
            http: The client; its own connection limit must not be lower than `max_connections` plus some aborts.
            base_url: The server's address, without a slash at the end.
            max_connections: Most generations at a time; more of them wait for their turn.
            drop: Lets go of the connections after the loop was closed, when nothing can be awaited any more.
        """
        self.closed = False
        self._http = http
        self._drop = drop
        self._base_url = base_url
        self._urls: dict[str, httpx.URL] = {}
        # The limit is not the connector's: an abort must pass while all slots are taken, and an attempt's time limit
        # should not run while it waits for its turn.
        self._slots = asyncio.Semaphore(max_connections)
        self._in_flight: set[str] = set()
        self._tasks: dict[Any, asyncio.Task[Any]] = {}
        self._guard: AsyncGenerator[None, None] | None = None

    async def request(self, method: str, path: str, content: bytes | None, *, timeout: float | None) -> httpx.Response:
        """Send one request and read the whole answer.

        Args:
            method: HTTP method.
            path: Path below the base URL.
            content: JSON body.
            timeout: Seconds for everything, None for no limit.

        Raises:
            AttemptTimeoutError: The time has passed.
        """
        headers = JSON_HEADERS if content is not None else None
        if (url := self._urls.get(path)) is None:
            url = self._urls[path] = httpx.URL(f"{self._base_url}{path}")  # parsing one costs 0.1 ms
        request = self._http.request(method, url, content=content, headers=headers)
        return await within(request, timeout)

    async def generate(self, content: bytes, rid: str, *, timeout: float | None) -> httpx.Response:
        """POST one attempt to `/generate` when its turn has come.

        A caller that is cancelled meanwhile leaves as soon as the server was told to abort, or after `ABORT_WAIT_S`.

        Raises:
            AttemptTimeoutError: The time has passed; the caller has to abort the attempt.
        """
        async with self._slots:
            self._in_flight.add(rid)
            try:
                return await self.request("POST", "/generate", content, timeout=timeout)
            except asyncio.CancelledError:
                await self.abort(rid, wait=ABORT_WAIT_S)
                raise
            finally:
                self._in_flight.discard(rid)

    async def abort(self, rid: str, *, wait: float = ABORT_TIMEOUT_S) -> None:
        """Tell the server to abort a request, and wait up to `wait` seconds for it to have heard.

        Never fails. A caller that is cancelled while waiting leaves at once; the abort still goes out.

        Args:
            rid: The exact id of an attempt, or the prefix that attempts in flight over this session got from their
                caller.
            wait: Seconds.
        """
        started = [other for other in self._in_flight if other.startswith(f"{rid}-")]
        aborts = {self._shared_task(("abort", one), partial(self._post_abort, one)) for one in started or [rid]}
        await asyncio.wait(aborts, timeout=wait)

    async def shared(self, key: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` once for all who ask under `key` while it runs; a caller that is cancelled does not end it."""
        return await asyncio.shield(self._shared_task(key, work))

    async def keep_until_loop_ends(self, at_end: Callable[[], object]) -> None:
        """Close this session when the running loop shuts down its asynchronous generators, as `asyncio.run` does.

        That is the one moment near the end of a loop at which a library can still await something.

        Args:
            at_end: Called then, or when the session is closed before.
        """

        async def guard() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                self.closed = True
                at_end()
                await self._http.aclose()

        self._guard = guard()
        await self._guard.__anext__()

    async def close(self) -> None:
        """Abort what is in flight, give the aborted requests a moment to return, and close the connections."""
        self.closed = True
        if self._in_flight:
            await asyncio.gather(*(self.abort(rid) for rid in tuple(self._in_flight)))
            await self._until_idle(ABORT_WAIT_S)
        if self._guard is not None:
            await self._guard.aclose()

    def drop(self) -> None:
        """Let go of the connections of a loop that is not running any more."""
        self.closed = True
        self._drop()

    async def _until_idle(self, wait: float) -> None:
        deadline = asyncio.get_running_loop().time() + wait
        while self._in_flight and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)

    async def _post_abort(self, rid: str) -> None:
        content = orjson.dumps({"rid": rid})
        for timeout in (ABORT_TIMEOUT_S, ABORT_WAIT_S):
            try:
                response = await self.request("POST", "/abort_request", content, timeout=timeout)
                logger.debug("rid=<%s>, status=<%d> | abort sent", rid, response.status_code)
                return
            except asyncio.CancelledError:
                continue  # only a loop that is shutting down cancels this task, and the server still has to hear of it
            except Exception as error:
                logger.debug("rid=<%s>, error=<%r> | abort did not get through", rid, error)
                return

    def _shared_task(self, key: Any, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.get_running_loop().create_task(work())
            task.add_done_callback(lambda done: self._forget(key, done))
        return task

    def _forget(self, key: Any, done: asyncio.Task[Any]) -> None:
        self._tasks.pop(key, None)
        consume(done)


class SessionPool:
    """One `LoopSession` per event loop, made at its first use. Thread-safe."""

    def __init__(
        self,
        base_url: str,
        *,
        max_connections: int,
        connect_timeout: float,
        transport: TransportSource | None,
        headers: Mapping[str, str],
    ) -> None:
        """Remember how to connect.

        Args:
            base_url: The server's address.
            max_connections: Most generations at a time in each loop.
            connect_timeout: Seconds for making a connection.
            transport: An httpx transport for all loops, or a factory that is called once for each.
            headers: Sent with every request.
        """
        self._headers = dict(headers)
        self._base_url = base_url
        self._max_connections = max_connections
        self._connect_timeout = connect_timeout
        self._transport = transport
        self._lock = threading.Lock()
        # A session holds its loop, so weak keys would never let go: entries leave when their loop ends, or are swept
        # out if it was closed without warning. The finalizer keeps them alive for long enough to be closed in order
        # when nobody has closed the client.
        self._sessions: dict[asyncio.AbstractEventLoop, LoopSession] = {}
        weakref.finalize(self, _abandon, self._sessions)

    async def current(self) -> LoopSession:
        """The running loop's session."""
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is not None:
            return session
        with self._lock:
            gone = [self._sessions.pop(other) for other in tuple(self._sessions) if other.is_closed()]
            session = self._sessions[loop] = self._open()
        for old in gone:
            old.drop()
        await session.keep_until_loop_ends(partial(self._sessions.pop, loop, None))
        return session

    async def close(self) -> None:
        """Close the sessions of all loops; those of loops in other threads over there."""
        with self._lock:
            sessions = dict(self._sessions)
            self._sessions.clear()
        for loop, session in sessions.items():
            if loop is asyncio.get_running_loop():
                await session.close()
            elif loop.is_running():
                elsewhere = asyncio.run_coroutine_threadsafe(session.close(), loop)
                await asyncio.wait({asyncio.wrap_future(elsewhere)}, timeout=2 * ABORT_TIMEOUT_S)
            else:
                session.drop()
        if isinstance(self._transport, Transport):
            await self._transport.aclose()

    def _open(self) -> LoopSession:
        drop: Callable[[], None] = lambda: None  # noqa: E731
        if self._transport is None:
            transport, drop = aiohttp_transport(https=self._base_url.startswith("https:"))
        elif isinstance(self._transport, Transport):
            transport = LentTransport(self._transport)
        else:
            transport = self._transport()
        # The only limit below httpx is the time for a connection: one attempt as a whole is timed by `within`.
        http = httpx.AsyncClient(
            transport=transport,
            headers=self._headers,
            trust_env=False,
            timeout=httpx.Timeout(None, connect=self._connect_timeout),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_EXPIRY_S),
        )
        return LoopSession(http, base_url=self._base_url, max_connections=self._max_connections, drop=drop)


def _abandon(sessions: dict[asyncio.AbstractEventLoop, LoopSession]) -> None:
    """Close what a client that is no more has left open; called in any thread, also at the end of the interpreter."""
    for loop, session in tuple(sessions.items()):
        if loop.is_running():
            asyncio.run_coroutine_threadsafe(session.close(), loop)
        else:
            session.drop()
    sessions.clear()


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
