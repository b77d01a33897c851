"""The text of tokens: pieces of a vocabulary, who wrote each token of a prompt, and who said it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ..messages.said import Said
from ..trajectory.turn import Turn
from .records import Writer

_WRITERS = {"system": Writer.SYSTEM, "user": Writer.USER, "tool": Writer.TOOL, "assistant": Writer.HISTORY}


def joined(ids: Iterable[int], vocabulary: Mapping[int, bytes]) -> str | None:
    """Return the text of ids; None if the vocabulary lacks one."""
    pieces = [vocabulary.get(token_id) for token_id in ids]
    return None if None in pieces else b"".join(pieces).decode("utf-8", "replace")  # type: ignore[arg-type]


def first_other(ids: Sequence[int], vocabulary: Mapping[int, bytes], recorded: str) -> int:
    """Return the position of the first token that is not that of a text; the last one if the text is longer."""
    wanted, length = recorded.encode("utf-8", "replace"), 0
    for at, token_id in enumerate(ids):
        piece = vocabulary[token_id]
        if wanted[length : length + len(piece)] != piece:
            return at
        length += len(piece)
    return max(len(ids) - 1, 0)


def writers_of(turn: Turn, vocabulary: Mapping[int, bytes]) -> Any:
    """Return the `Writer` of each token of a turn: what was said is searched in the prompt, the rest is the template's.

    Without a vocabulary, or if a file does not tell what was said, the tokens of the prompt are `Writer.PROMPT`.
    """
    pieces = [vocabulary.get(token_id) for token_id in turn.prompt_ids]
    if turn.said and None not in pieces:
        prompt = _writers(pieces, turn.said)  # type: ignore[arg-type]
    else:
        prompt = np.full(len(pieces), Writer.PROMPT, np.uint8)
    return np.concatenate([prompt, np.full(len(turn.output_ids), Writer.MODEL, np.uint8)])


def _writers(pieces: Sequence[bytes], said: Sequence[Said]) -> Any:
    text = b"".join(pieces)
    ends = list(accumulate(map(len, pieces)))
    writers = np.full(len(pieces), Writer.TEMPLATE, np.uint8)
    position = 0
    for part in said:
        needle = part.text.strip().encode("utf-8", "replace")
        found = text.find(needle, position) if needle else -1
        if found < 0:
            continue
        position = found + len(needle)
        # A token belongs to the text if it ends inside, and none that only touches it.
        writers[bisect_right(ends, found) : bisect_left(ends, position) + 1] = _WRITERS.get(part.role, Writer.PROMPT)
    return writers
