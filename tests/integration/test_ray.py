"""Evaluations on a real Ray cluster of two nodes, which are processes of this machine."""

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from uuid import uuid4

import httpx
import numpy as np
import pytest

from strands_env.core import Environment, TerminationReason
from strands_env.core.models import sglang_model_factory
from strands_env.environments import CalculatorEnvironment
from strands_env.eval import Evaluator, ExecutorError
from strands_env.eval.checkpoint import name_prompts
from strands_env.eval.episodes import LocalRunner
from strands_env.rewards import MathReward
from strands_sglang import SGLangClient
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from support.agents import call
from support.environments import StubEnvironment, lines, step_result, tasks
from support.pages import run_page
from support.processes import has_ended

ray = pytest.importorskip("ray")
from ray import cloudpickle  # noqa: E402

from strands_env.ray import EpisodeActor, RayExecutor, versions  # noqa: E402
from support.ray_storm import NODE, storm, two_nodes  # noqa: E402

ONE_PER_NODE = {"num_cpus": 2}
ONE_ACTOR = {"max_concurrency": 4}  # of `evaluator`: a second actor would only cost its imports


@pytest.fixture(scope="module")
def cluster():
    """Two nodes; actors with `ONE_PER_NODE` fill one each."""
    with two_nodes() as cluster:
        yield cluster


def evaluator(play, *, executor=None, **settings):
    settings = {"max_concurrency": 8, "show_progress": False, **settings}
    executor = executor or RayExecutor(episodes_per_actor=4, actor_options=ONE_PER_NODE)
    return Evaluator(StubEnvironment(play).factory, executor=executor, **settings)


def samples_of(results):
    return [sample for samples in results.values() for sample in samples]


def node_id():
    return ray.get_runtime_context().get_node_id()


async def until(condition, running=None):
    while not condition():
        assert running is None or not running.done()
        await asyncio.sleep(0.01)


# === the same results on two nodes ===


def solve(request):
    if "<tool_response>" not in request.text:
        return ScriptedAnswer(call("calculator", expression="1 + 1"), latency_s=0.2)
    return ScriptedAnswer(rf"\boxed{{{len(request.text) % 4}}}", latency_s=0.2)


def in_step(places):
    """Answer once so many requests wait: no node is ahead because the machine was busier with the other one."""
    waiting = []

    async def answer(request):
        waiting.append(asyncio.get_running_loop().create_future())
        if len(waiting) < places:
            await waiting[-1]
        else:
            for future in waiting:
                future.done() or future.set_result(None)
            waiting.clear()
        return solve(request)

    return answer


class PlacedCalculator(CalculatorEnvironment):
    """Says where it ran."""

    def compute_metrics(self, observation):
        is_connected = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
        return {"node": node_id() if is_connected else None}


async def test_two_nodes_share_the_load_and_change_no_result(cluster, chatml_tokenizer, tmp_path):
    chatml_tokenizer.save_pretrained(tmp_path / "tokenizer")

    def recorded(sample):
        tokens, end = sample.step_result.observation.tokens, sample.step_result
        environment = {**sample.environment, "arguments": None}
        return sample.key, end.reward, end.termination_reason, end.error, tokens.model_dump(), environment

    with ScriptedSGLang(chatml_tokenizer, in_step(16)).serve() as base_url:
        factory = sglang_model_factory(tokenizer=tmp_path / "tokenizer", client=SGLangClient(base_url))
        found = {}
        for name, executor in (
            ("here", None),
            ("nodes", RayExecutor(episodes_per_actor=8, actor_options=ONE_PER_NODE)),
        ):
            evaluation = Evaluator(
                lambda action: PlacedCalculator(factory, MathReward()),
                n_samples_per_prompt=8,
                max_concurrency=16,
                keep_tokens=True,
                keep_trajectories=True,
                output_path=tmp_path / name,
                executor=executor,
                show_progress=False,
            )
            found[name] = samples_of(await evaluation.run(tasks(10)))
    assert [recorded(one) for one in found["here"]] == [recorded(one) for one in found["nodes"]]
    assert all(one.environment == found["here"][0].environment for one in found["nodes"])
    placed = Counter(one.step_result.observation.metrics["node"] for one in found["nodes"])
    assert len(placed) == 2 and min(placed.values()) >= 0.9 * max(placed.values()), placed
    stored = [sorted(path.name for path in (tmp_path / name / "results.trajectories").iterdir()) for name in found]
    assert stored[0] == stored[1] and len(stored[0]) == 80


