"""Linux system calls that Python does not have: namespaces, mounts, Landlock and a system call filter.

The filter denies the network (except Unix sockets), namespaces, mounts, the memory of other processes, and parts of the
kernel that no computation needs. It also denies memory that the sandbox cannot count: memory outside processes, pages
lent to a pipe, buffers beyond their default size, files in memory that may be on the way between processes, and
resources that the kernel counts per user; and disk space without writing, which is faster than the sandbox counts.

Landlock restricts a process to given files (https://docs.kernel.org/userspace-api/landlock.html).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
PR_CAPBSET_DROP = 24
PR_SET_VMA = 0x53564D41
_MOUNT_SETATTR, _HERE, _RECURSIVE = 442, -100, 0x8000
_RDONLY, _NOSUID, _NODEV = 1, 2, 4
SECCOMP_MODE_FILTER = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def fork_into(namespaces: int) -> int:
    """Fork this process, which has a single thread, into new namespaces; return 0 in the child, else its id."""
    number = _MACHINES[platform.machine()].clone
    child = int(_libc.syscall(number, ctypes.c_ulong(namespaces | signal.SIGCHLD), None, None, None, None))
    _checked(min(child, 0), "clone")
    return child


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system."""
    args = [os.fsencode(text) if text is not None else None for text in (source, target, kind)]
    _checked(_libc.mount(*args, ctypes.c_ulong(flags), data.encode() if data is not None else None), f"mount {target}")


def make_read_only(point: str) -> None:
    """Make a mount and those below it read-only, without devices and without programs that change the user."""
    attributes = struct.pack("=QQQQ", _RDONLY | _NOSUID | _NODEV, 0, 0, 0)
    path, length = os.fsencode(point), ctypes.c_size_t(len(attributes))
    _checked(_libc.syscall(_MOUNT_SETATTR, _HERE, path, _RECURSIVE, attributes, length), f"mount_setattr {point}")


def sync_file_system(file: int) -> None:
    """Write what is in memory of a file's whole file system to its disk."""
    _checked(_libc.syncfs(ctypes.c_int(file)), "syncfs")


def pivot_root() -> None:
    """Make the current folder, a mount point, the root of this mount namespace; the old root stays, above it."""
    _checked(_libc.pivot_root(b".", b"."), "pivot_root")


def unmount_here() -> None:
    """Unmount the current folder, such as the root before `pivot_root`, and go to the root."""
    _checked(_libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


def remove_segment(number: int) -> None:
    """Remove a segment of System V shared memory, when no process has it any more."""
    _libc.shmctl(number, 0, None)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    _checked(
        _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)), "prctl"
    )


@contextmanager
def files_as(uid: int) -> Iterator[None]:
    """Access files, including /proc, as a user and group; all other permissions of this process stay the same.

    To inspect processes of other users, root would need a capability that plain containers do not have.
    """
    group, user = _libc.setfsgid(uid), _libc.setfsuid(uid)
    try:
        yield
    finally:
        _libc.setfsuid(user)
        _libc.setfsgid(group)


# --- Landlock ---

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG, TRUNCATE = 1, 2, 4, 8, 1 << 5, 1 << 8, 1 << 14
LOOK = EXECUTE | READ_FILE | READ_DIR
CHANGE_FILES = READ_FILE | WRITE_FILE | READ_DIR | REMOVE_FILE | MAKE_REG | TRUNCATE
EVERYTHING = (1 << 64) - 1
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | 1 << 15
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
# The rights that each version of Landlock adds.
_KNOWN = ((1, (1 << 13) - 1), (2, 1 << 13), (3, TRUNCATE), (5, 1 << 15))


def landlock_version() -> int:
    """Return the kernel's version of Landlock (since Linux 5.13); below 1 if it has none or disables it."""
    return int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def limit_files(allowed: list[tuple[str, int]]) -> None:
    """Restrict this process and its children to given files. This cannot be undone.

    Args:
        allowed: Paths and the rights to them and to everything inside. Paths that do not exist are skipped.

    Raises:
        OSError: The kernel rejects a rule.
    """
    version = landlock_version()
    handled = sum(rights for since, rights in _KNOWN if version >= since)
    attributes = struct.pack("=Q", handled)
    rules = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    _checked(0 if rules >= 0 else -1, "landlock")
    try:
        for path, rights in allowed:
            try:
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            rights &= handled if os.path.isdir(path) else handled & _OF_FILES
            rule = struct.pack("=Qi", rights, opened)
            result = _libc.syscall(_ADD_RULE, rules, 1, rule, 0)
            os.close(opened)
            _checked(result, f"landlock {path}")
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        _checked(_libc.syscall(_RESTRICT_SELF, rules, 0), "landlock")
    finally:
        os.close(rules)


