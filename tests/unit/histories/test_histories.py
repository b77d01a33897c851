"""Histories: what agents do themselves, and how others replace messages, answers and results."""

import asyncio
import copy
import threading
import uuid
import warnings
from contextlib import suppress
from itertools import chain, cycle, repeat

import pytest
from pydantic import BaseModel, Field
from strands import Agent, ModelRetryStrategy, tool
from strands.agent.conversation_manager import SlidingWindowConversationManager, SummarizingConversationManager
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolsEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    MessageAddedEvent,
)
from strands.interventions import Deny, Guide, InterventionHandler, Proceed
from strands.models.model import Model
from strands.multiagent import GraphBuilder, Swarm
from strands.session import FileSessionManager
from strands.types._events import ToolResultEvent
from strands.types.agent import ConcurrentInvocationMode
from strands.types.exceptions import ConcurrencyException, EventLoopException, MaxTokensReachedException
from strands.vended_plugins.context_injector import ContextInjector
from strands.vended_plugins.context_offloader import ContextOffloader, InMemoryStorage
from strands.vended_plugins.goal import GoalLoop
from strands.vended_plugins.steering import Guide as Steer, Proceed as GoOn, SteeringHandler

from strands_sglang import (
    SGLangAbortedError,
    SGLangClientError,
    SGLangModel,
    TerminationReason,
    Trajectory,
)
from strands_sglang.testing import ScriptedAnswer, ScriptedFault, ScriptedSGLang
from strands_sglang.trainers.slime import to_slime_samples
from support.agents import (
    advance,
    ask,
    assistant,
    call,
    make_agent,
    make_tools,
    needs_argument,
    needs_module,
    numbered,
    raise_once,
    response_masks,
    statuses,
    user,
)
from support.slime import Sample, slime_args

# Earlier versions of Strands lack these, and skip the tests of them.
with suppress(ImportError):
    from strands.middleware import ExecuteToolStage, InvokeModelStage, ModelStopReason
with suppress(ImportError):
    from strands._context_manager.strategies.offload import Offload

TOOLS = make_tools()[0]
COMPUTES = call(expression="2 * 3")


async def ask_at_length(agent, questions, sentences):
    """Ask numbered questions of that many sentences."""
    for i in range(questions):
        await agent.invoke_async(f"Question-{i}? " + "The weather in Paris is sunny today. " * sentences)


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
async def test_a_result_shortened_before_it_is_seen_continues(judged):
    judge = judged([call("read", page="Page-1"), call("read", page="Page-2"), "Both read."], context_window_limit=30000)
    agent = judge.agent([read], conversation_manager=None, context_manager="auto")
    await agent.invoke_async("Read two pages.")
    assert "Page-1 begins." in judge.prompt(-1)
    assert "Halfway" not in judge.prompt(-1)
    judge.check(masks=[[1, 1, 1]])


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
    agent = judge.agent([read], plugins=[plugin])
    await agent.invoke_async("Read a page.")
    assert "Page-1 begins." in judge.prompt(-1)
    assert "Halfway" not in judge.prompt(-1)
    await agent.invoke_async("And now?")
    judge.check(masks=[[1, 1, 1]])


# Row 4
@needs_module("strands._context_manager.presets")
async def test_results_dropped_later_open_a_sequence_with_the_marker(judged):
    judge = judged([*(call(expression=f"{i} * 7") for i in range(5)), "Done."], context_window_limit=30000)
    strategies = [Offload.drop("tool_results").when(preserve_recent=2)]
    agent = judge.agent(TOOLS, conversation_manager=None, context_manager={"strategies": strategies})
    await agent.invoke_async("Compute a lot.")
    judge.check()
    assert len(judge.trajectory.sequences()) > 1


# Row 4
@needs_module("strands._context_manager.presets")
@pytest.mark.parametrize("place", ["in a message of its own", "inside an own answer"])
async def test_a_marker_of_removed_messages_is_prompt(judged, place):
    judge = judged(lambda request: f"Answer-{request.index}.", context_window_limit=3000)
    kept = 4 if place == "inside an own answer" else 3
    strategies = [Offload.drop("*").when(utilization=0.35, preserve_recent=kept)]
    agent = judge.agent(conversation_manager=None, context_manager={"strategies": strategies})
    await ask_at_length(agent, 6, 4)
    judge.check()
    assert len(judge.trajectory.sequences()) > 1
    marked = next(m["content"] for m in agent.messages if "[Dropped" in m["content"][-1].get("text", ""))
    assert len(marked) == (2 if place == "inside an own answer" else 1)
    assert "[Dropped" in judge.prompt(-1)
    assert "[Dropped" not in judge.trained_text()


# Row 4
@needs_module("strands._context_manager.presets")
async def test_a_summary_inside_the_loop_is_auxiliary(judged):
    def answer(request):
        return f"Answer-{request.index}." if "Be brief." in request.text else "SUMMARY-TEXT"

    judge = judged(answer, context_window_limit=3000)
    strategies = [Offload.summarize("*").when(utilization=0.35, preserve_recent=3)]
    agent = judge.agent(conversation_manager=None, context_manager={"strategies": strategies})
    await ask_at_length(agent, 6, 4)
    summaries = [i for i, request in enumerate(judge.server.requests) if "Be brief." not in request.text]
    assert summaries
    judge.check(auxiliary=summaries)
    assert "SUMMARY-TEXT" not in judge.trained_text()
    assert "SUMMARY-TEXT" in judge.prompt(-1)


# Row 4
async def test_a_status_shown_for_one_call_opens_a_sequence_per_call(judged):
    judge = judged([COMPUTES, call(expression="6 * 7"), "Done."], context_window_limit=30000)
    agent = judge.agent(TOOLS, conversation_manager=None, context_manager="agentic")
    await agent.invoke_async("Compute.")
    assert all(request.text.count("<context-status>") == 1 for request in judge.server.requests)
    judge.check(masks=[[1], [1], [1]])
    judge.settle(agent)
    assert "discarded" not in judge.statuses()


# Row 4
async def test_a_tool_that_drops_messages_opens_a_sequence(judged):
    judge = judged(["Answer-0.", "Answer-1.", call("forget"), "Done.", "Answer-4."])

    @tool(context=True)
    def forget(tool_context) -> str:
        """Forget the beginning."""
        del tool_context.agent.messages[:4]
        return "forgotten"

    agent = judge.agent([forget])
    await ask(agent, 4)
    judge.check(masks=[[1, 1, 1], [1, 1]])
    assert "Question-0" not in judge.prompt(3)


# --- Conversation managers shorten and rewrite the history: what was sampled stays recorded, and no prompt lies ---


# Row 1
async def test_a_sliding_window_opens_a_sequence_per_window(judged):
    judge = judged(numbered)
    agent = judge.agent(conversation_manager=SlidingWindowConversationManager(window_size=4))
    await ask(agent, 5)
    # The third call is the first one after a cut: two messages were gone before the fourth one.
    assert ["Question-0" in request.text for request in judge.server.requests] == [True] * 3 + [False] * 2
    judge.check(masks=[[1, 1, 1], [1], [1]])
    assert "message 0 (user) is not the recorded one" in judge.trajectory.turns[3].reason


# Row 2
async def test_an_overflow_that_shortens_a_result_opens_a_sequence(judged):
    judge = judged([call("read", pages=1), call("read", pages=1), "Both read."], max_context_tokens=1500)
    agent = judge.agent([read_pages], conversation_manager=SlidingWindowConversationManager())
    await agent.invoke_async("Read two times.")
    judge.check()
    assert "failed" in judge.statuses()
    assert "truncated" in judge.prompt(-1)
    # Both begin with the first call; what it read is whole in one and shortened in the other.
    assert judge.masks() == [[1, 1], [0, 1]]


def summarizes(request):
    return f"SUMMARY-TEXT-{request.index}." if "summarize this" in request.text else numbered(request)


def summarizing(**how):
    return SummarizingConversationManager(summary_ratio=0.5, preserve_recent_messages=2, **how)


# Row 3
async def test_a_summary_is_auxiliary_and_opens_a_sequence(judged):
    judge = judged(summarizes, max_context_tokens=600)
    agent = judge.agent(conversation_manager=summarizing(summarization_system_prompt="Sum up."))
    await ask_at_length(agent, 7, 10)
    summaries = judge.with_text("summarize this")
    assert summaries
    judge.check(auxiliary=summaries)
    trained = judge.trained_text()
    assert "SUMMARY-TEXT" not in trained
    assert all(f"Answer-{i}." in trained for i in range(len(judge.server.requests)) if i not in summaries)
    assert "SUMMARY-TEXT" in judge.prompt(-1)


# Row 3
async def test_a_summarizing_agent_has_its_own_sequences(judged):
    judge = judged(summarizes, max_context_tokens=600)
    writer = judge.agent(system_prompt="You sum up.")
    agent = judge.agent(conversation_manager=summarizing(summarization_agent=writer))
    await ask_at_length(agent, 7, 10)
    assert "SUMMARY-TEXT" in judge.prompt(-1)
    judge.check()


# Row 3
async def test_summaries_of_concurrent_episodes_stay_in_their_episodes(judged):
    judge = judged(summarizes, max_context_tokens=600)

    async def episode(name):
        with judge.model.episode() as trajectory:
            manager = summarizing(summarization_system_prompt="Sum up.")
            agent = judge.agent(conversation_manager=manager)
            for i in range(7):
                await agent.invoke_async(f"Question-{i}? " + f"The weather in {name} is sunny today. " * 10)
            return trajectory

    # The same first question in pairs: what differs comes later.
    trajectories = await asyncio.gather(*(episode(name) for name in ("Paris", "Paris", "Rome")))
    summaries = judge.with_text("summarize this")
    assert len(summaries) >= 3
    judge.check(*trajectories, auxiliary=summaries)
    assert all(any(turn.is_auxiliary for turn in trajectory.turns) for trajectory in trajectories)
    assert len(judge.trajectory) == 0


# --- token counts ---


@tool(name="read")
def read_pages(pages: int = 1) -> str:
    """Read.

    Args:
        pages: How many.
    """
    return "a long page " * 100 * pages


def watch(agent):
    """Collect what was projected for each model call."""
    projected = []
    agent.add_hook(lambda event: projected.append(event.projected_input_tokens), BeforeModelCallEvent)
    return projected


