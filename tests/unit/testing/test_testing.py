"""The scripted server: its answers, rejections and faults, and the ways to reach it."""

import asyncio
import os
import struct
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import httpx
import orjson
import pytest
from hypothesis import given, settings, strategies as st

from strands_sglang import SGLangClient, SGLangConnectionError, SGLangHTTPError, SGLangThrottledError
from strands_sglang.protocol.generation import read_generation
from strands_sglang.testing import (
    ScriptedAnswer,
    ScriptedExperts,
    ScriptedFault,
    ScriptedResponse,
    ScriptedSGLang,
    scripted_logprob,
)
from support.agents import Gate, build_chatml_tokenizer, make_agent

PROMPT = [11, 22, 33, 44, 55]
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
GREEDY = {"temperature": 0, "max_new_tokens": 64}


@pytest.fixture
def make_server(chatml_tokenizer):
    def make(answers, **kwargs):
        return ScriptedSGLang(chatml_tokenizer, answers, **kwargs)

    return make


def connect(server, **kwargs):
    return httpx.AsyncClient(transport=server.transport(), base_url="http://scripted", **{"timeout": None, **kwargs})


async def post(server, path="/generate", **body):
    async with connect(server) as client:
        return await client.post(path, json=body)


async def generate(server, input_ids=PROMPT, **body):
    response = await post(server, input_ids=list(input_ids), **{"sampling_params": GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def waiting(make_server, *others, on_abort=None, **body):
    """A server, the gate of its first answer, and the request that waits there."""
    gate = Gate(on_abort)
    server = make_server([gate, *others])
    task = asyncio.create_task(generate(server, **body))
    await gate.reached.wait()
    return server, gate, task


def endless():
    """An answer that never comes, and events for other threads: its request has arrived, and is no longer awaited."""
    reached, left = threading.Event(), threading.Event()

    async def wait(request):
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    return wait, reached, left


async def refused(server, **body):
    response = await post(server, **body)
    assert response.status_code == 400, response.text
    error = response.json().get("error")
    return error if isinstance(error, str) else error["message"]


# --- answers ---


async def test_text_is_tokenized_and_ends_with_the_stop_token(make_server, chatml_tokenizer):
    body = await generate(make_server(["hello world"]))
    assert body["output_ids"] == [*chatml_tokenizer.encode("hello world"), chatml_tokenizer.eos_token_id]
    assert body["text"] == "hello world"
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": chatml_tokenizer.eos_token_id}


async def test_stop_token_in_the_text_ends_the_answer_once(make_server, chatml_tokenizer):
    server = make_server(["one<|im_end|>", "one<|im_end|>two"])
    first, second = await generate(server), await generate(server)
    expected = [*chatml_tokenizer.encode("one"), chatml_tokenizer.eos_token_id]
    assert first["output_ids"] == second["output_ids"] == expected


async def test_token_ids_are_sampled_unchanged(make_server, chatml_tokenizer):
    spelled_out = [chatml_tokenizer.encode(letter)[0] for letter in "hello"]
    assert spelled_out != chatml_tokenizer.encode("hello")
    body = await generate(make_server([ScriptedAnswer(token_ids=spelled_out, finish_reason="length")]))
    assert body["output_ids"] == spelled_out
    assert body["text"] == "hello"
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


async def test_an_answer_can_end_with_another_stop_token(make_server):
    server = make_server([ScriptedAnswer("hi", stop_token_id=0)], stop_token_ids=(2, 0))
    body = await generate(server)
    assert body["output_ids"][-1] == 0
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": 0}


async def test_an_abort_can_be_scripted(make_server):
    body = await generate(make_server([ScriptedAnswer("partial", finish_reason="abort")]))
    assert body["text"] == "partial"
    assert body["meta_info"]["finish_reason"] == ABORTED


async def test_a_function_computes_answers_from_requests(make_server, chatml_tokenizer):
    def answer(request):
        return f"{request.index}:{request.text}:{request.sampling_params['temperature']}"

    server = make_server(answer)
    for expected in ("0:hello:0", "1:hello:0"):
        assert (await generate(server, chatml_tokenizer.encode("hello")))["text"] == expected


async def test_an_async_function_and_functions_inside_a_list_work(make_server):
    async def later(request):
        await asyncio.sleep(0)
        return ScriptedAnswer("later")

    server = make_server([later, "plain", lambda request: f"index {request.index}"])
    assert [(await generate(server))["text"] for _ in range(3)] == ["later", "plain", "index 2"]


async def test_exhausted_script_returns_501(make_server):
    server = make_server(["only one"])
    await generate(server)
    response = await post(server, input_ids=PROMPT)
    assert response.status_code == 501
    assert "no answer for request 1 (counted from 0)" in response.json()["error"]["message"]
    assert server.responses[1].status == 501
    assert server.running == []


async def test_an_exhausted_script_is_not_called_another_kind_of_server(make_server):
    with pytest.raises(SGLangHTTPError, match="all 0 answers are used up") as caught:
        await make_server([]).client().generate(PROMPT)
    assert "not an SGLang server" not in str(caught.value)


async def test_error_in_an_answer_function_returns_501(make_server):
    def answer(request):
        raise ValueError("unexpected prompt")

    response = await post(make_server(answer), input_ids=PROMPT)
    assert response.status_code == 501
    assert "request 0: ValueError: unexpected prompt" in response.json()["error"]["message"]


@pytest.mark.parametrize("answers", ["a text", ScriptedAnswer("a text")])
def test_single_answer_instead_of_a_list_is_rejected(make_server, answers):
    with pytest.raises(TypeError, match="list of answers"):
        make_server(answers)


def test_meaningless_answers_are_rejected():
    with pytest.raises(ValueError, match="not both"):
        ScriptedAnswer("text", token_ids=[1])
    with pytest.raises(ValueError, match="finish_reason='done'"):
        ScriptedAnswer("text", finish_reason="done")  # type: ignore[arg-type]


def test_a_server_needs_a_stop_token(make_server):
    with pytest.raises(ValueError, match="stop_token_ids"):
        make_server([], stop_token_ids=())


# --- end of an answer ---


@pytest.mark.parametrize(
    ("token_ids", "params", "output_ids", "finish"),
    [
        ([300, 301, 302], {"max_new_tokens": 2}, [300, 301], {"type": "length", "length": 2}),
        ([300] * 500, {}, [300] * 128, {"type": "length", "length": 128}),
        ([300], {"max_new_tokens": 2}, [300, 2], {"type": "stop", "matched": 2}),
        ([300, 301, 302, 303], {"stop_token_ids": [302]}, [300, 301, 302], {"type": "stop", "matched": 302}),
        ([300, 2, 301, 2], {"ignore_eos": True, "max_new_tokens": 3}, [300, 2, 301], {"type": "length", "length": 3}),
    ],
)
async def test_an_answer_ends_as_the_sampling_parameters_say(make_server, token_ids, params, output_ids, finish):
    body = await generate(make_server([ScriptedAnswer(token_ids=token_ids)]), sampling_params=params)
    assert (body["output_ids"], body["meta_info"]["finish_reason"]) == (output_ids, finish)


async def test_max_new_tokens_zero_only_scores_the_prompt(make_server):
    body = await generate(
        make_server(["ignored"]),
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    assert (body["output_ids"], body["text"]) == ([], "")
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert len(body["meta_info"]["input_token_logprobs"]) == len(PROMPT)


async def test_answer_ends_two_tokens_before_the_context(make_server):
    server = make_server([ScriptedAnswer(token_ids=[300] * 500)], context_length=100)
    body = await generate(server, [7] * 90, sampling_params={"max_new_tokens": 10})
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 8}


@pytest.mark.parametrize(("no_stop_trim", "text"), [(False, "the quick"), (True, "the quick brown")])
async def test_stop_string_ends_the_answer_at_its_last_token(make_server, chatml_tokenizer, no_stop_trim, text):
    server = make_server(["the quick brown fox"])
    params = {"stop": [" brown", " fox"], "no_stop_trim": no_stop_trim}
    body = await generate(server, sampling_params=params)
    assert chatml_tokenizer.decode(body["output_ids"]) == "the quick brown"
    assert body["text"] == text
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": " brown"}


async def test_text_excludes_special_tokens_by_default(make_server):
    server = make_server(["a<|im_start|>b<tool_call>"] * 3)
    texts = [
        (await generate(server, sampling_params=params))["text"]
        for params in ({}, {"skip_special_tokens": False}, {"skip_special_tokens": False, "no_stop_trim": True})
    ]
    assert texts == ["ab<tool_call>", "a<|im_start|>b<tool_call>", "a<|im_start|>b<tool_call><|im_end|>"]


# --- logprobs ---


async def test_logprobs_are_returned_on_request(make_server):
    meta = (await generate(make_server(["hi"])))["meta_info"]
    assert not {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"} & meta.keys()


async def test_logprobs_depend_on_position_and_token(make_server):
    body = await generate(make_server(["hello world"]), return_logprob=True)
    expected = [
        [scripted_logprob(len(PROMPT) + i, token_id), token_id, None] for i, token_id in enumerate(body["output_ids"])
    ]
    meta = body["meta_info"]
    assert meta["output_token_logprobs"] == expected
    assert meta["output_token_logprobs_length"] == len(expected)
    assert meta["input_token_logprobs"] == []


async def test_scored_prompt_has_the_logprobs_of_its_sampling(make_server):
    server = make_server(["hello world", "unused"])
    sampled = await generate(server, return_logprob=True)
    scored = await generate(
        server,
        [*PROMPT, *sampled["output_ids"]],
        return_logprob=True,
        logprob_start_len=len(PROMPT) - 1,
        sampling_params={"max_new_tokens": 0},
    )
    first, *rest = scored["meta_info"]["input_token_logprobs"]
    assert first == [None, PROMPT[-1], None]
    assert rest == sampled["meta_info"]["output_token_logprobs"]


@pytest.mark.parametrize(("start", "length"), [(0, 5), (3, 2), (5, 0), (-1, 0), (None, 0)])
async def test_prompt_logprobs_start_at_logprob_start_len(make_server, start, length):
    body = await generate(make_server(["hi"]), return_logprob=True, logprob_start_len=start)
    entries = body["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == PROMPT[len(PROMPT) - length :]
    assert all(entry[0] is None for entry in entries[:1])
    assert all(isinstance(entry[0], float) for entry in entries[1:])


async def test_scripted_values_are_returned_as_float32(make_server):
    answer = ScriptedAnswer(token_ids=[300, 301], logprobs=[-0.1, -0.5])
    body = await generate(make_server([answer]), return_logprob=True)
    values = [entry[0] for entry in body["meta_info"]["output_token_logprobs"]]
    assert values[:2] == [struct.unpack("f", struct.pack("f", -0.1))[0], -0.5]
    assert values[2] == scripted_logprob(len(PROMPT) + 2, 2)


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
async def test_logprobs_that_do_not_fit_the_answer_are_an_error(make_server, finish_reason):
    answer = ScriptedAnswer(token_ids=[300, 301], logprobs=[-0.1], finish_reason=finish_reason)
    response = await post(make_server([answer]), input_ids=PROMPT, return_logprob=True)
    assert response.status_code == 501
    assert "1 logprobs" in response.json()["error"]["message"]


async def test_custom_function_computes_logprobs(make_server):
    server = make_server(["hi"], logprob=lambda position, token_id: -float(position))
    body = await generate(server, return_logprob=True)
    assert body["meta_info"]["output_token_logprobs"][0][0] == -5.0


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 18))
def test_default_values_are_negative_float32(position, token_id):
    value = scripted_logprob(position, token_id)
    assert -8 <= value < 0
    assert struct.unpack("f", struct.pack("f", value))[0] == value


# --- prefix cache ---


async def test_growing_conversation_finds_its_prefix(make_server):
    server = make_server(["one", "two"])
    first = await generate(server)
    await generate(server, [*PROMPT, *first["output_ids"], 66, 77])
    # The stop token was sampled last: no forward pass has seen it yet.
    assert [r.cached_tokens for r in server.requests] == [0, len(PROMPT) + len(first["output_ids"]) - 1]


async def test_a_repeated_prompt_computes_its_last_token_again(make_server):
    server = make_server(["one", "two"])
    details = [(await generate(server))["meta_info"]["cached_tokens_details"] for _ in range(2)]
    assert details == [None, {"device": 4, "host": 0}]


@pytest.mark.parametrize(("start", "cached"), [(None, 4), (0, 0), (3, 3)])
async def test_asking_for_prompt_logprobs_limits_reuse(make_server, start, cached):
    server = make_server(["one", "two"])
    await generate(server)
    body = await generate(server, return_logprob=True, logprob_start_len=start)
    assert body["meta_info"]["cached_tokens"] == cached


async def test_extra_key_and_flush_each_start_with_no_prefix(make_server):
    server = make_server(["answer"] * 4)
    await generate(server)
    await generate(server, extra_key="other")
    assert (await post(server, "/flush_cache")).text.startswith("Cache flushed.\n")
    await generate(server)
    await generate(server)
    assert [r.cached_tokens for r in server.requests] == [0, 0, 0, 4]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=15))
