"""An answer in several parts: requests that the server aborted, and those that went on from their tokens.

A weight update or a pause aborts what runs on the server; the aborted request comes back with what it had sampled. With
`on_abort="resume"` the call goes on from there: the next request's prompt is the call's prompt and all that was sampled
so far, and it may sample what is left of the same token budget. The parts are joined into one `Generation`, in which
every token keeps the logprob, the version of the weights, the routed experts and the sampling mask that it was sampled
with.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ..exceptions import SGLangDecodingError
from .generation import TOP_P_KEYS, Generation, SamplingMask, VersionSpan, check_routed_rows, joined_mask

_BUDGETS = ("max_new_tokens", "min_new_tokens")
_SERVERS_BUDGET = 128
"""What SGLang takes for `max_new_tokens` where a request has none."""


def sampling_params_of_the_rest(
    sampling_params: Mapping[str, Any], sampled: int, begun: Sequence[str] = ()
) -> dict[str, Any]:
    """The sampling parameters of a request that goes on behind `sampled` tokens of the same answer.

    Args:
        sampling_params: Those of the whole answer.
        sampled: How many tokens it has.
        begun: What is left of stop strings that these tokens have begun.
    """
    if not sampled:
        return dict(sampling_params)
    rest = dict(sampling_params)
    if rest.get("max_new_tokens") is None and sampled < _SERVERS_BUDGET:
        rest["max_new_tokens"] = _SERVERS_BUDGET
    for name in _BUDGETS:
        if rest.get(name) is not None:
            rest[name] = max(rest[name] - sampled, 0)
    if rest.get("min_new_tokens") and rest.get("max_new_tokens") is not None:
        rest["min_new_tokens"] = min(rest["min_new_tokens"], rest["max_new_tokens"])
    if begun:
        rest["stop"] = [*stop_strings(sampling_params), *begun]
    return rest


def stop_strings(sampling_params: Mapping[str, Any]) -> list[str]:
    """The stop strings of a request."""
    return _texts(sampling_params.get("stop"))


def stop_patterns(sampling_params: Mapping[str, Any]) -> list[str]:
    """The regular expressions that end an answer of a request."""
    return _texts(sampling_params.get("stop_regex"))


def _texts(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def begun_stop_strings(stops: Sequence[str], text: str) -> list[str]:
    """What is left to come of stop strings that have begun at the end of `text`.

    A server looks for stop strings in what a request samples, so one that an abort has split would go unnoticed.
    """
    begun = (stop[count:] for stop in stops for count in range(1, len(stop)) if text.endswith(stop[:count]))
    return [rest for rest in dict.fromkeys(begun) if rest not in stops]


def join_parts(parts: Sequence[Generation]) -> Generation:
    """One answer from the parts of a call, the last of which tells how it ended.

    Args:
        parts: What the requests returned, in order, at least one; aborted ones may be empty.

    Raises:
        ValueError: There is no part.
        SGLangDecodingError: The routed experts of the parts are not those of the joined answer.
    """
    if not parts:
        raise ValueError("an answer needs at least one part")
    last = parts[-1]
    if len(parts) == 1:
        return last
    ran: list[Generation] = []
    spans: list[VersionSpan] = []
    sampled = prompt_tokens = 0
    for part in parts:
        if part.prompt_tokens:  # one that was aborted in the queue tells next to nothing
            ran.append(part)
            prompt_tokens = part.prompt_tokens - sampled
        spans += [VersionSpan(span.version, span.start + sampled, span.end + sampled) for span in part.weight_versions]
        sampled += part.completion_tokens
    has_logprobs = all(part.logprobs is not None or not part.output_ids for part in parts)
    joined = replace(
        last,
        output_ids=_joined("i", [part.output_ids for part in parts]),
        logprobs=_joined("d", [part.logprobs for part in parts if part.logprobs is not None]) if has_logprobs else None,
        prompt_tokens=prompt_tokens,
        cached_tokens=ran[0].cached_tokens if ran else last.cached_tokens,
        weight_versions=tuple(_merged(spans)),
        # Of later parts these would be those of tokens that this answer sampled.
        prompt_logprobs=ran[0].prompt_logprobs if ran else last.prompt_logprobs,
        resumed_ids=tuple(rid for part in parts for rid in (*part.resumed_ids, part.request_id))[:-1],
        routed_experts=_joined_experts(parts),
        sampling_mask=joined_mask((_kept_ids_or_none(part), part.completion_tokens) for part in parts),
        sampling_logprobs=_joined_sampling_logprobs(parts),
        latency_s=sum(part.latency_s for part in parts),
        meta_info={key: value for key, value in last.meta_info.items() if key not in TOP_P_KEYS},
    )
    check_routed_rows(joined)
    return joined


def _kept_ids_or_none(part: Generation) -> SamplingMask | None:
    try:
        return part.kept_ids()
    except ValueError:
        return None


def _joined_sampling_logprobs(parts: Sequence[Generation]) -> array[float] | None:
    if all(part.sampling_logprobs is None for part in parts):
        return None
    told = [(part.sampling_logprobs, part.completion_tokens) for part in parts]
    return _joined("d", [array("d", [math.nan]) * count if known is None else known for known, count in told])


def _joined(kind: str, arrays: Iterable[array[Any]]) -> array[Any]:
    return array(kind, chain.from_iterable(arrays))


def _merged(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Neighbouring spans of one version as one."""
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version and merged[-1].end == span.start:
            merged[-1] = merged[-1]._replace(end=span.end)
        else:
            merged.append(span)
    return merged


def _joined_experts(parts: Sequence[Generation]) -> str | None:
    """The rows of each part for the tokens that it added.

    Every part returns the rows of its whole prompt. Those of tokens that an earlier part had are left out: the weights
    may have changed since, and with them where these tokens go.
    """
    sampling = [part for part in parts if part.output_ids] or parts[-1:]
    if sampling[-1].routed_experts is not None and any(part.routed_experts is None for part in sampling):
        raise SGLangDecodingError(
            "the server aborted a request without its routed experts, which its tokens were sampled with; "
            'with on_abort="raise" such tokens are recorded without them'
        )
    told = [part for part in sampling if part.routed_experts is not None and part.routed_rows]
    if not told:
        return sampling[-1].routed_experts
    rows = b""
    width = 0
    for part in told:
        content = base64.b64decode(part.routed_experts or "")
        width = width or len(content) // part.routed_rows
        rows += content[len(rows) // width * (len(content) // part.routed_rows) :]
    return base64.b64encode(rows).decode()
