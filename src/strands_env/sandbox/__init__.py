"""Runs untrusted Python programs in isolated processes."""

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
