"""The processes of a sandboxed program: finds them, measures them and ends them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

from . import kernel

ROUNDS = 200  # most attempts to end all processes, 10 ms apart
PIPE_BYTES = 64 << 10  # capacity of a pipe, which a program may not enlarge
# A program with more memory mappings than these exceeds its memory: to measure them would take as long as it needs to
# take more. All processes together have at most so many mappings, and so many files without a name.
MAPPINGS = 200_000
NAMELESS = 2_000


@dataclass(frozen=True)
class Usage:
    """Resources that the processes of a program use together.

    Attributes:
        memory: Memory in bytes, including kernel buffers, page tables, and shared memory that no process has in its
            page tables. A resident shared page counts for each process; a pipe or a socket counts as full.
        unnamed: Size in bytes of deleted files that are still open.
    """

    memory: int
    unnamed: int


class Members(ABC):
    """The processes of a program.

    Attributes:
        parent: Process that started the program, and is not one of them.
        program: First process of the program, once it is known.
    """

    def __init__(self) -> None:
        """Read the capacity of a socket on this machine."""
        self.parent: int | None = None
        self.program: int | None = None
        # Twice the buffer: a message may start while one byte of it still fits.
        self._socket_bytes = 2 * 212_992
        with contextlib.suppress(OSError, ValueError), open("/proc/sys/net/core/wmem_default") as size:
            self._socket_bytes = 2 * int(size.read())

    @abstractmethod
    def pids(self) -> list[int]:
        """Return the ids of the live processes."""

    def kill(self) -> None:
        """End all processes and collect them."""
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

    def usage(self, pids: Sequence[int], deadline: float) -> Usage:
        """Return the resources that processes use; some of them once the monotonic clock has passed the deadline."""
        opened = list(chain.from_iterable(map(self._open_files, pids)))
        pipes = {state.st_ino for state in opened if stat.S_ISFIFO(state.st_mode)}
        sockets = {state.st_ino for state in opened if stat.S_ISSOCK(state.st_mode)}
        nameless = [state for state in opened if stat.S_ISREG(state.st_mode) and state.st_nlink == 0]
        unnamed = {(state.st_dev, state.st_ino): state.st_blocks * 512 for state in nameless}
        buffers = len(pipes) * PIPE_BYTES + self._sockets(len(sockets)) * self._socket_bytes
        found = [_status(pid, lines=100) for pid in pids]
        resident = _bytes(found, "VmRSS", "VmSwap", "VmPTE", "HugetlbPages")
        absent = max(0, _shared_memory(pids, deadline) - _bytes(found, "RssShmem"))
        return Usage(resident + absent + buffers, sum(unnamed.values()))

    def _open_files(self, pid: int) -> Iterator[os.stat_result]:
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):
                    yield os.stat(f"{folder}/{name}")

    def _sockets(self, seen: int) -> int:
        """Return the number of sockets for a number of open ones. Data outlives the end that sent it."""
        return 2 * seen


class OfNamespace(Members):
    """All processes of a namespace but the first, which only waits and ends all others with it."""

    def pids(self) -> list[int]:
        """Return the ids of the live processes."""
        return [pid for pid in _all() if pid != 1]

    def _sockets(self, seen: int) -> int:
        # Sockets in transit through another socket, or closed but still read from, are not open files.
        with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/1/net/sockstat") as counts:
            return int(counts.readline().split()[2])
        return super()._sockets(seen)


class OfUser(Members):
    """All processes of a uid that no one else uses."""

    def __init__(self, uid: int) -> None:
        """Set the uid."""
        super().__init__()
        self.uid = uid

    def pids(self) -> list[int]:
        """Return the ids of the live processes."""
        with kernel.files_as(self.uid):
            # Not by the owner of /proc/PID, which a process can change to root.
            found = {pid: _status(pid) for pid in _all()}
        mine = str(self.uid)
        return [pid for pid, status in found.items() if status.get("Uid") == mine and status.get("State") != "Z"]

    def usage(self, pids: Sequence[int], deadline: float) -> Usage:
        """Return the resources that processes use; some of them once the monotonic clock has passed the deadline."""
        with kernel.files_as(self.uid):
            return super().usage(pids, deadline)

    def _open_files(self, pid: int) -> Iterator[os.stat_result]:
        try:
            os.listdir(f"/proc/{pid}/fd")
        except PermissionError:  # it runs a file that it may not read, so no one may inspect it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
        return super()._open_files(pid)

    def _kill_once(self) -> None:
        # All at once, by a process of that user: killing one by one would lose against a fork bomb.
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
    """All descendants of this process, which adopts their orphans."""

    def _kill_once(self) -> None:
        # The whole group at once: killing one by one would lose against a fork bomb.
        if self.program is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.program, signal.SIGKILL)
        super()._kill_once()

    def pids(self) -> list[int]:
        """Return the ids of the live processes."""
        found = {pid: _status(pid) for pid in _all()}
        parents = {pid: int(status["PPid"]) for pid, status in found.items() if status.get("State", "Z") != "Z"}
        family = {os.getpid()}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        return sorted(family - {os.getpid(), self.parent})


def reap() -> dict[int, int]:
    """Collect ended children; return their exit codes by pid, negative for a signal."""
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


def _bytes(statuses: Iterable[Mapping[str, str]], *names: str) -> int:
    """Return the sum of some sizes in processes' statuses."""
    return sum(int(status.get(name, 0)) for status, name in product(statuses, names)) << 10


def _shared_memory(pids: Iterable[int], deadline: float) -> int:
    """Return the size in bytes of the files without a name that processes map; more than any limit if too many.

    Such files are memory that stays when no process has its pages: of `mmap(-1, ...)`, of memfd_create, of System V.
    """
    sizes: dict[bytes, int] = {}
    for count, (pid, line) in enumerate(_mappings(pids, deadline)):
        if count > MAPPINGS or len(sizes) > NAMELESS:
            return 1 << 60
        if line.endswith(b" (deleted)\n") or b" [anon_shmem:" in line:
            span, _, _, *names = line.split()[:5]
            file = b" ".join(names)
            mapped = file + b" " + span
            if file in sizes or mapped in sizes:
                continue
            try:
                sizes[file] = os.stat(b"/proc/%d/map_files/%b" % (pid, span)).st_blocks * 512
            except OSError:  # only root may; what is mapped counts as full
                start, end = span.split(b"-")
                sizes[mapped] = int(end, 16) - int(start, 16)
    return sum(sizes.values())


def _mappings(pids: Iterable[int], deadline: float) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of /proc/PID/maps of processes, up to a deadline."""
    for pid in pids:
        if time.monotonic() > deadline:
            return
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
            for line in maps:
                yield pid, line


def _status(pid: int, lines: int = 10) -> dict[str, str]:
    """Return the first word of each of the first lines of /proc/PID/status; empty if the process is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", errors="replace") as file:
        fields = [line.partition(":") for line in itertools.islice(file, lines)]
        return {name: (words.split() or [""])[0] for name, _, words in fields}
    return {}
