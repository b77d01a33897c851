"""Whatever is put in the place of messages, answers and results, and whatever is taken away."""

import asyncio
import warnings

import pytest
from strands import ModelRetryStrategy, tool
from strands.agent.conversation_manager import SlidingWindowConversationManager, SummarizingConversationManager
from strands.hooks import (
    AfterModelCallEvent,
    AfterToolCallEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    MessageAddedEvent,
)
from strands.interventions import Deny, Guide, InterventionHandler, Proceed, Transform
from strands.session import FileSessionManager
from strands.vended_plugins.context_injector import ContextInjector
from strands.vended_plugins.context_offloader import ContextOffloader, InMemoryStorage
from strands.vended_plugins.goal import GoalLoop
from strands.vended_plugins.steering import Guide as Steer
from strands.vended_plugins.steering import Proceed as GoOn
from strands.vended_plugins.steering import SteeringHandler

from strands_sglang import SGLangAbortedError, SGLangModel, TurnStatus
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from support.agents import call, make_agent, make_tools, needs_argument, needs_module, raise_once
from support.judge import numbered, response_masks, statuses

# === what Strands' context and conversation managers, memory aside, do to a history, and the tokens that they count ===


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


# === hooks, middleware, steering and interventions: what they put in the place of messages, answers and results ===


# --- Hooks: what they edit in the history, and the calls that they make the agent repeat ---


# Row 7
async def test_a_tool_result_that_a_hook_replaces_is_what_the_model_sees(judged):
    judge = judged([call(expression="2 * 3"), "Fine."])
    agent = make_agent(judge.model, make_tools()[0])

    def replace(event: AfterToolCallEvent):
        event.result = {**event.result, "content": [{"text": "REPLACED"}]}

    agent.add_hook(replace, AfterToolCallEvent)
    await agent.invoke_async("Compute.")
    assert "REPLACED" in judge.server.requests[1].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 7
async def test_input_that_a_hook_replaces_for_the_tool_only_leaves_the_call_as_it_was_sampled(judged):
    judge = judged([call(expression="2 * 3"), "Fine."])
    tools, ran = make_tools()
    agent = make_agent(judge.model, tools)

    def replace(event: BeforeToolCallEvent):
        event.tool_use = {**event.tool_use, "input": {"expression": "5 * 5"}}

    agent.add_hook(replace, BeforeToolCallEvent)
    await agent.invoke_async("Compute.")
    assert ran == ["5 * 5"]
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 7
async def test_input_that_a_hook_edits_in_the_history_opens_a_sequence_and_the_call_is_still_trained(judged):
    judge = judged([call(expression="2 * 3"), "Fine.", "Bye."])
    tools, ran = make_tools()
    agent = make_agent(judge.model, tools)

    def edit(event: BeforeToolCallEvent):
        event.tool_use["input"]["expression"] = "5 * 5"

    agent.add_hook(edit, BeforeToolCallEvent)
    await agent.invoke_async("Compute.")
    await agent.invoke_async("Thanks.")
    assert ran == ["5 * 5"]
    assert '{"expression": "2 * 3"}' not in judge.server.requests[1].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1], [1, 1]]
    judge.model.trajectory.settle(agent.messages)
    assert statuses(judge.model.trajectory) == ["committed", "committed", "final"]


# Row 7
async def test_an_edited_call_of_an_episode_that_was_stopped_behind_it_is_final(judged):
    judge = judged([call(expression="2 * 3")])
    agent = make_agent(judge.model, make_tools()[0])

    def edit(event: BeforeToolCallEvent):
        event.tool_use["input"]["expression"] = "5 * 5"

    agent.add_hook(edit, BeforeToolCallEvent)
    await agent.invoke_async("Compute.", limits={"turns": 1})
    judge.model.trajectory.settle(agent.messages)
    judge.check()
    assert statuses(judge.model.trajectory) == ["final"]


# Row 7
@pytest.mark.parametrize("event_type", [AfterModelCallEvent, MessageAddedEvent])
async def test_an_answer_whose_text_a_hook_replaces_is_discarded_and_the_new_text_is_prompt(judged, event_type):
    judge = judged(numbered)
    agent = make_agent(judge.model)

    def redact(event):
        message = event.message if event_type is MessageAddedEvent else event.stop_response.message
        if message["role"] == "assistant":
            message["content"] = [{"text": "REDACTED"}]

    agent.add_hook(redact, event_type)
    await agent.invoke_async("Question-0?")
    await agent.invoke_async("Question-1?")
    assert "REDACTED" in judge.server.requests[1].text
    assert "Answer-0" not in judge.server.requests[1].text
    judge.model.trajectory.settle(agent.messages)
    judge.check(discarded=[0, 1])
    assert "REDACTED" not in judge.trained_text()


