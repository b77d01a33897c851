"""The files of an evaluation: complete records are appended, survive every end of the process, and are read again.

A *prompt* is a task; a *sample* is one episode of it. A sample's key is a digest of the task's content, the sample's
index and the configuration. Tasks with equal content are separate prompts, distinguished by their number of occurrence.

A sample is *finished* unless the infrastructure failed, or something failed before the model was called. An unfinished
sample says nothing about the policy: it is stored separately with its cause, and *dropped* from every metric until a
later run finishes it. A finished sample is *errored* if it should have a reward and has none: the reward function, a
judge, a tool or the environment failed, or the time was up. The answer may cause that, so the sample counts as wrong.

The files of `results.jsonl`, in the same folder:
- `results.jsonl`: one record per finished sample, appended as samples finish;
- `results.failures.jsonl`: one record per failure of an unfinished sample, with its cause;
- `results.run.json`: the benchmark, the configuration, the prompts and the number of samples;
- `results.trajectories/KEY.safetensors`: all model calls of a finished sample, with `keep_trajectories`;
- `results.journals/KEY.journal`: the episode of an unfinished sample, with `journal`;
- `results.status.json`: what the evaluation does now, while it runs;
- `results.lock`: held by the process that writes.

A file holds the results of one configuration, and each record describes its environment. Results of another one are
refused with the difference.

Guarantees of a file of records (`CheckpointFile`):
- `append` is done when its record is on disk (fsync). The event loop never waits for the disk: one thread writes, and
  all records that arrive while it is busy share one fsync.
- Written records are never changed. When the file is opened, only what a killed process left after the last complete
  record is removed, and a complete record without a newline gets one.
- One process writes at a time: the file has a lock, which ends with its process.
- A record that could not be written completely (a full disk) leaves no bytes, and everything before it is kept.
- A file of another kind is never modified.

Tasks and messages may contain any value (sets, bytes, NumPy numbers, half of a surrogate pair). A result that cannot be
written would be lost, so writing never refuses a value: values without a JSON form are written in the nearest one.
`digest` hashes the canonical form with sorted keys, so equal values have equal digests.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import logging
import math
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import orjson
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field

from strands_sglang import TerminationReason, Trajectory

from ..core.durable import may_continue
from ..core.types import Action, Observation, RewardResult, StepResult, TaskContext, TokenObservation

logger = logging.getLogger(__name__)

# --- samples and prompts ---


_NOT_THE_POLICY = frozenset(
    {
        TerminationReason.INFRASTRUCTURE_ERROR,
        TerminationReason.ABORTED,
        TerminationReason.CANCELLED,
        TerminationReason.INTERRUPTED,
    }
)

RECORD_START = b'{"key":"'
"""The start of every record, which distinguishes an incomplete record from a file of another kind."""


class EvalSample(BaseModel):
    """One episode of an evaluation.

    Attributes:
        key: Identifier among the samples of all configurations.
        prompt_id: Identifier of its prompt. Results are grouped by it.
        sample_index: Index among the samples of its prompt, from 0.
        action: The task.
        step_result: The episode, without its trajectory, and without tokens unless `keep_tokens` is set.
        seconds: Duration of the episode.
        ended_at: When it ended, in seconds since 1970; None in files of earlier releases.
        is_finished: Whether its outcome says something about the policy. If not, the sample is dropped from metrics and
            tried again by the next run.
        is_errored: Whether it is finished and should have a reward, but has none. It counts as a wrong answer.
        environment: Identity of its environment; None if it is unknown, as in old files.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    key: str = ""
    prompt_id: str
    sample_index: int = 0
    action: Action
    step_result: StepResult
    seconds: float = 0.0
    ended_at: float | None = None
    is_finished: bool = True
    is_errored: bool = False
    environment: dict[str, Any] | None = Field(default=None, repr=False)

    @property
    def name(self) -> str:
        """What pages and commands call the sample, such as `task-00 #0`."""
        return f"{self.prompt_id} #{self.sample_index}"

    @property
    def aborted(self) -> bool:
        """Whether the sample is dropped: the opposite of `is_finished`."""
        return not self.is_finished

    @property
    def reward(self) -> float | None:
        """The reward, or None if the sample has none."""
        return None if self.step_result.reward is None else self.step_result.reward.reward

    def to_record(self, config_digest: str) -> dict[str, Any]:
        """Convert the sample to JSON-like data with the key first, as in a results file.

        Args:
            config_digest: Digest of the configuration.
        """
        result = self.step_result
        observation: dict[str, Any] = {
            "messages": result.observation.messages,
            "metrics": result.observation.metrics,
        }
        if result.observation.tokens is not None:
            observation["tokens"] = result.observation.tokens.model_dump()
        return {
            "key": self.key,
            "config": config_digest,
            "prompt_id": self.prompt_id,
            "sample_index": self.sample_index,
            "reward": None if result.reward is None else result.reward.reward,
            "reward_info": None if result.reward is None else result.reward.info,
            "termination_reason": result.termination_reason.value,
            "error": result.error,
            "reward_error": result.reward_error,
            "reward_error_is_infrastructure": result.reward_error_is_infrastructure,
            "is_errored": self.is_errored,
            "seconds": self.seconds,
            "ended_at": self.ended_at,
            "final_response": result.observation.final_response,
            "environment": self.environment,
            "message": self.action.message,
            "task_context": self.action.task_context.model_dump(),
            "observation": observation,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], *, is_finished: bool = True) -> EvalSample:
        """Create a sample from a record.

        Args:
            record: Data as returned by `to_record`.
            is_finished: Whether the sample is finished. The record's file decides this.

        Raises:
            ValueError: The data are not a record of a sample.
        """
        try:
            observation = record["observation"]
            tokens = observation.get("tokens")
            reward = record["reward"]
            return cls(
                key=record["key"],
                prompt_id=record["prompt_id"],
                sample_index=record["sample_index"],
                seconds=record["seconds"],
                ended_at=record.get("ended_at"),  # old records lack this field and some others
                is_finished=is_finished,
                is_errored=bool(record.get("is_errored")),
                environment=record.get("environment"),
                action=Action(
                    message=record["message"], task_context=TaskContext.model_validate(record["task_context"])
                ),
                step_result=StepResult(
                    observation=Observation(
                        messages=observation["messages"],
                        metrics=observation["metrics"],
                        tokens=None if tokens is None else TokenObservation.model_validate(tokens),
                    ),
                    reward=None if reward is None else RewardResult(reward=reward, info=record["reward_info"] or {}),
                    termination_reason=TerminationReason(record["termination_reason"]),
                    error=record["error"],
                    reward_error=record.get("reward_error"),
                    reward_error_is_infrastructure=bool(record.get("reward_error_is_infrastructure")),
                ),
            )
        except KeyError as error:
            raise ValueError(f"not a record of a sample: {error} is missing") from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a record of a sample: {error!r}") from error


