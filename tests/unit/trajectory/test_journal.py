"""Journals as files: what is read of torn, damaged, growing and foreign ones, and who may write."""

import errno
import fcntl
import io
import random
import resource
import struct
import subprocess
import sys
import zlib
from contextlib import contextmanager

import numpy as np
import pytest

from strands_sglang import Journal, JournalError, Trajectory
from strands_sglang.trajectory.journal import MAGIC, JournalInUseError
from strands_sglang.trajectory.storage import DamagedTrajectoryError, TrajectoryFileError


def written(path, count=4):
    """Write a journal; return its content and its entries."""
    journal = Journal(path)
    for number in range(count):
        journal.append("note", {"number": number, "text": "x" * number}, {"values": np.arange(number, dtype=np.int32)})
    journal.close()
    return path.read_bytes(), journal.entries()


def plain(entries):
    return [
        (kind, data, {name: values.tolist() for name, values in tensors.items()}) for kind, data, tensors, _ in entries
    ]


def test_every_entry_is_read_as_it_was_written(tmp_path):
    _, entries = written(tmp_path / "a.journal")
    assert plain(entries) == [
        ("note", {"number": number, "text": "x" * number}, {"values": list(range(number))}) for number in range(4)
    ]


def test_a_journal_torn_at_any_byte_has_its_whole_entries_and_takes_further_ones(tmp_path):
    path = tmp_path / "a.journal"
    content, entries = written(path)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        whole = [entry for entry in entries if entry.end <= length]
        assert plain(Journal(path).entries()) == plain(whole), length
        journal = Journal(path)
        journal.append("note", {"number": "new"})
        journal.close()
        assert plain(journal.entries()) == [*plain(whole), ("note", {"number": "new"}, {})], length


def test_a_flipped_bit_anywhere_is_an_error_that_names_the_file_and_changes_nothing(tmp_path):
    path = tmp_path / "a.journal"
    content, _ = written(path)
    chance = random.Random(0)
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        for use in (Journal(path).entries, Journal(path).open):
            with pytest.raises(TrajectoryFileError, match=r"a\.journal"):
                use()
        assert path.read_bytes() == flipped, at


def test_a_flipped_bit_in_an_entry_is_damage(tmp_path):
    path = tmp_path / "a.journal"
    content, _ = written(path)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DamagedTrajectoryError, match=r"a\.journal: damaged: entry 3, at byte"):
        Journal(path).entries()


@pytest.mark.parametrize(
    "description",
    [b"5", b"\xff", b"[" * 100_000, b'["note", {}]', b'["note", {}, [["values", "O", [1]]]]'],
)
def test_an_entry_that_no_writer_writes_is_damage_whatever_its_checksum(tmp_path, description):
    path = tmp_path / "a.journal"
    packed = zlib.compress(description)
    body = struct.pack("<I", len(packed)) + packed + bytes(8)
    head = struct.pack("<II", len(body), zlib.crc32(body))
    path.write_bytes(MAGIC + head + struct.pack("<I", zlib.crc32(head)) + body)
    for use in (Journal(path).entries, Journal(path).open):
        with pytest.raises(DamagedTrajectoryError, match=r"a\.journal: entry 0, at byte 25: damaged: "):
            use()


@pytest.mark.parametrize("content", [b"not a journal", MAGIC.replace(b"1", b"2"), b"\0" * 100])
def test_another_file_or_version_is_named_and_left_alone(tmp_path, content):
    path = tmp_path / "a.journal"
    path.write_bytes(content)
    with pytest.raises(TrajectoryFileError, match=r"a\.journal: begins with .* and a journal with"):
        Journal(path).open()
    with pytest.raises(TrajectoryFileError, match=r"a\.journal"):
        Trajectory.load(path)
    assert path.read_bytes() == content


def test_a_second_process_is_told_which_one_writes(tmp_path):
    path = tmp_path / "a.journal"
    code = (
        "import sys; from strands_sglang import Journal; journal = Journal(sys.argv[1]);"
        "journal.append('writer', {'host': 'here', 'process': 17}); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)}
    ) as other:
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(JournalInUseError, match=r"a\.journal: the journal is written by here, process 17"):
            Journal(path).append("note", {})
        assert len(Journal(path).entries()) == 1
        other.kill()
    Journal(path).append("note", {})
    assert [entry.kind for entry in Journal(path).entries()] == ["writer", "note"]


@contextmanager
def largest_file(size):
    """Let no file of this process grow beyond a size, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_the_disk_cannot_hold_leaves_the_entries_before_it(tmp_path):
    path = tmp_path / "a.journal"
    content, entries = written(path)
    journal = Journal(path)
    journal.open()
    with (
        largest_file(len(content) + 20),
        pytest.raises(JournalError, match=r"a\.journal: the journal cannot be written"),
    ):
        journal.append("note", {"text": random.Random(0).randbytes(100)})
    assert path.read_bytes() == content
    journal.append("note", {"text": "there is room again"})
    assert plain(journal.entries())[:-1] == plain(entries)


@pytest.mark.parametrize("failing", [["flock"], ["seek"], ["write", "truncate"]])
def test_whatever_the_file_system_refuses_is_an_error_of_the_journal(tmp_path, monkeypatch, failing):
    path = tmp_path / "a.journal"
    content, _ = written(path)

    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    def refuse_later(*args):
        raise OSError(errno.EIO, "Input/output error")

    class Refusing(io.FileIO):
        """Refuses once the journal is open, which truncates it."""

        def truncate(self, size):
            for name, refusal in zip(failing, (refuse, refuse_later), strict=False):
                setattr(self, name, refusal)
            return super().truncate(size)

    if failing == ["flock"]:
        monkeypatch.setattr(fcntl, "flock", refuse)
    else:
        monkeypatch.setattr(io, "FileIO", Refusing)
    with pytest.raises(JournalError, match=r"a\.journal: the journal cannot be .*No locks available"):
        Journal(path).append("note", {})
    assert path.read_bytes() == content


@pytest.mark.parametrize("data", [{"a": object()}, {"a": {1, 2}}])
def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path, data):
    journal = Journal(tmp_path / "a.journal")
    with pytest.raises(TypeError):
        journal.append("note", data)
    assert not journal.path.exists()


def test_acknowledging_twice_deletes_once(tmp_path):
    written(tmp_path / "a.journal")
    journal = Journal(tmp_path / "a.journal")
    journal.acknowledge()
    journal.acknowledge()
    assert not journal.path.exists()
