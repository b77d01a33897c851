"""Runs untrusted programs, and always ends them.

There are three modes, best first. `PythonSandbox` takes the first that this machine allows, which it tests by running a
program, and logs it:

- `namespaces`: own process, network, mount, IPC and host name namespaces. Root's programs run as their own user; other
  users, and root in a container, need a user namespace. The program sees Python, the system's libraries and a /tmp in
  memory, but no other process, no other file and no network. The kernel ends all of its processes at once.
- `uid`: for root without namespaces, as in most containers, on a kernel with Landlock. The program runs as its own uid.
  It can open Python, the system's libraries, /proc, its folder and /dev/shm, and no other file. It cannot signal, trace
  or inspect other processes. A system call filter allows no sockets except connected pairs. Files in its folder and
  /dev/shm are measured 20 times a second and removed at the end.
- `unsafe`, only on request: a process of the same user with limits. The program can do all that this process can.

In each mode, a run has limits on time, memory, files, processes and output, no environment variables of the caller, no
standard input, and an empty folder. A program that damages its sandbox fails with an ordinary result. When `run`
returns or is cancelled, and when this process dies, all processes and files of the run are gone; in `unsafe` mode, all
processes that can be found.

`namespaces` does not use a program such as bubblewrap, which does not limit the number of files, runs root's programs
as root, and is missing on most machines. All of `inside` would still be needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

from .inside.file_system import remove

Mode = Literal["namespaces", "uid", "unsafe"]
"""Isolation of a program; see [`PythonSandbox`][strands_env.sandbox.PythonSandbox]."""

MODES: tuple[Mode, ...] = get_args(Mode)
"""All modes, from most to least protection."""

Ended = Literal["exited", "timeout", "memory", "processes", "disk", "output"]
"""Why a run ended: the program exited (by itself or by a signal), or it exceeded the named limit."""

ENDED: tuple[Ended, ...] = get_args(Ended)

logger = logging.getLogger(__name__)

GRACE_S = 15.0  # most time beyond its limit that a run may take to start and clean up
PROBE_S = 20.0
CONCURRENT_RUNS = max(2, os.cpu_count() or 2)

_INSIDE = str(Path(__file__).parent / "inside")
# Builds the package by hand: an import by its full name would import the parent packages.
_BOOTSTRAP = (
    "import sys, types; package = types.ModuleType('inside'); package.__path__ = [sys.argv.pop(1)]; "
    "sys.modules['inside'] = package; from inside.launcher import main; main()"
)


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run.

    Attributes:
        wall_s: Wall-clock time in seconds, from the program's start to its end.
        cpu_s: CPU time in seconds, per process.
        memory_bytes: Memory of all processes together in bytes: their pages, page tables, pipes and sockets, the last
            two counted as full. It is measured 20 times a second.
        address_space_bytes: Address space in bytes, per process. Beyond it, Python raises `MemoryError`.
        disk_bytes: Size of all files together in bytes.
        processes: Processes and threads at a time.
        open_files: Open files, per process.
        output_bytes: Length of the output in bytes. A program that writes more is ended.
        source_bytes: Length of the program's source in bytes.
    """

    wall_s: float = 30.0
    cpu_s: int = 30
    memory_bytes: int = 2 << 30
    address_space_bytes: int = 4 << 30
    disk_bytes: int = 64 << 20
    processes: int = 64
    open_files: int = 256
    output_bytes: int = 32_000
    source_bytes: int = 1 << 20


DEFAULT_LIMITS = SandboxLimits()
"""Limits of a sandbox unless you pass others."""


class SandboxError(RuntimeError):
    """A program could not be run, for a reason that is not the program's."""


class SandboxUnavailableError(SandboxError):
    """No allowed mode works on this machine."""


@dataclass(frozen=True)
class Execution:
    """Result of one run.

    Attributes:
        output: Stdout and stderr of the program, in order, with invalid UTF-8 replaced. Output beyond the limit is cut
            off.
        ended: Why the run ended.
        exit_code: Exit code of the program, negative for a signal. None if the program exceeded a limit.
        mode: Mode in which the program ran.
    """

    output: str
    ended: Ended
    exit_code: int | None
    mode: Mode


