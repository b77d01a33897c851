"""Routed experts on a real server with a mixture-of-experts model: a row per token, the right one, cached or not."""

import asyncio
import uuid

import httpx
import numpy as np
import pytest
from strands.types.exceptions import MaxTokensReachedException

from strands_sglang import SGLangAbortedError, SGLangClient, SGLangDecodingError, SGLangModel, TurnStatus, get_tokenizer
from strands_sglang.protocol.generation import read_generation
from strands_sglang.testing import ScriptedAnswer, ScriptedExperts, ScriptedSGLang
from strands_sglang.tool_parsers import ToolParser
from support.agents import make_agent
from support.forward_pass import assert_best_experts, load_reference, replayed
from support.real_servers import abort_all, until_it_runs

LAYERS, EXPERTS, TOP_K = 3, 8, 2
PROMPT = [11, 50, 60, 70, 80]


class NoToolCalls(ToolParser):
    """Takes whatever was sampled for text: the mark of a tool call, sampled by chance, would end the conversation."""

    def parse(self, text):
        return []


def make_model(server, **config):
    config = {"return_routed_experts": True, "tool_parser": NoToolCalls(), **config}
    return SGLangModel(tokenizer=get_tokenizer(str(server.model_path)), base_url=server.base_url, **config)


async def converse(model):
    """Three user turns, each answered until the limit."""
    agent = make_agent(model, system_prompt=uuid.uuid4().hex)
    for question in ("one", "two", "three"):
        with pytest.raises(MaxTokensReachedException):
            await agent.invoke_async(question)


async def generate(base_url, input_ids, **body):
    """One request of its own; `cold=True` flushes the prefix cache before."""
    params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 8, **body.pop("sampling_params", {})}
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as http:
        if body.pop("cold", False):
            (await http.post("/flush_cache", params={"timeout": 10})).raise_for_status()
        body = {"return_routed_experts": True, **body, "input_ids": input_ids, "sampling_params": params}
        response = await http.post("/generate", json=body)
    return read_generation(response.json(), logprobs_expected=False)


@pytest.fixture
def reference(tiny_moe_server):
    return load_reference(tiny_moe_server.model_path)


async def test_every_turn_keeps_a_row_for_each_token_that_went_through_the_model(tiny_moe_server):
    # Token 0 is a stop of another kind: an answer of noise that is cut behind it would rightly fork.
    params = {"ignore_eos": True, "max_new_tokens": 40, "logit_bias": {"0": -100.0}}
    model = make_model(tiny_moe_server, sampling_params=params)
    await converse(model)
    (sequence,) = model.trajectory.sequences()
    turns = model.trajectory.turns
    assert len(turns) == 3
    for turn in turns:
        ids = turn.generation.expert_ids()
        assert ids.shape == (len(turn.token_ids()) - 1, LAYERS * TOP_K)
        if turn.parent is not None:
            known = turn.parent.generation.expert_ids()
            assert turn.generation.cached_tokens >= len(known) - 1
            assert (ids[: len(known)] == known).all()
    assert len(turns[-1].generation.expert_ids()) == len(sequence) - 1


async def test_they_are_the_experts_of_a_float32_forward_pass(tiny_moe_server, reference):
    sampling_params = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 100}
    model = make_model(tiny_moe_server, sampling_params=sampling_params, return_prompt_logprobs=True)
    await converse(model)
    assert_as_in_a_forward_pass(model, reference)


async def test_those_of_an_answer_that_was_aborted_and_resumed_are_the_same(tiny_moe_server, reference):
    sampling_params = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 600}
    model = make_model(tiny_moe_server, sampling_params=sampling_params, return_prompt_logprobs=True, on_abort="resume")
    running = asyncio.ensure_future(make_agent(model).invoke_async("Go on."))
    for _ in range(2):
        await abort_all_once_it_runs(tiny_moe_server)
    with pytest.raises(MaxTokensReachedException):
        await running
    (turn,) = model.trajectory.turns
    assert turn.generation.resumed_ids
    assert len(turn.output_ids) == 600
    assert_as_in_a_forward_pass(model, reference)


