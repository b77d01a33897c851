"""Which processes belong to a sandboxed program, what they use, and how all of them are ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod

PAGE = os.sysconf("SC_PAGE_SIZE")
ROUNDS = 200
"""How often is looked again for processes that are not gone yet, 10 ms apart."""


class Members(ABC):
    """The processes of a program."""

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

    def usage(self) -> tuple[int, int]:
        """How many they are, and the bytes that they hold in memory; a page that several share counts for each."""
        total = 0
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{pid}/statm") as sizes:
                    total += int(sizes.read().split()[1]) * PAGE
        return len(pids), total


class OfNamespace(Members):
    """All but the first process, which watches: its end is the end of all."""

    def pids(self) -> list[int]:
        """Those that live."""
        return [pid for pid in _all() if pid != 1]


class OfUser(Members):
    """All processes of a uid that nobody else has."""

    def __init__(self, uid: int) -> None:
        """Look at a uid."""
        self.uid = uid

    def pids(self) -> list[int]:
        """Those that live."""
        # Not by the owner of /proc/PID: a process can hand that to root.
        return [pid for pid in _all() if _status(pid, "Uid") == str(self.uid) and _status(pid, "State") != "Z"]

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

    def __init__(self, group: int) -> None:
        """Look at this process's children; most of them are in one process group."""
        self.group = group

    def _kill_once(self) -> None:
        # The group at once: one after the other would lose against one that forks.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, signal.SIGKILL)
        super()._kill_once()

    def pids(self) -> list[int]:
        """Those that live."""
        parents = {}
        for pid in _all():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{pid}/stat") as line:
                    fields = line.read().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[pid] = int(fields[1])
        family = {os.getpid()}
        while True:
            more = {pid for pid, parent in parents.items() if parent in family} - family
            if not more:
                return sorted(family - {os.getpid()})
            family |= more


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


def _status(pid: int, name: str) -> str | None:
    """The first word of a line of /proc/PID/status; None if the process is gone."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/status", errors="replace") as lines:
            for line in lines:
                if line.startswith(f"{name}:"):
                    return line.split()[1]
    return None
