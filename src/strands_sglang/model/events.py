"""A sampled turn as the agent sees it: its text, its content blocks, a stop reason, and the Strands stream events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

from strands.types.content import ContentBlock
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolSpec

from ..protocol.generation import Generation
from ..templates.chat_template import ChatTemplate
from ..tool_parsers import ParsedTurn, ToolParser, ToolParseResult
from ..trajectory.turn import Turn


def sampled_text(template: ChatTemplate, turn: Turn, generation: Generation, *, kept_stop: str | None = None) -> str:
    """The sampled text without the control token or the stop string that ended it.

    Args:
        template: Decodes, and knows the control tokens.
        turn: Tells the sampling parameters.
        generation: The sampled tokens.
        kept_stop: A stop string that is part of the text, such as the end mark of a tool call.
    """
    text = template.decode(_answer_ids(template, generation))
    stop = generation.stop_string
    if stop is None or stop == kept_stop or turn.sampling_params.get("no_stop_trim"):
        return text
    return text.partition(stop)[0]


def parse_answer(
    parser: ToolParser,
    template: ChatTemplate,
    turn: Turn,
    generation: Generation,
    tool_specs: list[ToolSpec] | None,
) -> ParsedTurn:
    """The sampled tokens taken apart into reasoning, text and tool calls."""
    return parser.parse_turn(
        sampled_text(template, turn, generation, kept_stop=parser.tool_end_token),
        # A grammar forces the characters of a mark, and not its token.
        token_ids=None if turn.constrained else _answer_ids(template, generation),
        tokenizer=template.tokenizer,
        tools=tool_specs,
        reasoning_open=turn.reasoning_open,
        truncated=generation.finish_type == "length",
    )


def _answer_ids(template: ChatTemplate, generation: Generation) -> list[int]:
    ids = generation.output_ids.tolist()
    stop = generation.stop_token_id
    return ids[:-1] if stop is not None and template.is_special(stop) else ids


def content_blocks(parsed: ParsedTurn) -> list[ContentBlock]:
    """The answer as the agent sees it."""
    blocks: list[ContentBlock] = []
    if parsed.reasoning:
        blocks.append({"reasoningContent": {"reasoningText": {"text": parsed.reasoning}}})
    if parsed.text:
        blocks.append({"text": parsed.text})
    for call in parsed.tool_calls:
        # As Strands will hand it back; a parser's input that JSON cannot hold fails here, before it is recorded.
        tool_input = {} if call.is_error else json.loads(json.dumps(call.input))
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
