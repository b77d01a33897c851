"""`strands-env check`: agents that are played in an environment find what is wrong with it."""

import json

import pytest

from strands_env import cli
from strands_env.check import Player, check_environment
from strands_env.core import Action, RewardResult, TaskContext
from strands_env.environments import CalculatorEnvironment, WorldEnvironment
from strands_env.rewards import ExactMatchReward
from strands_sglang import TerminationReason
from support.worlds import needs_worlds, worlds_folder

folder = pytest.fixture(autouse=True)(worlds_folder)
TASK = Action(message="Write 42 to /tmp/answer.", task_context=TaskContext(id="answer", ground_truth="42"))


class Written:
    """1.0 if the file has the ground truth."""

    def __init__(self, environment):
        self.environment = environment

    async def compute(self, *, action, step_result):
        ran = await self.environment.world.execute("cat /tmp/answer")
        return RewardResult(reward=float(ran.output.strip() == action.task_context.ground_truth))


class Answers(WorldEnvironment):
    """A task that is right, with its solution."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reward_fn = Written(self)

    async def solve(self):
        await self.world.write("/tmp/answer", b"42")

    async def plant_reward(self):
        await self.world.write("/tmp/reward", b"1")


class Generous(Answers):
    """Rewards whatever is there."""

    class Any:
        async def compute(self, *, action, step_result):
            return RewardResult(reward=1.0)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reward_fn = self.Any()


class Unsolvable(Answers):
    async def solve(self):
        await self.world.write("/tmp/answer", b"41")


class Gullible(Answers):
    """Takes a reward that the agent writes."""

    async def plant_reward(self):
        await self.world.write("/tmp/answer", b"42")


class Fickle(Answers):
    rewards = iter([0.0, 0.5] * 50)

    class Next:
        async def compute(self, *, action, step_result):
            return RewardResult(reward=next(Fickle.rewards))

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reward_fn = self.Next()


async def verdicts(environment, **kwargs):
    findings = await check_environment(lambda factory, action: environment(factory, **kwargs), TASK)
    return {finding.name: finding.verdict for finding in findings}


FINE = {
    "doing nothing is no success": "ok",
    "the solution succeeds": "ok",
    "two runs agree": "ok",
    "siblings do not see each other": "ok",
    "a tool that hangs ends": "ok",
    "a planted reward does not count": "ok",
}


@needs_worlds
@pytest.mark.parametrize(
    ("environment", "wrong"),
    [
        (Answers, {}),
        (Generous, {"doing nothing is no success": "failed", "a planted reward does not count": "failed"}),
        (Unsolvable, {"the solution succeeds": "failed"}),
        (Gullible, {"a planted reward does not count": "failed"}),
        (Fickle, {"the solution succeeds": "failed", "two runs agree": "failed"}),
    ],
)
async def test_what_is_wrong_is_found(environment, wrong):
    assert await verdicts(environment) == {**FINE, **wrong}


@needs_worlds
async def test_siblings_that_share_a_sandbox_see_each_other():
    shared = WorldEnvironment(None)
    await shared.reset()

    class Shared(Answers):
        async def reset(self):
            self.world, self.sandbox = shared.world, shared.sandbox

        async def cleanup(self):
            self.world = None

    try:
        assert (await verdicts(Shared))["siblings do not see each other"] == "failed"
    finally:
        await shared.cleanup()


@needs_worlds
async def test_a_world_that_dies_ends_the_episode_without_a_reward():
    class Dies(Answers):
        async def reset(self):
            await super().reset()
            await self.world.stop()

    result = await Dies(lambda: Player(call=("shell", {"command": "true"}))).step(TASK)
    assert (result.termination_reason, result.reward) == (TerminationReason.INFRASTRUCTURE_ERROR, None)
    assert "the world is not running" in result.error


async def test_an_environment_without_a_reward_fails_and_says_why():
    findings = await check_environment(lambda factory, action: CalculatorEnvironment(factory), TASK)
    assert findings[0].verdict == "failed" and findings[0].detail == "task_complete, without a reward"


async def test_what_an_environment_does_not_have_is_not_tried():
    found = await verdicts(CalculatorEnvironment, reward_fn=ExactMatchReward())
    assert found == {
        "doing nothing is no success": "ok",
        "the solution succeeds": "not tried",
        "two runs agree": "ok",
    }


class Plain(CalculatorEnvironment):
    """Its methods are ordinary functions, and it keeps the answer itself."""

    answer = ""

    def solve(self):
        self.answer = "42"

    def plant_reward(self):
        self.answer = "1"

    async def compute(self, *, action, step_result):
        return RewardResult(reward=float(self.answer == action.task_context.ground_truth))


async def test_a_solution_may_be_an_ordinary_function():
    def make(factory, action):
        environment = Plain(factory)
        environment.reward_fn = environment
        return environment

    findings = await check_environment(make, TASK)
    assert {finding.verdict for finding in findings} == {"ok"}, findings


class Broken(CalculatorEnvironment):
    async def reset(self):
        raise OSError("no disk")


async def test_an_environment_that_does_not_run_is_one_finding():
    [finding] = await check_environment(lambda factory, action: Broken(factory), TASK)
    assert (finding.verdict, finding.detail) == ("failed", "OSError: no disk")


def test_the_command_exits_with_1_if_something_does_not_hold(tmp_path, capsys):
    tasks = tmp_path / "tasks.jsonl"
    command = ["check", "calculator", "--dataset", str(tasks), "--reward", "exact"]
    tasks.write_text(json.dumps({"question": "6 * 7?", "answer": "42"}))
    assert cli.main(command) == 0
    tasks.write_text(json.dumps({"question": "6 * 7?", "answer": "It is done."}))
    assert cli.main(command) == 1
    assert "failed     doing nothing is no success (reward 1)" in capsys.readouterr().out
    assert cli.main(["check", "calculator"]) == 2


def test_the_command_takes_the_tasks_of_a_benchmark(tmp_path, capsys):
    tasks = tmp_path / "gsm8k.jsonl"
    tasks.write_text(json.dumps({"question": "Ready?", "answer": "First this.\n#### It is done."}))
    command = ["check", "calculator", "--dataset", str(tasks), "--reward", "exact", "--benchmark"]
    assert cli.main([*command, "gsm8k"]) == 1  # gsm8k's answer follows ####
    assert "failed     doing nothing is no success (reward 1)" in capsys.readouterr().out
    assert cli.main([*command, "gsm9k"]) == 2
    assert "did you mean gsm8k?" in capsys.readouterr().err
