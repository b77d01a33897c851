"""A Strands agent for Harbor's trials: `harbor run -a strands_env.harbor:StrandsAgent`.

The agent runs in Harbor's process. It asks SGLang with token ids, so a trial's tokens are what the model sampled,
without a proxy that has to find out. Its tools run in the trial's environment, which needs no network for it.
"""

from __future__ import annotations

import base64
import inspect
import json
import math
import pkgutil
import shlex
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.agent.context import AgentContext
from harbor.models.agent.rollout_detail import RolloutDetail
from strands.sandbox import ExecutionResult, PosixShellSandbox, StreamChunk
from strands.types.tools import AgentTool
from strands.vended_tools import make_file_editor, make_shell
from typing_extensions import override

from strands_sglang import OUTCOMES, RewardRule, TerminationReason, Trajectory, __version__
from strands_sglang.credit import Episode
from strands_sglang.trainers.atif import main_first, to_atif
from strands_sglang.trainers.openenv import turn_records

from ..core import Action, Environment, ModelFactory, StepResult
from ..core.models import sglang_model_factory
from ..environments.backends import BackendError
from ..environments.world import SandboxedEnvironment, shown, timed_out

LEAVE_S = 10
PIECE = 60_000  # bytes of a file in one command, which Linux limits to 128 KiB

Details = Literal["all", "single", "none"]
"""Which sequences of an episode `rollout_details` has. Some consumers take exactly one, so `single` refuses several."""


class EpisodeFailedError(RuntimeError):
    """The infrastructure or the agent's own code failed, so the trial must not be graded."""


