"""Environments on a real server: whole episodes, exact tokens, every kind of end, and the example."""

import asyncio

from strands_env.core import Action, TaskContext, TerminationReason
from strands_env.core.models import sglang_model_factory
from strands_env.eval import Evaluator
from strands_sglang import SGLangClient
from support.environments import CalculatorEnv, Contains, worked_examples
from support.processes import run_example
from support.real_servers import running_requests


def environment(server, *, client, params=None, **settings):
    config = {"chat_template": server.chat_template} if server.chat_template else {}
    factory = sglang_model_factory(
        tokenizer=server.model_path,
        client=client,
        sampling_params={"temperature": 0.0, "max_new_tokens": 60, **(params or {})},
        **config,
    )
    return CalculatorEnv(factory, Contains(), system_prompt="You are a helpful assistant.", **settings)


def action(expression, value):
    history = worked_examples({"15 * 12": 180, "31 * 8": 248, "22 * 19": 418})
    context = TaskContext(id=expression, ground_truth=value, conversation_history=history)
    return Action(message=f"What is {expression}?", task_context=context)


async def test_concurrent_episodes_are_recorded_exactly(smollm_server):
    problems = {"27 * 43": 1161, "64 * 18": 1152, "52 * 77": 4004, "91 * 36": 3276}
    async with SGLangClient(smollm_server.base_url, max_retries=3) as client:
        env = environment(smollm_server, client=client, max_tool_iterations=3)
        results = await asyncio.gather(*(env.step(action(*problem)) for problem in problems.items()))
        for result in results:
            assert result.termination_reason not in (
                TerminationReason.INFRASTRUCTURE_ERROR,
                TerminationReason.AGENT_ERROR,
            ), result.error
            assert result.reward is not None
            tokens, trajectory = result.observation.tokens, result.observation.trajectory
            assert tokens is not None and trajectory is not None
            sampled = [token for turn in trajectory.turns for token in turn.output_ids]
            assert [t for t, mask in zip(tokens.token_ids, tokens.loss_mask, strict=True) if mask] == sampled
            assert len(trajectory.sequences()) == 1
    assert sum(result.observation.metrics["tool_calls"] for result in results) >= 2
    assert sum(result.reward.reward for result in results) >= 1


async def test_episode_out_of_time_leaves_its_partial_answer(smollm_server):
    async with SGLangClient(smollm_server.base_url, max_retries=3, abort_grace=60.0) as client:
        # With the prompt in the cache, a busy machine has sampled a token in time.
        await environment(smollm_server, client=client, params={"max_new_tokens": 1}).step(action("27 * 43", 1161))
        params = {"max_new_tokens": 4000, "ignore_eos": True}
        env = environment(smollm_server, client=client, params=params, episode_timeout=8.0)
        result = await env.step(action("27 * 43", 1161))
    assert result.termination_reason is TerminationReason.TIMEOUT
    assert result.reward is None
    [turn] = result.observation.trajectory.turns
    assert turn.status.value == "cut" and 0 < len(turn.output_ids) < 4000
    assert env.steps == ["reset", "cleanup"]


async def test_a_server_that_is_not_there_is_no_reward(smollm_server):
    async with SGLangClient("http://127.0.0.1:9", max_retries=0) as client:
        env = environment(smollm_server, client=client, retries=1, retry_delay=0.0)
        result = await env.step(action("27 * 43", 1161))
    assert result.termination_reason is TerminationReason.INFRASTRUCTURE_ERROR
    assert (result.reward, result.observation.metrics["attempts"]) == (None, 2)
    assert env.steps == ["reset", "cleanup"] * 2


async def test_turns_and_tokens_are_bounded_on_a_real_server_too(smollm_server):
    async with SGLangClient(smollm_server.base_url, max_retries=3) as client:
        for settings, reason in (
            ({"max_turns": 1}, TerminationReason.MAX_TURNS_REACHED),
            ({"max_sampled_tokens": 1}, TerminationReason.TOKEN_BUDGET_REACHED),
            ({"max_tool_iterations": 0}, TerminationReason.MAX_TOOL_ITERATIONS_REACHED),
        ):
            env = environment(smollm_server, client=client, **settings)
            result = await env.step(action("27 * 43", 1161))
            # A model that answers at once is at its end before it is at a limit.
            called = result.observation.metrics["tool_calls"] > 0
            assert result.termination_reason is (reason if called else TerminationReason.TASK_COMPLETE)


async def test_auto_concurrency_fills_a_server_without_a_long_queue(own_server, tiny_server):
    params = {"temperature": 1.0, "max_new_tokens": 150, "ignore_eos": True}
    async with SGLangClient(tiny_server.base_url, max_retries=3) as client:
        env = environment(tiny_server, client=client, params=params)
        evaluator = Evaluator(lambda action: env, max_concurrency="auto", show_progress=False)
        running = asyncio.ensure_future(evaluator.run([action(f"{n} * 7", n * 7) for n in range(3000)]))
        loads, is_full = [], False
        while not is_full:
            loads += await client.loads()
            is_full = loads[-1].running == loads[-1].max_running
            assert not running.done()
            await asyncio.sleep(0.05)  # polls the server itself, with pytest's timeout as the limit
        assert loads[-1].max_running > max(load.running for load in loads[: len(loads) // 4])
        assert max(load.waiting for load in loads) <= loads[-1].max_running / 2
        running.cancel()
        await asyncio.wait({running})
    assert running.cancelled()
    while await running_requests(tiny_server.base_url):  # until the last abort has arrived
        await asyncio.sleep(0.05)


def test_the_example_runs_on_a_real_server(smollm_server, tmp_path):
    command = ["--backend", "sglang", "--sglang-base-url", smollm_server.base_url]
    command += ["--tokenizer", str(smollm_server.model_path), "--max-new-tokens", "60", "--temperature", "0"]
    command += ["--worked-examples"]
    if smollm_server.chat_template:
        template = tmp_path / "template.jinja"
        template.write_text(smollm_server.chat_template, encoding="utf-8")
        command += ["--chat-template", str(template)]
    done = run_example("math_env", *command, timeout=240)
    assert done.returncode == 0, done.stderr
    *episodes, summary = done.stdout.splitlines()
    assert len(episodes) == 6 and all("reward" in line and "tokens sampled" in line for line in episodes)
    assert summary.startswith("mean reward ") and summary.endswith(" of 6 episodes")
    assert summary != "mean reward 0.00 of 6 episodes"
