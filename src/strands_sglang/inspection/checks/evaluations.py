"""Checks of an evaluation's records against its trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...messages import block_digests, message_digest
from ...trajectory.turn import Turn, TurnStatus
from ..records import Group, Inspected
from .turns import Facts

_CUT_CALL = "The selected tool {}'s tool use was incomplete due to maximum token limits being reached."
"""What Strands writes in place of a tool call in an answer that was cut at `max_new_tokens`."""


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
    sampled = sum(len(turn.output_ids) for turn in episode.turns)
    counted = record["observation"].get("metrics", {}).get("sampled_tokens")
    if episode.turns and isinstance(counted, int) and counted != sampled:
        yield {"kind": "structure", "why": f"its record counts {counted} sampled tokens, its trajectory has {sampled}"}


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
        is_known = turn.answer_digest in known or any(_replaces_calls(turn, message) for message in episode.messages)
        if known and is_kept and turn.answer_digest is not None and not is_known:
            why = "the answer in the messages of the record is not the one that was sampled"
            yield {"kind": "id-text", "why": why, "turn": turn.index}


def _replaces_calls(turn: Turn, message: Mapping[str, Any]) -> bool:
    """Whether a message is a cut answer as Strands keeps it, with a sentence in place of each tool call."""
    if not (turn.is_cut_short and turn.tool_calls) or message["role"] != "assistant":
        return False
    names = iter([call["name"] for call in turn.tool_calls])
    kept = [
        _digests([{"text": _CUT_CALL.format(next(names, ""))}])[0] if block[0] == "tool call" else block
        for block in turn.answer_blocks
    ]
    # The digests of an answer with calls leave out blank texts.
    return kept == _digests(block for block in message["content"] if "text" not in block or block["text"].strip())


def _digests(blocks: Iterable[Any]) -> list[tuple[str, bytes]]:
    return list(block_digests({"role": "assistant", "content": list(blocks)}))


def _texts(episode: Inspected) -> list[str]:
    """Return the texts of the last answer in the messages."""
    answers = [message for message in episode.messages if message["role"] == "assistant"]
    return [block["text"] for block in answers[-1]["content"] if "text" in block] if answers else []


def _says(final: Any, texts: Sequence[str]) -> bool:
    return isinstance(final, str) and bool(texts) and (final.strip() in "\n".join(texts) or texts[-1].strip() in final)
