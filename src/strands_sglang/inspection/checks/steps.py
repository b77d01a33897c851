"""Checks of a training step: its rows against those that its trajectories, rewards and settings give once more."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...credit import TrainingRow, TrainingRows, training_rows, version_number
from ...shown import counted
from ...trajectory.turn import TurnStatus
from ..records import Finding, Group, Inspected, TokenSequence, stretch, within
from ..texts import joined
from .credit import close, whose

ALMOST_ALL = 0.9
"""Share of tokens that must fit their neighbors' places for a column to count as shifted."""

FAR = 0.5
"""Mean distance in nats between two logprobs of the same tokens: clipping drops nearly all of such an update."""


def check_step(groups: Sequence[Group]) -> Iterator[Finding]:
    """Check all groups of a training step."""
    batch = groups[0].batch
    assert batch is not None
    for name in groups[0].strays:
        why = f"trajectories/{name}.safetensors belongs to no episode of the batch"
        yield Finding("left-out", why)
    for group in groups:
        for episode in group.episodes:
            rows = [pair for pair in enumerate(episode.sequences) if pair[1].row is not None]
            if episode.left_out is not None and rows:
                why = f"it is said to be left out ({episode.left_out}), but has {len(rows)} rows"
                yield Finding("left-out", why, group=group.id, episode=episode.id)
            for number, sequence in rows:
                yield from _placed(_alone(sequence, batch), (number, sequence), group=group.id, episode=episode.id)
    try:
        expected = _expected(groups, batch)
    except ValueError as error:
        yield Finding("structure", f"its rows cannot be made again: {error}")
        return
    wanted: dict[str, list[TrainingRow]] = {}
    for row in expected:
        wanted.setdefault(row.episode, []).append(row)
    for group in groups:
        for episode in group.episodes:
            findings = _episode(group, episode, batch, expected, wanted.get(episode.id, []))
            yield from within(findings, group=group.id, episode=episode.id)


def _placed(found: Iterable[Finding], row: tuple[int, TokenSequence], **place: Any) -> Iterator[Finding]:
    """Yield what is found in a row, a numbered sequence, with the turns of the tokens."""
    number, sequence = row
    for finding in found:
        step = None if finding.token is None else sequence.at(finding.token)
        yield finding.inside(sequence=number, turn=None if step is None else step.turn.index, **place)


def _expected(groups: Sequence[Group], batch: TrainingRows) -> TrainingRows:
    """Make the rows again.

    Raises:
        ValueError: They cannot be made.
    """
    episodes = []
    for group in groups:
        episodes += [episode.as_episode(group.key) for episode in group.episodes if episode.in_batch]
    return training_rows(episodes, **batch.settings)


def _agree(expected: TrainingRows, batch: TrainingRows, name: str) -> bool:
    ours, theirs = expected.advantages.get(name, {}), batch.advantages.get(name, {})
    return ours.keys() == theirs.keys() and all(close(value, theirs[turn]) for turn, value in ours.items())


# --- a row by itself ---


def _alone(sequence: TokenSequence, batch: TrainingRows) -> Iterator[Finding]:
    row, mask = sequence.row, sequence.mask
    assert row is not None
    if row.loss_weight is not None and not 0 < row.loss_weight < math.inf:
        yield Finding("weight", f"its weight {row.loss_weight:g} is not a number above 0")
    for kind, name, values in (
        ("advantage", "an advantage", np.asarray(row.advantages)),
        ("version", "a version of the weights", np.asarray([version is not None for version in row.versions])),
    ):
        stray = np.flatnonzero((mask == 0) & (values != 0.0))
        if len(stray):
            why = f"it is not trained, but has {name}"
            yield Finding(kind, why, **stretch(stray))
    newest = batch.settings.get("version")
    numbers = [number for name in set(row.versions) if (number := version_number(name)) is not None]
    if newest is not None and max(numbers, default=newest) > newest:
        why = f"its tokens of version {max(numbers)} are newer than the weights to be updated, version {newest}"
        yield Finding("version", why)


