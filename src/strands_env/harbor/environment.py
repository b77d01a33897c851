"""Tasks of Harbor as environments: Harbor's own trial prepares and grades what an agent of ours does in between."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.agents.oracle import OracleAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.task.task import Task
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial
from strands.types.content import Message
from typing_extensions import override

from ..core import Action, ModelFactory, RewardError, RewardFunction, RewardResult, StepResult, TaskContext
from ..core.supervision import queued
from ..environments.backends import BackendError
from ..environments.world import SandboxedEnvironment
from .agent import HarborSandbox, has_tests, leave

IN_A_WORLD = {"import_path": "strands_env.harbor:WorldEnvironment"}
FOREVER_S = 1e9
NOT_STARTED = {"SandboxBuildFailedError", "EnvironmentStartTimeoutError"}  # an environment of the verifier


def harbor_tasks(folder: str | Path) -> list[Action]:
    """Return the tasks of a folder: of one task, or of several in it.

    Raises:
        ValueError: There is none.
    """
    folder = Path(folder)
    paths = [folder] if (folder / "task.toml").exists() else sorted(path.parent for path in folder.glob("*/task.toml"))
    if not paths:
        raise ValueError(f"{folder} has no task.toml, nor a folder with one")
    return [harbor_task(path) for path in paths]


def harbor_task(path: Path) -> Action:
    """Return a task's action: its instruction, the first one of a task with several steps.

    The episode of a task that Harbor refuses ends with the reason.
    """
    context = {"id": path.name, "harbor_task": str(path.resolve())}
    try:
        task = Task(path)
        steps = task.config.steps or []
        message = task.step_instruction(steps[0].name) if steps else task.instruction
        context["id"] = task.name
    except Exception as error:  # Harbor has many kinds
        message = f"(Harbor refuses this task: {error})"
    return Action(message=message, task_context=TaskContext.model_validate(context))


class HarborEnvironment(SandboxedEnvironment):
    """A task of Harbor as an environment, with Harbor's verifier as its reward.

    An episode is a trial of Harbor: it starts the task's environment, waits for its health check, hands it to the
    agent, and grades what the agent leaves, in the same environment or in a separate one. The agent has the tools
    `shell` and `file_editor`. In a task with several steps, it continues its conversation with the next instruction.

    What the task's environment or Harbor cause ends the episode without a reward. One environment runs one episode at a
    time.

    Examples:
        ```python
        env = HarborEnvironment(model_factory)
        for task in harbor_tasks("tasks"):
            result = await env.step(task)
        ```
    """

    def __init__(
        self,
        model_factory: ModelFactory,
        *,
        environment: Mapping[str, Any] | None = None,
        reward: str = "reward",
        trials: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        """Create the environment.

        Args:
            model_factory: Function that returns the model of a step, as for `Environment`.
            environment: Where tasks run, as in the configuration of Harbor's jobs, such as `{"type": "docker"}`; None
                for worlds.
            reward: Which of the verifier's rewards counts.
            trials: Folder in which trials leave their files; None for a temporary one.
            **kwargs: Other keyword arguments of `Environment`. An episode has the time of its task unless
                `episode_timeout` is given.

        Raises:
            ValueError: A reward function is given, or Harbor has no such environment.
        """
        if kwargs.get("reward_fn") is not None:
            raise ValueError("its reward is Harbor's verifier: pass no reward_fn, on the command line --reward env")
        kwargs = {"max_tool_iterations": None, "reward_timeout": None, **kwargs}  # the task has its own limits
        super().__init__(model_factory, **kwargs)
        self.reward_fn = HarborReward(self, reward)
        self.environment = dict(environment or IN_A_WORLD)
        EnvironmentConfig.model_validate(self.environment)
        self._trials = trials
        self._timeout = self.episode_timeout
        self._is_running = False
        self._temporary: str | None = None
        self._running: Any = None

    @override
    def identity(self) -> dict[str, Any]:
        """Describe what results depend on: not the folder of the trials' files."""
        identity = super().identity()
        identity["arguments"].pop("trials", None)
        return identity

    @override
    async def step(self, action: Action) -> StepResult:
        """Run the episode of a task, which `harbor_tasks` returns.

        Raises:
            ValueError: The action is not a task of Harbor.
            RuntimeError: Another episode runs.
        """
        path = getattr(action.task_context, "harbor_task", None)
        if path is None:
            raise ValueError("the action is not a task of Harbor: take those of harbor_tasks(FOLDER)")
        if self._is_running:
            raise RuntimeError("an episode runs: create one HarborEnvironment per episode")
        self._path = Path(path)
        self.episode_timeout = self._timeout or _agents_time(self._path)
        self._is_running = True
        try:
            return await super().step(action)
        finally:
            self._is_running = False

    @override
    async def reset(self) -> None:
        """Start a trial, and wait until it hands its environment to the agent."""
        self._oracle: OracleAgent | None = None
        self._temporary = tempfile.mkdtemp(prefix="trials-") if self._trials is None else None
        config = TrialConfig(
            task=TaskConfig(path=self._path),
            trials_dir=Path(self._temporary or str(self._trials)),
            agent=AgentConfig(import_path=f"{__name__}:Visitor", override_timeout_sec=FOREVER_S),
            environment=EnvironmentConfig.model_validate(self.environment),
        )
        with queued():  # the task's time begins with its agent
            try:
                self._trial: Any = await Trial.create(config)
                arrived = self._trial.agent.arrived
                self._running = asyncio.ensure_future(self._trial.run())
                self._running.add_done_callback(lambda _: arrived.put_nowait(None))
                self._here = await arrived.get()
                failure = None if self._here else _failure_of(await self._running)
            except Exception as error:  # Harbor has many kinds
                raise BackendError(f"Harbor refuses the task: {type(error).__name__}: {error}") from error
        if self._here is None:
            raise BackendError(self._told(failure))
        self.sandbox = HarborSandbox(self._here[1])

    @override
    async def next_user_message(self, action: Action, messages: Sequence[Message]) -> str | None:
        """Return the instruction of the next step, once the last one is graded."""
        if not self._trial.task.has_steps:
            return None
        with queued():  # grading is not the agent's time
            self._trial.agent.left.set()
            self._here = await self._trial.agent.arrived.get()
        return self._here and self._here[0]

    async def solve(self) -> None:
        """Do what the task's solution does, in place of the agent; for `strands-env check`."""
        paths = self._trial.paths
        if self._oracle is None:
            self._oracle = OracleAgent(paths.agent_dir, task_dir=self._path, trial_paths=paths)
        await self._oracle.run(*self._here, AgentContext())

    async def plant_reward(self) -> None:
        """Write a reward where the verifier writes it, as an agent could; for `strands-env check`."""
        await self.get_sandbox().execute("cd /logs/verifier; echo 1 > reward.txt; echo '{\"reward\": 1}' > reward.json")

    async def rewards(self) -> Mapping[str, float]:
        """Let the trial grade, and return its rewards.

        Raises:
            RewardError: It has none.
        """
        visitor = self._trial.agent
        visitor.is_over = True
        visitor.left.set()
        result = await asyncio.shield(self._running)
        failure = _failure_of(result)
        if failure is None and result.verifier_result is not None and result.verifier_result.rewards is not None:
            return result.verifier_result.rewards
        # Nearly everything else that fails in the agent's environment may be the agent's doing.
        is_machines = not visitor.is_alive or (failure is not None and failure.exception_type in NOT_STARTED)
        raise RewardError(self._told(failure), is_infrastructure=is_machines)

    def _told(self, failure: Any) -> str:
        """Return what failed, without the folder of the trial, so that equal causes have equal messages."""
        if failure is None:
            return "the task has no verifier"
        folder = f"{self._trial.paths.trial_dir}/"
        return f"{failure.exception_type}: {failure.exception_message.replace(folder, '')}"

    @override
    async def cleanup(self) -> None:
        """End the trial, and remove its files unless they were asked for."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        if self._temporary is not None:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)


class HarborReward(RewardFunction):
    """The reward of Harbor's verifier.

    Attributes:
        name: Which of its rewards counts.
    """

    def __init__(self, environment: HarborEnvironment, name: str = "reward") -> None:
        """Grade the episodes of an environment."""
        self._environment = environment
        self.name = name

    @override
    def identity(self) -> dict[str, Any]:
        """Describe what rewards depend on."""
        return {"class": "HarborReward", "name": self.name}

    @override
    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Return the reward, with all rewards of the verifier.

        Raises:
            RewardError: The verifier failed, or did not give this reward.
        """
        rewards = await self._environment.rewards()
        if self.name not in rewards:
            raise RewardError(f"the verifier gave {', '.join(sorted(rewards))}, but not {self.name}")
        return RewardResult(reward=float(rewards[self.name]), info={"rewards": dict(rewards)})


