"""The loop of a worker process: its children answer requests one by one, within limits that the kernel enforces.

Messages are JSON, which a compromised process cannot turn into code, over a socket that is the process's standard
input. `stage` reports progress before the answer, so that the parent knows how far a request got if the process dies.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_RENEW = 3  # exit code of a process that is to be replaced


def main() -> None:
    """Fork one process after another that answers requests, until the parent closes the socket."""
    name, cpu_s, memory_bytes, requests = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    connection = Connection(0)
    handle = importlib.import_module(f"jobs.{name}").handle
    for what, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    send(connection, {"ready": True})
    code = _RENEW
    while code == _RENEW or (code < 0 and code != -signal.SIGKILL):  # the kernel kills if memory is short
        child = os.fork()
        if not child:
            os._exit(_serve(connection, handle, cpu_s, requests))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            is_time = code == -signal.SIGPROF
            over = f"{cpu_s:g} s of CPU time" if is_time else signal.Signals(-code).name
            send(connection, {"over": over, "retry": not is_time})


def _serve(connection: Connection, handle: Callable[..., dict[str, Any]], cpu_s: float, requests: int) -> int:
    for _ in range(requests):
        request = receive(connection)
        if request is None:
            return 0
        # CPU time, not wall-clock time: the result must not depend on the machine's load. The signal ends this process
        # even inside C code.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            answer = handle(request, lambda stage: send(connection, {"stage": stage}))
        except (MemoryError, RecursionError) as error:
            answer = {"over": type(error).__name__, "retry": True}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, answer)
        if "over" in answer:
            break
    return _RENEW


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
