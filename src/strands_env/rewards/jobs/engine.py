"""Comparison of two formulas that math-verify parses.

math-verify multiplies letters, rounds floats and drops small terms, primes and degrees. So it only parses: words,
adjacent capitals and primed letters are passed as one symbol each, decimals as fractions and degrees as radians, and
the formulas are compared numerically with 50 digits. It evaluates formulas, too: an answer may leave unevaluated only
operations that the ground truth has.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse
from sympy.core.function import AppliedUndef

from .notation import FUNCTIONS, compact, rules
from .reading import UnreadableError

_EXTRACTION = (
    LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=False, equations=False),
    ),
)
_DIGITS = 50
_TOLERANCE = sympy.Float("1e-30", _DIGITS)
_POINTS = tuple(map(sympy.Rational, "271/113 -355/339 17/29 1543/211".split()))
_TRIGONOMETRY = r"\\?(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?(?![a-z])"
_OPERATIONS = rules(rf"""
    \\i*int|\\oint => integral
    \\sum => sum
    \\prod => product
    \\lim => limit
    \\frac\s*\{{\s*(?:d|\\partial)|\\partial|(?<=[a-z])' => derivative
    \\det|[vV]matrix => determinant
    \\(?:gcd|lcm)|gcd|lcm => divisors
    \\(?:mod|pmod|equiv)|% => remainder
    \\(?:max|min|sup|inf)(?![a-z]) => largest
    ! => factorial
    \\binom => binomial
    \\l(?:floor|ceil) => rounding
    \| => absolute value
    {_TRIGONOMETRY} => trigonometry
    \\(?:log|ln|lg) => logarithm
    \\ldots => dots
    \\[pm]{{2}} => plus or minus
    (?<=[^\s({{\[,+*/-])\s*[+-]|[)}}]\s*[+-] => addition
    \d\s*\*\s*\d+(?![\d\s]*\^) => arithmetic
    (?<![_\d])\d+\s*\(\s*-?\d|\)\s*\( => multiplication
    \^|\\sqrt(?![a-zA-Z]) => power
""")
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
_MARKED = re.compile(r"\\(?:overline|overrightarrow|vec|hat|angle|triangle|mathbb)\s*\{?\s*[A-Za-z]+\s*\}?|[A-Za-z]'+")


def operations(latex: str) -> set[str]:
    """Return the names of the operations in a formula."""
    return {name for pattern, name in _OPERATIONS if re.search(pattern, latex)}


def symbols(latex: str) -> set[str]:
    """Return the variables of a formula."""
    words = re.findall(r"\\[a-zA-Z]+|[a-zA-Z]", re.sub(r"\\(?:begin|end)\{\w+\}|\\text", " ", latex))
    return {word for word in words if len(word) == 1 or word[1:].casefold() in _GREEK} - {"e", "i", "d"}


def commands(latex: str) -> set[str]:
    """Return the LaTeX commands of a formula that are unknown here, and brackets that may mean more than grouping."""
    brackets = re.findall(r"\[|\\\{", re.sub(r"\\sqrt\s*\[", "", latex))
    found = {*re.findall(r"\\([a-zA-Z]+)", latex), *brackets}
    return found - _KNOWN - _GREEK - {name.capitalize() for name in _GREEK} - FUNCTIONS


def unevaluated_operations(truth: str, answer: str) -> set[str]:
    """Return the operations of an answer that the ground truth does not have."""
    allowed = operations(truth)
    if symbols(truth):
        allowed |= {"addition", "multiplication", "power"}
    if "trigonometry" in allowed or re.search(r"(?<![a-zA-Z\\])i(?![a-zA-Z])", truth):
        allowed.add("power")
    if allowed & {"factorial", "binomial"}:
        allowed |= {"factorial", "binomial"}
    return operations(answer) - allowed


def is_same(truth: str, answer: str) -> bool:
    """Whether two formulas are equal.

    Raises:
        UnreadableError: math-verify cannot read one of them.
    """
    if compact(truth) == compact(answer):
        return True
    # A cross product is neither commutative nor a dot product.
    if "\\times" in truth or ("\\times" in answer and re.search(r"\*|\\vec|\\overrightarrow", truth)):
        return False
    return _agree(formula(truth), formula(answer))


def is_proportional(truth: tuple[str, str], answer: tuple[str, str], is_directed: bool) -> bool:
    """Whether two relations with the same sign, each given by its two sides, differ only by a constant factor."""
    first, second = (formula(left) - formula(right) for left, right in (truth, answer))
    if first.free_symbols != second.free_symbols or not first.free_symbols:
        return False
    a, b = _values(first, second, _POINTS[0])
    is_turned = a.is_real and b.is_real and a * b < 0
    return not (is_directed and is_turned) and bool(a and b) and _agree(first * b, second * a)


def number(latex: str) -> Fraction | None:
    """Evaluate a formula to 50 digits; None if it is not a real number or has too large a power of ten."""
    digits = str(sympy.N(formula(latex), _DIGITS))
    return Fraction(digits) if re.fullmatch(r"-?[\d.]+(?:e[+-]?\d{1,3})?", digits) else None


@lru_cache(maxsize=1024)
def formula(latex: str) -> Any:
    """Parse a formula with math-verify.

    Raises:
        UnreadableError: math-verify cannot read it.
    """
    prepared = _MARKED.sub(_symbol, _TOGETHER.sub(_symbol, latex))
    prepared = re.sub(r"(\d*)\.(\d+)", lambda m: rf"\frac{{{m[1]}{m[2]}}}{{1{'0' * len(m[2])}}}", prepared)
    if re.search(_TRIGONOMETRY, latex):
        prepared = re.sub(
            r"(\d+|[a-z]|\\[a-z]+|\([^()]*\)|\\frac\{\d+\}\{\d+\})\s*°", r"(\1\\frac{\\pi}{180})", prepared
        )
    else:
        prepared = prepared.replace("°", "")
    if "°" in prepared:
        raise UnreadableError(f"what is in degrees in {latex!r:.200} is not clear")
    prepared = prepared.replace("*", r" \cdot ").replace("\\times", r"\cdot ")
    found = parse(
        f"\\boxed{{{prepared}}}", _EXTRACTION, parsing_timeout=None, raise_on_error=False, fallback_mode="no_fallback"
    )
    value = found[0] if found else None
    if not isinstance(value, sympy.Expr) or value.has(sympy.nan, sympy.zoo):
        raise UnreadableError(f"math-verify cannot read {latex!r:.200}")
    constants = {"i": sympy.I, "e": sympy.E}
    value = value.subs({name: constants.get(name.name, sympy.Symbol(name.name)) for name in value.free_symbols})
    return value.subs({call: sympy.Symbol(str(call)) for call in value.atoms(AppliedUndef)})


def _symbol(found: re.Match[str]) -> str:
    return "Q_{" + "".join(str(ord(char)) for char in found[0] if char not in "\\{} ") + "}"


def _agree(first: sympy.Expr, second: sympy.Expr) -> bool:
    """Whether two formulas are the same, or have equal values at some points, and where both have real values."""
    n_equal = 0
    is_constant = not (first.free_symbols or second.free_symbols)
    for start in _POINTS[:1] if is_constant else _POINTS:
        a, b = _values(first, second, start)
        is_finite = all(side.is_number and not side.has(sympy.oo, sympy.zoo, sympy.nan) for side in (a, b))
        if is_finite and (is_constant or (a.is_real and b.is_real)):
            if abs(a - b) > _TOLERANCE * (abs(a) + abs(b)):
                return False
            n_equal += 1
    return bool(n_equal or first == second)


def _values(first: sympy.Expr, second: sympy.Expr, start: sympy.Rational) -> list[sympy.Expr]:
    """Return the values of two formulas at a point."""
    names = sorted(first.free_symbols | second.free_symbols, key=str)
    point = {name: start + sympy.Rational(at, 7) for at, name in enumerate(names)}
    return [sympy.N(side.subs(point).doit(), _DIGITS) for side in (first, second)]
