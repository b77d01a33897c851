"""Environments: one step is one episode of an agent."""

from strands_sglang import TerminationReason

from .environment import Environment, ModelFactory, compute_reward
from .types import (
    Action,
    Observation,
    RewardError,
    RewardFunction,
    RewardResult,
    StepResult,
    TaskContext,
    TokenObservation,
)

__all__ = [
    "Action",
    "Environment",
    "ModelFactory",
    "Observation",
    "RewardError",
    "RewardFunction",
    "RewardResult",
    "StepResult",
    "TaskContext",
    "TerminationReason",
    "TokenObservation",
    "compute_reward",
]
