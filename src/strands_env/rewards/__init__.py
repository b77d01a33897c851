"""Rewards: what an episode is worth. A reward that cannot be computed raises; it is never a silent 0."""

from .answers import RewardError, last_boxed
from .combining import AllOf, WeightedSum
from .judging import JudgeReward
from .matching import ExactMatchReward, RegexReward
from .mathematics import MathReward
from .workers import WorkerLimits

__all__ = [
    "AllOf",
    "ExactMatchReward",
    "JudgeReward",
    "MathReward",
    "RegexReward",
    "RewardError",
    "WeightedSum",
    "WorkerLimits",
    "last_boxed",
]
