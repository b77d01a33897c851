"""No answer that looks right and is wrong is paid for, and no harmless spelling costs anything.

`math_pairs.jsonl` has answers with what is to be said of each. `math_truths.jsonl` has 500 right answers of many kinds,
each with other spellings (`same`) and with answers that look like it and are wrong (`other`).
"""

import asyncio
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from strands_env.rewards import MathReward
from support.environments import answered, task

pytest.importorskip("math_verify")


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(__file__).parent / name).read_text("utf-8").splitlines()]


PAIRS = lines_of("math_pairs.jsonl")
TRUTHS = lines_of("math_truths.jsonl")
SPELLINGS = (
    r"\boxed{ %s }", r"\boxed{%s.}", r"\boxed{$%s$}", r"$\boxed{%s}$", r"\[ \boxed{%s} \]", r"\fbox{%s}",
    r"So the answer is \boxed{%s}.", r"\boxed{\displaystyle %s}", "The answer is $%s$.", "The final answer is: $%s$",
    "$%s$",
)  # fmt: skip
SAME_COMMANDS = (
    (r"\\frac", r"\\dfrac"),
    (r"\\frac", r"\\tfrac"),
    (r"^([(\[])(.*)([)\]])$", r"\\left\1\2\\right\3"),
    (r"^(?!.*\d,\d{3}(?!\d))(.*,.*)$", lambda found: found[0].replace(",", ", ")),
)


def respelled(truth: dict[str, Any]) -> list[str]:
    """Answers that say the same."""
    text = truth["text"]
    spelled = [re.sub(pattern, other, text) for pattern, other in SAME_COMMANDS]
    boxed = [text, *truth["same"], *(other for other in spelled if other != text)]
    return [*(rf"\boxed{{{one}}}" for one in boxed), *(spelling.replace("%s", text) for spelling in SPELLINGS)]


def altered(truth: dict[str, Any], count: int) -> list[str]:
    """Answers that are wrong: those of the file, and the truth with another digit or one more."""
    text, chance = truth["text"], random.Random(f"0 {truth['text']}")
    digits = [found.start() for found in re.finditer(r"\d", text)]
    found = dict.fromkeys(truth["other"])
    for _ in range(count * 4 if digits else 0):
        at = chance.choice(digits)
        digit = chance.choice([one for one in "123456789" if one != text[at]])
        found[text[:at] + digit + text[at + chance.choice([0, 1, 1]) :]] = None
    return [rf"\boxed{{{one}}}" for one in list(found)[:count]]


async def misjudged(cases: list[tuple[Any, str]], is_right: bool) -> list[tuple[Any, str, str]]:
    """The pairs of truth and answer that `MathReward` judges otherwise, with its verdict."""
    reward = MathReward()
    results = await asyncio.gather(
        *(reward.compute(action=task(truth), step_result=answered(text)) for truth, text in cases)
    )
    return [
        (*case, result.info["verdict"])
        for case, result in zip(cases, results, strict=True)
        if (result.reward == 1.0) is not is_right
    ]


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
    """B4."""
    cases = [(truth["text"], text) for truth in TRUTHS for text in altered(truth, 40)]
    assert len({truth for truth, _ in cases}) == 500 and len(cases) >= 10_000
    assert await misjudged(random.Random(7).sample(cases, 1500), False) == []


async def test_harmless_spellings_are_right() -> None:
    """B4."""
    cases = [(truth["text"], text) for truth in TRUTHS for text in respelled(truth)]
    assert await misjudged(random.Random(7).sample(cases, 800), True) == []
