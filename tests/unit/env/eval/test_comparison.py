import numpy as np
import pytest

from strands_env.eval.checkpoint import Run
from strands_env.eval.metrics import compare, comparison_lines, mean_over_prompts
from support.environments import sample


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
