"""What an episode may spend, and the hooks that hold it to that.

Every budget ends the loop where the history is whole: behind the results of a turn's tools.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from strands import Agent
from strands.hooks import HookOrder, HookProvider, HookRegistry
from strands.hooks.events import AfterModelCallEvent, BeforeToolCallEvent
from strands.types.tools import AgentTool, ToolSpec, ToolUse
from typing_extensions import override

from strands_sglang import ToolLimiter

from .supervision import as_failure, in_thread

logger = logging.getLogger(__name__)

OUT_OF_TIME = "Error: the tool did not finish within"
"""How the result of a call that took too long begins."""


@dataclass(frozen=True)
class Budgets:
    """What one episode may spend; None for any amount.

    Attributes:
        max_tool_iterations: Assistant messages with tool calls, together with their results.
        max_tool_calls: Single tool calls; those beyond, in one message, too, are not run.
        max_parallel_tool_calls: Tool calls run per assistant message.
        max_turns: Model calls.
        max_sampled_tokens: Tokens that the agent's model calls sampled; checked between turns.
        max_total_tokens: Tokens of the agent's prompts and answers, summed over its calls; checked between turns.
        tool_timeout: Seconds for one tool call.
    """

    max_tool_iterations: int | None = None
    max_tool_calls: int | None = None
    max_parallel_tool_calls: int | None = None
    max_turns: int | None = None
    max_sampled_tokens: int | None = None
    max_total_tokens: int | None = None
    tool_timeout: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name, number in (
            ("max_tool_iterations", 0),
            ("max_tool_calls", 0),
            ("max_parallel_tool_calls", 0),
            ("max_turns", 1),
            ("max_sampled_tokens", 1),
            ("max_total_tokens", 1),
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < number):
                raise ValueError(f"{name} must be a whole number of at least {number} or None, not {value!r}")

    def left(self, agent: Agent) -> dict[str, int]:
        """What is left, as Strands takes it; a number below 1 is spent."""
        metrics = agent.event_loop_metrics
        spent = {
            "turns": (self.max_turns, metrics.cycle_count),
            "total_tokens": (self.max_total_tokens, metrics.accumulated_usage["totalTokens"]),
            "output_tokens": (self.max_sampled_tokens, metrics.accumulated_usage["outputTokens"]),
        }
        return {name: most - used for name, (most, used) in spent.items() if most is not None}


class EpisodeHooks(HookProvider):
    """Holds one episode's agent to its budgets: keeps tool calls beyond them from running, and contains the others.

    Attributes:
        limiter: Counts tool iterations and calls, and ends the loop at their limits.
        model_error: What the latest call of the model raised, which tells a provider's errors from those of the agent's
            own code; None if it gave an answer.
    """

    def __init__(self, budgets: Budgets) -> None:
        """Watch one episode."""
        self._budgets = budgets
        self.limiter = ToolLimiter(
            max_tool_iters=budgets.max_tool_iterations,
            max_tool_calls=budgets.max_tool_calls,
            max_parallel_tool_calls=budgets.max_parallel_tool_calls,
            on_limit="stop",
        )
        self.model_error: BaseException | None = None

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register with the episode's agent, the limiter first."""
        self.limiter.register_hooks(registry)
        registry.add_callback(AfterModelCallEvent, self._note)
        registry.add_callback(BeforeToolCallEvent, self._check, order=HookOrder.SDK_LAST)

    def _note(self, event: AfterModelCallEvent) -> None:
        self.model_error = event.exception

    def _check(self, event: BeforeToolCallEvent) -> None:
        excess = self._excess(event)
        if excess is not None:
            event.cancel_tool = f"This tool call was not run: at most {excess} may be made."
        elif event.selected_tool is not None:
            is_named = event.selected_tool.tool_name == event.tool_use["name"]  # a renamed call is still to find it
            if is_named or self._budgets.tool_timeout is not None:
                event.selected_tool = ContainedTool(event.selected_tool, self._budgets.tool_timeout)

    def _excess(self, event: BeforeToolCallEvent) -> str | None:
        """The budget that a call is beyond, if any."""
        most_iterations, most_calls = self._budgets.max_tool_iterations, self._budgets.max_tool_calls
        if most_iterations is not None and self.limiter.tool_iter_count > most_iterations:
            return f"{most_iterations} rounds of tool calls"
        if most_calls is None or self.limiter.tool_call_count <= most_calls:
            return None
        # The limiter has counted all calls of the message; those at its end are too many.
        uses = [block["toolUse"]["toolUseId"] for block in event.agent.messages[-1]["content"] if "toolUse" in block]
        excess = uses[most_calls - self.limiter.tool_call_count :]
        return f"{most_calls} tool calls" if event.tool_use["toolUseId"] in excess else None


