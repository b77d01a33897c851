"""An environment with MCP servers that are given as plain data, such as options of a command line."""

from __future__ import annotations

import shlex
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
    """An `MCPEnvironment` with servers given as plain data. Each step starts them or connects to them.

    Examples:
        >>> MCPServersEnvironment(model_factory, servers=["python server.py", "http://localhost:8000/mcp"])
        >>> MCPServersEnvironment(model_factory, servers=[{"command": "python", "args": ["server.py"]}])
        >>> MCPServersEnvironment(model_factory, servers=[{"url": "http://localhost:8000/mcp", "prefix": "shop"}])
    """

    def __init__(
        self,
        model_factory: ModelFactory,
        reward_fn: RewardFunction | None = None,
        system_prompt: str | None = None,
        *args: Any,
        servers: Sequence[str | Mapping[str, Any]],
        **kwargs: Any,
    ) -> None:
        """Create the environment. No server is started before the first step.

        Args:
            model_factory: Function that returns the model of a step, as for `Environment`.
            reward_fn: Reward function, as for `Environment`.
            system_prompt: System prompt, as for `Environment`.
            *args: Other positional arguments of `Environment`.
            servers: One per server, either a command line (stdio) or a URL (streamable HTTP), or a mapping: `command`
                with optional `args`, `env` and `cwd`, or `url`. An optional `prefix` is added to the names of its
                tools.
            **kwargs: Other keyword arguments of `MCPEnvironment`, except `clients`.

        Raises:
            ValueError: `servers` is empty, or a server has unknown keys, or neither `command` nor `url`.
        """
        if isinstance(servers, Mapping | str) or not servers:
            raise ValueError('servers must be a list such as ["python server.py"]')
        described = [_described(server) for server in servers]
        super().__init__(
            model_factory,
            reward_fn,
            system_prompt,
            *args,
            clients=lambda: [_client(server) for server in described],
            **kwargs,
        )

    @override
    def identity(self) -> dict[str, Any]:
        """Describe the environment, with the servers but without their `env`, which may contain secrets."""
        identity = super().identity()
        arguments = {name: value for name, value in identity["arguments"].items() if name != "clients"}
        described = [_described(server) for server in arguments["servers"]]
        return {**identity, "arguments": {**arguments, "servers": described}}


def _described(server: Any) -> Mapping[str, Any]:
    """A server as a mapping.

    Raises:
        ValueError: It is not a valid server.
    """
    if isinstance(server, str):
        if server.startswith(("http://", "https://")):
            return {"url": server}
        try:
            command, *args = shlex.split(server)
        except ValueError as error:
            raise ValueError(f"an MCP server needs a command line or a URL, not {server!r:.200}: {error}") from error
        return {"command": command, "args": args}
    known = _STDIO if isinstance(server, Mapping) and "command" in server else _HTTP
    if not isinstance(server, Mapping) or not known >= set(server) or not {"command", "url"} & set(server):
        raise ValueError(
            f"an MCP server needs a command ({', '.join(sorted(_STDIO))}) or a url ({', '.join(sorted(_HTTP))}), not"
            f" {server!r:.200}"
        )
    if "command" in server:
        StdioServerParameters.model_validate({name: value for name, value in server.items() if name != "prefix"})
    elif not str(server["url"]).startswith(("http://", "https://")):
        raise ValueError(f"the url of an MCP server must begin with http:// or https://, not {server['url']!r}")
    described: Mapping[str, Any] = server
    return described


def _client(server: Mapping[str, Any]) -> MCPClient:
    if "url" in server:
        return MCPClient(lambda: _http(server["url"]), prefix=server.get("prefix"))
    parameters = StdioServerParameters(**{name: value for name, value in server.items() if name != "prefix"})
    connect: Any = stdio_client
    # Not the `sys.stderr` at the time when mcp was imported: a notebook's is not a file.
    return MCPClient(lambda: connect(parameters, errlog=sys.__stderr__), prefix=server.get("prefix"))


def _http(url: str) -> Any:
    from mcp.client import streamable_http as transport

    # The function's name in mcp 2, and in mcp 1.
    connect: Any = getattr(transport, "streamable_http_client", None) or getattr(transport, "streamablehttp_client")  # noqa: B009
    return connect(url)
