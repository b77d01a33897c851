"""Calls of tools that the agent does not have reach Strands as written, and the model reads what became of them."""

import pytest
from strands import tool
from strands.hooks import BeforeToolCallEvent
from strands.session.file_session_manager import FileSessionManager
from strands.types._events import ToolResultEvent

from support.agents import call, make_agent, make_tools
from support.strands_features import needs_module

try:
    from strands.middleware import ExecuteToolStage
except ImportError:  # before 1.62
    from strands._middleware import ExecuteToolStage

BROKEN = "<tool_call>\nno JSON\n</tool_call>"


def tool_uses(agent):
    return [block["toolUse"] for message in agent.messages for block in message["content"] if "toolUse" in block]


def result_texts(agent):
    blocks = [block for message in agent.messages for block in message["content"]]
    return [block["toolResult"]["content"][0]["text"] for block in blocks if "toolResult" in block]


def shown_results(request):
    """The tool results that a request adds behind the last sampled turn."""
    behind = request.text.rpartition("</tool_call>")[2]
    return [part.partition("\n</tool_response>")[0] for part in behind.split("<tool_response>\n")[1:]]


# A6
async def test_a_hook_serves_an_unregistered_tool_with_the_input_that_was_sampled(judged):
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

    agent = make_agent(judge.model, make_tools()[0])
    agent.add_hook(route, BeforeToolCallEvent)
    await agent.invoke_async("Call the ghost.")
    judge.check()
    assert seen == [("ghost", {"x": 1}, None)]
    assert shown_results(judge.server.requests[1]) == ["routed 1"] == result_texts(agent)
    assert len(judge.model.trajectory.sequences()) == 1


# A6
@needs_module("strands.middleware")
@pytest.mark.parametrize("written", [call("ghost", x=1), BROKEN], ids=["well formed", "not parsable"])
async def test_the_model_reads_what_middleware_answers(judged, written):
    judge = judged([written, "Done."])

    async def answer(context, next_fn):
        result = {"toolUseId": context.tool_use["toolUseId"], "status": "success", "content": [{"text": "from afar"}]}
        yield ToolResultEvent(result)

    agent = make_agent(judge.model, make_tools()[0])
    agent.add_middleware(ExecuteToolStage, answer)
    await agent.invoke_async("Call the ghost.")
    assert shown_results(judge.server.requests[1]) == ["from afar"] == result_texts(agent)


# A6
@pytest.mark.parametrize("name", ["ghost", "invalid tool", "ghost\n", "n" * 65, "unknown_tool", "INVALID_TOOL_NAME"])
@pytest.mark.parametrize("with_tools", [True, False])
async def test_strands_says_what_it_says_of_unknown_tools(judged, name, with_tools):
    judge = judged([call(name, x=1), "Done.", "Again."])
    agent = make_agent(judge.model, make_tools()[0] if with_tools else [])
    for text in ("Call the ghost.", "And?"):
        await agent.invoke_async(text)
    judge.check()
    ((use_name, use_input),) = [(use["name"], use["input"]) for use in tool_uses(agent)]
    assert (use_name, use_input) == (name, {"x": 1})
    (told,) = result_texts(agent)
    assert shown_results(judge.server.requests[1]) == [told]
    assert judge.model.tool_parse_errors == {}
    assert len(judge.model.trajectory.sequences()) == 1


# A6
async def test_results_stand_behind_their_calls_though_strands_puts_those_of_invalid_names_first(judged):
    judge = judged([call(expression="2 * 3") + call("invalid tool") + call("ghost"), "Done."])
    agent = make_agent(judge.model, make_tools()[0])
    await agent.invoke_async("Go.")
    judge.check()
    six, invalid, ghost = shown_results(judge.server.requests[1])
    assert (six, ghost) == ("6", "Unknown tool: ghost")
    assert "invalid tool" in invalid
    assert len(judge.model.trajectory.sequences()) == 1


# A6
@pytest.mark.parametrize("name", ["ghost", "invalid tool"])
async def test_a_restored_session_renders_the_call_that_was_sampled(judged, tmp_path, name):
    def restored(judge):
        manager = FileSessionManager(session_id="s", storage_dir=str(tmp_path))
        return make_agent(judge.model, make_tools()[0], agent_id="a", session_manager=manager)

    first = judged([call(name, command="run"), "It failed."])
    await restored(first).invoke_async("Run it.")
    second = judged(["It failed, as I said."])
    agent = restored(second)
    assert tool_uses(agent)[0]["name"] == name
    await agent.invoke_async("What was it?")
    (request,) = second.server.requests
    assert call(name, command="run") in request.text
    assert shown_results(request) == result_texts(agent)


# A6
async def test_a_rewritten_history_renders_the_name_that_was_sampled(judged):
    judge = judged([call("invalid tool", x=1), "Done.", "Again."])
    agent = make_agent(judge.model, make_tools()[0])
    await agent.invoke_async("Go.")
    agent.messages[0]["content"] = [{"text": "Go on."}]
    await agent.invoke_async("And?")
    assert call("invalid tool", x=1) in judge.server.requests[2].text
    assert len(judge.model.trajectory.sequences()) == 2
