"""Environments: one step is one episode of an agent."""

from strands_sglang import TerminationReason

from .durable import Effect, ForkPoints, has_effect
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
    "Effect",
    "Environment",
    "ForkPoints",
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
    "has_effect",
]
