"""Outcomes of episodes, and limits on tool loops."""

import asyncio
import json
import pickle

import httpx
import pytest
from strands import Agent, tool
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    BeforeInvocationEvent,
    MessageAddedEvent,
)
from strands.types.exceptions import ContextWindowOverflowException, EventLoopException

from strands_sglang import (
    OUTCOMES,
    RewardRule,
    SGLangClient,
    SGLangModel,
    TerminationReason,
    ToolLimiter,
    TurnStatus,
    outcome_of,
    termination_reason,
)
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from strands_sglang.tool_limiter import (
    LoopLimiter,
    LoopLimitReachedError,
    MaxMessagesReachedError,
    MaxToolCallsReachedError,
    MaxToolIterationsReachedError,
    ToolIterationLimiter,
    limit_cause,
)
from support.agents import ScriptedModel, advance, call, make_agent, make_tools, raise_once, tool_use

# --- Every row of the outcome table that an agent on a scripted server can reach ---


async def episode(model, prompt="go", **kwargs):
    """Run an agent to its end, and return its result or exception."""
    try:
        return await make_agent(model, make_tools()[0], **kwargs).invoke_async(prompt)
    except BaseException as error:
        return error


def sampled(model):
    return sum(model.token_manager.loss_mask)


CALL = call(expression="2 * 3")
LONG_QUESTION = "a question that is longer than the context of the model " * 5
STOPS = {"stop": ["END"], "stop_regex": r"\d+"}


@pytest.mark.parametrize(
    ("answers", "sampling_params", "reason"),
    [
        ([CALL, "6"], {}, TerminationReason.TASK_COMPLETE),
        (["one two END three"], STOPS, TerminationReason.TASK_COMPLETE),
        (["one 22 two"], STOPS, TerminationReason.TASK_COMPLETE),
        ([CALL, "long " * 300], {"max_new_tokens": 100}, TerminationReason.MAX_TOKENS_REACHED),
    ],
    ids=["a final answer", "a stop string", "a pattern", "max_new_tokens, inside Strands' wrappers"],
)
async def test_the_end_of_the_last_answer_is_the_reason(rollout, answers, sampling_params, reason):
    _, model = rollout(answers, sampling_params=sampling_params)
    assert termination_reason(await episode(model), trajectory=model.trajectory) is reason


async def test_max_new_tokens_is_a_truncation(rollout):
    _, model = rollout(["A long answer that does not fit."], sampling_params={"max_new_tokens": 3})
    end = await episode(model)
    assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.MAX_TOKENS_REACHED
    assert sampled(model) == 3


async def test_a_context_without_room_for_min_new_tokens_is_full(rollout):
    """The server would reject the parameter; it is the end of the context, and the episode is truncated."""
    limits = {"min_new_tokens": 32, "max_new_tokens": 64}
    server, model = rollout(["short", "never"], server={"context_length": 120}, sampling_params=limits)
    agent = make_agent(model)
    await agent.invoke_async("hi")
    with pytest.raises(ContextWindowOverflowException, match=r"at least 32 tokens \(min_new_tokens\)") as caught:
        await agent.invoke_async("word " * 20)
    reason = termination_reason(caught.value, trajectory=model.trajectory)
    assert (reason, OUTCOMES[reason].slime_status) == (TerminationReason.CONTEXT_WINDOW_OVERFLOW, "TRUNCATED")
    assert server.refusals == []


@pytest.mark.parametrize(
    "configured", [{}, {"context_window_limit": 100_000}], ids=["server's limit", "and that of context managers"]
)
async def test_a_first_prompt_that_does_not_fit_overflows_the_context(rollout, configured):
    server, model = rollout(["never"], server={"context_length": 20}, **configured)
    end = await episode(model, LONG_QUESTION)
    assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.CONTEXT_WINDOW_OVERFLOW
    assert server.requests == []
    assert model.token_manager.initial_prompt_length > 20
    assert sampled(model) == 0


