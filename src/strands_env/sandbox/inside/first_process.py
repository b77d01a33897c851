"""The first process of a world: enters the namespaces, builds the root, runs programs, and keeps their limits.

It is a Python process that has imported all it needs before it enters the root, so it needs nothing of the image. It
serves requests over the control socket: `execute`, `stop`, and those of `OPERATIONS`. When it ends, the kernel ends all
processes of the world. It ends when the socket closes or its owner is gone.

Each program has its own parent, which adopts orphans, so that ending the program ends its whole tree, even what left
its session. Programs in the background of one that exited by itself become children of the first process, and live on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import select
import shutil
import signal
import socket
import stat
import struct
import tarfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from . import file_system, kernel
from .members import BUFFER_BYTES, Members, OfNamespace, limit_resources, tree_of
from .messages import receive, send, unchanged

with contextlib.suppress(ImportError):  # `tarfile` imports them when it needs them, which in a world is too late
    import bz2  # noqa: F401
    import lzma  # noqa: F401

POLL_S = 0.05
BACKGROUND_POLL_S = 0.5
ROUNDS = 50  # most attempts to end a tree of processes
CHUNK = 1 << 20
MOST_DESCRIPTORS = 1 << 16
ENTRIES_PER_CHECK = 20_000
INODE_BYTES = 1024  # of a file in memory, apart from its content
# What Docker leaves to root, but CAP_NET_RAW, whose buffers are not counted: no CAP_SYS_ADMIN, CAP_NET_ADMIN, ...
CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 27, 29, 31})
LAST_CAPABILITY = 63


def start(
    kind: type[FirstProcess],
    config: dict[str, Any],
    control: socket.socket,
    owner: int,
    layers: int,
    starter: socket.socket,
) -> None:
    """Fork the first process of a world; the owner receives a descriptor of it, or why there is none."""
    ours, theirs = socket.socketpair()
    try:
        if not kernel.can_filter():
            raise OSError("there is no system call filter for this processor")
        os.fchdir(layers)  # the kernel finds the current folder again in new namespaces, but no other descriptor
        first = kernel.fork_into(kind.namespaces(config))
        if first == 0:
            try:
                for each in (ours, starter):
                    each.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                process = kind(config, control, owner, theirs)
                try:
                    process.serve()
                finally:
                    process.close()
            except OSError as error:
                send(control, {"refused": str(error)})
            finally:
                os._exit(1)
        theirs.close()
        kind.admit(first, config, ours)
        send(control, {"process": True}, [os.pidfd_open(first)])
        ours.send(b"+")
    except OSError as error:
        with contextlib.suppress(OSError):  # no one waits for it any more; other worlds need this process
            send(control, {"refused": str(error)})
    finally:
        ours.close()
        theirs.close()
        os.chdir("/")  # this process keeps no folder from being unmounted


def _connect(pid: int, connector: str, until: int) -> None:
    """Connect the network of a process to that of this one, until the other end of a socket is closed."""
    ready_reads, ready_writes = os.pipe()
    if os.fork() == 0:
        for file in (until, ready_writes):
            os.set_inheritable(file, True)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        options = ("--configure", "--mtu=65520", "--disable-host-loopback", "--enable-sandbox", "--enable-seccomp")
        files = (f"--exit-fd={until}", f"--ready-fd={ready_writes}", f"--userns-path=/proc/{pid}/ns/user")
        os.execv(connector, [connector, *options, *files, str(pid), "tap0"])
    os.close(ready_writes)
    if not os.read(ready_reads, 1):
        raise OSError(errno.EPERM, "slirp4netns makes no network")


def _map_users(pid: int, users: list[int]) -> None:
    if len(users) == 1:  # without privileges, only this process' own user, and no groups
        _write(f"/proc/{pid}/setgroups", "deny")
        _write(f"/proc/{pid}/uid_map", f"0 {os.geteuid()} 1")
        _write(f"/proc/{pid}/gid_map", f"0 {os.getegid()} 1")
        return
    first, count = users
    for kind in ("uid", "gid"):
        _write(f"/proc/{pid}/{kind}_map", f"0 {first} {count // 2}")


@dataclass
class Running:
    """A program or a file operation: its number, its process, when it must end, which, and which limit it exceeded."""

    number: int
    pid: int
    pidfd: int
    deadline: float
    is_program: bool
    ended: str | None = None


class FirstProcess:
    """Serves the requests of a world's owner."""

    def __init__(self, config: dict[str, Any], control: socket.socket, owner: int, starter: socket.socket) -> None:
        """Enter the world, when the other end of the socket `starter` says that its users are there."""
        self._config = config
        self._limits = config["limits"]
        self._control = control
        self._owner = owner
        os.umask(0o022)
        self._starter = starter  # whose other end a network may have
        if not starter.recv(1):
            os._exit(1)
        upper, self._members = self._enter()
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        self._disk = Disk(upper, self._limits["disk_bytes"])
        self._running: dict[int, Running] = {}
        self._next_check = 0.0
        self._in_background = False
        self._events = select.poll()
        self._events.register(control, select.POLLIN)
        self._events.register(owner, select.POLLIN)

    @staticmethod
    def namespaces(config: dict[str, Any]) -> int:
        """Return the kinds of namespaces that the process is forked into."""
        kinds = kernel.NEWUSER | kernel.NEWNS | kernel.NEWPID | kernel.NEWIPC | kernel.NEWUTS
        return kinds if config["network"] == "host" else kinds | kernel.NEWNET

    @staticmethod
    def admit(pid: int, config: dict[str, Any], until: socket.socket) -> None:
        """Give the process what only one outside of its namespaces may: users, and a network."""
        _map_users(pid, config["users"])
        if config["connector"] is not None:
            _connect(pid, config["connector"], until.fileno())

    def _enter(self) -> tuple[int, Members]:
        """Enter the root; return a descriptor of the world's own layer, and what finds its processes."""
        shown = file_system.open_shown(self._config["shown"])
        if len(self._config["users"]) > 1:
            os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        socket.sethostname("world")
        if self._config["network"] != "host":
            _loopback_up()
        upper = file_system.build(self._config, shown)
        # Otherwise those of TCP grow beyond what is counted.
        buffers = [(f"net/ipv4/tcp_{kind}mem", f"4096 16384 {BUFFER_BYTES}") for kind in "rw"]
        for name, value in (
            *(buffers if self._config["network"] != "host" else ()),
            ("user/max_user_namespaces", 0),  # nested, they would give all capabilities back
            ("kernel/shmall", self._limits["memory_bytes"] >> 12),
            ("kernel/msgmni", 32),
            ("kernel/sem", "32 1024 32 32"),
            ("user/max_inotify_instances", 64),  # which the kernel also counts for the owner
        ):
            _write(f"/proc/sys/{name}", str(value))
        file_system.protect_settings()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # programs may not look into this process
        return upper, OfNamespace(file_system.SHARED_MEMORY, has_network=self._config["network"] != "host")

    def close(self) -> None:
        """End all programs; those of a namespace end with its first process."""

    def serve(self) -> None:
        """Serve requests until the owner is gone."""
        send(self._control, {"ready": True})
        while True:
            ready = dict(self._events.poll(self._pause_ms()))
            if self._owner in ready:
                return
            if self._control.fileno() in ready:
                request, files = receive(self._control)
                if request is None:
                    return
                self._take(request, files)
            self._collect()
            if (self._running or self._in_background) and time.monotonic() >= self._next_check:
                self._check()

    def _pause_ms(self) -> float | None:
        if not self._running and not self._in_background:
            return None
        deadlines = [program.deadline for program in self._running.values()]
        return max(0.0, min([self._next_check, *deadlines]) - time.monotonic()) * 1000

    def _take(self, request: dict[str, Any], files: list[int]) -> None:
        if request["do"] == "stop":
            for program in list(self._running.values()):
                if program.number == request["number"]:
                    self._end(program, "stopped")
            return
        pid = os.fork()
        if pid == 0:
            if request["do"] in ("copy", "pack_layer"):
                files.append(self._disk.upper)
            only_these(files)
            if request["path"] is not None:  # not by chdir: a program may have removed the working folder
                request["path"] = os.path.join(self._config["working_dir"], request["path"])
            if request["do"] == "execute":
                self._parent(request, len(files))
            request["is_only_user"] = len(self._config["users"]) == 1
            _file_operation(request, self._leave_machine)
        for file in files:
            os.close(file)
        deadline = time.monotonic() + request["timeout_s"]
        started = Running(request["number"], pid, os.pidfd_open(pid), deadline, request["do"] == "execute")
        self._running[pid] = started
        self._events.register(started.pidfd, select.POLLIN)
        self._disk.allow_what_is_there()
        self._next_check = time.monotonic() + POLL_S

    def _collect(self) -> None:
        """Collect ended processes, and report programs that ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
                if pid == 0:
                    break
                if os.WIFSTOPPED(status):
                    stopped = self._running.get(pid)
                    if stopped is not None and not stopped.is_program:  # resumed, it could be stopped again
                        os.kill(pid, signal.SIGKILL)
                    continue
                ended = self._running.pop(pid, None)
                if ended is None:
                    continue
                self._in_background = True  # until the next check
                self._events.unregister(ended.pidfd)
                os.close(ended.pidfd)
                code = os.waitstatus_to_exitcode(status)
                send(self._control, {"number": ended.number, "ended": ended.ended or "exited", "code": code})

    def _check(self) -> None:
        """End what exceeds a limit."""
        now = time.monotonic()
        for program in list(self._running.values()):
            if now >= program.deadline:
                self._end(program, "timeout")
        pids = self._members.pids()
        ours = {program.pid for program in self._running.values()}
        programs = [pid for pid in pids if pid not in ours]
        self._in_background = bool(programs)
        exceeded = self._exceeded_limit(programs)
        if exceeded is not None:
            for program in self._running.values():
                program.ended = exceeded
            self._end_all()
            if exceeded == "memory":
                self._empty_memory()
        self._next_check = time.monotonic() + (POLL_S if self._running else BACKGROUND_POLL_S)

    def _exceeded_limit(self, pids: list[int]) -> str | None:
        if len(pids) > self._limits["processes"]:
            return "processes"
        elsewhere = self._elsewhere()
        used = self._members.usage(pids, time.monotonic() + 1.0, elsewhere.size)
        if used.threads > self._limits["processes"]:
            return "processes"
        if used.memory > self._limits["memory_bytes"]:
            return "memory"
        return "disk" if self._disk.is_full(Space(used.unnamed, elsewhere.files)) else None

    def _end(self, program: Running, why: str) -> None:
        """End a program with its whole tree."""
        program.ended = program.ended or why
        with contextlib.suppress(ProcessLookupError):
            os.kill(program.pid, signal.SIGSTOP)  # otherwise orphans would leave it
            for _ in range(ROUNDS):
                left = tree_of(program.pid)
                if not left:
                    break
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            else:  # it forks faster than that
                self._end_all()
            os.kill(program.pid, signal.SIGKILL)

    def _end_all(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # at once: a fork bomb is faster than a loop over its processes

    def _elsewhere(self) -> Space:
        """Return the size and the number of the programs' files in memory."""
        state = os.statvfs(file_system.SHARED_MEMORY)
        files = state.f_files - state.f_ffree
        return Space((state.f_blocks - state.f_bfree) * state.f_frsize + files * INODE_BYTES, 0)

    def _empty_memory(self) -> None:
        """Remove what is in memory without a program, with which later ones would also exceed the limit."""
        with open("/proc/sysvipc/shm") as segments:
            for line in itertools.islice(segments, 1, None):
                kernel.remove_segment(int(line.split()[1]))
        os.chdir(file_system.SHARED_MEMORY)
        kernel.unmount_here()
        file_system.mount_shared_memory(self._limits["memory_bytes"])

    # --- programs ---

    def _parent(self, request: dict[str, Any], files: int) -> NoReturn:
        """Start a program, adopt its orphans, and exit as it does."""
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        program = os.fork()
        if program == 0:
            try:
                self._become_program(request)
            except (OSError, ValueError, LookupError) as error:
                os.write(2, f"{error}\n".encode())
            finally:
                os._exit(126)
        os.closerange(0, files)
        pid, status = os.wait()
        while pid != program:
            pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code if code >= 0 else signal.SIGKILL)

    def _become_program(self, request: dict[str, Any]) -> NoReturn:
        for number in range(3):
            os.set_inheritable(number, True)
        os.setsid()
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            _write("/proc/self/oom_score_adj", "1000")  # if memory runs out, the kernel ends this process first
        if request["path"] is not None:
            self._leave_machine()
            _write_file(request)
        home = self._confine(request)
        watchers = len(self._running) + 2 if os.getuid() == 0 else 0  # the kernel counts them with root's programs
        limit_resources({**self._limits, "processes": self._limits["processes"] + watchers})
        os.chdir(request["folder"] or self._config["working_dir"])
        environment = {"PATH": file_system.PATH, "HOME": home, "LANG": "C.UTF-8", **self._config["environment"]}
        environment.update(request["environment"])
        arguments = request["command"]
        if isinstance(arguments, str):
            shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
            arguments = [shell, "-c", arguments]
        os.execvpe(arguments[0], arguments, environment)

    def _leave_machine(self) -> None:
        """Give up access to the machine's files, before a path that programs may have changed; a namespace has none."""

    def _confine(self, request: dict[str, Any]) -> str:
        """Take away what the program must not have, and become its user; return its home folder."""
        user = find_user(request["user"])
        is_only_user = len(self._config["users"]) == 1
        kernel.filter_for_world(fake_owners=is_only_user)
        kept = CAPABILITIES if request["privileges"] else frozenset()
        for capability in range(LAST_CAPABILITY + 1):
            if capability not in kept:
                with contextlib.suppress(OSError):  # the kernel does not know it
                    kernel.prctl(kernel.PR_CAPBSET_DROP, capability)
        if not request["privileges"]:
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if not is_only_user:
            os.setgroups(user.groups)
            os.setresgid(user.gid, user.gid, user.gid)
            os.setresuid(user.uid, user.uid, user.uid)
        return user.home


