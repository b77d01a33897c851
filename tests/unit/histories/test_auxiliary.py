"""Helpers on `model.auxiliary`: recorded beside what is trained, and never trained unless asked for."""

import asyncio
import copy
import threading

import pytest
from strands import Agent
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.hooks import AfterModelCallEvent
from strands.vended_plugins.goal import GoalLoop

from strands_sglang import SGLangModel, Trajectory
from support.agents import call, make_agent, make_tools
from support.judge import numbered, response_masks, statuses
from support.strands_features import needs_argument


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
