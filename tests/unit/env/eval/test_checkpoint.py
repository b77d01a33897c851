import asyncio
import errno
import os
import subprocess
import sys
import time

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strands_env.eval.checkpoint import (
    CheckpointError,
    CheckpointFile,
    decode,
    digest,
    encode,
    lock_file,
    read_record,
    read_records,
)


def record(number, size=10):
    return encode({"key": f"k{number}", "text": "x" * size})


async def write(path, numbers, size=10):
    file = CheckpointFile(path)
    await asyncio.gather(*(file.append(lambda n=n: record(n, size)) for n in numbers))
    await file.close()
    return file


def keys(path):
    return [one["key"] for _, one in read_records(path)]


async def test_records_come_back_in_the_order_of_their_writing(tmp_path):
    await write(tmp_path / "r.jsonl", range(50))
    assert keys(tmp_path / "r.jsonl") == [f"k{n}" for n in range(50)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data(), count=st.integers(1, 5))
def test_a_file_cut_at_any_byte_keeps_its_whole_records_and_takes_more(tmp_path, data, count):
    path = tmp_path / "cut.jsonl"
    path.write_bytes(b"".join(record(n) for n in range(count)))
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    # A record that lacks nothing but its newline is whole.
    expected = [f"k{n}" for n in range(count) if len(b"".join(record(m) for m in range(n + 1))) - 1 <= cut]
    asyncio.run(write(path, [99]))
    assert keys(path) == [*expected, "k99"]
    kept = b"".join(record(n) for n in range(len(expected)))
    assert path.read_bytes() == kept + record(99)


async def test_a_record_is_acknowledged_after_its_fsync_and_those_that_wait_share_one(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    path = tmp_path / "r.jsonl"

    def counted(fd):
        fsync(fd)
        synced.append(path.read_bytes().count(b"\n"))

    file = CheckpointFile(path)
    monkeypatch.setattr(os, "fsync", counted)
    acknowledged = []

    async def one(number):
        await file.append(lambda: record(number))
        acknowledged.append(synced[-1])

    await asyncio.gather(*(one(n) for n in range(100)))
    await file.close()
    assert all(on_disk >= position for position, on_disk in enumerate(acknowledged, 1))
    assert len(synced) <= 3


async def test_a_cancelled_caller_has_not_withdrawn_its_record(tmp_path):
    file = CheckpointFile(tmp_path / "r.jsonl")

    async def one():
        await file.append(lambda: record(1))

    task = asyncio.ensure_future(one())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await file.close()
    assert keys(tmp_path / "r.jsonl") == ["k1"]


async def test_a_file_is_closed_idly_though_anyio_has_cancelled_the_caller(tmp_path, monkeypatch):
    """A11: a cancel scope cancels again in every round of the event loop."""
    path, fsync = tmp_path / "r.jsonl", os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: time.sleep(0.4) or fsync(fd))
    file = CheckpointFile(path)
    written = asyncio.ensure_future(file.append(lambda: record(1)))
    await asyncio.sleep(0)
    used = time.thread_time()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await file.close()
    assert time.thread_time() - used < 0.15
    await written
    assert keys(path) == ["k1"]


async def test_a_full_disk_is_a_clear_error_and_leaves_whole_records_only(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    file = CheckpointFile(path)
    await file.append(lambda: record(1))
    pwrite = os.pwrite

    def full(fd, data, offset):
        if pwrite(fd, data[:7], offset):  # part of it still fits
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="the disk is full; every result reported as finished is kept"):
        await file.append(lambda: record(2))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="disk is full"):
        await file.append(lambda: record(3))
    await file.close()
    assert path.read_bytes() == record(1)


