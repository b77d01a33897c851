"""What differs between model families, as data.

A family is recognised by marks that its chat templates write; a template of no known family works from what can be
derived from it (the first control token behind an assistant's text ends the turn). Sources: the chat templates that the
families publish.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: Short name.
        marks: Texts that all stand in its chat templates and tell it from the families further down the list.
        stops: Tokens that end an assistant's turn. In some families that is the token of the next role: GLM stops at
            `<|user|>` or `<|observation|>`, which is then the first token of what follows.
        tool_parser: Name of the tool-call format; None where it is not known.
    """

    name: str
    marks: tuple[str, ...]
    stops: tuple[str, ...]
    tool_parser: str | None = None


FAMILIES: tuple[Family, ...] = (
    Family("harmony", ("<|channel|>", "<|message|>"), ("<|return|>", "<|call|>", "<|end|>"), "harmony"),
    Family("glm", ("<|observation|>", "<|user|>"), ("<|endoftext|>", "<|user|>", "<|observation|>"), "glm"),
    Family("gemma4", ("<turn|>", "<|tool_response>"), ("<turn|>", "<|tool_response>"), "gemma4"),
    Family("gemma", ("<end_of_turn>",), ("<end_of_turn>", "<eos>")),
    Family("kimi_k3", ("<|end_of_msg|>",), ("<|end_of_msg|>", "[EOS]"), "kimi_k3"),
    Family("kimi_k2", ("<|tool_calls_section_begin|>",), ("<|im_end|>", "[EOS]"), "kimi_k2"),
    Family("deepseek", ("<｜Assistant｜>",), ("<｜end▁of▁sentence｜>",)),
    Family("minimax", ("[e~[",), ("[e~[",)),
    Family("llama4", ("<|header_start|>",), ("<|eot|>", "<|eom|>", "<|end_of_text|>"), "llama4_pythonic"),
    Family("llama3", ("<|start_header_id|>",), ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), "llama3_json"),
    Family("mistral", ("[INST]",), ("</s>",), "mistral"),
    Family("granite", ("<|start_of_role|>",), ("<|end_of_text|>",), "granite"),
    Family("seed_oss", ("<seed:bos>",), ("<seed:eos>",), "seed_oss"),
    Family("cohere", ("<|END_OF_TURN_TOKEN|>",), ("<|END_OF_TURN_TOKEN|>",)),
    Family("qwen_coder", ("<|im_end|>", "<function="), ("<|im_end|>", "<|endoftext|>"), "qwen_xml"),
    Family("chatml", ("<|im_end|>",), ("<|im_end|>", "<|endoftext|>"), "hermes"),
    Family("phi", ("<|end|>", "<|assistant|>"), ("<|end|>", "<|endoftext|>")),
)
"""The known families, those with the more telling marks first."""


def find_family(chat_template: str) -> Family | None:
    """The family whose marks all stand in a chat template's text; None if there is none."""
    return next((family for family in FAMILIES if all(mark in chat_template for mark in family.marks)), None)