async def test_overflow_reported_by_the_server_counts(rollout):
    async def unknown(base_url=None):
        return None

    server, model = rollout(["never"], server={"context_length": 20})
    model.client.context_length = unknown
    end = await episode(model, LONG_QUESTION)
    assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.CONTEXT_WINDOW_OVERFLOW
    assert len(server.refusals) == 1
    assert model.token_manager.initial_prompt_length > 20


async def test_an_observation_that_does_not_fit_overflows_the_context(rollout):
    _, model = rollout(["Fine."], server={"context_length": 300})
    agent = make_agent(model)
    await agent.invoke_async("short")
    sequence = model.token_manager.token_ids
    with pytest.raises(ContextWindowOverflowException) as caught:
        await agent.invoke_async(LONG_QUESTION * 10)
    assert termination_reason(caught.value, trajectory=model.trajectory) is TerminationReason.CONTEXT_WINDOW_OVERFLOW
    assert model.token_manager.token_ids == sequence  # ends on sampled tokens


async def test_answer_cut_off_at_the_context_limit_overflows_it(rollout):
    _, model = rollout(["long " * 900], server={"context_length": 700}, sampling_params={"max_new_tokens": 1000})
    end = await episode(model)
    assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.CONTEXT_WINDOW_OVERFLOW
    assert sampled(model) > 0


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_tool_iters": 2}, TerminationReason.MAX_TOOL_ITERATIONS_REACHED),
        ({"max_tool_calls": 3}, TerminationReason.MAX_TOOL_CALLS_REACHED),
        ({"max_messages": 3}, TerminationReason.MAX_MESSAGES_REACHED),
    ],
)
@pytest.mark.parametrize("on_limit", ["raise", "stop"])
async def test_limits_end_the_loop_on_a_complete_iteration(rollout, limits, reason, on_limit):
    _, model = rollout(lambda request: CALL)
    limiter = ToolLimiter(**limits, on_limit=on_limit)
    end = await episode(model, hooks=[limiter])
    assert isinstance(end, BaseException) is (on_limit == "raise")
    assert termination_reason(end, trajectory=model.trajectory, limiter=limiter) is reason
    assert model.token_manager.segments[-1].is_response


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"turns": 2}, TerminationReason.MAX_TURNS_REACHED),
        ({"output_tokens": 20}, TerminationReason.TOKEN_BUDGET_REACHED),
    ],
)
async def test_a_budget_of_strands_is_a_truncation(rollout, limits, reason):
    _, model = rollout(lambda request: CALL)
    end = await make_agent(model, make_tools()[0]).invoke_async("go", limits=limits)
    assert termination_reason(end) is reason


async def test_a_wall_clock_limit_is_a_timeout(rollout):
    async def hang(request):
        advance(60)
        await asyncio.Event().wait()

    server, model = rollout(hang)
    try:
        end = await asyncio.wait_for(make_agent(model).invoke_async("go"), timeout=60)
    except Exception as error:
        end = error
    assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.TIMEOUT
    assert server.aborted == [server.requests[0].rid]


@pytest.mark.parametrize("partial", ["half an answ", ""])
async def test_a_server_abort_is_neither_complete_nor_an_error(rollout, partial):
    _, model = rollout([CALL, ScriptedAnswer(partial, finish_reason="abort")])
    end = await episode(model)
    assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.ABORTED
    statuses = [turn.status for turn in model.trajectory.turns]
    assert statuses[-1] is (TurnStatus.CUT if partial else TurnStatus.FAILED)


async def test_a_cancelled_episode(rollout):
    asked = asyncio.Event()

    async def hang(request):
        asked.set()
        await asyncio.Event().wait()

    _, model = rollout(hang)
    running = asyncio.ensure_future(episode(model))
    await asked.wait()
    running.cancel()
    end = await running
    assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.CANCELLED


