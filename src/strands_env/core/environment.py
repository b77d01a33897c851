"""`Environment`: one step is one episode of a Strands agent, from `reset` to `cleanup`.

Guarantees:
- Every episode ends with one of the outcomes of `strands_sglang.outcomes`; causes are found inside Strands' wrappers.
  Ends that say nothing about the policy (infrastructure, aborts, cancellation, code that raised) have no reward.
- `cleanup` always runs, and the result always holds what was recorded until the episode ended.
- Each step has its own trajectory, even if all steps share one model.
- Nothing is added to the agent's messages, removed from them, or asked twice without the trainer's knowledge.
- Every budget ends the loop where the history is complete: after the results of a turn's tools.
- An action (text, one message or a chat, in Strands' form or OpenAI's) is never changed. Content that is not
  understood is an error; it is never dropped.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import functools
import json
import logging
import math
import random
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from strands import Agent
from strands.agent import AgentResult
from strands.agent.conversation_manager import NullConversationManager
from strands.handlers.callback_handler import PrintingCallbackHandler
from strands.hooks import HookOrder, HookProvider, HookRegistry
from strands.hooks.events import AfterModelCallEvent, AfterToolCallEvent, BeforeModelCallEvent, BeforeToolCallEvent
from strands.models.model import Model
from strands.sandbox import Sandbox
from strands.telemetry.metrics import EventLoopMetrics
from strands.tools import ToolProvider
from strands.types.content import ContentBlock, Message
from strands.types.session import encode_bytes_values
from strands.types.tools import AgentTool, ToolResult
from typing_extensions import override

from strands_sglang import (
    OUTCOMES,
    Journal,
    JournalError,
    Outage,
    RewardRule,
    SGLangConnectionError,
    SGLangModel,
    TerminationReason,
    ToolLimiter,
    Trajectory,
    TrajectoryFileError,
    outages,
    termination_reason,
)

from .durable import Checkpoint, Effect, ForkPoints, Recorder, checkpoint, effect_of, results_in, tool_uses
from .identity import Identified, describe
from .rerun import Rerun
from .supervision import (
    RECANCEL_AFTER,
    Supervisor,
    as_exception,
    expendable,
    invoke,
    maybe_await,
    run_in_thread,
    take_turn,
)
from .tools import ContainedTool
from .types import (
    UNWRITTEN,
    Action,
    Observation,
    RewardError,
    RewardFunction,
    RewardResult,
    StepResult,
    TokenObservation,
)

logger = logging.getLogger(__name__)

# --- what an episode may spend ---


@dataclass(frozen=True)
class Budgets:
    """Limits of one episode; None means no limit.

    Attributes:
        max_tool_iterations: Assistant messages with tool calls, each with its results.
        max_tool_calls: Single tool calls. Calls beyond the limit are not run, even within one message.
        max_parallel_tool_calls: Tool calls run per assistant message.
        max_turns: Model calls.
        max_sampled_tokens: Tokens sampled by the agent's model calls; checked between turns.
        max_total_tokens: Prompt and response tokens, summed over the agent's model calls; checked between turns.
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
        """Validate the limits."""
        for name, least in (
            ("max_tool_iterations", 0),
            ("max_tool_calls", 0),
            ("max_parallel_tool_calls", 0),
            ("max_turns", 1),
            ("max_sampled_tokens", 1),
            ("max_total_tokens", 1),
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be an integer of at least {least}, or None, not {value!r}")

    def remaining(self, agent: Agent) -> dict[str, int]:
        """Return what remains of each limit, in Strands' form; a limit below 1 is used up."""
        metrics = agent.event_loop_metrics
        used_of = {
            "turns": (self.max_turns, metrics.cycle_count),
            "total_tokens": (self.max_total_tokens, metrics.accumulated_usage["totalTokens"]),
            "output_tokens": (self.max_sampled_tokens, metrics.accumulated_usage["outputTokens"]),
        }
        return {name: limit - used for name, (limit, used) in used_of.items() if limit is not None}


class EpisodeHooks(HookProvider):
    """Hooks that enforce one episode's budgets: excess tool calls do not run, and the others are contained.

    Model calls of all episodes take turns on the event loop, so that none waits long for others to compute.

    Attributes:
        limiter: Counts tool iterations and calls, and ends the loop at their limits.
        model_error: What the latest model call raised, or None if it returned. It tells a provider's errors from errors
            of the agent's own code.
        returned: What tool calls returned, before other hooks have changed it; None for those that did not run.
    """

    def __init__(self, budgets: Budgets, recorded: Mapping[str, ToolResult] | None = None) -> None:
        """Start counting for one episode.

        Args:
            budgets: Its limits.
            recorded: Results of calls that have ended before, by toolUseId; they do not run again.
        """
        self._budgets = budgets
        self._recorded = dict(recorded or {})
        self.limiter = ToolLimiter(
            max_tool_iters=budgets.max_tool_iterations,
            max_tool_calls=budgets.max_tool_calls,
            max_parallel_tool_calls=budgets.max_parallel_tool_calls,
            on_limit="stop",
        )
        self.model_error: BaseException | None = None
        self.returned: dict[str, ToolResult | None] = {}
        self._has_asked = False

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register with the episode's agent, the limiter first."""
        self.limiter.register_hooks(registry)
        registry.add_callback(BeforeModelCallEvent, self._take_turn, order=HookOrder.SDK_FIRST)
        registry.add_callback(AfterModelCallEvent, self._record_error)
        registry.add_callback(AfterModelCallEvent, self._mark_cut_calls, order=HookOrder.SDK_LAST)
        registry.add_callback(BeforeToolCallEvent, self._check_call, order=HookOrder.SDK_LAST)
        registry.add_callback(AfterToolCallEvent, self._keep_result, order=HookOrder.SDK_FIRST)

    async def _take_turn(self, event: BeforeModelCallEvent) -> None:
        if self._has_asked:  # the first call is made in the turn in which the agent is created
            await take_turn()
        self._has_asked = True

    def _record_error(self, event: AfterModelCallEvent) -> None:
        self.model_error = event.exception

    def _mark_cut_calls(self, event: AfterModelCallEvent) -> None:
        """Note the tool calls of a cut answer: Strands replaces each with its own text."""
        answer = event.stop_response
        if answer is None or answer.stop_reason != "max_tokens":
            return
        cut = [number for number, block in enumerate(answer.message["content"]) if "toolUse" in block]
        if cut:
            answer.message.setdefault("metadata", {}).setdefault("custom", {})[UNWRITTEN] = cut

    def _check_call(self, event: BeforeToolCallEvent) -> None:
        limit = self._exceeded_limit(event)
        recorded = None if limit is not None else self._recorded.pop(event.tool_use["toolUseId"], None)
        if limit is not None:
            event.cancel_tool = f"This tool call was not run: at most {limit} may be made."
        elif event.selected_tool is not None and recorded is not None:
            event.selected_tool = ContainedTool(event.selected_tool, recorded=recorded)
        elif event.selected_tool is not None:
            is_named = event.selected_tool.tool_name == event.tool_use["name"]  # a renamed call must still find it
            if is_named or self._budgets.tool_timeout is not None:
                event.selected_tool = ContainedTool(event.selected_tool, self._budgets.tool_timeout)

    def _keep_result(self, event: AfterToolCallEvent) -> None:
        returned = None if event.cancel_message else event.result
        with suppress(Exception):  # what cannot be copied is not kept
            self.returned[event.tool_use["toolUseId"]] = _deepcopy(returned, {})

    def changed_results(self, messages: Sequence[Message], *, are_all: bool = False) -> dict[str, Any]:
        """Return what calls returned if messages hold something else; None for calls that did not run.

        Bytes are in Strands' form for JSON. What JSON cannot hold is left out.

        Args:
            messages: Messages with results.
            are_all: Whether they are all messages, so that a hook has removed the results that they lack.
        """
        changed = {}
        shown = results_in(messages)
        for use_id in self.returned if are_all else [use_id for use_id in shown if use_id in self.returned]:
            returned = self.returned[use_id]
            with suppress(TypeError, ValueError, RecursionError):
                if returned != shown.get(use_id, {}) or _has_nan(returned):
                    changed[use_id] = json.loads(json.dumps(encode_bytes_values(returned)))
        return changed

    def _exceeded_limit(self, event: BeforeToolCallEvent) -> str | None:
        """Return the limit that a call exceeds, if any."""
        max_iterations, max_calls = self._budgets.max_tool_iterations, self._budgets.max_tool_calls
        if max_iterations is not None and self.limiter.tool_iter_count > max_iterations:
            return f"{max_iterations} rounds of tool calls"
        if max_calls is None or self.limiter.tool_call_count <= max_calls:
            return None
        # The limiter has counted all calls of the message; the last ones are too many.
        uses = [block["toolUse"]["toolUseId"] for block in event.agent.messages[-1]["content"] if "toolUse" in block]
        excess = uses[max_calls - self.limiter.tool_call_count :]
        return f"{max_calls} tool calls" if event.tool_use["toolUseId"] in excess else None


# --- episodes ---


ModelFactory = Callable[[], "Model | Awaitable[Model]"]
"""A function, sync or async, that returns the model of a step. It may return the same model every time."""

MAX_RETRY_DELAY = 60.0

TURNS_PER_INVOCATION = 16
"""Turns per invocation of an agent. Strands' loop recurses once per turn; this is far below Python's recursion limit.

Most episodes are one invocation. Across several invocations the counts continue, and no message is added in between.
"""

SILENT_S = 5.0
"""Seconds without an answer after which a server is named, and is why an episode has run out of time."""

_NOT_IN_IDENTITY = frozenset(
    {
        *("reward_fn", "system_prompt", "verbose", "cleanup_timeout", "retries", "retry_on", "retry_delay"),
        *("journal", "fork_points", "journal_required"),
    }
)
"""Arguments that results do not depend on, or that the identity describes separately."""


def _has_nan(result: Any) -> bool:
    """Whether the result of a tool holds NaN or an infinity, which a results file cannot."""
    try:
        json.dumps(encode_bytes_values(result), allow_nan=False)
    except ValueError:
        return True
    return False


class Environment(Identified):
    r"""An agent with tools, and a reward for its episodes.

    One call of [`step`][strands_env.core.Environment.step] runs one episode. It calls `reset` first and `cleanup` last,
    however the episode ends. Each step records its own trajectory, even if all steps share one model.

    Subclasses override `get_tools`, `get_hooks`, `next_user_message`, `reset`, `cleanup` and `compute_metrics`. Each
    may be async. Sync versions of the last four run in their own thread and may block, as may a sync reward function.

    One environment can run several steps at once if the state that a subclass keeps on `self` allows it. Otherwise
    create one environment per step. Long episodes run several turns at a time, because Strands' loop recurses; they are
    still one episode and one token sequence.

    Attributes:
        default_system_prompt_path: File with the system prompt used when `system_prompt` is None.
        last_result: The result of the step that ended last. It is set even if that step was cancelled.
        rerun: The recorded episode that its steps run again; None, the default, for new episodes.

    Examples:
        ```python
        class MathEnvironment(Environment):
            def get_tools(self):
                return [multiply]


        env = MathEnvironment(model_factory, MathReward(), episode_timeout=600)
        result = await env.step(Action(message="What is 25 * 17?", task_context=TaskContext(ground_truth="425")))
        ```
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
        journal: str | Path | None = None,
        journal_required: bool = False,
        fork_points: ForkPoints = "all",
    ) -> None:
        """Create the environment. No model, agent or tool is created before the first step.

        All limits apply to one episode; None means no limit. An episode that reaches a limit ends with the outcome for
        it, see [`TerminationReason`][strands_sglang.TerminationReason].

        Args:
            model_factory: Function that returns the model of a step.
            reward_fn: Reward function for episodes; None for no rewards.
            system_prompt: System prompt of the agent; None for the content of `default_system_prompt_path`. System
                messages of an action are appended to it.
            max_tool_iterations: Maximum number of assistant messages with tool calls, each with its results.
            max_tool_calls: Maximum number of single tool calls. Calls beyond the limit are not run, even within one
                message; the model sees an error instead of their results.
            verbose: Whether to print the agent's messages and tool calls.
            max_parallel_tool_calls: Maximum number of tool calls that run per assistant message.
            max_turns: Maximum number of model calls.
            max_sampled_tokens: Maximum number of tokens that the agent's model calls sample. Checked between turns, so
                the last turn may exceed it by at most the model's `max_new_tokens`.
            max_total_tokens: Maximum number of prompt and response tokens, summed over the agent's model calls. Checked
                between turns.
            episode_timeout: Seconds from the start of `reset` until the agent ends.
            tool_timeout: Seconds for one tool call. A call that times out ends with an error that the model sees, and
                the episode continues.
            reward_timeout: Seconds for the reward function, and also for `compute_metrics`. If one times out, its value
                is missing and the result's `error` gives the reason.
            cleanup_timeout: Seconds for `cleanup`.
            retries: How often a failed episode is repeated, with `cleanup` and `reset` in between.
            retry_on: Outcomes that count as failed. A cancelled episode is never repeated.
            retry_delay: Seconds before the first retry. The delay doubles for each further retry, up to 60 seconds, and
                is shortened at random by up to half.
            journal: Folder for the journals of episodes, or the file of the next one (`*.journal`). Each episode is
                written to a file as it happens, so that [`resume`][strands_env.core.Environment.resume] can continue
                it if its process dies. None for no files.
            journal_required: Whether an episode ends with the outcome `infrastructure_error` if its journal cannot be
                written, because a disk is full for example. By default it continues, with a warning.
            fork_points: When the environment's own state is kept in the journal, for
                [`fork`][strands_env.core.Environment.fork] and `resume`: `"all"` after every iteration of tools that
                may have changed it, an integer n after every n-th, `"none"` never after the start. Except with
                `"none"`, also with each message of `next_user_message`.

        Raises:
            ValueError: A limit, a timeout or `retries` is invalid.
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
                raise ValueError(f"{name} must be more than 0 seconds, or None, not {seconds!r}")
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ValueError(f"retries must be an integer of at least 0, not {retries!r}")
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
        if fork_points not in ("all", "none") and (isinstance(fork_points, bool) or int(fork_points) < 1):
            raise ValueError(f"fork_points must be 'all', 'none' or an integer of at least 1, not {fork_points!r}")
        self.journal = None if journal is None else Path(journal)
        self.journal_required = journal_required
        self.fork_points: ForkPoints = fork_points
        self.last_result: StepResult | None = None
        self.rerun: Rerun | None = None

    @override
    def identity(self) -> dict[str, Any]:
        """Describe what results depend on: class, arguments, reward function and system prompt.

        An evaluation stores the description with each result and never resumes results of another environment. Override
        this method to leave out arguments that make no difference, such as the path of a temporary folder.

        Returns:
            JSON-like data that is equal for equal environments, in other processes too.
        """
        identity = super().identity()
        arguments = {name: value for name, value in identity["arguments"].items() if name not in _NOT_IN_IDENTITY}
        return {
            **identity,
            "arguments": arguments,
            "reward_fn": describe(self.reward_fn),
            "system_prompt": self.system_prompt,
        }

    # --- what subclasses override ---

    def get_tools(self) -> Sequence[Any] | Awaitable[Sequence[Any]]:
        """Return the agent's tools. Called after `reset`.

        Create tools once and return them again: decorating a function takes milliseconds. Each call of a sync tool runs
        in its own thread.
        """
        return []

    def get_hooks(self) -> Sequence[HookProvider] | Awaitable[Sequence[HookProvider]]:
        """Return additional hooks for the agent. Called after `reset`.

        An agent that takes more than 16 turns is invoked several times per episode.
        """
        return []

    def get_sandbox(self) -> Sandbox | None | Awaitable[Sandbox | None]:
        """Return where tools run commands and keep files; None for this machine. Called after `reset`.

        Strands' own tools (`shell`, `file_editor`, `python_repl`) run there, and it may add tools of its own.
        """
        return None

    async def next_user_message(self, action: Action, messages: Sequence[Message]) -> str | None:
        """Return what the user says after the agent has ended its turn; None, the default, ends the episode.

        The text becomes part of the agent's prompt, which is not trained. Calls of a model in here are not recorded in
        the episode's trajectory.

        Args:
            action: The task.
            messages: The agent's messages, with `conversation_history`; the last one is its answer. Do not change them.
        """
        return None

    async def reset(self) -> None:
        """Prepare an episode. Called at the start of every step and of every retry."""

    async def cleanup(self) -> None:
        """Release what `reset` and the tools acquired.

        Called at the end of every step and before every retry, however the episode ended. It may be called twice.
        """

    async def save_state(self) -> Any:
        """Return what `reset` and the tools have made of the environment, for `load_state`: bytes or JSON-like data.

        An environment that overrides `reset` overrides both, or its episodes can only start again. Called while no tool
        runs. The default environment has no state and returns None.
        """
        return None

    async def load_state(self, state: Any) -> None:
        """Restore what `save_state` returned. Called after `reset`, perhaps in another process.

        Args:
            state: Its return value.
        """

    @property
    def restart_only(self) -> str | None:
        """Why an episode cannot continue elsewhere, so that it can only start again; None if it can."""
        depths = {
            name: next(depth for depth, cls in enumerate(type(self).__mro__) if name in vars(cls))
            for name in ("reset", "save_state", "load_state")
        }
        if max(depths["save_state"], depths["load_state"]) <= depths["reset"]:
            return None
        return f"{type(self).__name__} has a reset, but no save_state and load_state of its own"

    def tool_effect(self, tool: AgentTool) -> Effect:
        """Return what calls of a tool change, which decides whether one that was interrupted may run again.

        The default is what `has_effect` said of the tool, or the hints of its MCP server; `"once"` without them.

        Args:
            tool: One of the agent's tools.
        """
        return effect_of(tool)

    def compute_metrics(self, observation: Observation) -> dict[str, Any] | Awaitable[dict[str, Any]]:
        """Return additional metrics, which are added to `observation.metrics`.

        Called before the reward function, and not for steps that the caller cancelled.

        Args:
            observation: Messages, tokens and metrics of the episode.
        """
        return {}

    # --- steps ---

    async def step(self, action: Action) -> StepResult:
        """Run one episode.

        Errors of the model, the tools and the environment's own code do not raise. They end the episode and are
        reported by the result's `termination_reason` and `error`.

        Args:
            action: The task.

        Returns:
            The episode with its outcome and its reward.

        Raises:
            ValueError: The action's messages are invalid; names the message and the reason.
            JournalError: `journal` is a file that holds an episode.
            CancelledError: The caller was cancelled. The episode has ended and is cleaned up; `last_result` holds what
                was recorded.
        """
        return await self._run(action, self._new_journal(), None)

    async def resume(self, journal: str | Path) -> list[StepResult]:
        """Continue the episodes of journals whose processes died, were cancelled or lost their server.

        Each continues with its recorded tokens, still as one sequence. A tool call that had ended does not run again.
        An episode ends with the outcome `interrupted` if a call without a recorded end may have had an effect that must
        not happen twice. Of an episode that has ended, the recorded result is returned.

        Args:
            journal: A journal, or a folder of them, which are resumed one after the other. Those that cannot be
                resumed are left out, with a warning.

        Returns:
            The episodes, in the order of the files' names.

        Raises:
            OSError: There is no such file, or it cannot be read.
            JournalInUseError: Another process runs the episode.
            JournalError: The journal is of another environment, or this one can only start episodes again.
            TrajectoryFileError: The journal is damaged, or has an unknown version.
        """
        path = Path(journal)
        if not path.is_dir():
            return [await self._resume(Journal(path))]
        results = []
        for file in sorted(path.glob("*.journal")):
            try:
                if not file.stat().st_size:  # its process died before an episode began
                    continue
            except FileNotFoundError:  # another process has acknowledged it
                continue
            try:
                results.append(await self._resume(Journal(file)))
            except (JournalError, TrajectoryFileError) as error:
                logger.warning("error=<%s> | a journal is left as it is", error)
        return results

    async def fork(self, source: StepResult | str | Path, turn: int, k: int = 1) -> list[StepResult]:
        """Continue an episode k times from before one of its model calls, which each continuation makes again.

        What precedes the call is the episode's own: token ids, messages, budgets, counts, and the environment's state.
        Processes are not copied. Siblings run at the same time if the environment has no state, else one after the
        other. The episode itself is not changed, and the environment must not be running one.

        Args:
            source: The result of a step with a journal, or the path of a journal.
            turn: `Turn.index` of the model call, in the main agent's conversation.
            k: Number of continuations.

        Returns:
            The continuations; each is a complete episode.

        Raises:
            JournalError: The episode cannot be continued from there; says why. Or its journal cannot be written, and
                must be.
            TrajectoryFileError: The journal is damaged, or has an unknown version.
            OSError: It cannot be read.
            ValueError: `k` is less than 1.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k!r}")
        kept = source.journal if isinstance(source, StepResult) else Journal(source)
        if kept is None:
            raise JournalError("the episode has no journal to fork: give its environment a journal")
        points = [self._checkpoint(kept, turn) for _ in range(k)]
        for point in points:
            if point.interrupted is not None:
                raise JournalError(point.interrupted)
        runs = [
            functools.partial(self._run, Action(**point.action), self._new_journal(point.content), point)
            for point in points
        ]
        if points and points[0].state is not None:
            return [await run() for run in runs]
        return list(await asyncio.gather(*(run() for run in runs)))

    async def _resume(self, journal: Journal) -> StepResult:
        journal.path.stat()  # opening it would create it
        journal.open()
        try:
            point = self._checkpoint(journal)
        except BaseException:
            journal.close()
            raise
        if point.result is not None:
            journal.close()
            result = point.step_result(read_conversation(Action(**point.action)).history_length)
            result.journal = journal
            return result
        return await self._run(Action(**point.action), journal, point)

    def _checkpoint(self, journal: Journal, turn: int | None = None) -> Checkpoint:
        """Read where an episode of this environment continues; see `checkpoint`."""
        try:
            point = checkpoint(journal, turn)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, TrajectoryFileError):
                raise
            raise JournalError(f"{journal}: the journal holds no episode of an environment: {error!r:.200}") from error
        here = json.loads(json.dumps(self.identity(), default=str))
        for name in {**here, **point.environment}:
            recorded, current = point.environment.get(name), here.get(name)
            if recorded != current:
                raise JournalError(
                    f"{journal}: the episode is of another environment: its {name} is {recorded!r:.200}, and here "
                    f"{current!r:.200}"
                )
        why_not = point.restart_only or self.restart_only
        if why_not is not None and point.result is None:
            raise JournalError(f"{journal}: the episode can only start again: {why_not}")
        return point

    def _new_journal(self, content: bytes = b"") -> Journal | None:
        """Return the journal of the next episode; None if it has none.

        Args:
            content: Content to begin with, of the episode that it continues.

        Raises:
            JournalError: It cannot be written, and must be; or its file holds an episode.
        """
        if self.journal is None:
            return None
        is_file = self.journal.suffix == ".journal"
        if is_file and not content:
            if self.journal.exists() and self.journal.stat().st_size:
                raise JournalError(f"{self.journal}: the journal holds an episode: resume it, or delete the file")
            return Journal(self.journal)
        journal = Journal((self.journal.parent if is_file else self.journal) / f"{uuid.uuid4().hex}.journal")
        if content:
            try:
                journal.begin_with(content)
            except JournalError as error:
                if self.journal_required:
                    raise
                logger.warning("error=<%s> | this episode is not protected by a journal", error)
                return None
        return journal

    async def _run(self, action: Action, journal: Journal | None, point: Checkpoint | None) -> StepResult:
        conversation = read_conversation(action)
        supervisor = Supervisor()
        if journal is None:
            return await supervisor.run(self._step(action, conversation, supervisor, None, point))
        try:
            return await supervisor.run(self._step(action, conversation, supervisor, Recorder(journal, self), point))
        finally:
            journal.close()

    async def _step(
        self,
        action: Action,
        conversation: Opening,
        supervisor: Supervisor,
        recorder: Recorder | None,
        point: Checkpoint | None,
    ) -> StepResult:
        attempts = 0 if point is None else point.attempt - 1
        while True:
            attempts += 1
            result = await self._attempt(action, conversation, supervisor, attempts, recorder, point)
            point = None
            is_over = supervisor.is_cancelled or supervisor.is_abandoned
            if result.termination_reason not in self.retry_on or attempts > self.retries or is_over:
                return result
            delay = min(self.retry_delay * 2 ** (attempts - 1), MAX_RETRY_DELAY) * random.uniform(0.5, 1.0)
            logger.warning(
                "outcome=<%s>, attempt=<%d>, delay=<%.1f>, error=<%s> | an episode failed and is retried",
                result.termination_reason.value,
                attempts,
                delay,
                result.error,
            )
            try:
                await supervisor.within(None, asyncio.sleep(delay), what="the retry delay")
            except asyncio.CancelledError:
                result.termination_reason = TerminationReason.CANCELLED
                return result

    async def _attempt(
        self,
        action: Action,
        conversation: Opening,
        supervisor: Supervisor,
        attempts: int,
        recorder: Recorder | None,
        point: Checkpoint | None,
    ) -> StepResult:
        recorded = None if point is None else point.results
        episode = _Running(action, conversation, EpisodeHooks(self.budgets, recorded), recorder, point)
        seconds = self.episode_timeout
        if point is not None:
            episode.hooks.returned.update(point.returned)
            episode.began -= point.seconds
            seconds = None if seconds is None else max(seconds - point.seconds, 1e-3)
        result: StepResult | None = None
        try:
            try:
                if recorder is not None:
                    recorder.begin(attempts, action, point, episode.hooks)
                end: Any = await supervisor.within(seconds, self._run_agent(episode), what="the episode")
            except BaseException as error:
                end = _end_of(error, supervisor)
            if recorder is not None and recorder.lost is not None and self.journal_required:
                end = recorder.lost
            result = await self._result(episode, end, supervisor)
            with new_trajectory(episode.model):  # for a judge that calls the same model
                await _add_reward(self.reward_fn, action, result, supervisor, self.reward_timeout)
            result.observation.metrics["attempts"] = attempts
            if episode.trajectory is not None:
                episode.trajectory.note_end(
                    outcome=result.termination_reason,
                    reward=None if result.reward is None else result.reward.reward,
                    error=result.error,
                    reward_error=result.reward_error,
                )
            if recorder is not None:
                recorder.end(result)
                result.journal = recorder.journal if recorder.is_resumable else None
            self.last_result = result
            return result
        finally:
            try:
                await supervisor.within(
                    self.cleanup_timeout, self._clean_up(episode), what="cleanup", uninterrupted=True, outcome=result
                )
            except BaseException as error:
                _end_of(error, supervisor)
                logger.warning("cleanup of an environment failed", exc_info=True)

    async def _run_agent(self, episode: _Running) -> Any:
        await invoke(self.reset, grace=RECANCEL_AFTER)  # `cleanup` releases what it has acquired
        recorder, point = episode.recorder, episode.point
        if point is not None and point.state is not None:
            try:
                await invoke(self.load_state, point.state)
            except Exception as error:
                raise JournalError(f"the environment's state cannot be restored: {format_error(error)}") from error
        elif recorder is not None:  # the process may have died before it was kept
            await recorder.keep_state()
        await take_turn()
        model: Any = await maybe_await(self.model_factory())
        if model is None:
            raise TypeError("the model factory returned None; Strands would use its default model")
        if self.rerun is not None and not isinstance(model, SGLangModel):
            raise TypeError(f"only an SGLangModel can be replayed, not a {type(model).__name__}")
        episode.model = model
        given = None if point is None else point.trajectory
        if self.rerun is not None:
            given = self.rerun.recording.trajectory
        with new_trajectory(model, given) as episode.trajectory:
            tools = list(await maybe_await(self.get_tools()))
            hooks = [episode.hooks, *await maybe_await(self.get_hooks())]
            if recorder is not None:
                hooks.append(recorder)
                recorder.record(episode.trajectory)
            if self.rerun is not None:
                hooks.append(self.rerun)
            sandbox = await maybe_await(self.get_sandbox())
            if isinstance(model, SGLangModel):
                hooks.append(model.hooks)  # records what the agent keeps of each response
            system = [text for text in (self.system_prompt, *episode.conversation.system) if text]
            episode.has_providers = any(isinstance(tool, ToolProvider) for tool in tools)

            def make_agent() -> Agent:
                return Agent(
                    model=model,
                    messages=_Messages(episode.conversation.history),
                    tools=tools,
                    system_prompt="\n\n".join(system) or None,
                    hooks=hooks,
                    callback_handler=PrintingCallbackHandler() if self.verbose else None,
                    conversation_manager=NullConversationManager(),
                    retry_strategy=None,
                    sandbox=sandbox,
                )

            # Tool providers connect while the agent is created, which may block.
            episode.agent = await run_in_thread(make_agent) if episode.has_providers else make_agent()
            if point is not None:
                point.restore(episode.agent, episode.hooks.limiter)
                with new_trajectory(model):  # the turns of sub-agents are recorded
                    await point.repeat_calls(episode.agent, self.budgets.tool_timeout)
            return await self._invoke(episode)

    async def _invoke(self, episode: _Running) -> AgentResult:
        """Invoke the agent, several turns at a time, until it and the user end, or a budget is used up.

        Nothing else in the package invokes it.

        Returns:
            Its last result; `stop_reason` names the exhausted budget in Strands' words.
        """
        agent = episode.agent
        assert agent is not None
        state: dict[str, Any] = {}  # shared by all invocations: tools store data in it
        messages: Any = [episode.conversation.prompt]
        result: AgentResult | None = None
        tools_first = False
        if episode.point is not None and episode.point.messages:
            messages = None
            tools_first = bool(tool_uses(agent.messages))
            if episode.point.has_stopped:
                state["request_state"] = {"stop_event_loop": True}
            if not tools_first:  # as if an invocation had ended here
                last = agent.messages[-1]
                stop_reason: Any = "limit_turns" if last["role"] == "user" else "end_turn"
                result = AgentResult(stop_reason, last, agent.event_loop_metrics, {})
        while True:
            if result is not None:
                if result.stop_reason in ("end_turn", "stop_sequence"):
                    messages = await self._next_user_message(episode, agent)
                if messages is None and result.stop_reason != "limit_turns":
                    return result
            remaining = self.budgets.remaining(agent)
            for name, value in remaining.items():
                if value < 1 and result is not None:
                    return replace(result, stop_reason=cast(Any, f"limit_{name}"))
            limits: Any = {
                **remaining,
                "turns": min(remaining.get("turns", TURNS_PER_INVOCATION), TURNS_PER_INVOCATION),
            }
            if tools_first:  # budgets are checked between turns
                limits, tools_first = {"turns": 1}, False
            result = await agent.invoke_async(messages, invocation_state=state, limits=limits)
            messages = None

    async def _next_user_message(self, episode: _Running, agent: Agent) -> str | None:
        if self.rerun is not None and type(self).next_user_message is not Environment.next_user_message:
            return self.rerun.next_user_message(agent.messages, episode.conversation.history_length)
        if episode.recorder is not None:
            episode.recorder.user_has_spoken = True
        with new_trajectory(agent.model):  # for a user that is the same model
            return cast("str | None", await invoke(self.next_user_message, episode.action, agent.messages))

    async def _result(self, episode: _Running, end: Any, supervisor: Supervisor) -> StepResult:
        """Build the result of an episode, without its reward."""
        reason = termination_reason(end, trajectory=episode.trajectory, limiter=episode.hooks.limiter)
        failure = episode.hooks.model_error
        if reason is TerminationReason.AGENT_ERROR and episode.trajectory is None and failure is not None:
            # Other providers raise their own exceptions for failures of the server or the network.
            if failure in (end, getattr(end, "original_exception", None)):
                reason = TerminationReason.INFRASTRUCTURE_ERROR
        if reason is TerminationReason.TIMEOUT and (silent := _silent_server(episode)):
            reason = TerminationReason.INFRASTRUCTURE_ERROR
            end = SGLangConnectionError(f"{end}, and {silent.base_url} had not answered for {silent.seconds:.0f} s")
        messages = list(episode.agent.messages) if episode.agent is not None else []
        observation = Observation(messages=messages[episode.conversation.history_length :])
        result = StepResult(observation=observation, termination_reason=reason)
        if isinstance(end, BaseException) and OUTCOMES[reason].reward is not RewardRule.COMPUTED:
            result.error = format_error(end)
            if reason is TerminationReason.AGENT_ERROR and self.rerun is None:
                logger.warning("the agent's own code failed", exc_info=end)
        elif reason is TerminationReason.AGENT_ERROR:
            result.error = f"the agent stopped with {end.stop_reason}, from which an episode cannot continue"
        if episode.trajectory is not None:
            episode.trajectory.settle(messages)
            episode.trajectory.tool_results.update(episode.hooks.changed_results(messages, are_all=True))
            observation.trajectory = episode.trajectory
            sequence = episode.trajectory.latest_main_sequence(warn=True)
            observation.tokens = TokenObservation.from_token_manager(sequence)
        new = messages[len(episode.conversation.history) + 1 :]
        observation.metrics = episode_metrics(episode.agent, new, episode.trajectory, time.monotonic() - episode.began)
        try:
            is_default = getattr(self.compute_metrics, "__func__", None) is Environment.compute_metrics
            # The default needs no thread.
            computing = asyncio.sleep(0, {}) if is_default else expendable(invoke, self.compute_metrics, observation)
            more = await supervisor.within(self.reward_timeout, computing, what="compute_metrics")
            observation.metrics.update(more)  # which the environment may have replaced meanwhile
        except BaseException as error:
            if isinstance(_end_of(error, supervisor), asyncio.CancelledError):
                result.termination_reason = TerminationReason.CANCELLED
            else:
                logger.warning("compute_metrics failed", exc_info=True)
                result.error = result.error or f"compute_metrics: {format_error(error)}"
        return result

    async def _clean_up(self, episode: _Running) -> None:
        try:
            if episode.agent is not None and episode.has_providers:
                await run_in_thread(episode.agent.cleanup)  # it waits for threads
        finally:
            await invoke(self.cleanup)


@dataclass
class _Running:
    """State of a running episode."""

    action: Action
    conversation: Opening
    hooks: EpisodeHooks
    recorder: Recorder | None = None
    point: Checkpoint | None = None
    began: float = field(default_factory=time.monotonic)
    agent: Agent | None = None
    trajectory: Trajectory | None = None
    has_providers: bool = False
    model: Any = None


class _Messages(list[Message]):
    """An agent's messages, of which `copy.deepcopy` takes a quarter of the time.

    Strands copies all messages twice per model call, so that middleware and models cannot change the history. To hooks
    and tools this is a list of plain messages.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _Messages:
        return _Messages(_deepcopy(list(self), memo))


_IMMUTABLE = frozenset({str, int, float, bool, bytes, type(None)})


def _deepcopy(value: Any, memo: dict[int, Any]) -> Any:
    """Copy plain data. Unlike `copy.deepcopy`, it does not look for objects that occur twice."""
    if type(value) is dict:
        copied = value.copy()
        for key, item in copied.items():
            if type(item) not in _IMMUTABLE:
                copied[key] = _deepcopy(item, memo)
        return copied
    if type(value) is list:
        return [item if type(item) in _IMMUTABLE else _deepcopy(item, memo) for item in value]
    return copy.deepcopy(value, memo)


def new_trajectory(model: Any, trajectory: Trajectory | None = None) -> AbstractContextManager[Trajectory | None]:
    """Record the model's calls inside the context in a trajectory, a new one by default, if the model records."""
    return model.episode(trajectory) if isinstance(model, SGLangModel) else nullcontext()


async def compute_reward(
    reward_fn: RewardFunction, action: Action, result: StepResult, *, timeout: float | None = 600.0
) -> StepResult:
    """Compute the reward of an episode that has ended, as its environment would with another reward function.

    Args:
        reward_fn: The reward function.
        action: The task.
        result: The episode. It is not modified, and its own reward is ignored.
        timeout: Seconds for the reward function; None for no limit.

    Returns:
        The episode with its new reward, or with why it has none.

    Raises:
        CancelledError: The caller was cancelled.
    """
    metrics = {name: value for name, value in result.observation.metrics.items() if name != "reward_seconds"}
    new = result.model_copy(
        update={
            "observation": result.observation.model_copy(update={"metrics": metrics}),
            "reward": None,
            "reward_error": None,
            "reward_error_is_infrastructure": False,
            "error": None if result.reward_error is not None else result.error,
        }
    )
    supervisor = Supervisor()
    await supervisor.run(_add_reward(reward_fn, action, new, supervisor, timeout))
    return new


async def _add_reward(
    reward_fn: RewardFunction | None, action: Action, result: StepResult, supervisor: Supervisor, timeout: float | None
) -> None:
    """Compute the reward, if the episode's outcome has one."""
    rule = OUTCOMES[result.termination_reason].reward
    if rule is RewardRule.COMPUTED_IF_ANSWERED and result.observation.final_response is not None:
        rule = RewardRule.COMPUTED
    if reward_fn is None or rule is not RewardRule.COMPUTED:
        return
    began = time.monotonic()
    try:
        result.reward = await supervisor.within(
            timeout, expendable(call_reward, reward_fn, action, result), what="the reward function"
        )
    except BaseException as error:
        if isinstance(_end_of(error, supervisor), asyncio.CancelledError):
            result.termination_reason = TerminationReason.CANCELLED
        else:
            logger.warning("the reward function failed", exc_info=True)
            result.reward_error = format_error(error)
            result.reward_error_is_infrastructure = isinstance(error, RewardError) and error.is_infrastructure
        result.error = f"reward function: {format_error(error)}"
    result.observation.metrics["reward_seconds"] = time.monotonic() - began


async def call_reward(function: RewardFunction, action: Action, result: StepResult) -> RewardResult:
    """Call a reward function, or a part of one, in every form that `RewardFunction.compute` allows.

    Raises:
        ValueError: The reward is not a finite number.
        RuntimeError: The function called `exit`, which would end the event loop if the function runs in its own task.
    """
    try:
        reward: Any = await invoke(function.compute, action=action, step_result=result)
    except SystemExit as error:
        raise as_exception(error) from error
    if not isinstance(reward, RewardResult) and hasattr(reward, "__float__"):  # NumPy's and PyTorch's numbers too
        reward = RewardResult(reward=float(reward))
    if not isinstance(reward, RewardResult) or not math.isfinite(reward.reward):
        raise ValueError(f"compute must return a RewardResult with a finite reward, not {reward!r:.80}")
    return reward


def _end_of(error: BaseException, supervisor: Supervisor) -> BaseException:
    """Return the exception that ended an episode: the caller's cancellation, or an error of the episode's code.

    Raises:
        KeyboardInterrupt: The user interrupts the process.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, asyncio.CancelledError) and supervisor.is_cancelled:
        return error
    return as_exception(error)


def _silent_server(episode: _Running) -> Outage | None:
    """Return the server that the last model call has waited for in vain; None if it was answered, or was not long."""
    turns = [] if episode.trajectory is None else episode.trajectory.turns
    if not isinstance(episode.model, SGLangModel) or not turns or turns[-1].is_answered:
        return None
    silent = {outage.base_url: outage for outage in outages() if outage.seconds >= SILENT_S}
    is_gone = silent.keys() >= set(episode.model.client.base_urls)
    return silent[episode.model.client.base_url] if is_gone else None


def format_error(error: BaseException) -> str:
    """Format an exception as `Type: message`, without Strands' wrapper."""
    inner = getattr(error, "original_exception", None) or error
    try:
        return f"{type(inner).__name__}: {inner}" if str(inner) else type(inner).__name__
    except Exception:  # its __str__ raises
        return type(inner).__name__


def episode_metrics(
    agent: Agent | None, messages: Sequence[Message], trajectory: Trajectory | None, seconds: float
) -> dict[str, Any]:
    """Compute the metrics of an episode.

    Args:
        agent: The agent; None if it was never created.
        messages: The messages after the prompt.
        trajectory: The recorded model calls; None for models that record none.
        seconds: Duration of the episode.

    Returns:
        The metrics that [`Observation.metrics`][strands_env.core.Observation] lists, except `attempts` and
        `reward_seconds`.
    """
    tools: dict[str, dict[str, float]] = {}

    def counts(name: str) -> dict[str, float]:
        return tools.setdefault(name, {"calls": 0, "errors": 0, "parse_errors": 0, "seconds": 0.0})

    names: dict[str, str] = {}
    iterations = 0
    for message in messages:
        uses = [block["toolUse"] for block in message["content"] if "toolUse" in block]
        iterations += bool(uses)
        for use in uses:
            names[use["toolUseId"]] = use["name"]
            counts(use["name"])["calls"] += 1
        for block in message["content"]:
            match block.get("toolResult"):  # a tool may have returned anything
                case {"status": "error", "toolUseId": str(use_id)} if use_id in names:
                    counts(names[use_id])["errors"] += 1
    parse_errors = trajectory.tool_parse_errors if trajectory is not None else {}
    for name, count in parse_errors.items():
        counts(name)["parse_errors"] += count
    loop = agent.event_loop_metrics if agent is not None else EventLoopMetrics()
    for name, tool_metrics in loop.tool_metrics.items():
        counts(name)["seconds"] += tool_metrics.total_time
    usage = loop.accumulated_usage
    metrics: dict[str, Any] = {
        "model_calls": loop.cycle_count,
        "tool_iterations": iterations,
        "tool_calls": sum(int(tool["calls"]) for tool in tools.values()),
        "tool_errors": sum(int(tool["errors"]) for tool in tools.values()),
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
        # Usage leaves out what failed and interrupted calls have sampled.
        metrics["sampled_tokens"] = sum(len(turn.output_ids) for turn in trajectory.turns)
        metrics["sequences"] = sum(any(sequence.loss_mask) for sequence in trajectory.sequences())
    return metrics


# --- an action as messages ---


_DATA_URL = re.compile(r"data:image/(png|jpeg|jpg|gif|webp);base64,(.*)", re.DOTALL)


@dataclass(frozen=True)
class Opening:
    """The messages with which an agent starts.

    Attributes:
        system: Texts of the system messages.
        history: Messages before the prompt.
        history_length: Number of messages in `history` that come from `conversation_history`.
        prompt: The last message; its role is user.
    """

    system: list[str]
    history: list[Message]
    history_length: int
    prompt: Message


def read_conversation(action: Action) -> Opening:
    """Convert an action to Strands' messages.

    Raises:
        ValueError: A message is invalid; names the message and the reason.
    """
    system, history = _read(action.task_context.conversation_history, "conversation_history")
    given = action.message
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"text": given}]}]
    more_system, messages = _read(given if isinstance(given, list) else [given], "message")
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("the last message of an action must have the role user")
    return Opening([*system, *more_system], [*history, *messages[:-1]], len(history), messages[-1])


