"""Rewards that compare texts."""

import re
import time
from typing import Any

import pytest

from strands_env.core import RewardFunction
from strands_env.rewards import ExactMatchReward, RegexReward, RewardError
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
