"""Credit: which sampled tokens an episode trains, with which advantage and weight.

An episode is one or more token sequences: forks, compactions and sub-agents open further ones. The advantage belongs to
the episode, or to a turn if turns have rewards, and all of the episode's rows carry it undivided. Each sampled token
is trained in exactly one row. docs/understand/credit.md has the mathematics.

- Forks of an episode share its first turns: they are trained once, and their values are in `trees`.
- Baselines are computed over episodes, never over rows.
- An episode without a reward leaves its group's baseline.
- An episode is trained whole or not at all. What is kept out is named in `TrainingRows.left_out`; its reward, if it
  has one, still counts in the baseline.
- Importance ratios are the trainer's, from the logprobs that are recorded here.
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import statistics
import uuid
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, compress, groupby
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .outcomes import MAY_CONTINUE, OUTCOMES, RewardRule, TerminationReason
from .reasons import Reason
from .trajectory.journal import Journal
from .trajectory.storage import TrajectoryFileError, pack, read_fields, reading, unpack, write_file
from .trajectory.tokens import Segment, TokenManager
from .trajectory.trajectory import Trajectory
from .trajectory.turn import Turn
from .trees import comparisons, sample_of

Baseline = Literal["mean", "leave_one_out"]
Normalizer = Literal["episode_mean", "token_mean", "constant"]

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as in slime and verl."""

LARGEST_REWARD = 1e18
"""Trainers compute in float32, which ends at 3.4e38: sums of larger rewards' squares would be infinite."""

FORMAT = "strands-sglang training rows"
VERSION = "3"
READABLE = ("1", "2", VERSION)


