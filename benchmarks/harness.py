"""Runs contenders in turns, and writes what they cost as rows and tables.

Only a paired run compares: in each round every contender does the same work once, in an order that changes from round
to round, each in its own process with the Python of its environment. A figure is the median of its rounds. A ratio
is the median of the rounds' ratios, and comes with the smallest and the largest. Competitors share one environment
under `~/.cache/strands-sglang`, made when first needed, with the versions that this project's environment has.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
COMPETITORS = ("strands-sglang==0.4.3", "httpx", "aiohttp", "orjson")
OURS = "here"
BEFORE = "before"
MAX_ROUNDS = 15
PATIENCE = 20


@dataclass(frozen=True)
class Row:
    """What one contender's rounds of one case measured.

    Attributes:
        subject: Name of the benchmark.
        case: What was measured.
        contender: Who did it.
        rounds: Each round's value by metric.
    """

    subject: str
    case: dict[str, Any]
    contender: str
    rounds: list[dict[str, float]]

    def values(self, metric: str) -> list[float]:
        """Return one metric of all rounds that have it."""
        return [measured[metric] for measured in self.rounds if metric in measured]


@dataclass(frozen=True)
class Goal:
    """What a figure should be at most.

    Attributes:
        metric: Name of the figure.
        case: What must be in the case.
        limit: Largest value; the smallest one if `is_least`.
        against: Contender to whose figure the ratio counts; None for the figure itself.
        is_least: Whether more is better.
    """

    metric: str
    case: dict[str, Any]
    limit: float
    against: str | None = None
    is_least: bool = False


# --- Environments ---


def competitors_python() -> Path:
    """Return the interpreter of the environment with the competitors; make it first if necessary."""
    from strands_sglang.local.install import build_once, environment_python, home, run_quietly

    pins = "".join(f"{name}=={version}\n" for name, version in sorted(versions_here().items()))
    directory = home() / "envs" / "bench-0.4.3-py{}{}".format(*sys.version_info)
    python, constraints = environment_python(directory), directory / "constraints.txt"

    def install(directory: Path) -> None:
        venv = [sys.executable, "-m", "venv", directory]
        run_quietly(venv, "creating the competitors' environment", progress=progress)
        constraints.write_text(pins)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints]
        run_quietly([*pip, *COMPETITORS], f"installing {', '.join(COMPETITORS)} (once)", progress=progress)

    build_once(directory, install, usable=lambda _: constraints.read_text() == pins, progress=progress)
    return python


def versions_here() -> dict[str, str]:
    """Return the versions in this environment of what the competitors need."""
    from packaging.requirements import Requirement

    versions: dict[str, str] = {}
    missing = ["strands-agents", "transformers", "httpx", "aiohttp", "orjson"]
    while missing:
        name = missing.pop()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if name not in versions:
                versions[name] = importlib.metadata.version(name)
                needed = map(Requirement, importlib.metadata.requires(name) or ())
                missing += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return versions


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Yield a folder with another commit of this project."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*git, "add", "--quiet", "--detach", f"{folder}/before", commit], check=True)
        try:
            yield Path(folder) / "before"
        finally:
            subprocess.run([*git, "remove", "--force", f"{folder}/before"], check=True)


# --- Processes ---


class Process:
    """A process that answers JSON lines, one after the other."""

    def __init__(self, script: str, *arguments: str, python: str | Path = sys.executable, tree: Path = ROOT) -> None:
        """Start it.

        Args:
            script: File in this folder.
            *arguments: Its arguments.
            python: Interpreter to run it with.
            tree: Checkout from which `strands_sglang` is imported, unless the interpreter is the competitors'.
        """
        paths = [str(tree / "src"), str(ROOT / "tests")] if str(python) == sys.executable else []
        quiet = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [str(python), str(HERE / script), *arguments],
            env=os.environ | quiet | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._script = " ".join([script, *arguments])

    def ask(self, value: Any) -> Any:
        """Send a value, and return the answer.

        Raises:
            SystemExit: The process failed; what it reported is the message.
        """
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended with exit code {self._process.wait()}"}
        if isinstance(answer, dict) and "error" in answer:
            raise SystemExit(f"{self._script}: {answer['error']}")
        return answer

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.communicate()


# --- Runs ---


@dataclass(frozen=True)
class Plan:
    """How long to measure, and what.

    Attributes:
        seconds: Time for one contender in one case. A round that has begun is finished.
        rounds: Number of rounds for contenders that need longer for them, up to `PATIENCE` times that time.
        before: Another checkout to compare with; None for none.
    """

    seconds: float
    rounds: int
    before: Path | None = None


def run(subject: Any, cases: list[dict[str, Any]], plan: Plan) -> list[Row]:
    """Return the rows of one subject, a module of this folder.

    It has `OURS` and `OTHERS`, its contenders and their functions; `COLUMNS` of a case, `METRICS` of a round and their
    titles, and `COMPARED`, whose ratios are shown. It may have `GOALS`; `setting`, what workers need besides the case,
    or which server; `is_left_out`, cases that are not for a contender; `derive`, which adds figures to the rounds.
    """
    setting = getattr(subject, "setting", lambda case: {})
    is_left_out = getattr(subject, "is_left_out", lambda case, contender: False)
    derive = getattr(subject, "derive", lambda case, measured: None)
    starts = {name: (function, sys.executable, ROOT) for name, function in subject.OURS.items()}
    if plan.before is not None:
        starts |= {BEFORE: (subject.OURS[OURS], sys.executable, plan.before)}
    if subject.OTHERS:
        python = competitors_python()
        starts |= {name: (function, python, ROOT) for name, function in subject.OTHERS.items()}
    rows = []
    with contextlib.ExitStack() as stack:
        servers: dict[str, str] = {}
        workers = {
            name: stack.enter_context(Process("worker.py", subject.__name__, function, python=python, tree=tree))
            for name, (function, python, tree) in starts.items()
        }
        for case in cases:
            taking_part = [name for name in workers if not is_left_out(case, name)]
            given = case | setting(case)
            if settings := given.pop("server", None):
                key = json.dumps(settings)
                if key not in servers:
                    port = stack.enter_context(Process("server.py")).ask(settings)
                    servers[key] = f"http://127.0.0.1:{port}"
                given["base_url"] = servers[key]
            if model := given.pop("sglang", None):
                given |= real_server(stack, model)
            for name in taking_part:
                workers[name].ask({"open": given})
            measured = paired(workers, taking_part, plan)
            derive(case, measured)
            rows += [Row(subject.__name__, case, name, measured[name]) for name in taking_part]
            count = len(measured[taking_part[0]])
            progress(f"{subject.__name__}: {describe(case)} ({count} rounds)")
    return rows


def real_server(stack: contextlib.ExitStack, model: str) -> dict[str, Any]:
    """Start SGLang on the CPU, and return what is known of it; `tiny` is a random model."""
    from strands_sglang import local

    python = local.ensure_sglang(progress)
    model_path = (local.ensure_tiny_qwen3 if model == "tiny" else local.ensure_smollm2)(python, progress)
    # Contenders that do not share a prefix hold every prompt of the group at once.
    settings = local.ServerSettings(threads=1, max_total_tokens=4096 if model == "tiny" else 49_152)
    server = stack.enter_context(local.start_server(python, model_path, settings=settings, progress=progress))
    return {
        "base_url": server.base_url,
        "group": server.pid,
        "log_path": str(server.log_path),
        "model_path": str(model_path),
    }


def progress(line: str) -> None:
    """Print a line about something that takes long; tables alone go to the standard output."""
    print(line, file=sys.stderr, flush=True)


def paired(workers: dict[str, Process], names: list[str], plan: Plan) -> dict[str, list[dict[str, float]]]:
    """Return each contender's rounds; the i-th rounds of all belong together, in a rotating order."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    spent = dict.fromkeys(names, 0.0)
    for turn in range(MAX_ROUNDS):
        limit = plan.seconds * (PATIENCE if turn < plan.rounds else 1)
        going = [name for name in names if turn == 0 or spent[name] < limit]
        if not going:
            break
        for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
            if name in going:
                began = time.monotonic()
                costs = workers[name].ask({"round": turn})
                measured[name].append({metric: float(f"{value:.4g}") for metric, value in costs.items()})
                spent[name] += time.monotonic() - began
    return measured


