"""`SGLangClient` against a real SGLang server."""

import asyncio
import threading

import pytest

from strands_sglang.client.client import SGLangClient
from strands_sglang.exceptions import SGLangConnectionError, SGLangContextLengthError, SGLangHTTPError
from support.real_servers import at_best, running_requests

PROMPT = [50, 60, 70, 80, 90]
# Longer than any test waits: on a busy machine a short one is over before anyone sees it run.
ENDLESS = {"max_new_tokens": 3500, "ignore_eos": True}


@pytest.fixture
async def client(tiny_server):
    async with SGLangClient(tiny_server.base_url, max_retries=2, retry_delay=0.1, abort_grace=60.0) as client:
        yield client


async def seconds_until(base_url, running):
    """Return the seconds until the server has this many requests."""
    clock = asyncio.get_running_loop().time
    started = clock()
    while await running_requests(base_url) != running:
        await asyncio.sleep(0.01)  # polling the server's own word, with pytest's timeout as the limit
    return clock() - started


async def test_generation_has_the_requested_ids_and_logprobs(client):
    params = {"max_new_tokens": 4, "ignore_eos": True}
    response = await client.generate(PROMPT, params, return_logprob=True, rid="mine")
    meta_info = response["meta_info"]
    assert len(response["output_ids"]) == 4
    assert [token_id for _, token_id, _ in meta_info["output_token_logprobs"]] == response["output_ids"]
    assert meta_info["finish_reason"] == {"type": "length", "length": 4}
    assert meta_info["prompt_tokens"] == len(PROMPT)
    assert meta_info["id"].startswith("mine-")


async def test_prompt_without_logprobs_comes_from_the_cache(client):
    prompt = [*PROMPT, *range(100, 140)]
    await client.generate(prompt, {"max_new_tokens": 1}, return_logprob=True)
    again = await client.generate(prompt, {"max_new_tokens": 1}, return_logprob=True)
    assert again["meta_info"]["cached_tokens"] >= len(prompt) - 1


async def test_the_server_tells_its_health_its_model_and_its_context(client):
    assert await client.health() is True
    assert (await client.model_info())["is_generation"] is True
    assert (await client.context_length() or 0) > 0
    tokens = await client.tokenize("hello world")
    assert tokens and all(isinstance(token, int) for token in tokens)


@pytest.mark.parametrize(("prompt_beyond", "max_new_tokens"), [(88, 1), (-4, 1), (-12, 100)])
async def test_every_way_to_fill_the_context_is_told_as_such(client, prompt_beyond, max_new_tokens):
    context_length = await client.context_length()
    assert context_length is not None
    with pytest.raises(SGLangContextLengthError) as caught:
        await client.generate([5] * (context_length + prompt_beyond), {"max_new_tokens": max_new_tokens})
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"bogus": 1}, "unknown field `bogus`"),
        ({"top_p": 2}, "top_p"),
        ({"json_schema": "{", "regex": "a"}, "json_schema"),
    ],
)
async def test_invalid_sampling_parameters_have_the_servers_message(client, params, said):
    with pytest.raises(SGLangHTTPError, match=said) as caught:
        await client.generate(PROMPT, params)
    assert caught.value.status == 400
    assert not isinstance(caught.value, SGLangContextLengthError)


async def test_a_wrong_path_is_said_to_be_no_sglang_server(tiny_server):
    async with SGLangClient(f"{tiny_server.base_url}/behind", max_retries=0) as client:
        with pytest.raises(SGLangHTTPError, match="not an SGLang server"):
            await client.generate(PROMPT)


async def test_cancelled_request_leaves_the_server_idle_in_a_second(client):
    async def attempt():
        task = asyncio.create_task(client.generate(PROMPT, ENDLESS))
        await seconds_until(client.base_url, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await seconds_until(client.base_url, 0)

    assert await at_best(attempt, goal=1.0) < 1.0


async def test_timed_out_request_leaves_the_server_idle_in_a_second(tiny_server):
    async with SGLangClient(tiny_server.base_url, timeout=0.3, retry_delay=0.0) as client:

        async def attempt():
            with pytest.raises(SGLangConnectionError, match="no response in time"):
                await client.generate(PROMPT, ENDLESS)
            return await seconds_until(client.base_url, 0)

        assert await at_best(attempt, goal=1.0) < 1.0


async def test_closing_the_client_returns_partial_answers(client):
    task = asyncio.create_task(client.generate(PROMPT, ENDLESS))
    await seconds_until(client.base_url, 1)
    await client.close()
    response = await task
    assert response["meta_info"]["finish_reason"]["type"] == "abort"
    await seconds_until(client.base_url, 0)


def test_client_serves_consecutive_loops_and_threads(tiny_server):
    client = SGLangClient(tiny_server.base_url, max_retries=0)
    lengths = []

    async def ask():
        responses = await asyncio.gather(
            *(client.generate(PROMPT, {"max_new_tokens": 2, "ignore_eos": True}) for _ in range(3))
        )
        lengths.extend(len(response["output_ids"]) for response in responses)

    asyncio.run(ask())
    asyncio.run(ask())
    threads = [threading.Thread(target=lambda: asyncio.run(ask())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == [2] * 12
