"""What agents do by themselves: their own answers, interrupts, and several agents on one model."""

import asyncio
import copy
import threading
from itertools import cycle

import pytest
from pydantic import BaseModel, Field
from strands import Agent, tool
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolsEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
)
from strands.models.model import Model
from strands.multiagent import GraphBuilder, Swarm
from strands.session.file_session_manager import FileSessionManager
from strands.types._events import ToolResultEvent
from strands.types.agent import ConcurrentInvocationMode
from strands.types.exceptions import ConcurrencyException, EventLoopException, MaxTokensReachedException
from strands.vended_plugins.goal import GoalLoop

from strands_sglang import SGLangClientError, SGLangModel, Trajectory
from strands_sglang.testing import ScriptedAnswer, ScriptedFault
from support.agents import call, make_agent, make_tools, needs_argument, needs_module, raise_once
from support.judge import numbered, response_masks, statuses

# === an agent's own answers in every form: blank, with names that no tool has, structured, forced ===


# --- Own answers are recognised in the form in which Strands gives them back, and a cut one ends its sequence ---


@tool
def note(value: object = None, other: object = None) -> str:
    """Note something.

    Args:
        value: Anything.
        other: Anything else.
    """
    return "noted"


def raw_call(arguments):
    return '<tool_call>\n{"name": "note", "arguments": ' + arguments + "}\n</tool_call>"


# Row 8
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param("", id="nothing at all"),
        pytest.param("  \n ", id="blank text"),
        pytest.param(f"  \n {raw_call('{}')}", id="blank text before a call"),
        pytest.param(f"{raw_call('{}')}\n  ", id="blank text behind a call"),
        pytest.param(" Text with spaces around it. ", id="spaces around text"),
        pytest.param(f"Text, then a call. {raw_call('{}')}", id="text and a call"),
        pytest.param("<think>\nhm\n</think>\n\n", id="reasoning alone"),
        pytest.param(f"<think>\nhm\n</think>\n\n {raw_call('{}')}", id="reasoning, blank text and a call"),
        pytest.param("<think>\n\n</think>\n\nText.", id="empty reasoning"),
        pytest.param("<think>\nnever closed", id="reasoning that nothing closes"),
        pytest.param('<tool_call>\n{"name": "bad name!", "arguments": {}}\n</tool_call>', id="an invalid tool name"),
        pytest.param('<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>', id="an empty tool name"),
        pytest.param(f'<tool_call>\n{{"name": "{"n" * 65}"}}\n</tool_call>', id="a tool name that is too long"),
        pytest.param("<tool_call>\nno JSON\n</tool_call>", id="a call that does not parse"),
        pytest.param("[blank text]", id="what Strands writes for blank text"),
    ],
)
@pytest.mark.parametrize("with_tools", [True, False])
async def test_an_answer_that_strands_normalises_is_extended(judged, answer, with_tools):
    judge = judged([answer, "Second.", "Third.", "Fourth."])
    agent = make_agent(judge.model, [note] if with_tools else [])
    for i in range(3):
        await agent.invoke_async(f"Question-{i}?")
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1] * len(judge.server.requests)]
    judge.model.trajectory.settle(agent.messages)
    assert statuses(judge.model.trajectory) == ["committed"] * (len(judge.server.requests) - 1) + ["final"]


# Row 9
@pytest.mark.parametrize(
    "arguments",
    [
        '{ "value" :1 ,\n\t"other": [ ] }',
        '{"other": 2, "value": 1}',
        '{"value": 1, "value": 2}',
        '{"value": 1.0, "other": 1e3}',
        '{"value": NaN, "other": -Infinity}',
        '{"value": 123456789012345678901234567890}',
        '{"value": "\\u00e9\\ud83d\\ude42 \\/ \\t", "other": "é🙂"}',
        '{"value": "\\ud800"}',
        '{"value": {"1": {"b": [null, true, {"a": ""}]}}}',
        "{}",
        "",
        "null",
        "[1, 2]",
        '"text"',
        "{'value': 1}",
    ],
)
async def test_tool_input_that_changes_its_form_in_json_is_extended(judged, arguments):
    judge = judged([raw_call(arguments), "Noted."])
    await make_agent(judge.model, [note]).invoke_async("Go.")
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 10
async def test_a_cut_tool_call_ends_its_sequence_and_the_text_in_its_place_is_prompt(judged):
    judge = judged([ScriptedAnswer(call(expression="2 * 3"), finish_reason="length"), "Again."])
    tools, ran = make_tools()
    agent = make_agent(judge.model, tools)
    with pytest.raises(MaxTokensReachedException):
        await agent.invoke_async("Compute.")
    assert ran == []
    await agent.invoke_async("Go on.")
    assert "tool use was incomplete" in judge.server.requests[1].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1], [1]]
    judge.model.trajectory.settle(agent.messages)
    assert statuses(judge.model.trajectory) == ["final", "final"]
    assert "incomplete" not in judge.trained_text()


