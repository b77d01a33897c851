"""Checks of slime's samples, which hold one sequence each and no turns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise

import numpy as np

from ...credit import version_number
from ...shown import first_difference
from ..records import Finding, Group, Inspected, TokenSequence, stretch, within
from ..texts import first_other, joined

_OURS = "strands_sglang"


def check_sample(group: Group, episode: Inspected) -> Iterator[Finding]:
    """Check the samples of a rollout."""
    if group.kind != "slime":
        return
    yield from _twice(episode)
    samples = [sequence.sample for sequence in chain.from_iterable(each.sequences for each in group.episodes)]
    has_versions = any(sample.get("weight_versions") for sample in samples)
    for number, sequence in enumerate(episode.sequences):
        yield from within(_sample(group, sequence, has_versions), sequence=number)


def _twice(episode: Inspected) -> Iterator[Finding]:
    """Find tokens that two samples of a rollout share and both train."""
    rows = [(sequence.column("ids"), sequence.mask > 0) for sequence in episode.sequences[:64]]
    for later in range(1, len(rows)):
        for earlier in range(later):
            (ids, mask), (other, other_mask) = rows[later], rows[earlier]
            shared = min(len(ids), len(other))
            apart = np.flatnonzero(ids[:shared] != other[:shared])
            shared = int(apart[0]) if len(apart) else shared
            both = np.flatnonzero(mask[:shared] & other_mask[:shared])
            if len(both):
                why = f"sample {earlier} of the same rollout trains it, too"
                yield Finding("trained-twice", why, sequence=later, **stretch(both))


def _sample(group: Group, sequence: TokenSequence, has_versions: bool) -> Iterator[Finding]:
    sample, row = sequence.sample, sequence.row
    assert row is not None
    status, reward, removed = str(sample.get("status")), sample.get("reward"), bool(sample.get("remove_sample"))
    if not removed and status == "failed":
        yield Finding("reward-failure", "its status is failed, but it is not removed from the loss")
    if not removed and status in ("aborted", "pending") and reward is not None:
        yield Finding("reward-failure", f"its status is {status}, but it has the reward {reward}")
    prompt = len(sequence) - int(sample["response_length"])
    ids, given = row.token_ids[prompt:], sample.get("response")
    text = joined(ids, group.vocabulary)
    if text is not None and given and text != given:
        at = first_difference(text, given)
        why = f"its tokens say {text[at : at + 20]!r} where its response says {given[at : at + 20]!r}"
        yield Finding("id-text", why, token=prompt + first_other(ids, group.vocabulary, given), count=1)
    if sequence.mask.max(initial=0) > 1:
        at = int(sequence.mask.argmax())
        yield Finding("structure", f"its loss mask has the value {sequence.mask[at]}", token=at, count=1)
    experts = sample.get("rollout_routed_experts")
    if experts is not None and len(experts) != len(sequence) - 1:
        why = f"{len(sequence)} tokens have {len(experts)} rows of routed experts instead of {len(sequence) - 1}"
        yield Finding("experts-missing", why)
    metadata = sample.get("metadata") or {}
    ours = metadata.get(_OURS) if isinstance(metadata, dict) else None
    outcome = "task_complete" if ours is None else ours.get("outcome")
    if status == "completed" and outcome not in (None, "task_complete"):
        yield Finding("cut-complete", f"its status is completed, but the episode ended with {outcome}")
    versions = sample.get("weight_versions") or ()
    known = [number for number in map(version_number, versions) if number is not None]
    if any(later < earlier for earlier, later in pairwise(known)):
        yield Finding("version-falls", f"its weight versions fall: {versions}")
    if not versions and has_versions and not removed:
        yield Finding("version-missing", "it has no weight versions, although others have")