@pytest.mark.parametrize("with_tools", [True, False])
async def test_strands_projection_equals_the_sent_prompt(judged, with_tools):
    broken = "<tool_call>\nno JSON\n</tool_call>"
    answers = [
        call("read", pages=3),
        "<think>\nhm\n</think>\n\nThree pages.",
        COMPUTES * 2 + broken,
        call("ghost"),
        call("invalid tool"),
        "Six.",
        "Bye.",
        "Again.",
    ]
    judge = judged(answers)
    agent = judge.agent([read_pages, *TOOLS] if with_tools else [])
    projected = watch(agent)
    for i in range(4):
        await agent.invoke_async(f"Question-{i}? " + "word " * 300)
    judge.check()
    assert projected == [len(request.input_ids) for request in judge.server.requests]


async def test_a_count_knows_which_sampled_tokens_stay(judged, chatml_tokenizer):
    """A turn cut by a stop string gets its end, and another stop token than the template's is dropped."""
    other, end = chatml_tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    judge = judged(
        [ScriptedAnswer("First.", stop_token_id=other), "Second. STOP here", "Third."],
        server={"stop_token_ids": [end, other]},
        sampling_params={"stop": ["STOP"]},
    )
    agent = judge.agent()
    projected = watch(agent)
    await ask(agent, 3)
    assert projected == [len(request.input_ids) for request in judge.server.requests]


async def test_a_recorded_conversation_is_counted_as_recorded(judged):
    """Also without the system prompt and the tools before it."""
    judge = judged([call("read"), "Done.", "Second."])
    agent = judge.agent([read_pages])
    await agent.invoke_async("Question?")
    explained, turns = judge.trajectory.explain(), judge.trajectory.turns
    assert await judge.model.count_tokens(agent.messages) == len(judge.model.token_manager)
    assert await judge.model.auxiliary.count_tokens(agent.messages) == len(judge.model.token_manager)
    more = [*agent.messages, user("And?")]
    counted = await judge.model.count_tokens(more)
    specs = agent.tool_registry.get_all_tool_specs()
    assert await judge.model.count_tokens(more, specs, agent.system_prompt) == counted
    assert (judge.trajectory.explain(), judge.trajectory.turns) == (explained, turns)
    await agent.invoke_async("And?")
    assert counted == len(judge.server.requests[2].input_ids)


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([], id="none"),
        pytest.param([user()], id="an empty message"),
        pytest.param([assistant("word " * 50)], id="an answer"),
        pytest.param(
            [assistant({"toolUse": {"toolUseId": "t", "name": "f", "input": {"a": "word"}}})],
            id="a call without a result",
        ),
        pytest.param(
            [user({"toolResult": {"toolUseId": "t", "status": "error", "content": [{"text": "word"}]}})],
            id="a result without a call",
        ),
        pytest.param([user({"video": {"source": {"bytes": b"x"}}})], id="video"),
        pytest.param([user("\ud800 word")], id="half a character"),
    ],
)
@pytest.mark.parametrize("before", [0, 1])
async def test_any_fragment_is_counted(judged, messages, before):
    judge = judged(numbered)
    for _ in range(before):
        await judge.agent().invoke_async("Question?")
    words = str(messages).count("word")
    assert words <= await judge.model.count_tokens(messages) < 200


async def test_new_messages_are_encoded_once_for_count_and_call(judged, monkeypatch):
    """Every call counts first."""
    judge = judged([call("read", pages=20), "Done."])
    encoded = []
    encode = judge.model.chat_template.encode

    def watched(text):
        encoded.append(text)
        return encode(text)

    monkeypatch.setattr(judge.model.chat_template, "encode", watched)
    agent = judge.agent([read_pages])
    question = f"Question {uuid.uuid4()}?"  # no other test has opened with it: samples of one prompt share its tokens
    await agent.invoke_async(question + " word" * 500)
    assert sum("a long page" in text for text in encoded) == 1
    assert sum(question in text for text in encoded) == 1


async def test_the_context_limit_is_the_configured_or_the_servers(rollout):
    for config, limit in (({}, 1500), ({"context_window_limit": 700}, 700), ({"max_context_tokens": 900}, 900)):
        _, model = rollout(["ok"], server={"context_length": 1500}, **config)
        await model.count_tokens([user("hi")])
        assert (model.context_window_limit, model.auxiliary.context_window_limit) == (limit, limit)
    _, model = rollout(["ok"])
    assert model.context_window_limit is None


