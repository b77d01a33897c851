import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from strands_sglang import cli
from strands_sglang.local.install import COMPLETE_MARKER, environment_directory
from support.fake_sglang import write_interpreter, write_model
from support.processes import has_ended


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A cache with an environment whose SGLang is a fake; returns a model folder."""
    monkeypatch.setenv("STRANDS_SGLANG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FAKE_SGLANG_PIDS", str(tmp_path / "pids"))
    # Logs of servers that failed are kept, and would stay for good.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for version in ((3, 11), (3, 12), (3, 13)):
        directory = environment_directory(version)
        write_interpreter(directory / "bin" / "python")
        (directory / COMPLETE_MARKER).touch()
    return write_model(tmp_path / "model")


@pytest.fixture(autouse=True)
def handlers_are_put_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "strands_sglang.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the local server runs on Linux only")
def test_serve_prints_the_address_once_healthy_and_sigterm_stops_everything_with_code_0(installed, tmp_path):
    with start("serve", "--model", installed, "--port", "0") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "stopped" in process.stderr.read()
    assert all(has_ended(int(pid)) for pid in (tmp_path / "pids").read_text().split())


@pytest.mark.skipif(sys.platform != "linux", reason="the local server runs on Linux only")
def test_serve_ends_with_code_1_when_the_server_dies_under_it(installed, tmp_path):
    with start("serve", "--model", installed, "--port", "0") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        server, child = map(int, (tmp_path / "pids").read_text().split())
        os.kill(server, signal.SIGKILL)
        assert process.wait(30) == 1
        assert "ended by itself with exit code 137" in process.stderr.read()
    assert has_ended(child)


@pytest.mark.skipif(sys.platform != "linux", reason="the local server runs on Linux only")
def test_serve_ends_with_code_1_and_the_log_when_the_server_does_not_start(installed, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_SGLANG_MODE", "dies")
    assert cli.main(["serve", "--model", str(installed), "--port", "0"]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert "out of memory" in error


def test_serve_refuses_a_folder_without_a_model_with_code_2(tmp_path, capsys):
    assert cli.main(["serve", "--model", str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err


def test_serve_says_in_one_line_with_code_3_that_a_machine_cannot_run_it(monkeypatch, capsys):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cli.main(["serve"]) == 3
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert "SGLANG_BASE_URL" in error


@pytest.mark.parametrize("arguments", [[], ["fly"], ["serve", "--port", "high"], ["serve", "--port", "70000"]])
def test_a_wrong_command_line_ends_with_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_help_names_the_subcommands(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    assert "serve" in capsys.readouterr().out


TOKENIZER = Path(__file__).parent.parent / "fixtures" / "0.5.0" / "tokenizer"


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize("arguments", [["check", TOKENIZER], ["--help"]])
def test_output_that_nobody_reads_or_that_cannot_be_written_ends_a_command_without_a_traceback(arguments):
    """Row D6: `| head`, and a full disk."""
    command = [sys.executable, "-m", "strands_sglang.cli", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
        said = "strands-sglang: standard output: No space left on device\n"
        assert (ended.returncode, ended.stderr) == (1, said)
        assert subprocess.run(command, stdout=full, stderr=full, env=environment).returncode == 1


@pytest.mark.parametrize("model", ["/no/such/folder", "./missing"])
def test_a_model_folder_that_does_not_exist_is_called_that(model, capsys):
    """Row D6."""
    assert cli.main(["check", model]) == 2
    assert capsys.readouterr().err == f"{model}: no such folder\n"
