"""Hostile programs: the sandbox ends each of them as documented, and nothing of them is left."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from textwrap import dedent as program

import pytest

import strands_env.sandbox
from strands_env.sandbox import (
    MODES,
    PythonSandbox,
    SandboxError,
    SandboxLimits,
    SandboxUnavailableError,
    World,
    available_modes,
)
from strands_env.sandbox.inside.members import OfUser
from strands_env.sandbox.layers import users
from support.processes import has_ended, running

SYSTEM_PYTHON = "/usr/bin/python3"  # on most machines, every user may run it
SMALL = SandboxLimits(  # in time that a busy machine has, too
    wall_s=60, cpu_s=20, memory_bytes=300 << 20, disk_bytes=8 << 20, processes=24, open_files=64, output_bytes=10_000
)


def python_for(mode):
    """Return an interpreter that works in a mode; None if the mode does not work on this machine."""
    for python in (sys.executable, SYSTEM_PYTHON):
        if os.path.exists(python) and available_modes(python)[mode] is None:  # type: ignore[index]
            return python
    return None


@pytest.fixture(params=MODES)
def mode(request):
    if python_for(request.param) is None:
        pytest.skip(f"{request.param}: {available_modes()[request.param]}")
    return request.param


in_namespaces = pytest.mark.parametrize("mode", ["namespaces"], indirect=True)
as_another_user = pytest.mark.parametrize("mode", ["uid"], indirect=True)


def sandbox_in(mode, limits=SMALL):
    return PythonSandbox(limits, mode=mode, python=python_for(mode))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path_factory):
    """Provide the folder of this test's sandboxes; at the end, check that no files and no processes are left."""
    tmp_path_factory.getbasetemp()  # pytest's own folder stays where it is
    folder = tempfile.mkdtemp(prefix="test-sandbox-")
    os.chmod(folder, 0o755)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield folder
    deadline = time.monotonic() + 60
    while left := running(os.getpid()):
        assert time.monotonic() < deadline, left
    worlds = f"{folder}/strands-env-{os.geteuid()}"
    with contextlib.suppress(FileNotFoundError):
        assert set(os.listdir(worlds)) <= {"lock"}
        shutil.rmtree(worlds)
    os.rmdir(folder)


# --- harmless programs ---


async def test_a_run_returns_the_output_and_the_exit_code(mode):
    ran = await sandbox_in(mode).run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(3)")
    assert (ran.output, ran.ended, ran.exit_code) == ("out\nerr\n", "exited", 3)


@as_another_user
async def test_a_run_as_another_user_has_a_user_of_its_own(mode):
    sandbox = sandbox_in(mode)
    ran = await asyncio.gather(*(sandbox.run("import os; print(os.getuid())") for _ in range(4)))
    used = {int(one.output) for one in ran}
    first, count = users()
    assert len(used) == 4 and min(used) >= first + count // 2  # the first half is for worlds in namespaces


@as_another_user
def test_a_program_that_does_not_run_yet_is_not_ended(mode):
    user = users()[0] + 1
    became, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setresuid(user, user, user)  # until it runs a program, no one may inspect it
        os.write(became[1], b"+")
        os.read(go[0], 1)
        os._exit(7)
    os.read(became[0], 1)
    OfUser(user, "/tmp", user + 1).usage([pid], time.monotonic() + 60, 0)
    os.write(go[1], b"+")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    for end in (*became, *go):
        os.close(end)


async def test_an_error_shows_its_traceback(mode):
    ran = await sandbox_in(mode).run("1 / 0")
    assert ran.exit_code == 1
    assert "ZeroDivisionError" in ran.output and 'main.py", line 1' in ran.output


async def test_home_and_temporary_files_may_be_written(mode):
    ran = await sandbox_in(mode).run(
        "import os\nopen(os.path.expanduser('~/x'), 'w')\nprint(os.environ.get('TMPDIR', '/tmp') == os.getcwd())"
    )
    assert ran.output == "True\n"


async def test_each_run_has_an_empty_folder(mode):
    sandbox = sandbox_in(mode)
    code = (
        "import os\nprint(os.path.exists('kept'))\nopen('kept', 'w').write('x' * 1000)\nprint(os.path.getsize('kept'))"
    )
    assert [(await sandbox.run(code)).output for _ in range(2)] == ["False\n1000\n"] * 2


async def test_processes_and_shared_memory_work(mode):
    ran = await sandbox_in(mode).run(
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "        print(sum(pool.map(abs, range(-10, 0))))"
    )
    assert ran.output == "55\n"


async def test_standard_input_is_empty(mode):
    ran = await sandbox_in(mode).run("import sys\nprint(repr(sys.stdin.read()))\ninput()")
    assert ran.output.startswith("''\n") and "EOFError" in ran.output


async def test_output_that_is_not_utf8_is_replaced(mode):
    ran = await sandbox_in(mode).run(r"import os; os.write(1, b'a\xff\xfe\x00b')")
    assert ran.output == "a\ufffd\ufffd\x00b"


async def test_the_source_may_contain_any_characters(mode):
    ran = await sandbox_in(mode).run("print('\u00e9\U0001f600'); print(ascii('''\ud800'''))")
    assert ran.output == "\u00e9\U0001f600\n'?'\n"


async def test_a_huge_source_is_rejected_before_it_runs(mode):
    with pytest.raises(ValueError, match="but source_bytes allows"):
        await sandbox_in(mode).run("#" * (SMALL.source_bytes + 1))


