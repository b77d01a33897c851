"""Many machines: the episodes of an evaluation run in actors of a Ray cluster.

Ray starts the actors, spreads them over the nodes, restarts those that die, asks its autoscaler for nodes, carries the
results, and ends the actors with the driver. What is left to do here:

- **Placement.** A sample goes to the actor with the fewest episodes; the samples of a prompt stay together if there is
  room, because they share a prefix. An actor has many episodes at a time, in one event loop, and the others wait here.
- **Exactly once.** A sample whose actor is lost runs again, and only the result that arrives counts. The last try has
  an actor to itself, so that no sample fails for what its neighbor does.
- **Early errors.** An actor takes samples once it has the same versions as the driver and can create an environment.

The environments' factory is pickled once per evaluation. The environments, clients and tokenizers are made in the
actors. The cluster is never stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.metadata
import io
import itertools
import logging
import math
import os
import platform
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

try:
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayError, RayTaskError
except ImportError as error:
    raise ImportError("the ray package is not installed: pip install -e '.[ray]'") from error

from strands_sglang import TerminationReason
from strands_sglang.shown import one_line

from .core import Observation, StepResult
from .eval.checkpoint import Prompt, decode, encode
from .eval.episodes import ExecutorError, LocalRunner, Runner, SampleRun, until_done
from .eval.placement import Placement

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 5.0
"""Seconds until an address counts as unreachable."""

LATE = 30.0
"""Seconds that the first episode waits for the other actors once one is ready. An actor that has no place in the
cluster yet, or whose node is only being started, joins later."""

PROBES = 3
"""Number of prompts for which an actor tries to create an environment; it is refused if it can create none."""

_OURS = frozenset({"lifetime", "max_concurrency", "max_restarts", "max_task_retries", "name", "namespace"})


class RayExecutor:
    """Runs the episodes of an evaluation in actors of a Ray cluster.

    The number of actors is `max_concurrency` of the evaluator divided by `episodes_per_actor`. Actors for which the
    cluster has no room wait in Ray's queue, from which an autoscaler adds nodes; the others run meanwhile.

    A sample whose actor or node is lost runs again. After `tries` such losses, the last one while the actor ran nothing
    else, it is dropped as a failure of the infrastructure.

    Examples:
        ```python
        executor = RayExecutor(episodes_per_actor=32, actor_options={"memory": 4 * 2**30})
        evaluator = Evaluator(env_factory, max_concurrency=256, output_path="results/first", executor=executor)
        results = await evaluator.run(tasks)
        ```
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        episodes_per_actor: int = 64,
        tries: int = 3,
        actor_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Connect to the cluster, unless this process is connected, as in a Ray job.

        Args:
            address: `host:port` of the cluster; None for the one that this process is connected to, that
                `RAY_ADDRESS` names, or that runs on this machine.
            episodes_per_actor: Maximum number of episodes of an actor at a time. They share one event loop, so one
                core.
            tries: Maximum number of runs of a sample whose actor is lost each time.
            actor_options: Ray's options for the actors, such as `num_cpus` (1 by default), `memory`, `resources`,
                `runtime_env` and `scheduling_strategy` (`"SPREAD"` by default).

        Raises:
            ImportError: Ray is not installed.
            ConnectionError: There is no cluster at the address, or Ray refuses the connection; says why.
            ValueError: A number or an option is invalid, or the process is connected to another cluster.
        """
        if episodes_per_actor < 1 or tries < 1:
            raise ValueError("episodes_per_actor and tries must be at least 1")
        options = dict(actor_options or {})
        if taken := sorted(_OURS.intersection(options)):
            raise ValueError(f"actor_options cannot contain {', '.join(taken)}")
        self.episodes_per_actor = episodes_per_actor
        self.tries = tries
        self.actor_options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **options}
        try:
            ray.remote(EpisodeActor).options(**self.actor_options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"actor_options: {error}") from error
        _connect(address)

    @contextlib.asynccontextmanager
    async def start(
        self, episodes: LocalRunner, prompts: Sequence[Prompt], max_concurrency: int
    ) -> AsyncIterator[Runner]:
        """Start the actors for an evaluation, and end them with the context.

        Args:
            episodes: What to run.
            prompts: All prompts of the evaluation.
            max_concurrency: Maximum number of episodes at a time.

        Raises:
            ExecutorError: The environments' factory or a task cannot be pickled, or an actor has other versions or
                cannot create an environment.
        """
        payload = _pickled(episodes, "the environments cannot be sent to Ray's actors")
        for prompt in prompts:
            _pickled(prompt, f"task {prompt.id!r} cannot be sent to Ray's actors")
        number = math.ceil(max_concurrency / self.episodes_per_actor)
        actor_class = ray.remote(EpisodeActor).options(
            max_restarts=-1, max_concurrency=self.episodes_per_actor + 8, **self.actor_options
        )
        levels = {name: logging.getLogger(name).getEffectiveLevel() for name in ("", "strands", "strands_env")}
        arguments = (payload, list(prompts[:PROBES]), versions(), levels, os.getcwd())
        handles = [actor_class.remote(*arguments) for _ in range(number)]
        pool = _Pool(handles, max_concurrency, self)
        try:
            await pool.open()
            yield pool
        finally:
            pool.close()


def versions() -> dict[str, str]:
    """Return the versions that the driver and the nodes must share."""
    installed = {name: importlib.metadata.version(name) for name in ("strands-sglang", "strands-agents")}
    return {"python": ".".join(platform.python_version_tuple()[:2]), **installed}


def _connect(address: str | None) -> None:
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        if address not in (None, "auto") and not _is_same(address, connected):
            raise ValueError(f"this process is connected to the Ray cluster at {connected} already, not to {address}")
        return
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS")
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():  # Ray would wait for minutes
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()
        with _kept_signal_handlers():
            ray.init(address=address or "auto", logging_level=logging.getLogger().getEffectiveLevel())
    except (ValueError, RuntimeError) as error:  # such as other versions
        raise ConnectionError(f"Ray refuses the connection: {one_line(error)}") from error
    except OSError as error:
        if address:
            raise ConnectionError(f"there is no Ray cluster at {address}: {error}") from error
        hint = "start one with ray start --head, set RAY_ADDRESS, or pass an address"
        raise ConnectionError(f"there is no Ray cluster on this machine: {hint}") from error


def _is_same(address: str, connected: str) -> bool:
    """Return whether two addresses name one server; Ray knows this machine by its address in the network."""
    host, _, port = address.rpartition(":")
    if port != connected.rpartition(":")[2]:
        return False
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)}
    except (OSError, ValueError):
        return False
    addresses = {ray.util.get_node_ip_address()} if found & {"127.0.0.1", "::1"} else set()
    return connected.rpartition(":")[0] in found | addresses


@contextlib.contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """Keep the process's handlers: Ray's for SIGTERM would end it without the episodes' cleanup."""
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if kept is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, kept)


