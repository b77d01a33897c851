"""The response to one `/generate` request, checked and typed.

Source of the format: SGLang 0.5.23 (`GenerateReqInput` and the tokenizer manager's response); keys that older versions
lack are optional. A `Generation` is complete and consistent, or `SGLangDecodingError` is raised; nothing is filled in.

A response may come in several parts. A weight update or a pause aborts running requests, and an aborted request returns
the tokens it sampled. With `on_abort="resume"` the call continues from there: the next request's prompt is the call's
prompt plus all tokens sampled so far, and its token budget is what remains. The parts are joined into one `Generation`,
in which every token keeps the logprob, policy version, routed experts and sampling mask that it was sampled with.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from ..exceptions import SGLangDecodingError
from .wire import FLAT_LOGPROBS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


FINISH_TYPES = ("stop", "length", "abort")
"""Why sampling ended."""


class VersionSpan(NamedTuple):
    """A run of tokens that were sampled by one version of the weights.

    Attributes:
        version: Server's name of the version.
        start: Position of the first token.
        end: Position after the last token.
    """

    version: str
    start: int
    end: int


def clip_spans(spans: Iterable[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    """Return the spans of the tokens from `start` to `end`, relative to `start`."""
    clipped = (VersionSpan(s.version, max(s.start, start) - start, min(s.end, end) - start) for s in spans)
    return tuple(span for span in clipped if span.start < span.end)


def are_in_order(spans: Iterable[VersionSpan], count: int) -> bool:
    """Whether spans cover some of `count` tokens, in order and each at most once."""
    bounds = [0, *chain.from_iterable(span[1:] for span in spans), count]
    return bounds == sorted(bounds)


@dataclass(frozen=True)
class SamplingMask:
    """Token ids that could be sampled at each position, after grammar, penalties, top-k, top-p and min-p.

    Truncated sampling renormalizes over these ids. With them, a trainer computes the logprob under which the sampler
    really sampled, as `z[y] / T - logsumexp(z[ids] / T)`. SGLang's other logprobs are over the whole vocabulary. The
    rows of all tokens are concatenated.

    Attributes:
        token_ids: Ids of all rows, shape `(sum(lengths),)`. In SGLang's rows the most probable id comes first.
        lengths: Number of ids in each row, shape `(T,)`; 0 where unknown, or where nothing was sampled.
    """

    token_ids: array[int]
    lengths: array[int]

    @property
    def offsets(self) -> array[int]:
        """Start of each row, and the end of the last; shape `(T + 1,)`."""
        return array("q", accumulate(self.lengths, initial=0))

    def rows(self) -> Iterator[list[int]]:
        """Yield the ids of each token in turn; empty where unknown."""
        start = 0
        for length in self.lengths:
            yield self.token_ids[start : start + length].tolist()
            start += length

    def part(self, start: int, stop: int) -> SamplingMask:
        """Return the rows from `start` to `stop`."""
        before = sum(self.lengths[:start])
        lengths = self.lengths[start:stop]
        return SamplingMask(self.token_ids[before : before + sum(lengths)], lengths)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lengths)

    def __repr__(self) -> str:
        """Return the counts; the ids may be many."""
        return f"SamplingMask({len(self)} rows, {len(self.token_ids)} ids)"


def joined_mask(masks: Iterable[tuple[SamplingMask | None, int]]) -> SamplingMask | None:
    """Concatenate the masks of several pieces.

    Args:
        masks: Mask of each piece, with its number of tokens.

    Returns:
        The joined mask; None if no piece has one.
    """
    known = list(masks)
    if all(mask is None for mask, _ in known):
        return None
    token_ids, lengths = array("i"), array("i")
    for mask, count in known:
        token_ids.extend(array("i") if mask is None else mask.token_ids)
        lengths.extend(array("i", bytes(4 * count)) if mask is None else mask.lengths)
    return SamplingMask(token_ids, lengths)


@dataclass(frozen=True, eq=False, slots=True)
class Generation:
    """The sampled tokens of one request and what the server reported about them.

    Attributes:
        output_ids: Sampled ids, including the stop token; shape `(T,)`.
        logprobs: Logprobs of the sampled ids under the sampling distribution before top-p and top-k, shape `(T,)`; None
            if not requested.
        finish_type: "stop", "length" or "abort".
        stop_token_id: Sampled token that ended the turn, the last of `output_ids`; None if the turn was cut off or
            ended at a stop string.
        stop_string: Stop string that ended the turn; None if none did.
        abort_message: Server's message for "abort"; None otherwise.
        prompt_tokens: Number of prompt tokens; 0 for an aborted request that never ran.
        cached_tokens: Number of prompt tokens from the server's prefix cache.
        weight_version: Version of the weights at the end of the request; None from servers that do not report it.
        weight_versions: Spans of tokens by the version of the weights that sampled them, in order and without gaps
            between known ones. Servers that report a single version give one span; empty if unknown.
        prompt_logprobs: Logprobs of the last prompt tokens, if requested; NaN where unknown.
        request_id: `rid` of the attempt that was answered.
        resumed_ids: `rid`s of earlier requests whose tokens this response begins with, because the server aborted them
            and the call continued; see `join_parts`.
        routed_experts: Routed experts of each token as the server sent them: base64 of little-endian int32 with
            `routed_rows` rows, decoded by `expert_ids()`; None if not requested or not returned.
        sampling_mask: Ids that each token was sampled from, `T` rows; None if not requested or not returned.
        sampling_logprobs: Logprobs of the sampled tokens among those ids only, shape `(T,)`; NaN where unknown, None
            if not requested or not returned.
        latency_s: Seconds from request to response, measured by the server; 0.0 if not reported.
        meta_json: The server's `meta_info` without its per-token lists, as JSON: half the memory of the objects.
    """

    output_ids: array[int]
    logprobs: array[float] | None
    finish_type: str
    stop_token_id: int | None = None
    stop_string: str | None = None
    abort_message: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str | None = None
    weight_versions: tuple[VersionSpan, ...] = ()
    prompt_logprobs: array[float] = field(default_factory=lambda: array("d"))
    request_id: str = ""
    resumed_ids: tuple[str, ...] = ()
    routed_experts: str | None = None
    sampling_mask: SamplingMask | None = None
    sampling_logprobs: array[float] | None = None
    latency_s: float = 0.0
    meta_json: bytes = field(default=b"{}", repr=False)

    @property
    def meta_info(self) -> dict[str, Any]:
        """The server's `meta_info` without its per-token lists, decoded at each access."""
        meta: dict[str, Any] = json.loads(self.meta_json)
        return meta

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.output_ids)

    @property
    def routed_rows(self) -> int:
        """Number of routed tokens: prompt and response without its last token, which no forward pass has seen."""
        return max(self.prompt_tokens + self.completion_tokens - 1, 0)

    @property
    def routed_width(self) -> int | None:
        """Number of expert ids per token, layers times top-k; None if unknown."""
        if self.routed_experts is None or not self.routed_rows:
            return None
        return _decoded_length(self.routed_experts) // (_ID_BYTES * self.routed_rows)

    def expert_ids(self, start: int = 0) -> NDArray[np.int32] | None:
        """Decode the experts that each token of prompt and response was routed to, except the last token.

        Row `i` belongs to token `i` of the sequence up to this turn: the experts behind the logits that token `i + 1`
        was sampled from. Each call decodes again, in about 4 ms per MB.

        Args:
            start: First row to decode.

        Returns:
            Read-only array of ids from 0, shape `(routed_rows - start, layers * top_k)`. A row has all layers of the
                model in order, including those without experts. None if `routed_experts` is None.

        Raises:
            SGLangDecodingError: The text is not base64, or an id is negative.
        """
        import numpy as np  # installed with transformers, and slow to import

        if self.routed_experts is None:
            return None
        width = self.routed_width or 0
        skipped = start * width * _ID_BYTES
        try:
            content = base64.b64decode(self.routed_experts[skipped // 3 * 4 :], validate=True)[skipped % 3 :]
        except binascii.Error as error:
            raise SGLangDecodingError(f"the server's routed_experts are not base64: {error}") from error
        ids = np.frombuffer(content, dtype="<i4").reshape(self.routed_rows - start, width)
        if ids.size and ids.min() < 0:
            raise SGLangDecodingError(f"the server's routed_experts have the negative id {ids.min()}")
        return ids

    def kept_ids(self) -> SamplingMask | None:
        """Return the ids that truncated sampling kept for each sampled token; None if the server reported none.

        Stock SGLang reports them for `return_sampling_mask`. slime's SGLang reports them for
        `custom_params.return_top_p_token_ids`: `meta_info` then has the ids of all rows in `top_p_token_ids`, and the
        starts of the rows and the end of the last in `top_p_token_offsets`. Both are int32, as a list or as base64 of
        the bytes. slime replays either in training.

        Raises:
            ValueError: The ids and offsets from slime's SGLang are inconsistent.
        """
        if self.sampling_mask is not None:
            return self.sampling_mask
        meta = self.meta_info
        ids = _int32_array(next((meta[key] for key in _TOP_P_IDS if key in meta), None))
        offsets = _int32_array(next((meta[key] for key in _TOP_P_OFFSETS if key in meta), None))
        if ids is None and offsets is None:
            return None
        if ids is not None and offsets is not None and len(offsets) == self.completion_tokens + 1:
            lengths = array("i", (stop - start for start, stop in pairwise(offsets)))
            if (offsets[0], offsets[-1]) == (0, len(ids)) and min(lengths, default=0) >= 0:
                return SamplingMask(ids, lengths)
        raise ValueError(f"the server's top-p ids and offsets do not fit {self.completion_tokens} sampled tokens")


def to_json(value: Mapping[str, Any]) -> bytes:
    """Return an object that was read from JSON as JSON."""
    try:
        return bytes(memoryview(orjson.dumps(value)))  # a copy: orjson's result keeps a buffer of 4 kB
    except TypeError:  # an int beyond 64 bits
        return json.dumps(value).encode()


_ID_BYTES = 4
_PER_TOKEN_KEYS = frozenset(
    {"input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs", "routed_experts"}
    | {"output_token_sampling_mask", "output_token_sampling_logprobs", FLAT_LOGPROBS}
)


_TOP_P_IDS = ("top_p_token_ids", "top_p_kept_token_ids")
_TOP_P_OFFSETS = ("top_p_token_offsets", "top_p_kept_token_offsets")
TOP_P_KEYS = frozenset({*_TOP_P_IDS, *_TOP_P_OFFSETS})
"""Keys that only slime's SGLang has in `meta_info`."""


def read_generation(
    response: Mapping[str, Any],
    *,
    logprobs_expected: bool,
    end_token_ids: Collection[int] = (),
    prompt_ids: Sequence[int] = (),
    vocab_size: int = 0,
    has_images: bool = False,
) -> Generation:
    """Check a `/generate` response and type it.

    Args:
        response: JSON object from the server.
        logprobs_expected: Whether `return_logprob` was requested.
        end_token_ids: Tokens that end a turn, for servers that report "stop" without the token.
        prompt_ids: The prompt that prompt logprobs must be of; empty leaves them unchecked.
        has_images: Whether prompt logprobs of other ids are unknown instead of an error.
        vocab_size: Number of token ids of the tokenizer.

    Raises:
        SGLangDecodingError: A required key is missing or has the wrong type, or the logprobs do not match the ids.
    """
    try:
        meta: Mapping[str, Any] = response["meta_info"]
        output_ids = array("i", response["output_ids"])
        if min(output_ids, default=0) < 0 or bool in map(type, response["output_ids"]):
            raise ValueError("output_ids holds what is no id")
        finish = meta["finish_reason"]
        finish_type = finish["type"]
        if finish_type not in FINISH_TYPES or finish.get("matched") == "":
            # A response with an unknown end must not look complete.
            raise SGLangDecodingError(f"the server ended the request with the unknown finish reason {finish!r}")
        aborted = finish_type == "abort"
        # Read first: its error names the usual cause.
        logprobs = _read_logprobs(meta, output_ids) if logprobs_expected else None
        latency = float(meta.get("e2e_latency") or 0.0)
        if not math.isfinite(latency):
            raise ValueError(f"e2e_latency is {latency}")
        masks, sampling = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
        for rows, what in ((masks, "masks"), (sampling, "logprobs")):
            if rows is not None and len(rows) != len(output_ids):
                raise SGLangDecodingError(
                    f"the server returned {len(output_ids)} token ids with {len(rows)} sampling {what}"
                )
        generation = Generation(
            output_ids=output_ids,
            logprobs=logprobs,
            finish_type=finish_type,
            stop_token_id=_stop_token(finish, output_ids, end_token_ids),
            stop_string=finish["matched"] if isinstance(finish.get("matched"), str) else None,
            abort_message=str(finish.get("message")) if aborted else None,
            # A request that was aborted in the queue returns a short meta_info.
            prompt_tokens=int(meta.get("prompt_tokens", 0) if aborted else meta["prompt_tokens"]),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            weight_version=_version(meta.get("weight_version")),
            weight_versions=_read_versions(meta, len(output_ids)),
            prompt_logprobs=_read_prompt_logprobs(meta, prompt_ids, vocab_size, has_images),
            request_id=str(meta.get("id", "")),
            routed_experts=meta.get("routed_experts"),
            sampling_mask=None if masks is None else _read_sampling_mask(masks, output_ids),
            # The mode "support" returns lists instead.
            sampling_logprobs=None if sampling is None else _numbers(sampling, "a sampling logprob"),
            latency_s=latency,
            meta_json=to_json({key: value for key, value in meta.items() if key not in _PER_TOKEN_KEYS}),
        )
        check_routed_rows(generation)
        return generation
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
        raise SGLangDecodingError(
            f"the server's response is not a complete /generate response: {error!r} (missing, or of the wrong type)"
        ) from error


def _version(version: Any) -> str | None:
    if not isinstance(version, str | int | None):
        raise TypeError(f"weight_version is {version!r}")
    return version if version is None else str(version)


def _read_prompt_logprobs(
    meta: Mapping[str, Any], prompt_ids: Sequence[int], vocab_size: int, has_images: bool
) -> array[float]:
    entries = meta.get("input_token_logprobs") or []
    logprobs = array("d", [math.nan if entry[0] is None else entry[0] for entry in entries])
    for back, ((_, token_id, *_), sent) in enumerate(zip(reversed(entries), reversed(prompt_ids), strict=False), 1):
        # SGLang reports 0 for the last id of the vocabulary, which may be padded.
        if token_id == sent or (token_id == 0 and sent >= vocab_size - 1):
            continue
        if not has_images:
            raise SGLangDecodingError(
                f"the server returned a prompt logprob of token {token_id!r} where {sent} was sent; a proxy changed "
                "the prompt or the answer"
            )
        logprobs[-back] = math.nan  # in place of an image, the server has other ids
    return logprobs


def _read_versions(meta: Mapping[str, Any], count: int) -> tuple[VersionSpan, ...]:
    """Return the spans that the server reports, or its one version for all tokens (SGLang before 0.5.23)."""
    reported = meta.get("weight_versions")
    if reported is None:
        version = _version(meta.get("weight_version"))
        return (VersionSpan(version, 0, count),) if version is not None and count else ()
    spans = [VersionSpan(str(span["version"]), int(span["start"]), int(span["end"])) for span in reported]
    spans = [span for span in spans if span.start < span.end]
    if not are_in_order(spans, count):
        raise SGLangDecodingError(f"the server's weight_versions do not fit its {count} sampled tokens: {reported!r}")
    return tuple(spans)


def _stop_token(finish: Mapping[str, Any], output_ids: array[int], end_token_ids: Collection[int]) -> int | None:
    matched = finish.get("matched")
    if finish["type"] != "stop" or isinstance(matched, str):
        return None
    last = output_ids[-1] if output_ids else None
    if matched is None:
        return last if last in end_token_ids else None
    if type(matched) is not int or matched != last:
        raise SGLangDecodingError(
            f"the server reports that the response stopped at {matched!r}, but the last sampled token is {last}"
        )
    return last


def check_routed_rows(generation: Generation) -> None:
    """Check the number of rows by the length of the text only, which may have many megabytes.

    Raises:
        SGLangDecodingError: The tokens cannot all have the same number of ids.
    """
    text, rows = generation.routed_experts, generation.routed_rows
    if text is None:
        return
    if not isinstance(text, str):
        raise TypeError(f"routed_experts are {type(text).__name__}, not str")
    ids, rest = divmod(_decoded_length(text), _ID_BYTES)
    whole = ids % rows == 0 and ids > 0 if rows else ids == 0
    if rest or len(text) % 4 or not whole:
        raise SGLangDecodingError(
            f"the server returned {ids} ids of routed experts, which do not divide evenly among {rows} tokens "
            f"({generation.prompt_tokens} prompt and {generation.completion_tokens} sampled tokens, without the last); "
            "the text was truncated, or a proxy set `routed_experts_start_len`"
        )


def _decoded_length(text: str) -> int:
    """Return the number of bytes in a base64 text."""
    return len(text) // 4 * 3 - text[-2:].count("=")


def _read_logprobs(meta: Mapping[str, Any], output_ids: array[int]) -> array[float] | None:
    """Return the logprobs of `[[logprob, token_id, text], ...]`, whose ids must be the returned ones in order."""
    entries, flat = meta.get("output_token_logprobs"), meta.get(FLAT_LOGPROBS)
    if entries is None and flat is not None:
        logprobs, token_ids = flat[::3], flat[1::3]
    elif not entries and not output_ids:
        return None
    else:
        count = len(entries) if isinstance(entries, list) else "no"
        if not isinstance(entries, list) or count != len(output_ids):
            raise SGLangDecodingError(
                f"the server returned {len(output_ids)} token ids with {count} logprobs, although logprobs were "
                "requested; a proxy that drops `return_logprob` causes this"
            )
        logprobs, token_ids = [entry[0] for entry in entries], [entry[1] for entry in entries]
    if token_ids != output_ids.tolist():
        raise SGLangDecodingError("the server's output_token_logprobs have other token ids than its output_ids")
    return _numbers(logprobs, "a logprob of a sampled token")


def _read_sampling_mask(rows: Any, output_ids: Sequence[int]) -> SamplingMask:
    token_ids = array("i")
    for place, (token_id, row) in enumerate(zip(output_ids, rows, strict=True)):
        if token_id not in row:
            raise SGLangDecodingError(f"the sampling mask of token {place} lacks the sampled id {token_id}")
        token_ids.extend(row)
    if min(token_ids, default=0) < 0:
        raise SGLangDecodingError(f"a sampling mask holds {min(token_ids)}, which is no id")
    return SamplingMask(token_ids, array("i", map(len, rows)))


def _numbers(values: Iterable[Any], what: str) -> array[float]:
    try:
        return array("d", list(values))  # an array that grows is a sixth too large
    except TypeError as error:
        raise SGLangDecodingError(f"{what} is not a number: {error}") from error


def _int32_array(value: Any) -> array[int] | None:
    """Decode an int32 array from SGLang's JSON; None stays None.

    Raises:
        ValueError: The value is neither base64 nor a list of such integers.
    """
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return array("i", base64.b64decode(value, validate=True))
        return array("i", value)
    except (binascii.Error, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"not an int32 array: {error}") from error


_DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's `max_new_tokens` for requests without one."""


def sampling_params_of_the_rest(
    sampling_params: Mapping[str, Any], sampled: int, begun: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the sampling parameters of a request that continues a response after `sampled` tokens.

    Args:
        sampling_params: Sampling parameters of the whole response.
        sampled: Number of tokens that the response already has.
        begun: Remainders of stop strings that these tokens have begun.
    """
    if not sampled:
        return dict(sampling_params)
    rest = dict(sampling_params)
    if rest.get("max_new_tokens") is None and sampled < _DEFAULT_MAX_NEW_TOKENS:
        rest["max_new_tokens"] = _DEFAULT_MAX_NEW_TOKENS
    for name in ("max_new_tokens", "min_new_tokens"):
        if rest.get(name) is not None:
            rest[name] = max(rest[name] - sampled, 0)
    if rest.get("min_new_tokens") and rest.get("max_new_tokens") is not None:
        rest["min_new_tokens"] = min(rest["min_new_tokens"], rest["max_new_tokens"])
    if begun:
        rest["stop"] = [*stop_strings(sampling_params), *begun]
    return rest


def stop_strings(sampling_params: Mapping[str, Any], parameter: str = "stop") -> list[str]:
    """Return the stop strings of a request, or its regular expressions for the parameter "stop_regex"."""
    value = sampling_params.get(parameter)
    return [value] if isinstance(value, str) else list(value or ())


def begun_stop_strings(stops: Sequence[str], text: str) -> list[str]:
    """Return the remainders of stop strings that begin at the end of `text`.

    A server searches each request's tokens for stop strings, so it would miss one that an abort has split.
    """
    begun: dict[str, None] = {}
    for stop in stops:
        counts = range(1, len(stop))
        begun.update((stop[count:], None) for count in counts if text.endswith(stop[:count]))
    return [rest for rest in begun if rest not in stops]


def join_parts(parts: Sequence[Generation]) -> Generation:
    """Join the parts of a call into one response, which ends as the last part did.

    Args:
        parts: Responses in order, at least one; aborted ones may be empty.

    Raises:
        ValueError: `parts` is empty.
        SGLangDecodingError: The routed experts of the parts do not fit the joined response.
    """
    if not parts:
        raise ValueError("a response needs at least one part")
    last = parts[-1]
    if len(parts) == 1:
        return last
    ran: list[Generation] = []
    spans: list[VersionSpan] = []
    sampled = prompt_tokens = 0
    for part in parts:
        if part.prompt_tokens:  # 0 for a request that was aborted in the queue
            ran.append(part)
            prompt_tokens = part.prompt_tokens - sampled
        for version, start, end in part.weight_versions:
            if spans and (spans[-1].version, spans[-1].end) == (version, start + sampled):
                spans[-1] = spans[-1]._replace(end=end + sampled)
            else:
                spans.append(VersionSpan(version, start + sampled, end + sampled))
        sampled += part.completion_tokens
    has_logprobs = all(part.logprobs is not None or not part.output_ids for part in parts)
    has_sampling_logprobs = any(part.sampling_logprobs is not None for part in parts)
    unknown = array("d", [math.nan])
    sampling_logprobs = [
        unknown * part.completion_tokens if part.sampling_logprobs is None else part.sampling_logprobs for part in parts
    ]
    joined = replace(
        last,
        output_ids=_joined("i", [part.output_ids for part in parts]),
        logprobs=_joined("d", [part.logprobs for part in parts if part.logprobs is not None]) if has_logprobs else None,
        prompt_tokens=prompt_tokens,
        cached_tokens=ran[0].cached_tokens if ran else last.cached_tokens,
        weight_versions=tuple(spans),
        # In later parts these would belong to tokens that this response sampled.
        prompt_logprobs=ran[0].prompt_logprobs if ran else last.prompt_logprobs,
        resumed_ids=tuple(chain.from_iterable((*part.resumed_ids, part.request_id) for part in parts))[:-1],
        routed_experts=_joined_experts(parts),
        sampling_mask=joined_mask((_kept_ids_or_none(part), part.completion_tokens) for part in parts),
        sampling_logprobs=_joined("d", sampling_logprobs) if has_sampling_logprobs else None,
        latency_s=sum(part.latency_s for part in parts),
        meta_json=to_json({key: value for key, value in last.meta_info.items() if key not in TOP_P_KEYS}),
    )
    check_routed_rows(joined)
    return joined


def _kept_ids_or_none(part: Generation) -> SamplingMask | None:
    try:
        return part.kept_ids()
    except ValueError:
        return None


def _joined(kind: str, arrays: Iterable[array[Any]]) -> array[Any]:
    return array(kind, chain.from_iterable(arrays))


def _joined_experts(parts: Sequence[Generation]) -> str | None:
    """Join the rows of each part for the tokens that it added.

    Every part returns the rows of its whole prompt. The rows of tokens from an earlier part are dropped: the weights
    may have changed since, and the routing of these tokens with them.
    """
    sampling = [part for part in parts if part.output_ids] or parts[-1:]
    if sampling[-1].routed_experts is not None and any(part.routed_experts is None for part in sampling):
        raise SGLangDecodingError(
            "the server aborted a request and did not return its tokens' routed experts; "
            'with on_abort="raise" such tokens are recorded without them'
        )
    reported = [part for part in sampling if part.routed_experts is not None and part.routed_rows]
    if not reported:
        return sampling[-1].routed_experts
    rows = b""
    width = 0
    for part in reported:
        content = base64.b64decode(part.routed_experts or "")
        width = width or len(content) // part.routed_rows
        rows += content[len(rows) // width * (len(content) // part.routed_rows) :]
    return base64.b64encode(rows).decode()
