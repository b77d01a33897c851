"""Names, arguments and results that published documents show for agents outside a trainer keep working.

The documents describe the library at several points of its history, so one thing can have several names.

| documented | test |
|---|---|
| `SGLangModel(tokenizer=, base_url=)`, `Agent(model=, tools=[calculator])`, `invoke_async` | `..._by_its_base_url` |
| `SGLangModel(client=, tokenizer=)` | `..._by_its_client` |
| `Agent(model=SGLangModel(...))`, the model as `agent.model` | `..._made_inside_the_agent` |
| `model.reset()` before an episode | `test_reset_clears_...` |
| `token_manager.token_ids`, `.loss_mask`, `.logprobs` | `test_the_token_manager_holds_...` |
| `token_manager.segments`, `len(segments[0])`: system and user prompt | `test_the_first_segment_is_...` |
| slices of `.loss_mask` and `.logprobs`, `model.tokenizer.decode` | `test_the_response_is_...` |
| `rollout.initial_prompt_length`, `.token_ids`, `.loss_mask`, `.logprobs` | `test_rollout_is_the_newer_name...` |
| `params=`, `sampling_params=` | `test_sampling_parameters_have_two_names` |
| `model_id=` | `test_the_model_id_is_for_logging` |
| `enable_thinking=` | `test_enable_thinking_reaches_the_chat_template` |
| `tool_parser=HermesToolParser()` from `strands_sglang.tool_parsers` | `test_a_tool_call_is_parsed_...` |
| `ToolIterationLimiter(max_iterations=)`, `.iteration_count` | `test_tool_iteration_limiter_...` |
| `ToolLimiter(max_tool_iters=, max_tool_calls=None)` and its two counts | `test_tool_limiter_...` |
| parallel tool calls are one iteration | `test_parallel_tool_calls_count_as_one_iteration` |
| `SGLangClient(base_url=, max_connections=, timeout=, max_retries=, retry_delay=)` | `test_the_client_...` |
| the server is asked once per call, never streaming | `test_a_model_call_is_one_request_...` |
| `/health` tells whether the server is there | `test_health_...` |
| `SGLangClient.from_slime_args`, `get_client_from_slime_args`, `generate` functions | `test_slime_functions.py` |
| `pytest tests/integration --sglang-base-url=` | the option exists: `test_readme.py` |

The page of `strands-env` names nothing from `strands_sglang`.
"""

import inspect

import pytest
from strands import Agent
from strands.types.exceptions import EventLoopException
from strands_tools import calculator

from strands_sglang import SGLangClient, SGLangModel, ToolIterationLimiter, ToolLimiter
from strands_sglang.testing import ScriptedSGLang
from strands_sglang.tool_parsers import HermesToolParser
from support.agents import call

pytestmark = pytest.mark.filterwarnings("ignore:calculator is deprecated")

QUESTION = "What is 25 * 17?"
CALL = call("calculator", expression="25 * 17")
ANSWER = "25 * 17 = 425."


@pytest.fixture
def server(chatml_tokenizer):
    """A server whose model calls the calculator once and answers."""
    return ScriptedSGLang(chatml_tokenizer, [CALL, ANSWER])


@pytest.fixture
def base_url(server):
    with server.serve() as base_url:
        yield base_url


async def rollout(server, tokenizer, *, hooks=(), **config):
    """The documented episode; returns the model that recorded it."""
    model = SGLangModel(tokenizer=tokenizer, client=server.client(), **config)
    agent = Agent(model=model, tools=[calculator], hooks=list(hooks), callback_handler=None)
    model.reset()
    await agent.invoke_async(QUESTION)
    return model


# --- the basic agent ---


async def test_an_agent_answers_through_a_server_that_is_named_by_its_base_url(base_url, server, chatml_tokenizer):
    model = SGLangModel(tokenizer=chatml_tokenizer, base_url=base_url)
    agent = Agent(model=model, tools=[calculator])
    model.reset()
    result = await agent.invoke_async(QUESTION)
    assert "425" in str(result)
    assert "Result: 425" in server.requests[1].text


