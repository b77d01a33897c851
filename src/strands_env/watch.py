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
import re
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
from .eval.evaluator import WINDOW_S, results_per_second
from .eval.metrics import (
    cause_of,
    end_lines,
    headline,
    metric_lines,
    metric_rows,
    shortened,
    standard_metrics,
    table_lines,
)

BEGINS_WITHIN_S = 60.0
"""Seconds within which an evaluation that was just started or continued runs its first sample."""

SILENT_TIMES, SILENT_S, FIRST_S = 3, 30.0, 1800.0
"""What takes this many times as long as the slowest before it, and this many seconds, hangs; the first take longer."""

SLOWEST = 3
STEPS_SHOWN = 8
LOSSES = ("loss", "grad", "kl")
"""Columns with such a word tell that a training run diverges."""
BLOWN_UP, BLOWN_UP_FROM = 30.0, 0.1
"""How many times the usual value, and how much at least, has blown up."""
FIRST_COLUMNS = ("eval", "kl", "entropy", "loss", "grad", "clip", "gap")
"""Columns with such a word are shown before others, after step and reward."""

GAP = "gap: the trainer's logprobs minus the sampler's; stale: of older weights' tokens"
"""Shown below the steps of a run with such a column, which other trainers do not have."""

_FAILURES = ("dropped", "errored", "last failure")
"""What lines about failures begin with."""

Steps = Sequence[dict[str, float]]
"""The figures of steps by column, without those that are empty."""

