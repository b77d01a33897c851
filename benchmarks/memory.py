"""Memory of episodes: what a provider holds for each token, while the episode is live and once it is stored.

Live are agent and model after their last turn, with everything that the next turn would need. Stored is what remains
of them for training: the recorded turns alone, without the messages. `strands` holds the same messages with a model
that records nothing; what is allocated beyond that is the provider's. Counted are allocations, by `tracemalloc`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

from agent import QUESTION, Episodes, our_models, published_models, setting as setting, trivial_models
from harness import Goal

OURS = {"here": "ours", "strands": "strands_alone"}
OTHERS = {"0.4.3": "published"}
COMPARED = ("0.4.3",)
COLUMNS = ("turns", "answer tokens")
METRICS = {
    "live": "Bytes per token of a live episode, without Strands'",
    "stored": "Bytes per token of a stored episode",
    "live kB": "kB of a live episode",
}


GOALS = [
    Goal("live", {"turns": 30}, 28),
    Goal("stored", {"turns": 30}, 16),
]


def cases(size: str) -> list[dict[str, Any]]:
    """Return the cases of a size: `check` for the tests, `quick` or `full`."""
    listed = {"check": [(3, 150)], "quick": [(30, 600)], "full": [(5, 150), (40, 150), (30, 600)]}[size]
    return [{"turns": turns, "answer tokens": tokens} for turns, tokens in listed]


def derive(case: dict[str, Any], rounds: dict[str, list[dict[str, Any]]]) -> None:
    """Add what providers hold beyond Strands in the same round."""
    for name, measured in rounds.items():
        for one, strands in zip(measured, rounds["strands"], strict=False):
            if name != "strands":
                one["live"] = 1024 * (one["live kB"] - strands["live kB"]) / one["tokens"]


def contender(models: Callable[[dict[str, Any]], Any], recorded: Callable[[Any], tuple[Any, int]]) -> Any:
    """Return the contender whose agents have such models; `recorded` is what to store of one, and its tokens."""

    @contextlib.asynccontextmanager
    async def opened(case: dict[str, Any]):
        async with models(case) as make_model:
            episodes = Episodes(case["turns"], make_model)

            async def round_(count: int = 4) -> dict[str, float]:
                gc.collect()
                tracemalloc.start()
                agents = [episodes.agent() for _ in range(count)]
                await asyncio.gather(*(agent.invoke_async(QUESTION) for agent in agents))
                gc.collect()
                measured = {"live kB": tracemalloc.get_traced_memory()[0] / count / 1024}
                messages = [agent.messages for agent in agents]  # they are the agents', whatever else refers to them
                stored = [recorded(agent) for agent in agents]
                if tokens := sum(count for _, count in stored):
                    del agents
                    gc.collect()
                    held = tracemalloc.get_traced_memory()[0]
                    del stored
                    gc.collect()
                    held -= tracemalloc.get_traced_memory()[0]
                    measured |= {"tokens": tokens / count, "stored": held / tokens}
                del messages
                tracemalloc.stop()
                return measured

            await round_()  # opens connections and fills the caches that all episodes share
            yield round_

    return opened


def settled(agent: Any) -> tuple[Any, int]:
    """Return our trajectory of an episode that has ended."""
    trajectory, tokens = agent.model.trajectory, len(agent.model.token_manager)
    trajectory.settle(agent.messages)
    return trajectory, tokens


ours = contender(our_models, settled)
published = contender(published_models, lambda agent: (agent.model.rollout, len(agent.model.rollout)))
strands_alone = contender(trivial_models, lambda agent: (None, 0))
