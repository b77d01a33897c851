"""`strands-env eval` on a real server, killed with SIGKILL and resumed, judged by the server's own log.

Run by hand for the whole thing, 64 tasks x 4 samples killed three times (about ten minutes on two cores):

    PYTHONPATH=tests python -m support.killed_evaluation --tasks 64 --samples 4 --kills 3
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strands_sglang import Trajectory, get_tokenizer, local

from .server_logs import LOG_EVERYTHING, logged

WORKED_EXAMPLES = (("15 * 12", "180"), ("98 + 47", "145"), ("84 - 29", "55"))


@dataclass
class Killed:
    """What a killed and resumed evaluation left.

    `asked_anew[i]`: of each prompt, how many samples were begun after kill i; `finished[i]`: how many were finished
    then.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    finished: list[Counter[str]] = field(default_factory=list)
    asked_anew: list[Counter[str]] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int = -1


def worked_examples() -> list[dict[str, Any]]:
    """A small model calls tools once the conversation shows it how."""
    messages: list[dict[str, Any]] = []
    for number, (expression, result) in enumerate(WORKED_EXAMPLES):
        use = {"toolUseId": f"example_{number}", "name": "calculator", "input": {"expression": expression}}
        answer = {"toolUseId": f"example_{number}", "status": "success", "content": [{"text": result}]}
        messages += [
            {"role": "user", "content": [{"text": f"What is {expression}?"}]},
            {"role": "assistant", "content": [{"toolUse": use}]},
            {"role": "user", "content": [{"toolResult": answer}]},
            {"role": "assistant", "content": [{"text": f"The answer is {result}."}]},
        ]
    return messages


