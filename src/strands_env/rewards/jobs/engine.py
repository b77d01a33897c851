"""Comparison of two formulas by math-verify, and the guards around it.

math-verify multiplies letters, rounds floats and drops small terms. So words and adjacent capitals are passed as one
symbol each and decimals as fractions, and formulas that it finds equal are also compared numerically with 50 digits.
It evaluates formulas, too: an answer may leave unevaluated only operations that the ground truth has.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from .notation import DEGREE, FUNCTIONS, compact

_EXTRACTION = (
    LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="all", equations=False
        ),
    ),
)
_DIGITS = 50
_TOLERANCE = sympy.Float("1e-30", _DIGITS)
_POINTS = tuple(sympy.Rational(*ratio) for ratio in ((271, 113), (-355, 339), (17, 29), (1543, 211)))
_OPERATIONS = {
    "integral": r"\\i*int|\\oint",
    "sum": r"\\sum",
    "product": r"\\prod",
    "limit": r"\\lim",
    "derivative": r"\\frac\s*\{\s*(?:d|\\partial)|\\partial|(?<=[a-z])'",
    "determinant": r"\\det|[vV]matrix",
    "divisors": r"\\(?:gcd|lcm)|gcd|lcm",
    "remainder": r"\\(?:mod|pmod|equiv)|%",
    "largest": r"\\(?:max|min|sup|inf)(?![a-z])",
    "factorial": r"!",
    "binomial": r"\\binom",
    "rounding": r"\\l(?:floor|ceil)",
    "absolute value": r"\|",
    "trigonometry": r"\\?(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?(?![a-z])",
    "logarithm": r"\\(?:log|ln|lg)",
    "dots": r"\\ldots",
    "plus or minus": r"\\[pm]{2}",
    "addition": r"(?<=[^\s({\[,+*/-])\s*[+-]|[)}]\s*[+-]",
    "arithmetic": r"\d\s*\*\s*\d+(?![\d\s]*\^)",
    "multiplication": r"(?<![_\d])\d+\s*\(\s*-?\d|\)\s*\(",
    "power": r"\^|\\sqrt(?![a-zA-Z])",
}
_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon"
    " phi varphi chi psi omega".split()
)
_KNOWN = frozenset(
    "pi infty text overline angle triangle vec hat circ mathbb begin end sinh cosh tanh arccot arcsec arccsc int iint"
    " oint sum prod lim to det mod gcd lcm max min lfloor rfloor lceil rceil ldots partial pm mp prime parallel"
    " perp".split()
)
_TOGETHER = re.compile(r"(?<![a-zA-Z\\{])[A-Z]{2,}(?![a-zA-Z])")
_MARKED = re.compile(r"\\(?:overline|overrightarrow|vec|hat|angle|triangle|mathbb)\s*\{?\s*([A-Za-z]+)\s*\}?")
_OF_SYMBOLS = ("addition", "multiplication", "power")


class UnknownFormulaError(ValueError):
    """math-verify cannot read a formula."""


def operations(latex: str) -> set[str]:
    """Return the names of the operations in a formula."""
    return {name for name, pattern in _OPERATIONS.items() if re.search(pattern, latex)}


def symbols(latex: str) -> set[str]:
    """Return the variables of a formula."""
    words = re.findall(r"\\[a-zA-Z]+|[a-zA-Z]", re.sub(r"\\(?:begin|end)\{\w+\}|\\text", " ", latex))
    return {word for word in words if len(word) == 1 or word[1:].casefold() in _GREEK} - {"e", "i", "d"}


def commands(latex: str) -> set[str]:
    """Return the LaTeX commands of a formula that are unknown here, such as misspelled ones."""
    return (
        set(re.findall(r"\\([a-zA-Z]+)", latex)) - _KNOWN - _GREEK - {name.capitalize() for name in _GREEK} - FUNCTIONS
    )


def unevaluated_operations(truth: str, answer: str) -> set[str]:
    """Return the operations of an answer that the ground truth does not have."""
    allowed = operations(truth)
    if symbols(truth):
        allowed.update(_OF_SYMBOLS)
    if re.search(r"(?<![a-zA-Z\\])i(?![a-zA-Z])", truth):
        allowed.add("power")
    if allowed & {"factorial", "binomial"}:
        allowed |= {"factorial", "binomial"}
    return operations(answer) - allowed


def is_same(truth: str, answer: str) -> bool:
    """Whether two formulas are equal.

    Raises:
        UnknownFormulaError: math-verify cannot read one of them.
    """
    if compact(truth) == compact(answer):
        return True
    one, other = formula(truth), formula(answer)
    return _agree(one, other) and (
        one == other or bool(verify(one, other, timeout_seconds=None, raise_on_error=False)) or _is_zero(one - other)
    )


def is_proportional(truth: tuple[str, str], answer: tuple[str, str], is_directed: bool) -> bool:
    """Whether two relations with the same sign, each given by its two sides, differ only by a constant factor."""
    one, other = (formula(left) - formula(right) for left, right in (truth, answer))
    if one.free_symbols != other.free_symbols or not one.free_symbols:
        return False
    ratio = sympy.simplify(one / other)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0 and (ratio.is_positive or not is_directed))


def number(latex: str) -> Fraction | None:
    """Evaluate a formula without variables to 50 digits; None if it is not a real number or has thousands of digits."""
    value = formula(latex)
    value = sympy.N(value, _DIGITS) if not value.free_symbols else value
    if not (value.is_number and value.is_real and value.is_finite) or abs(value) > sympy.Float("1e2000"):
        return None
    return Fraction(str(value)) if abs(value) > sympy.Float("1e-2000") else Fraction(0)


@lru_cache(maxsize=1024)
def formula(latex: str) -> Any:
    """Parse a formula with math-verify.

    Raises:
        UnknownFormulaError: math-verify cannot read it.
    """
    prepared = _MARKED.sub(_symbol, _TOGETHER.sub(_symbol, latex))
    prepared = re.sub(r"(\d*)\.(\d+)", lambda m: rf"\frac{{{m[1]}{m[2]}}}{{1{'0' * len(m[2])}}}", prepared)
    prepared = prepared.replace("*", r" \cdot ").replace(DEGREE, r"^{\circ}")
    found = parse(
        f"\\boxed{{{prepared}}}", _EXTRACTION, parsing_timeout=None, raise_on_error=False, fallback_mode="no_fallback"
    )
    value = found[0] if found else None
    if not isinstance(value, sympy.Basic) or value.has(sympy.nan, sympy.zoo) or not hasattr(value, "free_symbols"):
        raise UnknownFormulaError(f"math-verify cannot read {latex!r:.200}")
    constants = {"i": sympy.I, "e": sympy.E}
    return value.subs({name: constants.get(name.name, sympy.Symbol(name.name)) for name in value.free_symbols})


def _symbol(found: re.Match[str]) -> str:
    return "Q_{" + "".join(str(ord(char)) for char in found[0] if char.isalnum()) + "}"


def _agree(one: Any, other: Any) -> bool:
    """Whether two formulas have equal values at some points where both have values."""
    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        return True
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    for start in _POINTS if names else _POINTS[:1]:
        point = {name: start + sympy.Rational(at, 7) for at, name in enumerate(names)}
        a, b = (sympy.N(side.subs(point).doit(), _DIGITS) for side in (one, other))
        is_finite = all(side.is_number and not side.has(sympy.oo, sympy.zoo, sympy.nan) for side in (a, b))
        if not is_finite and not names:
            return bool(a == b)
        is_comparable = is_finite and (not names or (a.is_real and b.is_real))
        if is_comparable and abs(a - b) > _TOLERANCE * (abs(a) + abs(b)):
            return False
    return True


def _is_zero(difference: Any) -> bool:
    try:
        return bool(sympy.simplify(difference) == 0)
    except (TypeError, ValueError, AttributeError, NotImplementedError):
        return False
