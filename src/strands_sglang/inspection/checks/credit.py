"""Checks of rewards, advantages and weights: what follows from the rewards of a group."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from ...credit import LARGEST_REWARD, STD_EPSILON, group_advantages, version_number
from ...outcomes import OUTCOMES, RewardRule, TerminationReason
from ..records import Episode, Group, SequenceRecord
from .turns import Facts

_FAILED = {
    *(TerminationReason.INFRASTRUCTURE_ERROR, TerminationReason.AGENT_ERROR),
    *(TerminationReason.ABORTED, TerminationReason.CANCELLED),
}


def check_credit(group: Group) -> Iterator[Facts]:
    """Check the rewards of a group, and the advantages of its rows."""
    for episode in group.episodes:
        for facts in (*_reward(group, episode), *_noted(group, episode)):
            yield {"episode": episode.id, **facts}
    yield from _flat(group)
    if group.kind == "step":
        yield from _advantages(group)


# --- rewards ---


def _has_no_reward(episode: Episode) -> bool:
    try:
        return OUTCOMES[TerminationReason(episode.outcome)].reward is RewardRule.NONE
    except ValueError:  # unknown, or another library's
        return False


def _reward(group: Group, episode: Episode) -> Iterator[Facts]:
    if group.kind == "step":
        trained = any(sequence.number is not None for sequence in episode.sequences)
        counted = trained or episode.id in group.facts["description"]["rewards"]
    else:
        counted = episode.reward is not None
    if _has_no_reward(episode) and counted:
        told = "" if episode.reward is None else f" {episode.reward:g}"
        yield {"kind": "reward-failure", "why": f"it ended with {episode.outcome}, but its reward{told} counts"}
    if episode.reward is not None and not math.isfinite(episode.reward) and counted:
        yield {"kind": "reward", "why": f"its reward is {episode.reward}"}
    if group.kind == "step":
        description = group.facts["description"]
        if episode.id in description["rewards"] and episode.facts.get("in_batch"):
            parts = [episode.reward or 0.0, *episode.facts.get("turn_rewards", {}).values()]
            total, given = math.fsum(parts), description["rewards"][episode.id]
            if not _close(total, given):
                yield {
                    "kind": _whose(group, episode, given),
                    "why": f"its reward is {total:g}, but counts as {given:g}",
                }


def _noted(group: Group, episode: Episode) -> Iterator[Facts]:
    """Compare the reward that counts with the one in the trajectory's own file."""
    end = episode.facts.get("end")
    if end is None:
        return
    if end.reward is not None and episode.reward is not None and not _close(end.reward, episode.reward):
        why = f"its reward is {episode.reward:g}, but its trajectory's file says {end.reward:g}"
        yield {"kind": _whose(group, episode, episode.reward), "why": why}
    elif end.reward is None and episode.reward is not None and not _has_no_reward(episode) and end.reward_error:
        yield {
            "kind": "reward",
            "why": f"its reward is {episode.reward:g}, but it could not be scored: {end.reward_error}",
        }
    if end.outcome is not None and episode.outcome not in (None, end.outcome):
        kind = "changed"
        if episode.outcome == "task_complete":
            kind = "cut-complete"
        if TerminationReason(end.outcome) in _FAILED and episode.reward is not None:
            kind = "reward-failure"
        yield {"kind": kind, "why": f"it counts as {episode.outcome}, but its trajectory's file says {end.outcome}"}


def _whose(group: Group, episode: Episode, reward: float) -> str:
    """Return the kind of a wrong reward: a sibling's, or no one's."""
    for one in group.episodes:
        noted = one.facts["end"].reward if "end" in one.facts else one.reward
        if one is not episode and noted is not None and _close(noted, reward):
            return "reward-sibling"
    return "reward"


def _flat(group: Group) -> Iterator[Facts]:
    scored = [episode for episode in group.episodes if episode.reward is not None and not _has_no_reward(episode)]
    if not group.is_scored or len(scored) < 2 or group.facts.get("settings", {}).get("baseline", "mean") is None:
        return
    if any(episode.facts.get("turn_rewards") for episode in scored):
        columns = [_returns(episode, 1.0) for episode in scored]
        same = all(column == columns[0] for column in columns)
    else:
        rewards = [float(episode.reward or 0.0) for episode in scored]
        same = math.isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12)
    if same:
        why = f"its {len(scored)} episodes all have the reward {scored[0].reward:g}, so it trains nothing"
        yield {"kind": "flat-group", "why": why}


# --- advantages ---


def _returns(episode: Episode, discount: float) -> list[float]:
    """Return the discounted sum of rewards from each turn of the rollout on, at least one."""
    derived: Sequence[SequenceRecord] = episode.facts.get("derived") or episode.sequences
    numbers = sorted({episode.turns[step.turn].number for sequence in derived for step in sequence.steps})
    rewards = episode.facts.get("turn_rewards", {})
    total, later = 0.0, episode.reward or 0.0
    returns: list[float] = []
    for number in reversed(numbers):
        total = rewards.get(number, 0.0) + later
        returns.append(total)
        later = discount * total
    return returns[::-1] or [later]


