"""The ready-made environments, each with an agent on a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from mcp import StdioServerParameters, stdio_client
from strands.tools.mcp import MCPClient
from strands.types import PaginatedList

from strands_env.core import RewardResult, TerminationReason
from strands_env.environments import (
    AgentCoreCodeEnvironment,
    ArithmeticExpressionError,
    CalculatorEnvironment,
    MCPEnvironment,
    MCPServersEnvironment,
    PythonEnvironment,
    ReasoningGymEnvironment,
    WorldEnvironment,
    calculator,
    evaluate,
    mcp as mcp_environment,
    reasoning_gym_tasks,
)
from strands_env.environments.calculator import as_text
from strands_env.rewards import ExactMatchReward, MathReward
from strands_env.sandbox import Execution, PythonSandbox, SandboxLimits
from strands_sglang import SGLangModel
from strands_sglang.testing import ScriptedSGLang
from support.agents import ScriptedModel, advance, call, tool_use
from support.environments import task
from support.processes import running
from support.worlds import needs_worlds

SERVER = Path(__file__).parents[3] / "support" / "mcp_server.py"


@pytest.fixture
def factory(chatml_tokenizer):
    """Create a model factory whose models "sample" the given texts."""

    def make(*answers):
        server = ScriptedSGLang(chatml_tokenizer, list(answers))
        return lambda: SGLangModel(tokenizer=chatml_tokenizer, client=server.client())

    return make


def tool_results(result):
    """Return status and text of each tool result of an episode."""
    return [
        (block["toolResult"]["status"], "".join(part.get("text", "") for part in block["toolResult"]["content"]))
        for message in result.observation.messages
        for block in message["content"]
        if "toolResult" in block
    ]


async def test_agent_calculates_and_is_rewarded(factory):
    answers = [call("calculator", expression="2^10"), call("calculator", expression="1/0"), "It is \\boxed{1024}."]
    environment = CalculatorEnvironment(factory(*answers), MathReward())
    result = await environment.step(task("1024", message="What is 2^10?"))
    assert tool_results(result) == [("success", "1024"), ("error", "Error: division by zero in 1/0")]
    assert result.termination_reason == TerminationReason.TASK_COMPLETE
    assert result.reward is not None and result.reward.reward == 1.0
    assert "calculator" in (environment.system_prompt or "")


async def test_agent_runs_programs(factory):
    sandbox = PythonSandbox(SandboxLimits(wall_s=4.0))
    programs = ["print(6 * 7)", "x = 1", "1 / 0", "import time\ntime.sleep(100)", "import os; os.kill(os.getpid(), 11)"]
    answers = [call("execute_python_code", code=code) for code in programs]
    environment = PythonEnvironment(factory(*answers, "42"), ExactMatchReward(), sandbox=sandbox)
    result = await environment.step(task("42"))
    statuses, texts = zip(*tool_results(result), strict=True)
    assert statuses == ("success", "success", "error", "error", "error")
    assert texts[0] == "42"
    assert "nothing was printed" in texts[1] and "ZeroDivisionError" in texts[2]
    assert texts[3] == "[stopped: it ran for more than 4 seconds]" and texts[4] == "[ended by SIGSEGV]"
    assert result.reward is not None and result.reward.reward == 1.0


async def test_a_program_that_waits_for_its_neighbors_is_not_late(factory, monkeypatch):
    """The time in the sandbox's queue counted: most of 30 episodes at once had no answer, though nothing had run."""
    waits, gate = asyncio.Event(), asyncio.Event()

    async def run(sandbox, code, started):
        waits.set()
        await gate.wait()
        started()
        return Execution(b"7", b"", "exited", 0)

    monkeypatch.setattr(PythonSandbox, "run", run)
    answers = [call("execute_python_code", code="print(7)"), "done"]
    sandbox = PythonSandbox()
    environment = PythonEnvironment(factory(*answers), sandbox=sandbox, tool_timeout=60.0, episode_timeout=90.0)
    step = asyncio.ensure_future(environment.step(task()))
    await waits.wait()
    advance(1000.0)
    await asyncio.sleep(0)
    gate.set()
    assert tool_results(await step) == [("success", "7")]


