"""ATIF, the trajectories of Harbor: episodes as documents, and back.

The document has the main conversation; other sequences of the episode are embedded as trajectories of subagents. Each
model call has its whole prompt, the sampled ids and their logprobs in the `metrics` of its step. What ATIF has no field
for (mask, versions of the weights, the call that it extends) is in `metrics.extra`, as for OpenEnv's traces. The format
is https://github.com/harbor-framework/harbor/blob/main/rfcs/0001-trajectory-format.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
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
    about: dict[str, Any] = {"name": agent, "version": version}
    if model is not None:
        about["model_name"] = model
    documents: list[dict[str, Any]] = []
    written: set[int] = set()
    for leaf in main_first(episode.trajectory):
        document: dict[str, Any] = {
            "schema_version": VERSION,
            "session_id": episode.id,
            "trajectory_id": f"sequence-{len(documents)}",
            "agent": about,
            "steps": _numbered(_steps(leaf.path(), records, written)),
        }
        document["final_metrics"] = _totals(leaf.path(), len(document["steps"]))
        documents.append(document)
    if not documents:
        raise ValueError(f"episode {episode.id} has no answered model call, of which a document could tell")
    first, *others = documents
    if others:
        first["subagent_trajectories"] = others
    return first


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


def _numbered(steps: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"step_id": number, **step} for number, step in enumerate(steps, 1)]


def _steps(turns: Iterable[Turn], records: Mapping[str, dict[str, Any]], written: set[int]) -> Iterator[dict[str, Any]]:
    """Yield the steps of a conversation: each message, and each answer with its calls and their results."""
    step: dict[str, Any] | None = None
    for turn in turns:
        for part in turn.said:
            if part.kind == "result" and step is not None and step["source"] == "agent":
                _add_result(step, part)
                continue
            source = {"assistant": "agent", "tool": "user"}.get(part.role, part.role)
            if step is None or step["source"] != source or "metrics" in step:
                if step is not None:
                    yield step
                step = {"source": source, "message": ""}
                if source == "agent":  # of a conversation before the episode
                    step["llm_call_count"] = 0
            _add_part(step, part)
        if step is not None:
            yield step
        step = {"source": "agent", "message": "", "llm_call_count": 1}
        for part in turn.answered:
            _add_part(step, part)
        if turn.index in written:
            step["is_copied_context"] = True
        elif str(turn.index) in records:
            step["metrics"] = _metrics(turn, records[str(turn.index)])
        written.add(turn.index)
    if step is not None:
        yield step


def _add_part(step: dict[str, Any], part: Said) -> None:
    if part.kind == "call":
        step.setdefault("tool_calls", []).append(
            {"tool_call_id": part.id, "function_name": part.name, "arguments": _arguments(part.text)}
        )
    elif part.kind == "reasoning":
        if step.get("llm_call_count") == 0:  # such steps have none
            return
        step["reasoning_content"] = step.get("reasoning_content", "") + part.text
    else:
        step["message"] += part.text


def _add_result(step: dict[str, Any], part: Said) -> None:
    result = {"content": part.text}
    if part.id in {call["tool_call_id"] for call in step.get("tool_calls", ())}:
        result["source_call_id"] = part.id
    step.setdefault("observation", {"results": []})["results"].append(result)


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except ValueError:  # a call that could not be parsed
        arguments = text
    return arguments if isinstance(arguments, dict) else {"input": arguments}


def _metrics(turn: Turn, record: Mapping[str, Any]) -> dict[str, Any]:
    assert turn.generation is not None
    prompt, sampled = record["prompt_token_ids"], record["completion_token_ids"]
    logprobs = {} if turn.generation.logprobs is None else {"logprobs": record["per_token_logps"]}
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(sampled),
        "cached_tokens": turn.generation.cached_tokens,
        "prompt_token_ids": prompt,
        "completion_token_ids": sampled,
        **logprobs,
        "extra": {"turn": record["node_id"], "loss_mask": record["loss_mask"][len(prompt) :], **record["metadata"]},
    }


def _totals(turns: Iterable[Turn], steps: int) -> dict[str, Any]:
    generations = [turn.generation for turn in turns if turn.generation is not None]
    return {
        "total_prompt_tokens": sum(generation.prompt_tokens for generation in generations),
        "total_completion_tokens": sum(len(generation.output_ids) for generation in generations),
        "total_cached_tokens": sum(generation.cached_tokens or 0 for generation in generations),
        "total_steps": steps,
    }
