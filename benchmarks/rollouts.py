"""Rollouts on a real SGLang server on the CPU: groups of 8 that share their prompt, as GRPO samples them.

The model is SmolLM2-135M-Instruct with a calculator; worked examples fill the shared prompt. Here an `Evaluator` runs
the groups, for 0.4.3 its users' `asyncio.gather`. What was computed and what came from the cache is what the server's
log says of its prefills. CPU is the scheduler's, which runs the model. The cache is flushed before each round. Answers
are sampled, so their number of tokens differs from round to round; it is reported, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from harness import Goal

OURS = {"here": "ours"}
OTHERS = {"0.4.3": "published"}
COMPARED = ("0.4.3",)
COLUMNS = ("groups", "group of", "prompt ids")
METRICS = {
    "per minute": "Rollouts per minute",
    "computed": "Prompt tokens computed",
    "cached": "Share of prompt tokens from the cache",
    "scheduler_s": "CPU seconds of the scheduler",
    "sampled": "Tokens sampled",
}

GOALS = [
    Goal("computed", {"group of": 8}, 0.5, "0.4.3"),
    Goal("scheduler_s", {"group of": 8}, 0.7, "0.4.3"),
    Goal("cached", {"group of": 8}, 0.93, is_least=True),
]

PREFILL = re.compile(rb"Prefill batch.*?#new-token: (\d+), #cached-token: (\d+)")
IDS_PER_EXAMPLE = 67
SAMPLING = {"temperature": 1.0, "max_new_tokens": 40}


def cases(size: str) -> list[dict[str, Any]]:
    """Return the cases: `check` for the tests, `quick` or `full`."""
    model = "tiny" if size == "check" else "SmolLM2"
    groups, members, ids = {"check": (1, 2, 300), "quick": (1, 8, 1_500), "full": (3, 8, 1_500)}[size]
    return [{"groups": groups, "group of": members, "prompt ids": ids, "model": model}]


def is_left_out(case: dict[str, Any], contender: str) -> bool:
    """Every contender takes part in every case."""
    return False


def setting(case: dict[str, Any]) -> dict[str, Any]:
    """Return what workers need besides the case."""
    return {"sglang": case["model"]}


def derive(case: dict[str, Any], rounds: dict[str, list[dict[str, Any]]]) -> None:
    """Nothing follows from other contenders' rounds."""


# --- Tasks ---


def system_prompt(group: int) -> str:
    """Return the start of a group's prompt, which no other group shares."""
    return f"You are helpful assistant number {group}."