@dataclass(frozen=True, eq=False)
class Episode:
    """One episode to train on.

    Attributes:
        trajectory: The recorded model calls.
        reward: Reward of the whole episode; None if it has none. It counts as received at the last turn.
        group: The prompt that the episode's siblings share; any hashable value.
        id: Name of the episode, unique in a batch.
        turn_rewards: Rewards of single turns by `Turn.index`, in addition to `reward`.
        outcome: How the episode ended; None if unknown. Outcomes that say nothing about the policy, such as
            `infrastructure_error`, have no reward, whatever `reward` says.
        journal: Its journal, to be deleted once it is trained; None without one.
    """

    trajectory: Trajectory
    reward: float | None
    group: Hashable
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    outcome: TerminationReason | None = None
    journal: Journal | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Accept an outcome in the form that files have.

        Raises:
            TypeError: The group is not hashable, or the id is not a string.
            ValueError: No episode ends this way.
        """
        if not isinstance(self.id, str):  # a file would give it back as one, which names no episode
            raise TypeError(f"the id of an episode must be a string, not {self.id!r}: use str()")
        try:
            hash(self.group)
        except TypeError as error:
            raise TypeError(f"episode {self.id!r} has the group {self.group!r}; use a hashable value") from error
        if self.outcome is not None:
            object.__setattr__(self, "outcome", TerminationReason(self.outcome))


class RowsFileError(ValueError):
    """A file holds no training rows, is damaged or was changed, or has a version that this library does not know."""


class TurnSpan(NamedTuple):
    """What one turn adds to a row: its prompt tokens, then its sampled tokens.

    Attributes:
        turn: The `Turn.index` in the episode's trajectory.
        prompt_tokens: Number of prompt tokens that the turn adds.
        sampled_tokens: Number of its sampled tokens in this row.
        finish_reason: Why sampling ended: `"stop"`, `"length"` or `"abort"`; None if the turn sampled nothing here.
    """

    turn: int
    prompt_tokens: int
    sampled_tokens: int
    finish_reason: str | None


@dataclass(frozen=True, eq=False)
class TrainingRow:
    """One token sequence of an episode, ready for a trainer. All columns have shape `(T,)`.

    Attributes:
        episode: Id of the episode.
        group: Group of the episode.
        tokens: The sequence, with segments, sampling masks and images. If the row is read from a file, without sampling
            masks, images, and the logprobs of tokens that the row does not train; the trajectory's file has them.
        token_ids: Ids in the vocabulary.
        loss_mask: 1 for the sampled tokens that this row trains, else 0.
        logprobs: Logprobs under the weights that sampled, at the sampling temperature; 0.0 where the mask is 0.
        versions: Version of the weights that sampled each token; None where the mask is 0, or if unknown.
        advantages: Advantage of each token; 0.0 where the mask is 0.
        prompt_length: Number of tokens of the opening prompt, P.
        trained: Number of trained tokens in this row, n_s; at least 1.
        episode_trained: Number of trained tokens in all rows of the episode, T_e.
        episode_version: Lowest version among the trained tokens of the whole episode; None unless all are integers.
            `"default"`, SGLang's name for the weights that it started with, is 0.
        spans: The turns of the row, in order; their tokens are all tokens of the row.
        trainer_logprobs: The trainer's own logprobs before its update; 0.0 where the mask is 0. None if unknown.
        loss_weight: The row's weight w_s in the trainer's loss; None if unknown.
    """

    episode: str
    group: Hashable
    tokens: TokenManager = field(repr=False)
    token_ids: list[int] = field(repr=False)
    loss_mask: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)
    versions: list[str | None] = field(repr=False)
    advantages: list[float] = field(repr=False)
    prompt_length: int
    trained: int
    episode_trained: int
    episode_version: int | None
    spans: list[TurnSpan] = field(repr=False)
    trainer_logprobs: list[float] | None = field(default=None, repr=False)
    loss_weight: float | None = None

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def advantage(self) -> float:
        """The one advantage of all trained tokens, for trainers that take a number per row.

        Raises:
            ValueError: The turns of the row have different advantages.
        """
        values = set(compress(self.advantages, self.loss_mask))
        if len(values) > 1:
            raise ValueError(
                f"the turns of episode {self.episode} have different advantages ({min(values):.3g} to "
                f"{max(values):.3g}), but this trainer takes one per row: use one with an advantage per token, or "
                "leave out turn_rewards"
            )
        return values.pop()


class Loss(NamedTuple):
    """The policy loss that a trainer had on a batch before its update, so that a replay can compute it again.

    It is that of all rows as one micro-batch, without the terms for KL and entropy.

    Attributes:
        name: The trainer and its loss, a key of `losses()`.
        value: The loss.
        clip: How far ratios may be below and above 1 before they are clipped.
        from_sampler: Whether ratios compare the trainer with the sampler, as in TRL. By default verl, SkyRL and slime
            compare the trainer with itself, so that all ratios before the update are 1.
    """

    name: str
    value: float
    clip: tuple[float, float] = (0.2, 0.2)
    from_sampler: bool = True


@dataclass(eq=False, repr=False)
class TrainingRows(Sequence[TrainingRow]):
    """The rows of a batch, those of one episode together; `training_rows` makes it.

    Attributes:
        rows: The rows, which the object also holds itself, as a sequence.
        left_out: Why episodes are kept out of the update, by id.
        flat_groups: Groups in which no advantage differs from 0, so that they train nothing.
        advantages: Advantages by turn of every episode that is trained, by id and `Turn.index`.
        rewards: Rewards of all episodes that have one, those of their turns included, by id.
        settings: The arguments of `training_rows` besides the episodes; empty if the rows are of several batches.
        episodes: What is known of every episode of the batch besides its trajectory, by id: `group`, `reward`,
            `turn_rewards` and `outcome`.
        loss: The trainer's loss on them; None if it is unknown, or if the rows are of several batches.
        is_changed: Whether they were read from a file that was changed since; see `load`.
        journals: The journals of the batch's episodes; not saved.
    """

    rows: Sequence[TrainingRow]
    left_out: dict[str, Reason]
    flat_groups: list[Hashable]
    advantages: dict[str, Mapping[int, float]]
    rewards: dict[str, float]
    settings: dict[str, Any] = field(default_factory=dict)
    episodes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    loss: Loss | None = None
    is_changed: bool = False
    journals: list[Journal] = field(default_factory=list)

    @classmethod
    def joined(cls, batches: Iterable[TrainingRows]) -> TrainingRows:
        """Return the rows of several batches as one.

        Raises:
            ValueError: Two batches have an episode of one id: their rows would count as one episode.
        """
        parts = list(batches)
        names = Counter(chain.from_iterable({**part.advantages, **part.left_out} for part in parts))
        for name, count in names.items():
            if count > 1:
                raise ValueError(f"{count} batches have an episode with the id {name!r}; each needs its own")
        joined = cls([*chain.from_iterable(parts)], {}, [], {}, {}, loss=parts[0].loss if len(parts) == 1 else None)
        for part in parts:
            joined.left_out |= part.left_out
            joined.flat_groups += part.flat_groups
            joined.advantages |= part.advantages
            joined.rewards |= part.rewards
            joined.episodes |= part.episodes
            joined.is_changed |= part.is_changed
            joined.journals += part.journals
        if parts and all(part.settings == parts[0].settings for part in parts):
            joined.settings = parts[0].settings
        return joined

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        """Return the row at an index, or a list of rows for a slice."""
        return self.rows[index]

    def __iter__(self) -> Iterator[TrainingRow]:
        """Iterate over the rows in order."""
        return iter(self.rows)

    def acknowledge(self) -> None:
        """Delete the journals of the batch's episodes, but not of those that can be resumed.

        Call it once the step that trained them is done.
        """
        for journal in self.journals:
            journal.acknowledge()

    def save(self, path: str | PathLike[str]) -> None:
        """Write the rows to a safetensors file, atomically: a full disk or a kill leaves the previous content.

        Layout (format version 3), per token of all rows end to end: `token_ids` (int32), `loss_mask` (uint8),
        `logprobs` and `advantages` (float64), `versions` (int32, a position in the description's `versions`; -1 for
        None) and, if all rows have them, `trainer_logprobs` (float64). Row n holds the tokens from `row_offsets[n]` to
        `row_offsets[n + 1]` (int64, one more than rows). `loss_weights` (float64) has one value per row, if all rows
        have one.

        `description` (uint8) is JSON: `rows` with `episode`, `group`, `prompt_length`, `episode_trained`,
        `episode_version` and `spans` (lists of turn, prompt tokens, sampled tokens, finish reason), and `left_out`,
        `flat_groups`, `rewards`, `advantages`, `settings`, `episodes` and, if known, `loss` as in this class. Tuples
        are lists. The file's metadata holds `format`, `version` and, as a trajectory's, `checksum`. Version 2 has no
        checksum, and in version 1 `left_out` holds sentences.

        Args:
            path: Path of the file.

        Raises:
            TypeError: A group is not made of strings, numbers, booleans, None and tuples of them.
            ValueError: A column of a row has not one value for each token, or `loss` is not made of numbers.
            OSError: The file cannot be written.
            RowsFileError: They were read from a file that was changed: a new checksum would make it valid.
        """
        import numpy as np

        if self.is_changed:
            raise RowsFileError(
                "the rows were read from a file that was changed, so they cannot be saved: keep the file"
            )
        for number, row in enumerate(self.rows):
            for name in _COLUMNS:
                column = getattr(row, name)
                if column is not None and len(column) != len(row):
                    raise ValueError(
                        f"row {number}, of episode {row.episode}, has {len(row)} tokens, but {len(column)} {name}"
                    )
        groups = [*(row.group for row in self.rows), *(facts["group"] for facts in self.episodes.values())]
        for group in (*groups, *self.flat_groups):
            _check_group(group)
        used = dict.fromkeys(chain([None], *(row.versions for row in self.rows)))
        numbers = {name: number for number, name in enumerate(used, -1)}
        columns: dict[str, tuple[str, list[Sequence[Any]]]] = {
            "token_ids": ("<i4", [row.token_ids for row in self.rows]),
            "loss_mask": ("|u1", [row.loss_mask for row in self.rows]),
            "logprobs": ("<f8", [row.logprobs for row in self.rows]),
            "versions": ("<i4", [[numbers[name] for name in row.versions] for row in self.rows]),
            "advantages": ("<f8", [row.advantages for row in self.rows]),
        }
        known = [row.trainer_logprobs for row in self.rows if row.trainer_logprobs is not None]
        if known and len(known) == len(self):
            columns["trainer_logprobs"] = ("<f8", [*known])
        tensors: dict[str, Any] = {
            name: np.fromiter(chain.from_iterable(parts), kind) for name, (kind, parts) in columns.items()
        }
        tensors["row_offsets"] = np.asarray([0, *accumulate(map(len, self.rows))], "<i8")
        weights = [row.loss_weight for row in self.rows]
        if weights and None not in weights:
            tensors["loss_weights"] = np.asarray(weights, "<f8")
        description = {
            "rows": [{name: getattr(row, name) for name in _ROW_FACTS} for row in self.rows],
            "versions": [*used][1:],
            "left_out": self.left_out,
            "flat_groups": self.flat_groups,
            "rewards": self.rewards,
            "advantages": self.advantages,
            "settings": self.settings,
            "episodes": self.episodes,
        }
        if self.loss is not None:
            description["loss"] = _checked(self.loss)
        tensors["description"] = np.frombuffer(
            json.dumps(description, default=lambda number: number.item()).encode(), "uint8"
        )
        write_file(path, pack(tensors, FORMAT, VERSION))

    @classmethod
    def load(cls, path: str | PathLike[str], *, changed_too: bool = False) -> TrainingRows:
        """Read the rows from a file of `save`. Every number is bit-equal to the one saved.

        Args:
            path: Path of the file.
            changed_too: Whether to read a file that was changed since. `is_changed` then tells. For looking at it; do
                not train on it.

        Raises:
            RowsFileError: The file holds no training rows, is damaged or was changed, or has an unknown version.
            OSError: The file cannot be read.
        """
        content = Path(path).read_bytes()
        try:
            with reading(str(path)):
                tensors, _, is_changed = unpack(content, FORMAT, READABLE, changed_too=changed_too)
                known = json.loads(tensors["description"].tobytes())
                rows = _read_rows(tensors, known.pop("rows"), known.pop("versions"))
                for facts in known.get("episodes", {}).values():  # earlier files lack them
                    facts |= {**read_fields(Episode, facts), "outcome": facts["outcome"]}
                return cls(rows, is_changed=is_changed, **read_fields(cls, known))
        except TrajectoryFileError as error:
            raise RowsFileError(str(error)) from error.__cause__

    @property
    def counts(self) -> Counter[str]:
        """Number of episodes kept out of the update, by reason in words."""
        return Counter(map(str, self.left_out.values()))

    def weights(
        self,
        normalizer: Normalizer,
        loss: str,
        *,
        constant: float | None = None,
        fillers: int = 0,
        micro_batches: Sequence[Sequence[int]] | None = None,
        max_length: int | None = None,
    ) -> list[float]:
        """Return the weight w_s of each row that makes a trainer's loss the exact one.

        Multiply each row's advantages by its weight. All rows must reach one optimizer step. The weights are positive,
        so the result is exact under clipping, too.

        Args:
            normalizer: The loss wanted, over the G episodes of the batch: `"episode_mean"` (each episode's sum over its
                T_e tokens), `"token_mean"` (the sum over all N tokens), or `"constant"` (each episode's sum over
                `constant`, as Dr.GRPO).
            loss: The trainer and its loss, a key of `losses()`.
            constant: The divisor L of `"constant"`.
            fillers: Rows without trained tokens that the trainer receives in addition.
            micro_batches: Indices of the rows in each micro-batch, for losses that normalize each on its own.
            max_length: The fixed length that the loss divides by, for those that do.

        Returns:
            Weights, shape `(rows,)`.

        Raises:
            ValueError: An argument that the normalizer or loss needs is missing, or the loss is unknown.
        """
        if loss not in losses():
            raise ValueError(f"loss {loss!r} is not one of {', '.join(losses())}")
        if normalizer == "constant" and not (constant is not None and constant > 0):
            raise ValueError("normalizer='constant' needs constant=, a number above 0")
        reduction = losses()[loss]
        if reduction is per_micro_batch and micro_batches is None:
            raise ValueError(f"loss {loss!r} normalizes each micro-batch: pass micro_batches=, the rows of each")
        if reduction is per_length_limit and not (max_length is not None and max_length > 0):
            raise ValueError(f"loss {loss!r} divides by a fixed length: pass max_length=")
        placed = sorted(chain.from_iterable(micro_batches or ()))
        if micro_batches is not None and placed != list(range(len(self))):
            raise ValueError(f"micro_batches must hold each of the {len(self)} rows once")
        batch = Batch(self.rows, fillers, micro_batches, max_length, len(self.left_out))
        wanted: dict[Normalizer, Callable[[TrainingRow], float]] = {
            "episode_mean": lambda row: 1 / (batch.episodes * row.episode_trained),
            "token_mean": lambda row: 1 / batch.trained,
            "constant": lambda row: 1 / (batch.episodes * (constant or 1.0)),
        }
        if normalizer not in wanted:
            raise ValueError(f"normalizer {normalizer!r} is not one of {', '.join(wanted)}")
        return [wanted[normalizer](row) / reduction(batch, index) for index, row in enumerate(self.rows)]


_COLUMNS = ("loss_mask", "logprobs", "versions", "advantages", "trainer_logprobs")
_ROW_FACTS = ("episode", "group", "prompt_length", "episode_trained", "episode_version", "spans")


def _checked(loss: Loss) -> Loss:
    """Return a loss as a file has it.

    Raises:
        ValueError: It is not made of numbers.
    """
    try:
        low, high = loss.clip
        return Loss(loss.name, float(loss.value), (float(low), float(high)), bool(loss.from_sampler))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{loss!r:.200} cannot be saved: its value is a number, and its clip are two") from error


def _check_group(group: Any) -> None:
    if isinstance(group, tuple):
        for part in group:
            _check_group(part)
        return
    value = group.item() if hasattr(group, "item") else group  # NumPy's numbers are saved as Python's
    if not (value is None or isinstance(value, str | int | float)):
        raise TypeError(f"the group {group!r} cannot be saved: use strings, numbers, or tuples of them")


def _read_rows(
    tensors: Mapping[str, Any], described: Sequence[Mapping[str, Any]], versions: Sequence[str]
) -> list[TrainingRow]:
    """Return the rows of a file; any error means that its parts do not fit together."""
    offsets = tensors["row_offsets"].tolist()
    total = len(tensors["token_ids"])
    if offsets[0] != 0 or offsets[-1] != total or offsets != sorted(offsets):
        raise ValueError("row_offsets do not cut the tokens into rows")
    for name in _COLUMNS:
        if name in tensors and len(tensors[name]) != total:
            raise ValueError(f"{total} token ids came with {len(tensors[name])} {name}")
    if not set(tensors["loss_mask"].tolist()) <= {0, 1} or min(tensors["versions"].tolist(), default=0) < -1:
        raise ValueError("a loss mask is not 0 or 1, or a version is below -1")
    names = [*read_fields(TrainingRow, {"versions": versions})["versions"], None]  # position -1 is None
    weights = tensors["loss_weights"].tolist() if "loss_weights" in tensors else [None] * (len(offsets) - 1)
    rows: list[TrainingRow] = []
    for facts, weight, start, end in zip(described, weights, offsets[:-1], offsets[1:], strict=True):
        columns = {name: tensors[name][start:end].tolist() for name in ("token_ids", *_COLUMNS) if name in tensors}
        known = read_fields(TrainingRow, facts, f"row {len(rows)}: ")
        tokens = _sequence(known["spans"], columns["token_ids"], columns["loss_mask"], columns["logprobs"])
        columns["versions"] = [names[number] for number in columns["versions"]]
        rows.append(
            TrainingRow(**known, **columns, tokens=tokens, trained=sum(columns["loss_mask"]), loss_weight=weight)
        )
    return rows


def _sequence(
    spans: Sequence[TurnSpan], token_ids: Sequence[int], loss_mask: Sequence[int], logprobs: Sequence[float]
) -> TokenManager:
    tokens = TokenManager()
    at = 0
    for span in spans:
        tokens.add_prompt(token_ids[at : at + span.prompt_tokens])
        at += span.prompt_tokens
        # Another row may train the first of a turn's sampled tokens.
        for mask, same in groupby(loss_mask[at : at + span.sampled_tokens]):
            start, at = at, at + len(list(same))
            known = logprobs[start:at] if mask else None
            answer = Segment(
                token_ids[start:at], known, is_response=True, loss_mask=mask, finish_reason=span.finish_reason
            )
            tokens.add(answer)
    if at != len(token_ids):
        raise ValueError(f"the turns of a row have {at} tokens, not {len(token_ids)}")
    return tokens


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows that a trainer reduces to one loss.

    Attributes:
        rows: The rows.
        fillers: Rows without trained tokens in addition.
        left_out: Episodes without rows that a trainer may count nevertheless.
        micro_batches: Indices of the rows in each micro-batch; None if the loss does not depend on them.
        max_length: Length that the loss divides by; None if it does not.
    """

    rows: Sequence[TrainingRow]
    fillers: int = 0
    micro_batches: Sequence[Sequence[int]] | None = None
    max_length: int | None = None
    left_out: int = 0

    @cached_property
    def episodes(self) -> int:
        """Number of episodes, G."""
        return len({row.episode for row in self.rows})

    @cached_property
    def trained(self) -> int:
        """Number of trained tokens, N."""
        return sum(row.trained for row in self.rows)

    @cached_property
    def micro_trained(self) -> Mapping[int, int]:
        """Number of trained tokens in the micro-batch of each row, by the row's index."""
        counts: dict[int, int] = {}
        for members in self.micro_batches or ():
            counts.update(dict.fromkeys(members, sum(self.rows[index].trained for index in members)))
        return counts

    @property
    def size(self) -> int:
        """Number of rows that the trainer receives, B."""
        return len(self.rows) + self.fillers