async def test_proactive_compression_goes_by_the_server_s_context(judged):
    limits = {"max_new_tokens": 400}
    judge = judged(lambda request: "word " * 100, server={"context_length": 1500}, sampling_params=limits)
    manager = SlidingWindowConversationManager(window_size=1000, proactive_compression={"compression_threshold": 0.5})
    agent = judge.agent(conversation_manager=manager)
    projected = watch(agent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(12):
            await agent.invoke_async(f"Question-{i}? Tell me more.")
    assert len(agent.messages) < 24
    assert max(len(request.input_ids) for request in judge.server.requests) < 1500 - 400
    assert max(projected) < 1500


async def test_a_server_that_cannot_be_asked_does_not_keep_a_count(chatml_tokenizer):
    async def never(*args, **kwargs):
        advance(60)
        await asyncio.Event().wait()

    server = ScriptedSGLang(chatml_tokenizer, ["ok"])
    client = server.client()
    client.context_length = never
    model = SGLangModel(tokenizer=chatml_tokenizer, client=client)
    messages = [user("hi")]
    counted = await model.count_tokens(messages, [], "Be brief.")
    assert 0 < counted < 50
    assert model.context_window_limit is None


async def test_a_counted_prompt_is_not_sent_for_other_written_names(judged):
    """Strands keeps in its agent which name a model wrote for a call, and does not pass it when it counts."""
    judge = judged(["Done."])
    use = {"toolUseId": "a", "name": "INVALID_TOOL_NAME", "input": {}}
    messages = [
        user("Question?"),
        assistant({"toolUse": use}),
        user({"toolResult": {"toolUseId": "a", "content": [{"text": "No."}]}}),
    ]
    await judge.model.count_tokens(messages, [], "Be brief.")
    state = {"strands_sglang_names": {"a": "read pages!"}}
    async for _ in judge.model.stream(messages, [], "Be brief.", model_state=state):
        pass
    assert "read pages!" in judge.prompt(0)


# === hooks, middleware, steering and interventions: how they replace messages, answers and results ===


# --- Hooks: what they edit in the history, and the calls that they make the agent repeat ---


# Row 7
async def test_input_replaced_for_the_tool_keeps_the_sampled_call(judged):
    judge = judged([COMPUTES, "Fine."])
    tools, ran = make_tools()
    agent = judge.agent(tools)

    def replace(event):
        event.tool_use = {**event.tool_use, "input": {"expression": "5 * 5"}}

    agent.add_hook(replace, BeforeToolCallEvent)
    await agent.invoke_async("Compute.")
    assert ran == ["5 * 5"]
    judge.check(masks=[[1, 1]])


def edit_input(event):
    event.tool_use["input"]["expression"] = "5 * 5"


# Row 7
async def test_input_edited_in_the_history_keeps_the_call_trained(judged):
    judge = judged([COMPUTES, "Fine.", "Bye."])
    tools, ran = make_tools()
    agent = judge.agent(tools)
    agent.add_hook(edit_input, BeforeToolCallEvent)
    await ask(agent, "Compute.", "Thanks.")
    assert ran == ["5 * 5"]
    assert '{"expression": "2 * 3"}' not in judge.prompt(1)
    judge.check(masks=[[1], [1, 1]])
    judge.settle(agent)
    assert judge.statuses() == ["committed", "committed", "final"]


# Row 7
async def test_an_edited_call_of_a_stopped_episode_is_final(judged):
    judge = judged([COMPUTES])
    agent = judge.agent(TOOLS)
    agent.add_hook(edit_input, BeforeToolCallEvent)
    await agent.invoke_async("Compute.", limits={"turns": 1})
    judge.settle(agent)
    judge.check()
    assert judge.statuses() == ["final"]


# Row 7
@pytest.mark.parametrize("event_type", [AfterModelCallEvent, MessageAddedEvent])
async def test_an_answer_with_replaced_text_is_discarded(judged, event_type):
    judge = judged(numbered)
    agent = judge.agent()

    def redact(event):
        message = event.message if event_type is MessageAddedEvent else event.stop_response.message
        if message["role"] == "assistant":
            message["content"] = [{"text": "REDACTED"}]

    agent.add_hook(redact, event_type)
    await ask(agent, 2)
    assert "REDACTED" in judge.prompt(1)
    assert "Answer-0" not in judge.prompt(1)
    judge.settle(agent)
    judge.check(discarded=[0, 1])
    assert "REDACTED" not in judge.trained_text()


# Row 7
@pytest.mark.parametrize("settled", [True, False])
async def test_replaced_answers_are_warned_of_once_with_the_difference(judged, caplog, settled):
    judge = judged(lambda request: f"<think>\nhm\n</think>\n\n{numbered(request)}")
    agent = judge.agent()

    def redact(event):
        if event.message["role"] == "assistant":
            event.message["content"] = [{"text": "REDACTED"}]

    agent.add_hook(redact, MessageAddedEvent)
    await ask(agent, 1 if settled else 3)
    if settled:
        judge.settle(agent)
    (warning,) = [
        record.getMessage() for record in caplog.records if "replaced a sampled answer" in record.getMessage()
    ]
    said = "message 1 (assistant) replaced it, with no reasoning, other text"
    assert said in warning
    assert "call=<0>" in warning
    assert said in judge.trajectory.explain().splitlines()[0]
    if not settled:
        opened = judge.trajectory.turns[1].reason
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
    agent = judge.agent()

    def edit(event):
        if event.message["role"] == "assistant":
            event.message["content"] = tidy(event.message["content"])

    agent.add_hook(edit, MessageAddedEvent)
    await ask(agent, 2)
    judge.settle(agent)
    judge.check(masks=[[1], [1]])
    assert judge.statuses() == ["committed", "final"]
    assert f"kept in another form: message 1 (assistant) holds {difference}" in judge.trajectory.explain()
    assert not caplog.records


# Row 7
async def test_an_answer_whose_tool_call_a_hook_takes_out_is_discarded(judged):
    judge = judged([f"Let me see. {COMPUTES}", "Fine."])
    tools, ran = make_tools()
    agent = judge.agent(tools)

    def forbid(event):
        message = event.stop_response.message
        message["content"] = [block for block in message["content"] if "toolUse" not in block]

    agent.add_hook(forbid, AfterModelCallEvent)
    await agent.invoke_async("Compute.")
    judge.settle(agent)
    assert ran == []
    judge.check(discarded=[0])
    assert "no tool call" in judge.trajectory.turns[0].note


# Row 23
async def test_answers_that_a_hook_retries_are_discarded(judged):
    judge = judged(["Bad.", COMPUTES, "Bad.", "Bad.", call(expression="6 * 7"), "Good."])
    agent = judge.agent(TOOLS)

    def retry(event):
        event.retry = "Bad." in str(event.stop_response.message)

    agent.add_hook(retry, AfterModelCallEvent)
    await agent.invoke_async("Compute.")
    judge.check(discarded=[0, 2, 3], masks=[[1, 1, 1]])
    judge.settle(agent)
    assert judge.statuses() == ["discarded", "committed", "discarded", "discarded", "committed", "final"]


# Row 23
async def test_a_call_that_failed_and_is_retried_leaves_one_turn(judged):
    class Retry(ModelRetryStrategy):
        def is_retryable(self, exception):
            return isinstance(exception, SGLangAbortedError)

    judge = judged([ScriptedAnswer("", finish_reason="abort"), ScriptedAnswer("Par", finish_reason="abort"), "Whole."])
    retries = Retry(max_attempts=3, initial_delay=0, max_delay=0)
    agent = judge.agent(retry_strategy=retries)
    await agent.invoke_async("Question?")
    assert [turn.status.value for turn in judge.trajectory.turns][-2:] == ["cut", "answered"]
    texts = [judge.server.tokenizer.decode(s.segments[-1].token_ids) for s in judge.trajectory.sequences()]
    assert texts == ["Whole.<|im_end|>", "Par"]


# Row 23
async def test_an_answer_lost_to_a_raising_hook_is_discarded(judged):
    judge = judged(numbered)
    agent = judge.agent()
    raise_once(agent, AfterModelCallEvent)
    with pytest.raises(ZeroDivisionError):
        await agent.invoke_async("Question-0?")
    judge.settle(agent)
    judge.check(discarded=[0])
    await agent.invoke_async("Question-1?")
    judge.check(discarded=[0])


# --- What is added to a call for that call only, and answers that middleware asks for more than once or makes up ---


needs_middleware = needs_module("strands.middleware")


async def collect(events):
    return [event async for event in events]


def best_of(kept, *, calls=1, at_once=True):
    """Middleware that takes one of three answers to each of the first calls."""
    asked = chain([3] * calls, repeat(1))

    async def take(context, next_fn):
        streams = [collect(next_fn(context)) for _ in range(next(asked))]
        answers = await asyncio.gather(*streams) if at_once else [await stream for stream in streams]
        for event in answers[kept % len(answers)]:
            yield event

    return take


# Row 5
async def test_text_injected_for_one_call_is_only_in_its_prompt(judged):
    judge = judged([COMPUTES, "6.", "Bye."])
    agent = judge.agent(TOOLS, plugins=[ContextInjector(lambda context: "<now>noon</now>")])
    await ask(agent, "Compute.", "Thanks.")
    assert [request.text.count("<now>") for request in judge.server.requests] == [1, 0, 1]
    # The third call extends the second one, whose prompt held no injected text.
    judge.check(masks=[[1], [1, 1]])
    judge.settle(agent)
    assert "discarded" not in judge.statuses()
    assert "message 0 (user) is not the recorded one" in judge.trajectory.turns[1].reason


# Row 5
@needs_middleware
async def test_parts_replaced_for_one_call_open_a_sequence(judged):
    judge = judged([COMPUTES, "6.", "Bye."])
    calls = iter(range(9))

    async def replace(context):
        if next(calls) != 1:
            return context
        return context.replace(system_prompt="Be long-winded.", tool_specs=[])

    agent = judge.agent(TOOLS)
    agent.add_middleware(InvokeModelStage.Input, replace)
    await ask(agent, "Compute.", "Thanks.")
    assert ["Be long-winded." in request.text for request in judge.server.requests] == [False, True, False]
    # The third call extends the first one, whose system prompt and tools it has; the answer between is prompt.
    judge.check(masks=[[1], [1, 1]])


# Row 6
@needs_middleware
@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("at_once", [True, False])
async def test_answers_not_taken_are_discarded(judged, kept, at_once):
    judge = judged(numbered)
    agent = judge.agent()
    agent.add_middleware(InvokeModelStage, best_of(kept, calls=2, at_once=at_once))
    await ask(agent, 2)
    expected = ["discarded"] * 6
    expected[kept], expected[3 + kept] = "committed", "final"
    assert judge.statuses()[:3] == expected[:3]  # the next call shows it
    judge.settle(agent)  # the messages at the end do
    assert judge.statuses() == expected
    judge.check(discarded={0, 1, 2, 3, 4, 5} - {kept, 3 + kept}, masks=[[1, 1]])


# Row 6
@needs_middleware
@pytest.mark.parametrize("questions", [1, 2])
async def test_of_several_answers_that_say_the_same_one_is_trained(judged, questions):
    judge = judged(lambda request: "Always the same.")
    agent = judge.agent()
    agent.add_middleware(InvokeModelStage, best_of(0))
    await ask(agent, questions)
    judge.settle(agent)
    assert judge.statuses().count("discarded") == 2
    assert judge.masks() == [[1] * questions]


# Row 6
@needs_middleware
async def test_an_answer_that_middleware_made_up_is_prompt(judged):
    judge = judged(numbered)
    calls = iter(range(9))

    async def cached(context, next_fn):
        if next(calls) == 1:
            message = assistant("FROM THE CACHE")
            usage = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
            yield ModelStopReason(stop_reason="end_turn", message=message, usage=usage, metrics={"latencyMs": 0})
            return
        async for event in next_fn(context):
            yield event

    agent = judge.agent()
    agent.add_middleware(InvokeModelStage, cached)
    await ask(agent, 3)
    judge.check()
    assert len(judge.server.requests) == 2
    assert "FROM THE CACHE" in judge.prompt(1)
    assert "FROM THE CACHE" not in judge.trained_text()
    assert judge.masks() == [[1, 1]]


# Row 6
@needs_middleware
async def test_an_answer_rewritten_by_middleware_is_prompt(judged):
    judge = judged(numbered)

    async def redact(result):
        result.result["stop"][1]["content"] = [{"text": "REDACTED"}]
        return result

    agent = judge.agent()
    agent.add_middleware(InvokeModelStage.Output, redact)
    await ask(agent, 2)
    assert "REDACTED" in judge.prompt(1)
    assert "Answer-0" not in judge.prompt(1)
    judge.check(discarded=[0, 1] if judge.has_hooks else [0])  # only hooks know of the last one
    assert "REDACTED" not in judge.trained_text()


# --- Steering and interventions: how they replace an answer or a tool's result ---


class Steering(SteeringHandler):
    """Steers the first answer."""

    is_steering = True

    async def steer_after_model(self, **kwargs):
        steered, self.is_steering = self.is_steering, False
        return Steer(reason="SAY IT POLITELY") if steered else GoOn(reason="")


# Row 23
async def test_an_answer_sent_back_by_steering_is_discarded(judged):
    judge = judged(numbered)
    agent = judge.agent(plugins=[Steering()])
    await agent.invoke_async("Question?")
    assert "SAY IT POLITELY" in judge.prompt(1)
    assert "Answer-0" not in judge.prompt(1)
    judge.check(discarded=[0])
    await agent.invoke_async("Question?")
    judge.settle(agent)
    judge.check(discarded=[0])
    assert judge.statuses() == ["discarded", "committed", "final"]
    assert "SAY IT POLITELY" not in judge.trained_text()


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
async def test_an_interventions_message_is_prompt(judged, method, action, discarded):
    judge = judged(lambda request: COMPUTES if "FEEDBACK" not in request.text else "Fine.")
    agent = judge.agent(TOOLS, interventions=[intervention(method, action)])
    await agent.invoke_async("Compute.")
    judge.check(discarded=discarded)
    assert "FEEDBACK" in judge.prompt(-1)
    assert "FEEDBACK" not in judge.trained_text()


# === history that the model did not speak on this record: few-shot, sessions, direct tool calls, edits, redaction ===


def in_session(judge, folder):
    """An agent of the session in a folder."""
    return judge.agent(TOOLS, agent_id="a", session_manager=FileSessionManager("session", storage_dir=str(folder)))


# Row 15
async def test_a_restored_session_opens_a_sequence_with_old_answers(judged, tmp_path):
    judge = judged([COMPUTES, "It is 6.", "Welcome back.", "Bye."])
    await in_session(judge, tmp_path).invoke_async("Compute.")
    first = judge.trajectory
    judge.check()
    judge.model.reset()
    await ask(in_session(judge, tmp_path), "Do you remember?", "Good.")
    assert "It is 6." in judge.prompt(2)
    judge.check(first, judge.trajectory, masks=[[1, 1]])
    assert "It is 6." not in judge.trained_text()


# Row 15
async def test_a_restored_session_continues_an_existing_record(judged, tmp_path):
    judge = judged([COMPUTES, "It is 6.", "Welcome back."])
    await in_session(judge, tmp_path).invoke_async("Compute.")
    await in_session(judge, tmp_path).invoke_async("Do you remember?")
    judge.check(masks=[[1, 1, 1]])


# Row 15
async def test_a_loaded_snapshot_takes_back_later_messages(judged):
    judge = judged(numbered)
    agent = judge.agent()
    await agent.invoke_async("Question-0?")
    snapshot = agent.take_snapshot(preset="session")
    await agent.invoke_async("Question-1?")
    agent.load_snapshot(snapshot)
    await agent.invoke_async("Question-2?")
    assert "Question-1" not in judge.prompt(2)
    judge.check(masks=[[1, 1], [0, 1]])


# Row 15
@pytest.mark.parametrize("keeps_history", [True, False])
async def test_attempts_at_a_goal_are_trained_once(judged, caplog, keeps_history):
    judge = judged(numbered)
    asked = []

    def is_good(response, agent):
        asked.append(response)
        return {"passed": len(asked) % 3 == 0, "feedback": "NOT GOOD ENOUGH"}

    plugin = GoalLoop(goal=is_good, max_attempts=4, preserve_context=keeps_history)
    agent = judge.agent(plugins=[plugin])
    await ask(agent, 2)
    judge.settle(agent)
    judge.check()
    assert "discarded" not in judge.statuses()
    # An attempt that starts over resets the agent's whole state, as if another agent had asked. The second invocation
    # resets it to the state after the first, so every attempt begins with the answer kept there.
    expected = [[1] * 6] if keeps_history else [[1], [1], [1, 1], [0, 1], [0, 1]]
    assert judge.masks() == expected
    assert "NOT GOOD ENOUGH" in judge.prompt(1)
    assert ("Answer-0" in judge.prompt(1)) == keeps_history
    assert "NOT GOOD ENOUGH" not in judge.trained_text()
    # Each attempt opens with another message; the main conversation is the first one, and the rest is warned of.
    first = judge.trajectory.sequences()[0].token_ids
    assert judge.model.token_manager.token_ids == first
    assert any("one of several sequences" in record.getMessage() for record in caplog.records) != keeps_history


# Row 15
async def test_the_main_sequence_follows_snapshots_and_sessions(judged, tmp_path):
    judge = judged(numbered)
    agent = judge.agent()
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
            agent = judge.agent()
        agent.load_snapshot(snapshot)
        await agent.invoke_async(question)
        text = judge.server.tokenizer.decode(judge.model.token_manager.token_ids)
        assert [i for i in range(5) if f"Answer-{i}." in text] == sequence
    judge.check()
    assert "discarded" not in judge.statuses()


# Row 15
@pytest.mark.parametrize("calls", [0, 2])
async def test_branches_from_one_snapshot_keep_all_their_answers(judged, calls):
    """One of them uses a tool, and continues after answers of the others that it never had."""
    asked = []

    def answer(request):
        if "Branch" not in request.text or "<tool_response>" in request.text:
            return numbered(request)
        asked.append(request)
        return COMPUTES if len(asked) == calls + 1 else numbered(request)

    judge = judged(answer)
    trunk = judge.agent(TOOLS)
    await trunk.invoke_async("Question?")
    snapshot = trunk.take_snapshot(preset="session")
    branches = [judge.agent(TOOLS) for _ in range(3)]
    for branch in branches:
        branch.load_snapshot(snapshot)
    await asyncio.gather(*(branch.invoke_async("Branch?") for branch in branches))
    judge.check()
    for branch in branches:
        judge.trajectory.settle(branch.messages)
    judge.check()
    assert len({turn.agent for turn in judge.trajectory.turns}) == (4 if judge.has_hooks else 1)
    assert judge.statuses().count("final") == 3


# Row 16
async def test_an_emptied_agent_asked_again_keeps_its_first_answer(judged):
    judge = judged(["At once.", COMPUTES, "It is 6."])
    agent = judge.agent(TOOLS)
    await agent.invoke_async("2 * 3?")
    agent.messages.clear()
    await agent.invoke_async("2 * 3?")
    judge.settle(agent)
    judge.check(masks=[[1], [1, 1]])
    assert judge.model.token_manager.token_ids == judge.trajectory.sequences()[1].token_ids


# Row 15
async def test_a_run_that_stops_at_every_checkpoint_is_one_sequence(judged):
    judge = judged([COMPUTES, "6."])
    agent = judge.agent(TOOLS, checkpointing=True)
    result = await agent.invoke_async("Compute.")
    positions = []
    while result.stop_reason == "checkpoint":
        positions.append(result.checkpoint.position)
        result = await agent.invoke_async({"checkpointResume": {"checkpoint": result.checkpoint.to_dict()}})
    assert positions == ["after_model", "after_tools"]
    judge.check(masks=[[1, 1]])


# Row 16
async def test_few_shot_answers_are_prompt(judged):
    shots = [
        user("1 * 1?"),
        assistant({"toolUse": {"toolUseId": "s1", "name": "calculator", "input": {"expression": "1 * 1"}}}),
        user({"toolResult": {"toolUseId": "s1", "status": "success", "content": [{"text": "1"}]}}),
        assistant("EXAMPLE ANSWER"),
    ]
    judge = judged([COMPUTES, "It is 6."])
    agent = judge.agent(TOOLS, messages=shots)
    await agent.invoke_async("2 * 3?")
    judge.check()
    assert "EXAMPLE" not in judge.trained_text()
    assert judge.masks() == [[1, 1]]


# Row 16
async def test_a_direct_tool_call_is_prompt_in_the_same_sequence(judged):
    judge = judged(numbered)
    agent = judge.agent(TOOLS)
    await agent.invoke_async("Question-0?")
    agent.tool.calculator(expression="111 * 3")
    await agent.invoke_async("Question-1?")
    assert "333" in judge.prompt(1)
    judge.check(masks=[[1, 1]])
    assert "111" not in judge.trained_text()


# Row 16
@pytest.mark.parametrize("edit", ["change", "delete", "insert", "swap", "truncate", "duplicate"])
async def test_messages_that_the_user_edits_open_a_sequence_or_fork(judged, edit):
    judge = judged(numbered)
    messages = []
    agent = judge.agent(messages=messages)
    await ask(agent, 3)
    if edit == "change":
        messages[3]["content"] = [{"text": "CHANGED ANSWER"}]
    elif edit == "delete":
        del messages[2:4]
    elif edit == "insert":
        messages[2:2] = [user("INSERTED")]
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
    assert judge.masks() == expected
    assert "CHANGED" not in judge.trained_text()


# Row 17
async def test_a_changed_system_prompt_opens_a_sequence(judged):
    judge = judged(numbered)
    agent = judge.agent()
    prompts = iter(["One.", "One.", "Two.", "One."])

    def rewrite(event):
        event.agent.system_prompt = next(prompts)

    agent.add_hook(rewrite, BeforeInvocationEvent)
    await ask(agent, 4)
    # The fourth call extends the second one; the answer of the third is prompt there.
    judge.check(masks=[[1], [1, 1, 1]])
    assert "the system prompt changed" in judge.trajectory.turns[2].reason


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

    await judge.agent([load]).invoke_async("Load it.")
    assert '"name": "loaded"' not in judge.prompt(0)
    assert '"name": "loaded"' in judge.prompt(1)
    assert "FROM THE LOADED TOOL" in judge.prompt(2)
    judge.check(masks=[[1], [1, 1]])
    assert "the tools changed" in judge.trajectory.turns[1].reason


# Row 18
# Row 22
@needs_module("strands.background_tasks")
async def test_a_background_result_is_prompt_even_if_merged(judged):
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

    agent = judge.agent([compute], background_tasks={"always": ["compute"]})

    def release(event):
        if event.stop_response.stop_reason == "end_turn":
            go_on.set()

    agent.add_hook(release, AfterModelCallEvent)
    await agent.invoke_async("Compute.")
    assert [len(message["content"]) for message in agent.messages] == [1, 1, 1, 2, 1, 1]
    assert "RESULT-42" in judge.prompt(2)
    judge.check(masks=[[1, 1], [0, 1]])
    judge.settle(agent)
    assert judge.statuses() == ["committed", "committed", "final"]


class Guarded(SGLangModel):
    """A model with a guardrail that redacts what was asked, what was answered, or both."""

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
async def test_redacted_text_is_gone_from_later_prompts(judged, redaction, discarded):
    judge = judged(numbered, model_class=Guarded)
    agent = judge.agent()
    judge.model.redaction = redaction
    await agent.invoke_async("SECRET QUESTION?")
    judge.model.redaction = {}
    await agent.invoke_async("Question-1?")
    assert ("SECRET" in judge.prompt(1)) == ("redactUserContentMessage" not in redaction)
    assert ("Answer-0" in judge.prompt(1)) == ("redactAssistantContentMessage" not in redaction)
    is_known = judge.has_hooks or len(redaction) < 2
    judge.check(discarded=discarded if is_known else [])
    assert ("is not known" in judge.trajectory.turns[0].note) != is_known
    assert all(text not in judge.trained_text() for text in redaction.values())


# Row 24
@pytest.mark.parametrize("before", [0, 1])
async def test_hooks_show_that_a_redacted_answer_is_discarded(judged, before):
    judge = judged(numbered, model_class=Guarded)
    agent = judge.agent()
    other = judge.agent(system_prompt="Another agent.")
    await other.invoke_async("Another question?")
    await ask(agent, before)
    judge.model.redaction = {"redactUserContentMessage": "[user]", "redactAssistantContentMessage": "[answer]"}
    await agent.invoke_async("SECRET QUESTION?")
    judge.trajectory.settle(other.messages)
    judge.settle(agent)
    judge.check(discarded=[before + 1] if judge.has_hooks else [])
    last = "discarded" if judge.has_hooks else "answered"
    assert judge.statuses() == ["final", *["committed"] * before, last]


# Row 24
async def test_the_model_itself_never_redacts(judged):
    judge = judged([COMPUTES, "6."])
    events = []
    agent = judge.agent(TOOLS, callback_handler=lambda **event: events.append(event))
    await agent.invoke_async("Compute.")
    chunks = [event["event"] for event in events if "event" in event]
    assert chunks
    assert not any("redactContent" in chunk for chunk in chunks)


# === a memory manager: what it remembers precedes one call, and its extractions are not trained ===


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


# Row 5
@needs_module("strands.memory")
@needs_argument("__init__", "memory_manager")
async def test_remembered_text_is_in_one_prompt_and_opens_a_sequence(judged):
    from strands.memory import MemoryManager

    judge = judged([COMPUTES, "6.", "Bye."])
    agent = judge.agent(TOOLS, memory_manager=MemoryManager([Store("PARIS IS NICE")]))
    await ask(agent, "Compute.", "Thanks.")
    shown = [request.text.count("PARIS IS NICE") for request in judge.server.requests]
    assert shown[0] == shown[-1] == 1
    assert shown[1] == 0
    judge.check()
    trajectory = judge.trajectory
    # Nothing was injected after the tool's result, so that call does not extend the first one; the third one does.
    assert response_masks(trajectory) == [[1], [1, 1]]
    trajectory.settle(agent.messages)
    assert "discarded" not in statuses(trajectory)
    assert "PARIS" not in judge.trained_text()


# Row 3
@needs_module("strands.memory")
@needs_argument("__init__", "memory_manager")
async def test_facts_extracted_after_the_loop_are_auxiliary(judged):
    from strands.memory import ExtractionConfig, InvocationTrigger, MemoryManager

    def answer(request):
        return '[{"content": "EXTRACTED"}]' if "Extract facts" in request.text else numbered(request)

    judge = judged(answer)
    store = Store(extraction=ExtractionConfig(trigger=[InvocationTrigger()]))
    manager = MemoryManager([store], injection=False)
    with judge.model.episode() as trajectory:
        agent = judge.agent(memory_manager=manager)
        for i in range(2):
            await agent.invoke_async(f"Question-{i}?")
            await manager.flush()
    extractions = judge.with_text("Extract facts")
    assert len(extractions) == 2
    assert store.remembered == ["EXTRACTED"] * 2
    judge.check(trajectory, auxiliary=extractions)
    assert response_masks(trajectory) == [[1, 1]]
    assert len(judge.trajectory) == 0


# === an agent's own answers in every form: blank, with names that no tool has, structured, forced ===


# --- Own answers are recognized in the form in which Strands returns them, and a cut one ends its sequence ---


@tool
def note(value: object = None, other: object = None) -> str:
    """Note something.

    Args:
        value: Anything.
        other: Anything else.
    """
    return "noted"


def raw_call(arguments):
    return '<tool_call>\n{"name": "note", "arguments": ' + arguments + "}\n</tool_call>"


# Row 8
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param("", id="nothing at all"),
        pytest.param("  \n ", id="blank text"),
        pytest.param(f"  \n {raw_call('{}')}", id="blank text before a call"),
        pytest.param(f"{raw_call('{}')}\n  ", id="blank text after a call"),
        pytest.param(" Text with spaces around it. ", id="spaces around text"),
        pytest.param(f"Text, then a call. {raw_call('{}')}", id="text and a call"),
        pytest.param("<think>\nhm\n</think>\n\n", id="reasoning alone"),
        pytest.param(f"<think>\nhm\n</think>\n\n {raw_call('{}')}", id="reasoning, blank text and a call"),
        pytest.param("<think>\n\n</think>\n\nText.", id="empty reasoning"),
        pytest.param("<think>\nnever closed", id="reasoning that nothing closes"),
        pytest.param('<tool_call>\n{"name": "bad name!", "arguments": {}}\n</tool_call>', id="an invalid tool name"),
        pytest.param('<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>', id="an empty tool name"),
        pytest.param(f'<tool_call>\n{{"name": "{"n" * 65}"}}\n</tool_call>', id="a tool name that is too long"),
        pytest.param("<tool_call>\nno JSON\n</tool_call>", id="a call that does not parse"),
        pytest.param("[blank text]", id="what Strands writes for blank text"),
    ],
)
@pytest.mark.parametrize("with_tools", [True, False])
async def test_an_answer_that_strands_normalises_is_extended(judged, answer, with_tools):
    judge = judged([answer, "Second.", "Third.", "Fourth."])
    agent = judge.agent([note] if with_tools else [])
    await ask(agent, 3)
    judge.check(masks=[[1] * len(judge.server.requests)])
    judge.settle(agent)
    assert judge.statuses() == ["committed"] * (len(judge.server.requests) - 1) + ["final"]


