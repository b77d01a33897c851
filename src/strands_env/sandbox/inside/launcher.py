"""Starts a program in the sandbox, watches it, ends all of it, and says how it ended.

Two processes do so. The watcher stays outside: a program in namespaces does not see it, and one of another user cannot
touch it. It looks at limits, is gone only once everything of the program is, and ends the program on SIGTERM, which it
also gets when the process that started it dies. Its child, the program's parent, is there to collect processes and has
nothing to lose; in namespaces it is their first process, and the kernel ends all others with it. When one of the two is
killed, the other one ends the program.

On the pipe `status_fd` come JSON objects, one per line: `refused` with what this machine does not allow, or `started`
and, in the end, `ended` (why: exited, timeout, memory, processes, disk, stopped) with `code` (the exit code, negative
for a signal). After `started`, whatever goes wrong is the program's work.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from . import file_system, kernel
from .members import Members, OfNamespace, OfParent, OfUser, reap

INNER = 1000  # the program's uid in a user namespace of our own
FIRST_SPARE = 2_000_000_000  # the uids from here on belong to nobody; each run takes one of its own
POLL_S = 0.05
_NUMBER = struct.Struct("=i")


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
        _tell(status_fd, refused=str(error))
    finally:
        if config["folder"] is not None:
            file_system.remove(config["folder"])
        os._exit(0)


def _tell(status_fd: int, **what: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # whoever started this is gone
        os.write(status_fd, json.dumps(what).encode() + b"\n")


# --- the modes ---


def _in_namespaces(config: dict[str, Any]) -> None:
    flags = kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS
    user = spare_uid() if config["root"] else None
    members = OfNamespace()
    inner = INNER if user is None else user
    try:
        if user is None:
            raise PermissionError
        kernel.unshare(flags)
    except PermissionError:  # root without the capability for it may still have a user namespace
        inner = INNER
        if not _unshare_with_users(flags, user):
            user = None
    # From here on, /proc is that of the namespace: the child puts it there for both.
    _watch(config, members, lambda told: _first_process(config, inner, user is not None, told))


def _unshare_with_users(flags: int, spare: int | None) -> bool:
    """Leave the namespaces, that of users too. True if `INNER` is a user of its own there, rather than this one."""
    uid, gid, this = os.geteuid(), os.getegid(), os.getpid()
    go_reads, go_writes = os.pipe()
    helper = os.fork()  # only somebody who stays behind may give away users that are not his own
    if helper == 0:
        try:
            os.close(go_writes)
            if not os.read(go_reads, 1):
                os._exit(1)
            if spare is not None:
                with contextlib.suppress(OSError):
                    for kind in ("uid", "gid"):
                        _write(f"/proc/{this}/{kind}_map", f"0 0 1\n{INNER} {spare} 1")
                    os._exit(0)
            _write(f"/proc/{this}/setgroups", "deny")
            for kind, own in (("uid", uid), ("gid", gid)):
                _write(f"/proc/{this}/{kind}_map", f"{INNER} {own} 1")
            os._exit(2)
        finally:
            os._exit(1)
    os.close(go_reads)
    try:
        kernel.unshare(flags | kernel.NEWUSER)
        os.write(go_writes, b"+")
    finally:
        os.close(go_writes)
        code = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if code not in (0, 2):
        raise OSError(errno.EPERM, "no user may be had in a user namespace")
    return code == 0


def _first_process(config: dict[str, Any], inner: int, switch: bool, told: int) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if not _is_read(told):
        return
    file_system.build(config, inner, inner)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # the program may not look into this process
    program = _start(config, inner if switch else None, told)
    pid, status = os.wait()
    while pid != program:
        pid, status = os.wait()
    os.write(told, _NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _as_other_user(config: dict[str, Any]) -> None:
    uid = spare_uid()
    if uid is None:
        raise OSError("there is no other uid to use")
    if not kernel.can_filter():
        raise OSError("there is no system call filter for this processor")
    if kernel.landlock_version() < 1:
        raise OSError("the kernel has no Landlock")
    os.chown(config["folder"], uid, uid)
    os.chdir(config["folder"])
    members = OfUser(uid)
    try:
        _watch(config, members, lambda told: _parent(config, members, uid, told))
    finally:
        _remove(config, uid)


def _unsafe(config: dict[str, Any]) -> None:
    os.chdir(config["folder"])
    _watch(config, OfParent(), lambda told: _parent(config, OfParent(), None, told))


def _parent(config: dict[str, Any], members: Members, user: int | None, told: int) -> None:
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    if not _is_read(told):
        return
    try:
        program = _start(config, user, told)
        while signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) != signal.SIGTERM:
            ended = reap()
            if program in ended:
                os.write(told, _NUMBER.pack(ended[program]))
                return
    finally:
        if not _is_read(told):  # the watcher is gone
            members.kill()
            _remove(config, user)


def _remove(config: dict[str, Any], user: int | None) -> None:
    """Remove what a program has left; nobody is left who could change it meanwhile."""
    for path in (config["folder"], *(_shared_memory_of(user) if user is not None else [])):
        file_system.remove(path)


def _is_read(pipe: int) -> bool:
    """Whether somebody is left who reads from a pipe."""
    poll = select.poll()
    poll.register(pipe, 0)
    return not poll.poll(0)


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


def _start(config: dict[str, Any], user: int | None, told: int) -> int:
    """Write the source, start the program on it, and return its pid; `told` gets it once the program runs."""
    with open(0, "rb", closefd=False) as given, open("main.py", "wb") as source:
        source.write(given.read())
    if user is not None:
        os.chown("main.py", user, user)
    runs_reads, runs_writes = os.pipe()
    program = os.fork()
    if program == 0:
        try:
            _become_program(config, user)
        except BaseException as error:
            _tell(config["status_fd"], refused=str(error))
        finally:
            os._exit(1)
    os.close(runs_writes)
    os.read(runs_reads, 1)  # ends when the program has replaced the process: nothing of what is open here is left
    os.close(runs_reads)
    os.write(told, _NUMBER.pack(program))
    return program


def _become_program(config: dict[str, Any], user: int | None) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    os.setsid()
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    with contextlib.suppress(OSError):
        _write("/proc/self/oom_score_adj", "1000")  # if memory runs out, this is what has to go
    processes = config["processes"]
    major, minor = os.uname().release.split(".")[:2]
    # From Linux 5.14 on the limit counts the processes of the user namespace only.
    counts_by_namespace = (int(major), int("".join(c for c in minor if c.isdigit()) or 0)) >= (5, 14)
    if user is None and (config["mode"] == "unsafe" or not counts_by_namespace):
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
    home = os.getcwd()
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if config["mode"] == "uid":
        file_system.limit(config, home)
    if config["mode"] != "unsafe" and kernel.can_filter():
        kernel.filter_system_calls(only_pairs=config["mode"] == "uid")
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8",
        "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg",
        **{name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"},
    }  # fmt: skip
    # Nothing but the standard streams is left of what is open once the program has begun.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), False)
    _tell(config["status_fd"], started=True)
    python = config["python"]
    os.execve(python, [python, "-E", "-s", "-B", "-u", "-X", "utf8", "main.py"], environment)


def _of_user(uid: int) -> int:
    """How many threads a user has."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