class StrandsAgent(BaseAgent):
    """Runs an agent of `strands_env` in a trial of Harbor.

    It writes the trajectory to the trial's `agent` folder, in our format and in ATIF, and fills `rollout_details` with
    the ids, logprobs and masks of each turn. An episode that reaches a limit returns and is graded; if the
    infrastructure fails, it raises. Tokens that were sampled before Harbor's timeout are kept.

    Examples:
        ```bash
        harbor run -p tasks -e strands_env.harbor:WorldEnvironment -a strands_env.harbor:StrandsAgent \
            --ak server=http://localhost:30000 --ak tokenizer=Qwen/Qwen3-8B --ak 'options={"max_turns": 50}'
        ```
    """

    capabilities = AgentCapabilities(atif=True)

    def __init__(
        self,
        *args: Any,
        server: str | None = None,
        tokenizer: Any = None,
        sampling_params: Mapping[str, Any] | None = None,
        model_factory: str | ModelFactory | None = None,
        environment: str | type[Environment] = SandboxedEnvironment,
        rollout_details: Details = "all",
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Create the agent; Harbor does, with the values of `--ak NAME=VALUE`.

        Args:
            *args: Arguments of Harbor's `BaseAgent`.
            server: Address of the SGLang server.
            tokenizer: Tokenizer of the served model: its folder or name. None for Harbor's model name.
            sampling_params: SGLang's sampling parameters.
            model_factory: Instead of these, a function that returns the model, or its dotted path `module:name`.
            environment: Class of the agent, or its dotted path: an `Environment` with your tools, hooks and system
                prompt that takes a `sandbox`, such as a subclass of `SandboxedEnvironment`.
            rollout_details: Which sequences to give to Harbor. Their size grows with the square of the turns.
            options: Arguments of `environment`, such as `max_turns`.
            **kwargs: Arguments of Harbor's `BaseAgent`.

        Raises:
            ValueError: There is neither a model nor the address of a server.
        """
        super().__init__(*args, **kwargs)
        unknown = sorted(set(kwargs) - set(inspect.signature(BaseAgent.__init__).parameters))
        if unknown:  # Harbor accepts them, and trainers pass those of Harbor's own agents
            self.logger.warning("unknown=<%s> | arguments without effect: see --ak options", ", ".join(unknown))
        if model_factory is None:
            if server is None:
                raise ValueError("pass --ak server=URL and --ak tokenizer=PATH, or --ak model_factory=module:name")
            model_factory = sglang_model_factory(
                model_id=self.model_name, tokenizer=tokenizer, base_url=server, sampling_params=sampling_params
            )
        self._model_factory: Any = _imported(model_factory)
        self._environment: Any = _imported(environment)
        self._details: Details = rollout_details
        self._options = {"max_tool_iterations": None, **(options or {})}

    @staticmethod
    @override
    def name() -> str:
        """Return the agent's name."""
        return "strands-sglang"

    @override
    def version(self) -> str:
        """Return the agent's version."""
        return __version__

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Install nothing: the agent runs outside."""

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Run an episode.

        Raises:
            EpisodeFailedError: It has no reward, or several sequences where one is wanted.
        """
        are_there = await has_tests(environment)
        sandbox = HarborSandbox(environment)
        episode: Environment = self._environment(self._model_factory, sandbox=sandbox, **self._options)
        try:
            result = await episode.step(Action(message=instruction))
        finally:  # also if Harbor's timeout cancels it
            if episode.last_result is not None:
                self._record(episode.last_result, context)
            await leave(environment, are_there)
        if OUTCOMES[result.termination_reason].reward is RewardRule.NONE:
            raise EpisodeFailedError(f"{result.termination_reason.value}: {result.error}")
        if self._details == "single":
            details = context.rollout_details or []
            if len(details) != 1:
                raise EpisodeFailedError(f"the episode has {len(details)} token sequences, not one")
            if not all(map(all, details[0]["extra"]["loss_mask"])):
                raise EpisodeFailedError("the episode has sampled tokens that must not be trained")

    def _record(self, result: StepResult, context: AgentContext) -> None:
        trajectory = result.observation.trajectory
        metrics = result.observation.metrics
        # `n_episodes` is what Harbor's own agents call their model calls; SkyRL reads it.
        context.metadata = {
            "outcome": result.termination_reason.value,
            "error": result.error,
            "n_episodes": metrics["model_calls"],
        }
        context.n_input_tokens = metrics["input_tokens"]
        context.n_cache_tokens = metrics["cached_tokens"]
        context.n_output_tokens = metrics["sampled_tokens"]
        if trajectory is None:
            return
        trajectory.save(self.logs_dir / "strands-sglang.trajectory.jsonl")
        if any(turn.images is not None for turn in trajectory.turns):
            self.logger.warning("the episode has images: its tokens are in its trajectory only")
        elif any(turn.is_answered for turn in trajectory.turns):
            if self._details != "none":
                context.rollout_details = rollout_details(trajectory)
            # A cancellation is Harbor's timeout, after which it grades, or the end of the job; Harbor knows which.
            is_cancelled = result.termination_reason is TerminationReason.CANCELLED
            document = to_atif(
                Episode(trajectory, None, None, outcome=None if is_cancelled else result.termination_reason),
                agent=self.name(),
                version=self.version(),
                model=self.model_name,
            )
            (self.logs_dir / "trajectory.json").write_text(json.dumps(document))


def _imported(target: Any) -> Any:
    return pkgutil.resolve_name(target) if isinstance(target, str) else target


async def has_tests(environment: BaseEnvironment) -> bool:
    """Return whether there is something where the verifier's tests will be, before the agent could put it there."""
    try:
        ran = await environment.exec('test -n "$(ls -A /tests)"', user="root", timeout_sec=LEAVE_S)
    except Exception:  # an agent may have caused it in an earlier step
        return False
    return ran.return_code == 0


async def leave(environment: BaseEnvironment, keeps_tests: bool) -> bool:
    """Remove what the agent wrote where Harbor grades: a reward, which Harbor 0.24 would read, and files in `/tests`.

    The verifier's tests would load such files: pytest does so with a `conftest.py`.

    Args:
        environment: The agent's environment.
        keeps_tests: Whether `/tests` stays: what `has_tests` returned before the agent began.

    Returns:
        Whether the environment answers; if it is only slow, that may be the agent's doing.
    """
    began = time.monotonic()
    try:
        command = "rm -rf /logs/verifier/reward.txt /logs/verifier/reward.json" + ("" if keeps_tests else " /tests")
        await environment.exec(command, user="root", timeout_sec=LEAVE_S)
    except Exception:  # each environment has its own
        return time.monotonic() - began >= LEAVE_S
    return True


def rollout_details(trajectory: Trajectory) -> list[RolloutDetail]:
    """Return Harbor's details of an episode: one entry per sequence, the main one first.

    For each turn, it has the whole prompt, the sampled ids and their logprobs, and in `extra` the mask, the versions of
    the weights, why sampling ended, and the number of the turn. A turn that several sequences share is trained in the
    first.
    """
    records = {record["node_id"]: record for record in turn_records(Episode(trajectory, None, None))}
    details = []
    for leaf in main_first(trajectory):
        calls = [records[name] for name in (str(turn.index) for turn in leaf.path()) if name in records]
        detail = RolloutDetail(
            prompt_token_ids=[call["prompt_token_ids"] for call in calls],
            completion_token_ids=[call["completion_token_ids"] for call in calls],
            extra={
                "loss_mask": [call["loss_mask"][len(call["prompt_token_ids"]) :] for call in calls],
                "weight_versions": [call["metadata"]["weight_versions"] for call in calls],
                "finish_reason": [call["metadata"]["finish_reason"] for call in calls],
                "turn": [int(call["node_id"]) for call in calls],
            },
        )
        if all(turn.generation.logprobs is not None for turn in leaf.path() if turn.generation is not None):
            detail["logprobs"] = [call["per_token_logps"] for call in calls]
        for call in calls:
            call["loss_mask"] = [0] * len(call["loss_mask"])
        details.append(detail)
    return details


class HarborSandbox(PosixShellSandbox):
    """Runs what an agent's tools do in any environment of Harbor. It gives the agent `shell` and `file_editor`.

    Attributes:
        environment: Harbor's environment.
    """

    def __init__(self, environment: BaseEnvironment) -> None:
        """Use a running environment."""
        self.environment = environment

    @override
    def get_tools(self) -> list[AgentTool]:
        """Return the tools `shell` and `file_editor`."""
        return [make_shell(sandbox=self), make_file_editor(sandbox=self)]

    async def _exec(
        self, command: str, timeout: float | None = None, cwd: str | None = None, env: dict[str, str] | None = None
    ) -> ExecResult:
        seconds = None if timeout is None or math.isinf(timeout) else max(1, math.ceil(timeout))
        began = time.monotonic()
        try:
            return await self.environment.exec(command, cwd=cwd, env=env, timeout_sec=seconds)
        except ValueError:  # the command is longer than the system allows
            raise
        except Exception as error:  # each environment has its own
            if seconds is not None and time.monotonic() - began >= seconds:
                raise timed_out(seconds, "", "") from error
            raise BackendError(str(error)) from error

    @override
    async def execute_streaming(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[StreamChunk | ExecutionResult, None]:
        """Run a shell command as the trial's user; yield its output and its result, as for `WorldSandbox`.

        Raises:
            SandboxTimeoutError: It ran for longer than `timeout` seconds.
            BackendError: The environment failed.
        """
        ran = await self._exec(command, timeout, cwd, env)
        stdout, stderr = shown(ran.stdout or ""), shown(ran.stderr or "")
        for text, stream in ((stdout, "stdout"), (stderr, "stderr")):
            if text:
                yield StreamChunk(text, stream)  # type: ignore[arg-type]
        yield ExecutionResult(ran.return_code, stdout, stderr)

    @override
    async def read_file(self, path: str, **kwargs: Any) -> bytes:
        """Return the content of a file."""
        ran = await self._exec(f"base64 < {shlex.quote(path)}")
        if ran.return_code != 0:
            raise FileNotFoundError(ran.stderr or f"no file {path}")
        return base64.b64decode(ran.stdout or "")

    @override
    async def write_file(self, path: str, content: bytes, **kwargs: Any) -> None:
        """Write a file, and the folders that it needs."""
        quoted = shlex.quote(path)
        pieces = [base64.b64encode(content[at : at + PIECE]).decode() for at in range(0, len(content), PIECE)]
        commands = [f"echo {piece} | base64 -d >> {quoted}" for piece in pieces]
        for command in (f'mkdir -p "$(dirname {quoted})" && : > {quoted}', *commands):
            ran = await self._exec(command)
            if ran.return_code != 0:
                raise OSError(ran.stderr or f"{path} cannot be written")
