"""CPU and memory of episodes: many concurrent ones in one process, and a very long one.

    python benchmarks/episodes.py [--quick]

Each of the many calls a tool three times and answers. The scripted server in the same process takes 0.2 s per request,
and its CPU counts, too. Memory is the growth of the process's peak while all results are kept. Takes some minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from strands_sglang.testing import ScriptedAnswer  # noqa: E402
from support.agents import build_chatml_tokenizer  # noqa: E402
from support.environments import ANSWER, ASK, CALL, CalculatorEnv, scripted_env  # noqa: E402

CALLS = 3


def answer(request: Any) -> ScriptedAnswer:
    is_done = request.text.count("<tool_response>") >= CALLS
    return ScriptedAnswer(ANSWER if is_done else CALL, latency_s=0.2)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def many(count: int) -> None:
    first, _ = scripted_env(build_chatml_tokenizer(), answer, client={"max_connections": count})
    tools = first.get_tools()
    environments = [CalculatorEnv(first.model_factory, first.reward_fn, tools=tools) for _ in range(count)]
    await environments[0].step(ASK)
    memory, cpu, wall = peak_mb(), time.process_time(), time.monotonic()
    results = await asyncio.gather(*(env.step(ASK) for env in environments))
    assert all(result.reward is not None for result in results)
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    print(
        f"{count:6} episodes at once: {1000 * cpu / count:6.1f} ms CPU per episode of {CALLS + 1} calls, {wall:5.1f} s "
        f"in all, peak {memory:.0f} -> {peak_mb():.0f} MB ({1024 * (peak_mb() - memory) / count:.0f} kB each)"
    )


async def long(turns: int) -> None:
    env, _ = scripted_env(
        build_chatml_tokenizer(), [CALL] * turns + [ANSWER], server={"context_length": 10**6}, max_tool_iterations=None
    )
    cpu = time.process_time()
    result = await env.step(ASK)
    assert result.observation.metrics["tool_iterations"] == turns
    cpu = time.process_time() - cpu
    print(f"one episode of {turns:5} turns with tools: {cpu:6.1f} s CPU, {1000 * cpu / turns:5.1f} ms per turn")


def main() -> None:
    gc.freeze()  # collections then skip what the test helpers import, which is no cost of an episode
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    quick = parser.parse_args().quick
    for count in (20, 200) if quick else (20, 200, 2000):
        asyncio.run(many(count))
    for turns in (10, 100) if quick else (10, 100, 1000):
        asyncio.run(long(turns))


if __name__ == "__main__":
    main()
