"""An environment's step: one whole episode, its observation, its reward, its end."""

from __future__ import annotations

from typing import Any

import pytest
from strands import tool

from strands_env.core import (
    Action,
    Environment,
    Observation,
    RewardFunction,
    RewardResult,
    StepResult,
    TaskContext,
    TerminationReason,
)
from strands_sglang import SGLangModel
from strands_sglang.testing import ScriptedSGLang
from support.agents import call, make_tools


class Contains(RewardFunction):
    """1.0 if the answer contains the ground truth."""

    async def compute(self, *, action: Action, step_result: StepResult) -> RewardResult:
        answer = step_result.observation.final_response or ""
        return RewardResult(reward=float(str(action.task_context.ground_truth) in answer))


class MathEnv(Environment):
    def get_tools(self) -> list[Any]:
        return make_tools()[0]


ASK = Action(message="What is 25 * 17?", task_context=TaskContext(ground_truth="425"))
CALL = call("calculator", expression="25 * 17")


async def test_a_step_is_a_whole_episode_with_its_tokens_and_its_reward(rollout: Any) -> None:
    server, model = rollout([CALL, "It is 425."])
    result = await MathEnv(model_factory=lambda: model, reward_fn=Contains()).step(ASK)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert result.reward is not None and result.reward.reward == 1.0
    assert result.observation.final_response == "It is 425."
    assert [message["role"] for message in result.observation.messages] == ["user", "assistant", "user", "assistant"]
    tokens = result.observation.tokens
    assert tokens is not None
    last = server.requests[-1]
    assert tokens.token_ids[: len(last.input_ids)] == last.input_ids
    assert result.observation.metrics["tool_calls"] == 1


async def test_a_thousand_turns_with_tools_are_one_episode(rollout: Any) -> None:
    server, model = rollout([CALL] * 1000 + ["It is 425."])
    env = MathEnv(model_factory=lambda: model, reward_fn=Contains(), max_tool_iterations=None)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE, result.error
    assert result.observation.metrics["model_calls"] == 1001
