"""Fingerprints of conversations.

A conversation is identified by what the model sees of it: system prompt, tools, template, messages. `fingerprint`
hashes it into a chain with one link per message. So "is this a recorded conversation plus something new?" is one
dictionary look-up per message, never a comparison of texts. The canonical form keeps only `role` and `content`, applies
the normalization that Strands applies before every model call, and drops cache points, which the model never sees.

An agent asks with its whole history each time. If a conversation begins with the very same values as an earlier one, it
takes over the digests of that part. The test is one pass of orjson and a hash over the history, ten times as fast.
"""

from __future__ import annotations

import hashlib
import marshal
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import orjson
from strands.tools.tools import InvalidToolUseNameException, validate_tool_use_name
from strands.types.content import Message, Messages

from ..json_values import dumps

BLANK_TEXT = "[blank text]"
"""Strands' substitute for an assistant message without text (`strands.event_loop.streaming._normalize_messages`)."""

INVALID_NAME = "INVALID_TOOL_NAME"
"""Strands' substitute for the name of a tool call that no tool may have, in the same function."""

_KINDS = {"reasoningContent": "reasoning", "toolUse": "tool call"}  # names of blocks in words


@dataclass(frozen=True)
class Conversation:
    """What a model call was asked, as fingerprints.

    Attributes:
        parts: Digests of what precedes the messages: system prompt, tools, chat template, template arguments.
        digests: One digest per message, shape `(M,)`.
        chain: `chain[i]` identifies `parts` and the first `i` messages; shape `(M + 1,)`.
        roles: The role of each message, shape `(M,)`.
        exact: Length and digest of the serialized values that this is the fingerprint of; None if they are not plain.
    """

    parts: Mapping[str, bytes]
    digests: tuple[bytes, ...]
    chain: tuple[bytes, ...]
    roles: tuple[str, ...]
    exact: tuple[int, bytes] | None = None

    @property
    def key(self) -> bytes:
        """The digest of the whole conversation."""
        return self.chain[-1]


def fingerprint(parts: Mapping[str, Any], messages: Messages, earlier: Conversation | None = None) -> Conversation:
    """Fingerprint a conversation in one pass.

    Args:
        parts: What precedes the messages, by name; any JSON-like values.
        messages: Strands messages.
        earlier: A conversation that this one may continue.
    """
    values: list[Any] = [dict(parts)]
    for message in messages:
        values += (message["role"], message["content"])
    may_continue = earlier is not None and len(earlier.digests) <= len(messages)
    exact, continues = _exact(values, earlier.exact if earlier is not None and may_continue else None)
    if earlier is not None and continues:
        new = messages[len(earlier.digests) :]
        digests = tuple(map(message_digest, new))
        chain = (*earlier.chain, *_links(earlier.key, digests))
        roles = (*earlier.roles, *(message["role"] for message in new))
        return Conversation(earlier.parts, (*earlier.digests, *digests), chain, roles, exact)
    part_digests = {name: _digest(_dump(value)) for name, value in parts.items()}
    digests = tuple(map(message_digest, messages))
    roles = tuple(message["role"] for message in messages)
    return Conversation(part_digests, digests, chain_of(part_digests, digests), roles, exact)


def exact_bytes(values: Sequence[Any]) -> bytes | None:
    """Serialize plain values, so that different values, or values of other types, give different bytes.

    Returns:
        The bytes; None if a value is not plain.
    """
    data = _as_json(values)
    return data if data is not None and b"null" not in data else _as_marshal(values)


def _exact(values: Sequence[Any], earlier: tuple[int, bytes] | None) -> tuple[tuple[int, bytes] | None, bool]:
    """Return length and digest of plain values, serialized, and whether they begin with those of an earlier call.

    The bytes of the first values are a prefix of the bytes of all, and none is copied: fresh memory costs more than
    hashing.
    """
    length, digest = earlier or (0, b"")
    for serialize in (_as_json, _as_marshal):
        data = serialize(values)
        if data is None:
            continue
        view = memoryview(data)[:-1]  # without the bracket that closes the list
        hashed = hashlib.sha256(view[:length])
        continues = hashed.digest() == digest
        if serialize is _as_json and data.find(b"null", length if continues else 0) >= 0:
            continue  # orjson writes NaN as null, too; the earlier bytes hold none
        hashed.update(view[length:])
        return (len(view), hashed.digest()), continues
    return None, False


