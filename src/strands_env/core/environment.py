"""`Environment`: one step is one whole episode of a Strands agent, from `reset` to `cleanup`.

Promises:
- Every end has its row in `strands_sglang.outcomes`, causes found through Strands' wrappers. Ends that say nothing of
  the policy (infrastructure, aborts, cancellation, code that raised) have no reward.
- Whatever happens, `cleanup` runs, and what was recorded until then is in the result.
- Each step has a trajectory of its own, also if all steps share one model.
- Nothing is added to the agent's messages, shortened, or asked again behind the trainer's back.
- Every budget ends the loop where the history is whole: behind the results of a turn's tools.
- Of an action (text, one message or a chat, in Strands' form or OpenAI's) what is not understood is refused and never
  left out, and the action is not changed.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import functools
import inspect
import json
import logging
import math
import random
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from strands import Agent
from strands.agent import AgentResult
from strands.agent.conversation_manager import NullConversationManager
from strands.handlers.callback_handler import PrintingCallbackHandler
from strands.hooks import HookOrder, HookProvider, HookRegistry
from strands.hooks.events import AfterModelCallEvent, BeforeToolCallEvent
from strands.models.model import Model
from strands.telemetry.metrics import EventLoopMetrics
from strands.tools import ToolProvider
from strands.types.content import ContentBlock, Message
from strands.types.tools import AgentTool, ToolSpec, ToolUse
from typing_extensions import override

from strands_sglang import (
    OUTCOMES,
    RewardRule,
    SGLangModel,
    TerminationReason,
    ToolLimiter,
    Trajectory,
    termination_reason,
)

from .identity import Identified, describe
from .supervision import INSIST_AFTER, Supervisor, as_failure, called, in_thread, settled
from .types import Action, Observation, RewardError, RewardFunction, RewardResult, StepResult, TokenObservation

logger = logging.getLogger(__name__)

# --- what an episode may spend ---


OUT_OF_TIME = "Error: the tool did not finish within"
"""How the result of a call that took too long begins."""


@dataclass(frozen=True)
class Budgets:
    """What one episode may spend; None for any amount.

    Attributes:
        max_tool_iterations: Assistant messages with tool calls, together with their results.
        max_tool_calls: Single tool calls; those beyond, in one message, too, are not run.
        max_parallel_tool_calls: Tool calls run per assistant message.
        max_turns: Model calls.
        max_sampled_tokens: Tokens that the agent's model calls sampled; checked between turns.
        max_total_tokens: Tokens of the agent's prompts and answers, summed over its calls; checked between turns.
        tool_timeout: Seconds for one tool call.
    """

    max_tool_iterations: int | None = None
    max_tool_calls: int | None = None
    max_parallel_tool_calls: int | None = None
    max_turns: int | None = None
    max_sampled_tokens: int | None = None
    max_total_tokens: int | None = None
    tool_timeout: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name, number in (
            ("max_tool_iterations", 0),
            ("max_tool_calls", 0),
            ("max_parallel_tool_calls", 0),
            ("max_turns", 1),
            ("max_sampled_tokens", 1),
            ("max_total_tokens", 1),
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < number):
                raise ValueError(f"{name} must be a whole number of at least {number} or None, not {value!r}")

    def left(self, agent: Agent) -> dict[str, int]:
        """What is left, as Strands takes it; a number below 1 is spent."""
        metrics = agent.event_loop_metrics
        spent = {
            "turns": (self.max_turns, metrics.cycle_count),
            "total_tokens": (self.max_total_tokens, metrics.accumulated_usage["totalTokens"]),
            "output_tokens": (self.max_sampled_tokens, metrics.accumulated_usage["outputTokens"]),
        }
        return {name: most - used for name, (most, used) in spent.items() if most is not None}


class EpisodeHooks(HookProvider):
    """Holds one episode's agent to its budgets: keeps tool calls beyond them from running, and contains the others.

    Attributes:
        limiter: Counts tool iterations and calls, and ends the loop at their limits.
        model_error: What the latest call of the model raised, which tells a provider's errors from those of the agent's
            own code; None if it gave an answer.
    """

    def __init__(self, budgets: Budgets) -> None:
        """Watch one episode."""
        self._budgets = budgets
        self.limiter = ToolLimiter(
            max_tool_iters=budgets.max_tool_iterations,
            max_tool_calls=budgets.max_tool_calls,
            max_parallel_tool_calls=budgets.max_parallel_tool_calls,
            on_limit="stop",
        )
        self.model_error: BaseException | None = None

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register with the episode's agent, the limiter first."""
        self.limiter.register_hooks(registry)
        registry.add_callback(AfterModelCallEvent, self._note)
        registry.add_callback(BeforeToolCallEvent, self._check, order=HookOrder.SDK_LAST)

    def _note(self, event: AfterModelCallEvent) -> None:
        self.model_error = event.exception

    def _check(self, event: BeforeToolCallEvent) -> None:
        excess = self._excess(event)
        if excess is not None:
            event.cancel_tool = f"This tool call was not run: at most {excess} may be made."
        elif event.selected_tool is not None:
            is_named = event.selected_tool.tool_name == event.tool_use["name"]  # a renamed call is still to find it
            if is_named or self._budgets.tool_timeout is not None:
                event.selected_tool = ContainedTool(event.selected_tool, self._budgets.tool_timeout)

    def _excess(self, event: BeforeToolCallEvent) -> str | None:
        """The budget that a call is beyond, if any."""
        most_iterations, most_calls = self._budgets.max_tool_iterations, self._budgets.max_tool_calls
        if most_iterations is not None and self.limiter.tool_iter_count > most_iterations:
            return f"{most_iterations} rounds of tool calls"
        if most_calls is None or self.limiter.tool_call_count <= most_calls:
            return None
        # The limiter has counted all calls of the message; those at its end are too many.
        uses = [block["toolUse"]["toolUseId"] for block in event.agent.messages[-1]["content"] if "toolUse" in block]
        excess = uses[most_calls - self.limiter.tool_call_count :]
        return f"{most_calls} tool calls" if event.tool_use["toolUseId"] in excess else None