def _pickled(value: Any, what: str) -> bytes:
    try:
        content: bytes = cloudpickle.dumps(value)
        return content
    except Exception as error:
        from ray.util import inspect_serializability

        _, failures = inspect_serializability(value, name=type(value).__name__, depth=8, print_file=io.StringIO())
        named = sorted(f"{'.'.join(map(str, failure.path))} of {type(failure.parent).__name__}" for failure in failures)
        raise ExecutorError(f"{what}: {'; '.join(named)}: {type(error).__name__}: {error}") from error


# --- in an actor ---


class RestartedError(Exception):
    """Ray has started an actor again, which must first be ready."""


class EpisodeActor:
    """Runs episodes in a worker process of Ray, all in one event loop."""

    def __init__(
        self,
        payload: bytes,
        probes: Sequence[Prompt],
        expected: Mapping[str, str],
        levels: Mapping[str, int],
        folder: str,
    ) -> None:
        """Prepare to run episodes; `ready` tells what fails.

        Args:
            payload: The pickled `LocalRunner`.
            probes: Prompts to create environments for.
            expected: The driver's versions.
            levels: The driver's levels of logging.
            folder: The driver's current folder.
        """
        gc.set_threshold(10_000, 10, 10)  # the collector would walk through the same episodes all the time
        logging.basicConfig(level=levels[""])  # Ray shows the driver what is logged
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if not ray.get_runtime_context().runtime_env.get("working_dir"):
            with contextlib.suppress(OSError):  # relative paths mean the same, where the folder is shared
                os.chdir(folder)
        self._probes = probes
        self._running: dict[int, asyncio.Future[SampleRun]] = {}
        self._cancelled: set[int] = set()  # before they ran: a cancellation can overtake a large prompt
        self._payload = payload
        self._loaded: LocalRunner | None = None
        self._problem: str | None = None
        installed = versions()
        differing = [
            f"{name} is {installed[name]} there and {expected[name]} here"
            for name in installed
            if installed[name] != expected[name]
        ]
        if differing:
            self._problem = ", ".join(differing)

    @ray.method(max_task_retries=-1)  # waits while Ray restarts the actor
    async def node(self) -> str:
        """Return the address and id of the node that the actor is on."""
        return f"{ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:8]})"

    async def ready(self) -> str | None:
        """Return why no episode can run there, or None."""
        if self._problem is not None:
            return self._problem
        try:
            self._loaded = cast(LocalRunner, cloudpickle.loads(self._payload))
        except BaseException as error:
            return f"the environments cannot be prepared there: {type(error).__name__}: {error}"
        problem = None
        for probe in self._probes:
            try:
                await self._episodes.make(probe)
                return None
            except (Exception, SystemExit) as error:
                problem = problem or f"no environment can be created there: {type(error).__name__}: {error}"
        return problem

    @property
    def _episodes(self) -> LocalRunner:
        if self._loaded is None:  # the driver does not learn of the end of an actor that runs nothing
            raise RestartedError("Ray has started the actor again")
        return self._loaded

    async def run(self, number: int, prompt: Prompt, key: str) -> bytes | None:
        """Run an episode of a prompt; return None if it is canceled.

        The result is bytes: arrays in the object store would be read-only, and fill it while the driver keeps them.
        """
        if number in self._cancelled:
            return None
        running = self._running[number] = asyncio.ensure_future(self._episodes.run(prompt, key))
        await asyncio.wait({running})
        del self._running[number]
        return None if running.cancelled() else _packed(running.result())

    async def cancel(self, number: int) -> None:
        """Cancel an episode; `run` returns after its cleanup. Ray's own cancellation may answer before."""
        if number in self._running:
            self._running[number].cancel()
        else:
            self._cancelled.add(number)

    async def identity(self, number: int, prompt: Prompt) -> dict[str, Any]:
        """Return the identity of a prompt's environment."""
        return await self._episodes.identity(prompt)