async def test_agent_cancel_is_a_cancellation(rollout):
    async def cancel(request):
        agent.cancel()
        return "late"

    _, model = rollout(cancel)
    agent = make_agent(model)
    assert termination_reason(await agent.invoke_async("go")) is TerminationReason.CANCELLED


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(500, text="boom"),
        httpx.Response(400, json={"error": {"message": "top_p must be in (0, 1], got 2."}}),
        httpx.Response(503, json={"object": "error", "message": "The request queue is full.", "code": 503}),
        httpx.Response(200, text="<html>hello</html>"),
        httpx.ConnectError("refused"),
    ],
    ids=["500", "400", "503", "undecodable", "refused"],
)
async def test_an_infrastructure_failure_never_gets_a_reward(chatml_tokenizer, answer):
    server = ScriptedSGLang(chatml_tokenizer, [CALL])

    async def fail_later(request):
        if request.url.path != "/generate" or not server.requests:
            return await server.transport().handle_async_request(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    client = SGLangClient("http://x", transport=httpx.MockTransport(fail_later), max_retries=1, retry_delay=0.0)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=client)
    end = await episode(model)
    reason = termination_reason(end, trajectory=model.trajectory)
    assert reason is TerminationReason.INFRASTRUCTURE_ERROR
    assert OUTCOMES[reason].reward is RewardRule.NONE
    # Only the tokens sampled before are recorded.
    assert sampled(model) == len(server.responses[0].body["output_ids"])


@pytest.mark.parametrize("return_logprob", [True, False])
async def test_nan_in_the_model_is_an_infrastructure_failure(chatml_tokenizer, return_logprob):
    """SGLang replaces the sampled token by a stop token after NaN, and reports a stop."""
    server = ScriptedSGLang(chatml_tokenizer, ["The result is 4"])

    async def fail(request):
        response = await server.transport().handle_async_request(request)
        if request.url.path != "/generate":
            return response
        body = json.loads(await response.aread())
        body["meta_info"]["finish_reason"] = {"type": "stop", "matched": "NaN happened"}
        return httpx.Response(200, json=body)

    client = SGLangClient("http://x", transport=httpx.MockTransport(fail), max_retries=0)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=client, return_logprob=return_logprob)
    end = await episode(model)
    assert "NaN happened" in str(end)
    assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.INFRASTRUCTURE_ERROR
    assert sampled(model) == 0


async def test_error_in_the_agents_own_code(rollout):
    _, model = rollout(["ok"])
    agent = make_agent(model)
    raise_once(agent, AfterModelCallEvent)
    with pytest.raises(ZeroDivisionError) as caught:
        await agent.invoke_async("go")
    assert termination_reason(caught.value, trajectory=model.trajectory) is TerminationReason.AGENT_ERROR


def test_every_reason_has_a_row_and_no_failure_has_a_reward():
    assert set(OUTCOMES) == set(TerminationReason)
    for reason, outcome in OUTCOMES.items():
        assert (outcome.slime_status == "COMPLETED") is (reason is TerminationReason.TASK_COMPLETE)
        if outcome.slime_status in ("FAILED", "ABORTED"):
            assert outcome.reward is RewardRule.NONE
        assert outcome.remove_sample is (outcome.slime_status == "FAILED")


def test_abort_that_no_trainer_requested_is_a_truncation():
    aborted = TerminationReason.ABORTED
    assert outcome_of(aborted, sampled_tokens=5, abort_requested=True).slime_status == "ABORTED"
    assert outcome_of(aborted, sampled_tokens=5).slime_status == "TRUNCATED"
    assert outcome_of(aborted, sampled_tokens=5).reward is RewardRule.NONE


@pytest.mark.parametrize("reason", TerminationReason)
def test_episode_without_sampled_tokens_has_failed(reason):
    outcome = outcome_of(reason, sampled_tokens=0)
    assert (outcome.slime_status, outcome.remove_sample) == ("FAILED", True)
    assert outcome.reward is OUTCOMES[reason].reward


# --- Tool limiter ---


RAN = []


@pytest.fixture(autouse=True)
def nothing_ran():
    RAN.clear()


@tool
def echo(word: str) -> str:
    """Say a word.

    Args:
        word: The word.
    """
    RAN.append(word)
    return word