# Row 9
@pytest.mark.parametrize(
    "arguments",
    [
        '{ "value" :1 ,\n\t"other": [ ] }',
        '{"other": 2, "value": 1}',
        '{"value": 1, "value": 2}',
        '{"value": 1.0, "other": 1e3}',
        '{"value": NaN, "other": -Infinity}',
        '{"value": 123456789012345678901234567890}',
        '{"value": "\\u00e9\\ud83d\\ude42 \\/ \\t", "other": "é🙂"}',
        '{"value": "\\ud800"}',
        '{"value": {"1": {"b": [null, true, {"a": ""}]}}}',
        "{}",
        "",
        "null",
        "[1, 2]",
        '"text"',
        "{'value': 1}",
    ],
)
async def test_tool_input_that_changes_its_form_in_json_is_extended(judged, arguments):
    judge = judged([raw_call(arguments), "Noted."])
    await judge.agent([note]).invoke_async("Go.")
    judge.check(masks=[[1, 1]])


# Row 10
async def test_a_cut_call_ends_its_sequence_and_its_text_is_prompt(judged):
    judge = judged([ScriptedAnswer(COMPUTES, finish_reason="length"), "Again."])
    tools, ran = make_tools()
    agent = judge.agent(tools)
    with pytest.raises(MaxTokensReachedException):
        await agent.invoke_async("Compute.")
    assert ran == []
    await agent.invoke_async("Continue.")
    assert "tool use was incomplete" in judge.prompt(1)
    judge.check(masks=[[1], [1]])
    judge.settle(agent)
    assert judge.statuses() == ["final", "final"]
    assert "incomplete" not in judge.trained_text()


