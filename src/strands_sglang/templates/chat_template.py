"""From chat messages to prompt tokens: the opening of a sequence, and the continuation after a sampled turn.

The opening is the template's render of the whole conversation. The continuation is what the same template writes
*after* a sampled turn, found without rendering that turn. A short stand-in conversation ends in an assistant message
that holds a unique sentinel, and the new messages follow it. Everything after the first end-of-turn token that follows
the sentinel is the continuation (`text_after_turn`). Sampled tokens are never decoded into a prompt. At construction
the method is checked against full renders of probe conversations (`prove`). If it cannot be proven,
`UnprovenContinuationError` is raised, and the caller starts a new sequence from a full render instead. A template may
also write something else because of a word in the system prompt, or of the number of messages: at the first
continuation, probes say what the template tests for (`needs_history`). If that matters, the conversation itself takes
the place of the stand-in.

All knowledge about a template comes from rendering small conversations with it. Templates differ in where they look for
reasoning, in whether they show text next to a tool call, and in the form of a call's arguments. A template silently
drops a part in a form that it does not know, so messages are put into the template's own forms before each render
(`TemplateForms`).
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, Literal

from ..families import Family, find_family, get_family, numbered_function
from ..messages import ChatMessage, pictures_of
from ..messages.content import ChatTools, ImagePart, Picture, is_plain
from ..reasons import Reason
from .encoder import EncodedText, Encoder, get_encoder
from .shapes import NOW, Hole, HoleReadError, Part, can_fill, filled, with_holes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, Any]] | None
"""Tools in OpenAI form."""

# Texts that no conversation holds and that most templates leave unchanged. A template that changes letters or drops
# digits leaves another one unchanged.
_SENTINELS: tuple[Callable[[], str], ...] = (
    lambda: f"sentinel{uuid.uuid4().hex}",
    lambda: f"SENTINEL{uuid.uuid4().hex.upper()}",
    lambda: "sentinel" + uuid.uuid4().hex.translate(str.maketrans("0123456789", "ghijklmnop")),
    lambda: str(uuid.uuid4().int),
)


CASES = ("tool result", "several tool results", "user turn", "cut turn")
"""What can follow a sampled turn, and a turn that was cut off; each case is proven separately."""

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
    """The chat template is missing, or rejected a conversation. The message quotes the template's own error."""


class UnprovenContinuationError(Exception):
    """What follows a sampled turn cannot be derived from the template. The message says why.

    Attributes:
        why: The same as data.
    """

    def __init__(self, why: str | Reason) -> None:
        """Take the reason; text becomes one of kind `unproven`."""
        self.why = Reason("unproven", detail=(why,)) if isinstance(why, str) else why
        super().__init__(str(self.why))


FURTHER_CALLS = "tool calls of a message after the first"
"""The name of what templates drop that show one call per message, such as gpt-oss's."""

