"""On a real server: what is recorded is what the server saw and sampled, its logprobs are right, and so are versions.

After a weight update in the middle of rollouts every token is of the weights it is said to be of. The judge is a
float32 forward pass, with the weights of each version over the tokens that are recorded under it.
"""

import asyncio
import json
import shutil
import time

import httpx
import pytest
import torch
from httpx_aiohttp import AiohttpTransport
from safetensors.torch import load_file, save_file
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException

from strands_sglang import (
    SGLangAbortedError,
    SGLangClient,
    SGLangModel,
    TerminationReason,
    TurnStatus,
    get_tokenizer,
    termination_reason,
)
from strands_sglang.client import prefill
from support.agents import EveryAnswerCallsATool, make_agent, make_tools
from support.real_servers import NO_OTHER_STOP, abort_all, rescored, rescored_among, running_requests, until_it_runs


class WireLog(httpx.AsyncBaseTransport):
    """Passes requests on to the server and keeps the bytes of every generation, both ways."""

    def __init__(self):
        self.inner = AiohttpTransport()
        self.exchanges = []

    async def handle_async_request(self, request):
        response = await self.inner.handle_async_request(request)
        if request.url.path == "/generate":
            content = await response.aread()
            self.exchanges.append((json.loads(request.content), json.loads(content)))
        return response

    async def aclose(self):
        await self.inner.aclose()


def ends_soon(model_path, **params):
    """Sampling parameters under which any model ends its turn after a few tokens of its own."""
    end = get_tokenizer(str(model_path)).eos_token_id
    return {"min_new_tokens": 6, "logit_bias": {str(end): 100.0}, "max_new_tokens": 64, **params}


@pytest.fixture
async def wire():
    log = WireLog()
    yield log
    await log.aclose()


def make_model(server, wire, **config):
    client = SGLangClient(server.base_url, transport=wire)
    return SGLangModel(tokenizer=get_tokenizer(str(server.model_path)), client=client, **config)


def assert_exact(wire, model):
    """The one recorded sequence is what went over the wire, token by token."""
    (sequence,) = model.trajectory.sequences()
    assert sequence.tokens == model.token_manager.tokens
    ids, mask, logprobs = sequence.token_ids, sequence.loss_mask, sequence.logprobs
    end = 0
    for request, response in wire.exchanges:
        prompt, output = request["input_ids"], response["output_ids"]
        assert ids[: len(prompt)] == prompt
        assert ids[len(prompt) : len(prompt) + len(output)] == output
        assert not any(mask[end : len(prompt)])
        assert all(mask[len(prompt) : len(prompt) + len(output)])
        sampled = [entry[0] for entry in response["meta_info"]["output_token_logprobs"]]
        assert logprobs[len(prompt) : len(prompt) + len(output)] == sampled
        end = len(prompt) + len(output)
    assert end == len(ids)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_equal_a_float32_forward_pass(tiny_server, wire, temperature):
    tools, _ = make_tools()
    model = make_model(
        tiny_server,
        wire,
        sampling_params={"temperature": temperature, "max_new_tokens": 200, "logit_bias": NO_OTHER_STOP},
        tool_parser=EveryAnswerCallsATool(0),
        return_prompt_logprobs=True,
    )
    agent = make_agent(model, tools)
    # A random answer may end with its first token: continue until there is something to compare.
    while len(model.trajectory.turns) < 3 or sum(model.token_manager.loss_mask) <= 100:
        try:
            await agent.invoke_async("Continue.")
        except MaxTokensReachedException:
            pass
    assert_exact(wire, model)
    tm = model.token_manager
    expected = rescored(tiny_server.model_path, tm, temperature, logit_bias=NO_OTHER_STOP)
    differences = [abs(a - b) for a, b in zip(tm.logprobs[1:], expected, strict=True)]
    assert max(differences) < 1e-4


