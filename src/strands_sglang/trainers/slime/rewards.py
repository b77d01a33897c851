"""Reward functions for slime: scoring, GRPO's baseline by group, and the filter of groups without variance.

The samples of one rollout have one reward, which is requested once and counts once in its group. Removed samples get
no reward from the function and do not affect their group's baseline. A reward that is missing or not finite removes
its rollout, and never reaches the baseline or the loss.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain
from typing import Any

from ...credit import group_advantages
from .samples import (
    as_reward,
    is_evaluation,
    main_sample,
    normalizes_by_group,
    plain_reward,
    rollout_of,
    usable_reward,
)

logger = logging.getLogger(__name__)


def make_reward(function: Callable[..., Any], *, failure_reward: float = 0.0) -> Callable[..., Awaitable[Any]]:
    """Make a function for `--custom-rm-path` from one that scores a single sample.

    slime calls the result with a sample, or with a list of samples. All samples of a rollout get the reward of the one
    with the main conversation. If the function raises, or returns None or a number that is not finite or exceeds 1e18,
    the rollout's samples are removed.

    Args:
        function: Function `function(args, sample, **kwargs)`, sync or async, that returns a number, or a dictionary
            with `reward_key`. A sync function runs in its own thread.
        failure_reward: Reward of removed samples.

    Returns:
        An async function for slime.

    Examples:
        >>> reward_func = make_reward(lambda args, sample, **kwargs: float(sample.label in sample.response))
    """

    async def score_rollout(args: Any, samples: list[Any], **kwargs: Any) -> Any:
        failed = as_reward(args, failure_reward, evaluation=is_evaluation(samples[0]))
        kept = [sample for sample in samples if not sample.remove_sample]
        if not kept:
            return failed if samples[0].reward is None else samples[0].reward
        main = main_sample(kept)
        try:
            is_async = inspect.iscoroutinefunction(function)
            called = function(args, main, **kwargs) if is_async else _in_own_thread(function, args, main, **kwargs)
            reward = await awaited(await called)
        except Exception:
            logger.warning("sample=<%s> | the reward function raised", getattr(main, "index", None), exc_info=True)
        else:
            if usable_reward(args, reward, evaluation=is_evaluation(main)) is not None:
                return plain_reward(args, reward)
            logger.warning("reward=<%r> | a reward is not a finite number, or exceeds 1e18", reward)
        for sample in samples:
            sample.remove_sample = True
        return failed

    async def reward(args: Any, samples: Any, **kwargs: Any) -> Any:
        """Return the reward of a sample, or a list of rewards for a list of samples."""
        if not isinstance(samples, list):
            return await score_rollout(args, [samples], **kwargs)
        rollouts = _grouped(samples, rollout_of)
        scored = await asyncio.gather(*(score_rollout(args, rollout, **kwargs) for rollout in rollouts.values()))
        rewards = dict(zip(rollouts, scored, strict=True))
        return [rewards[rollout_of(sample)] for sample in samples]

    return reward


async def _in_own_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that may block or hang, outside the few threads that the whole process shares."""
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
    """Normalize rewards by group, for `--custom-reward-post-process-path`.

    slime's own normalization needs the same number of samples for each prompt; otherwise, as with `fan_out`, it treats
    the whole batch as one group. Here a group is the samples with one `group_index`. Each rollout counts once, and a
    rollout whose samples are all removed does not count. As in slime, the mean is subtracted, and for GRPO, GSPO and
    CISPO the result is divided by the sample standard deviation (n - 1).

    Args:
        args: Parsed arguments of slime: `advantage_estimator`, `rewards_normalization`, `grpo_std_normalization`,
            `reward_key`.
        samples: Batch of samples.

    Returns:
        Raw rewards, in the order of the samples.
        Normalized rewards, in the same order; 0.0 for removed samples.

    Raises:
        ValueError: A sample has no `group_index`.
    """
    raw = []
    for sample in samples:
        value = usable_reward(args, sample.reward)
        if value is None:
            # slime zeroes the masks of removed samples after this function has run.
            logger.warning("reward=<%r> | a sample has no usable reward and is removed", sample.reward)
            sample.remove_sample = True
        raw.append(value or 0.0)
    if not normalizes_by_group(args):
        return raw, [0.0 if sample.remove_sample else value for sample, value in zip(samples, raw, strict=True)]
    is_grpo = getattr(args, "advantage_estimator", "grpo") in ("grpo", "gspo", "cispo")
    scaled = is_grpo and getattr(args, "grpo_std_normalization", True)
    trained: dict[int, float] = {}
    for group in _grouped(samples, _prompt_of).values():
        rollouts = _grouped((sample for sample in group if not sample.remove_sample), rollout_of).values()
        rewards = [usable_reward(args, main_sample(rollout).reward) or 0.0 for rollout in rollouts]
        advantages = group_advantages(rewards, normalize_std=scaled) if len(rewards) > 1 else [0.0] * len(rewards)
        for rollout, advantage in zip(rollouts, advantages, strict=True):
            trained.update((id(sample), advantage) for sample in rollout)
    return raw, [trained.get(id(sample), 0.0) for sample in samples]


def check_reward_nonzero_std(args: Any, samples: list[Any], **kwargs: Any) -> bool:
    """Return whether a prompt's rollouts have different rewards, for `--dynamic-sampling-filter-path`.

    This is slime's filter of the same name without removed samples: a group of equal rewards and one failure trains
    nothing. It also accepts the lists from `fan_out`.

    Args:
        args: Parsed arguments of slime: `reward_key`.
        samples: Samples of one prompt; a list of samples for each rollout with `fan_out`.
        **kwargs: Further arguments from slime, which are ignored.
    """
    flat = list(chain.from_iterable(item if isinstance(item, list) else [item] for item in samples))
    kept = [sample for sample in flat if not sample.remove_sample]
    rewards = [usable_reward(args, main_sample(rollout).reward) for rollout in _grouped(kept, rollout_of).values()]
    known = [reward for reward in rewards if reward is not None]
    return len(known) > 1 and max(known) - min(known) > 1e-6


def _prompt_of(sample: Any) -> Any:
    if sample.group_index is None:
        raise ValueError(f"sample {sample.index} has no group_index, so its prompt is unknown")
    return sample.group_index


async def awaited(value: Any) -> Any:
    """Return the result of a user's function, sync or async."""
    return await value if inspect.isawaitable(value) else value


def _grouped(samples: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    return groups
