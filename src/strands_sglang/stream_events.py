"""A sampled turn as the agent sees it: content blocks, a stop reason, and the Strands stream events that carry them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

from strands.types.content import ContentBlock
from strands.types.streaming import StreamEvent

from .generation import Generation
from .tool_parsers import ParsedTurn, ToolParseResult


def content_blocks(parsed: ParsedTurn) -> list[ContentBlock]:
    """The answer as the agent sees it."""
    blocks: list[ContentBlock] = []
    if parsed.reasoning:
        blocks.append({"reasoningContent": {"reasoningText": {"text": parsed.reasoning}}})
    if parsed.text:
        blocks.append({"text": parsed.text})
    for call in parsed.tool_calls:
        tool_input = {} if call.is_error else call.input
        blocks.append({"toolUse": {"toolUseId": call.id, "name": shown_name(call), "input": tool_input}})
    return blocks


def shown_name(call: ToolParseResult) -> str:
    """The name under which the agent sees a call: for one that did not parse, a name that no tool has."""
    return ToolParseResult.UNKNOWN_NAME if call.is_error else call.name


def stop_reason(generation: Generation, parsed: ParsedTurn) -> str:
    """Strands' stop reason for an answer. A cut-off answer never looks complete, tool calls or not."""
    if generation.finish_type == "length":
        return "max_tokens"
    return "tool_use" if parsed.tool_calls else "end_turn"


def stream_events(blocks: list[ContentBlock], reason: str, generation: Generation) -> Iterator[StreamEvent]:
    """An answer as Strands stream events: one delta a block, since every delta costs the agent's loop time."""
    yield {"messageStart": {"role": "assistant"}}
    for block in blocks:
        if "toolUse" in block:
            use = block["toolUse"]
            yield {"contentBlockStart": {"start": {"toolUse": {"toolUseId": use["toolUseId"], "name": use["name"]}}}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(use["input"])}}}}
        elif "reasoningContent" in block:
            text = block["reasoningContent"]["reasoningText"]["text"]
            yield {"contentBlockStart": {"start": {}}}
            yield {"contentBlockDelta": {"delta": {"reasoningContent": {"text": text}}}}
        else:
            yield {"contentBlockStart": {"start": {}}}
            yield {"contentBlockDelta": {"delta": {"text": block["text"]}}}
        yield {"contentBlockStop": {}}
    yield {"messageStop": {"stopReason": cast(Any, reason)}}
    yield {
        "metadata": {
            "usage": {
                "inputTokens": generation.prompt_tokens,
                "outputTokens": generation.completion_tokens,
                "totalTokens": generation.prompt_tokens + generation.completion_tokens,
                "cacheReadInputTokens": generation.cached_tokens,
            },
            "metrics": {"latencyMs": round(generation.latency_s * 1000)},
        }
    }
