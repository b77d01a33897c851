"""The client: calls, their ends, and the servers that they are sent to."""

import asyncio
import contextlib
import gc
import gzip
import json
import logging
import math
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import warnings
from argparse import Namespace
from collections import Counter
from contextlib import AsyncExitStack
from email.utils import formatdate

import anyio
import httpx
import numpy as np
import pytest
import respx
import transformers
from anyio.from_thread import start_blocking_portal
from hypothesis import given, strategies as st

from strands_sglang.client import balancer as servers_module, connections
from strands_sglang.client.balancer import Server, Servers, outages
from strands_sglang.client.cancellation import POLL_INTERVAL_S, Cancellation
from strands_sglang.client.client import SGLangClient, normalize_base_url, slime_client_arguments
from strands_sglang.client.loads import ServerLoad
from strands_sglang.client.retries import MAX_DELAY_S, Failure, FailureKind, RetryPolicy, retry_after_seconds
from strands_sglang.client.routers import worker_urls
from strands_sglang.client.shared import get_client, get_client_from_slime_args, get_tokenizer
from strands_sglang.exceptions import (
    SGLangCancelledError,
    SGLangConnectionError,
    SGLangContextLengthError,
    SGLangDeadlineError,
    SGLangDecodingError,
    SGLangHTTPError,
    SGLangThrottledError,
)
from strands_sglang.local.server import free_port
from strands_sglang.protocol.wire import EncodedIds
from strands_sglang.testing import ScriptedAnswer, ScriptedFault, ScriptedResponse
from support.agents import advance, build_chatml_tokenizer, idle_for
from support.servers import (
    OK,
    PARTIAL,
    RawServer,
    aborts,
    arrival,
    as_json,
    client_in,
    client_to,
    generation,
    hosts_of,
    http_bytes,
    hung,
    network_of,
    plug,
    scripted,
    until_aborted,
)

BASE_URL = "http://scripted"
EOS = build_chatml_tokenizer().eos_token_id
COMPLETE = ScriptedAnswer(token_ids=[7, EOS])


