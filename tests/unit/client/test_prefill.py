"""Calls that begin alike share a prefill: what the server computes, and what happens when something goes wrong."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import count

import httpx
import orjson
import pytest
from hypothesis import given, settings, strategies as st

from strands_sglang import SGLangClient, SGLangConnectionError, SGLangDeadlineError, SGLangHTTPError, SGLangModel
from strands_sglang.client import prefill
from strands_sglang.testing import ScriptedFault, ScriptedSGLang
from support.agents import build_chatml_tokenizer, user

TOKENIZER = build_chatml_tokenizer()

LONG = 600  # tokens, more than the library compares at once
GROUP = 8


@pytest.fixture(autouse=True)
def busy(monkeypatch):
    """On a busy machine a server may be idle between two groups; in these tests it is only on request."""
    monkeypatch.setattr(prefill, "IDLE_S", 3600.0)


def text(name, words=LONG):
    """A text of at least as many tokens that has no beginning in common with another one's."""
    return " ".join(f"{name}{number}" for number in range(words))


async def answer(request):
    """An answer that takes a few passes of the event loop, so that requests that arrive together overlap."""
    return "Fine."


async def ask(client, question, *, on_request=None, **config):
    """Make one call with a model of its own; return the model."""
    model = SGLangModel(tokenizer=TOKENIZER, client=client, **config)
    model.on_request = on_request
    async for _ in model.stream([user(question)]):
        pass
    return model


async def ask_all(client, questions, **config):
    """Make one call for each question at once."""
    return await asyncio.gather(*(ask(client, question, **config) for question in questions))


def computed(server, since=0):
    """Number of prompt tokens that the server computed, in prompts of the longest request."""
    requests = server.requests[since:]
    tokens = sum(len(request.input_ids) - request.cached_tokens for request in requests)
    return tokens / max(len(request.input_ids) for request in requests)


@asynccontextmanager
async def warm(**settings):
    """A server and a client that has seen one group, so that it expects more of them."""
    server = ScriptedSGLang(TOKENIZER, answer)
    async with server.client(**settings) as client:
        await ask_all(client, [text("warm")] * 2)
        yield server, client


async def test_a_group_computes_its_prompt_once():
    async with warm() as (server, client):
        for name in ("first", "second"):
            before = len(server.requests)
            models = await ask_all(client, [text(name)] * GROUP)
            assert computed(server, before) < 1.1
            assert sum(request.is_prefill for request in server.requests[before:]) == 1
            for model in models:
                assert model.token_manager.token_ids[: -len(model.trajectory.turns[0].output_ids)] in [
                    request.input_ids for request in server.requests[before:]
                ]


async def test_the_first_group_computes_its_prompt_at_most_twice():
    server = ScriptedSGLang(TOKENIZER, answer)
    async with server.client() as client:
        await ask_all(client, [text("first")] * GROUP)
    assert computed(server) < 2.1


async def test_groups_that_start_together_compute_each_prompt_once():
    async with warm() as (server, client):
        before = len(server.requests)
        await ask_all(client, [text(name) for name in "abcd" for _ in range(GROUP)])
        assert computed(server, before) < 4.1


@pytest.mark.parametrize("tells", ["an answer", "an idle server"])
async def test_new_weights_compute_the_prompt_again_once(monkeypatch, tells):
    question = text("question")
    async with warm() as (server, client):
        await ask_all(client, [question] * GROUP)
        server.update_weights("v2")
        if tells == "an answer":
            await ask(client, "short")
        else:
            later = time.monotonic() + 2 * prefill.IDLE_S
            monkeypatch.setattr(prefill.time, "monotonic", lambda: later)
        before = len(server.requests)
        await ask_all(client, [question] * GROUP)
        assert computed(server, before) < 1.1


async def test_calls_that_an_update_aborted_share_their_prefill():
    running = asyncio.Semaphore(0)

    async def slow(request):
        if request.text.endswith("<|im_start|>assistant\n"):
            running.release()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "Fi"
        return "ne."

    server = ScriptedSGLang(TOKENIZER, slow)
    async with server.client() as client:
        calls = asyncio.ensure_future(ask_all(client, [text("question")] * GROUP, on_abort="resume"))
        for _ in range(GROUP):
            await running.acquire()
        before = len(server.requests)
        server.update_weights("v2")
        await calls
    assert computed(server, before) < 1.3


async def test_a_common_beginning_of_different_prompts_is_computed_once():
    system = text("system")
    async with warm() as (server, client):
        before = len(server.requests)
        await ask_all(client, [f"{system} {name}" for name in "abcdefgh"])
        assert computed(server, before) < 1.5


async def test_alone_or_short_calls_send_nothing_more():
    server = ScriptedSGLang(TOKENIZER, answer)
    async with server.client() as client:
        for name in ("one", "another"):
            await ask(client, text(name))
        await ask_all(client, [text(name) for name in "abcdefgh"])
        await ask_all(client, ["What is 6 * 7?"] * GROUP)
    assert not any(request.is_prefill for request in server.requests)