async def test_invalid_source_is_an_error_of_the_program(mode):
    for source in ("(" * 5_000, "-" * 50_000 + "1", "\0", "def f(:", ""):
        assert (await sandbox_in(mode).run(source)).ended in ("exited", "output")


# --- limits ---


async def test_a_program_that_never_ends_is_ended(mode):
    limits = SandboxLimits(wall_s=4)  # a busy machine takes a while to start it
    ran = await sandbox_in(mode, limits).run("import time\nprint('began')\ntime.sleep(1000)")
    assert (ran.ended, ran.exit_code, ran.output) == ("timeout", None, "began\n")


async def test_a_program_that_ignores_signals_is_ended(mode):
    ignoring = program("""
        import signal
        for number in signal.valid_signals():
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: pass
    """)
    assert (await sandbox_in(mode, SandboxLimits(wall_s=0.5)).run(ignoring)).ended == "timeout"


async def test_cpu_time_is_limited(mode):
    ran = await sandbox_in(mode, SandboxLimits(wall_s=120, cpu_s=1)).run("while True: pass")
    assert (ran.ended, ran.exit_code) == ("exited", -signal.SIGKILL)


async def test_a_too_large_allocation_is_a_memory_error(mode):
    limits = SandboxLimits(address_space_bytes=500 << 20)
    ran = await sandbox_in(mode, limits).run("x = bytearray(2 << 30)")
    assert ran.exit_code == 1 and "MemoryError" in ran.output


async def test_a_program_that_fills_the_memory_is_ended(mode):
    ran = await sandbox_in(mode).run("x = []\nwhile True: x.append(bytearray(b'1' * (1 << 20)))")
    assert ran.ended == "memory"


async def test_processes_that_together_fill_the_memory_are_ended(mode):
    ran = await sandbox_in(mode).run(
        program("""
        import os, time
        for _ in range(12):
            if os.fork() == 0:
                x = bytearray(b'1' * (60 << 20))
                time.sleep(100)
        time.sleep(100)
    """)
    )
    assert ran.ended == "memory"


HIDE = {
    "given back": "m.madvise(mmap.MADV_DONTNEED)",
    "of a dead child": "os.wait()",
}


@pytest.mark.parametrize("way", HIDE)
async def test_shared_memory_counts_that_no_process_has_in_its_pages(mode, way):
    source = program(f"""
        import mmap, os
        kept = []
        for _ in range(20):
            m = mmap.mmap(-1, 40 << 20)
            kept.append(m)
            if {way == "given back"} or os.fork() == 0:
                for _ in range(40):
                    m.write(b"x" * (1 << 20))
                {way == "given back"} or os._exit(0)
            {HIDE[way]}
        while True:
            pass
    """)
    ran = await sandbox_in(mode).run(source)
    assert ran.ended == "memory"


MANY = {
    "shared": "[mmap.mmap(-1, 4096) for _ in range(2_500)]",
    "private": "[mmap.mmap(-1, 4096, flags=34, prot=1 + 2 * (n % 2)) for n in range(9_500)]",  # no two merge
}


@pytest.mark.parametrize("kind", MANY)
async def test_memory_in_too_many_pieces_to_count_is_too_much(mode, kind):
    # To look at each took so long that a program could take any memory, and run beyond its time limit.
    source = program(f"""
        import mmap, os, time
        kept = {MANY[kind]}
        for _ in range(22):
            if os.fork() == 0: break
        time.sleep(100)
    """)
    ran = await sandbox_in(mode, replace(SMALL, memory_bytes=2 << 30)).run(source)
    assert ran.ended == "memory"


async def test_a_process_counts_whose_first_thread_ended(mode):
    source = program("""
        import ctypes, os, threading, time
        def hold():
            while 'zombie' not in open('/proc/self/status').read(): pass
            x = bytearray(b'1' * (400 << 20))
            time.sleep(100)
        if os.fork() == 0:
            threading.Thread(target=hold).start()
            ctypes.CDLL(None).syscall({"x86_64": 60}.get(os.uname().machine, 93), 0)
        time.sleep(100)
    """)
    assert (await sandbox_in(mode).run(source)).ended == "memory"


async def test_more_open_files_than_can_be_counted_are_too_much(mode, monkeypatch):
    # To look at each took so long that a program could take any memory, and run beyond its time limit.
    source = program("""
        import os, time
        kept = [os.dup(0) for _ in range(6_000)]
        for _ in range(20):
            if os.fork() == 0: break
        time.sleep(100)
    """)
    ran = await sandbox_in(mode, replace(SMALL, memory_bytes=2 << 30, open_files=8_000)).run(source)
    assert ran.ended == "memory"


OUTSIDE = {
    "files in memory": """
        for n in range(10):
            with open(f'/dev/shm/{n}', 'wb') as file:
                for _ in range(30): file.write(b'x' * (1 << 20))
        time.sleep(100)
    """,
    "a segment without a process": """
        libc = ctypes.CDLL(None)
        libc.shmat.restype = ctypes.c_void_p
        while True:
            place = libc.shmat(libc.shmget(0, 40 << 20, 0o1600), None, 0)
            ctypes.memset(place, 1, 40 << 20)
            libc.shmdt(ctypes.c_void_p(place))
    """,
}


@pytest.mark.parametrize("kind", OUTSIDE)
@in_namespaces
async def test_memory_outside_processes_counts_in_a_world(mode, kind):
    limits = replace(SMALL, disk_bytes=1 << 30)
    ran = await sandbox_in(mode, limits).run("import ctypes, time\n" + program(OUTSIDE[kind]))
    assert ran.ended == "memory" or ran.exit_code not in (0, None)


