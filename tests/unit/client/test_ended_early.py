"""Calls that end before their answer: what the server is told, and what becomes of the tokens."""

import asyncio
import json
import threading

import httpx
import pytest

from strands_sglang.client.aborts import worker_urls
from strands_sglang.client.cancellation import Cancellation
from strands_sglang.client.client import SGLangClient
from strands_sglang.exceptions import (
    SGLangCancelledError,
    SGLangConnectionError,
    SGLangDeadlineError,
    SGLangHTTPError,
)
from support.fake_server import BASE_URL, OK, AbortableServer, FakeServer, Network, generation, never


class RouterInFront(FakeServer):
    """Sends everything to one worker, and knows nothing of aborts."""

    def __init__(self, worker, listed, path="/workers"):
        super().__init__(worker, paths={"/abort_request": httpx.Response(404)})
        self.listed, self.path = listed, path
        self._worker = worker

    async def __call__(self, request):
        if request.url.path == "/generate":
            return await self._worker(request)
        if request.url.path == self.path:
            self.asked.append((self.path, None))
            return httpx.Response(200, json=self.listed)
        return await super().__call__(request)


def workers(*hosts):
    return {"workers": [{"id": host, "url": f"http://{host}", "is_healthy": True} for host in hosts]}


async def cancelled(network, worker, **settings):
    """Cancel a call of a new client that the worker has; the partial answers."""
    worker.arrived.clear()
    return await cancelled_call(network.client("router", **{"abort_grace": 2.0, **settings}), worker)


async def cancelled_call(client, worker):
    """Cancel a call once the worker has it; the partial answers."""
    partial = []
    task = asyncio.create_task(client.generate([1], on_partial=partial.append))
    await worker.arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return partial


@pytest.mark.parametrize(
    ("path", "listed"),
    [
        ("/workers", workers("one", "two")),
        ("/list_workers", {"urls": ["http://one", "http://two/"]}),
        ("/workers", {"workers": [{"url": "http://one@0"}, {"url": "http://one@1"}, {"url": "two"}]}),
    ],
)
async def test_the_workers_that_a_router_names_are_told_directly(path, listed):
    one, two = FakeServer(), AbortableServer([7, 8])
    network = Network(router=RouterInFront(two, listed, path), one=one, two=two)
    [partial] = await cancelled(network, two)
    assert partial["output_ids"] == [7, 8]
    [rid] = two.bodies("/abort_request")
    assert one.bodies("/abort_request") == [rid]


async def test_the_list_of_workers_is_used_again():
    worker = AbortableServer()
    router = RouterInFront(worker, workers("one"))
    client = Network(router=router, one=worker).client("router")
    await asyncio.gather(*(client.abort(f"r-{i}") for i in range(20)))
    await client.abort("r-20")
    assert [path for path, _ in router.asked].count("/workers") == 1
    assert {body["rid"] for body in worker.bodies("/abort_request")} == {f"r-{i}" for i in range(21)}


async def test_a_list_that_names_a_worker_that_is_gone_is_read_again():
    worker = AbortableServer()
    router = RouterInFront(worker, workers("gone"))
    network = Network(router=router, gone=None, one=worker)
    client = network.client("router", abort_grace=2.0)
    await client.abort("before")
    router.listed = workers("gone", "one")
    assert len(await cancelled_call(client, worker)) == 1


async def test_a_worker_that_joined_since_the_list_was_read_is_found_when_the_first_abort_has_no_effect():
    old, new = FakeServer(), AbortableServer()
    router = RouterInFront(new, workers("old"))
    client = Network(router=router, old=old, new=new).client("router", abort_grace=2.0)
    await client.abort("before")
    router.listed = workers("old", "new")
    assert len(await cancelled_call(client, new)) == 1


async def test_a_router_that_names_nobody_does_not_hold_the_caller_back():
    worker = AbortableServer()
    network = Network(router=RouterInFront(worker, {"workers": []}))
    assert await asyncio.wait_for(cancelled(network, worker, abort_grace=60.0), 10) == []


async def test_a_routers_own_error_about_a_worker_aborts_the_request_on_the_workers():
    worker = FakeServer(httpx.Response(500, headers={"x-smg-error-code": "call_upstream_request_error"}))
    network = Network(router=RouterInFront(worker, workers("one")), one=worker)
    with pytest.raises(Exception, match="HTTP 500"):
        await network.client("router", max_retries=0).generate([1])
    assert worker.bodies("/abort_request") == [{"rid": body["rid"]} for body in worker.bodies()]