async def test_logprobs_under_top_p_are_exact_within_sampling_masks(tiny_server, wire):
    """The stock server returns the distribution that truncated sampling really used."""
    temperature, top_k = 0.7, 20
    sampling_params = {"temperature": temperature, "top_p": 0.9, "top_k": top_k, "max_new_tokens": 60}
    model = make_model(
        tiny_server,
        wire,
        sampling_params={**sampling_params, "logit_bias": NO_OTHER_STOP},
        tool_parser=EveryAnswerCallsATool(0),
        request_fields={"return_sampling_mask": True},
    )
    agent = make_agent(model)
    while len(model.trajectory.turns) < 2 or sum(model.token_manager.loss_mask) <= 100:
        try:
            await agent.invoke_async("Continue.")
        except MaxTokensReachedException:
            pass
    assert_exact(wire, model)
    tm = model.token_manager
    rows = list(tm.sampling_mask.rows())
    assert [bool(row) for row in rows] == [bool(mask) for mask in tm.loss_mask]
    assert all(token in row and len(row) <= top_k for token, row in zip(tm.token_ids, rows, strict=True) if row)
    expected = rescored_among(tiny_server.model_path, tm, temperature)
    pairs = [(a, b) for a, b in zip(tm.sampling_logprobs[1:], expected, strict=True) if b is not None]
    assert len(pairs) == sum(tm.loss_mask)
    assert max(abs(a - b) for a, b in pairs) < 1e-4
    # The logprobs over the whole vocabulary are others: too low by what top-p and top-k leave out.
    whole = [logprob for logprob, mask in zip(tm.logprobs, tm.loss_mask, strict=True) if mask]
    assert all(a >= logprob - 1e-6 for (a, _), logprob in zip(pairs, whole, strict=True))


async def test_an_aborted_request_keeps_its_sampling_masks(tiny_server, wire):
    sampling_params = {"top_k": 5, "ignore_eos": True}
    fields = {"return_sampling_mask": True, "extra_key": "an aborted request"}
    model = make_model(tiny_server, wire, sampling_params=sampling_params, request_fields=fields)
    running = asyncio.create_task(make_agent(model).invoke_async("Continue."))
    await until_it_runs(tiny_server.base_url)
    await abort_all(tiny_server.base_url)
    with pytest.raises(SGLangAbortedError):
        await running
    (turn,) = model.trajectory.turns
    assert len(turn.generation.sampling_mask) == len(turn.output_ids) > 0
    assert turn.request_fields == fields


async def test_language_model_logprobs_equal_a_forward_pass(smollm_server, wire):
    # Not min_new_tokens: it takes the stop tokens out of the distribution whose logprobs the server returns.
    sampling_params = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 48, "logit_bias": NO_OTHER_STOP}
    model = make_model(smollm_server, wire, sampling_params=sampling_params, tool_parser=EveryAnswerCallsATool(0))
    agent = make_agent(model)
    for question in ("Name three colors.", "Which one is your favorite?"):
        try:
            await agent.invoke_async(question)
        except MaxTokensReachedException:
            pass
    assert_exact(wire, model)
    tm = model.token_manager
    expected = rescored(smollm_server.model_path, tm, 1.0, logit_bias=NO_OTHER_STOP)
    sampled = [
        abs(recorded - scored)
        for recorded, scored, mask in zip(tm.logprobs[1:], expected, tm.loss_mask[1:], strict=True)
        if mask
    ]
    assert len(sampled) == 2 * 48
    assert max(sampled) < 1e-4


async def test_a_conversation_of_30_tool_turns_is_one_sequence(tiny_server, wire):
    tools, ran = make_tools()
    model = make_model(
        tiny_server,
        wire,
        sampling_params=ends_soon(tiny_server.model_path, temperature=1.0),
        tool_parser=EveryAnswerCallsATool(30),
    )
    result = await make_agent(model, tools).invoke_async("Continue.")
    assert result.stop_reason == "end_turn"
    assert len(ran) == 30
    assert len(wire.exchanges) == 31
    assert_exact(wire, model)


