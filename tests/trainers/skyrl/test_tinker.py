"""Tinker's own data hold our rows, and the gradient of SkyRL's Tinker server on them equals the one on paper."""

import itertools
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from flax.training import checkpoints
from tinker.types import AdamParams

from strands_sglang.credit import training_rows
from strands_sglang.local.server import free_port
from strands_sglang.testing import ScriptedSGLang
from strands_sglang.trainers.tinker import to_data
from support.agents import build_chatml_tokenizer
from trainers import guides, paper

TOLERANCE = 1e-5
RANK = 8
# Projections that share a matrix B on the server, with their widths in each group of columns.
FUSED = {
    "self_attn/qkv_proj": {"q_proj": 32, "k_proj": 16, "v_proj": 16},
    "self_attn/o_proj": {"o_proj": 64},
    "mlp/gate_up_proj": {"gate_proj": 1, "up_proj": 1},
    "mlp/down_proj": {"down_proj": 64},
}


@pytest.fixture(scope="module")
def by_turn(episodes):
    """Episodes whose turns have advantages of their own."""
    return [replace(episodes[0], turn_rewards={0: 0.5}), *episodes[1:]]


@pytest.mark.parametrize("loss", ["tinker", "tinker:skyrl:weights"])
@pytest.mark.parametrize("normalizer", paper.NORMALIZERS)
def test_data_hold_the_rows(by_turn, loss, normalizer):
    rows = training_rows(by_turn)
    data = to_data(rows, normalizer, loss=loss, constant=paper.CONSTANT)
    weights = rows.weights(normalizer, loss, constant=paper.CONSTANT)
    assert len(data) == len(rows) == 8
    for datum, row, weight in zip(data, rows, weights, strict=True):
        inputs = {name: column.tolist() for name, column in datum.loss_fn_inputs.items()}
        assert datum.model_input.to_ints() == row.token_ids[:-1]
        assert inputs["target_tokens"] == row.token_ids[1:]
        assert inputs["logprobs"] == pytest.approx(row.logprobs[1:], rel=1e-6)
        assert inputs["advantages"] == pytest.approx([weight * one for one in row.advantages[1:]], rel=1e-6)
        assert ("weights" in inputs) == (loss == "tinker:skyrl:weights")
        assert inputs.get("weights", row.loss_mask[1:]) == row.loss_mask[1:]


def test_bad_episodes_are_named_counted_and_left_out(episodes):
    group, reasons = paper.group_with_bad_ones(episodes)
    rows = training_rows(group, version=paper.NEWEST, **paper.LIMITS)
    assert {name: str(why) for name, why in rows.left_out.items()} == reasons and rows.counts == dict.fromkeys(
        reasons.values(), 1
    )
    data = to_data(rows)
    assert [datum.model_input.to_ints() for datum in data] == [row.token_ids[:-1] for row in rows]
    assert {row.episode for row in rows} == {"e0", "e2"}
    assert all(np.isfinite(column.to_numpy()).all() for datum in data for column in datum.loss_fn_inputs.values())
    assert to_data(training_rows([episodes[0]])) == []  # a group of one


def test_losses_of_other_trainers_are_refused(by_turn):
    with pytest.raises(ValueError, match="is not one of Tinker's"):
        to_data(training_rows(by_turn), loss="trl:grpo")


class Server:
    """SkyRL's Tinker server with a LoRA adapter that has made one step, so that no matrix is 0."""

    def __init__(self, url, model, scratch, rows):
        client = tinker.ServiceClient(base_url=url, api_key="tml-dummy")
        self.url, self.trainer = url, client.create_lora_training_client(base_model=str(model), rank=RANK, seed=0)
        self.folder, self.numbers = scratch / "checkpoints", itertools.count()
        self.step(to_data(rows, loss="tinker:skyrl:weights"), learning_rate=1e-3)  # so small that few tokens clip

    def step(self, data, **adam):
        """One optimizer step; returns the adapter's weights and the gradient, from the checkpoint.

        Without momentum, the first moment that Adam keeps is the gradient itself.
        """
        self.trainer.forward_backward(data, "ppo").result()
        self.trainer.optim_step(AdamParams(beta1=0.0, **adam)).result()
        name = f"step-{next(self.numbers)}"
        self.trainer.save_state(name).result()
        (path,) = self.folder.rglob(f"{name}*")
        kept = checkpoints.restore_checkpoint(str(path), target=None, prefix="checkpoint_")
        moments = kept["optimizer_state"]["opt_state"]["inner_state"]["0"]["mu"]
        return matrices(kept["lora_weights"]), matrices(moments)


