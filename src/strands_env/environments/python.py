"""An agent that runs Python programs, in the sandbox of this package."""

from __future__ import annotations

import functools
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from strands import tool
from strands.hooks import HookProvider

from ..core import Environment, ModelFactory, RewardFunction
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
    """Tasks for an agent that writes programs and sees what they print.

    Each program runs in a `PythonSandbox` of its own, with an empty folder, without network.

    Attributes:
        sandbox: Where programs run.
    """

    default_system_prompt_path: ClassVar[str | Path | None] = Path(__file__).parent / "prompts" / "python.md"

    def __init__(
        self,
        model_factory: ModelFactory,
        reward_fn: RewardFunction | None = None,
        system_prompt: str | None = None,
        *args: Any,
        sandbox: PythonSandbox | None = None,
        min_mode: Mode | None = None,
        unsafe: bool = False,
        **kwargs: Any,
    ) -> None:
        """Set up the environment; the first one in a process tries out what this machine allows.

        Args:
            model_factory: As for `Environment`.
            reward_fn: As for `Environment`.
            system_prompt: As for `Environment`.
            *args: As for `Environment`.
            sandbox: Where programs run; None for one with default limits, which all environments share.
            min_mode: The least sandbox that will do; see `PythonSandbox`.
            unsafe: Run programs without protection if this machine gives none; see `PythonSandbox`.
            **kwargs: As for `Environment`.

        Raises:
            SandboxUnavailableError: This machine does not give the least mode that will do.
            ValueError: `sandbox` is given, too, which has a mode already.
        """
        super().__init__(model_factory, reward_fn, system_prompt, *args, **kwargs)
        if sandbox is not None and min_mode is not None:
            raise ValueError("give min_mode to the sandbox itself")
        self.sandbox = sandbox or _shared_sandbox(min_mode, unsafe)

    def get_tools(self) -> Sequence[Any]:
        """The tool that runs programs."""
        return [python_tool(self.sandbox)]

    def get_hooks(self) -> Sequence[HookProvider]:
        """Ends the episode, without a reward, where the sandbox does not work."""
        return [EndOnBackendErrors(SandboxError)]


def python_tool(sandbox: PythonSandbox) -> Any:
    """A tool that runs programs in a sandbox, for agents of one's own.

    Args:
        sandbox: Where programs run.
    """

    @tool
    async def execute_python_code(code: str) -> dict[str, Any]:
        """Execute a Python program and return what it prints.

        Args:
            code: A whole program. Only what it prints is returned.
        """
        try:
            ran = await sandbox.run(code)
        except ValueError as error:
            return {"status": "error", "content": [{"text": f"Error: {error}"}]}
        ok = ran.ended == "exited" and ran.exit_code == 0
        return {"status": "success" if ok else "error", "content": [{"text": described(ran, sandbox.limits)}]}

    return execute_python_code


def described(ran: Execution, limits: SandboxLimits) -> str:
    """A run as a model is told of it: the output, with a last line on anything unusual."""
    note = ""
    if ran.ended != "exited":
        sizes = {"memory": limits.memory_bytes >> 20, "disk": limits.disk_bytes >> 20}
        note = _NOTES[ran.ended].format(limits=limits, **sizes)
    elif ran.exit_code is not None and ran.exit_code < 0:
        names = {one.value: one.name for one in signal.Signals}  # most real-time signals have none
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
def _shared_sandbox(min_mode: Mode | None, unsafe: bool) -> PythonSandbox:
    return PythonSandbox(min_mode=min_mode, unsafe=unsafe)