# Row 10
async def test_a_cut_text_is_extended(judged):
    judge = judged([ScriptedAnswer("It continues and", finish_reason="length"), "on."])
    agent = judge.agent()
    with pytest.raises(MaxTokensReachedException):
        await agent.invoke_async("Tell me.")
    await agent.invoke_async("Continue.")
    judge.check(masks=[[1, 1]])


# Row 10
async def test_a_cut_call_after_whole_ones_ends_its_sequence(judged):
    cut = ScriptedAnswer(COMPUTES + "<tool_call>\n{", finish_reason="length")
    judge = judged([call(expression="6 * 7"), cut, "Again."])
    agent = judge.agent(TOOLS)
    with pytest.raises(MaxTokensReachedException):
        await agent.invoke_async("Compute.")
    await agent.invoke_async("Continue.")
    # Both begin with the first call, which is trained in the first of them.
    judge.check(masks=[[1, 1], [0, 1]])


# --- unregistered tools ---


BROKEN = "<tool_call>\nno JSON\n</tool_call>"


def tool_uses(agent):
    return [block["toolUse"] for message in agent.messages for block in message["content"] if "toolUse" in block]


def result_texts(agent):
    blocks = [block for message in agent.messages for block in message["content"]]
    return [block["toolResult"]["content"][0]["text"] for block in blocks if "toolResult" in block]


def shown_results(request):
    """Return the tool results that a request adds after the last sampled turn."""
    after = request.text.rpartition("</tool_call>")[2]
    return [part.partition("\n</tool_response>")[0] for part in after.split("<tool_response>\n")[1:]]


async def test_a_hook_serves_an_unregistered_tool_its_sampled_input(judged):
    judge = judged([call("ghost", x=1), "Done."])
    seen = []

    @tool
    def stand_in(x: int) -> str:
        """Serve.

        Args:
            x: A number.
        """
        return f"routed {x}"

    def route(event):
        seen.append((event.tool_use["name"], event.tool_use["input"], event.selected_tool))
        event.selected_tool = stand_in

    agent = judge.agent(TOOLS)
    agent.add_hook(route, BeforeToolCallEvent)
    await agent.invoke_async("Call the ghost.")
    judge.check()
    assert seen == [("ghost", {"x": 1}, None)]
    assert shown_results(judge.server.requests[1]) == ["routed 1"] == result_texts(agent)
    assert len(judge.trajectory.sequences()) == 1


@needs_module("strands.middleware")
@pytest.mark.parametrize("written", [call("ghost", x=1), BROKEN], ids=["well formed", "not parsable"])
async def test_the_model_reads_what_middleware_answers(judged, written):
    judge = judged([written, "Done."])

    async def answer(context, next_fn):
        result = {"toolUseId": context.tool_use["toolUseId"], "status": "success", "content": [{"text": "from afar"}]}
        yield ToolResultEvent(result)

    agent = judge.agent(TOOLS)
    agent.add_middleware(ExecuteToolStage, answer)
    await agent.invoke_async("Call the ghost.")
    assert shown_results(judge.server.requests[1]) == ["from afar"] == result_texts(agent)


@pytest.mark.parametrize("name", ["ghost", "invalid tool", "ghost\n", "n" * 65, "unknown_tool", "INVALID_TOOL_NAME"])
@pytest.mark.parametrize("with_tools", [True, False])
async def test_strands_keeps_its_error_of_unknown_tools(judged, name, with_tools):
    judge = judged([call(name, x=1), "Done.", "Again."])
    agent = judge.agent(TOOLS if with_tools else [])
    await ask(agent, "Call the ghost.", "And?")
    judge.check()
    ((use_name, use_input),) = [(use["name"], use["input"]) for use in tool_uses(agent)]
    assert (use_name, use_input) == (name, {"x": 1})
    (text,) = result_texts(agent)
    assert shown_results(judge.server.requests[1]) == [text]
    assert judge.model.tool_parse_errors == {}
    assert len(judge.trajectory.sequences()) == 1


async def test_results_follow_their_calls_even_with_invalid_names(judged):
    judge = judged([COMPUTES + call("invalid tool") + call("ghost"), "Done."])
    agent = judge.agent(TOOLS)
    await agent.invoke_async("Go.")
    judge.check()
    six, invalid, ghost = shown_results(judge.server.requests[1])
    assert (six, ghost) == ("6", "Unknown tool: ghost")
    assert "invalid tool" in invalid
    assert len(judge.trajectory.sequences()) == 1


@pytest.mark.parametrize("name", ["ghost", "invalid tool"])
async def test_a_restored_session_renders_the_call_that_was_sampled(judged, tmp_path, name):
    first = judged([call(name, command="run"), "It failed."])
    await in_session(first, tmp_path).invoke_async("Run it.")
    second = judged(["It failed, as I said."])
    agent = in_session(second, tmp_path)
    assert tool_uses(agent)[0]["name"] == name
    await agent.invoke_async("What was it?")
    (request,) = second.server.requests
    assert call(name, command="run") in request.text
    assert shown_results(request) == result_texts(agent)


async def test_a_rewritten_history_renders_the_name_that_was_sampled(judged):
    judge = judged([call("invalid tool", x=1), "Done.", "Again."])
    agent = judge.agent(TOOLS)
    await agent.invoke_async("Go.")
    agent.messages[0]["content"] = [{"text": "Continue."}]
    await agent.invoke_async("And?")
    assert call("invalid tool", x=1) in judge.prompt(2)
    assert len(judge.trajectory.sequences()) == 2


# --- Structured output: in the loop it is a tool with a list of tools of its own, outside of it it is auxiliary ---


class Total(BaseModel):
    """A total."""

    total: int


# Row 12
async def test_output_by_the_model_itself_is_a_tool_call_like_any_other(judged):
    judge = judged([COMPUTES, call("Total", total=6), "Bye."])
    agent = judge.agent(TOOLS)
    result = await agent.invoke_async("Compute.", structured_output_model=Total)
    assert result.structured_output == Total(total=6)
    judge.check(masks=[[1, 1]])
    await agent.invoke_async("Thanks.")  # the tool is gone again
    judge.check(masks=[[1, 1], [1]])
    assert "the tools changed" in judge.trajectory.turns[2].reason
    judge.settle(agent)
    assert "discarded" not in judge.statuses()


# Row 12
async def test_output_that_is_forced_by_a_prompt_extends_its_sequence(judged):
    def is_constrained(request):
        return any(name in request.sampling_params for name in ("json_schema", "regex", "ebnf", "structural_tag"))

    judge = judged([COMPUTES, "It is 6.", call("Total", total=6)])
    agent = judge.agent(TOOLS)
    result = await agent.invoke_async("Compute.", structured_output_model=Total)
    assert result.structured_output == Total(total=6)
    forced = judge.server.requests[2]
    assert "You must format the previous response as structured output." in forced.text
    extends = hasattr(Model, "_supports_structured_output")  # before, Strands leaves out the other tools in any case
    assert ('"name": "calculator"' in forced.text.partition("</tools>")[0]) is extends
    constrained = [i for i, request in enumerate(judge.server.requests) if is_constrained(request)]
    judge.check(constrained=constrained)
    assert constrained == [2]
    assert judge.masks() == ([[1, 1, 0]] if extends else [[1, 1], [0]])
    assert "You must format" not in judge.trained_text()
    judge.settle(agent)
    assert "discarded" not in judge.statuses()


