"""Write the page and the plots of a study from its files.

    python examples/grpo_cpu/study_report.py OUT --page docs/understand/exactness.md --plot docs/assets/exactness.svg

The text around the tables stays in the page: only what is between the two marks is replaced.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WAYS = ("exact", "openai", "rerendered")
COLORS = dict(zip(WAYS, ("#1b7837", "#d95f02", "#7570b3"), strict=True))
START, END = "<!-- written by study_report.py -->", "<!-- end -->"
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""97.5 % quantile of Student's t by number of values, for intervals of 95 %."""

Rows = list[dict[str, float]]


def main() -> int:
    """Write both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--plot", type=Path, required=True)
    options = parser.parse_args()
    runs = {
        (way, int(path.stem.rpartition("-")[2])): read(path)
        for way in WAYS
        for path in sorted(options.out.glob(f"train-{way}-*.csv"))
    }
    drift: dict[tuple[str, str], Rows] = {}
    for path in sorted(options.out.glob("drift-*.csv")):
        _, setting, way, _ = path.stem.split("-")
        drift.setdefault((setting, way), []).extend(read(path))
    for (way, _), rows in runs.items():
        drift.setdefault(("base", way), []).append(rows[0])
    tables = [
        training_table(runs),
        ["What is trained, and how far the trainer is from the sampler, in nats:"],
        drift_table(drift),
        mask_table(options.out / "masks.csv"),
    ]
    text = "\n\n".join("\n".join(lines) for lines in tables if lines)
    page = options.page.read_text(encoding="utf-8")
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    options.page.write_text(f"{before}{START}\n\n{text}\n{END}{after}", encoding="utf-8")
    plot(runs, drift, options.plot)
    return 0


def read(path: Path) -> Rows:
    """Return the rows of a file as numbers; NaN for what is empty."""
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    number: Callable[[str], float] = lambda text: float(text == "True") if text in ("True", "False") else float(text)  # noqa: E731
    read_rows = [{name: number(text) if text else math.nan for name, text in row.items()} for row in rows]
    for row in read_rows:
        if "sampled" in row:
            row["lost"] = 1 - row["tokens"] * (1 - row["never_sampled"]) / row["sampled"]
    return read_rows


def shown(values: Sequence[float], form: str = ".2f") -> str:
    """Return the mean with its interval of 95 % over the seeds."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    mean = f"{statistics.fmean(known):{form}}"
    if len(known) < 2:
        return mean
    half = STUDENT_T.get(len(known), 2.0) * statistics.stdev(known) / math.sqrt(len(known))
    return f"{mean} ± {half:{form.lstrip('+')}}"


def training_table(runs: dict[tuple[str, int], Rows]) -> list[str]:
    """Return the table of the trained runs, by way."""
    steps = max((len(rows) for rows in runs.values()), default=0)
    head = [*(f"reward, batch {number}" for number in range(steps)), "held-out rate after", "worst gap", "clipped"]
    lines = ["| Way | runs | " + " | ".join(head) + " |", "|---|" + "---|" * (len(head) + 1)]
    for way in WAYS:
        own = [rows for (name, _), rows in sorted(runs.items()) if name == way]
        if not own:
            continue
        cells = [shown([rows[number]["reward"] for rows in own if len(rows) > number]) for number in range(steps)]
        cells.append(shown([rows[-1]["held_out"] for rows in own]))
        cells.append(f"{max(row['max_gap'] for rows in own for row in rows):.2g}")
        cells.append(f"{statistics.fmean(row['clipped'] for rows in own for row in rows):.1%}")
        lines.append(f"| `{way}` | {len(own)} | " + " | ".join(cells) + " |")
    seeds = sorted({seed for _, seed in runs})
    for way in WAYS[1:]:
        both = [seed for seed in seeds if (way, seed) in runs and ("exact", seed) in runs]
        if both:
            found = [runs[way, seed][-1]["held_out"] - runs["exact", seed][-1]["held_out"] for seed in both]
            lines += ["", f"Held-out rate of `{way}` minus that of `exact`, by seed: {shown(found, '+.2f')}."]
    return lines


FIGURES = (
    ("episodes drifted", "drifted", ".0%", "episodes"),
    ("with an untrained answer", "other_answers", ".0%", "episodes"),
    ("trained, never sampled", "never_sampled", ".1%", "tokens"),
    ("sampled, never trained", "lost", ".1%", "sampled"),
    ("mean gap", "mean_gap", ".1g", "tokens"),
    ("largest gap", "max_gap", ".2g", "tokens"),
)
"""Figures of the table: title, column, format, and the column that weights it."""


