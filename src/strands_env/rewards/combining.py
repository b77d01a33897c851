"""Rewards made of rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ..core.types import Action, RewardFunction, RewardResult, StepResult


class WeightedSum(RewardFunction):
    """The sum of rewards, each times its weight. All are computed at once; if one fails, so does the sum.

    `info["parts"]` has for each name its `reward`, `weight` and `info`.
    """

    def __init__(self, parts: Mapping[str, tuple[RewardFunction, float]]) -> None:
        """Set up the sum.

        Args:
            parts: A reward function and its weight, by name.

        Raises:
            ValueError: There are none.
        """
        if not parts:
            raise ValueError("a sum needs parts")
        self.parts = dict(parts)

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Compute all parts and add them up."""
        running = [
            asyncio.ensure_future(part.compute(action=action, step_result=step_result))
            for part, _ in self.parts.values()
        ]
        try:
            results = await asyncio.gather(*running)
        finally:
            for part in running:  # what the failure of another one has left running
                part.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        info: dict[str, Any] = {}
        total = 0.0
        for (name, (_, weight)), result in zip(self.parts.items(), results, strict=True):
            total += weight * result.reward
            info[name] = {"reward": result.reward, "weight": weight, "info": result.info}
        return RewardResult(reward=total, info={"parts": info})

    def check_truth(self, truth: Any) -> None:
        """Ask every part."""
        for part, _ in self.parts.values():
            part.check_truth(truth)


class AllOf(RewardFunction):
    """1 if every reward reaches the threshold, else 0. They are computed in order, up to the first that does not.

    So put cheap checks before a judge. `info["parts"]` has for each that was computed its `reward` and `info`;
    `info["failed"]` is the name of the one that fell short, or None.
    """

    def __init__(self, parts: Mapping[str, RewardFunction], *, threshold: float = 1.0) -> None:
        """Set up the conjunction.

        Args:
            parts: Reward functions by name.
            threshold: What each has to reach.

        Raises:
            ValueError: There are none.
        """
        if not parts:
            raise ValueError("all of nothing is nothing to reward")
        self.parts = dict(parts)
        self.threshold = threshold

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Compute the parts in order."""
        info: dict[str, Any] = {}
        for name, part in self.parts.items():
            result = await part.compute(action=action, step_result=step_result)
            info[name] = {"reward": result.reward, "info": result.info}
            if result.reward < self.threshold:
                return RewardResult(reward=0.0, info={"parts": info, "failed": name})
        return RewardResult(reward=1.0, info={"parts": info, "failed": None})

    def check_truth(self, truth: Any) -> None:
        """Ask every part."""
        for part in self.parts.values():
            part.check_truth(truth)
