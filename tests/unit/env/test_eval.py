"""Evaluations: benchmarks, the run, its file, its metrics."""

import asyncio
import copy
import dataclasses
import errno
import gzip
import itertools
import json
import math
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from types import ModuleType

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from strands_env.core import (
    Action,
    Environment,
    Observation,
    RewardResult,
    StepResult,
    TaskContext,
    TerminationReason,
    TokenObservation,
)
from strands_env.eval import (
    CheckpointError,
    DuplicateTaskError,
    EvaluationStoppedError,
    Evaluator,
    answer_of,
    read_results,
    standard_metrics,
)
from strands_env.eval.benchmarks import BENCHMARKS, TaskError, load_benchmark, load_tasks
from strands_env.eval.checkpoint import (
    CheckpointFile,
    Run,
    decode,
    digest,
    encode,
    lock_file,
    read_record,
    read_records,
)
from strands_env.eval.evaluator import Progress
from strands_env.eval.metrics import (
    compare,
    comparison_lines,
    end_lines,
    majority_at_k,
    mean_bounds,
    mean_over_prompts,
    pass_at_k,
    pass_hat_k,
    sample_sizes,
    shortened,
)
from strands_sglang import Outage, SGLangConnectionError
from support.agents import idle_for
from support.environments import Contains, StubEnvironment, lines, sample, step_result, tasks

# === benchmarks ===


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"question": "1+1?", "answer": "2", "id": "x"},
        {"Problem": "1+1?", "Answer": "2", "ID": "x"},
        {"prompt": "1+1?", "label": "2", "task_id": "x"},
        {"message": "1+1?", "task_context": {"id": "x", "ground_truth": "2"}},
    ],
)
def test_usual_fields_are_found(tmp_path, row):
    (action,) = load_tasks(write(tmp_path / "t.jsonl", [row]))
    assert (action.message, action.task_context.ground_truth, action.task_context.id) == ("1+1?", "2", "x")


def test_fields_can_be_named_and_others_are_kept(tmp_path):
    row = {"q": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": 0}, "level": 5}
    (action,) = load_tasks(
        write(tmp_path / "t.jsonl", [row]), question_field="q", answer_field="reward_model.ground_truth"
    )
    assert action.message == row["q"] and action.task_context.ground_truth == 0
    assert action.task_context.id is None and action.task_context.level == 5
    numbered = load_tasks(write(tmp_path / "n.jsonl", [{"question": "?", "answer": "!", "id": i} for i in (7, 0.5)]))
    assert [action.task_context.id for action in numbered] == [7, "0.5"]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"answer": "2"}, "line 2: no question: looked for question, problem"),
        ({"question": " ", "answer": "2"}, "line 2: the question is empty"),
        ({"question": "?"}, "line 2: no answer"),
        ({"question": "?", "answer": None}, "line 2: the answer is empty"),
        ({"question": 7, "answer": "2"}, "line 2: question must be a string"),
        (["question"], "line 2: not an object"),
        ({"question": [{"role": "assistant", "content": "2"}], "answer": "2"}, "line 2: the last message .* role user"),
    ],
)
def test_invalid_row_is_refused_with_its_line(tmp_path, row, told):
    path = write(tmp_path / "t.jsonl", [{"question": "?", "answer": 0}, row])
    with pytest.raises(TaskError, match=told):
        load_tasks(path)


def test_answers_may_be_missing_if_not_needed(tmp_path):
    assert len(load_tasks(write(tmp_path / "t.jsonl", [{"question": "?"}]), needs_answer=False)) == 1


def hub_copy(folder, *names):
    """A copy of a dataset of the Hub: each file has one task, whose question is the file's name."""
    for name in ("README.md", ".cache/huggingface/x.json", "dataset_infos.json", *names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        table = f"question,answer\n{name},1\n" if name.endswith(".csv") else ""
        (folder / name).write_text(table or json.dumps({"question": name, "answer": "1"}) + "\n")
    return folder


@pytest.mark.parametrize(
    ("names", "split", "read"),
    [
        (["test.jsonl"], None, ["test.jsonl"]),
        (["a.csv", "b.csv"], None, ["a.csv", "b.csv"]),
        (["data/train-00001-of-2.jsonl", "data/train-00000-of-2.jsonl", "data/test-0.jsonl"], "train", [1, 0]),
        (["train/a.csv", "val/b.csv"], "validation", ["val/b.csv"]),
        (["train.tsv", "test_hard.jsonl"], "test_hard", ["test_hard.jsonl"]),
        (["dev.jsonl", "contest.jsonl"], "validation", ["dev.jsonl"]),
    ],
)
def test_a_folder_is_read_as_the_hub_lays_it_out(tmp_path, names, split, read):
    actions = load_tasks(hub_copy(tmp_path, *names), split=split)
    assert [action.message for action in actions] == [names[one] if isinstance(one, int) else one for one in read]


@pytest.mark.parametrize(
    ("names", "split", "told"),
    [
        ([], None, "no data files; looked for .jsonl"),
        (["train.csv", "test.csv"], None, "has the splits train, test: pass split=test"),
        (["train.csv"], "test", "no file of the split test, only train.csv"),
        (["test.csv", "test.jsonl"], "test", "in several formats"),
        (["main/test.csv", "socratic/test.csv"], "test", r"several datasets \(main, socratic\): name the folder"),
    ],
)
def test_a_folder_that_is_not_clear_is_refused(tmp_path, names, split, told):
    with pytest.raises(TaskError, match=told):
        load_tasks(hub_copy(tmp_path, *names), split=split)


CARD = """---
license: mit
configs:
{}
---
# A dataset
"""
TWO_SPLITS = """- config_name: default
  data_files:
  - split: train
    path: a.jsonl
  - split: test
    path: ["parts/*.jsonl", last.csv]"""


@pytest.mark.parametrize(
    ("configs", "split", "read"),
    [
        (TWO_SPLITS, "test", ["parts/0.jsonl", "parts/1.jsonl", "last.csv"]),
        ("- {config_name: x, data_files: last.csv}", None, ["last.csv"]),
        ("- {config_name: x, data_files: [last.csv, a.jsonl]}", "train", ["last.csv", "a.jsonl"]),
        ("- {data_files: {dev: '**/1.jsonl'}, data_dir: parts}", "dev", ["parts/1.jsonl"]),
        ("- {config_name: x, data_files: a.jsonl}\n- {config_name: y, data_files: last.csv, default: true}", None, [
            "last.csv"
        ]),
        ("- {config_name: default, data_files: a.jsonl}\n- {config_name: y, data_files: last.csv}", None, ["a.jsonl"]),
    ],
)  # fmt: skip
def test_the_card_of_a_dataset_names_its_files(tmp_path, configs, split, read):
    hub_copy(tmp_path, "a.jsonl", "parts/0.jsonl", "parts/1.jsonl", "last.csv", "test.jsonl")
    (tmp_path / "README.md").write_text(CARD.format(configs))
    assert [action.message for action in load_tasks(tmp_path, split=split)] == read


@pytest.mark.parametrize(
    ("configs", "split", "told"),
    [
        (TWO_SPLITS, None, "has the splits train, test: pass split=test"),
        (TWO_SPLITS, "dev", "README.md names no split dev, only train, test"),
        (TWO_SPLITS, "test", "there is no file last.csv, which README.md names"),
        ("- {data_files: ../x.jsonl}", None, "not in the folder"),
        ("- {data_files: 'https://h/x.jsonl'}", None, "not in the folder"),
        ("- {config_name: x, data_files: a}\n- {config_name: y, data_files: b}", None, r"several datasets \(x, y\)"),
        ("- {data_files: [{path: a.jsonl}]}", None, "its header cannot be read: 'split'"),
        ("- {data_files: 7}", None, "its header cannot be read"),
        ("- {", None, "its header cannot be read"),
    ],
)
def test_a_card_that_is_not_clear_is_refused(tmp_path, configs, split, told):
    hub_copy(tmp_path, "a.jsonl", "parts/0.jsonl")
    (tmp_path / "README.md").write_text(CARD.format(configs))
    with pytest.raises(TaskError, match=told):
        load_tasks(tmp_path, split=split)


def test_compressed_files_are_read(tmp_path):
    for name, text in (
        ("train.jsonl.gz", '{"question": "é", "answer": "1"}\n'),
        ("test.csv.gz", "\ufeffquestion,answer\né,1\n"),
        ("dev.json.gz", '[{"question": "é", "answer": "1"}]'),
    ):
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        assert [action.message for action in load_tasks(tmp_path / name)] == ["é"]
    for split in ("train", "test", "validation"):
        assert [action.message for action in load_tasks(tmp_path, split=split)] == ["é"]
    whole = (tmp_path / "train.jsonl.gz").read_bytes()
    for content, told in (
        (whole[:-9], "damaged"),
        (b"{}", "Not a gzipped file"),
        (whole[:10] + b"\xff" * 9, "damaged"),
    ):
        (tmp_path / "train.jsonl.gz").write_bytes(content)
        with pytest.raises(TaskError, match=told):
            load_tasks(tmp_path / "train.jsonl.gz")
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(TaskError, match=r"several formats \(\.jsonl, \.jsonl\.gz\)"):
        load_tasks(tmp_path, split="train")


def test_a_packed_split_is_not_passed_over_for_another(tmp_path):
    hub_copy(tmp_path, "train.jsonl", "test.zip", "images.zip")
    with pytest.raises(TaskError, match="has the splits train, test"):
        load_tasks(tmp_path)
    with pytest.raises(TaskError, match=r"test\.zip: unknown file type"):
        load_tasks(tmp_path, split="test")
    assert [action.message for action in load_tasks(tmp_path, split="train")] == ["train.jsonl"]


def test_a_wrong_row_of_a_folder_is_named_with_its_file(tmp_path):
    write(hub_copy(tmp_path) / "test.jsonl", [{"question": "?", "answer": 0}, {"question": "?"}])
    with pytest.raises(TaskError, match=r"test\.jsonl, line 2: no answer"):
        load_tasks(tmp_path)
    with pytest.raises(TaskError, match="only a folder has splits"):
        load_tasks(tmp_path / "test.jsonl", split="test")


def test_a_copy_of_a_benchmark_may_be_a_folder(tmp_path):
    folder = hub_copy(tmp_path / "one", "train.jsonl", "test.jsonl")
    assert [action.message for action in load_benchmark("gsm8k", folder)] == ["test.jsonl"]
    folder = hub_copy(tmp_path / "two", "main/test.csv", "socratic/test.csv")
    assert [action.message for action in load_benchmark("gsm8k", folder)] == ["main/test.csv"]


@pytest.mark.parametrize(
    ("name", "content"), [("t.jsonl", "{}\n{}\n"), ("t.json", "[{}, {}]"), ("t.jsonl.gz", "{}\n{}")]
)
def test_a_byte_order_mark_is_no_part_of_json(tmp_path, name, content):
    row = '{"question": "?", "answer": "1"}'
    data = content.replace("{}", row).encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert len(load_tasks(tmp_path / name)) == 2


def test_json_list_is_read(tmp_path):
    (tmp_path / "t.json").write_text('[{"question": "?", "answer": "1"}]')
    assert len(load_tasks(tmp_path / "t.json")) == 1
    write(tmp_path / "lines.json", [{"question": "?", "answer": "1"}] * 3)
    assert len(load_tasks(tmp_path / "lines.json")) == 3


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("t.jsonl", "{broken\n", "line 1: not JSON"),
        ("t.jsonl", "", "the file has no tasks"),
        ("t.json", "{}", "must contain a list"),
        ("t.txt", "a,b", "unknown file type"),
        ("t.csv", "", "the file has no tasks"),
        ("t.csv", "question,answer\n", "the file has no tasks"),
        ("t.csv", "question,answer\n1,2\n1\n", "line 3: the row needs the 2 fields"),
        ("t.csv", "question,answer\n1,2,3\n", "line 2: the row needs the 2 fields"),
        ("t.csv", 'question,answer\n"1"x,2\n', "line 2: not CSV"),
        ("t.csv", "question,solution\n1,2\n", "line 2: no answer"),
        ("t.json", "[", "not JSON"),
        ("t.json", '{"question": "?", "answer": 1}\n{"question"', "line 2: not JSON"),
    ],
)
def test_file_without_tasks_is_refused(tmp_path, name, content, told):
    (tmp_path / name).write_text(content)
    with pytest.raises(TaskError, match=told):
        load_tasks(tmp_path / name)
    with pytest.raises(TaskError, match="No such file"):
        load_tasks(tmp_path / f"missing-{name}") if name != "t.txt" else load_tasks(tmp_path / "missing.jsonl")


