"""What SGLang 0.5.23 refuses of a `/generate` request, in its order, its words and its three shapes of error body.

Source: answers of a real 0.5.23 server. The order is that of the server: types of the body, sampling keys and their
types, presence of an input, context length, sampling values, input length, logprob start.

Two kinds of refusal are this stand-in's own: 501 for what it does not imitate, and for requests on which the real
server's process dies (such a request is a bug of the client, and a test must see it at once).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from ..exceptions import PortableError
from .further_fields import feature_not_launched, field_violation, impossible_mask, mistyped_field, unusable_field
from .sampling_params import check_sampling_types, check_sampling_values, wrong_type

DEFAULT_MAX_NEW_TOKENS = 128
# A server keeps the last token of the context free, 5 more at the input and 1 more at the output: the longest prompt is
# 6 tokens shorter than the context, and prompt plus completion end 2 tokens before it.
INPUT_RESERVE = 6
OUTPUT_RESERVE = 2

_NOT_IMITATED = (
    "stream",
    "input_embeds",
    "image_data",
    "audio_data",
    "video_data",
    "session_params",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_text_in_logprobs",
)


class RefusedError(PortableError):
    """The request gets an error response.

    Attributes:
        status: HTTP status code.
        body: JSON body.
        message: The error's text inside the body.
    """

    def __init__(self, status: int, body: dict[str, Any], message: str) -> None:
        """Keep what is sent."""
        super().__init__(message)
        self.status = status
        self.body = body
        self.message = message


def refusal(message: str, status: int = 400) -> RefusedError:
    """An error in the shape of the engine: `{"error": {"message": ...}}`."""
    return RefusedError(status, {"error": {"message": message}}, message)


def contract_violation(message: str) -> RefusedError:
    """An error in the shape of the request contract: `{"error": "..."}`."""
    return RefusedError(400, {"error": message}, message)


def validation_error(loc: tuple[str, ...], kind: str, message: str, value: object) -> RefusedError:
    """An error in the shape of the HTTP layer: `{"object": "error", "message": ..., "code": 400}`."""
    text = f"1 validation error:\n  {{'type': {kind!r}, 'loc': {loc!r}, 'msg': {message!r}, 'input': {value!r}}}"
    return RefusedError(
        400, {"object": "error", "message": text, "type": "Bad Request", "param": None, "code": 400}, text
    )


def fatal(what: str) -> RefusedError:
    """A request on which the process of a real server dies."""
    return refusal(f"scripted server: {what}; a real SGLang server dies on this request", 501)


@dataclass(frozen=True)
class CheckedRequest:
    """A `/generate` request that passed every check.

    Attributes:
        input_ids: The prompt, shape (T,).
        rid: The client's request id, None if it gave none.
        sampling_params: As sent.
        max_new_tokens: Most tokens that may be sampled: as asked for, and no more than the context leaves.
        return_logprob: Whether logprobs were asked for.
        logprob_start_len: First prompt position with a logprob, -1 for none.
        return_prompt_token_ids: Whether the response repeats the prompt.
        return_routed_experts: Whether the response tells the experts of each token.
        routed_experts_start_len: First token whose experts it tells.
        return_sampling_mask: Whether the response tells the ids that each token was sampled from.
        support_logprobs: Whether it tells the logprobs of all those ids, and not only of the sampled one.
        cache_key: Requests with different keys share no cached prefix.
    """

    input_ids: list[int]
    rid: str | None
    sampling_params: dict[str, Any]
    max_new_tokens: int
    return_logprob: bool
    logprob_start_len: int
    return_prompt_token_ids: bool
    return_routed_experts: bool
    routed_experts_start_len: int
    return_sampling_mask: bool
    support_logprobs: bool
    cache_key: tuple[object, object]


def read_json_object(headers: Mapping[str, str], content: bytes) -> dict[str, Any]:
    """The request body as an object.

    Raises:
        RefusedError: No body, not JSON, not declared as JSON, or not an object.
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
        body: The JSON object.
        context_length: Context of the served model, in tokens.
        vocab_size: Ids outside [0, vocab_size) kill a server.
        encode: Tokenises the prompt if it came as text.

    Raises:
        RefusedError: In the server's order, the first thing that is wrong.
    """
    id_kinds = _check_body_types(body)
    params = body.get("sampling_params") or {}
    wrong = check_sampling_types(params)
    if wrong is not None:
        raise contract_violation(wrong)
    _check_imitated(body, params, is_batch=list in id_kinds)
    wrong = feature_not_launched(body)
    if wrong is not None:
        raise refusal(wrong)
    input_ids = _read_input(body, vocab_size, encode)
    max_new_tokens = params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    _check_context(len(input_ids), params.get("max_new_tokens"), context_length)
    if body.get("return_hidden_states"):
        raise refusal(
            "The server is not configured to return hidden states. Please set `--return-hidden-states-mode last`, "
            "`--return-hidden-states-mode full`, or the legacy `--enable-return-hidden-states` flag."
        )
    wrong = unusable_field(body)
    if wrong is None:
        wrong = check_sampling_values(params, vocab_size)
    if wrong is None:
        wrong = impossible_mask(body, params)
    if wrong is not None:
        raise refusal(wrong)
    if len(input_ids) > context_length - INPUT_RESERVE:
        raise refusal(
            f"Input length ({len(input_ids)} tokens) exceeds the maximum allowed length "
            f"({context_length - INPUT_RESERVE} tokens). Use a shorter input or enable --allow-auto-truncate."
        )
    room = context_length - OUTPUT_RESERVE - len(input_ids)
    return CheckedRequest(
        input_ids=input_ids,
        rid=body.get("rid"),
        sampling_params=params,
        max_new_tokens=room if max_new_tokens is None else min(max_new_tokens, room),
        return_logprob=bool(body.get("return_logprob")),
        logprob_start_len=_read_logprob_start(body, len(input_ids)),
        return_prompt_token_ids=bool(body.get("return_prompt_token_ids")),
        return_routed_experts=bool(body.get("return_routed_experts")),
        routed_experts_start_len=_read_routed_experts_start(body, len(input_ids)),
        return_sampling_mask=bool(body.get("return_sampling_mask")),
        support_logprobs=body.get("sampling_logprobs_mode") == "support",
        cache_key=(body.get("extra_key"), body.get("cache_salt")),
    )


def _check_body_types(body: dict[str, Any]) -> set[type]:
    """Check JSON types, a JSON true being no integer, and return those of the input's elements."""
    ids = body.get("input_ids")
    if ids is not None and not isinstance(ids, list):
        message = f"Value error, must be list or null; got {type(ids).__name__}"
        raise validation_error(("body", "input_ids"), "value_error", message, ids)
    id_kinds = set(map(type, ids or ()))
    for kind in id_kinds - {int, list, bool}:
        message = f"Value error, elements must be int or list; got {kind.__name__}"
        raise validation_error(("body", "input_ids"), "value_error", message, ids)
    expected = (
        ("text", (str, list), "string"),
        ("rid", (str, list), "string"),
        ("sampling_params", (dict, list), "dictionary"),
        ("logprob_start_len", (int, list), "integer"),
    )
    for key, kinds, name in expected:
        value = body.get(key)
        if value is not None and type(value) not in kinds:
            raise validation_error(("body", key), f"{name}_type", f"Input should be a valid {name}", value)
    for key, kind, name in (("return_routed_experts", bool, "boolean"), ("routed_experts_start_len", int, "integer")):
        if key in body and not isinstance(body[key], kind):
            raise validation_error(("body", key), f"{name}_type", f"Input should be a valid {name}", body[key])
    _check_field_types(body)
    flag = body.get("return_logprob")
    if isinstance(flag, str) and flag.lower() not in ("true", "false"):
        raise validation_error(("body", "return_logprob"), "bool_parsing", "Input should be a valid boolean", flag)
    if flag is not None and not isinstance(flag, bool):
        raise contract_violation(wrong_type(flag, "a value or an array of values for BoolOrList"))
    if bool in id_kinds:
        raise contract_violation(wrong_type(next(item for item in ids or () if isinstance(item, bool)), "a sequence"))
    return id_kinds