Reduction = Callable[[Batch, int], float]
"""The weight that a loss gives to each trained token of a row, from the batch and the row's index."""


PolicyLoss = Callable[[TrainingRows, Loss], float]
"""Computes a trainer's loss again, from rows with its logprobs."""


def whole(batch: Batch, index: int) -> float:
    """Sum over all tokens."""
    return 1.0


def per_batch(batch: Batch, index: int) -> float:
    """Mean over the trained tokens of the batch."""
    return 1 / batch.trained


def per_micro_batch(batch: Batch, index: int) -> float:
    """Mean over the trained tokens of a micro-batch, then over the micro-batches."""
    return 1 / (len(batch.micro_batches or ()) * batch.micro_trained[index])


def per_row(batch: Batch, index: int) -> float:
    """Mean over the trained tokens of a row, then over the rows."""
    return 1 / (batch.size * batch.rows[index].trained)


def per_length_limit(batch: Batch, index: int) -> float:
    """Sum over the trained tokens of a row by a fixed length, then mean over the rows."""
    return 1 / (batch.size * (batch.max_length or 1))


def losses() -> Mapping[str, Reduction]:
    """Return the weight that each supported loss gives to a trained token, by the trainer's name of the loss.

    Each adapter lists those of its trainer as `LOSSES`.
    """
    return _of_adapters("LOSSES")


