"""Costs of an evaluation: per record as its file grows, and of 2,000 concurrent episodes on a scripted server.

    python benchmarks/evaluation.py [--episodes N]

The first table has milliseconds per record of 20 kB, one at a time (with one fsync each) and 100 at once (with a shared
fsync), in files with 10, 100, 1,000 and 10,000 records. The second table is for episodes of two model calls and a tool
call, all at once in this process, through `Evaluator` with a file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from strands_env.core import Action, TaskContext
from strands_env.core.models import sglang_model_factory
from strands_env.environments import CalculatorEnvironment
from strands_env.eval import Evaluator
from strands_env.eval.checkpoint import CheckpointFile, encode
from strands_env.rewards import ExactMatchReward
from strands_sglang.testing import ScriptedRequest, ScriptedSGLang
from support.agents import build_chatml_tokenizer, call

SIZES = (10, 100, 1_000, 10_000)
RECORD = encode({"key": "0" * 32, "text": "x" * 20_000})


async def cost_per_record(folder: Path) -> None:
    """Print the first table."""
    print("records in the file   ms per record, alone   ms per record, 100 at once")
    path = folder / "records.jsonl"
    for size in SIZES:
        path.write_bytes(RECORD * size)
        file = CheckpointFile(path)
        await file.append(lambda: RECORD)  # flush what was just written
        alone, together = await seconds(file, 1, 100), await seconds(file, 100, 20) / 100
        await file.close()
        print(f"{size:>19,}   {alone * 1e3:>20.3f}   {together * 1e3:>26.3f}")
    path.unlink()


async def seconds(file: CheckpointFile, at_once: int, rounds: int) -> float:
    """Return the median of the rounds, because other processes use the disk, too."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        await asyncio.gather(*(file.append(lambda: RECORD) for _ in range(at_once)))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def solve(request: ScriptedRequest) -> str:
    """Call the calculator, then report its result."""
    left, right = map(int, re.findall(r"What is (\d+) \+ (\d+)", request.text)[-1])
    if "<tool_response>" in request.text:
        return str(left + right)
    return call("calculator", expression=f"{left} + {right}")


async def many_episodes(folder: Path, count: int) -> None:
    """Print the second table."""
    tokenizer = build_chatml_tokenizer()
    server = ScriptedSGLang(tokenizer, solve)
    factory = sglang_model_factory(tokenizer=tokenizer, client=server.client())
    reward_fn = ExactMatchReward()

    async def env_factory(action: Action) -> Any:
        return CalculatorEnvironment(factory, reward_fn)

    tasks = [
        Action(message=f"What is {n} + 1?", task_context=TaskContext(id=n, ground_truth=str(n + 1)))
        for n in range(count)
    ]
    evaluator = Evaluator(env_factory, max_concurrency=count, keep_tokens=True, output_path=folder / "episodes")
    began, cpu = time.perf_counter(), time.process_time()
    metrics = evaluator.compute_metrics(await evaluator.run(tasks))
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    with (folder / "episodes" / "results.jsonl").open("rb") as file:
        records = sum(1 for line in file if json.loads(line))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{count:,} episodes at once: pass@1 {metrics['pass@1']:.2f}, {metrics['dropped_samples']:.0f} dropped, "
        f"{records:,} records, {wall:.1f} s, {cpu / count * 1e3:.1f} ms CPU per episode, {memory:.0f} MB at most"
    )


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=2_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:  # a disk, where /tmp may be memory
        asyncio.run(cost_per_record(Path(name)))
        asyncio.run(many_episodes(Path(name), given.episodes))


if __name__ == "__main__":
    main()
