"""Any MCP server as an environment: its tools are the agent's."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from strands.tools.mcp import MCPClient

from ..core import Environment, ModelFactory, RewardFunction
from .backends import BackendError

logger = logging.getLogger(__name__)

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


def _tools_of(client: MCPClient) -> list[Any]:
    tools: list[Any] = []
    token = None
    while True:
        page = client.list_tools_sync(pagination_token=token)
        tools += page
        token = page.pagination_token
        if token is None:
            return tools
