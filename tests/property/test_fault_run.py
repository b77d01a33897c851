"""Thousands of episodes under faults, aborts and weight updates; the judge is the scripted server's own log."""

import asyncio
import concurrent.futures
import contextlib
import copy
import json
import multiprocessing
import random
import threading
from collections import Counter

import pytest
from httpx_aiohttp import AiohttpTransport

from strands_sglang import SGLangAbortedError, SGLangClient, SGLangModel, TerminationReason, Trajectory, TurnStatus
from strands_sglang.exceptions import causes
from strands_sglang.testing import ScriptedAnswer, ScriptedFault, ScriptedSGLang
from support.agents import build_chatml_tokenizer, call, make_agent
from support.fault_run import (
    Episode,
    Sampled,
    assert_all_end_in_the_table,
    assert_recorded_as_sampled,
    calculator,
    run_episodes,
)
from support.slime import (
    ANSWER,
    CALL,
    EXPERTS,
    QUESTION,
    Rollouts,
    Sample,
    check_against_server,
    check_rollouts,
    moe_args,
    slime_args,
    slime_sampling_params,
)


@pytest.mark.timeout(900)
async def test_any_failure_ends_in_the_table_and_records_samples(chatml_tokenizer, monkeypatch):
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
            self.cut = set()
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
                self.cut.add(request.rid)
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

    told = set()

    class Telling(AiohttpTransport):
        """Notes the aborts that the server receives."""

        async def handle_async_request(self, request):
            if request.url.path == "/abort_request":
                told.add(json.loads(request.content)["rid"])
            return await super().handle_async_request(request)

    def key_of(request):
        return request.headers["x-smg-routing-key"]

    # The scripted server answers aborts at once; collecting garbage can hold the loop for longer than a short grace.
    monkeypatch.setattr("strands_sglang.client.aborts.ABORT_TIMEOUT_S", 60.0)
    chaos = Chaos()
    server = chaos.server = ScriptedSGLang(chatml_tokenizer, chaos.answer)
    with server.serve() as url:
        async with SGLangClient(
            url, transport=Telling, max_retries=4, retry_delay=0.001, timeout=2.0, abort_grace=60.0
        ) as client:

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
    # Sampled tokens without a record belong to an attempt that the client gave up for another one.
    questions = {(key_of(request), *request.input_ids) for request in server.requests if request.rid in recorded}
    lost = [r for r in server.requests if r.rid in log and r.rid not in recorded and log[r.rid].output_ids]
    # Where the machine is slow, an answer that the server has cut itself can come when the client has just told it to
    # abort: nothing runs any more that it could abort.
    given_up = {*server.aborted, *(chaos.cut & told)}
    assert [r.rid for r in lost if r.rid not in given_up] == []
    assert [r.rid for r in lost if (key_of(r), *r.input_ids) not in questions] == []


def same(trajectory):
    """What the second process does with a trajectory: return it."""
    assert isinstance(trajectory, Trajectory)
    return trajectory


@pytest.mark.timeout(900)
async def test_requests_match_the_record_and_tokens_are_trained_once(monkeypatch):
    """2,000 episodes that mix what corrupts recordings elsewhere, judged by the server's log in another process.

    A thread truncates and pads with the model's own tokenizer. Each episode has three agents on one model object, two
    of which ask the same. Servers abort, tasks and agents are cancelled, and cut calls are resumed. What is judged has
    crossed to a second process and back.
    """
    seed = 11

    def answer(request):
        """A call or an answer; one in eight is cut by the server."""
        rng = random.Random(f"{seed}:{request.index}")
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
            rng = random.Random(f"{seed}:{number}")
            with self.model.episode() as trajectory:
                hooks = [self.model.hooks] if number % 2 else []  # what hooks report of answers, and what digests show
                solvers = [make_agent(self.model, [calculator], hooks=hooks) for _ in range(2)]
                critic = make_agent(self.model, system_prompt="You judge.", hooks=hooks)
                # Both ask the same: only the agents distinguish their conversations.
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
            """Let the cut calls continue from their tokens once their agents ask again."""
            for turn in trajectory.turns:
                if turn.status is TurnStatus.CUT:
                    trajectory.resume(turn)
                    self.met["resumed"] += 1

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


async def test_partial_rollouts_keep_their_tokens_after_any_abort(chatml_tokenizer):
    class Aborting:
        """Answers at random, and has slime abort in the middle of some answers."""

        def __init__(self, rng):
            self.rng = rng
            self.state = None

        def __call__(self, request):
            rng = self.rng
            self.state.aborted = self.state.aborted or rng.random() < 0.35
            draw = rng.random()
            if draw < 0.05:
                return ScriptedFault("drop")
            if draw < 0.10:
                return ScriptedAnswer("half an", finish_reason="abort")  # a weight update
            if self.state.aborted and draw < 0.5:
                return ScriptedAnswer(CALL[: rng.randrange(len(CALL))], finish_reason="abort")  # of none in the queue
            return CALL if draw < 0.55 else ANSWER

    rollout_count = 200
    most_parts = 12
    ends = Counter()
    for seed in range(rollout_count):
        rng = random.Random(seed)
        answers = Aborting(rng)
        rollouts = Rollouts(
            answers,
            max_tool_iters=4,
            server={"experts": EXPERTS},
            model_config={"on_abort": rng.choice(["raise", "resume"])},
            client_settings={"max_retries": 4, "retry_delay": 0.0},
        )
        answers.state = rollouts.state
        params = slime_sampling_params(max_new_tokens=rng.choice([60, 200, 1000]))
        masked = rng.random() < 0.3
        args = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": masked, **moe_args()}
        sample = Sample(index=3, group_index=1, prompt=QUESTION)
        for part in range(most_parts):
            rollouts.state.aborted = rng.random() < 0.1
            kept = sample.tokens if any(sample.loss_mask or ()) else []
            sample = await rollouts(Sample.from_dict(copy.deepcopy(sample.to_dict())), params=params, **args)
            assert sample.tokens[: len(kept)] == kept, seed
            if sample.tokens:  # else slime aborted before the first request
                check_rollouts(sample, slime_args(**args), chatml_tokenizer)
                check_against_server(sample, rollouts.server, experts=EXPERTS)
                assert sample.response_length <= params["max_new_tokens"], seed
            if sample.status.name != "ABORTED":
                ends[sample.status.name, part > 0] += 1
                break
    assert set(ends) >= {("COMPLETED", True), ("COMPLETED", False), ("TRUNCATED", True), ("TRUNCATED", False)}, ends
