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
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic_core import to_jsonable_python
from strands import Agent, Snapshot
from strands.hooks import HookOrder, HookProvider, HookRegistry
from strands.hooks.events import AfterToolCallEvent, AgentInitializedEvent, BeforeModelCallEvent, BeforeToolCallEvent
from strands.types.content import Message
from strands.types.session import decode_bytes_values, encode_bytes_values
from strands.types.tools import AgentTool, ToolResult, ToolUse
from typing_extensions import override

from strands_sglang import (
    MAY_CONTINUE,
    EpisodeInterruptedError,
    Journal,
    JournalError,
    JournalInUseError,
    SGLangModel,
    ToolLimiter,
    Trajectory,
    Turn,
    TurnStatus,
)
from strands_sglang.trajectory.journal import (
    Entry,
    TurnWriter,
    as_unseen,
    discard_unfinished,
    in_words,
    read_entries,
    versions,
)

from .supervision import invoke
from .tools import ContainedTool
from .types import Action, StepResult, TokenObservation

if TYPE_CHECKING:
    from .environment import Environment, EpisodeHooks

logger = logging.getLogger(__name__)

Effect = Literal["pure", "idempotent", "once"]
"""What a tool call changes.

- `"pure"`: nothing.
- `"idempotent"`: only what running it again, in the state in which it first ran, changes in the same way.
- `"once"`: something that must not happen twice. The default of a tool that says nothing.
"""

ForkPoints = Literal["all", "none"] | int
"""After which tool iterations the environment's state is kept: all, none, or every n-th."""

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


_call: ContextVar[str | None] = ContextVar("strands_env_call", default=None)
"""The tool call that the running code is inside of, which may be over."""