def with_finite_reward(result: StepResult) -> StepResult:
    """Replace a reward that is not finite by an error: files cannot store NaN, and resuming must not change results."""
    if result.reward is None or math.isfinite(result.reward.reward):
        return result
    reason = f"a reward must be a finite number, not {result.reward.reward}"
    return result.model_copy(update={"reward": None, "reward_error": reason, "error": result.error or reason})


def is_conclusive(result: StepResult) -> bool:
    """Whether an episode's outcome says something about the policy, so that the sample is finished."""
    if result.reward is not None:
        return True
    if result.termination_reason in _NOT_THE_POLICY or result.reward_error_is_infrastructure:
        return False
    metrics = result.observation.metrics
    # The agent may never have called its model, for example because `reset` failed or hung.
    was_called = metrics.get("model_calls") != 0
    if result.termination_reason is TerminationReason.AGENT_ERROR:
        return was_called and (metrics.get("sampled_tokens") != 0 or "sequences" not in metrics)
    return was_called or result.termination_reason is not TerminationReason.TIMEOUT


def is_error(result: StepResult, *, is_judged: bool) -> bool:
    """Whether a conclusive episode should have a reward and has none.

    Args:
        result: The episode.
        is_judged: Whether its environment has a reward function.
    """
    failed = result.reward_error is not None or result.termination_reason is TerminationReason.AGENT_ERROR
    return result.reward is None and (is_judged or failed)


Results = dict[str, list[EvalSample]]
"""All samples by prompt id, dropped ones included, in the order of the tasks and of the sample indices."""


class Prompt(BaseModel):
    """A task of an evaluation, with its id and the digest of its content."""

    model_config = ConfigDict(frozen=True)

    id: str
    digest: str
    action: Action = Field(repr=False)


class DuplicateTaskError(ValueError):
    """Two different tasks have the same id."""


