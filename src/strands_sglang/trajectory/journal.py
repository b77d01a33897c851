"""Journals: the record of an episode, written while it happens, so that it outlives its process.

A journal is a file to which entries are only appended, each with one write: a killed process leaves whole entries, and
at most a torn one at the end, which is dropped. The entries of the kind `"turn"` hold what a trajectory's file holds,
turn by turn, so `Trajectory.load` reads a journal too, also while it grows. What other entries hold is up to their
writer. It survives the process, not a loss of power: nothing waits for the disk.

Layout (format version 1). The file begins with `MAGIC`. An entry is a head of 12 bytes, little-endian (the length of
its body, the CRC-32 of the body, the CRC-32 of those 8 bytes), and its body: the length of the description (4 bytes),
the description (JSON, compressed by zlib), and the bytes of its tensors end to end. The description is a list of the
entry's kind, its data, and the name, type and shape of each tensor. The tensors of a turn and its description are those
of `storage`, but its parent is a `Turn.index`, and its text is left out.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..exceptions import JournalError
from ..reasons import Reason, read_reason
from .storage import (
    DamagedTrajectoryError,
    TrajectoryFileError,
    decode_turn,
    in_hex,
    reading,
    turn_content,
    write_file,
)
from .turn import Turn, TurnStatus

if TYPE_CHECKING:
    from .trajectory import Trajectory

MAGIC = b"strands-sglang journal 1\n"
_NAME = MAGIC.rpartition(b" ")[0]
_HEAD = struct.Struct("<III")
_CHECKED_HEAD = 8  # bytes of it that its own checksum covers
_LEVEL = 1  # of zlib: a higher one takes longer than it saves


class Entry(NamedTuple):
    """One entry of a journal.

    Attributes:
        kind: What it is about.
        data: JSON-like data.
        tensors: Arrays of NumPy, by name.
        end: Position in the file at which it ends.
    """

    kind: str
    data: Any
    tensors: Mapping[str, Any]
    end: int


class JournalInUseError(JournalError):
    """Another process, or another episode of this one, writes the journal."""


class Journal:
    """The journal of one episode.

    Attributes:
        path: Path of the file.
        end: Position at which the entry ends that was appended last; 0 before.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name a journal, to read it, to begin it or to continue it. Nothing is written before `open`.

        Args:
            path: Path of the file.
        """
        self.path = Path(path)
        self.end = 0
        self._file: io.FileIO | None = None

    def __reduce__(self) -> Any:
        """Pickle and copy the path only: one object writes the file."""
        return type(self), (self.path,)

    def __str__(self) -> str:
        """The path, as in errors."""
        return str(self.path)

    def content(self) -> bytes:
        """Return the bytes that are written.

        Raises:
            OSError: The file cannot be read.
        """
        return self.path.read_bytes()

    def begin_with(self, content: bytes) -> None:
        """Begin the file with the content of another journal, up to the end of an entry.

        Raises:
            JournalError: The file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, content)
        except OSError as error:
            raise JournalError(f"{self}: the journal cannot be written: {error}") from error

    def entries(self) -> list[Entry]:
        """Return the entries that are whole.

        Raises:
            OSError: The file cannot be read.
            TrajectoryFileError: It is no journal, is damaged, or has an unknown version.
        """
        return [*read_entries(self.content(), str(self))]

    def open(self) -> None:
        """Take the file for writing, and drop a torn entry at its end.

        Raises:
            JournalInUseError: Another one writes it.
            JournalError: The file cannot be opened.
            TrajectoryFileError: It is no journal, is damaged, or has an unknown version.
        """
        if self._file is not None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = io.FileIO(self.path, "a+")
        except OSError as error:
            raise JournalError(f"{self}: the journal cannot be opened: {error}") from error
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                writers = [entry.data for entry in self.entries() if entry.kind == "writer"]
                writer = "{host}, process {process}".format(**writers[-1]) if writers else "another process"
                raise JournalInUseError(f"{self}: the journal is written by {writer}") from error
            entries = self.entries()
            file.truncate(entries[-1].end if entries else 0)
        except OSError as error:  # such as a file system without locks
            file.close()
            raise JournalError(f"{self}: the journal cannot be opened: {error}") from error
        except BaseException:
            file.close()
            raise
        self._file = file

    def append(self, kind: str, data: Any, tensors: Mapping[str, Any] | None = None) -> None:
        """Append an entry.

        Args:
            kind: What it is about.
            data: JSON-like data; bytes are written in hexadecimal.
            tensors: Arrays of NumPy, by name.

        Raises:
            JournalError: It cannot be written, or opened. The entries before it are whole.
            TypeError: The data are not JSON-like.
        """
        content = _encode(kind, data, tensors or {})
        self.open()
        assert self._file is not None
        try:
            before = self._file.seek(0, io.SEEK_END)
            if not before:
                content = MAGIC + content
            try:
                written = self._file.write(content)
                if written != len(content):
                    raise OSError(f"{written} of {len(content)} bytes were written")
            except OSError:
                with suppress(OSError):  # readers stop before a torn entry
                    self._file.truncate(before)
                raise
        except OSError as error:
            raise JournalError(f"{self}: the journal cannot be written: {error}") from error
        self.end = before + written

    def close(self) -> None:
        """Let others write the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def acknowledge(self) -> None:
        """Delete the journal, once the episode is stored or trained. Doing it twice has no further effect."""
        self.close()
        self.path.unlink(missing_ok=True)


def _encode(kind: str, data: Any, tensors: Mapping[str, Any]) -> bytes:
    views = {name: memoryview(values) for name, values in tensors.items()}
    shapes = [(name, view.format, view.shape) for name, view in views.items()]
    description = zlib.compress(json.dumps([kind, data, shapes], default=in_hex).encode(), _LEVEL)
    body = b"".join([len(description).to_bytes(4, "little"), description, *views.values()])
    head = _HEAD.pack(len(body), zlib.crc32(body), 0)[:_CHECKED_HEAD]
    return head + zlib.crc32(head).to_bytes(4, "little") + body


def is_journal(content: bytes) -> bool:
    """Whether the content of a file is a journal's, perhaps of another version."""
    return content.startswith(_NAME)


