"""How a server is told to stop a request, also one behind a router.

SGLang's own `/abort_request` takes the exact id of a request. Routers (sglang-router 0.3.2, smg 1.13.0) do not forward
it and answer 404, so the workers that they name under `/workers` are told directly, all of them: which one has the
request is not known before it answers. Promises: an abort never raises; a storm of them opens a few connections only.
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
"""How long telling a server to abort may take."""
WORKERS_KEPT_S = 5.0
"""How long a router's list of workers is used again."""
ABORTS_AT_ONCE = 32
"""Most aborts on their way to one address at a time."""

WORKER_LISTS = ("/workers", "/list_workers")
"""Where routers name their workers; the second one is that of older ones."""


class Aborter:
    """Tells servers to stop requests, over the connections of one event loop."""

    def __init__(self, session: LoopSession) -> None:
        """Send over `session`."""
        self._session = session
        self._workers: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._gates: dict[str, asyncio.Semaphore] = {}

    async def abort(self, base_url: str, rid: str, *, again: bool = False) -> bool:
        """Tell the server, or the workers of the router, at `base_url` to stop a request.

        Args:
            base_url: Where the request went.
            rid: Its exact id.
            again: It was told before, without effect: a router is asked for its workers anew.

        Returns:
            Whether anyone has heard. A server that does not know the id (any more) has.
        """
        for timeout in (ABORT_TIMEOUT_S, ABORT_TIMEOUT_S / 2):
            try:
                with anyio.move_on_after(timeout):
                    return await self._tell_all_of(base_url, rid, again)
                break
            except asyncio.CancelledError:
                continue  # only a loop that is shutting down cancels this task, and the server still has to hear of it
        return False

    async def _tell_all_of(self, base_url: str, rid: str, again: bool) -> bool:
        if self._known_workers(base_url) is None:
            status = await self._tell(base_url, rid)
            if status is None or status not in NO_SUCH_ENDPOINT:
                return status is not None and status < 300
            again = False  # nothing is known yet that could be wrong
        workers = (None if again else self._known_workers(base_url)) or await self._workers_of(base_url)
        heard = await self._tell_all(workers, rid)
        if not all(heard.values()):  # the list may be an old one
            others = set(await self._workers_of(base_url)) - set(workers)
            heard.update(await self._tell_all(tuple(others), rid))
        logger.debug("base_url=<%s>, rid=<%s>, workers=<%s> | aborted behind a router", base_url, rid, heard)
        return any(heard.values())

    async def _tell_all(self, workers: tuple[str, ...], rid: str) -> dict[str, bool]:
        statuses = await asyncio.gather(*(self._tell(worker, rid) for worker in workers))
        return {worker: status is not None and status < 300 for worker, status in zip(workers, statuses, strict=True)}

    async def _tell(self, base_url: str, rid: str) -> int | None:
        """The status that the server answered, None if it did not."""
        url, content = f"{base_url}/abort_request", orjson.dumps({"rid": rid})
        try:
            async with self._gates.setdefault(base_url, asyncio.Semaphore(ABORTS_AT_ONCE)):
                response = await self._session.request("POST", url, content, timeout=ABORT_TIMEOUT_S)
        except Exception as error:
            logger.debug("base_url=<%s>, rid=<%s>, error=<%r> | abort did not get through", base_url, rid, error)
            return None
        logger.debug("base_url=<%s>, rid=<%s>, status=<%d> | abort sent", base_url, rid, response.status_code)
        return response.status_code

    def _known_workers(self, base_url: str) -> tuple[str, ...] | None:
        until, workers = self._workers.get(base_url, (0.0, ()))
        return workers if workers and time.monotonic() < until else None

    async def _workers_of(self, base_url: str) -> tuple[str, ...]:
        """Ask a router for its workers; those who ask at the same time share the answer."""
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
                self._workers[base_url] = (time.monotonic() + WORKERS_KEPT_S, workers)
                return workers
        return ()


def worker_urls(listed: Any) -> tuple[str, ...]:
    """The addresses in a router's list of workers: `{"workers": [{"url"}, ...]}`, `{"urls": [...]}` or a plain list.

    With data parallelism a router names a worker once per rank, as `http://host:port@rank`; only HTTP counts.

    Args:
        listed: The decoded JSON.
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
