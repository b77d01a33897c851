"""Run Strands' own tests, fetching them first: `python -m support.strands_own [arguments of pytest]`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# The package is also run by its path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.families.fetch import FetchError
from support.strands_own.fetch import fetch


def main(arguments: list[str]) -> int:
    """Return pytest's exit status."""
    folder = fetch()
    # The version whose tests these are, whichever is installed.
    paths = [folder / "src", Path(__file__).resolve().parents[2], *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "pytest", "-p", "support.strands_own.plugin", "-p", "no:cacheprovider"]
    # Some tests pass stand-ins around that no traceback should be searched for recursion.
    command += ["--override-ini=addopts=", "--tb=native", "-q", "-rf", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:] or ["-n", "2", "tests"]))
    except FetchError as failure:
        sys.exit(f"error: {failure}")
