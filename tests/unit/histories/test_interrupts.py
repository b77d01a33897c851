"""Interrupts, resumes and calls that nobody answered: results that come late, in another order, or never."""

import asyncio

import pytest
from strands import tool
from strands.hooks import AfterInvocationEvent, BeforeToolCallEvent
from strands.types.exceptions import EventLoopException

from support.agents import call, make_agent, make_tools, raise_once
from support.judge import numbered, response_masks


def responses(result, answer):
    return [{"interruptResponse": {"interruptId": i.id, "response": answer}} for i in result.interrupts]


def ask_a_person(event: BeforeToolCallEvent):
    if event.interrupt("approve", reason="may it?") != "yes":
        event.cancel_tool = "DENIED BY A PERSON"


# Row 13
async def test_a_call_that_a_cancelled_task_left_unanswered_is_extended(judged):
    started = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait for ever."""
        started.set()
        await asyncio.Event().wait()
        return "never"

    judge = judged([call("wait"), "Understood."])
    agent = make_agent(judge.model, [wait])
    running = asyncio.ensure_future(agent.invoke_async("Wait."))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await agent.invoke_async("What happened?")
    assert "Tool was interrupted." in judge.server.requests[1].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 13
async def test_a_call_that_a_raising_hook_left_unanswered_runs_without_a_model_call(judged):
    judge = judged([call(expression="2 * 3"), "6."])
    tools, ran = make_tools()
    agent = make_agent(judge.model, tools)
    raise_once(agent, BeforeToolCallEvent)
    with pytest.raises(EventLoopException):
        await agent.invoke_async("Compute.")
    assert ran == []
    await agent.invoke_async(None)
    assert ran == ["2 * 3"]
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 14
async def test_an_interrupted_call_goes_on_behind_its_resume(judged):
    judge = judged([call(expression="2 * 3"), "6."])
    tools, ran = make_tools()
    agent = make_agent(judge.model, tools)
    agent.add_hook(ask_a_person, BeforeToolCallEvent)
    result = await agent.invoke_async("Compute.")
    assert (result.stop_reason, ran) == ("interrupt", [])
    await agent.invoke_async(responses(result, "yes"))
    assert ran == ["2 * 3"]
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 14
async def test_results_of_interrupted_calls_come_in_the_order_of_the_calls(judged):
    judge = judged(["".join(call(expression=f"{i} * 111") for i in (2, 3, 4)), "Done."])
    agent = make_agent(judge.model, make_tools()[0])

    def ask(event: BeforeToolCallEvent):
        if event.tool_use["input"]["expression"].startswith("2"):
            event.interrupt("approve", reason="may it?")

    agent.add_hook(ask, BeforeToolCallEvent)
    result = await agent.invoke_async("Compute.")
    await agent.invoke_async(responses(result, "yes"))
    results = [block["toolResult"]["content"][0]["text"] for block in agent.messages[2]["content"]]
    assert results == ["333", "444", "222"]  # as Strands keeps them
    shown = judge.server.requests[1].text
    assert shown.index("222") < shown.index("333") < shown.index("444")
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 14
async def test_a_denied_call_is_told_to_the_model(judged):
    judge = judged([call(expression="2 * 3"), "A pity."])
    tools, ran = make_tools()
    agent = make_agent(judge.model, tools)
    agent.add_hook(ask_a_person, BeforeToolCallEvent)
    result = await agent.invoke_async("Compute.")
    await agent.invoke_async(responses(result, "no"))
    assert ran == []
    assert "DENIED BY A PERSON" in judge.server.requests[1].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 22
async def test_an_invocation_that_a_hook_resumes_is_extended(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)

    def resume(event: AfterInvocationEvent):
        if len(event.agent.messages) < 6:
            event.resume = f"More-{len(event.agent.messages)}!"

    agent.add_hook(resume, AfterInvocationEvent)
    await agent.invoke_async("Question?")
    judge.check()
    assert "More-4!" in judge.server.requests[2].text
    assert response_masks(judge.model.trajectory) == [[1, 1, 1]]


# Row 22
async def test_input_that_is_merged_into_a_message_that_was_seen_opens_a_sequence(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)
    await agent.invoke_async("Question-0?")
    agent.messages.pop()  # the answer, so that a user message is the last one
    agent.messages[-1]["content"].append({"text": "And more."})
    await agent.invoke_async(None)
    assert "And more." in judge.server.requests[1].text
    judge.model.trajectory.settle(agent.messages)
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1], [1]]
