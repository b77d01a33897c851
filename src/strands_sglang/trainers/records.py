"""What adapters share: which tokens of an episode are trained, and how calls of other libraries' records become turns.

An imported call is a turn like any other, so its trajectory exports rows, is saved, and is shown. Turns are trained
whole or not at all; a call whose mask changes inside its answer becomes one turn for each run of equal mask.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, groupby
from typing import TYPE_CHECKING, Any, TypeVar

from ..credit import Episode, Loss, TrainingRow, TrainingRows, training_rows, version_number
from ..exceptions import PortableError
from ..protocol.generation import FINISH_TYPES, Generation, VersionSpan, are_in_order, clip_spans
from ..reasons import Reason
from ..trajectory.trajectory import Trajectory
from ..trajectory.turn import Turn, TurnStatus

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RecordError(PortableError, ValueError):
    """What a record of another library says cannot be.

    Attributes:
        kind: The doctor's kind of finding that it is.
    """

    def __init__(self, message: str, kind: str) -> None:
        """Store the kind with the message."""
        super().__init__(message)
        self.kind = kind


async def run_together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Run episodes at once; the first exception cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def log_left_out(rows: TrainingRows) -> None:
    """Log which episodes cannot be trained, and why."""
    for name, reason in rows.left_out.items():
        logger.warning("episode=<%s> | left out of training: %s", name, reason)


def left_out_reason(episode: Episode, max_tokens: int | None, *, is_scored_later: bool = False) -> str | None:
    """Return why an episode cannot be trained, in words, and log it; None if it can."""
    scored = replace(episode, reward=0.0) if is_scored_later and episode.reward is None else episode
    rows = training_rows([scored], baseline=None, max_tokens=max_tokens)
    log_left_out(rows)
    return next(map(str, rows.left_out.values()), None)


def newest_version(episodes: Iterable[Episode]) -> int:
    """Return the highest version of the weights that sampled a token, as a number; 0 if none is a number."""
    turns = chain.from_iterable(episode.trajectory.turns for episode in episodes)
    generations = (turn.generation for turn in turns if turn.generation is not None)
    spans = chain.from_iterable(generation.weight_versions for generation in generations)
    return max((version_number(span.version) or 0 for span in spans), default=0)


def refuse_images(rows: Iterable[TrainingRow], what: str) -> None:
    """Check that rows are nothing but token ids: a trainer's logprobs would be others without the images.

    Raises:
        ValueError: A row has images.
    """
    for row in rows:
        if row.tokens.multimodal_train_inputs is not None:
            raise ValueError(f"episode {row.episode} has images, but {what} has token ids only: train it with slime")


def loss_columns(rows: TrainingRows, loss: Loss) -> list[torch.Tensor]:
    """Return what a trainer computes a loss from: the trained tokens of each row, padded with zeros.

    Returns:
        The old logprobs, the new ones, the advantages times the rows' weights, and the mask, each of shape `(rows, T)`.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    columns: list[list[torch.Tensor]] = [[], [], [], []]
    for row in rows:
        new = row.trainer_logprobs or []
        old = row.logprobs if loss.from_sampler else new
        weighted = [advantage * (row.loss_weight or 0.0) for advantage in row.advantages]
        parts: list[Sequence[float]] = [old, new, weighted, row.loss_mask]
        for column, values in zip(columns, parts, strict=True):
            column.append(torch.tensor([*compress(values, row.loss_mask)], dtype=torch.float64))
    return [pad_sequence(column, batch_first=True) for column in columns]


def check_settings(config: Any, settings: Mapping[str, tuple[Any, ...]], trainer: str) -> None:
    """Check a trainer's settings that change what a row of an episode counts.

    Args:
        config: The trainer's whole configuration. Settings that it lacks are not checked.
        settings: Their names, with the values that are right for several rows; the first is the usual one.
        trainer: The trainer's name.

    Raises:
        ValueError: A setting has another value.
    """
    for name, allowed in settings.items():
        value = config
        for part in name.split("."):
            value = getattr(value, part, None)
        if value is not None and value not in allowed:
            raise ValueError(
                f"{trainer}'s {name} is {value!r}, which counts the rows of an episode in another way: use "
                f"{allowed[0]!r}; see docs/guides/{trainer.lower()}.md"
            )


def trained_turns(trajectory: Trajectory) -> list[tuple[Turn, int]]:
    """Return the turns of all rows in the order of calls, each with the number of its leading trained tokens."""
    trained: dict[int, tuple[Turn, int]] = {}
    for leaf, tokens in trajectory.branches():
        mask, at = tokens.loss_mask, 0
        for turn, kept in leaf.steps():
            start = at + len(turn.prompt_ids)
            at = start + kept
            _, before = trained.get(turn.index, (turn, 0))
            trained[turn.index] = (turn, before + sum(mask[start:at]))
    return [trained[index] for index in sorted(trained)]


