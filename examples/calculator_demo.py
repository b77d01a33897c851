"""24 rollouts of a calculator agent on a real SGLang server; `make demo` runs this.

    python examples/calculator_demo.py [--svg FILE] [--out FOLDER]

Starts SGLang on this machine's CPU with SmolLM2-135M-Instruct, or uses the server at SGLANG_BASE_URL and its model.
SGLANG_TOKENIZER is a local copy of the tokenizer, for servers whose own path is not on this machine.

The trajectories go to FOLDER, and with them a page that explains every token of them.

Exit codes: 0 success; 1 failure, with the reason in the last line; 130 stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from calculator import calculator
from report import Rollout, print_finished, print_rollout, print_summary, save_svg
from strands import Agent
from strands.agent.conversation_manager import NullConversationManager
from strands.types.content import Messages

from strands_sglang import (
    SGLangClient,
    SGLangClientError,
    SGLangModel,
    TerminationReason,
    ToolLimiter,
    get_tokenizer,
    local,
    termination_reason,
)
from strands_sglang.cli import main as strands_sglang

SYSTEM_PROMPT = "You are a helpful assistant."

# A system prompt does not make a small model call tools. Worked examples in the conversation do.
WORKED_EXAMPLES = (("15 * 12", "180"), ("98 + 47", "145"), ("84 - 29", "55"))

QUESTIONS = ("27 * 43", "27 + 43", "27 - 43", "64 * 18", "64 + 18", "64 - 18")
EXPRESSIONS = QUESTIONS * 4  # samples of one question, which the page shows side by side

OUTPUT = Path(__file__).parents[1] / "out" / "calculator_demo"

SAMPLING = {"temperature": 1.0, "max_new_tokens": 40}


class DemoError(RuntimeError):
    """The demo cannot run, for a reason outside the library."""


def main() -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser(description="24 rollouts of a calculator agent against a real SGLang server.")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the tokens of one rollout as a picture")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", default=OUTPUT, help="where the files go (default: out/calculator_demo)"
    )
    options = parser.parse_args()
    # transformers advises to install PyTorch, which a tokenizer does not need.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Strands logs every unknown tool and cut-off call, which the table at the end counts.
    logging.getLogger("strands").setLevel(logging.CRITICAL)
    # SIGTERM acts like Ctrl-C instead of ending this process silently. A shell starts background commands with SIGINT
    # ignored.
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    try:
        with server() as (base_url, tokenizer_path):
            start_seconds = time.monotonic() - started
            began = time.monotonic()
            rollouts = asyncio.run(roll_out_all(base_url, tokenizer_path))
            rollout_seconds = time.monotonic() - began
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (local.LocalServerError, SGLangClientError, DemoError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    if not any(sum(rollout.model.token_manager.loss_mask) for rollout in rollouts):
        ends = ", ".join(sorted({rollout.reason.value for rollout in rollouts}))
        print(f"the demo failed: the model sampled nothing in {len(rollouts)} rollouts ({ends})", file=sys.stderr)
        return 1
    rollouts.sort(key=lambda rollout: not rollout.is_right)
    for number, rollout in enumerate(rollouts, 1):
        print_finished(rollout, number, len(rollouts))
    shown = rollouts[0]
    files = save(rollouts, options.out / "trajectories")
    print_rollout(shown, files[0])
    if options.svg:
        save_svg(shown, files[0], options.svg)
    print_summary(rollouts, rollout_seconds)
    total = time.monotonic() - started
    print(f"server {start_seconds:.1f} s, rollouts {rollout_seconds:.1f} s, in all {total:.1f} s")
    print("open this page to see every token of them:", flush=True)
    trajectories, page = str(options.out / "trajectories"), str(options.out / "view.html")
    return strands_sglang(["view", trajectories, "--tokenizer", tokenizer_path, "--output", page])


def save(rollouts: list[Rollout], folder: Path) -> list[Path]:
    """Write the trajectory of each rollout to a file, with its end and a reward of 1 for a right answer."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = [folder / f"{number:02}.safetensors" for number in range(1, len(rollouts) + 1)]
    for rollout, file in zip(rollouts, files, strict=True):
        trajectory = rollout.model.trajectory
        trajectory.note_end(outcome=rollout.reason, reward=float(rollout.is_right))
        trajectory.save(file)
    return files


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Treat a signal like Ctrl-C."""
    raise KeyboardInterrupt


@contextmanager
def server() -> Iterator[tuple[str, str]]:
    """Yield the address of an SGLang server and its tokenizer's path; stop the server afterwards if it was started."""
    if base_url := os.environ.get("SGLANG_BASE_URL"):
        print(f"using the SGLang server at {base_url}", flush=True)
        yield base_url, asyncio.run(find_tokenizer(base_url))
        return
    python = local.ensure_sglang()
    model_path = local.ensure_smollm2(python)
    with local.launch_server(python, model_path) as running:
        print(f"starting SGLang with {model_path.name} (about half a minute; log: {running.log_path})", flush=True)
        get_tokenizer(str(model_path))  # takes seconds the first time, while the server starts
        running.wait_until_healthy()
        print(f"SGLang is healthy after {running.start_seconds:.0f} s at {running.base_url}", flush=True)
        yield running.base_url, str(model_path)


