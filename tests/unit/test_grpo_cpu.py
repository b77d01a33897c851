"""The parts of examples/grpo_cpu that need no trainer: its tasks and the folder of a run."""

import contextlib
import itertools
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from strands_sglang.credit import Episode, training_rows
from support.agents import user
from support.recorder import Recorder

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_cpu"
RECORD = runpy.run_path(str(EXAMPLE / "record.py"))
CALCULATOR = runpy.run_path(str(EXAMPLE / "calculator_task.py"))
Run, RunError = RECORD["Run"], RECORD["RunError"]
STEP = {"version": 1, "metrics": {"reward": 0.5}}


def step(number, *names):
    return {**STEP, "step": number, "tasks": [int(name[0]) for name in names], "episodes": list(names)}


@pytest.fixture
def run(tmp_path):
    """A run with one step, by a command that has ended."""
    ended = Run(tmp_path / "run")
    ended.open({"seed": 0})
    ended.add(step(1, "0-a", "1-a"))
    del ended
    return Run(tmp_path / "run")


def test_two_commands_do_not_run_in_one_folder(run):
    run.open({"seed": 0})
    with pytest.raises(RunError, match="another command runs in .*run: wait for it"):
        Run(run.folder).open({"seed": 0})


@pytest.fixture
def command(monkeypatch):
    """What `python examples/grpo_cpu` runs, by name."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    return runpy.run_path(str(EXAMPLE / "__main__.py"))


def test_a_run_is_locked_to_its_end(command, tmp_path, monkeypatch):
    demo = command["run_demo"]
    locked = []

    def train(run, *_):
        Run(run.folder).add(step(1, "0-a"))  # as the trainer's process does

    def evaluate(run, *_):
        with pytest.raises(RunError, match="another command runs"):
            Run(run.folder).open({})
        locked.append(len(run.steps))
        return 0.5

    server = contextlib.nullcontext(SimpleNamespace(base_url=""))
    nothing = dict.fromkeys(("trainer_environment", "serve_weights", "save_plot", "summarize"), lambda *_: None)
    for name, fake in {**nothing, "train": train, "evaluate": evaluate}.items():
        monkeypatch.setitem(demo.__globals__, name, fake)
    for name in ("ensure_sglang", "ensure_tiny_qwen3", "start_server"):
        monkeypatch.setattr(demo.__globals__["local"], name, lambda *_, **__: server)
    demo(SimpleNamespace(output=tmp_path / "run", fast=True))
    assert locked == [0, 1]


def test_a_kill_after_the_ledger_costs_no_figures(run):
    figures = run.folder / "metrics.csv"
    written = figures.read_text()
    figures.unlink()
    Run(run.folder).open({"seed": 0})
    assert figures.read_text() == written


def test_no_episode_and_no_task_counts_twice(run):
    for number, (episodes, message) in enumerate(
        [(["0-a"], "trains episodes a second time"), (["0-b"], "trains tasks"), (["2-a", "2-a"], "trains episodes")]
    ):
        with pytest.raises(RunError, match=message):
            run.add(step(2, *episodes))
        assert len(Run(run.folder).steps) == 1, number
    with pytest.raises(RunError, match="step 3 follows step 1"):
        run.add(step(3, "2-a"))
    run.add(step(2, "2-a"))
    assert [one["episodes"] for one in Run(run.folder).steps] == [["0-a", "1-a"], ["2-a"]]
    assert (run.folder / "metrics.csv").read_text().split() == ["step,version,reward", "1,1,0.5", "2,1,0.5"]


def test_a_step_that_does_not_count_is_removed(run):
    recorder = Recorder()
    recorder.call([user("q")], "a")
    rows = training_rows([Episode(recorder.trajectory, 1.0, 0, "e")], baseline=None)
    for number in (1, 2):
        run.save_step(number, STEP, rows, {"e": recorder.trajectory})
        (run.checkpoints / f"checkpoint-{number}").mkdir()
    (run.steps_folder / ".step-000003").mkdir()
    again = Run(run.folder)
    again.open({"seed": 0})
    assert [path.name for path in run.steps_folder.iterdir()] == ["step-000001"]
    assert [path.name for path in run.checkpoints.iterdir()] == ["checkpoint-1"] == [again.last_checkpoint.name]
    kept = run.steps_folder / "step-000001"
    assert json.loads((kept / "step.json").read_text()) == STEP
    assert {path.name for path in kept.iterdir()} == {"step.json", "rows.safetensors", "trajectories"}


def test_another_run_in_the_folder_is_refused(run):
    with pytest.raises(RunError, match="a run with another seed: choose another --output"):
        Run(run.folder).open({"seed": 1})


@pytest.mark.parametrize(("option", "least"), [("--steps", 1), ("--samples", 2)])
def test_a_run_of_nothing_is_refused(command, option, least, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["examples/grpo_cpu", option, str(least - 1)])
    with pytest.raises(SystemExit) as ended:
        command["read_options"]()
    assert ended.value.code == 2 and capsys.readouterr().err.endswith(f"{option} must be at least {least}\n")


def test_tasks_are_the_same_each_time_and_not_held_out():
    settings = SimpleNamespace(seed=3, held_out=48, is_fast=False)
    first, again = (list(itertools.islice(CALCULATOR["training"](settings), 200)) for _ in range(2))
    assert first == again and len({task.task_context.id for task in first}) == 200
    assert not {task.message for task in CALCULATOR["held_out"](settings)} & {task.message for task in first}
    operations = {len(task.message.split()) // 2 - 1 for task in first}
    assert operations == {1, 2, 3}


def test_a_task_that_cannot_be_made_is_refused_before_anything_starts(tmp_path):
    command = [sys.executable, EXAMPLE, "--task", "no_such_task", "--output", tmp_path / "run"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1 and "--task no_such_task: No module named 'no_such_task'" in ended.stderr
