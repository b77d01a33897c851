"""`Evaluator`: runs many episodes concurrently, stores each one as it ends, and computes metrics."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal, TypeVar

from tqdm import tqdm

from strands_sglang import Outage, outages
from strands_sglang.shown import counted

from ..core import Action
from ..core.environment import SILENT_S
from .benchmarks import BENCHMARKS
from .checkpoint import (
    EvalSample,
    Prompt,
    Results,
    Run,
    Status,
    Storage,
    decode,
    digest,
    encode,
    is_conclusive,
    is_error,
    name_prompts,
)
from .concurrency import DEFAULT, Concurrency
from .episodes import EnvironmentFactory, Executor, LocalRunner, Runner, SampleRun
from .metrics import SUCCESS_THRESHOLD, AnswerFn, MetricFn, answer_of, standard_metrics

logger = logging.getLogger(__name__)

_MAX_CHECKED = 10
"""Most environments that are created to compare them with those of earlier results."""

WINDOW_S = 300.0
"""Seconds over which a rate is measured."""

TICK = 1.0  # seconds between two updates of the progress bar's clock
LOG_EVERY = 60.0  # seconds between two log lines where no bar is shown


REGISTERED: dict[str, type[Evaluator]] = {}
"""Benchmarks by name, as `register_eval` adds them."""

E = TypeVar("E", bound="type[Evaluator]")


def register_eval(name: str) -> Callable[[E], E]:
    """Give a benchmark a name, for `strands-env eval --benchmark NAME`.

    The command finds the benchmarks of installed packages by entry points in the group `strands_env.benchmarks`, each
    of which is a module to import.

    Args:
        name: Name of the benchmark.

    Returns:
        Decorator of a subclass of `Evaluator` with `load_dataset`; it sets `benchmark_name`.

    Raises:
        ValueError: Another class, or a benchmark of this package, has the name.

    Examples:
        ```python
        @register_eval("products")
        class Products(Evaluator):
            def load_dataset(self):
                yield Action(message="What is 25 * 17?", task_context=TaskContext(ground_truth="425"))
        ```
    """

    def register(cls: E) -> E:
        known = REGISTERED.get(name)
        if name in BENCHMARKS or (known is not None and _path(known) != _path(cls)):
            raise ValueError(f"the name {name!r} is taken by {'this package' if known is None else _path(known)}")
        cls.benchmark_name = name
        REGISTERED[name] = cls
        return cls

    return register


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class EvaluationStoppedError(Exception):
    """`stop_after_failures` samples in a row were dropped or errored."""


class Evaluator:
    """Runs several samples of each task and computes metrics.

    A *prompt* is a task, and a *sample* is one episode of it. A sample ends in one of three ways:

    - It is *finished*: the outcome says something about the policy.
    - It is finished and *errored*: it should have a reward but has none, because the reward function, a judge, a tool
      or the environment's code failed, or because the time was up. The answer may have caused this, so the sample
      counts as wrong.
    - It is *dropped*: the infrastructure failed (a server, a tool's machine, a judge's server), or the environment
      could not be created. It says nothing about the policy, counts in no metric, and the next run tries it again.

    With an `output_path`, each result is on disk before it counts as finished. Run the same evaluation again to resume
    it: no finished sample is lost or repeated, however the previous run ended. A sample is identified by the content of
    its task, its index and `config`. Each result also stores the identity of its environment
    ([`Environment.identity`][strands_env.core.Environment.identity]): class, reward function, arguments, and the model
    if its factory is one of `strands_env.core.models`, with the weights that an SGLang server reports. A results file
    holds one configuration, one environment per task, and is written by one process at a time.

    Subclasses set `benchmark_name` and override `load_dataset`, or pass any tasks to `run`.

    Attributes:
        benchmark_name: Name of the benchmark; part of the configuration of the results.

    Examples:
        ```python
        evaluator = Evaluator(env_factory, n_samples_per_prompt=8, output_path="results/first")
        results = await evaluator.run(load_tasks("tasks.jsonl"))
        evaluator.compute_metrics(results)  # {"pass@1": 0.75, "pass@1_low": 0.61, "pass@1_high": 0.87, ...}
        ```
    """

    benchmark_name: str = ""

    def __init__(
        self,
        env_factory: EnvironmentFactory,
        n_samples_per_prompt: int = 1,
        max_concurrency: int | Literal["auto"] = DEFAULT,
        keep_tokens: bool = False,
        metrics_fns: Iterable[MetricFn] = (),
        output_path: str | os.PathLike[str] | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        keep_trajectories: bool = False,
        journal: bool = False,
        success_threshold: float = SUCCESS_THRESHOLD,
        answer_fn: AnswerFn = answer_of,
        stop_after_failures: int | None = None,
        retry_errors: bool = False,
        show_progress: bool | None = None,
        executor: Executor | None = None,
    ) -> None:
        """Create the evaluator. No file is opened before `run`.

        Args:
            env_factory: Function, sync or async, that returns the environment of a sample. It receives the sample's own
                copy of the action.
            n_samples_per_prompt: Number of samples of each task.
            max_concurrency: Maximum number of episodes at a time. With `"auto"` it follows the load that the SGLang
                servers report, from 10 up to the client's `max_connections`: they are kept full, without long queues.
                It stays at 10 if they report none, or if the environment's model is not an `SGLangModel`.
            keep_tokens: Whether to store each sample's `TokenObservation`, for models that record tokens. With an
                `output_path`, tokens stay on disk and are read on access.
            metrics_fns: Functions that compute additional metrics from all results.
            output_path: Results file (`*.jsonl`), or a folder for it. Results are stored there as samples finish, and a
                later run resumes from them. None keeps results in memory only.
            config: JSON-like facts that results depend on besides the tasks and the environment. Results of another
                configuration or environment are never mixed with these; a file that contains them is refused.
            keep_trajectories: Whether to store all model calls of each finished sample, in a file per sample next to
                the results. Needs an `output_path`.
            journal: Whether each episode is written to a journal next to the results until its sample is finished, so
                that a later run continues it instead of starting it again. Needs an `output_path`, in a folder that all
                machines share.
            success_threshold: Minimum reward of a success, 1.0 by default.
            answer_fn: Function that returns what a sample answered, for majority votes.
            stop_after_failures: Number of consecutive dropped or errored samples after which `run` stops; None for no
                limit.
            retry_errors: Whether to run errored samples of an earlier run again, once the cause is fixed. By default
                they stay finished, because an answer that breaks its grader gets no second try.
            show_progress: Whether to show a progress bar; None to show it if standard error is a terminal.
            executor: Where episodes run; None for this process and event loop.

        Raises:
            ValueError: A number is invalid, or `keep_trajectories` or `journal` is set without an `output_path`.
        """
        if n_samples_per_prompt < 1:
            raise ValueError("n_samples_per_prompt must be at least 1")
        if max_concurrency != "auto" and (isinstance(max_concurrency, str) or max_concurrency < 1):
            raise ValueError(f'max_concurrency must be at least 1, or "auto", not {max_concurrency!r}')
        if stop_after_failures is not None and stop_after_failures < 1:
            raise ValueError("stop_after_failures must be at least 1, or None")
        if not math.isfinite(success_threshold):
            raise ValueError(f"success_threshold must be a finite number, not {success_threshold}")
        for name, needs_path in (("keep_trajectories", keep_trajectories), ("journal", journal)):
            if needs_path and output_path is None:
                raise ValueError(f"{name} needs an output_path")
        self.env_factory = env_factory
        self.n_samples_per_prompt = n_samples_per_prompt
        self.max_concurrency = max_concurrency
        self.keep_tokens = keep_tokens
        self.metrics_fns = list(metrics_fns)
        self.output_path = output_path
        self.config = dict(config or {})
        self.keep_trajectories = keep_trajectories
        self.journal = journal
        self.success_threshold = success_threshold
        self.answer_fn = answer_fn
        self.stop_after_failures = stop_after_failures
        self.retry_errors = retry_errors
        self.show_progress = show_progress
        self.executor = executor
        self._identities: dict[str, dict[str, Any]] = {}  # shared by all samples with the same identity

    def load_dataset(self) -> Iterable[Action]:
        """Return the tasks of the benchmark. Subclasses override it.

        Raises:
            NotImplementedError: The class does not override it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no tasks: override load_dataset")

    async def run(self, actions: Iterable[Action] | AsyncIterable[Action]) -> Results:
        """Run all samples that are not finished yet.

        If it is cancelled, running episodes are ended, and finished samples are kept.

        Args:
            actions: Tasks to run.

        Returns:
            All samples by prompt id, including those of earlier runs and dropped ones.

        Raises:
            CheckpointError: The results file belongs to another configuration, environment or process, is damaged, or
                cannot be written. Finished samples are kept.
            DuplicateTaskError: Two different tasks have the same id.
            EvaluationStoppedError: `stop_after_failures` samples in a row were dropped or errored.
        """
        tasks = [action async for action in actions] if isinstance(actions, AsyncIterable) else list(actions)
        prompts = name_prompts(tasks)
        run = Run(
            self.benchmark_name,
            config=decode(encode(self.config)),  # as it will be read from the file
            n_samples_per_prompt=self.n_samples_per_prompt,
            prompts={prompt.id: prompt.digest for prompt in prompts},
        )
        async with AsyncExitStack() as stack:
            storage: Storage | None = None
            if self.output_path is not None:
                storage = Storage(self.output_path, run)
                stack.push_async_callback(storage.close)
            episodes = LocalRunner(
                self.env_factory,
                keep_tokens=self.keep_tokens,
                keep_trajectories=self.keep_trajectories,
                keep_identity=storage is not None,
                results=storage.path if storage is not None and self.journal else None,
            )
            actions = [prompt.action for prompt in prompts]
            concurrency = await Concurrency.from_limit(self.max_concurrency, self.env_factory, actions)
            runner: Runner = episodes
            if self.executor is not None and prompts:
                most = min(concurrency.most, len(run.sample_keys))
                runner = await stack.enter_async_context(self.executor.start(episodes, prompts, most))
            return await self._run(run, prompts, storage, runner, concurrency)

    def compute_metrics(self, results: Results) -> dict[str, float]:
        """Compute pass@k, pass^k, avg@k, majority@k with their intervals, counts, and the metrics of `metrics_fns`.

        Args:
            results: Return value of `run`.

        Returns:
            Values by key; see [`standard_metrics`][strands_env.eval.standard_metrics] for the keys.
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

    async def _run(
        self,
        run: Run,
        prompts: Sequence[Prompt],
        storage: Storage | None,
        runner: Runner,
        concurrency: Concurrency,
    ) -> Results:
        by_id = {prompt.id: prompt for prompt in prompts}
        samples: dict[str, EvalSample] = dict(storage.finished) if storage is not None else {}
        keys = run.sample_keys
        todo = [
            (key, by_id[prompt], index)
            for key, (prompt, index) in keys.items()
            if key not in samples or (self.retry_errors and samples[key].is_errored)
        ]
        waiting, unfinished = iter(todo), {key for key, _, _ in todo}
        kept = {key: sample for key, sample in samples.items() if key not in unfinished}
        if storage is not None:
            await self._check_environments(storage, kept, by_id, runner)
        failures_in_a_row, left = 0, len(todo)
        began: dict[str, float] = {}
        with Progress(
            self.benchmark_name or "evaluation",
            len(keys),
            list(kept.values()),
            running=began,
            shown=self.show_progress,
        ) as progress:

            async def work() -> None:
                nonlocal failures_in_a_row, left
                async for key, prompt, index in concurrency.admit(waiting):
                    name = f"{prompt.id} #{index}"
                    began[name] = time.time()
                    episode = await runner.run(prompt, key)
                    sample = self._sample(key, prompt, index, episode)
                    if storage is not None:
                        await storage.add(sample, trajectory=episode.trajectory)
                    if sample.is_finished or key not in samples:
                        samples[key] = sample
                    progress.add(sample)
                    del began[name]
                    left -= 1
                    has_failed = sample.is_errored or not sample.is_finished
                    failures_in_a_row = failures_in_a_row + 1 if has_failed else 0
                    if self.stop_after_failures is not None and failures_in_a_row >= self.stop_after_failures:
                        raise EvaluationStoppedError(
                            f"{failures_in_a_row} samples in a row failed, the last one with: "
                            f"{sample.step_result.termination_reason.value}: {sample.step_result.error}"
                        )

            async def note() -> None:
                while storage is not None:
                    await storage.note(Status(dict(began), left, long_outages()))
                    await asyncio.sleep(TICK)

            workers = [work() for _ in range(min(concurrency.most, len(todo)))]
            await together(workers, (progress.tick(), concurrency.follow(), note()))
        results: Results = {prompt.id: [] for prompt in prompts}
        for key, (prompt_id, _) in keys.items():
            results[prompt_id].append(samples[key])
        return results

    def _sample(self, key: str, prompt: Prompt, index: int, episode: SampleRun) -> EvalSample:
        is_finished = is_conclusive(episode.result)
        identity = episode.identity
        return EvalSample(
            key=key,
            prompt_id=prompt.id,
            sample_index=index,
            action=prompt.action,
            step_result=episode.result,
            seconds=episode.seconds,
            ended_at=round(time.time(), 3),
            is_finished=is_finished,
            is_errored=is_finished and is_error(episode.result, is_judged=episode.is_judged),
            environment=None if identity is None else self._identities.setdefault(digest(identity), identity),
        )

    async def _check_environments(
        self, storage: Storage, kept: Mapping[str, EvalSample], prompts: Mapping[str, Prompt], runner: Runner
    ) -> None:
        """Refuse to resume results of environments other than those now created for the same prompts.

        One prompt is checked for each stored identity.
        """
        by_identity = {digest(sample.environment): sample for sample in kept.values() if sample.environment}
        for sample in list(by_identity.values())[:_MAX_CHECKED]:
            try:
                identity = await runner.identity(prompts[sample.prompt_id])
            except (Exception, SystemExit):
                logger.warning("an environment could not be created, so its results are not checked", exc_info=True)
            else:
                storage.refuse_other_environment(sample.key, identity)


async def together(
    work: Iterable[Coroutine[Any, Any, None]], helpers: Iterable[Coroutine[Any, Any, None]] = ()
) -> None:
    """Run workers until all have ended or one has failed, and helpers as long. All have ended when this returns.

    Raises:
        Exception: A worker failed with it.
    """
    workers, others = ([asyncio.ensure_future(coroutine) for coroutine in them] for them in (work, helpers))
    ended: set[asyncio.Future[None]] = set()
    try:  # not with `gather`: as soon as one worker is cancelled, it would leave the others to their cleanup
        if workers:
            ended, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
    finally:  # if one fails or the caller is cancelled, the others end first
        for task in (*workers, *others):
            task.cancel()
        await asyncio.gather(*workers, *others, return_exceptions=True)
    for worker in ended:
        worker.result()


def long_outages() -> list[str]:
    """Say which servers do not answer for so long that it is worth a word: a retry mends most outages in no time."""
    return [_told(outage) for outage in outages() if outage.seconds >= SILENT_S]


def _told(outage: Outage) -> str:
    wait = f"{counted(outage.waiting, 'sample')} wait{'s' * (outage.waiting == 1)}"
    line = f"{outage.base_url} has not answered for {outage.seconds:.0f} s: {wait}"
    if outage.seconds_left == math.inf:
        return line
    when = f"in {outage.seconds_left:.0f} s" if outage.seconds_left >= 1 else "at any moment"
    return f"{line}; next dropped {when}"


def results_per_second(ends: Sequence[float], now: float) -> float:
    """Return how fast samples get a result, which tells when the others will have one; 0.0 if it is not known yet.

    Args:
        ends: When the samples of the last `WINDOW_S` seconds got theirs, the first one first.
        now: The time, in seconds since 1970.
    """
    if len(ends) < 2:
        return 0.0
    return (len(ends) - 1) / max(now - ends[0], 1e-3)


class Progress(tqdm):
    """A progress bar with rate, remaining time, mean reward, number of failures, and a server that does not answer.

    The mean reward includes finished samples of earlier runs. The remaining time is that of `strands-env watch`: it is
    unknown while a server does not answer, and before each slot has ended once.
    """

    def __init__(
        self,
        description: str,
        total: int,
        done: Sequence[EvalSample],
        *,
        running: Collection[str] = (),
        shown: bool | None = None,
    ) -> None:
        """Start the bar.

        Args:
            description: Text in front of the bar.
            total: Number of all samples.
            done: Samples that are finished already; they do not count for the rate.
            running: The samples that run now, whenever one looks.
            shown: Whether to show the bar; None to show it if standard error is a terminal.
        """
        self._running = running
        self._ends: deque[float] = deque()
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
        self._ended = 0
        for sample in done:
            self._count(sample)

    def add(self, sample: EvalSample) -> None:
        """Count a sample that has ended."""
        if sample.is_finished:
            self._ends.append(time.time())
        self._count(sample)
        self.update()

    @property
    def format_dict(self) -> Any:
        """What tqdm shows, with our rate."""
        now = time.time()
        while self._ends and now - self._ends[0] > WINDOW_S:
            self._ends.popleft()
        ended = self.n - getattr(self, "initial", 0)  # a bar that is not shown has none
        rate = 0.0 if ended < len(self._running) else results_per_second(self._ends, now)
        return super().format_dict | {"rate": rate}

    async def tick(self) -> None:
        """Until canceled, keep the clock of the bar running, or log the progress if there is no bar."""
        logged = time.monotonic()
        while True:
            await asyncio.sleep(TICK)
            self._show_outage()
            self.refresh()
            if self.disable and time.monotonic() - logged >= LOG_EVERY:
                logged = time.monotonic()
                logger.info(
                    "samples=<%d>, total=<%d>, failed=<%d> | evaluation in progress",
                    self._ended,
                    self.total,
                    self._failed,
                )

    def _show_outage(self) -> None:
        silent = long_outages()
        self.bar_format = None
        if silent:
            sentence = silent[0].replace("{", "{{").replace("}", "}}")
            failed = f", failed={self._failed}" if self._failed else ""
            self.bar_format = "{desc}: {n_fmt}/{total_fmt}" + failed + "; " + sentence

    def _count(self, sample: EvalSample) -> None:
        self._ended += 1
        self._failed += sample.is_errored or not sample.is_finished
        if sample.is_finished and sample.reward is not None:
            self._rewards += sample.reward
            self._rewarded += 1
        shown = {
            "reward": f"{self._rewards / self._rewarded:.3f}" if self._rewarded else "",
            "failed": str(self._failed or ""),
        }
        self.set_postfix({name: text for name, text in shown.items() if text}, refresh=False)
