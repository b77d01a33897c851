"""One request as the attempts that it takes: where each goes, how it ends, and what is left when no other follows.

Promises: an attempt that ends without its answer is aborted where it was sent; of what the aborted attempts of a call
had sampled the longest partial answer is kept; a complete answer that comes just too late still counts, unless the
caller has cancelled the call.
"""

from __future__ import annotations

import asyncio
import math
import uuid
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
from .balancer import Server, Servers
from .cancellation import CLOCK_TOLERANCE_S, Cancellation, let_go
from .connections import (
    JSON_HEADERS,
    AttemptTimeoutError,
    Flight,
    LoopSession,
    failure_kind,
    parsed_url,
    root_cause,
)
from .retries import (
    PERHAPS_RUNNING_STATUSES,
    RETRIED_STATUSES,
    Failure,
    FailureKind,
    RetryPolicy,
    RetryState,
    retry_after_seconds,
)

PROBE_TIMEOUT_S = 10.0
"""How long a server that was out may take to say that it is healthy."""

ROUTER_ERROR_HEADER = "x-smg-error-code"
"""Routers put it on errors of their own; those that begin with "call_upstream" were made after a worker was asked."""

Answer = dict[str, Any]


@dataclass
class Request:
    """What the attempts of one request have in common, and what has come of them so far.

    Attributes:
        session: Sends it.
        servers: Who may answer it.
        cancellation: Ends it.
        method: HTTP method.
        path: Path below a server's address.
        only: The one server that is asked; None for any.
        server: Where the latest attempt went.
        failure: How that failed; None if it has not.
        partial: The longest partial answer that aborted attempts gave; None if there is none.
        signalled: What is done once the cancel signal is set.
    """

    session: LoopSession
    servers: Servers
    cancellation: Cancellation
    method: str
    path: str
    only: Server | None = None
    server: Server = field(init=False)
    failure: Failure | None = field(init=False, default=None)
    partial: Answer | None = field(init=False, default=None)
    signalled: Set[asyncio.Future[Any]] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        """Take any server for a start."""
        self.server = self.only or self.servers.all[0]

    def until(self, *work: asyncio.Future[Any], timeout: float | None = None) -> Awaitable[Any]:
        """Wait until some of `work` is done, for at most `timeout` seconds and until the call is to end."""
        limit = min(math.inf if timeout is None else timeout, self.cancellation.seconds_left)
        return asyncio.wait(
            {*work, *self.signalled},
            timeout=None if limit == math.inf else max(limit, 0.0),
            return_when=asyncio.FIRST_COMPLETED,
        )

    def raise_if_over(self) -> None:
        """Raise what has ended the call already, if anything has."""
        cause = None if self.failure is None else self.failure.error
        if self.session.closed:
            raise SGLangConnectionError(f"the client of {self.server.base_url} was closed during a request") from cause
        if self.cancellation.is_signalled():
            message = f"the call was cancelled by its signal{self._after_tokens()}"
            raise SGLangCancelledError(message, response=self.partial) from cause
        if self.cancellation.seconds_left <= CLOCK_TOLERANCE_S:
            raise self.deadline_error() from cause

    def deadline_error(self) -> SGLangDeadlineError:
        """The error for a call that its deadline ends."""
        last = "" if self.failure is None else f"; the last attempt failed: {self.failure.error}"
        seconds = f"{self.cancellation.deadline:.3g} s after the request was made"
        return SGLangDeadlineError(
            f"POST {self.server.base_url}/generate: the deadline has passed{self._after_tokens()}, {seconds}{last}",
            response=self.partial,
        )

    def _after_tokens(self) -> str:
        return "" if self.partial is None else f" after {len(self.partial['output_ids'])} tokens"


async def retrying(attempt: Callable[[], Awaitable[Answer | Failure]], request: Request, policy: RetryPolicy) -> Answer:
    """Make attempts until one is answered or there is no point in another one.

    Raises:
        SGLangClientError: There is no answer.
    """
    servers, session, retries = request.servers, request.session, RetryState(policy, request.servers)
    with request.cancellation.watched() as request.signalled:
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
            goes_elsewhere = server.is_out and not all(other.is_out for other in servers.all)
            # Nobody has to wait for one server that is out while others are not.
            delay = None if goes_elsewhere and request.only is not None else retries.next_delay(outcome)
            if delay is None:
                raise retries.explain(outcome)
            server.log_failure(outcome)
            if goes_elsewhere:
                delay = 0.0
            if delay >= request.cancellation.seconds_left:
                raise request.deadline_error() from outcome.error
            await request.until(session.closing, timeout=delay)


async def ask_once(request: Request, content: bytes | None, timeout: float) -> Answer | Failure:
    """Ask one server for a JSON object, once."""
    server = request.server = request.only or request.servers.choose()
    sent = request.session.request(request.method, f"{server.base_url}{request.path}", content, timeout=timeout)
    return await _outcome(request, sent, decode_object)


async def ask_health(session: LoopSession, servers: Servers, server: Server, timeout: float) -> Answer | Failure:
    """Ask one server for its health, once; the answer says nothing but that it is up."""
    request = Request(session, servers, Cancellation(), "GET", "/health", server)
    sent = session.request("GET", f"{server.base_url}/health", None, timeout=timeout)
    return await _outcome(request, sent, lambda body, url: {})


