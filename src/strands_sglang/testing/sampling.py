"""What a test says and sees, and from a scripted answer to sampled tokens with SGLang's rules for where one ends.

Log entries are compact (ids as packed 32-bit integers, responses as the bytes that were sent), so that a run of
thousands of long requests can be kept whole. At every token, a stop string beats a stop token, and a stop token beats
the length limit. Output ids keep the stop token; the text leaves it out unless `no_stop_trim` is set. The format of
routed experts is that of `meta_info["routed_experts"]` of a real SGLang 0.5.23.
"""

from __future__ import annotations

import base64
import re
from array import array
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import orjson

from ..templates.encoder import get_encoder
from .validation import CheckedRequest

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class ScriptedAnswer:
    """One scripted answer: what the "model" samples for one request.

    The request has the last word, as on a real server: `max_new_tokens`, the context, a stop token or a stop string
    inside the answer cut it short.

    Attributes:
        text: Text of the answer, tokenised with the server's tokenizer (special tokens in it become their ids).
        token_ids: The exact ids instead of a text, canonical or not; shape (T,).
        finish_reason: "stop": a stop token is appended unless the answer ends with one. "length": ends here as if
            `max_new_tokens` were reached. "abort": ends here as if the request had been aborted.
        logprobs: Logprob of each token, that of an appended stop token optional; default: the server's `logprob`.
        stop_token_id: The stop token to append; default: the server's first one.
        latency_s: Seconds until the answer is there; an abort ends the wait with an empty answer.
    """

    text: str = ""
    token_ids: Sequence[int] | None = None
    finish_reason: FinishReason = "stop"
    logprobs: Sequence[float] | None = None
    stop_token_id: int | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            ValueError: Both text and token ids, or an unknown finish reason.
        """
        if self.text and self.token_ids is not None:
            raise ValueError("give `text` or `token_ids`, not both")
        if self.finish_reason not in ("stop", "length", "abort"):
            raise ValueError(f"finish_reason={self.finish_reason!r} is none of 'stop', 'length', 'abort'")


@dataclass(frozen=True, eq=False)
class ScriptedRequest:
    """One `/generate` request that the server accepted.

    Attributes:
        index: Position in `ScriptedSGLang.requests`, from 0.
        rid: Request id, the client's own or made up by the server.
        sampling_params: As sent.
        body: The request's JSON object as sent, without "input_ids".
        headers: HTTP headers, names in lower case.
        cached_tokens: How many prompt tokens the prefix cache held.
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
        """The prompt's token ids, shape (T,); a new list at every access."""
        return array("i", self.packed_ids).tolist()

    @cached_property
    def text(self) -> str:
        """The prompt decoded, special tokens included."""
        return self.decode(self.input_ids)


@dataclass(frozen=True)
class ScriptedResponse:
    """What the server answered to an accepted request.

    Attributes:
        status: HTTP status code.
        content: The body's bytes.
    """

    status: int
    content: bytes = field(repr=False)

    @property
    def body(self) -> dict[str, Any]:
        """The body as a JSON object; parsed at every access."""
        result: dict[str, Any] = orjson.loads(self.content)
        return result


@dataclass(frozen=True)
class ScriptedRefusal:
    """A `/generate` request that the server refused with a 4xx; it used up no answer and is not among the `requests`.

    Attributes:
        status: HTTP status code.
        message: The error's text.
        request: The request's body as it was sent.
    """

    status: int
    message: str
    request: bytes = field(repr=False)


@dataclass(frozen=True)
class ScriptedFault:
    """What goes wrong with one request, in place of an answer: nothing is sampled, and the request counts as accepted.

    Attributes:
        kind: "status": an HTTP error with `status` and `message`. "drop": the connection breaks before an answer.
            "half": it breaks in the middle of the body of a complete answer. "garbage": status 200 with `message` as
            the body, which need not be JSON.
        status: HTTP status of "status".
        message: Text of the error, or the body of "garbage".
        headers: HTTP headers of "status", such as `Retry-After`.
        latency_s: Seconds until it happens.
    """

    kind: Literal["status", "drop", "half", "garbage"] = "status"
    status: int = 503
    message: str = "scripted fault"
    headers: Mapping[str, str] = field(default_factory=dict)
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            ValueError: An unknown kind, or a status that is no error.
        """
        if self.kind not in ("status", "drop", "half", "garbage"):
            raise ValueError(f"kind={self.kind!r} is none of 'status', 'drop', 'half', 'garbage'")
        if not 400 <= self.status <= 599:
            raise ValueError(f"status={self.status!r} is no HTTP error")


Answer = str | ScriptedAnswer | ScriptedFault
AnswerFunction = Callable[[ScriptedRequest], Answer | Awaitable[Answer]]


class ScriptExhaustedError(Exception):
    """More requests came than answers were scripted."""


@dataclass(frozen=True)
class ScriptedExperts:
    """The experts that a scripted model has, if it is to have any.

    Attributes:
        layers: Number of layers.
        experts: Experts in each layer.
        top_k: How many of them compute a token.
    """

    layers: int = 3
    experts: int = 8
    top_k: int = 2

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            ValueError: A number below 1, or more experts per token than there are.
        """
        if min(self.layers, self.top_k) < 1 or self.top_k > self.experts:
            raise ValueError(f"{self!r} is no model: at least one layer, and 1 <= top_k <= experts")

    def chosen(self, position: int, token_id: int) -> list[int]:
        """The experts of one token, shape (layers * top_k,): pseudo-random, different ones within a layer.

        They depend on nothing but where the token stands and which it is, so a test can tell shifted or foreign rows.

        Args:
            position: Index in prompt plus answer, from 0.
            token_id: The token.
        """
        firsts = (mixed_bits(position * self.layers + layer, token_id) for layer in range(self.layers))
        return [(first + i) % self.experts for first in firsts for i in range(self.top_k)]

    def encoded(self, token_ids: Sequence[int], start: int) -> str:
        """What a response carries: base64 of the rows of all tokens from `start` on but the last.

        Args:
            token_ids: Prompt and answer, shape (T,).
            start: First row.
        """
        rows = array("i")
        for position in range(start, len(token_ids) - 1):
            rows.extend(self.chosen(position, token_ids[position]))
        return base64.b64encode(rows.tobytes()).decode("ascii")


