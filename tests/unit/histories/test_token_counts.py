"""What Strands' context managers go by: exact counts before every call, and the context length that the server says."""

import asyncio
import warnings

import pytest
from strands import tool
from strands.agent.conversation_manager import SlidingWindowConversationManager
from strands.hooks import BeforeModelCallEvent

from strands_sglang import SGLangModel
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from support.agents import call, make_agent, make_tools
from support.judge import numbered

BROKEN = "<tool_call>\nno JSON\n</tool_call>"


@tool
def read(pages: int = 1) -> str:
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
    answers = [
        call("read", pages=3),
        "<think>\nhm\n</think>\n\nThree pages.",
        call(expression="2 * 3") * 2 + BROKEN,
        call("ghost"),
        call("invalid tool"),
        "Six.",
        "Bye.",
        "Again.",
    ]
    judge = judged(answers)
    agent = make_agent(judge.model, [read, *make_tools()[0]] if with_tools else [])
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
    agent = make_agent(judge.model, [read])
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
    agent = make_agent(judge.model, [read])
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
