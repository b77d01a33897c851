"""The further fields of a `/generate` body: what SGLang 0.5.23 says of wrong ones, and of those it is not launched for.

Source: the answers of a real server. Types are refused by its HTTP layer first, then by its request contract.
"""

from __future__ import annotations

from typing import Any

from .sampling_params import wrong_type

MAX_SAMPLING_MASK = 4096
_NO_TOP_K = 1 << 30

_TEXT, _NUMBER, _FLAG, _OBJECT = "string", "integer", "boolean", "dictionary"
_KINDS = {
    **dict.fromkeys(("lora_path", "custom_logit_processor", "extra_key", "cache_salt"), _TEXT),
    **dict.fromkeys(("session_id", "conversation_id", "routing_key", "sampling_logprobs_mode"), _TEXT),
    **dict.fromkeys(("priority", "max_thinking_tokens", "routed_dp_rank", "data_parallel_rank"), _NUMBER),
    **dict.fromkeys(("require_reasoning", "return_entropy", "no_logs", "log_metrics", "return_sampling_mask"), _FLAG),
    **dict.fromkeys(("custom_labels", "external_trace_header", "kv_hints"), _OBJECT),
}
# A JSON true is a number to the HTTP layer, and 1 a flag.
_TYPES: dict[str, tuple[type, ...]] = {_TEXT: (str,), _NUMBER: (int, float), _FLAG: (int,), _OBJECT: (dict,)}
_NOT_NULL = ("require_reasoning", "return_entropy", "no_logs", "log_metrics")


def mistyped_field(key: str, value: Any) -> tuple[str, str] | None:
    """Kind and text of the HTTP layer's error for a value of the wrong type; None if it passes."""
    kind = _KINDS.get(key)
    if kind is None or (value is None and key not in _NOT_NULL):
        return None
    if not isinstance(value, _TYPES[kind]):
        return f"{kind}_type", f"Input should be a valid {kind}"
    if kind == _NUMBER and isinstance(value, float) and not value.is_integer():
        return "int_from_float", "Input should be a valid integer, got a number with a fractional part"
    if (
        isinstance(value, dict)
        and key == "custom_labels"
        and not all(isinstance(label, str) for label in value.values())
    ):
        return "string_type", "Input should be a valid string"
    if key == "sampling_logprobs_mode" and value not in ("selected", "support"):
        return "literal_error", "Input should be 'selected' or 'support'"
    return None


def field_violation(key: str, value: Any) -> str | None:
    """The text of the contract's error for a value that the HTTP layer has let pass; None if it fits."""
    if value is None:
        return None
    if _KINDS.get(key) == _NUMBER:
        expected = "u64" if key == "max_thinking_tokens" else "i64"
        if isinstance(value, bool):
            return wrong_type(value, expected)
        if expected == "u64" and value < 0:
            return f"invalid value: integer `{value}`, expected u64"
    if key == "require_reasoning" and not isinstance(value, bool):
        return wrong_type(value, "a boolean")
    if key == "return_sampling_mask" and not isinstance(value, bool):
        return wrong_type(value, "a value or an array of values for BoolOrList")
    return None


def feature_not_launched(body: dict[str, Any]) -> str | None:
    """The error for a feature that the server has only if it is launched for it, as this one is not."""
    if body.get("max_thinking_tokens") is not None:
        return "max_thinking_tokens requires the server to be launched with --enable-strict-thinking"
    rank = body.get("routed_dp_rank")
    rank = body.get("data_parallel_rank") if rank is None else rank
    if rank not in (None, 0):
        return f"routed_dp_rank={rank} out of range [0, 1)"
    if body.get("lora_path"):
        return (
            f"LoRA adapter '{body['lora_path']}' was requested, but LoRA is not enabled. Please launch the server with "
            "--enable-lora flag and preload adapters using --lora-paths or /load_lora_adapter endpoint."
        )
    return None


def unusable_field(body: dict[str, Any]) -> str | None:
    """The error for fields that need a launch option, or another field."""
    if body.get("custom_logit_processor"):
        return (
            "The server is not configured to enable custom logit processor. Please set "
            "`--enable-custom-logit-processor` to enable this feature."
        )
    if body.get("sampling_logprobs_mode") is not None and not body.get("return_sampling_mask"):
        return "sampling_logprobs_mode can only be set when return_sampling_mask=true."
    return None


def impossible_mask(body: dict[str, Any], params: dict[str, Any]) -> str | None:
    """The error for sampling parameters under which the server cannot tell sampling masks."""
    if not body.get("return_sampling_mask") or params.get("temperature") == 0:
        return None
    top_k = params.get("top_k")
    if top_k is not None and 1 <= top_k <= MAX_SAMPLING_MASK:
        return None
    shown = _NO_TOP_K if top_k in (None, -1) else top_k
    return (
        f"return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= {MAX_SAMPLING_MASK}; got "
        f"top_k={shown}. Lower top_k or increase --sampling-mask-max-tokens."
    )
