from __future__ import annotations

import platform
import stat
import sys
from pathlib import Path

import pytest

from strands_sglang import local
from strands_sglang.local import install


def program(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def old_python(monkeypatch, tmp_path):
    """Makes this Python look like 3.10, and returns the only directory on the PATH besides the system's shell tools."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setattr(sys, "version_info", (3, 10, 14, "final", 0))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("STRANDS_SGLANG_HOME", str(tmp_path / "home"))
    return folder


@pytest.fixture
def fake_python(old_python, tmp_path):
    """A Python 3.12 whose environments note what pip is told in the returned file; `pip.log.fails` makes them fail."""
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
def test_a_machine_that_cannot_run_sglang_is_refused_in_one_sentence_with_the_alternative(
    monkeypatch, system, machine, library, found
):
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


def test_a_python_that_sglang_is_published_for_is_used_itself(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 12, 1, "final", 0))
    assert install.find_python() == Path(sys.executable)


def test_another_python_on_the_path_is_used_if_it_really_runs(old_python):
    program(old_python / "python3.11", "echo 'python3.11: this version is switched off' >&2; exit 127")
    working = program(old_python / "python3.12", "echo 3 12")
    assert install.find_python() == working


def test_no_suitable_python_at_all_is_refused_with_the_alternative(old_python):
    with pytest.raises(local.UnsupportedPlatformError, match=r"this is Python 3\.10 .*SGLANG_BASE_URL"):
        install.find_python()


def test_an_environment_belongs_to_one_set_of_pins_and_one_python(monkeypatch, tmp_path):
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


@pytest.mark.skipif(platform.system() != "Linux", reason="the installer refuses other systems")
def test_sglang_is_installed_once_with_and_then_without_dependencies(fake_python):
    lines = []
    python = local.ensure_sglang(lines.append)
    calls = fake_python.read_text().splitlines()
    assert [call.split("/")[-1] for call in calls] == ["requirements-sglang.txt", "requirements-sglang-nodeps.txt"]
    assert ["--no-deps" in call for call in calls] == [False, True]
    assert any("[3/3]" in line for line in lines)
    assert local.ensure_sglang(lines.append) == python
    assert len(fake_python.read_text().splitlines()) == 2


@pytest.mark.skipif(platform.system() != "Linux", reason="the installer refuses other systems")
def test_an_environment_whose_python_is_gone_is_installed_again(fake_python):
    python = local.ensure_sglang(lambda line: None)
    python.unlink()
    assert local.ensure_sglang(lambda line: None).exists()
    assert len(fake_python.read_text().splitlines()) == 4


@pytest.mark.skipif(platform.system() != "Linux", reason="the installer refuses other systems")
def test_a_failed_installation_shows_what_pip_said_and_is_done_again_next_time(fake_python):
    fails = fake_python.with_name("pip.log.fails")
    fails.touch()
    with pytest.raises(local.LocalServerError, match="no matching distribution"):
        local.ensure_sglang(lambda line: None)
    fails.unlink()
    assert local.ensure_sglang(lambda line: None).exists()
