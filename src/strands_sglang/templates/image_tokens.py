"""Images: from the placeholder that a chat template writes to the inputs of the server and the trainer.

A prompt with images has two forms. SGLang's `/generate` takes the template's text, with one placeholder per image and
the images in a separate field, and expands each placeholder itself. Training takes the ids with expanded placeholders,
and the tensors that the model's processor makes of the images. The recorded sequence is the expanded form, so lengths,
masks and logprobs are those of what the model saw. The short form is recorded too, per turn.

Promises: placeholders are expanded by the model's own processor. A placeholder that the template drops, or that a text
or a sampled token imitates, is an error before anything is sent. The images of a request are collected again for each
request. The server's prompt is compared with the recorded one.

The forms were observed on a real SGLang 0.5.23 server (Qwen2.5-VL, Qwen3-VL): ids with one placeholder per image are
taken unchanged; ids that are already expanded get no answer, or a 500.
"""

from __future__ import annotations

import base64
import copy
import io
import threading
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..exceptions import SGLangDecodingError, SGLangHTTPError
from ..messages.content import Picture, UnsupportedContentError
from ..shown import first_difference
from .encoder import EncodedText, Encoder, get_encoder, private_copy

if TYPE_CHECKING:
    from ..client.client import SGLangClient
    from .chat_template import ChatTemplate

