"""A socket server whose answers are written byte by byte, for what a well-behaved HTTP server never does."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple


class RawRequest(NamedTuple):
    """A request as it came in."""

    path: str
    body: Any
    writer: asyncio.StreamWriter


Respond = Callable[[RawRequest], Awaitable[None]]


class RawServer:
    """Reads HTTP requests on a free port and leaves the answering to `respond`; an asynchronous context manager."""

    def __init__(self, respond: Respond) -> None:
        self.requests: list[RawRequest] = []
        self._respond = respond
        self._server: asyncio.Server | None = None
        self._handlers: set[asyncio.Task[None]] = set()
        self.base_url = ""

    def bodies(self, path: str) -> list[Any]:
        return [request.body for request in self.requests if request.path == path]

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert handler is not None
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


def http_bytes(body: Any, *, status: str = "200 OK", missing: int = 0) -> bytes:
    """A JSON answer; `missing` bytes of its body are left out."""
    encoded = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(encoded)}\r\n\r\n".encode()
    return head + encoded[: len(encoded) - missing]


def free_port() -> int:
    """A port on which nobody listens at present."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
