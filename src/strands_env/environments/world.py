"""Environments whose agents have a shell and files: in a world of their own, or in a sandbox of yours."""

from __future__ import annotations

import asyncio
import codecs
import signal
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from strands.hooks import HookProvider
from strands.sandbox import ExecutionResult, PosixShellSandbox, Sandbox, StreamChunk
from strands.sandbox.errors import SandboxTimeoutError
from strands.sandbox.posix_shell import validate_env_keys
from strands.types.tools import AgentTool
from strands.vended_tools import make_file_editor, make_shell
from typing_extensions import override

from ..core import Environment, ModelFactory, RewardFunction, has_effect
from ..sandbox import WORLD_LIMITS, Execution, Image, Network, SandboxError, SandboxLimits, World
from ..sandbox.layers import Layer
from .backends import BackendError, EndOnBackendErrors

SHOWN_CHARS = 30_000  # of an output, to a model


class SandboxedEnvironment(Environment):
    """An environment whose agent has the tools of a sandbox, usually `shell` and `file_editor`.

    If the sandbox fails, not a command in it, the episode ends with the outcome `infrastructure_error` and without a
    reward.

    Attributes:
        sandbox: Where tools run commands and keep files.
    """

    default_system_prompt_path: ClassVar[str | Path | None] = Path(__file__).parent / "prompts" / "world.md"

    def __init__(self, model_factory: ModelFactory, *args: Any, sandbox: Sandbox | None = None, **kwargs: Any) -> None:
        """Create the environment.

        Args:
            model_factory: Function that returns the model of a step, as for `Environment`.
            *args: Other positional arguments of `Environment`.
            sandbox: Where tools run; None if `reset` sets it.
            **kwargs: Other keyword arguments of `Environment`.
        """
        super().__init__(model_factory, *args, **kwargs)
        self.sandbox = sandbox

    @override
    def get_sandbox(self) -> Sandbox:
        """Return the sandbox, as the place where tools run."""
        assert self.sandbox is not None, "the sandbox is given, or set by `reset`"
        return self.sandbox

    @property
    @override
    def restart_only(self) -> str | None:
        """Why an episode cannot continue elsewhere: the files in a sandbox that is given are not known here."""
        return f"{type(self).__name__} does not know how to copy its sandbox"

    @override
    def get_hooks(self) -> Sequence[HookProvider]:
        """Return the hook that ends the episode if the sandbox does not work."""
        return [EndOnBackendErrors(SandboxError)]


class WorldEnvironment(SandboxedEnvironment):
    """An environment whose agent has the tools `shell` and `file_editor`, in a world that lasts for the episode.

    The agent cannot reach the files, processes or network of this machine.

    Attributes:
        world: The episode's world; a reward function that has the environment can look at its files.

    Examples:
        ```python
        class Solved:
            def __init__(self, environment): self.environment = environment
            async def compute(self, action, step_result):
                ran = await self.environment.world.execute("pytest -q /task")
                return RewardResult(reward=float(ran.exit_code == 0), info={"pytest": ran.output})

        environment = WorldEnvironment(model_factory, image=image)
        environment.reward_fn = Solved(environment)
        ```
    """

    def __init__(
        self,
        model_factory: ModelFactory,
        reward_fn: RewardFunction | None = None,
        system_prompt: str | None = None,
        *args: Any,
        image: Image | None = None,
        limits: SandboxLimits = WORLD_LIMITS,
        network: Network = "none",
        **kwargs: Any,
    ) -> None:
        """Create the environment.

        Args:
            model_factory: Function that returns the model of a step, as for `Environment`.
            reward_fn: Reward function, as for `Environment`.
            system_prompt: System prompt, as for `Environment`.
            *args: Other positional arguments of `Environment`.
            image: Files to begin with, as for [`World`][strands_env.sandbox.World].
            limits: Limits of the world.
            network: Network of the world.
            **kwargs: Other keyword arguments of `Environment`.
        """
        super().__init__(model_factory, reward_fn, system_prompt, *args, **kwargs)
        self.image = image
        self.limits = limits
        self.network: Network = network
        self.world: World | None = None
        self._layers: tuple[Layer, ...] | None = None

    @override
    async def reset(self) -> None:
        """Start the world."""
        try:
            self.world = await World(self.image, limits=self.limits, network=self.network).start()
        except SandboxError as error:
            raise BackendError(str(error)) from error
        self.sandbox = WorldSandbox(self.world)
        self._layers = None

    @property
    @override
    def restart_only(self) -> str | None:
        """None: files are copied. Programs that run in the background are not."""
        return None

    @override
    async def save_state(self) -> bytes:
        """Return what the world's files have become since `reset`."""
        assert self.world is not None, "the world runs from `reset` to `cleanup`"
        if self._layers is None:  # first after `reset`, which may have made a snapshot
            self._layers = self.world.image.layers
        if self.world.image.layers != self._layers:  # the changes before a snapshot are in its layer
            raise SandboxError(
                "its world was forked or snapshotted without keep_programs=True: earlier files are not in its state"
            )
        return await self.world.changes()

    @override
    async def load_state(self, state: bytes) -> None:
        """Make the world's files what they were."""
        assert self.world is not None, "the world runs from `reset` to `cleanup`"
        self._layers = self.world.image.layers
        await self.world.apply(state)

    @override
    async def cleanup(self) -> None:
        """End the world."""
        world, self.world = self.world, None
        if world is not None:
            await world.stop()


