"""From chat messages to prompt tokens: the opening of a sequence, and the continuation after a sampled turn.

The opening is the template's render of the whole conversation. The continuation is what the same template puts *after*
a sampled turn, found without rendering that turn again: a short stand-in conversation ends in an assistant message that
holds a unique sentinel; the new messages follow it; whatever the template writes behind the first end-of-turn token
after the sentinel is the continuation. The sampled tokens themselves are never decoded into a prompt. What this method
cannot prove raises `UnprovenContinuationError`, and the caller starts a new sequence from a full render instead.
"""

from __future__ import annotations

import json
import threading
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .families import find_family
from .messages import ChatMessage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAIL_CHARACTERS = 200


class ChatTemplateError(ValueError):
    """The chat template is missing, or refused a conversation. The message holds the template's own words."""


class UnprovenContinuationError(Exception):
    """What follows a sampled turn cannot be derived from the template. The message says why."""


@dataclass(frozen=True)
class Prompt:
    """Tokens to put in front of the model.

    Attributes:
        token_ids: Ids, shape (T,).
        tail: The last characters of its text.
    """

    token_ids: list[int]
    tail: str

    def ends_with(self, mark: str) -> bool:
        """Whether a mark such as `<think>` is the last thing in the prompt, white space aside."""
        return bool(mark) and self.tail.rstrip().endswith(mark)


