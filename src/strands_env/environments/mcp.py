"""An environment with the tools of MCP servers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import anyio
from strands.hooks import HookProvider
from strands.hooks.events import AfterToolCallEvent
from strands.tools.mcp import MCPAgentTool, MCPClient

from strands_sglang.shown import without_credentials

from ..core import Action, Environment, ModelFactory, RewardFunction, StepResult
from ..core.supervision import maybe_await, run_in_thread
from ..core.tools import TOOL_TIMEOUT_PREFIX
from .backends import BackendError, EndOnBackendErrors

logger = logging.getLogger(__name__)

MAX_RESULT_CHARS = 32_000
GRACE_S = 5.0
"""Seconds for which a step waits for a start that it has cancelled."""
_POLL_S = 0.1
_FAILED = ("Tool execution failed", TOOL_TIMEOUT_PREFIX)
"""Starts of results of calls that no server answered. Strands also uses its own for calls that a server refused."""

ClientFactory = Callable[[], "MCPClient | Sequence[MCPClient] | Awaitable[MCPClient | Sequence[MCPClient]]"]


@dataclass
class _Servers:
    """The MCP servers of one step.

    Attributes:
        environment: Environment of the step.
        started: Clients that the step has started.
        tools: Tools of all its servers.
    """

    environment: MCPEnvironment
    started: list[MCPClient] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)


_servers_of_step: ContextVar[_Servers] = ContextVar("strands_env_mcp_servers")


class MCPEnvironment(Environment):
    """An environment with the tools of one or several MCP servers.

    With a client factory, each step starts its own servers in `reset` and stops them in `cleanup`. Episodes then share
    no server state, and steps may run concurrently. With running clients, all steps share the servers, and the caller
    stops them.

    If a server does not start, dies or no longer answers, the episode ends with the outcome `infrastructure_error` and
    without a reward. A server also counts as silent if one of its tools blocks it for longer than `tool_timeout` and
    `answer_timeout` together.

    Examples:
        ```python
        server = StdioServerParameters(command="python", args=["my_server.py"])
        env = MCPEnvironment(model_factory, reward_fn, clients=lambda: MCPClient(lambda: stdio_client(server)))
        ```
    """

    def __init__(
        self,
        model_factory: ModelFactory,
        reward_fn: RewardFunction | None = None,
        system_prompt: str | None = None,
        *args: Any,
        clients: ClientFactory | MCPClient | Sequence[MCPClient],
        answer_timeout: float = 30.0,
        max_result_chars: int | None = MAX_RESULT_CHARS,
        **kwargs: Any,
    ) -> None:
        """Create the environment. No server is started before the first step.

        Args:
            model_factory: Function that returns the model of a step, as for `Environment`.
            reward_fn: Reward function, as for `Environment`.
            system_prompt: System prompt, as for `Environment`.
            *args: Other positional arguments of `Environment`.
            clients: Function, sync or async, that returns one or several clients for a step; or clients that are
                already running, for all steps.
            answer_timeout: Seconds in which a server must start (or its client's `startup_timeout`, if that is longer),
                and in which it must list its tools. Servers are asked at the start of a step and after a failed call.
            max_result_chars: Characters of a tool result that the model sees, 32,000 by default; a note is added to a
                truncated result. None for no limit.
            **kwargs: Other keyword arguments of `Environment`.

        Raises:
            ValueError: A limit is invalid.
        """
        super().__init__(model_factory, reward_fn, system_prompt, *args, **kwargs)
        if not answer_timeout > 0:
            raise ValueError(f"answer_timeout must be more than 0 seconds, not {answer_timeout!r}")
        if max_result_chars is not None and (isinstance(max_result_chars, bool) or not max_result_chars >= 1):
            raise ValueError(f"max_result_chars must be at least 1, or None, not {max_result_chars!r}")
        self._clients = clients
        self._answer_timeout = answer_timeout
        self._max_result_chars = max_result_chars
        self._outside_of_steps = _Servers(self)

    async def step(self, action: Action) -> StepResult:
        """Run one episode with its own servers, as `Environment.step` does."""
        token = _servers_of_step.set(_Servers(self))
        try:
            return await super().step(action)
        finally:
            _servers_of_step.reset(token)

    @property
    def _servers(self) -> _Servers:
        servers = _servers_of_step.get(self._outside_of_steps)
        return servers if servers.environment is self else self._outside_of_steps

    async def reset(self) -> None:
        """Start the step's servers, and list the tools of all servers.

        Raises:
            BackendError: A server does not start, or does not list its tools, or two tools have the same name.
        """
        await super().reset()
        given: Any = self._clients
        is_made = not isinstance(given, MCPClient | Sequence)
        clients = await maybe_await(given() if is_made else given)
        tools: list[Any] = []
        for client in [clients] if isinstance(clients, MCPClient) else clients:
            if is_made:
                await self._start(client)
            try:
                tools += await _tools_of(client, self._answer_timeout)
            except Exception as error:
                raise BackendError(f"an MCP server does not list its tools: {_why(error)}") from error
        for name, count in Counter(tool.tool_name for tool in tools).items():
            if count > 1:
                raise BackendError(f"the MCP servers have several tools of the name {name}: give each server a prefix")
        self._servers.tools = _callable(tools)

    async def _start(self, client: MCPClient) -> None:
        servers, is_over = self._servers, threading.Event()
        seconds = max(self._answer_timeout, getattr(client, "_startup_timeout", 0))
        late = TimeoutError("it was not ready in time (answer_timeout)")
        connect: Any = getattr(client, "_transport_callable", None)  # None: a client that this cannot interrupt

        # Strands' client waits without limit for a server's first answer, also while it is stopped.
        @asynccontextmanager
        async def connect_in_time() -> AsyncGenerator[Any, None]:
            loop = asyncio.get_running_loop()
            with anyio.CancelScope() as scope:

                def check() -> None:
                    if not is_over.is_set():
                        loop.call_later(_POLL_S, check)
                    elif client not in servers.started:
                        scope.cancel()

                check()
                async with connect() as streams:
                    yield streams
            if scope.cancelled_caught:
                raise late

        def start() -> None:
            client._transport_callable = connect_in_time
            try:
                client.start()  # a client that fails to start stops itself
            finally:
                client._transport_callable = connect
            if is_over.is_set():  # perhaps no step waits any more
                client.stop(None, None, None)
                raise late
            servers.started.append(client)

        starting = asyncio.ensure_future(run_in_thread(start))
        try:
            await asyncio.wait({starting}, timeout=seconds)
        finally:
            is_over.set()
            await asyncio.wait({starting}, timeout=GRACE_S)
            error = starting.exception() if starting.done() else late
            starting.cancel()  # no longer wait for it
        if error is not None:
            raise BackendError(f"an MCP server did not start: {_why(error)}") from error

    def get_tools(self) -> Sequence[Any]:
        """Return the servers' tools; names have the clients' prefixes, and `_` where Strands allows nothing else."""
        return self._servers.tools

    def get_hooks(self) -> Sequence[HookProvider]:
        """Return the hook that ends the episode if a server has died, and that truncates long results."""
        clients = {tool.tool_name: tool.mcp_client for tool in self._servers.tools}
        return [_WatchServers(clients, self._answer_timeout, self._max_result_chars)]

    async def cleanup(self) -> None:
        """Stop the step's own servers. May be called twice."""
        servers = self._servers
        clients, servers.started, servers.tools = servers.started, [], []
        await asyncio.gather(*map(_stop, clients))
        await super().cleanup()


class _WatchServers(EndOnBackendErrors):
    """Checks the results of MCP tools.

    Ends the episode when a tool has failed and its server no longer answers; Strands reports this only to the model.
    """

    def __init__(self, clients: Mapping[str, MCPClient], answer_timeout: float, max_chars: int | None) -> None:
        """Set the client of each tool, by the tool's name, and the limits for servers and results."""
        super().__init__()
        self._clients = clients
        self._answer_timeout = answer_timeout
        self._max_chars = max_chars

    async def _check(self, event: AfterToolCallEvent) -> None:
        await super()._check(event)
        name = event.tool_use["name"]
        if name not in self._clients:
            return
        texts = [block.get("text", "") for block in event.result["content"]]
        if event.exception is not None or any(text.startswith(_FAILED) for text in texts):
            try:
                await _tools_of(self._clients[name], self._answer_timeout)
            except Exception as error:
                raise BackendError(f"{name}: an MCP server no longer answers: {error}") from error
        if self._max_chars is not None:
            event.result = _truncated(event.result, self._max_chars)


def _truncated(result: Any, limit: int) -> Any:
    """Truncate a tool result to a number of characters, and add a note if text was removed."""
    blocks = [{"text": json.dumps(block["json"])} if "json" in block else block for block in result["content"]]
    total = sum(len(block.get("text", "")) for block in blocks)
    unread = {name: value for name, value in result.items() if name in ("structuredContent", "metadata")}
    if total <= limit and len(json.dumps(unread, default=str)) <= limit:
        return result
    remaining, content = limit, []
    for block in blocks:
        if "text" in block:
            block = {**block, "text": block["text"][:remaining]}
            remaining -= len(block["text"])
        if block.get("text") != "":
            content.append(block)
    if total > limit:
        content.append({"text": f"[the result was cut: its first {limit} of {total} characters are above]"})
    return {**{name: value for name, value in result.items() if name not in unread}, "content": content}


def _callable(tools: Sequence[MCPAgentTool]) -> list[MCPAgentTool]:
    """Return tools with names that Strands accepts; it refuses each call of another one, and tools with one name."""
    names = [re.sub("[^a-zA-Z0-9_-]", "_", tool.tool_name)[-64:] for tool in tools]
    counts = Counter(name.replace("-", "_") for name in names)
    made = []
    for tool, name in zip(tools, names, strict=True):
        if name != tool.tool_name and counts[name.replace("-", "_")] == 1:
            tool = MCPAgentTool(tool.mcp_tool, tool.mcp_client, name, tool.timeout)
        made.append(tool)
    return made


def _why(error: BaseException) -> str:
    """Return an error's text, without credentials, or that of the first error in its group, whose own says nothing."""
    group: Any = error.__cause__
    while hasattr(group, "exceptions"):
        group = error = group.exceptions[0]
    return without_credentials(str(error))


async def _stop(client: MCPClient) -> None:
    try:
        await run_in_thread(client.stop, None, None, None)
    except Exception:
        logger.warning("an MCP server could not be stopped", exc_info=True)


async def _tools_of(client: MCPClient, seconds: float) -> list[Any]:
    """List the tools of a server.

    Raises:
        TimeoutError: The server does not answer in time.
        Exception: The server cannot be asked, or answers with an error.
    """
    try:
        return await asyncio.wait_for(run_in_thread(_list_tools, client), seconds)
    except asyncio.TimeoutError:
        raise TimeoutError(f"it did not answer within {seconds:g} seconds") from None


def _list_tools(client: MCPClient) -> list[Any]:
    tools: list[Any] = []
    token = None
    while True:
        page = client.list_tools_sync(pagination_token=token)
        tools += page
        token = page.pagination_token
        if token is None:
            return tools