_BARS, _ASCII_BARS = " ▁▂▃▄▅▆▇█", " .:-=#"

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
        next: What to do about the first alarm, or the command that shows more; shown at the end, or with alarms.
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
            # A path stays in one piece, so that it can be copied.
            parts += [Text(line, no_wrap=True, overflow="ignore") for line in wrapped(f"next: {self.next}")]
        is_red = False
        for line in map(visible, self.lines):
            is_red = line.startswith(_FAILURES) or is_red and line.startswith(" ")  # the rest of a wrapped line
            parts.append(Text(line, style="red" if is_red else ""))
        if self.is_over and not self.alarms:  # at the end, which any screen shows
            parts.append(Text(visible(f"done; next: {self.next}"), "green", no_wrap=True, overflow="ignore"))
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

    If standard output is not a terminal, or a dumb one, the view is printed once. There must be a folder.

    Args:
        folder: Folder of an evaluation or of a training run.
        seconds: Time between two looks at the files.
        success_threshold: Minimum reward of a success.

    Raises:
        CheckpointError: The files are damaged.
    """
    if not Path(folder).exists():
        return None
    console = Console(highlight=False, soft_wrap=False)
    read: Callable[[float], View] | None = None

    def look() -> View:
        nonlocal read
        read = read or open_run(folder, success_threshold)
        if read:
            return read(time.time())
        return View("", 0, None, wrapped(f"nothing to watch in {folder} yet: waiting"))

    view = look()
    if console.is_terminal and not console.is_dumb_terminal:
        layout, body = Layout(), Layout()
        layout.split_column(body, Layout("q or Ctrl-C to stop", size=1))
        with (
            contextlib.suppress(KeyboardInterrupt),
            stop_key() as is_pressed,
            Live(layout, console=console, screen=True, auto_refresh=False, redirect_stdout=False) as live,
        ):
            while not view.is_over:
                body.update(view)
                live.refresh()
                if is_pressed(seconds):
                    break
                view = look()
    if read is None:
        return None
    console.print(view, crop=False)
    return view


@contextlib.contextmanager
def stop_key() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for q, at most so many seconds; the terminal does not show what is typed.

    SIGTERM is like Ctrl-C meanwhile, so that the terminal is as before in the end.
    """
    keyboards = [sys.stdin.fileno()] if terminal.is_terminal(sys.stdin) else []
    modes = {keyboard: termios.tcgetattr(keyboard) for keyboard in keyboards}
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for keyboard in keyboards:
            tty.setcbreak(keyboard)
        yield lambda seconds: any(
            b"q" in (os.read(keyboard, 64) or b"q") for keyboard in select.select(keyboards, [], [], seconds)[0]
        )  # a terminal without bytes is closed
    finally:
        for keyboard, mode in modes.items():
            termios.tcsetattr(keyboard, termios.TCSAFLUSH, mode)
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
        self._last_outage = 0.0

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
        # The status is a little older than the results; another sample has taken the slot of each that ended since.
        began = {name: at for name, at in status.began.items() if ended.get(name, 0.0) < at}
        slots, unfinished = len(status.began), status.left - len(status.began) + len(began)
        started = side_file(results_file(self._reader.path), ".run.json").stat().st_mtime  # each process writes it
        first, last = time_span(self._reader.path, samples) or (0.0, 0.0)
        is_resumed = first + BEGINS_WITHIN_S < started < last
        took = duration(last - (started if is_resumed else first))
        has_ended = is_over = finished >= total and not unfinished  # errored samples may run again
        has_stopped = not is_over and not status.left
        took_each = [sample.seconds for sample in samples if sample.is_finished]
        most = patience(took_each if finished >= slots else [])
        if status.outages:
            self._last_outage = now
        hung = [now - at for at in began.values() if now - max(at, self._last_outage) > most]
        further = f"strands-env report {shlex.quote(str(self._reader.path))} --html --open"
        if self._success_threshold != 1.0:
            further += f" --success-threshold {self._success_threshold:g}"
        alarms = [*status.outages]
        # How long an outage lasts is unknown; and before each slot has ended once, the slow episodes are not seen.
        has_time = not alarms and sum(at >= started for at in ended.values()) >= slots
        if alarms:
            further = "check the server, or start it again at the same address"
        elif hung:
            before = f"the slowest that ended took {duration(max(took_each))}" if finished else "none has ended yet"
            alarm = f"{counted(len(hung), 'sample')} may hang: running for {duration(min(hung))} or more"
            alarms = [f"{alarm}, {before}"]
            further = "give the environment an episode_timeout (--env-args), and run the same command again"
        failure = last_failure(samples, now)
        if has_stopped:
            has_ended = len(samples) == total and last > started  # else another process has begun
            is_over = has_ended or now - started > BEGINS_WITHIN_S
            why = f"ended after {took}" if has_ended else "no process runs this evaluation now"
            alarms, failure = [f"{why}: {finished} of {total} scored", *filter(None, [failure])], ""
            further = "run the same command again to continue"
        elif is_over and any(sample.is_errored for sample in samples):
            further = f"run the same command again with --retry-errors, or {further}"
        if self._state != self._reader.state:  # they take long
            self._state = self._reader.state
            self._metrics = standard_metrics(
                results, n_samples_per_prompt=run.n_samples_per_prompt, success_threshold=self._success_threshold
            )
        metrics = dict(self._metrics)
        if unfinished:  # a dropped sample may run again
            metrics |= {
                "running_samples": min(slots, unfinished),
                "queued_samples": max(0, unfinished - slots),
                "waiting_samples": 0,
                "dropped_samples": max(0, total - finished - unfinished),
            }
        counts = metric_lines(metrics)
        head, *rows = metric_rows(metrics)
        rows = [row for row in rows if row[0] == "pass@1" or row[3] == str(len(results))]
        rows.sort(key=lambda row: row[0] not in ("pass@1", f"avg@{run.n_samples_per_prompt}"))
        score = headline(metrics)
        if score and not has_ended:
            score = f"so far {score}"
        plan = f"{counted(len(run.prompts), 'prompt')} x {counted(run.n_samples_per_prompt, 'sample')}"
        title = f"{run.benchmark or 'evaluation'}: {plan}"
        if last:
            title += f", took {took}" if has_ended else f", {took} so far"
            title += " since it was resumed" * is_resumed
        missing = unfinished if has_time and not hung else 0  # a hung sample may take any time
        lines = pace_lines(samples, missing, now, min(WINDOW_S, now - started))
        lines += _longest("running longest", {name: now - at for name, at in began.items()})
        lines += wrapped(failure)
        # What runs comes before the table, for which a small screen has no room.
        lines += [*counts[counts.index("") + 1 :], *end_lines(results), "", *table_lines([head, *rows]), ""]
        lines += _longest("slowest", {sample.name: sample.seconds for sample in samples})
        return View(title, finished, total, lines, is_over, has_stopped, alarms, score, further)


def _longest(what: str, seconds: Mapping[str, float]) -> list[str]:
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:SLOWEST]
    named = [f"{name} {duration(seconds[name])}" for name in slowest]
    return wrapped(f"{what}: {', '.join(named)}") if named else []


