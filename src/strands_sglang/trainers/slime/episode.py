"""One episode of a Strands agent for a slime sample: its agent, its limits, its end."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from strands import Agent
from strands.agent.conversation_manager import NullConversationManager
from typing_extensions import override

from ...model.model import SGLangModel
from ...outcomes import OUTCOMES, RewardRule, TerminationReason, termination_reason
from ...tool_limiter import ToolLimiter
from ...trajectory.trajectory import Trajectory
from ...trajectory.turn import TurnStatus
from .arguments import as_reward
from .gate import EpisodeGate
from .partial import Kept

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Settings:
    """The arguments of `make_generate`."""

    episode: Callable[..., Any] | None
    agent_factory: Callable[..., Any] | None
    tools: Sequence[Any]
    system_prompt: str | None
    prompt: Callable[[Any], Any] | None
    limits: Mapping[str, int | None]
    max_turns: int | None
    timeout: float | None
    reward: Callable[..., Any] | None
    fan_out: bool
    requeue_aborted: bool | None
    tool_parser: Any
    model_config: Mapping[str, Any]
    client_settings: Mapping[str, Any]
    generate_state: Callable[[Any], Any] | None
    failure_reward: float


@dataclass(eq=False)
class Part:
    """One run of an episode, which is all of it unless slime aborts it in between.

    Attributes:
        gate: What holds for its requests.
        limiter: The limits on its tools.
        kept: What the part before it left.
        began: When it began, on the monotonic clock.
        agent: Its agent, once that is made.
        end: What the agent returned or raised.
        answered_before: How many answers the parts before it got.
    """

    gate: EpisodeGate
    limiter: ToolLimiter
    kept: Kept | None
    began: float = field(default_factory=time.monotonic)
    agent: Any = None
    end: Any = None
    answered_before: int = field(init=False)

    def __post_init__(self) -> None:
        """Note where the part begins."""
        self.answered_before = self._answered()

    def _answered(self) -> int:
        return sum(turn.is_answered for turn in self.trajectory.turns)

    @property
    def trajectory(self) -> Trajectory:
        """The episode's calls."""
        return self.gate.trajectory

    @property
    def has_sampled(self) -> bool:
        """Whether this part got an answer."""
        return self._answered() > self.answered_before

    def elapsed_s(self) -> float:
        """Seconds that the episode has taken."""
        return time.monotonic() - self.began + (self.kept.elapsed_s if self.kept is not None else 0.0)

    def non_generation_s(self) -> float:
        """Seconds of those that went to other things than generating."""
        own = max(time.monotonic() - self.began - self.gate.generating_s, 0.0)
        return own + (self.kept.non_generation_s if self.kept is not None else 0.0)


async def run(settings: Settings, model: SGLangModel, sample: Any, part: Part, system: str | None, asked: Any) -> None:
    """Run the agent; what it returned or raised is the part's end.

    Args:
        settings: Of `make_generate`.
        model: The agent's.
        sample: slime's sample.
        part: Gets the agent and the end.
        system: The system prompt of the sample's prompt, if it has one.
        asked: What that prompt asks; left aside where `settings.prompt` makes another one.
    """
    try:
        part.agent = agent = await _agent(settings, model, sample)
        agent.hooks.add_hook(part.limiter)
        agent.hooks.add_hook(model.hooks)  # the record knows what becomes of each answer
        if system is not None:
            own = agent.system_prompt
            agent.system_prompt = f"{own}\n\n{system}" if own else system
        if part.kept is not None and part.kept.messages:
            part.kept.apply(agent, part.limiter)
            asked = None
        elif settings.prompt is not None:
            asked = settings.prompt(sample)
        invoked = agent.invoke_async(asked, **_limits(settings, part.trajectory))
        if settings.timeout is not None:
            invoked = asyncio.wait_for(invoked, max(settings.timeout - part.elapsed_s(), 0.0))
        part.end = await invoked
    except Exception as error:
        part.end = error


class EpisodesModel(SGLangModel):
    """The model of one episode: who opens an episode on it first gets the one that is going on."""

    _is_open = False

    @override
    def episode(self) -> AbstractContextManager[Trajectory]:
        """The episode that is going on, and then those of others, as of a judge."""
        if self._is_open:
            return super().episode()
        self._is_open = True
        return nullcontext(self.trajectory)