async def test_many_aborts_at_once_are_not_many_connections_at_once():
    at_once, most, done = 0, 0, 0

    async def respond(request):
        nonlocal at_once, most, done
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once, done = at_once - 1, done + 1
        return httpx.Response(200)

    client = SGLangClient(BASE_URL, transport=httpx.MockTransport(respond))
    await asyncio.gather(*(client.abort(f"r-{i}") for i in range(500)))
    assert done == 500 and most <= 50


@pytest.mark.parametrize("listed", [None, {}, [], {"workers": None}, {"workers": [{}, None, {"url": 3}]}, "x"])
def test_a_list_that_names_nobody_is_empty(listed):
    assert worker_urls(listed) == ()


def test_workers_that_speak_something_else_are_left_out():
    assert worker_urls({"workers": [{"url": "grpc://a:1"}, {"url": "http://b:2/"}, "c:3"]}) == (
        "http://b:2",
        "http://c:3",
    )


NEVER_COMES_BACK = {"max_retries": 0, "abort_grace": 0.1}


async def start(server, client, **arguments):
    task = asyncio.create_task(client.generate([1], **arguments))
    await server.arrived.wait()
    return task


async def ends(task):
    with pytest.raises(BaseException) as caught:  # noqa: B017, PT011
        await task
    return caught.value


async def test_a_cancelled_caller_gets_the_partial_answer_before_it_goes():
    server, partial = AbortableServer([7, 8]), []
    task = await start(server, server.client(), on_partial=partial.append)
    task.cancel()
    assert isinstance(await ends(task), asyncio.CancelledError)
    assert [answer["output_ids"] for answer in partial] == [[7, 8]]
    assert len(server.bodies()) == len(server.bodies("/abort_request")) == 1


async def test_a_caller_that_is_cancelled_again_and_again_gets_it_too():
    server, partial = AbortableServer([7, 8], paths={}), []
    heard, go_on = asyncio.Event(), asyncio.Event()

    async def respond(request):
        if request.url.path == "/abort_request":
            heard.set()
            await go_on.wait()
        return await server(request)

    client = SGLangClient(BASE_URL, transport=httpx.MockTransport(respond))
    task = await start(server, client, on_partial=partial.append)
    task.cancel()
    await heard.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    go_on.set()
    assert isinstance(await ends(task), asyncio.CancelledError)
    assert len(partial) == 1


async def test_an_answer_that_was_complete_before_the_abort_came_is_handed_over_as_it_is():
    server, partial = AbortableServer(finish="stop"), []
    task = await start(server, server.client(), on_partial=partial.append)
    task.cancel()
    await ends(task)
    assert partial[0]["meta_info"]["finish_reason"]["type"] == "stop"


async def test_the_short_answer_of_a_request_that_was_aborted_in_the_queue_is_handed_over():
    server, partial = AbortableServer(), []
    short = {
        "text": "",
        "output_ids": [],
        "meta_info": {"id": "r", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}},
    }

    async def queued(_):
        await server.aborted.wait()
        return httpx.Response(200, json=short)

    server.answers = [queued]
    task = await start(server, server.client(), on_partial=partial.append)
    task.cancel()
    await ends(task)
    assert partial == [short]


async def test_without_an_answer_within_the_grace_there_is_none():
    server, partial = FakeServer(never), []
    task = await start(server, server.client(abort_grace=0.05), on_partial=partial.append)
    task.cancel()
    assert isinstance(await ends(task), asyncio.CancelledError)
    assert partial == []


@pytest.mark.parametrize("answer", [httpx.Response(500), httpx.Response(200, text="?"), httpx.ReadError("broken")])
async def test_what_is_no_answer_is_not_handed_over(answer):
    server, partial = AbortableServer(), []

    async def fail(_):
        await server.aborted.wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    server.answers = [fail]
    task = await start(server, server.client(), on_partial=partial.append)
    task.cancel()
    assert isinstance(await ends(task), asyncio.CancelledError)
    assert partial == []


async def test_an_error_in_on_partial_does_not_take_the_place_of_the_cancellation():
    def fail(_):
        raise RuntimeError("mine")

    server = AbortableServer()
    task = await start(server, server.client(), on_partial=fail)
    task.cancel()
    assert isinstance(await ends(task), asyncio.CancelledError)


async def test_an_abort_that_overtook_its_request_is_sent_again():
    heard = []
    second = asyncio.Event()

    async def respond(request):
        rid = json.loads(request.content)["rid"]
        if request.url.path == "/generate":
            arrived.set()
            await second.wait()
            return httpx.Response(200, json=generation([7], rid=rid, finish="abort"))
        heard.append(rid)
        if len(heard) == 2:
            second.set()
        return httpx.Response(200)

    arrived, partial = asyncio.Event(), []
    client = SGLangClient(BASE_URL, transport=httpx.MockTransport(respond))
    task = asyncio.create_task(client.generate([1], on_partial=partial.append))
    await arrived.wait()
    task.cancel()
    await ends(task)
    assert len(heard) == 2 and len(partial) == 1


