"""ScriptedSGLang: an SGLang server whose model is a script.

Bodies have the keys and types of SGLang 0.5.23; a contract test compares them with a real server. Equal requests give
equal tokens and logprobs. Every request is logged, and its cost is linear in its ids. Several event loops and threads
can use one server, in process over an httpx transport, or from other processes over a port.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import uuid
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from itertools import repeat
from types import TracebackType
from typing import Any

import httpx
import orjson
from anyio.from_thread import start_blocking_portal

from ..client.cancellation import consume
from ..client.client import SGLangClient
from . import bodies
from .prefix_cache import PrefixCache
from .sampling import (
    Answer,
    AnswerFunction,
    LogprobFunction,
    Sampler,
    ScriptedAnswer,
    ScriptedExperts,
    ScriptedFault,
    ScriptedRefusal,
    ScriptedRequest,
    ScriptedResponse,
    ScriptExhaustedError,
    scripted_logprob,
)
from .validation import CheckedRequest, RefusedError, check_generate, read_json_object, refusal

_NO_HEADERS: Mapping[str, str] = {}
_JSON_HEADERS: Mapping[str, str] = {"content-type": "application/json"}  # shared, because responses are kept


class Flight:
    """One request in flight.

    A request whose client disconnected counts as running until it is aborted, because a real server continues to sample
    it. A test thus detects a client that fails to abort.
    """

    def __init__(self, rid: str, weight_version: str, prompt_tokens: int) -> None:
        """Start with the server's current weights."""
        self.rid = rid
        self.weight_version = weight_version
        self.prompt_tokens = prompt_tokens
        self.turn: Future[Answer] | None = None  # of a request that had to wait: when it was its turn to run
        self.aborted = False
        self._lock = threading.Lock()
        self._task: asyncio.Future[Answer] | None = None

    async def wait(self, answer: Awaitable[Answer]) -> Answer:
        """Wait for an answer that is being computed.

        Returns:
            The answer. For an aborted request, what the computation returned when it was cancelled, or an empty answer.

        Raises:
            Exception: The computation raised it.
            asyncio.CancelledError: The caller was cancelled, and the computation with it.
        """
        task = asyncio.ensure_future(answer)
        with self._lock:
            self._task = task
            if self.aborted:
                task.cancel()
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            task.add_done_callback(consume)
            raise
        if not task.cancelled():
            return task.result()
        if not self.aborted:
            raise RuntimeError("the answer function cancelled itself")
        return ""

    def abort(self) -> None:
        """End the request; thread-safe."""
        with self._lock:
            self.aborted = True
            if self._task is not None and not self._task.get_loop().is_closed():
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)


_Handler = Callable[[Mapping[str, str], bytes], Awaitable[ScriptedResponse]]


