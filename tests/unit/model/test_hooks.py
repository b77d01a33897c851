"""Hooks of a model: what Strands tells of an answer is recorded at once, and for the agent that it concerns."""

import asyncio
import copy
import gc
import weakref

import pytest
from strands.hooks import (
    AfterModelCallEvent,
    AfterToolCallEvent,
    BeforeModelCallEvent,
    MessageAddedEvent,
)

from strands_env.core import Action, Environment
from strands_sglang import SGLangAbortedError, Trajectory
from strands_sglang.testing import ScriptedAnswer
from support.agents import make_agent, make_tools, needs_module
from support.judge import numbered, statuses


def listened(model, *args, **kwargs):
    return make_agent(model, *args, hooks=[model.hooks], **kwargs)


def has_text(text):
    return lambda event: event.stop_response is not None and text in str(event.stop_response.message)


async def test_a_repeated_call_is_known_without_a_later_one(rollout):
    _, model = rollout(numbered)
    agent = listened(model)

    def retry(event):
        event.retry = has_text("Answer-0")(event)

    agent.add_hook(retry, AfterModelCallEvent)
    await agent.invoke_async("Question?")
    assert statuses(model.trajectory) == ["discarded", "answered"]
    assert "a hook had the call repeated" in model.trajectory.explain()


async def test_an_answer_that_was_replaced_is_known_without_a_later_call(rollout, caplog):
    _, model = rollout(numbered)
    agent = listened(model)

    def redact(event):
        event.stop_response.message["content"] = [{"text": "REDACTED"}]

    agent.add_hook(redact, AfterModelCallEvent)
    await agent.invoke_async("Question?")
    assert statuses(model.trajectory) == ["discarded"]
    assert model.trajectory.turns[0].note == "message 1 (assistant) stands in its place, with other text"
    assert model.trajectory.sequences() == []
    (record,) = caplog.records
    assert "was replaced in the agent's history" in record.getMessage()


async def test_an_answer_that_a_cancelled_task_never_got_into_its_history_is_discarded(rollout):
    _, model = rollout(numbered)
    agent = listened(model)

    def cancel(event):
        raise asyncio.CancelledError

    agent.add_hook(cancel, AfterModelCallEvent)
    with pytest.raises(asyncio.CancelledError):
        await agent.invoke_async("Question?")
    assert statuses(model.trajectory) == ["discarded"]


@pytest.mark.parametrize("told", [True, False])
async def test_an_answer_whose_history_is_summed_up_later_is_kept(rollout, told):
    """A summary of one exchange looks like a guardrail that replaced both of its messages."""
    _, model = rollout(numbered)
    agent = listened(model) if told else make_agent(model)
    await agent.invoke_async("Question-0?")
    agent.messages[:] = [
        {"role": "user", "content": [{"text": "What was said so far."}]},
        {"role": "assistant", "content": [{"text": "I see."}]},
    ]
    await agent.invoke_async("Question-1?")
    assert statuses(model.trajectory) == ["answered", "answered"]
    assert ("is not known" in model.trajectory.turns[0].note) != told


async def test_a_call_that_did_not_parse_has_the_providers_error_as_its_result_in_the_history(rollout):
    server, model = rollout(["<tool_call>\n{not json}\n</tool_call>", "Sorry."])
    agent = listened(model, make_tools()[0])
    seen = []
    agent.add_hook(lambda event: seen.append(event.result["content"]), AfterToolCallEvent)
    await agent.invoke_async("Compute.")
    (result,) = [block["toolResult"] for block in agent.messages[2]["content"]]
    (text,) = [block["text"] for block in result["content"]]
    assert "{not json}" in text
    assert "Unknown tool" not in text
    assert text in server.requests[1].text
    assert (result["status"], seen) == ("error", [result["content"]])
    assert len(model.trajectory.sequences()) == 1


