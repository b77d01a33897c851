"""What `strands-env watch` shows: an evaluation or a training run while it is written, read from its files only.

An evaluation is the folder of `strands-env eval`, and its numbers are those of `strands-env report`. A training run is
a folder with `metrics.csv`: a header with the columns' names, then a line per step. If it also has
`steps/step-000003/rows.safetensors`, as `TrainingRows.save` writes it, the view has the outcomes of the last step.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import select
import shutil
import signal
import statistics
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from strands_sglang import terminal
from strands_sglang.credit import RowsFileError, TrainingRows
from strands_sglang.shown import counted, visible
from strands_sglang.terminal import wrapped

from .eval.checkpoint import (
    CheckpointError,
    EvalSample,
    ResultsReader,
    Status,
    read_status,
    results_file,
    side_file,
    time_span,
)
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

SILENT_TIMES, SILENT_S, FIRST_S = 3, 30.0, 180.0
"""What takes this many times as long as the slowest before it, and this many seconds, hangs; the first take longer."""

SLOWEST = 3
STEPS_SHOWN = 8
LOSSES = ("loss", "grad_norm", "kl")
"""What the columns begin with whose numbers tell that a training run diverges."""
BLOWN_UP = 30.0
FIRST_COLUMNS = ("eval", "kl", "entropy", "loss", "grad_norm", "clip", "gap")
"""What the columns of a training run begin with that are shown before others, after step and reward."""

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
        has_stopped: Whether it is not done, and no process seems to run it.
        alarms: What needs a hand; shown above the text.
        headline: The number that matters most; shown above the progress.
    """

    title: str
    done: int
    total: int | None
    lines: list[str]
    is_over: bool = False
    has_stopped: bool = False
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
            progress = ProgressBar(self.total, self.done, width=50, complete_style="blue", finished_style="green")
            bar.add_row(progress, f"{self.done}/{self.total}")
            parts.append(bar)
        for line in map(visible, self.alarms):
            parts.append(Text(line if line.startswith(" ") else f"! {line}", style="red"))
        is_red = False
        for line in map(visible, self.lines):
            is_red = line.startswith(_FAILURES) or is_red and line.startswith(" ")  # the rest of a wrapped line
            text = Text(line, style="red" if is_red else "")
            text.highlight_regex(r"(?<= )nan(?= |$)", "red")
            parts.append(text)
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
    """Show a run on the terminal until it is over, or q or Ctrl-C is pressed; return the last view, None without a run.

    If standard output is not a terminal, or a dumb one, the view is printed once.

    Args:
        folder: Folder of an evaluation or of a training run.
        seconds: Time between two looks at the files.
        success_threshold: Minimum reward of a success.

    Raises:
        CheckpointError: The files are damaged.
    """
    console = Console(highlight=False, soft_wrap=False)
    read: Callable[[float], View] | None = None
    began = time.monotonic()

    def look() -> View:
        nonlocal read
        if read is None:
            read = open_run(folder)
            if isinstance(read, EvaluationView):
                read.success_threshold = success_threshold
        if read is None:
            lacks = "has nothing to watch" if Path(folder).exists() else "does not exist"
            told = f"{folder} {lacks} yet: waiting for {duration(time.monotonic() - began)}, Ctrl-C to stop"
            return View("nothing to watch yet", 0, None, wrapped(told))
        return read(time.time())

    view = look()
    if console.is_terminal and not console.is_dumb_terminal:
        layout = Layout()
        layout.split_column(Layout(name="view"), Layout("q or Ctrl-C to stop", size=1))
        with (
            contextlib.suppress(KeyboardInterrupt),
            stop_key() as is_pressed,
            Live(layout, console=console, screen=True, auto_refresh=False) as live,
        ):
            while not view.is_over:
                layout["view"].update(view)
                live.refresh()
                if is_pressed(seconds):
                    break
                view = look()
    if read is None:
        return None
    console.print(view)
    return view