def _packed(episode: SampleRun) -> bytes:
    try:
        content: bytes = cloudpickle.dumps(episode)
        cloudpickle.loads(content)  # some exceptions, such as httpx's, can be pickled but not unpickled
    except Exception:  # a value that stays where it is, such as a lock; the results file has the nearest value too
        plain = StepResult.model_validate(decode(encode(episode.result.model_dump())))
        content = cloudpickle.dumps(replace(episode, result=plain))
    return content


# --- in the driver ---


class _Actor:
    """An actor as the driver knows it.

    Attributes:
        handle: Ray's handle.
        checked: Done once it was first ready; its result says why no episode can run there, or None.
        lost: Set once an episode was lost with it.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.checked: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()


class _Pool:
    """The actors of one evaluation: each sample goes to one of them, and to another if that one is lost."""

    def __init__(self, handles: Sequence[Any], max_concurrency: int, settings: RayExecutor) -> None:
        self._handles = handles
        self._actors = [_Actor(handle) for handle in handles]  # those that may run episodes
        self._settings = settings
        self._placement: Placement[_Actor, asyncio.Future[_Actor]] = Placement(
            per_actor=settings.episodes_per_actor, max_concurrency=max_concurrency
        )
        self._numbers = itertools.count()
        self._last_problem = ""  # of the actor that was left out last
        self._watching = [asyncio.ensure_future(self._watch(actor)) for actor in self._actors]

    async def open(self) -> None:
        """Wait until the actors are ready, except for those that come late."""
        checked = [actor.checked for actor in self._actors]
        while not (await asyncio.wait(checked, timeout=LATE, return_when=asyncio.FIRST_COMPLETED))[0]:
            logger.warning("actors=<%d> | Ray has started no actor yet; is there room in the cluster?", len(checked))
        _, pending = await asyncio.wait(checked, timeout=LATE)
        if problems := [problem for check in checked if check.done() and (problem := check.result()) is not None]:
            raise ExecutorError(problems[0])
        if pending:
            logger.warning("actors=<%d>, late=<%d> | Ray has not started all actors yet", len(checked), len(pending))

    def close(self) -> None:
        """End the actors."""
        for watching in self._watching:
            watching.cancel()
        for handle in self._handles:
            ray.kill(handle)

    async def run(self, prompt: Prompt, key: str) -> SampleRun:
        """Run an episode of a prompt, again if its actor is lost; see `Runner`."""
        tries = self._settings.tries
        reason = ""
        attempt = 1
        while attempt <= tries:
            try:
                packed = await self._call("run", prompt, key, alone=1 < attempt == tries)
                return cast(SampleRun, cloudpickle.loads(packed))
            except RestartedError:
                continue  # it has not run
            except RayError as error:
                if not _is_loss(error):
                    raise
                reason = one_line(error)
                logger.warning("prompt=<%s>, try=<%d>, error=<%s> | an actor was lost", prompt.id, attempt, reason)
                attempt += 1
        text = f"its actor was lost {tries} times, the last time with: {reason}"
        lost = StepResult(
            observation=Observation(metrics={"attempts": tries}),
            termination_reason=TerminationReason.INFRASTRUCTURE_ERROR,
            error=text,
        )
        return SampleRun(lost)

    async def identity(self, prompt: Prompt) -> dict[str, Any]:
        """Return the identity of a prompt's environment; see `Runner`."""
        return cast("dict[str, Any]", await self._call("identity", prompt))

    async def _call(self, method: str, prompt: Prompt, *arguments: Any, alone: bool = False) -> Any:
        sample, actor = await self._take(prompt.id, alone=alone)
        try:
            number = next(self._numbers)
            answer = asyncio.wrap_future(getattr(actor.handle, method).remote(number, prompt, *arguments).future())
            answer.add_done_callback(lambda ended: self._hear(actor, ended))
            await until_done(answer, lambda: actor.handle.cancel.remote(number))  # it comes after the cleanup
            return answer.result()
        finally:
            self._leave(sample)

    def _hear(self, actor: _Actor, answer: asyncio.Future[Any]) -> None:
        """Close an actor that was lost until it is ready again, also if the caller was cancelled."""
        if not answer.cancelled() and _is_loss(answer.exception()):
            self._placement.close(actor)
            actor.lost.set()

    # --- placement ---

    async def _take(self, prompt_id: str, *, alone: bool) -> tuple[asyncio.Future[_Actor], _Actor]:
        """Wait for an actor; return the sample's name in the placement, which it has to leave, and the actor."""
        while True:
            sample: asyncio.Future[_Actor] = asyncio.get_running_loop().create_future()
            self._placement.wait(sample, prompt_id, alone=alone)
            self._place()
            try:
                actor = await sample
            except BaseException:
                self._leave(sample)
                raise
            if self._placement.is_open(actor):
                return sample, actor
            self._leave(sample)  # lost to what ran there before

    def _leave(self, sample: asyncio.Future[_Actor]) -> None:
        self._placement.leave(sample)
        self._place()

    def _place(self) -> None:
        """Tell samples where they run, or that no actor is left."""
        for sample, actor in self._placement.place():
            if not sample.done():  # cancelled, and about to leave
                sample.set_result(actor)
        for sample in [] if self._actors else self._placement.clear():
            if not sample.done():
                sample.set_exception(ExecutorError(self._last_problem))

    # --- one actor ---

    async def _watch(self, actor: _Actor) -> None:
        """Offer an actor whenever it is ready: after its start, and after each restart."""
        while (problem := await self._make_ready(actor)) is None:
            if not actor.checked.done():
                actor.checked.set_result(None)
            self._placement.open(actor)
            self._place()
            await actor.lost.wait()
            actor.lost.clear()
        if not actor.checked.done():
            actor.checked.set_result(problem)
        else:
            logger.error("%s", problem)
        self._actors.remove(actor)
        self._last_problem = problem
        self._place()

    async def _make_ready(self, actor: _Actor) -> str | None:
        """Wait until an actor is ready; return why no episode can run there, or None."""
        problem: str | None = None
        for _ in range(self._settings.tries):
            try:
                node = await asyncio.wrap_future(actor.handle.node.remote().future())
            except RayError as error:
                return f"an actor cannot be started: {one_line(error)}"
            try:
                problem = await asyncio.wrap_future(actor.handle.ready.remote().future())
            except RayError as error:
                problem = f"the process ends while an environment is created: {one_line(error)}"
                continue
            break
        return problem and f"Ray node {node}: {problem}"


def _is_loss(error: BaseException | None) -> bool:
    """Whether an actor was lost, rather than raised the error."""
    return isinstance(error, RestartedError) or (isinstance(error, RayError) and not isinstance(error, RayTaskError))