async def test_what_another_hook_says_of_a_call_that_did_not_parse_stands(rollout):
    server, model = rollout(["<tool_call>\n{not json}\n</tool_call>", "Sorry."])
    agent = listened(model, make_tools()[0])

    def replace(event):
        event.result = {**event.result, "content": [{"text": "BETTER SAID"}]}

    agent.add_hook(replace, AfterToolCallEvent)
    await agent.invoke_async("Compute.")
    assert "BETTER SAID" in server.requests[1].text
    assert "not json" not in server.requests[1].text.partition("BETTER SAID")[0].rpartition("</tool_call>")[2]


async def test_agents_that_were_cut_at_their_first_call_go_on_from_their_own_tokens_in_any_order(rollout):
    """A2: hooks know an agent again whose id Strands forgot."""
    parts = ["ALPHA ", "BETA ", "GAMMA "]
    answers = [ScriptedAnswer(part, finish_reason="abort") for part in parts]
    _, model = rollout([*answers, "end", "end", "end"])
    agents = [listened(model) for _ in parts]
    for agent in agents:
        with pytest.raises(SGLangAbortedError):
            await agent.invoke_async("q")
    model.trajectory = Trajectory.from_bytes(model.trajectory.to_bytes())
    for turn in model.trajectory.turns:
        model.trajectory.resume(turn)
    results = [str(await agent.invoke_async()).strip() for agent in reversed(agents)]
    assert results == ["GAMMA end", "BETA end", "ALPHA end"]


async def test_copies_of_one_agent_in_one_trajectory_are_told_apart(rollout):
    """A3."""
    _, model = rollout(lambda request: "The same.")
    saved = listened(model)
    await saved.invoke_async("hello")
    copies = [listened(model) for _ in range(3)]
    for agent in copies:
        agent.load_snapshot(saved.take_snapshot(preset="session"))
    for _ in range(2):
        for agent in copies:
            await agent.invoke_async("more")
    turns = model.trajectory.turns
    assert len({turn.agent for turn in turns}) == 4
    assert all(turn.parent.agent == turn.agent for turn in turns[4:])


async def test_an_agent_that_is_made_in_an_episode_is_recorded_there_from_any_thread(rollout, caplog):
    """A3."""
    _, model = rollout(lambda request: "ok")

    async def episode():
        with model.episode() as trajectory:
            agent = listened(model)
            await asyncio.get_running_loop().run_in_executor(None, agent, "hi")
        return trajectory

    trajectories = await asyncio.gather(*(episode() for _ in range(3)))
    assert [len(trajectory) for trajectory in trajectories] == [1, 1, 1]
    assert len(model.trajectory) == 0
    assert not caplog.records


async def test_what_is_asked_on_behalf_of_an_agent_before_its_first_call_is_auxiliary(rollout, caplog):
    """A10: as by a conversation manager that sums a restored session up."""
    _, model = rollout(numbered)
    agent = listened(model)

    async def sum_up(event):
        async for _ in model.stream([{"role": "user", "content": [{"text": "Sum up."}]}]):
            pass

    agent.add_hook(sum_up, BeforeModelCallEvent)
    await agent.invoke_async("Question?")
    assert [turn.is_auxiliary for turn in model.trajectory.turns] == [True, False]
    assert not caplog.records


@needs_module("strands.middleware")
@pytest.mark.parametrize("helper_is_told", [True, False])
async def test_a_helper_that_is_asked_during_a_call_is_not_taken_for_the_agent(rollout, helper_is_told):
    from strands.middleware import InvokeModelStage

    _, model = rollout(numbered)
    agent = listened(model)

    async def ask_first(context, call_next):
        helper = (listened if helper_is_told else make_agent)(model, system_prompt="You judge.")
        await helper.invoke_async("Is this a question?")
        async for event in call_next(context):
            yield event

    agent.add_middleware(InvokeModelStage, ask_first)
    for _ in range(2):
        await agent.invoke_async("Question?")
    turns = model.trajectory.turns
    assert [turn.status.value for turn in turns] == ["answered", "committed", "answered", "answered"]
    assert [turn.was_added for turn in turns] == [True if helper_is_told else None, True] * 2
    assert len({turn.agent for turn in turns}) == 3