# Row 7
@pytest.mark.parametrize("settled", [True, False])
async def test_that_a_hook_replaces_answers_is_told_once_with_what_differs(judged, caplog, settled):
    judge = judged(lambda request: f"<think>\nhm\n</think>\n\n{numbered(request)}")
    agent = make_agent(judge.model)

    def redact(event: MessageAddedEvent):
        if event.message["role"] == "assistant":
            event.message["content"] = [{"text": "REDACTED"}]

    agent.add_hook(redact, MessageAddedEvent)
    for i in range(1 if settled else 3):
        await agent.invoke_async(f"Question-{i}?")
    if settled:
        judge.model.trajectory.settle(agent.messages)
    (warning,) = [record.getMessage() for record in caplog.records if "was replaced" in record.getMessage()]
    said = "message 1 (assistant) stands in its place, with no reasoning, other text"
    assert said in warning
    assert "call=<0>" in warning
    assert said in judge.model.trajectory.explain().splitlines()[0]
    if not settled:
        opened = judge.model.trajectory.turns[1].reason
        assert "message 1 (assistant) is not the recorded one (assistant): no reasoning, other text" in opened


# Row 7
@pytest.mark.parametrize(
    ("answer", "tidy", "difference"),
    [
        (
            lambda request: f"<think>\nhm\n</think>\n\n{numbered(request)}",
            lambda content: [block for block in content if "text" in block],
            "no reasoning",
        ),
        (
            lambda request: f"  {numbered(request)}\n\n",
            lambda content: [{"text": content[0]["text"].strip()}],
            "other white space",
        ),
        (numbered, lambda content: [*content, {"text": "(checked)"}], "other text"),
    ],
    ids=["reasoning", "white space", "more text"],
)
async def test_an_answer_that_a_hook_tidies_up_is_still_trained(judged, caplog, answer, tidy, difference):
    judge = judged(answer)
    agent = make_agent(judge.model)

    def edit(event: MessageAddedEvent):
        if event.message["role"] == "assistant":
            event.message["content"] = tidy(event.message["content"])

    agent.add_hook(edit, MessageAddedEvent)
    for i in range(2):
        await agent.invoke_async(f"Question-{i}?")
    judge.model.trajectory.settle(agent.messages)
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1], [1]]
    assert statuses(judge.model.trajectory) == ["committed", "final"]
    assert f"kept in another form: message 1 (assistant) holds {difference}" in judge.model.trajectory.explain()
    assert not caplog.records


# Row 7
async def test_an_answer_whose_tool_call_a_hook_takes_out_is_discarded(judged):
    judge = judged([f"Let me see. {call(expression='2 * 3')}", "Fine."])
    tools, ran = make_tools()
    agent = make_agent(judge.model, tools)

    def forbid(event: AfterModelCallEvent):
        message = event.stop_response.message
        message["content"] = [block for block in message["content"] if "toolUse" not in block]

    agent.add_hook(forbid, AfterModelCallEvent)
    await agent.invoke_async("Compute.")
    judge.model.trajectory.settle(agent.messages)
    assert ran == []
    judge.check(discarded=[0])
    assert "no tool call" in judge.model.trajectory.turns[0].note


# Row 7
async def test_a_user_message_that_a_hook_edits_before_the_first_call_is_seen_edited(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)

    def edit(event: BeforeInvocationEvent):
        event.messages[0]["content"] = [{"text": "EDITED"}]

    agent.add_hook(edit, BeforeInvocationEvent)
    await agent.invoke_async("Question-0?")
    await agent.invoke_async("Question-1?")
    assert judge.server.requests[1].text.count("EDITED") == 2
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 23
async def test_an_answer_that_a_hook_retries_is_discarded(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)

    def retry(event: AfterModelCallEvent):
        event.retry = "Answer-2" not in str(event.stop_response.message)

    agent.add_hook(retry, AfterModelCallEvent)
    await agent.invoke_async("Question?")
    judge.check(discarded=[0, 1])
    judge.model.trajectory.settle(agent.messages)
    assert statuses(judge.model.trajectory) == ["discarded", "discarded", "final"]
    assert response_masks(judge.model.trajectory) == [[1]]