class Recorder(HookProvider):
    """Writes the journal of one episode, as a hook of its agent.

    The agent's messages are written with the next entry of any kind. A process that dies before has lost none of them:
    an answer is in its turn's entry, and a result in its call's.

    Attributes:
        journal: The journal.
        trajectory: The episode's trajectory; None for models that record none.
        lost: Why the journal does not protect the episode any longer; None while it does.
        is_resumable: Whether the journal is the episode's own, and ends where the episode does.
        user_has_spoken: Whether `next_user_message` may have changed the environment's state, which is not kept yet.
    """

    def __init__(self, journal: Journal, environment: Environment) -> None:
        """Create the recorder; `begin` starts it."""
        self.journal = journal
        self.trajectory: Trajectory | None = None
        self.lost: JournalError | None = None
        self.is_resumable = True
        self.user_has_spoken = False
        self._environment = environment

    def begin(self, attempt: int, action: Action, point: Checkpoint | None, hooks: EpisodeHooks) -> None:
        """Begin an attempt at an episode, or continue one.

        Args:
            attempt: Its number.
            action: The task.
            point: Where it continues; None to begin.
            hooks: The hooks of its agent.

        Raises:
            JournalInUseError: Another one writes the journal.
            JournalError: It cannot be written, and must be.
        """
        self.trajectory, self.lost, self.is_resumable, self.user_has_spoken = None, None, True, False
        self._began = time.monotonic()
        self._turns = TurnWriter(self._write_turn)
        self._hooks = hooks
        self._agent: Agent | None = None
        self._messages: list[Message] = []  # as written
        self._agent_state: Any = None  # as written
        self._running: set[str] = set()
        self._has_changed = False  # since the state was kept
        self._iterations = 0
        self._entries = 0
        self._quiet = "", 0  # the pure call that is not written, and the entries before it
        if point is None:
            self._write_beginning(attempt, action)
        else:
            self._began -= point.seconds
            self._turns.continue_with(point.trajectory)
        self._write("writer", {"host": platform.node(), "process": os.getpid()}, {})
        self.check()

    def check(self) -> None:
        """End an episode that is not protected any longer, if it must be.

        Raises:
            JournalError: Why it is not.
        """
        if self.lost is not None and self._environment.journal_required:
            raise self.lost

    def _write_beginning(self, attempt: int, action: Action) -> None:
        environment = self._environment
        why_not = environment.restart_only
        if why_not is not None:
            logger.warning("why=<%s> | episodes can be read in their journals, but not resumed", why_not)
        begun = {
            "attempt": attempt,
            "action": encode_bytes_values(action.model_dump(serialize_as_any=True)),
            "environment": environment.identity(),
            "restart_only": why_not,
            "packages": versions(),
        }
        self._write("attempt", begun, {})

    def record(self, trajectory: Trajectory | None) -> None:
        """Write the turns of the episode's trajectory from now on."""
        self.trajectory = trajectory
        if trajectory is not None:
            trajectory.on_record = self._turns.add

    async def keep_state(self) -> None:
        """Write the environment's own state."""
        data, tensors = await self._state()
        if data:
            self._write("state", data, tensors)

    def end(self, result: StepResult) -> None:
        """Write how the episode ended, with its result, unless it may continue."""
        if self.trajectory is not None:
            self.trajectory.on_record = None
        if may_continue(result):
            return
        end = None if self.trajectory is None else self.trajectory.end
        changed = {} if self.trajectory is None else {"tool_results": self.trajectory.tool_results}
        left_out = {"observation": {"messages", "tokens", "trajectory"}}
        try:
            dumped = to_jsonable_python(result.model_dump(exclude=left_out), fallback=str, bytes_mode="base64")
        except Exception as error:  # what metrics hold is the environment's
            self._lose(error)
            return
        self._write("end", {"end": None if end is None else asdict(end), "result": dumped, **changed}, {})

    def _write_turn(self, kind: str, data: dict[str, Any], tensors: Mapping[str, Any]) -> None:
        self._write(kind, {**data, "call": _call.get()}, tensors)

    def _write(self, kind: str, data: dict[str, Any], tensors: Mapping[str, Any]) -> None:
        """Write an entry, with the agent's new messages and what has changed of earlier turns.

        Raises:
            JournalInUseError: Another one writes the journal.
        """
        if self.lost is not None:
            return
        try:
            # Sub-agents record their turns in threads of tools.
            with nullcontext() if self.trajectory is None else self.trajectory.lock:
                data = {**self._new_messages(), **data}
                if self.trajectory is not None and kind != "turn":
                    data["changed"] = self._turns.changed(self.trajectory.turns)
                self.journal.append(kind, data, tensors)
                self._entries += 1
        except JournalInUseError as error:
            self.lost, self.is_resumable = error, False
            raise
        except (JournalError, TypeError, ValueError) as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        self.lost = JournalError(f"the episode cannot be protected: {error}")
        if self._environment.journal_required:  # the episode ends, and can be resumed from here
            return
        logger.warning("error=<%s> | from here on this episode is not protected by its journal", error)
        self.is_resumable = False  # it continues without the journal
        self.journal.close()
        with suppress(OSError):
            self.journal.path.replace(self.journal.path.with_suffix(".lost"))

    def _new_messages(self) -> dict[str, Any]:
        """Return the messages that are new, or that differ from the written ones."""
        if self._agent is None:
            return {}
        messages, known = self._agent.messages, self._messages
        same = 0
        for old, new in zip(known, messages, strict=False):
            if old != new and old != encode_bytes_values(new):  # a hook may change one in place
                break
            same += 1
        if same == len(messages) == len(known):
            return {}
        known[same:] = encode_bytes_values(messages[same:])
        metrics = self._agent.event_loop_metrics
        data = {
            "at": same,
            "messages": known[same:],
            "seconds": round(time.monotonic() - self._began, 3),
            "limiter": self._hooks.limiter.counts(),
            "cycles": metrics.cycle_count,
            "usage": metrics.accumulated_usage,
            "latency": metrics.accumulated_metrics,
        }
        changed = self._hooks.changed_results(messages[same:])
        if changed:
            data["tool_results"] = changed
        state = self._agent.take_snapshot(include=["state", "model_state"]).data
        if state != self._agent_state:
            data["agent"] = self._agent_state = state
        return data

    # --- hooks ---

    @override
    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register after the hooks that decide about calls."""
        registry.add_callback(AgentInitializedEvent, self._know)
        registry.add_callback(BeforeModelCallEvent, self._before_model)
        registry.add_callback(BeforeToolCallEvent, self._before_tool, order=HookOrder.SDK_LAST)
        registry.add_callback(AfterToolCallEvent, self._after_tool, order=HookOrder.SDK_FIRST)

    def _know(self, event: AgentInitializedEvent) -> None:
        self._agent = event.agent

    async def _before_model(self, event: BeforeModelCallEvent) -> None:
        if self.user_has_spoken and self._environment.fork_points != "none":
            await self.keep_state()  # with what the user said: one without the other would be said twice
        self.user_has_spoken = False
        self.check()

    def _before_tool(self, event: BeforeToolCallEvent) -> None:
        self.check()
        if event.cancel_tool or event.selected_tool is None:
            return
        use, tool = event.tool_use, event.selected_tool
        _call.set(use["toolUseId"])
        if isinstance(tool, ContainedTool):
            if tool.recorded is not None:  # it does not run
                return
            tool = tool.tool
        effect = self._environment.tool_effect(tool)
        is_alone = len(tool_uses(event.agent.messages)) == 1
        if effect == "pure" and is_alone:  # it would return the same again, unless sub-agents answer in it
            self._quiet = use["toolUseId"], self._entries
            return
        self._running.add(use["toolUseId"])
        self._has_changed |= effect != "pure"
        self._write("tool", {"call": use["toolUseId"], "name": tool.tool_name, "effect": effect}, {})

    async def _after_tool(self, event: AfterToolCallEvent) -> None:
        use_id = event.tool_use["toolUseId"]
        has_sampled = self._quiet[0] == use_id and self._quiet[1] != self._entries
        if use_id not in self._running and not has_sampled:
            return
        self._running.discard(use_id)
        data: dict[str, Any] = {"call": use_id, "result": encode_bytes_values(event.result)}
        if event.invocation_state.get("request_state", {}).get("stop_event_loop"):
            data["stops"] = True
        tensors: Mapping[str, Any] = {}
        if self._has_changed and not self._running:
            self._iterations += 1
            points = self._environment.fork_points
            if points == "all" or (points != "none" and self._iterations % points == 0):
                self._has_changed = False
                state, tensors = await self._state()
                data |= state
        self._write("result", data, tensors)

    async def _state(self) -> tuple[dict[str, Any], Mapping[str, Any]]:
        if self._environment.restart_only is not None or self.lost is not None:
            return {}, {}
        try:
            state = await invoke(self._environment.save_state)
        except Exception as error:
            self._lose(error)
            return {}, {}
        if isinstance(state, bytes):
            return {"state": None}, {"state": memoryview(state)}
        return {"state": encode_bytes_values(state)}, {}


# --- to continue ---


def may_continue(result: StepResult) -> bool:
    """Return whether an episode continues from its journal: it did not end, or its judge was out of reach."""
    return result.termination_reason in MAY_CONTINUE or result.reward_error_is_infrastructure


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
        agent_id: Its id in the trajectory; None if it has not asked.
        seconds: Seconds that the episode has taken.
        counts: What the agent and its limiter have counted.
        state: The environment's own state.
        results: Results of the calls of the last message that have ended, by toolUseId.
        has_stopped: Whether one of these calls ends the loop.
        returned: What earlier calls returned, by toolUseId, before hooks have changed or removed it.
        repeated: The calls that have ended since the state was kept, and that changed it, by toolUseId.
        asked_again: Answers to sub-agents in calls that had not ended: the calls run again, and ask again.
        interrupted: Why it cannot continue although its environment can; None if it can.
        result: The result of the episode, if it has ended.
    """

    attempt: int
    action: dict[str, Any]
    environment: dict[str, Any]
    restart_only: str | None
    content: bytes
    trajectory: Trajectory = field(default_factory=Trajectory)
    messages: list[Message] = field(default_factory=list)
    agent: dict[str, Any] | None = None
    agent_id: str | None = None
    seconds: float = 0.0
    counts: Mapping[str, Any] = field(default_factory=dict)
    state: Any = None
    results: dict[str, ToolResult] = field(default_factory=dict)
    has_stopped: bool = False
    returned: dict[str, ToolResult | None] = field(default_factory=dict)
    repeated: dict[str, ToolUse] = field(default_factory=dict)
    asked_again: list[Turn] = field(default_factory=list)
    interrupted: str | None = None
    result: dict[str, Any] | None = None

    def restore(self, agent: Agent, limiter: ToolLimiter) -> None:
        """Give a new agent the messages, its own state and the counts of the episode's agent.

        Args:
            agent: The new agent.
            limiter: Its limiter.

        Raises:
            EpisodeInterruptedError: The episode cannot continue.
        """
        if self.interrupted is not None:
            raise EpisodeInterruptedError(self.interrupted)
        if self.agent_id is not None and isinstance(agent.model, SGLangModel):
            agent.model.continue_as(agent, self.agent_id)
        discard_unfinished(self.asked_again)
        if not self.messages:
            return
        agent.messages[:] = self.messages
        if self.agent is not None:
            agent.load_snapshot(Snapshot("agent", "1.0", self.agent, {}))
        limiter.restore(self.counts["limiter"])
        metrics: Any = agent.event_loop_metrics
        metrics.cycle_count = self.counts["cycles"] - 1  # the cycle that was cut begins again
        metrics.accumulated_usage.update(self.counts["usage"])
        metrics.accumulated_metrics.update(self.counts["latency"])

    async def repeat_calls(self, agent: Agent, seconds: float | None) -> None:
        """Run the calls again that have changed the environment's state since it was kept; their results stay.

        Args:
            agent: The new agent.
            seconds: Time limit of each call; None for no limit.

        Raises:
            JournalError: A tool is not registered any longer.
        """
        for use in self.repeated.values():
            tool = agent.tool_registry.registry.get(use["name"])
            if tool is None:
                raise JournalError(f"a call of the tool {use['name']!r} cannot run again: there is no such tool")
            async for _ in ContainedTool(tool, seconds).stream(use, {"agent": agent}):
                pass

    def step_result(self, history_length: int) -> StepResult:
        """Return the result of an episode that has ended.

        Args:
            history_length: Number of messages that are not part of its observation.
        """
        result = StepResult.model_validate(self.result)
        result.observation.messages = self.messages[history_length:]
        result.observation.trajectory = self.trajectory if len(self.trajectory) else None
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
    content = journal.content()
    entries = [*read_entries(content, str(journal))]
    begin = max((at for at, entry in enumerate(entries) if entry.kind == "attempt"), default=None)
    if begin is None:
        raise JournalError(f"{journal}: no episode has begun in it")
    end = len(entries) if index is None else _position_before(entries, begin, index, journal)
    begun = entries[begin].data
    point = Checkpoint(
        begun["attempt"],
        decode_bytes_values(begun["action"]),
        begun["environment"],
        begun["restart_only"],
        content[: entries[end - 1].end],
    )
    begun_calls: dict[str, Mapping[str, Any]] = {}
    callers: dict[int, str] = {}
    parse_errors: dict[int, Mapping[str, int]] = {}
    open_calls: dict[str, None] = {}
    uses: dict[str, ToolUse] = {}  # of all messages, also of those that a hook has removed
    repeated: dict[str, ToolUse] = {}
    stopped: set[str] = set()
    unseen: int | None = None
    for at, entry in enumerate(entries[begin : end + 1], begin):
        data = entry.data
        if "messages" in data:  # written with the entry that followed them
            new = decode_bytes_values(data["messages"])
            point.messages[data["at"] :] = new
            for use in chain.from_iterable(tool_uses([message]) for message in new):
                uses[use["toolUseId"]] = use
            point.agent = data.get("agent", point.agent)
            point.returned |= results_in(new)
            point.seconds, point.counts = data["seconds"], data
            if any(message["role"] == "assistant" for message in data["messages"]):
                unseen = None
        point.returned |= decode_bytes_values(data.get("tool_results", {}))
        if at == end:
            break
        if entry.kind == "turn":
            turn = data["turn"]
            if not turn["is_auxiliary"]:
                point.agent_id = point.agent_id or turn["agent"]
            if turn["agent"] != point.agent_id:
                callers[turn["index"]] = data["call"]
                parse_errors[turn["index"]] = data["tool_parse_errors"]
            elif turn["status"] == TurnStatus.ANSWERED.value:
                unseen = at
        elif entry.kind == "tool":
            begun_calls[data["call"]] = data
            open_calls[data["call"]] = None
            point.results.pop(data["call"], None)  # a hook runs it once more
        elif entry.kind == "result":
            point.results[data["call"]] = decode_bytes_values(data["result"])
            open_calls.pop(data["call"], None)
            if data.get("stops"):
                stopped.add(data["call"])
            call = begun_calls.get(data["call"])  # none of a pure one
            if call is not None and call["effect"] != "pure":
                repeated[data["call"]] = {**uses[data["call"]], "name": call["name"]}
        elif entry.kind == "end":
            point.result, unseen = data["result"], None  # a hook may have removed the answer
        if "state" in data:
            archive = entry.tensors.get("state")
            point.state = decode_bytes_values(data["state"]) if archive is None else archive.tobytes()
            repeated.clear()
    turns = entries[begin:end]
    if unseen is not None:
        turns[unseen - begin] = as_unseen(entries[unseen])
    point.trajectory = Trajectory.of_entries(turns)
    for turn in point.trajectory.turns:
        if turn.status is TurnStatus.CUT and (turn.is_whole or not turn.constrained):
            point.trajectory.resume(turn)
    if point.state is not None:
        point.repeated = repeated
    ended = {*point.results, *results_in(point.messages)}
    inside = [turn for turn in point.trajectory.turns if callers.get(turn.index) not in (None, *ended)]
    point.asked_again = [turn for turn in inside if turn.is_answered]
    counts = point.trajectory.tool_parse_errors
    for turn in point.asked_again:
        for name, count in parse_errors[turn.index].items():
            counts[name] = counts.get(name, 0) - count
    for use_id in (*open_calls, *point.repeated):
        call = begun_calls[use_id]
        if call["effect"] == "once":
            what = "its end" if use_id in open_calls else "the environment's state after it"
            point.interrupted = (
                f"{journal}: the call {use_id} of the tool {call['name']!r} has begun, {what} is not recorded, and it "
                "must not run twice"
            )
    waiting = {use["toolUseId"] for use in tool_uses(point.messages)}  # a provider may use an id again
    point.results = {use_id: result for use_id, result in point.results.items() if use_id in waiting}
    point.has_stopped = not stopped.isdisjoint(point.results)
    return point


