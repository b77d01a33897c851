"""The wire format of SGLang servers: request, response and error bodies, as pure functions.

Token ids that could kill a server (not an int, negative, outside the vocabulary) never become a request. Every response
becomes either a checked JSON object or one exception that says what was received, and from where.

Source of formats and messages: SGLang 0.5.23 (`io_struct.py`, `tokenizer_manager.py`, `managers/utils.py`,
`disaggregation/`), sglang-router 0.3.2 and smg 1.13.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from typing import Any

import orjson

from ..exceptions import SGLangContextLengthError, SGLangDecodingError, SGLangHTTPError, SGLangThrottledError

_CONTEXT_LENGTH = re.compile(
    r"is longer than the model's context length"  # the input alone
    r"|exceeds the model's maximum context length"  # the input plus max_new_tokens
    r"|Input length \(\d+ tokens\) exceeds the maximum allowed length"  # the scheduler reserves a few tokens
    r"|exceeds the maximum number of tokens: \d+ > \d+"  # prefill/decode disaggregation
    r"|prompt is too long after expanding multimodal tokens"
)
"""SGLang's messages about requests that exceed the model's context."""

NO_SUCH_ENDPOINT = frozenset({404, 405, 501})
"""Statuses of a server that does not know the path; plain file servers return 501 for POST."""

NO_IDS = "input_ids is empty: a request needs at least one token"

_NOT_IDS = (b"[", b"{", b'"', b"-", b".", b"e", b"l")
"""What a JSON array holds unless it is a flat list of non-negative ints: "e" and "l" are of true, false and null."""

MAX_BODY_CHARS = 4096
EXCERPT_CHARS = 200


def encode_token_ids(input_ids: Sequence[int], vocab_size: int | None = None) -> bytes:
    """Check token ids and encode them as a JSON array.

    The checks search the encoded bytes for what the JSON of anything else holds. 32k ids take a quarter of a
    millisecond, of which the checks take a sixteenth; `vocab_size` doubles that.

    Args:
        input_ids: Prompt, shape `(T,)`, at least one token: a list, a tuple, or an object with `tolist` (array, numpy,
            torch).
        vocab_size: Number of token ids of the model; None leaves the upper bound unchecked.

    Raises:
        ValueError: There are no ids, or one is not an int in `[0, vocab_size)`. The message has its index and value.
    """
    ids = input_ids if isinstance(input_ids, list | tuple) else _as_list(input_ids)
    if not ids:
        raise ValueError(NO_IDS)
    try:
        encoded = orjson.dumps(ids)
    except TypeError:
        encoded = b""
    is_id_list = encoded != b"" and all(encoded.find(mark, 1) < 0 for mark in _NOT_IDS)
    if not is_id_list or (vocab_size is not None and max(ids) >= vocab_size):
        raise ValueError(_first_bad_id(ids, vocab_size))
    return encoded


@dataclass(frozen=True, slots=True)
class EncodedIds:
    """Token ids as JSON, checked and encoded once: a prompt that grows from turn to turn pays for what is new.

    Attributes:
        pieces: The ids in order, each piece separated by commas and none empty.
        count: Number of ids, T.
    """

    pieces: tuple[bytes, ...] = ()
    count: int = 0

    @classmethod
    def encode(cls, ids: Sequence[int], vocab_size: int | None = None) -> EncodedIds:
        """Check and encode token ids, perhaps none; see `encode_token_ids`.

        Raises:
            ValueError: An id is not an int in `[0, vocab_size)`.
        """
        return cls((encode_token_ids(ids, vocab_size)[1:-1],), len(ids)) if len(ids) else cls()

    @classmethod
    def joined(cls, parts: Iterable[EncodedIds]) -> EncodedIds:
        """Return the ids of all parts, without copying them."""
        parts = list(parts)
        return cls(tuple(chain.from_iterable(part.pieces for part in parts)), sum(part.count for part in parts))

    def plus(self, ids: Sequence[int], vocab_size: int | None = None) -> EncodedIds:
        """Return these ids and more, of which only the new ones are checked and encoded.

        Raises:
            ValueError: A new id is not an int in `[0, vocab_size)`.
        """
        return EncodedIds.joined((self, EncodedIds.encode(ids, vocab_size)))


class GenerateBody:
    """A `/generate` body without its `rid`, encoded once for all attempts.

    The ids of a 32k prompt are 200 kB, and fresh memory costs more than copying. So only the latest body is kept.
    """

    def __init__(self, *parts: bytes) -> None:
        """Take the parts of the JSON object after its `rid`."""
        self._parts = parts
        self._latest, self._start = b"", 0

    def with_rid(self, rid: str) -> bytes:
        """Return the body of one attempt."""
        head = b'{"rid":' + orjson.dumps(rid) + b","
        parts = (memoryview(self._latest)[self._start :],) if self._latest else self._parts
        self._latest, self._start, self._parts = b"".join((head, *parts)), len(head), ()
        return self._latest


def encode_generate(
    input_ids: Sequence[int] | EncodedIds,
    sampling_params: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
    *,
    vocab_size: int | None = None,
) -> GenerateBody:
    """Encode a `/generate` body.

    Args:
        input_ids: See `encode_token_ids`; `EncodedIds` are not checked again.
        sampling_params: SGLang sampling parameters; keys of nested objects may be ints (`logit_bias={5: 1.0}`).
        fields: Further top-level keys of `/generate`; a `rid` among them is left out.
        vocab_size: See `encode_token_ids`.

    Raises:
        ValueError: A token id or what ends the answer is invalid, several samples or a stream are requested, or JSON
            cannot hold a value.
    """
    if sampling_params is not None and not isinstance(sampling_params, Mapping):
        raise ValueError(
            f"sampling_params must be a mapping (one request, one sample), got {type(sampling_params).__name__}"
        )
    sampling = dict(sampling_params or {})
    if sampling.get("n") not in (None, 1):
        raise ValueError(
            f"sampling_params n={sampling['n']!r}: a request returns one sample, send one request for each"
        )
    if fields.get("stream"):
        raise ValueError("stream=True: this client never streams; omit `stream`")
    check_stops(sampling)
    rest = {**fields, "sampling_params": sampling, "stream": False}
    rest.pop("rid", None)
    try:
        encoded = orjson.dumps(rest, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise ValueError(f"the request cannot be written as JSON: {error}") from error
    if not isinstance(input_ids, EncodedIds):
        return GenerateBody(b'"input_ids":', encode_token_ids(input_ids, vocab_size), b",", encoded[1:])
    if not input_ids.count:
        raise ValueError(NO_IDS)
    first, *others = input_ids.pieces
    more = chain.from_iterable((b",", piece) for piece in others)
    return GenerateBody(b'"input_ids":[', first, *more, b"],", encoded[1:])


def check_stops(sampling_params: Mapping[str, Any]) -> None:
    """Check what ends an answer. SGLang 0.5.23 does not: it dies of some values, and answers HTTP 500 to others.

    Args:
        sampling_params: SGLang sampling parameters. Values of other types are left to the server.

    Raises:
        ValueError: A stop token is negative, a stop string is empty, or a pattern is invalid for this Python.
    """
    token_ids = sampling_params.get("stop_token_ids")
    for token_id in token_ids if isinstance(token_ids, Iterable) else ():
        if isinstance(token_id, Integral) and int(token_id) < 0:
            raise ValueError(f"sampling_params['stop_token_ids'] has {token_id}: token ids are ints from 0")
    for name in ("stop", "stop_regex"):
        given = sampling_params.get(name)
        for text in given if isinstance(given, list | tuple) else [given]:
            if text == "":
                raise ValueError(f"sampling_params[{name!r}] has an empty text, which ends every answer at once")
            if name == "stop_regex" and isinstance(text, str):
                _check_pattern(text)


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"sampling_params['stop_regex'] has the invalid pattern {pattern!r}: {error}") from error


class UnfitAnswerError(SGLangDecodingError):
    """The body is complete JSON but lacks what the endpoint returns, so a retry is unlikely to help."""


def decode_object(body: bytes, url: str) -> dict[str, Any]:
    """Decode a body that must be a JSON object.

    Raises:
        SGLangDecodingError: It is something else. The message shows the beginning of the body.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise SGLangDecodingError(
            f"{url} returned a body that is not JSON ({error}): {_excerpt(body)}; is this an SGLang server?"
        ) from error
    if not isinstance(value, dict):
        raise UnfitAnswerError(
            f"{url} returned a JSON {type(value).__name__} instead of an object: {_excerpt(body)}; is this an SGLang "
            "server?"
        )
    return value


