"""The files of an evaluation: results grow by whole records, survive whatever ends the process, and are read again.

A *prompt* is a task; a *sample* is one episode of it. A sample's key is a digest of the task's whole content, the
sample's index and the configuration, so a record can be taken for another sample's only if all three are the same. Two
tasks with equal content are two prompts: they are told apart by how often the content came before.

A sample is *finished* unless the infrastructure failed, or something before the model was asked: such a sample says
nothing of the policy, is kept apart with its cause, and is *dropped* from every metric until a later run finishes it.
A finished sample is *errored* if it ought to have a reward and has none: the reward function, a judge, a tool or the
environment failed, or the time was up. Whoever writes the answers may bring that about, so it counts as a wrong answer.

For `results.jsonl` these are, in the same folder:
- `results.jsonl`: one record per finished sample, appended as they finish;
- `results.failures.jsonl`: the same of each sample that failed, with its cause, once per failure;
- `results.run.json`: benchmark, configuration, how many samples of which prompts: what is to be in the first;
- `results.trajectories/KEY.safetensors`: all model calls of a finished sample, with `keep_trajectories`;
- `results.lock`: held by the process that writes.

A file holds the results of one configuration, and each record says what its environment was. Another one is refused,
and told what differs.

Promises of a file of records (`CheckpointFile`):
- `append` is done when its record is on the disk (fsync), and not before. The event loop never waits for the disk: one
  thread writes, and all records that came while it was busy share one fsync.
- Nothing that was written is written again. Only what a killed process left behind the last whole record is cut off
  when the file is opened, and a whole record that lacks just its newline gets it.
- One process at a time: the file has a lock beside it, which ends with its process.
- A record that could not be written whole (a full disk) leaves none of its bytes, and everything before it stays.
- A file that is not of this kind is never touched.

An environment may put anything into a task or a message (sets, bytes, numpy numbers, half of a surrogate pair). A
result that cannot be written would be a result that is lost, so writing never refuses a value: what JSON has no form
for is written in the nearest one. `digest` is over the canonical form: sorted keys, so equal values have equal digests.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import orjson
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field

from strands_sglang import TerminationReason, Trajectory

from ..core.types import Action, Observation, RewardResult, StepResult, TaskContext, TokenObservation

logger = logging.getLogger(__name__)

# --- samples and prompts ---


_NOT_THE_POLICY = frozenset(
    {TerminationReason.INFRASTRUCTURE_ERROR, TerminationReason.ABORTED, TerminationReason.CANCELLED}
)

RECORD_START = b'{"key":"'
"""How every record begins: tells a torn record from a file that is someone else's."""


class EvalSample(BaseModel):
    """One episode of an evaluation.

    Attributes:
        key: Names it among all samples of all configurations.
        prompt_id: Names its prompt; results are grouped by it.
        sample_index: Which of its prompt's samples it is, from 0.
        action: The task.
        step_result: The episode. Tokens only with `keep_tokens`; no trajectory.
        seconds: How long the episode took.
        is_finished: Whether its end says something of the policy; else it is dropped from metrics, and tried again on
            resume.
        environment: What made its environment the one that it was; None where that is not known, as in old files.
        is_errored: Whether it is finished, ought to have a reward and has none; it counts as a wrong answer.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    key: str = ""
    prompt_id: str
    sample_index: int = 0
    action: Action
    step_result: StepResult
    seconds: float = 0.0
    is_finished: bool = True
    is_errored: bool = False
    environment: dict[str, Any] | None = Field(default=None, repr=False)

    @property
    def aborted(self) -> bool:
        """Whether it is dropped: the opposite of `is_finished`."""
        return not self.is_finished

    @property
    def reward(self) -> float | None:
        """Its reward; None if it has none."""
        return None if self.step_result.reward is None else self.step_result.reward.reward

    def to_record(self, config_digest: str) -> dict[str, Any]:
        """The sample as JSON-like data. The key comes first; see `RECORD_START`."""
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
            "final_response": result.observation.final_response,
            "environment": self.environment,
            "message": self.action.message,
            "task_context": self.action.task_context.model_dump(),
            "observation": observation,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], *, is_finished: bool = True) -> EvalSample:
        """The sample of a record.

        Args:
            record: What `to_record` made, read back.
            is_finished: Whether it is one of a finished sample: the file that it is from tells.

        Raises:
            ValueError: It is not one.
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
                is_finished=is_finished,
                is_errored=bool(record.get("is_errored")),  # like the other fields that old records lack
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
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a record of a sample: {error!r}") from error