def drift_table(drift: dict[tuple[str, str], Rows]) -> list[str]:
    """Return the table of what drifts before any update."""
    names = [title for title, *_ in FIGURES]
    lines = ["| Setting | Way | episodes | " + " | ".join(names) + " |", "|---|---|---|" + "---|" * len(names)]
    for setting in dict.fromkeys(["base", *sorted(name for name, _ in drift)]):
        for way in WAYS:
            rows = drift.get((setting, way))
            if not rows:
                continue
            count = sum(row["episodes"] for row in rows)
            cells = []
            for _, name, form, weight in FIGURES:
                known = [row for row in rows if name in row]
                if not known:
                    cells.append("-")
                    continue
                values = [max(row[name], 0.0) for row in known]
                total = sum(row[weight] for row in known)
                mean = sum(value * row[weight] for value, row in zip(values, known, strict=True)) / total
                cells.append(f"{max(values) if name == 'max_gap' else mean:{form}}")
            lines.append(f"| {setting} | `{way}` | {count:.0f} | " + " | ".join(cells) + " |")
    return lines


def mask_table(path: Path) -> list[str]:
    """Return the table of what sampling masks remove; empty before it was measured."""
    if not path.exists():
        return []
    lines = ["Under top-p 0.9 and top-k 20 at temperature 1.3, `exact`, 16 episodes:", ""]
    lines += ["| Trainer's logprobs | tokens | mean gap | largest gap | KL (k3) |", "|---|---|---|---|---|"]
    for row in read(path):
        name = "under the sampling mask" if row["under_mask"] else "over the whole vocabulary"
        values = " | ".join(f"{max(row[key], 0.0):.1g}" for key in ("mean_gap", "max_gap", "k3"))
        lines.append(f"| {name} | {row['tokens']:.0f} | {values} |")
    return lines


def plot(runs: dict[tuple[str, int], Rows], drift: dict[tuple[str, str], Rows], path: Path) -> None:
    """Write three panels: reward by batch, gap by setting, drifted episodes by setting."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "exactness", "svg.fonttype": "none", "font.size": 11})
    figure, (rewards, gaps, shares) = plt.subplots(1, 3, figsize=(11, 3.2))
    settings = list(dict.fromkeys(["base", *sorted(name for name, _ in drift)]))
    for place, way in enumerate(WAYS):
        own = [rows for (name, _), rows in sorted(runs.items()) if name == way]
        lines = [[row["reward"] for row in rows] + [rows[-1]["held_out"]] for rows in own]
        for line in lines:
            rewards.plot(range(len(line)), line, color=COLORS[way], alpha=0.35, linewidth=1)
        if lines:
            mean = [statistics.fmean(column) for column in zip(*lines, strict=True)]
            rewards.plot(range(len(mean)), mean, color=COLORS[way], label=way, linewidth=2)
        for axes, name in ((gaps, "mean_gap"), (shares, "other_answers")):
            values = [
                statistics.fmean(row[name] for row in drift[setting, way]) if (setting, way) in drift else math.nan
                for setting in settings
            ]
            axes.bar([at + 0.27 * (place - 1) for at in range(len(settings))], values, 0.25, color=COLORS[way])
    rewards.set(title="reward", xlabel="updates (the last is held out)", ylim=(0, 1))
    rewards.set_xticks(range(max((len(rows) for rows in runs.values()), default=0) + 1))
    rewards.legend(frameon=False)
    gaps.set(title="mean |trainer - sampler|, nats", yscale="log")
    shares.set(title="episodes with a lost answer", ylim=(0, 1))
    for axes in (gaps, shares):
        axes.set_xticks(range(len(settings)), settings)
    figure.tight_layout()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    path.write_text(inline(drawn.getvalue()), encoding="utf-8")


def inline(svg: str) -> str:
    """Return a plot as a drawing inside a page, which takes the page's font and colors, light or dark."""
    title = "<title>Reward, gap and lost answers of the three ways</title>"
    drawing = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    drawing = re.sub(r' ?font-family: [^;"]*;?', "", drawing)
    drawing = drawing.replace("fill: #ffffff", "fill: none").replace("stroke: #000000", "stroke: currentColor")
    start = rf'<svg \1 role="img" xmlns="http://www.w3.org/2000/svg">{title}'
    return re.sub(r'<svg.*?(viewBox="[^"]*")[^>]*>', start, drawing.replace("xlink:href", "href"), count=1)


if __name__ == "__main__":
    sys.exit(main())
