"""An agent with a calculator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from strands import tool

from ..core import Environment
from .arithmetic import ArithmeticExpressionError, as_text, evaluate


@tool
async def calculator(expression: str) -> dict[str, Any]:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses; pi, e; sqrt, abs, round, min, max, floor, ceil, exp, log,
            sin, cos, tan, factorial, comb, gcd, lcm.
    """
    try:
        return {"status": "success", "content": [{"text": as_text(evaluate(expression))}]}
    except ArithmeticExpressionError as error:
        return {"status": "error", "content": [{"text": f"Error: {error}"}]}


class CalculatorEnvironment(Environment):
    """Tasks for an agent with a calculator, which evaluates without `eval` and within bounds (`arithmetic`)."""

    default_system_prompt_path: ClassVar[str | Path | None] = Path(__file__).parent / "prompts" / "calculator.md"

    def get_tools(self) -> Sequence[Any]:
        """The calculator."""
        return [calculator]
