"""One request as a series of attempts: where each is sent, how it ends, and what remains after the last.

An attempt that ends without a response is aborted on its server. The longest partial response of the aborted attempts
is kept. A complete response that arrives just too late still counts, unless the caller cancelled the call.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from ..exceptions import (
    SGLangCancelledError,
    SGLangClientError,
    SGLangConnectionError,
    SGLangDeadlineError,
    SGLangDecodingError,
)
from ..protocol.wire import GenerateBody, UnfitAnswerError, decode_generation, decode_object, http_error
from ..telemetry import report_retry
from .balancer import Server, Servers
from .cancellation import CLOCK_TOLERANCE_S, Cancellation, discard, settle
from .connections import (
    AiohttpTransport,
    AttemptTimeoutError,
    Flight,
    LoopSession,
    Reply,
    failure_kind,
    root_cause,
)
from .retries import (
    MAYBE_RUNNING_STATUSES,
    RETRIED_STATUSES,
    Failure,
    FailureKind,
    RetryPolicy,
    RetryState,
    retry_after_seconds,
)

PROBE_TIMEOUT_S = 10.0
"""Time limit of a health probe of a server out of rotation."""

ROUTING_HEADER = "x-smg-routing-key"

ROUTER_ERROR_HEADER = "x-smg-error-code"
"""Header of a router's own errors; a value that begins with "call_upstream" means that a worker got the request."""

Answer = dict[str, Any]


@dataclass
class Request:
    """What the attempts of one request share, and their result so far.

    Attributes:
        session: Connections to send it over.
        servers: Servers that may answer it.
        cancellation: Deadline and cancel signal.
        method: HTTP method.
        path: Path below a server's address.
        only: Server to ask; None for any.
        flat_logprobs: As for `decode_generation`.
        server: Server of the latest attempt.
        failure: Failure of the latest attempt; None if it has not failed.
        partial: Longest partial response of the aborted attempts; None if there is none.
        signaled: Futures that are done once the cancel signal is set.
    """

    session: LoopSession
    servers: Servers
    cancellation: Cancellation
    method: str
    path: str
    only: Server | None = None
    flat_logprobs: bool = False
    server: Server = field(init=False)
    failure: Failure | None = field(init=False, default=None)
    partial: Answer | None = field(init=False, default=None)
    signaled: Set[asyncio.Future[Any]] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        """Start with any server."""
        self.server = self.only or self.servers.all[0]

    def until(self, *work: asyncio.Future[Any], timeout: float | None = None) -> Awaitable[Any]:
        """Wait until any of `work` is done, the call ends, or `timeout` seconds are over."""
        limit = min(math.inf if timeout is None else timeout, self.cancellation.seconds_left)
        return asyncio.wait(
            {*work, *self.signaled},
            timeout=None if limit == math.inf else max(limit, 0.0),
            return_when=asyncio.FIRST_COMPLETED,
        )

    def until_set(self, over: asyncio.Future[None], timeout: float | None) -> asyncio.Future[None]:
        """Return `over`, which is also set once the call ends, or `timeout` seconds are over."""
        limit = min(math.inf if timeout is None else timeout, self.cancellation.seconds_left)
        if limit != math.inf:
            timer = asyncio.get_running_loop().call_later(limit, settle, over)
            over.add_done_callback(lambda _: timer.cancel())
        for signal in self.signaled:
            _follow(signal, over)
        return over

    def raise_if_over(self) -> None:
        """Raise the error of a call that has already ended."""
        cause = None if self.failure is None else self.failure.error
        if self.session.closed:
            raise SGLangConnectionError(f"the client of {self.server.base_url} was closed during a request") from cause
        if self.cancellation.is_signaled():
            message = f"the call was cancelled by its signal{self._after_tokens()}"
            raise SGLangCancelledError(message, response=self.partial) from cause
        if self.cancellation.seconds_left <= CLOCK_TOLERANCE_S:
            raise self.deadline_error() from cause

    def deadline_error(self) -> SGLangDeadlineError:
        """Return the error of a call whose deadline has passed."""
        last = "" if self.failure is None else f"; the last attempt failed: {self.failure.error}"
        seconds = f"{self.cancellation.deadline:.3g} s after the request was made"
        return SGLangDeadlineError(
            f"POST {self.server.base_url}/generate: the deadline has passed{self._after_tokens()}, {seconds}{last}",
            response=self.partial,
        )

    def _after_tokens(self) -> str:
        return "" if self.partial is None else f" after {len(self.partial['output_ids'])} tokens"


def _follow(signal: asyncio.Future[Any], over: asyncio.Future[None]) -> None:
    """Set `over` once `signal` is done."""
    wake = partial(settle, over)

    def end(_: asyncio.Future[None]) -> None:
        signal.remove_done_callback(wake)

    signal.add_done_callback(wake)
    over.add_done_callback(end)


