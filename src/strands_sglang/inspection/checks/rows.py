"""Checks of the rows that a trainer receives, against the turns that they were made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...credit import version_number
from ...terminal import counted
from ..records import Episode, Group, SequenceRecord, Writer
from ..texts import joined
from .turns import Facts

ALMOST_ALL = 0.9
"""Share of tokens that must fit their neighbors' places for a column to count as shifted."""


def check_rows(group: Group, episode: Episode) -> Iterator[Facts]:
    """Check the rows of an episode of a training step."""
    if group.kind != "step":
        return
    rows = [(number, sequence) for number, sequence in enumerate(episode.sequences) if sequence.number is not None]
    if episode.left_out is not None and rows:
        yield {"kind": "left-out", "why": f"it is said to be left out ({episode.left_out}), but has {len(rows)} rows"}
    for number, sequence in rows:
        for facts in _row(group, episode, sequence):
            yield {"sequence": number, **facts}
    if episode.facts.get("has_no_trajectory"):
        return
    yield from _trained_once(episode)
    yield from _counts(episode)


def _row(group: Group, episode: Episode, sequence: SequenceRecord) -> Iterator[Facts]:
    row, mask = sequence.row, sequence.mask
    if (mask > 1).any():
        at = int(np.flatnonzero(mask > 1)[0])
        yield {"kind": "structure", "why": f"its loss mask has the value {mask[at]}", "token": at, "count": 1}
    derived = _derived(episode, sequence)
    if derived is None:
        if not episode.facts.get("has_no_trajectory"):
            yield from _other_tokens(group, episode, sequence)
        return
    ids = episode.column(sequence, "ids").astype(np.int64)
    given = np.asarray(row["token_ids"], np.int64)
    different = np.flatnonzero(ids != given)
    if len(different):
        yield from _ids(group, episode, sequence, different)
    yield from _mask(episode, sequence, derived)
    yield from _row_logprobs(episode, sequence, derived)
    yield from _row_versions(episode, sequence, derived)
    yield from _ends(episode, sequence)
    if sequence.trainer_logprobs is not None:
        yield from _trainer(episode, sequence, derived)


def _ends(episode: Episode, sequence: SequenceRecord) -> Iterator[Facts]:
    for step, (*_, told) in zip(sequence.steps, sequence.row.get("spans") or (), strict=False):
        turn = episode.turns[step.turn]
        ended = turn.finish if step.stop > step.sampled else None
        if told != ended:
            why = f"the row says that its answer ended with {told!r}, and its turn with {ended!r}"
            yield {"kind": "cut-complete" if told == "stop" else "changed", "why": why, "turn": turn.number}


def _derived(episode: Episode, sequence: SequenceRecord) -> SequenceRecord | None:
    """Return what the turns give for a row; None if its tokens do not form a path through them."""
    own = next((one for one in episode.facts.get("derived", ()) if list(one.steps) == list(sequence.steps)), None)
    if own is not None or not sequence.steps:
        return own
    turns = [episode.turns[step.turn] for step in sequence.steps]
    if any("turn" not in turn.facts for turn in turns):
        return None
    mask = np.zeros(len(sequence), np.uint8)  # a path that the trajectory does not export, such as a discarded one
    for step, turn in zip(sequence.steps, turns, strict=True):
        mask[step.sampled : step.stop] = not (turn.is_constrained or turn.is_discarded or turn.is_auxiliary)
    return SequenceRecord(sequence.steps, mask)


def _turn_at(episode: Episode, sequence: SequenceRecord, position: int) -> int | None:
    step = next((step for step in sequence.steps if step.start <= position < step.stop), None)
    return None if step is None else episode.turns[step.turn].number


def _ids(group: Group, episode: Episode, sequence: SequenceRecord, different: Any) -> Iterator[Facts]:
    first, last = int(different[0]), int(different[-1])
    own = joined(episode.column(sequence, "ids").astype(np.int64).tolist(), group.vocabulary)
    text = joined(np.asarray(sequence.row["token_ids"]).tolist(), group.vocabulary)
    at = {"turn": _turn_at(episode, sequence, first), "token": first, "count": last - first + 1}
    if text is not None and text == own:
        yield {"kind": _where(sequence, first, last), "why": "its text is that of the turns, in other tokens", **at}
    else:
        kind = "ids" if own is None else "id-text"
        yield {"kind": kind, "why": f"{counted(len(different), 'token')} not as in the trajectory", **at}


