"""`Evaluator`: many episodes at once, each kept as soon as it ends, and what they say of the policy."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from strands_sglang import OUTCOMES, SGLangClientError, TerminationReason, termination_reason

from ..core import Action, Environment, Observation, StepResult
from ..core.identity import describe
from ..core.supervision import maybe_await
from .checkpoint import (
    EvalSample,
    Prompt,
    Results,
    Run,
    Storage,
    decode,
    digest,
    encode,
    is_conclusive,
    is_error,
    name_prompts,
    with_finite_reward,
)
from .metrics import SUCCESS_THRESHOLD, AnswerFn, MetricFn, answer_of, standard_metrics

logger = logging.getLogger(__name__)

_MAX_CHECKED = 10
"""Environments that are made to compare them with those of earlier results."""


class EvaluationStoppedError(Exception):
    """So many samples failed one after the other that going on has no use."""


class Evaluator:
    """Runs every task several times and computes metrics.

    Subclasses set `benchmark_name` and override `load_dataset`.

    Example:
        evaluator = YourEvaluator(env_factory, n_samples_per_prompt=8, output_path="runs/first")
        results = await evaluator.run(evaluator.load_dataset())
        evaluator.compute_metrics(results)  # {"pass@1": 0.75, "pass@1_low": 0.61, ...}

    Attributes:
        benchmark_name: Part of the configuration that results belong to.
    """

    benchmark_name: str = ""

    def __init__(
        self,
        env_factory: Callable[[Action], Awaitable[Environment] | Environment],
        n_samples_per_prompt: int = 1,
        max_concurrency: int = 10,
        keep_tokens: bool = False,
        metrics_fns: Iterable[MetricFn] = (),
        output_path: str | os.PathLike[str] | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        keep_trajectories: bool = False,
        success_threshold: float = SUCCESS_THRESHOLD,
        answer_fn: AnswerFn = answer_of,
        stop_after_failures: int | None = None,
        retry_errors: bool = False,
        show_progress: bool | None = None,
    ) -> None:
        """Set up; nothing is opened before `run`.

        Args:
            env_factory: Makes the environment of one sample; may be async. It gets the sample's own copy of the action.
            n_samples_per_prompt: Episodes of each task.
            max_concurrency: Episodes at once.
            keep_tokens: Whether to keep each sample's `TokenObservation` (models that record tokens only). With an
                `output_path` tokens are on the disk only, and read when they are asked for.
            metrics_fns: Each takes all results and returns further metrics.
            output_path: Results file (`*.jsonl`) or folder: results are kept there as they finish, and a later run
                goes on from them. None keeps them in memory only.
            config: What the results depend on beside the tasks and the environment, whose class, reward and arguments
                are kept by themselves. JSON-like. Results of one configuration or environment are never taken for
                another's, and a file with those of another is refused.
            keep_trajectories: Whether to keep all model calls of each finished sample in a file of its own, beside the
                results.
            success_threshold: The least reward of a success.
            answer_fn: What a sample answered, for majority votes.
            stop_after_failures: After so many dropped or errored samples in a row, stop; None to go on whatever
                happens.
            retry_errors: Whether to run errored samples of an earlier run again, once what failed is mended. Else they
                are finished: an answer that fails its grader is not given another try.
            show_progress: Whether to show a progress bar; None for "if standard error is a terminal".

        Raises:
            ValueError: A number cannot work, or `keep_trajectories` has no place to keep them.
        """
        if n_samples_per_prompt < 1 or max_concurrency < 1:
            raise ValueError("n_samples_per_prompt and max_concurrency must be at least 1")
        if stop_after_failures is not None and stop_after_failures < 1:
            raise ValueError("stop_after_failures must be at least 1, or None")
        if not math.isfinite(success_threshold):
            raise ValueError(f"success_threshold is a finite number, not {success_threshold}")
        if keep_trajectories and output_path is None:
            raise ValueError("keep_trajectories needs an output_path")
        self.env_factory = env_factory
        self.n_samples_per_prompt = n_samples_per_prompt
        self.max_concurrency = max_concurrency
        self.keep_tokens = keep_tokens
        self.metrics_fns = list(metrics_fns)
        self.output_path = output_path
        self.config = dict(config or {})
        self.keep_trajectories = keep_trajectories
        self.success_threshold = success_threshold
        self.answer_fn = answer_fn
        self.stop_after_failures = stop_after_failures
        self.retry_errors = retry_errors
        self.show_progress = show_progress
        self._served: dict[Any, asyncio.Future[dict[str, str]]] = {}
        self._identities: dict[str, dict[str, Any]] = {}  # one object for all samples that share it

    def load_dataset(self) -> Iterable[Action]:
        """The tasks of the benchmark. Subclasses override it.

        Raises:
            NotImplementedError: The class is not of a benchmark.
        """
        raise NotImplementedError(f"{type(self).__name__} has no tasks of its own: override load_dataset")

    async def run(self, actions: Iterable[Action] | AsyncIterable[Action]) -> Results:
        """Run what is not finished yet of all samples.

        If it is cancelled, episodes under way are ended and everything that is finished is kept.

        Args:
            actions: The tasks.

        Returns:
            All samples by prompt id, those of earlier runs and those that were dropped included.

        Raises:
            CheckpointError: The files cannot be used, or no longer written. What is finished is kept.
            DuplicateTaskError: Two different tasks have the same id.
            EvaluationStoppedError: `stop_after_failures` samples in a row were dropped or errored.
        """
        tasks = [action async for action in actions] if isinstance(actions, AsyncIterable) else list(actions)
        prompts = name_prompts(tasks)
        run = Run(
            self.benchmark_name,
            config=decode(encode(self.config)),  # as it is read back
            n_samples_per_prompt=self.n_samples_per_prompt,
            prompts={prompt.id: prompt.digest for prompt in prompts},
        )
        if self.output_path is None:
            return await self._run(run, prompts, None)
        storage = Storage(self.output_path, run)
        try:
            return await self._run(run, prompts, storage)
        finally:
            await storage.close()

    def compute_metrics(self, results: Results) -> dict[str, float]:
        """Flat metrics: pass@k, pass^k, avg@k, majority@k, their intervals, counts, and those of `metrics_fns`.

        `strands_env.eval.metrics` says what the keys mean.

        Args:
            results: What `run` returned.
        """
        metrics = standard_metrics(
            results,
            n_samples_per_prompt=self.n_samples_per_prompt,
            success_threshold=self.success_threshold,
            answer_fn=self.answer_fn,
        )
        for function in self.metrics_fns:
            metrics.update({name: float(value) for name, value in function(results).items()})
        return metrics

    async def _run(self, run: Run, prompts: Sequence[Prompt], storage: Storage | None) -> Results:
        by_id = {prompt.id: prompt for prompt in prompts}
        samples: dict[str, EvalSample] = dict(storage.finished) if storage is not None else {}
        keys = run.sample_keys
        todo = [
            (key, by_id[prompt], index)
            for key, (prompt, index) in keys.items()
            if key not in samples or (self.retry_errors and samples[key].is_errored)
        ]
        waiting, again = iter(todo), {key for key, _, _ in todo}
        kept = {key: sample for key, sample in samples.items() if key not in again}
        if storage is not None:
            await self._check_environments(storage, kept, by_id)
        failures_in_a_row = 0
        with Progress(
            self.benchmark_name or "evaluation", len(keys), list(kept.values()), shown=self.show_progress
        ) as progress:

            async def work() -> None:
                nonlocal failures_in_a_row
                for key, prompt, index in waiting:
                    sample, trajectory = await self._sample(key, prompt, index)
                    if storage is not None:
                        await storage.add(sample, trajectory=trajectory)
                    if sample.is_finished or key not in samples:
                        samples[key] = sample
                    progress.add(sample)
                    has_failed = sample.is_errored or not sample.is_finished
                    failures_in_a_row = failures_in_a_row + 1 if has_failed else 0
                    if self.stop_after_failures is not None and failures_in_a_row >= self.stop_after_failures:
                        raise EvaluationStoppedError(
                            f"{failures_in_a_row} samples in a row failed, the last one with: "
                            f"{sample.step_result.termination_reason.value}: {sample.step_result.error}"
                        )

            ticking = asyncio.ensure_future(progress.tick())
            workers = [asyncio.ensure_future(work()) for _ in range(min(self.max_concurrency, len(todo)))]
            try:
                await asyncio.gather(*workers)
            finally:  # if one fails or the caller is cancelled, the others end before that is passed on
                for worker in (*workers, ticking):
                    worker.cancel()
                await asyncio.gather(*workers, ticking, return_exceptions=True)
        results: Results = {prompt.id: [] for prompt in prompts}
        for key, (prompt_id, _) in keys.items():
            results[prompt_id].append(samples[key])
        return results

    async def _sample(self, key: str, prompt: Prompt, index: int) -> tuple[EvalSample, Any]:
        """Play one episode; return it and its trajectory, if that is to be kept."""
        # A copy of its own: environments may write into the action, and the other samples must not see it.
        action = prompt.action.model_copy(deep=True)
        began = time.monotonic()
        playing = asyncio.ensure_future(self._play(action))
        try:
            await asyncio.wait({playing})
        except asyncio.CancelledError:
            playing.cancel()
            await asyncio.wait({playing})
            raise
        # Cancelled by itself: the environment raised it.
        cancelled = (_failed(asyncio.CancelledError()), True, None)
        result, is_judged, identity = cancelled if playing.cancelled() else playing.result()
        is_finished = is_conclusive(result)
        observation = result.observation
        kept = Observation(
            messages=observation.messages,
            tokens=observation.tokens if self.keep_tokens else None,
            metrics=observation.metrics,
        )
        sample = EvalSample(
            key=key,
            prompt_id=prompt.id,
            sample_index=index,
            action=prompt.action,
            step_result=result.model_copy(update={"observation": kept}),
            seconds=round(time.monotonic() - began, 3),
            is_finished=is_finished,
            is_errored=is_finished and is_error(result, is_judged=is_judged),
            environment=identity,
        )
        return sample, observation.trajectory if self.keep_trajectories else None

    async def _play(self, action: Action) -> tuple[StepResult, bool, dict[str, Any] | None]:
        """Run one episode; return how it ended, and of its environment whether it judges and what it is."""
        try:
            env = await self._make(action)
        except (Exception, SystemExit) as error:
            logger.warning("an environment could not be made", exc_info=True)
            result = _failed(error)
            result.observation.metrics["model_calls"] = 0  # nothing that the policy did
            return result, True, None
        is_judged = getattr(env, "reward_fn", None) is not None
        identity = None if self.output_path is None else await self._identity(env)
        try:
            return with_finite_reward(await env.step(action)), is_judged, identity
        except (Exception, SystemExit) as error:
            logger.warning("an episode failed", exc_info=True)
            return _failed(error), is_judged, identity

    async def _make(self, action: Action) -> Environment:
        env: Environment = await maybe_await(self.env_factory(action))
        return env

    async def _identity(self, env: Any) -> dict[str, Any]:
        """What makes an environment the one that it is, the weights that its server tells of included."""
        own = getattr(env, "identity", None)
        identity = own() if callable(own) else describe(env)
        ask = getattr(getattr(env, "model_factory", None), "served", None)
        if ask is not None:
            if ask not in self._served:
                self._served[ask] = asyncio.ensure_future(_answer_of(ask))  # asked once in a run
            identity = {**identity, "served": await asyncio.shield(self._served[ask])}
        return self._identities.setdefault(digest(identity), identity)

    async def _check_environments(
        self, storage: Storage, kept: Mapping[str, EvalSample], prompts: Mapping[str, Prompt]
    ) -> None:
        """Refuse to go on from results of other environments than are made now for the same prompts.

        Of prompts whose environments were alike one is enough.
        """
        self._served, self._identities = {}, {}
        alike = {digest(sample.environment): sample for sample in kept.values() if sample.environment}
        for sample in list(alike.values())[:_MAX_CHECKED]:
            try:
                env = await self._make(prompts[sample.prompt_id].action.model_copy(deep=True))
            except (Exception, SystemExit):
                logger.warning("an environment could not be made, so its results are not checked", exc_info=True)
            else:
                storage.refuse_other_environment(sample.key, await self._identity(env))


async def _answer_of(ask: Callable[[], Awaitable[dict[str, str]]]) -> dict[str, str]:
    try:
        return await ask()
    except SGLangClientError as error:
        logger.warning("error=<%s> | the server does not tell which weights it serves", error)
        return {}


def _failed(error: BaseException) -> StepResult:
    """The result of an episode of which nothing is left but what it raised."""
    reason = termination_reason(error)
    if (
        reason in (TerminationReason.CANCELLED, TerminationReason.ABORTED)
        or OUTCOMES[reason].reward.value == "computed"
    ):
        reason = TerminationReason.AGENT_ERROR
    return StepResult(
        observation=Observation(),
        termination_reason=reason,
        error=f"{type(error).__name__}: {error}".removesuffix(": "),
    )


class Progress(tqdm):
    """A progress bar with rate, remaining time and running reward; nothing where nobody looks at a terminal.

    The mean reward is over the rewards seen so far, of finished samples of earlier runs too.
    """

    def __init__(self, description: str, total: int, done: Sequence[EvalSample], *, shown: bool | None = None) -> None:
        """Begin.

        Args:
            description: In front of the bar.
            total: All samples.
            done: Those that are finished already; they don't count for the rate.
            shown: Whether to show it; None for "if standard error is a terminal".
        """
        super().__init__(
            desc=description,
            total=total,
            initial=len(done),
            unit="sample",
            dynamic_ncols=True,
            file=sys.stderr,
            disable=None if shown is None else not shown,
        )
        self._rewards = 0.0
        self._rewarded = 0
        self._failed = 0
        for sample in done:
            self._count(sample)

    def add(self, sample: EvalSample) -> None:
        """Count one that ended."""
        self._count(sample)
        self.update()

    async def tick(self) -> None:
        """Keep the clock of the bar running until canceled: a sample may take minutes."""
        while True:
            await asyncio.sleep(1.0)
            self.refresh()

    def _count(self, sample: EvalSample) -> None:
        self._failed += sample.is_errored or not sample.is_finished
        if sample.is_finished and sample.reward is not None:
            self._rewards += sample.reward
            self._rewarded += 1
        shown = {
            "reward": f"{self._rewards / self._rewarded:.3f}" if self._rewarded else "",
            "failed": str(self._failed or ""),
        }
        self.set_postfix({name: text for name, text in shown.items() if text}, refresh=False)
