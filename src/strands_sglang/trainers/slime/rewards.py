"""Rewards under slime: a function for `--custom-rm-path`, one for `--custom-reward-post-process-path`.

Promises: samples of one rollout have one reward, which is asked for once and counts once in its group; removed samples
neither get a reward from the function nor move their group's baseline; a reward that is missing or no finite number
removes its rollout, and never gets into the baseline or the loss.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import math
import statistics
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from .samples import as_reward, is_evaluation, main_sample, normalizes_by_group, reward_key

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]

_SCALED = frozenset({"grpo", "gspo", "cispo"})


def make_reward(function: RewardFunction, *, failure_reward: float = 0.0) -> Callable[..., Awaitable[Any]]:
    """Make a function for `--custom-rm-path` from one that scores a single sample.

    slime calls it with a sample, or with a list of them. The samples of a rollout get the reward of the one that holds
    the main conversation. Whatever the function raises, and a reward that is None or no finite number, removes the
    rollout's samples.

    Args:
        function: `function(args, sample, **kwargs)`, sync or async, which returns a number, or a dictionary for
            `reward_key`. A sync one runs in a thread of its own.
        failure_reward: The reward of samples that are removed.
    """

    async def score(args: Any, sample: Any, **kwargs: Any) -> Any:
        """What the function says; None if it is nothing to train on."""
        try:
            if inspect.iscoroutinefunction(function):
                reward = await function(args, sample, **kwargs)
            else:
                reward = await _in_own_thread(function, args, sample, **kwargs)
                if inspect.isawaitable(reward):
                    reward = await reward
        except Exception:
            logger.warning("sample=<%s> | the reward function raised", getattr(sample, "index", None), exc_info=True)
            return None
        if _value(args, reward, evaluation=is_evaluation(sample)) is None:
            logger.warning("reward=<%r> | a reward is no finite number", reward)
            return None
        return reward

    def failed(args: Any, samples: list[Any]) -> Any:
        return as_reward(args, failure_reward, evaluation=is_evaluation(samples[0]))

    async def score_rollout(args: Any, samples: list[Any], **kwargs: Any) -> Any:
        kept = [sample for sample in samples if not sample.remove_sample]
        if not kept:
            known = samples[0].reward
            return failed(args, samples) if known is None else known
        reward = await score(args, main_sample(kept), **kwargs)
        if reward is None:
            for sample in samples:
                sample.remove_sample = True
            return failed(args, samples)
        return reward

    async def reward(args: Any, samples: Any, **kwargs: Any) -> Any:
        """The reward of a sample, or a list of rewards for a list of samples."""
        if not isinstance(samples, list):
            return await score_rollout(args, [samples], **kwargs)
        rollouts = _grouped(samples, _rollout_of)
        scored = await asyncio.gather(*(score_rollout(args, rollout, **kwargs) for rollout in rollouts))
        rewards = {id(sample): one for rollout, one in zip(rollouts, scored, strict=True) for sample in rollout}
        return [rewards[id(sample)] for sample in samples]

    return reward


async def _in_own_thread(function: RewardFunction, *args: Any, **kwargs: Any) -> Any:
    """Call a function that may block or hang: the loop's threads are few, and all of the process shares them."""
    called: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def call() -> None:
        try:
            called.set_result(function(*args, **kwargs))
        except BaseException as error:
            is_failure = isinstance(error, Exception) and not isinstance(error, StopIteration)
            called.set_exception(error if is_failure else RuntimeError(f"it raised {error!r}"))

    threading.Thread(target=call, name="reward", daemon=True).start()
    return await asyncio.wrap_future(called)


