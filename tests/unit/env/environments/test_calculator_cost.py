"""No expression holds the event loop: what would be large is refused before it is computed."""

import math
import random
import time

import pytest

from strands_env.environments.calculator import ArithmeticExpressionError, evaluate

PIECES = ["9**3138", "10**2999", "2**9965", "factorial(1000)", "factorial(999)", "7", "1000", "0", "-3", "0.5", "pi"]
FUNCTIONS = ["comb", "lcm", "gcd", "max", "round", "log", "abs", "sqrt", "floor", "sin", "factorial"]
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "^"]


def cpu_seconds(expression):
    began = time.thread_time()
    try:
        evaluate(expression)
    except ArithmeticExpressionError:
        pass
    return time.thread_time() - began


def drawn(chance, depth=0):
    if depth > 4 or chance.random() < 0.3:
        return chance.choice(PIECES)
    if chance.random() < 0.5:
        return f"({drawn(chance, depth + 1)}{chance.choice(OPERATORS)}{drawn(chance, depth + 1)})"
    arguments = ",".join(drawn(chance, depth + 1) for _ in range(chance.choice([1, 2, 2, 8])))
    return f"{chance.choice(FUNCTIONS)}({arguments})"


@pytest.mark.parametrize(
    "expression",
    [
        "comb(10**2999,1000)",
        "comb(10**2999,1000)+" * 40 + "1",
        "comb(10**100,400)",
        "lcm(" + ",".join(f"{base}**{9000 // base.bit_length()}" for base in range(3, 90)) + ")",
        "gcd(" + ",".join(["9**3138"] * 100) + ")",
        "*".join(["9**3138%7"] * 100),
        "(" * 50 + "9**3138" + ")%7" * 50,
    ],
)
def test_large_results_cost_little(expression):
    assert cpu_seconds(expression) < 0.5


def test_random_expressions_cost_little():
    chance = random.Random(0)
    expressions = [drawn(chance)[:1000] for _ in range(2000)]
    slowest = max(expressions, key=cpu_seconds)
    assert cpu_seconds(slowest) < 0.5, slowest


def test_combinations_and_multiples_are_exact():
    assert evaluate("comb(2000, 1000) % 1000007") == math.comb(2000, 1000) % 1000007
    assert evaluate("comb(10**2999, 1)") == 10**2999
    assert evaluate("comb(5, 0)") == 1 and evaluate("comb(3, 5)") == 0 and evaluate("comb(10**30, 3)") > 10**88
    assert evaluate("lcm(4, 6, 10)") == 60 and evaluate("lcm()") == 1 and evaluate("lcm(-4, 6)") == 12
    assert evaluate("lcm(0, 5)") == 0


@pytest.mark.parametrize(
    "expression", ["2\x003", "2\x00", "~" * 900 + "1", "-" * 900 + "1", "(" * 400 + "1" + ")" * 400]
)
def test_what_is_no_arithmetic_is_a_named_error(expression):
    with pytest.raises(ArithmeticExpressionError):
        evaluate(expression)
