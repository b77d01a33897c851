"""slime's `generate` on real servers: answers, aborts and partial rollouts, and the experts of every token."""

from __future__ import annotations

import asyncio
import copy
import uuid
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from transformers import AutoModelForCausalLM

from strands_sglang import get_tokenizer
from strands_sglang.testing import ScriptedExperts
from strands_sglang.tool_parsers import ToolParser, ToolParseResult
from strands_sglang.trainers.slime import make_generate
from support.slime_checker import check_rollouts
from support.slime_stub import Sample, slime_args, slime_sampling_params

EXPERTS = ScriptedExperts()  # the numbers of the tiny mixture of experts are the same


class FirstTwoAnswersCall(ToolParser):
    """Takes the first two answers for calls of `look`: a random model writes none."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = 0

    def parse(self, text: str) -> list[ToolParseResult]:
        self.answers += 1
        return [] if self.answers >= 3 else [ToolParseResult(uuid.uuid4().hex, "look", {})]


@tool
def look() -> str:
    """Look."""
    return "There is nothing to be seen."


def rollouts(server: Any, **settings: Any) -> tuple[Any, Any]:
    """A `generate` function for a server, and the state whose `aborted` stops its rollouts."""
    state = SimpleNamespace(tokenizer=get_tokenizer(str(server.model_path)), aborted=False)

    def agent_factory(model: Any, sample: Sample) -> Agent:
        return Agent(
            model=model,
            tools=[look],
            system_prompt=sample.metadata["system"],
            callback_handler=None,
            conversation_manager=NullConversationManager(),
        )

    generate = make_generate(
        agent_factory, generate_state=lambda args: state, tool_parser=FirstTwoAnswersCall(), **settings
    )
    return generate, state


def new_sample() -> Sample:
    return Sample(index=0, group_index=0, prompt="Go on.", metadata={"system": uuid.uuid4().hex})


async def abort_all(base_url: str, state: Any) -> None:
    """What slime does at the end of a rollout, once a request is running."""
    async with httpx.AsyncClient(base_url=base_url) as control:
        while not (await control.get("/v1/loads")).json()["loads"][0]["num_running_reqs"]:
            await asyncio.sleep(0.01)  # polling the server's own word, with pytest's timeout as the limit
        state.aborted = True
        await control.post("/abort_request", json={"abort_all": True})


@pytest.mark.parametrize("parts", [1, 3])
async def test_a_rollout_of_any_number_of_parts_has_the_logprobs_and_experts_of_the_model(tiny_moe_server, parts):
    generate, state = rollouts(tiny_moe_server)
    url = tiny_moe_server.base_url
    args = slime_args(
        url,
        partial_rollout=True,
        use_rollout_routing_replay=True,
        num_layers=EXPERTS.layers,
        moe_router_topk=EXPERTS.top_k,
    )
    params = slime_sampling_params(max_new_tokens=1500, ignore_eos=True)
    if parts == 1:  # turns that end early
        params |= {"ignore_eos": False, "stop_token_ids": list(range(100, 140))}
    sample = new_sample()
    for part in range(parts):
        running = asyncio.ensure_future(generate(args, sample, params))
        if part < parts - 1:
            await abort_all(url, state)
        sample = await running
        check_rollouts(sample, args, state.tokenizer)
        if sample.status.name != "ABORTED":
            break
        state.aborted = False
        sample = Sample.from_dict(copy.deepcopy(sample.to_dict()))
    facts = sample.metadata["strands_sglang"]
    if parts == 1:
        assert (sample.status.name, facts["model_calls"]) == ("COMPLETED", 3)
    else:
        assert (sample.status.name, sample.response_length) == ("TRUNCATED", params["max_new_tokens"])

    reference = AutoModelForCausalLM.from_pretrained(tiny_moe_server.model_path, dtype=torch.float32).eval()
    ids = torch.tensor(sample.tokens)
    with torch.no_grad():
        scored = reference(ids[None, :-1], output_router_logits=True)
    logprobs = torch.log_softmax(scored.logits[0].float(), dim=-1).gather(1, ids[1:, None])[:, 0]
    recorded = torch.tensor(sample.rollout_log_probs)
    mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
    assert (recorded - logprobs[-sample.response_length :])[mask].abs().max() < 1e-4
    best = torch.stack(scored.router_logits, dim=1).reshape(len(ids) - 1, EXPERTS.layers, -1).topk(EXPERTS.top_k + 1)
    # Float noise may order two experts otherwise that are this close.
    clear = best.values.diff(dim=-1).abs().min(dim=-1).values > 1e-4
    assert clear.float().mean() > 0.95
    assert (sample.rollout_routed_experts == best.indices[..., : EXPERTS.top_k])[clear].all()


async def test_an_agent_with_tools_stays_within_the_budget_of_its_response(tiny_server):
    generate, state = rollouts(tiny_server, max_tool_iters=4)
    args, params = slime_args(tiny_server.base_url), slime_sampling_params(max_new_tokens=150, ignore_eos=True)
    samples = await asyncio.gather(*(generate(args, new_sample(), params) for _ in range(4)))
    check_rollouts(list(samples), args, state.tokenizer)
    assert all(sample.response_length == 150 for sample in samples)
    assert params["max_new_tokens"] == 150
