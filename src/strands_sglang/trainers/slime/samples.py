"""From a trajectory to slime's `Sample`s, whatever became of the episode.

| the episode | status | tokens | reward | removed |
|---|---|---|---|---|
| ended with an answer | COMPLETED | all | as given; None: slime's reward function | no |
| was cut off by a limit, or by time behind an answer | TRUNCATED | all | as given; None: slime's reward function | no |
| ran out of time without an answer | TRUNCATED | all, masked | `failure_reward` | yes |
| was aborted or cancelled, as slime asked for | ABORTED | all, the partial answer too | None | no |
| was aborted or cancelled otherwise | TRUNCATED | all, masked | `failure_reward` | yes |
| failed (server, network, the agent's code) | FAILED | all, masked | `failure_reward` | yes |
| sampled nothing, not since slime aborted | FAILED | the prompt and one masked token | `failure_reward` | yes |
| has a reward that is no finite number | as above | all, masked | `failure_reward` | yes |
| lacks what training replays | FAILED | all, masked | `failure_reward` | yes |

"All" are the tokens of the sequence up to the last sampled one: tool results that no call has shown to the model are
not in it. A reward that slime asked its function for would score a failure, so removed samples bring theirs along.

Promises: prompt and response have at least one token each; mask, logprobs and what is replayed belong to the response's
tokens; logprobs are finite, and 0.0 where the mask is 0; no field of an earlier run stays; samples share nothing with
the trajectory or with each other. It raises only what the caller can do away with.
"""

from __future__ import annotations

import copy
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...outcomes import OUTCOMES, Outcome, RewardRule, TerminationReason, outcome_of
from ...templates.encoder import get_encoder
from ...trajectory.export import sequence_of
from ...trajectory.tokens import TokenManager
from ...trajectory.trajectory import Trajectory
from ...trajectory.turn import Turn, TurnStatus
from .arguments import Replay, SlimeExportError, as_reward, context_limit, replay_of, reward_key
from .rows import Rows, placeholder_experts, rows_of

__all__ = ["SlimeExportError", "to_slime_samples"]

logger = logging.getLogger(__name__)

METADATA_KEY = "strands_sglang"
"""Where in `sample.metadata` this library says what became of the episode."""

_MADE_LATER = ("teacher_log_probs", "mopd_teacher_log_probs", "rollout_top_p_log_probs")
"""Fields that slime fills from a finished sample; those of an earlier run are another response's."""


_EVALUATION = "evaluation"
"""Under `METADATA_KEY`: whether the sample is none to train on, which slime does not tell reward functions."""


def is_evaluation(sample: Any) -> bool:
    """Whether a sample of ours was made for an evaluation."""
    return bool((sample.metadata or {}).get(METADATA_KEY, {}).get(_EVALUATION))


def main_sample(samples: Sequence[Any]) -> Any:
    """The sample of a rollout that holds its main conversation."""
    told = (sample for sample in samples if (sample.metadata or {}).get(METADATA_KEY, {}).get("is_main"))
    return next(told, samples[-1])


class RolloutSamples(list[Any]):
    """The samples of one rollout, for slime's code that takes every member of a group for a sample.

    Its fully asynchronous rollout sorts groups by the `index` of a member, and its filters read the members' rewards.
    """

    @property
    def index(self) -> Any:
        """The rollout's index, in place of the method of lists."""
        return main_sample(self).index

    def get_reward_value(self, args: Any) -> Any:
        """The rollout's reward, which all its samples have."""
        return main_sample(self).get_reward_value(args)


@dataclass(frozen=True, eq=False)
class _Branch:
    leaf: Turn
    tokens: TokenManager

    @property
    def sampled(self) -> int:
        return sum(kept for _, kept in self.leaf.steps())

    def images(self) -> dict[str, Any] | None:
        return self.tokens.multimodal_train_inputs if self.leaf.image_inputs() else None


@dataclass(frozen=True)
class _Verdict:
    """What slime is told of an episode."""

    status: str
    reward: Any
    remove: bool


