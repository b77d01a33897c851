"""slime's prompts as messages of a Strands agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strands.types.content import Messages

from .arguments import SlimeExportError


def messages_of(args: Any, sample: Any) -> tuple[str | None, Messages]:
    """The system prompt that a sample's prompt has, None without one, and its messages, a user's last.

    Args:
        args: slime's parsed arguments.
        sample: slime's sample; its `prompt` is a text, or chat messages with texts.

    Raises:
        SlimeExportError: The prompt cannot be given to an agent; says what to do instead.
    """
    prompt = sample.prompt
    if isinstance(prompt, str):
        if getattr(args, "apply_chat_template", False):
            raise SlimeExportError(
                "slime has put the chat template around the prompt, and the agent does that itself: leave "
                "--apply-chat-template out"
            )
        return None, [{"role": "user", "content": [{"text": prompt}]}]
    if not isinstance(prompt, list) or not all(isinstance(message, Mapping) for message in prompt):
        raise SlimeExportError(f"a prompt is a text or a list of chat messages, not {prompt!r:.80}")
    system: list[str] = []
    messages: Messages = []
    for message in prompt:
        role, text = message.get("role"), _text(message.get("content"))
        if role == "system":
            system.append(text)
        elif role in ("user", "assistant"):
            messages.append({"role": role, "content": [{"text": text}]})
        else:
            raise SlimeExportError(f"a prompt's messages are of system, user and assistant, not of {role!r}")
    if not messages or messages[-1]["role"] != "user":
        raise SlimeExportError("the last message of a prompt must be a user's")
    return "\n\n".join(system) or None, messages


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    raise SlimeExportError(f"a prompt holds what is no text: {content!r:.80}; pass make_generate a function as prompt=")
