"""Ready-made environments."""

from .agentcore import AgentCoreCodeEnvironment
from .arithmetic import ArithmeticExpressionError, evaluate
from .backends import BackendError
from .calculator import CalculatorEnvironment, calculator
from .mcp import MCPEnvironment
from .python import PythonEnvironment, python_tool

__all__ = [
    "AgentCoreCodeEnvironment",
    "ArithmeticExpressionError",
    "BackendError",
    "CalculatorEnvironment",
    "MCPEnvironment",
    "PythonEnvironment",
    "calculator",
    "evaluate",
    "python_tool",
]
