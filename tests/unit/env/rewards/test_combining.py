"""Sums and conjunctions of rewards."""

import asyncio
from typing import Any

import pytest

from strands_env.core import Action, RewardFunction, RewardResult, StepResult
from strands_env.rewards import AllOf, ExactMatchReward, RegexReward, RewardError, WeightedSum
from support.environments import answered, task


class Fixed(RewardFunction):
    """Gives a number, or raises, after others had their turn."""

    def __init__(self, value: float | Exception) -> None:
        self.value = value
        self.computed = self.cancelled = False

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        self.computed = True
        if isinstance(self.value, Exception):
            raise self.value
        try:
            await asyncio.sleep(0.01 if self.value < 5 else 100)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return RewardResult(reward=self.value, info={"fixed": True})


async def compute(function: RewardFunction, text: str = "x") -> RewardResult:
    return await function.compute(action=task("x"), step_result=answered(text))


async def test_a_sum_weighs_its_parts_and_shows_them() -> None:
    result = await compute(WeightedSum({"a": (Fixed(1.0), 0.75), "b": (Fixed(-2.0), 0.5)}))
    assert result.reward == pytest.approx(-0.25)
    assert result.info["parts"]["b"] == {"reward": -2.0, "weight": 0.5, "info": {"fixed": True}}


async def test_a_part_that_fails_fails_the_sum_and_stops_the_others() -> None:
    slow = Fixed(9.0)
    with pytest.raises(RewardError, match="no judge"):
        await compute(WeightedSum({"slow": (slow, 1.0), "broken": (Fixed(RewardError("no judge")), 1.0)}))
    assert slow.cancelled


async def test_a_cancelled_sum_cancels_its_parts() -> None:
    slow = Fixed(9.0)
    running = asyncio.ensure_future(compute(WeightedSum({"slow": (slow, 1.0)})))
    while not slow.computed:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert slow.cancelled


async def test_all_of_needs_all() -> None:
    both = AllOf({"right": ExactMatchReward(), "short": RegexReward(".{1,3}", whole=True)})
    assert (await compute(both)).reward == 1.0
    failed = await compute(both, "y")
    assert (failed.reward, failed.info["failed"]) == (0.0, "right")
    assert (await compute(AllOf({"a": Fixed(0.6), "b": Fixed(0.5)}, threshold=0.5))).reward == 1.0


async def test_all_of_stops_at_the_first_that_falls_short() -> None:
    judge = Fixed(1.0)
    assert (await compute(AllOf({"cheap": Fixed(0.0), "judge": judge}))).info["failed"] == "cheap"
    assert not judge.computed


@pytest.mark.parametrize("make", [WeightedSum, AllOf])
def test_nothing_cannot_be_combined(make: Any) -> None:
    with pytest.raises(ValueError):
        make({})