# Row 23
async def test_a_retry_inside_a_tool_loop_keeps_the_sequence(judged):
    judge = judged([call(expression="2 * 3"), "Bad.", call(expression="6 * 7"), "Good."])
    agent = make_agent(judge.model, make_tools()[0])

    def retry(event: AfterModelCallEvent):
        event.retry = "Bad." in str(event.stop_response.message)

    agent.add_hook(retry, AfterModelCallEvent)
    await agent.invoke_async("Compute.")
    judge.check(discarded=[1])
    assert response_masks(judge.model.trajectory) == [[1, 1, 1]]


# Row 23
async def test_a_call_that_failed_and_is_retried_leaves_one_turn(judged):
    class Retry(ModelRetryStrategy):
        def is_retryable(self, exception):
            return isinstance(exception, SGLangAbortedError)

    judge = judged([ScriptedAnswer("", finish_reason="abort"), ScriptedAnswer("Par", finish_reason="abort"), "Whole."])
    retries = Retry(max_attempts=3, initial_delay=0, max_delay=0)
    agent = make_agent(judge.model, retry_strategy=retries)
    await agent.invoke_async("Question?")
    assert [turn.status.value for turn in judge.model.trajectory.turns][-2:] == ["cut", "answered"]
    texts = [judge.server.tokenizer.decode(s.segments[-1].token_ids) for s in judge.model.trajectory.sequences()]
    assert texts == ["Whole.<|im_end|>", "Par"]


# Row 23
async def test_an_answer_that_was_lost_because_a_hook_raised_is_discarded(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)
    raise_once(agent, AfterModelCallEvent)
    with pytest.raises(ZeroDivisionError):
        await agent.invoke_async("Question-0?")
    judge.model.trajectory.settle(agent.messages)
    judge.check(discarded=[0])
    await agent.invoke_async("Question-1?")
    judge.check(discarded=[0])


# Row 7
async def test_messages_that_a_hook_takes_out_before_a_call_open_a_sequence(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)

    def keep_two(event: BeforeModelCallEvent):
        del event.agent.messages[:-3]

    agent.add_hook(keep_two, BeforeModelCallEvent)
    for i in range(3):
        await agent.invoke_async(f"Question-{i}?")
    assert "Question-0" not in judge.server.requests[2].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1], [1]]


# Row 7
async def test_an_answer_of_a_tool_that_writes_into_the_history_is_prompt(judged):
    judge = judged([call("note"), "Noted."])

    @tool(context=True)
    def note(tool_context) -> str:
        """Write into the history."""
        tool_context.agent.messages[0]["content"].append({"text": "WRITTEN BY A TOOL"})
        return "done"

    await make_agent(judge.model, [note]).invoke_async("Go.")
    assert "WRITTEN BY A TOOL" in judge.server.requests[1].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1], [1]]


# --- What is added to a call for that call only, and answers that middleware asks for more than once or makes up ---


needs_middleware = needs_module("strands.middleware")


async def collect(events):
    return [event async for event in events]


# Row 5
async def test_text_that_is_injected_for_one_call_stands_in_that_prompt_only(judged):
    judge = judged([call(expression="2 * 3"), "6.", "Bye."])
    agent = make_agent(judge.model, make_tools()[0], plugins=[ContextInjector(lambda context: "<now>noon</now>")])
    await agent.invoke_async("Compute.")
    await agent.invoke_async("Thanks.")
    assert [request.text.count("<now>") for request in judge.server.requests] == [1, 0, 1]
    judge.check()
    # The third call goes on from the second one, whose prompt held no injected text.
    assert response_masks(judge.model.trajectory) == [[1], [1, 1]]
    judge.model.trajectory.settle(agent.messages)
    assert "discarded" not in statuses(judge.model.trajectory)
    assert "message 0 (user) is not the recorded one" in judge.model.trajectory.turns[1].reason


# Row 5
async def test_text_that_is_injected_anew_at_every_call_stands_once_in_each_prompt(judged):
    judge = judged([call(expression="2 * 3"), "6.", "Bye."])
    minutes = iter(range(9))
    plugin = ContextInjector(lambda context: f"<now>minute {next(minutes)}</now>", trigger="everyTurn")
    agent = make_agent(judge.model, make_tools()[0], plugins=[plugin])
    await agent.invoke_async("Compute.")
    await agent.invoke_async("Thanks.")
    assert [request.text.count("<now>") for request in judge.server.requests] == [1, 1, 1]
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1], [1], [1]]


