"""Own answers are recognised in the form in which Strands gives them back, and a cut one ends its sequence."""

import pytest
from strands import tool
from strands.types.exceptions import MaxTokensReachedException

from strands_sglang.testing import ScriptedAnswer
from support.agents import call, make_agent, make_tools
from support.judge import response_masks, statuses


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
