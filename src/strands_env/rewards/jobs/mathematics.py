"""Whether an answer says the same as one of the right ones: shape by shape, formulas by math-verify."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy

from . import engine
from .finding import answer_in
from .notation import compact, spelled
from .reading import (
    Based,
    Bracketed,
    Formula,
    Matrix,
    Measured,
    Named,
    Number,
    Ratio,
    Relation,
    Several,
    Text,
    Union,
    UnreadableError,
    Value,
    chosen,
    read,
)


def handle(request: dict[str, Any], stage: Callable[[str], None]) -> dict[str, Any]:
    """Compare.

    Args:
        request: `truths` and `answer`, as texts (None to read the truths alone); whether the answer is `boxed`, and
            `unevaluated` ones will do; `rounding` and `precision` in digits.
        stage: Is told "answer" when the right answers are understood.
    """
    for text in request["truths"]:
        try:
            _understood(text)
        except (UnreadableError, engine.UnknownFormulaError) as error:
            return {"verdict": "unreadable_truth", "reason": str(error), "extracted": None}
    stage("answer")
    if request["answer"] is None:
        return {"verdict": "no_answer", "extracted": None}
    answer = request["answer"] if request["boxed"] else answer_in(request["answer"])
    if answer is None or not answer.strip():
        return {"verdict": "no_answer", "extracted": None}
    grader = _Grader(request["unevaluated"], request["rounding"], request["precision"])
    verdicts = [grader.verdict(truth, answer) for truth in request["truths"]]
    verdict, reason = min(verdicts, key=lambda one: (one[0] != "correct", one[0] == "wrong"))
    return {"verdict": verdict, "extracted": answer, **({"reason": reason} if reason else {})}


@lru_cache(maxsize=4096)
def _understood(text: str) -> Value:
    """A right answer, each formula of which math-verify can read."""
    value = read(text)
    for latex in _formulas(value):
        if "\\infty" not in latex:
            engine.formula(latex)
    return value


def _formulas(value: Any) -> list[str]:
    if isinstance(value, Formula):
        return [value.latex]
    if isinstance(value, tuple):
        return [latex for item in value for latex in _formulas(item)]
    if hasattr(value, "__dataclass_fields__"):
        return [latex for name in value.__dataclass_fields__ for latex in _formulas(getattr(value, name))]
    return []


class _Grader:
    def __init__(self, unevaluated: bool, rounding: int | None, precision: int) -> None:
        self.unevaluated = unevaluated
        self.rounding = rounding
        self.precision = precision
        self.refused = ""

    def verdict(self, truth: str, answer: str) -> tuple[str, str]:
        """correct, wrong, unreadable or unevaluated, and why."""
        self.refused = ""
        if compact(spelled(truth)) == compact(spelled(answer)):
            return "correct", ""
        value = _understood(truth)
        if isinstance(value, Text) and len(value.words) == 1 and (letter := chosen(answer)) is not None:
            answer = letter
        try:
            is_right = self.same(value, read(answer))
            if not is_right and isinstance(value, Measured) and spelled(answer).replace(" ", "").endswith(_bare(value)):
                is_right = self.same(value.value, read(spelled(answer).replace(" ", "").removesuffix(_bare(value))))
        except (UnreadableError, engine.UnknownFormulaError) as error:
            return "unreadable", str(error)
        if is_right:
            return "correct", ""
        return ("unevaluated", self.refused) if self.refused else ("wrong", "")

    def same(self, truth: Value, answer: Value) -> bool:
        """Whether two values are the same, in kind as well."""
        if isinstance(truth, Text) or isinstance(answer, Text):
            return self._texts(truth, answer)
        if isinstance(truth, Measured) or isinstance(answer, Measured):
            return self._measured(truth, answer)
        if isinstance(truth, Relation) or isinstance(truth, Named):
            return self._relations(truth, answer)
        if isinstance(answer, Named):
            if isinstance(answer.value, Relation):  # x = 10/4 = 5/2
                return self._chain(truth, answer.value)
            return self.same(truth, answer.value)
        if isinstance(answer, Relation) and set(answer.signs) == {"="}:
            return self._chain(truth, answer)
        if isinstance(truth, Number | Formula) and isinstance(answer, Number | Formula):
            return self._leaves(truth, answer)
        if isinstance(truth, Ratio) or isinstance(answer, Ratio):
            return self._ratios(truth, answer)
        if isinstance(truth, Several) and isinstance(answer, Several):
            return self._several(truth, answer)
        pieces = self._pieces(truth), self._pieces(answer)
        are_new = pieces != ((truth,), (answer,)) and (type(truth) is not type(answer) or isinstance(truth, Union))
        if pieces[0] is not None and pieces[1] is not None and are_new:
            return self._matched(pieces[0], pieces[1])
        if isinstance(truth, Bracketed) and isinstance(answer, Bracketed):
            return (truth.left, truth.right) == (answer.left, answer.right) and self._in_order(
                truth.items, answer.items
            )
        if isinstance(truth, Matrix) and isinstance(answer, Matrix):
            return (
                truth.kind == answer.kind
                and len(truth.rows) == len(answer.rows)
                and all(map(self._in_order, truth.rows, answer.rows))
            )
        if isinstance(truth, Based) and isinstance(answer, Based):
            return truth == answer
        return False

    def _texts(self, truth: Value, answer: Value) -> bool:
        if isinstance(truth, Text) and isinstance(answer, Text):
            return truth.key() == answer.key()
        if isinstance(truth, Text) and isinstance(answer, Formula):  # xy and x * y
            return "".join(answer.latex.replace("*", "").split()) == "".join(truth.words.split())
        if isinstance(truth, Text) and isinstance(answer, Named):
            return self.same(truth, answer.value)
        return False

    def _measured(self, truth: Value, answer: Value) -> bool:
        if isinstance(answer, Named) and not isinstance(truth, Named):
            return self.same(truth, answer.value)
        if isinstance(truth, Named) and not isinstance(answer, Named):
            return self.same(truth.value, answer)
        of_truth = truth.unit if isinstance(truth, Measured) else None
        of_answer = answer.unit if isinstance(answer, Measured) else None
        bare_truth = truth.value if isinstance(truth, Measured) else truth
        bare_answer = answer.value if isinstance(answer, Measured) else answer
        if of_truth is not None and of_answer is not None and of_truth != of_answer:
            return False
        if of_truth == of_answer or "%" not in (of_truth, of_answer):
            return self.same(bare_truth, bare_answer)
        if not (isinstance(bare_truth, Number) and isinstance(bare_answer, Number)):
            return self.same(bare_truth, bare_answer)
        # With a percent sign on one side only: 50 % is 0.5, and the sign may have been left out as a unit's is. But
        # where 0.05 is right, 0.05 % is not.
        if of_truth == "%":
            return bare_answer.value in (bare_truth.value, bare_truth.value / 100)
        return bare_truth.value == bare_answer.value / 100 or (
            abs(bare_truth.value) > 1 and bare_truth.value == bare_answer.value
        )

    def _relations(self, truth: Value, answer: Value) -> bool:
        if isinstance(truth, Named):
            if isinstance(answer, Named):
                if truth.name == answer.name:
                    return (
                        self._chain(truth.value, answer.value)
                        if isinstance(answer.value, Relation)
                        else self.same(truth.value, answer.value)
                    )
                return self._proportional(truth.name, truth.value, answer.name, answer.value)
            if isinstance(answer, Relation):
                if len(answer.signs) == 1 and answer.signs == ("=",) and isinstance(answer.parts[0], Formula):
                    return self._proportional(truth.name, truth.value, answer.parts[0].latex, answer.parts[1])
                return set(answer.signs) == {"="} and self._chain(truth.value, answer)
            return self.same(truth.value, answer)
        assert isinstance(truth, Relation)
        if isinstance(answer, Named) and truth.signs == ("=",) and isinstance(truth.parts[0], Formula):
            return self._proportional(truth.parts[0].latex, truth.parts[1], answer.name, answer.value)
        if not isinstance(answer, Relation):
            of_truth, of_answer = self._pieces(truth), self._pieces(answer)
            return of_truth is not None and of_answer is not None and self._matched(of_truth, of_answer)
        if truth.signs != answer.signs:
            return False
        if self._in_order(truth.parts, answer.parts):
            return True
        symmetric = truth.signs[0] in ("=", "\\ne", "\\approx", "\\equiv", "\\parallel", "\\perp", "\\cong", "\\sim")
        if len(truth.parts) == 2 and symmetric and self._in_order(truth.parts, answer.parts[::-1]):
            return True
        if truth.signs not in (("=",), ("\\ne",), ("<",), ("\\le",)):
            return False
        sides = [_latex(part) for part in (*truth.parts, *answer.parts)]
        if any(side is None for side in sides):
            return False
        a, b, c, d = (str(side) for side in sides)
        positive = truth.signs[0] in ("<", "\\le")
        return self._may_compare(f"{a}-{b}", f"{c}-{d}") and engine.is_proportional((a, b), (c, d), positive=positive)

    def _proportional(self, left: str, right: Value, other_left: str, other_right: Value) -> bool:
        one, other = _latex(right), _latex(other_right)
        if one is None or other is None or "text" in left + other_left:
            return False
        if not self._may_compare(f"{left}-{one}", f"{other_left}-{other}"):
            return False
        return engine.is_proportional((left, one), (other_left, other), positive=False)

    def _chain(self, truth: Value, answer: Value) -> bool:
        """Whether a chain of equations leads to the truth, each step right: 25 * 17 = 425."""
        if not isinstance(answer, Relation) or set(answer.signs) != {"="} or not self.same(truth, answer.parts[-1]):
            return False
        lenient = _Grader(True, self.rounding, self.precision)
        return all(lenient.same(truth, part) for part in answer.parts[:-1])

    def _leaves(self, truth: Number | Formula, answer: Number | Formula) -> bool:
        if isinstance(truth, Number) and isinstance(answer, Number):
            if not self._close(truth, answer):
                return False
            undone = answer.form == "fraction" and answer.value.denominator == 1 and truth.form != "fraction"
            if undone and not self.unevaluated:
                self.refused = "division left undone"
                return False
            return True
        of_truth, of_answer = str(_latex(truth)), str(_latex(answer))
        if "\\infty" in of_truth or "\\infty" in of_answer:
            return compact(of_truth).lstrip("+") == compact(of_answer).lstrip("+")
        if isinstance(truth, Number) and isinstance(answer, Formula) and not self.unevaluated:
            operations = engine.left_undone(of_truth, of_answer)
            self.refused = f"{', '.join(sorted(operations)) or 'arithmetic'} left undone"
            return False
        if isinstance(answer, Formula):
            if not self._may_compare(of_truth, of_answer):
                return False
        elif answer.form == "decimal" and answer.value.denominator != 1:
            exact = engine.number(of_truth)
            if exact is not None and self._is_rounded(exact, answer):
                return True
        return engine.is_same(of_truth, of_answer)

    def _may_compare(self, truth: str, answer: str) -> bool:
        """Whether an answer has no letters but the truth's, and nothing left to be computed."""
        undone = engine.left_undone(truth, answer)
        if undone and not self.unevaluated:
            self.refused = f"{', '.join(sorted(undone))} left undone"
            return False
        if engine.commands(answer) - engine.commands(truth) or _square(answer) > _square(truth):
            return False
        return bool(undone) or engine.symbols(answer) <= engine.symbols(truth)  # a sum has letters of its own

    def _close(self, truth: Number, answer: Number) -> bool:
        if truth.value == answer.value:
            return True
        if self.rounding is not None and abs(truth.value - answer.value) * 2 < Fraction(1, 10**self.rounding):
            return True
        # Floating-point numbers are written with more digits than they have.
        one, other = sorted((truth, answer), key=lambda side: side.digits)
        if other.form != "decimal" or other.digits < self.precision:
            return False
        if one.form == "decimal" and one.digits > self.precision:
            return False
        return _rounded(one.value, self.precision) == _rounded(other.value, self.precision)

    def _is_rounded(self, exact: Any, answer: Number) -> bool:
        given = sympy.Rational(answer.value.numerator, answer.value.denominator)
        if self.rounding is not None and bool(abs(exact - given) * 2 < sympy.Rational(1, 10**self.rounding)):
            return True
        if answer.digits < self.precision:
            return False
        return _rounded(Fraction(str(exact)), self.precision) == _rounded(answer.value, self.precision)

    def _ratios(self, truth: Value, answer: Value) -> bool:
        if isinstance(truth, Ratio) and isinstance(answer, Ratio):
            return self._in_order(truth.terms, answer.terms)
        ratio, other = (truth, answer) if isinstance(truth, Ratio) else (answer, truth)
        if not isinstance(ratio, Ratio) or not isinstance(other, Number) or len(ratio.terms) != 2:
            return False
        above, below = ratio.terms
        if not (isinstance(above, Number) and isinstance(below, Number) and below.value):
            return False
        return above.value / below.value == other.value and above.value == other.value.numerator

    def _several(self, truth: Several, answer: Several) -> bool:
        ones, others = _unnamed(truth, answer), _unnamed(answer, truth)
        is_about_relations = any(isinstance(item, Relation) for item in ones)
        if is_about_relations and "or" in (truth.how, answer.how) and truth.how != answer.how:
            return False
        return self._matched(ones, others)

    def _in_order(self, truth: tuple[Value, ...], answer: tuple[Value, ...]) -> bool:
        return len(truth) == len(answer) and all(map(self.same, truth, answer))

    def _matched(self, truth: tuple[Value, ...], answer: tuple[Value, ...]) -> bool:
        """Whether each finds its own among the others."""
        left = list(answer)
        if len(truth) != len(answer):
            return False
        for one in truth:
            for at, other in enumerate(left):
                if self.same(one, other):
                    del left[at]
                    break
            else:
                return False
        self.refused = ""
        return True

    def _pieces(self, value: Value) -> tuple[Value, ...] | None:
        """A set of numbers as intervals, where it is one: from a relation, an interval, or several joined."""
        if isinstance(value, Union):
            found = [self._pieces(item) for item in value.items]
            return None if None in found else tuple(piece for pieces in found if pieces for piece in pieces)
        if isinstance(value, Several) and value.how == "or":
            found = [self._pieces(item) if isinstance(item, Relation) else None for item in value.items]
            return None if None in found else tuple(piece for pieces in found if pieces for piece in pieces)
        if isinstance(value, Several) and value.how == "set":
            return (value,)
        if isinstance(value, Bracketed) and len(value.items) == 2:
            return (value,)
        if isinstance(value, Relation) and set(value.signs) <= {"<", "\\le"}:
            return _interval(value)
        return None


