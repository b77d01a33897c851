"""Control tokens that stand in the text of messages, where no template wrote them.

A page that a tool fetched may hold `<|im_end|>`. Encoded with the rest of the prompt it becomes the real control token,
as on the served model's own chat endpoint, and the page can end the turn and speak as the user. To keep it text, every
control token in a message is replaced by a unique mark before the template is rendered. Where a mark comes out of the
render, the stretch around it, up to the template's next control tokens, is encoded by a tokenizer that knows none.
Everything else is encoded as ever, so a conversation without such tokens has the same ids either way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

from ..messages.content import ImagePart
from .encoder import EncodedText, Encoder
from .renderer import ChatTemplateError

T = TypeVar("T")


@dataclass
class _Stretch:
    """A control token that the template wrote, or what stands between two of them."""

    text: str = ""
    has_mark: bool = False
    is_token: bool = False


class ControlTokens:
    """The control tokens of a tokenizer: all tokens that were added to its vocabulary, white space aside.

    These are more than the "special" ones: the marks of calls and results, such as `</tool_response>`, are among them.
    """

    def __init__(self, encoder: Encoder, new_mark: Callable[[], str]) -> None:
        """Look nothing up yet.

        Args:
            encoder: Encodes.
            new_mark: Makes a unique text that the chat template leaves as it is.
        """
        self._encoder = encoder
        self._new_mark = new_mark
        self._marks: dict[str, str] = {}  # by token

    @cached_property
    def _ids(self) -> dict[str, int]:
        tokenizer = self._encoder.tokenizer
        ids = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
        special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        return {token: token_id for token, token_id in (*ids.items(), *special) if token.strip()}

    @cached_property
    def _counted(self) -> frozenset[int]:
        # What a vocabulary lacks becomes its unknown token, whoever wrote it.
        return frozenset(self._ids.values()) - {self._encoder.tokenizer.unk_token_id}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(f"({_any_of(self._ids)})")

    @cached_property
    def _special(self) -> re.Pattern[str]:
        tokenizer = self._encoder.tokenizer
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        return re.compile(_any_of(token for token in self._ids if token in special | set(tokenizer.all_special_tokens)))

    @cached_property
    def _encode_without(self) -> Callable[[str], list[int]]:
        return self._encoder.without(self._ids)

    def special_in(self, text: str) -> str | None:
        """The first special token in a text; None if it holds none."""
        found = self._special.search(text)
        return None if found is None else found.group()

    def escape(self, value: T) -> T:
        """A JSON-like value with a mark in place of every control token in its texts; images stay as they are."""
        escaped: Any = value
        if isinstance(value, str):
            escaped = self._pattern.sub(self._mark, value)
        elif isinstance(value, Mapping) and not isinstance(value, ImagePart):
            escaped = {self.escape(key): self.escape(entry) for key, entry in value.items()}
        elif isinstance(value, list | tuple):
            escaped = [self.escape(entry) for entry in value]
        return escaped

    def _mark(self, match: re.Match[str]) -> str:
        return self._marks.setdefault(match.group(), self._new_mark())

    def pieces(self, text: str) -> list[EncodedText]:
        """A rendered text encoded, with control tokens in place of none of the marks.

        Raises:
            ChatTemplateError: A text of the conversation became a control token all the same.
        """
        tokens = {mark: token for token, mark in list(self._marks.items())}
        parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
        stretches = [_Stretch()]
        for number, part in enumerate(parts):
            if number % 2:
                stretches[-1].text += tokens[part]
                stretches[-1].has_mark = True
                continue
            first, *rest = self._pattern.split(part)
            stretches[-1].text += first
            stretches += [_Stretch(piece, is_token=position % 2 == 0) for position, piece in enumerate(rest)]
        pieces = []
        for has_mark, run in groupby(stretches, key=lambda stretch: stretch.has_mark):
            together = list(run)
            whole = "".join(stretch.text for stretch in together)
            own_tokens = sum(stretch.is_token for stretch in together)
            pieces.append(self._as_text(whole) if has_mark else self._as_rendered(whole, own_tokens))
        return pieces

    def _as_rendered(self, text: str, own_tokens: int) -> EncodedText:
        token_ids = self._encoder.encode(text)
        # A tokenizer may normalize some other spelling to that of a control token.
        if sum(token_id in self._counted for token_id in token_ids) > own_tokens:
            raise ChatTemplateError(
                "a message holds a text that the tokenizer turns into a control token, though it is spelled otherwise"
            )
        return EncodedText(text, token_ids)

    def _as_text(self, text: str) -> EncodedText:
        token_ids = self._encode_without(text)
        if not self._counted.isdisjoint(token_ids):  # vocabularies may have a control token as an ordinary piece, too
            token_ids = [token_id for letter in text for token_id in self._encode_without(letter)]
        if not self._counted.isdisjoint(token_ids):
            raise ChatTemplateError(
                f"a message holds a control token that this tokenizer cannot write as text: {text!r:.200}"
            )
        return EncodedText(text, token_ids, is_plain=True)


def texts_of(content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts in the content of a chat message."""
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def _any_of(words: Iterable[str]) -> str:
    """A pattern for the longest of many words at a place; linear in the text, however many they are.

    It matches nothing if there are none.
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        branches = [re.escape(letter) + pattern(child) for letter, child in node.items() if letter]
        either = f"(?:{'|'.join(branches)})" if branches else ""
        return f"{either}?" if branches and "" in node else either

    return pattern(tree) or "(?!)"