def test_cache_finds_the_longest_prefix_of_earlier_prompts(prompts):
    tokenizer = build_chatml_tokenizer()
    server = ScriptedSGLang(tokenizer, lambda request: ScriptedAnswer(token_ids=[9]), stop_token_ids=[9])

    async def run():
        async with connect(server) as client:
            for prompt in prompts:
                await client.post("/generate", json={"input_ids": prompt, "sampling_params": GREEDY})

    def expected(i):
        shared = (os.path.commonprefix([prompts[i], earlier]) for earlier in prompts[:i])
        return min(max(map(len, shared), default=0), len(prompts[i]) - 1)

    asyncio.run(run())
    told = [response.body["meta_info"]["cached_tokens"] for response in server.responses]
    assert told == [expected(i) for i in range(len(prompts))]


async def test_cache_finds_the_first_difference_in_long_prompts(make_server):
    server = make_server(lambda request: "ok", context_length=40000)
    base = [i % 900 for i in range(30000)]
    await generate(server, base)
    for change_at in (0, 1, 1023, 1024, 17777, 29999):
        changed = [*base]
        changed[change_at] = 901
        body = await generate(server, changed)
        assert body["meta_info"]["cached_tokens"] == change_at


# --- rejections ---


async def test_prompt_as_long_as_the_context_is_rejected(make_server):
    assert await refused(make_server([], context_length=512), input_ids=[5] * 600) == (
        "The input (600 tokens) is longer than the model's context length (512 tokens)."
    )


