"""OpenEnv: episodes as `TrainingTrace`s, and back.

A trace has one turn for each model call, with its whole prompt and a mask over prompt and answer, so it trains each
sampled token once, whatever the episode's forks. What it has no field for is in the turns' `metadata`: versions of the
weights, why sampling ended, the turn that a call extends, and on the first turn the episode's id, reward and outcome.
OpenEnv is imported by `to_trace` only; docs/guides/openenv.md shows both directions.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..credit import Episode, as_number
from ..outcomes import TerminationReason
from ..trajectory.trajectory import Trajectory
from ..trajectory.turn import Turn
from .records import (
    RecordedCall,
    RecordError,
    add_call,
    left_out_reason,
    name_in,
    place_in,
    reward_in,
    spans_in,
    trained_turns,
)

if TYPE_CHECKING:
    from openenv.core.harness.training import TrainingTrace


def to_trace(episode: Episode, *, max_tokens: int | None = None) -> TrainingTrace:
    """Return an episode as a trace for OpenEnv's `fetch_training_trace`.

    An episode that cannot be trained has mask 0 everywhere, and both the log and the metadata say why. Its reward
    reaches the trainer through the session's `verify()`, which OpenEnv asks for it.

    Args:
        episode: The episode. Rewards of turns are in the metadata, which trainers do not read.
        max_tokens: Maximum length of a row in tokens, the trainer's budget.

    Raises:
        ValueError: The episode has images, which a trace cannot hold.
    """
    from openenv.core.harness.training import TrainingTrace, TrainingTurn

    return TrainingTrace(turns=[TrainingTurn(**turn) for turn in turn_records(episode, max_tokens)])


def turn_records(episode: Episode, max_tokens: int | None = None) -> list[dict[str, Any]]:
    """Return the content of a trace's turns, as for `to_trace`.

    Raises:
        ValueError: The episode has images, which a trace cannot hold.
    """
    reason = left_out_reason(episode, max_tokens, is_scored_later=True)
    shown = trained_turns(episode.trajectory)
    ids = {turn.index for turn, _ in shown}
    records: list[dict[str, Any]] = []
    for turn, trained in shown:
        if turn.images is not None:
            raise ValueError(f"episode {episode.id} has images: a record has token ids only; train it with slime")
        generation = turn.generation
        assert generation is not None
        trained = trained if reason is None else 0
        count = len(generation.output_ids)
        sequence = turn.token_ids()
        logprobs = [math.nan] * count if generation.logprobs is None else generation.logprobs
        metadata: dict[str, Any] = {
            "weight_versions": [list(span) for span in generation.weight_versions],
            "finish_reason": generation.finish_type,
            "parent": None if turn.parent is None or turn.parent.index not in ids else str(turn.parent.index),
            "parent_kept": turn.parent_kept,
            "agent": turn.agent,
            "auxiliary": turn.is_auxiliary,
        }
        if turn.index in episode.turn_rewards:
            metadata["reward"] = as_number(episode.turn_rewards[turn.index])
        if not records:
            metadata["episode"] = {
                "id": episode.id,
                "group": episode.group if isinstance(episode.group, str | int | float | None) else repr(episode.group),
                "reward": None if episode.reward is None else as_number(episode.reward),
                "outcome": None if episode.outcome is None else episode.outcome.value,
                "left_out": reason,
            }
        records.append(
            {
                "node_id": str(turn.index),
                "prompt_token_ids": sequence[: len(sequence) - count],
                "completion_token_ids": sequence[len(sequence) - count :],
                # OpenEnv refuses what is not finite or above 0, which rounding can bring about.
                "per_token_logps": [min(logprob, 0.0) if math.isfinite(logprob) else 0.0 for logprob in logprobs],
                "loss_mask": [0] * (len(sequence) - count) + [1] * trained + [0] * (count - trained),
                "metadata": metadata,
            }
        )
    return records


def from_trace(
    trace: TrainingTrace | Mapping[str, Any],
    *,
    group: Hashable = None,
    reward: float | None = None,
    id: str | None = None,
) -> Episode:
    """Return the episode of a trace: its trajectory gives rows, and can be saved and shown.

    A call extends the one that `metadata` names as its parent; without that, the one whose prompt and answer are the
    longest prefix of its prompt. Their common tokens are then one row, in which each sampled token is trained once.

    Args:
        trace: The trace, or its JSON content. OpenEnv need not be installed for the latter.
        group: The prompt that the episode's siblings share. By default the one in the metadata.
        reward: Reward of the episode. By default the one in the metadata.
        id: Name of the episode. By default the one in the metadata, or a random one.

    Raises:
        ValueError: A turn's columns do not fit each other, a token is trained that was not sampled, the metadata names
            a parent that is not a prefix, or a value has another type. The message names the turn.
    """
    content = trace if isinstance(trace, Mapping) else trace.model_dump()
    if content.get("schema_version", 1) != 1 or not isinstance(content.get("turns"), Sequence):
        raise ValueError("not an OpenEnv TrainingTrace of version 1: it needs schema_version and turns")
    record = _Record()
    for number, entry in enumerate(content["turns"]):
        try:
            record.add(entry)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"turn {number} of the trace is malformed: {error!r}") from error
    about = record.about
    name = name_in(about.get("id"), "the id of the episode", str | None) if id is None else id
    episode = Episode(
        Trajectory.of_turns(record.turns),
        reward_in(about.get("reward"), "the reward of the episode") if reward is None else reward,
        name_in(about.get("group"), "the group of the episode") if group is None else group,
        turn_rewards=record.turn_rewards,
        outcome=TerminationReason(about["outcome"]) if about.get("outcome") else None,
    )
    episode.trajectory.note_end(outcome=episode.outcome, reward=episode.reward, turn_rewards=episode.turn_rewards)
    return episode if name is None else replace(episode, id=name)


@dataclass(frozen=True, eq=False)
class _Call:
    """A call that is imported.

    Attributes:
        name: What errors call it.
        ids: Its prompt and what it sampled.
        sampled: Number of sampled ids.
        turns: Its turns.
    """

    name: str
    ids: bytes
    sampled: int
    turns: list[Turn]


@dataclass(eq=False)
class _Record:
    """The calls of a trace so far.

    Attributes:
        turns: Their turns.
        calls: The calls by node id.
        turn_rewards: Rewards by the index of a turn.
        about: What the metadata says of the episode.
    """

    turns: list[Turn] = field(default_factory=list)
    calls: dict[str, _Call] = field(default_factory=dict)
    turn_rewards: dict[int, float] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add a turn of the trace."""
        name, metadata = f"turn {entry['node_id']}", entry.get("metadata") or {}
        prompt, output, mask = entry["prompt_token_ids"], entry["completion_token_ids"], entry["loss_mask"]
        if entry["node_id"] in self.calls:
            raise ValueError(f"{name}: the trace has another turn with this node_id")
        if len(mask) != len(prompt) + len(output):
            raise ValueError(f"{name}: {len(mask)} masks for {len(prompt)} prompt and {len(output)} sampled tokens")
        if any(mask[: len(prompt)]):
            trained = next(at for at, is_trained in enumerate(mask) if is_trained)
            message = f"{name}: prompt token {trained} is trained, but the model did not sample it"
            raise RecordError(message, "mask-not-sampled")
        ids = array("i", [*prompt, *output]).tobytes()
        parent, kept = self._parent(ids[: _BYTES * len(prompt)], metadata, name)
        known = 0 if parent is None else len(_prefix(parent, kept)) // _BYTES
        spans = metadata.get("weight_versions")
        if spans is None and metadata.get("weight_version") is not None:
            spans = [(metadata["weight_version"], 0, len(output))]
        call = RecordedCall(
            name=name,
            prompt_ids=prompt[known:],
            output_ids=output,
            mask=mask[len(prompt) :],
            logprobs=entry["per_token_logps"],
            versions=spans_in(spans, len(output), name),
            finish_type=metadata.get("finish_reason") or "stop",
            agent=metadata.get("agent"),
        )
        if parent is None:
            added = add_call(self.turns, call, None)
        else:
            place = place_in(parent.turns, kept)
            added = add_call(self.turns, call, place, f"{parent.name}: its tokens are a prefix")
        for turn in added:
            turn.is_auxiliary = metadata.get("auxiliary") is True
        self.calls[entry["node_id"]] = _Call(name, ids, len(output), added)
        reward = reward_in(metadata.get("reward"), f"{name}: its reward")
        if reward is not None and added[-1].is_auxiliary:
            raise ValueError(f"{name}: it has a reward, but as a helper's call it is not part of the rollout")
        if reward is not None:
            self.turn_rewards[added[-1].index] = reward
        self.about = metadata.get("episode") or self.about
        if not isinstance(self.about, Mapping):
            raise ValueError(f"{name}: the metadata of the episode is {self.about!r}, not an object")

    def _parent(self, prompt: bytes, metadata: Mapping[str, Any], name: str) -> tuple[_Call | None, int | None]:
        """Return the call that a prompt extends, and how many of its sampled ids; None for all."""
        if "parent" in metadata:  # written by `to_trace`
            if metadata["parent"] is None:
                return None, None
            parent, kept = self.calls.get(metadata["parent"]), metadata.get("parent_kept")
            if parent is None or not prompt.startswith(_prefix(parent, kept)):
                message = f"{name}: its prompt does not begin with the tokens of turn {metadata['parent']}"
                raise RecordError(message, "re-rendered")
            if kept is not None and not (isinstance(kept, int) and 0 <= kept <= parent.sampled):
                raise ValueError(f"{name}: it keeps {kept!r} of the {parent.sampled} sampled tokens of {parent.name}")
            return parent, kept
        fitting = [call for call in self.calls.values() if prompt.startswith(call.ids)]
        return max(fitting, key=lambda call: len(call.ids), default=None), None


def _prefix(call: _Call, kept: int | None) -> bytes:
    """Return the bytes of a call's prompt and the first `kept` of its sampled ids."""
    return call.ids if kept is None else call.ids[: len(call.ids) - _BYTES * (call.sampled - kept)]


_BYTES = array("i").itemsize