def _where(sequence: SequenceRecord, first: int, last: int) -> str:
    """Return the kind of a stretch with the same text in other tokens: inside sampled text, or across its edge."""
    inside = any(step.sampled <= first and last < step.stop for step in sequence.steps)
    return "drift" if inside else "re-rendered"


def _other_tokens(group: Group, episode: Episode, sequence: SequenceRecord) -> Iterator[Facts]:
    """Find the sequence of the trajectory that a row with other turns is closest to."""
    given = np.asarray(sequence.row["token_ids"], np.int64)
    text = joined(given.tolist(), group.vocabulary)
    for derived in episode.facts.get("derived", ()):
        ids = episode.column(derived, "ids").astype(np.int64)
        shorter = min(len(ids), len(given))
        apart = np.flatnonzero(ids[:shorter] != given[:shorter])
        first = int(apart[0]) if len(apart) else max(0, shorter - 1)
        if text is not None and joined(ids.tolist(), group.vocabulary) == text:
            same_end = np.flatnonzero(ids[::-1][:shorter] != given[::-1][:shorter])
            last = len(ids) - 1 - (int(same_end[0]) if len(same_end) else 0)
            at = {"turn": _turn_at(episode, derived, first), "token": first, "count": 1}
            yield {"kind": _where(derived, first, max(first, last)), "why": "its text was tokenized again", **at}
            return
    spans = [span[0] for span in sequence.row.get("spans") or ()]
    yield {"kind": "structure", "why": f"its turns {spans} do not form a sequence of the trajectory"}


def _mask(episode: Episode, sequence: SequenceRecord, derived: SequenceRecord) -> Iterator[Facts]:
    writers = episode.column(sequence, "writers")
    for position in np.flatnonzero((sequence.mask > 0) & (derived.mask == 0)).tolist():
        step = next(step for step in sequence.steps if step.start <= position < step.stop)
        turn = episode.turns[step.turn]
        at = {"turn": turn.number, "token": position, "count": 1}
        if writers[position] != Writer.MODEL:
            yield {"kind": "mask-not-sampled", "why": "it is part of a prompt, which the model did not sample", **at}
        elif turn.is_constrained or turn.is_discarded or turn.is_auxiliary:
            words = {"constrained": turn.is_constrained, "discarded": turn.is_discarded, "auxiliary": turn.is_auxiliary}
            told = " and ".join(word for word, holds in words.items() if holds)
            yield {"kind": "mask-off-policy", "why": f"its answer is {told}", **at}
        else:
            yield {"kind": "trained-twice", "why": "the first sequence with this token trains it", **at}
    for position in np.flatnonzero((sequence.mask == 0) & (derived.mask > 0)).tolist():
        at = {"turn": _turn_at(episode, sequence, position), "token": position, "count": 1}
        why = "the model sampled it, and it is neither constrained nor auxiliary nor discarded nor trained elsewhere"
        yield {"kind": "not-trained", "why": why, **at}


def _row_logprobs(episode: Episode, sequence: SequenceRecord, derived: SequenceRecord) -> Iterator[Facts]:
    given = np.asarray(sequence.row["logprobs"], np.float64)
    # Under truncated sampling, a trainer may take the logprobs among the ids that were kept.
    columns = [episode.column(derived, name) for name in ("logprobs", "sampling_logprobs")]
    turns = min(columns, key=lambda column: int((given != column)[derived.mask > 0].sum()))
    expected = np.where(derived.mask > 0, turns, 0.0)
    # A token whose mask was changed has been told of, and may have its own logprob or 0.0.
    judged = (sequence.mask > 0) == (derived.mask > 0)
    different = np.flatnonzero(judged & (given != expected) & ~(np.isnan(given) & np.isnan(expected)))
    if not len(different):
        return
    first, last = int(different[0]), int(different[-1])
    at = {"turn": _turn_at(episode, sequence, first), "token": first, "count": last - first + 1}
    where = shifted(given, turns, different[derived.mask[different] > 0])
    if where is not None:
        why = f"the logprobs from here are those of the token {where} each: shifted by one"
        yield {"kind": "logprobs-shifted", "why": why, **at}
        return
    told = counted(len(different), "logprob")
    why = f"{told} not as in the trajectory: {given[first]:g} instead of {expected[first]:g}"
    yield {"kind": "logprobs", "why": why, **at}


