"""The HTTP client: one `/generate` request in, the server's answer as it came out.

Why not an OpenAI client: token ids go out and come back, so that nothing is tokenised twice. Promises: connections are
shared by all agents of an event loop, and a client by all loops and threads; a request is answered, or fails with one
`SGLangClientError` that says where and why; an attempt that nobody waits for any more is aborted on the server.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import httpx
import orjson

from .exceptions import SGLangClientError, SGLangConnectionError, SGLangDecodingError, SGLangHTTPError
from .retries import (
    PERHAPS_RUNNING_STATUSES,
    RETRIED_STATUSES,
    Failure,
    FailureKind,
    RetryPolicy,
    RetryState,
    ServerHistory,
    retry_after_seconds,
)
from .sessions import LoopSession, SessionPool
from .settings import checked_number, normalize_base_url, slime_client_arguments
from .transports import Transport, TransportSource, failure_kind, root_cause
from .wire import NO_SUCH_ENDPOINT, decode_generation, decode_object, encode_generate, http_error

INFO_TIMEOUT_S = 30.0
"""Time limit of one attempt of everything but `/generate`; `/health` of a paused server takes 20 s to say so."""


class SGLangClient:
    """A pooled, retrying, never streaming client of one SGLang server (or of a router in front of several).

    It opens connections at the first request, one pool per running event loop, so it can be made anywhere, shared by
    all agents of a process, and used again after `close`.

    Attributes:
        base_url: The server's address without a slash at the end.
        max_connections: Most generations at a time in each event loop; more of them wait for their turn.
        timeout: Seconds that one attempt may take from being sent to the last byte of its answer; None for no limit.
        connect_timeout: Seconds for making a connection.
        max_retries: Attempts after the first one.
        retry_delay: Seconds before the first retry; doubles up to 8.
        vocab_size: Number of token ids that the model knows; None if not known.
        unreachable_after: Seconds after which a server that has never answered counts as not being there.
    """

    def __init__(
        self,
        base_url: str,
        *,
        max_connections: int = 1000,
        timeout: float | None = None,
        connect_timeout: float = 5.0,
        max_retries: int = 60,
        retry_delay: float = 1.0,
        transport: TransportSource | None = None,
        vocab_size: int | None = None,
        unreachable_after: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Check the settings; nothing is sent yet.

        Args:
            base_url: `http://host:port`, where `/generate` is.
            max_connections: See the class.
            timeout: See the class.
            connect_timeout: See the class.
            max_retries: See the class.
            retry_delay: See the class.
            transport: An httpx transport to use as it is, or a factory that is called once per event loop.
            vocab_size: See the class; ids at or above it are refused before they are sent.
            unreachable_after: See the class.
            headers: Sent with every request, e.g. `{"Authorization": "Bearer ..."}` for a server with `--api-key`.

        Raises:
            ValueError: A setting cannot work; says which and why.
        """
        self.base_url = normalize_base_url(base_url)
        self.max_connections = checked_number("max_connections", max_connections, at_least=1)
        self.timeout = None if timeout is None else checked_number("timeout", timeout, above=0)
        self.connect_timeout = checked_number("connect_timeout", connect_timeout, above=0)
        self.max_retries = checked_number("max_retries", max_retries, at_least=0)
        self.retry_delay = checked_number("retry_delay", retry_delay, at_least=0)
        self.vocab_size = None if vocab_size is None else checked_number("vocab_size", vocab_size, at_least=1)
        self.unreachable_after = checked_number("unreachable_after", unreachable_after, at_least=0)
        if transport is not None and not isinstance(transport, Transport) and not callable(transport):
            raise ValueError("transport must be an httpx.AsyncBaseTransport or a function that makes one")
        self._sessions = SessionPool(
            self.base_url,
            max_connections=max_connections,
            connect_timeout=connect_timeout,
            transport=transport,
            headers=headers or {},
        )
        self._policy = RetryPolicy(max_retries, retry_delay, unreachable_after)
        self._history = ServerHistory(self.base_url)
        self._context_length: int | None = None

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        vocab_size: int | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Generate from a prompt of token ids.

        Transient failures are retried. Every attempt has a `rid` of its own (`meta_info.id` tells the one that
        answered), and one that was cancelled, timed out or lost its connection is aborted on the server. When the
        caller is cancelled, the cancellation goes on as soon as the abort got out, at most 1 s later.

        Args:
            input_ids: The prompt, shape (T,), T >= 1.
            sampling_params: SGLang sampling parameters. Without `max_new_tokens` SGLang stops after 128.
            vocab_size: Overrides the client's.
            **fields: Further top-level keys of `/generate`: `return_logprob`, `logprob_start_len`,
                `return_routed_experts`, ... A `rid` becomes the prefix of each attempt's.

        Returns:
            The server's JSON object as it came. That includes one whose `meta_info.finish_reason.type` is "abort".

        Raises:
            ValueError: A token id is not an int in [0, vocab_size), or a stream or several answers are asked for.
            SGLangContextLengthError: The prompt, or the prompt plus `max_new_tokens`, does not fit the model's context.
            SGLangThrottledError: 429 or 503, also after all retries.
            SGLangHTTPError: Any other HTTP error.
            SGLangConnectionError: Nobody answered, the connection broke, or the time was over.
            SGLangDecodingError: The answer is not one of `/generate`.
        """
        vocab_size = self.vocab_size if vocab_size is None else vocab_size
        body = encode_generate(input_ids, sampling_params, fields, vocab_size=vocab_size)
        prefix = f"{fields['rid']}-" if fields.get("rid") else ""
        session = await self._sessions.current()

        async def attempt() -> dict[str, Any] | Failure:
            rid = f"{prefix}{uuid.uuid4().hex}"
            sent = session.generate(body.with_rid(rid), rid, timeout=self.timeout)
            outcome = await self._outcome("POST", "/generate", sent, decode_generation)
            if isinstance(outcome, Failure) and outcome.perhaps_running:
                await session.abort(rid)
            return outcome

        response = await self._until_answered(session, attempt)
        self._history.usable = True
        return response

    async def health(self) -> bool:
        """Whether the server is up and generates (`/health` makes it sample one token, about 1 s).

        False for a server that cannot be reached, is starting, or is paused; never raises for the server's sake.
        """
        session = await self._sessions.current()
        try:
            response = await session.request("GET", "/health", None, timeout=INFO_TIMEOUT_S)
        except Exception as error:
            if failure_kind(error) is None:
                raise
            return False
        return response.status_code == 200

    async def model_info(self) -> dict[str, Any]:
        """What the server tells about its model: `model_path`, `tokenizer_path`, `weight_version`, ...

        Asks `/model_info`, and `/get_model_info` where that does not exist (older servers, routers).

        Raises:
            SGLangClientError: No answer, as for `generate`.
        """
        try:
            return await self._ask("GET", "/model_info")
        except SGLangHTTPError as error:
            if error.status not in NO_SUCH_ENDPOINT:
                raise
        return await self._ask("GET", "/get_model_info")

    get_model_info = model_info

    async def context_length(self) -> int | None:
        """Most tokens of prompt and answer together, from `/v1/models`; None where that does not tell (routers).

        A number is remembered; None and failures are not. Callers that ask at the same time share one request.

        Raises:
            SGLangClientError: No answer, as for `generate`.
        """
        if self._context_length is None:
            session = await self._sessions.current()
            self._context_length = await session.shared("context_length", self._ask_context_length)
        return self._context_length

    async def tokenize(self, text: str) -> list[int] | None:
        """The server's own tokens of `text`, no special ones added.

        None where they are not to be had, whatever the status: routers have no `/tokenize`, and a server started with
        `--skip-tokenizer-init` answers 500 for good, which must not be retried for minutes.

        Raises:
            SGLangClientError: No answer, as for `generate`.
        """
        content = {"prompt": text, "add_special_tokens": False}
        try:
            answer = await self._ask("POST", "/tokenize", content, retry_refusals=False)
        except SGLangHTTPError:
            return None
        tokens = answer.get("tokens")
        if not isinstance(tokens, list):
            raise SGLangDecodingError(f"{self.base_url}/tokenize answered without `tokens` (a list)")
        return tokens

    async def abort(self, rid: str) -> None:
        """Abort a request on the server; takes at most 2 s and never raises. `generate` then returns what there is.

        Args:
            rid: What was given to `generate` as `rid` in this event loop, or the exact id of an attempt.
        """
        session = await self._sessions.current()
        await session.abort(rid)

    async def close(self) -> None:
        """Abort what is in flight and close the connections of all event loops. A later request opens new ones."""
        await self._sessions.close()

    async def __aenter__(self) -> SGLangClient:
        """The client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()

    def __repr__(self) -> str:
        """The class and the address."""
        return f"SGLangClient(base_url={self.base_url!r})"

    @classmethod
    def from_slime_args(cls, args: Any, **overrides: Any) -> SGLangClient:
        """A client of slime's router: its address, its concurrency, no timeout, 60 retries.

        Args:
            args: slime's (or miles') parsed arguments.
            **overrides: Arguments of `SGLangClient` that win over them.

        Raises:
            ValueError: The arguments name no router.
        """
        return cls(**slime_client_arguments(args, **overrides))

    from_miles_args = from_slime_args

    async def _ask_context_length(self) -> int | None:
        try:
            answer = await self._ask("GET", "/v1/models")
        except SGLangHTTPError as error:
            if error.status < 500:
                return None
            raise
        models = answer.get("data")
        first = models[0] if isinstance(models, list) and models else None
        length = first.get("max_model_len") if isinstance(first, dict) else None
        return length if isinstance(length, int) and length > 0 else None

    async def _ask(
        self, method: str, path: str, content: Mapping[str, Any] | None = None, *, retry_refusals: bool = True
    ) -> dict[str, Any]:
        """Ask an endpoint for a JSON object, with the retries of `generate`; error statuses may be left out of them."""
        body = None if content is None else orjson.dumps(content)
        session = await self._sessions.current()

        async def attempt() -> dict[str, Any] | Failure:
            sent = session.request(method, path, body, timeout=INFO_TIMEOUT_S)
            outcome = await self._outcome(method, path, sent, decode_object)
            if isinstance(outcome, Failure) and outcome.kind is FailureKind.REFUSED and not retry_refusals:
                return replace(outcome, kind=FailureKind.FINAL)
            return outcome

        return await self._until_answered(session, attempt)

    async def _until_answered(
        self, session: LoopSession, attempt: Callable[[], Awaitable[dict[str, Any] | Failure]]
    ) -> dict[str, Any]:
        """Make attempts until one is answered or there is no point in another one."""
        retries = RetryState(self._policy, self._history)
        while True:
            try:
                outcome = await attempt()
            except Exception as error:
                if not session.closed:
                    raise
                outcome = Failure(FailureKind.FINAL, SGLangConnectionError(f"{self.base_url}: {error}"))
            if not isinstance(outcome, Failure):
                self._history.note_answer()
                return outcome
            self._raise_if_closed(session, outcome)
            delay = retries.next_delay(outcome)
            if delay is None:
                raise retries.explain(outcome)
            self._history.note_failure(outcome)
            await asyncio.sleep(delay)
            self._raise_if_closed(session, outcome)

    def _raise_if_closed(self, session: LoopSession, outcome: Failure) -> None:
        if session.closed:
            raise SGLangConnectionError(f"the client of {self.base_url} was closed during a request") from outcome.error

    async def _outcome(
        self,
        method: str,
        path: str,
        sent: Awaitable[httpx.Response],
        decode: Callable[[bytes, str], dict[str, Any]],
    ) -> dict[str, Any] | Failure:
        """The decoded answer of one attempt, or how it failed."""
        url = f"{self.base_url}{path}"
        try:
            response = await sent
        except Exception as error:
            return _network_failure(method, url, error)
        self._history.answered = True
        status = response.status_code
        if not response.is_success:
            return Failure(
                FailureKind.REFUSED if status in RETRIED_STATUSES else FailureKind.FINAL,
                http_error(method, url, status, response.content, location=response.headers.get("location")),
                retry_after=retry_after_seconds(response.headers),
                perhaps_running=status in PERHAPS_RUNNING_STATUSES,
            )
        try:
            return decode(response.content, url)
        except SGLangDecodingError as error:
            return Failure(FailureKind.UNDECODABLE, error)


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
