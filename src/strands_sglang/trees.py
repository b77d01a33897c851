"""Trees of episodes: where to fork an episode, and what its turns are compared with then.

A fork (`Environment.fork` of strands-env) begins with copies of an episode's turns and samples the rest itself. The
episodes of a group are then one tree, and `strands_sglang.credit.training_rows` trains each of its turns once.

Values are Monte Carlo estimates, as in VinePPO (https://arxiv.org/abs/2410.01679): the value of a conversation is the
mean return of the episodes that were forked there, because all that follows is their own. The episode that they were
forked from does not count: what it sampled may be why it was forked there. So a value has no bias however the turn was
chosen. Unlike in VinePPO, the forks are trained too.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from itertools import compress, takewhile

from .trajectory.trajectory import Trajectory
from .trajectory.turn import Turn, TurnStatus


def sample_of(turn: Turn) -> Hashable:
    """Return a name of what a turn sampled: its copies in forks have the same one, and no other turn has it."""
    request = "" if turn.generation is None else turn.generation.request_id
    return (turn.key, request) if request else id(turn)


def comparisons(
    paths: Sequence[Sequence[Hashable]], returns: Sequence[list[float]], discount: float
) -> list[list[list[float]]]:
    """Return what each turn of a group's episodes is worth, and what it is compared with.

    A turn's own return is the discounted sum of rewards up to the next turn before which its conversation was forked,
    and the value there; without such a fork it is that of the episode. It is compared with the returns of the episodes
    that were forked where its conversation was forked last (the prompt counts), but not with those that contain the
    turn. If there are none, it is compared with the episode that they were forked from, which has a bias if the turn
    was chosen by what it sampled; else with itself.

    Args:
        paths: The turns of each episode, by `sample_of`; an episode comes before its forks.
        returns: Discounted sums of rewards from each turn on, at least one; empty for an episode without a reward.
        discount: Factor per turn of later rewards.

    Returns:
        For each episode with a reward and each of its turns, two or more returns, its own first. Nothing if no episode
        is a fork.
    """
    forks: dict[Hashable, list[int]] = {}  # by the last turn that they share with an earlier episode
    first: dict[Hashable, int] = {}
    for place, path in enumerate(paths):
        shared = [None, *takewhile(first.__contains__, path)][-1]
        if returns[place]:
            forks.setdefault(shared, []).append(place)
        for turn in path:
            first.setdefault(turn, place)
    longest = max(map(len, returns), default=0)
    padded = [values + values[-1:] * (longest - len(values)) for values in returns]

    compared_once: dict[Hashable, list[float]] = {}  # copies of a turn have one value, whatever the order

    def compare(place: int) -> list[list[float]]:
        path, values_after = paths[place], returns[place]
        values = [*values_after]
        for number in reversed(range(len(path) - 1)):
            later = values[number + 1]
            if path[number] in forks:
                later = statistics.fmean(padded[fork][number + 1] for fork in forks[path[number]])
            values[number] += discount * (later - values_after[number + 1])
        compared = []
        node: Hashable = None
        for number, turn in enumerate(path):
            known = [*forks.get(node, ()), first.get(node, place)]
            apart = [other for other in known if returns[other] and turn not in paths[other]]
            others = [other for other in apart if other in forks[node]] or apart
            known_returns = [padded[other][number] for other in others] or [values[number]]
            compared.append(compared_once.setdefault(turn, [values[number], *known_returns]))
            node = turn if turn in forks else node
        return compared

    if not forks.keys() - {None}:
        return []
    return [compare(place) for place, values in enumerate(returns) if values]


def evenly(trajectory: Trajectory, n: int = 1) -> list[int]:
    """Choose turns to fork an episode before, spread evenly over its turns.

    Args:
        trajectory: Its trajectory.
        n: Number of turns.

    Returns:
        Their `Turn.index`, ascending; fewer if there are no more. The first turn is not among them: an episode that is
        forked there is a new one.
    """
    turns = _forkable(trajectory)
    n = min(n, len(turns))
    return [turns[(2 * number + 1) * len(turns) // (2 * n)].index for number in range(n)]


def at_high_entropy(trajectory: Trajectory, n: int = 1) -> list[int]:
    """Choose the turns to fork an episode before that the model was least sure of.

    The entropy of a turn is estimated by what is recorded of it: the mean of its sampled tokens' negative logprobs.

    Args:
        trajectory: Its trajectory.
        n: Number of turns.

    Returns:
        As for `evenly`. Turns without logprobs come last.
    """
    turns = sorted(_forkable(trajectory), key=_mean_logprob)
    return sorted(turn.index for turn in turns[:n])


def _forkable(trajectory: Trajectory) -> list[Turn]:
    """Return the turns of the main agent that an episode can be forked before, without the first."""
    turns = [turn for turn in trajectory.turns if not turn.is_auxiliary]
    is_kept = [turn.agent == turns[0].agent and turn.status is not TurnStatus.DISCARDED for turn in turns]
    return [*compress(turns, is_kept)][1:]


def _mean_logprob(turn: Turn) -> float:
    logprobs = None if turn.generation is None else turn.generation.logprobs
    return statistics.fmean(logprobs) if logprobs else 0.0
