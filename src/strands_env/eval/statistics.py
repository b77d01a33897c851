"""Estimates of how good a policy is, from several samples of each prompt, with their uncertainty.

`n` samples of a prompt, `c` of them successful:
- pass@k, the chance that at least one of k samples is: 1 - C(n-c, k) / C(n, k), unbiased (Chen et al. 2021,
  arXiv 2107.03374, equation 1);
- pass^k, the chance that all of k samples are: C(c, k) / C(n, k), unbiased (Yao et al. 2024, arXiv 2406.12045);
- avg@k: the mean reward of k samples;
- majority@k: the chance that the answer that most of k samples give is right, ties broken evenly (Wang et al. 2022,
  arXiv 2203.11171).

All are means over prompts. Samples of one prompt resemble each other, so the unit of an interval is the prompt, however
many samples it has. `tests/support/interval_coverage.py` measures how often intervals hold the truth.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

SEED = 0
_MOST_SUBSETS = 2_000


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    Attributes:
        value: The estimate, the mean over prompts.
        low: Lower end; None for fewer than two prompts, which tell nothing of how prompts vary.
        high: Upper end; None likewise.
        prompts: How many prompts it is the mean of.
    """

    value: float
    low: float | None
    high: float | None
    prompts: int


def pass_at_k(n: npt.ArrayLike, c: npt.ArrayLike, k: int) -> npt.NDArray[np.float64]:
    """The chance that at least one of k samples succeeds, by prompt.

    Args:
        n: Samples of each prompt, shape (P,), each at least k.
        c: Successes of each prompt, shape (P,).
        k: At least 1.

    Raises:
        ValueError: Some prompt has fewer than k samples, or more successes than samples.
    """
    samples, successes = _counts(n, c, k)
    return 1.0 - _chance_of_drawing_only(samples - successes, samples, k)


def pass_hat_k(n: npt.ArrayLike, c: npt.ArrayLike, k: int) -> npt.NDArray[np.float64]:
    """The chance that all of k samples succeed, by prompt; arguments and errors as in `pass_at_k`."""
    samples, successes = _counts(n, c, k)
    return _chance_of_drawing_only(successes, samples, k)


def majority_at_k(answers: Sequence[Hashable | None], successes: Sequence[bool], k: int, *, seed: int = SEED) -> float:
    """The chance that the most frequent answer among k of one prompt's samples is right.

    All subsets of k samples are counted if there are at most 2,000, else 2,000 random ones. Equally frequent answers
    share the vote; a sample without an answer has none, and where nobody votes the prompt is lost.

    Args:
        answers: What each sample answered, shape (n,); None for no answer.
        successes: Whether it was right, shape (n,).
        k: At least 1.
        seed: Of the random subsets.

    Raises:
        ValueError: There are fewer than k samples, or not as many answers as successes.
    """
    n = len(answers)
    if len(successes) != n or not 1 <= k <= n:
        raise ValueError(f"{n} answers, {len(successes)} successes, k={k}")
    columns = {answer: column for column, answer in enumerate(dict.fromkeys(one for one in answers if one is not None))}
    if not columns:
        return 0.0
    given = np.zeros((n, len(columns)))  # which sample gave which answer
    for row, answer in enumerate(answers):
        if answer is not None:
            given[row, columns[answer]] = 1.0
    chosen = _subsets(n, k, seed)
    votes = chosen @ given
    # By answer and not by sample: a judge that was of two minds about one answer counts as such.
    right = chosen @ (given * np.asarray(successes, dtype=np.float64)[:, None])
    won = (votes == votes.max(axis=1, keepdims=True)) & (votes > 0)
    shares = np.divide(right, votes, out=np.zeros_like(right), where=votes > 0)
    return float(((shares * won).sum(axis=1) / np.maximum(won.sum(axis=1), 1)).mean())


def mean_over_prompts(
    values: npt.ArrayLike, *, scale: tuple[float, float] = (0.0, 1.0), confidence: float = 0.95
) -> Interval:
    """The mean over prompts with its confidence interval.

    Args:
        values: One per prompt, shape (P,), at least one.
        scale: The least and the greatest value that a prompt can have; values outside of it widen it.
        confidence: How often the interval is to hold the truth.

    Raises:
        ValueError: There are no values.
    """
    data = np.asarray(values, dtype=np.float64)
    if not data.size:
        raise ValueError("the mean of no prompts")
    value = float(data.mean())
    if data.size < 2:
        return Interval(value, None, None, data.size)
    low, high = mean_bounds(data, scale=(min(scale[0], data.min()), max(scale[1], data.max())), confidence=confidence)
    # The mean of equal numbers is off by a rounding error, and a value of 1.0 must not be above its interval.
    return Interval(value, min(float(low), value), max(float(high), value), data.size)


def mean_bounds(
    values: npt.NDArray[np.float64], *, scale: tuple[float, float], confidence: float = 0.95
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The ends of confidence intervals of means of bounded values.

    Each end is that of Student's t interval with one more value, the worst of the scale for the lower end and the best
    for the upper one. Clopper and Pearson count one more failure or success for the same reason: what was not seen
    may still be there, so values that are all equal have an interval of some width, too.

    Args:
        values: Shape (..., P), P at least 1.
        scale: The least and the greatest value possible.
        confidence: How often an interval is to hold the truth.

    Returns:
        The lower and the upper ends, each of shape (...).
    """
    count = values.shape[-1] + 1
    reach = stdtrit(count - 1, (1 + confidence) / 2) / np.sqrt(count)
    ends = []
    for more, sign in ((scale[0], -1.0), (scale[1], 1.0)):
        # By moments about the added value, for copies of large arrays are slow.
        shifted = values - more
        mean = shifted.sum(axis=-1) / count
        variance = np.maximum((shifted**2).sum(axis=-1) - count * mean**2, 0.0) / (count - 1)
        ends.append(np.clip(more + mean + sign * reach * np.sqrt(variance), *scale))
    return ends[0], ends[1]


def _counts(n: npt.ArrayLike, c: npt.ArrayLike, k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    samples, successes = np.atleast_1d(np.asarray(n, dtype=np.int64)), np.atleast_1d(np.asarray(c, dtype=np.int64))
    if k < 1 or (samples < k).any():
        raise ValueError(f"k={k} needs at least as many samples of every prompt, and the fewest are {samples.min()}")
    if samples.shape != successes.shape or (successes < 0).any() or (successes > samples).any():
        raise ValueError("successes are between 0 and the number of samples, one number for each prompt")
    return samples, successes


def _chance_of_drawing_only(
    kind: npt.NDArray[np.int64], samples: npt.NDArray[np.int64], k: int
) -> npt.NDArray[np.float64]:
    """C(kind, k) / C(samples, k), as a product that neither over- nor underflows."""
    drawn = np.arange(k)
    factors = np.maximum(kind[:, None] - drawn, 0) / (samples[:, None] - drawn)
    return np.asarray(factors.prod(axis=1), dtype=np.float64)


@functools.lru_cache(maxsize=16)
def _subsets(n: int, k: int, seed: int) -> npt.NDArray[np.float64]:
    """Which samples are drawn: one row per draw, 1 in the columns of its samples."""
    if math.comb(n, k) <= _MOST_SUBSETS:
        drawn = np.array(list(itertools.combinations(range(n), k)))
    else:
        drawn = np.argsort(np.random.default_rng(seed).random((_MOST_SUBSETS, n)), axis=1)[:, :k]
    chosen = np.zeros((len(drawn), n))
    np.put_along_axis(chosen, drawn, 1.0, axis=1)
    return chosen
