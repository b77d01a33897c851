"""A SkyRL generator of calculator agents, on an SGLang server of yours.

Set MODEL and SGLANG_URL, and give SkyRL the generator in your entry point:

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            check_config(cfg)
            return generator()

The dataset has an `answer` next to its prompt. See docs/guides/skyrl.md for the settings.
"""

import os

from transformers import AutoTokenizer

from strands_env.core import Action, TaskContext
from strands_env.core.models import sglang_model_factory
from strands_env.environments import CalculatorEnvironment
from strands_env.rewards import MathReward
from strands_sglang.trainers.skyrl import make_generator


# --8<-- [start:loop]
def generator():
    """Return the generator."""
    tokenizer = AutoTokenizer.from_pretrained(os.environ["MODEL"])

    async def run_episode(prompt, extras, sampling):
        """Run one episode."""
        factory = sglang_model_factory(
            tokenizer=tokenizer,
            base_url=os.environ["SGLANG_URL"],
            sampling_params={
                "temperature": sampling.get("temperature", 1.0),
                "max_new_tokens": 256,
            },
            on_abort="resume",  # an answer that a push interrupts continues with the new weights
        )
        env = CalculatorEnvironment(
            model_factory=factory,
            reward_fn=MathReward(),
            max_tool_iterations=4,
        )
        task = TaskContext(ground_truth=extras["answer"])
        result = await env.step(Action(message=list(prompt), task_context=task))
        return result.episode(group=None)

    return make_generator(run_episode, max_tokens=4096)


# --8<-- [end:loop]
