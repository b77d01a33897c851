"""A real SGLang server on this machine's CPU.

`start_server` returns a server that has generated a token, or raises an error with the end of its log. Neither `stop`
nor the end of this process, for whatever reason, leaves a process running.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..client.client import SGLangClient
from ..client.shared import run_apart
from .install import sglang_environment
from .process import GuardedProcess, Heartbeat, LocalServerError, Progress, say, tail

START_DEADLINE = 300.0  # seconds until a server answers; 15 to 35 are usual on two idle cores, up to 110 on busy ones
POLL_INTERVAL = 0.25

PORT_RANGE = range(20_000, 22_000)
"""Ports of servers, below those that kernels choose and those that SGLang chooses for itself (from 22,000)."""

_first = random.SystemRandom().randrange(len(PORT_RANGE))
_PORTS = itertools.cycle([*PORT_RANGE[_first:], *PORT_RANGE[:_first]])


@dataclass(frozen=True)
class ServerSettings:
    """Resources of a local server, and further arguments.

    Attributes:
        threads: Number of threads for matrix products; None for half of the cores, at most 4. On two cores, rollouts of
            SmolLM2-135M take twice the CPU time with a second thread, and are no faster.
        max_total_tokens: Number of tokens in the key-value cache, over all requests and cached prefixes.
        max_running_requests: Maximum number of requests per batch.
        extra_arguments: Further arguments for `sglang.launch_server`.
    """

    threads: int | None = None
    max_total_tokens: int = 16384
    max_running_requests: int = 32
    extra_arguments: tuple[str, ...] = ()

    @property
    def thread_count(self) -> int:
        """Number of threads, with the default resolved."""
        return self.threads or max(1, min(4, len(os.sched_getaffinity(0)) // 2))


class LocalServer(GuardedProcess):
    """A running local server. Use it as a context manager, or call `stop`.

    Attributes:
        base_url: Address of the server, `http://HOST:PORT`.
        model_path: Folder of the served model.
        log_path: File with the server's output.
        start_seconds: Seconds from the start of the process to the first healthy response.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        host: str,
        port: int,
        env: Mapping[str, str],
        model_path: Path,
        log_path: Path | None = None,
    ) -> None:
        """Start the process without waiting for it.

        Args:
            command: Program that serves, and its arguments.
            host: Address to listen on.
            port: Port to listen on.
            env: All environment variables of the process.
            model_path: Folder of the served model.
            log_path: File for its output; None for a new temporary file.
        """
        self._remove_log = log_path is None
        if log_path is None:
            descriptor, name = tempfile.mkstemp(prefix="strands-sglang-server-", suffix=".log")
            os.close(descriptor)
            log_path = Path(name)
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self.model_path = model_path
        self.start_seconds = 0.0
        self._started = time.monotonic()
        super().__init__(command, env=env, log_path=log_path)

    def wait_until_healthy(self, deadline: float = START_DEADLINE, progress: Progress = lambda line: None) -> None:
        """Wait until the server has generated a token; stop it if that fails.

        Args:
            deadline: Seconds from the start of the process.
            progress: Function for lines of output every few seconds; by default there is no output.

        Raises:
            LocalServerError: The process ended, or the deadline passed. The message ends with the end of the log.
        """
        heartbeat = Heartbeat(progress)
        try:
            # `/health` returns 503 until the server can generate.
            while not run_apart(SGLangClient(self.base_url).health()):
                if (code := self.exit_code) is not None:
                    raise LocalServerError(f"the SGLang server ended with exit code {code}{self._log_tail()}")
                if time.monotonic() - self._started > deadline:
                    raise LocalServerError(
                        f"the SGLang server did not become healthy within {deadline:.0f} s{self._log_tail()}"
                    )
                heartbeat.beat()
                time.sleep(POLL_INTERVAL)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - self._started

    def stop(self) -> None:
        """Stop the server and all its processes. Further calls do nothing."""
        # The temporary log of a server that was healthy to the end is of no use.
        remove_log = self._remove_log and self.start_seconds > 0 and self.exit_code is None
        super().stop()
        if remove_log:
            self.log_path.unlink(missing_ok=True)

    def _log_tail(self) -> str:
        return f"; the end of its log {self.log_path}:\n{tail(self.log_path)}"

    def __enter__(self) -> LocalServer:
        """Return the server."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the server."""
        self.stop()


