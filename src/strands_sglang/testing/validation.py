"""Validation of `/generate` requests as in SGLang 0.5.23: its order, its messages and its three formats of errors.

Source: responses of a real 0.5.23 server. The order is: types of the body, sampling keys and their types, presence of
an input, context length, sampling values, input length, logprob start.

Two rejections, both with status 501, are not SGLang's: requests that the scripted server does not emulate, and requests
on which a real server's process dies. The latter are bugs of the client, and a test must see them at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from ..exceptions import PortableError

DEFAULT_MAX_NEW_TOKENS = 128
# A server reserves the last token of the context, 5 more at the input and 1 more at the output: the longest prompt is
# 6 tokens shorter than the context, and prompt plus completion end 2 tokens before its end.
INPUT_RESERVE = 6
OUTPUT_RESERVE = 2

_NOT_EMULATED = (
    "stream",
    "input_embeds",
    "image_data",
    "audio_data",
    "video_data",
    "session_params",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_text_in_logprobs",
    # What a real server refuses unless it was launched for it.
    "custom_logit_processor",
    "lora_path",
    "max_thinking_tokens",
    "return_hidden_states",
    "routed_dp_rank",
    "data_parallel_rank",
)

# In the order of the server's error message.
SAMPLING_KEY_TYPES = {
    "max_new_tokens": "i64",
    "stop": "a value or an array of values for StringOrList",
    "stop_token_ids": "a sequence",
    "stop_regex": "a value or an array of values for StringOrList",
    "temperature": "f64",
    "top_p": "f64",
    "top_k": "i64",
    "min_p": "f64",
    "frequency_penalty": "f64",
    "presence_penalty": "f64",
    "repetition_penalty": "f64",
    "min_new_tokens": "i64",
    "n": "i64",
    "json_schema": "a string",
    "regex": "a string",
    "ebnf": "a string",
    "structural_tag": "a string",
    "ignore_eos": "a boolean",
    "skip_special_tokens": "a boolean",
    "spaces_between_special_tokens": "a boolean",
    "no_stop_trim": "a boolean",
    "stream_interval": "i64",
    "logit_bias": "a map",
    "sampling_seed": "i64",
    "custom_params": "anything",
    "beam_width": "i64",
    "watermark": "anything",
    "choice": "anything",
}

_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "i64": (int,),
    "f64": (int, float),
    "a string": (str,),
    "a boolean": (bool,),
    "a sequence": (list,),
    "a map": (dict,),
    "a value or an array of values for StringOrList": (str, list),
}
_ELEMENT_TYPES = {"stop": "a string", "stop_regex": "a string", "stop_token_ids": "i64", "logit_bias": "f64"}

_NULL = type(None)
_BODY_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "input_ids": ((list, _NULL), "list"),
    "text": ((str, list, _NULL), "string"),
    "rid": ((str, list, _NULL), "string"),
    "sampling_params": ((dict, list, _NULL), "dictionary"),
    "return_logprob": ((bool, _NULL), "boolean"),
    "logprob_start_len": ((int, list, _NULL), "integer"),
    "return_routed_experts": ((bool,), "boolean"),
    "routed_experts_start_len": ((int,), "integer"),
}

_RANGES: tuple[tuple[str, float, Callable[[float], bool], str], ...] = (
    ("temperature", 1.0, lambda v: math.isfinite(v) and v >= 0, "temperature must be a non-negative finite number"),
    ("top_p", 1.0, lambda v: 0 < v <= 1, "top_p must be in (0, 1]"),
    ("min_p", 0.0, lambda v: 0 <= v <= 1, "min_p must be in [0, 1]"),
    ("top_k", -1, lambda v: v == -1 or v >= 1, "top_k must be -1 (disable) or at least 1"),
    ("frequency_penalty", 0.0, lambda v: -2 <= v <= 2, "frequency_penalty must be in [-2, 2]"),
    ("presence_penalty", 0.0, lambda v: -2 <= v <= 2, "presence_penalty must be in [-2, 2]"),
    ("repetition_penalty", 1.0, lambda v: 0 < v <= 2, "repetition_penalty must be in (0, 2] (1.0 = no penalty)"),
    ("min_new_tokens", 0, lambda v: v >= 0, "min_new_tokens must be in [0, max_new_tokens]"),
    ("max_new_tokens", 0, lambda v: v >= 0, "max_new_tokens must be at least 0"),
)
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")

MAX_SAMPLING_MASK = 4096
_NO_TOP_K = 1 << 30


class RefusedError(PortableError):
    """The request is rejected with an error response.

    Attributes:
        status: HTTP status code.
        body: JSON body.
        message: Error message inside the body.
    """

    def __init__(self, status: int, body: dict[str, Any], message: str) -> None:
        """Initialize with the response."""
        super().__init__(message)
        self.status = status
        self.body = body
        self.message = message


def refusal(message: str, status: int = 400) -> RefusedError:
    """Return an error in the engine's format: `{"error": {"message": ...}}`."""
    return RefusedError(status, {"error": {"message": message}}, message)