# Row 10
async def test_a_cut_text_is_extended(judged):
    judge = judged([ScriptedAnswer("It goes on and", finish_reason="length"), "on."])
    agent = make_agent(judge.model)
    with pytest.raises(MaxTokensReachedException):
        await agent.invoke_async("Tell me.")
    await agent.invoke_async("Go on.")
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 10
async def test_a_cut_call_behind_whole_ones_ends_its_sequence(judged):
    cut = ScriptedAnswer(call(expression="2 * 3") + "<tool_call>\n{", finish_reason="length")
    judge = judged([call(expression="6 * 7"), cut, "Again."])
    agent = make_agent(judge.model, make_tools()[0])
    with pytest.raises(MaxTokensReachedException):
        await agent.invoke_async("Compute.")
    await agent.invoke_async("Go on.")
    judge.check()
    # Both begin with the first call, which is trained in the first of them.
    assert response_masks(judge.model.trajectory) == [[1, 1], [0, 1]]


# --- unregistered tools ---


try:
    from strands.middleware import ExecuteToolStage
except ImportError:  # before 1.62
    from strands._middleware import ExecuteToolStage

BROKEN = "<tool_call>\nno JSON\n</tool_call>"


def tool_uses(agent):
    return [block["toolUse"] for message in agent.messages for block in message["content"] if "toolUse" in block]


def result_texts(agent):
    blocks = [block for message in agent.messages for block in message["content"]]
    return [block["toolResult"]["content"][0]["text"] for block in blocks if "toolResult" in block]


def shown_results(request):
    """The tool results that a request adds behind the last sampled turn."""
    behind = request.text.rpartition("</tool_call>")[2]
    return [part.partition("\n</tool_response>")[0] for part in behind.split("<tool_response>\n")[1:]]


# A6
async def test_a_hook_serves_an_unregistered_tool_with_the_input_that_was_sampled(judged):
    judge = judged([call("ghost", x=1), "Done."])
    seen = []

    @tool
    def stand_in(x: int) -> str:
        """Serve.

        Args:
            x: A number.
        """
        return f"routed {x}"

    def route(event):
        seen.append((event.tool_use["name"], event.tool_use["input"], event.selected_tool))
        event.selected_tool = stand_in

    agent = make_agent(judge.model, make_tools()[0])
    agent.add_hook(route, BeforeToolCallEvent)
    await agent.invoke_async("Call the ghost.")
    judge.check()
    assert seen == [("ghost", {"x": 1}, None)]
    assert shown_results(judge.server.requests[1]) == ["routed 1"] == result_texts(agent)
    assert len(judge.model.trajectory.sequences()) == 1


# A6
@needs_module("strands.middleware")
@pytest.mark.parametrize("written", [call("ghost", x=1), BROKEN], ids=["well formed", "not parsable"])
async def test_the_model_reads_what_middleware_answers(judged, written):
    judge = judged([written, "Done."])

    async def answer(context, next_fn):
        result = {"toolUseId": context.tool_use["toolUseId"], "status": "success", "content": [{"text": "from afar"}]}
        yield ToolResultEvent(result)

    agent = make_agent(judge.model, make_tools()[0])
    agent.add_middleware(ExecuteToolStage, answer)
    await agent.invoke_async("Call the ghost.")
    assert shown_results(judge.server.requests[1]) == ["from afar"] == result_texts(agent)


# A6
@pytest.mark.parametrize("name", ["ghost", "invalid tool", "ghost\n", "n" * 65, "unknown_tool", "INVALID_TOOL_NAME"])
@pytest.mark.parametrize("with_tools", [True, False])
async def test_strands_says_what_it_says_of_unknown_tools(judged, name, with_tools):
    judge = judged([call(name, x=1), "Done.", "Again."])
    agent = make_agent(judge.model, make_tools()[0] if with_tools else [])
    for text in ("Call the ghost.", "And?"):
        await agent.invoke_async(text)
    judge.check()
    ((use_name, use_input),) = [(use["name"], use["input"]) for use in tool_uses(agent)]
    assert (use_name, use_input) == (name, {"x": 1})
    (told,) = result_texts(agent)
    assert shown_results(judge.server.requests[1]) == [told]
    assert judge.model.tool_parse_errors == {}
    assert len(judge.model.trajectory.sequences()) == 1


