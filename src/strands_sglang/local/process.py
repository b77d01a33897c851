"""Child processes that never outlive their parent.

A model server is a tree of processes that hold gigabytes. A command of `run_quietly` ends with the call. No process of
a `GuardedProcess` outlives `stop`, or the end of the process that started it, SIGKILL included.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

GUARD_SCRIPT = Path(__file__).parent / "scripts" / "guard.py"
STOP_DEADLINE = 10.0  # seconds that the guard may take to end its group; it needs less than two
HEARTBEAT = 10.0  # seconds between two progress lines of a long wait


Progress = Callable[[str], None]  # takes one line of progress; called from the thread that does the work


def say(line: str) -> None:
    """Print a progress line at once, also when standard output is a pipe."""
    print(line, flush=True)


class LocalServerError(RuntimeError):
    """The local SGLang server could not be installed, started or kept running; the message says what to do."""


def clean_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment for another Python.

    Variables that lead another interpreter to this one's packages are left out.

    Args:
        **extra: Variables to set on top.
    """
    foreign = {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    return {name: value for name, value in os.environ.items() if name not in foreign} | extra


def tail(path: Path, lines: int = 30) -> str:
    """Return the last `lines` lines of a log file, or an empty string if it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as log:
            return "".join(deque(log, maxlen=lines)).rstrip()
    except OSError:
        return ""


class Heartbeat:
    """Reports the seconds of a wait, every `HEARTBEAT` seconds."""

    def __init__(self, progress: Progress) -> None:
        """Start the clock.

        Args:
            progress: Receives the lines.
        """
        self._progress = progress
        self.started = self._last = time.monotonic()

    def beat(self) -> None:
        """Report if it is time to."""
        now = time.monotonic()
        if now - self._last >= HEARTBEAT:
            self._last = now
            self._progress(f"  ... {now - self.started:.0f} s")


def run_quietly(
    command: Sequence[str | Path], what: str, *, env: Mapping[str, str] | None = None, progress: Progress = say
) -> None:
    """Run a command to its end and show its output only if it fails.

    Args:
        command: Program and arguments.
        what: What the command does, for the progress line and the error ("installing PyTorch").
        env: The whole environment; by default this process's, cleaned.
        progress: Receives a line at the start and every `HEARTBEAT` seconds.

    Raises:
        LocalServerError: The command could not be started or failed; the message ends with its last output.
    """
    progress(what)
    heartbeat = Heartbeat(progress)
    with tempfile.NamedTemporaryFile(prefix="strands-sglang-") as output:
        try:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env) if env is not None else clean_environment(),
            )
        except OSError as error:
            raise LocalServerError(f"{what} failed: {error}") from error
        try:
            while process.returncode is None:
                try:
                    process.wait(timeout=HEARTBEAT)
                except subprocess.TimeoutExpired:
                    heartbeat.beat()
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            raise LocalServerError(f"{what} failed with exit code {process.returncode}:\n{tail(Path(output.name))}")


class GuardedProcess:
    """A command and its descendants in a process group of their own, watched by a small guard process.

    The guard leads the group. It ends the group when the command ends, on SIGTERM, and when the process that started
    the guard is gone for any reason. The command's temporary files are in a directory that is removed with it.
    """

    def __init__(self, command: Sequence[str | Path], *, env: Mapping[str, str], log_path: Path) -> None:
        """Start the command.

        Args:
            command: Program and arguments.
            env: Its whole environment.
            log_path: File for its output; overwritten.

        Raises:
            LocalServerError: The guard could not be started.
        """
        self.log_path = log_path
        self._stopped = False
        self._scratch = tempfile.mkdtemp(prefix="strands-sglang-")
        # Isolated and without site-packages: the guard needs neither and starts within milliseconds.
        guard = [sys.executable, "-I", "-S", str(GUARD_SCRIPT), str(os.getpid()), self._scratch]
        try:
            with log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    [*guard, *(str(part) for part in command)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**env, "TMPDIR": self._scratch},
                    # A group of its own: Ctrl-C in the terminal reaches this process only, which stops the group.
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise LocalServerError(f"could not start {command[0]}: {error}") from error

    @property
    def pid(self) -> int:
        """The guard's process id, which is also the process group's."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The command's exit code (128 + the signal's number if one ended it), or None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the command ends, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: The command still runs after `timeout` seconds.
        """
        while timeout is None and self._process.poll() is None:
            # A signal that arrives right before an endless wait would be handled only after it.
            time.sleep(0.2)
        return self._process.wait(timeout)

    def stop(self) -> None:
        """End every process of the group; return when they are gone. Safe to call more than once."""
        if self._stopped:
            return
        orderly = False
        try:
            self._process.terminate()  # only the guard, which ends the others in order
            orderly = self._process.wait(STOP_DEADLINE) >= 0
        except subprocess.TimeoutExpired:
            pass
        finally:
            if not orderly:  # the guard was killed, or this wait was interrupted
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()
                shutil.rmtree(self._scratch, ignore_errors=True)
            self._stopped = True