class PythonSandbox:
    """Runs untrusted Python programs, each in its own sandbox.

    There are three modes, from most to least protection:

    - `namespaces`: the program sees Python, the system's libraries and its own `/tmp`, but no other process, no other
      file and no network. It needs root or user namespaces.
    - `uid`: the program runs as its own user, cannot open other files or touch other processes, and has no network. It
      needs root, as in most containers, and a kernel with Landlock.
    - `unsafe`: the program runs as this user, with limits but without protection. It needs `unsafe=True`.

    The sandbox takes the best mode that works on this machine, and logs it. It tests a mode once per process, by
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
        min_mode: Mode | None = None,
        unsafe: bool = False,
        python: str = sys.executable,
        visible_paths: Sequence[str | os.PathLike[str]] = (),
        max_concurrency: int = CONCURRENT_RUNS,
    ) -> None:
        """Choose the best allowed mode.

        Args:
            limits: Limits of each run.
            mode: Mode to use. None takes the best one.
            min_mode: Mode with the least acceptable protection. None accepts `uid`, or `unsafe` if `unsafe=True`.
            unsafe: Whether to allow the mode `unsafe`.
            python: Interpreter of the programs. They can import its packages, but no editable installs.
            visible_paths: Further files and folders that programs may read. All users must be able to read them.
            max_concurrency: Runs at a time, per event loop. Other runs wait, which does not count toward `wall_s`.

        Raises:
            SandboxUnavailableError: No allowed mode works on this machine. The message gives the reason for each.
            ValueError: A mode does not exist or contradicts another argument, or a path does not exist.
        """
        self.limits = limits
        self._python = os.path.abspath(python)
        self._visible = tuple(os.path.abspath(path) for path in visible_paths)
        for path in self._visible:
            if not os.path.exists(path):
                raise ValueError(f"visible_paths: {path} does not exist")
        self._max_concurrency = max_concurrency
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self.mode: Mode = _best_mode(_allowed_modes(mode, min_mode, unsafe), self._python)

    async def run(self, code: str, *, started: Callable[[], None] | None = None) -> Execution:
        """Run a program and return its result.

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
                with _folder(self.mode) as folder:
                    return await self._run(source, folder)
            except OSError as error:
                raise SandboxError(f"no process could be started: {error}") from error

    async def _run(self, source: bytes, folder: str | None) -> Execution:
        status_reads, status_writes = os.pipe()
        output_reads, output_writes = os.pipe()
        with contextlib.ExitStack() as opened:
            for reads in (status_reads, output_reads):
                opened.callback(os.close, reads)
            try:
                with _in_memory(source) as given:
                    command = _command(self._python, self.mode, self.limits, status_writes, folder, self._visible)
                    process = await asyncio.create_subprocess_exec(
                        *command,
                        env=_environment(),
                        cwd="/",
                        stdin=given,
                        stdout=output_writes,
                        stderr=output_writes,
                        pass_fds=(status_writes,),
                        start_new_session=True,
                    )
            finally:
                os.close(status_writes)
                os.close(output_writes)
            status, output = bytearray(), bytearray()
            reading = asyncio.ensure_future(_read(output_reads, output, self.limits.output_bytes))
            waiting = asyncio.ensure_future(process.wait())
            opened.pop_all()  # the readers close them
            reporting = asyncio.ensure_future(_read(status_reads, status, 1 << 16))
            try:
                last = time.monotonic() + self.limits.wall_s + GRACE_S
                await asyncio.wait(
                    {reading, waiting}, timeout=self.limits.wall_s + GRACE_S, return_when=asyncio.FIRST_COMPLETED
                )
                too_much = reading.done() and reading.result()
                if not too_much:  # it may have closed its output and still run
                    await asyncio.wait({waiting}, timeout=max(0.0, last - time.monotonic()))
                overdue = not waiting.done() and not too_much
            finally:
                await _end(process, waiting)
                await asyncio.wait({reading, reporting}, timeout=5.0)
                for reader in (reading, reporting):
                    reader.cancel()
                await asyncio.gather(reading, reporting, return_exceptions=True)
        too_much = too_much or len(output) > self.limits.output_bytes
        text = bytes(output[: self.limits.output_bytes]).decode("utf-8", errors="replace")
        if too_much:
            return Execution(output=text, ended="output", exit_code=None, mode=self.mode)
        return self._execution(bytes(status), text, overdue)

    def _execution(self, status: bytes, text: str, overdue: bool) -> Execution:
        """Return how a program ended. Once it runs, any harm to its watchers that it could do is its own failure."""
        reports = _reports(status)
        began = bool(reports) and "refused" not in reports[0]
        if overdue and not began:
            raise SandboxError(f"a program had not started {GRACE_S:g} seconds after its time limit")
        if overdue:  # it can slow down its watchers, or in `unsafe` mode stop them
            return Execution(output=text, ended="timeout", exit_code=None, mode=self.mode)
        safe = self.mode != "unsafe"
        refused = [report["refused"] for report in reports if "refused" in report]
        if refused and (safe or not began):
            raise SandboxError(f"a program could not be started: {refused[0]}")
        last = reports[-1] if reports else {}
        ended, code = last.get("ended"), last.get("code")
        if not began or (safe and ended not in ENDED):  # the program could not do this: others stopped or killed it
            raise SandboxError(f"a program was ended from outside; its output ends in {text[-200:]!r}")
        if ended not in ENDED or (ended == "exited") != isinstance(code, int):
            return Execution(output=text, ended="exited", exit_code=-signal.SIGKILL, mode=self.mode)
        return Execution(output=text, ended=ended, exit_code=code, mode=self.mode)


def available_modes(python: str = sys.executable) -> dict[Mode, str | None]:
    """Return the modes with None if they work on this machine, or the reason why not. Each is tested once per process.

    Args:
        python: Interpreter of the programs.
    """
    return {mode: _why_not(mode, os.path.abspath(python), os.geteuid()) for mode in MODES}


