r"""`MathReward`: whether an answer is mathematically the right one, by the library math-verify.

What counts as the answer, in this order:

1. what stands in the last complete `\boxed{...}` and those joined to it by "and", "or" or a comma; nothing else is
   looked at then,
2. with `require_boxed=False`, in the last 20,000 characters: the whole text if it is nothing but an answer, what the
   last "answer is", "answer:" or `####` introduces, what the last sentence says something is, the last formula or
   number.

What is compared are kinds first: a number is no set, a point is no list, `x > 5` is not 5, `2516_8` is not 2516, "east"
is not "seat". Within a kind, numbers are the same if they are exactly the same (`1/2`, `0.5`, `\frac{1}{2}`, `5e-1`),
and formulas if math-verify finds them to be, which is checked with numbers. Units, names (`x = 5`) and signs of
currencies may be left out, and must agree where both sides have them. Lists and sets are in any order. What cannot be
told is wrong.

The task restated is no answer: operations that the right answer does not have (`25 \times 17`, a sum, an integral)
must have been carried out.

Answers are parsed and compared in worker processes with limits on CPU time and memory. An answer that goes over
them (`9^{9^{9^9}}`) is wrong, with the verdict `over_limits`: no grader would have found it right, and if it were an
error, an evaluation would try it for ever.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from ..core.types import Action, RewardError, RewardFunction, RewardResult, StepResult
from .answers import boxed_answer, ground_truths, truth_texts
from .workers import OverLimitsError, WorkerError, WorkerLimits, shared_pool

MAX_ANSWER_CHARS = 20_000
MAX_BOX_CHARS = 5_000
MAX_SHOWN_CHARS = 200


class MathReward(RewardFunction):
    r"""1 for the right answer, 0 for a wrong one or none.

    `info` has `verdict`, `extracted` (the answer as it was found) and `ground_truth`. Verdicts are correct, wrong,
    no_answer, not_boxed, too_long, over_limits, unevaluated (right or not, operations are left undone), unreadable (the
    answer is in no known notation) and unreadable_truth (the ground truth is; `check_truth` finds it beforehand).
    """

    def __init__(
        self,
        *,
        require_boxed: bool = False,
        allow_unevaluated: bool = False,
        float_rounding: int | None = None,
        numeric_precision: int = 15,
        limits: WorkerLimits | None = None,
        n_workers: int | None = None,
    ) -> None:
        r"""Set up the reward. Cheap: rewards with the same limits share their workers.

        Args:
            require_boxed: Whether an answer outside of `\boxed{}` counts as none.
            allow_unevaluated: Whether operations may be left undone: `25 \times 17` for 425.
            float_rounding: Decimals that must agree between numbers; None for all of them.
            numeric_precision: Significant digits after which a decimal counts as a floating-point number, which agrees
                with what it is rounded from.
            limits: What one answer may use.
            n_workers: Most worker processes; None for one per CPU, at most 8.

        Raises:
            ImportError: math-verify is not installed.
        """
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("MathReward needs math-verify: pip install 'strands-sglang[env]'")
        self.require_boxed = require_boxed
        self.allow_unevaluated = allow_unevaluated
        self.float_rounding = float_rounding
        self.numeric_precision = numeric_precision
        self.limits = limits or WorkerLimits()
        self.n_workers = n_workers

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Compare the answer with the task's ground truth: a text or number, or a list of which each is right.

        Raises:
            RewardError: The task has no ground truth; no worker runs.
        """
        truths = ground_truths(action)
        text = step_result.observation.final_response
        if text is None:
            return _result("no_answer", None, truths)
        box = boxed_answer(text)
        if box is None and self.require_boxed:
            return _result("not_boxed", None, truths)
        if box is not None and len(box) > MAX_BOX_CHARS:
            return _result("too_long", box, truths)
        plain = (box if box is not None else text).strip()
        if plain in (truth.strip() for truth in truths):
            return _result("correct", plain, truths)
        pool = shared_pool("mathematics", self.limits, self.n_workers)
        try:
            said = await pool.run(
                self._request(truths, text[-MAX_ANSWER_CHARS:] if box is None else box, box is not None)
            )
        except OverLimitsError as error:
            verdict = "unreadable_truth" if error.stage is None else "over_limits"
            return _result(verdict, box, truths, limit=str(error))
        except WorkerError as error:
            raise RewardError(
                f"the answer could not be compared: {error}", is_infrastructure=error.is_infrastructure
            ) from error
        if "error" in said:
            return _result("unreadable", box, truths, reason=said["error"])
        more = {"reason": said["reason"]} if "reason" in said else {}
        return _result(said["verdict"], said["extracted"] or box, truths, **more)

    def _request(self, truths: list[str], answer: str | None, boxed: bool) -> dict[str, Any]:
        return {
            "truths": truths,
            "answer": answer,
            "boxed": boxed,
            "unevaluated": self.allow_unevaluated,
            "rounding": self.float_rounding,
            "precision": self.numeric_precision,
        }

    def check_truth(self, truth: Any) -> None:
        """Read a ground truth as `compute` will.

        Raises:
            ValueError: There is none, or one that cannot be read within the limits.
            RewardError: No worker runs.
        """
        truths = truth_texts(truth)
        try:
            read = shared_pool("mathematics", self.limits, self.n_workers).ask(self._request(truths, None, False))
        except OverLimitsError as error:
            raise ValueError(f"the ground truth {truths!r:.200} takes more than {error} to understand") from error
        except WorkerError as error:
            raise RewardError(
                f"the ground truth could not be read: {error}", is_infrastructure=error.is_infrastructure
            ) from error
        if read.get("verdict") == "unreadable_truth" or "error" in read:
            raise ValueError(f"the ground truth {truths!r:.200} cannot be read: {read.get('reason') or read['error']}")


def _result(verdict: str, extracted: str | None, truths: list[str], **more: str) -> RewardResult:
    if extracted is not None and len(extracted) > MAX_SHOWN_CHARS:
        extracted = f"{extracted[:MAX_SHOWN_CHARS]}[...]"
    info = {"verdict": verdict, "extracted": extracted, "ground_truth": truths[0] if len(truths) == 1 else truths}
    return RewardResult(reward=float(verdict == "correct"), info={**info, **more})
