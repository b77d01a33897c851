"""From chat messages to prompt tokens: the opening of a sequence, and the continuation after a sampled turn.

The opening is the template's render of the whole conversation. The continuation is what the same template puts *after*
a sampled turn, found without rendering that turn again: a short stand-in conversation ends in an assistant message that
holds a unique sentinel; the new messages follow it; whatever the template writes behind the first end-of-turn token
after the sentinel is the continuation (`text_after_turn`). The sampled tokens themselves are never decoded into a
prompt. At construction the method is checked against full renders of probe conversations (`prove`). What it cannot
prove raises `UnprovenContinuationError`, and the caller starts a new sequence from a full render instead.

Everything that is known about a template is found out by rendering small conversations with it. Templates differ in
where they look for reasoning, in whether they show text beside a tool call, and in how they want a call's arguments. A
part in a form that a template does not know is left out of its text without a word, so messages are put into the
template's own forms before each render (`TemplateForms`).
"""

from __future__ import annotations

import json
import logging
import re
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from ..families import Family, find_family, get_family, numbered_function
from ..messages import ChatMessage, pictures_of
from ..messages.content import ImagePart, Picture
from .encoder import EncodedText, Encoder, get_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

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


CASES = ("tool result", "several tool results", "user turn", "cut turn")
"""What can follow a sampled turn, and a turn that was cut off before its end; each is proven on its own."""

_SYSTEM = "You are being probed."
_DESCRIPTION = "Looks at what the probe holds."
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": _DESCRIPTION,
        "parameters": {"type": "object", "properties": {"argument": {"type": "string"}}, "required": ["argument"]},
    },
}


class ChatTemplateError(ValueError):
    """The chat template is missing, or refused a conversation. The message holds the template's own words."""


class UnprovenContinuationError(Exception):
    """What follows a sampled turn cannot be derived from the template. The message says why."""


_PART_OF_ROLE = {"system": "system prompt", "tool": "tool results"}
_TAIL_CHARACTERS = 200
_SHORTEST_COUNTED = 1000  # characters; for less it is not worth it
_MOST_COUNTED = 16_000_000  # characters together; what was counted for nothing has to go
_TAIL_TOKENS = 64


