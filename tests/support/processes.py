"""Processes of this machine: running examples, and finding processes of worlds."""

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

PATIENCE_S = 60


def has_ended(pid):
    """Wait for a process to end, and return whether it did. A zombie has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], PATIENCE_S)[0])
    finally:
        os.close(process)


def processes():
    """Return the parent and the command line of each process."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            found[int(process.name)] = parent, (process / "cmdline").read_text(errors="replace")
    return found


def starters(owner):
    """Return the processes that start one owner's worlds, at most one unless the owner is gone."""
    commands = {pid: command for pid, (_, command) in processes().items()}
    return {pid for pid, command in commands.items() if "inside.starter" in command and f"\0{owner}\0" in command}


def running(owner):
    """Return the processes of one owner's worlds with their commands: first processes, and all below them."""
    found, first = processes(), starters(owner)
    first = {pid for pid in first if found.get(pid, (0,))[0] not in first}
    family = set(first)
    while more := {pid for pid, (parent, _) in found.items() if parent in family} - family:
        family |= more
    return {pid: found[pid][1] for pid in sorted(family - first) if pid in found}


EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name, *arguments, timeout=120):
    """Run `examples/NAME.py` to its end."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