async def test_an_agent_answers_through_a_server_that_is_named_by_its_client(base_url, chatml_tokenizer):
    client = SGLangClient(base_url=base_url)
    model = SGLangModel(client=client, tokenizer=chatml_tokenizer)
    result = await Agent(model=model, tools=[calculator]).invoke_async(QUESTION)
    assert "425" in str(result)
    assert len(model.token_manager.token_ids) == len(model.token_manager.loss_mask)


async def test_a_model_can_be_made_inside_the_agent(base_url, chatml_tokenizer):
    agent = Agent(model=SGLangModel(tokenizer=chatml_tokenizer, base_url=base_url), tools=[calculator])
    model = agent.model
    model.reset()
    await agent.invoke_async(QUESTION)
    assert sum(model.token_manager.loss_mask) > 0


async def test_a_model_call_is_one_request_and_never_a_stream(server, chatml_tokenizer):
    await rollout(server, chatml_tokenizer)
    assert len(server.requests) == 2
    assert all(request.body["stream"] is False for request in server.requests)


# --- what is recorded ---


async def test_the_token_manager_holds_ids_mask_and_logprobs_of_the_whole_episode(server, chatml_tokenizer):
    tm = (await rollout(server, chatml_tokenizer)).token_manager
    assert len(tm.token_ids) == len(tm.loss_mask) == len(tm.logprobs) == len(tm)
    first, second = [response.body for response in server.responses]
    assert tm.token_ids == [*server.requests[1].input_ids, *second["output_ids"]]

    sampled = [*first["output_ids"], *second["output_ids"]]
    assert [token for token, mask in zip(tm.token_ids, tm.loss_mask, strict=True) if mask] == sampled
    returned = [entry[0] for body in (first, second) for entry in body["meta_info"]["output_token_logprobs"]]
    assert [logprob for logprob, mask in zip(tm.logprobs, tm.loss_mask, strict=True) if mask] == returned


async def test_the_first_segment_is_the_system_and_user_prompt(server, chatml_tokenizer):
    tm = (await rollout(server, chatml_tokenizer)).token_manager
    assert len(tm.segments[0]) == len(server.requests[0].input_ids)
    assert tm.token_ids[: len(tm.segments[0])] == server.requests[0].input_ids


async def test_the_first_segment_is_there_also_when_the_first_call_fails(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, [])
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
    with pytest.raises(Exception, match="no answer"):
        await Agent(model=model, callback_handler=None).invoke_async(QUESTION)
    assert model.token_manager.token_ids == server.requests[0].input_ids
    assert len(model.token_manager.segments[0]) == len(model.token_manager.token_ids)


async def test_the_response_is_what_follows_the_first_segment(server, chatml_tokenizer):
    model = await rollout(server, chatml_tokenizer)
    tm = model.token_manager
    prompt_length = len(tm.segments[0])
    response = model.tokenizer.decode(tm.token_ids[prompt_length:], skip_special_tokens=False)
    assert response.startswith(CALL) and response.endswith(f"{ANSWER}<|im_end|>")
    assert len(tm.loss_mask[prompt_length:]) == len(tm.logprobs[prompt_length:])
    assert all(isinstance(logprob, float) for logprob in tm.logprobs[prompt_length:])


async def test_rollout_is_the_newer_name_of_the_token_manager(server, chatml_tokenizer):
    model = await rollout(server, chatml_tokenizer)
    tm = model.token_manager
    assert model.rollout.initial_prompt_length == len(tm.segments[0])
    assert model.rollout.token_ids == tm.token_ids
    assert model.rollout.loss_mask == tm.loss_mask
    assert model.rollout.logprobs == tm.logprobs


async def test_reset_clears_the_record_for_a_new_episode(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, [CALL, ANSWER] * 2)
    model = await rollout(server, chatml_tokenizer)
    first = model.token_manager.token_ids
    model.reset()
    assert model.token_manager.token_ids == []
    await Agent(model=model, tools=[calculator], callback_handler=None).invoke_async(QUESTION)
    assert model.token_manager.token_ids == first


