"""pass@k on AIME for an agent with a calculator, on SGLang, OpenAI or Bedrock.

    python examples/aime_eval.py --backend sglang --sglang-base-url http://localhost:30000
    python examples/aime_eval.py --backend openai --model-id gpt-5-mini --year 2025 --n-samples 4
    python examples/aime_eval.py --backend bedrock --model-id us.anthropic.claude-haiku-4-5-20251001-v1:0

The problems come from the Hugging Face Hub (`pip install -e ".[env,datasets]"`), or from a file: --dataset FILE.
Results are saved in --output as they finish; the same command continues a run. Exit codes: 0 every sample is finished;
1 some were dropped, or the run failed; 2 invalid arguments; 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from strands_env.core import Action
from strands_env.core.models import build_model_factory
from strands_env.environments import CalculatorEnvironment
from strands_env.eval import Evaluator
from strands_env.eval.benchmarks import load_benchmark
from strands_env.rewards import MathReward
from strands_env.utils import get_cached_client


class AIMEEvaluator(Evaluator):
    """The 30 AIME problems of a year."""

    def __init__(self, *args: Any, year: int, dataset: Path | None = None, **kwargs: Any) -> None:
        """Set the year, and optionally a local file with its problems."""
        super().__init__(*args, **kwargs)
        self.benchmark_name = f"aime-{year}"
        self.dataset = dataset

    def load_dataset(self) -> Iterable[Action]:
        """Return the problems."""
        return load_benchmark(self.benchmark_name, self.dataset)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("sglang", "openai", "bedrock"), default="sglang")
    parser.add_argument("--sglang-base-url", default="http://localhost:30000", help="address of the SGLang server")
    parser.add_argument("--model-id", help="name of the model; for sglang, the served one by default")
    parser.add_argument(
        "--tokenizer", help="folder or hub name of the served model's tokenizer, if not the server's path"
    )
    parser.add_argument("--year", type=int, choices=(2024, 2025), default=2024)
    parser.add_argument("--dataset", type=Path, help="local file with the problems: .jsonl, .json or .parquet")
    parser.add_argument("--n-samples", type=int, default=8, help="samples per problem")
    parser.add_argument("--concurrency", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--max-new-tokens", type=int, default=16384)
    parser.add_argument("--output", type=Path, default=Path("results/aime"), help="folder for the results")
    parsed = parser.parse_args()
    if parsed.backend != "sglang" and parsed.model_id is None:
        parser.error(f"--backend {parsed.backend} needs --model-id")
    return parsed


async def model_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of the chosen backend's model for `build_model_factory`."""
    config: dict[str, Any] = {"backend": args.backend, "model_id": args.model_id}
    config["sampling_params"] = {"temperature": args.temperature, "max_new_tokens": args.max_new_tokens}
    if args.backend == "sglang":
        info = await get_cached_client(args.sglang_base_url, max_retries=3).model_info()
        config["base_url"], config["client"] = args.sglang_base_url, {"max_retries": 3}
        config["tokenizer"] = args.tokenizer or info["tokenizer_path"]
        config["model_id"] = args.model_id or info["model_path"]
    return config


async def run(args: argparse.Namespace) -> int:
    """Evaluate and print the metrics; return the exit code."""
    config = await model_config(args)
    model_factory = build_model_factory(config)
    reward_fn = MathReward()

    async def env_factory(action: Action) -> CalculatorEnvironment:
        return CalculatorEnvironment(model_factory, reward_fn, max_tool_iterations=20)

    evaluator = AIMEEvaluator(
        env_factory,
        year=args.year,
        dataset=args.dataset,
        n_samples_per_prompt=args.n_samples,
        max_concurrency=args.concurrency,
        output_path=args.output,
        config={"model": config["model_id"], "sampling_params": config["sampling_params"]},
        stop_after_failures=20,
    )
    results = await evaluator.run(evaluator.load_dataset())
    metrics = evaluator.compute_metrics(results)
    for name, value in metrics.items():
        print(f"{name:24} {value:.4f}")
    return 1 if metrics["dropped_samples"] else 0


def main() -> int:
    """Run the example and return its exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("strands").setLevel(logging.CRITICAL)
    args = arguments()
    try:
        return asyncio.run(run(args))
    except KeyboardInterrupt:
        print(f"stopped; finished samples are in {args.output}", file=sys.stderr)
        return 130
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
