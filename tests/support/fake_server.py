"""A server in process, behind an httpx transport, for what `SGLangClient` does with its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from strands_sglang.client import SGLangClient
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


OK = httpx.Response(200, json=generation())
