"""Comparison of an answer with the right ones: kind by kind, and formulas by math-verify."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from . import engine
from .notation import compact, spelled
from .reading import (
    Based,
    Bracketed,
    Formula,
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
    answer_in,
    chosen,
    read,
)


def handle(request: dict[str, Any], stage: Callable[[str], None]) -> dict[str, Any]:
    """Compare an answer with the right ones.

    Args:
        request: `truths` and `answer`, as strings (None only parses the truths); `boxed` and `unevaluated`, whether the
            answer comes from a box and may be unevaluated; `rounding` and `precision`, in digits.
        stage: Called with "answer" after the truths are parsed.
    """
    for text in request["truths"]:
        try:
            _parsed_truth(text)
        except (UnreadableError, engine.UnknownFormulaError) as error:
            return {"verdict": "unreadable_truth", "reason": str(error), "extracted": None}
    stage("answer")
    answer = request["answer"]
    if answer is not None and not request["boxed"]:
        answer = answer_in(answer)
    if answer is None or not answer.strip():
        return {"verdict": "no_answer", "extracted": None}
    grader = _Grader(request["unevaluated"], request["rounding"], request["precision"])
    verdicts = [grader.verdict(truth, answer) for truth in request["truths"]]
    verdict, reason = min(verdicts, key=lambda one: (one[0] != "correct", one[0] == "wrong"))
    return {"verdict": verdict, "extracted": answer, **({"reason": reason} if reason else {})}


@lru_cache(maxsize=4096)
def _parsed_truth(text: str) -> Value:
    """Parse a right answer, and check that math-verify can read each of its formulas."""
    value = read(text)
    for latex in _formulas(value):
        if "\\infty" not in latex:
            engine.formula(latex)
    return value


def _formulas(value: Any) -> list[str]:
    if isinstance(value, Formula):
        return [value.latex]
    parts = value if isinstance(value, tuple) else getattr(value, "__dict__", {}).values()
    return [latex for part in parts for latex in _formulas(part)]


class _Grader:
    def __init__(self, unevaluated: bool, rounding: int | None, precision: int) -> None:
        self.unevaluated = unevaluated
        self.rounding = rounding
        self.precision = precision
        self.refused = ""

    def verdict(self, truth: str, answer: str) -> tuple[str, str]:
        """Return correct, wrong, unreadable or unevaluated, and the reason."""
        self.refused = ""
        if compact(spelled(truth)) == compact(spelled(answer)):
            return "correct", ""
        value = _parsed_truth(truth)
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
        """Whether two values are of the same kind and equal."""
        match truth, answer:
            case Text(), Text():
                return truth.key() == answer.key()
            case Text(words), Formula(latex):  # xy and x * y
                return "".join(latex.replace("*", "").split()) == "".join(words.split())
            case Text(), Named(_, value):
                return self.same(truth, value)
            case (Text(), _) | (_, Text()):
                return False
            case Named(name, value), Named(other) if name == other:
                return self._chain(value, answer)
            case Named(), (Named() | Relation((Formula(), *_), ("=",))):
                return self._relations(truth, answer)
            case Named(_, value), _:
                return self._chain(value, answer)
            case Relation(), (Named() | Relation()):
                return self._relations(truth, answer)
            case Relation(), _:
                pass  # it may be an interval
            case _, Named():
                return self._chain(truth, answer)
            case _, Relation(signs=signs) if set(signs) == {"="}:
                return self._chain(truth, answer)
            case (Measured(), _) | (_, Measured()):
                return self._measured(truth, answer)
            case ((Number() | Formula()), (Number() | Formula())):
                return self._leaves(truth, answer)
            case Ratio(terms), Ratio(others):
                return self._in_order(terms, others)
            case (Ratio((Number(above), Number(below))), Number(value)) | (
                Number(value),
                Ratio((Number(above), Number(below))),
            ):
                return bool(below) and above / below == value and above == value.numerator
            case (Ratio(), _) | (_, Ratio()):
                return False
            case Several(), Several():
                ones, others = _unnamed(truth, answer), _unnamed(answer, truth)
                is_about_relations = any(isinstance(item, Relation) for item in ones)
                if is_about_relations and "or" in (truth.how, answer.how) and truth.how != answer.how:
                    return False
                is_ordered = len(truth.names()) > 1 and truth.how != "or"
                if is_ordered and not any(isinstance(item, Named | Relation) for item in others):
                    return self._in_order(ones, others)  # x = 1, y = 2 is 1, 2 and not 2, 1
                return self._matched(ones, others)
            case Bracketed(left, items, right), Bracketed(other_left, others, other_right):
                return (left, right) == (other_left, other_right) and self._in_order(items, others)
            case Based(), Based():
                return truth == answer
        intervals, of_answer = _pieces(truth), _pieces(answer)
        if intervals is None or of_answer is None or (intervals, of_answer) == ((truth,), (answer,)):
            return False
        return self._matched(intervals, of_answer)

    def _measured(self, truth: Value, answer: Value) -> bool:
        of_truth, of_answer = (side.unit if isinstance(side, Measured) else None for side in (truth, answer))
        one, other = (side.value if isinstance(side, Measured) else side for side in (truth, answer))
        if of_truth is not None and of_answer is not None and of_truth != of_answer:
            return False
        is_percent = of_truth != of_answer and "%" in (of_truth, of_answer)
        if not (is_percent and isinstance(one, Number) and isinstance(other, Number)):
            return self.same(one, other)
        # A percent sign on one side only: 50 % is 0.5, and the sign may be left out like a unit. But if 0.05 is right,
        # 0.05 % is not.
        if of_truth == "%":
            return other.value in (one.value, one.value / 100)
        return one.value == other.value / 100 or (abs(one.value) > 1 and one.value == other.value)

    def _relations(self, truth: Named | Relation, answer: Named | Relation) -> bool:
        (parts, signs), (others, other_signs) = _sides(truth), _sides(answer)
        if signs != other_signs:
            return False
        is_symmetric = len(parts) == 2 and signs[0] in _SYMMETRIC
        if self._in_order(parts, others) or (is_symmetric and self._in_order(parts, others[::-1])):
            return True
        sides = [_latex(part) for part in (*parts, *others)]
        if None in sides or signs not in (("=",), ("\\ne",), ("<",), ("\\le",)):
            return False
        a, b, c, d = map(str, sides)
        return self._may_compare(f"{a}-{b}", f"{c}-{d}") and engine.is_proportional(
            (a, b), (c, d), is_directed=signs[0] in ("<", "\\le")
        )

    def _chain(self, truth: Value, answer: Value) -> bool:
        """Whether an answer, or a chain of correct equations, ends in the truth: x = 25 * 17 = 425."""
        answer = answer.value if isinstance(answer, Named) else answer
        if not isinstance(answer, Relation):
            return self.same(truth, answer)
        if set(answer.signs) != {"="} or not self.same(truth, answer.parts[-1]):
            return False
        lenient = _Grader(True, self.rounding, self.precision)
        return all(lenient.same(truth, part) for part in answer.parts[:-1])

    def _leaves(self, truth: Number | Formula, answer: Number | Formula) -> bool:
        if isinstance(truth, Number) and isinstance(answer, Number):
            undone = answer.form == "fraction" and answer.value.denominator == 1 and truth.form != "fraction"
            return self._close(truth, answer) and not (undone and self._refuses({"division"}))
        of_truth, of_answer = str(_latex(truth)), str(_latex(answer))
        if "\\infty" in of_truth + of_answer:
            return compact(of_truth).lstrip("+") == compact(of_answer).lstrip("+")
        if isinstance(answer, Formula):
            if isinstance(truth, Number) and self._refuses(
                engine.unevaluated_operations(of_truth, of_answer) or {"arithmetic"}
            ):
                return False
            return self._may_compare(of_truth, of_answer) and engine.is_same(of_truth, of_answer)
        exact = engine.number(of_truth) if answer.form == "decimal" and answer.value.denominator != 1 else None
        is_rounded = exact is not None and (
            self._is_within_rounding(exact, answer.value)
            or (
                answer.digits >= self.precision
                and _may_be_off(exact, answer.value)
                and _rounded(exact, self.precision) == _rounded(answer.value, self.precision)
            )
        )
        return is_rounded or engine.is_same(of_truth, of_answer)

    def _refuses(self, undone: set[str]) -> bool:
        """Whether unevaluated operations are refused; if so, keep the reason."""
        if undone and not self.unevaluated:
            self.refused = f"{', '.join(sorted(undone))} left unevaluated"
        return bool(undone) and not self.unevaluated

    def _may_compare(self, truth: str, answer: str) -> bool:
        """Whether an answer has only the truth's variables and commands, and is evaluated."""
        undone = engine.unevaluated_operations(truth, answer)
        return (
            not self._refuses(undone)
            and engine.commands(answer) <= engine.commands(truth)
            and _has_ambiguous_brackets(answer) <= _has_ambiguous_brackets(truth)
            and (bool(undone) or engine.symbols(answer) <= engine.symbols(truth))  # a sum has its own variables
        )

    def _close(self, truth: Number, answer: Number) -> bool:
        if truth.value == answer.value or self._is_within_rounding(truth.value, answer.value):
            return True
        if not _may_be_off(truth.value, answer.value):
            return False
        # Floating-point numbers are written with more digits than they have.
        one, other = sorted((truth, answer), key=lambda side: side.digits)
        if other.form != "decimal" or other.digits < self.precision:
            return False
        is_longer = one.form == "decimal" and one.digits > self.precision
        return not is_longer and _rounded(one.value, self.precision) == _rounded(other.value, self.precision)

    def _is_within_rounding(self, one: Fraction, other: Fraction) -> bool:
        return self.rounding is not None and abs(one - other) * 2 < Fraction(1, 10**self.rounding)

    def _in_order(self, truth: tuple[Value, ...], answer: tuple[Value, ...]) -> bool:
        return len(truth) == len(answer) and all(map(self.same, truth, answer))

    def _matched(self, truth: tuple[Value, ...], answer: tuple[Value, ...]) -> bool:
        """Whether the values are equal in some order."""
        rest = list(answer)
        if len(truth) != len(answer):
            return False
        for one in truth:
            match = next((at for at, other in enumerate(rest) if self.same(one, other)), None)
            if match is None:
                return False
            del rest[match]
        self.refused = ""
        return True


