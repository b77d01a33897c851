"""An AReaL workflow: groups of eight calculator agents, scored by their answer.

Put this folder on the PYTHONPATH of AReaL's workers, set MODEL and SGLANG_URL there, and in the training script

    check_config(config)
    trainer.train(workflow="calculator_workflow.calculator")

The dataset has a `question` and its `answer`. See docs/guides/areal.md.
"""

import functools
import os

from transformers import AutoTokenizer

from strands_env.core import Action, TaskContext
from strands_env.core.models import sglang_model_factory
from strands_env.environments import CalculatorEnvironment
from strands_env.rewards import MathReward
from strands_sglang.trainers.areal import workflow


# --8<-- [start:loop]
@functools.cache
def model_factory():
    """Return the factory of a worker process."""
    return sglang_model_factory(
        tokenizer=AutoTokenizer.from_pretrained(os.environ["MODEL"]),
        base_url=os.environ["SGLANG_URL"],
        sampling_params={"max_new_tokens": 256, "temperature": 1.0},
        on_abort="resume",  # an answer that a push interrupts continues with the new weights
    )


@workflow(group_size=8, normalize_std=True, max_tokens=4096)
async def calculator(engine, data):
    """Run one episode."""
    env = CalculatorEnvironment(
        model_factory=model_factory(),
        reward_fn=MathReward(),
        max_tool_iterations=4,
    )
    task = TaskContext(ground_truth=data["answer"])
    result = await env.step(Action(message=data["question"], task_context=task))
    return result.episode(group=data["question"])


# --8<-- [end:loop]
