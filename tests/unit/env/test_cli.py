import importlib
import itertools
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import webbrowser
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from strands_env.cli import main
from strands_env.eval import Evaluator, register_eval
from strands_env.eval.evaluator import REGISTERED
from strands_env.eval.metrics import ending
from strands_sglang.testing import ScriptedAnswer, ScriptedResponse, ScriptedSGLang
from support.agents import call
from support.environments import lines

SAMPLES = 3
FINISHED = Path(__file__).parent.parent.parent / "fixtures" / "0.5.0" / "command" / "out"


def solve(request):
    """A policy that asks the calculator, and is right about sums that are no multiple of three."""
    left, right = map(int, re.findall(r"What is (\d+) \+ (\d+)", request.text)[-1])
    if "<tool_response>" not in request.text:
        return ScriptedAnswer(call("calculator", expression=f"{left} + {right}"), latency_s=0.005)
    return ScriptedAnswer(rf"\boxed{{{left + right if (left + right) % 3 else 0}}}", latency_s=0.005)


@pytest.fixture(scope="module")
def tokenizer_path(chatml_tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    chatml_tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def server(chatml_tokenizer):
    scripted = ScriptedSGLang(chatml_tokenizer, solve)
    with scripted.serve() as base_url:
        scripted.base_url = base_url
        yield scripted


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "sums.jsonl"
    rows = [{"id": f"s{n}", "question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def command(server, tokenizer_path, dataset, tmp_path):
    return [
        *("eval", "--dataset", dataset, "--env", "calculator", "--backend", "sglang", "--base-url", server.base_url),
        *("--tokenizer", tokenizer_path, "--n-samples", SAMPLES, "--concurrency", 2, "--output", tmp_path / "out"),
    ]


@pytest.fixture
def quick(command):
    """The command with a reward that needs no worker process."""
    return [*command, "--reward", "exact", "--reward-args", '{"boxed": true}']


def without(command, option):
    """A command without an option and its value."""
    place = command.index(option)
    return [*command[:place], *command[place + 2 :]]


def run(arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture
def refused(capsys):
    """Runs a command that ends with one line about what is wrong, and returns that line."""

    def run_refused(arguments, code=2):
        assert run(arguments) == code
        error = capsys.readouterr().err.strip()
        assert len(error.splitlines()) == 1 and error.startswith("strands-env: ")
        return error

    return run_refused


def start(arguments, **options):
    line = [sys.executable, "-m", "strands_env.cli", *map(str, arguments)]
    return subprocess.Popen(line, **{"stdout": subprocess.PIPE, **options}, stderr=subprocess.PIPE, text=True)


def finished(path):
    """Whole lines of a file that a killed process may have left torn."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_an_evaluation_from_the_command_line(command, tmp_path, capsys):
    assert run([*command, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    records = lines(tmp_path / "out" / "results.jsonl")
    assert Counter(record["prompt_id"] for record in records) == {f"s{n}": SAMPLES for n in range(6)}
    assert metrics["pass@1"] == pytest.approx(4 / 6) == sum(record["reward"] for record in records) / len(records)
    assert json.loads((tmp_path / "out" / "results.metrics.json").read_bytes()) == metrics
    assert run(["report", tmp_path / "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == metrics
    assert run(["report", tmp_path / "out"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"pass@1 +0\.667 +0\.\d{3} to [01]\.\d{3} +6\n", table) and "ends: 18 task_complete" in table


def test_concurrency_may_follow_the_server(command, server, tmp_path, capsys):
    assert run([*command, "--concurrency", "auto", "--json"]) == 0
    assert len(lines(tmp_path / "out" / "results.jsonl")) == 6 * SAMPLES
    assert ("/v1/loads", b"") in server.calls


def test_auto_without_reports_of_load_says_what_it_does(quick, server, capsys, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)  # the command's own level is gone after the test
    monkeypatch.setattr(logging.root, "handlers", [])  # as in a new process, which logs to standard error
    server.overrides["/v1/loads"] = ScriptedResponse(404)
    assert run([*quick, "--limit", 1, "--concurrency", "auto"]) == 0
    assert "no server reports its load" in capsys.readouterr().err


def test_two_evaluations_are_compared_by_prompt(command, tmp_path, capsys):
    run(command)
    assert run([*command, "--output", tmp_path / "other", "--temperature", 0.5]) == 0
    capsys.readouterr()
    assert run(["compare", tmp_path / "out", tmp_path / "other"]) == 0
    assert re.search(r"pass@1 +0\.667 +0\.667 +\+0\.000", capsys.readouterr().out)
    assert run(["compare", tmp_path / "out", tmp_path / "other", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["common"] == 6 and told["differences"][0]["interval"]["low"] < 0.0


def test_saved_episodes_are_scored_as_by_a_live_run(command, server, tmp_path, capsys):
    run(command)
    pattern = ["--reward", "regex", "--reward-args", r'{"pattern": "boxed.0"}']
    assert run([*command, "--output", tmp_path / "live", *pattern]) == 0
    asked = len(server.requests)
    capsys.readouterr()
    assert run(["score", tmp_path / "out", *pattern, "--output", tmp_path / "scored", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pass@1"] == pytest.approx(2 / 6)
    assert len(server.requests) == asked
    scored, live = (
        {
            record["key"]: (record["reward"], record["environment"])
            for record in lines(tmp_path / name / "results.jsonl")
        }
        for name in ("scored", "live")
    )
    assert scored == live and len(scored) == 18
    assert run(["compare", tmp_path / "out", tmp_path / "scored"]) == 0
    told = capsys.readouterr().out
    assert "better: s2 0 -> 1, s5 0 -> 1\n" in told and "reward: 'math' -> 'regex'" in told
    assert run([*command, *pattern, "--output", tmp_path / "scored", "--n-samples", SAMPLES + 1]) == 0
    assert len(lines(tmp_path / "scored" / "results.jsonl")) == 24  # the folder is one of that configuration


@pytest.mark.parametrize(
    ("folder", "reward", "output", "told"),
    [
        (".", "env", "other", "name a reward"),
        (".", "best", "other", "no such name (known: math"),
        (".", "exact", ".", "write to another folder"),
        ("nowhere", "exact", "other", "no results of an evaluation"),
    ],
)
def test_wrong_options_of_scoring_are_one_line(
    command, tmp_path, monkeypatch, capsys, refused, folder, reward, output, told
):
    run([*command, "--limit", 1])
    capsys.readouterr()
    monkeypatch.chdir(tmp_path / "out")
    assert told in refused(["score", folder, "--reward", reward, "--output", output])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([FINISHED, "--to", "wandb"], "wandb is not installed: pip install wandb"),
        ([FINISHED, "--to", "tensorboard"], "tensorboardX is not installed: pip install -e '.[tensorboard]'"),
        (["nowhere", "--to", "mlflow"], "neither results of an evaluation nor metrics.csv"),
    ],
)
def test_what_cannot_be_tracked_is_one_line(monkeypatch, refused, arguments, told):
    for package in ("tensorboardX", "wandb", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, package, None)
    assert told in refused(["track", *arguments])


def test_a_tracker_that_refuses_is_one_line(monkeypatch, tmp_path, capsys):
    def refuse(*args, **kwargs):
        raise RuntimeError("no API key\nconfigured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse))
    (tmp_path / "metrics.csv").write_text("step,reward\n1,0.5\n")
    assert main(["track", str(tmp_path), "--to", "wandb"]) == 1
    assert capsys.readouterr().err == "strands-env: --to wandb: no API key configured\n"


@pytest.mark.parametrize("changed", ["model_path", "weight_version"])
def test_results_of_other_weights_are_not_gone_on_with(command, server, tmp_path, capsys, changed):
    assert run([*command, "--limit", 2]) == 0
    asked, before = len(server.requests), lines(tmp_path / "out" / "results.jsonl")
    setattr(server, changed, "another")
    assert run(command) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"served_{changed} was" in error and "is 'another'; use another --output" in error
    assert len(server.requests) == asked and lines(tmp_path / "out" / "results.jsonl") == before


def test_an_unreachable_server_is_one_line_and_exit_code_1(command, refused):
    given = [*command, "--base-url", "http://127.0.0.1:9", "--client-args", '{"max_retries": 1, "retry_delay": 0.01}']
    error = refused(given, 1)
    told = "no server answers at http://127.0.0.1:9: start one (`strands-sglang serve`), or correct --base-url"
    assert error == f"strands-env: {told}"
    assert refused(without(given, "--tokenizer"), 1) == error  # asked for its tokenizer


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_run_killed_repeatedly_loses_and_repeats_no_sample(quick, server, tmp_path):
    def finished_by_prompt(path):
        whole = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return Counter(json.loads(line)["prompt_id"] for line in whole if line.endswith(b"\n"))

    def assert_nothing_is_asked_again(requests, before, *, exactly=False):
        # Every sample opens with one request without a tool's answer: as many of a question as samples were missing.
        asking = [request for request in requests if request.sampling_params.get("max_new_tokens") != 0]  # no primes
        openings = [request.text for request in asking if "<tool_response>" not in request.text]
        asked = Counter("s" + re.findall(r"What is (\d+) ", text)[-1] for text in openings)
        for prompt in {*asked, *(f"s{n}" for n in range(6))}:
            missing = SAMPLES - before[prompt]
            assert asked[prompt] == missing if exactly else asked[prompt] <= missing

    path = tmp_path / "out" / "results.jsonl"
    for wanted in (4, 9, 14):
        before, asked = finished_by_prompt(path), len(server.requests)
        with start(quick) as process:
            try:
                while finished(path) < wanted and process.poll() is None:
                    time.sleep(0.001)
            finally:  # pytest's limit raises here, and leaving the block waits for the process
                process.kill()
        assert finished(path) >= wanted
        assert_nothing_is_asked_again(server.requests[asked:], before)
        with path.open("ab") as file:
            file.write(b'{"key":"torn' if path.read_bytes().endswith(b"\n") else b"")
    before, asked = finished_by_prompt(path), len(server.requests)
    assert run(quick) == 0
    assert_nothing_is_asked_again(server.requests[asked:], before, exactly=True)
    records = lines(path)
    assert len(records) == len({record["key"] for record in records}) == 6 * SAMPLES
    assert {(record["prompt_id"], record["sample_index"]) for record in records} == {
        (f"s{n}", index) for n in range(6) for index in range(SAMPLES)
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_keeps_its_samples_and_says_how_to_resume(quick, tmp_path, number):
    path = tmp_path / "out" / "results.jsonl"
    with start(quick) as process:
        while finished(path) < 3 and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "run the same command to continue" in errors and "Traceback" not in errors
    kept = len(lines(path))
    assert 3 <= kept < 18
    assert run(quick) == 0 and len(lines(path)) == 18


def test_options_come_from_a_file_unless_the_command_line_has_them(command, tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"n_samples": 5, "temperature": 0.5, "env_args": {"max_turns": 3}, "json": True}))
    assert run([*command, "--config", config]) == 0
    described = json.loads((tmp_path / "out" / "results.run.json").read_bytes())
    assert described["n_samples_per_prompt"] == SAMPLES
    assert described["config"]["sampling_params"] == {"temperature": 0.5}
    assert described["config"]["env_args"] == {"max_turns": 3}
    assert json.loads(capsys.readouterr().out)["samples"] == 18


def test_dropped_samples_are_reported_with_their_cause(command, tmp_path, capsys):
    environment = tmp_path / "broken_environment.py"
    environment.write_text(
        "from strands_env.environments import CalculatorEnvironment\n"
        "class Broken(CalculatorEnvironment):\n"
        "    async def reset(self):\n"
        "        raise RuntimeError('no sandbox' + ' here' * 20)\n"
    )
    command += ["--env", "broken_environment.Broken"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.syspath_prepend(str(tmp_path))
        assert run([*command, "--limit", 2]) == 1
        out = capsys.readouterr().out
        assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
        assert "dropped: 6 x RuntimeError: no sandbox" in out and ", 6 dropped" in out
        assert "the same command runs 6 dropped samples again\nresults in" in out
        assert run([*command, "--limit", 2, "--stop-after-failures", 2]) == 1
        assert "2 samples in a row failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"--env": "nothing"}, "--env nothing: no such name (known: calculator"),
        ({"--env": "strands_env.nothing"}, "strands_env has no nothing"),
        ({"--env": "no_such_module.Env"}, "no_such_module cannot be imported"),
        ({"--env-args": '{"max_turnz": 1}'}, "max_turnz"),
        ({"--env-args": '{"max_turns": 0}'}, "--env calculator with --env-args: max_turns must be"),
        ({"--reward": "best"}, "no such name (known: math"),
        ({"--tokenizer": "/no/such/folder"}, "--tokenizer /no/such/folder: no such folder"),
        ({"--client-args": '{"max_retris": 1}'}, "--client-args: "),
        ({"--model-args": '{"enable_thinkin": true}'}, "--model-args: "),
        ({"--base-url": "http://localhost:1/v1"}, "--base-url 'http://localhost:1/v1' ends in /v1"),
        ({"--config": "missing.json"}, "missing.json"),
        ({"--benchmark": "nothing"}, "--benchmark nothing: no such name (known: aime-2024, "),
        ({"--benchmark": "json.JSONDecoder"}, "--benchmark json.JSONDecoder: not a subclass of "),
        ({"--split": "test"}, "only a folder has splits"),
        (
            {"--question-field": "q"},
            "line 1: no question: looked for 'q' among id, question, answer; name the field with --question-field",
        ),
        ({"--region": "us-east-1"}, "--region does not apply to --backend sglang"),
        ({"--backend": "openai", "--model": "m"}, "--tokenizer does not apply to --backend openai"),
        ({"--tool-parser": "hermse"}, "there is no tool parser named"),
        ({"--reward": "exact", "--reward-args": '{"boxes": 1}'}, "--reward exact with --reward-args: "),
        ({"--reward": "regex"}, "--reward regex with --reward-args: missing a required argument: 'pattern'"),
        ({"--reward": "regex", "--reward-args": '{"pattern": "("}'}, "--reward regex with --reward-args: "),
        ({"--reward": "env", "--reward-args": '{"a": 1}'}, "--reward-args does not apply"),
        ({"--env": "mcp"}, "servers"),
        ({"--env": "mcp", "--env-args": '{"servers": []}'}, "servers must be a list such as"),
        ({"--env": "mcp", "--env-args": '{"servers": [{"comand": "x"}]}'}, "an MCP server needs a command"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(command, changes, told, refused):
    assert told in refused([*command, *itertools.chain(*changes.items())])


def test_fields_of_a_file_keep_their_names_in_errors(command, tmp_path, refused):
    path = tmp_path / "odd.jsonl"
    path.write_text('{"text": "1 + 1", "model_id": "m", "base_url": "u"}')
    error = refused([*command, "--dataset", path])
    assert "among text, model_id, base_url; name the field with --question-field" in error


def test_an_install_without_ray_says_what_is_missing(command, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "strands_env.ray", raising=False)
    told = "strands-env: --ray: the ray package is not installed: pip install -e '.[ray]'"
    assert refused([*command, "--ray"]) == told


def test_arguments_of_an_executor_need_a_cluster(command, refused):
    assert refused([*command, "--ray-args", '{"tries": 2}']) == "strands-env: --ray-args needs --ray"


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("def Env(model_factory, reward_fn=None: ...", "SyntaxError"),
        ("raise RuntimeError('no license')", "RuntimeError: no license"),
        (
            "class Env:\n    def __init__(self, model_factory=None):\n        raise RuntimeError('no sandbox\\nhere')",
            "no sandbox here",
        ),
    ],
    ids=["no Python", "not importable", "refuses"],
)
def test_an_unusable_environment_is_one_line_and_exit_code_2(command, tokenizer_path, tmp_path, module, told, refused):
    name = f"unusable_{len(module)}"
    (tmp_path / f"{name}.py").write_text(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.syspath_prepend(str(tmp_path))
        assert told in refused([*command, "--env", f"{name}.Env"])
        assert told in refused(["check", f"{name}.Env", *command[1:3]])
        assert told in refused(["score", FINISHED, "--reward", f"{name}.Env", "--output", tmp_path / "other"])
        assert told in refused(["replay", FINISHED, "--env", f"{name}.Env", "--tokenizer", tokenizer_path])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"n_sample": 1}, "there is no option 'n_sample'"),
        ({"n_samples": "many"}, "n_samples cannot be"),
        ({"backend": "vllm"}, 'backend cannot be "vllm"'),
        ({"env_args": []}, "env_args cannot be"),
        ({"json": 1}, "json cannot be 1"),
    ],
)
def test_a_wrong_option_in_a_file_is_told(command, tmp_path, content, told, refused):
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert told in refused([*command, "--config", tmp_path / "config.json"])


@pytest.mark.parametrize(
    ("name", "near"),
    [
        (["--env", "calculatr"], "--env calculatr: no such name; did you mean calculator?"),
        (["--reward", "exakt"], "--reward exakt: no such name; did you mean exact?"),
        (["--benchmark", "aime2024"], "--benchmark aime2024: no such name; did you mean aime-2024?"),
        (["--dataset", "missing.jsonl"], "--dataset missing.jsonl: no such file or folder"),
        (["--dataset", __file__], f"{__file__}: unknown file type"),
        (["--chat-template", "missing.jinja"], "missing.jinja"),
    ],
)
def test_names_and_files_are_checked_before_a_server_is_asked(command, server, name, near, refused):
    # Without a tokenizer, the server is asked which one it has.
    assert near in refused([*without(command, "--tokenizer"), *name])
    assert server.calls == []


@pytest.mark.parametrize("name", ["report", "watch", "compare"])
def test_help_names_the_commands_that_show_tokens(name, capsys):
    with pytest.raises(SystemExit):
        run([name, "--help"])
    assert "strands-sglang view, doctor and show" in capsys.readouterr().out


def test_a_run_ends_with_its_folder_and_the_next_command(command, tmp_path, capsys):
    folder = tmp_path / "two words"
    assert run([*command, "--limit", 1, "--output", folder]) == 0
    *_, where, following = capsys.readouterr().out.splitlines()
    assert where == f"results in {folder}; see them:"
    assert shlex.split(following) == ["strands-env", "report", str(folder), "--html", "--open"]
    assert run([*command, "--limit", 1, "--output", folder, "--success-threshold", 0.5]) == 0  # no file has it
    assert capsys.readouterr().out.splitlines()[-1] == f"{following} --success-threshold 0.5"
    assert run(["watch", folder, "--success-threshold", 0.5]) == 0
    assert f"{following.strip()} --success-threshold 0.5" in capsys.readouterr().out
    assert run(["score", folder, "--reward", "exact", "--output", tmp_path / "scored"]) == 0
    following = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(following) == ["strands-env", "compare", str(folder), str(tmp_path / "scored")]


def test_the_only_evaluation_below_a_folder_is_read(tmp_path, capsys):
    shutil.copytree(FINISHED, tmp_path / "run" / "evaluation")
    for command in ("report", "watch"):
        assert run([command, tmp_path / "run"]) == 0
        told = capsys.readouterr()
        assert "pass@1" in told.out
        assert told.err == f"reading {tmp_path}/run/evaluation/results.jsonl\n"


def test_several_evaluations_below_a_folder_are_named(tmp_path, capsys):
    for name in ("before", "after"):
        shutil.copy(FINISHED / "results.run.json", tmp_path / f"{name}.run.json")
    for command in (["report"], ["watch"], ["track", "--to", "wandb"], ["score", "--reward", "exact", "--output", "o"]):
        assert run([*command, tmp_path]) == 2
        told = capsys.readouterr().err
        assert told.splitlines() == [
            f"{tmp_path}/after.jsonl",
            f"{tmp_path}/before.jsonl",
            f"strands-env: {tmp_path}: there are several evaluations: name one of these",
        ]
    assert run(["compare", tmp_path / "after.jsonl", tmp_path]) == 2


@pytest.mark.parametrize("arguments", [["report", FINISHED], ["compare", FINISHED, FINISHED]])
def test_a_page_is_opened_in_the_browser(arguments, tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    page = tmp_path / "page.html"
    assert run([*arguments, "--html", "--open", "--output", page]) == 0
    assert opened == [page.as_uri()] and capsys.readouterr().out == f"{page}\n"
    assert run([*arguments, "--open"]) == 2
    assert "--output and --open need --html" in capsys.readouterr().err


def test_missing_package_and_benchmark_are_reported(tmp_path, capsys):
    assert run(["eval", "--env", "calculator", "--output", tmp_path]) == 2
    assert "--dataset PATH or --benchmark NAME must be given" in capsys.readouterr().err
    assert run(["eval", "--dataset", "x.jsonl"]) == 2
    assert run(["report", tmp_path]) == 2
    assert "no results of an evaluation" in capsys.readouterr().err


def test_an_unreadable_ground_truth_is_reported_before_any_run(command, server, dataset, tmp_path, refused):
    """Bad input: file, line, what is wrong."""
    dataset.write_text(dataset.read_text() + '\n{"question": "?", "answer": "\\\\boxed{"}\n')
    assert refused(command).startswith(f"strands-env: {dataset}, line 8: ")
    assert not server.requests and not (tmp_path / "out").exists()


def test_a_comparison_shows_where_long_settings_end():
    path = "/a/long/folder/name" * 5
    assert ending(f"{path}/step-1") == f"…{path[-51:]}/step-1'" and len(ending(f"{path}/step-1")) == 60
    assert ending("x" * 58) == f"'{'x' * 58}'"


def test_arguments_of_a_reward_are_part_of_the_configuration(command, tmp_path, capsys):
    given = [*command, "--limit", 1, "--reward", "regex", "--reward-args"]
    assert run([*given, r'{"pattern": "boxed.(\\d+)", "group": 1}', "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pass@1"] == 1.0
    assert run([*given, '{"pattern": "never"}']) == 1
    assert "reward_args was" in capsys.readouterr().err
    assert run([*given, '{"pattern": "never://me:secret@host"}', "--output", tmp_path / "other"]) == 0
    assert "secret" not in (tmp_path / "other" / "results.run.json").read_text()


def test_the_tools_of_mcp_servers_are_an_environment_by_name(command, server, tmp_path, capsys):
    script = Path(__file__).parent.parent.parent / "support" / "mcp_server.py"
    command += ["--env", "mcp", "--limit", 1, "--n-samples", 1]
    servers = [{"command": sys.executable, "args": [str(script)], "env": {"TOKEN": "secret"}, "prefix": "c"}]
    assert run([*command, "--env-args", json.dumps({"servers": servers})]) == 0
    assert "c_add" in server.requests[0].text
    for name in ("results.jsonl", "results.run.json"):
        assert "secret" not in (tmp_path / "out" / name).read_text()
    command += ["--output", tmp_path / "line"]
    servers = [f"{sys.executable} {script}"]
    assert run([*command, "--env-args", json.dumps({"servers": servers})]) == 0
    assert "add" in server.requests[-1].text


@pytest.mark.parametrize("text", ["nan", "inf", "-Infinity"])
def test_numbers_that_are_not_finite_are_refused(text, tmp_path, capsys):
    for arguments in (
        ["report", tmp_path, f"--success-threshold={text}"],
        ["compare", tmp_path, tmp_path, f"--success-threshold={text}"],
        ["eval", f"--success-threshold={text}"],
        ["eval", f"--temperature={text}"],
    ):
        with pytest.raises(SystemExit) as caught:
            run(arguments)
        assert caught.value.code == 2 and f"{text} is not a finite number" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"success_threshold": NaN}')
    assert run(["eval", "--config", tmp_path / "config.json"]) == 2
    assert "success_threshold cannot be NaN" in capsys.readouterr().err


def test_a_benchmark_without_datasets_names_the_ways_to_get_it(command, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "datasets", None)
    error = refused([*without(command, "--dataset"), "--benchmark", "gsm8k"])
    assert "pip install -e '.[datasets]', or pass a local copy as --dataset" in error


@pytest.mark.parametrize(
    "option", ["--n-samples=x", "--limit=0", "--concurrency=1.5", "--concurrency=full", "--temperature=x"]
)
def test_a_wrong_number_is_named_with_its_option(option, capsys):
    with pytest.raises(SystemExit):
        run(["eval", option])
    name, _, value = option.partition("=")
    assert f"argument {name}: {value} is not a " in capsys.readouterr().err


def test_an_install_without_the_extra_says_what_is_missing():
    """No traceback."""
    program = "import sys; sys.modules['scipy'] = None; from strands_env.cli import main; sys.exit(main(['list']))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert "needs the extra `env`" in ended.stderr and "scipy" in ended.stderr and "'.[env]'" in ended.stderr


def test_names_are_listed_with_what_keeps_them_from_running(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "bedrock_agentcore", None)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert run(["list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("aime-2024", "gsm8k", "calculator", "world", "math", "bedrock"))
    reasons = dict(re.findall(r"^(\S+).*\n    cannot run: (.*)", out, re.MULTILINE))
    assert reasons["agentcore"].startswith("bedrock_agentcore is not installed: pip install")
    assert reasons["math"].startswith("math_verify is not installed") and "calculator" not in reasons
    assert max(map(len, out.splitlines())) <= 80


ADDITIONS = """
from strands_env.core import Action, RewardFunction, TaskContext
from strands_env.environments import CalculatorEnvironment
from strands_env.eval import Evaluator, register_eval

class ShopEnvironment(CalculatorEnvironment):
    pass

class LongEnough(RewardFunction):
    def __init__(self, *, least):
        self.least = least

    async def compute(self, *, action, step_result):
        return float(len(step_result.observation.final_response) >= self.least)

@register_eval("shop-sums")
class Sums(Evaluator):
    def load_dataset(self):
        for n in range(1, 9):
            yield Action(message=f"What is {n} + 1?", task_context=TaskContext(id=n, ground_truth=str(n + 1)))
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that declares an environment, a reward and benchmarks, as an installed one."""
    folder = tmp_path / "site"
    (folder / "shop-1.0.dist-info").mkdir(parents=True)
    (folder / "shop-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n")
    (folder / "shop-1.0.dist-info" / "entry_points.txt").write_text(
        "[strands_env.environments]\nshop = shop:ShopEnvironment\ncalculator = shop:Nothing\n"
        "closed = shop_closed:Environment\n"
        "[strands_env.rewards]\nlong-enough = shop:LongEnough\n"
        "[strands_env.benchmarks]\nshop = shop\nshop-closed = shop_closed\n"
    )
    (folder / "shop.py").write_text(ADDITIONS)
    (folder / "shop_closed.py").write_text("raise RuntimeError('closed today')\n")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    REGISTERED.pop("shop-sums", None)
    sys.modules.pop("shop", None)


def test_names_of_installed_packages_run(package, command, tmp_path, capsys, refused):
    given = [*without(command, "--dataset"), "--benchmark", "shop-sums", "--limit", 3, "--json"]
    named = [*given, "--env", "shop", "--reward", "long-enough", "--reward-args", '{"least": 8}']
    assert run(named) == 0
    assert json.loads(capsys.readouterr().out)["pass@1"] == 1.0
    records = lines(tmp_path / "out" / "results.jsonl")
    assert Counter(record["prompt_id"] for record in records) == {"1": 3, "2": 3, "3": 3}
    assert records[0]["environment"]["class"] == "shop.ShopEnvironment"
    assert json.loads((tmp_path / "out" / "results.run.json").read_bytes())["benchmark"] == "shop-sums"
    assert run([*given, "--output", tmp_path / "dotted", "--benchmark", "shop.Sums"]) == 0
    assert "--dataset does not apply to --benchmark shop-sums" in refused([*given, "--dataset", "x.jsonl"])


def test_what_other_packages_declare_is_listed(package, capsys):
    assert run(["list"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"shop-sums +shop\.Sums\n", out) and re.search(r"long-enough +shop:LongEnough\n\n", out)
    assert re.search(r"^shop_closed\n    cannot run: RuntimeError: closed today", out, re.MULTILINE)
    assert re.search(r"^closed +shop_closed:Environment\n    cannot run: closed today", out, re.MULTILINE)
    assert re.search(r"^calculator +strands_env\.", out, re.MULTILINE)  # no other package takes the name


def test_two_benchmarks_cannot_have_one_name(package):
    with pytest.raises(ValueError, match="'gsm8k' is taken by this package"):
        register_eval("gsm8k")(type("Mine", (Evaluator,), {}))
    importlib.import_module("shop")
    with pytest.raises(ValueError, match=r"'shop-sums' is taken by shop\.Sums"):
        register_eval("shop-sums")(type("Mine", (Evaluator,), {}))


def test_model_and_tokenizer_may_be_the_servers(command, server, tokenizer_path, tmp_path, capsys):
    given = [*without(command, "--tokenizer"), "--limit", 1]
    server.model_path = str(tokenizer_path)
    assert run(given) == 0
    config = json.loads((tmp_path / "out" / "results.run.json").read_bytes())["config"]
    assert config["tokenizer"] == str(tokenizer_path)
    server.model_path = "/models/elsewhere"
    assert run(given) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "tokenizer /models/elsewhere cannot be loaded on this machine" in error
    assert error.endswith("give --model or --tokenizer")
    assert run([*given, "--base-url", "http://127.0.0.1:9", "--client-args", '{"max_retries": 0}']) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("strands-env: no server answers at http://127.0.0.1:9: start one")


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize("arguments", [["list"], ["compare", FINISHED, FINISHED], ["--help"]])
def test_unread_or_unwritable_output_gives_no_traceback(arguments):
    """`| head`, and a full disk."""
    command = [sys.executable, "-m", "strands_env.cli", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
        said = "strands-env: standard output: No space left on device\n"
        assert (ended.returncode, ended.stderr) == (1, said)


def test_an_evaluation_whose_output_nobody_reads_is_kept(quick, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    process = start([*quick, "--limit", 1], stdout=writer)
    os.close(writer)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (141, "")
    assert len(lines(tmp_path / "out" / "results.jsonl")) == SAMPLES