# Symmetric relations.
_SYMMETRIC = ("=", "\\ne", "\\approx", "\\equiv", "\\parallel", "\\perp", "\\cong", "\\sim")


def _sides(value: Named | Relation) -> tuple[tuple[Value, ...], tuple[str, ...]]:
    """Return the parts of a relation, and its signs."""
    if isinstance(value, Relation):
        return value.parts, value.signs
    return (Formula(value.name), value.value), ("=",)


def _pieces(value: Value) -> tuple[Value, ...] | None:
    """Convert relations, intervals and unions of them to intervals; None for other values."""
    match value:
        case Union(items):
            found = [_pieces(item) for item in items]
        case Several(items, "or"):
            found = [_pieces(item) if isinstance(item, Relation) else None for item in items]
        case Relation(parts, signs) if set(signs) <= {"<", "\\le"}:
            if len(parts) == 2:  # one end is infinite
                end = 1 if _is_variable(parts[0]) else 0
                parts = (Formula("-\\infty"), *parts) if end else (*parts, Formula("\\infty"))
                signs = ("<", *signs) if end else (*signs, "<")
            if len(parts) != 3 or not _is_variable(parts[1]):
                return None
            return (Bracketed("(" if signs[0] == "<" else "[", (parts[0], parts[2]), ")" if signs[1] == "<" else "]"),)
        case Several(how="set") | Bracketed(items=(_, _)):
            return (value,)
        case _:
            return None
    return None if None in found else tuple(piece for pieces in found if pieces for piece in pieces)


