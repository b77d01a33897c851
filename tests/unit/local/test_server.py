from __future__ import annotations

import socket
import sys

import httpx
import pytest

from strands_sglang import local
from strands_sglang.local.server import sglang_command
from support.fake_sglang import write_interpreter, write_model
from support.processes import has_ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local server runs on Linux only")


@pytest.fixture
def python(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SGLANG_PIDS", str(tmp_path / "pids"))
    return write_interpreter(tmp_path / "python")


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def pids(tmp_path):
    return [int(word) for word in (tmp_path / "pids").read_text().split()]


def test_a_server_is_handed_out_once_it_is_healthy_and_stopped_with_its_children(python, model, tmp_path):
    lines = []
    with local.start_server(python, model, progress=lines.append) as server:
        assert httpx.get(f"{server.base_url}/health", trust_env=False).status_code == 200
        assert server.model_path == model
        assert "loading weights" in server.log_path.read_text()
        assert server.exit_code is None
    assert server.base_url in lines[-1]
    assert all(has_ended(pid) for pid in pids(tmp_path))
    assert not server.log_path.exists()


def test_a_named_log_stays(python, model, tmp_path):
    with local.start_server(python, model, log_path=tmp_path / "server.log", progress=lambda line: None):
        pass
    assert "loading weights" in (tmp_path / "server.log").read_text()


def test_a_server_that_dies_is_an_error_with_the_end_of_its_log_which_stays(python, model, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SGLANG_MODE", "dies")
    server = local.launch_server(python, model)
    with pytest.raises(local.LocalServerError, match=r"exit code 3(.|\n)*out of memory$") as caught:
        server.wait_until_healthy()
    assert str(server.log_path) in str(caught.value)
    assert all(has_ended(pid) for pid in pids(tmp_path))
    server.log_path.unlink()


def test_a_server_that_does_not_get_healthy_in_time_is_an_error_and_is_stopped(python, model, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SGLANG_MODE", "never")
    with pytest.raises(local.LocalServerError, match="within 1 s"):
        local.start_server(python, model, log_path=tmp_path / "log", deadline=1.0, progress=lambda line: None)
    # A machine so slow that the fake did not even get to write its ids has nothing to check.
    if (tmp_path / "pids").exists():
        assert all(has_ended(pid) for pid in pids(tmp_path))


def test_a_port_in_use_is_refused_before_anything_starts(python, model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(local.LocalServerError, match=f"port {port} of 127.0.0.1 is in use"):
            local.start_server(python, model, port=port)
    assert not (tmp_path / "pids").exists()


def test_a_folder_without_a_model_is_refused(python, tmp_path):
    with pytest.raises(local.LocalServerError, match="no config.json"):
        local.start_server(python, tmp_path)


def test_further_arguments_end_the_command_line(python, model):
    settings = local.ServerSettings(extra_arguments=("--enable-return-routed-experts",))
    command = sglang_command(python, model, host="127.0.0.1", port=1, settings=settings)
    assert command[-1] == "--enable-return-routed-experts"
    assert str(model) in command
