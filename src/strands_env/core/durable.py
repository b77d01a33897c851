"""Durable episodes: a journal of each, and how an episode continues from it, in another process or as a fork.

An episode continues from what its journal holds: the recorded turns, the agent's messages, the results of its tools and
the environment's own state. A model call that was under way is made again, or continues from its sampled tokens if some
are known. What a tool says of itself decides whether a call without a recorded end runs again; see `Effect`.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from pydantic_core import to_jsonable_python
from strands import Agent, Snapshot
from strands.agent import AgentResult
from strands.hooks import HookOrder, HookProvider, HookRegistry
from strands.hooks.events import AfterToolCallEvent, BeforeModelCallEvent, BeforeToolCallEvent, MessageAddedEvent
from strands.types.content import Message
from strands.types.session import decode_bytes_values, encode_bytes_values
from strands.types.tools import AgentTool, ToolResult, ToolUse
from typing_extensions import override

from strands_sglang import (
    EpisodeInterruptedError,
    JournalError,
    TerminationReason,
    ToolLimiter,
    Trajectory,
    __version__,
)
from strands_sglang.trajectory.journal import Entry, Journal, TurnWriter, as_unseen
from strands_sglang.trajectory.turn import TurnStatus

from .supervision import invoke
from .tools import ContainedTool
from .types import Action, StepResult, TokenObservation

if TYPE_CHECKING:
    from .environment import Environment

logger = logging.getLogger(__name__)

Effect = Literal["pure", "idempotent", "once"]
"""What a tool call changes.

- `"pure"`: nothing.
- `"idempotent"`: only what running it again, in the state in which it first ran, changes in the same way.
- `"once"`: something that must not happen twice. The default of a tool that says nothing.
"""

ForkPoints = Literal["all", "none"] | int
"""After which tool iterations the environment's state is kept: all, none, or every n-th."""

_PACKAGES = ("strands-agents", "transformers")
_MAY_CONTINUE = (
    TerminationReason.ABORTED,
    TerminationReason.CANCELLED,
    TerminationReason.INFRASTRUCTURE_ERROR,
)
"""Outcomes after which an episode can be resumed: nothing but the machines ended it."""

T = TypeVar("T")


def has_effect(effect: Effect) -> Callable[[T], T]:
    """Say what calls of a tool change, so that an episode can be resumed and forked.

    Args:
        effect: What they change.

    Returns:
        Decorator of a tool.

    Examples:
        ```python
        @has_effect("pure")
        @tool
        def multiply(a: float, b: float) -> float: ...
        ```
    """

    def set_effect(tool: T) -> T:
        tool.effect = effect  # type: ignore[attr-defined]
        return tool

    return set_effect


def effect_of(tool: AgentTool | None) -> Effect:
    """Return what calls of a tool change: what `has_effect` said, or the hints of an MCP server."""
    said: Effect | None = getattr(tool, "effect", None)
    if said is not None:
        return said
    hints = getattr(getattr(tool, "mcp_tool", None), "annotations", None)
    if getattr(hints, "readOnlyHint", None):
        return "pure"
    return "idempotent" if getattr(hints, "idempotentHint", None) else "once"


