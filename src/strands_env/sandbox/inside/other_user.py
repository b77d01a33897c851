"""A world without namespaces, for root in most containers: programs of another user, confined by Landlock.

Each world takes a uid that no one else has. Its programs can open Python, the system's libraries, /proc, their folder
and /dev/shm, and no other file. They cannot signal, trace or inspect other processes. A system call filter allows no
sockets except connected pairs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import Any

from . import file_system, kernel
from .first_process import FirstProcess, Space
from .members import Members, OfUser


class OtherUser(FirstProcess):
    """Serves the requests of a world's owner, without namespaces."""

    @staticmethod
    def namespaces(config: dict[str, Any]) -> int:
        """Return none."""
        return 0

    @staticmethod
    def admit(pid: int, config: dict[str, Any], until: socket.socket) -> None:
        """Give nothing."""

    def _enter(self) -> tuple[int, Members]:
        config = self._config
        if len(config["users"]) == 1:
            raise OSError("there is no spare user")
        if kernel.landlock_version() < 1:
            raise OSError("the kernel has no Landlock")
        first, count = config["users"]
        ender = first + count - 1
        self._uid = first + count // 2 + os.getpid() % (count // 2 - 1)
        folder = f"{config['layers'][0]}/u"
        os.chown(config["layers"][0], self._uid, self._uid)
        os.chown(folder, self._uid, self._uid)
        config["working_dir"] = os.path.realpath(folder)
        config["environment"].setdefault("TMPDIR", config["working_dir"])
        self._programs = OfUser(self._uid, folder, ender)
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY), self._programs

    def _leave_machine(self) -> None:
        """Become the programs' user: a link that a program made would lead root to any file of the machine."""
        if os.geteuid() == self._uid:
            return
        os.setgroups([])
        os.setresgid(self._uid, self._uid, self._uid)
        os.setresuid(self._uid, self._uid, self._uid)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # before the filter: who is confined can be inspected
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        file_system.limit(self._config["shown"], self._config["working_dir"])
        kernel.filter_outside_worlds()

    def _confine(self, request: dict[str, Any]) -> str:
        self._leave_machine()
        return str(self._config["working_dir"])

    def _end_all(self) -> None:
        self._programs.kill()

    def _elsewhere(self) -> Space:
        """Return what the programs' files in /dev/shm take, the one shared folder that they may write to."""
        states = [state for _, state in _shared_memory_of(self._uid)]
        return Space(sum(state.st_blocks * 512 for state in states), len(states))

    def _empty_memory(self) -> None:
        for path, _ in _shared_memory_of(self._uid):
            file_system.remove(path)

    def close(self) -> None:
        """End all programs, and remove what they left outside of their folder."""
        self._programs.kill()
        self._empty_memory()


def _shared_memory_of(uid: int) -> list[tuple[str, os.stat_result]]:
    """Return the paths and states of a program's files in /dev/shm, which it may remove meanwhile."""
    found = []
    folders = [file_system.SHARED_MEMORY]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    state = entry.stat(follow_symlinks=False)
                    if state.st_uid == uid:
                        found.append((entry.path, state))
                    elif stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_IXOTH:
                        folders.append(entry.path)
    return found
