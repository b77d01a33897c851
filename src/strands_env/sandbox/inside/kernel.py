"""The system calls of the sandbox that Python does not have: namespaces, mounts, and a filter on system calls (Linux).

The filter keeps a program from the network (sockets of its own machine aside), from namespaces, mounts, other
processes' memory, memory that is no process's (it would be held without being counted, and some of it outlives all
processes), and parts of the kernel that no computation needs.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from dataclasses import dataclass

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MS_NOATIME, MS_NODIRATIME, MS_RELATIME = 1024, 2048, 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_MODE_FILTER = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Leave the namespaces named by flags for new ones."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system."""
    args = [text.encode() if text is not None else None for text in (source, target, kind)]
    options = data.encode() if data is not None else None
    _checked(_libc.mount(*args, ctypes.c_ulong(flags), options), f"mount {target}")


def use_as_root(folder: str) -> None:
    """Make a mount point the root of this process's mount namespace, and take the old root out of it."""
    os.chdir(folder)
    _checked(_libc.pivot_root(b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    _checked(
        _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)), "prctl"
    )


@dataclass(frozen=True)
class _Machine:
    """Numbers of a processor: `AUDIT_ARCH_*` of linux/audit.h, and its system calls."""

    audit: int
    socket: int
    clone: int
    denied: tuple[int, ...]


_COMMON = (425, 428, 429, 430, 431, 432, 433, 442, 447)  # io_uring_setup, the new way of mounting, memfd_secret
_MACHINES = {
    "x86_64": _Machine(
        audit=0xC000003E,
        socket=41,
        clone=56,
        # ptrace, mount, umount2, pivot_root, init_module, kexec_load, add_key, request_key, keyctl, unshare,
        # perf_event_open, setns, process_vm_readv, process_vm_writev, finit_module, bpf, userfaultfd,
        # memfd_create, shmget, msgget, semget, mq_open
        denied=(101, 165, 166, 155, 175, 246, 248, 249, 250, 272, 298, 308, 310, 311, 313, 321, 323)
        + (319, 29, 68, 64, 240),
    ),
    "aarch64": _Machine(
        audit=0xC00000B7,
        socket=198,
        clone=220,
        denied=(117, 40, 39, 41, 105, 104, 217, 218, 219, 97, 241, 268, 270, 271, 273, 280, 282)
        + (279, 194, 186, 190, 180),
    ),
}
_CLONE3 = 435
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; the low half of the argument
_UNIX = 1


def can_filter() -> bool:
    """Whether there is a filter for this machine."""
    return platform.machine() in _MACHINES


def filter_system_calls() -> None:
    """Keep this process, and all that it starts, from the network and from the kernel's tools. Cannot be undone.

    Raises:
        OSError: The kernel does not take it.
    """
    machine = _MACHINES[platform.machine()]
    namespaces = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    code = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine.audit == 0xC000003E:
        code += [(_AT_LEAST, 0, 1, 0x40000000), refuse]  # the x32 numbers would be a way around
    for number in (*machine.denied, *_COMMON):
        code += [(_EQUAL, 0, 1, number), refuse]
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]  # its flags cannot be seen; C falls back
    code += [
        (_EQUAL, 0, 4, machine.clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, namespaces),
        refuse,
        (_RETURN, 0, 0, _ALLOW),
    ]
    code += [
        (_EQUAL, 0, 4, machine.socket),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, _UNIX),
        (_RETURN, 0, 0, _ERRNO | errno.EACCES),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code.append((_RETURN, 0, 0, _ALLOW))
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    # struct sock_fprog: a length, padding, a pointer
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(filters)))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    result = _libc.prctl(
        PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(program), ctypes.c_ulong(0), ctypes.c_ulong(0)
    )
    _checked(result, "seccomp")