async def test_of_records_that_wait_together_those_that_fit_are_kept(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    file = CheckpointFile(path)
    pwrite, room = os.pwrite, 2 * len(record(1)) + 5

    def small_disk(fd, data, offset):
        if offset + len(data) > room:
            pwrite(fd, data[: room - offset], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", small_disk)
    ends = await asyncio.gather(*(file.append(lambda n=n: record(n)) for n in range(4)), return_exceptions=True)
    await file.close()
    assert [isinstance(end, CheckpointError) for end in ends] == [False, False, True, True]
    assert path.read_bytes() == record(0) + record(1)


async def test_a_record_that_was_written_for_nobody_and_is_lost_is_logged(tmp_path, monkeypatch, caplog):
    path, fsync = tmp_path / "r.jsonl", os.fsync
    file = CheckpointFile(path)
    waiting = [file.append(lambda n=n: record(n)) for n in range(3)]

    def failing(fd):
        fsync(fd)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    waiting[1].cancel()
    await file.close()
    assert [isinstance(one.exception(), CheckpointError) for one in (waiting[0], waiting[2])] == [True, True]
    assert len(caplog.messages) == 1 and "Input/output error" in caplog.text and "runs it again" in caplog.text
    assert path.read_bytes() == b""


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
async def test_a_device_that_is_full_is_told_as_such():
    with pytest.raises(CheckpointError):
        file = CheckpointFile("/dev/full")
        await file.append(lambda: record(1))


@pytest.mark.parametrize(
    "content", [b"question,answer\n1,2\n", b"torn text", b'{"question": "?"}\n', b'{"key":"a"}\nnot ours']
)
def test_a_file_that_is_someone_elses_is_not_touched(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        CheckpointFile(path)
    assert path.read_bytes() == content


def test_damage_in_the_middle_is_told_with_its_line(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(record(1) + record(2)[:-9] + b"\n" + record(3))
    with pytest.raises(CheckpointError, match="line 2: damaged"):
        list(read_records(path))


def test_a_second_writer_is_refused_in_this_process_and_in_another(tmp_path):
    lock = lock_file(tmp_path / "r.lock")
    with pytest.raises(CheckpointError, match="another evaluation is writing there"):
        lock_file(tmp_path / "r.lock")
    program = (
        "import sys; from pathlib import Path; from strands_env.eval.checkpoint import lock_file; "
        "lock_file(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "r.lock")]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert "another evaluation is writing there" in refused.stderr
    lock.release()
    assert subprocess.run(command, capture_output=True).returncode == 0
    lock_file(tmp_path / "r.lock").release()


async def test_a_record_is_read_again_from_where_it_was_written(tmp_path):
    file = CheckpointFile(tmp_path / "r.jsonl")
    places = await asyncio.gather(*(file.append(lambda n=n: record(n, 10 * n)) for n in range(5)))
    places.append(await file.append(lambda: record(5)))
    await file.close()
    assert [read_record(place)["key"] for place in places] == [f"k{n}" for n in range(6)]
    assert [place for place, _ in read_records(tmp_path / "r.jsonl")] == places
    (tmp_path / "r.jsonl").write_bytes(record(1))
    with pytest.raises(CheckpointError, match="has been changed"):
        read_record(places[3])


async def test_the_cost_of_a_record_does_not_grow_with_the_file(tmp_path, monkeypatch):
    """Bytes written per record, for the first of ten records and behind ten thousand: no more than its own."""
    path = tmp_path / "r.jsonl"
    await write(path, range(10_000), size=200)
    written = []
    pwrite = os.pwrite
    file = CheckpointFile(path)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: written.append(len(data)) or pwrite(fd, data, offset))
    await file.append(lambda: record(1, 200))
    await file.close()
    assert sum(written) == len(record(1, 200))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
        max_leaves=8,
    )
)
def test_json_like_values_come_back_as_they_were(value):
    assert decode(encode(value)) == value


@given(st.dictionaries(st.text(), st.integers() | st.text(), max_size=5))
def test_equal_values_have_equal_digests_whatever_their_order(value):
    assert digest(value) == digest(dict(reversed(value.items())))
    assert digest({**value, "": object}) != digest(value)


def test_what_json_has_no_form_for_is_written_in_the_nearest_one():
    import numpy as np

    loop: list = []
    loop.append(loop)
    value = {
        "set": {2, 1},
        "bytes": b"ab",
        "number": np.float32(0.5),
        "array": np.arange(2),
        "big": 1 << 80,
        "half": "\ud800",
        3: "key",
        "inf": float("inf"),
        "object": object,
    }
    written = decode(encode(value))
    assert written["set"] == [1, 2] and written["bytes"] == {"base64": "YWI="} and written["number"] == 0.5
    assert (
        written["array"] == [0, 1]
        and written["big"] == 1 << 80
        and written["half"] == "\ud800"
        and written["3"] == "key"
    )
    assert written["inf"] is None and "object" in written["object"]
    assert encode(loop).endswith(b"\n")
