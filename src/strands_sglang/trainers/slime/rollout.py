"""A `generate` function for slime's `--custom-generate-function-path`: one Strands agent per sample.

Promises: whatever an episode raises ends in a sample (a cancellation goes on); slime's sampling parameters are left as
they are; nothing is asked of the server once slime aborts; a sample that is handed in again is generated anew or, as a
partial rollout, continued; one that is finished is handed back.

slime gives an episode one budget of response tokens, and stops rollouts by a flag. Both concern every request of an
episode, whoever makes it (the agent, one that is a tool, a summary), so `Episode.on_request` sees them all.

- No request goes out once slime aborts: `SGLangAbortedError`.
- `max_new_tokens` is what the budget has left, with everything after the opening prompt counted, tool results too.

A partial rollout leaves on its sample what the next part continues from: the trajectory, the agent's messages and
state, and the counts of its limits, as plain data in one attribute, which slime's `Sample.to_dict` and `from_dict`
carry along. The next part asks the same call again, which extends the tokens that it had sampled
(`Trajectory.resume`); they are never sampled or tokenised anew. Episodes with images are not kept, nor those in which
the abort hit another agent than the sample's own, as one that is a tool, since its error is in the messages by then:
such a sample starts from its prompt again.
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
from typing import Any, cast

from strands import Agent
from strands.agent.conversation_manager import NullConversationManager
from strands.types.content import Messages
from typing_extensions import override

from ...client.cache import get_client_from_slime_args
from ...exceptions import SGLangAbortedError, causes
from ...model.call import RequestPlan
from ...model.config import check_keys
from ...model.model import SGLangModel
from ...outcomes import OUTCOMES, RewardRule, TerminationReason, termination_reason
from ...request_fields import checked_fields
from ...tool_limiter import LoopLimitReachedError, ToolLimiter
from ...trajectory.trajectory import Trajectory
from ...trajectory.turn import Turn, TurnStatus
from .samples import (
    RolloutSamples,
    SlimeExportError,
    as_reward,
    awaited,
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
) -> Callable[..., Awaitable[Any]]:
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
        fan_out = settings.fan_out and not evaluation  # an evaluation counts samples, and an episode is one
        if sample.status.name in ("COMPLETED", "TRUNCATED"):
            return RolloutSamples([sample]) if fan_out else sample
        if fan_out:
            lists, episodes = "knows no lists of samples", "counts samples for episodes"
            for name, reason in (("partial_rollout", lists), ("group_rm", lists), ("log_passrate", episodes)):
                if getattr(args, name, False):
                    raise SlimeExportError(f"slime's {name} {reason}: leave it out, or fan_out=True")
            if getattr(args, "custom_reward_post_process_path", "") is None and normalizes_by_group(args):
                raise SlimeExportError(
                    "with fan_out=True, slime's own normalisation of rewards takes the whole batch for one group: set "
                    "--custom-reward-post-process-path strands_sglang.trainers.slime.grpo_rewards_by_group"
                )
        if settings.generate_state is not None:
            state = settings.generate_state(args)
        else:
            from slime.rollout.sglang_rollout import GenerateState  # type: ignore[import-not-found]  # only where slime runs

            state = GenerateState(args)
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

    return generate


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


# --- an episode ---

_MAX_ERROR_CHARS = 1000


class ResponseBudgetReachedError(LoopLimitReachedError):
    """The response is as long as it may be."""

    outcome = "token_budget_reached"


@dataclass(frozen=True)
class EpisodeEnd:
    """How an episode ended that somebody else ran; what the `episode=` of `make_generate` returns.

    Attributes:
        reason: Why it ended.
        reward: Its reward, a number or a dictionary for `reward_key`; None leaves it to slime's reward function. One
            that is no finite number removes the sample.
        metadata: What `sample.metadata["strands_sglang"]` is to hold.
    """

    reason: TerminationReason
    reward: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class EpisodesModel(SGLangModel):
    """The model of one episode: the first `episode()` on it is the one that is running, later ones are others'."""

    _is_open = False

    @override
    def episode(self) -> AbstractContextManager[Trajectory]:
        """The running episode, and then those of others, such as a judge's."""
        if self._is_open:
            return super().episode()
        self._is_open = True
        return nullcontext(self.trajectory)