# Row 12
@pytest.mark.filterwarnings("ignore:the tool choice is not forced:UserWarning")
async def test_output_that_cannot_be_forced_gets_only_its_tool(judged):
    class Odd(BaseModel):
        """A total that no grammar of the format can force."""

        total: int = Field(multiple_of=3)

    judge = judged([COMPUTES, "It is 6.", call("Odd", total=6)])
    agent = judge.agent(TOOLS)
    result = await agent.invoke_async("Compute.", structured_output_model=Odd)
    assert result.structured_output == Odd(total=6)
    assert '"name": "calculator"' not in judge.prompt(2).partition("</tools>")[0]
    assert judge.masks() == [[1, 1], [1]]


# Row 12
@pytest.mark.filterwarnings("ignore:.*structured_output.* method is deprecated:DeprecationWarning")
async def test_output_outside_the_loop_is_valid_and_stops(judged):
    params = {"regex": "a+", "stop": ["Observation:"], "stop_token_ids": [5], "min_new_tokens": 9, "temperature": 0.5}
    judge = judged(['{"text": "Observation: two"}'], sampling_params=params)
    output = await judge.agent().structured_output_async(Text, "What?")
    assert output == Text(text="Observation: two")
    (request,) = judge.server.requests
    assert set(request.sampling_params) == {"json_schema", "temperature", "max_new_tokens"}
    assert judge.model.get_config()["sampling_params"] == params


# Row 12
async def test_a_configured_stop_does_not_cut_a_forced_call(judged):
    judge = judged(["Well.", call("Text", text="Observation: two")], sampling_params={"stop": ["Observation:"]})
    result = await judge.agent().invoke_async("What?", structured_output_model=Text)
    assert result.structured_output == Text(text="Observation: two")
    assert ["stop" in request.sampling_params for request in judge.server.requests] == [True, False]


class Text(BaseModel):
    """A text."""

    text: str


# Row 12
@pytest.mark.filterwarnings("ignore:.*structured_output.* method is deprecated:DeprecationWarning")
@pytest.mark.parametrize("with_tools", [True, False])
async def test_output_outside_the_loop_is_auxiliary_and_never_trained(judged, with_tools):
    judge = judged(["Answer-0.", '{"total": 6}', "Answer-2."])
    agent = judge.agent(TOOLS if with_tools else [])
    await agent.invoke_async("Question-0?")
    assert await agent.structured_output_async(Total, "How much?") == Total(total=6)
    await agent.invoke_async("Question-1?")
    assert "How much?" not in judge.prompt(2)
    judge.check(auxiliary=[1], constrained=[1], masks=[[1, 1]])
    assert [turn.is_auxiliary for turn in judge.trajectory.turns] == [False, True, False]


# Row 12
@pytest.mark.filterwarnings("ignore:.*structured_output.* method is deprecated:DeprecationWarning")
async def test_early_output_outside_the_loop_is_not_the_main_one(judged):
    judge = judged(['{"total": 6}', "Answer-1."])
    agent = judge.agent()
    assert await agent.structured_output_async(Total, "How much?") == Total(total=6)
    await agent.invoke_async("Question?")
    judge.check(auxiliary=[0], constrained=[0])
    assert judge.model.token_manager.token_ids == judge.trajectory.sequences()[0].token_ids


# === cancellation and interrupts: where they meet an agent, and how it continues ===


# --- Interrupts, resumes and unanswered calls: results that come late, in another order, or never ---


def responses(result, answer):
    return [{"interruptResponse": {"interruptId": i.id, "response": answer}} for i in result.interrupts]