def shifted(given: Any, known: Any, positions: Any) -> str | None:
    """Return whose logprobs the tokens at some positions have: "before", "after", or None for neither."""
    for step, where in ((-1, "before"), (1, "after")):
        inside = positions[(positions + step >= 0) & (positions + step < len(known))]
        # A neighbor that was not sampled has no logprob to take.
        inside = inside[~np.isnan(known[inside + step])]
        if (
            len(inside)
            and len(inside) * 2 >= len(positions)
            and (given[inside] == known[inside + step]).mean() >= ALMOST_ALL
        ):
            return where
    return None


def _row_versions(episode: Episode, sequence: SequenceRecord, derived: SequenceRecord) -> Iterator[Facts]:
    row = sequence.row
    names = [*row["names"], None]
    expected: list[str | None] = [None] * len(sequence)
    for version, start, stop in episode.versions(derived):
        expected[start:stop] = [version] * (stop - start)
    stray = np.flatnonzero((sequence.mask == 0) & (np.asarray(row["versions"]) != -1))
    if len(stray):
        why = "it is not trained, but has a version of the weights"
        yield {"kind": "version", "why": why, "token": int(stray[0]), "count": len(stray)}
    told: set[str] = set()
    for position in np.flatnonzero((sequence.mask > 0) & (derived.mask > 0)).tolist():
        number = int(row["versions"][position])
        given = names[number] if -1 <= number < len(row["names"]) else "?"
        if given == expected[position]:
            continue
        kind = "version-missing" if given is None else "version"
        earlier = expected[position]
        if (
            given is not None
            and earlier is not None
            and given.isdecimal()
            and earlier.isdecimal()
            and int(given) < int(earlier)
        ):
            before = [name for name in expected[:position] if name is not None and name.isdecimal()]
            kind = "version-falls" if before and int(given) < int(before[-1]) else kind
        if kind not in told:
            told.add(kind)
            at = {"turn": _turn_at(episode, sequence, position), "token": position, "count": 1}
            yield {"kind": kind, "why": f"its version is {given!r}, and the trajectory's {expected[position]!r}", **at}


FAR = 0.5
"""Mean distance in nats between two logprobs of the same tokens: clipping drops nearly all of such an update."""


def _trainer(episode: Episode, sequence: SequenceRecord, derived: SequenceRecord) -> Iterator[Facts]:
    own = np.asarray(sequence.trainer_logprobs, np.float64)
    known = episode.column(derived, "logprobs")
    trained = np.flatnonzero((derived.mask > 0) & (sequence.mask > 0) & ~np.isnan(known))
    if len(trained) >= 4 and not own[trained].any() and known[trained].any():
        why = "the trainer's own logprobs of all trained tokens are 0, though the sampler's are not"
        yield {"kind": "logprobs", "why": why, "token": int(trained[0]), "count": len(trained)}
        return
    for step in sequence.steps:
        inside = trained[(trained >= step.sampled) & (trained < step.stop)]
        yield from ({"turn": episode.turns[step.turn].number, **one} for one in _distance(own, known, inside))
    for positions, why in (
        (
            np.flatnonzero((sequence.mask > 0) & (~np.isfinite(own) | (own > 1e-3))),
            "the trainer's own logprob {:g} is not the logarithm of a probability",
        ),
        (
            np.flatnonzero((sequence.mask == 0) & (derived.mask == 0) & (own != 0.0)),
            "it is not trained, but has the logprob {:g} by the trainer",
        ),
    ):
        if len(positions):
            at = int(positions[0])
            place = {"turn": _turn_at(episode, sequence, at), "token": at, "count": 1}
            yield {"kind": "logprobs", "why": why.format(own[at]), **place}


