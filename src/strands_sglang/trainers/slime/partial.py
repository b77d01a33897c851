"""Partial rollouts: what an aborted episode leaves on its sample, and how the next part goes on from it.

Kept are the trajectory, the agent's messages and state, and the counts of its limits, as plain data in one attribute of
the sample, which slime's `Sample.to_dict` and `from_dict` carry along. The next part asks the same call again, which
goes on from the tokens that it had sampled (`Trajectory.resume`): kept tokens are extended, and never sampled or
tokenised anew.

Not kept, so that the sample starts from its prompt again: episodes with images, and those in which the abort hit
another agent than the sample's own, as one that is a tool, since its error is in the messages by then.
"""

from __future__ import annotations

import base64
import copy
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...exceptions import SGLangAbortedError, causes
from ...tool_limiter import ToolLimiter
from ...trajectory.trajectory import Trajectory
from ...trajectory.turn import Turn, TurnStatus

if TYPE_CHECKING:
    from .rollout import Episode

logger = logging.getLogger(__name__)

KEPT = "strands_sglang_kept"
"""The sample's attribute."""

_VERSION = 1
_COUNTS = ("tool_iter_count", "tool_call_count", "message_count", "cancelled_tool_call_count")


@dataclass(eq=False)
class Kept:
    """An episode to go on with.

    Attributes:
        trajectory: Its calls.
        messages: The agent's messages.
        state: The agent's state.
        counts: The limiter's counts.
        elapsed_s: Seconds that its earlier parts took.
        non_generation_s: Seconds of those that went to other things than generating.
        old_tokens: By `Turn.index`, how many tokens the earlier parts sampled.
    """

    trajectory: Trajectory
    messages: list[Any]
    state: dict[str, Any]
    counts: dict[str, int]
    elapsed_s: float
    non_generation_s: float
    old_tokens: dict[int, int]

    def resume(self) -> None:
        """Let the call that the abort had cut go on from its tokens."""
        for turn in self.trajectory.turns:
            if turn.status is TurnStatus.CUT and not turn.constrained:
                self.trajectory.resume(turn)
                self.old_tokens.pop(turn.index, None)

    def apply(self, agent: Any, limiter: ToolLimiter) -> None:
        """Put an agent where the aborted one was."""
        agent.messages[:] = copy.deepcopy(self.messages)
        for key, value in self.state.items():
            agent.state.set(key, value)
        for name, count in self.counts.items():
            setattr(limiter, name, count)


def keep(episode: Episode) -> None:
    """Put an aborted episode on its sample, unless it cannot be continued."""
    sample, trajectory, agent = episode.sample, episode.trajectory, episode.agent
    if not _can_go_on(trajectory):
        return
    messages, state = list(agent.messages), agent.state.get() or {}
    try:
        json.dumps([messages, state])
        content = trajectory.to_bytes()
    except (TypeError, ValueError) as error:
        logger.warning("sample=<%s> | starts again, for it is no plain data: %s", getattr(sample, "index", None), error)
        return
    kept = {
        "version": _VERSION,
        "trajectory": base64.b64encode(content).decode("ascii"),
        "messages": copy.deepcopy(messages),
        "state": copy.deepcopy(state),
        "counts": {name: getattr(episode.limiter, name) for name in _COUNTS},
        "elapsed_s": episode.elapsed_s(),
        "non_generation_s": episode.non_generation_s(),
    }
    setattr(sample, KEPT, kept)


def kept_on(sample: Any) -> Kept | None:
    """What an aborted episode left on a sample; None where there is nothing to go on with."""
    kept = getattr(sample, KEPT, None)
    if not isinstance(kept, Mapping) or kept.get("version") != _VERSION:
        return None
    try:
        trajectory = Trajectory.from_bytes(base64.b64decode(kept["trajectory"]), name="a partial rollout")
        return Kept(
            trajectory=trajectory,
            messages=list(kept["messages"]),
            state=dict(kept["state"]),
            counts={name: int(kept["counts"][name]) for name in _COUNTS},
            elapsed_s=float(kept["elapsed_s"]),
            non_generation_s=float(kept["non_generation_s"]),
            old_tokens={turn.index: len(turn.output_ids) for turn in trajectory.turns},
        )
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("sample=<%s> | starts again: what it kept cannot be read: %r", sample.index, error)
        return None


def forget(sample: Any) -> None:
    """Take what was kept off a sample."""
    if getattr(sample, KEPT, None) is not None:
        setattr(sample, KEPT, None)


def _can_go_on(trajectory: Trajectory) -> bool:
    leaf = trajectory.main_leaf()
    return leaf is not None and not any(
        turn.images is not None or (_was_aborted(turn) and turn.root.key != leaf.root.key) for turn in trajectory.turns
    )


def _was_aborted(turn: Turn) -> bool:
    return turn.cause is not None and any(isinstance(cause, SGLangAbortedError) for cause in causes(turn.cause))
