"""Checks of the turns: the tokens, logprobs and facts that were recorded, and where a turn attaches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ...messages import chain_of, next_link
from ...reasons import Reason
from ...terminal import counted
from ..records import Episode, Group, TurnRecord
from ..texts import joined

Facts = dict[str, Any]


def check_turns(group: Group, episode: Episode) -> Iterator[Facts]:
    """Check every turn of an episode."""
    for kind, why in episode.problems:
        if kind != "row-turns":
            yield {"kind": kind, "why": why}
    for before, turn in pairwise(episode.turns):
        if turn.number <= before.number:
            yield {"kind": "structure", "why": f"it comes after call {before.number}", "turn": turn.number}
    for turn in episode.turns:
        pieces = episode.facts.get("pieces") or group.vocabulary
        checks = (_tokens(turn, pieces, group), _reports(episode, turn), _experts(episode, turn))
        for check in checks:
            for facts in check:
                yield {"turn": turn.number, **facts}
    yield from _versions(group, episode)
    yield from _boundaries(group, episode)
    yield from _ends(episode)


# --- tokens ---


def _tokens(turn: TurnRecord, pieces: Mapping[int, bytes], group: Group) -> Iterator[Facts]:
    sampled = turn.sampled
    text = None if turn.text is None else joined(sampled.ids.tolist(), pieces)
    if turn.text is not None and text is not None and not _same(text, turn.text):
        at = _first_difference(sampled.ids.tolist(), pieces, turn.text)
        told = f"{_around(text, turn.text)!r}, but the text that was sampled is {_around(turn.text, text)!r}"
        yield {"kind": "id-text", "why": f"the text of the ids is {told}", "token": at, "count": 1}
    elif turn.text is not None and text is None and pieces:
        unknown = next(i for i, token_id in enumerate(sampled.ids.tolist()) if token_id not in pieces)
        why = f"the file has no text for the sampled id {int(sampled.ids[unknown])}"
        yield {"kind": "id-text", "why": why, "token": unknown, "count": 1}
    known = group.facts.get("tokenizer_pieces") or {}
    for token_id in dict.fromkeys(sampled.ids.tolist()) if known else ():
        if token_id in known and pieces.get(token_id, known[token_id]) != known[token_id]:
            at = int(np.flatnonzero(sampled.ids == token_id)[0])
            why = f"the file says that id {token_id} is {pieces[token_id]!r}, the tokenizer {known[token_id]!r}"
            yield {"kind": "id-text", "why": why, "token": at, "count": 1}
    if (sampled.ids < 0).any() or (turn.prompt.ids < 0).any():
        yield {"kind": "structure", "why": "a token id is negative"}


def _same(text: str, recorded: str) -> bool:
    return text == recorded or text.removeprefix(" ") == recorded  # SentencePiece drops a leading space


def _first_difference(ids: Sequence[int], vocabulary: Mapping[int, bytes], recorded: str) -> int:
    wanted, length = recorded.encode("utf-8", "replace"), 0
    for at, token_id in enumerate(ids):
        piece = vocabulary[token_id]
        if wanted[length : length + len(piece)] != piece:
            return at
        length += len(piece)
    return max(len(ids) - 1, 0)


def _around(text: str, other: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return text[max(at - 10, 0) : at + 20]


# --- the server's own report ---


def _reports(episode: Episode, turn: TurnRecord) -> Iterator[Facts]:
    recorded = turn.facts.get("turn")
    answer = None if recorded is None else recorded.generation
    if answer is None or turn.is_resumed:
        return
    meta = answer.meta_info
    finish = meta.get("finish_reason")
    was = finish.get("type") if isinstance(finish, Mapping) else None
    # An aborted request whose budget was used up ended at its length.
    if was not in (None, answer.finish_type) and (was, answer.finish_type) != ("abort", "length"):
        kind = "cut-complete" if answer.finish_type == "stop" else "changed"
        why = f"it is said to have ended with {answer.finish_type!r}, but the server reported {was!r}"
        yield {"kind": kind, "why": why}
    counted = meta.get("completion_tokens")
    if isinstance(counted, int) and counted != len(turn.sampled):
        text = None if turn.text is None else joined(turn.sampled.ids.tolist(), episode.facts.get("pieces", {}))
        kind = "drift" if text is not None and _same(text, turn.text or "") else "id-text"
        why = f"it has {len(turn.sampled)} sampled tokens, but the server reported {counted}"
        yield {"kind": kind, "why": why}


# --- experts ---


def _experts(episode: Episode, turn: TurnRecord) -> Iterator[Facts]:
    recorded = turn.facts.get("turn")
    answer = recorded.generation if recorded is not None else None
    if answer is None:
        return
    shapes = [other.sampled.experts.shape[1] for other in episode.turns if other.sampled.experts is not None]
    width = max(shapes, key=shapes.count, default=None)
    whole = answer.finish_type != "abort" and not turn.is_resumed and not turn.is_cut
    if answer.routed_experts is None:
        if width is not None and whole and len(turn.sampled):
            yield {"kind": "experts-missing", "why": "other turns have routed experts, and this one has none"}
        return
    needed = answer.routed_rows
    rows = turn.facts.get("expert_rows")
    if rows is None:
        ids = len(answer.routed_experts) // 4 * 3 - answer.routed_experts[-2:].count("=")
        if width:
            rows = ids / 4 / width
        else:
            rows = needed if turn.sampled.experts is not None else 0
    if rows != needed or (turn.sampled.experts is not None and width != turn.sampled.experts.shape[1]):
        why = f"{needed} tokens were routed, but there are {rows:g} rows of experts"
        yield {"kind": "experts-missing", "why": why}


# --- versions ---


def _versions(group: Group, episode: Episode) -> Iterator[Facts]:
    turns = [turn for one in group.episodes for turn in one.turns if len(turn.sampled)]
    if not any(turn.sampled.versions for turn in turns):
        for turn in episode.turns:
            recorded = turn.facts.get("turn")
            meta = recorded.generation.meta_info if recorded is not None and recorded.generation is not None else {}
            if meta.get("weight_version") is not None and len(turn.sampled):
                why = f"the server reported version {meta['weight_version']!r}, but the tokens have none"
                yield {
                    "kind": "version-missing",
                    "why": why,
                    "turn": turn.number,
                    "token": 0,
                    "count": len(turn.sampled),
                }
        return
    for position, turn in enumerate(episode.turns):
        covered = np.zeros(len(turn.sampled), bool)
        for _, start, stop in turn.sampled.versions:
            covered[start:stop] = True
        if "turn" not in turn.facts:  # a row has no versions of tokens that it does not train
            covered |= ~_trained_in_rows(episode, position)
        missing = np.flatnonzero(~covered)
        if len(missing):
            why = f"{counted(len(missing), 'sampled token')} without a version of the weights, although others have one"
            yield {
                "kind": "version-missing",
                "why": why,
                "turn": turn.number,
                "token": int(missing[0]),
                "count": len(missing),
            }
    yield from _falling(episode)


def _trained_in_rows(episode: Episode, position: int) -> Any:
    trained = np.zeros(len(episode.turns[position].sampled), bool)
    for sequence in episode.sequences:
        for step in sequence.steps:
            if step.turn == position:
                mask = sequence.mask[step.sampled : step.stop] > 0
                trained[: len(mask)] |= mask
    return trained


def _falling(episode: Episode) -> Iterator[Facts]:
    seen: set[tuple[int, int]] = set()
    for position, turn in enumerate(episode.turns):
        spans = [(position, span) for span in turn.sampled.versions]
        parent = turn.parent
        while parent is not None and not episode.turns[parent].sampled.versions:
            parent = episode.turns[parent].parent
        if parent is not None:
            before = [
                span for span in episode.turns[parent].sampled.versions if turn.kept is None or span.start < turn.kept
            ]
            spans = [(parent, span) for span in before[-1:]] + spans
        for (_, earlier), (at, later) in pairwise(spans):
            if _number(later.version) is None or _number(earlier.version) is None:
                continue
            if _number(later.version) < _number(earlier.version) and (at, later.start) not in seen:  # type: ignore[operator]
                seen.add((at, later.start))
                why = f"version {later.version} sampled it after version {earlier.version} sampled the tokens before"
                count = later.stop - later.start
                yield {"kind": "version-falls", "why": why, "turn": turn.number, "token": later.start, "count": count}


def _number(version: str) -> int | None:
    try:
        return int(version)
    except ValueError:
        return None


# --- where turns attach ---


def _boundaries(group: Group, episode: Episode) -> Iterator[Facts]:
    answers: dict[bytes, TurnRecord] = {}
    for turn in episode.turns:
        recorded = turn.facts.get("turn")
        if recorded is not None and recorded.digests:
            yield from ({"turn": turn.number, **facts} for facts in _place(turn, recorded, answers))
            if recorded.answer_key is not None:
                answers[recorded.answer_key] = turn
    yield from _by_tokens(group, episode)


def _place(turn: TurnRecord, recorded: Any, answers: Mapping[bytes, TurnRecord]) -> Iterator[Facts]:
    """Compare where a turn attaches with the conversation that it asked."""
    parent = recorded.parent
    if parent is None:
        chain = chain_of(recorded.parts, recorded.digests)
        extended = next((answers[link] for link in reversed(chain[1:]) if link in answers), None)
        if chain[-1] != recorded.key:
            own = [other for key, other in answers.items() if _linked(key, recorded.digests) == recorded.key]
            told = f"its conversation continues call {own[0].number}" if own else "its conversation is another"
            yield {"kind": "re-rendered", "why": f"it opens a sequence, but {told}"}
        elif extended is not None and not any(part.kind == "policy" for part in _because(recorded.why)):
            why = f"it continues the conversation of call {extended.number}, but was rendered again: {turn.reason}"
            yield {"kind": "re-rendered", "why": why}
    elif parent.answer_key is not None and _linked(parent.answer_key, recorded.digests) != recorded.key:
        yield {
            "kind": "re-rendered",
            "why": f"it extends call {parent.index}, but its conversation does not continue it",
        }
    if recorded.answer_digest is not None and next_link(recorded.key, recorded.answer_digest) != recorded.answer_key:
        yield {"kind": "changed", "why": "the digest of its answer is not the one that later calls look for"}


def _because(why: Reason) -> list[Reason]:
    return [part for part in why.detail if isinstance(part, Reason)]


def _linked(key: bytes, digests: Sequence[bytes]) -> bytes:
    for digest in digests:
        key = next_link(key, digest)
    return key


def _by_tokens(group: Group, episode: Episode) -> Iterator[Facts]:
    """Find turns that open with the text of an earlier sequence in other tokens, in files without conversations."""
    if not group.vocabulary or any("turn" in turn.facts and turn.facts["turn"].digests for turn in episode.turns):
        return
    vocabulary = group.vocabulary
    earlier: list[tuple[TurnRecord, list[int], str]] = []
    for position, turn in enumerate(episode.turns):
        if turn.parent is None and earlier:
            ids = turn.prompt.ids.tolist()
            text = joined(ids, vocabulary)
            for before, known, known_text in earlier if text is not None else ():
                if text.startswith(known_text) and ids[: len(known)] != known:  # type: ignore[union-attr]
                    why = f"it opens with the text of call {before.number} and its answer, in other tokens"
                    yield {"kind": "re-rendered", "why": why, "turn": turn.number}
                    break
        steps = episode.steps(position)
        parts = [(episode.turns[step.turn], step.stop - step.sampled) for step in steps]
        whole = [i for one, kept in parts for i in (*one.prompt.ids.tolist(), *one.sampled.ids[:kept].tolist())]
        whole_text = joined(whole, vocabulary)
        if whole_text is not None and len(turn.sampled):
            earlier.append((turn, whole, whole_text))


# --- ends ---


_INFRASTRUCTURE = tuple(
    f"SGLang{name}Error" for name in ("HTTP", "Connection", "Decoding", "Throttled", "Client", "Deadline")
)


_THROWN_AWAY = ("another_kept", "asked_again", "ended_before")
"""Fates of discarded answers."""


def _status(episode: Episode, turn: TurnRecord) -> Iterator[Facts]:
    """Compare the status of a turn with its note, its error and its end; records of other libraries have none."""
    if turn.status not in ("answered", "committed", "final"):
        return
    recorded = turn.facts.get("turn")
    if recorded is not None and recorded.fate is not None and recorded.fate.kind in _THROWN_AWAY:
        yield {"kind": "mask-off-policy", "why": f"its answer counts as kept, but its note says: {turn.note}"}
    if (turn.finish == "abort" or turn.failure is not None) and recorded is not None and recorded.digests:
        why = f"its answer counts as complete, but its request was aborted or failed: {turn.failure or 'abort'}"
        yield {"kind": "cut-complete", "why": why}


def _ends(episode: Episode) -> Iterator[Facts]:
    discarded = {position for position, turn in enumerate(episode.turns) if turn.is_discarded}
    for turn in episode.turns:
        parent = turn.parent
        if parent in discarded and turn.is_answered and not turn.is_discarded and not turn.is_auxiliary:
            number = episode.turns[parent].number if parent is not None else 0
            why = f"it counts as discarded, so it is not trained, but call {turn.number} builds on its answer"
            yield {"kind": "not-trained", "why": why, "turn": number}
    for position in sorted(discarded):
        recorded = episode.turns[position].facts.get("turn")
        if recorded is not None and recorded.digests and not recorded.note:
            why = "it counts as discarded, so it is not trained, but nothing says why"
            yield {"kind": "not-trained", "why": why, "turn": episode.turns[position].number}
    turns = [turn for turn in episode.turns if not turn.is_auxiliary and not turn.is_discarded]
    for turn in turns:
        recorded = turn.facts.get("turn")
        yield from ({"turn": turn.number, **facts} for facts in _status(episode, turn))
        if recorded is None or recorded.generation is None:
            continue
        most = turn.facts["sampling_params"].get("max_new_tokens")
        answer = recorded.generation
        if turn.clamped and turn.finish == "length" and most is not None and answer.completion_tokens >= most - 8:
            why = f"the context had room for {most} tokens only, and the answer ended there"
            yield {"kind": "context-clamped", "why": why, "turn": turn.number}
        unended = answer.stop_token_id is None and answer.stop_string is None
        if turn.finish == "stop" and unended and most is not None and len(turn.sampled) >= most:
            why = f"it counts as ended, but has no stop token and all {most} tokens that it was allowed"
            yield {"kind": "cut-complete", "why": why, "turn": turn.number}
    if not turns:
        return
    last = turns[-1]
    if episode.outcome == "task_complete" and (last.finish in ("length", "abort") or last.is_cut):
        end = "was aborted" if last.finish == "abort" or last.is_cut else "was cut off at its length"
        yield {
            "kind": "cut-complete",
            "why": f"the task counts as complete, but its last answer {end}",
            "turn": last.number,
        }
    if episode.reward is not None and last.status == "failed" and (last.failure or "").startswith(_INFRASTRUCTURE):
        why = f"the episode has the reward {episode.reward:g}, but its last call failed: {last.failure}"
        yield {"kind": "reward-failure", "why": why, "turn": last.number}
