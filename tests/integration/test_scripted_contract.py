"""The scripted server against a real one: the same requests, and bodies compared key by key and type by type.

A key that only one of the two has, another JSON type, another status or another error text fails; what tells of the
server itself may be a part. Values are compared where the request determines them (lengths, finish reasons, cached
tokens); what is sampled is not.
"""

import asyncio
import uuid
from dataclasses import dataclass

import httpx
import pytest
from transformers import AutoTokenizer

from strands_sglang import local
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang

PROMPT = [11, 50, 60, 70, 80]
LONG_ANSWER = ScriptedAnswer(token_ids=[300] * 4096, finish_reason="length")

# Null on one side is right here: how a server was launched decides, not what it is.
NULL_ON_ONE_SIDE = {
    "accelerator": "null on a CPU",
    "context_length": "null unless the server was launched with one",
}


@dataclass
class Pair:
    """A real and a scripted server of the same model."""

    real: httpx.AsyncClient
    scripted: httpx.AsyncClient
    context_length: int
    max_input_length: int
    eos_token_id: int

    async def send(self, method, path, **kwargs):
        """Send the same request to both and compare status and kind of body."""
        real = await self.real.request(method, path, **kwargs)
        scripted = await self.scripted.request(method, path, **kwargs)
        assert scripted.status_code == real.status_code, f"{real.text[:500]}\n{scripted.text[:500]}"
        assert scripted.headers.get("content-type") == real.headers.get("content-type")
        return real, scripted

    async def compare(self, method, path, **kwargs):
        """Send the same request to both, compare the shapes of the JSON bodies and return them."""
        real, scripted = await self.send(method, path, **kwargs)
        found = differences(real.json(), scripted.json())
        assert not found, "\n".join(found)
        return real.json(), scripted.json()


def answer(request):
    """What the real server does below: sample the one forced token, or continue to the limit."""
    forced = [int(token_id) for token_id in request.sampling_params.get("logit_bias") or ()]
    return ScriptedAnswer(token_ids=forced * 64, finish_reason="length") if forced else LONG_ANSWER


@pytest.fixture
async def pair(tiny_server):
    tokenizer = AutoTokenizer.from_pretrained(tiny_server.model_path)
    async with httpx.AsyncClient(base_url=tiny_server.base_url, timeout=120) as real:
        context_length = (await real.get("/v1/models")).json()["data"][0]["max_model_len"]
        server = ScriptedSGLang(tokenizer, answer, context_length=context_length)
        async with httpx.AsyncClient(base_url="http://scripted", transport=server.transport()) as scripted:
            yield Pair(
                real,
                scripted,
                context_length,
                max_input_length=(await real.get("/server_info")).json()["max_req_input_len"],
                eos_token_id=tokenizer.eos_token_id,
            )


def differences(real, scripted, path=""):
    """Where two JSON values differ in keys or types, one line each."""
    if path.rsplit(".", 1)[-1] in NULL_ON_ONE_SIDE and None in (real, scripted):
        return []
    if type(real) is not type(scripted):
        return [f"{path}: real {type(real).__name__} ({str(real)[:80]}), scripted {type(scripted).__name__}"]
    if isinstance(real, dict):
        lines = [f"{path}.{key}: only in the real body" for key in real.keys() - scripted.keys()]
        lines += [f"{path}.{key}: only in the scripted body" for key in scripted.keys() - real.keys()]
        for key in real.keys() & scripted.keys():
            lines += differences(real[key], scripted[key], f"{path}.{key}")
        return lines
    if isinstance(real, list) and len(real) == len(scripted):
        return [line for i in range(len(real)) for line in differences(real[i], scripted[i], f"{path}[{i}]")]
    if isinstance(real, list) and real and scripted:
        return differences(real[-1], scripted[-1], f"{path}[-1]")
    return []