async def test_nothing_is_waited_for_where_nobody_has_heard_of_the_abort():
    async def respond(request):
        if request.url.path != "/generate":
            raise httpx.ConnectError("refused")
        arrived.set()
        return await never({})

    arrived = asyncio.Event()
    client = SGLangClient(BASE_URL, transport=httpx.MockTransport(respond), abort_grace=60.0)
    task = asyncio.create_task(client.generate([1]))
    await arrived.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()


# --- the cancel signal ---


async def test_a_signal_that_is_set_ends_the_call_with_what_there_is():
    server, signal, partial = AbortableServer([7, 8]), threading.Event(), []
    task = await start(server, server.client(), cancel_signal=signal, on_partial=partial.append)
    threading.Thread(target=signal.set).start()
    error = await ends(task)
    assert isinstance(error, SGLangCancelledError)
    assert error.response == partial[0]
    assert error.response is not None and error.response["output_ids"] == [7, 8]
    assert len(server.bodies("/abort_request")) == 1


async def test_a_signal_that_was_set_before_sends_nothing():
    server, signal = FakeServer(), threading.Event()
    signal.set()
    with pytest.raises(SGLangCancelledError):
        await server.client().generate([1], cancel_signal=signal)
    assert server.asked == []


async def test_a_signal_ends_the_wait_for_the_next_attempt_and_for_a_connection():
    server, signal = FakeServer(httpx.Response(500)), threading.Event()
    retrying = await start(server, server.client(retry_delay=8.0), cancel_signal=signal)
    busy = FakeServer(never)
    client = busy.client(max_connections=1)
    first = await start(busy, client)
    second = asyncio.create_task(client.generate([1], cancel_signal=signal))
    signal.set()
    assert isinstance(await ends(retrying), SGLangCancelledError)
    assert isinstance(await ends(second), SGLangCancelledError)
    assert len(busy.bodies()) == 1
    first.cancel()
    await ends(first)


async def test_a_signal_that_is_cleared_once_it_was_seen_ends_the_call_all_the_same():
    class ClearedWhenSeen(threading.Event):
        def is_set(self):
            was_set = super().is_set()
            self.clear()
            return was_set

    async def ended(call):
        signal = ClearedWhenSeen()
        asyncio.get_running_loop().call_later(0.02, signal.set)
        return await asyncio.wait_for(ends(asyncio.ensure_future(call(signal))), 5.0)

    sampling, busy = AbortableServer([7, 8]), FakeServer(never)
    error = await ended(lambda signal: sampling.client().generate([1], cancel_signal=signal))
    assert isinstance(error, SGLangCancelledError) and error.response["output_ids"] == [7, 8]
    client = busy.client(max_connections=1)
    first = await start(busy, client)
    waits_for_a_connection = await ended(lambda signal: client.generate([1], cancel_signal=signal))
    assert isinstance(waits_for_a_connection, SGLangCancelledError)
    sleeps = await ended(lambda signal: Cancellation(signal=signal).finish(asyncio.sleep(60)))
    assert isinstance(sleeps, SGLangCancelledError)
    first.cancel()
    await ends(first)


async def test_an_answer_that_is_there_counts_although_the_signal_is_set():
    signal = threading.Event()

    async def answer(_):
        signal.set()
        return OK

    assert await FakeServer(answer).client().generate([1], cancel_signal=signal) == generation()


async def test_a_loop_has_one_timer_for_all_signals_and_none_without_calls(monkeypatch):
    loop, timers = asyncio.get_running_loop(), []
    call_later = loop.call_later

    def count(delay, callback, *args, **kwargs):
        timers.append(call_later(delay, callback, *args, **kwargs))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", count)
    release = asyncio.Event()

    async def wait(_):
        await release.wait()
        return OK

    server = FakeServer(wait)
    client = server.client()
    calls = [asyncio.create_task(client.generate([1], cancel_signal=threading.Event())) for _ in range(50)]
    while len(server.bodies()) < 50:
        await asyncio.sleep(0)
    assert sum(not timer.cancelled() and timer.when() > loop.time() for timer in timers) == 1
    release.set()
    await asyncio.gather(*calls)
    assert all(timer.cancelled() or timer.when() <= loop.time() for timer in timers)


# --- timeouts and deadlines ---


