"""What is added to a call for that call only, and answers that middleware asks for more than once or makes up."""

import asyncio

import pytest
from strands.vended_plugins.context_injector import ContextInjector

from support.agents import call, make_agent, make_tools
from support.judge import numbered, response_masks, statuses
from support.strands_features import needs_module

needs_middleware = needs_module("strands.middleware")


async def collect(events):
    return [event async for event in events]


# Row 5
async def test_text_that_is_injected_for_one_call_stands_in_that_prompt_only(judged):
    judge = judged([call(expression="2 * 3"), "6.", "Bye."])
    agent = make_agent(judge.model, make_tools()[0], plugins=[ContextInjector(lambda context: "<now>noon</now>")])
    await agent.invoke_async("Compute.")
    await agent.invoke_async("Thanks.")
    assert [request.text.count("<now>") for request in judge.server.requests] == [1, 0, 1]
    judge.check()
    # The third call goes on from the second one, whose prompt held no injected text.
    assert response_masks(judge.model.trajectory) == [[1], [1, 1]]
    judge.model.trajectory.settle(agent.messages)
    assert "discarded" not in statuses(judge.model.trajectory)
    assert "message 0 (user) is not the recorded one" in judge.model.trajectory.turns[1].reason


# Row 5
async def test_text_that_is_injected_anew_at_every_call_stands_once_in_each_prompt(judged):
    judge = judged([call(expression="2 * 3"), "6.", "Bye."])
    minutes = iter(range(9))
    plugin = ContextInjector(lambda context: f"<now>minute {next(minutes)}</now>", trigger="everyTurn")
    agent = make_agent(judge.model, make_tools()[0], plugins=[plugin])
    await agent.invoke_async("Compute.")
    await agent.invoke_async("Thanks.")
    assert [request.text.count("<now>") for request in judge.server.requests] == [1, 1, 1]
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1], [1], [1]]


# Row 5
@needs_middleware
async def test_a_system_prompt_and_tools_replaced_for_one_call_are_in_its_prompt_and_open_a_sequence(judged):
    from strands.middleware import InvokeModelStage

    judge = judged([call(expression="2 * 3"), "6.", "Bye."])
    calls = iter(range(9))

    async def replace(context):
        if next(calls) != 1:
            return context
        return context.replace(system_prompt="Be long-winded.", tool_specs=[])

    agent = make_agent(judge.model, make_tools()[0])
    agent.add_middleware(InvokeModelStage.Input, replace)
    await agent.invoke_async("Compute.")
    await agent.invoke_async("Thanks.")
    assert ["Be long-winded." in request.text for request in judge.server.requests] == [False, True, False]
    judge.check()
    # The third call goes on from the first one, whose system prompt and tools it has; the answer between is prompt.
    assert response_masks(judge.model.trajectory) == [[1], [1, 1]]


# Row 6
@needs_middleware
@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("at_once", [True, False])
async def test_of_several_answers_to_one_question_the_ones_not_taken_are_discarded(judged, kept, at_once):
    from strands.middleware import InvokeModelStage

    judge = judged(numbered)

    async def best_of_three(context, next_fn):
        streams = [collect(next_fn(context)) for _ in range(3)]
        answers = await asyncio.gather(*streams) if at_once else [await stream for stream in streams]
        for event in answers[kept]:
            yield event

    agent = make_agent(judge.model)
    agent.add_middleware(InvokeModelStage, best_of_three)
    await agent.invoke_async("Question-0?")
    await agent.invoke_async("Question-1?")
    judge.model.trajectory.settle(agent.messages)
    judge.check(discarded={0, 1, 2, 3, 4, 5} - {kept, 3 + kept})
    expected = ["discarded"] * 6
    expected[kept], expected[3 + kept] = "committed", "final"
    assert statuses(judge.model.trajectory) == expected
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 6
@needs_middleware
@pytest.mark.parametrize("kept", [0, 1, 2])
async def test_the_next_call_tells_which_of_several_answers_was_taken(judged, kept):
    from strands.middleware import InvokeModelStage

    judge = judged(numbered)
    asked = iter([3, 1])

    async def best_of(context, next_fn):
        answers = await asyncio.gather(*(collect(next_fn(context)) for _ in range(next(asked))))
        for event in answers[kept % len(answers)]:
            yield event

    agent = make_agent(judge.model)
    agent.add_middleware(InvokeModelStage, best_of)
    await agent.invoke_async("Question-0?")
    await agent.invoke_async("Question-1?")
    judge.check(discarded={0, 1, 2} - {kept})


# Row 6
@needs_middleware
@pytest.mark.parametrize("goes_on", [True, False])
async def test_of_several_answers_that_say_the_same_one_is_trained(judged, goes_on):
    from strands.middleware import InvokeModelStage

    judge = judged(lambda request: "Always the same.")
    asked = iter([3, 1])

    async def best_of(context, next_fn):
        answers = await asyncio.gather(*(collect(next_fn(context)) for _ in range(next(asked))))
        for event in answers[0]:
            yield event

    agent = make_agent(judge.model)
    agent.add_middleware(InvokeModelStage, best_of)
    await agent.invoke_async("Question-0?")
    if goes_on:
        await agent.invoke_async("Question-1?")
    judge.model.trajectory.settle(agent.messages)
    assert statuses(judge.model.trajectory).count("discarded") == 2
    assert response_masks(judge.model.trajectory) == ([[1, 1]] if goes_on else [[1]])


# Row 6
@needs_middleware
async def test_an_answer_that_middleware_made_up_is_prompt(judged):
    from strands.middleware import InvokeModelStage, ModelStopReason

    judge = judged(numbered)
    calls = iter(range(9))

    async def cached(context, next_fn):
        if next(calls) == 1:
            message = {"role": "assistant", "content": [{"text": "FROM THE CACHE"}]}
            usage = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
            yield ModelStopReason(stop_reason="end_turn", message=message, usage=usage, metrics={"latencyMs": 0})
            return
        async for event in next_fn(context):
            yield event

    agent = make_agent(judge.model)
    agent.add_middleware(InvokeModelStage, cached)
    for i in range(3):
        await agent.invoke_async(f"Question-{i}?")
    judge.check()
    assert len(judge.server.requests) == 2
    assert "FROM THE CACHE" in judge.server.requests[1].text
    assert "FROM THE CACHE" not in judge.trained_text()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 6
@needs_middleware
async def test_an_answer_that_middleware_rewrites_is_recorded_and_its_new_form_is_prompt(judged):
    from strands.middleware import InvokeModelStage

    judge = judged(numbered)

    async def redact(result):
        result.result["stop"][1]["content"] = [{"text": "REDACTED"}]
        return result

    agent = make_agent(judge.model)
    agent.add_middleware(InvokeModelStage.Output, redact)
    await agent.invoke_async("Question-0?")
    await agent.invoke_async("Question-1?")
    assert "REDACTED" in judge.server.requests[1].text
    assert "Answer-0" not in judge.server.requests[1].text
    judge.check(discarded=[0, 1] if judge.told else [0])  # nothing but hooks knows of the last one
    assert "REDACTED" not in judge.trained_text()