def name_prompts(actions: Iterable[Action]) -> list[Prompt]:
    """Assign an id and a digest to every task.

    The id is `task_context.id`, or derived from the digest. A repeated task with equal content is a separate prompt,
    with `#2`, `#3`, ... appended to its id.

    Raises:
        DuplicateTaskError: Two different tasks have the same id.
    """
    prompts: list[Prompt] = []
    times: dict[str, int] = {}
    positions: dict[str, int] = {}
    for position, action in enumerate(actions):
        content = digest([action.message, action.task_context.model_dump()])
        times[content] = occurrence = times.get(content, 0) + 1
        prompt_id = f"task-{content[:12]}" if action.task_context.id is None else str(action.task_context.id)
        if occurrence > 1:
            prompt_id = f"{prompt_id}#{occurrence}"
        if prompt_id in positions:
            raise DuplicateTaskError(
                f"tasks {positions[prompt_id]} and {position} (from 0) are different but have the same id "
                f"{prompt_id!r}; results are stored by id, so give each task its own"
            )
        positions[prompt_id] = position
        prompts.append(
            Prompt(id=prompt_id, digest=content if occurrence == 1 else digest([content, occurrence]), action=action)
        )
    return prompts


# --- the files of an evaluation ---

FORMAT = "strands-env evaluation 1"


@dataclasses.dataclass(frozen=True)
class Run:
    """The plan of an evaluation: its configuration and its samples.

    Attributes:
        benchmark: Name of the benchmark.
        config: The configuration, JSON-like.
        n_samples_per_prompt: Number of samples of each prompt.
        prompts: Digests by prompt id, in order.
    """

    benchmark: str
    config: Mapping[str, Any]
    n_samples_per_prompt: int
    prompts: Mapping[str, str]

    @property
    def facts(self) -> dict[str, Any]:
        """The whole configuration, by name."""
        return {"benchmark": self.benchmark, **self.config}

    @property
    def config_digest(self) -> str:
        """Digest of the configuration."""
        return digest([self.benchmark, self.config])

    @functools.cached_property
    def sample_keys(self) -> dict[str, tuple[str, int]]:
        """Prompt id and sample index by sample key, in order."""
        config = self.config_digest
        keys = {}
        for prompt, content in self.prompts.items():
            for index in range(self.n_samples_per_prompt):
                keys[digest([content, index, config])] = (prompt, index)
        return keys


class StoredTokens(TokenObservation):
    """Tokens that stay on disk and are read on access.

    In memory a token takes 84 bytes, so a few thousand long episodes would fill a machine.
    """

    _place: RecordPlace

    def __getattr__(self, name: str) -> Any:
        """Read a field from disk."""
        if name in TokenObservation.model_fields:
            return getattr(_read_tokens(self._place), name)
        return super().__getattr__(name)  # type: ignore[misc]

    def __eq__(self, other: Any) -> bool:
        """Compare tokens by value, on disk or in memory."""
        return isinstance(other, TokenObservation) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]


@functools.lru_cache(maxsize=1)
def _read_tokens(place: RecordPlace) -> TokenObservation:
    return TokenObservation.model_validate(read_record(place)["observation"]["tokens"])


def _leave_tokens(sample: EvalSample, place: RecordPlace) -> None:
    """Replace a sample's tokens by a reference to disk."""
    if sample.step_result.observation.tokens is not None:
        sample.step_result.observation.tokens = tokens = StoredTokens.model_construct()
        tokens._place = place


