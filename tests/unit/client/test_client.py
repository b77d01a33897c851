from __future__ import annotations

import asyncio
import subprocess
import sys
from argparse import Namespace

import httpx
import pytest
import respx

from strands_sglang.client.client import SGLangClient
from strands_sglang.exceptions import (
    SGLangDecodingError,
    SGLangHTTPError,
)
from support.fake_server import BASE_URL, OK, FakeServer
from support.generations import generation


async def test_the_servers_object_comes_back_as_it_was_sent():
    body = {**generation(), "a_key_of_tomorrow": [1]}
    assert await FakeServer(httpx.Response(200, json=body)).client().generate([1, 2]) == body


async def test_an_aborted_generation_comes_back_like_any_other():
    aborted = generation([], finish="abort")
    assert await FakeServer(httpx.Response(200, json=aborted)).client().generate([1]) == aborted


async def test_fields_and_sampling_parameters_are_sent_as_given_and_nothing_streams():
    server = FakeServer()
    await server.client().generate(
        [1, 2], {"temperature": 0.5, "logit_bias": {5: 1.0}}, return_logprob=True, stream=False, some_field={"a": 1}
    )
    [body] = server.bodies()
    assert len(body.pop("rid")) == 32
    assert body == {
        "input_ids": [1, 2],
        "sampling_params": {"temperature": 0.5, "logit_bias": {"5": 1.0}},
        "return_logprob": True,
        "some_field": {"a": 1},
        "stream": False,
    }


async def test_prompt_logprobs_are_not_asked_for_unless_the_caller_does():
    server = FakeServer()
    await server.client().generate([1], return_logprob=True)
    await server.client().generate([1], return_logprob=True, logprob_start_len=0)
    assert [body.get("logprob_start_len") for body in server.bodies()] == [None, 0]


async def test_every_attempt_has_its_own_request_id_with_the_callers_as_its_prefix():
    server = FakeServer(httpx.Response(500), httpx.Response(500), OK)
    await server.client().generate([1], rid="episode-7")
    rids = [body["rid"] for body in server.bodies()]
    assert len(set(rids)) == 3
    assert all(rid.startswith("episode-7-") for rid in rids)


async def test_what_the_caller_changes_while_it_waits_is_not_sent():
    params, ids = {"temperature": 1.0}, [1, 2]

    async def change(_):
        params["temperature"] = 0.0
        ids.append(3)
        return httpx.Response(500)

    server = FakeServer(change, OK)
    await server.client().generate(ids, params)
    assert [(body["input_ids"], body["sampling_params"]) for body in server.bodies()] == [
        ([1, 2], {"temperature": 1.0})
    ] * 2


@pytest.mark.parametrize("bad", [[], [1, True], [1.0], ["1"], [None], [-1], [1, 100], "12", None, [[1]], [2**70]])
async def test_a_bad_prompt_is_refused_before_anything_is_sent(bad):
    server = FakeServer()
    with pytest.raises(ValueError, match="input_ids"):
        await server.client(vocab_size=100).generate(bad)
    assert server.asked == []


async def test_the_vocabulary_of_a_call_wins_over_the_clients():
    client = FakeServer().client(vocab_size=10)
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
    ],
)
async def test_requests_that_cannot_have_one_answer_are_refused(arguments, said):
    server = FakeServer()
    with pytest.raises(ValueError, match=said):
        await server.client().generate([1], **arguments)
    assert server.asked == []


async def test_respx_can_stand_in_for_the_server():
    with respx.mock(using="httpx") as router:
        route = router.post(f"{BASE_URL}/generate").respond(json=generation())
        async with SGLangClient(BASE_URL) as client:
            assert (await client.generate([1]))["output_ids"] == [7, 2]
    assert route.call_count == 1


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (404, False), (500, False)])
async def test_health_is_the_status_of_the_health_endpoint(status, healthy):
    assert await FakeServer(paths={"/health": httpx.Response(status)}).client().health() is healthy


async def test_health_of_a_server_that_cannot_be_reached_is_false():
    async def refuse(_):
        raise httpx.ConnectError("refused")

    assert await SGLangClient(BASE_URL, transport=httpx.MockTransport(refuse)).health() is False


