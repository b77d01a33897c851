"""Whose history it is, and what random edits do to it.

Every block of every message has a mark of its own, `m<number>x`, by which the judge (`history_judge`) finds it in the
prompts that the server received.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from .history_plans import Edit

Message = dict[str, Any]

_TOOLSETS: tuple[tuple[int, ...], ...] = ((0,), (0, 1), (1, 0), (), (1,), (0, 1, 2))


@dataclass
class Someone:
    """An agent, or whoever calls from outside one.

    Attributes:
        name: Who it is for the judge; None for a call that no agent makes.
        system: Its system prompt.
        tools: Its tool specs.
        messages: Its history.
        state: Its `model_state`; None for a call that no agent makes.
    """

    name: str | None
    system: str | None
    tools: list[dict[str, Any]]
    messages: list[Message] = field(default_factory=list)
    state: dict[str, Any] | None = None


class Marks:
    """Hands out marks, and texts that have one."""

    def __init__(self) -> None:
        """Start with the first."""
        self._numbers = count(1)

    def mark(self) -> str:
        """A mark that nothing else has."""
        return f"m{next(self._numbers)}x"

    def text(self) -> dict[str, Any]:
        """A new text block."""
        return {"text": f"say {self.mark()} now"}

    def system(self) -> str:
        """A new system prompt."""
        return f"Be {self.mark()}."

    def tools(self, toolset: int) -> list[dict[str, Any]]:
        """One of a few sets of tool specs; a tool has the same mark in all of them."""
        schema = {"json": {"type": "object", "properties": {"q": {"type": "string"}}}}
        return [
            {"name": f"f{i}", "description": f"m{900 + i}x", "inputSchema": schema}
            for i in _TOOLSETS[toolset % len(_TOOLSETS)]
        ]


def apply_edit(
    edit: Edit, someone: Someone, everybody: Sequence[Someone], marks: Marks, notices: Container[str]
) -> None:
    """Edit somebody's history, system prompt or tools.

    Args:
        edit: How.
        someone: Whose.
        everybody: Whose history there is to copy.
        marks: For what is new.
        notices: The toolUseIds of calls that did not parse: the model is told of them in words that no edit changes.
    """
    if edit.kind == "tools":
        someone.tools = marks.tools(edit.to)
    elif edit.kind == "system":
        someone.system = None if edit.to % 3 == 0 else marks.system()
    elif edit.kind == "copy":
        other = everybody[edit.at % len(everybody)]
        someone.messages = copy.deepcopy(other.messages)
        if edit.to % 4:
            someone.system, someone.tools = other.system, other.tools
    elif someone.messages:
        someone.messages = copy.deepcopy(someone.messages)
        at, to = edit.at % len(someone.messages), edit.to % len(someone.messages)
        if edit.kind == "change":
            _change(someone.messages[at]["content"], edit.to, marks, notices)
        else:
            _rearrange(someone.messages, edit, at, to, marks)


def _rearrange(messages: list[Message], edit: Edit, at: int, to: int, marks: Marks) -> None:
    role, content = messages[at]["role"], messages[at]["content"]
    if edit.kind == "insert":
        messages.insert(at, {"role": ("user", "assistant")[edit.to % 2], "content": [marks.text()]})
    elif edit.kind == "delete":
        del messages[at]
    elif edit.kind == "reorder":
        messages[at], messages[to] = messages[to], messages[at]
    elif edit.kind == "truncate":
        del messages[at:]
    elif edit.kind == "forget":
        del messages[:at]
    elif edit.kind == "summarise":
        messages[: at + 1] = [{"role": "user", "content": [marks.text()]}]
    elif edit.kind == "duplicate":
        messages.insert(to, copy.deepcopy(messages[at]))
    elif edit.kind == "merge":
        _merge(messages, at)
    elif edit.kind == "split" and len(content) > 1:
        messages[at : at + 1] = [{"role": role, "content": [block]} for block in content]
    elif edit.kind == "cache point" and content:
        content.insert(edit.to % (len(content) + 1), {"cachePoint": {"type": "default"}})


def _change(content: list[dict[str, Any]], which: int, marks: Marks, notices: Container[str]) -> None:
    if not content:
        content.append(marks.text())
        return
    block = content[which % len(content)]
    if "text" in block:
        block["text"] = f"rather {marks.mark()}"
    elif "toolUse" in block and block["toolUse"]["toolUseId"] not in notices:
        block["toolUse"]["input"] = {"q": marks.mark()}
    elif "toolResult" in block and block["toolResult"]["toolUseId"] not in notices:
        block["toolResult"]["content"] = [{"text": f"rather {marks.mark()}"}, {"json": {"also": marks.mark()}}]
    elif "reasoningContent" in block:
        block["reasoningContent"]["reasoningText"]["text"] = f"rather {marks.mark()}"


def _merge(messages: list[Message], at: int) -> None:
    """Join a message with the next one of its role; or its texts, where there is none."""
    message = messages[at]
    if at + 1 < len(messages) and messages[at + 1]["role"] == message["role"]:
        message["content"] += messages.pop(at + 1)["content"]
        return
    content: list[dict[str, Any]] = []
    for block in message["content"]:
        if content and "text" in block and "text" in content[-1]:
            content[-1] = {"text": content[-1]["text"] + "\n" + block["text"]}
        else:
            content.append(block)
    message["content"] = content
