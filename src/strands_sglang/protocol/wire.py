"""What goes over the wire to an SGLang server and back: request, response and error bodies, as pure functions.

Promises: token ids that could kill a server (not an int, negative, outside the vocabulary) never become a request;
whatever a server answers becomes either a checked JSON object or one exception that says what came and from where.

Source of the shapes and wordings: SGLang 0.5.23 (`io_struct.py`, `tokenizer_manager.py`, `managers/utils.py`,
`disaggregation/`), sglang-router 0.3.2 and smg 1.13.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from ..exceptions import SGLangContextLengthError, SGLangDecodingError, SGLangHTTPError, SGLangThrottledError

_CONTEXT_LENGTH = re.compile(
    r"is longer than the model's context length"  # the input alone
    r"|exceeds the model's maximum context length"  # the input plus max_new_tokens
    r"|Input length \(\d+ tokens\) exceeds the maximum allowed length"  # the scheduler keeps a few tokens for itself
    r"|exceeds the maximum number of tokens: \d+ > \d+"  # prefill/decode disaggregation
    r"|prompt is too long after expanding multimodal tokens"
)
"""The messages by which SGLang says that a request does not fit the model's context."""

NO_SUCH_ENDPOINT = frozenset({404, 405, 501})
"""Statuses of a server that does not know the path (501: what plain file servers answer to POST)."""

KEPT_BODY_CHARS = 4096
SHOWN_BODY_CHARS = 200


def encode_token_ids(input_ids: Sequence[int], vocab_size: int | None = None) -> bytes:
    """Check token ids and encode them as a JSON array.

    The checks read the encoded bytes, which exist anyway: in JSON only a flat list of non-negative ints is made of
    digits and commas between one pair of brackets. 32k ids take about half a millisecond, encoding included.

    Args:
        input_ids: The prompt, shape (T,), T >= 1. Lists and tuples; also what has a `tolist` (array, numpy, torch).
        vocab_size: Number of ids that the model knows; None leaves the upper bound unchecked.

    Raises:
        ValueError: There are no ids, or one is not an int in [0, vocab_size); names its index and value.
    """
    ids = input_ids if isinstance(input_ids, list | tuple) else _as_list(input_ids)
    if not ids:
        raise ValueError("input_ids is empty: a request needs at least one token")
    try:
        encoded = orjson.dumps(ids)
    except TypeError:
        encoded = b""
    is_id_list = encoded.translate(None, b"0123456789,") == b"[]"
    if not is_id_list or (vocab_size is not None and max(ids) >= vocab_size):
        raise ValueError(_first_bad_id(ids, vocab_size))
    return encoded


class GenerateBody(NamedTuple):
    """A `/generate` body but for its `rid`, encoded once for all attempts.

    In two parts, because a 32k prompt is 200 kB and each copy of it costs more than encoding everything else.
    """

    input_ids: bytes
    rest: bytes

    def with_rid(self, rid: str) -> bytes:
        """The body of one attempt."""
        return b"".join((b'{"rid":', orjson.dumps(rid), b',"input_ids":', self.input_ids, b",", self.rest[1:]))


