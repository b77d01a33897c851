"""The top-level fields of SGLang's `/generate` that users may set, and those that they may not.

A field that is misspelled, has the wrong type, or affects exact recording is an error when the model is configured,
because the server ignores unknown fields. Fields of newer servers go into `unchecked_request_fields`.

Source: SGLang 0.5.23 (`GenerateReqInput`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from itertools import chain, product
from typing import Any

from .json_values import plain

_TEXT, _FLAG, _WHOLE, _OBJECT, _LABELS = "a string", "True or False", "a whole number", "a dict", "a dict of strings"

REQUEST_FIELDS: Mapping[str, str] = {
    "lora_path": _TEXT,  # name under which an adapter was loaded
    "priority": _WHOLE,  # needs a server with --enable-priority-scheduling
    "custom_logit_processor": _TEXT,  # needs a server with --enable-custom-logit-processor
    "max_thinking_tokens": _WHOLE,  # needs a server with --enable-strict-thinking
    "require_reasoning": _FLAG,
    "return_entropy": _FLAG,
    "return_sampling_mask": _FLAG,
    "sampling_logprobs_mode": _TEXT,
    "extra_key": _TEXT,  # separates the prefix cache, like cache_salt
    "cache_salt": _TEXT,
    "session_id": _TEXT,  # groups requests, and changes no prompt
    "conversation_id": _TEXT,
    "custom_labels": _LABELS,
    "routed_dp_rank": _WHOLE,
    "data_parallel_rank": _WHOLE,  # name of routed_dp_rank in older servers
    "log_metrics": _FLAG,
    "no_logs": _FLAG,
    "external_trace_header": _OBJECT,
    "kv_hints": _OBJECT,
}
"""The fields that `request_fields` accepts, and the type of each."""

_REFUSED: Mapping[str, str] = {
    "the model makes the prompt": "input_ids text input_embeds positional_embed_overrides",
    "the server would put other tokens before the prompt": "session_params",
    "it has its own option": "sampling_params routing_key return_logprob",
    "SGLangModel(return_prompt_logprobs=True) sets it for each call": "logprob_start_len",
    "SGLangModel(return_routed_experts=True) sets it": "return_routed_experts routed_experts_start_len",
    "responses are never streamed: they are recorded whole": "stream",
    "every attempt has its own id": "rid",
    "the prompt's tokens are already recorded, as they were sent": "return_prompt_token_ids",
    "what it returns is not recorded; use SGLangClient.generate": "top_logprobs_num token_ids_logprob "
    "return_text_in_logprobs return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs "
    "return_flat_raw_top_logprobs_b64 return_hidden_states return_indexer_topk return_bytes "
    "multi_item_delimiter_indices token_indices_to_pool",
    "the model sends the images of messages itself; pass processor= to SGLangModel": "image_data video_data audio_data "
    "modalities mm_hashes mm_content_hashes use_audio_in_video video_config",
    "it changes how the server tokenizes images, and the processor of SGLangModel would not know": "max_dynamic_patch "
    "min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch images_config mm_processor_kwargs",
    "the router of disaggregated servers sets it": "bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key "
    "decode_tp_size disagg_prefill_dp_rank",
    "it is also a sampling parameter: put it into sampling_params": "watermark",
    "the server sets it": "lora_id http_worker_ipc received_time background need_wait_for_mm_inputs "
    "num_items_assigned encoder_urls",
    "it is an argument of SGLangClient.generate": "vocab_size cancel_signal on_partial deadline",
}
REFUSED_FIELDS: Mapping[str, str] = dict(
    chain.from_iterable(product(names.split(), [reason]) for reason, names in _REFUSED.items())
)
"""The fields that no option accepts, and why."""


def checked_fields(fields: Any, unchecked: Any) -> dict[str, Any]:
    """Return the fields that every request of a model carries.

    Args:
        fields: `request_fields` of the configuration; None values are left out.
        unchecked: `unchecked_request_fields` of the configuration.

    Raises:
        ValueError: A name is unknown, not allowed or given twice, or a value has the wrong type. The message names it.
    """
    sent: dict[str, Any] = {}
    for option, given in (("request_fields", fields), ("unchecked_request_fields", unchecked)):
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"{option} must be a dict of top-level fields of SGLang's /generate, not {given!r}")
        for name, value in (given or {}).items():
            where = f"{option}[{name!r}]"
            if not isinstance(name, str):
                raise ValueError(f"{option} has the key {name!r}, but field names are strings")
            if name in REFUSED_FIELDS:
                raise ValueError(f"{where} cannot be set: {REFUSED_FIELDS[name]}")
            if name in sent:
                raise ValueError(f"{where} is also in request_fields: set it in one of the two")
            is_checked = option == "request_fields"
            if is_checked and name not in REQUEST_FIELDS:
                close = difflib.get_close_matches(name, REQUEST_FIELDS, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(REQUEST_FIELDS)}."
                raise ValueError(
                    f"{where} is not a known field of /generate; {hint} Fields of newer servers go into "
                    "unchecked_request_fields, sampling parameters into sampling_params"
                )
            value = plain(value, where)
            if value is not None:
                if is_checked:
                    _check_value(name, value, where)
                sent[name] = value
    if "sampling_logprobs_mode" in sent and not sent.get("return_sampling_mask"):
        raise ValueError("request_fields['sampling_logprobs_mode'] needs request_fields['return_sampling_mask'] = True")
    return sent


def check_sampling_mask(fields: Mapping[str, Any], sampling_params: Mapping[str, Any]) -> None:
    """Check that the server can return sampling masks with the given sampling parameters.

    Args:
        fields: Fields from `checked_fields`.
        sampling_params: Sampling parameters of the configuration.

    Raises:
        ValueError: Masks are requested, but `top_k` is not finite and the temperature is not 0.
    """
    top_k = sampling_params.get("top_k")
    if fields.get("return_sampling_mask") and (top_k is None or top_k < 1) and sampling_params.get("temperature") != 0:
        raise ValueError(
            "return_sampling_mask needs a finite top_k (1 to 4096, or the server's --sampling-mask-max-tokens), but "
            f"sampling_params have top_k={top_k}: to sample nearly as without one, set it far above the number of "
            "tokens that top_p keeps"
        )


def _check_value(name: str, value: Any, where: str) -> None:
    kind = REQUEST_FIELDS[name]
    fits = {
        _TEXT: isinstance(value, str),
        _FLAG: isinstance(value, bool),
        _WHOLE: isinstance(value, int) and not isinstance(value, bool),
        _OBJECT: isinstance(value, dict),
        _LABELS: isinstance(value, dict) and all(isinstance(label, str) for label in value.values()),
    }
    if not fits[kind]:
        raise ValueError(f"{where} must be {kind}, not {value!r}")
    if name in ("max_thinking_tokens", "routed_dp_rank", "data_parallel_rank") and value < 0:
        raise ValueError(f"{where} must be at least 0, not {value}")
    if name == "sampling_logprobs_mode" and value != "selected":
        raise ValueError(
            f"{where} must be 'selected', not {value!r}: the logprobs that 'support' adds are not recorded, since a "
            "trainer computes them from its logits"
        )
