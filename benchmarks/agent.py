"""A whole agent: Strands with a tool, a model call per turn, against the instant server.

Every answer has 150 tokens and calls the tool, which ends the episode after the case's number of turns. Agents that run
at once start together. `strands` is the same agent with a model that does no work: what it costs is Strands' own, and a
provider's own cost is what comes on top in the same round. `late / early` compares the own cost of the last five turns
with turns three to seven, both without the one linear pass over the history that recognizes a conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import Goal
from worker import cost_of

OURS = {"here": "ours", "strands": "strands_alone"}
OTHERS = {"0.4.3": "published"}
COMPARED = ("0.4.3",)
COLUMNS = ("turns", "at once")
METRICS = {
    "own_ms": "Own CPU ms per model call, without Strands'",
    "cpu_ms": "CPU ms per model call",
    "stall_cpu_ms": "Largest stall of the loop, CPU ms",
    "stall_ms": "Largest stall of the loop, ms",
    "late / early": "Own CPU of the last five turns in turns three to seven",
}

ANSWER_TOKENS = 150
ALONE = 4
"""Episodes of a round one after the other, where one runs at once."""
EARLY, LATE = slice(2, 7), slice(-5, None)

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17 * 23"}}\n</tool_call>'
RESULT = "The result of the calculation is 391. The answer was computed by the calculator and is exact. "
QUESTION = "What is 17 times 23? Please use the calculator tool and tell me the result. "
SYSTEM_PROMPT = "You are a helpful assistant. Answer the question of the user in one short sentence. " * 4


GOALS = [
    Goal("own_ms", {"turns": 5, "at once": 64}, 0.7, "0.4.3"),
    Goal("own_ms", {"turns": 40, "at once": 20}, 0.7, "0.4.3"),
    Goal("late / early", {"turns": 80, "at once": 1}, 1.3),
]


def cases(size: str) -> list[dict[str, Any]]:
    """Return the cases of a size: `check` for the tests, `quick` or `full`."""
    listed = {
        "check": [(8, 1), (2, 4)],
        "quick": [(5, 1), (5, 64), (40, 20), (80, 1)],
        "full": [(5, 1), (5, 64), (5, 512), (20, 1), (20, 64), (20, 512), (40, 20), (80, 1), (80, 64), (80, 512)],
    }[size]
    return [{"turns": turns, "at once": at_once} for turns, at_once in listed]


@functools.cache
def tokenizer_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with the tokenizer of the tests, which ends with this process."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from support.agents import build_chatml_tokenizer

    folder = tempfile.TemporaryDirectory(prefix="strands-sglang-bench-")
    build_chatml_tokenizer().save_pretrained(folder.name)
    return folder


def setting(case: dict[str, Any]) -> dict[str, Any]:
    """Return what workers need besides the case."""
    from transformers import AutoTokenizer

    folder = tokenizer_folder().name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ending = tokenizer.encode("\n" + CALL + "<|im_end|>", add_special_tokens=False)
    thought = tokenizer.encode("Let me think about this step by step before I answer. " * 100, add_special_tokens=False)
    ids = thought[: case.get("answer tokens", ANSWER_TOKENS) - len(ending)] + ending
    text = tokenizer.decode(ids[:-1])
    return {"server": {"text": text, "output_ids": ids}, "tokenizer": folder, "text": text}


def derive(case: dict[str, Any], rounds: dict[str, list[dict[str, Any]]]) -> None:
    """Add what providers cost beyond Strands in the same round."""
    for name, measured in rounds.items():
        for one, strands in zip(measured, rounds["strands"], strict=False):
            if name != "strands":
                one["own_ms"] = one["cpu_ms"] - strands["cpu_ms"]
            if name != "strands" and case["turns"] >= EARLY.stop and case["at once"] == 1:
                early, late = (one[when] - strands[when] - one.get(f"{when} pass", 0) for when in ("early", "late"))
                one["late / early"] = late / early


# --- Episodes ---


class Episodes:
    """Agents with a tool that ends the episode after a number of turns, and the time of each of its calls."""

    def __init__(self, turns: int, make_model: Callable[[], Any]) -> None:
        """Prepare the tool.

        Args:
            turns: Number of turns of an episode.
            make_model: Returns the model of an agent.
        """
        from strands import tool

        self.turns, self.make_model = turns, make_model
        self.clock: list[float] = []

        @tool(context=True)
        async def calculator(expression: str, tool_context: Any) -> str:
            """Compute a product.

            Args:
                expression: Such as "2 * 3".
            """
            state = tool_context.invocation_state
            state["turn"] = state.get("turn", 0) + 1
            self.clock.append(time.process_time())
            if state["turn"] == turns:
                tool_context.agent.cancel(after_current_tools=True)
            return RESULT

        self.tool = calculator

    def agent(self) -> Any:
        """Return an agent that prints nothing and never shortens its history."""
        from strands import Agent
        from strands.agent.conversation_manager import NullConversationManager

        return Agent(
            model=self.make_model(),
            tools=[self.tool],
            system_prompt=SYSTEM_PROMPT,
            callback_handler=None,
            conversation_manager=NullConversationManager(),
            retry_strategy=None,
        )

    async def round(self, at_once: int) -> dict[str, float]:
        """Run that many episodes at once, or some one after the other."""
        agents = [self.agent() for _ in range(ALONE if at_once == 1 else at_once)]

        async def run() -> None:
            if at_once > 1:
                await asyncio.gather(*(agent.invoke_async(QUESTION) for agent in agents))
            else:
                for agent in agents:
                    await agent.invoke_async(QUESTION)

        self.clock.clear()
        measured = await cost_of(run, self.turns * len(agents))
        if len(self.clock) != self.turns * len(agents):
            raise RuntimeError(f"{len(self.clock)} of {self.turns * len(agents)} turns called the tool")
        if at_once == 1 and self.turns >= EARLY.stop:
            times = [self.clock[start : start + self.turns] for start in range(0, len(self.clock), self.turns)]
            costs = [[after - before for before, after in pairwise([0.0, *one])] for one in times]
            for name, part in (("early", EARLY), ("late", LATE)):
                measured[name] = 1e3 * statistics.median(statistics.mean(one[part]) for one in costs)
                measured[f"{name} pass"] = 1e3 * linear_pass(agents[0], part.indices(self.turns)[1])
        return measured


def linear_pass(agent: Any, turn: int) -> float:
    """Return the CPU seconds of our fingerprint of a history at a turn; 0 for other models."""
    if not hasattr(agent.model, "trajectory"):
        return 0.0
    from strands_sglang.messages import fingerprint

    history = agent.messages[: 2 * turn - 1]
    specs = agent.tool_registry.get_all_tool_specs()
    parts = {"system prompt": SYSTEM_PROMPT, "tools": specs}
    earlier = fingerprint(parts, history[:-2])  # of the turn before, as a trajectory has it
    costs = []
    for _ in range(5):
        began = time.process_time()
        fingerprint(parts, history, earlier)
        costs.append(time.process_time() - began)
    return min(costs)


# --- Models ---


@contextlib.asynccontextmanager
async def our_models(case: dict[str, Any]):
    """Yield what makes an agent's model; so do the functions below."""
    from transformers import AutoTokenizer

    from strands_sglang import SGLangClient, SGLangModel

    tokenizer = AutoTokenizer.from_pretrained(case["tokenizer"])
    async with SGLangClient(case["base_url"]) as client:
        yield lambda: SGLangModel(client=client, tokenizer=tokenizer)


