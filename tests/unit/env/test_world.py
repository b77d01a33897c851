"""Worlds: files, programs, limits, snapshots and forks, as root and as an ordinary user."""

import asyncio
import contextlib
import errno
import io
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

import strands_env
from strands_env.sandbox import (
    WORLD_LIMITS,
    Image,
    SandboxError,
    World,
    available_modes,
    layers,
    starting,
)
from strands_env.sandbox.world import _unpack, write_archive
from support.processes import running
from support.worlds import needs_worlds, worlds_folder

SMALL = replace(WORLD_LIMITS, memory_bytes=300 << 20, disk_bytes=32 << 20, processes=40, output_bytes=100_000)
IS_ROOT = os.geteuid() == 0
pytestmark = needs_worlds


folder = pytest.fixture(autouse=True)(worlds_folder)


@pytest.fixture
async def world():
    async with World(limits=SMALL) as started:
        yield started


def with_package():
    """The variables of a process that imports this package."""
    return {**os.environ, "PYTHONPATH": str(Path(strands_env.__file__).parents[1])}


async def sleeping(world):
    """The programs of a world that sleep."""
    return (await world.execute("grep -l sleep /proc/[0-9]*/comm")).stdout


def first_process():
    """The id of the first process of the only world."""
    return next(pid for pid, command in running(os.getpid()).items() if "inside.starter" in command)


# --- programs ---


async def test_a_program_has_its_user_folder_variables_and_input(world):
    command = 'id -u; pwd; echo "$GREETING $HOME"; cat; echo wrong >&2; exit 3'
    ran = await world.execute(command, working_dir="/tmp", env={"GREETING": "hello"}, stdin=b"given\n")
    assert ran.stdout == b"0\n/tmp\nhello /root\ngiven\n"
    assert (ran.stderr, ran.ended, ran.exit_code) == (b"wrong\n", "exited", 3)


async def test_a_program_may_be_a_list_without_a_shell(world):
    assert (await world.execute(["echo", "$HOME", "a b"])).stdout == b"$HOME a b\n"


async def test_a_program_without_free_descriptors_for_its_output_leaves_none_open(world):
    before = len(os.listdir("/proc/self/fd"))
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    for more in range(2, 7):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + more, kept[1]))
        with contextlib.suppress(SandboxError):
            await world.execute("true")
        resource.setrlimit(resource.RLIMIT_NOFILE, kept)
    await world.execute("true")
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_script_is_written_before_its_program_starts(world):
    ran = await world.execute("cat; sh script; stat -c %U:%a script", working_dir="/", stdin=b"pwd\n", script="/script")
    assert ran.output == "/\nroot:644\n"
    ran = await world.execute("true", script="/proc/script")
    assert (ran.exit_code, ran.stderr[:17]) == (126, b"[Errno 2] No such")


async def test_output_comes_while_the_program_runs(world):
    pieces = []
    await world.execute("echo a; echo b >&2; echo c", on_output=lambda stream, data: pieces.append((stream, data)))
    assert b"".join(data for stream, data in pieces if stream == "stdout") == b"a\nc\n"
    assert ("stderr", b"b\n") in pieces


async def test_a_program_in_the_background_lives_on_and_may_still_write(world):
    await world.execute("(while true; do echo on; sleep 0.01; done) & echo $! > /tmp/pid")
    ran = await world.execute("sleep 0.2; kill -0 $(cat /tmp/pid) && echo alive; kill $(cat /tmp/pid)")
    assert ran.stdout == b"alive\n"


async def test_a_time_limit_ends_the_whole_tree(world):
    command = "(setsid sleep 1000 &) ; setsid -w sh -c 'sleep 1000'"
    ran = await world.execute(command, timeout_s=0.5)
    assert (ran.ended, ran.exit_code) == ("timeout", None)
    assert not await sleeping(world)


async def test_a_cancelled_program_is_ended_before_the_cancellation_continues(world):
    running_long = asyncio.ensure_future(world.execute("touch /tmp/on; setsid -w sleep 1000"))
    while (await world.execute("test -e /tmp/on")).exit_code:
        pass
    running_long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running_long
    assert not await sleeping(world)


