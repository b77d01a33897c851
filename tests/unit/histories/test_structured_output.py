"""Structured output: in the loop it is a tool with a list of tools of its own, outside of it it is auxiliary."""

import pytest
from pydantic import BaseModel

from support.agents import call, make_agent, make_tools
from support.judge import response_masks, statuses


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
async def test_output_that_is_forced_by_a_prompt_and_another_list_of_tools_opens_a_sequence(judged):
    judge = judged([call(expression="2 * 3"), "It is 6.", call("Total", total=6)])
    agent = make_agent(judge.model, make_tools()[0])
    result = await agent.invoke_async("Compute.", structured_output_model=Total)
    assert result.structured_output == Total(total=6)
    forced = judge.server.requests[2]
    assert "You must format the previous response as structured output." in forced.text
    assert '"name": "calculator"' not in forced.text.partition("</tools>")[0]
    constrained = [i for i, request in enumerate(judge.server.requests) if is_constrained(request)]
    judge.check(constrained=constrained)
    assert response_masks(judge.model.trajectory) == [[1, 1], [0 if 2 in constrained else 1]]
    assert "You must format" not in judge.trained_text()
    judge.model.trajectory.settle(agent.messages)
    assert "discarded" not in statuses(judge.model.trajectory)


def is_constrained(request):
    return any(name in request.sampling_params for name in ("json_schema", "regex", "ebnf", "structural_tag"))


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
