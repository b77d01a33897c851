"""How good are the turn advantages of trees? A task whose values can be enumerated, and a policy that is known.

    python examples/grpo_cpu/tree_values.py [--runs 1000] [--seed 0]

An episode has up to four turns of one sampled token each: 1 goes further, 0 may end it. Prints for each way to sample
a group how far the estimated values are from the true ones, and the variance of the advantages and of the gradient, for
equal numbers of sampled tokens.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import count

from strands_sglang import Trajectory
from strands_sglang.credit import Episode, training_rows
from strands_sglang.protocol.generation import Generation
from strands_sglang.reasons import Reason
from strands_sglang.trajectory.turn import Turn, TurnStatus
from strands_sglang.trees import at_high_entropy, evenly

TURNS = 4
KINDS = ("forks", "last turns", "turns before forks")
History = tuple[int, ...]


def probability(history: History) -> float:
    """Return the policy's probability of 1."""
    return (0.6, 0.85, 0.7, 0.75)[(len(history) + 2 * sum(history)) % TURNS]


def is_over(history: History) -> bool:
    """Whether the episode has ended: after four turns, or after two zeros."""
    return len(history) == TURNS or history[-2:] == (0, 0)


def reward(history: History) -> float:
    """Return the reward of an episode."""
    return float(sum(history) >= 3 or history[:3] == (1, 0, 1))


@cache
def value(history: History) -> float:
    """Return the true value of a conversation."""
    if is_over(history):
        return reward(history)
    chance = probability(history)
    return chance * value((*history, 1)) + (1 - chance) * value((*history, 0))


@dataclass
class Sampled:
    """One episode.

    Attributes:
        actions: What its turns sampled.
        answers: The turns' generations; forks share those of their first turns.
        forked_at: Number of turns that it shares with the episode that it was forked from; None for no fork.
    """

    actions: list[int]
    answers: list[Generation]
    forked_at: int | None = None
    trajectory: Trajectory = field(init=False)

    def __post_init__(self) -> None:
        """Make the trajectory."""
        turns: list[Turn] = []
        for index, answer in enumerate(self.answers):
            parent = turns[-1] if turns else None
            turn = Turn(index, parent, Reason("first"), bytes(self.actions[:index]), {}, (), (), array("i", [2]))
            turn.generation, turn.status = answer, TurnStatus.COMMITTED
            turns.append(turn)
        self.trajectory = Trajectory.of_turns(turns)


_requests = count()


def sample(rng: random.Random, source: Sampled | None = None, turn: int = 0) -> Sampled:
    """Run an episode, or fork one before a turn."""
    actions = [] if source is None else source.actions[:turn]
    answers = [] if source is None else source.answers[:turn]
    while not is_over((*actions,)):
        chance = probability((*actions,))
        action = int(rng.random() < chance)
        logprob = math.log(chance if action else 1 - chance)
        actions.append(action)
        answers.append(Generation(array("i", [action]), array("d", [logprob]), "stop", request_id=str(next(_requests))))
    return Sampled(actions, answers, None if source is None else turn)


Policy = Callable[[Trajectory, int], list[int]]


@dataclass(frozen=True)
class Design:
    """How a group is sampled.

    Attributes:
        episodes: Number of episodes that begin with the prompt.
        policy: Chooses where each is forked; None for a flat group.
        points: Number of turns to fork at.
        forks: Number of forks at each.
    """

    episodes: int
    policy: Policy | None = None
    points: int = 1
    forks: int = 3

    def run(self, rng: random.Random) -> list[Sampled]:
        """Sample a group; an episode comes before its forks."""
        group = []
        for _ in range(self.episodes):
            first = sample(rng)
            group.append(first)
            for turn in () if self.policy is None else self.policy(first.trajectory, self.points):
                group += [sample(rng, first, turn) for _ in range(self.forks)]
        return group


DESIGNS: Mapping[str, Design] = {
    "flat group of 20": Design(20),
    "8 trees, 3 forks of each, evenly": Design(8, evenly),
    "8 trees, 3 forks of each, at high entropy": Design(8, at_high_entropy),
    "4 trees, 3 forks at every turn": Design(4, evenly, points=TURNS),
}


