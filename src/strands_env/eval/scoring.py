"""Scoring the saved episodes of an evaluation with another reward, without running them again.

The new folder is that of an evaluation with the other reward: `report`, `compare` and `eval` use it as one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from strands_sglang import Trajectory

from ..core import Observation, RewardFunction, StepResult, compute_reward
from ..core.identity import describe
from .checkpoint import (
    EvalSample,
    Results,
    Storage,
    decode,
    encode,
    is_conclusive,
    is_error,
    read_results,
    results_file,
    trajectory_file,
)
from .evaluator import Progress, together


async def score(
    source: str | os.PathLike[str],
    reward_fn: RewardFunction,
    output_path: str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None = None,
    max_concurrency: int = 10,
    reward_timeout: float | None = 600.0,
    show_progress: bool | None = None,
) -> Results:
    """Score the saved episodes of an evaluation with another reward.

    Each episode is judged as if the environment had the reward when it ran: an outcome without a reward has none, and a
    reward function that fails gives an errored or a dropped sample. Samples that were dropped because their judge's
    server failed are scored, too. The reward function receives what is saved: messages and metrics, tokens if the
    evaluation kept them (`keep_tokens`), and the trajectory (`keep_trajectories`).

    The samples are written as they are scored. Call it again to resume, also to score what an evaluation that still
    runs has added or run again.

    Args:
        source: Results file of the evaluation, or its folder. It is only read.
        reward_fn: The reward function.
        output_path: Results file for the scored samples, or a folder for it; another one than `source`.
        config: Configuration of the scored results; None for that of the evaluation.
        max_concurrency: Maximum number of samples at a time.
        reward_timeout: Seconds for the reward function; None for no limit.
        show_progress: Whether to show a progress bar; None to show it if standard error is a terminal.

    Returns:
        All samples by prompt id.

    Raises:
        CheckpointError: A file is missing, damaged, in use, or of another configuration; or it cannot be written.
        ValueError: A number is invalid, `output_path` is the `source`, or the reward cannot use a ground truth.
    """
    if max_concurrency < 1:
        raise ValueError("max_concurrency must be at least 1")
    origin, path = results_file(source), results_file(output_path)
    if path.resolve() == origin.resolve():
        raise ValueError(f"{output_path} has the samples to score: write to another folder")
    run, results = read_results(source)
    new = replace(run, config=run.config if config is None else decode(encode(config)))
    keys = {place: key for key, place in new.sample_keys.items()}
    reward = {"reward_fn": describe(reward_fn)}
    for prompt, samples in results.items():
        try:
            for sample in samples[:1]:
                reward_fn.check_truth(sample.action.task_context.ground_truth)
        except ValueError as error:
            raise ValueError(f"task {prompt}: {error}") from error
    async with AsyncExitStack() as stack:
        storage = Storage(output_path, new)
        stack.push_async_callback(storage.close)
        for kept in list(storage.finished.values())[:1]:
            if kept.environment is not None:
                storage.refuse_other_environment(kept.key, {**kept.environment, **reward})
        saved = {keys[row.prompt_id, row.sample_index]: row for row in chain.from_iterable(results.values())}
        scored_samples = {  # without those that the evaluation has run again since
            key: sample
            for key, sample in storage.finished.items()
            if key in saved and saved[key].ended_at == sample.ended_at
        }
        todo = [(key, sample) for key, sample in saved.items() if key not in scored_samples]
        waiting = iter(todo)
        progress = stack.enter_context(
            Progress(f"scoring {run.benchmark}".strip(), len(saved), list(scored_samples.values()), shown=show_progress)
        )

        async def work() -> None:
            for key, sample in waiting:
                scored = await _scored(key, sample, origin, reward_fn, reward_timeout)
                scored.environment = None if sample.environment is None else {**sample.environment, **reward}
                await storage.add(scored, trajectory=_trajectory(origin, sample, scored.step_result))
                scored_samples[key] = scored
                progress.add(scored)

        await together([work() for _ in range(min(max_concurrency, len(todo)))], [progress.tick()])
    scored_results: Results = {prompt: [] for prompt in run.prompts}
    for key, (prompt, _) in new.sample_keys.items():
        if key in scored_samples:
            scored_results[prompt].append(scored_samples[key])
    return scored_results


async def _scored(
    key: str, sample: EvalSample, origin: Path, reward_fn: RewardFunction, timeout: float | None
) -> EvalSample:
    """Judge a copy of a saved sample."""
    saved, action = sample.step_result, sample.action.model_copy(deep=True)
    # A copy for the reward function, which must not change what is stored.
    seen = saved.observation.model_copy(deep=True)
    seen.trajectory = _trajectory(origin, sample)
    result = await compute_reward(reward_fn, action, saved.model_copy(update={"observation": seen}), timeout=timeout)
    kept = Observation(
        messages=saved.observation.messages, tokens=saved.observation.tokens, metrics=result.observation.metrics
    )
    result = result.model_copy(update={"observation": kept})
    is_finished = is_conclusive(result)
    return sample.model_copy(
        update={
            "key": key,
            "step_result": result,
            "is_finished": is_finished,
            "is_errored": is_finished and is_error(result, is_judged=True),
        }
    )


def _trajectory(origin: Path, sample: EvalSample, result: StepResult | None = None) -> Trajectory | None:
    """Read the saved trajectory of a sample, and note another result in it; None if none is saved."""
    file = trajectory_file(origin, sample.key)
    if not (sample.is_finished and file.exists()):
        return None
    trajectory = Trajectory.load(file)
    if result is not None:
        trajectory.note_end(
            outcome=result.termination_reason,
            reward=None if result.reward is None else result.reward.reward,
            error=result.error,
            reward_error=result.reward_error,
        )
    return trajectory
