"""Programs that want out: the sandbox ends each of them in a documented way, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import strands_env.sandbox
from strands_env.sandbox import (
    MODES,
    PythonSandbox,
    SandboxError,
    SandboxLimits,
    SandboxUnavailableError,
    available_modes,
)
from support.sandboxes import running

SYSTEM_PYTHON = "/usr/bin/python3"  # in most places every user may run it
SMALL = SandboxLimits(
    wall_s=8, cpu_s=4, memory_bytes=300 << 20, disk_bytes=8 << 20, processes=24, open_files=64, output_bytes=10_000
)
SAFE = ("namespaces", "uid")


def python_for(mode: str) -> str | None:
    """An interpreter that works in a mode; None if the mode does not work here."""
    for python in (sys.executable, SYSTEM_PYTHON):
        if os.path.exists(python) and available_modes(python)[mode] is None:  # type: ignore[index]
            return python
    return None


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    if python_for(request.param) is None:
        pytest.skip(f"{request.param}: {available_modes()[request.param]}")
    return request.param


@pytest.fixture
def safe_mode(mode: str) -> str:
    if mode not in SAFE:
        pytest.skip("not promised in this mode")
    return mode


def sandbox_in(mode: str, limits: SandboxLimits = SMALL) -> PythonSandbox:
    return PythonSandbox(limits, mode=mode, unsafe=True, python=python_for(mode))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where sandboxes of this test make their folders. After the test nothing is left, in there and of processes."""
    tmp_path_factory.getbasetemp()  # pytest's own folder stays where it is
    folder = tempfile.mkdtemp(prefix="test-sandbox-")
    os.chmod(folder, 0o755)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield folder
    deadline = time.monotonic() + 5
    while left := running(os.getpid(), folder):
        assert time.monotonic() < deadline, left
    os.rmdir(folder)


def program(text: str) -> str:
    return textwrap.dedent(text)


# --- programs that do no harm ---


async def test_what_a_program_prints_comes_back_with_its_exit_code(mode: str) -> None:
    ran = await sandbox_in(mode).run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(3)")
    assert (ran.output, ran.ended, ran.exit_code, ran.mode) == ("out\nerr\n", "exited", 3, mode)


async def test_an_error_shows_its_traceback(mode: str) -> None:
    ran = await sandbox_in(mode).run("1 / 0")
    assert ran.exit_code == 1
    assert "ZeroDivisionError" in ran.output and 'main.py", line 1' in ran.output


async def test_a_program_has_a_folder_for_files_and_starts_empty_each_time(mode: str) -> None:
    sandbox = sandbox_in(mode)
    code = (
        "import os\nprint(os.path.exists('kept'))\nopen('kept', 'w').write('x' * 1000)\nprint(os.path.getsize('kept'))"
    )
    assert [(await sandbox.run(code)).output for _ in range(2)] == ["False\n1000\n"] * 2


async def test_processes_of_a_program_and_shared_memory_work(mode: str) -> None:
    ran = await sandbox_in(mode).run(
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "        print(sum(pool.map(abs, range(-10, 0))))"
    )
    assert ran.output == "55\n"


async def test_there_is_no_input(mode: str) -> None:
    ran = await sandbox_in(mode).run("import sys\nprint(repr(sys.stdin.read()))\ninput()")
    assert ran.output.startswith("''\n") and "EOFError" in ran.output


async def test_output_that_is_not_utf8_is_replaced(mode: str) -> None:
    ran = await sandbox_in(mode).run(r"import os; os.write(1, b'a\xff\xfe\x00b')")
    assert ran.output == "a\ufffd\ufffd\x00b"


async def test_source_of_any_characters_arrives_as_it_is(mode: str) -> None:
    ran = await sandbox_in(mode).run("print('\u00e9\U0001f600'); print(ascii('''\ud800'''))")
    assert ran.output == "\u00e9\U0001f600\n'?'\n"


async def test_a_huge_source_is_refused_before_it_runs(mode: str) -> None:
    with pytest.raises(ValueError, match="bytes are|are allowed"):
        await sandbox_in(mode).run("#" * (SMALL.source_bytes + 1))


async def test_source_that_is_no_python_is_an_error_of_the_program(mode: str) -> None:
    for source in ("(" * 5_000, "-" * 50_000 + "1", "\0", "def f(:", ""):
        assert (await sandbox_in(mode).run(source)).ended in ("exited", "output")


# --- limits ---