@tool
def fail() -> str:
    """Fail."""
    raise RuntimeError("broken")


def calls(*words):
    return [tool_use(f"id-{word}", word=word) for word in words]


def agent_with(*hooks, answers):
    return Agent(model=ScriptedModel(answers), tools=[echo, fail], hooks=list(hooks), callback_handler=None)


def shape(agent):
    """Return the history as roles and kinds of blocks."""
    return [
        f"{message['role']}:{','.join(next(iter(block)) for block in message['content'])}" for message in agent.messages
    ]


LOOP = ["user:text", "assistant:toolUse", "user:toolResult"]


async def test_limit_is_raised_once_the_last_results_are_in_history():
    limiter = ToolLimiter(max_tool_iters=2)
    agent = agent_with(limiter, answers=[calls("a"), calls("b"), "never sampled"])
    with pytest.raises(EventLoopException) as caught:
        await agent.invoke_async("go")
    cause = limit_cause(caught.value)
    assert isinstance(cause, MaxToolIterationsReachedError)
    assert "2 tool iterations" in str(cause)
    assert limiter.limit_reached is cause
    assert shape(agent) == [*LOOP, *LOOP[1:]]
    assert (limiter.tool_iter_count, limiter.iteration_count, limiter.tool_call_count) == (2, 2, 2)
    assert (limiter.message_count, RAN) == (5, ["a", "b"])


@pytest.mark.parametrize("on_limit", ["raise", "stop"])
async def test_the_agent_can_be_used_again_after_the_limit(on_limit):
    limiter = ToolLimiter(max_tool_iters=1, on_limit=on_limit)
    agent = agent_with(limiter, answers=[calls("a"), "fine"])
    try:
        await agent.invoke_async("go")
    except EventLoopException as error:
        assert limit_cause(error) is not None
    assert isinstance(limiter.limit_reached, MaxToolIterationsReachedError)
    assert (await agent.invoke_async("and now?")).stop_reason == "end_turn"
    assert limiter.limit_reached is None  # that of an earlier invocation
    limiter.reset()
    assert (limiter.tool_iter_count, limiter.tool_call_count, limiter.message_count) == (0, 0, 0)
    assert limiter.max_tool_iters == 1


async def test_counts_continue_over_invocations_until_reset():
    limiter = ToolLimiter(max_tool_iters=2, on_limit="stop")
    agent = agent_with(limiter, answers=[calls("a"), "one", calls("b"), calls("c"), "two"])
    assert (await agent.invoke_async("go")).stop_reason == "end_turn"
    assert (await agent.invoke_async("continue")).stop_reason == "cancelled"
    assert limiter.tool_iter_count == 2
    limiter.reset()
    assert (await agent.invoke_async("again")).stop_reason == "end_turn"
    assert limiter.tool_iter_count == 1


async def test_parallel_calls_are_one_iteration_and_never_split():
    limiter = ToolLimiter(max_tool_calls=2)
    agent = agent_with(limiter, answers=[calls("a", "b", "c"), "never sampled"])
    with pytest.raises(EventLoopException) as caught:
        await agent.invoke_async("go")
    assert isinstance(limit_cause(caught.value), MaxToolCallsReachedError)
    assert (limiter.tool_iter_count, limiter.tool_call_count) == (1, 3)
    assert sorted(RAN) == ["a", "b", "c"]


@pytest.mark.parametrize("limits", [{"max_tool_iters": 0}, {"max_tool_calls": 0}])
def test_a_limit_of_zero_ends_with_the_first_results(limits):
    """Also if the agent is called synchronously."""
    agent = agent_with(ToolLimiter(**limits, on_limit="stop"), answers=[calls("a"), "never sampled"])
    assert agent("go").stop_reason == "cancelled"
    assert (shape(agent), RAN) == (LOOP, ["a"])


async def test_an_answer_without_tool_calls_reaches_no_tool_limit():
    limiter = ToolLimiter(max_tool_iters=0, max_tool_calls=0)
    agent = agent_with(limiter, answers=["hello"])
    assert (await agent.invoke_async("go")).stop_reason == "end_turn"
    assert (limiter.tool_iter_count, limiter.limit_reached) == (0, None)