async def retrying(attempt: Callable[[], Awaitable[Answer | Failure]], request: Request, policy: RetryPolicy) -> Answer:
    """Make attempts until one is answered or another one is pointless.

    Raises:
        SGLangClientError: There is no response.
    """
    servers, session, retries = request.servers, request.session, RetryState(policy, request.servers)
    with request.cancellation.watched() as request.signaled:
        while True:
            request.raise_if_over()
            try:
                outcome = await attempt()
            except Exception as error:
                if not session.closed or isinstance(error, SGLangClientError):
                    raise
                outcome = Failure(FailureKind.FINAL, SGLangConnectionError(f"{request.server.base_url}: {error}"))
            server = request.server
            if not isinstance(outcome, Failure):
                servers.note_answer(server)
                return outcome
            request.failure = outcome
            if session.closed:
                request.raise_if_over()
            servers.note_failure(server, outcome.kind)
            can_move = server.is_out and not all(other.is_out for other in servers.all)
            # No caller waits for a server out of rotation while others are in it.
            delay = None if can_move and request.only is not None else retries.next_delay(outcome)
            if delay is None:
                raise retries.explain(outcome)
            server.log_failure(outcome)
            report_retry(server.base_url, outcome.kind.value, retries.retries)
            if can_move:
                delay = 0.0
            if delay >= request.cancellation.seconds_left:
                raise request.deadline_error() from outcome.error
            await request.until(session.closing, timeout=delay)


async def ask_once(request: Request, content: bytes | None, timeout: float) -> Answer | Failure:
    """Request a JSON object from one server, once."""
    server = request.server = request.only or request.servers.choose()
    sent = request.session.request(request.method, f"{server.base_url}{request.path}", content, timeout=timeout)
    return await _outcome(request, sent, decode_object)


async def ask_health(session: LoopSession, servers: Servers, server: Server, timeout: float) -> Answer | Failure:
    """Request one server's health, once; the result is an empty object if it is up."""
    request = Request(session, servers, Cancellation(), "GET", "/health", server)
    sent = session.request("GET", f"{server.base_url}/health", None, timeout=timeout)
    return await _outcome(request, sent, lambda body, url: {})


async def generate_once(
    request: Request, body: GenerateBody, *, key: str | None, prefix: str, timeout: float | None, grace: float
) -> Answer | Failure:
    """Send a generation to one server, once.

    Args:
        request: Request of this attempt.
        body: Body to send.
        key: Routing key; None for none.
        prefix: Prefix of the attempt's id.
        timeout: Seconds for the attempt; None for no limit.
        grace: Seconds to wait for the response of an aborted attempt.
    """
    session, servers = request.session, request.servers
    await _take_slot(request)
    try:
        if session.closed:
            request.raise_if_over()
        for due in servers.due():
            session.background(("probe", due.base_url), partial(_probe, session, servers, due))
        server = servers.choose(key, avoid=None if request.failure is None else request.server)
        request.server, url, rid = server, f"{server.base_url}/generate", f"{prefix}{os.urandom(16).hex()}"
        over = asyncio.get_running_loop().create_future()
        sent = asyncio.create_task(_exchange(session, url, body.with_rid(rid), key, over))
        flight = session.flights[rid] = Flight(rid, server, sent)
        servers.count_in_flight(server, 1)
        try:
            try:
                await request.until_set(over, timeout)
            except asyncio.CancelledError:
                await _recall(request, flight, grace)
                raise
            if flight.answer.done():
                outcome = await _outcome(
                    request, flight.answer, partial(decode_generation, flat_logprobs=request.flat_logprobs)
                )
                if isinstance(outcome, Failure) and outcome.maybe_running:
                    await session.abort(rid, (server.base_url,))
                return outcome
            signaled = request.cancellation.is_signaled()
            late = await _recall(request, flight, grace)
            if late is not None and not signaled and late["meta_info"]["finish_reason"]["type"] != "abort":
                return late
            request.raise_if_over()
            return _network_failure("POST", url, AttemptTimeoutError(f"the limit is {timeout:g} s"))
        finally:
            del session.flights[rid]
            discard(flight.answer)
            servers.count_in_flight(server, -1)
    finally:
        session.slots.release()