class ScriptedSGLang:
    r"""A server with SGLang's HTTP interface that answers from a script: real tokens, no model.

    It needs no start: `client()` makes an `SGLangClient` in process, and `with server.serve() as base_url:` opens a
    port for other processes. All requests are checked as SGLang 0.5.23 checks them, and logged.

    Attributes:
        tokenizer: Tokenizer of the model.
        context_length: Context of the model, in tokens.
        vocab_size: Number of token ids.
        model_path: Model that the server reports.
        weight_version: Version of the weights in responses; may be set at any time.
        requests: Accepted `/generate` requests, in order of arrival.
        responses: Response to each of `requests`; None while it is open, or if its client disconnected.
        refusals: Rejected `/generate` requests; they use up no answer.
        aborted: Ids of requests that were in flight when they were aborted, in order.
        calls: Path and body of every HTTP request, in order of arrival. The bodies of `/generate` are empty here: see
            `requests` and `refusals`.
        overrides: Responses of endpoints in place of SGLang's, by path, such as `{"/health": ScriptedResponse(503)}`;
            may be changed at any time. An endpoint that is overridden has no effect.

    Examples:
        ```python
        CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 25, "b": 17}}\n</tool_call>'

        server = ScriptedSGLang(tokenizer, [CALL, "25 * 17 is 425."])
        model = SGLangModel(tokenizer=tokenizer, client=server.client())
        agent = Agent(model=model, tools=[multiply], callback_handler=None)

        assert "425" in str(agent("What is 25 * 17?"))
        first, second = server.requests
        assert "multiply" in first.text  # the tool is in the prompt
        ```
    """

    def __init__(
        self,
        tokenizer: Any,
        answers: AnswerFunction | Iterable[Answer | AnswerFunction],
        *,
        context_length: int = 32768,
        vocab_size: int | None = None,
        stop_token_ids: Collection[int] | None = None,
        model_path: str = "scripted",
        weight_version: str = "default",
        logprob: LogprobFunction = scripted_logprob,
        experts: ScriptedExperts | None = None,
        max_running_requests: int = 4096,
    ) -> None:
        """Set up the server.

        Args:
            tokenizer: Tokenizer of the model, with `encode`, `decode`, `eos_token_id` and `len`.
            answers: Answers in order, or one function for all requests. An answer is a text, a `ScriptedAnswer`, a
                `ScriptedFault`, a `ScriptedResponse`, or a function that computes one from the request, sync or async.
                An async function is cancelled when its request is aborted, and may then return the part of the answer
                sampled so far. Requests with `max_new_tokens` 0 use up no answer.
            context_length: Context of the model, in tokens.
            vocab_size: Number of token ids; None for `len(tokenizer)`.
            stop_token_ids: Stop tokens of the model; answers end with the first. None for the tokenizer's eos token.
            model_path: Model that `/model_info` reports.
            weight_version: Initial version of the weights.
            logprob: Function that returns the logprob of a token from its position in prompt plus answer and its id.
                The result is rounded to float32.
            experts: Experts of the model, for requests with `return_routed_experts`. None returns no experts, like a
                dense model or a server without `--enable-return-routed-experts`.
            max_running_requests: Maximum number of requests that run at a time; further ones wait in order.

        Raises:
            TypeError: `answers` is a single answer.
            ValueError: There is no stop token.
        """
        if isinstance(answers, (str, ScriptedAnswer, ScriptedFault, ScriptedResponse)):
            raise TypeError("answers is a single answer; pass a list of answers or a function")
        if stop_token_ids is None:
            eos = tokenizer.eos_token_id
            stop_token_ids = () if eos is None else (eos,)
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        self.model_path = model_path
        self.weight_version = weight_version
        self.requests: list[ScriptedRequest] = []
        self.responses: list[ScriptedResponse | None] = []
        self.refusals: list[ScriptedRefusal] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[str, bytes]] = []
        self.overrides: dict[str, ScriptedResponse] = {}
        self._experts = experts
        self._entries = repeat(answers) if callable(answers) else iter(answers)
        self._given = 0
        self._sampler = Sampler(tokenizer, stop_token_ids, logprob, self.vocab_size)
        self._cache = PrefixCache()
        self._flights: dict[str, Flight] = {}
        self._queue: OrderedDict[str, Flight] = OrderedDict()  # those of `_flights` that wait
        self._max_running = max_running_requests
        self._lock = threading.Lock()
        self._routes = self._make_routes()

    @property
    def running(self) -> list[str]:
        """Ids of requests in flight, including waiting ones, and those whose client disconnected without an abort."""
        return list(self._flights)

    def transport(self) -> httpx.MockTransport:
        """Return an httpx transport that reaches this server without a socket, from any event loop.

        Canceling the task that sends a request cancels the handler, as closing the connection would. The request's read
        timeout covers the whole response. Closing the transport does nothing.
        """
        return httpx.MockTransport(self._respond)

    async def _respond(self, request: httpx.Request) -> httpx.Response:
        """Answer a request of the transport.

        Raises:
            httpx.ReadTimeout: The request's read timeout is over.
            httpx.ReadError: The script breaks the connection.
        """
        handler = self.handle(request.method, request.url.path, dict(request.headers), request.content)
        timeout = request.extensions.get("timeout", {}).get("read")
        try:
            answer = await (handler if timeout is None else asyncio.wait_for(handler, timeout))
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise httpx.ReadTimeout(f"no response after {timeout} s", request=request) from error
        if answer.broken_after is not None:
            raise httpx.ReadError(f"connection broken after {answer.broken_after} bytes", request=request)
        return httpx.Response(answer.status, headers=dict(answer.headers), content=answer.content, request=request)

    def client(self, **kwargs: Any) -> SGLangClient:
        """Return an `SGLangClient` for this server, in process. Nothing is retried unless `max_retries` is set.

        Args:
            **kwargs: Arguments of [`SGLangClient`][strands_sglang.SGLangClient].
        """
        return SGLangClient("http://scripted", **{"transport": self.transport(), "max_retries": 0, **kwargs})

    def serve(self, port: int = 0) -> ServedOnPort:
        """Serve on 127.0.0.1 during a `with` or `async with` block, whose value is the base URL.

        Args:
            port: Port to open; 0 for a free one.
        """
        return ServedOnPort(self, port)

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str] = _NO_HEADERS, content: bytes = b""
    ) -> ScriptedResponse:
        """Answer one HTTP request.

        Args:
            method: HTTP method, in uppercase.
            path: Path without query.
            headers: Headers, with lowercase names.
            content: Body.
        """
        self.calls.append((path, b"" if path == "/generate" else content))
        override = self.overrides.get(path)
        if isinstance(override, ScriptedResponse):
            return override
        if override is not None:
            message = f"scripted server: the override of {path} is {override!r}, not a ScriptedResponse"
            return _json({"error": {"message": message}}, 501)
        route = self._routes.get(path)
        if route is None:
            return _json({"detail": "Not Found"}, 404)
        methods, handler = route
        if method not in methods:
            return _json({"detail": "Method Not Allowed"}, 405, {"allow": ", ".join(methods)})
        try:
            return await handler(headers, content)
        except RefusedError as refused:
            return _json(refused.body, refused.status)

    def _make_routes(self) -> dict[str, tuple[tuple[str, ...], _Handler]]:
        get, post = ("GET",), ("POST",)

        def body(make: Callable[[], Any]) -> _Handler:
            async def handler(headers: Mapping[str, str], content: bytes) -> ScriptedResponse:
                return _json(make())

            return handler

        async def alive(headers: Mapping[str, str], content: bytes) -> ScriptedResponse:
            return ScriptedResponse()

        model_info = body(lambda: bodies.model_info(self.model_path, self.weight_version))
        server_info = body(lambda: bodies.server_info(self.model_path, self.weight_version, self.context_length))
        return {
            "/": (get, body(lambda: "SGLang is running")),
            "/generate": (("POST", "PUT"), self._generate),
            "/health": (get, alive),
            "/health_generate": (get, alive),
            "/ready": (get, alive),
            "/ping": (get, alive),
            "/model_info": (get, model_info),
            "/get_model_info": (get, model_info),
            "/server_info": (get, server_info),
            "/get_server_info": (get, server_info),
            "/v1/models": (get, body(lambda: bodies.models(self.model_path, self.context_length))),
            "/v1/loads": (get, body(self._loads)),
            "/tokenize": (post, self._tokenize),
            "/abort_request": (post, self._abort_request),
            "/flush_cache": (("GET", "POST"), self._flush_cache),
        }

    async def _generate(self, headers: Mapping[str, str], content: bytes) -> ScriptedResponse:
        started = time.perf_counter()
        try:
            body = read_json_object(headers, content)
            checked = check_generate(
                body, context_length=self.context_length, vocab_size=self.vocab_size, encode=self._sampler.encode
            )
            request, flight, entry = self._accept(checked, headers)
        except RefusedError as refused:
            self.refusals.append(ScriptedRefusal(refused.status, refused.message, content))
            raise
        # A prompt is found in the cache once it is computed: requests that arrive together compute it each.
        asyncio.get_running_loop().call_soon(self._store, request.packed_ids, checked.cache_key)
        # If the caller is cancelled here, its client disconnected: the flight stays until it is aborted.
        try:
            if flight.turn is not None:
                await flight.wait(asyncio.wrap_future(flight.turn))
                if flight.turn.cancelled():
                    latency_s = time.perf_counter() - started
                    body = bodies.aborted_in_queue(checked, request.rid, flight.weight_version, latency_s)
                    return self._close(request, flight, _json(body))
            if isinstance(entry, Exception):
                raise entry
            answer = entry(request) if callable(entry) else entry
            if inspect.isawaitable(answer):
                answer = await flight.wait(answer)
            if isinstance(answer, (ScriptedAnswer, ScriptedFault)) and answer.latency_s:
                answer = await flight.wait(asyncio.sleep(answer.latency_s, answer))
            if isinstance(answer, ScriptedResponse):
                return self._close(request, flight, answer)
            if isinstance(answer, ScriptedFault):
                return self._close(request, flight, _fault(answer, request))
            sampled = self._sampler.sample(answer, checked, aborted=flight.aborted)
        except Exception as error:
            message = f"scripted server, request {request.index}: {type(error).__name__}: {error}"
            # 501 is not retried by clients: a mistake in a test must show at once.
            return self._close(request, flight, _json({"error": {"message": message}}, 501))
        # Everything but the last sampled token, which no forward pass has seen, is now in the cache.
        computed = request.packed_ids + array("i", sampled.output_ids[:-1]).tobytes()
        self._store(computed, checked.cache_key)
        routed_experts = (
            self._experts.encoded(checked.input_ids + sampled.output_ids, checked.routed_experts_start_len)
            if self._experts is not None and checked.asks_for("return_routed_experts")
            else None
        )
        response = bodies.generation(
            checked,
            sampled,
            rid=request.rid,
            cached_tokens=request.cached_tokens,
            # A weight update that aborted the request came after its last token.
            weight_version=flight.weight_version if flight.aborted else self.weight_version,
            latency_s=time.perf_counter() - started,
            routed_experts=routed_experts,
        )
        return self._close(request, flight, _json(response))

    def _store(self, packed: bytes, cache_key: object) -> None:
        with self._lock:
            self._cache.insert(packed, cache_key)

    def update_weights(self, version: str) -> list[str]:
        """Update the weights: abort the requests in flight, empty the prefix cache, and report the new version.

        Args:
            version: Version of the new weights.

        Returns:
            The ids of the aborted requests.
        """
        return self._abort(None, version)

    def _abort(self, rids: Collection[str | None] | None, version: str | None = None) -> list[str]:
        """Abort the given requests, or all for None, and set the version of the weights."""
        with self._lock:
            flights = [flight for rid, flight in self._flights.items() if rids is None or rid in rids]
            for flight in flights:
                self._remove(flight)
            self.aborted += [flight.rid for flight in flights]
            if version is not None:
                self.weight_version = version
                self._cache.clear()
        for flight in flights:
            flight.abort()
        return [flight.rid for flight in flights]

    def _accept(
        self, checked: CheckedRequest, headers: Mapping[str, str]
    ) -> tuple[ScriptedRequest, Flight, Answer | AnswerFunction | ScriptExhaustedError]:
        packed = array("i", checked.input_ids).tobytes()
        rid = uuid.uuid4().hex if checked.body.get("rid") is None else checked.body["rid"]
        with self._lock:
            if rid in self._flights:
                raise refusal(f"Duplicate request ID detected: {rid}")
            index = len(self.requests)
            # A server computes at least the last prompt token, and every token whose logprob is requested.
            reusable = len(checked.input_ids) - 1
            if checked.logprob_start_len >= 0:
                reusable = min(reusable, checked.logprob_start_len)
            request = ScriptedRequest(
                index=index,
                rid=rid,
                sampling_params=checked.sampling_params,
                body={key: value for key, value in checked.body.items() if key != "input_ids"},
                headers=dict(headers),
                cached_tokens=min(self._cache.find(packed, checked.cache_key), reusable),
                packed_ids=packed,
                decode=self._sampler.decode,
            )
            exhausted = ScriptExhaustedError(
                f"the script has no answer for request {index} (counted from 0): all {self._given} answers are used up"
            )
            # A request without output samples nothing: it computes its prompt.
            entry = next(self._entries, exhausted) if checked.max_new_tokens else ""
            self._given += bool(checked.max_new_tokens) and entry is not exhausted
            self.requests.append(request)
            self.responses.append(None)
            flight = self._flights[rid] = Flight(rid, self.weight_version, len(checked.input_ids))
            if len(self._flights) - len(self._queue) > self._max_running:
                self._queue[rid] = flight
                flight.turn = Future()
        return request, flight, entry

    def _close(self, request: ScriptedRequest, flight: Flight, answer: ScriptedResponse) -> ScriptedResponse:
        self.responses[request.index] = answer
        with self._lock:
            if self._flights.get(flight.rid) is flight:
                self._remove(flight)
        return answer

    def _remove(self, flight: Flight) -> None:
        """Remove a flight that has ended, and start the next ones; the lock is held."""
        del self._flights[flight.rid]
        self._queue.pop(flight.rid, None)
        while self._queue and len(self._flights) - len(self._queue) < self._max_running:
            _, following = self._queue.popitem(last=False)
            # The turn of a client that disconnected is cancelled; its request runs until it is aborted.
            if following.turn is not None and following.turn.set_running_or_notify_cancel():
                following.turn.set_result("")

    def _loads(self) -> dict[str, Any]:
        with self._lock:
            in_flight = sum(flight.prompt_tokens for flight in self._flights.values())
            queued = sum(flight.prompt_tokens for flight in self._queue.values())
            return bodies.loads(
                len(self._flights) - len(self._queue), len(self._queue), in_flight - queued, queued, self._max_running
            )

    async def _abort_request(self, headers: Mapping[str, str], content: bytes) -> ScriptedResponse:
        body = read_json_object(headers, content)
        self._abort(None if body.get("abort_all") else [body.get("rid")])
        return ScriptedResponse()

    async def _flush_cache(self, headers: Mapping[str, str], content: bytes) -> ScriptedResponse:
        with self._lock:
            if self._flights:
                return ScriptedResponse(400, bodies.FLUSH_FAILED.encode())
            self._cache.clear()
        return ScriptedResponse(200, bodies.FLUSHED.encode())

    async def _tokenize(self, headers: Mapping[str, str], content: bytes) -> ScriptedResponse:
        body = read_json_object(headers, content)
        prompt = body.get("prompt")
        texts = prompt if isinstance(prompt, list) else [prompt]
        if not all(isinstance(text, str) for text in texts):
            raise refusal("scripted server: only a `prompt` of text is emulated", 501)
        add_special = body.get("add_special_tokens", True)
        tokens = [self._sampler.tokenizer.encode(text, add_special_tokens=add_special) for text in texts]
        counts = [len(ids) for ids in tokens]
        single = isinstance(prompt, str)
        return _json(
            {
                "tokens": tokens[0] if single else tokens,
                "count": counts[0] if single else counts,
                "max_model_len": self.context_length,
            }
        )