# A6
async def test_results_stand_behind_their_calls_though_strands_puts_those_of_invalid_names_first(judged):
    judge = judged([call(expression="2 * 3") + call("invalid tool") + call("ghost"), "Done."])
    agent = make_agent(judge.model, make_tools()[0])
    await agent.invoke_async("Go.")
    judge.check()
    six, invalid, ghost = shown_results(judge.server.requests[1])
    assert (six, ghost) == ("6", "Unknown tool: ghost")
    assert "invalid tool" in invalid
    assert len(judge.model.trajectory.sequences()) == 1


# A6
@pytest.mark.parametrize("name", ["ghost", "invalid tool"])
async def test_a_restored_session_renders_the_call_that_was_sampled(judged, tmp_path, name):
    def restored(judge):
        manager = FileSessionManager(session_id="s", storage_dir=str(tmp_path))
        return make_agent(judge.model, make_tools()[0], agent_id="a", session_manager=manager)

    first = judged([call(name, command="run"), "It failed."])
    await restored(first).invoke_async("Run it.")
    second = judged(["It failed, as I said."])
    agent = restored(second)
    assert tool_uses(agent)[0]["name"] == name
    await agent.invoke_async("What was it?")
    (request,) = second.server.requests
    assert call(name, command="run") in request.text
    assert shown_results(request) == result_texts(agent)


# A6
async def test_a_rewritten_history_renders_the_name_that_was_sampled(judged):
    judge = judged([call("invalid tool", x=1), "Done.", "Again."])
    agent = make_agent(judge.model, make_tools()[0])
    await agent.invoke_async("Go.")
    agent.messages[0]["content"] = [{"text": "Go on."}]
    await agent.invoke_async("And?")
    assert call("invalid tool", x=1) in judge.server.requests[2].text
    assert len(judge.model.trajectory.sequences()) == 2


# --- Structured output: in the loop it is a tool with a list of tools of its own, outside of it it is auxiliary ---


class Total(BaseModel):
    """A total."""

    total: int


# Row 12
async def test_output_by_the_model_itself_is_a_tool_call_like_any_other(judged):
    judge = judged([call(expression="2 * 3"), call("Total", total=6), "Bye."])
    agent = make_agent(judge.model, make_tools()[0])
    result = await agent.invoke_async("Compute.", structured_output_model=Total)
    assert result.structured_output == Total(total=6)
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]
    await agent.invoke_async("Thanks.")  # the tool is gone again
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1], [1]]
    assert "the tools changed" in judge.model.trajectory.turns[2].reason
    judge.model.trajectory.settle(agent.messages)
    assert "discarded" not in statuses(judge.model.trajectory)


# Row 12
async def test_output_that_is_forced_by_a_prompt_extends_its_sequence(judged):
    """A14"""

    def is_constrained(request):
        return any(name in request.sampling_params for name in ("json_schema", "regex", "ebnf", "structural_tag"))

    judge = judged([call(expression="2 * 3"), "It is 6.", call("Total", total=6)])
    agent = make_agent(judge.model, make_tools()[0])
    result = await agent.invoke_async("Compute.", structured_output_model=Total)
    assert result.structured_output == Total(total=6)
    forced = judge.server.requests[2]
    assert "You must format the previous response as structured output." in forced.text
    extends = hasattr(Model, "_supports_structured_output")  # before, Strands leaves out the other tools in any case
    assert ('"name": "calculator"' in forced.text.partition("</tools>")[0]) is extends
    constrained = [i for i, request in enumerate(judge.server.requests) if is_constrained(request)]
    judge.check(constrained=constrained)
    assert constrained == [2]
    assert response_masks(judge.model.trajectory) == ([[1, 1, 0]] if extends else [[1, 1], [0]])
    assert "You must format" not in judge.trained_text()
    judge.model.trajectory.settle(agent.messages)
    assert "discarded" not in statuses(judge.model.trajectory)


# Row 12
@pytest.mark.filterwarnings("ignore:the tool choice is not forced:UserWarning")
async def test_output_that_cannot_be_forced_is_asked_for_with_its_tool_alone(judged):
    class Odd(BaseModel):
        """A total that no grammar of the format can force."""

        total: int = Field(multiple_of=3)

    judge = judged([call(expression="2 * 3"), "It is 6.", call("Odd", total=6)])
    agent = make_agent(judge.model, make_tools()[0])
    result = await agent.invoke_async("Compute.", structured_output_model=Odd)
    assert result.structured_output == Odd(total=6)
    assert '"name": "calculator"' not in judge.server.requests[2].text.partition("</tools>")[0]
    assert response_masks(judge.model.trajectory) == [[1, 1], [1]]