FLAT_LOGPROBS = "flat_token_logprobs"
"""Key in `meta_info` for the `output_token_logprobs` of a response that was decoded with `flat_logprobs`."""

_LOGPROBS = b'"output_token_logprobs":'
_NO_STRUCTURE = bytes(set(range(256)) - set(b'[],"{}'))


def decode_generation(body: bytes, url: str, *, flat_logprobs: bool = False) -> dict[str, Any]:
    """Decode a `/generate` response: an object with `output_ids` and `meta_info.finish_reason`, otherwise unmodified.

    Args:
        body: The response.
        url: Where it came from.
        flat_logprobs: Whether `meta_info` may have the logprobs as one list `[logprob, id, None, ...]` at
            `FLAT_LOGPROBS` instead. A list per token takes as long to collect as it takes to decode.

    Raises:
        SGLangDecodingError: It is something else. The message names what is missing.
    """
    response = (_decode_flat(body) if flat_logprobs else None) or decode_object(body, url)
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
            f"{url} responded without {' and '.join(missing)}: {_excerpt(body)}; is this an SGLang server?"
        )
    return response


def _decode_flat(body: bytes) -> dict[str, Any] | None:
    """Decode a complete response with its logprobs flat; None if it is anything else, or its rows hold texts.

    The value of the key is `[[x, y, z], ...]` if that is what remains of it without everything but brackets, commas,
    braces and quotes: then no row holds a list, an object or a text. Without brackets inside, it is one flat list.
    """
    start = body.find(_LOGPROBS)
    begin = start + len(_LOGPROBS)
    rows = body[begin : body.find(b"]]", begin) + 2]
    structure = rows.translate(None, _NO_STRUCTURE)
    is_key = start > 0 and body[start - 1] != ord("\\")
    if not is_key or structure != b"[[,,]" + b",[,,]" * (len(structure) // 5 - 1) + b"]":
        return None
    values = rows.translate(None, b"[]")
    try:
        response = orjson.loads(
            b"".join((body[:start], b'"%s":[' % FLAT_LOGPROBS.encode(), values, b"]", body[begin + len(rows) :]))
        )
        meta = response["meta_info"]  # the key may also be that of another object
        is_complete = FLAT_LOGPROBS in meta and meta["finish_reason"]["type"] != "abort"
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        return None
    return response if is_complete else None


def http_error(method: str, url: str, status: int, body: bytes, *, location: str | None = None) -> SGLangHTTPError:
    """Return the exception for an HTTP response that is not a success.

    Args:
        method: HTTP method of the request.
        url: Full URL of the request.
        status: HTTP status code.
        body: Body of the response.
        location: Target of a redirect; None for none.
    """
    text = body.decode("utf-8", "replace")
    detail = error_message(text)[:MAX_BODY_CHARS]
    text = text[:MAX_BODY_CHARS]
    message = f"{method} {url}: HTTP {status}" + (f": {detail}" if detail else "")
    if status == 400 and _CONTEXT_LENGTH.search(detail):
        return SGLangContextLengthError(message, status=status, body=text)
    if status in (429, 503):
        return SGLangThrottledError(message, status=status, body=text)
    if status in NO_SUCH_ENDPOINT and not (status == 501 and text.startswith("{")):  # so a scripted server refuses
        message += "; no such endpoint: this is not an SGLang server, or base_url has a wrong host, port or path"
    elif 300 <= status < 400:
        message += f"; it redirects to {location}: pass the address of the server itself as base_url"
    return SGLangHTTPError(message, status=status, body=text)


def error_message(body: str) -> str:
    """Return the server's message in an error body.

    Reads `{"error": {"message"}}`, `{"error": "..."}`, `{"object": "error", "message"}`, `{"detail"}`, the routers'
    `{"error": {"type", "code", "message"}}` and plain text.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return " ".join(body.split())[:EXCERPT_CHARS]
    if not isinstance(value, dict):
        return body[:EXCERPT_CHARS]
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
    return "input_ids cannot be written as a JSON list of ints"  # pragma: no cover - the loop finds the bad id


def _excerpt(body: bytes) -> str:
    return repr(body[: 4 * EXCERPT_CHARS].decode("utf-8", "replace")[:EXCERPT_CHARS]) if body else "an empty body"
