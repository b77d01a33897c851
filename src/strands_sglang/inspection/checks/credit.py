"""Checks of the rewards of a group, and of the prompts that its episodes open with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from ...outcomes import OUTCOMES, RewardRule, TerminationReason
from ..records import Finding, Group, Inspected, within

_FAILED = ("infrastructure_error", "agent_error", "aborted", "cancelled")


def check_rewards(group: Group) -> Iterator[Finding]:
    """Check the rewards of a group."""
    for episode in group.episodes:
        yield from within((*_reward(group, episode), *_noted(group, episode)), episode=episode.id)
    yield from _flat(group)


def close(first: float, second: float) -> bool:
    """Whether two values are one, up to rounding."""
    return math.isnan(first) and math.isnan(second) or math.isclose(first, second, rel_tol=1e-6, abs_tol=1e-9)


def _has_no_reward(episode: Inspected) -> bool:
    try:
        return OUTCOMES[TerminationReason(episode.end.outcome)].reward is RewardRule.NONE
    except ValueError:  # unknown, or another library's
        return False


def _reward(group: Group, episode: Inspected) -> Iterator[Finding]:
    reward = episode.end.reward
    is_counted = reward is not None
    if group.batch is not None:
        is_counted = episode.id in group.batch.rewards or any(
            sequence.row is not None for sequence in episode.sequences
        )
    if _has_no_reward(episode) and is_counted:
        shown_reward = "" if reward is None else f" {reward:g}"
        yield Finding("reward-failure", f"it ended with {episode.end.outcome}, but its reward{shown_reward} counts")
    if reward is not None and not math.isfinite(reward) and is_counted:
        yield Finding("reward", f"its reward is {reward}")


def _noted(group: Group, episode: Inspected) -> Iterator[Finding]:
    """Compare the reward and the outcome that count with those in the trajectory's own file."""
    end, noted = episode.end, episode.trajectory.end
    if noted is None:
        return
    if noted.reward is not None and end.reward is not None and not close(noted.reward, end.reward):
        why = f"its reward is {end.reward:g}, but its trajectory's file says {noted.reward:g}"
        yield Finding(whose(group, episode, end.reward), why)
    elif noted.reward is None and end.reward is not None and not _has_no_reward(episode) and noted.reward_error:
        why = f"its reward is {end.reward:g}, but it could not be scored: {noted.reward_error}"
        yield Finding("reward", why)
    if noted.outcome is not None and end.outcome not in (None, noted.outcome):
        kind = "changed"
        if end.outcome == "task_complete":
            kind = "cut-complete"
        if noted.outcome in _FAILED and end.reward is not None:
            kind = "reward-failure"
        yield Finding(kind, f"it counts as {end.outcome}, but its trajectory's file says {noted.outcome}")


def whose(group: Group, episode: Inspected, reward: float) -> str:
    """Return the kind of a wrong reward: a sibling's, or no one's."""
    for sibling in group.episodes:
        noted = sibling.trajectory.end or sibling.end
        if sibling is not episode and noted.reward is not None and close(noted.reward, reward):
            return "reward-sibling"
    return "reward"


def _flat(group: Group) -> Iterator[Finding]:
    scored = [sibling for sibling in group.episodes if sibling.end.reward is not None and not _has_no_reward(sibling)]
    settings = {} if group.batch is None else group.batch.settings
    if not group.is_scored or len(scored) < 2 or settings.get("baseline", "mean") is None:
        return
    if any(episode.end.turn_rewards for episode in scored):
        return  # turns may differ
    rewards = [float(episode.end.reward or 0.0) for episode in scored]
    if math.isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12):
        why = f"its {len(scored)} episodes all have the reward {rewards[0]:g}, so it trains nothing"
        yield Finding("flat-group", why)


# --- prompts ---


def check_openings(groups: Sequence[Group]) -> Iterator[Finding]:
    """Find groups of several prompts: episodes whose messages open like others in the batch, but not in their group."""
    opened = {group.id: {episode.id: _opening(episode) for episode in group.episodes} for group in groups}
    known = Counter(chain.from_iterable(openings.values() for openings in opened.values()))
    for name, openings in opened.items():
        counts = Counter(openings.values())
        if len(counts) < 2 or None in counts or any(known[prompt] < 2 for prompt in counts):
            continue
        (usual, _), *_ = counts.most_common()
        first = next(each for each in openings if openings[each] == usual)
        odd = next(each for each in openings if openings[each] != usual)
        why = f"it opens with another prompt than {first}, and their rewards are compared"
        yield Finding("group", why, group=name, episode=odd)


def _opening(episode: Inspected) -> tuple[bytes, ...] | None:
    """Return the digests of the messages that an episode opens with; None if its file does not tell."""
    turns = (turn for turn in episode.turns if not turn.is_auxiliary and turn.digests)
    return next((turn.digests for turn in turns), None)
