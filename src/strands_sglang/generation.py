"""What one `/generate` request returned, checked and typed.

Source of the format: SGLang 0.5.23 (`GenerateReqInput` and the tokenizer manager's response), with the keys that older
versions lack optional. Promise: a `Generation` is complete and consistent, or `SGLangDecodingError` is raised; nothing
is filled in.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .exceptions import SGLangDecodingError


@dataclass(frozen=True, eq=False)
class Generation:
    """The sampled tokens of one request and what the server said about them.

    Attributes:
        output_ids: Sampled ids, the stop token included; shape (T,).
        logprobs: Their logprobs under the sampling distribution before top-p and top-k, shape (T,); None if they were
            not asked for.
        finish_type: "stop", "length" or "abort".
        matched: For "stop": the stop token's id or the stop string that matched, else None.
        abort_message: For "abort": the server's message.
        prompt_tokens: Number of prompt tokens (0 if an aborted request never ran).
        cached_tokens: How many of them came from the server's prefix cache.
        weight_version: Version of the weights at the end of the request; None from servers that do not tell.
        prompt_logprobs: Logprobs of the last prompt tokens if they were asked for; None where unknown.
        request_id: The `rid` of the attempt that was answered.
        routed_experts: Base64 of int32 (rows, layers, top_k) if the server was asked for them and returned them.
        latency_s: Seconds from request to response, as the server measured it; 0.0 if it does not tell.
        meta_info: The server's whole `meta_info` without its per-token lists.
    """

    output_ids: array[int]
    logprobs: array[float] | None
    finish_type: str
    matched: int | str | None = None
    abort_message: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str | None = None
    prompt_logprobs: tuple[float | None, ...] = ()
    request_id: str = ""
    routed_experts: str | None = None
    latency_s: float = 0.0
    meta_info: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.output_ids)

    @property
    def stop_token_id(self) -> int | None:
        """The sampled token that ended the turn; None if it was cut off or ended at a stop string."""
        if self.finish_type != "stop" or not self.output_ids:
            return None
        last = self.output_ids[-1]
        return last if self.matched == last and not isinstance(self.matched, str) else None


_PER_TOKEN_KEYS = frozenset(
    {"input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs", "routed_experts"}
)


def read_generation(response: Mapping[str, Any], *, logprobs_expected: bool) -> Generation:
    """Check a `/generate` response and type it.

    Args:
        response: The server's JSON object.
        logprobs_expected: Whether `return_logprob` was asked for.

    Raises:
        SGLangDecodingError: A needed key is missing, or the logprobs do not belong to the returned ids.
    """
    try:
        meta: Mapping[str, Any] = response["meta_info"]
        output_ids = array("i", response["output_ids"])
        finish = meta["finish_reason"]
        finish_type = finish["type"]
    except (KeyError, TypeError, OverflowError) as error:
        raise SGLangDecodingError(
            f"the server's answer is not a complete /generate response: {error!r} is missing or of the wrong type"
        ) from error
    logprobs = None
    entries = meta.get("output_token_logprobs")
    if logprobs_expected and (entries or output_ids):
        logprobs = _read_logprobs(entries, output_ids)
    return Generation(
        output_ids=output_ids,
        logprobs=logprobs,
        finish_type=finish_type,
        matched=finish.get("matched"),
        abort_message=finish.get("message"),
        prompt_tokens=meta.get("prompt_tokens", 0),
        cached_tokens=meta.get("cached_tokens") or 0,
        weight_version=meta.get("weight_version"),
        prompt_logprobs=tuple(entry[0] for entry in meta.get("input_token_logprobs") or ()),
        request_id=meta.get("id", ""),
        routed_experts=meta.get("routed_experts"),
        latency_s=meta.get("e2e_latency") or 0.0,
        meta_info={key: value for key, value in meta.items() if key not in _PER_TOKEN_KEYS},
    )


def _read_logprobs(entries: Any, output_ids: array[int]) -> array[float]:
    """The logprobs of `[[logprob, token_id, text], ...]`, which must name the returned ids in their order."""
    if not isinstance(entries, list) or len(entries) != len(output_ids):
        count = len(entries) if isinstance(entries, list) else "no"
        raise SGLangDecodingError(
            f"the server returned {len(output_ids)} token ids with {count} logprobs, although logprobs were asked for; "
            "a proxy that drops `return_logprob` does this"
        )
    if any(entry[1] != token_id for entry, token_id in zip(entries, output_ids, strict=True)):
        raise SGLangDecodingError("the server's output_token_logprobs name other token ids than its output_ids")
    try:
        return array("d", (entry[0] for entry in entries))
    except TypeError as error:
        raise SGLangDecodingError(f"a logprob of a sampled token is not a number: {error}") from error