@contextlib.asynccontextmanager
async def published_models(case: dict[str, Any]):
    from transformers import AutoTokenizer

    from strands_sglang import SGLangClient, SGLangModel

    tokenizer = AutoTokenizer.from_pretrained(case["tokenizer"])
    params = {"max_new_tokens": 4096}
    async with SGLangClient(case["base_url"]) as client:
        yield lambda: SGLangModel(client=client, tokenizer=tokenizer, sampling_params=params)


@contextlib.asynccontextmanager
async def trivial_models(case: dict[str, Any]):
    from strands.models import Model
    from transformers import AutoTokenizer

    import strands_sglang  # noqa: F401 - as large a heap to collect garbage from as the others have

    AutoTokenizer.from_pretrained(case["tokenizer"])
    text = case["text"].partition("<tool_call>")[0]
    arguments = json.dumps({"expression": "17 * 23"})
    usage = {"inputTokens": 1, "outputTokens": 1, "totalTokens": 2}

    class Trivial(Model):
        calls = 0

        async def stream(self, messages: Any, tool_specs: Any = None, system_prompt: Any = None, **kwargs: Any) -> Any:
            self.calls += 1
            yield {"messageStart": {"role": "assistant"}}
            yield {"contentBlockStart": {"start": {}}}
            yield {"contentBlockDelta": {"delta": {"text": text}}}
            yield {"contentBlockStop": {}}
            yield {"contentBlockStart": {"start": {"toolUse": {"toolUseId": f"t{self.calls}", "name": "calculator"}}}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": arguments}}}}
            yield {"contentBlockStop": {}}
            yield {"messageStop": {"stopReason": "tool_use"}}
            yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}

        def update_config(self, **config: Any) -> None:
            """Has none."""

        def get_config(self) -> Any:
            return {}

        async def structured_output(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError
            yield

    yield Trivial


def contender(models: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the contender whose agents have such models."""

    @contextlib.asynccontextmanager
    async def opened(case: dict[str, Any]):
        async with models(case) as make_model:
            await Episodes(2, make_model).round(case["at once"])  # opens connections and fills caches
            episodes = Episodes(case["turns"], make_model)
            yield lambda: episodes.round(case["at once"])

    return opened


ours, published, strands_alone = map(contender, (our_models, published_models, trivial_models))
