"""Whose call it is: which episode a call belongs to, and which agent asks.

A model has one trajectory at a time, or one per `with model.episode()`. A call belongs to the running episode that its
code is inside of (context variables: tasks and threads started with a copied context inherit it), or else to the one in
which its agent asked before, as Strands keeps it for each agent. Context and agents hold names of episodes, never their
trajectories: an episode that has ended is found by nobody, takes no call, and is not kept alive.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from .trajectory import Trajectory

logger = logging.getLogger(__name__)

_STATE_KEY = "strands_sglang"
_NAMES_KEY = "strands_sglang_names"


@dataclass(frozen=True)
class _Name:
    """An episode by name.

    Attributes:
        model: The model that it is an episode of.
        episode: It.
    """

    model: str
    episode: str


_entered: ContextVar[tuple[_Name, ...]] = ContextVar("strands_sglang_episodes", default=())
"""The episodes that the running code is inside of, the innermost one last; some may have ended."""


def written_names(model_state: Any) -> dict[str, str]:
    """The names that an agent's model wrote and no tool may have, by toolUseId.

    Strands hands such calls back under another name. The agent's `model_state` has the written one, also after its
    session was restored.

    Args:
        model_state: What Strands passed under that name.
    """
    names = model_state.get(_NAMES_KEY) if isinstance(model_state, dict) else None
    return names if isinstance(names, dict) else {}


def keep_written_names(model_state: Any, names: Mapping[str, str]) -> None:
    """Add to `written_names`."""
    if names and isinstance(model_state, dict):
        model_state[_NAMES_KEY] = {**written_names(model_state), **names}


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
        self._id = uuid.uuid4().hex
        self._running: dict[str, Trajectory] = {}
        self._warned = False
        self._lock = threading.Lock()

    @property
    def is_inside(self) -> bool:
        """Whether the running code is inside an episode."""
        return self._of_context() is not None

    @property
    def current(self) -> Trajectory:
        """The trajectory of the running code."""
        return self._running.get(self._of_context() or "", self.outside)

    @contextmanager
    def episode(self) -> Iterator[Trajectory]:
        """Give the code inside a trajectory of its own."""
        trajectory = Trajectory()
        name = _Name(self._id, uuid.uuid4().hex)
        with self._lock:
            self._running[name.episode] = trajectory
        _entered.set((*_entered.get(), name))
        try:
            yield trajectory
        finally:
            with self._lock:
                del self._running[name.episode]
            # Perhaps in another task than the one that entered it, where nothing has to be undone.
            _entered.set(tuple(other for other in _entered.get() if other != name))

    def of_call(self, model_state: Any) -> tuple[Trajectory, str | None]:
        """The trajectory that a call belongs to, and the id of the agent that asks; None outside of an agent's loop.

        Both stay in the agent's `model_state`. Strands hands out a copy of it with each call, and takes it back only if
        the call succeeds. An agent that asks in another episode than before has another id there: it may be one of
        several copies.

        Args:
            model_state: What Strands passed under that name, a dictionary that may be written to.
        """
        state = model_state.get(_STATE_KEY) if isinstance(model_state, dict) else None
        known: dict[str, Any] = state if isinstance(state, dict) else {"agent": state, "episode": None}
        with self._lock:
            name = self._of_context()
            if name is None and known["episode"] in self._running:
                name = known["episode"]
            if name is None and self._was_inside() and len(self._running) == 1:
                (name,) = self._running  # its own has ended, and this one has what it works for
            trajectory = self.outside if name is None else self._running[name]
            if name is None and (self._running or self._was_inside()):
                self._warn_of_outside()
        if not isinstance(model_state, dict):
            return trajectory, None
        agent = known["agent"] if known["episode"] == name else None
        model_state[_STATE_KEY] = {"agent": agent or uuid.uuid4().hex, "episode": name}
        return trajectory, model_state[_STATE_KEY]["agent"]

    def _of_context(self) -> str | None:
        """The innermost running episode that the running code is inside of."""
        names = (name.episode for name in reversed(_entered.get()) if name.model == self._id)
        return next((name for name in names if name in self._running), None)

    def _was_inside(self) -> bool:
        """Whether the running code was started inside an episode that has ended, and outlived it."""
        return any(name.model == self._id for name in _entered.get())

    def _warn_of_outside(self) -> None:
        """Say once that a call is in no episode: it outlived its own, or came from a thread without the context."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "episodes=<%d> | a call came from outside of the running episodes, or after its own had ended, and is "
                "recorded in none of them; threads need their context: asyncio.to_thread, or "
                "contextvars.copy_context().run",
                len(self._running),
            )
