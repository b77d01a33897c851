"""Episodes as rewards get them, made of a text."""

from __future__ import annotations

from typing import Any

from strands_env.core import Action, Observation, StepResult, TaskContext, TerminationReason


def task(ground_truth: Any = None, message: Any = "What is it?") -> Action:
    """A task with a right answer."""
    return Action(message=message, task_context=TaskContext(id="t1", ground_truth=ground_truth))


def answered(text: str | None) -> StepResult:
    """An episode that ended with a text, or without one."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"text": "What is it?"}]}]
    if text is not None:
        messages.append({"role": "assistant", "content": [{"text": text}]})
    return StepResult(observation=Observation(messages=messages), termination_reason=TerminationReason.TASK_COMPLETE)
