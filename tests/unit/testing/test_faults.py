"""Scripted faults, seen by the client in process and over a port: what is retried, and what is an error."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from strands_sglang import SGLangClient, SGLangConnectionError, SGLangHTTPError, SGLangThrottledError
from strands_sglang.testing import ScriptedAnswer, ScriptedFault, ScriptedSGLang

FAULTS = {
    "an HTTP error": (ScriptedFault(status=500), SGLangHTTPError),
    "too many requests": (ScriptedFault(status=429, headers={"Retry-After": "0"}), SGLangThrottledError),
    "a dropped connection": (ScriptedFault("drop"), SGLangConnectionError),
    "half a body": (ScriptedFault("half"), Exception),
    "garbage": (ScriptedFault("garbage", message="<html>"), Exception),
}


@pytest.fixture(params=["in process", "on a port"])
def connect(request):
    @asynccontextmanager
    async def connected(server, **settings):
        if request.param == "in process":
            async with server.client(retry_delay=0.001, **settings) as client:
                yield client
        else:
            async with server.serve() as base_url, SGLangClient(base_url, retry_delay=0.001, **settings) as client:
                yield client

    return connected


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_an_error_of_its_kind(chatml_tokenizer, connect, fault):
    scripted, kind = FAULTS[fault]
    async with connect(ScriptedSGLang(chatml_tokenizer, [scripted]), max_retries=0) as client:
        with pytest.raises(kind):
            await client.generate([1, 2, 3], {})


@pytest.mark.parametrize("fault", FAULTS)
async def test_after_a_fault_the_retry_gets_the_next_answer(chatml_tokenizer, connect, fault):
    server = ScriptedSGLang(chatml_tokenizer, [FAULTS[fault][0], "fine"])
    async with connect(server, max_retries=2) as client:
        response = await client.generate([1, 2, 3], {})
    assert response["text"] == "fine"
    assert len(server.requests) == 2
    assert server.running == []


async def test_a_late_answer_is_late_and_an_abort_ends_the_wait(chatml_tokenizer):
    server = ScriptedSGLang(
        chatml_tokenizer, [ScriptedAnswer("late", latency_s=60.0), ScriptedAnswer("soon", latency_s=0.01)]
    )
    async with server.client() as client:
        waiting = asyncio.ensure_future(client.generate([1, 2, 3], {}))
        while not server.running:
            await asyncio.sleep(0)
        assert server.update_weights("2") == server.aborted
        response = await waiting
        assert (response["meta_info"]["finish_reason"]["type"], response["output_ids"]) == ("abort", [])
        assert response["meta_info"]["weight_version"] == "default"
        assert (await client.generate([1, 2, 3], {}))["meta_info"]["weight_version"] == "2"


def test_faults_without_a_meaning_are_refused():
    with pytest.raises(ValueError, match="kind='explode' is none of"):
        ScriptedFault("explode")
    with pytest.raises(ValueError, match="status=200 is no HTTP error"):
        ScriptedFault(status=200)