async def test_the_prefix_cache_serves_what_was_seen_before(tiny_server, wire):
    model = make_model(
        tiny_server,
        wire,
        sampling_params=ends_soon(tiny_server.model_path, temperature=1.0),
        tool_parser=EveryAnswerCallsATool(5),
    )
    tools, _ = make_tools()
    result = await make_agent(model, tools).invoke_async("Continue.")
    for turn in model.trajectory.turns[1:]:
        before = len(turn.parent.token_ids())
        # The last sampled token has no key-value entry yet, so it is computed again.
        assert before - 2 <= turn.generation.cached_tokens <= before
    usage = result.metrics.accumulated_usage
    assert usage["cacheReadInputTokens"] == sum(turn.generation.cached_tokens for turn in model.trajectory.turns)


async def test_two_rollouts_at_temperature_zero_are_identical(tiny_server):
    async def rollout():
        async with SGLangClient(tiny_server.base_url) as client, httpx.AsyncClient(timeout=60) as control:
            # Cached values and recomputed ones differ in the last float digits.
            (await control.post(f"{tiny_server.base_url}/flush_cache", params={"timeout": 30})).raise_for_status()
            tools, _ = make_tools()
            model = SGLangModel(
                tokenizer=get_tokenizer(str(tiny_server.model_path)),
                client=client,
                sampling_params=ends_soon(tiny_server.model_path, temperature=0.0),
                tool_parser=EveryAnswerCallsATool(3),
            )
            await make_agent(model, tools).invoke_async("Continue.")
            return model.token_manager.tokens

    first = await rollout()
    assert first == await rollout()
    assert sum(token.loss_mask for token in first) >= 4 * 6


async def test_concurrent_agents_on_one_model_have_a_sequence_each(tiny_server, wire):
    model = make_model(tiny_server, wire, sampling_params=ends_soon(tiny_server.model_path, temperature=1.0))
    agents = [make_agent(model, system_prompt=f"You are agent {i}.") for i in range(8)]
    for question in ("one", "two"):
        await asyncio.gather(*(agent.invoke_async(question) for agent in agents))
    sequences = model.trajectory.sequences()
    assert len(sequences) == 8
    sampled = sorted(sum(sequence.loss_mask) for sequence in sequences)
    assert sum(sampled) == sum(len(response["output_ids"]) for _, response in wire.exchanges)


def test_the_synchronous_agent_works_twice_in_a_row(tiny_server):
    model = SGLangModel(
        tokenizer=get_tokenizer(str(tiny_server.model_path)),
        base_url=tiny_server.base_url,
        sampling_params=ends_soon(tiny_server.model_path, temperature=1.0),
    )
    agent = make_agent(model)
    agent("one")
    agent("two")
    assert len(model.trajectory.sequences()) == 1


async def test_an_answer_cut_by_max_new_tokens(tiny_server, wire):
    model = make_model(tiny_server, wire, sampling_params={"max_new_tokens": 5, "ignore_eos": True})
    with pytest.raises(MaxTokensReachedException) as caught:
        await make_agent(model).invoke_async("Continue.")
    assert termination_reason(caught.value, trajectory=model.trajectory) is TerminationReason.MAX_TOKENS_REACHED
    assert sum(model.token_manager.loss_mask) == 5
    assert_exact(wire, model)


async def test_an_answer_cut_where_the_context_ends(tiny_server, wire):
    model = make_model(tiny_server, wire, sampling_params={"ignore_eos": True})
    with pytest.raises(MaxTokensReachedException) as caught:
        await make_agent(model).invoke_async("a" * 4000)
    assert termination_reason(caught.value, trajectory=model.trajectory) is TerminationReason.CONTEXT_WINDOW_OVERFLOW
    assert sum(model.token_manager.loss_mask) > 0
    assert_exact(wire, model)


