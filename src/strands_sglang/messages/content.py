"""Strands messages in the form of chat templates: text, documents as text, images as parts.

Content that no model can take raises an error with the path of its block. Nothing is ever dropped.
"""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from strands.types.content import Message, Messages
from strands.types.tools import ToolResult, ToolSpec

from ..json_values import dumps

TEXT_FORMATS = ("txt", "md", "csv", "html")
"""The formats of Strands documents whose bytes are text."""

Content = str | list[dict[str, str]]
"""Text, or parts if there are images: `{"type": "text", "text": ...}` and `ImagePart`."""


class UnsupportedContentError(ValueError):
    """A message holds content that cannot be rendered for the model. The error message names its path."""


@dataclass(frozen=True)
class Picture:
    """An image of a conversation.

    Attributes:
        data: Bytes of the image file; the same object as in the Strands message.
        format: `"png"`, `"jpeg"`, `"gif"` or `"webp"`.
        where: Path of the image in the history, for error messages.
    """

    data: bytes
    format: str
    where: str


class ImagePart(dict[str, str]):
    """`{"type": "image"}`, as chat templates take an image; the picture is an attribute that they ignore."""

    def __init__(self, picture: Picture) -> None:
        """Wrap a picture."""
        super().__init__(type="image")
        self.picture = picture


Piece = str | ImagePart
"""One block, rendered."""

_UNKNOWN_TOOL = "Unknown tool"  # start of Strands' own result of a call whose tool it does not have

ChatMessage = dict[str, Any]
"""A message in the form of chat templates: role, content and, for assistants, reasoning_content and tool_calls.

The content is text, or a list of parts if there are images (`Content`).
"""