# --- system call filter ---


# io_uring_setup, the new way of mounting, memfd_secret
_COMMON = (425, 428, 429, 430, 431, 432, 433, 442, 447)
# By processor: `AUDIT_ARCH_*` of linux/audit.h, and the numbers of system calls.
_MACHINES = {
    "x86_64": SimpleNamespace(
        audit=0xC000003E,
        clone=56,
        prctl=157,
        fcntl=72,
        prlimit=302,
        setsockopt=54,
        socket=41,
        socketpair=53,
        send_with_files=(46, 307),
        # mount, umount2, pivot_root, init_module, kexec_load, add_key, request_key, keyctl, unshare, perf_event_open,
        # setns, finit_module, bpf, userfaultfd, tee, vmsplice, fanotify_init, open_by_handle_at, kexec_file_load,
        # memfd_create
        denied=(165, 166, 155, 175, 246, 248, 249, 250, 272, 298) + (308, 313, 321, 323, 276, 278, 300, 304, 320, 319),
        # ptrace, process_vm_readv, process_vm_writev, shmget, msgget, semget, mq_open,
        # splice, sendfile, inotify_init1, seccomp, inotify_init, landlock_create_ruleset
        denied_outside=(101, 310, 311, 29, 68, 64, 240) + (275, 40, 294, 317, 253, 444),
        fallocate=285,
        # chown, fchown, lchown, fchownat, setuid, setgid, setreuid, setregid, setgroups, setresuid, setresgid,
        # setfsuid, setfsgid
        faked=(92, 93, 94, 260, 105, 106, 113, 114, 116, 117, 119, 122, 123),
        make_node=((133, 1), (259, 2)),
    ),
    "aarch64": SimpleNamespace(
        audit=0xC00000B7,
        clone=220,
        prctl=167,
        fcntl=25,
        prlimit=261,
        setsockopt=208,
        socket=198,
        socketpair=199,
        send_with_files=(211, 269),
        denied=(40, 39, 41, 105, 104, 217, 218, 219, 97, 241) + (268, 273, 280, 282, 77, 75, 262, 265, 294, 279),
        denied_outside=(117, 270, 271, 194, 186, 190, 180) + (76, 71, 26, 277, 444),
        fallocate=47,
        faked=(55, 54, 146, 144, 145, 143, 159, 147, 149, 151, 152),
        make_node=((33, 2),),
    ),
}
_CLONE3, _CLOSE_RANGE = 435, 436
_THREAD, _FILES, _UNSHARE, _PUNCH_HOLE = 0x10000, 0x400, 2, 2  # flags of clone, close_range and fallocate
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH = 0, 4  # offsets in struct seccomp_data
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_STREAM, _SEQPACKET, _KIND = 1, 5, 0xF
_SOL_SOCKET, _SO_SNDBUF, _SO_RCVBUF = 1, 7, 8
_F_SETLEASE, _F_SETPIPE_SZ, _F_SETDELEG = 1024, 1031, 1040
_Line = tuple[int, int, int, int]
_REFUSE: _Line = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
_NO_ACCESS: _Line = (_RETURN, 0, 0, _ERRNO | errno.EACCES)
_NO_FAMILY: _Line = (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT)
_SUCCESS: _Line = (_RETURN, 0, 0, _ERRNO)  # without doing it
_ALLOWED: _Line = (_RETURN, 0, 0, _ALLOW)


def can_filter() -> bool:
    """Return whether there is a filter for this processor."""
    return platform.machine() in _MACHINES


def filter_for_world(fake_owners: bool) -> None:
    """Deny this process and its children, which see only a world, what could harm the kernel or takes memory uncounted.

    Args:
        fake_owners: Whether to report success for changes of users and for device files, without making them. In a
            namespace with a single user they would fail, and with them most package managers.

    Raises:
        OSError: The kernel rejects the filter.
    """
    machine = _MACHINES[platform.machine()]
    # Namespaces of a network do not contain all families: AF_VSOCK reaches the host of a virtual machine.
    families = (_UNIX, _INET, _INET6, _NETLINK)
    set_buffer = (_argument(2), *_if_any(_SO_SNDBUF, _SO_RCVBUF, then=_SUCCESS))
    lines = [
        _refused(machine.denied),
        _call(machine.socket, _argument(0), *_if_none(*families, then=_NO_FAMILY)),
        _call(machine.socketpair, _argument(0), *_if_none(_UNIX, then=_NO_FAMILY)),
        # Buffers keep the size that is counted.
        _call(machine.setsockopt, _argument(1), (_EQUAL, 0, len(set_buffer), _SOL_SOCKET), *set_buffer),
    ]
    if fake_owners:
        lines.append(chain.from_iterable(((_EQUAL, 0, 1, number), _SUCCESS) for number in machine.faked))
        for number, argument in machine.make_node:
            kind = (_argument(argument), (_AND, 0, 0, 0o170000))
            lines.append(_call(number, *kind, *_if_any(0o020000, 0o060000, then=_SUCCESS)))
    _install(machine, chain.from_iterable(lines))


