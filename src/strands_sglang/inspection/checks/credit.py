"""Checks of the rewards of a group, and of the prompts that its episodes open with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ...outcomes import OUTCOMES, RewardRule, TerminationReason
from ..records import Group, Inspected
from .turns import Facts

_FAILED = ("infrastructure_error", "agent_error", "aborted", "cancelled")


def check_rewards(group: Group) -> Iterator[Facts]:
    """Check the rewards of a group."""
    for episode in group.episodes:
        for facts in (*_reward(group, episode), *_noted(group, episode)):
            yield {"episode": episode.id, **facts}
    yield from _flat(group)


def close(one: float, other: float) -> bool:
    """Whether two values are one, up to rounding."""
    return math.isnan(one) and math.isnan(other) or math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def _has_no_reward(episode: Inspected) -> bool:
    try:
        return OUTCOMES[TerminationReason(episode.end.outcome)].reward is RewardRule.NONE
    except ValueError:  # unknown, or another library's
        return False


def _reward(group: Group, episode: Inspected) -> Iterator[Facts]:
    reward = episode.end.reward
    is_counted = reward is not None
    if group.batch is not None:
        is_counted = episode.id in group.batch.rewards or any(one.row is not None for one in episode.sequences)
    if _has_no_reward(episode) and is_counted:
        told = "" if reward is None else f" {reward:g}"
        yield {"kind": "reward-failure", "why": f"it ended with {episode.end.outcome}, but its reward{told} counts"}
    if reward is not None and not math.isfinite(reward) and is_counted:
        yield {"kind": "reward", "why": f"its reward is {reward}"}


def _noted(group: Group, episode: Inspected) -> Iterator[Facts]:
    """Compare the reward and the outcome that count with those in the trajectory's own file."""
    end, noted = episode.end, episode.trajectory.end
    if noted is None:
        return
    if noted.reward is not None and end.reward is not None and not close(noted.reward, end.reward):
        why = f"its reward is {end.reward:g}, but its trajectory's file says {noted.reward:g}"
        yield {"kind": whose(group, episode, end.reward), "why": why}
    elif noted.reward is None and end.reward is not None and not _has_no_reward(episode) and noted.reward_error:
        why = f"its reward is {end.reward:g}, but it could not be scored: {noted.reward_error}"
        yield {"kind": "reward", "why": why}
    if noted.outcome is not None and end.outcome not in (None, noted.outcome):
        kind = "changed"
        if end.outcome == "task_complete":
            kind = "cut-complete"
        if noted.outcome in _FAILED and end.reward is not None:
            kind = "reward-failure"
        yield {"kind": kind, "why": f"it counts as {end.outcome}, but its trajectory's file says {noted.outcome}"}


def whose(group: Group, episode: Inspected, reward: float) -> str:
    """Return the kind of a wrong reward: a sibling's, or no one's."""
    for one in group.episodes:
        noted = one.trajectory.end or one.end
        if one is not episode and noted.reward is not None and close(noted.reward, reward):
            return "reward-sibling"
    return "reward"


def _flat(group: Group) -> Iterator[Facts]:
    scored = [one for one in group.episodes if one.end.reward is not None and not _has_no_reward(one)]
    settings = {} if group.batch is None else group.batch.settings
    if not group.is_scored or len(scored) < 2 or settings.get("baseline", "mean") is None:
        return
    if any(episode.end.turn_rewards for episode in scored):
        return  # turns may differ
    rewards = [float(episode.end.reward or 0.0) for episode in scored]
    if math.isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12):
        why = f"its {len(scored)} episodes all have the reward {rewards[0]:g}, so it trains nothing"
        yield {"kind": "flat-group", "why": why}


# --- prompts ---


def check_openings(groups: Sequence[Group]) -> Iterator[Facts]:
    """Find episodes that are in the group of another prompt."""
    openings = {group.id: {episode.id: _opening(episode, "key") for episode in group.episodes} for group in groups}
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
    for group in groups:
        yield from _several_prompts(group)


def _several_prompts(group: Group) -> Iterator[Facts]:
    asked = {episode.id: _opening(episode, "digests") for episode in group.episodes}
    counts = Counter(messages for messages in asked.values() if messages)
    (_, most), *others = counts.most_common() or [((), 0)]
    if len(others) and others[0][1] > 1 and most + sum(count for _, count in others) == len(asked):
        names = [next(name for name, messages in asked.items() if messages == one) for one in counts]
        why = f"its episodes open with {len(counts)} prompts, such as those of {names[0]} and {names[1]}"
        yield {"kind": "group", "why": why, "group": group.id}


def _opening(episode: Inspected, name: str) -> Any:
    """Return the digest of the conversation that an episode opens with; None if its file does not tell.

    Args:
        episode: The episode.
        name: `"key"`, or `"digests"` for those of the messages alone, without the system prompt and the tools.
    """
    if not episode.has_trajectory:
        return None
    return next((getattr(turn, name) for turn in episode.turns if not turn.is_auxiliary), None)
