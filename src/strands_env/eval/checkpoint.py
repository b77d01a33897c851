"""A file of results that grows by whole records and survives whatever ends the process.

Promises:
- `append` is done when its record is on the disk (fsync), and not before. The event loop never waits for the disk: one
  thread writes, and all records that came while it was busy share one fsync.
- Nothing that was written is written again. Only what a killed process left behind the last whole record is cut off
  when the file is opened, and a whole record that lacks just its newline gets it.
- One process at a time: the file has a lock beside it, which ends with its process.
- A record that could not be written whole (a full disk) leaves none of its bytes, and everything before it stays.
- A file that is not of this kind is never touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from filelock import FileLock, Timeout

from .json_lines import decode
from .records import RECORD_START

logger = logging.getLogger(__name__)

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where a record is: its file, and its bytes in it."""

    path: Path
    start: int
    length: int


class CheckpointError(Exception):
    """A results file cannot be used or written. What was acknowledged before is on the disk."""


class CheckpointFile:
    """An append-only file of JSON records. Use it from one event loop.

    Example:
        file = CheckpointFile(path)
        records = list(read_records(path))
        await file.append(lambda: line)
        await file.close()
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open or make the file, and repair what a killed process left.

        Raises:
            CheckpointError: It is no results file, is damaged, or cannot be opened.
        """
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            existed = self.path.exists()
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if not existed:
                _sync_directory(self.path.parent)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from error
        try:
            self._end = self._repair()
        except BaseException:
            os.close(self._fd)
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._waiting: list[tuple[Callable[[], bytes], asyncio.Future[Place]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._failure: CheckpointError | None = None

    def append(self, line: Callable[[], bytes]) -> asyncio.Future[Place]:
        """Append a record; the future is done once it is on the disk, and says where.

        The record is taken at once: a caller that is cancelled while it waits has not withdrawn it.

        Args:
            line: Makes the record's bytes, newline included; called in the writing thread.

        Raises:
            CheckpointError: (through the future) It cannot be written.
        """
        done: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            done.set_exception(self._failure)
            return done
        self._waiting.append((line, done))
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())
        return done

    async def close(self) -> None:
        """Write what is waiting, then close the file. A caller that is cancelled meanwhile still waits for it."""
        if self._fd < 0:
            return
        cancelled: asyncio.CancelledError | None = None
        while self._writing is not None:
            try:
                # Once is enough: a cancel scope of anyio's cancels again in every round of the event loop.
                with anyio.CancelScope(shield=cancelled is not None):
                    await asyncio.shield(self._writing)
            except asyncio.CancelledError as error:
                cancelled = error
        self._thread.shutdown(wait=True)
        os.close(self._fd)
        self._fd = -1
        if cancelled is not None:
            raise cancelled

    def abandon(self) -> None:
        """Close a file that nothing was appended to."""
        os.close(self._fd)
        self._fd = -1

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                outcomes = await loop.run_in_executor(self._thread, self._commit, [line for line, _ in batch])
                for (_, done), outcome in zip(batch, outcomes, strict=True):
                    if done.cancelled():
                        continue
                    if isinstance(outcome, Place):
                        done.set_result(outcome)
                    else:
                        done.set_exception(outcome)
        finally:
            self._writing = None

    def _commit(self, lines: list[Callable[[], bytes]]) -> list[Place | CheckpointError]:
        """Write and sync; runs in the thread. Where each is, or what went wrong with it."""
        outcomes: dict[int, Place | CheckpointError] = {}
        encoded: dict[int, bytes] = {}
        for position, line in enumerate(lines):
            try:
                encoded[position] = line()
            except Exception as error:
                outcomes[position] = CheckpointError(f"{self.path}: a result cannot be written: {error!r}")
        start = self._end
        try:
            if self._failure is None:
                self._put(b"".join(encoded.values()))
                for position, record in encoded.items():
                    outcomes[position] = Place(self.path, start, len(record))
                    start += len(record)
        except OSError:
            for position, record in encoded.items():  # some of them may still fit
                if self._failure is None:
                    start = self._end
                    try:
                        self._put(record)
                        outcomes[position] = Place(self.path, start, len(record))
                    except OSError as error:
                        self._failure = self._told(error)
        assert self._failure is not None or len(outcomes) == len(lines)
        return [outcomes.get(position) or self._failure for position in range(len(lines))]  # type: ignore[misc]

    def _put(self, data: bytes) -> None:
        """Write and sync all of it, or leave none of it."""
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._fd, data[written : written + _BLOCK], self._end + written)
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)

    def _told(self, error: OSError) -> CheckpointError:
        what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error.strerror)
        told = CheckpointError(f"{self.path}: {what}; every result reported as finished is kept, run again to go on")
        told.__cause__ = error
        return told

    def _repair(self) -> int:
        """Cut off what is no whole record behind the last newline; return the file's length."""
        size = os.fstat(self._fd).st_size
        if size and not _may_begin_a_record(os.pread(self._fd, len(RECORD_START), 0)):
            raise CheckpointError(f"{self.path} is not a results file of an evaluation: name another file")
        tail = b""
        start = size
        while start > 0 and b"\n" not in tail:
            begin = max(0, start - _BLOCK)
            tail = os.pread(self._fd, start - begin, begin) + tail
            start = begin
        tail = tail[tail.rfind(b"\n") + 1 :]
        if not tail:
            return size
        if not _may_begin_a_record(tail):
            raise CheckpointError(f"{self.path} ends in what is no record: not touched")
        try:
            decode(tail)
        except ValueError:
            os.ftruncate(self._fd, size - len(tail))
            os.fsync(self._fd)
            logger.warning("path=<%s>, bytes=<%d> | cut off a record that was never finished", self.path, len(tail))
            return size - len(tail)
        os.pwrite(self._fd, b"\n", size)
        os.fsync(self._fd)
        return size + 1


