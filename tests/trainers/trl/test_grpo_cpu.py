"""The demo of GRPO on two cores, and its study, on real servers."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from strands_sglang import SGLangClient, get_tokenizer, local
from strands_sglang.credit import TrainingRows, policy_loss
from strands_sglang.trainers.trl import SGLangWeights

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "grpo_cpu"))
import study_rollouts
import training

ROOT = Path(__file__).parents[3]
STEPS, SAMPLES = 4, 4
PATIENCE_S = 600


class Demo:
    """The demo as its users run it, in a folder that is kept between runs."""

    def __init__(self, folder):
        self.folder = folder
        python = os.environ["PROJECT_PYTHON"]
        self.command = [python, ROOT / "examples" / "grpo_cpu", "--fast", "--steps", str(STEPS), "--output", folder]

    def ledger(self):
        path = self.folder / "ledger.json"
        return json.loads(path.read_text()) if path.exists() else []

    def run(self, *, kill=None, after=STEPS):
        """Run it; kill the group of a process as soon as so many steps count. Return the exit code and the output."""
        with subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                deadline = time.monotonic() + PATIENCE_S
                while kill and len(self.ledger()) < after:
                    assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
                    time.sleep(0.005)
                if kill:
                    pids = json.loads((self.folder / "processes.json").read_text())
                    os.killpg(pids[kill], signal.SIGKILL)
                output, _ = process.communicate(timeout=PATIENCE_S)
                return process.returncode, output
            finally:
                process.terminate()


@pytest.mark.timeout(1200)
def test_a_killed_run_continues_and_trains_nothing_twice(tmp_path):
    demo = Demo(tmp_path / "run")
    code, output = demo.run(kill="trainer", after=1)  # the rollouts run in this process, too
    assert code == 1 and "the trainer ended with exit code" in output and "the same command continues" in output
    first = demo.ledger()
    assert 1 <= len(first) < STEPS - 1
    code, output = demo.run(kill="server", after=len(first) + 1)
    assert code == 1 and "the server ended with exit code" in output
    second = demo.ledger()
    assert second[: len(first)] == first and len(second) < STEPS
    code, output = demo.run()
    assert code == 0, output
    ledger = demo.ledger()
    assert ledger[: len(second)] == second
    assert [(step["step"], step["version"]) for step in ledger] == [(number, number) for number in range(1, STEPS + 1)]
    names = {f"task-{task} #{sample}" for step in ledger for task in step["tasks"] for sample in range(SAMPLES)}
    assert {name for step in ledger for name in step["episodes"]} <= names
    for name in ("episodes", "tasks"):
        seen = [one for step in ledger for one in step[name]]
        assert len(set(seen)) == len(seen)

    for step in ledger:
        folder = demo.folder / "steps" / f"step-{step['step']:06}"
        rows = TrainingRows.load(folder / "rows.safetensors")
        assert sorted({row.episode for row in rows}) == step["episodes"]
        assert {path.stem for path in (folder / "trajectories").iterdir()} >= set(step["episodes"])
        assert all(row.trainer_logprobs and row.loss_weight == 1.0 for row in rows)
        assert policy_loss(rows) == pytest.approx(rows.loss.value, abs=1e-6)
        metrics = step["metrics"]
        assert metrics["gap_max"] is None or metrics["gap_max"] < 1e-4  # None without a token of the newest weights
        assert metrics["push_difference_mean"] < 1e-5 and metrics["push_difference"] < 1e-4  # of equal weights
    assert len(list((demo.folder / "steps").iterdir())) == STEPS

    optimizer = torch.load(demo.folder / "checkpoints" / f"checkpoint-{STEPS}" / "optimizer.pt")
    assert {int(state["step"]) for state in optimizer["state"].values()} == {STEPS}
    assert (demo.folder / "metrics.csv").read_text().count("\n") == STEPS + 1
    assert (demo.folder / "reward.svg").read_text().startswith("<svg")


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory):
    """A real server with a tiny random Qwen3, and the folder of its model."""
    python = local.ensure_sglang()
    model_path = local.ensure_tiny_qwen3(python)
    with local.start_server(python, model_path, log_path=tmp_path_factory.mktemp("server") / "log") as server:
        yield server.base_url, model_path


@pytest.mark.timeout(600)
async def test_the_studys_usual_way_has_what_was_sampled(tiny_server):
    """Strands' OpenAI provider on `/v1`, with the server's account of what it really read and sampled."""
    base_url, model_path = tiny_server
    tokenizer = get_tokenizer(str(model_path))
    setting = replace(study_rollouts.BASE, max_new_tokens=16)
    async with SGLangClient(base_url) as client:
        rollouts = study_rollouts.Rollouts(base_url, tokenizer, tokenizer.chat_template, setting, client)
        found = await rollouts.run("openai", ("2 * 3",))
        call, (row,) = found.calls[0], found.rows
        prompt, sampled = call.prompt_ids, call.sampled_ids
        scored = await client.generate(
            [*prompt, *sampled], sampling_params={"max_new_tokens": 1}, return_logprob=True, logprob_start_len=0
        )
    known = [entry[0] for entry in scored["meta_info"]["input_token_logprobs"]][len(prompt) :]
    assert 1 <= len(sampled) <= 16 and call.logprobs == pytest.approx(known, abs=1e-4)
    for ids in (prompt, row.token_ids):
        assert tokenizer.decode(ids).count("What is 2 * 3?") == 1
    measured = [value for value in row.sampled_logprobs if not math.isnan(value)]
    assert set(measured) <= {value for one in found.calls for value in one.logprobs}
    assert len(measured) <= sum(row.loss_mask) and len(row.loss_mask) == len(row.token_ids)


@pytest.mark.timeout(600)
def test_a_tensor_that_a_push_leaves_out_is_noticed(tiny_server, tmp_path, monkeypatch):
    base_url, model_path = tiny_server
    weights = dict(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).named_parameters())
    left_out = ""
    push = SGLangWeights.push

    def push_most(self, named_tensors, version):
        push(self, [(name, tensor) for name, tensor in named_tensors if name != left_out], version)

    monkeypatch.setattr(SGLangWeights, "push", push_most)
    for way in ({}, {"model_path": model_path, "folder": tmp_path / "pushed"}):
        probed = training.ProbedWeights(base_url, **way)
        for left_out in ("", "model.layers.1.self_attn.v_proj.weight", "model.norm.weight", ""):
            with torch.no_grad():
                for tensor in weights.values():
                    tensor.mul_(1.001)
            if not left_out:
                probed.push(weights.items(), 1)
                continue
            with pytest.raises(RuntimeError, match="but 1 of the server's .* tensors are others"):
                probed.push(weights.items(), 1)
        probed.close()
