"""`ReasoningGymEnvironment`, its tasks and its reward, with the published package."""

import asyncio
import json
import os
import subprocess
import sys

import pytest
from reasoning_gym.factory import DATASETS

from strands_env.cli import main
from strands_env.core import Observation, StepResult, TerminationReason
from strands_env.core.models import sglang_model_factory
from strands_env.environments import ReasoningGymEnvironment, ReasoningGymReward, reasoning_gym_tasks
from strands_env.eval.benchmarks import load_tasks
from strands_sglang.credit import training_rows
from strands_sglang.testing import ScriptedSGLang
from support.agents import build_chatml_tokenizer
from support.pages import ROOT, URL, blocks

WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
OF_PARTS = {"composite"}  # its settings are objects
FAMILIES = sorted(DATASETS.keys() - WITHOUT_ANSWER - OF_PARTS)
DEPENDING_ON_HASHES = (
    "isomorphic_strings",
    "knight_swap",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
RAISES_ON_TEXT = {"prime_factorization"}  # its verifier takes every answer for numbers
ACCEPTS_ALL = {"game_of_life_halting"}  # its verifier compares the truth of texts, and only the empty one is false


def ended(text):
    messages = [{"role": "assistant", "content": [{"text": text}]}]
    return StepResult(observation=Observation(messages=messages), termination_reason=TerminationReason.TASK_COMPLETE)


def reward_of(task, text):
    return asyncio.run(ReasoningGymReward().compute(action=task, step_result=ended(text)))


def test_there_are_a_hundred_families_with_an_answer():
    assert len(FAMILIES) == 100
    for family in WITHOUT_ANSWER:
        assert reasoning_gym_tasks(family, 1)[0].task_context.ground_truth is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_own_answer_gets_1_and_a_wrong_one_less(family):
    first, *others = reasoning_gym_tasks(family, 4, seed=5)
    truth = first.task_context.ground_truth
    assert reward_of(first, f"It is <answer>{truth}</answer>").reward == 1.0
    wrong = [task.task_context.ground_truth for task in others if task.task_context.ground_truth != truth]
    wrong = [*wrong, "0", "no such answer"] if family not in RAISES_ON_TEXT else wrong
    lowest = min(reward_of(first, f"<answer>{answer}</answer>").reward for answer in wrong)
    assert lowest == 1.0 if family in ACCEPTS_ALL else lowest < 0.5


SEEDED = ("leg_counting", *DEPENDING_ON_HASHES)


@pytest.fixture(scope="module")
def made_elsewhere():
    """Tasks by family that another process made."""
    program = (
        "import json, sys\nfrom strands_env.environments import reasoning_gym_tasks\n"
        "tasks = {name: reasoning_gym_tasks(name, 4, seed=3) for name in sys.argv[1:]}\n"
        "print(json.dumps({name: [one.model_dump_json() for one in made] for name, made in tasks.items()}))"
    )
    command = [sys.executable, "-c", program, *SEEDED]
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout)


@pytest.mark.parametrize("family", SEEDED)
def test_the_same_seed_makes_the_same_tasks_in_another_process(family, made_elsewhere):
    """Made in this process, those of some families depend on the seed of Python's hashes."""
    tasks = reasoning_gym_tasks(family, 4, seed=3)
    assert made_elsewhere[family] == [task.model_dump_json() for task in tasks]
    assert [task.task_context.id for task in tasks] == [f"{family}/3/{index}" for index in range(4)]


def test_settings_belong_to_the_task():
    (task,) = reasoning_gym_tasks("leg_counting", 1, min_animals=1, max_animals=1)
    assert "," not in task.message.rpartition("if you have")[2]
    again = task.model_validate_json(task.model_dump_json())
    assert reward_of(again, f"<answer>{task.task_context.ground_truth}</answer>").reward == 1.0


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("leg_counting", {"max_legs": 2}, "unexpected keyword argument 'max_legs'"),
        ("legs", {}, "'legs' not registered"),
    ],
)
def test_what_the_package_refuses_is_an_error_that_says_so(family, settings, reason):
    with pytest.raises(ValueError, match=reason):
        reasoning_gym_tasks(family, 1, **settings)