_PARTS_OF_ROLES = {
    "system": "system prompt",
    "user": "text of the user",
    "assistant": "text of the assistant",
    "tool": "tool results",
}
_READS_HISTORY = "what the chat template writes after the turn depends on what came before it"
_TAIL_CHARACTERS = 200
_TAIL_TOKENS = 64


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt.

    Attributes:
        token_ids: Ids, shape `(T,)`.
        encoded: The rendered text that the ids end with, starting at the end of the previous turn, and its ids, in
            parts. The ids may begin with further tokens, or lack the first one.
        kept: Number of the sampled ids before the prompt that stay in the sequence; None for all.
        why: Why not all of them stay.
        pictures: The images of the text, in order; the ids hold one placeholder for each.
    """

    token_ids: list[int]
    encoded: tuple[EncodedText, ...]
    kept: int | None = None
    why: Reason | None = None
    pictures: tuple[Picture, ...] = ()

    @property
    def text(self) -> str:
        """The rendered text that the ids end with."""
        return "".join(part.text for part in self.encoded)

    def ends_with(self, mark: str) -> bool:
        """Whether the prompt ends with a mark such as `<think>`, ignoring white space."""
        return bool(mark.strip()) and self.text[-_TAIL_CHARACTERS:].rstrip().endswith(mark.rstrip())


@dataclass(frozen=True)
class SampledTurn:
    """The facts about a sampled turn that its continuation depends on.

    Attributes:
        output_ids: The sampled ids, shape `(T,)`.
        stop_token_id: The stop token among them; None if the turn was cut off or ended at a stop string.
        calls: The turn's tool calls in order: `{"id", "name"}`.
        ends_in_reasoning: Whether the turn ends inside unclosed reasoning.
    """

    output_ids: Sequence[int]
    stop_token_id: int | None
    calls: Sequence[Mapping[str, Any]] = ()
    ends_in_reasoning: bool = False


Reasoning = Literal["none", "empty", "text"]
"""What sampled turns hold of reasoning; "empty" is only its marks, with white space in between."""


class ChatTemplate:
    """A tokenizer's chat template, as the source of prompt tokens. Safe to share between threads.

    Attributes:
        encoder: Encodes text and decodes ids, with the library's own copy of the tokenizer.
        tokenizer: The library's own copy of the Hugging Face tokenizer.
        encode: Returns the ids of rendered text; no special tokens are added, since the template wrote them.
        decode: Returns the text of ids, including special tokens.
        family: The model family; None if unknown.
        stops: The tokens that can end an assistant's turn.
        stop_ids: Ids of `stops`.
        arguments: Arguments of every render.
        forms: The forms in which the template takes messages.
        sentinel: Creates a unique text that the template leaves unchanged.
        identity: The facts about the template that are part of a conversation's identity.
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
        """Find the template and its end-of-turn tokens, and check what can be proven.

        Args:
            tokenizer: A Hugging Face tokenizer.
            chat_template: Jinja text that replaces the tokenizer's own template.
            arguments: Arguments of every render, such as `{"enable_thinking": False}`.
            family: Name of the model family, if the template does not identify it.
            escape_control_tokens: Whether control tokens in messages and tools are encoded as ordinary text.

        Raises:
            ChatTemplateError: There is no chat template, it cannot render a plain exchange, or the named family's stop
                tokens are not in the vocabulary.
            ValueError: There is no such family.
        """
        default = getattr(tokenizer, "chat_template", None)
        if chat_template is None and not default:
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise ChatTemplateError(
                f"the tokenizer {name!r} has no chat template, so messages cannot be turned into tokens; "
                "use the tokenizer of an instruction-tuned model, or pass chat_template=<jinja text>"
            )
        self.encoder = encoder = get_encoder(tokenizer)
        self.tokenizer = encoder.tokenizer
        self.encode, self.decode = encoder.encode, encoder.decode
        self.arguments = dict(arguments or {})
        # Pinned: the shared tokenizer may get another template.
        self._template = chat_template or default
        self.sentinel = _SENTINELS[0]
        self.forms = TemplateForms()
        if not self._find_sentinel():
            self.forms = TemplateForms(text_as_parts=True)
            if not self._find_sentinel():
                self.forms = TemplateForms()
        self._control_tokens = ControlTokens(encoder, self.sentinel) if escape_control_tokens else None
        self._warned = self._warned_of_tools = False
        self.family, self.stops = self._find_family(family)
        self.stop_ids = [self.tokenizer.convert_tokens_to_ids(stop) for stop in self.stops]
        self.forms = find_forms(self)
        self.identity = {"chat template": self._template, "template arguments": prefix_arguments(self)}
        if escape_control_tokens:
            self.identity["control tokens"] = "escaped"
        self._rewrites: dict[tuple[bool, Reasoning], bool] = {}
        self._proofs: dict[tuple[str, bool, bool], Proof] = {}
        self._histories_needed: dict[tuple[str, bool, bool], bool] = {}
        self._shapes = Shapes(self)
        self._openings: dict[Any, Prompt] = {}
        self._lock = threading.Lock()
        self.self_check()

    # --- what is proven ---

    def self_check(self, *, has_system: bool = True, has_tools: bool = True) -> dict[str, str | None]:
        """Check what can be proven of this template.

        Args:
            has_system: Whether conversations begin with a system message.
            has_tools: Whether there are tools.

        Returns:
            By case, why it cannot be proven; None if it is proven.
        """
        return {case: self._prove(case, has_system, has_tools).reason for case in CASES}

    def _prove(self, case: str, has_system: bool, has_tools: bool) -> Proof:
        if not self.stops:
            return Proof("the chat template ends an assistant turn with no special token")
        key = ("user turn" if case == "cut turn" else case, has_system, has_tools)
        if key not in self._proofs:
            self._proofs[key] = prove(self, key[0], has_system=has_system, has_tools=has_tools)
        return self._proofs[key]

    def _needs_history(self, case: str, has_system: bool, has_tools: bool) -> bool:
        """Whether a continuation has to be rendered with the conversation before it: found at the first one."""
        key = ("user turn" if case == "cut turn" else case, has_system, has_tools)
        if key not in self._histories_needed:
            self._histories_needed[key] = needs_history(self, *key)
        return self._histories_needed[key]

    @cached_property
    def tested_texts(self) -> dict[str, int]:
        """Texts that the template's tests may look for or measure, and how often a probe says them.

        Empty if the template cannot be read, such as several named ones.
        """
        if self.jinja is None:
            return {}
        constants = tested_constants(self._template, self.jinja.environment)
        numbers = {int(text) for text in constants if text.isdecimal()} - {0, 1}
        longer = {"x" * (number + 1): min(number, _MOST_EXCHANGES) for number in numbers}
        return {text: 1 for text in ("earlier", *constants) if text.strip() and not text.isdecimal()} | longer

    def rewrites_history(self, *, tool_result: bool = False, reasoning: Reasoning = "text") -> bool:
        """Whether the template renders earlier turns differently once something follows them.

        Args:
            tool_result: Whether a tool result follows, rather than a user message.
            reasoning: What the turns hold.
        """
        key = (tool_result, reasoning)
        if key not in self._rewrites:
            self._rewrites[key] = rewrites_history(self, tool_result=tool_result, reasoning=reasoning)
        return self._rewrites[key]

    @cached_property
    def left_out(self) -> frozenset[str]:
        """What the template drops silently: "system prompt", "tool calls", "tool results", or `FURTHER_CALLS`."""
        system, argument, further, result = (self.sentinel() for _ in range(4))
        call, other = probe_call(self, 0), probe_call(self, 1)
        question: ChatMessage = {"role": "user", "content": "u"}
        asked = assistant_turn([call], argument)
        answered = [question, asked, {**probe_result(call), "content": result}]
        calls = [*asked["tool_calls"], *assistant_turn([other], further)["tool_calls"]]
        both: ChatMessage = {**asked, "tool_calls": calls}
        probes: list[tuple[list[ChatMessage], Tools, dict[str, str]]] = [
            ([{"role": "system", "content": system}, question], None, {"system prompt": system}),
            (answered, [PROBE_TOOL], {"tool calls": argument, "tool results": result}),
            ([question, both, probe_result(call), probe_result(other)], [PROBE_TOOL], {FURTHER_CALLS: further}),
        ]
        missing: set[str] = set()
        for messages, tools, expected in probes:
            text = self.try_render(messages, tools, add_generation_prompt=True)
            if text is not None:  # a template that rejects them raises an error of its own
                missing.update(part for part, sentinel in expected.items() if sentinel not in text)
        return frozenset(missing)

    @cached_property
    def reasoning_close(self) -> str | None:
        """The text between the end of reasoning and the answer, as the template writes it.

        If the template does not show reasoning, it is the family's mark; None if there is none. If the turn ends with
        its reasoning, as in harmony, it is empty: the token that ends the turn closes both.
        """
        reasoning, answer = self.sentinel(), self.sentinel()
        exchange: list[ChatMessage] = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": answer, "reasoning_content": reasoning},
        ]
        marks = None if self.family is None else self.family.reasoning
        # Marks that were added only to show reasoning do not prove what closes it.
        forms = self.forms if marks else replace(self.forms, reasoning_marks=None)
        text = self.try_render(exchange, add_generation_prompt=False, forms=forms) or ""
        _, found, rest = text.partition(reasoning)
        if found and answer in rest:
            close = rest.partition(answer)[0]
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
        """Render a conversation as text.

        Args:
            messages: Chat messages.
            tools: Tools in OpenAI form.
            add_generation_prompt: Whether to open the model's turn after the messages.
            arguments: Arguments that replace the template's own.
            forms: Forms that replace the template's own.

        Raises:
            ChatTemplateError: The template rejected the conversation.
        """
        try:
            return self.tokenizer.apply_chat_template(
                (self.forms if forms is None else forms).put(messages),
                tools=None if tools is None else list(tools),
                # With several named templates the tokenizer chooses one per render, depending on the tools.
                chat_template=self._template if isinstance(self._template, str) else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(self.arguments if arguments is None else arguments),
            )
        except Exception as error:  # templates raise whatever their expressions raise
            roles = [message["role"] for message in messages]
            raise ChatTemplateError(f"the chat template cannot render the roles {roles}: {error}") from error

    def render_step(self, messages: Sequence[ChatMessage], new: Sequence[ChatMessage], tools: Tools) -> str:
        """Render a conversation that opens the model's turn, as `render` does.

        Args:
            messages: Messages of the library: plain values, without reasoning.
            new: The messages after them.
            tools: Tools in OpenAI form.

        Raises:
            ChatTemplateError: The template rejected the conversation.
        """
        # `apply_chat_template` copies and checks what is known to be plain.
        if (
            self.jinja is None
            or not (tools is None or (isinstance(tools, ChatTools) and tools.digest))
            or not all(type(message) is dict and set(map(type, message.values())) == {str} for message in new)
        ):
            return self.render([*messages, *new], tools, add_generation_prompt=True)
        try:
            formed = [*self.forms.put(messages), *new]
            text: str = self.jinja.render(self.variables, messages=formed, tools=tools)
            return text
        except Exception as error:  # templates raise whatever their expressions raise
            roles = [message["role"] for message in (*messages, *new)]
            raise ChatTemplateError(f"the chat template cannot render the roles {roles}: {error}") from error

    @cached_property
    def variables(self) -> dict[str, Any]:
        """What the template reads besides messages and tools, to open the model's turn."""
        given = {**self.tokenizer.special_tokens_map, **self.arguments}
        return {**given, "documents": None, "add_generation_prompt": True}

    @cached_property
    def jinja(self) -> Any:
        """The compiled template, as `apply_chat_template` renders it.

        None if the installed transformers does more than that with plain messages, or compiles it elsewhere.
        """
        if not isinstance(self._template, str) or not is_plain(self.arguments):
            return None
        try:
            from transformers.utils.chat_template_utils import _compile_jinja_template

            template = _compile_jinja_template(self._template)
        except Exception as error:  # not a public name
            logger.debug("error=<%s> | rendering with apply_chat_template", error)
            return None

        for count in range(-1, 3):
            calls = [probe_call(self, number) for number in range(count)]
            turn = [] if count < 0 else [assistant_turn(calls, self.sentinel())]
            new = [probe_result(call) for call in calls] or [{"role": "user", "content": "v"}] * (count + 1)
            before = [{"role": "system", "content": "s"}] if count % 2 else []
            tools = [PROBE_TOOL] if count else None
            exchange = [*before, {"role": "user", "content": "u"}, *self.forms.put(turn), *new]
            expected = self.try_render(exchange, tools, add_generation_prompt=True)
            if expected is None:
                continue
            try:
                is_same = template.render(self.variables, messages=exchange, tools=tools) == expected
            except Exception:
                is_same = False
            if not is_same:
                return None
        return template

    def try_render(self, messages: Sequence[ChatMessage], tools: Tools = None, **options: Any) -> str | None:
        """Render a conversation as `render` does; None if the template rejects it."""
        try:
            return self.render(messages, tools, **options)
        except ChatTemplateError:
            return None

    def added_tokens(self, *, special_only: bool) -> set[str]:
        """Return the tokens that were added to the vocabulary, or only the control tokens among them."""
        added = self.tokenizer.added_tokens_decoder.values()
        texts = {token.content for token in added if token.special or not special_only}
        return (texts | set(self.tokenizer.all_special_tokens)) - {""}

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return re.compile(_any_of(filter(str.strip, self.added_tokens(special_only=True))))

    @property
    def template_text(self) -> str:
        """The template's text; all texts of several named templates."""
        template = self._template
        return template if isinstance(template, str) else "\n".join(map(str, dict(template or {}).values()))

    def _find_sentinel(self) -> bool:
        """Whether the template shows an assistant's text in the present form and leaves a sentinel unchanged."""
        for new in _SENTINELS:
            text = new()
            exchange = [{"role": "user", "content": "u"}, {"role": "assistant", "content": text}]
            if text in (self.try_render(exchange, add_generation_prompt=False) or ""):
                self.sentinel = new
                return True
        return False

    # --- prompts ---

    def opening(self, messages: Sequence[ChatMessage], tools: Tools) -> Prompt:
        """Return the prompt that opens a sequence: the whole conversation, rendered.

        Args:
            messages: Chat messages, with the system message first if there is one.
            tools: Tools in OpenAI form.

        Raises:
            ChatTemplateError: The template rejected the conversation, or would drop a part of it.
        """
        places = [getattr(message, "where", f"message {i}") for i, message in enumerate(messages)]
        pictures = tuple(pictures_of(messages))
        messages, tools = self._escaped(self.forms.with_own_ids(messages), tools)
        text = self.render_step([], messages, tools)
        lost = find_lost(self, [], messages, tools)
        if lost is not None:
            raise ChatTemplateError(
                f"{places[lost[0]]}: the chat template drops the {lost[1]} of this conversation; leave it out, or pass "
                "a template that renders all parts, chat_template=<jinja text>"
            )
        if tools and not self._warned_of_tools and not self.shows_tools:
            described = [tool["function"]["description"].strip().partition("\n")[0] for tool in tools]
            if not any(line and line in text for line in described):
                self._warned_of_tools = True
                logger.warning(
                    "tools=<%s> | the chat template shows the model none of its tools: pass one with a place for tools "
                    "(chat_template=, --chat-template), or put their descriptions into the system prompt",
                    ", ".join(tool["function"]["name"] for tool in tools),
                )
        encoded = self._encoded(text)
        return Prompt(_ids_of(encoded), encoded, pictures=pictures)

    @functools.cached_property
    def shows_tools(self) -> bool:
        """Whether the template has a place for tools, so that the model sees them."""
        question: list[ChatMessage] = [{"role": "user", "content": "Hi"}]
        try:
            with_tool = self.render(question, [PROBE_TOOL], add_generation_prompt=True)
            return with_tool != self.render(question, None, add_generation_prompt=True)
        except ChatTemplateError:  # it takes no such conversation, which says nothing about tools
            return True

    def shared_opening(self, key: Any, render: Callable[[], Prompt]) -> Prompt:
        """Return a prompt that several conversations open with at about the same time, as samples of one prompt do.

        Args:
            key: What identifies the messages and tools of the prompt.
            render: Returns the prompt.
        """
        prompt = self._openings.get(key)
        if prompt is None:
            prompt = render()
            if "strftime_now" not in self.template_text:
                with self._lock:
                    self._openings[key] = prompt
                    while len(self._openings) > _MAX_OPENINGS:
                        del self._openings[next(iter(self._openings))]
        return prompt

    def continuation(
        self,
        turn: SampledTurn,
        messages: Sequence[ChatMessage],
        tools: Tools,
        *,
        has_system: bool = True,
        had_tool_results: bool = False,
        history: Callable[[], Sequence[ChatMessage]] | None = None,
    ) -> Prompt:
        """Return the prompt tokens that follow a sampled turn.

        If the turn was cut off, or ended at a stop string or at a token of its own text (`</tool_call>`), the missing
        part of its end becomes prompt tokens. If it ended with another control token than the template writes there,
        the sequence keeps all but that token.

        Args:
            turn: The turn.
            messages: The chat messages since then.
            tools: Tools in OpenAI form.
            has_system: Whether the conversation begins with a system message.
            had_tool_results: Whether the conversation before the turn holds tool results.
            history: Returns the conversation up to the turn, which is its last message, with the system message first
                if there is one. Called only if the template's text after the turn depends on it.

        Raises:
            UnprovenContinuationError: The template's text after the turn cannot be derived, or lacks a part of the new
                messages.
        """
        last = turn.output_ids[-1] if len(turn.output_ids) else None
        results = sum(message["role"] == "tool" for message in messages)
        happens = {
            "tool result": results > 0,
            "several tool results": results > 1,
            "user turn": any(message["role"] == "user" for message in messages),
            "cut turn": turn.stop_token_id is None and not results,
        }
        cases = [case for case in CASES if happens[case]]
        proofs = [self._prove(case, has_system, bool(tools)) for case in cases]
        for proof in proofs:
            if proof.reason is not None:
                raise UnprovenContinuationError(proof.reason)
        pictures = tuple(pictures_of(messages))
        # A template that drops calls writes none: the new messages follow the turn's text.
        shown = [{"id": call["id"], "name": call["name"]} for call in turn.calls]
        shown = shown if results and "tool calls" not in self.left_out else []
        messages, tools = self._escaped(self.forms.with_own_ids(messages), tools)
        if any(self._needs_history(case, has_system, bool(tools)) for case in cases):
            if history is None:
                raise UnprovenContinuationError(_READS_HISTORY)
            earlier, _ = self._escaped(self.forms.with_own_ids(history()), None)
            turn_as_read = {**earlier[-1]}
            if not shown:
                turn_as_read.pop("tool_calls", None)
            after = self.complete_text_after_turn([*earlier[:-1], turn_as_read], messages, tools)
        else:
            after = self._shapes.text_after_turn(
                shown if self._control_tokens is None else self._control_tokens.escape(shown),
                messages,
                tools,
                has_system=has_system,
                after_tool_step=had_tool_results and any(proof.needs_tool_step for proof in proofs),
            )
        end_id = self.tokenizer.convert_tokens_to_ids(after.end)
        encoded = self._encoded(after.end + after.following)
        token_ids = _ids_of(encoded)
        if not token_ids or token_ids[0] != end_id:
            raise UnprovenContinuationError(f"{after.end!r} is not a single token before {after.following[:40]!r}")
        if last == end_id:
            return Prompt(token_ids[1:], encoded, pictures=pictures)
        stop = "" if last is None else str(self.tokenizer.convert_ids_to_tokens(last))
        # A control token of the turn's own text, at which the user's `stop_token_ids` stopped, stays.
        is_odd = last == turn.stop_token_id and self.is_special(last) and stop not in after.rest
        if last is not None and (last in self.stop_ids or is_odd):
            why = Reason("other_stop", detail=(repr(stop), repr(after.end)))
            return Prompt(token_ids, encoded, len(turn.output_ids) - 1, why, pictures)
        # The rest of the turn as the template writes it, without the part that was sampled already.
        rest = "" if results else after.rest
        if turn.ends_in_reasoning and not results:
            if self.reasoning_close is None:
                raise UnprovenContinuationError(
                    "the turn was cut off in its reasoning, and it is unknown what closes that"
                )
            rest = self.reasoning_close + rest
        tail = self.decode(turn.output_ids[-_TAIL_TOKENS:]) if rest else ""
        sampled = next(length for length in range(len(rest), -1, -1) if tail.endswith(rest[:length]))
        return Prompt([*self.encode(rest[sampled:]), *token_ids], encoded, pictures=pictures)

    def complete_text_after_turn(
        self, before: Sequence[ChatMessage], messages: Sequence[ChatMessage], tools: Tools
    ) -> TextAfterTurn:
        """Return what `text_after_turn` returns, and reject a text that lacks a part of the messages."""
        after = text_after_turn(self, before, messages, tools)
        lost = find_lost(self, before, messages, tools)
        if lost is not None:
            raise UnprovenContinuationError(f"the chat template drops the {lost[1]} after the turn")
        return after

    def _escaped(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[Sequence[ChatMessage], Tools]:
        """Return messages and tools as they are rendered, with marks for control tokens if those are escaped."""
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
                    "role=<%s>, token=<%s> | a message contains the text of a control token, which becomes a real one "
                    "in the prompt, as on the server's chat endpoint; escape_control_tokens=True keeps it text",
                    message["role"],
                    token.group(),
                )
        return messages, tools

    def _encoded(self, text: str) -> tuple[EncodedText, ...]:
        escaped = self._control_tokens
        return tuple(escaped.pieces(text)) if escaped else (EncodedText(text, self.encode(text)),)

    # --- tokens ---

    def is_special(self, token_id: int | None) -> bool:
        """Whether a token is a control token, which is never part of an answer's text."""
        return token_id in self._special_ids

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        marked = (token_id for token_id, token in self.tokenizer.added_tokens_decoder.items() if token.special)
        return frozenset((*marked, *self.tokenizer.all_special_ids, *self.stop_ids))

    def call_id(self, tool_use_id: str, name: str, number: int) -> str:
        """Return the id of a tool call in the id format of the family's templates.

        Args:
            tool_use_id: The agent's id.
            name: The tool's name.
            number: Number of earlier calls in the conversation.
        """
        make = self.family.call_id if self.family is not None else None
        return tool_use_id if make is None else make(tool_use_id, name, number)

    def _find_family(self, name: str | None) -> tuple[Family | None, tuple[str, ...]]:
        """Find the model family with its stop tokens, or else derive the stop token from the template."""
        family = find_family(self.template_text) if name is None else get_family(name)
        if family is not None:
            added = self.added_tokens(special_only=False)
            known = tuple(stop for stop in family.stops if stop in added)
            if known:
                return family, known
            if name is not None:
                raise ChatTemplateError(f"family={name!r}: none of its stop tokens {family.stops} is in the vocabulary")
        # An unknown family, or its template with another vocabulary. The first control token that the template writes
        # after an assistant's text ends a turn.
        sentinel = self.sentinel()
        exchange = [{"role": "user", "content": "u"}, {"role": "assistant", "content": sentinel}]
        after = self.render(exchange, add_generation_prompt=False).rpartition(sentinel)[2]
        special = self.added_tokens(special_only=True)
        found = [(after.index(token), -len(token), token) for token in special if token in after]
        return None, (min(found)[2],) if found else ()


