"""Checks of an evaluation's records against its trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...messages import message_digest
from ..records import Episode, Group, SequenceRecord, Writer
from .rows import shifted
from .turns import Facts


def check_record(group: Group, episode: Episode) -> Iterator[Facts]:
    """Check the record of a sample."""
    record = episode.facts.get("record")
    if record is None:
        return
    if str(record.get("config")) != group.facts["config"]:
        why = "it is of another configuration than the other samples: another model or other settings"
        yield {"kind": "changed", "why": why}
    if record["reward"] is not None and record.get("is_errored"):
        yield {"kind": "reward", "why": f"it has the reward {record['reward']}, but counts as an error without one"}
    if record["reward"] is not None and (record.get("reward_error") or record.get("reward_error_is_infrastructure")):
        told = record.get("reward_error") or "by the infrastructure"
        yield {"kind": "reward-failure", "why": f"it has the reward {record['reward']}, but scoring failed: {told}"}
    yield from _answers(episode, record)
    tokens = record["observation"].get("tokens") if isinstance(record["observation"], Mapping) else None
    sampled = sum(len(turn.sampled) for turn in episode.turns)
    counted = record["observation"].get("metrics", {}).get("sampled_tokens")
    if episode.turns and isinstance(counted, int) and counted != sampled:
        yield {"kind": "structure", "why": f"its record counts {counted} sampled tokens, its trajectory has {sampled}"}
    if tokens is not None:
        yield from _tokens(episode, tokens)


def _answers(episode: Episode, record: Mapping[str, Any]) -> Iterator[Facts]:
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
    asked = {digest for turn in episode.turns if "turn" in turn.facts for digest in turn.facts["turn"].digests}
    if asked and first and first[0] not in asked:
        yield {"kind": "id-text", "why": "no call of its trajectory has asked the first of its messages"}
    for turn in episode.turns:
        recorded = turn.facts.get("turn")
        if turn.status != "final" or turn.note or recorded is None or recorded.answer_digest is None:
            continue
        if known and recorded.answer_digest not in known and not turn.is_auxiliary:
            why = "the answer in the messages of the record is not the one that was sampled"
            yield {"kind": "id-text", "why": why, "turn": turn.number}


def _texts(episode: Episode) -> list[str]:
    """Return the texts of the last answer in the messages."""
    answers = [message for message in episode.messages if message["role"] == "assistant"]
    return [block["text"] for message in answers[-1:] for block in message["content"] if "text" in block]


def _says(final: Any, texts: Sequence[str]) -> bool:
    return isinstance(final, str) and bool(texts) and (final.strip() in "\n".join(texts) or texts[-1].strip() in final)


def _tokens(episode: Episode, tokens: Mapping[str, Any]) -> Iterator[Facts]:
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
    leaves = [
        steps for position in range(len(episode.turns)) if (steps := episode.steps(position))[-1].stop == len(ids)
    ]
    paths = [SequenceRecord(steps, np.zeros(len(ids), np.uint8)) for steps in leaves]
    if not paths:
        if episode.turns:
            yield {"kind": "ids", "why": "the tokens of its record do not form a sequence of its trajectory"}
        return
    path = min(paths, key=lambda one: int((episode.column(one, "ids") != ids).sum()))
    writers, known = episode.column(path, "writers"), episode.column(path, "logprobs")
    differing = np.flatnonzero(episode.column(path, "ids") != ids)
    trained = np.zeros(len(ids), bool)
    for step in path.steps:
        turn = episode.turns[step.turn]
        trained[step.sampled : step.stop] = not (turn.is_constrained or turn.is_discarded)
    stray = np.flatnonzero((mask > 0) & (writers != Writer.MODEL))
    excluded = np.flatnonzero((mask > 0) & (writers == Writer.MODEL) & ~trained)
    missing = np.flatnonzero((mask == 0) & trained)
    given = np.flatnonzero((writers == Writer.MODEL) & (logprobs != known) & ~(np.isnan(logprobs) & np.isnan(known)))
    where = shifted(logprobs, known, given)
    for kind, positions, why in (
        ("id-text", differing, "the token in its record is not that of its trajectory"),
        ("mask-not-sampled", stray, "its record trains it, but the model did not sample it"),
        ("mask-off-policy", excluded, "its record trains it, but its answer is constrained or discarded"),
        ("not-trained", missing, "the model sampled it, but its record does not train it"),
        (
            "logprobs" if where is None else "logprobs-shifted",
            given,
            f"its logprob is not its own: {where or 'another'}",
        ),
    ):
        if len(positions):
            at = int(positions[0])
            step = next(step for step in path.steps if step.start <= at < step.stop)
            place = {"turn": episode.turns[step.turn].number, "token": at, "count": len(positions)}
            number = next((n for n, one in enumerate(episode.sequences) if list(one.steps) == list(path.steps)), None)
            yield {"kind": kind, "why": why, "sequence": number, **place}