def policy_loss(rows: TrainingRows) -> float:
    """Compute `rows.loss` again, by the trainer's own code; slime's by its formula.

    Each adapter lists the functions of its trainer as `POLICY_LOSSES`.

    Raises:
        ValueError: It is not known how the loss is computed, or the rows lack what it is computed from.
        ImportError: The trainer is not installed.
    """
    if rows.loss is None or not len(rows):
        raise ValueError("there is no loss")
    for name in ("trainer_logprobs", "loss_weight"):
        if any(getattr(row, name) is None for row in rows):
            raise ValueError(f"a row has no {name}")
    function = _of_adapters("POLICY_LOSSES").get(rows.loss.name)
    if function is None:
        raise ValueError(f"no function computes the loss {rows.loss.name!r:.60}")
    return float(function(rows, rows.loss))


@lru_cache
def _of_adapters(name: str) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    package = importlib.import_module("strands_sglang.trainers")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        found.update(getattr(importlib.import_module(module.name), name, {}))
    return dict(sorted(found.items()))


def group_advantages(
    rewards: Sequence[float], *, baseline: Baseline | None = "mean", normalize_std: bool = False
) -> list[float]:
    """Return the advantages of the episodes of one group.

    Args:
        rewards: Rewards, shape `(G,)`, one per episode.
        baseline: What is subtracted: the mean of all rewards, the mean of the others (RLOO), or None for nothing.
        normalize_std: Whether to divide by the sample standard deviation (n - 1) of the rewards, plus 1e-6.

    Returns:
        Advantages, shape `(G,)`; all 0.0 for equal rewards, if there is a baseline.

    Raises:
        ValueError: A group of one has no baseline, `normalize_std` comes without one, or a reward is not finite or
            exceeds 1e18.
    """
    given, rewards = rewards, [as_number(reward) for reward in rewards]
    count = len(rewards)
    if not all(abs(reward) <= LARGEST_REWARD for reward in rewards):
        raise ValueError(f"rewards must be finite, and at most {LARGEST_REWARD:g} in size: {list(given)!r:.200}")
    if baseline is None:
        if normalize_std:
            raise ValueError("normalize_std needs a baseline: equal rewards have no deviation to divide by")
        return rewards
    if baseline not in ("mean", "leave_one_out"):
        raise ValueError(f"baseline {baseline!r} is not 'mean', 'leave_one_out' or None")
    if count < 2:
        raise ValueError("a group of one episode has no baseline")
    if math.isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12):  # sums of equal rewards may differ
        return [0.0] * count
    mean = statistics.fmean(rewards)
    scale = count / (count - 1) if baseline == "leave_one_out" else 1.0
    if normalize_std:
        scale /= statistics.stdev(rewards) + STD_EPSILON
    return [scale * (reward - mean) for reward in rewards]


