"""Tokenizers that are published in another form than tokenizer.json, put into that form.

Three forms occur: tiktoken's ranks (one base64 token and its rank per line), Mistral's tekken JSON
(the same ranks under other names), and the metadata of a GGUF file. Promise: the result encodes as
the source does, because nothing but the notation changes. A byte-level BPE that merges by rank is
the same as one that lists, for every token, all pairs that make it, in the order of the tokens.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TokenizerJson = dict[str, Any]
"""The content of a tokenizer.json."""

_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4


def read_tiktoken(path: Path) -> dict[bytes, int]:
    """Return the ranks of a tiktoken file, by token."""
    ranks = {}
    for line in path.read_bytes().splitlines():
        token, _, rank = line.partition(b" ")
        ranks[base64.b64decode(token)] = int(rank)
    return ranks


def read_tekken(path: Path) -> tuple[dict[bytes, int], str, int]:
    """Return the ranks of a tekken file, its pattern and how many control tokens come before the ranks."""
    content = json.loads(path.read_text(encoding="utf-8"))
    config = content["config"]
    control = config["default_num_special_tokens"]
    # The file lists more tokens than the vocabulary has.
    kept = content["vocab"][: config["default_vocab_size"] - control]
    return {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in kept}, config["pattern"], control


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
    letters = _byte_letters()
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


def without_tokens(tokenizer: Mapping[str, Any], removed: Sequence[str]) -> TokenizerJson:
    """Return a tokenizer.json without some of its added tokens."""
    added = [token for token in tokenizer["added_tokens"] if token["content"] not in removed]
    return {**tokenizer, "added_tokens": added}


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


def _byte_letters() -> list[str]:
    """Return GPT-2's printable letter for each byte: its own character, or the next free one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [moved.get(byte, chr(byte)) for byte in range(256)]
