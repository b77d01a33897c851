"""AReaL: a workflow that runs a whole group of episodes, and gives AReaL the rows with their advantages.

    from strands_sglang.trainers.areal import workflow

    @workflow(group_size=8)
    async def calculator(engine, data): ...

AReaL's own baselines slice rows, or count all rows of a batch. Here they are computed over episodes, and reach AReaL as
the rows' rewards; `check_config` refuses settings that would change them. AReaL takes one advantage per row. It is
imported only when used; docs/guides/areal.md shows the settings.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from ..credit import Episode, Reduction, TrainingRow, TrainingRows, per_batch, training_rows, version_number
from ..protocol.generation import VersionSpan
from .records import log_left_out, refuse_images, run_together

LOSSES: Mapping[str, Reduction] = {"areal": per_batch}
"""AReaL's loss."""

RunEpisode = Callable[[Any, Mapping[str, Any]], Awaitable[Episode]]
"""Async function of AReaL's engine and a row of the dataset that runs one episode. Its `group` is replaced."""

_NO_NORM = "AReaL's normalization slices or counts rows, not episodes; the rows' rewards are advantages already"
_ACTOR = {
    "reward_norm": (None, _NO_NORM),
    "adv_norm": (None, _NO_NORM),
    "reward_scaling": (1.0, "it would scale the advantages"),
    "reward_bias": (0.0, "it would shift the advantages"),
    "overlong_reward_penalty": (False, "it would change the advantages of long rows; put it into the reward"),
    "mask_no_eos_with_zero": (False, "it drops the advantages of the longest rows; put it into the reward"),
    "discount": (1.0, "an advantage would shrink with a row's length; use training_rows(discount=...)"),
    "gae_lambda": (1.0, "an advantage would shrink with a row's length"),
    "kl_ctl": (0.0, "without a reference model it adds the logprobs themselves to the advantages"),
    "importance_sampling_level": ("token", "a ratio of a row is none of an episode"),
}
_ANY_VALUE = frozenset(
    ("ppo_n_minibatches", "eps_clip", "eps_clip_higher", "c_clip", "reward_clip", "kl_estimator", "recompute_logprob")
    + ("use_decoupled_loss", "prox_logp_method", "max_new_tokens")
)
"""Settings of AReaL's actor that leave the weights of rows and tokens as they are."""


def check_config(config: Any) -> None:
    """Check that AReaL leaves the advantages as they are.

    Args:
        config: AReaL's `PPOConfig` or `GRPOConfig`.

    Raises:
        ValueError: A setting would change the advantages, or is unknown here and is not AReaL's default.
            The message names all of them, and what to set.
    """
    from areal.api.cli_args import PPOActorConfig, TrainEngineConfig

    default = PPOActorConfig(experiment_name="", trial_name="")
    known = {*_ACTOR, *_ANY_VALUE, *(field.name for field in fields(TrainEngineConfig))}
    wrong = [
        f"set actor.{name}={value!r} ({why})"
        for name, (value, why) in _ACTOR.items()
        if getattr(config.actor, name) != value
    ]
    wrong += [
        f"leave actor.{field.name} out (it may change the loss)"
        for field in fields(PPOActorConfig)
        if field.name not in known and getattr(config.actor, field.name) != getattr(default, field.name)
    ]
    if config.gconfig.n_samples != 1:
        wrong.append("set gconfig.n_samples=1 (the workflow runs the whole group: group_size=...)")
    if wrong:
        raise ValueError("; ".join(wrong))


