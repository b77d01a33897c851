"""Aborting requests on a server, directly or behind a router.

SGLang's `/abort_request` takes the exact id of a request. Routers do not forward it. The abort then goes directly to
all their workers, because the one with the request is unknown until it answers. An abort never raises, and a storm of
aborts opens only a few connections.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import anyio
import orjson

from ..protocol.wire import NO_SUCH_ENDPOINT

if TYPE_CHECKING:
    from .connections import LoopSession

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 2.0
"""Time limit of one abort."""
MAX_CONCURRENT_ABORTS = 32
"""Maximum number of concurrent aborts per address."""


class Aborter:
    """Aborts requests over the connections of one event loop."""

    def __init__(self, session: LoopSession) -> None:
        """Use the connections of `session`."""
        self._session = session
        self._gates: dict[str, asyncio.Semaphore] = {}

    async def abort(self, base_url: str, rid: str, *, again: bool = False) -> bool:
        """Abort a request on the server at `base_url`, or on the workers of the router there.

        Args:
            base_url: Address that the request was sent to.
            rid: Exact id of the request.
            again: Whether an earlier abort had no effect, so that a router's list of workers is fetched again.

        Returns:
            Whether any server acknowledged the abort, even one that does not know the id (any more).
        """
        for timeout in (ABORT_TIMEOUT_S, ABORT_TIMEOUT_S / 2):
            try:
                with anyio.move_on_after(timeout):
                    return await self._abort_at(base_url, rid, again)
                break
            except asyncio.CancelledError:
                continue  # only a loop that is shutting down cancels this task, and the abort must still be sent
        return False

    async def _abort_at(self, base_url: str, rid: str, again: bool) -> bool:
        routed = self._session.workers
        if routed.known(base_url) is None:
            status = await self._send(base_url, rid)
            if status is None or status not in NO_SUCH_ENDPOINT:
                return status is not None and status < 300
            again = False  # no list is cached that could be stale
        workers = (None if again else routed.known(base_url)) or await routed.ask(base_url)
        acknowledged = await self._send_to_all(workers, rid)
        if not all(acknowledged.values()):  # the list may be stale
            others = set(await routed.ask(base_url)) - set(workers)
            acknowledged.update(await self._send_to_all(tuple(others), rid))
        logger.debug("base_url=<%s>, rid=<%s>, workers=<%s> | aborted behind a router", base_url, rid, acknowledged)
        return any(acknowledged.values())

    async def _send_to_all(self, workers: tuple[str, ...], rid: str) -> dict[str, bool]:
        statuses = await asyncio.gather(*(self._send(worker, rid) for worker in workers))
        return {worker: status is not None and status < 300 for worker, status in zip(workers, statuses, strict=True)}

    async def _send(self, base_url: str, rid: str) -> int | None:
        """Return the status of the server's response; None if there was none."""
        url, content = f"{base_url}/abort_request", orjson.dumps({"rid": rid})
        try:
            async with self._gates.setdefault(base_url, asyncio.Semaphore(MAX_CONCURRENT_ABORTS)):
                response = await self._session.request("POST", url, content, timeout=ABORT_TIMEOUT_S)
        except Exception as error:
            logger.debug("base_url=<%s>, rid=<%s>, error=<%r> | abort failed", base_url, rid, error)
            return None
        logger.debug("base_url=<%s>, rid=<%s>, status=<%d> | abort sent", base_url, rid, response.status_code)
        return response.status_code
