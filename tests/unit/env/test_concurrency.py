"""How many episodes run at a time, and how that follows what servers report."""

import asyncio
import random
from types import SimpleNamespace

import anyio
import httpx
import pytest
from hypothesis import given, settings, strategies as st

from strands_env.core import Environment
from strands_env.eval import Evaluator
from strands_env.eval.concurrency import DEFAULT, Concurrency
from strands_sglang import ServerLoad, SGLangClient, SGLangModel
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from support.agents import ScriptedModel
from support.environments import StubEnvironment, tasks


def following(most=1000):
    """A concurrency that follows servers."""
    return Concurrency(DEFAULT, SGLangClient("http://server", max_connections=most))


def load(running=0, waiting=0, max_running=None, cache_usage=0.0):
    return ServerLoad("http://server", running, waiting, max_running, cache_usage)


def report(concurrency, *loads, times=1):
    """As many episodes run as may, and the servers report these loads."""
    for _ in range(times):
        concurrency.running = concurrency.limit
        concurrency.adjust(loads)
    return concurrency.limit


# === the number ===


def test_it_rises_while_servers_have_room():
    concurrency = following()
    limits = [report(concurrency, load(running=concurrency.limit), times=3) for _ in range(5)]
    assert limits == sorted(set(limits)) and limits[0] > DEFAULT and limits[-1] >= 5 * DEFAULT


@pytest.mark.parametrize(
    "full",
    [
        load(running=32, waiting=4, max_running=32),
        load(running=32, waiting=1),
        load(running=32, cache_usage=0.9),
        load(running=36, max_running=32),
    ],
)
def test_it_stays_at_a_full_server_with_a_short_queue(full):
    assert report(following(), full, times=20) == DEFAULT


def test_a_full_server_gets_a_short_queue():
    assert report(following(), load(running=8, max_running=8), times=3) == DEFAULT + 1


def test_it_falls_by_what_waits_too_long():
    concurrency = following()
    assert report(concurrency, load(running=4, waiting=7), times=3) == DEFAULT - 6
    assert report(concurrency, load(running=4, waiting=1), times=9) == DEFAULT - 6


def test_a_burst_of_requests_changes_nothing():
    concurrency = following()
    for _ in range(10):
        report(concurrency, load(running=2, waiting=8), times=2)
        report(concurrency, load(running=10, waiting=1))
    assert concurrency.limit == DEFAULT


def test_what_has_not_ended_yet_is_not_counted_again():
    concurrency = following()
    report(concurrency, load(running=5, waiting=5), times=3)
    lowered = concurrency.limit
    for _ in range(9):
        concurrency.running = DEFAULT
        concurrency.adjust([load(running=5, waiting=5)])
    assert concurrency.limit == lowered < DEFAULT


def test_without_enough_episodes_it_does_not_rise():
    concurrency = following()
    for _ in range(9):
        concurrency.running = DEFAULT - 1
        concurrency.adjust([load(running=2)])
    assert concurrency.limit == DEFAULT


def test_one_servers_room_makes_up_for_anothers_queue():
    busy, idle = load(running=8, waiting=5, max_running=8), load(running=4, max_running=8)
    assert report(following(), busy, idle, times=3) == DEFAULT
    assert report(following(), busy, busy, times=3) == DEFAULT - 8
    assert report(following(), idle, idle, times=3) == DEFAULT + 8


def test_a_silent_server_leaves_it_as_it_is():
    assert report(following(), times=9) == DEFAULT


counts = st.integers(0, 5000)
reports = st.lists(
    st.lists(st.builds(load, counts, counts, st.none() | st.integers(1, 5000), st.floats(0, 1)), max_size=3)
)


@given(reports, st.integers(1, 2000), st.data())
def test_whatever_servers_report_it_stays_within_its_bounds(reports, most, data):
    concurrency = following(most)
    for loads in reports:
        concurrency.running = data.draw(st.integers(0, most))
        concurrency.adjust(loads)
        assert 1 <= concurrency.limit <= most == concurrency.most


