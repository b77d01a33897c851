"""Whose call it is: which episode a call belongs to, and which agent asks.

A model has one trajectory at a time, or one per `with model.episode()`, which follows the code that runs inside it
(context variables: tasks and threads started with a copied context inherit it). A call that comes without that context,
as those of a conversation manager's own thread do, is given to the open episode that knows its agent, or else to the
one whose recorded history it begins with.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .trajectory import Trajectory

_STATE_KEY = "strands_sglang"

_current: ContextVar[dict[int, Trajectory]] = ContextVar("strands_sglang_episodes", default={})  # noqa: B039  (never changed in place)


def agent_of(model_state: Any) -> str | None:
    """The id of the agent that asks, kept in its `model_state`; None for a call from outside an agent's loop.

    Strands keeps that state per agent, hands out a copy with each call, and takes it back only if the call succeeds.

    Args:
        model_state: What Strands passed under that name, a dictionary that may be written to.
    """
    if not isinstance(model_state, dict):
        return None
    agent: str = model_state.setdefault(_STATE_KEY, uuid.uuid4().hex)
    return agent


def cycle_of(invocation_state: Any) -> str | None:
    """The turn of the agent's loop that a call belongs to, as Strands names it; None where it does not.

    Args:
        invocation_state: What Strands passed under that name.
    """
    cycle = invocation_state.get("event_loop_cycle_id") if isinstance(invocation_state, dict) else None
    return None if cycle is None else str(cycle)


class Episodes:
    """The trajectories of one model. Safe to use from several threads and event loops."""

    def __init__(self) -> None:
        """Start with an empty trajectory for calls outside of episodes."""
        self.outside = Trajectory()
        self._open: list[Trajectory] = []
        self._lock = threading.Lock()

    @property
    def is_inside(self) -> bool:
        """Whether the running code is inside an episode."""
        return id(self) in _current.get()

    @property
    def current(self) -> Trajectory:
        """The trajectory of the running code."""
        return _current.get().get(id(self), self.outside)

    @contextmanager
    def episode(self) -> Iterator[Trajectory]:
        """Give the code inside a trajectory of its own."""
        trajectory = Trajectory()
        with self._lock:
            self._open.append(trajectory)
        token = _current.set({**_current.get(), id(self): trajectory})
        try:
            yield trajectory
        finally:
            _current.reset(token)
            with self._lock:
                self._open = [other for other in self._open if other is not trajectory]

    def of_call(self, agent: str | None, digests: Sequence[bytes]) -> Trajectory:
        """The trajectory that a call belongs to.

        Args:
            agent: Who asks.
            digests: Of the messages that it asks with.
        """
        with self._lock:
            candidates = list(self._open)
        if self.is_inside or not candidates:
            return self.current
        if agent is not None:
            return next((trajectory for trajectory in candidates if trajectory.knows(agent)), self.outside)
        agreement = [trajectory.agreement(digests) for trajectory in [self.outside, *candidates]]
        best = max(agreement)
        return [self.outside, *candidates][agreement.index(best)] if best else self.outside