async def test_an_edit_behind_the_hooks_is_found_by_the_next_call(rollout):
    _, model = rollout(numbered)
    agent = listened(model)
    await agent.invoke_async("Question-0?")
    agent.messages[1]["content"] = [{"text": "REWRITTEN"}]
    await agent.invoke_async("Question-1?")
    assert statuses(model.trajectory) == ["discarded", "answered"]


async def test_hooks_that_an_agent_has_twice_do_no_harm(rollout):
    _, model = rollout(numbered)
    agent = make_agent(model, hooks=[model.hooks, model.hooks])

    def edit(event):
        event.retry = has_text("Answer-0")(event)
        if has_text("Answer-2")(event):
            event.stop_response.message["content"] = [{"text": "REDACTED"}]

    agent.add_hook(edit, AfterModelCallEvent)
    for i in range(3):
        await agent.invoke_async(f"Question-{i}?")
    assert statuses(model.trajectory) == ["discarded", "committed", "discarded", "answered"]


async def test_what_was_told_survives_a_file_and_a_copy(rollout):
    _, model = rollout(numbered)
    agent = listened(model)
    await agent.invoke_async("Question?")
    for kept in (Trajectory.from_bytes(model.trajectory.to_bytes()), copy.deepcopy(model.trajectory)):
        assert [turn.was_added for turn in kept.turns] == [True]
        kept.settle(agent.messages)
        assert statuses(kept) == ["final"]


async def test_hooks_keep_nothing_alive(rollout):
    _, model = rollout(numbered)
    with model.episode() as trajectory:
        agent = listened(model)
        await agent.invoke_async("Question?")
    ended, gone = weakref.ref(trajectory), weakref.ref(agent)
    del trajectory
    gc.collect()
    assert ended() is None
    del agent
    gc.collect()
    assert gone() is None


async def test_environments_know_what_became_of_an_answer(rollout):
    """Without a settled history: the answer was never put into it."""
    _, model = rollout([*["<tool_call>\n{not json}\n</tool_call>"], "First.", "Second."])

    class Repeats:
        def register_hooks(self, registry, **kwargs):
            def retry(event):
                event.retry = has_text("First.")(event)

            registry.add_callback(AfterModelCallEvent, retry)

    class Env(Environment):
        def get_hooks(self):
            return [Repeats()]

    result = await Env(model_factory=lambda: model).step(Action(message="Compute."))
    assert statuses(result.observation.trajectory) == ["committed", "discarded", "final"]
    assert result.observation.trajectory.turns[1].note == "a hook had the call repeated"
    assert "{not json}" in str(result.observation.messages[2])


@pytest.mark.parametrize("summed_up", [True, False])
@pytest.mark.parametrize("text", ["REDACTED", "Answer-0. (checked)"])
async def test_what_another_hook_makes_of_an_answer_in_the_history_is_known(rollout, text, summed_up):
    _, model = rollout(numbered)
    agent = listened(model)

    def edit(event):
        if event.message["role"] == "assistant" and len(event.agent.messages) == 2:
            event.message["content"][:] = [{"text": word} for word in text.split(" ")]

    agent.add_hook(edit, MessageAddedEvent)
    await agent.invoke_async("Question-0?")
    if summed_up:
        agent.messages[:] = [{"role": "user", "content": [{"text": "What was said so far."}]}]
    await agent.invoke_async("Question-1?")
    turn = model.trajectory.turns[0]
    if text == "REDACTED":
        assert (turn.status.value, turn.was_added) == ("discarded", False)
    else:
        assert turn.was_added
        assert turn.note.startswith("kept in another form")
