"""Pure functions over Strands messages: into chat-template messages, and into fingerprints.

A conversation is identified by what the model would see of it: system prompt, tools, template, messages. `fingerprint`
hashes it into a chain, one link per message, so that "is this a recorded conversation plus something new?" is a
dictionary look-up per message and never a comparison of texts. Canonical form: the whitelist `role` and `content`, the
normalisation that Strands itself applies before every model call, and cache points left out, which the model never
sees.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import orjson
from strands.tools.tools import InvalidToolUseNameException, validate_tool_use_name
from strands.types.content import Message, Messages
from strands.types.tools import ToolResult, ToolSpec

from .content import (
    Content,
    ImagePart,
    Picture,
    Piece,
    UnsupportedContentError,
    block_kind,
    encodable,
    encodable_value,
    join_pieces,
    render_block,
    render_result,
    unsupported,
)

BLANK_TEXT = "[blank text]"
"""What Strands puts where an assistant message has no text (`strands.event_loop.streaming._normalize_messages`)."""

INVALID_NAME = "INVALID_TOOL_NAME"
"""What Strands puts where a tool call has a name that no tool may have; there as well."""

_UNKNOWN_TOOL = "Unknown tool"  # how Strands' own result of a call begins whose tool it does not have

_KINDS = {"reasoningContent": "reasoning", "toolUse": "tool call"}  # what blocks are called in words

ChatMessage = dict[str, Any]
"""A message as chat templates take it: role, content, and for assistants reasoning_content and tool_calls.

Content is text, or a list of parts where there are images (`content.Content`).
"""


class PlacedMessage(ChatMessage):
    """A chat message that knows its path in the Strands history, for error messages."""

    def __init__(self, where: str, **fields: Any) -> None:
        """Make a message of its fields."""
        super().__init__(fields)
        self.where = where


# --- canonical form and fingerprints ---


@dataclass(frozen=True)
class Conversation:
    """What a model call was asked with, as fingerprints.

    Attributes:
        parts: Digests of what stands before the messages: system prompt, tools, chat template, template arguments.
        digests: One digest per message, shape (M,).
        chain: `chain[i]` identifies `parts` and the first `i` messages; shape (M + 1,).
        roles: The role of each message, shape (M,).
    """

    parts: Mapping[str, bytes]
    digests: tuple[bytes, ...]
    chain: tuple[bytes, ...]
    roles: tuple[str, ...]

    @property
    def key(self) -> bytes:
        """Identifies the whole conversation."""
        return self.chain[-1]


def fingerprint(parts: Mapping[str, Any], messages: Messages) -> Conversation:
    """Fingerprint a conversation in one pass.

    Args:
        parts: What stands before the messages, by name; any JSON-like values.
        messages: Strands messages.
    """
    part_digests = {name: _digest(_dump(value)) for name, value in parts.items()}
    digests = tuple(map(message_digest, messages))
    roles = tuple(message["role"] for message in messages)
    return Conversation(part_digests, digests, chain_of(part_digests, digests), roles)


def chain_of(parts: Mapping[str, bytes], digests: Iterable[bytes]) -> tuple[bytes, ...]:
    """The `chain` of a conversation, from its other digests."""
    chain = [_digest(b"".join(parts.values()))]
    for digest in digests:
        chain.append(next_link(chain[-1], digest))
    return tuple(chain)


def message_digest(message: Message) -> bytes:
    """The digest of a message's canonical form."""
    return _digest(_dump([message["role"], canonical_content(message)]))


def next_link(link: bytes, digest: bytes) -> bytes:
    """The chain link after `link` for a message with this digest."""
    return _digest(link + digest)


def canonical_content(message: Message) -> list[Mapping[str, Any]]:
    """The content blocks in the form in which Strands hands an assistant message back to its model."""
    blocks = [cast(Mapping[str, Any], block) for block in message["content"] if "cachePoint" not in block]
    if message["role"] != "assistant":
        return blocks
    blocks = [
        {"toolUse": {**use, "name": INVALID_NAME}}
        if (use := block.get("toolUse")) is not None and not is_tool_name(use["name"])
        else block
        for block in blocks
    ]
    if not blocks:
        return [{"text": BLANK_TEXT}]
    if any("toolUse" in block for block in blocks):
        return [block for block in blocks if "text" not in block or (block["text"] or "").strip()]
    return [
        {"text": BLANK_TEXT} if "text" in block and not (block["text"] or "").strip() else block for block in blocks
    ]


@lru_cache(maxsize=1024)  # it logs every time
def is_tool_name(name: str) -> bool:
    """Whether Strands lets a tool have a name; it hands calls of others back to their model as `INVALID_NAME`."""
    try:
        validate_tool_use_name({"name": name, "toolUseId": "", "input": {}})
    except InvalidToolUseNameException:
        return False
    return True


