"""A router that gives the calls of one agent to several models: each records what it saw and sampled itself."""

from itertools import cycle

import pytest
from strands.types.exceptions import EventLoopException

from strands_sglang import SGLangClientError
from strands_sglang.testing import ScriptedFault
from support.agents import call, make_agent, make_tools, needs_module
from support.judge import numbered, response_masks, statuses

pytestmark = needs_module("strands.models.routing")


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
async def test_where_every_model_fails_the_error_of_the_last_one_comes_out(judged):
    judges = [judged([ScriptedFault(status=400)]) for _ in range(2)]
    with pytest.raises((SGLangClientError, EventLoopException)):
        await routed(judges).invoke_async("Question?")
    for judge in judges:
        assert statuses(judge.model.trajectory) == ["failed"]
        assert judge.model.trajectory.sequences() == []


# Row 23
async def test_a_router_over_a_model_and_its_view_for_helpers_trains_the_models_own_calls(judged):
    judge = judged(numbered)
    from strands.models.routing import ModelRouter

    agent = make_agent(ModelRouter([judge.model, judge.model.auxiliary], strategy=Turns(0, 1)))
    for i in range(3):
        await agent.invoke_async(f"Question-{i}?")
    assert [turn.is_auxiliary for turn in judge.model.trajectory.turns] == [False, True, False]
    judge.check(auxiliary=[1])
    assert response_masks(judge.model.trajectory) == [[1, 0, 1]]
