"""A tokenizer and its chat template as one object: conversations into text, in the forms that the template takes.

Everything that is known about a template is found out by rendering with it (`behavior`); this module is the only one
that calls Hugging Face's `apply_chat_template`. Templates differ in where they look for reasoning, in whether they show
text beside a tool call, and in how they want a call's arguments. A part in a form that a template does not know is left
out of its text without a word, so messages are put into the template's own forms before each render.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..families import Family, numbered_function
from ..messages import ChatMessage
from .encoder import get_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]] | None
"""Tools in OpenAI form."""

# Texts that no conversation holds and that most templates leave as they are; one that changes letters or drops digits
# lets another one through.
_SENTINELS: tuple[Callable[[], str], ...] = (
    lambda: f"sentinel{uuid.uuid4().hex}",
    lambda: f"SENTINEL{uuid.uuid4().hex.upper()}",
    lambda: "sentinel" + uuid.uuid4().hex.translate(str.maketrans("0123456789", "ghijklmnop")),
    lambda: str(uuid.uuid4().int),
)


class ChatTemplateError(ValueError):
    """The chat template is missing, or refused a conversation. The message holds the template's own words."""


TextBesideCalls = Literal["shown", "own message", "in reasoning", "left out"]
"""What a template makes of text beside tool calls; in the form "own message" the text is a message before the calls."""


@dataclass(frozen=True)
class TemplateForms:
    """The forms that one template takes.

    Attributes:
        text_arguments: Whether it takes the arguments of tool calls as JSON text, not as objects.
        reasoning_marks: What goes around reasoning where the template has no `reasoning_content` and takes it as a part
            of the text; None where it has.
        text_beside_calls: How it takes text beside tool calls.
        numbers_calls: Whether it writes ids of its own into tool calls, numbered from 0 in each turn.
    """

    text_arguments: bool = False
    reasoning_marks: tuple[str, str] | None = None
    text_beside_calls: TextBesideCalls = "shown"
    numbers_calls: bool = False

    def put(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """The messages in the template's forms; what is in them already is left as it is."""
        return [formed for message in messages for formed in self._put(message)]

    def _put(self, message: ChatMessage) -> list[ChatMessage]:
        if message["role"] != "assistant":
            return [message]
        if self.reasoning_marks is not None:
            message = _with_marked_reasoning(message, self.reasoning_marks)
        calls = message.get("tool_calls")
        if not calls:
            return [message]
        if self.text_arguments:
            message = {**message, "tool_calls": [_with_text_arguments(call) for call in calls]}
        if not message["content"]:
            return [message]
        if self.text_beside_calls == "own message":
            text = {key: value for key, value in message.items() if key != "tool_calls"}
            return [text, {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}]
        if self.text_beside_calls == "in reasoning" and message.get("reasoning_content"):
            reasoning = f"{message['reasoning_content']}\n{message['content']}"
            return [{**message, "reasoning_content": reasoning, "content": ""}]
        return [message]

    def leaves_out(self, message: ChatMessage) -> bool:
        """Whether the template would leave text beside this message's tool calls out, in whatever form."""
        if self.text_beside_calls != "left out":
            return False
        return any(formed.get("tool_calls") and formed["content"] for formed in self._put(message))

    def with_own_ids(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """The results of tool calls under the ids that the template writes into those calls.

        Results of calls that are not among `messages` keep theirs.
        """
        if not self.numbers_calls:
            return list(messages)
        ids: dict[str, str] = {}
        renamed: list[ChatMessage] = []
        for message in messages:
            for number, call in enumerate(message.get("tool_calls") or ()):
                ids[call["id"]] = numbered_function(call["id"], call["function"]["name"], number)
            use_id = message.get("tool_call_id")
            renamed.append({**message, "tool_call_id": ids[use_id]} if use_id in ids else message)
        return renamed


def _with_marked_reasoning(message: ChatMessage, marks: tuple[str, str]) -> ChatMessage:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    marked = {key: value for key, value in message.items() if key != "reasoning_content"}
    marked["content"] = f"{marks[0]}{reasoning}{marks[1]}{message['content']}"
    return marked


def _with_text_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


class TemplateRenderer:
    """Renders. Safe to share between threads once its forms are found out, which is right after construction.

    Attributes:
        encoder: The tokenizer's encoder.
        tokenizer: The encoder's copy of the Hugging Face tokenizer.
        chat_template: The template's text, or its named texts; None while the tokenizer has one of its own per call.
        arguments: Passed to the template with every render.
        family: The model family; None if it is not known.
        stops: The tokens that can end an assistant's turn.
        forms: The forms in which the template takes messages.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, arguments: Mapping[str, Any]
    ) -> None:
        """Pin the template: a tokenizer is shared, and may get another one.

        Raises:
            ChatTemplateError: The tokenizer has no chat template and none was given.
        """
        own = getattr(tokenizer, "chat_template", None)
        if chat_template is None and not own:
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise ChatTemplateError(
                f"the tokenizer {name!r} has no chat template, so messages cannot be turned into tokens; "
                "use the tokenizer of an instruction-tuned model, or pass chat_template=<jinja text>"
            )
        self.encoder = get_encoder(tokenizer)
        self.tokenizer = self.encoder.tokenizer
        self.arguments = dict(arguments)
        self.family: Family | None = None
        self.stops: tuple[str, ...] = ()
        self.forms = TemplateForms()
        self.chat_template = chat_template or own
        # Of several named templates the tokenizer chooses at each render, by whether there are tools.
        self._pinned = self.chat_template if isinstance(self.chat_template, str) else None
        self._new_sentinel = _SENTINELS[0]
        self._new_sentinel = next((new for new in _SENTINELS if self._survives(new())), _SENTINELS[0])

    @property
    def template_text(self) -> str:
        """The template's text; of several named ones all of them."""
        template = self.chat_template
        return template if isinstance(template, str) else "\n".join(map(str, dict(template or {}).values()))

    def sentinel(self) -> str:
        """A new text that stands nowhere else and that the template leaves as it is."""
        return self._new_sentinel()

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools = None,
        *,
        add_generation_prompt: bool,
        arguments: Mapping[str, Any] | None = None,
        forms: TemplateForms | None = None,
    ) -> str:
        """The template's text for a conversation.

        Args:
            messages: Chat messages.
            tools: Tools in OpenAI form.
            add_generation_prompt: Whether the model's turn is opened behind them.
            arguments: In place of the renderer's own.
            forms: In place of the renderer's own.

        Raises:
            ChatTemplateError: The template refused it.
        """
        try:
            return self.tokenizer.apply_chat_template(
                (self.forms if forms is None else forms).put(messages),
                tools=None if tools is None else list(tools),
                chat_template=self._pinned,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(self.arguments if arguments is None else arguments),
            )
        except Exception as error:  # templates raise whatever their expressions raise
            roles = [message["role"] for message in messages]
            raise ChatTemplateError(f"the chat template cannot render the roles {roles}: {error}") from error

    def added_tokens(self, *, special_only: bool) -> set[str]:
        """The tokens that were added to the vocabulary, or those among them that are control tokens."""
        added = self.tokenizer.added_tokens_decoder.values()
        texts = {token.content for token in added if token.special or not special_only}
        return (texts | set(self.tokenizer.all_special_tokens)) - {""}

    def _survives(self, sentinel: str) -> bool:
        exchange = [{"role": "user", "content": "u"}, {"role": "assistant", "content": sentinel}]
        try:
            return sentinel in self.render(exchange, add_generation_prompt=False)
        except ChatTemplateError:
            return False