# Row 12
@pytest.mark.filterwarnings("ignore:.*structured_output.* method is deprecated:DeprecationWarning")
async def test_output_outside_the_loop_is_valid_beside_a_configured_grammar_and_stops(judged):
    """A15"""
    params = {"regex": "a+", "stop": ["Observation:"], "stop_token_ids": [5], "min_new_tokens": 9, "temperature": 0.5}
    judge = judged(['{"text": "Observation: two"}'], sampling_params=params)
    output = await make_agent(judge.model).structured_output_async(Text, "What?")
    assert output == Text(text="Observation: two")
    (request,) = judge.server.requests
    assert set(request.sampling_params) == {"json_schema", "temperature", "max_new_tokens"}
    assert judge.model.get_config()["sampling_params"] == params


# Row 12
async def test_a_configured_stop_does_not_cut_a_forced_call(judged):
    """A15"""
    judge = judged(["Well.", call("Text", text="Observation: two")], sampling_params={"stop": ["Observation:"]})
    result = await make_agent(judge.model).invoke_async("What?", structured_output_model=Text)
    assert result.structured_output == Text(text="Observation: two")
    assert ["stop" in request.sampling_params for request in judge.server.requests] == [True, False]


class Text(BaseModel):
    """A text."""

    text: str


# Row 12
@pytest.mark.filterwarnings("ignore:.*structured_output.* method is deprecated:DeprecationWarning")
@pytest.mark.parametrize("with_tools", [True, False])
async def test_output_outside_the_loop_is_auxiliary_and_never_trained(judged, with_tools):
    judge = judged(["Answer-0.", '{"total": 6}', "Answer-2."])
    agent = make_agent(judge.model, make_tools()[0] if with_tools else [])
    await agent.invoke_async("Question-0?")
    assert await agent.structured_output_async(Total, "How much?") == Total(total=6)
    await agent.invoke_async("Question-1?")
    assert "How much?" not in judge.server.requests[2].text
    judge.check(auxiliary=[1], constrained=[1])
    assert response_masks(judge.model.trajectory) == [[1, 1]]
    assert [turn.is_auxiliary for turn in judge.model.trajectory.turns] == [False, True, False]


# Row 12
@pytest.mark.filterwarnings("ignore:.*structured_output.* method is deprecated:DeprecationWarning")
async def test_output_outside_the_loop_before_any_answer_is_no_main_conversation(judged):
    judge = judged(['{"total": 6}', "Answer-1."])
    agent = make_agent(judge.model)
    assert await agent.structured_output_async(Total, "How much?") == Total(total=6)
    await agent.invoke_async("Question?")
    judge.check(auxiliary=[0], constrained=[0])
    assert judge.model.token_manager.token_ids == judge.model.trajectory.sequences()[0].token_ids


# === cancellation and interrupts: where they meet an agent, and how it continues ===


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


# === several agents on one model, and the helpers whose calls are auxiliary ===


# --- Graphs, swarms, agents as tools and judges on one model object: every conversation has a record of its own ---


def computes(request):
    """Calls the calculator once, then answers."""
    return numbered(request) if "<tool_response>" in request.text else call(expression="2 * 3")


def make_graph(model):
    """Two nodes side by side, each with tools, and one behind both."""
    builder = GraphBuilder()
    for name in ("left", "right", "end"):
        agent = make_agent(model, make_tools()[0], system_prompt=f"You are {name}.", name=name)
        builder.add_node(agent, name)
    builder.add_edge("left", "end")
    builder.add_edge("right", "end")
    builder.set_max_node_executions(6)
    return builder.build()


# Row 19
# Row 20
async def test_the_nodes_of_a_graph_have_a_sequence_each(judged):
    judge = judged(computes)
    await make_graph(judge.model).invoke_async("Compute.")
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]] * 3
    prompts = [judge.server.tokenizer.decode(s.token_ids) for s in judge.model.trajectory.sequences()]
    assert sorted(prompt.split("You are ")[1].split(".")[0] for prompt in prompts) == ["end", "left", "right"]


# Row 20
async def test_agents_that_share_an_invocation_state_are_told_apart_though_they_say_the_same(judged):
    judge = judged(lambda request: "The same." if "<tool_response>" in request.text else call(expression="2 * 3"))
    agents = [make_agent(judge.model, make_tools()[0]) for _ in range(4)]
    shared = {}
    await asyncio.gather(*(agent.invoke_async("Compute.", invocation_state=shared) for agent in agents))
    judge.check()
    assert len({turn.agent for turn in judge.model.trajectory.turns}) == 4
    assert response_masks(judge.model.trajectory) == [[1, 1]] * 4


