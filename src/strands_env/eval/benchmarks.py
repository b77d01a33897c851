"""Tasks from benchmarks and files. Each row becomes an action; an invalid row is refused with its position."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from strands_sglang.shown import one_line

from ..core.environment import read_conversation
from ..core.types import Action, TaskContext

QUESTION_FIELDS = ("question", "problem", "prompt", "input", "message")
ANSWER_FIELDS = ("answer", "ground_truth", "label", "target", "expected_answer")
ID_FIELDS = ("id", "unique_id", "task_id", "problem_id")


class TaskError(ValueError):
    """A benchmark or a file cannot be loaded, has no tasks, or has an invalid row."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark on the Hugging Face Hub.

    Attributes:
        name: Name in this package and on the command line.
        repository: Dataset on the Hub.
        subset: Configuration of the dataset; None for the default.
        split: Split of the dataset.
        size: Number of tasks.
        question_field: Field with the question.
        answer_field: Field with the answer.
        read_answer: Function that converts the answer to the ground truth.
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
    """Return what follows `####` in a worked solution of GSM8K, without thousands separators.

    Args:
        text: The solution.

    Raises:
        TaskError: The solution has no `####` with a result.
    """
    _, mark, answer = str(text).rpartition("####")
    if not mark or not answer.strip():
        raise TaskError("the answer has no '#### result'")
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
    """Load the tasks of a benchmark.

    Args:
        name: Name of the benchmark: `aime-2024`, `aime-2025`, `gsm8k` or `math-500`.
        path: Local file with its rows, or a folder of files as on the Hub, in the fields of the Hub or in fields with
            usual names; None to load it with the package `datasets` (extra `datasets`), from its cache or from the Hub.
        limit: Maximum number of tasks to load, from the start; None for all.
        check_truth: Function that checks each ground truth, as for `load_tasks`.

    Raises:
        TaskError: The benchmark is unknown, `datasets` is not installed or cannot load it, or a row is invalid.
    """
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        raise TaskError(f"there is no benchmark {name!r}; choose one of {', '.join(BENCHMARKS)}")
    if path is not None:

        def read_answer(answer: Any) -> Any:
            # A local file may contain only the results.
            return benchmark.read_answer(answer) if "####" in str(answer) else str(answer)

        of_subset = Path(path) / (benchmark.subset or "")
        path = of_subset if of_subset.is_dir() else path
        split = benchmark.split if Path(path).is_dir() else None
        return load_tasks(path, split=split, read_answer=read_answer, limit=limit, check_truth=check_truth)
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise TaskError(
            f"loading {name} needs the package datasets: pip install -e '.[datasets]', or pass a local file"
        ) from error
    try:
        rows = load_dataset(benchmark.repository, benchmark.subset, split=benchmark.split)
    except Exception as error:  # whatever the Hub, the network or the cache raises
        raise TaskError(
            f"{benchmark.repository} cannot be loaded: {type(error).__name__}: {one_line(error)}"
        ) from error
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
    split: str | None = None,
    needs_answer: bool = True,
    read_answer: Callable[[Any], Any] | None = None,
    limit: int | None = None,
    check_truth: Callable[[Any], None] | None = None,
) -> list[Action]:
    """Load tasks from a file, or from a folder of files.

    Supported formats are JSON Lines (`.jsonl`, `.ndjson`), a JSON list or JSON Lines (`.json`), tables whose first line
    names the fields (`.csv`, `.tsv`), and Parquet (`.parquet`; needs pyarrow). Files of text may be compressed
    (`.jsonl.gz`). A field name `a.b` means the field `b` of the object `a`. Additional fields are kept in the task's
    context. A row with `message` and `task_context` is an `Action` and is used unchanged.

    A folder with a `task.toml`, or with folders that have one, has tasks of Harbor.

    Another folder has the files of one dataset, as a copy from the Hugging Face Hub does. If the header of its
    `README.md` names the files of each split (`configs`), these are read. Else files and folders are named after their
    split (`test.jsonl`, `data/train-00000-of-00002.parquet`, `validation/a.csv`); parts are read in the order of their
    names.

    Args:
        path: File or folder to read.
        question_field: Field with the question, a string or a chat. None for the first of `question`, `problem`,
            `prompt`, `input` and `message`, in any case.
        answer_field: Field with the ground truth. None for the first of `answer`, `ground_truth`, `label`, `target` and
            `expected_answer`, in any case.
        id_field: Field with the id of the task. None for the first of `id`, `unique_id`, `task_id` and `problem_id`, in
            any case; without one of these, the task gets an id from its content.
        split: For a folder, the split to load; None if it has only one.
        needs_answer: Whether a row without an answer is an error.
        read_answer: Function that converts a row's answer to the ground truth. It receives None if the row has none.
        limit: Maximum number of tasks to load, from the start; None for all.
        check_truth: Function that raises a ValueError for an unusable ground truth, such as a reward function's
            `check_truth`.

    Returns:
        The tasks, in the order of the rows.

    Raises:
        TaskError: The file cannot be read or has no tasks, or a row is invalid. The message contains its line, or its
            number from 1 in files without lines. Or the folder has no such split, or several splits or datasets to
            choose from.

    Examples:
        >>> tasks = load_tasks("tasks.jsonl", check_truth=reward_fn.check_truth)
    """
    path = Path(path)
    if path.is_dir() and next(itertools.chain(path.glob("task.toml"), path.glob("*/task.toml")), None):
        from ..harbor import harbor_tasks

        return harbor_tasks(path)[:limit]
    if split is not None and not path.is_dir():
        raise TaskError(f"{path}: only a folder has splits, such as {split}")
    rows = _rows(path) if not path.is_dir() else _rows_of_folder(path, split)
    return _actions(
        rows,
        str(path),
        (question_field, answer_field, id_field),
        needs_answer=needs_answer,
        read_answer=read_answer,
        limit=limit,
        check_truth=check_truth,
    )