# Row 13
async def test_a_call_that_a_cancelled_task_left_unanswered_is_extended(judged):
    started = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait forever."""
        started.set()
        await asyncio.Event().wait()
        return "never"

    judge = judged([call("wait"), "Understood."])
    agent = judge.agent([wait])
    running = asyncio.ensure_future(agent.invoke_async("Wait."))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await agent.invoke_async("What happened?")
    assert "Tool was interrupted." in judge.prompt(1)
    judge.check(masks=[[1, 1]])


# Row 13
async def test_a_call_left_by_a_raising_hook_runs_without_a_model_call(judged):
    judge = judged([COMPUTES, "6."])
    tools, ran = make_tools()
    agent = judge.agent(tools)
    raise_once(agent, BeforeToolCallEvent)
    with pytest.raises(EventLoopException):
        await agent.invoke_async("Compute.")
    assert ran == []
    await agent.invoke_async(None)
    assert ran == ["2 * 3"]
    judge.check(masks=[[1, 1]])


# Row 14
async def test_results_of_interrupted_calls_are_in_call_order(judged):
    judge = judged(["".join(call(expression=f"{i} * 111") for i in (2, 3, 4)), "Done."])
    agent = judge.agent(TOOLS)

    def ask(event):
        if event.tool_use["input"]["expression"].startswith("2"):
            event.interrupt("approve", reason="may it?")

    agent.add_hook(ask, BeforeToolCallEvent)
    result = await agent.invoke_async("Compute.")
    await agent.invoke_async(responses(result, "yes"))
    results = [block["toolResult"]["content"][0]["text"] for block in agent.messages[2]["content"]]
    assert results == ["333", "444", "222"]  # as Strands keeps them
    shown = judge.prompt(1)
    assert shown.index("222") < shown.index("333") < shown.index("444")
    judge.check(masks=[[1, 1]])


# Row 22
async def test_an_invocation_that_a_hook_resumes_is_extended(judged):
    judge = judged(numbered)
    agent = judge.agent()

    def resume(event):
        if len(event.agent.messages) < 6:
            event.resume = f"More-{len(event.agent.messages)}!"

    agent.add_hook(resume, AfterInvocationEvent)
    await agent.invoke_async("Question?")
    judge.check()
    assert "More-4!" in judge.prompt(2)
    assert judge.masks() == [[1, 1, 1]]


# Row 22
async def test_input_merged_into_a_seen_message_opens_a_sequence(judged):
    judge = judged(numbered)
    agent = judge.agent()
    await agent.invoke_async("Question-0?")
    agent.messages.pop()  # the answer, so that a user message is the last one
    agent.messages[-1]["content"].append({"text": "And more."})
    await agent.invoke_async(None)
    assert "And more." in judge.prompt(1)
    judge.settle(agent)
    judge.check(masks=[[1], [1]])


# --- Cancels: what the model never said is prompt, and what it said in vain is discarded ---


# Row 11
async def test_an_answer_cancelled_while_streaming_is_discarded(judged):
    async def cancelled(request):
        agent.cancel()
        return "Too late."

    judge = judged([cancelled, "Second."])
    agent = judge.agent()
    result = await agent.invoke_async("Question-0?")
    assert result.stop_reason == "cancelled"
    assert agent.messages[-1]["content"] == [{"text": "Cancelled by user"}]
    await agent.invoke_async("Question-1?")
    assert "Cancelled by user" in judge.prompt(1)
    judge.check(discarded=[0])
    judge.settle(agent)
    assert judge.statuses() == ["discarded", "final"]
    assert "Cancelled" not in judge.trained_text()


# Row 11
@pytest.mark.parametrize("answer", ["A story.", COMPUTES, f"First. {COMPUTES}"])
async def test_a_callers_signal_at_the_first_delta_cancels(judged, answer):
    """Strands polls such a signal every 50 ms, and the whole answer is streamed in less."""
    judge = judged([answer, "Second."])
    tools, ran = make_tools()
    agent = judge.agent(tools)
    signal = threading.Event()
    async for event in agent.stream_async("Question-0?", cancel_signal=signal):
        if "contentBlockDelta" in event.get("event", {}):
            signal.set()
        result = event.get("result")
    assert (result.stop_reason, ran) == ("cancelled", [])
    await agent.invoke_async("Question-1?")
    judge.check(discarded=[0])
    assert judge.statuses()[0] == "discarded"


# Row 11
async def test_an_answer_cancelled_after_its_last_event_is_discarded(judged):
    judge = judged(numbered)
    agent = judge.agent()
    cancelled = []
    async for event in agent.stream_async("Question-0?"):
        if "messageStop" in event.get("event", {}) and not cancelled:
            cancelled.append(event)
            agent.cancel()
    assert agent.messages[-1]["content"] == [{"text": "Cancelled by user"}]
    await agent.invoke_async("Question-1?")
    judge.check(discarded=[0])


# Row 11
@needs_argument("cancel", "message")
async def test_the_message_of_a_cancel_is_prompt(judged):
    async def cancelled(request):
        agent.cancel(message="THE USER WENT HOME")
        return "Too late."

    judge = judged([COMPUTES, cancelled, "Back again."])
    agent = judge.agent(TOOLS)
    await ask(agent, "Compute.", "Question?")
    assert "THE USER WENT HOME" in judge.prompt(2)
    judge.check(discarded=[1])
    assert "THE USER" not in judge.trained_text()
    assert judge.masks() == [[1, 1]]


# Row 11
@needs_argument("cancel", "after_current_tools")
async def test_a_cancel_after_the_tools_discards_nothing(judged):
    judge = judged([COMPUTES, "6."])
    agent = judge.agent(TOOLS)

    def stop(event):
        event.agent.cancel(after_current_tools=True)

    agent.add_hook(stop, AfterToolsEvent)
    result = await agent.invoke_async("Compute.")
    assert result.stop_reason == "cancelled"
    judge.settle(agent)
    assert judge.statuses() == ["final"]
    await agent.invoke_async("Well?")
    judge.check(masks=[[1, 1]])


# Row 11
@pytest.mark.parametrize(
    ("event_type", "messages", "shown_in"), [(BeforeModelCallEvent, 3, 1), (BeforeInvocationEvent, 0, 0)]
)
async def test_text_of_a_hook_that_denies_a_call_is_prompt(judged, event_type, messages, shown_in):
    judge = judged(numbered)
    agent = judge.agent()

    def deny(event):
        event.cancel = "NOT NOW" if len(event.agent.messages) == messages else False

    agent.add_hook(deny, event_type)
    await ask(agent, 3)
    assert len(judge.server.requests) == 2
    assert "NOT NOW" in judge.prompt(shown_in)
    judge.check(masks=[[1, 1]])
    assert "NOT NOW" not in judge.trained_text()


# Row 11
async def test_text_that_ends_a_turn_after_its_tools_is_prompt(judged):
    judge = judged([COMPUTES, "Again."])
    agent = judge.agent(TOOLS)

    def end(event):
        event.end_turn = "ENOUGH"

    agent.add_hook(end, AfterToolsEvent)
    await ask(agent, "Compute.", "Continue.")
    assert "ENOUGH" in judge.prompt(1)
    judge.check()
    assert "ENOUGH" not in judge.trained_text()
    assert judge.masks() == [[1, 1]]


# Row 11
async def test_a_cancelled_task_leaves_a_failed_turn(judged):
    asked = asyncio.Event()

    async def hang(request):
        asked.set()
        await asyncio.Event().wait()

    judge = judged(["First.", hang, "Third."])
    agent = judge.agent()
    await agent.invoke_async("Question-0?")
    running = asyncio.ensure_future(agent.invoke_async("Question-1?"))
    await asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert judge.server.aborted == [judge.server.requests[1].rid]
    await agent.invoke_async("Question-2?")
    judge.check()
    assert judge.statuses() == ["committed", "failed", "answered"]
    assert judge.masks() == [[1, 1]]


# === several agents on one model, and the helpers whose calls are auxiliary ===


# --- Graphs, swarms, agents as tools and judges on one model object: every conversation has a record of its own ---


def computes(request):
    """Calls the calculator once, then answers."""
    return numbered(request) if "<tool_response>" in request.text else COMPUTES


def make_graph(model):
    """Two parallel nodes, each with tools, and one after both."""
    builder = GraphBuilder()
    for name in ("left", "right", "end"):
        agent = make_agent(model, TOOLS, system_prompt=f"You are {name}.", name=name)
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
    judge.check(masks=[[1, 1]] * 3)
    prompts = [judge.server.tokenizer.decode(s.token_ids) for s in judge.trajectory.sequences()]
    assert sorted(prompt.split("You are ")[1].split(".")[0] for prompt in prompts) == ["end", "left", "right"]


# Row 20
async def test_agents_that_share_an_invocation_state_are_distinct(judged):
    judge = judged(lambda request: "The same." if "<tool_response>" in request.text else COMPUTES)
    agents = [judge.agent(TOOLS) for _ in range(4)]
    shared = {}
    await asyncio.gather(*(agent.invoke_async("Compute.", invocation_state=shared) for agent in agents))
    judge.check()
    assert len({turn.agent for turn in judge.trajectory.turns}) == 4
    assert judge.masks() == [[1, 1]] * 4


# Row 19
async def test_a_graph_that_returns_to_a_node_starts_over(judged):
    judge = judged(numbered)
    builder = GraphBuilder()
    for name in ("draft", "review"):
        builder.add_node(judge.agent(system_prompt=f"You {name}."), name)
    builder.add_edge("draft", "review")
    builder.add_edge("review", "draft", condition=lambda state: len(state.execution_order) < 4)
    builder.set_entry_point("draft")
    builder.set_max_node_executions(6)
    builder.reset_on_revisit(True)
    await builder.build().invoke_async("Write.")
    assert len(judge.server.requests) == 4
    judge.check(masks=[[1]] * 4)


# Row 19
async def test_the_agents_of_a_swarm_have_sequences_of_their_own(judged):
    def handoff(name, message):
        return call("handoff_to_agent", agent_name=name, message=message)

    def answer(request):
        first = "You are first." in request.text and "<tool_response>" not in request.text
        return handoff("second", "TAKE OVER") if first else numbered(request)

    judge = judged(answer)
    agents = [judge.agent(name=name, system_prompt=f"You are {name}.") for name in ("first", "second")]
    result = await Swarm(agents, max_handoffs=3).invoke_async("Do it.")
    assert [node.node_id for node in result.node_history] == ["first", "second"]
    assert any("TAKE OVER" in request.text for request in judge.server.requests)
    judge.check()
    assert {turn.agent for turn in judge.trajectory.turns} == {
        turn.agent for turn in judge.trajectory.turns if turn.parent is None
    }


# Row 19
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("book", ["Book-{}", "The same book"])
async def test_an_agent_that_is_a_tool_has_sequences_of_its_own(judged, keeps, book):
    def answer(request):
        if "You look up facts." in request.text:
            return f"Found-{request.index}."
        calls = request.text.count("<tool_response>\n")
        return call("librarian", input=book.format(calls)) if calls < 2 else "Both found."

    judge = judged(answer)
    librarian = judge.agent(system_prompt="You look up facts.", name="librarian")
    agent = judge.agent([librarian.as_tool(preserve_context=keeps)])
    await agent.invoke_async("Find two books.")
    assert "Found-3." in judge.prompt(-1)
    judge.check(masks=[[1, 1], [1, 1, 1]] if keeps else [[1], [1], [1, 1, 1]])


DELEGATE = call("subagent", task="Your task.")
ROUNDS = {
    "after an answer": (["Fine.", DELEGATE], "forks after call 0: message 2 (user)"),
    "after a tool's result": ([COMPUTES, DELEGATE], "forks after call 0: message 2 (user)"),
    "with another call": (["Fine.", COMPUTES + DELEGATE], "forks after call 0: message 2 (user)"),
    "with a text": (["Fine.", "I ask. " + DELEGATE], "forks after call 0: message 3 (assistant)"),
    "at once": ([DELEGATE], "opens a sequence: message 0 (user)"),
    "after reasoning": (
        ["<think>\nHm.\n</think>\n\nFine.", DELEGATE],
        "opens a sequence: message 1 (assistant) is not the recorded one (assistant): no reasoning",
    ),
}


# Row 19
@needs_module("strands.vended_tools.subagent")
@pytest.mark.parametrize("when", ROUNDS)
async def test_a_subagent_that_is_a_fork_extends_the_answers_before_it(judged, when):
    from strands.multiagent.spec import Fixed
    from strands.vended_tools.subagent import make_subagent

    answers, reason = ROUNDS[when]
    judge = judged([*answers, "Done.", "It is done."])
    tools = [*TOOLS, make_subagent(context=Fixed("all"), builder=lambda spec: judge.agent(tools))]
    agent = judge.agent(tools)
    for question in ["First?", "Second?"][: 1 + ("Fine." in answers[0])]:
        await agent.invoke_async(question)
    *_, delegating, child, last = judge.trajectory.turns
    judge.check()
    assert "Your task." in judge.prompt(child.index)
    assert child.reason.startswith(reason)
    assert child.parent is delegating.parent or when == "after reasoning"
    assert last.parent is delegating


# Row 19
async def test_an_agent_in_a_synchronous_tool_has_a_sequence_of_its_own(judged):
    judge = judged([call("ask", question="Why?"), "Because.", "I see."])

    @tool
    def ask(question: str) -> str:
        """Ask.

        Args:
            question: What.
        """
        return str(judge.agent(system_prompt="You know.")(question))

    with judge.model.episode() as trajectory:
        await judge.agent([ask]).invoke_async("Ask.")
    judge.check(trajectory)
    assert response_masks(trajectory) == [[1], [1, 1]]


# Row 19
async def test_a_judge_of_a_goal_is_an_agent_with_sequences_of_its_own(judged):
    def answer(request):
        if "Be brief." in request.text:
            return numbered(request)
        return call("JudgeOutcome", passed="Answer-2" in request.text, feedback="TRY AGAIN")

    judge = judged(answer)
    agent = judge.agent(plugins=[GoalLoop(goal="Be good.", max_attempts=3)])
    await agent.invoke_async("Question?")
    assert "TRY AGAIN" in judge.prompt(2)
    judge.check()
    assert "TRY AGAIN" not in judge.server.tokenizer.decode(
        [token.token_id for token in judge.model.token_manager.tokens if token.loss_mask]
    )


# Row 21
async def test_a_second_invocation_of_a_busy_agent_leaves_no_trace(judged):
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request):
        asked.set()
        await go_on.wait()
        return "Late."

    judge = judged([slow])
    agent = judge.agent()
    running = asyncio.ensure_future(agent.invoke_async("Question-0?"))
    await asked.wait()
    with pytest.raises(ConcurrencyException):
        await agent.invoke_async("Question-1?")
    go_on.set()
    await running
    judge.check()
    assert judge.statuses() == ["answered"]


# Row 21
@pytest.mark.parametrize("first_to_answer", [0, 1])
async def test_interleaved_invocations_lose_no_answer(judged, first_to_answer):
    asked = [asyncio.Event(), asyncio.Event()]
    answered = [asyncio.Event(), asyncio.Event()]

    async def slow(request):
        asked[request.index].set()
        await answered[request.index].wait()
        return numbered(request)

    judge = judged([slow, slow, "Third."])
    agent = judge.agent(concurrent_invocation_mode=ConcurrentInvocationMode.UNSAFE_REENTRANT)
    running = []
    for i in range(2):
        running.append(asyncio.ensure_future(agent.invoke_async(f"Question-{i}?")))
        await asked[i].wait()
    for i in (first_to_answer, 1 - first_to_answer):
        answered[i].set()
        await running[i]
    await agent.invoke_async("Question-2?")
    judge.settle(agent)
    judge.check()
    assert "discarded" not in judge.statuses()


# Row 19
async def test_concurrent_mixed_episodes_are_recorded_apart(judged):
    judge = judged(computes)

    async def single():
        await judge.agent(TOOLS).invoke_async("Compute.")

    async def graph():
        await make_graph(judge.model).invoke_async("Compute.")

    async def nested():
        helper = judge.agent(system_prompt="You help.", name="calculator")
        await judge.agent([helper.as_tool()]).invoke_async("Compute.")

    async def episode(play):
        with judge.model.episode() as trajectory:
            await play()
        return trajectory

    trajectories = await asyncio.gather(*(episode(play) for play in (single, graph, nested) * 3))
    judge.check(*trajectories)
    assert [len(trajectory) for trajectory in trajectories] == [2, 6, 4] * 3
    assert len(judge.trajectory) == 0


# Row 19
def test_agents_in_threads_share_a_model(judged):
    judge = judged(computes)
    trajectories = []

    def play():
        with judge.model.episode() as trajectory:
            judge.agent(TOOLS)("Compute.")
        trajectories.append(trajectory)

    threads = [threading.Thread(target=play) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    judge.check(*trajectories)
    assert [response_masks(trajectory) for trajectory in trajectories] == [[[1, 1]]] * 6


# --- Helpers on `model.auxiliary`: recorded, and never trained unless asked for ---


def masks(trajectory):
    """The loss masks of the sampled segments of everything, by sequence."""
    return [[s.loss_mask for s in one.segments if s.is_response] for one in trajectory.sequences(auxiliary=True)]


def answer(request):
    if "You judge." in request.text and "<tool_response>" not in request.text:
        return COMPUTES
    return numbered(request)


@pytest.mark.parametrize("first", ["judge", "actor"])
async def test_a_judge_is_recorded_untrained_in_any_order(judged, first):
    judge = judged(answer)
    agents = {
        "actor": judge.agent(),
        "judge": make_agent(judge.model.auxiliary, TOOLS, system_prompt="You judge."),
    }
    for name in (first, *({"actor", "judge"} - {first})):
        await agents[name].invoke_async("Question?")
    helped = judge.with_text("You judge.")
    judge.check(auxiliary=helped)
    trajectory = judge.trajectory
    assert [turn.index for turn in trajectory.turns if turn.is_auxiliary] == helped
    assert response_masks(trajectory) == [[1]]
    assert masks(trajectory) == [[1], [1, 1]]
    assert judge.model.token_manager.token_ids == trajectory.sequences()[0].token_ids
    assert "auxiliary" in trajectory.explain()


async def test_a_helper_is_distinct_from_an_agent_saying_the_same(judged):
    judge = judged(lambda request: "The same.")
    agents = [judge.agent(), make_agent(judge.model.auxiliary), judge.agent()]
    for question in ("One?", "Two?"):
        for agent in agents:
            await agent.invoke_async(question)
    assert [turn.is_auxiliary for turn in judge.trajectory.turns] == [False, True, False] * 2
    assert judge.masks() == [[1, 1], [1, 1]]
    assert masks(judge.trajectory) == [[1, 1]] * 3


async def test_continuing_from_a_helper_trains_only_own_tokens(judged):
    judge = judged(["A draft.", "Better."])
    helper = make_agent(judge.model.auxiliary)
    await helper.invoke_async("Question?")
    await judge.agent(messages=helper.messages).invoke_async("Make it better.")
    judge.check(auxiliary=[0], masks=[[0, 1]])
    assert masks(judge.trajectory) == [[1, 1]]
    assert judge.model.token_manager.loss_mask == judge.trajectory.sequences()[0].loss_mask


@pytest.mark.parametrize("how", ["helper", "stream"])
async def test_a_helpers_answer_that_the_agent_keeps_is_context(judged, how):
    judge = judged(numbered)
    agent, question = judge.agent(), user("Two?")
    await agent.invoke_async("One?")
    if how == "helper":
        helper = make_agent(judge.model.auxiliary, messages=list(agent.messages))
        await helper.invoke_async("Two?")
        agent.messages[:] = helper.messages
    else:
        asked = [*agent.messages, question]
        events = [one async for one in judge.model.stream(asked, None, agent.system_prompt, auxiliary=True)]
        text = "".join(one["contentBlockDelta"]["delta"]["text"] for one in events if "contentBlockDelta" in one)
        agent.messages[:] = [*asked, assistant(text)]
    await agent.invoke_async("Three?")
    trajectory = judge.trajectory
    assert [turn.is_auxiliary for turn in trajectory.turns] == [False, True, False]
    assert trajectory.turns[2].parent is trajectory.turns[1]
    assert response_masks(trajectory) == [[1, 0, 1]]
    assert judge.model.token_manager.loss_mask == trajectory.sequences()[0].loss_mask
    sample = to_slime_samples(
        trajectory, Sample(), TerminationReason.TASK_COMPLETE, tokenizer=judge.model.tokenizer, args=slime_args()
    )
    assert sum(sample.loss_mask) == sum(judge.model.token_manager.loss_mask)


async def test_an_answer_that_a_helper_threw_away_is_discarded(judged):
    judge = judged(numbered)
    helper = make_agent(judge.model.auxiliary)

    def retry(event: AfterModelCallEvent):
        event.retry = "Answer-0" in str(event.stop_response.message)

    helper.add_hook(retry, AfterModelCallEvent)
    await helper.invoke_async("Question?")
    await helper.invoke_async("More?")
    judge.check(auxiliary=[0, 1, 2], discarded=[0])
    assert judge.statuses() == ["discarded", "committed", "answered"]


async def test_a_call_without_an_agent_stays_trained_with_a_helper(judged):
    judge = judged(numbered)
    question = [user("Question?")]
    async for _ in judge.model.stream(question):
        pass
    await make_agent(judge.model.auxiliary).invoke_async("Is that right?")
    async for _ in judge.model.auxiliary.stream(question, None, "Judge."):
        pass
    assert [turn.is_auxiliary for turn in judge.trajectory.turns] == [False, True, True]


@needs_argument("__init__", "aux_model")
async def test_helpers_that_strands_makes_are_auxiliary(judged):
    def answer(request):
        if "JudgeOutcome" in request.text:
            return call("JudgeOutcome", passed="Answer-2" in request.text, feedback="TRY AGAIN")
        return numbered(request)

    judge = judged(answer)
    goal = GoalLoop(goal="Be good.", max_attempts=3)
    agent = judge.agent(plugins=[goal], aux_model=judge.model.auxiliary)
    await agent.invoke_async("Question?")
    helped = judge.with_text("JudgeOutcome")
    assert len(helped) == 2
    judge.check(auxiliary=helped, masks=[[1, 1]])


async def test_a_summarizer_in_a_managers_thread_is_auxiliary(judged):
    judge = judged(summarizes, max_context_tokens=600)
    writer = make_agent(judge.model.auxiliary, system_prompt="You sum up.")
    manager = summarizing(summarization_agent=writer)
    with judge.model.episode() as trajectory:
        agent = judge.agent(conversation_manager=manager)
        await ask_at_length(agent, 7, 10)
    summaries = judge.with_text("summarize this")
    assert summaries
    judge.check(trajectory, auxiliary=summaries)
    assert len(judge.trajectory) == 0


async def test_a_helper_without_context_joins_its_earlier_episode(judged):
    judge = judged(numbered)

    def elsewhere(helper, question):
        thread = threading.Thread(target=lambda: helper(question))
        thread.start()
        thread.join()

    async def episode(name):
        with judge.model.episode() as trajectory:
            agent = judge.agent()
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
    assert len(judge.trajectory) == 0


async def test_auxiliary_turns_stay_auxiliary_in_a_file(judged, tmp_path):
    judge = judged(numbered)
    helper, agent = make_agent(judge.model.auxiliary), judge.agent()
    await helper.invoke_async("Judge!")
    judge.trajectory.save(tmp_path / "t")
    judge.model.trajectory = Trajectory.load(tmp_path / "t")
    await agent.invoke_async("Question?")
    await helper.invoke_async("Judge again!")
    assert [turn.is_auxiliary for turn in judge.trajectory.turns] == [True, False, True]
    assert masks(judge.trajectory) == [[1], [1, 1]]


async def test_a_helper_has_the_models_current_configuration(judged):
    judge = judged(numbered, context_window_limit=500)
    view: SGLangModel = judge.model.auxiliary
    assert view.context_window_limit == 500
    assert (view.tokenizer, view.client, view.tool_parser) == (
        judge.model.tokenizer,
        judge.model.client,
        judge.model.tool_parser,
    )
    assert view.trajectory is judge.trajectory
    assert view.auxiliary is view
    assert not view.stateful
    judge.model.__class__ = type("Stateful", (SGLangModel,), {"stateful": True})
    assert view.stateful
    with pytest.raises(AttributeError, match="no_such_thing"):
        view.no_such_thing  # noqa: B018
    assert copy.copy(view).tokenizer is judge.model.tokenizer
    judge.model.update_config(sampling_params={"temperature": 0.25}, model_id="served")
    await Agent(model=view, callback_handler=None).invoke_async("Question?")
    assert judge.server.requests[0].sampling_params["temperature"] == 0.25
    assert view.config.get("model_id") == view.get_config()["model_id"] == "served"
    view.update_config(model_id="other")
    assert judge.model.get_config()["model_id"] == "other"


# === a router that gives the calls of one agent to several models: each records what it saw and sampled itself ===


needs_routing = needs_module("strands.models.routing")


class Turns:
    """Routes the invocations to the models in turn."""

    def __init__(self, *order):
        self.order = cycle(order)

    async def select(self, context, **kwargs):
        return None if context.attempts else context.candidates[next(self.order)]


def routed(judges, tools=(), **kwargs):
    from strands.models.routing import ModelRouter

    return make_agent(ModelRouter([judge.model for judge in judges], **kwargs), list(tools))


# Row 5
@needs_routing
async def test_other_models_answers_are_prompt(judged):
    one = judged([COMPUTES, "One says 6.", "One says bye."])
    two = judged(["Two says hello.", "Two says bye."])
    agent = routed([one, two], TOOLS, strategy=Turns(0, 1))
    await ask(agent, "Compute.", "Hello?", "Well?", "Bye.")
    for judge in (one, two):
        judge.check()
        judge.settle(agent)
        judge.check()
    assert response_masks(one.model.trajectory) == [[1, 1, 1]]
    assert response_masks(two.model.trajectory) == [[1, 1]]
    assert "Two says hello." in one.server.requests[-1].text
    assert "Two says" not in one.trained_text()
    assert "One says" not in two.trained_text()
    assert "discarded" not in statuses(one.model.trajectory) + statuses(two.model.trajectory)


# Row 23
@needs_routing
async def test_a_call_failed_over_to_another_model_is_trained_there(judged):
    one = judged([COMPUTES, ScriptedFault(status=400), "One is back."])
    two = judged([numbered])
    agent = routed([one, two], TOOLS)
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
@needs_routing
async def test_if_every_model_fails_the_last_error_is_raised(judged):
    judges = [judged([ScriptedFault(status=400)]) for _ in range(2)]
    with pytest.raises((SGLangClientError, EventLoopException)):
        await routed(judges).invoke_async("Question?")
    for judge in judges:
        assert judge.statuses() == ["failed"]
        assert judge.trajectory.sequences() == []


# Row 23
@needs_routing
async def test_a_router_of_model_and_auxiliary_trains_only_the_model(judged):
    judge = judged(numbered)
    from strands.models.routing import ModelRouter

    agent = make_agent(ModelRouter([judge.model, judge.model.auxiliary], strategy=Turns(0, 1)))
    await ask(agent, 3)
    assert [turn.is_auxiliary for turn in judge.trajectory.turns] == [False, True, False]
    judge.check(auxiliary=[1], masks=[[1, 0, 1]])
