"""Writes the files that later versions must still read: `PYTHONPATH=tests python -m support.write_fixtures FOLDER`.

Run it with the code of a release, never again afterwards: `tests/unit/trajectory/test_old_files.py` reads the
folders under `tests/fixtures`. Beside each trajectory stands, as plain JSON, what the code that wrote it read from it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from strands import Agent
from strands.types.exceptions import MaxTokensReachedException

from strands_env.cli import main as strands_env
from strands_env.eval import Evaluator
from strands_sglang import SGLangAbortedError, SGLangModel, Trajectory
from strands_sglang.messages import fingerprint
from strands_sglang.messages.content import Picture
from strands_sglang.protocol.generation import Generation
from strands_sglang.templates.images import ImageInputs
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from support.agents import call, make_agent, make_tools
from support.evaluation import StubEnvironment, step_result, tasks
from support.tokenizers import build_chatml_tokenizer

QUESTIONS = [{"id": f"s{n}", "question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)]
COMMAND = [
    *("eval", "--dataset", "sums.jsonl", "--env", "calculator", "--backend", "sglang", "--tokenizer", "tokenizer"),
    *("--n-samples", "2", "--concurrency", "1", "--keep-tokens", "--output", "out"),
]
"""The evaluation in `command/`, run in a folder with `sums.jsonl` and `tokenizer`; `--base-url` comes on top."""


RENAMED_BY_TRANSFORMERS_5 = {
    "TokenizersBackend": "PreTrainedTokenizerFast",
    "extra_special_tokens": "additional_special_tokens",
}
"""Names in a tokenizer's files that transformers 4 does not know; 5 reads the earlier ones, too."""


def solve(request: Any) -> ScriptedAnswer:
    """A policy that asks the calculator and is right about every sum but those divisible by three."""
    left, right = map(int, re.findall(r"What is (\d+) \+ (\d+)", request.text)[-1])
    if "<tool_response>" not in request.text:
        return ScriptedAnswer(call("calculator", expression=f"{left} + {right}"))
    return ScriptedAnswer(rf"\boxed{{{left + right if (left + right) % 3 else 0}}}")


def play_library(action: Any) -> Any:
    """The stub's rewards in `library/`: one failed reward among wins and losses."""
    number = int(action.task_context.id[1:])
    return step_result(None if number == 3 else float(number % 2))


async def tool_loop(tokenizer: Any) -> tuple[Trajectory, list[Any]]:
    """A tool call, a call that does not parse, a fork, a failed call, prompt logprobs."""
    answers = [call(expression="2 * 3"), "<tool_call>oops</tool_call>", "Six.", "Edited."]
    server = ScriptedSGLang(tokenizer, answers)
    model = SGLangModel(tokenizer=tokenizer, client=server.client(), return_prompt_logprobs=True)
    agent = make_agent(model, make_tools()[0])
    await agent.invoke_async("2 times 3?")
    agent.messages[0]["content"][0]["text"] = "edited"
    await agent.invoke_async("again")
    messages = [*agent.messages]
    try:
        await agent.invoke_async("the script has run out")
    except Exception as error:
        print(f"  as wanted: {type(error).__name__}")
    return model.trajectory, messages


async def aborts(tokenizer: Any) -> tuple[Trajectory, list[Any]]:
    """A resumed call, a cut one, an answer that reached its budget, routed experts and top-p ids."""
    answers: list[Any] = [
        ScriptedAnswer("One half", finish_reason="abort"),
        ScriptedAnswer(" and the other."),
        ScriptedAnswer("To be cut", finish_reason="abort"),
    ]
    server = ScriptedSGLang(tokenizer, answers)
    model = SGLangModel(tokenizer=tokenizer, client=server.client(), on_abort="resume")
    agent = make_agent(model)
    await agent.invoke_async("Go on over an abort.")
    messages = [*agent.messages]
    model.update_config(on_abort="raise")
    try:
        await agent.invoke_async("Be cut.")
    except SGLangAbortedError:
        print("  as wanted: cut")
    generation = model.trajectory.turns[0].generation
    assert generation is not None
    rows = generation.routed_rows
    object.__setattr__(generation, "routed_experts", base64.b64encode(np.arange(rows * 4, dtype="<i4")).decode())
    generation.meta_info["top_p_token_ids"] = list(range(len(generation.output_ids)))
    generation.meta_info["top_p_token_offsets"] = list(range(len(generation.output_ids) + 1))
    return model.trajectory, messages


