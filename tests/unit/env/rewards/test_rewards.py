"""Rewards that compare texts."""

import asyncio
import re
import time
from typing import Any

import pytest

from strands_env.core import Action, RewardFunction, RewardResult, StepResult
from strands_env.rewards import AllOf, ExactMatchReward, RegexReward, RewardError, WeightedSum
from support.environments import answered, task


async def reward(function: RewardFunction, text: str | None, truth: Any = None) -> tuple[float, str]:
    result = await function.compute(action=task(truth), step_result=answered(text))
    return result.reward, result.info["verdict"]


@pytest.mark.parametrize(
    ("options", "text", "truth", "expected"),
    [
        ({}, "Paris", "Paris", (1.0, "correct")),
        ({}, "  Paris\n", "Paris", (1.0, "correct")),
        ({}, "New\n  York", "New York", (1.0, "correct")),
        ({}, "caf\u00e9", "cafe\u0301", (1.0, "correct")),
        ({}, "paris", "Paris", (0.0, "wrong")),
        ({"ignore_case": True}, "PARIS", "Paris", (1.0, "correct")),
        ({}, "Rome", ["Paris", "Rome"], (1.0, "correct")),
        ({}, "42", 42, (1.0, "correct")),
        ({}, None, "Paris", (0.0, "no_answer")),
        ({"boxed": True}, r"It is \boxed{Paris}.", "Paris", (1.0, "correct")),
        ({"boxed": True}, "Paris", "Paris", (0.0, "no_answer")),
    ],
)
async def test_exact_matches(options: Any, text: str | None, truth: Any, expected: tuple[float, str]) -> None:
    assert await reward(ExactMatchReward(**options), text, truth) == expected


@pytest.mark.parametrize(
    ("arguments", "text", "truth", "expected"),
    [
        ((r"<answer>",), "so <answer>", None, (1.0, "correct")),
        ((r"<answer>",), "so", None, (0.0, "no_match")),
        ((r"\d+",), None, None, (0.0, "no_answer")),
        ((r"\d+", {"whole": True}), "12 ", None, (0.0, "no_match")),
        ((r"\d+", {"whole": True}), "12", None, (1.0, "correct")),
        ((r"YES", {"flags": re.IGNORECASE}), "yes", None, (1.0, "correct")),
        ((r"#### (.*)", {"group": 1}), "#### 3\n#### 4 ", 4, (1.0, "correct")),
        ((r"#### (.*)", {"group": 1}), "#### 4\n#### 3", 4, (0.0, "wrong")),
        ((r"is (?P<city>\w+)|x", {"group": "city", "ignore_case": True}), "is PARIS", "Paris", (1.0, "correct")),
        ((r"is (?P<city>\w+)|x", {"group": "city"}), "x", "Paris", (0.0, "wrong")),
    ],
)
async def test_patterns(arguments: Any, text: str | None, truth: Any, expected: tuple[float, str]) -> None:
    pattern, *options = arguments
    assert await reward(RegexReward(pattern, **(options[0] if options else {})), text, truth) == expected


@pytest.mark.parametrize("text", ["<think>hm, 6</think>5", "6</think>5", "<thinking>6</thinking>\n5<think>or 6"])
async def test_thoughts_are_no_answer(text: str) -> None:
    """B5."""
    assert await reward(ExactMatchReward(), text, "5") == (1.0, "correct")
    assert await reward(RegexReward("6"), text) == (0.0, "no_match")


async def test_a_text_on_which_a_pattern_takes_for_ever_is_an_error_that_names_the_pattern() -> None:
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"\(a\+\)\+\$"):
        await reward(RegexReward(r"(a+)+$"), "a" * 50 + "b")
    assert time.monotonic() - began < 30
    assert await reward(RegexReward(r"(a+)+$"), "aaa") == (1.0, "correct")


async def test_long_and_strange_texts_are_matched() -> None:
    assert await reward(RegexReward("end$"), "x" * 3_000_000 + "end") == (1.0, "correct")
    assert await reward(RegexReward("\ud800"), "\ud800\x00") == (1.0, "correct")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(("(",), re.error), (("(a)", {"group": 2}), ValueError), (("(a)", {"group": "b"}), ValueError)],
)
def test_a_pattern_that_is_none_is_refused_at_once(arguments: Any, error: type[Exception]) -> None:
    pattern, *options = arguments
    with pytest.raises(error):
        RegexReward(pattern, **(options[0] if options else {}))


@pytest.mark.parametrize("function", [ExactMatchReward(), RegexReward("(a)", group=1)])
async def test_without_a_ground_truth_there_is_an_error_and_no_reward(function: RewardFunction) -> None:
    with pytest.raises(RewardError, match="no ground truth"):
        await reward(function, "a")


# --- sums and conjunctions ---


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
