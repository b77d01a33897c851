"""Aborts behind a router, which does not forward them."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from strands_sglang.client.client import SGLangClient
from strands_sglang.client.connections import worker_urls
from support.fake_server import BASE_URL, AbortableServer, FakeServer, Network


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
