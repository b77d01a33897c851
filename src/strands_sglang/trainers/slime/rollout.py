"""A `generate` function for slime's `--custom-generate-function-path`: one Strands agent per sample.

Promises: whatever an episode raises ends in a sample (a cancellation goes on); slime's sampling parameters are left as
they are; nothing is asked of the server once slime aborts; a sample that is handed in again is generated anew or, as a
partial rollout, continued; one that is finished is handed back.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strands.types.content import Messages

from ...model.config import check_keys
from ...model.model import SGLangModel
from ...request_fields import checked_fields
from ...tool_limiter import ToolLimiter
from .arguments import SlimeExportError, normalizes_by_group
from .episode import Episode
from .samples import RolloutSamples

Generate = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Settings:
    """The arguments of `make_generate`."""

    agent_factory: Callable[..., Any] | None
    episode: Callable[..., Any] | None
    tools: Sequence[Any]
    system_prompt: str | None
    prompt: Callable[[Any], Any] | None
    max_tool_iters: int | None
    max_tool_calls: int | None
    max_parallel_tool_calls: int | None
    max_messages: int | None
    max_turns: int | None
    timeout: float | None
    reward: Callable[..., Any] | None
    fan_out: bool
    requeue_aborted: bool | None
    tool_parser: Any
    model_config: Mapping[str, Any] | None
    client_settings: Mapping[str, Any] | None
    generate_state: Callable[[Any], Any] | None
    failure_reward: float

    def __post_init__(self) -> None:
        """Refuse arguments that contradict each other or cannot work."""
        if self.agent_factory is not None and (self.tools or self.system_prompt is not None):
            raise ValueError("agent_factory makes the whole agent: give it the tools and the system prompt")
        if self.episode is not None and any(getattr(self, name) not in (None, "", ()) for name in _OF_AN_AGENT):
            raise ValueError(
                "episode runs everything by itself: give it the agent, its limits, its prompt and its reward"
            )
        config = self.model_config or {}
        check_keys(config, SGLangModel.SGLangConfig.__annotations__)
        checked_fields(config.get("request_fields"), config.get("unchecked_request_fields"))
        if config.get("return_logprob") is False:
            raise ValueError("slime trains on logprobs: leave return_logprob at True")
        for name in ("sampling_params", "params"):
            if name in config:
                raise ValueError(f"{name} come from slime: set --rollout-temperature and the like")
        if self.max_turns is not None and self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, not {self.max_turns}")
        if self.timeout is not None and self.timeout <= 0:
            raise ValueError(f"timeout must be above 0 seconds, not {self.timeout}")
        self.limiter()

    def limiter(self) -> ToolLimiter:
        """The limits of a new episode.

        Raises:
            ValueError: One cannot work.
        """
        return ToolLimiter(**{name: getattr(self, name) for name in _LIMITS}, on_limit="stop")


_LIMITS = ("max_tool_iters", "max_tool_calls", "max_parallel_tool_calls", "max_messages")
_OF_AN_AGENT = (
    *("agent_factory", "tools", "system_prompt", "prompt", "max_turns", "timeout", "reward"),
    *_LIMITS,
)


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
    settings = Settings(**locals())

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
    if state.aborted:
        # Nothing has happened, so what is on the sample stays: an earlier part, or nothing.
        sample.status = type(sample).Status.ABORTED
        sample.reward = None
        return RolloutSamples([sample]) if fan_out else sample
    if not getattr(sample, "session_id", None):
        sample.session_id = str(uuid.uuid4())  # slime sets none for evaluations
    is_partial = bool(getattr(args, "partial_rollout", False)) and not (settings.episode or fan_out or evaluation)
    # What the agent is asked is left to `prompt` and, but for texts, to `episode`.
    made_elsewhere = settings.prompt is not None or (
        settings.episode is not None and not isinstance(sample.prompt, str)
    )
    system, asked = (None, None) if made_elsewhere else messages_of(args, sample)
    episode = Episode(settings, args, state, sample, sampling_params, evaluation, is_partial=is_partial)
    try:
        reason, reward, facts = await episode.run(system, asked)
        return episode.export(reason, reward, facts)
    finally:
        episode.clean_up()


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


def messages_of(args: Any, sample: Any) -> tuple[str | None, Messages]:
    """The system prompt that a sample's prompt has, None without one, and its messages, a user's last.

    Args:
        args: slime's parsed arguments.
        sample: slime's sample; its `prompt` is a text, or chat messages with texts.

    Raises:
        SlimeExportError: The prompt cannot be given to an agent; says what to do instead.
    """
    prompt = sample.prompt
    if isinstance(prompt, str):
        if getattr(args, "apply_chat_template", False):
            raise SlimeExportError(
                "slime has put the chat template around the prompt, and the agent does that itself: leave "
                "--apply-chat-template out"
            )
        return None, [{"role": "user", "content": [{"text": prompt}]}]
    if not isinstance(prompt, list) or not all(isinstance(message, Mapping) for message in prompt):
        raise SlimeExportError(f"a prompt is a text or a list of chat messages, not {prompt!r:.80}")
    system: list[str] = []
    messages: Messages = []
    for message in prompt:
        role, text = message.get("role"), _text(message.get("content"))
        if role == "system":
            system.append(text)
        elif role in ("user", "assistant"):
            messages.append({"role": role, "content": [{"text": text}]})
        else:
            raise SlimeExportError(f"a prompt's messages are of system, user and assistant, not of {role!r}")
    if not messages or messages[-1]["role"] != "user":
        raise SlimeExportError("the last message of a prompt must be a user's")
    return "\n\n".join(system) or None, messages


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    raise SlimeExportError(f"a prompt holds what is no text: {content!r:.80}; pass make_generate a function as prompt=")


generate = make_generate()
"""A `generate` function whose agent has no tools and no system prompt."""