def check_lengths(body):
    """What holds for every generation, real or scripted."""
    output_ids, meta = body["output_ids"], body["meta_info"]
    assert meta["completion_tokens"] == len(output_ids)
    assert meta["weight_versions"][-1]["end"] == len(output_ids)
    finish = meta["finish_reason"]
    if finish["type"] == "length":
        assert finish["length"] == len(output_ids)
    if finish["type"] == "stop" and isinstance(finish["matched"], int):
        assert output_ids[-1] == finish["matched"]
    if "output_token_logprobs" in meta:
        assert [entry[1] for entry in meta["output_token_logprobs"]] == output_ids
        assert meta["output_token_logprobs_length"] == len(output_ids)
        assert all(isinstance(entry[0], float) for entry in meta["output_token_logprobs"])


# `extra_key` keeps a test's prompts apart from everything that a server has cached before.
def generate_body(**body):
    params = {"max_new_tokens": 4, "ignore_eos": True, **body.pop("sampling_params", {})}
    return {"input_ids": PROMPT, "extra_key": uuid.uuid4().hex, **body, "sampling_params": params}


EOS = "the model's stop token"  # replaced by its id once the model is known
GENERATIONS = {
    "plain": {},
    "a request id of its own": {"rid": "contract-1"},
    "logprobs": {"return_logprob": True},
    "all prompt logprobs": {"return_logprob": True, "logprob_start_len": 0},
    "some prompt logprobs": {"return_logprob": True, "logprob_start_len": 3},
    "no prompt logprob left": {"return_logprob": True, "logprob_start_len": 5},
    "logprob start without logprobs": {"logprob_start_len": 600},
    "nothing sampled": {"sampling_params": {"max_new_tokens": 0}},
    "nothing sampled, prompt scored": {
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    },
    "prompt ids wanted": {"return_prompt_token_ids": True},
    "routed experts of a dense model": {"return_routed_experts": True},
    "a start of routed experts without a request for them": {"routed_experts_start_len": 6},
    "an unknown key": {"bogus": 1},
    "fields that say whose a request is": {
        "session_id": "s",
        "conversation_id": "c",
        "routing_key": "k",
        "custom_labels": {"a": "b"},
        "routed_dp_rank": 0,
        "priority": 3,
    },
    "fields that change nothing here": {
        "cache_salt": "salt",
        "no_logs": True,
        "log_metrics": False,
        "require_reasoning": False,
        "return_entropy": True,
        "external_trace_header": {},
        "lora_path": None,
        "max_thinking_tokens": None,
    },
    "sampling masks": {"return_sampling_mask": True, "sampling_params": {"top_k": 5}},
    "sampling masks and logprobs under top-p": {
        "return_sampling_mask": True,
        "return_logprob": True,
        "sampling_params": {"top_k": 20, "top_p": 0.5},
    },
    "sampling masks at temperature 0": {"return_sampling_mask": True, "sampling_params": {"temperature": 0.0}},
    "sampling masks of top-k 1": {
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "selected",
        "sampling_params": {"top_k": 1},
    },
    "logprobs of all ids of the sampling masks": {
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "support",
        "sampling_params": {"top_k": 3},
    },
    "sampling masks of a stop": {
        "return_sampling_mask": True,
        "sampling_params": {"logit_bias": {EOS: 100.0}, "ignore_eos": False, "top_k": 3},
    },
    "null parameters": {"sampling_params": {"temperature": None, "stop": None}},
    "stop at the eos token": {
        "sampling_params": {"logit_bias": {EOS: 100.0}, "ignore_eos": False},
        "return_logprob": True,
    },
    "stop at the limit": {"sampling_params": {"logit_bias": {EOS: 100.0}, "ignore_eos": False, "max_new_tokens": 1}},
    "eos ignored": {"sampling_params": {"logit_bias": {EOS: 100.0}}},
    "stop token kept": {
        "sampling_params": {
            "logit_bias": {EOS: 100.0},
            "ignore_eos": False,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
    },
    "special tokens kept": {"sampling_params": {"logit_bias": {EOS: 100.0}, "skip_special_tokens": False}},
    "stop at a token of the request": {
        "sampling_params": {"logit_bias": {"50": 100.0}, "stop_token_ids": [50], "ignore_eos": False},
        "return_logprob": True,
    },
    "stop at a string": {"sampling_params": {"logit_bias": {"50": 100.0}, "stop": ["PP"], "max_new_tokens": 9}},
    "stop string kept": {
        "sampling_params": {"logit_bias": {"50": 100.0}, "stop": ["PP"], "max_new_tokens": 9, "no_stop_trim": True}
    },
    "stop at a pattern": {"sampling_params": {"logit_bias": {"50": 100.0}, "stop_regex": "P+P", "max_new_tokens": 9}},
}
# The tokens of these are forced, so everything that follows from tokens must be equal too.
FORCED = {name for name, body in GENERATIONS.items() if "logit_bias" in body.get("sampling_params", {})}


@pytest.mark.parametrize("name", GENERATIONS)
async def test_a_generation_has_the_same_shape(pair, name):
    body = generate_body(**GENERATIONS[name])
    bias = body["sampling_params"].get("logit_bias")
    if bias:
        forced = {str(pair.eos_token_id) if key is EOS else key: value for key, value in bias.items()}
        body["sampling_params"] = {**body["sampling_params"], "logit_bias": forced}
    real, scripted = await pair.compare("POST", "/generate", json=body)
    for response in (real, scripted):
        check_lengths(response)
    keys = ["prompt_tokens", "completion_tokens", "cached_tokens", "weight_versions"]
    assert {key: scripted["meta_info"][key] for key in keys} == {key: real["meta_info"][key] for key in keys}
    assert scripted["meta_info"]["finish_reason"]["type"] == real["meta_info"]["finish_reason"]["type"]
    if "input_token_logprobs" in real["meta_info"]:
        entries = [[entry[1] for entry in r["meta_info"]["input_token_logprobs"]] for r in (real, scripted)]
        assert entries[0] == entries[1]
    masks, scripted_masks = (r["meta_info"].get("output_token_sampling_mask") for r in (real, scripted))
    if masks is not None:
        for response in (real, scripted):
            rows = response["meta_info"]["output_token_sampling_mask"]
            assert all(i in row for i, row in zip(response["output_ids"], rows, strict=True))
            assert response["meta_info"]["output_token_sampling_mask_length"] == len(rows)
            assert len(response["meta_info"]["output_token_sampling_logprobs"]) == len(rows)
        if "top_p" not in body["sampling_params"]:
            assert list(map(len, masks)) == list(map(len, scripted_masks))
    if name in FORCED:
        assert (scripted["text"], scripted["output_ids"]) == (real["text"], real["output_ids"])
        assert scripted["meta_info"]["finish_reason"] == real["meta_info"]["finish_reason"]


@pytest.mark.parametrize("extra", [{}, {"return_logprob": True, "logprob_start_len": 2}])
async def test_the_prefix_cache_finds_the_same(pair, extra):
    body = generate_body(input_ids=PROMPT * 4)
    await pair.compare("POST", "/generate", json=body)
    for prompt in (PROMPT * 4, [*PROMPT * 3, 9, 9, 9], [*PROMPT * 5]):
        request = {**body, "input_ids": prompt, **extra}
        real, scripted = await pair.compare("POST", "/generate", json=request)
        # The first answer was sampled; a real one may by chance begin as the longest of these prompts continues.
        assert scripted["meta_info"]["cached_tokens"] == pytest.approx(real["meta_info"]["cached_tokens"], abs=2)


async def test_the_context_cuts_both_at_the_same_token(pair):
    if pair.max_input_length != pair.context_length - 6:
        pytest.skip("this server has less memory than its context needs")
    prompt = PROMPT[:1] * (pair.context_length - 12)
    for params in ({"max_new_tokens": 12}, {"max_new_tokens": None}, {}):
        body = {"input_ids": prompt, "extra_key": uuid.uuid4().hex, "sampling_params": {"ignore_eos": True, **params}}
        real, scripted = await pair.compare("POST", "/generate", json=body)
        assert (
            scripted["meta_info"]["finish_reason"]
            == real["meta_info"]["finish_reason"]
            == {"type": "length", "length": 10}
        )


REFUSALS = {
    "no input": {},
    "null input": {"input_ids": None},
    "empty input": {"input_ids": []},
    "unknown sampling key": {"input_ids": PROMPT, "sampling_params": {"bogus": 1}},
    "unknown sampling key and empty input": {"input_ids": [], "sampling_params": {"bogus": 1}},
    "string for a number": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": "10"}},
    "fraction for a number": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2.0}},
    "boolean for a number": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": True}},
    "number for a boolean": {"input_ids": PROMPT, "sampling_params": {"skip_special_tokens": 1}},
    "string for a list": {"input_ids": PROMPT, "sampling_params": {"stop_token_ids": "x"}},
    "string in a list of numbers": {"input_ids": PROMPT, "sampling_params": {"stop_token_ids": ["a"]}},
    "number for a stop string": {"input_ids": PROMPT, "sampling_params": {"stop": 5}},
    "number in a list of stop strings": {"input_ids": PROMPT, "sampling_params": {"stop": [5]}},
    "list for a map": {"input_ids": PROMPT, "sampling_params": {"logit_bias": [1]}},
    "map for a schema": {"input_ids": PROMPT, "sampling_params": {"json_schema": {"type": "object"}}},
    "top_p out of range": {"input_ids": PROMPT, "sampling_params": {"top_p": 2}},
    "temperature out of range": {"input_ids": PROMPT, "sampling_params": {"temperature": -1}},
    "top_k out of range": {"input_ids": PROMPT, "sampling_params": {"top_k": 0}},
    "min_p out of range": {"input_ids": PROMPT, "sampling_params": {"min_p": 2}},
    "frequency_penalty out of range": {"input_ids": PROMPT, "sampling_params": {"frequency_penalty": 3}},
    "presence_penalty out of range": {"input_ids": PROMPT, "sampling_params": {"presence_penalty": -3}},
    "repetition_penalty out of range": {"input_ids": PROMPT, "sampling_params": {"repetition_penalty": 3}},
    "max_new_tokens out of range": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": -1}},
    "min_new_tokens out of range": {"input_ids": PROMPT, "sampling_params": {"min_new_tokens": -1}},
    "min above max": {"input_ids": PROMPT, "sampling_params": {"min_new_tokens": 5, "max_new_tokens": 2}},
    "two grammars": {"input_ids": PROMPT, "sampling_params": {"json_schema": "{}", "regex": "a"}},
    "logprob start behind the prompt": {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 6},
    "routed experts from behind the prompt": {
        "input_ids": PROMPT,
        "return_routed_experts": True,
        "routed_experts_start_len": 6,
    },
    "routed experts from before the prompt": {
        "input_ids": PROMPT,
        "return_routed_experts": True,
        "routed_experts_start_len": -1,
    },
    "sampling masks of everything": {"input_ids": PROMPT, "return_sampling_mask": True},
    "sampling masks of top-p alone": {
        "input_ids": PROMPT,
        "return_sampling_mask": True,
        "sampling_params": {"top_p": 0.5},
    },
    "sampling masks of too many": {
        "input_ids": PROMPT,
        "return_sampling_mask": True,
        "sampling_params": {"top_k": 5000},
    },
    "sampling masks and a wrong value": {
        "input_ids": PROMPT,
        "return_sampling_mask": True,
        "sampling_params": {"top_p": 2},
    },
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_refusal_has_the_same_shape_and_text(pair, name):
    real, scripted = await pair.compare("POST", "/generate", json=REFUSALS[name])
    assert scripted == real


