"""Runs programs that nobody trusts, and always ends them.

Three modes, best first; `PythonSandbox` takes the first that this machine allows, found out by running a program in it,
and logs which:

- `namespaces`: process, network, mount, IPC and host name namespaces of its own, as a user of its own (root), or in
  a user namespace (everybody else, and root in a container, where the kernel lets them). The program sees Python, the
  system's libraries and a /tmp in memory; no other process, no other file, no network. The kernel ends all of it at
  once.
- `uid`: root without namespaces, as in most containers, where the kernel has Landlock. A uid of its own, which can
  open Python, the system's libraries, /proc, its folder and /dev/shm, and no other file; it cannot signal, trace or
  look into other processes; a filter on system calls leaves it no socket but connected pairs. Files in its folder and
  /dev/shm are measured 20 times a second and removed at the end.
- `unsafe`, only if asked for: a process of the same user, with limits. It can do all that this process can.

In each mode a run has limits on time, memory, files, processes and output, nothing of the caller's environment, no
standard input, and an empty folder of its own. What a program does to its sandbox is its own failure, and an ordinary
result. When `run` returns or is cancelled, all processes and all files of the run are gone (`unsafe`: the processes
that it can find). They also go when this process dies.

`namespaces` needs no program such as bubblewrap: that has no limit on the number of files, gives root's programs no
user of their own, and is missing on most machines, so all of `inside` would have to stay beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

from .inside.file_system import remove

Mode = Literal["namespaces", "uid", "unsafe"]
MODES: tuple[Mode, ...] = get_args(Mode)
# Why a program ended: by itself, or for the limit on what.
Ended = Literal["exited", "timeout", "memory", "processes", "disk", "output"]
ENDED: tuple[Ended, ...] = get_args(Ended)

logger = logging.getLogger(__name__)

GRACE_S = 15.0  # how long beyond its limit a run may take to start and to be cleaned up, before it is an error
PROBE_S = 20.0
CONCURRENT_RUNS = max(2, os.cpu_count() or 2)

_INSIDE = str(Path(__file__).parent / "inside")
# The package is made by hand: importing it by its full name would import all of what this process has.
_BOOTSTRAP = (
    "import sys, types; package = types.ModuleType('inside'); package.__path__ = [sys.argv.pop(1)]; "
    "sys.modules['inside'] = package; from inside.launcher import main; main()"
)


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run.

    Attributes:
        wall_s: Seconds, from the program's start to its end.
        cpu_s: Seconds of CPU time, per process.
        memory_bytes: What all processes together may hold in memory, looked at 20 times a second: their own pages, page
            tables, pipes and sockets (each as if it were full).
        address_space_bytes: What one process may ask for; beyond it Python raises `MemoryError`.
        disk_bytes: What all files together may take.
        processes: Processes and threads at a time.
        open_files: Open files, per process.
        output_bytes: Output that is kept; a program that writes more is ended.
        source_bytes: The longest program.
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


class SandboxError(RuntimeError):
    """A program could not be run; says nothing of the program."""


class SandboxUnavailableError(SandboxError):
    """This machine gives no mode that may be used."""


@dataclass(frozen=True)
class Execution:
    """One run.

    Attributes:
        output: What the program wrote to stdout and stderr, in the order in which it came; what is not UTF-8 is
            replaced. If it was too long, its beginning.
        ended: Why the program ended.
        exit_code: Its exit code, negative for a signal; None if it was ended for a limit.
        mode: The mode that it ran in.
    """

    output: str
    ended: Ended
    exit_code: int | None
    mode: Mode


class PythonSandbox:
    """Runs Python programs, each in a sandbox of its own. May be shared by threads and event loops.

    Attributes:
        mode: What programs are kept from; see this module's text.
        limits: What one run may use.
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
        """Find out which mode this machine allows, by running a program (once per process).

        Args:
            limits: What one run may use.
            mode: A mode to insist on; None takes the best.
            min_mode: The least mode that will do; None for `uid`, or `unsafe` where that is allowed.
            unsafe: Run programs without protection if there is no other way.
            python: The interpreter; its packages can be imported, but not what is installed as editable.
            visible_paths: More files and folders that programs see, read-only; everybody must be allowed to read them.
            max_concurrency: Runs at a time, per event loop; the others wait, and their clock does not tick.

        Raises:
            SandboxUnavailableError: No allowed mode works here; says why for each.
            ValueError: A mode that does not exist or that another argument rules out, or a path that does not exist.
        """
        self.limits = limits
        self._python = os.path.abspath(python)
        self._visible = tuple(os.path.abspath(path) for path in visible_paths)
        for path in self._visible:
            if not os.path.exists(path):
                raise ValueError(f"visible_paths: there is no {path}")
        self._max_concurrency = max_concurrency
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self.mode: Mode = _best_mode(_allowed_modes(mode, min_mode, unsafe), self._python)

    async def run(self, code: str) -> Execution:
        """Run a program. If the task is cancelled, the program is ended first.

        Args:
            code: The program; what it prints is returned.

        Raises:
            SandboxError: It could not be run: no process could be started, the machine does not answer.
            ValueError: It is longer than the limit.
        """
        source = code.encode("utf-8", errors="replace")
        if len(source) > self.limits.source_bytes:
            raise ValueError(f"the program has {len(source)} bytes, and {self.limits.source_bytes} are allowed")
        loop = asyncio.get_running_loop()
        slots = self._slots.setdefault(loop, asyncio.Semaphore(self._max_concurrency))
        async with slots:
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
                if not too_much:  # it may have closed its output, and go on
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
        if overdue and self.mode != "unsafe":
            raise SandboxError(f"a program was still there {GRACE_S:g} seconds after its time was over")
        if overdue:  # it can stop those that watch it
            return Execution(output=text, ended="timeout", exit_code=None, mode=self.mode)
        return self._execution(bytes(status), text)

    def _execution(self, status: bytes, text: str) -> Execution:
        """Read how a program ended; once it runs, whatever it can do to those that watch it is its own failure."""
        told = _told(status)
        began = bool(told) and "refused" not in told[0]
        safe = self.mode != "unsafe"
        refused = [words["refused"] for words in told if "refused" in words]
        if refused and (safe or not began):
            raise SandboxError(f"a program could not be started: {refused[0]}")
        last = told[-1] if told else {}
        ended, code = last.get("ended"), last.get("code")
        if not began or (safe and ended not in ENDED):  # out of the program's reach: stopped or killed by others
            raise SandboxError(f"a program was ended from outside; its output ends in {text[-200:]!r}")
        if ended not in ENDED or (ended == "exited") != isinstance(code, int):
            return Execution(output=text, ended="exited", exit_code=-signal.SIGKILL, mode=self.mode)
        return Execution(output=text, ended=ended, exit_code=code, mode=self.mode)