@dataclass(frozen=True)
class Prompt:
    """Tokens to put in front of the model.

    Attributes:
        token_ids: Ids, shape (T,).
        encoded: The rendered text that they end with, from the end of the turn before it on, and its ids, in parts. The
            ids may have more in front of them, or lack the first.
        kept: How many of the sampled ids before it stay in the sequence; None for all of them.
        note: Why not all of them stay.
        pictures: The images of the text, in its order; the ids hold one placeholder for each.
    """

    token_ids: list[int]
    encoded: tuple[EncodedText, ...]
    kept: int | None = None
    note: str = ""
    pictures: tuple[Picture, ...] = ()

    @property
    def text(self) -> str:
        """The rendered text that the ids end with."""
        return "".join(part.text for part in self.encoded)

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
        stops: The tokens that can end an assistant's turn; `stop_ids` are their ids.
        arguments: Passed to the template with every render.
        forms: The forms in which the template takes messages.
        sentinel: Makes a new text that stands nowhere else and that the template leaves as it is.
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
        own = getattr(tokenizer, "chat_template", None)
        if chat_template is None and not own:
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise ChatTemplateError(
                f"the tokenizer {name!r} has no chat template, so messages cannot be turned into tokens; "
                "use the tokenizer of an instruction-tuned model, or pass chat_template=<jinja text>"
            )
        encoder = get_encoder(tokenizer)
        self.tokenizer = encoder.tokenizer
        self.encode, self.decode = encoder.encode, encoder.decode
        self.arguments = dict(arguments or {})
        self.forms = TemplateForms()
        # Pinned: a tokenizer is shared, and may get another one.
        self._template = chat_template or own
        self.sentinel = _SENTINELS[0]
        self.sentinel = next((new for new in _SENTINELS if self._survives(new())), _SENTINELS[0])
        self._control_tokens = ControlTokens(encoder, self.sentinel) if escape_control_tokens else None
        self._warned = False
        self.family, self.stops = self._find_family(family)
        self.stop_ids = [self.tokenizer.convert_tokens_to_ids(stop) for stop in self.stops]
        self.forms = find_forms(self)
        self.identity = {"chat template": self._template, "template arguments": prefix_arguments(self)}
        if escape_control_tokens:
            self.identity["control tokens"] = "escaped"
        self._rewrites: dict[tuple[bool, bool], bool] = {}
        # Long texts that were encoded to be counted, until the call takes them that sends them: each is encoded once.
        self._counted: dict[str, tuple[EncodedText, ...]] = {}
        self._lock = threading.Lock()
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
            self._proofs[key] = prove(self, case, has_system=has_system, has_tools=has_tools)
        return self._proofs[key]

    def rewrites_history(self, *, tool_result: bool = False, reasoning: bool = True) -> bool:
        """Whether the template writes earlier turns differently once something follows them.

        Args:
            tool_result: Whether a tool result follows, rather than a user message.
            reasoning: Whether the turns hold reasoning.
        """
        key = (tool_result, reasoning)
        if key not in self._rewrites:
            self._rewrites[key] = rewrites_history(self, tool_result=tool_result, reasoning=reasoning)
        return self._rewrites[key]

    @cached_property
    def left_out(self) -> frozenset[str]:
        """What the template leaves out without a word: "system prompt", "tool calls", "tool results"."""
        system, argument, result = (self.sentinel() for _ in range(3))
        call = probe_call(self, 0)
        question: ChatMessage = {"role": "user", "content": "u"}
        answered = [question, assistant_turn([call], argument), {**probe_result(call), "content": result}]
        probes: list[tuple[list[ChatMessage], Tools, dict[str, str]]] = [
            ([{"role": "system", "content": system}, question], None, {"system prompt": system}),
            (answered, [PROBE_TOOL], {"tool calls": argument, "tool results": result}),
        ]
        missing: set[str] = set()
        for messages, tools, expected in probes:
            text = self.try_render(messages, tools, add_generation_prompt=True)
            if text is not None:  # a template that refuses them says so itself
                missing.update(part for part, sentinel in expected.items() if sentinel not in text)
        return frozenset(missing)

    @cached_property
    def reasoning_close(self) -> str | None:
        """What stands between reasoning that ends and the answer, in an assistant's turn as the template writes it.

        Where the template does not show reasoning, it is the family's mark; None if there is none. Where the turn ends
        with its reasoning, as in harmony, it is empty: the token that ends the turn closes both.
        """
        reasoning, answer = self.sentinel(), self.sentinel()
        exchange: list[ChatMessage] = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": answer, "reasoning_content": reasoning},
        ]
        marks = None if self.family is None else self.family.reasoning
        # Marks that were put around reasoning only so that it is shown are no proof of what closes it.
        forms = self.forms if marks else replace(self.forms, reasoning_marks=None)
        text = self.try_render(exchange, add_generation_prompt=False, forms=forms) or ""
        _, found, behind = text.partition(reasoning)
        if found and answer in behind:
            close = behind.partition(answer)[0]
        elif marks is not None:
            close = marks[1]
        else:
            return None
        return close[: min((close.index(stop) for stop in self.stops if stop in close), default=len(close))]

    # --- rendering ---

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
            arguments: In place of its own.
            forms: In place of its own.

        Raises:
            ChatTemplateError: The template refused it.
        """
        try:
            return self.tokenizer.apply_chat_template(
                (self.forms if forms is None else forms).put(messages),
                tools=None if tools is None else list(tools),
                # Of several named templates the tokenizer chooses at each render, by whether there are tools.
                chat_template=self._template if isinstance(self._template, str) else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(self.arguments if arguments is None else arguments),
            )
        except Exception as error:  # templates raise whatever their expressions raise
            roles = [message["role"] for message in messages]
            raise ChatTemplateError(f"the chat template cannot render the roles {roles}: {error}") from error

    def try_render(self, messages: Sequence[ChatMessage], tools: Tools = None, **options: Any) -> str | None:
        """The same; None where the template refuses it."""
        try:
            return self.render(messages, tools, **options)
        except ChatTemplateError:
            return None

    def added_tokens(self, *, special_only: bool) -> set[str]:
        """The tokens that were added to the vocabulary, or those among them that are control tokens."""
        added = self.tokenizer.added_tokens_decoder.values()
        texts = {token.content for token in added if token.special or not special_only}
        return (texts | set(self.tokenizer.all_special_tokens)) - {""}

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return re.compile(_any_of(filter(str.strip, self.added_tokens(special_only=True))))

    @property
    def template_text(self) -> str:
        """The template's text; of several named ones all of them."""
        template = self._template
        return template if isinstance(template, str) else "\n".join(map(str, dict(template or {}).values()))

    def _survives(self, sentinel: str) -> bool:
        exchange = [{"role": "user", "content": "u"}, {"role": "assistant", "content": sentinel}]
        return sentinel in (self.try_render(exchange, add_generation_prompt=False) or "")

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
        messages, tools = self._escaped(self.forms.with_own_ids(messages), tools)
        encoded = self._encoded(self.render(messages, tools, add_generation_prompt=True), ahead)
        return Prompt(_ids_of(encoded), encoded, pictures=pictures)

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
        messages, tools = self._escaped(self.forms.with_own_ids(messages), tools)
        after = text_after_turn(
            self,
            shown if self._control_tokens is None else self._control_tokens.escape(shown),
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
        if last == end_id:
            return Prompt(token_ids[1:], encoded, pictures=pictures)
        stop = "" if last is None else str(self.tokenizer.convert_ids_to_tokens(last))
        # A control token of the turn's own text, at which a user's `stop_token_ids` stopped, stays.
        is_odd = last == turn.stop_token_id and self.is_special(last) and stop not in after.rest
        if last is not None and (last in self.stop_ids or is_odd):
            note = f"the model stopped with {stop!r} where the chat template puts {after.end!r}"
            return Prompt(token_ids, encoded, len(turn.output_ids) - 1, note, pictures)
        # What the template still writes of a turn whose text ends here, without what the turn has of it already.
        rest = "" if results else after.rest
        if turn.ends_in_reasoning and not results:
            if self.reasoning_close is None:
                raise UnprovenContinuationError(
                    "the turn was cut off in its reasoning, and what closes that is unknown"
                )
            rest = self.reasoning_close + rest
        tail = self.decode(turn.output_ids[-_TAIL_TOKENS:]) if rest else ""
        sampled = next(length for length in range(len(rest), -1, -1) if tail.endswith(rest[:length]))
        return Prompt([*self.encode(rest[sampled:]), *token_ids], encoded, pictures=pictures)

    def _escaped(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[Sequence[ChatMessage], Tools]:
        """The messages and tools as they are rendered, with marks in place of control tokens if those are escaped."""
        if self._control_tokens is not None:
            return self._control_tokens.escape(messages), self._control_tokens.escape(tools)
        for message in messages:
            if message["role"] not in ("user", "tool") or self._warned:
                continue
            content = message["content"]
            texts = [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
            token = next(filter(None, map(self._special.search, texts)), None)
            if token is not None:
                self._warned = True
                logger.warning(
                    "role=<%s>, token=<%s> | the text of a message holds a control token, which becomes a real one in "
                    "the prompt, as on the server's chat endpoint; escape_control_tokens=True keeps it text",
                    message["role"],
                    token.group(),
                )
        return messages, tools

    def _encoded(self, text: str, ahead: bool) -> tuple[EncodedText, ...]:
        with self._lock:
            encoded = self._counted.pop(text, None)
        if encoded is None:
            escaped = self._control_tokens
            encoded = tuple(escaped.pieces(text)) if escaped else (EncodedText(text, self.encode(text)),)
        if ahead and _SHORTEST_COUNTED <= len(text) <= _MOST_COUNTED:
            with self._lock:
                self._counted[text] = encoded
                while sum(map(len, self._counted)) > _MOST_COUNTED:
                    del self._counted[next(iter(self._counted))]
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
            if self.forms.text_beside_calls == "left out" and any(
                formed.get("tool_calls") and formed["content"] for formed in self.forms.put([message])
            ):
                raise ChatTemplateError(
                    f"{where}: the chat template leaves text beside a tool call out of what it writes; take the text "
                    "out of the message, or use a template that has a place for it, chat_template=<jinja text>"
                )

    # --- tokens ---

    def is_special(self, token_id: int | None) -> bool:
        """Whether a token is a control token, which never belongs to the text of an answer."""
        token = self.tokenizer.added_tokens_decoder.get(token_id)
        is_marked = token is not None and token.special
        return is_marked or token_id in self.tokenizer.all_special_ids or token_id in self.stop_ids

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
        family = find_family(self.template_text) if name is None else get_family(name)
        if family is not None:
            added = self.added_tokens(special_only=False)
            known = tuple(stop for stop in family.stops if stop in added)
            if known:
                return family, known
            if name is not None:
                raise ChatTemplateError(f"family={name!r}: none of its stop tokens {family.stops} is in the vocabulary")
        # None that is known, or its template on another vocabulary.
        # It ends a turn with the first control token that it writes behind an assistant's text.
        sentinel = self.sentinel()
        exchange = [{"role": "user", "content": "u"}, {"role": "assistant", "content": sentinel}]
        after = self.render(exchange, add_generation_prompt=False).rpartition(sentinel)[2]
        special = self.added_tokens(special_only=True)
        found = [(after.index(token), -len(token), token) for token in special if token in after]
        return None, (min(found)[2],) if found else ()


@dataclass(frozen=True)
class TextAfterTurn:
    """What the template writes behind the text of an assistant's turn.

    Attributes:
        rest: What it still writes of the turn, such as the end of a section; a turn that was sampled to its end has it.
        end: The token that ends the turn.
        following: The text behind that token.
    """

    rest: str
    end: str
    following: str


def text_after_turn(
    template: ChatTemplate,
    calls: Sequence[Mapping[str, Any]],
    messages: Sequence[ChatMessage],
    tools: Tools,
    *,
    has_system: bool,
    after_tool_step: bool = False,
) -> TextAfterTurn:
    """What the template writes behind a turn, found without rendering that turn: a stand-in takes its place.

    Args:
        template: The template.
        calls: The turn's tool calls: `{"id", "name"}` in order; none where the template does not write calls.
        messages: The chat messages behind the turn.
        tools: Tools in OpenAI form.
        has_system: Whether the conversation begins with a system message (some templates refuse one).
        after_tool_step: Whether the stand-in conversation has a tool call and its result before the turn.

    Raises:
        UnprovenContinuationError: It cannot be told.
    """
    sentinel = template.sentinel()
    # The sentinel stands in every call: what counts is the last one that the template writes, and gpt-oss's template
    # writes one of several.
    stand_in = assistant_turn(calls if any(message["role"] == "tool" for message in messages) else (), sentinel)
    before: list[ChatMessage] = [{"role": "system", "content": "s"}] if has_system else []
    before.append({"role": "user", "content": "u"})
    if after_tool_step:
        before += _tool_step({"id": "call00000", "name": "f"})
    try:
        text = template.render([*before, stand_in, *messages], tools, add_generation_prompt=True)
    except ChatTemplateError as error:
        # Whether the template refuses the messages or only the stand-in is for the full render to tell.
        raise UnprovenContinuationError(str(error)) from error
    found = _split(text, sentinel, template.stops)
    # Without knowing the family, a control token in between may be the true end of the turn, and what stands behind it
    # a message.
    if template.family is None and any(token in found.rest for token in template.added_tokens(special_only=True)):
        raise UnprovenContinuationError(f"a control token stands between the turn and {found.end!r}")
    return found


def assistant_turn(calls: Sequence[Mapping[str, Any]], text: str) -> ChatMessage:
    """An assistant's turn that ends in `text`: in its calls, or in its content where it has none."""
    if not calls:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": {"argument": text}},
            }
            for call in calls
        ],
    }