def test_tables_with_quotes_and_byte_order_mark(tmp_path):
    """Files of spreadsheets lost quoted lines, or their first column."""
    text = '\ufeffid,Question,answer,level\r\nx,"two\nlines, ""quoted""",007,3\r\n,?,½,\r\n'
    (tmp_path / "t.csv").write_text(text, encoding="utf-8", newline="")
    first, second = load_tasks(tmp_path / "t.csv")
    assert first.message == 'two\nlines, "quoted"'
    assert (first.task_context.id, first.task_context.ground_truth, first.task_context.level) == ("x", "007", "3")
    assert (second.task_context.id, second.task_context.ground_truth) == (None, "½")
    (tmp_path / "t.tsv").write_text("question\tanswer\n" + "x" * 200_000 + "\t1,2\n")
    (action,) = load_tasks(tmp_path / "t.tsv")
    assert len(action.message) == 200_000 and action.task_context.ground_truth == "1,2"


def test_unreadable_ground_truth_is_refused_with_file_and_line(tmp_path):
    """A bad ground truth was noticed only after its episodes had run."""

    def check(truth):
        if truth == "?":
            raise ValueError("'?' cannot\nbe read")

    rows = [{"question": "1", "answer": "1"}, {"question": "2", "answer": "?"}]
    path = write(tmp_path / "t.jsonl", rows)
    path.write_text("\n" + path.read_text())
    with pytest.raises(TaskError, match=rf"^{path}, line 3: '\?' cannot be read$"):
        load_tasks(path, check_truth=check)
    assert len(load_tasks(path, check_truth=check, limit=1)) == 1
    (tmp_path / "t.json").write_text(json.dumps(rows))
    with pytest.raises(TaskError, match=r"t.json, row 2: '\?' cannot be read"):
        load_tasks(tmp_path / "t.json", check_truth=check)
    with pytest.raises(TaskError, match=r"line 3: '\?' cannot be read"):
        load_benchmark("math-500", path, check_truth=check)


@pytest.mark.parametrize(
    ("name", "row", "answer"),
    [
        ("aime-2024", {"id": 60, "problem": "?", "solution": "...", "answer": "204", "year": "2024"}, "204"),
        ("aime-2025", {"problem": "?", "answer": 70, "id": "0"}, "70"),
        ("gsm8k", {"question": "?", "answer": "3*6=18\n#### 1,018"}, "1018"),
        ("gsm8k", {"question": "?", "answer": "1018"}, "1018"),
        ("math-500", {"problem": "?", "answer": r"\frac{1}{2}", "unique_id": "test/a/1.json"}, r"\frac{1}{2}"),
    ],
)
def test_benchmarks_are_read_from_a_local_file(tmp_path, name, row, answer):
    (action,) = load_benchmark(name, write(tmp_path / "t.jsonl", [row]))
    assert action.message == "?" and action.task_context.ground_truth == answer


def test_benchmarks_are_loaded_with_datasets(monkeypatch):
    asked = []
    module = ModuleType("datasets")
    rows = {"question": "?", "problem": "?", "answer": "#### 5", "id": 1}

    def load_dataset(path, name, *, split):
        asked.append((path, name, split))
        return [rows]

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    for name in BENCHMARKS:
        assert len(load_benchmark(name)) == 1
    assert ("openai/gsm8k", "main", "test") in asked and len(asked) == 4
    rows["answer"] = "5"
    with pytest.raises(TaskError, match="gsm8k, row 1: the answer has no '#### result'"):
        load_benchmark("gsm8k")


def test_missing_package_and_benchmark_are_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TaskError, match=r"pip install -e '.\[datasets\]', or pass a local file"):
        load_benchmark("gsm8k")
    with pytest.raises(TaskError, match="there is no benchmark 'gsm9k'; choose one of aime-2024"):
        load_benchmark("gsm9k")


# === checkpoint ===


def record(number, size=10):
    return encode({"key": f"k{number}", "text": "x" * size})


async def write_records(path, numbers, size=10):
    file = CheckpointFile(path)
    await asyncio.gather(*(file.append(lambda n=n: record(n, size)) for n in numbers))
    await file.close()
    return file


def keys(path):
    return [one["key"] for _, one in read_records(path)]


async def test_records_are_read_in_the_order_of_writing(tmp_path):
    await write_records(tmp_path / "r.jsonl", range(50))
    assert keys(tmp_path / "r.jsonl") == [f"k{n}" for n in range(50)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data(), count=st.integers(1, 5))
def test_truncated_file_keeps_complete_records_and_grows(tmp_path, data, count):
    path = tmp_path / "cut.jsonl"
    path.write_bytes(b"".join(record(n) for n in range(count)))
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    # A record that lacks only its newline is complete.
    expected = [f"k{n}" for n in range(count) if len(b"".join(record(m) for m in range(n + 1))) - 1 <= cut]
    asyncio.run(write_records(path, [99]))
    assert keys(path) == [*expected, "k99"]
    kept = b"".join(record(n) for n in range(len(expected)))
    assert path.read_bytes() == kept + record(99)


