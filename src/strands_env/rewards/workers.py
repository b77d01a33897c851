"""Worker processes for computations that a hostile text could hang or crash: computer algebra, regular expressions.

A worker answers one request at a time, within limits on CPU time per request and on memory, and is replaced when it
dies. Whether a request exceeds the limits does not depend on the machine's load. Workers start on first use and end
with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.supervision import queued
from ..core.types import RewardError
from .jobs.worker import receive, send

_JOBS = str(Path(__file__).parent / "jobs")
_BOOTSTRAP = (
    "import sys, types; package = types.ModuleType('jobs'); package.__path__ = [sys.argv.pop(1)]; "
    "sys.modules['jobs'] = package; from jobs.worker import main; main()"
)
START_S = 120.0  # seconds that a worker may take to start
# Signals that a request causes in its worker; others come from outside.
FAULTS_OF_REQUESTS = frozenset(
    {signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
)


class WorkerError(RewardError):
    """A request failed without exceeding a limit.

    Attributes:
        is_infrastructure: True if no worker could be started; False if a worker died with the request.
    """


class OverLimitsError(RuntimeError):
    """A request exceeded a limit. Exceeding the memory limit and crashing count only in a new worker.

    Attributes:
        stage: Last stage that the worker reported; None if it reported none.
        is_time: Whether the limit is the CPU time.
    """

    def __init__(self, message: str, stage: str | None = None, is_time: bool = False) -> None:
        """Create the error."""
        super().__init__(message)
        self.stage = stage
        self.is_time = is_time


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of a worker process that parses or matches answers.

    Attributes:
        cpu_s: Seconds of CPU time per request.
        wall_s: Seconds of wall-clock time per request, after which the worker counts as lost.
        memory_bytes: Address space of a worker, in bytes.
        requests: Number of requests after which a worker is replaced, because its caches grow.
    """

    cpu_s: float = 3.0
    wall_s: float = 120.0
    memory_bytes: int = 1 << 30
    requests: int = 1000


class WorkerPool:
    """Workers for one kind of job, for use from any thread and event loop."""

    def __init__(self, job: str, limits: WorkerLimits, n_workers: int) -> None:
        """Create a pool; no worker is started yet.

        Args:
            job: Name of a module in `jobs`.
            limits: Limits of a request.
            n_workers: Maximum number of workers at a time.
        """
        self.job = job
        self.limits = limits
        self._threads = ThreadPoolExecutor(n_workers, thread_name_prefix=f"reward-{job}")
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _stop_all, self._idle)

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a request in a worker. Waiting for a free worker does not count toward an environment's timeouts.

        Raises:
            OverLimitsError: The request exceeds a limit.
            WorkerError: No worker could be started, or the worker died.
        """
        loop = asyncio.get_running_loop()
        with queued() as resume:

            def on_start() -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                    loop.call_soon_threadsafe(resume)

            return await loop.run_in_executor(self._threads, self.ask, request, on_start)

    def ask(self, request: dict[str, Any], on_start: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Run a request as `run` does, without an event loop.

        Args:
            request: Request for the job's `handle`.
            on_start: Called when a worker starts on the request.
        """
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        # Earlier requests may have used up the first worker's memory; the second worker is new.
        for is_last in (False, True):
            worker = worker or _Worker(self.job, self.limits)
            on_start()
            try:
                answer = worker.ask(request)
            except (OverLimitsError, WorkerError) as error:
                worker.stop()
                if is_last or (isinstance(error, OverLimitsError) and (worker.requests == 1 or error.is_time)):
                    raise
                worker = None
            else:
                if worker.requests < self.limits.requests:
                    with self._lock:
                        self._idle.append(worker)
                else:
                    worker.stop()
                return answer
        raise AssertionError("unreachable")


class _Worker:
    """One worker process."""

    def __init__(self, job: str, limits: WorkerLimits) -> None:
        self.requests = 0
        self._limits = limits
        self._connection, theirs = multiprocessing.Pipe()
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONHASHSEED": "0",  # for reproducible verdicts
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-c", _BOOTSTRAP, *(_JOBS, job, str(limits.cpu_s), str(limits.memory_bytes))],
                env=environment,
                cwd="/",
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C goes to this process only
            )
        except OSError as error:
            self._connection.close()
            raise WorkerError(f"a worker for {job} could not be started: {error}", is_infrastructure=True) from error
        finally:
            theirs.close()
        if not self._connection.poll(START_S) or receive(self._connection) is None:
            self.stop()
            raise WorkerError(
                f"a worker for {job} did not start: it ended with exit code {self._process.returncode}",
                is_infrastructure=True,
            )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests += 1
        stage = None
        with contextlib.suppress(OSError):  # it has died; the exit code says how
            send(self._connection, request)
            while self._connection.poll(self._limits.wall_s):
                answer = receive(self._connection)
                if answer is None:
                    break
                if "over" in answer:
                    raise OverLimitsError(answer["over"], stage)
                if "stage" not in answer:
                    return answer
                stage = answer["stage"]
            else:
                raise WorkerError(f"a worker did not answer within {self._limits.wall_s:g} seconds")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        code = self._process.returncode
        if code is not None and -code in FAULTS_OF_REQUESTS:
            is_time = -code == signal.SIGPROF
            limit = f"{self._limits.cpu_s:g} s of CPU time" if is_time else signal.Signals(-code).name
            raise OverLimitsError(limit, stage, is_time)
        raise WorkerError(f"a worker died with exit code {code}")

    def stop(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


def _stop_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().stop()


def shared_pool(job: str, limits: WorkerLimits, n_workers: int | None = None) -> WorkerPool:
    """Return this process's pool for a job and its limits.

    Args:
        job: Name of a module in `jobs`.
        limits: Limits of a request.
        n_workers: Maximum number of workers; None for one per CPU available to this process, at most 8.
    """
    return _pool(job, limits, n_workers or min(8, len(os.sched_getaffinity(0))), os.getpid())


@functools.lru_cache(maxsize=64)
def _pool(job: str, limits: WorkerLimits, n_workers: int, process: int) -> WorkerPool:
    # By process: threads do not survive a fork.
    return WorkerPool(job, limits, n_workers)
