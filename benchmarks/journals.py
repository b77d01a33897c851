"""What a journal costs: CPU time of an episode, bytes of its file, and the time to fork it.

python benchmarks/journals.py [--rounds 20]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from strands import tool

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from strands_env.core import Action, Environment, has_effect
from strands_env.core.durable import checkpoint
from strands_sglang import SGLangModel
from strands_sglang.testing import ScriptedSGLang
from support.agents import build_chatml_tokenizer, call

TURNS = 30
WORDS = 180  # about 600 tokens


@has_effect("pure")
@tool
def look(what: str) -> str:
    """Look at something.

    Args:
        what: What to look at.
    """
    return "seen"


class Looking(Environment):
    """An environment with one tool and no state."""

    def get_tools(self) -> list[object]:
        """Return the tool."""
        return [look]


async def measure(rounds: int) -> None:
    """Print the figures."""
    tokenizer = build_chatml_tokenizer()
    chance = random.Random(0)
    words = [word for word in sorted(tokenizer.get_vocab()) if word.isalpha()]
    text = " ".join(chance.choice(words) for _ in range(WORDS))

    def answer(request: object) -> str:
        answered = request.text.count("<|im_start|>assistant") - 1  # type: ignore[attr-defined]
        return text if answered == TURNS - 1 else text + call("look", what="there")

    def environment(journal: str | None) -> Environment:
        scripted = ScriptedSGLang(tokenizer, answer)
        model = SGLangModel(tokenizer=tokenizer, client=scripted.client())
        return Looking(lambda: model, max_tool_iterations=None, journal=journal)

    with tempfile.TemporaryDirectory() as folder:
        seconds: dict[str | None, list[float]] = {None: [], folder: []}
        for number in range(rounds + 1):
            for journal in (None, folder) if number % 2 else (folder, None):
                taken = seconds[journal]
                gc.collect()
                began = time.process_time()
                result = await environment(journal).step(Action(message="Look."))
                taken.append(time.process_time() - began)
        pairs = zip(seconds[None][1:], seconds[folder][1:], strict=True)
        shares = sorted(with_it / without - 1 for without, with_it in pairs)
        result = await environment(folder).step(Action(message="Look."))
        turns = result.observation.trajectory.turns
        prompt, sampled = sum(len(turn.prompt_ids) for turn in turns), sum(len(turn.output_ids) for turn in turns)
        beyond = result.journal.path.stat().st_size - 4 * prompt - 12 * sampled
        per_turn = statistics.median(seconds[None][1:]) / TURNS * 1e3
        print(f"turns of {sampled / len(turns):.0f} sampled tokens; {per_turn:.2f} ms of CPU a turn without a journal")
        print(f"CPU of a journal: {statistics.median(shares):+.1%} (median of {rounds} pairs)")
        print(f"bytes a token beyond ids and logprobs: {beyond / (prompt + sampled):.2f}")
        taken = []
        for _ in range(rounds):
            began = time.perf_counter()
            checkpoint(result.journal, turns[-1].index)
            taken.append((time.perf_counter() - began) * 1e3)
        print(f"to read where a fork at depth {TURNS} continues: median {statistics.median(taken):.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="pairs of episodes")
    asyncio.run(measure(parser.parse_args().rounds))