async def cancel(task):
    """Cancel a task, and require that it ends so."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def through(respond, **settings):
    """A client whose requests this function answers."""
    return SGLangClient(BASE_URL, transport=httpx.MockTransport(respond), **settings)


def run_all(threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def several(client, count):
    """That many calls at once."""
    return asyncio.gather(*(client.generate([1]) for _ in range(count)))


async def start(server, client, **arguments):
    task = asyncio.create_task(client.generate([1], **arguments))
    await arrival(server)
    return task


# === Calls: requests, responses, retries, and ends ===


async def test_servers_object_is_returned_unchanged():
    body = {**generation(), "a_key_of_tomorrow": [1]}
    assert await client_to(scripted(as_json(body))).generate([1, 2]) == body


async def test_fields_are_sent_as_given_and_nothing_streams():
    server = scripted()
    await client_to(server).generate(
        [1, 2], {"temperature": 0.5, "logit_bias": {5: 1.0}}, return_logprob=True, stream=False, some_field={"a": 1}
    )
    [request] = server.requests
    assert len(request.rid) == 32
    assert request.input_ids == [1, 2]
    assert request.body == {
        "rid": request.rid,
        "sampling_params": {"temperature": 0.5, "logit_bias": {"5": 1.0}},
        "return_logprob": True,
        "some_field": {"a": 1},
        "stream": False,
    }


async def test_burst_of_calls_lets_other_work_run_in_between():
    """Encoding and decoding 300 of them takes many times what the client does in one iteration of the loop."""
    iteration, sent, answered, everyone = 0, [], [], asyncio.Event()
    prompt, response = list(range(20_000)), json.dumps(generation(range(20_000))).encode()

    async def count():
        nonlocal iteration
        while True:
            iteration += 1
            await asyncio.sleep(0)

    async def respond(_):
        sent.append(iteration)
        if len(sent) == 300:
            everyone.set()
        await everyone.wait()
        return httpx.Response(200, content=response)

    async def ask():
        await client.generate(prompt)
        answered.append(iteration)

    counting = asyncio.create_task(count())
    async with through(respond) as client:
        await asyncio.gather(*(ask() for _ in range(300)))
    counting.cancel()
    assert len(set(sent)) > 3 and len(set(answered)) > 3


async def test_calls_of_a_burst_go_on_when_others_are_cancelled():
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=generation()))
    client, prompt = SGLangClient(BASE_URL, transport=transport), list(range(20_000))
    calls = [asyncio.create_task(client.generate(prompt)) for _ in range(100)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes[::2])
    assert all(outcome == generation() for outcome in outcomes[1::2])


async def test_each_attempt_has_an_id_with_the_callers_prefix():
    server = scripted(ScriptedResponse(500), ScriptedResponse(500), OK)
    await client_to(server).generate([1], rid="episode-7")
    rids = [request.rid for request in server.requests]
    assert len(set(rids)) == 3
    assert all(rid.startswith("episode-7-") for rid in rids)


async def test_later_changes_by_the_caller_are_not_sent():
    params, ids = {"temperature": 1.0}, [1, 2]

    async def change(_):
        params["temperature"] = 0.0
        ids.append(3)
        return ScriptedResponse(500)

    server = scripted(change, OK)
    await client_to(server).generate(ids, params)
    assert [(request.input_ids, request.sampling_params) for request in server.requests] == [
        ([1, 2], {"temperature": 1.0})
    ] * 2


@pytest.mark.parametrize("bad", [[], [1, True], [1, 100], [2**70], "12", None])
async def test_invalid_prompt_is_rejected_before_anything_is_sent(bad):
    server = scripted()
    with pytest.raises(ValueError, match="input_ids"):
        await client_to(server, vocab_size=100).generate(bad)
    assert server.calls == []


async def test_vocabulary_of_a_call_overrides_the_clients():
    client = client_to(scripted(), vocab_size=10)
    await client.generate([50], vocab_size=100)
    with pytest.raises(ValueError, match=r"input_ids\[0\] is 50 .*below 10"):
        await client.generate([50])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sampling_params": {"n": 2}}, "one request"),
        ({"sampling_params": [{}]}, "mapping"),
        ({"stream": True}, "never streams"),
        ({"extra": object()}, "JSON"),
        ({"sampling_params": {"stop_token_ids": (-1,)}}, r"stop_token_ids'\] has -1"),
        ({"sampling_params": {"stop_token_ids": np.array([5, -1])}}, r"stop_token_ids'\] has -1"),
        ({"sampling_params": {"stop_regex": "a{99999999999999999999}"}}, "the invalid pattern"),
    ],
)
async def test_requests_that_no_server_should_get_are_rejected(arguments, said):
    server = scripted()
    with pytest.raises(ValueError, match=said):
        await client_to(server).generate([1], **arguments)
    assert server.calls == []


async def test_respx_can_replace_the_server():
    with respx.mock(using="httpx") as router:
        route = router.post(f"{BASE_URL}/generate").respond(json=generation())
        async with SGLangClient(BASE_URL) as client:
            assert (await client.generate([1]))["output_ids"] == [7, 2]
    assert route.call_count == 1


async def test_model_info_falls_back_to_its_older_name():
    missing = {"/model_info": ScriptedResponse(404)}
    new, old = scripted(**{"/get_model_info": ScriptedResponse(404)}), scripted(**missing)
    info = await client_to(new).model_info()
    assert info["model_path"] == "scripted"
    assert await client_to(old).get_model_info() == info
    with pytest.raises(SGLangHTTPError, match="get_model_info"):
        await client_to(scripted(**missing, **{"/get_model_info": ScriptedResponse(404)})).model_info()


def models(length):
    return as_json({"object": "list", "data": [{"id": "m", "max_model_len": length}]})


async def test_context_length_is_requested_once():
    server = scripted(**{"/v1/models": models(512)})
    client = client_to(server)
    assert await asyncio.gather(*(client.context_length() for _ in range(20))) == [512] * 20
    assert await client.context_length() == 512
    assert [path for path, _ in server.calls] == ["/v1/models"]


@pytest.mark.parametrize(
    "answer", [ScriptedResponse(404), as_json({"data": []}), models(None), models("512"), models(0)]
)
async def test_unknown_context_length_is_none_and_not_cached(answer):
    server = scripted(**{"/v1/models": answer})
    client = client_to(server)
    assert await client.context_length() is None
    server.overrides["/v1/models"] = models(512)
    assert await client.context_length() == 512


async def test_failed_context_length_request_is_not_cached():
    server = scripted(**{"/v1/models": ScriptedResponse(500)})
    client = client_to(server, max_retries=1)
    with pytest.raises(SGLangHTTPError):
        await client.context_length()
    server.overrides["/v1/models"] = models(512)
    assert await client.context_length() == 512


async def test_cancelled_context_length_request_serves_other_callers():
    async def respond(_):
        arrived.set()
        await go_on.wait()
        return httpx.Response(200, content=models(512).content)

    arrived, go_on = asyncio.Event(), asyncio.Event()
    client = through(respond)
    first, second = (asyncio.create_task(client.context_length()) for _ in range(2))
    await arrived.wait()
    first.cancel()
    go_on.set()
    assert await second == 512


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_server_that_cannot_tokenize_is_asked_once(status):
    server = scripted(**{"/tokenize": as_json({"message": "no tokenizer"}, status)})
    assert await client_to(server, max_retries=5).tokenize("hello") is None
    assert [path for path, _ in server.calls] == ["/tokenize"]


async def test_tokenize_adds_no_special_tokens():
    server = scripted()
    assert await client_to(server).tokenize("hello") == server.tokenizer.encode("hello", add_special_tokens=False)
    [(path, content)] = server.calls
    assert (path, json.loads(content)) == ("/tokenize", {"prompt": "hello", "add_special_tokens": False})
    assert await client_to(scripted(**{"/tokenize": ScriptedResponse(404)})).tokenize("hello") is None
    with pytest.raises(SGLangDecodingError, match="tokens"):
        await client_to(scripted(**{"/tokenize": as_json({})})).tokenize("hello")


def test_settings_are_attributes_and_repr_has_the_address():
    client = SGLangClient(
        " http://h:1/ ", max_connections=3, timeout=4.0, connect_timeout=5, max_retries=6, retry_delay=7
    )
    assert (client.base_url, client.max_connections, client.timeout) == ("http://h:1", 3, 4.0)
    assert (client.connect_timeout, client.max_retries, client.retry_delay) == (5, 6, 7)
    assert repr(client) == "SGLangClient(base_url='http://h:1')"


def test_the_defaults_are_those_of_a_rollout():
    client = SGLangClient("http://h:1")
    assert (client.max_connections, client.timeout, client.max_retries, client.retry_delay) == (1000, None, 60, 1.0)


@pytest.mark.parametrize(
    "setting",
    [
        {"max_connections": 0},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"max_retries": -1},
        {"retry_delay": "1"},
        {"connect_timeout": True},
        {"vocab_size": 0},
        {"transport": "http"},
    ],
)
def test_invalid_setting_is_rejected_by_name(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        SGLangClient("http://h:1", **setting)


def test_client_from_slime_has_its_address_and_concurrency():
    args = Namespace(
        sglang_router_ip="10.0.0.1",
        sglang_router_port=3000,
        sglang_server_concurrency=64,
        rollout_num_gpus=16,
        rollout_num_gpus_per_engine=2,
    )
    client = SGLangClient.from_slime_args(args)
    assert (client.base_url, client.max_connections) == ("http://10.0.0.1:3000", 512)
    assert (client.timeout, client.max_retries, client.retry_delay) == (None, 60, 1.0)
    other = SGLangClient.from_miles_args(args, timeout=300.0, max_connections=8, base_url="http://h:1")
    assert (other.base_url, other.timeout, other.max_connections) == ("http://h:1", 300.0, 8)


async def test_a_transport_factory_is_called_once_per_event_loop():
    made = []

    def make():
        made.append(scripted().transport())
        return made[-1]

    client = SGLangClient(BASE_URL, transport=make)
    await client.generate([1])
    await client.generate([1])
    assert len(made) == 1
    await asyncio.to_thread(lambda: asyncio.run(client.generate([1])))
    assert len(made) == 2


async def test_headers_are_sent_with_every_request():
    seen = []

    async def answer(request):
        seen.append(f"{request.url.path} {request.headers.get('authorization')}")
        return httpx.Response(200, json={"tokens": [1], "count": 1})

    headers = {"Authorization": "Bearer secret"}
    client = through(answer, headers=headers)
    await client.tokenize("hi")
    await client.abort("some-id")
    assert seen == ["/tokenize Bearer secret", "/abort_request Bearer secret"]
    assert "secret" not in repr(client)


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 599])
async def test_transient_statuses_are_retried(status):
    server = scripted(ScriptedResponse(status), OK)
    assert await client_to(server).generate([1]) == server.responses[1].body
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 422, 501])
async def test_permanent_statuses_are_not_retried(status):
    server = scripted(ScriptedFault(status=status, message="no"))
    with pytest.raises(SGLangHTTPError) as caught:
        await client_to(server, max_retries=60).generate([1])
    assert caught.value.status == status
    assert len(server.requests) == 1


async def test_retries_end_and_the_error_has_their_number():
    server = scripted(ScriptedResponse(500, b"boom"))
    with pytest.raises(SGLangHTTPError, match=r"POST http://scripted/generate: HTTP 500: boom .*4 attempts"):
        await client_to(server, max_retries=3).generate([1])
    assert len(server.requests) == 4


@pytest.mark.parametrize("status", [429, 503])
async def test_busy_server_is_a_throttled_error_after_retries(status):
    server = scripted(as_json({"object": "error", "message": "The request queue is full."}, status))
    with pytest.raises(SGLangThrottledError, match="queue is full") as caught:
        await client_to(server, max_retries=0).generate([1])
    assert caught.value.status == status
    assert len(server.requests) == 1


async def test_a_retry_waits_as_long_as_the_server_asks():
    server = scripted(ScriptedFault(headers={"retry-after": "0.2"}), OK)
    started = asyncio.get_running_loop().time()
    await client_to(server).generate([1])
    assert asyncio.get_running_loop().time() - started >= 0.2


UNDECODABLE = {
    "not JSON": (b"<html>hello</html>", "not JSON"),
    "nothing": (b"", "empty body"),
    "not an object": (b"[1]", "list instead of an object"),
    "no ids": (b'{"meta_info": {"finish_reason": {"type": "stop"}}}', "`output_ids`"),
    "no meta_info": (b'{"output_ids": []}', "`meta_info`"),
    "no finish reason": (b'{"output_ids": [], "meta_info": {"finish_reason": null}}', "`meta_info.finish_reason`"),
}


@pytest.mark.parametrize(("body", "said"), UNDECODABLE.values(), ids=UNDECODABLE.keys())
async def test_server_without_valid_responses_is_given_up_soon(body, said):
    server = scripted(ScriptedResponse(200, body))
    with pytest.raises(SGLangDecodingError, match="is this an SGLang server") as caught:
        await client_to(server, max_retries=60).generate([1])
    assert said in str(caught.value)
    assert f"{BASE_URL}/generate" in str(caught.value)
    assert len(server.requests) == 4


MOST_ATTEMPTS = {**dict.fromkeys(UNDECODABLE, 4), "not JSON": 10, "nothing": 10}


@pytest.mark.parametrize(("kind", "attempts"), MOST_ATTEMPTS.items())
async def test_invalid_response_is_retried_but_a_complete_one_only_a_few_times(kind, attempts):
    """Each retry costs a generation, and its response is the same."""
    body, _ = UNDECODABLE[kind]
    server = scripted(ScriptedResponse(200, body), OK, ScriptedResponse(200, body))
    client = client_to(server, max_retries=9)
    assert await client.generate([1]) == server.responses[1].body
    with pytest.raises(SGLangDecodingError, match=f"given up after {attempts} attempts"):
        await client.generate([1])
    assert len(server.requests) == 2 + attempts


async def test_broken_connection_is_aborted_before_the_retry():
    server = scripted(ScriptedFault("drop"), OK)
    await client_to(server).generate([1])
    first, second = server.requests
    assert [path for path, _ in server.calls] == ["/generate", "/abort_request", "/generate"]
    assert aborts(server) == [first.rid]
    assert second.rid != first.rid


async def test_request_that_never_reached_the_server_is_not_aborted():
    network = respx.Router(assert_all_called=False)
    generated = network.post(path="/generate")
    generated.side_effect = [httpx.ConnectError, httpx.ConnectTimeout, httpx.Response(200, json=generation())]
    network.route().respond(200)
    await client_in(network, "one").generate([1])
    assert hosts_of(network) == ["one"] * 3
    assert len(network.calls) == 3


async def test_absent_server_is_given_up_after_a_while():
    client = client_in(network_of(one=None), "one", max_retries=10**9, unreachable_after=0.05)
    with pytest.raises(SGLangConnectionError, match="could not connect.*no server has ever answered there"):
        await client.generate([1])


@pytest.mark.parametrize(
    "ask", [lambda client: client.generate([1]), lambda client: client.health()], ids=["a call", "unhealthy"]
)
async def test_server_that_answered_before_gets_all_retries(ask):
    network = network_of(one=scripted(**{"/health": ScriptedResponse(503)}))
    client = client_in(network, "one", max_retries=7, unreachable_after=0.0)
    await ask(client)
    plug(network, one=None)
    with pytest.raises(SGLangConnectionError, match="8 attempts") as caught:
        await client.generate([1])
    assert "ever answered" not in str(caught.value)


async def test_error_of_a_custom_transport_is_raised_unchanged():
    network = respx.Router()
    route = network.post(path="/generate").mock(side_effect=KeyError("bug"))
    with pytest.raises(KeyError):
        await client_in(network, "one").generate([1])
    assert route.call_count == len(network.calls) == 1


async def test_outage_logs_a_few_lines_for_any_number_of_requests(caplog):
    caplog.set_level(logging.INFO, logger="strands_sglang")
    server = scripted(*[ScriptedResponse(500)] * 200, OK)
    client = client_to(server, max_retries=300)
    await several(client, 50)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("strands_sglang")]
    assert 2 <= len(messages) <= 4
    assert "failed_attempts=<1>" in messages[0] and BASE_URL in messages[0] and "HTTP 500" in messages[0]
    assert "answers again" in messages[-1]


async def test_a_server_that_does_not_answer_is_named_until_it_does():
    network = network_of(silent=None)
    client = client_in(network, "silent", max_retries=60, unreachable_after=60.0)
    call = asyncio.create_task(client.generate([1]))
    while len(network.calls) < 3:
        await asyncio.sleep(0)
    [outage] = [outage for outage in outages() if outage.base_url == client.base_url]
    assert outage.base_url == "http://silent" and outage.waiting == 1 and outage.seconds < 1
    assert 0 < outage.seconds_left <= 60
    plug(network, silent=scripted())
    await call
    assert client.base_url not in [outage.base_url for outage in outages()]


async def test_an_outage_tells_when_the_first_call_gives_up_and_not_of_one_that_has():
    server = Server("http://dead")
    failure = Failure(FailureKind.UNREACHABLE, SGLangConnectionError("no connection"))
    calls = [Server("") for _ in range(4)]
    for call, left in zip(calls, (0, 360, 47, math.inf), strict=True):
        server.log_failure(failure, call, time.monotonic() + left)
    server.log_failure(failure)  # a probe
    assert server.outage.waiting == 4 and server.outage.seconds_left == 0  # it is late, and still waits
    server.forget(calls[0])
    assert server.outage.waiting == 3 and 40 < server.outage.seconds_left <= 47
    del call, calls[2:]  # those calls have ended
    assert server.outage.waiting == 1 and 350 < server.outage.seconds_left <= 360
    server.log_answer()
    server.log_failure(failure)
    assert server.outage.waiting == 1 and server.outage.seconds_left == math.inf


async def test_a_server_that_refuses_requests_is_no_outage():
    server = scripted(*[ScriptedResponse(503)] * 50, OK)
    client = client_to(server, max_retries=300)
    call = asyncio.create_task(client.generate([1]))
    seen = []
    while not call.done():
        seen += [outage for outage in outages() if outage.base_url == client.base_url]
        await asyncio.sleep(0)
    assert seen == []


CONTEXT_LENGTH = [
    "The input (600 tokens) is longer than the model's context length (512 tokens).",
    "Requested token count exceeds the model's maximum context length of 512 tokens. You requested 600 tokens",
    "Input length (508 tokens) exceeds the maximum allowed length (506 tokens). Use a shorter input.",
    "Multimodal prompt is too long after expanding multimodal tokens. After expanding 1 => 600 >= 506.",
    "Request a1 exceeds the maximum number of tokens: 600 > 506",
]


@pytest.mark.parametrize("message", CONTEXT_LENGTH)
async def test_every_message_about_a_full_context_is_known(message):
    with pytest.raises(SGLangContextLengthError, match="HTTP 400") as caught:
        await client_to(scripted(ScriptedFault(status=400, message=message))).generate([1])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "top_p exceeds 1"),
        (400, "max_new_tokens exceeds the maximum"),
        (400, "Input exceeds the maximum allowed length of a stop string"),
        (422, CONTEXT_LENGTH[0]),
    ],
)
async def test_similar_errors_are_not_a_full_context(status, message):
    with pytest.raises(SGLangHTTPError) as caught:
        await client_to(scripted(ScriptedFault(status=status, message=message))).generate([1])
    assert not isinstance(caught.value, SGLangContextLengthError)


ERROR_BODIES = [
    ({"error": {"message": "top_p must be in (0, 1], got 2."}}, "top_p must be"),
    ({"error": "unknown field `bogus`, expected one of ..."}, "unknown field `bogus`"),
    ({"object": "error", "message": "1 validation error", "type": "Bad Request", "code": 400}, "1 validation error"),
    ({"error": {"type": "x", "code": "no_available_workers", "message": "No workers"}}, "No workers (no_available_"),
    ({"error": {"type": "x", "code": "unknown_url"}}, "unknown_url"),
    ({"detail": "Method Not Allowed"}, "Method Not Allowed"),
    ({"detail": [{"msg": "field required"}]}, "field required"),
    ("just text", "just text"),
]


@pytest.mark.parametrize(("body", "said"), ERROR_BODIES)
async def test_servers_message_is_found_in_every_error_format(body, said):
    answer = ScriptedResponse(400, body.encode()) if isinstance(body, str) else as_json(body, 400)
    with pytest.raises(SGLangHTTPError) as caught:
        await client_to(scripted(answer)).generate([1])
    assert f"POST {BASE_URL}/generate: HTTP 400: " in str(caught.value)
    assert said in str(caught.value)
    assert caught.value.body == answer.content.decode()


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_server_without_generate_is_reported_as_not_sglang(status):
    with pytest.raises(SGLangHTTPError, match="not an SGLang server"):
        await client_to(scripted(ScriptedResponse(status, b"<html>nope</html>"))).generate([1])


async def test_a_redirect_names_the_address_to_use():
    with pytest.raises(SGLangHTTPError, match="redirects to https://elsewhere"):
        await client_to(scripted(ScriptedResponse(307, headers={"location": "https://elsewhere"}))).generate([1])


@given(st.floats(0, 100), st.integers(0, 10**6), st.none() | st.floats(0, 1e6))
def test_a_delay_is_never_longer_than_eight_seconds(retry_delay, retries, retry_after):
    delay = RetryPolicy(60, retry_delay, 30.0).delay(retries, retry_after)
    assert 0 <= delay <= MAX_DELAY_S
    assert delay >= min(retry_after or 0.0, MAX_DELAY_S)


def test_delays_double_with_jitter():
    policy = RetryPolicy(60, 1.0, 30.0)
    for retries, longest in enumerate([1.0, 2.0, 4.0, 8.0, 8.0]):
        delays = {policy.delay(retries) for _ in range(100)}
        assert len(delays) > 50
        assert longest / 2 <= min(delays) <= max(delays) <= longest


@pytest.mark.parametrize(
    ("value", "seconds"), [(None, None), ("3", 3.0), ("-1", 0.0), ("nan", 0.0), ("soon", None), ("", None)]
)
def test_retry_after_is_read_as_seconds(value, seconds):
    assert retry_after_seconds({} if value is None else {"retry-after": value}) == seconds


def test_retry_after_is_read_as_a_date():
    seconds = retry_after_seconds({"retry-after": formatdate(time.time() + 100, usegmt=True)})
    assert seconds is not None and 40 <= seconds <= 100


async def test_caller_cancelled_by_anyio_waits_idly():
    """A cancel scope cancels again on every cycle of the event loop."""
    server = hung()
    client = client_to(server, abort_grace=0.5)
    async with AsyncExitStack() as idle:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.generate, [1])
                await arrival(server)
                idle.enter_context(idle_for(0.1))
                scope.cancel()
    assert len(aborts(server)) >= 1


async def test_timed_out_attempt_is_aborted_and_retried_once():
    server = hung(after=60)
    with pytest.raises(SGLangConnectionError, match="no response in time.*60 s.*2 attempts"):
        await client_to(server, timeout=60, max_retries=60).generate([1])
    assert aborts(server) == [request.rid for request in server.requests]
    assert len(server.requests) == 2


async def test_request_cancelled_between_attempts_is_not_retried():
    server = scripted(ScriptedResponse(500))
    task = await start(server, client_to(server, retry_delay=8.0))
    await asyncio.sleep(0)
    await cancel(task)
    assert len(server.requests) == 1


async def test_requests_beyond_the_limit_wait():
    server = hung()
    client = client_to(server, max_connections=1)
    first, second = (asyncio.create_task(client.generate([token])) for token in (1, 2))
    await arrival(server)
    await cancel(second)
    assert [path for path, _ in server.calls] == ["/generate"]
    await cancel(first)
    assert [path for path, _ in server.calls] == ["/generate", "/abort_request"]  # although all slots were taken


def test_abort_is_sent_when_the_event_loop_ends():
    server = hung()

    async def start_and_return():
        client = client_to(server)
        start_and_return.task = asyncio.create_task(client.generate([1]))  # type: ignore[attr-defined]
        await arrival(server)

    asyncio.run(start_and_return())
    assert len(aborts(server)) == 1


def test_abort_in_flight_survives_the_end_of_the_loop():
    heard = []

    async def respond(request):
        await asyncio.sleep(0)
        heard.append(request.url.path)
        return httpx.Response(200)

    async def start_and_return():
        client = through(respond)
        start_and_return.task = asyncio.create_task(client.abort("r"))  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(start_and_return())
    assert heard == ["/abort_request"]


async def cancel_at_a_hung_server(*, grace):
    """Cancel a call, which has to wait idly; return the seconds that it takes."""

    async def respond(request):
        arrived.set()
        await over.wait()
        return httpx.Response(500)

    arrived, over = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(through(respond, abort_grace=grace).generate([1]))
    await arrived.wait()
    started = asyncio.get_running_loop().time()
    with idle_for(0.2):
        await cancel(task)
    waited = asyncio.get_running_loop().time() - started
    over.set()  # else the loop would wait for the aborts at its end
    return waited


async def test_unaborted_caller_waits_for_the_grace_at_most():
    waited = [await cancel_at_a_hung_server(grace=0.3)]
    while min(waited) >= 1.0 and len(waited) < 3:  # on a busy machine
        waited.append(await cancel_at_a_hung_server(grace=0.3))
    assert min(waited) < 1.0


async def test_wait_for_an_unanswered_abort_is_idle():
    await cancel_at_a_hung_server(grace=1.0)


async def test_abort_sends_the_request_id_and_never_raises():
    server = scripted(**{"/abort_request": ScriptedResponse(404)})
    await client_to(server).abort("r-1")
    assert aborts(server) == ["r-1"]
    network = network_of(one=None)
    await client_in(network, "one").abort("r-1")
    assert hosts_of(network, "/abort_request")


async def test_caller_can_abort_by_its_own_id():
    server = scripted(until_aborted(PARTIAL))
    client = client_to(server)
    mine, other = (asyncio.create_task(client.generate([1], rid=rid)) for rid in ("turn", "turner"))
    await arrival(server, 2)
    await client.abort("turn")
    assert (await mine)["meta_info"]["id"].startswith("turn-")
    assert not other.done()
    await client.close()
    await other


async def test_closing_without_grace_sends_the_aborts():
    server = scripted(until_aborted(PARTIAL))
    with server.serve() as base_url:
        client = SGLangClient(base_url, abort_grace=0)
        task = await start(server, client)
        await client.close()
        assert aborts(server) == [server.requests[0].rid]
        await asyncio.gather(task, return_exceptions=True)  # its answer may have come in time


async def test_closing_ends_requests_that_a_transport_keeps(monkeypatch):
    monkeypatch.setattr(connections, "ABORT_TIMEOUT_S", 0.05)

    async def respond(request):
        arrived.set()
        return await asyncio.get_running_loop().create_future()

    arrived = asyncio.Event()
    client = through(respond, abort_grace=0.01)
    task = asyncio.create_task(client.generate([1]))
    await arrived.wait()
    await client.close()
    with pytest.raises(SGLangConnectionError, match="closed"):
        await asyncio.wait_for(task, 5.0)


@pytest.mark.parametrize("is_shielded", [False, True], ids=["task", "anyio"])
async def test_a_cancelled_close_ends_the_calls_of_all_event_loops(is_shielded):
    async def respond(request):
        if request.url.path == "/abort_request":
            aborted.add(json.loads(request.content)["rid"])
            return httpx.Response(200)
        arrived.release()
        return await asyncio.get_running_loop().create_future()

    async def call():
        with pytest.raises(SGLangConnectionError, match="closed"):
            await asyncio.wait_for(client.generate([1]), 10.0)

    arrived, aborted = threading.Semaphore(0), set()
    client = through(respond, abort_grace=0.01)
    calls = [asyncio.create_task(call())]
    await asyncio.to_thread(arrived.acquire)
    calls.append(asyncio.create_task(asyncio.to_thread(asyncio.run, call())))
    await asyncio.to_thread(arrived.acquire)
    if is_shielded:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await client.close()
    else:
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        await cancel(closing)
    await asyncio.gather(*calls)
    await client.close()
    assert len(aborted) == 2


async def test_a_closed_client_opens_again_when_it_is_used():
    server = scripted()
    client = client_to(server)
    async with client:
        await client.generate([1])
    assert await client.generate([1]) == server.responses[1].body


async def test_a_request_made_while_a_client_closes_ends_with_the_next_close():
    server = scripted(until_aborted(PARTIAL))
    client = client_to(server)
    first = await start(server, client)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    second = asyncio.create_task(client.generate([2]))
    await closing
    await arrival(server, 2)
    await client.close()
    answers = await asyncio.wait_for(asyncio.gather(first, second), 5.0)
    assert [answer["output_ids"] for answer in answers] == [PARTIAL.token_ids] * 2


async def test_only_the_deadline_of_a_cancellation_counts():
    server = hung(after=60)
    cancellation = Cancellation(90.0)
    advance(60)  # half of it is over
    with pytest.raises(SGLangDeadlineError, match="90 s after the request was made"):
        await client_to(server, deadline=0.01).generate([1], cancel_signal=cancellation, deadline=120.0)
    assert len(aborts(server)) == 1


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("http://h:30000", "http://h:30000"),
        ("http://h:30000/", "http://h:30000"),
        (" https://h//\n", "https://h"),
        ("http://h/behind/a/proxy/", "http://h/behind/a/proxy"),
        ("http://[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_addresses_are_stripped_of_spaces_and_slashes(given, normal):
    assert normalize_base_url(given) == normal


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("h:30000", "write 'http://h:30000'"),
        ("127.0.0.1:30000", "write 'http://127.0.0.1:30000'"),
        ("ftp://h", "write 'http://h'"),
        ("", "http://127.0.0.1:30000"),
        ("http://h:30000/v1", "write 'http://h:30000'"),
        ("http://h:30000/v1/", "write 'http://h:30000'"),
        ("http://h:30000/v1/chat/completions", "write 'http://h:30000'"),
        ("http://h:30000/generate", "write 'http://h:30000'"),
        ("http://", "has no host"),
        ("http://h:port", "not a URL"),
        ("http://h?a=1", "query"),
        (None, "must be a string"),
        (30000, "must be a string"),
    ],
)
def test_invalid_address_is_rejected_with_a_correction(given, said):
    with pytest.raises(ValueError, match="base_url") as caught:
        normalize_base_url(given)
    assert said in str(caught.value)


def slime_args(**changes):
    return Namespace(**{"sglang_router_ip": "h", "sglang_router_port": 1, "sglang_server_concurrency": 8, **changes})


@pytest.mark.parametrize(
    ("changes", "connections"),
    [
        ({"rollout_num_engines": 3, "rollout_num_gpus": 100, "rollout_num_gpus_per_engine": 1}, 24),
        ({"rollout_num_engines": None, "rollout_num_gpus": 16, "rollout_num_gpus_per_engine": 4}, 32),
        ({"rollout_num_gpus": None, "rollout_num_gpus_per_engine": None}, 8),
        ({"rollout_num_gpus": 0, "rollout_num_gpus_per_engine": 0}, 8),
        ({"rollout_num_gpus": 1, "rollout_num_gpus_per_engine": 8}, 8),
        ({"sglang_server_concurrency": None}, 512),
        ({}, 8),
    ],
)
def test_slimes_concurrency_is_that_of_all_engines(changes, connections):
    assert slime_client_arguments(slime_args(**changes))["max_connections"] == connections


@pytest.mark.parametrize(
    ("ip", "base_url"),
    [("10.0.0.1", "http://10.0.0.1:1"), ("fe80::1", "http://[fe80::1]:1"), ("[::1]", "http://[::1]:1")],
)
def test_slimes_router_address_may_be_of_either_ip_version(ip, base_url):
    assert slime_client_arguments(slime_args(sglang_router_ip=ip))["base_url"] == base_url


def test_router_without_an_address_is_an_error():
    with pytest.raises(ValueError, match="sglang_router_ip is None"):
        slime_client_arguments(slime_args(sglang_router_ip=None))
    assert slime_client_arguments(Namespace(), base_url="http://h:1")["base_url"] == "http://h:1"


# === Calls that end before their response: aborts, and partial answers ===


def behind_a_router(listed, path="/workers", **workers):
    """A network of workers, with a router in front that sends everything to the last and forwards no aborts."""
    network = network_of(**workers)
    *_, worker = workers.values()
    network.route(host="router", path="/generate").mock(side_effect=worker.transport().handle_async_request)
    network.route(host="router", path=path, name="list").respond(json=listed)
    network.route(host="router").respond(404)
    return network


def workers(*hosts):
    return {"workers": [{"id": host, "url": f"http://{host}", "is_healthy": True} for host in hosts]}


async def cancelled(client, worker):
    """Cancel a call once the worker has it; return the partial answers."""
    partial = []
    task = await start(worker, client, on_partial=partial.append)
    await cancel(task)
    return partial


@pytest.mark.parametrize(
    ("path", "listed"),
    [
        ("/workers", workers("one", "two")),
        ("/list_workers", {"urls": ["http://one", "http://two/"]}),
        ("/workers", {"workers": [{"url": "http://one@0"}, {"url": "http://one@1"}, {"url": "two"}]}),
    ],
)
async def test_a_routers_workers_are_aborted_directly(path, listed):
    one, two = scripted(), scripted(until_aborted(PARTIAL))
    network = behind_a_router(listed, path, one=one, two=two)
    [partial] = await cancelled(client_in(network, "router", abort_grace=2.0), two)
    assert partial["output_ids"] == [7, 8]
    assert aborts(one) == aborts(two) == [two.requests[0].rid]


async def test_list_of_workers_is_cached():
    worker = scripted()
    network = behind_a_router(workers("one"), one=worker)
    client = client_in(network, "router")
    await asyncio.gather(*(client.abort(f"r-{i}") for i in range(20)))
    await client.abort("r-20")
    assert network["list"].call_count == 1
    assert set(aborts(worker)) == {f"r-{i}" for i in range(21)}


@pytest.mark.parametrize("old", [None, scripted()], ids=["the old one is gone", "the old one answers"])
async def test_new_worker_is_found_after_an_abort_without_effect(old):
    worker = scripted(until_aborted(PARTIAL))
    network = behind_a_router(workers("old"), old=old, new=worker)
    client = client_in(network, "router", abort_grace=2.0)
    await client.abort("before")
    network["list"].respond(json=workers("old", "new"))
    assert len(await cancelled(client, worker)) == 1


async def test_router_without_workers_does_not_delay_the_caller():
    worker = scripted(until_aborted(PARTIAL))
    client = client_in(behind_a_router({"workers": []}, one=worker), "router", abort_grace=60.0)
    assert await asyncio.wait_for(cancelled(client, worker), 10) == []


async def test_routers_error_about_a_worker_aborts_the_request():
    worker = scripted(ScriptedResponse(500, headers={"x-smg-error-code": "call_upstream_request_error"}))
    network = behind_a_router(workers("one"), one=worker)
    with pytest.raises(Exception, match="HTTP 500"):
        await client_in(network, "router", max_retries=0).generate([1])
    assert aborts(worker) == [request.rid for request in worker.requests]


async def test_many_aborts_open_few_connections():
    at_once, most, done = 0, 0, 0

    async def respond(request):
        nonlocal at_once, most, done
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once, done = at_once - 1, done + 1
        return httpx.Response(200)

    client = through(respond)
    await asyncio.gather(*(client.abort(f"r-{i}") for i in range(500)))
    assert done == 500 and most <= 50


@pytest.mark.parametrize("listed", [None, {}, [], {"workers": None}, {"workers": [{}, None, {"url": 3}]}, "x"])
def test_list_without_workers_is_empty(listed):
    assert worker_urls(listed) == ()


def test_workers_without_http_are_left_out():
    assert worker_urls({"workers": [{"url": "grpc://a:1"}, {"url": "http://b:2/"}, "c:3"]}) == (
        "http://b:2",
        "http://c:3",
    )


async def ends(task):
    with pytest.raises(BaseException) as caught:  # noqa: B017, PT011
        await task
    return caught.value


IN_THE_QUEUE = {
    "text": "",
    "output_ids": [],
    "meta_info": {"id": "r", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}},
}


@pytest.mark.parametrize(
    ("answer", "passed_on"),
    [
        (PARTIAL, [("abort", [7, 8])]),
        (COMPLETE, [("stop", [7, EOS])]),  # it was complete before the abort
        (as_json(IN_THE_QUEUE), [("abort", [])]),
        (ScriptedResponse(500), []),
        (ScriptedResponse(200, b"?"), []),
        (ScriptedFault("drop"), []),
    ],
)
async def test_a_cancelled_caller_gets_a_valid_answer(answer, passed_on):
    server, partial = scripted(until_aborted(answer)), []
    await cancel(await start(server, client_to(server), on_partial=partial.append))
    assert [(one["meta_info"]["finish_reason"]["type"], one["output_ids"]) for one in partial] == passed_on
    [sent] = server.requests
    assert set(aborts(server)) == {sent.rid}


async def test_repeatedly_cancelled_caller_gets_the_partial_answer():
    server, partial = scripted(until_aborted(PARTIAL)), []
    heard, go_on = asyncio.Event(), asyncio.Event()

    async def respond(request):
        if request.url.path == "/abort_request":
            heard.set()
            await go_on.wait()
        return await server.transport().handle_async_request(request)

    client = through(respond)
    task = await start(server, client, on_partial=partial.append)
    task.cancel()
    await heard.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    go_on.set()
    assert isinstance(await ends(task), asyncio.CancelledError)
    assert len(partial) == 1


async def test_error_in_on_partial_does_not_hide_the_cancellation():
    def fail(_):
        raise RuntimeError("mine")

    server = scripted(until_aborted(PARTIAL))
    task = await start(server, client_to(server), on_partial=fail)
    await cancel(task)


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
    client = through(respond)
    task = asyncio.create_task(client.generate([1], on_partial=partial.append))
    await arrived.wait()
    await cancel(task)
    assert len(heard) == 2 and len(partial) == 1


async def test_no_wait_for_an_abort_that_no_server_received():
    async def respond(request):
        if request.url.path != "/generate":
            raise httpx.ConnectError("refused")
        arrived.set()
        await asyncio.Event().wait()

    arrived = asyncio.Event()
    client = through(respond, abort_grace=60.0)
    task = asyncio.create_task(client.generate([1]))
    await arrived.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()


# --- the cancel signal ---


async def test_set_signal_ends_the_call_with_the_partial_answer():
    server, signal, partial = scripted(until_aborted(PARTIAL)), threading.Event(), []
    task = await start(server, client_to(server), cancel_signal=signal, on_partial=partial.append)
    threading.Thread(target=signal.set).start()
    error = await ends(task)
    assert isinstance(error, SGLangCancelledError)
    assert error.response == partial[0]
    assert error.response is not None and error.response["output_ids"] == [7, 8]
    assert len(aborts(server)) == 1


async def test_signal_set_before_the_call_sends_nothing():
    server, signal = scripted(), threading.Event()
    signal.set()
    with pytest.raises(SGLangCancelledError):
        await client_to(server).generate([1], cancel_signal=signal)
    assert server.calls == []


async def test_signal_ends_the_wait_for_a_retry_or_a_slot():
    server, signal = scripted(ScriptedResponse(500)), threading.Event()
    retrying = await start(server, client_to(server, retry_delay=8.0), cancel_signal=signal)
    busy = hung()
    client = client_to(busy, max_connections=1)
    first = await start(busy, client)
    second = asyncio.create_task(client.generate([1], cancel_signal=signal))
    signal.set()
    assert isinstance(await ends(retrying), SGLangCancelledError)
    assert isinstance(await ends(second), SGLangCancelledError)
    assert len(busy.requests) == 1
    await cancel(first)


async def test_signal_cleared_after_it_was_seen_ends_the_call():
    class ClearedWhenSeen(threading.Event):
        def is_set(self):
            was_set = super().is_set()
            self.clear()
            return was_set

    async def ended(call):
        signal = ClearedWhenSeen()
        asyncio.get_running_loop().call_later(0.02, signal.set)
        return await asyncio.wait_for(ends(asyncio.ensure_future(call(signal))), 5.0)

    sampling, busy = scripted(until_aborted(PARTIAL)), hung()
    error = await ended(lambda signal: client_to(sampling).generate([1], cancel_signal=signal))
    assert isinstance(error, SGLangCancelledError) and error.response["output_ids"] == [7, 8]
    client = client_to(busy, max_connections=1)
    first = await start(busy, client)
    waits_for_a_connection = await ended(lambda signal: client.generate([1], cancel_signal=signal))
    assert isinstance(waits_for_a_connection, SGLangCancelledError)
    sleeps = await ended(lambda signal: Cancellation(signal=signal).finish(asyncio.sleep(60)))
    assert isinstance(sleeps, SGLangCancelledError)
    await cancel(first)


async def test_complete_answer_counts_although_the_signal_is_set():
    signal = threading.Event()

    async def answer(_):
        signal.set()
        return OK

    server = scripted(answer)
    assert await client_to(server).generate([1], cancel_signal=signal) == server.responses[0].body


async def test_one_timer_per_loop_checks_all_signals(monkeypatch):
    loop, timers = asyncio.get_running_loop(), set()
    call_later = loop.call_later

    def count(delay, callback, *args, **kwargs):
        def run():
            timers.discard(timer)
            callback(*args)

        timer = call_later(delay, run, **kwargs)
        if delay == POLL_INTERVAL_S:
            timers.add(timer)
        return timer

    monkeypatch.setattr(loop, "call_later", count)
    release = asyncio.Event()

    async def wait(_):
        await release.wait()
        return OK

    server = scripted(wait)
    client = client_to(server)
    calls = [asyncio.create_task(client.generate([1], cancel_signal=threading.Event())) for _ in range(50)]
    await arrival(server, 50)
    assert sum(not timer.cancelled() for timer in timers) == 1
    release.set()
    await asyncio.gather(*calls)
    assert all(timer.cancelled() for timer in timers)


# --- timeouts and deadlines ---


@pytest.mark.parametrize("limit", ["timeout", "deadline"])
async def test_answer_just_after_a_limit_still_counts(limit):
    server = scripted(until_aborted(COMPLETE, after=60))
    assert (await client_to(server, **{limit: 60}).generate([1]))["output_ids"] == [7, EOS]
    assert len(server.requests) == 1


async def test_longest_partial_answer_is_passed_on_once():
    parts = [ScriptedAnswer(token_ids=[5] * length, finish_reason="abort") for length in (3, 1)]
    server, partial = scripted(*(until_aborted(part, after=60) for part in parts)), []
    with pytest.raises(SGLangConnectionError, match="no response in time"):
        await client_to(server, timeout=60).generate([1], on_partial=partial.append)
    assert len(server.requests) == 2
    assert [len(answer["output_ids"]) for answer in partial] == [3]


async def test_answered_call_passes_on_no_partial_answer():
    server, partial = scripted(until_aborted(PARTIAL, after=60), OK), []
    answer = await client_to(server, timeout=60).generate([1], on_partial=partial.append)
    assert answer == server.responses[1].body
    assert partial == []


async def test_deadline_error_has_the_partial_answer():
    server, partial = scripted(until_aborted(PARTIAL, after=60)), []
    with pytest.raises(SGLangDeadlineError, match=r"deadline has passed after 2 tokens, 60 s after") as caught:
        await client_to(server, deadline=60).generate([1], on_partial=partial.append)
    assert [caught.value.response] == partial
    assert len(server.requests) == len(aborts(server)) == 1


async def test_the_deadline_covers_retries_and_names_the_last_failure():
    server = scripted(ScriptedResponse(500, b"out of order"))
    with pytest.raises(SGLangDeadlineError, match="out of order") as caught:
        await client_to(server, deadline=1.5, retry_delay=0.02, max_retries=10**6).generate([1])
    assert isinstance(caught.value.__cause__, SGLangHTTPError)
    assert caught.value.response is None
    assert 2 <= len(server.requests) < 30


async def test_retry_after_the_deadline_is_not_awaited():
    started = asyncio.get_running_loop().time()
    with pytest.raises(SGLangDeadlineError):
        await client_to(scripted(ScriptedResponse(500)), deadline=4.0, retry_delay=8.0).generate([1])
    assert asyncio.get_running_loop().time() - started < 3.0


async def test_deadline_covers_the_wait_for_a_slot():
    server = hung(after=60)
    client = client_to(server, max_connections=1, deadline=60)
    first, second = (asyncio.create_task(client.generate([1])) for _ in range(2))
    for task in (first, second):
        assert isinstance(await ends(task), SGLangDeadlineError)
    assert len(server.requests) == 1


async def test_abandoned_slots_are_free_for_others():
    server = hung()
    client = client_to(server, max_connections=1, deadline=0.05)
    await asyncio.gather(*(client.generate([1]) for _ in range(20)), return_exceptions=True)
    server.overrides["/generate"] = as_json(generation())
    assert await several(client, 5) == [generation()] * 5


# --- closing ---


async def test_closing_ends_waiting_calls():
    server, broken = scripted(until_aborted(PARTIAL)), scripted(ScriptedResponse(500))
    client = client_to(server, max_connections=1)
    first = await start(server, client)
    second = asyncio.create_task(client.generate([1]))
    other = client_to(broken, retry_delay=8.0)
    third = await start(broken, other)
    await client.close()
    await other.close()
    assert (await first)["meta_info"]["finish_reason"]["type"] == "abort"
    for task in (second, third):
        error = await ends(task)
        assert isinstance(error, SGLangConnectionError) and "closed" in str(error)
    assert len(server.requests) == 1


# === The load that servers report ===


def reported(running, waiting, **changes):
    """A server with one rank, which reports these numbers."""
    rank = {"num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": 0.25, "max_running_requests": 32}
    return reporting(as_json({"loads": [{**rank, **changes}]}))


def reporting(response):
    """A server with this response of `/v1/loads`."""
    return scripted(**{"/v1/loads": response})


async def test_every_server_reports_its_load():
    loads = await client_in(network_of(one=reported(3, 0), two=reported(4, 0)), "one", "two").loads()
    assert loads == tuple(ServerLoad(f"http://{host}", n, 0, 32, 0.25) for host, n in (("one", 3), ("two", 4)))


async def test_a_routers_workers_report_their_loads_directly():
    network = behind_a_router(workers("one", "two"), one=reported(3, 1), two=reported(4, 1))
    client = client_in(network, "router")
    for _ in range(3):
        loads = await client.loads()
        assert [(load.base_url, load.running) for load in loads] == [("http://one", 3), ("http://two", 4)]
    assert network["list"].call_count == 1 and hosts_of(network, "/v1/loads").count("router") == 1


@pytest.mark.parametrize(
    "silent",
    [
        None,
        reporting(ScriptedResponse(404)),
        reporting(ScriptedResponse(500, b"no")),
        reporting(ScriptedResponse(200, b"<html>")),
        reporting(as_json([])),
        reporting(as_json({"loads": [None, {}, {"num_running_reqs": "3"}]})),
        reported(-1, 0),
        reported(0, 1.5),
        reported(0, 0, token_usage=None),
    ],
)
async def test_server_without_a_report_is_left_out(silent):
    loads = await client_in(network_of(silent=silent, other=reported(1, 2)), "silent", "other").loads()
    assert [load.base_url for load in loads] == ["http://other"]


@pytest.mark.parametrize(
    ("changes", "most", "usage"),
    [
        ({"max_running_requests": None}, None, 0.25),
        ({"max_running_requests": 0}, None, 0.25),
        ({"token_usage": 2}, 32, 1.0),
    ],
)
async def test_a_report_may_lack_its_limit(changes, most, usage):
    [load] = await client_to(reported(1, 0, **changes)).loads()
    assert (load.max_running, load.cache_usage) == (most, usage)


# === Servers: addresses, connections and load balancing, and shared clients ===


URLS = ("http://one", "http://two", "http://three")


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


def test_key_stays_on_its_busy_server():
    servers = Servers(URLS)
    first = servers.choose("a")
    for _ in range(10):
        servers.count_in_flight(first, 1)
    assert all(servers.choose("a") is first for _ in range(5))
    assert servers.choose("b") is not first


def test_keys_are_spread_evenly_without_load():
    servers = Servers(URLS)
    assert Counter(servers.choose(str(i)).base_url for i in range(300)) == dict.fromkeys(URLS, 100)


def test_number_of_remembered_keys_is_limited(monkeypatch):
    monkeypatch.setattr(servers_module, "MAX_KEYS", 10)
    servers = Servers(URLS)
    for i in range(1000):
        servers.choose(str(i))
    assert sum(server.keys for server in servers.all) == 10


def test_retry_uses_another_server_and_keeps_the_key():
    servers = Servers(URLS)
    first = servers.choose("a")
    assert servers.choose("a", avoid=first) is not first
    assert servers.choose("a") is first


def test_a_single_server_is_always_chosen():
    servers = Servers(URLS[:1])
    [only] = servers.all
    servers.note_failure(only, FailureKind.UNREACHABLE)
    assert servers.choose("a", avoid=only) is only
    assert not only.is_out


# --- rotation ---


def test_unreachable_server_loses_its_keys():
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


def test_several_broken_connections_take_a_server_out():
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
def test_slow_or_failing_server_stays_in_rotation(kind):
    servers = Servers(URLS)
    for _ in range(10):
        servers.note_failure(servers.all[0], kind)
    assert servers.up() == servers.all


def test_server_out_of_rotation_is_probed_ever_less(monkeypatch):
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


def test_with_all_servers_out_requests_still_try_them():
    servers = Servers(URLS)
    for server in servers.all:
        servers.note_failure(server, FailureKind.UNREACHABLE)
    assert servers.up() == servers.all
    back = servers.choose("a")
    servers.note_answer(back)
    assert servers.up() == (back,)
    assert servers.choose("a") is back


# --- a client with several servers ---


async def test_requests_are_spread_and_keys_are_sent():
    network = network_of(one=scripted(), two=scripted())
    client = client_in(network, "one", "two")
    for _ in range(4):
        await client.generate([1], routing_key="a")
    await several(client, 6)
    hosts = hosts_of(network)
    assert len(set(hosts[:4])) == 1
    assert set(Counter(hosts[4:]).values()) == {3}
    sent, last = network.calls[0].request, network.calls[-1].request
    assert sent.headers["x-smg-routing-key"] == "a"
    assert b'"routing_key":"a"' in sent.content
    assert "x-smg-routing-key" not in last.headers
    assert b"routing_key" not in last.content


@pytest.mark.parametrize("key", ["", " a", "a\nb", "\u00e4", 3, b"a"])
async def test_key_that_is_not_a_header_value_is_rejected(key):
    server = scripted()
    with pytest.raises(ValueError, match="routing_key"):
        await client_to(server).generate([1], routing_key=key)
    assert server.calls == []


async def test_requests_to_a_dead_server_move_at_once():
    network = network_of(one=None, two=scripted())
    client = client_in(network, "one", "two", retry_delay=8.0)
    started = asyncio.get_running_loop().time()
    answers = await asyncio.gather(*(client.generate([1], routing_key=str(i)) for i in range(10)))
    assert [answer["output_ids"] for answer in answers] == [[7, 2]] * 10
    assert asyncio.get_running_loop().time() - started < 1.0
    assert [server.base_url for server in client.servers] == ["http://two"]
    before = len(hosts_of(network))
    await asyncio.gather(*(client.generate([1], routing_key=str(i)) for i in range(10)))
    assert hosts_of(network)[before:] == ["two"] * 10


async def test_healthy_server_returns_to_rotation(monkeypatch):
    # Servers out of rotation are probed at every request.
    monkeypatch.setattr(servers_module, "FIRST_PROBE_S", 0.0)
    monkeypatch.setattr(servers_module, "MAX_PROBE_S", 0.0)
    network = network_of(one=None, two=scripted())
    client = client_in(network, "one", "two")
    await several(client, 4)
    plug(network, one=scripted(**{"/health": ScriptedResponse(503)}))  # it is starting
    while "one" not in hosts_of(network, "/health"):
        await client.generate([1])
    for _ in range(5):
        await client.generate([1])
    assert [server.base_url for server in client.servers] == ["http://two"]
    plug(network, one=scripted())
    while len(client.servers) != 2:
        await client.generate([1])
    before = len(hosts_of(network))
    await several(client, 4)
    assert Counter(hosts_of(network)[before:]) == {"one": 2, "two": 2}


async def test_refused_request_is_retried_on_another_server():
    network = network_of(one=scripted(ScriptedResponse(503)), two=scripted())
    client = client_in(network, "one", "two")
    for i in range(6):
        assert (await client.generate([1], routing_key=str(i)))["output_ids"] == [7, 2]
    hosts = hosts_of(network)
    assert all(after == "two" for before, after in zip(hosts, hosts[1:], strict=False) if before == "one")


async def test_abort_is_sent_to_the_server_of_the_request():
    one, two = hung(), hung()
    client = client_in(network_of(one=one, two=two), "one", "two")
    tasks = [asyncio.create_task(client.generate([1])) for _ in range(2)]
    await arrival(one)
    await arrival(two)
    await client.abort(two.requests[0].rid)
    assert (len(aborts(one)), len(aborts(two))) == (0, 1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for server in (one, two):
        assert {request.rid for request in server.requests} == set(aborts(server))


async def test_health_counts_the_servers():
    answers = {f"http-{status}": scripted(**{"/health": ScriptedResponse(status)}) for status in (200, 404, 500, 503)}
    network = network_of(**answers, gone=None)
    client = client_in(network, *answers, "gone")
    assert await client.health_by_server() == {f"http://{host}": host == "http-200" for host in (*answers, "gone")}
    assert await client.health() is True
    assert await client_in(network, "http-503", "gone").health() is False


async def test_each_server_can_be_asked_for_its_model():
    one, two = scripted(), scripted()
    one.model_path, two.model_path = "a", "b"
    client = client_in(network_of(one=one, two=two), "one", "two")
    assert (await client.model_info("http://two"))["model_path"] == "b"
    assert (await client.model_info())["model_path"] in ("a", "b")
    with pytest.raises(ValueError, match="not one of this client's servers: http://one, http://two"):
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
def test_invalid_addresses_are_rejected(base_url, said):
    with pytest.raises(ValueError, match=said):
        SGLangClient(base_url)


async def test_thousand_failed_requests_log_a_few_lines(caplog):
    caplog.set_level(logging.INFO, "strands_sglang")
    network = network_of(one=None, two=None)
    client = client_in(network, "one", "two", retry_delay=0.01, max_retries=10**6, unreachable_after=60.0)
    calls = [asyncio.create_task(client.generate([1])) for _ in range(1000)]
    while len(network.calls) < 3000:
        await asyncio.sleep(0)
    plug(network, one=scripted(), two=scripted())
    await asyncio.gather(*calls)
    said = [record.getMessage() for record in caplog.records]
    down = Counter(line.partition(",")[0] for line in said if "server does not answer" in line)
    assert set(down) == {"base_url=<http://one>", "base_url=<http://two>"}
    assert max(down.values()) <= 6
    again = Counter(line.partition(",")[0] for line in said if "server answers again" in line)
    assert set(again) <= set(down) and 1 <= max(again.values()) <= 2  # a call that failed before may be late


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
async def test_broken_real_connection_is_aborted_and_retried(
    fault,
):
    seen = []

    async def first_then_answer(request):
        """Break the first `/generate`, and answer everything else."""
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


COMPRESSED = gzip.compress(json.dumps(generation()).encode())


@pytest.mark.parametrize(
    ("encoding", "body", "said"),
    [
        ("gzip", COMPRESSED, None),
        ("gzip", COMPRESSED[1:], r"does not fit its content-encoding \(.*gzip: .*incorrect header check"),
        ("unknown", COMPRESSED, r"not JSON.*\(content-encoding: unknown\)"),
    ],
    ids=["whole", "corrupt", "unknown"],
)
async def test_compressed_responses_of_a_proxy_are_read(encoding, body, said):
    async def compressed(request):
        head = f"HTTP/1.1 200 OK\r\ncontent-encoding: {encoding}\r\ncontent-length: {len(body)}\r\n\r\n"
        request.writer.write(head.encode() + body)

    async with RawServer(compressed) as server, client_of(server, max_retries=0) as client:
        if said is None:
            assert await client.generate([1]) == generation()
        else:
            for call in (lambda: client.generate([1]), client.model_info):
                with pytest.raises(SGLangDecodingError, match=said):
                    await call()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [5_000, 12_000, 60_000, 300_000])
async def test_bodies_of_every_size_arrive_whole(count):
    ids, grown = list(range(count)), EncodedIds()
    for start in range(0, count, 1_000):
        grown = grown.plus(ids[start : start + 1_000])

    async def refuse_first(request):
        if len(server.bodies("/generate")) % 2:
            request.writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n")
        else:
            await answer(request)

    async with RawServer(refuse_first) as server, client_of(server, max_retries=1) as client:
        for prompt in (ids, grown):
            assert await client.generate(prompt) == generation()
    assert [body["input_ids"] == ids for body in server.bodies("/generate")] == [True] * 4


async def test_credentials_in_an_address_are_sent_with_every_request():
    seen = []

    def respond(request):
        seen.append(request.headers["authorization"])
        return httpx.Response(200, json=generation())

    client = SGLangClient("http://me:secret@h", transport=httpx.MockTransport(respond))
    await client.generate([1])
    await client.model_info()
    assert seen == ["Basic bWU6c2VjcmV0"] * 2
    async with RawServer(answer) as server:
        address = server.base_url.replace("://", "://me:secret@")
        async with SGLangClient(address, headers={"authorization": "other"}, max_retries=0) as client:
            assert await client.generate([1]) == generation()
            assert await client.model_info() == {}


async def test_credentials_in_an_address_go_to_its_server_only(caplog):
    caplog.set_level(logging.DEBUG)
    seen, status = {}, {"a": 503, "b": 200}

    def respond(request):
        seen[request.url.host] = request.headers.get("authorization")
        return httpx.Response(status[request.url.host], json=generation())

    addresses = ["http://me:s%40cret@A:80/sub", "http://b"]
    client = SGLangClient(addresses, transport=httpx.MockTransport(respond), max_retries=3, retry_delay=0.0)
    for url in client.base_urls:
        with contextlib.suppress(SGLangThrottledError):
            await client.model_info(url)
    assert seen == {"a": "Basic bWU6c0BjcmV0", "b": None}
    with pytest.raises(SGLangThrottledError) as caught:
        await client.model_info(addresses[0])
    with pytest.raises(ValueError) as unknown:
        await client.model_info("http://me:s%40cret@c")
    with pytest.raises(ValueError) as twice:
        SGLangClient(["http://me:s%40cret@a", "http://you:s%40cret@a"])
    for told in (repr(client), *client.base_urls, caplog.text, *map(str, (caught.value, unknown.value, twice.value))):
        assert "cret" not in told and told
    assert [*map(str, pickle.loads(pickle.dumps(SGLangClient(addresses)))._addresses)] == addresses


async def test_credentials_of_a_worker_are_sent_to_it_and_shown_nowhere(caplog):
    caplog.set_level(logging.DEBUG)
    seen = []

    def respond(request):
        if request.url.host == "router":
            listed = {"urls": ["http://me:secret@W:1@0", "http://me:secret@w:1@1", "http://me:a/secret@w", "http://x"]}
            return httpx.Response(200, json=listed) if request.url.path == "/list_workers" else httpx.Response(404)
        seen.append((request.url.host, request.url.path, request.headers.get("authorization")))
        return httpx.Response(200, json={"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0, "token_usage": 0.5}]})

    client = SGLangClient("http://router", transport=httpx.MockTransport(respond))
    loads = await client.loads()
    await client.abort("a")
    sent = "Basic bWU6c2VjcmV0"
    assert set(seen) == {
        (host, path, auth) for host, auth in (("w", sent), ("x", None)) for path in ("/v1/loads", "/abort_request")
    }
    assert "secret" not in repr(loads) + caplog.text and len(loads) > 1


@pytest.mark.parametrize(
    "address",
    [
        "http://me:secret@h/v1",
        "http://me:secret@",
        "me:secret@h",
        "http://me:secret@h?x",
        "http://me:a/secret@h",
        "http://me:secret#1@h",
        "http://me:my secret@h",
        "http://me:secret://@h:x",
        "me:a/secret@h",
    ],
)
def test_a_wrong_address_is_told_without_its_credentials(address):
    with pytest.raises(ValueError) as caught:
        SGLangClient(address)
    assert "secret" not in f"{caught.value}{caught.value.__cause__}"


async def test_response_that_is_not_http_is_reported_as_such():
    async def banner(request):
        request.writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        request.writer.close()

    async with RawServer(banner) as server, client_of(server) as client:
        with pytest.raises(SGLangDecodingError, match="not HTTP.*is this an SGLang server"):
            await client.generate([1])


async def test_closed_port_is_reported_as_such():
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    async with SGLangClient(url, retry_delay=0.0, unreachable_after=0.0) as client:
        said = r"could not connect \(connection refused\).*start one .*, or correct"
        with pytest.raises(SGLangConnectionError, match=said) as caught:
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


async def test_server_that_starts_late_is_awaited():
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
        answers = await several(client, 20)
    assert len(answers) == 20
    assert len({request.writer for request in server.requests}) == 2


async def test_abort_is_sent_while_all_connections_are_busy():
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


async def test_connections_use_tcp_keepalive():
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
    """A server in its own thread, for tests that run their own event loops."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(RawServer(answer)) as server:
        yield server.base_url


