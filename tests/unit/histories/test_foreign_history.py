"""History that the model did not speak on this record: few-shot, sessions, direct tool calls, edits, redaction."""

import asyncio

import pytest
from strands import tool
from strands.hooks import AfterModelCallEvent, BeforeInvocationEvent
from strands.session import FileSessionManager
from strands.vended_plugins.goal import GoalLoop

from strands_sglang import SGLangModel
from support.agents import call, make_agent, make_tools, needs_module
from support.judge import numbered, response_masks, statuses


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
