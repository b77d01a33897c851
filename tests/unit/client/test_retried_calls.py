from __future__ import annotations

import asyncio
import logging

import httpx
import pytest

from strands_sglang.exceptions import (
    SGLangConnectionError,
    SGLangContextLengthError,
    SGLangDecodingError,
    SGLangHTTPError,
    SGLangThrottledError,
)
from support.fake_server import BASE_URL, OK, FakeServer
from support.generations import generation


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
