"""Fingerprints of conversations.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import orjson
from strands.tools.tools import InvalidToolUseNameException, validate_tool_use_name
from strands.types.content import Message, Messages

BLANK_TEXT = "[blank text]"
"""What Strands puts where an assistant message has no text (`strands.event_loop.streaming._normalize_messages`)."""

INVALID_NAME = "INVALID_TOOL_NAME"
"""What Strands puts where a tool call has a name that no tool may have; there as well."""

_KINDS = {"reasoningContent": "reasoning", "toolUse": "tool call"}  # what blocks are called in words


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
