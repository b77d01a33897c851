"""Two projects bring packages called `strands_sglang` and `strands_env`; who has both is told."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

import strands_sglang
from strands_sglang._other_install import (
    MODULES_OF_OTHERS,
    UNKNOWN_VERSION,
    find_other_installs,
    own_version,
)

PACKAGE = Path(strands_sglang.__file__).parent


def install(folder: Path, name: str, version: str, *, entry_point: str | None = None) -> Path:
    """Put a distribution's metadata into a folder, as pip does."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    if entry_point:
        (info / "entry_points.txt").write_text(f"[console_scripts]\n{name} = {entry_point}\n")
    return folder


def make_package(folder: Path, name: str, *modules: str) -> Path:
    for module in ("__init__.py", *modules):
        path = folder / name / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The folder that holds a copy of this project's packages and metadata."""
    folder = make_package(tmp_path / "own", "strands_sglang", "_other_install.py")
    make_package(folder, "strands_env")
    return install(folder, "strands-sglang", "0.5.0", entry_point="strands_sglang.cli:main")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The folder into which another project's packages may be put."""
    folder = tmp_path / "other"
    folder.mkdir()
    return folder


def found(own: Path, *more: Path) -> list[str]:
    return find_other_installs(str(own / "strands_sglang"), [str(folder) for folder in (own, *more)])


def test_a_sound_installation_gives_nothing_to_tell(own, other):
    assert found(own, other) == []


def test_the_environment_of_these_tests_gives_nothing_to_tell():
    assert find_other_installs() == []


def test_another_distribution_of_the_same_name_is_named_with_version_and_place(own, other):
    install(other, "strands-sglang", "0.4.3")
    [what] = found(own, other)
    assert "strands-sglang 0.4.3" in what and str(other) in what


def test_another_distribution_is_found_beside_this_one_in_one_folder(own):
    install(own, "strands-sglang", "0.4.3")
    [what] = found(own)
    assert "strands-sglang 0.4.3" in what


def test_a_strands_env_distribution_is_another_project_wherever_it_lies(own, other):
    install(other, "strands-env", "0.1.1")
    [what] = found(own, other)
    assert "strands-env 0.1.1" in what


@pytest.mark.parametrize("name", ["strands_sglang", "strands_env"])
def test_another_package_on_the_path_is_found_without_metadata(own, other, name):
    make_package(other, name)
    [what] = found(own, other)
    assert name in what and str(other) in what


def test_a_second_copy_of_this_project_is_not_another_package(own, tmp_path):
    checkout = make_package(tmp_path / "checkout", "strands_sglang", "_other_install.py")
    make_package(checkout, "strands_env")
    assert found(own, checkout) == []


def test_one_folder_reached_by_two_paths_is_one_folder(own, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(own, target_is_directory=True)
    assert found(own, link, own) == []


def test_modules_that_the_other_package_left_behind_are_named(own):
    make_package(own, "strands_sglang", "sglang.py", "rollout.py")
    [what] = found(own)
    assert "rollout.py, sglang.py" in what and str(own / "strands_sglang") in what


def test_no_module_of_this_package_is_taken_for_one_left_behind():
    assert not set(MODULES_OF_OTHERS) & {path.name for path in PACKAGE.iterdir()}


def test_the_version_is_this_projects_also_when_the_other_comes_first_on_the_path(own, other, monkeypatch):
    install(other, "strands-sglang", "0.4.3")
    monkeypatch.setattr(sys, "path", [str(other), str(own)])
    assert own_version() == "0.5.0"


def test_a_checkout_without_metadata_does_not_take_the_others_version(other, monkeypatch):
    install(other, "strands-sglang", "0.4.3")
    monkeypatch.setattr(sys, "path", [str(other)])
    assert own_version() == UNKNOWN_VERSION


def test_the_check_takes_about_a_millisecond():
    find_other_installs()
    started = time.perf_counter()
    for _ in range(20):
        find_other_installs()
    assert (time.perf_counter() - started) / 20 < 0.005


def run_python(code: str, *path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_importing_beside_the_other_package_warns_once_and_says_what_to_do(other):
    install(make_package(other, "strands_sglang"), "strands-sglang", "0.4.3")
    importing = run_python("import strands_sglang\nimport strands_sglang.client", PACKAGE.parent, other)
    assert importing.returncode == 0, importing.stderr
    assert importing.stderr.count("UserWarning") == 1
    assert "strands-sglang 0.4.3" in importing.stderr
    assert "pip uninstall strands-sglang" in importing.stderr


def test_importing_alone_says_nothing_and_knows_its_version():
    importing = run_python("import strands_sglang\nprint(strands_sglang.__version__)", PACKAGE.parent)
    assert importing.returncode == 0, importing.stderr
    assert "another package" not in importing.stderr
    assert importing.stdout.strip() == own_version() == metadata.version("strands-sglang")


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        strands_sglang.no_such_name  # noqa: B018
