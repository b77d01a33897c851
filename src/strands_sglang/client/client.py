"""The HTTP client: one `/generate` request in, the server's answer as it came out.

Why not an OpenAI client: token ids go out and come back, so that nothing is tokenised twice. Promises: connections are
shared by all agents of an event loop, and a client by all loops and threads; a request is answered, or fails with one
`SGLangClientError` that says where and why; an attempt that nobody waits for any more is aborted on the server, and
what it had sampled until then is not lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import httpx
import orjson

from ..exceptions import SGLangDecodingError, SGLangHTTPError
from ..protocol.wire import NO_SUCH_ENDPOINT, encode_generate
from .balancer import Servers
from .cancellation import Cancellation
from .connections import SessionPool, Transport, TransportSource, connect
from .requests import Request, ask_health, ask_once, generate_once, retrying
from .retries import Failure, RetryPolicy

logger = logging.getLogger(__name__)

T = TypeVar("T")

INFO_TIMEOUT_S = 30.0
"""Time limit of one attempt of everything but `/generate`; `/health` of a paused server takes 20 s to say so."""

SLIME_CONCURRENCY_PER_ENGINE = 512
"""slime's default of `--sglang-server-concurrency`."""

ENDPOINT_SUFFIXES = ("/v1", "/generate", "/v1/chat/completions", "/v1/completions")
"""Paths that people copy along with an address; everything here is below the server's root."""