def block_digests(message: Message) -> tuple[tuple[str, bytes], ...]:
    """Kind and digest of each content block, to tell how two messages differ; white space around texts left aside."""
    blocks = []
    for block in canonical_content(message):
        kind = next(iter(block), "")
        value = block["text"].strip() if kind == "text" else block.get(kind)
        blocks.append((_KINDS.get(kind, kind), _digest(_dump(value))))
    return tuple(blocks)


def block_difference(recorded: Sequence[tuple[str, bytes]], message: Message) -> str:
    """How a message differs from a recorded one, in words.

    Args:
        recorded: The `block_digests` of the recorded one.
        message: The message.
    """
    there = block_digests(message)
    words = []
    for kind in dict.fromkeys(kind for kind, _ in (*recorded, *there)):
        ours, theirs = ([digest for name, digest in blocks if name == kind] for blocks in (recorded, there))
        if ours != theirs:
            words.append(f"no {kind}" if not theirs else f"{kind} added" if not ours else f"other {kind}")
    return ", ".join(words) or "other white space, or another order"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _dump(value: Any) -> bytes:
    """Bytes that are equal exactly for equal values (dictionaries by content, not by order)."""
    try:
        data = orjson.dumps(value, default=_dump_other, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # integers beyond 64 bits, lone surrogates: rare, and the standard library can
        return json.dumps(value, default=repr, sort_keys=True).encode()
    if b"null" in data and _holds_nan(value):  # written as null, too
        return json.dumps(value, default=repr, sort_keys=True).encode()
    return data


def _holds_nan(value: Any) -> bool:
    """Whether there is a float in a value that JSON has no form for."""
    if isinstance(value, dict):
        return any(map(_holds_nan, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_nan, value))
    return isinstance(value, float) and not math.isfinite(value)


def _dump_other(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return "bytes:" + _digest(bytes(value)).hex()
    return repr(value)


NO_SYSTEM_PROMPT = _digest(_dump(None))
"""The digest of a system prompt that is not there."""


# --- into chat-template messages ---


def to_chat_messages(
    messages: Messages,
    *,
    known_calls: Sequence[Mapping[str, Any]] = (),
    result_notice: Callable[[str], str | None] = lambda tool_use_id: None,
    call_id: Callable[[str, str, int], str] = lambda tool_use_id, name, index: tool_use_id,
    sampled_name: Callable[[str], str | None] = lambda tool_use_id: None,
    calls_before: int = 0,
    first: int = 0,
    images: bool = False,
) -> list[ChatMessage]:
    """Strands messages as chat-template messages. Every content block is rendered or raises; none is dropped.

    Tool results become one `tool` message each, in the order of the calls that they answer (Strands puts those of
    invalid calls first, and those of interrupted ones last); what stands beside them becomes a `user` message after
    them. The blocks of a message are joined by newlines. A document becomes text with its name around it:

        <document name="prices" format="csv">
        apple,3
        </document>

    Whether a tool succeeded is not rendered: chat templates have no place for it, and a tool's error text is in the
    content of its result.

    Args:
        messages: Strands messages.
        known_calls: Tool calls of the assistant message that stands right before `messages`, if that one is not in
            them: `{"toolUseId", "name", "id"}`.
        result_notice: Given a toolUseId, the text that replaces Strands' word that there is no such tool: what the
            model is told of a call that did not parse. None keeps that, and any other result is kept as it stands.
        call_id: Given a toolUseId, the tool's name and how many calls came before it in `messages`, the id that the
            model is shown (some families write ids of their own form).
        sampled_name: Given the toolUseId of a call named `INVALID_NAME`, the name that the model wrote, if it is known.
        calls_before: How many calls came before `messages`.
        first: Position of the first of `messages` in the whole history, for error messages.
        images: Whether images can be put in front of the model; content that holds one is a list of parts.

    Raises:
        UnsupportedContentError: A block cannot be rendered; the message names its path.
    """
    chat: list[ChatMessage] = []
    calls = list(known_calls)
    seen = calls_before
    for i, message in enumerate(messages):
        where = f"messages[{first + i}]"
        if message["role"] == "assistant":
            uses = [block["toolUse"] for block in message["content"] if "toolUse" in block]
            calls = []
            for number, use in enumerate(uses, seen):
                use_id, name = use["toolUseId"], use["name"]
                if name == INVALID_NAME:
                    name = sampled_name(use_id) or name
                calls.append({"toolUseId": use_id, "name": name, "id": call_id(use_id, name, number)})
            seen += len(uses)
            chat.append(_assistant_message(message, where, calls))
        else:
            chat.extend(_user_messages(message, where, calls, result_notice, images))
    return chat


def plain_texts(value: Any) -> Iterator[str]:
    """The texts in content blocks, whatever else is in them."""
    if isinstance(value, str):
        yield encodable(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in ("toolUseId", "status", "format", "signature"):
                yield from plain_texts(inner)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        for inner in value:
            yield from plain_texts(inner)


def pictures_of(chat: Iterable[ChatMessage]) -> list[Picture]:
    """The images of chat messages, in the order in which a template renders them."""
    return [
        part.picture
        for message in chat
        if isinstance(message["content"], list)
        for part in message["content"]
        if isinstance(part, ImagePart)
    ]


def to_chat_tools(tool_specs: Iterable[ToolSpec] | None) -> list[dict[str, Any]] | None:
    """Strands tool specs in the OpenAI form that chat templates take; None if there are none."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": spec["name"],
                "description": spec["description"],
                "parameters": spec["inputSchema"].get("json", spec["inputSchema"]),
            },
        }
        for spec in tool_specs or ()
    ]
    return tools or None


def system_text(system_prompt: str | None, system_prompt_content: Iterable[Mapping[str, Any]] | None) -> str | None:
    """The system prompt as text, None if there is none.

    Raises:
        UnsupportedContentError: A block is neither text nor a cache point.
    """
    if system_prompt is not None or not system_prompt_content:
        return system_prompt
    texts = []
    for i, block in enumerate(system_prompt_content):
        if "text" in block:
            texts.append(block["text"])
        elif "cachePoint" not in block:
            raise UnsupportedContentError(f"system_prompt[{i}]: cannot render a {block_kind(block)} block as text")
    return "\n".join(texts) if texts else None


def _assistant_message(message: Message, where: str, known: Sequence[Mapping[str, Any]]) -> ChatMessage:
    texts, reasoning = [], []
    calls: list[dict[str, Any]] = []
    for j, block in enumerate(message["content"]):
        if "text" in block:
            texts.append(encodable(block["text"]))
        elif "toolUse" in block:
            shown = known[len(calls)]
            call = {"name": encodable(shown["name"]), "arguments": encodable_value(block["toolUse"]["input"])}
            calls.append({"type": "function", "id": shown["id"], "function": call})
        elif "reasoningContent" in block and "reasoningText" in block["reasoningContent"]:
            reasoning.append(encodable(block["reasoningContent"]["reasoningText"]["text"]))
        elif "cachePoint" not in block:
            raise unsupported(block, f"{where}.content[{j}]")
    chat = PlacedMessage(where, role="assistant", content="\n".join(texts))
    if reasoning:
        chat["reasoning_content"] = "\n".join(reasoning)
    if calls:
        chat["tool_calls"] = calls
    return chat


def _user_messages(
    message: Message,
    where: str,
    calls: Sequence[Mapping[str, Any]],
    result_notice: Callable[[str], str | None],
    images: bool,
) -> list[ChatMessage]:
    order = {call["toolUseId"]: position for position, call in enumerate(calls)}
    results: list[tuple[int, ChatMessage]] = []
    pieces: list[Piece] = []
    for j, block in enumerate(message["content"]):
        here = f"{where}.content[{j}]"
        if "toolResult" in block:
            result = block["toolResult"]
            use_id = result["toolUseId"]
            position = order.get(use_id)
            notice = result_notice(use_id) if is_unknown_tool(result) else None
            if notice is not None:
                content: Content = notice
            else:
                content = render_result(result["content"], f"{here}.toolResult", images=images)
            chat: ChatMessage = {"role": "tool", "content": content, "tool_call_id": use_id}
            if position is not None:
                chat["name"] = calls[position]["name"]
                chat["tool_call_id"] = calls[position]["id"]
            results.append((len(calls) if position is None else position, chat))
        elif "cachePoint" not in block:
            pieces.append(render_block(block, here, images=images))
    chats = [chat for _, chat in sorted(results, key=lambda entry: entry[0])]
    if pieces or not chats:
        chats.append({"role": "user", "content": join_pieces(pieces)})
    return chats


def is_unknown_tool(result: ToolResult) -> bool:
    """Whether a result is Strands' own answer to a call of a tool that it does not have."""
    texts = [block.get("text") or "" for block in result["content"]]
    return len(texts) == 1 and texts[0].startswith(_UNKNOWN_TOOL)


__all__ = [
    "ChatMessage",
    "Conversation",
    "UnsupportedContentError",
    "block_difference",
    "block_digests",
    "canonical_content",
    "fingerprint",
    "message_digest",
    "next_link",
    "pictures_of",
    "system_text",
    "to_chat_messages",
    "to_chat_tools",
]
