"""What one request asks for beside its token ids: sampling parameters that fit the context, and what to return."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strands.types.exceptions import ContextWindowOverflowException

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestPlan:
    """What a request asks for.

    Attributes:
        sampling_params: SGLang's sampling parameters.
        fields: Further top-level keys of `/generate`.
        clamped: Whether the context, not the caller, decided `max_new_tokens`.
    """

    sampling_params: dict[str, Any]
    fields: dict[str, Any]
    clamped: bool


def wants_logprobs(config: Mapping[str, Any]) -> bool:
    """Whether the logprobs of sampled tokens are to be recorded."""
    return config.get("return_logprob") is not False


def plan_request(
    config: Mapping[str, Any],
    prompt_tokens: int,
    known_tokens: int,
    *,
    context_length: int | None,
    grammar: Mapping[str, Any] | None = None,
) -> RequestPlan:
    """Plan a request.

    Args:
        config: The model's configuration.
        prompt_tokens: Length of the prompt.
        known_tokens: How many of its tokens an earlier request of the sequence has recorded already.
        context_length: Longest prompt plus answer, in tokens; None if the server does not tell.
        grammar: Sampling parameters that constrain the answer, e.g. `{"json_schema": ...}`.

    Raises:
        ContextWindowOverflowException: The context has no room for a single new token.
    """
    sampling_params = {**(config.get("sampling_params") or {}), **(grammar or {})}
    asked = sampling_params.pop("max_new_tokens", None)
    limit = config.get("context_window_limit") or context_length
    room = None if limit is None else limit - prompt_tokens
    if room is not None and room <= 0:
        raise ContextWindowOverflowException(
            f"the prompt has {prompt_tokens} tokens and the model's context {limit}: no room is left for an answer"
        )
    if asked is None and room is None:
        logger.warning(
            "context_length=<unknown> | the server does not tell its context length, so its default of 128 new tokens "
            "holds; set max_new_tokens in sampling_params, or context_window_limit"
        )
    limits = [limit for limit in (asked, room) if limit is not None]
    if limits:
        sampling_params["max_new_tokens"] = min(limits)
    fields: dict[str, Any] = {"return_logprob": wants_logprobs(config)}
    if config.get("return_prompt_logprobs"):
        # The first entry that the server returns is always null, so ask from one token earlier.
        fields.update(return_logprob=True, logprob_start_len=max(known_tokens - 1, 0))
    if config.get("return_routed_experts"):
        fields["return_routed_experts"] = True
    clamped = room is not None and (asked is None or asked > room)
    return RequestPlan(sampling_params, fields, clamped)
