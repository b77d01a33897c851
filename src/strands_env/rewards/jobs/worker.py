"""The loop of a worker process: it answers requests one by one, within limits that the kernel enforces.

Messages are JSON, which a compromised process cannot turn into code, over a socket that is the process's standard
input. `stage` reports progress before the answer, so that the parent knows how far a request got if the process dies.
"""

from __future__ import annotations

import importlib
import json
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    """Answer requests until the parent closes the socket."""
    name, cpu_s, memory_bytes = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    connection = Connection(0)
    handle = importlib.import_module(f"jobs.{name}").handle
    for what, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    send(connection, {"ready": True})
    while (request := receive(connection)) is not None:
        # CPU time, not wall-clock time: the result must not depend on the machine's load. The signal ends this process
        # even inside C code.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            answer = handle(request, lambda stage: send(connection, {"stage": stage}))
        except (MemoryError, RecursionError) as error:
            answer = {"over": type(error).__name__}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, answer)


def send(connection: Connection, message: dict[str, Any]) -> None:
    """Send a message, which the peer's `receive` returns."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any] | None:
    """Return the next message, or None if the peer has closed the connection."""
    try:
        message: dict[str, Any] = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return None
    return message
