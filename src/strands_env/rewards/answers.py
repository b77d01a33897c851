"""What rewards look at: the answer of an episode, and what it is compared with."""

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
MAX_JOINER = 40  # characters between boxes that give one answer together


def ground_truths(action: Action) -> list[str]:
    """The right answers of a task as texts: one, or each of a list.

    Raises:
        RewardError: The task has none.
    """
    try:
        return truth_texts(action.task_context.ground_truth)
    except ValueError as error:
        raise RewardError(f"task {action.task_context.id!r} has {error}") from error


def truth_texts(truth: Any) -> list[str]:
    """A ground truth as texts: one, or each of a list.

    Raises:
        ValueError: There is none.
    """
    several = list(truth) if isinstance(truth, Sequence) and not isinstance(truth, str | bytes) else [truth]
    if not several or not all(_is_truth(one) for one in several):
        raise ValueError(f"no ground truth to compare with, but {truth!r:.200}")
    return [str(one) for one in several]


def _is_truth(one: Any) -> bool:
    """Whether something is a text or a number. NaN is what tables have where they have nothing."""
    is_number = not isinstance(one, float) or not math.isnan(one)
    return one is not None and is_number and not isinstance(one, bytes | Mapping | Set) and bool(str(one).strip())


def question_of(action: Action) -> str:
    """The text of the last message of a task that is a user's."""
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
    r"""What stands in the last complete `\boxed{...}` (or `\fbox{...}`) of a text; None if there is none.

    Braces are matched; escaped ones are text. Linear in the length of the text.
    """
    boxes = _boxes(text)
    return text[boxes[-1][1] : boxes[-1][2]] if boxes else None


def boxed_answer(text: str) -> str | None:
    r"""The answer in boxes: the last one, with those that stand joined to it, as in `\boxed{2}` and `\boxed{3}`."""
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
    """Where the complete boxes begin, where their contents begin and where these end, in the order of the ends."""
    found: list[tuple[int, int, int]] = []
    open_braces: list[tuple[int, int] | None] = []  # for each where its box and its content begin, if it is one's
    for match in _BRACES.finditer(text):
        mark = match[0]
        if mark == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                found.append((*box, match.start()))
        elif mark == "{":
            open_braces.append(None)
        elif len(mark) > 2:  # no escaped character
            open_braces.append((match.start(), match.end()))
    return found