def read_entries(content: bytes, name: str = "the journal") -> Iterator[Entry]:
    """Yield the entries of a journal; a torn one at its end is left out.

    Args:
        content: Content of the file.
        name: What errors call it.

    Raises:
        TrajectoryFileError: It is no journal, is damaged, or has an unknown version.
    """
    if MAGIC.startswith(content):  # empty, or torn at its first write
        return
    if not content.startswith(MAGIC):
        what = content[: len(MAGIC)]
        raise TrajectoryFileError(f"{name}: begins with {what!r}, and a journal with {MAGIC!r}")
    import numpy as np

    position, number = len(MAGIC), 0
    while position + _HEAD.size <= len(content):
        length, checksum, of_head = _HEAD.unpack_from(content, position)
        if zlib.crc32(content[position : position + _CHECKED_HEAD]) != of_head:
            raise DamagedTrajectoryError(f"{name}: damaged: the head of entry {number}, at byte {position}")
        begin, end = position + _HEAD.size, position + _HEAD.size + length
        if end > len(content):
            return
        body = memoryview(content)[begin:end]
        if zlib.crc32(body) != checksum:
            raise DamagedTrajectoryError(f"{name}: damaged: entry {number}, at byte {position}")
        offset = 4 + int.from_bytes(body[:4], "little")
        tensors = {}
        with reading(f"{name}: entry {number}, at byte {position}"):
            kind, data, shapes = json.loads(zlib.decompress(body[4:offset]))
            for tensor, dtype, shape in shapes:
                count = int(np.prod(shape))
                values = np.frombuffer(body, dtype, count, offset)
                tensors[tensor] = values.reshape(shape)
                offset += values.nbytes
        yield Entry(kind, data, tensors, end)
        position, number = end, number + 1


# --- turns ---


