"""An agent with a calculator: the value of an arithmetic expression, without `eval` and within bounds.

Whole numbers are exact and have at most 3,000 digits; what would be larger is refused before it is computed. Nesting
and length are bounded, so every expression takes well under 0.1 s.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from strands import tool

from ..core import Environment

Number = int | float

MAX_EXPRESSION_CHARS = 1000
"""Characters."""
MAX_BITS = 9966
"""Bits of a whole number: 3,000 digits."""
MAX_NESTING = 60
MAX_FACTORIAL = 1000

_CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "\0"})


class ArithmeticExpressionError(ValueError):
    """An expression has no value here; the message is for whoever wrote it."""


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
    """Tasks for an agent with a calculator."""

    default_system_prompt_path: ClassVar[str | Path | None] = Path(__file__).parent / "prompts" / "calculator.md"

    def get_tools(self) -> Sequence[Any]:
        """The calculator."""
        return [calculator]


def evaluate(expression: str) -> Number:
    """Compute an expression.

    Numbers; `+ - * / // % **`, with `^` for `**`; parentheses; `pi`, `e`, `tau`; and the functions that the error text
    for an unknown one lists. `/` gives a whole number where it comes out even.

    Raises:
        ArithmeticExpressionError: It is anything else, too long or nested, too large, or has no real value.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ArithmeticExpressionError(
            f"the expression has {len(expression)} characters, and {MAX_EXPRESSION_CHARS} are allowed"
        )
    text = expression.translate(_SIGNS).replace("\0", "**").strip()
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ArithmeticExpressionError(f"not an arithmetic expression: {_shown(expression)}") from None
    try:
        return _value(tree.body, 0)
    except ZeroDivisionError:
        raise ArithmeticExpressionError(f"division by zero in {_shown(expression)}") from None
    except OverflowError:
        raise ArithmeticExpressionError(f"the result of {_shown(expression)} is too large") from None
    except ArithmeticExpressionError:
        raise
    except (TypeError, ValueError) as error:
        raise ArithmeticExpressionError(f"{_shown(expression)}: {error}") from None


def as_text(value: Number) -> str:
    """A value as a calculator shows it: 15 digits, whole numbers in full."""
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return str(int(value))
    return f"{value:.15g}"


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_NESTING:
        raise ArithmeticExpressionError(f"the expression is nested more than {MAX_NESTING} deep")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _checked(number)
        case ast.BinOp() if type(node.op) in _BINARY:
            # Long sums nest to the left: that is length, and no depth.
            left: ast.expr = node
            chain = []
            while isinstance(left, ast.BinOp) and (operation := _BINARY.get(type(left.op))):
                chain.append((operation, left.right))
                left = left.left
            value = _value(left, depth + 1)
            for operation, right in reversed(chain):
                value = _checked(operation(value, _value(right, depth + 1)))
            return value
        case ast.UnaryOp(op, operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand, depth + 1))
        case ast.Name(name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Name(name):
            raise ArithmeticExpressionError(f"{name} has no value; write numbers, or {', '.join(_CONSTANTS)}")
        case ast.Call(ast.Name(name), arguments, []) if name in _FUNCTIONS:
            return _checked(_FUNCTIONS[name](*(_value(argument, depth + 1) for argument in arguments)))
        case ast.Call(ast.Name(name), keywords=[]):
            raise ArithmeticExpressionError(f"there is no function {name}; there are {', '.join(_FUNCTIONS)}")
    raise ArithmeticExpressionError(
        "only numbers, + - * / // % ** (or ^), parentheses and functions are allowed; here stands something else:"
        f" {_shown(ast.unparse(node))}"
    )


def _checked(value: Any) -> Number:
    if isinstance(value, complex):
        raise ArithmeticExpressionError("the result is not a real number")
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise OverflowError
        return value
    if not math.isfinite(value):
        raise OverflowError
    return float(value)


def _divide(left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int) and right and left % right == 0:
        return left // right
    return left / right


def _power(base: Number, exponent: Number) -> Number:
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and abs(base) > 1
        and (base.bit_length() - 1) * exponent > MAX_BITS
    ):
        raise OverflowError
    return base**exponent


def _factorial(value: Number) -> int:
    whole = _whole(value)
    if not 0 <= whole <= MAX_FACTORIAL:
        raise ArithmeticExpressionError(f"factorial takes 0 to {MAX_FACTORIAL}, not {as_text(value)}")
    return math.factorial(whole)


def _choose(n: Number, k: Number) -> int:
    if not 0 <= _whole(k) <= MAX_FACTORIAL:
        raise ArithmeticExpressionError(f"comb takes a second number of 0 to {MAX_FACTORIAL}, not {as_text(k)}")
    return math.comb(_whole(n), _whole(k))


def _whole(value: Number) -> int:
    if value != int(value):
        raise ArithmeticExpressionError(f"{as_text(value)} is not a whole number")
    return int(value)


def _round(value: Number, digits: Number = 0) -> Number:
    if not -400 <= _whole(digits) <= 400:
        raise ArithmeticExpressionError("round takes -400 to 400 digits")
    return round(value, _whole(digits))


def _root(value: Number) -> Number:
    if isinstance(value, int) and value >= 0 and math.isqrt(value) ** 2 == value:
        return math.isqrt(value)
    return math.sqrt(value)


_BINARY: dict[type[ast.operator], Callable[[Number, Number], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "comb": _choose,
    "cos": math.cos,
    "exp": math.exp,
    "factorial": _factorial,
    "floor": math.floor,
    "gcd": lambda *values: math.gcd(*(_whole(value) for value in values)),
    "lcm": lambda *values: math.lcm(*(_whole(value) for value in values)),
    "ln": math.log,
    "log": math.log,
    "log10": math.log10,
    "log2": math.log2,
    "max": max,
    "min": min,
    "round": _round,
    "sin": math.sin,
    "sqrt": _root,
    "tan": math.tan,
}


def _shown(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
