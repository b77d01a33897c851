"""Worlds for agents, and a sandbox for untrusted Python programs."""

from .python_sandbox import MODES, PythonSandbox, available_modes
from .world import (
    DEFAULT_LIMITS,
    WORLD_LIMITS,
    Ended,
    Execution,
    Image,
    Mode,
    Network,
    SandboxError,
    SandboxLimits,
    SandboxUnavailableError,
    World,
)

__all__ = [
    "DEFAULT_LIMITS",
    "MODES",
    "WORLD_LIMITS",
    "Ended",
    "Execution",
    "Image",
    "Mode",
    "Network",
    "PythonSandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxUnavailableError",
    "World",
    "available_modes",
]
