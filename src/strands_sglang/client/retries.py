"""Retry policy: whether and when a failed attempt is repeated.

Retries are bounded. A failure that cannot change is not retried: a 4xx status, a second timeout, a port where no server
has ever listened.
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
"""Statuses that may change on the next attempt. 501 and 505 name what the server cannot do at all."""

MAYBE_RUNNING_STATUSES = frozenset({408, 502, 504})
"""Statuses of a proxy that gives up on a server which may still be generating."""

MAX_DELAY_S = 8.0
MAX_RETRIES_AFTER_TIMEOUT = 1
MAX_DECODE_RETRIES = 3
"""Retries after undecodable responses while no server has sent a valid one, and after unfit responses of any server."""


class FailureKind(Enum):
    """How an attempt failed, as far as the next step depends on it."""

    UNREACHABLE = "unreachable"
    """No connection was made; the server has not seen the request."""
    DROPPED = "dropped"
    """The connection broke; the server may still be working on the request."""
    TIMED_OUT = "timed_out"
    """The attempt's time limit is over; the server is still working on the request."""
    REFUSED = "refused"
    """The server returned an HTTP status that may change."""
    UNDECODABLE = "undecodable"
    """The bytes are not HTTP or not JSON: a truncated response, or a proxy whose server restarts."""
    UNFIT = "unfit"
    """The JSON is complete but lacks required fields. Each attempt costs a generation, and the next is the same."""
    FINAL = "final"
    """A retry cannot help."""


@dataclass(frozen=True)
class Failure:
    """One failed attempt.

    Attributes:
        kind: How it failed.
        error: Error to raise if no attempt follows.
        retry_after: Seconds that the server asked to wait; None if it did not.
        maybe_running: Whether the server may still be working on the request, so that it must be aborted.
    """

    kind: FailureKind
    error: SGLangClientError
    retry_after: float | None = None
    maybe_running: bool = False


@dataclass(frozen=True)
class RetryPolicy:
    """Limits and delays of retries.

    Attributes:
        max_retries: Maximum number of attempts after the first.
        retry_delay: Seconds before the first retry; doubles up to `MAX_DELAY_S`.
        unreachable_after: Seconds until a server that never answered counts as absent.
        retry_refusals: Whether to retry error statuses.
    """

    max_retries: int
    retry_delay: float
    unreachable_after: float
    retry_refusals: bool = True

    def delay(self, retries: int, retry_after: float | None = None) -> float:
        """Return the seconds before the next attempt, at most `MAX_DELAY_S`.

        Half of the backoff is random, so that a thousand agents do not return in the same instant. A server's
        `Retry-After` is its lower bound.

        Args:
            retries: Number of retries so far.
            retry_after: Seconds that the server asked to wait; None if it did not.
        """
        return min(max(self.backoff(retries) * random.uniform(0.5, 1.0), retry_after or 0.0), MAX_DELAY_S)

    def backoff(self, retries: int) -> float:
        """Return the longest delay before the next attempt that no server asked for."""
        return min(self.retry_delay * 2.0 ** min(retries, 16), MAX_DELAY_S)


class RetryState:
    """The attempts of one call.

    Attributes:
        retries: Number of retries so far.
    """

    def __init__(self, policy: RetryPolicy, servers: Servers) -> None:
        """Start with no failed attempts."""
        self._policy = policy
        self._servers = servers
        self.retries = 0
        self._timeouts = 0
        self._decode_failures = 0
        self._started = time.monotonic()
        self._unreachable_since: float | None = None
        self._failed_since = math.inf

    def next_delay(self, failure: Failure) -> float | None:
        """Return the seconds until the next attempt; None to give up."""
        kind = failure.kind
        self._timeouts += kind is FailureKind.TIMED_OUT
        self._decode_failures += kind in (FailureKind.UNDECODABLE, FailureKind.UNFIT)
        delay = self._policy.delay(self.retries, failure.retry_after)
        left = math.inf  # only a server that never answered has a time limit
        if self._servers.answered or kind not in (FailureKind.UNREACHABLE, FailureKind.DROPPED):
            self._unreachable_since = None
        else:
            now = time.monotonic()
            self._unreachable_since = self._unreachable_since or now
            left = self._unreachable_since + self._policy.unreachable_after - now
        if (
            kind is FailureKind.FINAL
            or (kind is FailureKind.REFUSED and not self._policy.retry_refusals)
            or self.retries >= self._policy.max_retries
            or self._timeouts > MAX_RETRIES_AFTER_TIMEOUT
            or (self._decode_failures > MAX_DECODE_RETRIES and (kind is FailureKind.UNFIT or not self._servers.usable))
            or left <= 0
        ):
            return None
        self.retries += 1
        self._failed_since = min(self._failed_since, time.monotonic())
        return min(delay, left)

    def seconds_left(self, failure: Failure) -> float:
        """Return in about how many seconds the call is given up if each attempt fails like the last; inf if unknown."""
        if failure.kind is not FailureKind.UNREACHABLE:
            return math.inf  # an attempt may take any time
        now = time.monotonic()
        pace = max(0.75 * self._policy.backoff(self.retries), (now - self._failed_since) / self.retries)
        left = (self._policy.max_retries - self.retries + 1) * pace
        if self._unreachable_since is not None:
            left = min(left, self._unreachable_since + self._policy.unreachable_after - now)
        return left

    def explain(self, failure: Failure) -> SGLangClientError:
        """Return the failure's error, with the reason to give up in its message."""
        error = failure.error
        notes = []
        if self.retries:
            seconds = time.monotonic() - self._started
            notes.append(f" (given up after {self.retries + 1} attempts, {seconds:.3g} s)")
        if failure.kind in (FailureKind.UNREACHABLE, FailureKind.DROPPED) and not self._servers.answered:
            notes.append("; no server has ever answered there: start one (`strands-sglang serve`), or correct base_url")
        if notes:
            error.args = (f"{error}{''.join(notes)}",)
        return error


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a `Retry-After` header asks to wait: a number or an HTTP date (RFC 9110, 10.2.3)."""
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
