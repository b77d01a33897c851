"""Results of one environment, reward or server are never taken for another's (row B13)."""

import functools
import inspect
import json
import os
import subprocess
import sys
from datetime import date
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from strands_env.core import Environment, RewardFunction, RewardResult
from strands_env.core.identity import describe
from strands_env.core.models import openai_model_factory, sglang_model_factory
from strands_env.environments import CalculatorEnvironment
from strands_env.eval import CheckpointError, Evaluator
from strands_env.rewards import AllOf, ExactMatchReward, RegexReward, WeightedSum, WorkerLimits
from strands_env.sandbox import PythonSandbox
from strands_sglang.testing import ScriptedSGLang
from support.environments import StubEnvironment, lines, step_result, tasks


class Scripted(Environment):
    """Plays no model at all."""

    steps = 0

    def __init__(self, model_factory: Any = None, *args: Any, level: int = 1, hints: Any = (), **kwargs: Any) -> None:
        super().__init__(model_factory, *args, **kwargs)
        self.seen: list[Any] = []

    async def step(self, action):
        Scripted.steps += 1
        self.seen.append(action)
        return step_result()


class Other(Scripted):
    pass


class Strict(RewardFunction):
    def __init__(self, least: float = 0.5) -> None:
        self.graded = 0

    async def compute(self, *, action, step_result):
        return RewardResult(reward=1.0)


def run(factory, path, count=2):
    return Evaluator(lambda action: factory(), output_path=path, show_progress=False).run(tasks(count))


CHANGES = {
    "class": (Other, "class was "),
    "argument": (lambda: Scripted(level=2), "arguments.level was None and is 2"),
    "container": (lambda: Scripted(hints=["a"]), "arguments.hints was None and is ['a']"),
    "budget": (lambda: Scripted(max_turns=3), "arguments.max_turns was None and is 3"),
    "prompt": (lambda: Scripted(system_prompt="Think."), "system_prompt was None and is 'Think.'"),
    "reward": (lambda: Scripted(reward_fn=ExactMatchReward()), "reward_fn"),
    "model": (lambda: Scripted(print), "arguments.model_factory was None and is "),
    "partial": (functools.partial(Scripted, max_tool_calls=7), "arguments.max_tool_calls was None and is 7"),
}


@pytest.mark.parametrize(("changed", "told"), CHANGES.values(), ids=list(CHANGES))
async def test_results_of_another_environment_are_refused_with_what_differs(tmp_path, changed, told):
    await run(Scripted, tmp_path)
    before, steps = lines(tmp_path / "results.jsonl"), Scripted.steps
    for count in (2, 3):  # whether or not anything is left to do
        with pytest.raises(CheckpointError, match="has results of another environment: .*name another file") as caught:
            await run(changed, tmp_path, count)
        assert told in str(caught.value)
    assert lines(tmp_path / "results.jsonl") == before and Scripted.steps == steps


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Strict(), Strict(0.25)),
        (ExactMatchReward(), ExactMatchReward(boxed=True)),
        (RegexReward("a"), RegexReward("b")),
        (WeightedSum({"a": (Strict(), 1.0)}), WeightedSum({"a": (Strict(), 2.0)})),
        (AllOf({"a": Strict()}), AllOf({"a": ExactMatchReward()})),
    ],
)
async def test_results_by_another_reward_are_refused(tmp_path, first, second):
    await run(lambda: Scripted(reward_fn=first), tmp_path)
    with pytest.raises(CheckpointError, match="another environment: reward_fn"):
        await run(lambda: Scripted(reward_fn=second), tmp_path)


async def test_the_same_environment_is_gone_on_with_whatever_its_objects_have_seen_meanwhile(tmp_path):
    shared = Scripted(reward_fn=Strict(), level=3)
    await run(lambda: shared, tmp_path)
    shared.reward_fn.graded = 7
    # Defaults that are spelled out, and what makes no difference to a result.
    steps = Scripted.steps
    await run(lambda: Scripted(None, Strict(0.5), level=3, verbose=False, retries=2, hints=()), tmp_path, 3)
    assert Scripted.steps == steps + 1


async def test_environments_of_ones_own_are_told_apart_by_class_reward_and_functions(tmp_path):
    async def run_stub(play, **more):
        stub = StubEnvironment(play, **more)
        await Evaluator(stub.factory, output_path=tmp_path, show_progress=False).run(tasks(2))
        return len(stub.episodes)

    def play(reward):
        return lambda action: step_result(reward)

    assert await run_stub(lambda action: step_result(1.0)) == 2
    assert await run_stub(lambda action: step_result(1.0)) == 0
    for other in (lambda action: step_result(0.0), play(1.0)):
        with pytest.raises(CheckpointError, match="another environment: play"):
            await run_stub(other)
    with pytest.raises(CheckpointError, match="another environment: reward_fn was True and is"):
        await run_stub(lambda action: step_result(1.0), reward_fn=Strict())


async def test_environments_may_differ_by_task(tmp_path):
    def factory(action):
        return (Scripted if action.task_context.id == "t0" else Other)()

    for count in (2, 3):
        await Evaluator(factory, output_path=tmp_path, show_progress=False).run(tasks(count))
    with pytest.raises(CheckpointError, match="another environment: class"):
        await Evaluator(lambda action: Scripted(), output_path=tmp_path, show_progress=False).run(tasks(2))