async def test_mapped_files_in_memory_count_once(mode):
    limits = replace(SMALL, disk_bytes=1 << 30)
    ran = await sandbox_in(mode, limits).run(
        program("""
        import mmap, os, time
        name = f'/dev/shm/held-{os.getpid()}'
        for is_deleted in (False, True):
            with open(name, 'w+b') as file:
                file.truncate(180 << 20)
                if is_deleted: os.unlink(name)
                held = mmap.mmap(file.fileno(), 0)
                for place in range(0, len(held), 4096): held[place] = 1
            time.sleep(0.3)
            held.close()
        print('done')
    """)
    )
    assert ran.output == "done\n"


async def test_files_in_shared_memory_may_vanish_while_they_are_counted(mode):
    ran = await sandbox_in(mode).run(
        program("""
        import os, time
        names = [f'/dev/shm/vanishing-{os.getpid()}-{n}' for n in range(50)]
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            for name in names: open(name, 'w').close()
            for name in names: os.unlink(name)
        print('done')
    """)
    )
    assert ran.output == "done\n"


@as_another_user
async def test_no_memory_exists_outside_processes_of_another_user(mode):
    # It would count neither for a process nor for a file, and shared segments outlive all processes.
    ran = await sandbox_in(mode).run(
        program("""
        import ctypes, os
        try:
            file = os.memfd_create('held')
            print('file', os.write(file, b'x' * 4096))
        except OSError as error:
            print('no file', error.strerror)
        libc = ctypes.CDLL(None, use_errno=True)
        for name, size in (('shmget', [4096]), ('msgget', []), ('semget', [1])):
            print(getattr(libc, name)(0, *size, 0o1600), os.strerror(ctypes.get_errno()))
    """)
    )
    assert ran.output.splitlines() == ["no file Operation not permitted", *["-1 Operation not permitted"] * 3]


async def test_one_file_cannot_fill_the_disk(mode):
    ran = await sandbox_in(mode).run("with open('big', 'wb') as f:\n    while True: f.write(b'x' * 65536); f.flush()")
    assert ran.ended == "disk" or "OSError" in ran.output or ran.exit_code == -signal.SIGXFSZ


async def test_many_files_cannot_fill_the_disk(mode):
    ran = await sandbox_in(mode).run(
        program("""
        import itertools
        for n in itertools.count():
            with open(f'f{n}', 'wb') as f: f.write(b'x' * (1 << 20))
    """)
    )
    assert ran.ended == "disk" or "No space left" in ran.output


async def test_empty_files_and_folders_cannot_fill_the_disk(mode):
    ran = await sandbox_in(mode, SandboxLimits(wall_s=20, disk_bytes=4 << 20)).run(
        "import itertools, os\nfor n in itertools.count(): os.mkdir(f'd{n}')"
    )
    assert ran.ended == "disk" or "No space left" in ran.output


async def test_folders_nested_deeper_than_python_recurses_are_removed(mode):
    ran = await sandbox_in(mode).run(
        "import os\nfor _ in range(1100):\n    os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)\nprint('deep')"
    )
    assert ran.output == "deep\n"


async def test_endless_output_is_cut_off_and_ends_the_program(mode):
    ran = await sandbox_in(mode).run("while True: print('y' * 1000)")
    assert (ran.ended, len(ran.output)) == ("output", SMALL.output_bytes)


async def test_a_fork_bomb_is_ended(mode):
    ran = await sandbox_in(mode, SandboxLimits(wall_s=2, processes=24)).run(
        program("""
        import os
        while True:
            try: os.fork()
            except OSError: pass
    """)
    )
    assert ran.ended in ("timeout", "processes")


async def test_the_number_of_processes_is_limited(mode):
    ran = await sandbox_in(mode).run(
        program("""
        import os, time
        n = 0
        try:
            while True:
                if os.fork() == 0: time.sleep(100)
                n += 1
        except OSError: print(n)
    """)
    )
    assert 8 <= int(ran.output) < 24


async def test_open_files_are_limited(mode):
    ran = await sandbox_in(mode).run("x = [open('main.py') for _ in range(100)]")
    assert "Too many open files" in ran.output


async def test_files_in_shared_memory_count_and_are_removed(mode):
    shared = Path(tempfile.mkdtemp(prefix="test-sandbox-", dir="/dev/shm"))
    shared.chmod(0o1777)
    code = program(f"""
        import os
        for folder in ('/dev/shm', {str(shared)!r}):
            if os.path.exists(folder):
                open(f'{{folder}}/{shared.name}-left', 'w').close()
        print('written')
        while True:
            with open('/dev/shm/{shared.name}-big', 'ab') as f: f.write(b'x' * (1 << 20))
    """)
    try:
        ran = await sandbox_in(mode).run(code)
        assert ran.output.startswith("written\n")
        assert ran.ended == "memory" or "No space left" in ran.output or "File too large" in ran.output
        assert not [*shared.iterdir(), *Path("/dev/shm").glob(f"{shared.name}-*")]
    finally:
        shutil.rmtree(shared)