def training_rows(
    episodes: Iterable[Episode],
    *,
    baseline: Baseline | None = "mean",
    normalize_std: bool = False,
    discount: float = 1.0,
    max_tokens: int | None = None,
    version: int | None = None,
    max_staleness: int | None = None,
    skip_flat_groups: bool = False,
) -> TrainingRows:
    """Make the rows to train from the episodes of a batch.

    The advantage of a turn is its return, the discounted sum of all rewards from it on, minus the baseline: the returns
    of the group's episodes at their turn of the same number, in the order of calls. An episode with fewer turns counts
    there with its last one. Without `turn_rewards` and discount, that is the episode's reward minus the baseline.

    Among the episodes may be forks of others (`Environment.fork` of strands-env), and forks of forks. The turns that
    they share are trained in the first of them that is trained. A turn's return is then estimated by the forks after
    it, and compared with those of the forks before it; see [`comparisons`][strands_sglang.trees.comparisons].

    Args:
        episodes: All episodes of the batch, with whole groups; an episode comes before its forks.
        baseline: See `group_advantages`.
        normalize_std: See `group_advantages`.
        discount: Factor per turn of later rewards.
        max_tokens: Maximum length of a row in tokens, the trainer's budget.
        version: Version of the weights to be updated, with `max_staleness`.
        max_staleness: Largest `version` minus the version of any trained token.
        skip_flat_groups: Whether to keep out groups whose advantages are all 0.

    Returns:
        The rows, and what was kept out of them.

    Raises:
        ValueError: Two episodes share an id or train one trajectory, `turn_rewards` names a turn that is not part of
            the rollout, a version is not an integer although `max_staleness` is given, or `discount` is not from 0 to
            1.
    """
    if not 0 <= discount <= 1:
        raise ValueError(f"discount={discount!r} is not from 0 to 1")
    if (max_staleness is None) != (version is None):
        raise ValueError("max_staleness and version belong together: pass both or neither")
    settings: dict[str, Any] = {
        "baseline": baseline,
        "normalize_std": normalize_std,
        "discount": discount,
        "max_tokens": max_tokens,
        "version": version,
        "max_staleness": max_staleness,
        "skip_flat_groups": skip_flat_groups,
    }
    # Numbers of NumPy and PyTorch become Python's, which a file can hold.
    settings = {name: value.item() if hasattr(value, "item") else value for name, value in settings.items()}
    discount, max_tokens = settings["discount"], settings["max_tokens"]
    version, max_staleness = settings["version"], settings["max_staleness"]
    batch = list(episodes)
    for name, count in Counter(episode.id for episode in batch).items():
        if count > 1:
            raise ValueError(f"{count} episodes have the id {name!r}; each needs its own")
    left_out: dict[str, Reason] = {}
    returns: dict[str, list[float]] = {}
    groups: dict[Hashable, list[Episode]] = {}
    sequences = {episode.id: episode.trajectory.branches() for episode in batch}
    turns = {episode.id: _turns(sequences[episode.id]) for episode in batch}
    for episode in batch:
        reason = _without_reward(episode)
        if reason is not None:
            left_out[episode.id] = reason
            continue
        returns[episode.id] = _returns(episode, turns[episode.id], discount)
        groups.setdefault(episode.group, []).append(episode)
    advantages: dict[str, dict[int, float]] = {}
    flat: list[Hashable] = []
    for group, members in groups.items():
        if baseline is not None and len(members) < 2:
            left_out[members[0].id] = Reason("only_scored")
            continue
        family = [episode for episode in batch if episode.group == group]
        compared = comparisons(
            [[*map(sample_of, turns[episode.id])] for episode in family],
            [returns.get(episode.id, []) for episode in family],
            discount,
        )
        advantages_of = partial(group_advantages, baseline=baseline, normalize_std=normalize_std)
        columns = [returns[member.id] for member in members]
        by_turn = [
            advantages_of([column[min(number, len(column) - 1)] for column in columns])
            for number in range(0 if compared else max(map(len, columns)))
        ]
        turn_advantages = [[advantages_of(values)[0] for values in turn_values] for turn_values in compared]
        for member, values in zip(members, turn_advantages or zip(*by_turn, strict=True), strict=True):
            advantages[member.id] = {turn.index: value for turn, value in zip(turns[member.id], values, strict=False)}
        if not any(any(advantages[member.id].values()) for member in members):
            flat.append(group)
            if skip_flat_groups:
                left_out.update((member.id, Reason("flat_group")) for member in members)
    rows: list[TrainingRow] = []
    owners: dict[int, str] = {}
    trained: dict[Hashable, int] = {}  # sampled tokens of each turn that the rows train
    for episode in batch:
        if episode.id in left_out:
            continue
        if id(episode.trajectory) in owners:
            raise ValueError(
                f"episodes {owners[id(episode.trajectory)]!r} and {episode.id!r} have one trajectory, so each of its "
                "tokens would be trained twice: run each episode in `with model.episode()`, or call `model.reset()` "
                "before it"
            )
        samples = {turn.index: sample_of(turn) for turn in episode.trajectory.turns}
        shared = {index: trained[sample] for index, sample in samples.items() if sample in trained}
        own_sequences = episode.trajectory.branches(trained=shared) if shared else sequences[episode.id]
        own_rows = _rows(episode, own_sequences, advantages[episode.id])
        reason = _unfit(own_rows, max_tokens, version, max_staleness)
        if reason is not None:
            left_out[episode.id] = reason
            continue
        rows.extend(own_rows)
        owners[id(episode.trajectory)] = episode.id
        for leaf, _ in own_sequences:
            for turn, kept in leaf.steps():
                sample = samples[turn.index]
                trained[sample] = max(kept, trained.get(sample, 0))
    return TrainingRows(
        rows,
        left_out,
        flat,
        {name: values for name, values in advantages.items() if name not in left_out},
        {episode.id: math.fsum(_rewards(episode)) for episode in batch if episode.id in returns},
        settings=settings,
        episodes={
            episode.id: {
                "group": episode.group,
                "reward": None if episode.reward is None else as_number(episode.reward),
                "turn_rewards": {int(turn): as_number(reward) for turn, reward in episode.turn_rewards.items()},
                "outcome": None if episode.outcome is None else episode.outcome.value,
            }
            for episode in batch
        },
        journals=[
            episode.journal for episode in batch if episode.journal is not None and episode.outcome not in MAY_CONTINUE
        ],
    )


