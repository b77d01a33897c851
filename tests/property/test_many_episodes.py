"""2,000 episodes at once in one process: each one ends, is kept once, and is its own."""

import re

import pytest

from strands_env.core import Action, TaskContext
from strands_env.core.models import sglang_model_factory
from strands_env.environments import CalculatorEnvironment
from strands_env.eval import Evaluator
from strands_env.rewards import ExactMatchReward
from strands_sglang.testing import ScriptedSGLang
from support.agents import call
from support.environments import lines


@pytest.mark.timeout(600)
async def test_two_thousand_episodes_at_once_are_each_their_own(chatml_tokenizer, tmp_path):
    episodes = 2_000

    def solve(request):
        left = int(re.findall(r"What is (\d+) \+ 1", request.text)[-1])
        return str(left + 1) if "<tool_response>" in request.text else call("calculator", expression=f"{left} + 1")

    server = ScriptedSGLang(chatml_tokenizer, solve)
    factory = sglang_model_factory(tokenizer=chatml_tokenizer, client=server.client())
    reward_fn = ExactMatchReward()

    async def env_factory(action):
        return CalculatorEnvironment(factory, reward_fn)

    tasks = [
        Action(message=f"What is {n} + 1?", task_context=TaskContext(id=n, ground_truth=str(n + 1)))
        for n in range(episodes)
    ]
    evaluator = Evaluator(
        env_factory, max_concurrency=episodes, keep_tokens=True, output_path=tmp_path / "out", show_progress=False
    )
    metrics = evaluator.compute_metrics(await evaluator.run(tasks))
    assert (metrics["pass@1"], metrics["dropped_samples"]) == (1.0, 0.0)
    assert len(server.requests) == 2 * episodes
    records = lines(tmp_path / "out" / "results.jsonl")
    assert {record["prompt_id"] for record in records} == {str(n) for n in range(episodes)} and len(records) == episodes
    for record in records:
        text = chatml_tokenizer.decode(record["observation"]["tokens"]["token_ids"])
        assert record["message"] in text and record["final_response"] == record["task_context"]["ground_truth"]
