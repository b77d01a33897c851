"""Several real servers: by the client itself, behind sglang-router, behind smg. The tables of docs/guides/servers.md.

One server is killed under rollouts and comes back. Two servers that log their requests are started for the rest; the
last two tests kill one and then the other.
"""

import asyncio
import contextlib
import hashlib
import os
import random
import re
import signal
import threading
import time
import uuid
from pathlib import Path

import httpx
import pytest

from strands_sglang import SGLangClient, SGLangModel, TerminationReason, TurnStatus, get_tokenizer, local
from strands_sglang.exceptions import (
    SGLangCancelledError,
    SGLangClientError,
    SGLangConnectionError,
    SGLangDeadlineError,
    SGLangHTTPError,
)
from strands_sglang.local.install import build_once, environment_python, find_python, home, python_version
from strands_sglang.local.process import GuardedProcess, clean_environment, run_quietly, tail
from strands_sglang.local.server import free_port, launch_server, port_is_free
from strands_sglang.testing import ScriptedSGLang
from support.agents import EveryAnswerCallsATool
from support.fault_run import Sampled, assert_all_end_in_the_table, assert_recorded_as_sampled, run_episodes
from support.pages import ROOT
from support.real_servers import LOG_EVERYTHING, at_best, logged, running_requests


@pytest.mark.timeout(1500, func_only=True)  # the server starts three times
async def test_episodes_outlive_a_killed_server(own_server, sglang_python, tmp_path):
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


REQUIREMENTS = Path(__file__).parents[1] / "support" / "requirements-routers.txt"

LAUNCHERS = {
    "sglang-router": ("-m", "sglang_router.launch_router"),
    "smg": ("-m", "smg", "launch"),
}


@contextlib.contextmanager
def running_router(python, name, workers, log_path):
    """The address of a router that has found its workers.

    Args:
        python: From `routers_python`.
        name: One of `LAUNCHERS`.
        workers: Their addresses.
        log_path: File for its output.
    """
    port, metrics = free_port("127.0.0.1"), free_port("127.0.0.1")
    base_url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120.0
    command = [python, *LAUNCHERS[name], "--host", "127.0.0.1", "--port", str(port), "--policy", POLICIES[name]]
    command += ["--prometheus-port", str(metrics), "--worker-urls", *workers]
    process = GuardedProcess(command, env=clean_environment(PYTHONUNBUFFERED="1"), log_path=log_path)
    try:
        while True:
            with contextlib.suppress(httpx.TransportError, ValueError):
                ready = httpx.get(f"{base_url}/readiness", trust_env=False, timeout=5.0).json()
                if ready.get("healthy_workers") == len(workers):
                    break
            assert process.exit_code is None, f"{name} ended with exit code {process.exit_code}:\n{tail(log_path)}"
            assert time.monotonic() < deadline, f"{name} did not get ready:\n{tail(log_path)}"
            time.sleep(0.1)
        yield base_url
    finally:
        process.stop()


PROMPT = [50, 60, 70, 80, 90]
# Longer than any test waits: on a busy machine a short one is over before anyone sees it run.
ENDLESS = {"max_new_tokens": 3500, "ignore_eos": True}
DEADLINE_S = 3.0  # by then a busy machine has sampled a token, and no machine the last one
POLICIES = {"sglang-router": "manual", "smg": "consistent_hashing"}

pytestmark = pytest.mark.usefixtures("own_server")


def rids_in_the_log(server, what):
    """Ids of the requests that were received ("Receive") or answered ("Finish"), in order; not of health checks."""
    log = server.log_path.read_text(encoding="utf-8", errors="replace")
    rids = re.findall(rf"{what}: obj=\w+\(.*?\brid='([^']+)'", log)
    return [rid for rid in rids if not rid.startswith("HEALTH_CHECK")]


