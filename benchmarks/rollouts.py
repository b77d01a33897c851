"""Rollouts on a real SGLang server on the CPU: groups of 8 that share their prompt, as GRPO samples them.

The model is SmolLM2-135M-Instruct. All rollouts of a round start at once, each with three turns. A bias makes the model
end every answer after 17 tokens, so both contenders' rounds are the same work; a random observation follows. What was
computed and what came from the cache is what the server's log says of its prefills. CPU is the scheduler's, which runs
the model. The cache is flushed before each round, and each round has new prompts. Two rollouts run before the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

from harness import Goal

OURS = {"here": "measured"}
OTHERS = {"0.4.3": "measured"}
COMPARED = ("0.4.3",)
COLUMNS = ("groups", "group of", "prompt ids")
METRICS = {
    "computed": "Prompt tokens computed",
    "cached": "Share of prompt tokens from the cache",
    "scheduler_s": "CPU seconds of the scheduler",
    "per minute": "Rollouts per minute",
}
GOALS = [
    Goal("computed", {"group of": 8}, 0.5, "0.4.3"),
    Goal("scheduler_s", {"group of": 8}, 0.7, "0.4.3"),
    Goal("cached", {"group of": 8}, 0.93, is_least=True),
]

TURNS = 3
SAMPLED = 16
PREFILL = re.compile(rb"Prefill batch.*?#new-token: (\d+), #cached-token: (\d+)")
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def cases(size: str) -> list[dict[str, Any]]:
    """Return the cases of a size: `check` for the tests, `quick` or `full`."""
    model = "tiny" if size == "check" else "SmolLM2"
    groups, members, ids = {"check": (1, 2, 300), "quick": (1, 8, 1_500), "full": (3, 8, 1_500)}[size]
    return [{"groups": groups, "group of": members, "prompt ids": ids, "model": model}]


def setting(case: dict[str, Any]) -> dict[str, Any]:
    """Return what workers need besides the case."""
    return {"sglang": case["model"]}


@contextlib.asynccontextmanager
async def measured(case: dict[str, Any]):
    from transformers import AutoTokenizer

    from strands_sglang import SGLangClient, SGLangModel

    tokenizer = AutoTokenizer.from_pretrained(case["model_path"])
    tokenizer.chat_template = TEMPLATE
    rng, log = random.Random(0), Path(case["log_path"])
    ending = {"logit_bias": {str(tokenizer.eos_token_id): 100.0}, "min_new_tokens": SAMPLED}
    sampling = {"temperature": 1.0, "max_new_tokens": 4 * SAMPLED, **ending}

    def prompt(ids: int) -> str:
        words = " ".join(rng.choice(("red", "green", "blue", "one", "two", "six", "dog", "cat")) for _ in range(ids))
        return tokenizer.decode(tokenizer.encode(words, add_special_tokens=False)[:ids])

    async def roll_out(client: SGLangClient, text: str, number: int) -> None:
        model = SGLangModel(tokenizer=tokenizer, client=client, sampling_params=sampling)
        messages: list[Any] = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": [{"text": text}]})
            answer = ""
            async for event in model.stream(messages):
                answer += event.get("contentBlockDelta", {}).get("delta", {}).get("text", "")
            messages.append({"role": "assistant", "content": [{"text": answer}]})
            text = f"Observation {turn} of rollout {number}: {turn * 17 + number}. Continue."

    async def round_() -> dict[str, float]:
        groups = [prompt(case["prompt ids"]) for _ in range(case["groups"])]
        urllib.request.urlopen(urllib.request.Request(case["base_url"] + "/flush_cache", method="POST")).close()
        read, cpu, began = log.stat().st_size, scheduler_cpu(case["group"]), time.perf_counter()
        members = range(case["group of"])
        await asyncio.gather(*(roll_out(client, text, number) for text in groups for number in members))
        seconds, cpu = time.perf_counter() - began, scheduler_cpu(case["group"]) - cpu
        prefills = [tuple(map(int, found)) for found in PREFILL.findall(log.read_bytes()[read:])]
        computed, cached = (sum(column) for column in zip(*prefills, strict=True))
        per_minute = 60 * len(groups) * len(members) / seconds
        share = cached / (cached + computed)
        return {"computed": computed, "cached": share, "scheduler_s": cpu, "per minute": per_minute}

    async with SGLangClient(case["base_url"]) as client:
        await asyncio.gather(*(roll_out(client, prompt(300), number) for number in range(2)))
        yield round_


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