def _split(text: str, sentinel: str, stops: Sequence[str]) -> TextAfterTurn:
    _, found, after = text.rpartition(sentinel)
    if not found:
        raise UnprovenContinuationError("the chat template leaves the assistant's turn out of its render")
    positions = [(after.index(stop), stop) for stop in stops if stop in after]
    if not positions:
        raise UnprovenContinuationError(f"the chat template does not end the turn with any of {tuple(stops)}")
    position, end = min(positions)
    return TextAfterTurn(after[:position], end, after[position + len(end) :])


# --- the proof ---


@dataclass(frozen=True)
class Proof:
    """Whether the text after a turn is what the whole conversation would have there.

    Attributes:
        reason: Why that is not proven; None if it is.
        needs_tool_step: Whether it takes a stand-in with a tool step before the turn where the conversation has one.
    """

    reason: str | None
    needs_tool_step: bool = False


def prove(template: ChatTemplate, case: str, *, has_system: bool, has_tools: bool) -> Proof:
    """Prove the text after a turn for one of `CASES`.

    Conversations of three lengths are rendered in full. What they have behind the turn must be what the stand-in
    conversation has there, and neither the system prompt nor the tools may come after the turn.

    Args:
        template: The template.
        case: One of `CASES`.
        has_system: Whether the conversation begins with a system message.
        has_tools: Whether there are tools.
    """
    tools = [PROBE_TOOL] if has_tools else None
    count = {"tool result": 1, "several tool results": 2}.get(case, 0)
    calls = [probe_call(template, number) for number in range(5, 5 + count)]
    shown = calls if "tool calls" not in template.left_out else []
    new: list[ChatMessage] = [probe_result(call) for call in calls] or [{"role": "user", "content": "And then?"}]
    before: list[ChatMessage] = [{"role": "system", "content": _SYSTEM}] if has_system else []
    before.append({"role": "user", "content": "What is there?"})
    exchange = [{"role": "assistant", "content": "A thing."}, {"role": "user", "content": "Which one?"}]

    try:
        references = []
        for number in range(3):
            answer = template.sentinel()
            whole = template.render([*before, assistant_turn(shown, answer), *new], tools, add_generation_prompt=True)
            references.append(_split(whole, answer, template.stops))
            after = references[-1].rest + references[-1].following
            if has_system and _SYSTEM in after:
                return Proof("the chat template moves the system prompt behind the turn")
            if has_tools and _DESCRIPTION in after:
                return Proof("the chat template moves the tools behind the turn")
            before += _tool_step(probe_call(template, number)) if count else exchange
        plain = text_after_turn(template, shown, new, tools, has_system=has_system)
        if references == [plain] * 3:
            return Proof(None)
        later = text_after_turn(template, shown, new, tools, has_system=has_system, after_tool_step=True)
        if count and references == [plain, later, later]:
            return Proof(None, needs_tool_step=True)
    except (UnprovenContinuationError, ChatTemplateError) as error:
        return Proof(str(error))
    return Proof("what the chat template writes behind the turn depends on what came before it")


