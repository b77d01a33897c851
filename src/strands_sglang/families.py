"""Differences between model families, as data.

A family is recognized by marks in its chat template, or named by the user. A template of no known family works with
what can be derived from it: the first control token after an assistant's text ends the turn. Source: the chat templates
that the families publish.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

CallId = Callable[[str, str, int], str]
"""Makes the tool call id that the model sees, from the toolUseId, the tool's name and the call's number in history."""


def nine_characters(tool_use_id: str, name: str, number: int) -> str:
    """Return an id in Mistral's form: nine letters and digits."""
    if len(tool_use_id) == 9 and tool_use_id.isascii() and tool_use_id.isalnum():
        return tool_use_id
    return hashlib.blake2b(tool_use_id.encode(), digest_size=5).hexdigest()[:9]


def numbered_function(tool_use_id: str, name: str, number: int) -> str:
    """Return an id in Kimi K2's form: the tool's name and the number of the call in the conversation."""
    return f"functions.{name}:{number}"


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: Short name.
        marks: Texts that its chat templates contain, and that distinguish it from the families further down the list.
        stops: Tokens that end an assistant's turn. In some families this is the token of the next role: GLM stops at
            `<|user|>` or `<|observation|>`, which is then the first token of the next message.
        tool_parser: Name of the tool-call format; None if the family has none of its own.
        reasoning: Opening and closing text of reasoning; None if the family has no reasoning.
        call_id: Function that makes the tool call ids of its templates; None if they accept any.
    """

    name: str
    marks: tuple[str, ...]
    stops: tuple[str, ...]
    tool_parser: str | None = None
    reasoning: tuple[str, str] | None = None
    call_id: CallId | None = None


_THINK = ("<think>", "</think>")
_CHATML_STOPS = ("<|im_end|>", "<|endoftext|>")
_DEEPSEEK, _DEEPSEEK_STOPS = "<｜Assistant｜>", ("<｜end▁of▁sentence｜>",)
_LLAMA3_STOPS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_LLAMA4_STOPS = ("<|eot|>", "<|eom|>", "<|end_of_text|>")

FAMILIES: tuple[Family, ...] = (
    Family(
        name="harmony",
        marks=("<|channel|>", "<|message|>"),
        stops=("<|return|>", "<|call|>", "<|end|>"),
        tool_parser="harmony",
        reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
    ),
    Family("glm", ("<|observation|>", "<|user|>"), ("<|endoftext|>", "<|user|>", "<|observation|>"), "glm", _THINK),
    Family(
        name="gemma4",
        marks=("<turn|>", "<|tool_response>"),
        stops=("<turn|>", "<|tool_response>"),
        tool_parser="gemma4",
        reasoning=("<|channel>thought\n", "<channel|>"),
    ),
    Family("gemma", ("<end_of_turn>",), ("<end_of_turn>", "<eos>")),
    Family(
        name="kimi_k3",
        marks=("<|end_of_msg|>",),
        stops=("<|end_of_msg|>", "[EOS]"),
        tool_parser="kimi_k3",
        reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
    Family(
        name="kimi_k2",
        marks=("<|tool_calls_section_begin|>",),
        stops=("<|im_end|>", "[EOS]"),
        tool_parser="kimi_k2",
        reasoning=_THINK,
        call_id=numbered_function,
    ),
    Family("deepseek_v4", (_DEEPSEEK, "DSML", "tool_calls>"), _DEEPSEEK_STOPS, "deepseek_v4", _THINK),
    Family("deepseek_v3_2", (_DEEPSEEK, "DSML"), _DEEPSEEK_STOPS, "deepseek_v3_2", _THINK),
    Family("deepseek_v3", (_DEEPSEEK, "<｜tool▁sep｜>", "```json"), _DEEPSEEK_STOPS, "deepseek_v3", _THINK),
    Family("deepseek_v3_1", (_DEEPSEEK, "<｜tool▁sep｜>"), _DEEPSEEK_STOPS, "deepseek_v3_1", _THINK),
    Family("deepseek", (_DEEPSEEK,), _DEEPSEEK_STOPS, None, _THINK),
    Family("minimax_m3", ("[e~[", "]<]minimax[>["), ("[e~[",), "minimax_m3", ("<mm:think>", "</mm:think>")),
    Family("minimax_m2", ("[e~[",), ("[e~[",), "minimax_m2", _THINK),
    Family("llama4_json", ("<|header_start|>", '"parameters": dictionary'), _LLAMA4_STOPS, "llama3_json"),
    Family("llama4", ("<|header_start|>",), _LLAMA4_STOPS, "llama4_pythonic"),
    Family("llama3_pythonic", ("<|start_header_id|>", "func_name1("), _LLAMA3_STOPS, "llama4_pythonic"),
    Family("functionary", ("<|start_header_id|>", "<function="), _LLAMA3_STOPS),
    Family("llama3", ("<|start_header_id|>", '"parameters": '), _LLAMA3_STOPS, "llama3_json"),
    Family("llama3_other", ("<|start_header_id|>",), _LLAMA3_STOPS),
    Family("mistral", ("[INST]", "[TOOL_CALLS]"), ("</s>",), "mistral", ("[THINK]", "[/THINK]"), nine_characters),
    Family("inst", ("[INST]",), ("</s>",)),
    Family("granite4", ("<|start_of_role|>", "<tool_call>"), ("<|end_of_text|>",), "hermes", _THINK),
    Family("granite", ("<|start_of_role|>",), ("<|end_of_text|>",), "granite", _THINK),
    Family("seed_oss", ("<seed:bos>",), ("<seed:eos>",), "seed_oss", ("<seed:think>", "</seed:think>")),
    Family("cohere", ("<|END_OF_TURN_TOKEN|>",), ("<|END_OF_TURN_TOKEN|>",)),
    Family("qwen_coder", ("<|im_end|>", "<function="), _CHATML_STOPS, "qwen_xml", _THINK),
    Family("qwen", ("<|im_end|>", "<tool_call>"), _CHATML_STOPS, "hermes", _THINK),
    Family("smollm3", ("<|im_end|>", "Reasoning Mode"), _CHATML_STOPS, "smollm3", _THINK),
    Family("chatml", ("<|im_end|>",), _CHATML_STOPS, None, _THINK),
    Family("phi4", ("<|end|>", "<|assistant|>", "functools"), ("<|end|>", "<|endoftext|>"), "phi4"),
    Family("phi", ("<|end|>", "<|assistant|>"), ("<|end|>", "<|endoftext|>")),
)
"""Known families, those with more specific marks first."""


def find_family(chat_template: str) -> Family | None:
    """Return the first family whose marks a chat template contains; None if there is none."""
    return next((family for family in FAMILIES if all(mark in chat_template for mark in family.marks)), None)


def get_family(name: str) -> Family:
    """Return the family with a name.

    Raises:
        ValueError: There is none. The message lists the names.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ValueError(
        f"there is no model family named {name!r}; the families are: {', '.join(f.name for f in FAMILIES)}"
    )