def with_finite_reward(result: StepResult) -> StepResult:
    """An episode whose reward, if any, is a number: files have no NaN, and a resumed run must not differ."""
    if result.reward is None or math.isfinite(result.reward.reward):
        return result
    said = f"a reward is a finite number, not {result.reward.reward}"
    return result.model_copy(update={"reward": None, "reward_error": said, "error": result.error or said})


def is_conclusive(result: StepResult) -> bool:
    """Whether an episode's end says something of the policy, so that the sample is finished."""
    if result.reward is not None:
        return True
    if result.termination_reason in _NOT_THE_POLICY or result.reward_error_is_infrastructure:
        return False
    metrics = result.observation.metrics
    # Of an agent that never asked its model: `reset` failed, say.
    was_asked = metrics.get("model_calls") != 0 and (metrics.get("sampled_tokens") != 0 or "sequences" not in metrics)
    return was_asked or result.termination_reason is not TerminationReason.AGENT_ERROR


def is_error(result: StepResult, *, is_judged: bool) -> bool:
    """Whether an episode whose end says something of the policy ought to have a reward and has none.

    Args:
        result: The episode.
        is_judged: Whether its environment has a reward function.
    """
    failed = result.reward_error is not None or result.termination_reason is TerminationReason.AGENT_ERROR
    return result.reward is None and (is_judged or failed)


Results = dict[str, list[EvalSample]]
"""All samples by prompt, in the order of the tasks and of the sample indices; dropped ones included."""


class Prompt(BaseModel):
    """A task of an evaluation with the names that it goes by."""

    model_config = ConfigDict(frozen=True)

    id: str
    digest: str
    action: Action = Field(repr=False)


class DuplicateTaskError(ValueError):
    """Two different tasks have one id."""


def name_prompts(actions: Iterable[Action]) -> list[Prompt]:
    """Give every task its id and digest.

    The id is the task's own (`task_context.id`) or made of its digest. A task that comes again, equal in everything,
    is a prompt of its own with `#2`, `#3` ... behind its id.

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
                f"tasks {positions[prompt_id]} and {position} (from 0) are different tasks with the same id "
                f"{prompt_id!r}: results are kept by id, give each task its own"
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
    """What an evaluation is to hold.

    Attributes:
        benchmark: Its name.
        config: The configuration, JSON-like.
        n_samples_per_prompt: Samples of each prompt.
        prompts: Digest by prompt id, in order.
    """

    benchmark: str
    config: Mapping[str, Any]
    n_samples_per_prompt: int
    prompts: Mapping[str, str]

    @property
    def facts(self) -> dict[str, Any]:
        """All of the configuration, by name."""
        return {"benchmark": self.benchmark, **self.config}

    @property
    def config_digest(self) -> str:
        """Tells the configuration from every other."""
        return digest([self.benchmark, self.config])

    @functools.cached_property
    def sample_keys(self) -> dict[str, tuple[str, int]]:
        """Prompt id and sample index of every key that belongs to it, in order."""
        config = self.config_digest
        return {
            digest([content, index, config]): (prompt, index)
            for prompt, content in self.prompts.items()
            for index in range(self.n_samples_per_prompt)
        }


class StoredTokens(TokenObservation):
    """Tokens that are on the disk, and read when they are asked for.

    In memory a token takes 84 bytes, so those of a few thousand long episodes fill a machine.
    """

    _place: Place

    def __getattr__(self, name: str) -> Any:
        """A field, from the disk."""
        if name in TokenObservation.model_fields:
            return getattr(_read_tokens(self._place), name)
        return super().__getattr__(name)  # type: ignore[misc]

    def __eq__(self, other: Any) -> bool:
        """Whether the tokens are the same, wherever they are."""
        return isinstance(other, TokenObservation) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]


@functools.lru_cache(maxsize=1)
def _read_tokens(place: Place) -> TokenObservation:
    return TokenObservation.model_validate(read_record(place)["observation"]["tokens"])


def _leave_tokens(sample: EvalSample, place: Place) -> None:
    """Leave a sample's tokens on the disk."""
    if sample.step_result.observation.tokens is not None:
        sample.step_result.observation.tokens = tokens = StoredTokens.model_construct()
        tokens._place = place