async def test_too_much_output_ends_the_program(world):
    ran = await world.execute("yes")
    assert (ran.ended, len(ran.stdout)) == ("output", SMALL.output_bytes)


LIMITS = {
    "memory": "python3 -c 'x = bytearray(b\"1\" * (400 << 20)); import time; time.sleep(100)'",
    "disk": "for n in 1 2 3 4; do head -c 20000000 /dev/zero > /tmp/$n; done; sleep 100",
    "processes": "python3 -c 'import os, time\nwhile os.fork(): pass\ntime.sleep(100)'",
}


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_program_over_a_limit_is_ended_and_its_neighbors_go_on(world, limit):
    async with World(limits=SMALL) as other:
        neighbor = asyncio.ensure_future(other.execute("sleep 1; echo done"))
        ran = await world.execute(LIMITS[limit], timeout_s=20)
        assert ran.ended == limit or (limit == "processes" and b"BlockingIOError" in ran.stderr)
        assert (await neighbor).stdout == b"done\n"
    await world.execute("kill -9 -1")
    assert (await world.execute("rm -f /tmp/*; echo usable")).stdout == b"usable\n"


async def test_files_in_memory_go_with_what_exceeded_it(world):
    fill = "head -c 30000000 /dev/zero > /dev/shm/$n || break"
    ran = await world.execute(f"ipcmk -M 4096 >&2; for n in $(seq 9); do {fill}; done; {LIMITS['memory']}")
    assert ran.ended == "memory" and b"id:" in ran.stderr
    look = "ls /dev/shm; tail -n +2 /proc/sysvipc/shm"
    ran = await world.execute(f"{look}; sleep 0.2; echo usable > /dev/shm/file; cat /dev/shm/file")
    assert ran.stdout == b"usable\n"


async def test_the_names_of_a_file_count_once(world, folder):
    (folder / "of the machine").write_bytes(bytes(40 << 20))  # so that the world's own files are counted
    ran = await world.execute(
        "head -c 20000000 /dev/zero > /tmp/a; for n in 1 2 3 4 5; do ln /tmp/a /tmp/$n; done; sleep 0.3; "
        "head -c 5000000 /dev/zero > /tmp/b; sleep 0.3"
    )
    assert ran.ended == "exited"


async def test_sockets_of_the_machine_are_not_those_of_a_world():
    with contextlib.ExitStack() as kept:
        for _ in range(300):
            for end in socket.socketpair():
                kept.enter_context(end)
        async with World(limits=replace(SMALL, memory_bytes=100 << 20), network="host") as world:
            assert (await world.execute("sleep 0.3; echo on")).output == "on\n"


FASTER = {
    "space without writing": (
        "os.posix_fallocate(os.open('/tmp/x', 66), 0, 4096), libc.fallocate(3, 0, 0, 9)",
        "None -1",
    ),
    "its input": ("os.ftruncate(0, 1 << 20)", "PermissionError"),
    "the first process": ("os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))", "PermissionError"),
    "its priority": ("os.setpriority(os.PRIO_PROCESS, 1, 19)", "PermissionError"),
    "time of who opens a file": ("libc.fcntl(os.open('/tmp/x', 66), 1024, 1), libc.fcntl(0, 3)", "-1 "),
}


@pytest.mark.parametrize("way", FASTER)
async def test_nothing_is_taken_faster_than_it_is_counted(world, way):
    code, outcome = FASTER[way]
    ran = await world.execute(["python3", "-c", f"import ctypes, os; libc = ctypes.CDLL(None); print({code})"])
    assert outcome in ran.output


async def test_inodes_are_limited():
    code = "import time\nfor n in range(2_000): open(f'/tmp/{n}', 'w').close()\ntime.sleep(100)"
    async with World(limits=replace(SMALL, disk_bytes=4 << 20)) as world:  # 1,024 files
        assert (await world.execute(["python3", "-c", code])).ended == "disk"