def pace_lines(samples: Sequence[EvalSample], missing: int, now: float, window: float = WINDOW_S) -> list[str]:
    """How fast samples get a result, how fast they sample tokens, and how long the others take.

    Args:
        samples: The samples that have ended; dropped ones have no result.
        missing: Number of samples that are not finished; 0 if it cannot be known how long they take.
        now: The time, in seconds since 1970.
        window: Seconds over which the rate is measured.
    """
    ends = sorted(
        (sample.ended_at, sample.step_result.observation.metrics.get("sampled_tokens") or 0)
        for sample in samples
        if sample.is_finished and sample.ended_at
    )
    if not ends:
        return []
    now = max(now, ends[-1][0])
    recent = [end for end in ends if now - end[0] <= window]
    since = f"last result {duration(now - ends[-1][0])} ago"
    rate = results_per_second([at for at, _ in recent], now)
    if not rate or not missing:
        return [since]
    parts = [f"{rate * 60:.1f} samples a minute", f"{duration(missing / rate)} left", since]
    if tokens := sum(tokens for _, tokens in recent[1:]):
        parts.append(f"{tokens * rate / (len(recent) - 1):,.1f} tokens/s")
    return wrapped(", ".join(parts))


def last_failure(samples: Sequence[EvalSample], now: float) -> str:
    """Say which sample failed last, when and why; empty if none has.

    Args:
        samples: The samples that have ended.
        now: The time, in seconds since 1970.
    """
    failed = [
        (sample.ended_at, sample.name, shortened(cause_of(sample)))
        for sample in samples
        if sample.ended_at and (sample.is_errored or not sample.is_finished)
    ]
    if not failed:
        return ""
    ended_at, name, cause = max(failed)
    return f"last failure {duration(now - ended_at)} ago: {name}: {cause}"