class Storage:
    """The files of one evaluation, opened for writing."""

    def __init__(self, path: str | os.PathLike[str], run: Run) -> None:
        """Lock, open and repair the files, and read the finished samples.

        Args:
            path: Results file, or a folder with `results.jsonl`.
            run: Plan of the evaluation.

        Raises:
            CheckpointError: Another process is writing to the files, or they are damaged, or belong to another
                configuration, or are not files of an evaluation.
        """
        self.path = results_file(path)
        self._status_file = side_file(self.path, ".status.json")
        self._config_digest = run.config_digest
        self._run_file = run_file = side_file(self.path, ".run.json")
        with contextlib.ExitStack() as undo:
            self._lock = lock_file(side_file(self.path, ".lock"))
            undo.callback(self._lock.release)
            for left in side_file(self.path, ".trajectories").glob(".*.safetensors.*"):
                left.unlink()  # of a process that was killed while it wrote
            _, first = next(read_records(self.path), (None, None)) if self.path.exists() else (None, None)
            if first is not None and first.get("config") != self._config_digest:
                what = f": {_difference(read_run(self.path).facts, run.facts)}" if run_file.exists() else ""
                raise CheckpointError(
                    f"{self.path} has results of another configuration{what}; use another file for this one"
                )
            self._results = CheckpointFile(self.path)
            undo.callback(self._results.abandon)
            self._failures = CheckpointFile(side_file(self.path, ".failures.jsonl"))
            undo.callback(self._failures.abandon)
            self._earlier_run = run_file.read_bytes() if run_file.exists() else None
            replace_file(run_file, encode({"format": FORMAT, **dataclasses.asdict(run)}))
            samples = _samples(self.path, run)
            undo.pop_all()
        self.finished = {key: sample for key, sample in samples.items() if sample is not None}
        for key in self.finished:  # the process may have ended before `add` deleted it
            journal_file(self.path, key).unlink(missing_ok=True)
        if len(self.finished) < len(samples):
            logger.warning(
                "path=<%s>, records=<%d> | results of tasks or sample indices that are not in this run are ignored",
                self.path,
                len(samples) - len(self.finished),
            )

    def refuse_other_environment(self, key: str, identity: Mapping[str, Any]) -> None:
        """Check that a finished sample is from the environment that is now created for it.

        Args:
            key: Key of the sample.
            identity: Identity of the environment that is now created.

        Raises:
            CheckpointError: The sample is from another environment; says what differs.
        """
        known, new = flat(self.finished[key].environment or {}), flat(decode(encode(identity)))
        for first, second in ((known, new), (new, known)):
            if not any(name.startswith("served.") for name in first):  # the server does not report its weights
                for name in [name for name in second if name.startswith("served.")]:
                    del second[name]
        if known != new:
            if self._earlier_run is not None:  # the results are still those of its tasks
                replace_file(self._run_file, self._earlier_run)
            raise CheckpointError(
                f"{self.path} has results of another environment: {_difference(known, new)}; use another file for "
                "this one"
            )

    async def add(self, sample: EvalSample, *, trajectory: Trajectory | None = None) -> None:
        """Write a sample to disk; a dropped one goes to the file of failures.

        Afterwards the sample's tokens are only on disk, and read on access. If the caller is cancelled while it waits,
        the sample is still written before `close` returns.

        Raises:
            CheckpointError: The sample cannot be written.
        """

        def line() -> bytes:
            if trajectory is not None and sample.is_finished:
                file = trajectory_file(self.path, sample.key)
                file.parent.mkdir(exist_ok=True)
                trajectory.save(file)
            return encode(sample.to_record(self._config_digest))

        place = await (self._results if sample.is_finished else self._failures).append(line)
        _leave_tokens(sample, place)
        if not may_continue(sample.step_result):
            journal_file(self.path, sample.key).unlink(missing_ok=True)

    async def note(self, status: Status) -> None:
        """Write what the evaluation does now, for `watch`. What cannot be written is left out."""
        content = encode(dataclasses.asdict(status))
        writing = asyncio.ensure_future(asyncio.to_thread(replace_file, self._status_file, content))
        try:
            await asyncio.shield(writing)
        except CheckpointError:
            pass
        finally:  # also if this is cancelled: `close` removes the file
            await asyncio.wait([writing])

    async def close(self) -> None:
        """Write all pending records, close the files and release the lock."""
        try:
            try:
                await self._results.close()
            finally:
                await self._failures.close()
        finally:
            with contextlib.suppress(OSError):
                self._status_file.unlink(missing_ok=True)
            self._lock.release()


STATUS_LASTS_S = 10.0
"""Seconds after which a status says nothing: its process was killed, or hangs."""


@dataclasses.dataclass(frozen=True)
class Status:
    """What a running evaluation does now.

    Attributes:
        began: When each episode that runs began, in seconds since 1970, by the sample's name; the longest is the first.
        left: Number of samples that this process will still end, with those that run.
        outages: Servers that do not answer, each in a sentence.
    """

    began: Mapping[str, float]
    left: int
    outages: Sequence[str] = ()