def _allowed_modes(mode: Mode | None, min_mode: Mode | None, unsafe: bool) -> tuple[Mode, ...]:
    for name, value in (("mode", mode), ("min_mode", min_mode)):
        if value is not None and value not in MODES:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(MODES)}")
        if value == "unsafe" and not unsafe:
            raise ValueError(f"{name}='unsafe' needs unsafe=True")
    least = min_mode or ("unsafe" if unsafe else "uid")
    allowed = MODES[: MODES.index(least) + 1]
    if mode is None:
        return allowed
    if min_mode is not None and mode not in allowed:
        raise ValueError(f"mode={mode!r} gives less protection than min_mode={min_mode!r}")
    return (mode,)


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
    unprotected = ", or pass unsafe=True to run code as this user, with limits but without protection"
    raise SandboxUnavailableError(
        f"no allowed sandbox mode works on this machine ({'; '.join(reasons)}). "
        f"Allow user namespaces, or run as root{'' if 'unsafe' in allowed else unprotected}"
    )


@functools.lru_cache(maxsize=24)
def _why_not(mode: Mode, python: str, uid: int) -> str | None:
    """Run a program in a mode; return the reason if it does not work."""
    if sys.platform != "linux":
        return "only on Linux"
    if mode == "uid" and uid != 0:
        return "only root can use other uids"
    try:
        with _folder(mode) as folder, _in_memory(b"print(6 * 7)") as given, _in_memory(b"") as status:
            ran = subprocess.run(
                _command(python, mode, DEFAULT_LIMITS, status.fileno(), folder, ()),
                env=_environment(),
                cwd="/",
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(status.fileno(),),
                start_new_session=True,
                timeout=PROBE_S,
            )
            status.seek(0)
            reports = _reports(status.read())
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ran.stdout.strip() == b"42":
        return None
    output = ran.stdout[-200:].decode(errors="replace").strip()
    refused = (str(report["refused"]) for report in reports if "refused" in report)
    return next(refused, f"a program did not run: {output}")


def _reports(status: bytes) -> list[dict[str, Any]]:
    """Return the launcher's reports, without other lines."""
    reports = []
    for line in status.splitlines():
        with contextlib.suppress(ValueError):
            report = json.loads(line)
            if isinstance(report, dict):
                reports.append(report)
    return reports


def _command(
    python: str, mode: Mode, limits: SandboxLimits, status_fd: int, folder: str | None, visible: tuple[str, ...]
) -> list[str]:
    executable, *paths = _interpreter(python)
    config = {
        **asdict(limits),
        "mode": mode,
        "root": os.geteuid() == 0,
        "status_fd": status_fd,
        "parent": os.getpid(),
        "folder": folder and _in_utf8(folder),
        "python": _in_utf8(executable),
        "visible": [_in_utf8(path) for path in (*paths, *visible)],
    }
    started = [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", _BOOTSTRAP]
    return [*started, _INSIDE, json.dumps(config)]


def _in_utf8(path: str) -> str:
    """Return a path as the launcher's Python decodes it, whatever the locale of this process."""
    return os.fsencode(path).decode("utf-8", "surrogateescape")


@functools.lru_cache(maxsize=8)
def _interpreter(python: str) -> tuple[str, ...]:
    """Return an interpreter's executable and the paths that it needs, but no prefix, which may be a project's root.

    Raises:
        OSError: The interpreter does not run.
    """
    asked = subprocess.run(
        [python, "-I", "-B", "-X", "utf8", f"{_INSIDE}/interpreter.py"],
        env=_environment(),
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


@contextlib.contextmanager
def _folder(mode: Mode) -> Iterator[str | None]:
    """Name a folder for modes that have none in memory, and remove it at the end.

    The launcher makes it: it also removes it if this process is killed.
    """
    if mode == "namespaces":
        yield None
        return
    folder = os.path.join(tempfile.gettempdir(), f"strands-env-sandbox-{secrets.token_hex(8)}")
    try:
        yield folder
    finally:
        remove(folder)


def _environment() -> dict[str, str]:
    """Return the variables that Python may need to start, and no others."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


def _in_memory(source: bytes) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # has no name
    file.write(source)
    file.seek(0)
    return file


async def _read(pipe: int, into: bytearray, most: int) -> bool:
    """Read a pipe to its end and close it; return whether it had more than `most` bytes."""
    stream = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb", 0))
    try:
        while len(into) <= most:
            chunk = await stream.read(65536)
            if not chunk:
                return False
            into += chunk
        return True
    finally:
        transport.close()


async def _end(process: asyncio.subprocess.Process, waiting: asyncio.Future[int]) -> None:
    """End a run if necessary, and wait until it is gone, even if this task is cancelled meanwhile."""
    if not waiting.done():
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
        cancelled = False
        for _ in range(3):
            try:
                await asyncio.wait({waiting}, timeout=GRACE_S)
                break
            except asyncio.CancelledError:
                cancelled = True
        if not waiting.done():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.wait({waiting}, timeout=GRACE_S)
        if cancelled:
            raise asyncio.CancelledError
