"""What a run of the demo is: its settings, its task, and the ways in which episodes are recorded."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import calculator_task

from strands_env.core import Action, Environment, RewardFunction, RewardResult, StepResult
from strands_env.core.models import sglang_model_factory
from strands_env.environments import ReasoningGymEnvironment, reasoning_gym_tasks
from strands_sglang import get_tokenizer, local
from strands_sglang.credit import Episode
from strands_sglang.trees import at_high_entropy, evenly

POLICIES = {"evenly": evenly, "at_high_entropy": at_high_entropy}
"""How the turns are chosen before which an episode is forked."""


@dataclass(frozen=True)
class Settings:
    """What one run of the demo is: the same settings continue it.

    Attributes:
        model_path: Folder of the model that is trained.
        rollouts: How episodes are sampled and recorded, a key of `WAYS`.
        task: What is trained: `calculator`, `reasoning_gym:FAMILY`, or a module of yours with a task's functions.
        task_args: Settings of the family, as JSON.
        steps: Number of updates.
        tasks: Tasks per update.
        samples: Episodes per task.
        held_out: Tasks of the evaluations.
        held_out_samples: Episodes per task there.
        temperature: Sampling temperature, also of the trainer.
        top_p: Nucleus sampling; 1 for none.
        top_k: Sampling among the most probable tokens only; -1 for all.
        max_new_tokens: Longest answer of a turn, in tokens.
        learning_rate: Learning rate of AdamW.
        tree: Forks of each episode from before one of its turns; 0 for none. Half as many episodes are asked then,
            which with 3 forks are about as many sampled tokens.
        fork_at: How that turn is chosen, a key of `POLICIES`.
        seed: Seed of the tasks and of the trainer.
        is_fast: Whether the model is a tiny random one, which can learn nothing but a taste for even ids.
    """

    model_path: str
    rollouts: str = "exact"
    task: str = "calculator"
    task_args: str = "{}"
    steps: int = 4
    tasks: int = 4
    samples: int = 8
    held_out: int = 48
    held_out_samples: int = 2
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 48
    learning_rate: float = 2e-5
    tree: int = 0
    fork_at: str = "evenly"
    seed: int = 0
    is_fast: bool = False


class Task(Protocol):
    """What is trained."""

    def training(self, settings: Settings) -> Iterator[Action]:
        """Yield tasks to train on, none of which is held out; the same ones for equal settings."""

    def held_out(self, settings: Settings) -> list[Action]:
        """Return the tasks of the evaluations; they are the same for every seed of a run."""

    def environment(self, model_factory: Callable[[], Any]) -> Environment:
        """Return the environment of one episode."""


class Family:
    """A family of reasoning-gym. Every task continues a conversation with worked examples."""

    def __init__(self, name: str, **settings: Any) -> None:
        """Choose the family and its settings; fails if the package is not installed, or has no such family."""
        self._name, self._settings = name, settings
        self._examples: list[Any] = []
        for example in self._tasks(size=3, seed=1_000):
            answer = f"<answer>{example.task_context.ground_truth}</answer>"
            self._examples += [{"role": "user", "content": example.message}, {"role": "assistant", "content": answer}]

    def training(self, settings: Settings) -> Iterator[Action]:
        """Yield tasks without end."""
        held_out = {action.message for action in self.held_out(settings)}
        for seed in itertools.count((settings.seed + 1) * 100_000, 50):  # task n of a seed is task 0 of seed + n
            yield from (one for one in self._continued(settings, 50, seed) if one.message not in held_out)

    def held_out(self, settings: Settings) -> list[Action]:
        """Return the tasks of seed 0."""
        return self._continued(settings, settings.held_out, seed=0)

    def environment(self, model_factory: Callable[[], Any]) -> Environment:
        """Return an environment with the family's own reward."""
        return ReasoningGymEnvironment(model_factory, episode_timeout=600)

    def _continued(self, settings: Settings, size: int, seed: int) -> list[Action]:
        actions = self._tasks(size, seed)
        for action in actions:
            action.task_context.conversation_history = [] if settings.is_fast else self._examples
        return actions

    def _tasks(self, size: int, seed: int) -> list[Action]:
        return reasoning_gym_tasks(self._name, size, seed, **self._settings)


def task_of(settings: Settings) -> Task:
    """Return the task that the settings name."""
    package, _, family = settings.task.partition(":")
    if package == "reasoning_gym":
        return Family(family, **json.loads(settings.task_args))
    return calculator_task if settings.task == "calculator" else importlib.import_module(settings.task)


class EvenIds(RewardFunction):
    """The share of even ids among the sampled tokens: what a tiny random model can learn."""

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Count the even ids."""
        tokens = step_result.observation.tokens
        sampled = [one for one, mask in zip(tokens.token_ids, tokens.loss_mask, strict=True) if mask] if tokens else []
        return RewardResult(reward=sum(one % 2 == 0 for one in sampled) / max(len(sampled), 1))


def environment_factory(settings: Settings, model_factory: Callable[[], Any]) -> Callable[..., Environment]:
    """Return a function that makes the environment of an episode."""
    task = task_of(settings)

    def make(action: Action | None = None) -> Environment:
        environment = task.environment(model_factory)
        if settings.is_fast:
            environment.reward_fn = EvenIds()
        return environment

    return make


def model_factory(settings: Settings, base_url: str) -> Callable[[], Any]:
    """Return a function that makes the model of an episode."""
    tokenizer = get_tokenizer(settings.model_path)
    has_tools = "tools" in (tokenizer.chat_template or "")
    return sglang_model_factory(
        tokenizer=tokenizer,
        base_url=base_url,
        chat_template=None if has_tools else local.CHATML_TOOLS_TEMPLATE.read_text(encoding="utf-8"),
        sampling_params={
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "max_new_tokens": settings.max_new_tokens,
        },
        # With a finite top_k the server tells which ids each token was sampled from; the trainer needs them.
        request_fields={"return_sampling_mask": True} if settings.top_k > 0 else {},
        on_abort="resume",  # a push of weights interrupts an answer, which continues with the new ones
    )


RunTask = Callable[[Action], Awaitable[list[tuple[StepResult, Episode]]]]
"""Runs one episode of a task, and perhaps forks of it; the episodes hold what is trained."""


def exact(settings: Settings, base_url: str) -> RunTask:
    """Record the tokens that were sent and sampled, as this library does."""
    make = environment_factory(settings, model_factory(settings, base_url))

    async def run(action: Action) -> list[tuple[StepResult, Episode]]:
        with tempfile.TemporaryDirectory() as folder:
            environment = make()
            environment.journal = Path(folder) if settings.tree else None
            results = [await environment.step(action)]
            trajectory = results[0].observation.trajectory
            if settings.tree:
                chosen = [] if trajectory is None else POLICIES[settings.fork_at](trajectory, 1)
                for turn in chosen:
                    results += await environment.fork(results[0], turn, settings.tree)
                if not chosen:  # an episode that is forked before its first turn is a new one; groups stay of one size
                    results += await asyncio.gather(*(make().step(action) for _ in range(settings.tree)))
        return [(result, result.episode(group=action.task_context.id)) for result in results]

    return run


WAYS: dict[str, Callable[[Settings, str], RunTask]] = {"exact": exact}
"""How episodes are sampled and recorded, by the name of the option `--rollouts`."""
