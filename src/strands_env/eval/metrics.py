"""Metrics of an evaluation: a flat dictionary of floats, with confidence intervals and counts.

`standard_metrics` documents the keys. All metrics are means over prompts. Samples of one prompt resemble each other, so
the unit of an interval is the prompt, however many samples it has. `tests/unit/env/test_eval.py` measures the coverage
of the intervals.

Two evaluations of the same prompts are compared prompt by prompt. The difficulty of a prompt affects both and cancels
out, so the interval of the difference is much narrower than the intervals of the two values.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from strands_sglang import terminal
from strands_sglang.shown import counted, one_line
from strands_sglang.terminal import wrapped

from ..rewards import last_boxed, value_key
from .checkpoint import EvalSample, Results, Run, flat

SEED = 0
_MAX_SUBSETS = 2_000

MetricFn = Callable[[Results], Mapping[str, float]]
"""A function that computes additional metrics from all samples."""

AnswerFn = Callable[[EvalSample], Hashable | None]
"""A function that returns what a sample answered, for majority votes; None for no answer."""

SUCCESS_THRESHOLD = 1.0
"""Default of the least reward of a success."""

_MAX_SHOWN = 5
_MOST_CHARS = 60
"""Most tasks that a comparison names, and most causes of failures."""

_NUMBERS = re.compile(r"(?<![\d.:])(?<!HTTP )(?<!code )\d+(\.\d+)*")
"""Numbers that do not name a cause, as ports, HTTP statuses and exit codes do."""

_NO_ANSWER = ("no_answer", "not_boxed", "no_match")
"""Verdicts of `strands_env.rewards` on episodes without an answer."""


def answer_of(sample: EvalSample) -> str | None:
    r"""Return what a sample answered, for majority votes.

    The answer is `extracted` or `answer` of the reward's `info` (as `MathReward` sets it), else the last `\boxed{...}`
    of the response, else the whole response. Numbers and lists are compared by value (`1/2`, `0.5` and `0.50` are one
    answer), other text by its words. All answers that the reward found correct are one answer.

    Args:
        sample: A finished sample.

    Returns:
        A key that is equal for equal answers, or None if the reward's verdict is that there is no answer.
    """
    info = {} if sample.step_result.reward is None else sample.step_result.reward.info
    if info.get("verdict") in _NO_ANSWER:
        return None
    truths = info.get("ground_truth")
    truth = truths[0] if isinstance(truths, list) and truths else truths  # several answers may be right
    if info.get("verdict") == "correct" and isinstance(truth, str):
        return _key_of(truth)
    for name in ("extracted", "answer"):
        if info.get(name) is not None:
            return _key_of(str(info[name]))
    text = sample.step_result.observation.final_response
    if text is None:
        return None
    boxed = last_boxed(text)
    return _key_of(text if boxed is None else boxed) or None


# Milliseconds for a long response. The same ones are asked for again by a page, and by each look at a run.
_key_of = functools.lru_cache(maxsize=1 << 14)(value_key)


def sample_sizes(n: int) -> list[int]:
    """Return the k for which metrics of n samples are computed: 1, 2, 4, ... and n itself."""
    return sorted({1, n, *(2**power for power in range(n.bit_length()) if 2**power <= n)})


def standard_metrics(
    results: Results,
    *,
    n_samples_per_prompt: int,
    success_threshold: float = SUCCESS_THRESHOLD,
    answer_fn: AnswerFn = answer_of,
    ks: Iterable[int] | None = None,
) -> dict[str, float]:
    """Compute the standard metrics with their confidence intervals, and the counts.

    Each metric is a mean over prompts. For a prompt with n samples, c of them successful:

    - `pass@k`: the probability that at least one of k samples succeeds, 1 - C(n-c, k) / C(n, k), unbiased (Chen et al.
      2021, arXiv 2107.03374, equation 1).
    - `pass^k`: the probability that all of k samples succeed, C(c, k) / C(n, k), unbiased (Yao et al. 2024,
      arXiv 2406.12045).
    - `majority@k`: the probability that the most frequent answer of k samples is right, with ties broken evenly (Wang
      et al. 2022, arXiv 2203.11171).
    - `avg@n`: the mean reward. It is reported for k = n only, since the estimate is the same for every k.

    Each metric, such as `pass@4`, comes with

    - `pass@4_low` and `pass@4_high`: its 95% confidence interval over prompts; only with two prompts or more.
    - `pass@4_prompts` and `pass@4_dropped_prompts`: how many prompts it uses, and how many have too few samples for it.
    - `pass@4_if_dropped_failed`: its value if every dropped sample had failed with reward 0; only if samples were
      dropped, and the finished ones have rewards. If it is far from the value, the value says little.
    - `pass@4_if_dropped_failed_prompts`: how many prompts that uses: also those with enough samples only if the dropped
      ones count.

    In 20,000 simulated evaluations per setting (5 to 500 prompts, 1 or 8 samples, success rates of 0.5 to 0.99, equal
    or different prompts), the interval contains the true value in at least 90% of them. It assumes rewards between 0
    and 1, or in the range of the rewards that were seen if that is wider.

    The counts are

    - `prompts`, and `samples`: finished samples.
    - `waiting_samples`: samples that have not ended yet, or were never started.
    - `dropped_samples`: samples whose infrastructure failed. Like waiting ones, they are in no metric.
    - `errored_samples`: finished samples without a reward because something else failed. They count as failures with a
      reward of 0, or with the lowest reward of the evaluation if that is less.
    - `unscored_samples`: finished samples of an evaluation without any reward. They are in no metric.

    Args:
        results: All samples, dropped ones included.
        n_samples_per_prompt: Intended number of samples of each prompt.
        success_threshold: Minimum reward of a success.
        answer_fn: Function that returns what a sample answered.
        ks: Values of k; None for those of `sample_sizes`.

    Returns:
        Values by key. Metrics without any usable prompt have no value.
    """
    n = n_samples_per_prompt
    scored = scores(results, success_threshold=success_threshold)
    ended = list(chain.from_iterable(results.values()))
    finished = sum(sample.is_finished for sample in ended)
    dropped = len(ended) - finished
    unscored = finished - sum(len(row) for row in scored.values())
    metrics: dict[str, float] = {
        "prompts": float(len(results)),
        "samples": float(finished),
        "waiting_samples": float(len(results) * n - len(ended)),
        "dropped_samples": float(dropped),
        "errored_samples": float(sum(score.sample.reward is None for score in chain.from_iterable(scored.values()))),
        "unscored_samples": float(unscored),
    }
    rewards = [[score.reward for score in row] for row in scored.values()]
    successes = [[score.is_success for score in row] for row in scored.values()]
    answers = [[answer_fn(score.sample) for score in row] for row in scored.values()]
    # The metrics if the dropped samples had failed; empty if there are none, or if finished samples are unscored.
    has_worst = dropped and not unscored
    missing = [sum(not sample.is_finished for sample in samples) for samples in results.values()]
    worst_successes = [row + [False] * gap for row, gap in zip(successes, missing, strict=True)] if has_worst else []
    worst_rewards = [row + [0.0] * gap for row, gap in zip(rewards, missing, strict=True)] if has_worst else []
    worst_answers = [row + [None] * gap for row, gap in zip(answers, missing, strict=True)] if has_worst else []

    def add(
        name: str, values: Sequence[float], worst: Sequence[float], *, scale: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        metrics[f"{name}_prompts"] = float(len(values))
        metrics[f"{name}_dropped_prompts"] = float(len(results) - len(values))
        if len(values):
            interval = mean_over_prompts(values, scale=scale)
            ends = {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
            metrics.update({key: end for key, end in ends.items() if end is not None})
        if len(worst):
            metrics[f"{name}_if_dropped_failed"] = float(np.mean(worst))
            metrics[f"{name}_if_dropped_failed_prompts"] = float(len(worst))

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
    """A sample with the reward for which it counts.

    Attributes:
        sample: The sample.
        reward: Its reward; for an errored sample 0, or the lowest reward of the evaluation, or of the two that are
            compared, if that is less.
        is_success: Whether its reward reaches the success threshold.
    """

    sample: EvalSample
    reward: float
    is_success: bool


def scores(results: Results, *, success_threshold: float, least: float = 0.0) -> dict[str, list[Score]]:
    """Score the samples of each prompt, without dropped and unscored ones.

    If any sample has a reward, no finished sample is unscored: without a reward it counts as errored.

    Args:
        results: All samples.
        success_threshold: Minimum reward of a success.
        least: Reward of an errored sample, unless a sample has less.

    Returns:
        Scores by prompt id, in the order of the samples.
    """
    finished = {prompt: [sample for sample in samples if sample.is_finished] for prompt, samples in results.items()}
    samples = chain.from_iterable(finished.values())
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    error = min([least, *rewards])

    return {
        prompt: [
            Score(
                sample,
                reward=error if sample.reward is None else sample.reward,
                is_success=sample.reward is not None and sample.reward >= success_threshold,
            )
            for sample in samples
            if rewards or sample.is_errored
        ]
        for prompt, samples in finished.items()
    }


def reward_scale(rewards: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Return the range of rewards: 0 to 1, extended to rewards outside of it.

    Args:
        rewards: Rewards of each prompt.
    """
    seen = list(chain.from_iterable(rewards))
    return min([0.0, *seen]), max([1.0, *seen])