class ChatTemplate:
    """A tokenizer's chat template, as the source of prompt tokens. Immutable; safe to share between threads."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Find the template and the token that ends an assistant's turn in it.

        Args:
            tokenizer: A Hugging Face tokenizer.
            chat_template: Jinja text that replaces the tokenizer's own template.
            arguments: Passed to the template with every render, e.g. `{"enable_thinking": False}`.

        Raises:
            ChatTemplateError: The tokenizer has no chat template and none was given, or it cannot render a plain
                exchange.
        """
        if chat_template is None and not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise ChatTemplateError(
                f"the tokenizer {name!r} has no chat template, so messages cannot be turned into tokens; "
                "use the tokenizer of an instruction-tuned model, or pass chat_template=<jinja text>"
            )
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        # Pinned, since a tokenizer is shared and may get another template; named ones are chosen at each render.
        own = getattr(tokenizer, "chat_template", None)
        self._chat_template = chat_template or (own if isinstance(own, str) else None)
        self._lock = threading.Lock()  # fast tokenizers raise "Already borrowed" when two threads encode
        self.family = find_family(self._chat_template or "")
        self.stops = self._find_stops()
        self._moves_tools = self._tools_follow_a_turn()
        self.identity = {
            "chat template": self._chat_template or tokenizer.chat_template,
            "template arguments": self._prefix_arguments(),
        }

    # --- prompts ---

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None) -> Prompt:
        """The prompt that opens a sequence: the whole conversation, rendered.

        Args:
            messages: Chat messages, the system message first if there is one.
            tools: Tools in OpenAI form.

        Raises:
            ChatTemplateError: The template refused the conversation.
        """
        text = self.render(messages, tools, add_generation_prompt=True)
        return Prompt(self.encode(text), text[-_TAIL_CHARACTERS:])

    def continuation(
        self,
        output_ids: Sequence[int],
        stop_token_id: int | None,
        calls: Sequence[Mapping[str, Any]],
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        has_system: bool = True,
    ) -> Prompt:
        """The prompt tokens that follow a sampled turn.

        Args:
            output_ids: The turn's sampled ids, shape (T,).
            stop_token_id: The stop token among them; None if the turn was cut off or ended at a stop string. Such a
                turn, and one that stopped at a token of its own text (`</tool_call>`), gets its missing end-of-turn
                token here, as a prompt token.
            calls: The turn's tool calls: `{"id", "name"}` in order.
            messages: The chat messages that came since.
            tools: Tools in OpenAI form.
            has_system: Whether the conversation begins with a system message.

        Raises:
            UnprovenContinuationError: The template's text after the turn cannot be told.
        """
        if not self.stops:
            raise UnprovenContinuationError("the chat template ends an assistant turn with no special token")
        if tools and self._moves_tools and any(message["role"] == "user" for message in messages):
            raise UnprovenContinuationError("the chat template moves the tools behind the turn")
        end, after = self._text_after_turn(calls, messages, tools, has_system)
        end_id = self.tokenizer.convert_tokens_to_ids(end)
        if stop_token_id not in (None, end_id) and self.is_special(stop_token_id):
            stop = self.tokenizer.convert_ids_to_tokens(stop_token_id)
            raise UnprovenContinuationError(f"the model stopped with {stop!r} where the chat template puts {end!r}")
        text = end + after
        token_ids = self.encode(text)
        if not token_ids or token_ids[0] != end_id:
            raise UnprovenContinuationError(f"{end!r} does not stay one token in front of {text[len(end) :][:40]!r}")
        ended = len(output_ids) > 0 and output_ids[-1] == end_id
        return Prompt(token_ids[1:] if ended else token_ids, text[-_TAIL_CHARACTERS:])

    def _text_after_turn(
        self,
        calls: Sequence[Mapping[str, Any]],
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        has_system: bool,
    ) -> tuple[str, str]:
        """The token that ends the turn, and the template's text behind it."""
        sentinel, system = f"sentinel{uuid.uuid4().hex}", f"system{uuid.uuid4().hex}"
        answers_calls = any(message["role"] == "tool" for message in messages)
        stand_in: ChatMessage = {"role": "assistant", "content": sentinel}
        if calls and answers_calls:
            # The sentinel stands in the last call, since that is what the template renders last.
            stand_in["content"] = ""
            stand_in["tool_calls"] = [
                {
                    "type": "function",
                    "id": call["id"],
                    "function": {"name": call["name"], "arguments": {"argument": sentinel}},
                }
                for call in calls
            ]
        # Some templates refuse a system message, so there is one only where the conversation itself has one.
        opening = [{"role": "system", "content": system}] if has_system else []
        conversation = [*opening, {"role": "user", "content": "u"}, stand_in, *messages]
        try:
            text = self.render(conversation, tools, add_generation_prompt=True)
        except ChatTemplateError as error:
            # Whether the template refuses the messages or only the stand-in is for the full render to tell.
            raise UnprovenContinuationError(str(error)) from error
        _, found, after = text.rpartition(sentinel)
        if not found:
            raise UnprovenContinuationError("the chat template leaves the assistant's turn out of its render")
        if system in after:
            raise UnprovenContinuationError("the chat template moves the system prompt behind the turn")
        found_stops = [(after.index(stop), stop) for stop in self.stops if stop in after]
        if not found_stops:
            raise UnprovenContinuationError(f"the chat template does not end the turn with any of {self.stops}")
        position, end = min(found_stops)
        # Without knowing the family, a control token in between may be the true end of the turn, and what stands behind
        # it a message.
        between = after[:position]
        if self.family is None and any(token in between for token in self._special_tokens()):
            raise UnprovenContinuationError(f"a control token stands between the turn and {end!r}")
        return end, after[position + len(end) :]

    # --- text and tokens ---

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The template's text for a conversation.

        Raises:
            ChatTemplateError: The template refused it.
        """
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
                chat_template=self._chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(self.arguments if arguments is None else arguments),
            )
        except Exception as error:  # templates raise whatever their expressions raise
            roles = [message["role"] for message in messages]
            raise ChatTemplateError(f"the chat template cannot render the roles {roles}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text; no special tokens are added, the template wrote them."""
        with self._lock:
            return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        with self._lock:
            return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def is_special(self, token_id: int | None) -> bool:
        """Whether a token is a control token, which never belongs to the text of an answer."""
        token = self.tokenizer.added_tokens_decoder.get(token_id)
        return token_id in self.tokenizer.all_special_ids or (token is not None and token.special)

    # --- what can be derived ---

    @property
    def stop_ids(self) -> list[int]:
        """The tokens that can end an assistant's turn."""
        return [self.tokenizer.convert_tokens_to_ids(stop) for stop in self.stops]

    def _special_tokens(self) -> set[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        return {token.content for token in added if token.special} | set(self.tokenizer.all_special_tokens) - {""}

    def _find_stops(self) -> tuple[str, ...]:
        """The family's stop tokens, or the first special token that the template writes behind an assistant's text."""
        special = self._special_tokens()
        if self.family is not None:
            known = tuple(stop for stop in self.family.stops if stop in special)
            if known:
                return known
            self.family = None  # its template on another vocabulary
        sentinel = f"sentinel{uuid.uuid4().hex}"
        exchange = [{"role": "user", "content": "u"}, {"role": "assistant", "content": sentinel}]
        after = self.render(exchange, add_generation_prompt=False).rpartition(sentinel)[2]
        found = [(after.index(token), -len(token), token) for token in special if token in after]
        return (min(found)[2],) if found else ()

    def _tools_follow_a_turn(self) -> bool:
        """Whether the template writes the tools in front of the latest user message, as Mistral's do."""
        sentinel, name = f"sentinel{uuid.uuid4().hex}", f"tool{uuid.uuid4().hex}"
        tool = {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
        exchange = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": sentinel},
            {"role": "user", "content": "v"},
        ]
        try:
            return name in self.render(exchange, [tool], add_generation_prompt=True).rpartition(sentinel)[2]
        except ChatTemplateError:
            return False  # a template that refuses tools moves none

    def _prefix_arguments(self) -> str:
        """The arguments that change how history is rendered; others touch only the generation prompt."""
        probe: list[ChatMessage] = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
            {"role": "user", "content": "v"},
        ]

        def changes(name: str) -> bool:
            try:
                with_it = self.render(probe, add_generation_prompt=False, arguments={name: self.arguments[name]})
                return with_it != self.render(probe, add_generation_prompt=False, arguments={})
            except ChatTemplateError:
                return True

        relevant = {name: value for name, value in self.arguments.items() if changes(name)}
        return json.dumps(relevant, sort_keys=True, default=repr)


_Templates = weakref.WeakValueDictionary[tuple[str, str], ChatTemplate]  # weak, for a template holds its tokenizer
_templates: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, _Templates]
_templates = weakref.WeakKeyDictionary()
_templates_lock = threading.Lock()


def get_chat_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, arguments: Mapping[str, Any]
) -> ChatTemplate:
    """A shared `ChatTemplate`, so that a thousand models on one tokenizer look at its template once.

    Raises:
        ChatTemplateError: As for `ChatTemplate`.
    """
    if not hasattr(tokenizer, "chat_template"):
        raise ChatTemplateError(
            f"tokenizer= must be a Hugging Face tokenizer, not {tokenizer!r:.60}; get_tokenizer(path) loads one"
        )
    text = chat_template or tokenizer.chat_template
    key = (repr(text), json.dumps(arguments, sort_keys=True, default=repr))
    with _templates_lock:
        known = _templates.setdefault(tokenizer, weakref.WeakValueDictionary())
        template = known.get(key)
        if template is None:
            template = known[key] = ChatTemplate(tokenizer, chat_template=chat_template, arguments=arguments)
        return template
