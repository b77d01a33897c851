"""What a model records of calls that were cut short from outside: cancelled tasks, `agent.cancel()`, deadlines."""

from __future__ import annotations

import asyncio
import threading

import pytest
from pydantic import BaseModel

from strands_sglang import (
    SGLangCancelledError,
    SGLangDeadlineError,
    SGLangModel,
    TerminationReason,
    TurnStatus,
    outcome_of,
    termination_reason,
)
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from support.agents import call, make_agent, make_tools

QUESTION = [{"role": "user", "content": [{"text": "hi"}]}]


class Endless:
    """An answer that goes on until it is aborted, and then is what was sampled until then."""

    def __init__(self, sampled="The beginning of"):
        self.sampled = sampled
        self.started = asyncio.Event()

    async def __call__(self, request):
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return self.sampled


async def cancelled_task(model, endless, **kwargs):
    task = asyncio.create_task(make_agent(model, **kwargs).invoke_async("go"))
    await endless.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_task_leaves_a_cut_turn_with_what_was_sampled(rollout):
    endless = Endless()
    server, model = rollout([endless])
    await cancelled_task(model, endless)
    [turn] = model.trajectory.turns
    assert turn.status is TurnStatus.CUT
    assert isinstance(turn.cause, asyncio.CancelledError)
    assert list(turn.output_ids) == server.responses[0].body["output_ids"] != []
    assert len(turn.generation.logprobs) == len(turn.output_ids)
    assert server.running == []
    [sequence] = model.trajectory.sequences()
    assert sum(sequence.loss_mask) == len(turn.output_ids)


async def test_a_cancelled_task_with_nothing_sampled_leaves_a_failed_turn(rollout):
    endless = Endless("")
    _, model = rollout([endless])
    await cancelled_task(model, endless)
    [turn] = model.trajectory.turns
    assert turn.status is TurnStatus.FAILED
    assert isinstance(turn.cause, asyncio.CancelledError)


async def test_the_same_call_after_a_cancelled_one_starts_anew(rollout):
    endless = Endless()
    server, model = rollout([endless, "The whole answer."])
    await cancelled_task(model, endless)
    await make_agent(model).invoke_async("go")
    cut, answered = model.trajectory.turns
    assert server.requests[0].input_ids == server.requests[1].input_ids
    assert (cut.status, answered.status) == (TurnStatus.CUT, TurnStatus.ANSWERED)


async def test_agent_cancel_aborts_the_request_and_the_agent_ends_as_cancelled(rollout):
    endless = Endless()
    server, model = rollout([call(expression="2 * 3"), endless])
    tools, _ = make_tools()
    agent = make_agent(model, tools)
    task = asyncio.create_task(agent.invoke_async("go"))
    await endless.started.wait()
    agent.cancel()
    result = await task
    assert result.stop_reason == "cancelled"
    assert server.running == [] and len(server.aborted) == 1
    first, turn = model.trajectory.turns
    assert turn.parent is first
    assert turn.status is TurnStatus.CUT
    assert isinstance(turn.cause, SGLangCancelledError)
    assert list(turn.output_ids) == server.responses[1].body["output_ids"] != []
    assert termination_reason(result, trajectory=model.trajectory) is TerminationReason.CANCELLED


async def test_an_agent_goes_on_after_a_cancel(rollout):
    endless = Endless()
    server, model = rollout([endless, "Better."])
    agent = make_agent(model)
    task = asyncio.create_task(agent.invoke_async("go"))
    await endless.started.wait()
    agent.cancel()
    await task
    assert str(await agent.invoke_async("once more")).strip() == "Better."
    assert "Cancelled by user" in server.requests[1].text


async def test_a_signal_that_is_set_already_sends_nothing_and_records_nothing(rollout):
    server, model = rollout(["never"])
    signal = threading.Event()
    signal.set()
    events = [event async for event in model.stream(QUESTION, cancel_signal=signal)]
    assert events[-1] == {"messageStop": {"stopReason": "cancelled"}}
    assert server.requests == [] and len(model.trajectory) == 0


async def test_structured_output_can_be_cancelled(rollout):
    class Answer(BaseModel):
        number: int

    server, model = rollout(["never"])
    signal = threading.Event()
    signal.set()
    with pytest.raises(SGLangCancelledError):
        [event async for event in model.structured_output(Answer, QUESTION, cancel_signal=signal)]
    assert server.requests == []


async def test_a_call_past_its_deadline_is_a_cut_turn_and_a_timeout(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, [Endless()])
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client(deadline=0.2))
    with pytest.raises(SGLangDeadlineError) as caught:
        await make_agent(model).invoke_async("go")
    [turn] = model.trajectory.turns
    assert turn.status is TurnStatus.CUT
    reason = termination_reason(caught.value, trajectory=model.trajectory)
    assert reason is TerminationReason.TIMEOUT
    assert outcome_of(reason, sampled_tokens=len(turn.output_ids)).slime_status == "TRUNCATED"


async def test_a_deadline_with_no_server_at_work_is_an_infrastructure_error():
    assert termination_reason(SGLangDeadlineError("late")) is TerminationReason.INFRASTRUCTURE_ERROR


async def test_a_cancelled_call_is_a_cancelled_episode():
    assert termination_reason(SGLangCancelledError("cancelled")) is TerminationReason.CANCELLED


# --- routing keys ---


def keys(server):
    return [request.headers["x-smg-routing-key"] for request in server.requests]


async def test_all_calls_of_a_conversation_and_its_forks_have_one_key(rollout):
    server, model = rollout([call(expression="2 * 3"), "6", "six", "again"])
    tools, _ = make_tools()
    agent = make_agent(model, tools)
    await agent.invoke_async("go")
    fork = make_agent(model, tools, messages=agent.messages[:2])
    await fork.invoke_async("and now?")
    await agent.invoke_async("more")
    assert len(server.requests) == 4
    assert len(set(keys(server))) == 1
    assert server.requests[0].body["routing_key"] == keys(server)[0]


async def test_other_conversations_and_other_episodes_have_other_keys(rollout):
    server, model = rollout(lambda request: "ok")
    await make_agent(model).invoke_async("go")
    await make_agent(model).invoke_async("something else")
    model.reset()
    await make_agent(model).invoke_async("go")
    assert len(set(keys(server))) == 3


async def test_a_retried_first_call_has_the_key_that_it_had(rollout):
    server, model = rollout([ScriptedAnswer("cut", finish_reason="abort"), "ok"])
    for _ in range(2):
        await asyncio.gather(make_agent(model).invoke_async("go"), return_exceptions=True)
    assert len(server.requests) == 2 and len(set(keys(server))) == 1


async def test_a_configured_key_is_used_for_everything_and_can_be_changed(rollout):
    server, model = rollout(lambda request: "ok", routing_key="episode-7")
    await make_agent(model).invoke_async("go")
    await make_agent(model).invoke_async("something else")
    model.update_config(routing_key="episode-8")
    await make_agent(model).invoke_async("go")
    assert keys(server) == ["episode-7", "episode-7", "episode-8"]
    with pytest.raises(ValueError, match="routing_key"):
        model.update_config(routing_key="a\nb")