TOKEN_KEYS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""The per-token outputs of a processor; the others are per image."""

_FIRST, _SECOND = "sentinelone", "sentineltwo"


# By processor, which models share: its tokenizer's encoder, a copy of it with a private tokenizer, and a lock.
_copies: weakref.WeakKeyDictionary[Any, tuple[Encoder, Any, threading.Lock]] = weakref.WeakKeyDictionary()
_copies_lock = threading.Lock()


@dataclass(frozen=True, eq=False, repr=False)
class ImageInputs:
    """The images of one turn's prompt.

    Attributes:
        pictures: The images in the order of the prompt, shape `(N,)`.
        sent_ids: The prompt tokens with one placeholder per image, as the server takes them, shape `(S,)`.
        train_inputs: The processor's tensors without those per token, such as `pixel_values` and `image_grid_thw`.
    """

    pictures: tuple[Picture, ...]
    sent_ids: array[int]
    train_inputs: Mapping[str, Any]


class ImageProcessor:
    """A model's processor together with its chat template. Safe to share between threads.

    Attributes:
        numbered: Whether the template numbers the images of a conversation, so that the text of one depends on the
            number of earlier ones.
    """

    def __init__(self, processor: Any, template: ChatTemplate) -> None:
        """Find out what the template writes for an image.

        Args:
            processor: The model's Hugging Face processor, from `AutoProcessor.from_pretrained`.
            template: The chat template.

        Raises:
            ValueError: `processor` takes no images, or the template has no place for them.
        """
        if not hasattr(processor, "image_processor"):
            raise ValueError(
                f"processor= must be the Hugging Face processor of a model that takes images, not {processor!r:.60}; "
                "AutoProcessor.from_pretrained(path) loads one"
            )
        # A copy whose tokenizer no other code calls, and the lock that serializes its own calls.
        encoder = get_encoder(processor.tokenizer)
        with _copies_lock:
            known = _copies.get(processor)
            if known is None or known[0] is not encoder:
                private = copy.copy(processor)
                private.tokenizer = private_copy(processor.tokenizer)  # processors pad; an encoder's copy must not
                known = _copies[processor] = encoder, private, threading.Lock()
        _, self._processor, self._lock = known
        self._template = template
        text = {"type": "text", "text": _FIRST}
        contents: list[Any] = [[text], [{"type": "image"}, text], [{"type": "image"}, {"type": "image"}, text]]
        try:
            none, single, two = (
                template.render(
                    [{"role": "user", "content": content}, {"role": "assistant", "content": _SECOND}],
                    add_generation_prompt=False,
                )
                for content in contents
            )
        except ValueError as error:
            raise ValueError(f"processor= was given, but the chat template takes no images: {error}") from error
        first, second = _inserted(none, single), _inserted(single, two)
        self._marks = Counter(token for token in template.encode(first) if template.is_special(token))
        if not self._marks:
            raise ValueError("processor= was given, but the chat template writes no control token for an image")
        self.numbered = first != second

    def expand(
        self, token_ids: Sequence[int], text: str | Sequence[EncodedText], pictures: Sequence[Picture]
    ) -> tuple[list[int], ImageInputs | None]:
        """Expand a turn's prompt to what the model sees. Takes up to a second per image: call it in a thread.

        Args:
            token_ids: The prompt with one placeholder per image, shape `(S,)`.
            text: The rendered text, as text or encoded. Its tokens end `token_ids`, or they begin with a sampled token
                that `token_ids` lack.
            pictures: The images of the text, in order.

        Returns:
            The ids with expanded placeholders, shape `(P,)`, and the images; None without images.

        Raises:
            UnsupportedContentError: An image cannot be read or processed, or the template dropped one.
            ValueError: The processor's tokenizer differs from the template's.
        """
        if not pictures:
            return list(token_ids), None
        where = ", ".join(picture.where for picture in pictures)
        for found, expected in self._miscounts(token_ids, pictures):
            if found < expected:
                raise UnsupportedContentError(
                    f"{where}: the chat template drops images of this message ({found} placeholders for {expected}); "
                    "many templates take images only in user messages"
                )
            raise UnsupportedContentError(
                f"{where}: the text holds the chat template's mark of an image ({found} placeholders for {expected}); "
                "remove it from the text"
            )
        images = [_opened(picture) for picture in pictures]
        parts = [EncodedText(text, self._template.encode(text))] if isinstance(text, str) else text
        length = sum(len(part.token_ids) for part in parts)
        added, lacking = max(len(token_ids) - length, 0), max(length - len(token_ids), 0)
        expanded: list[int] = []
        processed: list[ImageInputs] = []
        mark, per_image = next(iter(self._marks.items()))
        for part in parts:
            count = 0 if part.is_plain else part.token_ids.count(mark) // per_image
            if not count:
                expanded += part.token_ids
                continue
            taken = sum(len(entry.pictures) for entry in processed)
            with self._lock:
                if self._processor.tokenizer.encode(part.text, add_special_tokens=False) != part.token_ids:
                    raise ValueError(
                        "processor= and tokenizer= have different tokenizers: pass tokenizer=processor.tokenizer"
                    )
                try:
                    outputs = self._processor(
                        text=[part.text],
                        images=images[taken : taken + count],
                        add_special_tokens=False,
                        return_tensors="pt",
                    )
                except Exception as error:  # every processor has its own errors
                    raise UnsupportedContentError(
                        f"{where}: the model's processor rejects the images: {error}"
                    ) from error
            expanded += outputs["input_ids"][0].tolist()
            tensors = {key: value for key, value in outputs.items() if key not in TOKEN_KEYS}
            sent = array("i", part.token_ids)
            processed.append(ImageInputs(tuple(pictures[taken : taken + count]), sent, tensors))
        train_inputs = processed[0].train_inputs if len(processed) == 1 else multimodal_train_inputs(processed) or {}
        expanded = [*token_ids[:added], *expanded[lacking:]]
        return expanded, ImageInputs(tuple(pictures), array("i", token_ids), train_inputs)

    def _miscounts(self, token_ids: Sequence[int], pictures: Sequence[Picture]) -> Iterator[tuple[int, int]]:
        """Yield found and expected count of each control token of images, if they differ."""
        counts = ((token_ids.count(mark), count * len(pictures)) for mark, count in self._marks.items())
        return (pair for pair in counts if pair[0] != pair[1])

    def request_fields(self, sent_ids: Sequence[int], inputs: Iterable[ImageInputs]) -> dict[str, Any]:
        """Return the request's fields for images: those of the whole conversation, once each, built for each request.

        Args:
            sent_ids: The ids of the request.
            inputs: The images of the turns of the sequence, in order.

        Raises:
            UnsupportedContentError: The ids hold placeholders without an image, for example a sampled one. SGLang
                0.5.23 would answer with a 500, or never.
        """
        pictures = list(chain.from_iterable(turn.pictures for turn in inputs))
        if not pictures:
            return {}
        for found, expected in self._miscounts(sent_ids, pictures):
            raise UnsupportedContentError(
                f"the sequence holds {found} placeholders for {expected} images: the model sampled one, or a message "
                "holds one as text, and no server can tell which are images"
            )
        return {"image_data": [data_uri(picture) for picture in pictures], "return_prompt_token_ids": True}


def check_prompt(response: Mapping[str, Any], token_ids: Sequence[int]) -> None:
    """Compare the server's prompt of ids and images with the recorded one, if the server returns it.

    Raises:
        SGLangDecodingError: The prompts differ.
    """
    served = response.get("prompt_token_ids")
    if served is None or served == list(token_ids):
        return
    first = first_difference(served, token_ids)
    raise SGLangDecodingError(
        f"the server's prompt differs from the recorded one at token {first} ({served[first : first + 3]} there, "
        f"{list(token_ids[first : first + 3])} here): its processor has other settings than processor=, or it decodes "
        "the ids and encodes the text again, as SGLang does for some models and before mid-2026 for all"
    )


def multimodal_train_inputs(inputs: Iterable[ImageInputs]) -> dict[str, Any] | None:
    """Join the tensors of several turns along their first dimension; None without images.

    Args:
        inputs: The images of the turns of a sequence, in order.

    Raises:
        ValueError: The tensors of one name cannot be joined.
    """
    by_name: dict[str, list[Any]] = {}
    for turn in inputs:
        for name, value in turn.train_inputs.items():
            by_name.setdefault(name, []).append(value)
    if not by_name:
        return None
    import torch

    joined = {}
    for name, values in by_name.items():
        try:
            joined[name] = torch.cat([torch.as_tensor(value) for value in values], dim=0)
        except RuntimeError as error:
            raise ValueError(f"the processor's {name} of several turns cannot be joined: {error}") from error
    return joined


def data_uri(picture: Picture) -> str:
    """Return an image in the form that SGLang takes in JSON."""
    kind = "jpeg" if picture.format == "jpg" else picture.format
    return f"data:image/{kind};base64,{base64.b64encode(picture.data).decode()}"


async def require_image_understanding(client: SGLangClient, picture: Picture) -> None:
    """Reject an image if the server reports that its model takes none. The report is remembered.

    Raises:
        UnsupportedContentError: The server takes no images.
        SGLangClientError: The server cannot be reached.
    """
    server = client.servers[0]
    if server.takes_images is None:
        try:
            server.takes_images = (await client.model_info(server.base_url)).get("has_image_understanding")
        except SGLangHTTPError as error:  # routers have no such endpoint
            if error.status >= 500:
                raise
    if server.takes_images is False:  # a server that drops the images answers a shorter prompt, which is an error
        raise UnsupportedContentError(
            f"{picture.where}: the model served at {client.base_url} takes no images (has_image_understanding in its "
            "/model_info is false): serve one that does, or turn the image into text before the call"
        )


def _opened(picture: Picture) -> Any:
    """Open the image as SGLang does: three color channels, no alpha, not rotated."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(picture.data)) as image:
            return image.convert("RGB")
    except Exception as error:  # every format's reader has its own errors
        raise UnsupportedContentError(
            f"{picture.where}: the {len(picture.data)} bytes are not a readable image ({error}); its format is "
            f"{picture.format!r}"
        ) from error


def _inserted(text: str, longer: str) -> str:
    """Return the one piece of `longer` that `text` lacks."""
    start = first_difference(text, longer)
    end = first_difference(text[start:][::-1], longer[start:][::-1])
    return longer[start : len(longer) - end]
