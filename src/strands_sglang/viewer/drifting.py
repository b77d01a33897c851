"""Drift for the page: which tokens would change if the text were encoded again, and into which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..drift import find_differences
from ..inspection.records import Group, SequenceRecord
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

    def as_json(self) -> dict[str, Any]:
        """Return what the page lists."""
        return {name: getattr(self, name) for name in ("rows", "tokens", "all", "sequences", "cut")}


def measure(groups: Sequence[Group]) -> Drifts | None:
    """Measure the drift of all exported sequences of the groups with a tokenizer; None without any."""
    import numpy as np

    if not any("encoder" in group.facts for group in groups):
        return None
    found = Drifts()
    number = -1
    for group in groups:
        encoder: Encoder | None = group.facts.get("encoder")
        for episode in group.episodes:
            number += 1
            if encoder is None:
                continue
            starts, length = starts_of(episode)
            marks = np.zeros(length, np.uint8)
            for at, sequence in enumerate(episode.sequences):
                ids = [int(token_id) for token_id in episode.column(sequence, "ids")]
                again = encoder.encode(encoder.decode(ids))
                places = places_of(sequence, starts)
                found.all += len(ids)
                found.sequences += 1
                for difference in find_differences(ids, again, encoder):
                    start, stop, again_start, again_stop = difference
                    found.tokens += stop - start
                    marks[places[start:stop]] = 1
                    if len(found.rows) >= MOST_ROWS:
                        found.cut = True
                        continue
                    found.rows.append(
                        {
                            "episode": number,
                            "sequence": at,
                            "position": start,
                            "cause": _cause(sequence, start, stop),
                            "recorded": _named(ids[start:stop], encoder),
                            "again": _named(again[again_start:again_stop], encoder),
                        }
                    )
            if marks.any():
                found.marks[number] = marks
    return found


def _cause(sequence: SequenceRecord, start: int, stop: int) -> str:
    """Return where a stretch is, as in `strands_sglang.drift.CAUSES`."""
    for step in sequence.steps:
        if step.start <= start and stop <= step.sampled:
            return "template"
        if step.sampled <= start and stop <= step.stop:
            return "sampled"
    return "boundary"


def _named(ids: Sequence[int], encoder: Encoder) -> list[tuple[int, str]]:
    return [(token_id, encoder.decode([token_id])) for token_id in ids[:_LONGEST]]
