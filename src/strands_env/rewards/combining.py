"""Rewards that combine other rewards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from ..core.environment import call_reward
from ..core.supervision import expendable
from ..core.types import Action, RewardFunction, RewardResult, StepResult


class WeightedSum(RewardFunction):
    r"""The weighted sum of several rewards.

    All parts are computed concurrently. If one fails, the sum fails. If all rewards are 1 and the weights sum to 1, the
    sum is exactly 1. `info["parts"]` maps each name to its `reward`, `weight` and `info`.

    Examples:
        >>> WeightedSum({"right": (MathReward(), 1.0), "boxed": (RegexReward(r"\\boxed\{"), 0.1)})
    """

    def __init__(self, parts: Mapping[str, tuple[RewardFunction, float]]) -> None:
        """Create the reward.

        Args:
            parts: Reward function and weight by name.

        Raises:
            ValueError: `parts` is empty.
        """
        if not parts:
            raise ValueError("WeightedSum needs at least one part")
        self.parts = dict(parts)
        self.asks_a_model = any(part.asks_a_model for part, _ in self.parts.values())

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Compute all parts and return their weighted sum."""
        running = [
            asyncio.ensure_future(expendable(call_reward, part, action, step_result)) for part, _ in self.parts.values()
        ]
        try:
            results = await asyncio.gather(*running)
        finally:
            for part in running:  # those that still run after another one failed
                part.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        info: dict[str, Any] = {
            name: {"reward": result.reward, "weight": weight, "info": result.info}
            for (name, (_, weight)), result in zip(self.parts.items(), results, strict=True)
        }
        total = math.fsum(part["weight"] * part["reward"] for part in info.values())
        # Floats of weights such as 0.005, 0.429 and 0.566 sum to less than 1, which is below a success threshold of 1.
        decimal = float(f"{total:.15g}")
        return RewardResult(
            reward=decimal if math.isclose(total, decimal, rel_tol=2**-52) else total, info={"parts": info}
        )

    def check_truth(self, truth: Any) -> None:
        """Check the ground truth with every part."""
        for part, _ in self.parts.values():
            part.check_truth(truth)


class AllOf(RewardFunction):
    """1 if every part reaches a threshold, 0 otherwise.

    Parts are computed in order, up to the first that falls short, so put cheap checks before a judge. `info["parts"]`
    maps the name of each computed part to its `reward` and `info`; `info["failed"]` is the name of the part that fell
    short, or None. If a part fails, the whole fails.

    Examples:
        >>> AllOf({"right": MathReward(), "polite": JudgeReward(judge, "The answer is polite.")}, threshold=0.7)
    """

    def __init__(self, parts: Mapping[str, RewardFunction], *, threshold: float = 1.0) -> None:
        """Create the reward.

        Args:
            parts: Reward functions by name, in the order in which they are computed.
            threshold: Minimum reward of each part.

        Raises:
            ValueError: `parts` is empty.
        """
        if not parts:
            raise ValueError("AllOf needs at least one part")
        self.parts = dict(parts)
        self.asks_a_model = any(part.asks_a_model for part in self.parts.values())
        self.threshold = threshold

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Compute the parts in order, up to the first that falls short."""
        info: dict[str, Any] = {}
        for name, part in self.parts.items():
            result = await call_reward(part, action, step_result)
            info[name] = {"reward": result.reward, "info": result.info}
            if result.reward < self.threshold:
                return RewardResult(reward=0.0, info={"parts": info, "failed": name})
        return RewardResult(reward=1.0, info={"parts": info, "failed": None})

    def check_truth(self, truth: Any) -> None:
        """Check the ground truth with every part."""
        for part in self.parts.values():
            part.check_truth(truth)
