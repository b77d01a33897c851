"""What the examples say when they cannot run."""

from __future__ import annotations

import pytest

from support.processes import run_example


@pytest.mark.parametrize("name", ["math_env", "aime_eval"])
@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--backend", "openai"], 2, "--backend openai needs --model-id"),
        (["--sglang-base-url", "http://localhost:1/v1"], 1, "ends in /v1"),
    ],
    ids=["no model", "no such address"],
)
def test_what_cannot_run_is_said_in_one_line(name, arguments, code, told):
    done = run_example(name, *arguments)
    assert done.returncode == code
    assert told in done.stderr.splitlines()[-1]
