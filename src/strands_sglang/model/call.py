"""One model call: from a conversation to a recorded turn with the tokens that the server sampled for it.

A call is attached to the recorded turn that it extends, and adds what the chat template writes after that turn. If that
text cannot be proven, or the user wants the template's own form of history, the call opens a new sequence from a full
render, and `Place.why` says why. Usually one request samples the answer; if the server aborts it and the call
continues, several do.

Promise: however the call ends, the tokens sampled until then are recorded, and the turn is failed or cut.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar, cast

from anyio import to_thread
from strands.types.content import ContentBlock, Message, Messages
from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolSpec

from ..client.cancellation import Cancellation
from ..client.client import SGLangClient
from ..client.prefill import Prefill
from ..exceptions import (
    SGLangAbortedError,
    SGLangCancelledError,
    SGLangContextLengthError,
    SGLangDecodingError,
    SGLangThrottledError,
)
from ..json_values import plain
from ..messages import (
    INVALID_NAME,
    NO_SYSTEM_PROMPT,
    ChatMessage,
    ChatTools,
    Conversation,
    blocks_of,
    exact_bytes,
    pictures_of,
    to_chat_messages,
    to_chat_tools,
)
from ..messages.content import encodable
from ..messages.said import said_in
from ..protocol.generation import (
    Generation,
    begun_stop_strings,
    join_parts,
    read_generation,
    sampling_params_of_the_rest,
    stop_strings,
)
from ..reasons import Reason
from ..telemetry import report_turn
from ..templates.chat_template import ChatTemplate, Prompt, Reasoning, SampledTurn, UnprovenContinuationError
from ..templates.image_tokens import ImageInputs, ImageProcessor, check_prompt, require_image_understanding
from ..tool_choice import GRAMMAR_PARAMETERS, UNCONSTRAINED, force_call
from ..tool_parsers import ParsedTurn, ToolParser, ToolParseResult
from ..trajectory import Caller, ParsedAnswer, Place
from ..trajectory.recording import Difference, Recording
from ..trajectory.trajectory import Trajectory
from ..trajectory.turn import Turn
from .config import ModelConfig, is_whole
from .server_check import ServerFacts, check_server, known_facts

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONG_BYTES = 100_000
"""Size of messages, serialized, from which they are encoded in a thread."""


@dataclass(frozen=True)
class RequestPlan:
    """What a request asks for.

    Attributes:
        sampling_params: SGLang's sampling parameters.
        fields: Further top-level keys of `/generate`.
        clamped: Whether the context, not the caller, limits `max_new_tokens`.
        sampled: Number of tokens of the answer that earlier, aborted requests have sampled.
    """

    sampling_params: Mapping[str, Any]
    fields: Mapping[str, Any]
    clamped: bool
    sampled: int = 0

    @property
    def has_no_budget_left(self) -> bool:
        """Whether the answer has reached its maximum length."""
        budget = self.sampling_params.get("max_new_tokens")
        return budget is not None and self.sampled >= budget


def _checked_plan(planned: Any, turn: Turn) -> RequestPlan:
    """Return what a trainer's hook planned, with sampling parameters that can be sent and saved.

    Raises:
        TypeError: It is no plan.
        ValueError: A parameter cannot be sent, or is a grammar in a call that was asked without one.
    """
    if not isinstance(planned, RequestPlan) or not isinstance(planned.sampling_params, Mapping):
        raise TypeError(f"on_request returned {planned!r}: return a RequestPlan, or raise to send nothing")
    sampling_params = plain(planned.sampling_params, "on_request's sampling_params")
    budget = sampling_params.get("max_new_tokens")
    if budget is not None and not is_whole(budget, at_least=1):
        raise ValueError(
            f"on_request returned a plan with max_new_tokens={budget!r}: it must be a whole number of at least 1 or "
            "None; raise to send nothing"
        )
    grammar = next((name for name in GRAMMAR_PARAMETERS if sampling_params.get(name) is not None), None)
    if grammar is not None and not turn.constrained:
        raise ValueError(
            f"on_request added {grammar} to a call that is trained: set it in the sampling_params of the model, whose "
            "tokens are then marked as off-policy"
        )
    return replace(planned, sampling_params=sampling_params, clamped=bool(planned.clamped))


OnRequest = Callable[[Turn, RequestPlan], RequestPlan]
"""Called before each request with its turn and plan; returns the plan to use, or raises to prevent the request.

