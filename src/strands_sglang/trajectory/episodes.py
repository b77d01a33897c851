"""Which episode a call belongs to, and which agent makes it.

A model has one trajectory at a time, or one per `with model.episode()`. A call belongs to the running episode that its
code is inside of (by context variables, which tasks and threads with a copied context inherit). Otherwise it belongs to
the episode in which its agent asked before, which Strands keeps for each agent. Contexts and agents hold names of
episodes, never trajectories, so an episode that has ended is not found, takes no call and is not kept alive.

With the model's hooks the agent itself is known: copies of one agent are distinguished, and an agent whose first call
failed is recognized.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from strands.types.content import Message

from ..reasons import Reason
from .trajectory import Trajectory
from .turn import Turn

logger = logging.getLogger(__name__)

_STATE_KEY = "strands_sglang"
_NAMES_KEY = "strands_sglang_names"


_entered: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("strands_sglang_episodes", default=())
"""The episodes that the running code is inside of, as (model, episode), innermost last; some may have ended."""


def written_names(model_state: Any) -> dict[str, str]:
    """Return the tool names that an agent's model wrote and no tool may have, by toolUseId.

    Strands hands such calls back under another name. The agent's `model_state` keeps the written one, even after its
    session was restored.

    Args:
        model_state: Strands' argument of that name.
    """
    names = model_state.get(_NAMES_KEY) if isinstance(model_state, dict) else None
    return names if isinstance(names, dict) else {}


def keep_written_names(model_state: Any, names: Mapping[str, str]) -> None:
    """Add names to `written_names`."""
    if names and isinstance(model_state, dict):
        model_state[_NAMES_KEY] = {**written_names(model_state), **names}


@dataclass(eq=False)
class KnownAgent:
    """What is known about an agent that has the model's hooks.

    Attributes:
        id: Its id; None before its first call.
        episode: The episode that it was created in, or asked in last.
        trajectory: The record of its latest call.
        calls: Its model calls under way, and the latest one until its answer is settled.
    """

    id: str | None = None
    episode: str | None = None
    trajectory: ref[Trajectory] | None = None
    calls: list[AgentCall] = field(default_factory=list)


@dataclass(eq=False)
class AgentCall:
    """One model call of an agent's loop. Middleware may ask the model several times for it, or not at all.

    Attributes:
        agent: The agent.
        invocation_state: Tells its requests from concurrent ones.
        outer: The call during which this one is made, if any.
        is_over: Whether Strands has the answer.
        answers: The turns sampled for it.
        message: The message that entered the agent's history for it; None until then.
        position: Position of that message.
    """

    agent: KnownAgent
    invocation_state: Any
    outer: AgentCall | None
    is_over: bool = False
    answers: list[Turn] = field(default_factory=list)
    message: Message | None = None
    position: int = 0

    def close(self, why_not: Reason) -> None:
        """Settle its answers, and drop the references that leftover contexts would keep alive.

        Args:
            why_not: Why none of the answers entered the history, if none did.
        """
        self.agent.calls.remove(self)
        for trajectory in dict.fromkeys(turn.trajectory for turn in self.answers if turn.trajectory is not None):
            turns = [turn for turn in self.answers if turn.trajectory is trajectory]
            if self.message is None:
                trajectory.throw_away(turns, why_not)
            else:
                trajectory.put_in_history(turns, self.message, position=self.position)
        self.is_over, self.answers = True, []
        self.outer = self.invocation_state = self.message = None


@dataclass(frozen=True)
class Origin:
    """Where a request to the model comes from.

    Attributes:
        trajectory: The record of the request.
        agent: Id of the agent that asks; None outside of an agent's loop.
        call: The agent's model call that the request serves, if the agent has the model's hooks.
    """

    trajectory: Trajectory
    agent: str | None
    call: AgentCall | None

    def note(self, turn: Turn) -> None:
        """Note an answer that the agent is about to get."""
        if self.call is not None:
            turn.was_added = False
            self.call.answers.append(turn)


_asking: ContextVar[AgentCall | None] = ContextVar("strands_sglang_asking", default=None)
"""The model call that the running code is inside of; it may be over."""

_known: WeakKeyDictionary[Any, KnownAgent] = WeakKeyDictionary()
_holders: WeakValueDictionary[str, KnownAgent] = WeakValueDictionary()
"""The agents by id, so that copies of an agent get other ids."""


def known_agent(agent: Any) -> KnownAgent:
    """Return what is known about an agent.

    Args:
        agent: A Strands agent.
    """
    return _known.setdefault(agent, KnownAgent())


def begin_call(agent: KnownAgent, invocation_state: Any) -> None:
    """Note that an agent's model call begins; requests inside it are the agent's."""
    call = AgentCall(agent, invocation_state, _asking.get())
    agent.calls.append(call)
    _asking.set(call)


def end_call(agent: KnownAgent, invocation_state: Any) -> AgentCall | None:
    """Note that the latest of an agent's model calls is over, and return it."""
    calls = (call for call in reversed(agent.calls) if not call.is_over)
    call = next((call for call in calls if call.invocation_state is invocation_state), None)
    if call is not None:
        call.is_over = True
        if _asking.get() is call:
            _asking.set(call.outer)
    return call