async def test_a_program_that_never_ends_is_ended(mode: str) -> None:
    limits = SandboxLimits(wall_s=0.5)
    ran = await sandbox_in(mode, limits).run("import time\nprint('began')\ntime.sleep(1000)")
    assert (ran.ended, ran.exit_code, ran.output) == ("timeout", None, "began\n")


async def test_a_program_that_ignores_signals_is_ended(mode: str) -> None:
    ignoring = program("""
        import signal
        for number in signal.valid_signals():
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: pass
    """)
    assert (await sandbox_in(mode, SandboxLimits(wall_s=0.5)).run(ignoring)).ended == "timeout"


async def test_cpu_time_is_limited(mode: str) -> None:
    ran = await sandbox_in(mode, SandboxLimits(wall_s=20, cpu_s=1)).run("while True: pass")
    assert (ran.ended, ran.exit_code) == ("exited", -signal.SIGKILL)


async def test_one_process_that_wants_too_much_memory_gets_a_memory_error(mode: str) -> None:
    limits = SandboxLimits(address_space_bytes=500 << 20)
    ran = await sandbox_in(mode, limits).run("x = bytearray(2 << 30)")
    assert ran.exit_code == 1 and "MemoryError" in ran.output


async def test_a_program_that_fills_the_memory_is_ended(mode: str) -> None:
    ran = await sandbox_in(mode).run("x = []\nwhile True: x.append(bytearray(b'1' * (1 << 20)))")
    assert ran.ended == "memory"


async def test_processes_that_fill_the_memory_together_are_ended(mode: str) -> None:
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


