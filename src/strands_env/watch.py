"""What `strands-env watch` shows: an evaluation or a training run while it is written, read from its files only.

An evaluation is the folder of `strands-env eval`, and its numbers are those of `strands-env report`. A training run is
a folder with `metrics.csv`: a header with the columns' names, then a line per step. If it also has
`steps/step-000003/rows.safetensors`, as `TrainingRows.save` writes it, the view has the outcomes of the last step.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import math
import os
import select
import shlex
import shutil
import signal
import statistics
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    decode,
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

Steps = Sequence[dict[str, float]]
"""The figures of steps by column, without those that are empty."""

_BARS = " ▁▂▃▄▅▆▇█"

ROWS = 9
"""Rows for title, headline, progress, blanks, header and count of the table, and footer; the prompt needs some more."""

PLOT_ROWS = 3
"""Rows of each plot, the one with its name included."""


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
        next: The command that shows more; shown once the run is over, or with alarms.
    """

    title: str
    done: int
    total: int | None
    lines: list[str]
    is_over: bool = False
    has_stopped: bool = False
    alarms: Sequence[str] = ()
    headline: str = ""
    next: str = ""

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
        for alarm in self.alarms:
            parts += [Text(line, "red") for line in wrapped(f"! {alarm}")]
        if self.alarms:
            parts += map(Text, wrapped(f"next: {self.next}"))
        is_red = False
        for line in map(visible, self.lines):
            is_red = line.startswith(_FAILURES) or is_red and line.startswith(" ")  # the rest of a wrapped line
            parts.append(Text(line, style="red" if is_red else ""))
        if self.is_over and not self.alarms:  # at the end, which any screen shows
            parts.append(Text(visible(f"done; next: {self.next}"), "green"))
        return Group(*parts)


def open_run(folder: str | Path, success_threshold: float = 1.0) -> Callable[[float], View] | None:
    """Return a function that reads what is new in a folder and returns the view; None if there is nothing yet.

    Args:
        folder: Folder of an evaluation or of a training run, or a results file.
        success_threshold: Minimum reward of a success.
    """
    path = Path(folder)
    if side_file(results_file(path), ".run.json").exists():
        return EvaluationView(path, success_threshold)
    if (path / "metrics.csv").exists() or (path / "steps").is_dir():
        return functools.partial(training_view, path)
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
        read = read or open_run(folder, success_threshold)
        if read:
            return read(time.time())
        told = f"nothing to watch in {folder} yet: waiting for {duration(time.monotonic() - began)}, Ctrl-C to stop"
        return View("", 0, None, wrapped(told))

    view = look()
    if console.is_terminal and not console.is_dumb_terminal:
        layout, body = Layout(), Layout()
        layout.split_column(body, Layout("q or Ctrl-C to stop", size=1))
        with (
            contextlib.suppress(KeyboardInterrupt),
            stop_key() as is_pressed,
            Live(layout, console=console, screen=True, auto_refresh=False) as live,
        ):
            while not view.is_over:
                body.update(view)
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

    def __init__(self, path: Path, success_threshold: float = 1.0) -> None:
        """Set the folder or file; nothing is read yet.

        Args:
            path: Folder of the evaluation, or its results file.
            success_threshold: Minimum reward of a success.
        """
        self._success_threshold = success_threshold
        self._reader = ResultsReader(path)
        self._state: Any = None
        self._metrics: dict[str, float] = {}

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
        most = patience(slow) if finished else FIRST_S
        hung = [now - at for at in began.values() if now - at > most]
        alarms = [*status.outages]
        has_time = not alarms and not has_stopped and len(samples) >= running
        if hung and not alarms:
            before = f"the slowest that ended took {duration(slow)}" if finished else "none has ended yet"
            told = f"{counted(len(hung), 'sample')} may hang: running for {duration(min(hung))} or more"
            alarms = [f"{told}, {before}"]
        if has_stopped:
            started = side_file(results_file(self._reader.path), ".run.json").stat().st_mtime
            has_ended = len(samples) == total and last > started  # else another process has begun
            is_over = has_ended or now - started > BEGINS_WITHIN_S
            why = f"ended after {took}" if has_ended else "no process runs this evaluation now"
            alarms = [f"{why}: {finished} of {total} scored; run the same command again to continue"]
        if self._state != self._reader.state:  # they take long
            self._state = self._reader.state
            self._metrics = standard_metrics(
                results, n_samples_per_prompt=run.n_samples_per_prompt, success_threshold=self._success_threshold
            )
        metrics = dict(self._metrics)
        if unfinished:  # a dropped sample that runs again is both
            metrics |= {"running_samples": running, "queued_samples": unfinished - running, "waiting_samples": 0}
        counts = metric_lines(metrics)
        head, *rows = metric_rows(metrics)
        rows = [row for row in rows if row[0] == "pass@1" or row[3] == str(len(results))]
        rows.sort(key=lambda row: row[0] not in ("pass@1", f"avg@{run.n_samples_per_prompt}"))
        score = headline(metrics)
        if score and not has_ended:
            score = f"so far {score}"
        title = f"{run.benchmark or 'evaluation'}: {len(run.prompts)} prompts x {run.n_samples_per_prompt} samples"
        if last:
            title += f", took {took}" if has_ended else f", {took} so far"
        # How long an outage lasts is unknown; and before each slot has ended once, the slow episodes are not seen.
        lines = pace_lines(samples, unfinished - len(hung) if has_time else 0, now)
        lines += _longest("running longest", {name: now - at for name, at in began.items()})
        lines += failure_lines(samples, now)
        # What runs comes before the table, for which a small screen has no room.
        lines += [*counts[counts.index("") + 1 :], *end_lines(results), "", *table_lines([head, *rows]), ""]
        lines += _longest("slowest", {sample.name: sample.seconds for sample in samples})
        further = f"strands-env report {shlex.quote(str(self._reader.path))} --html --open"
        return View(title, finished, total, lines, is_over, has_stopped, alarms, score, further)