# Row 19
async def test_a_graph_that_comes_back_to_a_node_starts_its_conversation_anew(judged):
    judge = judged(numbered)
    builder = GraphBuilder()
    for name in ("draft", "review"):
        builder.add_node(make_agent(judge.model, system_prompt=f"You {name}."), name)
    builder.add_edge("draft", "review")
    builder.add_edge("review", "draft", condition=lambda state: len(state.execution_order) < 4)
    builder.set_entry_point("draft")
    builder.set_max_node_executions(6)
    builder.reset_on_revisit(True)
    await builder.build().invoke_async("Write.")
    assert len(judge.server.requests) == 4
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1]] * 4


# Row 19
async def test_the_agents_of_a_swarm_have_sequences_of_their_own(judged):
    def handoff(name, message):
        return call("handoff_to_agent", agent_name=name, message=message)

    def answer(request):
        first = "You are first." in request.text and "<tool_response>" not in request.text
        return handoff("second", "TAKE OVER") if first else numbered(request)

    judge = judged(answer)
    agents = [make_agent(judge.model, name=name, system_prompt=f"You are {name}.") for name in ("first", "second")]
    result = await Swarm(agents, max_handoffs=3).invoke_async("Do it.")
    assert [node.node_id for node in result.node_history] == ["first", "second"]
    assert any("TAKE OVER" in request.text for request in judge.server.requests)
    judge.check()
    assert {turn.agent for turn in judge.model.trajectory.turns} == {
        turn.agent for turn in judge.model.trajectory.turns if turn.parent is None
    }


# Row 19
@pytest.mark.parametrize("keeps", [True, False])
async def test_an_agent_that_is_a_tool_has_sequences_of_its_own(judged, keeps):
    def answer(request):
        if "You look things up." in request.text:
            return f"Found-{request.index}."
        calls = request.text.count("<tool_response>\n")
        return call("librarian", input=f"Book-{calls}") if calls < 2 else "Both found."

    judge = judged(answer)
    librarian = make_agent(judge.model, system_prompt="You look things up.", name="librarian")
    agent = make_agent(judge.model, [librarian.as_tool(preserve_context=keeps)])
    await agent.invoke_async("Find two books.")
    assert "Found-3." in judge.server.requests[-1].text
    judge.check()
    expected = [[1, 1], [1, 1, 1]] if keeps else [[1], [1], [1, 1, 1]]
    assert response_masks(judge.model.trajectory) == expected


# Row 19
async def test_an_agent_in_a_synchronous_tool_has_a_sequence_of_its_own(judged):
    judge = judged([call("ask", question="Why?"), "Because.", "I see."])

    @tool
    def ask(question: str) -> str:
        """Ask.

        Args:
            question: What.
        """
        return str(make_agent(judge.model, system_prompt="You know.")(question))

    with judge.model.episode() as trajectory:
        await make_agent(judge.model, [ask]).invoke_async("Ask.")
    judge.check(trajectory)
    assert response_masks(trajectory) == [[1], [1, 1]]


# Row 19
async def test_a_judge_of_a_goal_is_an_agent_with_sequences_of_its_own(judged):
    def answer(request):
        if "Be brief." in request.text:
            return numbered(request)
        return call("JudgeOutcome", passed="Answer-2" in request.text, feedback="TRY AGAIN")

    judge = judged(answer)
    agent = make_agent(judge.model, plugins=[GoalLoop(goal="Be good.", max_attempts=3)])
    await agent.invoke_async("Question?")
    assert "TRY AGAIN" in judge.server.requests[2].text
    judge.check()
    assert "TRY AGAIN" not in judge.server.tokenizer.decode(
        [token.token_id for token in judge.model.token_manager.tokens if token.loss_mask]
    )


# Row 21
async def test_a_second_invocation_of_a_busy_agent_is_refused_and_leaves_no_trace(judged):
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request):
        asked.set()
        await go_on.wait()
        return "Late."

    judge = judged([slow])
    agent = make_agent(judge.model)
    running = asyncio.ensure_future(agent.invoke_async("Question-0?"))
    await asked.wait()
    with pytest.raises(ConcurrencyException):
        await agent.invoke_async("Question-1?")
    go_on.set()
    await running
    judge.check()
    assert statuses(judge.model.trajectory) == ["answered"]


