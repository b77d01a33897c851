"""What one `/generate` request returned, checked and typed.

Source of the format: SGLang 0.5.23 (`GenerateReqInput` and the tokenizer manager's response), with the keys that older
versions lack optional. Promise: a `Generation` is complete and consistent, or `SGLangDecodingError` is raised; nothing
is filled in.

An answer may come in several parts: a weight update or a pause aborts what runs on the server, and the aborted request
comes back with what it had sampled. With `on_abort="resume"` the call continues from there: the next request's prompt
is the call's prompt and all that was sampled so far, and it may sample what is left of the same token budget. The parts
are joined into one `Generation`, in which every token keeps the logprob, the version of the weights, the routed experts
and the sampling mask that it was sampled with.
"""

from __future__ import annotations

import base64
import binascii
import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..exceptions import SGLangDecodingError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class VersionSpan(NamedTuple):
    """A run of sampled tokens that one version of the weights sampled.

    Attributes:
        version: As the server names it.
        start: Position of the first of them.
        end: Position behind the last of them.
    """

    version: str
    start: int
    end: int


def clip_spans(spans: Iterable[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    """The spans of the tokens from `start` to `end`, counted from `start`."""
    clipped = (VersionSpan(s.version, max(s.start, start) - start, min(s.end, end) - start) for s in spans)
    return tuple(span for span in clipped if span.start < span.end)


@dataclass(frozen=True)
class SamplingMask:
    """Which token ids could be sampled at each place: what was left after grammar, penalties, top-k, top-p and min-p.

    Truncated sampling renormalises over these ids. With them a trainer computes the probability that the sampler really
    used, as `z[y] / T - logsumexp(z[ids] / T)`; the logprobs that SGLang tells otherwise are over the whole vocabulary.
    The ids are rows, one per token, one after the other.

    Attributes:
        token_ids: The ids of all rows, shape (sum of `lengths`,). A row of SGLang's has the most probable id first.
        lengths: How many of them each row has, shape (T,); 0 where it is not known, or nothing was sampled.
    """

    token_ids: array[int]
    lengths: array[int]

    @property
    def offsets(self) -> array[int]:
        """Where the rows start, and the last one ends; shape (T + 1,)."""
        return array("q", accumulate(self.lengths, initial=0))

    def rows(self) -> Iterator[list[int]]:
        """The ids of each token in turn; empty where they are not known."""
        start = 0
        for length in self.lengths:
            yield self.token_ids[start : start + length].tolist()
            start += length

    def part(self, start: int, stop: int) -> SamplingMask:
        """The rows from one place up to another."""
        before = sum(self.lengths[:start])
        lengths = self.lengths[start:stop]
        return SamplingMask(self.token_ids[before : before + sum(lengths)], lengths)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def __repr__(self) -> str:
        """Counts; never the ids, which may be many."""
        return f"SamplingMask({len(self)} rows, {len(self.token_ids)} ids)"


def joined_mask(masks: Iterable[tuple[SamplingMask | None, int]]) -> SamplingMask | None:
    """The masks of one piece after the other; None if none is known.

    Args:
        masks: Each with the number of its tokens.
    """
    known = list(masks)
    if all(mask is None for mask, _ in known):
        return None
    token_ids, lengths = array("i"), array("i")
    for mask, count in known:
        token_ids.extend(array("i") if mask is None else mask.token_ids)
        lengths.extend(array("i", bytes(4 * count)) if mask is None else mask.lengths)
    return SamplingMask(token_ids, lengths)


@dataclass(frozen=True, eq=False)
class Generation:
    """The sampled tokens of one request and what the server said about them.

    Attributes:
        output_ids: Sampled ids, the stop token included; shape (T,).
        logprobs: Their logprobs under the sampling distribution before top-p and top-k, shape (T,); None if they were
            not asked for.
        finish_type: "stop", "length" or "abort".
        stop_token_id: The sampled token that ended the turn, the last of `output_ids`; None if the turn was cut off or
            ended at a stop string.
        stop_string: The stop string that ended the turn, else None.
        abort_message: For "abort": the server's message.
        prompt_tokens: Number of prompt tokens (0 if an aborted request never ran).
        cached_tokens: How many of them came from the server's prefix cache.
        weight_version: Version of the weights at the end of the request; None from servers that do not tell.
        weight_versions: Which weights sampled which of the tokens: spans in their order, without gaps between known
            ones. From servers that name only one version it is one span; empty where nothing is known.
        prompt_logprobs: Logprobs of the last prompt tokens if they were asked for; NaN where unknown.
        request_id: The `rid` of the attempt that was answered.
        resumed_ids: The `rid`s of the earlier requests whose tokens this answer begins with, where the server aborted
            them and the call went on (see `join_parts`).
        routed_experts: Where each token was routed to, as the server sent it: base64 of little-endian int32 with
            `routed_rows` rows; None if it was not asked for, or not returned. `expert_ids()` decodes it.
        sampling_mask: The ids that each token was sampled from, T rows; None if it was not asked for, or not returned.
        sampling_logprobs: The logprobs of the sampled tokens among those ids alone, shape (T,), NaN where unknown;
            None as `sampling_mask`.
        latency_s: Seconds from request to response, as the server measured it; 0.0 if it does not tell.
        meta_info: The server's whole `meta_info` without its per-token lists.
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
    meta_info: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.output_ids)

    @property
    def routed_rows(self) -> int:
        """Number of tokens that went through the model and so were routed: prompt and answer without its last token."""
        return max(self.prompt_tokens + self.completion_tokens - 1, 0)

    @property
    def routed_width(self) -> int | None:
        """Number of expert ids per token, layers times experts per token; None where nothing tells."""
        if self.routed_experts is None or not self.routed_rows:
            return None
        return _decoded_length(self.routed_experts) // (_ID_BYTES * self.routed_rows)

    def expert_ids(self, start: int = 0) -> NDArray[np.int32] | None:
        """The experts that each token of prompt and answer but the last was routed to.

        Row i belongs to token i of the sequence up to this turn: the experts behind the logits that token i + 1 was
        sampled from. Decoded at every call, about 4 ms per MB.

        Args:
            start: The first row to decode.

        Returns:
            Ids from 0, shape (`routed_rows` - `start`, layers * top_k), read-only, a row in the order of the layers
            (all of the model's, those without experts too); None if `routed_experts` is.

        Raises:
            SGLangDecodingError: The text is not base64, or an id is negative.
        """
        import numpy as np  # there wherever transformers is, and not cheap

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
            raise SGLangDecodingError(f"the server's routed_experts hold the negative id {ids.min()}")
        return ids

    def kept_ids(self) -> SamplingMask | None:
        """The ids that truncated sampling kept for each sampled token, whichever server told them; None where none did.

        Stock SGLang tells them for `return_sampling_mask`. slime's SGLang is asked with
        `custom_params.return_top_p_token_ids`: `top_p_token_ids` of `meta_info` has the ids, one row after the other,
        and `top_p_token_offsets` where the rows start (one more than there are sampled tokens); both int32, as a list
        or as base64 of the bytes. slime replays either in training.

        Raises:
            ValueError: What slime's SGLang told is not consistent.
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
        raise ValueError(f"the server's top-p ids and offsets are not those of {self.completion_tokens} tokens")


_ID_BYTES = 4
_PER_TOKEN_KEYS = frozenset(
    {"input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs", "routed_experts"}
    | {"output_token_sampling_mask", "output_token_sampling_logprobs"}
)


_TOP_P_IDS = ("top_p_token_ids", "top_p_kept_token_ids")
_TOP_P_OFFSETS = ("top_p_token_offsets", "top_p_kept_token_offsets")
TOP_P_KEYS = frozenset({*_TOP_P_IDS, *_TOP_P_OFFSETS})
"""Keys of slime's SGLang in `meta_info`."""


def read_generation(
    response: Mapping[str, Any], *, logprobs_expected: bool, end_token_ids: Collection[int] = ()
) -> Generation:
    """Check a `/generate` response and type it.

    Args:
        response: The server's JSON object.
        logprobs_expected: Whether `return_logprob` was asked for.
        end_token_ids: Tokens that end a turn, for servers that say "stop" without saying which token it was.

    Raises:
        SGLangDecodingError: A needed key is missing or of the wrong type, or the logprobs do not belong to the ids.
    """
    try:
        meta: Mapping[str, Any] = response["meta_info"]
        output_ids = array("i", response["output_ids"])
        finish = meta["finish_reason"]
        finish_type = finish["type"]
        if finish_type not in ("stop", "length", "abort"):
            # Whatever it is, an answer that did not end in a known way must not look complete.
            raise SGLangDecodingError(f"the server ended the request with the unknown finish reason {finish!r}")
        aborted = finish_type == "abort"
        entries = meta.get("output_token_logprobs")
        wanted = logprobs_expected and (entries or output_ids)
        masks, sampling = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
        for rows, what in ((masks, "masks"), (sampling, "logprobs")):
            if rows is not None and len(rows) != len(output_ids):
                raise SGLangDecodingError(
                    f"the server returned {len(output_ids)} token ids with {len(rows)} sampling {what}"
                )
        generation = Generation(
            output_ids=output_ids,
            logprobs=_read_logprobs(entries, output_ids) if wanted else None,
            finish_type=finish_type,
            stop_token_id=_stop_token(finish, output_ids, end_token_ids),
            stop_string=finish["matched"] if isinstance(finish.get("matched"), str) else None,
            abort_message=str(finish.get("message")) if aborted else None,
            # A request that was aborted in the queue comes back with a short meta_info.
            prompt_tokens=int(meta.get("prompt_tokens", 0) if aborted else meta["prompt_tokens"]),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            weight_version=meta.get("weight_version"),
            weight_versions=_read_versions(meta, len(output_ids)),
            prompt_logprobs=array(
                "d", (math.nan if entry[0] is None else entry[0] for entry in meta.get("input_token_logprobs") or [])
            ),
            request_id=str(meta.get("id", "")),
            routed_experts=meta.get("routed_experts"),
            sampling_mask=None if masks is None else _read_sampling_mask(masks, output_ids),
            # Those of the mode "support" are lists.
            sampling_logprobs=None if sampling is None else _numbers(sampling, "a sampling logprob"),
            latency_s=float(meta.get("e2e_latency") or 0.0),
            meta_info={key: value for key, value in meta.items() if key not in _PER_TOKEN_KEYS},
        )
        check_routed_rows(generation)
        return generation
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
        raise SGLangDecodingError(
            f"the server's answer is not a complete /generate response: {error!r} (missing, or of the wrong type)"
        ) from error


def _read_versions(meta: Mapping[str, Any], count: int) -> tuple[VersionSpan, ...]:
    """The spans that the server tells, or its one version for all tokens (SGLang before 0.5.23)."""
    told = meta.get("weight_versions")
    if told is None:
        version = meta.get("weight_version")
        return (VersionSpan(str(version), 0, count),) if version is not None and count else ()
    spans = [VersionSpan(str(span["version"]), int(span["start"]), int(span["end"])) for span in told]
    spans = [span for span in spans if span.start < span.end]
    bounds = [0, *(bound for span in spans for bound in (span.start, span.end)), count]
    if bounds != sorted(bounds):
        raise SGLangDecodingError(f"the server's weight_versions are no spans of its {count} sampled tokens: {told!r}")
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
            f"the server says that the answer stopped at {matched!r}, and the last token that it sampled is {last}"
        )
    return last


def check_routed_rows(generation: Generation) -> None:
    """Check the number of rows by the length of the text alone: it may have many megabytes.

    Raises:
        SGLangDecodingError: There is not the same number of ids for each token.
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
            f"the server returned {ids} ids of routed experts, which cannot be the same number for each of {rows} "
            f"tokens ({generation.prompt_tokens} prompt and {generation.completion_tokens} sampled ones without the "
            "last); a `routed_experts_start_len` set on the way does this, or a text that was cut"
        )


def _decoded_length(text: str) -> int:
    """Number of bytes in a base64 text."""
    return len(text) // 4 * 3 - text[-2:].count("=")


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
    return _numbers((entry[0] for entry in entries), "a logprob of a sampled token")


def _read_sampling_mask(rows: Any, output_ids: Sequence[int]) -> SamplingMask:
    token_ids = array("i")
    for place, (token_id, row) in enumerate(zip(output_ids, rows, strict=True)):
        if token_id not in row:
            raise SGLangDecodingError(f"the sampling mask of token {place} lacks {token_id}, which was sampled")
        token_ids.extend(row)
    return SamplingMask(token_ids, array("i", map(len, rows)))


def _numbers(values: Iterable[Any], what: str) -> array[float]:
    try:
        return array("d", values)
    except TypeError as error:
        raise SGLangDecodingError(f"{what} is not a number: {error}") from error


def _int32_array(value: Any) -> array[int] | None:
    """An int32 array as SGLang puts it into JSON; None stays None.

    Raises:
        ValueError: It is neither base64 nor a list of such integers.
    """
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return array("i", base64.b64decode(value, validate=True))
        return array("i", value)
    except (binascii.Error, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"not an int32 array: {error}") from error


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
    for name in ("max_new_tokens", "min_new_tokens"):
        if rest.get(name) is not None:
            rest[name] = max(rest[name] - sampled, 0)
    if rest.get("min_new_tokens") and rest.get("max_new_tokens") is not None:
        rest["min_new_tokens"] = min(rest["min_new_tokens"], rest["max_new_tokens"])
    if begun:
        rest["stop"] = [*stop_strings(sampling_params), *begun]
    return rest


def stop_strings(sampling_params: Mapping[str, Any], parameter: str = "stop") -> list[str]:
    """The stop strings of a request; its regular expressions are the parameter "stop_regex"."""
    value = sampling_params.get(parameter)
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
        # Of later parts these would be those of tokens that this answer sampled.
        prompt_logprobs=ran[0].prompt_logprobs if ran else last.prompt_logprobs,
        resumed_ids=tuple(rid for part in parts for rid in (*part.resumed_ids, part.request_id))[:-1],
        routed_experts=_joined_experts(parts),
        sampling_mask=joined_mask((_kept_ids_or_none(part), part.completion_tokens) for part in parts),
        sampling_logprobs=_joined("d", sampling_logprobs) if has_sampling_logprobs else None,
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


def _joined(kind: str, arrays: Iterable[array[Any]]) -> array[Any]:
    return array(kind, chain.from_iterable(arrays))


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
