"""The vocabulary of environments: what goes into a step, what comes out of it, and how it is rewarded."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_serializer
from typing_extensions import Self

from strands_sglang import TerminationReason, TokenManager, Trajectory

from .identity import Identified


class TaskContext(BaseModel):
    """What is known of a task beside its question. Further fields are kept as they are given.

    Attributes:
        id: Names the task; evaluations keep results by it.
        ground_truth: What rewards compare with.
        conversation_history: Messages before the question.
    """

    model_config = ConfigDict(extra="allow")

    id: str | int | None = None
    ground_truth: Any = None
    conversation_history: list[Any] = Field(default_factory=list)


class Action(BaseModel):
    """One task for an agent.

    Attributes:
        message: The question: text, one Strands message, or a whole chat (Strands messages, or `{"role", "content"}`
            with content as text).
        task_context: What is known of the task beside it.
    """

    message: str | dict[str, Any] | list[Any]
    task_context: TaskContext = Field(default_factory=TaskContext)


class TokenObservation(BaseModel):
    """An episode as the token sequence that a trainer takes (models that record tokens only).

    Attributes:
        token_ids: All ids, shape (T,).
        prompt_length: Number of tokens of the opening prompt.
        loss_mask: 1 for tokens that the model sampled, 0 for all others; shape (T,).
        logprobs: One number or None per token, shape (T,).
    """

    model_config = ConfigDict(frozen=True)

    token_ids: list[int]
    prompt_length: int
    loss_mask: list[int]
    logprobs: list[float | None]

    @classmethod
    def from_token_manager(cls, tokens: TokenManager) -> Self | None:
        """The observation of a recorded sequence; None if nothing was recorded."""
        if not len(tokens):
            return None
        return cls(
            token_ids=tokens.token_ids,
            prompt_length=tokens.initial_prompt_length,
            loss_mask=tokens.loss_mask,
            logprobs=tokens.logprobs,
        )

    @model_serializer(mode="plain")
    def _fields(self) -> dict[str, Any]:
        # By name, since a subclass may have them elsewhere.
        return {name: getattr(self, name) for name in TokenObservation.model_fields}

    @property
    def initial_prompt_token_ids(self) -> list[int]:
        """The ids of the opening prompt, shape (P,)."""
        return self.token_ids[: self.prompt_length]

    @property
    def rollout_token_ids(self) -> list[int]:
        """The ids behind the opening prompt, shape (T - P,)."""
        return self.token_ids[self.prompt_length :]

    @property
    def rollout_loss_mask(self) -> list[int]:
        """The loss mask behind the opening prompt, shape (T - P,)."""
        return self.loss_mask[self.prompt_length :]

    @property
    def rollout_logprobs(self) -> list[float | None]:
        """The logprobs behind the opening prompt, shape (T - P,)."""
        return self.logprobs[self.prompt_length :]


class Observation(BaseModel):
    """What an episode left.

    Attributes:
        messages: The agent's messages since the start of the step.
        tokens: The main conversation's latest token sequence; None for models that record none.
        metrics: Numbers of the episode: model calls, tool calls, tokens, seconds, and what `compute_metrics` adds.
        trajectory: All recorded model calls; None for models that record none.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    messages: list[Any] = Field(default_factory=list)
    tokens: TokenObservation | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)
    trajectory: Trajectory | None = Field(default=None, exclude=True, repr=False)

    @property
    def final_response(self) -> str | None:
        """The answer: the text of the last message, without what it thinks aloud in `<think>` and the like.

        None if the assistant did not write that message, or wrote no text but thoughts.
        """
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return None
        texts = [block["text"] for block in self.messages[-1]["content"] if "text" in block]
        if not texts:
            return None
        text = "\n".join(texts)
        answer = without_thinking(text)
        return answer if answer or answer == text else None


class RewardResult(BaseModel):
    """A reward and how it came about.

    Attributes:
        reward: The reward.
        info: What a person who looks at it wants to know.
    """

    reward: float
    info: dict[str, Any] = Field(default_factory=dict)


class StepResult(BaseModel):
    """One episode.

    Attributes:
        observation: What it left.
        reward: Its reward; None where there is none: no reward function, or an end that says nothing of the policy.
        termination_reason: How it ended.
        error: What went wrong, as text; None if nothing did.
        reward_error: Why there is no reward although this end has one: the reward function failed.
        reward_error_is_infrastructure: Whether it failed for reasons that no answer can bring about. Every other
            failure counts as a wrong answer: who can make a reward fail must gain nothing by it.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    observation: Observation
    reward: RewardResult | None = None
    termination_reason: TerminationReason
    error: str | None = None
    reward_error: str | None = None
    reward_error_is_infrastructure: bool = False


class RewardError(RuntimeError):
    """A reward could not be computed.

    Attributes:
        is_infrastructure: Whether the reason is one that no answer can bring about: a judge's server that refuses
            connections, a machine that starts no process. Only then does an evaluation leave the sample out.
    """

    def __init__(self, message: str, *, is_infrastructure: bool = False) -> None:
        """Set the message and whose fault it is."""
        super().__init__(message)
        self.is_infrastructure = is_infrastructure


class RewardFunction(Identified, ABC):
    """Judges an episode."""

    @abstractmethod
    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Compute the reward.

        Args:
            action: The task.
            step_result: The episode, its reward still None.

        Raises:
            RewardError: There is none; it says whether the infrastructure is to blame. Any other exception counts as a
                failure that the answer could have brought about.
        """

    def check_truth(self, truth: Any) -> None:
        """Check that a task's ground truth can be compared with; asked while a data file is loaded, before any episode.

        Any truth will do unless a reward says otherwise.

        Args:
            truth: What stands in `TaskContext.ground_truth`.

        Raises:
            ValueError: It cannot; says what is wrong with it.
        """
        return None


_MARKS = re.compile(
    r"<(?P<end>/)?(?:[a-z]+:)?(?:think|thinking|thought|reasoning)>|\[(?P<end2>/)?THINK\]|◁(?P<end3>/)?think▷",
    re.IGNORECASE,
)


def without_thinking(text: str) -> str:
    """A text without what stands in `<think>` and the like.

    Thinking that the prompt opened ends with a lone `</think>`: all before it goes. Thinking that is never closed lasts
    to the end of the text. A text without such marks is returned as it is.
    """
    if _MARKS.search(text) is None:
        return text
    kept: list[str] = []
    position, is_thinking = 0, False
    for mark in _MARKS.finditer(text):
        if any(mark.groups()):
            if not is_thinking:
                kept.clear()
            is_thinking, position = False, mark.end()
        elif not is_thinking:
            kept.append(text[position : mark.start()])
            is_thinking = True
    if not is_thinking:
        kept.append(text[position:])
    return "".join(kept).strip()