It is called again with a new plan if the request then waits for the prefill of another call.
"""


@dataclass(frozen=True)
class ChatRequest:
    """What Strands asks a model.

    Attributes:
        messages: The conversation.
        tool_specs: The tools that the model may call.
        system: The system prompt.
        conversation: The fingerprint of all of them.
    """

    messages: Messages
    tool_specs: list[ToolSpec] | None
    system: str | None
    conversation: Conversation


@dataclass(eq=False)
class ModelCall:
    """One call of a model, with the model's state at the time of the call.

    Attributes:
        chat: What is asked.
        trajectory: Records the call.
        client: Sends the requests.
        template: Renders the prompt tokens.
        parser: Parses the answer.
        images: Expands placeholders; None for a model without images.
        config: The model's configuration.
        on_request: A trainer's hook.
        caller: Who asks.
        names: Tool names that the model wrote and Strands does not hand back, by toolUseId, for calls that the
            trajectory does not hold.
        cancel_signal: Event that cancels the call.
        json_schema: JSON schema that constrains the answer to text that fits it; None for no constraint.
        turn: The recorded turn, once the call is asked.
        parts: The sampled tokens so far, one entry per request.
    """

    chat: ChatRequest
    trajectory: Trajectory
    client: SGLangClient
    template: ChatTemplate
    parser: ToolParser
    images: ImageProcessor | None
    config: ModelConfig
    on_request: OnRequest | None = None
    caller: Caller = field(default_factory=Caller)
    names: Mapping[str, str] = field(default_factory=dict)
    cancel_signal: threading.Event | None = None
    json_schema: str | None = None
    turn: Turn = field(init=False)
    parts: list[Generation] = field(init=False, default_factory=list)
    _cancellation: Cancellation = field(init=False)
    _grammar: Mapping[str, Any] | None = field(init=False, default=None)
    _response: dict[str, Any] | None = field(init=False, default=None)
    _partial: dict[str, Any] | None = field(init=False, default=None)
    _prefill: Prefill | None = field(init=False, default=None)
    _begun: list[str] = field(init=False, default_factory=list)
    _scored: Sequence[int] = field(init=False, default=())
    _recorded: Turn | None = field(init=False, default=None)

    # --- sampling ---

    async def sample(self, tool_choice: Any = None) -> Generation:
        """Ask the server and return a complete answer, to be passed to `record`.

        Args:
            tool_choice: A Strands tool choice.

        Raises:
            ContextWindowOverflowException: The prompt leaves no room in the context.
            SGLangAbortedError: The server aborted the request; the sampled tokens are recorded as a cut turn.
            SGLangCancelledError: The signal was set; the sampled tokens are recorded as a cut turn.
            SGLangDeadlineError: The client's deadline passed; the sampled tokens are recorded as a cut turn.
            SGLangClientError: The server or the network failed after all retries.
            ModelThrottledException: The server is too busy and the client does not retry.
            UnsupportedContentError: A message holds content that cannot be rendered.
        """
        if self.cancel_signal is not None and self.cancel_signal.is_set():
            raise SGLangCancelledError("the call was cancelled by its signal before its first request")
        self._cancellation = Cancellation(self.client.deadline, self.cancel_signal)
        await self._ask(tool_choice)
        client = self.client
        try:
            if self.trajectory.source is not None:
                return self._replayed(self.trajectory.source)
            server = known_facts(client, self.template)
            if server is None:
                server = await self._cancellation.finish(check_server(client, self.template))
            self.trajectory.context_length = server.context_length
            if self.turn.resumes is not None:
                if self.turn.resumes.finish_type != "abort":  # the whole answer, which the agent never got
                    return replace(self.turn.resumes)  # a copy: the turn does not wait any longer
                self.parts.append(self.turn.resumes)
            closings, empty_attempts = client.closings, 0
            while True:
                plan = self._plan(server)
                if plan.has_no_budget_left:
                    return replace(join_parts(self.parts), finish_type="length", abort_message=None)
                if await self._share_prefill():
                    plan = self._plan(server)  # a trainer may have stopped meanwhile
                try:
                    part = await self._request(plan)
                except ContextWindowOverflowException as error:
                    server = await self._without_last_token(plan, server, error)
                    continue
                if self._prefill is not None:
                    self._prefill.answered(part.cached_tokens)
                self.parts.append(part)
                answer = self._with_whole_stop_string(join_parts(self.parts), plan)
                empty_attempts = 0 if part.output_ids else empty_attempts + 1
                ends_inside_stop_string = answer.stop_string in self._begun
                if not ends_inside_stop_string and part.finish_type != "abort":
                    return answer
                is_closed = client.closings != closings
                may_resume = self.config.on_abort == "resume" and empty_attempts <= client.max_retries and not is_closed
                if not ends_inside_stop_string and not may_resume:
                    raise self._aborted(answer, closed=is_closed)
                if empty_attempts:
                    await self._cancellation.finish(asyncio.sleep(client.retry_policy.delay(empty_attempts - 1)))
                if client.closings != closings:
                    raise self._aborted(answer, closed=True)
                if self.turn.constrained:
                    self.parts.clear()  # a grammar begins at the first token, and its tokens are not trained
                else:
                    self.trajectory.keep_part(self.turn, answer)
                logger.debug("call=<%d>, tokens=<%d> | aborted, continuing", self.turn.index, answer.completion_tokens)
        except BaseException as error:  # also CancelledError: the turn must not stay "asked"
            if self._prefill is not None:
                self._prefill.failed()
            sampled = self._sampled()
            if sampled is None:
                self.trajectory.fail(self.turn, error)
            else:
                self.trajectory.cut(self.turn, sampled, error)
            report_turn(self.turn)
            raise

    def _replayed(self, source: Recording) -> Generation:
        """Return the recorded answer, or fail as the recorded call did.

        Raises:
            ReplayDifferenceError: The call asks something else.
        """
        recorded = source.turn_of(self.turn)
        answer = recorded.generation
        try:
            self._plan(ServerFacts(source.recorded.context_length, tokenizer_proven=True))
        except ContextWindowOverflowException as error:
            if answer is not None:
                source.differ(Difference("room in the context", recorded.index, None, "enough", str(error)))
            raise
        source.check_request(self.turn, recorded, random_seeds=self.config.random_seeds)
        if answer is None or not recorded.is_whole:
            self.parts = [] if answer is None else [answer]
            source.has_ended = source.is_cut_off and source.is_over(recorded.agent)
            raise source.failure_of(recorded)
        self._recorded = recorded
        return replace(answer)

    async def _without_last_token(
        self, plan: RequestPlan, server: ServerFacts, error: ContextWindowOverflowException
    ) -> ServerFacts:
        """Return the server's facts without the last token of its context, which older servers reserve.

        Raises:
            ContextWindowOverflowException: The error, if the request did not fill the context to that token.
        """
        most = plan.sampling_params.get("max_new_tokens")
        total = None if most is None else self.turn.prompt_tokens + int(most)
        if total != server.context_length:
            raise error
        for known_server in self.client.servers:
            known_server.reserves_last_token = True
        reserved = await check_server(self.client, self.template)
        if reserved == server:  # the token was already reserved
            raise error
        return reserved

    def _with_whole_stop_string(self, answer: Generation, plan: RequestPlan) -> Generation:
        """Name the whole stop string where the server only matched the rest that an earlier part had begun."""
        if answer.stop_string not in self._begun:
            return answer
        text = self.template.decode(answer.output_ids)
        found = next((stop for stop in stop_strings(plan.sampling_params) if stop in text), None)
        return replace(answer, stop_string=found or answer.stop_string)

    async def _ask(self, tool_choice: Any) -> None:
        """Record the call before its first request."""
        place, prompt = await self._attach()
        prompt_ids, images = prompt.token_ids, None
        if self.images is not None and prompt.pictures:
            if self.trajectory.source is None:
                await self._cancellation.finish(require_image_understanding(self.client, prompt.pictures[0]))
            prompt_ids, images = await self._cancellation.finish(_expanded(self.images, prompt))
        given = self.config.sampling_params
        if self.json_schema is not None:
            self._grammar = {**UNCONSTRAINED, "json_schema": self.json_schema}
        else:
            tools = self.chat.tool_specs
            self._grammar = force_call(self.parser, tools, tool_choice, self.template, prompt, sampling_params=given)
        constrained = self._grammar is not None or any(given.get(name) is not None for name in GRAMMAR_PARAMETERS)
        self.turn = self.trajectory.ask(
            place,
            self.chat.conversation,
            prompt_ids,
            self.caller,
            reasoning_open=prompt.ends_with(self.parser.think_start_token),
            constrained=constrained,
            images=images,
            encoder=self.template.encoder,
        )
        self.turn.chat_tools = self._tools(place.turn)
        self.turn.said = said_in(place.new_messages, self.chat.system if place.turn is None else None)
        logger.debug("call=<%d>, reason=<%s> | asking the model", self.turn.index, self.turn.why)

    async def _share_prefill(self) -> bool:
        """Wait while another call computes the opening prompt of this one, if it may not be in the server's cache.

        Later turns find it there, unless an abort ended the request: the server may have new weights now.

        Returns:
            Whether the call waited.
        """
        turn, config = self.turn, self.config
        may_be_cached = turn.parent is not None and not self.parts
        if may_be_cached or config.return_prompt_logprobs or turn.image_inputs():  # logprobs need it computed anyway
            return False
        if self._prefill is not None:
            self._prefill.failed()
        began = time.monotonic()
        try:
            self._prefill = await self.client.share_prefill(
                turn.root.prompt_ids,
                routing_key=self._routing_key,
                cancellation=self._cancellation,
                vocab_size=len(self.template.tokenizer),
                **config.request_fields,
            )
        finally:
            turn.requests_s += time.monotonic() - began
        return self._prefill is not None and self._prefill.waited

    @property
    def _routing_key(self) -> str:
        return self.config.routing_key or self.trajectory.routing_key(self.turn)

    def _plan(self, server: ServerFacts) -> RequestPlan:
        """Plan the next request, and record the plan on the turn.

        Raises:
            ContextWindowOverflowException: The context has no room for an answer, or for one of `min_new_tokens`.
        """
        config, turn, prompt_tokens = self.config, self.turn, self.turn.prompt_tokens
        grammar = self._grammar or {}  # None in it removes a configured parameter
        given = config.own_sampling_params()
        configured = {name: value for name, value in given.items() if name not in grammar}
        sampling_params = {**configured, **{name: value for name, value in grammar.items() if value is not None}}
        asked = sampling_params.pop("max_new_tokens", None)
        known_limits = (config.max_context_tokens, server.context_length)
        limit = min((known_limit for known_limit in known_limits if known_limit is not None), default=None)
        room = None if limit is None else limit - prompt_tokens
        if room is not None and room <= 0:
            raise ContextWindowOverflowException(
                f"the prompt has {prompt_tokens} tokens and the model's context {limit}: no room is left for an answer"
            )
        least = sampling_params.get("min_new_tokens") or 0
        if room is not None and room < least:  # the server would reject it as an invalid parameter
            raise ContextWindowOverflowException(
                f"the prompt has {prompt_tokens} tokens and the model's context {limit}: an answer of at least {least} "
                "tokens (min_new_tokens) does not fit"
            )
        if config.random_seeds and sampling_params.get("sampling_seed") is None:
            sampling_params["sampling_seed"] = secrets.randbits(31)
        limits = [limit for limit in (asked, room) if limit is not None]
        if limits:
            sampling_params["max_new_tokens"] = min(limits)
        fields: dict[str, Any] = {**config.own_request_fields(), "return_logprob": config.wants_logprobs}
        if config.return_prompt_logprobs:
            # The first entry that the server returns is always null, so ask from one token earlier.
            fields["logprob_start_len"] = max(prompt_tokens - len(turn.prompt_ids) - 1, 0)
        if config.return_routed_experts:
            fields["return_routed_experts"] = True
        clamped = room is not None and (asked is None or asked > room)
        sampled = sum(part.completion_tokens for part in self.parts)
        plan = RequestPlan(sampling_params, fields, clamped, sampled)
        try:
            if self.on_request is not None and not plan.has_no_budget_left:
                plan = _checked_plan(self.on_request(turn, plan), turn)
        finally:
            turn.sampling_params, turn.clamped = plan.sampling_params, plan.clamped
            turn.request_fields = config.own_request_fields()
        return plan

    async def _request(self, plan: RequestPlan) -> Generation:
        """Make the next request and read its answer."""
        template = self.template
        so_far = list(chain.from_iterable(part.output_ids for part in self.parts))
        stops = stop_strings(plan.sampling_params)
        self._begun = begun_stop_strings(stops, template.decode(so_far)) if so_far and stops else []
        input_ids = self.turn.encoded_ids(len(template.tokenizer)).plus(so_far)  # sampled ids may be padding ids
        fields = plan.fields
        images = self.turn.image_inputs()
        if self.images is not None and images:
            fields = {**fields, **self.images.request_fields([*self.turn.sent_ids(), *so_far], images)}
        if self.config.return_prompt_logprobs:
            self._scored = [*self.turn.token_ids(), *so_far]
        began = time.monotonic()
        try:
            self._response = await self.client.generate(
                input_ids,
                sampling_params_of_the_rest(plan.sampling_params, len(so_far), self._begun),
                routing_key=self._routing_key,
                cancel_signal=self._cancellation,
                on_partial=self._keep_partial,
                flat_logprobs=True,
                **fields,
            )
        except SGLangContextLengthError as error:
            raise ContextWindowOverflowException(str(error)) from error
        except SGLangThrottledError as error:
            if self.client.max_retries == 0:
                raise ModelThrottledException(str(error)) from error
            raise
        finally:
            self.turn.requests_s += time.monotonic() - began
        if images:
            check_prompt(self._response, [*self.turn.token_ids(), *so_far])
        part = self._read(self._response)
        if part.finish_type != "abort":
            self._response = None  # one list per token, which the garbage collector would walk
        if part.output_ids or part.finish_type != "length" or not self.parts:  # else no budget was left
            before = self.parts[-1] if self.parts else None
            if before is None and self.turn.parent is not None:
                before = self.turn.parent.generation
            sent, added = self.turn.prompt_tokens + len(so_far), len(self.turn.prompt_ids) + len(so_far)
            check_answer(part, self.config, sent, added, parent=before)
        return part

    def _keep_partial(self, response: dict[str, Any]) -> None:
        self._partial = response

    def _read(self, response: Mapping[str, Any]) -> Generation:
        generation = read_generation(
            response,
            logprobs_expected=self.config.wants_logprobs,
            end_token_ids=self.template.stop_ids,
            prompt_ids=self._scored,
            has_images=bool(self.turn.image_inputs()),
            vocab_size=len(self.template.tokenizer),
        )
        # When SGLang's model fails, it ends a request at a text that was neither requested nor sampled: for logits that
        # are NaN it replaces the sampled token by a stop token and calls the end "NaN happened".
        stop, sent = generation.stop_string, self.turn.sampling_params
        asked = {*stop_strings(sent), *stop_strings(sent, "stop_regex"), *self._begun}
        # A server may have stop strings of its own; those are in the text.
        if stop is not None and stop not in asked and stop not in self.template.decode(generation.output_ids):
            raise SGLangDecodingError(
                f"the server ended the answer with {stop!r}, which is neither a stop string of the request nor in the "
                "answer: its model failed, or a proxy changed the answer"
            )
        return generation

    def _sampled(self) -> Generation | None:
        """Return what was sampled until the call failed; None if nothing was and no server reported on the request."""
        parts = list(self.parts)
        if self._partial is not None:
            try:
                parts.append(self._read(self._partial))
            except SGLangDecodingError as error:
                logger.warning("call=<%d>, error=<%s> | a partial answer is unreadable", self.turn.index, error)
        try:
            return join_parts(parts) if parts else None
        except SGLangDecodingError as error:  # must not hide the error that ended the call
            logger.warning("call=<%d>, error=<%s> | recorded without routed experts", self.turn.index, error)
            return join_parts([replace(part, routed_experts=None) for part in parts])

    def _aborted(self, answer: Generation, *, closed: bool) -> SGLangAbortedError:
        count = answer.completion_tokens
        message = (
            f"the client was closed while the request ran, which aborted it after {count} tokens"
            if closed
            else f"the server aborted the request after {count} tokens: {answer.abort_message}; servers do this at "
            "weight updates and pauses"
        )
        return SGLangAbortedError(message, response=self._response)

    # --- recording ---

    def record(self, generation: Generation) -> tuple[ParsedTurn, list[ContentBlock]]:
        """Parse an answer and record it; an answer that cannot be parsed is recorded as a cut turn.

        Returns:
            The parsed answer, and its content blocks for the agent.
        """
        template, parser, turn = self.template, self.parser, self.turn
        try:
            if self.json_schema is None:
                parsed = parser.parse_turn(
                    sampled_text(template, turn, generation, kept_stop=parser.tool_end_token),
                    # A grammar forces the characters of a mark, not its token.
                    token_ids=None if turn.constrained else _answer_ids(template, generation),
                    tokenizer=template.tokenizer,
                    tools=self.chat.tool_specs,
                    reasoning_open=turn.reasoning_open,
                    truncated=generation.finish_type == "length",
                )
            else:  # the grammar allows no reasoning or calls; what looks like them is part of the JSON
                parsed = ParsedTurn(None, sampled_text(template, turn, generation), ())
            if self._recorded is not None:
                parsed = _with_ids(parsed, self._recorded)
            blocks = content_blocks(parsed)
            calls_before = _count_calls(self.chat.messages) if parsed.tool_calls else 0
            errors = [call for call in parsed.tool_calls if call.is_error]
            answer = ParsedAnswer(
                tool_calls=[
                    {
                        "toolUseId": call.id,
                        "name": shown_name(call),
                        "id": call.native_id or template.call_id(call.id, shown_name(call), number),
                    }
                    for number, call in enumerate(parsed.tool_calls, calls_before)
                ],
                result_notices={call.id: parser.render_error(call) for call in errors},
                parse_errors=[call.attempted_name or call.name for call in errors],
                ends_in_reasoning=parsed.ends_in_reasoning,
                has_reasoning=parsed.has_reasoning,
            )
            self.trajectory.answer(turn, generation, Message(role="assistant", content=blocks), answer)
            if self.trajectory.source is not None and self._recorded is not None:
                self.trajectory.source.check_answer(turn, self._recorded)
        except Exception as error:
            self.trajectory.cut(turn, generation, error)
            raise
        finally:
            report_turn(turn)
        return parsed, blocks

    # --- prompts ---

    async def _attach(self) -> tuple[Place, Prompt]:
        """Find where the call belongs, and render the prompt tokens that it adds there.

        Raises:
            UnsupportedContentError: A message holds content that cannot be rendered.
            ChatTemplateError: The template refuses the whole conversation.
        """
        messages = self.chat.messages
        place = self.trajectory.attach(self.chat.conversation, messages, self.caller)
        rendered: tuple[Any, ...] = (place.new_messages,)
        if place.turn is None or self.config.history_policy == "template":
            rendered = (self.chat.system, messages)
        if not is_long(*rendered):
            return self._render(place)
        # Not asyncio's own threads: those may all run tools.
        return await self._cancellation.finish(to_thread.run_sync(lambda: self._render(place), abandon_on_cancel=True))

    def _render(self, place: Place) -> tuple[Place, Prompt]:
        messages, turn = self.chat.messages, place.turn
        if turn is None:
            return place, self._opening()
        try:
            prompt = self._continuation(
                turn, len(messages) - len(place.new_messages), has_system=self.chat.system is not None
            )
        except UnprovenContinuationError as error:
            return Place(None, messages, Reason("opens_because", detail=(error.why,))), self._opening()
        if prompt.kept is not None:
            why = Reason("forks_inside", turn.index, detail=() if prompt.why is None else (prompt.why,))
            place = replace(place, kept=prompt.kept, why=why)
        return place, prompt

    async def count(self) -> int:
        """Count the prompt tokens of the messages: the recorded ones, and those that a call would add.

        Nothing is recorded. Without tools and a system prompt, the messages may be the part of a conversation after an
        answer, as Strands counts them.

        Raises:
            UnsupportedContentError: A message holds content that cannot be rendered.
            ChatTemplateError: The template refuses the messages.
            UnprovenContinuationError: The messages are a part, and what follows their turn cannot be derived.
        """
        counted, prompt = await encoded(self.chat.messages, self._counted_prompt)
        if prompt is None:
            return counted
        if not prompt.pictures or self.images is None:
            return counted + len(prompt.token_ids)
        expanded, _ = await _expanded(self.images, prompt)
        return counted + len(expanded)

    def _counted_prompt(self) -> tuple[int, Prompt | None]:
        messages = self.chat.messages
        is_part = self.chat.tool_specs is None and self.chat.system is None
        has_answer = any(message["role"] == "assistant" for message in messages)
        found = None
        if has_answer or not is_part:
            found = self.trajectory.recorded(self.chat.conversation, whatever_before=is_part)
        if found is not None:
            turn, known = found
            counted = len(turn.token_ids())
            if known == len(messages):
                return counted, None
        elif is_part and not has_answer:
            blocks = blocks_of(messages)
            answered = {block["toolResult"]["toolUseId"] for block in blocks if "toolResult" in block}
            latest = self.trajectory.latest_answered(answered)
            if latest is None:
                return 0, self._opening(ahead=True)
            turn, known, counted = latest, 0, 0
        else:
            return 0, self._opening(ahead=True)
        has_system = turn.parts.get("system prompt") != NO_SYSTEM_PROMPT
        try:
            prompt = self._continuation(turn, known, has_system=has_system, ahead=True)
        except UnprovenContinuationError:
            if found is None:
                raise
            return 0, self._opening(ahead=True)
        return counted - (0 if prompt.kept is None else len(turn.output_ids) - prompt.kept), prompt

    def _continuation(self, turn: Turn, known: int, *, has_system: bool, ahead: bool = False) -> Prompt:
        """Render the prompt that follows a turn: the messages from position `known`.

        Args:
            turn: The turn.
            known: Position of the first message after it; 0 if only those messages are given.
            has_system: Whether the conversation begins with a system message.
            ahead: Whether the prompt is only counted, before the call that sends it.
        """
        before, messages = self.chat.messages[:known], self.chat.messages[known:]
        tools = self._tools(turn) if known else turn.chat_tools
        had_tool_results = turn.has_calls_before
        if known:
            had_tool_results = any("toolResult" in block for block in blocks_of(before))
        has_answer = any(message["role"] == "assistant" for message in messages)
        has_own_system = self.chat.system is not None

        def render() -> Prompt:
            calls_before = 0
            if has_answer:  # its calls may be numbered
                calls_before = _count_calls(before)
            new = self._chat(messages, known_calls=turn.tool_calls, calls_before=calls_before, first=known)
            if self.images is not None and self.images.numbered and pictures_of(new):
                raise UnprovenContinuationError("the chat template numbers the images of a conversation")
            # If the answer is not among the counted messages, only what they add is known.
            if self.config.history_policy == "template" and (known or not ahead):
                held = self._reasoning_in(turn, before)
                for role, tool_result in (("user", False), ("tool", True)):
                    follows = any(message["role"] == role for message in new)
                    if follows and any(
                        self.template.rewrites_history(tool_result=tool_result, reasoning=kind) for kind in held
                    ):
                        raise UnprovenContinuationError(Reason("policy", detail=(role,)))
            stop = turn.generation.stop_token_id if turn.generation is not None else None
            return self.template.continuation(
                SampledTurn(turn.output_ids, stop, turn.tool_calls, turn.ends_in_reasoning),
                new,
                tools,
                has_system=has_system,
                had_tool_results=had_tool_results,
                # Strands counts conversations without their system prompt.
                history=(lambda: self._whole_chat(before)) if known and has_system == has_own_system else None,
            )

        # Answers, images and the policy "template" are rendered by their place in the conversation, too.
        values = None
        if not has_answer and self.images is None and self.config.history_policy == "append":
            values = exact_bytes([[message["role"], message["content"]] for message in messages])
        key = (turn, self.template, values, tools, has_system, had_tool_results)
        return self._counted_or(None if values is None else key, render, ahead)

    def _reasoning_in(self, turn: Turn, before: Messages) -> set[Reasoning]:
        """Return what the sequence up to a turn holds: sampled, or shown in a prompt, as of a restored history.

        Args:
            turn: The turn.
            before: The conversation with its answer.
        """
        path = turn.path()
        held: set[Reasoning] = {
            "empty" if earlier.answered and all(part.kind != "reasoning" for part in earlier.answered) else "text"
            for earlier in path
            if earlier.has_reasoning
        }
        if "text" not in held and self._shows_reasoning(path, before):
            held.add("text")
        return held or {"none"}

    def _shows_reasoning(self, path: Sequence[Turn], before: Messages) -> bool:
        """Whether a prompt of the path shows reasoning of the conversation."""
        blocks = (block.get("reasoningContent") or {} for block in blocks_of(before))
        thoughts = [encodable((block.get("reasoningText") or {}).get("text", "")).strip() for block in blocks]
        if not any(thoughts):
            return False
        prompts = "".join(self.template.decode(earlier.prompt_ids) for earlier in path)
        return any(thought in prompts for thought in thoughts if thought)

    def _opening(self, *, ahead: bool = False) -> Prompt:
        """Render the prompt of the whole conversation."""

        def render() -> Prompt:
            return self.template.opening(self._whole_chat(self.chat.messages), self._tools())

        # Tool calls and their results are shown as this trajectory recorded them.
        blocks = blocks_of(self.chat.messages)
        has_answer = any(message["role"] == "assistant" for message in self.chat.messages)
        if has_answer or self.images is not None or any("toolResult" in block for block in blocks):
            return render()
        exact = self.chat.conversation.exact
        if exact is None:
            return render()
        return self._counted_or((self.template, exact), lambda: self.template.shared_opening(exact, render), ahead)

    def _counted_or(self, key: Any, render: Callable[[], Prompt], ahead: bool) -> Prompt:
        """Render a prompt, or take the one that was just counted: Strands counts before every call.

        Args:
            key: Everything that the prompt depends on; None if it is always rendered.
            render: Renders it.
            ahead: Whether it is only counted, and kept for the call that sends it.
        """
        counted, self.trajectory.counted = self.trajectory.counted, None
        prompt: Prompt = counted[1] if counted is not None and key is not None and counted[0] == key else render()
        if ahead and key is not None:
            self.trajectory.counted = (key, prompt)
        return prompt

    def _tools(self, before: Turn | None = None) -> ChatTools | None:
        """Return the tools in the form of chat templates: those of an earlier turn if they are the same."""
        name = "tools"
        if before is not None and before.chat_tools is not None:
            if before.parts.get(name) == self.chat.conversation.parts.get(name):
                return before.chat_tools
        return to_chat_tools(self.chat.tool_specs)

    def _whole_chat(self, messages: Messages) -> list[ChatMessage]:
        system = self.chat.system
        return [*([] if system is None else [{"role": "system", "content": system}]), *self._chat(messages)]

    def _chat(self, messages: Messages, **context: Any) -> list[ChatMessage]:
        def as_shown(use_id: str, name: str, number: int) -> tuple[str, str]:
            recorded = self.trajectory.tool_calls.get(use_id, {})
            if name == INVALID_NAME:
                name = recorded.get("name") or self.names.get(use_id) or name
            return name, recorded.get("id") or self.template.call_id(use_id, name, number)

        return to_chat_messages(
            messages,
            result_notice=self.trajectory.result_notices.get,
            as_shown=as_shown,
            images=self.images is not None,
            **context,
        )


def is_long(*values: Any) -> bool:
    """Whether to encode messages in a thread: megabytes take a tokenizer seconds, without the interpreter's lock."""
    data = exact_bytes(values)
    return data is not None and len(data) >= LONG_BYTES