async def helpers(tokenizer: Any) -> tuple[Trajectory, list[Any]]:
    """Two agents, an auxiliary call, a discarded answer, a truncated one, and one under a grammar."""
    server = ScriptedSGLang(tokenizer, lambda request: ScriptedAnswer(f"answer {request.index}"))
    model = SGLangModel(tokenizer=tokenizer, client=server.client())
    agent, other = make_agent(model), make_agent(model, system_prompt="Be another.")
    await agent.invoke_async("a")
    await other.invoke_async("b")
    agent.messages[-1]["content"] = [{"text": "REPLACED"}]
    await agent.invoke_async("c")
    judge = Agent(model=model.auxiliary, callback_handler=None, retry_strategy=None)
    await judge.invoke_async("Is that right?")
    messages = [*agent.messages]
    model.update_config(sampling_params={"max_new_tokens": 2})
    try:
        await other.invoke_async("Be long.")
    except MaxTokensReachedException:
        print("  as wanted: truncated")
    model.trajectory.settle(agent.messages)
    return model.trajectory, messages


async def images(tokenizer: Any) -> tuple[Trajectory, list[Any]]:
    """A turn with an image: what the server takes differs from what is trained."""
    pictures = (Picture(b"\x00first", "png", "messages[0]"),)
    inputs = ImageInputs(pictures, array("i", [5, 6]), {"pixel_values": np.arange(6, dtype="float32").reshape(2, 3)})
    messages: list[Any] = [{"role": "user", "content": [{"text": "What is that?"}]}]
    trajectory = Trajectory()
    asked = fingerprint({}, messages)
    turn = trajectory.ask(trajectory.attach(asked, messages), asked, [5, 5, 5, 6], images=inputs)
    answer: Any = {"role": "assistant", "content": [{"text": "a"}]}
    trajectory.answer(turn, Generation(array("i", [7]), array("d", [-1.0]), "stop"), answer)
    return trajectory, [*messages, answer]


def facts(trajectory: Trajectory) -> dict[str, Any]:
    """What the code at hand reads from a trajectory."""
    return {
        "statuses": [turn.status.value for turn in trajectory.turns],
        "auxiliary": [turn.is_auxiliary for turn in trajectory.turns],
        "sent_ids": [turn.sent_ids() for turn in trajectory.turns],
        "policy_versions": [list(sequence.policy_versions) for sequence in trajectory.sequences()],
        "sequences": [
            {"token_ids": s.token_ids, "loss_mask": s.loss_mask, "logprobs": s.logprobs}
            for s in trajectory.sequences(discarded=True, auxiliary=True)
        ],
        "trained": [sum(sequence.loss_mask) for sequence in trajectory.sequences()],
        "main": trajectory.latest_main_sequence().token_ids,
        "tool_parse_errors": trajectory.tool_parse_errors,
    }


async def write_trajectories(folder: Path, tokenizer: Any) -> None:
    """One file per kind of episode, and what was read from it."""
    folder.mkdir(parents=True)
    for episode in (tool_loop, aborts, helpers, images):
        print(episode.__name__)
        trajectory, messages = await episode(tokenizer)
        trajectory.save(folder / f"{episode.__name__}.safetensors")
        told = {**facts(trajectory), "messages": messages}
        (folder / f"{episode.__name__}.json").write_text(json.dumps(told), encoding="utf-8")


async def write_library_evaluation(folder: Path) -> None:
    """An evaluation by the library, with its default configuration, that was killed while a record was written."""
    folder.mkdir()
    path = folder / "results.jsonl"
    stub = StubEnvironment(play_library)
    evaluator = Evaluator(stub.factory, show_progress=False, n_samples_per_prompt=2, output_path=path)
    await evaluator.run(tasks(4))
    with path.open("ab") as file:
        file.write(b'{"key":"torn')


def write_command_evaluation(folder: Path, tokenizer: Any) -> None:
    """An evaluation by the command that has half of its tasks."""
    folder.mkdir()
    os.chdir(folder)
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS), encoding="utf-8")
    os.symlink(os.path.join("..", "tokenizer"), "tokenizer")
    server = ScriptedSGLang(tokenizer, solve)
    with server.serve() as base_url:
        assert strands_env([*COMMAND, "--base-url", base_url, "--limit", "2"]) == 0
    os.unlink("tokenizer")


def main(folder: Path) -> None:
    """Write everything to a new folder."""
    folder.mkdir(parents=True)
    tokenizer = build_chatml_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    config = folder / "tokenizer" / "tokenizer_config.json"
    text = config.read_text("utf-8")
    for new, old in RENAMED_BY_TRANSFORMERS_5.items():
        text = text.replace(new, old)
    config.write_text(text, "utf-8")
    asyncio.run(write_trajectories(folder / "trajectories", tokenizer))
    asyncio.run(write_library_evaluation(folder / "library"))
    write_command_evaluation(folder / "command", tokenizer)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
