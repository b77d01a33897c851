"""Whose call it is: which episode a call belongs to, and which agent asks.

A model has one trajectory at a time, or one per `with model.episode()`, which follows the code that runs inside it
(context variables: tasks and threads started with a copied context inherit it). A call that comes without that context
is given to the open episode that knows its agent; where no agent asks, or a helper that nobody knows yet, to the one
whose recorded history it begins with.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .trajectory import Trajectory

logger = logging.getLogger(__name__)

_STATE_KEY = "strands_sglang"

_current: ContextVar[dict[Episodes, Trajectory]] = ContextVar("strands_sglang_episodes", default={})  # noqa: B039  (never changed in place)


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
        self._warned = False
        self._lock = threading.Lock()

    @property
    def is_inside(self) -> bool:
        """Whether the running code is inside an episode."""
        return self in _current.get()

    @property
    def current(self) -> Trajectory:
        """The trajectory of the running code."""
        return _current.get().get(self, self.outside)

    @contextmanager
    def episode(self) -> Iterator[Trajectory]:
        """Give the code inside a trajectory of its own."""
        trajectory = Trajectory()
        with self._lock:
            self._open.append(trajectory)
        token = _current.set({**_current.get(), self: trajectory})
        try:
            yield trajectory
        finally:
            with self._lock:
                self._open = [other for other in self._open if other is not trajectory]
            _current.reset(token)

    def _warn_of_outside(self, count: int) -> None:
        """Say once that an agent runs beside the open episodes: a thread that was started without their context may."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "episodes=<%d> | an agent's call came from outside of the open episodes and is recorded in none of "
                "them; threads need their context: asyncio.to_thread, or contextvars.copy_context().run",
                count,
            )

    def of_call(self, agent: str | None, digests: Sequence[bytes], *, auxiliary: bool = False) -> Trajectory:
        """The trajectory that a call belongs to.

        Args:
            agent: Who asks.
            digests: Of the messages that it asks with.
            auxiliary: Whether it is a helper's.
        """
        with self._lock:
            candidates = list(self._open)
        if self.is_inside or not candidates:
            return self.current
        known = None if agent is None else next((one for one in candidates if one.knows(agent)), None)
        if known is not None:
            return known
        if agent is not None and not auxiliary:
            self._warn_of_outside(len(candidates))
            return self.outside
        return max([self.outside, *candidates], key=lambda one: one.agreement(digests))
