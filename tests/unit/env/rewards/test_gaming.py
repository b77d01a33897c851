"""No answer that looks right and is wrong is paid for, and no harmless spelling costs anything."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from strands_env.rewards import MathReward
from support.altered_answers import altered, misjudged, respelled, truths
from support.episodes import answered, task

pytest.importorskip("math_verify")

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "math_pairs.jsonl").read_text("utf-8").splitlines()]


def test_the_table_has_pairs_of_every_kind() -> None:
    """Item 4."""
    kinds = Counter(pair["kind"] for pair in PAIRS)
    assert len(PAIRS) >= 150 and len(kinds) >= 25
    assert {pair["right"] for pair in PAIRS} == {True, False}


@pytest.mark.parametrize("is_right", [True, False])
async def test_the_table_of_right_and_wrong_answers_holds(is_right: bool) -> None:
    """B3, B4."""
    cases = [(pair["truth"], pair["answer"]) for pair in PAIRS if pair["right"] is is_right]
    assert await misjudged(cases, is_right) == []


async def test_answers_altered_in_one_place_are_wrong() -> None:
    """B4. A sample: `python -m support.altered_answers` has 10,000."""
    cases = [(truth.text, text) for truth in truths() for text in altered(truth, 40)]
    assert len({truth for truth, _ in cases}) == 500 and len(cases) >= 10_000
    assert await misjudged(random.Random(7).sample(cases, 1500), False) == []


async def test_harmless_spellings_are_right() -> None:
    """B4. A sample likewise."""
    cases = [(truth.text, text) for truth in truths() for text in respelled(truth)]
    assert await misjudged(random.Random(7).sample(cases, 800), True) == []


async def test_a_task_restated_is_no_answer_unless_it_may_be() -> None:
    """B4."""
    strict, lenient = MathReward(), MathReward(allow_unevaluated=True)
    for text in (r"\boxed{25 \times 17}", r"\boxed{\sum_{i=1}^{17} 25}", r"\boxed{850/2}"):
        result = await strict.compute(action=task("425"), step_result=answered(text))
        assert (result.reward, result.info["verdict"]) == (0.0, "unevaluated")
        assert "left undone" in result.info["reason"]
        assert (await lenient.compute(action=task("425"), step_result=answered(text))).reward == 1.0
    wrong = await lenient.compute(action=task("425"), step_result=answered(r"\boxed{25 \times 18}"))
    assert (wrong.reward, wrong.info["verdict"]) == (0.0, "wrong")


@pytest.mark.parametrize("truth", [r"\frac{", r"x^{", r"\begin{pmatrix} 1", "9^{9^{9^{9}}} + x"])
async def test_what_cannot_be_decided_is_wrong_and_says_so(truth: str) -> None:
    """B3, B4."""
    result = await MathReward().compute(action=task(truth), step_result=answered(r"\boxed{7}"))
    assert result.reward == 0.0
    assert result.info["verdict"] in ("unreadable_truth", "wrong", "over_limits", "unreadable")
    literal = await MathReward().compute(action=task(truth), step_result=answered(truth))
    assert literal.reward == 1.0


@pytest.mark.parametrize(
    ("rounding", "answer", "expected"),
    [
        (None, "0.333333", 0.0),
        (6, "0.333333", 1.0),
        (2, "0.33", 1.0),
        (2, "0.32", 0.0),
        (None, "0.3333333333333333", 1.0),
    ],
)
async def test_decimals_are_rounded_only_if_they_may_be(rounding: int | None, answer: str, expected: float) -> None:
    reward = MathReward(float_rounding=rounding)
    assert (await reward.compute(action=task("1/3"), step_result=answered(f"\\boxed{{{answer}}}"))).reward == expected
