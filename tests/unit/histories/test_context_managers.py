"""What Strands' context and conversation managers, memory aside, do to a history, and the tokens that they count."""

import asyncio
import warnings

import pytest
from strands import tool
from strands.agent.conversation_manager import SlidingWindowConversationManager, SummarizingConversationManager
from strands.hooks import BeforeModelCallEvent
from strands.vended_plugins.context_offloader import ContextOffloader, InMemoryStorage

from strands_sglang import SGLangModel, TurnStatus
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from support.agents import call, make_agent, make_tools, needs_module
from support.judge import numbered, response_masks, statuses

# --- Context managers and offloaders: what they shorten before it is seen, and what they rewrite later ---


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


# --- Conversation managers shorten and rewrite the history: what was sampled stays recorded, and no prompt lies ---


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


# --- token counts ---


@tool(name="read")
def read_pages(pages: int = 1) -> str:
    """Read.

    Args:
        pages: How many.
    """
    return "a long page " * 100 * pages


def watch(agent):
    """What was projected for each model call."""
    projected = []
    agent.add_hook(lambda event: projected.append(event.projected_input_tokens), BeforeModelCallEvent)
    return projected


@pytest.mark.parametrize("with_tools", [True, False])
async def test_what_strands_projects_for_a_call_is_what_the_call_sends(judged, with_tools):
    """A5"""
    broken = "<tool_call>\nno JSON\n</tool_call>"
    answers = [
        call("read", pages=3),
        "<think>\nhm\n</think>\n\nThree pages.",
        call(expression="2 * 3") * 2 + broken,
        call("ghost"),
        call("invalid tool"),
        "Six.",
        "Bye.",
        "Again.",
    ]
    judge = judged(answers)
    agent = make_agent(judge.model, [read_pages, *make_tools()[0]] if with_tools else [])
    projected = watch(agent)
    for i in range(4):
        await agent.invoke_async(f"Question-{i}? " + "word " * 300)
    judge.check()
    assert projected == [len(request.input_ids) for request in judge.server.requests]


async def test_a_count_knows_which_sampled_tokens_stay(judged, chatml_tokenizer):
    """A5: what a stop string cut gets its end, and another stop token than the template's goes."""
    other, end = chatml_tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    judge = judged(
        [ScriptedAnswer("First.", stop_token_id=other), "Second. STOP here", "Third."],
        server={"stop_token_ids": [end, other]},
        sampling_params={"stop": ["STOP"]},
    )
    agent = make_agent(judge.model)
    projected = watch(agent)
    for i in range(3):
        await agent.invoke_async(f"Question-{i}?")
    assert projected == [len(request.input_ids) for request in judge.server.requests]


async def test_a_recorded_conversation_is_counted_as_recorded(judged):
    """A5: also without the system prompt and the tools that stand before it."""
    judge = judged([call("read"), "Done.", "Second."])
    agent = make_agent(judge.model, [read_pages])
    await agent.invoke_async("Question?")
    explained, turns = judge.model.trajectory.explain(), judge.model.trajectory.turns
    assert await judge.model.count_tokens(agent.messages) == len(judge.model.token_manager)
    assert await judge.model.auxiliary.count_tokens(agent.messages) == len(judge.model.token_manager)
    more = [*agent.messages, {"role": "user", "content": [{"text": "And?"}]}]
    counted = await judge.model.count_tokens(more)
    specs = agent.tool_registry.get_all_tool_specs()
    assert await judge.model.count_tokens(more, specs, agent.system_prompt) == counted
    assert (judge.model.trajectory.explain(), judge.model.trajectory.turns) == (explained, turns)
    await agent.invoke_async("And?")
    assert counted == len(judge.server.requests[2].input_ids)


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([], id="none"),
        pytest.param([{"role": "user", "content": []}], id="an empty message"),
        pytest.param([{"role": "assistant", "content": [{"text": "word " * 50}]}], id="an answer"),
        pytest.param(
            [{"role": "assistant", "content": [{"toolUse": {"toolUseId": "t", "name": "f", "input": {"a": "word"}}}]}],
            id="a call without a result",
        ),
        pytest.param(
            [
                {
                    "role": "user",
                    "content": [{"toolResult": {"toolUseId": "t", "status": "error", "content": [{"text": "word"}]}}],
                }
            ],
            id="a result without a call",
        ),
        pytest.param([{"role": "user", "content": [{"video": {"source": {"bytes": b"x"}}}]}], id="video"),
        pytest.param([{"role": "user", "content": [{"text": "\ud800 word"}]}], id="half a character"),
    ],
)
@pytest.mark.parametrize("before", [0, 1])
async def test_any_fragment_is_counted(judged, messages, before):
    """A5"""
    judge = judged(numbered)
    for _ in range(before):
        await make_agent(judge.model).invoke_async("Question?")
    words = str(messages).count("word")
    assert words <= await judge.model.count_tokens(messages) < 200


async def test_new_messages_are_encoded_once_for_count_and_call(judged, monkeypatch):
    """A5: a count is on the way of every call."""
    judge = judged([call("read", pages=20), "Done."])
    encoded = []
    encode = judge.model.chat_template.encode

    def watched(text):
        encoded.append(text)
        return encode(text)

    monkeypatch.setattr(judge.model.chat_template, "encode", watched)
    agent = make_agent(judge.model, [read_pages])
    await agent.invoke_async("Question? " + "word " * 500)
    assert sum("a long page" in text for text in encoded) == 1
    assert sum("Question?" in text for text in encoded) == 1


async def test_the_context_window_limit_is_what_was_configured_or_what_the_server_says(rollout):
    """A5"""
    for config, limit in (({}, 1500), ({"context_window_limit": 700}, 700), ({"max_context_tokens": 900}, 900)):
        _, model = rollout(["ok"], server={"context_length": 1500}, **config)
        await model.count_tokens([{"role": "user", "content": [{"text": "hi"}]}])
        assert (model.context_window_limit, model.auxiliary.context_window_limit) == (limit, limit)
    _, model = rollout(["ok"])
    assert model.context_window_limit is None


async def test_proactive_compression_goes_by_the_server_s_context(judged):
    """A5"""
    limits = {"max_new_tokens": 400}
    judge = judged(lambda request: "word " * 100, server={"context_length": 1500}, sampling_params=limits)
    manager = SlidingWindowConversationManager(window_size=1000, proactive_compression={"compression_threshold": 0.5})
    agent = make_agent(judge.model, conversation_manager=manager)
    projected = watch(agent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(12):
            await agent.invoke_async(f"Question-{i}? Tell me more.")
    assert len(agent.messages) < 24
    assert max(len(request.input_ids) for request in judge.server.requests) < 1500 - 400
    assert max(projected) < 1500


async def test_a_server_that_cannot_be_asked_does_not_keep_a_count(chatml_tokenizer):
    """A5"""

    async def never(*args, **kwargs):
        await asyncio.Event().wait()

    server = ScriptedSGLang(chatml_tokenizer, ["ok"])
    client = server.client()
    client.context_length = never
    model = SGLangModel(tokenizer=chatml_tokenizer, client=client)
    messages = [{"role": "user", "content": [{"text": "hi"}]}]
    counted = await model.count_tokens(messages, [], "Be brief.")
    assert 0 < counted < 50
    assert model.context_window_limit is None
