"""Every row of the outcome table that an agent on a scripted server can reach."""

import asyncio
import json

import httpx
import pytest
from strands.hooks import AfterModelCallEvent, HookProvider
from strands.types.exceptions import ContextWindowOverflowException

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
from support.agents import advance, call, make_agent, make_tools


async def episode(model, prompt="go", **kwargs):
    """Run an agent to its end: what it returned, or the exception that it raised."""
    tools, _ = make_tools()
    try:
        return await make_agent(model, tools, **kwargs).invoke_async(prompt)
    except BaseException as error:
        return error


def sampled(model):
    return sum(model.token_manager.loss_mask)


async def test_a_final_answer_completes_the_task(rollout):
    _, model = rollout([call(expression="2 * 3"), "6"])
    end = await episode(model)
    assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.TASK_COMPLETE


async def test_max_new_tokens_is_a_truncation(rollout):
    _, model = rollout(["A long answer that does not fit."], sampling_params={"max_new_tokens": 3})
    end = await episode(model)
    assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.MAX_TOKENS_REACHED
    assert sampled(model) == 3


async def test_max_new_tokens_in_a_later_turn_is_found_through_the_wrappers(rollout):
    _, model = rollout([call(expression="2 * 3"), "long " * 300], sampling_params={"max_new_tokens": 100})
    end = await episode(model)
    assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.MAX_TOKENS_REACHED


async def test_a_context_without_room_for_min_new_tokens_is_full(rollout):
    """A7: what the server would refuse as a wrong parameter is the end of the context, and trained as truncated."""
    limits = {"min_new_tokens": 32, "max_new_tokens": 64}
    server, model = rollout(["short", "never"], server={"context_length": 120}, sampling_params=limits)
    agent = make_agent(model)
    await agent.invoke_async("hi")
    with pytest.raises(ContextWindowOverflowException, match=r"at least 32 tokens \(min_new_tokens\)") as caught:
        await agent.invoke_async("word " * 20)
    reason = termination_reason(caught.value, trajectory=model.trajectory)
    assert (reason, OUTCOMES[reason].slime_status) == (TerminationReason.CONTEXT_WINDOW_OVERFLOW, "TRUNCATED")
    assert server.refusals == []


async def test_a_first_prompt_that_does_not_fit_overflows_the_context(rollout):
    server, model = rollout(["never"], server={"context_length": 20})
    end = await episode(model, "a question that is longer than the context of the model " * 5)
    assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.CONTEXT_WINDOW_OVERFLOW
    assert server.requests == []
    assert model.token_manager.initial_prompt_length > 20
    assert sampled(model) == 0


async def test_an_overflow_that_only_the_server_knows_of_is_one_too(rollout):
    _, model = rollout(["never"], server={"context_length": 20}, context_window_limit=100_000)
    end = await episode(model, "a question that is longer than the context of the model " * 5)
    assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.CONTEXT_WINDOW_OVERFLOW
    assert model.token_manager.initial_prompt_length > 20


async def test_an_observation_that_does_not_fit_overflows_the_context(rollout):
    _, model = rollout(["Fine."], server={"context_length": 300})
    agent = make_agent(model)
    await agent.invoke_async("short")
    sequence = model.token_manager.token_ids
    try:
        end = await agent.invoke_async("a question that is longer than the context of the model " * 50)
    except Exception as error:
        end = error
    assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.CONTEXT_WINDOW_OVERFLOW
    assert model.token_manager.token_ids == sequence  # ends on sampled tokens


async def test_an_answer_cut_off_where_the_context_ends_overflows_it(rollout):
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
    _, model = rollout(lambda request: call(expression="2 * 3"))
    limiter = ToolLimiter(**limits, on_limit=on_limit)
    end = await episode(model, hooks=[limiter])
    assert isinstance(end, BaseException) is (on_limit == "raise")
    assert termination_reason(end, trajectory=model.trajectory, limiter=limiter) is reason
    assert model.token_manager.segments[-1].is_response


async def test_the_budget_of_turns_is_a_truncation(rollout):
    _, model = rollout(lambda request: call(expression="2 * 3"))
    tools, _ = make_tools()
    end = await make_agent(model, tools).invoke_async("go", limits={"turns": 2})
    assert termination_reason(end) is TerminationReason.MAX_TURNS_REACHED


async def test_the_budget_of_tokens_is_a_truncation(rollout):
    _, model = rollout(lambda request: call(expression="2 * 3"))
    tools, _ = make_tools()
    end = await make_agent(model, tools).invoke_async("go", limits={"output_tokens": 20})
    assert termination_reason(end) is TerminationReason.TOKEN_BUDGET_REACHED


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
    _, model = rollout([call(expression="2 * 3"), ScriptedAnswer(partial, finish_reason="abort")])
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
    server = ScriptedSGLang(chatml_tokenizer, [call(expression="2 * 3")])

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
    # What was sampled before is still there, and nothing else.
    assert sampled(model) == len(server.responses[0].body["output_ids"])


@pytest.mark.parametrize("return_logprob", [True, False])
async def test_a_model_that_computes_no_numbers_is_an_infrastructure_failure(chatml_tokenizer, return_logprob):
    """A8: SGLang puts a stop token in the place of what such a model sampled, and calls that a stop."""
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


async def test_stop_strings_and_patterns_of_the_request_end_an_answer(rollout):
    _, model = rollout(["one two END three", "one 22 two"], sampling_params={"stop": ["END"], "stop_regex": r"\d+"})
    for _ in range(2):
        end = await episode(model)
        assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.TASK_COMPLETE


async def test_an_error_of_the_agents_own_code(rollout):
    class Bug(HookProvider):
        def register_hooks(self, registry, **kwargs):
            registry.add_callback(AfterModelCallEvent, self.fail)

        def fail(self, event):
            raise ZeroDivisionError("bug")

    _, model = rollout(["ok"])
    end = await episode(model, hooks=[Bug()])
    assert termination_reason(end, trajectory=model.trajectory) is TerminationReason.AGENT_ERROR


def test_every_reason_has_a_row_and_no_failure_has_a_reward():
    assert set(OUTCOMES) == set(TerminationReason)
    for reason, outcome in OUTCOMES.items():
        assert (outcome.slime_status == "COMPLETED") is (reason is TerminationReason.TASK_COMPLETE)
        if outcome.slime_status in ("FAILED", "ABORTED"):
            assert outcome.reward is RewardRule.NONE
        assert outcome.remove_sample is (outcome.slime_status == "FAILED")


def test_an_abort_that_the_trainer_did_not_ask_for_is_a_truncation():
    aborted = TerminationReason.ABORTED
    assert outcome_of(aborted, sampled_tokens=5, abort_requested=True).slime_status == "ABORTED"
    assert outcome_of(aborted, sampled_tokens=5).slime_status == "TRUNCATED"
    assert outcome_of(aborted, sampled_tokens=5).reward is RewardRule.NONE


@pytest.mark.parametrize("reason", TerminationReason)
def test_an_episode_that_sampled_nothing_has_failed_whatever_its_reason(reason):
    outcome = outcome_of(reason, sampled_tokens=0)
    assert (outcome.slime_status, outcome.remove_sample) == ("FAILED", True)
    assert outcome.reward is OUTCOMES[reason].reward
