"""Rewards under slime: one per rollout, asked for once, normalised within the prompt's group."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang.trainers.slime import check_reward_nonzero_std, grpo_rewards_by_group, make_reward
from support.slime_episodes import ANSWER, export, play
from support.slime_stub import Sample, slime_args

ARGS = slime_args(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True)


def sample(group: int = 0, rollout: int = 0, reward: Any = None, **fields: Any) -> Sample:
    return Sample(group_index=group, index=rollout, rollout_id=rollout, reward=reward, **fields)


async def test_a_reward_function_is_asked_once_per_rollout_for_the_main_conversation():
    asked = []

    async def score(args: Any, one: Sample, **kwargs: Any) -> float:
        asked.append((one.label, kwargs))
        return float(one.label)

    main = {"strands_sglang": {"is_main": True}}
    side = sample(rollout=1, label="5")
    samples = [sample(rollout=1, label="1", metadata=main), side, sample(rollout=2, label="3")]
    reward = make_reward(score)
    assert await reward(ARGS, samples, extra=1) == [1.0, 1.0, 3.0]
    assert asked == [("1", {"extra": 1}), ("3", {"extra": 1})]
    assert await reward(ARGS, side) == 5.0


async def test_a_function_that_is_not_async_will_do():
    assert await make_reward(lambda args, one: 2)(ARGS, sample()) == 2


@pytest.mark.parametrize("result", [None, math.nan, math.inf, "good", {"other": 1.0}, ValueError("no")])
async def test_a_reward_that_is_none_removes_the_rollout(result, caplog):
    def score(args: Any, one: Sample) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    samples = [sample(rollout=1), sample(rollout=1)]
    assert await make_reward(score)(ARGS, samples) == [0.0, 0.0]
    assert all(one.remove_sample for one in samples) and "reward" in caplog.text
    keyed = slime_args(reward_key="score")
    assert await make_reward(score, failure_reward=-1.0)(keyed, sample()) == {"score": -1.0}


async def test_removed_samples_keep_their_reward_and_are_not_scored():
    def score(args: Any, one: Sample) -> float:
        raise AssertionError("asked")

    assert await make_reward(score)(ARGS, sample(reward=0.5, remove_sample=True)) == 0.5
    assert await make_reward(score)(ARGS, [sample(remove_sample=True)]) == [0.0]


def test_groups_are_those_of_the_prompts_and_a_rollout_counts_once():
    samples = [
        sample(0, 1, 1.0),
        sample(0, 1, 1.0),
        sample(0, 1, 1.0),
        sample(0, 2, 0.0),
        sample(1, 3, 1.0),
        sample(1, 4, 0.0),
    ]
    raw, trained = grpo_rewards_by_group(ARGS, samples)
    assert raw == [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert trained == pytest.approx([half, half, half, -half, half, -half])


def test_removed_samples_do_not_move_the_baseline():
    samples = [sample(0, 1, 1.0), sample(0, 2, 0.5), sample(0, 3, 0.0, remove_sample=True)]
    args = slime_args(advantage_estimator="grpo", grpo_std_normalization=False)
    raw, trained = grpo_rewards_by_group(args, samples)
    assert (raw, trained) == ([1.0, 0.5, 0.0], [0.25, -0.25, 0.0])


def test_a_rollout_whose_main_sample_was_removed_counts_by_its_others():
    main = {"strands_sglang": {"is_main": True}}
    samples = [sample(0, 1, 9.0, metadata=main, remove_sample=True), sample(0, 1, 1.0), sample(0, 2, 0.0)]
    args = slime_args(advantage_estimator="grpo", grpo_std_normalization=False)
    assert grpo_rewards_by_group(args, samples)[1] == [0.0, 0.5, -0.5]


@pytest.mark.parametrize("reward", [None, math.nan])
def test_a_sample_that_comes_without_a_reward_is_removed(reward):
    samples = [sample(0, 1, 1.0), sample(0, 2, reward), sample(0, 3, 0.0)]
    raw, trained = grpo_rewards_by_group(ARGS, samples)
    assert samples[1].remove_sample and raw[1] == trained[1] == 0.0
    assert trained[0] == -trained[2] > 0


def test_rewards_are_left_alone_where_slime_does_not_normalise_them():
    samples = [sample(0, 1, 1.0), sample(0, 2, 0.5), sample(0, 3, 2.0, remove_sample=True)]
    for args in (
        slime_args(advantage_estimator="ppo"),
        slime_args(advantage_estimator="grpo", rewards_normalization=False),
    ):
        assert grpo_rewards_by_group(args, samples) == ([1.0, 0.5, 2.0], [1.0, 0.5, 0.0])
    args = slime_args(advantage_estimator="reinforce_plus_plus_baseline", grpo_std_normalization=True)
    assert grpo_rewards_by_group(args, samples)[1] == [0.25, -0.25, 0.0]


def test_rewards_are_read_by_slimes_key():
    samples = [sample(0, 1, {"score": 1.0}), sample(0, 2, {"score": 0.0})]
    args = slime_args(reward_key="score", advantage_estimator="grpo", grpo_std_normalization=False)
    assert grpo_rewards_by_group(args, samples) == ([1.0, 0.0], [0.5, -0.5])


def test_a_sample_without_a_group_is_an_error():
    with pytest.raises(ValueError, match="group_index"):
        grpo_rewards_by_group(ARGS, [Sample(reward=1.0)])


@given(
    st.lists(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 4)), min_size=2, max_size=6), min_size=1, max_size=4)
)
def test_how_often_a_rollout_fans_out_changes_nobodys_advantage(groups):
    def batch(fan_out: bool) -> list[Sample]:
        return [
            sample(number, 10 * number + place, reward)
            for number, group in enumerate(groups)
            for place, (reward, count) in enumerate(group)
            for _ in range(count if fan_out else 1)
        ]

    lone, spread = batch(False), batch(True)
    expected = {one.index: value for one, value in zip(lone, grpo_rewards_by_group(ARGS, lone)[1], strict=True)}
    trained = grpo_rewards_by_group(ARGS, spread)[1]
    assert trained == [expected[one.index] for one in spread]
    for number, group in enumerate(groups):  # slime's own way, where it is right
        rewards = torch.tensor([reward for reward, _ in group], dtype=torch.double)
        centred = rewards - rewards.mean()
        scaled = centred / (centred.std() + 1e-6)
        own = [expected[10 * number + place] for place in range(len(group))]
        assert own == pytest.approx(scaled.tolist(), abs=1e-6)


async def test_rewards_that_hang_take_no_thread_from_others():
    """B8: a sync reward ran in the loop's few threads, which everything in the process shares."""
    release = threading.Event()
    hanging = [asyncio.ensure_future(make_reward(lambda args, one: release.wait())(ARGS, sample())) for _ in range(64)]
    try:
        assert await asyncio.wait_for(make_reward(lambda args, one: 0.5)(ARGS, sample()), 60) == 0.5
    finally:
        release.set()
        await asyncio.gather(*hanging)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), StopIteration(), asyncio.CancelledError()])
