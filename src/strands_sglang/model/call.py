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

from strands.types.content import ContentBlock, Message, Messages
from strands.types.tools import ToolSpec

from ..client.cancellation import Cancellation
from ..client.client import SGLangClient
from ..exceptions import SGLangAbortedError, SGLangCancelledError
from ..messages import Conversation
from ..protocol.generation import Generation
from ..templates.chat_template import ChatTemplate, Prompt
from ..templates.images import ImageInputs, ImageProcessor, require_image_understanding
from ..tool_choice import GRAMMAR_PARAMETERS
from ..tool_parsers import ParsedTurn, ToolParser
from ..trajectory import Caller as Asking
from ..trajectory import ParsedAnswer
from ..trajectory.trajectory import Trajectory
from ..trajectory.turn import Turn
from .events import content_blocks, parse_answer, shown_name
from .prompts import counted_prompt, next_prompt
from .sampling import TurnRequests

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
        asking: Asking,
        names: Mapping[str, str] | None = None,
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
            asking: Who asks.
            names: What the agent keeps of the names that the model wrote; see `next_prompt`.
            cancel_signal: Ends the call once it is set.

        Raises:
            ContextWindowOverflowException: The context has no room for the prompt.
            SGLangAbortedError: The server aborted the request; what it had sampled is recorded as a cut turn.
            SGLangCancelledError: The signal was set; what had been sampled is recorded as a cut turn.
            SGLangDeadlineError: The client's deadline has passed; recorded likewise.
            SGLangClientError: The server or the network failed after all retries.
            ModelThrottledException: The server is too busy and the client was told not to retry.
            UnsupportedContentError: A message holds content that cannot be rendered.
        """
        if cancel_signal is not None and cancel_signal.is_set():
            raise SGLangCancelledError("the call was cancelled by its signal before it was made")
        template, config = self.template, self.config
        waiting = Cancellation(deadline=self.client.deadline, signal=cancel_signal)
        place = trajectory.attach(conversation, messages, asking)
        place, prompt = next_prompt(
            template,
            trajectory,
            place,
            messages,
            tool_specs,
            system,
            keep_history=config.get("history_policy") != "template",
            images=self.images,
            names=names,
        )
        new_ids, images = await self._expand(prompt, waiting)
        given = config.get("sampling_params") or {}
        constraint = grammar(prompt, given)
        turn = trajectory.ask(
            place,
            conversation,
            new_ids,
            asking,
            reasoning_open=prompt.ends_with(self.parser.think_start_token),
            constrained=constraint is not None or any(given.get(name) is not None for name in GRAMMAR_PARAMETERS),
            images=images,
        )
        logger.debug("call=<%d>, reason=<%s> | asking the model", turn.index, turn.reason)
        requests = TurnRequests(
            self.client,
            template,
            self.images,
            config,
            turn,
            constraint,
            routing_key=config.get("routing_key") or trajectory.routing_key(turn),
            waiting=waiting,
        )
        try:
            generation = await requests.answer()
        except BaseException as error:  # also CancelledError: the turn must not stay "asked"
            sampled = requests.sampled()
            if sampled is None:
                trajectory.fail(turn, error)
            else:
                trajectory.cut(turn, sampled, error)
            raise
        if generation.finish_type == "abort":
            count = generation.completion_tokens
            message = (
                f"the client was closed while the request ran, which aborted it after {count} tokens"
                if requests.client_closed
                else f"the server aborted the request after {count} tokens: {generation.abort_message}; this happens "
                "at weight updates and pauses"
            )
            abort = SGLangAbortedError(message, response=requests.response)
            trajectory.cut(turn, generation, abort)
            raise abort
        return turn, generation

    async def count(
        self,
        trajectory: Trajectory,
        conversation: Conversation,
        messages: Messages,
        tool_specs: list[ToolSpec] | None,
        system: str | None,
        *,
        is_part: bool,
    ) -> int:
        """How many tokens messages have in front of the model; see `counted_prompt`.

        Args:
            trajectory: What is recorded; it is read only.
            conversation: The messages, as fingerprints.
            messages: They.
            tool_specs: Their tools.
            system: Their system prompt.
            is_part: Whether others may stand before them.

        Raises:
            Exception: There is no such prompt.
        """
        known, prompt = counted_prompt(
            self.template,
            trajectory,
            conversation,
            messages,
            tool_specs,
            system,
            is_part=is_part,
            keep_history=self.config.get("history_policy") != "template",
            images=self.images,
        )
        if prompt is None or not prompt.pictures or self.images is None:
            return known + (0 if prompt is None else len(prompt.token_ids))
        expanded, _ = await asyncio.to_thread(self.images.expand, prompt.token_ids, prompt.text, prompt.pictures)
        return known + len(expanded)

    def record(
        self, trajectory: Trajectory, turn: Turn, generation: Generation, tool_specs: list[ToolSpec] | None
    ) -> tuple[ParsedTurn, list[ContentBlock]]:
        """Take an answer apart and record it; one that cannot be read is kept as a cut turn.

        Args:
            trajectory: Where it is recorded.
            turn: What was asked.
            generation: The answer.
            tool_specs: The tools that the model may call.

        Returns:
            Its reasoning, text and tool calls, and the same as the agent gets them.
        """
        with kept_if_unreadable(trajectory, turn, generation):
            parsed = parse_answer(self.parser, self.template, turn, generation, tool_specs)
            blocks = content_blocks(parsed)
            trajectory.answer(
                turn,
                generation,
                Message(role="assistant", content=blocks),
                ParsedAnswer(
                    tool_calls=[
                        {
                            "toolUseId": call.id,
                            "name": shown_name(call),
                            "id": call.native_id or self.template.call_id(call.id, shown_name(call), number),
                        }
                        for number, call in enumerate(parsed.tool_calls, turn.calls_before)
                    ],
                    result_notices={
                        call.id: self.parser.render_error(call) for call in parsed.tool_calls if call.is_error
                    },
                    parse_errors=[call.attempted_name or call.name for call in parsed.tool_calls if call.is_error],
                    ends_in_reasoning=parsed.ends_in_reasoning,
                    has_reasoning=parsed.reasoning is not None,
                ),
            )
        return parsed, blocks

    async def _expand(self, prompt: Prompt, waiting: Cancellation) -> tuple[list[int], ImageInputs | None]:
        """The prompt tokens with images in place of their placeholders, and the images."""
        if self.images is None or not prompt.pictures:
            return prompt.token_ids, None
        await waiting.finish(require_image_understanding(self.client, prompt.pictures[0]))
        return await asyncio.to_thread(self.images.expand, prompt.token_ids, prompt.encoded, prompt.pictures)


@contextmanager
def kept_if_unreadable(trajectory: Trajectory, turn: Turn, generation: Generation) -> Iterator[None]:
    """If what runs inside raises, as a parser may, the sampled tokens are kept as a cut turn."""
    try:
        yield
    except Exception as error:
        trajectory.cut(turn, generation, error)
        raise