def to_slime_samples(
    trajectory: Trajectory,
    sample: Any,
    outcome: TerminationReason | Outcome | str,
    *,
    tokenizer: Any,
    args: Any = None,
    reward: Any = None,
    fan_out: bool = False,
    abort_requested: bool = False,
    evaluation: bool = False,
    failure_reward: float = 0.0,
    off_policy_tokens: Mapping[int, int] | None = None,
    non_generation_time: float = 0.0,
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Fill slime's sample from a trajectory; the table of this module says how.

    Args:
        trajectory: The episode's calls.
        sample: slime's `Sample`; it is changed in place.
        outcome: Why the episode ended (see `termination_reason`), or what follows from that.
        tokenizer: The tokenizer of the served model.
        args: slime's parsed arguments: they tell what is replayed (`rollout_top_p`, `use_rollout_routing_replay`),
            `reward_key`, and how long a sample may be. Without them nothing is replayed.
        reward: The episode's reward: a number, or a dictionary for `reward_key`; None leaves it to slime's function.
        fan_out: Whether every sequence that has tokens to train becomes a sample. Otherwise the latest sequence of the
            main conversation becomes the sample, and a warning says that there are others.
        abort_requested: Whether slime itself stopped the episode and will run the sample again.
        evaluation: Whether the sample is none to train on; nothing is replayed then.
        failure_reward: The reward of samples that are removed.
        off_policy_tokens: By `Turn.index`, how many of its first tokens an earlier part of a partial rollout sampled,
            where those are to have loss mask 0.
        non_generation_time: Seconds that the episode spent on other things than generating.
        metadata: What `sample.metadata["strands_sglang"]` is to hold beside the outcome.

    Returns:
        The sample; with `fan_out` always a list of samples with one `rollout_id`, the given one among them, which holds
        the main conversation.

    Raises:
        TypeError: An argument is of another kind.
        SlimeExportError: What training needs was never asked for (logprobs, top-p ids, routed experts), or the routed
            experts are another model's: every sample would be like this one.
    """
    _check_arguments(trajectory, sample, reward)
    if isinstance(outcome, str) and not isinstance(outcome, TerminationReason):
        outcome = TerminationReason(outcome)
    replay = Replay() if evaluation else replay_of(args)
    main, others = _branches(trajectory)
    failed = as_reward(args, failure_reward, evaluation=evaluation)
    verdict = _verdict(trajectory, main, outcome, args, reward, abort_requested, failed, evaluation)
    facts = {
        **({_EVALUATION: True} if evaluation else {}),
        "outcome": outcome.value if isinstance(outcome, TerminationReason) else None,
        "model_calls": sum(turn.is_answered for turn in trajectory.turns),
        "other_sequences": len(others),
        **(metadata or {}),
    }
    chosen = [*others, main] if fan_out and not verdict.remove and verdict.status != "ABORTED" else [main]
    if others and not fan_out:
        _warn_of_others(len(others))
    own_mask = not fan_out
    samples = []
    for branch in chosen:
        rows, told = None, verdict
        if branch is not None and branch.sampled:
            tokens = sequence_of(branch.leaf) if own_mask else branch.tokens
            rows = rows_of(
                branch.leaf,
                tokens,
                replay=replay,
                keep_cut=verdict.status == "ABORTED",
                off_policy_tokens=off_policy_tokens or {},
            )
            if branch is not main and not any(rows.loss_mask):
                continue  # a retry took the place of what was cut
            if replay.experts is not None and rows.experts is None:
                told = _Verdict("FAILED", copy.deepcopy(failed), True)
        target = sample if branch is main else copy.deepcopy(sample)
        _fill(target, branch, rows, told, tokenizer, args, replay, evaluation)
        target.non_generation_time = float(non_generation_time)
        problems = list(rows.problems) if rows is not None else []
        for problem in problems:
            logger.warning("sample=<%s> | tokens are not trained: %s", getattr(sample, "index", None), problem)
        own = {**facts, "is_main": branch is main, **({"problems": problems} if problems else {})}
        target.metadata = {**(target.metadata or {}), METADATA_KEY: own}
        samples.append(target)
    if not fan_out:
        return samples[0]
    rollout_id = _rollout_id(sample)
    for one in samples:
        one.rollout_id = rollout_id
    return RolloutSamples(samples)


def _check_arguments(trajectory: Any, sample: Any, reward: Any) -> None:
    if not isinstance(trajectory, Trajectory):
        raise TypeError(f"the first argument must be a Trajectory, such as model.trajectory, not {trajectory!r:.80}")
    if not hasattr(type(sample), "Status") or not hasattr(sample, "tokens"):
        raise TypeError(f"the second argument must be slime's Sample, not {sample!r:.80}")
    if reward is not None and not isinstance(reward, Mapping) and not _is_number(reward):
        raise TypeError(f"reward must be a number, a dictionary with reward_key, or None, not {reward!r:.80}")


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, str)


# --- which sequences ---


def _branches(trajectory: Trajectory) -> tuple[_Branch | None, list[_Branch]]:
    """The main conversation's latest sequence, and the others that hold tokens to train."""
    leaf = trajectory.main_leaf()
    branches = [_Branch(end, tokens) for end, tokens in trajectory.branches()]
    main = next((branch for branch in branches if branch.leaf is leaf), None)
    if main is None and leaf is not None:  # it has no answer, or was thrown away
        kept = [branch for branch in branches if branch.leaf.root.key == leaf.root.key]
        main = max(kept, key=lambda branch: branch.leaf.index, default=_Branch(leaf, trajectory.latest_main_sequence()))
    return main, [branch for branch in branches if branch is not main and any(branch.tokens.loss_mask)]


_warned = False


def _warn_of_others(count: int) -> None:
    global _warned  # noqa: PLW0603
    if not _warned:
        logger.warning(
            "sequences=<%d> | an episode has more sequences to train than the one that becomes the sample: pass "
            "fan_out=True, or see metadata['strands_sglang']['other_sequences']; said once",
            count,
        )
    _warned = True


def _rollout_id(sample: Any) -> int:
    """What the samples of one rollout share; slime refuses lists without it."""
    for name in ("rollout_id", "index"):
        known = getattr(sample, name, None)
        if known is not None:
            return int(known)
    return uuid.uuid4().int >> 65  # above every index


# --- what slime is told ---


def _verdict(
    trajectory: Trajectory,
    main: _Branch | None,
    outcome: TerminationReason | Outcome,
    args: Any,
    reward: Any,
    abort_requested: bool,
    failed_reward: Any,
    evaluation: bool,
) -> _Verdict:
    sampled = sum(turn.generation.completion_tokens for turn in trajectory.turns if turn.generation is not None)
    if not isinstance(outcome, Outcome):
        told = outcome_of(outcome, sampled_tokens=sampled, abort_requested=abort_requested)
        wanted = OUTCOMES[outcome]
    else:
        told = wanted = outcome
    failed = _Verdict("FAILED", failed_reward, True)
    truncated = _Verdict("TRUNCATED", failed_reward, True)
    if wanted.slime_status == "ABORTED" and abort_requested:
        return _Verdict("ABORTED", None, False)  # slime runs it again, also if nothing was sampled
    if main is None or not main.sampled or told.slime_status == "FAILED":
        return failed
    if told.remove_sample or wanted.slime_status == "ABORTED":
        return truncated
    if told.reward is RewardRule.COMPUTED_IF_ANSWERED and not _is_answer(main.leaf):
        return truncated
    status = told.slime_status
    if status == "COMPLETED" and not _is_finished(trajectory, main.leaf):
        status = "TRUNCATED"
    if reward is not None and not _is_finite(args, reward, evaluation):
        logger.warning("reward=<%r> | a reward is no finite number; its sample is removed", reward)
        return _Verdict(status, failed_reward, True)
    own = copy.deepcopy(reward) if reward is None or isinstance(reward, Mapping) else float(reward)
    return _Verdict(status, own, False)


def _is_finished(trajectory: Trajectory, leaf: Turn) -> bool:
    """Whether the sequence ends with a whole answer, and no call is on its way that goes on from it."""
    whole = leaf.status is not TurnStatus.CUT and leaf.generation is not None and leaf.generation.finish_type == "stop"
    return whole and not any(turn.parent is leaf and turn.status is TurnStatus.ASKED for turn in trajectory.turns)


def _is_answer(leaf: Turn) -> bool:
    return leaf.status is not TurnStatus.CUT and not leaf.is_cut_short and not leaf.tool_calls and leaf.is_answered


def _is_finite(args: Any, reward: Any, evaluation: bool) -> bool:
    if not isinstance(reward, Mapping):
        return math.isfinite(float(reward))
    key = reward_key(args, evaluation=evaluation)
    values = [reward.get(key)] if key else [value for value in reward.values() if isinstance(value, float)]
    return all(value is not None and _is_number(value) and math.isfinite(float(value)) for value in values)


# --- filling ---


def _fill(
    sample: Any,
    branch: _Branch | None,
    rows: Rows | None,
    verdict: _Verdict,
    tokenizer: Any,
    args: Any,
    replay: Replay,
    evaluation: bool,
) -> None:
    images = None
    if rows is None:
        rows, images = _nothing_sampled(branch, tokenizer, args, replay, evaluation)
    elif branch is not None:
        images = branch.images()
    length = len(rows.loss_mask)
    mask, logprobs, top_p = rows.loss_mask, rows.logprobs, rows.top_p
    if verdict.remove:
        mask, logprobs = [0] * length, [0.0] * length
        top_p = _no_top_p(length) if replay.top_p else None
    sample.tokens = rows.token_ids
    sample.response_length = length
    sample.response = get_encoder(tokenizer).decode(rows.token_ids[-length:])
    sample.loss_mask = mask
    sample.rollout_log_probs = logprobs
    sample.status = type(sample).Status[verdict.status]
    sample.reward = verdict.reward
    sample.remove_sample = verdict.remove
    sample.multimodal_train_inputs = images
    sample.rollout_routed_experts = rows.experts
    if replay.experts is not None and rows.experts is None:
        sample.rollout_routed_experts = placeholder_experts(len(rows.token_ids), *replay.experts)
    sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = (None, None) if top_p is None else top_p
    for name in _MADE_LATER:
        if hasattr(sample, name):
            setattr(sample, name, None)
    turns = [turn for turn in (branch.leaf.path() if branch is not None else []) if turn.generation is not None]
    sample.weight_versions = [version for turn in turns for version in _weight_versions(turn)]
    _count(sample, turns, args)


def _weight_versions(turn: Turn) -> list[str]:
    """The version that answered a call; all of them in order, where the weights changed in between."""
    generation = turn.generation
    if generation is None or generation.weight_version is None:
        return []
    versions = [span.version for span in generation.weight_versions]
    changed = [version for version, before in zip(versions, [None, *versions], strict=False) if version != before]
    return changed or [generation.weight_version]


def _nothing_sampled(
    branch: _Branch | None, tokenizer: Any, args: Any, replay: Replay, evaluation: bool
) -> tuple[Rows, dict[str, Any] | None]:
    """The prompt, as far as it fits, and one token that nobody is trained on."""
    prompt = branch.tokens.token_ids if branch is not None else []
    images = branch.images() if branch is not None else None
    limit = context_limit(args, evaluation=evaluation)
    if limit is not None and len(prompt) >= limit:
        # What did not fit the server's context does not fit training either.
        prompt, images = prompt[: max(limit - 1, 1)], None
    tokens = [*(prompt or [_padding(tokenizer)]), _padding(tokenizer)]
    return Rows(tokens, [0], [0.0], _no_top_p(1) if replay.top_p else None, None, ()), images


def _padding(tokenizer: Any) -> int:
    for name in ("pad_token_id", "eos_token_id"):
        known = getattr(tokenizer, name, None)
        if isinstance(known, int):
            return known
    return 0


def _no_top_p(length: int) -> Any:
    import torch

    return torch.zeros(0, dtype=torch.int32), torch.zeros(length + 1, dtype=torch.int32)


def _count(sample: Any, turns: list[Turn], args: Any) -> None:
    """Fill what slime counts of the prefix cache and of speculative decoding, over the calls of the sequence."""
    names = ["prefix_cache_info"]
    if getattr(args, "sglang_speculative_algorithm", None):
        names.append("spec_info")
    for name in ("prefix_cache_info", "spec_info"):
        counted = getattr(sample, name, None)
        if counted is None:
            continue
        fresh = type(counted)()
        for turn in turns if name in names else []:
            generation = turn.generation
            if generation is not None:
                own = {"cached_tokens": generation.cached_tokens, "prompt_tokens": generation.prompt_tokens}
                fresh.add({**generation.meta_info, **own, "completion_tokens": generation.completion_tokens})
        setattr(sample, name, fresh)
