"""An action as the messages that an agent starts from: text, one message or a chat, Strands' form or OpenAI's.

Promise: what is not understood is refused and never left out, and an action is not changed.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from strands.types.content import ContentBlock, Message

from .types import Action

_DATA_URL = re.compile(r"data:image/(png|jpeg|jpg|gif|webp);base64,(.*)", re.DOTALL)


@dataclass(frozen=True)
class Conversation:
    """What an agent starts from.

    Attributes:
        system: The texts of the system messages.
        before: The messages before the one that is asked.
        history_length: How many of those are from `conversation_history`.
        asked: The last message, a user's.
    """

    system: list[str]
    before: list[Message]
    history_length: int
    asked: Message


def read_conversation(action: Action) -> Conversation:
    """The messages of an action.

    Raises:
        ValueError: They are none that an agent can be given; says which and why.
    """
    system, history = _read(action.task_context.conversation_history, "conversation_history")
    given = action.message
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"text": given}]}]
    more_system, messages = _read(given if isinstance(given, list) else [given], "message")
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("the last message of an action must be a user's")
    return Conversation([*system, *more_system], [*history, *messages[:-1]], len(history), messages[-1])


def _read(given: Sequence[Any], name: str) -> tuple[list[str], list[Message]]:
    system: list[str] = []
    messages: list[Message] = []
    for number, message in enumerate(given):
        where = f"{name}[{number}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where} is no message with a role: {message!r:.80}")
        role = message["role"]
        if role in ("system", "developer"):
            if messages:
                raise ValueError(f"{where}: a system message must stand before all others")
            system.append(_text(message.get("content"), where))
        elif role in ("user", "assistant"):
            messages.append({"role": cast(Any, role), "content": _content(message, where)})
        elif role == "tool":
            _add_result(messages, message, where)
        else:
            raise ValueError(f"{where}: the roles are system, user, assistant and tool, not {role!r}")
    return system, messages


def _content(message: Mapping[str, Any], where: str) -> list[ContentBlock]:
    content = message.get("content")
    calls = message.get("tool_calls") or []
    if calls and content in (None, ""):
        content = []  # an assistant that only calls tools
    if isinstance(content, str):
        blocks = [{"text": content}]
    elif isinstance(content, list):
        blocks = [_block(block, where) for block in content]
    else:
        raise ValueError(f"{where}: content is a text or a list of blocks, not {content!r:.80}")
    return cast("list[ContentBlock]", blocks + [_call(call, where) for call in calls])


def _block(block: Any, where: str) -> dict[str, Any]:
    if isinstance(block, str):
        return {"text": block}
    if not isinstance(block, Mapping) or not block:
        raise ValueError(f"{where}: a content block is a dictionary, not {block!r:.80}")
    kind = block.get("type")
    if kind is None:
        return copy.deepcopy(dict(block))
    if kind in ("text", "input_text", "output_text") and isinstance(block.get("text"), str):
        return {"text": block["text"]}
    if kind == "image_url":
        address = block.get("image_url")
        address = address.get("url") if isinstance(address, Mapping) else address
        found = _DATA_URL.fullmatch(address) if isinstance(address, str) else None
        if found is None:
            raise ValueError(f"{where}: an image must be a data URL (png, jpeg, gif, webp), not {address!r:.80}")
        try:
            content = base64.b64decode(found[2], validate=True)
        except binascii.Error as error:
            raise ValueError(f"{where}: the image's data URL is not base64: {error}") from error
        return {"image": {"format": "jpeg" if found[1] == "jpg" else found[1], "source": {"bytes": content}}}
    raise ValueError(f"{where}: content of type {kind!r} is not understood; Strands' own blocks are, too")


def _call(call: Any, where: str) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, Mapping):
            raise TypeError("arguments are an object")
        return {"toolUse": {"toolUseId": str(call["id"]), "name": function["name"], "input": dict(arguments)}}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: not a tool call of a function with id and arguments: {call!r:.80}") from error


def _add_result(messages: list[Message], message: Mapping[str, Any], where: str) -> None:
    """Put a tool's answer behind the others of its turn: Strands keeps those of one turn in one message."""
    if not isinstance(message.get("tool_call_id"), str):
        raise ValueError(f"{where}: a tool's message needs its tool_call_id")
    text = _text(message.get("content"), where)
    result = {"toolUseId": message["tool_call_id"], "status": "success", "content": [{"text": text}]}
    block = cast(ContentBlock, {"toolResult": result})
    if messages and messages[-1]["role"] == "user" and all("toolResult" in one for one in messages[-1]["content"]):
        messages[-1]["content"].append(block)
    else:
        messages.append({"role": "user", "content": [block]})


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    blocks = [_block(block, where) for block in content] if isinstance(content, list) else [{}]
    if not all(isinstance(block.get("text"), str) for block in blocks):
        raise ValueError(f"{where}: only texts can stand here, not {content!r:.80}")
    return "".join(block["text"] for block in blocks)
