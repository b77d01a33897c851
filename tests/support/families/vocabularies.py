"""How each real tokenizer is made from what was downloaded: put into the form of tokenizer.json where it is in another.

Three other forms occur: tiktoken's ranks (one base64 token and its rank per line), Mistral's tekken JSON
(the same ranks under other names), and the metadata of a GGUF file. Promise: the result encodes as
the source does, because nothing but the notation changes. A byte-level BPE that merges by rank is
the same as one that lists, for every token, all pairs that make it, in the order of the tokens.

The names of control tokens are not part of tiktoken's ranks, so they are listed here; where the
same vocabulary is also published as a tokenizer.json, the two were compared and are equal.
"""

from __future__ import annotations

import base64
import itertools
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TokenizerJson = dict[str, Any]
"""The content of a tokenizer.json."""

MakeTokenizer = Callable[[Path], TokenizerJson]
"""Makes a tokenizer.json from the folder of downloaded files."""

_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4


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


def read_tiktoken(path: Path) -> dict[bytes, int]:
    """Return the ranks of a tiktoken file, by token."""
    lines = (line.split(b" ") for line in path.read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def read_gguf(path: Path) -> dict[str, Any]:
    """Return the metadata of a little-endian GGUF file (its tensors are not read).

    The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
    """
    data, at = path.read_bytes(), 24
    magic, _, _, entries = struct.unpack_from("<4sIQQ", data)
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file")

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        values = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return values

    def value(kind: int) -> Any:
        nonlocal at
        if kind in _GGUF_SCALARS:
            return take(_GGUF_SCALARS[kind])[0]
        if kind == _GGUF_STRING:
            (length,) = take("Q")
            at += length
            return data[at - length : at].decode()
        if kind != _GGUF_ARRAY:
            raise ValueError(f"{path} holds a value of the unknown type {kind}")
        element, count = take("IQ")
        if element in _GGUF_SCALARS:
            return list(take(f"{count}{_GGUF_SCALARS[element]}"))
        return [value(element) for _ in range(count)]

    metadata = {}
    for _ in range(entries):
        key = value(_GGUF_STRING)
        metadata[key] = value(*take("I"))
    return metadata


def byte_level_bpe(
    ranks: Mapping[bytes, int],
    *,
    pattern: str,
    control_tokens: Sequence[tuple[str, bool]],
    first_control_id: int,
    first_rank_id: int = 0,
    normalizer: str | None = None,
    bos_token: str | None = None,
) -> TokenizerJson:
    """Return the tokenizer.json of a byte-level BPE that is given as ranks.

    Args:
        ranks: Every token's bytes and its rank.
        pattern: The regular expression that cuts text into words.
        control_tokens: Name of each added token, and whether it is special (decoding can skip it).
        first_control_id: Id of the first of them; they are numbered consecutively.
        first_rank_id: Id of the token of rank 0.
        normalizer: Unicode normal form applied to the text, if any.
        bos_token: Token put before every text, if any.
    """
    # GPT-2's printable letter for each byte: its own character, or the next free one from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = (256 + index for index in range(256))
    letters = [chr(byte if byte in printable else next(moved)) for byte in range(256)]
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges: list[list[str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [
            (ranks[left], ranks[right], names[left], names[right])
            for left, right in ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            if left in ranks and right in ranks
        ]
        merges.extend([left, right] for _, _, left, right in sorted(pairs))
    vocabulary = {names[token]: rank + first_rank_id for token, rank in ranks.items()}
    ids = {name: first_control_id + index for index, (name, _) in enumerate(control_tokens)}
    # transformers wants ids below the model's own to be in the model's vocabulary as well.
    if first_control_id < first_rank_id:
        vocabulary = {**ids, **vocabulary}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _tokenizer_json(
        model={"vocab": vocabulary, "merges": merges, "ignore_merges": True},
        added=[_added(ids[name], name, special) for name, special in control_tokens],
        normalizer={"type": normalizer} if normalizer else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]},
        post_processor=_prepend(bos_token, ids[bos_token]) if bos_token else byte_level,
        decoder=byte_level,
    )


def gemma_bpe(tokens: Sequence[str], merges: Sequence[str], added: Sequence[tuple[int, str, bool]]) -> TokenizerJson:
    """Return the tokenizer.json of a Gemma vocabulary: BPE over characters, with bytes for what it lacks.

    Args:
        tokens: All tokens of the model, by id.
        merges: Pairs, each as two tokens with a space between.
        added: Id and name of each token that is cut out of the text first, and whether it is special.
    """
    space, mark = " ", "\N{LOWER ONE EIGHTH BLOCK}"
    return _tokenizer_json(
        model={
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
        },
        added=[_added(*token) for token in added],
        normalizer={"type": "Replace", "pattern": {"String": space}, "content": mark},
        pre_tokenizer={
            "type": "Split",
            "pattern": {"String": space},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        post_processor=_prepend("<bos>", list(tokens).index("<bos>")),
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": mark}, "content": space},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
    )


def gemma4(metadata: Mapping[str, Any]) -> TokenizerJson:
    """Return Gemma 4's tokenizer.json from the metadata of its GGUF file."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    control = [index for index, kind in enumerate(kinds) if kind in (_GGUF_CONTROL, _GGUF_USER_DEFINED)]
    added = [(index, tokens[index], True) for index in control]
    return gemma_bpe(tokens, metadata["tokenizer.ggml.merges"], added)


def gemma3(metadata: Mapping[str, Any]) -> TokenizerJson:
    """Return Gemma 3's tokenizer.json from the metadata of Gemma 4's GGUF file.

    The two vocabularies are the same but for the control tokens: what Gemma 4 named was an unused
    token before, and the unused ones are numbered in the order of their ids. Gemma 3 also cuts runs
    of whitespace, HTML tags and unused tokens out of the text first, which Gemma 4 does not.
    """
    tokens, kinds = list(metadata["tokenizer.ggml.tokens"]), metadata["tokenizer.ggml.token_type"]
    special = {
        **{index: tokens[index] for index in range(4)},
        105: "<start_of_turn>",
        106: "<end_of_turn>",
        255999: "<start_of_image>",
        256000: "<end_of_image>",
    }
    unused = 0
    for index, token in enumerate(tokens):
        if index in special:
            tokens[index] = special[index]
        elif token.startswith("<unused") or (index > 4 and kinds[index] in (_GGUF_CONTROL, _GGUF_USER_DEFINED)):
            tokens[index] = f"<unused{unused}>"
            unused += 1
    cut_out = (*range(238), *range(255968, len(tokens)))
    added = [(index, tokens[index], index in special) for index in cut_out]
    return gemma_bpe(tokens, metadata["tokenizer.ggml.merges"], [*added, (len(tokens), "<image_soft_token>", True)])


def _tokenizer_json(*, model: Mapping[str, Any], added: Sequence[Mapping[str, Any]], **parts: Any) -> TokenizerJson:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        **parts,
        "model": {"type": "BPE", "dropout": None, **model},
    }


def _added(index: int, content: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, **flags, "special": special}


def _prepend(token: str, index: int) -> dict[str, Any]:
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text, pair = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"SpecialToken": {"id": token, "type_id": 1}}, pair],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }


def _numbered(named: dict[int, str], count: int, unnamed: str) -> list[tuple[str, bool]]:
    """Return `count` special tokens: the named ones, and `unnamed` with a running number or its position elsewhere."""
    running = itertools.count()
    return [
        (named[at] if at in named else unnamed.format(position=at, running=next(running)), True) for at in range(count)
    ]


def _file(name: str) -> MakeTokenizer:
    def read(raw: Path) -> TokenizerJson:
        tokenizer: TokenizerJson = json.loads((raw / name / "tokenizer.json").read_text(encoding="utf-8"))
        return tokenizer

    return read


def _qwen2_5(raw: Path) -> TokenizerJson:
    tokenizer = _file("qwen3")(raw)
    added = [token for token in tokenizer["added_tokens"] if token["content"] not in _QWEN_MARKS[-4:]]
    return {**tokenizer, "added_tokens": added}


def _qwen3_5(raw: Path) -> TokenizerJson:
    ranks = read_tiktoken(raw / "qwen3_5" / "qwen3_6.tiktoken")
    control = [(token, token not in _QWEN_MARKS) for token in (*_QWEN_SPECIAL, *_QWEN_MARKS, *_QWEN3_5_AUDIO)]
    return byte_level_bpe(
        ranks,
        pattern=_QWEN3_5_PATTERN,
        control_tokens=control,
        first_control_id=len(ranks),
        normalizer="NFC",
    )


def _llama(name: str, pattern: str, named: dict[int, str], count: int) -> MakeTokenizer:
    def make(raw: Path) -> TokenizerJson:
        ranks = read_tiktoken(raw / name / "tokenizer.model")
        return byte_level_bpe(
            ranks,
            pattern=pattern,
            control_tokens=_numbered(named, count, "<|reserved_special_token_{running}|>"),
            first_control_id=len(ranks),
            bos_token="<|begin_of_text|>",
        )

    return make


def _tekken(named: dict[int, str]) -> MakeTokenizer:
    def make(raw: Path) -> TokenizerJson:
        content = json.loads((raw / "mistral" / "tekken_240718.json").read_text(encoding="utf-8"))
        config = content["config"]
        control = config["default_num_special_tokens"]
        # The file lists more tokens than the vocabulary has.
        kept = content["vocab"][: config["default_vocab_size"] - control]
        return byte_level_bpe(
            {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in kept},
            pattern=config["pattern"],
            control_tokens=_numbered(named, control, "<SPECIAL_{position}>"),
            first_control_id=0,
            first_rank_id=control,
            bos_token="<s>",
        )

    return make


def _gemma(make: Callable[[dict[str, Any]], TokenizerJson]) -> MakeTokenizer:
    return lambda raw: make(read_gguf(raw / "gemma4" / "ggml-vocab-gemma-4.gguf"))


VOCABULARIES: dict[str, MakeTokenizer] = {
    "qwen2_5": _qwen2_5,
    "qwen3": _file("qwen3"),
    "qwen3_5": _qwen3_5,
    "llama3": _llama("llama3", _LLAMA3_PATTERN, _LLAMA3_NAMED, 256),
    "llama4": _llama("llama4", _LLAMA4_PATTERN, _LLAMA4_NAMED, 2048),
    "mistral_nemo": _tekken(_NEMO_NAMED),
    "mistral_tekken": _tekken(_TEKKEN_NAMED),
    "gemma3": _gemma(gemma3),
    "gemma4": _gemma(gemma4),
    "deepseek_v3": _file("deepseek_v3"),
    "deepseek_v4": _file("deepseek_v4"),
    "gpt_oss": _file("gpt_oss"),
}
"""Every real tokenizer, by name."""