def _tool_step(call: Mapping[str, str]) -> list[ChatMessage]:
    return [assistant_turn([call], "earlier"), probe_result(call)]


def probe_call(template: ChatTemplate, number: int) -> dict[str, str]:
    """A call of `PROBE_TOOL`: `{"id", "name"}`, the id in the form of the family."""
    # Nine letters and digits, which is what the strictest templates take.
    return {"id": template.call_id(f"call{number:05}", "look", number), "name": "look"}


def probe_result(call: Mapping[str, str]) -> ChatMessage:
    """What a probe call returned."""
    return {"role": "tool", "content": f"seen by {call['id']}", "name": call["name"], "tool_call_id": call["id"]}


# --- what it does with parts of a conversation ---


def rewrites_history(template: ChatTemplate, *, tool_result: bool, reasoning: bool) -> bool:
    """Whether the template writes a sampled turn differently once something follows it.

    Reasoning models strip their reasoning then; an empty block of reasoning that the generation prompt held may vanish.

    Args:
        template: The template.
        tool_result: Whether a tool result follows, rather than a user message.
        reasoning: Whether the turn holds reasoning.
    """
    thought, answer = template.sentinel(), template.sentinel()
    question: ChatMessage = {"role": "user", "content": "u"}
    call = {"id": "call00000", "name": "look"}
    turn = assistant_turn([call] if tool_result else [], answer)
    if reasoning:
        turn["reasoning_content"] = thought
    behind = probe_result(call) if tool_result else {"role": "user", "content": "v"}
    tools = [PROBE_TOOL] if tool_result else None
    try:
        opening = template.render([question], tools, add_generation_prompt=True)
        as_last = template.render([question, turn], tools, add_generation_prompt=False)
        whole = template.render([question, turn, behind], tools, add_generation_prompt=True)
    except ChatTemplateError:
        return True  # nothing is known: the template's own form is its full render
    if not whole.startswith(opening) or (reasoning and thought not in whole):
        return True
    # What stands before the answer may be there only while the turn is the last one.
    before = whole.partition(answer)[0]
    return before not in (opening, as_last.partition(answer)[0]) and not tool_result