class Shapes:
    """What a template writes after turns, by shape: what remains the same while ids and the texts of messages change.

    A shape is rendered once, with holes for the ids and texts. If the template reads one of them, or a text could
    change what it writes around it, the conversation itself is rendered.
    """

    def __init__(self, template: ChatTemplate) -> None:
        """Start without shapes."""
        self._template = template
        self._known: dict[Any, tuple[TextAfterTurn, Sequence[Part]] | None] = {}
        self._lock = threading.Lock()

    def text_after_turn(
        self,
        calls: Sequence[Mapping[str, Any]],
        messages: Sequence[ChatMessage],
        tools: Tools,
        *,
        has_system: bool,
        after_tool_step: bool,
    ) -> TextAfterTurn:
        """Return the same as the function `text_after_turn`."""
        texts = [call["id"] for call in calls]
        fields = []
        for message in messages:
            fields.append(tuple((name, None if name in _HOLES else value) for name, value in message.items()))
            texts += [value for name, value in message.items() if name in _HOLES]
        before = before_turn(calls, messages, has_system=has_system, after_tool_step=after_tool_step)

        def whole() -> TextAfterTurn:
            return self._template.complete_text_after_turn(before, messages, tools)

        digest = tools.digest if isinstance(tools, ChatTools) else None
        if (
            not (tools is None or digest)
            or not all(map(can_fill, texts))
            or {type(message) for message in messages} != {dict}
        ):
            return whole()
        names = tuple(call["name"] for call in calls)
        key = (names, tuple(fields), digest, has_system, after_tool_step)
        try:
            shape = self._known[key]
        except TypeError:  # a field of a message is not text
            return whole()
        except KeyError:
            after = whole()
            shape = self._shape(before, messages, tools)
            if shape is not None and replace(shape[0], following=filled(shape[1], texts)) != after:
                shape = None
            with self._lock:
                while len(self._known) >= _MAX_SHAPES:
                    del self._known[next(iter(self._known))]
                self._known[key] = shape
            return after
        return whole() if shape is None else replace(shape[0], following=filled(shape[1], texts))

    def _shape(
        self, before: Sequence[ChatMessage], messages: Sequence[ChatMessage], tools: Tools
    ) -> tuple[TextAfterTurn, Sequence[Part]] | None:
        """Render with holes; None if the template reads one, or writes one before the end of the turn."""
        template, numbers = self._template, itertools.count()
        with_holes = self._with_holes
        if with_holes is None:
            return None
        sentinel = template.sentinel()
        turn, _ = with_marks(before[-1], lambda: sentinel, blank=True)
        if "tool_calls" in turn:
            turn["tool_calls"] = [{**call, "id": Hole(next(numbers))} for call in turn["tool_calls"]]
        new = [
            {name: Hole(next(numbers)) if name in _HOLES else value for name, value in message.items()}
            for message in messages
        ]
        formed = template.forms.put([*before[:-1], turn])
        try:
            parts = with_holes({**template.variables, "messages": [*formed, *new], "tools": tools})
        except (HoleReadError, Exception):  # templates raise whatever their expressions raise
            return None
        marked = [at for at, part in enumerate(parts) if isinstance(part, str) and sentinel in part]
        if not marked:
            return None
        literal, later = str(parts[marked[-1]]), parts[marked[-1] + 1 :]
        try:
            after = _split(literal, sentinel, template.stops)
        except UnprovenContinuationError:
            return None
        # A longer stop could begin before this one, and end in a text.
        is_first = len(after.end + after.following) >= max(map(len, template.stops))
        return (after, [after.following, *later]) if is_first and NOW not in later else None

    @cached_property
    def _with_holes(self) -> Callable[[Mapping[str, Any]], Sequence[Part]] | None:
        jinja = self._template.jinja
        return None if jinja is None else with_holes(jinja, self._template.template_text)