async def test_results_of_another_openai_server_are_refused(tmp_path, monkeypatch):
    module = ModuleType("strands.models.openai")
    module.OpenAIModel = lambda **arguments: None
    monkeypatch.setitem(sys.modules, "strands.models.openai", module)

    def served_at(url):
        factory = openai_model_factory(model_id="m", base_url=url, api_key="secret")
        return lambda: Scripted(factory)

    await run(served_at("http://one/v1"), tmp_path)
    await run(served_at("http://one/v1"), tmp_path)
    assert "secret" not in (tmp_path / "results.jsonl").read_text()
    with pytest.raises(CheckpointError, match="model_factory.base_url was 'http://one/v1' and is 'http://two/v1'"):
        await run(served_at("http://two/v1"), tmp_path)


@pytest.mark.parametrize("changed", ["model_path", "weight_version"])
async def test_results_of_other_weights_are_refused_and_another_address_is_not(tmp_path, chatml_tokenizer, changed):
    def factory(server):
        made = sglang_model_factory(tokenizer=chatml_tokenizer, client=server.client())
        return lambda: CalculatorEnvironment(made, Strict())

    await run(factory(ScriptedSGLang(chatml_tokenizer, lambda request: "4")), tmp_path)
    other = ScriptedSGLang(chatml_tokenizer, lambda request: "4")
    await run(factory(other), tmp_path, 3)
    assert len(other.requests) == 1
    setattr(other, changed, "another")
    with pytest.raises(CheckpointError, match=f"served.{changed} was .* and is 'another'"):
        await run(factory(other), tmp_path, 3)


def test_the_parameters_of_a_model_are_part_of_what_it_is(chatml_tokenizer):
    def made(**more):
        return describe(sglang_model_factory(tokenizer=chatml_tokenizer, base_url="http://localhost:1", **more))

    assert made() == made()
    assert made(sampling_params={"temperature": 0.5}) != made() != made(enable_thinking=False)


def _pairs_of_values():
    def limited(limit, seen):
        return lambda answer, limit=limit, seen=seen: len(answer) > limit

    return {
        "number of numpy": (np.float32(1), np.float32(2)),
        "array": (np.zeros(3), np.ones(3)),
        "decimal": (Decimal("0.1"), Decimal("0.2")),
        "fraction": (Fraction(1, 2), Fraction(1, 3)),
        "date": (date(2024, 1, 1), date(2024, 1, 2)),
        "range": (range(3), range(4)),
        "bytes": (bytearray(b"a"), bytearray(b"b")),
        "built-in function": (max, min),
        "function of numpy": (np.sin, np.cos),
        "default of an argument": (limited(1, []), limited(2, [])),
    }


@pytest.mark.parametrize(("one", "other"), _pairs_of_values().values(), ids=list(_pairs_of_values()))
def test_arguments_of_any_plain_kind_are_told_apart_by_value(one, other):
    """Row B13: what is described by its class alone lets results of another environment in."""
    assert describe(one) == json.loads(json.dumps(describe(one))) != describe(other)


def test_what_no_episode_changes_is_described_alike_before_and_after():
    """Row B13, the other way: no refusal of what is the same."""
    seen: list[Any] = []
    collecting = lambda answer, seen=seen: seen.append(answer)  # noqa: E731
    before = describe(collecting)
    collecting("x")
    assert describe(collecting) == before
    assert describe(float("nan")) == json.loads(json.dumps(describe(float("nan"))))


def test_a_description_is_the_same_in_another_process_and_has_no_addresses(tmp_path):
    program = (
        "import functools, json, re\n"
        "from strands_env.core import Environment\n"
        "from strands_env.core.identity import describe\n"
        "from strands_env.rewards import RegexReward\n"
        "env = Environment(functools.partial(print, {'b', 'a', 'c'}), RegexReward('x'), max_turns=2)\n"
        "plain = lambda text: text in {'one', 'two', 'three'}\n"
        "print(json.dumps([env.identity(), describe(plain), describe({re.compile('a'), b'b', object})]))\n"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1 and " at 0x" not in told.pop()


def test_what_remembers_its_arguments_still_refuses_wrong_ones_and_shows_its_signature():
    assert "level" in inspect.signature(Scripted).parameters
    with pytest.raises(TypeError):
        Strict(least=1, most=2)


def test_classes_that_results_name_have_the_paths_that_results_name():
    """A class that moves makes another environment of its own: folders of earlier releases would be refused."""
    paths = {
        "strands_env.core.environment.Environment",
        "strands_env.environments.agentcore.AgentCoreCodeEnvironment",
        "strands_env.environments.calculator.CalculatorEnvironment",
        "strands_env.environments.mcp.MCPEnvironment",
        "strands_env.environments.mcp_servers.MCPServersEnvironment",
        "strands_env.environments.python.PythonEnvironment",
        "strands_env.core.types.RewardFunction",
        "strands_env.rewards.combining.AllOf",
        "strands_env.rewards.combining.WeightedSum",
        "strands_env.rewards.judging.JudgeReward",
        "strands_env.rewards.matching.ExactMatchReward",
        "strands_env.rewards.matching.RegexReward",
        "strands_env.rewards.mathematics.MathReward",
    }
    found = [Environment, RewardFunction]
    for cls in found:
        found += cls.__subclasses__()
    ours = {describe(cls) for cls in found if cls.__module__.startswith("strands_env.")}
    assert ours == paths
    arguments = [WorkerLimits(), PythonSandbox(unsafe=True)]
    assert [describe(one)["class"] for one in arguments] == [
        "strands_env.rewards.workers.WorkerLimits",
        "strands_env.sandbox.python_sandbox.PythonSandbox",
    ]
