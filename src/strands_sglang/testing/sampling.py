"""Scripted answers and logged requests, and the sampling of an answer by SGLang's stop rules.

The log is compact (packed 32-bit ids, responses as bytes), so that a run of thousands of long requests fits in memory.
At each token, a stop string precedes a stop token, and a stop token precedes the length limit. Output ids include the
stop token; the text excludes it unless `no_stop_trim` is set. Routed experts have the format of
`meta_info["routed_experts"]` of SGLang 0.5.23.
"""

from __future__ import annotations

import base64
import re
from array import array
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, product
from typing import Any, Literal

import orjson

from ..templates.encoder import get_encoder
from .validation import CheckedRequest

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class ScriptedAnswer:
    """One scripted answer: the tokens that the "model" samples for one request.

    The request's limits apply, as on a real server: `max_new_tokens`, the context, a stop token or a stop string inside
    the answer cut it off.

    Attributes:
        text: Text of the answer, tokenized with the server's tokenizer. Special tokens in it become their ids.
        token_ids: Exact ids instead of a text, canonical or not; shape `(T,)`.
        finish_reason: "stop" appends a stop token unless the answer ends with one. "length" ends the answer as if
            `max_new_tokens` were reached. "abort" ends it as if the request had been aborted.
        logprobs: Logprob of each token; the one of an appended stop token is optional. None for the server's `logprob`
            function.
        stop_token_id: Stop token to append; None for the server's first.
        latency_s: Seconds until the answer is complete. An abort ends the wait with an empty answer.
    """

    text: str = ""
    token_ids: Sequence[int] | None = None
    finish_reason: FinishReason = "stop"
    logprobs: Sequence[float] | None = None
    stop_token_id: int | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Check the combination of fields.

        Raises:
            ValueError: Both text and token ids are given, or the finish reason is unknown.
        """
        if self.text and self.token_ids is not None:
            raise ValueError("pass `text` or `token_ids`, not both")
        if self.finish_reason not in ("stop", "length", "abort"):
            raise ValueError(f"finish_reason={self.finish_reason!r} is not one of 'stop', 'length', 'abort'")


@dataclass(frozen=True, eq=False)
class ScriptedRequest:
    """One `/generate` request that the server accepted.

    Attributes:
        index: Position in `ScriptedSGLang.requests`, from 0.
        rid: Request id, from the client or the server.
        sampling_params: Sampling parameters as sent.
        body: JSON object of the request as sent, without `input_ids`.
        headers: HTTP headers, with lowercase names.
        cached_tokens: Number of prompt tokens in the prefix cache.
        packed_ids: Prompt as 32-bit ids, 4 bytes each.
        decode: Function that decodes token ids.
    """

    index: int
    rid: str
    sampling_params: Mapping[str, Any]
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    cached_tokens: int
    packed_ids: bytes = field(repr=False)
    decode: Callable[[list[int]], str] = field(repr=False)

    @property
    def input_ids(self) -> list[int]:
        """Token ids of the prompt, shape `(T,)`; a new list at every access."""
        return array("i", self.packed_ids).tolist()

    @property
    def is_prefill(self) -> bool:
        """Whether it asks for no output, as a model does once for calls that start together with one prompt."""
        return self.sampling_params.get("max_new_tokens") == 0

    @cached_property
    def text(self) -> str:
        """Decoded prompt, including special tokens."""
        return self.decode(self.input_ids)


@dataclass(frozen=True)
class ScriptedResponse:
    """One HTTP response: what the server sent, or as an answer of the script or an override, exactly what to send.

    Attributes:
        status: HTTP status code.
        content: Body, as bytes.
        headers: HTTP headers; the transport adds the length of the body.
        broken_after: Number of bytes of the body that are sent before the connection breaks; 0 breaks it before the
            headers, None not at all.
    """

    status: int = 200
    content: bytes = field(default=b"", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    broken_after: int | None = None

    def __post_init__(self) -> None:
        """Check the place of the break.

        Raises:
            ValueError: `broken_after` is not inside the body.
        """
        if self.broken_after and not 0 < self.broken_after < len(self.content):
            raise ValueError(f"broken_after={self.broken_after} is not inside a body of {len(self.content)} bytes")

    @property
    def body(self) -> dict[str, Any]:
        """Body as a JSON object; parsed at every access."""
        result: dict[str, Any] = orjson.loads(self.content)
        return result


@dataclass(frozen=True)
class ScriptedRefusal:
    """A `/generate` request that the server rejected, as SGLang would.

    It uses up no answer and is not in `ScriptedSGLang.requests`.

    Attributes:
        status: HTTP status code; 4xx, or 501 for a request that the scripted server does not emulate.
        message: Error message.
        request: Body of the request as sent.
    """

    status: int
    message: str
    request: bytes = field(repr=False)


@dataclass(frozen=True)
class ScriptedFault:
    """A failure of one request instead of an answer.

    Nothing is sampled, and the request counts as accepted.

    Attributes:
        kind: "status" is an HTTP error with `status` and `message`. "drop" breaks the connection before the response,
            "half" in the middle of its body. "garbage" is status 200 with `message` as the body, JSON or not.
        status: HTTP status of "status".
        message: Error message of "status", or body of "garbage".
        headers: HTTP headers of "status", such as `Retry-After`.
        latency_s: Seconds until the failure.
    """

    kind: Literal["status", "drop", "half", "garbage"] = "status"
    status: int = 503
    message: str = "scripted fault"
    headers: Mapping[str, str] = field(default_factory=dict)
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ValueError: The kind is unknown, or the status is not an error.
        """
        if self.kind not in ("status", "drop", "half", "garbage"):
            raise ValueError(f"kind={self.kind!r} is not one of 'status', 'drop', 'half', 'garbage'")
        if not 400 <= self.status <= 599:
            raise ValueError(f"status={self.status!r} is not an HTTP error")


