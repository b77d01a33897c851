"""The files that programs see.

In a world, they are an overlay of layers, and without an image the system's programs and libraries, read-only. In mode
`uid`, the latter are the only files of the machine that a program may open.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tarfile
from collections.abc import Iterable
from typing import Any

from . import kernel

# Not all of /usr: /usr/src and other folders may contain programs of the owner.
SYSTEM = (
    *(f"/usr/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec", "share")),
    *(f"/usr/local/{name}" for name in ("bin", "lib", "lib64")),
    *(f"/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32")),
    *(f"/etc/{name}" for name in ("ld.so.cache", "localtime", "alternatives", "mime.types", "nsswitch.conf")),
)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FOLDERS = ("proc", "dev", "tmp", "etc", "run", "root", "var/tmp")
FOR_ALL_USERS = ("/tmp", "/var/tmp")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
SHARED_MEMORY = "/dev/shm"
BYTES_PER_FILE = 4096


def open_shown(paths: Iterable[str]) -> list[tuple[str, int]]:
    """Open files and folders of the machine that a world shows, while this process may still read them."""
    return [(path, os.open(path, os.O_PATH)) for path in (*_without_nested(paths), *DEVICES)]


def build(config: dict[str, Any], shown: list[tuple[str, int]]) -> int:
    """Build the root of a world and enter it; return a descriptor of its layer, which lies outside.

    The root is an overlay of layers, each a folder `NAME/u` in the current folder. Nothing is followed or made below it
    before it is the root, for a link in an image would lead to the machine's files. Its lowest layer is in memory and
    has what each world needs, so that none of it is made and removed on the disk.

    Raises:
        OSError: The kernel refuses a step. The message names it.
    """
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    layer = config["layers"][0]
    root = f"{layer}/r"
    upper = os.open(f"{layer}/u", os.O_RDONLY | os.O_DIRECTORY)
    kernel.mount("tmpfs", root, "tmpfs", 0, "mode=755")
    for name in FOLDERS:
        os.makedirs(f"{root}/{name}")
    for name in FOR_ALL_USERS:
        os.chmod(root + name, 0o1777)
    for path, opened in shown:
        _make_point(root + path, opened)
    for path, text in config["files"].items():
        _replace(root + path, text)
    lower = ":".join([*(f"{name}/u" for name in config["layers"][1:]), root])
    # Without `volatile`, each copy of a file to the own layer and each unmount waits for the disk. With `xino=on`, all
    # files have the same device, although their layers have not.
    options = f"lowerdir={lower},upperdir={layer}/u,workdir={layer}/w,userxattr,volatile,xino=on"
    kernel.mount("overlay", root, "overlay", 0, options)
    os.chdir(root)
    kernel.pivot_root()
    # Before a snapshot, programs may have put anything at these paths: the world starts anyway.
    for name in (*FOLDERS, config["working_dir"]):
        with contextlib.suppress(OSError):
            os.makedirs(f"/{name}", exist_ok=True)
    # While the old root is mounted, the kernel allows another /proc, and to bind from it.
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.mount("tmpfs", "/dev", "tmpfs", kernel.MS_NOSUID, "mode=755,size=64k,nr_inodes=128")
    for name in ("pts", "shm"):
        os.mkdir(f"/dev/{name}")
    kernel.mount("devpts", "/dev/pts", "devpts", kernel.MS_NOSUID, "newinstance,ptmxmode=0666,mode=0620")
    mount_shared_memory(config["limits"]["memory_bytes"])
    for name, target in LINKS.items():
        os.symlink(target, f"/dev/{name}")
    for path, opened in shown:
        _bind(path, opened)
    kernel.unmount_here()  # the old root
    for folder in FOR_ALL_USERS:
        with contextlib.suppress(OSError):  # also an image's folder of a user that this machine has not
            if stat.S_IMODE(os.stat(folder).st_mode) != 0o1777:
                os.chmod(folder, 0o1777)
    if config["layers"][1:]:  # which may have another one
        with contextlib.suppress(OSError):
            _replace("/etc/resolv.conf", config["files"]["/etc/resolv.conf"])
            # Builders that mount their own leave an empty one.
            if os.path.exists("/etc/hosts") and not os.path.getsize("/etc/hosts"):
                _replace("/etc/hosts", config["files"]["/etc/hosts"])
    return upper


def mount_shared_memory(size: int) -> None:
    """Mount a folder whose files are memory."""
    options = f"mode=1777,size={size},nr_inodes={most_files(size)}"
    kernel.mount("tmpfs", SHARED_MEMORY, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)


def _without_nested(paths: Iterable[str]) -> list[str]:
    """Return the paths that exist, without those inside others."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if os.path.exists(path)}, key=len):
        if not any(path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept


def _make_point(path: str, opened: int) -> None:
    """Make a folder or a file, if there is none, on which to mount another one."""
    if os.path.isdir(f"/proc/self/fd/{opened}"):
        os.makedirs(path, exist_ok=True)
    elif not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def _bind(path: str, opened: int) -> None:
    _make_point(path, opened)
    source = f"/proc/self/fd/{opened}"
    kernel.mount(source, path, None, kernel.MS_BIND | kernel.MS_REC)
    if path not in DEVICES:
        kernel.make_read_only(path)
    os.close(opened)


def _replace(path: str, text: str) -> None:
    """Write a file of the world, which an image may have as a link to nothing."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with open(path, "w") as file:
        file.write(text)


def protect_settings() -> None:
    """Make the kernel's settings read-only."""
    kernel.mount("/proc/sys", "/proc/sys", None, kernel.MS_BIND)
    kernel.make_read_only("/proc/sys")


def copy_layer(source: int, target: int) -> None:
    """Copy a layer with owners, permissions, links and the marks of an overlay; `source` and `target` are folders.

    Only by descriptors: programs that still run may replace a folder by a link.
    """
    first_names: dict[int, str] = {}  # of files with several
    for path, inner, names, opened in os.fwalk(".", dir_fd=source):
        into = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=target)
        for name in (*inner, *names):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                _copy_entry(name, opened, into, first_names, f"{path}/{name}", target)
        _copy_attributes(opened, into)
        os.close(into)


