"""Training data besides the tokens, on real servers: routed experts, the tensors of images, and slime's samples."""

import asyncio
import copy
import uuid
from dataclasses import replace
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from strands import tool
from strands.types.exceptions import MaxTokensReachedException
from transformers import Qwen2_5_VLForConditionalGeneration

from strands_env.core import Action, Environment
from strands_env.eval import Evaluator
from strands_env.replay import replay
from strands_sglang import SGLangAbortedError, SGLangClient, SGLangDecodingError, SGLangModel, TurnStatus, get_tokenizer
from strands_sglang.credit import Episode, training_rows
from strands_sglang.messages.content import UnsupportedContentError
from strands_sglang.mismatch import masked_logprobs, measure_mismatch, under_sampling_mask
from strands_sglang.protocol.generation import read_generation
from strands_sglang.testing import ScriptedAnswer, ScriptedExperts, ScriptedSGLang
from strands_sglang.tool_parsers import ToolParser, ToolParseResult
from strands_sglang.trainers.slime import make_generate
from support.agents import make_agent
from support.real_servers import (
    NO_OTHER_STOP,
    abort_all,
    assert_best_experts,
    load_reference,
    replayed,
    until_it_runs,
)
from support.slime import Sample, check_rollouts, slime_args, slime_sampling_params
from support.vision import image_block, load_without_videos, png

LAYERS, EXPERTS, TOP_K = 3, 8, 2
PROMPT = [11, 50, 60, 70, 80]


class NoToolCalls(ToolParser):
    """Reads every answer as text: a tool call's mark, sampled by chance, would end the conversation."""

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
    """Send a separate request; `cold=True` flushes the prefix cache before."""
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


async def test_every_turn_has_a_row_for_each_computed_token(tiny_moe_server):
    params = {"ignore_eos": True, "max_new_tokens": 40, "logit_bias": NO_OTHER_STOP}
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


async def test_rows_of_a_resumed_answer_are_the_same(tiny_moe_server, reference):
    sampling_params = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 600}
    model = make_model(tiny_moe_server, sampling_params=sampling_params, return_prompt_logprobs=True, on_abort="resume")
    running = asyncio.ensure_future(make_agent(model).invoke_async("Continue."))
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


async def test_rows_of_a_cached_prompt_are_the_same(tiny_moe_server):
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
async def test_real_and_scripted_rows_belong_to_their_tokens(tiny_moe_server, prompt, sampling_params, finish):
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
    running = asyncio.ensure_future(make_agent(model).invoke_async("Continue."))
    await abort_all_once_it_runs(tiny_moe_server)
    with pytest.raises(SGLangAbortedError):
        await running
    (turn,) = model.trajectory.turns
    assert turn.status is TurnStatus.CUT
    assert len(turn.generation.expert_ids()) == len(turn.token_ids()) - 1


async def test_rows_that_lack_the_first_ones_are_refused(tiny_moe_server):
    async with SGLangClient(tiny_moe_server.base_url) as client:
        response = await client.generate(
            PROMPT,
            {"max_new_tokens": 4, "ignore_eos": True},
            return_routed_experts=True,
            routed_experts_start_len=3,
        )
    with pytest.raises(SGLangDecodingError, match=r"30 ids .* among 8 tokens.*routed_experts_start_len"):
        read_generation(response, logprobs_expected=False)


async def test_a_model_without_experts_is_an_error(tiny_server):
    model = make_model(tiny_server, sampling_params={"max_new_tokens": 4})
    with pytest.raises(SGLangDecodingError, match="the model has none"):
        await make_agent(model).invoke_async("Continue.")
    assert sum(model.token_manager.loss_mask) == 0


IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}"
    f"{{{{- '{IMAGE}' if part.type == 'image' else part.text }}}}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Sampled marks of images would end the conversation; a random model samples anything.
NO_MARKS = {**NO_OTHER_STOP, **{str(token): -100.0 for token in range(512, 516)}}


@pytest.fixture
def model(tiny_vl_server):
    tokenizer = get_tokenizer(str(tiny_vl_server.model_path))
    return SGLangModel(
        tokenizer=tokenizer,
        base_url=tiny_vl_server.base_url,
        processor=load_without_videos("Qwen2_5_VLProcessor", tiny_vl_server.model_path, tokenizer),
        chat_template=TEMPLATE,
        tool_parser=NoToolCalls(),
        sampling_params={"max_new_tokens": 12, "ignore_eos": True, "logit_bias": NO_MARKS},
    )


async def converse_about_images(model):
    agent = make_agent(model, system_prompt="Look.")
    questions = [
        [{"text": "what is"}, image_block(png(100, 150, "red")), {"text": "this?"}],
        [{"text": "continue"}],
        [image_block(png(200, 90, "blue")), image_block(png(64, 64, "green"))],
    ]
    for question in questions:
        with pytest.raises(MaxTokensReachedException):
            await agent.invoke_async(question)


async def test_conversation_with_images_is_one_exact_sequence(model):
    await converse_about_images(model)
    [sequence] = model.trajectory.sequences()
    assert [turn.generation.cached_tokens > 0 for turn in model.trajectory.turns[1:]] == [True, True]
    grid = sequence.multimodal_train_inputs["image_grid_thw"]
    pad = model.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert len(grid) == 3
    assert sequence.token_ids.count(pad) == int(grid.prod(dim=1).sum()) // 4


