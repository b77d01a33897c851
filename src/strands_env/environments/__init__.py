"""Ready-made environments."""

from .agentcore import AgentCoreCodeEnvironment
from .backends import BackendError
from .calculator import ArithmeticExpressionError, CalculatorEnvironment, calculator, evaluate
from .mcp import MCPEnvironment
from .mcp_servers import MCPServersEnvironment
from .python import PythonEnvironment, python_tool
from .reasoning_gym import ReasoningGymEnvironment, ReasoningGymReward, reasoning_gym_tasks
from .world import SandboxedEnvironment, WorldEnvironment, WorldSandbox

__all__ = [
    "AgentCoreCodeEnvironment",
    "ArithmeticExpressionError",
    "BackendError",
    "CalculatorEnvironment",
    "MCPEnvironment",
    "MCPServersEnvironment",
    "PythonEnvironment",
    "ReasoningGymEnvironment",
    "ReasoningGymReward",
    "SandboxedEnvironment",
    "WorldEnvironment",
    "WorldSandbox",
    "calculator",
    "evaluate",
    "python_tool",
    "reasoning_gym_tasks",
]