# --- watching ---


def _watch(config: dict[str, Any], members: Members, work: Callable[[int], None]) -> None:
    """Run `work` in a child, which starts the program; watch the program, end all of it, and say how it ended."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    reads, told = os.pipe()
    os.set_blocking(reads, False)
    child = os.fork()
    if child == 0:
        os.close(reads)
        try:
            work(told)
        except OSError as error:
            _tell(config["status_fd"], refused=str(error))
        finally:
            os._exit(0)
    os.close(told)
    members.parent = child
    try:
        ended, code = _wait(config, members, child, reads)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        if config["mode"] != "namespaces":  # where the kernel ends them all
            members.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    _tell(config["status_fd"], ended=ended, code=code)


def _wait(config: dict[str, Any], members: Members, child: int, reads: int) -> tuple[str, int | None]:
    """Wait until the program ends or must be ended: why, and its exit code."""
    deadline = time.monotonic() + config["wall_s"]
    said = b""
    while True:
        gone = child in reap()
        with contextlib.suppress(BlockingIOError):
            said += os.read(reads, 2 * _NUMBER.size)
        numbers = [number for (number,) in _NUMBER.iter_unpack(said[: len(said) // _NUMBER.size * _NUMBER.size])]
        if gone:  # without a word on the program's end, it was ended by the program
            return "exited", numbers[1] if len(numbers) > 1 else -signal.SIGKILL
        if time.monotonic() >= deadline:
            return "timeout", None
        if numbers:
            members.program = numbers[0]
            if (too_much := _too_much(config, members)) is not None:
                return too_much, None
        left = max(0.0, min(POLL_S, deadline - time.monotonic()))
        came = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, left)
        if came is not None and came.si_signo == signal.SIGTERM:
            return "stopped", None


def _too_much(config: dict[str, Any], members: Members) -> str | None:
    """Which limit a program is beyond."""
    used = members.usage()
    if used.memory > config["memory_bytes"]:
        return "memory"
    if used.processes > config["processes"]:  # the kernel's limit does not hold for root
        return "processes"
    if config["mode"] != "namespaces":
        shared = _shared_memory_of(members.uid) if isinstance(members, OfUser) else []
        if _are_full([config["folder"], *shared], config["disk_bytes"] - used.unnamed):
            return "disk"
    return None


def _shared_memory_of(uid: int) -> list[str]:
    """The files of a user of its own in the one folder of the machine that it may write to."""
    found = []
    folders = [file_system.SHARED_MEMORY]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    state = entry.stat(follow_symlinks=False)
                    if state.st_uid == uid:
                        found.append(entry.path)
                    elif stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_IXOTH:
                        folders.append(entry.path)
    return found


def _are_full(paths: list[str], most: int) -> bool:
    """Whether files and folders, with all that is in them, take more than they may, or cannot be counted."""
    used = files = 0
    most_files = file_system.most_files(most)
    left = list(paths)
    while left and used <= most and files + len(left) <= most_files:
        path = left.pop()
        try:
            state = os.lstat(path)
            if stat.S_ISDIR(state.st_mode):
                with os.scandir(path) as entries:
                    left += [entry.path for entry in itertools.islice(entries, most_files + 1)]
            else:
                used += state.st_blocks * 512
            files += 1
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return True
    return used > most or files + len(left) > most_files


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