class ContainedTool(AgentTool):
    """A tool that harms nothing but its own call.

    What would end this process, its event loop or the agent's task (`SystemExit`, `KeyboardInterrupt`,
    `CancelledError`) is an error that the model gets to see; a tool that evaluates what a model wrote raises one when
    that says `exit()`. Functions that block have a thread of their own each. A call may end after some seconds, with
    an error; its thread goes on by itself, and its result is dropped.
    """

    def __init__(self, tool: AgentTool, seconds: float | None = None) -> None:
        """Contain a tool, whose calls may take so long."""
        super().__init__()
        self._tool = _in_own_threads(tool)
        self._seconds = seconds

    @property
    @override
    def tool_name(self) -> str:
        """The tool's."""
        return self._tool.tool_name

    @property
    @override
    def tool_spec(self) -> ToolSpec:
        """The tool's."""
        return self._tool.tool_spec

    @property
    @override
    def tool_type(self) -> str:
        """The tool's."""
        return self._tool.tool_type

    @override
    async def stream(
        self, tool_use: ToolUse, invocation_state: dict[str, Any], **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """The tool's events; an error result when the time is up."""
        events: asyncio.Queue[Any] = asyncio.Queue()
        end = object()

        async def pump() -> None:
            # In a task of its own throughout: a generator's context must not change from event to event, and a
            # cancellation that comes from in here is the tool's.
            try:
                async for event in self._tool.stream(tool_use, invocation_state, **kwargs):
                    events.put_nowait(event)
            except BaseException as error:
                raise as_failure(error) from None
            finally:
                events.put_nowait(end)

        loop = asyncio.get_running_loop()
        until = None if self._seconds is None else loop.time() + self._seconds
        pumping = loop.create_task(pump())
        pumping.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, whoever is still there
        try:
            while True:
                try:
                    left = None if until is None else max(until - loop.time(), 0.0)
                    event = await asyncio.wait_for(events.get(), left)
                except asyncio.TimeoutError:
                    if not pumping.done():
                        yield self._out_of_time(tool_use)
                        return
                    event = events.get_nowait()  # the tool is done; only the loop was late to fetch what it gave
                if event is end:
                    break
                yield event
            await asyncio.wait({pumping})
            pumping.result()  # an error of the tool's own, timeouts included
        except asyncio.CancelledError:
            pumping.cancel()
            await asyncio.wait({pumping})  # what the tool does at its end is done before the environment's cleanup
            raise
        finally:
            pumping.cancel()

    def _out_of_time(self, tool_use: ToolUse) -> dict[str, Any]:
        logger.info("tool=<%s>, seconds=<%s> | a tool call ran out of time", self.tool_name, self._seconds)
        return {
            "toolUseId": tool_use["toolUseId"],
            "status": "error",
            "content": [{"text": f"{OUT_OF_TIME} {self._seconds:g} seconds."}],
        }


def _in_own_threads(tool: AgentTool) -> AgentTool:
    """A tool of Strands' that runs a function in the event loop's shared threads, with a thread for each call."""
    function = getattr(tool, "_tool_func", None)
    if not callable(function) or inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return tool

    async def threaded(*args: Any, **kwargs: Any) -> Any:
        return await in_thread(function, *args, **kwargs)

    own = copy.copy(tool)
    own._tool_func = functools.wraps(function)(threaded)  # type: ignore[attr-defined]
    return own
