"""The forms in which a chat template takes what an assistant's turn holds.

Templates differ in where they look for reasoning, in whether they show text beside a tool call, and in how they want a
call's arguments. A part in a form that a template does not know is left out of its text without a word, so messages are
put into the template's own forms before each render. Which ones those are is found out in `template_habits`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..families import numbered_function
from ..messages import ChatMessage

TextBesideCalls = Literal["shown", "own message", "in reasoning", "left out"]
"""What a template makes of text beside tool calls; in the form "own message" the text is a message before the calls."""


@dataclass(frozen=True)
class TemplateForms:
    """The forms that one template takes.

    Attributes:
        text_arguments: Whether it takes the arguments of tool calls as JSON text, not as objects.
        reasoning_marks: What goes around reasoning where the template has no `reasoning_content` and takes it as a part
            of the text; None where it has.
        text_beside_calls: How it takes text beside tool calls.
        numbers_calls: Whether it writes ids of its own into tool calls, numbered from 0 in each turn.
    """

    text_arguments: bool = False
    reasoning_marks: tuple[str, str] | None = None
    text_beside_calls: TextBesideCalls = "shown"
    numbers_calls: bool = False

    def put(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """The messages in the template's forms; what is in them already is left as it is."""
        return [formed for message in messages for formed in self._put(message)]

    def _put(self, message: ChatMessage) -> list[ChatMessage]:
        if message["role"] != "assistant":
            return [message]
        if self.reasoning_marks is not None:
            message = _with_marked_reasoning(message, self.reasoning_marks)
        calls = message.get("tool_calls")
        if not calls:
            return [message]
        if self.text_arguments:
            message = {**message, "tool_calls": [_with_text_arguments(call) for call in calls]}
        if not message["content"]:
            return [message]
        if self.text_beside_calls == "own message":
            text = {key: value for key, value in message.items() if key != "tool_calls"}
            return [text, {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}]
        if self.text_beside_calls == "in reasoning" and message.get("reasoning_content"):
            reasoning = f"{message['reasoning_content']}\n{message['content']}"
            return [{**message, "reasoning_content": reasoning, "content": ""}]
        return [message]

    def leaves_out(self, message: ChatMessage) -> bool:
        """Whether the template would leave text beside this message's tool calls out, in whatever form."""
        if self.text_beside_calls != "left out":
            return False
        return any(formed.get("tool_calls") and formed["content"] for formed in self._put(message))

    def with_own_ids(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """The results of tool calls under the ids that the template writes into those calls.

        Results of calls that are not among `messages` keep theirs.
        """
        if not self.numbers_calls:
            return list(messages)
        ids: dict[str, str] = {}
        renamed: list[ChatMessage] = []
        for message in messages:
            for number, call in enumerate(message.get("tool_calls") or ()):
                ids[call["id"]] = numbered_function(call["id"], call["function"]["name"], number)
            use_id = message.get("tool_call_id")
            renamed.append({**message, "tool_call_id": ids[use_id]} if use_id in ids else message)
        return renamed


def _with_marked_reasoning(message: ChatMessage, marks: tuple[str, str]) -> ChatMessage:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    marked = {key: value for key, value in message.items() if key != "reasoning_content"}
    marked["content"] = f"{marks[0]}{reasoning}{marks[1]}{message['content']}"
    return marked


def _with_text_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