def prefix_arguments(template: ChatTemplate) -> str:
    """The template arguments that change how history is rendered, as JSON; others touch only the generation prompt."""
    call = {"id": "call00000", "name": "look"}
    plain: list[ChatMessage] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "user", "content": "v"},
    ]
    probes: list[tuple[list[ChatMessage], Tools]] = [
        (plain, None),
        ([*plain, {**assistant_turn([call], "b"), "reasoning_content": "r"}, probe_result(call)], [PROBE_TOOL]),
    ]

    def render(probe: tuple[list[ChatMessage], Tools], arguments: Mapping[str, Any]) -> str | None:
        return template.try_render(*probe, add_generation_prompt=False, arguments=arguments)

    def changes(name: str) -> bool:
        alone = {name: template.arguments[name]}
        others = {other: value for other, value in template.arguments.items() if other != name}
        # Some arguments matter only beside others.
        pairs = [(render(probe, alone), render(probe, {})) for probe in probes]
        pairs += [(render(probe, template.arguments), render(probe, others)) for probe in probes]
        # An argument that no probe can be rendered with, or without, may change anything.
        return any(with_it != without for with_it, without in pairs) or pairs[0] == (None, None)

    relevant = {name: value for name, value in template.arguments.items() if changes(name)}
    return json.dumps(relevant, sort_keys=True, default=repr)


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
        if self.reasoning_marks is not None and message.get("reasoning_content"):
            opening, close = self.reasoning_marks
            marked = f"{opening}{message['reasoning_content']}{close}{message['content']}"
            message = {**message, "content": marked}
            del message["reasoning_content"]
        calls = message.get("tool_calls")
        if calls and self.text_arguments:
            message = {**message, "tool_calls": [_with_text_arguments(call) for call in calls]}
        if not calls or not message["content"]:
            return [message]
        if self.text_beside_calls == "own message":
            text = {key: value for key, value in message.items() if key != "tool_calls"}
            return [text, {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}]
        if self.text_beside_calls == "in reasoning" and message.get("reasoning_content"):
            reasoning = f"{message['reasoning_content']}\n{message['content']}"
            return [{**message, "reasoning_content": reasoning, "content": ""}]
        return [message]

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