# --- the rows of an episode ---


def _episode(
    group: Group, episode: Inspected, batch: TrainingRows, expected: TrainingRows, wanted: Sequence[TrainingRow]
) -> Iterator[Finding]:
    if not episode.in_batch:
        return
    name, given, reason = episode.id, episode.left_out, expected.left_out.get(episode.id)
    numbered = [pair for pair in enumerate(episode.sequences) if pair[1].row is not None]
    is_judged = given is None or given.kind not in ("only_trained", "in_words")
    if not episode.has_trajectory:
        is_judged = False
    if given is not None and is_judged and (reason is None or reason.kind != given.kind):
        yield Finding("left-out", f"it is left out for a wrong reason ({given}): {reason or 'it can be trained'}")
    if given is None and reason is not None and episode.has_trajectory:
        yield Finding("left-out", f"it has {len(numbered)} rows, but is to be left out: {reason}")
    if given is None and reason is None and not numbered:
        yield Finding("left-out", "it has no row, and nothing says why it is left out")
    if name in batch.rewards and name in expected.rewards and not close(batch.rewards[name], expected.rewards[name]):
        why = f"its reward is {expected.rewards[name]:g}, but counts as {batch.rewards[name]:g}"
        yield Finding(whose(group, episode, batch.rewards[name]), why)
    has_settings = bool(batch.settings)  # else the rows are of several batches
    if has_settings and given is None and name in expected.advantages and not _agree(expected, batch, name):
        yield Finding("advantage", "its advantages by turn do not follow from the rewards of its group")
    if not wanted:
        return
    for number, sequence in numbered if has_settings else ():
        yield from _placed(_advantages(group, episode, sequence, expected), (number, sequence))
    if not episode.has_trajectory:
        return
    by_spans = {_key(row): row for row in wanted}
    for number, sequence in numbered:
        assert sequence.row is not None
        want = by_spans.pop(_key(sequence.row), None)
        yield from _placed(_row(group, sequence, want), (number, sequence))
    for row in by_spans.values() if numbered else ():
        why = f"a sequence of its trajectory trains {row.trained} tokens, but is not a row"
        yield Finding("not-trained", why, turn=row.spans[-1].turn)


def _key(row: TrainingRow) -> tuple[tuple[int, int, int], ...]:
    return tuple(span[:3] for span in row.spans)


def _advantages(group: Group, episode: Inspected, sequence: TokenSequence, expected: TrainingRows) -> Iterator[Finding]:
    row = sequence.row
    assert row is not None
    known = expected.advantages[episode.id]
    for step in sequence.steps:
        for position in np.flatnonzero(sequence.mask[step.sampled : step.stop]).tolist():
            value, wanted = row.advantages[step.sampled + position], known.get(step.turn.index)
            if wanted is None or close(value, wanted):
                continue
            siblings = [
                sibling for sibling in group.episodes if sibling is not episode and sibling.id in expected.advantages
            ]
            source = next(
                (sibling for sibling in siblings if close([*expected.advantages[sibling.id].values()][-1], value)), None
            )
            if source is not None:
                why = f"its advantage {value:g} is that of episode {source.id}; {wanted:g} follows from its own reward"
                kind = "reward-sibling"
            else:
                why = f"its advantage is {value:g}, but {wanted:g} follows from the rewards of its group"
                kind = "advantage"
            yield Finding(kind, why, token=step.sampled + position, count=1)
            return


