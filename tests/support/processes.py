"""Processes of this machine: running examples, and finding processes of sandboxes."""

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


def watchers(owner):
    """Return the processes that watch one owner's programs in the sandbox, outermost first."""
    return sorted(
        pid
        for pid, (_, command) in processes().items()
        if "inside.launcher" in command and f'"parent": {owner},' in command
    )


def running(owner, folder):
    """Return the sandbox processes of one owner: watchers, and programs with their folder under `folder`.

    Programs in a namespace end with the watcher inside it, which looks like the one outside.
    """
    found = watchers(owner)
    for pid in processes():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/cwd").startswith(f"{folder}/"):
                found.append(pid)
    return found


EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name, *arguments, timeout=120):
    """Run `examples/NAME.py` to its end."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