def results_in(messages: Sequence[Message]) -> dict[str, ToolResult]:
    """Return the results of tools in messages, by toolUseId."""
    blocks = chain.from_iterable(message["content"] for message in messages)
    results = [block["toolResult"] for block in blocks if "toolResult" in block]
    return {result["toolUseId"]: result for result in results}


def _position_before(entries: Sequence[Entry], begin: int, index: int, journal: Journal) -> int:
    """Return the position of the first entry of a turn, or of an attempt that failed before and asked the same."""
    turns: dict[int, Mapping[str, Any]] = {}
    states: dict[int, Any] = {}
    for entry in entries[begin:]:
        states |= {int(changed): state for changed, state in entry.data.get("changed", {}).items()}
        if entry.kind == "turn":
            turns[entry.data["turn"]["index"]] = entry.data["turn"]
    kept = {known: turn for known, turn in turns.items() if states.get(known, ()) is not None}
    if index not in kept:
        known = ", ".join(map(str, kept)) or "none"
        raise JournalError(f"{journal}: there is no turn {index!r} to continue before; its turns: {known}")
    turn = kept[index]
    main = next(turn["agent"] for turn in kept.values() if not turn["is_auxiliary"])
    if turn["is_auxiliary"] or turn["agent"] != main:
        raise JournalError(f"{journal}: turn {index} is a helper's or a sub-agent's; fork at one of the main agent")
    status, _, fate = states.get(index, [turn["status"], None, None])
    if status == TurnStatus.DISCARDED.value:
        raise JournalError(f"{journal}: turn {index} was discarded: {in_words(fate)}; fork at one that was kept")
    asked = (entry.kind == "turn" and entry.data["turn"]["key"] == turn["key"] for entry in entries[begin:])
    return begin + [*asked].index(True)
