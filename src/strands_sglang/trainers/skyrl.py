"""SkyRL: a generator whose episodes are Strands agents, for step-wise training.

SkyRL computes the baselines itself, over episodes, from the reward on an episode's last row. It is imported only when
used; docs/guides/skyrl.md shows the settings.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..credit import (
    Episode,
    Loss,
    PolicyLoss,
    Reduction,
    TrainingRow,
    TrainingRows,
    per_batch,
    per_length_limit,
    per_row,
    training_rows,
)
from ..reasons import Reason
from .records import check_settings, loss_columns, newest_version, refuse_images, run_together

logger = logging.getLogger(__name__)

LOSSES: Mapping[str, Reduction] = {
    "skyrl:seq_mean_token_sum_norm": per_length_limit,
    "skyrl:sequence_mean": per_row,
    "skyrl:token_mean": per_batch,
}
"""SkyRL's losses."""


def clipped_loss(rows: TrainingRows, loss: Loss) -> float:
    """Return SkyRL's `regular` loss, by its own functions."""
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train.config import AlgorithmConfig

    old, new, advantages, mask = loss_columns(rows, loss)
    advantages = ppo_utils.apply_loss_reduction_to_advantages_minibatch(advantages, mask, "token_mean", len(rows), 0)
    config = AlgorithmConfig(policy_loss_type="regular", eps_clip_low=loss.clip[0], eps_clip_high=loss.clip[1])
    value, _ = ppo_utils.PolicyLossRegistry.get("regular")(new, old, advantages, config, mask)
    return float(value)


POLICY_LOSSES: Mapping[str, PolicyLoss] = {"skyrl:token_mean": clipped_loss}
"""Losses that a replay computes again."""

RunEpisode = Callable[[Any, Mapping[str, Any], Mapping[str, Any]], Awaitable[Episode]]
"""Async function of a prompt, its extras and SkyRL's sampling parameters that runs one episode."""


SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "generator.step_wise_trajectories": (True,),
    "generator.merge_stepwise_output": (False,),
    "trainer.algorithm.advantage_estimator": ("grpo", "rloo", "maxrl"),
    "trainer.algorithm.loss_reduction": ("token_mean", "prompt_mean"),
    "trainer.algorithm.policy_loss_type": ("regular", "dual_clip", "cispo"),
    "trainer.algorithm.advantage_batch_normalize": (False,),
    "trainer.algorithm.use_kl_in_reward": (False,),
    # Their means are over rows, whatever `loss_reduction` says.
    "trainer.algorithm.use_kl_loss": (False,),
    "trainer.algorithm.use_entropy_loss": (False,),
    "trainer.algorithm.dynamic_sampling.type": (None,),
    "trainer.algorithm.off_policy_correction.tis_ratio_type": (None, "token"),
    "trainer.algorithm.off_policy_correction.sequence_mask_metric": (None,),
}
"""Settings of SkyRL that change what a row of an episode counts, with the values that are right for several rows."""


def check_config(config: Any) -> None:
    """Check SkyRL's settings that change what a row of an episode counts.

    Args:
        config: SkyRL's `SkyRLTrainConfig`.

    Raises:
        ValueError: A setting has another value than those in `SETTINGS`.
    """
    check_settings(config, SETTINGS, "SkyRL")


def make_generator(run_episode: RunEpisode, *, max_tokens: int | None = None, max_staleness: int | None = None) -> Any:
    """Return a SkyRL generator.

    Args:
        run_episode: Runs one episode. Its `group` and `id` do not matter. An exception that it raises ends the step.
        max_tokens: Maximum length of a row in tokens; longer episodes are left out.
        max_staleness: Largest number of updates between the trainer and any token; episodes with older tokens are left
            out. The version of the server's weights is the number of the trainer's updates.

    Returns:
        An instance of SkyRL's `GeneratorInterface`. It refuses to train (`ValueError`) if the server's weights are
            older than those of the trainer, by more than `max_staleness` if that is given: nothing in SkyRL pushes
            weights to SGLang. Evaluations score every episode that has a reward, and no other.
    """
    from skyrl.train.generators.base import GeneratorInterface

    class StrandsGenerator(GeneratorInterface):
        async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
            prompts = input_batch["prompts"]
            extras = input_batch.get("env_extras") or [{}] * len(prompts)
            sampling = input_batch.get("sampling_params") or {}

            async def timed(prompt: Any, extra: Mapping[str, Any]) -> tuple[Episode, float]:
                started = time.monotonic()
                episode = await run_episode(prompt, extra, sampling)
                return episode, time.monotonic() - started

            ended = await run_together(timed(*task) for task in zip(prompts, extras, strict=True))
            episodes, seconds = [episode for episode, _ in ended], [seconds for _, seconds in ended]
            metadata = input_batch.get("batch_metadata")
            if metadata is not None and metadata.training_phase == "eval":
                return evaluation_output(episodes, input_batch["trajectory_ids"], seconds=seconds)
            version = None
            if metadata is not None and metadata.global_step is not None:
                version = max(0, metadata.global_step - 1)  # step 1 samples with the first weights
                served = newest_version(episodes)
                is_sampled = any(any(turn.output_ids for turn in episode.trajectory.turns) for episode in episodes)
                if is_sampled and served < version - (max_staleness or 0):
                    raise ValueError(
                        f"the server sampled with weights of version {served}, but SkyRL has made {version} updates: "
                        "it pushes no weights to SGLang. Push them after each step, under "
                        f"weight_version={str(version)!r} now; see docs/guides/skyrl.md"
                    )
            return generator_output(
                episodes,
                input_batch["trajectory_ids"],
                max_tokens=max_tokens,
                max_staleness=max_staleness,
                version=version,
                seconds=seconds,
            )

    return StrandsGenerator()