async def test_model_info_falls_back_to_its_older_name():
    info = {"model_path": "m"}
    new = FakeServer(paths={"/model_info": httpx.Response(200, json=info)})
    old = FakeServer(paths={"/get_model_info": httpx.Response(200, json=info)})
    assert await new.client().model_info() == await old.client().get_model_info() == info
    with pytest.raises(SGLangHTTPError, match="get_model_info"):
        await FakeServer().client().model_info()


def models(length):
    return httpx.Response(200, json={"object": "list", "data": [{"id": "m", "max_model_len": length}]})


async def test_the_context_length_is_asked_for_once():
    server = FakeServer(paths={"/v1/models": models(512)})
    client = server.client()
    assert await asyncio.gather(*(client.context_length() for _ in range(20))) == [512] * 20
    assert await client.context_length() == 512
    assert len(server.bodies("/v1/models")) == 1


@pytest.mark.parametrize(
    "answer", [httpx.Response(404), httpx.Response(200, json={"data": []}), models(None), models("512"), models(0)]
)
async def test_an_unknown_context_length_is_none_and_asked_for_again(answer):
    server = FakeServer(paths={"/v1/models": answer})
    client = server.client()
    assert await client.context_length() is None
    server.paths["/v1/models"] = models(512)
    assert await client.context_length() == 512


async def test_a_failure_to_ask_for_the_context_length_is_not_remembered():
    server = FakeServer(paths={"/v1/models": httpx.Response(500)})
    client = server.client(max_retries=1)
    with pytest.raises(SGLangHTTPError):
        await client.context_length()
    server.paths["/v1/models"] = models(512)
    assert await client.context_length() == 512


async def test_a_caller_that_stops_waiting_for_the_context_length_does_not_take_it_from_the_others():
    async def respond(_):
        arrived.set()
        await go_on.wait()
        return models(512)

    arrived, go_on = asyncio.Event(), asyncio.Event()
    client = SGLangClient(BASE_URL, transport=httpx.MockTransport(respond))
    first, second = (asyncio.create_task(client.context_length()) for _ in range(2))
    await arrived.wait()
    first.cancel()
    go_on.set()
    assert await second == 512


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_a_server_that_cannot_tokenize_is_asked_once_and_the_answer_is_none(status):
    server = FakeServer(paths={"/tokenize": httpx.Response(status, json={"message": "no tokenizer"})})
    assert await server.client(max_retries=5).tokenize("hello") is None
    assert len(server.bodies("/tokenize")) == 1


async def test_tokenize_asks_for_no_special_tokens_and_is_none_where_there_is_no_such_endpoint():
    server = FakeServer(paths={"/tokenize": httpx.Response(200, json={"tokens": [1, 2], "count": 2})})
    assert await server.client().tokenize("hello") == [1, 2]
    assert server.bodies("/tokenize") == [{"prompt": "hello", "add_special_tokens": False}]
    assert await FakeServer().client().tokenize("hello") is None
    with pytest.raises(SGLangDecodingError, match="tokens"):
        await FakeServer(paths={"/tokenize": httpx.Response(200, json={})}).client().tokenize("hello")


def test_settings_can_be_read_back_and_the_address_is_in_the_repr():
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
def test_a_setting_that_cannot_work_is_refused_by_name(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        SGLangClient("http://h:1", **setting)


def test_a_client_of_slimes_router_has_its_address_and_its_concurrency():
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
        made.append(httpx.MockTransport(FakeServer()))
        return made[-1]

    client = SGLangClient(BASE_URL, transport=make)
    await client.generate([1])
    await client.generate([1])
    assert len(made) == 1
    await asyncio.to_thread(lambda: asyncio.run(client.generate([1])))
    assert len(made) == 2


def test_importing_the_client_loads_neither_aiohttp_nor_transformers():
    code = (
        "import strands_sglang.client, sys; print([m for m in ('httpx_aiohttp', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


async def test_headers_go_with_every_request():
    seen = []

    async def answer(request):
        seen.append(f"{request.url.path} {request.headers.get('authorization')}")
        return httpx.Response(200, json={"tokens": [1], "count": 1})

    headers = {"Authorization": "Bearer secret"}
    client = SGLangClient("http://x", transport=httpx.MockTransport(answer), headers=headers)
    await client.tokenize("hi")
    await client.abort("some-id")
    assert seen == ["/tokenize Bearer secret", "/abort_request Bearer secret"]
    assert "secret" not in repr(client)
