from __future__ import annotations

import pytest

from strands_env.core import Action, TerminationReason
from strands_env.eval import EvalSample, answer_of, standard_metrics
from strands_env.eval.metrics import sample_sizes
from support.evaluation import step_result


def sample(reward, text="4", *, finished=True):
    reason = TerminationReason.TASK_COMPLETE if finished else TerminationReason.INFRASTRUCTURE_ERROR
    result = step_result(reward, text, reason)
    return EvalSample(prompt_id="p", action=Action(message="?"), step_result=result, is_finished=finished)


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