class ContainedTool(AgentTool):
    """A tool that harms nothing but its own call.

    What would end this process, its event loop or the agent's task (`SystemExit`, `KeyboardInterrupt`,
    `CancelledError`) is an error that the model gets to see; a tool that evaluates what a model wrote raises one when
    that says `exit()`. Functions that block have a thread of their own each. A call may end after some seconds, with
    an error; its thread goes on by itself, and its result is dropped.
    """

    def __init__(self, tool: AgentTool, seconds: float | None = None) -> None:
        """Contain a tool, whose calls may take so long."""
        super().__init__()
        function = getattr(tool, "_tool_func", None)
        if callable(function) and not (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)):
            # Strands runs it in the event loop's shared threads; here each call has a thread of its own.
            async def threaded(*args: Any, **kwargs: Any) -> Any:
                return await in_thread(function, *args, **kwargs)

            tool = copy.copy(tool)
            tool._tool_func = functools.wraps(function)(threaded)  # type: ignore[attr-defined]
        self._tool = tool
        self._seconds = seconds

    @property
    @override
    def tool_name(self) -> str:
        """The tool's."""
        return self._tool.tool_name

    @property
    @override
    def tool_spec(self) -> ToolSpec:
        """The tool's."""
        return self._tool.tool_spec

    @property
    @override
    def tool_type(self) -> str:
        """The tool's."""
        return self._tool.tool_type

    @override
    async def stream(
        self, tool_use: ToolUse, invocation_state: dict[str, Any], **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """The tool's events; an error result when the time is up."""
        events: asyncio.Queue[Any] = asyncio.Queue()
        end = object()

        async def pump() -> None:
            # In a task of its own throughout: a generator's context must not change from event to event, and a
            # cancellation that comes from in here is the tool's.
            try:
                async for event in self._tool.stream(tool_use, invocation_state, **kwargs):
                    events.put_nowait(event)
            except BaseException as error:
                raise as_failure(error) from None
            finally:
                events.put_nowait(end)

        loop = asyncio.get_running_loop()
        until = None if self._seconds is None else loop.time() + self._seconds
        pumping = loop.create_task(pump())
        pumping.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, whoever is still there
        try:
            while True:
                try:
                    left = None if until is None else max(until - loop.time(), 0.0)
                    event = await asyncio.wait_for(events.get(), left)
                except asyncio.TimeoutError:
                    if not pumping.done():
                        logger.info(
                            "tool=<%s>, seconds=<%s> | a tool call ran out of time", self.tool_name, self._seconds
                        )
                        said = {"text": f"{OUT_OF_TIME} {self._seconds:g} seconds."}
                        yield {"toolUseId": tool_use["toolUseId"], "status": "error", "content": [said]}
                        return
                    event = events.get_nowait()  # the tool is done; only the loop was late to fetch what it gave
                if event is end:
                    break
                yield event
            await asyncio.wait({pumping})
            pumping.result()  # an error of the tool's own, timeouts included
        except asyncio.CancelledError:
            pumping.cancel()
            await asyncio.wait({pumping})  # what the tool does at its end is done before the environment's cleanup
            raise
        finally:
            pumping.cancel()


# --- episodes ---


ModelFactory = Callable[[], "Model | Awaitable[Model]"]
"""Makes the model of a step; may be async, and may return the same model again and again."""

LONGEST_RETRY_DELAY = 60.0

TURNS_AT_ONCE = 16
"""Turns of one invocation of an agent, whose loop recurses once per turn: far below Python's recursion limit.

Most episodes are one invocation. In the others the counts run on, and no message is added in between.
"""

_MAKE_NO_DIFFERENCE = frozenset(
    {"reward_fn", "system_prompt", "verbose", "cleanup_timeout", "retries", "retry_on", "retry_delay"}
)
"""Arguments that results do not depend on, or that are told apart from the others."""


class Environment(Identified):
    """Tasks for an agent with tools, and a reward for what it makes of them.

    Subclasses override `get_tools`, `get_hooks`, `reset`, `cleanup` and `compute_metrics`, all of which may be async;
    of those that are not, the last three run in a thread of their own, as a reward function does.
    Steps may run at once if what the subclass keeps on itself allows it; else make one environment per step.

    Attributes:
        default_system_prompt_path: File with the system prompt of environments that are given none.
        last_result: The result of the step that ended last, also of one that was cancelled and so returned none.
    """

    default_system_prompt_path: ClassVar[str | Path | None] = None

    def __init__(
        self,
        model_factory: ModelFactory,
        reward_fn: RewardFunction | None = None,
        system_prompt: str | None = None,
        max_tool_iterations: int | None = 10,
        max_tool_calls: int | None = None,
        verbose: bool = False,
        *,
        max_parallel_tool_calls: int | None = None,
        max_turns: int | None = None,
        max_sampled_tokens: int | None = None,
        max_total_tokens: int | None = None,
        episode_timeout: float | None = None,
        tool_timeout: float | None = None,
        reward_timeout: float | None = 600.0,
        cleanup_timeout: float | None = 60.0,
        retries: int = 0,
        retry_on: Collection[TerminationReason] = (TerminationReason.INFRASTRUCTURE_ERROR,),
        retry_delay: float = 1.0,
    ) -> None:
        """Set up the environment; nothing is made before the first step.

        Args:
            model_factory: Makes the model of a step.
            reward_fn: Judges episodes; None for no rewards.
            system_prompt: The agent's; None for what `default_system_prompt_path` holds. A system message in an action
                is put behind it.
            max_tool_iterations: Assistant messages with tool calls, each with its results. As for all of these
                limits, None means any number.
            max_tool_calls: Single tool calls. Those beyond it are answered with an error and not run.
            verbose: Whether to print what the agent does.
            max_parallel_tool_calls: Tool calls run per assistant message.
            max_turns: Model calls.
            max_sampled_tokens: Tokens that the agent's calls sampled, checked between turns, so that the last turn can
                go beyond it; the model's `max_new_tokens` bounds that one.
            max_total_tokens: Tokens of prompts and answers, summed over the agent's calls, likewise.
            episode_timeout: Seconds from `reset` to the agent's end.
            tool_timeout: Seconds for one tool call; it ends with an error that the model sees, and the episode goes on.
            reward_timeout: Seconds for the reward function, and for `compute_metrics`; after that there is none, and
                `error` says so.
            cleanup_timeout: Seconds for `cleanup`.
            retries: How often an episode that failed is begun anew, with `cleanup` and `reset` in between.
            retry_on: The ends that count as failed.
            retry_delay: Seconds before the first retry; twice as many before each further one, at most a minute.

        Raises:
            ValueError: A limit cannot work.
        """
        self.model_factory = model_factory
        self.reward_fn = reward_fn
        if system_prompt is None and self.default_system_prompt_path is not None:
            system_prompt = Path(self.default_system_prompt_path).read_text(encoding="utf-8").strip()
        self.system_prompt = system_prompt
        self.verbose = verbose
        for name, seconds in (
            ("episode_timeout", episode_timeout),
            ("tool_timeout", tool_timeout),
            ("reward_timeout", reward_timeout),
            ("cleanup_timeout", cleanup_timeout),
        ):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name} must be above 0 seconds or None, not {seconds!r}")
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ValueError(f"retries must be a whole number of at least 0, not {retries!r}")
        self.budgets = Budgets(
            max_tool_iterations=max_tool_iterations,
            max_tool_calls=max_tool_calls,
            max_parallel_tool_calls=max_parallel_tool_calls,
            max_turns=max_turns,
            max_sampled_tokens=max_sampled_tokens,
            max_total_tokens=max_total_tokens,
            tool_timeout=tool_timeout,
        )
        self.episode_timeout = episode_timeout
        self.reward_timeout = reward_timeout
        self.cleanup_timeout = cleanup_timeout
        self.retries = retries
        self.retry_on = frozenset(retry_on) - {TerminationReason.CANCELLED}
        self.retry_delay = retry_delay
        self.last_result: StepResult | None = None

    @override
    def identity(self) -> dict[str, Any]:
        """What results depend on: class, arguments, reward and system prompt; an evaluation keeps it with each result.

        Override it to leave out arguments that make no difference, such as the path of a temporary folder.
        """
        told = super().identity()
        arguments = {name: value for name, value in told["arguments"].items() if name not in _MAKE_NO_DIFFERENCE}
        return {
            **told,
            "arguments": arguments,
            "reward_fn": describe(self.reward_fn),
            "system_prompt": self.system_prompt,
        }

    # --- what subclasses override ---

    def get_tools(self) -> Sequence[Any] | Awaitable[Sequence[Any]]:
        """The agent's tools; asked for after `reset`. Best made once: decorating one takes milliseconds.

        Functions that are no coroutines run in a thread of their own for each call.
        """
        return []

    def get_hooks(self) -> Sequence[HookProvider] | Awaitable[Sequence[HookProvider]]:
        """Further hooks of the agent. An agent that runs for more than 16 turns is invoked several times."""
        return []

    async def reset(self) -> None:
        """Prepare an episode. Runs at the begin of every step, and of every retry."""

    async def cleanup(self) -> None:
        """Give back what `reset` and the tools took. Runs at the end of every step, however it ends; may run twice."""

    def compute_metrics(self, observation: Observation) -> dict[str, Any] | Awaitable[dict[str, Any]]:
        """Metrics of one's own, put beside those of `observation.metrics`; asked for before the reward.

        Not of steps that the caller cancelled.

        Args:
            observation: What the episode left.
        """
        return {}

    # --- steps ---

    async def step(self, action: Action) -> StepResult:
        """Run one episode.

        Args:
            action: The task.

        Returns:
            How the episode ended; whatever it raised is the result's `termination_reason` and `error`.

        Raises:
            ValueError: The action has messages that no agent can be given.
            CancelledError: The caller was cancelled. The episode was ended and cleaned up; `last_result` has it.
        """
        conversation = read_conversation(action)
        supervisor = Supervisor()
        return await supervisor.run(self._step(action, conversation, supervisor))

    async def _step(self, action: Action, conversation: Conversation, supervisor: Supervisor) -> StepResult:
        attempts = 0
        while True:
            attempts += 1
            result = await self._attempt(action, conversation, supervisor, attempts)
            is_over = supervisor.is_cancelled or supervisor.is_abandoned
            if result.termination_reason not in self.retry_on or attempts > self.retries or is_over:
                return result
            delay = min(self.retry_delay * 2 ** (attempts - 1), LONGEST_RETRY_DELAY) * random.uniform(0.5, 1.0)
            logger.warning(
                "outcome=<%s>, attempt=<%d>, delay=<%.1f>, error=<%s> | an episode failed and is begun anew",
                result.termination_reason.value,
                attempts,
                delay,
                result.error,
            )
            try:
                await supervisor.within(None, asyncio.sleep(delay), what="a delay")
            except asyncio.CancelledError:
                result.termination_reason = TerminationReason.CANCELLED
                return result

    async def _attempt(
        self, action: Action, conversation: Conversation, supervisor: Supervisor, attempts: int
    ) -> StepResult:
        episode = _Episode(conversation, EpisodeHooks(self.budgets))
        result: StepResult | None = None
        try:
            try:
                end: Any = await supervisor.within(self.episode_timeout, self._play(episode), what="the episode")
            except BaseException as error:
                end = _caught(error, supervisor)
            result = await self._result(episode, end, supervisor)
            with _trajectory_of(episode.model):  # of a judge that asks the same model
                await self._add_reward(action, result, supervisor)
            result.observation.metrics["attempts"] = attempts
            self.last_result = result
            return result
        finally:
            try:
                await supervisor.within(
                    self.cleanup_timeout, self._clean_up(episode), what="cleanup", uninterrupted=True, outcome=result
                )
            except BaseException as error:
                _caught(error, supervisor)
                logger.warning("an environment could not be cleaned up", exc_info=True)

    async def _play(self, episode: _Episode) -> Any:
        await called(self.reset, grace=INSIST_AFTER)  # what it has begun is there for `cleanup`
        model: Any = await settled(self.model_factory())
        if model is None:
            raise TypeError("the model factory made no model; Strands would take one of its own")
        episode.model = model
        with _trajectory_of(model) as episode.trajectory:
            tools = list(await settled(self.get_tools()))
            hooks = [episode.hooks, *await settled(self.get_hooks())]
            if isinstance(model, SGLangModel):
                hooks.append(model.hooks)  # the record knows what becomes of each answer
            system = [text for text in (self.system_prompt, *episode.conversation.system) if text]
            episode.has_providers = any(isinstance(tool, ToolProvider) for tool in tools)

            def make_agent() -> Agent:
                return Agent(
                    model=model,
                    messages=list(episode.conversation.before),
                    tools=tools,
                    system_prompt="\n\n".join(system) or None,
                    hooks=hooks,
                    callback_handler=PrintingCallbackHandler() if self.verbose else None,
                    conversation_manager=NullConversationManager(),
                    retry_strategy=None,
                )

            # Tool providers connect while the agent is made, which takes as long as it takes.
            episode.agent = await in_thread(make_agent) if episode.has_providers else make_agent()
            return await self._drive(episode.agent, episode.conversation.asked)

    async def _drive(self, agent: Agent, asked: Message) -> AgentResult:
        """Run the agent until it ends or a budget is spent, some turns at a time.

        Nothing else in the package runs it.

        Returns:
            Its last result; `stop_reason` names the spent budget as Strands does.
        """
        state: dict[str, Any] = {}  # one for all invocations: tools keep things in it
        prompt: Any = [asked]
        left = self.budgets.left(agent)
        while True:
            limits: Any = {**left, "turns": min(left.get("turns", TURNS_AT_ONCE), TURNS_AT_ONCE)}
            result = await agent.invoke_async(prompt, invocation_state=state, limits=limits)
            if result.stop_reason != "limit_turns":
                return result
            left = self.budgets.left(agent)
            for name, value in left.items():
                if value < 1:
                    return replace(result, stop_reason=cast(Any, f"limit_{name}"))
            prompt = None

    async def _result(self, episode: _Episode, end: Any, supervisor: Supervisor) -> StepResult:
        """What the episode left."""
        reason = termination_reason(end, trajectory=episode.trajectory, limiter=episode.hooks.limiter)
        failure = episode.hooks.model_error
        if reason is TerminationReason.AGENT_ERROR and episode.trajectory is None and failure is not None:
            # Other providers raise errors of their own for what is their server's or their network's.
            if failure in (end, getattr(end, "original_exception", None)):
                reason = TerminationReason.INFRASTRUCTURE_ERROR
        messages = list(episode.agent.messages) if episode.agent is not None else []
        observation = Observation(messages=messages[episode.conversation.history_length :])
        result = StepResult(observation=observation, termination_reason=reason)
        if isinstance(end, BaseException) and OUTCOMES[reason].reward is not RewardRule.COMPUTED:
            result.error = _told(end)
            if reason is TerminationReason.AGENT_ERROR:
                logger.warning("an agent's own code failed", exc_info=end)
        elif reason is TerminationReason.AGENT_ERROR:
            result.error = f"the agent stopped for {end.stop_reason}, which no episode goes on from"
        if episode.trajectory is not None:
            episode.trajectory.settle(messages)
            observation.trajectory = episode.trajectory
            sequence = episode.trajectory.latest_main_sequence(warn=True)
            observation.tokens = TokenObservation.from_token_manager(sequence)
        own = messages[len(episode.conversation.before) + 1 :]
        observation.metrics = episode_metrics(episode.agent, own, episode.trajectory, time.monotonic() - episode.began)
        try:
            computing = called(self.compute_metrics, observation)
            observation.metrics.update(await supervisor.within(self.reward_timeout, computing, what="compute_metrics"))
        except BaseException as error:
            if isinstance(_caught(error, supervisor), asyncio.CancelledError):
                result.termination_reason = TerminationReason.CANCELLED
            else:
                logger.warning("the environment's metrics could not be computed", exc_info=True)
                result.error = result.error or f"compute_metrics: {_told(error)}"
        return result

    async def _add_reward(self, action: Action, result: StepResult, supervisor: Supervisor) -> None:
        """Ask for the reward, if the episode's end has one."""
        rule = OUTCOMES[result.termination_reason].reward
        if rule is RewardRule.COMPUTED_IF_ANSWERED and result.observation.final_response is not None:
            rule = RewardRule.COMPUTED
        if self.reward_fn is None or rule is not RewardRule.COMPUTED:
            return
        began = time.monotonic()
        try:
            computing = self._reward(self.reward_fn, action, result)
            result.reward = await supervisor.within(self.reward_timeout, computing, what="the reward function")
        except BaseException as error:
            if isinstance(_caught(error, supervisor), asyncio.CancelledError):
                result.termination_reason = TerminationReason.CANCELLED
            else:
                logger.warning("the reward function failed", exc_info=True)
                result.reward_error = _told(error)
                result.reward_error_is_infrastructure = isinstance(error, RewardError) and error.is_infrastructure
            result.error = f"reward function: {_told(error)}"
        result.observation.metrics["reward_seconds"] = time.monotonic() - began

    async def _reward(self, function: RewardFunction, action: Action, result: StepResult) -> RewardResult:
        reward: Any = await called(function.compute, action=action, step_result=result)
        if not isinstance(reward, RewardResult) and hasattr(reward, "__float__"):  # numpy's and torch's numbers, too
            reward = RewardResult(reward=float(reward))
        if not isinstance(reward, RewardResult) or not math.isfinite(reward.reward):
            raise ValueError(f"a reward is a RewardResult with a finite number, not {reward!r:.80}")
        return reward

    async def _clean_up(self, episode: _Episode) -> None:
        try:
            if episode.agent is not None and episode.has_providers:
                await in_thread(episode.agent.cleanup)  # it waits for threads
        finally:
            await called(self.cleanup)