LogprobFunction = Callable[[int, int], float]

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def scripted_logprob(position: int, token_id: int) -> float:
    """The logprob that a scripted server gives to a token by default: pseudo-random, in [-8, 0), exact in float32.

    It depends on nothing but where the token stands and which it is, so a test can tell a shifted or foreign logprob
    from the right one.

    Args:
        position: Index in prompt plus answer, from 0.
        token_id: The token.
    """
    return -((mixed_bits(position, token_id) + 1) / (1 << 21))


def mixed_bits(position: int, token_id: int) -> int:
    """24 pseudo-random bits that follow from a position and a token."""
    mixed = (position * 0x9E3779B1 + token_id * 0x85EBCA6B + 0x27D4EB2F) & 0xFFFFFFFF
    return (((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF) >> 8


@dataclass(frozen=True)
class Sampled:
    """What one request sampled.

    Attributes:
        output_ids: Sampled ids with the stop token; shape (T,).
        logprobs: Their logprobs, shape (T,); empty if they were not asked for.
        text: Decoded answer.
        finish_reason: As the response tells it.
        prompt_logprobs: Entries `[logprob, token id, null]` from `logprob_start_len` on; the first has no logprob.
        sampling_masks: The ids that each token was sampled from; None if they were not asked for.
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
        """Keep the tokenizer, the model's stop tokens (the first is the one that answers end with) and the logprobs.

        Raises:
            ValueError: There is no stop token.
        """
        if not stop_token_ids:
            raise ValueError("the tokenizer has no eos token; give `stop_token_ids`")
        self.tokenizer = get_encoder(tokenizer).tokenizer
        self._stop_ids = tuple(stop_token_ids)
        self._logprob = logprob
        self._vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def sample(self, answer: Answer, request: CheckedRequest, *, aborted: bool = False) -> Sampled:
        """Sample an answer under the limits of its request.

        Args:
            answer: The whole answer, or with `aborted` the part that was sampled until then.
            request: Limits, stop conditions and whether logprobs are wanted.
            aborted: The request was aborted, whatever the answer says.

        Raises:
            ValueError: The answer's logprobs do not belong to its tokens.
            TypeError: The answer is neither a str nor a ScriptedAnswer.
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
        return Sampled(
            output_ids=output_ids,
            logprobs=self._logprobs(answer, ids, len(request.input_ids))[:end]
            if request.asks_for("return_logprob")
            else [],
            text=self._text(output_ids, finish_reason, request.sampling_params),
            finish_reason=finish_reason,
            prompt_logprobs=[
                [None if position == start else _float32(self._logprob(position, token_id)), token_id, None]
                for position, token_id in enumerate(request.input_ids[start:], start)
            ]
            if start >= 0
            else [],
            sampling_masks=self._sampling_masks(output_ids, request)
            if request.asks_for("return_sampling_mask")
            else None,
        )

    def _sampling_masks(self, output_ids: list[int], request: CheckedRequest) -> list[list[int]]:
        """The ids that each token was sampled from: itself first, and pseudo-random others, as many as top-k keeps."""
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
        """How many tokens are sampled and why it ends there; no reason if the answer simply runs out."""
        params = request.sampling_params
        candidates: list[tuple[int, dict[str, Any] | None]] = []  # of those that end it at one token the first wins
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
        """Number of tokens after which the first stop string or pattern has appeared, and which it was."""
        found: list[tuple[int, str]] = []
        for key in ("stop", "stop_regex"):
            value = params.get(key) or []
            for pattern in [value] if isinstance(value, str) else value:
                expression = re.compile(pattern if key == "stop_regex" else re.escape(pattern))
                if expression.search(self.decode(ids)):
                    found.append((self._tokens_until(expression, ids), pattern))
        return min(found, key=lambda item: item[0], default=None)

    def _tokens_until(self, expression: re.Pattern[str], ids: list[int]) -> int:
        counts = range(1, len(ids))  # if none of these, all
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
    """The float32 nearest to a value: logprobs of a real server are float32."""
    return array("f", [value])[0]
