"""Train a calculator agent with TRL's GRPOTrainer, on an SGLang server that you started.

    python examples/trl/grpo.py MODEL http://localhost:30000

MODEL is the folder that the server serves. TRL's own options may follow, such as --max_steps 10, and --lora_r 16
to train an adapter. Rollouts and training take turns. See docs/guides/trl.md.
"""

import sys
from dataclasses import dataclass

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, TrlParser

from strands_env.core import Action, TaskContext
from strands_env.core.models import sglang_model_factory
from strands_env.environments import CalculatorEnvironment
from strands_env.rewards import RegexReward
from strands_sglang.trainers.trl import GRPORollouts, SGLangWeights, row_advantages

TASKS = {f"What is {a} * {b}?": str(a * b) for a in range(11, 41) for b in range(11, 41)}
GROUP, ROWS = 8, 12  # episodes per prompt, and rows: more than the episodes make, forks and sub-agents included


@dataclass
class Adapter:
    """Options of this example, besides TRL's."""

    lora_r: int = 0  # rank of a LoRA adapter; 0 trains all weights


model_path, base_url, *options = sys.argv[1:]
parser = TrlParser((GRPOConfig, Adapter))
parser.set_defaults(output_dir="out", learning_rate=1e-6, temperature=1.0, loss_type="dapo", scale_rewards="none")
parser.set_defaults(num_generations=ROWS, per_device_train_batch_size=ROWS)
config, adapter = parser.parse_args_and_config(options)
# --8<-- [start:loop]
factory = sglang_model_factory(
    tokenizer=AutoTokenizer.from_pretrained(model_path),
    base_url=base_url,
    sampling_params={"max_new_tokens": 256, "temperature": config.temperature},
)
reward = RegexReward(r"(\d+)\D*$", group=1)  # the last number of the answer


async def run_episode(question):
    """Run one episode."""
    env = CalculatorEnvironment(
        model_factory=factory,
        reward_fn=reward,
        max_tool_iterations=4,
    )
    context = TaskContext(ground_truth=TASKS[question])
    result = await env.step(Action(message=question, task_context=context))
    return result.episode(group=question)


rollouts = GRPORollouts(
    run_episode,
    group_size=GROUP,
    weights=SGLangWeights(base_url),
    normalize_std=True,
)
GRPOTrainer(
    model=model_path,
    args=config,
    processing_class=AutoTokenizer.from_pretrained(model_path),
    train_dataset=Dataset.from_dict({"prompt": list(TASKS)}),
    reward_funcs=row_advantages,
    rollout_func=rollouts,
    peft_config=LoraConfig(r=adapter.lora_r, task_type="CAUSAL_LM") if adapter.lora_r else None,
).train()
# --8<-- [end:loop]