async def test_program_over_a_limit_is_told_its_size(factory, monkeypatch):
    async def run(sandbox, code, started):
        return Execution(b"", b"", code, None)

    monkeypatch.setattr(PythonSandbox, "run", run)
    sandbox = PythonSandbox(SandboxLimits(memory_bytes=64 << 20, disk_bytes=32 << 20))
    answers = [call("execute_python_code", code=ended) for ended in ("memory", "disk")]
    result = await PythonEnvironment(factory(*answers, "done"), sandbox=sandbox).step(task())
    assert tool_results(result) == [
        ("error", "[stopped: it used more than 64 MB of memory]"),
        ("error", "[stopped: its files took more than 32 MB]"),
    ]


async def test_timed_out_episode_ends_its_program(factory, tmp_path):
    sandbox = PythonSandbox()
    code = "import time\nwhile True: time.sleep(0.01)"
    environment = PythonEnvironment(
        factory(call("execute_python_code", code=code), "done"), sandbox=sandbox, episode_timeout=1.5
    )
    result = await environment.step(task())
    assert result.termination_reason == TerminationReason.TIMEOUT
    deadline = time.monotonic() + 60
    while running(os.getpid()):
        assert time.monotonic() < deadline


async def test_broken_sandbox_is_an_infrastructure_error(factory, monkeypatch):
    sandbox = PythonSandbox()
    answers = [call("execute_python_code", code="print(1)"), "done"]
    environment = PythonEnvironment(factory(*answers), ExactMatchReward(), sandbox=sandbox)
    monkeypatch.setenv("STRANDS_ENV_WORLDS", "/dev/null")
    result = await environment.step(task("done"))
    assert result.termination_reason == TerminationReason.INFRASTRUCTURE_ERROR
    assert result.reward is None and "/dev/null is not a folder" in (result.error or "")


async def test_program_that_kills_its_sandbox_has_failed(factory):
    # Otherwise a policy could have its worst samples dropped, and would look better than it is.
    answers = [call("execute_python_code", code="import os; os.kill(os.getppid(), 9); print('on')"), "42"]
    environment = PythonEnvironment(factory(*answers), ExactMatchReward(), sandbox=PythonSandbox())
    result = await environment.step(task("41"))
    assert [status for status, _ in tool_results(result)] == ["error"]
    assert result.termination_reason == TerminationReason.TASK_COMPLETE
    assert result.reward is not None and result.reward.reward == 0.0


def test_environments_share_one_sandbox(factory):
    first, second = (PythonEnvironment(factory()) for _ in range(2))
    assert first.sandbox is second.sandbox


# --- worlds ---


class OutputIs42:
    """Runs what the agent left in its world."""

    def __init__(self, environment):
        self.environment = environment

    async def compute(self, action, step_result):
        ran = await self.environment.world.execute("python3 /task/main.py")
        return RewardResult(reward=float(ran.output == "42\n"))


@needs_worlds
async def test_an_agent_edits_a_file_and_runs_it_in_a_world(factory):
    answers = [
        call("file_editor", command="create", path="/task/main.py", file_text="print(6 * 6)\n"),
        call("file_editor", command="str_replace", path="/task/main.py", old_str="6 * 6", new_str="6 * 7"),
        call("shell", command="python3 /task/main.py; cat /etc/shadow; sleep 60", timeout=1),
        call("shell", command="yes | head -c 300000000"),
        call("shell", command="python3 /task/main.py"),
    ]
    environment = WorldEnvironment(factory(*answers, "done"))
    environment.reward_fn = OutputIs42(environment)
    result = await environment.step(task())
    statuses, texts = zip(*tool_results(result), strict=True)
    assert statuses[:2] == ("success", "success") and statuses[4] == "success"
    assert "timed out" in texts[2] and "root:" not in texts[2]
    assert "exceeded the limit on output" in texts[3] and "characters left out" in texts[3] and len(texts[3]) < 300_000
    assert "42" in texts[4]
    assert result.reward is not None and result.reward.reward == 1.0
    assert not Path("/task/main.py").exists() and not running(os.getpid())