async def encoded(messages: Messages, encode: Callable[[], T]) -> T:
    """Call a function that encodes messages: in a thread if they are long, so that the event loop runs on.

    Args:
        messages: The messages.
        encode: Renders and encodes them.
    """
    # Not asyncio's own threads: those may all run tools.
    return await to_thread.run_sync(encode, abandon_on_cancel=True) if is_long(messages) else encode()


async def _expanded(images: ImageProcessor, prompt: Prompt) -> tuple[list[int], ImageInputs | None]:
    # Not asyncio's own threads: those may all run tools.
    ids, encoded, pictures = prompt.token_ids, prompt.encoded, prompt.pictures
    return await to_thread.run_sync(images.expand, ids, encoded, pictures, abandon_on_cancel=True)


def _count_calls(messages: Messages) -> int:
    return sum("toolUse" in block for block in blocks_of(messages))


# --- checking answers ---


def check_answer(
    generation: Generation,
    config: ModelConfig,
    prompt_tokens: int,
    new_tokens: int,
    *,
    parent: Generation | None = None,
) -> None:
    """Reject an answer that does not match the request.

    An aborted request may be answered in part; one that was aborted in the queue never ran.

    Args:
        generation: The server's answer.
        config: The model's configuration.
        prompt_tokens: Number of prompt tokens sent.
        new_tokens: Number of prompt tokens that the call added.
        parent: The answer that the prompt continues, if any.

    Raises:
        SGLangDecodingError: The prompt was truncated, or a requested part of the answer is missing or wrong.
    """
    aborted = generation.finish_type == "abort"
    if aborted and not generation.prompt_tokens:
        return
    if generation.prompt_tokens != prompt_tokens:
        raise SGLangDecodingError(
            f"the server answered a prompt of {generation.prompt_tokens} tokens, but {prompt_tokens} were sent; "
            "start the server without --allow-auto-truncate"
        )
    if config.return_routed_experts and not (aborted and generation.routed_experts is None):
        if generation.routed_experts is None:
            raise SGLangDecodingError(
                "routed experts were requested and not returned: the model has none, the server was started without "
                "--enable-return-routed-experts, or a router drops the request's field"
            )
        before, width = parent.routed_width if parent is not None else None, generation.routed_width
        if None not in (before, width) and before != width:
            raise SGLangDecodingError(
                f"the server returned {width} ids of routed experts per token, but {before} for the previous turn: the "
                f"rows do not match the {generation.routed_rows} tokens of prompt and answer without the last"
            )
        # SGLang stores the rows by slot of the key-value cache. Tokens restored from another tier get new slots, which
        # still hold the rows of other tokens (github.com/sgl-project/sglang/issues/26975, and the source of 0.5.23).
        tiers = generation.meta_info.get("cached_tokens_details") or {}
        restored = {tier: tiers[tier] for tier in ("host", "storage") if tiers.get(tier)}
        if restored:
            raise SGLangDecodingError(
                f"prompt tokens came from other tiers of the server's cache ({restored}), where SGLang keeps no routed "
                "experts, so theirs are wrong; start the server without --enable-hierarchical-cache"
            )
    asked_for_mask = config.request_fields.get("return_sampling_mask")
    if asked_for_mask and generation.output_ids and generation.sampling_mask is None and not aborted:
        raise SGLangDecodingError(
            "sampling masks were requested and not returned: the server is too old for them, or a router drops "
            "`return_sampling_mask`"
        )
    returned = len(generation.prompt_logprobs)
    if config.return_prompt_logprobs and returned < new_tokens and not aborted:
        raise SGLangDecodingError(
            f"logprobs of {new_tokens} prompt tokens were requested and {returned} returned; a proxy may drop "
            "`logprob_start_len`"
        )


