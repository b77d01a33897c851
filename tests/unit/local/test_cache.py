from __future__ import annotations

import threading
from pathlib import Path

import pytest

from strands_sglang.local import cache


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
    assert cache.home() == Path(expected)


def test_a_complete_directory_is_reused_as_it_is(tmp_path):
    target = tmp_path / "deep" / "thing-1.0"
    assert cache.build_once(target, make("first")) == target
    cache.build_once(target, make("second"))
    assert (target / "content").read_text() == "first"


def test_a_half_made_directory_is_built_anew_and_nothing_of_it_stays(tmp_path):
    target = tmp_path / "thing"
    target.mkdir()
    (target / "left-over").touch()
    cache.build_once(target, make("whole"))
    assert (target / "content").read_text() == "whole"
    assert not (target / "left-over").exists()


def test_a_complete_directory_that_no_longer_works_is_built_anew(tmp_path):
    target = tmp_path / "thing"
    cache.build_once(target, make("old"))
    cache.build_once(target, make("new"), usable=lambda directory: (directory / "content").read_text() == "new")
    assert (target / "content").read_text() == "new"


def test_a_failed_build_leaves_nothing_and_the_next_one_starts_afresh(tmp_path):
    def fail(directory):
        (directory / "half").touch()
        raise RuntimeError("the disk is full")

    target = tmp_path / "thing"
    with pytest.raises(RuntimeError, match="the disk is full"):
        cache.build_once(target, fail)
    assert not target.exists()
    cache.build_once(target, make("whole"))
    assert not (target / "half").exists()


def test_two_that_want_the_same_directory_at_once_build_it_once_and_the_second_says_that_it_waits(tmp_path):
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

    first = threading.Thread(target=cache.build_once, args=(target, build_slowly))
    first.start()
    assert building.wait(30)
    cache.build_once(target, make("second"), progress=note)
    first.join()
    assert (target / "content").read_text() == "first"
    assert len(lines) == 1
    assert str(target) in lines[0]
