"""A scripted server on a port of 127.0.0.1, for agents and environments that run in another process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

    from .server import ScriptedSGLang

_MAX_BODY_BYTES = 1 << 30
_SHUTDOWN_S = 0.2  # how long open requests may still end by themselves


class ServedOnPort:
    """Serves while its `with` or `async with` block runs; the block's value is the base URL.

    The server has a thread and an event loop of its own, which are gone when the block ends; requests that are still
    open then are cut off.
    """

    def __init__(self, server: ScriptedSGLang, port: int) -> None:
        """Prepare; nothing is opened yet."""
        self._server = server
        self._port = port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> str:
        """Open the port.

        Returns:
            The base URL, `http://127.0.0.1:PORT`.

        Raises:
            OSError: The port is taken.
        """
        started: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="scripted-sglang", daemon=True)
        self._thread.start()
        try:
            return f"http://127.0.0.1:{started.result()}"
        except BaseException:
            self._thread.join()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the port and end the thread."""
        if self._loop is not None and self._stop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    async def __aenter__(self) -> str:
        """As `__enter__`, without blocking the event loop."""
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """As `__exit__`, without blocking the event loop."""
        await asyncio.to_thread(self.__exit__, kind, error, traceback)

    def _run(self, started: concurrent.futures.Future[int]) -> None:
        try:
            asyncio.run(self._serve(started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(self, started: concurrent.futures.Future[int]) -> None:
        from aiohttp import web

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._answer)
        # Cancelling the handler when its client disconnects makes a port behave like the in-process transport.
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", self._port).start()
            started.set_result(runner.addresses[0][1])
            await self._stop.wait()
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
