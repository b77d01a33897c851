"""What published documents show keeps working: import paths, names, arguments, results, and functions for slime.

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
| `pytest tests/integration --sglang-base-url=` | the option exists: `test_readme.py` |

The page of `strands-env` names nothing from `strands_sglang`.

What a sample for slime must look like is in `support.slime.check_tokens`. The documented functions set no status but
these two, and leave a response of no tokens when nothing was sampled; the README's function does better.
"""

import importlib
import inspect

import pytest
from strands import Agent
from strands.types.exceptions import EventLoopException
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


# === every import path that README, docs, examples and the published library's documents use leads to its name ===


NAMES = {
    "strands_env.core": """
        Action Environment ModelFactory Observation RewardError RewardFunction RewardResult StepResult TaskContext
        TerminationReason TokenObservation
    """,
    "strands_env.core.models": "bedrock_model_factory build_model_factory openai_model_factory sglang_model_factory",
    "strands_env.environments": """
        AgentCoreCodeEnvironment ArithmeticExpressionError BackendError CalculatorEnvironment MCPEnvironment
        MCPServersEnvironment PythonEnvironment calculator evaluate python_tool
    """,
    "strands_env.eval": """
        AnswerFn CheckpointError DuplicateTaskError EvalSample EvaluationStoppedError Evaluator MetricFn Results
        answer_of read_results standard_metrics
    """,
    "strands_env.eval.benchmarks": "load_benchmark",
    "strands_env.eval.checkpoint": "CheckpointFile",
    "strands_env.rewards": """
        AllOf ExactMatchReward JudgeReward MathReward RegexReward RewardError WeightedSum WorkerLimits last_boxed
        value_key
    """,
    "strands_env.sandbox": """
        DEFAULT_LIMITS Ended Execution MODES Mode PythonSandbox SandboxError SandboxLimits SandboxUnavailableError
        available_modes
    """,
    "strands_env.slime": "make_generate",
    "strands_env.utils": "clear_clients get_cached_client get_cached_client_from_slime_args",
    "strands_sglang": """
        LoopLimitReachedError LoopLimiter MaxMessagesReachedError MaxToolCallsReachedError
        MaxToolIterationsReachedError OUTCOMES Outcome RewardRule Rollout SGLangAbortedError SGLangCancelledError
        SGLangClient SGLangClientError SGLangConnectionError SGLangContextLengthError SGLangDeadlineError
        SGLangDecodingError SGLangHTTPError SGLangModel SGLangThrottledError Segment TerminationReason Token
        TokenManager TokenizerMismatchError ToolIterationLimiter ToolLimiter ToolParseResult ToolParser Trajectory
        Turn TurnStatus clear_clients get_client get_client_from_slime_args get_tokenizer get_tool_parser
        limit_cause outcome_of register_tool_parser termination_reason
    """,
    "strands_sglang.client": "SGLangClient",
    "strands_sglang.drift": "Drift",
    "strands_sglang.exceptions": "SGLangClientError",
    "strands_sglang.families": "FAMILIES",
    "strands_sglang.local": """
        CHATML_TOOLS_TEMPLATE LocalServer LocalServerError ServerSettings UnsupportedPlatformError ensure_sglang
        ensure_smollm2 ensure_tiny_qwen2_5_vl ensure_tiny_qwen3 ensure_tiny_qwen3_moe home launch_server
        require_platform start_server
    """,
    "strands_sglang.messages": "fingerprint",
    "strands_sglang.model": "SGLangModel",
    "strands_sglang.outcomes": "OUTCOMES",
    "strands_sglang.request_fields": "REQUEST_FIELDS",
    "strands_sglang.testing": """
        Answer AnswerFunction ScriptedAnswer ScriptedExperts ScriptedFault ScriptedRefusal ScriptedRequest
        ScriptedResponse ScriptedSGLang ServedOnPort scripted_logprob
    """,
    "strands_sglang.tool_choice": "CALL_FORMATS GRAMMAR_PARAMETERS UNCONSTRAINED can_force force_call forced_call",
    "strands_sglang.tool_limiter": "ToolLimiter",
    "strands_sglang.tool_parsers": """
        AUTO DeepSeekV31ToolParser DeepSeekV32ToolParser DeepSeekV3ToolParser DeepSeekV4ToolParser GLMToolParser
        Gemma4ToolParser GraniteToolParser HarmonyToolParser HermesToolParser KimiK2ToolParser KimiK3ToolParser
        Llama3JSONToolParser Llama4PythonicToolParser MiniMaxM2ToolParser MiniMaxM3ToolParser MistralToolParser
        ParsedTurn Phi4ToolParser QwenXMLToolParser SeedOSSToolParser SmolLM3ToolParser TOOL_PARSER_REGISTRY
        ToolCallStatus ToolParseResult ToolParser UnknownToolParserError get_tool_parser register_tool_parser
    """,
    "strands_sglang.trainers.slime": """
        EpisodeEnd SlimeExportError check_reward_nonzero_std generate grpo_rewards_by_group make_generate
        make_reward to_slime_samples
    """,
    "strands_sglang.trajectory": "Trajectory",
}


@pytest.mark.parametrize("module", NAMES)
def test_a_documented_path_leads_to_its_names(module):
    imported = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(imported, name)] == []


# === names, arguments and results that published documents show for agents outside a trainer keep working ===


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


async def test_agent_answers_with_a_base_url(base_url, server, chatml_tokenizer):
    model = SGLangModel(tokenizer=chatml_tokenizer, base_url=base_url)
    agent = Agent(model=model, tools=[calculator])
    model.reset()
    result = await agent.invoke_async(QUESTION)
    assert "425" in str(result)
    assert "Result: 425" in server.requests[1].text


async def test_agent_answers_with_a_client(base_url, chatml_tokenizer):
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


async def test_token_manager_has_the_whole_episode(server, chatml_tokenizer):
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


async def test_first_segment_exists_even_if_the_first_call_fails(chatml_tokenizer):
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


async def test_tool_iteration_limiter_keeps_the_trajectory_intact(chatml_tokenizer):
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


# === `generate` functions for slime in the shapes that documents show leave samples that slime can train on ===


SYSTEM_PROMPT = "Use the calculator."
LIMIT = 3


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


async def test_answered_episode_has_what_the_server_saw(generate, chatml_tokenizer):
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