def _turns(sequences: Iterable[tuple[Turn, TokenManager]]) -> list[Turn]:
    """Return the turns of the rollout, in the order of calls, without those of helpers."""
    steps = chain.from_iterable(leaf.steps() for leaf, _ in sequences)
    known = {turn.index: turn for turn, _ in steps if not turn.is_auxiliary}
    return [known[index] for index in sorted(known)]


def _without_reward(episode: Episode) -> Reason | None:
    """Return why an episode has no reward; None if it has one."""
    if episode.outcome is not None and OUTCOMES[episode.outcome].reward is RewardRule.NONE:
        return Reason("outcome", detail=(episode.outcome.value,))
    if episode.reward is None:
        return Reason("only_turn_rewards" if episode.turn_rewards else "no_reward")
    if None in map(_number, (episode.reward, *episode.turn_rewards.values())):
        return Reason("reward_not_a_number")
    rewards = _rewards(episode)
    if not all(map(math.isfinite, rewards)):
        return Reason("reward_not_finite")
    if sum(map(abs, rewards)) > LARGEST_REWARD:
        return Reason("rewards_too_large", detail=(f"{LARGEST_REWARD:g}",))
    return None


def _rewards(episode: Episode) -> list[float]:
    """Return the rewards of an episode and its turns as plain floats."""
    return [*map(as_number, (episode.reward, *episode.turn_rewards.values()))]