@dataclass
class _Episode:
    """One episode while it runs."""

    conversation: Conversation
    hooks: EpisodeHooks
    began: float = field(default_factory=time.monotonic)
    agent: Agent | None = None
    trajectory: Trajectory | None = None
    has_providers: bool = False
    model: Any = None


def _trajectory_of(model: Any) -> AbstractContextManager[Trajectory | None]:
    """A trajectory of its own for what is asked of a model inside, if it is one that records."""
    return model.episode() if isinstance(model, SGLangModel) else nullcontext()


def _caught(error: BaseException, supervisor: Supervisor) -> BaseException:
    """What an episode's end is told by: an error of its code, or the caller's cancellation, which only the caller has.

    Raises:
        KeyboardInterrupt: Somebody wants the process to end.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, asyncio.CancelledError) and supervisor.is_cancelled:
        return error
    return as_failure(error)


def _told(error: BaseException) -> str:
    """An error in one line, without Strands' wrapper around it."""
    inner = getattr(error, "original_exception", None) or error
    try:
        return f"{type(inner).__name__}: {inner}" if str(inner) else type(inner).__name__
    except Exception:  # it cannot tell
        return type(inner).__name__


def episode_metrics(
    agent: Agent | None, messages: Sequence[Message], trajectory: Trajectory | None, seconds: float
) -> dict[str, Any]:
    """The numbers of an episode.

    Args:
        agent: The agent; None if it was never made.
        messages: The messages since it was asked.
        trajectory: Its recorded calls, if its model records them.
        seconds: How long it took.

    Returns:
        `model_calls`, `tool_iterations`, `tool_calls`, `tool_errors`, `tool_parse_errors`; `input_tokens` (of all
        prompts), `cached_tokens`, `sampled_tokens`, `total_tokens`; `sequences` (how many a trainer has to take; models
        that record tokens only); `seconds`, `model_seconds`; and `tools`: by name `calls`, `errors`, `parse_errors`
        and `seconds`.
    """
    tools: dict[str, dict[str, float]] = {}

    def of(name: str) -> dict[str, float]:
        return tools.setdefault(name, {"calls": 0, "errors": 0, "parse_errors": 0, "seconds": 0.0})

    names: dict[str, str] = {}
    iterations = 0
    for message in messages:
        uses = [block["toolUse"] for block in message["content"] if "toolUse" in block]
        iterations += bool(uses)
        for use in uses:
            names[use["toolUseId"]] = use["name"]
            of(use["name"])["calls"] += 1
        for block in message["content"]:
            result = block.get("toolResult")
            if result is not None and result.get("status") == "error" and result["toolUseId"] in names:
                of(names[result["toolUseId"]])["errors"] += 1
    parse_errors = trajectory.tool_parse_errors if trajectory is not None else {}
    for name, count in parse_errors.items():
        of(name)["parse_errors"] += count
    loop = agent.event_loop_metrics if agent is not None else EventLoopMetrics()
    for name, told in loop.tool_metrics.items():
        of(name)["seconds"] += told.total_time
    usage = loop.accumulated_usage
    metrics: dict[str, Any] = {
        "model_calls": loop.cycle_count,
        "tool_iterations": iterations,
        "tool_calls": sum(int(one["calls"]) for one in tools.values()),
        "tool_errors": sum(int(one["errors"]) for one in tools.values()),
        "tool_parse_errors": sum(parse_errors.values()),
        "input_tokens": usage["inputTokens"],
        "cached_tokens": usage.get("cacheReadInputTokens", 0),
        "sampled_tokens": usage["outputTokens"],
        "total_tokens": usage["totalTokens"],
        "seconds": seconds,
        "model_seconds": loop.accumulated_metrics["latencyMs"] / 1000,
        "tools": tools,
    }
    if trajectory is not None:
        # What a failed or cut call had sampled is in no usage.
        metrics["sampled_tokens"] = sum(len(turn.output_ids) for turn in trajectory.turns)
        metrics["sequences"] = sum(any(sequence.loss_mask) for sequence in trajectory.sequences())
    return metrics