@dataclass(frozen=True)
class User:
    """A user of the world."""

    uid: int
    gid: int
    home: str
    groups: list[int]


def find_user(wanted: str) -> User:
    """Return a user by name or number, as the world's own files describe it.

    Raises:
        LookupError: There is no user of that name.
    """
    name, _, group = wanted.partition(":")
    found = next((entry for entry in _entries("/etc/passwd", 7) if name in (entry[0], entry[2])), None)
    if found is not None:
        name, uid, gid, home = found[0], int(found[2]), int(found[3]), found[5]
    elif name.isdigit():
        uid, gid, home = int(name), 0, "/"
    elif name == "root":
        uid, gid, home = 0, 0, "/root"
    else:
        raise LookupError(f"the world has no user {name}")
    groups = list(_entries("/etc/group", 4))
    if group:
        gids = [int(entry[2]) for entry in groups if group == entry[0]]
        if not gids and not group.isdigit():
            raise LookupError(f"the world has no group {group}")
        gid = gids[0] if gids else int(group)
    member_of = [int(entry[2]) for entry in groups if name in entry[3].split(",")]
    return User(uid, gid, home, [gid, *member_of][:32])


def _entries(path: str, fields: int) -> Iterator[list[str]]:
    text = ""
    with contextlib.suppress(OSError):  # a program may have made it a link to a device without end, or a pipe
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(opened, "rb", buffering=0) as file:
            text = (file.read(CHUNK) or b"").decode(errors="replace")
    for line in text.split("\n"):
        entry = line.split(":")
        if len(entry) >= fields and entry[2].isdigit():
            yield entry


