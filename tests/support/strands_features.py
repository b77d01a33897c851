"""What the installed version of Strands can do, for tests of things that its lowest tested version cannot do yet."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
from strands import Agent


def needs_module(name: str) -> pytest.MarkDecorator:
    """Skips a test, and says why, where Strands has no such module yet."""
    return pytest.mark.skipif(not has_module(name), reason=f"this version of strands-agents has no {name}")


def needs_argument(method: str, argument: str) -> pytest.MarkDecorator:
    """Skips a test, and says why, where a method of `Agent` does not take an argument yet."""
    taken = argument in inspect.signature(getattr(Agent, method)).parameters
    return pytest.mark.skipif(not taken, reason=f"Agent.{method} of this version of strands-agents takes no {argument}")


def has_module(name: str) -> bool:
    """Whether Strands has a module."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
