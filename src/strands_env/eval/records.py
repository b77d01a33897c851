"""What an evaluation keeps of a sample, and how it is told from every other.

A *prompt* is a task; a *sample* is one episode of it. A sample's key is a digest of the task's whole content, the
sample's index and the configuration, so a record can be taken for another sample's only if all three are the same. Two
tasks with equal content are two prompts: they are told apart by how often the content came before.

A sample is *finished* unless the infrastructure failed, or something before the model was asked: such a sample says
nothing of the policy, is kept apart with its cause, and is *dropped* from every metric until a later run finishes it.
A finished sample is *errored* if it ought to have a reward and has none: the reward function, a judge, a tool or the
environment failed, or the time was up. Whoever writes the answers may bring that about, so it counts as a wrong answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from strands_sglang import TerminationReason

from ..core.types import Action, Observation, RewardResult, StepResult, TaskContext, TokenObservation
from .json_lines import digest

_NOT_THE_POLICY = frozenset(
    {TerminationReason.INFRASTRUCTURE_ERROR, TerminationReason.ABORTED, TerminationReason.CANCELLED}
)

RECORD_START = b'{"key":"'
"""How every record begins: tells a torn record from a file that is someone else's."""


class EvalSample(BaseModel):
    """One episode of an evaluation.

    Attributes:
        key: Names it among all samples of all configurations.
        prompt_id: Names its prompt; results are grouped by it.
        sample_index: Which of its prompt's samples it is, from 0.
        action: The task.
        step_result: The episode. Tokens only with `keep_tokens`; no trajectory.
        seconds: How long the episode took.
        is_finished: Whether its end says something of the policy; else it is dropped from metrics, and tried again on
            resume.
        environment: What made its environment the one that it was; None where that is not known, as in old files.
        is_errored: Whether it is finished, ought to have a reward and has none; it counts as a wrong answer.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    key: str = ""
    prompt_id: str
    sample_index: int = 0
    action: Action
    step_result: StepResult
    seconds: float = 0.0
    is_finished: bool = True
    is_errored: bool = False
    environment: dict[str, Any] | None = Field(default=None, repr=False)

    @property
    def aborted(self) -> bool:
        """Whether it is dropped: the opposite of `is_finished`."""
        return not self.is_finished

    @property
    def reward(self) -> float | None:
        """Its reward; None if it has none."""
        return None if self.step_result.reward is None else self.step_result.reward.reward

    def to_record(self, config_digest: str) -> dict[str, Any]:
        """The sample as JSON-like data. The key comes first; see `RECORD_START`."""
        result = self.step_result
        observation: dict[str, Any] = {
            "messages": result.observation.messages,
            "metrics": result.observation.metrics,
        }
        if result.observation.tokens is not None:
            observation["tokens"] = result.observation.tokens.model_dump()
        return {
            "key": self.key,
            "config": config_digest,
            "prompt_id": self.prompt_id,
            "sample_index": self.sample_index,
            "reward": None if result.reward is None else result.reward.reward,
            "reward_info": None if result.reward is None else result.reward.info,
            "termination_reason": result.termination_reason.value,
            "error": result.error,
            "reward_error": result.reward_error,
            "reward_error_is_infrastructure": result.reward_error_is_infrastructure,
            "is_errored": self.is_errored,
            "seconds": self.seconds,
            "final_response": result.observation.final_response,
            "environment": self.environment,
            "message": self.action.message,
            "task_context": self.action.task_context.model_dump(),
            "observation": observation,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], *, is_finished: bool = True) -> EvalSample:
        """The sample of a record.

        Args:
            record: What `to_record` made, read back.
            is_finished: Whether it is one of a finished sample: the file that it is from tells.

        Raises:
            ValueError: It is not one.
        """
        try:
            observation = record["observation"]
            tokens = observation.get("tokens")
            reward = record["reward"]
            return cls(
                key=record["key"],
                prompt_id=record["prompt_id"],
                sample_index=record["sample_index"],
                seconds=record["seconds"],
                is_finished=is_finished,
                is_errored=bool(record.get("is_errored")),  # like the other fields that old records lack
                environment=record.get("environment"),
                action=Action(
                    message=record["message"], task_context=TaskContext.model_validate(record["task_context"])
                ),
                step_result=StepResult(
                    observation=Observation(
                        messages=observation["messages"],
                        metrics=observation["metrics"],
                        tokens=None if tokens is None else TokenObservation.model_validate(tokens),
                    ),
                    reward=None if reward is None else RewardResult(reward=reward, info=record["reward_info"] or {}),
                    termination_reason=TerminationReason(record["termination_reason"]),
                    error=record["error"],
                    reward_error=record.get("reward_error"),
                    reward_error_is_infrastructure=bool(record.get("reward_error_is_infrastructure")),
                ),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a record of a sample: {error!r}") from error


def with_finite_reward(result: StepResult) -> StepResult:
    """An episode whose reward, if any, is a number: files have no NaN, and a resumed run must not differ."""
    if result.reward is None or math.isfinite(result.reward.reward):
        return result
    said = f"a reward is a finite number, not {result.reward.reward}"
    return result.model_copy(update={"reward": None, "reward_error": said, "error": result.error or said})


def says_something(result: StepResult) -> bool:
    """Whether an episode's end says something of the policy, so that the sample is finished."""
    if result.reward is not None:
        return True
    if result.termination_reason in _NOT_THE_POLICY or result.reward_error_is_infrastructure:
        return False
    metrics = result.observation.metrics
    # Of an agent that never asked its model: `reset` failed, say.
    was_asked = metrics.get("model_calls") != 0 and (metrics.get("sampled_tokens") != 0 or "sequences" not in metrics)
    return was_asked or result.termination_reason is not TerminationReason.AGENT_ERROR


