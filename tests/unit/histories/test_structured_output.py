"""Structured output: in the loop it is a tool with a list of tools of its own, outside of it it is auxiliary."""

import pytest
from pydantic import BaseModel, Field
from strands.models.model import Model

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
async def test_output_that_is_forced_by_a_prompt_extends_its_sequence(judged):
    """A14"""
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


class Odd(BaseModel):
    """A total that no grammar of the format can force."""

    total: int = Field(multiple_of=3)


# Row 12
@pytest.mark.filterwarnings("ignore:the tool choice is not forced:UserWarning")
async def test_output_that_cannot_be_forced_is_asked_for_with_its_tool_alone(judged):
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
