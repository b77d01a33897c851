"""A `generate` function for slime's `--custom-generate-function-path`: one Strands agent per sample.

Promises: whatever an episode raises ends in a sample (a cancellation goes on); slime's sampling parameters are left as
they are; nothing is asked of the server once slime aborts; a sample that is handed in again is generated anew or, as a
partial rollout, gone on with; one that is finished is handed back.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from ...client.cache import get_client_from_slime_args
from ...client.client import SGLangClient
from ...model.model import SGLangModel
from ...model.request import check_keys, sent_fields
from ...outcomes import OUTCOMES, TerminationReason
from ...tool_limiter import ToolLimiter
from ...trajectory.trajectory import Trajectory
from .arguments import SlimeExportError, context_limit, normalizes_by_group, runs_aborted_again
from .episode import EpisodesModel, Part, Settings, clean_up, error_text, own_reward, reason_of, run, run_elsewhere
from .gate import EpisodeGate, GatedClient
from .partial import Kept, forget, keep, kept_on
from .prompts import messages_of
from .samples import RolloutSamples, to_slime_samples

Generate = Callable[..., Awaitable[Any]]


def make_generate(
    agent_factory: Callable[..., Any] | None = None,
    *,
    episode: Callable[..., Any] | None = None,
    tools: Sequence[Any] = (),
    system_prompt: str | None = None,
    prompt: Callable[[Any], Any] | None = None,
    max_tool_iters: int | None = None,
    max_tool_calls: int | None = None,
    max_parallel_tool_calls: int | None = None,
    max_messages: int | None = None,
    max_turns: int | None = None,
    timeout: float | None = None,
    reward: Callable[..., Any] | None = None,
    fan_out: bool = False,
    requeue_aborted: bool | None = None,
    tool_parser: Any = None,
    model_config: Mapping[str, Any] | None = None,
    client_settings: Mapping[str, Any] | None = None,
    generate_state: Callable[[Any], Any] | None = None,
    failure_reward: float = 0.0,
) -> Generate:
    """Make a `generate(args, sample, sampling_params, evaluation=False)` for slime.

    Example:
        >>> generate = make_generate(tools=[execute_python], system_prompt="Use Python.", max_tool_iters=8)

    Args:
        agent_factory: `agent_factory(model, sample)`, sync or async, returns the agent of an episode; give it
            `NullConversationManager()`, or its history may be shortened. Instead of `tools` and `system_prompt`.
        episode: `episode(model, sample)`, sync or async, runs the whole episode by itself on that model and returns an
            `EpisodeEnd`. Instead of an agent, its limits, `prompt`, `reward` and `timeout`. Partial rollouts are begun
            anew.
        tools: The agent's tools.
        system_prompt: Its system prompt. One in the sample's prompt is put behind it.
        prompt: `prompt(sample)` returns what the agent is asked: a text, content blocks or messages. By default
            `sample.prompt`, a text or chat messages.
        max_tool_iters: See `ToolLimiter`, as for the three after it.
        max_tool_calls: Tool calls allowed.
        max_parallel_tool_calls: Tool calls run per turn.
        max_messages: Messages allowed.
        max_turns: Model calls of the agent allowed.
        timeout: Seconds for an episode.
        reward: `reward(agent, sample)`, sync or async, returns the reward while the agent is still there, or None to
            leave it to slime's reward function. Not asked for episodes that have none.
        fan_out: Whether to return all sequences of an episode, always as a list. Where slime normalises rewards by
            group it needs `grpo_rewards_by_group` as `--custom-reward-post-process-path`; not with `--partial-rollout`,
            `--group-rm` or `--log-passrate`.
        requeue_aborted: Whether samples that the server aborted are run again although slime did not ask for it. By
            default so with slime's fully asynchronous rollout, which does that for single samples, not for lists.
        tool_parser: See `SGLangModel`.
        model_config: Further configuration of `SGLangModel`, e.g. `{"enable_thinking": False}`.
        client_settings: Arguments of `SGLangClient` that win over slime's.
        generate_state: What makes the state of `args` with `tokenizer` and `aborted`; by default slime's
            `GenerateState`.
        failure_reward: The reward of samples that are removed.

    Raises:
        ValueError: Arguments that contradict each other or cannot work.
    """
    if agent_factory is not None and (tools or system_prompt is not None):
        raise ValueError("agent_factory makes the whole agent: give it the tools and the system prompt")
    if episode is not None and any(
        one not in (None, "", ())
        for one in (
            agent_factory,
            tools,
            system_prompt,
            prompt,
            max_tool_iters,
            max_tool_calls,
            max_parallel_tool_calls,
            max_messages,
            max_turns,
            timeout,
            reward,
        )
    ):
        raise ValueError("episode runs everything by itself: give it the agent, its limits, its prompt and its reward")
    config = dict(model_config or {})
    check_keys(config, SGLangModel.SGLangConfig.__annotations__)
    sent_fields(config)
    if config.get("return_logprob") is False:
        raise ValueError("slime trains on logprobs: leave return_logprob at True")
    for name in ("sampling_params", "params"):
        if name in config:
            raise ValueError(f"{name} come from slime: set --rollout-temperature and the like")
    if max_turns is not None and max_turns < 1:
        raise ValueError(f"max_turns must be at least 1, not {max_turns}")
    if timeout is not None and timeout <= 0:
        raise ValueError(f"timeout must be above 0 seconds, not {timeout}")
    limits = {
        "max_tool_iters": max_tool_iters,
        "max_tool_calls": max_tool_calls,
        "max_parallel_tool_calls": max_parallel_tool_calls,
        "max_messages": max_messages,
    }
    ToolLimiter(**limits, on_limit="stop")  # refuses what cannot work
    settings = Settings(
        episode=episode,
        agent_factory=agent_factory,
        tools=tuple(tools),
        system_prompt=system_prompt,
        prompt=prompt,
        limits=limits,
        max_turns=max_turns,
        timeout=timeout,
        reward=reward,
        fan_out=fan_out,
        requeue_aborted=requeue_aborted,
        tool_parser=tool_parser,
        model_config=config,
        client_settings=dict(client_settings or {}),
        generate_state=generate_state,
        failure_reward=failure_reward,
    )

    async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:
        """Generate one sample; see `make_generate`."""
        return await _generate(settings, args, sample, sampling_params, evaluation)

    return generate


async def _generate(
    settings: Settings, args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool
) -> Any:
    fan_out = settings.fan_out and not evaluation  # an evaluation counts samples, and an episode is one
    if sample.status.name in ("COMPLETED", "TRUNCATED"):
        return RolloutSamples([sample]) if fan_out else sample
    if fan_out:
        _check_fan_out(args)
    state = _state_of(settings, args)
    can_go_on = settings.episode is None and not fan_out and not evaluation
    partial = can_go_on and bool(getattr(args, "partial_rollout", False))
    if state.aborted:
        # Nothing has happened, so what is on the sample stays: an earlier part, or nothing.
        sample.status = type(sample).Status.ABORTED
        sample.reward = None
        return RolloutSamples([sample]) if fan_out else sample
    if not getattr(sample, "session_id", None):
        sample.session_id = str(uuid.uuid4())  # slime sets none for evaluations
    system, asked = _asked(settings, args, sample)
    part = _begin(settings, args, state, sampling_params, kept_on(sample) if partial else None, evaluation)
    try:
        model = _model(settings, args, sample, state, sampling_params, part, evaluation)
        if settings.episode is not None:
            end = await run_elsewhere(settings, args, model, sample, part, evaluation)
            reason, reward, told = end.reason, end.reward, end.metadata
        else:
            await run(settings, model, sample, part, system, asked)
            reason, told = reason_of(part), None
            part.trajectory.settle(list(part.agent.messages) if part.agent is not None else [])
            reward = await own_reward(settings, part, sample, reason)
        return _export(settings, args, sample, state, part, reason, reward, fan_out, partial, evaluation, told)
    finally:
        clean_up(part.agent)


def _check_fan_out(args: Any) -> None:
    for name in ("partial_rollout", "group_rm"):
        if getattr(args, name, False):
            raise SlimeExportError(f"slime's {name} knows no lists of samples: leave it out, or fan_out=True")
    if getattr(args, "log_passrate", False):
        raise SlimeExportError("slime's log_passrate counts samples for episodes: leave it out, or fan_out=True")
    if getattr(args, "custom_reward_post_process_path", "") is None and normalizes_by_group(args):
        raise SlimeExportError(
            "with fan_out=True, slime's own normalisation of rewards takes the whole batch for one group: set "
            "--custom-reward-post-process-path strands_sglang.trainers.slime.grpo_rewards_by_group"
        )


def _state_of(settings: Settings, args: Any) -> Any:
    if settings.generate_state is not None:
        return settings.generate_state(args)
    from slime.rollout.sglang_rollout import GenerateState  # type: ignore[import-not-found]  # only where slime runs

    return GenerateState(args)


def _asked(settings: Settings, args: Any, sample: Any) -> tuple[str | None, Any]:
    """What the agent is asked; nothing where somebody else makes it of the sample."""
    made_elsewhere = settings.episode is not None and not isinstance(sample.prompt, str)
    return (None, None) if made_elsewhere or settings.prompt is not None else messages_of(args, sample)


def _begin(
    settings: Settings,
    args: Any,
    state: Any,
    sampling_params: Mapping[str, Any],
    kept: Kept | None,
    evaluation: bool,
) -> Part:
    if kept is not None:
        kept.resume()
    gate = EpisodeGate(
        trajectory=kept.trajectory if kept is not None else Trajectory(),
        aborted=lambda: bool(state.aborted),
        budget=sampling_params.get("max_new_tokens"),
    )
    return Part(gate, ToolLimiter(**settings.limits, on_limit="stop"), kept)


def _model(
    settings: Settings,
    args: Any,
    sample: Any,
    state: Any,
    sampling_params: Mapping[str, Any],
    part: Part,
    evaluation: bool,
) -> SGLangModel:
    # slime's session is the routing key, which keeps an episode on one worker.
    config: dict[str, Any] = {"sampling_params": dict(sampling_params), "routing_key": sample.session_id}
    limits = (context_limit(args, evaluation=evaluation), settings.model_config.get("max_context_tokens"))
    longest = min((limit for limit in limits if limit is not None), default=None)
    if getattr(args, "use_rollout_routing_replay", False) and not evaluation:
        config["return_routed_experts"] = True
    processor = getattr(state, "processor", None) if getattr(sample, "multimodal_inputs", None) else None
    client = get_client_from_slime_args(args, **settings.client_settings)
    model = EpisodesModel(
        tokenizer=state.tokenizer if processor is None else processor.tokenizer,
        client=cast(SGLangClient, GatedClient(client, part.gate)),
        tool_parser=settings.tool_parser,
        processor=processor,
        **cast(Any, {**config, **settings.model_config, "max_context_tokens": longest}),
    )
    model.trajectory = part.trajectory
    return model


def _export(
    settings: Settings,
    args: Any,
    sample: Any,
    state: Any,
    part: Part,
    reason: TerminationReason,
    reward: Any,
    fan_out: bool,
    partial: bool,
    evaluation: bool,
    told: Mapping[str, Any] | None = None,
) -> Any:
    requeued = settings.requeue_aborted
    if requeued is None:
        requeued = runs_aborted_again(args) and not fan_out and not evaluation
    if reason is TerminationReason.ABORTED:
        requested = requeued or bool(state.aborted)
    else:  # an agent that cancels itself would do so for ever
        requested = reason is TerminationReason.CANCELLED and bool(state.aborted)
    waits = any(turn.waits_to_go_on for turn in part.trajectory.turns)
    if requested and partial and waits and not part.has_sampled:
        # Aborted before anything was asked: the sample is what the part before has left.
        sample.status, sample.reward = type(sample).Status.ABORTED, None
        return sample
    exported = to_slime_samples(
        part.trajectory,
        sample,
        reason,
        tokenizer=state.tokenizer,
        args=args,
        reward=reward,
        fan_out=fan_out,
        abort_requested=requested,
        evaluation=evaluation,
        failure_reward=settings.failure_reward,
        off_policy_tokens=_off_policy_tokens(args, part),
        non_generation_time=part.non_generation_s(),
        metadata={
            "tool_iterations": part.limiter.tool_iter_count,
            "tool_calls": part.limiter.tool_call_count,
            "tool_parse_errors": sum(part.trajectory.tool_parse_errors.values()),
            **({"error": error_text(part.end)} if OUTCOMES[reason].slime_status == "FAILED" and part.end else {}),
            **(told or {}),
        },
    )
    if requested and partial and part.agent is not None:
        keep(
            sample,
            part.trajectory,
            part.agent,
            part.limiter,
            elapsed_s=part.elapsed_s(),
            non_generation_s=part.non_generation_s(),
        )
    else:
        forget(sample)
    return exported


def _off_policy_tokens(args: Any, part: Part) -> dict[int, int]:
    """What earlier parts sampled, if that is not to be trained on."""
    if part.kept is None or not getattr(args, "mask_offpolicy_in_partial_rollout", False):
        return {}
    went_on = {turn.index: turn.resumes for turn in part.trajectory.turns if turn.resumes is not None}
    return {**part.kept.old_tokens, **{index: cut.completion_tokens for index, cut in went_on.items()}}


generate = make_generate()
"""A `generate` function whose agent has no tools and no system prompt."""
