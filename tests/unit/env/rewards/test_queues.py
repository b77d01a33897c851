"""Who waits for a worker loses nothing by it, whoever keeps the workers busy."""

import asyncio
import time
from typing import Any

import pytest

from strands_env.core import Action, Environment, RewardFunction, TaskContext
from strands_env.rewards import MathReward, RegexReward, WeightedSum, WorkerLimits
from support.agents import ScriptedModel

pytest.importorskip("math_verify")

LIMITS = WorkerLimits(cpu_s=0.5)


async def graded(answer: str, truth: str, reward_fn: RewardFunction, seconds: float) -> Any:
    env = Environment(lambda: ScriptedModel([answer]), reward_fn, reward_timeout=seconds)
    return await env.step(Action(message="?", task_context=TaskContext(ground_truth=truth)))


def hostile(number: int) -> str:
    return f"\\boxed{{9^{{9^{{9^9}}}}+{number}}}"


@pytest.mark.parametrize("kind", ["sum", "regex"])
async def test_time_in_the_queue_is_not_the_rewards(kind: str) -> None:
    """B11."""
    if kind == "regex":
        limits = WorkerLimits(cpu_s=0.5, wall_s=60.0)
        reward_fn: RewardFunction = RegexReward("(a+)+$|5$", limits=limits)
        bad = ["a" * 40 + "b"] * 6
    else:
        reward_fn = MathReward(limits=LIMITS, n_workers=1)
        if kind == "sum":
            reward_fn = WeightedSum({"once": (reward_fn, 0.5), "twice": (reward_fn, 0.5)})
        bad = [hostile(number) for number in range(2)]
    await graded("5.0", "5", reward_fn, 60.0)  # a worker runs
    began = time.monotonic()
    results = await asyncio.gather(
        *(graded(text, "2^{10}+1", reward_fn, 30.0) for text in bad),
        *(
            graded("x: 5", "5", reward_fn, 0.9) if kind == "regex" else graded("5.0", "5", reward_fn, 1.5)
            for _ in range(2)
        ),
    )
    assert time.monotonic() - began > 0.9, "nobody had to wait"
    assert [(result.reward and result.reward.reward, result.error) for result in results[-2:]] == [(1.0, None)] * 2


async def test_a_reward_that_hangs_by_itself_still_ends_in_time() -> None:
    class Hangs(RewardFunction):
        async def compute(self, **kwargs: Any) -> Any:
            await MathReward(limits=LIMITS).compute(**kwargs)
            await asyncio.Event().wait()

    result = await graded("5.0", "5", Hangs(), 0.2)
    assert result.reward is None and "longer than 0.2 seconds" in (result.reward_error or "")
    assert not result.reward_error_is_infrastructure


async def test_a_caller_that_is_cancelled_in_the_queue_leaves_it() -> None:
    reward_fn = MathReward(limits=LIMITS, n_workers=1)
    waiting = [asyncio.ensure_future(graded(hostile(number), "2^{10}+1", reward_fn, 30.0)) for number in range(3)]
    waiting.append(asyncio.ensure_future(graded("5.0", "5", reward_fn, 0.2)))
    await asyncio.sleep(0)
    for one in waiting[:3]:
        one.cancel()
    assert (await waiting[3]).reward.reward == 1.0
