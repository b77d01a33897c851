"""The numbers of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strands import Agent
from strands.types.content import Message

from strands_sglang import Trajectory


def episode_metrics(
    agent: Agent | None, messages: Sequence[Message], trajectory: Trajectory | None, seconds: float
) -> dict[str, Any]:
    """The numbers of an episode.

    Args:
        agent: The agent; None if it was never made.
        messages: The messages since it was asked.
        trajectory: Its recorded calls, if its model records them.
        seconds: How long it took.

    Returns:
        `model_calls`, `tool_iterations`, `tool_calls`, `tool_errors`, `tool_parse_errors`; `input_tokens` (of all
        prompts), `cached_tokens`, `sampled_tokens`, `total_tokens`; `sequences` (how many a trainer has to take; models
        that record tokens only); `seconds`, `model_seconds`; and `tools`: by name `calls`, `errors`, `parse_errors`
        and `seconds`.
    """
    tools: dict[str, dict[str, float]] = {}

    def of(name: str) -> dict[str, float]:
        return tools.setdefault(name, {"calls": 0, "errors": 0, "parse_errors": 0, "seconds": 0.0})

    names: dict[str, str] = {}
    iterations = 0
    for message in messages:
        uses = [block["toolUse"] for block in message["content"] if "toolUse" in block]
        iterations += bool(uses)
        for use in uses:
            names[use["toolUseId"]] = use["name"]
            of(use["name"])["calls"] += 1
        for block in message["content"]:
            result = block.get("toolResult")
            if result is not None and result.get("status") == "error" and result["toolUseId"] in names:
                of(names[result["toolUseId"]])["errors"] += 1
    parse_errors = trajectory.tool_parse_errors if trajectory is not None else {}
    for name, count in parse_errors.items():
        of(name)["parse_errors"] += count
    usage: Any = {}
    calls = latency_ms = 0
    if agent is not None:
        loop = agent.event_loop_metrics
        usage, calls, latency_ms = loop.accumulated_usage, loop.cycle_count, loop.accumulated_metrics["latencyMs"]
        for name, told in loop.tool_metrics.items():
            of(name)["seconds"] += told.total_time
    sampled = usage.get("outputTokens", 0)
    metrics: dict[str, Any] = {
        "model_calls": calls,
        "tool_iterations": iterations,
        "tool_calls": sum(int(one["calls"]) for one in tools.values()),
        "tool_errors": sum(int(one["errors"]) for one in tools.values()),
        "tool_parse_errors": sum(parse_errors.values()),
        "input_tokens": usage.get("inputTokens", 0),
        "cached_tokens": usage.get("cacheReadInputTokens", 0),
        "sampled_tokens": sampled,
        "total_tokens": usage.get("totalTokens", 0),
        "seconds": seconds,
        "model_seconds": latency_ms / 1000,
        "tools": tools,
    }
    if trajectory is not None:
        # What a failed or cut call had sampled is in no usage.
        metrics["sampled_tokens"] = sum(len(turn.output_ids) for turn in trajectory.turns)
        metrics["sequences"] = sum(any(sequence.loss_mask) for sequence in trajectory.sequences())
    return metrics
