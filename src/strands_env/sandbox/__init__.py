"""Worlds for agents, and a sandbox for untrusted Python programs."""

from .images import IMAGE_LIMITS, build_image, load_image, pull_image
from .python_sandbox import MODES, PythonSandbox, available_modes
from .world import (
    DEFAULT_LIMITS,
    WORLD_LIMITS,
    Ended,
    Execution,
    Image,
    ImageError,
    Mode,
    Network,
    SandboxError,
    SandboxLimits,
    SandboxUnavailableError,
    World,
)

__all__ = [
    "DEFAULT_LIMITS",
    "IMAGE_LIMITS",
    "MODES",
    "WORLD_LIMITS",
    "Ended",
    "Execution",
    "Image",
    "ImageError",
    "Mode",
    "Network",
    "PythonSandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxUnavailableError",
    "World",
    "available_modes",
    "build_image",
    "load_image",
    "pull_image",
]