def sampled_text(template: ChatTemplate, turn: Turn, generation: Generation, *, kept_stop: str | None = None) -> str:
    """Return the sampled text without the control token or stop string that ended it.

    Args:
        template: Decodes, and knows the control tokens.
        turn: Holds the sampling parameters.
        generation: The sampled tokens.
        kept_stop: Stop string that is part of the text, such as the end mark of a tool call.
    """
    text = template.decode(_answer_ids(template, generation))
    stop = generation.stop_string
    if stop is None or stop == kept_stop or turn.sampling_params.get("no_stop_trim"):
        return text
    return text.partition(stop)[0]


def _answer_ids(template: ChatTemplate, generation: Generation) -> list[int]:
    ids = generation.output_ids.tolist()
    stop = generation.stop_token_id
    return ids[:-1] if stop is not None and template.is_special(stop) else ids


def _with_ids(parsed: ParsedTurn, recorded: Turn) -> ParsedTurn:
    """Return a parsed answer whose tool calls have the ids of the recorded ones."""
    ids = [call["toolUseId"] for call in recorded.tool_calls]
    calls = [replace(call, id=use_id) for call, use_id in zip(parsed.tool_calls, ids, strict=False)]
    return replace(parsed, tool_calls=(*calls, *parsed.tool_calls[len(calls) :]))


