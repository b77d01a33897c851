"""slime (github.com/THUDM/slime): `generate` functions, samples from trajectories, and reward functions.

    --custom-generate-function-path strands_sglang.trainers.slime.generate

uses an agent without tools; `make_generate` makes such a function for your own agent. slime itself is imported only
when a function runs. Every object with slime's fields works.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import compress

from ...credit import Batch, Loss, PolicyLoss, Reduction, TrainingRows, per_batch
from .rewards import check_reward_nonzero_std, grpo_rewards_by_group, make_reward
from .rollout import EpisodeEnd, generate, make_generate
from .samples import SlimeExportError, to_slime_samples

__all__ = [
    "EpisodeEnd",
    "SlimeExportError",
    "check_reward_nonzero_std",
    "generate",
    "grpo_rewards_by_group",
    "make_generate",
    "make_reward",
    "to_slime_samples",
]


def per_rollout(batch: Batch, index: int) -> float:
    """Mean over the trained tokens of a rollout, then over all rollouts of the step, also those that slime removes."""
    return 1 / ((batch.episodes + batch.left_out) * batch.rows[index].episode_trained)


LOSSES: Mapping[str, Reduction] = {"slime": per_rollout, "slime:per_token": per_batch}
"""slime's losses."""


def clipped_loss(rows: TrainingRows, loss: Loss) -> float:
    """Return slime's loss by its formula, that of PPO: slime needs Megatron, which no package index has."""
    low, high = loss.clip
    batch = Batch(rows, left_out=len(rows.left_out))
    total = 0.0
    for index, row in enumerate(rows):
        weight = LOSSES[loss.name](batch, index) * (row.loss_weight or 0.0)
        columns = zip(row.logprobs, row.trainer_logprobs or (), row.advantages, strict=True)
        for old, new, advantage in compress(columns, row.loss_mask):
            ratio = math.exp(new - old) if loss.from_sampler else 1.0
            clipped = min(max(ratio, 1 - low), 1 + high)
            total -= weight * min(ratio * advantage, clipped * advantage)
    return total


POLICY_LOSSES: Mapping[str, PolicyLoss] = dict.fromkeys(LOSSES, clipped_loss)
"""Losses that a replay computes again."""
