"""When a failed attempt is tried again.

Promises: retries end; an answer that cannot change (a 4xx, a second timeout, a port where nobody has ever listened) is
not asked for again.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import TYPE_CHECKING

from ..exceptions import SGLangClientError

if TYPE_CHECKING:
    from .balancer import Servers

RETRIED_STATUSES = frozenset({408, 409, 425, 429, *range(500, 600)} - {501, 505})
"""Statuses that can be different the next time. 501 and 505 say what the server is unable to do at all."""

PERHAPS_RUNNING_STATUSES = frozenset({408, 502, 504})
"""Statuses by which something in between gives up on a server that may still be generating."""

MAX_DELAY_S = 8.0
MAX_RETRIES_AFTER_TIMEOUT = 1
MAX_RETRIES_OF_STRANGE_ANSWERS = 3
"""How often an undecodable answer is asked for again, of a server that never gave a good one; an unfit one of any."""


class FailureKind(Enum):
    """How an attempt failed, as far as it matters for what to do next."""

    UNREACHABLE = "unreachable"
    """No connection was made; the server has not seen the request."""
    DROPPED = "dropped"
    """The connection broke; the server may still be working on the request."""
    TIMED_OUT = "timed_out"
    """The client's own time limit; the server is still working on the request."""
    REFUSED = "refused"
    """An HTTP status that can be different the next time."""
    UNDECODABLE = "undecodable"
    """Bytes that are no HTTP or no JSON, as of an answer that was cut, or a proxy whose server restarts."""
    UNFIT = "unfit"
    """A whole answer that is not what the endpoint gives. Each costs a generation, and the next one is the same."""
    FINAL = "final"
    """Trying again cannot help."""


@dataclass(frozen=True)
class Failure:
    """One failed attempt.

    Attributes:
        kind: What it means for the next attempt.
        error: What the caller gets if there is none.
        retry_after: Seconds that the server asked to wait, if it did.
        perhaps_running: Whether the server may still be working on the request, so that it has to be aborted.
    """

    kind: FailureKind
    error: SGLangClientError
    retry_after: float | None = None
    perhaps_running: bool = False


@dataclass(frozen=True)
class RetryPolicy:
    """The limits of trying again.

    Attributes:
        max_retries: Attempts after the first one.
        retry_delay: Seconds before the first retry; doubles up to `MAX_DELAY_S`.
        unreachable_after: Seconds after which a server that never answered counts as not being there.
        retry_refusals: Whether error statuses are retried.
    """

    max_retries: int
    retry_delay: float
    unreachable_after: float
    retry_refusals: bool = True

    def delay(self, retries: int, retry_after: float | None = None) -> float:
        """Seconds before the next attempt, at most `MAX_DELAY_S`.

        Half of the backoff is random, so that a thousand agents do not come back in the same instant. A server's
        `Retry-After` is a lower bound of it.

        Args:
            retries: Retries made so far.
            retry_after: Seconds that the server asked for.
        """
        backoff = min(self.retry_delay * 2.0 ** min(retries, 16), MAX_DELAY_S)
        return min(max(backoff * random.uniform(0.5, 1.0), retry_after or 0.0), MAX_DELAY_S)


class RetryState:
    """The attempts of one call."""

    def __init__(self, policy: RetryPolicy, servers: Servers) -> None:
        """Start with no failed attempts."""
        self._policy = policy
        self._servers = servers
        self._retries = 0
        self._timeouts = 0
        self._strange = 0
        self._started = time.monotonic()
        self._unreachable_since: float | None = None

    def next_delay(self, failure: Failure) -> float | None:
        """Seconds until the next attempt; None if there is to be none."""
        kind = failure.kind
        self._timeouts += kind is FailureKind.TIMED_OUT
        self._strange += kind in (FailureKind.UNDECODABLE, FailureKind.UNFIT)
        delay = self._policy.delay(self._retries, failure.retry_after)
        left = math.inf  # a server that never answered may go on so for a limited time, one that did for ever
        if self._servers.answered or kind not in (FailureKind.UNREACHABLE, FailureKind.DROPPED):
            self._unreachable_since = None
        else:
            now = time.monotonic()
            self._unreachable_since = self._unreachable_since or now
            left = self._unreachable_since + self._policy.unreachable_after - now
        if (
            kind is FailureKind.FINAL
            or (kind is FailureKind.REFUSED and not self._policy.retry_refusals)
            or self._retries >= self._policy.max_retries
            or self._timeouts > MAX_RETRIES_AFTER_TIMEOUT
            or (
                self._strange > MAX_RETRIES_OF_STRANGE_ANSWERS
                and (kind is FailureKind.UNFIT or not self._servers.usable)
            )
            or left <= 0
        ):
            return None
        self._retries += 1
        return min(delay, left)

    def explain(self, failure: Failure) -> SGLangClientError:
        """The failure's error, with what led to giving up in its message."""
        error = failure.error
        notes = []
        if self._retries:
            seconds = time.monotonic() - self._started
            notes.append(f" (given up after {self._retries + 1} attempts in {seconds:.1f} s)")
        if failure.kind in (FailureKind.UNREACHABLE, FailureKind.DROPPED) and not self._servers.answered:
            notes.append("; no server has ever answered there: start one (`strands-sglang serve`), or correct base_url")
        if notes:
            error.args = (f"{error}{''.join(notes)}",)
        return error


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Seconds from now that a `Retry-After` header asks for: a number or an HTTP date (RFC 9110, 10.2.3)."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return seconds if seconds >= 0 else 0.0  # also turns NaN into 0