_HOLES = frozenset({"content", "tool_call_id"})
"""The fields of messages whose texts differ from call to call."""
_MAX_SHAPES = 256
_MAX_OPENINGS = 8


@dataclass(frozen=True)
class TextAfterTurn:
    """What the template writes after the text of an assistant's turn.

    Attributes:
        rest: The rest of the turn, such as the end of a section; a turn that was sampled to its end includes it.
        end: The token that ends the turn.
        following: The text after that token.
    """

    rest: str
    end: str
    following: str


def text_after_turn(
    template: ChatTemplate, before: Sequence[ChatMessage], messages: Sequence[ChatMessage], tools: Tools
) -> TextAfterTurn:
    """Return what the template writes after a turn.

    Args:
        template: The template.
        before: The conversation up to the turn, or a stand-in for it (`before_turn`). Its last message is the turn.
        messages: The chat messages after the turn.
        tools: Tools in OpenAI form.

    Raises:
        UnprovenContinuationError: The text cannot be derived.
    """
    sentinel = template.sentinel()
    # Every call holds the sentinel; the last one that the template writes counts. gpt-oss's template writes only one
    # of several calls.
    turn, _ = with_marks(before[-1], lambda: sentinel, blank=True)
    try:
        text = template.render_step([*before[:-1], turn], messages, tools)
    except ChatTemplateError as error:
        # The full render shows whether the template rejects the messages or only the stand-in.
        raise UnprovenContinuationError(str(error)) from error
    found = _split(text, sentinel, template.stops)
    # If the family is unknown, a control token in between may be the true end of the turn, and the text after it a
    # message.
    if template.family is None and any(token in found.rest for token in template.added_tokens(special_only=True)):
        raise UnprovenContinuationError(f"there is a control token between the turn and {found.end!r}")
    return found