class SGLangClient:
    """A pooled, retrying, never streaming client of SGLang servers: one, several, or a router in front of several.

    It opens connections at the first request, one pool per running event loop, so it can be made anywhere, shared by
    all agents of a process, and used again after `close`.

    Attributes:
        base_url: The (first) server's address without a slash at the end.
        base_urls: The addresses of all its servers.
        max_connections: Most generations at a time in each event loop; more of them wait for their turn.
        timeout: Seconds that one attempt may take from being sent to the last byte of its answer; None for no limit.
        connect_timeout: Seconds for making a connection.
        max_retries: Attempts after the first one.
        retry_delay: Seconds before the first retry; doubles up to 8.
        vocab_size: Number of token ids that the model knows; None if not known.
        unreachable_after: Seconds after which a server that has never answered counts as not being there.
        deadline: Seconds that a whole `generate` may take, retries and waiting for a connection included; None for no
            limit.
        abort_grace: Seconds for which the answer of an aborted request is waited for.
        closings: How often it was closed; a call that has seen one asks for nothing more.
        retry_policy: How long to wait before each retry, and when to stop.
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
        """Check the settings; nothing is sent yet.

        Args:
            base_url: `http://host:port`, where `/generate` is. Several of them are several servers of one model: a
                request goes to the one with the fewest in flight, requests with one routing key to the same one.
            max_connections: See the class.
            timeout: See the class.
            connect_timeout: See the class.
            max_retries: See the class.
            retry_delay: See the class.
            transport: An httpx transport to use as it is, or a factory that is called once per event loop.
            vocab_size: See the class; ids at or above it are refused before they are sent.
            unreachable_after: See the class.
            headers: Sent with every request, e.g. `{"Authorization": "Bearer ..."}` for a server with `--api-key`.
            deadline: See the class.
            abort_grace: See the class.

        Raises:
            ValueError: A setting cannot work; says which and why.
        """
        self.base_urls = normalize_base_urls(base_url)
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
        self._transport = transport
        open_session = partial(
            connect,
            transport,
            https=any(url.startswith("https:") for url in self.base_urls),
            max_connections=max_connections,
            connect_timeout=connect_timeout,
            headers=dict(headers or {}),
        )
        self._sessions = SessionPool(open_session, abort_grace)
        self.retry_policy = RetryPolicy(max_retries, retry_delay, unreachable_after)
        self._servers = Servers(self.base_urls)
        self.closings = 0

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        vocab_size: int | None = None,
        routing_key: str | None = None,
        cancel_signal: threading.Event | Cancellation | None = None,
        on_partial: Callable[[dict[str, Any]], None] | None = None,
        deadline: float | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Generate from a prompt of token ids.

        Transient failures are retried. Every attempt has a `rid` of its own (`meta_info.id` tells the one that
        answered). One that is cancelled, runs out of time or loses its connection is aborted on the server, behind a
        router on its workers. The server then answers with what it has sampled, which is waited for at most
        `abort_grace` seconds, also by a caller that is cancelled; if the call fails, `on_partial` gets it.

        Args:
            input_ids: The prompt, shape (T,), T >= 1.
            sampling_params: SGLang sampling parameters. Without `max_new_tokens` SGLang stops after 128.
            vocab_size: Overrides the client's.
            routing_key: Requests with the same key go to the same server, whose cache has their prefix: by this client
                if it has several, and by routers (it is sent as `X-SMG-Routing-Key`).
            cancel_signal: Ends the call once it is set, from any thread; looked at every 50 ms. A `Cancellation` made
                in this event loop brings its own deadline, which then counts alone.
            on_partial: Called at most once, right before the call raises, with the longest partial answer of its
                attempts; in the form of an answer, with the finish reason "abort" unless it came just too late.
            deadline: In place of the client's.
            **fields: Further top-level keys of `/generate`: `return_logprob`, `logprob_start_len`,
                `return_routed_experts`, ... A `rid` becomes the prefix of each attempt's.

        Returns:
            The server's JSON object as it came. That includes one whose `meta_info.finish_reason.type` is "abort".

        Raises:
            ValueError: A token id is not an int in [0, vocab_size), a stream or several answers are asked for, or
                `deadline` is no number above 0.
            SGLangContextLengthError: The prompt, or the prompt plus `max_new_tokens`, does not fit the model's context.
            SGLangThrottledError: 429 or 503, also after all retries.
            SGLangHTTPError: Any other HTTP error.
            SGLangConnectionError: Nobody answered, the connection broke, or the time of the last attempt was over.
            SGLangDecodingError: The answer is not one of `/generate`.
            SGLangDeadlineError: The time of the whole call was over.
            SGLangCancelledError: The cancel signal was set; if that was before the call, nothing was sent.
        """
        vocab_size = self.vocab_size if vocab_size is None else vocab_size
        key = checked_routing_key(routing_key)
        if key is not None:
            fields["routing_key"] = key
        body = encode_generate(input_ids, sampling_params, fields, vocab_size=vocab_size)
        session = await self._sessions.current()
        deadline = self.deadline if deadline is None else checked_number("deadline", deadline, above=0)
        cancellation = (
            cancel_signal if isinstance(cancel_signal, Cancellation) else Cancellation(deadline, cancel_signal)
        )
        request = Request(session, self._servers, cancellation, "POST", "/generate")
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
            request.server.usable = True
            return response
        except BaseException:
            if request.partial is not None and on_partial is not None:
                try:
                    on_partial(request.partial)
                except Exception:
                    logger.exception("on_partial raised; the partial answer may be lost")
            raise

    async def health(self) -> bool:
        """Whether a server, one of several at least, is up and generates (it samples one token for it, about 1 s).

        False for servers that cannot be reached, are starting, or are paused; never raises for their sake.
        """
        return any((await self.health_by_server()).values())

    async def health_by_server(self) -> dict[str, bool]:
        """For each address whether that server is up and generates; see `health`."""
        session = await self._sessions.current()

        asked = (ask_health(session, self._servers, server, INFO_TIMEOUT_S) for server in self._servers.all)
        outcomes = await asyncio.gather(*asked)
        return {url: not isinstance(one, Failure) for url, one in zip(self.base_urls, outcomes, strict=True)}

    @property
    def available_urls(self) -> tuple[str, ...]:
        """The addresses that requests go to: all but those that take no connections, or all if none does."""
        return tuple(server.base_url for server in self._servers.up())

    async def model_info(self, base_url: str | None = None) -> dict[str, Any]:
        """What a server tells about its model: `model_path`, `tokenizer_path`, `weight_version`, ...

        Asks `/model_info`, and `/get_model_info` where that does not exist (older servers, routers).

        Args:
            base_url: Which one of several is asked; None for any.

        Raises:
            SGLangClientError: No answer, as for `generate`.
        """
        try:
            return await self._ask("GET", "/model_info", base_url)
        except SGLangHTTPError as error:
            if error.status not in NO_SUCH_ENDPOINT:
                raise
        return await self._ask("GET", "/get_model_info", base_url)

    get_model_info = model_info

    async def context_length(self, base_url: str | None = None) -> int | None:
        """Most tokens of prompt and answer together, from `/v1/models`; None where that does not tell (routers).

        A number is remembered; None and failures are not. Callers that ask at the same time share one request.

        Args:
            base_url: Which one of several is asked; None for the first that gets requests.

        Raises:
            SGLangClientError: No answer, as for `generate`.
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
        """The server's own tokens of `text`, no special ones added.

        None where they are not to be had, whatever the status: routers have no `/tokenize`, and a server started with
        `--skip-tokenizer-init` answers 500 for good, which must not be retried for minutes.

        Args:
            text: What is tokenised.
            base_url: Which one of several is asked; None for any.

        Raises:
            SGLangClientError: No answer, as for `generate`.
        """
        content = {"prompt": text, "add_special_tokens": False}
        try:
            answer = await self._ask("POST", "/tokenize", base_url, content, retry_refusals=False)
        except SGLangHTTPError:
            return None
        tokens = answer.get("tokens")
        if not isinstance(tokens, list):
            raise SGLangDecodingError(f"{base_url or self.base_url}/tokenize answered without `tokens` (a list)")
        return tokens

    async def abort(self, rid: str) -> None:
        """Abort a request on its server; takes at most 2 s and never raises. `generate` then returns what there is.

        Args:
            rid: What was given to `generate` as `rid` in this event loop, or the exact id of an attempt.
        """
        await (await self._sessions.current()).abort(rid, self.base_urls)

    async def close(self) -> None:
        """Abort what is in flight and close the connections of all event loops. A later request opens new ones.

        The calls in flight return what the servers had sampled, or raise if that does not come within `abort_grace`.
        """
        self.closings += 1
        await self._sessions.close()
        if isinstance(self._transport, Transport):
            await self._transport.aclose()

    async def __aenter__(self) -> SGLangClient:
        """The client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()

    def __repr__(self) -> str:
        """The class and the addresses."""
        where = self.base_url if len(self.base_urls) == 1 else list(self.base_urls)
        return f"SGLangClient(base_url={where!r})"

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

    async def _ask(
        self,
        method: str,
        path: str,
        base_url: str | None = None,
        content: Mapping[str, Any] | None = None,
        *,
        retry_refusals: bool = True,
    ) -> dict[str, Any]:
        """Ask an endpoint for a JSON object, with the retries of `generate`; error statuses may be left out of them."""
        only = None if base_url is None else self._servers[base_url]
        request = Request(await self._sessions.current(), self._servers, Cancellation(), method, path, only)
        encoded = None if content is None else orjson.dumps(content)
        policy = replace(self.retry_policy, retry_refusals=retry_refusals)
        return await retrying(partial(ask_once, request, encoded, INFO_TIMEOUT_S), request, policy)