async def test_a_world_in_which_programs_took_too_much_of_the_disk_opens_no_more_files(world):
    counts = set()
    for _ in range(3):
        assert (await world.execute(LIMITS["disk"])).ended == "disk"
        await world.execute("rm -f /tmp/*")
        first = first_process()
        counts.add(len(os.listdir(f"/proc/{first}/fd")))
    assert len(counts) == 1


async def test_files_deeper_than_can_be_counted_are_too_much(world):
    deep = "import os\nfor _ in range(2100):\n    os.mkdir('d')\n    os.chdir('d')\n"
    fill = "for n in range(9): open(f'/tmp/{n}', 'wb').write(bytes(8 << 20))\nimport time; time.sleep(100)"
    ran = await world.execute(["python3", "-c", deep + fill])
    assert ran.ended == "disk"


async def test_a_file_larger_than_the_limit_cannot_be_made(world):
    ran = await world.execute("fallocate -l 20G /tmp/big; truncate -s 20G /tmp/sparse; ls -s /tmp")
    assert ran.exit_code != 0 or b"too large" in ran.stderr or b"exceeded" in ran.stderr


async def test_the_events_of_the_owner_do_not_wait_for_worlds():
    longest = 0.0

    async def tick():
        nonlocal longest
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - before)

    ticking = asyncio.ensure_future(tick())
    worlds = [World(limits=SMALL) for _ in range(20)]
    await asyncio.gather(*(each.start() for each in worlds))
    await asyncio.gather(*(each.execute("head -c 90000 /dev/zero") for each in worlds))
    await asyncio.gather(*(each.fork(1) for each in worlds[:1]))
    for each in await worlds[0].fork(1):
        await each.stop()
    await asyncio.gather(*(each.stop() for each in worlds))
    ticking.cancel()
    assert longest < 1.0


NAMES = {
    "line ends": r"\r\r\r\r\r",
    "a field": r"\rVmPTE:\tx",
}


@pytest.mark.parametrize("name", NAMES)
async def test_the_name_of_a_process_deceives_no_limit(world, name):
    ran = await world.execute(f"printf '{NAMES[name]}' > /proc/self/comm; sleep 1000; true", timeout_s=0.5)
    assert ran.ended == "timeout"
    assert not await sleeping(world)


TOO_LONG = {
    "a command": lambda world: world.execute("echo " + "\U0001f600" * 30_000),
    "a path": lambda world: world.read("/" + "x" * 220_000),
}


@pytest.mark.parametrize("what", TOO_LONG)
async def test_what_is_too_long_is_refused_and_the_world_goes_on(world, what):
    with pytest.raises(ValueError, match="longer than Linux allows"):
        await TOO_LONG[what](world)
    assert (await world.execute("echo alive", timeout_s=10**400)).stdout == b"alive\n"
    await world.snapshot()


# --- files ---


async def test_what_each_world_needs_is_not_on_the_disk_but_has_its_device(world, folder):
    (own,) = [path for path in (folder / "worlds").iterdir() if path.is_dir()]
    assert os.listdir(own / "u") == []
    ran = await world.execute("touch /new /etc/new; stat -c %d / /new /etc /etc/new /etc/passwd /tmp | uniq | wc -l")
    assert ran.stdout == b"1\n"


async def test_what_a_program_writes_to_its_root_is_its_own(world):
    ran = await world.execute("echo 'made in a world' >> /etc/hosts && echo wrote")
    assert ran.stdout == b"wrote\n" and "made in a world" not in Path("/etc/hosts").read_text()


async def test_files_go_in_and_out(world, tmp_path):
    content = os.urandom(200_000)
    await world.write("/a/b/c", content)
    assert await world.read("/a/b/c") == content
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (source / "inner" / "file").write_bytes(content)
    (source / "link").symlink_to("/etc/passwd")
    (source / "run").write_text("#!/bin/sh\necho ran\n")
    (source / "run").chmod(0o755)
    await world.put(source, "/task/copy")
    ran = await world.execute("/task/copy/run; readlink /task/copy/link; stat -c %u /task/copy/run")
    assert ran.stdout == b"ran\n/etc/passwd\n0\n"
    await world.get("/task/copy", tmp_path / "back")
    assert (tmp_path / "back" / "inner" / "file").read_bytes() == content
    assert not (tmp_path / "back" / "link").is_symlink()  # it leads out of the copy