async def abort_all_once_it_runs(server):
    await until_it_runs(server.base_url)
    await abort_all(server.base_url)


def assert_as_in_a_forward_pass(model, reference):
    recorded = model.token_manager
    routed = model.trajectory.turns[-1].generation.expert_ids().reshape(-1, LAYERS, TOP_K).copy()
    logprobs, router_logits = replayed(reference, recorded.token_ids, routed)
    assert max(abs(a - b) for a, b in zip(recorded.logprobs[1:], logprobs, strict=True)) < 1e-4
    assert router_logits.shape[1:] == (LAYERS, EXPERTS)
    assert_best_experts(routed, router_logits)


async def test_rows_of_a_prompt_that_another_request_left_in_the_cache_are_the_same(tiny_moe_server):
    prompt = [*PROMPT, *range(100, 400)]
    url = tiny_moe_server.base_url
    cold = await generate(url, prompt, cold=True)
    await generate(url, prompt, cold=True, return_routed_experts=False)
    cached = await generate(url, prompt)
    assert (cold.cached_tokens, cached.cached_tokens) == (0, len(prompt) - 1)
    assert (cold.expert_ids() == cached.expert_ids()).all()


@pytest.mark.parametrize(
    ("prompt", "sampling_params", "finish"),
    [
        (PROMPT, {}, "length"),
        (PROMPT, {"max_new_tokens": 1}, "length"),
        (PROMPT, {"max_new_tokens": 0}, "length"),
        (PROMPT[:1], {"max_new_tokens": 1}, "length"),
        (PROMPT[:1], {"max_new_tokens": 0}, "length"),
        (PROMPT, {"logit_bias": {"50": 100.0}, "stop_token_ids": [50], "ignore_eos": False}, "stop"),
        (PROMPT, {"logit_bias": {"50": 100.0}, "stop": ["PP"]}, "stop"),
    ],
)
async def test_however_a_generation_ends_real_and_scripted_rows_are_those_of_its_tokens(
    tiny_moe_server, prompt, sampling_params, finish
):
    script = [ScriptedAnswer(token_ids=[50] * 64, finish_reason="length")]
    scripted = ScriptedSGLang(get_tokenizer(str(tiny_moe_server.model_path)), script, experts=ScriptedExperts())
    with scripted.serve() as scripted_url:
        for url in (tiny_moe_server.base_url, scripted_url):
            generation = await generate(url, prompt, sampling_params=sampling_params)
            assert generation.finish_type == finish
            ids = generation.expert_ids()
            rows = len(prompt) + len(generation.output_ids) - 1
            assert ids.shape == (rows, LAYERS * TOP_K if rows else 0)
            choices = ids.reshape(-1, TOP_K)
            assert ((choices >= 0) & (choices < EXPERTS)).all()
            assert (np.diff(np.sort(choices)) > 0).all()


async def test_an_aborted_request_keeps_the_rows_of_what_it_sampled(tiny_moe_server):
    model = make_model(tiny_moe_server, sampling_params={"ignore_eos": True})
    running = asyncio.ensure_future(make_agent(model).invoke_async("Go on."))
    await abort_all_once_it_runs(tiny_moe_server)
    with pytest.raises(SGLangAbortedError):
        await running
    (turn,) = model.trajectory.turns
    assert turn.status is TurnStatus.CUT
    assert len(turn.generation.expert_ids()) == len(turn.token_ids()) - 1


async def test_rows_that_lack_the_first_ones_are_refused(tiny_moe_server):
    async with SGLangClient(tiny_moe_server.base_url) as client:
        response = await client.generate(
            PROMPT, {"max_new_tokens": 4}, return_routed_experts=True, routed_experts_start_len=3
        )
    with pytest.raises(SGLangDecodingError, match=r"30 ids .* each of 8 tokens.*routed_experts_start_len"):
        read_generation(response, logprobs_expected=False)


async def test_a_model_without_experts_is_an_error(tiny_server):
    model = make_model(tiny_server, sampling_params={"max_new_tokens": 4})
    with pytest.raises(SGLangDecodingError, match="the model has none"):
        await make_agent(model).invoke_async("Go on.")
    assert sum(model.token_manager.loss_mask) == 0
