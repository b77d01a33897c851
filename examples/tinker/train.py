"""Train a calculator agent with a Tinker server (Tinker's, or SkyRL's), on an SGLang server that has its weights.

    python examples/tinker/train.py MODEL http://localhost:30000 http://localhost:8000

The third argument is the address of SkyRL's Tinker server, which reduces a loss in its own way. Left out, Tinker's
service trains. A fourth is the number of steps. See docs/guides/tinker.md.
"""

import asyncio
import random
import sys

import tinker
from tinker.types import AdamParams
from transformers import AutoTokenizer

from strands_env.core import Action, TaskContext
from strands_env.core.models import sglang_model_factory
from strands_env.environments import CalculatorEnvironment
from strands_env.rewards import MathReward
from strands_sglang.credit import training_rows
from strands_sglang.trainers.tinker import to_data


# --8<-- [start:loop]
async def episodes(factory, groups, size):
    """Run groups of episodes at once."""
    numbers = [(random.randint(10, 99), random.randint(10, 99)) for _ in range(groups)]

    async def run(a, b):
        env = CalculatorEnvironment(
            model_factory=factory,
            reward_fn=MathReward(),
            max_tool_iterations=4,
        )
        task = TaskContext(ground_truth=str(a * b))
        result = await env.step(Action(message=f"What is {a} * {b}?", task_context=task))
        return result.episode(group=(a, b))

    return await asyncio.gather(*(run(a, b) for a, b in numbers for _ in range(size)))


def main(model_path, sglang_url, tinker_url=None, steps=10):
    """Train for some steps. How SGLang gets the new weights depends on the Tinker server."""
    factory = sglang_model_factory(
        tokenizer=AutoTokenizer.from_pretrained(model_path),
        base_url=sglang_url,
        sampling_params={"max_new_tokens": 256},
    )
    service = tinker.ServiceClient(base_url=tinker_url)
    trainer = service.create_lora_training_client(base_model=model_path, rank=8)
    loss = "tinker" if tinker_url is None else "tinker:skyrl:weights"
    for step in range(steps):
        rows = training_rows(asyncio.run(episodes(factory, groups=4, size=8)), normalize_std=True)
        if len(rows):
            trainer.forward_backward(to_data(rows, loss=loss), "ppo").result()
            trainer.optim_step(AdamParams(learning_rate=1e-4)).result()
        reward = sum(rows.rewards.values())
        print(f"step {step}: {len(rows)} rows, reward {reward}, left out {dict(rows.counts)}")


# --8<-- [end:loop]
if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