async def test_a_world_that_does_not_start_is_an_infrastructure_error(factory, monkeypatch):
    monkeypatch.setenv("STRANDS_ENV_WORLDS", "/dev/null")
    result = await WorldEnvironment(factory("done"), ExactMatchReward()).step(task("done"))
    assert result.termination_reason == TerminationReason.INFRASTRUCTURE_ERROR and result.reward is None


# --- MCP ---


def mcp_client(*options):
    command = StdioServerParameters(command=sys.executable, args=[str(SERVER), *options])
    return MCPClient(lambda: stdio_client(command))


def servers():
    """Return the MCP servers of this process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and str(SERVER).encode() in (folder / "cmdline").read_bytes():
                found.append(folder.name)
    return found


async def test_agent_has_the_tools_of_the_server(factory):
    answers = [call("add", a=2, b=3), call("fail"), call("count"), "5"]
    environment = MCPEnvironment(factory(*answers), ExactMatchReward(), clients=mcp_client)
    result = await environment.step(task("5"))
    (added, sum_), (failed, message), (_, count) = tool_results(result)
    assert (added, failed) == ("success", "error")
    assert sum_.startswith("5") and "fail" in message and count.startswith("1 ")
    assert result.reward is not None and result.reward.reward == 1.0
    assert servers() == []


async def test_agent_has_the_tools_of_every_page(factory, monkeypatch):
    listed = MCPClient.list_tools_sync

    def page(client, pagination_token=None):
        tools = listed(client)
        following = int(pagination_token or 0) + 1
        return type(tools)(tools[following - 1 : following], str(following) if following < len(tools) else None)

    monkeypatch.setattr(MCPClient, "list_tools_sync", page)
    result = await MCPEnvironment(factory(call("write", length=2), "done"), clients=mcp_client).step(task())
    assert tool_results(result) == [("success", "xx")]


async def test_each_step_has_its_own_server(factory):
    environment = MCPEnvironment(factory(*[call("add", a=1, b=1), call("count"), "2"] * 2), clients=mcp_client)
    counts = [tool_results(await environment.step(task()))[1][1] for _ in range(2)]
    assert [count.split()[0] for count in counts] == ["1", "1"] and len(set(counts)) == 2


async def test_running_clients_are_shared_and_not_stopped(factory):
    with mcp_client() as client:
        environment = MCPEnvironment(factory(*[call("add", a=1, b=1), call("count"), "2"] * 2), clients=client)
        counts = [tool_results(await environment.step(task()))[1][1].split()[0] for _ in range(2)]
        assert counts == ["1", "2"] and len(servers()) == 1
    assert servers() == []


async def test_several_servers_with_prefixes(factory):
    def clients():
        command = StdioServerParameters(command=sys.executable, args=[str(SERVER)])
        return [MCPClient(lambda: stdio_client(command), prefix=name) for name in ("left", "right")]

    answers = [call("left_add", a=1, b=1), call("right_count"), "done"]
    results = tool_results(await MCPEnvironment(factory(*answers), clients=clients).step(task()))
    assert results[0][1].startswith("2") and results[1][1].startswith("0 ")


async def test_two_tools_of_one_name_are_told_with_what_to_do(factory):
    servers = [{"command": sys.executable, "args": [str(SERVER)]}] * 2
    result = await MCPServersEnvironment(factory("x"), servers=servers).step(task())
    assert result.termination_reason == TerminationReason.INFRASTRUCTURE_ERROR
    assert "several tools of the name add: give each server a prefix" in result.error


async def test_tools_with_names_that_strands_refuses_can_be_called(factory):
    prefixes = ["shop.v1", "x" * 99]
    servers = [{"command": sys.executable, "args": [str(SERVER)], "prefix": prefix} for prefix in prefixes]
    answers = [call("shop_v1_add", a=1, b=1) + call(f"{'x' * 60}_add", a=1, b=2), "done"]
    result = await MCPServersEnvironment(factory(*answers), servers=servers).step(task())
    assert [text[:1] for _, text in tool_results(result)] == ["2", "3"]


@pytest.mark.parametrize("prefixes", [("shop.v1", "shop_v1"), ("my.shop-v1", "my_shop_v1")])
async def test_a_tool_does_not_get_the_name_of_another_one(factory, prefixes):
    servers = [{"command": sys.executable, "args": [str(SERVER)], "prefix": prefix} for prefix in prefixes]
    answers = [call(f"{prefixes[1]}_add", a=1, b=1), "done"]
    result = await MCPServersEnvironment(factory(*answers), servers=servers).step(task())
    assert [text[:1] for _, text in tool_results(result)] == ["2"]


async def test_the_reason_of_a_server_that_does_not_start_is_told(factory):
    environment = MCPServersEnvironment(factory("x"), servers=["http://127.0.0.1:9/mcp"])
    result = await environment.step(task("x"))
    assert "did not start: " in result.error and "TaskGroup" not in result.error


async def test_the_reason_has_no_credentials(factory):
    @contextlib.asynccontextmanager
    async def refused():
        raise ConnectionError("401 Unauthorized for url 'http://user:secret@host/sse'")
        yield

    result = await MCPEnvironment(factory("x"), clients=lambda: MCPClient(refused)).step(task("x"))
    assert "for url 'http://host/sse'" in result.error


async def test_server_that_does_not_start_is_an_infrastructure_error(factory):
    def clients():
        broken = StdioServerParameters(command="/does/not/exist")
        return [mcp_client(), MCPClient(lambda: stdio_client(broken), startup_timeout=5)]

    result = await MCPEnvironment(factory("x"), ExactMatchReward(), clients=clients).step(task("x"))
    assert result.termination_reason == TerminationReason.INFRASTRUCTURE_ERROR
    assert result.reward is None and "did not start" in (result.error or "")
    assert servers() == []


async def test_server_that_dies_is_an_infrastructure_error(factory):
    environment = MCPEnvironment(
        factory(call("add", a=1, b=1), call("die"), "5"), ExactMatchReward(), clients=mcp_client
    )
    result = await environment.step(task("4"))
    assert result.termination_reason == TerminationReason.INFRASTRUCTURE_ERROR
    assert result.reward is None and "die" in (result.error or "")
    assert [status for status, _ in tool_results(result)][:1] == ["success"] and servers() == []


async def test_wrong_arguments_are_errors_of_the_model(factory):
    answers = [call("add", a="x", b=[]), call("add"), call("add", a=1, b=1), "2"]
    result = await MCPEnvironment(factory(*answers), ExactMatchReward(), clients=mcp_client).step(task("2"))
    assert [status for status, _ in tool_results(result)] == ["error", "error", "success"]
    assert result.reward is not None and result.reward.reward == 1.0


async def test_concurrent_steps_have_their_own_servers():
    # The cleanup of one step must not stop the server of another.
    begun, is_over = asyncio.Event(), asyncio.Event()

    class Waiting(ScriptedModel):
        async def stream(self, *args, **kwargs):
            if len(self.calls) == 1:
                begun.set()
                await is_over.wait()
            async for event in super().stream(*args, **kwargs):
                yield event

    answers = [[tool_use("1", "add", a=1, b=1)], [tool_use("2", "count")], "2"]
    models = iter([Waiting(answers), ScriptedModel(answers)])
    environment = MCPEnvironment(lambda: next(models), clients=mcp_client)
    slow = asyncio.ensure_future(environment.step(task()))
    await begun.wait()
    quick = await environment.step(task())
    is_over.set()
    counts = [tool_results(result)[1][1] for result in (quick, await slow)]
    assert [count.split()[0] for count in counts] == ["1", "1"] and counts[0] != counts[1]
    assert servers() == []


async def test_frozen_server_is_an_infrastructure_error(factory):
    answers = [call("freeze"), call("add", a=1, b=1), "2"]
    limits = {"tool_timeout": 0.5, "answer_timeout": 0.5}
    environment = MCPEnvironment(factory(*answers), ExactMatchReward(), clients=mcp_client, **limits)
    result = await environment.step(task("2"))
    assert result.termination_reason == TerminationReason.INFRASTRUCTURE_ERROR and result.reward is None
    assert "freeze: an MCP server no longer answers" in (result.error or "") and servers() == []


async def test_silent_server_does_not_hang_the_step(factory):
    environment = MCPEnvironment(factory("x"), clients=lambda: mcp_client("silent"), answer_timeout=0.5)
    result = await environment.step(task("x"))
    assert result.termination_reason == TerminationReason.INFRASTRUCTURE_ERROR
    assert "does not list its tools: it did not answer within 0.5 seconds" in (result.error or "") and servers() == []


@pytest.mark.parametrize("episode_timeout", [None, 0.5])
async def test_server_that_never_answers_ends_with_its_start(factory, episode_timeout):
    command = StdioServerParameters(command=sys.executable, args=["-S", "-c", "input() and input()", str(SERVER)])
    client = MCPClient(lambda: stdio_client(command), startup_timeout=1)
    limits = {"answer_timeout": 0.2 if episode_timeout is None else 60.0, "episode_timeout": episode_timeout}
    environment = MCPEnvironment(factory("x"), clients=lambda: client, **limits)
    result = await asyncio.wait_for(environment.step(task("x")), 30)
    assert result.observation.metrics["model_calls"] == 0 and servers() == []
    if episode_timeout is None:
        assert result.termination_reason == TerminationReason.INFRASTRUCTURE_ERROR
        assert "did not start" in result.error
    else:
        assert result.termination_reason == TerminationReason.TIMEOUT


async def test_start_that_cannot_be_interrupted_does_not_hold_the_step(factory, monkeypatch):
    monkeypatch.setattr(mcp_environment, "GRACE_S", 0.1, raising=False)
    begun, is_over, ended = threading.Event(), threading.Event(), threading.Event()

    class Client:
        def start(self):
            begun.set()
            is_over.wait(10)

        def stop(self, *error):
            ended.set()

    environment = MCPEnvironment(factory("x"), clients=lambda: [Client()], answer_timeout=0.1)
    result = await asyncio.wait_for(environment.step(task("x")), 5)
    assert result.termination_reason == TerminationReason.INFRASTRUCTURE_ERROR
    assert "did not start: it was not ready in time" in result.error and not ended.is_set()
    is_over.set()
    assert ended.wait(20)  # a server that starts too late is stopped


async def test_client_needs_only_the_public_methods(factory):
    class Client:
        def start(self):
            pass

        def stop(self, *error):
            pass

        def list_tools_sync(self, pagination_token=None):
            return PaginatedList([])

    result = await MCPEnvironment(factory("x"), clients=lambda: [Client()]).step(task("x"))
    assert result.termination_reason == TerminationReason.TASK_COMPLETE, result.error


async def test_long_result_is_truncated_with_a_note(factory):
    answers = [call("write", length=1_000_000), call("write", length=5), "done"]
    environment = MCPEnvironment(factory(*answers), clients=mcp_client, max_result_chars=1_000)
    result = await environment.step(task())
    (_, long), (_, short) = tool_results(result)
    assert long == "x" * 1_000 + "[the result was cut: its first 1000 of 1000000 characters are above]"
    assert short.startswith("xxxxx") and "cut" not in short
    assert len(str(result.observation.messages)) < 10_000  # nor anywhere else
    with pytest.raises(ValueError, match="max_result_chars"):
        MCPEnvironment(factory(), clients=mcp_client, max_result_chars=0)


# --- AgentCore ---


class FakeInterpreter:
    """A stub of the service: answers with event streams, keeps variables, runs one program at a time."""

    made: list[FakeInterpreter] = []

    def __init__(self):
        self.started = None
        self.stopped = 0
        self.names = {}
        self.busy = threading.Lock()
        FakeInterpreter.made.append(self)

    def start(self, identifier=None, name=None, session_timeout_seconds=None):
        self.started = {"identifier": identifier, "timeout": session_timeout_seconds}
        return "session"

    def invoke(self, method, params=None):
        assert method == "executeCode" and params is not None and params["language"] == "python"
        if params["code"] == "throttle":
            return {"stream": [{"throttlingException": {"message": "slow down"}}]}
        printed, error = [], ""
        assert self.busy.acquire(blocking=False), "two programs at once"
        try:
            exec(params["code"], {"print": lambda *what: printed.append(" ".join(map(str, what))), "names": self.names})
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        finally:
            self.busy.release()
        result = {
            "content": [{"type": "text", "text": "\n".join(printed) + error}],
            "structuredContent": {"stdout": "\n".join(printed), "stderr": error, "exitCode": int(bool(error))},
            "isError": bool(error),
        }
        return {"stream": [{"result": result}]}

    def stop(self):
        self.stopped += 1
        return True


@pytest.fixture
def interpreters():
    FakeInterpreter.made = []
    return FakeInterpreter.made


agentcore = functools.partial(AgentCoreCodeEnvironment, client_factory=FakeInterpreter, session_timeout=60)


async def test_programs_of_a_step_share_one_session(factory, interpreters):
    codes = ["names['x'] = 6", "print(names['x'] * 7)", "1 / 0"]
    answers = [call("execute_python_code", code=code) for code in codes]
    result = await agentcore(factory(*answers, "42")).step(task())
    assert tool_results(result) == [
        ("success", "[nothing was printed: print what you want to see]"),
        ("success", "42"),
        ("error", "ZeroDivisionError: division by zero"),
    ]
    (interpreter,) = interpreters
    assert interpreter.started == {"identifier": "aws.codeinterpreter.v1", "timeout": 60}
    assert interpreter.stopped == 1


async def test_step_without_a_program_opens_no_session(factory, interpreters):
    await agentcore(factory("42")).step(task())
    assert interpreters == []


async def test_parallel_programs_run_one_by_one(factory, interpreters):
    both = call("execute_python_code", code="print(1)") + "\n" + call("execute_python_code", code="print(2)")
    result = await agentcore(factory(both, "done")).step(task())
    assert sorted(text for _, text in tool_results(result)) == ["1", "2"]
    assert len(interpreters) == 1


async def test_program_fails_if_any_result_is_an_error(factory, interpreters, monkeypatch):
    results = [{"content": [{"type": "text", "text": text}], "isError": text == "bad"} for text in ("bad", "good")]
    answer = {"stream": [{"result": result} for result in results]}
    monkeypatch.setattr(FakeInterpreter, "invoke", lambda self, method, params: answer)
    result = await agentcore(factory(call("execute_python_code", code="1"), "done")).step(task())
    assert tool_results(result) == [("error", "bad\ngood")]


async def test_service_error_is_an_infrastructure_error(factory, interpreters):
    environment = agentcore(factory(call("execute_python_code", code="throttle"), "done"), reward_fn=ExactMatchReward())
    result = await environment.step(task("done"))
    assert result.termination_reason == TerminationReason.INFRASTRUCTURE_ERROR
    assert result.reward is None and "throttlingException" in (result.error or "")
    assert interpreters[0].stopped == 1


def test_missing_package_is_an_error_with_install_command(monkeypatch, factory):
    monkeypatch.setitem(sys.modules, "bedrock_agentcore", None)
    with pytest.raises(ImportError, match=r"pip install -e .*\[agentcore\]"):
        AgentCoreCodeEnvironment(factory(), region="us-west-2")
    with pytest.raises(ValueError, match="region"):
        AgentCoreCodeEnvironment(factory())


def test_reasoning_gym_is_an_extra(monkeypatch, factory):
    """tests/trainers/packages has the tests with the package."""
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for make in (lambda: ReasoningGymEnvironment(factory()), lambda: reasoning_gym_tasks("leg_counting")):
        with pytest.raises(ImportError, match=r"pip install -e .*\[reasoning-gym\]"):
            make()


def test_importing_environments_imports_no_optional_package():
    import subprocess

    code = (
        "import sys, strands_env.environments, strands_env.rewards\n"
        "names = ('bedrock_agentcore', 'math_verify', 'reasoning_gym', 'strands_evals', 'sympy', 'torch')\n"
        "print([name for name in names if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ran.stdout == "[]\n", ran.stderr


@pytest.mark.parametrize("environment", [CalculatorEnvironment, PythonEnvironment, AgentCoreCodeEnvironment])
def test_default_system_prompts_exist(environment):
    path = environment.default_system_prompt_path
    assert path is not None and "boxed" in Path(path).read_text()


# --- the calculator: Python's arithmetic for small expressions, an immediate error for others ---


NUMBERS = st.one_of(
    st.integers(0, 200).map(str),
    st.floats(0, 1000, allow_nan=False).map(lambda x: f"{x:.3f}"),
)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(" ".join),
        st.tuples(inner, st.sampled_from(["**2", "**3", "**0", "**-1"])).map(lambda parts: f"({parts[0]}){parts[1]}"),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
        inner.map(lambda text: f"abs({text})"),
        st.tuples(inner, inner).map(lambda pair: f"max({pair[0]}, {pair[1]})"),
    ),
    max_leaves=8,
)


@settings(max_examples=500)
@given(EXPRESSIONS)
def test_small_expressions_have_pythons_value(expression):
    try:
        expected = eval(expression)
    except (ZeroDivisionError, OverflowError):
        with pytest.raises(ArithmeticExpressionError):
            evaluate(expression)
        return
    value = evaluate(expression)
    if isinstance(expected, int):
        assert value == expected
    else:
        assert value == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(st.integers(-(10**40), 10**40), st.integers(-(10**40), 10**40), st.sampled_from(["+", "-", "*"]))
def test_integers_are_exact(left, right, sign):
    assert as_text(evaluate(f"{left} {sign} ({right})")) == str(eval(f"{left} {sign} ({right})"))


@settings(max_examples=500)
@given(st.one_of(st.text(max_size=200), st.text(alphabet="0123456789+-*/%().^e,x _=[]", max_size=200)))
def test_any_text_has_a_value_or_an_error(text):
    try:
        assert math.isfinite(evaluate(text))
    except ArithmeticExpressionError as error:
        assert 0 < len(str(error)) < 600
    except OverflowError:  # an integer too large for math.isfinite
        pass


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("2^10", "1024"),
        ("2^10 + 1", "1025"),
        ("-2**2", "-4"),
        ("6/2", "3"),
        ("1/3", "0.333333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("7 × 8 ÷ 4 − 1", "13"),
        ("sqrt(144)", "12"),
        ("sqrt(2)", "1.4142135623731"),
        ("round(2.567, 2)", "2.57"),
        ("factorial(20)", "2432902008176640000"),
        ("factorial(0)", "1"),
        ("comb(50, 6)", "15890700"),
        ("gcd(12, 18, 27)", "3"),
        ("2 * pi", "6.28318530717959"),
        ("log(e)", "1"),
        ("10**20 / 10", "10000000000000000000"),
        ("1e300 * 1e8", "1e+308"),
        ("1" + "+1" * 499, "500"),
    ],
)
def test_results_are_formatted_like_a_calculators(expression, shown):
    got = as_text(evaluate(expression))
    assert got == shown or float(got) == pytest.approx(float(shown), rel=1e-14)


HOSTILE = {
    "9**9**9": "too large",
    "9**9**9**9": "too large",
    "-(9**99999)": "too large",
    "10**3001": "too large",
    "factorial(10**9)": "factorial takes",
    "factorial(factorial(10))": "factorial takes",
    "comb(10**9, 10**8)": "comb takes",
    "1e308 * 10": "too large",
    "exp(1000)": "too large",
    "(-8) ** 0.5": "not a real number",
    "sqrt(-1)": "math domain|nonnegative|positive",
    "log(0)": "math domain|positive",
    "1/0": "division by zero",
    "0**-1": "division by zero",
    "1 % 0": "division by zero",
    "1 // 0": "division by zero",
    "1" * 1001: "characters",
    "(" * 400 + "1" + ")" * 400: "not an arithmetic expression|nested",
    "-" * 900 + "1": "nested|not an arithmetic expression",
    "abs(" * 90 + "1" + ")" * 90: "nested|not an arithmetic expression",
    "2**(" * 90 + "1" + ")" * 90: "nested|not an arithmetic expression",
    "__import__('os').system('true')": "allowed",
    "().__class__": "allowed",
    "open('x')": "there is no function open",
    "max(*[1,2])": "allowed",
    "abs(x=1)": "allowed",
    "[i for i in range(9)]": "allowed",
    "'a' * 10**9": "allowed",
    "True + 1": "allowed",
    "1 if 1 else 2": "allowed",
    "lambda: 1": "allowed",
    "1j * 1j": "allowed",
    "x + 1": "x has no value",
    "abs()": "abs",
    "sqrt(1, 2)": "sqrt|argument",
    "round(1.5, 10**9)": "digits",
    "gcd(1.5, 2)": "not a whole number",
    "1 +": "not an arithmetic expression",
    "": "not an arithmetic expression",
    "1\n2": "not an arithmetic expression",
    "1 \x00": "not an arithmetic expression",
    "\ud800": "not an arithmetic expression",
    "2 = 2": "not an arithmetic expression",
    "1_000_000_000 ** 400": "too large",
    "floor(1e308 * 1.0) ** 20": "too large",
    "10 ** 400 * 1.5": "too large",
    "2.5 ** (10**400)": "too large",
}


@pytest.mark.parametrize("expression", ["min(1)", "max()", "round()", "comb(5)"])
def test_wrong_number_of_arguments_is_said_as_such(expression):
    with pytest.raises(ArithmeticExpressionError, match="too few or too many arguments"):
        evaluate(expression)


def test_an_expression_prints_no_warning_of_python(recwarn):
    with pytest.raises(ArithmeticExpressionError):
        evaluate("1if 2else 3")
    assert not recwarn.list


@pytest.mark.parametrize("expression", HOSTILE.keys(), ids=lambda text: text[:20])
def test_invalid_expressions_are_refused_at_once_with_a_reason(expression):
    began = time.process_time()
    with pytest.raises(ArithmeticExpressionError, match=HOSTILE[expression]) as refused:
        evaluate(expression)
    assert time.process_time() - began < 0.5
    assert len(str(refused.value)) < 600


async def test_calculator_reports_errors_to_the_model():
    results = []
    for expression in ("2^10", "1/0"):
        use = {"toolUseId": "1", "name": "calculator", "input": {"expression": expression}}
        async for event in calculator.stream(use, {}):
            results.append(event.get("tool_result", event))
    texts = [str(result) for result in results]
    assert any("1024" in text and "success" in text for text in texts)
    assert any("division by zero" in text and "'error'" in text for text in texts)
