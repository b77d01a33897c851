"""Tasks: benchmarks by name, files and tables. Rows become actions; one that is no task is refused with its place."""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.types import Action, TaskContext

QUESTION_FIELDS = ("question", "problem", "prompt", "input", "message")
ANSWER_FIELDS = ("answer", "ground_truth", "label", "target", "expected_answer")
ID_FIELDS = ("id", "unique_id", "task_id", "problem_id")


class TaskError(ValueError):
    """A file has no tasks, or a row of it is none."""


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
        raise TaskError(f"{benchmark.repository} cannot be loaded: {type(error).__name__}: {_line(error)}") from error
    return _actions(
        _numbered(rows),
        benchmark.repository,
        (benchmark.question_field, benchmark.answer_field, None),
        read_answer=benchmark.read_answer,
        limit=limit,
        check_truth=check_truth,
    )


# --- files and tables ---


def load_tasks(
    path: str | os.PathLike[str],
    *,
    question_field: str | None = None,
    answer_field: str | None = None,
    id_field: str | None = None,
    needs_answer: bool = True,
    read_answer: Callable[[Any], Any] | None = None,
    limit: int | None = None,
    check_truth: Callable[[Any], None] | None = None,
) -> list[Action]:
    """The tasks of a file.

    JSON lines (`.jsonl`), a JSON list (`.json`), a table whose first line names its fields (`.csv`, `.tsv`), or Parquet
    (`.parquet`, needs pyarrow).

    Fields are looked for under their usual names, whatever their case, if none is named; `a.b` is the field `b` of the
    object `a`. All further fields are kept in the task's context. A row with `message` and `task_context` is taken as
    an `Action` as it is.

    Args:
        path: The file.
        question_field: Which field is the question: text, or a chat list.
        answer_field: Which field is the ground truth.
        id_field: Which field names the task; without one it is named by its content.
        needs_answer: Whether a row without an answer is refused.
        read_answer: Makes the ground truth of a row's answer (None, where it may be without one).
        limit: The first so many tasks only; None for all.
        check_truth: Raises a ValueError for a ground truth that cannot be compared with: a reward's `check_truth`.

    Raises:
        TaskError: The file cannot be read, is empty, or a row is no task; the message has its line, or its number from
            1 where a file has no lines.
    """
    path = Path(path)
    return _actions(
        _rows(path),
        str(path),
        (question_field, answer_field, id_field),
        needs_answer=needs_answer,
        read_answer=read_answer,
        limit=limit,
        check_truth=check_truth,
    )


Fields = tuple["str | None", "str | None", "str | None"]
"""Which field of a row is the question, the answer and the id; None to look for it under its usual names."""


def _actions(
    rows: Iterable[tuple[str, Any]],
    source: str,
    fields: Fields,
    *,
    needs_answer: bool = True,
    read_answer: Callable[[Any], Any] | None,
    limit: int | None,
    check_truth: Callable[[Any], None] | None,
) -> list[Action]:
    """The tasks of rows, each with its place for messages."""
    actions: list[Action] = []
    for place, row in itertools.islice(rows, limit):
        try:
            if not isinstance(row, Mapping):
                raise TaskError("not an object")
            action = _action(row, fields, needs_answer, read_answer)
            if check_truth is not None:
                check_truth(action.task_context.ground_truth)
        except ValueError as error:
            raise TaskError(f"{source}, {place}: {_line(error)}") from error
        actions.append(action)
    if not actions:
        raise TaskError(f"{source}: no tasks in it")
    return actions


