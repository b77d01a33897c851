"""How a scripted server is reached: in process by a transport of httpx, or on a port for other processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import httpx
from anyio.from_thread import start_blocking_portal

if TYPE_CHECKING:
    from aiohttp import web

    from .server import ScriptedSGLang

_MAX_BODY_BYTES = 1 << 30
_SHUTDOWN_S = 0.2  # how long open requests may still end by themselves


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


class ServedOnPort:
    """Serves while its `with` or `async with` block runs; the block's value is the base URL.

    The server has a thread and an event loop of its own, which are gone when the block ends; requests that are still
    open then are cut off.
    """

    def __init__(self, server: ScriptedSGLang, port: int) -> None:
        """Prepare; nothing is opened yet."""
        self._server = server
        self._port = port
        self._stack = ExitStack()

    def __enter__(self) -> str:
        """Open the port.

        Returns:
            The base URL, `http://127.0.0.1:PORT`.

        Raises:
            OSError: The port is taken.
        """
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            base_url = stack.enter_context(portal.wrap_async_context_manager(self._serving()))
            self._stack = stack.pop_all()
        return base_url

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the port and end the thread."""
        self._stack.close()

    async def __aenter__(self) -> str:
        """As `__enter__`, without blocking the event loop."""
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """As `__exit__`, without blocking the event loop."""
        await asyncio.to_thread(self.__exit__, kind, error, traceback)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[str]:
        from aiohttp import web

        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._answer)
        # Cancelling the handler when its client disconnects makes a port behave like the in-process transport.
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", self._port).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

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