async def test_deleted_open_files_count_as_disk_space(mode):
    ran = await sandbox_in(mode, SandboxLimits(wall_s=60, disk_bytes=8 << 20)).run(
        program("""
        import os, time
        files = []
        for n in range(8):
            files.append(open('f', 'wb')); os.unlink('f')
            files[-1].write(b'x' * (2 << 20)); files[-1].flush()
        time.sleep(100)
    """)
    )
    assert ran.ended == "disk" or "No space left" in ran.output


# --- memory outside processes ---


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM", "SOCK_SEQPACKET"])
async def test_buffers_of_sockets_count_as_memory(mode, kind):
    if mode == "uid" and kind == "SOCK_DGRAM":
        kind = "SOCK_STREAM"  # datagram sockets could reach other processes, so there are none
    ran = await sandbox_in(mode).run(
        program(f"""
        import os, socket, time
        for _ in range(16):
            if os.fork() == 0:
                keep, full = [], b'x' * 65536
                for _ in range(24):
                    keep.append(socket.socketpair(socket.AF_UNIX, socket.{kind}))
                    for end in keep[-1]:
                        end.setblocking(False)
                        try:
                            while True: end.send(full)
                        except OSError: pass
                time.sleep(100)
        time.sleep(100)
    """)
    )
    assert ran.ended == "memory"


@in_namespaces
async def test_a_tcp_socket_has_no_more_than_it_counts_for(mode):
    ran = await sandbox_in(mode).run(
        program("""
        import socket
        with socket.create_server(('127.0.0.1', 0)) as server:
            ends = [socket.create_connection(server.getsockname()), server.accept()[0]]
        ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        ends[0].settimeout(0.5)
        sent = 0
        try:
            while True: sent += ends[0].send(b'x' * 65536)
        except TimeoutError: print(sent < 4 * 212_992)
    """)
    )
    assert ran.output == "True\n"


@in_namespaces
async def test_sockets_in_transit_count_as_memory(mode):
    limits = SandboxLimits(wall_s=60, memory_bytes=48 << 20)
    ran = await sandbox_in(mode, limits).run(
        program("""
        import array, os, socket, time
        keep = []
        for _ in range(10):
            way, back = socket.socketpair()
            keep += [way, back]
            for _ in range(10):
                a, b = socket.socketpair()
                a.setblocking(False)
                try:
                    while True: a.send(b'x' * 65536)
                except OSError: pass
                files = array.array('i', [a.fileno(), b.fileno()])
                way.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
                a.close(); b.close()
        time.sleep(100)
    """)
    )
    assert ran.ended == "memory"


async def test_pipes_and_page_tables_count_as_memory(mode):
    pipes = """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                for _ in range(120):
                    reads, writes = os.pipe()
                    os.set_blocking(writes, False)
                    os.write(writes, b'x' * 65536)
                time.sleep(100)
        time.sleep(100)
    """
    tables = """
        import mmap, os, time
        for _ in range(8):
            if os.fork() == 0:
                space = mmap.mmap(-1, 3 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                for place in range(0, 3 << 30, 2 << 20): space[place]
                time.sleep(100)
        time.sleep(100)
    """
    for source in (pipes, tables):  # each of 48 MB or more, while the processes have less than 60
        limits = SandboxLimits(wall_s=60, memory_bytes=80 << 20)
        ran = await sandbox_in(mode, limits).run(program(source))
        assert ran.ended == "memory", (ran, source)


IN_A_WORLD = ["vmsplice", "tee", "larger pipes", "io_uring", "memfd", "a thread's own files", "files apart"]
OUTSIDE_A_WORLD = ["splice", "sendfile", "inotify", "larger buffers", "landlock", "filters", "names of memory"]
UNCOUNTABLE = {"namespaces": IN_A_WORLD, "uid": IN_A_WORLD + OUTSIDE_A_WORLD}


async def test_uncountable_memory_is_denied(mode):
    ran = await sandbox_in(mode).run(
        f"names = {UNCOUNTABLE[mode]}\n"
        + program("""
        import ctypes, fcntl, os, platform, socket
        libc = ctypes.CDLL(None, use_errno=True)
        reads, writes = os.pipe()
        file = open('main.py')
        class Iovec(ctypes.Structure):
            _fields_ = [('base', ctypes.c_char_p), ('length', ctypes.c_size_t)]
        calls = {
            'vmsplice': lambda: libc.vmsplice(writes, ctypes.byref(Iovec(b'x' * 4096, 4096)), 1, 0),
            'tee': lambda: libc.tee(reads, writes, 1, 0),
            'splice': lambda: libc.splice(file.fileno(), None, writes, None, 1, 0),
            'sendfile': lambda: libc.sendfile(writes, file.fileno(), None, 1),
            'inotify': lambda: libc.inotify_init1(0),
            'larger pipes': lambda: fcntl.fcntl(writes, 1031, 1 << 20),
            'larger buffers': lambda: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20),
            'io_uring': lambda: libc.syscall(425, 1, ctypes.create_string_buffer(256)),
            'landlock': lambda: libc.syscall(444, ctypes.byref(ctypes.c_uint64(1)), 8, 0),
            'filters': lambda: libc.prctl(22, 2, None, 0, 0),
            'memfd': lambda: os.memfd_create('on its way through a socket'),
            "a thread's own files": lambda: libc.syscall({'x86_64': 56}.get(os.uname().machine, 220), 0x10900, 0, 0),
            'files apart': lambda: libc.syscall(436, 500, 501, 2),
            'names of memory': lambda: libc.prctl(0x53564d41, 0, None, 0, b'x'),
        }
        for name in names:
            call = calls[name]
            try: result, error = call(), ctypes.get_errno()
            except OSError as raised: result, error = -1, raised.errno
            if (result, error) != (-1, 1): print(name, result, error)
        print('tried')
    """)
    )
    assert ran.output == "tried\n"


