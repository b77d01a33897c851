"""An evaluation from the command line on a real server, killed and resumed, judged by the server's own log.

`KILLED_EVALUATION=64,4,3` has 64 tasks x 4 samples killed three times (about ten minutes on two cores).
"""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from strands_sglang import Trajectory, get_tokenizer, local
from support.environments import worked_examples
from support.real_servers import logged


@pytest.mark.timeout(1800, func_only=True)
def test_an_evaluation_that_is_killed_and_resumed_has_each_sample_once(own_server, smollm_server, tmp_path):
    tasks, samples, kills = map(int, os.environ.get("KILLED_EVALUATION", "8,2,1").split(","))
    rng = random.Random(1)
    examples = worked_examples({"15 * 12": 180, "98 + 47": 145, "84 - 29": 55})
    prompts, rows = {}, []
    for number, (left, right) in enumerate(rng.sample(list(itertools.product(range(11, 99), repeat=2)), tasks)):
        sign = "+-*"[number % 3]
        answer = {"+": left + right, "-": left - right, "*": left * right}[sign]
        question = f"What is {left} {sign} {right}?"
        prompts[question] = f"task-{number}"
        row = {"id": prompts[question], "question": question, "answer": str(answer)}
        rows.append(json.dumps({**row, "conversation_history": examples}) + "\n")
    (tmp_path / "tasks.jsonl").write_text("".join(rows), encoding="utf-8")
    output = tmp_path / "out"
    results = output / "results.jsonl"
    command = [
        *(sys.executable, "-m", "strands_env.cli", "eval", "--dataset", tmp_path / "tasks.jsonl"),
        *("--backend", "sglang", "--base-url", smollm_server.base_url, "--tokenizer", smollm_server.model_path),
        *("--chat-template", local.CHATML_TOOLS_TEMPLATE, "--system-prompt", "You are a helpful assistant."),
        *("--env", "calculator", "--model", "smollm2", "--env-args", '{"max_tool_iterations": 3}'),
        *("--temperature", 1.0, "--max-new-tokens", 40, "--n-samples", samples, "--concurrency", 8),
        *("--output", output, "--keep-trajectories", "--json"),
    ]
    tokenizer = get_tokenizer(str(smollm_server.model_path))

    def whole_records():
        lines = results.read_bytes().splitlines(keepends=True) if results.exists() else []
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    for moment in [*sorted(rng.sample(range(1, tasks * samples - 8), kills)), None]:
        finished = Counter(record["prompt_id"] for record in whole_records())
        before = len(logged(smollm_server.log_path, "request.received"))
        with subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True) as process:
            while moment is not None and process.poll() is None and len(whole_records()) < moment:
                time.sleep(0.01)
            if moment is not None and process.poll() is None:
                time.sleep(rng.random() * 0.5)
                os.kill(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
        if moment is not None:
            time.sleep(1)  # the killed one's last requests reach the log
        asked = Counter()
        for entry in logged(smollm_server.log_path, "request.received")[before:]:
            if ids := entry["obj"].get("input_ids"):
                last = re.split(r"<\|im_start\|>user\n", tokenizer.decode(ids))[-1]
                # Else it is a later call of an episode.
                asked[prompts.get(last.partition("<|im_end|>")[0].strip())] += 1
        # Nothing that was finished is generated again.
        assert all(asked[prompt] <= samples - finished[prompt] for prompt in prompts.values())
    assert process.returncode == 0
    assert sum(asked[prompt] for prompt in prompts.values()) == tasks * samples - sum(finished.values())

    # Each sample is there once.
    records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert len(records) == len({record["key"] for record in records}) == tasks * samples
    assert {(record["prompt_id"], record["sample_index"]) for record in records} == {
        (prompt, index) for prompt in prompts.values() for index in range(samples)
    }
    # Every call of a record is one that the server logged, and no other record's.
    log = {entry["rid"]: entry["out"]["output_ids"] for entry in logged(smollm_server.log_path, "request.finished")}
    folder = output / "results.trajectories"
    turns = [turn for one in records for turn in Trajectory.load(folder / f"{one['key']}.safetensors").turns]
    calls = [turn.generation for turn in turns if turn.generation is not None]
    assert len({call.request_id for call in calls}) == len(calls) >= len(records)
    assert all(list(log[call.request_id]) == list(call.output_ids) for call in calls)
    # The metrics are what counting gives.
    rewards = {prompt: [one["reward"] for one in records if one["prompt_id"] == prompt] for prompt in prompts.values()}
    metrics = json.loads(out)
    for k in (k for k in (1, 2, 4, 8) if k <= samples):
        draws = [list(itertools.combinations([reward >= 1.0 for reward in row], k)) for row in rewards.values()]
        assert metrics[f"pass@{k}"] == pytest.approx(sum(sum(map(any, of)) / len(of) for of in draws) / tasks, abs=1e-9)
        if k > 1:
            every = sum(sum(map(all, of)) / len(of) for of in draws) / tasks
            assert metrics[f"pass^{k}"] == pytest.approx(every, abs=1e-9)
    assert metrics[f"avg@{samples}"] == pytest.approx(sum(one["reward"] for one in records) / len(records), abs=1e-9)
    assert any(record["reward"] == 1.0 for record in records)