@pytest.mark.parametrize(
    ("prompt_over", "max_new_tokens"), [(0, 1), (88, 2), (88, None), (-1, 2), (-12, 100), (-12, 13), (-1, 1), (-5, 0)]
)
async def test_prompt_beyond_the_context_gets_the_same_message(pair, prompt_over, max_new_tokens):
    if pair.max_input_length != pair.context_length - 6:
        pytest.skip("this server has less memory than its context needs")
    body = {
        "input_ids": PROMPT[:1] * (pair.context_length + prompt_over),
        "sampling_params": {"max_new_tokens": max_new_tokens},
    }
    real, scripted = await pair.compare("POST", "/generate", json=body)
    assert "error" in real
    assert scripted == real


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": "abc"},
        {"input_ids": ["abc"]},
        {"input_ids": [1.5]},
        {"input_ids": [None]},
        {"input_ids": PROMPT, "sampling_params": "x"},
        {"input_ids": PROMPT, "rid": 5},
        {"input_ids": PROMPT, "return_logprob": "x"},
        {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": "x"},
        {"input_ids": PROMPT, "return_routed_experts": "x"},
        {"input_ids": PROMPT, "return_routed_experts": None},
        {"input_ids": PROMPT, "routed_experts_start_len": "x"},
        {"input_ids": PROMPT, "routed_experts_start_len": None},
        {"text": 5},
    ],
)
async def test_a_wrong_type_gives_the_same_shape(pair, body):
    await pair.compare("POST", "/generate", json=body)


