"""A memory manager: what it remembers is put in front of one call, and what it extracts is no part of a rollout."""

from support.agents import call, make_agent, make_tools, needs_argument, needs_module
from support.judge import numbered, response_masks, statuses

pytestmark = [needs_module("strands.memory"), needs_argument("__init__", "memory_manager")]


class Store:
    """Remembers whatever it is given, and finds all of it."""

    name = "store"
    description = None
    max_search_results = None
    writable = True

    def __init__(self, *remembered, extraction=None):
        self.remembered, self.extraction = list(remembered), extraction

    async def search(self, query, options=None):
        from strands.memory import MemoryEntry

        return [MemoryEntry(content) for content in self.remembered]

    async def add(self, content, metadata=None):
        self.remembered.append(content)


def remembering(model, store, tools=(), **kwargs):
    from strands.memory import MemoryManager

    return make_agent(model, list(tools), memory_manager=MemoryManager([store], **kwargs))


# Row 5
async def test_what_is_remembered_is_in_one_prompt_only_and_opens_a_sequence_behind_it(judged):
    judge = judged([call(expression="2 * 3"), "6.", "Bye."])
    agent = remembering(judge.model, Store("PARIS IS NICE"), make_tools()[0])
    await agent.invoke_async("Compute.")
    await agent.invoke_async("Thanks.")
    shown = [request.text.count("PARIS IS NICE") for request in judge.server.requests]
    assert shown[0] == shown[-1] == 1
    assert shown[1] == 0
    judge.check()
    trajectory = judge.model.trajectory
    # Behind the tool's result nothing was put in, so that call does not go on from the first one; the third one does.
    assert response_masks(trajectory) == [[1], [1, 1]]
    trajectory.settle(agent.messages)
    assert "discarded" not in statuses(trajectory)
    assert "PARIS" not in judge.trained_text()


# Row 5
async def test_memory_that_only_tools_reach_leaves_one_sequence(judged):
    judge = judged([call("search_memory", query="weather"), call("add_memory", entries=["RAIN"]), "It rains.", "Bye."])
    store = Store("SUN")
    agent = remembering(judge.model, store, injection=False, add_tool_config=True)
    await agent.invoke_async("What of the weather?")
    await agent.invoke_async("Thanks.")
    assert store.remembered == ["SUN", "RAIN"]
    assert "SUN" in judge.server.requests[1].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1, 1, 1]]


# Row 3
async def test_facts_that_a_model_extracts_behind_the_loop_are_auxiliary(judged):
    from strands.memory import ExtractionConfig, InvocationTrigger, MemoryManager

    def answer(request):
        return '[{"content": "EXTRACTED"}]' if "Extract facts" in request.text else numbered(request)

    judge = judged(answer)
    store = Store(extraction=ExtractionConfig(trigger=[InvocationTrigger()]))
    manager = MemoryManager([store], injection=False)
    with judge.model.episode() as trajectory:
        agent = make_agent(judge.model, memory_manager=manager)
        for i in range(2):
            await agent.invoke_async(f"Question-{i}?")
            await manager.flush()
    extractions = [i for i, request in enumerate(judge.server.requests) if "Extract facts" in request.text]
    assert len(extractions) == 2
    assert store.remembered == ["EXTRACTED"] * 2
    judge.check(trajectory, auxiliary=extractions)
    assert response_masks(trajectory) == [[1, 1]]
    assert len(judge.model.trajectory) == 0
