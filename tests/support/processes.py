"""Processes: of worlds, of examples, and of commands that are forks."""

import contextlib
import multiprocessing
import os
import runpy
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

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
    """Return the processes that start one owner's worlds, and the worlds' first processes, which are forks of them."""
    commands = {pid: command for pid, (_, command) in processes().items()}
    return {pid for pid, command in commands.items() if "inside.starter" in command and f"\0{owner}\0" in command}


def running(owner):
    """Return the processes of one owner's worlds with their commands: first processes, and all below them."""
    found, family = processes(), starters(owner)
    while more := {pid for pid, (parent, _) in found.items() if parent in family} - family:
        family |= more
    # Only the starter is a child of the owner: a world that outlives its starter is found, too.
    return {pid: found[pid][1] for pid in sorted(family) if pid in found and found[pid][0] != owner}


# --- scripts ---

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name, *arguments, timeout=120):
    """Run `examples/NAME.py` as its users do, to its end."""
    command = [sys.executable, EXAMPLES / f"{name}.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


# Most of a command's time is imports. These are made once, in a process that each command is a fork of. So commands
# share its modules, its hash seed and what imports read from the environment, and leave without exit handlers. A failed
# preload is an EOFError here; its reason is on standard error.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        *("strands_env.cli", "strands_env.environments.calculator", "strands_env.eval", "strands_env.rewards"),
        *("strands_sglang.cli", "strands_sglang.viewer", "transformers.models.auto.tokenization_auto", "torch"),
    ]
)


def run_fork(script, *arguments, timeout, environment):
    """Run a Python script in a fork of a process that has imported the library, and wait for it."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        for stream in streams:
            stream.touch()
        line = [str(script), *map(str, arguments)]
        process = _FORKS.Process(target=_run_script, args=(line, os.getcwd(), dict(environment), streams))
        with mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"):  # the first command starts the server
            process.start()
        try:
            process.join(timeout)
            is_late = process.exitcode is None
        finally:  # pytest's limit and Ctrl-C raise in join(), and multiprocessing waits for children when it exits
            process.kill()
            process.join()
        said = [stream.read_text(errors="replace") for stream in streams]
        if is_late:
            raise subprocess.TimeoutExpired(line, timeout, *said)
        return subprocess.CompletedProcess(line, process.exitcode, *said)


def _run_script(line, folder, environment, streams):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_APPEND), number)
    sys.argv = line
    sys.path[:0] = [str(Path(line[0]).parent), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    runpy.run_path(line[0], run_name="__main__")
