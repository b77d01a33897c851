"""Runs contenders in turns, and writes what they cost as rows and tables.

Only a paired run compares: in each round every contender does the same work once, in an order that changes from round
to round, each in a process of its own with the Python of its environment. A figure is the median of its rounds. A ratio
is the median of the rounds' ratios, and comes with the smallest and the largest. Competitors share one environment
under `~/.cache/strands-sglang`, made when first needed, with the versions that this project's environment has.
"""

from __future__ import annotations

import contextlib
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
MAX_ROUNDS = 25


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


# --- Environments ---


def competitors_python() -> Path:
    """Return the interpreter of the environment with the competitors; make it first if necessary."""
    from strands_sglang.local.install import build_once, environment_python, home, run_quietly

    mine = importlib.metadata.distributions()
    versions = {one.metadata["Name"].lower(): one.version for one in mine if one.metadata["Name"] != "strands-sglang"}
    pins = "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))

    def install(directory: Path) -> None:
        run_quietly([sys.executable, "-m", "venv", directory], "creating the environment of the competitors")
        constraints = directory / "constraints.txt"
        constraints.write_text(pins)
        pip = [environment_python(directory), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run_quietly([*pip, "-c", constraints, *COMPETITORS], f"installing {', '.join(COMPETITORS)} (once; a minute)")

    directory = home() / "envs" / "bench-competitors-py{}{}".format(*sys.version_info)
    build_once(directory, install, usable=lambda made: (made / "constraints.txt").read_text() == pins)
    return environment_python(directory)


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
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRANSFORMERS_VERBOSITY": "error"}
        self._process = subprocess.Popen(
            [str(python), str(HERE / script), *arguments],
            env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
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
        rounds: Number of rounds for contenders that need longer, but on average not longer than that for each.
        before: Another checkout to compare with; None for none.
    """

    seconds: float
    rounds: int
    before: Path | None = None


def run(subject: Any, cases: list[dict[str, Any]], plan: Plan) -> list[Row]:
    """Return the rows of one subject, a module; a line per case tells of the progress."""
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
            taking_part = [name for name in workers if not subject.is_left_out(case, name)]
            given = case | subject.setting(case)
            if settings := given.pop("server", None):
                key = json.dumps(settings)
                if key not in servers:
                    port = stack.enter_context(Process("server.py")).ask(settings)
                    servers[key] = f"http://127.0.0.1:{port}"
                given["base_url"] = servers[key]
            for name in taking_part:
                workers[name].ask({"open": given})
            measured = paired(workers, taking_part, plan)
            subject.derive(case, measured)
            rows += [Row(subject.__name__, case, name, measured[name]) for name in taking_part]
            count = len(measured[taking_part[0]])
            print(f"{subject.__name__}: {describe(case)} ({count} rounds)", file=sys.stderr, flush=True)
    return rows


def paired(workers: dict[str, Process], names: list[str], plan: Plan) -> dict[str, list[dict[str, float]]]:
    """Return each contender's rounds; the i-th rounds of all belong together, in a rotating order."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    spent = dict.fromkeys(names, 0.0)
    for turn in range(MAX_ROUNDS):
        limit = plan.seconds * (plan.rounds if turn < plan.rounds else 1)
        going = [name for name in names if turn == 0 or spent[name] < limit]
        if not going:
            break
        for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
            if name in going:
                began = time.monotonic()
                measured[name].append(workers[name].ask({"round": turn}))
                spent[name] += time.monotonic() - began
    return measured


# --- Tables ---


def describe(case: dict[str, Any]) -> str:
    """Return a case in words."""
    return ", ".join(f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}" for key, value in case.items())


def spread(values: list[float]) -> str:
    """Return the median, with the smallest and the largest value if there are several."""
    middle = figure(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({figure(min(values))} to {figure(max(values))})"


def figure(value: float) -> str:
    """Return a number with about three digits."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def ratios(rows: list[Row], metric: str, over: Row, under: Row) -> list[float]:
    """Return the ratio of two contenders in each round that both have."""
    return [a / b for a, b in zip(over.values(metric), under.values(metric), strict=False) if b]


def tables(subject: Any, rows: list[Row]) -> str:
    """Return the Markdown tables of one subject, one for each metric."""
    parts = []
    for metric, title in subject.METRICS.items():
        names = list(dict.fromkeys(row.contender for row in rows if row.values(metric)))
        others = [name for name in names if name in (BEFORE, *subject.COMPARED)]
        lines = [
            f"**{title}**: median of the rounds; ratios with their smallest and largest value",
            "",
            "| " + " | ".join([*subject.COLUMNS, *names, *(f"{OURS} / {name}" for name in others)]) + " |",
            "|" + "---|" * (len(subject.COLUMNS) + len(names) + len(others)),
        ]
        for case in {json.dumps(row.case): row.case for row in rows}.values():
            of = {row.contender: row for row in rows if row.case == case and row.values(metric)}
            if not of:
                continue
            cells = [f"{case[key]:,}" if isinstance(case[key], int) else str(case[key]) for key in subject.COLUMNS]
            cells += [figure(statistics.median(of[name].values(metric))) if name in of else "" for name in names]
            for name in others:
                both = OURS in of and name in of
                cells.append(spread(ratios(rows, metric, of[OURS], of[name])) if both else "")
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def machine() -> str:
    """Return what the figures were taken on."""
    cores = len(os.sched_getaffinity(0))
    commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("strands-agents", "transformers"))
    when = time.strftime("%Y-%m-%d")
    return f"{when}, commit {commit.stdout.strip()}, {cores} cores, Python {platform.python_version()}, {versions}"


def as_json(rows: list[Row]) -> str:
    """Return rows as JSON, a line each."""
    return "[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]\n"
