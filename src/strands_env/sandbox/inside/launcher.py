"""Starts a program in the sandbox, watches it, ends all of it, and says how it ended.

Stays outside of the sandbox, and is gone only once everything of the program is. Ends the program on SIGTERM, which it
also gets when the process that started it dies. In namespaces, the first process of the namespace watches; the kernel
ends all others with it.

The last thing on the pipe `status_fd` is a JSON object: `ended` (why: exited, timeout, memory, processes, disk,
stopped) and `code` (the exit code, negative for a signal), or `refused` with what this machine does not allow.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import stat
import sys
import time
from typing import Any, NoReturn

from . import file_system, kernel
from .members import Members, OfNamespace, OfParent, OfUser, reap

INNER = 1000
"""The uid in a user namespace of our own."""
FIRST_SPARE = 2_000_000_000
"""The uids from here on belong to nobody; each run takes one of its own."""
POLL_S = 0.05
SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""Where every user of a machine may write."""


def main() -> NoReturn:
    """Run the program that the configuration in the first argument describes."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    status_fd = config["status_fd"]
    os.set_inheritable(status_fd, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD, signal.SIGINT})
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != config["parent"]:
        os._exit(1)
    try:
        run = {"namespaces": _in_namespaces, "uid": _as_other_user, "unsafe": _unsafe}[config["mode"]]
        run(config)
    except OSError as error:
        with contextlib.suppress(BrokenPipeError):  # whoever started this is gone
            _tell(status_fd, refused=str(error))
    finally:
        if config["folder"] is not None:
            file_system.remove(config["folder"])
        os._exit(0)


def _tell(status_fd: int, **what: Any) -> None:
    os.write(status_fd, json.dumps(what).encode() + b"\n")


# --- the modes ---


def _in_namespaces(config: dict[str, Any]) -> None:
    uid = spare_uid() if config["root"] else None
    flags = kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS
    if uid is not None:
        kernel.unshare(flags)
    else:
        outer_uid, outer_gid = os.geteuid(), os.getegid()
        kernel.unshare(flags | kernel.NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{INNER} {outer_uid} 1")
        _write("/proc/self/gid_map", f"{INNER} {outer_gid} 1")
    first = os.fork()
    if first == 0:
        _first_process(config, uid)
    while True:
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
            os.kill(first, signal.SIGKILL)
        if os.waitpid(first, os.WNOHANG)[0]:  # the kernel has ended everything in there by then
            return


def _first_process(config: dict[str, Any], uid: int | None) -> NoReturn:
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        # The first process of a namespace hears no signals but those that it handles or blocks.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        inner = uid if uid is not None else INNER
        file_system.build(config, inner, inner)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # the program may not look into this process
        program = _start(config, user=uid, filtered=kernel.can_filter())
        ended, code = _watch(program, OfNamespace(), config)
        _tell(config["status_fd"], ended=ended, code=code)
    except OSError as error:
        _tell(config["status_fd"], refused=str(error))
    finally:
        os._exit(0)


def _as_other_user(config: dict[str, Any]) -> None:
    uid = spare_uid()
    if uid is None:
        raise OSError("there is no other uid to use")
    if not kernel.can_filter():
        raise OSError("there is no system call filter for this processor")
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    os.chown(config["folder"], uid, uid)
    os.chdir(config["folder"])
    try:
        _finish(_start(config, user=uid, filtered=True), OfUser(uid), config, uid)
    finally:
        for path in _elsewhere(uid, config["folder"]):  # nobody is left who could change it meanwhile
            file_system.remove(path)


def _unsafe(config: dict[str, Any]) -> None:
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    os.chdir(config["folder"])
    program = _start(config, user=None, filtered=False)
    _finish(program, OfParent(program), config)


def _finish(program: int, members: Members, config: dict[str, Any], uid: int | None = None) -> None:
    try:
        ended, code = _watch(program, members, config, uid)
    finally:
        members.kill()
    _tell(config["status_fd"], ended=ended, code=code)


def spare_uid() -> int | None:
    """A uid that belongs to nobody and to no other run; None if this process has none to give.

    Users of a container often are a few uids of the machine: then one of the last of these.
    """
    with open("/proc/self/uid_map") as lines:
        ranges = [(int(first), int(count)) for first, _, count in (line.split() for line in lines)]
    wanted = FIRST_SPARE + os.getpid()
    if any(first <= wanted < first + count for first, count in ranges):
        return wanted
    first, count = max(ranges)
    if count < 2048:
        return None
    return first + count - 1 - os.getpid() % min(count - 1024, 30_000)


# --- the program ---


def _start(config: dict[str, Any], user: int | None, filtered: bool) -> int:
    """Write the source, start the program on it, and return its pid."""
    with open(0, "rb", closefd=False) as given, open("main.py", "wb") as source:
        source.write(given.read())
    if user is not None:
        os.chown("main.py", user, user)
    program = os.fork()
    if program == 0:
        try:
            _become_program(config, user, filtered)
        except BaseException as error:
            _tell(config["status_fd"], refused=str(error))
        finally:
            os._exit(1)
    return program


def _become_program(config: dict[str, Any], user: int | None, filtered: bool) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    os.setsid()
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    with contextlib.suppress(OSError):
        _write("/proc/self/oom_score_adj", "1000")  # if memory runs out, this is what has to go
    processes = config["processes"]
    if user is None and (config["mode"] == "unsafe" or not _counts_by_namespace()):
        processes += _of_user(os.getuid())  # what the user runs already counts
    for what, limit in (
        (resource.RLIMIT_CPU, config["cpu_s"]),
        (resource.RLIMIT_AS, config["address_space_bytes"]),
        (resource.RLIMIT_FSIZE, config["disk_bytes"]),
        (resource.RLIMIT_NOFILE, config["open_files"]),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
    ):
        most = resource.getrlimit(what)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(what, (limit, limit))
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if filtered:
        kernel.filter_system_calls()
    home = os.getcwd()
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
    if "LD_LIBRARY_PATH" in os.environ:
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    python = config["python"]
    # Nothing but the standard streams may be left of what was open (the status pipe closes by itself: it is needed if
    # exec fails).
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != config["status_fd"]:
            with contextlib.suppress(OSError):
                os.close(int(name))
    os.execve(python, [python, "-E", "-s", "-B", "-u", "-X", "utf8", "main.py"], environment)


def _counts_by_namespace() -> bool:
    """Whether the limit on processes counts those of the user namespace only (Linux 5.14 and newer)."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(c for c in minor if c.isdigit()) or 0)) >= (5, 14)


