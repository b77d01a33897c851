"""Weights pushed to a real server are the ones that it serves, through a file and through the request."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from strands_sglang import SGLangClient
from strands_sglang.trainers.trl import SGLangWeights
from support.real_servers import until_it_runs

IDS = list(range(20, 60))


def logprobs_of(model):
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([IDS])).logits[0, :-1], -1)
    return logprobs.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


async def served(base_url):
    """Logprobs that a server gives, and the version of its weights."""
    fields = {"return_logprob": True, "logprob_start_len": 0}
    async with SGLangClient(base_url) as client:
        meta = (await client.generate(IDS, {"max_new_tokens": 1}, **fields))["meta_info"]
    return torch.tensor([entry[0] for entry in meta["input_token_logprobs"][1:]]), meta["weight_version"]


async def test_weights_are_pushed_while_requests_run(tiny_server, own_server):
    model = AutoModelForCausalLM.from_pretrained(tiny_server.model_path, dtype=torch.float32)
    weights = SGLangWeights(tiny_server.base_url)

    def push(version):
        weights.pause()
        weights.push(model.state_dict().items(), version)
        weights.resume()

    params = {"max_new_tokens": 3000, "ignore_eos": True}
    async with SGLangClient(tiny_server.base_url) as client:
        for version in (1, 2, 3, 0):
            running = [asyncio.create_task(client.generate(IDS, params)) for _ in range(4)]
            await until_it_runs(tiny_server.base_url)
            await asyncio.to_thread(push, version)
            for task in running:
                assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
    weights.close()


@pytest.mark.parametrize("by_disk", [True, False])
async def test_pushed_weights_are_served(tiny_server, own_server, tmp_path, by_disk):
    model = AutoModelForCausalLM.from_pretrained(tiny_server.model_path, dtype=torch.float32)
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    paths = {"model_path": tiny_server.model_path, "folder": tmp_path / "pushed"} if by_disk else {}
    weights = SGLangWeights(tiny_server.base_url, **paths)
    before, _ = await served(tiny_server.base_url)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    try:
        weights.pause()
        weights.push(model.state_dict().items(), 7)
        weights.resume()
        found, version = await served(tiny_server.base_url)
        assert version == "7"
        assert float((found - logprobs_of(model)).abs().max()) < 1e-5
        assert float((found - before).abs().max()) > 1e-2
    finally:
        weights.push(original.items(), 0)
        weights.close()
    restored, _ = await served(tiny_server.base_url)
    assert float((restored - before).abs().max()) < 1e-5