# Row 5
@needs_middleware
async def test_a_system_prompt_and_tools_replaced_for_one_call_are_in_its_prompt_and_open_a_sequence(judged):
    from strands.middleware import InvokeModelStage

    judge = judged([call(expression="2 * 3"), "6.", "Bye."])
    calls = iter(range(9))

    async def replace(context):
        if next(calls) != 1:
            return context
        return context.replace(system_prompt="Be long-winded.", tool_specs=[])

    agent = make_agent(judge.model, make_tools()[0])
    agent.add_middleware(InvokeModelStage.Input, replace)
    await agent.invoke_async("Compute.")
    await agent.invoke_async("Thanks.")
    assert ["Be long-winded." in request.text for request in judge.server.requests] == [False, True, False]
    judge.check()
    # The third call goes on from the first one, whose system prompt and tools it has; the answer between is prompt.
    assert response_masks(judge.model.trajectory) == [[1], [1, 1]]


# Row 6
@needs_middleware
@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("at_once", [True, False])
async def test_of_several_answers_to_one_question_the_ones_not_taken_are_discarded(judged, kept, at_once):
    from strands.middleware import InvokeModelStage

    judge = judged(numbered)

    async def best_of_three(context, next_fn):
        streams = [collect(next_fn(context)) for _ in range(3)]
        answers = await asyncio.gather(*streams) if at_once else [await stream for stream in streams]
        for event in answers[kept]:
            yield event

    agent = make_agent(judge.model)
    agent.add_middleware(InvokeModelStage, best_of_three)
    await agent.invoke_async("Question-0?")
    await agent.invoke_async("Question-1?")
    judge.model.trajectory.settle(agent.messages)
    judge.check(discarded={0, 1, 2, 3, 4, 5} - {kept, 3 + kept})
    expected = ["discarded"] * 6
    expected[kept], expected[3 + kept] = "committed", "final"
    assert statuses(judge.model.trajectory) == expected
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 6
@needs_middleware
@pytest.mark.parametrize("kept", [0, 1, 2])
async def test_the_next_call_tells_which_of_several_answers_was_taken(judged, kept):
    from strands.middleware import InvokeModelStage

    judge = judged(numbered)
    asked = iter([3, 1])

    async def best_of(context, next_fn):
        answers = await asyncio.gather(*(collect(next_fn(context)) for _ in range(next(asked))))
        for event in answers[kept % len(answers)]:
            yield event

    agent = make_agent(judge.model)
    agent.add_middleware(InvokeModelStage, best_of)
    await agent.invoke_async("Question-0?")
    await agent.invoke_async("Question-1?")
    judge.check(discarded={0, 1, 2} - {kept})


# Row 6
@needs_middleware
@pytest.mark.parametrize("goes_on", [True, False])
async def test_of_several_answers_that_say_the_same_one_is_trained(judged, goes_on):
    from strands.middleware import InvokeModelStage

    judge = judged(lambda request: "Always the same.")
    asked = iter([3, 1])

    async def best_of(context, next_fn):
        answers = await asyncio.gather(*(collect(next_fn(context)) for _ in range(next(asked))))
        for event in answers[0]:
            yield event

    agent = make_agent(judge.model)
    agent.add_middleware(InvokeModelStage, best_of)
    await agent.invoke_async("Question-0?")
    if goes_on:
        await agent.invoke_async("Question-1?")
    judge.model.trajectory.settle(agent.messages)
    assert statuses(judge.model.trajectory).count("discarded") == 2
    assert response_masks(judge.model.trajectory) == ([[1, 1]] if goes_on else [[1]])


# Row 6
@needs_middleware
async def test_an_answer_that_middleware_made_up_is_prompt(judged):
    from strands.middleware import InvokeModelStage, ModelStopReason

    judge = judged(numbered)
    calls = iter(range(9))

    async def cached(context, next_fn):
        if next(calls) == 1:
            message = {"role": "assistant", "content": [{"text": "FROM THE CACHE"}]}
            usage = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
            yield ModelStopReason(stop_reason="end_turn", message=message, usage=usage, metrics={"latencyMs": 0})
            return
        async for event in next_fn(context):
            yield event

    agent = make_agent(judge.model)
    agent.add_middleware(InvokeModelStage, cached)
    for i in range(3):
        await agent.invoke_async(f"Question-{i}?")
    judge.check()
    assert len(judge.server.requests) == 2
    assert "FROM THE CACHE" in judge.server.requests[1].text
    assert "FROM THE CACHE" not in judge.trained_text()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 6
