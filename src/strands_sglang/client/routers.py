"""The workers behind a router.

Routers (sglang-router 0.3.2, smg 1.13.0) forward `/generate`, but neither `/abort_request` nor `/v1/loads`: they return
404. Such requests go directly to the workers that the router lists.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx
import orjson

if TYPE_CHECKING:
    from .connections import LoopSession

logger = logging.getLogger(__name__)

LIST_TIMEOUT_S = 2.0
"""Time limit of a request for the list."""
WORKERS_CACHED_S = 5.0
"""How long a router's list of workers is cached."""

WORKER_LISTS = ("/workers", "/list_workers")
"""Paths where routers list their workers; older ones use the second."""


class Workers:
    """The lists of routers, over the connections of one event loop."""

    def __init__(self, session: LoopSession) -> None:
        """Use the connections of `session`."""
        self._session = session
        self._lists: dict[str, tuple[float, tuple[str, ...]]] = {}

    def known(self, base_url: str) -> tuple[str, ...] | None:
        """Return the cached list of the router at `base_url`; None if there is none, or it is too old."""
        until, workers = self._lists.get(base_url, (0.0, ()))
        return workers if workers and time.monotonic() < until else None

    async def ask(self, base_url: str) -> tuple[str, ...]:
        """Ask a router for its workers; concurrent callers share the response.

        Returns:
            Their addresses; empty if the server is not a router, or does not answer.
        """
        return await self._session.shared(("workers", base_url), lambda: self._ask(base_url))

    async def _ask(self, base_url: str) -> tuple[str, ...]:
        for path in WORKER_LISTS:
            try:
                response = await self._session.request("GET", f"{base_url}{path}", None, timeout=LIST_TIMEOUT_S)
                workers = worker_urls(orjson.loads(response.content)) if response.is_success else ()
            except Exception as error:
                logger.debug("base_url=<%s>, error=<%r> | could not ask the router for its workers", base_url, error)
                return ()
            if workers:
                workers = self._session.keep_credentials(workers)  # addresses are in logs and reports
                self._lists[base_url] = (time.monotonic() + WORKERS_CACHED_S, workers)
                return workers
        return ()


def worker_urls(listed: Any) -> tuple[str, ...]:
    """Return the addresses in a router's list: `{"workers": [{"url"}, ...]}`, `{"urls": [...]}` or a plain list.

    With data parallelism a router lists a worker once per rank, as `http://host:port@rank`. Workers without HTTP are
    left out, and so are invalid addresses.

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
            with suppress(httpx.InvalidURL):
                if httpx.URL(url).scheme in ("http", "https"):
                    urls[url] = None
    return tuple(urls)
