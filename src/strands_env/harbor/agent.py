"""A Strands agent for Harbor's trials: `harbor run -a strands_env.harbor:StrandsAgent`.

The agent runs in Harbor's process. It asks SGLang with token ids, so a trial's tokens are what the model sampled,
without a proxy that has to find out. Its tools run in the trial's environment, which needs no network for it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.agent.rollout_detail import RolloutDetail
from strands.sandbox import ExecutionResult, PosixShellSandbox, StreamChunk
from strands.types.tools import AgentTool
from strands.vended_tools import make_file_editor, make_shell
from typing_extensions import override

from strands_sglang import OUTCOMES, RewardRule, TerminationReason, Trajectory, __version__
from strands_sglang.credit import Episode
from strands_sglang.trainers.atif import to_atif
from strands_sglang.trainers.openenv import turn_records

from ..core import Action, Environment, ModelFactory, StepResult
from ..core.models import sglang_model_factory
from ..environments.backends import BackendError
from ..environments.world import SandboxedEnvironment, shown, timed_out

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
            --ak server=http://localhost:30000 --ak tokenizer=Qwen/Qwen3-8B --ak max_turns=50
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
        sandbox = HarborSandbox(environment)
        episode: Environment = self._environment(self._model_factory, sandbox=sandbox, **self._options)
        try:
            result = await episode.step(Action(message=instruction))
        finally:  # also if Harbor's timeout cancels it
            if episode.last_result is not None:
                self._record(episode.last_result, context)
            await forget_rewards(environment)
        if OUTCOMES[result.termination_reason].reward is RewardRule.NONE:
            raise EpisodeFailedError(f"{result.termination_reason.value}: {result.error}")
        if self._details == "single" and len(context.rollout_details or ()) != 1:
            raise EpisodeFailedError(f"the episode has {len(context.rollout_details or ())} token sequences, not one")

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
        if self._details != "none":
            context.rollout_details = rollout_details(trajectory)
        trajectory.save(self.logs_dir / "strands-sglang.trajectory.jsonl")
        if any(turn.is_answered for turn in trajectory.turns):
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
    if not isinstance(target, str):
        return target
    module, _, name = target.replace(":", ".").rpartition(".")
    return getattr(importlib.import_module(module), name)


async def forget_rewards(environment: BaseEnvironment) -> None:
    """Remove a reward that the agent has written where the verifier writes it; Harbor 0.24 would read it."""
    await environment.exec("rm -rf /logs/verifier/reward.txt /logs/verifier/reward.json", user="root")


def rollout_details(trajectory: Trajectory) -> list[RolloutDetail]:
    """Return Harbor's details of an episode: one entry per sequence, the main one first.

    For each turn, it has the whole prompt, the sampled ids and their logprobs, and in `extra` the mask, the versions of
    the weights, why sampling ended, and the number of the turn. A turn that several sequences share is trained in the
    first.
    """
    records = {record["node_id"]: record for record in turn_records(Episode(trajectory, None, None))}
    main = trajectory.main_leaf()
    leaves = sorted((leaf for leaf, _ in trajectory.branches()), key=lambda leaf: leaf is not main)
    details: list[RolloutDetail] = []
    seen: set[str] = set()
    for leaf in leaves:
        detail = RolloutDetail(prompt_token_ids=[], completion_token_ids=[], logprobs=[], extra={})
        for turn in leaf.path():
            record = records.get(str(turn.index))
            if record is None:
                continue
            sampled = len(record["completion_token_ids"])
            mask = record["loss_mask"][len(record["prompt_token_ids"]) :]
            detail["prompt_token_ids"].append(record["prompt_token_ids"])
            detail["completion_token_ids"].append(record["completion_token_ids"])
            detail["logprobs"].append(record["per_token_logps"])
            for name, value in (
                ("loss_mask", [0] * sampled if record["node_id"] in seen else mask),
                ("weight_versions", record["metadata"]["weight_versions"]),
                ("finish_reason", record["metadata"]["finish_reason"]),
                ("turn", turn.index),
            ):
                detail["extra"].setdefault(name, []).append(value)
            seen.add(record["node_id"])
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
        """Run a shell command as the trial's user; yield its output and its result.

        Raises:
            SandboxTimeoutError: It ran for longer than `timeout` seconds.
        """
        seconds = None if timeout is None else max(1, round(timeout))
        try:
            ran = await self.environment.exec(command, cwd=cwd, env=env, timeout_sec=seconds)
        except (RuntimeError, asyncio.TimeoutError) as error:  # each environment has its own
            if isinstance(error, asyncio.TimeoutError) or "timed out" in str(error).lower():
                raise timed_out(timeout or 0, "", "") from error
            raise BackendError(str(error)) from error
        stdout, stderr = shown(ran.stdout or ""), shown(ran.stderr or "")
        for text, stream in ((stdout, "stdout"), (stderr, "stderr")):
            if text:
                yield StreamChunk(text, stream)  # type: ignore[arg-type]
        yield ExecutionResult(ran.return_code, stdout, stderr)
