"""How samples are run: `LocalRunner` runs them in this process, and an `Executor` runs them elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import anyio

from strands_sglang import (
    OUTCOMES,
    JournalError,
    JournalInUseError,
    SGLangClientError,
    TerminationReason,
    Trajectory,
    TrajectoryFileError,
    termination_reason,
)

from ..core import Action, Environment, Observation, StepResult
from ..core.environment import format_error, read_conversation
from ..core.identity import describe
from ..core.supervision import maybe_await
from .checkpoint import Prompt, journal_file, with_finite_reward

logger = logging.getLogger(__name__)

EnvironmentFactory = Callable[[Action], "Awaitable[Environment] | Environment"]
"""A function, sync or async, that returns the environment of a sample."""


@dataclass(frozen=True)
class SampleRun:
    """What one run of a sample returned.

    Attributes:
        result: The episode, without its trajectory, and without tokens unless they are kept.
        is_judged: Whether its environment has a reward function.
        identity: Identity of its environment; None if it is not kept, or the environment could not be created.
        seconds: Duration of the episode.
        trajectory: All model calls, if trajectories are kept.
    """

    result: StepResult
    is_judged: bool = True
    identity: dict[str, Any] | None = None
    seconds: float = 0.0
    trajectory: Trajectory | None = None


class ExecutorError(Exception):
    """Samples cannot run where an executor runs them; says where, and why."""


class Runner(Protocol):
    """Runs the samples of one evaluation, many at a time."""

    async def run(self, prompt: Prompt, key: str) -> SampleRun:
        """Run one episode of a prompt. Whatever fails is reported by its result.

        Args:
            prompt: The prompt.
            key: The sample's key, which names its journal.

        Raises:
            CancelledError: The caller was cancelled. The episode has ended and is cleaned up.
        """

    async def identity(self, prompt: Prompt) -> dict[str, Any]:
        """Create the environment of a prompt, and return its identity."""


class Executor(Protocol):
    """Where the samples of an evaluation run; `strands_env.ray.RayExecutor` is one."""

    def start(
        self, episodes: LocalRunner, prompts: Sequence[Prompt], max_concurrency: int
    ) -> AbstractAsyncContextManager[Runner]:
        """Return a context in which samples are run.

        Args:
            episodes: What to run, as it would run in this process.
            prompts: All prompts of the evaluation.
            max_concurrency: Maximum number of episodes at a time.
        """


class LocalRunner:
    """The episodes of one evaluation, run in the current process and event loop."""

    def __init__(
        self,
        env_factory: EnvironmentFactory,
        *,
        keep_tokens: bool,
        keep_trajectories: bool,
        keep_identity: bool,
        results: Path | None = None,
    ) -> None:
        """Prepare to run episodes.

        Args:
            env_factory: Function that returns the environment of a sample.
            keep_tokens: Whether an episode returns its tokens.
            keep_trajectories: Whether it returns its trajectory.
            keep_identity: Whether it returns the identity of its environment.
            results: The results file next to which episodes have journals; None for no journals.
        """
        self.env_factory = env_factory
        self.keep_tokens = keep_tokens
        self.keep_trajectories = keep_trajectories
        self.keep_identity = keep_identity
        self.results = results
        self._served: dict[Any, asyncio.Future[dict[str, str]]] = {}

    async def run(self, prompt: Prompt, key: str) -> SampleRun:
        """Run one episode of a prompt, or continue it; see `Runner`."""
        began = time.monotonic()
        running = asyncio.ensure_future(self._run(prompt, key))
        await until_done(running, running.cancel)
        # If the task is cancelled although this one is not, the environment raised CancelledError.
        cancelled = (failed(asyncio.CancelledError()), True, None)
        result, is_judged, identity = cancelled if running.cancelled() else running.result()
        observation = result.observation
        kept = Observation(
            messages=observation.messages,
            tokens=observation.tokens if self.keep_tokens else None,
            metrics=observation.metrics,
        )
        return SampleRun(
            result.model_copy(update={"observation": kept}),
            is_judged,
            identity,
            round(time.monotonic() - began, 3),
            observation.trajectory if self.keep_trajectories else None,
        )

    async def identity(self, prompt: Prompt) -> dict[str, Any]:
        """Create the environment of a prompt, and return its identity, with the weights that its server reports."""
        return await self._identity(await self.make(prompt))

    async def make(self, prompt: Prompt) -> Environment:
        """Create the environment of a prompt."""
        return await self._make(prompt.action.model_copy(deep=True))

    async def _run(self, prompt: Prompt, key: str) -> tuple[StepResult, bool, dict[str, Any] | None]:
        # A copy: environments may modify the action, which must not affect other samples.
        action = prompt.action.model_copy(deep=True)
        try:
            env = await self._make(action)
            identity = await self._identity(env) if self.keep_identity else None
        except (Exception, SystemExit) as error:
            logger.warning("an environment could not be created or identified", exc_info=True)
            result = failed(error)
            result.observation.metrics["model_calls"] = 0  # so that the sample is dropped
            return result, True, None
        is_judged = getattr(env, "reward_fn", None) is not None
        try:
            return with_finite_reward(await self._step(env, action, key)), is_judged, identity
        except (Exception, SystemExit) as error:
            logger.warning("an episode failed", exc_info=True)
            result = failed(error)
            try:
                read_conversation(action)
            except Exception:  # an invalid task: the model was not called
                result.observation.metrics["model_calls"] = 0
            return result, is_judged, identity

    async def _step(self, env: Environment, action: Action, key: str) -> StepResult:
        if self.results is None or not isinstance(env, Environment):
            return await env.step(action)
        env.journal = file = journal_file(self.results, key)
        if file.exists():
            try:
                (result,) = await env.resume(file)
                return result
            except JournalInUseError:
                raise
            except (JournalError, TrajectoryFileError) as error:
                logger.warning("error=<%s> | the episode starts again, and the file is renamed", error)
                file.replace(file.with_suffix(".refused"))
        return await env.step(action)

    async def _make(self, action: Action) -> Environment:
        env: Environment | None = await maybe_await(self.env_factory(action))
        if env is None:
            raise TypeError("the environment factory returned None: it must return an environment")
        return env

    async def _identity(self, env: Any) -> dict[str, Any]:
        identity_of = getattr(env, "identity", None)
        identity = identity_of() if callable(identity_of) else describe(env)
        ask = getattr(getattr(env, "model_factory", None), "served", None)
        if ask is not None:
            asked = self._served.get(ask)
            if asked is None or asked.done() and asked.exception() is not None:
                asked = self._served[ask] = asyncio.ensure_future(ask())  # asked until it answers once
            try:
                identity = {**identity, "served": await asyncio.shield(asked)}
            except SGLangClientError as error:
                logger.warning("error=<%s> | the server does not report which weights it serves", error)
                identity = {**identity, "served": {}}
        return identity


async def until_done(future: asyncio.Future[Any], cancel: Callable[[], Any]) -> None:
    """Wait for a future. A cancelled caller calls `cancel` once, and still waits.

    Raises:
        CancelledError: The caller was cancelled; the future is done.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            # Once is enough: anyio's cancel scopes cancel again in every iteration of the event loop.
            with anyio.CancelScope(shield=cancelled is not None):
                await asyncio.wait({future})
        except asyncio.CancelledError as error:
            if cancelled is None:
                cancel()
            cancelled = error
    if cancelled is not None:
        raise cancelled


def failed(error: BaseException) -> StepResult:
    """Return the result of an episode that only raised an exception."""
    reason = termination_reason(error)
    if (
        reason in (TerminationReason.CANCELLED, TerminationReason.ABORTED)
        or OUTCOMES[reason].reward.value == "computed"
    ):
        reason = TerminationReason.AGENT_ERROR
    return StepResult(observation=Observation(), termination_reason=reason, error=format_error(error))