# --- Tables ---


def describe(case: dict[str, Any]) -> str:
    """Return a case in words."""
    return ", ".join(f"{key} {cell(value)}" for key, value in case.items())


def cell(value: Any) -> str:
    """Return a value of a case."""
    return f"{value:,}" if isinstance(value, int) else str(value)


def figure(value: float) -> str:
    """Return a number with about three digits."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def spread(values: list[float]) -> str:
    """Return the median, with the smallest and the largest value if there are several."""
    if not values:
        return ""
    middle = figure(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({figure(min(values))} to {figure(max(values))})"


def ratios(metric: str, over: Row, under: Row) -> list[float]:
    """Return the ratio of two contenders in each round that both have."""
    return [a / b for a, b in zip(over.values(metric), under.values(metric), strict=False) if b]


def tables(subject: Any, rows: list[Row]) -> str:
    """Return the Markdown tables of one subject: its goals, then one for each metric."""
    parts = [goals(subject, rows)]
    for metric, title in subject.METRICS.items():
        having = [row for row in rows if row.values(metric)]
        names = list(dict.fromkeys(row.contender for row in having))
        others = [name for name in names if name in (BEFORE, *subject.COMPARED) and OURS in names]
        lines = []
        for case in {json.dumps(row.case): row.case for row in having}.values():
            of = {row.contender: row for row in having if row.case == case}
            line = [cell(case[key]) for key in subject.COLUMNS]
            line += [figure(statistics.median(of[name].values(metric))) if name in of else "" for name in names]
            for name in others:
                line.append(spread(ratios(metric, of[OURS], of[name])) if {OURS, name} <= of.keys() else "")
            lines.append(line)
        if lines:
            header = [*subject.COLUMNS, *names, *(f"{OURS} / {name}" for name in others)]
            parts.append(f"**{title}**\n\n{table(header, lines)}")
    return "\n\n".join(filter(None, parts))


def goals(subject: Any, rows: list[Row]) -> str:
    """Return the table of the goals whose cases were measured."""
    lines = []
    for goal in getattr(subject, "GOALS", ()):
        for row in rows:
            if row.contender != OURS or not goal.case.items() <= row.case.items():
                continue
            rivals = [other for other in rows if other.case == row.case and other.contender == goal.against]
            values = row.values(goal.metric) if goal.against is None else []
            for rival in rivals:
                values = ratios(goal.metric, row, rival)
            if values:
                middle = statistics.median(values)
                is_met = middle >= goal.limit if goal.is_least else middle <= goal.limit
                what = subject.METRICS[goal.metric] + (f", of {goal.against}'s" if goal.against else "")
                limit = f"{'at least' if goal.is_least else 'at most'} {figure(goal.limit)}"
                lines.append([what, describe(row.case), limit, spread(values), "yes" if is_met else "**no**"])
    return table(["goal", "case", "limit", "measured", "met"], lines) if lines else ""


def table(header: list[str], lines: list[list[str]]) -> str:
    """Return a Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


