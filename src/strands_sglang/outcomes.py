"""How model calls and episodes end: one row for every cause, from the server to the trainer.

| cause | outcome | reward | slime status |
|---|---|---|---|
| stop token, no tool call | task_complete | computed | COMPLETED |
| `max_new_tokens` reached | max_tokens_reached | computed | TRUNCATED |
| context full: no room left, or clamped to it | context_window_overflow | computed | TRUNCATED |
| a limit on tools, messages, turns or tokens | max_*_reached | computed | TRUNCATED |
| episode wall clock | timeout | computed if it has an answer | TRUNCATED |
| a call's `deadline`, while a server was working on it | timeout | computed if it has an answer | TRUNCATED |
| server abort (weight update, pause) | aborted | none | ABORTED if the trainer asked for it, else TRUNCATED, removed |
| caller cancelled | cancelled | none | ABORTED |
| server, network, undecodable answer; a `deadline`, nobody at work | infrastructure_error | none | FAILED, removed |
| the agent's own code raised | agent_error | none | FAILED, removed |
| nothing sampled at all | as its cause | as its cause | FAILED, removed |

Promise: an infrastructure failure never turns into a reward, and a truncated turn never looks complete.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from strands.types.exceptions import (
    ContextWindowOverflowException,
    MaxTokensReachedException,
    ModelThrottledException,
)

from .exceptions import (
    SGLangAbortedError,
    SGLangCancelledError,
    SGLangClientError,
    SGLangDeadlineError,
    causes,
)
from .tool_limiter import LoopLimitReachedError

if TYPE_CHECKING:
    from .tool_limiter import ToolLimiter
    from .trajectory.trajectory import Trajectory


class TerminationReason(str, Enum):
    """Why an episode ended."""

    TASK_COMPLETE = "task_complete"
    """The model ended its turn without calling a tool."""
    MAX_TOKENS_REACHED = "max_tokens_reached"
    """The last turn was cut off at `max_new_tokens`."""
    CONTEXT_WINDOW_OVERFLOW = "context_window_overflow"
    """The context had no room for the prompt, or the last turn was cut off where the context ends."""
    MAX_TOOL_ITERATIONS_REACHED = "max_tool_iterations_reached"
    """The limit on tool iterations was reached."""
    MAX_TOOL_CALLS_REACHED = "max_tool_calls_reached"
    """The limit on single tool calls was reached."""
    MAX_MESSAGES_REACHED = "max_messages_reached"
    """The limit on messages was reached."""
    MAX_TURNS_REACHED = "max_turns_reached"
    """The budget of model calls was spent."""
    TOKEN_BUDGET_REACHED = "token_budget_reached"
    """The episode's budget of sampled or total tokens was spent."""
    TIMEOUT = "timeout"
    """The episode, or a model call that the server was working on, ran out of time."""
    ABORTED = "aborted"
    """The server aborted the generation: a weight update, a pause, an abort request."""
    CANCELLED = "cancelled"
    """The caller cancelled the episode."""
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    """The server or the network failed, after all retries."""
    AGENT_ERROR = "agent_error"
    """The agent's own code raised."""


class RewardRule(str, Enum):
    """Whether an episode that ended so has a reward."""

    COMPUTED = "computed"
    """The reward function decides."""
    COMPUTED_IF_ANSWERED = "computed_if_answered"
    """The reward function decides if the model gave an answer, else there is none."""
    NONE = "none"
    """There is no reward: the end says nothing about the policy."""


@dataclass(frozen=True)
class Outcome:
    """What follows from a termination reason.

    Attributes:
        reward: Whether there is a reward.
        slime_status: Name of slime's `Sample.Status`.
        remove_sample: Whether the sample is kept out of the loss.
    """

    reward: RewardRule
    slime_status: str
    remove_sample: bool = False


_TRUNCATED = Outcome(RewardRule.COMPUTED, "TRUNCATED")
_FAILED = Outcome(RewardRule.NONE, "FAILED", remove_sample=True)

OUTCOMES: dict[TerminationReason, Outcome] = {
    TerminationReason.TASK_COMPLETE: Outcome(RewardRule.COMPUTED, "COMPLETED"),
    TerminationReason.MAX_TOKENS_REACHED: _TRUNCATED,
    TerminationReason.CONTEXT_WINDOW_OVERFLOW: _TRUNCATED,
    TerminationReason.MAX_TOOL_ITERATIONS_REACHED: _TRUNCATED,
    TerminationReason.MAX_TOOL_CALLS_REACHED: _TRUNCATED,
    TerminationReason.MAX_MESSAGES_REACHED: _TRUNCATED,
    TerminationReason.MAX_TURNS_REACHED: _TRUNCATED,
    TerminationReason.TOKEN_BUDGET_REACHED: _TRUNCATED,
    TerminationReason.TIMEOUT: Outcome(RewardRule.COMPUTED_IF_ANSWERED, "TRUNCATED"),
    TerminationReason.ABORTED: Outcome(RewardRule.NONE, "ABORTED"),
    TerminationReason.CANCELLED: Outcome(RewardRule.NONE, "ABORTED"),
    TerminationReason.INFRASTRUCTURE_ERROR: _FAILED,
    TerminationReason.AGENT_ERROR: _FAILED,
}
"""One row for every reason; `outcome_of` adds the two cases that a reason alone does not tell."""

