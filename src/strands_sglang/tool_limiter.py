"""Limits on an agent's tool loop, as a Strands hook that is independent of SGLang.

`ToolLimiter` counts what the agent's loop adds to the history. It ends the loop when the results of an iteration are in
the history, so no sampled turn is cut and nothing unsampled is added.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

from strands.hooks import HookOrder, HookProvider, HookRegistry
from strands.hooks.events import AfterInvocationEvent, BeforeInvocationEvent, BeforeToolCallEvent, MessageAddedEvent
from strands.types.content import Message

from .exceptions import causes

logger = logging.getLogger(__name__)

OnLimit = Literal["raise", "stop"]

_COUNTS = ("tool_iter_count", "tool_call_count", "message_count", "cancelled_tool_call_count")


class LoopLimitReachedError(Exception):
    """A limit on the agent's loop was reached.

    Strands wraps this error in `EventLoopException`; [`limit_cause`][strands_sglang.limit_cause] finds it.

    Attributes:
        outcome: Value of the `TerminationReason`. A subclass for another limit may set its own.
    """

    outcome: ClassVar[str] = "max_tool_iterations_reached"


class MaxToolIterationsReachedError(LoopLimitReachedError):
    """The agent made the maximum number of tool iterations."""


class MaxToolCallsReachedError(LoopLimitReachedError):
    """The agent made the maximum number of tool calls, or exceeded it in its last iteration."""

    outcome = "max_tool_calls_reached"


class MaxMessagesReachedError(LoopLimitReachedError):
    """The maximum number of messages, or more, was added to the history."""

    outcome = "max_messages_reached"


class ToolLimiter(HookProvider):
    """Strands hook that ends an agent's loop after a number of tool iterations, tool calls or messages.

    An iteration is one assistant message with tool calls, however many, and their results. A limit takes effect as soon
    as the count equals it and the results of the iteration are in the history, so no turn is cut in two. With a limit
    of 0, the loop therefore ends after the results of the first iteration. The calls of one iteration are never split,
    so `tool_call_count` can end above `max_tool_calls`.

    Counts accumulate across invocations until `reset()`. A limiter that several agents share counts for all of them,
    and stops the agent that reaches the limit. Messages added outside an invocation (direct tool calls) do not count.

    Afterwards the history ends with the message that reached the limit, and the agent can be used again.

    Attributes:
        max_tool_iters: Maximum number of tool iterations; None for no limit.
        max_tool_calls: Maximum number of single tool calls; None for no limit.
        max_parallel_tool_calls: Maximum number of tool calls that run per iteration; None for no limit.
        max_messages: Maximum number of messages; None for no limit.
        on_limit: How the loop ends, `"raise"` or `"stop"`.
        tool_iter_count: Number of tool iterations so far.
        tool_call_count: Number of single tool calls so far, including those that did not run.
        message_count: Number of messages so far.
        cancelled_tool_call_count: Number of tool calls that `max_parallel_tool_calls` kept from running.
        limit_reached: Error of the limit that ended the latest invocation; None if none did.

    Examples:
        ```python
        limiter = ToolLimiter(max_tool_iters=5, max_tool_calls=20, on_limit="stop")
        agent = Agent(model=model, tools=[multiply], hooks=[limiter])
        agent("What is 25 * 17?")
        print(limiter.tool_iter_count, limiter.limit_reached)
        ```
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

        Args:
            max_tool_iters: Maximum number of tool iterations; None for no limit.
            max_tool_calls: Maximum number of single tool calls; None for no limit.
            max_parallel_tool_calls: Maximum number of tool calls that run per iteration; None for no limit. Further
                calls get an error result instead.
            max_messages: Maximum number of messages of all roles, checked when a user message is added; None for no
                limit.
            on_limit: `"raise"` raises the error of the limit, a `LoopLimitReachedError`. `"stop"` ends the invocation
                with `stop_reason == "cancelled"`, without an exception and without the error that Strands logs for
                each one; prefer it for many rollouts. It ends a loop on tool results only, so `max_messages` can take
                effect one iteration later.

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
        self._invocations: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # a re-entrant agent has several at once
        self.reset()

    def reset(self) -> None:
        """Start counting from 0 again."""
        self.tool_iter_count = 0
        self.tool_call_count = 0
        self.message_count = 0
        self.cancelled_tool_call_count = 0
        self.limit_reached: LoopLimitReachedError | None = None
        self._excess_ids: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the limits and the counts, but not which agents of this process are invoked now."""
        return {name: value for name, value in vars(self).items() if name != "_invocations"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the limits and the counts."""
        vars(self).update(state, _invocations=WeakKeyDictionary())

    @property
    def iteration_count(self) -> int:
        """Number of tool iterations so far; alias of `tool_iter_count`."""
        return self.tool_iter_count

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register with an agent; Strands calls this for each of `Agent(hooks=[...])`."""
        # An error of another hook must neither follow the beginning nor precede the end.
        registry.add_callback(BeforeInvocationEvent, self._begin, order=HookOrder.SDK_LAST)
        registry.add_callback(AfterInvocationEvent, self._end, order=HookOrder.SDK_FIRST)
        registry.add_callback(BeforeToolCallEvent, self._cancel_excess)
        # Last, so that a session manager has stored the message before the error ends its delivery.
        registry.add_callback(MessageAddedEvent, self._count, order=HookOrder.SDK_LAST)

    def _begin(self, event: BeforeInvocationEvent) -> None:
        self._invocations[event.agent] = self._invocations.get(event.agent, 0) + 1
        self.limit_reached = None

    def _end(self, event: AfterInvocationEvent) -> None:
        self._invocations[event.agent] = max(self._invocations.get(event.agent, 0) - 1, 0)

    def _count(self, event: MessageAddedEvent) -> None:
        """Count a message, and end the loop if it reaches a limit."""
        if not self._invocations.get(event.agent):
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

    def counts(self) -> dict[str, Any]:
        """Return the counts as data that JSON can hold, for `restore`."""
        return {**{name: getattr(self, name) for name in _COUNTS}, "excess_ids": sorted(self._excess_ids)}

    def restore(self, counts: Mapping[str, Any]) -> None:
        """Count on from what another limiter has counted.

        Args:
            counts: What its `counts` returned.
        """
        for name in _COUNTS:
            setattr(self, name, counts[name])
        self._excess_ids = {*counts["excess_ids"]}

    def _error(self, message: Message) -> LoopLimitReachedError | None:
        """Return the error of the limit that a user message reaches; None if it reaches none."""
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
"""Alias of `ToolLimiter`."""


class ToolIterationLimiter(ToolLimiter):
    """`ToolLimiter` for tool iterations only, under the name of an earlier interface."""

    def __init__(self, max_iterations: int | None = None, on_limit: OnLimit = "raise") -> None:
        """Set the limit.

        Args:
            max_iterations: Maximum number of tool iterations; None for no limit.
            on_limit: `"raise"` or `"stop"`; see [`ToolLimiter`][strands_sglang.ToolLimiter].

        Raises:
            ValueError: The limit is not a whole number of at least 0, or `on_limit` is neither `"raise"` nor `"stop"`.
        """
        super().__init__(max_tool_iters=_checked("max_iterations", max_iterations), on_limit=on_limit)

    @property
    def max_iterations(self) -> int | None:
        """Maximum number of tool iterations; None for no limit."""
        return self.max_tool_iters


def limit_cause(error: BaseException | None) -> LoopLimitReachedError | None:
    """Return the limit's error inside an exception of an agent.

    Args:
        error: Exception that the agent raised: the limit's error itself, or any that was raised from it.

    Returns:
        The error of the limit; None if no limit caused the exception.
    """
    found = causes(error) if error is not None else ()
    return next((cause for cause in found if isinstance(cause, LoopLimitReachedError)), None)


def _checked(name: str, limit: Any) -> int | None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise ValueError(f"{name} must be a whole number of at least 0 or None, not {limit!r}")
    return limit