def _row(group: Group, sequence: TokenSequence, want: TrainingRow | None) -> Iterator[Finding]:
    """Compare a row with the one that the turns give; None if they give none with its turns."""
    row = sequence.row
    assert row is not None
    if any(step.turn.trajectory is None for step in sequence.steps):
        turns = [span.turn for span in row.spans]
        yield Finding("structure", f"its turns {turns} do not form a sequence of the trajectory")
        return
    mask = np.zeros(len(sequence), np.uint8) if want is None else np.asarray(want.loss_mask, np.uint8)
    yield from _ids(group, sequence, row)
    yield from _mask(sequence, mask)
    if row.trainer_logprobs is not None:
        yield from _trainer(group, sequence, row, mask)
    if want is None:
        return
    yield from _logprobs(sequence, row, mask)
    yield from _versions(sequence, row, want, mask)
    for step, given, span in zip(sequence.steps, row.spans, want.spans, strict=True):
        if given.finish_reason != span.finish_reason:
            kind = "cut-complete" if given.finish_reason == "stop" else "changed"
            reasons = f"{given.finish_reason!r}, and its turn with {span.finish_reason!r}"
            yield Finding(kind, f"the row says that its answer ended with {reasons}", turn=step.turn.index)
    for name in ("prompt_length", "episode_trained", "episode_version"):
        value, wanted = getattr(row, name), getattr(want, name)
        if value != wanted:
            kind = "version" if name == "episode_version" else "weight"
            yield Finding(kind, f"its {name} is {value}, but {wanted} by its trajectory")


def _ids(group: Group, sequence: TokenSequence, row: TrainingRow) -> Iterator[Finding]:
    ids, given = sequence.column("ids"), np.asarray(row.token_ids)
    different = np.flatnonzero(ids != given)
    if not len(different):
        return
    first, last = int(different[0]), int(different[-1])
    recorded_text, text = joined(ids.tolist(), group.vocabulary), joined(row.token_ids, group.vocabulary)
    why = f"{counted(len(different), 'token')} not as in the trajectory"
    kind = "ids" if recorded_text is None else "id-text"
    if text is not None and text == recorded_text:
        why = "its text is that of the turns, in other tokens"
        is_inside = any(step.sampled <= first and last < step.stop for step in sequence.steps)
        kind = "drift" if is_inside else "re-rendered"
    yield Finding(kind, why, **stretch(different))


def _mask(sequence: TokenSequence, wanted: Any) -> Iterator[Finding]:
    for position in np.flatnonzero((sequence.mask > 0) & (wanted == 0)).tolist():
        step = sequence.at(position)
        assert step is not None
        turn = step.turn
        excluded = {
            "constrained": turn.constrained,
            "discarded": turn.status is TurnStatus.DISCARDED,
            "auxiliary": turn.is_auxiliary,
        }
        reasons = " and ".join(word for word, holds in excluded.items() if holds)
        if position < step.sampled:
            kind = "mask-not-sampled"
            why = "it is part of a prompt, which the model did not sample, so its mask should be 0"
        elif reasons:
            kind, why = "mask-off-policy", f"its answer is {reasons}"
        else:
            kind, why = "trained-twice", "the first sequence with this token trains it"
        yield Finding(kind, why, token=position, count=1)
    for position in np.flatnonzero((sequence.mask == 0) & (wanted > 0)).tolist():
        why = "the model sampled it, and it is neither constrained nor auxiliary nor discarded nor trained elsewhere"
        yield Finding("not-trained", why, token=position, count=1)


def _logprobs(sequence: TokenSequence, row: TrainingRow, mask: Any) -> Iterator[Finding]:
    given = np.asarray(row.logprobs)
    # Under truncated sampling, a trainer may take the logprobs among the ids that were kept.
    columns = [sequence.column(name) for name in ("logprobs", "sampling_logprobs")]
    turns = min(columns, key=lambda column: int((given != column)[mask > 0].sum()))
    expected = np.where(mask > 0, turns, 0.0)
    # A token whose mask was changed has been told of, and may have its own logprob or 0.0.
    is_judged = (sequence.mask > 0) == (mask > 0)
    different = np.flatnonzero(is_judged & (given != expected) & ~(np.isnan(given) & np.isnan(expected)))
    if not len(different):
        return
    first = int(different[0])
    where = shifted(given, turns, different[mask[different] > 0])
    if where is not None:
        why = f"the logprobs from here are those of the token {where} each: shifted by one"
        yield Finding("logprobs-shifted", why, **stretch(different))
        return
    difference = counted(len(different), "logprob")
    why = f"{difference} not as in the trajectory: {given[first]:g} instead of {expected[first]:g}"
    yield Finding("logprobs", why, **stretch(different))


