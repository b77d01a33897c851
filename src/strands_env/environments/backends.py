"""Failures of what an environment's tools run on: they end the episode as an infrastructure error, without a reward.

Strands shows exceptions of tools to the model, which would then be judged for a failure of the machine.
"""

from __future__ import annotations

from typing import Any

from strands.hooks import HookProvider, HookRegistry
from strands.hooks.events import AfterToolCallEvent

from strands_sglang import SGLangClientError


class BackendError(SGLangClientError):
    """The backend of an environment's tools failed: a sandbox, a service or an MCP server. The cause has the details.

    A tool that raises it ends its episode with the outcome `infrastructure_error`.
    """


class EndOnBackendErrors(HookProvider):
    """Ends the episode when a tool raises one of the given errors."""

    def __init__(self, *errors: type[Exception]) -> None:
        """Set the errors that say nothing about the policy."""
        self._errors = errors

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register with the episode's agent."""
        registry.add_callback(AfterToolCallEvent, self._check)

    async def _check(self, event: AfterToolCallEvent) -> None:
        error: BaseException | None = event.exception
        while error is not None:  # Strands' own tools raise errors of theirs from it
            if isinstance(error, BackendError):  # Strands calls the hook again with what it raised
                raise error
            if isinstance(error, self._errors):
                raise BackendError(f"{event.tool_use['name']}: {error}") from error
            error = error.__cause__
