"""A small MCP server over stdio that keeps state. Run it as a script; with `silent`, it never lists its tools."""

import os
import signal
import sys
import threading

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # mcp 1.x
    from mcp.server.fastmcp import FastMCP as MCPServer


class Server(MCPServer):
    """A server that never lists its tools if the arguments contain `silent`."""

    async def list_tools(self, *args, **kwargs):
        """List the tools."""
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
    """Return the number of calls of `add`, and the server's process id."""
    return f"{calls} {os.getpid()}"


@server.tool()
def fail() -> str:
    """Raise an error."""
    raise ValueError("it broke")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def freeze() -> str:
    """Stop the server with SIGSTOP."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return "never"


@server.tool()
def write(length: int) -> str:
    """Return a long text."""
    return "x" * length


if __name__ == "__main__":
    server.run("stdio")