def _is_variable(value: Value) -> bool:
    return isinstance(value, Formula) and len(value.latex.strip().lstrip("\\")) == 1 and value.latex.strip().isalpha()


def _unnamed(several: Several, other: Several) -> tuple[Value, ...]:
    """Return the values of "x = 1 or x = 2" without the name if the other side has no names."""
    names = {item.name if isinstance(item, Named) else None for item in several.items}
    if len(names) == 1 and None not in names and not any(isinstance(item, Named) for item in other.items):
        return tuple(item.value for item in several.items if isinstance(item, Named))
    return several.items


def _has_ambiguous_brackets(latex: str) -> bool:
    """Whether a formula has brackets that may mean rounding or a fractional part instead of grouping."""
    return re.search(r"\[|\\\{", re.sub(r"\\sqrt\s*\[", "", latex)) is not None


def _bare(value: Measured) -> str:
    return value.suffix.replace("\\text{", "").replace("}", "").replace(" ", "")


def _latex(value: Value) -> str | None:
    match value:
        case Formula(latex):
            return latex
        case Number(Fraction(numerator=above, denominator=below)):
            return f"{above}" if below == 1 else rf"{'-' if above < 0 else ''}\frac{{{abs(above)}}}{{{below}}}"
    return None


def _may_be_off(truth: Fraction, answer: Fraction) -> bool:
    """Whether an answer may differ from the truth by the error of a float; integers are exact up to 2**53."""
    return truth.denominator != 1 or (answer.denominator != 1 and abs(truth) <= 2**53)


def _rounded(value: Fraction, digits: int) -> Fraction:
    """Round to a number of significant digits."""
    power = 0
    while abs(value) >= Fraction(10) ** (power + 1):
        power += 1
    while value and abs(value) < Fraction(10) ** power:
        power -= 1
    return round(value, digits - 1 - power)