@needs_middleware
async def test_an_answer_that_middleware_rewrites_is_recorded_and_its_new_form_is_prompt(judged):
    from strands.middleware import InvokeModelStage

    judge = judged(numbered)

    async def redact(result):
        result.result["stop"][1]["content"] = [{"text": "REDACTED"}]
        return result

    agent = make_agent(judge.model)
    agent.add_middleware(InvokeModelStage.Output, redact)
    await agent.invoke_async("Question-0?")
    await agent.invoke_async("Question-1?")
    assert "REDACTED" in judge.server.requests[1].text
    assert "Answer-0" not in judge.server.requests[1].text
    judge.check(discarded=[0, 1] if judge.told else [0])  # nothing but hooks knows of the last one
    assert "REDACTED" not in judge.trained_text()


# --- Steering and interventions: what they put in the place of an answer or of a tool's result ---


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


# === history that the model did not speak on this record: few-shot, sessions, direct tool calls, edits, redaction ===


# Row 15
async def test_a_restored_session_opens_a_sequence_whose_prompt_holds_the_old_answers(judged, tmp_path):
    def agent():
        session = FileSessionManager(session_id="session", storage_dir=str(tmp_path))
        return make_agent(judge.model, make_tools()[0], session_manager=session)

    judge = judged([call(expression="2 * 3"), "It is 6.", "Welcome back.", "Bye."])
    await agent().invoke_async("Compute.")
    first = judge.model.trajectory
    judge.check()
    judge.model.reset()
    restored = agent()
    await restored.invoke_async("Do you remember?")
    await restored.invoke_async("Good.")
    assert "It is 6." in judge.server.requests[2].text
    judge.check(first, judge.model.trajectory)
    assert response_masks(judge.model.trajectory) == [[1, 1]]
    assert "It is 6." not in judge.trained_text()


# Row 15
async def test_a_restored_session_goes_on_with_a_record_that_is_still_there(judged, tmp_path):
    def agent():
        session = FileSessionManager(session_id="session", storage_dir=str(tmp_path))
        return make_agent(judge.model, make_tools()[0], session_manager=session)

    judge = judged([call(expression="2 * 3"), "It is 6.", "Welcome back."])
    await agent().invoke_async("Compute.")
    await agent().invoke_async("Do you remember?")
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1, 1]]


# Row 15
async def test_a_snapshot_that_is_loaded_takes_back_what_came_after_it(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)
    await agent.invoke_async("Question-0?")
    snapshot = agent.take_snapshot(preset="session")
    await agent.invoke_async("Question-1?")
    agent.load_snapshot(snapshot)
    await agent.invoke_async("Question-2?")
    assert "Question-1" not in judge.server.requests[2].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1], [0, 1]]


# Row 15
@pytest.mark.parametrize("keeps_history", [True, False])
async def test_attempts_at_a_goal_are_trained_once_each(judged, keeps_history):
    judge = judged(numbered)

    def is_good(response, agent):
        return {"passed": "Answer-2" in response["content"][0]["text"], "feedback": "NOT GOOD ENOUGH"}

    plugin = GoalLoop(goal=is_good, max_attempts=4, preserve_context=keeps_history)
    await make_agent(judge.model, plugins=[plugin]).invoke_async("Question?")
    assert "NOT GOOD ENOUGH" in judge.server.requests[1].text
    assert ("Answer-0" in judge.server.requests[1].text) == keeps_history
    judge.check()
    # Attempts that start anew take the agent's whole state back, as if another agent had asked.
    assert response_masks(judge.model.trajectory) == ([[1, 1, 1]] if keeps_history else [[1], [1], [1]])
    assert "NOT GOOD ENOUGH" not in judge.trained_text()