async def test_prompt_plus_completion_must_fit_the_context(make_server):
    server = make_server([], context_length=512)
    message = await refused(server, input_ids=[5] * 500, sampling_params={"max_new_tokens": 100})
    assert message.startswith("Requested token count exceeds the model's maximum context length of 512 tokens.")
    assert "a total of 600 tokens: 500 tokens from the input" in message


async def test_prompt_cannot_use_the_last_six_tokens(make_server):
    server = make_server(["fits"], context_length=512)
    message = await refused(server, input_ids=[5] * 507, sampling_params={"max_new_tokens": 1})
    assert message.startswith("Input length (507 tokens) exceeds the maximum allowed length (506 tokens).")
    await generate(server, [5] * 506, sampling_params={"max_new_tokens": 1})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"input_ids": PROMPT, "sampling_params": {"top_p": 2}}, "top_p must be in (0, 1], got 2."),
        (
            {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 5}},
            "min_new_tokens must be in [0, max_new_tokens(2)], got 5.",
        ),
        (
            {"input_ids": PROMPT, "sampling_params": {"json_schema": "{}", "regex": "a"}},
            "Only one of json_schema, regex, ebnf, or structural_tag can be set.",
        ),
        (
            {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 6},
            "req.logprob_start_len=6 is higher than the number of input tokens len(req.origin_input_ids)=5. "
            "Please use a smaller logprob_start_len.",
        ),
    ],
)
async def test_engine_messages_are_those_of_a_real_server(make_server, body, message):
    server = make_server(["unused"])
    assert await refused(server, **body) == message
    assert server.requests == []
    assert [refusal.message for refusal in server.refusals] == [message]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bogus": 1}, "unknown field `bogus`, expected one of `max_new_tokens`, `stop`, "),
        ({"max_new_tokens": "10"}, 'invalid type: string "10", expected i64'),
        ({"max_new_tokens": 2.0}, "invalid type: floating point `2.0`, expected i64"),
        ({"stop_token_ids": 3}, "invalid type: integer `3`, expected a sequence"),
        ({"json_schema": {"type": "object"}}, "invalid type: map, expected a string"),
    ],
)
async def test_invalid_sampling_keys_give_a_string_error(make_server, params, message):
    response = await post(make_server([]), input_ids=PROMPT, sampling_params=params)
    assert response.status_code == 400
    assert response.json()["error"].startswith(message)


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": "abc"},
        {"input_ids": ["abc"]},
        {"input_ids": PROMPT, "rid": 5},
        {"sampling_params": "x"},
    ],
)
async def test_wrong_types_give_a_validation_error(make_server, body):
    response = await post(make_server([]), **body)
    assert response.status_code == 400
    assert response.json().keys() == {"object", "message", "type", "param", "code"}