def encode_generate(
    input_ids: Sequence[int],
    sampling_params: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
    *,
    vocab_size: int | None = None,
) -> GenerateBody:
    """Encode a `/generate` body.

    Args:
        input_ids: See `encode_token_ids`.
        sampling_params: SGLang sampling parameters; keys of nested objects may be ints (`logit_bias={5: 1.0}`).
        fields: Further top-level keys of `/generate`; a `rid` among them is left out.
        vocab_size: See `encode_token_ids`.

    Raises:
        ValueError: Bad token ids, a request for several answers or for a stream, or a value that JSON cannot hold.
    """
    if sampling_params is not None and not isinstance(sampling_params, Mapping):
        raise ValueError(
            f"sampling_params must be a mapping (one request, one answer), got {type(sampling_params).__name__}"
        )
    sampling = dict(sampling_params or {})
    if sampling.get("n") not in (None, 1):
        raise ValueError(
            f"sampling_params n={sampling['n']!r}: one request gives one answer, send one request for each"
        )
    if fields.get("stream"):
        raise ValueError("stream=True: this client never streams; leave `stream` out")
    rest = {**fields, "sampling_params": sampling, "stream": False}
    rest.pop("rid", None)
    try:
        encoded = orjson.dumps(rest, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise ValueError(f"the request cannot be written as JSON: {error}") from error
    return GenerateBody(encode_token_ids(input_ids, vocab_size), encoded)


class UnfitAnswerError(SGLangDecodingError):
    """A body is JSON from beginning to end, and not what the endpoint answers: the server means it so."""


def decode_object(body: bytes, url: str) -> dict[str, Any]:
    """Read a body that must be a JSON object.

    Raises:
        SGLangDecodingError: It is something else; shows the beginning of what came.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise SGLangDecodingError(
            f"{url} answered something that is not JSON ({error}): {_shown(body)}; is this an SGLang server?"
        ) from error
    if not isinstance(value, dict):
        raise UnfitAnswerError(
            f"{url} answered a JSON {type(value).__name__} instead of an object: {_shown(body)}; is this an SGLang "
            "server?"
        )
    return value


def decode_generation(body: bytes, url: str) -> dict[str, Any]:
    """Read a `/generate` response: an object with `output_ids` and `meta_info.finish_reason`, left as it came.

    Raises:
        SGLangDecodingError: It is something else; names what is missing.
    """
    response = decode_object(body, url)
    meta_info = response.get("meta_info")
    missing = []
    if not isinstance(response.get("output_ids"), list):
        missing.append("`output_ids` (a list)")
    if not isinstance(meta_info, dict):
        missing.append("`meta_info` (an object)")
    elif not isinstance(reason := meta_info.get("finish_reason"), dict) or not isinstance(reason.get("type"), str):
        missing.append("`meta_info.finish_reason` (an object with `type`)")
    if missing:
        raise UnfitAnswerError(
            f"{url} answered without {' and '.join(missing)}: {_shown(body)}; is this an SGLang server?"
        )
    return response


def http_error(method: str, url: str, status: int, body: bytes, *, location: str | None = None) -> SGLangHTTPError:
    """Turn an HTTP answer that is not a success into the exception that names its kind.

    Args:
        method: HTTP method of the request.
        url: Its full URL.
        status: HTTP status code.
        body: The answer's body.
        location: Where a redirect points.
    """
    text = body.decode("utf-8", "replace")
    said = error_message(text)[:KEPT_BODY_CHARS]
    text = text[:KEPT_BODY_CHARS]
    message = f"{method} {url}: HTTP {status}" + (f": {said}" if said else "")
    if status == 400 and _CONTEXT_LENGTH.search(said):
        return SGLangContextLengthError(message, status=status, body=text)
    if status in (429, 503):
        return SGLangThrottledError(message, status=status, body=text)
    if status in NO_SUCH_ENDPOINT:
        message += "; there is no such endpoint: not an SGLang server, or base_url has a wrong host, port or path"
    elif 300 <= status < 400:
        message += f"; it redirects to {location}: use the address of the server itself as base_url"
    return SGLangHTTPError(message, status=status, body=text)


def error_message(body: str) -> str:
    """The server's own words in an error body.

    Knows `{"error": {"message"}}`, `{"error": "..."}`, `{"object": "error", "message"}`, `{"detail"}`, the routers'
    `{"error": {"type", "code", "message"}}` and plain text.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return " ".join(body.split())[:SHOWN_BODY_CHARS]
    if not isinstance(value, dict):
        return body[:SHOWN_BODY_CHARS]
    error = value.get("error") or value
    if isinstance(error, dict):
        code = error.get("code")
        error = error.get("message") or error.get("detail") or code or body
        if isinstance(code, str) and not code.isdigit() and code != error:
            error = f"{error} ({code})"
    return error if isinstance(error, str) else orjson.dumps(error).decode()


def _as_list(input_ids: Any) -> list[Any]:
    if isinstance(input_ids, str | bytes | Mapping) or not (
        hasattr(input_ids, "tolist") or hasattr(input_ids, "__len__")
    ):
        raise ValueError(f"input_ids must be a sequence of token ids, got {type(input_ids).__name__}")
    listed = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    return listed if isinstance(listed, list) else [listed]


def _first_bad_id(ids: Sequence[Any], vocab_size: int | None) -> str:
    bound = "" if vocab_size is None else f" below {vocab_size} (the vocabulary)"
    for index, value in enumerate(ids):
        in_range = isinstance(value, int) and 0 <= value < (2**63 if vocab_size is None else vocab_size)
        if type(value) is bool or not in_range:
            return f"input_ids[{index}] is {value!r} ({type(value).__name__}): token ids are ints from 0{bound}"
    return "input_ids cannot be written as a JSON list of ints"  # pragma: no cover - the loop has found what was wrong


def _shown(body: bytes) -> str:
    return repr(body[: 4 * SHOWN_BODY_CHARS].decode("utf-8", "replace")[:SHOWN_BODY_CHARS]) if body else "an empty body"