async def generate_once(
    request: Request, body: GenerateBody, *, key: str | None, prefix: str, timeout: float | None, grace: float
) -> Answer | Failure:
    """Have one server generate, once.

    Args:
        request: What this is an attempt of.
        body: What is sent.
        key: Its routing key.
        prefix: Of the attempt's id.
        timeout: Seconds for the attempt.
        grace: Seconds for the answer of an aborted attempt.
    """
    session, servers = request.session, request.servers
    await _take_slot(request)
    try:
        if session.closed:
            request.raise_if_over()
        for due in servers.due():
            session.background(("probe", due.base_url), partial(_probe, session, servers, due))
        server = servers.choose(key, rather_not=None if request.failure is None else request.server)
        request.server, url, rid = server, f"{server.base_url}/generate", f"{prefix}{uuid.uuid4().hex}"
        headers = JSON_HEADERS if key is None else {**JSON_HEADERS, "x-smg-routing-key": key}
        sent = session.http.request("POST", parsed_url(url), content=body.with_rid(rid), headers=headers)
        flight = session.flights[rid] = Flight(rid, server, asyncio.create_task(sent))
        servers.count_in_flight(server, 1)
        try:
            try:
                await request.until(flight.answer, timeout=timeout)
            except asyncio.CancelledError:
                await _call_back(request, flight, grace)
                raise
            if flight.answer.done():
                outcome = await _outcome(request, flight.answer, decode_generation)
                if isinstance(outcome, Failure) and outcome.perhaps_running:
                    await session.abort(rid, (server.base_url,))
                return outcome
            signalled = request.cancellation.is_signalled()
            late = await _call_back(request, flight, grace)
            if late is not None and not signalled and late["meta_info"]["finish_reason"]["type"] != "abort":
                return late
            request.raise_if_over()
            return _network_failure("POST", url, AttemptTimeoutError(f"the limit is {timeout:g} s"))
        finally:
            del session.flights[rid]
            let_go(flight.answer)
            servers.count_in_flight(server, -1)
    finally:
        session.slots.release()


async def _take_slot(request: Request) -> None:
    """Wait for the turn to send a generation; releasing the slot is due afterwards."""
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
        turn.add_done_callback(lambda turn: None if turn.cancelled() else slots.release())  # it came after all
        raise


async def _call_back(request: Request, flight: Flight, grace: float) -> Answer | None:
    """Abort an attempt and return its answer, which is kept if it is the longest; also if the caller is cancelled."""
    try:
        await request.session.call_back(flight, grace)
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
    request: Request, sent: Awaitable[httpx.Response], decode: Callable[[bytes, str], Answer]
) -> Answer | Failure:
    """The decoded answer of one attempt, or how it failed."""
    method, server = request.method, request.server
    url = f"{server.base_url}{request.path}"
    try:
        response = await sent
    except Exception as error:
        return _network_failure(method, url, error)
    server.answered = True
    status = response.status_code
    if not response.is_success:
        code = response.headers.get(ROUTER_ERROR_HEADER, "")
        return Failure(
            FailureKind.REFUSED if status in RETRIED_STATUSES else FailureKind.FINAL,
            http_error(method, url, status, response.content, location=response.headers.get("location")),
            retry_after=retry_after_seconds(response.headers),
            perhaps_running=status in PERHAPS_RUNNING_STATUSES or code.startswith("call_upstream"),
        )
    try:
        return decode(response.content, url)
    except UnfitAnswerError as error:
        return Failure(FailureKind.UNFIT, SGLangDecodingError(str(error)))
    except SGLangDecodingError as error:
        return Failure(FailureKind.UNDECODABLE, error)


async def _probe(session: LoopSession, servers: Servers, server: Server) -> None:
    """Ask a server that is out for its health; if it answers, it gets requests again."""
    outcome = await ask_health(session, servers, server, PROBE_TIMEOUT_S)
    if isinstance(outcome, Failure) and getattr(outcome.error, "status", 500) >= 500:
        server.log_failure(outcome)
    else:
        servers.note_answer(server)


_NETWORK_ERRORS: dict[FailureKind, tuple[type[SGLangClientError], str]] = {
    FailureKind.UNREACHABLE: (SGLangConnectionError, "could not connect ({})"),
    FailureKind.TIMED_OUT: (SGLangConnectionError, "no answer in time ({})"),
    FailureKind.UNDECODABLE: (SGLangDecodingError, "the answer is not HTTP ({}); is this an SGLang server?"),
    FailureKind.DROPPED: (SGLangConnectionError, "the connection failed ({})"),
    FailureKind.FINAL: (SGLangConnectionError, "the connection failed ({})"),
}


def _network_failure(method: str, url: str, error: Exception) -> Failure:
    """Name an error of the network; errors of other kinds (a bug in a custom transport) are raised as they are."""
    kind = failure_kind(error)
    if kind is None:
        raise error
    error_type, what = _NETWORK_ERRORS[kind]
    named = error_type(f"{method} {url}: {what.format(root_cause(error))}")
    named.__cause__ = error
    return Failure(kind, named, perhaps_running=kind in (FailureKind.DROPPED, FailureKind.TIMED_OUT))