def _expected(scored: Sequence[Episode], settings: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the advantages by turn of the rollout, as `training_rows` computes them."""
    columns = [_returns(episode, float(settings.get("discount", 1.0))) for episode in scored]
    by_turn = [
        group_advantages(
            [column[min(number, len(column) - 1)] for column in columns],
            baseline=settings.get("baseline", "mean"),
            normalize_std=bool(settings.get("normalize_std", False)),
        )
        for number in range(max(map(len, columns)))
    ]
    return {
        episode.id: [by_turn[number][place] for number in range(len(columns[place]))]
        for place, episode in enumerate(scored)
    }


def _scored(group: Group) -> list[Episode]:
    def size(episode: Episode) -> float:
        return sum(map(abs, (episode.reward or 0.0, *episode.facts.get("turn_rewards", {}).values())))

    return [
        episode
        for episode in group.episodes
        if episode.reward is not None and size(episode) <= LARGEST_REWARD and not _has_no_reward(episode)
    ]


def _advantages(group: Group) -> Iterator[Facts]:
    given = _given(group)
    for episode in group.episodes:
        for number, sequence in enumerate(episode.sequences):
            if sequence.number is None or sequence.advantages is None:
                continue
            stray = np.flatnonzero((sequence.mask == 0) & (sequence.advantages != 0.0))
            if len(stray):
                why = "it is not trained, but has an advantage"
                at: Facts = {"episode": episode.id, "sequence": number, "token": int(stray[0]), "count": len(stray)}
                yield {"kind": "advantage", "why": why, **at}
            if not np.isfinite(sequence.advantages).all():
                yield {
                    "kind": "advantage",
                    "why": "an advantage is not finite",
                    "episode": episode.id,
                    "sequence": number,
                }
    scored = _scored(group)
    settings = dict(group.facts["settings"])
    if not given or (len(scored) < 2 and settings.get("baseline", "mean") is not None):
        return
    if not all(episode.facts.get("in_batch") for episode in group.episodes):
        return
    candidates = (
        [settings]
        if settings
        else [
            {"baseline": baseline, "normalize_std": std}
            for baseline, std in (("mean", False), ("mean", True), ("leave_one_out", False), ("leave_one_out", True))
        ]
    )
    wrong = min((list(_differing(group, given, _expected(scored, one))) for one in candidates), key=len)
    if not wrong:
        return
    explained = _over_sequences(group, scored, settings)
    exact = _expected(scored, candidates[0])
    for episode, number, turn, position, value, expected in wrong:
        at = {"episode": episode.id, "sequence": number, "turn": turn, "token": position, "count": 1}
        if value and any(_close(value, other) for other in explained.get((episode.id, number), ())):
            why = f"its advantage {value:g} is normalized over sequences; over episodes it is {expected:g}"
            yield {"kind": "advantage-rows", "why": why, **at}
            continue
        sibling = next(
            (name for name, values in exact.items() if name != episode.id and _close(values[-1], value)), None
        )
        if sibling is not None:
            why = f"its advantage {value:g} is that of episode {sibling}; {expected:g} follows from its own reward"
            yield {"kind": "reward-sibling", "why": why, **at}
        else:
            why = f"its advantage is {value:g}, but {expected:g} follows from the rewards of its group"
            yield {"kind": "advantage", "why": why, **at}


def _given(group: Group) -> list[tuple[Episode, int, int, int, float]]:
    """Return the advantages of the rows: episode, sequence, position in the turns, token and value of each change."""
    values = []
    for episode in group.episodes:
        for number, sequence in enumerate(episode.sequences):
            if sequence.number is None or sequence.advantages is None:
                continue
            for step in sequence.steps:
                own = np.flatnonzero(sequence.mask[step.sampled : step.stop] > 0)
                part = sequence.advantages[step.sampled : step.stop][own]
                for place in [0, *(np.flatnonzero(np.diff(part)) + 1).tolist()] if len(part) else []:
                    values.append((episode, number, step.turn, step.sampled + int(own[place]), float(part[place])))
    return values


def _differing(
    group: Group, given: Sequence[tuple[Episode, int, int, int, float]], expected: Mapping[str, Sequence[float]]
) -> Iterator[tuple[Episode, int, int, int, float, float]]:
    told: set[tuple[str, int]] = set()
    for episode, number, position, token, value in given:
        derived = episode.facts.get("derived") or episode.sequences
        numbers = sorted({episode.turns[step.turn].number for sequence in derived for step in sequence.steps})
        turn = episode.turns[position].number
        own = expected.get(episode.id)
        if own is None or turn not in numbers:
            continue
        wanted = own[min(numbers.index(turn), len(own) - 1)]
        if not _close(value, wanted) and (episode.id, number) not in told:
            told.add((episode.id, number))
            yield episode, number, turn, token, value, wanted
    described = group.facts["description"]["advantages"]
    for episode in group.episodes:
        own, noted = expected.get(episode.id), described.get(episode.id)
        if own is None or noted is None or any(name == episode.id for name, _ in told):
            continue
        for place, turn_number in enumerate(sorted(map(int, noted))):
            wanted = own[min(place, len(own) - 1)]
            if not _close(noted[str(turn_number)], wanted):
                yield episode, 0, turn_number, 0, float(noted[str(turn_number)]), wanted
                break


def _over_sequences(
    group: Group, scored: Sequence[Episode], settings: Mapping[str, Any]
) -> dict[tuple[str, int], list[float]]:
    """Return the advantages that each row would have if rows counted like episodes."""
    rows = [
        (episode, number)
        for episode in scored
        for number, sequence in enumerate(episode.sequences)
        if sequence.number is not None
    ]
    counts = {episode.id: sum(one is episode for one, _ in rows) for episode in scored}
    rewards = [float(episode.reward or 0.0) for episode, _ in rows]
    over: dict[tuple[str, int], list[float]] = {}
    if len(rows) < 2:
        return over
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    own = [float(episode.reward or 0.0) for episode in scored]
    exact = _expected(scored, settings)
    for episode, number in rows:
        reward = float(episode.reward or 0.0)
        centered = reward - mean
        values = [centered, centered * len(rows) / (len(rows) - 1)]
        values += [
            value / (scale + epsilon)
            for value, scale, epsilon in product(
                list(values), (std, statistics.pstdev(rewards)), (0.0, STD_EPSILON, 1e-8, 1e-4)
            )
            if scale + epsilon
        ]
        if counts[episode.id] > 1:
            values += [value / counts[episode.id] for value in exact[episode.id]]
            values += [reward / counts[episode.id] - statistics.fmean(own)]
        over[episode.id, number] = values
    return over


# --- a whole batch ---


def check_batch(groups: Sequence[Group]) -> Iterator[Facts]:
    """Check what concerns all groups of a training step: weights, and what was kept out."""
    description = groups[0].facts["description"]
    rows = [
        (group, episode, number, sequence)
        for group in groups
        for episode in group.episodes
        for number, sequence in enumerate(episode.sequences)
        if sequence.number is not None
    ]
    known = [row for row in rows if row[3].row.get("weight") is not None]
    for group, episode, number, sequence in known:
        weight = sequence.row["weight"]
        if not math.isfinite(weight) or weight <= 0:
            why = f"its weight {weight:g} is not a number above 0"
            yield {"kind": "weight", "why": why, "group": group.id, "episode": episode.id, "sequence": number}
    yield from _weights(known)
    yield from _exchanged(groups)
    for group in groups:
        yield from _prompts(group)
        yield from _left_out(group)
    for name in groups[0].facts["strays"]:
        why = f"trajectories/{name}.safetensors belongs to no episode of the batch"
        yield {"kind": "left-out", "why": why, "group": None}
    for name in description["left_out"] if description.get("episodes") else ():
        if name not in description["episodes"]:
            yield {"kind": "left-out", "why": f"episode {name} is left out, but was not in the batch", "group": None}
    settings = groups[0].facts["settings"]
    newest, behind = settings.get("version"), settings.get("max_staleness")
    for group, episode, number, sequence in rows if newest is not None and behind is not None else ():
        used = {sequence.row["names"][at] for at in set(sequence.row["versions"].tolist()) - {-1}}
        later = max((value for name in used if (value := version_number(name)) is not None), default=newest)
        if later > newest:
            why = f"its tokens of version {later} are newer than the weights to be updated, version {newest}"
            yield {"kind": "version", "why": why, "group": group.id, "episode": episode.id, "sequence": number}
        oldest = sequence.row["episode_version"]
        if oldest is not None and newest - oldest > behind:
            why = f"its oldest tokens are of version {oldest}, more than max_staleness={behind} before {newest}"
            yield {"kind": "left-out", "why": why, "group": group.id, "episode": episode.id, "sequence": number}
    most = settings.get("max_tokens")
    for group, episode, number, sequence in rows if most is not None else ():
        if len(sequence) > most:
            why = f"it has {len(sequence)} tokens, more than max_tokens={most}"
            yield {"kind": "left-out", "why": why, "group": group.id, "episode": episode.id, "sequence": number}
    flat = {str(name) for name in description["flat_groups"]}
    for group in groups:
        trains = any(one.advantages is not None and one.advantages.any() for e in group.episodes for one in e.sequences)
        if group.id in flat and trains:
            yield {"kind": "advantage", "why": "it counts as flat, but has advantages", "group": group.id}


def _exchanged(groups: Sequence[Group]) -> Iterator[Facts]:
    """Find episodes that open with the prompt that all episodes of another group have."""
    openings = {group.id: {episode.id: _opening(episode) for episode in group.episodes} for group in groups}
    prompts = {name: set(own.values()) for name, own in openings.items()}
    for name, own in openings.items():
        for episode, opening in own.items():
            others = {prompt for other, prompt in own.items() if other != episode}
            if opening is None or len(others) != 1 or opening in others or None in others:
                continue
            home = next((other for other, held in prompts.items() if other != name and held == {opening}), None)
            if home is not None:
                why = f"it opens with the prompt of group {home}, and its reward is compared with those of another"
                yield {"kind": "group", "why": why, "group": name, "episode": episode}


def _prompts(group: Group) -> Iterator[Facts]:
    """Find a group that several prompts share."""
    asked = {episode.id: _opening(episode, "digests") for episode in group.episodes}
    counts = Counter(messages for messages in asked.values() if messages)
    (_, most), *others = counts.most_common() or [((), 0)]
    if len(others) and others[0][1] > 1 and most + sum(count for _, count in others) == len(asked):
        names = [next(name for name, messages in asked.items() if messages == one) for one in counts]
        why = f"its episodes open with {len(counts)} prompts, such as those of {names[0]} and {names[1]}"
        yield {"kind": "group", "why": why, "group": group.id}


def _opening(episode: Episode, name: str = "key") -> Any:
    """Return the digest of the conversation that an episode opens with; None if its file does not tell.

    Args:
        episode: The episode.
        name: `"digests"` for those of the messages alone, without the system prompt and the tools.
    """
    recorded = (turn.facts.get("turn") for turn in episode.turns if not turn.is_auxiliary)
    return next((getattr(turn, name) for turn in recorded if turn is not None), None)


def _left_out(group: Group) -> Iterator[Facts]:
    """Compare the reasons why episodes are kept out with what is known of them."""
    scored = _scored(group)
    for episode in group.episodes:
        reason = episode.left_out
        if reason is None or not episode.facts.get("in_batch"):
            continue
        holds = {
            "no_reward": episode.reward is None,
            "only_scored": len(scored) < 2,
            "flat_group": bool(list(_flat(group))),
            "no_token": not any(one.mask.any() for one in episode.facts.get("derived", ())),
            "outcome": _has_no_reward(episode),
        }
        if not holds.get(reason.kind, True) and not episode.facts.get("has_no_trajectory"):
            yield {"kind": "left-out", "why": f"it is left out for a wrong reason ({reason})", "episode": episode.id}


def _weights(rows: Sequence[tuple[Group, Episode, int, SequenceRecord]]) -> Iterator[Facts]:
    """Find the row whose weight breaks the pattern that all other weights follow."""
    if len(rows) < 3:
        return
    weights = np.array([sequence.row["weight"] for *_, sequence in rows], np.float64)
    trained = np.array([max(int((sequence.mask > 0).sum()), 1) for *_, sequence in rows], np.float64)
    whole = np.array([max(int(sequence.row["episode_trained"]), 1) for *_, sequence in rows], np.float64)
    length = np.array([max(len(sequence) - 1, 1) for *_, sequence in rows], np.float64)
    ones = np.ones(len(rows))
    patterns: list[Callable[[], Any]] = [
        lambda wanted=wanted, own=own: wanted * own  # type: ignore[misc]
        for wanted in (1 / whole, ones)
        for own in (ones, trained, whole, length)
    ]
    best: Any = None
    for pattern in patterns:
        ratios = weights / pattern()
        typical = float(np.median(ratios))
        off = np.flatnonzero(~np.isclose(ratios, typical, rtol=1e-6))
        if best is None or len(off) < len(best[0]):
            best = (off, ratios, typical)
    off, ratios, typical = best
    # Weights by micro-batch follow no pattern; a fault breaks one that nearly all others keep.
    if 0 < len(off) <= len(rows) // 4:
        most = trained[np.isclose(ratios, typical, rtol=1e-6)].sum()
        for place in off.tolist():
            # The rows of a smaller micro-batch, such as the last one, weigh less, as it has fewer trained tokens.
            own = trained[np.isclose(ratios, ratios[place], rtol=1e-6)].sum()
            if math.isclose(ratios[place] / typical, own / most, rel_tol=1e-6):
                continue
            group, episode, number, _ = rows[place]
            why = f"its weight {weights[place]:g} is {ratios[place] / typical:g} times what the other weights imply"
            yield {"kind": "weight", "why": why, "group": group.id, "episode": episode.id, "sequence": number}


def _close(one: float, other: float) -> bool:
    return one != one and other != other or math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
