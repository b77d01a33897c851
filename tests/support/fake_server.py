"""A server in process, behind an httpx transport, for what `SGLangClient` does with its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from strands_sglang.client.client import SGLangClient
from support.generations import generation

BASE_URL = "http://sglang.test:30000"

Answer = httpx.Response | Exception | Callable[[dict[str, Any]], Awaitable[httpx.Response]]


class FakeServer:
    """A server in process: what `/generate` answers, one after the other (the last for ever), and what it was asked."""

    def __init__(self, *answers: Answer, paths: dict[str, httpx.Response] | None = None) -> None:
        self.answers = list(answers) or [httpx.Response(200, json=generation())]
        self.paths = {"/abort_request": httpx.Response(200), **(paths or {})}
        self.asked: list[tuple[str, Any]] = []
        self.arrived = asyncio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.asked.append((request.url.path, body))
        if request.url.path != "/generate":
            return self.paths.get(request.url.path, httpx.Response(404, json={"detail": "Not Found"}))
        self.arrived.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else await answer(body)

    def bodies(self, path: str = "/generate") -> list[Any]:
        return [body for asked, body in self.asked if asked == path]

    def client(self, **settings: Any) -> SGLangClient:
        settings = {"max_retries": 5, "retry_delay": 0.0, "abort_grace": 0.1, **settings}
        return SGLangClient(BASE_URL, transport=httpx.MockTransport(self), **settings)


async def never(_: dict[str, Any]) -> httpx.Response:
    await asyncio.Event().wait()
    raise AssertionError


class AbortableServer(FakeServer):
    """Samples until it is aborted, and then answers with the ids that it had until then."""

    def __init__(self, sampled: Sequence[int] = (7, 8, 9), *, finish: str = "abort", **kwargs: Any) -> None:
        super().__init__(self.sample, **kwargs)
        self.aborted = asyncio.Event()
        self._sampled, self._finish = list(sampled), finish

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/abort_request":
            self.aborted.set()
        return await super().__call__(request)

    async def sample(self, body: dict[str, Any]) -> httpx.Response:
        await self.aborted.wait()
        return httpx.Response(200, json=generation(self._sampled, rid=body["rid"], finish=self._finish))


class Network:
    """Several servers by host name; None stands for one that refuses connections."""

    def __init__(self, **servers: FakeServer | None) -> None:
        self.servers = servers
        self.requests: list[httpx.Request] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        server = self.servers[request.url.host]
        if server is None:
            raise httpx.ConnectError("refused")
        return await server(request)

    def client(self, *hosts: str, **settings: Any) -> SGLangClient:
        settings = {"max_retries": 5, "retry_delay": 0.0, "abort_grace": 0.1, **settings}
        urls = [f"http://{host}" for host in hosts or self.servers]
        return SGLangClient(urls, transport=httpx.MockTransport(self), **settings)

    def hosts(self, path: str = "/generate") -> list[str]:
        """Who was asked, in order."""
        return [request.url.host for request in self.requests if request.url.path == path]


OK = httpx.Response(200, json=generation())
