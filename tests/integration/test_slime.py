"""slime's `generate` on real servers: answers, aborts and partial rollouts, and the experts of every token."""

import asyncio
import copy
import uuid
from types import SimpleNamespace

import pytest
from strands import tool

from strands_sglang import get_tokenizer
from strands_sglang.testing import ScriptedExperts
from strands_sglang.tool_parsers import ToolParser, ToolParseResult
from strands_sglang.trainers.slime import make_generate
from support.agents import make_agent
from support.forward_pass import assert_best_experts, load_reference, replayed
from support.real_servers import abort_all, until_it_runs
from support.slime import Sample, check_rollouts, slime_args, slime_sampling_params


class FirstTwoAnswersCall(ToolParser):
    """Takes the first two answers for calls of `look`: a random model writes none."""

    def __init__(self):
        super().__init__()
        self.answers = 0

    def parse(self, text):
        self.answers += 1
        return [] if self.answers >= 3 else [ToolParseResult(uuid.uuid4().hex, "look", {})]


@tool
def look() -> str:
    """Look."""
    return "There is nothing to be seen."


def rollouts(server, **settings):
    """A `generate` function for a server, and the state whose `aborted` stops its rollouts."""
    state = SimpleNamespace(tokenizer=get_tokenizer(str(server.model_path)), aborted=False)

    def agent_factory(model, sample):
        return make_agent(model, [look], system_prompt=sample.metadata["system"])

    generate = make_generate(
        agent_factory, generate_state=lambda args: state, tool_parser=FirstTwoAnswersCall(), **settings
    )
    return generate, state


def new_sample():
    return Sample(index=0, group_index=0, prompt="Go on.", metadata={"system": uuid.uuid4().hex})


async def end_rollout(base_url, state):
    """What slime does at the end of a rollout, once a request is running."""
    await until_it_runs(base_url)
    state.aborted = True
    await abort_all(base_url)


@pytest.mark.parametrize("parts", [1, 3])
async def test_a_rollout_of_any_number_of_parts_has_the_logprobs_and_experts_of_the_model(tiny_moe_server, parts):
    experts = ScriptedExperts()  # the numbers of the tiny mixture of experts are the same
    generate, state = rollouts(tiny_moe_server)
    url = tiny_moe_server.base_url
    args = slime_args(
        url,
        partial_rollout=True,
        use_rollout_routing_replay=True,
        num_layers=experts.layers,
        moe_router_topk=experts.top_k,
    )
    params = slime_sampling_params(max_new_tokens=1500, ignore_eos=True)
    if parts == 1:  # turns that end early
        params |= {"ignore_eos": False, "stop_token_ids": list(range(100, 140))}
    sample = new_sample()
    for part in range(parts):
        running = asyncio.ensure_future(generate(args, sample, params))
        if part < parts - 1:
            await end_rollout(url, state)
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

    routed = sample.rollout_routed_experts
    logprobs, router_logits = replayed(load_reference(tiny_moe_server.model_path), sample.tokens, routed)
    recorded = zip(sample.rollout_log_probs, logprobs[-sample.response_length :], sample.loss_mask, strict=True)
    assert max(abs(one - expected) for one, expected, mask in recorded if mask) < 1e-4
    assert_best_experts(routed, router_logits)


async def test_an_agent_with_tools_stays_within_the_budget_of_its_response(tiny_server):
    generate, state = rollouts(tiny_server, max_tool_iters=4)
    args, params = slime_args(tiny_server.base_url), slime_sampling_params(max_new_tokens=150, ignore_eos=True)
    samples = await asyncio.gather(*(generate(args, new_sample(), params) for _ in range(4)))
    check_rollouts(list(samples), args, state.tokenizer)
    assert all(sample.response_length == 150 for sample in samples)
    assert params["max_new_tokens"] == 150