@pytest.mark.parametrize("content", [b"", b"{broken", b"[1]"])
async def test_body_must_be_a_json_object(make_server, content):
    server = make_server([])
    async with connect(server) as client:
        response = await client.post("/generate", content=content, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["object"]) == (400, "error")
    assert server.refusals[0].request == content


async def test_body_must_be_declared_as_json(make_server):
    async with connect(make_server([])) as client:
        response = await client.post("/generate", content=b'{"input_ids":[5]}')
    assert (response.status_code, response.json()["object"]) == (400, "error")


@pytest.mark.parametrize(
    "body",
    [{"input_ids": [5, 10**6]}, {"input_ids": [-1]}, {"text": ""}]
    + [{"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": -2}],
)
async def test_request_that_kills_a_real_server_is_rejected(make_server, body):
    response = await post(make_server(["unused"]), **body)
    assert response.status_code == 501
    assert "a real SGLang server dies on this request" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "extra",
    [{"stream": True}, {"lora_path": "adapter"}, {"input_ids": [PROMPT, PROMPT]}, {"sampling_params": {"n": 2}}],
)
async def test_request_that_is_not_emulated_is_rejected(make_server, extra):
    response = await post(make_server(["unused"]), **{"input_ids": PROMPT, **extra})
    assert response.status_code == 501


# --- log ---


async def test_requests_and_responses_are_logged_unchanged(make_server):
    server = make_server(["hi"])
    async with connect(server, headers={"X-SMG-Routing-Key": "k1"}) as client:
        body = {
            "input_ids": PROMPT,
            "rid": "r-1",
            "sampling_params": {"json_schema": "{}"},
            "routing_key": "k1",
        }
        response = await client.post("/generate", json=body)
    request = server.requests[0]
    assert (request.index, request.rid, request.input_ids) == (0, "r-1", PROMPT)
    assert request.sampling_params == {"json_schema": "{}"}
    assert request.body == {key: value for key, value in body.items() if key != "input_ids"}
    assert request.headers["x-smg-routing-key"] == "k1"
    assert server.responses[0].body == response.json()
    assert response.json()["meta_info"]["id"] == "r-1"


