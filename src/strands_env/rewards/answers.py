"""Ground truths and questions of tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from ..core.types import Action, RewardError


def ground_truths(action: Action) -> list[str]:
    """Return the right answers of a task as strings.

    Raises:
        RewardError: The task has no ground truth.
    """
    try:
        return truth_texts(action.task_context.ground_truth)
    except ValueError as error:
        raise RewardError(f"task {action.task_context.id!r}: {error}") from error


def truth_texts(truth: Any) -> list[str]:
    """Return a ground truth, or each of a list of ground truths, as a string.

    Raises:
        ValueError: It is not a string, a number, or a list of them.
    """
    truths = list(truth) if isinstance(truth, Sequence) and not isinstance(truth, str | bytes) else [truth]
    if not truths or not all(_is_truth(truth) for truth in truths):
        raise ValueError(f"the ground truth must be a string, a number or a list of them, not {truth!r:.200}")
    return [str(truth) for truth in truths]


def _is_truth(value: Any) -> bool:
    """Whether a value is a string or a number. Empty cells of tables are NaN, which is neither."""
    is_number = not isinstance(value, float) or not math.isnan(value)
    return value is not None and is_number and not isinstance(value, bytes | Mapping | Set) and bool(str(value).strip())


def question_of(action: Action) -> str:
    """Return the text of a task's last user message."""
    if isinstance(action.message, str):
        return action.message
    messages = action.message if isinstance(action.message, list) else [action.message]
    for message in reversed(messages):
        if message.get("role", "user") == "user":
            content = message.get("content", "")
            if isinstance(content, str):
                return content
            return "\n".join(block["text"] for block in content if "text" in block)
    return ""