# --- files ---


def only_these(files: list[int]) -> None:
    """Make these descriptors 0, 1, ... of this process, and close all others.

    A path that a program chose, such as /proc/self/fd/5/.., must not lead out of the world.
    """
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, len(files)) for file in files]
    for number, copy in enumerate(copies):
        os.dup2(copy, number, inheritable=False)
    os.closerange(len(files), MOST_DESCRIPTORS)


def _file_operation(request: dict[str, Any], leave_machine: Callable[[], None]) -> NoReturn:
    """Do it with descriptor 0, and exit with 0 or with the number of the error."""
    code = errno.EIO
    try:
        leave_machine()
        OPERATIONS[request["do"]](request)
        code = 0
    except OSError as error:
        code = error.errno or errno.EIO
    except (tarfile.TarError, EOFError, zlib.error):
        code = errno.EBADMSG
    except LookupError:  # no such user
        code = errno.EINVAL
    finally:
        os._exit(code)


def _read(request: dict[str, Any]) -> None:
    opened = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would block
    state = os.fstat(opened)
    if stat.S_ISDIR(state.st_mode):
        raise IsADirectoryError(errno.EISDIR, request["path"])
    left = request["most"]
    if state.st_size > left:
        raise OSError(errno.EFBIG, request["path"])
    while chunk := os.read(opened, CHUNK):
        left -= len(chunk)
        if left < 0:
            raise OSError(errno.EFBIG, request["path"])
        _write_all(0, chunk)


