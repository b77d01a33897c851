"""Checks of the turns: whether tokens, digests and facts fit each other, and where a turn attaches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ...credit import version_number
from ...messages import chain_of
from ...outcomes import TerminationReason
from ...reasons import Reason
from ...shown import counted, first_difference
from ...trajectory.turn import Turn, TurnStatus
from ..records import Finding, Group, Inspected, spans_of, stretch, turns_of, within
from ..texts import first_other, joined


def check_turns(group: Group, episode: Inspected) -> Iterator[Finding]:
    """Check every turn of an episode."""
    for kind, why in episode.problems:
        yield Finding(kind, why)
    pieces = episode.trajectory.pieces or group.vocabulary
    widths = [width for turn in episode.turns if turn.generation and (width := turn.generation.routed_width)]
    for turn in episode.turns:
        for check in (_tokens(turn, pieces, group), _experts(turn, widths), _status(turn)):
            yield from within(check, turn=turn.index)
    yield from _versions(group, episode)
    yield from _places(episode)
    yield from _by_tokens(group, episode)
    yield from _ends(episode)


# --- tokens ---


def _tokens(turn: Turn, pieces: Mapping[int, bytes], group: Group) -> Iterator[Finding]:
    ids = turn.output_ids.tolist()
    if turn.text is not None and pieces:
        text = joined(ids, pieces)
        if text is None:
            unknown = next(at for at, token_id in enumerate(ids) if token_id not in pieces)
            why = f"the file has no text for the sampled id {ids[unknown]}"
            yield Finding("id-text", why, token=unknown, count=1)
        elif not _same(text, turn.text):
            at = first_other(ids, pieces, turn.text)
            difference = f"{_around(text, turn.text)!r}, but the text that was sampled is {_around(turn.text, text)!r}"
            yield Finding("id-text", f"the text of the ids is {difference}", token=at, count=1)
    if group.encoder is None:
        return
    known = group.encoder.pieces(token_id for token_id in set(ids) if token_id < len(group.encoder.tokenizer))
    for token_id, piece in known.items():
        if pieces.get(token_id, piece) != piece:
            why = f"the file says that id {token_id} is {pieces[token_id]!r}, the tokenizer {piece!r}"
            yield Finding("id-text", why, token=ids.index(token_id), count=1)


def _same(text: str, recorded: str) -> bool:
    return text == recorded or text.removeprefix(" ") == recorded  # SentencePiece drops a leading space


def _around(text: str, other: str) -> str:
    at = first_difference(text, other)
    return text[max(at - 10, 0) : at + 20]


def _experts(turn: Turn, widths: Sequence[int]) -> Iterator[Finding]:
    answer = turn.generation
    if answer is None or not widths:
        return
    width = max(widths, key=widths.count)
    if answer.routed_experts is None:
        is_whole = answer.finish_type != "abort" and not answer.resumed_ids and turn.status is not TurnStatus.CUT
        if is_whole and len(turn.output_ids):
            yield Finding("experts-missing", "other turns have routed experts, and this one has none")
        return
    held = (len(answer.routed_experts) // 4 * 3 - answer.routed_experts[-2:].count("=")) / 4 / width
    if held != answer.routed_rows:
        why = f"{answer.routed_rows} tokens were routed, but there are {held:g} rows of experts"
        yield Finding("experts-missing", why)


# --- versions ---


def _versions(group: Group, episode: Inspected) -> Iterator[Finding]:
    trained = trained_tokens(episode)
    for turn in episode.turns if any(map(spans_of, turns_of([group]))) else ():
        count = len(turn.output_ids)
        covered = np.zeros(count, bool)
        for _, start, stop in spans_of(turn):
            covered[start:stop] = True
        if not episode.has_trajectory:  # a row has no versions of tokens that it does not train
            covered |= ~trained[id(turn)]
        missing = np.flatnonzero(~covered)
        if len(missing):
            why = f"{counted(len(missing), 'sampled token')} without a version of the weights, although others have one"
            yield Finding("version-missing", why, turn=turn.index, **stretch(missing))
    yield from _falling(episode)


def trained_tokens(episode: Inspected) -> dict[int, Any]:
    """Return which sampled tokens of each turn a sequence trains, by `id` of the turn."""
    trained = {id(turn): np.zeros(len(turn.output_ids), bool) for turn in episode.turns}
    for sequence in episode.sequences:
        for step in sequence.steps:
            mask = sequence.mask[step.sampled : step.stop] > 0
            trained[id(step.turn)][: len(mask)] |= mask
    return trained


def _falling(episode: Inspected) -> Iterator[Finding]:
    for turn in episode.turns:
        parent = turn.parent
        while parent and not spans_of(parent):  # of a server that told no version
            parent = parent.parent
        before = () if parent is None else spans_of(parent)
        if turn.parent_kept is not None:
            before = [span for span in before if span.start < turn.parent_kept]
        for (earlier, *_), (later, start, stop) in pairwise([*before[-1:], *spans_of(turn)]):
            first, second = version_number(earlier), version_number(later)
            if first is not None and second is not None and second < first:
                why = f"version {later} sampled it after version {earlier} sampled the tokens before"
                yield Finding("version-falls", why, turn=turn.index, token=start, count=stop - start)


# --- where turns attach ---


def _places(episode: Inspected) -> Iterator[Finding]:
    """Find turns that were rendered again although they continue a recorded conversation."""
    answers: dict[bytes, Turn] = {}
    for turn in episode.turns:
        chain = chain_of(turn.parts, turn.digests)
        extended = next((answers[link] for link in reversed(chain[1:]) if link in answers), None)
        by_policy = any(isinstance(part, Reason) and part.kind == "policy" for part in turn.why.detail)
        if turn.parent is None and extended is not None and not by_policy:
            why = f"it continues the conversation of call {extended.index}, but was rendered again: {turn.reason}"
            yield Finding("re-rendered", why, turn=turn.index)
        if turn.answer_key is not None:
            answers[turn.answer_key] = turn


def _by_tokens(group: Group, episode: Inspected) -> Iterator[Finding]:
    """Find turns that open with the text of an earlier sequence in other tokens, in files without conversations."""
    if not group.vocabulary or any(turn.digests for turn in episode.turns):
        return
    earlier: list[tuple[Turn, list[int], str]] = []
    for turn in episode.turns:
        ids = turn.token_ids()
        text = joined(ids, group.vocabulary)
        if text is None:
            continue
        for before, known, known_text in earlier if turn.parent is None else ():
            if text.startswith(known_text) and ids[: len(known)] != known:
                why = f"it opens with the text of call {before.index} and its answer, in other tokens"
                yield Finding("re-rendered", why, turn=turn.index)
                break
        if turn.output_ids:
            earlier.append((turn, ids, text))


# --- ends ---


_KEPT = (TurnStatus.ANSWERED, TurnStatus.COMMITTED, TurnStatus.FINAL)


def _status(turn: Turn) -> Iterator[Finding]:
    """Compare the status of a turn with its error and its end; records of other libraries have none."""
    answer = turn.generation
    if answer is None or not turn.digests:
        return
    if turn.status in _KEPT and (answer.finish_type == "abort" or turn.failure is not None):
        why = f"its answer counts as complete, but its request was aborted or failed: {turn.failure or 'abort'}"
        yield Finding("cut-complete", why)
    most = turn.sampling_params.get("max_new_tokens")
    if most is None or turn.is_auxiliary or turn.status is TurnStatus.DISCARDED:
        return
    if turn.clamped and answer.finish_type == "length" and answer.completion_tokens >= most - 8:
        why = f"the context had room for {most} tokens only, and the answer ended there"
        yield Finding("context-clamped", why)
    is_unended = answer.stop_token_id is None and answer.stop_string is None
    if answer.finish_type == "stop" and is_unended and answer.completion_tokens >= most:
        why = f"it counts as ended, but has no stop token and all {most} tokens that it was allowed"
        yield Finding("cut-complete", why)


def _ends(episode: Inspected) -> Iterator[Finding]:
    for turn in episode.turns:
        parent = turn.parent
        is_built_on = turn.is_answered and turn.status is not TurnStatus.DISCARDED and not turn.is_auxiliary
        if parent is not None and parent.status is TurnStatus.DISCARDED and is_built_on:
            why = f"it counts as discarded, so it is not trained, but call {turn.index} builds on its answer"
            yield Finding("not-trained", why, turn=parent.index)
    turns = [turn for turn in episode.turns if not turn.is_auxiliary and turn.status is not TurnStatus.DISCARDED]
    if not turns:
        return
    last, end = turns[-1], episode.end
    finish = None if last.generation is None else last.generation.finish_type
    is_aborted = finish == "abort" or last.status is TurnStatus.CUT
    if end.outcome == "task_complete" and (is_aborted or finish == "length"):
        ending = "was aborted" if is_aborted else "was cut off at its length"
        why = f"the task counts as complete, but its last answer {ending}"
        yield Finding("cut-complete", why, turn=last.index)
    has_no_answer = last.status is TurnStatus.FAILED
    if has_no_answer and end.reward is not None and last.failure_outcome is TerminationReason.INFRASTRUCTURE_ERROR:
        why = f"the episode has the reward {end.reward:g}, but its last call failed: {last.failure}"
        yield Finding("reward-failure", why, turn=last.index)
