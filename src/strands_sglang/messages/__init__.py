"""Strands messages: as input of chat templates, and as fingerprints."""

from .content import (
    ChatMessage,
    UnsupportedContentError,
    is_unknown_tool,
    pictures_of,
    plain_texts,
    system_text,
    to_chat_messages,
    to_chat_tools,
)
from .fingerprint import (
    BLANK_TEXT,
    INVALID_NAME,
    NO_SYSTEM_PROMPT,
    Conversation,
    block_difference,
    block_digests,
    canonical_content,
    chain_of,
    fingerprint,
    is_tool_name,
    message_digest,
    next_link,
)

__all__ = [
    "BLANK_TEXT",
    "ChatMessage",
    "Conversation",
    "INVALID_NAME",
    "NO_SYSTEM_PROMPT",
    "UnsupportedContentError",
    "block_difference",
    "block_digests",
    "canonical_content",
    "chain_of",
    "fingerprint",
    "is_tool_name",
    "is_unknown_tool",
    "message_digest",
    "next_link",
    "pictures_of",
    "plain_texts",
    "system_text",
    "to_chat_messages",
    "to_chat_tools",
]