async def test_failing_and_unknown_tools_count_like_any_other():
    limiter = ToolLimiter(max_tool_iters=2, on_limit="stop")
    answers = [[tool_use("1", "fail")], [tool_use("2", "nonexistent"), tool_use("3", word="x")], "never sampled"]
    await agent_with(limiter, answers=answers).invoke_async("go")
    assert (limiter.tool_iter_count, limiter.tool_call_count) == (2, 3)


async def test_calls_beyond_the_parallel_limit_get_an_error():
    limiter = ToolLimiter(max_parallel_tool_calls=2)
    agent = agent_with(limiter, answers=[calls("a", "b", "c", "d"), calls("e"), "done"])
    await agent.invoke_async("go")
    assert sorted(RAN) == ["a", "b", "e"]
    results = [block["toolResult"] for block in agent.messages[2]["content"]]
    assert [result["status"] for result in results] == ["success", "success", "error", "error"]
    assert "at most 2" in results[2]["content"][0]["text"]
    assert (limiter.tool_call_count, limiter.cancelled_tool_call_count) == (5, 2)


async def test_all_messages_count_and_user_messages_are_checked():
    limiter = ToolLimiter(max_messages=4)
    agent = agent_with(limiter, answers=[calls("a"), calls("b"), "never sampled"])
    with pytest.raises(EventLoopException) as caught:
        await agent.invoke_async("go")
    assert isinstance(limit_cause(caught.value), MaxMessagesReachedError)
    assert limiter.message_count == len(agent.messages) == 5


async def test_prompt_at_the_message_limit_ends_the_loop():
    limiter = ToolLimiter(max_messages=1)
    agent = agent_with(limiter, answers=["never sampled"])
    with pytest.raises(MaxMessagesReachedError):
        await agent.invoke_async("go")
    assert shape(agent) == ["user:text"]
    assert agent.model.calls == []


async def test_prompt_at_the_message_limit_is_answered_with_stop():
    limiter = ToolLimiter(max_messages=1, on_limit="stop")
    agent = agent_with(limiter, answers=[calls("a"), "never sampled"])
    result = await agent.invoke_async("go")
    assert result.stop_reason == "cancelled"
    assert shape(agent)[-1].startswith("user:")
    assert len(agent.model.calls) == 1
    assert isinstance(limiter.limit_reached, MaxMessagesReachedError)


def test_error_in_a_limit_handler_is_not_the_limit():
    try:
        try:
            raise MaxMessagesReachedError("limit")
        except MaxMessagesReachedError:
            raise ValueError("bug in the handler")  # noqa: B904
    except ValueError as error:
        assert limit_cause(error) is None


async def test_shared_limiter_counts_the_sum_of_its_agents():
    limiter = ToolLimiter(max_tool_iters=2, on_limit="stop")
    first = agent_with(limiter, answers=[calls("a"), "done"])
    second = agent_with(limiter, answers=[calls("b"), "never sampled"])
    assert (await first.invoke_async("go")).stop_reason == "end_turn"
    assert (await second.invoke_async("go")).stop_reason == "cancelled"
    assert limiter.tool_iter_count == 2


async def test_an_invocation_counts_although_a_shorter_one_of_its_agent_has_ended():
    limiter = ToolLimiter(max_tool_iters=2, on_limit="stop")

    @tool
    async def ask_itself() -> str:
        """Ask."""
        return str(await agent.invoke_async("short"))

    answers = [[tool_use("id-ask", name="ask_itself")], "answer", calls("a"), "never sampled"]
    agent = Agent(
        model=ScriptedModel(answers),
        tools=[echo, ask_itself],
        hooks=[limiter],
        callback_handler=None,
        concurrent_invocation_mode="unsafe_reentrant",
    )
    assert (await agent.invoke_async("go")).stop_reason == "cancelled"
    assert (limiter.tool_iter_count, RAN) == (2, ["a"])
    limiter.reset()
    agent.tool.echo(word="by hand")
    assert limiter.message_count == 0