def _write_file(request: dict[str, Any]) -> None:
    path = request["path"]
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, path) from None
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
    while chunk := os.read(0, CHUNK):
        _write_all(opened, chunk)


def _pack(request: dict[str, Any]) -> None:
    with os.fdopen(0, "wb") as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        # A million of them would fill the memory.
        archive.members = deque(maxlen=0)  # type: ignore[attr-defined]
        path = os.path.realpath(request["path"]) if request.get("follows") else request["path"]
        mounts = [f"{request['name']}/{name}" for name in ("dev", "proc")] if path == "/" else []
        archive.add(path, arcname=request["name"], filter=lambda member: None if member.name in mounts else member)


def _unpack(request: dict[str, Any]) -> None:
    """Unpack the file or folder `.` as the target, or a file into the target if that is a folder."""
    target = request["path"]
    owner = find_user("root" if request["is_only_user"] else request["owner"] or "root")
    is_there = os.path.isdir(target)
    folder = Path(os.path.dirname(target))
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    os.makedirs(folder, exist_ok=True)
    for each in missing:
        if os.geteuid() == 0:  # in mode `uid`, all files are of the programs' user
            os.chown(each, owner.uid, owner.gid)
    for archive, member in _members():
        if request["owner"] or request["is_only_user"]:
            member.uid, member.gid = owner.uid, owner.gid
        into = target
        if member.name == "." and member.isdir():
            if is_there:  # it stays as it is
                continue
        elif member.name == ".":
            path = os.path.join(target, request["name"]) if is_there or target.endswith("/") else target
            into, member.name = os.path.split(path)
        path = os.path.join(into, member.name)
        if os.path.lexists(path) and not member.isdir() and not _is_folder(path):
            os.unlink(path)
        archive.extract(member, into, numeric_owner=True)