@dataclass
class Found:
    """What the runs of a design show.

    Attributes:
        errors: For each of `KINDS` and each run, the sum of the differences of its advantages from the true ones. A
            mean would be biased: how many turns a run has depends on the returns that the others are compared with.
        turns: For each kind, the number of turns in all runs.
        with_source: For each run, the mean error of fork points' values if the episode forked there counted, too.
        squares: For each run, the mean squared difference from the true advantage of the single turn, by token.
        gradients: For each run, the estimated policy gradient, by conversation.
        tokens: For each run, the number of sampled tokens.
    """

    errors: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    turns: Counter[str] = field(default_factory=Counter)
    with_source: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    gradients: list[dict[History, float]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def standard_errors(self, kind: str) -> float:
        """Return the mean error of a kind of turn in units of its standard error."""
        return in_standard_errors(self.errors[kind])

    @property
    def noise(self) -> float:
        """Variance of the gradient by its squared norm, times the sampled tokens of a run."""
        names = set().union(*self.gradients)
        columns = [[gradient.get(name, 0.0) for gradient in self.gradients] for name in names]
        variance = sum(map(statistics.variance, columns))
        return variance / sum(statistics.fmean(column) ** 2 for column in columns) * statistics.fmean(self.tokens)

    @property
    def cosine(self) -> float:
        """Cosine of the mean gradient and the true one."""
        truth = dict(true_gradient())
        mean = {name: statistics.fmean(own.get(name, 0.0) for own in self.gradients) for name in truth}
        product = sum(mean[name] * truth[name] for name in truth)
        return product / (math.hypot(*mean.values()) * math.hypot(*truth.values()))


def in_standard_errors(values: list[float]) -> float:
    """Return the mean of values in units of its standard error; 0 if all are 0."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) / error if error else 0.0


def true_gradient(history: History = (), reached: float = 1.0) -> Iterator[tuple[History, float]]:
    """Yield the gradient of the mean reward by the logit of each conversation."""
    if is_over(history):
        return
    chance = probability(history)
    yield history, reached * chance * (1 - chance) * (value((*history, 1)) - value((*history, 0)))
    yield from true_gradient((*history, 1), reached * chance)
    yield from true_gradient((*history, 0), reached * (1 - chance))


def study(design: Design, runs: int, seed: int) -> Found:
    """Run a design."""
    rng = random.Random(seed)
    found = Found()
    for _ in range(runs):
        group = design.run(rng)
        episodes = [Episode(one.trajectory, reward((*one.actions,)), "g", str(n)) for n, one in enumerate(group)]
        rows = training_rows(episodes, baseline="leave_one_out")
        by_kind: dict[str, list[float]] = {kind: [] for kind in KINDS}
        gradient: dict[History, float] = defaultdict(float)
        squares: list[float] = []
        points = points_of(group)
        for row in rows:
            own = group[int(row.episode)]
            for number, is_trained in enumerate(row.loss_mask[1::2]):
                if not is_trained:
                    continue
                history, action = (*own.actions[:number],), own.actions[number]
                advantage = rows.advantages[row.episode][number]
                begin, end = around(own, number, points)
                by_kind[kind_of(own, end)].append(advantage - value((*own.actions[:end],)) + value(begin))
                squares.append((advantage - value((*history, action)) + value(history)) ** 2)
                gradient[history] += advantage * (action - probability(history))
        tokens = sum(row.trained for row in rows)
        for kind, errors in by_kind.items():
            found.errors[kind].append(math.fsum(errors))
            found.turns[kind] += len(errors)
        found.with_source += errors_with_source(group)
        found.squares.append(statistics.fmean(squares))
        found.gradients.append({history: total / tokens for history, total in gradient.items()})
        found.tokens.append(tokens)
    return found


def points_of(group: list[Sampled]) -> set[str]:
    """Return the request of the last turn before each fork."""
    return {one.answers[one.forked_at - 1].request_id for one in group if one.forked_at}


def around(own: Sampled, number: int, points: set[str]) -> tuple[History, int]:
    """Return the conversation at the last fork before a turn, and the number of turns at the next fork or the end."""
    before = [at for at in range(1, number + 1) if own.answers[at - 1].request_id in points]
    after = [at for at in range(number + 1, len(own.actions)) if own.answers[at - 1].request_id in points]
    return (*own.actions[: max(before, default=0)],), min(after, default=len(own.actions))


def kind_of(own: Sampled, end: int) -> str:
    """Return the kind of a turn: of a fork, or of an episode before or after its last fork."""
    if own.forked_at is not None:
        return "forks"
    return "last turns" if end == len(own.actions) else "turns before forks"


def errors_with_source(group: list[Sampled]) -> list[float]:
    """Return the mean error of the fork points' values if the episodes that were forked there counted too."""
    errors: dict[tuple[int, History], list[float]] = {}
    source = group[0]
    for one in group:
        if one.forked_at is None:
            source = one
            continue
        begin = (*one.actions[: one.forked_at],)
        known = errors.setdefault((id(source), begin), [reward((*source.actions,)) - value(begin)])
        known.append(reward((*one.actions,)) - value(begin))
    return [statistics.fmean(map(statistics.fmean, errors.values()))] if errors else []


def main() -> None:
    """Print the figures of all designs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, design in DESIGNS.items():
        found = study(design, options.runs, options.seed)
        tokens = statistics.fmean(found.tokens)
        print(f"{name}: {tokens:.1f} tokens a run")
        for kind, turns in sorted(found.turns.items()):
            if not turns:
                continue
            mean = math.fsum(found.errors[kind]) / turns
            print(f"  mean error of {kind}: {mean:+.4f}, {found.standard_errors(kind):+.1f} standard errors")
        if found.with_source:
            mean = statistics.fmean(found.with_source)
            errors = in_standard_errors(found.with_source)
            print(f"  values with the forked episode's own return: {mean:+.4f}, {errors:+.1f} standard errors")
        print(f"  squared error of an advantage, by sampled token: {statistics.fmean(found.squares):.4f}")
        print(f"  variance of the gradient by its squared norm, times sampled tokens: {found.noise:.1f}")
        print(f"  cosine of the mean gradient and the true one: {found.cosine:.3f}")


if __name__ == "__main__":
    main()