async def test_results_come_back_whole(cluster):
    def play(action):
        result = step_result()
        result.observation.metrics["array"] = np.arange(200_000)
        result.observation.metrics["lock"] = threading.Lock() if action.task_context.id == "t1" else None
        if action.task_context.id == "t2":
            refused = httpx.HTTPStatusError("status 500", request=None, response=None)
            result.observation.metrics["error"] = refused  # it is pickled, and then cannot be unpickled
        return result

    first, second, third = samples_of(await evaluator(play, **ONE_ACTOR).run(tasks(3)))
    array = first.step_result.observation.metrics["array"]
    array += 1  # not read-only, as in the object store
    assert array.sum() == np.arange(200_001).sum()
    assert "lock" in second.step_result.observation.metrics["lock"] and second.reward == 1.0
    assert third.step_result.observation.metrics["error"] == "status 500" and third.reward == 1.0


def test_an_evaluation_runs_inside_of_a_ray_job(cluster):
    @ray.remote(num_cpus=0)
    def job():
        return samples_of(asyncio.run(evaluator(None, **ONE_ACTOR).run(tasks(4))))

    assert [one.reward for one in ray.get(job.remote())] == [1.0] * 4


# === what is lost runs again ===


async def test_a_node_killed_in_the_middle_loses_and_repeats_no_result(cluster, tmp_path):
    doomed = cluster.add_node(**NODE)
    doomed_id = doomed.node_id

    async def play(action):
        await asyncio.sleep(0.05)
        if node_id() == doomed_id:
            (tmp_path / f"{action.task_context.id}-{uuid4()}.stuck").touch()
            await asyncio.Event().wait()
        return step_result()

    path = tmp_path / "out" / "results.jsonl"
    executor = RayExecutor(episodes_per_actor=4, actor_options=ONE_PER_NODE)
    evaluation = evaluator(play, executor=executor, max_concurrency=12, output_path=path, n_samples_per_prompt=3)
    running = asyncio.ensure_future(evaluation.run(tasks(20)))
    await until(lambda: len(list(tmp_path.glob("*.stuck"))) == 4 and len(path.read_bytes().splitlines()) > 8, running)
    cluster.remove_node(doomed, allow_graceful=False)
    assert all(one.is_finished for one in samples_of(await running))
    records = lines(path)
    assert len(records) == len({record["key"] for record in records}) == 60
    stuck = {mark.name.split("-")[0] for mark in tmp_path.glob("*.stuck")}
    assert stuck <= {record["prompt_id"] for record in records}


async def test_a_sample_that_kills_its_actor_is_dropped_alone(cluster, tmp_path):
    async def play(action):
        deaths = tmp_path / "deaths"
        if action.task_context.id == "t0":
            with deaths.open("a") as file:
                file.write("x")
            os._exit(1)
        while len(deaths.read_text() if deaths.exists() else "") < 2:  # until it has killed two actors
            await asyncio.sleep(0.01)
        return step_result()

    first, *others = samples_of(await evaluator(play).run(tasks(10)))
    assert (tmp_path / "deaths").read_text() == "xxx"
    assert not first.is_finished and first.step_result.termination_reason is TerminationReason.INFRASTRUCTURE_ERROR
    assert "its actor was lost 3 times" in first.step_result.error
    assert all(one.is_finished for one in others)


async def test_no_sample_fails_for_a_neighbor_that_kills_its_actor(cluster, tmp_path):
    async def play(action):
        mark = tmp_path / action.task_context.id
        is_again = mark.exists()
        mark.touch()
        if mark.name in ("t0", "t1") and not is_again:  # one in each actor; what the first loses waits for the other
            while len(list(tmp_path.glob("t[01]"))) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2 if mark.name == "t0" else 1.0)
            os._exit(1)
        await asyncio.sleep(0 if is_again else 3)
        return step_result()

    executor = RayExecutor(episodes_per_actor=2, tries=2, actor_options=ONE_PER_NODE)
    ended = samples_of(await evaluator(play, executor=executor, max_concurrency=4).run(tasks(4)))
    assert [one.step_result.error for one in ended] == [None] * 4


async def test_an_actor_that_dies_while_it_runs_nothing_costs_no_try(cluster):
    async def play(action):
        result = step_result()
        result.observation.metrics["pid"] = os.getpid()
        return result

    episodes = LocalRunner(
        StubEnvironment(play).factory, keep_tokens=False, keep_trajectories=False, keep_identity=False
    )
    prompts = name_prompts(tasks(1))
    executor = RayExecutor(episodes_per_actor=4, tries=1, actor_options=ONE_PER_NODE)
    async with executor.start(episodes, prompts, 4) as runner:
        first = (await runner.run(prompts[0], "sample")).result
        os.kill(first.observation.metrics["pid"], signal.SIGKILL)
        assert has_ended(first.observation.metrics["pid"])
        await asyncio.wrap_future(runner._handles[0].node.remote().future())  # Ray has started it again
        second = (await runner.run(prompts[0], "sample")).result
    assert second.reward.reward == 1.0
    assert second.observation.metrics["pid"] != first.observation.metrics["pid"]


