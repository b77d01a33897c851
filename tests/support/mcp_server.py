"""A small MCP server over stdio that keeps state: `add` and `count`. Run as a script; with `silent`, it has no list."""

import os
import signal
import sys
import threading

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # mcp 1.x
    from mcp.server.fastmcp import FastMCP as MCPServer


class Server(MCPServer):
    """Lists its tools, or not."""

    async def list_tools(self, *args, **kwargs):
        """The tools."""
        if "silent" in sys.argv:
            threading.Event().wait()
        return await super().list_tools(*args, **kwargs)


server = Server("counter")
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


@server.tool()
def freeze() -> str:
    """Stops the server as it is."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return "never"


@server.tool()
def write(length: int) -> str:
    """A long text."""
    return "x" * length


if __name__ == "__main__":
    server.run("stdio")
