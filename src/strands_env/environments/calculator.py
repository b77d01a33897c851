"""An environment with a calculator, which evaluates arithmetic expressions without `eval` and within limits.

Integers are exact and have at most 3,000 digits; larger results are refused before they are computed. Nesting and
length are limited, so every expression takes well under 0.1 s.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from strands import tool

from ..core import Environment, has_effect

Number = int | float

MAX_EXPRESSION_CHARS = 1000
"""Most characters of an expression."""
MAX_BITS = 9966
"""Most bits of an integer: 3,000 digits."""
MAX_NESTING = 60
MAX_FACTORIAL = 1000

_CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**"})


class ArithmeticExpressionError(ValueError):
    """An expression cannot be evaluated. The message is written for the model that sent it."""


@has_effect("pure")
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
    """An environment with the tool `calculator`.

    It evaluates arithmetic without `eval`, and refuses results that would be too large before computing them. It takes
    all arguments of [`Environment`][strands_env.core.Environment].

    Examples:
        >>> env = CalculatorEnvironment(model_factory, MathReward(), max_tool_iterations=5)
    """

    default_system_prompt_path: ClassVar[str | Path | None] = Path(__file__).parent / "prompts" / "calculator.md"

    def get_tools(self) -> Sequence[Any]:
        """Return the calculator."""
        return [calculator]


def evaluate(expression: str) -> Number:
    """Evaluate an arithmetic expression.

    It may contain numbers, `+ - * / // % **` (also `^` for `**`), parentheses, the constants `pi`, `e` and `tau`, and
    the functions `abs`, `ceil`, `comb`, `cos`, `exp`, `factorial`, `floor`, `gcd`, `lcm`, `ln`, `log`, `log10`, `log2`,
    `max`, `min`, `round`, `sin`, `sqrt` and `tan`. Integers are exact. `/` returns an integer if the division is even.

    Args:
        expression: Expression of at most 1,000 characters.

    Returns:
        The value: a finite number, with at most 3,000 digits if it is an integer.

    Raises:
        ArithmeticExpressionError: The expression is invalid, too long or too deeply nested, or its value is too large
            or not a real number.

    Examples:
        >>> evaluate("2^10 + 1")
        1025
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ArithmeticExpressionError(
            f"the expression has {len(expression)} characters; {MAX_EXPRESSION_CHARS} are allowed"
        )
    text = expression.translate(_SIGNS).strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `1if 2else 3` is valid, but Python would print a warning
            tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ArithmeticExpressionError(f"not an arithmetic expression: {_shown(expression)}") from None
    try:
        return _value(tree.body, 0)
    except ZeroDivisionError:
        raise ArithmeticExpressionError(f"division by zero in {_shown(expression)}") from None
    except OverflowError:
        raise ArithmeticExpressionError(f"the result of {_shown(expression)} is too large") from None
    except RecursionError:
        raise ArithmeticExpressionError(f"the expression is nested more than {MAX_NESTING} deep") from None
    except ArithmeticExpressionError:
        raise
    except TypeError:
        raise ArithmeticExpressionError(f"{_shown(expression)}: a function has too few or too many arguments") from None
    except ValueError as error:
        raise ArithmeticExpressionError(f"{_shown(expression)}: {error}") from None


def as_text(value: Number) -> str:
    """Format a value as a calculator does: 15 digits, integers in full."""
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
            # Long sums nest to the left; this counts as length, not as depth.
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
        f"only numbers, + - * / // % ** (or ^), parentheses and functions are allowed, not {_shown(ast.unparse(node))}"
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
    integer = _integer(value)
    if not 0 <= integer <= MAX_FACTORIAL:
        raise ArithmeticExpressionError(f"factorial takes 0 to {MAX_FACTORIAL}, not {as_text(value)}")
    return math.factorial(integer)


def _choose(n: Number, k: Number) -> int:
    whole, chosen = _integer(n), _integer(k)
    if not 0 <= chosen <= MAX_FACTORIAL:
        raise ArithmeticExpressionError(f"comb takes a second number of 0 to {MAX_FACTORIAL}, not {as_text(k)}")
    # comb(n, k) is at least (n / k)**k: what is too large is refused before it is computed.
    fewer = min(chosen, whole - chosen)
    if fewer * (whole.bit_length() - 1 - fewer.bit_length()) > MAX_BITS:
        raise OverflowError
    return math.comb(whole, chosen)


def _common_multiple(*values: Number) -> int:
    multiple = 1
    for value in values:  # one by one: without a limit in between, the product of all would be computed
        multiple = math.lcm(multiple, _integer(value))
        _checked(multiple)
    return multiple


def _integer(value: Number) -> int:
    if value != int(value):
        raise ArithmeticExpressionError(f"{as_text(value)} is not a whole number")
    return int(value)


def _round(value: Number, digits: Number = 0) -> Number:
    if not -400 <= _integer(digits) <= 400:
        raise ArithmeticExpressionError("round takes -400 to 400 digits")
    return round(value, _integer(digits))


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
    "gcd": lambda *values: math.gcd(*(_integer(value) for value in values)),
    "lcm": _common_multiple,
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