@pytest.mark.parametrize("path", ["/generate", "/abort_request", "/tokenize"])
@pytest.mark.parametrize("content", [b"", b"{not json", b"[1]"])
async def test_a_broken_body_gives_the_same_shape(pair, path, content):
    await pair.compare("POST", path, content=content, headers={"content-type": "application/json"})


async def test_a_body_of_another_content_type_gives_the_same_shape(pair):
    for headers in ({}, {"content-type": "text/plain"}):
        await pair.compare("POST", "/generate", content=b'{"input_ids":[11]}', headers=headers)


@pytest.mark.parametrize("path", ["/v1/models", "/", "/nope", "/generate"])
async def test_what_can_be_read_has_the_same_shape(pair, path):
    await pair.compare("GET", path)


async def test_a_queue_is_reported_and_left_with_the_same_shape(serve):
    async def until_aborted(request):
        await asyncio.Event().wait()

    async def until_there_are(running, waiting):
        while True:
            report = (await client.get("/v1/loads")).json()
            [load] = report["loads"]
            if (load["num_running_reqs"], load["num_waiting_reqs"]) == (running, waiting):
                return report
            ended = [task.exception() or task.result().text for task in tasks if task.done()]
            assert not ended, f"a request ended before the others came: {ended[0]!r:.500}"
            await asyncio.sleep(0)  # the scripted server answers at once

    # A server of few places: each request may fill the context, so none ends before the others came.
    places = 2
    options = ("--max-running-requests", str(places))
    narrow = serve("narrow", local.ensure_tiny_qwen3, *options, certain="a certain number of places")
    tokenizer = AutoTokenizer.from_pretrained(narrow.model_path)
    loads, answers = [], []
    async with httpx.AsyncClient(base_url=narrow.base_url, timeout=120) as real:
        context_length = (await real.get("/v1/models")).json()["data"][0]["max_model_len"]
        sampling_params = {"max_new_tokens": context_length - len(PROMPT) - 2, "ignore_eos": True}
        server = ScriptedSGLang(tokenizer, until_aborted, context_length=context_length, max_running_requests=places)
        async with httpx.AsyncClient(base_url="http://scripted", transport=server.transport()) as scripted:
            for client in (real, scripted):
                rids = [uuid.uuid4().hex for _ in range(places + 2)]
                bodies = [generate_body(rid=rid, return_logprob=True, sampling_params=sampling_params) for rid in rids]
                tasks = []
                for count in (places, 2):
                    tasks += [asyncio.create_task(client.post("/generate", json=bodies.pop(0))) for _ in range(count)]
                    report = await until_there_are(places, len(tasks) - places)
                loads.append(report)
                await client.post("/abort_request", json={"rid": rids[-1]})
                answers.append((await tasks[-1]).json())
                await client.post("/abort_request", json={"abort_all": True})
                await asyncio.gather(*tasks)
    assert not differences(part_of(*loads), loads[1]) and not differences(*answers)
    assert loads[0]["loads"][0]["queues"] == loads[1]["loads"][0]["queues"]
    assert answers[0]["meta_info"]["finish_reason"] == answers[1]["meta_info"]["finish_reason"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
async def test_health_is_an_empty_body(pair, path):
    real, scripted = await pair.send("GET", path)
    assert scripted.content == real.content == b""


def part_of(real, scripted):
    """What of a real body a scripted one has."""
    if isinstance(real, list) and isinstance(scripted, list):
        return [part_of(one, other) for one, other in zip(real, scripted, strict=False)] + real[len(scripted) :]
    if isinstance(real, dict) and isinstance(scripted, dict):
        return {key: part_of(real[key], value) for key, value in scripted.items() if key in real}
    return real


@pytest.mark.parametrize("path", ["/server_info", "/model_info", "/get_model_info", "/v1/loads"])
async def test_what_tells_of_the_server_is_a_part_of_the_real_one(pair, path):
    real, scripted = await pair.send("GET", path)
    found = differences(part_of(real.json(), scripted.json()), scripted.json())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hello world"},
        {"prompt": "hello<|im_end|>", "add_special_tokens": False},
        {"prompt": ["hello", "world foo"]},
        {"prompt": ""},
    ],
)
async def test_tokenize_gives_the_same(pair, body):
    real, scripted = await pair.compare("POST", "/tokenize", json=body)
    assert scripted == real