async def test_no_call_waits_for_a_prompt_that_the_server_has():
    async with warm() as (server, client):
        await ask_all(client, [text("question")] * GROUP)
        before = len(server.requests)
        await ask_all(client, [text("question")] * GROUP)
        assert len(server.requests) - before == GROUP


async def test_calls_with_prompt_logprobs_wait_for_none():
    async with warm() as (server, client):
        before = len(server.requests)
        await ask_all(client, [text("question")] * GROUP, return_prompt_logprobs=True)
        assert len(server.requests) - before == GROUP


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
async def test_each_cache_namespace_computes_a_prompt_once(name):
    async with warm() as (server, client):
        before = len(server.requests)
        question = text("question")
        await asyncio.gather(
            ask_all(client, [question] * GROUP, request_fields={name: "one", "priority": 3}),
            ask_all(client, [question] * GROUP, request_fields={name: "another", "priority": 3}),
        )
        assert 1.9 < computed(server, before) < 2.2
        primes = [request.body for request in server.requests[before:] if request.is_prefill]
        assert [(prime[name], prime["priority"]) for prime in primes] == [("one", 3), ("another", 3)]


async def test_a_retry_after_a_failed_call_sends_nothing_more():
    server = ScriptedSGLang(TOKENIZER, [ScriptedFault(status=500), "Fine."])
    async with server.client() as client:
        with pytest.raises(SGLangHTTPError):
            await ask(client, text("question"))
        await ask(client, text("question"))
    assert len(server.requests) == 2


# --- what can go wrong ---


class Primes(httpx.AsyncBaseTransport):
    """Forwards requests, but answers primes by a function of their own."""

    def __init__(self, server, respond):
        self._transport, self._respond = server.transport(), respond

    async def handle_async_request(self, request):
        if request.url.path == "/generate":
            if orjson.loads(request.content)["sampling_params"].get("max_new_tokens") == 0:
                return await self._respond(request)
        return await self._transport.handle_async_request(request)


async def refuse(request):
    return httpx.Response(400, json={"error": {"message": "no"}})


async def disconnect(request):
    raise httpx.ReadError("gone", request=request)


async def hang(request):
    await asyncio.Event().wait()


@pytest.mark.parametrize("respond", [refuse, disconnect])
async def test_a_prime_that_fails_fails_no_call(respond):
    server = ScriptedSGLang(TOKENIZER, answer)
    async with server.client(transport=Primes(server, respond)) as client:
        models = await ask_all(client, [text("question")] * GROUP)
    assert [len(model.trajectory.turns) for model in models] == [1] * GROUP
    assert len(server.requests) == GROUP


async def test_a_prime_that_hangs_delays_calls_for_a_limited_time(monkeypatch):
    monkeypatch.setattr("strands_sglang.client.client.MAX_WAIT_S", 0.05)
    server = ScriptedSGLang(TOKENIZER, answer)
    async with server.client(transport=Primes(server, hang), abort_grace=0) as client:
        await ask_all(client, [text("question")] * GROUP)
    assert len(server.requests) == GROUP


async def test_a_call_that_waits_ends_at_its_deadline():
    async def never(request):
        await asyncio.Event().wait()

    server = ScriptedSGLang(TOKENIZER, never)
    async with server.client(transport=Primes(server, hang), deadline=0.5, abort_grace=0) as client:
        calls = (ask(client, text("question")) for _ in range(3))
        errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [SGLangDeadlineError] * 3
    assert len(server.requests) <= 1


async def test_a_call_that_waits_can_be_cancelled():
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def hold(request):
        asked.set()
        await may_answer.wait()
        return await server.transport().handle_async_request(request)

    server = ScriptedSGLang(TOKENIZER, answer)
    async with server.client(transport=Primes(server, hold)) as client:
        calls = [asyncio.ensure_future(ask(client, text("question"))) for _ in range(GROUP)]
        await asked.wait()
        for cancelled in calls[1:3]:  # the one that sent the prime, and one that waits for it
            cancelled.cancel()
        may_answer.set()
        ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(end, asyncio.CancelledError) for end in ends] == [False, True, True] + [False] * (GROUP - 3)
    assert sum(not request.is_prefill for request in server.requests) == GROUP - 2


async def test_closing_the_client_ends_calls_that_wait():
    asked = asyncio.Event()

    async def hold(request):
        asked.set()
        await asyncio.Event().wait()

    server = ScriptedSGLang(TOKENIZER, answer)
    async with server.client(transport=Primes(server, hold), abort_grace=0.01) as client:
        calls = asyncio.gather(*(ask(client, text("question")) for _ in range(3)), return_exceptions=True)
        await asked.wait()
        await client.close()
        _, *others = await calls
    assert [type(error) for error in others] == [SGLangConnectionError] * 2
    assert len(server.requests) == 1


