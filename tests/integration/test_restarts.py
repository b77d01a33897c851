"""A real server that is killed under rollouts and comes back: what is recorded is what its own log says it sampled."""

import asyncio
import os
import random
import signal

import httpx
import pytest

from strands_sglang import SGLangClient, SGLangModel, TerminationReason, get_tokenizer, local
from strands_sglang.local.server import free_port, port_is_free
from support.agents import EveryAnswerCallsATool
from support.fault_run import Sampled, assert_all_end_in_the_table, assert_recorded_as_sampled, run_episodes
from support.real_servers import LOG_EVERYTHING, logged


@pytest.mark.timeout(1500, func_only=True)  # the server starts three times
async def test_episodes_outlive_a_killed_server_and_record_each_generation_once(own_server, sglang_python, tmp_path):
    restarts = 2
    episode_count = 150
    concurrency = 12
    model_path, port = local.ensure_tiny_qwen3(sglang_python), free_port("127.0.0.1")
    tokenizer = get_tokenizer(str(model_path))
    end = tokenizer.eos_token_id
    settings = local.ServerSettings(threads=1, extra_arguments=LOG_EVERYTHING)
    paths = []

    def sampled(paths):
        """What the servers say they sampled, by request id."""
        log = {}
        for path in paths:
            for entry in logged(path, "request.finished"):
                out = entry["out"]
                meta = out["meta_info"]
                ids, logprobs = out["output_ids"], [item[0] for item in meta.get("output_token_logprobs") or ()]
                log[entry["rid"]] = Sampled(
                    entry["rid"], entry["obj"]["input_ids"], ids, logprobs, meta["weight_version"]
                )
        return log

    async def some_requests(base_url, count):
        """Until the server has finished that many of the requests that it knows of, or is gone."""
        async with httpx.AsyncClient(base_url=base_url, timeout=5, trust_env=False) as http:
            while count > 0:
                try:
                    loads = (await http.get("/v1/loads")).json()["loads"]
                except httpx.HTTPError:
                    return
                count -= loads[0]["num_running_reqs"] > 0
                await asyncio.sleep(0)

    def start():
        paths.append(tmp_path / f"server-{len(paths)}.log")
        return local.start_server(sglang_python, model_path, port=port, settings=settings, log_path=paths[-1])

    def make_model(number):
        return SGLangModel(
            tokenizer=tokenizer,
            client=client,
            tool_parser=EveryAnswerCallsATool(3),
            # Any turn ends after a few tokens of its own, so that each episode has four.
            sampling_params={"max_new_tokens": 32, "min_new_tokens": 6, "logit_bias": {str(end): 100.0}},
        )

    server = start()
    try:
        async with SGLangClient(server.base_url, max_retries=60, retry_delay=0.2, timeout=60.0) as client:
            running = asyncio.ensure_future(
                run_episodes(episode_count, make_model, concurrency=concurrency, seed=5, cancelled=0.15)
            )
            rng = random.Random(5)
            for _ in range(restarts):
                await some_requests(server.base_url, 20 + rng.randrange(40))
                assert not running.done()
                os.killpg(server.pid, signal.SIGKILL)
                server.stop()
                while not port_is_free("127.0.0.1", port):
                    await asyncio.sleep(0.05)  # the kernel takes a moment to end what was killed
                server = await asyncio.to_thread(start)
            episodes = await running
    finally:
        server.stop()
    assert_all_end_in_the_table(episodes)
    reasons = [episode.reason for episode in episodes]
    assert TerminationReason.INFRASTRUCTURE_ERROR not in reasons
    assert reasons.count(TerminationReason.CANCELLED) >= 3
    recorded = assert_recorded_as_sampled(episodes, sampled(paths))
    assert len(recorded) >= 3 * episode_count
