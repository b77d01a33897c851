"""The requests of one turn to the server: usually one, and more where the server aborted it and the call goes on.

Promise: whatever ends the call, what the server had sampled for it until then can be had from `sampled()`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException

from .chat_template import ChatTemplate
from .client import SGLangClient
from .exceptions import SGLangContextLengthError, SGLangDecodingError, SGLangThrottledError
from .generation import Generation, read_generation
from .images import ImageProcessor, check_prompt
from .request import RequestPlan, check_answer, plan_request, wants_logprobs
from .resumption import join_parts, sampling_params_of_the_rest
from .server_check import check_server, known_facts
from .turns import Turn
from .waiting import unless_signalled

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 8.0


@dataclass
class TurnRequests:
    """Asks the server for one turn.

    Attributes:
        client: Sends the requests.
        template: Knows the tokens that end a turn.
        images: Expands placeholders; None for a model that takes no images.
        config: The model's configuration.
        turn: What is asked; gets the sampling parameters that were sent.
        input_ids: The turn's prompt with all that stands before it, shape (T,).
        known: How many of these tokens an earlier turn has recorded.
        grammar: Sampling parameters that constrain the answer; None for a free one.
        routing_key: Says which server has the prefix.
        cancel_signal: Ends the call once it is set.
        parts: What was sampled so far, in the order of the requests.
        response: The server's latest response.
    """

    client: SGLangClient
    template: ChatTemplate
    images: ImageProcessor | None
    config: Mapping[str, Any]
    turn: Turn
    input_ids: list[int]
    known: int
    grammar: Mapping[str, Any] | None
    routing_key: str
    cancel_signal: threading.Event | None = None
    parts: list[Generation] = field(default_factory=list)
    response: dict[str, Any] | None = None
    _partial: dict[str, Any] | None = None

    async def answer(self) -> Generation:
        """The server's answer, in one part or joined from several; its finish reason may still be "abort".

        Raises:
            ContextWindowOverflowException: The context has no room for the prompt.
            SGLangClientError: The server or the network failed after all retries.
            ModelThrottledException: The server is too busy and the client was told not to retry.
        """
        client, started = self.client, time.monotonic()
        server = known_facts(client, self.template)
        if server is None:
            server = await unless_signalled(check_server(client, self.template), self.cancel_signal)
        plan = plan_request(
            self.config, len(self.input_ids), self.known, context_length=server.context_length, grammar=self.grammar
        )
        self.turn.sampling_params, self.turn.clamped = plan.sampling_params, plan.clamped
        if self.turn.resumes is not None:
            self.parts.append(self.turn.resumes)
            if self._has_no_budget_left(plan):
                return self._ended_by_length()
        closings, in_vain = client.closings, 0
        while True:
            deadline = None if client.deadline is None else max(client.deadline + started - time.monotonic(), 0.001)
            part = self._read(await self._send(plan, deadline))
            self._check(part)
            self.parts.append(part)
            answer = join_parts(self.parts)
            in_vain = 0 if part.output_ids else in_vain + 1
            if part.finish_type != "abort" or not self._goes_on(closings, in_vain):
                return answer
            if self.grammar is not None:
                self.parts.clear()  # a grammar begins at the first token; nobody trains on what it forced
            elif self._has_no_budget_left(plan):
                return self._ended_by_length()
            logger.debug("call=<%d>, tokens=<%d> | aborted, going on", self.turn.index, answer.completion_tokens)
            if in_vain:
                pause = min(client.retry_delay * 2 ** (in_vain - 1), _LONGEST_PAUSE_S)
                await unless_signalled(asyncio.sleep(pause), self.cancel_signal)

    def sampled(self) -> Generation | None:
        """What was sampled until the call failed; None if nothing was and no server told of the request."""
        parts = list(self.parts)
        if self._partial is not None:
            try:
                parts.append(self._read(self._partial))
            except SGLangDecodingError as error:
                logger.warning("call=<%d>, error=<%s> | a partial answer is not readable", self.turn.index, error)
        return join_parts(parts) if parts else None

    def _has_no_budget_left(self, plan: RequestPlan) -> bool:
        budget = plan.sampling_params.get("max_new_tokens")
        return budget is not None and sum(part.completion_tokens for part in self.parts) >= budget

    def _ended_by_length(self) -> Generation:
        return replace(join_parts(self.parts), finish_type="length", abort_message=None)

    def _goes_on(self, closings: int, in_vain: int) -> bool:
        """Whether the call goes on after an abort."""
        client = self.client
        wanted = self.config.get("on_abort") == "resume" and client.closings == closings
        return wanted and in_vain <= client.max_retries

    def _check(self, part: Generation) -> None:
        """Refuse what is no answer to what was asked."""
        if self.parts and not part.output_ids and part.finish_type == "length":
            return  # it adds nothing: whoever gives out the budget had none left
        before = self.parts[-1] if self.parts else self.turn.parent.generation if self.turn.parent else None
        prompt_tokens = len(self.input_ids) + sum(earlier.completion_tokens for earlier in self.parts)
        check_answer(part, self.config, prompt_tokens, prompt_tokens - self.known, parent=before)

    def _read(self, response: Mapping[str, Any]) -> Generation:
        return read_generation(
            response, logprobs_expected=wants_logprobs(self.config), end_token_ids=self.template.stop_ids
        )

    async def _send(self, plan: RequestPlan, deadline: float | None) -> dict[str, Any]:
        """Send the next request and return the server's response."""
        so_far = [token_id for part in self.parts for token_id in part.output_ids]
        ids = [*self.input_ids, *so_far]
        vocab_size = max(  # sampled ids may be padding ids
            len(self.template.tokenizer), max(ids[: self.known], default=0) + 1, max(so_far, default=0) + 1
        )
        sent_ids, fields = ids, plan.fields
        images = self.turn.image_inputs()
        if self.images is not None and images:
            sent_ids = [*self.turn.sent_ids(), *so_far]
            fields = {**fields, **self.images.request_fields(sent_ids, images)}

        def keep(response: dict[str, Any]) -> None:
            self._partial = response

        try:
            self.response = await self.client.generate(
                sent_ids,
                sampling_params_of_the_rest(plan.sampling_params, len(so_far)),
                vocab_size=vocab_size,
                routing_key=self.routing_key,
                cancel_signal=self.cancel_signal,
                on_partial=keep,
                deadline=deadline,
                **fields,
            )
        except SGLangContextLengthError as error:
            raise ContextWindowOverflowException(str(error)) from error
        except SGLangThrottledError as error:
            if self.client.max_retries == 0:
                raise ModelThrottledException(str(error)) from error
            raise
        if images:
            check_prompt(self.response, ids)
        return self.response
