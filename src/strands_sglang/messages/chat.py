"""Strands messages as chat templates take them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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
from .fingerprint import INVALID_NAME

_UNKNOWN_TOOL = "Unknown tool"  # how Strands' own result of a call begins whose tool it does not have

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
