from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_env.eval.statistics import majority_at_k, mean_over_prompts, pass_at_k, pass_hat_k
from support import interval_coverage


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_and_pass_hat_k_are_what_counting_all_draws_gives(case):
    n, c, k = case
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k([n], [c], k)[0] == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_hat_k([n], [c], k)[0] == pytest.approx(sum(map(all, draws)) / len(draws))


def test_large_numbers_agree_with_the_binomial_formula_and_do_not_overflow():
    for n, c, k in [(1000, 3, 500), (2000, 1990, 1000), (256, 1, 128), (5000, 0, 5000)]:
        exact = 1 - math.comb(n - c, k) / math.comb(n, k)
        assert pass_at_k([n], [c], k)[0] == pytest.approx(exact, abs=1e-12)
        assert pass_hat_k([n], [c], k)[0] == pytest.approx(math.comb(c, k) / math.comb(n, k), abs=1e-12)


def test_both_estimators_are_unbiased_for_a_policy_of_known_skill():
    rng = np.random.default_rng(7)
    skill, n = 0.3, 8
    c = rng.binomial(n, skill, size=200_000)
    for k in (1, 2, 4, 8):
        assert pass_at_k(np.full_like(c, n), c, k).mean() == pytest.approx(1 - (1 - skill) ** k, abs=0.004)
        assert pass_hat_k(np.full_like(c, n), c, k).mean() == pytest.approx(skill**k, abs=0.004)


@pytest.mark.parametrize(
    ("n", "c", "k"), [([2], [1], 3), ([4], [5], 1), ([4], [-1], 1), ([4], [1], 0), ([4, 4], [1], 1)]
)
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_majority_of_all_samples_is_the_most_frequent_answer():
    assert majority_at_k(["a", "a", "b"], [True, True, False], 3) == 1.0
    assert majority_at_k(["a", "b", "b"], [True, False, False], 3) == 0.0


def test_a_tied_vote_is_shared_and_no_answer_does_not_vote():
    assert majority_at_k(["a", "b"], [True, False], 2) == 0.5
    assert majority_at_k(["a", None, None], [True, False, False], 3) == 1.0
    assert majority_at_k([None, None], [False, False], 2) == 0.0


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=7), st.data())
def test_majority_is_what_voting_in_every_draw_gives(samples, data):
    k = data.draw(st.integers(1, len(samples)))
    expected = []
    for draw in itertools.combinations(samples, k):
        votes = Counter(answer for answer, _ in draw if answer is not None)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        shares = [np.mean([right for answer, right in draw if answer == winner]) for winner in winners]
        expected.append(np.mean(shares) if shares else 0.0)
    answers, successes = zip(*samples, strict=True)
    assert majority_at_k(answers, successes, k) == pytest.approx(np.mean(expected))


def test_majority_of_some_samples_agrees_with_a_closed_form():
    # 3 of 5 samples, two answers, 3 right ones: the majority is right if at least 2 of the 3 drawn are.
    expected = (math.comb(3, 3) + math.comb(3, 2) * math.comb(2, 1)) / math.comb(5, 3)
    assert majority_at_k(list("aaabb"), [True] * 3 + [False] * 2, 3) == pytest.approx(expected)


def test_majority_of_many_samples_is_sampled_and_near_the_closed_form():
    answers, successes = ["a"] * 18 + ["b"] * 14, [True] * 18 + [False] * 14
    exact = sum(math.comb(18, right) * math.comb(14, 9 - right) for right in range(5, 10)) / math.comb(32, 9)
    assert majority_at_k(answers, successes, 9) == pytest.approx(exact, abs=0.04)
    assert majority_at_k(answers, successes, 9) == majority_at_k(answers, successes, 9)


def test_the_interval_of_many_values_is_near_the_t_interval():
    values = np.random.default_rng(3).normal(10, 2, size=4000)
    interval = mean_over_prompts(values)
    half = 1.96 * values.std(ddof=1) / math.sqrt(len(values))
    assert interval.value == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half, abs=0.01)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.01)
    assert mean_over_prompts(values) == interval


@pytest.mark.parametrize("prompts", [5, 6, 10, 30, 100, 500])
@pytest.mark.parametrize("cells", ["grid", "further"])
def test_intervals_hold_the_truth_in_at_least_nine_of_ten_evaluations(prompts, cells):
    """Row B12, a sample of what `support.interval_coverage` simulates in full."""
    rng = np.random.default_rng(prompts)
    chosen = [cell for cell in getattr(interval_coverage, cells)() if cell.prompts == prompts]
    chosen = chosen if cells == "grid" else chosen[:: max(1, len(chosen) // 40)]
    held = {cell: interval_coverage.coverage(cell, 400, rng)[0] for cell in chosen}
    assert len(held) >= 40
    # Three standard errors below what the full simulation asks for.
    assert min(held.values()) >= 0.90 - 3 * math.sqrt(0.9 * 0.1 / 400), held


@pytest.mark.parametrize("value", [0.0, 0.25, 1.0])
def test_equal_values_still_leave_room_for_what_was_not_seen(value):
    """Row B12: two of two right say next to nothing, and 30 of 30 not that every prompt is answered."""
    for prompts, width in ((2, 0.9), (5, 0.4), (30, 0.05), (500, 0.002)):
        interval = mean_over_prompts([value] * prompts)
        assert interval.low <= interval.value <= interval.high
        assert interval.high - interval.low > width
        assert 0 <= interval.low and interval.high <= 1
    assert mean_over_prompts([1.0] * 2).low == 0.0
    assert mean_over_prompts([0.0] * 5, scale=(-1, 1)).low < 0 < mean_over_prompts([0.0] * 5, scale=(-1, 1)).high


def test_values_beyond_the_scale_widen_it_and_one_prompt_has_no_interval():
    interval = mean_over_prompts([-2.0, 0.5, 3.0, 1.0])
    assert -2.0 <= interval.low < 0 and 1 < interval.high <= 3.0
    assert (mean_over_prompts([1.0]).low, mean_over_prompts([1.0]).high) == (None, None)
    with pytest.raises(ValueError, match="no prompts"):
        mean_over_prompts([])