@contextlib.contextmanager
def stop_key() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for q, at most so many seconds; the terminal does not show what is typed.

    SIGTERM is like Ctrl-C meanwhile, so that the terminal is as before in the end.
    """
    keyboards = [sys.stdin.fileno()] if terminal.is_terminal(sys.stdin) else []
    modes = {one: termios.tcgetattr(one) for one in keyboards}
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for one in keyboards:
            tty.setcbreak(one)
        yield lambda seconds: any(
            b"q" in (os.read(one, 64) or b"q") for one in select.select(keyboards, [], [], seconds)[0]
        )  # a terminal without bytes is closed
    finally:
        for one, mode in modes.items():
            termios.tcsetattr(one, termios.TCSAFLUSH, mode)
        signal.signal(signal.SIGTERM, handler)


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
        status = read_status(self._reader.path) or Status({}, 0)
        samples = list(chain.from_iterable(results.values()))
        finished, total = sum(sample.is_finished for sample in samples), len(run.sample_keys)
        ended = {sample.name: sample.ended_at or 0.0 for sample in samples}
        # The status is a little older than the results.
        began = {name: at for name, at in status.began.items() if ended.get(name, 0.0) < at}
        running, unfinished = len(began), status.left - len(status.began) + len(began)
        first, last = time_span(self._reader.path, samples) or (0.0, 0.0)
        took = duration(last - first)
        has_ended = is_over = finished >= total
        has_stopped = not is_over and not status.left
        slow = max((sample.seconds for sample in samples if sample.is_finished), default=0.0)
        most = max(SILENT_TIMES * slow, SILENT_S) if finished else FIRST_S
        hung = [now - at for at in began.values() if now - at > most]
        alarms = [*status.outages]
        has_time = not alarms and not has_stopped and len(samples) >= running
        if hung and not alarms:
            before = f"the slowest that ended took {duration(slow)}" if finished else "none has ended yet"
            told = f"running for {duration(min(hung))} or more, {before}"
            alarms = [f"{counted(len(hung), 'sample')} may hang: {told}"]
        if has_stopped:
            started = side_file(results_file(self._reader.path), ".run.json").stat().st_mtime
            has_ended = len(samples) == total and last > started  # else another process has begun
            is_over = has_ended or now - started > BEGINS_WITHIN_S
            why = f"ended after {took}" if has_ended else "no process runs this evaluation now"
            what = "retry them" if has_ended else "continue"
            dropped = f", {len(samples) - finished} dropped" if len(samples) > finished else ""
            scored = f"{finished} of {total} scored{dropped}"
            alarms = [f"{why}: {scored}; run the same command again to {what}"]
        key = (self._reader.state, running, unfinished, has_ended, terminal.width())
        if self._shown[0] != key:
            metrics = standard_metrics(
                results, n_samples_per_prompt=run.n_samples_per_prompt, success_threshold=self.success_threshold
            )
            if unfinished:  # a dropped sample that runs again is both
                metrics |= {"running_samples": running, "queued_samples": unfinished - running, "waiting_samples": 0}
            slowest = sorted(samples, key=lambda sample: -sample.seconds)[:SLOWEST]
            named = [f"{sample.name} {duration(sample.seconds)}" for sample in slowest]
            counts = metric_lines(metrics)
            counts = counts[counts.index("") + 1 :]  # what runs comes first: a small screen has no room for the table
            head, *rows = metric_rows(metrics)
            rows = [row for row in rows if row[0] == "pass@1" or row[3] == str(len(results))]
            rows.sort(key=lambda row: row[0] not in ("pass@1", f"avg@{run.n_samples_per_prompt}"))
            lines = [*counts, *end_lines(results), "", *table_lines([head, *rows]), ""]
            lines += wrapped(f"slowest: {', '.join(named)}") if named else []
            score = headline(metrics)
            if score and not has_ended:
                score = f"so far {score}"
            self._shown = (key, lines, score)
        title = f"{run.benchmark or 'evaluation'}: {len(run.prompts)} prompts x {run.n_samples_per_prompt} samples"
        if last:
            title += f", took {took}" if has_ended else f", {took} so far"
        # How long an outage lasts is unknown; and before each slot has ended once, the slow episodes are not seen.
        lines = pace_lines(samples, unfinished - len(hung) if has_time else 0, now)
        longest = [f"{name} {duration(now - at)}" for name, at in began.items()]
        lines += wrapped(f"running longest: {', '.join(longest[:SLOWEST])}") if longest else []
        lines += [*failure_lines(samples, now), *self._shown[1]]
        return View(title, finished, total, lines, is_over, has_stopped, alarms, self._shown[2])


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
    if now - ends[-1] > max(10 / rate, *(sample.seconds for sample in samples)):  # something is not as before
        return [f"{rate * 60:.1f} samples a minute, {since}"]
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


def duration(seconds: float, least: float = 60.0) -> str:
    """Format a time, such as `1 h 05 min`; below `least` in seconds."""
    if seconds < least or not math.isfinite(seconds):
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
        names, total = ranked(names, steps), self._total()
        missing = max(0, (total or math.inf) - len(steps))
        more = max(0, shutil.get_terminal_size().lines - 24) // 2
        lines, alarms = self._pace(steps, missing, now)
        has_stopped = bool(alarms and total)
        alarms += [*nan_alarms(names, steps), *blown_up(names, steps)]
        if names and steps:
            lines += ["", *step_table(names, steps[-STEPS_SHOWN - more :]), ""]
        drawn = [name for name in names if name not in ("step", "version") and _finite(steps, name)]
        for name in drawn[: 2 + more]:
            finite = _finite(steps, name)
            values = [step.get(name, math.nan) for step in steps]
            last = [step[name] for step in steps if name in step][-1]
            told = f"{finite[0]:.4g} -> {last:.4g}"
            if not {min(finite), max(finite)} <= {finite[0], last}:
                told += f" ({min(finite):.4g} to {max(finite):.4g})"
            bars = spark(values[-max(1, terminal.width() - 17 - len(told)) :])
            lines.append(f"{name[:14]:<15}{bars}  {told}"[: terminal.width()])
        lines += self._outcomes()
        took = sum(_finite(steps, "seconds"))
        title = f"{self._folder.name}: training" + (f" for {duration(took)}" if took else "")
        return View(title, len(steps), total, lines, not missing, has_stopped, alarms, _reward(steps))

    def _total(self) -> int | None:
        try:
            steps = json.loads((self._folder / "settings.json").read_text(encoding="utf-8"))["steps"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return steps if isinstance(steps, int) and steps > 0 else None

    def _pace(self, steps: Sequence[dict[str, float]], missing: float, now: float) -> tuple[list[str], list[str]]:
        """How long steps take and when the missing ones will be done, and an alarm if none has come for long."""
        silent = 0.0
        with contextlib.suppress(OSError):
            silent = max(0.0, now - (self._folder / "metrics.csv").stat().st_mtime)
        if not steps:
            return [], [f"no step yet for {duration(silent)}"] if silent > 10 * FIRST_S else []
        since = f"last step {duration(silent)} ago"
        timed = [(step["seconds"], step.get("step", math.nan)) for step in steps if step.get("seconds", 0) > 0]
        if not timed:
            return [since], []
        recent = [seconds for seconds, _ in timed[-STEPS_SHOWN:]]
        each = sum(recent) / len(recent)
        pace, alarms = f"{duration(each)} a step", []
        if missing and silent > max(SILENT_TIMES * max(recent), SILENT_S):
            alarms = [f"no step for {duration(silent)} (a step takes {duration(each)})"]
        elif 0 < missing < math.inf:
            pace += f", {duration(missing * each)} left"
        slowest = ", ".join(
            f"step {number:g}: {duration(seconds, 120.0)}" for seconds, number in sorted(timed, reverse=True)[:SLOWEST]
        )
        return [f"{pace}, {since}", *wrapped(f"slowest: {slowest}")], alarms

    def _outcomes(self) -> list[str]:
        """How the episodes of the last step ended, and why some are left out."""
        found = sorted(self._folder.glob("steps/step-*/rows.safetensors"))
        if not found:
            return []
        if self._last[0] != found[-1]:
            try:
                rows = TrainingRows.load(found[-1])
            except (OSError, RowsFileError) as error:
                return wrapped(f"{found[-1].parent.name}: {error}")
            ends = Counter(str(one.get("outcome")) for one in rows.episodes.values())
            lines = wrapped(f"ends: {', '.join(f'{count} {name}' for name, count in ends.most_common())}")
            for reason, count in rows.counts.most_common():
                lines += wrapped(f"left out: {count} x {reason}")
            self._last = (found[-1], ["", f"{found[-1].parent.name}:", *lines])
        return self._last[1]


def read_steps(path: Path) -> tuple[list[str], list[dict[str, float]]]:
    """Read the figures of steps; what is not a number is NaN. Empty cells and an incomplete last line are left out.

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
        steps = [{name: _number(row[name]) for name in names if row[name]} for row in reader if None not in row]
    except csv.Error as error:
        raise CheckpointError(f"{path}: not CSV: {error}") from error
    return names, steps


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _finite(steps: Sequence[dict[str, float]], name: str) -> list[float]:
    return [step[name] for step in steps if math.isfinite(step.get(name, math.nan))]


