"""Checks of slime's samples, which hold one sequence each and no turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from ...credit import version_number
from ...shown import counted, first_difference
from ..records import Group, Inspected, TokenSequence
from ..texts import joined
from .turns import Facts

_OURS = "strands_sglang"

MANY = 16
"""Number of tokens in a row that a model does not sample with probability 1."""


def check_sample(group: Group, episode: Inspected) -> Iterator[Facts]:
    """Check the samples of a rollout."""
    if group.kind != "slime":
        return
    yield from _twice(episode)
    samples = [one.sample for one in chain.from_iterable(one.sequences for one in group.episodes)]
    has_versions = any(sample.get("weight_versions") for sample in samples)
    is_scored = any(sample.get("reward") is not None for sample in samples)
    for number, sequence in enumerate(episode.sequences):
        checks = (
            _sample(group, sequence),
            _versions(sequence.sample, has_versions),
            _reward(sequence.sample, is_scored),
        )
        for check in checks:
            for facts in check:
                yield {"sequence": number, **facts}


def check_prompts(group: Group) -> Iterator[Facts]:
    """Find samples of another prompt in a group of slime, which are n copies of one."""
    if group.kind != "slime":
        return
    asked = []
    for episode in group.episodes:
        asked += [(repr(sequence.sample.get("prompt")), episode) for sequence in episode.sequences]
    usual = max((prompt for prompt, _ in asked), key=[prompt for prompt, _ in asked].count, default="")
    for prompt, episode in asked:
        if prompt != usual:
            why = f"its prompt is {prompt[:60]}, and that of others in its group {usual[:60]}"
            yield {"kind": "group", "why": why, "episode": episode.id}


def _twice(episode: Inspected) -> Iterator[Facts]:
    """Find tokens that two samples of a rollout share and both train."""
    rows = [(one.column("ids"), one.mask > 0) for one in episode.sequences[:64]]
    for later in range(1, len(rows)):
        for earlier in range(later):
            (ids, mask), (other, other_mask) = rows[later], rows[earlier]
            shared = min(len(ids), len(other))
            apart = np.flatnonzero(ids[:shared] != other[:shared])
            shared = int(apart[0]) if len(apart) else shared
            both = np.flatnonzero(mask[:shared] & other_mask[:shared])
            if len(both):
                why = f"sample {earlier} of the same rollout trains it, too"
                at = {"sequence": later, "token": int(both[0]), "count": len(both)}
                yield {"kind": "trained-twice", "why": why, **at}


def _sample(group: Group, sequence: TokenSequence) -> Iterator[Facts]:
    sample, row = sequence.sample, sequence.row
    assert row is not None
    count = int(sample["response_length"])
    prompt = len(sequence) - count
    metadata = sample.get("metadata") or {}
    ours = metadata.get(_OURS) if isinstance(metadata, dict) else None
    removed = bool(sample.get("remove_sample"))
    if removed and sequence.mask.any() and ours is not None:
        yield {"kind": "reward-failure", "why": "it is removed, but its loss mask trains it"}
    if not removed and str(sample.get("status")) == "failed":
        yield {"kind": "reward-failure", "why": "its status is failed, but it is not removed from the loss"}
    logprobs = sequence.given("logprobs")
    if logprobs is not None and not removed:
        yield from _logprobs(sequence, logprobs, prompt, contract=ours is not None)
    text = joined(row.token_ids[prompt:], group.vocabulary)
    if text is not None and sample.get("response") and text != sample["response"]:
        given = sample["response"]
        at = first_difference(text, given)
        why = f"its tokens say {text[at : at + 20]!r} where its response says {given[at : at + 20]!r}"
        yield {
            "kind": "id-text",
            "why": why,
            "token": prompt + _token_at(row.token_ids[prompt:], group, at),
            "count": 1,
        }
    if sequence.mask.max(initial=0) > 1:
        at = int(sequence.mask.argmax())
        why = f"its loss mask has the value {sequence.mask[at]}"
        yield {"kind": "structure", "why": why, "token": at, "count": 1}
    if not removed and str(sample.get("status")) in ("aborted", "pending") and sample.get("reward") is not None:
        why = f"its status is {sample['status']}, but it has the reward {sample['reward']}"
        yield {"kind": "reward-failure", "why": why}
    experts = sample.get("rollout_routed_experts")
    if experts is not None and len(experts) != len(sequence) - 1:
        why = f"{len(sequence)} tokens have {len(experts)} rows of routed experts instead of {len(sequence) - 1}"
        yield {"kind": "experts-missing", "why": why}
    if (
        ours is not None
        and str(sample.get("status")) == "completed"
        and ours.get("outcome") not in (None, "task_complete")
    ):
        yield {"kind": "cut-complete", "why": f"its status is completed, but the episode ended with {ours['outcome']}"}


def _reward(sample: Mapping[str, Any], is_scored: bool) -> Iterator[Facts]:
    status, is_missing = str(sample.get("status")), sample.get("reward") is None and not sample.get("remove_sample")
    if is_scored and is_missing and status in ("completed", "truncated"):
        yield {"kind": "reward", "why": f"it has no reward, although it is {status} and others have one"}


def _versions(sample: Mapping[str, Any], has_versions: bool) -> Iterator[Facts]:
    versions = sample.get("weight_versions") or ()
    numbers = [version_number(version) for version in versions]
    known = [number for number in numbers if number is not None]
    if any(later < earlier for earlier, later in pairwise(known)):
        yield {"kind": "version-falls", "why": f"its weight versions fall: {versions}"}
    if known and len(known) < len(numbers):
        yield {"kind": "version", "why": f"its weight versions cannot be compared: {versions}"}
    if not versions and has_versions and not sample.get("remove_sample"):
        yield {"kind": "version-missing", "why": "it has no weight versions, although others have"}


def _logprobs(sequence: TokenSequence, logprobs: Any, prompt: int, *, contract: bool) -> Iterator[Facts]:
    response = np.arange(prompt, len(sequence))
    values, mask = logprobs[prompt:], sequence.mask[prompt:] > 0
    if not contract:  # others may keep logprobs of tokens that they do not train
        return
    stray = np.flatnonzero(~mask & (values != 0.0))
    edges = np.flatnonzero(np.diff(mask.astype(np.int8)))
    ends = [int(edge) for edge in edges if mask[edge]]  # the last trained token before tokens that are not
    starts = [int(edge) + 1 for edge in edges if not mask[edge]]
    # Shifted to the right: the token after a run has its last logprob, and its first one none. Left is the mirror.
    right = [end for end in ends if values[end + 1] != 0.0] and (values[starts] == 0.0).all()
    left = [start for start in starts if values[start - 1] != 0.0] and (values[ends] == 0.0).all()
    if len(stray) and (right or left):
        why = "tokens that are not trained have logprobs, and trained ones next to them none"
        yield {"kind": "logprobs-shifted", "why": why, "token": int(response[stray[0]]), "count": len(stray)}
        return
    if len(stray):
        why = "it was sampled, since it has a logprob, but is not trained"
        yield {"kind": "not-trained", "why": why, "token": int(response[stray[0]]), "count": len(stray)}
    for start, stop in _runs(mask):
        zeros = max((b - a for a, b in _runs(values[start:stop] == 0.0)), default=0)
        if not values[start:stop].any() and (~mask).any() or MANY <= zeros < stop - start:
            why = f"{counted(zeros, 'trained token')} in a row without a logprob: nothing sampled them"
            yield {"kind": "mask-not-sampled", "why": why, "token": int(response[start]), "count": stop - start}


def _runs(mask: Any) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _token_at(ids: Sequence[int], group: Group, at: int) -> int:
    """Return the position of the token that holds a character."""
    length = 0
    for position, token_id in enumerate(ids):
        length += len(group.vocabulary[token_id].decode("utf-8", "replace"))
        if length > at:
            return position
    return len(ids) - 1