@pytest.mark.parametrize("words", [4090, 10_000])
async def test_a_first_prompt_longer_than_the_context(tiny_server, wire, words):
    model = make_model(tiny_server, wire)
    with pytest.raises(ContextWindowOverflowException) as caught:
        await make_agent(model).invoke_async("a" * words)
    assert termination_reason(caught.value, trajectory=model.trajectory) is TerminationReason.CONTEXT_WINDOW_OVERFLOW
    assert len(model.token_manager.segments[0]) >= words
    assert sum(model.token_manager.loss_mask) == 0


async def test_an_aborted_request_keeps_what_was_sampled(tiny_server, wire):
    model = make_model(tiny_server, wire, sampling_params={"ignore_eos": True})
    running = asyncio.ensure_future(make_agent(model).invoke_async("Continue."))
    await until_it_runs(tiny_server.base_url)
    await abort_all(tiny_server.base_url)
    with pytest.raises(SGLangAbortedError) as caught:
        await running
    assert termination_reason(caught.value, trajectory=model.trajectory) is TerminationReason.ABORTED
    (turn,) = model.trajectory.turns
    assert turn.status is TurnStatus.CUT
    assert_exact(wire, model)


async def test_structured_output_is_valid_and_never_trained(tiny_server, wire):
    from pydantic import BaseModel

    class Choice(BaseModel):
        good: bool

    model = make_model(tiny_server, wire, sampling_params={"temperature": 1.0, "max_new_tokens": 64})
    question = [{"role": "user", "content": [{"text": "Is it good?"}]}]
    for _ in range(30):
        try:
            (event,) = [event async for event in model.structured_output(Choice, question)]
            break
        except ValueError:  # the grammar allows white space without end, and this model's weights are random
            assert model.trajectory.turns[-1].generation.finish_type == "length"
    assert isinstance(event["output"], Choice)
    assert model.trajectory.sequences() == []
    assert {sum(sequence.loss_mask) for sequence in model.trajectory.sequences(auxiliary=True)} == {0}


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
LENGTH = 400
TEMPERATURE = 0.8


class Trainer:
    """What a trainer does to the server, and what it knows of its own weights."""

    def __init__(self, server, other_path):
        self.base_url = server.base_url
        self.paths = {"old": server.model_path, "new": other_path}

    async def post(self, path, **body):
        async with httpx.AsyncClient(base_url=self.base_url, timeout=120, trust_env=False) as http:
            response = await http.post(path, json=body)
            assert response.is_success, f"{path}: {response.status_code} {response.text}"
            return response

    async def load(self, version, *, when_idle=True):
        """Load weights, once the server is idle: its answers come before its scheduler is done with the requests."""
        if when_idle:
            await self.post("/flush_cache?timeout=60")
        await self.post("/update_weights_from_disk", model_path=str(self.paths[version]), weight_version=version)


@pytest.fixture
async def trainer(own_server, tiny_server, tmp_path):
    trainer = Trainer(tiny_server, with_other_weights(tiny_server.model_path, tmp_path))
    await trainer.load("old")
    try:
        yield trainer
    finally:
        trainer.paths["default"] = tiny_server.model_path
        await abort_all(trainer.base_url)
        await trainer.load("default")


def assert_each_token_is_of_its_version(sequence, paths):
    scores = {version: [None, *rescored(path, sequence, TEMPERATURE)] for version, path in paths.items()}
    tokens = zip(sequence.loss_mask, sequence.policy_versions, sequence.logprobs, range(len(sequence)), strict=True)
    sampled = [(version, logprob, i) for mask, version, logprob, i in tokens if mask]
    assert {version for version, _, _ in sampled} == {"old", "new"}
    assert max(abs(logprob - scores[version][i]) for version, logprob, i in sampled) < 1e-4
    wrong = {"old": "new", "new": "old"}
    assert max(abs(logprob - scores[wrong[version]][i]) for version, logprob, i in sampled) > 0.1


