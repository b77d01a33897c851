"""The conversation as people read it: the parts of Strands messages as text, without what only programs need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import orjson

from ..json_values import dumps


class Said(NamedTuple):
    """A part of a conversation.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        kind: "text", "reasoning", "call", "result", "image" or "other".
        text: The text; of a call its input as JSON.
        name: Name of the called tool; empty otherwise.
        id: Id of the tool call; empty otherwise.
    """

    role: str
    kind: str
    text: str
    name: str = ""
    id: str = ""


def said_in(messages: Iterable[Mapping[str, Any]], system: str | None = None) -> tuple[Said, ...]:
    """Return the parts of Strands messages in order.

    Args:
        messages: The messages.
        system: The system prompt, which comes first; None for none.
    """
    before = () if system is None else (Said("system", "text", system),)
    return (*before, *chain.from_iterable(map(_parts, messages)))


def _parts(message: Mapping[str, Any]) -> Iterator[Said]:
    role = str(message["role"])
    for block in message["content"]:
        kind = next(iter(block), "")
        value = block.get(kind)
        if kind == "text":
            yield Said(role, "text", str(value))
        elif kind == "reasoningContent":
            yield Said(role, "reasoning", str((value.get("reasoningText") or {}).get("text", "")))
        elif kind == "toolUse":
            yield Said(role, "call", _json(value["input"]), str(value["name"]), str(value["toolUseId"]))
        elif kind == "toolResult":
            for part in value["content"]:
                use_id = str(value["toolUseId"])
                if "image" in part:
                    yield Said("tool", "image", "", id=use_id)
                    continue
                text = part.get("text")
                yield Said("tool", "result", _json(part) if text is None else str(text), id=use_id)
        elif kind == "image":
            yield Said(role, "image", "")
        elif kind != "cachePoint":
            yield Said(role, "other", _json(block))


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value, default=lambda other: f"<{type(other).__name__}>").decode()
    except TypeError:  # integers beyond 64 bits, lone surrogates
        return dumps(value, default=lambda other: f"<{type(other).__name__}>")