class Storage:
    """The files of one evaluation, opened for writing."""

    def __init__(self, path: str | os.PathLike[str], run: Run) -> None:
        """Lock, open and repair the files, and read what is finished.

        Args:
            path: The results file, or a folder (which has it under `results.jsonl`).
            run: What is going to be in it.

        Raises:
            CheckpointError: The files cannot be used: written by someone else at the moment, damaged, of another
                configuration, or not of an evaluation.
        """
        self.path = results_file(path)
        self._config_digest = run.config_digest
        run_file = side_file(self.path, ".run.json")
        with contextlib.ExitStack() as undo:
            self._lock = lock_file(side_file(self.path, ".lock"))
            undo.callback(self._lock.release)
            _, first = next(read_records(self.path), (None, None)) if self.path.exists() else (None, None)
            if first is not None and first.get("config") != self._config_digest:
                what = f": {_difference(read_run(self.path).facts, run.facts)}" if run_file.exists() else ""
                raise CheckpointError(
                    f"{self.path} has results of another configuration{what}; name another file for this one"
                )
            self._results = CheckpointFile(self.path)
            undo.callback(self._results.abandon)
            self._failures = CheckpointFile(side_file(self.path, ".failures.jsonl"))
            undo.callback(self._failures.abandon)
            replace_file(run_file, encode({"format": FORMAT, **dataclasses.asdict(run)}))
            samples = _samples(self.path, run)
            undo.pop_all()
        self.finished = {key: sample for key, sample in samples.items() if sample is not None}
        if len(self.finished) < len(samples):
            logger.warning(
                "path=<%s>, records=<%d> | results of tasks or sample indices that are not in this run are left out",
                self.path,
                len(samples) - len(self.finished),
            )

    def refuse_other_environment(self, key: str, identity: Mapping[str, Any]) -> None:
        """Make sure that a finished sample is of the environment that would be made for it now.

        Args:
            key: The sample's.
            identity: What makes the environment the one that it is now.

        Raises:
            CheckpointError: It was another one; says what differs.
        """
        known, new = _flat(self.finished[key].environment or {}), _flat(decode(encode(identity)))
        for one, other in ((known, new), (new, known)):
            if not any(name.startswith("served.") for name in one):  # this server does not tell, or gave no answer
                for name in [name for name in other if name.startswith("served.")]:
                    del other[name]
        if known != new:
            raise CheckpointError(
                f"{self.path} has results of another environment: {_difference(known, new)}; name another file for "
                "this one"
            )

    async def add(self, sample: EvalSample, *, trajectory: Trajectory | None = None) -> None:
        """Put a sample on the disk, a dropped one into the failures; done once it is there.

        Its tokens are on the disk only from then on, and read when they are asked for.

        A caller that is cancelled while it waits has not withdrawn it: `close` sees to it.

        Raises:
            CheckpointError: It cannot be written.
        """

        def line() -> bytes:
            if trajectory is not None and sample.is_finished:
                folder = side_file(self.path, ".trajectories")
                folder.mkdir(exist_ok=True)
                trajectory.save(folder / f"{sample.key}.safetensors")
            return encode(sample.to_record(self._config_digest))

        place = await (self._results if sample.is_finished else self._failures).append(line)
        _leave_tokens(sample, place)

    async def close(self) -> None:
        """Write what waits, close the files, release the lock."""
        try:
            try:
                await self._results.close()
            finally:
                await self._failures.close()
        finally:
            self._lock.release()


def results_file(path: str | os.PathLike[str]) -> Path:
    """The results file that a path means: itself, or the one in a folder.

    A path that does not exist is a folder unless its name ends in `.jsonl`.
    """
    path = Path(path)
    return path / "results.jsonl" if path.is_dir() or path.suffix != ".jsonl" else path


def side_file(path: Path, ending: str) -> Path:
    """A file that belongs to a results file."""
    return path.with_name(path.name.removesuffix(".jsonl") + ending)