class Servers:
    """Servers that admit requests in order, as their batch and their cache allow; one step is one report.

    An episode alternates between a request and a pause; both last up to twice the given number of steps.
    """

    def __init__(self, concurrency, count, *, places, steps, pause, rng):
        self.concurrency, self.places, self.steps, self.pause, self.rng = concurrency, places, steps, pause, rng
        self.running, self.waiting = ([[] for _ in range(count)] for _ in range(2))
        self.paused = []

    @property
    def live(self):
        return len(self.paused) + sum(map(len, (*self.running, *self.waiting)))

    def step(self, max_running, cache):
        """Advance by one step, report, and return the numbers of running and waiting requests."""
        self.paused = [left - 1 for left in self.paused]
        again = sum(left < 0 for left in self.paused)
        self.paused = [left for left in self.paused if left >= 0]
        for _ in range(max(again, 0) + max(self.concurrency.limit - self.live - again, 0)):
            if self.live < self.concurrency.limit:
                self.waiting[self.live % len(self.waiting)].append(self.rng.uniform(1, 2 * self.steps))
        for running, waiting in zip(self.running, self.waiting, strict=True):
            self.paused += [self.rng.uniform(0, 2 * self.pause) for left in running if left <= 1]
            running[:] = [left - 1 for left in running if left > 1]
            while waiting and len(running) < self.places:
                running.append(waiting.pop(0))
        self.concurrency.running = max(self.live, self.concurrency.limit)
        counts = [(len(running), len(waiting)) for running, waiting in zip(self.running, self.waiting, strict=True)]
        self.concurrency.adjust([load(*count, max_running, count[0] / cache if cache else 0.0) for count in counts])
        return sum(running for running, _ in counts), sum(waiting for _, waiting in counts)


@settings(deadline=None, max_examples=20)
@given(
    count=st.integers(1, 3),
    places=st.integers(8, 40),
    steps=st.integers(2, 8),
    pause=st.integers(0, 8),
    limited_by=st.sampled_from(["batch", "cache", "something unreported"]),
    seed=st.integers(0, 2**32),
)
def test_it_converges_to_full_servers_with_short_queues(count, places, steps, pause, limited_by, seed):
    servers = Servers(following(most=10_000), count, places=places, steps=steps, pause=pause, rng=random.Random(seed))
    max_running, cache = places if limited_by == "batch" else None, places if limited_by == "cache" else None
    seen = [servers.step(max_running, cache) for _ in range(250)][-100:]
    running, waiting = (sum(values) / len(seen) for values in zip(*seen, strict=True))
    assert running >= 0.8 * count * places - count, (running, waiting)
    assert waiting <= (0.6 if limited_by == "something unreported" else 0.35) * count * places, (running, waiting)


# === the workers ===


async def run_with(concurrency, samples, each):
    """Run samples as an evaluation does; `each` is awaited for each of them."""

    async def work():
        async for sample in concurrency.admit(left):
            await each(sample)

    left = iter(samples)
    await asyncio.gather(*(work() for _ in range(min(concurrency.most, len(samples)))))


