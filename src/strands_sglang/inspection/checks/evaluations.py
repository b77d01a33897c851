"""Checks of an evaluation's records against its trajectories."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ...messages import message_digest
from ...trajectory.turn import TurnStatus
from ..records import Finding, Group, Inspected


def check_record(group: Group, episode: Inspected) -> Iterator[Finding]:
    """Check the record of a sample."""
    record = episode.record
    if not record:
        return
    if str(record.get("config")) != group.config:
        why = "it is of another configuration than the other samples: another model or other settings"
        yield Finding("changed", why)
    if record["reward"] is not None and record.get("is_errored"):
        yield Finding("reward", f"it has the reward {record['reward']}, but counts as an error without one")
    if record["reward"] is not None and (record.get("reward_error") or record.get("reward_error_is_infrastructure")):
        error = record.get("reward_error") or "by the infrastructure"
        yield Finding("reward-failure", f"it has the reward {record['reward']}, but scoring failed: {error}")
    yield from _answers(episode)
    sampled = sum(len(turn.output_ids) for turn in episode.turns)
    counted = record["observation"].get("metrics", {}).get("sampled_tokens")
    if episode.turns and isinstance(counted, int) and counted != sampled:
        yield Finding("structure", f"its record counts {counted} sampled tokens, its trajectory has {sampled}")


def _answers(episode: Inspected) -> Iterator[Finding]:
    """Compare the messages with the digests of the answers that the agent kept unchanged."""
    try:
        known = [message_digest(message) for message in episode.messages]  # type: ignore[arg-type]
        ends_with_answer = [message["role"] for message in episode.messages][-1:] == ["assistant"]
    except (KeyError, TypeError):
        return
    asked = set(chain.from_iterable(turn.digests for turn in episode.turns))
    if asked and known and episode.messages[0]["role"] == "user" and known[0] not in asked:
        yield Finding("id-text", "no call of its trajectory has asked the first of its messages")
    for turn in episode.turns:
        is_kept = turn.status is TurnStatus.FINAL and turn.fate is None and not turn.is_auxiliary
        # Strands writes a sentence in place of a call that was cut.
        is_rewritten = turn.is_cut_short and turn.tool_calls and ends_with_answer
        if known and is_kept and not is_rewritten and turn.answer_digest not in (None, *known):
            why = "the answer in the messages of the record is not the one that was sampled"
            yield Finding("id-text", why, turn=turn.index)
