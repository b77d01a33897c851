"""The benchmarks run; what they measure is not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.registry
@pytest.mark.timeout(600)  # the first run installs the competitors
@pytest.mark.parametrize(
    ("subject", "metric", "contenders"),
    [
        ("client", "cpu_ms", {"here", "0.4.3", "aiohttp", "httpx", "floor"}),
        ("agent", "own_ms", {"here", "0.4.3"}),
        ("memory", "stored", {"here", "0.4.3"}),
        ("rollouts", "computed", {"here", "0.4.3"}),
        ("parts", "cpu_ms", {"here", "0.4.3"}),
    ],
)
def test_each_benchmark_measures_all_contenders(tmp_path, subject, metric, contenders):
    command = [sys.executable, "benchmarks", "--check", "--only", subject, "--json", str(tmp_path / "rows.json")]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    rows = json.loads((tmp_path / "rows.json").read_text("utf-8"))["rows"]
    assert {row["contender"] for row in rows if row["rounds"][0].get(metric)} == contenders
    assert "here / 0.4.3" in printed.stdout


def test_cost_of_strands_is_measured():
    command = [sys.executable, "benchmarks/strands_cost.py", "--turns", "2", "--rounds", "1", "--agents", "4"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    assert "| Environment |" in printed.stdout and "4 environments start at once" in printed.stdout


def test_the_tables_are_what_the_command_writes():
    script = "import harness; print(harness.readme(*harness.stored()), end='')"
    written = subprocess.run([sys.executable, "-c", script], cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert written.stdout == (ROOT / "benchmarks" / "README.md").read_text("utf-8"), written.stderr
