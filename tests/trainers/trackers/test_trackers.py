"""Trackers, against their published packages, offline; and files that need packages which the other tests lack."""

import json
import math
import sqlite3
import struct
import time

import pyarrow
import pytest
from pyarrow import parquet

from strands_env.cli import main
from strands_env.core import Action, TaskContext
from strands_env.eval import Evaluator
from strands_env.eval.benchmarks import load_tasks
from strands_env.trackers import TRACKERS, open_tracker
from support.environments import StubEnvironment, step_result

STEPS = {1: {"reward": 0.25, "pass@2": 0.5, "pass^2": 0.125, "kl": math.nan}, 3: {"reward": 0.5, "kl": math.inf}}
SEEN = {"reward": [(1, 0.25), (3, 0.5)], "pass_at_2": [(1, 0.5)], "pass_hat_2": [(1, 0.125)]}


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }.items():
        monkeypatch.setenv(name, value)


def of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / "first"))
    events.Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


def wandb_records(content):
    """The records of a file of wandb: LevelDB's log format after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    start, data = 7, b""
    while start + 7 <= len(content):  # blocks of 32 KiB with parts of records: a checksum, a length, a kind and data
        if 32768 - start % 32768 < 7:
            start += 32768 - start % 32768
        length, kind = struct.unpack("<HB", content[start + 4 : start + 7])
        if start + 7 + length > len(content):  # it is still being written
            return
        data += content[start + 7 : start + 7 + length]
        start += 7 + length
        if kind not in (2, 3):  # else more parts follow
            yield wandb_internal_pb2.Record.FromString(data)
            data = b""


def of_wandb(folder):
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    seen, deadline = {}, time.monotonic() + 120
    while not any(one.HasField("exit") for one in wandb_records(path.read_bytes())):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # wandb writes a little after the end of the run
    for record in wandb_records(path.read_bytes()):
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for name, value in items.items():
            if not name.startswith("_"):
                seen.setdefault(name, []).append((items["_step"], value))
    return seen


def of_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params == {"model": "tiny", "n": "2"}
    return {
        name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def of_trackio(folder):
    (path,) = (folder / "trackio").glob("project*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    seen = {}
    for step, metrics in rows:
        for name, value in json.loads(metrics).items():
            seen.setdefault(name, []).append((step, value))
    return seen


@pytest.mark.parametrize("name", TRACKERS)
def test_finite_metrics_are_logged_by_step(name, tmp_path):
    with open_tracker(name, project="project", run="first", config={"model": "tiny", "n": 2}) as tracker:
        for step, metrics in STEPS.items():
            tracker.log(metrics, step)
        tracker.log({"kl": math.nan}, 4)
    assert globals()[f"of_{name}"](tmp_path) == SEEN


async def test_an_evaluation_is_tracked_from_the_command_line(tmp_path, capsys):
    rewards = iter([1.0, 0.0])
    stub = StubEnvironment(lambda action: step_result(next(rewards)))
    tasks = [Action(message=str(n), task_context=TaskContext(id=n)) for n in range(2)]
    await Evaluator(stub.factory, output_path=tmp_path / "first").run(tasks)
    assert main(["track", str(tmp_path / "first"), "--to", "tensorboard", "--step", "7"]) == 0
    assert capsys.readouterr().out == "1 step logged to tensorboard as first\n"
    seen = of_tensorboard(tmp_path / "first")
    assert seen["pass_at_1"] == [(7, 0.5)] and seen["samples"] == [(7, 2.0)]


def test_every_step_of_a_training_run_is_tracked(tmp_path, capsys):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "metrics.csv").write_text("step,reward,kl\n1,0.25,nan\n2,0.5,nan\n3,0.7")
    assert main(["track", str(tmp_path / "first"), "--to", "tensorboard"]) == 0
    assert capsys.readouterr().out == "2 steps logged to tensorboard as first\n"
    assert of_tensorboard(tmp_path / "first") == {"reward": [(1, 0.25), (2, 0.5)]}


def test_parquet_files_of_a_dataset_are_read(tmp_path):
    """Here, since pyarrow comes with these packages."""
    (tmp_path / "data").mkdir()
    for split, part, question in (("test", 1, "b"), ("test", 0, "a"), ("train", 0, "c")):
        table = pyarrow.table({"question": [question], "answer": ["1"]})
        parquet.write_table(table, tmp_path / "data" / f"{split}-0000{part}-of-00002.parquet")
    assert [action.message for action in load_tasks(tmp_path, split="test")] == ["a", "b"]
