"""Five thousand requests with errors, hangs, drops, aborts and weight updates at random.

The judge is the scripted server's own log: what it says it sampled, for which prompt, under which weights.
"""

import asyncio
import random
from collections import Counter

import pytest

from strands_sglang import SGLangClient, SGLangModel, TerminationReason
from strands_sglang.testing import ScriptedAnswer, ScriptedFault, ScriptedSGLang
from support.agents import call
from support.fault_run import Sampled, assert_all_end_in_the_table, assert_recorded_as_sampled, run_episodes


@pytest.mark.timeout(900)
async def test_whatever_fails_every_episode_ends_in_the_table_and_records_what_was_sampled(
    chatml_tokenizer, monkeypatch
):
    episode_count = 700
    requests = 5000
    seed = 20
    update_every = 150
    faults = {
        "error": (0.03, ScriptedFault(status=500)),
        "busy": (0.02, ScriptedFault(status=503)),
        "refusal": (0.003, ScriptedFault(status=400, message="no such thing")),
        "drop": (0.02, ScriptedFault("drop")),
        "half": (0.02, ScriptedFault("half")),
        "garbage": (0.015, ScriptedFault("garbage")),
    }

    class Chaos:
        """Answers at random, and remembers what it did to which request."""

        def __init__(self):
            self.server = None
            self.kinds = Counter()
            self.broken = set()
            self.versions = 0

        async def answer(self, request):
            rng = random.Random(f"{seed}:{request.index}")
            if request.index % update_every == update_every - 1:
                self.versions += 1
                self.server.update_weights(str(self.versions))
            draw = rng.random()
            for kind, (share, fault) in faults.items():
                if draw < share:
                    self.kinds[kind] += 1
                    if kind in ("drop", "half", "garbage"):
                        self.broken.add(request.rid)
                    return fault
                draw -= share
            text = call(expression=f"{request.index} + 1") if rng.random() < 0.9 else "It is done."
            if draw < 0.01:
                self.kinds["hang"] += 1
                return await self.until_aborted(None, text)
            if draw < 0.03:
                self.kinds["abort"] += 1
                return ScriptedAnswer(text[: len(text) // 2], finish_reason="abort")
            if draw < 0.40:
                return await self.until_aborted(rng.random() * 0.02, text)
            return text

        async def until_aborted(self, seconds, text):
            try:
                await asyncio.wait_for(asyncio.Event().wait(), seconds)
            except asyncio.TimeoutError:
                return text
            except asyncio.CancelledError:
                return ScriptedAnswer(text[: len(text) // 2], finish_reason="length")

    def key_of(request):
        return request.headers["x-smg-routing-key"]

    # The scripted server answers aborts at once; collecting garbage can hold the loop for longer than a short grace.
    monkeypatch.setattr("strands_sglang.client.aborts.ABORT_TIMEOUT_S", 60.0)
    chaos = Chaos()
    server = chaos.server = ScriptedSGLang(chatml_tokenizer, chaos.answer)
    with server.serve() as url:
        async with SGLangClient(url, max_retries=4, retry_delay=0.001, timeout=2.0, abort_grace=60.0) as client:

            def make_model(number):
                policy = "resume" if number % 2 else "raise"
                return SGLangModel(tokenizer=chatml_tokenizer, client=client, on_abort=policy, tool_parser="hermes")

            episodes = await run_episodes(episode_count, make_model, concurrency=64, seed=seed, cancelled=0.12)
        assert server.running == []
    assert len(server.requests) >= requests
    assert_all_end_in_the_table(episodes)
    reasons = Counter(episode.reason for episode in episodes)
    for reason in ("TASK_COMPLETE", "ABORTED", "CANCELLED", "INFRASTRUCTURE_ERROR"):
        assert reasons[TerminationReason[reason]] >= 5, reasons
    assert min(chaos.kinds.values()) >= 5, chaos.kinds

    log = {}
    for request, response in zip(server.requests, server.responses, strict=True):
        if response is not None and response.status == 200 and request.rid not in chaos.broken:
            meta = response.body["meta_info"]
            logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
            log[request.rid] = Sampled(
                request.rid, request.input_ids, response.body["output_ids"], logprobs, meta["weight_version"]
            )
    recorded = assert_recorded_as_sampled(episodes, log)
    # What a server sampled and nobody recorded belongs to an attempt that the client gave up, for another one that is.
    questions = {(key_of(request), *request.input_ids) for request in server.requests if request.rid in recorded}
    lost = [r for r in server.requests if r.rid in log and r.rid not in recorded and log[r.rid].output_ids]
    assert [r.rid for r in lost if r.rid not in server.aborted] == []
    assert [r.rid for r in lost if (key_of(r), *r.input_ids) not in questions] == []
