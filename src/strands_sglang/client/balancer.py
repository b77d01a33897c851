"""Which server a request goes to: the least busy one, the same one for all requests under a routing key.

A conversation that comes back to the server that has its prefix in the cache saves the prefill of everything said so
far. Promises: a server that takes no connections gets no requests while another one does, is asked for its health at
growing intervals, and gets requests again once it answers; with a single server nothing of this happens. A server that
is down gives a handful of log lines, not one per request.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

from .retries import Failure, FailureKind

logger = logging.getLogger(__name__)

MAX_KEYS = 100_000
"""Routing keys that are remembered; beyond it those that were not used for the longest time are forgotten."""

DROPS_UNTIL_OUT = 3
"""A server that breaks so many connections in a row counts as one that takes none."""

FIRST_PROBE_S = 1.0
MAX_PROBE_S = 60.0

FIRST_LOG_INTERVAL_S = 1.0
MAX_LOG_INTERVAL_S = 60.0


class Server:
    """One address, what is known about it, and the log lines about its outages.

    Attributes:
        base_url: Without a slash at the end.
        answered: Whether it has ever answered anything over HTTP.
        usable: Whether it has ever given a generation.
        in_flight: Generations on their way, over all event loops.
        keys: Routing keys that lead to it.
        is_out: Whether it takes no connections and gets no requests while others do.
        context_length: As it has told; None if it has not.
    """

    def __init__(self, base_url: str) -> None:
        """Start with no history."""
        self.base_url = base_url
        self.answered = self.usable = self.is_out = False
        self.in_flight = self.keys = self.drops = 0
        self.context_length: int | None = None
        self.probe_at = 0.0
        self.probe_interval = FIRST_PROBE_S
        self._lock = threading.Lock()
        self._failing_since: float | None = None
        self._failures = 0
        self._last_failure = self._next_line = -math.inf
        self._interval = FIRST_LOG_INTERVAL_S

    def log_failure(self, failure: Failure) -> None:
        """Count a failure that will be retried; write a line about it unless one was written a short while ago."""
        now = time.monotonic()
        with self._lock:
            if now - self._last_failure > MAX_LOG_INTERVAL_S:
                self._interval, self._next_line = FIRST_LOG_INTERVAL_S, now
            if self._failing_since is None:
                self._failing_since, self._failures = now, 0
            self._failures += 1
            self._last_failure = now
            if now < self._next_line:
                return
            self._next_line = now + self._interval
            self._interval = min(2 * self._interval, MAX_LOG_INTERVAL_S)
            failures, seconds = self._failures, now - self._failing_since
        logger.warning(
            "base_url=<%s>, failed_attempts=<%d>, seconds=<%.0f>, error=<%s> | server does not answer, retrying",
            self.base_url,
            failures,
            seconds,
            failure.error,
        )

    def log_answer(self) -> None:
        """End an outage, if there was one, with a line that says so."""
        if self._failing_since is None:
            return
        with self._lock:
            since, self._failing_since = self._failing_since, None
        if since is not None:
            logger.info("base_url=<%s>, seconds=<%.0f> | server answers again", self.base_url, time.monotonic() - since)


class Servers:
    """The servers of one client. Thread-safe."""

    def __init__(self, base_urls: Iterable[str]) -> None:
        """Track the given servers.

        Args:
            base_urls: At least one address, each once.
        """
        self.all = tuple(Server(base_url) for base_url in base_urls)
        self._by_url = {server.base_url: server for server in self.all}
        self._by_key: OrderedDict[str, Server] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = itertools.count()

    @property
    def answered(self) -> bool:
        """Whether any of them has ever answered anything over HTTP."""
        return any(server.answered for server in self.all)

    @property
    def usable(self) -> bool:
        """Whether any of them has ever given a generation."""
        return any(server.usable for server in self.all)

    def __getitem__(self, base_url: str) -> Server:
        """The server at an address.

        Raises:
            ValueError: It is none of these.
        """
        server = self._by_url.get(base_url)
        if server is None:
            raise ValueError(f"{base_url!r} is none of this client's servers: {', '.join(self._by_url)}")
        return server

    def up(self) -> tuple[Server, ...]:
        """Those that get requests: not the ones that are out, unless all are."""
        return tuple(server for server in self.all if not server.is_out) or self.all

    def choose(self, key: str | None = None, *, rather_not: Server | None = None) -> Server:
        """The server for the next request.

        Args:
            key: Requests under one key go to one server, as long as that takes connections.
            rather_not: Where the request has just failed: another one is tried, and the key stays where it is.
        """
        if len(self.all) == 1:
            return self.all[0]
        with self._lock:
            known = self._by_key.get(key) if key is not None else None
            if known is not None and key is not None:
                self._by_key.move_to_end(key)
                if not known.is_out and known is not rather_not:
                    return known
            up = [server for server in self.all if not server.is_out]
            if not up:  # whoever is next to be looked at: the request itself shows whether it is back
                return min(self.all, key=lambda server: server.probe_at)
            turn = next(self._turn)  # of equals, not always the same one
            order = [up[(turn + i) % len(up)] for i in range(len(up))]
            chosen = min(order, key=lambda server: (server is rather_not, server.in_flight, server.keys))
            if key is not None and (known is None or known.is_out):
                if known is not None:
                    known.keys -= 1
                self._by_key[key] = chosen
                chosen.keys += 1
                if len(self._by_key) > MAX_KEYS:
                    _, forgotten = self._by_key.popitem(last=False)
                    forgotten.keys -= 1
            return chosen

    def count_in_flight(self, server: Server, change: int) -> None:
        """Count a generation that is sent, 1, or has come back, however, -1."""
        with self._lock:
            server.in_flight += change

    def note_answer(self, server: Server) -> None:
        """Take note of an answer, whatever it says: the server is there."""
        if server.drops or server.is_out:
            with self._lock:
                server.drops, server.is_out, server.probe_interval = 0, False, FIRST_PROBE_S
        server.log_answer()

    def note_failure(self, server: Server, kind: FailureKind) -> None:
        """Take note of a failed request: without connections the server is out from now on."""
        if len(self.all) == 1 or kind not in (FailureKind.UNREACHABLE, FailureKind.DROPPED):
            return
        with self._lock:
            server.drops += 1
            if kind is FailureKind.DROPPED and server.drops < DROPS_UNTIL_OUT and not server.is_out:
                return
            now = time.monotonic()
            if server.is_out and now < server.probe_at:
                return  # a request that was on its way to it already
            server.probe_interval = min(2 * server.probe_interval, MAX_PROBE_S) if server.is_out else FIRST_PROBE_S
            server.probe_at = now + server.probe_interval
            server.is_out = True
        logger.debug("base_url=<%s>, probe_in_s=<%.0f> | server is left out", server.base_url, server.probe_interval)

    def due(self) -> tuple[Server, ...]:
        """Servers that are out and are to be asked for their health now; each is named to one caller per interval."""
        if not any(server.is_out for server in self.all):
            return ()
        now = time.monotonic()
        with self._lock:
            due = tuple(server for server in self.all if server.is_out and now >= server.probe_at)
            for server in due:
                server.probe_interval = min(2 * server.probe_interval, MAX_PROBE_S)
                server.probe_at = now + server.probe_interval
        return due
