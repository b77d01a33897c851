"""Two evaluations side by side, and any of them as a table.

Two evaluations of the same prompts are compared prompt by prompt: what makes a prompt hard is in both, and drops out of
the difference, whose interval is then much narrower than those of the two values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .checkpoint import Run
from .metrics import SUCCESS_THRESHOLD, Interval, Score, mean_over_prompts, reward_scale, scores
from .records import Results


@dataclass(frozen=True)
class Difference:
    """How much better the second evaluation is in one number.

    Attributes:
        name: Of the number.
        first: The first one's value over the common prompts.
        second: The second one's.
        interval: Of the mean difference by prompt, second minus first.
        better: Prompts on which the second has more.
        worse: Prompts on which it has less.
    """

    name: str
    first: float
    second: float
    interval: Interval
    better: int
    worse: int


@dataclass(frozen=True)
class Comparison:
    """Two evaluations compared.

    Attributes:
        common: Prompts with scored samples in both.
        only_first: Prompts that have them in the first one only.
        only_second: Prompts that have them in the second one only.
        differences: Of `pass@1` and of the mean reward.
    """

    common: int
    only_first: int
    only_second: int
    differences: tuple[Difference, ...]


def compare(
    first: tuple[Run, Results], second: tuple[Run, Results], *, success_threshold: float = SUCCESS_THRESHOLD
) -> Comparison:
    """Compare two evaluations by the prompts whose whole content is the same.

    Args:
        first: What `read_results` returned.
        second: Likewise.
        success_threshold: The least reward of a success.

    Raises:
        ValueError: They have no prompt with scored samples in common.
    """
    scored = [_scores_by_content(*one, success_threshold) for one in (first, second)]
    common = [content for content in scored[0] if content in scored[1]]
    if not common:
        raise ValueError("the two have no prompt with scored samples in common")
    least, most = reward_scale([score.reward for score in row] for one in scored for row in one.values())
    differences = []
    for name, number in (
        ("pass@1", lambda row: float(np.mean([score.is_success for score in row]))),
        ("mean reward", lambda row: float(np.mean([score.reward for score in row]))),
    ):
        a, b = (np.array([number(one[content]) for content in common]) for one in scored)
        difference = b - a
        reach = 1.0 if name == "pass@1" else most - least
        differences.append(
            Difference(
                name,
                float(a.mean()),
                float(b.mean()),
                mean_over_prompts(difference, scale=(-reach, reach)),
                int((difference > 0).sum()),
                int((difference < 0).sum()),
            )
        )
    return Comparison(len(common), len(scored[0]) - len(common), len(scored[1]) - len(common), tuple(differences))


def metric_lines(metrics: Mapping[str, float]) -> list[str]:
    """Metrics as a table, one row per value, and the counts below it."""
    names = [name.removesuffix("_prompts") for name in metrics if name.endswith("_prompts")]
    names = [name for name in names if not name.endswith("_dropped")]
    rows = [["metric", "value", "95 % interval", "prompts", "if dropped failed"]]
    for name in names:
        value, low, high = (metrics.get(f"{name}{ending}") for ending in ("", "_low", "_high"))
        worst = metrics.get(f"{name}_if_dropped_failed")
        rows.append(
            [
                name,
                "-" if value is None else f"{value:.4f}",
                "-" if low is None or high is None else f"{low:.4f} .. {high:.4f}",
                f"{metrics[f'{name}_prompts']:.0f}",
                "-" if worst is None else f"{worst:.4f}",
            ]
        )
    counts = ("prompts", "samples", "dropped_samples", "errored_samples", "unscored_samples")
    of_names = {
        f"{name}{end}"
        for name in names
        for end in ("", "_low", "_high", "_prompts", "_dropped_prompts", "_if_dropped_failed")
    }
    others = [f"{name}: {value:g}" for name, value in metrics.items() if name not in of_names and name not in counts]
    told = ", ".join(f"{name.replace('_', ' ')}: {metrics[name]:.0f}" for name in counts if name in metrics)
    return [*table_lines(rows), "", told, *others]


def end_lines(results: Results) -> list[str]:
    """How the episodes ended, and what the dropped and the errored ones died of."""
    samples = [sample for row in results.values() for sample in row]
    ends = Counter(sample.step_result.termination_reason.value for sample in samples)
    lines = [f"ends: {', '.join(f'{name} {count}' for name, count in ends.most_common())}"] if ends else []
    for what, those in (
        ("dropped", [sample for sample in samples if not sample.is_finished]),
        ("counted as wrong", [sample for sample in samples if sample.is_errored]),
    ):
        causes = Counter(
            " ".join((sample.step_result.error or sample.step_result.termination_reason.value).split())[:150]
            for sample in those
        )
        lines += [f"{what}: {count} x {cause}" for cause, count in causes.most_common(5)]
        if len(causes) > 5:
            lines.append(f"{what}: {len(causes) - 5} other causes")
    return lines


def comparison_lines(comparison: Comparison) -> list[str]:
    """A comparison as a table."""
    rows = [["metric", "A", "B", "B - A", "95 % interval", "better", "worse"]]
    for one in comparison.differences:
        low, high = one.interval.low, one.interval.high
        rows.append(
            [
                one.name,
                f"{one.first:.4f}",
                f"{one.second:.4f}",
                f"{one.interval.value:+.4f}",
                "-" if low is None or high is None else f"{low:+.4f} .. {high:+.4f}",
                str(one.better),
                str(one.worse),
            ]
        )
    counts = (
        f"prompts in both: {comparison.common}, in A only: {comparison.only_first}, in B only: {comparison.only_second}"
    )
    return [*table_lines(rows), "", counts]


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def _scores_by_content(run: Run, results: Results, success_threshold: float) -> dict[str, list[Score]]:
    """The scores of each prompt that has any, by the digest of its content."""
    scored = scores(results, success_threshold=success_threshold)
    return {run.prompts[prompt]: row for prompt, row in scored.items() if row}
