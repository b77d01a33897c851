"""Worker processes for what a hostile text could hang or crash: computer algebra, patterns.

A worker has limits on CPU time per request and on memory, is replaced when it dies, and answers one request at a time.
Whether a request is over the limits does not depend on how busy the machine is. Workers start when they are first
needed and go with this process.
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
START_S = 120.0  # how long a worker may take to start
# Signals that a request brings upon its worker; others come from elsewhere.
FAULTS_OF_REQUESTS = frozenset(
    {signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
)


class WorkerError(RewardError):
    """A request has no answer, through no limit that it went over.

    Attributes:
        is_infrastructure: Whether no worker could be started; else one took the request and was lost.
    """


class OverLimitsError(RuntimeError):
    """A request took more than it may have. Too much memory or a crash counts only in a new worker.

    Attributes:
        stage: The last note that the worker gave; None if it gave none.
        is_time: Whether it was CPU time.
    """

    def __init__(self, message: str, stage: str | None = None, is_time: bool = False) -> None:
        """Set the message and what is known."""
        super().__init__(message)
        self.stage = stage
        self.is_time = is_time


@dataclass(frozen=True)
class WorkerLimits:
    """What a request may use.

    Attributes:
        cpu_s: Seconds of CPU time.
        wall_s: Seconds after which something is wrong with the machine.
        memory_bytes: Address space of a worker.
        requests: After so many a worker is replaced, since what it caches grows.
    """

    cpu_s: float = 3.0
    wall_s: float = 120.0
    memory_bytes: int = 1 << 30
    requests: int = 1000


class WorkerPool:
    """Workers for one kind of job. May be used from any thread and event loop."""

    def __init__(self, job: str, limits: WorkerLimits, n_workers: int) -> None:
        """Set up a pool; nothing is started yet.

        Args:
            job: Module in `jobs`.
            limits: What a request may use.
            n_workers: Most workers at a time.
        """
        self.job = job
        self.limits = limits
        self._threads = ThreadPoolExecutor(n_workers, thread_name_prefix=f"reward-{job}")
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _stop_all, self._idle)

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have a worker answer a request. The time until one starts on it counts for no timeout of an environment's.

        Raises:
            OverLimitsError: The request takes more than it may.
            WorkerError: There is no worker.
        """
        loop = asyncio.get_running_loop()
        with queued() as begin:

            def begun() -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(begin)

            return await loop.run_in_executor(self._threads, self.ask, request, begun)

    def ask(self, request: dict[str, Any], begun: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """As `run`, for callers without an event loop.

        Args:
            request: What to answer.
            begun: Called when a worker starts on it.
        """
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        # The first worker may be worn out by earlier requests; the second one is new.
        for is_last in (False, True):
            worker = worker or _Worker(self.job, self.limits)
            begun()
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
    """One process."""

    def __init__(self, job: str, limits: WorkerLimits) -> None:
        self.requests = 0
        self._limits = limits
        self._connection, theirs = multiprocessing.Pipe()
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONHASHSEED": "0",  # the same verdict every time
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-c", _BOOTSTRAP, *(_JOBS, job, str(limits.cpu_s), str(limits.memory_bytes))],
                env=environment,
                cwd="/",
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the keyboard is this process's matter
            )
        except OSError as error:
            self._connection.close()
            raise WorkerError(f"no worker for {job} could be started: {error}", is_infrastructure=True) from error
        finally:
            theirs.close()
        if not self._connection.poll(START_S) or receive(self._connection) is None:
            self.stop()
            raise WorkerError(
                f"a worker for {job} did not start: it ended, exit code {self._process.returncode}",
                is_infrastructure=True,
            )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests += 1
        stage = None
        with contextlib.suppress(OSError):  # it has died; the exit code tells how
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
            what = f"{self._limits.cpu_s:g} s of CPU time" if is_time else signal.Signals(-code).name
            raise OverLimitsError(what, stage, is_time)
        raise WorkerError(f"a worker died with exit code {code}")

    def stop(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


def _stop_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().stop()


def shared_pool(job: str, limits: WorkerLimits, n_workers: int | None = None) -> WorkerPool:
    """The pool of this process for a job and limits.

    Args:
        job: Module in `jobs`.
        limits: What a request may use.
        n_workers: Most workers; None for one per CPU that this process may use, at most 8.
    """
    return _pool(job, limits, n_workers or min(8, len(os.sched_getaffinity(0))), os.getpid())


@functools.lru_cache(maxsize=64)
def _pool(job: str, limits: WorkerLimits, n_workers: int, process: int) -> WorkerPool:
    # By process: threads do not come along into a fork.
    return WorkerPool(job, limits, n_workers)
