"""The files of an evaluation, and what is read from them again.

For `results.jsonl` these are, in the same folder:
- `results.jsonl`: one record per finished sample, appended as they finish;
- `results.failures.jsonl`: the same of each sample that failed, with its cause, once per failure;
- `results.run.json`: benchmark, configuration, how many samples of which prompts: what is to be in the first;
- `results.trajectories/KEY.safetensors`: all model calls of a finished sample, with `keep_trajectories`;
- `results.lock`: held by the process that writes.

A file holds the results of one configuration, and each record says what its environment was. Another one is refused,
and told what differs.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strands_sglang import Trajectory

from ..core.types import TokenObservation
from .checkpoint import (
    CheckpointError,
    CheckpointFile,
    Place,
    lock_file,
    read_placed_records,
    read_record,
    read_records,
    replace_file,
)
from .json_lines import decode, digest, encode
from .records import EvalSample, Prompt, Results

logger = logging.getLogger(__name__)

FORMAT = "strands-env evaluation 1"
DEFAULT_NAME = "results.jsonl"


@dataclass(frozen=True)
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
    def config_digest(self) -> str:
        """Tells the configuration from every other."""
        return digest([self.benchmark, self.config])

    @classmethod
    def of(cls, benchmark: str, config: Mapping[str, Any], n_samples: int, prompts: Sequence[Prompt]) -> Run:
        """The run of these prompts."""
        return cls(benchmark, decode(encode(config)), n_samples, {prompt.id: prompt.digest for prompt in prompts})

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

    @classmethod
    def at(cls, place: Place) -> StoredTokens:
        """The tokens of the record at a place."""
        tokens = cls.model_construct()
        tokens._place = place
        return tokens

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
        sample.step_result.observation.tokens = StoredTokens.at(place)


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
        self._run = run
        self._config_digest = run.config_digest
        try:
            self._lock = lock_file(side_file(self.path, ".lock"))
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from error
        try:
            self.finished = self._open()
        except BaseException:
            self._lock.release()
            raise

    def _open(self) -> dict[str, EvalSample]:
        run_file = side_file(self.path, ".run.json")
        if self.path.exists():
            self._refuse_other_configuration(run_file)
        self._results = CheckpointFile(self.path)
        try:
            self._failures = CheckpointFile(side_file(self.path, ".failures.jsonl"))
            try:
                replace_file(run_file, _encode_run(self._run))
                return self._finished()
            except BaseException:
                self._failures.abandon()
                raise
        except BaseException:
            self._results.abandon()
            raise

    def _finished(self) -> dict[str, EvalSample]:
        finished: dict[str, EvalSample] = {}
        others = 0
        for key, sample in _samples(self.path, self._run).items():
            if sample is None:
                others += 1
            else:
                finished[key] = sample
        if others:
            logger.warning(
                "path=<%s>, records=<%d> | results of tasks or sample indices that are not in this run are left out",
                self.path,
                others,
            )
        return finished

    def _refuse_other_configuration(self, run_file: Path) -> None:
        first = next(read_records(self.path), None)
        if first is None or first.get("config") == self._config_digest:
            return
        known = read_run(self.path) if run_file.exists() else None
        what = "" if known is None else f": {_difference(known, self._run)}"
        raise CheckpointError(f"{self.path} has results of another configuration{what}; name another file for this one")

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
                f"{self.path} has results of another environment: {_differences(known, new)}; name another file for "
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
    return path / DEFAULT_NAME if path.is_dir() or path.suffix != ".jsonl" else path


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
    failures = side_file(file, ".failures.jsonl")
    samples: dict[str, EvalSample | None] = {}
    if failures.exists():
        samples.update(_samples(failures, run, is_finished=False))
    if file.exists():
        samples.update(_samples(file, run))
    results: Results = {prompt: [] for prompt in run.prompts}
    for key, (prompt, _) in run.sample_keys.items():
        if (sample := samples.get(key)) is not None:
            results[prompt].append(sample)
    return run, results


def _samples(path: Path, run: Run, *, is_finished: bool = True) -> dict[str, EvalSample | None]:
    """The last record of each key; None for keys that do not belong to the run."""
    keys = run.sample_keys
    samples: dict[str, EvalSample | None] = {}
    for number, (place, record) in enumerate(read_placed_records(path), 1):
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


def _encode_run(run: Run) -> bytes:
    return encode(
        {
            "format": FORMAT,
            "benchmark": run.benchmark,
            "config": run.config,
            "n_samples_per_prompt": run.n_samples_per_prompt,
            "prompts": run.prompts,
        }
    )


def _difference(known: Run, new: Run) -> str:
    if known.benchmark != new.benchmark:
        return f"benchmark was {known.benchmark!r} and is {new.benchmark!r}"
    return _differences(known.config, new.config)


def _differences(known: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    names = sorted({*known, *new}, key=str)
    differing = [name for name in names if known.get(name) != new.get(name)]
    return ", ".join(f"{name} was {known.get(name)!r:.200} and is {new.get(name)!r:.200}" for name in differing)


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat.update(_flat(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {f"{prefix}{name}": item})
    return flat