# Row 15
@pytest.mark.parametrize("keeps_history", [True, False])
async def test_attempts_at_the_goal_of_a_later_invocation_are_trained_once_each(judged, caplog, keeps_history):
    judge = judged(numbered)
    asked = []

    def is_good(response, agent):
        asked.append(response)
        return {"passed": len(asked) % 3 == 0, "feedback": "NOT GOOD ENOUGH"}

    plugin = GoalLoop(goal=is_good, max_attempts=4, preserve_context=keeps_history)
    agent = make_agent(judge.model, plugins=[plugin])
    await agent.invoke_async("Question-0?")
    await agent.invoke_async("Question-1?")
    judge.model.trajectory.settle(agent.messages)
    judge.check()
    assert "discarded" not in statuses(judge.model.trajectory)
    # By now the agent has a state to go back to, and the answer that it had kept is in front of every attempt.
    expected = [[1] * 6] if keeps_history else [[1], [1], [1, 1], [0, 1], [0, 1]]
    assert response_masks(judge.model.trajectory) == expected
    # Each attempt opens with another message; the main conversation is the first one, and the rest is warned of.
    first = judge.model.trajectory.sequences()[0].token_ids
    assert judge.model.token_manager.token_ids == first
    assert any("one of several sequences" in record.getMessage() for record in caplog.records) != keeps_history


# Row 15
async def test_the_main_sequence_goes_with_the_agent_over_snapshots_and_sessions(judged, tmp_path):
    judge = judged(numbered)
    agent = make_agent(judge.model)
    snapshots = [agent.take_snapshot(preset="session")]
    await agent.invoke_async("Question-0?")
    snapshots.append(agent.take_snapshot(preset="session"))
    await agent.invoke_async("Question-1?")
    for snapshot, question, sequence in (
        (snapshots[1], "Question-2?", [0, 2]),  # from the first answer, by the agent itself
        (snapshots[1], "Question-3?", [0, 3]),  # by a new one
        (snapshots[0], "Question-0?", [4]),  # from the beginning once more
    ):
        if question != "Question-2?":
            agent = make_agent(judge.model)
        agent.load_snapshot(snapshot)
        await agent.invoke_async(question)
        text = judge.server.tokenizer.decode(judge.model.token_manager.token_ids)
        assert [i for i in range(5) if f"Answer-{i}." in text] == [i for i in sequence]
    judge.check()
    assert "discarded" not in statuses(judge.model.trajectory)


# Row 15
@pytest.mark.parametrize("calls", [0, 2])
async def test_branches_from_one_snapshot_that_ask_the_same_keep_all_their_answers(judged, calls):
    """One of them uses a tool, and so goes on behind answers of the others that it never had."""
    asked = []

    def answer(request):
        if "Branch" not in request.text or "<tool_response>" in request.text:
            return numbered(request)
        asked.append(request)
        return call(expression="2 * 3") if len(asked) == calls + 1 else numbered(request)

    judge = judged(answer)
    trunk = make_agent(judge.model, make_tools()[0])
    await trunk.invoke_async("Question?")
    snapshot = trunk.take_snapshot(preset="session")
    branches = [make_agent(judge.model, make_tools()[0]) for _ in range(3)]
    for branch in branches:
        branch.load_snapshot(snapshot)
    await asyncio.gather(*(branch.invoke_async("Branch?") for branch in branches))
    judge.check()
    for branch in branches:
        judge.model.trajectory.settle(branch.messages)
    judge.check()
    assert len({turn.agent for turn in judge.model.trajectory.turns}) == (4 if judge.told else 1)
    assert statuses(judge.model.trajectory).count("final") == 3


# Row 16
async def test_an_agent_that_is_emptied_and_asked_the_same_again_keeps_its_first_answer(judged):
    judge = judged(["At once.", call(expression="2 * 3"), "It is 6."])
    agent = make_agent(judge.model, make_tools()[0])
    await agent.invoke_async("2 * 3?")
    agent.messages.clear()
    await agent.invoke_async("2 * 3?")
    judge.model.trajectory.settle(agent.messages)
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1], [1, 1]]
    assert judge.model.token_manager.token_ids == judge.model.trajectory.sequences()[1].token_ids