async def test_an_answer_that_comes_just_too_late_for_its_attempt_still_counts():
    server = AbortableServer([7, 2], finish="stop")
    assert (await server.client(timeout=0.05).generate([1]))["output_ids"] == [7, 2]
    assert len(server.bodies()) == 1


async def test_the_longest_partial_answer_of_all_attempts_is_handed_over_once():
    lengths = [3, 1]

    async def respond(request):
        if request.url.path == "/abort_request":
            events[json.loads(request.content)["rid"]].set()
            return httpx.Response(200)
        rid = json.loads(request.content)["rid"]
        events[rid] = asyncio.Event()
        length = lengths[len(events) - 1]
        await events[rid].wait()
        return httpx.Response(200, json=generation([5] * length, rid=rid, finish="abort"))

    events = {}
    partial = []
    client = SGLangClient(BASE_URL, transport=httpx.MockTransport(respond), timeout=0.05, retry_delay=0.0)
    with pytest.raises(SGLangConnectionError, match="no answer in time"):
        await client.generate([1], on_partial=partial.append)
    assert len(events) == 2
    assert [len(answer["output_ids"]) for answer in partial] == [3]


async def test_a_call_that_is_answered_in_the_end_hands_over_nothing():
    aborted, partial = asyncio.Event(), []

    async def respond(request):
        if request.url.path == "/abort_request":
            aborted.set()
            return httpx.Response(200)
        if aborted.is_set():
            return OK
        await aborted.wait()
        return httpx.Response(200, json=generation([5], finish="abort"))

    client = SGLangClient(BASE_URL, transport=httpx.MockTransport(respond), timeout=0.05, retry_delay=0.0)
    assert await client.generate([1], on_partial=partial.append) == generation()
    assert partial == []


async def test_at_the_deadline_the_request_is_aborted_and_the_error_has_what_there_is():
    server, partial = AbortableServer([7, 8]), []
    with pytest.raises(SGLangDeadlineError, match=r"deadline has passed after 2 tokens, 0\.05 s after") as caught:
        await server.client(deadline=0.05).generate([1], on_partial=partial.append)
    assert [caught.value.response] == partial
    assert len(server.bodies()) == len(server.bodies("/abort_request")) == 1


async def test_a_complete_answer_just_after_the_deadline_still_counts():
    server = AbortableServer([7, 2], finish="stop")
    assert (await server.client(deadline=0.05).generate([1]))["output_ids"] == [7, 2]


async def test_the_deadline_covers_retries_and_names_the_last_failure():
    server = FakeServer(httpx.Response(500, text="out of order"))
    with pytest.raises(SGLangDeadlineError, match="out of order") as caught:
        await server.client(deadline=0.3, retry_delay=0.02, max_retries=10**6).generate([1])
    assert isinstance(caught.value.__cause__, SGLangHTTPError)
    assert caught.value.response is None
    assert 2 <= len(server.bodies()) < 30


async def test_a_retry_that_would_come_after_the_deadline_is_not_waited_for():
    started = asyncio.get_running_loop().time()
    with pytest.raises(SGLangDeadlineError):
        await FakeServer(httpx.Response(500)).client(deadline=4.0, retry_delay=8.0).generate([1])
    assert asyncio.get_running_loop().time() - started < 3.0


async def test_the_deadline_covers_the_wait_for_a_connection():
    server = FakeServer(never)
    client = server.client(max_connections=1, deadline=0.1)
    first, second = (asyncio.create_task(client.generate([1])) for _ in range(2))
    for task in (first, second):
        assert isinstance(await ends(task), SGLangDeadlineError)
    assert len(server.bodies()) == 1


async def test_connections_that_were_given_up_are_there_for_others():
    server = FakeServer(never)
    client = server.client(max_connections=1, deadline=0.05)
    await asyncio.gather(*(client.generate([1]) for _ in range(20)), return_exceptions=True)
    server.answers = [OK]
    assert await asyncio.gather(*(client.generate([1]) for _ in range(5))) == [generation()] * 5


# --- closing ---


async def test_closing_ends_calls_that_wait_for_a_connection_or_for_their_next_attempt():
    server, broken = AbortableServer(), FakeServer(httpx.Response(500))
    client = server.client(max_connections=1)
    first = await start(server, client)
    second = asyncio.create_task(client.generate([1]))
    other = broken.client(retry_delay=8.0)
    third = await start(broken, other)
    await client.close()
    await other.close()
    assert (await first)["meta_info"]["finish_reason"]["type"] == "abort"
    for task in (second, third):
        error = await ends(task)
        assert isinstance(error, SGLangConnectionError) and "closed" in str(error)
    assert len(server.bodies()) == 1