def _unpack_layer(request: dict[str, Any]) -> None:
    """Unpack a layer of an image, an archive, over the layers below it.

    A file that it removes is `.wh.NAME` in the archive, and a folder that it replaces has `.wh..wh..opq`. See
    https://github.com/opencontainers/image-spec/blob/main/layer.md.
    """
    if not request["is_first"]:
        _remove_what_layer_hides()
    for archive, member in _members():
        path = os.path.normpath(f"/{member.name}")
        if os.path.basename(path).startswith(".wh."):
            continue
        if os.path.lexists(path) and not (member.isdir() and _is_folder(path)):
            _remove(path)
        if request["is_only_user"]:
            member.uid = member.gid = 0
        archive.extract(member, "/", numeric_owner=True)


def _remove_what_layer_hides() -> None:
    for _, member in _members():
        folder, name = os.path.split(os.path.normpath(f"/{member.name}"))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if name == ".wh..wh..opq":
                for each in os.listdir(folder):
                    _remove(os.path.join(folder, each))
            elif name.startswith(".wh."):
                _remove(os.path.join(folder, name[4:]))
    os.lseek(0, 0, os.SEEK_SET)


def _remove(path: str) -> None:
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _members() -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the members of the archive that descriptor 0 has, but no devices."""
    with os.fdopen(0, "rb", closefd=False) as stream, tarfile.open(fileobj=stream, mode="r|*") as archive:
        archive.extraction_filter = unchanged
        for member in archive:
            if not member.ischr() and not member.isblk():
                yield archive, member


def _copy(request: dict[str, Any]) -> None:
    """Copy the world's own layer, descriptor 1, to a folder outside, descriptor 0."""
    file_system.copy_layer(1, 0)


