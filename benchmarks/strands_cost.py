"""What Strands itself costs per turn, which parts of it grow with the history, and what `Environment` avoids.

    python benchmarks/strands_cost.py [--turns 160] [--rounds 7] [--agents 1000]

A model that does no work and an async tool that returns a constant run episodes of `--turns` tool turns. CPU times are
of the whole process. Each round runs every variant once; a figure is the median over the rounds, of five neighboring
turns. Variants without a part replace it by a function that does nothing, so the difference is what the part costs.
Then `--agents` environments start at once, for the largest stall of the event loop.

Without this package installed, it measures Strands alone. README.md has the figures and explains them.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import functools
import gc
import importlib.metadata
import importlib.util
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.models.model import Model
from strands.telemetry import tracer

SHOWN = (1, 5, 10, 20, 40, 80, 160)
TEXT = "The next step is to look at one more value, and then to decide. " * 6  # about 100 tokens


class Idle(Model):
    """Calls the tool once per turn, and then answers, after a delay in seconds.

    Attributes:
        asked: CPU time of the process at each call, in seconds.
    """

    def __init__(self, turns: int, delay: float | None = None) -> None:
        self.turns = turns
        self.delay = delay
        self.asked: list[float] = []

    def update_config(self, **config: Any) -> None:
        pass

    def get_config(self) -> dict[str, Any]:
        return {}

    async def count_tokens(self, *args: Any, **kwargs: Any) -> int:
        return 1

    def structured_output(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        self.asked.append(time.process_time())
        if self.delay is not None:
            await asyncio.sleep(self.delay)
        is_last = len(self.asked) > self.turns
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockStart": {"start": {}}}
        yield {"contentBlockDelta": {"delta": {"text": TEXT}}}
        yield {"contentBlockStop": {}}
        if not is_last:
            number = len(self.asked)
            yield {"contentBlockStart": {"start": {"toolUse": {"toolUseId": f"call_{number}", "name": "look_up"}}}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps({"key": f"k{number}"})}}}}
            yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn" if is_last else "tool_use"}}
        usage = {"inputTokens": 1, "outputTokens": 1, "totalTokens": 2}
        yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}


@tool
async def look_up(key: str) -> str:
    """Look up a value.

    Args:
        key: The key.
    """
    return "The value is 425, as of today. " * 8


# --- variants ---


async def run_strands(turns: int, per_invocation: int | None) -> list[float]:
    """Run one episode with Strands alone; return the CPU time at each turn and at the end."""
    model = Idle(turns)
    agent = Agent(
        model=model,
        tools=[look_up],
        system_prompt="Be brief.",
        callback_handler=None,
        conversation_manager=NullConversationManager(),
        retry_strategy=None,
    )
    prompt: str | None = "What is the value?"
    while True:
        limits: Any = None if per_invocation is None else {"turns": per_invocation}
        result = await agent.invoke_async(prompt, limits=limits)
        if result.stop_reason != "limit_turns":
            return [*model.asked, time.process_time()]
        prompt = None


async def run_environment(turns: int, _: int | None) -> list[float]:
    """Run one episode in an environment; return the CPU time at each turn and at the end."""
    model = Idle(turns)
    await step_of(lambda: model)
    return [*model.asked, time.process_time()]


def step_of(model_factory: Callable[[], Model]) -> Coroutine[Any, Any, Any]:
    """Return the step of a new environment."""
    env = environment_class()(model_factory, system_prompt="Be brief.", max_tool_iterations=None)
    from strands_env.core import Action

    return env.step(Action(message="What is the value?"))


@functools.cache
def environment_class() -> Any:
    """Return an environment with the tool."""
    from strands_env.core import Environment

    class LookUp(Environment):
        def get_tools(self) -> list[Any]:
            return [look_up]

    return LookUp


@contextmanager
def without_spans() -> Iterator[None]:
    """Serialize nothing for spans, as if Strands asked first whether a span is recorded."""
    with mock.patch.object(tracer, "serialize", lambda value: ""):
        yield


@contextmanager
def without_copies() -> Iterator[None]:
    """Copy nothing; the model here changes nothing."""
    with mock.patch.object(copy, "deepcopy", lambda value, memo=None: value):
        yield


VARIANTS: dict[str, tuple[Callable[[int, int | None], Any], int | None, tuple[Any, ...]]] = {
    "Strands": (run_strands, None, ()),
    "Strands, 32 turns per invocation": (run_strands, 32, ()),
    "Strands, 16 turns per invocation": (run_strands, 16, ()),
    "Strands, 8 turns per invocation": (run_strands, 8, ()),
    "Strands, 4 turns per invocation": (run_strands, 4, ()),
    "of 16: without text for spans": (run_strands, 16, (without_spans,)),
    "of 16: without deep copies": (run_strands, 16, (without_copies,)),
    "of 16: without both": (run_strands, 16, (without_spans, without_copies)),
}
if importlib.util.find_spec("strands_env") is not None:
    VARIANTS["Environment"] = (run_environment, None, ())
    VARIANTS["Environment, without text for spans"] = (run_environment, None, (without_spans,))


def measure_turns(turns: int, rounds: int) -> None:
    """Print the CPU time per turn of every variant."""
    measured: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    for number in range(-1, rounds):
        for name in random.sample(list(VARIANTS), len(VARIANTS)):
            run, per_invocation, parts = VARIANTS[name]
            with ExitStack() as replaced:
                for part in parts:
                    replaced.enter_context(part())
                stamps = asyncio.run(run(turns if number >= 0 else 3, per_invocation))
            gc.collect()
            if number >= 0:  # the first round only warms up
                measured[name].append([1000 * (after - before) for before, after in pairwise(stamps)])
    shown = [turn for turn in SHOWN if turn <= turns]
    print(f"CPU ms per turn, strands-agents {importlib.metadata.version('strands-agents')}:\n")
    print("| turn |" + "".join(f" {turn} |" for turn in shown) + " episode |")
    print("|---|" + "---|" * (len(shown) + 1))
    for name, runs in measured.items():
        cells = []
        for turn in shown:
            near = range(max(turn - 3, 0), min(turn + 2, turns)) if turn > 2 else range(turn - 1, turn)
            cells.append(statistics.median(statistics.fmean(run[i] for i in near) for run in runs))
        totals = sorted(sum(run) for run in runs)
        print(
            f"| {name} |" + "".join(f" {cell:.2f} |" for cell in cells) + f" {statistics.median(totals):.0f} "
            f"({totals[0]:.0f} to {totals[-1]:.0f}) |"
        )


# --- a thousand at once ---


async def start_at_once(agents: int) -> tuple[float, float]:
    """Start environments at once; return the largest stall and the cost per episode, in CPU ms."""
    stalls: list[float] = []

    async def watch() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            stalls.append(now - last)
            last = now

    steps = [step_of(lambda: Idle(1, delay=1.0)) for _ in range(agents)]
    watching = asyncio.ensure_future(watch())
    await asyncio.sleep(0)
    began = time.process_time()
    await asyncio.gather(*steps)
    cpu = 1000 * (time.process_time() - began) / agents
    watching.cancel()
    return 1000 * max(stalls), cpu


def measure_starts(agents: int, rounds: int) -> None:
    """Print the largest stall of the event loop when environments start at once, with and without the collector."""
    print(f"\n{agents} environments start at once, an episode of two model calls each:\n")
    print("| | largest stall, CPU ms | CPU ms per episode |\n|---|---|---|")
    settings = {"the collector as it is": gc.get_threshold(), "`gc.set_threshold(10_000, 10, 10)`": (10_000, 10, 10)}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in settings}
    for _ in range(rounds):
        for name, thresholds in settings.items():
            gc.collect()
            gc.freeze()  # what was imported is no cost of an episode
            gc.set_threshold(*thresholds)
            measured[name].append(asyncio.run(start_at_once(agents)))
    for name, runs in measured.items():
        cells = []
        for column in range(2):
            values = sorted(run[column] for run in runs)
            cells.append(f"{statistics.median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f})")
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=160, help="tool turns of an episode")
    parser.add_argument("--rounds", type=int, default=7, help="how often each variant runs")
    parser.add_argument("--agents", type=int, default=1000, help="environments that start at once; 0 for none")
    options = parser.parse_args()
    gc.freeze()
    measure_turns(options.turns, options.rounds)
    if options.agents and "Environment" in VARIANTS:
        measure_starts(options.agents, options.rounds)


if __name__ == "__main__":
    main()