async def rollouts(server, client, length=LENGTH, **config):
    """Start rollouts with one turn of this length each; return their ends."""
    models = [
        SGLangModel(
            tokenizer=get_tokenizer(str(server.model_path)),
            client=client,
            sampling_params={"temperature": TEMPERATURE, "ignore_eos": True, "max_new_tokens": length},
            **config,
        )
        for _ in range(ROLLOUTS)
    ]
    agents = [make_agent(model) for model in models]  # beforehand, so that all are sampled at the same time
    asked = (agent.invoke_async(f"Question {number}") for number, agent in enumerate(agents))
    return list(zip(models, await asyncio.gather(*asked, return_exceptions=True), strict=True))


async def while_running(trainer, act):
    """Do something shortly after all rollouts are being sampled."""
    async with httpx.AsyncClient(base_url=trainer.base_url, timeout=60, trust_env=False) as http:

        async def load():
            return (await http.get("/v1/loads")).json()["loads"][0]

        while (begun := await load())["num_running_reqs"] < ROLLOUTS:
            await asyncio.sleep(0.02)
        while (await load())["num_used_tokens"] < begun["num_used_tokens"] + 20 * ROLLOUTS:
            await asyncio.sleep(0.02)
    await act()


async def test_samples_share_a_prefill_also_after_an_update(trainer, tiny_server):
    question = "Which of these numbers is prime? " + " ".join(map(str, range(160)))
    async with SGLangClient(tiny_server.base_url) as client:
        for version in ("old", "new"):
            began = time.monotonic()
            while time.monotonic() - began <= prefill.IDLE_S:  # so tiny a model is loaded in less
                await trainer.load(version)
            models = [
                SGLangModel(
                    tokenizer=get_tokenizer(str(tiny_server.model_path)),
                    client=client,
                    sampling_params=ends_soon(tiny_server.model_path, temperature=1.0),
                )
                for _ in range(8)
            ]
            await asyncio.gather(*(make_agent(model).invoke_async(question) for model in models))
            turns = [model.trajectory.turns[0] for model in models]
            assert {turn.generation.weight_version for turn in turns} == {version}
            assert len(turns[0].prompt_ids) > 256
            computed = [len(turn.prompt_ids) - turn.generation.cached_tokens for turn in turns]
            assert sum(count > 2 for count in computed) <= 1, computed  # the first call may not know of its siblings


async def test_calls_continue_after_an_aborting_weight_update(trainer, tiny_server):
    async def update():
        await trainer.post("/pause_generation", mode="abort")
        await trainer.load("new")
        await trainer.post("/continue_generation")

    async with SGLangClient(tiny_server.base_url) as client:
        running = rollouts(tiny_server, client, on_abort="resume")
        ended, _ = await asyncio.gather(running, while_running(trainer, update))
    for model, error in ended:
        assert isinstance(error, MaxTokensReachedException)
        (turn,) = model.trajectory.turns
        assert len(turn.output_ids) == LENGTH
        assert turn.generation.resumed_ids
        (sequence,) = model.trajectory.sequences()
        assert_each_token_is_of_its_version(sequence, trainer.paths)


async def test_spans_are_kept_where_requests_outlive_an_update(trainer, tiny_server):
    async def update():
        await trainer.post("/pause_generation", mode="retract")
        await trainer.load("new", when_idle=False)
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


async def test_call_to_a_paused_server_is_answered_after_the_pause(trainer, tiny_server):
    await trainer.post("/pause_generation", mode="abort")
    try:
        async with SGLangClient(tiny_server.base_url) as client:
            waiting = asyncio.create_task(rollouts(tiny_server, client, 40, on_abort="resume"))
            for _ in range(50):  # the server has time to answer, and does so to others
                await running_requests(trainer.base_url)
            assert not waiting.done()
            await trainer.post("/continue_generation")
            ended = await waiting
    finally:
        await trainer.post("/continue_generation")
    assert all(len(model.trajectory.turns[0].output_ids) == 40 for model, _ in ended)
