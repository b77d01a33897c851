"""Runs programs that nobody trusts, and always ends them.

Three modes, best first; `PythonSandbox` takes the first that this machine allows, found out by running a program in it:

- `namespaces`: process, network, mount, IPC and host name namespaces of its own, as a user of its own (root), or in
  a user namespace (everybody else, where the kernel lets them). The program sees Python, the system's libraries and a
  /tmp in memory; no other process, no other file, no network. The kernel ends all of it at once.
- `uid`: root without namespaces, as in most containers. A uid of its own: it can read what everybody on the machine may
  read, and no more; it cannot signal, trace or look into other processes; a filter on system calls keeps it from the
  network. Files in its folder, /tmp, /var/tmp and /dev/shm are measured 20 times a second and removed at the end;
  what it writes to other places that everybody may write to is neither.
- `unsafe`, only if asked for: a process of the same user, with limits. It can do all that this process can.

In each mode a run has limits on time, memory, files, processes and output, nothing of the caller's environment, no
standard input, and an empty folder of its own. When `run` returns or is cancelled, all processes and all files of the
run are gone (`unsafe`: the processes that it can find). They also go when this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

from .inside.file_system import remove
from .limits import DEFAULT_LIMITS, SandboxLimits

Mode = Literal["namespaces", "uid", "unsafe"]
MODES: tuple[Mode, ...] = get_args(Mode)
Ended = Literal["exited", "timeout", "memory", "processes", "disk", "output"]
"""Why a program ended: by itself, or for the limit on what."""

GRACE_S = 15.0
"""How long beyond its limit a run may take to start and to be cleaned up, before it is an error."""
PROBE_S = 20.0
CONCURRENT_RUNS = max(2, os.cpu_count() or 2)

_INSIDE = str(Path(__file__).parent / "inside")
# The package is made by hand: importing it by its full name would import all of what this process has.
_BOOTSTRAP = (
    "import sys, types; package = types.ModuleType('inside'); package.__path__ = [sys.argv.pop(1)]; "
    "sys.modules['inside'] = package; from inside.launcher import main; main()"
)


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
        unsafe: bool = False,
        python: str = sys.executable,
        visible_paths: Sequence[str | os.PathLike[str]] = (),
        max_concurrency: int = CONCURRENT_RUNS,
    ) -> None:
        """Find out which mode this machine allows, by running a program (once per process).

        Args:
            limits: What one run may use.
            mode: A mode to insist on; None takes the best.
            unsafe: Run programs without protection if there is no other way.
            python: The interpreter; its packages can be imported.
            visible_paths: More files and folders that programs see in `namespaces`, read-only; everybody must be
                allowed to read them.
            max_concurrency: Runs at a time, per event loop; the others wait, and their clock does not tick.

        Raises:
            SandboxUnavailableError: No allowed mode works here; says why for each.
        """
        self.limits = limits
        self._python = os.path.abspath(python)
        self._visible = tuple(os.path.abspath(path) for path in visible_paths)
        self._max_concurrency = max_concurrency
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        if mode == "unsafe" and not unsafe:
            raise ValueError("mode='unsafe' needs unsafe=True")
        wanted: tuple[Mode, ...] = MODES if unsafe else ("namespaces", "uid")
        if mode is not None:
            wanted = (mode,)
        reasons: list[str] = []
        for candidate in wanted:
            reason = _why_not(candidate, self._python, os.geteuid())
            if reason is None:
                self.mode: Mode = candidate
                return
            reasons.append(f"{candidate}: {reason}")
        said = "; ".join(reasons)
        raise SandboxUnavailableError(
            f"this machine has no way to keep Python code away from this process ({said}). Run as root, or allow user"
            " namespaces, or pass unsafe=True to run code as this user, with limits but without protection"
        )

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
            with _folder(self.mode) as folder:
                return await self._run(source, folder)

    async def _run(self, source: bytes, folder: str | None) -> Execution:
        status_reads, status_writes = os.pipe()
        output_reads, output_writes = os.pipe()
        with contextlib.ExitStack() as opened:
            for reads in (status_reads, output_reads):
                opened.callback(_close, reads)
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
            except OSError as error:
                raise SandboxError(f"no process could be started: {error}") from error
            finally:
                os.close(status_writes)
                os.close(output_writes)
            status, output = bytearray(), bytearray()
            reading = asyncio.ensure_future(_read(output_reads, output, self.limits.output_bytes))
            waiting = asyncio.ensure_future(process.wait())
            opened.pop_all()  # the readers close them
            reporting = asyncio.ensure_future(_read(status_reads, status, 1 << 16))
            try:
                most = self.limits.wall_s + GRACE_S
                await asyncio.wait({reading, waiting}, timeout=most, return_when=asyncio.FIRST_COMPLETED)
                too_much = reading.done() and reading.result()
                if not too_much:  # it may have closed its output, and go on
                    await asyncio.wait({waiting}, timeout=most)
                overdue = not waiting.done() and not too_much
            finally:
                await _end(process, waiting)
                await asyncio.wait({reading, reporting}, timeout=2.0)
                for reader in (reading, reporting):
                    reader.cancel()
                await asyncio.gather(reading, reporting, return_exceptions=True)
        too_much = too_much or len(output) > self.limits.output_bytes
        text = bytes(output[: self.limits.output_bytes]).decode("utf-8", errors="replace")
        if too_much:
            return Execution(output=text, ended="output", exit_code=None, mode=self.mode)
        if overdue:
            raise SandboxError(f"a program was still there {GRACE_S:g} seconds after its time was over")
        return self._execution(bytes(status), text)

    def _execution(self, status: bytes, text: str) -> Execution:
        lines = status.splitlines()
        if not lines:
            raise SandboxError(f"a program ended without a word on how; its output ends in {text[-200:]!r}")
        told: dict[str, Any] = json.loads(lines[0])
        if "refused" in told:
            raise SandboxError(f"a program could not be started: {told['refused']}")
        if told["ended"] == "stopped":
            raise SandboxError("a program was stopped from outside")
        return Execution(output=text, ended=told["ended"], exit_code=told["code"], mode=self.mode)


def available_modes(python: str = sys.executable) -> dict[Mode, str | None]:
    """For each mode None if it works on this machine, or why it does not. Found out once per process.

    Args:
        python: The interpreter that is to run in it.
    """
    return {mode: _why_not(mode, os.path.abspath(python), os.geteuid()) for mode in MODES}


@functools.lru_cache(maxsize=24)
def _why_not(mode: Mode, python: str, uid: int) -> str | None:
    """Run a program in a mode; why it does not work."""
    if sys.platform != "linux":
        return "only on Linux"
    if mode == "uid" and uid != 0:
        return "only root can use other uids"
    reads, writes = os.pipe()
    try:
        with _folder(mode) as folder, _in_memory(b"print(6 * 7)") as given:
            try:
                ran = subprocess.run(
                    _command(python, mode, DEFAULT_LIMITS, writes, folder, ()),
                    env=_environment(),
                    cwd="/",
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(writes,),
                    start_new_session=True,
                    timeout=PROBE_S,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                return str(error)
            finally:
                os.close(writes)
            told = os.read(reads, 1 << 16)
    finally:
        os.close(reads)
    if ran.stdout.strip() == b"42":
        return None
    reason = json.loads(told.splitlines()[0]).get("refused") if told else None
    return reason or f"a program did not run: {ran.stdout[-200:].decode(errors='replace').strip()}"


def _command(
    python: str, mode: Mode, limits: SandboxLimits, status_fd: int, folder: str | None, visible: tuple[str, ...]
) -> list[str]:
    config = {
        **asdict(limits),
        "mode": mode,
        "root": os.geteuid() == 0,
        "status_fd": status_fd,
        "parent": os.getpid(),
        "folder": folder,
        "python": python,
        "visible": [*_folders_of(python), *visible],
    }
    return [sys.executable, "-I", "-S", "-B", "-c", _BOOTSTRAP, _INSIDE, json.dumps(config)]


@functools.lru_cache(maxsize=8)
def _folders_of(python: str) -> tuple[str, ...]:
    """Where an interpreter and its packages are."""
    if python == os.path.abspath(sys.executable):
        folders = {sys.prefix, sys.base_prefix}
    else:
        asked = [python, "-I", "-c", "import sys; print(sys.prefix); print(sys.base_prefix)"]
        # One that cannot say it does not work anyhow, and the probe says why.
        folders = set(subprocess.run(asked, capture_output=True, text=True).stdout.split("\n"))
    folders |= {os.path.realpath(folder) for folder in folders}
    folders.add(str(Path(os.path.realpath(python)).parent.parent))
    return tuple(sorted(folder for folder in folders if folder not in ("", "/")))


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


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)