def contract_violation(message: str) -> RefusedError:
    """Return an error in the format of the request contract: `{"error": "..."}`."""
    return RefusedError(400, {"error": message}, message)


def validation_error(loc: tuple[str, ...], kind: str, message: str, value: object) -> RefusedError:
    """Return an error in the HTTP layer's format: `{"object": "error", "message": ..., "code": 400}`."""
    text = f"1 validation error:\n  {{'type': {kind!r}, 'loc': {loc!r}, 'msg': {message!r}, 'input': {value!r}}}"
    return RefusedError(
        400, {"object": "error", "message": text, "type": "Bad Request", "param": None, "code": 400}, text
    )


def fatal(what: str) -> RefusedError:
    """Return the error for a request on which a real server's process dies."""
    return refusal(f"scripted server: {what}; a real SGLang server dies on this request", 501)


@dataclass(frozen=True)
class CheckedRequest:
    """A `/generate` request that passed every check.

    Attributes:
        body: JSON object as sent.
        input_ids: Prompt, shape `(T,)`.
        sampling_params: Sampling parameters as sent.
        max_new_tokens: Maximum number of tokens to sample, clamped to the context.
        logprob_start_len: First prompt position with a logprob; -1 for none.
        routed_experts_start_len: First token with experts in the response.
    """

    body: dict[str, Any]
    input_ids: list[int]
    sampling_params: dict[str, Any]
    max_new_tokens: int
    logprob_start_len: int
    routed_experts_start_len: int

    @property
    def cache_key(self) -> tuple[object, object]:
        """Namespace of the prefix cache; requests with different keys share no cached prefix."""
        return self.body.get("extra_key"), self.body.get("cache_salt")

    def asks_for(self, field: str) -> bool:
        """Return whether a flag of the body is set."""
        return bool(self.body.get(field))


def read_json_object(headers: Mapping[str, str], content: bytes) -> dict[str, Any]:
    """Decode the request body, a JSON object.

    Raises:
        RefusedError: The body is empty, not JSON, not declared as JSON, or not an object.
    """
    if not content:
        raise validation_error(("body",), "missing", "Field required", None)
    body: Any = content
    if "json" in headers.get("content-type", ""):
        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise validation_error(("body", "1"), "json_invalid", f"JSON decode error: {error}", {}) from None
    if not isinstance(body, dict):
        raise validation_error(("body",), "dataclass_type", "Input should be a dictionary", body)
    return body


def check_generate(
    body: dict[str, Any], *, context_length: int, vocab_size: int, encode: Callable[[str], list[int]]
) -> CheckedRequest:
    """Check a request body as the server does.

    Args:
        body: JSON object of the request.
        context_length: Context of the served model, in tokens.
        vocab_size: Number of token ids; an id outside `[0, vocab_size)` kills a real server.
        encode: Function that tokenizes a text prompt.

    Raises:
        RefusedError: A check failed, the first one in the server's order.
    """
    _check_body_types(body)
    params = body.get("sampling_params") or {}
    if (wrong := _sampling_type_violation(params)) is not None:
        raise contract_violation(wrong)
    for key in _NOT_EMULATED:
        if body.get(key):
            raise refusal(f"scripted server: `{key}` is not emulated", 501)
    is_batch = any(isinstance(body.get(key), list) for key in ("text", "rid", "sampling_params"))
    if is_batch or any(isinstance(item, list) for item in body.get("input_ids") or ()) or (params.get("n") or 1) > 1:
        raise refusal("scripted server: batches and n > 1 are not emulated", 501)
    input_ids = _read_input(body, vocab_size, encode)
    input_tokens, max_new_tokens = len(input_ids), params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    if input_tokens >= context_length:
        raise refusal(
            f"The input ({input_tokens} tokens) is longer than the model's context length ({context_length} tokens)."
        )
    asked = params.get("max_new_tokens") or 0
    if input_tokens + asked > context_length:
        raise refusal(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens. "
            f"You requested a total of {input_tokens + asked} tokens: {input_tokens} tokens from the input "
            f"messages and {asked} tokens for the completion. Please reduce the number of tokens in the input "
            "messages or the completion to fit within the limit."
        )
    _check_sampling_values(params, vocab_size)
    top_k = params.get("top_k")
    is_finite = top_k is not None and 1 <= top_k <= MAX_SAMPLING_MASK
    if body.get("return_sampling_mask") and params.get("temperature") != 0 and not is_finite:
        raise refusal(
            f"return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= {MAX_SAMPLING_MASK}; "
            f"got top_k={_NO_TOP_K if top_k in (None, -1) else top_k}. Lower top_k or increase "
            "--sampling-mask-max-tokens."
        )
    if input_tokens > context_length - INPUT_RESERVE:
        raise refusal(
            f"Input length ({input_tokens} tokens) exceeds the maximum allowed length "
            f"({context_length - INPUT_RESERVE} tokens). Use a shorter input or enable --allow-auto-truncate."
        )
    room = context_length - OUTPUT_RESERVE - input_tokens
    return CheckedRequest(
        body=body,
        input_ids=input_ids,
        sampling_params=params,
        max_new_tokens=room if max_new_tokens is None else min(max_new_tokens, room),
        logprob_start_len=_read_logprob_start(body, input_tokens),
        routed_experts_start_len=_read_routed_experts_start(body, input_tokens),
    )