def _distance(own: Any, known: Any, trained: Any) -> Iterator[Facts]:
    """Compare the trainer's logprobs of an answer with the sampler's."""
    apart = float(np.abs(own[trained] - known[trained]).mean()) if len(trained) >= 4 else 0.0
    if not apart > FAR:
        return
    at = {"token": int(trained[0]), "count": len(trained)}
    for step, where in ((-1, "before"), (1, "after")):
        inside = trained[np.isin(trained + step, trained)]
        if len(inside) >= 3 and np.abs(own[inside] - known[inside + step]).mean() < 0.2 * apart:
            why = f"the trainer's own logprobs fit the token {where} each: they are shifted by one"
            yield {"kind": "logprobs-shifted", "why": why, **at}
            return
    if len(trained) >= 8:
        why = f"the trainer's own logprobs are {apart:.2f} nats from the sampler's: of other tokens or temperature"
        yield {"kind": "logprobs", "why": why, **at}


def _trained_once(episode: Episode) -> Iterator[Facts]:
    """Compare the rows of a whole episode with what its turns give: no token is missing, none is there twice."""
    counts = {position: np.zeros(len(turn.sampled), np.int64) for position, turn in enumerate(episode.turns)}
    rows = [sequence for sequence in episode.sequences if sequence.number is not None]
    for number, sequence in enumerate(episode.sequences):
        if sequence.number is None:
            continue
        for step in sequence.steps:
            own = sequence.mask[step.sampled : step.stop] > 0
            before = counts.setdefault(step.turn, np.zeros(len(own), np.int64))[: len(own)]
            twice = np.flatnonzero(own & (before > 0))
            if len(twice):
                at = {
                    "turn": episode.turns[step.turn].number,
                    "token": step.sampled + int(twice[0]),
                    "count": len(twice),
                }
                yield {"kind": "trained-twice", "why": "an earlier row trains it, too", "sequence": number, **at}
            before += own
    if episode.left_out is not None:
        return
    matched = {sequence.steps[-1].turn for sequence in rows if sequence.steps}
    for number, derived in enumerate(episode.facts.get("derived", ())):
        if derived.mask.any() and derived.steps[-1].turn not in matched:
            turn = episode.turns[derived.steps[-1].turn].number
            if rows or not episode.facts.get("in_batch"):
                why = f"sequence {number} of its trajectory trains {int(derived.mask.sum())} tokens, but is not a row"
                yield {"kind": "not-trained", "why": why, "turn": turn}
    if not rows and episode.facts.get("in_batch"):
        yield {"kind": "left-out", "why": "it has no row, and nothing says why it is left out"}


def _counts(episode: Episode) -> Iterator[Facts]:
    rows = [(number, one) for number, one in enumerate(episode.sequences) if one.number is not None]
    derived = [one for one in episode.facts.get("derived", ()) if one.mask.any()]
    total = sum(int(one.mask.sum()) for one in derived)
    versions = []
    for one in derived:
        spans = episode.versions(one)
        covered = np.zeros(len(one), bool)
        for version, start, stop in spans:
            covered[start:stop] = True
            if one.mask[start:stop].any():
                versions.append(version)
        if (one.mask[~covered] > 0).any():
            versions.append("")
    numbers = [number for number in map(version_number, versions) if number is not None]
    oldest = min(numbers) if numbers and len(numbers) == len(versions) else None
    for number, sequence in rows:
        if _derived(episode, sequence) is None:
            continue
        row = sequence.row
        opening = len(episode.turns[sequence.steps[0].turn].prompt)
        wanted = {"prompt_length": opening, "episode_trained": total, "episode_version": oldest}
        for name, value in wanted.items():
            if row[name] != value:
                kind = "version" if name == "episode_version" else "weight"
                yield {
                    "kind": kind,
                    "why": f"its {name} is {row[name]}, but {value} by its trajectory",
                    "sequence": number,
                }