async def test_an_actor_lost_with_a_cancelled_sample_takes_no_other_until_it_is_ready(cluster, tmp_path):
    async def play(action):
        if not list(tmp_path.iterdir()):
            (tmp_path / str(os.getpid())).touch()
            await asyncio.Event().wait()
        return step_result()

    episodes = LocalRunner(
        StubEnvironment(play).factory, keep_tokens=False, keep_trajectories=False, keep_identity=False
    )
    (prompt,) = name_prompts(tasks(1))
    executor = RayExecutor(episodes_per_actor=4, tries=1, actor_options=ONE_PER_NODE)
    async with executor.start(episodes, [prompt], 4) as runner:
        running = asyncio.ensure_future(runner.run(prompt, "sample"))
        await until(lambda: list(tmp_path.iterdir()), running)
        running.cancel()
        os.kill(int(next(tmp_path.iterdir()).name), signal.SIGKILL)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await runner.run(prompt, "sample")).result.reward.reward == 1.0


async def test_a_storm_of_crashes_and_kills_ends_each_sample_once(cluster, tmp_path):
    ends = await storm(cluster, range(3, 5), tmp_path)  # `make storm` has 200
    assert ends["finished"] and ends["dropped, crashes"]


class Held(Environment):
    """Runs until it is canceled, and leaves files of its start and its cleanup, which takes a while."""

    def __init__(self, folder):
        super().__init__(lambda: None)
        self.mark = folder / f"{os.getpid()}-{id(self)}"

    async def reset(self):
        self.mark.touch()
        await asyncio.Event().wait()

    async def cleanup(self):
        await asyncio.sleep(0.2)
        self.mark.rename(self.mark.with_suffix(".clean"))


async def test_an_evaluation_without_tasks_needs_no_actor(cluster):
    assert await Evaluator(StubEnvironment().factory, executor=RayExecutor(cluster.address)).run([]) == {}


async def test_cancelled_episodes_are_cleaned_up_and_actors_end(cluster, tmp_path):
    executor = RayExecutor(episodes_per_actor=4, actor_options=ONE_PER_NODE)
    evaluation = Evaluator(lambda action: Held(tmp_path), max_concurrency=8, executor=executor, show_progress=False)
    running = asyncio.ensure_future(evaluation.run(tasks(20)))
    await until(lambda: len(list(tmp_path.iterdir())) == 8, running)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    marks = list(tmp_path.iterdir())
    assert len(marks) == 8 and {mark.suffix for mark in marks} == {".clean"}
    assert all(has_ended(pid) for pid in {int(mark.name.split("-")[0]) for mark in marks})


async def test_a_cancellation_may_come_before_its_sample(cluster):
    episodes = LocalRunner(StubEnvironment().factory, keep_tokens=False, keep_trajectories=False, keep_identity=False)
    actor = EpisodeActor(cloudpickle.dumps(episodes), [], versions(), {"": logging.WARNING}, os.getcwd())
    (prompt,) = name_prompts(tasks(1))
    assert await actor.ready() is None
    await actor.cancel(0)
    assert await actor.run(0, prompt, "sample") is None
    assert cloudpickle.loads(await actor.run(1, prompt, "sample")).result.reward.reward == 1.0


DRIVER = """
import asyncio, pathlib, sys
import ray
from tests.integration.test_ray import Evaluator, Held, RayExecutor, tasks

ray.init(address=sys.argv[1], log_to_driver=False)
folder = pathlib.Path(sys.argv[2])
evaluation = Evaluator(lambda action: Held(folder), executor=RayExecutor(), show_progress=False)
asyncio.run(evaluation.run(tasks(4)))
"""


async def test_actors_end_with_a_killed_driver(cluster, tmp_path):
    with subprocess.Popen([sys.executable, "-c", DRIVER, cluster.address, str(tmp_path)]) as driver:
        await until(lambda: len(list(tmp_path.iterdir())) == 4 or driver.poll() is not None)
        pids = {int(mark.name.split("-")[0]) for mark in tmp_path.iterdir()}
        driver.kill()
    assert len(pids) == 1 and all(has_ended(pid) for pid in pids)


# === from the command line ===


