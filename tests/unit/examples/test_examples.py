"""The examples, run as their users run them, most against a scripted server."""

import json
import re
import runpy
from pathlib import Path

import pytest

from strands_sglang.testing import ScriptedSGLang
from support.agents import call
from support.environments import lines
from support.processes import run_example

CALCULATOR = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "calculator.py"))
evaluate = CALCULATOR["evaluate"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [("27 * 43", 1161), (" 2 - -3 ", 5), ("(1 + 2) * 3 / 4", 2.25), ("1e3 + .5", 1000.5), ("+7", 7)],
)
def test_arithmetic_is_evaluated(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').getcwd()",
        "x + 1",
        "'a' * 9",
        "True + 1",
        "2 ** 9",
        "1 if 2 else 3",
        "[1][0]",
        "1 +",
        "",
        "1\x00",
        "1 / 0",
        "1e308 * 1e308 * 0 * (1/0)",
        "(" * 90 + "1" + ")" * 90,
        "-" * 190 + "1",
        "1" * 201,
        "9" * 150 + ".0 * " + "9" * 40,
        "1 / " + "9" * 190,
    ],
)
def test_anything_else_is_refused_or_a_number_and_nothing_else_ever_happens(expression):
    try:
        assert isinstance(evaluate(expression), int | float)
    except ValueError as error:
        assert "\n" not in str(error)


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


def test_it_rewards_an_agent_that_uses_its_calculator(chatml_tokenizer, tmp_path):
    chatml_tokenizer.save_pretrained(tmp_path)

    def answer(request):
        _, _, question = request.text.rpartition("<|im_start|>user\n")
        if "<tool_response>" in question:
            return "It is " + question.split("<tool_response>\n")[1].split("\n")[0] + "."
        return call("calculator", expression=question.split("What is ")[1].split("?")[0])

    server = ScriptedSGLang(chatml_tokenizer, answer)
    with server.serve() as url:
        done = run_example("math_env", "--sglang-base-url", url, "--tokenizer", str(tmp_path), "--worked-examples")
    assert done.returncode == 0, done.stderr
    *episodes, summary = done.stdout.splitlines()
    assert all("reward 1.0  task_complete  1 tool calls" in line for line in episodes)
    assert summary == "mean reward 1.00 of 6 episodes"


def test_it_prints_pass_at_k_of_a_local_file_and_goes_on_with_what_is_there(chatml_tokenizer, tmp_path):
    chatml_tokenizer.save_pretrained(tmp_path / "tokenizer")
    problems = tmp_path / "aime.jsonl"
    rows = [{"id": n, "problem": f"Find {n} * 11.", "answer": str(11 * n), "year": "2024"} for n in (3, 4, 5)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def answer(request):
        factor = re.findall(r"Find (\d+) \* 11", request.text)[-1]
        if "<tool_response>" in request.text:
            return rf"\boxed{{{int(factor) * 11 if factor != '5' else 0}}}"
        return call("calculator", expression=f"{factor} * 11")

    server = ScriptedSGLang(chatml_tokenizer, answer)
    with server.serve() as url:
        command = ["--sglang-base-url", url, "--tokenizer", tmp_path / "tokenizer", "--dataset", problems]
        command += ["--n-samples", 2, "--output", tmp_path / "out"]
        done = run_example("aime_eval", *command)
        asked = len(server.requests)
        again = run_example("aime_eval", *command)
    assert done.returncode == again.returncode == 0, done.stderr
    assert re.search(r"^pass@1 +0\.6667$", done.stdout, re.MULTILINE)
    assert again.stdout == done.stdout and len(server.requests) == asked == 12
    assert len(lines(tmp_path / "out" / "results.jsonl")) == 6