async def run(task, answer, **more):
    tokenizer = build_chatml_tokenizer()
    server = ScriptedSGLang(tokenizer, [answer])
    models = sglang_model_factory(tokenizer=tokenizer, client=server.client())
    return server, await ReasoningGymEnvironment(models, **more).step(task)


async def test_an_episode_is_one_turn_that_is_scored_by_the_familys_verifier():
    (task,) = reasoning_gym_tasks("leg_counting", 1)
    truth = task.task_context.ground_truth
    server, result = await run(task, f"<answer>1</answer>, no, <answer> {truth}\n</answer>")
    assert result.reward.reward == 1.0
    assert result.reward.info == {"verdict": "scored", "extracted": truth, "ground_truth": truth}
    (request,) = server.requests
    assert "between <answer> and </answer>" in request.text and task.message.strip() in request.text
    (row,) = training_rows([result.episode(group=task.task_context.id)], baseline=None)
    assert sum(row.loss_mask) == len(server.responses[0].body["output_ids"])


@pytest.mark.parametrize("answer", ["It is 5.", "<answer>5", "5</answer>", "</answer>5<answer>"])
async def test_an_answer_outside_of_the_tags_gets_0(answer):
    (task,) = reasoning_gym_tasks("game_of_life_halting", 1)  # whose verifier finds any text right
    _, result = await run(task, answer)
    assert result.reward.reward == 0.0 and result.reward.info == {"verdict": "no_answer"}


@pytest.mark.parametrize(
    ("family", "answer", "reason"),
    [
        ("prime_factorization", "two", "ValueError: invalid literal"),
        ("countdown", "9**9**9**9", "10 s of CPU time"),
    ],
)
async def test_a_verifier_that_fails_is_an_error_and_not_a_0(family, answer, reason):
    (task,) = reasoning_gym_tasks(family, 1)
    _, result = await run(task, f"<answer>{answer}</answer>")
    assert result.reward is None and reason in result.reward_error and not result.reward_error_is_infrastructure


async def test_a_task_of_another_version_is_not_scored():
    (task,) = reasoning_gym_tasks("leg_counting", 1)
    task.message = task.message.replace("7 ", "8 ").replace("legs", "feet")
    _, result = await run(task, "<answer>5</answer>")
    assert result.reward is None and "makes another task" in result.reward_error


def test_a_family_is_a_benchmark_of_the_command_line(tmp_path, capsys):
    tokenizer = build_chatml_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    truths = [task.task_context.ground_truth for task in reasoning_gym_tasks("leg_counting", 100)[:3]]
    server = ScriptedSGLang(tokenizer, [f"<answer>{truth}</answer>" for truth in (*truths[:2], "none")])
    with server.serve() as base_url:
        code = main(
            ["eval", "--env", "reasoning-gym", "--reward", "env", "--benchmark", "reasoning_gym:leg_counting"]
            + ["--limit", "3", "--concurrency", "1", "--base-url", base_url, "--model", "tiny"]
            + ["--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "out")]
        )
    assert code == 0, capsys.readouterr()
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert '"leg_counting/0/2"' in json.dumps(rows)
    assert "0.667" in capsys.readouterr().out


def test_an_unknown_family_is_a_usage_error(tmp_path, capsys):
    options = ["--env", "reasoning-gym", "--reward", "env", "--output", str(tmp_path), "--model", "tiny"]
    tokenizer = build_chatml_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options += ["--tokenizer", str(tmp_path / "tokenizer")]
    assert main(["eval", *options, "--benchmark", "reasoning_gym:legs"]) == 2
    assert "'legs' not registered" in capsys.readouterr().err


def test_the_guides_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = build_chatml_tokenizer()
    tokenizer.save_pretrained("tokenizer")
    names = {}
    with ScriptedSGLang(tokenizer, ["<answer>4</answer>"]).serve() as base_url:
        for block in blocks("python", ROOT / "docs/guides/reasoning-gym.md"):
            block.run(
                names, lambda text: text.replace("Qwen/Qwen3-4B-Instruct-2507", "tokenizer").replace(URL, base_url)
            )
    assert names["result"].reward.info["extracted"] == "4"
    assert load_tasks("legs.jsonl") == reasoning_gym_tasks("leg_counting", 20, max_animals=3)
