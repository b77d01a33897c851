"""Tool calls on their way through a model family's real chat template and tokenizer, and back through the parser.

The template writes an assistant's message; what it writes for the assistant is encoded and parsed as if it had been
sampled.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strands_sglang.tool_parsers import ParsedTurn, ToolParser, get_tool_parser
from support.families import FAMILIES, load_tokenizer
from support.parser_checks import JSON_TYPE, Call

QUESTION = {"role": "user", "content": "What is it?"}

# No template looks at these when it writes a call.
TOOLS = [{"type": "function", "function": {"name": "f", "description": "It.", "parameters": {"type": "object"}}}]
TOOLS[0]["function"]["parameters"]["properties"] = {}

# Templates that take a call's arguments as JSON text, rather than as an object.
WANTS_TEXT = frozenset({"deepseek_v3"})

# Templates that take reasoning as a block of the content.
WANTS_BLOCKS = frozenset({"ministral_3"})


class TemplateRefusedError(Exception):
    """The chat template raised."""


@dataclass(frozen=True)
class Message:
    """What an assistant says.

    Attributes:
        calls: Name and arguments of every call.
        text: The visible text.
        reasoning: The reasoning.
    """

    calls: tuple[Call, ...]
    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class Sampled:
    """What a template writes for an assistant's message, as if it had been sampled.

    Attributes:
        text: It, without the token that ends the turn.
        token_ids: It, encoded.
        reasoning_open: The prompt ended inside reasoning.
    """

    text: str
    token_ids: tuple[int, ...]
    reasoning_open: bool


@functools.cache
def parser_for(family: str) -> ToolParser:
    """The parser that is chosen for a family."""
    return get_tool_parser("auto", tokenizer=load_tokenizer(family))


def sample(family: str, message: Message) -> Sampled:
    """Have a family's template write a message, and cut out what stands there for the assistant.

    Raises:
        TemplateRefusedError: The template raised.
    """
    row, tokenizer = FAMILIES[family], load_tokenizer(family)
    thinking = {"thinking": True, "enable_thinking": True} if message.reasoning else {}

    def render(messages: list[dict[str, Any]], **keywords: Any) -> str:
        try:
            rendered: str = tokenizer.apply_chat_template(
                copy.deepcopy(messages), tools=TOOLS, tokenize=False, **thinking, **keywords
            )
        except Exception as error:
            raise TemplateRefusedError(str(error)) from error
        return rendered

    prompt = render([QUESTION], add_generation_prompt=True)
    whole = render([QUESTION, _as_chat(family, message)])
    reasoning_open = False
    if row.reasoning is not None and prompt.rfind(row.reasoning[0]) > prompt.rfind(QUESTION["content"]):
        begin = prompt.rindex(row.reasoning[0])
        reasoning_open = whole.startswith(prompt) and row.reasoning[1] not in prompt[begin:]
        if not whole.startswith(prompt):  # the prompt reasons, the history of such a turn does not
            prompt = prompt[:begin]
    assert whole.startswith(prompt), (prompt[-100:], whole[-300:])
    part = whole[len(prompt) :]
    ends = [part.rfind(stop) for stop in row.end_of_turn if stop in part]
    part = part[: max(ends)] if ends else part
    return Sampled(part, tuple(tokenizer.encode(part, add_special_tokens=False)), reasoning_open)


def parse(family: str, sampled: Sampled, calls: Sequence[Call]) -> ParsedTurn:
    """Parse a turn, with its token ids and the tools that these calls are made of."""
    tokenizer = load_tokenizer(family)
    return parser_for(family).parse_turn(
        tokenizer.decode(sampled.token_ids, skip_special_tokens=False),
        token_ids=sampled.token_ids,
        tokenizer=tokenizer,
        tools=[{"name": name, "inputSchema": {"json": _schema([arguments])}} for name, arguments in calls],
        reasoning_open=sampled.reasoning_open,
    )


@functools.cache
def pieces_of(family: str) -> tuple[str, ...]:
    """All that a family's template writes around the names and values of calls, in pieces."""
    message = Message((("f0", {"k0": "v0", "k1": "v1"}), ("f1", {"k2": "v2"})), "t0", "r0")
    for attempt in (message, Message(message.calls), Message(message.calls[:1])):
        try:
            written = sample(family, attempt).text
        except TemplateRefusedError:
            continue
        if "k0" in written:
            break
    parser = parser_for(family)
    tokens = {parser.tool_start_token, parser.tool_end_token, parser.think_start_token, parser.think_end_token} - {""}
    tokens |= {*FAMILIES[family].marks, *(FAMILIES[family].reasoning or ())}
    found = {piece for piece in re.split(r"[fktrv][0-2]", written) if piece.strip()}
    found |= set(re.findall(r"</?[^<>\s]*[^<>]*>", written))
    stops = FAMILIES[family].end_of_turn
    return tuple(sorted(piece for piece in {*found, *tokens} if not any(stop in piece for stop in stops)))


def _schema(values: Sequence[Any]) -> dict[str, Any]:
    """The schema of all values that stand in one place."""
    schema: dict[str, Any] = {"type": sorted({JSON_TYPE[type(value)] for value in values})}
    objects = [value for value in values if isinstance(value, dict)]
    items = [inner for value in values if isinstance(value, list) for inner in value]
    if items:
        schema["items"] = _schema(items)
    if objects:
        keys = dict.fromkeys(key for value in objects for key in value)
        schema["properties"] = {key: _schema([value[key] for value in objects if key in value]) for key in keys}
    return schema


def _as_chat(family: str, message: Message) -> dict[str, Any]:
    """The message in the form of chat templates."""
    chat: dict[str, Any] = {"role": "assistant", "content": message.text}
    if message.reasoning:
        if family in WANTS_BLOCKS:
            chat["content"] = [
                {"type": "thinking", "thinking": message.reasoning},
                {"type": "text", "text": message.text},
            ]
        else:
            chat["reasoning_content"] = message.reasoning
    chat["tool_calls"] = [
        {
            "id": f"functions.{name}:{index}" if family.startswith("kimi") else f"callid{index:03d}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments, ensure_ascii=False) if family in WANTS_TEXT else arguments,
            },
        }
        for index, (name, arguments) in enumerate(message.calls)
    ]
    return chat