def test_a_stopped_command_goes_on_where_it_was(cluster, chatml_tokenizer, tmp_path):
    chatml_tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"id": f"s{n}", "question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ScriptedSGLang(chatml_tokenizer, solve).serve() as base_url:
        command = [sys.executable, "-m", "strands_env.cli", "eval", "--dataset", "sums.jsonl", "--env", "calculator"]
        command += ["--base-url", base_url, "--tokenizer", "tokenizer", "--n-samples", "4", "--output", "out"]
        command += [
            "--ray",
            cluster.address,
            "--ray-args",
            '{"episodes_per_actor": 2, "actor_options": {"num_cpus": 2}}',
        ]
        command += ["--concurrency", "2"]
        started = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        path = tmp_path / "out" / "results.jsonl"
        while not (path.exists() and len(path.read_bytes().splitlines()) >= 2) and started.poll() is None:
            time.sleep(0.01)
        started.send_signal(signal.SIGTERM)
        _, errors = started.communicate(timeout=60)
        assert started.returncode == 130 and "run the same command to continue" in errors, errors
        kept = len(lines(path))
        assert 2 <= kept < 24
        again = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True)
        assert again.returncode == 0, again.stderr
    records = lines(path)
    assert len(records) == len({record["key"] for record in records}) == 24


# === told before the first episode ===


class Unpicklable:
    def __init__(self):
        self.guard = threading.Lock()


async def refused(tmp_path, factory, **settings):
    """Run an evaluation that is refused; return the message."""
    executor = RayExecutor(episodes_per_actor=4, actor_options={**ONE_PER_NODE, **settings})
    evaluation = Evaluator(factory, executor=executor, show_progress=False, output_path=tmp_path, **ONE_ACTOR)
    with pytest.raises(ExecutorError) as told:
        await evaluation.run(tasks(2))
    assert not (tmp_path / "results.jsonl").read_bytes()
    await until(lambda: ray.available_resources().get("CPU") == 4)  # its actors have ended
    return str(told.value)


async def test_what_cannot_be_pickled_is_named(cluster, tmp_path):
    env = Unpicklable()
    told = await refused(tmp_path, lambda action: StubEnvironment(env))
    assert "env_factory.env.guard of Unpicklable: TypeError" in told, told


async def test_a_node_without_the_tokenizer_is_named(cluster, chatml_tokenizer, tmp_path):
    path = tmp_path / "tokenizer"
    chatml_tokenizer.save_pretrained(path)
    client = SGLangClient("http://127.0.0.1:9")
    factory = sglang_model_factory(tokenizer=path, client=client)
    shutil.rmtree(path)  # the driver has loaded it
    for environment_of in (
        lambda action: CalculatorEnvironment(factory),
        lambda action: CalculatorEnvironment(sglang_model_factory(tokenizer=path, client=client)),
    ):
        told = await refused(tmp_path / "out", environment_of)
        assert "Ray node" in told and f"FileNotFoundError: {path}: no such folder" in told, told


async def test_an_environment_that_ends_the_process_is_named(cluster, tmp_path):
    told = await refused(tmp_path, lambda action: os._exit(3))
    assert "Ray node" in told and "the process ends while an environment is created" in told, told


@pytest.mark.parametrize("package", ["strands-agents", "strands-sglang"])
async def test_another_version_on_a_node_is_named(cluster, tmp_path, package):
    metadata = tmp_path / f"{package.replace('-', '_')}-0.0.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.0.1\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    told = await refused(tmp_path / "out", StubEnvironment().factory, runtime_env={"env_vars": {"PYTHONPATH": path}})
    assert f"{package} is 0.0.1 there and" in told


def test_an_unreachable_cluster_is_told():
    command = "from strands_env.ray import RayExecutor; RayExecutor('127.0.0.1:9')"
    ended = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert "there is no Ray cluster at 127.0.0.1:9" in ended.stderr.splitlines()[-1], ended.stderr


@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_a_cluster_of_another_version_is_told(monkeypatch, address):
    def refuse(*args, **kwargs):
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 0.0.1")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ConnectionError, match="refuses the connection: Version mismatch: .* Ray: 0.0.1"):
        RayExecutor(address)


@pytest.mark.parametrize(("name", "value"), [("num_cpu", 1), ("num_cpus", "two"), ("memory", -1)])
def test_options_that_ray_refuses_are_told(name, value):
    with pytest.raises(ValueError, match=f"actor_options: .*{name}"):
        RayExecutor(actor_options={name: value})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_connected_cluster_has_several_names(cluster, host):
    port = cluster.address.rpartition(":")[2]
    RayExecutor(f"{host}:{port}")
    with pytest.raises(ValueError, match=f"connected to the Ray cluster at {cluster.address} already"):
        RayExecutor(f"{host}:1")


def test_the_guide_runs(cluster, chatml_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    page = Path(__file__).parents[2] / "docs/guides/ray.md"
    run_page(page, "Qwen/Qwen3-4B-Instruct-2507", chatml_tokenizer, tmp_path, monkeypatch)
