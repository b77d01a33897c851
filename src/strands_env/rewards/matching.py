"""Rewards that compare strings."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from ..core.types import Action, RewardError, RewardFunction, RewardResult, StepResult
from .answers import ground_truths, truth_texts
from .jobs.finding import last_boxed
from .workers import OverLimitsError, WorkerError, WorkerLimits, shared_pool

REGEX_LIMITS = WorkerLimits(cpu_s=1.0, wall_s=60.0, memory_bytes=512 << 20, requests=100_000)


class ExactMatchReward(RewardFunction):
    r"""1 if the answer equals the ground truth, or one of a list of ground truths; 0 otherwise.

    Leading and trailing whitespace, the amount of other whitespace, and different Unicode encodings of the same
    character are ignored. `info` has `verdict` (`correct`, `wrong` or `no_answer`), `extracted` (the answer) and
    `ground_truth`.
    """

    def __init__(self, *, ignore_case: bool = False, boxed: bool = False) -> None:
        r"""Create the reward.

        Args:
            ignore_case: Whether upper and lower case are equal.
            boxed: Whether the answer is the content of the last `\boxed{}` instead of the whole text.
        """
        self.ignore_case = ignore_case
        self.boxed = boxed

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Compare the answer with the ground truth.

        Raises:
            RewardError: The task has no ground truth.
        """
        truths = ground_truths(action)
        answer = step_result.observation.final_response
        if answer is not None and self.boxed:
            answer = last_boxed(answer)
        return _compared(answer, truths, self.ignore_case)

    def check_truth(self, truth: Any) -> None:
        """Check that the ground truth is a string, a number, or a list of them."""
        truth_texts(truth)


class RegexReward(RewardFunction):
    r"""1 if the answer matches a pattern, 0 otherwise.

    With `group`, the group's content in the last match is the answer, and it must equal the ground truth as for
    `ExactMatchReward`. `info` has `verdict` (`correct`, `wrong`, `no_answer` or `no_match`) and `extracted`, the match.
    Patterns run in a worker process, since a pattern can take exponential time on some texts.

    Examples:
        >>> RegexReward(r"\\boxed\{")
        >>> RegexReward(r"#### (.*)", group=1)
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
        """Create the reward.

        Args:
            pattern: Regular expression in the syntax of `re`.
            flags: Flags of `re`.
            whole: Whether the whole answer must match instead of a part of it.
            group: Number or name of the group that contains the answer; None to compare nothing.
            ignore_case: Whether upper and lower case are equal when the group is compared.
            limits: Limits for one match; by default 1 second of CPU time and 512 MiB of memory.

        Raises:
            ValueError: The pattern has no such group.
            re.error: The pattern is invalid.
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
        """Match the answer, and compare the group with the ground truth.

        Raises:
            RewardError: The match exceeds the limits, the task lacks a ground truth that `group` needs, or no worker
                could be started (infrastructure).
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
                f"the pattern {self.pattern!r} took more than {error} on an answer of {len(text)} characters; rewrite"
                " it so that no part can match in many ways"
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
        """Check that the ground truth is a string, a number, or a list of them; only if `group` is given."""
        if self.group is not None:
            truth_texts(truth)


def _compared(answer: str | None, truths: list[str], ignore_case: bool) -> RewardResult:
    shown = truths[0] if len(truths) == 1 else truths
    if answer is None:
        return RewardResult(reward=0.0, info={"verdict": "no_answer", "extracted": None, "ground_truth": shown})
    is_equal = _normalized(answer, ignore_case) in {_normalized(truth, ignore_case) for truth in truths}
    info = {"verdict": "correct" if is_equal else "wrong", "extracted": answer, "ground_truth": shown}
    return RewardResult(reward=float(is_equal), info=info)


def _normalized(text: str, ignore_case: bool) -> str:
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.casefold() if ignore_case else text