@dataclass(eq=False)
class Episode:
    """One run of an episode, which is all of it unless slime aborts it in between.

    Attributes:
        settings: Of `make_generate`.
        args: slime's parsed arguments.
        state: slime's `GenerateState`.
        sample: slime's sample.
        sampling_params: slime's; their `max_new_tokens` is the budget of the whole response.
        evaluation: Whether the sample is none to train on.
        is_partial: Whether it continues what an aborted run left on the sample, and leaves it there if it is aborted.
        began: When it began, on the monotonic clock.
        asked: The turns for which requests were made.
        agent: Its agent, once that is made.
        end: What the agent returned or raised.
        kept: What the run before it left.
        trajectory: Its calls.
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
        """Take up what the run before has left."""
        self.limiter = self.settings.limiter()
        self.kept = kept_on(self.sample) if self.is_partial else None
        self.trajectory = Trajectory() if self.kept is None else self.kept.trajectory
        self._answered_before = self._answered()

    def _answered(self) -> int:
        return sum(turn.is_answered for turn in self.trajectory.turns)

    def elapsed_s(self) -> float:
        """Seconds that the episode has taken."""
        return time.monotonic() - self.began + (self.kept.elapsed_s if self.kept is not None else 0.0)

    def non_generation_s(self) -> float:
        """Seconds of those that went to other things than generating; parallel requests count once each."""
        own = time.monotonic() - self.began - sum(turn.requests_s for turn in self.asked)
        return max(own, 0.0) + (self.kept.non_generation_s if self.kept is not None else 0.0)

    # --- requests ---

    def on_request(self, turn: Turn, plan: RequestPlan) -> RequestPlan:
        """Ask for no more tokens than the budget has left.

        Raises:
            SGLangAbortedError: slime stops rollouts.
            ResponseBudgetReachedError: The response is as long as it may be.
        """
        if self.state.aborted:
            raise SGLangAbortedError("slime aborts its rollouts, so no request was made")
        self.asked.add(turn)
        budget = self.sampling_params.get("max_new_tokens")
        if budget is None or turn.trajectory is not self.trajectory:
            return plan
        length = len(turn.token_ids()) - len(turn.root.prompt_ids)
        room = budget - max(length, sum(len(other.output_ids) for other in self.trajectory.turns))
        least = max(plan.sampling_params.get("min_new_tokens") or 0, 1)
        if room < least and not plan.sampled:
            what = f", and an answer has at least {least} (min_new_tokens)" if least > 1 else ""
            raise ResponseBudgetReachedError(f"the response has {budget - max(room, 0)} of its {budget} tokens{what}")
        room = max(room, plan.sampled)  # the rest of a cut answer may have none
        asked = plan.sampling_params.get("max_new_tokens")
        if asked is not None and asked <= room:
            return plan
        return replace(plan, sampling_params={**plan.sampling_params, "max_new_tokens": room}, clamped=False)

    def _model(self) -> SGLangModel:
        settings, args, state, sample = self.settings, self.args, self.state, self.sample
        given = settings.model_config or {}
        # slime's session is the routing key, which keeps an episode on one worker.
        config: dict[str, Any] = {"sampling_params": dict(self.sampling_params), "routing_key": sample.session_id}
        limits = (context_limit(args, evaluation=self.evaluation), given.get("max_context_tokens"))
        longest = min((limit for limit in limits if limit is not None), default=None)
        if getattr(args, "use_rollout_routing_replay", False) and not self.evaluation:
            config["return_routed_experts"] = True
        processor = getattr(state, "processor", None) if getattr(sample, "multimodal_inputs", None) else None
        model = EpisodesModel(
            tokenizer=state.tokenizer if processor is None else processor.tokenizer,
            client=get_client_from_slime_args(args, **(settings.client_settings or {})),
            tool_parser=settings.tool_parser,
            processor=processor,
            **cast(Any, {**config, **given, "max_context_tokens": longest}),
        )
        model.trajectory = self.trajectory
        model.on_request = self.on_request
        return model

    # --- running ---

    async def run(self, system: str | None, asked: Any) -> tuple[TerminationReason, Any, Mapping[str, Any]]:
        """Run the episode; whatever it raises is its end.

        Args:
            system: The system prompt of the sample's prompt, if it has one.
            asked: What that prompt asks; left aside where `settings.prompt` makes another one.

        Returns:
            Why it ended, its reward, and what else is told of it.
        """
        model = self._model()
        try:
            if self.settings.episode is not None:
                end = await awaited(self.settings.episode(model, self.sample))
                if not isinstance(end, EpisodeEnd):
                    raise TypeError(f"episode= must return an EpisodeEnd, not {end!r:.80}")
                reward = end.reward
                if reward is not None and not isinstance(reward, Mapping):
                    reward = as_reward(self.args, reward, evaluation=self.evaluation, category="scored")
                return end.reason, reward, end.metadata
            self.end = await self._run_agent(model, system, asked)
        except Exception as error:
            self.end = error
        reason = self._reason()
        if self.settings.episode is not None:
            return reason, None, {}
        self.trajectory.settle(list(self.agent.messages) if self.agent is not None else [])
        return reason, await self._own_reward(reason), {}

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
        agent.hooks.add_hook(model.hooks)  # the record knows what becomes of each answer
        if system is not None:
            own = agent.system_prompt
            agent.system_prompt = f"{own}\n\n{system}" if own else system
        if self.kept is not None and self.kept.messages:
            asked = None  # the agent is put where the aborted one was
            agent.messages[:] = copy.deepcopy(self.kept.messages)
            for key, value in self.kept.state.items():
                agent.state.set(key, value)
            for name, count in self.kept.counts.items():
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
        """The episode's own reward; one that raises is no number, so the sample is removed."""
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
        """Why the episode ended."""
        end = self.end
        reason = termination_reason(end, trajectory=self.trajectory, limiter=self.limiter)
        if reason is TerminationReason.AGENT_ERROR:
            logger.log(
                logging.DEBUG if _is_logged(end) else logging.WARNING,
                "error=<%s> | an agent's own code failed; an error from the same line is logged once",
                _error_text(end),
                exc_info=end if isinstance(end, Exception) else None,
            )
        elif isinstance(end, Exception):
            logger.info("outcome=<%s>, error=<%s> | an episode ended with an error", reason.value, end)
        return reason

    # --- samples ---

    def export(self, reason: TerminationReason, reward: Any, facts: Mapping[str, Any]) -> Any:
        """Slime's samples.

        Args:
            reason: Why the episode ended.
            reward: Its reward; None leaves it to slime's function.
            facts: What else is told of it.
        """
        settings, sample = self.settings, self.sample
        fan_out = settings.fan_out and not self.evaluation
        requeued = settings.requeue_aborted
        if requeued is None:  # slime's fully asynchronous rollout runs aborted samples again although nothing aborts
            runs_again = "fully_async" in str(getattr(self.args, "rollout_function_path", None))
            requeued = runs_again and not fan_out and not self.evaluation
        if reason is TerminationReason.ABORTED:
            requested = requeued or bool(self.state.aborted)
        else:  # an agent that cancels itself would do so for ever
            requested = reason is TerminationReason.CANCELLED and bool(self.state.aborted)
        waits = any(turn.waits_to_go_on for turn in self.trajectory.turns)
        if requested and self.is_partial and waits and self._answered() <= self._answered_before:
            # Aborted before anything was asked: the sample is what the run before has left.
            sample.status, sample.reward = type(sample).Status.ABORTED, None
            return sample
        failed = OUTCOMES[reason].slime_status == "FAILED" and self.end
        exported = to_slime_samples(
            self.trajectory,
            sample,
            reason,
            tokenizer=self.state.tokenizer,
            args=self.args,
            reward=reward,
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
                **facts,
            },
        )
        if getattr(sample, KEPT, None) is not None:
            setattr(sample, KEPT, None)
        if requested and self.is_partial and self.agent is not None:
            keep(self)
        return exported

    def _off_policy_tokens(self) -> dict[int, int]:
        """What earlier runs sampled, if that is not to be trained on."""
        if self.kept is None or not getattr(self.args, "mask_offpolicy_in_partial_rollout", False):
            return {}
        resumed = {turn.index: turn.resumes for turn in self.trajectory.turns if turn.resumes is not None}
        return {**self.kept.old_tokens, **{index: cut.completion_tokens for index, cut in resumed.items()}}

    def clean_up(self) -> None:
        """Let the agent give back what it holds."""
        try:
            if self.agent is not None:
                self.agent.cleanup()
        except Exception:
            logger.warning("an agent could not be cleaned up", exc_info=True)