async def test_records_are_acknowledged_after_a_shared_fsync(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    path = tmp_path / "r.jsonl"

    def counted(fd):
        fsync(fd)
        synced.append(path.read_bytes().count(b"\n"))

    file = CheckpointFile(path)
    monkeypatch.setattr(os, "fsync", counted)
    acknowledged = []

    async def one(number):
        await file.append(lambda: record(number))
        acknowledged.append(synced[-1])

    await asyncio.gather(*(one(n) for n in range(100)))
    await file.close()
    assert all(on_disk >= position for position, on_disk in enumerate(acknowledged, 1))
    assert len(synced) <= 3


async def test_record_of_a_cancelled_caller_is_written(tmp_path):
    file = CheckpointFile(tmp_path / "r.jsonl")

    async def one():
        await file.append(lambda: record(1))

    task = asyncio.ensure_future(one())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await file.close()
    assert keys(tmp_path / "r.jsonl") == ["k1"]


async def test_closing_in_a_cancelled_scope_does_not_spin(tmp_path, monkeypatch):
    """A cancel scope cancels again in every iteration of the event loop."""
    path, fsync = tmp_path / "r.jsonl", os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: time.sleep(0.4) or fsync(fd))
    file = CheckpointFile(path)
    written = asyncio.ensure_future(file.append(lambda: record(1)))
    await asyncio.sleep(0)
    with idle_for(0.15), anyio.CancelScope() as scope:
        scope.cancel()
        await file.close()
    await written
    assert keys(path) == ["k1"]


async def test_full_disk_is_a_clear_error_and_keeps_complete_records(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    file = CheckpointFile(path)
    await file.append(lambda: record(1))
    pwrite = os.pwrite

    def full(fd, data, offset):
        if pwrite(fd, data[:7], offset):  # part of it still fits
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="the disk is full; every result reported as finished is kept"):
        await file.append(lambda: record(2))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="disk is full"):
        await file.append(lambda: record(3))
    await file.close()
    assert path.read_bytes() == record(1)


async def test_full_disk_keeps_the_records_that_fit(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    file = CheckpointFile(path)
    pwrite, room = os.pwrite, 2 * len(record(1)) + 5

    def small_disk(fd, data, offset):
        if offset + len(data) > room:
            pwrite(fd, data[: room - offset], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", small_disk)
    ends = await asyncio.gather(*(file.append(lambda n=n: record(n)) for n in range(4)), return_exceptions=True)
    await file.close()
    assert [isinstance(end, CheckpointError) for end in ends] == [False, False, True, True]
    assert path.read_bytes() == record(0) + record(1)


async def test_full_disk_on_which_no_record_can_be_repaired_is_a_clear_error(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    path.write_bytes(record(1)[:-1])  # only its newline is missing

    def full(fd, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"r\.jsonl: No space left on device"):
        CheckpointFile(path)
    assert path.read_bytes() == record(1)[:-1]


async def test_lost_record_of_a_cancelled_caller_is_logged(tmp_path, monkeypatch, caplog):
    path, fsync = tmp_path / "r.jsonl", os.fsync
    file = CheckpointFile(path)
    waiting = [file.append(lambda n=n: record(n)) for n in range(3)]

    def failing(fd):
        fsync(fd)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    waiting[1].cancel()
    await file.close()
    assert [isinstance(one.exception(), CheckpointError) for one in (waiting[0], waiting[2])] == [True, True]
    assert len(caplog.messages) == 1 and "Input/output error" in caplog.text and "later run repeats it" in caplog.text
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "content", [b"question,answer\n1,2\n", b"torn text", b'{"question": "?"}\n', b'{"key":"a"}\nnot ours']
)
def test_file_of_another_kind_is_not_changed(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        CheckpointFile(path)
    assert path.read_bytes() == content


def test_damaged_record_is_reported_with_its_line(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(record(1) + record(2)[:-9] + b"\n" + record(3))
    with pytest.raises(CheckpointError, match="line 2: damaged"):
        list(read_records(path))


def test_second_writer_is_refused(tmp_path):
    lock = lock_file(tmp_path / "r.lock")
    with pytest.raises(CheckpointError, match="another evaluation is writing there"):
        lock_file(tmp_path / "r.lock")
    program = (
        "import sys; from pathlib import Path; from strands_env.eval.checkpoint import lock_file; "
        "lock_file(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "r.lock")]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert "another evaluation is writing there" in refused.stderr
    lock.release()
    assert subprocess.run(command, capture_output=True).returncode == 0
    lock_file(tmp_path / "r.lock").release()


async def test_record_is_read_from_its_position(tmp_path):
    file = CheckpointFile(tmp_path / "r.jsonl")
    places = await asyncio.gather(*(file.append(lambda n=n: record(n, 10 * n)) for n in range(5)))
    places.append(await file.append(lambda: record(5)))
    await file.close()
    assert [read_record(place)["key"] for place in places] == [f"k{n}" for n in range(6)]
    assert [place for place, _ in read_records(tmp_path / "r.jsonl")] == places
    (tmp_path / "r.jsonl").write_bytes(record(1))
    with pytest.raises(CheckpointError, match="has changed"):
        read_record(places[3])


async def test_cost_of_a_record_does_not_grow_with_the_file(tmp_path, monkeypatch):
    """Bytes written per record among the first ten, and after ten thousand: no more than its own."""
    path = tmp_path / "r.jsonl"
    await write_records(path, range(10_000), size=200)
    written = []
    pwrite = os.pwrite
    file = CheckpointFile(path)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: written.append(len(data)) or pwrite(fd, data, offset))
    await file.append(lambda: record(1, 200))
    await file.close()
    assert sum(written) == len(record(1, 200))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
        max_leaves=8,
    )
)
@example({"factorial": math.factorial(30), "least": -(2**63) - 1})
@example(2**64)
def test_json_values_survive_a_round_trip(value):
    assert decode(encode(value)) == value


@given(st.dictionaries(st.text(), st.integers() | st.text(), max_size=5))
def test_equal_values_have_equal_digests(value):
    assert digest(value) == digest(dict(reversed(value.items())))
    assert digest({**value, "": object}) != digest(value)


def test_values_without_a_json_form_become_the_nearest_one():
    import numpy as np

    loop: list = []
    loop.append(loop)
    value = {
        "set": {2, 1},
        "bytes": b"ab",
        "number": np.float32(0.5),
        "array": np.arange(2),
        "big": 1 << 80,
        "half": "\ud800",
        3: "key",
        "inf": float("inf"),
        "object": object,
    }
    digest(value)
    written = decode(encode(value))
    assert written["set"] == [1, 2] and written["bytes"] == {"base64": "YWI="} and written["number"] == 0.5
    assert (
        written["array"] == [0, 1]
        and written["big"] == 1 << 80
        and written["half"] == "\ud800"
        and written["3"] == "key"
    )
    assert written["inf"] is None and "object" in written["object"]
    assert encode(loop).endswith(b"\n")


class Unreadable:
    """Every conversion to text raises."""

    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


def test_values_that_have_no_text_are_written_as_their_type():
    huge = 10**5000  # Python refuses to write so many digits
    value = {"object": Unreadable(), "set": {Unreadable()}, "huge": [huge, -huge], Unreadable(): 1, huge: 2}
    written = decode(encode(value))
    assert "Unreadable" in written["object"] and written["huge"] == [hex(huge), hex(-huge)]
    assert sorted(written.values(), key=str)[:2] == [1, 2]
    assert digest(value) == digest(dict(reversed(value.items())))


# === evaluator ===


def evaluator(stub, **arguments):
    return Evaluator(stub.factory, **{"show_progress": False, **arguments})


def pairs(path):
    return sorted((record["prompt_id"], record["sample_index"]) for record in lines(path))


async def test_the_documented_example_runs():
    class YourEvaluator(Evaluator):
        benchmark_name = "YourBenchmark"

        def load_dataset(self):
            return tasks(4)

    async def env_factory(action):
        return StubEnvironment(lambda action: step_result(float(action.task_context.id != "t0")))

    evaluator = YourEvaluator(
        env_factory=env_factory, n_samples_per_prompt=8, max_concurrency=30, keep_tokens=False, metrics_fns=[]
    )
    results = await evaluator.run(evaluator.load_dataset())
    metrics = evaluator.compute_metrics(results)
    assert metrics["pass@1"] == metrics["pass@8"] == 0.75
    assert list(results) == ["t0", "t1", "t2", "t3"] and {len(samples) for samples in results.values()} == {8}
    assert all(type(value) is float for value in metrics.values())


async def test_samples_have_own_actions_and_limited_concurrency():
    running = most = 0

    async def play(action):
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert not hasattr(action.task_context, "seen")
        action.task_context.seen = True
        await asyncio.sleep(0)
        running -= 1
        return step_result()

    await evaluator(StubEnvironment(play), n_samples_per_prompt=3, max_concurrency=4).run(tasks(5))
    assert most == 4


async def test_second_run_repeats_nothing(tmp_path):
    stub = StubEnvironment(lambda action: step_result(random.random()))
    first = await evaluator(stub, n_samples_per_prompt=2, output_path=tmp_path / "out").run(tasks(3))
    assert len(stub.episodes) == 6
    again = await evaluator(stub, n_samples_per_prompt=2, output_path=tmp_path / "out").run(tasks(3))
    assert len(stub.episodes) == 6
    assert {p: [s.model_dump() for s in row] for p, row in again.items()} == {
        p: [s.model_dump() for s in row] for p, row in first.items()
    }
    assert len(lines(tmp_path / "out" / "results.jsonl")) == 6


async def test_later_run_adds_only_missing_samples(tmp_path):
    stub, path = StubEnvironment(), tmp_path / "r.jsonl"
    await evaluator(stub, n_samples_per_prompt=1, output_path=path).run(tasks(2))
    await evaluator(stub, n_samples_per_prompt=3, output_path=path).run(tasks(3))
    assert len(stub.episodes) == 9
    assert pairs(path) == [(f"t{n}", index) for n in range(3) for index in range(3)]
    fewer = await evaluator(stub, n_samples_per_prompt=1, output_path=path).run(tasks(1))
    assert {prompt: len(samples) for prompt, samples in fewer.items()} == {"t0": 1}


async def test_changed_task_is_run_again(tmp_path):
    stub, path = StubEnvironment(), tmp_path / "r.jsonl"
    await evaluator(stub, output_path=path).run(tasks(1))
    changed = Action(message="another question", task_context=TaskContext(id="t0", ground_truth="0"))
    results = await evaluator(stub, output_path=path).run([changed])
    assert [action.message for action in stub.episodes] == ["What is 0 + 0?", "another question"]
    assert results["t0"][0].action.message == "another question"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data())
def test_truncated_results_are_completed_without_repeats(tmp_path, data):
    def offsets(content):
        start = 0
        for line in content.splitlines():
            yield start, line
            start += len(line) + 1

    path = tmp_path / "r.jsonl"
    path.unlink(missing_ok=True)
    order = data.draw(st.permutations(range(4)))
    asyncio.run(
        evaluator(StubEnvironment(), n_samples_per_prompt=2, output_path=path).run([tasks(4)[n] for n in order])
    )
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, 10**6)) * len(whole) // 10**6  # lengths differ by a run's timings
    path.write_bytes(whole[:cut])
    kept = sum(len(line) <= cut - start for start, line in offsets(whole))
    stub = StubEnvironment()
    again = [tasks(4)[n] for n in data.draw(st.permutations(range(4)))]
    asyncio.run(evaluator(stub, n_samples_per_prompt=2, output_path=path).run(again))
    assert len(stub.episodes) == 8 - kept
    assert pairs(path) == [(f"t{n}", index) for n in range(4) for index in range(2)]


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
@pytest.mark.parametrize("reward_fn", [None, True])
async def test_non_finite_reward_is_stable_over_a_resume(tmp_path, reward, reward_fn):
    """NaN became null in the file, so a resumed run counted the sample differently."""
    stub = StubEnvironment(lambda action: step_result(reward), reward_fn=reward_fn)
    runs = [evaluator(stub, output_path=tmp_path / "r.jsonl") for _ in range(2)]
    first, second = [await run.run(tasks(2)) for run in runs]
    assert [s.reward for samples in first.values() for s in samples] == [None, None]
    assert runs[0].compute_metrics(first) == runs[1].compute_metrics(second)


