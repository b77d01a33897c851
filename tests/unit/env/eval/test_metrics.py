"""Flat metrics with their intervals, and the comparison of two evaluations."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_env.eval import answer_of, standard_metrics
from strands_env.eval.checkpoint import Run
from strands_env.eval.metrics import (
    compare,
    comparison_lines,
    majority_at_k,
    mean_bounds,
    mean_over_prompts,
    pass_at_k,
    pass_hat_k,
    sample_sizes,
)
from support.environments import sample


def test_numbers_of_a_small_case_by_hand():
    results = {
        "a": [sample(1.0, "4"), sample(1.0, "4"), sample(0.0, "5"), sample(0.0, "6")],
        "b": [sample(0.0, "1"), sample(0.0, "1"), sample(0.0, "2"), sample(0.5, "3")],
    }
    metrics = standard_metrics(results, n_samples_per_prompt=4)
    assert metrics["pass@1"] == 0.25 and metrics["pass@2"] == pytest.approx((5 / 6) / 2)
    assert metrics["pass@4"] == 0.5 and metrics["pass^2"] == pytest.approx((1 / 6) / 2) and metrics["pass^4"] == 0.0
    assert metrics["avg@4"] == pytest.approx((0.5 + 0.125) / 2)
    assert metrics["majority@4"] == 0.5
    assert metrics["pass@1_low"] <= 0.25 <= metrics["pass@1_high"]
    assert (metrics["samples"], metrics["dropped_samples"], metrics["prompts"]) == (8, 0, 2)
    assert not any(key.endswith("_if_dropped_failed") for key in metrics)


def test_a_success_is_a_reward_of_at_least_the_threshold():
    results = {"a": [sample(0.5)]}
    assert standard_metrics(results, n_samples_per_prompt=1)["pass@1"] == 0.0
    assert standard_metrics(results, n_samples_per_prompt=1, success_threshold=0.5)["pass@1"] == 1.0


def test_dropped_samples_are_told_by_metric_with_what_they_could_have_meant():
    results = {
        "a": [sample(1.0), sample(1.0)],
        "b": [sample(1.0), sample(None, finished=False)],
        "c": [],  # never run
    }
    metrics = standard_metrics(results, n_samples_per_prompt=2)
    assert (metrics["samples"], metrics["dropped_samples"]) == (3, 3)
    assert (metrics["pass@1"], metrics["pass@1_prompts"], metrics["pass@1_dropped_prompts"]) == (1.0, 2, 1)
    assert (metrics["pass@2"], metrics["pass@2_prompts"], metrics["pass@2_dropped_prompts"]) == (1.0, 1, 2)
    assert metrics["pass@1_if_dropped_failed"] == 0.5
    assert metrics["pass@2_if_dropped_failed"] == pytest.approx(2 / 3)
    assert metrics["pass^2_if_dropped_failed"] == pytest.approx(1 / 3)
    assert metrics["avg@2_if_dropped_failed"] == 0.5
    # Nobody else votes in b; in c nobody votes at all.
    assert metrics["majority@2_if_dropped_failed"] == pytest.approx(2 / 3)


def test_an_error_is_never_better_than_a_wrong_answer():
    """Row B16: where wrong answers cost something, failing costs as much."""
    errored = sample(None)
    errored.is_errored = True
    results = {"a": [sample(1.0)], "b": [sample(-1.0)], "c": [errored], "d": [sample(None, finished=False)]}
    metrics = standard_metrics(results, n_samples_per_prompt=1)
    assert metrics["avg@1"] == pytest.approx(-1 / 3) and metrics["pass@1"] == pytest.approx(1 / 3)
    assert standard_metrics(results, n_samples_per_prompt=1, success_threshold=-2.0)["pass@1"] == pytest.approx(2 / 3)


def test_nothing_at_all_is_no_error():
    assert standard_metrics({}, n_samples_per_prompt=4)["prompts"] == 0


def test_sizes_are_powers_of_two_and_the_number_itself():
    assert sample_sizes(1) == [1] and sample_sizes(6) == [1, 2, 4, 6] and sample_sizes(8) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1}, no, \boxed{\frac{1}{2}}.", "1/2"),
        ("  plain\n text ", "plain text"),
        (r"\boxed{never closed", r"\boxed{never closed"),
    ],
)
def test_an_answer_is_boxed_or_the_whole_text(text, answer):
    one = sample(1.0, text)
    assert one.step_result.reward is not None
    one.step_result.reward.info.clear()
    assert answer_of(one) == answer


@pytest.mark.parametrize("verdict", ["no_answer", "not_boxed", "no_match"])
def test_a_sample_in_which_the_reward_found_no_answer_has_no_vote(verdict):
    lost = [sample(0.0, "I do not know") for _ in range(2)]
    for one in lost:
        one.step_result.reward.info.update({"verdict": verdict, "extracted": None})
    assert [answer_of(one) for one in lost] == [None, None]
    assert standard_metrics({"a": [sample(1.0), *lost]}, n_samples_per_prompt=3)["majority@3"] == 1.0


def judged(extracted, reward=0.0, **info):
    one = sample(reward)
    one.step_result.reward.info.clear()
    one.step_result.reward.info.update({"extracted": extracted, **info})
    return one


def test_answers_of_one_value_have_one_vote_together():
    """B14."""
    right = [judged(text, 1.0, verdict="correct", ground_truth="1/2") for text in ("1/2", "0.5", "0.50")]
    wrong = [judged("3", verdict="wrong"), judged("3.0", verdict="wrong")]
    metrics = standard_metrics({"a": [*right, *wrong]}, n_samples_per_prompt=5)
    assert (metrics["pass@1"], metrics["majority@5"]) == (0.6, 1.0)
    assert standard_metrics({"a": [right[0], *wrong]}, n_samples_per_prompt=3)["majority@3"] == 0.0


@pytest.mark.parametrize(
    ("answers", "count"),
    [
        (["1/2", "0.5", "0.50", r"\frac{1}{2}", r"\dfrac12", ".5", "5e-1"], 1),
        (["1000", "1,000", r"1\,000", "1e3", "1000."], 1),
        (["1,2", "2, 1", r"\{1,2\}"], 1),
        (["(1,2)", "(1, 2)", "(2,1)", "[1,2]"], 3),
        (["x=5", "5", "5.0"], 1),
        (["x^2 + 1", "x^{2}+1"], 1),
        (["Paris", r"\text{Paris}", "siraP"], 2),
        (["2516_8", "2516_{8}", "2516_9", "2516"], 3),
        (["5", "-5", "5!", "5, 6", "x > 5", r"\frac{", "", "\ud800"], 8),
    ],
)
def test_answers_count_by_value(answers, count):
    """B14."""
    assert len({answer_of(judged(text)) for text in answers}) == count


def test_answers_that_are_no_mathematics_count_by_their_words():
    hostile = ["(" * 5000, "{" * 1900, "1+" * 900 + "1", "$" * 1001, "a" * 100_000]
    assert len({answer_of(judged(text)) for text in hostile}) == 5


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
@pytest.mark.parametrize("kind", ["pass@1", "pass@k", "difference of two policies"])
def test_intervals_hold_the_truth_in_nine_of_ten_evaluations(prompts, kind):
    """Row B12: 400 simulated evaluations of each of many policies whose rates are known.

    A policy answers a prompt rightly with a rate of that prompt, from a beta distribution with the policy's rate as its
    mean. The correlation is that of two samples of one prompt: with 0 all prompts are alike, with 1 a prompt is always
    answered rightly or never.
    """
    rates = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99)
    draws, correlations, gains = ((1, 1), (8, 1)), (0.0, 0.3, 1.0), (None,)
    if kind == "pass@k":
        draws, correlations = ((2, 1), (4, 1), (8, 2), (8, 4), (8, 8), (32, 1), (32, 2), (32, 16)), (0.1, 0.3, 0.6)
    elif kind != "pass@1":
        gains = (0.0, 0.5)  # of what the first policy lacks
    cells = list(itertools.product(rates, draws, correlations, gains))
    rng = np.random.default_rng(prompts)
    held = {}
    for cell in cells[:: len(cells) // 54]:
        rate, (samples, k), correlation, gain = cell

        def successes(mean, samples=samples, correlation=correlation):
            if samples == 1 or correlation == 1:  # of one sample the correlation changes nothing
                return rng.binomial(1, mean, (400, prompts)) * samples
            if correlation == 0:
                return rng.binomial(samples, mean, (400, prompts))
            strength = 1 / correlation - 1
            return rng.binomial(samples, rng.beta(mean * strength, (1 - mean) * strength, (400, prompts)))

        by_count = pass_at_k(np.full(samples + 1, samples), np.arange(samples + 1), k)
        values, scale = by_count[successes(rate)], (0.0, 1.0)
        if correlation == 0:
            truth = 1 - (1 - rate) ** k
        elif correlation == 1:
            truth = rate
        else:  # 1 - E[(1-p)^k], from the moments of the beta distribution
            strength = 1 / correlation - 1
            truth = 1 - math.prod(((1 - rate) * strength + i) / (strength + i) for i in range(k))
        if gain is not None:
            truth, scale = gain * (1 - rate), (-1.0, 1.0)
            values = by_count[successes(rate + truth)] - values
        low, high = mean_bounds(values, scale=scale)
        held[cell] = np.mean((low <= truth + 1e-9) & (truth - 1e-9 <= high))
    assert len(held) >= 40
    # Three standard errors below the 0.90 that is promised.
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


# --- two evaluations side by side ---


def evaluation(rewards, *, errored=()):
    """A run of prompts by id, whose content is their id."""
    results = {
        prompt: [
            sample(
                reward,
                finished=reward is not None or prompt in errored,
                is_errored=prompt in errored,
                prompt=prompt,
                sample_index=index,
            )
            for index, reward in enumerate(row)
        ]
        for prompt, row in rewards.items()
    }
    return Run("b", {}, 2, {prompt: f"content-{prompt}" for prompt in rewards}), results


def test_a_difference_is_by_prompt_over_the_prompts_of_both():
    first = evaluation({"a": [1.0, 0.0], "b": [0.0, 0.0], "only": [1.0, 1.0]})
    second = evaluation({"b": [1.0, 1.0], "a": [1.0, 0.0], "c": [0.0, 0.0], "d": [None, None]})
    told = compare(first, second)
    assert (told.common, told.only_first, told.only_second) == (2, 1, 1)
    one = told.differences[0]
    assert (one.first, one.second, one.interval.value, one.better, one.worse) == (0.25, 0.75, 0.5, 1, 0)
    assert "prompts in both: 2, in A only: 1, in B only: 1" in comparison_lines(told)


def test_errors_count_as_wrong_in_a_comparison_too():
    """Row B16."""
    first = evaluation({"a": [1.0], "b": [1.0]})
    second = evaluation({"a": [1.0], "b": [None]}, errored=("b",))
    one = compare(first, second).differences[0]
    assert (one.first, one.second, one.worse) == (1.0, 0.5, 1)


def test_pairing_finds_a_small_gain_that_two_intervals_do_not():
    rng = np.random.default_rng(0)
    skills = rng.uniform(0, 0.9, size=100)
    first = evaluation({f"p{n}": list((rng.random(32) < skill).astype(float)) for n, skill in enumerate(skills)})
    second = evaluation(
        {f"p{n}": list((rng.random(32) < skill + 0.08).astype(float)) for n, skill in enumerate(skills)}
    )
    interval = compare(first, second).differences[0].interval
    assert interval.low > 0
    alone = [
        mean_over_prompts([np.mean([s.reward for s in row]) for row in one[1].values()]) for one in (first, second)
    ]
    assert alone[0].high > alone[1].low


def test_two_evaluations_that_agree_in_every_prompt_may_still_differ():
    """Row B12: no difference seen in a few prompts is not the certainty that there is none."""
    same = evaluation({f"p{n}": [1.0, 1.0] for n in range(10)})
    for one in compare(same, same).differences:
        assert one.interval.low < -0.1 and one.interval.high > 0.1 and one.interval.value == 0.0


def test_nothing_in_common_is_an_error():
    with pytest.raises(ValueError, match="no prompt with scored samples in common"):
        compare(evaluation({"a": [1.0]}), evaluation({"b": [1.0]}))