# Row 21
@pytest.mark.parametrize("first_to_answer", [0, 1])
async def test_invocations_that_interleave_in_one_history_lose_no_answer(judged, first_to_answer):
    asked = [asyncio.Event(), asyncio.Event()]
    answered = [asyncio.Event(), asyncio.Event()]

    async def slow(request):
        asked[request.index].set()
        await answered[request.index].wait()
        return numbered(request)

    judge = judged([slow, slow, "Third."])
    agent = make_agent(judge.model, concurrent_invocation_mode=ConcurrentInvocationMode.UNSAFE_REENTRANT)
    running = []
    for i in range(2):
        running.append(asyncio.ensure_future(agent.invoke_async(f"Question-{i}?")))
        await asked[i].wait()
    for i in (first_to_answer, 1 - first_to_answer):
        answered[i].set()
        await running[i]
    await agent.invoke_async("Question-2?")
    judge.model.trajectory.settle(agent.messages)
    judge.check()
    assert "discarded" not in statuses(judge.model.trajectory)


# Row 19
async def test_everything_at_once_in_concurrent_episodes_is_recorded_apart(judged):
    judge = judged(computes)

    async def single():
        await make_agent(judge.model, make_tools()[0]).invoke_async("Compute.")

    async def graph():
        await make_graph(judge.model).invoke_async("Compute.")

    async def nested():
        helper = make_agent(judge.model, system_prompt="You help.", name="calculator")
        await make_agent(judge.model, [helper.as_tool()]).invoke_async("Compute.")

    async def episode(play):
        with judge.model.episode() as trajectory:
            await play()
        return trajectory

    trajectories = await asyncio.gather(*(episode(play) for play in (single, graph, nested) * 3))
    judge.check(*trajectories)
    assert [len(trajectory) for trajectory in trajectories] == [2, 6, 4] * 3
    assert len(judge.model.trajectory) == 0