class PlacedMessage(ChatMessage):
    """A chat message that knows its path in the Strands history, for error messages."""

    def __init__(self, where: str, **fields: Any) -> None:
        """Create a message from its fields."""
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
    """Convert Strands messages to chat-template messages. Every content block is rendered or raises; none is dropped.

    Tool results become one `tool` message each, in the order of their calls (Strands puts those of invalid calls first,
    and those of interrupted ones last). Other blocks of the same message become a `user` message after them. The blocks
    of a message are joined by newlines. A document becomes text with its name around it:

        <document name="prices" format="csv">
        apple,3
        </document>

    Whether a tool succeeded is not rendered: chat templates have no field for it, and a tool's error text is in the
    content of its result.

    Args:
        messages: Strands messages.
        known_calls: Tool calls of the assistant message right before `messages`, if it is not among them:
            `{"toolUseId", "name", "id"}`.
        result_notice: Given a toolUseId, the text that replaces Strands' "Unknown tool" result: the notice to the model
            about a call that did not parse. None keeps the result; other results are always kept.
        as_shown: Given a toolUseId, the tool's name and the number of earlier calls, the name and the id that the model
            reads: the name that it wrote if Strands has `INVALID_NAME`, and the id in its family's format.
        calls_before: Number of calls before `messages`.
        first: Position of the first of `messages` in the whole history, for error messages.
        images: Whether the model takes images; content with an image is a list of parts.

    Raises:
        UnsupportedContentError: A block cannot be rendered; the error message names its path.
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


def blocks_of(messages: Iterable[Message]) -> Iterator[Any]:
    """Return the content blocks of Strands messages in order."""
    return chain.from_iterable(message["content"] for message in messages)


def plain_texts(value: Any) -> Iterator[str]:
    """Yield the texts in content blocks, and skip everything else."""
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
    """Return the images of chat messages, in the order in which a template renders them."""
    parts = chain.from_iterable(message["content"] for message in chat if isinstance(message["content"], list))
    return [part.picture for part in parts if isinstance(part, ImagePart)]


class ChatTools(list[dict[str, Any]]):
    """Tools in the OpenAI form that chat templates take.

    Attributes:
        digest: Digest of the tools as they are written, where the order of keys matters. None if a value is not of one
            of JSON's own types: a subclass of `str` could look different to a template.
    """

    def __init__(self, tools: Iterable[dict[str, Any]]) -> None:
        """Look at the values once."""
        super().__init__(tools)
        self.digest = hashlib.sha256(json.dumps(self).encode()).digest() if is_plain(list(self)) else None


def to_chat_tools(tool_specs: Iterable[ToolSpec] | None) -> ChatTools | None:
    """Convert Strands tool specs to the OpenAI form that chat templates take; None if there are none."""
    tools = ChatTools(
        {
            "type": "function",
            "function": encodable_value(
                {
                    "name": spec["name"],
                    "description": spec["description"],
                    "parameters": spec["inputSchema"].get("json", spec["inputSchema"]),
                }
            ),
        }
        for spec in tool_specs or ()
    )
    return tools or None


def is_plain(value: Any) -> bool:
    """Whether a value consists of JSON's own types, with text as keys, and of no subclasses of them."""
    if type(value) is dict:
        return all(type(key) is str and is_plain(entry) for key, entry in value.items())
    if type(value) is list:
        return all(map(is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def system_text(system_prompt: str | None, system_prompt_content: Iterable[Mapping[str, Any]] | None) -> str | None:
    """Return the system prompt as text; None if there is none.

    Raises:
        UnsupportedContentError: A block is neither text nor a cache point.
    """
    texts = []
    for i, block in enumerate(system_prompt_content or ()):
        if "text" in block:
            texts.append(block["text"])
        elif "cachePoint" not in block:
            raise UnsupportedContentError(f"system_prompt[{i}]: cannot render a {block_kind(block)} block as text")
    if system_prompt is None and texts:
        system_prompt = "\n".join(texts)
    return None if system_prompt is None else encodable(system_prompt)


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
    """Whether a result is Strands' own answer to a call of an unknown tool."""
    texts = [block.get("text") or "" for block in result["content"]]
    return len(texts) == 1 and texts[0].startswith(_UNKNOWN_TOOL)


# --- block by block ---


def render_block(block: Mapping[str, Any], where: str, *, images: bool) -> Piece:
    """Render a text, document or image block of a message.

    Args:
        block: The Strands content block.
        where: Path of the block, for error messages.
        images: Whether the model takes images.

    Raises:
        UnsupportedContentError: The block has another kind, or a form that cannot be rendered.
    """
    if "text" in block:
        return encodable(block["text"])
    if "document" in block:
        return _document(block["document"], where)
    if "image" in block:
        return _image(block["image"], where, images)
    raise unsupported(block, where)


def render_result(blocks: Sequence[Mapping[str, Any]], where: str, *, images: bool) -> Content:
    """Render the content of a tool result: the blocks of a message, and JSON.

    Raises:
        UnsupportedContentError: A block cannot be rendered.
    """
    pieces: list[Piece] = []
    for k, block in enumerate(blocks):
        if "json" in block:
            try:
                pieces.append(encodable(dumps(block["json"], ensure_ascii=False)))
            except (TypeError, ValueError) as error:
                raise UnsupportedContentError(f"{where}.content[{k}].json: {error}") from error
        else:
            pieces.append(render_block(block, f"{where}.content[{k}]", images=images))
    return join_pieces(pieces)


def join_pieces(pieces: Sequence[Piece]) -> Content:
    """Join texts by newlines, with images between them as parts of their own."""
    parts: list[dict[str, str]] = []
    for _, run in groupby(pieces, key=type):
        together = list(run)
        images = [piece for piece in together if isinstance(piece, ImagePart)]
        parts += images or [{"type": "text", "text": "\n".join(map(str, together))}]
    if any(isinstance(part, ImagePart) for part in parts):
        return parts
    return parts[0]["text"] if parts else ""


def encodable(text: str) -> str:
    """Replace lone surrogates in a text: broken files hold them, and no tokenizer takes them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def encodable_value(value: Any) -> Any:
    """Replace lone surrogates in the texts of a JSON-like value; a value without any is returned unchanged."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # the template refuses what is not JSON
        return value
    clean = encodable(text)
    return value if clean == text else json.loads(clean)


def unsupported(block: Mapping[str, Any], where: str) -> UnsupportedContentError:
    """Return the error for a kind of block that is never rendered."""
    return UnsupportedContentError(
        f"{where}: cannot put a {block_kind(block)} block in front of the model; supported are text, json, tool uses, "
        "tool results, reasoning, and documents and images of users and tools. Turn the block into text before the call"
    )


def block_kind(block: Mapping[str, Any]) -> str:
    """Return the kind of a block, for error messages."""
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
        raise UnsupportedContentError(f"{refused}: it must be bytes, not {_source(image)}; load it first")
    return ImagePart(Picture(data, file_format, where))


def _document(document: Mapping[str, Any], where: str) -> str:
    """Render a document as text between two tags; the first holds its name, format and context."""
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
            f"{where}: cannot put a document block in front of the model: it must be bytes or text, not "
            f"{_source(document)}; load it first"
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
    """Describe the source of a block that has no bytes."""
    source = content.get("source") or {}
    kinds = [f"an empty {key}" if not value else f"{key} ({type(value).__name__})" for key, value in source.items()]
    return ", ".join(kinds) or "nothing"
