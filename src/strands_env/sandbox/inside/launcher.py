"""Starts a program in the sandbox, watches it, ends all of its processes, and reports how it ended.

Two processes do this. The watcher stays outside: a program in namespaces does not see it, and a program of another user
cannot touch it. It checks the limits, exits only after the program and its files are gone, and ends the program on
SIGTERM, which it also receives when the process that started it dies. Its child, the program's parent, collects
processes; in namespaces it is the first process, and the kernel ends all others with it. If one of the two is killed,
the other ends the program.

The pipe `status_fd` receives JSON objects, one per line: `refused` with what this machine does not allow, or `started`
and, at the end, `ended` (exited, timeout, memory, processes, disk, stopped) with `code` (the exit code, negative for a
signal). After `started`, any failure is the program's.
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

INNER = 1000  # uid of the program in a user namespace
FIRST_SPARE = 2_000_000_000  # first of the uids without an owner; each run takes one
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
        if config["folder"] is not None:
            os.mkdir(config["folder"], 0o700)
        run = {"namespaces": _in_namespaces, "uid": _as_other_user, "unsafe": _unsafe}[config["mode"]]
        run(config)
    except OSError as error:
        _report(status_fd, refused=str(error))
    finally:
        if config["folder"] is not None:
            file_system.remove(config["folder"])
        os._exit(0)


def _report(status_fd: int, **what: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # the process that started this one is gone
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
    except PermissionError:  # root without the capability may still create a user namespace
        inner = INNER
        if not _unshare_with_users(flags, user):
            user = None
    # From here on, /proc shows the namespace: the child mounts it for both processes.
    _watch(config, members, lambda report_fd: _first_process(config, inner, user is not None, report_fd))


def _unshare_with_users(flags: int, spare: int | None) -> bool:
    """Move to new namespaces, including users; return whether `INNER` is a separate user there, not this one."""
    uid, gid, this = os.geteuid(), os.getegid(), os.getpid()
    go_reads, go_writes = os.pipe()
    helper = os.fork()  # only a process outside the new namespace may map other users into it
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
        raise OSError(errno.EPERM, "the kernel maps no user into a user namespace")
    return code == 0


def _first_process(config: dict[str, Any], inner: int, switch: bool, report_fd: int) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if not _is_read(report_fd):
        return
    file_system.build(config, inner, inner)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # the program may not look into this process
    program = _start(config, inner if switch else None, report_fd)
    pid, status = os.wait()
    while pid != program:
        pid, status = os.wait()
    os.write(report_fd, _NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _as_other_user(config: dict[str, Any]) -> None:
    uid = spare_uid()
    if uid is None:
        raise OSError("there is no spare uid")
    if not kernel.can_filter():
        raise OSError("there is no system call filter for this processor")
    if kernel.landlock_version() < 1:
        raise OSError("the kernel has no Landlock")
    os.chown(config["folder"], uid, uid)
    os.chdir(config["folder"])
    members = OfUser(uid)
    try:
        _watch(config, members, lambda report_fd: _parent(config, members, uid, report_fd))
    finally:
        _remove(config, uid)


def _unsafe(config: dict[str, Any]) -> None:
    os.chdir(config["folder"])
    _watch(config, OfParent(), lambda report_fd: _parent(config, OfParent(), None, report_fd))


def _parent(config: dict[str, Any], members: Members, user: int | None, report_fd: int) -> None:
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    if not _is_read(report_fd):
        return
    try:
        program = _start(config, user, report_fd)
        while signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) != signal.SIGTERM:
            ended = reap()
            if program in ended:
                os.write(report_fd, _NUMBER.pack(ended[program]))
                return
    finally:
        if not _is_read(report_fd):  # the watcher is gone
            members.kill()
            _remove(config, user)


def _remove(config: dict[str, Any], user: int | None) -> None:
    """Remove the files of a program; no process is left that could change them meanwhile."""
    for path in (config["folder"], *(_shared_memory_of(user) if user is not None else [])):
        file_system.remove(path)


def _is_read(pipe: int) -> bool:
    """Return whether a pipe still has a reader."""
    poll = select.poll()
    poll.register(pipe, 0)
    return not poll.poll(0)


def spare_uid() -> int | None:
    """Return a uid without an owner that no other run uses; None if this process has none.

    A container often has only a small range of uids; the uid is then one of the last in that range.
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


