"""Which token ids could be sampled at each place: what was left after grammar, penalties, top-k, top-p and min-p.

Truncated sampling renormalises over these ids. With them a trainer computes the probability that the sampler really
used, as `z[y] / T - logsumexp(z[ids] / T)`; the logprobs that SGLang tells otherwise are over the whole vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..exceptions import SGLangDecodingError


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """Rows of token ids, one per token, one behind the other.

    Attributes:
        token_ids: The ids of all rows, shape (sum of `lengths`,). A row of SGLang's has the most probable id first.
        lengths: How many of them each row has, shape (T,); 0 where it is not known, or nothing was sampled.
    """

    token_ids: array[int]
    lengths: array[int]

    @property
    def offsets(self) -> array[int]:
        """Where the rows start, and the last one ends; shape (T + 1,)."""
        return array("q", accumulate(self.lengths, initial=0))

    def rows(self) -> Iterator[list[int]]:
        """The ids of each token in turn; empty where they are not known."""
        start = 0
        for length in self.lengths:
            yield self.token_ids[start : start + length].tolist()
            start += length

    def part(self, start: int, stop: int) -> SamplingMask:
        """The rows from one place up to another."""
        before = sum(self.lengths[:start])
        lengths = self.lengths[start:stop]
        return SamplingMask(self.token_ids[before : before + sum(lengths)], lengths)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def __eq__(self, other: object) -> bool:
        """Equal to a mask with the same rows."""
        if not isinstance(other, SamplingMask):
            return NotImplemented
        return self.token_ids == other.token_ids and self.lengths == other.lengths

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Counts; never the ids, which may be many."""
        return f"SamplingMask({len(self)} rows, {len(self.token_ids)} ids)"


def unknown_mask(count: int) -> SamplingMask:
    """The mask of tokens whose ids are not known."""
    return SamplingMask(array("i"), array("i", bytes(4 * count)))


def joined_mask(masks: Iterable[tuple[SamplingMask | None, int]]) -> SamplingMask | None:
    """The masks of one piece behind the other; None if none is known.

    Args:
        masks: Each with the number of its tokens.
    """
    known = False
    token_ids, lengths = array("i"), array("i")
    for mask, count in masks:
        known = known or mask is not None
        piece = unknown_mask(count) if mask is None else mask
        token_ids.extend(piece.token_ids)
        lengths.extend(piece.lengths)
    return SamplingMask(token_ids, lengths) if known else None


def read_sampling_mask(rows: Any, output_ids: Sequence[int]) -> SamplingMask | None:
    """Read `output_token_sampling_mask` of an answer's `meta_info`.

    Args:
        rows: The key's value; None if it is not there.
        output_ids: The sampled ids, shape (T,).

    Raises:
        SGLangDecodingError: The rows are not those of the tokens.
    """
    if rows is None:
        return None
    if len(rows) != len(output_ids):
        raise SGLangDecodingError(f"the server returned {len(output_ids)} token ids with {len(rows)} sampling masks")
    for place, (token_id, row) in enumerate(zip(output_ids, rows, strict=True)):
        if token_id not in row:
            raise SGLangDecodingError(f"the sampling mask of token {place} lacks {token_id}, which was sampled")
    token_ids = array("i")
    for row in rows:
        token_ids.extend(array("i", row))
    return SamplingMask(token_ids, array("i", map(len, rows)))


def read_sampling_logprobs(values: Any, count: int) -> array[float] | None:
    """Read `output_token_sampling_logprobs` of an answer's `meta_info`; None if the key is not there.

    Raises:
        SGLangDecodingError: They are not those of `count` tokens.
    """
    if values is None:
        return None
    if len(values) != count:
        raise SGLangDecodingError(f"the server returned {count} token ids with {len(values)} sampling logprobs")
    try:
        return array("d", values)
    except TypeError as error:  # of the mode "support", which has a list for each token
        raise SGLangDecodingError(f"a sampling logprob is not a number: {error}") from error
