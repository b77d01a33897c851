"""Processes of this machine: running scripts, and finding processes of worlds."""

import contextlib
import multiprocessing
import os
import runpy
import select
import subprocess
import sys
import tempfile
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


# --- scripts ---

EXAMPLES = Path(__file__).parents[2] / "examples"

# Most of a script's time is imports. These are made once, in a process that each script is a fork of.
_WARM = multiprocessing.get_context("forkserver")
_WARM.set_forkserver_preload(
    [
        *("strands_env.cli", "strands_env.environments.calculator", "strands_env.eval", "strands_env.rewards"),
        *("strands_sglang.cli", "strands_sglang.viewer", "transformers.models.auto.tokenization_auto", "torch"),
    ]
)


def run_example(name, *arguments, timeout=120):
    """Run `examples/NAME.py` to its end."""
    return run_script(EXAMPLES / f"{name}.py", *arguments, timeout=timeout)


def run_script(script, *arguments, timeout=120, environment=os.environ):
    """Run a Python script in its own process, and wait for it."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        line = [str(script), *map(str, arguments)]
        process = _WARM.Process(target=_run_script, args=(line, os.getcwd(), dict(environment), streams))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(line, timeout)
        return subprocess.CompletedProcess(line, process.exitcode, *(stream.read_text() for stream in streams))


def _run_script(line, folder, environment, streams):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = line
    sys.path[:0] = [str(Path(line[0]).parent), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    runpy.run_path(line[0], run_name="__main__")