async def find_tokenizer(base_url: str) -> str:
    """Return the path or hub name from which the tokenizer of a server's model loads on this machine."""
    path = os.environ.get("SGLANG_TOKENIZER")
    if path is None:
        async with SGLangClient(base_url, max_retries=3) as client:
            info = await client.model_info()
        path = str(info.get("tokenizer_path") or info.get("model_path"))
    try:
        get_tokenizer(path)
    except Exception as error:
        raise DemoError(
            f"the tokenizer {path} cannot be loaded here ({type(error).__name__}): set SGLANG_TOKENIZER to a folder or "
            "a hub name of the server's tokenizer"
        ) from error
    return path


async def roll_out_all(base_url: str, tokenizer_path: str) -> list[Rollout]:
    """Roll out all questions, the first one alone: its prompt is then in the prefix cache for the others."""
    tokenizer = get_tokenizer(tokenizer_path)
    chat_template = template_for(tokenizer)

    async def one(expression: str) -> Rollout:
        model = SGLangModel(tokenizer=tokenizer, client=client, sampling_params=SAMPLING, chat_template=chat_template)
        return await roll_out(model, expression)

    print(f"{len(EXPRESSIONS)} rollouts ...", flush=True)
    async with SGLangClient(base_url, max_retries=5) as client:
        first = await one(EXPRESSIONS[0])
        return [first, *await asyncio.gather(*(one(expression) for expression in EXPRESSIONS[1:]))]


async def roll_out(model: SGLangModel, expression: str) -> Rollout:
    """Let an agent answer one question, and return the whole episode with all its tokens."""
    limiter = ToolLimiter(max_tool_iters=3)
    agent = Agent(
        model=model,
        tools=[calculator],
        messages=worked_examples(),
        system_prompt=SYSTEM_PROMPT,
        hooks=[limiter],
        # A history to train on is never shortened, and nothing is printed while it grows.
        conversation_manager=NullConversationManager(),
        callback_handler=None,
    )
    try:
        end: Any = await agent.invoke_async(f"What is {expression}?")
    except Exception as error:
        # A model that reaches a limit ends its episode; a failed server ends the demo.
        end = error
    reason = termination_reason(end, trajectory=model.trajectory, limiter=limiter)
    if reason in (TerminationReason.INFRASTRUCTURE_ERROR, TerminationReason.AGENT_ERROR):
        raise DemoError(f"a rollout ended with {reason.value}: {end}")
    return Rollout(expression, model, agent.messages[len(worked_examples()) :], reason)


def worked_examples() -> Messages:
    """Return a conversation in which the assistant used the calculator three times."""
    messages: Messages = []
    for number, (expression, result) in enumerate(WORKED_EXAMPLES):
        call_id = f"example_{number}"
        messages += copy.deepcopy(
            [
                {"role": "user", "content": [{"text": f"What is {expression}?"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"toolUse": {"toolUseId": call_id, "name": "calculator", "input": {"expression": expression}}}
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"toolResult": {"toolUseId": call_id, "status": "success", "content": [{"text": result}]}}
                    ],
                },
                {"role": "assistant", "content": [{"text": f"The answer is {result}."}]},
            ]
        )
    return messages


def template_for(tokenizer: Any) -> str | None:
    """Return None if the tokenizer's own chat template supports tools, else a template that does."""
    own = tokenizer.chat_template
    if isinstance(own, dict) or (own and "tools" in own):
        return None
    if "<|im_start|>" not in tokenizer.get_vocab():
        raise DemoError("the model's chat template does not support tools, and the model does not use ChatML")
    return local.CHATML_TOOLS_TEMPLATE.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
