"""CPU time of importing the library in a fresh process, for one checkout or several in turns.

    python benchmarks/import_time.py [TREE ...] [--module strands_sglang] [--rounds 20]

The best of the rounds counts, as other processes can only make it worse. Bytecode is written before the first round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import time
before = time.process_time()
import {module}
print(time.process_time() - before, len(__import__("sys").modules), {module}.__file__)
"""


def import_once(tree: Path, module: str) -> tuple[float, int]:
    """Return the CPU seconds and the number of loaded modules."""
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    seconds, modules, file = result.stdout.split(maxsplit=2)
    if not Path(file.strip()).is_relative_to(tree):
        raise SystemExit(f"{module} was imported from {file.strip()}, not from {tree}")
    return float(seconds), int(modules)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, default=[Path()], help="checkouts, the first one the baseline")
    parser.add_argument("--module", default="strands_sglang")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    trees = [tree.resolve() for tree in arguments.trees]
    modules = [import_once(tree, arguments.module)[1] for tree in trees]
    rounds = [[import_once(tree, arguments.module)[0] for tree in trees] for _ in range(arguments.rounds)]
    best = [min(seconds) for seconds in zip(*rounds, strict=True)]
    for tree, seconds, loaded in zip(trees, best, modules, strict=True):
        print(f"{seconds:6.3f} s CPU ({seconds / best[0]:6.1%} of the first), {loaded} modules: {tree}")


if __name__ == "__main__":
    main()