def _with_text_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


# --- forms ---

_THINK_MARKS = ("<think>\n", "\n</think>\n\n")
"""How models write `<think>`; it is also what models are taught whose family has no marks of its own."""


def find_forms(template: ChatTemplate) -> TemplateForms:
    """The forms in which a template takes what an assistant's turn holds.

    The first form in which a part is not left out is taken. Reasoning that is gone in every form is what the template
    leaves out by a rule of its own; text beside tool calls that is gone in every form is "left out".
    """
    earlier, call = probe_call(template, 0), probe_call(template, 5)

    def shown(forms: TemplateForms, *parts: str, later: Sequence[ChatMessage] = ()) -> bool | None:
        """Whether the text of a turn has all these parts; None where the template refuses the turn."""
        texts = {part: template.sentinel() for part in parts}
        turn = assistant_turn([call], texts["call"]) if "call" in parts else {"role": "assistant", "content": ""}
        turn["content"] = texts.get("text", "")
        if "reasoning" in parts:
            turn["reasoning_content"] = texts["reasoning"]
        before: list[ChatMessage] = [{"role": "user", "content": "u"}]
        behind = later
        if "call" in parts:
            # A template can treat the first step with a call otherwise than later ones.
            before += [assistant_turn([earlier], "earlier"), probe_result(earlier)]
            behind = [probe_result(call), *later]
        text = template.try_render(
            [*before, turn, *behind],
            [PROBE_TOOL],  # always: some templates render nothing without tools
            add_generation_prompt=False,
            forms=forms,
        )
        return None if text is None else all(text_of_part in text for text_of_part in texts.values())

    def shows_reasoning(forms: TemplateForms) -> bool:
        return bool(shown(forms, "reasoning", "text") or shown(forms, "reasoning", "call"))

    forms = TemplateForms()
    if not shown(forms, "call") and shown(replace(forms, text_arguments=True), "call"):
        forms = replace(forms, text_arguments=True)
    if not shows_reasoning(forms):
        marks = None if template.family is None else template.family.reasoning
        if marks is None or marks[0] == _THINK_MARKS[0].strip():
            marks = _THINK_MARKS
        marked = replace(forms, reasoning_marks=marks)
        forms = marked if shows_reasoning(marked) else forms
    if shown(forms, "call"):
        forms = replace(forms, text_beside_calls=_text_beside_calls(forms, shown))
    history = [{"role": "user", "content": "u"}, assistant_turn([call], "argument")]
    text = template.try_render(history, [PROBE_TOOL], add_generation_prompt=False, forms=forms) or ""
    numbered = numbered_function(call["id"], call["name"], 0)
    return replace(forms, numbers_calls=call["id"] not in text and numbered in text)


