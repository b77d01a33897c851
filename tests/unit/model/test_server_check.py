"""None"""

import asyncio
import base64
import copy
import threading
from array import array

import httpx
import pytest

from strands_sglang import SGLangClient, SGLangConnectionError, SGLangDecodingError, SGLangModel, TokenizerMismatchError
from strands_sglang.model.call import check_answer
from strands_sglang.model.config import ModelConfig
from strands_sglang.protocol.generation import Generation
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


# --- several servers ---


class Pair:
    """Two servers behind one client; either may be down."""

    def __init__(self, **servers):
        self.servers, self.down, self.seen = servers, set(), []

    async def __call__(self, request):
        self.seen.append((request.url.host, request.url.path))
        if request.url.host in self.down:
            raise httpx.ConnectError("refused")
        return await self.servers[request.url.host].transport().handle_async_request(request)

    def client(self, **settings):
        urls = [f"http://{host}" for host in self.servers]
        settings = {"max_retries": 5, "retry_delay": 0.0, **settings}
        return SGLangClient(urls, transport=httpx.MockTransport(self), **settings)


async def test_every_one_of_several_servers_is_asked_once(chatml_tokenizer):
    servers = {name: ScriptedSGLang(chatml_tokenizer, lambda request: "ok") for name in ("one", "two")}
    pair = Pair(**servers)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=pair.client())
    for _ in range(4):
        await make_agent(model).invoke_async("hi")
    assert sorted(host for host, path in pair.seen if path == "/tokenize") == ["one", "two"]


async def test_one_server_with_another_tokenizer_is_an_error_that_names_it(chatml_tokenizer):
    other = copy.deepcopy(chatml_tokenizer)
    other.add_tokens(["<observation>"])
    pair = Pair(one=ScriptedSGLang(other, ["ok"]), two=ScriptedSGLang(chatml_tokenizer, ["ok"]))
    model = SGLangModel(tokenizer=other, client=pair.client())
    with pytest.raises(TokenizerMismatchError, match="http://two"):
        await make_agent(model).invoke_async("hi")
    assert not any(server.requests for server in pair.servers.values())


async def test_the_shortest_context_of_several_servers_counts(chatml_tokenizer):
    short = ScriptedSGLang(chatml_tokenizer, lambda request: "ok", context_length=500)
    long = ScriptedSGLang(chatml_tokenizer, lambda request: "ok", context_length=900)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=Pair(one=long, two=short).client())
    await make_agent(model).invoke_async("hi")
    [request] = [*short.requests, *long.requests]
    assert request.sampling_params["max_new_tokens"] + len(request.input_ids) == 500


async def test_a_server_that_is_down_is_asked_when_it_gets_requests(chatml_tokenizer, monkeypatch):
    monkeypatch.setattr("strands_sglang.client.balancer.FIRST_PROBE_S", 0.0)
    monkeypatch.setattr("strands_sglang.client.balancer.MAX_PROBE_S", 0.0)
    other = copy.deepcopy(chatml_tokenizer)
    other.add_tokens(["<observation>"])
    good = ScriptedSGLang(other, lambda request: "ok")
    pair = Pair(one=good, two=ScriptedSGLang(chatml_tokenizer, lambda request: "wrong"))
    pair.down = {"two"}
    model = SGLangModel(tokenizer=other, client=pair.client())
    for _ in range(3):
        assert str(await make_agent(model).invoke_async("hi")).strip() == "ok"
    pair.down = set()
    with pytest.raises(TokenizerMismatchError, match="http://two"):
        for _ in range(100):
            await make_agent(model).invoke_async("hi")


async def test_with_all_servers_down_the_check_fails_as_for_one(chatml_tokenizer):
    pair = Pair(**{name: ScriptedSGLang(chatml_tokenizer, ["ok"]) for name in ("one", "two")})
    pair.down = {"one", "two"}
    model = SGLangModel(tokenizer=chatml_tokenizer, client=pair.client(max_retries=2))
    with pytest.raises(SGLangConnectionError, match="could not connect"):
        await make_agent(model).invoke_async("hi")
    pair.down = set()
    assert str(await make_agent(model).invoke_async("hi")).strip() == "ok"


async def test_a_cancelled_agent_does_not_wait_for_the_check_of_a_server_that_is_down(chatml_tokenizer):
    pair = Pair(one=ScriptedSGLang(chatml_tokenizer, ["never"]))
    pair.down = {"one"}
    model = SGLangModel(tokenizer=chatml_tokenizer, client=pair.client(retry_delay=8.0))
    signal = threading.Event()

    async def ask():
        messages = [{"role": "user", "content": [{"text": "hi"}]}]
        return [event async for event in model.stream(messages, cancel_signal=signal)]

    task = asyncio.create_task(ask())
    while not pair.seen:
        await asyncio.sleep(0)
    signal.set()
    events = await asyncio.wait_for(task, 5)
    assert events[-1] == {"messageStop": {"stopReason": "cancelled"}}


# --- test_request ---


ASKED = ModelConfig(return_routed_experts=True)


def generation(*, prompt_tokens=5, rows=8, width=6, finish_type="stop", **fields):
    experts = base64.b64encode(bytes(4 * rows * width)).decode()
    fields = {"routed_experts": experts, **fields}
    return Generation(array("i", [7, 8, 9, 2]), None, finish_type, prompt_tokens=prompt_tokens, **fields)


def test_routed_experts_that_fit_are_taken():
    check_answer(generation(), ASKED, 5, 5)
    check_answer(generation(prompt_tokens=15, rows=18), ASKED, 15, 6, parent=generation())


def test_routed_experts_that_are_missing_are_an_error():
    with pytest.raises(SGLangDecodingError, match="not returned.*--enable-return-routed-experts.*router drops"):
        check_answer(generation(routed_experts=None), ASKED, 5, 5)


@pytest.mark.parametrize("given", [{}, {"return_routed_experts": False}, {"return_routed_experts": None}])
def test_routed_experts_that_nobody_asked_for_may_be_missing(given):
    config, _ = ModelConfig.read(given)
    check_answer(generation(routed_experts=None), config, 5, 5)


def test_an_aborted_request_may_lack_them():
    check_answer(generation(routed_experts=None, finish_type="abort"), ASKED, 5, 5)


def test_another_number_of_ids_per_token_than_in_the_turn_before_is_an_error():
    with pytest.raises(SGLangDecodingError, match="3 ids .* per token and 6 for the turn before.* 18 tokens"):
        check_answer(generation(prompt_tokens=15, rows=18, width=3), ASKED, 15, 6, parent=generation())


@pytest.mark.parametrize("config", [ASKED, ModelConfig()])
def test_a_turn_before_that_told_nothing_is_no_measure(config):
    check_answer(generation(), config, 5, 5, parent=generation(routed_experts=None))


@pytest.mark.parametrize("details", [None, {"device": 4, "host": 0}, {"device": 4, "host": 0, "storage": 0}])
def test_rows_of_tokens_from_the_first_tier_of_the_cache_are_taken(details):
    check_answer(generation(meta_info={"cached_tokens_details": details}), ASKED, 5, 5)


@pytest.mark.parametrize("tiers", [{"host": 4}, {"host": 0, "storage": 4, "storage_backend": "file"}])
def test_rows_of_tokens_from_other_tiers_of_the_cache_are_an_error(tiers):
    answer = generation(meta_info={"cached_tokens_details": {"device": 0, **tiers}})
    with pytest.raises(SGLangDecodingError, match="tiers.*: 4.*--enable-hierarchical-cache"):
        check_answer(answer, ASKED, 5, 5)
    check_answer(answer, ModelConfig(), 5, 5)
