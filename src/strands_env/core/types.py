"""Inputs and outputs of an environment's step, and the interface of reward functions."""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_serializer
from typing_extensions import Self

from strands_sglang import Journal, TerminationReason, TokenManager, Trajectory
from strands_sglang.credit import Episode

from .identity import Identified

UNWRITTEN = "unwritten_blocks"
"""Key in a message's `metadata.custom`: positions of the blocks that Strands wrote in place of cut tool calls."""


class TaskContext(BaseModel):
    """Data of a task besides its message. Additional fields are kept unchanged.

    Attributes:
        id: Identifier of the task. Evaluations store results by it.
        ground_truth: What rewards compare the answer with. The rewards of `strands_env.rewards` accept a string, a
            number, or a list of right answers.
        conversation_history: Messages before the task's message, in the same forms. They are not part of the
            observation and not counted in its metrics.
    """

    model_config = ConfigDict(extra="allow")

    id: str | int | None = None
    ground_truth: Any = None
    conversation_history: list[Any] = Field(default_factory=list)


class Action(BaseModel):
    """One task for an agent.

    Attributes:
        message: The prompt: a string, one message, or a list of messages whose last one is the user's. Messages are in
            Strands' form or OpenAI's (system, user, assistant and tool roles, tool calls, and images as base64 data
            URLs). Content that is not supported is an error when the step starts, and in a file when it is loaded.
        task_context: Data of the task besides its message.

    Examples:
        >>> Action(message="What is 25 * 17?", task_context=TaskContext(id="product", ground_truth="425"))
        >>> Action(message=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}])
    """

    message: str | dict[str, Any] | list[Any]
    task_context: TaskContext = Field(default_factory=TaskContext)


class TokenObservation(BaseModel):
    """The token sequence of an episode, as a trainer uses it. Only models that record tokens have one.

    Attributes:
        token_ids: Prompt and response token ids, shape (T,).
        prompt_length: Number of tokens of the initial prompt, P.
        loss_mask: 1 for tokens sampled by the model, 0 for all others; shape (T,).
        logprobs: Logprob of each token, or None for tokens without one; shape (T,).
    """

    model_config = ConfigDict(frozen=True)

    token_ids: list[int]
    prompt_length: int
    loss_mask: list[int]
    logprobs: list[float | None]

    @classmethod
    def from_token_manager(cls, tokens: TokenManager) -> Self | None:
        """Create an observation from a recorded sequence; return None if nothing was recorded.

        Args:
            tokens: The recorded sequence.
        """
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
        # By name: a subclass may store them elsewhere.
        return {name: getattr(self, name) for name in TokenObservation.model_fields}

    @property
    def rollout_token_ids(self) -> list[int]:
        """Token ids after the initial prompt, shape (T - P,)."""
        return self.token_ids[self.prompt_length :]

    @property
    def rollout_loss_mask(self) -> list[int]:
        """Loss mask after the initial prompt, shape (T - P,)."""
        return self.loss_mask[self.prompt_length :]

    @property
    def rollout_logprobs(self) -> list[float | None]:
        """Logprobs after the initial prompt, shape (T - P,)."""
        return self.logprobs[self.prompt_length :]