def _as_json(values: Sequence[Any]) -> bytes | None:
    try:
        return orjson.dumps(values)
    except TypeError:
        return None


def _as_marshal(values: Sequence[Any]) -> bytes | None:
    """Serialize each value, and end with a bracket, as JSON does."""
    try:
        # Version 2 has no references: equal values have equal bytes, whichever objects they are made of.
        return b"".join([*(marshal.dumps(value, 2) for value in values), b"]"])
    except ValueError:
        return None


def chain_of(parts: Mapping[str, bytes], digests: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return the `chain` of a conversation with these parts and message digests."""
    start = _digest(b"".join(parts.values()))
    return (start, *_links(start, digests))


def _links(link: bytes, digests: Iterable[bytes]) -> Iterator[bytes]:
    for digest in digests:
        link = next_link(link, digest)
        yield link


def message_digest(message: Message) -> bytes:
    """Return the digest of a message's canonical form."""
    return _digest(_dump([message["role"], canonical_content(message)]))


def next_link(link: bytes, digest: bytes) -> bytes:
    """Return the chain link after `link` for a message with this digest."""
    return _digest(link + digest)


def canonical_content(message: Message) -> list[Mapping[str, Any]]:
    """Return the content blocks in the form in which Strands hands an assistant message back to its model."""
    blocks = cast("list[Mapping[str, Any]]", [block for block in message["content"] if "cachePoint" not in block])
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


@lru_cache(maxsize=1024)  # Strands logs each check
def is_tool_name(name: str) -> bool:
    """Whether Strands accepts a tool name; it hands calls with other names back to their model as `INVALID_NAME`."""
    try:
        validate_tool_use_name({"name": name, "toolUseId": "", "input": {}})
    except InvalidToolUseNameException:
        return False
    return True


def block_digests(message: Message) -> tuple[tuple[str, bytes], ...]:
    """Return kind and digest of each content block, ignoring white space around texts."""
    blocks = []
    for block in canonical_content(message):
        kind = next(iter(block), "")
        value = block["text"].strip() if kind == "text" else block.get(kind)
        blocks.append((_KINDS.get(kind, kind), _digest(_dump(value))))
    return tuple(blocks)


def block_difference(recorded: Sequence[tuple[str, bytes]], message: Message) -> str:
    """Describe in words how a message differs from a recorded one.

    Args:
        recorded: The `block_digests` of the recorded message.
        message: The message.
    """
    there = block_digests(message)
    words = []
    for kind in dict.fromkeys(kind for kind, _ in (*recorded, *there)):
        ours, theirs = ([digest for name, digest in blocks if name == kind] for blocks in (recorded, there))
        if ours == theirs:
            continue
        if not theirs:
            words.append(f"no {kind}")
        else:
            words.append(f"other {kind}" if ours else f"{kind} added")
    return ", ".join(words) or "other white space, or another order"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _dump(value: Any) -> bytes:
    """Return bytes that are equal exactly for equal values; the order of dictionary keys does not matter."""
    try:
        data = orjson.dumps(value, default=_dump_other, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # integers beyond 64 bits and lone surrogates: rare, and fine for the standard library
        return _dump_slowly(value)
    if b"null" in data and _holds_nan(value):  # orjson writes NaN as null
        return _dump_slowly(value)
    return data


def _dump_slowly(value: Any) -> bytes:
    try:
        return dumps(value, default=repr, sort_keys=True).encode()
    except TypeError:  # keys of several types
        return repr(value).encode("utf-8", "backslashreplace")


def _holds_nan(value: Any) -> bool:
    """Whether a value contains a float that JSON cannot represent."""
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
"""The digest of a missing system prompt."""