def test_client_works_in_several_threads_at_once(threaded_server):
    client = SGLangClient(threaded_server, max_retries=0)
    answers = []

    async def call_ten():
        answers.extend(await several(client, 10))

    threads = [threading.Thread(target=lambda: asyncio.run(call_ten())) for _ in range(4)]
    run_all(threads)
    assert answers == [generation()] * 40


@pytest.fixture
def unwarned(small_heap, caplog):
    """A block after which nothing is left that warns when it is collected, and nothing was logged."""

    @contextlib.contextmanager
    def check():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
            gc.collect()
        assert [str(warning.message) for warning in caught] == []
        assert caplog.records == []

    return check


def test_connections_of_loops_that_ended_leave_no_warnings(threaded_server, unwarned):
    client = SGLangClient(threaded_server, max_retries=0)
    with unwarned():
        asyncio.run(client.generate([1]))
        asyncio.run(client.generate([1]))
        del client


def test_unclosed_client_leaves_no_warnings(threaded_server, unwarned):
    async def use_and_lose():
        await SGLangClient(threaded_server, max_retries=0).generate([1])
        cycle = [SGLangClient(threaded_server, max_retries=0)]
        await cycle[0].generate([1])
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
        gc.collect()

    with unwarned():
        asyncio.run(use_and_lose())