@pytest.mark.parametrize("moment", [BeforeInvocationEvent, AfterInvocationEvent])
async def test_direct_tool_calls_do_not_count_after_an_error_of_another_hook(moment):
    def refuse(_):
        raise ValueError("refused")

    limiter = ToolLimiter()
    for order in ([limiter, refuse], [refuse, limiter]):
        agent = agent_with(answers=["hello"] * 2)
        for hook in order:
            agent.hooks.add_hook(hook) if hook is limiter else agent.add_hook(hook, moment)
        with pytest.raises(ValueError, match="refused"):
            await agent.invoke_async("go")
        limiter.reset()
        agent.tool.echo(word="by hand")
        assert limiter.message_count == 0


async def test_a_pickled_limiter_goes_on_counting():
    limiter = ToolLimiter(max_tool_iters=2, on_limit="stop")
    await agent_with(limiter, answers=[calls("a"), "done"]).invoke_async("go")
    limiter = pickle.loads(pickle.dumps(limiter))
    agent = agent_with(limiter, answers=[calls("b"), "never sampled"])
    assert (await agent.invoke_async("go")).stop_reason == "cancelled"
    assert str(pickle.loads(pickle.dumps(limiter)).limit_reached) == "the limit of 2 tool iterations was reached"


async def test_direct_tool_calls_and_given_history_do_not_count():
    limiter = ToolLimiter(max_tool_iters=1, on_limit="stop")
    agent = agent_with(limiter, answers=["hello"])
    agent.tool.echo(word="by hand")
    assert RAN == ["by hand"]
    assert (await agent.invoke_async("go")).stop_reason == "end_turn"
    assert (limiter.tool_iter_count, limiter.message_count) == (0, 2)


async def test_other_hooks_see_the_message_that_reaches_the_limit():
    seen = []
    agent = agent_with(ToolLimiter(max_tool_iters=1), answers=[calls("a"), "never sampled"])
    agent.add_hook(lambda event: seen.append(event.message["role"]), MessageAddedEvent)
    with pytest.raises(EventLoopException):
        await agent.invoke_async("go")
    assert seen == ["user", "assistant", "user"]


async def test_aliases_limit_the_same_way():
    assert LoopLimiter is ToolLimiter
    limiter = ToolIterationLimiter(max_iterations=1)
    agent = agent_with(limiter, answers=[calls("a"), "never sampled"])
    with pytest.raises(EventLoopException) as caught:
        await agent.invoke_async("go")
    assert isinstance(limit_cause(caught.value), MaxToolIterationsReachedError)
    assert (limiter.iteration_count, limiter.max_iterations) == (1, 1)


@pytest.mark.parametrize("name", ["max_tool_iters", "max_tool_calls", "max_parallel_tool_calls", "max_messages"])
@pytest.mark.parametrize("value", [-1, 1.5, "3", True])
def test_invalid_limit_is_rejected_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        ToolLimiter(**{name: value})


def test_invalid_arguments_of_the_aliases_are_rejected():
    with pytest.raises(ValueError, match="max_iterations"):
        ToolIterationLimiter(max_iterations=-1)
    with pytest.raises(ValueError, match="on_limit"):
        ToolLimiter(on_limit="explode")  # type: ignore[arg-type]


def test_cause_is_found_at_any_depth():
    limit = MaxToolCallsReachedError("enough")
    assert limit_cause(limit) is limit
    assert limit_cause(EventLoopException(limit)) is limit
    try:
        try:
            try:
                raise limit
            except LoopLimitReachedError as error:
                raise EventLoopException(error) from error
        except EventLoopException as error:
            raise RuntimeError("episode ended") from error
    except RuntimeError as error:
        assert limit_cause(error) is limit


def test_other_errors_have_no_limit_as_their_cause():
    error = RuntimeError("no")
    error.__context__ = ValueError("other")
    error.__context__.__context__ = error
    assert limit_cause(error) is None
    assert limit_cause(None) is None
