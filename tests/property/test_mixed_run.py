"""2,000 episodes that mix what corrupts recordings elsewhere, judged by the server's log in another process.

A thread truncates and pads with the model's own tokenizer. Each episode has three agents on one model object, two of
which ask the same. Servers abort, tasks and agents are cancelled, and cut calls are resumed. What is judged has crossed
to a second process and back.
"""

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import random
import threading
from collections import Counter

import pytest

from strands_sglang import SGLangAbortedError, SGLangModel, TerminationReason, Trajectory, TurnStatus
from strands_sglang.exceptions import causes
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from support.agents import build_chatml_tokenizer, call, make_agent
from support.fault_run import Episode, Sampled, assert_recorded_as_sampled, calculator

SEED = 11


def answer(request):
    """A call or an answer; one in eight is cut by the server."""
    rng = random.Random(f"{SEED}:{request.index}")
    text = call(expression=f"{request.index} + 1") if rng.random() < 0.4 else f"Answer {request.index} is done."
    if rng.random() < 0.125:
        return ScriptedAnswer(text[: rng.randrange(len(text))], finish_reason="abort")
    return ScriptedAnswer(text, latency_s=0.002 if rng.random() < 0.2 else 0.0)


class RewardThread(threading.Thread):
    """Scores texts with the model's own tokenizer, as reward models do: truncated and padded."""

    def __init__(self, tokenizer):
        super().__init__(daemon=True)
        self.tokenizer = tokenizer
        self.stop = threading.Event()
        self.scored = 0

    def run(self):
        while not self.stop.wait(0.0005):
            with contextlib.suppress(RuntimeError):  # "Already borrowed": two users of one tokenizer, here itself
                self.tokenizer(
                    ["a text to be scored " * 9, "short"], truncation=True, max_length=16, padding="max_length"
                )
                self.scored += 1


class Episodes:
    """Plays episodes on one model, and counts what happened to them."""

    def __init__(self, model):
        self.model = model
        self.met = Counter()

    async def play(self, number):
        rng = random.Random(f"{SEED}:{number}")
        with self.model.episode() as trajectory:
            hooks = [self.model.hooks] if number % 2 else []  # what Strands says of answers, and what digests tell
            solvers = [make_agent(self.model, [calculator], hooks=hooks) for _ in range(2)]
            critic = make_agent(self.model, system_prompt="You judge.", hooks=hooks)
            # Both ask the same: nothing but the agents tells their conversations apart.
            await asyncio.gather(*(self.ask(trajectory, solver, f"Question {number}", rng) for solver in solvers))
            await self.ask(trajectory, critic, f"Is {number} right?", rng)
            for agent in (*solvers, critic):
                trajectory.settle(agent.messages)
        return trajectory

    async def ask(self, trajectory, agent, question, rng):
        """Ask until an answer is whole; what was cut is resumed."""
        asked = question
        for _ in range(40):
            task = asyncio.ensure_future(agent.invoke_async(asked))
            if rng.random() < 0.1:
                asyncio.get_running_loop().call_later(rng.random() * 0.01, rng.choice([task.cancel, agent.cancel]))
            try:
                result = await task
            except asyncio.CancelledError:
                self.met["task cancelled"] += 1
            except Exception as error:
                assert any(isinstance(cause, SGLangAbortedError) for cause in causes(error)), repr(error)
                self.met["aborted"] += 1
            else:
                if result.stop_reason != "cancelled":
                    return
                self.met["agent cancelled"] += 1
                return  # Strands has put its own answer into the history
            self.resume(trajectory)
            asked = None if agent.messages[-1:] and agent.messages[-1]["role"] == "user" else question
        raise AssertionError(f"{question}: never answered")

    def resume(self, trajectory):
        """Let the calls that were cut go on from their tokens once their agents ask again."""
        for turn in trajectory.turns:
            if turn.status is TurnStatus.CUT:
                trajectory.resume(turn)
                self.met["resumed"] += 1


def same(trajectory):
    """What the second process does with a trajectory: hand it back."""
    assert isinstance(trajectory, Trajectory)
    return trajectory


@pytest.mark.timeout(900)
async def test_every_request_is_its_record_and_every_sampled_token_is_trained_once(monkeypatch):
    episode_count = 2_000
    concurrency = 50
    tokenizer = build_chatml_tokenizer()  # of its own: the thread leaves truncation and padding on
    server = ScriptedSGLang(tokenizer, answer)
    model = SGLangModel(tokenizer=tokenizer, client=server.client(abort_grace=60.0))
    thread = RewardThread(tokenizer)
    thread.start()
    episodes, slots = Episodes(model), asyncio.Semaphore(concurrency)

    async def play(number):
        async with slots:
            return await episodes.play(number)

    try:
        trajectories = await asyncio.gather(*(play(number) for number in range(episode_count)))
    finally:
        thread.stop.set()
        thread.join()
    assert thread.scored > 100 and min(episodes.met.values()) > 10, episodes.met

    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        crossed = list(pool.map(same, trajectories, chunksize=100))
    log = {}
    for request, response in zip(server.requests, server.responses, strict=True):
        if response is not None:
            meta = response.body["meta_info"]
            logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
            sampled = response.body["output_ids"]
            log[request.rid] = Sampled(request.rid, request.input_ids, sampled, logprobs, meta["weight_version"])
    recorded = assert_recorded_as_sampled(
        [Episode(trajectory, TerminationReason.TASK_COMPLETE, None) for trajectory in crossed], log
    )
    assert [rid for rid, sampled in log.items() if sampled.output_ids and rid not in recorded] == []
