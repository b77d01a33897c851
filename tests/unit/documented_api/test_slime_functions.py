"""`generate` functions for slime in the shapes that published documents show leave samples that slime can train on.

| documented | test |
|---|---|
| `SGLangClient.from_slime_args(args)`, one per router in a dictionary of one's own | the shape `iteration_limiter` |
| `model_id=`, `params=` with a part of slime's sampling parameters | the shape `iteration_limiter` |
| `ToolIterationLimiter(max_iterations=)` as a hook | the shape `iteration_limiter` |
| `SGLangClient.from_slime_args(args, timeout=300.0)` | the shape `tool_limiter` |
| `sampling_params=` with all of slime's, `tool_parser=HermesToolParser()` | the shape `tool_limiter` |
| `ToolLimiter(max_tool_iters=, max_tool_calls=None)` and its counts | the shape `tool_limiter` |
| `get_client_from_slime_args(args)`, `model.rollout.initial_prompt_length` | the shape `rollout` |
| `len(token_manager.segments[0])`, slices, `model.tokenizer.decode` | all shapes |
| an episode without an exception is COMPLETED, any exception makes it TRUNCATED | all shapes |
| `model.reset()` and `agent.cleanup()` after the sample is filled | all shapes |
| defaults of `from_slime_args`; `from_miles_args` | `test_a_client_from_slime_args_...` |

What a sample must look like is in `support.slime.check_tokens`. The documented functions set no status but
these two, and leave a response of no tokens when nothing was sampled; the README's function does better.
"""

from collections.abc import Awaitable, Callable

import pytest
from strands import Agent
from strands_tools import calculator

from strands_sglang import (
    SGLangClient,
    SGLangModel,
    ToolIterationLimiter,
    ToolLimiter,
    get_client_from_slime_args,
)
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from strands_sglang.tool_parsers import HermesToolParser
from support.agents import call
from support.slime import Sample, check_tokens, convert, install_slime, slime_args, slime_sampling_params

pytestmark = pytest.mark.filterwarnings("ignore:calculator is deprecated")

SYSTEM_PROMPT = "Use the calculator."
QUESTION = "What is 25 * 17?"
CALL = call("calculator", expression="25 * 17")
ANSWER = "25 * 17 = 425."
LIMIT = 3

Generate = Callable[..., Awaitable[Sample]]


async def generate_with_iteration_limiter(args, sample, sampling_params, **client):
    """As the first documents have it: `params=`, `model_id=`, `ToolIterationLimiter`."""
    assert not args.partial_rollout
    clients = {}
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    if router not in clients:
        clients[router] = SGLangClient.from_slime_args(args, **client)
    model = SGLangModel(
        tokenizer=generate_state(args).tokenizer,
        client=clients[router],
        model_id=args.hf_checkpoint.split("/")[-1],
        params={name: sampling_params[name] for name in ("max_new_tokens", "temperature", "top_p")},
    )
    limiter = ToolIterationLimiter(max_iterations=LIMIT)
    await run(model, limiter, sample)
    tm = model.token_manager
    return fill(sample, model, tm, len(tm.segments[0]), tool_iters=limiter.iteration_count)


async def generate_with_tool_limiter(args, sample, sampling_params, **client):
    """As later documents have it: `sampling_params=` as they are, a parser object, `ToolLimiter` and its counts."""
    model = SGLangModel(
        tokenizer=generate_state(args).tokenizer,
        client=SGLangClient.from_slime_args(args, timeout=300.0, **client),
        tool_parser=HermesToolParser(),
        sampling_params=sampling_params,
    )
    limiter = ToolLimiter(max_tool_iters=LIMIT, max_tool_calls=None)
    await run(model, limiter, sample)
    tm, counts = model.token_manager, {"tool_iters": limiter.tool_iter_count, "tool_calls": limiter.tool_call_count}
    return fill(sample, model, tm, len(tm.segments[0]), **counts)


