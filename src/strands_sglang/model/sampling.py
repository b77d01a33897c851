"""The requests of one turn to the server: usually one, and more where the server aborted it and the call goes on.

Promise: whatever ends the call, what the server had sampled for it until then can be had from `sampled()`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException

from ..client.cancellation import Cancellation
from ..client.client import SGLangClient
from ..exceptions import SGLangContextLengthError, SGLangDecodingError, SGLangThrottledError
from ..protocol.generation import Generation, read_generation
from ..protocol.resume import (
    begun_stop_strings,
    join_parts,
    sampling_params_of_the_rest,
    stop_patterns,
    stop_strings,
)
from ..templates.chat_template import ChatTemplate
from ..templates.images import ImageProcessor, check_prompt
from ..trajectory.turn import Turn
from .request import RequestPlan, check_answer, check_stop, plan_request, wants_logprobs
from .server_check import ServerFacts, check_server, known_facts, reserve_last_token

logger = logging.getLogger(__name__)


@dataclass
class TurnRequests:
    """Asks the server for one turn.

    Attributes:
        client: Sends the requests.
        template: Knows the tokens that end a turn.
        images: Expands placeholders; None for a model that takes no images.
        config: The model's configuration.
        turn: What is asked; gets the sampling parameters that were sent.
        grammar: Sampling parameters that constrain the answer; None for a free one.
        routing_key: Says which server has the prefix.
        waiting: Knows when the call is to end.
        input_ids: The turn's prompt with all that stands before it, shape (T,).
        known: How many of these tokens an earlier turn has recorded.
        parts: What was sampled so far, in the order of the requests.
        response: The server's latest response.
        client_closed: Whether the client was closed while the call ran, which aborts it.
    """

    client: SGLangClient
    template: ChatTemplate
    images: ImageProcessor | None
    config: Mapping[str, Any]
    turn: Turn
    grammar: Mapping[str, Any] | None
    routing_key: str
    waiting: Cancellation
    input_ids: list[int] = field(init=False)
    known: int = field(init=False)
    parts: list[Generation] = field(default_factory=list)
    response: dict[str, Any] | None = None
    client_closed: bool = False
    _partial: dict[str, Any] | None = None
    _begun: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Look up what stands before the answer."""
        self.input_ids = self.turn.token_ids()
        self.known = len(self.input_ids) - len(self.turn.prompt_ids)

    async def answer(self) -> Generation:
        """The server's answer, in one part or joined from several; its finish reason may still be "abort".

        Raises:
            ContextWindowOverflowException: The context has no room for the prompt.
            SGLangClientError: The server or the network failed after all retries.
            ModelThrottledException: The server is too busy and the client was told not to retry.
        """
        client = self.client
        server = known_facts(client, self.template)
        if server is None:
            server = await self.waiting.finish(check_server(client, self.template))
        plan = self._plan(server)
        if self.turn.resumes is not None:
            self.parts.append(self.turn.resumes)
            if self._has_no_budget_left(plan):
                return self._ended_by_length()
        closings, in_vain = client.closings, 0
        while True:
            try:
                response = await self._send(plan)
            except ContextWindowOverflowException:
                if plan.total_tokens(len(self.input_ids)) != server.context_length:
                    raise
                reserve_last_token(client)
                planned_with, server = server, await check_server(client, self.template)
                if server == planned_with:  # the token was reserved already
                    raise
                plan = self._plan(server)
                continue
            part = self._read(response)
            self._check(part)
            self.parts.append(part)
            answer = self._named_by_its_stop(join_parts(self.parts), plan)
            in_vain = 0 if part.output_ids else in_vain + 1
            self.client_closed = client.closings != closings
            if answer.stop_string not in self._begun and (part.finish_type != "abort" or not self._may_go_on(in_vain)):
                return answer
            if self.turn.constrained:
                self.parts.clear()  # a grammar begins at the first token; nobody trains on what it forced
            elif self._has_no_budget_left(plan):
                return self._ended_by_length()
            logger.debug("call=<%d>, tokens=<%d> | aborted, going on", self.turn.index, answer.completion_tokens)
            if in_vain:
                await self.waiting.finish(asyncio.sleep(client.retry_policy.delay(in_vain - 1)))
                self.client_closed = client.closings != closings
                if self.client_closed:
                    return answer

    def _plan(self, server: ServerFacts) -> RequestPlan:
        """What is asked of the server, as is noted in the turn."""
        plan = plan_request(
            self.config, len(self.input_ids), self.known, context_length=server.context_length, grammar=self.grammar
        )
        self.turn.sampling_params, self.turn.clamped = plan.sampling_params, plan.clamped
        self.turn.request_fields = plan.given_fields
        return plan

    def sampled(self) -> Generation | None:
        """What was sampled until the call failed; None if nothing was and no server told of the request."""
        parts = list(self.parts)
        if self._partial is not None:
            try:
                parts.append(self._read(self._partial))
            except SGLangDecodingError as error:
                logger.warning("call=<%d>, error=<%s> | a partial answer is not readable", self.turn.index, error)
        try:
            return join_parts(parts) if parts else None
        except SGLangDecodingError as error:  # must not take the place of what has ended the call
            logger.warning("call=<%d>, error=<%s> | kept without routed experts", self.turn.index, error)
            return join_parts([replace(part, routed_experts=None) for part in parts])

    def _named_by_its_stop(self, answer: Generation, plan: RequestPlan) -> Generation:
        """The answer; if it ended with the rest of a stop string that an earlier part began, with all of that."""
        if answer.stop_string not in self._begun:
            return answer
        text = self.template.decode(answer.output_ids)
        whole = next((stop for stop in stop_strings(plan.sampling_params) if stop in text), answer.stop_string)
        return replace(answer, stop_string=whole)

    def _has_no_budget_left(self, plan: RequestPlan) -> bool:
        budget = plan.sampling_params.get("max_new_tokens")
        return budget is not None and sum(part.completion_tokens for part in self.parts) >= budget

    def _ended_by_length(self) -> Generation:
        return replace(join_parts(self.parts), finish_type="length", abort_message=None)

    def _may_go_on(self, in_vain: int) -> bool:
        """Whether the call goes on after an abort."""
        wanted = self.config.get("on_abort") == "resume" and not self.client_closed
        return wanted and in_vain <= self.client.max_retries

    def _check(self, part: Generation) -> None:
        """Refuse what is no answer to what was asked."""
        if self.parts and not part.output_ids and part.finish_type == "length":
            return  # it adds nothing: whoever gives out the budget had none left
        before = self.parts[-1] if self.parts else self.turn.parent.generation if self.turn.parent else None
        prompt_tokens = len(self.input_ids) + sum(earlier.completion_tokens for earlier in self.parts)
        check_answer(part, self.config, prompt_tokens, prompt_tokens - self.known, parent=before)

    def _read(self, response: Mapping[str, Any]) -> Generation:
        generation = read_generation(
            response, logprobs_expected=wants_logprobs(self.config), end_token_ids=self.template.stop_ids
        )
        sent = self.turn.sampling_params
        check_stop(generation, {*stop_strings(sent), *stop_patterns(sent), *self._begun}, self.template.decode)
        return generation

    async def _send(self, plan: RequestPlan) -> dict[str, Any]:
        """Send the next request and return the server's response."""
        so_far = [token_id for part in self.parts for token_id in part.output_ids]
        ids = [*self.input_ids, *so_far]
        stops = stop_strings(plan.sampling_params)
        self._begun = begun_stop_strings(stops, self.template.decode(so_far)) if so_far and stops else []
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
                sampling_params_of_the_rest(plan.sampling_params, len(so_far), self._begun),
                vocab_size=vocab_size,
                routing_key=self.routing_key,
                cancel_signal=self.waiting,
                on_partial=keep,
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