def read_run(path: str | os.PathLike[str]) -> Run:
    """What an evaluation's files are to hold.

    Args:
        path: The results file, or its folder.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    file = side_file(results_file(path), ".run.json")
    try:
        content = decode(file.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
        return Run(content["benchmark"], content["config"], content["n_samples_per_prompt"], content["prompts"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no results of an evaluation ({file.name} is missing)") from error
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: damaged: {error}") from error


def read_results(path: str | os.PathLike[str]) -> tuple[Run, Results]:
    """An evaluation's samples, also while it runs: finished ones, and the last failure of those that only failed.

    Args:
        path: The results file, or its folder.

    Raises:
        CheckpointError: There are none, or they are damaged.
    """
    run = read_run(path)
    file = results_file(path)
    samples: dict[str, EvalSample | None] = {}
    for records, is_finished in ((side_file(file, ".failures.jsonl"), False), (file, True)):
        if records.exists():
            samples.update(_samples(records, run, is_finished=is_finished))
    results: Results = {prompt: [] for prompt in run.prompts}
    for key, (prompt, _) in run.sample_keys.items():
        sample = samples.get(key)
        if sample is not None:
            results[prompt].append(sample)
    return run, results


def _samples(path: Path, run: Run, *, is_finished: bool = True) -> dict[str, EvalSample | None]:
    """The last record of each key; None for keys that do not belong to the run."""
    keys = run.sample_keys
    samples: dict[str, EvalSample | None] = {}
    for number, (place, record) in enumerate(read_records(path), 1):
        if record["key"] not in keys:
            samples[record["key"]] = None
            continue
        try:
            sample = EvalSample.from_record(record, is_finished=is_finished)
        except ValueError as error:
            raise CheckpointError(f"{path}, line {number}: damaged: {error}") from error
        _leave_tokens(sample, place)
        sample.prompt_id = keys[sample.key][0]
        samples[sample.key] = sample
    return samples


def _difference(known: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    differing = [name for name in sorted({*known, *new}, key=str) if known.get(name) != new.get(name)]
    return ", ".join(f"{name} was {known.get(name)!r:.200} and is {new.get(name)!r:.200}" for name in differing)


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat.update(_flat(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {f"{prefix}{name}": item})
    return flat


# --- one file of records ---


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a record is: its file, and its bytes in it."""

    path: Path
    start: int
    length: int


class CheckpointError(Exception):
    """A results file cannot be used or written. What was acknowledged before is on the disk."""


class CheckpointFile:
    """An append-only file of JSON records. Use it from one event loop.

    Example:
        file = CheckpointFile(path)
        records = [record for _, record in read_records(path)]
        await file.append(lambda: line)
        await file.close()
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open or make the file, and repair what a killed process left.

        Raises:
            CheckpointError: It is no results file, is damaged, or cannot be opened.
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
        except BaseException:
            os.close(self._fd)
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._waiting: list[tuple[Callable[[], bytes], asyncio.Future[Place]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._failure: CheckpointError | None = None

    def append(self, line: Callable[[], bytes]) -> asyncio.Future[Place]:
        """Append a record; the future is done once it is on the disk, and says where.

        The record is taken at once: a caller that is cancelled while it waits has not withdrawn it.

        Args:
            line: Makes the record's bytes, newline included; called in the writing thread.

        Raises:
            CheckpointError: (through the future) It cannot be written.
        """
        done: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            done.set_exception(self._failure)
            return done
        self._waiting.append((line, done))
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())
        return done

    async def close(self) -> None:
        """Write what is waiting, then close the file. A caller that is cancelled meanwhile still waits for it."""
        if self._fd < 0:
            return
        cancelled: asyncio.CancelledError | None = None
        while self._writing is not None:
            try:
                # Once is enough: a cancel scope of anyio's cancels again in every round of the event loop.
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
        """Close a file that nothing was appended to."""
        os.close(self._fd)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                outcomes = await loop.run_in_executor(self._thread, self._commit, [line for line, _ in batch])
                for (_, done), outcome in zip(batch, outcomes, strict=True):
                    if isinstance(outcome, Place):
                        if not done.cancelled():
                            done.set_result(outcome)
                    elif not done.cancelled():
                        done.set_exception(outcome)
                    else:  # its caller was cancelled and hears of nothing
                        logger.error("error=<%s> | a record could not be written; a later run runs it again", outcome)
        finally:
            self._writing = None

    def _commit(self, lines: list[Callable[[], bytes]]) -> list[Place | CheckpointError]:
        """Write and sync; runs in the thread. Where each is, or what went wrong with it."""
        start = self._end
        outcomes = [self._failure or self._put(line) for line in lines]
        try:
            os.fsync(self._fd)
        except OSError as error:
            failure = self._fail(error, start)
            outcomes = [failure if isinstance(one, Place) else one for one in outcomes]
        return outcomes

    def _put(self, line: Callable[[], bytes]) -> Place | CheckpointError:
        """Write a record, or none of it."""
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
        return Place(self.path, start, len(record))

    def _fail(self, error: OSError, end: int) -> CheckpointError:
        """Keep what is before a byte, and take no more."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, end)
        self._end = end
        what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        self._failure = CheckpointError(
            f"{self.path}: {what}; every result reported as finished is kept, run again to go on"
        )
        self._failure.__cause__ = error
        return self._failure

    def _repair(self) -> int:
        """Cut off what is no whole record behind the last newline; return the file's length."""
        size = os.fstat(self._fd).st_size
        if not size:
            return 0
        with mmap.mmap(self._fd, size, access=mmap.ACCESS_READ) as content:
            head, tail = content[: len(RECORD_START)], content[content.rfind(b"\n") + 1 :]
        if not _may_begin_a_record(head):
            raise CheckpointError(f"{self.path} is not a results file of an evaluation: name another file")
        if not tail:
            return size
        if not _may_begin_a_record(tail):
            raise CheckpointError(f"{self.path} ends in what is no record: not touched")
        try:
            decode(tail)
        except ValueError:
            os.ftruncate(self._fd, size - len(tail))
            os.fsync(self._fd)
            logger.warning("path=<%s>, bytes=<%d> | cut off a record that was never finished", self.path, len(tail))
            return size - len(tail)
        os.pwrite(self._fd, b"\n", size)
        os.fsync(self._fd)
        return size + 1


