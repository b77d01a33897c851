"""The servers that a client has: their addresses, connections and turns, and the clients that are shared."""

import asyncio
import gc
import logging
import socket
import threading
import warnings
from argparse import Namespace
from collections import Counter

import httpx
import pytest
import transformers
from anyio.from_thread import start_blocking_portal

from strands_sglang.client import balancer as servers_module
from strands_sglang.client.balancer import Servers
from strands_sglang.client.cache import get_client, get_client_from_slime_args, get_tokenizer
from strands_sglang.client.client import SGLangClient
from strands_sglang.client.retries import FailureKind
from strands_sglang.exceptions import SGLangConnectionError, SGLangDecodingError
from strands_sglang.local.server import free_port
from support.fake_server import OK, FakeServer, Network, RawServer, generation, http_bytes, never

URLS = ("http://one", "http://two", "http://three")


@pytest.fixture
def quick_probes(monkeypatch):
    """Servers that are out are asked for their health at every request."""
    monkeypatch.setattr(servers_module, "FIRST_PROBE_S", 0.0)
    monkeypatch.setattr(servers_module, "MAX_PROBE_S", 0.0)


# --- choosing ---


def test_the_server_with_the_fewest_requests_in_flight_is_chosen():
    def busy(*in_flight):
        servers = Servers(URLS)
        for server, count in zip(servers.all, in_flight, strict=True):
            for _ in range(count):
                servers.count_in_flight(server, 1)
        return servers

    servers = busy(2, 1, 3)
    assert servers.choose().base_url == "http://two"
    servers.count_in_flight(servers["http://two"], 1)
    servers.count_in_flight(servers["http://two"], 1)
    assert servers.choose().base_url == "http://one"
    servers.count_in_flight(servers["http://three"], -1)
    servers.count_in_flight(servers["http://three"], -1)
    assert servers.choose().base_url == "http://three"


def test_idle_servers_take_turns():
    servers = Servers(URLS)
    assert Counter(servers.choose().base_url for _ in range(30)) == dict.fromkeys(URLS, 10)


def test_a_key_stays_on_its_server_however_busy_it_is():
    servers = Servers(URLS)
    first = servers.choose("a")
    for _ in range(10):
        servers.count_in_flight(first, 1)
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


def client_of(server, **settings):
    return SGLangClient(server.base_url, retry_delay=0.0, **{"max_retries": 5, **settings})  # type: ignore[arg-type]


async def answer(request):
    request.writer.write(http_bytes(generation() if request.path == "/generate" else {}))


async def hang_up(request):
    request.writer.close()


async def half_an_answer(request):
    request.writer.write(http_bytes(generation(), missing=20))
    request.writer.close()


async def reset(request):
    request.writer.transport.abort()


@pytest.mark.parametrize("fault", [hang_up, half_an_answer, reset])
async def test_a_connection_that_breaks_is_aborted_and_tried_again(
    fault,
):
    seen = []

    async def first_then_answer(request):
        """Break the first `/generate`, and treat everything else well."""
        if request.path == "/generate" and not seen:
            seen.append(request)
            await fault(request)
        else:
            await answer(request)

    async with RawServer(first_then_answer) as server, client_of(server) as client:
        assert await client.generate([1]) == generation()
    first, second = server.bodies("/generate")
    assert [request.path for request in server.requests] == ["/generate", "/abort_request", "/generate"]
    assert server.bodies("/abort_request") == [{"rid": first["rid"]}]
    assert first["rid"] != second["rid"]


async def test_an_answer_that_is_not_http_is_named_as_such():
    async def banner(request):
        request.writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        request.writer.close()

    async with RawServer(banner) as server, client_of(server) as client:
        with pytest.raises(SGLangDecodingError, match="not HTTP.*is this an SGLang server"):
            await client.generate([1])


async def test_a_port_where_nobody_listens_is_told_as_such():
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    async with SGLangClient(url, retry_delay=0.0, unreachable_after=0.0) as client:
        with pytest.raises(SGLangConnectionError, match="could not connect.*start one .*, or correct") as caught:
            await client.generate([1])
        assert url in str(caught.value)
        assert await client.health() is False
        await client.abort("r")


