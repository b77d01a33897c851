"""What servers report about their load, from SGLang's `/v1/loads`.

The endpoint needs no launch argument and costs the server 2 ms; its numbers are those of the latest batch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from ..protocol.wire import NO_SUCH_ENDPOINT

if TYPE_CHECKING:
    from .connections import LoopSession

logger = logging.getLogger(__name__)

LOADS_PATH = "/v1/loads?include=core"
LOADS_TIMEOUT_S = 2.0
"""Time limit of one report."""


@dataclass(frozen=True)
class ServerLoad:
    """The load of one server, or of one data-parallel rank.

    Attributes:
        base_url: Address of the server; behind a router, of the worker.
        running: Number of requests in the running batch.
        waiting: Number of requests in the queue.
        max_running: Maximum number of requests in the running batch; None if not reported.
        cache_usage: Share of the key-value cache that running requests hold, 0 to 1. Cached prefixes that can be
            evicted do not count.
    """

    base_url: str
    running: int
    waiting: int
    max_running: int | None
    cache_usage: float


async def ask_loads(session: LoopSession, base_url: str) -> tuple[ServerLoad, ...]:
    """Ask a server, or all workers of a router, for their loads; empty if they report none within seconds."""
    workers = session.workers.known(base_url)
    if workers is None:
        loads = await _ask(session, base_url)
        if loads is not None:
            return loads
        workers = await session.workers.ask(base_url)
    reports = await asyncio.gather(*(_ask(session, worker) for worker in workers))
    return tuple(itertools.chain.from_iterable(report or () for report in reports))


async def _ask(session: LoopSession, base_url: str) -> tuple[ServerLoad, ...] | None:
    """Return the loads of one server; None if it has no such endpoint, as routers do not."""
    try:
        response = await session.request("GET", f"{base_url}{LOADS_PATH}", None, timeout=LOADS_TIMEOUT_S)
        if response.status_code in NO_SUCH_ENDPOINT:
            return None
        return tuple(read_loads(base_url, orjson.loads(response.content) if response.is_success else None))
    except Exception as error:
        logger.debug("base_url=<%s>, error=<%r> | the server did not report its load", base_url, error)
        return ()


def read_loads(base_url: str, body: Any) -> Iterator[ServerLoad]:
    """Yield the loads in the body of a response; entries that lack a number are left out.

    Args:
        base_url: Address of the server.
        body: Decoded JSON of the response.
    """
    entries = body.get("loads") if isinstance(body, Mapping) else None
    for entry in entries if isinstance(entries, list) else ():
        match entry:
            case {"num_running_reqs": int(running), "num_waiting_reqs": int(waiting), "token_usage": float() | int()}:
                most, usage = entry.get("max_running_requests"), float(entry["token_usage"])
                if running >= 0 and waiting >= 0 and math.isfinite(usage):
                    limit = most if isinstance(most, int) and most > 0 else None
                    yield ServerLoad(base_url, running, waiting, limit, min(max(usage, 0.0), 1.0))
