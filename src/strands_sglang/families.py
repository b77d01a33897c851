"""What differs between model families, as data.

A family is recognised by marks that its chat templates write, or named by the user; a template of no known family works
from what can be derived from it (the first control token behind an assistant's text ends the turn). Sources: the chat
templates that the families publish.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

CallId = Callable[[str, str, int], str]
"""Makes the id of a tool call that the model is shown from its toolUseId, the tool's name and its number in history."""


def nine_characters(tool_use_id: str, name: str, number: int) -> str:
    """Mistral's ids: nine letters and digits."""
    if len(tool_use_id) == 9 and tool_use_id.isascii() and tool_use_id.isalnum():
        return tool_use_id
    return hashlib.blake2b(tool_use_id.encode(), digest_size=5).hexdigest()[:9]


def numbered_function(tool_use_id: str, name: str, number: int) -> str:
    """Kimi K2's ids: the tool's name and the number of the call in the conversation."""
    return f"functions.{name}:{number}"


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: Short name.
        marks: Texts that all stand in its chat templates and tell it from the families further down the list.
        stops: Tokens that end an assistant's turn. In some families that is the token of the next role: GLM stops at
            `<|user|>` or `<|observation|>`, which is then the first token of what follows.
        tool_parser: Name of the tool-call format; None where it has none of its own.
        reasoning: What opens and what closes reasoning; None where the family has none.
        call_id: How the ids of tool calls look in its templates; None where any will do.
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
"""The known families, those with the more telling marks first."""


def find_family(chat_template: str) -> Family | None:
    """The family whose marks all stand in a chat template's text; None if there is none."""
    return next((family for family in FAMILIES if all(mark in chat_template for mark in family.marks)), None)


def get_family(name: str) -> Family:
    """The family with a name.

    Raises:
        ValueError: There is none; the message lists the names.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ValueError(
        f"there is no model family named {name!r}; the families are: {', '.join(f.name for f in FAMILIES)}"
    )