# --- an action as messages ---


_DATA_URL = re.compile(r"data:image/(png|jpeg|jpg|gif|webp);base64,(.*)", re.DOTALL)


@dataclass(frozen=True)
class Conversation:
    """What an agent starts from.

    Attributes:
        system: The texts of the system messages.
        before: The messages before the one that is asked.
        history_length: How many of those are from `conversation_history`.
        asked: The last message, a user's.
    """

    system: list[str]
    before: list[Message]
    history_length: int
    asked: Message


def read_conversation(action: Action) -> Conversation:
    """The messages of an action.

    Raises:
        ValueError: They are none that an agent can be given; says which and why.
    """
    system, history = _read(action.task_context.conversation_history, "conversation_history")
    given = action.message
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"text": given}]}]
    more_system, messages = _read(given if isinstance(given, list) else [given], "message")
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("the last message of an action must be a user's")
    return Conversation([*system, *more_system], [*history, *messages[:-1]], len(history), messages[-1])


def _read(given: Sequence[Any], name: str) -> tuple[list[str], list[Message]]:
    system: list[str] = []
    messages: list[Message] = []
    for number, message in enumerate(given):
        where = f"{name}[{number}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where} is no message with a role: {message!r:.80}")
        role = message["role"]
        if role in ("system", "developer"):
            if messages:
                raise ValueError(f"{where}: a system message must stand before all others")
            system.append(_text(message.get("content"), where))
        elif role in ("user", "assistant"):
            content = message.get("content")
            calls = message.get("tool_calls") or []
            if calls and content in (None, ""):
                content = []  # an assistant that only calls tools
            if isinstance(content, str):
                blocks = [{"text": content}]
            elif isinstance(content, list):
                blocks = [_block(block, where) for block in content]
            else:
                raise ValueError(f"{where}: content is a text or a list of blocks, not {content!r:.80}")
            messages.append(cast(Message, {"role": role, "content": blocks + [_call(call, where) for call in calls]}))
        elif role == "tool":
            if not isinstance(message.get("tool_call_id"), str):
                raise ValueError(f"{where}: a tool's message needs its tool_call_id")
            text = _text(message.get("content"), where)
            result = {"toolUseId": message["tool_call_id"], "status": "success", "content": [{"text": text}]}
            block = cast(ContentBlock, {"toolResult": result})
            # Strands keeps the results of one turn in one message.
            if (
                messages
                and messages[-1]["role"] == "user"
                and all("toolResult" in one for one in messages[-1]["content"])
            ):
                messages[-1]["content"].append(block)
            else:
                messages.append({"role": "user", "content": [block]})
        else:
            raise ValueError(f"{where}: the roles are system, user, assistant and tool, not {role!r}")
    return system, messages


