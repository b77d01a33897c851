"""Conversation managers shorten and rewrite the history: what was sampled stays recorded, and no prompt lies."""

import asyncio

from strands import tool
from strands.agent.conversation_manager import SlidingWindowConversationManager, SummarizingConversationManager

from strands_sglang import TurnStatus
from support.agents import call, make_agent, make_tools
from support.judge import numbered, response_masks, statuses


def make_reader():
    """A tool that returns far more than fits."""

    @tool
    def read(page: str) -> str:
        """Read a page.

        Args:
            page: Its name.
        """
        return f"{page} begins. " + "Long is the text of this page. " * 40 + f"{page} ends."

    return read


# Row 1
async def test_a_sliding_window_that_drops_messages_opens_a_sequence_per_window(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model, conversation_manager=SlidingWindowConversationManager(window_size=4))
    for i in range(5):
        await agent.invoke_async(f"Question-{i}?")
    # The third call is the first one behind a cut: two messages were gone before the fourth one.
    assert ["Question-0" in request.text for request in judge.server.requests] == [True] * 3 + [False] * 2
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1, 1], [1], [1]]
    assert "message 0 (user) is not the recorded one" in judge.model.trajectory.turns[3].reason


# Row 1
async def test_a_sliding_window_at_every_turn_cuts_inside_a_tool_loop(judged):
    answers = [call(expression=f"{i} * 7") for i in range(4)]
    judge = judged([*answers, "Done."])
    manager = SlidingWindowConversationManager(window_size=4, per_turn=True)
    agent = make_agent(judge.model, make_tools()[0], conversation_manager=manager)
    await agent.invoke_async("Compute a lot.")
    judge.check()
    assert len(judge.model.trajectory.sequences()) > 1


# Row 1
async def test_a_window_that_nothing_leaves_stays_one_sequence(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model, conversation_manager=SlidingWindowConversationManager())
    for i in range(5):
        await agent.invoke_async(f"Question-{i}?")
    judge.check()
    assert len(judge.model.trajectory.sequences()) == 1
    judge.model.trajectory.settle(agent.messages)
    assert statuses(judge.model.trajectory) == ["committed"] * 4 + ["final"]


# Row 1
async def test_proactive_compression_drops_messages_before_the_call_that_would_be_too_long(judged):
    judge = judged(numbered, context_window_limit=200)
    manager = SlidingWindowConversationManager(window_size=2, proactive_compression={"compression_threshold": 0.3})
    agent = make_agent(judge.model, conversation_manager=manager)
    for i in range(4):
        await agent.invoke_async(f"Question-{i} about the weather in Paris, with wind from the west?")
    judge.check()
    assert len(judge.model.trajectory.sequences()) > 1


# Row 2
async def test_an_overflow_that_shortens_an_old_tool_result_opens_a_sequence(judged):
    judge = judged([call("read", page="Page-1"), call("read", page="Page-2"), "Both read."], max_context_tokens=1500)
    manager = SlidingWindowConversationManager()
    agent = make_agent(judge.model, [make_reader()], conversation_manager=manager)
    await agent.invoke_async("Read two pages.")
    judge.check()
    turns = judge.model.trajectory.turns
    assert TurnStatus.FAILED in [turn.status for turn in turns]
    assert "truncated" in judge.server.requests[-1].text
    # Both begin with the first call; what it read is whole in one and shortened in the other.
    assert response_masks(judge.model.trajectory) == [[1, 1], [0, 1]]


# Row 3
async def test_a_summary_is_auxiliary_and_what_follows_it_opens_a_sequence(judged):
    def answer(request):
        return "SUMMARY-TEXT" if "summarize this" in request.text else numbered(request)

    judge = judged(answer, max_context_tokens=600)
    manager = SummarizingConversationManager(
        summary_ratio=0.5, preserve_recent_messages=2, summarization_system_prompt="Sum up."
    )
    agent = make_agent(judge.model, conversation_manager=manager)
    for i in range(7):
        await agent.invoke_async(f"Question-{i}? " + "The weather in Paris is sunny today. " * 10)
    summaries = [i for i, request in enumerate(judge.server.requests) if "summarize this" in request.text]
    assert summaries
    judge.check(auxiliary=summaries)
    trained = judge.trained_text()
    assert "SUMMARY-TEXT" not in trained
    assert all(f"Answer-{i}." in trained for i in range(len(judge.server.requests)) if i not in summaries)
    assert "SUMMARY-TEXT" in judge.server.requests[-1].text


# Row 3
async def test_summaries_of_concurrent_episodes_stay_in_their_episodes(judged):
    def answer(request):
        return f"SUMMARY-{request.index}" if "summarize this" in request.text else numbered(request)

    judge = judged(answer, max_context_tokens=600)

    async def episode(name):
        with judge.model.episode() as trajectory:
            manager = SummarizingConversationManager(
                summary_ratio=0.5, preserve_recent_messages=2, summarization_system_prompt="Sum up."
            )
            agent = make_agent(judge.model, conversation_manager=manager)
            for i in range(7):
                await agent.invoke_async(f"Question-{i}? " + f"The weather in {name} is sunny today. " * 10)
            return trajectory

    # The same first question in pairs: what differs comes later.
    trajectories = await asyncio.gather(*(episode(name) for name in ("Paris", "Paris", "Rome")))
    summaries = [i for i, request in enumerate(judge.server.requests) if "summarize this" in request.text]
    assert len(summaries) >= 3
    judge.check(*trajectories, auxiliary=summaries)
    assert all(any(turn.is_auxiliary for turn in trajectory.turns) for trajectory in trajectories)
    assert len(judge.model.trajectory) == 0


# Row 3
async def test_an_agent_that_writes_the_summaries_has_sequences_of_its_own(judged):
    def answer(request):
        return "SUMMARY-TEXT" if "summarize this" in request.text else numbered(request)

    judge = judged(answer, max_context_tokens=600)
    writer = make_agent(judge.model, system_prompt="You sum up.")
    manager = SummarizingConversationManager(summary_ratio=0.5, preserve_recent_messages=2, summarization_agent=writer)
    agent = make_agent(judge.model, conversation_manager=manager)
    for i in range(7):
        await agent.invoke_async(f"Question-{i}? " + "The weather in Paris is sunny today. " * 10)
    assert "SUMMARY-TEXT" in judge.server.requests[-1].text
    judge.check()
