"""Comparison of an answer with the right ones: kind by kind, and formulas by math-verify."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from typing import Any

from . import engine
from .finding import answer_in
from .notation import compact, spelled
from .reading import INFINITE, UnreadableError, Value, chosen, key_of_words, read
from .units import unit_of


def handle(request: dict[str, Any], stage: Callable[[str], None]) -> dict[str, Any]:
    """Compare an answer with the right ones.

    Args:
        request: `truths` and `answer`, as strings (None only parses the truths); `boxed` and `unevaluated`, whether the
            answer comes from a box and may be unevaluated; `question`, which may have the
            options of a choice; `rounding` and `precision`, in digits.
        stage: Called with "answer" after the truths are parsed.
    """
    for text in request["truths"]:
        try:
            _check(_parsed(text))
        except UnreadableError as error:
            return {"verdict": "unreadable_truth", "extracted": None, "reason": str(error)}
    stage("answer")
    answer = request["answer"]
    if answer is not None and not request["boxed"]:
        answer = answer_in(answer)
    if not (answer or "").strip():
        return {"verdict": "no_answer", "extracted": None, "reason": ""}
    verdicts = [_Grader(request).verdict(truth, answer) for truth in request["truths"]]
    verdict, reason = min(verdicts, key=lambda verdict: (verdict[0] != "correct", verdict[0] == "wrong"))
    return {"verdict": verdict, "extracted": answer, "reason": reason}


_parsed = lru_cache(maxsize=4096)(read)


def _check(value: Value) -> None:
    """Check that math-verify can read each formula of a value."""
    if value.kind == "formula" and "\\infty" not in value.text:
        engine.formula(value.text)
    for part in value.parts:
        _check(part)


class _Grader:
    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.refused = ""

    def verdict(self, truth: str, answer: str) -> tuple[str, str]:
        """Return correct, wrong, unreadable or unevaluated, and the reason."""
        if compact(spelled(truth)) == compact(spelled(answer)):
            return "correct", ""
        value = _parsed(truth)
        try:
            if value.kind == "words" and len(value.text) == 1:
                answer = chosen(answer, self.request["question"]) or answer
            is_right = self.same(value, read(answer))
        except UnreadableError as error:
            return "unreadable", str(error)
        if is_right:
            return "correct", ""
        return ("unevaluated", self.refused) if self.refused else ("wrong", "")

    def same(self, truth: Value, answer: Value) -> bool:
        """Whether two values are equal, or one is the other without its name, unit or notation."""
        return any(self.equal(truth, other) for other in (answer, *self.looser(answer))) or any(
            self.equal(other, answer) for other in self.looser(truth, is_truth=True)
        )

    def looser(self, value: Value, is_truth: bool = False) -> Iterator[Value]:
        """Yield what a value is without its name or unit, or in another notation."""
        match value:
            case Value("name", (*steps, part)) | Value("relation", (*steps, part), "=" | "= =" | "= = ="):
                lenient = _Grader({**self.request, "unevaluated": True})
                if all(lenient.same(part, step) for step in steps):  # x = 25 * 17 = 425
                    yield part
                    yield from self.looser(part, is_truth)
            case Value("unit", (part,), unit):
                if unit != "%" or is_truth:
                    yield part
                if unit == "%" and part.kind == "number":  # not with a percent sign for a unit: 0.05 % is not 0.05
                    yield Value("number", number=part.number / 100)
            case Value(":", (Value("number") as above, Value("number") as below)) if below.number:
                yield Value("number", text="fraction", number=above.number / below.number)
            case Value("list", parts) if parts and len({part.text for part in parts if part.kind == "name"}) == 1:
                if all(part.kind == "name" for part in parts):
                    yield Value("list", tuple(part.parts[-1] for part in parts), value.text)
            case Value("list", parts, "or") if all(part.kind == "relation" for part in parts):
                yield Value("union", tuple(chain.from_iterable(map(self.looser, parts))))
            case Value("relation", parts, signs) if set(signs.split()) <= {"<", "\\le"}:
                ends, opens = list(parts), [sign == "<" for sign in signs.split()]
                if len(parts) == 2:  # one end is infinite
                    at = 0 if _is_variable(parts[0]) else 2
                    ends.insert(at, INFINITE[bool(at)])
                    opens.insert(at, True)
                if len(ends) == 3 and _is_variable(ends[1]):
                    yield Value("[("[opens[0]] + "])"[opens[1]], (ends[0], ends[2]))

    def equal(self, truth: Value, answer: Value) -> bool:
        """Whether two values are of the same kind and equal."""
        match truth, answer:
            case Value("words"), Value("words"):
                return key_of_words(truth.text) == key_of_words(answer.text)
            case Value("words"), Value("formula"):  # xy and x * y
                return re.sub(r"\\times|[*\s]", "", answer.text) == re.sub(r"\s", "", truth.text)
            case Value("number" | "formula"), Value("number" | "formula"):
                return self.leaves(truth, answer)
            case Value("unit", (value,), unit), Value("formula", text=latex):  # 10 m
                found = re.fullmatch(r"(.*[\d}])\s*([a-zA-Z]+)", latex)
                return found is not None and unit_of(found[2]) == unit and self.same(value, read(found[1]))
            case Value("name" | "relation"), Value("name" | "relation"):
                return self.relations(truth, answer)
            case Value("list" | "union", parts, how), Value(kind, others) if kind == truth.kind:
                if any(part.kind == "relation" for part in parts) and how != answer.text and "or" in (how, answer.text):
                    return False
                is_ordered = len(truth.names() | answer.names()) > 1 and not (truth.names() and answer.names())
                if is_ordered and how != "or":  # x = 1, y = 2 is 1, 2 and not 2, 1
                    return self.in_order(parts, others)
                return self.matched(parts, others)
        return (truth.kind, truth.text) == (answer.kind, answer.text) and self.in_order(truth.parts, answer.parts)

    def relations(self, truth: Value, answer: Value) -> bool:
        (parts, signs), (others, other_signs) = _sides(truth), _sides(answer)
        if signs != other_signs:
            return False
        if self.in_order(parts, others) or (signs in _SYMMETRIC and self.in_order(parts, others[::-1])):
            return True
        sides = [_latex(side) for side in (*parts, *others)]
        if "" in sides or signs not in ("=", "\\ne", "<", "\\le"):
            return False
        a, b, c, d = sides
        return self.may_compare(f"{a}-{b}", f"{c}-{d}") and engine.is_proportional(
            (a, b), (c, d), is_directed=signs in ("<", "\\le")
        )

    def leaves(self, truth: Value, answer: Value) -> bool:
        of_truth, of_answer = _latex(truth), _latex(answer)
        if "\\infty" in of_truth + of_answer:
            return compact(of_truth).lstrip("+") == compact(of_answer).lstrip("+")
        if answer.kind == "formula":
            undone = engine.unevaluated_operations(of_truth, of_answer)
            if truth.kind == "number" and self.refuses(undone or {"arithmetic"}):
                return False
            return self.may_compare(of_truth, of_answer) and engine.is_same(of_truth, of_answer)
        if truth.kind == "formula":
            exact = engine.number(of_truth)
            return (exact is not None and self.close(exact, answer)) or engine.is_same(of_truth, of_answer)
        is_undone = answer.text == "fraction" and answer.number.denominator == 1 and truth.text != "fraction"
        is_close = self.close(truth.number, answer) or self.close(answer.number, truth)
        return is_close and not (is_undone and self.refuses({"division"}))

    def refuses(self, undone: set[str]) -> bool:
        """Whether unevaluated operations are refused; if so, keep the reason."""
        if undone and not self.request["unevaluated"]:
            self.refused = f"{', '.join(sorted(undone))} left unevaluated"
            return True
        return False

    def may_compare(self, truth: str, answer: str) -> bool:
        """Whether an answer has only the truth's variables and commands, and is evaluated."""
        undone = engine.unevaluated_operations(truth, answer)
        return (
            not self.refuses(undone)
            and engine.commands(answer) <= engine.commands(truth)
            and (bool(undone) or engine.symbols(answer) <= engine.symbols(truth))  # a sum has its own variables
        )

    def close(self, exact: Fraction, given: Value) -> bool:
        """Whether a number is what another one is, or rounds to: floats are written with more digits than they have."""
        precision, rounding = self.request["precision"], self.request["rounding"]
        error = abs(exact - given.number)
        if not error or (rounding is not None and error * 2 < Fraction(1, 10**rounding)):
            return True
        # Digits that are left out are zeros: 1.4142135623731 is as close to the root of 2 as a float can be.
        has_digits = given.digits >= precision or error * 4 * 10**precision <= abs(exact)
        is_integer = given.number.denominator == 1 or (exact.denominator == 1 and abs(exact) > 2**53)
        if not has_digits or is_integer or not exact:
            return False
        last = (
            (Decimal(exact.numerator) / exact.denominator).adjusted() + 1 - precision
        )  # power of the digit that counts
        return error * 2 <= Fraction(10) ** last

    def in_order(self, truth: tuple[Value, ...], answer: tuple[Value, ...]) -> bool:
        return len(truth) == len(answer) and all(map(self.same, truth, answer))

    def matched(self, truth: tuple[Value, ...], answer: tuple[Value, ...]) -> bool:
        """Whether the values are equal in some order."""
        rest = list(answer)
        if len(truth) != len(answer):
            return False
        for element in truth:
            match = next((at for at, other in enumerate(rest) if self.same(element, other)), None)
            if match is None:
                return False
            del rest[match]
        return True