async def test_a_trainer_that_has_stopped_sends_nothing():
    def refuse_all(turn, plan):
        raise RuntimeError("stopped")

    async with warm() as (server, client):
        before = len(server.requests)
        with pytest.raises(RuntimeError):
            await ask(client, text("question"), on_request=refuse_all)
        assert len(server.requests) == before


async def test_a_trainer_that_stops_prevents_calls_that_wait():
    stopped = False

    def on_request(turn, plan):
        if stopped:
            raise RuntimeError("stopped")
        return plan

    async def stop(request):
        nonlocal stopped
        stopped = True
        raise httpx.ReadError("aborted", request=request)

    server = ScriptedSGLang(TOKENIZER, answer)
    async with server.client(transport=Primes(server, stop)) as client:
        calls = (ask(client, text("question"), on_request=on_request) for _ in range(GROUP))
        await asyncio.gather(*calls, return_exceptions=True)
    assert len(server.requests) == 1


async def test_a_short_common_beginning_hides_no_computed_prompt():
    one, another = (f"{text('system', 35)} {text(name)}" for name in ("one", "another"))
    both_primed, one_is_done = asyncio.Event(), asyncio.Event()

    async def hold(request):
        if "another" in TOKENIZER.decode(orjson.loads(request.content)["input_ids"]):
            both_primed.set()
            await one_is_done.wait()
        else:
            await both_primed.wait()
        return await server.transport().handle_async_request(request)

    server = ScriptedSGLang(TOKENIZER, answer)
    async with server.client(transport=Primes(server, hold)) as client:
        first, second = (asyncio.ensure_future(ask_all(client, [question] * GROUP)) for question in (one, another))
        await first
        one_is_done.set()
        await second
    assert sum(request.is_prefill for request in server.requests) == 2


# --- several servers, loops and threads ---


class Cluster(httpx.AsyncBaseTransport):
    """Several servers, chosen by a function of the request."""

    def __init__(self, servers, choose):
        self._transports, self._choose = [server.transport() for server in servers], choose

    async def handle_async_request(self, request):
        return await self._transports[self._choose(request)].handle_async_request(request)


async def test_each_of_several_servers_computes_a_prompt_once():
    servers = [ScriptedSGLang(TOKENIZER, answer) for _ in range(2)]
    cluster = Cluster(servers, lambda request: int(request.url.host[-1]))
    async with SGLangClient(["http://server0", "http://server1"], transport=cluster) as client:
        for name in ("warm", "question"):
            before = [len(server.requests) for server in servers]
            await ask_all(client, [text(name)] * GROUP)
    for server, start in zip(servers, before, strict=True):
        assert sum(not request.is_prefill for request in server.requests[start:]) == GROUP / 2
        assert computed(server, start) < 1.1


async def test_primes_stop_where_they_do_not_help():
    numbers = count()
    servers = [ScriptedSGLang(TOKENIZER, answer) for _ in range(64)]
    router = Cluster(servers, lambda request: next(numbers) % len(servers))
    async with SGLangClient("http://router", transport=router) as client:
        for name in "abcdefgh":
            await ask_all(client, [text(name, 100)] * GROUP)
    assert 1 <= sum(request.is_prefill for server in servers for request in server.requests) <= 3


def test_loops_in_threads_share_a_client():
    server = ScriptedSGLang(TOKENIZER, answer)
    client = server.client()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: asyncio.run(ask_all(client, [text("question")] * GROUP)), range(3)))
    assert sum(not request.is_prefill for request in server.requests) == 3 * GROUP


parts = st.lists(st.sampled_from("abc"), min_size=1, max_size=3)
arrivals = st.lists(st.tuples(parts, st.integers(0, 6), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(arrivals=arrivals)
def test_every_call_is_answered_and_no_prompt_is_primed_twice(arrivals):
    server = ScriptedSGLang(TOKENIZER, answer)

    async def arrive(client, names, passes, cancelled):
        for _ in range(passes):
            await asyncio.sleep(0)
        call = asyncio.ensure_future(ask(client, " ".join(text(name, 60) for name in names)))
        if cancelled:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            call.cancel()
        return await call

    async def run():
        async with server.client(abort_grace=0.1) as client:
            await ask(client, "short")
            return await asyncio.gather(*(arrive(client, *one) for one in arrivals), return_exceptions=True)

    ends = asyncio.run(run())
    for end, (_, _, cancelled) in zip(ends, arrivals, strict=True):
        assert isinstance(end, SGLangModel) or (cancelled and isinstance(end, asyncio.CancelledError)), end
    primed = [tuple(request.input_ids) for request in server.requests if request.is_prefill]
    assert len(primed) == len(set(primed))
