"""The content of a message, block by block, as chat templates take it: text, documents as text, images as parts.

What cannot be put in front of a model raises with the path of its block. Nothing is ever left out.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        """Stand for a picture."""
        super().__init__(type="image")
        self.picture = picture


Piece = str | ImagePart
"""One block, rendered."""


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
    texts: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            texts.append(piece)
            continue
        if texts:
            parts.append({"type": "text", "text": "\n".join(texts)})
            texts = []
        parts.append(piece)
    if not parts:
        return "\n".join(texts)
    return [*parts, {"type": "text", "text": "\n".join(texts)}] if texts else parts


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
        text = _decoded(source["bytes"], document.get("format"), where)
    else:
        raise UnsupportedContentError(
            f"{where}: cannot put a document block in front of the model: it must come as bytes or text, not as "
            f"{_source(document)}; load it before"
        )
    attributes = "".join(
        f' {key}="{html.escape(str(document[key]))}"' for key in ("name", "format", "context") if document.get(key)
    )
    return encodable(f"<document{attributes}>\n{text}\n</document>")


def _decoded(data: bytes, file_format: str | None, where: str) -> str:
    refused = f"{where}: cannot put a {file_format} document block in front of the model"
    advice = 'before the call, and pass it as {"source": {"text": ...}}'
    if file_format not in TEXT_FORMATS:
        raise UnsupportedContentError(
            f"{refused}: only bytes of {', '.join(TEXT_FORMATS)} are text; extract its text {advice}"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnsupportedContentError(f"{refused}: its bytes are not UTF-8 ({error}); decode it {advice}") from error


def _text_of(block: Mapping[str, Any], where: str) -> str:
    if "text" not in block:
        raise unsupported(block, where)
    return str(block["text"])


def _source(content: Mapping[str, Any]) -> str:
    """What a block came with in place of bytes."""
    source = content.get("source") or {}
    kinds = [f"an empty {key}" if not value else f"{key} ({type(value).__name__})" for key, value in source.items()]
    return ", ".join(kinds) or "nothing"