def test_connections_of_a_closed_loop_are_dropped(threaded_server, small_heap, caplog):
    client = SGLangClient(threaded_server, max_retries=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop = asyncio.new_event_loop()
        loop.run_until_complete(client.generate([1]))
        loop.close()
        assert asyncio.run(client.generate([1])) == generation()
        gc.collect()
    told = [str(warning.message) for warning in caught]
    assert [one for one in told if "nclosed client" in one or "nclosed connector" in one] == []
    assert caplog.records == []


FORKING = """
import asyncio, gc, os, sys
from strands_sglang.client.client import SGLangClient

async def use():
    async with client:
        await client.generate([2])

for in_child in ("", "asyncio.run(client.close())", "asyncio.run(use())", "client = None; gc.collect()"):
    client, loop = SGLangClient(sys.argv[1], max_retries=0, abort_grace=0), asyncio.new_event_loop()
    loop.run_until_complete(client.generate([1]))
    if os.fork() == 0:
        exec(in_child)
        sys.exit()
    assert os.wait()[1] == 0, in_child
    loop.run_until_complete(asyncio.wait_for(client.generate([1]), 10))
    loop.run_until_complete(client.close())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forked processes")
async def test_a_forked_process_leaves_its_parents_connections_alone():
    async with RawServer(answer) as server:
        command = (sys.executable, "-c", FORKING, server.base_url)
        process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
        _, errors = await process.communicate()
    assert process.returncode == 0 and b"nclosed" not in errors, errors.decode()
    connections = {1: set(), 2: set()}  # by the prompt of the process
    for request in server.requests:
        connections[request.body["input_ids"][0]].add(request.writer)
    of_parent, of_child = connections.values()
    assert len(of_child) == 1 and of_parent.isdisjoint(of_child)


async def test_a_forked_process_leaves_its_parents_transport_alone(monkeypatch):
    closed = []
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=generation()))
    monkeypatch.setattr(transport, "aclose", lambda: closed.append(1))
    client = SGLangClient(BASE_URL, transport=transport)
    monkeypatch.setattr("os.getpid", lambda: -1)
    await client.close()
    assert closed == []


def test_closing_a_client_closes_other_threads_connections(threaded_server):
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
    headers = {"Authorization": "Bearer a"}
    client = get_client("http://shared:1", timeout=5, headers=headers)
    assert get_client("http://shared:1/", timeout=5, max_retries=60, headers={**headers}) is client
    assert get_client("http://shared:1", timeout=6, headers=headers) is not client
    assert get_client("http://shared:1", timeout=5, headers={"Authorization": "Bearer b"}) is not client
    assert get_client("http://shared:2", timeout=5, headers=headers) is not client
    assert client.timeout == 5


def test_the_same_slime_arguments_give_the_same_client():
    args = {"sglang_router_ip": "shared", "sglang_router_port": 3, "sglang_server_concurrency": 4}
    client = get_client_from_slime_args(Namespace(**args))
    assert get_client_from_slime_args(Namespace(**args)) is client
    assert get_client_from_slime_args(Namespace(**args), timeout=300.0) is not client
    assert (client.base_url, client.max_connections) == ("http://shared:3", 4)


def test_unhashable_settings_are_rejected():
    with pytest.raises(ValueError, match="hashable"):
        get_client("http://shared:1", timeout=[])
    with pytest.raises(TypeError, match="nonsense"):
        get_client("http://shared:1", nonsense=1)


@pytest.fixture
def loads(monkeypatch):
    """The paths that transformers had to load; "broken" fails."""
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
    run_all(threads)
    assert len(set(map(id, found))) == 1
    assert get_tokenizer(str(tmp_path)) is found[0]
    assert loads == [(str(tmp_path), {"trust_remote_code": False})]
    assert get_tokenizer(tmp_path, use_fast=False) is not found[0]


def test_failed_tokenizer_is_loaded_again(tmp_path, loads):
    (tmp_path / "broken").mkdir()
    for _ in range(2):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            get_tokenizer(tmp_path / "broken")
    assert len(loads) == 2


@pytest.mark.parametrize("path", ["{tmp}/missing", "./missing", "~/no-such-model", "a/b/c", "missing/"])
def test_missing_path_is_reported_as_such(tmp_path, loads, path):
    """transformers takes minutes for this, or reports an invalid name."""
    path = path.format(tmp=tmp_path)
    with pytest.raises(FileNotFoundError, match=f"^{path}: no such folder$"):
        get_tokenizer(path)
    (tmp_path / "file.json").touch()
    with pytest.raises(NotADirectoryError, match="is a file, not a model"):
        get_tokenizer(tmp_path / "file.json")
    assert not loads


@pytest.mark.parametrize("is_cached", [False, True])
def test_unreachable_hub_is_an_error_without_a_cached_model(tmp_path, loads, monkeypatch, is_cached):
    """transformers takes minutes for this, or reports an invalid name."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    if is_cached:
        (tmp_path / "models--foo--bar").mkdir()
        get_tokenizer("foo/bar")
    else:
        with pytest.raises(ConnectionError, match="foo/bar: .*http://127.0.0.1:9 is unreachable"):
            get_tokenizer("foo/bar")
    assert bool(loads) is is_cached


def test_equal_servers_give_the_same_client_in_any_spelling():
    both = get_client(["http://a:1", "http://b:1/"])
    assert both is get_client(("http://a:1/", "http://b:1"))
    assert (both.base_url, both.base_urls) == ("http://a:1", ("http://a:1", "http://b:1"))
    assert get_client(["http://a:1"]) is get_client("http://a:1")
    assert get_client("http://a:1") is not both


async def test_a_client_that_is_dropped_unclosed_closes_its_connections(small_heap):
    closed = asyncio.Event()

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request):
            return httpx.Response(200, json=generation())

        async def aclose(self):
            closed.set()

    client = SGLangClient("http://x", transport=Transport)
    await client.generate([1], {})
    del client
    gc.collect()
    await asyncio.wait_for(closed.wait(), 10)


async def test_an_outage_tells_in_how_long_a_call_is_given_up(monkeypatch):
    monkeypatch.setattr("strands_sglang.client.retries.MAX_DELAY_S", 0.2)
    network = network_of(gone=scripted())
    client = client_in(network, "gone", max_retries=8, retry_delay=0.1)
    await client.generate([1])  # it has answered, so only the number of attempts ends a call
    plug(network, gone=None)
    call = asyncio.create_task(client.generate([1]))
    began = time.monotonic()
    told = []
    while not call.done():
        await asyncio.sleep(0.01)
        told += [time.monotonic() - began + one.seconds_left for one in outages() if one.base_url == client.base_url]
    with pytest.raises(SGLangConnectionError) as caught:
        await call
    ended = time.monotonic() - began
    told = [one for one in told if one < math.inf]
    assert told and all(one == pytest.approx(ended, rel=0.5) for one in told)
    call = asyncio.create_task(client.generate([1]))
    found = []
    while not call.done():
        await asyncio.sleep(0.01)
        found += [one.waiting for one in outages() if one.base_url == client.base_url]
    assert set(found) == {1}  # the first call, which the error keeps alive, waits no more
    assert isinstance(call.exception(), type(caught.value))