async def generate_with_rollout(args, sample, sampling_params, **client):
    """As slime's own example has it by now: `get_client_from_slime_args`, `model.rollout`."""
    model = SGLangModel(
        tokenizer=generate_state(args).tokenizer,
        client=get_client_from_slime_args(args, **client),
        tool_parser=HermesToolParser(),
        sampling_params=sampling_params,
    )
    limiter = ToolLimiter(max_tool_iters=LIMIT)
    await run(model, limiter, sample)
    counts = {"tool_iters": limiter.tool_iter_count, "tool_calls": limiter.tool_call_count}
    return fill(sample, model, model.rollout, model.rollout.initial_prompt_length, **counts)


def generate_state(args):
    from slime.rollout.sglang_rollout import GenerateState

    return GenerateState(args)


async def run(model, limiter, sample):
    """The agent's episode; every exception is a truncation."""
    agent = Agent(model=model, tools=[calculator], hooks=[limiter], callback_handler=None, system_prompt=SYSTEM_PROMPT)
    prompt = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[0]["content"]
    try:
        await agent.invoke_async(prompt)
        sample.status = Sample.Status.COMPLETED
    except Exception:
        sample.status = Sample.Status.TRUNCATED
    agent.cleanup()


def fill(sample, model, tm, prompt_length, **counts):
    sample.tokens = tm.token_ids
    sample.loss_mask = tm.loss_mask[prompt_length:]
    sample.rollout_log_probs = tm.logprobs[prompt_length:]
    sample.response_length = len(sample.tokens) - prompt_length
    sample.response = model.tokenizer.decode(sample.tokens[prompt_length:], skip_special_tokens=False)
    sample.metadata.update(counts)
    model.reset()
    return sample


@pytest.fixture(
    params=[generate_with_iteration_limiter, generate_with_tool_limiter, generate_with_rollout],
    ids=["iteration_limiter", "tool_limiter", "rollout"],
)
def generate(request, chatml_tokenizer, monkeypatch):
    install_slime(monkeypatch, chatml_tokenizer)
    return request.param


async def generate_one(generate, tokenizer, answers, prompt=QUESTION, **kwargs):
    """A sample that was generated against a scripted router, and the router."""
    server = ScriptedSGLang(tokenizer, answers, **kwargs)
    with server.serve() as base_url:
        sample = Sample(index=0, prompt=prompt, label="425")
        return await generate(slime_args(base_url), sample, slime_sampling_params(), max_retries=0), server


def exchanged_ids(server, call_index):
    """What the server saw and sampled up to a call."""
    return [*server.requests[call_index].input_ids, *server.responses[call_index].body["output_ids"]]


async def test_an_answered_episode_is_completed_and_holds_what_the_server_saw(generate, chatml_tokenizer):
    sample, server = await generate_one(generate, chatml_tokenizer, [CALL, ANSWER])
    check_tokens(sample, chatml_tokenizer)
    convert([sample], slime_args())
    assert sample.status is Sample.Status.COMPLETED
    assert sample.tokens == exchanged_ids(server, 1)
    assert len(sample.tokens) - sample.response_length == len(server.requests[0].input_ids)
    assert sample.response.startswith(CALL) and sample.response.endswith(f"{ANSWER}<|im_end|>")
    sampled = [token for response in server.responses for token in response.body["output_ids"]]
    response_tokens = sample.tokens[-sample.response_length :]
    assert [token for token, mask in zip(response_tokens, sample.loss_mask, strict=True) if mask] == sampled


async def test_a_prompt_of_chat_messages_gives_its_first_ones_text(generate, chatml_tokenizer):
    sample, server = await generate_one(
        generate, chatml_tokenizer, [CALL, ANSWER], prompt=[{"role": "user", "content": QUESTION}]
    )
    check_tokens(sample, chatml_tokenizer)
    assert f"user\n{QUESTION}" in server.requests[0].text


async def test_an_episode_that_reaches_the_tool_limit_is_truncated(generate, chatml_tokenizer):
    sample, server = await generate_one(generate, chatml_tokenizer, lambda request: CALL)
    check_tokens(sample, chatml_tokenizer)
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.metadata["tool_iters"] == len(server.requests) == LIMIT
    assert sample.tokens == exchanged_ids(server, LIMIT - 1)
    assert sample.loss_mask[-1] == 1  # results that no call has shown to the model are not in the sample


