"""Environments under slime (github.com/THUDM/slime): `make_generate` builds the custom generate function.

    generate = make_generate(lambda model_factory, sample: MathEnv(model_factory, MathReward()))

slime's token budget applies to the whole response, its aborts stop an episode at once, and every outcome is a sample
that slime can use.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import ValidationError

from strands_sglang import SGLangModel
from strands_sglang.trainers import slime

from .core import Action, Environment, ModelFactory, TaskContext
from .core.supervision import maybe_await

MakeEnvironment = Callable[[ModelFactory, Any], "Environment | Awaitable[Environment]"]


def make_generate(
    make_environment: MakeEnvironment, *, action: Callable[[Any], Action] | None = None, **settings: Any
) -> Callable[..., Awaitable[Any]]:
    """Create slime's `generate(args, sample, sampling_params, evaluation=False)` from an environment.

    Args:
        make_environment: Function `make_environment(model_factory, sample)`, sync or async, that returns the
            environment of an episode. The environment's reward becomes the sample's; without a reward function, slime
            computes the reward. The environment's `retries` are not used: the client retries requests, and slime
            repeats the samples that it aborted.
        action: Function `action(sample)` that returns the task; None for `action_of`.
        **settings: `fan_out`, `requeue_aborted`, `tool_parser`, `model_config`, `client_settings`, `generate_state` and
            `failure_reward` of `strands_sglang.trainers.slime.make_generate`.

    Returns:
        The function for slime's `--custom-generate-function-path`.
    """

    async def episode(model: SGLangModel, sample: Any) -> slime.EpisodeEnd:
        environment: Environment = await maybe_await(make_environment(lambda: model, sample))
        environment.retries = 0
        result = await environment.step((action or action_of)(sample))
        reward = None if result.reward is None else result.reward.reward
        if result.reward_error is not None:
            reward = float("nan")  # removes the sample
        metrics = result.observation.metrics
        facts: dict[str, Any] = {
            name: metrics[name] for name in ("tool_iterations", "tool_calls", "seconds") if name in metrics
        }
        error = {"error": result.error} if result.error else {}
        return slime.EpisodeEnd(result.termination_reason, reward, {**facts, **error})

    return slime.make_generate(episode=episode, **settings)


def action_of(sample: Any) -> Action:
    """Convert a sample to a task: its prompt, its label as the ground truth, and its metadata as additional fields.

    Without a label, the metadata may have the ground truth.

    Args:
        sample: slime's sample.

    Raises:
        ValueError: The metadata do not fit `TaskContext`; names the sample, the field and its value.
    """
    metadata = {str(name): value for name, value in (sample.metadata or {}).items() if name != "strands_sglang"}
    if sample.label is not None:
        metadata["ground_truth"] = sample.label
    try:
        context = TaskContext(**{**metadata, "id": sample.index})
    except ValidationError as error:
        fields = "; ".join(f"{part['loc'][0]!r}: {part['msg']}, not {part['input']!r:.80}" for part in error.errors())
        raise ValueError(f"the metadata of sample {sample.index} do not fit TaskContext: {fields}") from error
    return Action(message=sample.prompt, task_context=context)