def _check_field_types(body: dict[str, Any]) -> None:
    for key, value in body.items():
        if (wrong := mistyped_field(key, value)) is not None:
            raise validation_error(("body", key), *wrong, value)
    for key, value in body.items():
        if (violation := field_violation(key, value)) is not None:
            raise contract_violation(violation)


def _check_imitated(body: dict[str, Any], params: dict[str, Any], *, is_batch: bool) -> None:
    for key in _NOT_IMITATED:
        if body.get(key):
            raise refusal(f"scripted server: `{key}` is not imitated", 501)
    is_batch |= any(isinstance(body.get(key), list) for key in ("text", "rid", "sampling_params"))
    if is_batch or (params.get("n") or 1) > 1:
        raise refusal("scripted server: batches and n > 1 are not imitated", 501)


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


def _check_context(input_tokens: int, max_new_tokens: int | None, context_length: int) -> None:
    if input_tokens >= context_length:
        raise refusal(
            f"The input ({input_tokens} tokens) is longer than the model's context length ({context_length} tokens)."
        )
    if max_new_tokens is not None and input_tokens + max_new_tokens > context_length:
        raise refusal(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens. "
            f"You requested a total of {input_tokens + max_new_tokens} tokens: {input_tokens} tokens from the input "
            f"messages and {max_new_tokens} tokens for the completion. Please reduce the number of tokens in the input "
            "messages or the completion to fit within the limit."
        )


def _read_logprob_start(body: dict[str, Any], input_tokens: int) -> int:
    start: int = -1 if body.get("logprob_start_len") is None else body["logprob_start_len"]
    if not body.get("return_logprob"):
        return -1
    if start < -1:
        raise fatal(f"logprob_start_len={start} is below -1")
    if start > input_tokens:
        raise refusal(
            f"req.logprob_start_len={start} is higher than the number of input tokens len(req.origin_input_ids)="
            f"{input_tokens}. Please use a smaller logprob_start_len."
        )
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
    if start > input_tokens:
        raise refusal(
            f"recv_req.routed_experts_start_len={start} is higher than the number of input tokens "
            f"len(req.origin_input_ids)={input_tokens}. Please use a smaller routed_experts_start_len."
        )
    return start
