"""Parts of an episode that cost CPU outside of requests, one at a time.

- attach: recognize a conversation of so many messages and bytes, and find the turn that it extends
- export: the token sequence of a recorded episode, with ids, mask and logprobs, for a trainer
- parse: a sampled answer of so many characters with a tool call at its end, in Hermes format
- checkpoint: put a record of 20 kB on disk, at the end of a results file with so many
- environment: an episode of four turns in an `Environment`, with its supervision and limits, on a scripted server
- import: `import strands_sglang` in its own process
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from worker import cost_of

OURS = {"here": "measured"}
OTHERS = {"0.4.3": "measured"}
COMPARED = ("0.4.3",)
COLUMNS = ("part", "size")
METRICS = {"cpu_ms": "CPU ms", "ms": "Milliseconds on the clock"}
SHARED = ("parse", "import")
"""What 0.4.3 has, too."""


def cases(size: str) -> list[dict[str, Any]]:
    """Return the cases of a size: `check` for the tests, `quick` or `full`."""
    listed = [
        *[("attach", f"{messages} messages, {kilobytes} kB") for messages, kilobytes in ((100, 200), (500, 1_000))],
        *[("export", f"{turns} turns of {tokens} tokens") for turns, tokens in ((20, 600), (200, 600))],
        *[("parse", f"{characters} characters") for characters in (600, 60_000)],
        *[("checkpoint", f"{records} records, {at_once} at once") for records in (10, 10_000) for at_once in (1, 100)],
        *[("environment", f"{episodes} at once") for episodes in (1, 200)],
        ("import", "strands_sglang"),
    ]
    first = {part: (part, of) for part, of in reversed(listed)}
    return [{"part": part, "size": of} for part, of in (first.values() if size == "check" else listed)]


def is_left_out(case: dict[str, Any], contender: str) -> bool:
    """Most parts are only here."""
    return contender == "0.4.3" and case["part"] not in SHARED


Round = Callable[[], Awaitable[dict[str, float]]]


def costing(run: Callable[[], Any], count: int, per: int = 1) -> Round:
    """Return the round that runs something so often; `per` is the number of operations in each run."""

    async def repeated() -> None:
        for _ in range(count):
            if (running := run()) is not None:
                await running

    async def round_() -> dict[str, float]:
        cost = await cost_of(repeated, count * per)
        return {"cpu_ms": cost["cpu_ms"], "ms": 1e3 * cost["seconds"] / (count * per)}

    return round_


@contextlib.asynccontextmanager
async def measured(case: dict[str, Any]):
    numbers = [int(word) for word in case["size"].split() if word.isdigit()]
    async with contextlib.AsyncExitStack() as stack:
        round_ = PARTS[case["part"]](stack, *numbers)
        await round_()
        yield round_


# --- Each part, as its round ---

CONTEXT = {"system prompt": "Be brief.", "tools": None, "chat template": "x" * 4000, "template arguments": "{}"}


def attach(stack: contextlib.AsyncExitStack, messages: int, kilobytes: int) -> Round:
    from strands_sglang import Trajectory
    from strands_sglang.messages import fingerprint
    from strands_sglang.protocol.generation import Generation

    size = 1000 * kilobytes // messages
    text = "The quick brown fox jumps over the lazy dog. " * (size // 45 + 1)
    conversation: list[Any] = [
        {"role": ("user", "assistant")[number % 2], "content": [{"text": f"{number} {text[:size]}"}]}
        for number in range(messages + 1)
    ]
    trajectory, known = Trajectory(), conversation[:-2]
    asked = fingerprint(CONTEXT, known)
    turn = trajectory.ask(trajectory.attach(asked, known), asked, [1])
    trajectory.answer(turn, Generation(array("i", [2]), array("d", [-1.0]), "stop"), conversation[-2])

    def run() -> None:
        assert trajectory.attach(fingerprint(CONTEXT, conversation), conversation).turn is turn

    return costing(run, 10)


def export(stack: contextlib.AsyncExitStack, turns: int, tokens: int) -> Round:
    from strands_sglang import Trajectory
    from strands_sglang.messages import fingerprint
    from strands_sglang.protocol.generation import Generation

    trajectory, conversation = Trajectory(), []
    half = tokens // 2
    for number in range(turns):
        conversation.append({"role": "user", "content": [{"text": f"question {number}"}]})
        asked = fingerprint(CONTEXT, conversation)
        turn = trajectory.ask(trajectory.attach(asked, conversation), asked, range(half))
        answer = {"role": "assistant", "content": [{"text": f"answer {number}"}]}
        trajectory.answer(turn, Generation(array("i", range(half)), array("d", [-0.5] * half), "stop"), answer)
        conversation.append(answer)

    def run() -> None:
        (sequence,) = trajectory.sequences()
        assert len(sequence.token_ids) == len(sequence.loss_mask) == len(sequence.logprobs) == turns * half * 2

    return costing(run, 3)


def parse(stack: contextlib.AsyncExitStack, characters: int) -> Round:
    from strands_sglang.tool_parsers import HermesToolParser

    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17 * 23"}}\n</tool_call>'
    thought = "Let me think: is 17 < 23, and what is the product? " * (characters // 50 + 1)
    text = f"<think>\n{thought}"[: characters - len(call) - 20] + "\n</think>\n\n" + call
    parser = HermesToolParser()

    def run() -> None:
        assert [found.name for found in parser.parse(text)] == ["calculator"]

    return costing(run, 100)


def checkpoint(stack: contextlib.AsyncExitStack, records: int, at_once: int) -> Round:
    from strands_env.eval.checkpoint import CheckpointFile, encode
    from strands_sglang.local.install import home

    record = encode({"key": "0" * 32, "text": "x" * 20_000})
    home().mkdir(parents=True, exist_ok=True)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=home())))  # a disk; /tmp may be memory
    (folder / "records.jsonl").write_bytes(record * records)
    file = CheckpointFile(folder / "records.jsonl")
    stack.push_async_callback(file.close)

    async def run() -> None:
        await asyncio.gather(*(file.append(lambda: record) for _ in range(at_once)))

    return costing(run, 20 if at_once == 1 else 2, per=at_once)


def environment(stack: contextlib.AsyncExitStack, episodes: int) -> Round:
    from strands_sglang.testing import ScriptedAnswer
    from support.environments import ANSWER, ASK, CALL, CalculatorEnv, scripted_env

    def answer(request: Any) -> Any:
        return ScriptedAnswer(ANSWER if request.text.count("<tool_response>") >= 3 else CALL)

    first, _ = scripted_env(answer, client={"max_connections": episodes})
    tools = first.get_tools()

    async def run() -> None:
        environments = [CalculatorEnv(first.model_factory, first.reward_fn, tools=tools) for _ in range(episodes)]
        results = await asyncio.gather(*(environment.step(ASK) for environment in environments))
        assert all(result.reward is not None for result in results)

    return costing(run, 5 if episodes == 1 else 1, per=episodes)


IMPORT = "import time; began = time.process_time(); import strands_sglang; print(time.process_time() - began)"


def importing(stack: contextlib.AsyncExitStack) -> Round:
    async def round_() -> dict[str, float]:
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
        printed = subprocess.run([sys.executable, "-c", IMPORT], env=environment, check=True, capture_output=True)
        return {"cpu_ms": 1e3 * float(printed.stdout)}

    return round_


PARTS = {
    "attach": attach,
    "export": export,
    "parse": parse,
    "checkpoint": checkpoint,
    "environment": environment,
    "import": importing,
}
