"""Fake servers for tests of `SGLangClient`: in process behind an httpx transport, and raw ones on a socket."""

import asyncio
import json
from collections import namedtuple

import httpx

from strands_sglang.client.client import SGLangClient

BASE_URL = "http://sglang.test:30000"


def generation(output_ids=None, *, rid="r", finish="stop"):
    """A `/generate` response as SGLang 0.5.23 sends it."""
    ids = [7, 2] if output_ids is None else output_ids
    reason = {"type": finish, "matched": 2} if finish == "stop" else {"type": finish}
    meta_info = {
        "id": rid,
        "finish_reason": reason,
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": "default",
    }
    return {"text": "hi", "output_ids": ids, "meta_info": meta_info}


class FakeServer:
    """A server in process, with the responses of `/generate` in order (the last one forever) and a log of requests."""

    def __init__(self, *answers, paths=None):
        self.answers = list(answers) or [httpx.Response(200, json=generation())]
        self.paths = {"/abort_request": httpx.Response(200), **(paths or {})}
        self.asked = []
        self.arrived = asyncio.Event()

    async def __call__(self, request):
        body = json.loads(request.content) if request.content else None
        self.asked.append((request.url.path, body))
        if request.url.path != "/generate":
            return self.paths.get(request.url.path, httpx.Response(404, json={"detail": "Not Found"}))
        self.arrived.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else await answer(body)

    def bodies(self, path="/generate"):
        return [body for asked, body in self.asked if asked == path]

    def client(self, **settings):
        settings = {"max_retries": 5, "retry_delay": 0.0, "abort_grace": 0.1, **settings}
        return SGLangClient(BASE_URL, transport=httpx.MockTransport(self), **settings)


async def never(_):
    await asyncio.Event().wait()
    raise AssertionError


class AbortableServer(FakeServer):
    """Samples until it is aborted, and then responds with the ids sampled so far."""

    def __init__(self, sampled=(7, 8, 9), *, finish="abort", **kwargs):
        super().__init__(self.sample, **kwargs)
        self.aborted = asyncio.Event()
        self._sampled, self._finish = list(sampled), finish

    async def __call__(self, request):
        if request.url.path == "/abort_request":
            self.aborted.set()
        return await super().__call__(request)

    async def sample(self, body):
        await self.aborted.wait()
        return httpx.Response(200, json=generation(self._sampled, rid=body["rid"], finish=self._finish))


class Network:
    """Several servers by host name; None is one that refuses connections."""

    def __init__(self, **servers):
        self.servers = servers
        self.requests = []

    async def __call__(self, request):
        self.requests.append(request)
        server = self.servers[request.url.host]
        if server is None:
            raise httpx.ConnectError("refused")
        return await server(request)

    def client(self, *hosts, **settings):
        settings = {"max_retries": 5, "retry_delay": 0.0, "abort_grace": 0.1, **settings}
        urls = [f"http://{host}" for host in hosts or self.servers]
        return SGLangClient(urls, transport=httpx.MockTransport(self), **settings)

    def hosts(self, path="/generate"):
        """Host names of the requests, in order."""
        return [request.url.host for request in self.requests if request.url.path == path]


OK = httpx.Response(200, json=generation())


# A received request; `writer` is the `asyncio.StreamWriter` of its connection.
RawRequest = namedtuple("RawRequest", ["path", "body", "writer"])


class RawServer:
    """A server that misbehaves: it reads requests on a free port, and leaves the response's bytes to `respond`.

    An asynchronous context manager.
    """

    def __init__(self, respond):
        self.requests = []
        self._respond = respond
        self._handlers = set()

    def bodies(self, path):
        return [request.body for request in self.requests if request.path == path]

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers)

    async def _serve(self, reader, writer):
        handler = asyncio.current_task()
        self._handlers.add(handler)
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.lower().split("\r\n")
                length = sum(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
                body = await reader.readexactly(length)
                request = RawRequest(head.split(" ")[1], json.loads(body) if body else None, writer)
                self.requests.append(request)
                await self._respond(request)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # Python 3.11 reports handlers that end as cancelled
        finally:
            writer.close()


def http_bytes(body, *, status="200 OK", missing=0):
    """Return a JSON response without the last `missing` bytes of its body."""
    encoded = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(encoded)}\r\n\r\n".encode()
    return head + encoded[: len(encoded) - missing]
