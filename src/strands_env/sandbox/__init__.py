"""Runs Python code that nobody trusts, in a process of its own that cannot reach this one."""

from .limits import DEFAULT_LIMITS, SandboxLimits
from .python_sandbox import (
    MODES,
    Ended,
    Execution,
    Mode,
    PythonSandbox,
    SandboxError,
    SandboxUnavailableError,
    available_modes,
)

__all__ = [
    "DEFAULT_LIMITS",
    "MODES",
    "Ended",
    "Execution",
    "Mode",
    "PythonSandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxUnavailableError",
    "available_modes",
]