def before_turn(
    calls: Sequence[Mapping[str, Any]],
    messages: Sequence[ChatMessage],
    *,
    has_system: bool,
    after_tool_step: bool = False,
) -> list[ChatMessage]:
    """Create a stand-in for the conversation up to a turn.

    Args:
        calls: The turn's tool calls in order: `{"id", "name"}`. Empty if the template does not write calls.
        messages: The chat messages after the turn.
        has_system: Whether the conversation begins with a system message (some templates reject one).
        after_tool_step: Whether there is a tool call and its result before the turn.
    """
    before: list[ChatMessage] = [{"role": "system", "content": "s"}] if has_system else []
    before.append({"role": "user", "content": "u"})
    if after_tool_step:
        before += _tool_step({"id": "call00000", "name": "f"})
    return [*before, assistant_turn(calls if any(message["role"] == "tool" for message in messages) else (), "")]


def assistant_turn(calls: Sequence[Mapping[str, Any]], text: str) -> ChatMessage:
    """Create an assistant's turn that ends in `text`: in its calls or, without calls, in its content."""
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


def with_marks(
    message: ChatMessage, new_mark: Callable[[], str], *, blank: bool = False
) -> tuple[ChatMessage, dict[str, str]]:
    """Append a mark to each text of a message: to its content, and to the arguments of each of its tool calls.

    Args:
        message: The message.
        new_mark: Creates a mark.
        blank: Whether a content without text gets a mark if the message has no calls.

    Returns:
        The message, and which part of it holds which mark.
    """
    parts: dict[str, str] = {}
    calls = message.get("tool_calls") or ()

    def marked(text: str, part: str) -> str:
        if not text.strip() and (calls or not blank):
            return text
        mark = new_mark()
        parts[mark] = part
        return text + mark

    part = "text next to a tool call" if calls else _PARTS_OF_ROLES[message["role"]]
    content = message["content"]
    if isinstance(content, str):
        content = marked(content, part)
    else:
        content = [{**piece, "text": marked(piece["text"], part)} if "text" in piece else piece for piece in content]
    message = {**message, "content": content}
    if calls:
        message["tool_calls"] = []
    for number, call in enumerate(calls):
        function, arguments = call["function"], call["function"]["arguments"]
        if isinstance(arguments, Mapping):
            mark = new_mark()
            parts[mark] = FURTHER_CALLS if number else "tool calls"
            arguments = {**arguments, "mark": mark}
        message["tool_calls"].append({**call, "function": {**function, "arguments": arguments}})
    return message, parts