def generator_output(
    episodes: Sequence[Episode],
    trajectory_ids: Sequence[Any],
    *,
    max_tokens: int | None = None,
    max_staleness: int | None = None,
    version: int | None = None,
    seconds: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the rows of a batch of episodes as a step-wise `GeneratorOutput`.

    Set `generator.step_wise_trajectories=true`. An episode that cannot be trained is left out, and the log says why. So
    is one whose siblings are all left out: SkyRL would train it with a baseline of 0. A prompt without an episode to
    train has one row with a mask of 0, because SkyRL's trainer fails if a prompt is missing.

    Args:
        episodes: The episodes.
        trajectory_ids: SkyRL's `TrajectoryID` of each.
        max_tokens: Maximum length of a row in tokens.
        max_staleness: Largest difference between the newest version of the weights and that of any token.
        version: The newest version, the number of the trainer's updates. By default the newest in the batch.
        seconds: Duration of each episode, for SkyRL's metrics.

    Raises:
        ValueError: An episode has rewards of single turns, which SkyRL ignores, or images.
    """
    if any(episode.turn_rewards for episode in episodes):
        raise ValueError("SkyRL takes one reward per episode, at its end: leave out turn_rewards")
    named = [replace(episode, id=str(number)) for number, episode in enumerate(episodes)]
    newest = None
    if max_staleness is not None:
        newest = newest_version(named) if version is None else version
    rows = training_rows(named, baseline=None, max_tokens=max_tokens, max_staleness=max_staleness, version=newest)
    refuse_images(rows, "SkyRL's output")
    left_out = dict(rows.left_out)
    groups = [str(trajectory_id.instance_id) for trajectory_id in trajectory_ids]
    trained = Counter(groups[int(name)] for name in rows.advantages)
    for name in rows.advantages:
        if trained[groups[int(name)]] == 1 < groups.count(groups[int(name)]):
            left_out[name] = Reason("only_trained")
    for name, reason in left_out.items():
        logger.warning("trajectory_id=<%s> | left out of training: %s", trajectory_ids[int(name)], reason)
    kept = [row for row in rows if row.episode not in left_out]
    outputs = [(int(row.episode), _columns(row, rows.rewards[row.episode])) for row in kept]
    known = {groups[number] for number, _ in outputs}
    outputs += [(groups.index(group), _FILLER) for group in dict.fromkeys(groups) if group not in known]
    metrics = {
        "episodes_left_out": float(len(left_out)),
        "rows_per_episode": len(kept) / max(1, len(episodes) - len(left_out)),
    }
    return _output(outputs, trajectory_ids, metrics, seconds)


def evaluation_output(
    episodes: Sequence[Episode], trajectory_ids: Sequence[Any], *, seconds: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return a batch of an evaluation as a step-wise `GeneratorOutput`.

    Every episode with a reward is in it, whether it could be trained or not. One without a reward says nothing about
    the policy, and is dropped.

    Args:
        episodes: The episodes.
        trajectory_ids: SkyRL's `TrajectoryID` of each.
        seconds: Duration of each episode, for SkyRL's metrics.

    Raises:
        ValueError: No episode has a reward, so there is nothing to report.
    """
    named = [replace(episode, id=str(number)) for number, episode in enumerate(episodes)]
    rows = training_rows(named, baseline=None)
    outputs = [(int(row.episode), _columns(row, rows.rewards[row.episode])) for row in rows]
    known = {number for number, _ in outputs}
    for name, reward in rows.rewards.items():
        if int(name) not in known:
            outputs.append((int(name), {**_FILLER, "rewards": [reward]}))
    dropped = sorted({*range(len(episodes))} - {number for number, _ in outputs})
    for number in dropped:
        logger.warning("trajectory_id=<%s> | dropped from the evaluation: it has no reward", trajectory_ids[number])
    if not outputs:
        raise ValueError("no episode of this batch of the evaluation has a reward; the log says why")
    return _output(outputs, trajectory_ids, {"episodes_dropped": float(len(dropped))}, seconds)


def _output(
    outputs: list[tuple[int, dict[str, Any]]],
    trajectory_ids: Sequence[Any],
    metrics: dict[str, float],
    seconds: Sequence[float] | None,
) -> dict[str, Any]:
    outputs.sort(key=lambda output: output[0])  # the rows of a prompt together, those of an episode in their order
    numbers = [number for number, _ in outputs]
    return {
        **{name: [columns[name] for _, columns in outputs] for name in _FILLER},
        "trajectory_ids": [trajectory_ids[number] for number in numbers],
        "is_last_step": [number != following for number, following in zip(numbers, [*numbers[1:], None], strict=True)],
        "rollout_metrics": metrics,
        "trajectory_generation_times": None if seconds is None else [seconds[number] for number in numbers],
        "rollout_expert_indices": None,
    }


def _columns(row: TrainingRow, reward: float) -> dict[str, Any]:
    """Return what SkyRL has of a row. The reward is on its last token; SkyRL reads that of an episode's last row."""
    first = row.loss_mask.index(1)
    return {
        "prompt_token_ids": row.token_ids[:first],
        "response_ids": row.token_ids[first:],
        "loss_masks": row.loss_mask[first:],
        "rollout_logprobs": row.logprobs[first:],
        "rewards": [0.0] * (len(row) - first - 1) + [reward],
        "stop_reasons": row.tokens.segments[-1].finish_reason or "stop",
    }


_FILLER: dict[str, Any] = {
    "prompt_token_ids": [0],
    "response_ids": [0],
    "loss_masks": [0],
    "rollout_logprobs": [0.0],
    "rewards": [0.0],
    "stop_reasons": "stop",
}
"""The row of a prompt without an episode to train."""
