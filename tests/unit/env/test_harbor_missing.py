"""Without Harbor, or with another one, its module says what to do. Tests with Harbor are in tests/trainers."""

import importlib
import importlib.metadata
import sys
from pathlib import Path

import pytest

from strands_env import cli
from strands_env.eval.benchmarks import load_tasks

TASKS = Path(__file__).parents[2] / "trainers/harbor/tasks"


@pytest.mark.parametrize(
    ("python", "harbor", "message"),
    [
        ((3, 11), "0.25.0", r"strands_env.harbor needs Python 3.12, as Harbor does; this is 3\."),
        ((3, 12), None, r"harbor is not installed: pip install -e '.\[harbor\]'"),
        ((3, 12), "0.27.0", r"harbor 0.27.0 is not supported, only 0.24 and 0.25: pip install -e '.\[harbor\]'"),
        ((3, 13), "0.2.5", "harbor 0.2.5 is not supported"),
    ],
)
def test_what_is_missing_is_named(monkeypatch, capsys, tmp_path, python, harbor, message):
    def version(name):
        if harbor is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return harbor

    monkeypatch.setattr(sys, "version_info", python)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.delitem(sys.modules, "strands_env.harbor", raising=False)
    with pytest.raises(ImportError, match=message):
        importlib.import_module("strands_env.harbor")
    with pytest.raises(ImportError, match=message):
        load_tasks(TASKS)


def test_the_command_names_what_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "strands_env.harbor", None)
    assert cli.main(["check", "harbor", "--dataset", str(TASKS)]) == 2
    assert "harbor" in capsys.readouterr().err