def _text_beside_calls(forms: TemplateForms, shown: Callable[..., bool | None]) -> TextBesideCalls:
    if shown(forms, "text", "call"):
        refuses_both = shown(forms, "reasoning", "call") and shown(forms, "reasoning", "text", "call") is None
        return "in reasoning" if refuses_both else "shown"
    # Templates that want roles to alternate refuse two messages in a row only once more follows.
    later = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
    return (
        "own message"
        if shown(replace(forms, text_beside_calls="own message"), "text", "call", later=later)
        else "left out"
    )


# --- control tokens in the text of messages ---


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
        """Look up the tokens, and what encodes without them.

        Args:
            encoder: Encodes.
            new_mark: Makes a unique text that the chat template leaves as it is.
        """
        self._encoder = encoder
        self._new_mark = new_mark
        self._marks: dict[str, str] = {}  # by token
        tokenizer = encoder.tokenizer
        added = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
        special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        ids = {token: token_id for token, token_id in (*added.items(), *special) if token.strip()}
        # What a vocabulary lacks becomes its unknown token, whoever wrote it.
        self._counted = frozenset(ids.values()) - {tokenizer.unk_token_id}
        self._pattern = re.compile(f"({_any_of(ids)})")
        self._encode_without = encoder.without(ids)

    def escape(self, value: Any) -> Any:
        """A JSON-like value with a mark in place of every control token in its texts; images stay as they are."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._marks.setdefault(match.group(), self._new_mark()), value)
        if isinstance(value, Mapping) and not isinstance(value, ImagePart):
            return {self.escape(key): self.escape(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(entry) for entry in value]
        return value

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
            if has_mark:
                token_ids = self._encode_without(whole)
                # Vocabularies may have a control token as an ordinary piece, too.
                if not self._counted.isdisjoint(token_ids):
                    token_ids = [token_id for letter in whole for token_id in self._encode_without(letter)]
                if not self._counted.isdisjoint(token_ids):
                    raise ChatTemplateError(
                        f"a message holds a control token that this tokenizer cannot write as text: {whole!r:.200}"
                    )
            else:
                token_ids = self._encoder.encode(whole)
                own_tokens = sum(stretch.is_token for stretch in together)
                # A tokenizer may normalize some other spelling to that of a control token.
                if sum(token_id in self._counted for token_id in token_ids) > own_tokens:
                    raise ChatTemplateError(
                        "a message holds a text that the tokenizer turns into a control token, "
                        "though it is spelled otherwise"
                    )
            pieces.append(EncodedText(whole, token_ids, is_plain=has_mark))
        return pieces


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


# --- shared ---


def _ids_of(encoded: Sequence[EncodedText]) -> list[int]:
    return [token_id for part in encoded for token_id in part.token_ids]


# By encoder, and then by what else makes a template; weak, for a template holds its encoder.
_templates: weakref.WeakKeyDictionary[Encoder, weakref.WeakValueDictionary[tuple[Any, ...], ChatTemplate]] = (
    weakref.WeakKeyDictionary()
)
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
