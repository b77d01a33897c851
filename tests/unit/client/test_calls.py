"""A call of the client: what is sent, what is read, what is tried again, and when it ends."""

import asyncio
import json
import logging
import subprocess
import sys
import time
from argparse import Namespace
from email.utils import formatdate

import anyio
import httpx
import pytest
import respx
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang.client.cancellation import Cancellation
from strands_sglang.client.client import SGLangClient, normalize_base_url, slime_client_arguments
from strands_sglang.client.retries import MAX_DELAY_S, RetryPolicy, retry_after_seconds
from strands_sglang.exceptions import (
    SGLangConnectionError,
    SGLangContextLengthError,
    SGLangDeadlineError,
    SGLangDecodingError,
    SGLangHTTPError,
    SGLangThrottledError,
)
from support.fake_server import BASE_URL, OK, FakeServer, generation, never


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


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 599])
async def test_statuses_that_may_pass_are_tried_again(status):
    server = FakeServer(httpx.Response(status), OK)
    assert await server.client().generate([1]) == generation()
    assert len(server.bodies()) == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 422, 501])
async def test_statuses_that_stay_are_not_tried_again(status):
    server = FakeServer(httpx.Response(status, json={"error": {"message": "no"}}))
    with pytest.raises(SGLangHTTPError) as caught:
        await server.client(max_retries=60).generate([1])
    assert caught.value.status == status
    assert len(server.bodies()) == 1


async def test_retries_end_and_the_error_says_how_many_there_were():
    server = FakeServer(httpx.Response(500, text="boom"))
    with pytest.raises(SGLangHTTPError, match=r"POST http://sglang.test:30000/generate: HTTP 500: boom .*4 attempts"):
        await server.client(max_retries=3).generate([1])
    assert len(server.bodies()) == 4


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_is_told_apart_once_retries_are_over(status):
    server = FakeServer(httpx.Response(status, json={"object": "error", "message": "The request queue is full."}))
    with pytest.raises(SGLangThrottledError, match="queue is full") as caught:
        await server.client(max_retries=0).generate([1])
    assert caught.value.status == status
    assert len(server.bodies()) == 1


async def test_a_retry_waits_as_long_as_the_server_asks():
    server = FakeServer(httpx.Response(503, headers={"retry-after": "0.2"}), OK)
    started = asyncio.get_running_loop().time()
    await server.client().generate([1])
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
async def test_an_answer_that_is_no_generation_is_tried_again(body, said):
    server = FakeServer(httpx.Response(200, content=body), OK)
    assert await server.client().generate([1]) == generation()


@pytest.mark.parametrize(("body", "said"), UNDECODABLE.values(), ids=UNDECODABLE.keys())
async def test_a_server_that_never_gives_a_generation_is_given_up_soon_and_its_answer_shown(body, said):
    server = FakeServer(httpx.Response(200, content=body))
    with pytest.raises(SGLangDecodingError, match="is this an SGLang server") as caught:
        await server.client(max_retries=60).generate([1])
    assert said in str(caught.value)
    assert "http://sglang.test:30000/generate" in str(caught.value)
    assert len(server.bodies()) == 4


async def test_a_server_that_did_give_generations_gets_all_retries():
    server = FakeServer(OK, httpx.Response(200, content=b"?"))
    client = server.client(max_retries=9)
    await client.generate([1])
    with pytest.raises(SGLangDecodingError):
        await client.generate([1])
    assert len(server.bodies()) == 1 + 10


@pytest.mark.parametrize("body", [body for body, _ in list(UNDECODABLE.values())[2:]])
async def test_whole_answers_that_are_no_generations_are_given_up_soon_by_whatever_server(body):
    """A15 (p9): each of them costs a generation, and the next one is the same."""
    server = FakeServer(OK, httpx.Response(200, content=body))
    client = server.client(max_retries=60)
    await client.generate([1])
    with pytest.raises(SGLangDecodingError, match="given up after 4 attempts"):
        await client.generate([1])
    assert len(server.bodies()) == 1 + 4


async def test_a_broken_connection_is_aborted_on_the_server_before_the_next_attempt():
    server = FakeServer(httpx.ReadError("reset"), OK)
    await server.client().generate([1])
    first, second = server.bodies()
    assert [path for path, _ in server.asked] == ["/generate", "/abort_request", "/generate"]
    assert server.bodies("/abort_request") == [{"rid": first["rid"]}]
    assert second["rid"] != first["rid"]


async def test_a_request_that_never_reached_the_server_is_not_aborted():
    server = FakeServer(httpx.ConnectError("refused"), httpx.ConnectTimeout("slow"), OK)
    await server.client().generate([1])
    assert [path for path, _ in server.asked] == ["/generate"] * 3


