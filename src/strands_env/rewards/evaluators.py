"""`EvaluatorReward`: an evaluator of Strands' own package, strands-agents-evals, scores the episode."""

from __future__ import annotations

from itertools import chain
from typing import Any

from typing_extensions import override

from ..core.environment import new_trajectory
from ..core.identity import describe
from ..core.types import Action, RewardError, RewardFunction, RewardResult, StepResult
from .answers import question_of
from .judging import is_infrastructure


class EvaluatorReward(RewardFunction):
    """The mean score of an evaluator of `strands-agents-evals`.

    The evaluator gets the task's question, the final answer, the ground truth as the expected output, the trajectory
    that `trajectory_of` returns, and what the task's context has of `expected_trajectory`, `expected_assertion` and
    other fields of the package's `EvaluationData`. Rows that it marks as not applicable are left out. An episode
    without an answer gets 0, and the evaluator is not asked.

    The calls of an evaluator's model belong to no episode: they are not recorded in its trajectory and never trained.

    `info` has `verdict` (`judged` or `no_answer`) and `reasons`. Needs the `evals` extra.

    Examples:
        >>> EvaluatorReward(OutputEvaluator("The answer is polite.", model=judge))
    """

    asks_a_model = True

    def __init__(self, evaluator: Any) -> None:
        """Create the reward.

        Args:
            evaluator: An evaluator of `strands_evals.evaluators`, or a subclass of its `Evaluator`.
        """
        self.evaluator = evaluator

    def trajectory_of(self, messages: list[Any]) -> Any:
        """Convert the episode's messages to the trajectory that the evaluator reads: the names of the called tools.

        Evaluators of traces, such as `HelpfulnessEvaluator`, need a `Session` instead: `examples/evaluators` makes one.
        """
        blocks = chain.from_iterable(message["content"] for message in messages)
        return [block["toolUse"]["name"] for block in blocks if "toolUse" in block]

    @override
    def identity(self) -> dict[str, Any]:
        """Describe the reward, with all arguments of the evaluator that the package can store."""
        return {**super().identity(), "evaluator": describe(self.evaluator.to_dict())}

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Ask the evaluator.

        Raises:
            RewardError: The evaluator raised an error, or gave no readable score. It counts as infrastructure if the
                evaluator's model could not be reached.
        """
        from strands_evals.types.evaluation import EvaluationData, EvaluationOutput

        answer = step_result.observation.final_response
        if answer is None:
            return RewardResult(reward=0.0, info={"verdict": "no_answer"})
        context = action.task_context
        case = {"input": question_of(action), "actual_output": answer, "expected_output": context.ground_truth}
        try:
            case["actual_trajectory"] = self.trajectory_of(step_result.observation.messages)
            data = EvaluationData.model_validate({**(context.model_extra or {}), **case})
            with new_trajectory(getattr(self.evaluator, "model", None)):  # it is dropped
                rows = await self.evaluator.evaluate_async(data)
            judged = [row for row in map(EvaluationOutput.model_validate, rows) if not row.not_applicable]
            if not judged:
                raise ValueError("it is not applicable")
            score = sum(row.score for row in judged) / len(judged)
        except Exception as error:
            message = f"{type(self.evaluator).__name__} gave no score: {error!r}"
            raise RewardError(message, is_infrastructure=is_infrastructure(error)) from error
        return RewardResult(reward=score, info={"verdict": "judged", "reasons": [row.reason for row in judged]})