# Row 19
def test_agents_in_threads_share_a_model(judged):
    judge = judged(computes)
    lengths = []

    def play():
        with judge.model.episode() as trajectory:
            make_agent(judge.model, make_tools()[0])("Compute.")
        lengths.append(response_masks(trajectory))
        trajectories.append(trajectory)

    trajectories = []
    threads = [threading.Thread(target=play) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    judge.check(*trajectories)
    assert lengths == [[[1, 1]]] * 6


async def test_an_agent_as_a_tool_that_is_asked_the_same_twice_keeps_both_answers(judged):
    def answer(request):
        if "You look" in request.text:
            return f"Found-{request.index}."
        calls = request.text.count("<tool_response>\n")
        return call("librarian", input="The book") if calls < 2 else "Both found."

    judge = judged(answer)
    librarian = make_agent(judge.model, system_prompt="You look things up.", name="librarian")
    await make_agent(judge.model, [librarian.as_tool()]).invoke_async("Find it twice.")
    judge.check()


# --- Helpers on `model.auxiliary`: recorded beside what is trained, and never trained unless asked for ---


def masks(trajectory):
    """The loss masks of the sampled segments of everything, by sequence."""
    return [[s.loss_mask for s in one.segments if s.is_response] for one in trajectory.sequences(auxiliary=True)]


def answer(request):
    if "You judge." in request.text and "<tool_response>" not in request.text:
        return call(expression="2 * 3")
    return numbered(request)


@pytest.mark.parametrize("first", ["judge", "actor"])
async def test_a_judge_is_recorded_and_not_trained_whoever_comes_first(judged, first):
    judge = judged(answer)
    agents = {
        "actor": make_agent(judge.model),
        "judge": make_agent(judge.model.auxiliary, make_tools()[0], system_prompt="You judge."),
    }
    for name in (first, *({"actor", "judge"} - {first})):
        await agents[name].invoke_async("Question?")
    helped = [i for i, request in enumerate(judge.server.requests) if "You judge." in request.text]
    judge.check(auxiliary=helped)
    trajectory = judge.model.trajectory
    assert [turn.index for turn in trajectory.turns if turn.is_auxiliary] == helped
    assert response_masks(trajectory) == [[1]]
    assert masks(trajectory) == [[1], [1, 1]]
    assert judge.model.token_manager.token_ids == trajectory.sequences()[0].token_ids
    assert "auxiliary" in trajectory.explain()


async def test_a_helper_is_told_from_an_agent_that_says_the_same(judged):
    judge = judged(lambda request: "The same.")
    agents = [make_agent(judge.model), make_agent(judge.model.auxiliary), make_agent(judge.model)]
    for question in ("One?", "Two?"):
        for agent in agents:
            await agent.invoke_async(question)
    assert [turn.is_auxiliary for turn in judge.model.trajectory.turns] == [False, True, False] * 2
    assert response_masks(judge.model.trajectory) == [[1, 1], [1, 1]]
    assert masks(judge.model.trajectory) == [[1, 1]] * 3


async def test_an_agent_that_goes_on_from_what_a_helper_said_trains_its_own_tokens_only(judged):
    judge = judged(["A draft.", "Better."])
    helper = make_agent(judge.model.auxiliary)
    await helper.invoke_async("Question?")
    await make_agent(judge.model, messages=helper.messages).invoke_async("Make it better.")
    judge.check(auxiliary=[0])
    assert response_masks(judge.model.trajectory) == [[0, 1]]
    assert masks(judge.model.trajectory) == [[1, 1]]


async def test_an_answer_that_a_helper_threw_away_is_discarded(judged):
    judge = judged(numbered)
    helper = make_agent(judge.model.auxiliary)

    def retry(event: AfterModelCallEvent):
        event.retry = "Answer-0" in str(event.stop_response.message)

    helper.add_hook(retry, AfterModelCallEvent)
    await helper.invoke_async("Question?")
    await helper.invoke_async("More?")
    judge.check(auxiliary=[0, 1, 2], discarded=[0])
    assert statuses(judge.model.trajectory) == ["discarded", "committed", "answered"]


async def test_a_call_without_an_agent_stays_the_rollouts_own_beside_a_helper(judged):
    judge = judged(numbered)
    question = [{"role": "user", "content": [{"text": "Question?"}]}]
    async for _ in judge.model.stream(question):
        pass
    await make_agent(judge.model.auxiliary).invoke_async("Is that right?")
    async for _ in judge.model.auxiliary.stream(question, None, "Judge."):
        pass
    assert [turn.is_auxiliary for turn in judge.model.trajectory.turns] == [False, True, True]


@needs_argument("__init__", "aux_model")
async def test_helpers_that_strands_makes_are_auxiliary(judged):
    def answer(request):
        if "JudgeOutcome" in request.text:
            return call("JudgeOutcome", passed="Answer-2" in request.text, feedback="TRY AGAIN")
        return numbered(request)

    judge = judged(answer)
    goal = GoalLoop(goal="Be good.", max_attempts=3)
    agent = make_agent(judge.model, plugins=[goal], aux_model=judge.model.auxiliary)
    await agent.invoke_async("Question?")
    helped = [i for i, request in enumerate(judge.server.requests) if "JudgeOutcome" in request.text]
    assert len(helped) == 2
    judge.check(auxiliary=helped)
    assert response_masks(judge.model.trajectory) == [[1, 1]]


async def test_an_agent_that_writes_summaries_in_a_thread_of_the_manager_is_auxiliary(judged):
    def answer(request):
        return "SUMMARY-TEXT" if "summarize this" in request.text else numbered(request)

    judge = judged(answer, max_context_tokens=600)
    writer = make_agent(judge.model.auxiliary, system_prompt="You sum up.")
    manager = SummarizingConversationManager(summary_ratio=0.5, preserve_recent_messages=2, summarization_agent=writer)
    with judge.model.episode() as trajectory:
        agent = make_agent(judge.model, conversation_manager=manager)
        for i in range(7):
            await agent.invoke_async(f"Question-{i}? " + "The weather in Paris is sunny today. " * 10)
    summaries = [i for i, request in enumerate(judge.server.requests) if "summarize this" in request.text]
    assert summaries
    judge.check(trajectory, auxiliary=summaries)
    assert len(judge.model.trajectory) == 0


async def test_a_helper_in_a_thread_without_the_context_goes_to_the_episode_that_it_worked_for_before(judged):
    judge = judged(numbered)

    def elsewhere(helper, question):
        thread = threading.Thread(target=lambda: helper(question))
        thread.start()
        thread.join()

    async def episode(name):
        with judge.model.episode() as trajectory:
            agent = make_agent(judge.model)
            await agent.invoke_async(f"Question of {name}?")
            helper = make_agent(judge.model.auxiliary, messages=list(agent.messages), system_prompt="Judge.")
            await helper.invoke_async("Is that right?")
            for question in ("Sure?", "Really?"):
                elsewhere(helper, question)
        return trajectory

    trajectories = await asyncio.gather(*(episode(name) for name in "ab"))
    assert [[turn.is_auxiliary for turn in trajectory.turns] for trajectory in trajectories] == [
        [False, True, True, True]
    ] * 2
    assert len(judge.model.trajectory) == 0


async def test_what_is_auxiliary_stays_so_in_a_file(judged, tmp_path):
    judge = judged(numbered)
    helper, agent = make_agent(judge.model.auxiliary), make_agent(judge.model)
    await helper.invoke_async("Judge!")
    judge.model.trajectory.save(tmp_path / "t")
    judge.model.trajectory = Trajectory.load(tmp_path / "t")
    await agent.invoke_async("Question?")
    await helper.invoke_async("Judge again!")
    assert [turn.is_auxiliary for turn in judge.model.trajectory.turns] == [True, False, True]
    assert masks(judge.model.trajectory) == [[1], [1, 1]]


async def test_a_helper_has_the_configuration_of_the_model_as_it_is_now(judged):
    judge = judged(numbered, context_window_limit=500)
    view: SGLangModel = judge.model.auxiliary
    assert view.context_window_limit == 500
    assert (view.tokenizer, view.client, view.tool_parser) == (
        judge.model.tokenizer,
        judge.model.client,
        judge.model.tool_parser,
    )
    assert view.trajectory is judge.model.trajectory
    assert view.auxiliary is view
    assert not view.stateful
    with pytest.raises(AttributeError, match="no_such_thing"):
        view.no_such_thing  # noqa: B018
    assert copy.copy(view).tokenizer is judge.model.tokenizer
    judge.model.update_config(sampling_params={"temperature": 0.25}, model_id="served")
    await Agent(model=view, callback_handler=None).invoke_async("Question?")
    assert judge.server.requests[0].sampling_params["temperature"] == 0.25
    assert view.config.get("model_id") == view.get_config()["model_id"] == "served"
    view.update_config(model_id="other")
    assert judge.model.get_config()["model_id"] == "other"


# === a router that gives the calls of one agent to several models: each records what it saw and sampled itself ===


needs_routing = needs_module("strands.models.routing")


class Turns:
    """Gives the invocations to the models in turn."""

    def __init__(self, *order):
        self.order = cycle(order)

    async def select(self, context, **kwargs):
        return None if context.attempts else context.candidates[next(self.order)]


def routed(judges, tools=(), **kwargs):
    from strands.models.routing import ModelRouter

    return make_agent(ModelRouter([judge.model for judge in judges], **kwargs), list(tools))


# Row 5
@needs_routing
async def test_a_model_goes_on_from_its_own_answers_and_those_of_the_other_are_prompt(judged):
    one = judged([call(expression="2 * 3"), "One says 6.", "One says bye."])
    two = judged(["Two says hello.", "Two says bye."])
    agent = routed([one, two], make_tools()[0], strategy=Turns(0, 1))
    for question in ("Compute.", "Hello?", "Well?", "Bye."):
        await agent.invoke_async(question)
    for judge in (one, two):
        judge.check()
        judge.model.trajectory.settle(agent.messages)
        judge.check()
    assert response_masks(one.model.trajectory) == [[1, 1, 1]]
    assert response_masks(two.model.trajectory) == [[1, 1]]
    assert "Two says hello." in one.server.requests[-1].text
    assert "Two says" not in one.trained_text()
    assert "One says" not in two.trained_text()
    assert "discarded" not in statuses(one.model.trajectory) + statuses(two.model.trajectory)


# Row 23
@needs_routing
async def test_a_call_that_fails_on_one_model_and_is_answered_by_another_is_trained_there_only(judged):
    one = judged([call(expression="2 * 3"), ScriptedFault(status=400), "One is back."])
    two = judged([numbered])
    agent = routed([one, two], make_tools()[0])
    await agent.invoke_async("Compute.")
    one.check()
    two.check()
    assert statuses(one.model.trajectory) == ["answered", "failed"]
    assert response_masks(one.model.trajectory) == [[1]]
    assert response_masks(two.model.trajectory) == [[1]]
    assert "Answer-0." in str(agent.messages[-1])
    await agent.invoke_async("Again.")
    one.model.trajectory.settle(agent.messages)
    one.check()
    assert response_masks(one.model.trajectory) == [[1, 1]]
    assert "Answer-0." not in one.trained_text()


# Row 23
@needs_routing
async def test_where_every_model_fails_the_error_of_the_last_one_comes_out(judged):
    judges = [judged([ScriptedFault(status=400)]) for _ in range(2)]
    with pytest.raises((SGLangClientError, EventLoopException)):
        await routed(judges).invoke_async("Question?")
    for judge in judges:
        assert statuses(judge.model.trajectory) == ["failed"]
        assert judge.model.trajectory.sequences() == []


# Row 23
@needs_routing
async def test_a_router_over_a_model_and_its_view_for_helpers_trains_the_models_own_calls(judged):
    judge = judged(numbered)
    from strands.models.routing import ModelRouter

    agent = make_agent(ModelRouter([judge.model, judge.model.auxiliary], strategy=Turns(0, 1)))
    for i in range(3):
        await agent.invoke_async(f"Question-{i}?")
    assert [turn.is_auxiliary for turn in judge.model.trajectory.turns] == [False, True, False]
    judge.check(auxiliary=[1])
    assert response_masks(judge.model.trajectory) == [[1, 0, 1]]