async def test_responses_have_the_index_of_their_request(make_server):
    server, gate, first = await waiting(make_server, "second")
    await generate(server)
    assert server.responses[0] is None
    assert server.responses[1].body["text"] == "second"
    gate.open.set()
    assert server.responses[0 if await first else 1].body["text"] == "let go"


async def test_text_prompt_is_tokenized(make_server, chatml_tokenizer):
    server = make_server(["hi"])
    body = (await post(server, text="hello world", return_prompt_token_ids=True)).json()
    assert body["prompt_token_ids"] == server.requests[0].input_ids == chatml_tokenizer.encode("hello world")


async def test_the_weight_version_can_change_between_requests(make_server):
    server = make_server(["one", "two"])
    await generate(server)
    server.weight_version = "v2"
    meta = (await generate(server))["meta_info"]
    length = meta["completion_tokens"]
    assert meta["weight_version"] == "v2"
    assert meta["weight_versions"] == [{"version": "v2", "start": 0, "end": length}]


# --- abort ---


async def test_waiting_request_is_aborted_with_an_empty_answer(make_server):
    server, gate, task = await waiting(make_server, rid="r-1", return_logprob=True)
    assert server.running == ["r-1"]
    response = await post(server, "/abort_request", rid="r-1")
    assert (response.status_code, response.content) == (200, b"")
    body = await task
    assert (body["text"], body["output_ids"]) == ("", [])
    assert body["meta_info"]["finish_reason"] == ABORTED
    assert body["meta_info"]["output_token_logprobs"] == []
    assert (server.aborted, server.running) == (["r-1"], [])


async def test_the_function_may_return_the_partial_answer(make_server, chatml_tokenizer):
    server, _, task = await waiting(make_server, on_abort="The answer", rid="r-1")
    await post(server, "/abort_request", rid="r-1")
    body = await task
    assert body["output_ids"] == chatml_tokenizer.encode("The answer")
    assert body["meta_info"]["finish_reason"] == ABORTED


async def test_only_the_exact_request_id_is_aborted(make_server):
    server, gate, task = await waiting(make_server, rid="abc-1")
    for body in ({"rid": "abc"}, {"rid": None}, {}):
        assert (await post(server, "/abort_request", **body)).status_code == 200
    gate.open.set()
    assert (await task)["text"] == "let go"
    assert (await post(server, "/abort_request", rid="abc-1")).status_code == 200
    assert server.aborted == []


async def test_abort_all_ends_every_request(make_server):
    gates = [Gate(), Gate()]
    server = make_server(list(gates))
    tasks = [asyncio.create_task(generate(server)) for _ in gates]
    for gate in gates:
        await gate.reached.wait()
    await post(server, "/abort_request", abort_all=True)
    assert [(await task)["meta_info"]["finish_reason"] for task in tasks] == [ABORTED, ABORTED]


async def test_request_without_a_client_runs_until_aborted(make_server):
    server, gate, task = await waiting(make_server, rid="left")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.running == ["left"]
    assert (await post(server, "/flush_cache")).status_code == 400
    await post(server, "/abort_request", rid="left")
    assert (server.aborted, server.running, server.responses) == (["left"], [], [None])


async def test_abort_before_the_wait_for_the_answer_is_not_lost(make_server):
    def answer(request):
        thread = threading.Thread(target=lambda: asyncio.run(post(server, "/abort_request", rid="early")))
        thread.start()
        thread.join()
        return asyncio.Event().wait()

    server = make_server([answer])
    assert (await generate(server, rid="early"))["meta_info"]["finish_reason"] == ABORTED


async def test_aborted_request_does_not_end_a_later_one_of_its_id(make_server):
    second = Gate()
    server, _, aborted = await waiting(make_server, second, on_abort="partial", rid="same")
    await post(server, "/abort_request", rid="same")
    later = asyncio.create_task(generate(server, rid="same"))
    await second.reached.wait()
    await aborted
    assert server.running == ["same"]
    second.open.set()
    assert (await later)["text"] == "let go"


async def test_a_request_id_in_flight_cannot_be_used_again(make_server):
    server, gate, task = await waiting(make_server, "second", rid="same")
    assert await refused(server, input_ids=PROMPT, rid="same") == "Duplicate request ID detected: same"
    gate.open.set()
    await task
    assert (await generate(server, rid="same"))["text"] == "second"


async def test_read_timeout_is_honored_in_process(make_server):
    server = make_server([Gate()])
    async with connect(server, timeout=httpx.Timeout(None, read=0.01)) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/generate", json={"input_ids": PROMPT, "rid": "slow"})
    assert server.running == ["slow"]


