"""What `strands-env watch` shows: an evaluation or a training run while it is written, read from its files only.

An evaluation is the folder of `strands-env eval`, and its numbers are those of `strands-env report`. A training run is
a folder with `metrics.csv`: a header with the columns' names, then a line per step. If it also has
`steps/step-000003/rows.safetensors`, as `TrainingRows.save` writes it, the view has the outcomes of the last step.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from strands_sglang import terminal
from strands_sglang.credit import RowsFileError, TrainingRows
from strands_sglang.shown import visible
from strands_sglang.terminal import wrapped

from .eval.checkpoint import CheckpointError, EvalSample, ResultsReader, read_status, results_file, side_file, time_span
from .eval.metrics import (
    end_lines,
    headline,
    metric_lines,
    metric_rows,
    standard_metrics,
    table_lines,
)

WINDOW_S = 300.0
"""Seconds over which a rate is measured."""

BEGINS_WITHIN_S = 60.0
"""Seconds within which an evaluation that was just started or continued runs its first sample."""

SLOWEST = 3
STEPS_SHOWN = 8
FIRST_COLUMNS = ("step", "version", "reward", "staleness_mean", "staleness_max", "seconds")
"""Columns of a training run that are shown before others."""

_FAILURES = ("dropped", "errored", "last failure")
"""What lines about failures begin with."""

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class View:
    """What is shown at one time.

    Attributes:
        title: What is watched.
        done: Samples or steps that are finished.
        total: All of them; None if it is unknown.
        lines: The text below the progress.
        is_over: Whether nothing more will come: it is done, or no process runs it.
        alarms: What needs a hand; shown above the text.
        headline: The number that matters most; shown above the progress.
    """

    title: str
    done: int
    total: int | None
    lines: list[str]
    is_over: bool = False
    alarms: Sequence[str] = ()
    headline: str = ""

    def __rich__(self) -> RenderableType:
        """Lay out the view, with control characters written out."""
        parts: list[RenderableType] = [
            Text(visible(line), "bold", no_wrap=True, overflow="ellipsis")
            for line in (self.title, self.headline)
            if line
        ]
        if self.total:
            bar = Table.grid(padding=(0, 1))
            shown = f"{self.done}/{self.total}"
            progress = ProgressBar(self.total, self.done, width=50, complete_style="blue", finished_style="green")
            bar.add_row(progress, shown)
            parts.append(bar)
        parts += [Text(line, style="red") for line in map(visible, self.alarms)]
        for line in map(visible, self.lines):
            parts.append(Text(line, style="red" if line.startswith(_FAILURES) else ""))
        return Group(*parts)


def open_run(folder: str | Path) -> Callable[[float], View] | None:
    """Return a function that reads what is new in a folder and returns the view; None if there is nothing yet.

    Args:
        folder: Folder of an evaluation or of a training run, or a results file.
    """
    path = Path(folder)
    if side_file(results_file(path), ".run.json").exists():
        return EvaluationView(path)
    if (path / "metrics.csv").exists() or (path / "steps").is_dir():
        return TrainingView(path)
    return None


def watch(folder: str | Path, *, seconds: float = 1.0, success_threshold: float = 1.0) -> View | None:
    """Show a run on the terminal until it is over or Ctrl-C is pressed; return the last view.

    If standard output is not a terminal, the view is printed once.

    Args:
        folder: Folder of an evaluation or of a training run.
        seconds: Time between two looks at the files.
        success_threshold: Minimum reward of a success.

    Raises:
        CheckpointError: The files are damaged.
    """
    console = Console(highlight=False, soft_wrap=False)
    view: View | None = None
    read: Callable[[float], View] | None = None

    def look() -> View:
        nonlocal read
        if read is None:
            read = open_run(folder)
            if isinstance(read, EvaluationView):
                read.success_threshold = success_threshold
        if read is None:
            return View("nothing to watch yet", 0, None, wrapped(f"waiting for {folder}"))
        return read(time.time())

    if not console.is_terminal:
        view = look()
        if read is not None:
            console.print(view)
        return None if read is None else view
    try:
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while not (view and view.is_over):
                view = look()
                live.update(view, refresh=True)
                if not view.is_over:
                    time.sleep(seconds)
    except KeyboardInterrupt:
        pass
    console.print(view)
    return view


# --- an evaluation ---


class EvaluationView:
    """Reads an evaluation, each time only what was added."""

    def __init__(self, path: Path) -> None:
        """Set the folder or file; nothing is read yet.

        Args:
            path: Folder of the evaluation, or its results file.
        """
        self.success_threshold = 1.0
        self._reader = ResultsReader(path)
        self._shown: tuple[Any, list[str], str] = (None, [], "")

    def __call__(self, now: float) -> View:
        """Read what is new.

        Args:
            now: The time, in seconds since 1970.

        Raises:
            CheckpointError: The files are damaged.
        """
        run, results = self._reader.read()
        status = read_status(self._reader.path)
        samples = list(chain.from_iterable(results.values()))
        finished, total = sum(sample.is_finished for sample in samples), len(run.sample_keys)
        running = min(status.running, total - finished) if status else None
        alarms: list[str] = []
        is_over = finished >= total
        if status is None and not is_over:
            alarms = wrapped("no process runs this evaluation now: run the same command again to continue")
            plan = side_file(results_file(self._reader.path), ".run.json")
            is_over = now - plan.stat().st_mtime > BEGINS_WITHIN_S
        for outage in status.outages if status else ():
            alarms += wrapped(outage)
        if self._shown[0] != (self._reader.state, running):
            metrics = standard_metrics(
                results, n_samples_per_prompt=run.n_samples_per_prompt, success_threshold=self.success_threshold
            )
            if running is not None:  # a dropped sample that runs again is both
                metrics["running_samples"] = float(running)
                metrics["queued_samples"] = max(0.0, metrics.pop("waiting_samples") - running)
            slowest = sorted(samples, key=lambda sample: -sample.seconds)[:SLOWEST]
            told = [f"{sample.name} {duration(sample.seconds)}" for sample in slowest]
            counts = metric_lines(metrics)
            counts = counts[counts.index("") + 1 :]  # what runs comes first: a small screen has no room for the table
            head, *rows = metric_rows(metrics)
            rows = [row for row in rows if row[0] == "pass@1" or row[3] == str(len(results))]
            rows.sort(key=lambda row: row[0] not in ("pass@1", f"avg@{run.n_samples_per_prompt}"))
            lines = [*counts, *end_lines(results), "", *table_lines([head, *rows]), ""]
            lines += wrapped(f"slowest: {', '.join(told)}") if told else []
            score = headline(metrics)
            if score and finished < total:
                score = f"so far {score}"
            self._shown = ((self._reader.state, running), lines, score)
        title = f"{run.benchmark or 'evaluation'}: {len(run.prompts)} prompts x {run.n_samples_per_prompt} samples"
        if (span := time_span(self._reader.path, samples)) is not None:
            took = duration(span[1] - span[0])
            title += f", {took} so far" if finished < total else f", took {took}"
        # How long an outage lasts is unknown; and before each slot has ended once, the slow episodes are not seen.
        missing = 0 if alarms or len(samples) < (running or 0) else total - finished
        lines = [*pace_lines(samples, missing, now), *failure_lines(samples, now), *self._shown[1]]
        return View(title, finished, total, lines, is_over, alarms, self._shown[2])


def pace_lines(samples: Sequence[EvalSample], missing: int, now: float) -> list[str]:
    """How fast samples get a result, and how long the others take.

    Args:
        samples: The samples that have ended; dropped ones have no result.
        missing: Number of samples that are not finished; 0 if it cannot be known how long they take.
        now: The time, in seconds since 1970.
    """
    done = [sample.ended_at for sample in samples if sample.is_finished]
    ends = sorted(end for end in done if end is not None)
    if not ends:
        return ["rate: unknown"] if done else ["no result yet"]
    now = max(now, ends[-1])
    recent = [end for end in ends if now - end <= WINDOW_S]
    since = f"last result {duration(now - ends[-1])} ago"
    if len(recent) < 2 or not missing:
        return [since]
    rate = (len(recent) - 1) / max(now - recent[0], 1e-3)
    return [f"{rate * 60:.1f} samples a minute, {duration(missing / rate)} left, {since}"]


def failure_lines(samples: Sequence[EvalSample], now: float) -> list[str]:
    """The last sample that failed, and when; the causes are among the ends.

    Args:
        samples: The samples that have ended.
        now: The time, in seconds since 1970.
    """
    failed = [sample for sample in samples if sample.is_errored or not sample.is_finished]
    if not failed:
        return []
    last = max(failed, key=lambda sample: sample.ended_at or 0.0)
    ago = "" if last.ended_at is None else f" {duration(max(0.0, now - last.ended_at))} ago"
    return wrapped(f"last failure{ago}: {last.name}")


def duration(seconds: float) -> str:
    """Format a time, such as `1 h 05 min`."""
    if seconds < 60 or not math.isfinite(seconds):
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


# --- a training run ---


class TrainingView:
    """Reads the steps of a training run."""

    def __init__(self, folder: Path) -> None:
        """Set the folder; nothing is read yet.

        Args:
            folder: Folder of the run.
        """
        self._folder = folder
        self._last: tuple[Path | None, list[str]] = (None, [])

    def __call__(self, now: float) -> View:
        """Read the steps.

        Args:
            now: The time, in seconds since 1970.
        """
        path = self._folder / "metrics.csv"
        names, steps = read_steps(path)
        total = self._total()
        lines = []
        if steps:
            changed = path.stat().st_mtime
            lines += [*self._pace(steps, total, max(0.0, now - changed)), ""]
            lines += [*step_table(names, steps[-STEPS_SHOWN:], width=terminal.width()), ""]
        for name in ("reward", "staleness_mean"):
            values = [step.get(name, math.nan) for step in steps]
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                low, high = min(finite), max(finite)
                told = f"{finite[0]:.4g} -> {finite[-1]:.4g} ({low:.4g} to {high:.4g})"
                if low == high:
                    told = f"{low:.4g} in each step"
                bars = spark(values[-max(1, terminal.width() - 17 - len(told)) :])
                lines.append(f"{name:<15}{bars}  {told}"[: terminal.width()])
        lines += self._outcomes()
        is_over = total is not None and len(steps) >= total
        took = sum(step["seconds"] for step in steps if step.get("seconds", 0) > 0)
        title = f"{self._folder.name}: training" + (f" for {duration(took)}" if took else "")
        return View(title, len(steps), total, lines, is_over=is_over)

    def _total(self) -> int | None:
        try:
            steps = json.loads((self._folder / "settings.json").read_text(encoding="utf-8"))["steps"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return steps if isinstance(steps, int) and steps > 0 else None

    def _pace(self, steps: Sequence[dict[str, float]], total: int | None, silent: float) -> list[str]:
        since = f"last step {duration(silent)} ago"
        timed = [(step["seconds"], step.get("step", math.nan)) for step in steps if step.get("seconds", 0) > 0]
        if not timed:
            return [since]
        recent = [seconds for seconds, _ in timed[-STEPS_SHOWN:]]
        each = sum(recent) / len(recent)
        left = f", {duration(max(0.0, (total - len(steps)) * each))} left" if total and total > len(steps) else ""
        slowest = ", ".join(
            f"{number:g} {duration(seconds)}" for seconds, number in sorted(timed, reverse=True)[:SLOWEST]
        )
        return [f"{duration(each)} a step{left}, {since}", *wrapped(f"slowest steps: {slowest}")]

    def _outcomes(self) -> list[str]:
        """How the episodes of the last step ended, and why some are left out."""
        steps = self._folder / "steps"
        found = sorted(one for one in steps.glob("step-*/rows.safetensors")) if steps.is_dir() else []
        if not found:
            return []
        if self._last[0] != found[-1]:
            try:
                rows = TrainingRows.load(found[-1])
            except (OSError, RowsFileError) as error:
                return wrapped(f"{found[-1].parent.name}: {error}")
            ends = Counter(str(one.get("outcome")) for one in rows.episodes.values())
            lines = (
                wrapped(f"ends: {', '.join(f'{count} {name}' for name, count in ends.most_common())}") if ends else []
            )
            for reason, count in rows.counts.most_common():
                lines += wrapped(f"left out: {count} x {reason}")
            self._last = (found[-1], ["", f"{found[-1].parent.name}:", *lines])
        return self._last[1]


def read_steps(path: Path) -> tuple[list[str], list[dict[str, float]]]:
    """Read the figures of steps; what is not a number is NaN, and an incomplete last line is left out.

    Args:
        path: The CSV file.

    Returns:
        The names of the columns, and the steps.

    Raises:
        CheckpointError: The file is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [], []
    whole = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(io.StringIO(whole))
    try:
        names = [name for name in reader.fieldnames or () if name]
        steps = [{name: _number(row.get(name)) for name in names} for row in reader if None not in row]
    except csv.Error as error:
        raise CheckpointError(f"{path}: not CSV: {error}") from error
    return names, steps


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def step_table(names: Sequence[str], steps: Sequence[dict[str, float]], *, width: int = 80) -> list[str]:
    """Format steps as a table with as many columns as there is room for.

    Args:
        names: Names of all columns.
        steps: The steps.
        width: Width in columns.
    """
    ordered = [name for name in FIRST_COLUMNS if name in names] + [name for name in names if name not in FIRST_COLUMNS]
    rows, used = [""] * (len(steps) + 1), 0
    for name in ordered:
        cells = [visible(name), *(f"{step[name]:.4g}" for step in steps)]
        wide = max(map(len, cells)) + (2 if used else 0)
        if used + wide <= width:
            rows = [row + cell.rjust(wide) for row, cell in zip(rows, cells, strict=True)]
            used += wide
    return rows


def spark(values: Sequence[float]) -> str:
    """Draw values as bars of one row; what is not a finite number is a space."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    step = (high / 2 - low / 2) or 1.0  # halves, since the difference of large numbers is infinite
    return "".join(
        _BARS[round((value / 2 - low / 2) / step * (len(_BARS) - 1))] if math.isfinite(value) else " "
        for value in values
    )