async def test_an_answer_that_is_cut_off_is_truncated(generate, chatml_tokenizer):
    cut = ScriptedAnswer("25 * 17 is", finish_reason="length")
    sample, server = await generate_one(generate, chatml_tokenizer, [CALL, cut])
    check_tokens(sample, chatml_tokenizer)
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.tokens == exchanged_ids(server, 1)


async def test_a_server_error_truncates_with_whatever_was_recorded(generate, chatml_tokenizer):
    sample, server = await generate_one(generate, chatml_tokenizer, [CALL, CALL])  # no third answer: an error 500
    check_tokens(sample, chatml_tokenizer)
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.tokens == exchanged_ids(server, 1)


async def test_an_abort_truncates_with_the_partial_answer(generate, chatml_tokenizer):
    cut = ScriptedAnswer("25 * 17 is", finish_reason="abort")
    sample, server = await generate_one(generate, chatml_tokenizer, [CALL, cut])
    check_tokens(sample, chatml_tokenizer)
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.tokens == exchanged_ids(server, 1)


@pytest.mark.parametrize("context_length", [32768, 20], ids=["a server error", "a prompt longer than the context"])
async def test_if_nothing_was_sampled_the_prompt_is_there(context_length, generate, chatml_tokenizer):
    sample, _ = await generate_one(generate, chatml_tokenizer, [], context_length=context_length)
    assert sample.status is Sample.Status.TRUNCATED
    assert chatml_tokenizer.decode(sample.tokens).endswith(f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    assert (sample.response_length, sample.loss_mask, sample.rollout_log_probs, sample.response) == (0, [], [], "")


async def test_parallel_calls_are_one_iteration_in_the_samples_counts(generate, chatml_tokenizer):
    sample, _ = await generate_one(generate, chatml_tokenizer, [f"{CALL}\n{CALL}", ANSWER])
    check_tokens(sample, chatml_tokenizer)
    assert sample.metadata["tool_iters"] == 1
    assert sample.metadata.get("tool_calls", 2) == 2


async def test_samples_of_one_group_do_not_share_anything(generate, chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, [CALL, ANSWER] * 2)
    with server.serve() as base_url:
        first, second = [
            await generate(slime_args(base_url), Sample(index=index, prompt=QUESTION), slime_sampling_params())
            for index in range(2)
        ]
    assert first.tokens == second.tokens
    first.tokens.append(0)
    first.loss_mask.append(0)
    check_tokens(second, chatml_tokenizer)


async def test_slimes_sampling_parameters_are_passed_on_and_left_alone(chatml_tokenizer, monkeypatch):
    install_slime(monkeypatch, chatml_tokenizer)
    server = ScriptedSGLang(chatml_tokenizer, [CALL, ANSWER])
    given = slime_sampling_params(temperature=0.5)
    with server.serve() as base_url:
        await generate_with_tool_limiter(slime_args(base_url), Sample(prompt=QUESTION), given)
    assert given == slime_sampling_params(temperature=0.5)
    assert all(request.sampling_params == given for request in server.requests)


# --- the client of slime's router ---


def test_a_client_from_slime_args_has_slimes_settings():
    client = SGLangClient.from_slime_args(slime_args("http://10.0.0.1:3000"))
    assert client.base_url == "http://10.0.0.1:3000"
    assert (client.timeout, client.max_retries, client.retry_delay) == (None, 60, 1.0)
    assert client.max_connections == 8 * 512


def test_a_client_from_slime_args_takes_overrides():
    assert SGLangClient.from_slime_args(slime_args(), timeout=300.0).timeout == 300.0


def test_a_client_from_miles_args_is_the_same():
    client = SGLangClient.from_miles_args(slime_args())
    assert client.base_url == SGLangClient.from_slime_args(slime_args()).base_url


def test_the_shared_client_of_a_router_is_made_once():
    client = get_client_from_slime_args(slime_args("http://10.0.0.1:3000"))
    assert client is get_client_from_slime_args(slime_args("http://10.0.0.1:3000"))
    assert client is not get_client_from_slime_args(slime_args("http://10.0.0.2:3000"))