def filter_outside_worlds() -> None:
    """Deny this process and its children, which share namespaces with the machine, the network and other processes.

    They have no sockets except connected pairs, which reach no other process, and no way to hide them or memory from
    those who count it.

    Raises:
        OSError: The kernel rejects the filter.
    """
    machine = _MACHINES[platform.machine()]
    is_unix = (_argument(0), *_if_none(_UNIX, then=_NO_ACCESS))
    is_connected = (_argument(1), (_AND, 0, 0, _KIND), *_if_none(_STREAM, _SEQPACKET, then=_NO_ACCESS))
    lines = [
        _refused((*machine.denied, *machine.denied_outside, *machine.send_with_files)),
        _call(machine.setsockopt, _argument(2), *_if_any(_SO_SNDBUF, then=_REFUSE)),
        # The first two hide a process and its shared memory from the watcher, the last takes memory.
        _call(machine.prctl, _argument(0), *_if_any(PR_SET_DUMPABLE, PR_SET_VMA, PR_SET_SECCOMP, then=_REFUSE)),
        _call(machine.socket, _NO_ACCESS),
        _call(machine.socketpair, *is_unix, *is_connected),
    ]
    _install(machine, chain.from_iterable(lines))


def _install(machine: SimpleNamespace, lines: Iterable[_Line]) -> None:
    """Filter the system calls of this process and its children. This cannot be undone."""
    namespaces = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
    code: list[_Line] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        # The x32 numbers of x86_64 would bypass the filter.
        *([(_AT_LEAST, 0, 1, 0x40000000), _REFUSE] if machine.audit == 0xC000003E else ()),
        (_EQUAL, 0, 1, _CLONE3),  # its flags are invisible to a filter; the C library falls back to clone
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        *_call(
            machine.clone,
            _argument(0),
            (_ANY_BIT, 0, 1, namespaces),
            _REFUSE,
            # Open files are counted in one thread of a process, so threads must share them.
            (_ANY_BIT, 0, 2, _THREAD),
            (_ANY_BIT, 1, 0, _FILES),
            _REFUSE,
        ),
        *_call(_CLOSE_RANGE, _argument(2), (_ANY_BIT, 0, 1, _UNSHARE), _REFUSE),
        *_call(machine.fallocate, _argument(1), (_ANY_BIT, 1, 0, _PUNCH_HOLE), (_RETURN, 0, 0, _ERRNO | errno.ENOTSUP)),
        # With a lease, who opens the file for the owner would wait for a minute.
        *_call(machine.fcntl, _argument(1), *_if_any(_F_SETPIPE_SZ, _F_SETLEASE, _F_SETDELEG, then=_REFUSE)),
        # Of another process, such as the one that watches.
        *_call(machine.prlimit, _argument(0), *_if_none(0, then=_REFUSE)),
        *lines,
        _ALLOWED,
    ]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    # struct sock_fprog: a length, padding, a pointer
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(filters)))
    result = _libc.prctl(
        PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(program), ctypes.c_ulong(0), ctypes.c_ulong(0)
    )
    _checked(result, "seccomp")


def _refused(numbers: Iterable[int]) -> Iterable[_Line]:
    return chain.from_iterable(((_EQUAL, 0, 1, number), _REFUSE) for number in (*numbers, *_COMMON))


def _argument(n: int) -> _Line:
    return (_LOAD, 0, 0, 16 + 8 * n)  # the low half: all arguments that the filter checks have 32 bits


def _if_none(*values: int, then: _Line) -> list[_Line]:
    """Return the lines that end with `then` if the loaded argument is none of these values, and skip it otherwise."""
    return [*((_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)), then]


def _if_any(*values: int, then: _Line) -> list[_Line]:
    """Return the lines that end with `then` if the loaded argument is one of these values, and skip it otherwise."""
    *others, last = values
    return [*_if_none(*others, then=(_EQUAL, 0, 1, last)), then]


def _call(number: int, *lines: _Line) -> list[_Line]:
    """Return the lines for one system call, which is allowed after them."""
    return [(_EQUAL, 0, len(lines) + 1, number), *lines, _ALLOWED]
