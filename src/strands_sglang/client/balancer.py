"""Load balancing: a request goes to the least busy server, and requests with one routing key to the same server.

A conversation that returns to the server with its prefix in the cache skips the prefill of that prefix. A server that
accepts no connections is out of rotation while another one accepts them: it is probed at growing intervals, and gets
requests again once it answers. None of this applies to a single server. An outage logs a few lines, not one per
request.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..shown import without_credentials
from .retries import MAX_DELAY_S, Failure, FailureKind

logger = logging.getLogger(__name__)

MAX_KEYS = 100_000
"""Number of routing keys to remember; the least recently used ones are dropped beyond it."""

DROPS_UNTIL_OUT = 3
"""Consecutive broken connections after which a server counts as one that accepts none."""

FIRST_PROBE_S = 1.0
MAX_PROBE_S = 60.0

FIRST_LOG_INTERVAL_S = 1.0
MAX_LOG_INTERVAL_S = 60.0

SILENT_KINDS = frozenset({FailureKind.UNREACHABLE, FailureKind.DROPPED, FailureKind.TIMED_OUT})
"""Failures of a server that does not answer; one that refuses a request does."""

_known: weakref.WeakSet[Server] = weakref.WeakSet()
_known_lock = threading.Lock()  # clients are made in any thread


@dataclass(frozen=True)
class Outage:
    """A server that does not answer now.

    Attributes:
        base_url: Its address, without credentials.
        seconds: For how long.
        waiting: Number of calls that wait for it.
        seconds_left: In about how many seconds the first of them gives up, if nothing changes; infinite if unknown.
    """

    base_url: str
    seconds: float
    waiting: int = 1
    seconds_left: float = math.inf


def outages() -> list[Outage]:
    """Return the servers of this process that do not answer now, the longest outage first."""
    with _known_lock:
        servers = list(_known)
    found = [outage for server in servers if (outage := server.outage) is not None]
    longest: dict[str, Outage] = {}  # of each address; several clients may have it
    for outage in sorted(found, key=lambda outage: -outage.seconds):
        longest.setdefault(outage.base_url, outage)
    return list(longest.values())


class Server:
    """One address, its state, and the log lines about its outages.

    Attributes:
        base_url: Address without a trailing slash.
        answered: Whether it has ever answered over HTTP.
        usable: Whether it has ever returned a generation.
        in_flight: Number of generations in flight, over all event loops.
        keys: Number of routing keys assigned to it.
        drops: Number of connections that broke in a row.
        is_out: Whether it accepts no connections and is out of rotation.
        context_length: Maximum number of tokens that it reported; None if unknown.
        reserves_last_token: Whether it rejects requests that fill its context to the last token, as older SGLang does.
        takes_images: Whether its model takes images; None if unknown.
        tokenizers: Whether each tokenizer that was compared with its own is proven to be the same.
        weight_version: Version of the weights that it last reported; None if unknown.
        cache_epoch: Number of times that its prefix cache may have been emptied.
        probe_at: Time of the next probe.
        probe_interval: Seconds between probes.
    """

    def __init__(self, base_url: str) -> None:
        """Start with no history."""
        self.base_url = base_url
        self.answered = self.usable = self.is_out = False
        self.in_flight = self.keys = self.drops = 0
        self.context_length: int | None = None
        self.reserves_last_token = False
        self.takes_images: bool | None = None
        self.tokenizers: dict[Any, bool] = {}
        self.weight_version: str | None = None
        self.cache_epoch = 0
        self.probe_at = 0.0
        self.probe_interval = FIRST_PROBE_S
        self._lock = threading.Lock()
        self._failing_since: float | None = None
        self._is_told = self._is_silent = False
        self._failures = 0
        self._calls: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()
        self._last_failure = self._next_line = -math.inf
        self._interval = FIRST_LOG_INTERVAL_S
        with _known_lock:
            _known.add(self)

    def note_generation(self, meta_info: Mapping[str, Any]) -> None:
        """Record a generation. New weights empty the prefix cache, and servers abort requests before they load them."""
        version, known = meta_info.get("weight_version"), self.weight_version
        self.usable, self.weight_version = True, version
        if meta_info["finish_reason"]["type"] == "abort" or known not in (None, version):
            self.cache_epoch += 1

    @property
    def outage(self) -> Outage | None:
        """The outage that lasts now; None if the server answers, or is not asked."""
        now = time.monotonic()
        with self._lock:
            if self._failing_since is None or not self._is_silent or now - self._last_failure > 2 * MAX_DELAY_S:
                return None
            left = max(0.0, min(self._calls.values(), default=math.inf) - now)
            waiting = max(1, len(self._calls))  # at least a probe
            return Outage(without_credentials(self.base_url), now - self._failing_since, waiting, left)

    def log_failure(self, failure: Failure, call: object = None, gives_up_at: float = math.inf) -> None:
        """Count a failure that will be retried; log it unless a line was logged a short while ago.

        Args:
            failure: The failure.
            call: What lives as long as its call does; None for a probe.
            gives_up_at: When the call gives up.
        """
        now = time.monotonic()
        with self._lock:
            if now - self._last_failure > MAX_LOG_INTERVAL_S:
                self._interval, self._next_line = FIRST_LOG_INTERVAL_S, now
            if self._failing_since is None:
                self._failing_since, self._failures = now, 0
                self._calls.clear()
            self._failures += 1
            if call is not None:
                self._calls[call] = gives_up_at
            self._is_silent = failure.kind in SILENT_KINDS
            self._last_failure = now
            if now < self._next_line:
                return
            self._is_told = True
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

    def forget(self, call: object) -> None:
        """Note that a call is over, so that it no longer waits."""
        with self._lock:
            self._calls.pop(call, None)

    def log_answer(self) -> None:
        """Log the end of an outage, if there was one and a line told of it."""
        with self._lock:
            since, self._failing_since = self._failing_since, None
            was_told, self._is_told = self._is_told, False
        if since is not None and was_told:
            logger.info("base_url=<%s>, seconds=<%.0f> | server answers again", self.base_url, time.monotonic() - since)


class Servers:
    """The servers of one client. Thread-safe."""

    def __init__(self, base_urls: Iterable[str]) -> None:
        """Track the given servers.

        Args:
            base_urls: Distinct addresses, at least one.
        """
        self.all = tuple(Server(base_url) for base_url in base_urls)
        self._by_url = {server.base_url: server for server in self.all}
        self._by_key: OrderedDict[str, Server] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = itertools.count()

    @property
    def answered(self) -> bool:
        """Whether any server has ever answered over HTTP."""
        return any(server.answered for server in self.all)

    @property
    def usable(self) -> bool:
        """Whether any server has ever returned a generation."""
        return any(server.usable for server in self.all)

    def __getitem__(self, base_url: str) -> Server:
        """Return the server at an address.

        Raises:
            ValueError: The address belongs to none of the servers.
        """
        base_url = without_credentials(base_url)
        server = self._by_url.get(base_url)
        if server is None:
            raise ValueError(f"{base_url!r} is not one of this client's servers: {', '.join(self._by_url)}")
        return server

    def up(self) -> tuple[Server, ...]:
        """Return the servers in rotation, or all servers if none is."""
        return tuple(server for server in self.all if not server.is_out) or self.all

    def choose(self, key: str | None = None, *, avoid: Server | None = None) -> Server:
        """Choose the server for the next request.

        Args:
            key: Routing key. Requests with one key go to one server while it accepts connections.
            avoid: Server where the request has just failed. Another one is chosen, and the key stays assigned.
        """
        if len(self.all) == 1:
            return self.all[0]
        with self._lock:
            known = self._by_key.get(key) if key is not None else None
            if known is not None and key is not None:
                self._by_key.move_to_end(key)
                if not known.is_out and known is not avoid:
                    return known
            up = [server for server in self.all if not server.is_out]
            if not up:  # the one to probe next: the request itself shows whether it is back
                return min(self.all, key=lambda server: server.probe_at)
            turn = next(self._turn)  # rotate among equals
            order = [up[(turn + i) % len(up)] for i in range(len(up))]
            chosen = min(order, key=lambda server: (server is avoid, server.in_flight, server.keys))
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
        """Count a generation that was sent (1) or has ended in any way (-1)."""
        with self._lock:
            server.in_flight += change

    def note_answer(self, server: Server) -> None:
        """Record a response of any status: the server is up."""
        with self._lock:
            server.drops, server.is_out, server.probe_interval = 0, False, FIRST_PROBE_S
        server.log_answer()

    def note_failure(self, server: Server, kind: FailureKind) -> None:
        """Record a failed request; take a server that accepts no connections out of rotation."""
        if len(self.all) == 1 or kind not in (FailureKind.UNREACHABLE, FailureKind.DROPPED):
            return
        with self._lock:
            server.drops += 1
            if kind is FailureKind.DROPPED and server.drops < DROPS_UNTIL_OUT and not server.is_out:
                return
            now = time.monotonic()
            if server.is_out and now < server.probe_at:
                return  # the request was already in flight
            server.probe_interval = min(2 * server.probe_interval, MAX_PROBE_S) if server.is_out else FIRST_PROBE_S
            server.probe_at = now + server.probe_interval
            server.is_out = True
        logger.debug(
            "base_url=<%s>, probe_in_s=<%.0f> | server is out of rotation", server.base_url, server.probe_interval
        )

    def due(self) -> tuple[Server, ...]:
        """Return the servers to probe now; each is returned to one caller per interval."""
        now = time.monotonic()
        with self._lock:
            due = tuple(server for server in self.all if server.is_out and now >= server.probe_at)
            for server in due:
                server.probe_interval = min(2 * server.probe_interval, MAX_PROBE_S)
                server.probe_at = now + server.probe_interval
        return due
