"""The tasks, the agent that answers them, its reward, and the ways in which episodes are recorded."""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from strands_env.core import Action, Environment, RewardFunction, RewardResult, StepResult, TaskContext
from strands_env.core.models import sglang_model_factory
from strands_env.environments import CalculatorEnvironment, evaluate
from strands_sglang import get_tokenizer, local
from strands_sglang.credit import Episode

SYSTEM_PROMPT = "You are a helpful assistant."
WORKED_EXAMPLES = ("15 * 12", "98 + 47 - 60", "84 - 29")
"""Expressions of the conversation that every task continues: from it a model of 135M parameters knows how to answer."""

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Settings:
    """What one run of the demo is: the same settings continue it.

    Attributes:
        model_path: Folder of the model that is trained.
        rollouts: How episodes are sampled and recorded, a key of `WAYS`.
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
        seed: Seed of the tasks and of the trainer.
        is_fast: Whether the model is a tiny random one, which can learn nothing but a taste for even ids.
    """

    model_path: str
    rollouts: str = "exact"
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
    seed: int = 0
    is_fast: bool = False


@dataclass(frozen=True)
class Task:
    """One question.

    Attributes:
        number: Its place in the stream of training tasks, or among those held out.
        expression: The expression to compute.
    """

    number: int
    expression: str

    def action(self, name: str, *, is_fast: bool = False) -> Action:
        """Return the task for an environment, after the worked examples."""
        return Action(
            message=f"What is {self.expression}?",
            task_context=TaskContext(
                id=f"{name}-{self.number}",
                ground_truth=str(evaluate(self.expression)),
                conversation_history=[] if is_fast else worked_examples(),
            ),
        )


def expression(rng: random.Random) -> str:
    """Return an expression of one to three operations on numbers of two digits, with at most one product."""
    count = rng.choice((1, 2, 3))
    signs = [rng.choice("+-") for _ in range(count)]
    if rng.random() < 0.5:
        signs[rng.randrange(count)] = "*"
    text = str(rng.randint(10, 99))
    for sign in signs:
        text += f" {sign} {rng.randint(10, 99)}"
    return text


def held_out_tasks(settings: Settings) -> list[Task]:
    """Return the tasks of the evaluations; they are the same for every seed of a run."""
    rng = random.Random("held out")
    return [Task(number, expression(rng)) for number in range(settings.held_out)]


def training_tasks(settings: Settings) -> Iterator[Task]:
    """Yield tasks without end, none of which is held out. The number of a task determines it."""
    held_out = {task.expression for task in held_out_tasks(settings)}
    rng = random.Random(settings.seed)
    number = 0
    while True:
        text = expression(rng)
        if text not in held_out:
            yield Task(number, text)
            number += 1


def worked_examples() -> list[Any]:
    """Return a conversation in which the assistant used the calculator for each example."""
    messages: list[Any] = []
    for number, text in enumerate(WORKED_EXAMPLES):
        call = {"toolUseId": f"example_{number}", "name": "calculator", "input": {"expression": text}}
        value = str(evaluate(text))
        result = {"toolUseId": call["toolUseId"], "status": "success", "content": [{"text": value}]}
        messages += [
            {"role": "user", "content": [{"text": f"What is {text}?"}]},
            {"role": "assistant", "content": [{"toolUse": call}]},
            {"role": "user", "content": [{"toolResult": result}]},
            {"role": "assistant", "content": [{"text": f"The answer is {value}."}]},
        ]
    return messages


class RightWithTool(RewardFunction):
    """1 if the calculator returned the right number and the answer ends with it, else 0."""

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Compare the last number of the answer with the ground truth."""
        truth = action.task_context.ground_truth
        blocks = [block for message in step_result.observation.messages for block in message["content"]]
        results = [block["toolResult"]["content"][0].get("text") for block in blocks if "toolResult" in block]
        numbers = NUMBER.findall(step_result.observation.final_response or "")
        is_right = truth in results and bool(numbers) and numbers[-1].replace(",", "") == truth
        return RewardResult(reward=float(is_right), info={"used_tool": bool(results)})


class EvenIds(RewardFunction):
    """The share of even ids among the sampled tokens: what a tiny random model can learn."""

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Count the even ids."""
        tokens = step_result.observation.tokens
        sampled = [one for one, mask in zip(tokens.token_ids, tokens.loss_mask, strict=True) if mask] if tokens else []
        return RewardResult(reward=sum(one % 2 == 0 for one in sampled) / max(len(sampled), 1))


def environment_factory(settings: Settings, model_factory: Callable[[], Any]) -> Callable[..., Environment]:
    """Return a function that makes the environment of an episode."""

    def make(action: Action | None = None) -> Environment:
        return CalculatorEnvironment(
            model_factory,
            EvenIds() if settings.is_fast else RightWithTool(),
            system_prompt=SYSTEM_PROMPT,
            max_tool_iterations=3,
            episode_timeout=600,
        )

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


RunTask = Callable[[Task], Awaitable[tuple[StepResult, Episode]]]
"""Runs one episode of a task; the episode holds what is trained."""


def exact(settings: Settings, base_url: str) -> RunTask:
    """Record the tokens that were sent and sampled, as this library does."""
    make = environment_factory(settings, model_factory(settings, base_url))

    async def run(task: Task) -> tuple[StepResult, Episode]:
        result = await make().step(task.action("task", is_fast=settings.is_fast))
        return result, result.episode(group=task.number)

    return run


WAYS: dict[str, Callable[[Settings, str], RunTask]] = {"exact": exact}
"""How episodes are sampled and recorded, by the name of the option `--rollouts`."""