def lock_file(path: Path) -> FileLock:
    """Keep a second evaluation away, of this process or of another; ends with the process, however it ends.

    Args:
        path: Of the file that stands for it, made if need be and never removed.

    Raises:
        CheckpointError: Someone holds it, or it cannot be opened.
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


def read_records(path: str | os.PathLike[str]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The whole records of a results file with their places; a torn last line is left out. The file is only read.

    Raises:
        CheckpointError: A line is no record, or the file cannot be read.
    """
    path, start = Path(path), 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    record = _record_of(line)
                except ValueError as error:
                    if not line.endswith(b"\n"):
                        return
                    raise CheckpointError(f"{path}, line {number}: damaged: {error}") from error
                yield Place(path, start, len(line)), record
                start += len(line)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def read_record(place: Place) -> dict[str, Any]:
    """One record.

    Raises:
        CheckpointError: It is no longer there.
    """
    try:
        with open(place.path, "rb") as file:
            file.seek(place.start)
            return _record_of(file.read(place.length))
    except OSError as error:
        raise CheckpointError(f"{place.path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{place.path} has been changed: no record is at byte {place.start}") from error


def _record_of(line: bytes) -> dict[str, Any]:
    record = decode(line)
    if not isinstance(record, dict) or "key" not in record:
        raise ValueError("no record of a sample")
    return record


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file whole or not at all.

    Raises:
        CheckpointError: It cannot be written; the old one is still there.
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
    """Whether a killed process may have left this: a record's beginning, or the zeros of a block never written."""
    shared = min(len(content), len(RECORD_START))
    return content[:shared] == RECORD_START[:shared] or not content.strip(b"\0")


def _sync_directory(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system takes it
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


# --- values as lines of JSON ---


_MAX_DEPTH = 100
"""Levels. Deeper values, those that contain themselves among them, are written as text from there on."""


def encode(value: Any) -> bytes:
    """One line of JSON, newline included."""
    try:
        return orjson.dumps(value, default=nearest, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE)
    except (TypeError, RecursionError, ValueError):  # a lone surrogate, an integer of more than 64 bits, a cycle
        return json.dumps(_plain(value), separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def decode(line: bytes) -> Any:
    """The value of a line.

    Raises:
        ValueError: It is not JSON.
    """
    try:
        return orjson.loads(line)
    except ValueError:
        return json.loads(line)  # takes escaped lone surrogates and large integers


def digest(value: Any) -> str:
    """32 hexadecimal digits that equal values share, whatever the order of their keys."""
    text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def nearest(value: Any) -> Any:
    """The nearest value that JSON has a form for; text as the last resort."""
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
    for name in ("tolist", "isoformat"):  # numpy's arrays and numbers, torch's tensors; dates
        if callable(convert := getattr(value, name, None)) and not isinstance(value, type):
            return convert()
    return str(value)


def _plain(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if value - value == 0 else None  # JSON has no infinity; orjson writes null as well
    if depth >= _MAX_DEPTH:
        return str(type(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return _plain(nearest(value), depth + 1)