@dataclass
class TurnWriter:
    """Writes the turns of a trajectory as they are recorded, and what happens to earlier ones.

    Attributes:
        write: Appends an entry.
        states: What is written of each turn that can still change, by `Turn.index`.
        pieces: The ids whose text is written.
        parse_errors: The `tool_parse_errors` that are written.
    """

    write: Callable[[str, Any, Mapping[str, Any]], None]
    states: dict[int, Any] = field(default_factory=dict)
    pieces: set[int] = field(default_factory=set)
    parse_errors: dict[str, int] = field(default_factory=dict)

    def continue_with(self, trajectory: Trajectory) -> None:
        """Continue with a trajectory that was read from a journal."""
        self.states = {turn.index: _state(turn) for turn in trajectory.turns}
        self.pieces = {*trajectory.pieces}
        self.parse_errors = dict(trajectory.tool_parse_errors)

    def add(self, turn: Turn) -> None:
        """Write a turn of a trajectory that has an answer, a part of one, or an error."""
        trajectory = turn.trajectory
        assert trajectory is not None
        parent = None if turn.parent is None else turn.parent.index
        described, tensors, pieces = turn_content(turn, parent, trajectory.encoder, self.pieces)
        self.pieces.update(pieces)
        calls = {call["toolUseId"] for call in turn.tool_calls}
        notices = {use_id: text for use_id, text in trajectory.result_notices.items() if use_id in calls}
        data = {
            "turn": described,
            "changed": self.changed(trajectory.turns),
            "pieces": {str(token_id): piece.hex() for token_id, piece in pieces.items()},
            "result_notices": notices,
            "tool_parse_errors": {
                name: count - self.parse_errors.get(name, 0) for name, count in trajectory.tool_parse_errors.items()
            },
            "id": trajectory.id,
            "context_length": trajectory.context_length,
        }
        self.parse_errors = dict(trajectory.tool_parse_errors)
        self.write("turn", data, tensors)
        self.states[turn.index] = _state(turn)

    def changed(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return what has changed of the turns that are written, by index: None for one that was replaced."""
        now = {turn.index: _state(turn) for turn in turns if turn.index in self.states}
        for turn in turns:
            if turn.status is TurnStatus.ASKED and turn.index in now:  # a part of its answer is written
                now[turn.index] = self.states[turn.index]
        changed = {str(index): now.get(index) for index, state in self.states.items() if now.get(index) != state}
        self.states = now
        return changed


def as_unseen(entry: Entry) -> Entry:
    """Return the entry of an answer that no agent got, so that the next call that asks the same gets it."""
    turn = entry.data["turn"]
    unseen = {
        **turn,
        "status": TurnStatus.CUT.value,
        "answer": {**turn["answer"], "is_resumed": True},
        "answer_key": None,
        "tool_calls": [],
    }
    data = {name: entry.data[name] for name in ("pieces", "changed", "id")}
    return entry._replace(data={**data, "turn": unseen, "result_notices": {}})


def discard_unfinished(turns: Iterable[Turn]) -> None:
    """Discard answers inside a tool call that had not ended: it runs again, and asks again."""
    for turn in turns:
        turn.status, turn.fate = TurnStatus.DISCARDED, Reason("run_again")


@lru_cache
def versions() -> dict[str, str]:
    """Return the versions of the packages that recordings depend on, by name."""
    found = {}
    for name in ("strands-sglang", "strands-agents", "transformers"):
        with suppress(PackageNotFoundError):  # a checkout on the path
            found[name] = version(name)
    return found


def in_words(reason: Any) -> str:
    """Return a reason of a journal as a sentence."""
    return str(read_reason(reason))


def _state(turn: Turn) -> tuple[TurnStatus, bool | None, Reason | None]:
    return turn.status, turn.was_added, turn.fate


def _no_facts() -> dict[str, Any]:
    return {"is_changed": False, "result_notices": {}, "tool_parse_errors": {}, "tool_results": {}}


def turns_of(entries: Sequence[Entry]) -> tuple[list[Turn], dict[str, Any], dict[int, bytes]]:
    """Return the turns of a journal, the further facts about its trajectory, and the text of its ids.

    Args:
        entries: Its entries, or the first ones of them.
    """
    turns: dict[int, Turn] = {}
    facts = _no_facts()
    pieces: dict[int, bytes] = {}
    errors: dict[int, Counter[str]] = {}
    for entry in entries:
        data = entry.data
        if entry.kind == "end":
            facts["end"] = data["end"]
        facts["tool_results"].update(data.get("tool_results") or {})
        for index, state in (data.get("changed") or {}).items():
            if state is None:
                turns.pop(int(index), None)
                errors.pop(int(index), None)
            elif int(index) in turns:
                turn = turns[int(index)]
                turn.status, turn.was_added = TurnStatus(state[0]), state[1]
                turn.fate = None if state[2] is None else read_reason(state[2])
        if entry.kind == "turn":
            new = {int(token_id): bytes.fromhex(piece) for token_id, piece in data["pieces"].items()}
            pieces.update(new)
            turns.pop(data["turn"]["index"], None)  # a part of the same answer
            turn = turns[data["turn"]["index"]] = decode_turn(data["turn"], entry.tensors, turns)
            turn.text = b"".join(map(pieces.get, turn.output_ids, repeat(b""))).decode(errors="replace")
            facts["result_notices"].update(data["result_notices"])
            errors[turn.index] = Counter(data.get("tool_parse_errors"))
            facts["id"] = data["id"]
            facts["context_length"] = data.get("context_length")  # earlier files lack it
        elif entry.kind == "attempt":
            turns.clear()
            errors.clear()
            facts = {**_no_facts(), "packages": data.get("packages")}
    facts["tool_parse_errors"] = dict(+sum(errors.values(), Counter()))  # without those of none
    return [turns[index] for index in sorted(turns)], facts, pieces
