"""A calculator as a Strands tool: plain arithmetic, evaluated without `eval`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from strands import tool

BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
LONGEST_EXPRESSION = 200
"""Maximum number of characters. A model may write anything; this bounds nesting and the size of numbers."""


def evaluate(expression: str) -> float:
    """Return the value of an arithmetic expression of numbers, `+ - * /` and parentheses.

    Raises:
        ValueError: The expression is anything else, is too long, or divides by zero.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"the expression is longer than {LONGEST_EXPRESSION} characters")
    try:
        return value_of(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"not an arithmetic expression: {expression}") from None
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{expression}: {error}") from None


def value_of(node: ast.expr) -> float:
    """Return the value of a parsed expression."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and (binary := BINARY.get(type(node.op))):
        return binary(value_of(node.left), value_of(node.right))
    if isinstance(node, ast.UnaryOp) and (unary := UNARY.get(type(node.op))):
        return unary(value_of(node.operand))
    raise ValueError(f"only numbers, + - * / and parentheses are allowed, not {ast.unparse(node)}")


@tool
def calculator(expression: str) -> str:
    """Calculate an arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses.
    """
    return f"{evaluate(expression):.10g}"
