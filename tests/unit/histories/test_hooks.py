"""Hooks: what they edit in the history, and the calls that they make the agent repeat."""

import pytest
from strands import ModelRetryStrategy, tool
from strands.hooks import (
    AfterModelCallEvent,
    AfterToolCallEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    MessageAddedEvent,
)

from strands_sglang import SGLangAbortedError
from strands_sglang.testing import ScriptedAnswer
from support.agents import call, make_agent, make_tools, raise_once
from support.judge import numbered, response_masks, statuses


# Row 7
async def test_a_tool_result_that_a_hook_replaces_is_what_the_model_sees(judged):
    judge = judged([call(expression="2 * 3"), "Fine."])
    agent = make_agent(judge.model, make_tools()[0])

    def replace(event: AfterToolCallEvent):
        event.result = {**event.result, "content": [{"text": "REPLACED"}]}

    agent.add_hook(replace, AfterToolCallEvent)
    await agent.invoke_async("Compute.")
    assert "REPLACED" in judge.server.requests[1].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 7
async def test_input_that_a_hook_replaces_for_the_tool_only_leaves_the_call_as_it_was_sampled(judged):
    judge = judged([call(expression="2 * 3"), "Fine."])
    tools, ran = make_tools()
    agent = make_agent(judge.model, tools)

    def replace(event: BeforeToolCallEvent):
        event.tool_use = {**event.tool_use, "input": {"expression": "5 * 5"}}

    agent.add_hook(replace, BeforeToolCallEvent)
    await agent.invoke_async("Compute.")
    assert ran == ["5 * 5"]
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 7
async def test_input_that_a_hook_edits_in_the_history_opens_a_sequence_and_the_call_is_still_trained(judged):
    judge = judged([call(expression="2 * 3"), "Fine.", "Bye."])
    tools, ran = make_tools()
    agent = make_agent(judge.model, tools)

    def edit(event: BeforeToolCallEvent):
        event.tool_use["input"]["expression"] = "5 * 5"

    agent.add_hook(edit, BeforeToolCallEvent)
    await agent.invoke_async("Compute.")
    await agent.invoke_async("Thanks.")
    assert ran == ["5 * 5"]
    assert '{"expression": "2 * 3"}' not in judge.server.requests[1].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1], [1, 1]]
    judge.model.trajectory.settle(agent.messages)
    assert statuses(judge.model.trajectory) == ["committed", "committed", "final"]


# Row 7
async def test_an_edited_call_of_an_episode_that_was_stopped_behind_it_is_final(judged):
    judge = judged([call(expression="2 * 3")])
    agent = make_agent(judge.model, make_tools()[0])

    def edit(event: BeforeToolCallEvent):
        event.tool_use["input"]["expression"] = "5 * 5"

    agent.add_hook(edit, BeforeToolCallEvent)
    await agent.invoke_async("Compute.", limits={"turns": 1})
    judge.model.trajectory.settle(agent.messages)
    judge.check()
    assert statuses(judge.model.trajectory) == ["final"]


# Row 7
@pytest.mark.parametrize("event_type", [AfterModelCallEvent, MessageAddedEvent])
async def test_an_answer_whose_text_a_hook_replaces_is_discarded_and_the_new_text_is_prompt(judged, event_type):
    judge = judged(numbered)
    agent = make_agent(judge.model)

    def redact(event):
        message = event.message if event_type is MessageAddedEvent else event.stop_response.message
        if message["role"] == "assistant":
            message["content"] = [{"text": "REDACTED"}]

    agent.add_hook(redact, event_type)
    await agent.invoke_async("Question-0?")
    await agent.invoke_async("Question-1?")
    assert "REDACTED" in judge.server.requests[1].text
    assert "Answer-0" not in judge.server.requests[1].text
    judge.model.trajectory.settle(agent.messages)
    judge.check(discarded=[0, 1])
    assert "REDACTED" not in judge.trained_text()


# Row 7
@pytest.mark.parametrize("settled", [True, False])
async def test_that_a_hook_replaces_answers_is_told_once_with_what_differs(judged, caplog, settled):
    judge = judged(lambda request: f"<think>\nhm\n</think>\n\n{numbered(request)}")
    agent = make_agent(judge.model)

    def redact(event: MessageAddedEvent):
        if event.message["role"] == "assistant":
            event.message["content"] = [{"text": "REDACTED"}]

    agent.add_hook(redact, MessageAddedEvent)
    for i in range(1 if settled else 3):
        await agent.invoke_async(f"Question-{i}?")
    if settled:
        judge.model.trajectory.settle(agent.messages)
    (warning,) = [record.getMessage() for record in caplog.records if "was replaced" in record.getMessage()]
    said = "message 1 (assistant) stands in its place, with no reasoning, other text"
    assert said in warning
    assert "call=<0>" in warning
    assert said in judge.model.trajectory.explain().splitlines()[0]
    if not settled:
        opened = judge.model.trajectory.turns[1].reason
        assert "message 1 (assistant) is not the recorded one (assistant): no reasoning, other text" in opened


