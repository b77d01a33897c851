"""Evaluations on a Ray cluster of two nodes while samples crash, actors are killed, and nodes are replaced.

    python tests/support/ray_storm.py --evaluations 200 --seed 0

Each evaluation must end, with each sample once: finished, or dropped after three lost actors. A sample that crashes no
actor may only be dropped if its last actor was killed from outside, since the last try has no neighbors. What a sample
does is drawn from the seed; the order of events is the machine's.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import strands_env.ray
from strands_env.eval import Evaluator
from strands_env.ray import RayExecutor
from support.environments import StubEnvironment, lines, step_result, tasks

NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
TRIES = 3
PATIENCE_S = 240

HARMLESS = {"quick": 6, "slow": 3, "block": 1}
CRASHES = {"once": 2, "exit": 1, "kill": 1}
"""What a sample may do, with weights. "once" ends its process the first time, "exit" and "kill" each time."""


@contextlib.contextmanager
def two_nodes():
    """Start a cluster of two nodes, which are processes of this machine, and connect to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # the default, 15, makes busy machines slow
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # what the tests import, for the nodes
        cluster = Cluster(initialize_head=True, head_node_args=NODE)
        try:
            cluster.add_node(**NODE)
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            yield cluster
            assert sum(node["Alive"] for node in ray.nodes()) == 2  # no executor has stopped it
        finally:
            ray.shutdown()
            cluster.shutdown()


@dataclass(frozen=True)
class Run:
    """The start of a sample in an actor."""

    prompt: str
    pid: int
    node: str


class Log:
    """The starts of all samples of an evaluation, which the actors append to a file."""

    def __init__(self, path):
        self.path = path
        path.touch()

    def add(self, prompt):
        with self.path.open("a") as file:
            file.write(f"{prompt} {os.getpid()} {ray.get_runtime_context().get_node_id()}\n")

    def read(self):
        rows = (line.split() for line in self.path.read_text().splitlines())
        return [Run(prompt, int(pid), node) for prompt, pid, node in rows]


def play_of(kinds, log):
    """Return what an episode does, by its prompt."""

    async def play(action):
        prompt = action.task_context.id
        is_first = all(run.prompt != prompt for run in log.read())
        log.add(prompt)
        kind = kinds[prompt]
        await asyncio.sleep(0.3 if kind == "slow" else 0.05)
        if kind == "block":
            time.sleep(0.3)
        if kind == "exit" or (kind == "once" and is_first):
            os._exit(1)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return step_result()

    return play


class Attacker:
    """Kills from outside: an actor once enough samples have started, and maybe the second node, which it replaces."""

    def __init__(self, cluster, log, kills, *, is_node_lost):
        self.cluster, self.log, self.kills, self.is_node_lost = cluster, log, kills, is_node_lost
        self.pids, self.nodes = set(), set()

    async def attack(self):
        for count, victim in self.kills:
            while len(runs := self.log.read()) < count:
                await asyncio.sleep(0.01)
            pid = runs[-1 - victim % len(runs)].pid
            self.pids.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.is_node_lost:
            node = self.cluster.list_all_nodes()[-1]
            self.nodes.add(node.node_id)
            self.cluster.remove_node(node, allow_graceful=False)
            self.cluster.add_node(**NODE)  # only the main thread may; the driver hears of nothing meanwhile

    def killed(self, run):
        return run.pid in self.pids or run.node in self.nodes


async def evaluate(cluster, seed, folder):
    """Run one evaluation of the storm, check it, and return how many samples ended how."""
    rng = random.Random(seed)
    actions = tasks(rng.randint(3, 8))
    harmful = rng.sample(range(len(actions)), rng.choice([0, 1, 1, 2]))
    kinds = {}
    for number, action in enumerate(actions):
        weights = CRASHES if number in harmful else HARMLESS
        kinds[action.task_context.id] = rng.choices(list(weights), weights.values())[0]
    kills = [(rng.randint(1, len(actions)), rng.randrange(4)) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
    log = Log(folder / f"{seed}.log")
    attacker = Attacker(cluster, log, sorted(kills), is_node_lost=rng.random() < 0.05)
    per_actor, actors = rng.randint(1, 4), rng.choice([1, 2, 2, 3])
    evaluation = Evaluator(
        StubEnvironment(play_of(kinds, log)).factory,
        max_concurrency=per_actor * actors,
        # Of three actors with two CPUs each, one has no place.
        executor=RayExecutor(episodes_per_actor=per_actor, tries=TRIES, actor_options={"num_cpus": rng.choice([1, 2])}),
        output_path=folder / str(seed) / "results.jsonl",
        show_progress=False,
    )
    attacking = asyncio.ensure_future(attacker.attack())
    results = await asyncio.wait_for(evaluation.run(actions), PATIENCE_S)
    await attacking
    records = [record for path in (folder / str(seed)).glob("*.jsonl") for record in lines(path)]
    assert sorted(record["prompt_id"] for record in records) == sorted(kinds), "a sample is stored twice, or never"
    ends = Counter()
    for prompt, (sample,) in results.items():
        kind, runs = kinds[prompt], [run for run in log.read() if run.prompt == prompt]
        if sample.is_finished:
            assert kind not in ("exit", "kill") and sample.reward == 1.0
            ends["finished"] += 1
            continue
        assert f"its actor was lost {TRIES} times" in sample.step_result.error
        assert len(runs) <= TRIES
        if kind in CRASHES:
            ends["dropped, crashes"] += 1
        else:
            assert attacker.killed(runs[-1]), f"{prompt} ({kind}) is dropped for what its neighbors did: {runs}"
            ends["dropped, killed from outside"] += 1
    return ends


async def storm(cluster, seeds, folder, report=lambda text: None):
    """Run an evaluation per seed; return how many samples ended how."""
    ends = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strands_env.ray, "LATE", 1.0)  # no evaluation waits half a minute for an actor without a place
        for seed in seeds:
            began = time.monotonic()
            found = await evaluate(cluster, seed, folder)
            report(f"seed {seed}: {time.monotonic() - began:.1f} s, {dict(found)}")
            ends += found
    return ends


def main():
    """Run the evaluations that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one; each has the next seed")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    seeds = range(arguments.seed, arguments.seed + arguments.evaluations)
    out = sys.stdout
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),  # where Ray tells of each process that ends
        two_nodes() as cluster,
        tempfile.TemporaryDirectory() as folder,
    ):
        ends = asyncio.run(storm(cluster, seeds, Path(folder), lambda text: print(text, file=out, flush=True)))
    print(f"{len(seeds)} evaluations in {time.monotonic() - began:.0f} s: {dict(ends)}")


if __name__ == "__main__":
    main()
