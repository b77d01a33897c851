"""Commands as users run them: a served model, an evaluation that is killed and resumed, and the wheel's own install.

The evaluation is judged by the server's own log; `KILLED_EVALUATION=64,4,3` has 64 tasks x 4 samples killed three times
(about ten minutes on two cores). The wheel is installed where nothing else is: its declared dependencies are enough for
what the README promises.
"""

import asyncio
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import venv
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from strands_sglang import SGLangClient, Trajectory, get_tokenizer, local
from support.environments import worked_examples
from support.pages import ROOT, blocks
from support.processes import has_ended
from support.real_servers import logged, running_requests


async def test_serve_starts_a_server_and_leaves_no_process(sglang_python):
    def descendants(pid):
        """Ids of all processes that a process started, and of those that they started."""
        children = set()
        with suppress(OSError):  # a process or a thread that has just ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                children |= set(map(int, (task / "children").read_text().split()))
        return children.union(*(descendants(child) for child in children))

    model = local.ensure_tiny_qwen3(sglang_python)
    command = [sys.executable, "-m", "strands_sglang.cli", "serve", "--model", str(model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            base_url = process.stdout.readline().strip()
            async with SGLangClient(base_url) as client:
                assert await client.health()
                assert (await client.model_info())["model_path"] == str(model)
                answer = await client.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 4})
            assert 0 < len(answer["output_ids"]) <= 4
            pids = descendants(process.pid)
            assert len(pids) >= 3  # the guard, the server, its scheduler and more
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.timeout(1800, func_only=True)
async def test_killed_and_resumed_evaluation_has_each_sample_once(own_server, smollm_server, tmp_path):
    tasks, samples, kills = map(int, os.environ.get("KILLED_EVALUATION", "8,2,1").split(","))
    rng = random.Random(1)
    examples = worked_examples({"15 * 12": 180, "98 + 47": 145, "84 - 29": 55})
    prompts, rows = {}, []
    for number, (left, right) in enumerate(rng.sample(list(itertools.product(range(11, 99), repeat=2)), tasks)):
        sign = "+-*"[number % 3]
        answer = {"+": left + right, "-": left - right, "*": left * right}[sign]
        question = f"What is {left} {sign} {right}?"
        prompts[question] = f"task-{number}"
        row = {"id": prompts[question], "question": question, "answer": str(answer)}
        rows.append(json.dumps({**row, "conversation_history": examples}) + "\n")
    (tmp_path / "tasks.jsonl").write_text("".join(rows), encoding="utf-8")
    output = tmp_path / "out"
    results = output / "results.jsonl"
    command = [
        *(sys.executable, "-m", "strands_env.cli", "eval", "--dataset", tmp_path / "tasks.jsonl"),
        *("--backend", "sglang", "--base-url", smollm_server.base_url, "--tokenizer", smollm_server.model_path),
        *("--chat-template", local.CHATML_TOOLS_TEMPLATE, "--system-prompt", "You are a helpful assistant."),
        *("--env", "calculator", "--model", "smollm2", "--env-args", '{"max_tool_iterations": 3}'),
        *("--temperature", 0.6, "--max-new-tokens", 40, "--n-samples", samples, "--concurrency", 8),
        *("--output", output, "--keep-trajectories", "--json"),
    ]
    tokenizer = get_tokenizer(str(smollm_server.model_path))

    def whole_records():
        lines = results.read_bytes().splitlines(keepends=True) if results.exists() else []
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    for moment in [*sorted(rng.sample(range(1, tasks * samples - 8), kills)), None]:
        finished = Counter(record["prompt_id"] for record in whole_records())
        before = len(logged(smollm_server.log_path, "request.received"))
        with subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True) as process:
            while moment is not None and process.poll() is None and len(whole_records()) < moment:
                time.sleep(0.01)
            if moment is not None and process.poll() is None:
                time.sleep(rng.random() * 0.5)
                os.kill(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
        while await running_requests(smollm_server.base_url):  # the killed one's last ones
            await asyncio.sleep(0.05)
        asked = Counter()
        for entry in logged(smollm_server.log_path, "request.received")[before:]:
            ids = entry["obj"].get("input_ids")
            if ids and entry["obj"]["sampling_params"]["max_new_tokens"]:  # else it is a prompt sent ahead
                last = re.split(r"<\|im_start\|>user\n", tokenizer.decode(ids))[-1]
                # Else it is a later call of an episode.
                asked[prompts.get(last.partition("<|im_end|>")[0].strip())] += 1
        # Nothing that was finished is generated again.
        assert all(asked[prompt] <= samples - finished[prompt] for prompt in prompts.values())
    assert process.returncode == 0
    assert sum(asked[prompt] for prompt in prompts.values()) == tasks * samples - sum(finished.values())

    # Each sample is there once.
    records = [json.loads(line) for line in results.read_bytes().splitlines()]
    assert len(records) == len({record["key"] for record in records}) == tasks * samples
    assert {(record["prompt_id"], record["sample_index"]) for record in records} == {
        (prompt, index) for prompt in prompts.values() for index in range(samples)
    }
    # Every call of a record is one that the server logged, and no other record's.
    log = {entry["rid"]: entry["out"]["output_ids"] for entry in logged(smollm_server.log_path, "request.finished")}
    folder = output / "results.trajectories"
    turns = [turn for one in records for turn in Trajectory.load(folder / f"{one['key']}.safetensors").turns]
    calls = [turn.generation for turn in turns if turn.generation is not None]
    assert len({call.request_id for call in calls}) == len(calls) >= len(records)
    assert all(list(log[call.request_id]) == list(call.output_ids) for call in calls)
    # The metrics are what counting gives.
    rewards = {prompt: [one["reward"] for one in records if one["prompt_id"] == prompt] for prompt in prompts.values()}
    metrics = json.loads(out)
    for k in (k for k in (1, 2, 4, 8) if k <= samples):
        draws = [list(itertools.combinations([reward >= 1.0 for reward in row], k)) for row in rewards.values()]
        assert metrics[f"pass@{k}"] == pytest.approx(sum(sum(map(any, of)) / len(of) for of in draws) / tasks, abs=1e-9)
        if k > 1:
            every = sum(sum(map(all, of)) / len(of) for of in draws) / tasks
            assert metrics[f"pass^{k}"] == pytest.approx(every, abs=1e-9)
    assert metrics[f"avg@{samples}"] == pytest.approx(sum(one["reward"] for one in records) / len(records), abs=1e-9)
    assert any(record["reward"] == 1.0 for record in records)


IMPORTS = """
import importlib, pkgutil, sys

failures = {}
for root in sys.argv[1:]:
    package = importlib.import_module(root)
    for module in pkgutil.walk_packages(package.__path__, f"{root}."):
        parts = module.name.split(".")
        # Leave out private modules, programs of other processes, and modules that need another extra.
        others = {"scripts", "shim", "harbor", "reasoning_gym"}
        if any(part.startswith("_") for part in parts) or others & set(parts[1:]):
            continue
        try:
            importlib.import_module(module.name)
        except Exception as error:
            failures[module.name] = repr(error)
sys.exit("\\n".join(f"{name}: {error}" for name, error in failures.items()) or None)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    _checked(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The Python of a new environment with the wheel and without extras, far from the repository."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder)
    python = folder / "bin" / "python"
    _install(python, wheel)
    return python


def _install(python, requirement):
    _checked(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", requirement)


def _checked(*command, cwd=None):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    ran = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return ran.stdout


@pytest.mark.registry
def test_the_quick_start_runs_without_extras(python, chatml_tokenizer, tmp_path):
    quick_start_text = """
import sys

from transformers import AutoTokenizer

from strands_sglang.testing import ScriptedSGLang

source, folder = sys.argv[1:]
call = '<tool_call>\\n{"name": "multiply", "arguments": {"a": 25, "b": 17}}\\n</tool_call>'
server = ScriptedSGLang(AutoTokenizer.from_pretrained(folder), [call, "25 * 17 is 425."])
with server.serve() as base_url:
    with open(source) as file:
        text = file.read().replace("http://localhost:30000", base_url).replace("Qwen/Qwen3-4B-Instruct-2507", folder)
    exec(compile(text, source, "exec"))
assert "<tool_response>\\n425\\n</tool_response>" in server.requests[1].text
assert tokens.loss_mask.count(1) == sum(logprob not in (None, 0.0) for logprob in tokens.logprobs) > 0
assert "torch" not in sys.modules
print("installed at", __import__("strands_sglang").__file__)
"""
    chatml_tokenizer.save_pretrained(tmp_path / "model")
    quick_start = next(block for block in blocks("python") if block.section == "Quick start")
    (tmp_path / "quick_start.py").write_text(quick_start.text)
    printed = _checked(python, "-c", quick_start_text, tmp_path / "quick_start.py", tmp_path / "model", cwd=tmp_path)
    assert "25 * 17 is 425." in printed
    assert "elsewhere" in printed.splitlines()[-1]


@pytest.mark.registry
def test_every_module_of_the_provider_imports_without_extras(python, tmp_path):
    _checked(python, "-c", IMPORTS, "strands_sglang", cwd=tmp_path)


@pytest.mark.registry
def test_every_env_module_imports_with_the_extras(python, wheel, tmp_path):
    _install(python, f"{wheel}[env,ray]")
    _checked(python, "-c", IMPORTS, "strands_env", cwd=tmp_path)