def _read(given: Sequence[Any], name: str) -> tuple[list[str], list[Message]]:
    system: list[str] = []
    messages: list[Message] = []
    for number, message in enumerate(given):
        where = f"{name}[{number}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: a message is a dictionary with a role, not {message!r:.80}")
        role = message["role"]
        if role in ("system", "developer"):
            if messages:
                raise ValueError(f"{where}: system messages must come before all others")
            system.append(_text(message.get("content"), where))
        elif role in ("user", "assistant"):
            content = message.get("content")
            calls = message.get("tool_calls") or []
            if calls and content in (None, ""):
                content = []  # an assistant message with only tool calls
            if isinstance(content, str):
                blocks = [{"text": content}]
            elif isinstance(content, list):
                blocks = [_block(block, where) for block in content]
            else:
                raise ValueError(f"{where}: content is a string or a list of blocks, not {content!r:.80}")
            messages.append(cast(Message, {"role": role, "content": blocks + [_call(call, where) for call in calls]}))
        elif role == "tool":
            if not isinstance(message.get("tool_call_id"), str):
                raise ValueError(f"{where}: a tool message needs a tool_call_id")
            text = _text(message.get("content"), where)
            result = {"toolUseId": message["tool_call_id"], "status": "success", "content": [{"text": text}]}
            block = cast(ContentBlock, {"toolResult": result})
            # Strands puts the results of one turn into one message.
            if (
                messages
                and messages[-1]["role"] == "user"
                and all("toolResult" in block for block in messages[-1]["content"])
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
        url = block.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        match = _DATA_URL.fullmatch(url) if isinstance(url, str) else None
        if match is None:
            raise ValueError(f"{where}: an image must be a data URL (png, jpeg, gif, webp), not {url!r:.80}")
        try:
            content = base64.b64decode(match[2], validate=True)
        except ValueError as error:
            raise ValueError(f"{where}: the image's data URL is not valid base64: {error}") from error
        return {"image": {"format": "jpeg" if match[1] == "jpg" else match[1], "source": {"bytes": content}}}
    raise ValueError(f"{where}: content of type {kind!r} is not supported; use text, image_url or a Strands block")


def _call(call: Any, where: str) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, Mapping):
            raise TypeError("arguments must be an object")
        return {"toolUse": {"toolUseId": str(call["id"]), "name": function["name"], "input": dict(arguments)}}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: a tool call needs an id and a function with arguments, not {call!r:.80}") from error


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    blocks = [_block(block, where) for block in content] if isinstance(content, list) else [{}]
    if not all(isinstance(block.get("text"), str) for block in blocks):
        raise ValueError(f"{where}: this message can hold only text, not {content!r:.80}")
    return "".join(block["text"] for block in blocks)