def _block(block: Any, where: str) -> dict[str, Any]:
    if isinstance(block, str):
        return {"text": block}
    if not isinstance(block, Mapping) or not block:
        raise ValueError(f"{where}: a content block is a dictionary, not {block!r:.80}")
    kind = block.get("type")
    if kind is None:
        return copy.deepcopy(dict(block))
    if kind in ("text", "input_text", "output_text") and isinstance(block.get("text"), str):
        return {"text": block["text"]}
    if kind == "image_url":
        address = block.get("image_url")
        address = address.get("url") if isinstance(address, Mapping) else address
        found = _DATA_URL.fullmatch(address) if isinstance(address, str) else None
        if found is None:
            raise ValueError(f"{where}: an image must be a data URL (png, jpeg, gif, webp), not {address!r:.80}")
        try:
            content = base64.b64decode(found[2], validate=True)
        except ValueError as error:
            raise ValueError(f"{where}: the image's data URL is not base64: {error}") from error
        return {"image": {"format": "jpeg" if found[1] == "jpg" else found[1], "source": {"bytes": content}}}
    raise ValueError(f"{where}: content of type {kind!r} is not understood; Strands' own blocks are, too")


def _call(call: Any, where: str) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, Mapping):
            raise TypeError("arguments are an object")
        return {"toolUse": {"toolUseId": str(call["id"]), "name": function["name"], "input": dict(arguments)}}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: not a tool call of a function with id and arguments: {call!r:.80}") from error


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    blocks = [_block(block, where) for block in content] if isinstance(content, list) else [{}]
    if not all(isinstance(block.get("text"), str) for block in blocks):
        raise ValueError(f"{where}: only texts can stand here, not {content!r:.80}")
    return "".join(block["text"] for block in blocks)