def _returns(episode: Episode, turns: Sequence[Turn], discount: float) -> list[float]:
    """Return the discounted sum of rewards from each turn on, at least one."""
    known = {turn.index for turn in turns}
    for name in episode.turn_rewards:
        if name not in known:
            raise ValueError(
                f"turn_rewards of episode {episode.id} names turn {name!r}, which is not part of the rollout: it has "
                "no answer, was discarded, or is auxiliary"
            )
    total, later = 0.0, as_number(episode.reward)
    returns: list[float] = []
    for turn in reversed(turns):
        total = as_number(episode.turn_rewards.get(turn.index, 0.0)) + later
        returns.append(total)
        later = discount * total
    return returns[::-1] or [later]


def _rows(
    episode: Episode, sequences: Iterable[tuple[Turn, TokenManager]], advantages: Mapping[int, float]
) -> list[TrainingRow]:
    """Return the rows of an episode that train a token, in the order of its sequences."""
    made = [row_of(leaf, tokens, advantages) for leaf, tokens in sequences]
    rows = [row for row in made if row.trained]
    used = chain.from_iterable(compress(row.versions, row.loss_mask) for row in rows)
    numbers = set(map(version_number, used))
    oldest = None if None in numbers else min((number for number in numbers if number is not None), default=None)
    known: dict[str, Any] = {
        "episode": episode.id,
        "group": episode.group,
        "episode_trained": sum(row.trained for row in rows),
        "episode_version": oldest,
    }
    return [replace(row, **known) for row in rows]


