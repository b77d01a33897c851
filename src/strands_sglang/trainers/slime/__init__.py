"""slime (github.com/THUDM/slime): a ready `generate`, samples from trajectories, and what rewards need.

    --custom-generate-function-path strands_sglang.trainers.slime.generate

takes an agent without tools; `make_generate` makes such a function for an agent of one's own. slime itself is imported
when a function runs, never here: everything works on any object with slime's fields.
"""

from __future__ import annotations

from .rollout import EpisodeEnd, generate, make_generate
from .samples import SlimeExportError, check_reward_nonzero_std, grpo_rewards_by_group, make_reward, to_slime_samples

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
