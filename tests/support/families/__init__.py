"""Real chat templates and tokenizers of the model families, and a table of their properties.

`python tests/support/families/fetch.py` fetches them once; they are not part of the repository. They are loaded on
first use and cached for the process. If they were not fetched, a test that needs them fails in CI and is skipped
elsewhere. The table comes from the templates and the model cards, independently of `strands_sglang.families`, so tests
can compare the two.
"""

import copy
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from support.families.fetch import cache_directory, is_fetched

# The opening and the closing mark of a text.
Marks = tuple[str, str]


@dataclass(frozen=True)
class Family:
    """A model family."""

    name: str
    # A file under `templates` without its suffix; the folder is the package that it comes from.
    template: str
    # A folder under `tokenizers`.
    tokenizer: str
    # Tokens that can end a sampled turn, the usual one first.
    end_of_turn: tuple[str, ...]
    tool_format: str | None
    reasoning: Marks | None = None
    bos_token: str | None = None
    # None uses the first end-of-turn token.
    eos_token: str | None = None
    # Whether the tokenizer is a related one with the control tokens below added.
    stand_in: bool = False
    # Added control tokens, which decoding can skip.
    control_tokens: tuple[str, ...] = ()
    # Added tokens that decoding always keeps.
    marks: tuple[str, ...] = ()
    # Limitation of the template.
    note: str = ""


