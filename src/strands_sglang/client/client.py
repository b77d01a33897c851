"""The HTTP client: one `/generate` request in, the server's unmodified response out.

It is not an OpenAI client because it sends and receives token ids: no text is tokenized twice. All agents of an event
loop share its connections, and all loops and threads can share one client. A request either returns a response or
raises one `SGLangClientError` that says where and why.

A request is a series of attempts. One that ends without a response is aborted on its server, and the longest partial
response of the aborted ones is kept. A complete response that arrives just too late still counts, unless the caller
cancelled the call.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import httpx
import orjson

from ..exceptions import (
    SGLangCancelledError,
    SGLangClientError,
    SGLangConnectionError,
    SGLangDeadlineError,
    SGLangDecodingError,
    SGLangHTTPError,
)
from ..protocol.wire import (
    NO_SUCH_ENDPOINT,
    EncodedIds,
    GenerateBody,
    UnfitAnswerError,
    decode_generation,
    decode_object,
    encode_generate,
    http_error,
)
from ..shown import without_credentials
from ..telemetry import report_retry
from .balancer import Server, Servers
from .cancellation import CLOCK_TOLERANCE_S, Cancellation, discard, settle
from .connections import (
    AiohttpTransport,
    AttemptTimeoutError,
    Flight,
    LoopSession,
    Reply,
    SessionPool,
    Transport,
    TransportSource,
    connect,
    credentials_of,
    failure_kind,
    root_cause,
)
from .loads import ServerLoad, ask_loads
from .prefill import CACHE_FIELDS, MAX_WAIT_S, MIN_TOKENS, PRIME_FIELDS, Openings, Prefill, block_keys
from .retries import (
    MAYBE_RUNNING_STATUSES,
    RETRIED_STATUSES,
    Failure,
    FailureKind,
    RetryPolicy,
    RetryState,
    retry_after_seconds,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

INFO_TIMEOUT_S = 30.0
"""Time limit of one attempt, except for `/generate`; a paused server's `/health` takes 20 s to report the pause."""

SLIME_CONCURRENCY_PER_ENGINE = 512
"""slime's default for `--sglang-server-concurrency`."""

PROBE_TIMEOUT_S = 10.0
"""Time limit of a health probe of a server out of rotation."""

ROUTING_HEADER = "x-smg-routing-key"

ROUTER_ERROR_HEADER = "x-smg-error-code"
"""Header of a router's own errors; a value that begins with "call_upstream" means that a worker got the request."""

Answer = dict[str, Any]

ENDPOINT_SUFFIXES = ("/v1", "/generate", "/v1/chat/completions", "/v1/completions")
"""Paths that users paste along with an address; the client needs the server's root."""


