"""What becomes of an episode whose tools cannot work: it ends as an infrastructure error, and not with a bad reward.

Strands shows whatever a tool raises to the model, which would then be judged for a machine's fault.
"""

from __future__ import annotations

from typing import Any

from strands.hooks import HookProvider, HookRegistry
from strands.hooks.events import AfterToolCallEvent

from strands_sglang import SGLangClientError


class BackendError(SGLangClientError):
    """What an environment's tools run on does not work; the cause says what. Ends an episode as a server does."""


class EndOnBackendErrors(HookProvider):
    """Ends the episode when a tool raised one of some errors."""

    def __init__(self, *errors: type[Exception]) -> None:
        """Name the errors that say nothing of the policy."""
        self._errors = errors

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register with the episode's agent."""
        registry.add_callback(AfterToolCallEvent, self._check)

    async def _check(self, event: AfterToolCallEvent) -> None:
        error = event.exception
        if isinstance(error, BackendError):  # raised here before: Strands asks again for what a hook raises
            raise error
        if isinstance(error, self._errors):
            raise BackendError(f"{event.tool_use['name']}: {error}") from error