def write_tasks(path: Path, count: int) -> dict[str, str]:
    """Arithmetic tasks; returns question by id."""
    rng = random.Random(1)
    questions: dict[str, str] = {}
    rows = []
    for left, right in rng.sample(list(itertools.product(range(11, 99), repeat=2)), count):
        sign = "+-*"[len(rows) % 3]
        expression = f"{left} {sign} {right}"
        value = {"+": left + right, "-": left - right, "*": left * right}[sign]
        prompt = f"task-{len(rows)}"
        questions[prompt] = f"What is {expression}?"
        rows.append(
            {
                "id": prompt,
                "question": questions[prompt],
                "answer": str(value),
                "conversation_history": worked_examples(),
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return questions


def evaluate_and_kill(
    base_url: str,
    model_path: Path,
    log_path: Path,
    folder: Path,
    *,
    tasks: int,
    samples: int,
    kills: int,
    seed: int = 1,
) -> Killed:
    """Evaluate, kill at random moments, resume until it ends by itself."""
    questions = write_tasks(folder / "tasks.jsonl", tasks)
    output = folder / "out"
    results = output / "results.jsonl"
    command = [
        *(sys.executable, "-m", "strands_env.cli", "eval", "--dataset", folder / "tasks.jsonl", "--env", "calculator"),
        *("--backend", "sglang", "--base-url", base_url, "--tokenizer", model_path, "--model", "smollm2"),
        *("--chat-template", local.CHATML_TOOLS_TEMPLATE, "--system-prompt", "You are a helpful assistant."),
        *("--temperature", 1.0, "--max-new-tokens", 40, "--env-args", '{"max_tool_iterations": 3}'),
        *("--n-samples", samples, "--concurrency", 8, "--output", output, "--keep-trajectories", "--json"),
    ]
    tokenizer = get_tokenizer(str(model_path))
    rng = random.Random(seed)
    moments = sorted(rng.sample(range(1, tasks * samples - 8), kills))
    killed = Killed()

    def received() -> list[dict[str, Any]]:
        return logged(log_path, "request.received")

    def begun(entries: list[dict[str, Any]]) -> Counter[str]:
        by_question = {question: prompt for prompt, question in questions.items()}
        begun: Counter[str] = Counter()
        for entry in entries:
            ids = entry["obj"].get("input_ids")
            if not ids:
                continue
            last = re.split(r"<\|im_start\|>user\n", tokenizer.decode(ids))[-1]
            question = last.partition("<|im_end|>")[0].strip()
            if question in by_question:  # else it is a later call of an episode
                begun[by_question[question]] += 1
        return begun

    for moment in [*moments, None]:
        killed.finished.append(Counter(record["prompt_id"] for record in whole_records(results)))
        before = len(received())
        with subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True) as process:
            while moment is not None and process.poll() is None and len(whole_records(results)) < moment:
                time.sleep(0.01)
            if moment is not None and process.poll() is None:
                time.sleep(rng.random() * 0.5)
                os.kill(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
        if moment is not None:
            time.sleep(1)  # the killed one's last requests reach the log
        else:
            killed.exit_code = process.returncode
            killed.metrics = json.loads(out)
        killed.asked_anew.append(begun(received()[before:]))
    killed.records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    killed.log = logged(log_path, "request.finished")
    for record in killed.records:
        trajectory = Trajectory.load(output / "results.trajectories" / f"{record['key']}.safetensors")
        record["calls"] = [turn.generation for turn in trajectory.turns if turn.generation is not None]
    return killed


def whole_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file that a killed process may have left torn."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def assert_nothing_lost_or_repeated(killed: Killed, *, tasks: int, samples: int) -> None:
    """Each sample is there once, and nothing finished was generated again: by the file and by the server's log."""
    assert killed.exit_code == 0
    assert len(killed.records) == tasks * samples
    assert len({record["key"] for record in killed.records}) == tasks * samples
    assert {(record["prompt_id"], record["sample_index"]) for record in killed.records} == {
        (f"task-{task}", index) for task in range(tasks) for index in range(samples)
    }
    for finished, asked in zip(killed.finished, killed.asked_anew, strict=True):
        for task in range(tasks):
            assert asked[f"task-{task}"] <= samples - finished[f"task-{task}"]
    last_finished, last_asked = killed.finished[-1], killed.asked_anew[-1]
    assert sum(last_asked.values()) == tasks * samples - sum(last_finished.values())
    # Every call of a record is one that the server logged, and no other record's.
    log = {entry["rid"]: entry["out"]["output_ids"] for entry in killed.log}
    calls = [call for record in killed.records for call in record["calls"]]
    assert len({call.request_id for call in calls}) == len(calls) >= len(killed.records)
    assert all(list(log[call.request_id]) == list(call.output_ids) for call in calls)


def independent_metrics(records: list[dict[str, Any]], samples: int) -> dict[str, float]:
    """pass@k, pass^k and the mean reward by counting, without the library."""
    rewards: dict[str, list[float]] = {}
    for record in records:
        rewards.setdefault(record["prompt_id"], []).append(record["reward"])
    metrics: dict[str, float] = {}
    for k in (k for k in (1, 2, 4, 8) if k <= samples):
        any_right = all_right = 0.0
        for row in rewards.values():
            draws = list(itertools.combinations([reward >= 1.0 for reward in row], k))
            any_right += sum(any(draw) for draw in draws) / len(draws)
            all_right += sum(all(draw) for draw in draws) / len(draws)
        metrics[f"pass@{k}"] = any_right / len(rewards)
        if k > 1:
            metrics[f"pass^{k}"] = all_right / len(rewards)
    metrics[f"avg@{samples}"] = sum(sum(row) / len(row) for row in rewards.values()) / len(rewards)
    return metrics


def assert_same_metrics(metrics: dict[str, float], expected: dict[str, float]) -> None:
    """Equal but for the last bits."""
    for name, value in expected.items():
        assert math.isclose(metrics[name], value, abs_tol=1e-9), (name, metrics[name], value)


def main() -> None:
    """The whole thing, on a server of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    python = local.ensure_sglang(print)
    model_path = local.ensure_smollm2(python, print)
    settings = local.ServerSettings(extra_arguments=LOG_EVERYTHING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with local.start_server(python, model_path, settings=settings, log_path=folder / "server.log") as server:
            began = time.monotonic()
            sizes = {"tasks": given.tasks, "samples": given.samples}
            killed = evaluate_and_kill(
                server.base_url, model_path, folder / "server.log", folder, kills=given.kills, seed=given.seed, **sizes
            )
            seconds = time.monotonic() - began
    assert_nothing_lost_or_repeated(killed, **sizes)
    expected = independent_metrics(killed.records, given.samples)
    assert_same_metrics(killed.metrics, expected)
    print(f"{len(killed.records)} records, {len(killed.log)} generations in the server's log, {seconds:.0f} s")
    print(f"finished at the kills: {[sum(one.values()) for one in killed.finished[1:]]}")
    print(f"begun in each run: {[sum(one.values()) for one in killed.asked_anew]}")
    print({name: round(value, 4) for name, value in expected.items()})


if __name__ == "__main__":
    main()