def checked(
    actions: Iterable[Action], source: str, *, limit: int | None, check_truth: Callable[[Any], None] | None
) -> list[Action]:
    """Check the ground truths of tasks.

    Args:
        actions: The tasks.
        source: Where they are from, for errors.
        limit: Maximum number of tasks to use, from the start; None for all.
        check_truth: Function that checks each ground truth, as for `load_tasks`.

    Raises:
        TaskError: There are no tasks, or a ground truth is unusable.
    """
    tasks: list[Action] = []
    for number, action in enumerate(itertools.islice(actions, limit), 1):
        try:
            if check_truth is not None:
                check_truth(action.task_context.ground_truth)
        except ValueError as error:
            raise TaskError(f"{source}, task {number}: {one_line(error)}") from error
        tasks.append(action)
    if not tasks:
        raise TaskError(f"{source}: it has no tasks")
    return tasks


Fields = tuple["str | None", "str | None", "str | None"]
"""Fields with the question, the answer and the id; None to look for a usual name."""


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
    """Convert rows, each with its position for messages, to tasks."""
    actions: list[Action] = []
    for place, row in itertools.islice(rows, limit):
        try:
            if not isinstance(row, Mapping):
                raise TaskError("not an object")
            action = _action(row, fields, needs_answer, read_answer)
            read_conversation(action)
            if check_truth is not None:
                check_truth(action.task_context.ground_truth)
        except ValueError as error:
            raise TaskError(f"{source}, {place}: {one_line(error)}") from error
        actions.append(action)
    if not actions:
        raise TaskError(f"{source}: the file has no tasks")
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
            raise TaskError("task_context has no ground_truth")
        if read_answer is not None:
            context.ground_truth = read_answer(context.ground_truth)
        return action
    question_name, question = _field(row, fields[0], QUESTION_FIELDS, "question")
    answer_name, answer = _field(row, fields[1], ANSWER_FIELDS, "answer", required=needs_answer)
    id_name, task_id = _field(row, fields[2], ID_FIELDS, "id", required=fields[2] is not None)
    if not isinstance(question, str | list | dict):
        raise TaskError(f"{question_name} must be a string or a chat, not {question!r:.80}")
    if task_id is not None and not isinstance(task_id, str | int):
        task_id = str(task_id)
    used = {question_name, answer_name, id_name, "id", "ground_truth", "conversation_history"}
    further = {name: value for name, value in row.items() if name not in used}
    if read_answer is not None:
        answer = read_answer(answer)
    history = row.get("conversation_history") or []
    context = TaskContext(id=task_id, ground_truth=answer, conversation_history=history, **further)
    return Action(message=question, task_context=context)