# Row 15
async def test_a_run_that_stops_at_every_checkpoint_is_one_sequence(judged):
    judge = judged([call(expression="2 * 3"), "6."])
    agent = make_agent(judge.model, make_tools()[0], checkpointing=True)
    result = await agent.invoke_async("Compute.")
    positions = []
    while result.stop_reason == "checkpoint":
        positions.append(result.checkpoint.position)
        result = await agent.invoke_async({"checkpointResume": {"checkpoint": result.checkpoint.to_dict()}})
    assert positions == ["after_model", "after_tools"]
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 16
async def test_few_shot_answers_are_prompt(judged):
    shots = [
        {"role": "user", "content": [{"text": "1 * 1?"}]},
        {
            "role": "assistant",
            "content": [{"toolUse": {"toolUseId": "s1", "name": "calculator", "input": {"expression": "1 * 1"}}}],
        },
        {
            "role": "user",
            "content": [{"toolResult": {"toolUseId": "s1", "status": "success", "content": [{"text": "1"}]}}],
        },
        {"role": "assistant", "content": [{"text": "EXAMPLE ANSWER"}]},
    ]
    judge = judged([call(expression="2 * 3"), "It is 6."])
    agent = make_agent(judge.model, make_tools()[0], messages=shots)
    await agent.invoke_async("2 * 3?")
    judge.check()
    assert "EXAMPLE" not in judge.trained_text()
    assert response_masks(judge.model.trajectory) == [[1, 1]]


# Row 16
async def test_a_direct_tool_call_is_prompt_and_the_sequence_goes_on(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model, make_tools()[0])
    await agent.invoke_async("Question-0?")
    agent.tool.calculator(expression="111 * 3")
    await agent.invoke_async("Question-1?")
    assert "333" in judge.server.requests[1].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1]]
    assert "111" not in judge.trained_text()


# Row 16
@pytest.mark.parametrize("edit", ["change", "delete", "insert", "swap", "truncate", "duplicate"])
async def test_messages_that_the_user_edits_open_a_sequence_or_fork(judged, edit):
    judge = judged(numbered)
    messages = []
    agent = make_agent(judge.model, messages=messages)
    for i in range(3):
        await agent.invoke_async(f"Question-{i}?")
    if edit == "change":
        messages[3]["content"] = [{"text": "CHANGED ANSWER"}]
    elif edit == "delete":
        del messages[2:4]
    elif edit == "insert":
        messages[2:2] = [{"role": "user", "content": [{"text": "INSERTED"}]}]
    elif edit == "swap":
        messages[0], messages[2] = messages[2], messages[0]
    elif edit == "truncate":
        del messages[-2:]
    else:
        messages += messages[-2:]
    await agent.invoke_async("Question-3?")
    judge.check()
    kept = {"change": [0, 1], "delete": [0, 1], "insert": [0, 1], "swap": [1], "truncate": [0, 0, 1]}
    expected = [[1, 1, 1, 1]] if edit == "duplicate" else [[1, 1, 1], kept[edit]]
    assert response_masks(judge.model.trajectory) == expected
    assert "CHANGED" not in judge.trained_text()


# Row 17
async def test_a_system_prompt_that_changes_opens_a_sequence(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)
    await agent.invoke_async("Question-0?")
    agent.system_prompt = "Be verbose."
    await agent.invoke_async("Question-1?")
    await agent.invoke_async("Question-2?")
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1], [1, 1]]
    assert "the system prompt changed" in judge.model.trajectory.turns[1].reason


# Row 17
async def test_a_system_prompt_that_is_written_anew_at_every_invocation_opens_one_only_if_it_differs(judged):
    judge = judged(numbered)
    agent = make_agent(judge.model)
    prompts = iter(["One.", "One.", "Two.", "One."])

    def rewrite(event: BeforeInvocationEvent):
        event.agent.system_prompt = next(prompts)

    agent.add_hook(rewrite, BeforeInvocationEvent)
    for i in range(4):
        await agent.invoke_async(f"Question-{i}?")
    judge.check()
    # The fourth call goes on from the second one; the answer of the third is prompt there.
    assert response_masks(judge.model.trajectory) == [[1], [1, 1, 1]]


# Row 17
async def test_a_tool_that_loads_a_tool_opens_a_sequence(judged):
    judge = judged([call("load"), call("loaded"), "Done."])

    @tool
    def loaded() -> str:
        """Loaded later."""
        return "FROM THE LOADED TOOL"

    @tool(context=True)
    def load(tool_context) -> str:
        """Load a tool."""
        tool_context.agent.tool_registry.process_tools([loaded])
        return "loaded it"

    await make_agent(judge.model, [load]).invoke_async("Load it.")
    assert '"name": "loaded"' not in judge.server.requests[0].text
    assert '"name": "loaded"' in judge.server.requests[1].text
    assert "FROM THE LOADED TOOL" in judge.server.requests[2].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1], [1, 1]]
    assert "the tools changed" in judge.model.trajectory.turns[1].reason