async def shared(client: SGLangClient, key: Any, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work` once for all in this event loop who ask under `key` while it runs.

    A caller that is cancelled does not end it for the others.

    Args:
        client: Whom it asks.
        key: What is asked for, hashable.
        work: Asks for it.
    """
    return await (await client._sessions.current()).shared(key, work)


def normalize_base_url(base_url: str) -> str:
    """The address of a server without white space around it or slashes at its end.

    Raises:
        ValueError: It is not an http(s) address of a server's root; says what to write instead.
    """
    if not isinstance(base_url, str):
        raise ValueError(f"base_url must be a string such as 'http://127.0.0.1:30000', got {base_url!r}")
    address = base_url.strip()
    if not address.lower().startswith(("http://", "https://")):
        guess = address.split("://")[-1] or "127.0.0.1:30000"
        raise ValueError(f"base_url {base_url!r} has no http:// or https:// in front: write 'http://{guess}'")
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ValueError(f"base_url {base_url!r} is not a URL: {error}") from error
    if not url.host:
        raise ValueError(f"base_url {base_url!r} names no host: write e.g. 'http://127.0.0.1:30000'")
    address = address.rstrip("/")
    if url.query or url.fragment:
        raise ValueError(f"base_url {base_url!r} has a query or a fragment: leave it out")
    for suffix in sorted(ENDPOINT_SUFFIXES, key=len, reverse=True):
        if url.path.rstrip("/").endswith(suffix):
            raise ValueError(
                f"base_url {base_url!r} ends in {suffix}: drop that and write {address[: -len(suffix)]!r} "
                "(SGLang's own /generate is used, not its OpenAI endpoints)"
            )
    return address


def normalize_base_urls(base_url: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses of one server or of several, as `normalize_base_url` gives them.

    Raises:
        ValueError: There is none, one is twice there, or one is not an http(s) address of a server's root.
    """
    if isinstance(base_url, str) or not isinstance(base_url, Sequence):
        return (normalize_base_url(base_url),)
    addresses = tuple(normalize_base_url(one) for one in base_url)
    if not addresses:
        raise ValueError("base_url is an empty list: name at least one server")
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    if twice:
        raise ValueError(f"base_url names {', '.join(twice)} more than once: name each server once")
    return addresses


def checked_routing_key(key: Any) -> str | None:
    """The routing key itself, if it can be sent as a header; None stays None.

    Raises:
        ValueError: It is not a string of printable ASCII characters.
    """
    if key is None or (isinstance(key, str) and key.strip() == key != "" and key.isascii() and key.isprintable()):
        return key
    raise ValueError(f"routing_key must be a string of printable ASCII characters or None, got {key!r}")


def checked_number(name: str, value: Any, *, at_least: float | None = None, above: float | None = None) -> Any:
    """The value itself, if it is a finite number within its bounds.

    Raises:
        ValueError: It is not; names the setting.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if number and (at_least is None or value >= at_least) and (above is None or value > above):
        return value
    bound = f"at least {at_least:g}" if at_least is not None else f"above {above:g}"
    raise ValueError(f"{name} must be a number {bound}, got {value!r}")


def slime_client_arguments(args: Any, **overrides: Any) -> dict[str, Any]:
    """The arguments of `SGLangClient` that suit slime's: as many connections as its engines serve at a time.

    slime's names: `sglang_router_ip`, `sglang_router_port`, `sglang_server_concurrency`, `rollout_num_engines`,
    `rollout_num_gpus`, `rollout_num_gpus_per_engine`; the last three may be None or 0 with external engines.

    Args:
        args: slime's (or miles') parsed arguments.
        **overrides: Arguments of `SGLangClient`, which win.

    Raises:
        ValueError: There is no router address, neither in `args` nor as `base_url`.
    """
    per_engine = getattr(args, "sglang_server_concurrency", None) or SLIME_CONCURRENCY_PER_ENGINE
    gpus = getattr(args, "rollout_num_gpus", None) or 0
    gpus_per_engine = getattr(args, "rollout_num_gpus_per_engine", None) or 1
    engines = getattr(args, "rollout_num_engines", None) or gpus // gpus_per_engine
    arguments = {
        "max_connections": int(per_engine) * max(1, int(engines)),
        "timeout": None,
        "max_retries": 60,
        "retry_delay": 1.0,
        **overrides,
    }
    if "base_url" not in arguments:
        ip, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
        if not ip or not port:
            raise ValueError(
                f"sglang_router_ip is {ip!r} and sglang_router_port is {port!r}: slime sets them when it starts its "
                "router; before that, give --sglang-router-ip and --sglang-router-port, or pass base_url="
            )
        host = f"[{ip}]" if ":" in ip and not ip.startswith("[") else ip
        arguments["base_url"] = f"http://{host}:{port}"
    return arguments