class Observation(BaseModel):
    """Messages, tokens and metrics of an episode.

    Attributes:
        messages: The agent's messages since the start of the step, without `conversation_history`.
        tokens: Latest token sequence of the main conversation; None for models that record no tokens.
        metrics: Numbers of the episode, and what `Environment.compute_metrics` adds:

            - `model_calls`, `tool_iterations`, `tool_calls`, `tool_errors`, `tool_parse_errors`: counts.
            - `input_tokens` (summed over all prompts), `cached_tokens`, `sampled_tokens`, `total_tokens`: tokens.
            - `sequences`: token sequences to train on; only for models that record tokens.
            - `seconds`, `model_seconds`, `reward_seconds`: durations of the episode, its model calls and its reward.
            - `attempts`: how often the episode ran, retries included.
            - `tools`: for each tool name its `calls`, `errors`, `parse_errors` and `seconds`.
        trajectory: All recorded model calls; None for models that record no tokens. It is not serialized.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    messages: list[Any] = Field(default_factory=list)
    tokens: TokenObservation | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)
    trajectory: Trajectory | None = Field(default=None, exclude=True, repr=False)

    @property
    def final_response(self) -> str | None:
        """The text that the model wrote in the last message, without reasoning in `<think>` or similar tags.

        None if the last message is not the assistant's, or if it has no text besides reasoning. What Strands writes in
        place of a tool call that was cut at `max_new_tokens` is left out.
        """
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return None
        last = self.messages[-1]
        unwritten = last.get("metadata", {}).get("custom", {}).get(UNWRITTEN, ())
        blocks = [block for number, block in enumerate(last["content"]) if number not in unwritten]
        texts = [block["text"] for block in blocks if "text" in block]
        if not texts:
            return None
        text = "\n".join(texts)
        answer = without_thinking(text)
        return answer if answer or answer == text else None


class RewardResult(BaseModel):
    """A reward and details about it.

    Attributes:
        reward: The reward; must be finite.
        info: Details for people and metrics, such as `verdict`. Evaluations store it.
    """

    reward: float
    info: dict[str, Any] = Field(default_factory=dict)


class StepResult(BaseModel):
    """The result of one episode.

    Attributes:
        observation: Messages, tokens and metrics of the episode.
        reward: The reward; None if the environment has no reward function, if the reward function failed, or if the
            outcome has no reward: a failure, an abort, a cancellation, or a timeout before the model answered.
        termination_reason: How the episode ended. A failing reward function does not change it.
        error: What failed, as text; None if nothing did.
        reward_error: How the reward function failed: it raised, timed out or returned something other than a finite
            number. None if it did not fail.
        reward_error_is_infrastructure: Whether it failed for a reason that no answer can cause. Every other failure
            counts as a wrong answer, so that a policy gains nothing by making its reward function fail.
        journal: Its journal, if the environment writes one. Call `journal.acknowledge()` to delete it, once the episode
            is stored or trained. It is not part of the dumped result.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    observation: Observation
    reward: RewardResult | None = None
    termination_reason: TerminationReason
    error: str | None = None
    reward_error: str | None = None
    reward_error_is_infrastructure: bool = False
    journal: Journal | None = Field(default=None, exclude=True, repr=False)

    def episode(
        self, group: Hashable, *, id: str | None = None, turn_rewards: Mapping[int, float] | None = None
    ) -> Episode:
        """Return the episode for [`training_rows`][strands_sglang.credit.training_rows].

        Args:
            group: The prompt that the episode's siblings share.
            id: Name of the episode, unique in a batch. By default a random one.
            turn_rewards: Rewards of single turns by `Turn.index`.

        Raises:
            ValueError: The model recorded no tokens.
        """
        if self.observation.trajectory is None:
            raise ValueError("the episode has no trajectory to train on: its model records no tokens")
        return Episode(
            self.observation.trajectory,
            None if self.reward is None else self.reward.reward,
            group,
            uuid.uuid4().hex if id is None else id,
            turn_rewards or {},
            self.termination_reason,
            self.journal,
        )


class RewardError(RuntimeError):
    """A reward could not be computed.

    Attributes:
        is_infrastructure: Whether no answer can cause this failure, such as a judge's server that refuses connections
            or a machine that starts no process. Evaluations drop the sample only if it is True; otherwise the sample
            counts as wrong.
    """

    def __init__(self, message: str, *, is_infrastructure: bool = False) -> None:
        """Create the error.

        Args:
            message: What failed, and why.
            is_infrastructure: Whether no answer can cause this failure.
        """
        super().__init__(message)
        self.is_infrastructure = is_infrastructure


class RewardFunction(Identified, ABC):
    """Base class of rewards: computes the reward of an episode.

    Attributes:
        asks_a_model: Whether it asks a model, whose answers no episode records; `replay` then leaves it out.
    """

    asks_a_model: bool = False

    @abstractmethod
    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        """Compute the reward. A sync override runs in its own thread and may block.

        Args:
            action: The task.
            step_result: The episode; its reward is still None.

        Returns:
            The reward. A plain number is accepted too.

        Raises:
            RewardError: The reward cannot be computed; `is_infrastructure` says whether an answer can cause this. Any
                other exception counts as a failure that the answer caused.
        """

    def check_truth(self, truth: Any) -> None:
        """Check that answers can be compared with a ground truth. The default accepts everything.

        `load_tasks(..., check_truth=reward_fn.check_truth)` calls it for each row of a file, before any episode runs.

        Args:
            truth: Value of `TaskContext.ground_truth`.

        Raises:
            ValueError: Answers cannot be compared with it; says why.
        """
        return None


_TAGS = re.compile(
    r"<(?P<end>/)?(?:[a-z]+:)?(?:think|thinking|thought|reasoning)>|\[(?P<end2>/)?THINK\]|◁(?P<end3>/)?think▷",
    re.IGNORECASE,
)


def without_thinking(text: str) -> str:
    """Remove reasoning in `<think>` or similar tags.

    A `</think>` without an opening tag ends reasoning that the prompt opened: all text before it is removed. Reasoning
    that is never closed extends to the end. A text without tags is returned unchanged.
    """
    if _TAGS.search(text) is None:
        return text
    kept: list[str] = []
    position, is_thinking = 0, False
    for tag in _TAGS.finditer(text):
        if any(tag.groups()):
            if not is_thinking:
                kept.clear()
            is_thinking, position = False, tag.end()
        elif not is_thinking:
            kept.append(text[position : tag.start()])
            is_thinking = True
    if not is_thinking:
        kept.append(text[position:])
    return "".join(kept).strip()
