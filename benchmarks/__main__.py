"""Benchmarks: what requests, agents and rollouts cost here, in 0.4.3, and at least.

    python benchmarks [--full] [--only client,agent] [--against COMMIT] [--json FILE] [--write]

`README.md` in this folder explains the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import time
from dataclasses import replace
from pathlib import Path

import harness

SUBJECTS = ("client", "agent", "rollouts", "memory", "parts")
QUICK = ("client", "agent", "memory", "parts")
PLANS = {"check": harness.Plan(0.0, 1), "quick": harness.Plan(1.5, 3), "full": harness.Plan(5.0, 5)}


def main() -> None:
    """Run the benchmarks and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--full", action="store_const", dest="size", const="full", help="all cases (more than an hour)")
    sizes.add_argument("--check", action="store_const", dest="size", const="check", help="only that everything runs")
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(SUBJECTS)}")
    parser.add_argument("--against", metavar="COMMIT", help="also measure this commit, as 'before'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round of every contender")
    parser.add_argument("--write", action="store_true", help="write the tables in README.md and results.json again")
    parser.set_defaults(size="quick")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else SUBJECTS if arguments.size == "full" else QUICK
    if unknown := set(names) - set(SUBJECTS):
        parser.error(f"unknown benchmarks: {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    rows: list[harness.Row] = []
    taken: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        before = stack.enter_context(harness.checkout(arguments.against)) if arguments.against else None
        for name in names:
            subject = importlib.import_module(name)
            began = time.monotonic()
            measured = harness.run(
                subject, subject.cases(arguments.size), replace(PLANS[arguments.size], before=before)
            )
            rows += measured
            taken[name] = harness.machine(arguments.size)
            print(f"## {name} ({time.monotonic() - began:.0f} s)\n\n{harness.tables(subject, measured)}\n", flush=True)
    if arguments.json:
        arguments.json.write_text(harness.as_json(taken, rows))
    if arguments.write:
        harness.write(taken, rows)


if __name__ == "__main__":
    main()