def _pack_layer(request: dict[str, Any]) -> None:
    """Pack the world's own layer, descriptor 1, in the form that `_unpack_layer` unpacks."""
    with os.fdopen(0, "wb") as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        file_system.pack_layer(1, archive)


OPERATIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "read": _read,
    "write": _write_file,
    "pack": _pack,
    "unpack": _unpack,
    "layer": _unpack_layer,
    "copy": _copy,
    "pack_layer": _pack_layer,
}


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


@dataclass(frozen=True)
class Space:
    """A size in bytes and a number of files."""

    size: int
    files: int

    def __add__(self, other: Space) -> Space:
        """Return the sum."""
        return Space(self.size + other.size, self.files + other.files)

    def exceeds(self, other: Space) -> bool:
        """Return whether one of the two is larger."""
        return self.size > other.size or self.files > other.files


ENDLESS = Space(1 << 62, 1 << 62)


class Disk:
    """What a world's own layer takes, measured when the file system has lost as much as the world may still take.

    Attributes:
        upper: The layer's folder, opened before the root changed.
    """

    def __init__(self, upper: int, most: int) -> None:
        """Begin with an empty layer."""
        self.upper = upper
        self._most = Space(most, file_system.most_files(most))
        self._allowed = self._most
        self._taken = Space(0, 0)
        self._free = self._free_before = self._free_now()
        self._walk: Iterator[Space] | None = None

    def allow_what_is_there(self) -> None:
        """Let a program run in a full layer, so that it can remove files; but not in one that is twice too full."""
        self._allowed = self._most
        if self._taken.exceeds(self._most):
            self._allowed = Space(2 * self._most.size, 2 * self._most.files)

    def is_full(self, elsewhere: Space) -> bool:
        """Return whether the layer takes too much, together with files that are elsewhere."""
        free = self._free_now()
        lost = Space(max(0, self._free.size - free.size), max(0, self._free.files - free.files))
        if self._walk is None:
            if not (self._taken + lost + elsewhere).exceeds(self._allowed):
                return False
            self._walk, self._free_before = _measured(self.upper), free
        found = Space(0, 0)
        for found in itertools.islice(self._walk, ENTRIES_PER_CHECK):
            if (found + elsewhere).exceeds(self._allowed):
                self._taken, self._walk = found, None
                return True
        if next(self._walk, None) is None:
            self._taken, self._free, self._walk = found, self._free_before, None
        return False

    def _free_now(self) -> Space:
        state = os.fstatvfs(self.upper)
        return Space(state.f_bfree * state.f_frsize, state.f_ffree)


def _measured(folder: int) -> Iterator[Space]:
    """Yield the size in bytes and the number of the files in a folder, each time including the next one."""
    size = files = 0
    linked = set()  # files with several names
    left = [(".", ".")]  # not whole paths: a million of the longest would fill the memory
    while left:
        path = "/".join(left.pop())
        try:
            opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # what is so deep cannot be counted
                yield ENDLESS
            continue
        with contextlib.ExitStack() as closing:  # also if no one asks for the rest
            closing.callback(os.close, opened)
            for entry in closing.enter_context(os.scandir(opened)):
                with contextlib.suppress(OSError):
                    state = entry.stat(follow_symlinks=False)
                    if state.st_ino not in linked:
                        size += state.st_blocks * 512
                    if state.st_nlink > 1 and not stat.S_ISDIR(state.st_mode):
                        linked.add(state.st_ino)
                files += 1
                if entry.is_dir(follow_symlinks=False):
                    left.append((path, entry.name))
                yield Space(size, files)


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        up_and_running = 1 | 64
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", up_and_running))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