def is_error(result: StepResult, *, is_judged: bool) -> bool:
    """Whether an episode whose end says something of the policy ought to have a reward and has none.

    Args:
        result: The episode.
        is_judged: Whether its environment has a reward function.
    """
    failed = result.reward_error is not None or result.termination_reason is TerminationReason.AGENT_ERROR
    return result.reward is None and (is_judged or failed)


Results = dict[str, list[EvalSample]]
"""All samples by prompt, in the order of the tasks and of the sample indices; dropped ones included."""


class Prompt(BaseModel):
    """A task of an evaluation with the names that it goes by."""

    model_config = ConfigDict(frozen=True)

    id: str
    digest: str
    action: Action = Field(repr=False)


class DuplicateTaskError(ValueError):
    """Two different tasks have one id."""


def name_prompts(actions: Iterable[Action]) -> list[Prompt]:
    """Give every task its id and digest.

    The id is the task's own (`task_context.id`) or made of its digest. A task that comes again, equal in everything,
    is a prompt of its own with `#2`, `#3` ... behind its id.

    Raises:
        DuplicateTaskError: Two different tasks have the same id.
    """
    prompts: list[Prompt] = []
    times: dict[str, int] = {}
    positions: dict[str, int] = {}
    for position, action in enumerate(actions):
        content = digest([action.message, action.task_context.model_dump()])
        times[content] = occurrence = times.get(content, 0) + 1
        prompt_id = f"task-{content[:12]}" if action.task_context.id is None else str(action.task_context.id)
        if occurrence > 1:
            prompt_id = f"{prompt_id}#{occurrence}"
        if prompt_id in positions:
            raise DuplicateTaskError(
                f"tasks {positions[prompt_id]} and {position} (from 0) are different tasks with the same id "
                f"{prompt_id!r}: results are kept by id, give each task its own"
            )
        positions[prompt_id] = position
        prompts.append(
            Prompt(id=prompt_id, digest=content if occurrence == 1 else digest([content, occurrence]), action=action)
        )
    return prompts