def failing(failed):
    def play(action):
        if isinstance(failed, BaseException):
            raise failed
        return failed

    return play


UNREACHABLE = StepResult(
    observation=step_result().observation,
    termination_reason=TerminationReason.TASK_COMPLETE,
    error="reward function: the judge cannot be reached",
    reward_error="the judge cannot be reached",
    reward_error_is_infrastructure=True,
)


@pytest.mark.parametrize(
    "failed",
    [
        step_result(None, reason=TerminationReason.INFRASTRUCTURE_ERROR, error="SGLangConnectionError: gone"),
        step_result(None, reason=TerminationReason.ABORTED, error="aborted"),
        step_result(None, reason=TerminationReason.CANCELLED, error="cancelled"),
        UNREACHABLE,
        SGLangConnectionError("gone"),
    ],
    ids=["infrastructure", "aborted", "cancelled", "judge's server", "raised"],
)
async def test_infrastructure_failures_are_kept_apart_and_retried(tmp_path, failed):
    path = tmp_path / "r.jsonl"
    results = await evaluator(StubEnvironment(failing(failed)), output_path=path).run(tasks(2))
    assert [sample.aborted for samples in results.values() for sample in samples] == [True, True]
    assert lines(path) == []
    cause = "SGLangConnectionError: gone" if isinstance(failed, Exception) else failed.error
    assert [record["error"] for record in lines(tmp_path / "r.failures.jsonl")] == [cause] * 2
    stub = StubEnvironment()
    run = evaluator(stub, output_path=path)
    results = await run.run(tasks(2))
    assert len(stub.episodes) == 2 and run.compute_metrics(results)["dropped_samples"] == 0
    assert pairs(path) == [("t0", 0), ("t1", 0)]


ERRORS = {
    "the agent's code": step_result(None, reason=TerminationReason.AGENT_ERROR, error="KeyError: 'x'"),
    "the reward function": step_result(None, error="reward function: ValueError: no"),
    "no answer in time": StepResult(observation=Observation(), termination_reason=TerminationReason.TIMEOUT),
    "no token in time": StepResult(
        observation=Observation(metrics={"model_calls": 1, "sampled_tokens": 0, "sequences": 1}),
        termination_reason=TerminationReason.TIMEOUT,
    ),
    "a reward that is not a number": step_result(float("nan")),
    "raised": RuntimeError("the environment itself"),
    "raised for its time": asyncio.TimeoutError("too long"),
    "asked to exit": SystemExit(3),
    "cancelled by no caller": asyncio.CancelledError(),
}


@pytest.mark.parametrize("failed", ERRORS.values(), ids=list(ERRORS))
async def test_answer_that_breaks_its_grader_is_wrong(tmp_path, failed):
    """Two of four answers are right, and the others must not leave the denominator by failing."""

    def play(action):
        return failing(failed)(action) if action.task_context.id in ("t1", "t2") else step_result()

    path = tmp_path / "r.jsonl"
    metrics = []
    for _ in range(2):  # a resumed run says the same, and gives no such answer another try
        stub = StubEnvironment(play)
        run = evaluator(stub, output_path=path)
        results = await run.run(tasks(4))
        metrics.append(run.compute_metrics(results))
    assert metrics[0] == metrics[1] == run.compute_metrics(read_results(path)[1])
    assert (metrics[0]["pass@1"], metrics[0]["avg@1"], metrics[0]["pass@1_prompts"]) == (0.5, 0.5, 4)
    assert (metrics[0]["errored_samples"], metrics[0]["dropped_samples"]) == (2, 0)
    assert len(stub.episodes) == 0 and len(lines(path)) == 4
    assert [results[prompt][0].is_errored for prompt in ("t0", "t1", "t2", "t3")] == [False, True, True, False]


async def test_retry_errors_runs_errored_samples_again(tmp_path):
    """Errored samples must not be retried by default, but can be."""
    path = tmp_path / "r.jsonl"
    broken = step_result(None, error="reward function: KeyError: 'typo'")
    await evaluator(StubEnvironment(failing(broken)), output_path=path).run(tasks(3))
    down = step_result(None, reason=TerminationReason.INFRASTRUCTURE_ERROR, error="down")
    run = evaluator(StubEnvironment(failing(down)), output_path=path, retry_errors=True)
    results = await run.run(tasks(3))
    assert run.compute_metrics(results)["errored_samples"] == 3  # nothing better came of it
    run = evaluator(StubEnvironment(), output_path=path, retry_errors=True)
    results = await run.run(tasks(3))
    assert run.compute_metrics(results)["pass@1"] == 1.0 == run.compute_metrics(read_results(path)[1])["pass@1"]


class Hanging(Environment):
    async def reset(self):
        await asyncio.Event().wait()


class Nameless(StubEnvironment):
    def identity(self):
        raise RuntimeError("no such reward model")


async def no_sandbox(action):
    raise RuntimeError("no sandbox")


class NoTextError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


async def no_text(action):
    raise NoTextError


