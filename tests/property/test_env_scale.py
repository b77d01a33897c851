"""Environments at their largest: one very long episode, and very many at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from strands_env.core import TerminationReason
from support.environments import ANSWER, ASK, CALL, CalculatorEnv, scripted_env

EPISODES = 2000


@pytest.mark.timeout(1800)  # nearly two minutes of CPU, most of it Strands copying its history
async def test_a_thousand_turns_with_tools_are_one_episode_of_one_sequence(chatml_tokenizer: Any) -> None:
    env, server = scripted_env(
        chatml_tokenizer, [CALL] * 1000 + [ANSWER], server={"context_length": 200_000}, max_tool_iterations=None
    )
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE, result.error
    assert result.observation.metrics["model_calls"] == 1001
    assert result.observation.metrics["tool_iterations"] == 1000
    assert [message["role"] for message in result.observation.messages] == ["user", "assistant"] * 1001
    [sequence] = result.observation.trajectory.sequences()
    last = server.requests[-1].input_ids
    assert sequence.token_ids[: len(last)] == last


@pytest.mark.timeout(600)
async def test_two_thousand_episodes_at_once_complete_on_one_model(chatml_tokenizer: Any) -> None:
    waiting = 0
    everybody = asyncio.Event()

    async def answer(request: Any) -> str:
        nonlocal waiting
        if "<tool_response>" in request.text:
            return ANSWER
        waiting += 1
        if waiting == EPISODES:
            everybody.set()
        await everybody.wait()  # so that all of them are on their way at once
        return CALL

    first, server = scripted_env(chatml_tokenizer, answer, client={"max_connections": EPISODES})
    environments = [CalculatorEnv(first.model_factory, first.reward_fn) for _ in range(EPISODES)]
    results = await asyncio.gather(*(env.step(ASK) for env in environments))
    assert {result.termination_reason for result in results} == {TerminationReason.TASK_COMPLETE}
    assert [result.reward.reward for result in results] == [1.0] * EPISODES
    assert all(len(result.observation.trajectory) == 2 for result in results)
    assert all(env.steps == ["reset", "cleanup"] for env in environments)
    assert len(server.requests) == 2 * EPISODES
