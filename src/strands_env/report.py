"""The pages of `strands-env report --html` and `strands-env compare --html`.

The numbers are those of the commands without `--html`. The page is the one of `strands-sglang view` with one more view,
so the samples of a task open as every recorded episode does.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from strands_sglang import __version__
from strands_sglang.viewer import Plot, Report, Table, Task, UnreadableError, read_episodes, render

from .eval.checkpoint import (
    CheckpointError,
    EvalSample,
    Results,
    Run,
    read_results,
    read_status,
    results_file,
    time_span,
)
from .eval.metrics import (
    SAMPLE_COUNTS,
    Difference,
    Prices,
    Score,
    answer_of,
    compare,
    costs,
    difference_rows,
    ending,
    failure_causes,
    headline,
    interval_text,
    majority_at_k,
    metric_rows,
    pass_at_k,
    pass_hat_k,
    sample_sizes,
    scores,
    standard_metrics,
)

WIDTH, HEIGHT = 480, 250
BARS = 10
"""Most bars of a histogram."""

MEASURES = {
    "seconds": "Seconds",
    "sampled_tokens": "Sampled tokens",
    "input_tokens": "Prompt tokens",
    "cached_tokens": "Cached tokens",
    "model_calls": "Model calls",
}
"""What a sample costs."""


def report_page(path: str | Path, *, success_threshold: float, prices: Prices | None = None) -> str:
    """Return the page of an evaluation. It may still be running.

    Args:
        path: Results file, or its folder.
        success_threshold: Minimum reward of a success.
        prices: What tokens cost; None to leave out costs.

    Raises:
        CheckpointError: The files are missing or damaged.
        ImportError: The package that draws is not installed.
    """
    run, results = read_results(path)
    samples = list(chain.from_iterable(results.values()))
    episodes = _Shown([(path, bool(samples))])
    n = run.n_samples_per_prompt
    metrics = standard_metrics(results, n_samples_per_prompt=n, success_threshold=success_threshold)
    values = prompt_values(results, n_samples_per_prompt=n, success_threshold=success_threshold)
    scored = scores(results, success_threshold=success_threshold)
    missing = metrics["waiting_samples"] + metrics["dropped_samples"]
    result = headline(metrics) or "No sample has a score yet"
    if missing:
        state = "not running"
        if (status := read_status(path)) is not None:
            metrics["queued_samples"] = metrics.pop("waiting_samples")
            state = ": ".join(["running", *status.outages])
        done = sum(sample.is_finished for sample in samples)
        result += f" · {done} of {len(run.sample_keys)} samples, {state}"
    counts = ", ".join(f"{metrics[name]:.0f} {word}" for name, word in SAMPLE_COUNTS.items() if name in metrics)
    head, *rows = metric_rows(metrics)
    report = Report(
        name="Report",
        headline=result,
        about=_about(path, run, samples),
        success_threshold=success_threshold,
        notes=[
            f"{len(run.prompts)} prompts x {n} samples: {counts}.",
            *(f"{what.capitalize()}: {causes}." for what, causes in failure_causes(samples)),
            *(["Samples that were not run or were dropped are in no metric and no state."] if missing else []),
            "In the table of tasks, reward, sampled tokens and seconds are means over a task's samples.",
            *episodes.notes,
        ],
        tables=[
            Table(title="Metrics", head=head, rows=rows),
            _outcomes({"samples": samples}),
            _costs(
                samples, prices, {} if prices is None else costs(results, prices, success_threshold=success_threshold)
            ),
        ],
        plots=[
            *_histogram("Rewards", "samples", [sample.reward for sample in samples if sample.reward is not None]),
            *_histogram("Sampled tokens", "samples", _measured(samples, "sampled_tokens")),
            *_histogram("Seconds", "samples", _measured(samples, "seconds")),
        ],
        metrics={name: _curve(name.split("@")[0], metrics) for name in values},
        columns=["Value"],
        facts=["Dropped", "Reward", "Tokens", "Seconds"],
        evaluations=["Samples"],
        states=["always solved", "sometimes solved", "never solved", "not scored"],
        tasks=[
            Task(
                name=prompt,
                state=_state(scored.get(prompt, [])),
                values={name: [_finite(by_prompt.get(prompt))] for name, by_prompt in values.items()},
                facts=[
                    sum(not sample.is_finished for sample in row) or None,
                    _mean([score.reward for score in scored.get(prompt, [])]),
                    _mean(_measured(row, "sampled_tokens")),
                    _mean(_measured(row, "seconds")),
                ],
                samples=[episodes.samples_of(0, row)],
            )
            for prompt, row in results.items()
        ],
    )
    return render(episodes.groups, title=_title(run), report=report)


def comparison_page(first: str | Path, second: str | Path, *, success_threshold: float) -> str:
    """Return the page that compares two evaluations, prompt by prompt.

    Args:
        first: Results file of the first evaluation, or its folder.
        second: The same of the second.
        success_threshold: Minimum reward of a success.

    Raises:
        CheckpointError: The files are missing or damaged.
        ImportError: The package that draws is not installed.
        ValueError: The evaluations have no prompt with scored samples in common.
    """
    (run, results), (other, others) = read_results(first), read_results(second)
    found = compare((run, results), (other, others), success_threshold=success_threshold)
    episodes = _Shown([(first, True), (second, True)])
    in_second = {content: prompt for prompt, content in other.prompts.items()}
    rows = [
        (task, results[task.prompt], others[in_second[run.prompts[task.prompt]]]) for task in found.tasks
    ]  # compared by content: the ids may differ
    only = [f"{count} only in {name}" for name, count in (("A", found.only_first), ("B", found.only_second)) if count]
    states = {task.prompt: _flip(task.first_success, task.second_success) for task in found.tasks}
    rewards = [(task.first_reward, task.second_reward) for task in found.tasks]
    successes = [(task.first_success, task.second_success) for task in found.tasks]
    head, *differences = difference_rows(found)
    metrics = {"pass@1": _differences("pass@1", successes)}
    if rewards == successes:
        differences = [row for row in differences if row[0] != "mean reward"]
    else:
        metrics["mean reward"] = _differences("mean reward", rewards)
    report = Report(
        name="Compare",
        headline=_verdict(found.differences[0]),
        about=[("A", f"{first}"), ("B", f"{second}"), *_made_by("compare", first, second)],
        success_threshold=success_threshold,
        notes=[
            f"Prompts in both: {found.common}"
            + (f"; {' and '.join(only)}: only those in both are compared." if only else "."),
            "A task is flipped if most of its samples succeed in one evaluation and not in the other.",
            *episodes.notes,
        ],
        tables=[
            Table(title="Differences, paired by prompt", head=head, rows=differences),
            Table(
                title="Tasks that flipped, and others",
                head=["state", "tasks"],
                rows=[[state, str(list(states.values()).count(state))] for state in _FLIPS],
            ),
            _outcomes(
                {
                    "A": list(chain.from_iterable(row for _, row, _ in rows)),
                    "B": list(chain.from_iterable(row for *_, row in rows)),
                }
            ),
            *_configuration(found.configuration),
        ],
        plots=[],
        metrics=metrics,
        columns=["A", "B", "B − A"],
        facts=[],
        evaluations=["Samples of A", "Samples of B"],
        states=list(_FLIPS),
        tasks=[
            Task(
                name=task.prompt,
                state=states[task.prompt],
                values={
                    "pass@1": _pair(task.first_success, task.second_success),
                    "mean reward": _pair(task.first_reward, task.second_reward),
                },
                facts=[],
                samples=[episodes.samples_of(0, row), episodes.samples_of(1, other_row)],
            )
            for task, row, other_row in rows
        ],
    )
    return render(episodes.groups, title=f"A: {_title(run)}; B: {_title(other)}", report=report)


def prompt_values(
    results: Results, *, n_samples_per_prompt: int, success_threshold: float
) -> dict[str, dict[str, float]]:
    """Return the value of each standard metric at each prompt that it can use; the metric is the mean of these.

    Args:
        results: All samples, dropped ones included.
        n_samples_per_prompt: Intended number of samples of each prompt.
        success_threshold: Minimum reward of a success.
    """
    scored = scores(results, success_threshold=success_threshold)
    values: dict[str, dict[str, float]] = {}
    for k in sample_sizes(n_samples_per_prompt):
        rows = {prompt: row for prompt, row in scored.items() if len(row) >= k}
        sizes, wins = [len(row) for row in rows.values()], [sum(s.is_success for s in row) for row in rows.values()]
        for name, function in (("pass@", pass_at_k), ("pass^", pass_hat_k)) if rows else ():
            values[f"{name}{k}"] = dict(zip(rows, function(sizes, wins, k).tolist(), strict=True))
        if k > 1 and rows:
            values[f"majority@{k}"] = {
                prompt: majority_at_k([answer_of(s.sample) for s in row], [s.is_success for s in row], k)
                for prompt, row in rows.items()
            }
    values.pop("pass^1", None)  # for one sample, it is pass@1
    rewards = {prompt: float(np.mean([score.reward for score in row])) for prompt, row in scored.items() if row}
    if rewards:
        values[f"avg@{n_samples_per_prompt}"] = rewards
    return values


class _Shown:
    """The episodes of a page, by evaluation and key."""

    def __init__(self, evaluations: Iterable[tuple[str | Path, bool]]) -> None:
        self.groups: list[Any] = []
        self.notes: list[str] = []
        self._numbers: dict[tuple[int, str], int] = {}
        paths = [results_file(path) for path, has_samples in evaluations if has_samples]
        try:
            read, left_out = read_episodes(paths)
        except UnreadableError as error:
            raise CheckpointError(str(error)) from error
        at = itertools.count()
        for which, groups in enumerate(read):
            self.groups += groups
            for episode in chain.from_iterable(group.episodes for group in groups):
                self._numbers[which, episode.record["key"]] = next(at)
        if left_out:
            self.notes.append(
                f"The samples hold {left_out:,} tokens, more than a page can show, so it has their conversations only: "
                "see the tokens of one with strands-sglang view and its file of the folder with trajectories."
            )

    def samples_of(self, which: int, row: Sequence[EvalSample]) -> list[tuple[str, int]]:
        """Return reward and number of the samples that the page has; one may have been written since."""
        return [
            ("–" if sample.reward is None else f"{sample.reward:.3g}", self._numbers[which, sample.key])
            for sample in row
            if (which, sample.key) in self._numbers
        ]


# --- what is said of an evaluation ---


def _verdict(difference: Difference) -> str:
    """Which of two evaluations is better, if their interval tells."""
    interval = difference.interval
    text = f"{difference.name} {interval.value:+.3f}"
    if interval.low is None or interval.high is None:
        return f"Too few prompts to tell which is better: {text}"
    text += f", {interval_text(interval.low, interval.high, '+')}"
    if interval.low <= 0 <= interval.high:
        return f"No clear difference: {text}"
    return f"{'B' if interval.value > 0 else 'A'} is better: {text}"


def _title(run: Run) -> str:
    """Model and data, as far as the files tell."""
    model = _model(run)
    names = [f"{model}".rstrip("/").rpartition("/")[2] if model else "", run.benchmark]
    return " on ".join(name for name in names if name) or "evaluation"


def _model(run: Run) -> Any:
    config = run.config
    return config.get("model_id") or config.get("served_model_path") or config.get("tokenizer")


def _about(path: str | Path, run: Run, samples: Sequence[EvalSample]) -> list[tuple[str, str]]:
    """What was evaluated, how and when, as far as the files tell."""
    config = run.config
    sampling = config.get("sampling_params")
    when = ""
    if (span := time_span(path, samples)) is not None:
        took = "took" if sum(sample.is_finished for sample in samples) == len(run.sample_keys) else "so far"
        began = f"{datetime.fromtimestamp(span[0], timezone.utc):%Y-%m-%d %H:%M} UTC"
        when = f"{began}, {took} {span[1] - span[0]:,.1f} s"
    facts = {
        "Model": _model(run),
        "Weights": config.get("served_weight_version"),
        "Backend": config.get("backend"),
        "Data": run.benchmark,
        "Environment": config.get("env"),
        "Reward": config.get("reward"),
        "Samples per prompt": run.n_samples_per_prompt,
        "Sampling": ", ".join(f"{name} {value}" for name, value in sampling.items())
        if isinstance(sampling, Mapping)
        else None,
        "Started": when,
        "Results": path,
    }
    rows = [(name, f"{value}"[:300]) for name, value in facts.items() if value not in (None, "")]
    return [*rows, *_made_by("report", path)]


def _made_by(command: str, *paths: str | Path) -> list[tuple[str, str]]:
    named = shlex.join(["strands-env", command, *map(str, paths), "--html"])
    return [("Page made by", f"{named}, version {__version__}")]


# --- what is said of samples and tasks ---

_FLIPS = ("flipped to success", "flipped to failure", "better", "worse", "same")


def _flip(first: float, second: float) -> str:
    if (first > 0.5) != (second > 0.5):
        return _FLIPS[0] if second > 0.5 else _FLIPS[1]
    if first == second:
        return "same"
    return "better" if second > first else "worse"


def _state(row: Sequence[Score]) -> str:
    wins = sum(score.is_success for score in row)
    if not row:
        return "not scored"
    if wins == 0:
        return "never solved"
    return "always solved" if wins == len(row) else "sometimes solved"


def _measured(samples: Iterable[EvalSample], name: str) -> list[float]:
    """The finite numbers of a measure; files of earlier releases and other providers lack some."""
    values = [
        sample.seconds if name == "seconds" else sample.step_result.observation.metrics.get(name)
        for sample in samples
        if sample.is_finished
    ]
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return [float(value) for value in numbers if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float | None:
    return _finite(float(np.mean(values))) if values else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _pair(first: float, second: float) -> list[float | None]:
    return [_finite(first), _finite(second), _finite(second - first)]


# --- tables ---


def _outcomes(samples: Mapping[str, Sequence[EvalSample]]) -> Table:
    """How many samples have each outcome, and their share; for two evaluations also what moved."""
    counts = [Counter(sample.step_result.termination_reason.value for sample in row) for row in samples.values()]
    totals = [max(1, sum(count.values())) for count in counts]
    names = sorted(dict.fromkeys(chain.from_iterable(counts)), key=lambda name: (-counts[0][name], name))
    moved = len(counts) == 2
    return Table(
        title="Outcomes",
        head=["outcome", *chain.from_iterable((name, "share") for name in samples), *(["B - A"] if moved else [])],
        rows=[
            [
                name,
                *chain.from_iterable(
                    (str(count[name]), f"{100 * count[name] / total:.1f}%")
                    for count, total in zip(counts, totals, strict=True)
                ),
                *([f"{counts[1][name] - counts[0][name]:+d}"] if moved else []),
            ]
            for name in names
        ],
    )


def _costs(samples: Sequence[EvalSample], prices: Prices | None, spent: Mapping[str, float]) -> Table:
    measured = {title: _measured(samples, name) for name, title in MEASURES.items()}
    if prices is not None:
        known = [prices.cost_of(sample) for sample in samples if sample.is_finished]
        measured["Cost of tokens, in the currency of --prices"] = [cost for cost in known if cost is not None]
    rows = []
    for title, values in measured.items():
        if values:
            median, most = np.quantile(values, [0.5, 0.95])
            numbers = (sum(values), float(np.mean(values)), median, most, max(values))
            rows.append([title, *(f"{number:,.0f}" if number >= 100 else f"{number:.3g}" for number in numbers)])
    if "cost_per_solved_prompt" in spent:
        rows.append(["Cost of tokens per solved task", f"{spent['cost_per_solved_prompt']:.3g}", *["-"] * 4])
    return Table(title="Cost and time", head=["", "all samples", "mean", "median", "p95", "max"], rows=rows)


def _configuration(differing: Mapping[str, tuple[Any, Any]]) -> list[Table]:
    rows = [[name, ending(a), ending(b)] for name, (a, b) in differing.items()]
    return [Table(title="What differs in the configurations", head=["", "A", "B"], rows=rows)] if rows else []


# --- plots ---


def _drawn(chart: Any) -> str:
    svg: str = chart.to_svg(width=WIDTH, height=HEIGHT)
    return svg.replace("<svg ", f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" ', 1)


def _histogram(title: str, noun: str, values: Sequence[float]) -> list[Plot]:
    """A bar for each of some equal ranges between round numbers, empty ones included; nothing for a single value."""
    import leather

    if len(set(values)) < 2:
        return []
    starts, counts, width = _bins(values)
    decimals = max(0, -math.floor(math.log10(width)))
    is_exact = width == 1 and all(value == int(value) for value in values)
    ranges = "" if is_exact else f", each bar from its label to {width:g} more"
    names = [f"{start:,.{decimals}f}" for start in starts]
    chart = leather.Chart()
    chart.add_y_scale(0, max(counts))
    chart.add_y_axis(name=noun, tick_formatter=lambda value, *_: f"{value:,.0f}" if value == int(value) else "")
    chart.add_x_axis(name=f"{title}{ranges}")
    chart.add_columns(list(zip(names, counts, strict=True)))
    says = ", ".join(f"{name}: {count}" for name, count in zip(names, counts, strict=True))
    return [Plot(title=title, says=f"Number of {noun}{ranges}. {says}", svg=_drawn(chart))]


def _bins(values: Sequence[float]) -> tuple[list[float], list[int], float]:
    """Return where ranges start, how many values each has, and how wide they are: 1, 2 or 5 times a power of ten."""
    low, high = min(values), max(values)
    least = max((high - low) / BARS, abs(high) * 1e-9, 1e-12)
    power = 10.0 ** math.floor(math.log10(least))
    width = next(width for width in (power, 2 * power, 5 * power, 10 * power) if width >= least * (1 - 1e-9))
    if all(value == int(value) for value in values):
        width = max(width, 1.0)
    first = math.floor(low / width + 1e-9)
    places = [math.floor(value / width + 1e-9) - first for value in values]
    counts = Counter(places)
    bars = max(places) + 1
    return [(first + place) * width for place in range(bars)], [counts[place] for place in range(bars)], width


def _curve(family: str, metrics: Mapping[str, float]) -> Plot | None:
    """How a metric grows with k, with its intervals; None if fewer than two values are of the prompts of pass@1.

    Values of other prompts do not compare: a line through them would rise or fall by the choice of prompts.
    """
    import leather

    names = [name for name in metrics if name.startswith(f"{family}@") and name.split("@")[1].isdigit()]
    names = [name for name in names if metrics[f"{name}_prompts"] == metrics["pass@1_prompts"]]
    points = [(int(name.split("@")[1]), metrics[name]) for name in names if math.isfinite(metrics[name])]
    if len(points) < 2:
        return None
    # One series, since leather names several in a legend; a missing point lifts the pen.
    line: list[tuple[int | None, float | None]] = [*points]
    for k, _ in points:
        low, high = metrics.get(f"{family}@{k}_low"), metrics.get(f"{family}@{k}_high")
        if low is not None and high is not None:
            line += [(None, None), (k, low), (k, high)]
    chart = leather.Chart()
    chart.add_x_scale(0, points[-1][0])
    chart.add_x_axis(ticks=[k for k, _ in points], name="samples k")
    chart.add_y_scale(0, 1)
    chart.add_y_axis(name=f"{family}@k")
    chart.add_line(line)
    says = ", ".join(f"{family}@{k}: {value:.3f}" for k, value in points)
    return Plot(title=f"{family}@k with 95 % intervals", says=says, svg=_drawn(chart))


def _differences(name: str, pairs: Sequence[tuple[float, float]]) -> Plot | None:
    plots = _histogram(f"{name}: B − A", "tasks", [round(b - a, 12) for a, b in pairs])
    return plots[0] if plots else None