def _reward(steps: Sequence[dict[str, float]]) -> str:
    """The reward of the last step, and the best one; empty without rewards."""
    finite = _finite(steps, "reward")
    if not finite:
        return ""
    rewards = [step.get("reward", math.nan) for step in steps]
    at = rewards.index(max(finite))
    return f"reward {rewards[-1]:.3f}, best {rewards[at]:.3f} at step {steps[at].get('step', at + 1):g}"


def nan_alarms(names: Sequence[str], steps: Sequence[dict[str, float]]) -> list[str]:
    """The columns that have been NaN for longer than before, and since which step; those of losses also if ever since.

    Args:
        names: Names of the columns.
        steps: The steps.
    """
    since: dict[float, list[str]] = {}
    for name in names:
        marks = "".join("n" if math.isnan(step.get(name, 0.0)) else " " for step in steps)
        *before, last = marks.split(" ")  # runs of NaN
        least = max(map(len, before)) if before else 0 if name.startswith(LOSSES) else len(last)
        if len(last) > least:
            at = len(steps) - len(last)
            since.setdefault(steps[at].get("step", at + 1), []).append(name)
    return [f"{', '.join(several)}: nan since step {step:g}" for step, several in since.items()]


def blown_up(names: Sequence[str], steps: Sequence[dict[str, float]]) -> list[str]:
    """What has become far larger than usual, and a reward that is gone.

    Args:
        names: Names of the columns.
        steps: The steps.
    """
    alarms = []
    for name in names:
        finite = _finite(steps, name)
        if len(finite) > STEPS_SHOWN and name.startswith(LOSSES):
            usual = statistics.median(map(abs, finite))
            if usual and min(map(abs, finite[-2:])) > BLOWN_UP * usual:
                alarms.append(f"{name}: {finite[-1]:.4g}, usually {usual:.4g}")
    rewards = _finite(steps, "reward")
    means = [sum(rewards[at - 3 : at]) / 3 for at in range(3, len(rewards) + 1)]
    if means and max(means) > 0 and means[-1] < max(means) / 5:
        alarms.append(f"reward: {means[-1]:.3f} in the last three steps, {max(means):.3f} in the best three")
    return alarms