def workflow(group_size: int, **credit: Any) -> Callable[[RunEpisode], Any]:
    """Turn a function that runs one episode into a workflow that runs a group of episodes.

    AReaL imports the decorated function by its module and name, in its workers: `workflow="my_module.calculator"`.

    Args:
        group_size: Episodes per row of the dataset.
        **credit: Arguments of [`training_rows`][strands_sglang.credit.training_rows], such as `baseline`, `max_tokens`
            and `max_staleness`; the version is the engine's. AReaL does not tell SGLang the version of the weights that
            it pushes, so tokens have the one that the engine had when their episode began.

    Returns:
        A decorator that returns an instance of AReaL's `RolloutWorkflow`. Episodes that cannot be trained are logged
            and left out; AReaL's metrics count them as `episodes_left_out`. The metric `reward` is the mean over all
            episodes that have one. If no episode is left, or their rewards are equal, the group is *rejected*, in
            AReaL's words.
    """

    def decorate(run_episode: RunEpisode) -> Any:
        from areal import workflow_context
        from areal.api.workflow_api import RolloutWorkflow
        from areal.utils import stats_tracker

        class StrandsWorkflow(RolloutWorkflow):
            async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
                version = engine.get_version()
                episodes = await run_together(run_episode(engine, data) for _ in range(group_size))
                _name_versions(episodes, version)
                is_limited = credit.get("max_staleness") is not None
                staleness = {"version": engine.get_version()} if is_limited else {}
                rows = training_rows(
                    [replace(episode, group=0) for episode in episodes],
                    **{"skip_flat_groups": True, **credit, **staleness},
                )
                log_left_out(rows)
                tracker = stats_tracker.get(workflow_context.stat_scope())
                tracker.scalar(episodes_left_out=len(rows.left_out))
                for reward in rows.rewards.values():  # what an evaluation reports, whatever can be trained
                    tracker.scalar(reward=reward)
                return to_batch(rows, version)

        return StrandsWorkflow()

    return decorate


def _name_versions(episodes: list[Episode], version: int) -> None:
    """Record which weights sampled where the server names none, or the ones that it started with."""
    for turn in chain.from_iterable(episode.trajectory.turns for episode in episodes):
        generation = turn.generation
        if generation is not None and generation.weight_version in (None, "default"):
            spans = (VersionSpan(str(version), 0, len(generation.output_ids)),)
            turn.generation = replace(generation, weight_version=str(version), weight_versions=spans)


def to_batch(rows: TrainingRows, version: int = 0) -> dict[str, Any] | None:
    """Return rows as a batch of AReaL: tensors of shape `(rows, T)`, and `rewards` of shape `(rows,)`.

    A row ends with its last trained token: AReaL places a row's reward before its last token, and drops it if that is
    not trained.

    Args:
        rows: The rows of whole groups.
        version: Version of tokens for which the server named no integer.

    Returns:
        The batch; None, which AReaL takes for a rejected group, if there are no rows.

    Raises:
        ValueError: Turns of a row have different advantages, or a row has images, which AReaL's batch cannot express.
    """
    import torch

    if not len(rows):
        return None
    refuse_images(rows, "AReaL's batch")

    def version_of(name: str | None, mask: int) -> int:
        """Return the version that sampled a token; -1 if the token is not trained, as in AReaL."""
        number = version_number(name) if mask else -1
        return version if number is None or name == "default" else number

    ends = [len(row) - row.loss_mask[::-1].index(1) for row in rows]
    columns: dict[str, tuple[Callable[[TrainingRow], list[Any]], Any, float]] = {
        "input_ids": (lambda row: row.token_ids, torch.int32, 0),
        "loss_mask": (lambda row: row.loss_mask, torch.int32, 0),
        "logprobs": (lambda row: row.logprobs, torch.float32, 0.0),
        "versions": (lambda row: [*map(version_of, row.versions, row.loss_mask)], torch.int32, -1),
        "attention_mask": (lambda row: [True] * len(row), torch.bool, False),
    }
    batch = {}
    for name, (column, kind, filler) in columns.items():
        padded = [
            [*column(row)[:end], *[filler] * (max(ends) - end)]  # AReaL pads on the right, too
            for row, end in zip(rows, ends, strict=True)
        ]
        batch[name] = torch.tensor(padded, dtype=kind)
    batch["rewards"] = torch.tensor([row.advantage for row in rows], dtype=torch.float32)
    return batch