async def test_every_sample_runs_once_and_none_starts_above_the_limit():
    concurrency, ran, rng, running = following(most=30), [], random.Random(0), set()

    async def each(sample):
        running.add(sample)
        assert len(running) == concurrency.running <= concurrency.limit
        limits.add(concurrency.limit)
        for _ in range(rng.randrange(5)):
            await asyncio.sleep(0)
        concurrency.adjust([load(running=10, waiting=50 * (len(ran) // 50 % 2))])
        running.remove(sample)
        ran.append(sample)

    limits = set()
    await run_with(concurrency, range(500), each)
    assert sorted(ran) == list(range(500)) and {1, 30} <= limits


async def test_raised_limit_starts_waiting_workers_at_once():
    concurrency, gate = following(), anyio.Event()
    work = asyncio.ensure_future(run_with(concurrency, range(40), lambda sample: gate.wait()))
    await anyio.wait_all_tasks_blocked()
    assert concurrency.running == DEFAULT
    for _ in range(3):
        concurrency.adjust([load(running=DEFAULT)])
    await anyio.wait_all_tasks_blocked()
    assert concurrency.running == concurrency.limit > DEFAULT
    gate.set()
    await work


# === the servers ===


@pytest.fixture(autouse=True)
def polls(monkeypatch):
    """The pauses between reports, which take no time."""
    pauses, sleep = [], asyncio.sleep

    async def pause(seconds):
        pauses.append(seconds)
        await sleep(0)

    fake = SimpleNamespace(**{**vars(asyncio), "sleep": pause})
    monkeypatch.setattr("strands_env.eval.concurrency.asyncio", fake)
    return pauses


class Reporting:
    """A server that answers `/v1/loads` as a function of the number of the request, and nothing else."""

    def __init__(self, answer):
        self.answer, self.asked, self.enough = answer, 0, asyncio.Event()

    async def __call__(self, request):
        if request.url.path != "/v1/loads":
            return httpx.Response(404)
        self.asked += 1
        if self.asked == 20:
            self.enough.set()
        return self.answer(self.asked)


def rank(running):
    entry = {"num_running_reqs": running, "num_waiting_reqs": 0, "token_usage": 0.0, "max_running_requests": None}
    return httpx.Response(200, json={"loads": [entry]})


async def followed(answer):
    """The limit after 20 reports, with as many episodes as it allows."""
    server = Reporting(answer)
    async with SGLangClient("http://server", transport=httpx.MockTransport(server)) as client:
        concurrency = Concurrency(DEFAULT, client)
        concurrency.running = DEFAULT
        following = asyncio.ensure_future(concurrency.follow())
        await server.enough.wait()
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
    return concurrency.limit


async def test_it_follows_what_servers_report(polls):
    assert await followed(lambda asked: rank(DEFAULT)) > DEFAULT and set(polls) == {1.0}


@pytest.mark.parametrize("status", [404, 500])
async def test_servers_without_reports_leave_the_default(status, polls, caplog):
    assert await followed(lambda asked: httpx.Response(status)) == DEFAULT
    [record] = caplog.records
    assert record.message == "concurrency=<10> | no server reports its load at /v1/loads"
    assert polls[:5] == [2.0, 4.0, 8.0, 10.0, 10.0]


async def test_servers_that_stop_reporting_leave_the_last_limit(polls, caplog):
    limit = await followed(lambda asked: rank(DEFAULT) if asked <= 3 else httpx.Response(500))
    assert limit > DEFAULT and not caplog.records and max(polls) == 10.0
    assert await followed(lambda asked: rank(DEFAULT) if asked % 5 else httpx.Response(500)) > DEFAULT


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (lambda: StubEnvironment(), "AttributeError: 'StubEnvironment' object has no attribute 'model_factory'"),
        (lambda: Environment(lambda: ScriptedModel([])), "its model has no SGLang client"),
        (lambda: 1 // 0, "ZeroDivisionError"),
    ],
)
async def test_without_servers_to_follow_it_is_the_default(environment, reason, caplog):
    evaluator = Evaluator(lambda action: environment(), max_concurrency="auto", show_progress=False)
    assert len(await evaluator.run(tasks(DEFAULT + 2))) == DEFAULT + 2
    [line] = [record.message for record in caplog.records if "no servers to follow" in record.message]
    assert line.startswith(f"concurrency=<10>, reason=<{reason}")


async def test_fixed_number_asks_no_server_and_makes_no_environment():
    made = []

    def make(action):
        made.append(action)
        return StubEnvironment()

    await Evaluator(make, max_concurrency=3, show_progress=False).run(tasks(5))
    assert len(made) == 5
    await Evaluator(make, max_concurrency="auto", show_progress=False).run([])
    assert len(made) == 5


async def test_an_evaluation_rises_to_the_clients_connections(chatml_tokenizer):
    def answer(request):
        in_flight.append(len(server.running))
        return ScriptedAnswer("fine", latency_s=0.001)

    in_flight, most = [], 2 * DEFAULT
    server = ScriptedSGLang(chatml_tokenizer, answer)
    async with server.client(max_connections=most) as client:
        env = Environment(lambda: SGLangModel(tokenizer=chatml_tokenizer, client=client))
        results = await Evaluator(lambda action: env, max_concurrency="auto", show_progress=False).run(tasks(150))
    assert {sample.step_result.termination_reason.value for [sample] in results.values()} == {"task_complete"}
    assert DEFAULT < max(in_flight) <= most and len(server.requests) == 150
