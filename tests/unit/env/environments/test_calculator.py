"""The calculator: Python's own arithmetic on what is small, and a clear error at once on what is not."""

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_env.environments import ArithmeticExpressionError, calculator, evaluate
from strands_env.environments.calculator import as_text

NUMBERS = st.one_of(
    st.integers(0, 200).map(str),
    st.floats(0, 1000, allow_nan=False).map(lambda x: f"{x:.3f}"),
)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(" ".join),
        st.tuples(inner, st.sampled_from(["**2", "**3", "**0", "**-1"])).map(lambda parts: f"({parts[0]}){parts[1]}"),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
        inner.map(lambda text: f"abs({text})"),
        st.tuples(inner, inner).map(lambda pair: f"max({pair[0]}, {pair[1]})"),
    ),
    max_leaves=8,
)


@settings(max_examples=500)
@given(EXPRESSIONS)
def test_small_expressions_have_the_value_that_python_gives_them(expression: str) -> None:
    try:
        expected = eval(expression)
    except (ZeroDivisionError, OverflowError):
        with pytest.raises(ArithmeticExpressionError):
            evaluate(expression)
        return
    value = evaluate(expression)
    if isinstance(expected, int):
        assert value == expected
    else:
        assert value == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(st.integers(-(10**40), 10**40), st.integers(-(10**40), 10**40), st.sampled_from(["+", "-", "*"]))
def test_whole_numbers_are_exact(left: int, right: int, sign: str) -> None:
    assert as_text(evaluate(f"{left} {sign} ({right})")) == str(eval(f"{left} {sign} ({right})"))


@settings(max_examples=500)
@given(st.one_of(st.text(max_size=200), st.text(alphabet="0123456789+-*/%().^e,x _=[]", max_size=200)))
def test_any_text_has_a_value_or_an_error(text: str) -> None:
    try:
        assert math.isfinite(evaluate(text))
    except ArithmeticExpressionError as error:
        assert 0 < len(str(error)) < 600
    except OverflowError:  # a whole number beyond what math.isfinite takes
        pass


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("2^10", "1024"),
        ("2^10 + 1", "1025"),
        ("-2**2", "-4"),
        ("6/2", "3"),
        ("1/3", "0.333333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("7 × 8 ÷ 4 − 1", "13"),
        ("sqrt(144)", "12"),
        ("sqrt(2)", "1.4142135623731"),
        ("round(2.567, 2)", "2.57"),
        ("factorial(20)", "2432902008176640000"),
        ("comb(50, 6)", "15890700"),
        ("gcd(12, 18, 27)", "3"),
        ("2 * pi", "6.28318530717959"),
        ("log(e)", "1"),
        ("10**20 / 10", "10000000000000000000"),
        ("1e300 * 1e8", "1e+308"),
        ("1" + "+1" * 499, "500"),
    ],
)
def test_results_look_as_a_calculator_shows_them(expression: str, shown: str) -> None:
    got = as_text(evaluate(expression))
    assert got == shown or float(got) == pytest.approx(float(shown), rel=1e-14)


HOSTILE = {
    "9**9**9": "too large",
    "9**9**9**9": "too large",
    "-(9**99999)": "too large",
    "10**3001": "too large",
    "factorial(10**9)": "factorial takes",
    "factorial(factorial(10))": "factorial takes",
    "comb(10**9, 10**8)": "comb takes",
    "1e308 * 10": "too large",
    "exp(1000)": "too large",
    "(-8) ** 0.5": "not a real number",
    "sqrt(-1)": "math domain|nonnegative|positive",
    "log(0)": "math domain|positive",
    "1/0": "division by zero",
    "0**-1": "division by zero",
    "1 % 0": "division by zero",
    "1 // 0": "division by zero",
    "1" * 1001: "characters",
    "(" * 400 + "1" + ")" * 400: "not an arithmetic expression|nested",
    "-" * 900 + "1": "nested|not an arithmetic expression",
    "abs(" * 90 + "1" + ")" * 90: "nested|not an arithmetic expression",
    "2**(" * 90 + "1" + ")" * 90: "nested|not an arithmetic expression",
    "__import__('os').system('true')": "allowed",
    "().__class__": "allowed",
    "open('x')": "there is no function open",
    "max(*[1,2])": "allowed",
    "abs(x=1)": "allowed",
    "[i for i in range(9)]": "allowed",
    "'a' * 10**9": "allowed",
    "True + 1": "allowed",
    "1 if 1 else 2": "allowed",
    "lambda: 1": "allowed",
    "1j * 1j": "allowed",
    "x + 1": "x has no value",
    "abs()": "abs",
    "sqrt(1, 2)": "sqrt|argument",
    "round(1.5, 10**9)": "digits",
    "gcd(1.5, 2)": "not a whole number",
    "1 +": "not an arithmetic expression",
    "": "not an arithmetic expression",
    "1\n2": "not an arithmetic expression",
    "1 \x00": "not an arithmetic expression",
    "\ud800": "not an arithmetic expression",
    "2 = 2": "not an arithmetic expression",
    "1_000_000_000 ** 400": "too large",
    "floor(1e308 * 1.0) ** 20": "too large",
    "10 ** 400 * 1.5": "too large",
    "2.5 ** (10**400)": "too large",
}


@pytest.mark.parametrize("expression", HOSTILE.keys(), ids=lambda text: text[:20])
def test_what_cannot_be_computed_says_why_at_once(expression: str) -> None:
    began = time.process_time()
    with pytest.raises(ArithmeticExpressionError, match=HOSTILE[expression]) as refused:
        evaluate(expression)
    assert time.process_time() - began < 0.5
    assert len(str(refused.value)) < 600


async def test_the_tool_gives_errors_to_the_model_and_does_not_raise() -> None:
    results = []
    for expression in ("2^10", "1/0"):
        use = {"toolUseId": "1", "name": "calculator", "input": {"expression": expression}}
        async for event in calculator.stream(use, {}):
            results.append(event.get("tool_result", event))
    texts = [str(result) for result in results]
    assert any("1024" in text and "success" in text for text in texts)
    assert any("division by zero" in text and "'error'" in text for text in texts)
