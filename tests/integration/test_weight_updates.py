"""On a real server: after a weight update in the middle of rollouts every token is of the weights it is said to be of.

The judge is a float32 forward pass with the weights of each version over the tokens that are recorded under it.
"""

import asyncio
import shutil

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from strands.types.exceptions import MaxTokensReachedException

from strands_sglang import SGLangClient, SGLangModel, TerminationReason, get_tokenizer, termination_reason
from support.agents import make_agent
from support.forward_pass import rescored
from support.real_servers import running_requests


def with_other_weights(model_path, directory, seed=7):
    """A copy of a model whose weights differ by a third of their size; norms stay as they are."""
    target = shutil.copytree(model_path, directory / "other-weights")
    generator = torch.Generator().manual_seed(seed)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dim() > 1:
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
                tensors[name] = (tensor.float() + noise * tensor.float().std() / 3).to(tensor.dtype).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
    return target


ROLLOUTS = 4
LENGTH = 800
TEMPERATURE = 0.8


class Trainer:
    """What a trainer does to the server, and what it knows of its own weights."""

    def __init__(self, server, other_path):
        self.base_url = server.base_url
        self.paths = {"old": server.model_path, "new": other_path}

    async def post(self, path, **body):
        async with httpx.AsyncClient(base_url=self.base_url, timeout=60, trust_env=False) as http:
            response = await http.post(path, json=body)
            response.raise_for_status()
            return response

    async def load(self, version, **options):
        await self.post(
            "/update_weights_from_disk", model_path=str(self.paths[version]), weight_version=version, **options
        )


@pytest.fixture
async def trainer(own_server, tiny_server, tmp_path):
    trainer = Trainer(tiny_server, with_other_weights(tiny_server.model_path, tmp_path))
    await trainer.load("old")
    try:
        yield trainer
    finally:
        trainer.paths["default"] = tiny_server.model_path
        await trainer.load("default", abort_all_requests=True)


def assert_each_token_is_of_its_version(sequence, paths):
    scores = {version: [None, *rescored(path, sequence, TEMPERATURE)] for version, path in paths.items()}
    tokens = zip(sequence.loss_mask, sequence.policy_versions, sequence.logprobs, range(len(sequence)), strict=True)
    sampled = [(version, logprob, i) for mask, version, logprob, i in tokens if mask]
    assert {version for version, _, _ in sampled} == {"old", "new"}
    assert max(abs(logprob - scores[version][i]) for version, logprob, i in sampled) < 1e-4
    wrong = {"old": "new", "new": "old"}
    assert max(abs(logprob - scores[wrong[version]][i]) for version, logprob, i in sampled) > 0.1


async def rollouts(server, client, **config):
    """Start rollouts with one long turn each; what they end with."""
    models = [
        SGLangModel(
            tokenizer=get_tokenizer(str(server.model_path)),
            client=client,
            sampling_params={"temperature": TEMPERATURE, "ignore_eos": True, "max_new_tokens": LENGTH},
            **config,
        )
        for _ in range(ROLLOUTS)
    ]
    agents = [make_agent(model) for model in models]  # beforehand, so that all are sampled at the same time
    asked = (agent.invoke_async(f"Question {number}") for number, agent in enumerate(agents))
    return list(zip(models, await asyncio.gather(*asked, return_exceptions=True), strict=True))


async def while_running(trainer, act):
    """Do something once all rollouts are being sampled, and for a moment have been."""
    async with httpx.AsyncClient(base_url=trainer.base_url, timeout=60, trust_env=False) as http:

        async def load():
            return (await http.get("/v1/loads")).json()["loads"][0]

        while (begun := await load())["num_running_reqs"] < ROLLOUTS:
            await asyncio.sleep(0.02)
        while (await load())["num_used_tokens"] < begun["num_used_tokens"] + 20 * ROLLOUTS:
            await asyncio.sleep(0.02)
    await act()


async def test_after_an_update_that_aborts_calls_go_on_and_every_token_has_its_version(trainer, tiny_server):
    async with SGLangClient(tiny_server.base_url) as client:
        update = while_running(trainer, lambda: trainer.load("new", abort_all_requests=True))
        ended, _ = await asyncio.gather(rollouts(tiny_server, client, on_abort="resume"), update)
    for model, error in ended:
        assert isinstance(error, MaxTokensReachedException)
        (turn,) = model.trajectory.turns
        assert len(turn.output_ids) == LENGTH
        assert turn.generation.resumed_ids
        (sequence,) = model.trajectory.sequences()
        assert_each_token_is_of_its_version(sequence, trainer.paths)


async def test_the_spans_that_the_server_tells_are_kept_where_it_holds_requests_over_an_update(trainer, tiny_server):
    async def update():
        await trainer.post("/pause_generation", mode="retract")
        await trainer.load("new")
        await trainer.post("/continue_generation")

    async with SGLangClient(tiny_server.base_url) as client:
        ended, _ = await asyncio.gather(rollouts(tiny_server, client), while_running(trainer, update))
    for model, error in ended:
        assert isinstance(error, MaxTokensReachedException)
        (sequence,) = model.trajectory.sequences()
        assert_each_token_is_of_its_version(sequence, trainer.paths)


async def test_a_pause_that_aborts_raises_unless_told_otherwise(trainer, tiny_server):
    async def pause():
        await trainer.post("/pause_generation")
        await trainer.post("/continue_generation")

    async with SGLangClient(tiny_server.base_url) as client:
        ended, _ = await asyncio.gather(rollouts(tiny_server, client), while_running(trainer, pause))
    for model, error in ended:
        assert termination_reason(error) is TerminationReason.ABORTED
        (turn,) = model.trajectory.turns
        assert 0 < len(turn.output_ids) < LENGTH
        assert sum(model.token_manager.loss_mask) == len(turn.output_ids)


async def test_a_call_that_is_asked_while_the_server_is_paused_is_answered_after_it(trainer, tiny_server):
    await trainer.post("/pause_generation", mode="abort")
    try:
        async with SGLangClient(tiny_server.base_url) as client:
            waiting = asyncio.create_task(rollouts(tiny_server, client, on_abort="resume"))
            for _ in range(50):  # the server has time to answer, and does so to others
                await running_requests(trainer.base_url)
            assert not waiting.done()
            await trainer.post("/continue_generation")
            ended = await waiting
    finally:
        await trainer.post("/continue_generation")
    assert all(len(model.trajectory.turns[0].output_ids) == LENGTH for model, _ in ended)
