"""Shared prefills: of calls that begin with the same tokens at the same time, one computes them for all.

A server finds a prefix in its cache once an earlier request has computed it. Requests that start together find nothing
there: of eight samples of one prompt, a server computes about four. So one of the calls first sends a *prime*, its
opening prompt without output, and the others wait for it.

A call primes only if others need it: if another call that begins alike is in flight, or if the openings before it came
in groups. No call waits for an opening that is known to be in the cache, and a call waits for at most `MAX_WAIT_S`. A
prime that fails delays nothing further and fails no call. Where primes do not help, as behind a router that sends equal
prompts to many workers, they stop.

What is in the cache is known while the server is busy with the same weights. A server does not report that its cache
was emptied, so new weights, an abort (which precedes them) and an idle server each count as that.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from .balancer import Server
from .cancellation import Cancellation

BLOCK_TOKENS = 64
"""Openings are compared in blocks of this many tokens."""

MIN_BLOCKS = 4
"""Number of common blocks that are worth a wait: computing fewer takes no longer than a request without output."""

MIN_TOKENS = MIN_BLOCKS * BLOCK_TOKENS

MAX_WAIT_S = 60.0
"""Time limit of a prime, and so of the wait for it."""

MAX_MISSES = 8
"""Number of consecutive calls that waited in vain after which no call waits any more."""

IDLE_S = 0.1
"""Time without a request after which a server may have new weights; loading those of a tiny model takes as long."""

MAX_BLOCKS = 100_000
"""Number of computed blocks to remember."""

CACHE_FIELDS = ("lora_path", "extra_key", "cache_salt", "routed_dp_rank", "data_parallel_rank")
"""Fields of a request that separate prefix caches."""

PRIME_FIELDS = (*CACHE_FIELDS, "priority", "no_logs", "log_metrics")
"""Fields of a call that its prime has, too."""


@dataclass(eq=False)
class Prefill:
    """The part of one call in computing its opening.

    Attributes:
        openings: State of the server.
        blocks: Keys of the opening's blocks.
        prime: Task of the prime that this call sent; its result is whether the server computed the opening.
        began: Number of times that `openings` had forgotten everything when the call came.
        waited: Whether this call waited for a prime.
        has_sibling: Whether another call with the same opening came before it was computed.
        expected: Number of tokens that another call's prime should have brought into the cache; 0 if there was none.
    """

    openings: Openings
    blocks: Sequence[int]
    began: int
    prime: asyncio.Task[bool] | None = None
    waited: bool = False
    has_sibling: bool = False
    expected: int = 0

    def answered(self, cached_tokens: int) -> None:
        """Note that the call was answered.

        Args:
            cached_tokens: Number of its prompt tokens that were in the server's cache.
        """
        self.openings.note_answer(self, cached_tokens)

    def failed(self) -> None:
        """Note that the call was not answered, so that it is unknown whether its opening was computed."""
        self.openings.note_failure(self)


class Openings:
    """The openings that one server has computed or is computing, as far as one event loop knows."""

    def __init__(self, server: Server) -> None:
        """Start with an empty cache."""
        self._server = server
        self._epoch = server.cache_epoch
        self._used_at = 0.0
        self._computed: set[int] = set()
        self._computing: dict[int, Prefill] = {}
        self._forgotten = 0
        self._misses = 0
        self._come_in_groups = False

    def forget_if_outdated(self) -> None:
        """Forget what was computed if the server's cache may have been emptied since."""
        now, server = time.monotonic(), self._server
        is_idle = server.in_flight == 0 and now - self._used_at > IDLE_S
        if is_idle or self._epoch != server.cache_epoch or len(self._computed) > MAX_BLOCKS:
            self._epoch, self._misses = server.cache_epoch, 0
            self._forgotten += 1
            self._computed.clear()
            self._computing.clear()
        self._used_at = now

    async def share(
        self,
        blocks: Sequence[int],
        prime: Callable[[], asyncio.Task[bool]],
        cancellation: Cancellation,
    ) -> Prefill:
        """Wait while another call computes blocks that this one needs, or compute them first if others will.

        Args:
            blocks: Keys of the opening's blocks, from `block_keys`.
            prime: Function that starts to compute the opening.
            cancellation: Deadline and cancel signal of the call.

        Raises:
            SGLangCancelledError: The call was cancelled while it waited.
            SGLangDeadlineError: The call's deadline passed while it waited.
        """
        prefill = Prefill(self, blocks, self._forgotten)
        by_other = False
        while self._misses < MAX_MISSES:
            known = next((i for i, block in enumerate(blocks) if block not in self._computed), len(blocks))
            prefill.expected = known * BLOCK_TOKENS if by_other else 0
            missing = blocks[known:]
            if len(missing) < MIN_BLOCKS:
                break
            # Equal keys mean that all tokens up to the end of the block are equal.
            other = self._computing.get(missing[MIN_BLOCKS - 1])
            if other is not None and other.blocks[-1] == blocks[-1]:
                other.has_sibling = prefill.has_sibling = self._come_in_groups = True
            if other is not None and other.prime is not None:
                prefill.waited = True
                await cancellation.wait(other.prime)
                if not _succeeded(other.prime):
                    break
                by_other = True
                continue
            self._computing.update(dict.fromkeys(missing, prefill))
            if other is not None or self._come_in_groups:
                prefill.prime, prefill.waited = prime(), True
                prefill.prime.add_done_callback(lambda _: self._end_prime(prefill))
                await cancellation.wait(prefill.prime)
            break
        return prefill

    def note_answer(self, prefill: Prefill, cached_tokens: int) -> None:
        """Note that a call was answered; see `Prefill.answered`."""
        self._used_at = time.monotonic()
        self._end(prefill, computed=True)
        if prefill.expected:
            self._misses = 0 if cached_tokens >= prefill.expected // 2 else self._misses + 1

    def note_failure(self, prefill: Prefill) -> None:
        """Note that a call failed; see `Prefill.failed`."""
        if prefill.prime is None:  # otherwise others may wait for the prime, which continues
            self._end(prefill, computed=False)

    def _end_prime(self, prefill: Prefill) -> None:
        self._used_at = time.monotonic()
        self._end(prefill, computed=True)  # also if it failed: no call waits for this opening again
        self._come_in_groups = prefill.has_sibling

    def _end(self, prefill: Prefill, *, computed: bool) -> None:
        for block in prefill.blocks:
            if self._computing.get(block) is prefill:
                del self._computing[block]
        if computed and prefill.began == self._forgotten:
            self._computed.update(prefill.blocks)


def block_keys(opening: array[int], identity: Hashable) -> list[int]:
    """Return a key for each whole block of an opening: of all tokens up to the end of the block.

    Args:
        opening: Token ids, shape `(T,)`.
        identity: What separates prefix caches, apart from the tokens.
    """
    step = BLOCK_TOKENS * opening.itemsize
    content, key, keys = opening.tobytes(), hash(identity), []
    for start in range(0, len(content) - step + 1, step):
        key = hash((key, content[start : start + step]))
        keys.append(key)
    return keys


def _succeeded(prime: asyncio.Task[bool]) -> bool:
    return not prime.cancelled() and prime.exception() is None and prime.result()
