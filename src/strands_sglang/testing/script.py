"""What a test says and sees: the answers that it scripts, and the log of what was asked and answered.

Log entries are compact (ids as packed 32-bit integers, responses as the bytes that were sent), so that a run of
thousands of long requests can be kept whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import orjson

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
