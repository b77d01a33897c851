"""Which actor runs a sample: a model without Ray, clock or event loop, so that its tests explore every order of events.

A sample waits, runs, and leaves; an actor is open while it takes samples. A sample that must be alone reserves an
actor, which takes no other from then on, and runs there once the last one has left.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

A = TypeVar("A", bound=Hashable)
S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class _Waiting(Generic[S]):
    sample: S
    prompt: str
    is_alone: bool


class Placement(Generic[A, S]):
    """Places of samples: the actor with the fewest, and the samples of a prompt together if there is room.

    If each sample that runs leaves at some time, and an actor is open at some time, each sample that waits runs at some
    time. Call `place` after each other method, and start what it returns.
    """

    def __init__(self, *, per_actor: int, max_concurrency: int) -> None:
        """Set up.

        Args:
            per_actor: Maximum number of samples that share an actor.
            max_concurrency: Number of samples to spread over the open actors.
        """
        self._per_actor = per_actor
        self._max_concurrency = max_concurrency
        self._open: list[A] = []
        self._queue: deque[_Waiting[S]] = deque()
        self._reserved: dict[A, _Waiting[S]] = {}  # until the sample leaves
        self._running: dict[A, set[S]] = {}
        self._place_of: dict[S, A] = {}  # those that run
        self._latest: dict[str, A] = {}  # by prompt

    def is_open(self, actor: A) -> bool:
        """Whether an actor takes samples."""
        return actor in self._open

    def open(self, actor: A) -> None:
        """Let an actor take samples. Those of its former life may still be there."""
        if actor not in self._open:
            self._open.append(actor)
        self._running.setdefault(actor, set())

    def close(self, actor: A) -> None:
        """Let an actor take no more samples, such as one that was lost. Those that run there leave one by one."""
        if actor in self._open:
            self._open.remove(actor)
        waiting = self._reserved.get(actor)
        if waiting is not None and waiting.sample not in self._running[actor]:
            del self._reserved[actor]
            self._queue.appendleft(waiting)

    def wait(self, sample: S, prompt: str, *, alone: bool) -> None:
        """Add a sample that is to run."""
        self._queue.append(_Waiting(sample, prompt, alone))

    def leave(self, sample: S) -> None:
        """Remove a sample, whether it ran or still waits."""
        actor = self._place_of.pop(sample, None)
        if actor is not None:
            self._running[actor].remove(sample)
        else:
            self._queue = deque(waiting for waiting in self._queue if waiting.sample != sample)
        self._reserved = {actor: waiting for actor, waiting in self._reserved.items() if waiting.sample != sample}

    def place(self) -> list[tuple[S, A]]:
        """Return the samples that run from now on, each with its actor."""
        started: list[tuple[S, A]] = []
        while self._queue and (actor := self._choose(self._queue[0])) is not None:
            waiting = self._queue.popleft()
            self._latest[waiting.prompt] = actor
            if waiting.is_alone:
                self._reserved[actor] = waiting
            else:
                self._start(waiting.sample, actor, started)
        for actor, waiting in self._reserved.items():
            if not self._running[actor]:
                self._start(waiting.sample, actor, started)
        return started

    def clear(self) -> list[S]:
        """Remove all samples that wait, and return them."""
        waiting = [queued.sample for queued in self._queue]
        self._queue.clear()
        return waiting

    def _start(self, sample: S, actor: A, started: list[tuple[S, A]]) -> None:
        self._running[actor].add(sample)
        self._place_of[sample] = actor
        started.append((sample, actor))

    def _choose(self, waiting: _Waiting[S]) -> A | None:
        free = [actor for actor in self._open if actor not in self._reserved]
        if free and not waiting.is_alone:
            # An equal share for each, which also keeps a prompt with many samples from filling one actor first.
            most = min(self._per_actor, math.ceil(self._max_concurrency / len(free)))
            free = [actor for actor in free if len(self._running[actor]) < most]
            if (latest := self._latest.get(waiting.prompt)) in free:
                return latest
        return min(free, key=lambda actor: len(self._running[actor]), default=None)
