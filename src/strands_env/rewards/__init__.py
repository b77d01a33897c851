"""Ready-made rewards. A reward that cannot be computed raises an error; it is never silently 0."""

from ..core.types import RewardError
from .combining import AllOf, WeightedSum
from .evaluators import EvaluatorReward
from .jobs.finding import last_boxed
from .jobs.reading import value_key
from .judging import JudgeReward
from .matching import ExactMatchReward, RegexReward
from .mathematics import MathReward
from .workers import WorkerLimits

__all__ = [
    "AllOf",
    "EvaluatorReward",
    "ExactMatchReward",
    "JudgeReward",
    "MathReward",
    "RegexReward",
    "RewardError",
    "WeightedSum",
    "WorkerLimits",
    "last_boxed",
    "value_key",
]