def start_server(
    python: Path,
    model_path: Path,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    settings: ServerSettings | None = None,
    log_path: Path | None = None,
    deadline: float = START_DEADLINE,
    progress: Progress = say,
) -> LocalServer:
    """Start an SGLang server on the CPU and wait until it is healthy.

    Args:
        python: Interpreter of the SGLang environment, from `ensure_sglang`.
        model_path: Hugging Face model folder.
        host: Address to listen on.
        port: Port to listen on; None for a free one.
        settings: Resources and further arguments; None for `ServerSettings()`.
        log_path: File for the server's output; None for a new temporary file.
        deadline: Seconds for the start.
        progress: Function for lines of output.

    Returns:
        The running server, which the caller must stop.

    Raises:
        LocalServerError: The folder has no model, the port is in use, or the server did not become healthy.

    Examples:
        ```python
        python = ensure_sglang()
        with start_server(python, ensure_smollm2(python)) as server:
            print(server.base_url)
        ```
    """
    server = launch_server(python, model_path, host=host, port=port, settings=settings, log_path=log_path)
    progress(f"starting SGLang with {model_path.name} (about half a minute; log: {server.log_path})")
    server.wait_until_healthy(deadline, progress)
    progress(f"SGLang is healthy after {server.start_seconds:.0f} s at {server.base_url}")
    return server


def launch_server(
    python: Path,
    model_path: Path,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    settings: ServerSettings | None = None,
    log_path: Path | None = None,
) -> LocalServer:
    """Start an SGLang server on the CPU without waiting for it.

    Args:
        python: Interpreter of the SGLang environment, from `ensure_sglang`.
        model_path: Hugging Face model folder.
        host: Address to listen on.
        port: Port to listen on; None for a free one.
        settings: Resources and further arguments; None for `ServerSettings()`.
        log_path: File for the server's output; None for a new temporary file.

    Returns:
        The starting server, which the caller must stop; `wait_until_healthy` waits for it.

    Raises:
        LocalServerError: The folder has no model, or the port is in use.
    """
    if not (model_path / "config.json").is_file():
        raise LocalServerError(f"{model_path} is not a model folder: it has no config.json")
    settings = settings or ServerSettings()
    if port is None:
        port = free_port(host)
    elif not port_is_free(host, port):
        raise LocalServerError(f"port {port} of {host} is in use by another process; 0 takes a free one")
    return LocalServer(
        sglang_command(python, model_path, host=host, port=port, settings=settings),
        host=host,
        port=port,
        env=sglang_environment(threads=settings.thread_count),
        model_path=model_path,
        log_path=log_path,
    )


def sglang_command(python: Path, model_path: Path, *, host: str, port: int, settings: ServerSettings) -> list[str]:
    """Return the command line of an SGLang server that needs no accelerator."""
    return [
        *(str(python), "-m", "sglang.launch_server"),
        *("--model-path", str(model_path)),
        *("--host", host, "--port", str(port)),
        # Plain torch throughout; float32, because SGLang would serve float32 checkpoints as float16.
        *("--device", "cpu", "--dtype", "float32"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"),
        # By default the cache takes a share of all memory.
        *("--max-total-tokens", str(settings.max_total_tokens)),
        *("--max-running-requests", str(settings.max_running_requests)),
        # An idle scheduler would keep one core busy. The health check warms the server up.
        *("--sleep-on-idle", "--skip-server-warmup"),
        *settings.extra_arguments,
    ]


def free_port(host: str) -> int:
    """Return a port of an address on which no process listens, another one for each call.

    A server listens only once it has loaded its model. Until then, any connection may get a port of the range that the
    kernel chooses from, so the port is of another range.
    """
    for port in itertools.islice(_PORTS, len(PORT_RANGE)):
        if port_is_free(host, port):
            return port
    raise LocalServerError(f"no port of {host} from {PORT_RANGE.start} to {PORT_RANGE.stop - 1} is free")


def port_is_free(host: str, port: int) -> bool:
    """Return whether a process could listen on a port of an address now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As servers do: a port with closing connections is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
