"""An environment for arithmetic: an agent with a calculator, and a reward for the right number.

    python examples/math_env.py --backend sglang --sglang-base-url http://localhost:30000
    python examples/math_env.py --backend openai --model-id gpt-5-mini
    python examples/math_env.py --backend bedrock --model-id us.anthropic.claude-haiku-4-5-20251001-v1:0

Exit codes: 0 all episodes ended with a reward; 1 some failed, or none could run; 2 invalid arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

from calculator import calculator

from strands_env.core import Action, Environment, RewardFunction, RewardResult, StepResult, TaskContext
from strands_env.core.models import build_model_factory
from strands_env.utils import get_cached_client

PROBLEMS = {"27 * 43": 1161, "64 + 18": 82, "91 - 36": 55, "52 * 77": 4004, "83 + 25": 108, "46 - 39": 7}
WORKED_EXAMPLES = {"15 * 12": 180, "98 + 47": 145, "84 - 29": 55}


class MathEnv(Environment):
    """An agent with a calculator."""

    def get_tools(self) -> list[Any]:
        """Return the calculator."""
        return [calculator]


class LastNumber(RewardFunction):
    """Reward of 1.0 if the last number of the answer is right, else 0.0."""

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Compare the numbers."""
        numbers = re.findall(r"-?\d+(?:\.\d+)?", (step_result.observation.final_response or "").replace(",", ""))
        found = float(numbers[-1]) if numbers else None
        return RewardResult(reward=float(found == action.task_context.ground_truth), info={"found": found})


def worked_examples() -> list[dict[str, Any]]:
    """Return a conversation in OpenAI's format in which the assistant used the calculator.

    A small model calls tools only once the conversation shows it how.
    """
    messages: list[dict[str, Any]] = []
    for number, (expression, value) in enumerate(WORKED_EXAMPLES.items()):
        function = {"name": "calculator", "arguments": {"expression": expression}}
        messages += [
            {"role": "user", "content": f"What is {expression}?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": f"example_{number}", "function": function}]},
            {"role": "tool", "tool_call_id": f"example_{number}", "content": str(value)},
            {"role": "assistant", "content": f"The answer is {value}."},
        ]
    return messages


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("sglang", "openai", "bedrock"), default="sglang")
    parser.add_argument("--sglang-base-url", default="http://localhost:30000", help="address of the SGLang server")
    parser.add_argument("--model-id", help="name of the model; for sglang, the served one by default")
    parser.add_argument(
        "--tokenizer", help="folder or hub name of the served model's tokenizer, if not the server's path"
    )
    parser.add_argument("--chat-template", type=Path, help="file with a chat template to use instead of the model's")
    parser.add_argument("--worked-examples", action="store_true", help="show the model how tools are called")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parsed = parser.parse_args()
    if parsed.backend != "sglang" and parsed.model_id is None:
        parser.error(f"--backend {parsed.backend} needs --model-id")
    return parsed


async def model_factory(args: argparse.Namespace) -> Any:
    """Return the factory of the chosen backend's models."""
    config: dict[str, Any] = {"backend": args.backend, "model_id": args.model_id}
    config["sampling_params"] = {"temperature": args.temperature, "max_new_tokens": args.max_new_tokens}
    if args.backend == "sglang":
        config["base_url"], config["client"] = args.sglang_base_url, {"max_retries": 3}
        info = await get_cached_client(args.sglang_base_url, max_retries=3).model_info()
        config["tokenizer"] = args.tokenizer or info["tokenizer_path"]
        config["model_id"] = args.model_id or info["model_path"]
        if args.chat_template is not None:
            config["config"] = {"chat_template": args.chat_template.read_text(encoding="utf-8")}
    return build_model_factory(config)


async def run(args: argparse.Namespace) -> int:
    """Run all problems at once and return the exit code."""
    factory = await model_factory(args)
    env = MathEnv(
        model_factory=factory,
        reward_fn=LastNumber(),
        system_prompt="You are a helpful assistant.",
        max_tool_iterations=3,
    )
    history = worked_examples() if args.worked_examples else []
    actions = [
        Action(
            message=f"What is {expression}?",
            task_context=TaskContext(id=expression, ground_truth=value, conversation_history=history),
        )
        for expression, value in PROBLEMS.items()
    ]
    results = await asyncio.gather(*(env.step(action) for action in actions))
    for action, result in zip(actions, results, strict=True):
        reward = "none" if result.reward is None else f"{result.reward.reward:.1f}"
        metrics, tokens = result.observation.metrics, result.observation.tokens
        sampled = "" if tokens is None else f"  {sum(tokens.loss_mask)} of {len(tokens.token_ids)} tokens sampled"
        print(
            f"{action.task_context.id:8} reward {reward}  {result.termination_reason.value}  "
            f"{metrics['tool_calls']} tool calls{sampled}{'  ' + result.error if result.error else ''}"
        )
    rewards = [result.reward.reward for result in results if result.reward is not None]
    print(f"mean reward {sum(rewards) / max(len(rewards), 1):.2f} of {len(rewards)} episodes")
    return 0 if len(rewards) == len(results) else 1


def main() -> int:
    """Run the example and return its exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("strands").setLevel(logging.CRITICAL)
    args = arguments()
    try:
        return asyncio.run(run(args))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
