"""Limits on an agent's tool loop, as a Strands hook; nothing here knows about SGLang.

`ToolLimiter` counts what the agent's loop adds to the history and ends the loop where the history is whole: when the
results of an iteration have been added. Nothing that was sampled is cut, and nothing that was not sampled is added.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Literal
from weakref import WeakSet

from strands.hooks import HookOrder, HookProvider, HookRegistry
from strands.hooks.events import AfterInvocationEvent, BeforeInvocationEvent, BeforeToolCallEvent, MessageAddedEvent
from strands.types.content import Message

from .exceptions import causes

logger = logging.getLogger(__name__)

OnLimit = Literal["raise", "stop"]


class LoopLimitReachedError(Exception):
    """A limit on the agent's loop was reached. Strands wraps it in `EventLoopException`; see `limit_cause`.

    Attributes:
        outcome: Value of the `TerminationReason`; a limit of one's own may set another one.
    """

    outcome: ClassVar[str] = "max_tool_iterations_reached"


class MaxToolIterationsReachedError(LoopLimitReachedError):
    """The agent has made as many tool iterations as it may."""


class MaxToolCallsReachedError(LoopLimitReachedError):
    """The agent has made as many single tool calls as it may, or more in its last iteration."""

    outcome = "max_tool_calls_reached"


class MaxMessagesReachedError(LoopLimitReachedError):
    """As many messages as there may be, or more, were added to the history."""

    outcome = "max_messages_reached"


class ToolLimiter(HookProvider):
    """Ends an agent's loop when it has made enough tool iterations or calls, or added enough messages.

    An iteration is one assistant message with tool calls together with their results, however many calls it has. Counts
    run on over invocations until `reset()`; a limiter that several agents share counts what they do together, and stops
    whichever agent reaches the limit. What is added to a history outside an invocation (by direct tool calls) does not
    count.

    The limit is reached as soon as the count is the limit, checked when the iteration's results are in the history; so
    with a limit of 0 the results of the first iteration are the end. Calls of one iteration are never split, so
    `tool_call_count` can end above `max_tool_calls`.

    Attributes:
        max_tool_iters: Tool iterations allowed; None for any number. Likewise the other limits.
        max_tool_calls: Single tool calls allowed.
        max_parallel_tool_calls: Tool calls run per iteration; those beyond get an error result instead.
        max_messages: Messages of all roles allowed, checked when one of the user's role is added.
        on_limit: `"raise"` raises the limit's error (a `LoopLimitReachedError`); `"stop"` ends the invocation with
            `stop_reason == "cancelled"`. After both, the history ends with the message that reached the limit and the
            agent can be used again.
        tool_iter_count: Tool iterations so far.
        tool_call_count: Single tool calls so far, those that were not run included.
        message_count: Messages so far.
        cancelled_tool_call_count: Tool calls so far that `max_parallel_tool_calls` kept from running.
        limit_reached: The error of the limit that ended the latest invocation, None if none did.

    With `"stop"` a loop ends on tool results only: Strands cannot be kept from answering a prompt that is the last
    message allowed without putting words into the model's mouth, so `max_messages` takes effect one iteration later.
    """

    def __init__(
        self,
        max_tool_iters: int | None = None,
        max_tool_calls: int | None = None,
        max_parallel_tool_calls: int | None = None,
        max_messages: int | None = None,
        on_limit: OnLimit = "raise",
    ) -> None:
        """Set the limits.

        Raises:
            ValueError: A limit is not a whole number of at least 0, or `on_limit` is neither `"raise"` nor `"stop"`.
        """
        self.max_tool_iters = _checked("max_tool_iters", max_tool_iters)
        self.max_tool_calls = _checked("max_tool_calls", max_tool_calls)
        self.max_parallel_tool_calls = _checked("max_parallel_tool_calls", max_parallel_tool_calls)
        self.max_messages = _checked("max_messages", max_messages)
        if on_limit not in ("raise", "stop"):
            raise ValueError(f"on_limit must be 'raise' or 'stop', not {on_limit!r}")
        self.on_limit = on_limit
        self._invoked: WeakSet[Any] = WeakSet()
        self.reset()

    def reset(self) -> None:
        """Start counting from 0 again."""
        self.tool_iter_count = 0
        self.tool_call_count = 0
        self.message_count = 0
        self.cancelled_tool_call_count = 0
        self.limit_reached: LoopLimitReachedError | None = None
        self._excess_ids: set[str] = set()

    @property
    def iteration_count(self) -> int:
        """Tool iterations so far; another name of `tool_iter_count`."""
        return self.tool_iter_count

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register with an agent (Strands calls this for everything in `Agent(hooks=[...])`)."""
        registry.add_callback(BeforeInvocationEvent, self._begin)
        registry.add_callback(AfterInvocationEvent, self._end)
        registry.add_callback(BeforeToolCallEvent, self._cancel_excess)
        # Last, so that a session manager has stored the message before the error ends its delivery.
        registry.add_callback(MessageAddedEvent, self._count, order=HookOrder.SDK_LAST)

    def _begin(self, event: BeforeInvocationEvent) -> None:
        self._invoked.add(event.agent)
        self.limit_reached = None

    def _end(self, event: AfterInvocationEvent) -> None:
        self._invoked.discard(event.agent)

    def _count(self, event: MessageAddedEvent) -> None:
        """Count a message; end the loop if it reaches a limit."""
        if event.agent not in self._invoked:
            return
        self.message_count += 1
        if event.message["role"] == "assistant":
            ids = [block["toolUse"]["toolUseId"] for block in event.message["content"] if "toolUse" in block]
            self.tool_iter_count += bool(ids)
            self.tool_call_count += len(ids)
            if self.max_parallel_tool_calls is not None:
                self._excess_ids.update(ids[self.max_parallel_tool_calls :])
            return
        error = self._error(event.message)
        if error is None:
            return
        self.limit_reached = error
        logger.debug("limit=<%s>, on_limit=<%s> | loop limit reached", error, self.on_limit)
        if self.on_limit == "raise":
            raise error
        event.agent.cancel()

    def _error(self, message: Message) -> LoopLimitReachedError | None:
        """Return the error of the limit that a user message reaches, None if it reaches none."""
        results = [block["toolResult"]["toolUseId"] for block in message["content"] if "toolResult" in block]
        self._excess_ids.difference_update(results)
        ends_on_any = bool(results) or self.on_limit == "raise"
        for error, applies, count, limit, what in (
            (MaxToolIterationsReachedError, results, self.tool_iter_count, self.max_tool_iters, "tool iterations"),
            (MaxToolCallsReachedError, results, self.tool_call_count, self.max_tool_calls, "tool calls"),
            (MaxMessagesReachedError, ends_on_any, self.message_count, self.max_messages, "messages"),
        ):
            if applies and limit is not None and count >= limit:
                return error(f"the limit of {limit} {what} was reached")
        return None

    def _cancel_excess(self, event: BeforeToolCallEvent) -> None:
        if event.tool_use["toolUseId"] not in self._excess_ids:
            return
        self.cancelled_tool_call_count += 1
        event.cancel_tool = (
            f"This tool call was not run: at most {self.max_parallel_tool_calls} tool calls may be made at once."
        )


LoopLimiter = ToolLimiter
"""Another name of `ToolLimiter`."""


class ToolIterationLimiter(ToolLimiter):
    """A `ToolLimiter` of tool iterations alone, by the name of an earlier interface."""

    def __init__(self, max_iterations: int | None = None, on_limit: OnLimit = "raise") -> None:
        """Set the limit.

        Raises:
            ValueError: As for `ToolLimiter`.
        """
        super().__init__(max_tool_iters=_checked("max_iterations", max_iterations), on_limit=on_limit)

    @property
    def max_iterations(self) -> int | None:
        """Tool iterations allowed; None for any number."""
        return self.max_tool_iters


def limit_cause(error: BaseException | None) -> LoopLimitReachedError | None:
    """Return the limit's error behind an exception that came out of an agent, None if a limit was not the cause.

    Args:
        error: What the agent raised: the limit's error itself, or anything that was raised from it.
    """
    found = causes(error) if error is not None else ()
    return next((cause for cause in found if isinstance(cause, LoopLimitReachedError)), None)


def _checked(name: str, limit: Any) -> int | None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise ValueError(f"{name} must be a whole number of at least 0 or None, not {limit!r}")
    return limit