async def test_an_evaluation_with_images_replays(model, tmp_path):
    """The images of a task and of its messages come back from the files, and are expanded to the same tokens."""
    message = {"role": "user", "content": [{"text": "What is it?"}, image_block()]}
    evaluator = Evaluator(lambda action: Environment(lambda: model), output_path=tmp_path, keep_trajectories=True)
    await evaluator.run([Action(message=message)])
    [replayed] = [one async for one in replay([tmp_path], lambda action: Environment(lambda: model))]
    assert replayed.is_same, replayed
    assert replayed.now.turns[0].images is not None


async def test_logprobs_belong_to_the_recorded_tokens_and_tensors(model, tiny_vl_server):
    await converse_about_images(model)
    [sequence] = model.trajectory.sequences()
    policy = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_vl_server.model_path, dtype=torch.float32).eval()
    pad = model.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    ids = torch.tensor([sequence.token_ids])
    with torch.no_grad():
        logits = policy(input_ids=ids, mm_token_type_ids=(ids == pad).int(), **sequence.multimodal_train_inputs).logits[
            0
        ]
    trained = torch.tensor(sequence.loss_mask).bool()[1:]
    logits[:, [int(token) for token in NO_MARKS]] -= 100.0
    logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    recorded = torch.tensor([logprob or 0.0 for logprob in sequence.logprobs])[1:]
    assert int(trained.sum()) == 36
    assert torch.allclose(logprobs[trained], recorded[trained], atol=2e-3)


async def test_prompt_logprobs_of_placeholders_are_unknown(model):
    """In place of an image, the server scores other ids."""
    model.update_config(return_prompt_logprobs=True)
    await converse_about_images(model)
    [sequence] = model.trajectory.sequences()
    pad = model.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    unknown = [at for at, logprob in enumerate(sequence.logprobs) if logprob is None]
    assert unknown == [0, *(at for at, token in enumerate(sequence.token_ids) if token == pad)]


async def test_a_text_model_is_refused_before_anything_is_sent(tiny_server, tiny_vl_server):
    tokenizer = get_tokenizer(str(tiny_vl_server.model_path))
    requests = []

    async def noted(request):
        requests.append(request.url.path)
        return await httpx.AsyncHTTPTransport(trust_env=False).handle_async_request(request)

    async with SGLangClient(tiny_server.base_url, transport=httpx.MockTransport(noted)) as client:
        model = SGLangModel(
            tokenizer=tokenizer,
            client=client,
            processor=load_without_videos("Qwen2_5_VLProcessor", tiny_vl_server.model_path, tokenizer),
            chat_template=TEMPLATE,
        )
        with pytest.raises(UnsupportedContentError, match=r"messages\[0\].content\[0\]: .*takes no images"):
            await make_agent(model).invoke_async([image_block()])
    assert "/generate" not in requests


class FirstTwoAnswersCall(ToolParser):
    """Reads the first two answers as calls of `look`, because a random model writes none."""

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
    return Sample(index=0, group_index=0, prompt="Continue.", metadata={"system": uuid.uuid4().hex})


@pytest.mark.parametrize("parts", [1, 3])
async def test_partial_rollout_has_the_models_logprobs_and_experts(tiny_moe_server, parts):
    async def end_rollout(base_url, state):
        """What slime does at the end of a rollout, once a request is running."""
        await until_it_runs(base_url)
        state.aborted = True
        await abort_all(base_url)

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


async def test_agent_with_tools_stays_within_its_response_budget(tiny_server):
    generate, state = rollouts(tiny_server, max_tool_iters=4)
    args, params = slime_args(tiny_server.base_url), slime_sampling_params(max_new_tokens=150, ignore_eos=True)
    samples = await asyncio.gather(*(generate(args, new_sample(), params) for _ in range(4)))
    check_rollouts(list(samples), args, state.tokenizer)
    assert all(sample.response_length == 150 for sample in samples)
    assert params["max_new_tokens"] == 150


# --- Mismatch under truncated sampling ---


async def test_a_sampling_mask_removes_the_mismatch_of_top_p(tiny_server):
    """Before an update the trainer's logprobs are the sampler's, if they are renormalized over the same ids."""
    temperature = 0.7
    params = {"temperature": temperature, "top_p": 0.9, "top_k": 20, "max_new_tokens": 60, "ignore_eos": True}
    model = make_model(
        tiny_server,
        return_routed_experts=False,
        sampling_params={**params, "logit_bias": NO_OTHER_STOP},
        request_fields={"return_sampling_mask": True},
    )
    await converse(model)
    rows = training_rows([Episode(model.trajectory, 1.0, "g")], baseline=None)
    reference = load_reference(tiny_server.model_path)

    def compared(*, with_mask):
        measured = []
        for row in rows:
            ids = torch.tensor(row.token_ids)
            with torch.no_grad():
                logits = reference(ids[None, :-1]).logits[0].float()
            mask = row.tokens.sampling_mask.part(1, len(row)) if with_mask else None
            own = [0.0, *masked_logprobs(logits, ids[1:], mask, temperature=temperature).tolist()]
            measured.append(replace(under_sampling_mask(row), trainer_logprobs=own))
        return measure_mismatch(measured)

    before, after = compared(with_mask=False), compared(with_mask=True)
    assert after.tokens > 100
    assert after.max_difference < 1e-4
    assert before.mean_difference > 0.02
    assert before.log_sequence_ratio < -1
