"""Several agents on one model, and the helpers whose calls are auxiliary."""

import asyncio
import copy
import threading

import pytest
from strands import Agent, tool
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.hooks import AfterModelCallEvent
from strands.multiagent import GraphBuilder, Swarm
from strands.types.agent import ConcurrentInvocationMode
from strands.types.exceptions import ConcurrencyException
from strands.vended_plugins.goal import GoalLoop

from strands_sglang import SGLangModel, Trajectory
from support.agents import call, make_agent, make_tools, needs_argument
from support.judge import numbered, response_masks, statuses

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