def row_of(leaf: Turn, tokens: TokenManager, advantages: Mapping[int, float] | None = None) -> TrainingRow:
    """Return the row of one sequence by itself: nothing in it is about its episode.

    Args:
        leaf: The last turn of the sequence.
        tokens: The tokens of the sequence.
        advantages: Advantages by `Turn.index`; 0.0 for others, such as a helper's.
    """
    mask = tokens.loss_mask
    column: list[float] = []
    spans = []
    for turn, kept in leaf.steps():
        column += [0.0] * len(turn.prompt_ids) + [(advantages or {}).get(turn.index, 0.0)] * kept
        ended = turn.generation.finish_type if turn.generation is not None and kept else None
        spans.append(TurnSpan(turn.index, len(turn.prompt_ids), kept, ended))
    logprobs = [math.nan if value is None else value for value in tokens.logprobs]
    return TrainingRow(
        episode="",
        group=None,
        tokens=tokens,
        token_ids=tokens.token_ids,
        loss_mask=mask,
        logprobs=[value if is_trained else 0.0 for value, is_trained in zip(logprobs, mask, strict=True)],
        versions=[name if is_trained else None for name, is_trained in zip(tokens.policy_versions, mask, strict=True)],
        advantages=[value if is_trained else 0.0 for value, is_trained in zip(column, mask, strict=True)],
        prompt_length=tokens.initial_prompt_length,
        trained=sum(mask),
        episode_trained=sum(mask),
        episode_version=None,
        spans=spans,
    )


def _unfit(
    rows: Sequence[TrainingRow], max_tokens: int | None, version: int | None, max_staleness: int | None
) -> Reason | None:
    """Return why an episode cannot be trained; None if it can."""
    if not rows:
        return Reason("no_token")
    values = list(chain.from_iterable(compress(row.logprobs, row.loss_mask) for row in rows))
    if not all(map(math.isfinite, values)):
        return Reason("no_logprob" if any(map(math.isnan, values)) else "logprob_not_finite")
    longest = max(map(len, rows))
    if max_tokens is not None and longest > max_tokens:
        return Reason("too_long", detail=(str(max_tokens),))
    if version is not None and max_staleness is not None:
        oldest = rows[0].episode_version
        if oldest is None:
            used = chain.from_iterable(compress(row.versions, row.loss_mask) for row in rows)
            names = {"none" if name is None else repr(name) for name in used if version_number(name) is None}
            raise ValueError(
                f"max_staleness needs integers as weight versions, but tokens of episode {rows[0].episode} have "
                f"{', '.join(sorted(names))}"
            )
        if version - oldest > max_staleness:
            return Reason("too_old", detail=(str(max_staleness),))
    return None


def as_number(reward: Any) -> float:
    """Return a reward, perhaps a number of NumPy or PyTorch, as a plain float; NaN if it is not a number."""
    number = _number(reward)
    return math.nan if number is None else number


def _number(reward: Any) -> float | None:
    try:
        value = reward.item() if hasattr(reward, "item") else reward  # also of an array of one number
        return float(value) if hasattr(value, "__float__") else None  # text is not a number, whatever it says
    except (TypeError, ValueError, RuntimeError):  # the last one is PyTorch's, for a tensor of several numbers
        return None
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def version_number(version: str | None) -> int | None:
    """Return a version of the weights as a number; None if it is none."""
    if version == "default":  # SGLang's name for the weights that it started with, before any push
        return 0
    try:
        return None if version is None else int(version)
    except ValueError:
        return None