SPOKEN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


@pytest.mark.parametrize(
    ("factory", "message", "told"),
    [
        (no_sandbox, "?", "RuntimeError: no sandbox"),
        (no_text, "?", "NoTextError"),
        (lambda action: None, "?", "TypeError: the environment factory returned None: it must return an environment"),
        (lambda action: Hanging(lambda: None, Contains(), episode_timeout=0.1), "?", "longer than 0.1 seconds"),
        (lambda action: Nameless(), "?", "RuntimeError: no such reward model"),
        (lambda action: Environment(lambda: None, Contains()), SPOKEN, "must have the role user"),
    ],
    ids=["no environment", "an error without a text", "none", "a reset that hangs", "no identity", "an invalid task"],
)
async def test_sample_whose_model_was_never_called_is_dropped(tmp_path, factory, message, told):
    """It counted as a wrong answer."""
    run = Evaluator(factory, output_path=tmp_path, show_progress=False)
    results = await run.run([Action(message=message)])
    [[lost]] = results.values()
    assert not lost.is_finished and not lost.is_errored and told in lost.step_result.error
    metrics = run.compute_metrics(results)
    assert (metrics["dropped_samples"], metrics["errored_samples"]) == (1, 0)


async def test_missing_reward_of_a_self_judging_step_is_an_error():
    """A step without a reward function that leaves out some rewards must not drop samples."""
    stub = StubEnvironment(lambda action: step_result(1.0 if action.task_context.id == "t0" else None), reward_fn=None)
    run = evaluator(stub)
    metrics = run.compute_metrics(await run.run(tasks(2)))
    assert (metrics["pass@1"], metrics["errored_samples"], metrics["unscored_samples"]) == (0.5, 1, 0)


@pytest.mark.parametrize(
    ("result", "finished"),
    [
        (step_result(None), True),
        (step_result(None, reason=TerminationReason.MAX_TOKENS_REACHED, error="MaxTokensReachedException"), True),
        (step_result(None, reason=TerminationReason.TIMEOUT), True),
        (step_result(None, reason=TerminationReason.INFRASTRUCTURE_ERROR), False),
    ],
)
async def test_without_a_reward_function_the_outcome_decides(result, finished):
    stub = StubEnvironment(lambda action: result, reward_fn=None)
    run = evaluator(stub)
    results = await run.run(tasks(1))
    assert results["t0"][0].is_finished is finished
    metrics = run.compute_metrics(results)
    assert (metrics["unscored_samples"], metrics["dropped_samples"]) == (float(finished), float(not finished))
    assert "pass@1" not in metrics and metrics["pass@1_dropped_prompts"] == 1


async def test_cancelled_run_keeps_finished_samples(tmp_path):
    ended = []
    third = asyncio.Event()
    is_hanging = [True]

    async def play(action):
        if is_hanging and action.task_context.id in ("t2", "t3"):
            third.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(action.task_context.id)
        return step_result()

    path = tmp_path / "r.jsonl"
    running = asyncio.ensure_future(evaluator(StubEnvironment(play), max_concurrency=2, output_path=path).run(tasks(9)))
    await third.wait()
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert "t2" in ended
    assert {("t0", 0), ("t1", 0)} >= set(pairs(path)) >= {("t0", 0)}
    assert not (tmp_path / "r.failures.jsonl").read_bytes()
    is_hanging.clear()
    stub = StubEnvironment(play)
    await evaluator(stub, output_path=path).run(tasks(9))  # the lock was given back
    assert pairs(path) == [(f"t{n}", 0) for n in range(9)]


async def test_cancelled_run_waits_for_every_cleanup():
    running, cleaned = asyncio.Event(), []

    async def play(action):
        try:
            running.set()
            await asyncio.Event().wait()
        finally:
            for _ in range(20 * int(action.task_context.id[1:])):  # one is done long before the next
                await asyncio.sleep(0)
            cleaned.append(action.task_context.id)

    run = asyncio.ensure_future(evaluator(StubEnvironment(play), max_concurrency=3).run(tasks(3)))
    await running.wait()
    await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert cleaned == ["t0", "t1", "t2"]


async def test_full_disk_ends_the_run_and_a_later_run_resumes(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    pwrite, calls = os.pwrite, []

    def full(fd, data, offset):
        if data.startswith(b'{"key"'):
            calls.append(data)
            if len(calls) > 3:
                raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        await evaluator(StubEnvironment(), max_concurrency=2, output_path=path).run(tasks(40))
    kept = len(pairs(path))
    assert 3 <= kept < 40
    monkeypatch.undo()
    stub = StubEnvironment()
    await evaluator(stub, output_path=path).run(tasks(40))
    assert len(stub.episodes) == 40 - kept and len(pairs(path)) == 40


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_removed_results_end_the_run(tmp_path, is_replaced):
    def play(action):
        if action.task_context.id == "t2":
            shutil.rmtree(tmp_path / "results")
            if is_replaced:  # by another run
                (tmp_path / "results").mkdir()
                (tmp_path / "results" / "results.jsonl").touch()
        return step_result()

    run = evaluator(StubEnvironment(play), max_concurrency=1, output_path=tmp_path / "results").run
    with pytest.raises(CheckpointError, match="removed while it was written; its results are lost, run again"):
        await run(tasks(4))


async def test_unsynced_results_are_reported_and_run_again(tmp_path, monkeypatch):
    path, fsync, synced = tmp_path / "r.jsonl", os.fsync, []

    def failing(fd):
        if os.fstat(fd).st_ino == path.stat().st_ino:
            synced.append(len(lines(path)))
            if len(synced) > 3:
                raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CheckpointError, match="Input/output error; every result reported as finished is kept, run"):
        await evaluator(StubEnvironment(), max_concurrency=8, output_path=path).run(tasks(40))
    kept = pairs(path)
    assert len(kept) == synced[2] < synced[3]
    monkeypatch.undo()
    stub = StubEnvironment()
    await evaluator(stub, output_path=path).run(tasks(40))
    assert len(stub.episodes) == 40 - len(kept) and len(pairs(path)) == 40


async def test_another_configuration_is_refused_with_the_difference(tmp_path):
    path = tmp_path / "r.jsonl"
    await evaluator(StubEnvironment(), output_path=path, config={"model": "a", "temperature": 1.0}).run(tasks(1))
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="another configuration: temperature was 1.0 and is 0.5; use another"):
        await evaluator(StubEnvironment(), output_path=path, config={"model": "a", "temperature": 0.5}).run(tasks(1))
    assert path.read_bytes() == before


async def test_two_concurrent_runs_on_one_file_are_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    gate = asyncio.Event()

    async def play(action):
        await gate.wait()
        return step_result()

    first = asyncio.ensure_future(evaluator(StubEnvironment(play), output_path=path).run(tasks(1)))
    await asyncio.sleep(0)
    with pytest.raises(CheckpointError, match="another evaluation"):
        await evaluator(StubEnvironment(), output_path=path).run(tasks(1))
    gate.set()
    await first
    assert len(lines(path)) == 1


async def test_equal_tasks_are_prompts_and_shared_ids_are_refused(tmp_path):
    action = Action(message="same", task_context=TaskContext(ground_truth=1))
    stub = StubEnvironment()
    results = await evaluator(stub, output_path=tmp_path / "r.jsonl").run([action, action, action])
    assert len(stub.episodes) == len(results) == len(set(results)) == 3
    await evaluator(stub, output_path=tmp_path / "r.jsonl").run([action, action, action])
    assert len(stub.episodes) == 3
    other = [Action(message=text, task_context=TaskContext(id=7)) for text in "ab"]
    with pytest.raises(DuplicateTaskError, match=r"tasks 0 and 1 \(from 0\) are different but have the same id '7'"):
        await evaluator(stub).run(other)


@pytest.mark.parametrize("keep", [False, True])
async def test_tokens_are_kept_over_a_resume(tmp_path, keep):
    tokens = TokenObservation(token_ids=[1, 2, 3], prompt_length=1, loss_mask=[0, 1, 1], logprobs=[None, -0.5, -0.25])

    def play(action):
        result = step_result()
        result.observation.tokens = tokens
        return result

    for _ in range(2):
        run = evaluator(StubEnvironment(play), keep_tokens=keep, output_path=tmp_path / "r.jsonl")
        sample = (await run.run(tasks(1)))["t0"][0]
        assert sample.step_result.observation.tokens == (tokens if keep else None)


