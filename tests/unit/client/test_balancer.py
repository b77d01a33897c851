"""Which of several servers a request goes to, and what becomes of those that are gone."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import httpx
import pytest

from strands_sglang.client import balancer as servers_module
from strands_sglang.client.balancer import Servers
from strands_sglang.client.client import SGLangClient
from strands_sglang.client.retries import FailureKind
from strands_sglang.exceptions import SGLangConnectionError
from support.fake_server import OK, FakeServer, Network, never
from support.generations import generation

URLS = ("http://one", "http://two", "http://three")


@pytest.fixture
def quick_probes(monkeypatch):
    """Servers that are out are asked for their health at every request."""
    monkeypatch.setattr(servers_module, "FIRST_PROBE_S", 0.0)
    monkeypatch.setattr(servers_module, "MAX_PROBE_S", 0.0)


def busy(*in_flight):
    servers = Servers(URLS)
    for server, count in zip(servers.all, in_flight, strict=True):
        for _ in range(count):
            servers.started(server)
    return servers


# --- choosing ---


def test_the_server_with_the_fewest_requests_in_flight_is_chosen():
    servers = busy(2, 1, 3)
    assert servers.choose().base_url == "http://two"
    servers.started(servers["http://two"])
    servers.started(servers["http://two"])
    assert servers.choose().base_url == "http://one"
    servers.ended(servers["http://three"])
    servers.ended(servers["http://three"])
    assert servers.choose().base_url == "http://three"


def test_idle_servers_take_turns():
    servers = Servers(URLS)
    assert Counter(servers.choose().base_url for _ in range(30)) == dict.fromkeys(URLS, 10)


def test_a_key_stays_on_its_server_however_busy_it_is():
    servers = Servers(URLS)
    first = servers.choose("a")
    for _ in range(10):
        servers.started(first)
    assert all(servers.choose("a") is first for _ in range(5))
    assert servers.choose("b") is not first


def test_keys_are_spread_evenly_although_nothing_is_in_flight():
    servers = Servers(URLS)
    assert Counter(servers.choose(str(i)).base_url for i in range(300)) == dict.fromkeys(URLS, 100)


def test_only_so_many_keys_are_remembered(monkeypatch):
    monkeypatch.setattr(servers_module, "MAX_KEYS", 10)
    servers = Servers(URLS)
    for i in range(1000):
        servers.choose(str(i))
    assert sum(server.keys for server in servers.all) == 10


def test_a_retry_goes_elsewhere_and_leaves_the_key_where_it_is():
    servers = Servers(URLS)
    first = servers.choose("a")
    assert servers.choose("a", rather_not=first) is not first
    assert servers.choose("a") is first


def test_a_single_server_is_always_chosen():
    servers = Servers(URLS[:1])
    [only] = servers.all
    servers.note_failure(only, FailureKind.UNREACHABLE)
    assert servers.choose("a", rather_not=only) is only
    assert not only.is_out


# --- leaving out and taking back ---


def test_a_server_that_takes_no_connections_is_out_and_its_keys_move():
    servers = Servers(URLS)
    first = servers.choose("a")
    servers.note_failure(first, FailureKind.UNREACHABLE)
    second = servers.choose("a")
    assert second is not first
    assert first not in servers.up()
    assert sum(server.keys for server in servers.all) == 1
    servers.note_answer(first)
    assert servers.choose("a") is second
    assert first in servers.up()


def test_one_broken_connection_is_no_reason_but_several_in_a_row_are():
    servers = Servers(URLS)
    server = servers.all[0]
    for _ in range(10):
        servers.note_failure(server, FailureKind.DROPPED)
        servers.note_answer(server)
    assert not server.is_out
    for _ in range(3):
        servers.note_failure(server, FailureKind.DROPPED)
    assert server.is_out


@pytest.mark.parametrize("kind", [FailureKind.REFUSED, FailureKind.TIMED_OUT, FailureKind.UNDECODABLE])
def test_a_server_that_answers_or_is_slow_is_not_left_out(kind):
    servers = Servers(URLS)
    for _ in range(10):
        servers.note_failure(servers.all[0], kind)
    assert servers.up() == servers.all


def test_a_server_that_is_out_is_probed_at_growing_intervals(monkeypatch):
    now = 0.0
    monkeypatch.setattr(servers_module.time, "monotonic", lambda: now)
    servers = Servers(URLS)
    server = servers.all[0]
    servers.note_failure(server, FailureKind.UNREACHABLE)
    probes = []
    while now < 400:
        now += 0.5
        if server in servers.due():
            probes.append(now)
            servers.note_failure(server, FailureKind.UNREACHABLE)
    gaps = [later - earlier for earlier, later in zip([0.0, *probes], probes, strict=False)]
    assert gaps == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *[60.0] * (len(gaps) - 6)]


def test_with_all_servers_out_requests_go_on_and_show_who_is_back():
    servers = Servers(URLS)
    for server in servers.all:
        servers.note_failure(server, FailureKind.UNREACHABLE)
    assert servers.up() == servers.all
    back = servers.choose("a")
    servers.note_answer(back)
    assert servers.up() == (back,)
    assert servers.choose("a") is back


# --- a client with several servers ---


async def test_requests_are_spread_and_keys_are_sent_as_header_and_field():
    network = Network(one=FakeServer(), two=FakeServer())
    client = network.client()
    for _ in range(4):
        await client.generate([1], routing_key="a")
    await asyncio.gather(*(client.generate([1]) for _ in range(6)))
    assert len(set(network.hosts()[:4])) == 1
    assert set(Counter(network.hosts()[4:]).values()) == {3}
    sent = network.requests[0]
    assert sent.headers["x-smg-routing-key"] == "a"
    assert b'"routing_key":"a"' in sent.content
    assert "x-smg-routing-key" not in network.requests[-1].headers
    assert b"routing_key" not in network.requests[-1].content


@pytest.mark.parametrize("key", ["", " a", "a\nb", "\u00e4", 3, b"a"])
async def test_a_key_that_is_no_header_value_is_refused(key):
    server = FakeServer()
    with pytest.raises(ValueError, match="routing_key"):
        await server.client().generate([1], routing_key=key)
    assert server.asked == []


async def test_requests_to_a_dead_server_go_to_another_one_at_once():
    network = Network(one=None, two=FakeServer())
    client = network.client(retry_delay=8.0)
    started = asyncio.get_running_loop().time()
    answers = await asyncio.gather(*(client.generate([1], routing_key=str(i)) for i in range(10)))
    assert answers == [generation()] * 10
    assert asyncio.get_running_loop().time() - started < 3.0
    assert client.available_urls == ("http://two",)
    before = len(network.hosts())
    await asyncio.gather(*(client.generate([1], routing_key=str(i)) for i in range(10)))
    assert network.hosts()[before:] == ["two"] * 10


@pytest.mark.usefixtures("quick_probes")
async def test_a_server_that_is_healthy_again_is_taken_back():
    network = Network(one=None, two=FakeServer())
    client = network.client()
    await asyncio.gather(*(client.generate([1]) for _ in range(4)))
    network.servers["one"] = FakeServer(paths={"/health": httpx.Response(503)})  # it is starting
    while "one" not in network.hosts("/health"):
        await client.generate([1])
    for _ in range(5):
        await client.generate([1])
    assert client.available_urls == ("http://two",)
    network.servers["one"] = FakeServer(paths={"/health": httpx.Response(200)})
    while client.available_urls != ("http://one", "http://two"):
        await client.generate([1])
    before = len(network.hosts())
    await asyncio.gather(*(client.generate([1]) for _ in range(4)))
    assert Counter(network.hosts()[before:]) == {"one": 2, "two": 2}


async def test_a_refused_request_is_tried_elsewhere():
    network = Network(one=FakeServer(httpx.Response(503)), two=FakeServer())
    client = network.client()
    for i in range(6):
        assert await client.generate([1], routing_key=str(i)) == generation()
    hosts = network.hosts()
    assert all(after == "two" for before, after in zip(hosts, hosts[1:], strict=False) if before == "one")


async def test_an_abort_goes_to_the_server_that_has_the_request():
    network = Network(one=FakeServer(never), two=FakeServer(never))
    client = network.client()
    tasks = [asyncio.create_task(client.generate([1])) for _ in range(2)]
    while len(network.hosts()) < 2:
        await asyncio.sleep(0)
    [rid] = [body["rid"] for body in network.servers["two"].bodies()]  # type: ignore[union-attr]
    await client.abort(rid)
    assert network.hosts("/abort_request") == ["two"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for server in network.servers.values():
        assert server is not None
        assert {body["rid"] for body in server.bodies()} == {body["rid"] for body in server.bodies("/abort_request")}


async def test_with_all_servers_dead_the_error_says_so():
    client = Network(one=None, two=None).client(max_retries=3, unreachable_after=60.0)
    with pytest.raises(SGLangConnectionError, match="could not connect.*4 attempts.*no server has ever answered"):
        await client.generate([1])


async def test_a_server_that_never_answered_is_no_reason_to_give_up_while_another_one_does():
    network = Network(one=None, two=FakeServer(OK))
    client = network.client(unreachable_after=60.0)
    assert await asyncio.gather(*(client.generate([1]) for _ in range(4))) == [generation()] * 4


async def test_health_counts_the_servers():
    healthy = {"/health": httpx.Response(200)}
    network = Network(one=FakeServer(paths=healthy), two=FakeServer(paths={"/health": httpx.Response(503)}), three=None)
    client = network.client()
    assert await client.health_by_server() == {"http://one": True, "http://two": False, "http://three": False}
    assert await client.health() is True
    assert await network.client("two", "three").health() is False


async def test_each_server_can_be_asked_for_its_model():
    def named(name):
        return FakeServer(paths={"/model_info": httpx.Response(200, json={"model_path": name})})

    network = Network(one=named("a"), two=named("b"))
    client = network.client()
    assert (await client.model_info("http://two"))["model_path"] == "b"
    assert (await client.model_info())["model_path"] in ("a", "b")
    with pytest.raises(ValueError, match="none of this client's servers: http://one, http://two"):
        await client.model_info("http://other")


@pytest.mark.parametrize(
    ("base_url", "said"),
    [
        ([], "at least one"),
        (["http://a", "http://a/"], "more than once"),
        (["http://a", "b"], "http://b"),
        ([3], "string"),
    ],
)
def test_addresses_that_cannot_work_are_refused(base_url, said):
    with pytest.raises(ValueError, match=said):
        SGLangClient(base_url)


async def test_a_thousand_requests_to_a_server_that_is_down_give_a_few_lines(caplog):
    caplog.set_level(logging.INFO, "strands_sglang")
    network = Network(one=None, two=None)
    client = network.client(retry_delay=0.01, max_retries=10**6, unreachable_after=60.0)
    calls = [asyncio.create_task(client.generate([1])) for _ in range(1000)]
    while len(network.requests) < 3000:
        await asyncio.sleep(0)
    network.servers.update(one=FakeServer(), two=FakeServer())
    await asyncio.gather(*calls)
    said = [record.getMessage() for record in caplog.records]
    down = Counter(line.partition(",")[0] for line in said if "server does not answer" in line)
    assert set(down) == {"base_url=<http://one>", "base_url=<http://two>"}
    assert max(down.values()) <= 6
    assert 1 <= sum("server answers again" in line for line in said) <= 2