@dataclass(frozen=True)
class RecordedCall:
    """A model call in another library's record.

    Attributes:
        name: What errors and reasons call it.
        prompt_ids: Ids of the prompt tokens that it adds to its parent's sequence.
        output_ids: Sampled ids, shape `(T,)`.
        mask: Whether each sampled token is trained, shape `(T,)`.
        logprobs: Logprobs of the sampled ids, shape `(T,)`; NaN if unknown.
        versions: Spans of sampled tokens by version of the weights.
        finish_type: Why sampling ended. Other libraries' words, such as "tool_calls", count as "stop".
        agent: Id of the agent that asked.
        discarded: Whether the agent threw the answer away.
    """

    name: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    mask: Sequence[bool | int]
    logprobs: Sequence[float]
    versions: Sequence[VersionSpan] = ()
    finish_type: str = "stop"
    agent: str | None = None
    discarded: bool = False

    def check(self) -> None:
        """Check what a trajectory relies on.

        Raises:
            ValueError: The columns differ in length, a trained token has no finite logprob, or a value is of no use.
        """
        if min(*self.prompt_ids, *self.output_ids, 0, 0) < 0:
            raise ValueError(f"{self.name}: a token id is below 0")
        if not isinstance(self.finish_type, str) or not isinstance(self.agent, str | None):
            raise ValueError(
                f"{self.name}: the finish reason {self.finish_type!r} and the agent {self.agent!r} must be strings"
            )
        lengths = (len(self.output_ids), len(self.mask), len(self.logprobs))
        if len(set(lengths)) > 1:
            message = f"{self.name}: {lengths[0]} sampled ids with {lengths[1]} masks and {lengths[2]} logprobs"
            raise RecordError(message, "logprobs")
        for at, (mask, logprob) in enumerate(zip(self.mask, self.logprobs, strict=True)):
            if mask not in (0, 1):
                raise ValueError(f"{self.name}: the mask of sampled token {at} is {mask!r}, not 0 or 1")
            if mask and not math.isfinite(logprob):
                message = f"{self.name}: sampled token {at} is trained, but its logprob is {logprob}"
                raise RecordError(message, "logprobs")


def spans_in(spans: Any, count: int, name: str) -> list[VersionSpan]:
    """Return the versions of `count` tokens as spans.

    Args:
        spans: Lists of version, start and end; None for none.
        count: Number of tokens.
        name: What errors call the tokens.

    Raises:
        ValueError: They are not such lists.
    """
    read = []
    for span in spans or ():
        version, start, stop = span if isinstance(span, list | tuple) and len(span) == 3 else (None, -1, -1)
        if not (isinstance(start, int) and isinstance(stop, int) and 0 <= start <= stop <= count):
            raise ValueError(f"{name}: {span!r} is not a version with a range of {count} tokens")
        read.append(VersionSpan(str(version), start, stop))
    if not are_in_order(read, count):
        raise ValueError(f"{name}: the versions {spans!r} of its tokens overlap or are out of order")
    return read


def reward_in(value: Any, name: str) -> float | None:
    """Return a reward of a record; None if there is none.

    Raises:
        ValueError: It is not a number.
    """
    if value is None:
        return None
    if isinstance(value, float):
        return value  # one that is not finite is left out by `training_rows`
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**1023:
        raise ValueError(f"{name} is {value!r:.100}, not a number")
    return float(value)


def name_in(value: Any, name: str, kinds: Any = str | int | float | None) -> Any:
    """Return an id or a group of a record.

    Raises:
        ValueError: It has another type.
    """
    if not isinstance(value, kinds):
        raise ValueError(f"{name} is {value!r}, not {getattr(kinds, '__name__', kinds)}")
    return value


def add_call(
    turns: list[Turn], call: RecordedCall, place: tuple[Turn, int | None] | None, extended: str = ""
) -> list[Turn]:
    """Append the turns of a call.

    Args:
        turns: All turns so far.
        call: The call.
        place: The turn that it extends, with the number of that turn's sampled ids that it keeps, None for all; None if
            it opens a sequence.
        extended: What it extends, in words.

    Returns:
        Its own turns, one for each run of equal mask.

    Raises:
        ValueError: It opens a sequence without a prompt token, or see `RecordedCall.check`.
    """
    call.check()
    parent, kept = place or (None, None)
    if parent is None and not len(call.prompt_ids):
        raise ValueError(f"{call.name}: it opens a sequence, but has no prompt token")
    prompt_ids = array("i", call.prompt_ids)
    before = len(turns)
    why = Reason("opens") if parent is None else Reason("continues", detail=(extended,))
    for start, stop, is_trained in _runs(call.mask):
        spans = clip_spans(call.versions, start, stop)
        turn = Turn(
            index=len(turns),
            parent=parent,
            why=why,
            key=f"{call.name}:{start}".encode(),
            parts={},
            digests=(),
            roles=(),
            prompt_ids=prompt_ids,
            constrained=not is_trained and stop > start,
            agent=call.agent,
            status=TurnStatus.DISCARDED if call.discarded else TurnStatus.FINAL,
            generation=Generation(
                output_ids=array("i", call.output_ids[start:stop]),
                logprobs=array("d", call.logprobs[start:stop]),
                finish_type=call.finish_type if call.finish_type in FINISH_TYPES else "stop",
                weight_version=spans[-1].version if spans else None,
                weight_versions=spans,
            ),
            parent_kept=kept,
        )
        if parent is not None and parent.status is TurnStatus.FINAL:
            parent.status = TurnStatus.COMMITTED
        turns.append(turn)
        parent, kept, prompt_ids = turn, None, array("i")
        why = Reason("continues", detail=(f"{call.name} where its mask changes",))
    return turns[before:]


def place_in(turns: Sequence[Turn], kept: int | None) -> tuple[Turn, int | None]:
    """Return the turn of a call in which its first `kept` sampled ids end, and how many of its ids that keeps."""
    for turn in turns if kept is not None else ():
        assert kept is not None
        if kept <= len(turn.output_ids):
            return turn, (None if kept == len(turn.output_ids) else kept)
        kept -= len(turn.output_ids)
    return turns[-1], None


def _runs(mask: Sequence[bool | int]) -> Iterator[tuple[int, int, bool]]:
    """Yield start, end and value of each run of equal mask; one empty run for an empty mask."""
    at = 0
    for value, run in groupby(mask, key=bool):
        count = len(list(run))
        yield at, at + count, value
        at += count
    if not len(mask):
        yield 0, 0, False