def ranked(names: Sequence[str], steps: Sequence[dict[str, float]]) -> list[str]:
    """Sort columns: step and reward, what is NaN now, `FIRST_COLUMNS`, what changes, and what does not.

    Args:
        names: Names of all columns.
        steps: The steps.
    """

    def rank(name: str) -> tuple[bool, int]:
        if name in ("step", "reward"):
            return False, -2 if name == "step" else -1
        is_constant = name == "version" or len({str(step.get(name)) for step in steps}) == 1
        is_nan = bool(nan_alarms([name], steps))
        places = [at for at, start in enumerate(FIRST_COLUMNS, 1) if name.startswith(start)]
        return is_constant, 0 if is_nan else min(places, default=len(FIRST_COLUMNS) + 1)

    return sorted(names, key=rank)


def step_table(names: Sequence[str], steps: Sequence[dict[str, float]]) -> list[str]:
    """Format steps as a table with as many columns as there is room for; a last line counts the others.

    Args:
        names: Names of all columns, those that matter most first.
        steps: The steps.
    """
    rows = [[visible(name)[:30] for name in names]]
    rows += [[f"{step[name]:.4g}" if name in step else "-" for name in names] for step in steps]
    lines = table_lines(rows)
    left = sum(f" {name} " not in f" {lines[0]} " for name in rows[0])
    return [*lines, f"+{counted(left, 'column')}"] if left else lines


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