# --- other endpoints ---


async def test_server_reports_its_model_and_context(make_server):
    server = make_server([], model_path="org/model", context_length=4096)
    async with connect(server) as client:
        info = (await client.get("/model_info")).json()
        assert info == (await client.get("/get_model_info")).json()
        assert (info["model_path"], info["weight_version"]) == ("org/model", "default")
        assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 4096
        assert (await client.get("/server_info")).json()["max_req_input_len"] == 4090


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_it_is_healthy_with_an_empty_body(make_server, path):
    async with connect(make_server([])) as client:
        response = await client.get(path)
    assert (response.status_code, response.content) == (200, b"")


async def test_loads_count_what_is_running(make_server):
    server, gate, task = await waiting(make_server)
    async with connect(server) as client:
        assert (await client.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] == 1
        gate.open.set()
        await task
        assert (await client.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] == 0


async def reported(server):
    async with connect(server) as client:
        return (await client.get("/v1/loads")).json()["loads"][0]


async def test_requests_beyond_the_limit_wait_in_order(make_server):
    gates = [Gate() for _ in range(4)]
    server = make_server(gates, max_running_requests=2)
    tasks = [asyncio.create_task(generate(server)) for _ in gates]
    for number, gate in enumerate(gates):
        await gates[min(number + 1, 3)].reached.wait()
        assert [other.reached.is_set() for other in gates] == [at <= number + 1 for at in range(4)]
        load = await reported(server)
        assert load["num_running_reqs"] == min(4 - number, 2) and load["num_waiting_reqs"] == max(2 - number, 0)
        assert load["num_total_tokens"] == len(PROMPT) * (4 - number) and load["max_running_requests"] == 2
        gate.open.set()
        await tasks[number]


async def test_request_aborted_in_the_queue_never_runs(make_server):
    gate = Gate()
    server = make_server([gate, "never", "next"], max_running_requests=1)
    first = asyncio.create_task(generate(server))
    await gate.reached.wait()
    queued = asyncio.create_task(generate(server, rid="queued", return_logprob=True))
    while (await reported(server))["num_waiting_reqs"] == 0:
        await asyncio.sleep(0)
    await post(server, "/abort_request", rid="queued")
    meta = (await queued)["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert (meta["completion_tokens"], meta["output_token_logprobs"]) == (0, []) and "prompt_tokens" not in meta
    gate.open.set()
    await first
    assert (await generate(server))["text"] == "next" and server.running == []


def test_requests_of_several_loops_share_one_queue(make_server):
    server = make_server(["one", "two", "three", "four"] * 5, max_running_requests=1)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: asyncio.run(generate(server))["text"], range(20)))
    assert Counter(answers) == dict.fromkeys(["one", "two", "three", "four"], 5)


async def test_tokenize_gives_the_tokenizers_ids(make_server, chatml_tokenizer):
    body = (await post(make_server([]), "/tokenize", prompt="hello<|im_end|>")).json()
    ids = chatml_tokenizer.encode("hello<|im_end|>")
    assert body == {"tokens": ids, "count": len(ids), "max_model_len": 32768}


async def test_unknown_paths_and_wrong_methods_are_404_and_405(make_server):
    async with connect(make_server([])) as client:
        unknown, wrong = await client.get("/nope"), await client.get("/generate")
    assert (unknown.status_code, unknown.json()) == (404, {"detail": "Not Found"})
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})


# --- ways to reach it ---


def test_one_transport_serves_several_event_loops(make_server):
    server = make_server(["one", "two"])
    transport = server.transport()

    async def ask():
        async with httpx.AsyncClient(transport=transport, base_url="http://scripted") as client:
            return (await client.post("/generate", json={"input_ids": PROMPT})).json()["text"]

    assert [asyncio.run(ask()), asyncio.run(ask())] == ["one", "two"]


def test_an_abort_from_another_thread_reaches_the_request(make_server):
    answer, reached, _ = endless()
    server, results = make_server([answer]), []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(generate(server, rid="there"))))
    thread.start()
    reached.wait()
    asyncio.run(post(server, "/abort_request", rid="there"))
    thread.join()
    assert results[0]["meta_info"]["finish_reason"] == ABORTED


# --- on a port ---