async def test_kept_tokens_are_on_disk_and_not_in_memory(tmp_path):
    """Tokens of 40 samples of 20,000 tokens each stayed in memory, with 84 bytes per token."""
    length = 20_000

    def play(action):
        result = step_result()
        ids = [1000 + int(action.task_context.id[1:])] * length
        result.observation.tokens = TokenObservation(
            token_ids=ids, prompt_length=1, loss_mask=[0] + [1] * (length - 1), logprobs=[n / 7 for n in range(length)]
        )
        return result

    path = tmp_path / "r.jsonl"
    tracemalloc.start()
    try:
        for count in (40, 41):  # resumed, too
            before = tracemalloc.get_traced_memory()[0]
            run = evaluator(StubEnvironment(play), keep_tokens=True, output_path=path)
            results = await run.run(tasks(count))
            assert tracemalloc.get_traced_memory()[0] - before < 6_000_000  # of 67 MB
            run.compute_metrics(results)
    finally:
        tracemalloc.stop()
    _, read = read_results(path)
    for one in (
        results["t7"][0],
        read["t7"][0],
        copy.deepcopy(read["t7"][0]),
        pickle.loads(pickle.dumps(results))["t7"][0],
    ):
        tokens = one.step_result.observation.tokens
        assert tokens.rollout_token_ids == [1007] * (length - 1) and tokens.prompt_length == 1
        assert tokens == play(one.action).observation.tokens == tokens
        assert one.model_dump()["step_result"]["observation"]["tokens"]["logprobs"][7] == 1.0


async def test_results_with_any_value_are_written(tmp_path):
    def play(action):
        result = step_result()
        info = {"set": {1}, "loop": print, "half": "\ud83d", "huge": 10**5000, "unreadable": Unreadable()}
        result.reward = RewardResult(reward=1.0, info=info)
        return result

    path = tmp_path / "r.jsonl"
    action = Action(message="?", task_context=TaskContext(ground_truth={"a", "b"}, image=b"\x00\xff"))
    for _ in range(2):
        results = await evaluator(StubEnvironment(play), output_path=path).run([action])
    assert [sample.reward for samples in results.values() for sample in samples] == [1.0]
    assert path.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("most", [1, 3])
async def test_run_stops_after_consecutive_failures(tmp_path, most):
    down = step_result(None, reason=TerminationReason.INFRASTRUCTURE_ERROR, error="no server")
    stub = StubEnvironment(lambda action: down)
    run = evaluator(stub, max_concurrency=1, stop_after_failures=most, output_path=tmp_path / "r.jsonl")
    with pytest.raises(EvaluationStoppedError, match=f"{most} samples in a row failed.*: no server"):
        await run.run(tasks(50))
    assert len(stub.episodes) == most
    assert len(lines(tmp_path / "r.failures.jsonl")) == most


async def test_read_results_includes_remaining_failures(tmp_path):
    def play(action):
        down = step_result(None, reason=TerminationReason.INFRASTRUCTURE_ERROR, error="down")
        return down if action.task_context.id == "t1" else step_result()

    run = evaluator(StubEnvironment(play), n_samples_per_prompt=2, output_path=tmp_path / "out")
    results = await run.run(tasks(3))
    described, read = read_results(tmp_path / "out")
    assert described.n_samples_per_prompt == 2
    assert run.compute_metrics(read) == run.compute_metrics(results)
    with pytest.raises(CheckpointError, match="no results of an evaluation"):
        read_results(tmp_path / "nowhere")


async def test_custom_metrics_are_added():
    run = evaluator(StubEnvironment(), metrics_fns=[lambda results: {"prompts_seen": len(results)}])
    assert run.compute_metrics(await run.run(tasks(3)))["prompts_seen"] == 3.0


async def test_actions_from_an_async_generator():
    async def source():
        for action in tasks(3):
            yield action

    assert len(await evaluator(StubEnvironment()).run(source())) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        {"n_samples_per_prompt": 0},
        {"max_concurrency": 0},
        {"max_concurrency": "full"},
        {"keep_trajectories": True},
        {"success_threshold": float("nan")},
    ],
)
def test_invalid_arguments_are_refused(arguments):
    with pytest.raises(ValueError):
        Evaluator(StubEnvironment().factory, **arguments)


def test_progress_bar_shows_rate_time_reward_and_failures(capsys):
    with Progress("sums", 10, [sample(1.0), sample(0.0)], shown=True) as progress:
        progress.add(sample(1.0))
        progress.add(sample(None, finished=False))
    shown = capsys.readouterr().err
    assert re.search(
        r"sums: .*3/10 .*<.*sample.*reward=0\.667|sums: .*4/10 .*<.*sample.*reward=0\.667, failed=1", shown
    )


async def test_progress_is_logged_where_no_bar_is_shown(monkeypatch, caplog):
    monkeypatch.setattr("strands_env.eval.evaluator.TICK", 0.001)
    monkeypatch.setattr("strands_env.eval.evaluator.LOG_EVERY", 0.0)
    caplog.set_level("INFO", logger="strands_env.eval.evaluator")
    with Progress("sums", 3, [sample(1.0)], shown=False) as progress:
        ticking = asyncio.ensure_future(progress.tick())
        progress.add(sample(None, finished=False))
        assert "/3" in str(progress)
        await asyncio.sleep(0.1)
        ticking.cancel()
    assert "samples=<2>, total=<3>, failed=<1>" in caplog.messages[0]


async def test_the_clock_of_the_bar_runs_while_no_sample_ends(monkeypatch, capsys):
    monkeypatch.setattr("strands_env.eval.evaluator.TICK", 0.001)
    with Progress("sums", 3, [], shown=True) as progress:
        ticking = asyncio.ensure_future(progress.tick())
        shown = ""
        while shown.count("0/3") <= 2:
            await asyncio.sleep(0.01)
            shown += capsys.readouterr().err
        ticking.cancel()


async def test_the_bar_names_a_server_that_does_not_answer_and_no_remaining_time(monkeypatch, capsys):
    monkeypatch.setattr("strands_env.eval.evaluator.TICK", 0.001)
    silent = [Outage("http://{one}", 3.0)]
    monkeypatch.setattr("strands_env.eval.evaluator.outages", lambda: silent)
    with Progress("sums", 3, [], shown=True) as progress:
        progress.add(sample(1.0))

        async def bar(until):
            ticking = asyncio.ensure_future(progress.tick())
            while not until(shown := capsys.readouterr().err.rpartition("\r")[2]):
                await asyncio.sleep(0.01)
            ticking.cancel()
            return shown

        await bar(lambda shown: "1/3" in shown and "<" in shown and "answered" not in shown)
        silent[0] = Outage("http://{one}", 40.0, 7, 320.0)
        told = "http://{one} has not answered for 40 s: 7 samples wait; next dropped in 320 s"
        assert "<" not in await bar(lambda shown: told in shown and "1/3; " in shown)
        progress.add(sample(None, finished=False))
        silent[0] = Outage("http://{one}", 360.0, 7, 0.0)
        await bar(lambda shown: "2/3, failed=1; " in shown and "next dropped at any moment" in shown)
        silent.clear()
        await bar(lambda shown: "<" in shown and "answered" not in shown)


def test_no_progress_bar_without_a_terminal(capsys):
    with Progress("sums", 2, []) as progress:
        progress.add(sample(1.0))
    assert capsys.readouterr().err == ""


# === metrics with intervals, and comparison of two evaluations ===


def test_metrics_of_a_small_case():
    results = {
        "a": [sample(1.0, "4"), sample(1.0, "4"), sample(0.0, "5"), sample(0.0, "6")],
        "b": [sample(0.0, "1"), sample(0.0, "1"), sample(0.0, "2"), sample(0.5, "3")],
    }
    metrics = standard_metrics(results, n_samples_per_prompt=4)
    assert metrics["pass@1"] == 0.25 and metrics["pass@2"] == pytest.approx((5 / 6) / 2)
    assert metrics["pass@4"] == 0.5 and metrics["pass^2"] == pytest.approx((1 / 6) / 2) and metrics["pass^4"] == 0.0
    assert metrics["avg@4"] == pytest.approx((0.5 + 0.125) / 2)
    assert metrics["majority@4"] == 0.5
    assert metrics["pass@1_low"] <= 0.25 <= metrics["pass@1_high"]
    assert (metrics["samples"], metrics["dropped_samples"], metrics["prompts"]) == (8, 0, 2)
    assert not any(key.endswith("_if_dropped_failed") for key in metrics)


def test_success_is_a_reward_of_at_least_the_threshold():
    results = {"a": [sample(0.5)]}
    assert standard_metrics(results, n_samples_per_prompt=1)["pass@1"] == 0.0
    assert standard_metrics(results, n_samples_per_prompt=1, success_threshold=0.5)["pass@1"] == 1.0


