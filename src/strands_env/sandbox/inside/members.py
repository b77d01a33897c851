"""The processes of untrusted programs: finds, limits and measures them, and ends them."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

from . import kernel

ROUNDS = 200  # most attempts to end all processes, 10 ms apart
PIPE_BYTES = 64 << 10  # capacity of a pipe, which a program may not enlarge
BUFFER_BYTES = 212_992  # of a Unix socket for each direction, by default
# A program with more memory mappings than these exceeds its memory: to measure them would take as long as it needs to
# take more. All processes together have at most so many mappings, open files, and files without a name.
MAPPINGS = 200_000
OPEN_FILES = 100_000
NAMELESS = 2_000
TOO_MUCH = 1 << 60


@dataclass(frozen=True)
class Usage:
    """Resources that the processes of a program use together.

    Attributes:
        memory: Memory in bytes, including kernel buffers, page tables, and shared memory that no process has in its
            page tables. A resident shared page counts for each process; a pipe or a socket counts as full.
        unnamed: Size in bytes of deleted files on the disk that are still open.
        threads: Number of threads.
    """

    memory: int
    unnamed: int
    threads: int


class Members(ABC):
    """The processes of a program."""

    def __init__(self, folder: str, counted: int = 0) -> None:
        """Read the capacity of a socket on this machine.

        Args:
            folder: Folder on the disk of the programs.
            counted: Device whose files in memory `usage` need not count.
        """
        self._disk = os.stat(folder).st_dev
        self._counted = counted
        # Twice the buffer: a message may start while one byte of it still fits.
        self._socket_bytes = 2 * BUFFER_BYTES
        with contextlib.suppress(OSError, ValueError), open("/proc/sys/net/core/wmem_default") as size:
            self._socket_bytes = 2 * int(size.read())

    @abstractmethod
    def pids(self) -> list[int]:
        """Return the ids of the live processes."""

    def usage(self, pids: Sequence[int], deadline: float, in_memory: int) -> Usage:
        """Return the resources that processes use; some of them once the monotonic clock has passed the deadline.

        Args:
            pids: The processes.
            deadline: Time of the monotonic clock.
            in_memory: Size in bytes of files in memory that have a name.
        """
        found = [_status(pid, lines=100) for pid in pids]
        pids = [int(status["Pid"]) for status in found if status]
        opened = list(itertools.islice(chain.from_iterable(map(self._open_files, pids)), OPEN_FILES))
        if len(opened) == OPEN_FILES:
            return Usage(TOO_MUCH, 0, 0)
        pipes = {state.st_ino for state in opened if stat.S_ISFIFO(state.st_mode)}
        sockets = {state.st_ino for state in opened if stat.S_ISSOCK(state.st_mode)}
        nameless = {
            b"%b %d" % (_device(state.st_dev), state.st_ino): state
            for state in opened
            if stat.S_ISREG(state.st_mode) and state.st_nlink == 0 and state.st_dev != self._counted
        }
        unnamed = sum(state.st_blocks * 512 for state in nameless.values() if state.st_dev == self._disk)
        sizes = {name: 0 if state.st_dev == self._disk else state.st_blocks * 512 for name, state in nameless.items()}
        buffers = len(pipes) * PIPE_BYTES + self._sockets(len(sockets)) * self._socket_bytes
        resident = _bytes(found, "VmRSS", "VmSwap", "VmPTE", "HugetlbPages")
        shared = in_memory + _shared_memory(pids, deadline, sizes, _device(self._counted))
        absent = max(0, shared - _bytes(found, "RssShmem"))
        threads = sum(int(status.get("Threads", 0)) for status in found)
        return Usage(resident + absent + buffers, unnamed, threads)

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

    def __init__(self, shared_memory: str, has_network: bool) -> None:
        """Set the folder of its files in memory, and whether its sockets are those of its processes only."""
        super().__init__("/", os.stat(shared_memory).st_dev)
        self._has_network = has_network

    def pids(self) -> list[int]:
        """Return the ids of the live processes."""
        return [pid for pid in _all() if pid != 1]

    def usage(self, pids: Sequence[int], deadline: float, in_memory: int) -> Usage:
        """Return the resources that processes use; some of them once the monotonic clock has passed the deadline."""
        used = super().usage(pids, deadline, in_memory)
        with contextlib.suppress(OSError), open("/proc/sysvipc/shm") as segments:  # they need no process
            next(segments)
            return replace(used, memory=used.memory + sum(int(line.split()[14]) for line in segments))
        return used

    def _sockets(self, seen: int) -> int:
        # Sockets in transit through another socket, or closed but still read from, are not open files.
        if self._has_network:
            with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/1/net/sockstat") as counts:
                return int(counts.readline().split()[2])
        return super()._sockets(seen)


class OfUser(Members):
    """All processes of a uid that no one else uses."""

    def __init__(self, uid: int, folder: str, ender: int) -> None:
        """Set the uid, the folder of its files, and the uid that ends its processes, which no program has."""
        super().__init__(folder)
        self.uid = uid
        self._ender = ender

    def pids(self) -> list[int]:
        """Return the ids of the live processes."""
        with kernel.files_as(self.uid):
            # Not by the owner of /proc/PID, which a process can change to root.
            found = {pid: _status(pid) for pid in _all()}
        mine = str(self.uid)
        return [pid for pid, status in found.items() if status.get("Uid") == mine and status.get("State") != "Z"]

    def usage(self, pids: Sequence[int], deadline: float, in_memory: int) -> Usage:
        """Return the resources that processes use; some of them once the monotonic clock has passed the deadline."""
        with kernel.files_as(self.uid):
            return super().usage(pids, deadline, in_memory)

    def _open_files(self, pid: int) -> Iterator[os.stat_result]:
        is_confined = _status(pid, lines=100).get("Seccomp") == "2"
        try:
            os.listdir(f"/proc/{pid}/fd")
        except PermissionError:  # it runs a file that it may not read, so no one may inspect it; or does not run yet
            if is_confined:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
        return super()._open_files(pid)

    def kill(self) -> None:
        """End all processes; their parents collect them."""
        for _ in range(ROUNDS):
            self._kill_once()
            if not self.pids():
                return
            time.sleep(0.01)

    def _kill_once(self) -> None:
        # All at once, by a process of that user: killing one by one would lose against a fork bomb.
        helper = os.fork()
        if helper == 0:
            try:
                # Its effective user says whom it may signal, the other two who may signal it: no program may stop it.
                # Another world's may end it, since all have this user: `kill` tries again.
                os.setresuid(self._ender, self.uid, self._ender)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(helper, 0)


def tree_of(pid: int) -> list[int]:
    """Return the live descendants of a process."""
    found = {each: _status(each) for each in _all()}
    parents = {each: int(status["PPid"]) for each, status in found.items() if status.get("State", "Z") != "Z"}
    tree = {pid}
    while more := {each for each, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return sorted(tree - {pid})


def limit_resources(limits: dict[str, Any]) -> None:
    """Set the kernel's limits of this process, which its children inherit."""
    for what, limit in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["address_space_bytes"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        most = resource.getrlimit(what)[1]
        if limit is None or (most != resource.RLIM_INFINITY and limit > most):
            limit = most
        resource.setrlimit(what, (limit, limit))


def _all() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _bytes(statuses: Iterable[Mapping[str, str]], *names: str) -> int:
    """Return the sum of some sizes in processes' statuses."""
    return sum(int(status.get(name, 0)) for status, name in product(statuses, names)) << 10


def _device(number: int) -> bytes:
    """Return a device as in /proc/PID/maps."""
    return b"%02x:%02x" % (os.major(number), os.minor(number))


def _shared_memory(pids: Iterable[int], deadline: float, sizes: dict[bytes, int], counted: bytes) -> int:
    """Return the size in bytes of the files without a name that processes map; more than any limit if too many.

    Such files are memory that stays when no process has its pages: of `mmap(-1, ...)`, of System V.

    Args:
        pids: The processes.
        deadline: Time of the monotonic clock, after which some are left out.
        sizes: Sizes of files that are known already.
        counted: Device whose files are left out.
    """
    for count, (pid, line) in enumerate(_mappings(pids, deadline)):
        if count > MAPPINGS or len(sizes) > NAMELESS:
            return TOO_MUCH
        if line.endswith(b" (deleted)\n") or b" [anon_shmem:" in line:
            span, _, _, *names = line.split()[:5]
            file = b" ".join(names)
            mapped = file + b" " + span
            if file in sizes or mapped in sizes or names[0] == counted:
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
    """Return the first word of each of the first lines of /proc/PID/status; empty if the process is gone.

    If its first thread ended, which alone shows neither memory nor files, they are of another one.
    """
    # A program chooses its name, which may have other line ends.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", errors="replace", newline="\n") as file:
        fields = [line.partition(":") for line in itertools.islice(file, lines)]
        status = {name: (words.split() or [""])[0] for name, _, words in fields}
        if status["State"] == "Z" and status["Pid"] == status["Tgid"]:
            for thread in set(os.listdir(f"/proc/{pid}/task")) - {str(pid)}:
                return _status(int(thread), lines)
        return status
    return {}