def _interval(relation: Relation) -> tuple[Value, ...] | None:
    ends = {"<": ("(", ")"), "\\le": ("[", "]")}
    parts, signs = relation.parts, relation.signs
    if len(parts) == 3 and _is_variable(parts[1]):
        return (Bracketed(ends[signs[0]][0], (parts[0], parts[2]), ends[signs[1]][1]),)
    if len(parts) == 2 and _is_variable(parts[0]):
        return (Bracketed("(", (Formula("-\\infty"), parts[1]), ends[signs[0]][1]),)
    if len(parts) == 2 and _is_variable(parts[1]):
        return (Bracketed(ends[signs[0]][0], (parts[0], Formula("\\infty")), ")"),)
    return None


def _is_variable(value: Value) -> bool:
    return isinstance(value, Formula) and len(value.latex.strip().lstrip("\\")) == 1 and value.latex.strip().isalpha()


def _unnamed(several: Several, other: Several) -> tuple[Value, ...]:
    """The values of x = 1 or x = 2, where the other side gives the values alone."""
    names = {item.name if isinstance(item, Named) else None for item in several.items}
    if len(names) == 1 and None not in names and not any(isinstance(item, Named) for item in other.items):
        return tuple(item.value for item in several.items if isinstance(item, Named))
    return several.items


def _square(latex: str) -> bool:
    """Whether a formula has brackets that may round or take a fraction's part as well as group."""
    return re.search(r"\[|\\\{", re.sub(r"\\sqrt\s*\[", "", latex)) is not None


def _bare(value: Measured) -> str:
    return value.suffix.replace("\\text{", "").replace("}", "").replace(" ", "")


def _latex(value: Value) -> str | None:
    if isinstance(value, Formula):
        return value.latex
    if isinstance(value, Number):
        above, below = value.value.numerator, value.value.denominator
        return f"{above}" if below == 1 else rf"{'-' if above < 0 else ''}\frac{{{abs(above)}}}{{{below}}}"
    return None


def _rounded(value: Fraction, digits: int) -> Fraction:
    """To so many significant digits."""
    if not value:
        return value
    power = 0
    size = abs(value)
    while size >= 10:
        size /= 10
        power += 1
    while size < 1:
        size *= 10
        power -= 1
    return round(value, digits - 1 - power)