async def test_https_to_a_plain_http_port_fails_at_once():
    async def refuse(_, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with SGLangClient(url, max_retries=10**6, unreachable_after=60) as client:
        with pytest.raises(SGLangConnectionError, match="SSL"):
            await client.generate([1])
    server.close()


async def test_a_server_that_comes_up_late_is_waited_for():
    port = free_port("127.0.0.1")
    tries = asyncio.Event()

    class Watch(logging.Handler):
        def emit(self, record):
            tries.set()

    async def serve(reader, writer):
        await reader.readuntil(b"}")
        writer.write(http_bytes(generation()))

    watch = Watch()
    logging.getLogger("strands_sglang").addHandler(watch)
    try:
        async with SGLangClient(f"http://127.0.0.1:{port}", retry_delay=0.01, max_retries=10**6) as client:
            task = asyncio.create_task(client.generate([1]))
            await tries.wait()
            server = await asyncio.start_server(serve, "127.0.0.1", port)
            assert await task == generation()
            server.close()
    finally:
        logging.getLogger("strands_sglang").removeHandler(watch)


async def test_more_requests_than_connections_are_all_answered():
    async with RawServer(answer) as server, client_of(server, max_connections=2) as client:
        answers = await asyncio.gather(*(client.generate([1]) for _ in range(20)))
    assert len(answers) == 20
    assert len({request.writer for request in server.requests}) == 2


async def test_an_abort_gets_out_while_every_connection_is_taken():
    arrived, aborted = asyncio.Event(), asyncio.Event()

    async def respond(request):
        if request.path == "/generate":
            arrived.set()
            await aborted.wait()
        else:
            aborted.set()
        await answer(request)

    async with RawServer(respond) as server, client_of(server, max_connections=1) as client:
        task = asyncio.create_task(client.generate([1]))
        await arrived.wait()
        await client.abort("some-rid")
        assert await task == generation()


async def test_a_connection_asks_whether_its_peer_is_still_there_so_that_no_timeout_is_needed():
    seen = []

    async def look(request):
        client = request.writer.get_extra_info("peername")
        sockets = [one for one in gc.get_objects() if issubclass(type(one), socket.socket) and one.fileno() >= 0]
        seen.extend(one for one in sockets if one.type == socket.SOCK_STREAM and one.getsockname() == client)
        await answer(request)

    async with RawServer(look) as server, client_of(server) as client:
        await client.generate([1])
        [ours] = {one.fileno(): one for one in seen}.values()
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            idle, interval, count = (
                ours.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
            )
            assert idle + count * interval == 120


@pytest.fixture
def threaded_server():
    """A server in a thread of its own, for tests that run event loops of theirs."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(RawServer(answer)) as server:
        yield server.base_url


def test_one_client_works_in_one_event_loop_after_the_other(threaded_server):
    client = SGLangClient(threaded_server, max_retries=0)
    for _ in range(3):
        assert asyncio.run(client.generate([1])) == generation()


def test_one_client_works_in_several_threads_at_a_time(threaded_server):
    client = SGLangClient(threaded_server, max_retries=0)
    answers = []

    async def several():
        answers.extend(await asyncio.gather(*(client.generate([1]) for _ in range(10))))

    threads = [threading.Thread(target=lambda: asyncio.run(several())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [generation()] * 40


def test_connections_of_loops_that_ended_leave_no_warnings(threaded_server, caplog):
    client = SGLangClient(threaded_server, max_retries=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(client.generate([1]))
        asyncio.run(client.generate([1]))
        del client
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    assert caplog.records == []


def test_a_client_that_nobody_closes_leaves_no_warnings(threaded_server, caplog):
    async def use_and_lose():
        await SGLangClient(threaded_server, max_retries=0).generate([1])
        cycle = [SGLangClient(threaded_server, max_retries=0)]
        await cycle[0].generate([1])
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
        gc.collect()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(use_and_lose())
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    assert caplog.records == []


def test_connections_of_a_loop_that_was_just_closed_are_let_go(threaded_server, caplog):
    client = SGLangClient(threaded_server, max_retries=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop = asyncio.new_event_loop()
        loop.run_until_complete(client.generate([1]))
        loop.close()
        assert asyncio.run(client.generate([1])) == generation()
        gc.collect()
    assert [str(warning.message) for warning in caught if "nclosed client" in str(warning.message)] == []
    assert [str(warning.message) for warning in caught if "nclosed connector" in str(warning.message)] == []
    assert caplog.records == []


def test_closing_a_client_closes_the_connections_of_other_threads_too(threaded_server):
    client = SGLangClient(threaded_server, max_retries=0)
    used, closed = threading.Event(), threading.Event()
    answers = []

    async def stay():
        answers.append(await client.generate([1]))
        used.set()
        await asyncio.to_thread(closed.wait)
        answers.append(await client.generate([1]))

    thread = threading.Thread(target=lambda: asyncio.run(stay()))
    thread.start()
    used.wait()
    asyncio.run(client.close())
    closed.set()
    thread.join()
    assert len(answers) == 2


def test_the_same_settings_give_the_same_client():
    client = get_client("http://shared:1", timeout=5)
    assert get_client("http://shared:1/", timeout=5, max_retries=60) is client
    assert get_client("http://shared:1", timeout=6) is not client
    assert get_client("http://shared:2", timeout=5) is not client
    assert client.timeout == 5


def test_the_same_slime_arguments_give_the_same_client():
    args = {"sglang_router_ip": "shared", "sglang_router_port": 3, "sglang_server_concurrency": 4}
    client = get_client_from_slime_args(Namespace(**args))
    assert get_client_from_slime_args(Namespace(**args)) is client
    assert get_client_from_slime_args(Namespace(**args), timeout=300.0) is not client
    assert (client.base_url, client.max_connections) == ("http://shared:3", 4)


def test_settings_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="hashable"):
        get_client("http://shared:1", timeout=[])
    with pytest.raises(TypeError, match="nonsense"):
        get_client("http://shared:1", nonsense=1)


@pytest.fixture
def loads(monkeypatch):
    """What transformers was asked to load; "broken" cannot be."""
    asked = []

    def from_pretrained(path, **kwargs):
        asked.append((path, kwargs))
        if path.endswith("broken"):
            raise ValueError("needs trust_remote_code=True")
        return object()

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    return asked


def test_a_tokenizer_is_loaded_once_from_any_thread(tmp_path, loads):
    found = []
    threads = [threading.Thread(target=lambda: found.append(get_tokenizer(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert get_tokenizer(str(tmp_path)) is found[0]
    assert loads == [(str(tmp_path), {"trust_remote_code": False})]
    assert get_tokenizer(tmp_path, use_fast=False) is not found[0]


def test_a_tokenizer_that_could_not_be_loaded_is_tried_again(tmp_path, loads):
    (tmp_path / "broken").mkdir()
    for _ in range(2):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            get_tokenizer(tmp_path / "broken")
    assert len(loads) == 2


@pytest.mark.parametrize("path", ["{tmp}/missing", "./missing", "~/no-such-model", "a/b/c", "missing/"])
def test_a_path_that_does_not_exist_is_called_that(tmp_path, loads, path):
    """Row D6."""
    path = path.format(tmp=tmp_path)
    with pytest.raises(FileNotFoundError, match=f"^{path}: no such folder$"):
        get_tokenizer(path)
    (tmp_path / "file.json").touch()
    with pytest.raises(NotADirectoryError, match="no folder of a model but a file"):
        get_tokenizer(tmp_path / "file.json")
    assert not loads


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_hub_that_cannot_be_reached_is_told_unless_the_model_is_in_the_cache(tmp_path, loads, monkeypatch, is_cached):
    """Row D6."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    if is_cached:
        (tmp_path / "models--foo--bar").mkdir()
        get_tokenizer("foo/bar")
    else:
        with pytest.raises(ConnectionError, match="foo/bar: .*http://127.0.0.1:9 cannot be reached"):
            get_tokenizer("foo/bar")
    assert bool(loads) is is_cached


def test_clients_with_the_same_headers_are_one():
    with_key = get_client("http://127.0.0.1:9", headers={"Authorization": "Bearer a"})
    assert with_key is get_client("http://127.0.0.1:9", headers={"Authorization": "Bearer a"})
    assert with_key is not get_client("http://127.0.0.1:9", headers={"Authorization": "Bearer b"})


def test_the_same_servers_give_the_same_client_in_any_spelling():
    both = get_client(["http://a:1", "http://b:1/"])
    assert both is get_client(("http://a:1/", "http://b:1"))
    assert both.base_urls == ("http://a:1", "http://b:1")
    assert get_client(["http://a:1"]) is get_client("http://a:1")
    assert get_client("http://a:1") is not both
