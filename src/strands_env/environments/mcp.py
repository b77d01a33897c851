"""Any MCP server as an environment: its tools are the agent's."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from strands.hooks import HookProvider
from strands.hooks.events import AfterToolCallEvent
from strands.tools.mcp import MCPClient

from ..core import Action, Environment, ModelFactory, RewardFunction, StepResult
from ..core.environment import TOOL_TIMEOUT_PREFIX
from ..core.supervision import invoke, maybe_await, run_in_thread
from .backends import BackendError, EndOnBackendErrors

logger = logging.getLogger(__name__)

MAX_RESULT_CHARS = 32_000
_FAILED = ("Tool execution failed", TOOL_TIMEOUT_PREFIX)
"""How the result of a call begins that no server answered; Strands' also that of one that a server found no call."""

ClientFactory = Callable[[], "MCPClient | Sequence[MCPClient] | Awaitable[MCPClient | Sequence[MCPClient]]"]


@dataclass
class _Servers:
    """The servers of one step.

    Attributes:
        environment: Whose step it is.
        own: The clients that the step has started.
        tools: The tools of all its servers.
    """

    environment: MCPEnvironment
    own: list[MCPClient] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)


_servers_of_step: ContextVar[_Servers] = ContextVar("strands_env_mcp_servers")


class MCPEnvironment(Environment):
    """Tasks for an agent with the tools of one or several MCP servers.

    With a factory each step has servers of its own, started by `reset` and stopped by `cleanup`: state that a server
    keeps is not seen by other episodes, and steps may run at once. With running clients all steps share them, and who
    started them stops them.

    An episode whose server does not answer ends without a reward: one that has died or was stopped, and also one that
    a tool blocks for longer than `tool_timeout` and `answer_timeout` together.
    """

    def __init__(
        self,
        model_factory: ModelFactory,
        reward_fn: RewardFunction | None = None,
        system_prompt: str | None = None,
        *args: Any,
        clients: ClientFactory | MCPClient | Sequence[MCPClient],
        answer_timeout: float = 10.0,
        max_result_chars: int | None = MAX_RESULT_CHARS,
        **kwargs: Any,
    ) -> None:
        """Set up the environment; nothing is started yet.

        Args:
            model_factory: As for `Environment`.
            reward_fn: As for `Environment`.
            system_prompt: As for `Environment`.
            *args: As for `Environment`.
            clients: Makes the clients of a step, one or several; or clients that run already, for all steps.
            answer_timeout: Seconds in which a server has to list its tools: at the start, and after a call that failed.
            max_result_chars: Characters of a tool's result that the model sees; a note says that it was cut. None for
                any number.
            **kwargs: As for `Environment`.

        Raises:
            ValueError: A limit cannot work.
        """
        super().__init__(model_factory, reward_fn, system_prompt, *args, **kwargs)
        if not answer_timeout > 0:
            raise ValueError(f"answer_timeout must be above 0 seconds, not {answer_timeout!r}")
        if max_result_chars is not None and (isinstance(max_result_chars, bool) or not max_result_chars >= 1):
            raise ValueError(f"max_result_chars must be at least 1 or None, not {max_result_chars!r}")
        self._clients = clients
        self._answer_timeout = answer_timeout
        self._max_result_chars = max_result_chars
        self._outside_of_steps = _Servers(self)

    async def step(self, action: Action) -> StepResult:
        """Run one episode, with servers of its own; as `Environment.step`."""
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
        """Start the step's servers, and ask all for their tools.

        Raises:
            BackendError: A server does not start, or does not say what tools it has.
        """
        await super().reset()
        given: Any = self._clients
        own = not isinstance(given, MCPClient | Sequence)
        clients = await maybe_await(given() if own else given)
        tools: list[Any] = []
        for client in [clients] if isinstance(clients, MCPClient) else clients:
            if own:
                await self._start(client)
            try:
                tools += await _tools_of(client, self._answer_timeout)
            except Exception as error:
                raise BackendError(f"an MCP server does not list its tools: {error}") from error
        self._servers.tools = tools

    async def _start(self, client: MCPClient) -> None:
        servers = self._servers

        def start() -> None:
            client.start()
            servers.own.append(client)

        try:
            await invoke(start, grace=None)  # it cannot be stopped before it has started
        except Exception as error:  # such a client has stopped itself
            raise BackendError(f"an MCP server did not start: {error}") from error

    def get_tools(self) -> Sequence[Any]:
        """The servers' tools, by their names and with the clients' prefixes."""
        return self._servers.tools

    def get_hooks(self) -> Sequence[HookProvider]:
        """Ends the episode, without a reward, where a server has died; cuts results that are too long."""
        clients = {tool.tool_name: tool.mcp_client for tool in self._servers.tools}
        return [_WatchServers(clients, self._answer_timeout, self._max_result_chars)]

    async def cleanup(self) -> None:
        """Stop the step's own servers; may be called again."""
        servers = self._servers
        clients, servers.own, servers.tools = servers.own, [], []
        await asyncio.gather(*map(_stop, clients))
        await super().cleanup()


class _WatchServers(EndOnBackendErrors):
    """Looks at what servers answer.

    Ends the episode when a tool failed and its server no longer answers: Strands tells that to the model only.
    """

    def __init__(self, clients: Mapping[str, MCPClient], answer_timeout: float, max_chars: int | None) -> None:
        """Take the client of each tool, by the tool's name, and the limits of a server and of a result."""
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
            event.result = _cut(event.result, self._max_chars)


def _cut(result: Any, most: int) -> Any:
    """A tool's result without what is beyond so many characters, and with a note that says so."""
    blocks = [{"text": json.dumps(block["json"])} if "json" in block else block for block in result["content"]]
    total = sum(len(block.get("text", "")) for block in blocks)
    unread = {name: value for name, value in result.items() if name in ("structuredContent", "metadata")}
    if total <= most and len(json.dumps(unread, default=str)) <= most:
        return result
    left, kept = most, []
    for block in blocks:
        if "text" in block:
            block = {**block, "text": block["text"][:left]}
            left -= len(block["text"])
        if block.get("text") != "":
            kept.append(block)
    if total > most:
        kept.append({"text": f"[the result was cut: its first {most} of {total} characters are above]"})
    return {**{name: value for name, value in result.items() if name not in unread}, "content": kept}


async def _stop(client: MCPClient) -> None:
    try:
        await run_in_thread(client.stop, None, None, None)
    except Exception:
        logger.warning("an MCP server could not be stopped", exc_info=True)


async def _tools_of(client: MCPClient, seconds: float) -> list[Any]:
    """The tools of a server.

    Raises:
        TimeoutError: It does not answer in time.
        Exception: It has no answer.
    """
    try:
        return await asyncio.wait_for(run_in_thread(_list_tools, client), seconds)
    except asyncio.TimeoutError:
        raise TimeoutError(f"it was silent for {seconds:g} seconds") from None


def _list_tools(client: MCPClient) -> list[Any]:
    tools: list[Any] = []
    token = None
    while True:
        page = client.list_tools_sync(pagination_token=token)
        tools += page
        token = page.pagination_token
        if token is None:
            return tools