_BY_STOP_REASON: dict[str, TerminationReason] = {
    "end_turn": TerminationReason.TASK_COMPLETE,
    "stop_sequence": TerminationReason.TASK_COMPLETE,
    "tool_use": TerminationReason.TASK_COMPLETE,  # a tool ended the loop: structured output, a final-answer tool
    "max_tokens": TerminationReason.MAX_TOKENS_REACHED,
    "cancelled": TerminationReason.CANCELLED,
    "limit_turns": TerminationReason.MAX_TURNS_REACHED,
    "limit_output_tokens": TerminationReason.TOKEN_BUDGET_REACHED,
    "limit_total_tokens": TerminationReason.TOKEN_BUDGET_REACHED,
}

_BY_ERROR: dict[type[BaseException], TerminationReason] = {
    MaxTokensReachedException: TerminationReason.MAX_TOKENS_REACHED,
    ContextWindowOverflowException: TerminationReason.CONTEXT_WINDOW_OVERFLOW,
    SGLangAbortedError: TerminationReason.ABORTED,
    SGLangCancelledError: TerminationReason.CANCELLED,
    SGLangClientError: TerminationReason.INFRASTRUCTURE_ERROR,
    ModelThrottledException: TerminationReason.INFRASTRUCTURE_ERROR,
    asyncio.CancelledError: TerminationReason.CANCELLED,
    KeyboardInterrupt: TerminationReason.CANCELLED,
    asyncio.TimeoutError: TerminationReason.TIMEOUT,
    TimeoutError: TerminationReason.TIMEOUT,
}
"""By kind of error; the first that fits, so the special kinds stand before the general ones."""


def outcome_of(reason: TerminationReason, *, sampled_tokens: int, abort_requested: bool = False) -> Outcome:
    """What follows from an episode's end.

    Args:
        reason: Why it ended.
        sampled_tokens: How many tokens the model sampled in it.
        abort_requested: Whether the trainer itself asked the server to abort; else an aborted episode is a truncated
            one, since slime cannot use an aborted sample that it did not ask for.
    """
    outcome = OUTCOMES[reason]
    if sampled_tokens == 0:
        return replace(outcome, slime_status="FAILED", remove_sample=True)
    if reason is TerminationReason.ABORTED and not abort_requested:
        # Removed, since slime would have its reward function score a truncated sample.
        return replace(outcome, slime_status="TRUNCATED", remove_sample=True)
    return outcome


def termination_reason(
    end: Any, *, trajectory: Trajectory | None = None, limiter: ToolLimiter | None = None
) -> TerminationReason:
    """Why an episode ended.

    Args:
        end: What `agent.invoke_async` returned (an `AgentResult`), or the exception that it raised. Causes are found
            through the wrappers that Strands puts around them.
        trajectory: The episode's trajectory, `model.trajectory`: tells a turn that was cut off where the context ends
            from one cut off at the `max_new_tokens` that was asked for.
        limiter: The agent's limiter: tells a loop that it ended (`on_limit="stop"`) from one that the caller cancelled.
    """
    limit = getattr(limiter, "limit_reached", None)
    if not isinstance(end, BaseException):
        reason = _BY_STOP_REASON.get(str(end.stop_reason), TerminationReason.AGENT_ERROR)
        if reason is TerminationReason.CANCELLED and limit is not None:
            return TerminationReason(limit.outcome)
    else:
        reason = _reason_of_exception(end)
    if reason is TerminationReason.MAX_TOKENS_REACHED and trajectory is not None:
        answered = [turn for turn in trajectory.turns if turn.is_answered]
        if answered and answered[-1].ends_at_context_limit:
            return TerminationReason.CONTEXT_WINDOW_OVERFLOW
    return reason


def _reason_of_exception(error: BaseException) -> TerminationReason:
    for cause in causes(error):
        if isinstance(cause, LoopLimitReachedError):
            return TerminationReason(cause.outcome)
        if isinstance(cause, SGLangDeadlineError) and cause.response is not None:
            return TerminationReason.TIMEOUT  # the server had been working on it; else nobody answered
        for kind, reason in _BY_ERROR.items():
            if isinstance(cause, kind):
                return reason
    return TerminationReason.AGENT_ERROR