def available_modes(python: str = sys.executable) -> dict[Mode, str | None]:
    """For each mode None if it works on this machine, or why it does not. Found out once per process.

    Args:
        python: The interpreter that is to run in it.
    """
    return {mode: _why_not(mode, os.path.abspath(python), os.geteuid()) for mode in MODES}


def _allowed_modes(mode: Mode | None, min_mode: Mode | None, unsafe: bool) -> tuple[Mode, ...]:
    for name, value in (("mode", mode), ("min_mode", min_mode)):
        if value is not None and value not in MODES:
            raise ValueError(f"{name}={value!r} is none of {', '.join(MODES)}")
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
    """The first mode that works here, with a line in the log."""
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
        f"this machine gives no sandbox that is allowed ({'; '.join(reasons)}). "
        f"Allow user namespaces, or run as root{'' if 'unsafe' in allowed else unprotected}"
    )


@functools.lru_cache(maxsize=24)
def _why_not(mode: Mode, python: str, uid: int) -> str | None:
    """Run a program in a mode; why it does not work."""
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
            told = _told(status.read())
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ran.stdout.strip() == b"42":
        return None
    said = ran.stdout[-200:].decode(errors="replace").strip()
    refused = (str(words["refused"]) for words in told if "refused" in words)
    return next(refused, f"a program did not run: {said}")


def _told(status: bytes) -> list[dict[str, Any]]:
    """What the launcher said; what else stands there is left out."""
    told = []
    for line in status.splitlines():
        with contextlib.suppress(ValueError):
            words = json.loads(line)
            if isinstance(words, dict):
                told.append(words)
    return told


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
    """A path as the launcher's Python names it, whatever the locale of this process."""
    return os.fsencode(path).decode("utf-8", "surrogateescape")


@functools.lru_cache(maxsize=8)
def _interpreter(python: str) -> tuple[str, ...]:
    """Ask an interpreter for its file and all that it needs to see: no whole prefix, which may be a project's root.

    Raises:
        OSError: It does not say.
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
        said = (asked.stderr or asked.stdout)[-200:].decode(errors="replace").strip()
        raise OSError(f"{python} does not run as a Python (exit code {asked.returncode}): {said}") from None


@contextlib.contextmanager
def _folder(mode: Mode) -> Iterator[str | None]:
    """A folder for modes that have none in memory."""
    if mode == "namespaces":
        yield None
        return
    folder = tempfile.mkdtemp(prefix="strands-env-sandbox-")
    try:
        yield folder
    finally:
        remove(folder)


def _environment() -> dict[str, str]:
    """What a Python may need to start, and nothing else."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


def _in_memory(source: bytes) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # has no name
    file.write(source)
    file.seek(0)
    return file


async def _read(pipe: int, into: bytearray, most: int) -> bool:
    """Collect what comes from a pipe; True if there was more than there may be. Closes the pipe."""
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
    """End a run if it has not ended, and wait until it is gone, also if this task is cancelled meanwhile."""
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
