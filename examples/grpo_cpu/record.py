"""The folder of a run: what was trained, figures of each step, and where a killed run continues.

    settings.json                what the run is; another one is refused
    ledger.json                  the steps that count: their figures, tasks and episodes
    metrics.csv, reward.svg      the figures of the ledger
    steps/step-000003/           what a step trained: rows.safetensors, trajectories/, step.json
    checkpoints/checkpoint-3/    weights, optimizer and random state, by TRL
    evaluation/                  results of the held-out tasks, before and after
    server.log, trainer.log
    lock                         held by the command that runs

A step counts as soon as the ledger has it, after its checkpoint is complete. What a kill leaves of another step is
removed before the run continues, so no episode is trained twice. Episodes that were sampled for a step and would have
been trained by the next one are lost with the kill.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

STEP = "step-{:06d}"
CHECKPOINT = "checkpoint-{}"
EPISODE = "task-{} #{}"
"""The name of an episode: its task, and which of the task's samples it is, as evaluations name theirs."""


class RunError(RuntimeError):
    """The run cannot continue; the message says what to do."""


class Run:
    """The folder of a run.

    Attributes:
        folder: The folder.
        steps: The ledger: a step's number, weight version, figures, tasks and episodes, in order.
    """

    def __init__(self, folder: Path) -> None:
        """Read the ledger, if there is one."""
        self.folder = folder
        self.steps_folder, self.checkpoints = folder / "steps", folder / "checkpoints"
        self.steps: list[dict[str, Any]] = []
        self.read_ledger()

    def read_ledger(self) -> None:
        """Read the steps that count, which the trainer's process may have added to."""
        path = self.folder / "ledger.json"
        self.steps = json.loads(path.read_text()) if path.exists() else []

    def open(self, settings: dict[str, Any]) -> None:
        """Make the folder, or check that it belongs to these settings, and remove steps that do not count.

        It is this process's until the process ends.

        Raises:
            RunError: It belongs to other settings, or another command runs in it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another command runs in {self.folder}: wait for it, or choose another --output") from None
        self.read_ledger()
        for folder in (self.steps_folder, self.checkpoints, self.folder / "evaluation"):
            folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "settings.json"
        if path.exists() and (found := json.loads(path.read_text())) != settings:
            differing = [name for name, value in settings.items() if found.get(name) != value]
            raise RunError(f"{self.folder} holds a run with another {', '.join(differing)}: choose another --output")
        write(path, json.dumps(settings, indent=1))
        if self.steps:  # a kill may have come between the ledger and its figures
            write(self.folder / "metrics.csv", as_csv(self.steps))
        done = len(self.steps)
        for folder in (*self.steps_folder.iterdir(), *self.checkpoints.iterdir()):
            number = folder.name.rpartition("-")[2]
            if folder.is_dir() and (folder.name.startswith(".") or not number.isdigit() or int(number) > done):
                shutil.rmtree(folder)

    @property
    def last_checkpoint(self) -> Path | None:
        """The checkpoint of the last step that counts; None before the first."""
        return self.checkpoints / CHECKPOINT.format(len(self.steps)) if self.steps else None

    def add(self, step: dict[str, Any]) -> None:
        """Let a step count.

        Raises:
            RunError: It is not the next one, or one of its episodes or tasks was trained before.
        """
        for name in ("episodes", "tasks"):
            seen = {one for earlier in self.steps for one in earlier[name]}
            if twice := seen.intersection(step[name]) or len(set(step[name])) < len(step[name]):
                raise RunError(f"step {step['step']} trains {name} a second time: {twice}")
        if step["step"] != len(self.steps) + 1:
            raise RunError(f"step {step['step']} follows step {len(self.steps)}")
        self.steps.append(step)
        write(self.folder / "ledger.json", json.dumps(self.steps, indent=1))
        write(self.folder / "metrics.csv", as_csv(self.steps))

    def save_step(self, number: int, facts: dict[str, Any], rows: Any, trajectories: dict[str, Any]) -> None:
        """Write the folder of a step: complete, or not at all."""
        final = self.steps_folder / STEP.format(number)
        hidden = final.with_name(f".{final.name}")
        for folder in (hidden, final):
            shutil.rmtree(folder, ignore_errors=True)
        (hidden / "trajectories").mkdir(parents=True)
        rows.save(hidden / "rows.safetensors")
        for name, trajectory in trajectories.items():
            trajectory.save(hidden / "trajectories" / f"{name}.safetensors")
        write(hidden / "step.json", json.dumps(facts, indent=1))
        hidden.rename(final)


def as_csv(steps: list[dict[str, Any]]) -> str:
    """Return the figures of the steps as CSV."""
    text = io.StringIO()
    names = ["step", "version", *(steps[0]["metrics"] if steps else ())]
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    for step in steps:
        writer.writerow({"step": step["step"], "version": step["version"], **step["metrics"]})
    return text.getvalue()


def write(path: Path, text: str) -> None:
    """Replace a file's content at once."""
    temporary = path.with_name(f".{path.name}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
