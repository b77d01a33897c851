"""The study of exactness in examples/grpo_cpu: its ways, its trainer, its tables."""

import importlib
import math
import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strands_sglang import local
from strands_sglang.testing import ScriptedSGLang
from support.agents import call

EXAMPLES = Path(__file__).parents[2] / "examples"
ODD_CALL = f"{call(expression='2 * 3')}".replace('"}}', '" }}')


@pytest.fixture
def study(monkeypatch):
    """Imports one of the study's modules."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(EXAMPLES / "grpo_cpu")
    return importlib.import_module


@pytest.fixture
def attempt(study, chatml_tokenizer):
    """Runs one episode in which the model writes its tool call with a space that the template would not write."""
    rollouts = study("study_rollouts")

    async def run(way):
        server = ScriptedSGLang(chatml_tokenizer, [ODD_CALL, "The answer is 6."])
        template = local.CHATML_TOOLS_TEMPLATE.read_text(encoding="utf-8")
        client = server.client()
        one = rollouts.Rollouts("http://x", chatml_tokenizer, template, rollouts.BASE, client)
        return await one.run(way, ("2 * 3",))

    return run


async def test_exact_rollouts_train_what_was_sampled(attempt):
    found = await attempt("exact")
    (row,) = found.rows
    assert (found.reward, found.has_drifted, found.has_other_answers) == (1.0, False, False)
    trained = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    assert trained == [token for one in found.calls for token in one.sampled_ids]
    assert [value for value in row.old_logprobs if not math.isnan(value)] == [
        value for one in found.calls for value in one.logprobs
    ]


async def test_rerendered_rollouts_train_what_the_template_writes(attempt):
    found = await attempt("rerendered")
    (row,) = found.rows
    assert (found.reward, found.has_drifted, found.has_other_answers) == (1.0, True, True)
    first, last = found.calls
    assert row.token_ids == last.prompt_ids + last.sampled_ids
    trained = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    assert trained[-len(last.sampled_ids) :] == last.sampled_ids
    assert trained[: -len(last.sampled_ids)] != first.sampled_ids
    never = [mask and math.isnan(value) for mask, value in zip(row.loss_mask, row.sampled_logprobs, strict=True)]
    assert 0 < sum(never) < 10  # the call around the space


def test_the_report_compares_the_ways_over_seeds(study):
    report = study("study_report")
    rewards = {"exact": (0.5, 0.6, 0.7), "openai": (0.4, 0.6, 0.5)}
    figures = {"reward": 0.5, "max_gap": 1e-5, "clipped": 0.0}
    runs = {
        (way, seed): [{**figures, "held_out": math.nan}, {**figures, "held_out": reward}]
        for way, own in rewards.items()
        for seed, reward in enumerate(own)
    }
    table = "\n".join(report.training_table(runs))
    assert "| `exact` | 3 | 0.50 ± 0.00 | 0.50 ± 0.00 | 0.60 ± 0.25 | 1e-05 | 0.0% |" in table
    assert "`openai` minus that of `exact`, by seed: -0.10 ± 0.25." in table


def test_the_packed_gradient_is_that_of_single_rows(study):
    """Sharing beginnings changes nothing: the judge is one forward pass per row."""
    rollouts, training = study("study_rollouts"), study("study_training")
    numbers = random.Random(0)
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(config)

    def row(beginning):
        tail = [numbers.randrange(64) for _ in range(numbers.randrange(3, 9))]
        mask = [0] * len(beginning) + [1, *(numbers.randrange(2) for _ in tail[1:])]
        unknown = [math.nan] * len(mask)
        return rollouts.Row(beginning + tail, mask, unknown, list(unknown), advantage=numbers.choice((1.0, -0.5)))

    everything = [numbers.randrange(64) for _ in range(7)]
    groups = [[row([*everything, number, 9]) for _ in range(3)] for number in (1, 2)]
    groups[0][0].sampled_logprobs = [-1.0] * len(groups[0][0].token_ids)
    gradients = []

    class Keep:
        def step(self):
            gradients.extend(parameter.grad.clone() for parameter in model.parameters())

        def zero_grad(self, **_):
            model.zero_grad()

    figures = training.step(model, groups, 1.3, Keep())
    total = sum(sum(one.loss_mask) for group in groups for one in group)
    loss = 0.0
    for one in (one for group in groups for one in group):
        logprobs = torch.log_softmax(model(torch.tensor([one.token_ids])).logits[0] / 1.3, dim=-1)
        for at in range(1, len(one.token_ids)):
            if one.loss_mask[at]:
                chosen = logprobs[at - 1, one.token_ids[at]]
                loss = loss - torch.exp(chosen - chosen.detach()) * one.advantage / total
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert figures.tokens == total
    for found, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)