def patience(seconds: Sequence[float]) -> float:
    """After how many seconds something hangs, by what those before it took."""
    return max(SILENT_TIMES * max(seconds), SILENT_S) if seconds else FIRST_S


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
    done = int(min(total or math.inf, max([len(steps), *_finite(_column(steps, "step"))])))
    missing = (total or math.inf) - done
    evaluating = _evaluating(folder)
    lines, alarms = (evaluating, []) if evaluating else _pace(steps, missing, _silence(folder, now))
    has_stopped = bool(alarms)
    since, traces = nan_since(names, steps)
    broken = [*chain(*since.values())]
    names = ranked(names, steps, broken)
    alarms += [f"{', '.join(several)}: nan since step {step:g}" for step, several in since.items()]
    alarms += diverged(names, steps)
    lines += traces
    quoted = shlex.quote(str(folder))
    further, ends = f"strands-env track {quoted} --to tensorboard", []
    if found := sorted(folder.glob("steps/step-*/rows.safetensors")):
        further = f"strands-sglang doctor {quoted}" if broken else f"strands-sglang view {quoted} --open"
        try:
            ends = outcomes(found[-1])
        except (OSError, RowsFileError) as error:
            ends = wrapped(f"{found[-1].parent.name}: {error}")
    log = folder / "trainer.log"
    if has_stopped:
        further = "look at the output of the trainer"
    if (has_stopped or (broken and not found)) and log.exists():
        further = f"tail -n 50 {shlex.quote(str(log))}"
    if steps:
        if any(is_a(name, "gap") for name in names):
            ends = [*wrapped(GAP), *ends]
        taken = len(lines) + len(ends) + 2 * len(alarms) + (ROWS if missing else ROWS + 2)
        room = max(0, shutil.get_terminal_size().lines - taken)
        drawn = plots(names, steps, room * 2 // 3)
        lines += ["", *drawn, "", *step_table(names, steps[min(-1, len(drawn) - room) :])]
    took = sum(_finite(_column(steps, "seconds")))
    title = f"{folder.name}: training" + (f" for {duration(took)}" if took else "")
    is_over = not missing and not evaluating
    return View(title, done, total, [*lines, *ends], is_over, has_stopped, alarms, _score(names, steps), further)


def _total(folder: Path) -> int | None:
    try:
        return max(0, int(decode((folder / "settings.json").read_bytes())["steps"])) or None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _evaluating(folder: Path) -> list[str]:
    """What is evaluated now, before or after the training."""
    files = [f"{file}".replace(".status.json", ".jsonl") for file in folder.glob("evaluation/*.status.json")]
    return [f"evaluating: {file}" for file in files if read_status(file)]


def _silence(folder: Path, now: float) -> float:
    """Seconds since the last step; before the first one, since the run began."""
    for path in (folder / "metrics.csv", folder / "settings.json", folder):
        with contextlib.suppress(OSError):
            return now - path.stat().st_mtime
    return 0.0


def _pace(steps: Steps, missing: float, silent: float) -> tuple[list[str], list[str]]:
    """How long steps take and when the missing ones will be done; as an alarm if none has come for long."""
    recent = [step for step in steps if step.get("seconds", 0) > 0][-STEPS_SHOWN:]
    seconds, tokens = _column(recent, "seconds"), _finite(_column(recent, "trained_tokens"))
    each = _mean(seconds)
    parts = [f"{duration(each)} a step"] if recent else []
    is_late = missing > 0 and silent > patience(seconds)
    if is_late or not steps:
        line = ", ".join([f"no step{'' if steps else ' yet'} for {duration(silent)}", *parts])
        return ([], [line]) if is_late else ([line], [])
    if recent and 0 < missing < math.inf:
        parts.append(f"{duration(missing * each - min(silent, each))} left")
    parts.append(f"last step {duration(silent)} ago")
    if tokens:
        parts.append(f"{_mean(tokens) / each:,.1f} trained tokens/s")
    return wrapped(", ".join(parts)), []


@functools.lru_cache(maxsize=1)
def outcomes(path: Path) -> list[str]:
    """How the episodes of a step ended, and why some are left out.

    Args:
        path: The step's `rows.safetensors`.
    """
    rows = TrainingRows.load(path)
    ends = Counter(str(episode.get("outcome")) for episode in rows.episodes.values())
    line = f"{path.parent.name} ends: {', '.join(f'{count} {name}' for name, count in ends.most_common())}"
    lines = ["", *wrapped(line)]
    for reason, count in rows.counts.most_common():
        lines += wrapped(f"left out: {count} x {reason}")
    return lines


def read_steps(path: Path) -> tuple[list[str], Steps]:
    """Read the figures of steps; what is not a number is NaN. Empty cells and an incomplete last line are left out.

    A step that comes again, as after a resume, replaces the earlier one and those after it.

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
        names = [*dict.fromkeys(["step", *filter(None, reader.fieldnames or ())])]
        rows = [{name: _number(row[name]) for name in names if row.get(name)} for row in reader if None not in row]
    except csv.Error as error:
        raise CheckpointError(f"{path}: not CSV: {error}") from error
    steps: list[dict[str, float]] = []
    for row in rows:
        row.setdefault("step", len(steps) + 1)
        while steps and steps[-1]["step"] >= row["step"]:
            steps.pop()
        steps.append(row)
    return names, steps


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _column(steps: Steps, name: str) -> list[float]:
    return [step.get(name, math.nan) for step in steps]


def _last(steps: Steps, name: str) -> float:
    return next(step[name] for step in reversed(steps) if name in step)


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def is_a(name: str, *kinds: str) -> bool:
    """Whether one of the words in a column's name begins with one of these, as in `actor/kl` or `policy_loss`."""
    return any(word.startswith(kinds) for word in re.findall("[a-z]+", name.lower()))


def reward_of(names: Sequence[str]) -> str:
    """The column of the mean reward, such as `reward` or `train/reward_mean`; the shortest name of several."""
    found = [name for name in names if re.search("(^|[^a-z])rewards?([^a-z]mean)?$", name.lower())]
    return min(found, key=len, default="reward")


def _score(names: Sequence[str], steps: Steps) -> str:
    """The last reward, and the best one; empty without rewards."""
    name = reward_of(names)
    rewarded = [step for step in steps if math.isfinite(step.get(name, math.nan))]
    if not rewarded:
        return ""
    best = max(rewarded, key=lambda step: step[name])
    text = f"{name} {_last(steps, name):.3g}"
    return f"{text}, best {best[name]:.3g} at step {best['step']:g}" if len(rewarded) > 1 else text


def nan_since(names: Sequence[str], steps: Steps) -> tuple[dict[float, list[str]], list[str]]:
    """The columns that have been NaN for longer than before, by the step since which they are, and losses that were.

    Of a loss each NaN counts.

    Args:
        names: Names of the columns.
        steps: The steps.
    """
    since: dict[float, list[str]] = {}
    traces = []
    for name in names:
        marks = "".join("n" if math.isnan(step.get(name, 0.0)) else " " for step in steps)
        *before, last = map(len, marks.split(" "))  # lengths of runs of NaN
        is_loss = is_a(name, *LOSSES) and not is_a(name, "eval")
        if last > (0 if is_loss else max(before, default=last)):
            since.setdefault(steps[-last]["step"], []).append(name)
        elif is_loss and any(before):
            traces += wrapped(f"{name} was nan, last in step {steps[marks.rindex('n')]['step']:g}")
    return since, traces


def diverged(names: Sequence[str], steps: Steps) -> list[str]:
    """What has become far larger than usual, and a reward that has fallen, or never changes.

    Usual is what the first steps had, and what later ones without a jump have come to.

    Args:
        names: Names of the columns.
        steps: The steps.
    """
    alarms = []
    for name in names:
        values = [abs(value) for value in _column(steps, name) if abs(value) > 0 and is_a(name, *LOSSES)]
        usual, jumps = statistics.median(values[:STEPS_SHOWN] or [0.0]), 0
        for value in values[STEPS_SHOWN:]:
            if value > max(BLOWN_UP * usual, BLOWN_UP_FROM):
                jumps += 1
            else:
                usual, jumps = usual + (value - usual) / STEPS_SHOWN, 0
        if jumps > 1:  # once happens
            alarms.append(f"{name} has blown up: {values[-1]:.4g}, usually {usual:.4g}")
    rewards = _finite(_column(steps, reward_of(names)))
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
    first = ["step", reward_of(names), *broken]

    def rank(name: str) -> tuple[int, bool, int]:
        is_constant = name == "version" or len({str(step.get(name)) for step in steps}) == 1
        kinds = [is_a(name, kind) for kind in FIRST_COLUMNS]
        return [*first, name].index(name), is_constant, [*kinds, True].index(True)

    return sorted(names, key=rank)


def step_table(names: Sequence[str], steps: Steps) -> list[str]:
    """Format steps as a table with as many columns as there is room for; a last line counts all of them.

    Args:
        names: Names of all columns, those that matter most first.
        steps: The steps.
    """
    rows = [[re.sub("(?<=.{29}).{2,}", "…", visible(name)) for name in names]]
    rows += [[f"{step[name]:.4g}" if name in step else "-" for name in names] for step in steps]
    return [*table_lines(rows), f"of {counted(len(names), 'column')}"]


def plots(names: Sequence[str], steps: Steps, rows: int) -> list[str]:
    """Draw all steps of as many columns as there is room for, each below its last, least and largest value.

    Args:
        names: Names of all columns, those that matter most first.
        steps: The steps.
        rows: Number of rows; there is at least one plot, if any column has two values.
    """
    lines: list[str] = []
    for name in names:
        values = _column(steps, name)
        finite = _finite(values)
        if len(finite) > 1 and name != "step" and len(lines) <= max(0, rows - PLOT_ROWS):
            lines += wrapped(f"{name} {_last(steps, name):.3g}, {min(finite):.3g} to {max(finite):.3g} so far")
            lines += bars(values)
    return lines


def bars(values: Sequence[float]) -> list[str]:
    """Draw values as bars of two rows, several as their mean if the terminal is narrower; spaces are not finite."""
    shades = _BARS if (sys.stdout.encoding or "utf").lower().startswith("utf") else _ASCII_BARS
    high = len(shades) - 1
    count = len(values)
    columns = min(terminal.width(), count)
    halves = [_mean(_finite(values[count * at // columns : count * (at + 1) // columns])) / 2 for at in range(columns)]
    finite = _finite(halves) or [0.0]  # the difference of large numbers is infinite, not that of their halves
    low = min(finite)
    reach = max(finite) - low or 1.0
    parts = [1 + round((half - low) / reach * (2 * high - 1)) if math.isfinite(half) else 0 for half in halves]
    return ["".join(row[part] for part in parts) for row in (" " * high + shades, shades + shades[-1] * high)]
