"""slime's `Sample`s from a trajectory, for every outcome.

docs/guides/slime.md has the table of outcomes. "All" tokens there are those of the sequence up to the last sampled one,
since no call has shown later tool results to the model. Removed samples have a reward, because slime would otherwise
have its reward function score them.

Prompt and response have at least one token each. Mask, logprobs and replayed data are aligned with the response's
tokens; logprobs are finite, and 0.0 where the mask is 0. No field of an earlier run remains. Samples share no objects
with the trajectory or with each other. An export raises only errors that the caller can fix.
"""

from __future__ import annotations

import copy
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from ...credit import LARGEST_REWARD, as_number, row_of
from ...exceptions import SGLangDecodingError
from ...outcomes import OUTCOMES, Outcome, RewardRule, TerminationReason, outcome_of
from ...protocol.generation import Generation
from ...templates.encoder import get_encoder
from ...trajectory.export import sequence_of
from ...trajectory.tokens import TokenManager
from ...trajectory.trajectory import Trajectory
from ...trajectory.turn import Turn, TurnStatus

if TYPE_CHECKING:
    import torch


class SlimeExportError(ValueError):
    """A sample cannot be made for a reason that the caller can fix; the message says how."""


@dataclass(frozen=True)
class Replay:
    """Data that training replays in addition to the tokens.

    Attributes:
        top_p: Whether the ids kept by top-p are replayed (`rollout_top_p` is not 1).
        experts: Layers and experts per token, if routing is replayed (`use_rollout_routing_replay`); None otherwise.
    """

    top_p: bool = False
    experts: tuple[int, int] | None = None


def replay_of(args: Any) -> Replay:
    """Return what training replays with these arguments.

    Raises:
        SlimeExportError: Routing is replayed, but the arguments lack the model's layers or experts per token.
    """
    experts = None
    if getattr(args, "use_rollout_routing_replay", False):
        layers, top_k = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
        if not layers or not top_k:
            raise SlimeExportError(
                f"use_rollout_routing_replay needs the model's num_layers and moe_router_topk, but they are {layers!r} "
                f"and {top_k!r}"
            )
        experts = (int(layers), int(top_k))
    top_p = getattr(args, "rollout_top_p", None)
    return Replay(top_p=top_p is not None and top_p != 1.0, experts=experts)


def context_limit(args: Any, *, evaluation: bool = False) -> int | None:
    """Return the maximum length of a sample in tokens: the configured one, or what fits one micro-batch.

    With `use_dynamic_batch_size`, a sample longer than `max_tokens_per_gpu * context_parallel_size` fits none.

    Args:
        args: Parsed arguments of slime.
        evaluation: Whether the sample is for evaluation only.
    """
    eval_limit = getattr(args, "eval_max_context_len", None) if evaluation else None
    limits = [eval_limit or getattr(args, "rollout_max_context_len", None)]
    if not evaluation and getattr(args, "use_dynamic_batch_size", False) and getattr(args, "max_tokens_per_gpu", None):
        limits.append(args.max_tokens_per_gpu * (getattr(args, "context_parallel_size", None) or 1))
    return min((int(limit) for limit in limits if limit), default=None)


def normalizes_by_group(args: Any) -> bool:
    """Return whether slime subtracts the mean reward of a prompt's samples, by the advantage estimator."""
    estimator = getattr(args, "advantage_estimator", "grpo")
    relative = estimator in ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
    return relative and bool(getattr(args, "rewards_normalization", True))


def reward_key(args: Any, *, evaluation: bool = False) -> str | None:
    """Return the key under which slime reads a sample's reward; None if the reward is a number."""
    eval_key = getattr(args, "eval_reward_key", None) if evaluation else None
    return eval_key or getattr(args, "reward_key", None)


def as_reward(args: Any, value: float, *, evaluation: bool = False, category: str = "failed") -> Any:
    """Return a reward in slime's form: a number, or a dictionary with every key that slime reads.

    Args:
        args: Parsed arguments of slime: `reward_key`, `eval_reward_key`, `log_reward_category`.
        value: Reward.
        evaluation: Whether the sample is for evaluation only.
        category: Category of the sample in `log_reward_category`.
    """
    if not reward_key(args, evaluation=evaluation):
        return value
    known = {getattr(args, name, None) for name in ("reward_key", "eval_reward_key")} - {None}
    logged = getattr(args, "log_reward_category", None)
    return {**({logged: category} if logged else {}), **dict.fromkeys(known, value)}