def shifted(given: Any, known: Any, positions: Any) -> str | None:
    """Return whose logprobs the tokens at some positions have: "before", "after", or None for neither."""
    for step, where in ((-1, "before"), (1, "after")):
        inside = positions[(positions + step >= 0) & (positions + step < len(known))]
        # A neighbor that was not sampled has no logprob to take.
        inside = inside[~np.isnan(known[inside + step])]
        is_most = len(inside) and len(inside) * 2 >= len(positions)
        if is_most and (given[inside] == known[inside + step]).mean() >= ALMOST_ALL:
            return where
    return None


def _versions(sequence: TokenSequence, row: TrainingRow, want: TrainingRow, mask: Any) -> Iterator[Finding]:
    reported: set[str] = set()
    for position in np.flatnonzero((sequence.mask > 0) & (mask > 0)).tolist():
        given, wanted = row.versions[position], want.versions[position]
        if given == wanted:
            continue
        before = [number for name in want.versions[:position] if (number := version_number(name)) is not None]
        number = version_number(given)
        is_falling = bool(before) and number is not None and number < before[-1]
        kind = "version-falls" if is_falling else "version"
        if given is None:
            kind = "version-missing"
        if kind not in reported:
            reported.add(kind)
            yield Finding(kind, f"its version is {given!r}, and the trajectory's {wanted!r}", token=position, count=1)


# --- the trainer's own logprobs ---


def _trainer(group: Group, sequence: TokenSequence, row: TrainingRow, mask: Any) -> Iterator[Finding]:
    trainer_logprobs, known = np.asarray(row.trainer_logprobs), sequence.column("logprobs")
    trained = np.flatnonzero((mask > 0) & (sequence.mask > 0) & ~np.isnan(known))
    if len(trained) >= 4 and not trainer_logprobs[trained].any() and known[trained].any():
        why = "the trainer's own logprobs of all trained tokens are 0, though the sampler's are not"
        yield Finding("logprobs", why, **stretch(trained))
        return
    # What older weights sampled may differ by any amount.
    newest = max((row.episode_version or 0 for row in group.batch or ()), default=0)
    is_old = np.asarray([(version_number(version) or 0) < newest for version in row.versions])
    for step in sequence.steps:
        inside = trained[(trained >= step.sampled) & (trained < step.stop) & ~is_old[trained]]
        yield from _distance(trainer_logprobs, known, inside)
    bad = np.flatnonzero((sequence.mask > 0) & (~np.isfinite(trainer_logprobs) | (trainer_logprobs > 1e-3)))
    if len(bad):
        why = f"the trainer's own logprob {trainer_logprobs[bad[0]]:g} is not the logarithm of a probability"
        yield Finding("logprobs", why, **stretch(bad[:1]))


def _distance(trainer_logprobs: Any, known: Any, trained: Any) -> Iterator[Finding]:
    """Compare the trainer's logprobs of an answer with the sampler's."""
    apart = float(np.abs(trainer_logprobs[trained] - known[trained]).mean()) if len(trained) >= 4 else 0.0
    if not apart > FAR:
        return
    for step, where in ((-1, "before"), (1, "after")):
        inside = trained[np.isin(trained + step, trained)]
        if len(inside) >= 3 and np.abs(trainer_logprobs[inside] - known[inside + step]).mean() < 0.2 * apart:
            why = f"the trainer's own logprobs fit the token {where} each: they are shifted by one"
            yield Finding("logprobs-shifted", why, **stretch(trained))
            return
    if len(trained) >= 8:
        why = f"the trainer's own logprobs are {apart:.2f} nats from the sampler's: of other tokens or temperature"
        yield Finding("logprobs", why, **stretch(trained))
