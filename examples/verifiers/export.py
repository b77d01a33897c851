"""Run a group of calculator episodes on an SGLang server, and write them as verifiers' results.jsonl.

    python examples/verifiers/export.py MODEL http://localhost:30000 results.jsonl

MODEL is the folder that the server serves. See docs/guides/verifiers.md.
"""

import asyncio
import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

from strands_env.core import Action, TaskContext
from strands_env.core.models import sglang_model_factory
from strands_env.environments import CalculatorEnvironment
from strands_env.rewards import MathReward
from strands_sglang.credit import training_rows
from strands_sglang.trainers.verifiers import to_episode

# --8<-- [start:loop]
QUESTION, ANSWER = "What is 27 * 43?", "1161"


async def main(model_path, base_url, path):
    """Run the episodes at once, and write one line for each."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    factory = sglang_model_factory(
        tokenizer=tokenizer,
        base_url=base_url,
        sampling_params={"max_new_tokens": 256},
    )
    env = CalculatorEnvironment(
        model_factory=factory,
        reward_fn=MathReward(),
        max_tool_iterations=4,
    )
    task = TaskContext(ground_truth=ANSWER)
    action = Action(message=QUESTION, task_context=task)
    results = await asyncio.gather(*(env.step(action) for _ in range(8)))
    episodes = [result.episode(group=QUESTION) for result in results]
    rows = training_rows(episodes)
    records = [
        to_episode(
            episode,
            tokenizer=tokenizer,
            advantages=rows.advantages.get(episode.id),
        )
        for episode in episodes
    ]
    lines = [json.dumps(record.to_record(float_decimals=None)) + "\n" for record in records]
    Path(path).write_text("".join(lines), encoding="utf-8")
    print(f"{len(episodes)} episodes, {len(rows)} rows, left out: {dict(rows.counts)}")


# --8<-- [end:loop]
if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
