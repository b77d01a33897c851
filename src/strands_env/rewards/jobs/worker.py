"""The loop of a worker process: a request, its answer, the next; within limits that the kernel keeps.

Messages are JSON with their length in four bytes before them, over the socket that is the process's standard input.
`stage` sends a note ahead of the answer, so that whoever waits knows how far a request came that this process does not
survive.
"""

from __future__ import annotations

import importlib
import json
import resource
import signal
import socket
import struct
import sys
from typing import Any


def main() -> None:
    """Answer requests until the other side closes the socket."""
    name, cpu_s, memory_bytes = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    connection = socket.socket(fileno=0)
    handle = importlib.import_module(f"jobs.{name}").handle
    for what, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    send(connection, {"ready": True})
    while (request := receive(connection)) is not None:
        # CPU time, not the clock: an answer's fate must not depend on what else the machine does. The signal ends this
        # process even inside of C code.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            answer = handle(request, lambda stage: send(connection, {"stage": stage}))
        except (MemoryError, RecursionError) as error:
            answer = {"over": type(error).__name__}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, answer)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message; `receive` of the other side returns it."""
    body = json.dumps(message).encode()
    connection.sendall(struct.pack("!I", len(body)) + body)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message; None if the other side is gone."""
    head = _exactly(connection, 4)
    body = _exactly(connection, struct.unpack("!I", head)[0]) if head is not None else None
    return json.loads(body) if body is not None else None


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(1 << 20, count - len(parts)))
        if not part:
            return None
        parts += part
    return bytes(parts)