def grpo_rewards_by_group(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """For `--custom-reward-post-process-path`: rewards relative to those of the same prompt's rollouts.

    slime's own way needs the same number of samples for each prompt and takes the whole batch for one group otherwise,
    as it does with fan-out. Here a group is what has one `group_index`; each rollout counts once in it, and those whose
    samples are all removed do not count. As slime does, the mean is taken off, and for GRPO, GSPO and CISPO the rest is
    divided by the standard deviation (of a sample, n - 1).

    Args:
        args: slime's parsed arguments: `advantage_estimator`, `rewards_normalization`, `grpo_std_normalization`,
            `reward_key`.
        samples: The batch.

    Returns:
        The raw rewards and those to train on, both in the order of the samples; 0.0 to train on for removed samples.

    Raises:
        ValueError: A sample has no `group_index`.
    """
    values = [_value(args, sample.reward) for sample in samples]
    for sample, value in zip(samples, values, strict=True):
        if value is None:
            # slime zeroes the masks of removed samples after this function has run.
            logger.warning("reward=<%r> | a sample came without a usable reward and is removed", sample.reward)
            sample.remove_sample = True
    raw = [0.0 if value is None else value for value in values]
    if not normalizes_by_group(args):
        return raw, [0.0 if sample.remove_sample else value for sample, value in zip(samples, raw, strict=True)]
    scaled = getattr(args, "advantage_estimator", "grpo") in _SCALED and getattr(args, "grpo_std_normalization", True)
    own = {id(sample): value for sample, value in zip(samples, raw, strict=True)}
    trained = {id(sample): 0.0 for sample in samples}
    for group in _grouped(samples, _prompt_of):
        rollouts = _grouped((sample for sample in group if not sample.remove_sample), _rollout_of)
        rewards = [own[id(main_sample(rollout))] for rollout in rollouts]
        for rollout, reward in zip(rollouts, _normalized(rewards, scaled), strict=True):
            trained.update((id(sample), reward) for sample in rollout)
    return raw, [trained[id(sample)] for sample in samples]


def check_reward_nonzero_std(args: Any, samples: list[Any], **kwargs: Any) -> bool:
    """For `--dynamic-sampling-filter-path`: whether a prompt's rollouts have different rewards.

    Like slime's filter of this name, but removed samples do not count: a group of equal rewards and one failure trains
    nothing. It also takes the lists that `fan_out` makes.

    Args:
        args: slime's parsed arguments: `reward_key`.
        samples: The samples of one prompt; of a fanned-out rollout a list of them.
        **kwargs: Whatever else slime passes.
    """
    flat = [sample for item in samples for sample in (item if isinstance(item, list) else [item])]
    kept = [sample for sample in flat if not sample.remove_sample]
    rewards = [_value(args, main_sample(rollout).reward) for rollout in _grouped(kept, _rollout_of)]
    known = [reward for reward in rewards if reward is not None]
    return len(known) > 1 and max(known) - min(known) > _SMALLEST_DIFFERENCE


_SMALLEST_DIFFERENCE = 1e-6


def _normalized(rewards: list[float], scaled: bool) -> list[float]:
    """Rewards less their mean, over the standard deviation of a sample if they are scaled."""
    if not rewards:
        return []
    mean = statistics.fmean(rewards)
    deviation = statistics.stdev(rewards) + 1e-6 if scaled and len(rewards) > 1 else 1.0
    return [(reward - mean) / deviation for reward in rewards]


def _prompt_of(sample: Any) -> Any:
    if sample.group_index is None:
        raise ValueError(f"sample {sample.index} has no group_index, so nothing tells which prompt it belongs to")
    return sample.group_index


def _rollout_of(sample: Any) -> Any:
    """The rollout that a sample came from: `rollout_id`, or `index`, as slime has it, or each for itself."""
    known = getattr(sample, "rollout_id", None)
    known = sample.index if known is None else known
    return ("lone", id(sample)) if known is None else known


def _grouped(samples: Iterable[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    return list(groups.values())


def _value(args: Any, reward: Any, *, evaluation: bool = False) -> float | None:
    """A reward as a number; None if it is none, or not finite."""
    if isinstance(reward, Mapping):
        reward = reward.get(reward_key(args, evaluation=evaluation))
    try:
        value = float(reward)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
