"""How bytes get to a server: httpx over aiohttp, and what its errors mean.

`httpx` is the interface and `aiohttp` the transport, because httpcore's pool costs ten times the CPU at hundreds of
concurrent requests. `aiohttp` is imported at the first request, not with this module. Promise: a connection that cannot
be made, one that broke and an answer that is not HTTP are told apart, whichever library reports them.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx

from .retries import FailureKind

if TYPE_CHECKING:
    import aiohttp

Transport = httpx.AsyncBaseTransport
TransportSource = Transport | Callable[[], Transport]

KEEPALIVE_EXPIRY_S = 4.0
"""Idle connections are dropped before the server does that (SGLang: after 5 s); a POST over a closing one is lost."""
DEAD_PEER_AFTER_S = 120
"""A peer that vanished without closing is noticed after about this time, also with no timeout set."""


class AttemptTimeoutError(Exception):
    """The time limit of one attempt has passed."""


def aiohttp_transport(*, https: bool) -> tuple[Transport, Callable[[], None]]:
    """An httpx transport over aiohttp for the running loop, and what drops its connections when the loop is gone."""
    import aiohttp
    from httpx_aiohttp import AiohttpTransport

    # The transport wants a context although it uses its session's. Loading certificates takes 20 ms, so for http:// it
    # gets one that trusts nobody.
    context = httpx.create_ssl_context(trust_env=False) if https else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=KEEPALIVE_EXPIRY_S,
            ssl=context,
            socket_factory=_keepalive_socket,
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )

    def drop() -> None:
        connector = session.connector
        session.detach()
        if connector is None:
            return
        # aiohttp only offers a coroutine for this. It closes the connections before it first waits for something, and
        # there is no loop left to wait in.
        closing = connector.close().__await__()
        with contextlib.suppress(StopIteration, RuntimeError):
            next(closing)

    return AiohttpTransport(verify=context, trust_env=False, client=session), drop


def failure_kind(error: Exception) -> FailureKind | None:
    """Tell by its chain of causes how an attempt failed; None for an error that is not the network's.

    httpx-aiohttp 0.2 reports refused, reset and closed connections alike as `httpx.ConnectTimeout`, and lets some of
    aiohttp's errors through as they are. So aiohttp's error decides where there is one.
    """
    import aiohttp

    chain = tuple(_causes(error))
    for link in chain:
        if isinstance(link, aiohttp.ClientError):
            return _aiohttp_failure_kind(link)
    for link in chain:
        if isinstance(link, ssl.SSLError | httpx.UnsupportedProtocol):
            return FailureKind.FINAL
        if isinstance(link, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout | ConnectionRefusedError):
            return FailureKind.UNREACHABLE
        if isinstance(link, AttemptTimeoutError | httpx.TimeoutException):
            return FailureKind.TIMED_OUT
        if isinstance(link, httpx.DecodingError):
            return FailureKind.UNDECODABLE
        if isinstance(link, httpx.TransportError | OSError):
            return FailureKind.DROPPED
    return None


def root_cause(error: Exception) -> str:
    """The last error with a text in the chain of causes: what happened, not how it was reported."""
    telling = [link for link in _causes(error) if isinstance(link, Exception) and str(link)]
    cause = telling[-1] if telling else error
    return " ".join(f"{type(cause).__name__}: {cause}".split())


class LentTransport(httpx.AsyncBaseTransport):
    """A transport that outlives the sessions which use it."""

    def __init__(self, transport: Transport) -> None:
        """Lend out `transport`."""
        self._transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Pass the request on."""
        return await self._transport.handle_async_request(request)


def _aiohttp_failure_kind(error: aiohttp.ClientError) -> FailureKind:
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError | aiohttp.InvalidURL):
        return FailureKind.FINAL
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return FailureKind.UNREACHABLE
    if isinstance(error, aiohttp.ServerTimeoutError):
        return FailureKind.TIMED_OUT
    if isinstance(error, aiohttp.ClientResponseError):
        return FailureKind.UNDECODABLE
    return FailureKind.DROPPED


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


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