def _json(body: Any, status: int = 200, headers: Mapping[str, str] = _NO_HEADERS) -> ScriptedResponse:
    return ScriptedResponse(status, orjson.dumps(body), {**_JSON_HEADERS, **headers} if headers else _JSON_HEADERS)


def _fault(fault: ScriptedFault, request: ScriptedRequest) -> ScriptedResponse:
    if fault.kind == "drop":
        return ScriptedResponse(broken_after=0)
    if fault.kind == "half":
        body = _json({"output_ids": request.input_ids, "meta_info": {"id": request.rid}})
        return replace(body, broken_after=max(len(body.content) // 2, 1))
    if fault.kind == "garbage":
        return ScriptedResponse(200, fault.message.encode(), _JSON_HEADERS)
    body = _json({"error": {"message": fault.message}}, fault.status)
    return replace(body, headers={**body.headers, **fault.headers})


_MAX_BODY_BYTES = 1 << 30
_SHUTDOWN_S = 0.2  # grace period for open requests


class ServedOnPort:
    """Context manager, sync or async, that serves a scripted server on a port; its value is the base URL.

    The server runs in its own thread and event loop, which end with the block. Requests still open then are cut off.
    """

    def __init__(self, server: ScriptedSGLang, port: int) -> None:
        """Initialize without opening the port."""
        self._server = server
        self._port = port
        self._stack = ExitStack()

    def __enter__(self) -> str:
        """Open the port.

        Returns:
            The base URL, `http://127.0.0.1:PORT`.

        Raises:
            OSError: The port is in use.
        """
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            base_url = stack.enter_context(portal.wrap_async_context_manager(self._serving()))
            self._stack = stack.pop_all()
        return base_url

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the port and stop the thread."""
        self._stack.close()

    async def __aenter__(self) -> str:
        """Open the port without blocking the event loop; see `__enter__`."""
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the port without blocking the event loop; see `__exit__`."""
        await asyncio.to_thread(self.__exit__, kind, error, traceback)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[str]:
        from aiohttp import web

        async def respond(request: web.Request) -> web.StreamResponse:
            headers = {name.lower(): value for name, value in request.headers.items()}
            answer = await self._server.handle(request.method, request.path, headers, await request.read())
            if answer.broken_after is None:
                return web.Response(status=answer.status, headers=dict(answer.headers), body=answer.content)
            response = web.StreamResponse(status=answer.status, headers=dict(answer.headers))
            if answer.broken_after:
                response.content_length = len(answer.content)
                await response.prepare(request)
                await response.write(answer.content[: answer.broken_after])
            if request.transport is not None:
                request.transport.abort() if not answer.broken_after else request.transport.close()
            return response

        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", respond)
        # Canceling the handler when its client disconnects makes a port behave like the in-process transport.
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", self._port).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