class Recorder(HookProvider):
    """Writes the journal of one episode, as a hook of its agent.

    Attributes:
        journal: The journal.
        trajectory: The episode's trajectory; None for models that record none.
    """

    def __init__(self, journal: Journal, environment: Environment) -> None:
        """Create the recorder; `begin` or `go_on` starts it."""
        self.journal = journal
        self.trajectory: Trajectory | None = None
        self._environment = environment
        self._began = time.monotonic()
        self._turns = TurnWriter(self._write)
        self._messages: list[Message] = []  # as written
        self._agent: Any = None  # its own state, as written
        self._running: set[str] = set()
        self._changing = 0  # calls that are not pure since the state was kept
        self._iterations = 0
        self._is_lost = False

    def begin(self, attempt: int, action: Action, point: Checkpoint | None) -> None:
        """Begin an attempt at an episode, or continue one.

        Args:
            attempt: Its number.
            action: The task.
            point: Where it continues; None to begin.

        Raises:
            JournalError: Another one writes the journal, or it cannot be written and must be.
        """
        environment = self._environment
        self._began = time.monotonic()
        self._turns = TurnWriter(self._write)
        self._messages, self._agent = [], None
        self._write("writer", {"host": platform.node(), "process": os.getpid()}, {})
        if point is not None:
            self._began -= point.seconds
            self._messages, self._agent = list(point.messages), point.agent
            self._turns.go_on(point.trajectory)
            return
        if environment.restart_only is not None:
            why = environment.restart_only
            logger.warning("why=<%s> | episodes can be read in their journals, but not resumed", why)
        self._write(
            "attempt",
            {
                "attempt": attempt,
                "action": encode_bytes_values(action.model_dump()),
                "environment": environment.identity(),
                "restart_only": environment.restart_only,
                "packages": {"strands-sglang": __version__, **{name: version(name) for name in _PACKAGES}},
            },
            {},
        )

    def record(self, trajectory: Trajectory | None) -> None:
        """Write the turns of the episode's trajectory from now on."""
        self.trajectory = trajectory
        if trajectory is not None:
            trajectory.on_record = self._turns.add

    async def keep_state(self) -> None:
        """Write the environment's own state, if it has one."""
        data, tensors = await self._state()
        if data:
            self.write("state", data, tensors)

    def end(self, result: StepResult) -> None:
        """Write how the episode ended, with its result, unless it may continue."""
        if result.termination_reason in _MAY_CONTINUE:
            return
        end = None if self.trajectory is None else self.trajectory.end
        left_out = {"observation": {"messages", "tokens", "trajectory"}}
        dumped = to_jsonable_python(result.model_dump(exclude=left_out), fallback=str)
        self.write("end", {"end": None if end is None else asdict(end), "result": dumped})

    def close(self) -> None:
        """Let others have the journal."""
        if self.trajectory is not None:
            self.trajectory.on_record = None
        self.journal.close()

    def write(self, kind: str, data: dict[str, Any], tensors: Mapping[str, Any] | None = None) -> None:
        """Write an entry, with what has changed of earlier turns.

        Raises:
            JournalError: It cannot be written, and the environment's episodes must be protected.
        """
        if self.trajectory is not None:
            data = {**data, "changed": self._turns.changed(self.trajectory.turns)}
        self._write(kind, data, tensors or {})

    def _write(self, kind: str, data: Any, tensors: Mapping[str, Any]) -> None:
        if self._is_lost:
            return
        try:
            self.journal.append(kind, data, tensors)
        except (JournalError, TypeError) as error:
            self._is_lost = True
            if self._environment.journal_required:
                raise JournalError(f"the episode cannot be protected: {error}") from error
            logger.warning("error=<%s> | from here on this episode is not protected by its journal", error)

    # --- hooks ---

    @override
    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register after the hooks that decide about calls."""
        registry.add_callback(BeforeModelCallEvent, self._keep_messages, order=HookOrder.SDK_LAST)
        registry.add_callback(MessageAddedEvent, self._keep_messages)
        registry.add_callback(BeforeToolCallEvent, self._before_tool, order=HookOrder.SDK_LAST)
        registry.add_callback(AfterToolCallEvent, self._after_tool, order=HookOrder.SDK_FIRST)

    def _keep_messages(self, event: Any) -> None:
        """Write the messages that are new, or that differ from the written ones."""
        messages, known = event.agent.messages, self._messages
        same = len(known)
        if len(messages) < same or any(old is not new for old, new in zip(known, messages, strict=False)):
            pairs = zip(known, messages, strict=False)
            same = next((at for at, (old, new) in enumerate(pairs) if old is not new), len(messages))
        if same == len(messages) == len(known):
            return
        agent = event.agent.take_snapshot(include=["state", "model_state"]).data
        data = {
            "at": same,
            "messages": encode_bytes_values(messages[same:]),
            "seconds": round(time.monotonic() - self._began, 3),
        }
        if agent != self._agent:
            data["agent"] = self._agent = agent
        self._messages = list(messages)
        self.write("messages", data)

    def _before_tool(self, event: BeforeToolCallEvent) -> None:
        if event.cancel_tool or event.selected_tool is None:
            return
        use, tool = event.tool_use, event.selected_tool
        effect = self._environment.tool_effect(tool.tool if isinstance(tool, ContainedTool) else tool)
        self._running.add(use["toolUseId"])
        self._changing += effect != "pure"
        self.write("tool", {"call": use["toolUseId"], "name": use["name"], "effect": effect})

    async def _after_tool(self, event: AfterToolCallEvent) -> None:
        use_id = event.tool_use["toolUseId"]
        if use_id not in self._running:
            return
        self._running.discard(use_id)
        data: dict[str, Any] = {"call": use_id, "result": encode_bytes_values(event.result)}
        tensors: Mapping[str, Any] = {}
        if self._changing and not self._running:
            self._iterations += 1
            points = self._environment.fork_points
            if points == "all" or (points != "none" and self._iterations % points == 0):
                state, tensors = await self._state()
                data |= state
        self.write("result", data, tensors)

    async def _state(self) -> tuple[dict[str, Any], Mapping[str, Any]]:
        if self._environment.restart_only is not None:
            return {}, {}
        state = await invoke(self._environment.save_state)
        self._changing = 0
        if isinstance(state, bytes):
            return {"state": None}, {"state": np.frombuffer(state, np.uint8)}
        return {"state": state}, {}


# --- to continue ---


@dataclass
class Checkpoint:
    """Where an episode continues.

    Attributes:
        attempt: Number of the attempt.
        action: The task.
        environment: Identity of the environment.
        restart_only: Why the environment cannot continue its episodes; None if it can.
        content: The content of the journal up to there.
        trajectory: The turns up to there.
        messages: The agent's messages.
        agent: The agent's own state, as in Strands' snapshots.
        seconds: Seconds that the episode has taken.
        state: The environment's own state.
        results: Results of the calls of the last message that have ended, by toolUseId.
        repeated: Ids of the calls that have ended since the state was kept, and that changed it.
        interrupted: Why it cannot continue although its environment can; None if it can.
        result: The result of the episode, if it has ended.
    """

    attempt: int
    action: dict[str, Any]
    environment: dict[str, Any]
    restart_only: str | None
    content: bytes
    trajectory: Trajectory
    messages: list[Message] = field(default_factory=list)
    agent: dict[str, Any] | None = None
    seconds: float = 0.0
    state: Any = None
    results: dict[str, ToolResult] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    interrupted: str | None = None
    result: dict[str, Any] | None = None

    async def restore(self, agent: Agent, limiter: ToolLimiter, known: int) -> None:
        """Give a new agent the messages, its own state and the counts of the episode's agent.

        Calls that have changed the environment's state since it was kept run again; their recorded results stay.

        Args:
            agent: The new agent.
            limiter: Its limiter.
            known: Number of messages before the prompt.

        Raises:
            EpisodeInterruptedError: The episode cannot continue.
        """
        if self.interrupted is not None:
            raise EpisodeInterruptedError(self.interrupted)
        if not self.messages:
            return
        agent.messages[:] = self.messages
        if self.agent is not None:
            agent.load_snapshot(Snapshot("agent", "1.0", self.agent, {}))
        new = self.messages[known:]
        answers = [message for message in new if message["role"] == "assistant"]
        for answer in answers:
            metadata: Any = answer.get("metadata")
            if metadata is None:  # Strands wrote it
                continue
            totals: Any = agent.event_loop_metrics
            for total, added in (
                (totals.accumulated_usage, metadata["usage"]),
                (totals.accumulated_metrics, metadata["metrics"]),
            ):
                total.update({name: total.get(name, 0) + count for name, count in added.items()})
        # Strands counts a cycle again that begins with the tools.
        agent.event_loop_metrics.cycle_count = len(answers) - bool(tool_uses(self.messages))
        limiter.count(new)
        if self.state is not None:
            uses = [use for message in self.messages for use in tool_uses([message])]
            for use in uses:
                if use["toolUseId"] in self.repeated:
                    tool = agent.tool_registry.registry[use["name"]]
                    async for _ in tool.stream(use, {"agent": agent}):
                        pass

    def agent_result(self, agent: Agent, limiter: ToolLimiter) -> AgentResult:
        """Return what an invocation of the agent that ended here would have returned."""
        last = self.messages[-1]
        stop_reason: Any = "end_turn"
        if limiter.limit_reached is not None:
            stop_reason = "cancelled"
        elif last["role"] == "user":
            stop_reason = "limit_turns"
        elif (leaf := self.trajectory.main_leaf()) is not None and leaf.is_cut_short:
            stop_reason = "max_tokens"
        return AgentResult(stop_reason, last, agent.event_loop_metrics, {})

    def step_result(self) -> StepResult:
        """Return the result of an episode that has ended."""
        result = StepResult.model_validate(self.result)
        result.observation.messages = self.messages
        result.observation.trajectory = self.trajectory
        sequence = self.trajectory.latest_main_sequence()
        result.observation.tokens = TokenObservation.from_token_manager(sequence)
        return result


def tool_uses(messages: Sequence[Message]) -> list[ToolUse]:
    """Return the tool calls of the last message: those that wait for results."""
    return [block["toolUse"] for block in messages[-1]["content"] if "toolUse" in block] if messages else []


def checkpoint(journal: Journal, index: int | None = None) -> Checkpoint:
    """Read where an episode continues.

    Args:
        journal: Its journal.
        index: The `Turn.index` of a model call to continue before; None to continue at the end.

    Raises:
        JournalError: The journal holds no episode, or the turn is none to continue before.
        TrajectoryFileError: The journal is damaged, or has an unknown version.
        OSError: It cannot be read.
    """
    entries = journal.entries()
    attempts = [position for position, entry in enumerate(entries) if entry.kind == "attempt"]
    if not attempts:
        raise JournalError(f"{journal}: no episode has begun in it")
    if index is not None:
        entries = entries[: _position_before(entries, attempts[-1], index, journal)]
    begun = entries[attempts[-1]].data
    trajectory = _trajectory(entries[attempts[-1] :])
    point = Checkpoint(
        begun["attempt"],
        decode_bytes_values(begun["action"]),
        begun["environment"],
        begun["restart_only"],
        journal.content()[: entries[-1].end],
        trajectory,
    )
    effects: dict[str, Mapping[str, Any]] = {}
    open_calls: dict[str, Mapping[str, Any]] = {}
    for entry in entries[attempts[-1] :]:
        data = entry.data
        if entry.kind == "messages":
            point.messages[data["at"] :] = decode_bytes_values(data["messages"])
            point.agent = data.get("agent", point.agent)
            point.seconds = data["seconds"]
        elif entry.kind == "tool":
            effects[data["call"]] = open_calls[data["call"]] = data
        elif entry.kind == "result":
            open_calls.pop(data["call"], None)
            point.results[data["call"]] = decode_bytes_values(data["result"])
            if effects[data["call"]]["effect"] != "pure":
                point.repeated.append(data["call"])
        elif entry.kind == "end":
            point.result = data["result"]
        if "state" in data:
            point.state = entry.tensors["state"].tobytes() if "state" in entry.tensors else data["state"]
            point.repeated.clear()
    if point.result is not None:
        return point
    for use_id, call in open_calls.items():
        if call["effect"] == "once":
            point.interrupted = (
                f"{journal}: the call {use_id} of the tool {call['name']!r} has begun, its end is not recorded, and it "
                "must not run twice"
            )
    for use_id in point.repeated:
        if point.state is not None and effects[use_id]["effect"] == "once":
            point.interrupted = (
                f"{journal}: the environment's state was not kept after the call {use_id} of the tool "
                f"{effects[use_id]['name']!r}, which must not run twice"
            )
    return point


def _trajectory(entries: Sequence[Entry]) -> Trajectory:
    """Return the turns of an attempt, so that its next calls continue from what is sampled."""
    entries = list(entries)
    main = next((entry.data["turn"]["agent"] for entry in entries if entry.kind == "turn"), None)
    parse_errors: Mapping[str, int] = {}
    unseen = None
    for position, entry in enumerate(entries):
        if "messages" in entry.data and unseen is not None and _has_answer(entry):
            unseen = None
        if entry.kind != "turn":
            continue
        turn = entry.data["turn"]
        if turn["agent"] == main and not turn["is_auxiliary"] and turn["status"] == "answered":
            unseen = position, parse_errors
        parse_errors = entry.data["tool_parse_errors"]
    if unseen is not None:
        entries[unseen[0]] = as_unseen(entries[unseen[0]], unseen[1])
    trajectory = Trajectory.of_entries(entries)
    for turn in trajectory.turns:
        if turn.status is TurnStatus.CUT and not turn.is_whole and not turn.constrained:
            trajectory.resume(turn)
    return trajectory


def _has_answer(entry: Entry) -> bool:
    return any(message["role"] == "assistant" for message in entry.data["messages"])


def _position_before(entries: Sequence[Entry], begin: int, index: int, journal: Journal) -> int:
    """Return the position of the entry of a turn before which an episode can continue."""
    turns = {turn.index: turn for turn in Trajectory.of_entries(entries).turns}
    if index not in turns:
        known = ", ".join(map(str, turns)) or "none"
        raise JournalError(f"{journal}: there is no turn {index!r} to continue before; its turns: {known}")
    turn = turns[index]
    main = next(turn for turn in turns.values() if not turn.is_auxiliary)
    if turn.is_auxiliary or turn.agent != main.agent:
        raise JournalError(f"{journal}: turn {index} is a helper's or a sub-agent's; fork at one of the main agent")
    if turn.status is TurnStatus.DISCARDED:
        raise JournalError(f"{journal}: turn {index} was discarded: {turn.note}; fork at one that was kept")
    key = turn.key.hex()  # an attempt that failed before asked the same
    asked = (entry.kind == "turn" and entry.data["turn"]["key"] == key for entry in entries[begin:])
    return begin + [*asked].index(True)