def _longest(what: str, seconds: Mapping[str, float]) -> list[str]:
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:SLOWEST]
    named = [f"{name} {duration(seconds[name])}" for name in slowest]
    return wrapped(f"{what}: {', '.join(named)}") if named else []


def pace_lines(samples: Sequence[EvalSample], missing: int, now: float) -> list[str]:
    """How fast samples get a result, how fast they sample tokens, and how long the others take.

    Args:
        samples: The samples that have ended; dropped ones have no result.
        missing: Number of samples that are not finished; 0 if it cannot be known how long they take.
        now: The time, in seconds since 1970.
    """
    ends = sorted(
        (one.ended_at, one.step_result.observation.metrics.get("sampled_tokens") or 0)
        for one in samples
        if one.is_finished and one.ended_at
    )
    if not ends:
        return []
    now = max(now, ends[-1][0])
    recent = [one for one in ends if now - one[0] <= WINDOW_S]
    since = f"last result {duration(now - ends[-1][0])} ago"
    if len(recent) < 2 or not missing:
        return [since]
    took = max(now - recent[0][0], 1e-3)
    rate = (len(recent) - 1) / took
    parts = [f"{rate * 60:.1f} samples a minute", f"{duration(missing / rate)} left", since]
    if tokens := sum(tokens for _, tokens in recent[1:]):
        parts.append(f"{tokens / took:,.1f} tokens/s")
    return wrapped(", ".join(parts))


def failure_lines(samples: Sequence[EvalSample], now: float) -> list[str]:
    """The last sample that failed, and when; the causes are among the ends.

    Args:
        samples: The samples that have ended.
        now: The time, in seconds since 1970.
    """
    failed = [(one.ended_at, one.name) for one in samples if one.ended_at and (one.is_errored or not one.is_finished)]
    if not failed:
        return []
    ended_at, name = max(failed)
    return wrapped(f"last failure {duration(now - ended_at)} ago: {name}")


def patience(slowest: float) -> float:
    """After how many seconds something hangs, by what the slowest before it took."""
    return max(SILENT_TIMES * slowest, SILENT_S)


def duration(seconds: float) -> str:
    """Format a time, such as `1 h 05 min`; with seconds below ten minutes."""
    seconds = max(0.0, seconds)  # the clocks of two machines differ
    if seconds < 60 or seconds == math.inf:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 10:
        return f"{minutes} min {rest:02} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


# --- a training run ---


