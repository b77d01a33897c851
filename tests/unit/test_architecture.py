"""docs/architecture.md is true of the code."""

import subprocess
import sys
from pathlib import Path


def test_one_call_is_at_most_seven_frames_in_four_files():
    root = Path(__file__).parents[2]
    command = [sys.executable, "benchmarks/frames.py", "--frames", "7", "--files", "4"]
    counted = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert counted.returncode == 0, counted.stdout + counted.stderr
    documented = (root / "docs" / "architecture.md").read_text("utf-8")
    frames = [line.rpartition(".")[2].rpartition(": ")[2] for line in counted.stdout.splitlines() if ".py: " in line]
    assert [frame for frame in frames if frame not in documented] == []
