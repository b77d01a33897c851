import asyncio
import copy

import httpx
import pytest

from strands_sglang import SGLangClient, SGLangConnectionError, SGLangModel, TokenizerMismatchError
from strands_sglang.testing import ScriptedSGLang
from support.agents import make_agent


def behind(server, seen, *, missing=()):
    """A client of the server that notes every path, through something that lacks some of them."""

    async def pass_on(request):
        seen.append(request.url.path)
        if request.url.path in missing:
            return httpx.Response(404, json={"detail": "Not Found"})
        return await server.transport().handle_async_request(request)

    return SGLangClient("http://x", transport=httpx.MockTransport(pass_on), max_retries=0)


async def test_many_models_that_start_together_ask_the_server_once(chatml_tokenizer):
    seen = []
    client = behind(ScriptedSGLang(chatml_tokenizer, lambda request: "ok"), seen)
    models = [SGLangModel(tokenizer=chatml_tokenizer, client=client) for _ in range(20)]
    await asyncio.gather(*(make_agent(model).invoke_async("hi") for model in models))
    assert (seen.count("/tokenize"), seen.count("/v1/models"), seen.count("/generate")) == (1, 1, 20)


async def test_behind_a_router_the_match_is_unproven_and_said_so_once(chatml_tokenizer, caplog):
    seen = []
    server = ScriptedSGLang(chatml_tokenizer, lambda request: "ok")
    client = behind(server, seen, missing=("/tokenize", "/v1/models"))
    for _ in range(3):
        await make_agent(SGLangModel(tokenizer=chatml_tokenizer, client=client)).invoke_async("hi")
    assert sum("unproven" in record.getMessage() for record in caplog.records) == 1
    assert sum("context_window_limit" in record.getMessage() for record in caplog.records) == 1
    assert "max_new_tokens" not in server.requests[0].sampling_params


async def test_a_tokenizer_that_lacks_only_a_mark_is_noticed(chatml_tokenizer):
    other = copy.deepcopy(chatml_tokenizer)
    other.add_tokens(["<observation>"])
    server = ScriptedSGLang(chatml_tokenizer, ["never"])
    with pytest.raises(TokenizerMismatchError, match="<observation>"):
        await make_agent(SGLangModel(tokenizer=other, client=server.client())).invoke_async("hi")
    assert server.requests == []


async def test_a_failed_check_is_made_again(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, ["ok"])
    down = True

    async def pass_on(request):
        if down:
            raise httpx.ConnectError("refused")
        return await server.transport().handle_async_request(request)

    client = SGLangClient("http://x", transport=httpx.MockTransport(pass_on), max_retries=0)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=client)
    with pytest.raises(SGLangConnectionError):
        await make_agent(model).invoke_async("hi")
    down = False
    assert str(await make_agent(model).invoke_async("hi")).strip() == "ok"
