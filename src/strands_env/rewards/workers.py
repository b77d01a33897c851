"""Worker processes for computations that a hostile text could hang or crash: computer algebra, regular expressions.

A worker forks the process that answers its requests, one at a time, within limits on CPU time per request and on
memory, and forks another when that one dies: a fork takes milliseconds, importing computer algebra a second. Whether a
request exceeds the limits does not depend on the machine's load. Workers start on first use and end with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
QUICK_S = 0.3  # seconds of CPU time after which a request counts as expensive
MAX_REMEMBERED = 1000  # most requests over a limit that are remembered


class WorkerError(RewardError):
    """A request failed without exceeding a limit.

    Attributes:
        is_infrastructure: True if no worker could be started; False if a worker died with the request.
    """


class OverLimitsError(RuntimeError):
    """A request exceeded a limit in a new process.

    Attributes:
        stage: Last stage that the worker reported; None if it reported none.
    """

    def __init__(self, message: str, stage: str | None = None) -> None:
        """Create the error."""
        super().__init__(message)
        self.stage = stage


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of a worker process that parses or matches answers.

    Attributes:
        cpu_s: Seconds of CPU time per request.
        wall_s: Seconds of wall-clock time per request, after which the worker counts as lost.
        memory_bytes: Address space of a worker, in bytes.
        requests: Number of requests after which a process is replaced, because its caches grow.
    """

    cpu_s: float = 3.0
    wall_s: float = 120.0
    memory_bytes: int = 1 << 30
    requests: int = 1000


class WorkerPool:
    """Workers for one kind of job, for use from any thread and event loop.

    A request that is expensive, or whose process dies, is computed again in a queue of its own. Such requests wait for
    each other, and others do not wait for them. Only a new process decides that memory is short: earlier requests may
    have filled it.
    """

    def __init__(self, job: str, limits: WorkerLimits, n_workers: int) -> None:
        """Create a pool; no worker is started yet.

        Args:
            job: Name of a module in `jobs`.
            limits: Limits of a request.
            n_workers: Maximum number of workers at a time. Expensive requests have as many of their own.
        """
        self._quick = _Lane(job, replace(limits, cpu_s=min(QUICK_S, limits.cpu_s)), n_workers)
        self._slow = _Lane(job, limits, n_workers)

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a request in a worker. Waiting for a free worker does not count toward an environment's timeouts.

        Raises:
            OverLimitsError: The request exceeds a limit.
            WorkerError: No worker could be started, or the worker died.
        """
        try:
            return await self._quick.run(request)
        except (OverLimitsError, WorkerError):
            return await self._slow.run(request)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a request as `run` does, in a thread that may have an event loop."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self.run(request)).result()


class _Lane:
    """A queue of requests with its workers. It remembers which requests exceeded its limits."""

    def __init__(self, job: str, limits: WorkerLimits, n_workers: int) -> None:
        self._job = job
        self._limits = limits
        self._threads = ThreadPoolExecutor(n_workers, thread_name_prefix=f"reward-{job}")
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._over: dict[str, dict[str, Any]] = {}
        weakref.finalize(self, _stop_all, self._idle)

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        with queued() as resume:

            def on_start() -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                    loop.call_soon_threadsafe(resume)

            return await loop.run_in_executor(self._threads, self._answer, request, on_start)

    def _answer(self, request: dict[str, Any], on_start: Callable[[], None]) -> dict[str, Any]:
        key = json.dumps(request)
        answer = self._over.get(key) or self._ask(request, on_start)
        if "over" not in answer:
            return answer
        if len(self._over) >= MAX_REMEMBERED:
            self._over.clear()
        self._over[key] = answer
        raise OverLimitsError(answer["over"], answer["stage"])

    def _ask(self, request: dict[str, Any], on_start: Callable[[], None]) -> dict[str, Any]:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker(self._job, self._limits)
        on_start()
        try:
            answer = worker.ask(request)
            if answer.get("retry"):
                answer = worker.ask(request)
        except WorkerError:
            worker.stop()
            raise
        self._idle.put(worker)
        return answer


class _Worker:
    """A process whose children answer requests."""

    def __init__(self, job: str, limits: WorkerLimits) -> None:
        self._wall_s = limits.wall_s
        self._connection, theirs = multiprocessing.Pipe()
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONHASHSEED": "0",  # for reproducible verdicts
        }
        arguments = [_JOBS, job, str(limits.cpu_s), str(limits.memory_bytes), str(limits.requests)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-c", _BOOTSTRAP, *arguments],
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
        stage = None
        with contextlib.suppress(OSError):  # it has died
            send(self._connection, request)
            while self._connection.poll(self._wall_s):
                answer = receive(self._connection)
                if answer is None:
                    raise WorkerError("a worker died")
                if "stage" not in answer:
                    return {"stage": stage, **answer}
                stage = answer["stage"]
        raise WorkerError(f"a worker did not answer within {self._wall_s:g} seconds")

    def stop(self) -> None:
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _stop_all(workers: queue.LifoQueue[_Worker]) -> None:
    while not workers.empty():
        workers.get().stop()


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
