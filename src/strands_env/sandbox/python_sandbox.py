"""Runs untrusted Python programs, and always ends them."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import get_args

from .layers import users
from .starting import INSIDE, environment
from .world import (
    DEFAULT_LIMITS,
    Execution,
    Image,
    Mode,
    SandboxError,
    SandboxLimits,
    SandboxUnavailableError,
    World,
    existing,
)

MODES: tuple[Mode, ...] = get_args(Mode)
"""All modes, from most to least protection."""

PROBE_S = 20.0
CONCURRENT_RUNS = max(2, os.cpu_count() or 2)
VARIABLES = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
}

logger = logging.getLogger(__name__)


class PythonSandbox:
    """Runs untrusted Python programs, each in its own sandbox.

    There are two modes:

    - `namespaces`: the program runs in a [`World`][strands_env.sandbox.World] of its own. It sees Python, the system's
      libraries and its own files, but no other process, no other file and no network. It needs user namespaces.
    - `uid`: the program runs as its own user, cannot open other files or touch other processes, and has no network. It
      needs root, as in most containers, and a kernel with Landlock.

    The sandbox takes the first mode that works on this machine, and logs it. It tests a mode once per process, by
    running a program. Each run has limits, no environment variables of the caller, no standard input and an empty
    folder. When it ends, its processes and files are gone. Threads and event loops may share a sandbox.

    Attributes:
        mode: Mode of all runs.
        limits: Limits of each run.

    Examples:
        ```python
        sandbox = PythonSandbox()
        execution = await sandbox.run("print(6 * 7)")
        print(execution.output)
        ```
    """

    def __init__(
        self,
        limits: SandboxLimits = DEFAULT_LIMITS,
        *,
        mode: Mode | None = None,
        python: str = sys.executable,
        visible_paths: Sequence[str | os.PathLike[str]] = (),
        max_concurrency: int = CONCURRENT_RUNS,
    ) -> None:
        """Choose the mode.

        Args:
            limits: Limits of each run.
            mode: Mode to use. None takes the best one.
            python: Interpreter of the programs. They can import its packages, but no editable installs.
            visible_paths: Further files and folders that programs may read. All users must be able to read them.
            max_concurrency: Runs at a time, per event loop. Other runs wait, which does not count toward `wall_s`.

        Raises:
            SandboxUnavailableError: No mode works on this machine. The message gives the reason for each.
            ValueError: A mode or a path does not exist.
        """
        if mode is not None and mode not in MODES:
            raise ValueError(f"mode={mode!r} is not one of {', '.join(MODES)}")
        self.limits = limits
        self._python = os.path.abspath(python)
        self._visible = existing(visible_paths)
        self._max_concurrency = max_concurrency
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self.mode: Mode = _best_mode(MODES if mode is None else (mode,), self._python)

    async def run(self, code: str, *, started: Callable[[], None] | None = None) -> Execution:
        """Run a program and return its result; all its output is in `stdout`.

        A program that fails or exceeds a limit is an ordinary result. If the task is cancelled, the program is ended
        before the cancellation continues.

        Args:
            code: Source of the program, which prints what it returns.
            started: Called when the program has its place: `max_concurrency` others may run before.

        Raises:
            SandboxError: The program could not be run: no process could be started, or the machine does not respond.
            ValueError: The source is longer than `source_bytes`.
        """
        source = code.encode("utf-8", errors="replace")
        if len(source) > self.limits.source_bytes:
            raise ValueError(f"the program has {len(source)} bytes, but source_bytes allows {self.limits.source_bytes}")
        loop = asyncio.get_running_loop()
        slots = self._slots.setdefault(loop, asyncio.Semaphore(self._max_concurrency))
        async with slots:
            if started is not None:
                started()
            try:
                return await _run(self.mode, self._python, source, self.limits, self._visible)
            except OSError as error:
                raise SandboxError(f"no program could be started: {error}") from error


async def _run(
    mode: Mode, python: str, source: bytes, limits: SandboxLimits, visible_paths: tuple[str, ...]
) -> Execution:
    executable, *paths = _interpreter(python)
    visible = (*paths, *visible_paths)
    command = [executable, "-E", "-s", "-B", "-u", "-X", "utf8", "main.py"]
    user = "65534" if len(users()) > 1 else "root"  # root of a world can end the parent of its program
    image = Image(shows_machine=True, working_dir="/tmp", user=user, env={**VARIABLES, **environment()})
    async with World(image, limits=limits, visible_paths=visible, mode=mode) as world:
        return await world.execute(command, stdin=source, script="main.py", is_merged=True, privileges=False)


def available_modes(python: str = sys.executable) -> dict[Mode, str | None]:
    """Return the modes with None if they work on this machine, or the reason why not. Each is tested once per process.

    Args:
        python: Interpreter of the programs.
    """
    return {mode: _why_not(mode, os.path.abspath(python), os.geteuid()) for mode in MODES}


def _best_mode(allowed: Sequence[Mode], python: str) -> Mode:
    """Return the first mode that works on this machine, and log it."""
    reasons: list[str] = []
    for mode in allowed:
        reason = _why_not(mode, python, os.geteuid())
        if reason is None:
            level = logging.INFO if mode == MODES[0] else logging.WARNING
            logger.log(level, "mode=<%s>, refused=<%s> | programs run in this sandbox", mode, "; ".join(reasons))
            return mode
        reasons.append(f"{mode}: {reason}")
    raise SandboxUnavailableError(
        f"no sandbox mode works on this machine ({'; '.join(reasons)}). Allow user namespaces, or run as root"
    )


@functools.lru_cache(maxsize=24)
def _why_not(mode: Mode, python: str, uid: int) -> str | None:
    """Run a program in a mode; return the reason if it does not work."""
    if sys.platform != "linux":
        return "only on Linux"
    if mode == "uid" and uid != 0:
        return "only root can use other uids"
    reasons: list[str] = []

    def probe() -> None:
        try:
            ran = asyncio.run(_run(mode, python, b"print(6 * 7)", DEFAULT_LIMITS, ()))
            if ran.output.strip() != "42":
                reasons.append(f"a program did not run: {ran.output[-200:].strip()}")
        except (SandboxError, OSError, subprocess.TimeoutExpired) as error:
            reasons.append(str(error))

    thread = threading.Thread(target=probe)  # a loop may run in this one
    thread.start()
    thread.join()
    return reasons[0] if reasons else None


@functools.lru_cache(maxsize=8)
def _interpreter(python: str) -> tuple[str, ...]:
    """Return an interpreter's executable and the paths that it needs, but no prefix, which may be a project's root.

    Raises:
        OSError: The interpreter does not run.
    """
    asked = subprocess.run(
        [python, "-I", "-B", "-X", "utf8", f"{INSIDE}/interpreter.py"],
        env=environment(),
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PROBE_S,
    )
    try:
        executable, *paths = (os.fsdecode(bytes.fromhex(path)) for path in json.loads(asked.stdout.splitlines()[-1]))
        return executable, *paths
    except (ValueError, IndexError):
        output = (asked.stderr or asked.stdout)[-200:].decode(errors="replace").strip()
        raise OSError(f"{python} is not a working Python (exit code {asked.returncode}): {output}") from None