class Visitor(BaseAgent):
    """Takes the agent's place in a trial: it hands over the environment, and waits for the agent outside.

    Attributes:
        arrived: Instruction and environment of each step, and None once the trial has ended.
        left: Whether the agent has ended its turn.
        is_over: Whether the agent does no further steps.
        is_alive: Whether the environment answered when the agent left.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Wait for nothing yet."""
        super().__init__(*args, **kwargs)
        self.arrived: asyncio.Queue[tuple[str, BaseEnvironment] | None] = asyncio.Queue()
        self.left = asyncio.Event()
        self.is_over = False
        self.is_alive = True

    @staticmethod
    @override
    def name() -> str:
        """Return the agent's name."""
        return "strands-env"

    @override
    def version(self) -> None:
        """Return no version."""

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Install nothing."""

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Hand over the environment, and wait."""
        if self.is_over:
            return
        self.left.clear()
        are_there = await has_tests(environment)
        self.arrived.put_nowait((instruction, environment))
        await self.left.wait()
        self.is_alive = await leave(environment, are_there)


def _agents_time(task: Path) -> float | None:
    """Return how many seconds a task gives its agent, in all its steps; None for no limit."""
    try:
        config = Task(task).config
    except Exception:  # the trial tells why Harbor refuses it
        return None
    seconds = [each.agent.timeout_sec or config.agent.timeout_sec for each in config.steps or (config,)]
    return None if None in seconds else sum(seconds)


def _failure_of(result: TrialResult) -> Any:
    """Return what failed in a trial, or in its first step that failed."""
    failures = [result.exception_info, *(step.exception_info for step in result.step_results or ())]
    return next(filter(None, failures), None)