def find_lost(
    template: ChatTemplate, before: Sequence[ChatMessage], messages: Sequence[ChatMessage], tools: Tools
) -> tuple[int, str] | None:
    """Find what a template drops silently when it renders messages after others.

    The messages are rendered once more with a mark at the end of each text, because a template may write a text in
    another form.

    Returns:
        The position of the first message of which a part is missing, and the name of the part; None if there is none.
    """
    marked = [with_marks(message, template.sentinel) for message in messages]
    text = template.try_render([*before, *(message for message, _ in marked)], tools, add_generation_prompt=True)
    if text is None:
        return None
    position = 0
    for index, (_, parts) in enumerate(marked):
        for mark, part in parts.items():
            found = text.find(mark, position)
            if found < 0:
                found = text.find(mark)
            if found < 0:
                return index, part
            position = found
    return None


def _split(text: str, sentinel: str, stops: Sequence[str]) -> TextAfterTurn:
    _, found, after = text.rpartition(sentinel)
    if not found:
        raise UnprovenContinuationError("the chat template drops the assistant's turn")
    positions = [(after.index(stop), stop) for stop in stops if stop in after]
    if not positions:
        raise UnprovenContinuationError(f"the chat template does not end the turn with any of {tuple(stops)}")
    position, end = min(positions)
    return TextAfterTurn(after[:position], end, after[position + len(end) :])


# --- the proof ---


@dataclass(frozen=True)
class Proof:
    """Whether the text after a turn equals that in a render of the whole conversation.

    Attributes:
        reason: Why it is not proven; None if it is.
        needs_tool_step: Whether the stand-in needs a tool step before the turn if the conversation has one.
        depends_on_length: Whether no stand-in will do, because the text depends on the conversation's length.
    """

    reason: str | None
    needs_tool_step: bool = False
    depends_on_length: bool = False


def prove(template: ChatTemplate, case: str, *, has_system: bool, has_tools: bool) -> Proof:
    """Prove the text after a turn for one of `CASES`.

    Conversations of three lengths are rendered in full. Neither the system prompt nor the tools may come after the
    turn. If their text after the turn is not that of the stand-in, the conversation itself has to be rendered.

    Args:
        template: The template.
        case: One of `CASES`.
        has_system: Whether the conversation begins with a system message.
        has_tools: Whether there are tools.
    """
    tools = ChatTools([PROBE_TOOL]) if has_tools else None
    shown, new = _what_follows(template, case)
    count = len(new) if new[0]["role"] == "tool" else 0
    try:
        references = []
        for number in range(3):
            steps, exchanges = (number, 0) if count else (0, number)
            before = _probe(template, _SYSTEM, shown, has_system=has_system, steps=steps, exchanges=exchanges)
            references.append(text_after_turn(template, before, new, tools))
            after = references[-1].rest + references[-1].following
            if has_system and _SYSTEM in after:
                return Proof("the chat template moves the system prompt after the turn")
            if has_tools and _DESCRIPTION in after:
                return Proof("the chat template moves the tools after the turn")
        plain = text_after_turn(template, before_turn(shown, new, has_system=has_system), new, tools)
        later = plain
        if count and references[0] == plain and references[1] != plain:
            stand_in = before_turn(shown, new, has_system=has_system, after_tool_step=True)
            later = text_after_turn(template, stand_in, new, tools)
        depends_on_length = references != [plain, later, later]
        return Proof(None, needs_tool_step=later != plain, depends_on_length=depends_on_length)
    except (UnprovenContinuationError, ChatTemplateError) as error:
        return Proof(str(error))


def _probe(
    template: ChatTemplate,
    text: str,
    calls: Sequence[Mapping[str, Any]],
    *,
    has_system: bool,
    steps: int,
    exchanges: int,
    answer: str = "",
) -> list[ChatMessage]:
    """Create a conversation that says a text everywhere, up to a turn with these calls that says `answer`."""
    before: list[ChatMessage] = [{"role": "system", "content": text}] if has_system else []
    before.append({"role": "user", "content": text})
    for number in range(steps):
        call = {**probe_call(template, number), "name": answer or "look"}
        before += _tool_step(call, text)
    before += [{"role": "assistant", "content": text}, {"role": "user", "content": text}] * exchanges
    return [*before, assistant_turn(calls, answer)]


def needs_history(template: ChatTemplate, case: str, has_system: bool, has_tools: bool) -> bool:
    """Whether the text after a turn depends on what the conversation before it says, or on its length.

    Conversations that say what the template tests for are rendered in full, and their text after the turn compared
    with that of the stand-in. If it is not known what the template tests for, the text is said to depend on it.
    The arguments are those of `prove`.
    """
    proof = prove(template, case, has_system=has_system, has_tools=has_tools)
    if proof.depends_on_length or not template.tested_texts:
        return True
    tools = ChatTools([PROBE_TOOL]) if has_tools else None
    shown, new = _what_follows(template, case)
    probe = partial(_probe, template, calls=shown, has_system=has_system)
    plain, later = (
        text_after_turn(
            template, before_turn(shown, new, has_system=has_system, after_tool_step=after_tool_step), new, tools
        )
        for after_tool_step in (False, proof.needs_tool_step)
    )
    probes = (
        probe(text, steps=times * has_tools, exchanges=times, answer=text)
        for text, times in template.tested_texts.items()
    )
    return not (
        _is_after(template, plain, probe("earlier", steps=0, exchanges=2), new, tools)
        and all(_is_after(template, later, before, new, tools) for before in probes)
    )


def _what_follows(template: ChatTemplate, case: str) -> tuple[list[dict[str, str]], list[ChatMessage]]:
    """Return a turn's tool calls as the template writes them, and what follows the turn."""
    count = {"tool result": 1, "several tool results": 2}.get(case, 0)
    calls = [probe_call(template, number) for number in range(5, 5 + count)]
    new: list[ChatMessage] = [probe_result(call) for call in calls] or [{"role": "user", "content": "And then?"}]
    return calls if "tool calls" not in template.left_out else [], new


