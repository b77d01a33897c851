"""Tools whose failures and delays affect only their own call."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
from collections.abc import AsyncGenerator
from typing import Any

from strands.types.tools import AgentTool, ToolResult, ToolSpec, ToolUse
from typing_extensions import override

from .supervision import as_exception, run_in_thread, start_limited

logger = logging.getLogger(__name__)

TOOL_TIMEOUT_PREFIX = "Error: the tool did not finish within"
"""The start of the result of a tool call that timed out."""


class ContainedTool(AgentTool):
    """A tool whose failures affect only its own call.

    Exceptions that would end the process, its event loop or the agent's task (`SystemExit`, `KeyboardInterrupt`,
    `CancelledError`) become errors that the model sees. A tool that evaluates a model's code raises one when the code
    calls `exit()`. Each call of a blocking function runs in its own thread. A call that times out ends with an error;
    its thread keeps running, and its result is dropped.

    Attributes:
        tool: The tool.
        recorded: What the call returned before; None if it runs.
    """

    def __init__(self, tool: AgentTool, seconds: float | None = None, *, recorded: ToolResult | None = None) -> None:
        """Wrap a tool.

        Args:
            tool: The tool.
            seconds: Time limit of each call; None for no limit.
            recorded: What the call returned before; the tool does not run again. None to run it.
        """
        super().__init__()
        self.tool = tool
        self.recorded = recorded
        function = getattr(tool, "_tool_func", None)
        if callable(function) and not (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)):
            # Strands runs it in the event loop's shared threads; here each call has its own thread.
            async def threaded(*args: Any, **kwargs: Any) -> Any:
                return await run_in_thread(function, *args, **kwargs)

            tool = copy.copy(tool)
            tool._tool_func = functools.wraps(function)(threaded)  # type: ignore[attr-defined]
        self._tool = tool
        self._seconds = seconds

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Class of the wrapped tool: Strands asks for it, to end the loop with the answer of an agent, for example."""
        return self.tool.__class__

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped tool."""
        if name == "tool":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.tool, name)

    @property
    @override
    def tool_name(self) -> str:
        """Name of the wrapped tool."""
        return self._tool.tool_name

    @property
    @override
    def tool_spec(self) -> ToolSpec:
        """Specification of the wrapped tool."""
        return self._tool.tool_spec

    @property
    @override
    def tool_type(self) -> str:
        """Type of the wrapped tool."""
        return self._tool.tool_type

    @override
    async def stream(
        self, tool_use: ToolUse, invocation_state: dict[str, Any], **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Stream the tool's events; an error result if it times out."""
        if self.recorded is not None:
            yield self.recorded
            return
        events: asyncio.Queue[Any] = asyncio.Queue()
        end = object()

        async def pump() -> None:
            # One task for the whole call: a generator's context must not change between events, and a cancellation
            # raised in here is the tool's own.
            try:
                async for event in self._tool.stream(tool_use, invocation_state, **kwargs):
                    events.put_nowait(event)
            except BaseException as error:
                raise as_exception(error) from None
            finally:
                events.put_nowait(end)

        late = object()
        pumping = start_limited(pump(), self._seconds, lambda: events.put_nowait(late))
        pumping.add_done_callback(lambda task: task.cancelled() or task.exception())  # mark the exception as retrieved
        try:
            while True:
                event = await events.get()
                if event is late:
                    if pumping.done():  # only the loop was late
                        continue
                    logger.info("tool=<%s>, seconds=<%s> | a tool call timed out", self.tool_name, self._seconds)
                    text = {"text": f"{TOOL_TIMEOUT_PREFIX} {self._seconds:g} seconds."}
                    yield {"toolUseId": tool_use["toolUseId"], "status": "error", "content": [text]}
                    return
                if event is end:
                    break
                yield event
            await asyncio.wait({pumping})
            pumping.result()  # raise the tool's own error, timeouts included
        except asyncio.CancelledError:
            pumping.cancel()
            await asyncio.wait({pumping})  # the tool finishes before the environment's cleanup
            raise
        finally:
            pumping.cancel()