def _field(
    row: Mapping[str, Any], named: str | None, usual: Sequence[str], what: str, *, required: bool = True
) -> tuple[str | None, Any]:
    """Return name and value of a field; (None, None) if an optional field is missing."""
    name = named
    if named is None:
        lower = {key.lower(): key for key in reversed(list(row))}
        name = next((lower[column] for column in usual if column in lower), None)
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
        raise TaskError(f"the {what} is empty (field {name!r})")
    expected = repr(named) if named is not None else ", ".join(usual)
    among = ", ".join(map(str, row)) or "no fields"
    raise TaskError(f"no {what}: looked for {expected} among {among}; name the field with {what}_field")


def _is_missing(value: Any) -> bool:
    return (
        value is None
        or (isinstance(value, str | list | dict) and not value)
        or (isinstance(value, str) and value.isspace())
    )


_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")

_NOT_TASKS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""What the package `datasets` stores next to the data."""

_SPLITS = {"train": "train(?:ing)?", "validation": "(?:validation|valid|val|dev)", "test": "(?:test|testing|eval)"}
"""Patterns by split, as words in names of files and folders (https://huggingface.co/docs/hub/datasets-file-names-and-splits)."""


_PACKED = (".arrow", ".zip", ".tar", ".tgz", ".zst", ".bz2", ".xz", ".7z", ".lz4")
"""Files that may be the ones of a split, and cannot be read."""


def _kind(path: Path) -> str:
    """The suffix of a file, without that of its compression."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def _files(folder: Path, split: str | None) -> list[Path]:
    """Return the data files of one split of a folder.

    Raises:
        TaskError: There are none, or it is not clear which.
    """
    declared = _declared_files(folder, split)
    if declared is not None:
        return declared

    def is_of(pattern: str, name: Path) -> bool:
        return re.search(rf"(?<![a-z0-9]){pattern}(?![a-z0-9])", str(name), re.IGNORECASE) is not None

    # Hidden files are caches, as of downloads from the Hub.
    names = {file: file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file()}
    names = {file: name for file, name in names.items() if not any(part.startswith(".") for part in name.parts)}
    names = {
        file: name
        for file, name in names.items()
        if (_kind(file) in _SUFFIXES and file.name not in _NOT_TASKS)
        or (file.suffix in _PACKED and any(is_of(pattern, name) for pattern in (*_SPLITS.values(), split) if pattern))
    }
    if not names:
        raise TaskError(f"{folder}: no data files; looked for {', '.join(_SUFFIXES)}")
    present = [known for known, pattern in _SPLITS.items() if any(is_of(pattern, name) for name in names.values())]
    if split is None and len(present) > 1:
        raise TaskError(f"{folder} has the splits {', '.join(present)}: pass split={present[-1]}")
    if split is not None:
        pattern = _SPLITS.get(split, re.escape(split))
        chosen = {file: name for file, name in names.items() if is_of(pattern, name)}
        if not chosen:
            shown = ", ".join(str(name) for name in list(names.values())[:5])
            raise TaskError(f"{folder}: no file of the split {split}, only {shown}")
        names = chosen
    kinds = sorted({_kind(file) + (".gz" if file.suffix == ".gz" else "") for file in names})
    if len(kinds) > 1:
        raise TaskError(f"{folder} has the same tasks in several formats ({', '.join(kinds)}): name one file or folder")
    splits = re.compile(f"(?:{'|'.join([*_SPLITS.values(), *([re.escape(split)] if split else [])])})", re.IGNORECASE)
    parents = sorted(
        {"/".join(part for part in name.parts[:-1] if not splits.fullmatch(part)) for name in names.values()}
    )
    if len(parents) > 1:
        shown = ", ".join(parent or "." for parent in parents[:5])
        raise TaskError(f"{folder} has several datasets ({shown}): name the folder of one")
    return list(names)


def _declared_files(folder: Path, split: str | None) -> list[Path] | None:
    """Return the data files of one split that a dataset's card names; None if it names none.

    The header of the card is that of https://huggingface.co/docs/hub/datasets-manual-configuration.

    Raises:
        TaskError: It is not clear which split or dataset, a file is not there, or the header is damaged.
    """
    card = folder / "README.md"
    if not card.is_file():
        return None
    from huggingface_hub import metadata_load

    try:
        header = metadata_load(card) or {}
        configs = [entry for entry in header.get("configs") or () if "data_files" in entry]
        named = {str(entry.get("config_name")): entry for entry in configs}
        default = [name for name, entry in named.items() if entry.get("default") or len(named) == 1] or ["default"]
        if not named:
            return None
        if default[0] not in named:
            raise TaskError(f"{card} names several datasets ({', '.join(named)}): name the folder or file of one")
        config = named[default[0]]
        files = config["data_files"]
        if isinstance(files, list) and all(isinstance(entry, Mapping) for entry in files):
            files = {entry["split"]: entry["path"] for entry in files}
        splits = {
            str(name): paths for name, paths in (files if isinstance(files, Mapping) else {"train": files}).items()
        }
        splits = {name: [paths] if isinstance(paths, str) else list(paths) for name, paths in splits.items()}
        base = folder / config.get("data_dir", "")
    except TaskError:
        raise
    except Exception as error:  # whatever YAML and its content make happen
        raise TaskError(f"{card}: its header cannot be read: {one_line(error)}") from error
    if split is None and len(splits) > 1:
        raise TaskError(f"{folder} has the splits {', '.join(splits)}: pass split={list(splits)[-1]}")
    name = next(iter(splits)) if split is None else split
    if name not in splits:
        raise TaskError(f"{folder}: {card.name} names no split {name}, only {', '.join(splits)}")
    found: dict[Path, None] = {}
    for pattern in splits[name]:
        if "://" in pattern or ".." in Path(pattern).parts or Path(pattern).is_absolute():
            raise TaskError(f"{folder}: {pattern}, which {card.name} names, is not in the folder")
        matches = base.glob(f"{pattern}/*" if pattern.endswith("**") else pattern)
        files = sorted(file for file in matches if file.is_file() and not file.name.startswith("."))
        if not files:
            raise TaskError(f"{folder}: there is no file {pattern}, which {card.name} names")
        found.update(dict.fromkeys(files))
    return list(found)


def _rows_of_folder(folder: Path, split: str | None) -> Iterator[tuple[str, Any]]:
    for file in _files(folder, split):
        for place, row in _rows(file):
            yield f"{file.relative_to(folder)}, {place}", row


def _opened(path: Path, newline: str | None = None) -> TextIO:
    """Open a text file that may be compressed, and may begin with a byte order mark."""
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "rt", encoding="utf-8-sig", newline=newline))
    return path.open(encoding="utf-8-sig", newline=newline)


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Read the rows of a file, each with its position."""
    kind = _kind(path)
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
            except ValueError as error:  # base class of pyarrow's errors
                raise TaskError(f"{path}: not Parquet: {one_line(error)}") from error
            yield from _numbered(table)
        elif kind == ".json":
            with _opened(path) as file:
                content = file.read()
            try:
                listed = json.loads(content)
            except RecursionError as error:
                raise TaskError(f"{path}: not JSON: {error}") from error
            except json.JSONDecodeError:
                if not re.match(r"\s*\{.*\}\s*?\n\s*\{", content):
                    raise
                yield from _json_lines(path)  # as many datasets on the Hub are named
                return
            if not isinstance(listed, list):
                raise TaskError(f"{path}: a .json file of tasks must contain a list")
            yield from _numbered(listed)
        elif kind in (".jsonl", ".ndjson"):
            yield from _json_lines(path)
        elif kind in (".csv", ".tsv"):
            with _opened(path, "") as file:
                reader = csv.DictReader(file, delimiter="," if kind == ".csv" else "\t", strict=True)
                limit = csv.field_size_limit(1 << 30)
                try:
                    for row in reader:
                        place = f"line {reader.line_num}"  # the last line of the row
                        if None in row or None in row.values():
                            count = len(reader.fieldnames or ())
                            raise TaskError(f"{path}, {place}: the row needs the {count} fields of the first line")
                        yield place, row
                except csv.Error as error:
                    raise TaskError(f"{path}, line {reader.line_num + 1}: not CSV: {error}") from error
                finally:
                    csv.field_size_limit(limit)
        else:
            raise TaskError(
                f"{path}: unknown file type; use .jsonl, .json, .csv, .tsv or .parquet, as it is or with .gz"
            )
    except OSError as error:
        raise TaskError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise TaskError(f"{path}: not JSON: {error}") from error
    except (EOFError, zlib.error) as error:
        raise TaskError(f"{path}: damaged: {error}") from error


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TaskError(f"{path}, line {number}: not JSON: {error}") from error


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))
