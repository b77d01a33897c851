"""Processes of this machine: examples run as their users do, sandboxes, and what is to be gone."""

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

PATIENCE_S = 60


def has_ended(pid):
    """Whether a process ends: the kernel delivers a SIGKILL in its own time. One that nobody has reaped has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], PATIENCE_S)[0])
    finally:
        os.close(process)


def processes():
    """The parent and the command line of each process."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            found[int(process.name)] = parent, (process / "cmdline").read_text(errors="replace")
    return found


def watchers(owner):
    """The processes that watch one owner's programs in the sandbox, from the outermost one on."""
    return sorted(
        pid
        for pid, (_, command) in processes().items()
        if "inside.launcher" in command and f'"parent": {owner},' in command
    )


def running(owner, folder):
    """Processes of the sandbox of one owner: what watches, and programs that have their folder under `folder`.

    The programs in a namespace end with the process that watches there, which looks like the one outside.
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
