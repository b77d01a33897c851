"""HTTP connections, one pool per running event loop, and the requests in flight over them.

Pools are per loop because a connection belongs to the event loop that opened it, and Strands' synchronous `agent(...)`
makes a new loop for every call. `httpx` is the interface and `aiohttp` the transport: httpcore's pool costs ten times
the CPU at hundreds of concurrent requests. `aiohttp` is imported on the first request.

A pool is closed when its loop ends, without "Unclosed client session" warnings. An abort is sent even when the pool is
full, the caller is being cancelled, or the loop is shutting down. A failure to connect, a broken connection and a
response that is not HTTP are distinguished, whichever library reports them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import math
import os
import socket
import ssl
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import anyio
import httpx

from ..shown import one_line, without_credentials
from .aborts import ABORT_TIMEOUT_S, Aborter
from .balancer import Server
from .cancellation import consume
from .prefill import Openings
from .retries import FailureKind
from .routers import Workers
from .turnstile import Turnstile

T = TypeVar("T")

Transport = httpx.AsyncBaseTransport
TransportSource = Transport | Callable[[], Transport]

KEEPALIVE_EXPIRY_S = 4.0
"""Idle connections are dropped before the server drops them (SGLang: 5 s), since a POST over a closing one is lost."""
DEAD_PEER_AFTER_S = 120
"""Time after which a peer that vanished without closing is noticed, even without a timeout."""

ONE_WRITE_BYTES = 2**20
"""Larger bodies are written in pieces; aiohttp warns of others, because one write of them holds the event loop."""

ABORT_AGAIN_AFTER_S = (0.25, 0.5, 1.0)
"""Seconds between the aborts of one unanswered request: the first abort may have overtaken the request."""

RawHeaders = tuple[tuple[bytes, bytes], ...]

JSON_HEADERS = {"content-type": "application/json"}


parsed_url = lru_cache(maxsize=4096)(httpx.URL)
"""Parse an address, once: parsing costs 0.1 ms."""


class AttemptTimeoutError(Exception):
    """The time limit of one attempt is over."""


class Reply(NamedTuple):
    """A successful response of which only the body matters, for a tenth of the cost of an `httpx.Response`.

    Attributes:
        content: The decoded body.
        is_success: True.
    """

    content: bytes
    is_success: bool = True


class Head:
    """What the POST requests to one address have in common.

    Attributes:
        url: The address.
        headers: Headers except those of the body.
        address: The address as text.
        items: The headers, as aiohttp takes them.
    """

    def __init__(self, url: httpx.URL, headers: httpx.Headers, timeout: dict[str, float | None]) -> None:
        """Take what httpx has prepared."""
        self.url, self.headers = url, headers
        self.address = str(url)
        self.items = headers.multi_items()
        self._extensions = {"timeout": timeout}

    def request(self, content: bytes) -> httpx.Request:
        """Return a request for any transport."""
        stream = httpx.ByteStream(content)
        request = httpx.Request("POST", self.url, headers=self.headers, stream=stream, extensions=self._extensions)
        request.headers["content-length"] = str(len(content))
        return request


class Flight(NamedTuple):
    """One attempt that was sent to `/generate`.

    Attributes:
        rid: Id of the attempt.
        server: Server it was sent to.
        answer: Task that is done once the response is complete or has failed.
    """

    rid: str
    server: Server
    answer: asyncio.Task[httpx.Response | Reply]

    @property
    def response(self) -> httpx.Response | Reply | None:
        """The response, if it has arrived."""
        answer = self.answer
        return answer.result() if answer.done() and not answer.cancelled() and answer.exception() is None else None


class LoopSession:
    """The connections of one event loop.

    Attributes:
        http: HTTP client of this loop.
        turnstile: Where a generation waits before it is encoded, sent or decoded while many others are.
        slots: Semaphore with one slot per generation. The connector has no limit of its own: an abort must pass while
            all slots are taken, and an attempt's time limit must not run while it waits for a slot.
        flights: Generations in flight, by id.
        openings: Opening prompts that each server has computed or is computing.
        closed: Whether the session is closing; nothing more is sent over it.
        closing: Future that is done once the session is closing.
        workers: Workers of the routers among the servers.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        aiohttp_transport: AiohttpTransport | None,
        credentials: dict[str, httpx.BasicAuth],
        *,
        max_connections: int,
    ) -> None:
        """Wrap an HTTP client of the running loop.

        Args:
            http: Client whose own connection limit leaves room for `max_connections` and some aborts.
            aiohttp_transport: Its transport, if no other one was asked for.
            credentials: The credentials that the client sends, by address.
            max_connections: Maximum number of concurrent generations; further ones wait.
        """
        self.http = http
        self._credentials = credentials
        self._heads: dict[str, Head] = {}
        self.turnstile = Turnstile()
        self.slots = asyncio.Semaphore(max_connections)
        self.flights: dict[str, Flight] = {}
        self.openings: dict[Server, Openings] = {}
        self.closed = False
        self._aiohttp_transport = aiohttp_transport
        self._loop = asyncio.get_running_loop()
        self.closing = self._loop.create_future()
        self.workers = Workers(self)
        self._aborter = Aborter(self)
        self._tasks: dict[Any, asyncio.Task[Any]] = {}

    def keep_credentials(self, addresses: Iterable[str]) -> tuple[str, ...]:
        """Send the credentials in some addresses with requests to them; return the addresses without credentials."""
        for address, auth in credentials_of(addresses).items():
            self._credentials.setdefault(address, auth)
        return tuple(dict.fromkeys(map(without_credentials, addresses)))

    async def request(self, method: str, url: str, content: bytes | None, *, timeout: float) -> httpx.Response:
        """Send one request and read the whole response.

        Args:
            method: HTTP method.
            url: Full URL.
            content: JSON body; None for none.
            timeout: Seconds for the whole exchange.

        Raises:
            AttemptTimeoutError: The time is over.
        """
        headers = JSON_HEADERS if content is not None else None
        with anyio.move_on_after(timeout):
            return await self.http.request(method, parsed_url(url), content=content, headers=headers)
        raise AttemptTimeoutError(f"the limit is {timeout:g} s")

    def head(self, url: str) -> Head:
        """Prepare what depends on the address of a POST request, as `http` does, but only once: it costs 20 us."""
        head = self._heads.get(url)
        if head is None:
            prepared = self.http.build_request("POST", url, content=b"{}", headers=JSON_HEADERS)
            if self.http.auth is not None:
                prepared = next(self.http.auth.auth_flow(prepared))
            del prepared.headers["content-length"]
            head = self._heads[url] = Head(prepared.url, prepared.headers, self.http.timeout.as_dict())
        return head

    async def recall(self, flight: Flight, grace: float) -> None:
        """Abort a flight and wait up to `grace` seconds for the response with its partial tokens.

        If the caller is cancelled meanwhile, the cancellation is delayed for that time. The abort is sent in any case.

        Args:
            flight: Attempt to abort.
            grace: Seconds to wait; 0 for not at all.
        """
        ends_at, again, cancelled = self._loop.time() + grace, iter(ABORT_AGAIN_AFTER_S), False
        abort = self._abort_task(flight.server.base_url, flight.rid)
        resend_at = self._loop.time() + next(again, math.inf)
        # An anyio cancel scope cancels its tasks again on every cycle of the event loop, unless they are shielded.
        with anyio.CancelScope(shield=True):
            while (now := self._loop.time()) < ends_at and flight.response is None:
                # Even after a failed answer the abort must be sent. An abort that no server received brings no answer.
                if abort.done() and (flight.answer.done() or abort.cancelled() or not abort.result()):
                    break
                if abort.done() and now >= resend_at:
                    abort = self._abort_task(flight.server.base_url, flight.rid, again=True)
                    resend_at = now + next(again, math.inf)
                limit = min(ends_at, resend_at) if abort.done() else ends_at
                pending = [task for task in (flight.answer, abort) if not task.done()]
                try:
                    await asyncio.wait(pending, timeout=max(limit - now, 0.0), return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    async def abort(self, rid: str, base_urls: tuple[str, ...]) -> None:
        """Abort a request on its servers, and wait up to 2 s for them to acknowledge it.

        Never fails. A caller that is cancelled while waiting returns at once; the abort is still sent.

        Args:
            rid: Exact id of an attempt, or the caller's prefix of attempts in flight over this session.
            base_urls: Servers to ask if no such attempt is in flight over this session.
        """
        flights = [flight for flight in self.flights.values() if flight.rid == rid or flight.rid.startswith(f"{rid}-")]
        where = [(flight.server.base_url, flight.rid) for flight in flights] or [(url, rid) for url in base_urls]
        await asyncio.wait({self._abort_task(*request) for request in where}, timeout=ABORT_TIMEOUT_S)

    async def shared(self, key: Any, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` once for all concurrent callers with the same `key`; canceling one does not end it."""
        return await asyncio.shield(self.background(key, work))

    def background(self, key: Any, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Return the task that runs `work`, at most one at a time per `key`."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = self._loop.create_task(work())
            task.add_done_callback(consume)
            task.add_done_callback(lambda _: self._tasks.pop(key))
        return task

    async def keep_until_loop_ends(self, at_end: Callable[[], object]) -> None:
        """Close this session when the running loop shuts down its asynchronous generators, as `asyncio.run` does.

        That is the only moment near the end of a loop at which a library can still await.

        Args:
            at_end: Function to call then, or when the session is closed earlier.
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
        """Abort all flights, wait up to `grace` seconds for their responses, and close the connections.

        A caller that is cancelled meanwhile still waits: no flight is left, and every abort is sent.
        """
        self.closed = True
        if not self.closing.done():
            self.closing.set_result(None)
        ending = self._loop.create_task(self._end(tuple(self.flights.values()), grace))
        cancelled: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while not ending.done():
                try:
                    await asyncio.wait({ending})
                except asyncio.CancelledError as error:
                    cancelled = error
        if cancelled is not None:
            raise cancelled
        ending.result()

    async def _end(self, flights: Sequence[Flight], grace: float) -> None:
        try:
            await asyncio.gather(*(self.recall(flight, grace) for flight in flights))
            aborts = [task for key, task in self._tasks.items() if key[0] == "abort"]
            if aborts:  # a short grace limits the wait for responses, not for aborts
                await asyncio.wait(aborts, timeout=ABORT_TIMEOUT_S)
        finally:
            for flight in self.flights.values():  # another transport than ours may not end them
                flight.answer.cancel()
            await self._guard.aclose()

    def drop(self, *, inherited: bool = False) -> None:
        """Drop the connections of a loop that no longer runs, or leave inherited ones to the parent process."""
        self.closed = True
        if self._aiohttp_transport is not None:
            self._aiohttp_transport.drop(inherited=inherited)

    def _abort_task(self, base_url: str, rid: str, *, again: bool = False) -> asyncio.Task[bool]:
        return self.background(("abort", base_url, rid), partial(self._aborter.abort, base_url, rid, again=again))


def connect(
    source: TransportSource | None,
    *,
    https: bool,
    max_connections: int,
    connect_timeout: float,
    headers: Mapping[str, str],
    credentials: Mapping[str, httpx.BasicAuth],
) -> LoopSession:
    """Make the session of the running loop.

    Args:
        source: httpx transport for all loops, or a function that makes one per loop; None for aiohttp.
        https: Whether certificates are needed.
        max_connections: Maximum number of concurrent generations.
        connect_timeout: Seconds to open a connection.
        headers: Headers of every request.
        credentials: Credentials by the address of the server that they are for.
    """
    aiohttp_transport: AiohttpTransport | None = None
    if source is None:
        transport: Transport = (aiohttp_transport := AiohttpTransport(https=https, connect_timeout=connect_timeout))
    else:
        transport = SharedTransport(source) if isinstance(source, Transport) else source()
    known = dict(credentials)  # to which those of workers are added
    # httpx only limits the time to connect; the waiting side times the attempt as a whole.
    http = httpx.AsyncClient(
        transport=transport,
        headers=headers,
        auth=partial(_authorized, known),
        trust_env=False,
        timeout=httpx.Timeout(None, connect=connect_timeout),
        limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_EXPIRY_S),
    )
    return LoopSession(http, aiohttp_transport, known, max_connections=max_connections)


def credentials_of(addresses: Iterable[str]) -> dict[str, httpx.BasicAuth]:
    """Return the credentials in addresses, by the address without them."""
    urls = [url for address in addresses if (url := httpx.URL(address)).userinfo]
    return {str(url.copy_with(userinfo=b"")).rstrip("/"): httpx.BasicAuth(url.username, url.password) for url in urls}


def _authorized(credentials: Mapping[str, httpx.BasicAuth], request: httpx.Request) -> httpx.Request:
    """Add the credentials for its server to a request."""
    known = [base_url for base_url in credentials if str(request.url).startswith(f"{base_url}/")]
    return next(credentials[max(known, key=len)].auth_flow(request)) if known else request


Sessions = dict[asyncio.AbstractEventLoop, LoopSession]


class SessionPool:
    """One `LoopSession` per event loop, made on first use. Thread-safe."""

    def __init__(self, connect: Callable[[], LoopSession], abort_grace: float) -> None:
        """Create an empty pool.

        Args:
            connect: Function that makes the running loop's session.
            abort_grace: Seconds to wait for aborted flights when a session is closed.
        """
        self._connect = connect
        self._abort_grace = abort_grace
        self._lock = threading.Lock()
        # A session references its loop, so weak keys would never be collected: entries are removed when their loop
        # ends, or swept if it was closed without warning. The finalizer keeps them alive long enough to close them in
        # order if the client was never closed.
        self._sessions: Sessions = {}
        weakref.finalize(self, _abandon, self._sessions, abort_grace)
        _pools.add(self)

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
        await session.keep_until_loop_ends(partial(_remove, self._sessions, loop, session))
        return session

    async def close(self) -> None:
        """Close the sessions of all loops, each in its own thread."""
        with self._lock:
            sessions = dict(self._sessions)
            self._sessions.clear()
        session = sessions.pop(asyncio.get_running_loop(), None)
        elsewhere = _close_elsewhere(sessions, self._abort_grace)  # before the first await, which may be cancelled
        if session is not None:
            await session.close(self._abort_grace)
        if elsewhere:
            others = [asyncio.wrap_future(closing) for closing in elsewhere]
            await asyncio.wait(others, timeout=self._abort_grace + ABORT_TIMEOUT_S)

    def forget(self) -> None:
        """Forget the sessions of the process that this one was just forked from."""
        self._lock = threading.Lock()  # a thread that exists no more may hold the other
        for session in self._sessions.values():
            session.drop(inherited=True)
        self._sessions.clear()


def _remove(sessions: Sessions, loop: asyncio.AbstractEventLoop, session: LoopSession) -> None:
    """Forget a session. It must not hold its pool, which would live as long as the loop."""
    if sessions.get(loop) is session:  # while one session closes, a request may open the next
        del sessions[loop]


_pools: weakref.WeakSet[SessionPool] = weakref.WeakSet()


def _forget_inherited() -> None:
    """Forget the sessions of all pools in a forked process.

    It shares the epoll object of each event loop with its parent: a connection closed here wakes its parent no more.
    """
    for pool in tuple(_pools):
        pool.forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_inherited)


def _close_elsewhere(sessions: Sessions, grace: float) -> list[concurrent.futures.Future[None]]:
    """Drop the sessions of loops that do not run, and return the closings of the others, each in its loop's thread."""
    closings = []
    for loop, session in tuple(sessions.items()):
        if loop.is_running():
            closings.append(asyncio.run_coroutine_threadsafe(session.close(grace), loop))
        else:
            session.drop()
    return closings


def _abandon(sessions: Sessions, grace: float) -> None:
    """Close the sessions of a collected client; runs in any thread, and at interpreter exit."""
    _close_elsewhere(sessions, grace)
    sessions.clear()


class SharedTransport(httpx.AsyncBaseTransport):
    """Transport that outlives the sessions that use it."""

    def __init__(self, transport: Transport) -> None:
        """Wrap `transport`, which closing this one leaves open."""
        self._transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Forward the request."""
        return await self._transport.handle_async_request(request)


class AiohttpTransport(httpx.AsyncBaseTransport):
    """httpx transport over aiohttp for the running loop. It reads responses whole and raises aiohttp's errors."""

    def __init__(self, *, https: bool, connect_timeout: float) -> None:
        """Open no connection yet.

        Args:
            https: Whether certificates are needed: loading them takes 20 ms.
            connect_timeout: Seconds to open a connection.
        """
        import aiohttp

        self._connector = aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=KEEPALIVE_EXPIRY_S,
            ssl=httpx.create_ssl_context(trust_env=False) if https else True,
            socket_factory=_keepalive_socket,
        )
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(sock_connect=connect_timeout),
            auto_decompress=False,  # httpx does
            trust_env=False,
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request whose body is in memory, and read the response."""
        url = request.url
        if url.userinfo:  # httpx sends it as a header, and aiohttp would refuse both
            url = url.copy_with(userinfo=b"")
        status, headers, content = await self._send(
            request.method, str(url), request.headers.multi_items(), request.content
        )
        return _response(status, headers, content)

    async def post(self, url: str, headers: list[tuple[str, str]], content: bytes) -> httpx.Response | Reply:
        """Send a request without the objects of httpx, and read the response.

        Args:
            url: Full URL, without credentials.
            headers: Headers except the length of the body.
            content: Body.
        """
        status, received, body = await self._send("POST", url, headers, content)
        if status == 200 and not any(name.lower() == b"content-encoding" for name, _ in received):
            return Reply(body)
        return _response(status, received, body)

    async def _send(
        self, method: str, url: str, headers: list[tuple[str, str]], body: bytes
    ) -> tuple[int, RawHeaders, bytes]:
        async with self._session.request(
            method,
            url,
            headers=headers,
            data=io.BytesIO(body) if len(body) > ONE_WRITE_BYTES else body or None,
            allow_redirects=False,
        ) as response:
            return response.status, response.raw_headers, await response.read()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._session.close()

    def drop(self, *, inherited: bool) -> None:
        """Drop the connections after the loop was closed; let nothing close those that another process uses."""
        self._session.detach()
        if inherited:
            self._connector._closed = True
            return
        # aiohttp only has a coroutine for this. It closes the connections before its first await, and there is no loop
        # left to await in.
        closing = self._connector.close().__await__()
        with contextlib.suppress(StopIteration, RuntimeError):
            next(closing)


def _response(status: int, headers: RawHeaders, content: bytes) -> httpx.Response:
    try:
        return httpx.Response(status, headers=headers, content=content)
    except httpx.DecodingError as error:
        encoding = httpx.Headers(list(headers)).get("content-encoding")
        raise httpx.DecodingError(f"{encoding}: {error}") from None


def _keepalive_socket(address: Any) -> socket.socket:
    family, kind, proto, _, _ = address
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every platform has all of these. The last one covers a peer that vanishes while data is in transit to it.
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
    """Return how an attempt failed, from its chain of causes; None for an error that is not the network's.

    An aiohttp error in the chain takes precedence: a transport over aiohttp may report refused, reset and closed
    connections alike, as httpx-aiohttp 0.2 does.
    """
    import aiohttp

    aiohttp_kinds = (
        (
            (aiohttp.ClientConnectorCertificateError, aiohttp.ClientSSLError, aiohttp.InvalidURL),
            FailureKind.FINAL,
        ),
        ((aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError), FailureKind.UNREACHABLE),
        (aiohttp.ServerTimeoutError, FailureKind.TIMED_OUT),
        (aiohttp.ClientResponseError, FailureKind.UNDECODABLE),
        (aiohttp.ClientError, FailureKind.DROPPED),
    )
    for kinds in (aiohttp_kinds, _KINDS):
        for link in _causes(error):
            for types, kind in kinds:
                if isinstance(link, types):
                    return kind
    return None


def root_cause(error: Exception) -> str:
    """Return the last error with a message in the chain of causes: what happened, not how it was reported."""
    with_text = [link for link in _causes(error) if isinstance(link, Exception) and str(link)]
    cause = with_text[-1] if with_text else error
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused"  # the text has the address once more, which the caller names
    return one_line(f"{type(cause).__name__}: {cause}")


def _causes(error: BaseException) -> list[BaseException]:
    chain = [error]
    while link := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__):
        if link in chain:
            break
        chain.append(link)
    return chain