async def test_there_is_no_memory_that_belongs_to_no_process(safe_mode: str) -> None:
    # Neither counted as a process's nor as a file's, and shared segments outlive all processes.
    ran = await sandbox_in(safe_mode).run(
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


async def test_the_disk_cannot_be_filled_by_one_file(mode: str) -> None:
    ran = await sandbox_in(mode).run("with open('big', 'wb') as f:\n    while True: f.write(b'x' * 65536); f.flush()")
    assert ran.ended == "disk" or "OSError" in ran.output or ran.exit_code == -signal.SIGXFSZ


async def test_the_disk_cannot_be_filled_by_many_files(mode: str) -> None:
    ran = await sandbox_in(mode).run(
        program("""
        import itertools
        for n in itertools.count():
            with open(f'f{n}', 'wb') as f: f.write(b'x' * (1 << 20))
    """)
    )
    assert ran.ended == "disk" or "No space left" in ran.output


async def test_the_disk_cannot_be_filled_by_empty_files_or_folders(mode: str) -> None:
    ran = await sandbox_in(mode, SandboxLimits(wall_s=20, disk_bytes=8 << 20)).run(
        "import itertools, os\nfor n in itertools.count(): os.mkdir(f'd{n}')"
    )
    assert ran.ended == "disk" or "No space left" in ran.output


async def test_folders_nested_deeper_than_python_recurses_are_removed(mode: str) -> None:
    ran = await sandbox_in(mode).run(
        "import os\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)\nprint('deep')"
    )
    assert ran.output == "deep\n"


async def test_endless_output_is_cut_and_ends_the_program(mode: str) -> None:
    ran = await sandbox_in(mode).run("while True: print('y' * 1000)")
    assert (ran.ended, len(ran.output)) == ("output", SMALL.output_bytes)


async def test_a_fork_bomb_comes_to_an_end(mode: str) -> None:
    ran = await sandbox_in(mode, SandboxLimits(wall_s=2, processes=24)).run(
        program("""
        import os
        while True:
            try: os.fork()
            except OSError: pass
    """)
    )
    assert ran.ended == ("processes" if mode == "unsafe" and os.geteuid() == 0 else "timeout")


async def test_a_program_has_no_more_processes_than_it_may(safe_mode: str) -> None:
    ran = await sandbox_in(safe_mode).run(
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


async def test_open_files_are_limited(mode: str) -> None:
    ran = await sandbox_in(mode).run("x = [open('main.py') for _ in range(100)]")
    assert "Too many open files" in ran.output


async def test_files_outside_of_its_folder_count_and_go_too(mode: str) -> None:
    if mode == "unsafe":
        pytest.skip("not promised in this mode")
    code = program("""
        import os
        for folder in ('/tmp', '/dev/shm'):
            os.mkdir(f'{folder}/strands-env-sandbox-left'); open(f'{folder}/strands-env-sandbox-left/file', 'w')
        print('written')
        while True:
            with open('/dev/shm/strands-env-sandbox-big', 'ab') as f: f.write(b'x' * (1 << 20))
    """)
    ran = await sandbox_in(mode).run(code)
    assert ran.output.startswith("written\n")
    assert ran.ended == "disk" or "No space left" in ran.output or "File too large" in ran.output
    assert not list(Path("/dev/shm").glob("strands-env-sandbox-*"))


# --- what outlives the program ---


async def test_children_that_left_the_process_group_are_gone(mode: str) -> None:
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


async def test_children_that_hold_the_output_open_do_not_delay_the_end(mode: str) -> None:
    began = time.monotonic()
    ran = await sandbox_in(mode).run("import os, time\nif os.fork() == 0: time.sleep(1000)\nprint('done')")
    assert ran.output == "done\n"
    assert time.monotonic() - began < SMALL.wall_s


async def test_zombies_and_a_closed_output_do_not_matter(mode: str) -> None:
    ran = await sandbox_in(mode).run(
        "import os\nfor _ in range(10):\n    if os.fork() == 0: os._exit(0)\nos.closerange(0, 3)\n"
        "import time; time.sleep(0.3); os._exit(5)"
    )
    assert (ran.output, ran.exit_code) == ("", 5)


async def test_a_cancelled_run_is_ended(mode: str, folders: str) -> None:
    sandbox = sandbox_in(mode)
    ran = asyncio.ensure_future(sandbox.run("import time\nwhile True: time.sleep(0.01)"))
    while len(running(os.getpid(), folders)) < 2:
        await asyncio.sleep(0.01)
    ran.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ran
    assert running(os.getpid(), folders) == []


def test_programs_and_their_folders_go_when_the_process_that_runs_them_is_killed(mode: str, folders: str) -> None:
    code = (
        "import asyncio\nfrom strands_env.sandbox import PythonSandbox\n"
        f"box = PythonSandbox(mode={mode!r}, unsafe=True, python={python_for(mode)!r})\n"
        "print('ready', flush=True)\n"
        "asyncio.run(box.run('import time; time.sleep(1000)'))"
    )
    package = str(Path(strands_env.sandbox.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": package, "TMPDIR": folders}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 30
        while len(running(owner.pid, folders)) < 2:
            assert owner.poll() is None and time.monotonic() < deadline
        owner.kill()
    while running(owner.pid, folders) or os.listdir(folders):
        assert time.monotonic() < deadline + 10


async def test_an_event_loop_runs_on_while_programs_run(mode: str) -> None:
    sandbox = sandbox_in(mode)
    runs = asyncio.gather(*(sandbox.run(f"print({n})") for n in range(12)))
    ticks = 0
    while not runs.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert [ran.output for ran in runs.result()] == [f"{n}\n" for n in range(12)]
    assert ticks > 5


def test_a_sandbox_serves_event_loops_in_several_threads(mode: str) -> None:
    sandbox = sandbox_in(mode)
    outputs: list[str] = []

    def work(n: int) -> None:
        outputs.append(asyncio.run(sandbox.run(f"print({n})")).output)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outputs) == ["0\n", "1\n", "2\n"]


# --- what a program may not do ---


async def test_a_program_cannot_signal_the_process_that_runs_it(safe_mode: str) -> None:
    sandbox = sandbox_in(safe_mode)
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


async def test_killing_all_processes_reaches_only_its_own(safe_mode: str) -> None:
    sandbox = sandbox_in(safe_mode)
    other = asyncio.ensure_future(sandbox.run("import time; time.sleep(1); print('alive')"))
    ran = await sandbox.run("import os, signal\ntry: os.kill(-1, signal.SIGKILL)\nexcept OSError: pass\nprint('x')")
    assert ran.ended == "exited"
    assert (await other).output == "alive\n"


async def test_nothing_of_the_environment_is_seen(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "open sesame")
    ran = await sandbox_in(mode).run("import os; print(dict(os.environ))")
    assert "sesame" not in ran.output


async def test_no_other_process_can_be_looked_into(safe_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "100"], env={"SECRET_TOKEN": "open sesame"}) as owner:
        ran = await sandbox_in(safe_mode).run(
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


async def test_files_of_the_owner_cannot_be_read_or_written(safe_mode: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("open sesame")
    secret.chmod(0o600)
    profile_of_root = os.path.expanduser("~root/.bashrc")
    ran = await sandbox_in(safe_mode).run(
        program(f"""
        import os, sys
        for path in ({str(secret)!r}, '/etc/shadow', {profile_of_root!r}, os.path.expanduser('~root')):
            for flags in ('rb', 'ab'):
                try: print(open(path, flags).read())
                except OSError: pass
        for folder in (sys.prefix, '/usr', '/etc', '/', {str(Path(__file__).parent)!r}, {str(tmp_path)!r}):
            try: open(folder + '/made-in-the-sandbox', 'w'); print('wrote', folder)
            except OSError: pass
    """)
    )
    assert ran.output == ""


async def test_only_python_and_a_small_system_are_visible_in_namespaces(folders: str) -> None:
    if python_for("namespaces") is None:
        pytest.skip("no namespaces here")
    folder = Path(folders) / "data"
    folder.mkdir()
    file = folder / "data.txt"
    file.write_text("of the host")
    try:
        hidden = f"import os; print([os.path.exists(path) for path in ({folders!r}, '/home', '/proc/self')])"
        assert (await sandbox_in("namespaces").run(hidden)).output == "[False, False, True]\n"
        shown = PythonSandbox(SMALL, mode="namespaces", visible_paths=[folder])
        ran = await shown.run(f"print(open({str(file)!r}).read())\nopen({str(file)!r}, 'w')")
        assert ran.output.startswith("of the host\n") and "Read-only" in ran.output
    finally:
        shutil.rmtree(folder)


async def test_there_is_no_network(safe_mode: str) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = await sandbox_in(safe_mode).run(
            program(f"""
            import socket
            for family, address in ((socket.AF_INET, ('127.0.0.1', {port})), (socket.AF_INET6, ('::1', {port}))):
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
                    try:
                        s = socket.socket(family, kind); s.settimeout(1); s.connect(address); s.send(b'x')
                        print('connected', family, kind)
                    except OSError: pass
        """)
        )
    assert ran.output == ""


async def test_privileges_cannot_be_had(safe_mode: str) -> None:
    ran = await sandbox_in(safe_mode).run(
        program("""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(os.getuid() != 0, [libc.unshare(flag) for flag in (0x10000000, 0x20000, 0x40000000)])
        print(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), libc.ptrace(16, 1, 0, 0))
        for change in (os.setuid, os.setgid):
            try: change(0); print('root')
            except OSError: pass
        status = dict(line.split(':', 1) for line in open('/proc/self/status'))
        print(*(status[name].strip() for name in ('CapEff', 'CapPrm', 'NoNewPrivs', 'Seccomp')))
    """)
    )
    assert ran.output == "True [-1, -1, -1]\n-1 -1\n" + "0" * 16 + " " + "0" * 16 + " 1 2\n"


async def test_descriptors_of_the_caller_are_closed(mode: str, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "open", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(descriptor, True)
    try:
        ran = await sandbox_in(mode).run("import os; print([n for n in os.listdir('/proc/self/fd')])")
    finally:
        os.close(descriptor)
    assert len(eval(ran.output)) <= 4  # the three streams, and the one that lists


# --- when there is no sandbox ---


def test_without_protection_it_refuses_and_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(SandboxUnavailableError, match="unsafe=True"):
        PythonSandbox(python=str(broken), mode="namespaces")


def test_the_unsafe_mode_has_to_be_asked_for_twice() -> None:
    with pytest.raises(ValueError, match="unsafe=True"):
        PythonSandbox(mode="unsafe")


async def test_a_process_that_cannot_be_started_is_an_error_and_no_result(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = sandbox_in(mode)
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    with pytest.raises(SandboxError, match="no process could be started"):
        await sandbox.run("print(1)")


def _copy_for_others(folder: Path) -> None:
    shutil.copytree(Path(strands_env.sandbox.__file__).parent, folder / "sandbox", dirs_exist_ok=True)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="other tests run as a user without privileges already")
def test_a_user_without_privileges_gets_namespaces_where_the_kernel_allows_it() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        _copy_for_others(folder)
        inner = "import os, signal\nprint(os.getuid(), os.path.exists('/home'))\n"
        inner += "for number in (15, 9, 19): os.kill(1, number)\nn = 0\ntry:\n    while True:\n"
        inner += "        if os.fork() == 0: signal.pause()\n        n += 1\nexcept OSError: print(n < 16)\n"
        code = (
            "import asyncio, sys\nfrom sandbox import PythonSandbox, SandboxLimits, available_modes\n"
            "why = available_modes()['namespaces']\n"
            "if why: print('skip', why); sys.exit()\n"
            f"print(asyncio.run(PythonSandbox(SandboxLimits(wall_s=5, processes=16)).run({inner!r})))\n"
        )
        ran = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", SYSTEM_PYTHON, "-c", code],
            cwd=folder, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        if ran.stdout.startswith("skip"):
            pytest.skip(ran.stdout)
        assert "output='1000 False\\nTrue\\n', ended='exited', exit_code=0, mode='namespaces'" in ran.stdout, ran