def plain_reward(args: Any, reward: Any) -> Any:
    """Return a usable reward with Python's floats: slime rounds it, which NumPy's booleans and tensors refuse."""
    if not isinstance(reward, Mapping):
        return as_number(reward)
    known = {getattr(args, name, None) for name in ("reward_key", "eval_reward_key")} & reward.keys()
    numbers = {name: as_number(reward[name]) for name in known}  # NaN for what slime does not read now, such as None
    return {**copy.deepcopy(reward), **{name: number for name, number in numbers.items() if not math.isnan(number)}}


def usable_reward(args: Any, reward: Any, *, evaluation: bool = False) -> float | None:
    """Return a reward as a number; None if it is missing, not finite, or exceeds 1e18."""
    if isinstance(reward, Mapping):
        reward = reward.get(reward_key(args, evaluation=evaluation))
    value = as_number(reward)
    return value if abs(value) <= LARGEST_REWARD else None


logger = logging.getLogger(__name__)

METADATA_KEY = "strands_sglang"
"""Key in `sample.metadata` of this library's facts about the episode."""

_FILLED_LATER = ("teacher_log_probs", "mopd_teacher_log_probs", "rollout_top_p_log_probs")
"""Fields that slime fills from a finished sample; values of an earlier run belong to another response."""


_EVALUATION = "evaluation"
"""Key under `METADATA_KEY` that marks evaluation samples, which slime does not reveal to reward functions."""


def is_evaluation(sample: Any) -> bool:
    """Return whether a sample was made for an evaluation."""
    return bool(_facts(sample).get(_EVALUATION))


def main_sample(samples: Sequence[Any]) -> Any:
    """Return the sample with the main conversation of a rollout."""
    return next((sample for sample in samples if _facts(sample).get("is_main")), samples[-1])


def _facts(sample: Any) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = (sample.metadata or {}).get(METADATA_KEY, {})
    return facts


def rollout_of(sample: Any) -> Any:
    """Return what the samples of one rollout share: `rollout_id`, or `index` as in slime; unique without either."""
    known = (getattr(sample, name, None) for name in ("rollout_id", "index"))
    return next((identity for identity in known if identity is not None), ("lone", id(sample)))


class RolloutSamples(list[Any]):
    """The samples of one rollout, for slime's code that treats every member of a group as a sample.

    slime's fully asynchronous rollout sorts groups by a member's `index`, and its filters read the members' rewards.
    """

    @property
    def index(self) -> Any:
        """Index of the rollout, instead of the list method."""
        return main_sample(self).index

    def get_reward_value(self, args: Any) -> Any:
        """Return the reward of the rollout, which all its samples share."""
        return main_sample(self).get_reward_value(args)


@dataclass(frozen=True, eq=False)
class _Branch:
    leaf: Turn
    tokens: TokenManager

    @property
    def sampled(self) -> int:
        return sum(kept for _, kept in self.leaf.steps())


