"""One call as the attempts that it takes: where each goes, how it ends, and what is left when no other follows.

Promises: an attempt that ends without its answer is aborted where it was sent; of what the aborted attempts of a call
had sampled the longest partial answer is kept; a complete answer that comes just too late still counts, unless the
caller has cancelled the call.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import httpx
import orjson

from ..exceptions import (
    SGLangCancelledError,
    SGLangClientError,
    SGLangConnectionError,
    SGLangDeadlineError,
    SGLangDecodingError,
)
from ..protocol.wire import GenerateBody, UnfitAnswerError, decode_generation, decode_object, http_error
from .balancer import Server, Servers
from .cancellation import AttemptTimeoutError, Cancellation, End
from .connections import Flight, LoopSession
from .retries import (
    PERHAPS_RUNNING_STATUSES,
    RETRIED_STATUSES,
    Failure,
    FailureKind,
    RetryPolicy,
    RetryState,
    retry_after_seconds,
)
from .transport import failure_kind, root_cause

PROBE_TIMEOUT_S = 10.0
"""How long a server that was out may take to say that it is healthy."""

ROUTER_ERROR_HEADER = "x-smg-error-code"
"""Routers put it on errors of their own; those that begin with "call_upstream" were made after a worker was asked."""


class _Attempts:
    """Makes attempts until one is answered or there is no point in another one."""

    def __init__(self, session: LoopSession, servers: Servers, policy: RetryPolicy, waiting: Cancellation) -> None:
        self._session = session
        self.servers = servers
        self._waiting = waiting
        self._retries = RetryState(policy, servers)
        self.server = servers.all[0]
        self._failure: Failure | None = None

    async def answered(self) -> dict[str, Any]:
        """The answer.

        Raises:
            SGLangClientError: There is none.
        """
        while True:
            try:
                outcome = await self._attempt()
            except Exception as error:
                if not self._session.closed or isinstance(error, SGLangClientError):
                    raise
                outcome = Failure(FailureKind.FINAL, SGLangConnectionError(f"{self.server.base_url}: {error}"))
            if not isinstance(outcome, Failure):
                self.servers.note_answer(self.server)
                return outcome
            await self._before_the_next(outcome)

    async def _attempt(self) -> dict[str, Any] | Failure:
        raise NotImplementedError

    def _may_go_elsewhere(self) -> bool:
        return self.servers.has_others_than(self.server)

    def _is_pointless(self, failure: Failure) -> bool:
        """Whether there is no point in trying again, beside those that all calls have in common."""
        return False

    async def _before_the_next(self, failure: Failure) -> None:
        """Wait for the next attempt; raises if there is to be none."""
        server, self._failure = self.server, failure
        self._raise_if_closed()
        self.servers.note_failure(server, failure.kind)
        delay = None if self._is_pointless(failure) else self._retries.next_delay(failure)
        if delay is None:
            raise self._retries.explain(failure)
        server.history.note_failure(failure)
        if server.is_out and self._may_go_elsewhere():
            delay = 0.0
        if delay >= self._waiting.seconds_left:
            raise self._error(End.DEADLINE)
        self._raise_if_over(await self._session.idle(self._waiting, None, delay))

    def _raise_if_over(self, end: End | None) -> None:
        self._raise_if_closed()
        if end in (End.DEADLINE, End.SIGNALLED):
            raise self._error(end)

    def _error(self, end: End) -> SGLangClientError:
        raise NotImplementedError

    def _raise_if_closed(self) -> None:
        if self._session.closed:
            raise SGLangConnectionError(f"the client of {self.server.base_url} was closed during a request") from (
                None if self._failure is None else self._failure.error
            )

    async def _outcome(
        self,
        method: str,
        path: str,
        sent: Awaitable[httpx.Response],
        decode: Callable[[bytes, str], dict[str, Any]],
    ) -> dict[str, Any] | Failure:
        """The decoded answer of one attempt, or how it failed."""
        server = self.server
        url = f"{server.base_url}{path}"
        try:
            response = await sent
        except Exception as error:
            return _network_failure(method, url, error)
        server.history.answered = True
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


class Question(_Attempts):
    """A small request that any server, or a certain one, can answer with a JSON object."""

    def __init__(
        self,
        session: LoopSession,
        servers: Servers,
        policy: RetryPolicy,
        waiting: Cancellation,
        *,
        method: str,
        path: str,
        content: Mapping[str, Any] | None,
        server: Server | None,
        retry_refusals: bool,
        timeout: float,
    ) -> None:
        """Prepare it.

        Args:
            session: Sends it.
            servers: Who is asked.
            policy: How often.
            waiting: Of this call.
            method: HTTP method.
            path: Path below a server's address.
            content: JSON body.
            server: The only one that is asked; None for any.
            retry_refusals: Whether error statuses are retried.
            timeout: Seconds for one attempt.
        """
        super().__init__(session, servers, policy, waiting)
        self._method, self._path = method, path
        self._body = None if content is None else orjson.dumps(content)
        self._only = server
        self._retry_refusals = retry_refusals
        self._timeout = timeout

    async def _attempt(self) -> dict[str, Any] | Failure:
        server = self.server = self._only or self.servers.choose()
        sent = self._session.request(self._method, f"{server.base_url}{self._path}", self._body, timeout=self._timeout)
        return await self._outcome(self._method, self._path, sent, decode_object)

    def _may_go_elsewhere(self) -> bool:
        return self._only is None and super()._may_go_elsewhere()

    def _is_pointless(self, failure: Failure) -> bool:
        if failure.kind is FailureKind.REFUSED and not self._retry_refusals:
            return True
        # Nobody has to wait for one server that is out while others are not.
        return self._only is not None and self._only.is_out and self.servers.has_others_than(self._only)


class Call(_Attempts):
    """One generation.

    Attributes:
        server: Where the latest attempt went.
        partial: The longest partial answer that aborted attempts gave; None if there is none.
    """

    def __init__(
        self,
        session: LoopSession,
        servers: Servers,
        policy: RetryPolicy,
        waiting: Cancellation,
        *,
        body: GenerateBody,
        headers: Mapping[str, str],
        key: str | None,
        prefix: str,
        timeout: float | None,
        grace: float,
    ) -> None:
        """Prepare it.

        Args:
            session: Sends it.
            servers: Where it can go.
            policy: How often it is tried.
            waiting: Of this call.
            body: What is sent.
            headers: Sent with it.
            key: Its routing key.
            prefix: Of the ids of its attempts.
            timeout: Seconds for one attempt.
            grace: Seconds for the answer of an aborted attempt.
        """
        super().__init__(session, servers, policy, waiting)
        self.partial: dict[str, Any] | None = None
        self._body = body
        self._headers = headers
        self._key = key
        self._prefix = prefix
        self._timeout = timeout
        self._grace = grace

    async def _attempt(self) -> dict[str, Any] | Failure:
        self._raise_if_over(self._waiting.over())
        end = await self._session.take_slot(self._waiting)
        if end is not End.DONE:
            self._raise_if_over(end)
        try:
            self._raise_if_closed()
            self.server = self._choose()
            return await self._send()
        finally:
            self._session.give_slot()

    def _choose(self) -> Server:
        for server in self.servers.due():
            probe = partial(_probe, self._session, self.servers, server)
            self._session.background(("probe", server.base_url), probe)
        return self.servers.choose(self._key, rather_not=None if self._failure is None else self.server)

    async def _send(self) -> dict[str, Any] | Failure:
        server, session = self.server, self._session
        rid = f"{self._prefix}{uuid.uuid4().hex}"
        flight = session.send(server, self._body.with_rid(rid), rid, self._headers)
        self.servers.started(server)
        try:
            try:
                end = await self._waiting.until(flight.answer, self._timeout)
            except asyncio.CancelledError:
                await session.call_back(flight, self._grace)
                raise
            if end is End.DONE:
                outcome = await self._outcome("POST", "/generate", flight.answer, decode_generation)
                if isinstance(outcome, Failure) and outcome.perhaps_running:
                    await session.abort(rid, (server.base_url,))
                return outcome
            await session.call_back(flight, self._grace)
            return self._late_answer(flight, end)
        except asyncio.CancelledError:
            self._keep(flight)
            raise
        finally:
            session.landed(flight)
            self.servers.ended(server)

    def _late_answer(self, flight: Flight, end: End) -> dict[str, Any] | Failure:
        """What came of an attempt that was called back."""
        answer = self._keep(flight)
        if end is not End.SIGNALLED and answer is not None and not _is_aborted(answer):
            return answer
        self._raise_if_over(end)
        url = f"{self.server.base_url}/generate"
        return _network_failure("POST", url, AttemptTimeoutError(f"the limit is {self._timeout:g} s"))

    def _keep(self, flight: Flight) -> dict[str, Any] | None:
        """The answer of a flight that was called back, kept if it is longer than what was kept before."""
        response = flight.response
        if response is None or not response.is_success:
            return None
        try:
            answer = decode_generation(response.content, f"{flight.server.base_url}/generate")
        except SGLangDecodingError:
            return None
        if self.partial is None or len(answer["output_ids"]) >= len(self.partial["output_ids"]):
            self.partial = answer
        return answer

    def _error(self, end: End) -> SGLangClientError:
        sampled = "" if self.partial is None else f" after {len(self.partial['output_ids'])} tokens"
        named: SGLangClientError
        if end is End.SIGNALLED:
            named = SGLangCancelledError(f"the call was cancelled by its signal{sampled}", response=self.partial)
        else:
            last = "" if self._failure is None else f"; the last attempt failed: {self._failure.error}"
            what = f"the deadline has passed{sampled}, {self._waiting.deadline:.3g} s after the request was made{last}"
            named = SGLangDeadlineError(f"POST {self.server.base_url}/generate: {what}", response=self.partial)
        named.__cause__ = None if self._failure is None else self._failure.error
        return named


def _is_aborted(answer: Mapping[str, Any]) -> bool:
    return bool(answer["meta_info"]["finish_reason"]["type"] == "abort")


async def _probe(session: LoopSession, servers: Servers, server: Server) -> None:
    """Ask a server that is out for its health; if it answers, it gets requests again."""
    url = f"{server.base_url}/health"
    try:
        response = await session.request("GET", url, None, timeout=PROBE_TIMEOUT_S)
    except Exception as error:
        server.history.note_failure(_network_failure("GET", url, error))
        return
    if response.status_code < 500:
        server.history.answered = True
        servers.note_answer(server)
    else:
        failed = http_error("GET", url, response.status_code, response.content)
        server.history.note_failure(Failure(FailureKind.REFUSED, failed))


def _network_failure(method: str, url: str, error: Exception) -> Failure:
    """Name an error of the network; errors of other kinds (a bug in a custom transport) are raised as they are."""
    kind = failure_kind(error)
    if kind is None:
        raise error
    what = root_cause(error)
    named: SGLangClientError
    if kind is FailureKind.UNREACHABLE:
        named = SGLangConnectionError(f"{method} {url}: could not connect ({what})")
    elif kind is FailureKind.TIMED_OUT:
        named = SGLangConnectionError(f"{method} {url}: no answer in time ({what})")
    elif kind is FailureKind.UNDECODABLE:
        named = SGLangDecodingError(f"{method} {url}: the answer is not HTTP ({what}); is this an SGLang server?")
    else:
        named = SGLangConnectionError(f"{method} {url}: the connection failed ({what})")
    named.__cause__ = error
    return Failure(kind, named, perhaps_running=kind in (FailureKind.DROPPED, FailureKind.TIMED_OUT))
