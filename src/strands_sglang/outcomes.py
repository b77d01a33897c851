"""Outcomes of model calls and episodes: one row per cause, from the server to the trainer.

| cause | outcome | reward | slime status |
|---|---|---|---|
| stop token, no tool call | task_complete | computed | COMPLETED |
| `max_new_tokens` reached | max_tokens_reached | computed | TRUNCATED |
| context full: no room left, or clamped to it | context_window_overflow | computed | TRUNCATED |
| a limit on tools, messages, turns or tokens | max_*_reached | computed | TRUNCATED |
| episode wall clock | timeout | computed if it has an answer | TRUNCATED |
| a call's `deadline`, while a server was working on it | timeout | computed if it has an answer | TRUNCATED |
| server abort (weight update, pause) | aborted | none | ABORTED if the trainer requested it, else TRUNCATED, removed |
| caller cancelled | cancelled | none | ABORTED |
| server or network failed; a `deadline`, no server working | infrastructure_error | none | FAILED, removed |
| the agent's own code raised | agent_error | none | FAILED, removed |
| its process died inside a tool call that must not run twice | interrupted | none | FAILED, removed |
| nothing sampled at all | as its cause | as its cause | FAILED, removed |

An infrastructure failure never turns into a reward, and a truncated turn never looks complete.
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
    EpisodeInterruptedError,
    JournalError,
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
    """Reason why an episode ended.

    [`OUTCOMES`][strands_sglang.OUTCOMES] has the reward rule and the slime status of each.
    """

    TASK_COMPLETE = "task_complete"
    """The model ended its turn without calling a tool."""
    MAX_TOKENS_REACHED = "max_tokens_reached"
    """The last turn was cut off at `max_new_tokens`."""
    CONTEXT_WINDOW_OVERFLOW = "context_window_overflow"
    """The prompt did not fit the context, or the last turn was cut off where the context ends."""
    MAX_TOOL_ITERATIONS_REACHED = "max_tool_iterations_reached"
    """The limit on tool iterations was reached."""
    MAX_TOOL_CALLS_REACHED = "max_tool_calls_reached"
    """The limit on single tool calls was reached."""
    MAX_MESSAGES_REACHED = "max_messages_reached"
    """The limit on messages was reached."""
    MAX_TURNS_REACHED = "max_turns_reached"
    """The budget of model calls was used up."""
    TOKEN_BUDGET_REACHED = "token_budget_reached"
    """The budget of sampled or total tokens was used up."""
    TIMEOUT = "timeout"
    """The time of the episode was over, or the `deadline` of a model call while a server was working on it."""
    ABORTED = "aborted"
    """The server aborted the generation: a weight update, a pause, or an abort request."""
    CANCELLED = "cancelled"
    """The caller cancelled the episode."""
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    """The server or the network failed after all retries, or a `deadline` passed while no server was working."""
    AGENT_ERROR = "agent_error"
    """The agent's own code raised."""
    INTERRUPTED = "interrupted"
    """The process died inside a tool call whose effect must not happen twice, so the episode cannot be resumed."""


class RewardRule(str, Enum):
    """Rule for the reward of an episode, by its outcome."""

    COMPUTED = "computed"
    """The reward function decides."""
    COMPUTED_IF_ANSWERED = "computed_if_answered"
    """The reward function decides if the model gave an answer; otherwise there is no reward."""
    NONE = "none"
    """There is no reward."""


@dataclass(frozen=True)
class Outcome:
    """Consequences of a termination reason.

    Attributes:
        reward: Rule for the reward.
        slime_status: Name of slime's `Sample.Status`.
        remove_sample: Whether the sample is excluded from the loss.
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
    TerminationReason.INTERRUPTED: _FAILED,
}
"""Outcome of each termination reason.

Two cases depend on more than the reason: no token was sampled, or the trainer did not request the abort.
[`outcome_of`][strands_sglang.outcome_of] includes them.
"""

MAY_CONTINUE = frozenset(
    {TerminationReason.ABORTED, TerminationReason.CANCELLED, TerminationReason.INFRASTRUCTURE_ERROR}
)
"""Outcomes after which an episode with a journal can be resumed: only the machines or the caller ended it."""

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
    JournalError: TerminationReason.INFRASTRUCTURE_ERROR,
    EpisodeInterruptedError: TerminationReason.INTERRUPTED,
    asyncio.CancelledError: TerminationReason.CANCELLED,
    KeyboardInterrupt: TerminationReason.CANCELLED,
    asyncio.TimeoutError: TerminationReason.TIMEOUT,
    TimeoutError: TerminationReason.TIMEOUT,
}
"""Reasons by type of error. The first match wins, so specific types precede general ones."""


def outcome_of(reason: TerminationReason, *, sampled_tokens: int, abort_requested: bool = False) -> Outcome:
    """Return the consequences of an episode's end.

    An episode without sampled tokens has the slime status FAILED and its sample is removed. An aborted episode that the
    trainer did not abort itself is TRUNCATED and removed, because slime cannot use an aborted sample that it did not
    request.

    Args:
        reason: Reason why the episode ended.
        sampled_tokens: Number of tokens that the model sampled in the episode.
        abort_requested: Whether the trainer itself requested the abort.
    """
    outcome = OUTCOMES[reason]
    if sampled_tokens == 0:
        return replace(outcome, slime_status="FAILED", remove_sample=True)
    if reason is TerminationReason.ABORTED and not abort_requested:
        # Removed, because slime would score a truncated sample with its reward function.
        return replace(outcome, slime_status="TRUNCATED", remove_sample=True)
    return outcome


def termination_reason(
    end: Any, *, trajectory: Trajectory | None = None, limiter: ToolLimiter | None = None
) -> TerminationReason:
    """Return the reason why an episode ended.

    Args:
        end: The `AgentResult` that the agent returned, or the exception that it raised. Causes are found inside the
            wrappers of Strands, such as `EventLoopException`.
        trajectory: Trajectory of the episode, `model.trajectory`. Without it, a turn that was cut off where the context
            ends counts as `max_tokens_reached`.
        limiter: Limiter of the agent. Without it, a loop that a limiter stopped (`on_limit="stop"`) counts as
            `cancelled`.

    Examples:
        ```python
        try:
            end = agent("What is 25 * 17?")
        except Exception as error:
            end = error
        reason = termination_reason(end, trajectory=model.trajectory, limiter=limiter)
        print(reason.value, OUTCOMES[reason].slime_status)
        ```
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
            return TerminationReason.TIMEOUT  # the server was working on it; otherwise none answered
        for kind, reason in _BY_ERROR.items():
            if isinstance(cause, kind):
                return reason
    return TerminationReason.AGENT_ERROR
