"""Linux system calls that Python does not have: namespaces, mounts, Landlock and a system call filter.

The filter denies the network (except Unix sockets), namespaces, mounts, the memory of other processes, and parts of the
kernel that no computation needs. It also denies memory that the sandbox cannot count: memory outside processes, pages
lent to a pipe, buffers beyond their default size, and resources that the kernel counts per user.

Landlock restricts a process to given files (https://docs.kernel.org/userspace-api/landlock.html).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MS_NOATIME, MS_NODIRATIME, MS_RELATIME = 1024, 2048, 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
PR_SET_VMA = 0x53564D41
SECCOMP_MODE_FILTER = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Move this process to new namespaces of the kinds in `flags`."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system."""
    args = [os.fsencode(text) if text is not None else None for text in (source, target, kind)]
    _checked(_libc.mount(*args, ctypes.c_ulong(flags), data.encode() if data is not None else None), f"mount {target}")


def mount_of(opened: int) -> int:
    """Return the number in /proc/self/mountinfo of the mount that a file was opened on."""
    with open(f"/proc/self/fdinfo/{opened}") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))


def use_as_root(folder: str) -> None:
    """Make a mount point the root of this mount namespace, and unmount the old root."""
    os.chdir(folder)
    _checked(_libc.pivot_root(b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


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


# io_uring_setup, the new way of mounting, landlock_create_ruleset, memfd_secret
_COMMON = (425, 428, 429, 430, 431, 432, 433, 442, 444, 447)
# By processor: `AUDIT_ARCH_*` of linux/audit.h, and the numbers of system calls.
_MACHINES = {
    "x86_64": SimpleNamespace(
        audit=0xC000003E,
        clone=56,
        prctl=157,
        fcntl=72,
        setsockopt=54,
        socket=41,
        socketpair=53,
        send_with_files=(46, 307),
        # ptrace, mount, umount2, pivot_root, init_module, kexec_load, add_key, request_key, keyctl, unshare,
        # perf_event_open, setns, process_vm_readv, process_vm_writev, finit_module, bpf, userfaultfd,
        # memfd_create, shmget, msgget, semget, mq_open,
        # splice, tee, vmsplice, sendfile, inotify_init1, fanotify_init, seccomp, inotify_init
        denied=(101, 165, 166, 155, 175, 246, 248, 249, 250, 272, 298, 308, 310, 311, 313, 321, 323)
        + (319, 29, 68, 64, 240)
        + (275, 276, 278, 40, 294, 300, 317, 253),
    ),
    "aarch64": SimpleNamespace(
        audit=0xC00000B7,
        clone=220,
        prctl=167,
        fcntl=25,
        setsockopt=208,
        socket=198,
        socketpair=199,
        send_with_files=(211, 269),
        denied=(117, 40, 39, 41, 105, 104, 217, 218, 219, 97, 241, 268, 270, 271, 273, 280, 282)
        + (279, 194, 186, 190, 180)
        + (76, 77, 75, 71, 26, 262, 277),
    ),
}
_CLONE3 = 435
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH = 0, 4  # offsets in struct seccomp_data
_UNIX, _STREAM, _SEQPACKET, _KIND = 1, 1, 5, 0xF
_SO_SNDBUF, _F_SETPIPE_SZ = 7, 1031
_Line = tuple[int, int, int, int]
_REFUSE: _Line = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
_NO_ACCESS: _Line = (_RETURN, 0, 0, _ERRNO | errno.EACCES)
_ALLOWED: _Line = (_RETURN, 0, 0, _ALLOW)


def can_filter() -> bool:
    """Return whether there is a filter for this processor."""
    return platform.machine() in _MACHINES


def filter_system_calls(only_pairs: bool) -> None:
    """Deny this process and its children the network and other kernel features. This cannot be undone.

    Args:
        only_pairs: Whether to allow no sockets except connected pairs, which reach no other process, and no way to hide
            them from the count. For programs that share the names of Unix sockets with the machine.

    Raises:
        OSError: The kernel rejects the filter.
    """
    machine = _MACHINES[platform.machine()]
    namespaces = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
    refused = (*machine.denied, *_COMMON, *(machine.send_with_files if only_pairs else ()))
    is_unix = (_argument(0), (_EQUAL, 1, 0, _UNIX), _NO_ACCESS)
    is_connected = (_argument(1), (_AND, 0, 0, _KIND), (_EQUAL, 2, 0, _STREAM), (_EQUAL, 1, 0, _SEQPACKET), _NO_ACCESS)
    sockets = _call(machine.socket, *is_unix)
    if only_pairs:
        sockets = _call(machine.socket, _NO_ACCESS) + _call(machine.socketpair, *is_unix, *is_connected)
    code: list[_Line] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        # The x32 numbers of x86_64 would bypass the filter.
        *([(_AT_LEAST, 0, 1, 0x40000000), _REFUSE] if machine.audit == 0xC000003E else ()),
        *chain.from_iterable(((_EQUAL, 0, 1, number), _REFUSE) for number in refused),
        (_EQUAL, 0, 1, _CLONE3),  # its flags are invisible to a filter; the C library falls back to clone
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        *_call(machine.clone, _argument(0), (_ANY_BIT, 0, 1, namespaces), _REFUSE),
        *_call(machine.fcntl, _argument(1), (_EQUAL, 0, 1, _F_SETPIPE_SZ), _REFUSE),
        *_call(machine.setsockopt, _argument(2), (_EQUAL, 0, 1, _SO_SNDBUF), _REFUSE),
        # The first two hide a process and its shared memory from the watcher, the last takes memory.
        *_call(
            machine.prctl,
            _argument(0),
            (_EQUAL, 2, 0, PR_SET_DUMPABLE),
            (_EQUAL, 1, 0, PR_SET_VMA),
            (_EQUAL, 0, 1, PR_SET_SECCOMP),
            _REFUSE,
        ),
        *sockets,
        _ALLOWED,
    ]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    # struct sock_fprog: a length, padding, a pointer
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(filters)))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    result = _libc.prctl(
        PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(program), ctypes.c_ulong(0), ctypes.c_ulong(0)
    )
    _checked(result, "seccomp")


def _argument(n: int) -> _Line:
    return (_LOAD, 0, 0, 16 + 8 * n)  # the low half: all arguments that the filter checks have 32 bits


def _call(number: int, *lines: _Line) -> list[_Line]:
    """Return the lines for one system call, which is allowed after them."""
    return [(_EQUAL, 0, len(lines) + 1, number), *lines, _ALLOWED]