def _by_prompt(function: Callable[..., np.ndarray], rows: Sequence[Sequence[bool]], k: int) -> Sequence[float]:
    usable = [row for row in rows if len(row) >= k]
    values: list[float] = function([len(row) for row in usable], [sum(row) for row in usable], k).tolist()
    return values


# --- estimates and their uncertainty ---


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    Attributes:
        value: The estimate, a mean over prompts.
        low: Lower end; None for fewer than two prompts, which do not show how prompts vary.
        high: Upper end; None for fewer than two prompts.
        prompts: Number of prompts.
    """

    value: float
    low: float | None
    high: float | None
    prompts: int


def pass_at_k(n: npt.ArrayLike, c: npt.ArrayLike, k: int) -> npt.NDArray[np.float64]:
    """Estimate the probability that at least one of k samples succeeds, for each prompt.

    Args:
        n: Number of samples of each prompt, shape (P,), each at least k.
        c: Number of successes of each prompt, shape (P,).
        k: Number of samples drawn, at least 1.

    Returns:
        Unbiased estimates, shape (P,).

    Raises:
        ValueError: A prompt has fewer than k samples, or more successes than samples.
    """
    samples, successes = _counts(n, c, k)
    return 1.0 - _chance_of_drawing_only(samples - successes, samples, k)


def pass_hat_k(n: npt.ArrayLike, c: npt.ArrayLike, k: int) -> npt.NDArray[np.float64]:
    """Estimate the probability that all of k samples succeed, for each prompt.

    Args:
        n: Number of samples of each prompt, shape (P,), each at least k.
        c: Number of successes of each prompt, shape (P,).
        k: Number of samples drawn, at least 1.

    Returns:
        Unbiased estimates, shape (P,).

    Raises:
        ValueError: A prompt has fewer than k samples, or more successes than samples.
    """
    samples, successes = _counts(n, c, k)
    return _chance_of_drawing_only(successes, samples, k)


def majority_at_k(answers: Sequence[Hashable | None], successes: Sequence[bool], k: int, *, seed: int = SEED) -> float:
    """Estimate the probability that the most frequent answer among k samples of one prompt is right.

    All subsets of k samples are counted if there are at most 2,000, otherwise 2,000 random ones. Ties are broken
    evenly. Samples without an answer do not vote; a subset without votes counts as wrong.

    Args:
        answers: What each sample answered, shape (n,); None for no answer.
        successes: Whether each sample succeeded, shape (n,).
        k: Number of samples drawn, at least 1.
        seed: Seed of the random subsets.

    Raises:
        ValueError: There are fewer than k samples, or the numbers of answers and successes differ.
    """
    n = len(answers)
    if len(successes) != n or not 1 <= k <= n:
        raise ValueError(f"{n} answers, {len(successes)} successes, k={k}")
    columns = {
        answer: column
        for column, answer in enumerate(dict.fromkeys(answer for answer in answers if answer is not None))
    }
    if not columns:
        return 0.0
    given = np.zeros((n, len(columns)))  # 1 where a sample gave an answer
    for row, answer in enumerate(answers):
        if answer is not None:
            given[row, columns[answer]] = 1.0
    chosen = _subsets(n, k, seed)
    votes = chosen @ given
    # By answer, not by sample: a judge may have accepted and refused the same answer.
    right = chosen @ (given * np.asarray(successes, dtype=np.float64)[:, None])
    won = (votes == votes.max(axis=1, keepdims=True)) & (votes > 0)
    shares = np.divide(right, votes, out=np.zeros_like(right), where=votes > 0)
    return float(((shares * won).sum(axis=1) / np.maximum(won.sum(axis=1), 1)).mean())


def mean_over_prompts(
    values: npt.ArrayLike, *, scale: tuple[float, float] = (0.0, 1.0), confidence: float = 0.95
) -> Interval:
    """Compute the mean over prompts with its confidence interval.

    Args:
        values: One value per prompt, shape (P,), P at least 1.
        scale: Smallest and largest possible value of a prompt; extended to values outside of it.
        confidence: Intended probability that the interval contains the true value.

    Raises:
        ValueError: `values` is empty.
    """
    data = np.asarray(values, dtype=np.float64)
    if not data.size:
        raise ValueError("the mean needs at least one prompt")
    value = float(data.mean())
    if data.size < 2:
        return Interval(value, None, None, data.size)
    low, high = mean_bounds(data, scale=(min(scale[0], data.min()), max(scale[1], data.max())), confidence=confidence)
    # Because of rounding errors, the mean of equal numbers could lie outside of its interval.
    return Interval(value, min(float(low), value), max(float(high), value), data.size)


def mean_bounds(
    values: npt.NDArray[np.float64], *, scale: tuple[float, float], confidence: float = 0.95
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Compute confidence intervals for means of bounded values.

    Each end is an end of Student's t interval with one added value: the least of the scale for the lower end, and the
    greatest for the upper end. Clopper and Pearson add one failure or success for the same reason: unseen values are
    still possible. So equal values have an interval of positive width, too.

    Args:
        values: Values, shape (..., P), P at least 1.
        scale: Smallest and largest possible value.
        confidence: Intended probability that an interval contains the true mean.

    Returns:
        Lower and upper ends, each of shape (...).
    """
    count = values.shape[-1] + 1
    reach = stdtrit(count - 1, (1 + confidence) / 2) / np.sqrt(count)
    ends = []
    for more, sign in ((scale[0], -1.0), (scale[1], 1.0)):
        # By moments about the added value, because copies of large arrays are slow.
        shifted = values - more
        mean = shifted.sum(axis=-1) / count
        variance = np.maximum((shifted**2).sum(axis=-1) - count * mean**2, 0.0) / (count - 1)
        ends.append(np.clip(more + mean + sign * reach * np.sqrt(variance), *scale))
    return ends[0], ends[1]


