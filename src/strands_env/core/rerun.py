"""A recorded episode that runs again: its model calls, its tools and its user answer from the record."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from strands.hooks import HookOrder, HookProvider, HookRegistry
from strands.hooks.events import AfterToolCallEvent, BeforeToolCallEvent
from strands.types.content import Message
from strands.types.session import decode_bytes_values, encode_bytes_values
from strands.types.tools import ToolResult
from typing_extensions import override

from strands_sglang import TerminationReason, Trajectory
from strands_sglang.trajectory.recording import Difference, Recording

from .durable import results_in
from .tools import ContainedTool
from .types import Action, StepResult

ENDED_BY_OTHERS = frozenset(
    {
        *(TerminationReason.TIMEOUT, TerminationReason.ABORTED, TerminationReason.CANCELLED),
        *(TerminationReason.INFRASTRUCTURE_ERROR, TerminationReason.INTERRUPTED),
    }
)
"""Outcomes that clocks and machines decide: a run ends where such a record does."""

_LIMITS = (TerminationReason.MAX_TURNS_REACHED, TerminationReason.TOKEN_BUDGET_REACHED)

Tools = Literal["recorded", "live"]
"""Whether tools return what they returned then, or run."""


@dataclass
class RecordedEpisode:
    """What a file holds of an episode.

    Attributes:
        name: What reports call it.
        action: The task.
        result: The episode as it ended, with its messages.
        trajectory: Its model calls.
        identity: Identity of its environment; None if it is unknown.
    """

    name: str
    action: Action
    result: StepResult
    trajectory: Trajectory
    identity: Mapping[str, Any] | None = None

    @property
    def outcome(self) -> TerminationReason:
        """How the episode ended, as its model calls have it; a file of results may say something else."""
        end = self.trajectory.end
        noted = None if end is None else end.outcome
        return self.result.termination_reason if noted is None else TerminationReason(noted)

    def tool_results(self) -> dict[str, ToolResult | None]:
        """Return what the tools returned, by toolUseId; None for a call that did not run."""
        return {**results_in(self.result.observation.messages), **decode_bytes_values(self.trajectory.tool_results)}


@dataclass
class Rerun(HookProvider):
    """Runs a recorded episode again, as a hook of its agent.

    Attributes:
        episode: The recorded episode.
        tools: Whether its tools run.
        recording: Answers the model's calls.
    """

    episode: RecordedEpisode
    tools: Tools = "recorded"
    recording: Recording = field(init=False)

    def __post_init__(self) -> None:
        """Begin at the first model call."""
        self.recording = Recording(self.episode.trajectory, is_cut_off=self.episode.outcome in ENDED_BY_OTHERS)
        self._results = self.episode.tool_results()

    @override
    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register around all other hooks."""
        registry.add_callback(BeforeToolCallEvent, self._before_tool, order=HookOrder.SDK_LAST)
        registry.add_callback(AfterToolCallEvent, self._after_tool, order=HookOrder.SDK_FIRST)

    def next_user_message(self, messages: Sequence[Message], before: int) -> str | None:
        """Return what the user said next; None if the episode ended there.

        Args:
            messages: The agent's messages.
            before: Number of messages that the record leaves out.
        """
        recorded = self.episode.result.observation.messages
        at = len(messages) - before
        outcome = self.episode.outcome
        if at >= len(recorded):
            self.recording.has_ended = outcome not in (TerminationReason.TASK_COMPLETE, *_LIMITS)
            return "The record ends here." if outcome in _LIMITS else None
        return "".join(block.get("text", "") for block in recorded[at]["content"])

    def _before_tool(self, event: BeforeToolCallEvent) -> None:
        use = event.tool_use
        if use["toolUseId"] not in self._results:
            self.recording.has_ended = self.recording.is_cut_off
            if not self.recording.is_cut_off:
                what = f"a call of {use['name']} that is not recorded"
                self.recording.note(Difference(what, self._turn(use), now=use["input"], stage="tools"))
            event.cancel_tool = "the record ends here"
            return
        recorded = self._results[use["toolUseId"]]
        if (recorded is None) is not bool(event.cancel_tool):
            then, now = ("did not run" if is_skipped else "ran" for is_skipped in (recorded is None, event.cancel_tool))
            self.recording.note(Difference(f"whether {use['name']} runs", self._turn(use), None, then, now))
            event.cancel_tool = "the replay ends here"
        if event.selected_tool is not None and recorded is not None and self.tools == "recorded":
            event.selected_tool = ContainedTool(event.selected_tool, recorded=copy.deepcopy(recorded))

    def _after_tool(self, event: AfterToolCallEvent) -> None:
        if self.tools == "recorded" and self._has_ended_the_loop():
            event.invocation_state.setdefault("request_state", {})["stop_event_loop"] = True
        recorded = self._results.get(event.tool_use["toolUseId"])
        if self.tools == "recorded" or recorded is None or event.cancel_message or event.selected_tool is None:
            return
        then: Any
        now: Any
        then, now = ({"status": "success", **result, "toolUseId": ""} for result in (recorded, event.result))
        if then != now and _as_json(then) != _as_json(now):
            what = f"the result of {event.tool_use['name']}"
            if then["status"] == now["status"]:
                then, now = then["content"], now["content"]
            self.recording.note(Difference(what, self._turn(event.tool_use), None, then, now, "tools"))

    def _has_ended_the_loop(self) -> bool:
        """Whether the record ends with the results of tools, which have ended it."""
        messages = self.episode.result.observation.messages
        is_last = any("toolResult" in block for block in messages[-1]["content"])
        is_complete = self.episode.outcome is TerminationReason.TASK_COMPLETE
        return is_last and is_complete and self.recording.is_over()

    def _turn(self, use: Any) -> int | None:
        for turn in self.episode.trajectory.turns:
            if any(call["toolUseId"] == use["toolUseId"] for call in turn.tool_calls):
                return turn.index
        return None


def _as_json(result: Any) -> str:
    """Return a result as a file has it: NaN is itself, a tuple a list, and a key a text."""
    read = json.loads(json.dumps(encode_bytes_values(result), default=repr))
    return json.dumps(read, sort_keys=True)