def content_blocks(parsed: ParsedTurn) -> list[ContentBlock]:
    """Return the answer's content blocks, as the agent sees them."""
    blocks: list[ContentBlock] = []
    if parsed.reasoning:
        blocks.append({"reasoningContent": {"reasoningText": {"text": parsed.reasoning}}})
    if parsed.text:
        blocks.append({"text": parsed.text})
    for call in parsed.tool_calls:
        # As Strands hands it back. An input that is not JSON fails here, before it is recorded.
        tool_input = {} if call.is_error else json.loads(json.dumps(call.input))
        blocks.append({"toolUse": {"toolUseId": call.id, "name": shown_name(call), "input": tool_input}})
    return blocks


def shown_name(call: ToolParseResult) -> str:
    """Return the name that the agent sees: for a call that did not parse, a name that no tool has."""
    return ToolParseResult.UNKNOWN_NAME if call.is_error else call.name


def stop_reason(generation: Generation, parsed: ParsedTurn) -> str:
    """Return Strands' stop reason. A truncated answer never looks complete, with or without tool calls."""
    if generation.finish_type == "length":
        return "max_tokens"
    return "tool_use" if parsed.tool_calls else "end_turn"


def stream_events(blocks: list[ContentBlock], reason: str, generation: Generation) -> Iterator[StreamEvent]:
    """Yield an answer as Strands stream events: one delta per block, since each delta costs the agent's loop time."""
    yield {"messageStart": {"role": "assistant"}}
    for block in blocks:
        start: Any = {}
        if "toolUse" in block:
            use = block["toolUse"]
            start = {"toolUse": {"toolUseId": use["toolUseId"], "name": use["name"]}}
            delta: Any = {"toolUse": {"input": json.dumps(use["input"])}}
        elif "reasoningContent" in block:
            delta = {"reasoningContent": {"text": block["reasoningContent"]["reasoningText"]["text"]}}
        else:
            delta = {"text": block["text"]}
        yield {"contentBlockStart": {"start": start}}
        yield {"contentBlockDelta": {"delta": delta}}
        yield {"contentBlockStop": {}}
    yield {"messageStop": {"stopReason": cast(Any, reason)}}
    yield {
        "metadata": {
            "usage": {
                "inputTokens": generation.prompt_tokens,
                "outputTokens": generation.completion_tokens,
                "totalTokens": generation.prompt_tokens + generation.completion_tokens,
                "cacheReadInputTokens": generation.cached_tokens,
            },
            "metrics": {"latencyMs": round(generation.latency_s * 1000)},
        }
    }