async def test_a_server_that_was_never_there_is_given_up_after_a_while_whatever_the_retries():
    server = FakeServer(httpx.ConnectError("refused"))
    with pytest.raises(SGLangConnectionError, match="could not connect.*no server has ever answered there"):
        await server.client(max_retries=10**9, unreachable_after=0.05).generate([1])


async def test_a_server_that_was_there_before_gets_all_retries():
    server = FakeServer(OK, httpx.ConnectError("refused"))
    client = server.client(max_retries=7, unreachable_after=0.0)
    await client.generate([1])
    with pytest.raises(SGLangConnectionError, match="8 attempts") as caught:
        await client.generate([1])
    assert "ever answered" not in str(caught.value)


async def test_an_error_of_the_transport_itself_is_not_disguised():
    server = FakeServer(KeyError("bug"))
    with pytest.raises(KeyError):
        await server.client().generate([1])
    assert len(server.asked) == 1


async def test_an_outage_is_a_few_log_lines_however_many_requests_meet_it(caplog):
    caplog.set_level(logging.INFO, logger="strands_sglang")
    server = FakeServer(*[httpx.Response(500)] * 200, OK)
    client = server.client(max_retries=300)
    await asyncio.gather(*(client.generate([1]) for _ in range(50)))
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("strands_sglang")]
    assert 2 <= len(messages) <= 4
    assert "failed_attempts=<1>" in messages[0] and BASE_URL in messages[0] and "HTTP 500" in messages[0]
    assert "answers again" in messages[-1]


CONTEXT_LENGTH = [
    "The input (600 tokens) is longer than the model's context length (512 tokens).",
    "Requested token count exceeds the model's maximum context length of 512 tokens. You requested 600 tokens",
    "Input length (508 tokens) exceeds the maximum allowed length (506 tokens). Use a shorter input.",
    "Multimodal prompt is too long after expanding multimodal tokens. After expanding 1 => 600 >= 506.",
    "Request a1 exceeds the maximum number of tokens: 600 > 506",
]


@pytest.mark.parametrize("message", CONTEXT_LENGTH)
async def test_every_wording_for_a_full_context_is_known(message):
    with pytest.raises(SGLangContextLengthError, match="HTTP 400") as caught:
        await FakeServer(httpx.Response(400, json={"error": {"message": message}})).client().generate([1])
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
async def test_other_errors_that_sound_like_it_are_not_a_full_context(status, message):
    with pytest.raises(SGLangHTTPError) as caught:
        await FakeServer(httpx.Response(status, json={"error": {"message": message}})).client().generate([1])
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
async def test_the_servers_words_are_found_in_every_shape_of_error(body, said):
    answer = httpx.Response(400, text=body) if isinstance(body, str) else httpx.Response(400, json=body)
    with pytest.raises(SGLangHTTPError) as caught:
        await FakeServer(answer).client().generate([1])
    assert f"POST {BASE_URL}/generate: HTTP 400: " in str(caught.value)
    assert said in str(caught.value)
    assert caught.value.body == answer.text


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_a_server_without_generate_is_said_not_to_be_sglang(status):
    with pytest.raises(SGLangHTTPError, match="not an SGLang server"):
        await FakeServer(httpx.Response(status, text="<html>nope</html>")).client().generate([1])


async def test_a_redirect_names_the_address_to_use():
    with pytest.raises(SGLangHTTPError, match="redirects to https://elsewhere"):
        await FakeServer(httpx.Response(307, headers={"location": "https://elsewhere"})).client().generate([1])


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
    assert seconds is not None and 98 <= seconds <= 100


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
def test_addresses_lose_white_space_and_slashes_at_their_ends(given, normal):
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
        ("http://", "names no host"),
        ("http://h:port", "not a URL"),
        ("http://h?a=1", "query"),
        (None, "must be a string"),
        (30000, "must be a string"),
    ],
)
def test_an_address_that_cannot_work_is_refused_with_what_to_write(given, said):
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
def test_slimes_concurrency_is_that_of_all_engines_with_any_way_to_leave_them_out(changes, connections):
    assert slime_client_arguments(slime_args(**changes))["max_connections"] == connections


@pytest.mark.parametrize(
    ("ip", "base_url"),
    [("10.0.0.1", "http://10.0.0.1:1"), ("fe80::1", "http://[fe80::1]:1"), ("[::1]", "http://[::1]:1")],
)
def test_slimes_router_address_may_be_of_either_ip_version(ip, base_url):
    assert slime_client_arguments(slime_args(sglang_router_ip=ip))["base_url"] == base_url


def test_a_router_that_has_no_address_yet_is_told_unless_one_is_given():
    with pytest.raises(ValueError, match="sglang_router_ip is None"):
        slime_client_arguments(slime_args(sglang_router_ip=None))
    assert slime_client_arguments(Namespace(), base_url="http://h:1")["base_url"] == "http://h:1"
