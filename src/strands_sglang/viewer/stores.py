"""Where tokens are: an episode's store holds each token once, turn after turn; sequences are paths through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..inspection.records import TokenSequence
from ..trajectory.turn import Turn

if TYPE_CHECKING:
    from numpy.typing import NDArray

Starts = Mapping[int, tuple[int, int, int]]
"""Where each turn's prompt and answer begin, and the answer ends, by `id` of the turn."""


def starts_of(turns: Sequence[Turn]) -> Starts:
    """Return where the tokens of turns are."""
    starts, at = {}, 0
    for turn in turns:
        sampled = at + len(turn.prompt_ids)
        stop = sampled + len(turn.output_ids)
        starts[id(turn)] = (at, sampled, stop)
        at = stop
    return starts


def places_of(sequence: TokenSequence, starts: Starts) -> NDArray[Any]:
    """Return the position of each token of a sequence among the tokens of its episode."""
    import numpy as np

    parts = [np.zeros(0, np.int64)]
    for step in sequence.steps:
        start, _, _ = starts[id(step.turn)]
        parts.append(np.arange(start, start + step.stop - step.start))
    return np.concatenate(parts)


def run_name(files: Sequence[str]) -> str:
    """Return what people call the run that files are of; the names of the files if they are of no one run."""
    names = list(dict.fromkeys(short_name(file) for file in files))
    folders = {_run_folder(Path(file)) for file in files}
    if len(folders) == 1 and (len(names) > 1 or Path(files[0]).suffix == ".jsonl"):
        return folders.pop().name
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _run_folder(file: Path) -> Path:
    """Return the folder of the run that a file is part of."""
    folder = file.absolute().parent
    if file.name == "rows.safetensors":
        folder = folder.parent
    return folder.parent if folder.name in ("steps", "trajectories") else folder


def short_name(file: str) -> str:
    """Return what people call a file: the step for the rows of a step."""
    path = Path(file)
    name = path.parent.name if path.name == "rows.safetensors" else ""
    return name or path.name or file