def matrices(tree):
    """The matrices of all layers, `(layers, inputs, rank)` and `(layers, rank, outputs)`, by name."""
    layers = tree["model"]["layers"]["_stacked"]
    return {
        f"{fused}/{kind}".replace("/", "-"): torch.from_numpy(np.array(layers[block][name][kind]["value"]))
        for fused in FUSED
        for block, name in [fused.split("/")]
        for kind in ("lora_A", "lora_B")
    }


class Adapted(torch.nn.Module):
    """The reference with the server's adapter, whose matrices are its only parameters."""

    def __init__(self, reference, weights):
        super().__init__()
        self.base = [reference]  # in a list: its weights are no parameters of this module
        self.weights = torch.nn.ParameterDict({name: one.double() for name, one in weights.items()})

    def forward(self, input_ids):
        fixed = {name: one.detach() for name, one in self.base[0].named_parameters()}
        for fused, widths in FUSED.items():
            a, b = (self.weights[f"{fused}/{kind}".replace("/", "-")] for kind in ("lora_A", "lora_B"))
            columns = (32 / RANK * a @ b).unflatten(-1, (-1, sum(widths.values())))  # Tinker's alpha is 32
            for name, part in zip(widths, columns.split(list(widths.values()), -1), strict=True):
                for layer, delta in enumerate(part.flatten(2)):
                    own = f"model.layers.{layer}.{fused.split('/')[0]}.{name}.weight"
                    fixed[own] = fixed[own] + delta.T
        return torch.func.functional_call(self.base[0], fixed, kwargs={"input_ids": input_ids})


@pytest.fixture(scope="module")
def server(folder, reference, by_turn, tmp_path_factory):
    scratch, port = tmp_path_factory.mktemp("server"), free_port("127.0.0.1")
    build_chatml_tokenizer().save_pretrained(folder)
    command = [sys.executable, Path(__file__).with_name("tinker_server.py"), folder, port, scratch]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TINKER_API_KEY": "tml-dummy"}
    with (scratch / "log").open("w") as log:
        process = subprocess.Popen(
            list(map(str, command)), env=environment, start_new_session=True, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", folder, scratch, training_rows(by_turn))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def adapted(server, reference, by_turn):
    weights, _ = server.step(to_data(training_rows(by_turn), loss="tinker:skyrl:weights"), learning_rate=0.0)
    return Adapted(reference, weights)


def error_of(server, adapted, rows, expected, normalizer, loss):
    _, found = server.step(to_data(rows, normalizer, loss=loss, constant=paper.CONSTANT), learning_rate=0.0)
    return paper.relative_error({f"weights.{name}": one for name, one in found.items()}, expected)


@pytest.mark.parametrize("loss", ["tinker:skyrl:weights", "tinker:skyrl"])
@pytest.mark.parametrize("normalizer", paper.NORMALIZERS)
def test_the_server_has_the_gradient_on_paper(server, adapted, by_turn, normalizer, loss):
    rows = training_rows(by_turn)
    expected = paper.gradient(adapted, rows, normalizer)
    assert error_of(server, adapted, rows, expected, normalizer, loss) < TOLERANCE


@pytest.mark.parametrize("fault", paper.FAULTS)
def test_planted_faults_change_the_gradient(server, adapted, episodes, fault):
    expected = paper.gradient(adapted, training_rows(episodes), "token_mean")
    faulty = paper.planted(fault, training_rows)(episodes)
    assert error_of(server, adapted, faulty, expected, "token_mean", "tinker:skyrl:weights") > 100 * TOLERANCE


def test_the_guides_command_trains(server, folder):
    numbers = itertools.count()

    def answer(request):
        a, b = re.search(r"What is (\d+) \* (\d+)", request.text).groups()
        return f"It is \\boxed{{{int(a) * int(b) if next(numbers) % 2 else 1}}}."

    [words] = guides.commands("tinker")
    with ScriptedSGLang(build_chatml_tokenizer(), answer).serve() as base_url:
        urls = {"http://localhost:30000": base_url, "http://localhost:8000": server.url}
        output = guides.run(words, folder, replace=urls, more=[1], TINKER_API_KEY="tml-dummy")
    assert "step 0: 32 rows, reward 16.0, left out {}" in output
