r"""`MathReward`: whether an answer is mathematically the right one, by the library math-verify.

What counts as the answer, in this order:

1. what stands in the last complete `\boxed{...}`; nothing else is looked at then,
2. with `require_boxed=False`: what math-verify finds in the last 20,000 characters: a "final answer is ...", an
   "answer: ...", the last formula between `$` or `\[ \]`, the last number.

The comparison is math-verify's: `1/2`, `0.5` and `\frac{1}{2}` are the same, `x=5` is `5`, sets and intervals are
compared as such, floats by their digits.

Answers are parsed and compared in worker processes with limits on CPU time and memory. An answer that goes over
them (`9^{9^{9^9}}`) is wrong, with the verdict `over_limits`: no grader would have found it right, and if it were an
error, an evaluation would try it for ever.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from ..core.types import Action, RewardError, RewardFunction, RewardResult, StepResult
from .answers import answer_of, ground_truths, last_boxed, truth_texts
from .workers import OverLimitsError, WorkerError, WorkerLimits, shared_pool

LONGEST_ANSWER = 20_000
LONGEST_BOX = 5_000
LONGEST_SHOWN = 200


class MathReward(RewardFunction):
    r"""1 for the right answer, 0 for a wrong one or none.

    `info` has `verdict` (correct, wrong, no_answer, not_boxed, too_long, unreadable, over_limits), `extracted` (the
    answer as it was found) and `ground_truth`.
    """

    def __init__(
        self,
        *,
        require_boxed: bool = False,
        float_rounding: int = 6,
        numeric_precision: int = 15,
        limits: WorkerLimits | None = None,
        n_workers: int | None = None,
    ) -> None:
        r"""Set up the reward. Cheap: rewards with the same limits share their workers.

        Args:
            require_boxed: Whether an answer outside of `\boxed{}` counts as none.
            float_rounding: Decimals that must agree where one side is a float.
            numeric_precision: Digits of numeric evaluations.
            limits: What one answer may use.
            n_workers: Most worker processes; None for one per CPU, at most 8.

        Raises:
            ImportError: math-verify is not installed.
        """
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("MathReward needs math-verify: pip install 'strands-sglang[env]'")
        self.require_boxed = require_boxed
        self.float_rounding = float_rounding
        self.numeric_precision = numeric_precision
        self.limits = limits or WorkerLimits()
        self.n_workers = n_workers

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Compare the answer with the task's ground truth: a text or number, or a list of which each is right.

        Raises:
            RewardError: The task has no ground truth, or one that math-verify cannot read; no worker runs.
        """
        truths = ground_truths(action)
        text = answer_of(step_result)
        if text is None:
            return _result("no_answer", None, truths)
        box = last_boxed(text)
        if box is None and self.require_boxed:
            return _result("not_boxed", None, truths)
        if box is not None and len(box) > LONGEST_BOX:
            return _result("too_long", box, truths)
        plain = (box if box is not None else text).strip()
        if plain in (truth.strip() for truth in truths):
            return _result("correct", plain, truths)
        answer = f"\\boxed{{{box}}}" if box is not None else text[-LONGEST_ANSWER:]
        request = {
            "truths": truths,
            "answer": answer,
            "rounding": self.float_rounding,
            "precision": self.numeric_precision,
        }
        try:
            verdict = await shared_pool("mathematics", self.limits, self.n_workers).run(request)
        except OverLimitsError as error:
            if error.stage is None:
                raise RewardError(f"the ground truth {truths!r} takes more than {error} to understand") from error
            return _result("over_limits", box, truths, limit=str(error))
        except WorkerError as error:
            raise RewardError(
                f"the answer could not be compared: {error}", is_infrastructure=error.is_infrastructure
            ) from error
        if "unreadable_truth" in verdict:
            raise RewardError(f"math-verify cannot read the ground truth {verdict['unreadable_truth']!r}")
        if "error" in verdict:
            if verdict["stage"] is None:
                raise RewardError(f"math-verify cannot read the ground truth {truths!r}: {verdict['error']}")
            return _result("unreadable", box, truths, error=verdict["error"])
        extracted = verdict["extracted"]
        if extracted is None and box is None:
            return _result("no_answer" if not verdict["correct"] else "correct", None, truths)
        return _result("correct" if verdict["correct"] else "wrong", extracted or box, truths)

    def check_truth(self, truth: Any) -> None:
        """Read a ground truth as `compute` will.

        Raises:
            ValueError: There is none, or one that cannot be read within the limits.
            RewardError: No worker runs.
        """
        truths = truth_texts(truth)
        try:
            read = shared_pool("mathematics", self.limits, self.n_workers).ask({"truths": truths, "answer": None})
        except OverLimitsError as error:
            raise ValueError(f"the ground truth {truths!r:.200} takes more than {error} to understand") from error
        except WorkerError as error:
            raise RewardError(
                f"the ground truth could not be read: {error}", is_infrastructure=error.is_infrastructure
            ) from error
        if "unreadable_truth" in read:
            raise ValueError(f"the ground truth {read['unreadable_truth']!r:.200} is neither mathematics nor text")
        if "error" in read:
            raise ValueError(f"the ground truth {truths!r:.200} cannot be read: {read['error']}")


def _result(verdict: str, extracted: str | None, truths: list[str], **more: str) -> RewardResult:
    if extracted is not None and len(extracted) > LONGEST_SHOWN:
        extracted = f"{extracted[:LONGEST_SHOWN]}[...]"
    info = {"verdict": verdict, "extracted": extracted, "ground_truth": truths[0] if len(truths) == 1 else truths}
    return RewardResult(reward=float(verdict == "correct"), info={**info, **more})