async def test_whatever_a_reward_raises_removes_its_sample(error):
    def score(args: Any, one: Sample) -> Any:
        raise error

    one = sample()
    assert await make_reward(score)(ARGS, one) == 0.0 and one.remove_sample


# --- what slime reads of rewards that failed ---

KEYS = {"reward_key": "score", "eval_reward_key": "acc", "log_reward_category": "pred"}


@pytest.mark.parametrize("names", [set(), {"reward_key"}, {"reward_key", "eval_reward_key"}, set(KEYS)])
@pytest.mark.parametrize("evaluation", [False, True])
async def test_a_failed_reward_has_every_key_that_slime_reads(names, evaluation, chatml_tokenizer):
    """C2: one failed episode raised KeyError or TypeError in slime."""
    args = slime_args(**{name: KEYS[name] for name in names})

    def broken(args: Any, one: Sample) -> Any:
        raise RuntimeError("the grader is down")

    failed = export(await play(chatml_tokenizer, []), chatml_tokenizer, args=args, evaluation=evaluation)
    ungraded = export(await play(chatml_tokenizer, [ANSWER]), chatml_tokenizer, args=args, evaluation=evaluation)
    for reward in (failed.reward, await make_reward(broken)(args, failed), await make_reward(broken)(args, ungraded)):
        check_reward_is_readable(args, reward, evaluation=evaluation)


def check_reward_is_readable(args: Any, reward: Any, *, evaluation: bool) -> None:
    """Read a reward as slime does, in training, in evaluations and in its metrics."""
    key = (getattr(args, "eval_reward_key", None) if evaluation else None) or getattr(args, "reward_key", None)
    assert (reward[key] if key else reward) == 0.0
    if getattr(args, "log_reward_category", None):
        assert reward[args.log_reward_category] == "failed"


async def test_an_evaluation_may_have_a_reward_key_of_its_own(chatml_tokenizer):
    """C2."""
    args = slime_args(eval_reward_key="acc")
    episode = await play(chatml_tokenizer, [ANSWER])
    failed = export(await play(chatml_tokenizer, []), chatml_tokenizer, args=args, evaluation=True)
    assert failed.reward == {"acc": 0.0}
    graded = export(episode, chatml_tokenizer, args=args, evaluation=True)
    assert await make_reward(lambda args, one: {"acc": True})(args, graded) == {"acc": True}
    assert export(await play(chatml_tokenizer, []), chatml_tokenizer, args=args).reward == 0.0


# --- the filter ---


def test_the_filter_leaves_removed_samples_out():
    """C6: seven right answers and one failure passed slime's own filter, and no advantage was left."""
    right = [sample(rollout=n, reward=1.0) for n in range(7)]
    failed = sample(rollout=7, reward=0.0, remove_sample=True)
    assert not check_reward_nonzero_std(ARGS, [*right, failed])
    assert not any(grpo_rewards_by_group(ARGS, [*right, failed])[1])
    assert check_reward_nonzero_std(ARGS, [*right, sample(rollout=8, reward=0.0)])
    assert not check_reward_nonzero_std(ARGS, [failed]) and not check_reward_nonzero_std(ARGS, right[:1])


def test_the_filter_takes_lists_and_counts_a_rollout_once():
    """C3: slime's filter raised AttributeError with `fan_out`."""
    one = [sample(rollout=1, reward=1.0), sample(rollout=1, reward=1.0)]
    keyed = slime_args(reward_key="score")
    assert not check_reward_nonzero_std(ARGS, [one])
    assert check_reward_nonzero_std(ARGS, [one, [sample(rollout=2, reward=0.5)]])
    assert check_reward_nonzero_std(keyed, [sample(rollout=n, reward={"score": float(n)}) for n in range(2)])