class WorldSandbox(PosixShellSandbox):
    """Runs what an agent's tools do in a [`World`][strands_env.sandbox.World], instead of on this machine.

    It gives the agent the tools `shell` and `file_editor`. Strands' other tools that use a sandbox run in it, too.

    Attributes:
        world: The world, which its owner starts and stops.

    Examples:
        >>> agent = Agent(model=model, sandbox=WorldSandbox(world))
    """

    def __init__(self, world: World, *, user: str | None = None) -> None:
        """Use a world.

        Args:
            world: A running world.
            user: User of commands, as for `World.execute`.
        """
        self.world = world
        self._user = user

    @override
    def get_tools(self) -> list[AgentTool]:
        """Return the tools `shell` and `file_editor`."""
        return [has_effect("idempotent")(tool) for tool in (make_shell(sandbox=self), make_file_editor(sandbox=self))]

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
        """Run a shell command; yield its output, and at the end its result.

        The result has the begin and the end of a long output. A command that exceeds a limit of the world has exit code
        137, as one that is killed, and its stderr names the limit.

        Args:
            command: The command.
            timeout: Time limit in seconds, at most the world's; None for that.
            cwd: Working directory; None for the image's.
            env: Environment variables in addition to those of the world.
            **kwargs: Ignored.

        Raises:
            SandboxTimeoutError: It ran for longer, of `strands.sandbox.errors`.
            SandboxError: The world is not running, or does not answer.
            ValueError: A variable's name is not valid.
        """
        validate_env_keys(env or {})
        most = self.world.limits.wall_s  # a model may choose the time
        seconds = most if timeout is None else min(timeout, most)
        pieces: asyncio.Queue[StreamChunk | None] = asyncio.Queue()
        decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in ("stdout", "stderr")}
        running = asyncio.ensure_future(
            self.world.execute(
                command,
                user=self._user,
                working_dir=cwd,
                env=env,
                timeout_s=seconds,
                on_output=lambda stream, data: pieces.put_nowait(StreamChunk(decoders[stream].decode(data), stream)),
            )
        )
        running.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            execution = await running
        finally:
            running.cancel()
            await asyncio.wait({running})
        stdout, stderr = (shown(output.decode(errors="replace")) for output in (execution.stdout, execution.stderr))
        if execution.ended == "timeout":
            raise timed_out(seconds, stdout, stderr)
        code, note = exit_status(execution)
        yield ExecutionResult(code, stdout, stderr + note)

    @override
    async def read_file(self, path: str, **kwargs: Any) -> bytes:
        """Return the content of a file."""
        return await self.world.read(path)

    @override
    async def write_file(self, path: str, content: bytes, **kwargs: Any) -> None:
        """Write a file, and the folders that it needs."""
        await self.world.write(path, content)


def exit_status(execution: Execution) -> tuple[int, str]:
    """Return the exit code of a command as a shell has it, and a note for stderr if it exceeded a limit."""
    code = execution.exit_code
    if code is None:
        return 128 + signal.SIGKILL, f"[ended: it exceeded the limit on {execution.ended}]\n"
    return (code if code >= 0 else 128 - code), ""


def shown(text: str) -> str:
    """Return output as a model sees it: the begin and the end, if it is long."""
    if len(text) <= SHOWN_CHARS:
        return text
    half = SHOWN_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def timed_out(seconds: float, stdout: str, stderr: str) -> SandboxTimeoutError:
    """Return the error of a command that ran for too long."""
    try:
        return SandboxTimeoutError(seconds, stdout, stderr)
    except TypeError:  # before Strands 1.56 it has no output
        return SandboxTimeoutError(seconds)