_logged: set[tuple[str, str, int]] = set()
"""Where errors of agents came from that were logged: one mistake in the code fails every sample of a run."""


def _is_logged(error: Any) -> bool:
    """Whether an error from the same line was logged before; it is from now on."""
    frames = traceback.extract_tb(getattr(error, "__traceback__", None), limit=-1)
    origin = (type(error).__name__, frames[0].filename if frames else "", (frames[0].lineno or 0) if frames else 0)
    known = origin in _logged
    _logged.add(origin)
    return known


def _error_text(end: Any) -> str:
    """What failed an episode, as text."""
    return f"{type(end).__name__}: {end}"[:_MAX_ERROR_CHARS] if isinstance(end, Exception) else ""


# --- partial rollouts ---

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


def keep(episode: Episode) -> None:
    """Put an aborted episode on its sample, unless it cannot be continued."""
    sample, trajectory, agent = episode.sample, episode.trajectory, episode.agent
    leaf = trajectory.main_leaf()
    if leaf is None or any(turn.images is not None for turn in trajectory.turns):
        return
    others = [turn.cause for turn in trajectory.turns if turn.cause is not None and turn.root.key != leaf.root.key]
    if any(isinstance(cause, SGLangAbortedError) for error in others for cause in causes(error)):
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
    """What an aborted episode left on a sample, its cut call ready to continue; None where there is nothing."""
    kept = getattr(sample, KEPT, None)
    if not isinstance(kept, Mapping) or kept.get("version") != _VERSION:
        return None
    try:
        trajectory = Trajectory.from_bytes(base64.b64decode(kept["trajectory"]), name="a partial rollout")
        old_tokens = {turn.index: len(turn.output_ids) for turn in trajectory.turns}
        for turn in trajectory.turns:
            if turn.status is TurnStatus.CUT and not turn.constrained:
                trajectory.resume(turn)
                del old_tokens[turn.index]
        return Kept(
            trajectory=trajectory,
            messages=list(kept["messages"]),
            state=dict(kept["state"]),
            counts={name: int(kept["counts"][name]) for name in _COUNTS},
            elapsed_s=float(kept["elapsed_s"]),
            non_generation_s=float(kept["non_generation_s"]),
            old_tokens=old_tokens,
        )
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("sample=<%s> | starts again: what it kept cannot be read: %r", sample.index, error)
        return None


generate = make_generate()
"""A `generate` function whose agent has no tools and no system prompt."""