# Row 7
@pytest.mark.parametrize(
    ("answer", "tidy", "difference"),
    [
        (
            lambda request: f"<think>\nhm\n</think>\n\n{numbered(request)}",
            lambda content: [block for block in content if "text" in block],
            "no reasoning",
        ),
        (
            lambda request: f"  {numbered(request)}\n\n",
            lambda content: [{"text": content[0]["text"].strip()}],
            "other white space",
        ),
        (numbered, lambda content: [*content, {"text": "(checked)"}], "other text"),
    ],
    ids=["reasoning", "white space", "more text"],
)
async def test_an_answer_that_a_hook_tidies_up_is_still_trained(judged, caplog, answer, tidy, difference):
    judge = judged(answer)
    agent = make_agent(judge.model)

    def edit(event: MessageAddedEvent):
        if event.message["role"] == "assistant":
            event.message["content"] = tidy(event.message["content"])

    agent.add_hook(edit, MessageAddedEvent)
    for i in range(2):
        await agent.invoke_async(f"Question-{i}?")
    judge.model.trajectory.settle(agent.messages)
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1], [1]]
    assert statuses(judge.model.trajectory) == ["committed", "final"]
    assert f"kept in another form: message 1 (assistant) holds {difference}" in judge.model.trajectory.explain()
    assert not caplog.records


# Row 7
async def test_an_answer_whose_tool_call_a_hook_takes_out_is_discarded(judged):
    judge = judged([f"Let me see. {call(expression='2 * 3')}", "Fine."])
    tools, ran = make_tools()
    agent = make_agent(judge.model, tools)

    def forbid(event: AfterModelCallEvent):
        message = event.stop_response.message
        message["content"] = [block for block in message["content"] if "toolUse" not in block]

    agent.add_hook(forbid, AfterModelCallEvent)
    await agent.invoke_async("Compute.")
    judge.model.trajectory.settle(agent.messages)
    assert ran == []
    judge.check(discarded=[0])
    assert "no tool call" in judge.model.trajectory.turns[0].note


# Row 7
async def test_a_user_message_that_a_hook_edits_before_the_first_call_is_seen_edited(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)

    def edit(event: BeforeInvocationEvent):
        event.messages[0]["content"] = [{"text": "EDITED"}]

    agent.add_hook(edit, BeforeInvocationEvent)
    await agent.invoke_async("Question-0?")
    await agent.invoke_async("Question-1?")
    assert judge.server.requests[1].text.count("EDITED") == 2
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 23
async def test_an_answer_that_a_hook_retries_is_discarded(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)

    def retry(event: AfterModelCallEvent):
        event.retry = "Answer-2" not in str(event.stop_response.message)

    agent.add_hook(retry, AfterModelCallEvent)
    await agent.invoke_async("Question?")
    judge.check(discarded=[0, 1])
    judge.model.trajectory.settle(agent.messages)
    assert statuses(judge.model.trajectory) == ["discarded", "discarded", "final"]
    assert response_masks(judge.model.trajectory) == [[1]]


# Row 23
async def test_a_retry_inside_a_tool_loop_keeps_the_sequence(judged):
    judge = judged([call(expression="2 * 3"), "Bad.", call(expression="6 * 7"), "Good."])
    agent = make_agent(judge.model, make_tools()[0])

    def retry(event: AfterModelCallEvent):
        event.retry = "Bad." in str(event.stop_response.message)

    agent.add_hook(retry, AfterModelCallEvent)
    await agent.invoke_async("Compute.")
    judge.check(discarded=[1])
    assert response_masks(judge.model.trajectory) == [[1, 1, 1]]


# Row 23
async def test_a_call_that_failed_and_is_retried_leaves_one_turn(judged):
    class Retry(ModelRetryStrategy):
        def is_retryable(self, exception):
            return isinstance(exception, SGLangAbortedError)

    judge = judged([ScriptedAnswer("", finish_reason="abort"), ScriptedAnswer("Par", finish_reason="abort"), "Whole."])
    retries = Retry(max_attempts=3, initial_delay=0, max_delay=0)
    agent = make_agent(judge.model, retry_strategy=retries)
    await agent.invoke_async("Question?")
    assert [turn.status.value for turn in judge.model.trajectory.turns][-2:] == ["cut", "answered"]
    texts = [judge.server.tokenizer.decode(s.segments[-1].token_ids) for s in judge.model.trajectory.sequences()]
    assert texts == ["Whole.<|im_end|>", "Par"]


# Row 23
async def test_an_answer_that_was_lost_because_a_hook_raised_is_discarded(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)
    raise_once(agent, AfterModelCallEvent)
    with pytest.raises(ZeroDivisionError):
        await agent.invoke_async("Question-0?")
    judge.model.trajectory.settle(agent.messages)
    judge.check(discarded=[0])
    await agent.invoke_async("Question-1?")
    judge.check(discarded=[0])


# Row 7
async def test_messages_that_a_hook_takes_out_before_a_call_open_a_sequence(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)

    def keep_two(event: BeforeModelCallEvent):
        del event.agent.messages[:-3]

    agent.add_hook(keep_two, BeforeModelCallEvent)
    for i in range(3):
        await agent.invoke_async(f"Question-{i}?")
    assert "Question-0" not in judge.server.requests[2].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1], [1]]


# Row 7
async def test_an_answer_of_a_tool_that_writes_into_the_history_is_prompt(judged):
    judge = judged([call("note"), "Noted."])

    @tool(context=True)
    def note(tool_context) -> str:
        """Write into the history."""
        tool_context.agent.messages[0]["content"].append({"text": "WRITTEN BY A TOOL"})
        return "done"

    await make_agent(judge.model, [note]).invoke_async("Go.")
    assert "WRITTEN BY A TOOL" in judge.server.requests[1].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1], [1]]
