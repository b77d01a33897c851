"""The examples."""

import asyncio
import importlib
import json
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from strands_sglang.testing import ScriptedSGLang
from support.agents import call
from support.environments import lines
from support.processes import has_ended, run_example
from support.slime import Sample, check_rollouts, install_slime, slime_args, slime_sampling_params

# === the examples, run as their users run them, most against a scripted server ===


CALCULATOR = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "calculator.py"))
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
def test_any_other_expression_is_rejected_or_a_number(expression):
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


def test_it_prints_pass_at_k_of_a_local_file_and_resumes(chatml_tokenizer, tmp_path):
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
    assert again.stdout == done.stdout and len(server.requests) == asked
    assert sum(not request.is_prefill for request in server.requests) == 12
    assert len(lines(tmp_path / "out" / "results.jsonl")) == 6


# === the slime example: its functions run, its tool has limits, its data and its script are what they should be ===


FOLDER = Path(__file__).parents[2] / "examples" / "slime"
SCRIPT = FOLDER / "strands_qwen3_8b.sh"
NAMES = ("python_tool", "generate_with_strands", "prepare_data")


@pytest.fixture
def example(monkeypatch):
    """Imports a module of the example, as the script's PYTHONPATH does."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def tool(example):
    return example("python_tool")


# --- generate and reward ---


async def test_slime_example_runs_python_and_scores_the_answer(example, chatml_tokenizer, monkeypatch):
    install_slime(monkeypatch, chatml_tokenizer)
    asked = []

    def compute_score(response, label, strict_box_verify):
        asked.append(strict_box_verify)
        right = strict_box_verify and f"\\boxed{{{label}}}" in response
        return {"score": 1.0 if right else -1.0, "pred": "[INVALID]"}

    for name in ("slime.rollout.rm_hub", "slime.rollout.rm_hub.math_dapo_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["slime.rollout.rm_hub.math_dapo_utils"].compute_score = compute_score  # type: ignore[attr-defined]
    module = example("generate_with_strands")
    code = call("execute_python_code", code="print(25 * 17)")
    server = ScriptedSGLang(chatml_tokenizer, [code, "\\boxed{425}", code, code, code, code, "\\boxed{1}"])
    with server.serve() as url:
        args = slime_args(url)
        samples = [
            await module.generate(args, Sample(index=number, prompt="25 * 17?", label="425"), slime_sampling_params())
            for number in range(2)
        ]
    check_rollouts(samples, args, chatml_tokenizer)
    assert "<tool_response>\n425\n" in server.requests[1].text
    assert await module.reward_func(args, samples[0]) == 1.0
    assert asked == [False, True]
    assert await module.reward_func(args, samples) == [1.0, -0.9]


@pytest.mark.parametrize(("iterations", "reward"), [(0, -1.0), (2, -1.0), (3, -0.95), (5, -0.85), (50, -0.6)])
async def test_being_wrong_is_never_worse_than_failing(iterations, reward, example, chatml_tokenizer, monkeypatch):
    """A wrong answer without tools had -1.1, and a crash 0.0."""
    install_slime(monkeypatch, chatml_tokenizer)
    for name in ("slime.rollout.rm_hub", "slime.rollout.rm_hub.math_dapo_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    wrong = {"score": -1.0, "pred": "1"}
    sys.modules["slime.rollout.rm_hub.math_dapo_utils"].compute_score = lambda *a, **k: wrong  # type: ignore[attr-defined]
    module = example("generate_with_strands")
    facts = {"strands_sglang": {"tool_iterations": iterations}}
    answered = Sample(index=0, label="425", response="no", metadata=facts)
    assert await module.reward_func(slime_args(), answered) == pytest.approx(reward)
    server = ScriptedSGLang(chatml_tokenizer, [])
    with server.serve() as url:
        args = slime_args(url)
        failed = await module.generate(args, Sample(index=1, prompt="25 * 17?", label="425"), slime_sampling_params())
    assert failed.remove_sample and await module.reward_func(args, failed) <= reward


# --- the tool ---


async def test_code_runs_in_an_empty_folder_and_returns_its_output(tool):
    code = "import os, sys\nprint(os.listdir('.'), len(sys.argv))\nprint('x', file=sys.stderr)"
    assert (await tool.run_python(code)).split("\n")[:2] == ["['main.py'] 1", "x"]


async def test_an_error_is_shown_with_its_line(tool):
    output = await tool.run_python("a = 1\nb = a / 0")
    assert "ZeroDivisionError" in output and 'File "main.py", line 2' in output


async def test_a_program_that_prints_nothing_is_told_to_print(tool):
    assert await tool.run_python("1 + 1") == "[nothing was printed: print what you want to see]"


async def test_code_that_runs_too_long_is_stopped_with_children(tool, tmp_path):
    mark = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(mark)!r}, 'w').write(str(child.pid))\n"
        "print('started', flush=True)\n"
        "time.sleep(600)"
    )
    began = time.monotonic()
    output = await tool.run_python(code, tool.Limits(wall_s=8.0))
    assert output == "started\n\n[stopped after 8 seconds]"
    assert time.monotonic() - began < 60
    assert has_ended(int(mark.read_text()))


async def test_a_child_that_stays_behind_does_not_hold_the_run_up(tool):
    code = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\nprint(1)"
    began = time.monotonic()
    assert (await tool.run_python(code)).strip() == "1"
    assert time.monotonic() - began < 25


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x = bytearray(8 << 30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(64 << 20))", "File too large|SIGXFSZ"),
        ("while True: pass", "SIGXCPU|SIGKILL"),
        ("files = [open('f', 'w') for _ in range(500)]", "Too many open files"),
        ("while True: print('x' * 1000)", "output was cut"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("input()", "EOFError"),
        ("\ud800", "SyntaxError|invalid"),
    ],
)
async def test_limits_hold_and_are_told(code, told, tool):
    output = await tool.run_python(code, tool.Limits(cpu_s=1))
    assert re.search(told, output)
    assert len(output) < 9000


async def test_a_run_that_is_cancelled_leaves_nothing_behind(tool, tmp_path):
    mark = tmp_path / "pid"
    code = f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    task = asyncio.ensure_future(tool.run_python(code))
    while not (mark.exists() and mark.read_text()):
        await asyncio.sleep(0.01)  # until the program has started
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert has_ended(int(mark.read_text()))


def test_several_event_loops_can_use_the_tool(tool):
    async def many():
        return await asyncio.gather(*(tool.run_python(f"print({n})") for n in range(tool.CONCURRENT_RUNS + 1)))

    for _ in range(2):
        assert [output.strip() for output in asyncio.run(many())] == [str(n) for n in range(tool.CONCURRENT_RUNS + 1)]


# --- data ---


def test_data_is_prepared_from_local_files(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "1 + 1?"}], "label": "2"},
        {"prompt": "2 + 2? ü", "label": 4, "source": "x"},
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = [sys.executable, FOLDER / "prepare_data.py", tmp_path / "data", "--dapo", source, "--aime", source]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.count("2 rows") == 2
    for name in ("dapo-math-17k", "aime-2024"):
        lines = (tmp_path / "data" / f"{name}.jsonl").read_bytes().splitlines()
        assert [json.loads(line) for line in lines] == [
            rows[0],
            {"prompt": [{"role": "user", "content": "2 + 2? ü"}], "label": "4", "source": "x"},
        ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"label": "1"}'], "no prompt"),
        (['{"prompt": "x"}'], "no label"),
        (['{"prompt": "x", "label": " "}'], "no label"),
        (["{"], "line 1: not JSON"),
        (["[1]"], "not a JSON object"),
        ([], "no rows"),
    ],
)
def test_rows_without_prompt_or_label_leave_no_file(lines, message, example, tmp_path):
    module = example("prepare_data")
    source, target = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        module.write(module.rows_of(str(source)), target)
    assert list(tmp_path.iterdir()) == [source]


def test_a_dataset_is_loaded_from_the_hub_by_name(example, monkeypatch):
    datasets = ModuleType("datasets")
    datasets.load_dataset = lambda name, split: [{"name": name, "split": split}]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    module = example("prepare_data")
    assert list(module.rows_of(module.DATASETS["aime-2024"])) == [{"name": "zhuzilin/aime-2024", "split": "train"}]


# --- the script and the README ---


def test_the_script_is_shell_and_names_functions_that_exist(example, monkeypatch):
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    text = SCRIPT.read_text(encoding="utf-8")
    paths = dict(re.findall(r"--(custom-[a-z-]+-path) ([\w.]+)", text))
    assert set(paths) == {"custom-generate-function-path", "custom-rm-path", "custom-reward-post-process-path"}
    for path in paths.values():
        module, _, name = path.rpartition(".")
        assert callable(getattr(example(module), name))
    assert "--apply-chat-template" not in re.sub(r"#.*", "", text)
    declared, used = set(re.findall(r"^([A-Z]+_ARGS)=", text, re.M)), set(re.findall(r"\{([A-Z]+_ARGS)\[@\]", text))
    assert used == declared | {"MODEL_ARGS"}


def test_the_script_says_what_is_missing(tmp_path):
    run = subprocess.run(
        ["bash", SCRIPT], env={"PATH": "/usr/bin:/bin", "SLIME_DIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert run.returncode == 1 and f"{tmp_path}/train.py is not there: see README.md" in run.stderr


def test_the_readme_names_files_that_exist():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"`([\w.]+\.(?:py|sh|txt))`", text):
        assert (FOLDER / name).is_file(), name
    for target in re.findall(r"\]\((?!https:)([^)]+)\)", text):
        assert (FOLDER / target.partition("#")[0]).is_file(), target


def test_the_demo_shows_a_rollout_and_names_its_page(chatml_tokenizer, tmp_path, monkeypatch):
    chatml_tokenizer.save_pretrained(tmp_path / "tokenizer")
    monkeypatch.setenv("SGLANG_TOKENIZER", str(tmp_path / "tokenizer"))

    def answer(request):
        return (
            call(expression="27 * 43") if request.text.rstrip().endswith("What is 27 * 43?") else "The answer is 1161."
        )

    with ScriptedSGLang(chatml_tokenizer, answer).serve() as base_url:
        monkeypatch.setenv("SGLANG_BASE_URL", base_url)
        ended = run_example("calculator_demo", "--out", tmp_path / "out", "--svg", tmp_path / "one.svg")

    assert ended.returncode == 0, ended.stderr
    assert "turn 0 opens the first sequence" in ended.stdout and "\x1b" not in ended.stdout
    page = Path(ended.stdout.splitlines()[-1])
    assert page == tmp_path / "out" / "view.html" and page.stat().st_size
    assert len(list((tmp_path / "out" / "trajectories").iterdir())) == 24
    assert "<svg" in (tmp_path / "one.svg").read_text()