def pack_layer(source: int, archive: tarfile.TarFile) -> None:
    """Pack a layer as one of an image; `source` is its folder. See `copy_layer` for why only by descriptors.

    What other file systems cover is left out: every world mounts its own there.
    """
    with open("/proc/self/mountinfo") as mounts:
        covered = {f".{line.split()[4]}" for line in mounts}
    for folder, inner, names, opened in os.fwalk(".", dir_fd=source):
        if "user.overlay.opaque" in os.listxattr(opened):
            archive.addfile(tarfile.TarInfo(f"{folder}/.wh..wh..opq"))
        for name in (*inner, *names):
            if f"{folder}/{name}" in covered:
                continue
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                _pack_entry(name, opened, f"{folder}/{name}", archive)


def _pack_entry(name: str, folder: int, path: str, archive: tarfile.TarFile) -> None:
    state = os.stat(name, dir_fd=folder, follow_symlinks=False)
    member = tarfile.TarInfo(path)
    if stat.S_ISREG(state.st_mode):
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder), "rb") as file:
            member = archive.gettarinfo(arcname=path, fileobj=file)
            archive.addfile(member, file if member.isreg() else None)
        return
    if stat.S_ISCHR(state.st_mode) and state.st_rdev == 0:  # the mark of a removed file
        archive.addfile(tarfile.TarInfo(os.path.join(os.path.dirname(path), f".wh.{name}")))
        return
    member.uid, member.gid, member.mtime = state.st_uid, state.st_gid, state.st_mtime
    member.mode = stat.S_IMODE(state.st_mode)
    if stat.S_ISDIR(state.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(state.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder)
    elif stat.S_ISFIFO(state.st_mode):
        member.type = tarfile.FIFOTYPE
    else:  # a socket has no use without its program
        return
    archive.addfile(member)


def _copy_entry(name: str, source: int, into: int, first_names: dict[int, str], path: str, target: int) -> None:
    state = os.stat(name, dir_fd=source, follow_symlinks=False)
    if stat.S_ISDIR(state.st_mode):
        os.mkdir(name, 0o700, dir_fd=into)
    elif stat.S_ISLNK(state.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=into)
        os.chown(name, state.st_uid, state.st_gid, dir_fd=into, follow_symlinks=False)
    elif not stat.S_ISREG(state.st_mode):
        os.mknod(name, state.st_mode, state.st_rdev, dir_fd=into)
        os.chown(name, state.st_uid, state.st_gid, dir_fd=into, follow_symlinks=False)
    elif state.st_nlink > 1 and state.st_ino in first_names:
        os.link(first_names[state.st_ino], name, src_dir_fd=target, dst_dir_fd=into, follow_symlinks=False)
    else:
        first_names[state.st_ino] = path
        _copy_file(name, source, into)


def _copy_file(name: str, source: int, into: int) -> None:
    reads = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=source)
    writes = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=into)
    while os.sendfile(writes, reads, None, 1 << 30):
        pass
    _copy_attributes(reads, writes)
    os.close(reads)
    os.close(writes)


def _copy_attributes(source: int, target: int) -> None:
    state = os.fstat(source)
    os.fchown(target, state.st_uid, state.st_gid)
    os.fchmod(target, stat.S_IMODE(state.st_mode))
    for name in os.listxattr(source):
        with contextlib.suppress(OSError):  # of another security module
            os.setxattr(target, name, os.getxattr(source, name))
    os.utime(target, ns=(state.st_atime_ns, state.st_mtime_ns))


def limit(shown: list[str], folder: str) -> None:
    """Restrict this process to the files that it needs; this cannot be undone."""
    kernel.limit_files(
        [
            *((path, kernel.LOOK) for path in (*shown, "/proc", "/etc/passwd", "/etc/group")),
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
        import subprocess  # and with it `threading`, which makes each fork of a world's processes slower

        for command in (["chmod", "-R", "u+rwx", path], ["rm", "-rf", "--", path]):
            with contextlib.suppress(OSError):
                subprocess.run(command, capture_output=True, env={"PATH": "/usr/bin:/bin"})
