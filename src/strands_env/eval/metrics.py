"""From samples to numbers: a flat dictionary of floats, and what it leaves out.

For a metric `pass@4` there are, beside the value itself,
- `pass@4_low`, `pass@4_high`: its 95 % interval, for two prompts or more;
- `pass@4_prompts`, `pass@4_dropped_prompts`: how many prompts it is the mean of, and how many it could not use;
- `pass@4_if_dropped_failed`: its value if every dropped sample had failed with reward 0; only where samples were
  dropped.

`samples`, `dropped_samples`, `errored_samples`, `unscored_samples`, `prompts` count. A dropped sample is missing: the
infrastructure failed, or it was never run. An errored one has no reward because something else failed, and counts as a
failure with a reward of 0, or the lowest of all if that is less. An unscored one is finished and nothing in its
evaluation has a reward. Dropped and unscored samples are in no metric, and a prompt is used for k if k of its samples
are left.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..rewards import last_boxed, value_key
from .records import EvalSample, Results
from .statistics import Interval, majority_at_k, mean_over_prompts, pass_at_k, pass_hat_k

MetricFn = Callable[[Results], Mapping[str, float]]
"""Further metrics from all samples."""

AnswerFn = Callable[[EvalSample], Hashable | None]
"""What a sample answered, for majority votes; None for no answer."""

SUCCESS_THRESHOLD = 1.0
"""A sample is a success if its reward is at least this."""

_NO_ANSWER = ("no_answer", "not_boxed", "no_match")
"""Verdicts of `strands_env.rewards` on episodes that answered nothing."""


def answer_of(sample: EvalSample) -> str | None:
    r"""What a sample answered.

    `extracted` or `answer` of the reward's info (as `MathReward` has it), the last `\boxed{...}` of its text, or its
    whole text; numbers, lists and the like by their value (`1/2`, `0.5` and `0.50` are one answer), texts by their
    words, right answers all alike. None where the reward's verdict is that there is no answer.
    """
    info = {} if sample.step_result.reward is None else sample.step_result.reward.info
    if info.get("verdict") in _NO_ANSWER:
        return None
    if info.get("verdict") == "correct" and isinstance(info.get("ground_truth"), str):
        return value_key(info["ground_truth"])
    for name in ("extracted", "answer"):
        if info.get(name) is not None:
            return value_key(str(info[name]))
    text = sample.step_result.observation.final_response
    if text is None:
        return None
    boxed = last_boxed(text)
    return value_key(text if boxed is None else boxed) or None


def sample_sizes(n: int) -> list[int]:
    """The k of which metrics are computed for n samples: 1, 2, 4, ... and n itself."""
    return sorted({1, n, *(2**power for power in range(n.bit_length()) if 2**power <= n)})


def standard_metrics(
    results: Results,
    *,
    n_samples_per_prompt: int,
    success_threshold: float = SUCCESS_THRESHOLD,
    answer_fn: AnswerFn = answer_of,
    ks: Iterable[int] | None = None,
) -> dict[str, float]:
    """pass@k, pass^k, avg@k and majority@k with their intervals, and the counts; the module says under which keys.

    avg@k is given for k = n only: as an estimate from n samples it is the same for every k.

    Args:
        results: All samples, dropped ones included.
        n_samples_per_prompt: How many samples each prompt was to have.
        success_threshold: The least reward of a success.
        answer_fn: What a sample answered.
        ks: Which k; by default those of `sample_sizes`.
    """
    n = n_samples_per_prompt
    scored = scores(results, success_threshold=success_threshold)
    finished = sum(sample.is_finished for samples in results.values() for sample in samples)
    counted = sum(len(row) for row in scored.values())
    dropped = len(results) * n - finished
    metrics: dict[str, float] = {
        "prompts": float(len(results)),
        "samples": float(finished),
        "dropped_samples": float(dropped),
        "errored_samples": float(sum(score.sample.reward is None for row in scored.values() for score in row)),
        "unscored_samples": float(finished - counted),
    }
    rewards = [[score.reward for score in row] for row in scored.values()]
    successes = [[score.is_success for score in row] for row in scored.values()]
    answers = [[answer_fn(score.sample) for score in row] for row in scored.values()]
    # What the numbers would be if the dropped samples had been sampled and had failed; nothing if there are none.
    missing = [max(0, n - sum(sample.is_finished for sample in samples)) for samples in results.values()]
    worst_successes = [row + [False] * gap for row, gap in zip(successes, missing, strict=True)] if dropped else []
    worst_rewards = [row + [0.0] * gap for row, gap in zip(rewards, missing, strict=True)] if dropped else []
    worst_answers = [row + [None] * gap for row, gap in zip(answers, missing, strict=True)] if dropped else []

    def add(
        name: str, values: Sequence[float], worst: Sequence[float], *, scale: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        metrics[f"{name}_prompts"] = float(len(values))
        metrics[f"{name}_dropped_prompts"] = float(len(results) - len(values))
        if len(values):
            metrics.update(interval_metrics(name, mean_over_prompts(values, scale=scale)))
        if len(worst):
            metrics[f"{name}_if_dropped_failed"] = float(np.mean(worst))

    for k in sorted(set(ks)) if ks is not None else sample_sizes(n):
        add(f"pass@{k}", *(_by_prompt(pass_at_k, rows, k) for rows in (successes, worst_successes)))
        if k > 1:  # for one sample, both of these are pass@1
            add(f"pass^{k}", *(_by_prompt(pass_hat_k, rows, k) for rows in (successes, worst_successes)))
            add(
                f"majority@{k}",
                [majority_at_k(a, s, k) for a, s in zip(answers, successes, strict=True) if len(a) >= k],
                [majority_at_k(a, s, k) for a, s in zip(worst_answers, worst_successes, strict=True) if len(a) >= k],
            )
    add(
        f"avg@{n}",
        [float(np.mean(row)) for row in rewards if row],
        [float(np.mean(row)) for row in worst_rewards if row],
        scale=reward_scale(rewards),
    )
    return metrics


@dataclass(frozen=True)
class Score:
    """What a sample counts as.

    Attributes:
        sample: The sample.
        reward: Its reward, or that of an error.
        is_success: Whether it is a success.
    """

    sample: EvalSample
    reward: float
    is_success: bool


def scores(results: Results, *, success_threshold: float) -> dict[str, list[Score]]:
    """What the samples of each prompt count as; dropped and unscored ones are left out.

    Once anything has a reward, no finished sample is unscored: a sample without one has escaped its judge.
    """
    finished = {prompt: [sample for sample in samples if sample.is_finished] for prompt, samples in results.items()}
    rewards = [sample.reward for samples in finished.values() for sample in samples if sample.reward is not None]
    error = min([0.0, *rewards])

    def score(sample: EvalSample) -> Score:
        if sample.reward is None:
            return Score(sample, error, False)
        return Score(sample, sample.reward, sample.reward >= success_threshold)

    return {
        prompt: [score(sample) for sample in samples if rewards or sample.is_errored]
        for prompt, samples in finished.items()
    }


def reward_scale(rewards: Iterable[Sequence[float]]) -> tuple[float, float]:
    """The scale that rewards by prompt are on: 0 ... 1, wider where they are outside of it."""
    seen = [reward for row in rewards for reward in row]
    return min([0.0, *seen]), max([1.0, *seen])


def interval_metrics(name: str, interval: Interval) -> dict[str, float]:
    """An interval as flat floats."""
    ends = {f"{name}_low": interval.low, f"{name}_high": interval.high}
    return {name: interval.value, **{key: end for key, end in ends.items() if end is not None}}


def _by_prompt(function: Callable[..., np.ndarray], rows: Sequence[Sequence[bool]], k: int) -> Sequence[float]:
    usable = [row for row in rows if len(row) >= k]
    if not usable:
        return []
    values: list[float] = function([len(row) for row in usable], [sum(row) for row in usable], k).tolist()
    return values
