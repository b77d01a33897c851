"""A stub environment for evaluations, and what a results file says when read without the library."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strands_env.core import Action, Observation, RewardResult, StepResult, TaskContext, TerminationReason
from strands_env.eval import EvalSample


def tasks(count: int) -> list[Action]:
    return [
        Action(message=f"What is {n} + {n}?", task_context=TaskContext(id=f"t{n}", ground_truth=str(2 * n)))
        for n in range(count)
    ]


def step_result(
    reward: float | None = 1.0, text: str = "4", reason: Any = TerminationReason.TASK_COMPLETE, error: str | None = None
) -> StepResult:
    return StepResult(
        observation=Observation(
            messages=[{"role": "assistant", "content": [{"text": text}]}], metrics={"model_calls": 1}
        ),
        reward=None if reward is None else RewardResult(reward=reward, info={"answer": text}),
        termination_reason=reason,
        error=error,
    )


def sample(
    reward: float | None, text: str = "4", *, finished: bool = True, prompt: str = "p", **fields: Any
) -> EvalSample:
    reason = TerminationReason.TASK_COMPLETE if finished else TerminationReason.INFRASTRUCTURE_ERROR
    return EvalSample(
        prompt_id=prompt,
        action=Action(message=prompt),
        step_result=step_result(reward, text, reason),
        is_finished=finished,
        **fields,
    )


class StubEnvironment:
    """Plays `play(action)`, a result or a function that makes one; counts its episodes."""

    def __init__(self, play: Callable[[Action], Any] | None = None, *, reward_fn: Any = True) -> None:
        self.play = play or (lambda action: step_result())
        self.reward_fn = reward_fn
        self.episodes: list[Action] = []

    async def factory(self, action: Action) -> Any:
        return self

    async def step(self, action: Action) -> StepResult:
        self.episodes.append(action)
        await asyncio.sleep(0)
        result = self.play(action)
        if asyncio.iscoroutine(result):
            result = await result
        return result


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, read with nothing but the standard library."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
