"""An agent's own answers in every form: blank, with names that no tool has, structured, forced."""

import pytest
from pydantic import BaseModel, Field
from strands import tool
from strands.hooks import BeforeToolCallEvent
from strands.models.model import Model
from strands.session.file_session_manager import FileSessionManager
from strands.types._events import ToolResultEvent
from strands.types.exceptions import MaxTokensReachedException

from strands_sglang.testing import ScriptedAnswer
from support.agents import call, make_agent, make_tools, needs_module
from support.judge import response_masks, statuses

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
