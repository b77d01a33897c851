"""Which processes belong to a sandboxed program, what they use, and how all of them are ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from . import kernel

ROUNDS = 200  # how often is looked again for processes that are not gone yet, 10 ms apart
PIPE_BYTES = 64 << 10  # what a pipe may hold; a program may not make it larger


@dataclass(frozen=True)
class Usage:
    """What the processes of a program use together.

    Attributes:
        processes: How many they are.
        memory: Bytes that they hold in memory, in the kernel's buffers and page tables too. A page that several share
            counts for each; a pipe or a socket counts as full.
        unnamed: Bytes of files that have no name any more.
    """

    processes: int
    memory: int
    unnamed: int


class Members(ABC):
    """The processes of a program.

    Attributes:
        parent: The process that started the program, and is none of them.
        program: The first of them, once it is known.
    """

    def __init__(self) -> None:
        """Read what this machine lets a socket hold."""
        self.parent: int | None = None
        self.program: int | None = None
        # A message may begin while there is room for a byte of it.
        self._socket_bytes = 2 * 212_992
        with contextlib.suppress(OSError, ValueError), open("/proc/sys/net/core/wmem_default") as size:
            self._socket_bytes = 2 * int(size.read())

    @abstractmethod
    def pids(self) -> list[int]:
        """Those that live."""

    def kill(self) -> None:
        """End all of them, and collect what they leave."""
        for _ in range(ROUNDS):
            self._kill_once()
            reap()
            if not self.pids():
                return
            time.sleep(0.01)

    def _kill_once(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def usage(self) -> Usage:
        """What they use now."""
        pids = self.pids()
        opened = [state for pid in pids for state in self._open_files(pid)]
        pipes = {state.st_ino for state in opened if stat.S_ISFIFO(state.st_mode)}
        sockets = {state.st_ino for state in opened if stat.S_ISSOCK(state.st_mode)}
        nameless = [state for state in opened if stat.S_ISREG(state.st_mode) and state.st_nlink == 0]
        unnamed = {(state.st_dev, state.st_ino): state.st_blocks * 512 for state in nameless}
        buffers = len(pipes) * PIPE_BYTES + self._sockets(len(sockets)) * self._socket_bytes
        return Usage(len(pids), sum(map(_memory, pids)) + buffers, sum(unnamed.values()))

    def _open_files(self, pid: int) -> Iterator[os.stat_result]:
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):
                    yield os.stat(f"{folder}/{name}")

    def _sockets(self, seen: int) -> int:
        """How many sockets there are, of which so many are open files. What one end has sent outlives that end."""
        return 2 * seen


class OfNamespace(Members):
    """All but the first process, which only waits: its end is the end of all."""

    def pids(self) -> list[int]:
        """Those that live."""
        return [pid for pid in _all() if pid != 1]

    def _sockets(self, seen: int) -> int:
        # Those that are on their way through another one, or closed and still read from, are no open files.
        with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/1/net/sockstat") as counts:
            return int(counts.readline().split()[2])
        return super()._sockets(seen)


class OfUser(Members):
    """All processes of a uid that nobody else has."""

    def __init__(self, uid: int) -> None:
        """Look at a uid."""
        super().__init__()
        self.uid = uid

    def pids(self) -> list[int]:
        """Those that live."""
        with kernel.files_as(self.uid):
            # Not by the owner of /proc/PID: a process can hand that to root.
            found = {pid: _status(pid) for pid in _all()}
        mine = str(self.uid)
        return [pid for pid, status in found.items() if status.get("Uid") == mine and status.get("State") != "Z"]

    def usage(self) -> Usage:
        """What they use now."""
        with kernel.files_as(self.uid):
            return super().usage()

    def _open_files(self, pid: int) -> Iterator[os.stat_result]:
        try:
            os.listdir(f"/proc/{pid}/fd")
        except PermissionError:  # made itself one that nobody may look into, by running a file that it may not read
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
        return super()._open_files(pid)

    def _kill_once(self) -> None:
        # All at once, by a process of that user: one after the other would lose against one that forks.
        helper = os.fork()
        if helper == 0:
            try:
                os.setresuid(self.uid, self.uid, self.uid)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(helper, 0)


class OfParent(Members):
    """All that come from this process, whose children the orphans among them become."""

    def _kill_once(self) -> None:
        # Its group at once: one after the other would lose against one that forks.
        if self.program is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.program, signal.SIGKILL)
        super()._kill_once()

    def pids(self) -> list[int]:
        """Those that live."""
        found = {pid: _status(pid) for pid in _all()}
        parents = {pid: int(status["PPid"]) for pid, status in found.items() if status.get("State", "Z") != "Z"}
        family = {os.getpid()}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        return sorted(family - {os.getpid(), self.parent})


def reap() -> dict[int, int]:
    """Collect children that have ended: their exit codes, negative for a signal, by pid."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def _all() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _memory(pid: int) -> int:
    """Bytes: what is resident, swapped out or in huge pages, and the page tables for it."""
    status = _status(pid, lines=100)
    return sum(int(status.get(name, 0)) for name in ("VmRSS", "VmSwap", "VmPTE", "HugetlbPages")) << 10


def _status(pid: int, lines: int = 10) -> dict[str, str]:
    """The first word of each of the first lines of /proc/PID/status; empty if the process is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", errors="replace") as file:
        fields = [line.partition(":") for line in itertools.islice(file, lines)]
        return {name: (words.split() or [""])[0] for name, _, words in fields}
    return {}
