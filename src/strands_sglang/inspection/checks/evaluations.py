"""Checks of an evaluation's records against its trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...messages import message_digest
from ...trajectory.turn import TurnStatus
from ..records import Group, Inspected, TokenSequence, steps_to
from .steps import shifted
from .turns import Facts


def check_record(group: Group, episode: Inspected) -> Iterator[Facts]:
    """Check the record of a sample."""
    record = episode.record
    if not record:
        return
    if str(record.get("config")) != group.config:
        why = "it is of another configuration than the other samples: another model or other settings"
        yield {"kind": "changed", "why": why}
    if record["reward"] is not None and record.get("is_errored"):
        yield {"kind": "reward", "why": f"it has the reward {record['reward']}, but counts as an error without one"}
    if record["reward"] is not None and (record.get("reward_error") or record.get("reward_error_is_infrastructure")):
        told = record.get("reward_error") or "by the infrastructure"
        yield {"kind": "reward-failure", "why": f"it has the reward {record['reward']}, but scoring failed: {told}"}
    yield from _answers(episode, record)
    tokens = record["observation"].get("tokens") if isinstance(record["observation"], Mapping) else None
    sampled = sum(len(turn.output_ids) for turn in episode.turns)
    counted = record["observation"].get("metrics", {}).get("sampled_tokens")
    if episode.turns and isinstance(counted, int) and counted != sampled:
        yield {"kind": "structure", "why": f"its record counts {counted} sampled tokens, its trajectory has {sampled}"}
    if tokens is not None:
        yield from _tokens(episode, tokens)


def _answers(episode: Inspected, record: Mapping[str, Any]) -> Iterator[Facts]:
    """Compare the messages with the digests of the answers that the agent kept unchanged."""
    try:
        known = {message_digest(message) for message in episode.messages}  # type: ignore[arg-type]
        first = [message_digest(message) for message in episode.messages[:1] if message["role"] == "user"]  # type: ignore[arg-type]
        texts = _texts(episode)
    except (KeyError, TypeError):
        return
    final = record.get("final_response")
    if isinstance(final, str) and texts and not _says(final, texts):
        yield {"kind": "id-text", "why": "its final response is not the text of its last message"}
    asked: set[bytes] = set()
    asked.update(*(turn.digests for turn in episode.turns))
    if asked and first and first[0] not in asked:
        yield {"kind": "id-text", "why": "no call of its trajectory has asked the first of its messages"}
    for turn in episode.turns:
        is_kept = turn.status is TurnStatus.FINAL and turn.fate is None and not turn.is_auxiliary
        if known and is_kept and turn.answer_digest is not None and turn.answer_digest not in known:
            why = "the answer in the messages of the record is not the one that was sampled"
            yield {"kind": "id-text", "why": why, "turn": turn.index}


def _texts(episode: Inspected) -> list[str]:
    """Return the texts of the last answer in the messages."""
    answers = [message for message in episode.messages if message["role"] == "assistant"]
    return [block["text"] for block in answers[-1]["content"] if "text" in block] if answers else []


def _says(final: Any, texts: Sequence[str]) -> bool:
    return isinstance(final, str) and bool(texts) and (final.strip() in "\n".join(texts) or texts[-1].strip() in final)


def _tokens(episode: Inspected, tokens: Mapping[str, Any]) -> Iterator[Facts]:
    """Compare the tokens in a record with the trajectory's sequence of the same conversation."""
    try:
        ids, mask = np.asarray(tokens["token_ids"], np.int64), np.asarray(tokens["loss_mask"], np.int64)
        logprobs = np.array([np.nan if value is None else value for value in tokens["logprobs"]], np.float64)
    except (KeyError, TypeError, ValueError) as error:
        yield {"kind": "structure", "why": f"the tokens of its record cannot be read: {error!r}"}
        return
    if not len(ids) == len(mask) == len(logprobs):
        why = f"the record has {len(ids)} token ids, {len(mask)} masks and {len(logprobs)} logprobs"
        yield {"kind": "structure", "why": why}
        return
    paths = [
        TokenSequence(steps, np.zeros(len(ids))) for steps in map(steps_to, episode.turns) if steps[-1].stop == len(ids)
    ]
    if not paths:
        if episode.turns:
            yield {"kind": "ids", "why": "the tokens of its record do not form a sequence of its trajectory"}
        return
    path = min(paths, key=lambda one: int((one.column("ids") != ids).sum()))
    is_sampled, known, differing = path.is_sampled(), path.column("logprobs"), path.column("ids") != ids
    trained = np.zeros(len(ids), bool)
    for step in path.steps:
        is_excluded = step.turn.constrained or step.turn.status is TurnStatus.DISCARDED
        trained[step.sampled : step.stop] = not is_excluded
    given = is_sampled & (logprobs != known) & ~(np.isnan(logprobs) & np.isnan(known))
    where = shifted(logprobs, known, np.flatnonzero(given))
    of_logprobs = "logprobs" if where is None else "logprobs-shifted"
    for kind, found, why in (
        ("id-text", differing, "the token in its record is not that of its trajectory"),
        ("mask-not-sampled", (mask > 0) & ~is_sampled, "its record trains it, but the model did not sample it"),
        ("mask-off-policy", (mask > 0) & is_sampled & ~trained, "its answer is constrained or discarded, but trained"),
        ("not-trained", (mask == 0) & trained, "the model sampled it, but its record does not train it"),
        (of_logprobs, given, f"its logprob is not its own: {where or 'another'}"),
    ):
        if found.any():
            at = int(np.flatnonzero(found)[0])
            holder = path.at(at)
            number = next((n for n, one in enumerate(episode.sequences) if list(one.steps) == list(path.steps)), None)
            place = {"turn": None if holder is None else holder.turn.index, "token": at, "count": int(found.sum())}
            yield {"kind": kind, "why": why, "sequence": number, **place}
