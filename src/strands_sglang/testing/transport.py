"""How an httpx client in the same process reaches a scripted server: no sockets, no threads, no loop of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from .server import ScriptedSGLang


class ScriptedTransport(httpx.AsyncBaseTransport):
    """Calls the server's handler in the task that sends the request.

    Cancelling that task cancels the handler, as closing the connection would; the request's read timeout counts until
    the whole response is there. One transport may be used from several event loops, and closing it does nothing.
    """

    def __init__(self, server: ScriptedSGLang) -> None:
        """Reach this server."""
        self._server = server

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request.

        Raises:
            httpx.ReadTimeout: The request has a read timeout and it has passed.
            httpx.ReadError: The script breaks the connection.
        """
        content = await request.aread()
        handler = self._server.handle(request.method, request.url.path, dict(request.headers), content)
        timeout = request.extensions.get("timeout", {}).get("read")
        try:
            answer = await (handler if timeout is None else asyncio.wait_for(handler, timeout))
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise httpx.ReadTimeout(f"no response after {timeout} s", request=request) from error
        if answer.broken_after is not None:
            raise httpx.ReadError(f"connection broken after {answer.broken_after} bytes", request=request)
        return httpx.Response(answer.status, headers=dict(answer.headers), content=answer.content, request=request)