# Parsing is slow at first: what this loads, the processes of a worker share.
engine.is_same(
    r"\frac{(x+1)^{2}}{y-1}+f(x) \cdot e^{-2x}-\log_{2}(3)+\sqrt[3]{\pi n!}-|a_1|+\binom{n}{2}\sin x",
    r"\binom{n}{2}\sin x-|a_1|+\sqrt[3]{n!\pi}-\log_{2}(3)+e^{-2x}f(x)+\frac{(1+x)^{2}}{y-1}",
)

_SYMMETRIC = ("=", "\\ne", "\\approx", "\\equiv", "\\parallel", "\\perp", "\\cong", "\\sim")


def _sides(value: Value) -> tuple[tuple[Value, ...], str]:
    """Return the parts of a relation, and its signs."""
    if value.kind == "relation":
        return value.parts, value.text
    return (Value("formula", text=value.text), *value.parts), " ".join("=" * len(value.parts))


def _is_variable(value: Value) -> bool:
    return value.kind == "formula" and re.fullmatch(r"\\?[a-zA-Z]|\\[a-z]+", value.text.strip()) is not None


def _latex(value: Value) -> str:
    """Return a formula or a number as LaTeX; an empty text for other values."""
    above, below = value.number.numerator, value.number.denominator
    if value.kind != "number":
        return value.text if value.kind == "formula" else ""
    if below == 1:
        return str(above)
    sign = "-" if above < 0 else ""
    return rf"{sign}\frac{{{abs(above)}}}{{{below}}}"