class _Verdict(NamedTuple):
    """What slime learns about an episode."""

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
    """Fill slime's sample from a trajectory, for a `generate` function of your own.

    The [slime guide](../guides/slime.md#what-an-episode-becomes) has the status, tokens and reward for each outcome.
    The outcome and further facts go into `sample.metadata["strands_sglang"]`.

    Args:
        trajectory: Trajectory of the episode.
        sample: slime's `Sample`; it is modified in place.
        outcome: Reason why the episode ended, as from [`termination_reason`][strands_sglang.termination_reason], or an
            [`Outcome`][strands_sglang.Outcome].
        tokenizer: Tokenizer of the served model.
        args: Parsed arguments of slime. They determine what is replayed (`rollout_top_p`,
            `use_rollout_routing_replay`), the `reward_key`, and the maximum length of a sample. With None nothing is
            replayed.
        reward: Reward of the episode: a number, or a dictionary with `reward_key`; None leaves it to slime's function.
        fan_out: Whether every sequence with tokens to train becomes a sample. Otherwise the latest sequence of the main
            conversation does, and a warning mentions the others.
        abort_requested: Whether slime itself stopped the episode and will run the sample again.
        evaluation: Whether the sample is for evaluation only; nothing is replayed then.
        failure_reward: Reward of removed samples.
        off_policy_tokens: Number of leading tokens per `Turn.index` that an earlier part of a partial rollout sampled
            and that get loss mask 0; None for none.
        non_generation_time: Seconds that the episode did not spend on generation.
        metadata: Further entries of `sample.metadata["strands_sglang"]`.

    Returns:
        The sample. With `fan_out` always a list of samples with one `rollout_id`; the given sample is among them and
            has the main conversation.

    Raises:
        TypeError: An argument has the wrong type.
        SlimeExportError: Data that training needs was never requested (logprobs, top-p ids, routed experts), or the
            routed experts belong to another model. Every sample would fail in the same way.
    """
    if not isinstance(trajectory, Trajectory):
        raise TypeError(f"the first argument must be a Trajectory, such as model.trajectory, not {trajectory!r:.80}")
    if not hasattr(type(sample), "Status") or not hasattr(sample, "tokens"):
        raise TypeError(f"the second argument must be slime's Sample, not {sample!r:.80}")
    if reward is not None and not isinstance(reward, Mapping) and not hasattr(reward, "__float__"):
        raise TypeError(f"reward must be a number, a dictionary with reward_key, or None, not {reward!r:.80}")
    if isinstance(outcome, str) and not isinstance(outcome, TerminationReason):
        outcome = TerminationReason(outcome)
    replay = Replay() if evaluation else replay_of(args)
    export = _Export(trajectory, tokenizer, args, evaluation, failure_reward, replay)
    # The main conversation's latest sequence, and the others that hold tokens to train.
    leaf = trajectory.main_leaf()
    branches = [_Branch(end, tokens) for end, tokens in trajectory.branches()]
    main = next((branch for branch in branches if branch.leaf is leaf), None)
    if main is None and leaf is not None:  # it has no answer, or was discarded
        kept = [branch for branch in branches if branch.leaf.root.key == leaf.root.key]
        main = max(kept, key=lambda branch: branch.leaf.index, default=_Branch(leaf, trajectory.latest_main_sequence()))
    others = [branch for branch in branches if branch is not main and any(branch.tokens.loss_mask)]
    verdict = export.verdict(main, outcome, reward, abort_requested)
    facts = {
        **({_EVALUATION: True} if evaluation else {}),
        "outcome": outcome.value if isinstance(outcome, TerminationReason) else None,
        "model_calls": sum(turn.is_answered for turn in trajectory.turns),
        "other_sequences": len(others),
        **(metadata or {}),
    }
    chosen = [*others, main] if fan_out and not verdict.remove and verdict.status != "ABORTED" else [main]
    if others and not fan_out and not _warned:
        logger.warning(
            "sequences=<%d> | an episode has further sequences to train, and only one becomes the sample: pass "
            "fan_out=True, or see metadata['strands_sglang']['other_sequences']; logged once",
            len(others),
        )
        _warned.append(True)
    samples = []
    for branch in chosen:
        rows, own_verdict = None, verdict
        if branch is not None and branch.sampled:
            rows = rows_of(
                branch.leaf,
                branch.tokens if fan_out else sequence_of(branch.leaf),  # with its own full mask
                replay=replay,
                keep_cut=verdict.status == "ABORTED",
                off_policy_tokens=off_policy_tokens or {},
            )
            if branch is not main and not any(rows.loss_mask):
                continue  # a retry replaced what was cut
            if replay.experts is not None and rows.experts is None:
                own_verdict = export.failed("FAILED")
        target = sample if branch is main else copy.deepcopy(sample)
        export.fill(target, branch, rows, own_verdict)
        target.non_generation_time = float(non_generation_time)
        problems = rows.problems if rows is not None else []
        for problem in problems:
            logger.warning("sample=<%s> | tokens are not trained: %s", getattr(sample, "index", None), problem)
        entry = {**facts, "is_main": branch is main, **({"problems": problems} if problems else {})}
        target.metadata = {**(target.metadata or {}), METADATA_KEY: entry}
        samples.append(target)
    if not fan_out:
        return samples[0]
    rollout = rollout_of(sample)  # slime rejects lists without a number; a new one is above every index
    rollout_id = uuid.uuid4().int >> 65 if isinstance(rollout, tuple) else int(rollout)
    for converted in samples:
        converted.rollout_id = rollout_id
    return RolloutSamples(samples)


_warned: list[bool] = []
"""Not empty once the warning about further sequences was logged."""


# --- Verdicts, and the fields of samples ---