def cycle_of(invocation_state: Any) -> str | None:
    """Return Strands' id of the event-loop cycle that a call belongs to; None if there is none.

    Args:
        invocation_state: Strands' argument of that name.
    """
    cycle = invocation_state.get("event_loop_cycle_id") if isinstance(invocation_state, dict) else None
    return None if cycle is None else str(cycle)


class RunningEpisodes:
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
    def episode(self, trajectory: Trajectory | None = None) -> Iterator[Trajectory]:
        """Give the code inside a trajectory of its own: a new one, or one that it continues."""
        trajectory = Trajectory() if trajectory is None else trajectory
        name = uuid.uuid4().hex
        with self._lock:
            self._running[name] = trajectory
        _entered.set((*_entered.get(), (self._id, name)))
        try:
            yield trajectory
        finally:
            with self._lock:
                del self._running[name]
            # This may be another task than the one that entered; then there is nothing to undo.
            _entered.set(tuple(other for other in _entered.get() if other != (self._id, name)))

    def of_call(self, model_state: Any, invocation_state: Any = None) -> Origin:
        """Find where a call comes from.

        The agent's `model_state` remembers it. Strands passes a copy of that state to each call, and takes it back only
        if the call succeeds. An agent that asks in another episode than before gets another id there, because it may be
        one of several copies.

        Args:
            model_state: Strands' argument of that name, a dictionary that may be written to.
            invocation_state: Strands' argument of that name.
        """
        call = _asking.get()
        if call is not None and (call.is_over or call.invocation_state is not invocation_state):
            call = None  # the running code belongs to another caller inside that call
        state = model_state.get(_STATE_KEY) if isinstance(model_state, dict) else None
        before: dict[str, Any] = state if isinstance(state, dict) else {"agent": state, "episode": None}
        with self._lock:
            name = self._find(call.agent.episode if call is not None else before["episode"])
            trajectory = self._running.get(name or "", self.outside)
            # The call outlived its own episode, or came from a thread without the context.
            if name is None and not self._warned and (self._running or self._was_inside()):
                self._warned = True
                logger.warning(
                    "episodes=<%d> | a call came from outside the running episodes, or after its own had ended, so it "
                    "is recorded in none of them; start threads with asyncio.to_thread or "
                    "contextvars.copy_context().run, which keep the context",
                    len(self._running),
                )
            agent = None
            if call is not None:
                call.agent.episode, call.agent.trajectory = name, ref(trajectory)
                if call.agent.id is None:  # use the id that Strands remembers, unless a copy of the agent has it
                    is_free = before["agent"] is not None and before["agent"] not in _holders
                    call.agent.id = before["agent"] if is_free else uuid.uuid4().hex
                _holders[call.agent.id] = call.agent
                agent = call.agent.id
            elif isinstance(model_state, dict):
                agent = before["agent"] if before["episode"] == name else None
                agent = agent or uuid.uuid4().hex
        if agent is not None and isinstance(model_state, dict):
            model_state[_STATE_KEY] = {"agent": agent, "episode": name}
        return Origin(trajectory, agent, call)

    def adopt(self, agent: KnownAgent) -> None:
        """Note that an agent is created here."""
        agent.episode = self._of_context()
        agent.trajectory = ref(self.current)  # one that continues may have calls without a result

    def expect(self, agent: KnownAgent) -> None:
        """Note that an agent is about to ask, so that earlier requests on its behalf count as a helper's."""
        with self._lock:
            trajectory = self._running.get(self._find(agent.episode) or "", self.outside)
        trajectory.expect_agent()

    def _find(self, asked_before: str | None) -> str | None:
        """Find the running episode that the running code belongs to; None if there is none.

        Args:
            asked_before: The episode in which the agent asked before.
        """
        name = self._of_context()
        if name is None and asked_before in self._running:
            name = asked_before
        if name is None and self._was_inside() and len(self._running) == 1:
            (name,) = self._running  # its own episode has ended; the only other one continues its work
        return name

    def _of_context(self) -> str | None:
        """Return the innermost running episode that the running code is inside of."""
        return next((episode for _, episode in reversed(_entered.get()) if episode in self._running), None)

    def _was_inside(self) -> bool:
        """Whether the running code was started inside an episode that has ended."""
        return any(model == self._id for model, _ in _entered.get())