@pytest.mark.parametrize("body", [{"rid": "unknown"}, {"rid": None}, {}])
async def test_aborting_nothing_is_an_empty_200(pair, body):
    real, scripted = await pair.send("POST", "/abort_request", json=body)
    assert scripted.content == real.content == b""


async def test_a_running_request_is_aborted_with_the_same_shape(pair, tiny_server):
    started = asyncio.Event()

    async def half_an_answer(request):
        try:
            started.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        return ScriptedAnswer(token_ids=[300, 301, 302])

    tokenizer = AutoTokenizer.from_pretrained(tiny_server.model_path)
    server = ScriptedSGLang(tokenizer, [half_an_answer], context_length=pair.context_length)
    rid = uuid.uuid4().hex
    body = generate_body(
        rid=rid, return_logprob=True, sampling_params={"max_new_tokens": pair.context_length - len(PROMPT) - 2}
    )
    async with httpx.AsyncClient(base_url="http://scripted", transport=server.transport()) as scripted:
        real_task = asyncio.create_task(pair.real.post("/generate", json=body))
        scripted_task = asyncio.create_task(scripted.post("/generate", json=body))
        await started.wait()
        while not (await pair.real.get("/v1/loads")).json()["loads"][0]["num_running_reqs"]:
            assert not real_task.done(), "it ended before it could be aborted"
        twice = [await client.post("/generate", json=body) for client in (pair.real, scripted)]
        assert [(r.status_code, r.json()) for r in twice] == [
            (400, {"error": {"message": f"Duplicate request ID detected: {rid}"}})
        ] * 2
        # Another user's request may be the running one: ask until ours has ended.
        while not real_task.done():
            await pair.real.post("/abort_request", json={"rid": rid})
            await asyncio.wait({real_task}, timeout=0.05)
        await scripted.post("/abort_request", json={"rid": rid})
        scripted_body = (await scripted_task).json()
    real_body = real_task.result().json()
    found = differences(real_body, scripted_body)
    assert not found, "\n".join(found)
    for response in (real_body, scripted_body):
        check_lengths(response)
    assert scripted_body["meta_info"]["finish_reason"] == real_body["meta_info"]["finish_reason"]
    assert server.aborted == [rid]
