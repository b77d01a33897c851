"""slime (github.com/THUDM/slime): `generate` functions, samples from trajectories, and reward functions.

    --custom-generate-function-path strands_sglang.trainers.slime.generate

uses an agent without tools; `make_generate` makes such a function for your own agent. slime itself is imported only
when a function runs. Every object with slime's fields works.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...credit import Batch, Reduction, per_batch
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
