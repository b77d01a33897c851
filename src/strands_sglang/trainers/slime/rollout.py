"""A `generate` function for slime's `--custom-generate-function-path`: one Strands agent per sample.

Every exception of an episode ends in a sample, except a cancellation, which propagates. slime's sampling parameters are
not modified. No request is sent once slime aborts. A sample that is passed in again is generated again or, as a partial
rollout, continued; a finished one is returned.

slime gives an episode one budget of response tokens, and stops rollouts with a flag. Both apply to every request of an
episode, from the agent, an agent used as a tool, or a summary, so `Rollout.on_request` sees all of them.

- Once slime aborts, a request raises `SGLangAbortedError` instead.
- `max_new_tokens` is the rest of the budget, from which everything after the opening prompt is deducted, including tool
  results.

A partial rollout saves on its sample what the next part needs: the trajectory, the agent's messages and state, and the
counts of its limits. They are plain data in one attribute, which slime's `Sample.to_dict` and `from_dict` preserve. The
next part makes the same call again, which extends the tokens sampled before (`Trajectory.resume`); they are never
sampled or tokenized again. Two kinds of episodes start again from their prompt: those with images, and those whose
abort hit an agent other than the sample's own, such as a tool, since its error is already in the messages.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import logging
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from strands import Agent
from strands.agent.conversation_manager import NullConversationManager
from strands.types.content import Messages
from typing_extensions import override

from ...client.shared import get_client_from_slime_args
from ...exceptions import SGLangAbortedError, causes
from ...model.call import RequestPlan
from ...model.config import check_keys
from ...model.model import SGLangModel
from ...outcomes import OUTCOMES, RewardRule, TerminationReason, termination_reason
from ...request_fields import checked_fields
from ...tool_limiter import LoopLimitReachedError, ToolLimiter
from ...trajectory.trajectory import Trajectory
from ...trajectory.turn import Turn, TurnStatus
from .rewards import awaited
from .samples import (
    RolloutSamples,
    SlimeExportError,
    as_reward,
    context_limit,
    normalizes_by_group,
    to_slime_samples,
)

logger = logging.getLogger(__name__)


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
        """Check the arguments and their combination."""
        if self.agent_factory is not None and (self.tools or self.system_prompt is not None):
            raise ValueError("agent_factory makes the whole agent: set the tools and the system prompt there")
        if self.episode is not None and any(getattr(self, name) not in (None, "", ()) for name in _AGENT_OPTIONS):
            raise ValueError(
                "episode= runs the whole episode: set the agent, its limits, its prompt and its reward there"
            )
        config = self.model_config or {}
        check_keys(config, SGLangModel.SGLangConfig.__annotations__)
        checked_fields(config.get("request_fields"), config.get("unchecked_request_fields"))
        if config.get("return_logprob") is False:
            raise ValueError("slime trains on logprobs: return_logprob must be True")
        for name in ("sampling_params", "params"):
            if name in config:
                raise ValueError(f"{name} come from slime: set --rollout-temperature and its other options")
        if self.max_turns is not None and self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, not {self.max_turns}")
        if self.timeout is not None and self.timeout <= 0:
            raise ValueError(f"timeout must be above 0 seconds, not {self.timeout}")
        self.limiter()

    def limiter(self) -> ToolLimiter:
        """Return a limiter for a new episode.

        Raises:
            ValueError: A limit is invalid.
        """
        return ToolLimiter(**{name: getattr(self, name) for name in _LIMITS}, on_limit="stop")


_LIMITS = ("max_tool_iters", "max_tool_calls", "max_parallel_tool_calls", "max_messages")
_AGENT_OPTIONS = (
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
) -> Callable[..., Awaitable[Any]]:
    """Make a `generate(args, sample, sampling_params, evaluation=False)` for `--custom-generate-function-path`.

    Name the result on slime's command line, for example `--custom-generate-function-path my_agent.generate`. Every
    episode becomes a sample that slime can use, whatever its end; the
    [slime guide](../guides/slime.md#what-an-episode-becomes) has the table. slime's `max_new_tokens` is the budget of
    the whole response, tool results included. slime's aborts stop an episode at once, and with `--partial-rollout` it
    continues later from its tokens.

    Args:
        agent_factory: Function `agent_factory(model, sample)`, sync or async, that returns the agent of an episode.
            Give the agent `NullConversationManager()`, or its history may be shortened. Replaces `tools` and
            `system_prompt`.
        episode: Function `episode(model, sample)`, sync or async, that runs the whole episode on the model and returns
            an `EpisodeEnd`. Replaces the agent, its limits, `prompt`, `reward` and `timeout`. Its partial rollouts
            start again from the prompt.
        tools: Tools of the agent.
        system_prompt: System prompt of the agent. A system message in the sample's prompt is appended.
        prompt: Function `prompt(sample)` that returns the agent's input: a text, content blocks or messages. None uses
            `sample.prompt`, a text or chat messages.
        max_tool_iters: Maximum number of tool iterations; see [`ToolLimiter`][strands_sglang.ToolLimiter]. None for no
            limit, as for the other limits.
        max_tool_calls: Maximum number of single tool calls.
        max_parallel_tool_calls: Maximum number of tool calls that run per turn.
        max_messages: Maximum number of messages.
        max_turns: Maximum number of the agent's model calls.
        timeout: Seconds for an episode, including the earlier parts of a partial rollout; None for no limit.
        reward: Function `reward(agent, sample)`, sync or async, that returns the reward while the agent still exists,
            or None to leave it to slime's reward function. It is not called for outcomes without a reward.
        fan_out: Whether to return all sequences of an episode, always as a list; evaluations return one sample. Where
            slime normalizes rewards by group, this needs `grpo_rewards_by_group` as
            `--custom-reward-post-process-path`. It does not work with `--partial-rollout`, `--group-rm` or
            `--log-passrate`.
        requeue_aborted: Whether samples that the server aborted run again although slime did not request the abort.
            None enables this for slime's fully asynchronous rollout, which reruns single samples but not lists.
        tool_parser: Tool parser, as for [`SGLangModel`][strands_sglang.SGLangModel].
        model_config: Further configuration of `SGLangModel`, such as `{"enable_thinking": False}`. Sampling parameters
            come from slime.
        client_settings: Arguments of [`SGLangClient`][strands_sglang.SGLangClient] that take precedence over slime's.
        generate_state: Function that returns the state for `args`, an object with `tokenizer` and `aborted`. None uses
            slime's `GenerateState`.
        failure_reward: Reward of removed samples.

    Returns:
        An async function for slime. It raises `SlimeExportError` for settings with which no sample can be trained.

    Raises:
        ValueError: Arguments are invalid, or contradict each other.

    Examples:
        >>> generate = make_generate(tools=[execute_python], system_prompt="Use Python.", max_tool_iters=8)
    """
    settings = Settings(
        agent_factory=agent_factory,
        episode=episode,
        tools=tools,
        system_prompt=system_prompt,
        prompt=prompt,
        max_tool_iters=max_tool_iters,
        max_tool_calls=max_tool_calls,
        max_parallel_tool_calls=max_parallel_tool_calls,
        max_messages=max_messages,
        max_turns=max_turns,
        timeout=timeout,
        reward=reward,
        fan_out=fan_out,
        requeue_aborted=requeue_aborted,
        tool_parser=tool_parser,
        model_config=model_config,
        client_settings=client_settings,
        generate_state=generate_state,
        failure_reward=failure_reward,
    )

    async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:
        """Generate one sample; see `make_generate`."""
        fan_out = settings.fan_out and not evaluation  # an evaluation counts samples, and an episode is one
        unchanged = RolloutSamples([sample]) if fan_out else sample
        if sample.status.name in ("COMPLETED", "TRUNCATED"):
            return unchanged
        if fan_out:
            lists, episodes = "does not accept lists of samples", "counts samples as episodes"
            for name, reason in (("partial_rollout", lists), ("group_rm", lists), ("log_passrate", episodes)):
                if getattr(args, name, False):
                    raise SlimeExportError(f"slime's {name} {reason}: disable it, or fan_out")
            if getattr(args, "custom_reward_post_process_path", "") is None and normalizes_by_group(args):
                raise SlimeExportError(
                    "with fan_out=True, slime's own normalization of rewards treats the whole batch as one group: set "
                    "--custom-reward-post-process-path strands_sglang.trainers.slime.grpo_rewards_by_group"
                )
        if settings.generate_state is not None:
            state = settings.generate_state(args)
        else:
            from slime.rollout.sglang_rollout import GenerateState  # type: ignore[import-not-found]  # only where slime runs

            state = GenerateState(args)
        if state.aborted:
            # Nothing ran, so the sample keeps what it has: an earlier part, or nothing.
            sample.status = type(sample).Status.ABORTED
            sample.reward = None
            return unchanged
        if not getattr(sample, "session_id", None):
            sample.session_id = str(uuid.uuid4())  # slime sets none for evaluations
        is_partial = bool(getattr(args, "partial_rollout", False)) and not (settings.episode or fan_out or evaluation)
        # `prompt` makes the agent's input; `episode` does, unless the sample's prompt is a text.
        is_custom = settings.prompt is not None or (settings.episode is not None and not isinstance(sample.prompt, str))
        system, asked = (None, None) if is_custom else messages_of(args, sample)
        episode = Rollout(settings, args, state, sample, sampling_params, evaluation, is_partial=is_partial)
        try:
            return episode.export(await episode.run(system, asked))
        finally:
            episode.clean_up()

    return generate


def messages_of(args: Any, sample: Any) -> tuple[str | None, Messages]:
    """Return the system prompt in a sample's prompt, if any, and its messages, which end with a user message.

    Args:
        args: Parsed arguments of slime.
        sample: slime's sample, whose `prompt` is a text, or chat messages with texts.

    Raises:
        SlimeExportError: The prompt does not suit an agent. The message says what to do.
    """
    prompt = sample.prompt
    if isinstance(prompt, str):
        if getattr(args, "apply_chat_template", False):
            raise SlimeExportError(
                "slime applied the chat template to the prompt, but the agent does that itself: remove "
                "--apply-chat-template"
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
            raise SlimeExportError(f"a prompt has the roles system, user and assistant, not {role!r}")
    if not messages or messages[-1]["role"] != "user":
        raise SlimeExportError("the last message of a prompt must have the role user")
    return "\n\n".join(system) or None, messages


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    raise SlimeExportError(f"a prompt has content that is not text: {content!r:.80}; pass make_generate(prompt=...)")


# --- Episodes ---

_MAX_ERROR_CHARS = 1000


class ResponseBudgetReachedError(LoopLimitReachedError):
    """The response has used up its budget of tokens."""

    outcome = "token_budget_reached"


@dataclass(frozen=True)
class EpisodeEnd:
    """The end of an episode that your own function ran, for `make_generate(episode=...)`.

    Attributes:
        reason: Reason why the episode ended.
        reward: Reward, a number or a dictionary with `reward_key`; None leaves it to slime's reward function. A number
            that is not finite removes the sample.
        metadata: Entries to add to `sample.metadata["strands_sglang"]`.
    """

    reason: TerminationReason
    reward: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class EpisodeModel(SGLangModel):
    """Model of one episode: the first `episode()` on it is the running one, later ones are separate."""

    _is_open = False

    @override
    def episode(self, trajectory: Trajectory | None = None) -> AbstractContextManager[Trajectory]:
        """Return the running episode first, and then new ones, such as a judge's."""
        if self._is_open or trajectory is not None:
            return super().episode(trajectory)
        self._is_open = True
        return nullcontext(self.trajectory)


@dataclass(eq=False)
class Rollout:
    """One run of an episode, which is the whole episode unless slime aborts it.

    Attributes:
        settings: Arguments of `make_generate`.
        args: Parsed arguments of slime.
        state: slime's `GenerateState`.
        sample: slime's sample.
        sampling_params: slime's sampling parameters; their `max_new_tokens` is the budget of the whole response.
        evaluation: Whether the sample is for evaluation only.
        is_partial: Whether the run continues what an aborted one saved on the sample, and saves itself if aborted.
        began: Start time, on the monotonic clock.
        asked: Turns with requests.
        agent: Agent, once it exists.
        end: Result or exception of the agent.
        limiter: Limiter of the agent.
        previous: What the previous run saved; empty if there is none.
        trajectory: Trajectory of the episode.
    """

    settings: Settings
    args: Any
    state: Any
    sample: Any
    sampling_params: Mapping[str, Any]
    evaluation: bool
    is_partial: bool
    began: float = field(default_factory=time.monotonic)
    asked: set[Turn] = field(default_factory=set)
    agent: Any = None
    end: Any = None

    def __post_init__(self) -> None:
        """Load what the previous run saved."""
        self.limiter = self.settings.limiter()
        self.previous = load_partial(self.sample) if self.is_partial else PartialRollout()
        self.trajectory = self.previous.trajectory
        self._answered_before = self._answered()

    def _answered(self) -> int:
        return sum(turn.is_answered for turn in self.trajectory.turns)

    def elapsed_s(self) -> float:
        """Return the seconds that the episode has taken, over all runs."""
        return time.monotonic() - self.began + self.previous.elapsed_s

    def non_generation_s(self) -> float:
        """Return the seconds not spent on generation, over all runs; each parallel request counts."""
        elapsed = time.monotonic() - self.began - sum(turn.requests_s for turn in self.asked)
        return max(elapsed, 0.0) + self.previous.non_generation_s

    # --- requests ---

    def on_request(self, turn: Turn, plan: RequestPlan) -> RequestPlan:
        """Limit a request to the rest of the budget.

        Raises:
            SGLangAbortedError: slime is stopping rollouts.
            ResponseBudgetReachedError: The budget is used up.
        """
        if self.state.aborted:
            raise SGLangAbortedError("slime is aborting its rollouts, so no request was sent")
        self.asked.add(turn)
        budget = self.sampling_params.get("max_new_tokens")
        if budget is None or turn.trajectory is not self.trajectory or turn.is_auxiliary:
            return plan
        length = len(turn.token_ids()) - len(turn.root.prompt_ids)
        sampled = sum(len(other.output_ids) for other in self.trajectory.turns if not other.is_auxiliary)
        room = budget - max(length, sampled)
        least = max(plan.sampling_params.get("min_new_tokens") or 0, 1)
        if room < least and not plan.sampled:
            what = f", and an answer needs at least {least} (min_new_tokens)" if least > 1 else ""
            raise ResponseBudgetReachedError(f"the response has {budget - max(room, 0)} of its {budget} tokens{what}")
        room = max(room, plan.sampled)  # a resumed answer may have no tokens left
        asked = plan.sampling_params.get("max_new_tokens")
        if asked is not None and asked <= room:
            return plan
        return replace(plan, sampling_params={**plan.sampling_params, "max_new_tokens": room}, clamped=False)

    def _model(self) -> SGLangModel:
        settings, args, state, sample = self.settings, self.args, self.state, self.sample
        given = settings.model_config or {}
        # slime's session id is the routing key, which keeps an episode on one worker.
        config: dict[str, Any] = {"sampling_params": dict(self.sampling_params), "routing_key": sample.session_id}
        limits = (context_limit(args, evaluation=self.evaluation), given.get("max_context_tokens"))
        longest = min((limit for limit in limits if limit is not None), default=None)
        if getattr(args, "use_rollout_routing_replay", False) and not self.evaluation:
            config["return_routed_experts"] = True
        processor = getattr(state, "processor", None) if getattr(sample, "multimodal_inputs", None) else None
        model = EpisodeModel(
            tokenizer=state.tokenizer if processor is None else processor.tokenizer,
            client=get_client_from_slime_args(args, **(settings.client_settings or {})),
            tool_parser=settings.tool_parser,
            processor=processor,
            **{**config, **given, "max_context_tokens": longest},
        )
        model.trajectory = self.trajectory
        model.on_request = self.on_request
        return model

    # --- run ---

    async def run(self, system: str | None, asked: Any) -> EpisodeEnd:
        """Run the episode; an exception is its end.

        Args:
            system: System prompt in the sample's prompt; None for none.
            asked: Messages of the sample's prompt; unused with `settings.prompt`.

        Returns:
            The reason why it ended, its reward in slime's form, and further metadata.
        """
        model = self._model()
        try:
            if self.settings.episode is not None:
                end = await awaited(self.settings.episode(model, self.sample))
                if not isinstance(end, EpisodeEnd):
                    raise TypeError(f"episode= must return an EpisodeEnd, not {end!r:.80}")
                if end.reward is None or isinstance(end.reward, Mapping):
                    return end
                reward = as_reward(self.args, end.reward, evaluation=self.evaluation, category="scored")
                return replace(end, reward=reward)
            self.end = await self._run_agent(model, system, asked)
        except Exception as error:
            self.end = error
        reason = self._reason()
        if self.settings.episode is not None:
            return EpisodeEnd(reason)
        self.trajectory.settle(list(self.agent.messages) if self.agent is not None else [])
        return EpisodeEnd(reason, await self._own_reward(reason))

    async def _run_agent(self, model: SGLangModel, system: str | None, asked: Any) -> Any:
        settings = self.settings
        if settings.agent_factory is not None:
            agent = await awaited(settings.agent_factory(model, self.sample))
        else:
            agent = Agent(
                model=model,
                tools=list(settings.tools),
                system_prompt=settings.system_prompt,
                callback_handler=None,
                conversation_manager=NullConversationManager(),
            )
        self.agent = agent
        agent.hooks.add_hook(self.limiter)
        agent.hooks.add_hook(model.hooks)  # the trajectory records what happens to each answer
        if system is not None:
            prompt = agent.system_prompt
            agent.system_prompt = f"{prompt}\n\n{system}" if prompt else system
        if self.previous.messages:
            asked = None  # the agent continues where the aborted one stopped
            agent.messages[:] = copy.deepcopy(self.previous.messages)
            for key, value in self.previous.state.items():
                agent.state.set(key, value)
            for name, count in self.previous.counts.items():
                setattr(self.limiter, name, count)
        elif settings.prompt is not None:
            asked = settings.prompt(self.sample)
        limits = {}
        if settings.max_turns is not None:
            leaf = self.trajectory.main_leaf()
            path = [] if leaf is None else leaf.path()
            done = sum(turn.is_answered and turn.status is not TurnStatus.CUT for turn in path)
            limits["limits"] = {"turns": max(settings.max_turns - done, 1)}
        invoked = agent.invoke_async(asked, **limits)
        if settings.timeout is not None:
            invoked = asyncio.wait_for(invoked, max(settings.timeout - self.elapsed_s(), 0.0))
        return await invoked

    async def _own_reward(self, reason: TerminationReason) -> Any:
        """Return the reward from `settings.reward`; NaN if it raises, so that the sample is removed."""
        function = self.settings.reward
        if function is None or self.agent is None or OUTCOMES[reason].reward is RewardRule.NONE:
            return None
        try:
            reward = await awaited(function(self.agent, self.sample))
            return reward if reward is None or isinstance(reward, Mapping) else float(reward)
        except Exception:
            index = getattr(self.sample, "index", None)
            logger.warning("sample=<%s> | the reward function raised", index, exc_info=True)
            return float("nan")

    def _reason(self) -> TerminationReason:
        """Return the reason why the episode ended."""
        end = self.end
        reason = termination_reason(end, trajectory=self.trajectory, limiter=self.limiter)
        if reason is TerminationReason.AGENT_ERROR:
            logger.log(
                logging.DEBUG if _is_logged(end) else logging.WARNING,
                "error=<%s> | the agent's own code failed; an error from the same line is logged once",
                _error_text(end),
                exc_info=end if isinstance(end, Exception) else None,
            )
        elif isinstance(end, Exception):
            logger.info("outcome=<%s>, error=<%s> | an episode ended with an error", reason.value, end)
        return reason

    # --- samples ---

    def export(self, end: EpisodeEnd) -> Any:
        """Return slime's sample, or a list of samples with `fan_out`."""
        settings, sample, reason = self.settings, self.sample, end.reason
        fan_out = settings.fan_out and not self.evaluation
        requeued = settings.requeue_aborted
        if requeued is None:  # slime's fully asynchronous rollout reruns aborted samples without an abort of its own
            runs_again = "fully_async" in str(getattr(self.args, "rollout_function_path", None))
            requeued = runs_again and not fan_out and not self.evaluation
        if reason is TerminationReason.ABORTED:
            requested = requeued or bool(self.state.aborted)
        else:  # an agent that cancels itself would do so forever
            requested = reason is TerminationReason.CANCELLED and bool(self.state.aborted)
        waits = any(turn.waits_to_go_on for turn in self.trajectory.turns)
        if requested and self.is_partial and waits and self._answered() <= self._answered_before:
            # Aborted before any request: the sample is what the previous run saved.
            sample.status, sample.reward = type(sample).Status.ABORTED, None
            return sample
        failed = OUTCOMES[reason].slime_status == "FAILED" and self.end
        exported = to_slime_samples(
            self.trajectory,
            sample,
            reason,
            tokenizer=self.state.tokenizer,
            args=self.args,
            reward=end.reward,
            fan_out=fan_out,
            abort_requested=requested,
            evaluation=self.evaluation,
            failure_reward=settings.failure_reward,
            off_policy_tokens=self._off_policy_tokens(),
            non_generation_time=self.non_generation_s(),
            metadata={
                "tool_iterations": self.limiter.tool_iter_count,
                "tool_calls": self.limiter.tool_call_count,
                "tool_parse_errors": sum(self.trajectory.tool_parse_errors.values()),
                **({"error": _error_text(self.end)} if failed else {}),
                **end.metadata,
            },
        )
        if getattr(sample, PARTIAL_KEY, None) is not None:
            setattr(sample, PARTIAL_KEY, None)
        if requested and self.is_partial and self.agent is not None:
            save_partial(self)
        return exported

    def _off_policy_tokens(self) -> dict[int, int]:
        """Return the number of tokens per turn from earlier runs, if slime masks them."""
        if not getattr(self.args, "mask_offpolicy_in_partial_rollout", False):
            return {}
        turns = self.trajectory.turns
        resumed = {turn.index: turn.resumes.completion_tokens for turn in turns if turn.resumes is not None}
        return {**self.previous.old_tokens, **resumed}

    def clean_up(self) -> None:
        """Release the agent's resources."""
        try:
            if self.agent is not None:
                self.agent.cleanup()
        except Exception:
            logger.warning("the cleanup of an agent failed", exc_info=True)


_logged_origins: set[tuple[Any, ...]] = set()
"""Origins of logged agent errors: one mistake in the code fails every sample of a run."""


def _is_logged(error: Any) -> bool:
    """Return whether an error from the same line was logged before, and mark it as logged."""
    frames = traceback.extract_tb(getattr(error, "__traceback__", None), limit=-1)
    origin = (type(error).__name__, *((frame.filename, frame.lineno) for frame in frames))
    known = origin in _logged_origins
    _logged_origins.add(origin)
    return known


def _error_text(end: Any) -> str:
    """Return the text of the error that failed an episode."""
    return f"{type(end).__name__}: {end}"[:_MAX_ERROR_CHARS] if isinstance(end, Exception) else ""


# --- Partial rollouts ---

PARTIAL_KEY = "strands_sglang_kept"
"""Attribute of the sample that holds a partial rollout."""

_VERSION = 1
_COUNTS = ("tool_iter_count", "tool_call_count", "message_count", "cancelled_tool_call_count")


@dataclass(eq=False)
class PartialRollout:
    """An aborted episode to continue.

    Attributes:
        trajectory: Trajectory so far.
        messages: Messages of the agent.
        state: State of the agent.
        counts: Counts of the limiter.
        elapsed_s: Seconds that the earlier parts took.
        non_generation_s: Seconds of those that were not spent on generation.
        old_tokens: Number of tokens that the earlier parts sampled, by `Turn.index`.
    """

    trajectory: Trajectory = field(default_factory=Trajectory)
    messages: Sequence[Any] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    elapsed_s: float = 0.0
    non_generation_s: float = 0.0
    old_tokens: Mapping[int, int] = field(default_factory=dict)


def save_partial(episode: Rollout) -> None:
    """Save an aborted episode on its sample, unless it cannot be continued."""
    sample, trajectory, agent = episode.sample, episode.trajectory, episode.agent
    leaf = trajectory.main_leaf()
    if leaf is None or any(turn.images is not None for turn in trajectory.turns):
        return
    others = [turn.cause for turn in trajectory.turns if turn.cause is not None and turn.root.key != leaf.root.key]
    if any(isinstance(cause, SGLangAbortedError) for cause in chain.from_iterable(map(causes, others))):
        return
    messages, state = list(agent.messages), agent.state.get() or {}
    try:
        json.dumps([messages, state])
        content = trajectory.to_bytes()
    except (TypeError, ValueError) as error:
        logger.warning(
            "sample=<%s> | will start again: it is not plain data: %s", getattr(sample, "index", None), error
        )
        return
    saved = {
        "version": _VERSION,
        "trajectory": base64.b64encode(content).decode("ascii"),
        "messages": copy.deepcopy(messages),
        "state": state,
        "counts": {name: getattr(episode.limiter, name) for name in _COUNTS},
        "elapsed_s": episode.elapsed_s(),
        "non_generation_s": episode.non_generation_s(),
    }
    setattr(sample, PARTIAL_KEY, saved)


def load_partial(sample: Any) -> PartialRollout:
    """Load an aborted episode from its sample, with its cut call ready to resume; an empty one if there is none."""
    saved = getattr(sample, PARTIAL_KEY, None)
    if not isinstance(saved, Mapping) or saved.get("version") != _VERSION:
        return PartialRollout()
    try:
        trajectory = Trajectory.from_bytes(base64.b64decode(saved["trajectory"]), name="a partial rollout")
        old_tokens = {turn.index: len(turn.output_ids) for turn in trajectory.turns}
        for turn in trajectory.turns:
            if turn.status is TurnStatus.CUT and not turn.constrained:
                trajectory.resume(turn)
                del old_tokens[turn.index]
        return PartialRollout(
            trajectory=trajectory,
            messages=list(saved["messages"]),
            state=dict(saved["state"]),
            counts={name: int(saved["counts"][name]) for name in _COUNTS},
            elapsed_s=float(saved["elapsed_s"]),
            non_generation_s=float(saved["non_generation_s"]),
            old_tokens=old_tokens,
        )
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("sample=<%s> | starts again: its partial rollout cannot be read: %r", sample.index, error)
        return PartialRollout()


generate = make_generate()
"""A ready `generate` function for slime, whose agent has no tools and no system prompt."""
