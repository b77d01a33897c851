"""Benchmarks by name: where their tasks are, and which field is what."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.types import Action
from .tasks import TaskError, actions_of, load_tasks


@dataclass(frozen=True)
class Benchmark:
    """A benchmark on the Hugging Face Hub.

    Attributes:
        name: Its name here.
        repository: Its dataset on the Hub.
        subset: Which of the dataset's configurations.
        split: Which split.
        size: How many tasks it has.
        question_field: The question.
        answer_field: The ground truth.
        read_answer: Makes the ground truth of the answer field.
    """

    name: str
    repository: str
    subset: str | None
    split: str
    size: int
    question_field: str
    answer_field: str
    read_answer: Callable[[Any], Any] = str


def gsm8k_answer(text: Any) -> str:
    """What stands behind `####` in a worked solution, without thousands separators.

    Raises:
        TaskError: There is no `####`.
    """
    _, mark, answer = str(text).rpartition("####")
    if not mark or not answer.strip():
        raise TaskError("its answer has no '#### result'")
    return answer.strip().replace(",", "")


BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("aime-2024", "HuggingFaceH4/aime_2024", None, "train", 30, "problem", "answer"),
        Benchmark("aime-2025", "math-ai/aime25", None, "test", 30, "problem", "answer"),
        Benchmark("gsm8k", "openai/gsm8k", "main", "test", 1319, "question", "answer", gsm8k_answer),
        Benchmark("math-500", "HuggingFaceH4/MATH-500", None, "test", 500, "problem", "answer"),
    )
}


def load_benchmark(
    name: str,
    path: str | os.PathLike[str] | None = None,
    *,
    limit: int | None = None,
    check_truth: Callable[[Any], None] | None = None,
) -> list[Action]:
    """The tasks of a benchmark.

    Args:
        name: One of `BENCHMARKS`.
        path: A local file of its rows, with the fields that it has on the Hub or with their usual names; None to load
            it with the package `datasets`, from its cache or from the Hub.
        limit: The first so many tasks only; None for all.
        check_truth: As in `load_tasks`.

    Raises:
        TaskError: There is no such benchmark, `datasets` is not installed or cannot load it, or a row is no task.
    """
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        raise TaskError(f"there is no benchmark {name!r}: {', '.join(BENCHMARKS)}")
    if path is not None:

        def read_answer(answer: Any) -> Any:
            # A local file may have the bare results already.
            return benchmark.read_answer(answer) if "####" in str(answer) else str(answer)

        return load_tasks(path, read_answer=read_answer, limit=limit, check_truth=check_truth)
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise TaskError(
            f"{name} is loaded with the package datasets: pip install -e '.[datasets]', or name a local file"
        ) from error
    try:
        rows = load_dataset(benchmark.repository, benchmark.subset, split=benchmark.split)
    except Exception as error:  # whatever the Hub, the network or the cache raises
        told = " ".join(str(error).split())
        raise TaskError(f"{benchmark.repository} cannot be loaded: {type(error).__name__}: {told}") from error
    return actions_of(
        rows,
        benchmark.question_field,
        benchmark.answer_field,
        source=benchmark.repository,
        read_answer=benchmark.read_answer,
        limit=limit,
        check_truth=check_truth,
    )