class SGLangClient:
    """Pooled, retrying, non-streaming client for one SGLang server, several servers, or a router.

    Create one client and share it between all agents of a process, from any thread. Connections are opened on the first
    request, in one pool per running event loop. A closed client opens new ones when it is used again, and so does a
    forked process.

    **Retries.** Connection failures, undecodable responses and the statuses 408, 409, 425, 429 and 5xx (except 501 and
    505) are retried. A timed-out attempt is retried once. A JSON response that lacks required fields is retried three
    times, and so is an undecodable response while no server has sent a valid one. Other errors are raised at once.

    **Several servers.** All of them must serve the same model; `SGLangModel` compares its tokenizer with each server's.
    A request goes to the server with the fewest requests in flight. Requests with the same `routing_key` go to the same
    server, whose prefix cache holds their conversation. A server that accepts no connections is taken out of rotation,
    probed at growing intervals, and put back once it answers.

    **Routers.** Behind a router (sglang-router, smg) the key is sent as the header `X-SMG-Routing-Key`. Routers do not
    forward aborts, so the client aborts requests on the workers directly.

    Attributes:
        base_url: Address of the (first) server, without a trailing slash.
        base_urls: Addresses of all servers.
        max_connections: Maximum number of concurrent generations per event loop.
        timeout: Seconds for one attempt; None for no limit.
        connect_timeout: Seconds to open a connection.
        max_retries: Maximum number of attempts after the first.
        retry_delay: Seconds before the first retry.
        vocab_size: Number of token ids of the model; None if unknown.
        unreachable_after: Seconds until a server that never answered counts as absent.
        deadline: Seconds for a whole `generate` call; None for no limit.
        abort_grace: Seconds to wait for the partial response of an aborted request.
        closings: Number of times that the client was closed.
        retry_policy: Delays and limits of retries.

    Examples:
        ```python
        async with SGLangClient("http://localhost:30000", deadline=600) as client:
            response = await client.generate([9707, 11], {"max_new_tokens": 16})
            print(response["output_ids"])
        ```
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
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
        deadline: float | None = None,
        abort_grace: float = 2.0,
    ) -> None:
        """Validate the settings. Nothing is sent yet.

        Args:
            base_url: Root address of the server, such as `http://localhost:30000`, or a list of several. Credentials
                in an address are sent to its server, and appear in no log or message.
            max_connections: Maximum number of concurrent generations per event loop. Further ones wait for a slot.
            timeout: Seconds for one attempt, from sending it to the last byte of the response; None for no limit. The
                time spent waiting for a slot does not count. A peer that vanished is noticed after two minutes anyway.
            connect_timeout: Seconds to open a connection.
            max_retries: Maximum number of attempts after the first.
            retry_delay: Seconds before the first retry. Each further delay doubles, up to 8 s, with random jitter; a
                server's `Retry-After` can raise it, up to 8 s too.
            transport: httpx transport to use unchanged, or a function that makes one per event loop. By default the
                client uses aiohttp, which needs far less CPU than httpx's own pool at high concurrency.
            vocab_size: Number of token ids of the model. Ids at or above it are rejected before they are sent.
            unreachable_after: Seconds until a server that never answered counts as absent, and retries stop.
            headers: Headers of every request, such as `{"Authorization": "Bearer ..."}` for a server that was started
                with `--api-key`.
            deadline: Seconds for a whole `generate` call, including retries and the wait for a slot; None for no limit.
                Waiting for the tokens sampled so far may take up to `abort_grace` longer.
            abort_grace: Seconds to wait for the partial response of an aborted request; with 0 it is not waited for.

        Raises:
            ValueError: A setting is invalid. The message names it and says why.
        """
        # Credentials are sent as headers only: addresses are in logs, errors and metrics.
        self._addresses = normalize_base_urls(base_url)
        self.base_urls = tuple(without_credentials(address) for address in self._addresses)
        self.base_url = self.base_urls[0]
        self.max_connections = checked_number("max_connections", max_connections, at_least=1)
        self.timeout = None if timeout is None else checked_number("timeout", timeout, above=0)
        self.connect_timeout = checked_number("connect_timeout", connect_timeout, above=0)
        self.max_retries = checked_number("max_retries", max_retries, at_least=0)
        self.retry_delay = checked_number("retry_delay", retry_delay, at_least=0)
        self.vocab_size = None if vocab_size is None else checked_number("vocab_size", vocab_size, at_least=1)
        self.unreachable_after = checked_number("unreachable_after", unreachable_after, at_least=0)
        self.deadline = None if deadline is None else checked_number("deadline", deadline, above=0)
        self.abort_grace = checked_number("abort_grace", abort_grace, at_least=0)
        if transport is not None and not isinstance(transport, Transport) and not callable(transport):
            raise ValueError("transport must be an httpx.AsyncBaseTransport or a function that makes one")
        self._transport, self._made_in = transport, os.getpid()
        self._headers = dict(headers or {})
        open_session = partial(
            connect,
            transport,
            https=any(url.startswith("https:") for url in self.base_urls),
            max_connections=max_connections,
            connect_timeout=connect_timeout,
            headers=self._headers,
            credentials=credentials_of(self._addresses),
        )
        self._sessions = SessionPool(open_session, abort_grace)
        self.retry_policy = RetryPolicy(max_retries, retry_delay, unreachable_after)
        self._servers = Servers(self.base_urls)
        self.closings = 0

    async def generate(
        self,
        input_ids: Sequence[int] | EncodedIds,
        sampling_params: Mapping[str, Any] | None = None,
        *,
        vocab_size: int | None = None,
        routing_key: str | None = None,
        cancel_signal: threading.Event | Cancellation | None = None,
        on_partial: Callable[[dict[str, Any]], None] | None = None,
        deadline: float | None = None,
        flat_logprobs: bool = False,
        **fields: Any,
    ) -> dict[str, Any]:
        """Generate from a prompt of token ids.

        Transient failures are retried; see the class. Each attempt has its own `rid`; `meta_info.id` is the one that
        was answered. An attempt whose call is cancelled, whose time is over, or whose connection breaks is aborted on
        its server at once. SGLang then responds with the tokens it has sampled. The call waits at most `abort_grace`
        seconds for them, even if its task is cancelled, and passes them to `on_partial` if it fails.

        Args:
            input_ids: Prompt, shape `(T,)`, at least one token; or its `EncodedIds`, which were checked when they were
                encoded.
            sampling_params: SGLang sampling parameters. Without `max_new_tokens`, SGLang stops after 128 tokens.
            vocab_size: Number of token ids of the model, instead of the client's.
            routing_key: Key that keeps requests on one server, whose prefix cache holds their conversation. It chooses
                among the client's servers, and is sent to routers as `X-SMG-Routing-Key`.
            cancel_signal: Event that ends the call once set, from any thread. It is checked every 50 ms. A
                `Cancellation` made in this event loop has its own deadline, which replaces the others.
            on_partial: Function that receives the longest partial response of the attempts, at most once, right before
                the call raises. Its finish reason is "abort", unless a complete response arrived just too late.
            deadline: Seconds for the whole call, instead of the client's.
            flat_logprobs: Whether `meta_info` may have `flat_token_logprobs`, `[logprob, token_id, None, ...]` in one
                list, instead of `output_token_logprobs`. It takes half the CPU to read. Partial responses never do, and
                responses with the tokens' texts neither.
            **fields: Further top-level keys of `/generate`, such as `return_logprob`, `logprob_start_len` and
                `return_routed_experts`. A `rid` becomes the prefix of each attempt's id.

        Returns:
            The server's JSON object, unmodified without `flat_logprobs`. Its `meta_info.finish_reason.type` may be
            "abort".

        Raises:
            ValueError: A token id is not an int in `[0, vocab_size)`, a stream or several samples are requested, or
                `deadline` is not a number above 0.
            SGLangContextLengthError: The prompt, or the prompt plus `max_new_tokens`, exceeds the model's context.
            SGLangThrottledError: The last attempt returned 429 or 503.
            SGLangHTTPError: The server returned another HTTP error.
            SGLangConnectionError: No server answered, the connection broke, or the last attempt timed out.
            SGLangDecodingError: The response is not a `/generate` response.
            SGLangDeadlineError: The time for the whole call is over.
            SGLangCancelledError: The cancel signal was set. If it was set before the call, nothing was sent.
        """
        vocab_size = self.vocab_size if vocab_size is None else vocab_size
        key = checked_routing_key(routing_key)
        if key is not None:
            fields["routing_key"] = key
        deadline = self.deadline if deadline is None else checked_number("deadline", deadline, above=0)
        cancellation = (
            cancel_signal if isinstance(cancel_signal, Cancellation) else Cancellation(deadline, cancel_signal)
        )
        session = await self._sessions.current()
        await session.turnstile.enter()
        body = encode_generate(input_ids, sampling_params, fields, vocab_size=vocab_size)
        request = Request(session, self._servers, cancellation, "POST", "/generate", flat_logprobs=flat_logprobs)
        attempt = partial(
            generate_once,
            request,
            body,
            key=key,
            prefix=f"{fields['rid']}-" if fields.get("rid") else "",
            timeout=self.timeout,
            grace=self.abort_grace,
        )
        try:
            response = await retrying(attempt, request, self.retry_policy)
            request.server.note_generation(response["meta_info"])
            return response
        except BaseException:
            if request.partial is not None and on_partial is not None:
                try:
                    on_partial(request.partial)
                except Exception:
                    logger.exception("on_partial raised; the partial answer may be lost")
            raise

    async def share_prefill(
        self,
        opening: array[int],
        *,
        routing_key: str | None,
        cancellation: Cancellation,
        vocab_size: int | None = None,
        **fields: Any,
    ) -> Prefill | None:
        """Let calls of this event loop that begin with the same tokens at the same time compute them once.

        Returns when the call may be made: at once, unless other calls are computing at least 256 tokens of its
        opening, or will need them. `SGLangModel` calls it before each request whose opening may not be in the cache.

        Args:
            opening: Tokens that the prompt begins with and other prompts may begin with, shape `(T,)`.
            routing_key: Routing key of the call.
            cancellation: Deadline and cancel signal of the call.
            vocab_size: Number of token ids of the model.
            **fields: Further top-level fields of the call; those that separate prefix caches count.

        Returns:
            The call's part in computing its opening, which receives the answer; None if the opening is too short.

        Raises:
            SGLangCancelledError: The call was cancelled while it waited.
            SGLangDeadlineError: The call's deadline passed while it waited.
            SGLangConnectionError: The client was closed while the call waited.
        """
        if len(opening) < MIN_TOKENS:
            return None
        session, server = await self._sessions.current(), self._servers.choose(routing_key)
        blocks = block_keys(opening, tuple(fields.get(name) for name in CACHE_FIELDS))
        kept = {name: fields[name] for name in PRIME_FIELDS if name in fields}

        async def compute() -> bool:
            answering = asyncio.ensure_future(
                self.generate(
                    opening,
                    {"max_new_tokens": 0},
                    vocab_size=vocab_size,
                    routing_key=routing_key,
                    deadline=MAX_WAIT_S,
                    **kept,
                )
            )
            try:
                await asyncio.wait({answering, session.closing}, return_when=asyncio.FIRST_COMPLETED)
                return answering.done() and answering.result()["meta_info"]["finish_reason"]["type"] != "abort"
            finally:
                discard(answering)

        openings = session.openings.get(server)
        if openings is None:
            openings = session.openings[server] = Openings(server)
        openings.forget_if_outdated()
        self._servers.count_in_flight(server, 1)  # so that the balancer sees the calls that wait
        try:
            prefill = await openings.share(
                blocks, lambda: session.background(("prime", server, blocks[-1]), compute), cancellation
            )
        finally:
            self._servers.count_in_flight(server, -1)
        if session.closed:
            raise SGLangConnectionError(f"the client of {server.base_url} was closed while a call waited")
        return prefill

    async def health(self) -> bool:
        """Return whether at least one server is up and generating.

        The server samples one token for this, in about 1 s. A server that is unreachable, starting or paused is not up;
        none of these raises.
        """
        return any((await self.health_by_server()).values())

    async def health_by_server(self) -> dict[str, bool]:
        """Return whether each server is up and generating, by address; see `health`."""
        session = await self._sessions.current()

        asked = (ask_health(session, self._servers, server, INFO_TIMEOUT_S) for server in self._servers.all)
        outcomes = await asyncio.gather(*asked)
        return {url: not isinstance(outcome, Failure) for url, outcome in zip(self.base_urls, outcomes, strict=True)}

    async def loads(self) -> tuple[ServerLoad, ...]:
        """Return what the servers report about their load now: requests that run and wait, and the cache's use.

        Behind a router its workers are asked directly. A server that does not answer within 2 s or reports no load is
        left out; none of these raises.
        """
        session = await self._sessions.current()
        reports = await asyncio.gather(*(ask_loads(session, base_url) for base_url in self.base_urls))
        return tuple(itertools.chain.from_iterable(reports))

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers that get requests now: those in rotation, or all if none is. Each holds what is known of it."""
        return self._servers.up()

    async def model_info(self, base_url: str | None = None) -> dict[str, Any]:
        """Return what a server reports about its model: `model_path`, `tokenizer_path`, `weight_version` and so on.

        Requests `/model_info`, or `/get_model_info` where the former does not exist (older servers, routers).

        Args:
            base_url: Server to ask; None for any of them.

        Raises:
            ValueError: `base_url` is not one of the client's servers.
            SGLangClientError: There is no response; the errors are those of `generate`.
        """
        try:
            return await self._ask("GET", "/model_info", base_url)
        except SGLangHTTPError as error:
            if error.status not in NO_SUCH_ENDPOINT:
                raise
        return await self._ask("GET", "/get_model_info", base_url)

    get_model_info = model_info

    async def context_length(self, base_url: str | None = None) -> int | None:
        """Return the maximum number of tokens of prompt and response together, from `/v1/models`.

        The number is cached; None and failures are not. Concurrent callers share one request.

        Args:
            base_url: Server to ask; None for the first one in rotation.

        Returns:
            The number of tokens; None if the server does not report it, as routers do not.

        Raises:
            ValueError: `base_url` is not one of the client's servers.
            SGLangClientError: There is no response; the errors are those of `generate`.
        """
        server = self._servers.up()[0] if base_url is None else self._servers[base_url]

        async def ask() -> int | None:
            try:
                answer = await self._ask("GET", "/v1/models", server.base_url)
            except SGLangHTTPError as error:
                if error.status < 500:
                    return None
                raise
            match answer:
                case {"data": [{"max_model_len": int(length)}, *_]} if length > 0:
                    return length
            return None

        if server.context_length is None:
            server.context_length = await shared(self, ("context_length", server.base_url), ask)
        return server.context_length

    async def tokenize(self, text: str, base_url: str | None = None) -> list[int] | None:
        """Tokenize a text on the server, without adding special tokens.

        Error statuses are not retried. Routers have no `/tokenize`, and a server that was started with
        `--skip-tokenizer-init` always returns 500.

        Args:
            text: Text to tokenize.
            base_url: Server to ask; None for any of them.

        Returns:
            The token ids; None if the server returned an error status.

        Raises:
            ValueError: `base_url` is not one of the client's servers.
            SGLangClientError: There is no response; the errors are those of `generate`.
        """
        content = {"prompt": text, "add_special_tokens": False}
        try:
            answer = await self._ask("POST", "/tokenize", base_url, content, retry_refusals=False)
        except SGLangHTTPError:
            return None
        tokens = answer.get("tokens")
        if not isinstance(tokens, list):
            raise SGLangDecodingError(f"{base_url or self.base_url}/tokenize responded without `tokens` (a list)")
        return tokens

    async def post(
        self,
        path: str,
        content: Mapping[str, Any] | None = None,
        *,
        base_url: str | None = None,
        timeout: float = INFO_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Post JSON to an endpoint of one server, such as `/pause_generation`. It is not retried: it may have acted.

        Args:
            path: Path below the server's address, with the query if there is one.
            content: JSON body.
            base_url: Server to ask; None for any of them.
            timeout: Seconds for the whole exchange.

        Returns:
            The server's JSON object; an empty one if it responded with something else, such as plain text.

        Raises:
            ValueError: `base_url` is not one of the client's servers.
            SGLangClientError: There is no response, or it is an error; the errors are those of `generate`.
        """
        only = None if base_url is None else self._servers[base_url]
        request = Request(await self._sessions.current(), self._servers, Cancellation(), "POST", path, only)
        outcome = await ask_once(request, orjson.dumps(content or {}), timeout, _decode_any)
        if isinstance(outcome, Failure):
            raise outcome.error
        return outcome

    async def abort(self, rid: str) -> None:
        """Abort a request on its server. Takes at most 2 s and never raises.

        The `generate` call in question then returns the tokens sampled so far.

        Args:
            rid: Id that was passed to `generate` as `rid` in this event loop, or the exact id of an attempt.
        """
        await (await self._sessions.current()).abort(rid, self.base_urls)

    async def close(self) -> None:
        """Abort all requests in flight and close the connections of all event loops.

        Calls in flight return what the servers have sampled, or raise if that does not arrive within `abort_grace`
        seconds. A later request opens new connections.
        """
        self.closings += 1
        await self._sessions.close()
        if isinstance(self._transport, Transport) and self._made_in == os.getpid():  # else a parent process may use it
            await self._transport.aclose()

    async def __aenter__(self) -> SGLangClient:
        """Return the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the client."""
        await self.close()

    def __reduce__(self) -> Any:
        """Pickle the settings: a client connects where it is used."""
        names = "max_connections timeout connect_timeout max_retries retry_delay vocab_size unreachable_after deadline"
        settings = {name: getattr(self, name) for name in (*names.split(), "abort_grace")}
        return partial(type(self), self._addresses, transport=self._transport, headers=self._headers, **settings), ()

    def __repr__(self) -> str:
        """Return the class name and the addresses."""
        where = self.base_url if len(self.base_urls) == 1 else list(self.base_urls)
        return f"SGLangClient(base_url={where!r})"

    @classmethod
    def from_slime_args(cls, args: Any, **overrides: Any) -> SGLangClient:
        """Make a client for slime's router: its address and concurrency, no timeout, 60 retries.

        Args:
            args: Parsed arguments of slime or miles.
            **overrides: Arguments of `SGLangClient` that take precedence.

        Raises:
            ValueError: The arguments name no router, or a setting is invalid.
        """
        return cls(**slime_client_arguments(args, **overrides))

    from_miles_args = from_slime_args

    async def _ask(
        self,
        method: str,
        path: str,
        base_url: str | None = None,
        content: Mapping[str, Any] | None = None,
        *,
        retry_refusals: bool = True,
    ) -> dict[str, Any]:
        """Request a JSON object from an endpoint, with the retries of `generate`; error statuses may be exempt."""
        only = None if base_url is None else self._servers[base_url]
        request = Request(await self._sessions.current(), self._servers, Cancellation(), method, path, only)
        encoded = None if content is None else orjson.dumps(content)
        policy = replace(self.retry_policy, retry_refusals=retry_refusals)
        return await retrying(partial(ask_once, request, encoded, INFO_TIMEOUT_S), request, policy)


async def shared(client: SGLangClient, key: Any, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work` once for all concurrent callers with the same `key` in this event loop.

    Canceling one caller does not cancel the work of the others.

    Args:
        client: Client whose callers share the work.
        key: Hashable identity of the work.
        work: Coroutine function to run.
    """
    return await (await client._sessions.current()).shared(key, work)


# --- one request as a series of attempts ---


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
    try:
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
                left = math.inf if can_move else min(retries.seconds_left(outcome), request.cancellation.seconds_left)
                server.log_failure(outcome, retries, time.monotonic() + left)
                report_retry(server.base_url, outcome.kind.value, retries.retries)
                if can_move:
                    delay = 0.0
                if delay >= request.cancellation.seconds_left:
                    raise request.deadline_error() from outcome.error
                await request.until(session.closing, timeout=delay)
    finally:
        if retries.retries:
            for server in servers.all:
                server.forget(retries)


async def ask_once(
    request: Request,
    content: bytes | None,
    timeout: float,
    decode: Callable[[bytes, str], Answer] = decode_object,
) -> Answer | Failure:
    """Request a JSON object from one server, once."""
    server = request.server = request.only or request.servers.choose()
    sent = request.session.request(request.method, f"{server.base_url}{request.path}", content, timeout=timeout)
    return await _outcome(request, sent, decode)


def _decode_any(body: bytes, url: str) -> Answer:
    try:
        return decode_object(body, url)
    except SGLangDecodingError:
        return {}


async def ask_health(session: LoopSession, servers: Servers, server: Server, timeout: float) -> Answer | Failure:
    """Request one server's health, once; it is not a failure if the server is up."""
    request = Request(session, servers, Cancellation(), "GET", "/health", server)
    return await ask_once(request, None, timeout, _decode_any)


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


# --- arguments ---


def normalize_base_url(base_url: str) -> str:
    """Return a server's address without surrounding whitespace or trailing slashes.

    Raises:
        ValueError: It is not the http(s) address of a server's root. The message says what to write instead.
    """
    if not isinstance(base_url, str):
        raise ValueError(f"base_url must be a string such as 'http://127.0.0.1:30000', got {base_url!r}")
    address = base_url.strip()
    scheme, separator, rest = address.partition("://") if "://" in address else ("", "", address)
    _, has_credentials, host = rest.rpartition("@")
    shown = repr(f"{scheme}{separator}{host}")
    if not address.lower().startswith(("http://", "https://")):
        raise ValueError(
            f"base_url {shown} does not start with http:// or https://: write 'http://{host or '127.0.0.1:30000'}'"
        )
    try:
        url = httpx.URL(address)
        if len(address.split()) > 1:
            raise httpx.InvalidURL("it has white space")
    except httpx.InvalidURL as error:
        if has_credentials:  # of which the error may show a part
            hint = "percent-encode its credentials (%2F for /, %20 for a space)"
            raise ValueError(f"base_url {shown} is not a URL: {hint}") from None
        raise ValueError(f"base_url {shown} is not a URL: {error}") from error
    if not url.host:
        raise ValueError(f"base_url {shown} has no host: write an address such as 'http://127.0.0.1:30000'")
    address = address.rstrip("/")
    if url.query or url.fragment:
        raise ValueError(f"base_url {shown} has a query or a fragment: remove it")
    for suffix in sorted(ENDPOINT_SUFFIXES, key=len, reverse=True):
        if url.path.rstrip("/").endswith(suffix):
            raise ValueError(
                f"base_url {shown} ends in {suffix}: write {without_credentials(address[: -len(suffix)])!r} "
                "(the client uses SGLang's own /generate, not its OpenAI endpoints)"
            )
    return address


def normalize_base_urls(base_url: str | Sequence[str]) -> tuple[str, ...]:
    """Return the normalized addresses of one server or several; see `normalize_base_url`.

    Raises:
        ValueError: The list is empty, has duplicates, or has an invalid address.
    """
    if isinstance(base_url, str) or not isinstance(base_url, Sequence):
        return (normalize_base_url(base_url),)
    addresses = tuple(normalize_base_url(url) for url in base_url)
    if not addresses:
        raise ValueError("base_url is an empty list: pass at least one server")
    shown = [without_credentials(address) for address in addresses]
    twice = sorted({address for address in shown if shown.count(address) > 1})
    if twice:
        raise ValueError(f"base_url has {', '.join(twice)} more than once: list each server once")
    return addresses


def checked_routing_key(key: Any) -> str | None:
    """Return the routing key if it can be sent as a header; None stays None.

    Raises:
        ValueError: It is not a string of printable ASCII characters.
    """
    if key is None or (isinstance(key, str) and key.strip() == key != "" and key.isascii() and key.isprintable()):
        return key
    raise ValueError(f"routing_key must be a string of printable ASCII characters or None, got {key!r}")


def checked_number(name: str, value: Any, *, at_least: float | None = None, above: float | None = None) -> Any:
    """Return the value if it is a finite number within its bounds.

    Raises:
        ValueError: It is not. The message names the setting.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if number and (at_least is None or value >= at_least) and (above is None or value > above):
        return value
    bound = f"at least {at_least:g}" if at_least is not None else f"above {above:g}"
    raise ValueError(f"{name} must be a number {bound}, got {value!r}")


def slime_client_arguments(args: Any, **overrides: Any) -> dict[str, Any]:
    """Return the arguments of `SGLangClient` for slime's: one connection per request that its engines can serve.

    Reads `sglang_router_ip`, `sglang_router_port`, `sglang_server_concurrency`, `rollout_num_engines`,
    `rollout_num_gpus` and `rollout_num_gpus_per_engine`. The last three may be None or 0 with external engines.

    Args:
        args: Parsed arguments of slime or miles.
        **overrides: Arguments of `SGLangClient` that take precedence.

    Raises:
        ValueError: There is no router address in `args`, and no `base_url`.
    """
    per_engine = getattr(args, "sglang_server_concurrency", None) or SLIME_CONCURRENCY_PER_ENGINE
    gpus = getattr(args, "rollout_num_gpus", None) or 0
    gpus_per_engine = getattr(args, "rollout_num_gpus_per_engine", None) or 1
    engines = getattr(args, "rollout_num_engines", None) or gpus // gpus_per_engine
    arguments = {
        "max_connections": int(per_engine) * max(1, int(engines)),
        **overrides,
    }
    if "base_url" not in arguments:
        ip, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
        if not ip or not port:
            raise ValueError(
                f"sglang_router_ip is {ip!r} and sglang_router_port is {port!r}: slime sets them when it starts its "
                "router; before that, set --sglang-router-ip and --sglang-router-port, or pass base_url="
            )
        host = f"[{ip}]" if ":" in ip and not ip.startswith("[") else ip
        arguments["base_url"] = f"http://{host}:{port}"
    return arguments
