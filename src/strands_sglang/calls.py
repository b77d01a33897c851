"""One model call: from a conversation to a recorded turn with the tokens that the server sampled for it.

The steps are those of docs/architecture.md: attach, prompt, ask, request, checks. Whatever raises on the way leaves the
turn failed, or cut if something was sampled.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from strands.types.content import Messages
from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException
from strands.types.tools import ToolSpec

from .chat_template import ChatTemplate, Prompt
from .client import SGLangClient
from .exceptions import (
    SGLangAbortedError,
    SGLangCancelledError,
    SGLangContextLengthError,
    SGLangDecodingError,
    SGLangThrottledError,
)
from .generation import Generation, read_generation
from .images import ImageInputs, ImageProcessor, check_prompt, require_image_understanding
from .messages import Conversation
from .prompts import next_prompt
from .request import check_answer, plan_request, wants_logprobs
from .server_check import check_server, known_facts
from .tool_parsers import ToolParser
from .trajectory import Trajectory
from .turns import Turn
from .waiting import unless_signalled

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Caller:
    """What a call works with.

    Attributes:
        client: Sends the request.
        template: Makes prompt tokens.
        parser: Knows the mark that opens reasoning.
        images: Expands placeholders; None for a model that takes no images.
        config: The model's configuration.
    """

    client: SGLangClient
    template: ChatTemplate
    parser: ToolParser
    images: ImageProcessor | None
    config: Mapping[str, Any]

    async def generate(
        self,
        trajectory: Trajectory,
        conversation: Conversation,
        messages: Messages,
        tool_specs: list[ToolSpec] | None,
        system: str | None,
        *,
        grammar: Callable[[Prompt, Mapping[str, Any]], Mapping[str, Any] | None],
        agent: str | None = None,
        cycle: str | None = None,
        auxiliary: bool = False,
        cancel_signal: threading.Event | None = None,
    ) -> tuple[Turn, Generation]:
        """Attach a call, ask the server, and return the turn with a complete answer that is yet to be recorded.

        Args:
            trajectory: Where it is recorded.
            conversation: What it asks, as fingerprints.
            messages: The same as messages.
            tool_specs: The tools that the model may call.
            system: The system prompt.
            grammar: Given the prompt and the configured sampling parameters, those that constrain the answer.
            agent: Who asks.
            cycle: The turn of the agent's loop that it asks in.
            auxiliary: Whether the call is none of a rollout's own.
            cancel_signal: Ends the call once it is set.

        Raises:
            ContextWindowOverflowException: The context has no room for the prompt.
            SGLangAbortedError: The server aborted the request; what it had sampled is recorded as a cut turn.
            SGLangCancelledError: The signal was set; what had been sampled is recorded as a cut turn.
            SGLangClientError: The server or the network failed after all retries.
            ModelThrottledException: The server is too busy and the client was told not to retry.
            UnsupportedContentError: A message holds content that cannot be rendered.
        """
        if cancel_signal is not None and cancel_signal.is_set():
            raise SGLangCancelledError("the call was cancelled by its signal before it was made")
        template, config = self.template, self.config
        place = trajectory.attach(conversation, messages, agent=agent)
        place, prompt = next_prompt(
            template,
            trajectory,
            place,
            messages,
            tool_specs,
            system,
            keep_history=config.get("history_policy") != "template",
            images=self.images,
        )
        new_ids, images = await self._expand(prompt)
        constraint = grammar(prompt, config.get("sampling_params") or {})
        known_ids = place.token_ids()
        turn = trajectory.ask(
            place,
            conversation,
            new_ids,
            reasoning_open=prompt.ends_with(self.parser.think_start_token),
            constrained=constraint is not None,
            agent=agent,
            cycle=cycle,
            auxiliary=auxiliary,
            images=images,
        )
        logger.debug("call=<%d>, reason=<%s> | asking the model", turn.index, turn.reason)
        partial: list[dict[str, Any]] = []
        try:
            response = await self._request(
                turn,
                [*known_ids, *new_ids],
                len(known_ids),
                constraint,
                routing_key=config.get("routing_key") or trajectory.routing_key(turn),
                cancel_signal=cancel_signal,
                on_partial=partial.append,
            )
            generation = read_generation(
                response, logprobs_expected=wants_logprobs(config), end_token_ids=template.stop_ids
            )
            check_answer(
                generation,
                config,
                len(known_ids) + len(new_ids),
                len(new_ids),
                parent=place.turn.generation if place.turn is not None else None,
            )
        except BaseException as error:  # also CancelledError: the turn must not stay "asked"
            self._record_end(trajectory, turn, partial, error)
            raise
        if generation.finish_type == "abort":
            abort = SGLangAbortedError(
                f"the server aborted the request after {generation.completion_tokens} tokens: "
                f"{generation.abort_message}; this happens at weight updates and pauses",
                response=response,
            )
            trajectory.cut(turn, generation, abort)
            raise abort
        return turn, generation

    def _record_end(
        self, trajectory: Trajectory, turn: Turn, partial: list[dict[str, Any]], error: BaseException
    ) -> None:
        """Record a turn without an answer; what was sampled for it before it ended is kept as a cut turn."""
        for response in partial:
            try:
                generation = read_generation(
                    response, logprobs_expected=wants_logprobs(self.config), end_token_ids=self.template.stop_ids
                )
            except SGLangDecodingError as unreadable:
                logger.warning("call=<%d>, error=<%s> | a partial answer is not readable", turn.index, unreadable)
            else:
                trajectory.cut(turn, generation, error)
                return
        trajectory.fail(turn, error)

    async def _expand(self, prompt: Prompt) -> tuple[list[int], ImageInputs | None]:
        """The prompt tokens with images in place of their placeholders, and the images."""
        if self.images is None or not prompt.pictures:
            return prompt.token_ids, None
        await require_image_understanding(self.client, prompt.pictures[0])
        return await asyncio.to_thread(self.images.expand, prompt.token_ids, prompt.text, prompt.pictures)

    async def _request(
        self,
        turn: Turn,
        input_ids: list[int],
        known: int,
        grammar: Mapping[str, Any] | None,
        *,
        routing_key: str,
        cancel_signal: threading.Event | None,
        on_partial: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        """Send one request and return the server's response."""
        server = known_facts(self.client, self.template)
        if server is None:
            server = await unless_signalled(check_server(self.client, self.template), cancel_signal)
        request = plan_request(
            self.config, len(input_ids), known, context_length=server.context_length, grammar=grammar
        )
        turn.sampling_params, turn.clamped = request.sampling_params, request.clamped
        vocab_size = max(
            len(self.template.tokenizer), max(input_ids[:known], default=0) + 1
        )  # sampled ids may be padding ids
        sent_ids, fields = input_ids, request.fields
        images = turn.image_inputs()
        if self.images is not None and images:
            sent_ids = turn.sent_ids()
            fields = {**fields, **self.images.request_fields(sent_ids, images)}
        try:
            response = await self.client.generate(
                sent_ids,
                request.sampling_params,
                vocab_size=vocab_size,
                routing_key=routing_key,
                cancel_signal=cancel_signal,
                on_partial=on_partial,
                **fields,
            )
        except SGLangContextLengthError as error:
            raise ContextWindowOverflowException(str(error)) from error
        except SGLangThrottledError as error:
            if self.client.max_retries == 0:
                raise ModelThrottledException(str(error)) from error
            raise
        if images:
            check_prompt(response, input_ids)
        return response


@contextmanager
def kept_if_unreadable(trajectory: Trajectory, turn: Turn, generation: Generation) -> Iterator[None]:
    """If what runs inside raises, as a parser may, the sampled tokens are kept as a cut turn."""
    try:
        yield
    except Exception as error:
        trajectory.cut(turn, generation, error)
        raise
