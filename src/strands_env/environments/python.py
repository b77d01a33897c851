"""An environment whose agent runs Python programs in `strands_env.sandbox`."""

from __future__ import annotations

import functools
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from strands import tool
from strands.hooks import HookProvider

from ..core import Environment, ModelFactory, RewardFunction, has_effect
from ..core.supervision import queued
from ..sandbox import Execution, Mode, PythonSandbox, SandboxError, SandboxLimits
from .backends import EndOnBackendErrors

_NOTES = {
    "timeout": "[stopped: it ran for more than {limits.wall_s:g} seconds]",
    "memory": "[stopped: it used more than {memory} MB of memory]",
    "processes": "[stopped: it had more than {limits.processes} processes]",
    "disk": "[stopped: its files took more than {disk} MB]",
    "output": "[stopped: it printed more than {limits.output_bytes} bytes; print less]",
}


class PythonEnvironment(Environment):
    """An environment with the tool `execute_python_code`, which runs Python programs and returns what they print.

    Each program runs on its own in a `PythonSandbox`, with an empty folder and without network access; it fails by
    itself if it exceeds the limits or attacks its sandbox. If the sandbox does not work, the episode ends with the
    outcome `infrastructure_error` and without a reward.

    Attributes:
        sandbox: Sandbox in which programs run.

    Examples:
        >>> env = PythonEnvironment(model_factory, MathReward(), mode="namespaces")
    """

    default_system_prompt_path: ClassVar[str | Path | None] = Path(__file__).parent / "prompts" / "python.md"

    def __init__(
        self,
        model_factory: ModelFactory,
        reward_fn: RewardFunction | None = None,
        system_prompt: str | None = None,
        *args: Any,
        sandbox: PythonSandbox | None = None,
        mode: Mode | None = None,
        **kwargs: Any,
    ) -> None:
        """Create the environment. The first one in a process finds out which sandbox mode the machine supports.

        Args:
            model_factory: Function that returns the model of a step, as for `Environment`.
            reward_fn: Reward function, as for `Environment`.
            system_prompt: System prompt, as for `Environment`.
            *args: Other positional arguments of `Environment`.
            sandbox: Sandbox in which programs run; None for one with default limits, shared by all environments.
            mode: Sandbox mode to use, as for [`PythonSandbox`][strands_env.sandbox.PythonSandbox].
            **kwargs: Other keyword arguments of `Environment`.

        Raises:
            SandboxUnavailableError: The machine does not support the required sandbox mode.
            ValueError: Both `sandbox` and `mode` are given.
        """
        super().__init__(model_factory, reward_fn, system_prompt, *args, **kwargs)
        if sandbox is not None and mode is not None:
            raise ValueError("pass mode to the PythonSandbox, not together with sandbox")
        self.sandbox = sandbox or _shared_sandbox(mode)

    def get_tools(self) -> Sequence[Any]:
        """Return the tool that runs programs."""
        return [python_tool(self.sandbox)]

    def get_hooks(self) -> Sequence[HookProvider]:
        """Return the hook that ends the episode if the sandbox does not work."""
        return [EndOnBackendErrors(SandboxError)]


def python_tool(sandbox: PythonSandbox) -> Any:
    """Create the tool `execute_python_code`, for your own agents and environments.

    Args:
        sandbox: Sandbox in which programs run.

    Returns:
        A Strands tool.
    """

    @has_effect("pure")
    @tool
    async def execute_python_code(code: str) -> dict[str, Any]:
        """Execute a Python program and return what it prints.

        Args:
            code: A whole program. Only what it prints is returned.
        """
        try:
            with queued() as started:  # a busy machine is not the model's fault
                ran = await sandbox.run(code, started=started)
        except ValueError as error:
            return {"status": "error", "content": [{"text": f"Error: {error}"}]}
        ok = ran.ended == "exited" and ran.exit_code == 0
        return {"status": "success" if ok else "error", "content": [{"text": described(ran, sandbox.limits)}]}

    return execute_python_code


def described(ran: Execution, limits: SandboxLimits) -> str:
    """Format a run for the model: the output, and a last line about anything unusual."""
    note = ""
    if ran.ended != "exited":
        sizes = {"memory": limits.memory_bytes >> 20, "disk": limits.disk_bytes >> 20}
        note = _NOTES[ran.ended].format(limits=limits, **sizes)
    elif ran.exit_code is not None and ran.exit_code < 0:
        names = {member.value: member.name for member in signal.Signals}  # most real-time signals have none
        note = f"[ended by {names.get(-ran.exit_code, f'signal {-ran.exit_code}')}]"
        if -ran.exit_code == signal.SIGKILL:
            note = f"[killed: it used more than {limits.cpu_s} seconds of CPU time, or the machine ran out of memory]"
    elif not ran.output.strip():
        note = (
            "[nothing was printed: print what you want to see]"
            if ran.exit_code == 0
            else f"[exit code {ran.exit_code}]"
        )
    return "\n".join(part for part in (ran.output.rstrip("\n"), note) if part)


@functools.lru_cache(maxsize=8)
def _shared_sandbox(mode: Mode | None) -> PythonSandbox:
    return PythonSandbox(mode=mode)
