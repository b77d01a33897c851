"""Layers: folders whose overlay is the file system of a world.

All layers of a user are in one folder, by default in the folder for temporary files. A layer `NAME` has the files in
`NAME/u`, what the overlay needs in `NAME/w`, and a lock that everyone who uses it shares. A layer that no one holds is
removed; what a killed process left is removed when the next one starts its first world. Layers of images, named by
their content, stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import secrets
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from .inside import kernel
from .inside.file_system import remove

FOLDER_VARIABLE = "STRANDS_ENV_WORLDS"
OF_IMAGE = "i-"
HOW_MADE = 1  # another number where the same content makes other files than before
UNFINISHED_S = 60.0
SPARE_USERS = (2_000_000_000, 1 << 23)  # twice as many as there can be processes
FEW_USERS = 2_048


class Layer:
    """A layer that this process uses.

    Unless it is of an image, it is removed with the last reference to it in all processes.

    Attributes:
        name: Name of its folder.
        path: Its folder.
    """

    def __init__(self, name: str, lock: int | None = None) -> None:
        """Use a layer of an image, or hold another one by a shared lock, which this object closes."""
        self.name = name
        self.path = folder() / name
        self._release = None
        if lock is not None:
            self._release = weakref.finalize(self, _release_later, str(self.path), lock, os.getpid())

    def discard(self) -> None:
        """Let go of the layer now; if no one else holds it, it is gone afterwards."""
        if self._release is not None and (released := self._release.detach()) is not None:
            _release(*released[2])


@functools.lru_cache(maxsize=1)
def users() -> tuple[int, ...]:
    """Return the users of worlds on this machine: the first one and their number; a single one if there are no others.

    Root's worlds have users who own nothing outside, so that not even their root is a user of this machine. In a
    container, they are the upper half of what it has. The first half is for worlds in namespaces, the second for those
    without, and its last user ends programs of all the others. Others can only use themselves.
    """
    with open("/proc/self/uid_map") as lines:
        ranges = [(int(first), int(count)) for first, _, count in (line.split() for line in lines)]
    if os.geteuid() != 0:
        return (os.geteuid(),)
    if any(first <= SPARE_USERS[0] and sum(SPARE_USERS) <= first + count for first, count in ranges):
        return SPARE_USERS
    first, count = max(ranges)
    if count < FEW_USERS:
        return (0,)
    return (first + count // 2, count // 2)


def folder() -> Path:
    """Return the folder of this user's layers, which it makes if it does not exist.

    Raises:
        PermissionError: It belongs to another user, who could change what worlds see.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    path = Path(given or f"{tempfile.gettempdir()}/strands-env-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o711, parents=True)
    state = path.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise PermissionError(
            f"{path} is not a folder that only this user may change. Set {FOLDER_VARIABLE} to another folder"
        )
    return path


def new_layer() -> Layer:
    """Create an empty layer."""
    name = secrets.token_hex(4)
    path = folder() / name
    with _while_not_swept(fcntl.LOCK_SH):
        path.mkdir(0o700)
        for inner in ("u", "w", "r"):
            (path / inner).mkdir(0o755)
        lock = os.open(path / "lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
    if users()[0] != os.geteuid():
        for each in (path, path / "u", path / "w", path / "r"):
            os.chown(each, users()[0], users()[0])
    return Layer(name, lock)


def image_layer(*content: object) -> Layer:
    """Return the layer of an image that this content makes; perhaps there is none yet."""
    text = json.dumps([HOW_MADE, users(), *content])  # its files belong to them
    return Layer(OF_IMAGE + hashlib.sha256(text.encode()).hexdigest()[:20])


def keep(layer: Layer, kept: Layer) -> None:
    """Make a finished layer that of an image, unless there is one already; it is whole even if the machine stops."""
    files = os.open(layer.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for unused in ("w", "r"):
            remove(str(layer.path / unused))
        kernel.sync_file_system(files)
        layer.path.rename(kept.path)
    except OSError:
        if not kept.path.exists():
            raise
    finally:
        os.close(files)
        layer.discard()


def sweep() -> None:
    """Remove layers that no one holds, which killed processes left."""
    with _while_not_swept(fcntl.LOCK_EX):
        left = [path for path in folder().iterdir() if path.is_dir() and not path.name.startswith(OF_IMAGE)]
        free = [path for path in left if _is_free(path)]
    for path in free:
        remove(str(path))


def _is_free(path: Path) -> bool:
    try:
        lock = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        with contextlib.suppress(FileNotFoundError):  # its owner removes it now
            return time.time() - path.lstat().st_mtime > UNFINISHED_S
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


@contextlib.contextmanager
def _while_not_swept(kind: int) -> Iterator[None]:
    lock = os.open(folder() / "lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, kind)
        yield
    finally:
        os.close(lock)


def _release(path: str, lock: int, owner: int) -> None:
    """Let go of a layer, and remove it if no one else holds it. In a fork of the process, only the descriptor goes."""
    with contextlib.suppress(OSError):
        if owner == os.getpid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)
    os.close(lock)


def _release_later(path: str, lock: int, owner: int) -> None:
    try:
        threading.Thread(target=_release, args=(path, lock, owner)).start()  # an event loop must not wait for it
    except RuntimeError:  # the interpreter ends
        _release(path, lock, owner)
