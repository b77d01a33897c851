"""Drift for the page: which tokens would change if the text were encoded again, and into which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..drift import cause_of, find_differences
from ..inspection.records import Group, TokenSequence
from ..templates.encoder import Encoder
from .stores import places_of, starts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_ROWS = 2_000
"""Differing stretches that the page lists."""

_LONGEST = 24  # tokens of a stretch that are listed


@dataclass
class Drifts:
    """The drift of all sequences.

    Attributes:
        marks: For each episode with drift, by its number, 1 at each drifted token of its store.
        rows: The differing stretches.
        tokens: Number of drifted tokens, those of a trunk that sequences share once per sequence.
        all: Number of tokens of all sequences.
        sequences: Number of sequences.
        cut: Whether there are more stretches than rows.
    """

    marks: dict[int, NDArray[Any]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    all: int = 0
    sequences: int = 0
    cut: bool = False


def measure(groups: Sequence[Group]) -> Drifts | None:
    """Measure the drift of all exported sequences of the groups with a tokenizer; None without any."""
    import numpy as np

    if all(group.encoder is None for group in groups):
        return None
    found = Drifts()
    number = -1
    for group in groups:
        for episode in group.episodes:
            number += 1
            if group.encoder is None:
                continue
            starts = starts_of(episode.turns)
            marks = np.zeros(sum(stop - start for start, _, stop in starts.values()), np.uint8)
            for at, sequence in enumerate(episode.sequences):
                _add(
                    found,
                    marks,
                    places_of(sequence, starts),
                    sequence,
                    group.encoder,
                    {"episode": number, "sequence": at},
                )
            if marks.any():
                found.marks[number] = marks
    return found


def _add(
    found: Drifts,
    marks: NDArray[Any],
    places: NDArray[Any],
    sequence: TokenSequence,
    encoder: Encoder,
    at: dict[str, Any],
) -> None:
    ids = sequence.column("ids").tolist()
    again = encoder.encode(encoder.decode(ids))
    found.all += len(ids)
    found.sequences += 1
    parts: list[tuple[int, int, bool]] = []
    for step in sequence.steps:
        parts += [(step.start, step.sampled, False), (step.sampled, step.stop, True)]
    for difference in find_differences(ids, again, encoder):
        start, stop, again_start, again_stop = difference
        found.tokens += stop - start
        marks[places[start:stop]] = 1
        found.cut = found.cut or len(found.rows) >= MOST_ROWS
        if not found.cut:
            row = {
                **at,
                "position": start,
                "cause": cause_of(difference, parts),
                "recorded": _named(ids[start:stop], encoder),
                "again": _named(again[again_start:again_stop], encoder),
            }
            found.rows.append(row)


def _named(ids: Sequence[int], encoder: Encoder) -> list[tuple[int, str]]:
    pieces = encoder.pieces(ids[:_LONGEST])
    return [(token_id, pieces[token_id].decode("utf-8", "surrogateescape")) for token_id in ids[:_LONGEST]]