def kill(server):
    """End all of a server's processes at once, as the kernel does when memory is short."""
    os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def workers(sglang_python, tmp_path_factory):
    settings = local.ServerSettings(threads=1, extra_arguments=("--log-requests", "--log-requests-level", "0"))
    folder = tmp_path_factory.mktemp("workers")
    model_path = local.ensure_tiny_qwen3(sglang_python)
    with contextlib.ExitStack() as servers:
        launched = [
            servers.enter_context(
                launch_server(sglang_python, model_path, settings=settings, log_path=folder / f"{name}.log")
            )
            for name in ("one", "two")
        ]
        for server in launched:
            server.wait_until_healthy()
        yield launched


@pytest.fixture(scope="session")
def routers_python():
    """The Python of an environment with both routers; installed if need be, which takes about 20 s."""
    base = find_python()
    version = python_version(base)
    assert version is not None, f"{base} cannot make virtual environments"

    def install(directory):
        run_quietly([base, "-m", "venv", directory], f"creating an environment for routers in {directory}")
        pip = [environment_python(directory), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run_quietly([*pip, "-r", REQUIREMENTS], "installing sglang-router and smg")

    pins = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    directory = home() / "envs" / "routers-{}-py{}{}".format(pins, *version)
    return environment_python(build_once(directory, install, usable=lambda d: environment_python(d).exists()))


@pytest.fixture(scope="module")
def fronts(workers, routers_python, tmp_path_factory):
    """What to give a client as `base_url`, by the way in which the requests are spread."""
    urls = [worker.base_url for worker in workers]
    folder = tmp_path_factory.mktemp("routers")
    with contextlib.ExitStack() as routers:
        started = {
            name: [routers.enter_context(running_router(routers_python, name, urls, folder / f"{name}.log"))]
            for name in POLICIES
        }
        yield {"client": urls, **started}


FRONTS = pytest.mark.parametrize("front", ["client", *POLICIES])


def client_of(fronts, front, **settings):
    return SGLangClient(fronts[front], **{"max_retries": 5, "retry_delay": 0.2, "abort_grace": 60.0, **settings})


async def is_busy(workers):
    return any([await running_requests(worker.base_url) for worker in workers])


async def until(condition, what, *, at_most=120.0):
    """Seconds until an asynchronous or plain condition holds."""
    clock = asyncio.get_running_loop().time
    started = clock()
    while True:
        holds = condition()
        if await holds if asyncio.iscoroutine(holds) else holds:
            return clock() - started
        assert clock() - started < at_most, f"not within {at_most} s: {what}"
        await asyncio.sleep(0.02)


ENDS = {"task": asyncio.CancelledError, "signal": SGLangCancelledError, "deadline": SGLangDeadlineError}


@FRONTS
@pytest.mark.parametrize("way", [*ENDS, "close"])
async def test_ended_call_leaves_all_workers_idle_within_a_second(workers, fronts, front, way):
    async def seconds_until_idle():
        """Seconds from the end of a call until the workers are idle; its partial answer is looked at."""
        partial = []
        cancel_signal, clock = threading.Event(), asyncio.get_running_loop().time
        client = client_of(fronts, front, deadline=DEADLINE_S if way == "deadline" else None)
        call = client.generate(
            PROMPT,
            ENDLESS,
            return_logprob=True,
            cancel_signal=cancel_signal,
            on_partial=partial.append,
            routing_key="k",
        )
        task = asyncio.create_task(call)
        sent_at = clock()
        await until(lambda: is_busy(workers), "a worker has the request")
        ended_at = sent_at + DEADLINE_S if way == "deadline" else clock()
        if way == "close":
            await client.close()
            partial.append(await task)
        else:
            if way == "task":
                task.cancel()
            elif way == "signal":
                cancel_signal.set()
            with pytest.raises((asyncio.CancelledError, SGLangCancelledError, SGLangDeadlineError)) as caught:
                await task
            assert type(caught.value) is ENDS[way]
        while await is_busy(workers):
            assert clock() - ended_at < 120, "the workers are not idle"
            await asyncio.sleep(0.02)
        seconds = clock() - ended_at
        [answer] = partial
        meta_info = answer["meta_info"]
        assert meta_info["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) == len(meta_info["output_token_logprobs"]) < 3500
        await client.close()
        return seconds

    assert await at_best(seconds_until_idle, goal=1.0) < 1.0


@FRONTS
async def test_a_cancelled_call_of_a_model_is_a_cut_turn(workers, fronts, front):
    tokenizer = get_tokenizer(workers[0].model_path)
    async with client_of(fronts, front) as client:
        model = SGLangModel(tokenizer=tokenizer, client=client, sampling_params=ENDLESS)

        async def ask():
            return [event async for event in model.stream([{"role": "user", "content": [{"text": "hi"}]}])]

        task = asyncio.create_task(ask())
        await until(lambda: is_busy(workers), "a worker has the request")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    [turn] = model.trajectory.turns
    assert turn.status is TurnStatus.CUT
    assert len(turn.output_ids) > 0 and turn.generation is not None
    assert sum(rids_in_the_log(worker, "Receive").count(turn.generation.request_id) for worker in workers) == 1


@FRONTS
async def test_requests_with_one_key_find_their_prefix_in_the_cache(workers, fronts, front):
    async with client_of(fronts, front) as client:

        async def converse(key):
            """How many of two later calls found the conversation in the cache."""
            prompt = [100 + 10 * list(fronts).index(front) + key, *range(200, 264)]  # no other test has cached it
            found = 0
            for turn in range(3):
                answer = await client.generate(
                    prompt, {"max_new_tokens": 1}, routing_key=f"{front}-{key}", rid=f"{front}-{key}"
                )
                found += turn > 0 and answer["meta_info"]["cached_tokens"] >= 64
            return found

        assert await asyncio.gather(*(converse(key) for key in range(8))) == [2] * 8
    received = [{rid.rpartition("-")[0] for rid in rids_in_the_log(worker, "Receive")} for worker in workers]
    ours = [{rid for rid in rids if rid.startswith(f"{front}-")} for rids in received]
    assert not ours[0] & ours[1]
    assert len(ours[0] | ours[1]) == 8
    if front == "client":  # routers draw lots
        assert len(ours[0]) == len(ours[1])


@FRONTS
async def test_every_worker_reports_its_load(workers, fronts, front):
    async with client_of(fronts, front) as client:
        loads = await client.loads()
    assert {load.base_url for load in loads} == {worker.base_url for worker in workers}
    assert all(load.max_running == local.ServerSettings().max_running_requests for load in loads)


# --- which keys survive ---


@pytest.mark.parametrize("router", POLICIES)
async def test_what_a_router_loses_is_what_is_documented(router, routers_python, chatml_tokenizer, tmp_path):
    fields = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 0,
        "return_routed_experts": True,
        "routed_experts_start_len": 0,
        "return_prompt_token_ids": True,
        "session_id": "s",
        "conversation_id": "c",
        "cache_salt": "x",
        "extra_key": "e",
        "priority": 1,
        "custom_labels": {"a": "b"},
    }
    sampling = {
        "max_new_tokens": 5,
        "min_new_tokens": 0,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.1,
        "stop_token_ids": [2],
        "ignore_eos": False,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        "logit_bias": {"5": 1.0},
        "sampling_seed": 3,
        "custom_params": {"a": 1},
        "json_schema": '{"type": "object"}',
    }

    def documented_losses(row, router):
        text = (ROOT / "docs" / "guides" / "servers.md").read_text(encoding="utf-8")
        names, cells = ["sglang-router", "smg"], {}
        for line in text.splitlines():
            first, *rest = [cell.strip() for cell in line.strip("| ").split("|")]
            cells[first] = rest
        return set(re.findall(r"`(\w+)`", cells[row][names.index(router)]))

    server = ScriptedSGLang(chatml_tokenizer, lambda request: "ok")
    with (
        server.serve() as url,
        running_router(routers_python, router, [url], tmp_path / "log") as front_url,
    ):
        async with SGLangClient(front_url, max_retries=0) as client:
            await client.generate([1, 2, 3], sampling, rid="mine", routing_key="a-key", **fields)
    [request] = server.requests
    sent = {**fields, "routing_key": "a-key"}
    assert set(sent) - set(request.body) == documented_losses("request fields", router)
    assert set(sampling) - set(request.sampling_params) == documented_losses("sampling parameters", router)
    kept = {**sent, **sampling}
    for name, value in {**request.body, **request.sampling_params}.items():
        if name in kept:
            assert value == pytest.approx(kept[name])
    assert request.input_ids == [1, 2, 3]
    assert request.rid.startswith("mine-")
    assert request.headers["x-smg-routing-key"] == "a-key"


# --- workers that die: these two tests come last ---


async def test_killed_worker_costs_no_call_and_no_double_record(workers, fronts):
    staying, dying = workers
    tokenizer = get_tokenizer(staying.model_path)
    tokens = 1000  # a busy machine takes a while to send all of them, and to notice that it has
    params = {"max_new_tokens": tokens, "ignore_eos": True}
    clients = {front: client_of(fronts, front, max_retries=10) for front in fronts}
    models, calls = {}, {}

    async def key_on(client, worker, name):
        """A routing key whose requests go to this worker."""
        while True:
            key = f"{name}-{uuid.uuid4().hex}"
            answer = await client.generate(PROMPT, {"max_new_tokens": 1}, routing_key=key)
            rid = answer["meta_info"]["id"]
            if rid in rids_in_the_log(worker, "Receive"):
                return key

    async def ask(model, text):
        async for _ in model.stream([{"role": "user", "content": [{"text": text}]}]):
            pass

    try:
        for front, client in clients.items():
            for number in range(2):
                key = await key_on(client, dying, front)
                model = SGLangModel(tokenizer=tokenizer, client=client, sampling_params=params, routing_key=key)
                models[front, number] = model
        before = [len(rids_in_the_log(worker, "Receive")) for worker in workers]
        for (front, number), model in models.items():
            calls[front, number] = asyncio.create_task(ask(model, f"{front} {number}"))
        await until(
            lambda: len(rids_in_the_log(dying, "Receive")) == before[1] + len(models), "the worker has all of them"
        )
        kill(dying)
        await asyncio.gather(*calls.values())
    finally:
        for client in clients.values():
            await client.close()

    received = [rids_in_the_log(worker, "Receive")[skip:] for worker, skip in zip(workers, before, strict=True)]
    finished = rids_in_the_log(staying, "Finish")
    answered = set()
    for (front, _), model in models.items():
        [turn] = model.trajectory.turns
        assert turn.status is TurnStatus.ANSWERED and turn.generation is not None
        assert len(turn.output_ids) == tokens
        rid = turn.generation.request_id
        assert finished.count(rid) == received[0].count(rid) == 1
        # smg sends the same request again; the others' second attempts are the client's own, with ids of their own
        assert (rid in received[1]) is (front == "smg")
        answered.add(rid)
    assert len(answered) == len(models)
    assert set(received[0]) == answered  # and nothing else was generated


async def test_with_all_workers_dead_every_way_gives_a_clear_error(workers, fronts):
    for worker in workers:
        if worker.exit_code is None:
            kill(worker)
            worker.stop()
    for front in fronts:
        async with client_of(fronts, front, max_retries=2) as client:
            with pytest.raises(SGLangClientError) as caught:
                await client.generate(PROMPT, {"max_new_tokens": 1})
        if front == "client":
            assert isinstance(caught.value, SGLangConnectionError)
            assert "could not connect" in str(caught.value)
        else:
            assert isinstance(caught.value, SGLangHTTPError)
            assert caught.value.status in (500, 503)
            assert re.search(r"no_available_workers|call_upstream", str(caught.value)), caught.value
