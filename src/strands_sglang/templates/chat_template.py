"""From chat messages to prompt tokens: the opening of a sequence, and the continuation after a sampled turn.

The opening is the template's render of the whole conversation. The continuation is what the same template puts *after*
a sampled turn, found without rendering that turn again: a short stand-in conversation ends in an assistant message that
holds a unique sentinel; the new messages follow it; whatever the template writes behind the first end-of-turn token
after the sentinel is the continuation. The sampled tokens themselves are never decoded into a prompt. At construction
the method is checked against full renders of probe conversations. What it cannot prove raises
`UnprovenContinuationError`, and the caller starts a new sequence from a full render instead.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..families import Family, find_family, get_family
from ..messages import ChatMessage, pictures_of
from ..messages.content import Picture
from .behavior import (
    CASES,
    Proof,
    UnprovenContinuationError,
    derived_stop,
    find_forms,
    left_out,
    prefix_arguments,
    prove,
    reasoning_close,
    rewrites_history,
    text_after_turn,
)
from .control_tokens import ControlTokens, texts_of
from .encoder import EncodedText, Encoder, get_encoder
from .renderer import ChatTemplateError, TemplateRenderer, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_PART_OF_ROLE = {"system": "system prompt", "tool": "tool results"}
_TAIL_CHARACTERS = 200
_TAIL_TOKENS = 64


@dataclass(frozen=True)
class Prompt:
    """Tokens to put in front of the model.

    Attributes:
        token_ids: Ids, shape (T,).
        text: The rendered text that they end with, from the end of the turn before it on.
        kept: How many of the sampled ids before it stay in the sequence; None for all of them.
        note: Why not all of them stay.
        pictures: The images of the text, in its order; the ids hold one placeholder for each.
        encoded: The text and its ids in parts. The ids may have more in front of them, or lack the first.
    """

    token_ids: list[int]
    text: str
    kept: int | None = None
    note: str = ""
    pictures: tuple[Picture, ...] = ()
    encoded: tuple[EncodedText, ...] = ()

    def ends_with(self, mark: str) -> bool:
        """Whether a mark such as `<think>` is the last thing in the prompt, white space aside."""
        return bool(mark.strip()) and self.text[-_TAIL_CHARACTERS:].rstrip().endswith(mark.rstrip())


@dataclass(frozen=True)
class SampledTurn:
    """A turn that the model sampled, as far as what follows depends on it.

    Attributes:
        output_ids: The sampled ids, shape (T,).
        stop_token_id: The stop token among them; None if the turn was cut off or ended at a stop string.
        calls: The turn's tool calls: `{"id", "name"}` in order.
        ends_in_reasoning: Whether the turn ends inside reasoning that nothing closed.
    """

    output_ids: Sequence[int]
    stop_token_id: int | None
    calls: Sequence[Mapping[str, Any]] = ()
    ends_in_reasoning: bool = False


class ChatTemplate:
    """A tokenizer's chat template, as the source of prompt tokens. Safe to share between threads.

    Attributes:
        tokenizer: The library's own copy of the Hugging Face tokenizer.
        encode: The ids of rendered text; no special tokens are added, the template wrote them.
        decode: The text of ids, special tokens included.
        family: The model family; None if it is not known.
        stops: The tokens that can end an assistant's turn.
        identity: What about the template is part of a conversation's identity.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        family: str | None = None,
        escape_control_tokens: bool = False,
    ) -> None:
        """Find the template and the tokens that end an assistant's turn in it, and check what can be proven.

        Args:
            tokenizer: A Hugging Face tokenizer.
            chat_template: Jinja text that replaces the tokenizer's own template.
            arguments: Passed to the template with every render, e.g. `{"enable_thinking": False}`.
            family: Name of the model family, where the template does not tell.
            escape_control_tokens: Whether control tokens that stand in messages and tools are encoded as ordinary text.

        Raises:
            ChatTemplateError: The tokenizer has no chat template and none was given, or it cannot render a plain
                exchange; or the named family's stop tokens are not in the vocabulary.
            ValueError: There is no such family.
        """
        self._renderer = TemplateRenderer(tokenizer, chat_template, arguments or {})
        self.tokenizer = self._renderer.tokenizer
        self.render = self._renderer.render
        self.encode, self.decode = self._renderer.encoder.encode, self._renderer.encoder.decode
        self._control_tokens = ControlTokens(self._renderer.encoder, self._renderer.sentinel)
        self._escapes, self._warned = escape_control_tokens, False
        self.family, self.stops = self._find_family(family)
        self._renderer.family, self._renderer.stops = self.family, self.stops
        self._renderer.forms = find_forms(self._renderer)
        self.identity = {
            "chat template": self._renderer.chat_template,
            "template arguments": prefix_arguments(self._renderer),
        }
        if escape_control_tokens:
            self.identity["control tokens"] = "escaped"
        self._rewrites: dict[tuple[bool, bool], bool] = {}
        self._counted = _CountedTexts()
        self._proofs: dict[tuple[str, bool, bool], Proof] = {}
        self.self_check()

    # --- what is proven ---

    def self_check(self, *, has_system: bool = True, has_tools: bool = True) -> dict[str, str | None]:
        """What can be proven of this template: by case, why it cannot be; None where it is proven.

        Args:
            has_system: Whether conversations begin with a system message.
            has_tools: Whether there are tools.
        """
        return {case: self._prove(case, has_system, has_tools).reason for case in CASES}

    def _prove(self, case: str, has_system: bool, has_tools: bool) -> Proof:
        if not self.stops:
            return Proof("the chat template ends an assistant turn with no special token")
        key = (case, has_system, has_tools)
        if key not in self._proofs:
            shows_calls = "tool calls" not in self.left_out
            self._proofs[key] = prove(
                self._renderer, case, has_system=has_system, has_tools=has_tools, shows_calls=shows_calls
            )
        return self._proofs[key]

    def rewrites_history(self, *, tool_result: bool = False, reasoning: bool = True) -> bool:
        """Whether the template writes earlier turns differently once something follows them.

        Args:
            tool_result: Whether a tool result follows, rather than a user message.
            reasoning: Whether the turns hold reasoning.
        """
        key = (tool_result, reasoning)
        if key not in self._rewrites:
            self._rewrites[key] = rewrites_history(self._renderer, tool_result=tool_result, reasoning=reasoning)
        return self._rewrites[key]

    @cached_property
    def left_out(self) -> frozenset[str]:
        """What the template leaves out without a word: "system prompt", "tool calls", "tool results"."""
        return left_out(self._renderer)

    @cached_property
    def reasoning_close(self) -> str | None:
        """What closes unfinished reasoning; None if that is not known."""
        return reasoning_close(self._renderer)

    # --- prompts ---

    def opening(self, messages: Sequence[ChatMessage], tools: Tools, *, ahead: bool = False) -> Prompt:
        """The prompt that opens a sequence: the whole conversation, rendered.

        Args:
            messages: Chat messages, the system message first if there is one.
            tools: Tools in OpenAI form.
            ahead: Whether the tokens are counted only, and the call that sends them comes next.

        Raises:
            ChatTemplateError: The template refused the conversation, or would leave something out of it.
        """
        self._check_is_shown(messages)
        pictures = tuple(pictures_of(messages))
        messages, tools = self._escaped(self._renderer.forms.with_own_ids(messages), tools)
        encoded = self._encoded(self.render(messages, tools, add_generation_prompt=True), ahead)
        return Prompt(_ids_of(encoded), _text_of(encoded), pictures=pictures, encoded=encoded)

    def continuation(
        self,
        turn: SampledTurn,
        messages: Sequence[ChatMessage],
        tools: Tools,
        *,
        has_system: bool = True,
        had_tool_results: bool = False,
        ahead: bool = False,
    ) -> Prompt:
        """The prompt tokens that follow a sampled turn.

        A turn that was cut off, or that ended at a stop string or at a token of its own text (`</tool_call>`), gets
        what is missing of its end as prompt tokens. Of one that ended with another control token than the template
        writes there, all but that token stays in the sequence.

        Args:
            turn: The turn.
            messages: The chat messages that came since.
            tools: Tools in OpenAI form.
            has_system: Whether the conversation begins with a system message.
            had_tool_results: Whether the conversation before the turn holds tool results.
            ahead: As for `opening`.

        Raises:
            UnprovenContinuationError: The template's text after the turn cannot be told.
            ChatTemplateError: The template would leave something out of the new messages.
        """
        last = turn.output_ids[-1] if len(turn.output_ids) else None
        results = sum(message["role"] == "tool" for message in messages)
        happens = {
            "tool result": results == 1,
            "several tool results": results > 1,
            "user turn": any(message["role"] == "user" for message in messages),
            "cut turn": turn.stop_token_id is None and not results,
        }
        needs_tool_step = False
        for case in CASES:
            if happens[case]:
                proof = self._prove(case, has_system, bool(tools))
                if proof.reason is not None:
                    raise UnprovenContinuationError(proof.reason)
                needs_tool_step = needs_tool_step or proof.needs_tool_step
        self._check_is_shown(messages)
        pictures = tuple(pictures_of(messages))
        # A template without a place for calls has none to write: what is new follows the turn's text.
        shown = [{"id": call["id"], "name": call["name"]} for call in turn.calls]
        shown = shown if results and "tool calls" not in self.left_out else []
        messages, tools = self._escaped(self._renderer.forms.with_own_ids(messages), tools)
        after = text_after_turn(
            self._renderer,
            self._control_tokens.escape(shown) if self._escapes else shown,
            messages,
            tools,
            has_system=has_system,
            after_tool_step=needs_tool_step and had_tool_results,
        )
        end_id = self.tokenizer.convert_tokens_to_ids(after.end)
        encoded = self._encoded(after.end + after.following, ahead)
        token_ids = _ids_of(encoded)
        if not token_ids or token_ids[0] != end_id:
            raise UnprovenContinuationError(
                f"{after.end!r} does not stay one token in front of {after.following[:40]!r}"
            )
        text = _text_of(encoded)
        if last == end_id:
            return Prompt(token_ids[1:], text, pictures=pictures, encoded=encoded)
        stop = "" if last is None else str(self.tokenizer.convert_ids_to_tokens(last))
        # A control token of the turn's own text, at which a user's `stop_token_ids` stopped, stays.
        is_odd = last == turn.stop_token_id and self.is_special(last) and stop not in after.rest
        if last is not None and (last in self.stop_ids or is_odd):
            note = f"the model stopped with {stop!r} where the chat template puts {after.end!r}"
            return Prompt(token_ids, text, len(turn.output_ids) - 1, note, pictures, encoded)
        missing = "" if results else self._missing(turn, after.rest)
        return Prompt([*self.encode(missing), *token_ids], text, pictures=pictures, encoded=encoded)

    def _escaped(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[Sequence[ChatMessage], Tools]:
        """The messages and tools as they are rendered, with marks in place of control tokens if those are escaped."""
        if self._escapes:
            return self._control_tokens.escape(messages), self._control_tokens.escape(tools)
        for message in messages:
            if message["role"] in ("user", "tool") and not self._warned:
                self._warn_of_control_tokens(message)
        return messages, tools

    def _warn_of_control_tokens(self, message: ChatMessage) -> None:
        found = map(self._control_tokens.special_in, texts_of(message["content"]))
        token = next((token for token in found if token is not None), None)
        if token is not None:
            self._warned = True
            logger.warning(
                "role=<%s>, token=<%s> | the text of a message holds a control token, which becomes a real one in the "
                "prompt, as on the server's chat endpoint; escape_control_tokens=True keeps it text",
                message["role"],
                token,
            )

    def _encoded(self, text: str, ahead: bool) -> tuple[EncodedText, ...]:
        encoded = self._counted.take(text)
        if encoded is None:
            pieces = self._control_tokens.pieces(text) if self._escapes else [EncodedText(text, self.encode(text))]
            encoded = tuple(pieces)
        if ahead:
            self._counted.put(text, encoded)
        return encoded

    def _check_is_shown(self, messages: Sequence[ChatMessage]) -> None:
        """Refuse what the template would leave out without a word."""
        for i, message in enumerate(messages):
            where = getattr(message, "where", f"message {i}")
            parts = {_PART_OF_ROLE.get(message["role"]), "tool calls" if message.get("tool_calls") else None}
            for part in parts & self.left_out:
                raise ChatTemplateError(
                    f"{where}: the chat template leaves the {part} out of what it writes; use a template that has a "
                    "place for them, chat_template=<jinja text>"
                )
            if self._renderer.forms.leaves_out(message):
                raise ChatTemplateError(
                    f"{where}: the chat template leaves text beside a tool call out of what it writes; take the text "
                    "out of the message, or use a template that has a place for it, chat_template=<jinja text>"
                )

    def _missing(self, turn: SampledTurn, rest: str) -> str:
        """What the template still writes of a turn whose text ends here, without what the turn has of it already."""
        if turn.ends_in_reasoning:
            if self.reasoning_close is None:
                raise UnprovenContinuationError(
                    "the turn was cut off in its reasoning, and what closes that is unknown"
                )
            rest = self.reasoning_close + rest
        text = self.decode(turn.output_ids[-_TAIL_TOKENS:]) if rest else ""
        sampled = next(length for length in range(len(rest), -1, -1) if text.endswith(rest[:length]))
        return rest[sampled:]

    # --- tokens ---

    def is_special(self, token_id: int | None) -> bool:
        """Whether a token is a control token, which never belongs to the text of an answer."""
        token = self.tokenizer.added_tokens_decoder.get(token_id)
        is_marked = token is not None and token.special
        return is_marked or token_id in self.tokenizer.all_special_ids or token_id in self.stop_ids

    def mentions(self, mark: str) -> bool:
        """Whether the template's text holds a mark."""
        return mark in self._renderer.template_text

    @cached_property
    def stop_ids(self) -> list[int]:
        """The tokens that can end an assistant's turn."""
        return [self.tokenizer.convert_tokens_to_ids(stop) for stop in self.stops]

    def call_id(self, tool_use_id: str, name: str, number: int) -> str:
        """The id of a tool call in the form in which the family's templates show ids.

        Args:
            tool_use_id: The agent's id.
            name: The tool's name.
            number: How many calls the conversation has before it.
        """
        make = self.family.call_id if self.family is not None else None
        return tool_use_id if make is None else make(tool_use_id, name, number)

    def _find_family(self, name: str | None) -> tuple[Family | None, tuple[str, ...]]:
        """The model family with its stop tokens; or none, and the stop token that can be derived from the template."""
        family = find_family(self._renderer.template_text) if name is None else get_family(name)
        if family is not None:
            added = self._renderer.added_tokens(special_only=False)
            known = tuple(stop for stop in family.stops if stop in added)
            if known:
                return family, known
            if name is not None:
                raise ChatTemplateError(f"family={name!r}: none of its stop tokens {family.stops} is in the vocabulary")
        # None that is known, or its template on another vocabulary.
        stop = derived_stop(self._renderer)
        return None, () if stop is None else (stop,)


class _CountedTexts:
    """Long texts that were encoded to be counted, until the call takes them that sends them: each is encoded once."""

    SHORTEST = 1000  # characters; for less it is not worth it
    MOST = 16_000_000  # characters together; what was counted for nothing has to go

    def __init__(self) -> None:
        """Start empty."""
        self._texts: dict[str, tuple[EncodedText, ...]] = {}
        self._characters = 0
        self._lock = threading.Lock()

    def put(self, text: str, encoded: tuple[EncodedText, ...]) -> None:
        """Keep an encoded text."""
        with self._lock:
            if self.SHORTEST <= len(text) <= self.MOST and text not in self._texts:
                self._texts[text] = encoded
                self._characters += len(text)
            while self._characters > self.MOST:
                oldest = next(iter(self._texts))
                self._characters -= len(oldest)
                del self._texts[oldest]

    def take(self, text: str) -> tuple[EncodedText, ...] | None:
        """An encoded text, which is forgotten here; None if it is not kept."""
        with self._lock:
            encoded = self._texts.pop(text, None)
            if encoded is not None:
                self._characters -= len(text)
            return encoded


def _ids_of(encoded: Sequence[EncodedText]) -> list[int]:
    return [token_id for part in encoded for token_id in part.token_ids]


def _text_of(encoded: Sequence[EncodedText]) -> str:
    return "".join(part.text for part in encoded)


_Key = tuple[str, str, "str | None", bool]
_Templates = weakref.WeakValueDictionary[_Key, ChatTemplate]  # weak, for a template holds its encoder
_templates: weakref.WeakKeyDictionary[Encoder, _Templates]
_templates = weakref.WeakKeyDictionary()
_templates_lock = threading.Lock()


def get_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    arguments: Mapping[str, Any],
    family: str | None = None,
    escape_control_tokens: bool = False,
) -> ChatTemplate:
    """A shared `ChatTemplate`, so that a thousand models on one tokenizer look at its template once.

    Raises:
        ChatTemplateError: As for `ChatTemplate`.
        ValueError: There is no such family.
    """
    if not hasattr(tokenizer, "chat_template"):
        raise ChatTemplateError(
            f"tokenizer= must be a Hugging Face tokenizer, not {tokenizer!r:.60}; get_tokenizer(path) loads one"
        )
    text = chat_template or tokenizer.chat_template
    key = (repr(text), json.dumps(arguments, sort_keys=True, default=repr), family, escape_control_tokens)
    encoder = get_encoder(tokenizer)
    with _templates_lock:
        known = _templates.setdefault(encoder, weakref.WeakValueDictionary())
        template = known.get(key)
        if template is None:
            template = known[key] = ChatTemplate(
                tokenizer,
                chat_template=chat_template,
                arguments=arguments,
                family=family,
                escape_control_tokens=escape_control_tokens,
            )
        return template


__all__ = [
    "CASES",
    "ChatTemplate",
    "ChatTemplateError",
    "Prompt",
    "SampledTurn",
    "UnprovenContinuationError",
    "get_chat_template",
]
