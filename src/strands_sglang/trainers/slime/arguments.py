"""What slime's parsed arguments say about rollouts. slime's names; every one may be missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class SlimeExportError(ValueError):
    """A sample cannot be made for a reason that the caller can do away with; the message says how."""


@dataclass(frozen=True)
class Replay:
    """What training replays of a rollout beside its tokens.

    Attributes:
        top_p: Whether the ids that top-p kept are replayed (`rollout_top_p` is not 1).
        experts: Layers and experts per token, if routing is replayed (`use_rollout_routing_replay`), else None.
    """

    top_p: bool = False
    experts: tuple[int, int] | None = None


def replay_of(args: Any) -> Replay:
    """What these arguments have replayed.

    Raises:
        SlimeExportError: Routing is replayed, and the arguments do not tell the model's layers and experts per token.
    """
    experts = None
    if getattr(args, "use_rollout_routing_replay", False):
        layers, top_k = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
        if not layers or not top_k:
            raise SlimeExportError(
                f"use_rollout_routing_replay needs num_layers and moe_router_topk of the model; they are {layers!r} "
                f"and {top_k!r}"
            )
        experts = (int(layers), int(top_k))
    top_p = getattr(args, "rollout_top_p", None)
    return Replay(top_p=top_p is not None and top_p != 1.0, experts=experts)


def context_limit(args: Any, *, evaluation: bool = False) -> int | None:
    """The longest sample in tokens that the arguments allow: what was set, or else what fits one micro-batch.

    A sample longer than `max_tokens_per_gpu * context_parallel_size` does not fit any with `use_dynamic_batch_size`.

    Args:
        args: slime's parsed arguments.
        evaluation: Whether the sample is none to train on.
    """
    if evaluation:
        limit = getattr(args, "eval_max_context_len", None) or getattr(args, "rollout_max_context_len", None)
        return int(limit) if limit else None
    limits = [getattr(args, "rollout_max_context_len", None)]
    if getattr(args, "use_dynamic_batch_size", False) and getattr(args, "max_tokens_per_gpu", None):
        limits.append(args.max_tokens_per_gpu * (getattr(args, "context_parallel_size", None) or 1))
    return min((int(limit) for limit in limits if limit), default=None)


def runs_aborted_again(args: Any) -> bool:
    """Whether samples of status ABORTED are run again although slime aborts nothing: its fully asynchronous rollout."""
    return "fully_async" in str(getattr(args, "rollout_function_path", None))


GROUP_BASELINES = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"})
"""Advantage estimators for which slime takes the mean reward of a prompt's samples off."""


def normalizes_by_group(args: Any) -> bool:
    """Whether the rewards of a prompt's samples are taken relative to each other."""
    estimator = getattr(args, "advantage_estimator", "grpo")
    return estimator in GROUP_BASELINES and bool(getattr(args, "rewards_normalization", True))


def reward_key(args: Any, *, evaluation: bool = False) -> str | None:
    """The key under which slime reads a sample's reward; None where the reward is a number."""
    own = getattr(args, "eval_reward_key", None) if evaluation else None
    return own or getattr(args, "reward_key", None)


def as_reward(args: Any, value: float, *, evaluation: bool = False, category: str = "failed") -> Any:
    """A reward in the form that slime reads: a number, or a dictionary that has every key that slime looks up.

    Args:
        args: slime's parsed arguments: `reward_key`, `eval_reward_key`, `log_reward_category`.
        value: The reward.
        evaluation: Whether the sample is none to train on.
        category: What `log_reward_category` counts the sample as.
    """
    if not reward_key(args, evaluation=evaluation):
        return value
    known = {getattr(args, name, None) for name in ("reward_key", "eval_reward_key")} - {None}
    logged = getattr(args, "log_reward_category", None)
    return {**({logged: category} if logged else {}), **dict.fromkeys(known, value)}