def _counts(n: npt.ArrayLike, c: npt.ArrayLike, k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    samples, successes = np.atleast_1d(np.asarray(n, dtype=np.int64)), np.atleast_1d(np.asarray(c, dtype=np.int64))
    if k < 1 or (samples < k).any():
        raise ValueError(f"k={k} needs at least as many samples of every prompt, but one has {samples.min()}")
    if samples.shape != successes.shape or (successes < 0).any() or (successes > samples).any():
        raise ValueError("each prompt needs one number of successes, between 0 and its number of samples")
    return samples, successes


def _chance_of_drawing_only(
    kind: npt.NDArray[np.int64], samples: npt.NDArray[np.int64], k: int
) -> npt.NDArray[np.float64]:
    """Compute C(kind, k) / C(samples, k) as a product that neither overflows nor underflows."""
    drawn = np.arange(k)
    factors = np.maximum(kind[:, None] - drawn, 0) / (samples[:, None] - drawn)
    return np.asarray(factors.prod(axis=1), dtype=np.float64)


@functools.lru_cache(maxsize=16)
def _subsets(n: int, k: int, seed: int) -> npt.NDArray[np.float64]:
    """Return which samples are drawn: one row per draw, with 1 in the columns of its samples."""
    if math.comb(n, k) <= _MAX_SUBSETS:
        drawn = np.array(list(itertools.combinations(range(n), k)))
    else:
        drawn = np.argsort(np.random.default_rng(seed).random((_MAX_SUBSETS, n)), axis=1)[:, :k]
    chosen = np.zeros((len(drawn), n))
    np.put_along_axis(chosen, drawn, 1.0, axis=1)
    return chosen


# --- comparing two evaluations, and formatting tables ---


@dataclass(frozen=True)
class Difference:
    """The difference of two evaluations in one metric.

    Attributes:
        name: Name of the metric.
        first: Value of the first evaluation over the common prompts.
        second: Value of the second evaluation over the common prompts.
        interval: Mean difference over prompts, second minus first, with its confidence interval.
        better: Number of prompts on which the second evaluation has more.
        worse: Number of prompts on which the second evaluation has less.
        prompts: Number of prompts with enough samples in both evaluations.
    """

    name: str
    first: float
    second: float
    interval: Interval
    better: int
    worse: int
    prompts: int


@dataclass(frozen=True)
class TaskDifference:
    """The difference of two evaluations in one prompt, over its scored samples.

    Attributes:
        prompt: Id of the prompt in the first evaluation.
        first_reward: Mean reward in the first evaluation.
        second_reward: Mean reward in the second evaluation.
        first_success: Share of successes in the first evaluation.
        second_success: Share of successes in the second evaluation.
    """

    prompt: str
    first_reward: float
    second_reward: float
    first_success: float
    second_success: float


@dataclass(frozen=True)
class Comparison:
    """A comparison of two evaluations, by the prompts that both have.

    Attributes:
        common: Number of prompts with scored samples in both.
        only_first: Number of prompts with scored samples only in the first.
        only_second: Number of prompts with scored samples only in the second.
        differences: Differences of `pass@1`, of `pass@k` for each k of both, and of the mean reward.
        tasks: Differences of all common prompts, in their order.
        ends: For each outcome, how many finished samples of the common prompts have it in the first and in the second.
        configuration: What differs in the configurations, or else in the environments: values by name.
    """

    common: int
    only_first: int
    only_second: int
    differences: tuple[Difference, ...]
    tasks: tuple[TaskDifference, ...]
    ends: dict[str, tuple[int, int]]
    configuration: dict[str, tuple[Any, Any]]


def compare(
    first: tuple[Run, Results], second: tuple[Run, Results], *, success_threshold: float = SUCCESS_THRESHOLD
) -> Comparison:
    """Compare two evaluations, prompt by prompt. Prompts match if their whole content is equal.

    Args:
        first: First evaluation, as returned by [`read_results`][strands_env.eval.read_results].
        second: Second evaluation.
        success_threshold: Minimum reward of a success.

    Raises:
        ValueError: The evaluations have no prompt with scored samples in common.
    """
    scored = []  # for each, the scores of the prompts that have any, by the digest of their content
    names: dict[str, str] = {}
    rows = chain(first[1].values(), second[1].values())
    rewards = [sample.reward or 0.0 for sample in chain.from_iterable(rows)]
    least = min([0.0, *rewards])
    for run, results in (first, second):
        by_prompt = scores(results, success_threshold=success_threshold, least=least)
        scored.append({run.prompts[prompt]: row for prompt, row in by_prompt.items() if row})
        names = {**{content: prompt for prompt, content in run.prompts.items()}, **names}
    common = [content for content in scored[0] if content in scored[1]]
    if not common:
        raise ValueError("the evaluations have no prompt with scored samples in common")
    least, most = reward_scale(
        [score.reward for score in row] for row in chain.from_iterable(evaluation.values() for evaluation in scored)
    )
    successes, means = (
        [
            np.array([float(np.mean([getattr(score, name) for score in evaluation[content]])) for content in common])
            for evaluation in scored
        ]
        for name in ("is_success", "reward")
    )
    shared = set(sample_sizes(first[0].n_samples_per_prompt)) & set(sample_sizes(second[0].n_samples_per_prompt))
    measured = {"pass@1": successes}
    for k in sorted(shared - {1}):
        enough = [content for content in common if all(len(evaluation[content]) >= k for evaluation in scored)]
        rows_of = [[[score.is_success for score in evaluation[content]] for content in enough] for evaluation in scored]
        if enough:
            measured[f"pass@{k}"] = [pass_at_k(list(map(len, rows)), list(map(sum, rows)), k) for rows in rows_of]
    differences = []
    for name, (a, b) in {**measured, "mean reward": means}.items():
        difference = b - a
        reach = most - least if name == "mean reward" else 1.0
        differences.append(
            Difference(
                name,
                float(a.mean()),
                float(b.mean()),
                mean_over_prompts(difference, scale=(-reach, reach)),
                int((difference > 0).sum()),
                int((difference < 0).sum()),
                len(difference),
            )
        )
    counts = [
        Counter(
            score.sample.step_result.termination_reason.value
            for score in chain.from_iterable(evaluation[content] for content in common)
        )
        for evaluation in scored
    ]
    return Comparison(
        common=len(common),
        only_first=len(scored[0]) - len(common),
        only_second=len(scored[1]) - len(common),
        differences=tuple(differences),
        tasks=tuple(
            TaskDifference(names[content], *map(float, numbers))
            for content, *numbers in zip(common, *means, *successes, strict=True)
        ),
        ends={name: (counts[0][name], counts[1][name]) for name in {**counts[0], **counts[1]}},
        configuration=_configuration(first, second),
    )


def _configuration(first: tuple[Run, Results], second: tuple[Run, Results]) -> dict[str, tuple[Any, Any]]:
    """What differs in two configurations; if nothing does, in the environments of their first samples."""
    facts = [flat(run.facts) for run, _ in (first, second)]
    if facts[0] == facts[1]:
        samples = [list(chain.from_iterable(results.values())) for _, results in (first, second)]
        environments = [next((sample.environment for sample in row if sample.environment), None) for row in samples]
        if None not in environments:
            facts = [flat({"environment": environment}) for environment in environments]
    return {
        name: (facts[0].get(name), facts[1].get(name))
        for name in {**facts[0], **facts[1]}
        if facts[0].get(name) != facts[1].get(name)
    }


SAMPLE_COUNTS = {
    "samples": "done",
    "running_samples": "running",
    "queued_samples": "waiting",
    "waiting_samples": "not run",
    "dropped_samples": "dropped",
    "errored_samples": "errored",
    "unscored_samples": "unscored",
}
"""What each count of samples is called wherever it is shown. `watch` alone knows the running and queued ones."""


def interval_text(low: float | None, high: float | None, sign: str = "-") -> str:
    """Format a confidence interval, as in 0.241 to 1.000.

    Args:
        low: Lower end; None if it is not known.
        high: Upper end; None if it is not known.
        sign: "+" to give positive numbers a sign, too.
    """
    return "-" if low is None or high is None else f"{low:{sign}.3f} to {high:{sign}.3f}"


def headline(metrics: Mapping[str, float]) -> str:
    """Format `pass@1` with its interval, if it says anything, and its prompts, if not all have a score; empty if none.

    Args:
        metrics: Return value of `Evaluator.compute_metrics`.
    """
    if "pass@1" not in metrics:
        return ""
    text, used = f"pass@1 {metrics['pass@1']:.3f}", metrics["pass@1_prompts"]
    low, high = metrics.get("pass@1_low", 0.0), metrics.get("pass@1_high", 1.0)
    if low > 0 or high < 1:
        text += f", {interval_text(low, high)}"
    if used < metrics["prompts"]:
        text += f" ({used:.0f} of {metrics['prompts']:.0f} prompts)"
    return text


def metric_names(metrics: Mapping[str, float]) -> list[str]:
    """Return the names of the metrics that have an interval and counts."""
    return [
        name.removesuffix("_prompts")
        for name in metrics
        if name.endswith("_prompts") and not name.endswith(("_dropped_prompts", "_failed_prompts"))
    ]


def metric_rows(metrics: Mapping[str, float]) -> list[list[str]]:
    """Format metrics as rows of a table, below a row with the names of the columns.

    Args:
        metrics: Return value of `Evaluator.compute_metrics`.
    """
    rows = [["metric", "value", "95 % interval", "prompts", "if dropped failed"]]
    for name in metric_names(metrics):
        value, low, high = (metrics.get(f"{name}{ending}") for ending in ("", "_low", "_high"))
        worst = metrics.get(f"{name}_if_dropped_failed")
        used = metrics.get(f"{name}_if_dropped_failed_prompts")
        others = "" if used in (None, metrics[f"{name}_prompts"]) else f", {used:.0f} prompts"
        rows.append(
            [
                name,
                "-" if value is None else f"{value:.3f}",
                interval_text(low, high),
                f"{metrics[f'{name}_prompts']:.0f}",
                "-" if worst is None else f"{worst:.3f}{others}",
            ]
        )
    return rows if any(row[-1] != "-" for row in rows[1:]) else [row[:-1] for row in rows]


def metric_lines(metrics: Mapping[str, float]) -> list[str]:
    """Format metrics as a table with one row per metric, and the counts below it.

    Args:
        metrics: Return value of `Evaluator.compute_metrics`.
    """
    names = metric_names(metrics)
    ends = ("", "_low", "_high", "_prompts", "_dropped_prompts", "_if_dropped_failed", "_if_dropped_failed_prompts")
    of_names = {f"{name}{end}" for name, end in product(names, ends)}
    others = [
        f"{name}: {value:g}" for name, value in metrics.items() if name not in {*of_names, "prompts", *SAMPLE_COUNTS}
    ]
    sample_counts = {name: f"{metrics[name]:.0f} {word}" for name, word in SAMPLE_COUNTS.items() if metrics.get(name)}
    for name in ("errored_samples", "unscored_samples"):  # of those that are done
        if name in sample_counts:
            sample_counts["samples"] += f" ({sample_counts.pop(name)})"
    prompts = int(metrics["prompts"])
    counts = wrapped(f"counts: {', '.join([counted(prompts, 'prompt'), *sample_counts.values()])}") if prompts else []
    return [*table_lines(metric_rows(metrics)), "", *counts, *others]


def end_lines(results: Results) -> list[str]:
    """Format how many episodes had each outcome, and the causes of dropped and errored samples, in 80 columns.

    Args:
        results: All samples.
    """
    samples = list(chain.from_iterable(results.values()))
    ends = Counter(sample.step_result.termination_reason.value for sample in samples)
    lines = wrapped(f"ends: {', '.join(f'{count} {name}' for name, count in ends.most_common())}") if ends else []
    return [*lines, *chain.from_iterable(wrapped(f"{what}: {causes}") for what, causes in failure_causes(samples))]


def failure_causes(samples: Sequence[EvalSample]) -> Iterator[tuple[str, str]]:
    """Yield "dropped" or "errored" with a cause and how many samples have it, the frequent ones first.

    Texts that differ in their numbers only, such as a time, tell of one cause.

    Args:
        samples: All samples.
    """
    for what, affected in (
        ("dropped", [sample for sample in samples if not sample.is_finished]),
        ("errored", [sample for sample in samples if sample.is_errored]),
    ):
        causes: dict[str, list[str]] = {}
        for cause in map(cause_of, affected):
            causes.setdefault(_NUMBERS.sub("#", cause), []).append(cause)
        for same in sorted(causes.values(), key=len, reverse=True)[:_MAX_SHOWN]:
            yield what, f"{len(same)} x {shortened(same[0])}"
        if (others := len(causes) - _MAX_SHOWN) > 0:
            yield what, counted(others, "other cause")


def cause_of(sample: EvalSample) -> str:
    """Why a sample was dropped or errored."""
    result = sample.step_result
    return result.error or result.reward_error or result.termination_reason.value


def shortened(text: str) -> str:
    """A text in one line, without the words in its middle if it is long: errors end with what matters."""
    line = one_line(text)
    first, last = line[:100], line[-47:]
    return line if len(line) <= 150 else f"{first.rpartition(' ')[0] or first} … {last.partition(' ')[2] or last}"


class Prices(NamedTuple):
    """What a million tokens cost. The cached ones are among those of a prompt, at a price of their own."""

    prompt: float
    cached: float
    sampled: float

    def cost_of(self, sample: EvalSample) -> float | None:
        """Return what the tokens of a sample cost; None if they were not counted."""
        counts: list[Any] = [sample.step_result.observation.metrics.get(name) for name in TOKEN_METRICS]
        if not all(type(count) is int for count in counts):
            return None
        prompt, cached, sampled = counts
        return (self.prompt * (prompt - cached) + self.cached * cached + self.sampled * sampled) / 1e6


TOKEN_METRICS = ("input_tokens", "cached_tokens", "sampled_tokens")


def costs(results: Results, prices: Prices, *, success_threshold: float) -> dict[str, float]:
    """Compute what finished samples cost: in all, per sample, and per prompt that at least one of them solves.

    Args:
        results: All samples.
        prices: What tokens cost.
        success_threshold: Minimum reward of a success.

    Returns:
        `cost`, and as far as there are any, `cost_per_sample` and `cost_per_solved_prompt`.
    """
    known = [prices.cost_of(sample) for sample in chain.from_iterable(results.values()) if sample.is_finished]
    spent = [cost for cost in known if cost is not None]
    if not spent:
        return {}
    rows = scores(results, success_threshold=success_threshold).values()
    solved = sum(any(score.is_success for score in row) for row in rows)
    total = sum(spent)
    found = {"cost": total, "cost_per_sample": total / len(spent)}
    return {**found, "cost_per_solved_prompt": total / solved} if solved else found


def difference_rows(comparison: Comparison) -> list[list[str]]:
    """Format the differences of a comparison as rows of a table, below a row with the names of the columns.

    Args:
        comparison: Return value of `compare`.
    """
    rows = [["metric", "A", "B", "B - A", "95 % interval", "better", "worse", "prompts"]]
    for difference in comparison.differences:
        rows.append(
            [
                difference.name,
                f"{difference.first:.3f}",
                f"{difference.second:.3f}",
                f"{difference.interval.value:+.3f}",
                interval_text(difference.interval.low, difference.interval.high, "+"),
                str(difference.better),
                str(difference.worse),
                str(difference.prompts),
            ]
        )
    return rows


def comparison_lines(comparison: Comparison) -> list[str]:
    """Format a comparison as a table.

    Args:
        comparison: Return value of `compare`.
    """
    lines = [*table_lines(difference_rows(comparison)), ""]
    only = comparison.only_first or comparison.only_second
    lines += wrapped(
        f"prompts in both: {comparison.common}, in A only: {comparison.only_first}, in B only: {comparison.only_second}"
        f"{'; only those in both are compared' if only else ''}"
    )
    changed = sorted(comparison.tasks, key=lambda task: task.first_reward - task.second_reward)
    for title, tasks in (
        ("better", [task for task in changed if task.second_reward > task.first_reward]),
        ("worse", [task for task in reversed(changed) if task.second_reward < task.first_reward]),
    ):
        shown = [f"{task.prompt} {task.first_reward:.4g} -> {task.second_reward:.4g}" for task in tasks[:_MAX_SHOWN]]
        shown += [f"{len(tasks) - _MAX_SHOWN} more"] if len(tasks) > _MAX_SHOWN else []
        lines += wrapped(f"{title}: {', '.join(shown)}") if shown else []
    moved = [f"{name} {first} -> {second}" for name, (first, second) in comparison.ends.items() if first != second]
    lines += wrapped(f"ends: {', '.join(moved)}") if moved else []
    for name, (first, second) in comparison.configuration.items():
        lines += wrapped(f"{name}: {ending(first)} -> {ending(second)}")
    return lines


def ending(value: Any) -> str:
    """Return a setting, or its end: two paths differ there."""
    text = repr(value)
    return text if len(text) <= _MOST_CHARS else f"…{text[1 - _MOST_CHARS :]}"


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as aligned columns, the first left-aligned, the others right-aligned.

    Columns without a value are left out, and the last ones for which the terminal has no room.

    Args:
        rows: Cells of each row.
    """
    names, *others = (list(column) for column in zip(*rows, strict=True))
    wide = max(map(len, names))
    lines = [name.ljust(wide) for name in names]
    for column in others:
        if len(column) > 1 and set(column[1:]) == {"-"}:
            continue
        wide = max(map(len, column))
        if len(lines[0]) + 2 + wide > terminal.width():
            break
        lines = [f"{line}  {cell:>{wide}}" for line, cell in zip(lines, column, strict=True)]
    return lines
