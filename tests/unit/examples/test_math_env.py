"""The environment example against a scripted server, and what it says when it cannot run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strands_sglang.testing import ScriptedSGLang
from support.agents import call

EXAMPLE = Path(__file__).parents[3] / "examples" / "math_env.py"


def run(*arguments: str) -> Any:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_it_rewards_an_agent_that_uses_its_calculator(chatml_tokenizer: Any, tmp_path: Path) -> None:
    chatml_tokenizer.save_pretrained(tmp_path)

    def answer(request: Any) -> str:
        _, _, question = request.text.rpartition("<|im_start|>user\n")
        if "<tool_response>" in question:
            return "It is " + question.split("<tool_response>\n")[1].split("\n")[0] + "."
        return call("calculator", expression=question.split("What is ")[1].split("?")[0])

    server = ScriptedSGLang(chatml_tokenizer, answer)
    with server.serve() as url:
        done = run("--sglang-base-url", url, "--tokenizer", str(tmp_path), "--worked-examples")
    assert done.returncode == 0, done.stderr
    *episodes, summary = done.stdout.splitlines()
    assert all("reward 1.0  task_complete  1 tool calls" in line for line in episodes)
    assert summary == "mean reward 1.00 of 6 episodes"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--backend", "openai"], 2, "--backend openai needs --model-id"),
        (["--sglang-base-url", "http://localhost:1/v1"], 1, "ends in /v1"),
    ],
    ids=["no model", "no such address"],
)
def test_what_cannot_run_is_said_in_one_line(arguments: list[str], code: int, told: str) -> None:
    done = run(*arguments)
    assert done.returncode == code
    assert told in done.stderr.splitlines()[-1]
