"""A real SGLang server on this machine's CPU: started, watched and stopped as one thing.

Promises: `start_server` returns a server that has generated a token, or raises with the end of its
log; `stop`, and the end of this process by whatever cause, leave no process behind.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from .install import sglang_environment
from .process import GuardedProcess, Heartbeat, LocalServerError, Progress, say, tail

START_DEADLINE = 300.0  # seconds until a server answers; it takes 15 to 35 on two idle cores, up to 110 on busy ones
POLL_INTERVAL = 0.25


@dataclass(frozen=True)
class ServerSettings:
    """How much a server may take.

    Attributes:
        threads: Threads for matrix products; None for as many as cores, but at most 4. Where other programs
            work on the same cores, fewer are faster.
        max_total_tokens: Tokens in the key-value cache, over all requests and the kept prefixes.
        max_running_requests: Requests decoded in one batch.
        extra_arguments: Further arguments for `sglang.launch_server`.
    """

    threads: int | None = None
    max_total_tokens: int = 16384
    max_running_requests: int = 32
    extra_arguments: tuple[str, ...] = ()

    @property
    def thread_count(self) -> int:
        """The number of threads that is meant."""
        return self.threads or min(4, len(os.sched_getaffinity(0)))


class LocalServer(GuardedProcess):
    """A running server process and its address. Use it as a context manager, or call `stop`.

    Attributes:
        base_url: Where it answers, `http://HOST:PORT`.
        model_path: As given.
        log_path: The file with its output.
        start_seconds: Seconds from the start of the process to the first healthy answer.
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
            command: The program that serves, and its arguments.
            host: Address that it listens on.
            port: Port that it listens on.
            env: Its whole environment.
            model_path: The folder of the model that it serves.
            log_path: File for its output; a new temporary file if None.
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
        """Return once the server has generated a token; stop it if it does not.

        Args:
            deadline: Seconds from the start of the process.
            progress: Receives a line every few seconds; by default nothing is reported.

        Raises:
            LocalServerError: The process ended or the deadline passed; the message ends with the last lines of the log.
        """
        heartbeat = Heartbeat(progress)
        try:
            # No proxy settings: the way to one's own machine is direct. `/health` answers 503 until it can generate.
            with httpx.Client(base_url=self.base_url, timeout=30.0, trust_env=False) as http:
                while not answers_health(http):
                    if (code := self.exit_code) is not None:
                        raise LocalServerError(f"the SGLang server ended with exit code {code}{self._last_words()}")
                    if time.monotonic() - self._started > deadline:
                        raise LocalServerError(
                            f"the SGLang server did not get healthy within {deadline:.0f} s{self._last_words()}"
                        )
                    heartbeat.beat()
                    time.sleep(POLL_INTERVAL)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - self._started

    def stop(self) -> None:
        """Stop the server with all its processes. Safe to call more than once."""
        # A log that nobody named and that ends with a healthy server has nothing to tell.
        remove_log = self._remove_log and self.start_seconds > 0 and self.exit_code is None
        super().stop()
        if remove_log:
            self.log_path.unlink(missing_ok=True)

    def _last_words(self) -> str:
        return f"; the end of its log {self.log_path}:\n{tail(self.log_path)}"

    def __enter__(self) -> LocalServer:
        """Return the server itself."""
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
        python: The interpreter of the SGLang environment, from `ensure_sglang`.
        model_path: A Hugging Face model folder.
        host: Address to listen on.
        port: Port to listen on; a free one if None.
        settings: Sizes; `ServerSettings()` if None.
        log_path: File for the server's output; a new temporary file if None.
        deadline: Seconds that the start may take.
        progress: Takes the lines that tell how it goes on.

    Returns:
        The running server, which the caller has to stop.

    Raises:
        LocalServerError: The folder holds no model, the port is taken, or the server did not get healthy.
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
    """Start an SGLang server on the CPU without waiting for it; arguments and errors as for `start_server`."""
    if not (model_path / "config.json").is_file():
        raise LocalServerError(f"{model_path} is no model folder: it has no config.json")
    settings = settings or ServerSettings()
    if port is None:
        port = free_port(host)
    elif not port_is_free(host, port):
        raise LocalServerError(f"port {port} of {host} is in use by another process")
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
        # Plain torch throughout; float32, because otherwise float32 checkpoints are served as float16.
        *("--device", "cpu", "--dtype", "float32"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"),
        # The default for the cache is a share of all memory.
        *("--max-total-tokens", str(settings.max_total_tokens)),
        *("--max-running-requests", str(settings.max_running_requests)),
        # An idle scheduler would keep one core busy; the health check is the warm-up.
        *("--sleep-on-idle", "--skip-server-warmup"),
        *settings.extra_arguments,
    ]


def answers_health(http: httpx.Client) -> bool:
    """Tell whether the server behind an HTTP client says that it can generate."""
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def free_port(host: str) -> int:
    """Return a port of an address that nobody listens on at the moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(host: str, port: int) -> bool:
    """Tell whether one could listen on a port of an address now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As servers do: a port whose last connections are still winding down is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
