"""Runs Python code that nobody trusts, in a process of its own that cannot reach this one."""

from .limits import DEFAULT_LIMITS, SandboxLimits
from .python_sandbox import (
    MODES,
    Ended,
    Execution,
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
    "PythonSandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxUnavailableError",
    "available_modes",
]
