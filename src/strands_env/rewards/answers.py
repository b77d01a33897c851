"""Answers and ground truths: finding them in texts and tasks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from ..core.types import Action, RewardError

_BRACES = re.compile(r"\\f?box(?:ed)?\s*\{|\\.|[{}]", re.DOTALL)
_JOINED = re.compile(
    r"[\s$]*(?:[,;]|,?\s*(?:\\text\{\s*)?(?:or|and)(?:\s*\})?)(?:\s+(?:possibly|perhaps|maybe|also))?[\s$]*"
)
MAX_JOINER = 40  # most characters between boxes that form one answer


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
    if not truths or not all(_is_truth(one) for one in truths):
        raise ValueError(f"the ground truth must be a string, a number or a list of them, not {truth!r:.200}")
    return [str(one) for one in truths]


def _is_truth(one: Any) -> bool:
    """Whether a value is a string or a number. Empty cells of tables are NaN, which is neither."""
    is_number = not isinstance(one, float) or not math.isnan(one)
    return one is not None and is_number and not isinstance(one, bytes | Mapping | Set) and bool(str(one).strip())


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


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` or `\fbox{...}`.

    Nested braces are matched, and escaped braces are text. Takes time linear in the length of the text.

    Args:
        text: Text to search.

    Returns:
        The content, or None if the text has no complete box.
    """
    boxes = _boxes(text)
    return text[boxes[-1][1] : boxes[-1][2]] if boxes else None


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last box and of the boxes joined to it, as in `\boxed{2}` and `\boxed{3}`."""
    boxes = _boxes(text)
    if not boxes:
        return None
    start, begin, end = boxes.pop()
    parts = [text[begin:end]]
    while boxes:
        earlier, begin, end = boxes.pop()
        if end < start and _JOINED.fullmatch(text[end + 1 : start][-MAX_JOINER:]) and start - end <= MAX_JOINER:
            parts.append(text[begin:end])
            start = earlier
        elif end < start:
            break
    return ", ".join(reversed(parts))


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Return the start of each complete box, and the start and end of its content, ordered by end."""
    found: list[tuple[int, int, int]] = []
    open_braces: list[tuple[int, int] | None] = []  # for a box's brace: the start of the box and of its content
    for match in _BRACES.finditer(text):
        mark = match[0]
        if mark == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                found.append((*box, match.start()))
        elif mark == "{":
            open_braces.append(None)
        elif len(mark) > 2:  # not an escaped character
            open_braces.append((match.start(), match.end()))
    return found