def training_view(folder: Path, now: float) -> View:
    """Read the steps of a training run.

    Args:
        folder: Folder of the run.
        now: The time, in seconds since 1970.
    """
    names, steps = read_steps(folder / "metrics.csv")
    total = _total(folder)
    missing = max(0, (total or math.inf) - len(steps))
    lines, alarms = _pace(folder, steps, missing, now)
    has_stopped = bool(alarms and total)
    since = nan_since(names, steps)
    names = ranked(names, steps, [*chain(*since.values())])
    alarms += [f"{', '.join(several)}: nan since step {step:g}" for step, several in since.items()]
    alarms += diverged(names, steps)
    quoted = shlex.quote(str(folder))
    further, ends = f"strands-env track {quoted} --to tensorboard", []
    if found := sorted(folder.glob("steps/step-*/rows.safetensors")):
        further = f"strands-sglang view {quoted} --open"
        try:
            ends = outcomes(found[-1])
        except (OSError, RowsFileError) as error:
            ends = wrapped(f"{found[-1].parent.name}: {error}")
    if names and steps:
        taken = len(lines) + len(ends) + 2 * len(alarms) + (ROWS if missing else ROWS + 2)
        room = max(0, shutil.get_terminal_size().lines - taken)
        drawn = plots(names, steps, room * 2 // 3)
        lines += ["", *drawn, "", *step_table(names, steps[min(-1, len(drawn) - room) :])]
    took = sum(_finite(_column(steps, "seconds")))
    title = f"{folder.name}: training" + (f" for {duration(took)}" if took else "")
    return View(title, len(steps), total, [*lines, *ends], not missing, has_stopped, alarms, _reward(steps), further)


def _total(folder: Path) -> int | None:
    try:
        return max(0, int(decode((folder / "settings.json").read_bytes())["steps"])) or None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _pace(folder: Path, steps: Steps, missing: float, now: float) -> tuple[list[str], list[str]]:
    """How long steps take and when the missing ones will be done, and an alarm if none has come for long."""
    silent = 0.0
    with contextlib.suppress(OSError):
        silent = now - (folder / "metrics.csv").stat().st_mtime
    if not steps:
        told = [f"no step yet for {duration(silent)}"]
        return ([], told) if silent > 10 * FIRST_S else (told, [])
    since = f"last step {duration(silent)} ago"
    recent = [step for step in steps if step.get("seconds", 0) > 0][-STEPS_SHOWN:]
    if not recent:
        return [since], []
    seconds, tokens = _column(recent, "seconds"), _finite(_column(recent, "trained_tokens"))
    each = _mean(seconds)
    parts, alarms = [f"{duration(each)} a step"], []
    if missing and silent > patience(max(seconds)):
        alarms = [f"no step for {duration(silent)} (a step takes {duration(each)})"]
    elif 0 < missing < math.inf:
        parts.append(f"{duration(missing * each)} left")
    parts.append(since)
    if tokens:
        parts.append(f"{_mean(tokens) / each:,.1f} trained tokens/s")
    return wrapped(", ".join(parts)), alarms


@functools.lru_cache(maxsize=1)
def outcomes(path: Path) -> list[str]:
    """How the episodes of a step ended, and why some are left out.

    Args:
        path: The step's `rows.safetensors`.
    """
    rows = TrainingRows.load(path)
    ends = Counter(str(one.get("outcome")) for one in rows.episodes.values())
    told = f"{path.parent.name} ends: {', '.join(f'{count} {name}' for name, count in ends.most_common())}"
    lines = ["", *wrapped(told)]
    for reason, count in rows.counts.most_common():
        lines += wrapped(f"left out: {count} x {reason}")
    return lines


def read_steps(path: Path) -> tuple[list[str], Steps]:
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
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
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


def _column(steps: Steps, name: str) -> list[float]:
    return [step.get(name, math.nan) for step in steps]


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _reward(steps: Steps) -> str:
    """The reward of the last step, and the best one; empty without rewards."""
    rewards = _column(steps, "reward")
    finite = _finite(rewards)
    if not finite:
        return ""
    at = rewards.index(max(finite))
    return f"reward {rewards[-1]:.3f}, best {rewards[at]:.3f} at step {steps[at].get('step', at + 1):g}"


def nan_since(names: Sequence[str], steps: Steps) -> dict[float, list[str]]:
    """The columns that have been NaN for longer than before, by the step since which they are.

    Those of losses also if they have ever been.

    Args:
        names: Names of the columns.
        steps: The steps.
    """
    since: dict[float, list[str]] = {}
    for name in names:
        marks = "".join("n" if math.isnan(step.get(name, 0.0)) else " " for step in steps)
        *before, last = map(len, marks.split(" "))  # lengths of runs of NaN
        if last > max(before, default=0 if name.startswith(LOSSES) else last):
            at = len(steps) - last
            since.setdefault(steps[at].get("step", at + 1), []).append(name)
    return since


def diverged(names: Sequence[str], steps: Steps) -> list[str]:
    """What has become far larger than usual, and a reward that has fallen, or never changes.

    Args:
        names: Names of the columns.
        steps: The steps.
    """
    alarms = []
    for name in names:
        finite = _finite(_column(steps, name))
        if len(finite) > STEPS_SHOWN and name.startswith(LOSSES):
            usual = statistics.median(map(abs, finite))
            if usual and min(map(abs, finite[-2:])) > BLOWN_UP * usual:
                alarms.append(f"{name} has blown up: {finite[-1]:.4g}, usually {usual:.4g}")
    rewards = _finite(_column(steps, "reward"))
    means = [_mean(rewards[at - 3 : at]) for at in range(3, len(rewards) + 1)]
    best = max(means, default=0.0)
    if best > 0 and means[-1] < best / 5:
        alarms.append(f"the reward has fallen: {means[-1]:.3f} in the last three steps, {best:.3f} in the best three")
    if len(rewards) >= STEPS_SHOWN and min(rewards) == max(rewards):
        alarms.append(f"the reward is {rewards[0]:.3f} in all {len(rewards)} steps: nothing is learned")
    return alarms


def ranked(names: Sequence[str], steps: Steps, broken: Sequence[str]) -> list[str]:
    """Sort columns: step and reward, what is NaN now, `FIRST_COLUMNS`, what changes, and what does not.

    Args:
        names: Names of all columns.
        steps: The steps.
        broken: Names of those that are NaN now.
    """

    def rank(name: str) -> tuple[bool, bool, bool, float]:
        is_constant = name == "version" or len({str(step.get(name)) for step in steps}) == 1
        places = [at for at, start in enumerate([*broken, *FIRST_COLUMNS]) if name.startswith(start)]
        return name != "step", name != "reward", is_constant, min(places, default=math.inf)

    return sorted(names, key=rank)


def step_table(names: Sequence[str], steps: Steps) -> list[str]:
    """Format steps as a table with as many columns as there is room for; a last line counts all of them.

    Args:
        names: Names of all columns, those that matter most first.
        steps: The steps.
    """
    rows = [[visible(name)[:30] for name in names]]
    rows += [[f"{step[name]:.4g}" if name in step else "-" for name in names] for step in steps]
    return [*table_lines(rows), f"of {counted(len(names), 'column')}"]


def plots(names: Sequence[str], steps: Steps, rows: int) -> list[str]:
    """Draw all steps of as many columns as there is room for, each below its last, least and largest value.

    Args:
        names: Names of all columns, those that matter most first.
        steps: The steps.
        rows: Number of rows; there is at least one plot.
    """
    lines: list[str] = []
    for name in names:
        values = _column(steps, name)
        finite = _finite(values)
        if finite and name != "step" and len(lines) <= max(0, rows - PLOT_ROWS):
            lines += wrapped(f"{name}: {finite[-1]:.3g} now, {min(finite):.3g} to {max(finite):.3g} so far")
            lines += bars(values)
    return lines


def bars(values: Sequence[float]) -> list[str]:
    """Draw values as bars of two rows, several as their mean if the terminal is narrower; spaces are not finite."""
    count = len(values)
    columns = min(terminal.width(), count)
    halves = [_mean(_finite(values[count * at // columns : count * (at + 1) // columns])) / 2 for at in range(columns)]
    finite = _finite(halves) or [0.0]  # the difference of large numbers is infinite, not that of their halves
    low = min(finite)
    reach = max(finite) - low or 1.0
    eighths = [1 + round((half - low) / reach * 15) if math.isfinite(half) else 0 for half in halves]
    return ["".join(row[eighth] for eighth in eighths) for row in (" " * 8 + _BARS, _BARS + "█" * 8)]