Answer = str | ScriptedAnswer | ScriptedFault | ScriptedResponse
"""An answer of the script: a text, a `ScriptedAnswer`, a `ScriptedFault`, or a `ScriptedResponse`."""
AnswerFunction = Callable[[ScriptedRequest], Answer | Awaitable[Answer]]
"""A function, sync or async, that computes an answer from the request."""


class ScriptExhaustedError(Exception):
    """There were more requests than scripted answers."""


@dataclass(frozen=True)
class ScriptedExperts:
    """The experts of a scripted mixture-of-experts model.

    Attributes:
        layers: Number of layers.
        experts: Number of experts per layer.
        top_k: Number of experts that compute each token.
    """

    layers: int = 3
    experts: int = 8
    top_k: int = 2

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: A number is below 1, or `top_k` exceeds `experts`.
        """
        if min(self.layers, self.top_k) < 1 or self.top_k > self.experts:
            raise ValueError(f"{self!r} is not a model: it needs at least one layer, and 1 <= top_k <= experts")

    def chosen(self, position: int, token_id: int) -> list[int]:
        """Return the experts of one token, shape `(layers * top_k,)`: pseudo-random, distinct within a layer.

        They depend only on the token's position and id, so a test can detect shifted or foreign rows.

        Args:
            position: Index in prompt plus answer, from 0.
            token_id: Id of the token.
        """
        firsts = (mixed_bits(position * self.layers + layer, token_id) for layer in range(self.layers))
        return [(first + i) % self.experts for first, i in product(firsts, range(self.top_k))]

    def encoded(self, token_ids: Sequence[int], start: int) -> str:
        """Return the value in a response: base64 of the rows of all tokens from `start` on, except the last.

        Args:
            token_ids: Prompt and answer, shape `(T,)`.
            start: First row.
        """
        rows = array("i")
        for position in range(start, len(token_ids) - 1):
            rows.extend(self.chosen(position, token_ids[position]))
        return base64.b64encode(rows.tobytes()).decode("ascii")


LogprobFunction = Callable[[int, int], float]

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def scripted_logprob(position: int, token_id: int) -> float:
    """Return the default logprob of a token: pseudo-random, in `[-8, 0)`, exact in float32.

    It depends only on the token's position and id, so a test can detect a shifted or foreign logprob.

    Args:
        position: Index in prompt plus answer, from 0.
        token_id: Id of the token.
    """
    return -((mixed_bits(position, token_id) + 1) / (1 << 21))


def mixed_bits(position: int, token_id: int) -> int:
    """Return 24 pseudo-random bits, determined by a position and a token."""
    mixed = (position * 0x9E3779B1 + token_id * 0x85EBCA6B + 0x27D4EB2F) & 0xFFFFFFFF
    return (((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF) >> 8


@dataclass(frozen=True)
class Sampled:
    """The sampled tokens of one request.

    Attributes:
        output_ids: Sampled ids, including the stop token; shape `(T,)`.
        logprobs: Logprobs of the sampled ids, shape `(T,)`; empty if not requested.
        text: Decoded answer.
        finish_reason: Finish reason in the response's format.
        prompt_logprobs: Entries `[logprob, token id, null]` from `logprob_start_len` on; the first has no logprob.
        sampling_masks: Ids that each token was sampled from; None if not requested.
    """

    output_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: dict[str, Any]
    prompt_logprobs: list[list[float | int | None]]
    sampling_masks: list[list[int]] | None


class Sampler:
    """Turns answers into sampled tokens for one served model."""

    def __init__(
        self, tokenizer: Any, stop_token_ids: Collection[int], logprob: LogprobFunction, vocab_size: int
    ) -> None:
        """Initialize with a tokenizer, the stop tokens (answers end with the first) and a logprob function.

        Raises:
            ValueError: There is no stop token.
        """
        if not stop_token_ids:
            raise ValueError("the tokenizer has no eos token; pass `stop_token_ids`")
        self.tokenizer = get_encoder(tokenizer).tokenizer
        self._stop_ids = tuple(stop_token_ids)
        self._logprob = logprob
        self._vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def sample(self, answer: Answer, request: CheckedRequest, *, aborted: bool = False) -> Sampled:
        """Sample an answer under the limits of its request.

        Args:
            answer: Whole answer, or with `aborted` the part sampled so far.
            request: Request with limits, stop conditions and requested data.
            aborted: Whether the request was aborted, regardless of the answer.

        Raises:
            ValueError: The number of the answer's logprobs does not match its tokens.
            TypeError: The answer is neither a str nor a `ScriptedAnswer`.
        """
        if isinstance(answer, str):
            answer = ScriptedAnswer(answer)
        if not isinstance(answer, ScriptedAnswer):
            raise TypeError(f"an answer is a str or a ScriptedAnswer, not {answer!r}")
        ids = self.encode(answer.text) if answer.token_ids is None else list(answer.token_ids)
        stop = self._stop_ids[0] if answer.stop_token_id is None else answer.stop_token_id
        if answer.finish_reason == "stop" and not aborted and (not ids or ids[-1] not in (stop, *self._stop_ids)):
            ids.append(stop)
        end, finish_reason = self._end(ids, request)
        if finish_reason is None:
            cut = aborted or answer.finish_reason == "abort"
            finish_reason = dict(ABORTED) if cut else {"type": "length", "length": len(ids)}
        output_ids, start = ids[:end], request.logprob_start_len
        prompt_logprobs: list[Any] = []
        if start >= 0:
            for position, token_id in enumerate(request.input_ids[start:], start):
                logprob = None if position == start else _float32(self._logprob(position, token_id))
                prompt_logprobs.append([logprob, token_id, None])
        return Sampled(
            output_ids=output_ids,
            logprobs=self._logprobs(answer, ids, len(request.input_ids))[:end]
            if request.asks_for("return_logprob")
            else [],
            text=self._text(output_ids, finish_reason, request.sampling_params),
            finish_reason=finish_reason,
            prompt_logprobs=prompt_logprobs,
            sampling_masks=self._sampling_masks(output_ids, request)
            if request.asks_for("return_sampling_mask")
            else None,
        )

    def _sampling_masks(self, output_ids: list[int], request: CheckedRequest) -> list[list[int]]:
        """Return the ids that each token was sampled from: itself, then pseudo-random others within top-k."""
        params = request.sampling_params
        top_k = 1 if params.get("temperature") == 0 else min(params.get("top_k") or 1, self._vocab_size)
        truncated = (params.get("top_p") or 1.0) < 1.0 or (params.get("min_p") or 0.0) > 0.0
        masks = []
        for place, token_id in enumerate(output_ids, len(request.input_ids)):
            bits = mixed_bits(place, token_id)
            count = 1 + bits % top_k if truncated else top_k
            others = ((token_id + 1 + bits + i) % self._vocab_size for i in range(self._vocab_size))
            masks.append([token_id, *islice((other for other in others if other != token_id), count - 1)])
        return masks

    def _end(self, ids: list[int], request: CheckedRequest) -> tuple[int, dict[str, Any] | None]:
        """Return the number of sampled tokens and the finish reason; no reason if the answer simply ends."""
        params = request.sampling_params
        candidates: list[tuple[int, dict[str, Any] | None]] = []  # at the same token the first one wins
        stop_string = self._first_stop_string(ids, params)
        if stop_string is not None:
            candidates.append((stop_string[0], {"type": "stop", "matched": stop_string[1]}))
        if not params.get("ignore_eos"):
            stop_ids = {*self._stop_ids, *(params.get("stop_token_ids") or ())}
            position = next((i for i, token_id in enumerate(ids) if token_id in stop_ids), None)
            if position is not None:
                candidates.append((position + 1, {"type": "stop", "matched": ids[position]}))
        if len(ids) >= request.max_new_tokens:
            candidates.append((request.max_new_tokens, {"type": "length", "length": request.max_new_tokens}))
        return min(candidates, key=lambda candidate: candidate[0], default=(len(ids), None))

    def _first_stop_string(self, ids: list[int], params: dict[str, Any]) -> tuple[int, str] | None:
        """Return the first stop string or pattern, and the number of tokens up to its end."""
        found: list[tuple[int, str]] = []
        for key in ("stop", "stop_regex"):
            value = params.get(key) or []
            for pattern in [value] if isinstance(value, str) else value:
                expression = re.compile(pattern if key == "stop_regex" else re.escape(pattern))
                if expression.search(self.decode(ids)):
                    found.append((self._tokens_until(expression, ids), pattern))
        return min(found, key=lambda item: item[0], default=None)

    def _tokens_until(self, expression: re.Pattern[str], ids: list[int]) -> int:
        counts = range(1, len(ids))  # all tokens if none of these
        return 1 + bisect_left(counts, True, key=lambda count: expression.search(self.decode(ids[:count])) is not None)

    def _logprobs(self, answer: ScriptedAnswer, ids: list[int], prompt_length: int) -> list[float]:
        values = [] if answer.logprobs is None else list(answer.logprobs)
        missing = len(ids) - len(values)
        if answer.logprobs is not None and missing not in ((0, 1) if answer.finish_reason == "stop" else (0,)):
            raise ValueError(
                f"the scripted answer has {len(ids)} tokens (with its stop token) and {len(values)} logprobs"
            )
        first = prompt_length + len(values)
        values += [self._logprob(first + i, token_id) for i, token_id in enumerate(ids[len(values) :])]
        return [_float32(value) for value in values]

    def _text(self, output_ids: list[int], finish_reason: dict[str, Any], params: dict[str, Any]) -> str:
        matched = finish_reason.get("matched")
        keep_stop = params.get("no_stop_trim") or False
        skip_special = params.get("skip_special_tokens")
        if isinstance(matched, int) and not keep_stop:
            output_ids = output_ids[:-1]
        text = self.decode(output_ids, skip_special_tokens=True if skip_special is None else skip_special)
        if isinstance(matched, str) and matched in text:
            start = text.index(matched)
            text = text[: start + len(matched)] if keep_stop else text[:start]
        return text


def _float32(value: float) -> float:
    """Round to float32, as a real server's logprobs are."""
    return array("f", [value])[0]
