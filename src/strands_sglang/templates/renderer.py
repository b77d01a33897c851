"""A tokenizer and its chat template as one object: conversations into text, text into tokens and back.

Everything that is known about a template is found out by rendering with it; this module is the only one that calls
Hugging Face's `apply_chat_template`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..messages import ChatMessage
from .encoder import get_encoder
from .forms import TemplateForms

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


class TemplateRenderer:
    """Renders. Safe to share between threads once its forms are set.

    Attributes:
        encoder: The tokenizer's encoder.
        tokenizer: The encoder's copy of the Hugging Face tokenizer.
        chat_template: The template's text, or its named texts; None while the tokenizer has one of its own per call.
        arguments: Passed to the template with every render.
        forms: The forms in which the template takes messages; found out right after construction.
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

    def is_special(self, token_id: int | None) -> bool:
        """Whether a token is a control token, which never belongs to the text of an answer."""
        token = self.tokenizer.added_tokens_decoder.get(token_id)
        return token_id in self.tokenizer.all_special_ids or (token is not None and token.special)

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
