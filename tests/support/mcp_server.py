"""A small MCP server over stdio that keeps state: `add` and `count`. Run as a script."""

from __future__ import annotations

import os

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # mcp 1.x
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("counter")
calls = 0


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    global calls
    calls += 1
    return str(a + b)


@server.tool()
def count() -> str:
    """How often `add` was called, and the server's process."""
    return f"{calls} {os.getpid()}"


@server.tool()
def fail() -> str:
    """Raises."""
    raise ValueError("it broke")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)


if __name__ == "__main__":
    server.run("stdio")
