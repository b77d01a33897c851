"""Servers of tests without SGLang: scripted ones in short, several in one network, and a raw one for broken HTTP."""

import asyncio
import json
from collections import namedtuple
from itertools import chain, repeat

import httpx
import respx

from strands_sglang import SGLangClient
from strands_sglang.testing import ScriptedAnswer, ScriptedResponse, ScriptedSGLang
from support.agents import advance, build_chatml_tokenizer

SETTINGS = {"max_retries": 5, "retry_delay": 0.0, "abort_grace": 0.1}  # of clients, unless a test says otherwise
OK = ScriptedAnswer(token_ids=[7, 2], finish_reason="length")
PARTIAL = ScriptedAnswer(token_ids=[7, 8], finish_reason="abort")


def generation(output_ids=(7, 2), *, rid="r", finish="stop"):
    """Return a short body of a `/generate` response, for servers that are not scripted."""
    return {"text": "hi", "output_ids": list(output_ids), "meta_info": {"id": rid, "finish_reason": {"type": finish}}}


# === Scripted servers ===


def scripted(*answers, **overrides):
    """Return a server that gives the answers in order and the last one forever; `overrides` as its attribute."""
    *first, last = answers or [OK]
    server = ScriptedSGLang(build_chatml_tokenizer(), chain(first, repeat(last)))
    server.overrides = overrides
    return server


def as_json(body, status=200):
    return ScriptedResponse(status, json.dumps(body).encode())


def until_aborted(answer, *, after=0.0):
    """Return an answer that is given when its request is aborted; `after` seconds seem to pass once it has arrived."""

    async def sample(_):
        if after:
            advance(after)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return answer

    return sample


def hung(*, after=0.0):
    """Return a server that never answers, and ignores aborts; `after` is that of `until_aborted`."""
    return scripted(until_aborted(OK, after=after), **{"/abort_request": ScriptedResponse()})


def client_to(server, **settings):
    """Return a client that waits for the answers to its aborts, but not long if the server ignores them."""
    if "/abort_request" not in server.overrides:
        settings = {"abort_grace": 10.0, **settings}
    return server.client(**{**SETTINGS, **settings})


def aborts(server):
    """Return the ids in the abort requests that a server received."""
    return [json.loads(content)["rid"] for path, content in server.calls if path == "/abort_request"]


async def arrival(server, count=1):
    """Wait until a server has received that many requests."""
    while len(server.requests) < count:
        await asyncio.sleep(0)


# === Several servers ===


def plug(network, **servers):
    """Put servers at their host names; None refuses connections."""
    for host, server in servers.items():
        reach = httpx.ConnectError if server is None else server.transport().handle_async_request
        network.route(host=host).mock(side_effect=reach)


def network_of(**servers):
    """Return a respx router to servers by host name, which also logs the answered requests."""
    network = respx.Router(assert_all_called=False)
    plug(network, **servers)
    return network


def client_in(network, *hosts, **settings):
    transport = httpx.MockTransport(network.async_handler)
    return SGLangClient([f"http://{host}" for host in hosts], transport=transport, **{**SETTINGS, **settings})


def hosts_of(network, path="/generate"):
    """Return the host names of the requests to a path, in order."""
    return [call.request.url.host for call in network.calls if call.request.url.path == path]


# === Broken HTTP ===


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