def _of_user(uid: int) -> int:
    """How many threads a user has."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


# --- watching ---


def _watch(program: int, members: Members, config: dict[str, Any], uid: int | None = None) -> tuple[str, int | None]:
    """Wait until the program ends or must be ended: why, and its exit code."""
    deadline = time.monotonic() + config["wall_s"]
    # The first process of a namespace hears the program's signals only, and is ended from outside with SIGKILL.
    woken_by = {signal.SIGCHLD} if config["mode"] == "namespaces" else {signal.SIGCHLD, signal.SIGTERM}
    while True:
        ended = reap()
        if program in ended:
            return "exited", ended[program]
        if time.monotonic() >= deadline:
            return "timeout", None
        processes, memory = members.usage()
        if memory > config["memory_bytes"]:
            return "memory", None
        if processes > config["processes"]:  # the kernel's limit does not hold for root
            return "processes", None
        if config["mode"] != "namespaces":
            elsewhere = _elsewhere(uid, config["folder"]) if uid is not None else []
            if _are_full([config["folder"], *elsewhere], config["disk_bytes"]):
                return "disk", None
        left = max(0.0, min(POLL_S, deadline - time.monotonic()))
        came = signal.sigtimedwait(woken_by, left)
        if came is not None and came.si_signo == signal.SIGTERM:
            return "stopped", None


def _elsewhere(uid: int, folder: str) -> list[str]:
    """What a user of its own has made in folders that all users share, beside its folder."""
    found = []
    for shared in SHARED_FOLDERS:
        with contextlib.suppress(OSError), os.scandir(shared) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.path != folder and entry.stat(follow_symlinks=False).st_uid == uid:
                        found.append(entry.path)
    return found


def _are_full(paths: list[str], most: int) -> bool:
    """Whether files and folders, with all that is in them, take more than they may, or cannot be counted."""
    used = files = 0
    most_files = file_system.most_files(most)
    folders = []
    for path in paths:
        with contextlib.suppress(OSError):
            state = os.lstat(path)
            used += state.st_blocks * 512
            if stat.S_ISDIR(state.st_mode):
                folders.append(path)
    if used > most or len(paths) > most_files:
        return True
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    files += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        used += entry.stat(follow_symlinks=False).st_blocks * 512
                    if used > most or files > most_files:
                        return True
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return True
    return False


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
