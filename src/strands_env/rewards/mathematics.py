r"""`MathReward`: whether an answer is mathematically equal to the ground truth, by the library math-verify.

Answers that exceed the limits of a worker process (`9^{9^{9^9}}`) are wrong, not errors: no grader would have found
them right, and an evaluation would retry an error forever.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from ..core.types import Action, RewardError, RewardFunction, RewardResult, StepResult
from .answers import ground_truths, question_of, truth_texts
from .jobs.finding import boxed_answer
from .workers import OverLimitsError, WorkerError, WorkerLimits, shared_pool

MAX_ANSWER_CHARS = 20_000
MAX_BOX_CHARS = 5_000
MAX_SHOWN_CHARS = 200


class MathReward(RewardFunction):
    r"""1 if the answer is mathematically equal to the ground truth, 0 otherwise.

    The ground truth is a string, a number, or a list of right answers. The answer is the first of these that the
    response has:

    1. The content of the last complete `\boxed{...}`, with the boxes joined to it by "and", "or" or a comma.
    2. Unless `require_boxed` is set, and within the last 20,000 characters: the whole text if it is only an answer;
       what the last "answer is", "answer:" or `####` introduces; what the last sentence equates something to; the last
       formula or number.

    What the response takes back ("Wait, that's wrong. It's 4.") is not its answer. What it negates, doubts, guesses or
    offers as one of several values is not right, and neither is what cannot be read.

    Answers of different kinds are never equal: a number is not a set, a point is not a list, `x > 5` is not 5, `2516_8`
    is not 2516, and "east" is not "seat". Numbers must be exactly equal (`1/2`, `0.5`, `\frac{1}{2}` and `5e-1` are; of
    a decimal such as 0.30000000000000004, the first 15 digits count). Formulas are parsed by
    [math-verify](https://github.com/huggingface/Math-Verify) and must have equal values at several points. The order of
    lists and sets does not matter, unless the values have different names: `x = 1, y = 2` is `1, 2`. Units, currency
    signs and names (`x = 5`) may be missing on one side, a percent sign only in the answer; if both sides have them,
    they must agree. An answer whose equality cannot be decided is wrong, and the verdict says why.

    The letter of a choice may come with a number or a formula, or with words if the task's message has them after this
    letter: `A) eliminated` is not A.

    An unevaluated answer is refused: operations that the ground truth does not have, such as `25 \times 17` for 425, a
    sum or an integral, must be carried out.

    Answers are parsed and compared in worker processes with limits on CPU time and memory. An answer that exceeds them,
    such as `9^{9^{9^9}}`, is wrong. Waiting for a busy worker does not count toward the environment's `reward_timeout`.
    A worker takes about two seconds of CPU time to start, and then some milliseconds per answer. Expensive answers wait
    in a queue of their own, and those that exceed the limits are remembered.

    `info` has `extracted` (the answer), `ground_truth`, and `verdict`, which is one of

    - `correct` or `wrong`,
    - `no_answer`, or `not_boxed` (only with `require_boxed`),
    - `too_long`: the box has more than 5,000 characters,
    - `over_limits`: the answer exceeds the limits of a worker,
    - `unevaluated`: operations are not carried out, whether or not the value is right,
    - `unreadable`: the answer is in no known notation,
    - `unreadable_truth`: the ground truth is in no known notation; `check_truth` reports this before any episode.

    Needs the `env` extra.
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
        r"""Create the reward. Rewards with the same limits share their workers.

        Args:
            require_boxed: Whether an answer outside of `\boxed{}` counts as no answer.
            allow_unevaluated: Whether operations may be left unevaluated: `25 \times 17` for 425.
            float_rounding: Number of decimals to which numbers must agree; None for exact equality.
            numeric_precision: Significant digits from which on a decimal counts as a floating-point number. It then
                equals every number that rounds to it; integers stay exact.
            limits: Limits for one answer; None for the defaults of
                [`WorkerLimits`][strands_env.rewards.WorkerLimits].
            n_workers: Maximum number of worker processes; None for one per CPU, at most 8.

        Raises:
            ImportError: math-verify is not installed.
        """
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("MathReward needs math-verify: pip install -e '.[env]'")
        self.require_boxed = require_boxed
        self.allow_unevaluated = allow_unevaluated
        self.float_rounding = float_rounding
        self.numeric_precision = numeric_precision
        self.limits = limits or WorkerLimits()
        self.n_workers = n_workers

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Compare the answer with the ground truth.

        Raises:
            RewardError: The task has no ground truth, or no worker could be started (infrastructure).
        """
        truths = ground_truths(action)
        text = step_result.observation.final_response
        if text is None:
            return _result("no_answer", None, truths)
        text = text.replace("’", "'")
        box = boxed_answer(text)
        if box is None and self.require_boxed:
            return _result("not_boxed", None, truths)
        if box is not None and len(box) > MAX_BOX_CHARS:
            return _result("too_long", box, truths)
        answer = text[-MAX_ANSWER_CHARS:] if box is None else box
        if answer.strip() in (truth.strip() for truth in truths):
            return _result("correct", answer.strip(), truths)
        pool = shared_pool("equivalence", self.limits, self.n_workers)
        try:
            response = await pool.run(self._request(truths, answer, box is not None, question_of(action)))
        except OverLimitsError as error:
            verdict = "unreadable_truth" if error.stage is None else "over_limits"
            return _result(verdict, box, truths, limit=str(error))
        except WorkerError as error:
            raise RewardError(
                f"the answer could not be compared: {error}", is_infrastructure=error.is_infrastructure
            ) from error
        if "error" in response:
            return _result("unreadable", box, truths, reason=response["error"])
        return _result(response["verdict"], response["extracted"] or box, truths, reason=response["reason"])

    def _request(self, truths: list[str], answer: str | None, boxed: bool, question: str) -> dict[str, Any]:
        return {
            "truths": truths,
            "answer": answer,
            "boxed": boxed,
            "question": question,
            "unevaluated": self.allow_unevaluated,
            "rounding": self.float_rounding,
            "precision": self.numeric_precision,
        }

    def check_truth(self, truth: Any) -> None:
        """Check that the ground truth can be parsed.

        Args:
            truth: Value of `TaskContext.ground_truth`.

        Raises:
            ValueError: It is not a string, a number or a list of them, or it cannot be parsed within the limits.
            RewardError: No worker could be started (infrastructure).
        """
        truths = truth_texts(truth)
        try:
            read = shared_pool("equivalence", self.limits, self.n_workers).ask(self._request(truths, None, False, ""))
        except OverLimitsError as error:
            raise ValueError(f"the ground truth {truths!r:.200} takes more than {error} to read") from error
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
    info |= {name: value for name, value in more.items() if value}
    return RewardResult(reward=float(verdict == "correct"), info=info)
