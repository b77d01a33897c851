"""What one request asks for beside its token ids, and whether its answer answers that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from strands.types.exceptions import ContextWindowOverflowException

from ..exceptions import SGLangDecodingError
from ..protocol.generation import Generation
from .config import ModelConfig


@dataclass(frozen=True)
class RequestPlan:
    """What a request asks for.

    Attributes:
        sampling_params: SGLang's sampling parameters.
        fields: Further top-level keys of `/generate`.
        clamped: Whether the context, not the caller, decided `max_new_tokens`.
        sampled: How many tokens of the answer are there already, from requests that the server aborted.
    """

    sampling_params: Mapping[str, Any]
    fields: Mapping[str, Any]
    clamped: bool
    sampled: int = 0

    @property
    def has_no_budget_left(self) -> bool:
        """Whether the answer is as long as it may be."""
        budget = self.sampling_params.get("max_new_tokens")
        return budget is not None and self.sampled >= budget

    def total_tokens(self, prompt_tokens: int) -> int | None:
        """Most tokens of prompt and answer; None where the request sets no limit."""
        most = self.sampling_params.get("max_new_tokens")
        return None if most is None else prompt_tokens + int(most)


def plan_request(
    config: ModelConfig,
    prompt_tokens: int,
    known_tokens: int,
    *,
    context_length: int | None,
    grammar: Mapping[str, Any] | None = None,
    sampled: int = 0,
) -> RequestPlan:
    """Plan a request.

    Args:
        config: The model's configuration.
        prompt_tokens: Length of the prompt.
        known_tokens: How many of its tokens an earlier request of the sequence has recorded already.
        context_length: Longest prompt plus answer, in tokens; None if the server does not tell.
        grammar: Sampling parameters that constrain the answer, e.g. `{"json_schema": ...}`; None takes out what is
            configured.
        sampled: How many tokens of the answer are there already.

    Raises:
        ContextWindowOverflowException: The context has no room for an answer, or for one of `min_new_tokens`.
    """
    grammar = grammar or {}
    configured = {name: value for name, value in config.sampling_params.items() if name not in grammar}
    sampling_params = {**configured, **{name: value for name, value in grammar.items() if value is not None}}
    asked = sampling_params.pop("max_new_tokens", None)
    limit = min((one for one in (config.max_context_tokens, context_length) if one is not None), default=None)
    room = None if limit is None else limit - prompt_tokens
    if room is not None and room <= 0:
        raise ContextWindowOverflowException(
            f"the prompt has {prompt_tokens} tokens and the model's context {limit}: no room is left for an answer"
        )
    least = sampling_params.get("min_new_tokens") or 0
    if room is not None and room < least:  # sent as it is, the server would call it a wrong parameter
        raise ContextWindowOverflowException(
            f"the prompt has {prompt_tokens} tokens and the model's context {limit}: an answer of at least {least} "
            "tokens (min_new_tokens) does not fit"
        )
    limits = [limit for limit in (asked, room) if limit is not None]
    if limits:
        sampling_params["max_new_tokens"] = min(limits)
    fields: dict[str, Any] = {**config.request_fields, "return_logprob": config.wants_logprobs}
    if config.return_prompt_logprobs:
        # The first entry that the server returns is always null, so ask from one token earlier.
        fields["logprob_start_len"] = max(known_tokens - 1, 0)
    if config.return_routed_experts:
        fields["return_routed_experts"] = True
    clamped = room is not None and (asked is None or asked > room)
    return RequestPlan(sampling_params, fields, clamped, sampled)


def check_answer(
    generation: Generation,
    config: ModelConfig,
    prompt_tokens: int,
    new_tokens: int,
    *,
    parent: Generation | None = None,
) -> None:
    """Refuse an answer to something else than what was asked.

    An aborted request may have been answered in part, and one that was aborted in the queue never ran.

    Args:
        generation: What the server returned.
        config: The model's configuration.
        prompt_tokens: Length of the prompt that was sent.
        new_tokens: How many of its tokens the call added.
        parent: The answer that the prompt goes on from, if there is one.

    Raises:
        SGLangDecodingError: The prompt was cut, or something that was asked for did not come back, or not as asked.
    """
    aborted = generation.finish_type == "abort"
    if aborted and not generation.prompt_tokens:
        return
    if generation.prompt_tokens != prompt_tokens:
        raise SGLangDecodingError(
            f"the server answered a prompt of {generation.prompt_tokens} tokens, but {prompt_tokens} were sent; "
            "a server started with --allow-auto-truncate does this: start it without"
        )
    if config.return_routed_experts and not (aborted and generation.routed_experts is None):
        _check_routed_experts(generation, parent)
    asked_for_mask = config.request_fields.get("return_sampling_mask")
    if asked_for_mask and generation.output_ids and generation.sampling_mask is None and not aborted:
        raise SGLangDecodingError(
            "sampling masks were asked for and not returned: the server is older than they are, or a router drops "
            "`return_sampling_mask`"
        )
    returned = len(generation.prompt_logprobs)
    if config.return_prompt_logprobs and returned < new_tokens and not aborted:
        raise SGLangDecodingError(
            f"logprobs of {new_tokens} prompt tokens were asked for and {returned} returned; a proxy that drops "
            "`logprob_start_len` does this"
        )


def check_stop(generation: Generation, asked: Collection[str], decode: Callable[[list[int]], str]) -> None:
    """Refuse an answer that stopped at a text which was neither asked for nor sampled.

    SGLang ends a request so when its model fails: with logits that are no numbers it puts a stop token in the place of
    what was sampled and calls the end "NaN happened".

    Args:
        generation: What the server returned.
        asked: The stop strings and patterns of the request.
        decode: The text of token ids. A server may have stop strings of its own, which are in the text then.

    Raises:
        SGLangDecodingError: It did.
    """
    stop = generation.stop_string
    if stop is None or stop in asked or stop in decode(generation.output_ids.tolist()):
        return
    raise SGLangDecodingError(
        f"the server ended the answer with {stop!r}, which is no stop string of the request and not in the answer: its "
        "model has failed, or something on the way has changed the answer"
    )


def _check_routed_experts(generation: Generation, parent: Generation | None) -> None:
    if generation.routed_experts is None:
        raise SGLangDecodingError(
            "routed experts were asked for and not returned: the model has none, the server was started without "
            "--enable-return-routed-experts, or a router drops the request's key"
        )
    before, width = parent.routed_width if parent is not None else None, generation.routed_width
    if None not in (before, width) and before != width:
        raise SGLangDecodingError(
            f"the server returned {width} ids of routed experts per token and {before} for the turn before: the number "
            f"of rows is not that of the {generation.routed_rows} tokens of prompt and answer without the last"
        )
    # SGLang keeps the rows by the places of the key-value cache. What comes back from another tier gets new places,
    # where the rows of others still stand (github.com/sgl-project/sglang/issues/26975; so in 0.5.23, by its source).
    tiers = generation.meta_info.get("cached_tokens_details") or {}
    restored = {tier: tiers[tier] for tier in ("host", "storage") if tiers.get(tier)}
    if restored:
        raise SGLangDecodingError(
            f"prompt tokens came from other tiers of the server's cache ({restored}), and SGLang does not keep routed "
            "experts there: those of such tokens are wrong; start the server without --enable-hierarchical-cache"
        )