def read_status(path: str | os.PathLike[str]) -> Status | None:
    """Return what an evaluation does now; None if no process runs it.

    Args:
        path: Results file, or its folder.
    """
    file = side_file(results_file(path), ".status.json")
    try:
        if time.time() - file.stat().st_mtime > STATUS_LASTS_S:
            return None
        content = decode(file.read_bytes())
        began = {name: float(at) for name, at in content["began"].items()}
        return Status(began, int(content["left"]), [str(outage) for outage in content["outages"]])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def time_span(path: str | os.PathLike[str], samples: Sequence[EvalSample]) -> tuple[float, float] | None:
    """Return when an evaluation began and last changed, in seconds since 1970; None if its samples do not say it.

    Args:
        path: Results file, or its folder.
        samples: The samples that have ended.
    """
    file = results_file(path)
    times = [(sample.ended_at - sample.seconds, sample.ended_at) for sample in samples if sample.ended_at is not None]
    if not samples:
        times.append((side_file(file, ".run.json").stat().st_mtime,) * 2)
    if not times:
        return None
    began, last = min(start for start, _ in times), max(end for _, end in times)
    with contextlib.suppress(OSError):  # it is there while the evaluation runs, or if it was killed
        last = max(last, side_file(file, ".status.json").stat().st_mtime)
    return began, last


def results_file(path: str | os.PathLike[str]) -> Path:
    """Return the results file of a path, which is a file or a folder.

    A path that does not exist is a folder unless its name ends with `.jsonl`.
    """
    path = Path(path)
    return path / "results.jsonl" if path.is_dir() or path.suffix != ".jsonl" else path


def side_file(path: Path, ending: str) -> Path:
    """Return the path of a file that belongs to a results file."""
    return path.with_name(path.name.removesuffix(".jsonl") + ending)


def journal_file(path: Path, key: str) -> Path:
    """Return the path of a sample's journal, next to the results file."""
    return side_file(path, ".journals") / f"{key}.journal"


def trajectory_file(path: Path, key: str) -> Path:
    """Return the path of the trajectory of a sample in a results file."""
    return side_file(path, ".trajectories") / f"{key}.safetensors"


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the plan of an evaluation.

    Args:
        path: Results file, or its folder.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    file = side_file(results_file(path), ".run.json")
    try:
        content = decode(file.read_bytes())
        if content["format"] != FORMAT:
            raise CheckpointError(f"{file}: this release reads the format {FORMAT!r}, not {content['format']!r}")
        run = Run(content["benchmark"], content["config"], content["n_samples_per_prompt"], content["prompts"])
        if not (
            isinstance(run.benchmark, str)
            and isinstance(run.config, dict)
            and type(run.n_samples_per_prompt) is int
            and run.n_samples_per_prompt >= 1
            and isinstance(run.prompts, dict)
            and all(isinstance(content, str) for content in run.prompts.values())
        ):
            raise ValueError("a value cannot be right")
        return run
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no results of an evaluation ({file.name} is missing)") from error
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except KeyError as error:
        raise CheckpointError(f"{file}: damaged: {error} is missing") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: damaged: {error}") from error


def read_results(path: str | os.PathLike[str]) -> tuple[Run, Results]:
    """Read the samples of an evaluation. It may still be running.

    Args:
        path: Results file, or its folder.

    Returns:
        The plan of the evaluation, and its samples: finished ones, and the last failure of the others.

    Raises:
        CheckpointError: The files are missing or damaged.
    """
    return ResultsReader(path).read()


class ResultsReader:
    """Reads an evaluation that may be running; each time only what was added since."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Set the files; nothing is read yet.

        Args:
            path: Results file, or its folder.
        """
        self.path = Path(path)
        file = results_file(path)
        self._files = {side_file(file, ".failures.jsonl"): False, file: True}
        self._ends: dict[Path, int] = {}
        self._last: dict[Path, tuple[RecordPlace, bytes]] = {}  # the last complete record of each
        self._samples: dict[Path, dict[str, EvalSample]] = {path: {} for path in self._files}
        self._run: Run | None = None

    @property
    def state(self) -> Any:
        """Something that equals an earlier state if nothing was added since."""
        counts = [len(samples) for samples in self._samples.values()]
        return (*self._last.values(), *counts, id(self._run))

    def read(self) -> tuple[Run, Results]:
        """Read what was added, and return the whole, as `read_results` does.

        Raises:
            CheckpointError: The files are missing or damaged.
        """
        run = read_run(self.path)
        if run != self._run:  # a later run may have more samples
            self._run = run
        run = self._run
        for file, is_finished in self._files.items():
            self._read_file(file, is_finished)
        results: Results = {prompt: [] for prompt in run.prompts}
        failed, finished = self._samples.values()
        for key, (prompt, _) in run.sample_keys.items():
            sample = finished.get(key) or failed.get(key)
            if sample is not None:
                sample.prompt_id = prompt
                results[prompt].append(sample)
        return run, results

    def _read_file(self, file: Path, is_finished: bool) -> None:
        if not self._is_continued(file):  # nothing was read, or another evaluation has replaced it
            self._ends[file] = 0
            self._samples[file].clear()
            self._last.pop(file, None)
        if not file.exists():
            return
        last: RecordPlace | None = None
        try:
            for place, record in read_records(file, self._ends[file]):
                try:
                    sample = EvalSample.from_record(record, is_finished=is_finished)
                except ValueError as error:
                    raise CheckpointError(f"{file}, byte {place.start}: damaged: {error}") from error
                _leave_tokens(sample, place)
                self._samples[file][sample.key] = sample
                if place.is_complete:  # else its newline will follow
                    self._ends[file] = place.start + place.length
                    last = place
        finally:
            if last is not None:
                with contextlib.suppress(OSError):  # it was removed meanwhile
                    self._last[file] = (last, _read_line(last))

    def _is_continued(self, file: Path) -> bool:
        """Whether a file still has the last record that was read; neither its size nor its inode tells."""
        if file not in self._last:
            return False
        place, line = self._last[file]
        try:
            return _read_line(place) == line
        except OSError:
            return False


