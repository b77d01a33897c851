"""HTTP connections, one pool per running event loop, and the requests in flight over them.

Why per loop: a connection belongs to the event loop that opened it, and Strands' synchronous `agent(...)` makes a new
loop for every call. `httpx` is the interface and `aiohttp` the transport, because httpcore's pool costs ten times the
CPU at hundreds of concurrent requests; `aiohttp` is imported at the first request. Promises: a pool is closed when its
loop ends, without "Unclosed client session" warnings; an abort gets out even when the pool is full, the caller is being
cancelled, or the loop is shutting down; a connection that cannot be made, one that broke and an answer that is not HTTP
are told apart, whichever library reports them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import anyio
import httpx

from .aborts import ABORT_TIMEOUT_S, Aborter
from .balancer import Server
from .cancellation import consume
from .retries import FailureKind

T = TypeVar("T")

Transport = httpx.AsyncBaseTransport
TransportSource = Transport | Callable[[], Transport]

KEEPALIVE_EXPIRY_S = 4.0
"""Idle connections are dropped before the server does that (SGLang: after 5 s); a POST over a closing one is lost."""
DEAD_PEER_AFTER_S = 120
"""A peer that vanished without closing is noticed after about this time, also with no timeout set."""

ABORT_AGAIN_AFTER_S = (0.25, 0.5, 1.0)
"""Seconds between the aborts of one request that does not come back: the first may have overtaken the request."""

JSON_HEADERS = {"content-type": "application/json"}


parsed_url = lru_cache(maxsize=4096)(httpx.URL)
"""An address, parsed once: parsing one costs 0.1 ms."""


class AttemptTimeoutError(Exception):
    """The time limit of one attempt has passed."""


class Flight(NamedTuple):
    """One attempt that was sent to `/generate`.

    Attributes:
        rid: Its id.
        server: Where it was sent.
        answer: Is done when the whole answer is there, or will not come.
    """

    rid: str
    server: Server
    answer: asyncio.Task[httpx.Response]

    @property
    def response(self) -> httpx.Response | None:
        """The answer, if it has come."""
        answer = self.answer
        return answer.result() if answer.done() and not answer.cancelled() and answer.exception() is None else None


class LoopSession:
    """The connections of one event loop.

    Attributes:
        http: Sends what is asked for in this loop.
        slots: One is taken by each generation. The limit is not the connector's: an abort must pass while all slots are
            taken, and an attempt's time limit should not run while it waits for its turn.
        flights: The generations that were sent and have not `landed`, by their ids.
        closed: Set once the session is closing; nothing new is sent over it.
        closing: Is done once it is being closed.
    """

    def __init__(self, http: httpx.AsyncClient, *, max_connections: int, drop: Callable[[], None]) -> None:
        """Wrap an HTTP client of the running loop.

        Args:
            http: The client; its own connection limit must not be lower than `max_connections` plus some aborts.
            max_connections: Most generations at a time; more of them wait for their turn.
            drop: Lets go of the connections after the loop was closed, when nothing can be awaited any more.
        """
        self.http = http
        self.slots = asyncio.Semaphore(max_connections)
        self.flights: dict[str, Flight] = {}
        self.closed = False
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self.closing = self._loop.create_future()
        self._aborter = Aborter(self)
        self._tasks: dict[Any, asyncio.Task[Any]] = {}

    async def request(self, method: str, url: str, content: bytes | None, *, timeout: float) -> httpx.Response:
        """Send one request and read the whole answer.

        Args:
            method: HTTP method.
            url: The whole address.
            content: JSON body.
            timeout: Seconds for everything.

        Raises:
            AttemptTimeoutError: The time has passed.
        """
        headers = JSON_HEADERS if content is not None else None
        with anyio.move_on_after(timeout):
            return await self.http.request(method, parsed_url(url), content=content, headers=headers)
        raise AttemptTimeoutError(f"the limit is {timeout:g} s")

    async def call_back(self, flight: Flight, grace: float) -> None:
        """Abort a flight, and wait up to `grace` seconds for the answer with what was sampled until then.

        A caller that is cancelled meanwhile is held back for that time, then the cancellation goes on; the abort gets
        out in any case.

        Args:
            flight: What was sent.
            grace: Seconds; with 0 nothing is waited for.
        """
        ends_at, again, cancelled = self._loop.time() + grace, iter(ABORT_AGAIN_AFTER_S), False
        abort = self._abort_task(flight.server.base_url, flight.rid)
        retell_at = self._loop.time() + next(again, math.inf)
        # A cancel scope of anyio's cancels its tasks again in every round of the event loop, unless they are shielded.
        with anyio.CancelScope(shield=True):
            while (now := self._loop.time()) < ends_at and flight.response is None:
                # Without an answer the abort still has to get out; where nobody has heard of it, nothing will come.
                if abort.done() and (flight.answer.done() or abort.cancelled() or not abort.result()):
                    break
                if abort.done() and now >= retell_at:
                    abort = self._abort_task(flight.server.base_url, flight.rid, again=True)
                    retell_at = now + next(again, math.inf)
                limit = min(ends_at, retell_at) if abort.done() else ends_at
                pending = [task for task in (flight.answer, abort) if not task.done()]
                try:
                    await asyncio.wait(pending, timeout=max(limit - now, 0.0), return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    async def abort(self, rid: str, base_urls: tuple[str, ...]) -> None:
        """Tell servers to abort a request, and wait up to 2 s for them to have heard.

        Never fails. A caller that is cancelled while waiting leaves at once; the abort still goes out.

        Args:
            rid: The exact id of an attempt, or the prefix that attempts in flight over this session got from their
                caller.
            base_urls: Where to, if nothing of that name is in flight here.
        """
        flights = [flight for flight in self.flights.values() if flight.rid == rid or flight.rid.startswith(f"{rid}-")]
        where = [(flight.server.base_url, flight.rid) for flight in flights] or [(url, rid) for url in base_urls]
        await asyncio.wait({self._abort_task(*one) for one in where}, timeout=ABORT_TIMEOUT_S)

    async def shared(self, key: Any, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` once for all who ask under `key` while it runs; a caller that is cancelled does not end it."""
        return await asyncio.shield(self.background(key, work))

    def background(self, key: Any, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """The task that runs `work`, one at a time under each `key`."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = self._loop.create_task(work())
            task.add_done_callback(consume)
            task.add_done_callback(lambda _: self._tasks.pop(key))
        return task

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
                await self.http.aclose()

        self._guard = guard()
        await self._guard.__anext__()

    async def close(self, grace: float) -> None:
        """Abort what is in flight, wait up to `grace` seconds for its answers, and close the connections."""
        self.closed = True
        if not self.closing.done():
            self.closing.set_result(None)
        await asyncio.gather(*(self.call_back(flight, grace) for flight in tuple(self.flights.values())))
        await self._guard.aclose()

    def drop(self) -> None:
        """Let go of the connections of a loop that is not running any more."""
        self.closed = True
        self._drop()

    def _abort_task(self, base_url: str, rid: str, *, again: bool = False) -> asyncio.Task[bool]:
        return self.background(("abort", base_url, rid), partial(self._aborter.abort, base_url, rid, again=again))


def connect(
    source: TransportSource | None,
    *,
    https: bool,
    max_connections: int,
    connect_timeout: float,
    headers: Mapping[str, str],
) -> LoopSession:
    """Make the session of the running loop.

    Args:
        source: An httpx transport for all loops, or a factory that is called once for each; None for aiohttp.
        https: Whether certificates are needed.
        max_connections: Most generations at a time.
        connect_timeout: Seconds for making a connection.
        headers: Sent with every request.
    """
    drop: Callable[[], None] = lambda: None  # noqa: E731
    if source is None:
        transport, drop = aiohttp_transport(https=https)
    else:
        transport = LentTransport(source) if isinstance(source, Transport) else source()
    # The only limit below httpx is the time for a connection: one attempt as a whole is timed by who waits for it.
    http = httpx.AsyncClient(
        transport=transport,
        headers=headers,
        trust_env=False,
        timeout=httpx.Timeout(None, connect=connect_timeout),
        limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_EXPIRY_S),
    )
    return LoopSession(http, max_connections=max_connections, drop=drop)


class SessionPool:
    """One `LoopSession` per event loop, made at its first use. Thread-safe."""

    def __init__(self, connect: Callable[[], LoopSession], abort_grace: float) -> None:
        """Open nothing yet.

        Args:
            connect: Makes the running loop's session.
            abort_grace: Seconds for the answers of what is aborted when a session is closed.
        """
        self._connect = connect
        self._abort_grace = abort_grace
        self._lock = threading.Lock()
        # A session holds its loop, so weak keys would never let go: entries leave when their loop ends, or are swept
        # out if it was closed without warning. The finalizer keeps them alive for long enough to be closed in order
        # when nobody has closed the client.
        self._sessions: dict[asyncio.AbstractEventLoop, LoopSession] = {}
        weakref.finalize(self, _abandon, self._sessions, abort_grace)

    async def current(self) -> LoopSession:
        """The running loop's session."""
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is not None:
            return session
        with self._lock:
            gone = [self._sessions.pop(other) for other in tuple(self._sessions) if other.is_closed()]
            session = self._sessions[loop] = self._connect()
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
                await session.close(self._abort_grace)
            elif loop.is_running():
                elsewhere = asyncio.run_coroutine_threadsafe(session.close(self._abort_grace), loop)
                await asyncio.wait({asyncio.wrap_future(elsewhere)}, timeout=self._abort_grace + ABORT_TIMEOUT_S)
            else:
                session.drop()


def _abandon(sessions: dict[asyncio.AbstractEventLoop, LoopSession], grace: float) -> None:
    """Close what a client that is no more has left open; called in any thread, also at the end of the interpreter."""
    for loop, session in tuple(sessions.items()):
        if loop.is_running():
            asyncio.run_coroutine_threadsafe(session.close(grace), loop)
        else:
            session.drop()
    sessions.clear()


class LentTransport(httpx.AsyncBaseTransport):
    """A transport that outlives the sessions which use it."""

    def __init__(self, transport: Transport) -> None:
        """Lend out `transport`."""
        self._transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Pass the request on."""
        return await self._transport.handle_async_request(request)


def aiohttp_transport(*, https: bool) -> tuple[Transport, Callable[[], None]]:
    """An httpx transport over aiohttp for the running loop, and what drops its connections when the loop is gone."""
    import aiohttp
    from httpx_aiohttp import AiohttpTransport

    # The transport wants a context although it uses its session's. Loading certificates takes 20 ms, so for http:// it
    # gets one that trusts nobody.
    context = httpx.create_ssl_context(trust_env=False) if https else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    connector = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=KEEPALIVE_EXPIRY_S, ssl=context, socket_factory=_keepalive_socket
    )
    session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)

    def drop() -> None:
        session.detach()
        # aiohttp only offers a coroutine for this. It closes the connections before it first waits for something, and
        # there is no loop left to wait in.
        closing = connector.close().__await__()
        with contextlib.suppress(StopIteration, RuntimeError):
            next(closing)

    return AiohttpTransport(verify=context, trust_env=False, client=session), drop


def _keepalive_socket(address: Any) -> socket.socket:
    family, kind, proto, _, _ = address
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every platform has all of these. The last one covers a peer that vanishes while data are on the way to it.
    for name, value in (
        ("TCP_KEEPIDLE", DEAD_PEER_AFTER_S // 2),
        ("TCP_KEEPALIVE", DEAD_PEER_AFTER_S // 2),
        ("TCP_KEEPINTVL", DEAD_PEER_AFTER_S // 8),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", DEAD_PEER_AFTER_S * 1000),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


_KINDS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], FailureKind], ...] = (
    ((ssl.SSLError, httpx.UnsupportedProtocol), FailureKind.FINAL),
    ((httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, ConnectionRefusedError), FailureKind.UNREACHABLE),
    ((AttemptTimeoutError, httpx.TimeoutException), FailureKind.TIMED_OUT),
    (httpx.DecodingError, FailureKind.UNDECODABLE),
    ((httpx.TransportError, OSError), FailureKind.DROPPED),
)


def failure_kind(error: Exception) -> FailureKind | None:
    """Tell by its chain of causes how an attempt failed; None for an error that is not the network's.

    httpx-aiohttp 0.2 reports refused, reset and closed connections alike as `httpx.ConnectTimeout`, and lets some of
    aiohttp's errors through as they are. So aiohttp's error decides where there is one.
    """
    import aiohttp

    of_aiohttp = (
        (
            (aiohttp.ClientConnectorCertificateError, aiohttp.ClientSSLError, aiohttp.InvalidURL),
            FailureKind.FINAL,
        ),
        ((aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError), FailureKind.UNREACHABLE),
        (aiohttp.ServerTimeoutError, FailureKind.TIMED_OUT),
        (aiohttp.ClientResponseError, FailureKind.UNDECODABLE),
        (aiohttp.ClientError, FailureKind.DROPPED),
    )
    matches = (
        kind
        for kinds in (of_aiohttp, _KINDS)
        for link in _causes(error)
        for types, kind in kinds
        if isinstance(link, types)
    )
    return next(matches, None)


def root_cause(error: Exception) -> str:
    """The last error with a text in the chain of causes: what happened, not how it was reported."""
    telling = [link for link in _causes(error) if isinstance(link, Exception) and str(link)]
    cause = telling[-1] if telling else error
    return " ".join(f"{type(cause).__name__}: {cause}".split())


def _causes(error: BaseException) -> list[BaseException]:
    chain = [error]
    while link := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__):
        if link in chain:
            break
        chain.append(link)
    return chain
