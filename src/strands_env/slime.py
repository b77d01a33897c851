"""Environments under slime (github.com/THUDM/slime): a ready `generate` around `strands_sglang.trainers.slime`.

    generate = make_generate(lambda model_factory, sample: MathEnv(model_factory, MathReward()))

slime's budget of tokens holds for the whole response, its aborts stop an episode at once, and whatever becomes of it is
a sample that slime can use.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import ValidationError

from strands_sglang import OUTCOMES, RewardRule, SGLangModel
from strands_sglang.trainers import slime

from .core import Action, Environment, ModelFactory, TaskContext
from .core.supervision import settled

MakeEnvironment = Callable[[ModelFactory, Any], "Environment | Awaitable[Environment]"]


def make_generate(
    make_environment: MakeEnvironment, *, action: Callable[[Any], Action] | None = None, **settings: Any
) -> Callable[..., Awaitable[Any]]:
    """Make a `generate(args, sample, sampling_params, evaluation=False)` for slime.

    Args:
        make_environment: `make_environment(model_factory, sample)`, sync or async, returns the environment of an
            episode. Its reward is the sample's; without a reward function that is left to slime's. It makes no retries:
            the client does, and slime runs again what it aborted.
        action: `action(sample)` returns the task; by default `action_of`.
        **settings: `fan_out`, `requeue_aborted`, `tool_parser`, `model_config`, `client_settings`, `generate_state` and
            `failure_reward` of `strands_sglang.trainers.slime.make_generate`.
    """

    async def episode(model: SGLangModel, sample: Any) -> slime.EpisodeEnd:
        environment: Environment = await settled(make_environment(lambda: model, sample))
        environment.retries = 0
        result = await environment.step((action or action_of)(sample))
        reward = None if result.reward is None else result.reward.reward
        is_computed = (
            environment.reward_fn is not None and OUTCOMES[result.termination_reason].reward is RewardRule.COMPUTED
        )
        if reward is None and is_computed:
            reward = float("nan")  # which removes the sample: its reward function failed
        metrics = result.observation.metrics
        facts: dict[str, Any] = {
            name: metrics[name] for name in ("tool_iterations", "tool_calls", "seconds") if name in metrics
        }
        error = {"error": result.error} if result.error else {}
        return slime.EpisodeEnd(result.termination_reason, reward, {**facts, **error})

    return slime.make_generate(episode=episode, **settings)


def action_of(sample: Any) -> Action:
    """The task that a sample holds: its prompt, its label as the ground truth, and its metadata as further fields.

    Raises:
        ValueError: The metadata are no task context; says which sample, which field, and what it holds.
    """
    known = {str(name): value for name, value in (sample.metadata or {}).items() if name != "strands_sglang"}
    try:
        context = TaskContext(**{**known, "id": sample.index, "ground_truth": sample.label})
    except ValidationError as error:
        fields = "; ".join(f"{part['loc'][0]!r}: {part['msg']}, not {part['input']!r:.80}" for part in error.errors())
        raise ValueError(f"the metadata of sample {sample.index} are no task context: {fields}") from error
    return Action(message=sample.prompt, task_context=context)
