"""Cancellation and interrupts: where they meet an agent, and how it continues."""

import asyncio
import threading

import pytest
from strands import tool
from strands.hooks import (
    AfterInvocationEvent,
    AfterToolsEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
)
from strands.types.exceptions import EventLoopException

from support.agents import call, make_agent, make_tools, needs_argument, raise_once
from support.judge import numbered, response_masks, statuses

# --- Interrupts, resumes and calls that nobody answered: results that come late, in another order, or never ---


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


# --- Cancels: what the model never said is prompt, and what it said in vain is discarded ---


# Row 11
async def test_an_answer_that_is_cancelled_while_it_streams_is_discarded(judged):
    async def cancelled(request):
        agent.cancel()
        return "Too late."

    judge = judged([cancelled, "Second."])
    agent = make_agent(judge.model)
    result = await agent.invoke_async("Question-0?")
    assert result.stop_reason == "cancelled"
    assert agent.messages[-1]["content"] == [{"text": "Cancelled by user"}]
    await agent.invoke_async("Question-1?")
    assert "Cancelled by user" in judge.server.requests[1].text
    judge.check(discarded=[0])
    judge.model.trajectory.settle(agent.messages)
    assert statuses(judge.model.trajectory) == ["discarded", "final"]
    assert "Cancelled" not in judge.trained_text()


# Row 11
@pytest.mark.parametrize("answer", ["A story.", call(expression="2 * 3"), f"First. {call(expression='2 * 3')}"])
async def test_a_signal_of_the_caller_that_is_set_at_the_first_delta_cancels(judged, answer):
    """A13: Strands looks for such a signal every 50 ms, and all of the answer is given out in less."""
    judge = judged([answer, "Second."])
    tools, ran = make_tools()
    agent = make_agent(judge.model, tools)
    signal = threading.Event()
    async for event in agent.stream_async("Question-0?", cancel_signal=signal):
        if "contentBlockDelta" in event.get("event", {}):
            signal.set()
        result = event.get("result")
    assert (result.stop_reason, ran) == ("cancelled", [])
    await agent.invoke_async("Question-1?")
    judge.check(discarded=[0])
    assert statuses(judge.model.trajectory)[0] == "discarded"


# Row 11
@pytest.mark.parametrize("before", [0, 2])
async def test_settling_discards_an_answer_that_was_cancelled_last(judged, before):
    async def cancelled(request):
        agent.cancel()
        return "Too late."

    judge = judged([*["Fine."] * before, cancelled])
    agent = make_agent(judge.model)
    for i in range(before + 1):
        await agent.invoke_async(f"Question-{i}?")
    judge.model.trajectory.settle(agent.messages)
    judge.check(discarded=[before])
    assert statuses(judge.model.trajectory) == ["committed"] * before + ["discarded"]


# Row 11
async def test_an_answer_that_is_cancelled_behind_its_last_event_is_discarded(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)
    cancelled = []
    async for event in agent.stream_async("Question-0?"):
        if "messageStop" in event.get("event", {}) and not cancelled:
            cancelled.append(event)
            agent.cancel()
    assert agent.messages[-1]["content"] == [{"text": "Cancelled by user"}]
    await agent.invoke_async("Question-1?")
    judge.check(discarded=[0])


# Row 11
@needs_argument("cancel", "message")
async def test_the_message_of_a_cancel_is_prompt(judged):
    async def cancelled(request):
        agent.cancel(message="THE USER WENT HOME")
        return "Too late."

    judge = judged([call(expression="2 * 3"), cancelled, "Back again."])
    agent = make_agent(judge.model, make_tools()[0])
    await agent.invoke_async("Compute.")
    await agent.invoke_async("Question?")
    assert "THE USER WENT HOME" in judge.server.requests[2].text
    judge.check(discarded=[1])
    assert "THE USER" not in judge.trained_text()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 11
@needs_argument("cancel", "after_current_tools")
async def test_a_cancel_behind_the_tools_leaves_nothing_to_discard(judged):
    judge = judged([call(expression="2 * 3"), "6."])
    agent = make_agent(judge.model, make_tools()[0])

    def stop(event: AfterToolsEvent):
        event.agent.cancel(after_current_tools=True)

    agent.add_hook(stop, AfterToolsEvent)
    result = await agent.invoke_async("Compute.")
    assert result.stop_reason == "cancelled"
    judge.model.trajectory.settle(agent.messages)
    assert statuses(judge.model.trajectory) == ["final"]
    await agent.invoke_async("Well?")
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 11
async def test_text_of_a_hook_that_denies_a_model_call_is_prompt(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)

    def deny(event: BeforeModelCallEvent):
        event.cancel = "NOT NOW" if len(event.agent.messages) == 3 else False

    agent.add_hook(deny, BeforeModelCallEvent)
    for i in range(3):
        await agent.invoke_async(f"Question-{i}?")
    assert len(judge.server.requests) == 2
    assert "NOT NOW" in judge.server.requests[1].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]
    assert "NOT NOW" not in judge.trained_text()


# Row 11
async def test_text_of_a_hook_that_denies_an_invocation_is_prompt(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)

    def deny(event: BeforeInvocationEvent):
        event.cancel = "CLOSED" if not event.agent.messages else False

    agent.add_hook(deny, BeforeInvocationEvent)
    for i in range(3):
        await agent.invoke_async(f"Question-{i}?")
    assert len(judge.server.requests) == 2
    assert "CLOSED" in judge.server.requests[0].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 11
async def test_text_that_ends_a_turn_behind_its_tools_is_prompt(judged):
    judge = judged([call(expression="2 * 3"), "Again."])
    agent = make_agent(judge.model, make_tools()[0])

    def end(event: AfterToolsEvent):
        event.end_turn = "ENOUGH"

    agent.add_hook(end, AfterToolsEvent)
    await agent.invoke_async("Compute.")
    await agent.invoke_async("Go on.")
    assert "ENOUGH" in judge.server.requests[1].text
    judge.check()
    assert "ENOUGH" not in judge.trained_text()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 11
async def test_tools_that_a_hook_cancels_are_a_plain_continuation(judged):
    judge = judged([call(expression="2 * 3"), "Well then."])
    tools, ran = make_tools()
    agent = make_agent(judge.model, tools)

    def cancel(event: BeforeToolsEvent):
        event.cancel = "NO TOOLS TODAY"

    agent.add_hook(cancel, BeforeToolsEvent)
    await agent.invoke_async("Compute.")
    assert ran == []
    assert "NO TOOLS TODAY" in judge.server.requests[1].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 11
async def test_a_cancelled_task_leaves_a_failed_turn_that_the_next_call_does_not_need(judged):
    asked = asyncio.Event()

    async def hang(request):
        asked.set()
        await asyncio.Event().wait()

    judge = judged(["First.", hang, "Third."])
    agent = make_agent(judge.model)
    await agent.invoke_async("Question-0?")
    running = asyncio.ensure_future(agent.invoke_async("Question-1?"))
    await asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert judge.server.aborted == [judge.server.requests[1].rid]
    await agent.invoke_async("Question-2?")
    judge.check()
    assert statuses(judge.model.trajectory) == ["committed", "failed", "answered"]
    assert response_masks(judge.model.trajectory) == [[1, 1]]
