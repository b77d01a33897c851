"""Retokenization drift: how far a sequence differs from its own text, encoded again.

A pipeline that keeps text and tokenizes it later trains on other ids than the model saw and sampled. This module counts
them. A differing stretch is found by its text: the shortest runs of recorded and new tokens that decode to the same
text, and after which both sequences agree again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .templates.encoder import Encoder, get_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .trajectory.tokens import TokenManager

CAUSES = ("sampled", "boundary", "template")
"""Positions of drifted tokens: inside a sampled turn, across the edge of one, or inside a prompt."""

_WINDOW = 32  # longest differing stretch to search for, in tokens on each side


@dataclass(frozen=True)
class SequenceDrift:
    """Drift of one sequence.

    Attributes:
        tokens: Length of the sequence, in tokens.
        drifted: Number of recorded tokens that encoding the text again does not reproduce, by cause.
        first: Position of the first drifted token; None if there is none.
    """

    tokens: int
    drifted: dict[str, int]
    first: int | None

    @property
    def is_affected(self) -> bool:
        """Whether any token drifted."""
        return self.first is not None


@dataclass(frozen=True)
class Drift:
    """Drift of all sequences of one episode or several.

    Attributes:
        sequences: Drift of each sequence.
    """

    sequences: tuple[SequenceDrift, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens in all sequences."""
        return sum(sequence.tokens for sequence in self.sequences)

    @property
    def drifted(self) -> dict[str, int]:
        """Number of drifted tokens, by cause."""
        return {cause: sum(sequence.drifted[cause] for sequence in self.sequences) for cause in CAUSES}

    @property
    def share_affected(self) -> float:
        """Share of sequences with any drift, 0.0 to 1.0."""
        return sum(sequence.is_affected for sequence in self.sequences) / max(len(self.sequences), 1)

    def __add__(self, other: Drift) -> Drift:
        """Return the drift of both."""
        return Drift(self.sequences + other.sequences)


class Difference(NamedTuple):
    """A stretch that encoding again gives differently, as half-open ranges.

    Attributes:
        start: Where it begins in the recorded sequence.
        stop: Where it ends there.
        again_start: Where it begins in the ids that were encoded again.
        again_stop: Where it ends there.
    """

    start: int
    stop: int
    again_start: int
    again_stop: int


def measure_drift(sequences: Iterable[TokenManager], tokenizer: PreTrainedTokenizerBase) -> Drift:
    """Decode sequences, encode them again, and count what differs.

    Args:
        sequences: Recorded sequences, such as `model.trajectory.sequences()`.
        tokenizer: Tokenizer of the served model.
    """
    encoder = get_encoder(tokenizer)
    return Drift(tuple(_sequence_drift(sequence, encoder) for sequence in sequences))


def _sequence_drift(sequence: TokenManager, encoder: Encoder) -> SequenceDrift:
    recorded = sequence.token_ids
    parts, position = [], 0
    again = encoder.encode(encoder.decode(recorded))
    for is_response, length in sequence.segment_info:
        parts.append((position, position + length, is_response))
        position += length
    drifted = dict.fromkeys(CAUSES, 0)
    differences = list(find_differences(recorded, again, encoder))
    for difference in differences:
        drifted[cause_of(difference, parts)] += difference.stop - difference.start
    return SequenceDrift(len(recorded), drifted, differences[0][0] if differences else None)


def cause_of(difference: Difference, parts: Iterable[tuple[int, int, bool]]) -> str:
    """Return where a stretch is, one of `CAUSES`.

    Args:
        difference: The stretch.
        parts: Where each part of the sequence begins and ends, and whether the model sampled it.
    """
    for start, stop, is_sampled in parts:
        if start <= difference.start and difference.stop <= stop:
            return "sampled" if is_sampled else "template"
    return "boundary"


def find_differences(recorded: Sequence[int], again: Sequence[int], encoder: Encoder) -> Iterator[Difference]:
    """Yield the stretches of a sequence that encoding its text again gives differently.

    Args:
        recorded: Ids of the sequence.
        again: Ids of its text, encoded again.
        encoder: Encoder of the tokenizer.
    """
    i = j = 0
    while i < len(recorded) and j < len(again):
        if recorded[i] == again[j]:
            i, j = i + 1, j + 1
            continue
        width = _same_text(recorded[i : i + _WINDOW], again[j : j + _WINDOW], encoder)
        if width is None:  # no end found: the whole rest counts
            break
        yield Difference(i, i + width[0], j, j + width[1])
        i, j = i + width[0], j + width[1]
    if i < len(recorded):
        yield Difference(i, len(recorded), j, len(again))
    elif j < len(again) and recorded:  # an incomplete character became a whole one
        yield Difference(len(recorded) - 1, len(recorded), j - 1, len(again))


def _same_text(recorded: Sequence[int], again: Sequence[int], encoder: Encoder) -> tuple[int, int] | None:
    """Return the lengths of the shortest prefixes of two runs with the same text; None if there are none."""
    texts = {encoder.decode(again[:length]): length for length in range(len(again), 0, -1)}
    for length in range(1, len(recorded) + 1):
        text = encoder.decode(recorded[:length])
        # A text that ends inside a character has no definite end.
        if text in texts and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            return length, texts[text]
    return None
