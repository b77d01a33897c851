"""Train a calculator agent with TRL's AsyncGRPOTrainer, on an SGLang server that you started.

    python examples/trl/async_grpo.py MODEL http://localhost:30000

MODEL is the folder that the server serves. TRL's own options may follow, such as --max_steps 10, and --lora_r 16
to train an adapter. See docs/guides/trl.md.
"""

import itertools
import random
import sys
from dataclasses import dataclass

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from strands_env.core import Action, TaskContext
from strands_env.core.models import sglang_model_factory
from strands_env.environments import CalculatorEnvironment
from strands_env.rewards import RegexReward
from strands_sglang.trainers.trl import AsyncGRPORollouts, SGLangWeights


@dataclass
class Adapter:
    """Options of this example, besides TRL's."""

    lora_r: int = 0  # rank of a LoRA adapter; 0 trains all weights


model_path, base_url, *options = sys.argv[1:]
parser = TrlParser((AsyncGRPOConfig, Adapter))
parser.set_defaults(output_dir="out", max_steps=100, learning_rate=1e-6, token_budget=16384, temperature=1.0)
config, adapter = parser.parse_args_and_config(options)
# --8<-- [start:loop]
factory = sglang_model_factory(
    tokenizer=AutoTokenizer.from_pretrained(model_path),
    base_url=base_url,
    sampling_params={"max_new_tokens": 256, "temperature": config.temperature},
    on_abort="resume",  # an answer that a push interrupts continues with the new weights
)
reward = RegexReward(r"(\d+)\D*$", group=1)  # the last number of the answer


async def run_episode(task):
    """Run one episode."""
    question, truth = task
    env = CalculatorEnvironment(
        model_factory=factory,
        reward_fn=reward,
        max_tool_iterations=4,
    )
    context = TaskContext(ground_truth=truth)
    result = await env.step(Action(message=question, task_context=context))
    return result.episode(group=question)


def tasks():
    """Yield questions with their answers."""
    for _ in itertools.count():
        a, b = random.randint(10, 99), random.randint(10, 99)
        yield f"What is {a} * {b}?", str(a * b)


rollouts = AsyncGRPORollouts(
    run_episode,
    tasks(),
    SGLangWeights(base_url),
    group_size=8,
    normalize_std=True,
)
AsyncGRPOTrainer(
    model=model_path,
    args=config,
    processing_class=AutoTokenizer.from_pretrained(model_path),
    train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "unused"}]] * 8}),
    reward_funcs=None,
    rollout_worker=rollouts,
    weight_transfer=rollouts,
    peft_config=LoraConfig(r=adapter.lora_r, task_type="CAUSAL_LM") if adapter.lora_r else None,
).train()
# --8<-- [end:loop]