def lock_file(path: Path) -> FileLock:
    """Keep a second evaluation away, of this process or of another; ends with the process, however it ends.

    Args:
        path: Of the file that stands for it, made if need be and never removed.

    Raises:
        CheckpointError: Someone holds it.
        OSError: It cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise CheckpointError(f"{path}: another evaluation is writing there") from error
    return lock


def read_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The whole records of a results file; a torn last line is left out. The file is only read.

    Raises:
        CheckpointError: A line is no record, or the file cannot be read.
    """
    return (record for _, record in read_placed_records(path))


def read_placed_records(path: str | os.PathLike[str]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Likewise, each with its place."""
    path, start = Path(path), 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    record = _record_of(line)
                except ValueError as error:
                    if not line.endswith(b"\n"):
                        return
                    raise CheckpointError(f"{path}, line {number}: damaged: {error}") from error
                yield Place(path, start, len(line)), record
                start += len(line)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def read_record(place: Place) -> dict[str, Any]:
    """One record.

    Raises:
        CheckpointError: It is no longer there.
    """
    try:
        with open(place.path, "rb") as file:
            file.seek(place.start)
            return _record_of(file.read(place.length))
    except OSError as error:
        raise CheckpointError(f"{place.path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{place.path} has been changed: no record is at byte {place.start}") from error


def _record_of(line: bytes) -> dict[str, Any]:
    record = decode(line)
    if not isinstance(record, dict) or "key" not in record:
        raise ValueError("no record of a sample")
    return record


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file whole or not at all.

    Raises:
        CheckpointError: It cannot be written; the old one is still there.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(new, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise CheckpointError(f"{path}: {error.strerror}") from error


def _may_begin_a_record(content: bytes) -> bool:
    """Whether a killed process may have left this: a record's beginning, or the zeros of a block never written."""
    shared = min(len(content), len(RECORD_START))
    return content[:shared] == RECORD_START[:shared] or not content.strip(b"\0")


def _sync_directory(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system takes it
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
