"""Runs Python code that nobody trusts, in a process of its own that cannot reach this one."""

from .python_sandbox import (
    DEFAULT_LIMITS,
    MODES,
    Ended,
    Execution,
    Mode,
    PythonSandbox,
    SandboxError,
    SandboxLimits,
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