@dataclass(frozen=True)
class _Export:
    trajectory: Trajectory
    tokenizer: Any
    args: Any
    evaluation: bool
    failure_reward: float
    replay: Replay

    def failed(self, status: str) -> _Verdict:
        return _Verdict(status, as_reward(self.args, self.failure_reward, evaluation=self.evaluation), True)

    def verdict(
        self, main: _Branch | None, outcome: TerminationReason | Outcome, reward: Any, abort_requested: bool
    ) -> _Verdict:
        trajectory = self.trajectory
        if isinstance(outcome, Outcome):
            resolved = wanted = outcome
        else:
            sampled = sum(len(turn.output_ids) for turn in trajectory.turns)
            resolved = outcome_of(outcome, sampled_tokens=sampled, abort_requested=abort_requested)
            wanted = OUTCOMES[outcome]
        if wanted.slime_status == "ABORTED" and abort_requested:
            return _Verdict("ABORTED", None, False)  # slime runs it again, even if nothing was sampled
        if main is None or not main.sampled or resolved.slime_status == "FAILED":
            return self.failed("FAILED")
        leaf = main.leaf
        uncut = leaf.status is not TurnStatus.CUT
        answered = uncut and not leaf.is_cut_short and not leaf.tool_calls and leaf.is_answered
        if (
            resolved.remove_sample
            or wanted.slime_status == "ABORTED"
            or (resolved.reward is RewardRule.COMPUTED_IF_ANSWERED and not answered)
        ):
            return self.failed("TRUNCATED")
        status = resolved.slime_status
        # Whether the sequence ends with a whole answer, and no call in flight continues from it.
        whole = uncut and leaf.generation is not None and leaf.generation.finish_type == "stop"
        continues = any(turn.parent is leaf and turn.status is TurnStatus.ASKED for turn in trajectory.turns)
        if status == "COMPLETED" and (continues or not whole):
            status = "TRUNCATED"
        if reward is not None and not self._is_finite(reward):
            logger.warning(
                "reward=<%r> | a reward is not a finite number, or exceeds 1e18; its sample is removed", reward
            )
            return self.failed(status)
        return _Verdict(status, None if reward is None else plain_reward(self.args, reward), False)

    def _is_finite(self, reward: Any) -> bool:
        if not isinstance(reward, Mapping) or reward_key(self.args, evaluation=self.evaluation):
            return usable_reward(self.args, reward, evaluation=self.evaluation) is not None
        return all(abs(value) <= LARGEST_REWARD for value in reward.values() if isinstance(value, float))

    def fill(self, sample: Any, branch: _Branch | None, rows: Rows | None, verdict: _Verdict) -> None:
        images = branch.tokens.multimodal_train_inputs if branch is not None and branch.leaf.image_inputs() else None
        if rows is None:  # the prompt, as far as it fits, and one token with loss mask 0
            prompt = branch.tokens.token_ids if branch is not None else []
            known = (getattr(self.tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
            padding = next((token_id for token_id in known if isinstance(token_id, int)), 0)
            limit = context_limit(self.args, evaluation=self.evaluation)
            if limit is not None and len(prompt) >= limit:
                # A prompt that did not fit the server's context does not fit training either.
                prompt, images = prompt[: max(limit - 1, 1)], None
            rows = Rows([*(prompt or [padding]), padding], [0], [0.0], None, None, [])
        length, replay = len(rows.loss_mask), self.replay
        mask, logprobs, top_p = rows.loss_mask, rows.logprobs, rows.top_p
        if verdict.remove:
            mask, logprobs, top_p = [0] * length, [0.0] * length, None
        if replay.top_p and top_p is None:
            top_p = _top_p([], mask, 0, [])
        sample.tokens = rows.token_ids
        sample.response_length = length
        sample.response = get_encoder(self.tokenizer).decode(rows.token_ids[-length:])
        sample.loss_mask = mask
        sample.rollout_log_probs = logprobs
        sample.status = type(sample).Status[verdict.status]
        sample.reward = verdict.reward
        sample.remove_sample = verdict.remove
        sample.multimodal_train_inputs = images
        sample.rollout_routed_experts = rows.experts
        if replay.experts is not None and rows.experts is None:
            import torch

            layers, top_k = replay.experts
            distinct = torch.arange(top_k, dtype=torch.int32)  # slime rejects layers of zeros
            sample.rollout_routed_experts = distinct.repeat(len(rows.token_ids) - 1, layers, 1)
        sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = top_p or (None, None)
        for name in _FILLED_LATER:
            if hasattr(sample, name):
                setattr(sample, name, None)
        path = branch.leaf.path() if branch is not None else []
        generations = [turn.generation for turn in path if turn.generation is not None]
        sample.weight_versions = list(chain.from_iterable(map(_weight_versions, generations)))
        # slime's counts of the prefix cache and of speculative decoding, over the calls of the sequence.
        speculates = getattr(self.args, "sglang_speculative_algorithm", None)
        for name, counts in (("prefix_cache_info", True), ("spec_info", speculates)):
            if getattr(sample, name, None) is not None:
                fresh = type(getattr(sample, name))()
                for generation in generations if counts else []:
                    token_counts = {
                        "cached_tokens": generation.cached_tokens,
                        "prompt_tokens": generation.prompt_tokens,
                    }
                    fresh.add(
                        {**generation.meta_info, **token_counts, "completion_tokens": generation.completion_tokens}
                    )
                setattr(sample, name, fresh)


def _weight_versions(generation: Generation) -> list[str]:
    """Return the version of the weights that answered a call, or all in order if they changed during it."""
    if generation.weight_version is None:
        return []
    changed = [version for version, _ in groupby(span.version for span in generation.weight_versions)]
    return changed or [generation.weight_version]


# --- One sequence, token by token ---


@dataclass(frozen=True, eq=False)
class Rows:
    """One sequence, split into prompt and response. R is the length of the response, T the length of both.

    Attributes:
        token_ids: Prompt and response, shape `(T,)`.
        loss_mask: 0 or 1 for each token of the response, shape `(R,)`.
        logprobs: Logprobs of the response, 0.0 where the mask is 0, shape `(R,)`.
        top_p: Ids kept by top-p, concatenated, and the starts of their spans, shape `(R + 1,)`; both int32. None if not
            replayed.
        experts: Routed experts, int32, shape `(T - 1, layers, top_k)`; None if not replayed, or incomplete.
        problems: Messages about tokens that were masked because their data is incomplete.
    """

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    top_p: tuple[torch.Tensor, torch.Tensor] | None
    experts: torch.Tensor | None
    problems: list[str]


class SampledSpan(NamedTuple):
    """Position of a turn's sampled tokens in a sequence, from `start` to `stop`."""

    turn: Turn
    start: int
    stop: int


def rows_of(
    leaf: Turn,
    sequence: TokenManager,
    *,
    replay: Replay,
    keep_cut: bool,
    off_policy_tokens: Mapping[int, int],
) -> Rows:
    """Lay out a sequence that has at least one sampled token.

    Args:
        leaf: Last turn of the sequence.
        sequence: Tokens of the sequence, with its mask.
        replay: What training replays.
        keep_cut: Whether cut turns keep their mask, because the sample is continued rather than trained.
        off_policy_tokens: Number of leading tokens per `Turn.index` that older weights sampled; they get mask 0.

    Raises:
        SlimeExportError: Logprobs, top-p ids or experts were never requested, or belong to another model.
    """
    row = row_of(leaf, sequence)
    spans: list[SampledSpan] = []
    stop = 0
    for turn, part in zip(leaf.path(), row.spans, strict=True):
        begins = stop + part.prompt_tokens
        stop = begins + part.sampled_tokens
        spans.append(SampledSpan(turn, begins, stop))
    start, mask, known = spans[0].start, row.loss_mask, row.logprobs
    if replay.top_p:  # those among the kept ids, as training computes them; slime's SGLang returns no others
        exact = zip(sequence.sampling_logprobs, known, strict=True)
        known = [logprob if among_kept is None else among_kept for among_kept, logprob in exact]
    problems: list[str] = []
    for span in spans:
        if span.turn.status is TurnStatus.DISCARDED or (span.turn.status is TurnStatus.CUT and not keep_cut):
            _clear(mask, span.start, span.stop)
        old = span.start + off_policy_tokens.get(span.turn.index, 0)
        _clear(mask, span.start, min(span.stop, old))
        whole = _uninterrupted(span.turn)
        if whole is not None and whole.logprobs is None and any(mask[span.start : span.stop]):
            raise SlimeExportError(
                f"call {span.turn.index} has no logprobs, but slime trains on them: leave return_logprob of "
                "SGLangModel at True, its default"
            )
        trained = compress(range(span.start, span.stop), mask[span.start : span.stop])
        unknown = [place for place in trained if not math.isfinite(known[place])]
        for place in unknown:
            mask[place] = 0
        if unknown:
            problems.append(f"{len(unknown)} tokens of call {span.turn.index} have no finite logprob")
    top_p = _top_p(spans, mask, start, problems) if replay.top_p else None
    experts = None
    if replay.experts is not None:
        try:
            experts = expert_rows(leaf, *replay.experts)
        except SGLangDecodingError as error:
            problems.append(str(error))
        if experts is None:
            whole = _uninterrupted(leaf)
            if whole is not None and whole.routed_experts is None:
                raise SlimeExportError(
                    f"call {leaf.index} has no routed experts, but use_rollout_routing_replay needs them: set "
                    "return_routed_experts=True of SGLangModel, and start the server with "
                    "--enable-return-routed-experts"
                )
            problems.append("its routed experts are incomplete")
    logprobs = [logprob if kept else 0.0 for kept, logprob in zip(mask, known, strict=True)]
    return Rows(row.token_ids, mask[start:], logprobs[start:], top_p, experts, problems)


def _clear(mask: list[int], start: int, stop: int) -> None:
    mask[start:stop] = [0] * len(mask[start:stop])


def _uninterrupted(turn: Turn) -> Generation | None:
    """Return the answer if one request returned all of it, so that all requested data is present.

    A resumed answer lacks what its aborted part lacks, even if its last part has it.
    """
    generation = turn.generation
    if generation is None or generation.finish_type == "abort" or generation.resumed_ids:
        return None
    return generation


# --- Top-p ---


def _top_p(
    spans: list[SampledSpan], mask: list[int], start: int, problems: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids kept by top-p, an empty span for tokens with mask 0; tokens without ids get mask 0."""
    import torch

    ids: list[torch.Tensor] = []
    offsets = torch.zeros(len(mask) - start + 1, dtype=torch.int32)
    for span in spans:
        if not any(mask[span.start : span.stop]) or span.turn.generation is None:
            continue
        try:
            kept = span.turn.generation.kept_ids()
        except ValueError as error:
            problems.append(f"call {span.turn.index}: {error}")
            _clear(mask, span.start, span.stop)
            continue
        if kept is None:
            if _uninterrupted(span.turn) is not None:
                raise SlimeExportError(
                    f"call {span.turn.index} has no top_p_token_ids, but rollout_top_p != 1 needs them: use slime's "
                    "SGLang and pass on slime's sampling_params (custom_params), or request sampling masks from any "
                    "SGLang: request_fields={'return_sampling_mask': True} of SGLangModel, and a finite top_k"
                )
            problems.append(f"call {span.turn.index} was aborted, and part of it has no top-p ids")
            _clear(mask, span.start, span.stop)
            continue
        rows = kept.part(0, span.stop - span.start)
        widths = torch.tensor(rows.lengths, dtype=torch.int32)
        trained = torch.tensor(mask[span.start : span.stop], dtype=torch.bool)
        if unknown := int((trained & (widths == 0)).sum()):  # of a part that the server aborted
            problems.append(f"{unknown} tokens of call {span.turn.index} have no top-p ids")
            trained &= widths > 0
            mask[span.start : span.stop] = trained.int().tolist()
        ids.append(torch.tensor(rows.token_ids, dtype=torch.int32)[trained.repeat_interleave(widths)])
        offsets[span.start - start + 1 : span.stop - start + 1] = widths * trained
    return torch.cat([torch.zeros(0, dtype=torch.int32), *ids]), offsets.cumsum(0, dtype=torch.int32)


# --- Routed experts ---


def expert_rows(leaf: Turn, layers: int, top_k: int) -> torch.Tensor | None:
    """Return the experts of every token of a sequence except the last, from the call that first ran each token.

    Sampled tokens thus have the rows with which they were sampled.

    Args:
        leaf: Last turn of the sequence.
        layers: Number of layers of the model, including those without experts.
        top_k: Number of experts per token.

    Returns:
        Array of int32, shape `(T - 1, layers, top_k)`; None if rows are missing.

    Raises:
        SlimeExportError: The server's model has another number of layers or experts.
    """
    import torch

    parts: list[torch.Tensor] = []
    have = position = 0
    for turn, kept in leaf.steps():
        position += len(turn.prompt_ids)
        generation = turn.generation
        rows = position + len(turn.output_ids) - 1
        if generation is not None and generation.routed_experts is not None and generation.routed_rows == rows > have:
            if generation.routed_width != layers * top_k:
                raise SlimeExportError(
                    f"call {turn.index} has {generation.routed_width} routed experts per token, but num_layers * "
                    f"moe_router_topk is {layers} * {top_k}: the arguments are another model's"
                )
            parts.append(torch.tensor(generation.expert_ids(have)).reshape(-1, layers, top_k))
            have = rows
        position += kept
        if have > position:  # rows of tokens that no later call kept
            parts, have = [torch.cat(parts)[:position]], position
    needed = position - 1
    if have < needed or not parts:
        return None
    return torch.cat(parts)[:needed]
