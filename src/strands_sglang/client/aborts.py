"""Aborting requests on a server, directly or behind a router.

SGLang's `/abort_request` takes the exact id of a request. Routers (sglang-router 0.3.2, smg 1.13.0) do not forward it
and return 404. The abort then goes directly to all workers that they list under `/workers`, because the one with the
request is unknown until it answers. An abort never raises, and a storm of aborts opens only a few connections.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio
import orjson

from ..protocol.wire import NO_SUCH_ENDPOINT

if TYPE_CHECKING:
    from .connections import LoopSession

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 2.0
"""Time limit of one abort."""
WORKERS_CACHED_S = 5.0
"""How long a router's list of workers is cached."""
MAX_CONCURRENT_ABORTS = 32
"""Maximum number of concurrent aborts per address."""

WORKER_LISTS = ("/workers", "/list_workers")
"""Paths where routers list their workers; older ones use the second."""


class Aborter:
    """Aborts requests over the connections of one event loop."""

    def __init__(self, session: LoopSession) -> None:
        """Use the connections of `session`."""
        self._session = session
        self._workers: dict[str, tuple[float, tuple[str, ...]]] = {}
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
        if self._known_workers(base_url) is None:
            status = await self._send(base_url, rid)
            if status is None or status not in NO_SUCH_ENDPOINT:
                return status is not None and status < 300
            again = False  # no list is cached that could be stale
        workers = (None if again else self._known_workers(base_url)) or await self._workers_of(base_url)
        acknowledged = await self._send_to_all(workers, rid)
        if not all(acknowledged.values()):  # the list may be stale
            others = set(await self._workers_of(base_url)) - set(workers)
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

    def _known_workers(self, base_url: str) -> tuple[str, ...] | None:
        until, workers = self._workers.get(base_url, (0.0, ()))
        return workers if workers and time.monotonic() < until else None

    async def _workers_of(self, base_url: str) -> tuple[str, ...]:
        """Ask a router for its workers; concurrent callers share the response."""
        return await self._session.shared(("workers", base_url), lambda: self._ask_for_workers(base_url))

    async def _ask_for_workers(self, base_url: str) -> tuple[str, ...]:
        for path in WORKER_LISTS:
            try:
                response = await self._session.request("GET", f"{base_url}{path}", None, timeout=ABORT_TIMEOUT_S)
                workers = worker_urls(orjson.loads(response.content)) if response.is_success else ()
            except Exception as error:
                logger.debug("base_url=<%s>, error=<%r> | could not ask the router for its workers", base_url, error)
                return ()
            if workers:
                self._workers[base_url] = (time.monotonic() + WORKERS_CACHED_S, workers)
                return workers
        return ()


def worker_urls(listed: Any) -> tuple[str, ...]:
    """Return the addresses in a router's list: `{"workers": [{"url"}, ...]}`, `{"urls": [...]}` or a plain list.

    With data parallelism a router lists a worker once per rank, as `http://host:port@rank`. Workers without HTTP are
    left out.

    Args:
        listed: Decoded JSON of the response.
    """
    entries = (listed.get("workers") or listed.get("urls")) if isinstance(listed, Mapping) else listed
    urls: dict[str, None] = {}
    for entry in entries if isinstance(entries, list) else ():
        url = entry.get("url") if isinstance(entry, Mapping) else entry
        if isinstance(url, str) and url:
            url = re.sub(r"@\d+$", "", url).rstrip("/")
            url = url if "://" in url else f"http://{url}"
            if url.startswith(("http://", "https://")):
                urls[url] = None
    return tuple(urls)