def _start(config: dict[str, Any], user: int | None, report_fd: int) -> int:
    """Write the source, start the program, and return its pid; `report_fd` receives it once the program runs."""
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
            _report(config["status_fd"], refused=str(error))
        finally:
            os._exit(1)
    os.close(runs_writes)
    os.read(runs_reads, 1)  # ends when the program has replaced the process and all descriptors are closed
    os.close(runs_reads)
    os.write(report_fd, _NUMBER.pack(program))
    return program


def _become_program(config: dict[str, Any], user: int | None) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    os.setsid()
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    with contextlib.suppress(OSError):
        _write("/proc/self/oom_score_adj", "1000")  # if memory runs out, the kernel ends this process first
    processes = config["processes"]
    major, minor = os.uname().release.split(".")[:2]
    # Since Linux 5.14, the limit only counts processes of the user namespace.
    counts_by_namespace = (int(major), int("".join(c for c in minor if c.isdigit()) or 0)) >= (5, 14)
    if user is None and (config["mode"] == "unsafe" or not counts_by_namespace):
        processes += _of_user(os.getuid())  # the running processes of the user count too
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
    # The program inherits only the standard streams.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), False)
    _report(config["status_fd"], started=True)
    python = config["python"]
    os.execve(python, [python, "-E", "-s", "-B", "-u", "-X", "utf8", "main.py"], environment)


def _of_user(uid: int) -> int:
    """Return the number of threads of a user."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


# --- watching ---


def _watch(config: dict[str, Any], members: Members, work: Callable[[int], None]) -> None:
    """Run `work` in a child, which starts the program; watch the program, end it, and report how it ended."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    reads, report_fd = os.pipe()
    os.set_blocking(reads, False)
    child = os.fork()
    if child == 0:
        os.close(reads)
        try:
            work(report_fd)
        except OSError as error:
            _report(config["status_fd"], refused=str(error))
        finally:
            os._exit(0)
    os.close(report_fd)
    members.parent = child
    try:
        ended, code = _wait(config, members, child, reads)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        if config["mode"] != "namespaces":  # there the kernel ends all processes
            members.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    _report(config["status_fd"], ended=ended, code=code)


def _wait(config: dict[str, Any], members: Members, child: int, reads: int) -> tuple[str, int | None]:
    """Wait until the program ends or must be ended; return the reason and the exit code."""
    deadline = time.monotonic() + config["wall_s"]
    data = b""
    while True:
        gone = child in reap()
        with contextlib.suppress(BlockingIOError):
            data += os.read(reads, 2 * _NUMBER.size)
        numbers = [number for (number,) in _NUMBER.iter_unpack(data[: len(data) // _NUMBER.size * _NUMBER.size])]
        if gone:  # without a report of its end, the program killed its parent
            return "exited", numbers[1] if len(numbers) > 1 else -signal.SIGKILL
        if os.getppid() != config["parent"]:  # the kernel forgets PR_SET_PDEATHSIG when this process changes its fsuid
            return "stopped", None
        if time.monotonic() >= deadline:
            return "timeout", None
        if numbers:
            members.program = numbers[0]
            if (exceeded := _exceeded_limit(config, members, deadline)) is not None:
                return exceeded, None
        left = max(0.0, min(POLL_S, deadline - time.monotonic()))
        came = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, left)
        if came is not None and came.si_signo == signal.SIGTERM:
            return "stopped", None


def _exceeded_limit(config: dict[str, Any], members: Members, deadline: float) -> str | None:
    """Return the limit that a program exceeds; None if there is none."""
    pids = members.pids()
    if len(pids) > config["processes"]:  # the kernel's limit does not apply to root; to measure many takes long
        return "processes"
    used = members.usage(pids, deadline)
    if used.memory > config["memory_bytes"]:
        return "memory"
    if config["mode"] != "namespaces":
        shared = _shared_memory_of(members.uid) if isinstance(members, OfUser) else []
        if _are_full([config["folder"], *shared], config["disk_bytes"] - used.unnamed):
            return "disk"
    return None


def _shared_memory_of(uid: int) -> list[str]:
    """Return the files of a program's user in /dev/shm, the one shared folder that it may write to."""
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
    """Return whether files and folders with their content exceed the limit or cannot be counted."""
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
