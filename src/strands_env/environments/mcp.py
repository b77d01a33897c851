"""Any MCP server as an environment: its tools are the agent's."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from strands.hooks import HookProvider, HookRegistry
from strands.hooks.events import AfterToolCallEvent
from strands.tools.mcp import MCPClient

from ..core import Environment, ModelFactory, RewardFunction
from .backends import BackendError

logger = logging.getLogger(__name__)

ANSWERS_WITHIN_S = 10.0
"""How long a server whose tool failed is asked whether it is still there; one that is silent is busy."""
_FAILED = "Tool execution failed"
"""How Strands begins the result of a call that no server answered, and of one that a server found no call at all."""

ClientFactory = Callable[[], "MCPClient | Sequence[MCPClient] | Awaitable[MCPClient | Sequence[MCPClient]]"]


class MCPEnvironment(Environment):
    """Tasks for an agent with the tools of one or several MCP servers.

    With a factory each step has servers of its own, started by `reset` and stopped by `cleanup`: state that a server
    keeps is not seen by other episodes. With running clients all steps share them, and who started them stops them.
    """

    def __init__(
        self,
        model_factory: ModelFactory,
        reward_fn: RewardFunction | None = None,
        system_prompt: str | None = None,
        *args: Any,
        clients: ClientFactory | MCPClient | Sequence[MCPClient],
        **kwargs: Any,
    ) -> None:
        """Set up the environment; nothing is started yet.

        Args:
            model_factory: As for `Environment`.
            reward_fn: As for `Environment`.
            system_prompt: As for `Environment`.
            *args: As for `Environment`.
            clients: Makes the clients of a step, one or several; or clients that run already, for all steps.
            **kwargs: As for `Environment`.
        """
        super().__init__(model_factory, reward_fn, system_prompt, *args, **kwargs)
        self._clients = clients
        self._own: list[MCPClient] = []
        self._tools: list[Any] = []

    async def reset(self) -> None:
        """Start the step's servers, and ask all for their tools.

        Raises:
            BackendError: A server does not start.
        """
        await super().reset()
        given = self._clients
        own = not isinstance(given, MCPClient | Sequence)
        made = given if isinstance(given, MCPClient | Sequence) else given()
        clients = await made if inspect.isawaitable(made) else made
        tools: list[Any] = []
        for client in [clients] if isinstance(clients, MCPClient) else clients:
            if own:
                await self._start(client)
            tools += await asyncio.to_thread(_tools_of, client)
        self._tools = tools

    async def _start(self, client: MCPClient) -> None:
        starting = asyncio.ensure_future(asyncio.to_thread(client.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait({starting})  # it cannot be stopped before it has started
            if starting.exception() is None:
                self._own.append(client)
            raise
        except Exception as error:  # such a client has stopped itself
            raise BackendError(f"an MCP server did not start: {error}") from error
        self._own.append(client)

    def get_tools(self) -> Sequence[Any]:
        """The servers' tools, by their names and with the clients' prefixes."""
        return self._tools

    def get_hooks(self) -> Sequence[HookProvider]:
        """Ends the episode, without a reward, where a server has died."""
        return [_EndWithServers({tool.tool_name: tool.mcp_client for tool in self._tools})]

    async def cleanup(self) -> None:
        """Stop the step's own servers; may be called again."""
        self._tools = []
        while self._own:
            client = self._own.pop()
            try:
                await asyncio.to_thread(client.stop, None, None, None)
            except Exception:
                logger.warning("an MCP server could not be stopped", exc_info=True)
        await super().cleanup()


class _EndWithServers(HookProvider):
    """Ends the episode when a tool failed and its server no longer answers: Strands tells that to the model only."""

    def __init__(self, clients: Mapping[str, MCPClient]) -> None:
        """Take the client of each tool, by the tool's name."""
        self._clients = clients

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register with the episode's agent."""
        registry.add_callback(AfterToolCallEvent, self._check)

    async def _check(self, event: AfterToolCallEvent) -> None:
        if isinstance(event.exception, BackendError):  # raised here before: Strands asks again for what a hook raises
            raise event.exception
        name = event.tool_use["name"]
        texts = [block.get("text", "") for block in event.result["content"]]
        failed = event.exception is not None or any(text.startswith(_FAILED) for text in texts)
        if name not in self._clients or not failed:
            return
        try:
            await asyncio.wait_for(asyncio.to_thread(_tools_of, self._clients[name]), ANSWERS_WITHIN_S)
        except asyncio.TimeoutError:
            return
        except Exception as error:
            raise BackendError(f"{name}: an MCP server no longer answers: {error}") from error


def _tools_of(client: MCPClient) -> list[Any]:
    tools: list[Any] = []
    token = None
    while True:
        page = client.list_tools_sync(pagination_token=token)
        tools += page
        token = page.pagination_token
        if token is None:
            return tools