def test_another_process_can_use_it(make_server):
    server = make_server(["from afar"])
    script = (
        "import json, sys, urllib.request as u; "
        "r = u.Request(sys.argv[1] + '/generate', json.dumps({'input_ids': [5]}).encode(), "
        "{'Content-Type': 'application/json'}); print(json.load(u.urlopen(r))['text'])"
    )
    with server.serve() as base_url:
        result = subprocess.run([sys.executable, "-c", script, base_url], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "from afar"
    assert server.requests[0].input_ids == [5]


async def test_it_keeps_connections_open_and_takes_large_bodies(make_server):
    server = make_server(lambda request: "ok", context_length=600_000)
    async with server.serve() as base_url, httpx.AsyncClient(base_url=base_url) as client:
        for _ in range(2):
            response = await client.post("/generate", json={"input_ids": [900] * 500_000})
            assert response.json()["meta_info"]["prompt_tokens"] == 500_000
            assert response.http_version == "HTTP/1.1"
            assert response.headers.get("connection") != "close"


def test_thread_ends_and_the_port_is_free_again(make_server):
    server = make_server(["one", "two"])
    before = set(threading.enumerate())
    with server.serve() as base_url:
        assert httpx.get(base_url + "/ready").status_code == 200
        port = int(base_url.rsplit(":", 1)[1])
    assert set(threading.enumerate()) <= before
    with server.serve(port) as base_url:
        assert httpx.get(base_url + "/ready").status_code == 200
        with pytest.raises(OSError), server.serve(port):
            pass
    assert set(threading.enumerate()) <= before


async def test_open_requests_do_not_delay_the_end(make_server):
    answer, reached, _ = endless()
    async with httpx.AsyncClient() as client:
        async with make_server([answer]).serve() as base_url:
            task = asyncio.create_task(client.post(base_url + "/generate", json={"input_ids": PROMPT}))
            await asyncio.to_thread(reached.wait)
        with pytest.raises(httpx.HTTPError):
            await task


async def test_request_of_a_disconnected_client_runs_until_aborted(make_server):
    answer, reached, left = endless()
    server = make_server([answer])
    async with server.serve() as base_url:
        async with httpx.AsyncClient(base_url=base_url) as client:
            task = asyncio.create_task(client.post("/generate", json={"input_ids": PROMPT, "rid": "left"}))
            await asyncio.to_thread(reached.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(left.wait)
            assert server.running == ["left"]
            await client.post("/abort_request", json={"rid": "left"})
            assert (server.running, server.aborted) == ([], ["left"])


def test_imports_load_neither_transformers_nor_aiohttp_nor_torch():
    script = (
        "import strands_sglang.client, strands_sglang.testing, sys; "
        "print([name for name in ('transformers', 'aiohttp', 'torch') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


FAULTS = {
    "an HTTP error": (ScriptedFault(status=500), SGLangHTTPError),
    "too many requests": (ScriptedFault(status=429, headers={"Retry-After": "0"}), SGLangThrottledError),
    "a dropped connection": (ScriptedFault("drop"), SGLangConnectionError),
    "half a body": (ScriptedFault("half"), SGLangConnectionError),
    "garbage": (ScriptedFault("garbage", message="<html>"), Exception),
}


@pytest.fixture(params=["in process", "on a port"])
def connected(request):
    @asynccontextmanager
    async def connect(server, **settings):
        if request.param == "in process":
            async with server.client(retry_delay=0.001, **settings) as client:
                yield client
        else:
            async with server.serve() as base_url, SGLangClient(base_url, retry_delay=0.001, **settings) as client:
                yield client

    return connect


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_an_error_of_its_kind_and_a_retry_gets_the_next_answer(make_server, connected, fault):
    scripted, kind = FAULTS[fault]
    server = make_server([scripted, scripted, "fine"])
    async with connected(server, max_retries=0) as client:
        with pytest.raises(kind):
            await client.generate([1, 2, 3], {})
    async with connected(server, max_retries=2) as client:
        assert (await client.generate([1, 2, 3], {}))["text"] == "fine"
    assert len(server.requests) == 3
    assert server.running == []


async def test_abort_ends_the_wait_for_a_late_answer(make_server):
    server = make_server([ScriptedAnswer("late", latency_s=60.0), ScriptedAnswer("soon", latency_s=0.01)])
    async with server.client() as client:
        waiting = asyncio.ensure_future(client.generate([1, 2, 3], {}))
        while not server.running:
            await asyncio.sleep(0)
        assert server.update_weights("2") == server.aborted
        response = await waiting
        assert (response["meta_info"]["finish_reason"]["type"], response["output_ids"]) == ("abort", [])
        assert response["meta_info"]["weight_version"] == "default"
        assert (await client.generate([1, 2, 3], {}))["meta_info"]["weight_version"] == "2"


def test_meaningless_faults_are_rejected():
    with pytest.raises(ValueError, match="kind='explode' is not one of"):
        ScriptedFault("explode")
    with pytest.raises(ValueError, match="status=200 is not an HTTP error"):
        ScriptedFault(status=200)


async def test_a_scripted_response_is_sent_exactly(make_server, connected):
    teapot = ScriptedResponse(418, b"I'm a teapot", {"x-kind": "teapot"})
    server = make_server([teapot, ScriptedResponse(503, headers={"retry-after": "0"}), "fine"])
    async with connected(server, max_retries=1) as client:
        with pytest.raises(SGLangHTTPError, match="HTTP 418: I'm a teapot"):
            await client.generate([1, 2, 3], {})
        assert (await client.generate([1, 2, 3], {}))["text"] == "fine"
    assert server.responses[0] is teapot
    assert [response.status for response in server.responses] == [418, 503, 200]
    assert server.running == []


async def test_a_response_can_break_anywhere_in_its_body(make_server, connected):
    server = make_server([ScriptedResponse(200, b"{}", broken_after=1)])
    async with connected(server, max_retries=0) as client:
        with pytest.raises(SGLangConnectionError):
            await client.generate([1], {})
    for broken_after in (-1, 2):
        with pytest.raises(ValueError, match=f"broken_after={broken_after} is not inside a body of 2 bytes"):
            ScriptedResponse(200, b"{}", broken_after=broken_after)


async def test_an_override_replaces_an_endpoint_until_removed(make_server, connected):
    server = make_server(["fine"])
    server.overrides["/health"] = ScriptedResponse(503)
    server.overrides["/generate"] = ScriptedResponse(500)
    async with connected(server, max_retries=0) as client:
        assert not await client.health()
        with pytest.raises(SGLangHTTPError, match="HTTP 500"):
            await client.generate([1], {})
        assert server.requests == []
        server.overrides.clear()
        assert await client.health()
        assert (await client.generate([1], {}))["text"] == "fine"


async def test_an_override_of_the_wrong_kind_is_named(make_server, connected):
    server = make_server([])
    server.overrides["/generate"] = ScriptedFault(status=503)
    async with connected(server, max_retries=9) as client:
        with pytest.raises(SGLangHTTPError, match="override of /generate is ScriptedFault.*not a ScriptedResponse"):
            await client.generate([1], {})
    assert len(server.calls) == 1


async def test_all_calls_are_logged_in_order(make_server, connected):
    server = make_server(["fine"])
    async with connected(server) as client:
        await client.generate([1], {})
        await client.tokenize("hi")
        await client.abort("unknown")
        await client.health()
    assert [(path, orjson.loads(content) if content else None) for path, content in server.calls] == [
        ("/generate", None),  # in `requests`
        ("/tokenize", {"prompt": "hi", "add_special_tokens": False}),
        ("/abort_request", {"rid": "unknown"}),
        ("/health", None),
    ]


EXPERTS = ScriptedExperts(layers=3, experts=8, top_k=2)


async def routing_generate(tokenizer, *, experts=EXPERTS, **fields):
    server = ScriptedSGLang(tokenizer, [ScriptedAnswer(token_ids=[7, 8, 9])], experts=experts)
    client = server.client()
    async with client:
        return await client.generate(PROMPT, {"max_new_tokens": 3}, **fields)


async def test_experts_have_a_row_for_each_token_but_the_last(chatml_tokenizer):
    response = await routing_generate(chatml_tokenizer, return_routed_experts=True)
    ids = read_generation(response, logprobs_expected=False).expert_ids()
    assert ids.tolist() == [EXPERTS.chosen(i, token_id) for i, token_id in enumerate([*PROMPT, 7, 8])]


async def test_the_first_rows_can_be_left_out(chatml_tokenizer):
    whole = await routing_generate(chatml_tokenizer, return_routed_experts=True)
    part = await routing_generate(chatml_tokenizer, return_routed_experts=True, routed_experts_start_len=4)
    first = 4 * 4 * EXPERTS.layers * EXPERTS.top_k  # a multiple of 3 bytes, so that base64 can be cut there
    cut = whole["meta_info"]["routed_experts"][first * 4 // 3 :]
    assert part["meta_info"]["routed_experts"] == cut != ""


@pytest.mark.parametrize(("experts", "asked"), [(None, True), (EXPERTS, False)])
async def test_experts_are_returned_only_on_request(chatml_tokenizer, experts, asked):
    response = await routing_generate(chatml_tokenizer, experts=experts, return_routed_experts=asked)
    assert "routed_experts" not in response["meta_info"]


async def test_expert_rows_continue_those_of_the_previous_turn(rollout):
    _, model = rollout(["one", "two"], server={"experts": EXPERTS}, return_routed_experts=True)
    agent = make_agent(model)
    await agent.invoke_async("a")
    await agent.invoke_async("b")
    first, second = (turn.generation.expert_ids() for turn in model.trajectory.turns)
    assert (second[: len(first)] == first).all()
    assert len(second) == len(model.token_manager) - 1


def test_experts_of_a_token_differ_within_a_layer():
    for position in range(50):
        chosen = EXPERTS.chosen(position, 7)
        assert all(0 <= expert < 8 for expert in chosen)
        assert all(chosen[i] != chosen[i + 1] for i in range(0, 6, 2))


@pytest.mark.parametrize("numbers", [{"layers": 0}, {"top_k": 0}, {"top_k": 9}])
def test_meaningless_numbers_are_rejected(numbers):
    with pytest.raises(ValueError, match="top_k <= experts"):
        ScriptedExperts(**numbers)
