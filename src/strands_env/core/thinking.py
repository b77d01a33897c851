"""What a model thinks aloud, taken off its answer, for backends without a reasoning parser."""

from __future__ import annotations

import re

_MARKS = re.compile(
    r"<(?P<end>/)?(?:[a-z]+:)?(?:think|thinking|thought|reasoning)>|\[(?P<end2>/)?THINK\]|◁(?P<end3>/)?think▷",
    re.IGNORECASE,
)


def without_thinking(text: str) -> str:
    """A text without what stands in `<think>` and the like.

    Thinking that the prompt opened ends with a lone `</think>`: all before it goes. Thinking that is never closed lasts
    to the end of the text. A text without such marks is returned as it is.
    """
    if _MARKS.search(text) is None:
        return text
    kept: list[str] = []
    position, is_thinking = 0, False
    for mark in _MARKS.finditer(text):
        if any(mark.groups()):
            if not is_thinking:
                kept.clear()
            is_thinking, position = False, mark.end()
        elif not is_thinking:
            kept.append(text[position : mark.start()])
            is_thinking = True
    if not is_thinking:
        kept.append(text[position:])
    return "".join(kept).strip()
