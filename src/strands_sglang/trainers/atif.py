"""ATIF, the trajectories of Harbor: episodes as documents, and back.

The document has the main conversation; other sequences of the episode are embedded as trajectories of subagents. Each
model call has its whole prompt, the sampled ids and their logprobs in the `metrics` of its step. What ATIF has no field
for (mask, versions of the weights, the call that it extends) is in `metrics.extra`, as for OpenEnv's traces. The format
is https://github.com/harbor-framework/harbor/blob/main/rfcs/0001-trajectory-format.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from ..credit import Episode
from ..messages.said import Said
from ..trajectory.trajectory import Trajectory
from ..trajectory.turn import Turn
from .openenv import from_trace, turn_records
from .records import name_in

VERSION = "ATIF-v1.7"


def to_atif(
    episode: Episode, *, agent: str = "strands-sglang", version: str = "unknown", model: str | None = None
) -> dict[str, Any]:
    """Return an episode as an ATIF document.

    Args:
        episode: The episode.
        agent: Name of the agent.
        version: Version of the agent.
        model: Name of the model.

    Raises:
        ValueError: The episode has no answered call, or it has images, whose tokens a document cannot hold.
    """
    records = {record["node_id"]: record for record in turn_records(episode)}
    documents: list[dict[str, Any]] = []
    written: set[int] = set()
    for leaf in main_first(episode.trajectory):
        steps = _steps(leaf.path(), records, written)
        generations = [turn.generation for turn in leaf.path() if turn.generation is not None]
        document = {
            "schema_version": VERSION,
            "session_id": episode.id,
            "trajectory_id": f"sequence-{len(documents)}",
            "agent": {"name": agent, "version": version, "model_name": model},
            "steps": steps,
            "final_metrics": {
                "total_prompt_tokens": sum(each.prompt_tokens for each in generations),
                "total_completion_tokens": sum(len(each.output_ids) for each in generations),
                "total_cached_tokens": sum(each.cached_tokens or 0 for each in generations),
                "total_steps": len(steps),
            },
        }
        documents.append(document)
    if not documents:
        raise ValueError(f"episode {episode.id} has no answered model call, of which a document could tell")
    first, *others = documents
    return {**first, "subagent_trajectories": others} if others else first


def from_atif(
    document: Mapping[str, Any], *, group: Hashable = None, reward: float | None = None, id: str | None = None
) -> Episode:
    """Return the episode of an ATIF document whose steps have token ids, as `from_trace` does.

    Args:
        document: The document.
        group: The prompt that the episode's siblings share.
        reward: Reward of the episode.
        id: Name of the episode. By default that of the run.

    Raises:
        ValueError: It is not such a document, a step has no ids, or see `from_trace`.
    """
    records: list[dict[str, Any]] = []
    try:
        for each in (document, *document.get("subagent_trajectories", ())):
            for step in each["steps"]:
                if step["source"] == "agent" and step.get("llm_call_count") != 0 and not step.get("is_copied_context"):
                    records.append(_record(step, len(records)))
        records.sort(key=lambda record: int(record["node_id"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the ATIF document is malformed: {error!r}") from error
    if not records:
        raise ValueError("the ATIF document has no model call")
    name = name_in(document.get("session_id"), "the session_id", str | None) if id is None else id
    return from_trace({"turns": records}, group=group, reward=reward, id=name)


def main_first(trajectory: Trajectory) -> list[Turn]:
    """Return the last turn of each sequence, that of the main conversation first."""
    main = trajectory.main_leaf()
    return sorted((leaf for leaf, _ in trajectory.branches()), key=lambda leaf: leaf is not main)


def _record(step: Mapping[str, Any], number: int) -> dict[str, Any]:
    metrics = step.get("metrics") or {}
    if not metrics.get("prompt_token_ids") or metrics.get("completion_token_ids") is None:
        raise ValueError(f"step {step['step_id']} has no token ids")
    prompt, sampled = metrics["prompt_token_ids"], metrics["completion_token_ids"]
    extra = dict(metrics.get("extra") or {})
    return {
        "node_id": extra.pop("turn", str(number)),
        "prompt_token_ids": prompt,
        "completion_token_ids": sampled,
        "per_token_logps": metrics.get("logprobs") or [math.nan] * len(sampled),
        "loss_mask": [0] * len(prompt) + extra.pop("loss_mask", [1] * len(sampled)),
        "metadata": extra,
    }


def _steps(turns: Iterable[Turn], records: Mapping[str, dict[str, Any]], written: set[int]) -> list[dict[str, Any]]:
    """Return the steps of a conversation: each message, and each answer with its calls and their results."""
    steps: list[dict[str, Any]] = []

    def add(source: str, **more: Any) -> None:
        steps.append({"step_id": len(steps) + 1, "source": source, "message": "", **more})

    for turn in turns:
        for part in turn.said:
            last = steps[-1] if steps else {"source": None}
            if part.kind == "result" and last["source"] == "agent":
                _add_result(last, part)
                continue
            source = {"assistant": "agent", "tool": "user"}.get(part.role, part.role)
            if last["source"] != source or "metrics" in last:
                # An answer of a conversation before the episode has no call.
                add(source, **({"llm_call_count": 0} if source == "agent" else {}))
            _add_part(steps[-1], part)
        add("agent", llm_call_count=1)
        for part in turn.answered:
            _add_part(steps[-1], part)
        if turn.index in written:
            steps[-1]["is_copied_context"] = True
        elif str(turn.index) in records:
            steps[-1]["metrics"] = _metrics(turn, records[str(turn.index)])
        written.add(turn.index)
    return steps


def _add_part(step: dict[str, Any], part: Said) -> None:
    if part.kind == "call":
        arguments = json.loads(part.text)
        if not isinstance(arguments, dict):
            arguments = {"input": arguments}
        call = {"tool_call_id": part.id, "function_name": part.name, "arguments": arguments}
        step.setdefault("tool_calls", []).append(call)
    elif part.kind != "reasoning":
        step["message"] += part.text
    elif step.get("llm_call_count") != 0:  # such steps have none
        step["reasoning_content"] = step.get("reasoning_content", "") + part.text


def _add_result(step: dict[str, Any], part: Said) -> None:
    result = {"content": part.text}
    if part.id in {call["tool_call_id"] for call in step.get("tool_calls", ())}:
        result["source_call_id"] = part.id
    step.setdefault("observation", {"results": []})["results"].append(result)


def _metrics(turn: Turn, record: Mapping[str, Any]) -> dict[str, Any]:
    assert turn.generation is not None
    prompt, sampled = record["prompt_token_ids"], record["completion_token_ids"]
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(sampled),
        "cached_tokens": turn.generation.cached_tokens,
        "prompt_token_ids": prompt,
        "completion_token_ids": sampled,
        "logprobs": None if turn.generation.logprobs is None else record["per_token_logps"],
        "extra": {"turn": record["node_id"], "loss_mask": record["loss_mask"][len(prompt) :], **record["metadata"]},
    }