def _is_after(template: ChatTemplate, after: TextAfterTurn, before: Sequence[ChatMessage], *new: Any) -> bool:
    """Whether a text follows a turn, if the template takes the conversation and shows the turn."""
    try:
        return text_after_turn(template, before, *new) == after
    except UnprovenContinuationError:
        return True


_MAX_TEMPLATES = 64
"""Templates that are kept for one tokenizer; a model holds its own in any case."""
_MOST_EXCHANGES = 20
"""In a probe that is longer than what a template tests for."""


@lru_cache(_MAX_TEMPLATES)
def tested_constants(source: str, environment: Any) -> frozenset[str]:
    """Return the texts and numbers of a template that its tests may compare the texts of a conversation with.

    What it only writes, what it compares with roles, types and its own arguments, and names of fields are left out.
    What no test names itself, such as the arguments of macros, is joined to one text.
    """
    from jinja2 import meta, nodes

    tree = environment.parse(source)
    written = (nodes.Output, nodes.Add, nodes.Concat)
    tests = (nodes.Compare, nodes.Operand, nodes.Test, nodes.List, nodes.Tuple, nodes.Pair, nodes.Assign)
    tested, others = set(), set()
    not_text = {"role", "type"} | meta.find_undeclared_variables(tree) - {"messages", "tools"}
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    for node in tree.find_all(nodes.Node):
        values = [child.value for child in node.iter_child_nodes() if isinstance(child, nodes.Const)]
        listed = chain.from_iterable(value for value in values if isinstance(value, list | tuple | dict))
        tested |= set(map(str, listed))
        constants = {str(value) for value in values if isinstance(value, str | int)}
        searches = isinstance(node, nodes.Call) and getattr(node.node, "attr", "get") != "get"
        if isinstance(node, nodes.Getitem):
            names |= constants
        elif isinstance(node, tests) or searches or getattr(node, "name", "") in ("selectattr", "rejectattr"):
            tested |= constants
        elif not isinstance(node, written):
            others |= constants
        if isinstance(node, nodes.Compare) and _subject(node.expr) in not_text:
            operands = chain.from_iterable(operand.find_all(nodes.Const) for operand in node.ops)
            names |= {str(operand.value) for operand in operands}
    return frozenset({*tested, " ".join(sorted(others - tested))} - names - {"True", "False", "None"})


def _subject(node: Any) -> Any:
    """Return the name in `message.role`, `message["role"]` or `role`, filtered or not; None of other expressions."""
    while type(node).__name__ == "Filter":
        node = node.node
    return getattr(node, "attr", getattr(getattr(node, "arg", node), "value", getattr(node, "name", None)))


def _tool_step(call: Mapping[str, str], text: str = "earlier") -> list[ChatMessage]:
    return [assistant_turn([call], text), {**probe_result(call), "content": text}]


def probe_call(template: ChatTemplate, number: int) -> dict[str, str]:
    """Create a call of `PROBE_TOOL`: `{"id", "name"}`, with the id in the family's format."""
    # Nine letters and digits, as the strictest templates require.
    return {"id": template.call_id(f"call{number:05}", "look", number), "name": "look"}


def probe_result(call: Mapping[str, str]) -> ChatMessage:
    """Create the result of a probe call."""
    return {"role": "tool", "content": f"seen by {call['id']}", "name": call["name"], "tool_call_id": call["id"]}


# --- how it treats parts of a conversation ---


def rewrites_history(template: ChatTemplate, *, tool_result: bool, reasoning: Reasoning) -> bool:
    """Whether the template renders a sampled turn differently once something follows it.

    Templates of reasoning models then strip reasoning, and an empty reasoning block of the generation prompt may
    vanish.

    Args:
        template: The template.
        tool_result: Whether a tool result follows, rather than a user message.
        reasoning: What the turn holds.
    """
    thought, answer = template.sentinel(), template.sentinel()
    question: ChatMessage = {"role": "user", "content": "u"}

    def step(call_id: str, text: str, thought: str) -> list[ChatMessage]:
        call = {"id": call_id, "name": "look"}
        turn = assistant_turn([call] if tool_result else [], text)
        if reasoning != "none":
            turn["reasoning_content"] = thought if reasoning == "text" else ""
        return [turn, probe_result(call) if tool_result else {"role": "user", "content": "v"}]

    turn, following = step("call00000", answer, thought)
    tools = [PROBE_TOOL] if tool_result else None

    def changes(later: Sequence[ChatMessage]) -> bool:
        whole = template.render([question, turn, following, *later], tools, add_generation_prompt=True)
        if not whole.startswith(opening) or (reasoning == "text" and thought not in whole):
            return True
        # The text before the answer may be there only while the turn is the last one.
        before = whole.partition(answer)[0]
        if reasoning == "empty":
            return before == opening or before != before_last
        return before not in (opening, before_last) and not tool_result

    try:
        opening = template.render([question], tools, add_generation_prompt=True)
        before_last = template.render([question, turn], tools, add_generation_prompt=False).partition(answer)[0]
        return changes([]) or changes(step("call00001", "another answer", "another thought"))
    except ChatTemplateError:
        return True  # unknown: the template's own form is its full render


def prefix_arguments(template: ChatTemplate) -> str:
    """Return the template arguments that change how history is rendered, as JSON.

    Other arguments only affect the generation prompt.
    """
    call = {"id": "call00000", "name": "look"}
    plain: list[ChatMessage] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "user", "content": "v"},
    ]
    probes: list[tuple[list[ChatMessage], Tools]] = [
        (plain, None),
        (plain[1:], None),  # a template may have a system prompt of its own
        (plain[1:], [PROBE_TOOL]),
        ([*plain, {**assistant_turn([call], "b"), "reasoning_content": "r"}, probe_result(call)], [PROBE_TOOL]),
    ]

    def render(probe: tuple[list[ChatMessage], Tools], arguments: Mapping[str, Any]) -> str | None:
        return template.try_render(*probe, add_generation_prompt=False, arguments=arguments)

    def changes(name: str) -> bool:
        alone = {name: template.arguments[name]}
        others = {other: value for other, value in template.arguments.items() if other != name}
        # Some arguments matter only together with others.
        pairs = [(render(probe, alone), render(probe, {})) for probe in probes]
        pairs += [(render(probe, template.arguments), render(probe, others)) for probe in probes]
        # If no probe renders with or without an argument, the argument may change anything.
        return any(with_it != without for with_it, without in pairs) or pairs[0] == (None, None)

    relevant = {name: value for name, value in template.arguments.items() if changes(name)}
    return json.dumps(relevant, sort_keys=True, default=repr)