def _action(
    row: Mapping[str, Any],
    fields: Fields,
    needs_answer: bool,
    read_answer: Callable[[Any], Any] | None,
) -> Action:
    if "message" in row and "task_context" in row and not any(fields):
        action = Action.model_validate(dict(row))
        context = action.task_context
        if needs_answer and _is_missing(context.ground_truth):
            raise TaskError("no ground_truth in its task_context")
        if read_answer is not None:
            context.ground_truth = read_answer(context.ground_truth)
        return action
    question_name, question = _field(row, fields[0], QUESTION_FIELDS, "question")
    answer_name, answer = _field(row, fields[1], ANSWER_FIELDS, "answer", required=needs_answer)
    id_name, task_id = _field(row, fields[2], ID_FIELDS, "id", required=fields[2] is not None)
    if not isinstance(question, str | list | dict):
        raise TaskError(f"{question_name} is no text and no chat: {question!r:.80}")
    if task_id is not None and not isinstance(task_id, str | int):
        task_id = str(task_id)
    taken = {question_name, answer_name, id_name, "id", "ground_truth", "conversation_history"}
    further = {name: value for name, value in row.items() if name not in taken}
    if read_answer is not None:
        answer = read_answer(answer)
    history = row.get("conversation_history") or []
    context = TaskContext(id=task_id, ground_truth=answer, conversation_history=history, **further)
    return Action(message=question, task_context=context)


def _field(
    row: Mapping[str, Any], named: str | None, usual: Sequence[str], what: str, *, required: bool = True
) -> tuple[str | None, Any]:
    """The name and value of a field; (None, None) if it is not there and need not be."""
    name = named
    if named is None:
        lower = {key.lower(): key for key in reversed(list(row))}
        name = next((lower[one] for one in usual if one in lower), None)
    value: Any = None if name is None else row.get(name)
    if value is None and named is not None and "." in named:
        value = row
        for part in named.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if not _is_missing(value):
        return name, value
    if not required:
        return name, None
    if name is not None and (named is None or name in row):
        raise TaskError(f"its {what} is empty (field {name!r})")
    looked = repr(named) if named is not None else ", ".join(usual)
    raise TaskError(f"no {what}: looked for {looked} among {', '.join(map(str, row)) or 'no fields'}")


def _is_missing(value: Any) -> bool:
    return (
        value is None
        or (isinstance(value, str | list | dict) and not value)
        or (isinstance(value, str) and value.isspace())
    )


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file, each with its place in it."""
    try:
        if path.suffix == ".parquet":
            try:
                from pyarrow import parquet
            except ImportError as error:
                raise TaskError(f"{path}: Parquet files need pyarrow: pip install -e '.[datasets]'") from error
            if not path.is_file():
                raise TaskError(f"{path}: no such file")
            try:
                table = parquet.read_table(path).to_pylist()
            except ValueError as error:  # pyarrow's own errors are
                raise TaskError(f"{path}: not Parquet: {_line(error)}") from error
            yield from _numbered(table)
        elif path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, list):
                raise TaskError(f"{path}: a .json file of tasks holds one list")
            yield from _numbered(content)
        elif path.suffix in (".jsonl", ".ndjson"):
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    try:
                        yield f"line {number}", json.loads(line)
                    except ValueError as error:
                        raise TaskError(f"{path}, line {number}: not JSON: {error}") from error
        elif path.suffix in (".csv", ".tsv"):
            with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets begin UTF-8 with a mark
                reader = csv.DictReader(file, delimiter="," if path.suffix == ".csv" else "\t", strict=True)
                limit = csv.field_size_limit(1 << 30)
                try:
                    for row in reader:
                        place = f"line {reader.line_num}"  # the last of those that a row spans
                        if None in row or None in row.values():
                            count = len(reader.fieldnames or ())
                            raise TaskError(f"{path}, {place}: it has not the {count} fields that the first line names")
                        yield place, row
                except csv.Error as error:
                    raise TaskError(f"{path}, line {reader.line_num + 1}: not CSV: {error}") from error
                finally:
                    csv.field_size_limit(limit)
        else:
            raise TaskError(f"{path}: tasks are read from .jsonl, .json, .csv, .tsv and .parquet files")
    except OSError as error:
        raise TaskError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise TaskError(f"{path}: not JSON: {error}") from error


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