def test_dropped_samples_are_reported_for_each_metric():
    results = {
        "a": [sample(1.0), sample(1.0)],
        "b": [sample(1.0), sample(None, finished=False)],
        "c": [],  # never run
    }
    metrics = standard_metrics(results, n_samples_per_prompt=2)
    assert (metrics["samples"], metrics["waiting_samples"], metrics["dropped_samples"]) == (3, 2, 1)
    assert (metrics["pass@1"], metrics["pass@1_prompts"], metrics["pass@1_dropped_prompts"]) == (1.0, 2, 1)
    assert (metrics["pass@2"], metrics["pass@2_prompts"], metrics["pass@2_dropped_prompts"]) == (1.0, 1, 2)
    assert metrics["pass@1_if_dropped_failed"] == 0.75
    assert metrics["pass@2_if_dropped_failed"] == 1.0
    assert metrics["pass^2_if_dropped_failed"] == 0.5
    assert metrics["avg@2_if_dropped_failed"] == 0.75
    assert metrics["majority@2_if_dropped_failed"] == 1.0  # in b there is no other vote


def test_dropped_samples_would_not_have_failed_where_nothing_is_rewarded():
    results = {"a": [sample(None), sample(None, finished=False)]}
    metrics = standard_metrics(results, n_samples_per_prompt=2)
    assert (metrics["unscored_samples"], metrics["dropped_samples"]) == (1, 1)
    assert not [name for name in metrics if "if_dropped_failed" in name]


def test_error_is_never_better_than_a_wrong_answer():
    """If wrong answers cost something, failing must cost as much."""
    errored = sample(None)
    errored.is_errored = True
    results = {"a": [sample(1.0)], "b": [sample(-1.0)], "c": [errored], "d": [sample(None, finished=False)]}
    metrics = standard_metrics(results, n_samples_per_prompt=1)
    assert metrics["avg@1"] == pytest.approx(-1 / 3) and metrics["pass@1"] == pytest.approx(1 / 3)
    assert standard_metrics(results, n_samples_per_prompt=1, success_threshold=-2.0)["pass@1"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("causes", [5, 6])
def test_at_most_five_causes_of_dropped_samples_are_listed(causes):
    results = {name: [sample(None, finished=False)] for name in "abcdef"[:causes]}
    for name, (dropped,) in results.items():
        dropped.step_result.error = name
    lines = [f"dropped: 1 x {name}" for name in "abcde"] + ["dropped: 1 other cause"] * (causes > 5)
    assert end_lines(results) == [f"ends: {causes} infrastructure_error", *lines]


def test_texts_that_differ_in_a_time_are_one_cause():
    told = ["no server (given up after 61 attempts, 361 s)", "no server (given up after 61 attempts, 362 s)"]
    told += ["POST http://one:30000: HTTP 500", "POST http://one:30000: HTTP 503", "POST http://one:30001: HTTP 500"]
    dropped = [sample(None, finished=False) for _ in told]
    for one, error in zip(dropped, told, strict=True):
        one.step_result.error = error
    assert end_lines({"a": dropped})[1:] == [
        f"dropped: 2 x {told[0]}",
        *(f"dropped: 1 x {error}" for error in told[2:]),
    ]


def test_a_long_cause_is_cut_between_words():
    words = [f"word{number}" for number in range(100)]
    first, last = shortened(" ".join(words)).split(" … ")
    assert {*first.split(), *last.split()} < {*words} and last.endswith("word99")
    assert shortened("x" * 200) == f"{'x' * 100} … {'x' * 47}"


def test_metrics_without_samples():
    assert standard_metrics({}, n_samples_per_prompt=4)["prompts"] == 0


def test_sample_sizes_are_powers_of_two_and_n():
    assert sample_sizes(1) == [1] and sample_sizes(6) == [1, 2, 4, 6] and sample_sizes(8) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1}, no, \boxed{\frac{1}{2}}.", "1/2"),
        ("  plain\n text ", "plain text"),
        (r"\boxed{never closed", r"\boxed{never closed"),
    ],
)
def test_answer_is_the_box_or_the_whole_text(text, answer):
    one = sample(1.0, text)
    assert one.step_result.reward is not None
    one.step_result.reward.info.clear()
    assert answer_of(one) == answer


@pytest.mark.parametrize("verdict", ["no_answer", "not_boxed", "no_match"])
def test_sample_without_an_answer_has_no_vote(verdict):
    lost = [sample(0.0, "I do not know") for _ in range(2)]
    for one in lost:
        one.step_result.reward.info.update({"verdict": verdict, "extracted": None})
    assert [answer_of(one) for one in lost] == [None, None]
    assert standard_metrics({"a": [sample(1.0), *lost]}, n_samples_per_prompt=3)["majority@3"] == 1.0


def judged(extracted, reward=0.0, **info):
    one = sample(reward)
    one.step_result.reward.info.clear()
    one.step_result.reward.info.update({"extracted": extracted, **info})
    return one


def test_answers_with_equal_values_vote_together():
    """Votes for one value in several notations were split."""
    right = [judged(text, 1.0, verdict="correct", ground_truth="1/2") for text in ("1/2", "0.5", "0.50")]
    wrong = [judged("3", verdict="wrong"), judged("3.0", verdict="wrong")]
    metrics = standard_metrics({"a": [*right, *wrong]}, n_samples_per_prompt=5)
    assert (metrics["pass@1"], metrics["majority@5"]) == (0.6, 1.0)
    assert standard_metrics({"a": [right[0], *wrong]}, n_samples_per_prompt=3)["majority@3"] == 0.0
    either = [judged(text, 1.0, verdict="correct", ground_truth=["1/2", "2"]) for text in ("0.5", "2", "1/2")]
    assert standard_metrics({"a": [*either, *wrong]}, n_samples_per_prompt=5)["majority@5"] == 1.0


@pytest.mark.parametrize(
    ("answers", "count"),
    [
        (["1/2", "0.5", "0.50", r"\frac{1}{2}", r"\dfrac12", ".5", "5e-1"], 1),
        (["1000", "1,000", r"1\,000", "1e3", "1000."], 1),
        (["1,2", "2, 1", r"\{1,2\}"], 1),
        (["(1,2)", "(1, 2)", "(2,1)", "[1,2]"], 3),
        (["x=5", "5", "5.0"], 1),
        (["x^2 + 1", "x^{2}+1"], 1),
        (["Paris", r"\text{Paris}", "siraP"], 2),
        (["2516_8", "2516_{8}", "2516_9", "2516"], 3),
        (["5", "-5", "5!", "5, 6", "x > 5", r"\frac{", "", "\ud800"], 8),
    ],
)
def test_answers_count_by_value(answers, count):
    """Votes for one value in several notations were split."""
    assert len({answer_of(judged(text)) for text in answers}) == count


def test_other_answers_count_by_their_words():
    hostile = ["(" * 5000, "{" * 1900, "1+" * 900 + "1", "$" * 1001, "a" * 100_000]
    assert len({answer_of(judged(text)) for text in hostile}) == 5


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_and_pass_hat_k_match_enumeration(case):
    n, c, k = case
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k([n], [c], k)[0] == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_hat_k([n], [c], k)[0] == pytest.approx(sum(map(all, draws)) / len(draws))


def test_large_counts_match_the_binomial_formula():
    for n, c, k in [(1000, 3, 500), (2000, 1990, 1000), (256, 1, 128), (5000, 0, 5000)]:
        exact = 1 - math.comb(n - c, k) / math.comb(n, k)
        assert pass_at_k([n], [c], k)[0] == pytest.approx(exact, abs=1e-12)
        assert pass_hat_k([n], [c], k)[0] == pytest.approx(math.comb(c, k) / math.comb(n, k), abs=1e-12)


@pytest.mark.parametrize(
    ("n", "c", "k"), [([2], [1], 3), ([4], [5], 1), ([4], [-1], 1), ([4], [1], 0), ([4, 4], [1], 1)]
)
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=7), st.data())
def test_majority_matches_enumeration(samples, data):
    k = data.draw(st.integers(1, len(samples)))
    expected = []
    for draw in itertools.combinations(samples, k):
        votes = Counter(answer for answer, _ in draw if answer is not None)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        shares = [np.mean([right for answer, right in draw if answer == winner]) for winner in winners]
        expected.append(np.mean(shares) if shares else 0.0)
    answers, successes = zip(*samples, strict=True)
    assert majority_at_k(answers, successes, k) == pytest.approx(np.mean(expected))


def test_majority_of_many_samples_is_near_the_closed_form():
    answers, successes = ["a"] * 18 + ["b"] * 14, [True] * 18 + [False] * 14
    exact = sum(math.comb(18, right) * math.comb(14, 9 - right) for right in range(5, 10)) / math.comb(32, 9)
    assert majority_at_k(answers, successes, 9) == pytest.approx(exact, abs=0.04)
    assert majority_at_k(answers, successes, 9) == majority_at_k(answers, successes, 9)


