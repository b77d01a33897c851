"""What one request asks for beside its token ids, and whether its answer answers that."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from strands.types.exceptions import ContextWindowOverflowException

from ..client.client import checked_routing_key
from ..exceptions import SGLangDecodingError
from ..json_values import plain
from ..protocol.generation import Generation
from ..request_fields import REQUEST_FIELDS, check_sampling_mask, checked_fields

RENDERING_ARGUMENTS = frozenset(
    {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "tokenizer_kwargs", "return_dict", "return_tensors", "return_assistant_tokens_mask"}
)
"""Arguments of `apply_chat_template` that say what is rendered, not how."""


_CHOICES: dict[str, tuple[Any, ...]] = {
    "history_policy": ("append", "template"),
    "on_abort": ("raise", "resume"),
    "escape_control_tokens": (True, False),
}


@dataclass(frozen=True)
class RequestPlan:
    """What a request asks for.

    Attributes:
        sampling_params: SGLang's sampling parameters.
        fields: Further top-level keys of `/generate`.
        given_fields: Those of them that the user has given.
        clamped: Whether the context, not the caller, decided `max_new_tokens`.
    """

    sampling_params: dict[str, Any]
    fields: dict[str, Any]
    given_fields: dict[str, Any]
    clamped: bool

    def total_tokens(self, prompt_tokens: int) -> int | None:
        """Most tokens of prompt and answer; None where the request sets no limit."""
        most = self.sampling_params.get("max_new_tokens")
        return None if most is None else prompt_tokens + int(most)


def check_keys(config: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse keys that would have no effect, such as `lora_path`: the run would be another one than was meant.

    Raises:
        ValueError: Names them, and what was probably meant.
    """
    unknown = sorted(set(config) - set(known))
    if not unknown:
        return
    close = {key: difflib.get_close_matches(key, known, n=1) for key in unknown}
    meant = [f"{key!r} may be meant as {names[0]!r}" for key, names in close.items() if names]
    meant += [f"{key!r} goes into request_fields" for key in unknown if key in REQUEST_FIELDS]
    hint = f" ({'; '.join(meant)})" if meant else ""
    raise ValueError(
        f"unknown configuration: {', '.join(map(repr, unknown))}{hint}; the keys are {', '.join(sorted(known))}. What "
        "SGLang samples with (temperature, top_p, ...) goes into sampling_params"
    )


def checked_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without values that could only fail later: at the first call, or when the episode is saved.

    Raises:
        ValueError: Names the key, what it holds and what it takes.
    """
    given = config.get("sampling_params")
    if given is not None:
        if not isinstance(given, Mapping):
            raise ValueError(f"sampling_params must be a dict of SGLang's sampling parameters, not {given!r}")
        misplaced = sorted(set(given) & set(REQUEST_FIELDS))
        if misplaced:
            raise ValueError(f"{misplaced} are fields of the request: put them into request_fields")
    # A chat template may take arguments of any kind.
    checked = {name: value if name == "chat_template_kwargs" else plain(value, name) for name, value in config.items()}
    params = checked.get("sampling_params")
    check_sampling_mask(sent_fields(checked), params or {})
    for name, choices in _CHOICES.items():
        if checked.get(name) not in (None, *choices):
            raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {checked[name]!r}")
    checked_routing_key(checked.get("routing_key"))
    reserved = RENDERING_ARGUMENTS & set(checked.get("chat_template_kwargs") or {})
    if reserved:
        raise ValueError(f"chat_template_kwargs cannot hold {sorted(reserved)}: the model sets them itself")
    limits = {
        "sampling_params['max_new_tokens']": (params or {}).get("max_new_tokens"),
        "context_window_limit": checked.get("context_window_limit"),
        "max_context_tokens": checked.get("max_context_tokens"),
    }
    for name, limit in limits.items():
        if limit is not None and not _is_whole(limit, at_least=1):
            raise ValueError(f"{name} must be a whole number of at least 1 or None, not {limit!r}")
    least, most = (params or {}).get("min_new_tokens"), (params or {}).get("max_new_tokens")
    if least is not None and not _is_whole(least, at_least=0):
        raise ValueError(f"sampling_params['min_new_tokens'] must be a whole number of at least 0, not {least!r}")
    if least is not None and most is not None and least > most:
        raise ValueError(f"sampling_params ask for at least {least} new tokens and at most {most}")
    return checked


def sent_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the user adds to every request.

    Raises:
        ValueError: One of them is not known, or wrong.
    """
    return checked_fields(config.get("request_fields"), config.get("unchecked_request_fields"))


def _is_whole(number: Any, *, at_least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= at_least


def wants_logprobs(config: Mapping[str, Any]) -> bool:
    """Whether the logprobs of sampled tokens are to be recorded; with those of prompts, always."""
    return config.get("return_logprob") is not False or bool(config.get("return_prompt_logprobs"))


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
        grammar: Sampling parameters that constrain the answer, e.g. `{"json_schema": ...}`; None takes out what is
            configured.

    Raises:
        ContextWindowOverflowException: The context has no room for an answer, or for one of `min_new_tokens`.
    """
    grammar = grammar or {}
    configured = {name: value for name, value in (config.get("sampling_params") or {}).items() if name not in grammar}
    sampling_params = {**configured, **{name: value for name, value in grammar.items() if value is not None}}
    asked = sampling_params.pop("max_new_tokens", None)
    limit = min((one for one in (config.get("max_context_tokens"), context_length) if one is not None), default=None)
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
    given_fields = sent_fields(config)
    fields: dict[str, Any] = {**given_fields, "return_logprob": wants_logprobs(config)}
    if config.get("return_prompt_logprobs"):
        # The first entry that the server returns is always null, so ask from one token earlier.
        fields["logprob_start_len"] = max(known_tokens - 1, 0)
    if config.get("return_routed_experts"):
        fields["return_routed_experts"] = True
    clamped = room is not None and (asked is None or asked > room)
    return RequestPlan(sampling_params, fields, given_fields, clamped)


def check_answer(
    generation: Generation,
    config: Mapping[str, Any],
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
    if config.get("return_routed_experts") and not (aborted and generation.routed_experts is None):
        _check_routed_experts(generation, parent)
    asked_for_mask = sent_fields(config).get("return_sampling_mask")
    if asked_for_mask and generation.output_ids and generation.sampling_mask is None and not aborted:
        raise SGLangDecodingError(
            "sampling masks were asked for and not returned: the server is older than they are, or a router drops "
            "`return_sampling_mask`"
        )
    returned = len(generation.prompt_logprobs)
    if config.get("return_prompt_logprobs") and returned < new_tokens and not aborted:
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