# --- arguments of the model ---


@pytest.mark.parametrize("name", ["params", "sampling_params"])
async def test_sampling_parameters_have_two_names(name, server, chatml_tokenizer):
    await rollout(server, chatml_tokenizer, **{name: {"max_new_tokens": 200, "temperature": 0.7, "top_p": 0.9}})
    for request in server.requests:
        assert request.sampling_params == {"max_new_tokens": 200, "temperature": 0.7, "top_p": 0.9}


async def test_the_model_id_is_for_logging(server, chatml_tokenizer):
    model = await rollout(server, chatml_tokenizer, model_id="Qwen3-4B-Instruct-2507")
    assert model.get_config()["model_id"] == "Qwen3-4B-Instruct-2507"


@pytest.mark.parametrize("thinking", [True, False])
async def test_enable_thinking_reaches_the_chat_template(thinking, server, chatml_tokenizer):
    await rollout(server, chatml_tokenizer, enable_thinking=thinking)
    # This template, like Qwen3's, puts an empty reasoning block in front of an answer without thinking.
    for request in server.requests:
        assert request.text.endswith("<think>\n\n</think>\n\n") is not thinking


async def test_a_tool_call_is_parsed_exactly_as_it_was_generated(chatml_tokenizer):
    almost = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "25 * 17"\n</tool_call>'
    server = ScriptedSGLang(chatml_tokenizer, [almost, CALL, ANSWER])
    limiter = ToolLimiter()
    model = await rollout(server, chatml_tokenizer, hooks=[limiter], tool_parser=HermesToolParser())
    assert "Result: 425" not in server.requests[1].text  # the broken call was not repaired
    assert "Result: 425" in server.requests[2].text
    assert sum(model.tool_parse_errors.values()) == 1


# --- limits ---


async def test_tool_iteration_limiter_ends_the_loop_with_the_trajectory_intact(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, lambda request: CALL)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
    limiter = ToolIterationLimiter(max_iterations=5)
    agent = Agent(model=model, tools=[calculator], hooks=[limiter], callback_handler=None)
    with pytest.raises(EventLoopException):
        await agent.invoke_async(QUESTION)
    assert limiter.iteration_count == len(server.requests) == 5
    last = server.requests[-1].input_ids + server.responses[-1].body["output_ids"]
    assert model.token_manager.token_ids == last


async def test_tool_limiter_counts_iterations_and_calls(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, lambda request: CALL)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
    limiter = ToolLimiter(max_tool_iters=3, max_tool_calls=None)
    agent = Agent(model=model, tools=[calculator], hooks=[limiter], callback_handler=None)
    with pytest.raises(EventLoopException):
        await agent.invoke_async(QUESTION)
    assert (limiter.tool_iter_count, limiter.tool_call_count) == (3, 3)


async def test_parallel_tool_calls_count_as_one_iteration(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, [f"{CALL}\n{CALL}\n{CALL}", ANSWER])
    limiter = ToolLimiter(max_tool_iters=2, max_tool_calls=None)
    await rollout(server, chatml_tokenizer, hooks=[limiter])
    assert (limiter.tool_iter_count, limiter.tool_call_count) == (1, 3)


# --- the client ---


def test_the_client_has_the_documented_defaults():
    parameters = inspect.signature(SGLangClient).parameters
    assert parameters["base_url"].default is inspect.Parameter.empty
    documented = {"max_connections": 1000, "timeout": None, "max_retries": 60, "retry_delay": 1.0}
    assert {name: parameters[name].default for name in documented} == documented


def test_the_client_takes_the_documented_arguments():
    client = SGLangClient(
        base_url="http://localhost:30000", max_connections=10, timeout=30.0, max_retries=3, retry_delay=0.5
    )
    assert client.base_url == "http://localhost:30000"
    assert (client.max_connections, client.timeout, client.max_retries, client.retry_delay) == (10, 30.0, 3, 0.5)


async def test_health_tells_whether_the_server_is_there(base_url):
    assert await SGLangClient(base_url=base_url).health()