# --- what outlives the program ---


async def test_children_outside_the_process_group_are_ended(mode):
    ran = await sandbox_in(mode).run(
        program("""
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                os.closerange(0, 3)
                time.sleep(1000)
            os._exit(0)
        print('done')
    """)
    )
    assert (ran.output, ran.ended) == ("done\n", "exited")  # and `nothing_is_left`


async def test_children_with_open_output_do_not_delay_the_end(mode):
    code = "import os, time\nif os.fork() == 0: time.sleep(1000)\nprint('done')"
    ran = await sandbox_in(mode).run(code)
    assert (ran.output, ran.ended) == ("done\n", "exited")  # and not after its time


async def test_zombies_and_a_closed_output_are_harmless(mode):
    ran = await sandbox_in(mode).run(
        "import os\nfor _ in range(10):\n    if os.fork() == 0: os._exit(0)\nos.closerange(0, 3)\n"
        "import time; time.sleep(0.3); os._exit(5)"
    )
    assert (ran.output, ran.exit_code) == ("", 5)


async def test_a_cancelled_run_is_ended(mode, folders):
    sandbox = sandbox_in(mode)
    ran = asyncio.ensure_future(sandbox.run("import time\nwhile True: time.sleep(0.01)"))
    while len(running(os.getpid())) < 2:
        await asyncio.sleep(0.01)
    ran.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ran
    assert not running(os.getpid())


