"""An environment whose agent runs Python in AWS Bedrock AgentCore's code interpreter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from strands import tool
from strands.hooks import HookProvider

from ..core import Environment, ModelFactory, RewardFunction
from ..core.supervision import invoke
from .backends import BackendError, EndOnBackendErrors

MAX_OUTPUT_CHARS = 32_000
"""Most characters of a program's output."""


class AgentCoreCodeEnvironment(Environment):
    """An environment with the tool `execute_python_code`, which runs Python in AgentCore's code interpreter.

    Each step has its own session, which starts with the first program and is stopped by `cleanup`. Variables are kept
    between the programs of a step. An environment runs one step at a time; create one per step. If the service does not
    work, the episode ends with the outcome `infrastructure_error` and without a reward.

    Needs the `agentcore` extra.
    """

    default_system_prompt_path: ClassVar[str | Path | None] = Path(__file__).parent / "prompts" / "code_interpreter.md"

    def __init__(
        self,
        model_factory: ModelFactory,
        reward_fn: RewardFunction | None = None,
        system_prompt: str | None = None,
        *args: Any,
        region: str | None = None,
        identifier: str = "aws.codeinterpreter.v1",
        session_timeout: int = 900,
        client_factory: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Create the environment. No session is opened before the first program.

        Args:
            model_factory: Function that returns the model of a step, as for `Environment`.
            reward_fn: Reward function, as for `Environment`.
            system_prompt: System prompt, as for `Environment`.
            *args: Other positional arguments of `Environment`.
            region: AWS region; required unless `client_factory` is given.
            identifier: Identifier of the code interpreter.
            session_timeout: Seconds after which AWS ends a session.
            client_factory: Function that returns the client of a session, with the methods `start`, `invoke` and `stop`
                of AgentCore's `CodeInterpreter`; None for a `CodeInterpreter`.
            **kwargs: Other keyword arguments of `Environment`.

        Raises:
            ImportError: The `agentcore` extra is not installed, and `client_factory` is None.
            ValueError: Neither `region` nor `client_factory` is given.
        """
        super().__init__(model_factory, reward_fn, system_prompt, *args, **kwargs)
        if client_factory is None:
            if region is None:
                raise ValueError("pass region= for AgentCore's code interpreter")
            client_factory = _own_client(region)
        self._client_factory = client_factory
        self._identifier = identifier
        self._session_timeout = session_timeout
        self._client: Any = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def restart_only(self) -> str | None:
        """Why an episode cannot continue elsewhere: its interpreter is a remote session."""
        return "an interpreter of AgentCore cannot be copied"

    def get_tools(self) -> Sequence[Any]:
        """Return the tool that runs programs."""

        @tool
        async def execute_python_code(code: str) -> dict[str, Any]:
            """Execute Python code and return what it prints. Variables are kept for the next call.

            Args:
                code: The code. Only what it prints is returned.
            """
            text, failed = await self._execute(code)
            return {"status": "error" if failed else "success", "content": [{"text": text}]}

        return [execute_python_code]

    def get_hooks(self) -> Sequence[HookProvider]:
        """Return the hook that ends the episode if the service does not work."""
        return [EndOnBackendErrors()]

    async def cleanup(self) -> None:
        """Stop the session. May be called twice."""
        async with self._one_at_a_time:
            client, self._client = self._client, None
            if client is not None:
                await invoke(client.stop, grace=None)

    async def _execute(self, code: str) -> tuple[str, bool]:
        """Run code in the session; return its output, and whether it failed."""
        # A session runs one program at a time, to its end.
        async with self._one_at_a_time:
            try:
                return await invoke(self._execute_now, code, grace=None)
            except Exception as error:  # failures of the code itself are results, not exceptions
                raise BackendError(f"the code interpreter does not answer: {error}") from error

    def _execute_now(self, code: str) -> tuple[str, bool]:
        if self._client is None:
            client = self._client_factory()
            client.start(identifier=self._identifier, session_timeout_seconds=self._session_timeout)
            self._client = client
        return _read(self._client.invoke("executeCode", {"code": code, "language": "python", "clearContext": False}))


def _own_client(region: str) -> Callable[[], Any]:
    try:
        from bedrock_agentcore.tools.code_interpreter_client import CodeInterpreter
    except ImportError as error:
        raise ImportError("bedrock-agentcore is not installed: pip install -e '.[agentcore]'") from error
    return lambda: CodeInterpreter(region)


def _read(answer: Mapping[str, Any]) -> tuple[str, bool]:
    """Read the service's event stream; return the output, and whether the code failed."""
    texts: list[str] = []
    failed = False
    for event in answer.get("stream") or ():
        if "result" not in event:  # an exception of the service: its key is the name
            name, details = next(iter(event.items()), ("nothing", ""))
            raise RuntimeError(f"the code interpreter answered with {name}: {details}")
        result = event["result"]
        failed = failed or bool(result.get("isError"))
        structured = result.get("structuredContent") or {}
        if "stdout" in structured or "stderr" in structured:
            texts += [structured.get("stdout") or "", structured.get("stderr") or ""]
            failed = failed or structured.get("exitCode") not in (None, 0)
        else:
            texts += [block["text"] for block in result.get("content") or [] if block.get("type") == "text"]
    text = "\n".join(part.rstrip("\n") for part in texts if part.strip())
    if len(text) > MAX_OUTPUT_CHARS:
        text = f"{text[:MAX_OUTPUT_CHARS]}\n[the output was cut: print less]"
    return text or "[nothing was printed: print what you want to see]", failed