_THINK = ("<think>", "</think>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_TOOL_RESPONSE = ("<tool_response>", "</tool_response>")
_CHATML_END = ("<|im_end|>", "<|endoftext|>")
_GLM_END = ("<|user|>", "<|observation|>", "<|endoftext|>")
_GLM_CONTROL = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_MARKS = (
    *_THINK,
    *_TOOL_CALL,
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *_TOOL_RESPONSE,
    "/nothink",
)
_LLAMA3_END = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_LLAMA3_BOS = "<|begin_of_text|>"
_DEEPSEEK_BOS, _DEEPSEEK_END = "<｜begin▁of▁sentence｜>", ("<｜end▁of▁sentence｜>",)
_KIMI_K2_CONTROL = (
    *("[BOS]", "[EOS]", "[EOT]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
)
_GRANITE_CONTROL = ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
_ONE_CALL = "renders at most one tool call per turn"

_TABLE = (
    Family("qwen2_5", "trl/qwen2_5", "qwen2_5", _CHATML_END, "hermes"),
    Family("qwen3", "trl/qwen3", "qwen3", _CHATML_END, "hermes", _THINK),
    Family("qwen3_2507", "trl/qwen3_instruct_2507", "qwen3", _CHATML_END, "hermes"),
    Family("qwen3_vl", "trl/qwen3_vl", "qwen3", _CHATML_END, "hermes"),
    Family("qwen3_coder", "llama_cpp/Qwen3-Coder", "qwen3", _CHATML_END, "qwen_xml"),
    Family("qwen3_5", "trl/qwen3_5_think", "qwen3_5", _CHATML_END, "qwen_xml", _THINK),
    Family("qwen3_6", "trl/qwen3_6", "qwen3_5", _CHATML_END, "qwen_xml", _THINK),
    Family("qwen3_8", "trl/qwen3_8", "qwen3_5", _CHATML_END, "qwen_xml", _THINK, stand_in=True),
    Family("qwq", "llama_cpp/Qwen-QwQ-32B", "qwen3", _CHATML_END, "hermes", _THINK, stand_in=True),
    Family(
        name="nemotron_3",
        template="trl/nemotron_3_nano",
        tokenizer="mistral_nemo",
        end_of_turn=("<|im_end|>", "</s>"),
        tool_format="qwen_xml",
        reasoning=_THINK,
        stand_in=True,
        control_tokens=("<|im_start|>", "<|im_end|>"),
        marks=(*_THINK, *_TOOL_CALL, *_TOOL_RESPONSE),
    ),
    Family(
        name="hermes_3",
        template="llama_cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        tokenizer="llama3",
        end_of_turn=("<|im_end|>", "<|end_of_text|>"),
        tool_format="hermes",
        bos_token=_LLAMA3_BOS,
        stand_in=True,
        control_tokens=("<|im_start|>", "<|im_end|>"),
        marks=(*_TOOL_CALL, *_TOOL_RESPONSE, "<tools>", "</tools>"),
        note="needs tools",
    ),
    *(
        Family(
            name=name,
            template=template,
            tokenizer="llama3",
            end_of_turn=_GLM_END,
            tool_format="glm",
            reasoning=_THINK,
            eos_token="<|endoftext|>",
            stand_in=True,
            control_tokens=_GLM_CONTROL,
            marks=_GLM_MARKS,
        )
        for name, template in (
            ("glm_4_5", "trl/glm4moe"),
            ("glm_4_6", "llama_cpp/GLM-4.6"),
            ("glm_4_7", "llama_cpp/GLM-4.7-Flash"),
        )
    ),
    Family(
        name="kimi_k2",
        template="llama_cpp/moonshotai-Kimi-K2",
        tokenizer="llama3",
        end_of_turn=("<|im_end|>", "[EOS]", "[EOT]"),
        tool_format="kimi_k2",
        bos_token="[BOS]",
        stand_in=True,
        control_tokens=_KIMI_K2_CONTROL,
    ),
    Family(
        name="kimi_k3",
        template="llama_cpp/Kimi-K3",
        tokenizer="llama3",
        end_of_turn=("<|end_of_msg|>", "[EOS]"),
        tool_format="kimi_k3",
        reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        bos_token="[BOS]",
        stand_in=True,
        control_tokens=("[BOS]", "[EOS]", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    ),
    Family(
        name="deepseek_v3_original",
        template="npm/deepseek_v3",
        tokenizer="deepseek_v3",
        end_of_turn=_DEEPSEEK_END,
        tool_format="deepseek_v3",
        bos_token=_DEEPSEEK_BOS,
        note="drops tool calls, with or without text",
    ),
    Family(
        name="deepseek_v3",
        template="trl/deepseekv3",
        tokenizer="deepseek_v3",
        end_of_turn=_DEEPSEEK_END,
        tool_format="deepseek_v3",
        reasoning=_THINK,
        bos_token=_DEEPSEEK_BOS,
        note="expects the arguments as text",
    ),
    *(
        Family(
            name=name,
            template=template,
            tokenizer="deepseek_v4",
            end_of_turn=_DEEPSEEK_END,
            tool_format=tool_format,
            reasoning=_THINK,
            bos_token=_DEEPSEEK_BOS,
            stand_in=stand_in,
        )
        for name, template, tool_format, stand_in in (
            ("deepseek_v3_1", "llama_cpp/deepseek-ai-DeepSeek-V3.1", "deepseek_v3_1", True),
            ("deepseek_v3_2", "llama_cpp/deepseek-ai-DeepSeek-V3.2", "deepseek_v3_2", True),
            ("deepseek_v4", "llama_cpp/deepseek-ai-DeepSeek-V4", "deepseek_v4", False),
        )
    ),
    Family(
        name="gpt_oss",
        template="trl/gptoss",
        tokenizer="gpt_oss",
        end_of_turn=("<|return|>", "<|call|>", "<|end|>"),
        tool_format="harmony",
        reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
        bos_token="<|startoftext|>",
    ),
    Family("llama_3_1", "trl/llama3_1", "llama3", _LLAMA3_END, "llama3_json", bos_token=_LLAMA3_BOS, note=_ONE_CALL),
    Family("llama_3_2", "trl/llama3_2", "llama3", _LLAMA3_END, "llama3_json", bos_token=_LLAMA3_BOS, note=_ONE_CALL),
    Family(
        name="llama_3_3",
        template="llama_cpp/meta-llama-Llama-3.3-70B-Instruct",
        tokenizer="llama3",
        end_of_turn=_LLAMA3_END,
        tool_format="llama3_json",
        bos_token=_LLAMA3_BOS,
        note=_ONE_CALL,
    ),
    Family(
        name="llama_4",
        template="vllm/tool_chat_template_llama4_pythonic",
        tokenizer="llama4",
        end_of_turn=("<|eot|>", "<|eom|>", "<|end_of_text|>"),
        tool_format="llama4_pythonic",
        bos_token="<|begin_of_text|>",
        note="writes every argument as a string, without escaping quotes",
    ),
    Family(
        name="mistral_nemo",
        template="llama_cpp/mistralai-Mistral-Nemo-Instruct-2407",
        tokenizer="mistral_nemo",
        end_of_turn=("</s>",),
        tool_format="mistral",
        bos_token="<s>",
        note="moves the system prompt and the tools to the last user turn",
    ),
    Family(
        name="mistral_small_3_2",
        template="llama_cpp/Mistral-Small-3.2-24B-Instruct-2506",
        tokenizer="mistral_tekken",
        end_of_turn=("</s>",),
        tool_format="mistral",
        bos_token="<s>",
        stand_in=True,
        note="moves the tools to the last user turn",
    ),
    Family(
        name="ministral_3",
        template="llama_cpp/mistralai-Ministral-3-14B-Reasoning-2512",
        tokenizer="mistral_tekken",
        end_of_turn=("</s>",),
        tool_format="mistral",
        reasoning=("[THINK]", "[/THINK]"),
        bos_token="<s>",
        stand_in=True,
    ),
    Family(
        name="minimax_m2",
        template="llama_cpp/MiniMax-M2",
        tokenizer="llama4",
        end_of_turn=("[e~[",),
        tool_format="minimax_m2",
        reasoning=_THINK,
        bos_token="]~!b[",
        stand_in=True,
        control_tokens=("]~!b[", "]~b]", "[e~["),
        marks=(*_THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    Family(
        name="minimax_m3",
        template="llama_cpp/MiniMax-M3",
        tokenizer="llama4",
        end_of_turn=("[e~[",),
        tool_format="minimax_m3",
        reasoning=("<mm:think>", "</mm:think>"),
        bos_token="]~!b[",
        stand_in=True,
        control_tokens=("]~!b[", "]~b]", "[e~["),
        marks=("]<]minimax[>[", "]<]image[>[", "]<]video[>[", "<mm:think>", "</mm:think>", *_TOOL_CALL),
    ),
    Family(
        name="gemma_3",
        template="trl/gemma3",
        tokenizer="gemma3",
        end_of_turn=("<end_of_turn>", "<eos>"),
        tool_format=None,
        bos_token="<bos>",
        note="rejects tools",
    ),
    Family(
        name="gemma_4",
        template="trl/gemma4_v5",
        tokenizer="gemma4",
        end_of_turn=("<turn|>", "<|tool_response>", "<eos>"),
        tool_format="gemma4",
        reasoning=("<|channel>thought\n", "<channel|>"),
        bos_token="<bos>",
    ),
    Family(
        name="granite_3",
        template="vllm/tool_chat_template_granite",
        tokenizer="llama3",
        end_of_turn=("<|end_of_text|>",),
        tool_format="granite",
        stand_in=True,
        control_tokens=_GRANITE_CONTROL,
        note="drops text before a tool call",
    ),
    *(
        Family(
            name=name,
            template=template,
            tokenizer="llama3",
            end_of_turn=("<|end_of_text|>",),
            tool_format="hermes",
            stand_in=True,
            control_tokens=_GRANITE_CONTROL,
            marks=(*_TOOL_CALL, *_TOOL_RESPONSE, *_THINK),
        )
        for name, template in (
            ("granite_4", "llama_cpp/ibm-granite-granite-4.0"),
            ("granite_4_1", "llama_cpp/ibm-granite-granite-4.1"),
        )
    ),
    Family(
        name="seed_oss",
        template="llama_cpp/ByteDance-Seed-OSS",
        tokenizer="llama3",
        end_of_turn=("<seed:eos>",),
        tool_format="seed_oss",
        reasoning=("<seed:think>", "</seed:think>"),
        bos_token="<seed:bos>",
        stand_in=True,
        control_tokens=("<seed:bos>", "<seed:eos>", "<seed:pad>"),
        marks=(
            *("<seed:think>", "</seed:think>", "<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>"),
            *("<seed:tool_call>", "</seed:tool_call>"),
        ),
    ),
    Family(
        name="phi_4_mini",
        template="vllm/tool_chat_template_phi4_mini",
        tokenizer="gpt_oss",
        end_of_turn=("<|end|>", "<|endoftext|>"),
        tool_format="phi4",
        stand_in=True,
        control_tokens=(
            *("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>"),
            *("<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
        ),
        note="always opens a new turn; writes calls in another form than it asks for, and not after text",
    ),
    Family(
        name="smollm3",
        template="llama_cpp/HuggingFaceTB-SmolLM3-3B",
        tokenizer="llama3",
        end_of_turn=("<|im_end|>", "<|end_of_text|>"),
        tool_format="smollm3",
        reasoning=_THINK,
        stand_in=True,
        control_tokens=("<|im_start|>", "<|im_end|>"),
        marks=(*_THINK, *_TOOL_CALL, *_TOOL_RESPONSE),
        note="drops tool calls and tools",
    ),
)

# All families by name.
FAMILIES: dict[str, Family] = {family.name: family for family in _TABLE}


def families_directory() -> Path:
    """Return the folder of the fetched files; without it, the test fails in CI and is skipped elsewhere."""
    if not is_fetched():
        how = "python tests/support/families/fetch.py fetches them (210 MB, under a minute)"
        reason = f"the real tokenizers and chat templates are not in the cache: {how}"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return cache_directory()


@functools.cache
def load_template(name: str) -> str:
    """Return the text of a chat template.

    Args:
        name: Name of a family ("qwen3"), or of a template ("llama_cpp/Kimi-K2-Thinking").
    """
    template = FAMILIES[name].template if name in FAMILIES else name
    return (families_directory() / "templates" / f"{template}.jinja").read_text(encoding="utf-8")


@functools.cache
def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a family's tokenizer with its chat template. It is shared: use `copy.copy` before you change it.

    Args:
        name: Name of the family.
    """
    family = FAMILIES[name]
    eos_token = family.eos_token or family.end_of_turn[0]
    shared = _vocabulary(family.tokenizer, family.control_tokens, family.marks, eos_token, family.bos_token)
    tokenizer = copy.copy(shared)
    tokenizer.chat_template = load_template(name)
    return tokenizer


@functools.cache
def _vocabulary(
    name: str, control_tokens: tuple[str, ...], marks: tuple[str, ...], eos_token: str, bos_token: str | None
) -> PreTrainedTokenizerFast:
    """Return a tokenizer without a chat template, shared by the families that use it."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(families_directory() / "tokenizers" / name / "tokenizer.json"),
        clean_up_tokenization_spaces=False,
    )
    for tokens, special in ((control_tokens, True), (marks, False)):
        added = [AddedToken(token, normalized=False, special=special) for token in tokens]
        tokenizer.add_tokens(added, special_tokens=special)
    tokenizer.eos_token = eos_token
    if bos_token is not None:
        tokenizer.bos_token = bos_token
    return tokenizer
