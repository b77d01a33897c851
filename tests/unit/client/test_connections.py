"""Connections over real sockets: what a transport in memory cannot show."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import warnings

import pytest
from anyio.from_thread import start_blocking_portal

from strands_sglang.client.client import SGLangClient
from strands_sglang.exceptions import SGLangConnectionError, SGLangDecodingError
from strands_sglang.local.server import free_port
from support.fake_server import RawServer, http_bytes
from support.generations import generation


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
