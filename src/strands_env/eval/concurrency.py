"""How many episodes run at a time: a fixed number, or as many as the servers have room for.

With `"auto"`, the servers are asked for their loads once a second, and the number of episodes becomes

    the episodes that run now + the requests that the servers have room for - the requests too many in their queues

once three reports in a row agree that it should rise, or that it should fall. It falls as episodes end: none is
stopped. A server that stops reporting leaves the number as it is.

Episodes are counted rather than requests, because a server's own queue is the best place for a request to wait: there
it is next in line the moment a slot is free. An episode between two model calls holds no slot, so the servers then
report room, and more episodes start.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Literal, TypeVar

from strands_sglang import ServerLoad, SGLangClient

from ..core import Action
from ..core.supervision import maybe_await
from .episodes import EnvironmentFactory

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT = 10
"""Episodes at a time by default. "auto" begins there, and stays there if no server reports a load."""

CACHE_BOUND = 0.9
"""Share of the key-value cache in use from which a server has no room: running requests still grow."""

REPORTS = 3
"""Number of reports in a row that must agree. A burst of requests passes in less."""

POLL_S = 1.0
"""Seconds between two reports."""
MAX_POLL_S = 10.0
"""Most seconds between two attempts while no server reports; they double up to it."""


def room(load: ServerLoad) -> int:
    """Return how many more requests a server has room for; below 0, how many of those in its queue are too many.

    A queue of up to an eighth of the running requests is neither: it fills a place the moment one is free. Room is at
    most as much as runs, since young requests hold less of the cache than they will, and starting episodes nothing yet.
    """
    queue = max(1, load.running // 8)
    if load.waiting:
        return min(queue - load.waiting, 0)
    more: float = max(1, load.running)
    if load.max_running is not None:
        more = min(more, load.max_running + queue - load.running)
    if load.cache_usage > 0:
        more = min(more, load.running * (CACHE_BOUND - load.cache_usage) / load.cache_usage)
    return max(int(more), 0)


class Concurrency:
    """The number of episodes at a time of one evaluation.

    Attributes:
        limit: Maximum number of episodes at a time, now; at least 1.
        most: Highest value of `limit`.
        running: Number of episodes that run now.
    """

    def __init__(self, limit: int, client: SGLangClient | None = None) -> None:
        """Start at a limit.

        Args:
            limit: Maximum number of episodes at a time.
            client: Client whose servers the limit follows, up to its `max_connections`; None for a fixed limit.
        """
        self.most = limit if client is None else client.max_connections
        self.limit = min(limit, self.most)
        self.running = 0
        self._client = client
        self._rooms: deque[int] = deque(maxlen=REPORTS)
        self._raised = asyncio.Event()
        self._is_exhausted = False

    @classmethod
    async def from_limit(
        cls, limit: int | Literal["auto"], env_factory: EnvironmentFactory, actions: Sequence[Action]
    ) -> Concurrency:
        """Return the concurrency that an evaluation asks for.

        Args:
            limit: Number of episodes, or "auto" to follow the servers of the environment's model.
            env_factory: Function that returns the environment of a sample.
            actions: Actions of the samples. With "auto", the first one's environment is made to find the servers; it
                is not run.
        """
        if limit != "auto" or not actions:
            return cls(DEFAULT if limit == "auto" else limit)
        reason = "its model has no SGLang client"
        try:
            environment = await maybe_await(env_factory(actions[0].model_copy(deep=True)))
            model = await maybe_await(environment.model_factory())
            client = getattr(model, "client", None)
            if isinstance(client, SGLangClient):
                return cls(DEFAULT, client)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"
        logger.warning("concurrency=<%d>, reason=<%s> | the environment names no servers to follow", DEFAULT, reason)
        return cls(DEFAULT)

    async def admit(self, samples: Iterator[T]) -> AsyncIterator[T]:
        """Yield samples to one of `most` workers, each when fewer episodes run than may.

        Args:
            samples: What is left to run; all workers share the iterator.
        """
        while not self._is_exhausted:
            if self.running >= self.limit:
                await self._raised.wait()
                continue
            for sample in samples:
                self.running += 1
                yield sample
                self.running -= 1
                break
            else:
                self._is_exhausted = True
                self._wake()

    async def follow(self) -> None:
        """Adjust the limit to the loads that the servers report, until canceled."""
        interval, has_reported, has_warned = POLL_S, False, self._client is None
        while self._client is not None:
            loads = await self._client.loads()
            has_reported = has_reported or bool(loads)
            self.adjust(loads)
            interval = POLL_S if loads else min(2 * interval, MAX_POLL_S)
            if not has_reported and not has_warned:
                has_warned = True
                logger.warning("concurrency=<%d> | no server reports its load at /v1/loads", self.limit)
            await asyncio.sleep(interval)

    def adjust(self, loads: Sequence[ServerLoad]) -> None:
        """Set the limit from one report of each server; it stays if there is none."""
        if not loads:
            return
        self._rooms.append(sum(map(room, loads)))
        least, most = min(self._rooms), max(self._rooms)
        if len(self._rooms) < REPORTS:
            return
        if least > 0 and self.running >= self.limit:
            change = least
        elif most < 0 and self.running <= self.limit:  # else the last change has yet to show
            change = most
        else:
            return
        self._rooms.clear()
        self.limit = max(1, min(self.running + change, self.most))
        logger.debug("concurrency=<%d>, running=<%d>, loads=<%s> | adjusted", self.limit, self.running, loads)
        self._wake()

    def _wake(self) -> None:
        """Let the workers that wait look again."""
        self._raised.set()
        self._raised = asyncio.Event()