async def test_a_link_to_what_goes_in_is_followed(world, tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_text("content")
    for name, target in (("folder", "source"), ("file", "source/file")):
        (tmp_path / name).symlink_to(target)
        await world.put(tmp_path / name, f"/task/{name}")
    assert (await world.execute("cat /task/folder/file /task/file")).output == "contentcontent"


FAILURES = {
    "read /nothing": (FileNotFoundError, lambda world, path: world.read("/nothing")),
    "read a folder": (IsADirectoryError, lambda world, path: world.read("/tmp")),
    "write a folder": (IsADirectoryError, lambda world, path: world.write("/tmp", b"")),
    "write below a file": (NotADirectoryError, lambda world, path: world.write("/etc/passwd/x", b"")),
    "write to the machine": (OSError, lambda world, path: world.write("/usr/bin/x", b"")),
    "put nothing": (FileNotFoundError, lambda world, path: world.put(path / "nothing", "/x")),
    "get nothing": (FileNotFoundError, lambda world, path: world.get("/nothing", path / "x")),
}


@pytest.mark.parametrize("what", FAILURES)
async def test_a_file_that_cannot_be_reached_is_the_error_of_open(world, tmp_path, what):
    kind, fail = FAILURES[what]
    with pytest.raises(kind) as raised:
        await fail(world, tmp_path)
    assert raised.value.errno
    assert (await world.execute("echo usable")).stdout == b"usable\n"


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
async def test_a_program_that_ends_or_stops_a_file_operation_makes_it_fail_as_any_other(world, how):
    code = f"""if 1:
        import os, signal
        signal.alarm(2)
        while True:
            try: os.kill(-1, signal.{how})
            except ProcessLookupError: pass
    """
    await world.execute(["sh", "-c", '(sleep 1000 &); python3 -c "$0" &', code])
    with pytest.raises(InterruptedError, match="a program or a limit of the world"):
        while True:
            await asyncio.wait_for(world.write("/file", b"content"), 60)
    while (await world.execute("echo alive", timeout_s=1)).stdout != b"alive\n":
        pass


@pytest.mark.parametrize("what", ["mkfifo /etc/passwd", "ln -s /dev/zero /etc/passwd"])
async def test_a_list_of_users_without_end_takes_no_time(world, tmp_path, what):
    (tmp_path / "file").write_text("given")
    await world.execute(f"rm -f /etc/passwd; {what}")
    await asyncio.wait_for(world.put(tmp_path / "file", "/new/file"), 30)
    assert await world.read("/new/file") == b"given"


@pytest.mark.parametrize("change", ["rm -rf $PWD", "rm -rf $PWD; echo > $PWD"])
async def test_files_are_reached_without_the_working_folder(tmp_path, change):
    (tmp_path / "file").write_text("given")
    async with World(replace(Image(), working_dir="/app"), limits=SMALL) as world:
        await world.execute(change)
        await world.put(tmp_path / "file", "/tests/file")
        await world.write("/tests/other", b"written")
        assert await world.read("/tests/file") == b"given"
        await world.get("/tests", tmp_path / "out")
        assert (tmp_path / "out" / "other").read_bytes() == b"written"
        with pytest.raises(OSError):
            await world.read("file")


async def test_a_file_of_twenty_gigabytes_is_not_read(world, tmp_path):
    async with World(limits=replace(SMALL, disk_bytes=1 << 40)) as large:
        await large.execute("truncate -s 20G /big")
        for ask in (large.read("/big"),):
            with pytest.raises(OSError) as raised:
                await ask
            assert raised.value.errno == errno.EFBIG


async def test_a_pipe_or_a_device_does_not_block_a_read(world):
    await world.execute("mkfifo /pipe")
    assert await world.read("/pipe") == b""
    with pytest.raises(OSError) as raised:
        await world.read("/dev/zero")
    assert raised.value.errno == errno.EFBIG


def test_an_archive_is_read_to_its_end(tmp_path):
    """The end of this archive begins in one record and ends in the next, which the other side has yet to write."""
    (tmp_path / "file").write_bytes(b"a" * 512 * 16)
    os.utime(tmp_path / "file", ns=(1, 1))  # a fraction of a second needs a second header
    archive = io.BytesIO()
    write_archive(tmp_path / "file", lambda member: member, archive)
    *_, last = range(0, len(archive.getvalue()), tarfile.RECORDSIZE)
    assert last and archive.getvalue()[last - 512 : last] == bytes(512)
    reads, writes = os.pipe()
    with ThreadPoolExecutor(1) as pool, os.fdopen(writes, "wb", 0) as stream:
        unpacking = pool.submit(_unpack, reads, str(tmp_path / "copy"), 1 << 20)
        stream.write(archive.getvalue()[:last])
        wait([unpacking], timeout=0.5)
        stream.write(archive.getvalue()[last:])
        stream.close()
        unpacking.result()


async def test_links_that_lead_out_only_together_are_left_out(world, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    await world.execute("mkdir -p /out/p/q && cd /out/p/q && ln -s B/../../../victim A && ln -s ../.. B")
    await world.get("/out", tmp_path / "copy")
    assert not os.path.lexists(tmp_path / "copy/p/q/A")
    await world.execute("cd /out/p/q && rm A && echo written > A")
    (tmp_path / "copy/p/q/A").symlink_to(victim)
    await world.get("/out", tmp_path / "copy")
    assert victim.read_text() == "untouched"


LINKS = {
    "a link to a file": "ln -s {outside} /out/link",
    "a link to a folder, and a file in it": "ln -s {folder} /out/d && echo bad > /out/file",
    "a device": "mkfifo /out/pipe",
    "a program that changes the user": "cp /bin/sh /out/sh && chmod 6755 /out/sh",
}


@pytest.mark.parametrize("way", LINKS)
async def test_a_copy_from_the_world_stays_below_its_target(world, tmp_path, way):
    outside = tmp_path / "outside" / "secret"
    outside.parent.mkdir()
    outside.write_text("untouched")
    await world.execute("mkdir /out; " + LINKS[way].format(outside=outside, folder=outside.parent))
    await world.get("/out", tmp_path / "copy")
    assert outside.read_text() == "untouched" and os.listdir(outside.parent) == ["secret"]
    for path in (tmp_path / "copy").rglob("*"):
        assert not path.is_symlink() and not path.is_fifo() and not path.stat().st_mode & 0o6000


async def test_no_path_leads_out_of_the_world(world, tmp_path):
    """The process that follows a path has descriptors of folders outside; a policy chooses paths."""
    up = "/".join([".."] * 12)
    secret = tmp_path / "secret"
    secret.write_text("open sesame")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o755)
    for process in ("self", "1"):
        for number in range(24):
            for link in (f"fd/{number}", "cwd", "root"):
                way = f"/proc/{process}/{link}/{up}"
                with pytest.raises(OSError):
                    await world.read(f"{way}{secret}")
                with contextlib.suppress(OSError):
                    await world.write(f"{way}{tmp_path}/written", b"x")
            ran = await world.execute(f"cat .{secret}", working_dir=f"/proc/{process}/fd/{number}/{up}")
            assert b"sesame" not in ran.stdout
    assert os.listdir(tmp_path) == ["secret"]


async def test_a_program_that_writes_after_its_end_costs_its_owner_nothing(world):
    await world.execute("yes &")
    began = time.process_time()
    await world.execute("sleep 1")
    assert time.process_time() - began < 0.5


# --- snapshots ---


async def test_a_fork_has_the_files_of_its_parent_and_its_own_from_then_on(world):
    await world.execute("echo one > /tmp/kept; echo two > /tmp/removed; mkdir -p /tmp/dir/old")
    first, second = await world.fork(2)
    try:
        await first.execute("rm /tmp/removed; rm -r /tmp/dir; mkdir /tmp/dir; echo more >> /tmp/kept")
        assert (
            await first.execute("cat /tmp/kept; ls /tmp /tmp/dir")
        ).stdout == b"one\nmore\n/tmp:\ndir\nkept\n\n/tmp/dir:\n"
        for other in (world, second):
            assert (await other.execute("cat /tmp/kept /tmp/removed; ls /tmp/dir")).stdout == b"one\ntwo\nold\n"
        assert first.limits == world.limits
    finally:
        await asyncio.gather(first.stop(), second.stop())


def test_a_layer_that_its_owner_removes_is_no_error_of_a_sweep(tmp_path):
    assert not layers._is_free(tmp_path / "removed")


async def test_a_snapshot_outlives_its_world():
    async with World(limits=SMALL) as first:
        await first.execute("echo kept > /tmp/file")
        image = await first.snapshot()
    for _ in range(2):
        async with World(image, limits=SMALL) as later:
            assert (await later.execute("cat /tmp/file; rm /tmp/file")).stdout == b"kept\n"


async def test_programs_go_on_when_their_files_are_copied(world):
    await world.execute(
        "echo on > /tmp/a; ln /tmp/a /tmp/b; ln -s a /tmp/c; mkfifo /tmp/d; chmod 600 /tmp/a; rm -f /etc/group; "
        "rm -r /var/tmp; mkdir /var/tmp; (sleep 1000 &)"
    )
    image = await world.snapshot(keep_programs=True)
    look = "cat /tmp/a; stat -c '%h %a %F' /tmp/*; test -e /etc/group || echo gone"
    async with World(image, limits=SMALL) as copy:
        copied = await copy.execute(look)
        assert copied.stdout == (await world.execute(look)).stdout
        assert b"2 600 regular file" in copied.stdout
        assert not await sleeping(copy)
    assert await sleeping(world)


async def test_a_snapshot_ends_programs_only_if_none_is_waited_for(world):
    started = asyncio.ensure_future(world.execute("touch /tmp/on; sleep 1000"))
    while (await world.execute("test -e /tmp/on")).exit_code:
        pass
    with pytest.raises(SandboxError, match="keep_programs=True"):
        await world.snapshot()
    started.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await started


@pytest.mark.parametrize("keep_programs", [False, True])
@pytest.mark.parametrize("pauses", range(5))
async def test_a_world_may_be_stopped_while_its_snapshot_is_taken(world, keep_programs, pauses):
    taking = asyncio.ensure_future(world.snapshot(keep_programs=keep_programs))
    for _ in range(pauses):
        await asyncio.sleep(0)
    stopping = asyncio.gather(world.stop(), world.stop())
    with contextlib.suppress(SandboxError):
        await taking
    await stopping
    with pytest.raises(SandboxError, match="not running"):
        await world.execute("true")


async def test_a_snapshot_that_the_kernel_could_not_mount_is_refused_and_the_world_goes_on(world, monkeypatch):
    monkeypatch.setattr("strands_env.sandbox.world.OPTIONS_BYTES", 30)
    await world.snapshot()
    await world.execute("(sleep 1000 &); echo kept > /tmp/file; until grep -qs sleep /proc/[0-9]*/comm; do :; done")
    with pytest.raises(SandboxError, match="does not mount 3 layers"):
        await world.snapshot()
    assert (await world.execute("cat /tmp/file; grep -h sleep /proc/[0-9]*/comm")).stdout == b"kept\nsleep\n"


IN_THE_WAY = [
    "rm -rf /tmp; ln -s /nothing /tmp",
    "rm -rf /var; echo > /var",
    "rm -f /etc/resolv.conf; mkdir -p /etc/resolv.conf/folder",
]


@pytest.mark.parametrize("change", IN_THE_WAY)
async def test_a_world_continues_after_a_snapshot_whatever_its_programs_have_put_anywhere(world, change):
    await world.execute(change)
    await world.snapshot()
    assert (await world.execute("echo alive")).stdout == b"alive\n"


async def test_many_snapshots_one_above_the_other(world):
    for number in range(40):
        await world.execute(f"echo {number} > /tmp/{number}; rm -f /tmp/{number - 2}")
        await world.snapshot()
    assert (await world.execute("ls /tmp")).stdout == b"38\n39\n"


# --- ends ---


async def test_a_world_that_ended_says_so(world):
    for kill in ("kill -9 -1", "kill -9 1"):
        await world.execute(kill)
    assert (await world.execute("echo alive")).stdout == b"alive\n"
    await world.stop()
    with pytest.raises(SandboxError, match="not running"):
        await world.execute("true")


async def test_a_first_process_that_is_killed_is_a_failure_of_the_machine(world):
    waiting = asyncio.ensure_future(world.execute("sleep 1000"))
    while not any("sleep" in command for command in running(os.getpid()).values()):
        await asyncio.sleep(0.01)
    first = first_process()
    os.kill(first, signal.SIGKILL)
    with pytest.raises(SandboxError, match="first process ended"):
        await waiting
    with pytest.raises(SandboxError):
        await world.execute("true")


async def test_a_first_process_that_fails_later_does_not_say_that_the_machine_starts_no_world(world):
    await world.execute("true")
    first = first_process()
    resource.prlimit(first, resource.RLIMIT_NOFILE, (0, 0))
    with pytest.raises(SandboxError, match="the world's first process failed: .*Too many open files") as raised:
        await world.execute("true")
    assert type(raised.value) is SandboxError


async def test_a_killed_starter_is_replaced():
    from support.processes import starters

    async with World(limits=SMALL) as first:
        (starter,) = starters(os.getpid()) - set(running(os.getpid()))
        os.kill(starter, signal.SIGKILL)
        assert (await first.execute("echo alive")).stdout == b"alive\n"
        async with World(limits=SMALL) as second:
            assert (await second.execute("echo alive")).stdout == b"alive\n"


def start_and_stop():
    """Start and stop a world in another process."""
    code = dedent("""
        import asyncio
        from strands_env.sandbox import World
        async def main():
            async with World(): pass
        asyncio.run(main())
    """)
    subprocess.run([sys.executable, "-c", code], env=with_package(), check=True)


def test_a_world_ends_with_its_owner_however_that_ends(folder):
    code = dedent("""
        import asyncio, sys
        from strands_env.sandbox import World
        async def main():
            world = await World().start()
            await world.execute("setsid sleep 1000 & echo on > /tmp/file")
            image = await world.snapshot()
            (other,) = await world.fork(1)
            print("ready", flush=True)
            await other.execute("sleep 1000")
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", code], env=with_package(), stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        owner.kill()
    deadline = time.monotonic() + 60
    while running(owner.pid):
        assert time.monotonic() < deadline
    assert str(folder) not in Path("/proc/mounts").read_text()
    start_and_stop()
    assert set(os.listdir(folder / "worlds")) == {"lock"}


def test_what_a_process_still_claims_is_not_swept(folder):
    async def main():
        async with World() as world:
            await world.execute("echo kept > /tmp/file")
            start_and_stop()
            assert (await world.execute("cat /tmp/file")).stdout == b"kept\n"

    asyncio.run(main())


async def test_a_cancelled_start_leaves_nothing():
    for after in (0.0, 0.001, 0.005, 0.01, 0.02):
        starting = asyncio.ensure_future(World(limits=SMALL).start())
        await asyncio.sleep(after)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await starting).stop()


async def test_a_start_that_no_one_waits_for_disturbs_no_other(monkeypatch):
    def start(config, control, layers):
        gone, abandoned = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        gone.close()
        with abandoned:
            original(config, abandoned, layers)
        original(config, control, layers)

    original = starting.STARTER.start
    monkeypatch.setattr(starting.STARTER, "start", start)
    for _ in range(3):
        async with World(limits=SMALL) as world:
            assert (await world.execute("echo here")).stdout == b"here\n"


# --- refusals ---


async def test_another_loop_may_not_use_a_world(world):
    def elsewhere():
        with pytest.raises(SandboxError, match="event loop"):
            asyncio.run(world.execute("true"))

    await asyncio.get_running_loop().run_in_executor(None, elsewhere)


async def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    open_to_all = folder / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setenv("STRANDS_ENV_WORLDS", str(open_to_all))
    with pytest.raises(SandboxError, match="STRANDS_ENV_WORLDS"):
        await World().start()
    open_to_all.rmdir()


@pytest.mark.skipif(not IS_ROOT, reason="an ordinary user's worlds have one user")
async def test_programs_run_as_users_of_the_world(world):
    await world.execute(
        "echo 'agent:x:1000:1000::/home/agent:/bin/sh' >> /etc/passwd; echo 'team:x:7:agent' >> /etc/group"
    )
    ran = await world.execute("id -u; id -G; echo $HOME; cat ~root/x; touch /etc/x", user="agent")
    assert ran.stdout == b"1000\n1000 7\n/home/agent\n" and b"ermission denied" in ran.stderr
    assert (await world.execute("id -u; id -g", user="5:7")).stdout == b"5\n7\n"
    unknown = await world.execute("id", user="unknown")
    assert unknown.exit_code == 126 and b"no user unknown" in unknown.stderr


def test_everything_holds_for_an_ordinary_user(folder):
    """The same tests, in another process, as a user without privileges and without subordinate ids."""
    if not IS_ROOT:
        pytest.skip("already one")
    with tempfile.TemporaryDirectory() as made:
        shutil.copytree(Path(strands_env.__file__).parent, f"{made}/strands_env")
        for path in (Path(made), *Path(made).rglob("*")):
            path.chmod(0o755)
        code = dedent("""
            import asyncio, sys, types
            package = types.ModuleType("strands_env"); package.__path__ = [sys.argv[1] + "/strands_env"]
            sys.modules["strands_env"] = package
            from strands_env.sandbox import SandboxUnavailableError, World
            async def main():
                async with World() as world:
                    await world.execute("touch /x; chown 5:5 /x; mknod /y c 1 3; setpriv --reuid 5 true")
                    ran = await world.execute("id -u; kill -9 1; mount -t tmpfs x /tmp; unshare -U true")
                    print(ran.stdout, ran.exit_code)
                    try:
                        await world.execute("id", user="daemon")
                    except SandboxUnavailableError as error:
                        print(error)
                    await world.write("/d/file", b"content")
                    (fork,) = await world.fork(1)
                    print(await fork.read("/d/file"))
                    image = await fork.snapshot(keep_programs=True)
                    await fork.stop()
                    async with World(image) as copy:
                        late = await copy.execute("sleep 9", timeout_s=0.1)
                        print((await copy.execute("cat /d/file")).stdout, late.ended)
            asyncio.run(main())
        """)
        user = ("setpriv", "--reuid=12345", "--regid=12345", "--clear-groups")
        home = {"PATH": os.environ["PATH"], "STRANDS_ENV_WORLDS": f"/tmp/strands-env-test-{os.getpid()}"}
        ran = subprocess.run(
            [*user, "/usr/bin/python3", "-B", "-c", code, made], capture_output=True, text=True, env=home, cwd=made
        )
        shutil.rmtree(home["STRANDS_ENV_WORLDS"], ignore_errors=True)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0, ran
    assert lines[0] == "b'0\\n' 1"
    assert "single user, root" in lines[1]
    assert lines[2:] == ["b'content'", "b'content' timeout"]


def test_without_namespaces_the_error_says_what_was_refused():
    if not IS_ROOT or available_modes()["namespaces"] is not None:
        pytest.skip("needs root and namespaces")
    code = "import asyncio\nfrom strands_env.sandbox import World\nasyncio.run(World().start())\n"
    limited = ["unshare", "-U", "-r", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"', "sh"]
    ran = subprocess.run([*limited, sys.executable, "-c", code], env=with_package(), capture_output=True, text=True)
    assert ran.returncode == 1
    assert "SandboxUnavailableError: this machine starts no world: [Errno 28] clone" in ran.stderr