# --- Results on disk ---

RESULTS = HERE / "results.json"
README = HERE / "README.md"
BEGIN, END = "<!-- results: written by `python benchmarks --write` -->", "<!-- end of the results -->"


def machine(size: str) -> str:
    """Return what figures are taken on."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("strands-agents", "transformers"))
    cores = f"{len(os.sched_getaffinity(0))} cores with a load of {os.getloadavg()[2]:.1f}"
    return (
        f"{time.strftime('%Y-%m-%d')}, {size}, commit {commit}, {cores}, Python {platform.python_version()}, {versions}"
    )


def as_json(taken: dict[str, str], rows: list[Row]) -> str:
    """Return rows as JSON, a line each, and how each subject's were taken."""
    lines = [json.dumps(asdict(row)) for row in rows]
    return f'{{"taken": {json.dumps(taken)},\n"rows": [\n' + ",\n".join(lines) + "\n]}\n"


def readme(taken: dict[str, str], rows: list[Row]) -> str:
    """Return README.md with the tables of results."""
    sections = []
    for name, how in taken.items():
        shown = tables(importlib.import_module(name), [row for row in rows if row.subject == name])
        sections.append(f"### {name}\n\nTaken {how}.\n\n{shown}")
    before, _, rest = README.read_text().partition(BEGIN)
    return "\n\n".join([before + BEGIN, *sections, END]) + rest.partition(END)[2]


def stored() -> tuple[dict[str, str], list[Row]]:
    """Return how the results in results.json were taken, and their rows."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"taken": {}, "rows": []}
    return known["taken"], [Row(**row) for row in known["rows"]]


def write(taken: dict[str, str], rows: list[Row]) -> None:
    """Replace earlier results of the same subjects, and write the tables of all."""
    known, others = stored()
    taken, rows = known | taken, [row for row in others if row.subject not in taken] + rows
    RESULTS.write_text(as_json(taken, rows))
    README.write_text(readme(taken, rows))