def test_interval_of_many_values_is_near_the_t_interval():
    values = np.random.default_rng(3).normal(10, 2, size=4000)
    interval = mean_over_prompts(values)
    half = 1.96 * values.std(ddof=1) / math.sqrt(len(values))
    assert interval.value == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half, abs=0.01)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.01)
    assert mean_over_prompts(values) == interval


@pytest.mark.parametrize("prompts", [5, 6, 10, 30, 100, 500])
@pytest.mark.parametrize("kind", ["pass@1", "pass@k", "difference of two policies"])
def test_intervals_contain_the_truth_in_nine_of_ten_runs(prompts, kind):
    """Simulate 400 evaluations of each of many policies with known success rates.

    The success rate of a prompt is drawn from a beta distribution whose mean is the policy's rate. The correlation is
    between two samples of one prompt: with 0 all prompts are equal, with 1 each prompt always succeeds or never does.
    """
    rates = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99)
    draws, correlations, gains = ((1, 1), (8, 1)), (0.0, 0.3, 1.0), (None,)
    if kind == "pass@k":
        draws, correlations = ((2, 1), (4, 1), (8, 2), (8, 4), (8, 8), (32, 1), (32, 2), (32, 16)), (0.1, 0.3, 0.6)
    elif kind != "pass@1":
        gains = (0.0, 0.5)  # of what the first policy lacks
    cells = list(itertools.product(rates, draws, correlations, gains))
    rng = np.random.default_rng(prompts)
    held = {}
    for cell in cells[:: len(cells) // 54]:
        rate, (samples, k), correlation, gain = cell

        def successes(mean, samples=samples, correlation=correlation):
            if samples == 1 or correlation == 1:  # the correlation does not affect one sample
                return rng.binomial(1, mean, (400, prompts)) * samples
            if correlation == 0:
                return rng.binomial(samples, mean, (400, prompts))
            strength = 1 / correlation - 1
            return rng.binomial(samples, rng.beta(mean * strength, (1 - mean) * strength, (400, prompts)))

        by_count = pass_at_k(np.full(samples + 1, samples), np.arange(samples + 1), k)
        values, scale = by_count[successes(rate)], (0.0, 1.0)
        if correlation == 0:
            truth = 1 - (1 - rate) ** k
        elif correlation == 1:
            truth = rate
        else:  # 1 - E[(1-p)^k], from the moments of the beta distribution
            strength = 1 / correlation - 1
            truth = 1 - math.prod(((1 - rate) * strength + i) / (strength + i) for i in range(k))
        if gain is not None:
            truth, scale = gain * (1 - rate), (-1.0, 1.0)
            values = by_count[successes(rate + truth)] - values
        low, high = mean_bounds(values, scale=scale)
        held[cell] = np.mean((low <= truth + 1e-9) & (truth - 1e-9 <= high))
    assert len(held) >= 40
    # Three standard errors below the documented 0.90.
    assert min(held.values()) >= 0.90 - 3 * math.sqrt(0.9 * 0.1 / 400), held


@pytest.mark.parametrize("value", [0.0, 0.25, 1.0])
def test_equal_values_have_an_interval_of_positive_width(value):
    """Two right answers of two say little, and 30 of 30 not that every prompt is answered."""
    for prompts, width in ((2, 0.9), (5, 0.4), (30, 0.05), (500, 0.002)):
        interval = mean_over_prompts([value] * prompts)
        assert interval.low <= interval.value <= interval.high
        assert interval.high - interval.low > width
        assert 0 <= interval.low and interval.high <= 1
    assert mean_over_prompts([1.0] * 2).low == 0.0
    assert mean_over_prompts([0.0] * 5, scale=(-1, 1)).low < 0 < mean_over_prompts([0.0] * 5, scale=(-1, 1)).high


def test_scale_is_extended_and_one_prompt_has_no_interval():
    interval = mean_over_prompts([-2.0, 0.5, 3.0, 1.0])
    assert -2.0 <= interval.low < 0 and 1 < interval.high <= 3.0
    assert (mean_over_prompts([1.0]).low, mean_over_prompts([1.0]).high) == (None, None)
    with pytest.raises(ValueError, match="at least one prompt"):
        mean_over_prompts([])


# --- comparison of two evaluations ---


def evaluation(rewards, *, errored=()):
    """Return an evaluation of prompts whose content is their id."""
    results = {
        prompt: [
            sample(
                reward,
                finished=reward is not None or prompt in errored,
                is_errored=prompt in errored,
                prompt=prompt,
                sample_index=index,
            )
            for index, reward in enumerate(row)
        ]
        for prompt, row in rewards.items()
    }
    return Run("b", {}, 2, {prompt: f"content-{prompt}" for prompt in rewards}), results


def test_difference_is_by_common_prompt():
    first = evaluation({"a": [1.0, 0.0], "b": [0.0, 0.0], "only": [1.0, 1.0]})
    second = evaluation({"b": [1.0, 1.0], "a": [1.0, 0.0], "c": [0.0, 0.0], "d": [None, None]})
    told = compare(first, second)
    assert (told.common, told.only_first, told.only_second) == (2, 1, 1)
    one = told.differences[0]
    assert (one.first, one.second, one.interval.value, one.better, one.worse) == (0.25, 0.75, 0.5, 1, 0)
    said = " ".join(comparison_lines(told))
    assert "prompts in both: 2, in A only: 1, in B only: 1; only those in both are compared" in said
    assert [(task.prompt, task.first_reward, task.second_reward) for task in told.tasks] == [
        ("a", 0.5, 0.5),
        ("b", 0, 1),
    ]
    assert (
        "better: b 0 -> 1" in said
        and "worse:" not in said
        and "only those" not in " ".join(comparison_lines(compare(first, first)))
    )


def test_pass_at_each_k_of_both_is_compared():
    def of(n, **wins):
        run, results = evaluation({name: [1.0] * won + [0.0] * (n - won) for name, won in wins.items()})
        return dataclasses.replace(run, n_samples_per_prompt=n), results

    told = compare(of(8, a=4, b=0, c=8), of(4, a=4, b=1, c=4))
    assert [one.name for one in told.differences] == ["pass@1", "pass@2", "pass@4", "mean reward"]
    two = told.differences[1]
    assert (two.first, two.second) == pytest.approx(((11 / 14 + 0 + 1) / 3, (1 + 0.5 + 1) / 3))
    assert (two.better, two.worse, two.prompts) == (2, 0, 3)
    line = next(line for line in comparison_lines(told) if line.startswith("pass@2"))
    assert re.search(r"0\.595 +0\.833 +\+0\.238 +[+-]\d\.\d{3} to \+\d\.\d{3} ", line)
    first, second = of(2, a=1, b=1), of(2, a=1, b=1)
    first[1]["a"].pop()  # it has one sample, from which nothing is known of two
    assert [one.prompts for one in compare(first, second).differences] == [2, 1, 2]


def test_errors_count_as_wrong_in_a_comparison():
    """Errored samples were left out of comparisons."""
    first = evaluation({"a": [1.0], "b": [1.0]})
    second = evaluation({"a": [1.0], "b": [None]}, errored=("b",))
    one = compare(first, second).differences[0]
    assert (one.first, one.second, one.worse) == (1.0, 0.5, 1)


def test_an_error_counts_alike_in_both_evaluations():
    """An errored sample has the same reward in both, whatever else each evaluation holds."""
    errored = {"b": [None], "c": [None]}
    first, second = (evaluation({"a": [reward], **errored}, errored=errored) for reward in (-1.0, 0.0))
    told = compare(first, second)
    assert [(one.first_reward, one.second_reward) for one in told.tasks] == [(-1.0, 0.0), (-1.0, -1.0), (-1.0, -1.0)]


def test_pairing_finds_a_small_gain():
    rng = np.random.default_rng(0)
    skills = rng.uniform(0, 0.9, size=100)
    first = evaluation({f"p{n}": list((rng.random(32) < skill).astype(float)) for n, skill in enumerate(skills)})
    second = evaluation(
        {f"p{n}": list((rng.random(32) < skill + 0.08).astype(float)) for n, skill in enumerate(skills)}
    )
    interval = compare(first, second).differences[0].interval
    assert interval.low > 0
    alone = [
        mean_over_prompts([np.mean([s.reward for s in row]) for row in one[1].values()]) for one in (first, second)
    ]
    assert alone[0].high > alone[1].low


def test_equal_evaluations_may_still_differ():
    """No difference in a few prompts does not prove that there is none."""
    same = evaluation({f"p{n}": [1.0, 1.0] for n in range(10)})
    for one in compare(same, same).differences:
        assert one.interval.low < -0.1 and one.interval.high > 0.1 and one.interval.value == 0.0


def test_comparison_without_common_prompts_is_an_error():
    with pytest.raises(ValueError, match="no prompt with scored samples in common"):
        compare(evaluation({"a": [1.0]}), evaluation({"b": [1.0]}))
