"""Steering and interventions: what they put in the place of an answer or of a tool's result."""

import pytest
from strands.interventions import Deny, Guide, InterventionHandler, Proceed, Transform
from strands.vended_plugins.steering import Guide as Steer
from strands.vended_plugins.steering import Proceed as GoOn
from strands.vended_plugins.steering import SteeringHandler

from support.agents import call, make_agent, make_tools
from support.judge import numbered, response_masks, statuses


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
