from __future__ import annotations

import asyncio
import json
import time

import anyio
import httpx
import pytest

from strands_sglang.client.cancellation import Cancellation
from strands_sglang.client.client import SGLangClient
from strands_sglang.exceptions import SGLangConnectionError, SGLangDeadlineError
from support.fake_server import BASE_URL, OK, FakeServer, never
from support.generations import generation


async def test_a_cancelled_request_is_aborted_on_the_server_and_not_tried_again():
    server = FakeServer(never)
    task = asyncio.create_task(server.client().generate([1]))
    await server.arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    [sent] = server.bodies()
    assert server.bodies("/abort_request") == [{"rid": sent["rid"]}]


async def test_a_caller_that_anyio_has_cancelled_waits_for_the_partial_answer_idly():
    """A11: a cancel scope cancels again in every round of the event loop."""
    server = FakeServer(never)
    client = server.client(abort_grace=0.5)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.generate, [1])
            await server.arrived.wait()
            used = time.thread_time()
            scope.cancel()
    assert time.thread_time() - used < 0.1
    assert len(server.bodies("/abort_request")) >= 1


async def test_a_timed_out_attempt_is_aborted_on_the_server_and_tried_again_once():
    server = FakeServer(never)
    with pytest.raises(SGLangConnectionError, match="no answer in time.*0.05 s.*2 attempts"):
        await server.client(timeout=0.05, max_retries=60).generate([1])
    assert server.bodies("/abort_request") == [{"rid": body["rid"]} for body in server.bodies()]
    assert len(server.bodies()) == 2


async def test_the_answer_after_a_timeout_counts():
    server = FakeServer(never, OK)
    assert await server.client(timeout=0.3).generate([1]) == generation()


async def test_a_request_cancelled_with_a_time_limit_is_aborted_too():
    server = FakeServer(never)
    task = asyncio.create_task(server.client(timeout=60).generate([1]))
    await server.arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(server.bodies("/abort_request")) == 1


async def test_a_request_cancelled_between_attempts_is_not_tried_again():
    server = FakeServer(httpx.Response(500))
    task = asyncio.create_task(server.client(retry_delay=8.0).generate([1]))
    await server.arrived.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(server.bodies()) == 1


async def test_requests_beyond_the_limit_wait_and_leave_no_trace_when_cancelled():
    server = FakeServer(never)
    client = server.client(max_connections=1)
    first, second = (asyncio.create_task(client.generate([token])) for token in (1, 2))
    await server.arrived.wait()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert [path for path, _ in server.asked] == ["/generate"]
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert [path for path, _ in server.asked] == ["/generate", "/abort_request"]  # although all slots were taken


def test_an_abort_gets_out_when_the_event_loop_ends():
    server = FakeServer(never)

    async def leave_behind():
        client = server.client()
        leave_behind.task = asyncio.create_task(client.generate([1]))  # type: ignore[attr-defined]
        await server.arrived.wait()

    asyncio.run(leave_behind())
    assert len(server.bodies("/abort_request")) == 1


def test_an_abort_that_is_already_on_its_way_gets_out_when_the_event_loop_ends():
    heard = []

    async def respond(request):
        await asyncio.sleep(0)
        heard.append(request.url.path)
        return httpx.Response(200)

    async def leave_behind():
        client = SGLangClient(BASE_URL, transport=httpx.MockTransport(respond))
        leave_behind.task = asyncio.create_task(client.abort("r"))  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(leave_behind())
    assert heard == ["/abort_request"]


async def cancel_at_a_hung_server(*, grace):
    """Seconds of wall clock and of CPU that the cancellation of a call takes."""

    async def respond(request):
        arrived.set()
        await asyncio.Event().wait()
        raise AssertionError

    arrived = asyncio.Event()
    task = asyncio.create_task(
        SGLangClient(BASE_URL, transport=httpx.MockTransport(respond), abort_grace=grace).generate([1])
    )
    await arrived.wait()
    started, used = asyncio.get_running_loop().time(), time.thread_time()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return asyncio.get_running_loop().time() - started, time.thread_time() - used


async def test_a_server_that_does_not_take_aborts_holds_a_cancelled_caller_back_for_the_grace_at_most():
    seconds, _ = await cancel_at_a_hung_server(grace=0.3)
    assert seconds < 1.0


async def test_the_wait_for_an_abort_that_gets_no_answer_is_not_a_busy_one():
    _, cpu_seconds = await cancel_at_a_hung_server(grace=1.0)
    assert cpu_seconds < 0.2


async def test_abort_sends_the_request_id_and_never_raises():
    server = FakeServer(paths={"/abort_request": httpx.Response(404)})
    await server.client().abort("r-1")
    assert server.bodies("/abort_request") == [{"rid": "r-1"}]

    async def refuse(_):
        raise httpx.ConnectError("refused")

    await SGLangClient(BASE_URL, transport=httpx.MockTransport(refuse)).abort("r-1")


async def test_a_caller_can_abort_its_request_by_the_id_it_gave_and_gets_what_there_is():
    aborted = {}

    async def respond(request):
        rid = json.loads(request.content)["rid"]
        if request.url.path == "/abort_request":
            aborted[rid].set()
            return httpx.Response(200)
        aborted[rid] = asyncio.Event()
        if len(aborted) == 2:
            arrived.set()
        await aborted[rid].wait()
        return httpx.Response(200, json=generation([7], rid=rid, finish="abort"))

    arrived = asyncio.Event()
    client = SGLangClient(BASE_URL, transport=httpx.MockTransport(respond))
    mine, other = (asyncio.create_task(client.generate([1], rid=rid)) for rid in ("turn", "turner"))
    await arrived.wait()
    await client.abort("turn")
    assert (await mine)["meta_info"]["id"].startswith("turn-")
    assert not other.done()
    await client.close()
    await other


async def test_closing_aborts_what_is_in_flight_and_returns_what_the_server_gives_for_it():
    aborted = asyncio.Event()

    async def respond(request):
        if request.url.path == "/abort_request":
            aborted.set()
            return httpx.Response(200)
        arrived.set()
        await aborted.wait()
        return httpx.Response(200, json=generation([7], finish="abort"))

    arrived = asyncio.Event()
    client = SGLangClient(BASE_URL, transport=httpx.MockTransport(respond))
    task = asyncio.create_task(client.generate([1]))
    await arrived.wait()
    await client.close()
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_request_that_waits_for_its_next_attempt_ends_when_the_client_is_closed():
    server = FakeServer(httpx.Response(500))
    client = server.client(retry_delay=0.1)
    task = asyncio.create_task(client.generate([1]))
    await server.arrived.wait()
    await client.close()
    with pytest.raises(SGLangConnectionError, match="closed"):
        await task
    assert len(server.bodies()) == 1


async def test_a_closed_client_opens_again_when_it_is_used():
    client = FakeServer().client()
    async with client:
        await client.generate([1])
    assert await client.generate([1]) == generation()


async def test_the_deadline_of_a_cancellation_counts_from_when_it_was_made_and_alone():
    server = FakeServer(never)
    cancellation = Cancellation(0.3)
    await asyncio.sleep(0.2)
    started = time.monotonic()
    with pytest.raises(SGLangDeadlineError, match="0.3 s after the request was made"):
        await server.client(deadline=0.01).generate([1], cancel_signal=cancellation, deadline=60.0)
    assert 0.05 < time.monotonic() - started < 0.25
    assert len(server.bodies("/abort_request")) == 1
