"""Where tokens are: an episode's store holds each token once, turn after turn; sequences are paths through it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..inspection.records import Episode, SequenceRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray


def starts_of(episode: Episode) -> tuple[list[tuple[int, int, int]], int]:
    """Return where each turn's prompt and answer begin, and the answer ends, and the number of tokens."""
    starts, at = [], 0
    for turn in episode.turns:
        sampled = at + len(turn.prompt)
        stop = sampled + len(turn.sampled)
        starts.append((at, sampled, stop))
        at = stop
    return starts, at


def places_of(sequence: SequenceRecord, starts: Sequence[tuple[int, int, int]]) -> NDArray[Any]:
    """Return the position of each token of a sequence among the tokens of its episode."""
    import numpy as np

    parts = [np.zeros(0, np.int64)]
    for step in sequence.steps:
        prompt, sampled, _ = starts[step.turn]
        parts.append(np.arange(prompt, sampled))
        parts.append(np.arange(sampled, sampled + step.stop - step.sampled))
    return np.concatenate(parts)


def fitted(values: NDArray[Any], length: int, fill: float) -> NDArray[Any]:
    """Return a column with as many values as there are tokens: damaged files may hold others."""
    import numpy as np

    if len(values) == length:
        return values
    column = np.full(length, fill, np.float64)
    column[: min(length, len(values))] = values[:length]
    return column


def short_name(file: str) -> str:
    """Return what people call a file: the step for the rows of a step."""
    path = Path(file)
    return path.parent.name or path.name if path.name == "rows.safetensors" else path.name or file
