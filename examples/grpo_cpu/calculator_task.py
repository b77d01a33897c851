"""The task of the demo: compute expressions with a calculator. A module with these three functions is a task."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from strands_env.core import Action, Environment, RewardFunction, RewardResult, StepResult, TaskContext
from strands_env.environments import CalculatorEnvironment, evaluate

SYSTEM_PROMPT = "You are a helpful assistant."
WORKED_EXAMPLES = ("15 * 12", "98 + 47 - 60", "84 - 29")
"""Expressions of the conversation that every task continues: from it a model of 135M parameters knows how to answer."""

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def training(settings: Any) -> Iterator[Action]:
    """Yield tasks without end, none of which is held out."""
    others = {action.message for action in held_out(settings)}
    rng = random.Random(settings.seed)
    number = 0
    while True:
        action = _action(settings, f"task-{number}", expression(rng))
        if action.message not in others:
            yield action
            number += 1


def held_out(settings: Any) -> list[Action]:
    """Return the tasks of the evaluations; they are the same for every seed of a run."""
    rng = random.Random("held out")
    return [_action(settings, f"held-out-{number}", expression(rng)) for number in range(settings.held_out)]


def environment(model_factory: Callable[[], Any]) -> Environment:
    """Return the environment of one episode."""
    return CalculatorEnvironment(
        model_factory, RightWithTool(), system_prompt=SYSTEM_PROMPT, max_tool_iterations=3, episode_timeout=600
    )


def _action(settings: Any, name: str, text: str) -> Action:
    history = [] if settings.is_fast else worked_examples()
    context = TaskContext(id=name, ground_truth=str(evaluate(text)), conversation_history=history)
    return Action(message=f"What is {text}?", task_context=context)


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
