"""Strands messages as chat templates take them: text, documents as text, images as parts.

What cannot be put in front of a model raises with the path of its block. Nothing is ever left out.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from strands.types.content import Message, Messages
from strands.types.tools import ToolResult, ToolSpec

TEXT_FORMATS = ("txt", "md", "csv", "html")
"""The formats of Strands documents whose bytes are text."""

Content = str | list[dict[str, str]]
"""Text; or where there are images, parts: `{"type": "text", "text": ...}` and `ImagePart`."""


class UnsupportedContentError(ValueError):
    """A message holds content that cannot be put in front of the model. The message names its path."""


@dataclass(frozen=True)
class Picture:
    """An image of a conversation.

    Attributes:
        data: The bytes of its file; the same object as in the Strands message.
        format: "png", "jpeg", "gif" or "webp".
        where: Its path in the history, for error messages.
    """

    data: bytes
    format: str
    where: str


class ImagePart(dict[str, str]):
    """`{"type": "image"}`, as chat templates take an image; the picture is beside it, where templates do not look."""

    def __init__(self, picture: Picture) -> None:
        """Wrap a picture."""
        super().__init__(type="image")
        self.picture = picture


Piece = str | ImagePart
"""One block, rendered."""

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
    as_shown: Callable[[str, str, int], tuple[str, str]] = lambda tool_use_id, name, number: (name, tool_use_id),
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
        as_shown: Given a toolUseId, the tool's name and how many calls came before it, the name and the id that the
            model reads: the name that it wrote where Strands has `INVALID_NAME`, the id in its family's form.
        calls_before: How many calls came before `messages`.
        first: Position of the first of `messages` in the whole history, for error messages.
        images: Whether images can be put in front of the model; content that holds one is a list of parts.

    Raises:
        UnsupportedContentError: A block cannot be rendered; the message names its path.
    """
    chat: list[ChatMessage] = []
    calls = list(known_calls)
    for i, message in enumerate(messages):
        where = f"messages[{first + i}]"
        if message["role"] == "assistant":
            uses = [block["toolUse"] for block in message["content"] if "toolUse" in block]
            calls = []
            for number, use in enumerate(uses, calls_before):
                name, call_id = as_shown(use["toolUseId"], use["name"], number)
                calls.append({"toolUseId": use["toolUseId"], "name": name, "id": call_id})
            calls_before += len(uses)
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


# --- block by block ---


def render_block(block: Mapping[str, Any], where: str, *, images: bool) -> Piece:
    """A text, document or image block of a message.

    Args:
        block: The Strands content block.
        where: Its path, for error messages.
        images: Whether images can be put in front of the model.

    Raises:
        UnsupportedContentError: It is none of these, or not in a form that can be rendered.
    """
    if "text" in block:
        return encodable(block["text"])
    if "document" in block:
        return _document(block["document"], where)
    if "image" in block:
        return _image(block["image"], where, images)
    raise unsupported(block, where)


def render_result(blocks: Sequence[Mapping[str, Any]], where: str, *, images: bool) -> Content:
    """The content of a tool result: as of a message, and json.

    Raises:
        UnsupportedContentError: A block cannot be rendered.
    """
    pieces: list[Piece] = []
    for k, block in enumerate(blocks):
        if "json" in block:
            try:
                pieces.append(encodable(json.dumps(block["json"], ensure_ascii=False)))
            except (TypeError, ValueError) as error:
                raise UnsupportedContentError(f"{where}.content[{k}].json: {error}") from error
        else:
            pieces.append(render_block(block, f"{where}.content[{k}]", images=images))
    return join_pieces(pieces)


def join_pieces(pieces: Sequence[Piece]) -> Content:
    """Texts joined by newlines, images between them as parts of their own."""
    parts: list[dict[str, str]] = []
    for _, run in groupby(pieces, key=type):
        together = list(run)
        images = [piece for piece in together if isinstance(piece, ImagePart)]
        parts += images or [{"type": "text", "text": "\n".join(map(str, together))}]
    if any(isinstance(part, ImagePart) for part in parts):
        return parts
    return parts[0]["text"] if parts else ""


def encodable(text: str) -> str:
    """The text with halves of surrogate pairs replaced: broken files hold them, and no tokenizer takes them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def encodable_value(value: Any) -> Any:
    """A JSON-like value with halves of surrogate pairs replaced in its texts; a value without any stays the same."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # what is no JSON is for the template to refuse
        return value
    clean = encodable(text)
    return value if clean == text else json.loads(clean)


def unsupported(block: Mapping[str, Any], where: str) -> UnsupportedContentError:
    """The error for a kind of block that is never rendered."""
    return UnsupportedContentError(
        f"{where}: cannot put a {block_kind(block)} block in front of the model; text, json, tool uses, tool results "
        "and reasoning can be, and documents and images of users and tools. Turn the block into text before the call"
    )


def block_kind(block: Mapping[str, Any]) -> str:
    """What a block is, for error messages."""
    return "/".join(block) or "empty"


def _image(image: Mapping[str, Any], where: str, images: bool) -> ImagePart:
    file_format = image.get("format") or "png"
    refused = f"{where}: cannot put a {file_format} image block in front of the model"
    if not images:
        raise UnsupportedContentError(
            f"{refused} without the model's processor: pass SGLangModel(processor=AutoProcessor.from_pretrained(path)) "
            "or turn the image into text before the call"
        )
    data = (image.get("source") or {}).get("bytes")
    if not isinstance(data, bytes) or not data:
        raise UnsupportedContentError(f"{refused}: it must come as bytes, not as {_source(image)}; load it before")
    return ImagePart(Picture(data, file_format, where))


def _document(document: Mapping[str, Any], where: str) -> str:
    """A document as text between two tags, the first of which holds its name, format and context."""
    source = document.get("source") or {}
    if "text" in source:
        text = source["text"]
    elif "content" in source:
        blocks = enumerate(source["content"])
        text = "\n".join(_text_of(block, f"{where}.document.source.content[{k}]") for k, block in blocks)
    elif isinstance(source.get("bytes"), bytes):
        file_format = document.get("format")
        refused = f"{where}: cannot put a {file_format} document block in front of the model"
        advice = 'before the call, and pass it as {"source": {"text": ...}}'
        if file_format not in TEXT_FORMATS:
            raise UnsupportedContentError(
                f"{refused}: only bytes of {', '.join(TEXT_FORMATS)} are text; extract its text {advice}"
            )
        try:
            text = source["bytes"].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UnsupportedContentError(
                f"{refused}: its bytes are not UTF-8 ({error}); decode it {advice}"
            ) from error
    else:
        raise UnsupportedContentError(
            f"{where}: cannot put a document block in front of the model: it must come as bytes or text, not as "
            f"{_source(document)}; load it before"
        )
    attributes = "".join(
        f' {key}="{html.escape(str(document[key]))}"' for key in ("name", "format", "context") if document.get(key)
    )
    return encodable(f"<document{attributes}>\n{text}\n</document>")


def _text_of(block: Mapping[str, Any], where: str) -> str:
    if "text" not in block:
        raise unsupported(block, where)
    return str(block["text"])


def _source(content: Mapping[str, Any]) -> str:
    """What a block came with in place of bytes."""
    source = content.get("source") or {}
    kinds = [f"an empty {key}" if not value else f"{key} ({type(value).__name__})" for key, value in source.items()]
    return ", ".join(kinds) or "nothing"
