"""How often the intervals of evaluations hold the truth: simulated evaluations of policies whose rates are known.

    python tests/support/interval_coverage.py [--simulations N] [--all]

A policy answers a prompt rightly with a rate that is drawn anew for each prompt, from a beta distribution with the
policy's rate as its mean. How much prompts differ is the correlation of two samples of one prompt: with 0 all prompts
are alike, with 1 a prompt is always answered rightly or never. Prints the cells with the lowest coverage.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from strands_env.eval.metrics import mean_bounds, pass_at_k

RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99)
PROMPTS = (5, 6, 8, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500)
SAMPLES = (1, 8)
CORRELATIONS = (0.0, 0.3, 1.0)
_NUMBERS_AT_ONCE = 2_000_000


@dataclass(frozen=True)
class Cell:
    """One kind of evaluation.

    Attributes:
        rate: The policy's rate of right answers.
        prompts: How many prompts it is asked.
        samples: Samples of each.
        correlation: Of two samples of one prompt.
        k: Of the pass@k that is estimated.
        gain: How much the rate of a second policy is above, for the interval of a difference; None for one policy.
    """

    rate: float
    prompts: int
    samples: int
    correlation: float
    k: int = 1
    gain: float | None = None


def grid() -> Iterator[Cell]:
    """pass@1 in every cell that the documentation speaks of."""
    for rate, prompts, samples, correlation in itertools.product(RATES, PROMPTS, SAMPLES, CORRELATIONS):
        yield Cell(rate, prompts, samples, correlation)


def further() -> Iterator[Cell]:
    """pass@k, fewer prompts, other numbers of samples, and differences of two policies."""
    for rate, prompts, correlation in itertools.product(RATES, (2, 3, 4, 5, 10, 20, 50, 100, 200), (0.1, 0.3, 0.6)):
        for samples, k in ((2, 1), (4, 1), (8, 2), (8, 4), (8, 8), (32, 1), (32, 2), (32, 16)):
            yield Cell(rate, prompts, samples, correlation, k)
    for rate, prompts, samples, correlation in itertools.product(RATES, PROMPTS, SAMPLES, CORRELATIONS):
        for gain in (0.0, (1 - rate) / 2):
            yield Cell(rate, prompts, samples, correlation, gain=gain)


def coverage(cell: Cell, simulations: int, rng: np.random.Generator) -> tuple[float, float]:
    """How often the interval holds the truth, and its mean width."""
    held, width, done = 0, 0.0, 0
    by_count = pass_at_k(np.full(cell.samples + 1, cell.samples), np.arange(cell.samples + 1), cell.k)
    while done < simulations:
        count = min(simulations - done, max(1, _NUMBERS_AT_ONCE // cell.prompts))
        values = by_count[_successes(cell, cell.rate, count, rng)]
        truth, scale = _pass_at_k_of(cell), (0.0, 1.0)
        if cell.gain is not None:
            values = by_count[_successes(cell, cell.rate + cell.gain, count, rng)] - values
            truth, scale = cell.gain, (-1.0, 1.0)
        low, high = mean_bounds(values, scale=scale)
        held += int(((low <= truth + 1e-9) & (truth - 1e-9 <= high)).sum())
        width += float((high - low).sum())
        done += count
    return held / simulations, width / simulations


def _successes(cell: Cell, rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
    shape = (count, cell.prompts)
    if cell.samples == 1 or cell.correlation == 1.0:  # of one sample the correlation changes nothing
        return rng.binomial(1, rate, shape) * cell.samples
    if cell.correlation == 0.0:
        return rng.binomial(cell.samples, rate, shape)
    strength = 1 / cell.correlation - 1
    return rng.binomial(cell.samples, rng.beta(rate * strength, (1 - rate) * strength, shape))


def _pass_at_k_of(cell: Cell) -> float:
    """1 - E[(1-p)^k], from the moments of the beta distribution."""
    if cell.correlation == 1.0:
        return cell.rate
    if cell.correlation == 0.0:
        return 1 - (1 - cell.rate) ** cell.k
    strength = 1 / cell.correlation - 1
    return 1 - math.prod(((1 - cell.rate) * strength + i) / (strength + i) for i in range(cell.k))


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulations", type=int, default=20_000)
    parser.add_argument("--all", action="store_true", help="also what is beyond the documented grid")
    given = parser.parse_args()
    for name, cells in (("grid", grid()), ("further", further())):
        if name == "further" and not given.all:
            continue
        rng, began = np.random.default_rng(0), time.perf_counter()
        found = [(*coverage(cell, given.simulations, rng), cell) for cell in cells]
        found.sort(key=lambda one: one[0])
        below = sum(one[0] < 0.9 for one in found)
        print(f"{name}: {len(found)} cells, {given.simulations:,} simulations each, {below} below 0.90; the worst:")
        for held, width, cell in found[:10]:
            print(f"  {held:.4f}  mean width {width:.3f}  {cell}")
        print(f"  mean coverage {np.mean([one[0] for one in found]):.3f}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
