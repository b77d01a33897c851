"""Train a calculator agent with TRL's GRPOTrainer, on an SGLang server that you started.

    python examples/trl/grpo.py MODEL http://localhost:30000

MODEL is the folder that the server serves. Rollouts and training take turns. See docs/guides/trl.md.
"""

import sys

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from strands_env.core import Action, TaskContext
from strands_env.core.models import sglang_model_factory
from strands_env.environments import CalculatorEnvironment
from strands_env.rewards import RegexReward
from strands_sglang.trainers.trl import GRPORollouts, SGLangWeights, row_advantages

TASKS = {f"What is {a} * {b}?": str(a * b) for a in range(11, 41) for b in range(11, 41)}
GROUP, ROWS = 8, 12  # episodes per prompt, and rows: more than the episodes make, forks and sub-agents included


def main(model_path, base_url, **settings):
    """Train."""
    factory = sglang_model_factory(
        tokenizer=AutoTokenizer.from_pretrained(model_path),
        base_url=base_url,
        sampling_params={"max_new_tokens": 256, "temperature": 1.0},
    )
    reward = RegexReward(r"(\d+)\D*$")  # the last number of the answer

    async def run_episode(question):
        """Run one episode."""
        env = CalculatorEnvironment(model_factory=factory, reward_fn=reward, max_tool_iterations=4)
        result = await env.step(Action(message=question, task_context=TaskContext(ground_truth=TASKS[question])))
        return result.episode(group=question)

    options = {"output_dir": "out", "learning_rate": 1e-6, "per_device_train_batch_size": ROWS, "temperature": 1.0}
    GRPOTrainer(
        model=model_path,
        args=GRPOConfig(**{**options, **settings}, num_generations=ROWS, loss_type="dapo", scale_rewards="none"),
        processing_class=AutoTokenizer.from_pretrained(model_path),
        train_dataset=Dataset.from_dict({"prompt": list(TASKS)}),
        reward_funcs=row_advantages,
        rollout_func=GRPORollouts(run_episode, group_size=GROUP, weights=SGLangWeights(base_url), normalize_std=True),
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:3])