async def _exchange(
    session: LoopSession, url: str, content: bytes, key: str | None, over: asyncio.Future[None]
) -> httpx.Response | Reply:
    """Send a generation and read the whole response, without the layers of httpx's client.

    Its redirects, cookies and hooks are of no use here, and cost more than the transport.

    Args:
        session: Connections to send it over.
        url: Full URL.
        content: JSON body.
        key: Routing key; None for none.
        over: Future to set at the end, which wakes its waiter an iteration earlier than the end of this task would.
    """
    response: httpx.Response | Reply | None = None
    try:
        head = session.head(url)
        # The client is only asked for its transport: this is where respx replaces it.
        transport = session.http._transport_for_url(head.url)
        if isinstance(transport, AiohttpTransport):
            headers = head.items if key is None else [*head.items, (ROUTING_HEADER, key)]
            response = await transport.post(head.address, headers, content)
        else:
            request = head.request(content)
            await request.aread()
            if key is not None:
                request.headers[ROUTING_HEADER] = key
            received = await transport.handle_async_request(request)
            try:
                await received.aread()
            except BaseException:
                await received.aclose()
                raise
            response = received
        await session.turnstile.enter()  # the caller decodes it
        return response
    except asyncio.CancelledError:
        if not session.closed:
            raise
        if response is None:  # the call that waits for it is not cancelled
            raise ConnectionResetError("the client was closed") from None
        return response
    finally:
        settle(over)


async def _take_slot(request: Request) -> None:
    """Wait for a slot to send a generation; the caller releases it."""
    slots = request.session.slots
    if not slots.locked():
        await slots.acquire()
        return
    turn = asyncio.create_task(slots.acquire())
    try:
        while not turn.done():
            request.raise_if_over()
            await request.until(turn, request.session.closing)
    except BaseException:
        turn.cancel()
        turn.add_done_callback(lambda turn: None if turn.cancelled() else slots.release())  # acquired after all
        raise


async def _recall(request: Request, flight: Flight, grace: float) -> Answer | None:
    """Abort an attempt and return its response; keep the longest, even if the caller is cancelled."""
    try:
        await request.session.recall(flight, grace)
    finally:
        answer, response = None, flight.response
        if response is not None and response.is_success:
            try:
                answer = decode_generation(response.content, f"{flight.server.base_url}/generate")
            except SGLangDecodingError:
                pass
            else:
                if request.partial is None or len(answer["output_ids"]) >= len(request.partial["output_ids"]):
                    request.partial = answer
    return answer


async def _outcome(
    request: Request, sent: Awaitable[httpx.Response | Reply], decode: Callable[[bytes, str], Answer]
) -> Answer | Failure:
    """Return the decoded response of one attempt, or its failure."""
    method, server = request.method, request.server
    url = f"{server.base_url}{request.path}"
    try:
        response = await sent
    except Exception as error:
        return _network_failure(method, url, error)
    server.answered = True
    if not isinstance(response, Reply) and not response.is_success:
        status = response.status_code
        code = response.headers.get(ROUTER_ERROR_HEADER, "")
        return Failure(
            FailureKind.REFUSED if status in RETRIED_STATUSES else FailureKind.FINAL,
            http_error(method, url, status, response.content, location=response.headers.get("location")),
            retry_after=retry_after_seconds(response.headers),
            maybe_running=status in MAYBE_RUNNING_STATUSES or code.startswith("call_upstream"),
        )
    try:
        return decode(response.content, url)
    except UnfitAnswerError as error:
        return Failure(FailureKind.UNFIT, SGLangDecodingError(str(error)))
    except SGLangDecodingError as error:
        if not isinstance(response, Reply) and (encoding := response.headers.get("content-encoding")):
            error.args = (f"{error} (content-encoding: {encoding})",)  # httpx leaves those that it does not know
        return Failure(FailureKind.UNDECODABLE, error)


async def _probe(session: LoopSession, servers: Servers, server: Server) -> None:
    """Probe a server out of rotation; put it back if it answers."""
    outcome = await ask_health(session, servers, server, PROBE_TIMEOUT_S)
    if isinstance(outcome, Failure) and getattr(outcome.error, "status", 500) >= 500:
        server.log_failure(outcome)
    else:
        servers.note_answer(server)


_NETWORK_ERRORS: dict[FailureKind, tuple[type[SGLangClientError], str]] = {
    FailureKind.UNREACHABLE: (SGLangConnectionError, "could not connect ({})"),
    FailureKind.TIMED_OUT: (SGLangConnectionError, "no response in time ({})"),
    FailureKind.UNDECODABLE: (SGLangDecodingError, "the response is not HTTP ({}); is this an SGLang server?"),
    FailureKind.DROPPED: (SGLangConnectionError, "the connection failed ({})"),
    FailureKind.FINAL: (SGLangConnectionError, "the connection failed ({})"),
}


def _network_failure(method: str, url: str, error: Exception) -> Failure:
    """Classify a network error; other errors, such as a bug in a custom transport, are raised unchanged."""
    kind = failure_kind(error)
    if kind is None:
        raise error
    error_type, what = _NETWORK_ERRORS[kind]
    if isinstance(error, httpx.DecodingError):
        what = "the response does not fit its content-encoding ({})"
    named = error_type(f"{method} {url}: {what.format(root_cause(error))}")
    named.__cause__ = error
    return Failure(kind, named, maybe_running=kind in (FailureKind.DROPPED, FailureKind.TIMED_OUT))