def conversation(case: dict[str, Any], group: int) -> list[dict[str, Any]]:
    """Return worked examples, because without them so small a model calls no tools, and a question.

    They are text throughout, as 0.4.3 does not render the tool calls of a history that it has not sampled.
    """
    messages: list[dict[str, Any]] = []
    for number in range(case["prompt ids"] // IDS_PER_EXAMPLE):
        expression = f"{12 + 7 * number % 80} * {11 + 13 * number % 70}"
        result = eval(expression)
        call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
        for role, text in (
            ("user", f"What is {expression}?"),
            ("assistant", f"<tool_call>\n{call}\n</tool_call>"),
            ("user", f"\n<tool_response>\n{result}\n</tool_response>"),
            ("assistant", f"The answer is {result}."),
        ):
            messages.append({"role": role, "content": [{"text": text}]})
    return [*messages, {"role": "user", "content": [{"text": f"What is {27 + group} * 43?"}]}]


def make_tool() -> Any:
    from strands import tool

    @tool
    async def calculator(expression: str) -> str:
        """Compute a product.

        Args:
            expression: Such as "2 * 3".
        """
        left, _, right = expression.partition("*")
        return str(int(left) * int(right))

    return calculator


# --- The server ---


def rounds_of(
    case: dict[str, Any], roll_out: Callable[[], Awaitable[int]]
) -> Callable[[], Awaitable[dict[str, float]]]:
    """Return the round: all groups at once; `roll_out` returns the number of tokens sampled."""
    log = Path(case["log_path"])

    async def round_() -> dict[str, float]:
        urllib.request.urlopen(urllib.request.Request(case["base_url"] + "/flush_cache", method="POST")).close()
        read, cpu, began = log.stat().st_size, scheduler_cpu(case["group"]), time.perf_counter()
        sampled = await roll_out()
        seconds, cpu = time.perf_counter() - began, scheduler_cpu(case["group"]) - cpu
        prefills = [tuple(map(int, found)) for found in PREFILL.findall(log.read_bytes()[read:])]
        computed, cached = (sum(column) for column in zip(*prefills, strict=True))
        return {
            "per minute": 60 * case["groups"] * case["group of"] / seconds,
            "computed": computed,
            "cached": cached / (cached + computed),
            "scheduler_s": cpu,
            "sampled": sampled,
        }

    return round_


def scheduler_cpu(group: int) -> float:
    """Return the CPU seconds of the scheduler in a process group."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().rpartition(") ")
            fields = rest.split()
            if int(fields[2]) == group and "sglang::sched" in name:
                total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


# --- Contenders ---


@contextlib.asynccontextmanager
async def ours(case: dict[str, Any]):
    from strands_env.core import Action, Environment, TaskContext
    from strands_env.core.models import sglang_model_factory
    from strands_env.eval import Evaluator
    from strands_sglang import SGLangClient

    class Calculator(Environment):
        def get_tools(self) -> list[Any]:
            return [make_tool()]

    def task(group: int) -> Action:
        system = {"role": "system", "content": system_prompt(group)}
        return Action(message=[system, *conversation(case, group)], task_context=TaskContext(id=group))

    async with SGLangClient(case["base_url"]) as client:
        template = Path(case["template"]).read_text()
        factory = sglang_model_factory(
            tokenizer=case["model_path"], client=client, sampling_params=SAMPLING, chat_template=template
        )

        async def roll_out() -> int:
            count = case["groups"] * case["group of"]
            evaluator = Evaluator(
                lambda action: Calculator(factory, max_tool_iterations=3),
                n_samples_per_prompt=case["group of"],
                max_concurrency=count,
                keep_tokens=True,
                show_progress=False,
            )
            results = await evaluator.run(map(task, range(case["groups"])))
            samples = [sample.step_result for group in results.values() for sample in group]
            return sum(sum(sample.observation.tokens.loss_mask) for sample in samples)

        yield rounds_of(case, roll_out)


@contextlib.asynccontextmanager
async def published(case: dict[str, Any]):
    from strands import Agent
    from strands.agent.conversation_manager import NullConversationManager
    from strands.types.exceptions import EventLoopException, MaxTokensReachedException
    from transformers import AutoTokenizer

    from strands_sglang import LoopLimiter, SGLangClient, SGLangModel

    tokenizer = AutoTokenizer.from_pretrained(case["model_path"])
    tokenizer.chat_template = Path(case["template"]).read_text()
    async with SGLangClient(case["base_url"]) as client:

        async def one(group: int) -> int:
            model = SGLangModel(client=client, tokenizer=tokenizer, sampling_params=SAMPLING)
            *examples, question = conversation(case, group)
            agent = Agent(
                model=model,
                tools=[make_tool()],
                messages=examples,
                system_prompt=system_prompt(group),
                hooks=[LoopLimiter(max_tool_iters=3)],
                callback_handler=None,
                conversation_manager=NullConversationManager(),
            )
            with contextlib.suppress(MaxTokensReachedException, EventLoopException):  # the latter from the limiter
                await agent.invoke_async(question["content"])
            return sum(model.rollout.loss_mask)

        async def roll_out() -> int:
            groups = [group for group in range(case["groups"]) for _ in range(case["group of"])]
            return sum(await asyncio.gather(*map(one, groups)))

        yield rounds_of(case, roll_out)