def _samples(path: Path, run: Run) -> dict[str, EvalSample | None]:
    """Return the last sample of each key; None for keys that do not belong to the run."""
    keys = run.sample_keys
    samples: dict[str, EvalSample | None] = {}
    for number, (place, record) in enumerate(read_records(path), 1):
        if record["key"] not in keys:
            samples[record["key"]] = None
            continue
        try:
            sample = EvalSample.from_record(record)
        except ValueError as error:
            raise CheckpointError(f"{path}, line {number}: damaged: {error}") from error
        _leave_tokens(sample, place)
        sample.prompt_id = keys[sample.key][0]
        samples[sample.key] = sample
    return samples


def _difference(known: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    differing = [name for name in sorted({*known, *new}, key=str) if known.get(name) != new.get(name)]
    return ", ".join(f"{name} was {known.get(name)!r:.200} and is {new.get(name)!r:.200}" for name in differing)


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings, with dotted names."""
    items: dict[str, Any] = {}
    for name, item in value.items():
        items.update(flat(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {f"{prefix}{name}": item})
    return items


# --- one file of records ---


@dataclasses.dataclass(frozen=True)
class RecordPlace:
    """The position of a record: its file, its bytes in the file, and whether its newline is written, too."""

    path: Path
    start: int
    length: int
    is_complete: bool = True


class CheckpointError(Exception):
    """A results file cannot be used. What was reported as finished is on disk, unless the file was removed."""


class CheckpointFile:
    """An append-only file of JSON records, for use from one event loop.

    Examples:
        ```python
        file = CheckpointFile(path)
        records = [record for _, record in read_records(path)]
        await file.append(lambda: line)
        await file.close()
        ```
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open or create the file, and repair what a killed process left.

        Raises:
            CheckpointError: The file is not a results file, is damaged, or cannot be opened.
        """
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            _sync_directory(self.path.parent)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from error
        try:
            self._end = self._repair()
        except OSError as error:
            os.close(self._fd)
            raise CheckpointError(f"{self.path}: {error.strerror}") from error
        except BaseException:
            os.close(self._fd)
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._waiting: list[tuple[Callable[[], bytes], asyncio.Future[RecordPlace]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._failure: CheckpointError | None = None

    def append(self, line: Callable[[], bytes]) -> asyncio.Future[RecordPlace]:
        """Append a record; the future returns its position once it is on disk.

        The record is accepted at once: it is written even if the caller is cancelled while it waits.

        Args:
            line: Function that returns the record's bytes with a newline; called in the writing thread.

        Raises:
            CheckpointError: The record cannot be written. The future raises it.
        """
        done: asyncio.Future[RecordPlace] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            done.set_exception(self._failure)
            return done
        self._waiting.append((line, done))
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())
        return done

    async def close(self) -> None:
        """Write pending records, then close the file. A caller that is cancelled meanwhile still waits for it."""
        if self._fd < 0:
            return
        cancelled: asyncio.CancelledError | None = None
        while self._writing is not None:
            try:
                # Once is enough: anyio's cancel scopes cancel again in every iteration of the event loop.
                with anyio.CancelScope(shield=cancelled is not None):
                    await asyncio.shield(self._writing)
            except asyncio.CancelledError as error:
                cancelled = error
        self._thread.shutdown(wait=True)
        os.close(self._fd)
        self._fd = -1
        if cancelled is not None:
            raise cancelled

    def abandon(self) -> None:
        """Close a file to which no record was appended."""
        os.close(self._fd)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                outcomes = await loop.run_in_executor(self._thread, self._commit, [line for line, _ in batch])
                for (_, done), outcome in zip(batch, outcomes, strict=True):
                    if isinstance(outcome, RecordPlace):
                        if not done.cancelled():
                            done.set_result(outcome)
                    elif not done.cancelled():
                        done.set_exception(outcome)
                    else:  # its caller was cancelled and does not see the error
                        logger.error("error=<%s> | a record could not be written; a later run repeats it", outcome)
        finally:
            self._writing = None

    def _commit(self, lines: list[Callable[[], bytes]]) -> list[RecordPlace | CheckpointError]:
        """Write and sync records in the writing thread; return the position or the error of each."""
        start = self._end
        outcomes = [self._failure or self._put(line) for line in lines]
        try:
            os.fsync(self._fd)
            if self._is_removed():  # writing to it still succeeds
                raise FileNotFoundError(errno.ENOENT, "removed while it was written")
        except OSError as error:
            failure = self._fail(error, start)
            outcomes = [failure if isinstance(outcome, RecordPlace) else outcome for outcome in outcomes]
        return outcomes

    def _put(self, line: Callable[[], bytes]) -> RecordPlace | CheckpointError:
        """Write a record completely or not at all."""
        try:
            record = line()
        except Exception as error:
            return CheckpointError(f"{self.path}: a result cannot be written: {error!r}")
        start, written = self._end, 0
        try:
            while written < len(record):
                written += os.pwrite(self._fd, record[written : written + (1 << 20)], start + written)
        except OSError as error:
            return self._fail(error, start)
        self._end += len(record)
        return RecordPlace(self.path, start, len(record))

    def _is_removed(self) -> bool:
        opened = os.fstat(self._fd)
        if opened.st_nlink:
            return False
        try:
            return not os.path.samestat(opened, os.stat(self.path))  # some file systems count no links
        except FileNotFoundError:
            return True

    def _fail(self, error: OSError, end: int) -> CheckpointError:
        """Truncate the file at a byte, and refuse further records."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, end)
        self._end = end
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        kept = "every result reported as finished is kept, run again to resume"
        if error.errno in (errno.ENOENT, errno.ESTALE):
            kept = "its results are lost, run again"
        self._failure = CheckpointError(f"{self.path}: {reason}; {kept}")
        self._failure.__cause__ = error
        return self._failure

    def _repair(self) -> int:
        """Remove an incomplete record after the last newline; return the file's length."""
        size = os.fstat(self._fd).st_size
        if not size:
            return 0
        with mmap.mmap(self._fd, size, access=mmap.ACCESS_READ) as content:
            head, tail = content[: len(RECORD_START)], content[content.rfind(b"\n") + 1 :]
        if not _may_begin_a_record(head):
            raise CheckpointError(f"{self.path} is not a results file of an evaluation; use another file")
        if not tail:
            return size
        if not _may_begin_a_record(tail):
            raise CheckpointError(f"{self.path} ends with data that is not a record; the file was not changed")
        try:
            decode(tail)
        except ValueError:
            os.ftruncate(self._fd, size - len(tail))
            os.fsync(self._fd)
            logger.warning("path=<%s>, bytes=<%d> | removed an incomplete record", self.path, len(tail))
            return size - len(tail)
        os.pwrite(self._fd, b"\n", size)
        os.fsync(self._fd)
        return size + 1


def lock_file(path: Path) -> FileLock:
    """Acquire the lock that excludes other evaluations, in this and other processes. It ends with the process.

    Args:
        path: Lock file, created if it is missing and never removed.

    Raises:
        CheckpointError: Another evaluation holds the lock, or the file cannot be opened.
    """
    lock = FileLock(path, thread_local=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise CheckpointError(f"{path}: another evaluation is writing there") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    return lock


def read_records(path: str | os.PathLike[str], start: int = 0) -> Iterator[tuple[RecordPlace, dict[str, Any]]]:
    """Read the complete records of a results file with their positions. An incomplete last line is ignored.

    Args:
        path: The file.
        start: Byte to start from, at the start of a record.

    Raises:
        CheckpointError: A line is not a record, or the file cannot be read.
    """
    path, began = Path(path), start
    try:
        with open(path, "rb") as file:
            file.seek(start)
            for number, line in enumerate(file, 1):
                try:
                    record = _record_of(line)
                except ValueError as error:
                    if not line.endswith(b"\n"):
                        return
                    where = f"line {number}" if not began else f"byte {start}"
                    raise CheckpointError(f"{path}, {where}: damaged: {error}") from error
                yield RecordPlace(path, start, len(line), line.endswith(b"\n")), record
                start += len(line)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def read_record(place: RecordPlace) -> dict[str, Any]:
    """Read one record.

    Raises:
        CheckpointError: The record is no longer there.
    """
    try:
        return _record_of(_read_line(place))
    except OSError as error:
        raise CheckpointError(f"{place.path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{place.path} has changed: there is no record at byte {place.start}") from error


def _read_line(place: RecordPlace) -> bytes:
    with open(place.path, "rb") as file:
        file.seek(place.start)
        return file.read(place.length)


def _record_of(line: bytes) -> dict[str, Any]:
    record = decode(line)
    if not isinstance(record, dict) or "key" not in record:
        raise ValueError("not a record of a sample")
    return record


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file completely or not at all.

    Raises:
        CheckpointError: The file cannot be written; the old one is unchanged.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(new, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise CheckpointError(f"{path}: {error.strerror}") from error


def _may_begin_a_record(content: bytes) -> bool:
    """Whether a killed process may have left this: the start of a record, or the zeros of an unwritten block."""
    shared = min(len(content), len(RECORD_START))
    return content[:shared] == RECORD_START[:shared] or not content.strip(b"\0")


def _sync_directory(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system supports it
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


# --- values as lines of JSON ---


_MAX_DEPTH = 100
"""Most levels of nesting. Deeper values, and values that contain themselves, are written as text from there."""

_MAX_BITS = 14_000
"""Most bits of an integer, since Python writes at most 4,300 digits. Larger ones are written as hexadecimal text."""

# Integers of more than 64 bits, once digits are 0 and most bytes spaces. In a fraction, a point precedes the digits.
_MANY_DIGITS = (b" " + 20 * b"0", b"-" + 19 * b"0")
_DIGITS_AS_0 = bytearray(256 * b" ")
_DIGITS_AS_0[ord("0") : ord("9") + 1] = 10 * b"0"
_DIGITS_AS_0[ord("-")], _DIGITS_AS_0[ord(".")] = b"-."


def encode(value: Any) -> bytes:
    """Encode a value as one line of JSON, newline included."""
    try:
        return orjson.dumps(value, default=nearest, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE)
    except (TypeError, RecursionError, ValueError):  # a lone surrogate, an integer of more than 64 bits, a cycle
        return json.dumps(_plain(value), separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def decode(line: bytes) -> Any:
    """Decode a line of JSON.

    Raises:
        ValueError: The line is not JSON.
    """
    digits = b" " + line.translate(_DIGITS_AS_0)
    try:
        if not any(many in digits for many in _MANY_DIGITS):  # which orjson reads as floats
            return orjson.loads(line)
    except ValueError:
        pass  # an escaped lone surrogate
    try:
        return json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def digest(value: Any) -> str:
    """Return 32 hexadecimal digits that are equal for equal values, whatever the order of their keys."""
    text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def nearest(value: Any) -> Any:
    """Convert a value to the nearest one that JSON supports; its text, or that of its type, as the last resort."""
    try:
        return _nearest(value)
    except Exception:  # its own code raises
        return str(type(value))


def _nearest(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Set):
        return sorted(value, key=repr)
    if isinstance(value, Mapping):
        return dict(value)
    for name in ("tolist", "isoformat"):  # NumPy's arrays and numbers, PyTorch's tensors; dates
        if callable(convert := getattr(value, name, None)) and not isinstance(value, type):
            return convert()
    return str(value)


def _plain(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MAX_BITS else hex(value)
    if isinstance(value, float):
        return float(value) if value - value == 0 else None  # JSON has no infinity; orjson also writes null
    if depth >= _MAX_DEPTH:
        return str(type(value))
    if isinstance(value, Mapping):
        return {_key(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return _plain(nearest(value), depth + 1)


def _key(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # as in `nearest`; or a large integer
        return str(_plain(value, _MAX_DEPTH))
