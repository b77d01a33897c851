"""Whether an answer says the same as one of the right ones, by math-verify."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_HOW = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def handle(request: dict[str, Any], stage: Callable[[str], None]) -> dict[str, Any]:
    """Compare.

    Args:
        request: `truths` and `answer`, as texts (None to read the truths alone); `rounding` and `precision` in digits.
        stage: Is told "answer" when the right answers are understood.
    """
    truths = [_truth(text) for text in request["truths"]]
    if not all(truths):
        return {"unreadable_truth": request["truths"][truths.index([])]}
    stage("answer")
    if request["answer"] is None:
        return {"correct": False, "extracted": None}
    answer = parse(request["answer"], _HOW, parsing_timeout=None, raise_on_error=True)
    if not answer:
        return {"correct": False, "extracted": None}
    digits = {"float_rounding": request["rounding"], "numeric_precision": request["precision"]}
    correct = any(verify(truth, answer, **digits, timeout_seconds=None, raise_on_error=True) for truth in truths)
    extracted = answer[-1] if isinstance(answer[-1], str) else None
    return {"correct": correct, "extracted": extracted}


@lru_cache(maxsize=1024)
def _truth(text: str) -> list[Any]:
    # A right answer is given without words around it. What marks a formula in it is respected.
    marked = text if "$" in text or "\\boxed" in text or "\\[" in text or "\\(" in text else f"\\boxed{{{text}}}"
    return parse(marked, _HOW, parsing_timeout=None, raise_on_error=True)
