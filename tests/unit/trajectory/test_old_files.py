"""Files that earlier releases wrote (tests/fixtures/README.md) still load, extend and resume."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from strands_env.cli import main as strands_env
from strands_env.eval import Evaluator, read_results
from strands_sglang import SGLangModel, Trajectory
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from support.agents import call, make_agent, make_tools
from support.environments import StubEnvironment, lines, tasks

RELEASES = sorted(path for path in (Path(__file__).parents[2] / "fixtures").iterdir() if path.is_dir())
of_each_release = pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
QUESTIONS = [{"id": f"s{n}", "question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)]
COMMAND = [
    *("eval", "--dataset", "sums.jsonl", "--env", "calculator", "--backend", "sglang", "--tokenizer", "tokenizer"),
    *("--n-samples", "2", "--concurrency", "1", "--keep-tokens", "--output", "out"),
]
"""The evaluation in `command/`, run in a folder with `sums.jsonl` and `tokenizer`; `--base-url` comes on top."""


def solve(request):
    """A policy that asks the calculator and is right about every sum but those divisible by three."""
    left, right = map(int, re.findall(r"What is (\d+) \+ (\d+)", request.text)[-1])
    if "<tool_response>" not in request.text:
        return ScriptedAnswer(call("calculator", expression=f"{left} + {right}"))
    return ScriptedAnswer(rf"\boxed{{{left + right if (left + right) % 3 else 0}}}")


def facts(trajectory):
    """What the code at hand reads from a trajectory."""
    return {
        "statuses": [turn.status.value for turn in trajectory.turns],
        "auxiliary": [turn.is_auxiliary for turn in trajectory.turns],
        "sent_ids": [turn.sent_ids() for turn in trajectory.turns],
        "policy_versions": [list(sequence.policy_versions) for sequence in trajectory.sequences()],
        "sequences": [
            {"token_ids": s.token_ids, "loss_mask": s.loss_mask, "logprobs": s.logprobs}
            for s in trajectory.sequences(discarded=True, auxiliary=True)
        ],
        "trained": [sum(sequence.loss_mask) for sequence in trajectory.sequences()],
        "main": trajectory.latest_main_sequence().token_ids,
        "tool_parse_errors": trajectory.tool_parse_errors,
    }


def told(path):
    return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "path",
    [path for release in RELEASES for path in sorted(release.glob("trajectories/*.safetensors"))],
    ids=lambda path: f"{path.parent.parent.name}-{path.stem}",
)
def test_an_old_trajectory_reads_as_it_did_when_it_was_written(path, tmp_path):
    def same(one, other):
        """NaN equals itself here."""
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        if isinstance(one, list):
            return len(one) == len(other) and all(map(same, one, other))
        return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))

    def as_json(value):
        return json.loads(json.dumps(value))

    expected = told(path)
    del expected["messages"]
    loaded = Trajectory.load(path)
    assert same(as_json(facts(loaded)), expected)
    loaded.save(tmp_path / "again")
    assert same(as_json(facts(Trajectory.load(tmp_path / "again"))), expected)


@pytest.mark.parametrize("name", ["tool_loop", "aborts", "helpers"])
@of_each_release
async def test_an_old_trajectory_is_extended(release, name):
    path = release / "trajectories" / f"{name}.safetensors"
    tokenizer = AutoTokenizer.from_pretrained(release / "tokenizer")
    server = ScriptedSGLang(tokenizer, ["More."])
    model = SGLangModel(tokenizer=tokenizer, client=server.client())
    model.trajectory = Trajectory.load(path)
    tools = make_tools()[0] if name == "tool_loop" else None
    await make_agent(model, tools, messages=told(path)["messages"]).invoke_async("And more?")
    turn = model.trajectory.turns[-1]
    assert turn.parent is not None
    assert server.requests[0].input_ids[: len(turn.parent.token_ids())] == turn.parent.token_ids()


@of_each_release
async def test_an_old_evaluation_by_the_library_is_resumed(release, tmp_path):
    path = shutil.copytree(release / "library", tmp_path / "out") / "results.jsonl"
    before = {sample["key"]: sample for sample in map(json.loads, path.read_text("utf-8").splitlines()[:-1])}
    stub = StubEnvironment()
    evaluator = Evaluator(stub.factory, show_progress=False, n_samples_per_prompt=2, output_path=path)
    results = await evaluator.run(tasks(4))
    assert {action.task_context.id for action in stub.episodes} <= {"t3"}  # its reward had failed
    for n in range(3):
        assert [sample.step_result.reward.reward for sample in results[f"t{n}"]] == [n % 2] * 2
    assert {key: sample for sample in lines(path) if (key := sample["key"]) in before} == before


@of_each_release
def test_an_old_evaluation_by_the_command_is_resumed(release, tmp_path, monkeypatch):
    folder = shutil.copytree(release / "command", tmp_path / "run")
    os.symlink(release / "tokenizer", folder / "tokenizer")
    monkeypatch.chdir(folder)
    before = lines(folder / "out" / "results.jsonl")
    server = ScriptedSGLang(AutoTokenizer.from_pretrained(release / "tokenizer"), solve)
    with server.serve() as base_url:
        assert strands_env([*COMMAND, "--base-url", base_url]) == 0
    asked = {row["id"] for row in QUESTIONS for request in server.requests if row["question"] in request.text}
    assert asked == {"s2", "s3"}
    records = lines(folder / "out" / "results.jsonl")
    assert records[: len(before)] == before and len(records) == 2 * len(QUESTIONS)
    _, results = read_results(folder / "out" / "results.jsonl")
    assert {prompt: len(samples) for prompt, samples in results.items()} == {row["id"]: 2 for row in QUESTIONS}
