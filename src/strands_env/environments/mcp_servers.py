"""MCP servers named by plain data, as a command line gives them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mcp import StdioServerParameters, stdio_client
from strands.tools.mcp import MCPClient
from typing_extensions import override

from ..core import ModelFactory, RewardFunction
from .mcp import MCPEnvironment

_STDIO = {"command", "args", "env", "cwd", "prefix"}
_HTTP = {"url", "prefix"}


class MCPServersEnvironment(MCPEnvironment):
    """Tasks for an agent with the tools of MCP servers that are started, or connected to, for each step."""

    def __init__(
        self,
        model_factory: ModelFactory,
        reward_fn: RewardFunction | None = None,
        system_prompt: str | None = None,
        *args: Any,
        servers: Sequence[Mapping[str, Any]],
        **kwargs: Any,
    ) -> None:
        """Set up the environment; nothing is started yet.

        Args:
            model_factory: As for `Environment`.
            reward_fn: As for `Environment`.
            system_prompt: As for `Environment`.
            *args: As for `Environment`.
            servers: For each `command` with `args`, `env` and `cwd` (stdio), or `url` (streamable HTTP); and a `prefix`
                of its tools' names, if they are to have one.
            **kwargs: As for `Environment`.

        Raises:
            ValueError: There is none, or one is neither.
        """
        if isinstance(servers, Mapping | str) or not servers:
            raise ValueError('servers is a list such as [{"command": "python", "args": ["server.py"]}]')
        for server in servers:
            _check(server)
        super().__init__(
            model_factory,
            reward_fn,
            system_prompt,
            *args,
            clients=lambda: [_client(server) for server in servers],
            **kwargs,
        )

    @override
    def identity(self) -> dict[str, Any]:
        """What makes the environment: the servers without what may be secret."""
        told = super().identity()
        arguments = {name: value for name, value in told["arguments"].items() if name != "clients"}
        shown = [{key: value for key, value in one.items() if key != "env"} for one in arguments["servers"]]
        return {**told, "arguments": {**arguments, "servers": shown}}


def _check(server: Any) -> None:
    known = _STDIO if isinstance(server, Mapping) and "command" in server else _HTTP
    if not isinstance(server, Mapping) or not known >= set(server) or not {"command", "url"} & set(server):
        raise ValueError(
            f"an MCP server has a command ({', '.join(sorted(_STDIO))}) or a url ({', '.join(sorted(_HTTP))}), not"
            f" {server!r:.200}"
        )
    if "command" in server:
        StdioServerParameters.model_validate({name: value for name, value in server.items() if name != "prefix"})
    elif not str(server["url"]).startswith(("http://", "https://")):
        raise ValueError(f"the url of an MCP server begins with http:// or https://, not as {server['url']!r}")


def _client(server: Mapping[str, Any]) -> MCPClient:
    if "url" in server:
        return MCPClient(lambda: _http(server["url"]), prefix=server.get("prefix"))
    parameters = StdioServerParameters(**{name: value for name, value in server.items() if name != "prefix"})
    connect: Any = stdio_client
    # Not whatever stood in `sys.stderr` when mcp was imported, such as a notebook's, which is no file.
    return MCPClient(lambda: connect(parameters, errlog=sys.__stderr__), prefix=server.get("prefix"))


def _http(url: str) -> Any:
    from mcp.client import streamable_http as transport

    # Its name in mcp 2, and in mcp 1.
    connect: Any = getattr(transport, "streamable_http_client", None) or getattr(transport, "streamablehttp_client")  # noqa: B009
    return connect(url)