TextBesideCalls = Literal["shown", "own message", "in reasoning", "left out"]
"""How a template treats text next to tool calls; "own message" puts the text into a message before the calls."""


@dataclass(frozen=True)
class TemplateForms:
    """The forms in which one template takes messages.

    Attributes:
        text_arguments: Whether arguments of tool calls are JSON text, not objects.
        reasoning_marks: Marks around reasoning if the template takes it as part of the text; None if it takes
            `reasoning_content`.
        text_beside_calls: How the template takes text next to tool calls.
        numbers_calls: Whether the template writes its own ids into tool calls, numbered from 0 in each turn.
        text_as_parts: Whether the template takes each content as a list of parts, as those of some vision models do.
    """

    text_arguments: bool = False
    reasoning_marks: tuple[str, str] | None = None
    text_beside_calls: TextBesideCalls = "shown"
    numbers_calls: bool = False
    text_as_parts: bool = False

    def put(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Put messages into the template's forms; messages already in them stay unchanged."""
        formed = list(chain.from_iterable(map(self._put, messages)))
        if not self.text_as_parts:
            return formed
        return [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message["content"], str)
            else message
            for message in formed
        ]

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
        """Rename the results of tool calls to the ids that the template writes into those calls.

        Results of calls that are not among `messages` keep their ids.
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
"""The usual form of `<think>`, also taught to models whose family has no marks of its own."""


def find_forms(template: ChatTemplate) -> TemplateForms:
    """Find the forms in which a template takes the parts of an assistant's turn.

    The first form that shows a part is taken. If no form shows reasoning, the template drops it by a rule of its own.
    If no form shows text next to tool calls, that text is "left out".
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
        following = later
        if "call" in parts:
            # A template may treat the first step with a call differently from later ones.
            before += [assistant_turn([earlier], "earlier"), probe_result(earlier)]
            following = [probe_result(call), *later]
        text = template.try_render(
            [*before, turn, *following],
            [PROBE_TOOL],  # always: some templates render nothing without tools
            add_generation_prompt=False,
            forms=forms,
        )
        return None if text is None else all(text_of_part in text for text_of_part in texts.values())

    def shows_reasoning(forms: TemplateForms) -> bool:
        return bool(shown(forms, "reasoning", "text") or shown(forms, "reasoning", "call"))

    forms = template.forms
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
    # Templates that require alternating roles reject two messages in a row only if more follows.
    later = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
    return (
        "own message"
        if shown(replace(forms, text_beside_calls="own message"), "text", "call", later=later)
        else "left out"
    )


# --- control tokens in the text of messages ---


@dataclass
class _Stretch:
    """A control token that the template wrote, or the text between two of them."""

    text: str = ""
    has_mark: bool = False
    is_token: bool = False


class ControlTokens:
    """The control tokens of a tokenizer: all tokens added to its vocabulary except white space.

    These are more than the "special" ones: they include the marks of calls and results, such as `</tool_response>`.
    """

    def __init__(self, encoder: Encoder, new_mark: Callable[[], str]) -> None:
        """Look up the tokens, and an encoder without them.

        Args:
            encoder: Encodes text.
            new_mark: Creates a unique text that the chat template leaves unchanged.
        """
        self._encoder = encoder
        self._new_mark = new_mark
        self._marks: dict[str, str] = {}  # by token
        tokenizer = encoder.tokenizer
        added = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
        special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        ids = {token: token_id for token, token_id in (*added.items(), *special) if token.strip()}
        # Text that a vocabulary lacks becomes its unknown token, wherever it comes from.
        self._counted = frozenset(ids.values()) - {tokenizer.unk_token_id}
        self._pattern = re.compile(f"({_any_of(ids)})")
        self._encode_without = encoder.without(ids)

    def escape(self, value: Any) -> Any:
        """Replace each control token in the texts of a JSON-like value by a mark; images stay unchanged."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._marks.setdefault(match.group(), self._new_mark()), value)
        if isinstance(value, Mapping) and not isinstance(value, ImagePart):
            return {self.escape(key): self.escape(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(entry) for entry in value]
        return value

    def pieces(self, text: str) -> list[EncodedText]:
        """Encode a rendered text so that no mark becomes a control token.

        Raises:
            ChatTemplateError: A text of the conversation became a control token anyway.
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
                # A vocabulary may also have a control token as an ordinary piece.
                if not self._counted.isdisjoint(token_ids):
                    token_ids = list(chain.from_iterable(map(self._encode_without, whole)))
                if not self._counted.isdisjoint(token_ids):
                    raise ChatTemplateError(
                        f"a message holds a control token that this tokenizer cannot encode as text: {whole!r:.200}"
                    )
            else:
                token_ids = self._encoder.encode(whole)
                own_tokens = sum(stretch.is_token for stretch in together)
                # A tokenizer may normalize another spelling to a control token.
                if sum(token_id in self._counted for token_id in token_ids) > own_tokens:
                    raise ChatTemplateError(
                        "a message holds a text that the tokenizer normalizes to a control token, "
                        "although its spelling differs"
                    )
            pieces.append(EncodedText(whole, token_ids, is_plain=has_mark))
        return pieces


def _any_of(words: Iterable[str]) -> str:
    """Return a pattern for the longest of many words at a position. It is linear in the text for any number of words.

    Without words it matches nothing.
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
    return list(chain.from_iterable(part.token_ids for part in encoded))


_templates_lock = threading.Lock()


def get_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    arguments: Mapping[str, Any],
    family: str | None = None,
    escape_control_tokens: bool = False,
) -> ChatTemplate:
    """Return a shared `ChatTemplate`, so that a thousand models on one tokenizer examine its template once.

    Raises:
        ChatTemplateError: As for `ChatTemplate`.
        ValueError: There is no such family.
    """
    if not hasattr(tokenizer, "chat_template"):
        raise ChatTemplateError(
            f"tokenizer= must be a Hugging Face tokenizer, not {tokenizer!r:.60}; get_tokenizer(path) loads one"
        )
    text = chat_template or tokenizer.chat_template
    key = (
        text if isinstance(text, str) else repr(text),
        json.dumps(arguments, sort_keys=True, default=repr) if arguments else "",
        family,
        escape_control_tokens,
    )
    encoder = get_encoder(tokenizer)
    with _templates_lock:
        template: ChatTemplate | None = encoder.templates.pop(key, None)
        if template is None:
            template = ChatTemplate(
                tokenizer,
                chat_template=chat_template,
                arguments=arguments,
                family=family,
                escape_control_tokens=escape_control_tokens,
            )
        encoder.templates[key] = template  # last: the one that was used least recently is dropped first
        while len(encoder.templates) > _MAX_TEMPLATES:
            del encoder.templates[next(iter(encoder.templates))]
        return template
