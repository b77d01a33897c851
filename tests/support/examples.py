"""Runs the examples as their users do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: Any, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run `examples/NAME.py` to its end."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
