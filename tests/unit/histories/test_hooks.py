"""Hooks, middleware, steering and interventions: what they put in the place of messages, answers and results."""

import asyncio

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
from strands.interventions import Deny, Guide, InterventionHandler, Proceed, Transform
from strands.vended_plugins.context_injector import ContextInjector
from strands.vended_plugins.steering import Guide as Steer
from strands.vended_plugins.steering import Proceed as GoOn
from strands.vended_plugins.steering import SteeringHandler

from strands_sglang import SGLangAbortedError
from strands_sglang.testing import ScriptedAnswer
from support.agents import call, make_agent, make_tools, needs_module, raise_once
from support.judge import numbered, response_masks, statuses

# --- Hooks: what they edit in the history, and the calls that they make the agent repeat ---


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


# --- What is added to a call for that call only, and answers that middleware asks for more than once or makes up ---


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


# --- Steering and interventions: what they put in the place of an answer or of a tool's result ---


class Steering(SteeringHandler):
    """Steers the first answer, and the first tool call."""

    def __init__(self, *, answers=False, tools=False):
        super().__init__()
        self.steers_answers, self.steers_tools = answers, tools

    async def steer_after_model(self, **kwargs):
        steered, self.steers_answers = self.steers_answers, False
        return Steer(reason="SAY IT POLITELY") if steered else GoOn(reason="")

    async def steer_before_tool(self, **kwargs):
        steered, self.steers_tools = self.steers_tools, False
        return Steer(reason="USE OTHER NUMBERS") if steered else GoOn(reason="")


# Row 23
async def test_an_answer_that_steering_sends_back_is_discarded_and_the_guidance_is_prompt(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model, plugins=[Steering(answers=True)])
    await agent.invoke_async("Question?")
    assert "SAY IT POLITELY" in judge.server.requests[1].text
    assert "Answer-0" not in judge.server.requests[1].text
    judge.check(discarded=[0])
    await agent.invoke_async("Question?")
    judge.model.trajectory.settle(agent.messages)
    judge.check(discarded=[0])
    assert statuses(judge.model.trajectory) == ["discarded", "committed", "final"]
    assert "SAY IT POLITELY" not in judge.trained_text()


async def test_a_tool_call_that_steering_refuses_is_trained_and_the_guidance_is_its_result(judged):
    judge = judged([call(expression="2 * 3"), call(expression="6 * 7"), "42."])
    tools, ran = make_tools()
    agent = make_agent(judge.model, tools, plugins=[Steering(tools=True)])
    await agent.invoke_async("Compute.")
    assert ran == ["6 * 7"]
    assert "USE OTHER NUMBERS" in judge.server.requests[1].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1, 1]]


class Intervention(InterventionHandler):
    """Does one thing at one event, once."""

    name = "watchman"

    def __init__(self, method, action):
        self.left = [action]
        setattr(type(self), method, lambda handler, event, **kwargs: handler.left.pop() if handler.left else Proceed())


def intervention(method, action):
    return type("Watchman", (Intervention,), {})(method, action)


@pytest.mark.parametrize(
    ("method", "action", "discarded"),
    [
        ("before_model_call", Guide(feedback="FEEDBACK"), []),
        ("after_model_call", Guide(feedback="FEEDBACK"), [0]),
        ("before_tool_call", Guide(feedback="FEEDBACK"), []),
        ("before_tool_call", Deny(reason="FEEDBACK"), []),
    ],
)
async def test_what_an_intervention_tells_the_model_is_prompt(judged, method, action, discarded):
    judge = judged(lambda request: call(expression="2 * 3") if "FEEDBACK" not in request.text else "Fine.")
    agent = make_agent(judge.model, make_tools()[0], interventions=[intervention(method, action)])
    await agent.invoke_async("Compute.")
    judge.check(discarded=discarded)
    assert "FEEDBACK" in judge.server.requests[-1].text
    assert "FEEDBACK" not in judge.trained_text()


async def test_a_denied_model_call_leaves_text_that_nobody_sampled(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model, interventions=[intervention("before_model_call", Deny(reason="NOT NOW"))])
    await agent.invoke_async("Question-0?")
    await agent.invoke_async("Question-1?")
    assert len(judge.server.requests) == 1
    assert "NOT NOW" in judge.server.requests[0].text
    judge.check()
    assert "NOT NOW" not in judge.trained_text()


async def test_a_transformed_answer_is_discarded(judged):
    def apply(event):
        event.stop_response.message["content"] = [{"text": "TRANSFORMED"}]

    judge = judged(numbered)
    agent = make_agent(judge.model, interventions=[intervention("after_model_call", Transform(apply=apply))])
    await agent.invoke_async("Question-0?")
    await agent.invoke_async("Question-1?")
    assert "TRANSFORMED" in judge.server.requests[1].text
    judge.check(discarded=[0])
