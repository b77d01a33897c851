"""An agent that runs Python in a session of AWS Bedrock AgentCore's code interpreter."""

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
"""Characters."""


class AgentCoreCodeEnvironment(Environment):
    """Tasks for an agent that runs Python in AgentCore's code interpreter.

    Each step has a session of its own, opened when the first program runs and stopped by `cleanup`; what a program
    defines is there for the next one. One environment runs one step at a time: make one per step.
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
        """Set up the environment; nothing is opened yet.

        Args:
            model_factory: As for `Environment`.
            reward_fn: As for `Environment`.
            system_prompt: As for `Environment`.
            *args: As for `Environment`.
            region: AWS region.
            identifier: The code interpreter.
            session_timeout: Seconds after which AWS ends a session by itself.
            client_factory: Makes the client of a session, with `start`, `invoke` and `stop` like those of AgentCore's
                `CodeInterpreter`; None for that.
            **kwargs: As for `Environment`.

        Raises:
            ImportError: `bedrock_agentcore` is not installed, and there is no other client.
            ValueError: Neither a region nor a client is given.
        """
        super().__init__(model_factory, reward_fn, system_prompt, *args, **kwargs)
        if client_factory is None:
            if region is None:
                raise ValueError("AgentCore's code interpreter needs a region")
            client_factory = _own_client(region)
        self._client_factory = client_factory
        self._identifier = identifier
        self._session_timeout = session_timeout
        self._client: Any = None
        self._one_at_a_time = asyncio.Lock()

    def get_tools(self) -> Sequence[Any]:
        """The tool that runs programs."""

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
        """Ends the episode, without a reward, where the service does not work."""
        return [EndOnBackendErrors()]

    async def cleanup(self) -> None:
        """Stop the session; may be called again."""
        async with self._one_at_a_time:
            client, self._client = self._client, None
            if client is not None:
                await invoke(client.stop, grace=None)

    async def _execute(self, code: str) -> tuple[str, bool]:
        """Run code in the session: its output, and whether it failed."""
        # A session runs one program at a time, to its end: the next call has to find it in order.
        async with self._one_at_a_time:
            try:
                return await invoke(self._execute_now, code, grace=None)
            except Exception as error:  # whatever it is, it is not the code's: that comes as a result
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
        raise ImportError(
            "AgentCore's code interpreter needs bedrock-agentcore: pip install 'strands-sglang[agentcore]'"
        ) from error
    return lambda: CodeInterpreter(region)


def _read(answer: Mapping[str, Any]) -> tuple[str, bool]:
    """What the service's event stream says: the output, and whether the code failed."""
    texts: list[str] = []
    failed = False
    for event in answer.get("stream") or ():
        if "result" not in event:  # an exception of the service, named by its key
            name, what = next(iter(event.items()), ("nothing", ""))
            raise RuntimeError(f"the code interpreter answered with {name}: {what}")
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