def test_nothing_is_left_when_the_caller_is_killed(mode, folders):
    code = (
        "import asyncio\nfrom strands_env.sandbox import PythonSandbox\n"
        f"box = PythonSandbox(mode={mode!r}, python={python_for(mode)!r})\n"
        "print('ready', flush=True)\n"
        "asyncio.run(box.run('import time; time.sleep(1000)'))"
    )
    package = str(Path(strands_env.sandbox.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": package, "TMPDIR": folders}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 30
        while len(running(owner.pid)) < 2:
            assert owner.poll() is None and time.monotonic() < deadline
        owner.kill()
    while running(owner.pid):
        assert time.monotonic() < deadline + 60
    subprocess.run([sys.executable, "-c", code.replace("time.sleep(1000)", "")], env=environment, check=True)
    assert set(os.listdir(f"{folders}/strands-env-{os.geteuid()}")) == {"lock"}


async def test_programs_do_not_block_the_event_loop(mode):
    sandbox = sandbox_in(mode)
    runs = asyncio.gather(*(sandbox.run(f"print({n})") for n in range(12)))
    ticks = 0
    while not runs.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert [ran.output for ran in runs.result()] == [f"{n}\n" for n in range(12)]
    assert ticks > 5


def test_a_sandbox_serves_event_loops_in_several_threads(mode):
    sandbox = sandbox_in(mode)
    outputs = []

    def work(n):
        outputs.append(asyncio.run(sandbox.run(f"print({n})")).output)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outputs) == ["0\n", "1\n", "2\n"]


# --- denied actions ---


async def test_a_program_cannot_signal_its_caller(mode):
    sandbox = sandbox_in(mode)
    other = asyncio.ensure_future(sandbox.run("import time; time.sleep(1.5); print('alive')"))
    ran = await sandbox.run(
        program(f"""
        import os, signal
        for target in ({os.getpid()}, os.getppid(), 1, -1, -{os.getpgrp()}):
            for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
                if target == -1:
                    continue
                try: os.kill(target, number)
                except OSError: pass
        print('tried')
    """)
    )
    assert (ran.output, ran.ended) == ("tried\n", "exited")
    assert (await other).output == "alive\n"


async def test_killing_all_processes_reaches_only_its_own(mode):
    sandbox = sandbox_in(mode)
    other = asyncio.ensure_future(sandbox.run("import time; time.sleep(1); print('alive')"))
    ran = await sandbox.run("import os, signal\ntry: os.kill(-1, signal.SIGKILL)\nexcept OSError: pass\nprint('x')")
    assert ran.ended == "exited"
    assert (await other).output == "alive\n"


async def test_the_environment_is_hidden(mode, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "open sesame")
    ran = await sandbox_in(mode).run("import os; print(dict(os.environ))")
    assert "sesame" not in ran.output


async def test_other_processes_cannot_be_inspected(mode, monkeypatch):
    with subprocess.Popen(["sleep", "100"], env={"SECRET_TOKEN": "open sesame"}) as owner:
        ran = await sandbox_in(mode).run(
            program("""
            import os
            for pid in os.listdir('/proc'):
                for name in ('environ', 'mem', 'maps', 'cwd', 'root', 'fd'):
                    if not pid.isdigit() or int(pid) == os.getpid(): continue
                    try:
                        path = f'/proc/{pid}/{name}'
                        what = open(path, 'rb').read() if name in ('environ', 'maps') else os.listdir(path)
                        if what: print(path, what)
                    except OSError: pass
            print('looked')
        """)
        )
        owner.kill()
    assert ran.output == "looked\n"


async def test_the_owners_files_cannot_be_read_or_written(mode, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("open sesame")
    secret.chmod(0o600)
    profile_of_root = os.path.expanduser("~root/.bashrc")
    folders = (sys.prefix, "/usr", "/etc", "/", str(Path(__file__).parent), str(tmp_path))
    ran = await sandbox_in(mode).run(
        program(f"""
        import os, sys
        for path in ({str(secret)!r}, '/etc/shadow', {profile_of_root!r}, os.path.expanduser('~root')):
            for flags in ('rb', 'ab'):
                try: print(open(path, flags).read())
                except OSError: pass
        for folder in {folders}:
            try: open(folder + '/made-in-the-sandbox', 'w').close()
            except OSError: pass
    """)
    )
    assert ran.output == ""
    assert not any(Path(folder, "made-in-the-sandbox").exists() for folder in folders)


@in_namespaces
async def test_namespaces_show_only_python_and_a_small_system(mode, folders):
    folder = Path(folders) / "data"
    folder.mkdir()
    file = folder / "data.txt"
    file.write_text("of the host")
    try:
        hidden = f"import os; print([os.path.exists(path) for path in ({folders!r}, '/home', '/proc/self')])"
        assert (await sandbox_in(mode).run(hidden)).output == "[False, False, True]\n"
        shown = PythonSandbox(SMALL, mode=mode, visible_paths=[folder])
        ran = await shown.run(f"print(open({str(file)!r}).read())\nopen({str(file)!r}, 'w')")
        assert ran.output.startswith("of the host\n") and "Read-only" in ran.output
    finally:
        shutil.rmtree(folder)


# --- what an interpreter reveals of its owner ---


def secret_in(folder):
    folder.mkdir(exist_ok=True)
    for path in (folder, *folder.parents):
        if path == Path("/tmp"):
            break
        path.chmod(0o755)
    secret = folder / ".env"
    secret.write_text("open sesame")
    return secret


def seen(secret, more=""):
    return f"try: print(open({str(secret)!r}).read())\nexcept OSError: print('hidden')\n{more}"


def virtual_environment(folder, base):
    subprocess.run([base, "-m", "venv", "--without-pip", "--symlinks", folder], check=True)
    return str(folder / "bin" / "python")


@pytest.fixture
def project(folders):
    """Provide a folder of the owner that all users of the machine may read."""
    folder = Path(folders) / "proj\u00e9ct"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


async def test_a_virtual_environment_hides_its_project(mode, project):
    python = virtual_environment(project, python_for(mode) or "")
    packages = next(project.glob("lib/python3*/site-packages"))
    (packages / "installed.py").write_text("print('imported')")
    (packages / "editable.pth").write_text(f"{project}/src\n")
    secret = secret_in(project)
    source = secret_in(project / "src")
    sandbox = PythonSandbox(SMALL, mode=mode, python=python)  # type: ignore[arg-type]
    for hidden in (secret, source):
        assert (await sandbox.run(seen(hidden, "import installed"))).output == "hidden\nimported\n"


async def test_another_interpreter_hides_the_current_folder(mode, project, monkeypatch):
    secret = secret_in(project)
    base = python_for(mode) or ""
    link, script = project / "linked", project / "wrapped"
    link.symlink_to(os.path.realpath(base))
    script.write_text(f'#!/bin/sh\nexec {base} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(project))
    with monkeypatch.context() as here:
        here.chdir(project)
        for python in (SYSTEM_PYTHON, str(link), "linked", str(script)):
            sandbox = PythonSandbox(SMALL, mode=mode, python=python)  # type: ignore[arg-type]
            assert (await sandbox.run(seen(secret))).output == "hidden\n", python


async def test_other_folders_under_usr_are_hidden(mode):
    if not os.access("/usr/src", os.W_OK):
        pytest.skip("needs root")
    folder = Path(tempfile.mkdtemp(prefix="test-sandbox-", dir="/usr/src"))
    try:
        assert (await sandbox_in(mode).run(seen(secret_in(folder)))).output == "hidden\n"
    finally:
        shutil.rmtree(folder)


# --- attacks on the watchers ---

ATTACKS = {
    "limits": """
        import os, resource, time
        for pid in {targets}:
            for what in ('NOFILE', 'AS', 'CPU', 'STACK', 'DATA', 'FSIZE', 'NPROC'):
                try: resource.prlimit(pid, getattr(resource, f'RLIMIT_{{what}}'), (0, 0))
                except OSError: pass
        time.sleep(0.5)
    """,
    "scheduling": """
        import os
        for pid in {targets}:
            for change in (lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
                           lambda: os.setpriority(os.PRIO_PROCESS, pid, 19)):
                try: change()
                except OSError: pass
    """,
    "signals": """
        import os, time
        for number in [*range(1, 9), *range(10, 32), 35, 64, 9]:
            for pid in {targets}:
                try: os.kill(pid, number)
                except OSError: pass
        time.sleep(0.5)
    """,
    "files": """
        import os
        for pid in {targets}:
            for n in range(64):
                try:
                    file = os.open(f'/proc/{{pid}}/fd/{{n}}', os.O_WRONLY | os.O_NONBLOCK)
                    os.write(file, b'{{"refused": "x"}}\\n[]\\nnoise')
                except OSError: pass
    """,
    "memory": """
        import ctypes
        libc = ctypes.CDLL(None)
        for pid in {targets}:
            libc.ptrace(16, pid, 0, 0)
            try: open(f'/proc/{{pid}}/mem', 'r+b').write(b'x')
            except OSError: pass
    """,
    "disk": """
        import os
        for name in os.listdir('.'): os.unlink(name) if os.path.isfile(name) else None
        try:
            with open('full', 'wb') as file:
                while True: file.write(b'x' * 65536)
        except OSError: pass
    """,
    "descriptors": """
        import os
        os.closerange(0, 256)
    """,
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
async def test_attacks_on_the_sandbox_are_ordinary_results(mode, name):
    code = "import os; ours = [os.getppid(), 1]\n"
    ran = await sandbox_in(mode, SandboxLimits(wall_s=5, disk_bytes=8 << 20)).run(
        code + program(ATTACKS[name]).format(targets="ours")
    )
    assert ran.ended  # a result, not an error


def test_namespaces_hold_without_privileges():
    programs = [program(text).format(targets="(1, os.getppid())") for text in ATTACKS.values()]
    programs = [f"import os\n{text}" for text in programs]
    count = (
        "import os, signal\nn = 0\ntry:\n    while True:\n        if os.fork() == 0: signal.pause()\n        n += 1\n"
    )
    programs.append("import os; print(os.getuid(), os.path.exists('/home'), os.listdir('/proc').count('1'))")
    programs.append(f"{count}except OSError: print(n < 64)")
    run_all = program("""
        import asyncio, dataclasses, json, sys
        from sandbox import PythonSandbox, SandboxLimits, available_modes
        why, ran = available_modes()["namespaces"], []
        if why is None:
            sandbox = PythonSandbox(SandboxLimits(wall_s=5, disk_bytes=8 << 20), mode="namespaces")
            for program in json.load(sys.stdin):
                try:
                    one = asyncio.run(sandbox.run(program))
                    ran.append({"ended": one.ended, "stdout": one.output})
                except Exception as error: ran.append({"error": repr(error)})
        print(json.dumps({"why": why, "ran": ran}))
    """)
    without_privileges = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    without_mounts = ("setpriv", "--bounding-set", "-sys_admin")  # as root in a plain container
    for user in (without_privileges, without_mounts) if os.geteuid() == 0 else ((),):
        with tempfile.TemporaryDirectory() as made:
            shutil.copytree(Path(strands_env.sandbox.__file__).parent, f"{made}/sandbox")
            for path in (Path(made), *Path(made).rglob("*")):
                path.chmod(0o755)
            asked = subprocess.run(
                [*user, SYSTEM_PYTHON, "-B", "-c", run_all],
                cwd=made, input=json.dumps(programs), capture_output=True, text=True, timeout=120,
            )  # fmt: skip
        assert asked.returncode == 0, asked
        report = json.loads(asked.stdout)
        if (why := report["why"]) is not None:
            assert "Operation not permitted" in why or "No space left" in why, (
                why
            )  # not because of a defect in the sandbox
            continue
        ran = report["ran"]
        assert all("ended" in one for one in ran), ran
        assert ran[-2]["stdout"] in ("0 False 1\n", "65534 False 1\n") and ran[-1]["stdout"] == "True\n", ran


@as_another_user
def test_a_program_cannot_stop_who_ends_it(mode, monkeypatch):
    first, count = users()
    programs = OfUser(first + 1, "/tmp", first + count - 1)
    reads, writes = os.pipe()
    program = os.fork()
    if program == 0:
        os.setresuid(first + 1, first + 1, first + 1)
        while True:
            os.kill(-1, signal.SIGSTOP)
            os.write(writes, b"+")
    kill = os.kill

    def late(pid, number):
        for _ in range(3):  # at least one round of the program's began in between
            os.read(reads, 1 << 16)
        kill(pid, number)

    ender = os.fork()
    if ender == 0:
        monkeypatch.setattr(os, "kill", late)
        programs.kill()
        os._exit(0)
    try:
        assert has_ended(ender)
        assert not programs.pids()
    finally:
        for pid in (ender, program):
            kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(reads)
        os.close(writes)


# --- resources shared with the machine ---


async def test_nothing_is_left_in_world_writable_folders(mode):
    outer = Path(tempfile.mkdtemp(prefix="test-sandbox-", dir="/var/tmp"))
    outer.chmod(0o755)
    public = outer / "public"
    public.mkdir()
    public.chmod(0o1777)
    (public / "log").write_text("")
    (public / "log").chmod(0o666)
    try:
        ran = await sandbox_in(mode).run(
            program(f"""
            for path in ({str(public / "left")!r}, {str(public / "log")!r}):
                try: open(path, 'a').write('left')
                except OSError: pass
            print('tried')
        """)
        )
        assert ran.output == "tried\n"
        assert [path.name for path in public.iterdir()] == ["log"] and (public / "log").read_text() == ""
    finally:
        shutil.rmtree(outer)


async def test_unix_sockets_of_the_machine_cannot_be_reached(mode, project):
    import socket

    paths = [f"\0{project}/stream", f"\0{project}/datagram", str(project / "s"), str(project / "d")]
    served = [socket.socket(socket.AF_UNIX, kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)] * 2
    served[2:] = [socket.socket(socket.AF_UNIX, kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
    for path, server in zip(paths, served, strict=True):
        server.bind(path)
        if not path.startswith("\0"):
            os.chmod(path, 0o777)
        if server.type == socket.SOCK_STREAM:
            server.listen()
        server.setblocking(False)
    ran = await sandbox_in(mode).run(
        program(f"""
        import socket
        for path in {paths!r}:
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                for make in (lambda: socket.socket(socket.AF_UNIX, kind), lambda: socket.socketpair(type=kind)[0]):
                    for reach in (lambda s: s.connect(path), lambda s: s.sendto(b'x', path),
                                  lambda s: s.sendmsg([b'x'], (), 0, path)):
                        try: reach(make()); print('reached', path)
                        except OSError: pass
    """)
    )
    assert ran.output == ""
    for server in served:
        with server, pytest.raises(BlockingIOError):
            server.accept() if server.type == socket.SOCK_STREAM else server.recv(1)


@in_namespaces
async def test_the_host_of_a_virtual_machine_cannot_be_reached(mode):
    for family in ("AF_VSOCK", "AF_PACKET"):  # the latter exists in every kernel
        ran = await sandbox_in(mode).run(f"import socket\nsocket.socket(socket.{family})")
        assert "Address family not supported" in ran.output


@as_another_user
async def test_a_world_without_namespaces_has_no_snapshots(mode):
    async with World(limits=SMALL, mode=mode) as world:
        await world.write("file", b"own")
        with pytest.raises(SandboxError, match="no snapshots"):
            await world.snapshot()
        assert await world.read("file") == b"own"


@as_another_user
async def test_a_link_leads_neither_to_a_file_of_the_machine_nor_to_a_new_one(mode, project):
    secret, new = project / "secret", project / "new"
    secret.write_text("of the owner")
    secret.chmod(0o600)
    async with World(limits=SMALL, mode=mode) as world:
        await world.write("a/file", b"own")
        assert await world.read("a/file") == b"own"
        await world.execute(f"ln -s {secret} secret; ln -s {new} new")
        with pytest.raises(PermissionError):
            await world.read("secret")
        with pytest.raises(PermissionError):
            await world.write("new", b"of a program")
        await world.put(secret, "copied/file")
        assert (await world.execute("cat copied/*")).exit_code == 0
        assert (await world.execute("true", script="new", stdin=b"of a program")).exit_code == 126
    assert not new.exists()


async def test_paths_may_contain_any_characters(mode, project, monkeypatch):
    python = virtual_environment(project / "a b\\\u00e9", python_for(mode) or "")
    shown = project / "\u00fc\udcfe \t"
    shown.mkdir()
    (shown / "data").write_text("of the host")
    folder = project / "tm\u00fc"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    sandbox = PythonSandbox(SMALL, mode=mode, python=python, visible_paths=[shown])  # type: ignore[arg-type]
    ran = await sandbox.run(
        f"import os, sys\nprint(open({str(shown / 'data')!r}).read(), sys.prefix != sys.base_prefix)"
    )
    assert ran.output == "of the host True\n"


# --- choice of the mode ---


def test_the_mode_is_logged_in_one_line(mode, caplog):
    caplog.set_level(logging.INFO, "strands_env")
    sandbox_in(mode)
    (line,) = caplog.records
    assert f"mode=<{mode}>" in line.message
    assert line.levelno == (logging.INFO if mode == "namespaces" else logging.WARNING)


def test_a_mode_that_does_not_work_is_an_error_before_anything_runs(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    for mode in MODES if os.geteuid() == 0 else ("namespaces",):
        with pytest.raises(SandboxUnavailableError, match=f"{mode}: .*{broken}"):
            PythonSandbox(python=str(broken), mode=mode)
    with pytest.raises(ValueError, match="mode='none' is not one of namespaces, uid"):
        PythonSandbox(mode="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="/does/not/exist does not exist"):
        PythonSandbox(visible_paths=["/does/not/exist"])


async def test_there_is_no_network(mode):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        port = server.getsockname()[1]
        datagrams.bind(("127.0.0.1", port))
        datagrams.setblocking(False)
        ran = await sandbox_in(mode).run(
            program(f"""
            import socket
            for family, address in ((socket.AF_INET, ('127.0.0.1', {port})), (socket.AF_INET6, ('::1', {port}))):
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
                    try:
                        s = socket.socket(family, kind); s.settimeout(1); s.connect(address); s.send(b'x')
                        if kind != socket.SOCK_DGRAM: print('connected', family, kind)
                    except OSError: pass
        """)
        )
        with pytest.raises(BlockingIOError):
            datagrams.recv(1)
    assert ran.output == ""


async def test_privileges_cannot_be_gained(mode):
    ran = await sandbox_in(mode).run(
        program("""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print([libc.unshare(flag) for flag in (0x10000000, 0x20000, 0x40000000)])
        print(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), libc.ptrace(16, 1, 0, 0))
        status = dict(line.split(':', 1) for line in open('/proc/self/status'))
        print(*(status[name].strip() for name in ('CapEff', 'CapPrm', 'NoNewPrivs', 'Seccomp')))
    """)
    )
    assert ran.output == "[-1, -1, -1]\n-1 -1\n" + "0" * 16 + " " + "0" * 16 + " 1 2\n"


async def test_the_callers_descriptors_are_closed(mode, tmp_path):
    descriptor = os.open(tmp_path / "open", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(descriptor, True)
    try:
        ran = await sandbox_in(mode).run("import os; print([n for n in os.listdir('/proc/self/fd')])")
    finally:
        os.close(descriptor)
    assert len(eval(ran.output)) <= 4  # the standard streams, and the listed folder


async def test_a_program_is_told_to_have_started_when_it_has_its_place():
    events = []
    sandbox = PythonSandbox(SMALL, max_concurrency=1)

    async def run(number):
        await sandbox.run("print(7)", started=lambda: events.append(f"starts {number}"))
        events.append(f"ended {number}")

    await asyncio.gather(*map(run, range(3)))
    assert events == [f"{what} {number}" for number in range(3) for what in ("starts", "ended")]
