"""The files that a program sees: Python and the system's libraries, read-only, and one small folder.

In mode `namespaces`, they are a separate file system in memory, which disappears with the last process of the
namespace. In mode `uid`, they are the only files of the machine that the program may open.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from typing import Any

from . import kernel

# Possible places to build the new root, which is invisible outside the namespace.
PLACES = ("/tmp", "/var/tmp", "/mnt", "/srv")
# Not all of /usr: /usr/src and other folders may contain programs of the owner.
SYSTEM = (
    *(f"/usr/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec", "share")),
    *(f"/usr/local/{name}" for name in ("bin", "lib", "lib64")),
    *(f"/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32")),
    *(f"/etc/{name}" for name in ("ld.so.cache", "localtime", "alternatives", "mime.types", "nsswitch.conf")),
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SHARED_MEMORY = "/dev/shm"
BYTES_PER_FILE = 4096


def build(config: dict[str, Any], uid: int, gid: int) -> None:
    """Build the new root and enter it; the current folder is then an empty /tmp."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    root = next(place for place in PLACES if os.path.isdir(place))
    shown: list[str] = []  # existing paths, without those inside others
    existing = {os.path.normpath(path) for path in (*SYSTEM, *config["visible"]) if os.path.exists(path)}
    for path in sorted(existing, key=len):
        if not any(path.startswith(f"{other}/") for other in shown):
            shown.append(path)
    sources = [(path, os.open(path, os.O_PATH)) for path in (*shown, *DEVICES)]
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,nr_inodes=4096,mode=755")
    for name in ("etc", "tmp", "proc", "dev/shm"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    size = config["disk_bytes"]
    space = f"size={size},nr_inodes={most_files(size)},mode=700,uid={uid},gid={gid}"
    kernel.mount("tmpfs", f"{root}/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, space)
    for path, opened in sources:  # after /tmp is mounted: a path may be inside it
        source, target = f"/proc/self/fd/{opened}", root + path
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
        os.close(opened)
    _make_read_only(root)
    with open(f"{root}/etc/passwd", "w") as accounts:
        accounts.write(f"sandbox:x:{uid}:{gid}::/tmp:/bin/sh\n")
    kernel.mount("proc", f"{root}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    os.mkdir(f"{root}/tmp/.shm", 0o700)
    os.chown(f"{root}/tmp/.shm", uid, gid)
    kernel.mount(f"{root}/tmp/.shm", f"{root}/dev/shm", None, kernel.MS_BIND)  # shared memory counts as disk space
    kernel.use_as_root(root)
    read_only = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount(None, "/", None, read_only)
    os.chdir("/tmp")


def limit(config: dict[str, Any], folder: str) -> None:
    """Restrict this process to the files that it needs; this cannot be undone."""
    kernel.limit_files(
        [
            *((path, kernel.LOOK) for path in (*SYSTEM, *config["visible"], "/proc", "/etc/passwd", "/etc/group")),
            *((path, kernel.READ_FILE | kernel.WRITE_FILE) for path in DEVICES),
            (SHARED_MEMORY, kernel.CHANGE_FILES),
            (folder, kernel.EVERYTHING),
        ]
    )


def most_files(size: int) -> int:
    """Return the limit on files and folders for a limit on bytes."""
    return max(1024, size // BYTES_PER_FILE)


def remove(path: str) -> None:
    """Remove files of a program, even without permissions or nested deeper than Python recurses."""
    with contextlib.suppress(OSError, RecursionError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    if os.path.lexists(path):
        for command in (["chmod", "-R", "u+rwx", path], ["rm", "-rf", "--", path]):
            with contextlib.suppress(OSError):
                subprocess.run(command, capture_output=True, env={"PATH": "/usr/bin:/bin"})


def _make_read_only(root: str) -> None:
    """Make all mounts under the new root read-only, including nested mounts."""
    with open("/proc/self/mountinfo", "rb") as table:
        mounts = [(int(fields[0]), fields[4]) for fields in map(bytes.split, table)]
    for number, field in mounts:
        # Characters that would end a field are written as octal numbers.
        point = os.fsdecode(re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), field))
        if not point.startswith(f"{root}/") or point == f"{root}/tmp" or point.startswith(f"{root}/dev/"):
            continue
        try:
            opened = os.open(point, os.O_PATH | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            continue  # below another mount, such as the new root
        if kernel.mount_of(opened) == number:  # not below another mount that has the same path
            # Flags that a mount has from its owner (no device files, ...) cannot be cleared by others.
            flags = os.fstatvfs(opened).f_flag
            kept = flags & (kernel.MS_NODEV | kernel.MS_NOEXEC | kernel.MS_NOATIME | kernel.MS_NODIRATIME)
            kept |= kernel.MS_RELATIME if flags & 4096 else 0
            change = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kept
            kernel.mount(None, f"/proc/self/fd/{opened}", None, change)
        os.close(opened)
