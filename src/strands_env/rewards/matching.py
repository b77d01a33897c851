"""Rewards that compare texts."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from ..core.types import Action, RewardError, RewardFunction, RewardResult, StepResult
from .answers import ground_truths, last_boxed, truth_texts
from .workers import OverLimitsError, WorkerError, WorkerLimits, shared_pool

REGEX_LIMITS = WorkerLimits(cpu_s=1.0, wall_s=60.0, memory_bytes=512 << 20, requests=100_000)


class ExactMatchReward(RewardFunction):
    r"""1 if the answer is the ground truth (or one of them, for a list), 0 otherwise.

    White space at the ends and the length of white space do not count, nor do ways to write the same character in
    Unicode.
    `info` has `verdict` (correct, wrong, no_answer), `extracted` and `ground_truth`.
    """

    def __init__(self, *, ignore_case: bool = False, boxed: bool = False) -> None:
        r"""Set up the reward.

        Args:
            ignore_case: Whether capital letters count as small ones.
            boxed: Whether the answer is what stands in the last `\boxed{}` rather than the whole text.
        """
        self.ignore_case = ignore_case
        self.boxed = boxed

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Compare the answer with the task's ground truth.

        Raises:
            RewardError: The task has no ground truth.
        """
        truths = ground_truths(action)
        answer = step_result.observation.final_response
        if answer is not None and self.boxed:
            answer = last_boxed(answer)
        return _compared(answer, truths, self.ignore_case)

    def check_truth(self, truth: Any) -> None:
        """Refuse a ground truth that is none."""
        truth_texts(truth)


class RegexReward(RewardFunction):
    """1 if the answer matches a pattern, 0 otherwise.

    With `group` what the group caught in the last match is the answer, and it has to be the ground truth (`r"####
    (.*)", group=1`).
    `info` has `verdict` (correct, wrong, no_answer, no_match) and `extracted`.
    """

    def __init__(
        self,
        pattern: str,
        *,
        flags: int = 0,
        whole: bool = False,
        group: int | str | None = None,
        ignore_case: bool = False,
        limits: WorkerLimits = REGEX_LIMITS,
    ) -> None:
        """Compile the pattern.

        Args:
            pattern: In the syntax of `re`.
            flags: Flags of `re`.
            whole: Whether the whole answer has to match, and not only a part of it.
            group: The group that holds the answer.
            ignore_case: Whether capital letters count as small ones when the group is compared.
            limits: What one match may use.

        Raises:
            ValueError: There is no such group.
            re.error: The pattern is none.
        """
        compiled = re.compile(pattern, flags)
        if group is not None and not (
            group in compiled.groupindex if isinstance(group, str) else 0 <= group <= compiled.groups
        ):
            raise ValueError(f"the pattern {pattern!r} has no group {group!r}")
        self.pattern = pattern
        self.flags = int(flags)
        self.whole = whole
        self.group = group
        self.ignore_case = ignore_case
        self.limits = limits

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Match the answer.

        Raises:
            RewardError: The pattern takes for ever on this answer, which is a fault of the pattern; the task has no
                ground truth, and one is needed; no worker runs.
        """
        truths = ground_truths(action) if self.group is not None else None
        text = step_result.observation.final_response
        if text is None:
            return RewardResult(reward=0.0, info={"verdict": "no_answer", "extracted": None})
        try:
            answer = await shared_pool("regexes", self.limits, 2).run(
                {
                    "pattern": self.pattern,
                    "flags": self.flags,
                    "text": text,
                    "whole": self.whole,
                    "group": self.group,
                }
            )
        except OverLimitsError as error:
            raise RewardError(
                f"the pattern {self.pattern!r} took more than {error} on an answer of {len(text)} characters; write"
                " it so that nothing in it can match in many ways"
            ) from error
        except WorkerError as error:
            raise RewardError(
                f"the answer could not be matched: {error}", is_infrastructure=error.is_infrastructure
            ) from error
        if "error" in answer:
            raise RewardError(f"the pattern {self.pattern!r} failed: {answer['error']}")
        matched = answer["matched"]
        if matched is None:
            return RewardResult(reward=0.0, info={"verdict": "no_match", "extracted": None})
        if truths is None:
            return RewardResult(reward=1.0, info={"verdict": "correct", "extracted": matched})
        return _compared(matched, truths, self.ignore_case)

    def check_truth(self, truth: Any) -> None:
        """Refuse a ground truth that is none where a group is compared with it."""
        if self.group is not None:
            truth_texts(truth)


def _compared(answer: str | None, truths: list[str], ignore_case: bool) -> RewardResult:
    shown = truths[0] if len(truths) == 1 else truths
    if answer is None:
        return RewardResult(reward=0.0, info={"verdict": "no_answer", "extracted": None, "ground_truth": shown})
    same = _plain(answer, ignore_case) in {_plain(truth, ignore_case) for truth in truths}
    info = {"verdict": "correct" if same else "wrong", "extracted": answer, "ground_truth": shown}
    return RewardResult(reward=float(same), info=info)


def _plain(text: str, ignore_case: bool) -> str:
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.casefold() if ignore_case else text
