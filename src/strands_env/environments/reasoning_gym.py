"""Tasks of reasoning-gym: about a hundred families of generated problems, each with its own verifier.

The package runs in worker processes only, so that a task is the same in every process, and an answer that makes a
verifier hang does not stop the others.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, ClassVar

from ..core import Action, Environment, RewardError, RewardFunction, RewardResult, StepResult, TaskContext
from ..rewards.answers import question_of
from ..rewards.workers import WorkerLimits, shared_pool

LIMITS = WorkerLimits(cpu_s=10.0, wall_s=300.0, memory_bytes=2 << 30)
"""Limits of a worker that makes a task or scores an answer."""


class ReasoningGymReward(RewardFunction):
    """The score of a task's own verifier, from 0 to 1, for what the last `<answer>...</answer>` of the response holds.

    A response without these tags gets 0. `info` has `verdict` (`scored` or `no_answer`), `extracted` (the answer) and
    `ground_truth`. Verifiers run in worker processes with limits on CPU time and memory. Some of them evaluate the
    answer as an expression; a worker is not a sandbox.

    Needs the `reasoning-gym` extra.
    """

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Score the answer.

        Raises:
            RewardError: The verifier raised an error, the installed version of the package makes another task, or no
                worker could be started (infrastructure).
            OverLimitsError: The verifier exceeded the limits of a worker.
        """
        context: Any = action.task_context
        text, closed, _ = (step_result.observation.final_response or "").rpartition("</answer>")
        _, opened, answer = text.rpartition("<answer>")
        if not closed or not opened:
            return RewardResult(reward=0.0, info={"verdict": "no_answer"})
        request = {**context.reasoning_gym, "question": question_of(action), "answer": answer.strip()}
        reply = await shared_pool("reasoning_gym", LIMITS).run(request)
        if "error" in reply:
            raise RewardError(f"the verifier failed on {answer!r:.200}: {reply['error']}")
        info = {"verdict": "scored", "extracted": answer.strip(), "ground_truth": context.ground_truth}
        return RewardResult(reward=reply["score"], info=info)


class ReasoningGymEnvironment(Environment):
    """An environment for the tasks of `reasoning_gym_tasks`: one turn without tools.

    It takes all arguments of [`Environment`][strands_env.core.Environment]. The default reward is `ReasoningGymReward`,
    and the default system prompt asks for the answer between `<answer>` and `</answer>`.

    Needs the `reasoning-gym` extra.

    Examples:
        >>> env = ReasoningGymEnvironment(model_factory)
        >>> result = await env.step(reasoning_gym_tasks("leg_counting")[0])
    """

    default_system_prompt_path: ClassVar[str | Path | None] = Path(__file__).parent / "prompts" / "reasoning_gym.md"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the environment.

        Args:
            *args: Positional arguments of `Environment`.
            **kwargs: Keyword arguments of `Environment`.

        Raises:
            ImportError: The `reasoning-gym` extra is not installed.
        """
        super().__init__(*args, **kwargs)
        _check_installed()
        self.reward_fn = self.reward_fn or ReasoningGymReward()


def reasoning_gym_tasks(family: str, size: int = 100, seed: int = 0, **settings: Any) -> list[Action]:
    """Make tasks of a family. Equal arguments make equal tasks in every process, with one version of the package.

    The id of a task is `family/seed/index`. Its ground truth is an answer that the verifier accepts; None for the few
    families without one. In most families, task `n` of a seed is task 0 of `seed + n`.

    Args:
        family: Name of a dataset of reasoning-gym, such as `leg_counting`.
        size: Number of tasks. The tasks of a few families depend on it.
        seed: Seed of the tasks.
        **settings: Settings of the family that JSON can represent, such as `max_animals=3`.

    Raises:
        ImportError: The `reasoning-gym` extra is not installed.
        ValueError: There is no such family, or it refuses the settings.
        RewardError: No worker could be started.
    """
    _check_installed()
    dataset = {"name": family, "seed": seed, "size": size, **settings}
    tasks = []
    for index in range(size):
        task = {"dataset": dataset, "index": index}
        made = shared_pool("reasoning_gym", LIMITS).ask(task)
        if "error" in made:
            raise ValueError(f"reasoning-gym makes no task {index} of {dataset}: {made['error']}")
        context = {"id": f"{family}/{seed}/{index}", "ground_truth": made["truth"], "reasoning_gym": task}
        tasks.append(Action(message=made["question"], task_context=TaskContext(**context)))
    return tasks


def _check_installed() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ImportError("reasoning-gym is not installed: pip install -e '.[reasoning-gym]'")