# Row 18
# Row 22
@needs_module("strands.background_tasks")
async def test_a_result_from_the_background_is_prompt_also_where_it_is_merged_into_an_own_answer(judged):
    judge = judged([call("compute", expression="6 * 7"), "Started.", "It is 42."])
    go_on = asyncio.Event()

    @tool
    async def compute(expression: str) -> str:
        """Compute.

        Args:
            expression: What.
        """
        await go_on.wait()
        return "RESULT-42"

    agent = make_agent(judge.model, [compute], background_tasks={"always": ["compute"]})

    def release(event: AfterModelCallEvent):
        if event.stop_response.stop_reason == "end_turn":
            go_on.set()

    agent.add_hook(release, AfterModelCallEvent)
    await agent.invoke_async("Compute.")
    assert [len(message["content"]) for message in agent.messages] == [1, 1, 1, 2, 1, 1]
    assert "RESULT-42" in judge.server.requests[2].text
    judge.check()
    assert response_masks(judge.model.trajectory) == [[1, 1], [0, 1]]
    judge.model.trajectory.settle(agent.messages)
    assert statuses(judge.model.trajectory) == ["committed", "committed", "final"]


class Guarded(SGLangModel):
    """A model behind a guardrail that redacts what was asked, what was answered, or both."""

    redaction: dict = {}

    async def stream(self, *args, **kwargs):
        async for event in super().stream(*args, **kwargs):
            yield event
        if self.redaction:
            yield {"redactContent": self.redaction}


# Row 24
@pytest.mark.parametrize(
    ("redaction", "discarded"),
    [
        ({"redactUserContentMessage": "[user redacted]"}, []),
        ({"redactAssistantContentMessage": "[answer redacted]"}, [0]),
        ({"redactUserContentMessage": "[user]", "redactAssistantContentMessage": "[answer]"}, [0]),
    ],
)
async def test_what_a_guardrail_redacts_is_gone_from_later_prompts_and_its_text_is_prompt(judged, redaction, discarded):
    judge = judged(numbered, model_class=Guarded)
    agent = make_agent(judge.model)
    judge.model.redaction = redaction
    await agent.invoke_async("SECRET QUESTION?")
    judge.model.redaction = {}
    await agent.invoke_async("Question-1?")
    assert ("SECRET" in judge.server.requests[1].text) == ("redactUserContentMessage" not in redaction)
    assert ("Answer-0" in judge.server.requests[1].text) == ("redactAssistantContentMessage" not in redaction)
    is_known = judge.told or len(redaction) < 2
    judge.check(discarded=discarded if is_known else [])
    assert ("is not known" in judge.model.trajectory.turns[0].note) != is_known
    assert all(text not in judge.trained_text() for text in redaction.values())


# Row 24
@pytest.mark.parametrize("before", [0, 1])
async def test_an_answer_that_a_guardrail_redacted_with_its_question_last_is_discarded_where_hooks_tell(judged, before):
    judge = judged(numbered, model_class=Guarded)
    agent = make_agent(judge.model)
    other = make_agent(judge.model, system_prompt="Another agent.")
    await other.invoke_async("Another question?")
    for i in range(before):
        await agent.invoke_async(f"Question-{i}?")
    judge.model.redaction = {"redactUserContentMessage": "[user]", "redactAssistantContentMessage": "[answer]"}
    await agent.invoke_async("SECRET QUESTION?")
    judge.model.trajectory.settle(other.messages)
    judge.model.trajectory.settle(agent.messages)
    judge.check(discarded=[before + 1] if judge.told else [])
    last = "discarded" if judge.told else "answered"
    assert statuses(judge.model.trajectory) == ["final", *["committed"] * before, last]


# Row 24
async def test_the_model_itself_never_redacts(judged):
    judge = judged([call(expression="2 * 3"), "6."])
    events = []
    agent = make_agent(judge.model, make_tools()[0], callback_handler=lambda **event: events.append(event))
    await agent.invoke_async("Compute.")
    chunks = [event["event"] for event in events if "event" in event]
    assert chunks
    assert not any("redactContent" in chunk for chunk in chunks)


# === a memory manager: what it remembers is put in front of one call, and what it extracts is no part of a rollout ===


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
@needs_module("strands.memory")
@needs_argument("__init__", "memory_manager")
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
@needs_module("strands.memory")
@needs_argument("__init__", "memory_manager")
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
@needs_module("strands.memory")
@needs_argument("__init__", "memory_manager")
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