async def run_elsewhere(
    settings: Settings, args: Any, model: SGLangModel, sample: Any, part: Part, evaluation: bool
) -> EpisodeEnd:
    """Have somebody else run the episode; whatever that raises is an end."""
    assert settings.episode is not None
    try:
        ended = settings.episode(model, sample)
        end: EpisodeEnd = await ended if inspect.isawaitable(ended) else ended
        if not isinstance(end, EpisodeEnd):
            raise TypeError(f"episode= must return an EpisodeEnd, not {end!r:.80}")
    except Exception as error:
        part.end = error
        return EpisodeEnd(reason_of(part))
    reward = end.reward
    if reward is not None and not isinstance(reward, Mapping):
        reward = as_reward(args, reward, evaluation=evaluation, category="scored")
    return replace(end, reward=reward)


async def _agent(settings: Settings, model: SGLangModel, sample: Any) -> Any:
    if settings.agent_factory is not None:
        agent = settings.agent_factory(model, sample)
        return await agent if inspect.isawaitable(agent) else agent
    return Agent(
        model=model,
        tools=list(settings.tools),
        system_prompt=settings.system_prompt,
        callback_handler=None,
        conversation_manager=NullConversationManager(),
    )


def _limits(settings: Settings, trajectory: Trajectory) -> dict[str, Any]:
    """Strands' limits for what is left of the turns."""
    if settings.max_turns is None:
        return {}
    leaf = trajectory.main_leaf()
    done = 0
    if leaf is not None:
        done = sum(1 for turn in leaf.path() if turn.is_answered and turn.status is not TurnStatus.CUT)
    return {"limits": {"turns": max(settings.max_turns - done, 1)}}


def reason_of(part: Part) -> TerminationReason:
    """Why the episode ended."""
    reason = termination_reason(part.end, trajectory=part.trajectory, limiter=part.limiter)
    if reason is TerminationReason.AGENT_ERROR:
        level = logging.DEBUG if _is_logged(part.end) else logging.WARNING
        logger.log(
            level,
            "error=<%s> | an agent's own code failed; an error from the same line is logged once",
            error_text(part.end),
            exc_info=_raised(part.end),
        )
    elif isinstance(part.end, Exception):
        logger.info("outcome=<%s>, error=<%s> | an episode ended with an error", reason.value, part.end)
    return reason


_logged: set[tuple[str, str, int]] = set()
"""Where errors of agents came from that were logged: one mistake in the code fails every sample of a run."""


def _is_logged(error: Any) -> bool:
    """Whether an error from the same line was logged before; it is from now on."""
    frames = traceback.extract_tb(getattr(error, "__traceback__", None), limit=-1)
    origin = (type(error).__name__, frames[0].filename if frames else "", (frames[0].lineno or 0) if frames else 0)
    known = origin in _logged
    _logged.add(origin)
    return known


def error_text(end: Any) -> str:
    """What failed an episode, as text."""
    return f"{type(end).__name__}: {end}"[:_MAX_ERROR_CHARS] if isinstance(end, Exception) else ""


_MAX_ERROR_CHARS = 1000


def _raised(end: Any) -> Exception | None:
    return end if isinstance(end, Exception) else None


async def own_reward(settings: Settings, part: Part, sample: Any, reason: TerminationReason) -> Any:
    """The episode's own reward; one that raises is no number, so the sample is removed."""
    if settings.reward is None or part.agent is None or OUTCOMES[reason].reward is RewardRule.NONE:
        return None
    try:
        reward = settings.reward(part.agent, sample)
        reward = await reward if inspect.isawaitable(reward) else reward
        return reward if reward is None or isinstance(reward, Mapping) else float(reward)
    except Exception:
        logger.warning("sample=<%s> | the reward function raised", getattr(sample, "index", None), exc_info=True)
        return float("nan")


def clean_up(agent: Any) -> None:
    """Let an agent give back what it holds."""
    try:
        if agent is not None:
            agent.cleanup()
    except Exception:
        logger.warning("an agent could not be cleaned up", exc_info=True)
