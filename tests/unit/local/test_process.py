from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from strands_sglang.local import LocalServerError
from strands_sglang.local.process import GuardedProcess, clean_environment, run_quietly
from support.processes import has_ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups are watched through /proc")

# Prints its own id and that of a child that ignores polite signals, then stays.
FAMILY = """
import os, subprocess, sys, time
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
child.stdout.readline()
with open(sys.argv[1], "w") as pids:
    print(os.getpid(), child.pid, file=pids, flush=True)
time.sleep(600)
"""


@pytest.fixture
def pids_pipe(tmp_path):
    """A named pipe: reading from it waits for the one that writes its process ids."""
    path = tmp_path / "pids"
    os.mkfifo(path)
    return path


def read_line(pipe):
    # Opened for writing too, so that neither side waits for the other to open it; what is waited for is the line.
    descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        assert select.select([descriptor], [], [], 60)[0], "nobody wrote within a minute"
        return os.read(descriptor, 4096).decode()
    finally:
        os.close(descriptor)


def read_pids(pipe):
    return [int(word) for word in read_line(pipe).split()]


def test_stop_ends_the_command_and_its_children_also_those_that_ignore_sigterm(tmp_path, pids_pipe):
    process = GuardedProcess(
        [sys.executable, "-c", FAMILY, pids_pipe], env=clean_environment(), log_path=tmp_path / "log"
    )
    pids = read_pids(pids_pipe)
    assert len(pids) == 2
    assert process.exit_code is None
    process.stop()
    assert all(has_ended(pid) for pid in pids)
    process.stop()  # a second time does no harm


def test_children_do_not_outlive_a_command_that_is_killed(tmp_path, pids_pipe):
    process = GuardedProcess(
        [sys.executable, "-c", FAMILY, pids_pipe], env=clean_environment(), log_path=tmp_path / "log"
    )
    server, child = read_pids(pids_pipe)
    os.kill(server, signal.SIGKILL)
    assert process.wait(30) == 128 + signal.SIGKILL
    assert has_ended(child)
    process.stop()


def test_stop_ends_the_group_also_when_its_guard_was_killed(tmp_path, pids_pipe):
    process = GuardedProcess(
        [sys.executable, "-c", FAMILY, pids_pipe], env=clean_environment(), log_path=tmp_path / "log"
    )
    pids = read_pids(pids_pipe)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    process.stop()
    assert all(has_ended(pid) for pid in pids)


def test_nothing_outlives_a_starter_that_is_killed_without_warning(tmp_path, pids_pipe):
    starter = f"""
import sys
import tempfile
from pathlib import Path
from strands_sglang.local.process import GuardedProcess, clean_environment
command = [sys.executable, "-c", {FAMILY!r}, {str(pids_pipe)!r}]
GuardedProcess(command, env=clean_environment(), log_path=Path({str(tmp_path / "log")!r}))
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", starter], stdin=subprocess.PIPE) as process:
        pids = read_pids(pids_pipe)
        process.kill()
        assert all(has_ended(pid) for pid in pids)


def test_temporary_files_of_the_command_go_with_it(tmp_path, pids_pipe):
    program = "import sys, tempfile; open(sys.argv[1], 'w').write(tempfile.mkstemp()[1])"
    process = GuardedProcess(
        [sys.executable, "-c", program, pids_pipe], env=clean_environment(), log_path=tmp_path / "log"
    )
    left_over = Path(read_line(pids_pipe))
    assert process.wait(30) == 0
    assert not left_over.exists()
    assert not left_over.parent.exists()
    process.stop()


def test_a_command_that_does_not_exist_ends_with_127_and_says_why_in_the_log(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    process = GuardedProcess([tmp_path / "absent"], env=clean_environment(), log_path=tmp_path / "log")
    assert process.wait(30) == 127
    assert "absent" in (tmp_path / "log").read_text()
    process.stop()
    assert not list((tmp_path / "temporary").iterdir())


def test_a_quiet_command_shows_its_last_output_only_when_it_fails(capfd):
    lines = []
    run_quietly([sys.executable, "-c", "print('chatter')"], "working", progress=lines.append)
    assert lines == ["working"]
    assert capfd.readouterr() == ("", "")
    program = "import sys; [print('line', n) for n in range(100)]; sys.exit('no such package')"
    with pytest.raises(LocalServerError, match=r"working failed with exit code 1") as caught:
        run_quietly([sys.executable, "-c", program], "working", progress=lines.append)
    assert str(caught.value).endswith("no such package")
    assert "line 99" in str(caught.value)
    assert "line 0\n" not in str(caught.value)


def test_a_quiet_command_that_cannot_be_started_is_an_error_that_names_it(tmp_path):
    with pytest.raises(LocalServerError, match="absent"):
        run_quietly([tmp_path / "absent"], "working", progress=lambda line: None)


def test_another_python_does_not_inherit_where_this_one_finds_its_packages(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/somewhere")
    monkeypatch.setenv("KEPT", "yes")
    environment = clean_environment(ADDED="too")
    assert "PYTHONPATH" not in environment
    assert "VIRTUAL_ENV" not in environment
    assert (environment["KEPT"], environment["ADDED"]) == ("yes", "too")
