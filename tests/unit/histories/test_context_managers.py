"""Context managers and offloaders: what they shorten before it is seen, and what they rewrite later."""

import pytest
from strands import tool
from strands.vended_plugins.context_offloader import ContextOffloader, InMemoryStorage

from support.agents import call, make_agent, make_tools
from support.judge import response_masks, statuses
from support.strands_features import needs_module


@tool
def read(page: str) -> str:
    """Read a page.

    Args:
        page: Its name.
    """
    half = "The calculator results of this assistant. " * 330  # more than four characters a token, as Strands assumes
    return f"{page} begins. {half} Halfway through {page}. {half} {page} ends."


# Row 4
async def test_a_result_that_is_shortened_before_it_is_seen_is_a_plain_continuation(judged):
    judge = judged([call("read", page="Page-1"), call("read", page="Page-2"), "Both read."], context_window_limit=30000)
    agent = make_agent(judge.model, [read], conversation_manager=None, context_manager="auto")
    await agent.invoke_async("Read two pages.")
    assert "Page-1 begins." in judge.server.requests[-1].text
    assert "Halfway" not in judge.server.requests[-1].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1, 1]]


# Row 4
async def test_offloaded_results_and_their_retrieval_are_one_sequence(judged):
    def answer(request):
        text = request.text
        if "Ref: " not in text and "ref" not in text.lower().partition("page-1 begins")[2]:
            return call("read", page="Page-1")
        return "Read."

    judge = judged(answer)
    storage = InMemoryStorage()
    plugin = ContextOffloader(storage=storage, max_result_tokens=200, preview_tokens=50)
    agent = make_agent(judge.model, [read], plugins=[plugin])
    await agent.invoke_async("Read a page.")
    assert "Page-1 begins." in judge.server.requests[-1].text
    assert "Halfway" not in judge.server.requests[-1].text
    await agent.invoke_async("And now?")
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1, 1]]


# Row 4
@needs_module("strands._context_manager.presets")
async def test_results_that_are_dropped_later_open_a_sequence_with_the_marker_as_prompt(judged):
    from strands._context_manager.strategies.offload import Offload

    judge = judged([*(call(expression=f"{i} * 7") for i in range(5)), "Done."], context_window_limit=30000)
    strategies = [Offload.drop("tool_results").when(preserve_recent=2)]
    agent = make_agent(
        judge.model, make_tools()[0], conversation_manager=None, context_manager={"strategies": strategies}
    )
    await agent.invoke_async("Compute a lot.")
    judge.check()
    assert len(judge.model.trajectory.sequences()) > 1


# Row 4
@needs_module("strands._context_manager.presets")
@pytest.mark.parametrize("beside", ["in a message of its own", "inside an own answer"])
async def test_a_marker_of_removed_messages_is_prompt_wherever_it_is_put(judged, beside):
    from strands._context_manager.strategies.offload import Offload

    judge = judged(lambda request: f"Answer-{request.index}.", context_window_limit=3000)
    kept = 4 if beside == "inside an own answer" else 3
    strategies = [Offload.drop("*").when(utilization=0.35, preserve_recent=kept)]
    agent = make_agent(judge.model, conversation_manager=None, context_manager={"strategies": strategies})
    for i in range(6):
        await agent.invoke_async(f"Question-{i}? " + "The weather in Paris is sunny today. " * 4)
    judge.check()
    assert len(judge.model.trajectory.sequences()) > 1
    marked = next(m["content"] for m in agent.messages if "[Dropped" in m["content"][-1].get("text", ""))
    assert len(marked) == (2 if beside == "inside an own answer" else 1)
    assert "[Dropped" in judge.server.requests[-1].text
    assert "[Dropped" not in judge.trained_text()


# Row 4
@needs_module("strands._context_manager.presets")
async def test_a_summary_inside_the_loop_is_auxiliary(judged):
    from strands._context_manager.strategies.offload import Offload

    def answer(request):
        return f"Answer-{request.index}." if "Be brief." in request.text else "SUMMARY-TEXT"

    judge = judged(answer, context_window_limit=3000)
    strategies = [Offload.summarize("*").when(utilization=0.35, preserve_recent=3)]
    agent = make_agent(judge.model, conversation_manager=None, context_manager={"strategies": strategies})
    for i in range(6):
        await agent.invoke_async(f"Question-{i}? " + "The weather in Paris is sunny today. " * 4)
    summaries = [i for i, request in enumerate(judge.server.requests) if "Be brief." not in request.text]
    assert summaries
    judge.check(auxiliary=summaries)
    assert "SUMMARY-TEXT" not in judge.trained_text()
    assert "SUMMARY-TEXT" in judge.server.requests[-1].text


# Row 4
async def test_a_status_that_is_shown_for_one_call_only_gives_every_call_a_sequence(judged):
    judge = judged([call(expression="2 * 3"), call(expression="6 * 7"), "Done."], context_window_limit=30000)
    agent = make_agent(judge.model, make_tools()[0], conversation_manager=None, context_manager="agentic")
    await agent.invoke_async("Compute.")
    assert all(request.text.count("<context-status>") == 1 for request in judge.server.requests)
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1], [1], [1]]
    judge.model.trajectory.settle(agent.messages)
    assert "discarded" not in statuses(judge.model.trajectory)


# Row 4
async def test_a_tool_that_drops_messages_of_its_own_agent_opens_a_sequence(judged):
    judge = judged(["Answer-0.", "Answer-1.", call("forget"), "Done.", "Answer-4."])

    @tool(context=True)
    def forget(tool_context) -> str:
        """Forget the beginning."""
        del tool_context.agent.messages[:4]
        return "forgotten"

    agent = make_agent(judge.model, [forget])
    for i in range(4):
        await agent.invoke_async(f"Question-{i}?")
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1, 1], [1, 1]]
    assert "Question-0" not in judge.server.requests[3].text