def _check_body_types(body: dict[str, Any]) -> None:
    """Check the JSON types, where true is not an integer."""
    for key, (kinds, name) in _BODY_TYPES.items():
        if key in body and type(body[key]) not in kinds:
            raise validation_error(("body", key), f"{name}_type", f"Input should be a valid {name}", body[key])
    ids = body.get("input_ids") or ()
    for kind in set(map(type, ids)) - {int, list}:
        message = f"Value error, elements must be int or list; got {kind.__name__}"
        raise validation_error(("body", "input_ids"), "value_error", message, ids)


def _read_input(body: dict[str, Any], vocab_size: int, encode: Callable[[str], list[int]]) -> list[int]:
    ids: list[int] | None = body.get("input_ids")
    text = body.get("text")
    if ids is None and text is None:
        raise refusal("Either text, input_ids or input_embeds should be provided.")
    if ids is None:
        ids = encode(text)  # type: ignore[arg-type]
        if not ids:
            raise fatal("the text is empty")
    if not ids:
        raise refusal("input_ids cannot be empty.")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise fatal(f"token id {wrong} at position {ids.index(wrong)} is outside the vocabulary [0, {vocab_size})")
    return ids


def _read_logprob_start(body: dict[str, Any], input_tokens: int) -> int:
    start: int = -1 if body.get("logprob_start_len") is None else body["logprob_start_len"]
    if not body.get("return_logprob"):
        return -1
    if start < -1:
        raise fatal(f"logprob_start_len={start} is below -1")
    _check_start("req.logprob_start_len", start, input_tokens)
    return start


def _read_routed_experts_start(body: dict[str, Any], input_tokens: int) -> int:
    start: int = body.get("routed_experts_start_len") or 0
    if not body.get("return_routed_experts"):
        return 0
    if start < 0:
        raise refusal(
            f"recv_req.routed_experts_start_len={start} is lower than 0. "
            "Please use a non-negative routed_experts_start_len."
        )
    _check_start("recv_req.routed_experts_start_len", start, input_tokens)
    return start


def _check_start(name: str, start: int, input_tokens: int) -> None:
    if start > input_tokens:
        raise refusal(
            f"{name}={start} is higher than the number of input tokens len(req.origin_input_ids)={input_tokens}. "
            f"Please use a smaller {name.partition('.')[2]}."
        )


def _sampling_type_violation(params: Any) -> str | None:
    """Return the server's error message for the first unknown or mistyped parameter; None if there is none."""
    if not isinstance(params, dict):
        return None
    for key, value in params.items():
        expected = SAMPLING_KEY_TYPES.get(key)
        if expected is None:
            return f"unknown field `{key}`, expected one of " + ", ".join(f"`{name}`" for name in SAMPLING_KEY_TYPES)
        if value is None or expected == "anything":
            continue
        if type(value) not in _PYTHON_TYPES[expected]:
            return wrong_type(value, expected)
        if key in _ELEMENT_TYPES and not isinstance(value, str):
            for item in value.values() if isinstance(value, dict) else value:
                if type(item) not in _PYTHON_TYPES[_ELEMENT_TYPES[key]]:
                    return wrong_type(item, _ELEMENT_TYPES[key])
    return None


def _check_sampling_values(params: dict[str, Any], vocab_size: int) -> None:
    for key, default, is_valid, message in _RANGES:
        value = params.get(key)
        if not is_valid(default if value is None else value):
            raise refusal(f"{message}, got {value}.")
    least, most = params.get("min_new_tokens") or 0, params.get("max_new_tokens", 128)
    if most is not None and least > most:
        raise refusal(f"min_new_tokens must be in [0, max_new_tokens({most})], got {least}.")
    if sum(bool(params.get(grammar)) for grammar in _GRAMMARS) > 1:
        raise refusal("Only one of json_schema, regex, ebnf, or structural_tag can be set.")


def wrong_type(value: Any, expected: str) -> str:
    """Return the server's error message for a JSON value of an unexpected type."""
    match value:
        case bool():
            found = f"boolean `{str(value).lower()}`"
        case int():
            found = f"integer `{value}`"
        case float():
            found = f"floating point `{value}`"
        case str():
            found = f"string {json.dumps(value, ensure_ascii=False)}"
        case dict():
            found = "map"
        case list():
            found = "sequence"
        case _:
            found = "null"
    return f"invalid type: {found}, expected {expected}"
