from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_env.eval.statistics import majority_at_k, mean_over_prompts, pass_at_k, pass_hat_k


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


def test_the_interval_of_a_mean_is_near_the_t_interval():
    values = np.random.default_rng(3).normal(10, 2, size=400)
    interval = mean_over_prompts(values)
    half = 1.966 * values.std(ddof=1) / math.sqrt(len(values))
    assert interval.value == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half, abs=0.03)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.03)
    assert mean_over_prompts(values) == interval


@pytest.mark.parametrize(("prompts", "k"), [(12, 1), (30, 1), (30, 4), (200, 4)])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(prompts, k):
    """500 evaluations of a policy whose skill varies by prompt: 8 samples each, skills from Beta(2, 2)."""
    rng = np.random.default_rng(prompts * 10 + k)
    # E[1 - (1-p)^k] for p ~ Beta(2, 2), from the moments of 1-p ~ Beta(2, 2).
    truth = 1 - math.prod((2 + i) / (4 + i) for i in range(k))
    held = 0
    for _ in range(500):
        c = rng.binomial(8, rng.beta(2, 2, size=prompts))
        interval = mean_over_prompts(
            pass_at_k(np.full(prompts, 8), c, k), resamples=1000, seed=int(rng.integers(1 << 30))
        )
        held += interval.low <= truth <= interval.high
    assert 0.915 <= held / 500 <= 0.985


def test_equal_values_have_an_interval_of_no_width_and_one_prompt_has_none():
    interval = mean_over_prompts([0.1] * 7)
    assert interval.low <= interval.value <= interval.high
    assert interval.high - interval.low < 1e-12
    assert (mean_over_prompts([1.0]).low, mean_over_prompts([1.0]).high) == (None, None)
    with pytest.raises(ValueError, match="no prompts"):
        mean_over_prompts([])
