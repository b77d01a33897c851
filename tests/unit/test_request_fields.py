"""Request fields and values that are saved as JSON: checked before anything runs."""

import enum
import json
import math
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from strands_env.core.models import sglang_model_factory
from strands_sglang import SGLangDecodingError, SGLangModel, Trajectory
from strands_sglang.json_values import plain
from strands_sglang.request_fields import REFUSED_FIELDS, REQUEST_FIELDS
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang, bodies
from support.agents import call, make_agent, make_tools
from support.pages import ROOT, names_in_code, table

# --- Further fields of SGLang's `/generate`, checked before anything runs, recorded as they were sent ---


def fields_of(request):
    return {name: request.body[name] for name in request.body.keys() & {*REQUEST_FIELDS, "newer"}}


def test_documented_fields_are_those_that_are_taken():
    rows = table("The fields", "Field", "Value", "Use", path=ROOT / "docs/guides/model-features.md")
    assert {name: row["Value"] for row in rows for name in names_in_code(row["Field"])} == REQUEST_FIELDS


async def test_fields_are_sent_with_every_request_and_recorded(rollout, tmp_path):
    accepted = {
        "priority": np.int64(3),
        "extra_key": "v7",
        "cache_salt": "salt",
        "session_id": "rollout-1",
        "custom_labels": {"team": "a"},
        "return_entropy": True,
        "routed_dp_rank": 0,
        "lora_path": None,
    }
    sent = {name: value for name, value in accepted.items() if value is not None}
    server, model = rollout(
        [call(expression="2 * 3"), "6", '{"n": 1}', "helped"],
        request_fields=accepted,
        unchecked_request_fields={"newer": (1, np.float32(0.5))},
    )

    class Number(BaseModel):
        n: int

    await make_agent(model, make_tools()[0]).invoke_async("2 times 3?")
    async for _ in model.structured_output(Number, [{"role": "user", "content": [{"text": "one"}]}]):
        pass
    await make_agent(model.auxiliary).invoke_async("help")
    expected = {**sent, "newer": [1, 0.5]}
    assert [fields_of(request) for request in server.requests] == [expected] * 4
    assert [turn.request_fields for turn in model.trajectory.turns] == [expected] * 4
    assert type(model.trajectory.turns[0].request_fields["priority"]) is int
    model.trajectory.save(tmp_path / "t")
    assert [turn.request_fields for turn in Trajectory.load(tmp_path / "t").turns] == [expected] * 4


async def test_changed_fields_apply_to_the_next_call(rollout):
    server, model = rollout(["One.", "Two.", "Three."], request_fields={"extra_key": "v1"})
    agent = make_agent(model)
    await agent.invoke_async("a")
    model.update_config(request_fields={"extra_key": "v2", "priority": 1})
    await agent.invoke_async("b")
    model.update_config(request_fields=None)
    await agent.invoke_async("c")
    sent = [{"extra_key": "v1"}, {"extra_key": "v2", "priority": 1}, {}]
    assert [turn.request_fields for turn in model.trajectory.turns] == sent
    assert [fields_of(request) for request in server.requests] == sent


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"request_fields": {"lorapath": "a"}}, "request_fields.'lorapath'. .*did you mean 'lora_path'.*unchecked_re"),
        ({"request_fields": {"zzz": 1}}, "known fields: lora_path, priority"),
        ({"request_fields": {"temperature": 1}}, "sampling parameters into sampling_params"),
        ({"request_fields": ["lora_path"]}, "request_fields must be a dict"),
        ({"request_fields": {"lora_path": ["a", "b"]}}, "'lora_path'. must be a string, not .'a', 'b'."),
        ({"request_fields": {"priority": "high"}}, "'priority'. must be a whole number"),
        ({"request_fields": {"priority": True}}, "must be a whole number, not True"),
        ({"request_fields": {"priority": 1.5}}, "must be a whole number, not 1.5"),
        ({"request_fields": {"max_thinking_tokens": -1}}, "must be at least 0, not -1"),
        ({"request_fields": {"return_entropy": 1}}, "must be True or False"),
        ({"request_fields": {"custom_labels": {"a": 1}}}, "must be a dict of strings"),
        ({"request_fields": {"kv_hints": "x"}}, "must be a dict"),
        ({"request_fields": {"extra_key": object()}}, "which JSON cannot hold"),
        ({"unchecked_request_fields": {"newer": {1, 2}}}, "unchecked_request_fields.'newer'. is .*JSON cannot hold"),
        ({"unchecked_request_fields": {"newer": math.nan}}, "finite"),
        ({"unchecked_request_fields": {"stream": True}}, "recorded whole"),
        ({"unchecked_request_fields": {"deadline": 3}}, "argument of SGLangClient.generate"),
        ({"unchecked_request_fields": "newer"}, "must be a dict"),
        ({"request_fields": {"priority": 1}, "unchecked_request_fields": {"priority": 1}}, "is also in request_fields"),
        ({"sampling_params": {"lora_path": "a"}}, "lora_path.* put them in request_fields"),
        ({"request_fields": {"sampling_logprobs_mode": "selected"}}, "needs .*return_sampling_mask"),
        (
            {"request_fields": {"sampling_logprobs_mode": "support", "return_sampling_mask": True}},
            "must be 'selected', not 'support'",
        ),
        ({"request_fields": {"return_sampling_mask": True}}, "finite top_k .*top_k=None"),
        (
            {"request_fields": {"return_sampling_mask": True}, "sampling_params": {"top_p": 0.9, "top_k": -1}},
            "finite top_k .*top_k=-1",
        ),
    ],
)
def test_invalid_field_is_an_error_before_anything_runs(config, message, chatml_tokenizer):
    with pytest.raises(ValueError, match=message):
        SGLangModel(tokenizer=chatml_tokenizer, base_url="http://nowhere", **config)
    with pytest.raises(ValueError, match=message):
        sglang_model_factory(tokenizer=chatml_tokenizer, base_url="http://nowhere", **config)


@pytest.mark.parametrize("name", REFUSED_FIELDS)
@pytest.mark.parametrize("option", ["request_fields", "unchecked_request_fields"])
def test_field_that_affects_recording_is_rejected_with_a_reason(option, name, chatml_tokenizer):
    with pytest.raises(ValueError, match=f"{option}.'{name}'. cannot be set: .*") as refused:
        SGLangModel(tokenizer=chatml_tokenizer, base_url="http://nowhere", **{option: {name: 1}})
    assert REFUSED_FIELDS[name] in str(refused.value)


def test_invalid_update_leaves_the_configuration_unchanged(rollout):
    _, model = rollout([], request_fields={"return_sampling_mask": True}, sampling_params={"top_k": 5})
    before = dict(model.get_config())
    with pytest.raises(ValueError, match="finite top_k"):
        model.update_config(sampling_params={"temperature": 1.0})
    assert model.get_config() == before


async def test_numpy_sampling_parameters_are_sent_and_saved(rollout):
    """An episode with numpy values could once not be saved."""
    given = {"temperature": np.float32(0.5), "max_new_tokens": np.int64(5), "logit_bias": {np.int64(3): np.float32(1)}}
    server, model = rollout(["ok"], sampling_params=given)
    await make_agent(model).invoke_async("go")
    expected = {"temperature": 0.5, "max_new_tokens": 5, "logit_bias": {"3": 1.0}}
    (turn,) = Trajectory.from_bytes(model.trajectory.to_bytes()).turns
    assert turn.sampling_params == model.trajectory.turns[0].sampling_params == expected
    assert server.requests[0].sampling_params == expected


async def test_numpy_values_work_as_options(rollout):
    """`np.bool_(False)` is not `False`."""
    server, model = rollout(["ok"], return_logprob=np.bool_(False), max_context_tokens=np.int64(200))
    await make_agent(model).invoke_async("go")
    (request,) = server.requests
    assert request.body["return_logprob"] is False
    assert request.sampling_params["max_new_tokens"] == 200 - len(request.input_ids)


@pytest.mark.parametrize("value", [math.nan, {1}, 1j, object()])
def test_sampling_parameters_that_json_lacks_are_rejected(value, chatml_tokenizer):
    with pytest.raises(ValueError, match=r"sampling_params\['custom_params'\]\['x'\]"):
        SGLangModel(tokenizer=chatml_tokenizer, base_url="http://x", sampling_params={"custom_params": {"x": value}})


# --- sampling masks ---

MASKS = {"request_fields": {"return_sampling_mask": True}, "sampling_params": {"top_k": 5, "top_p": 0.9}}


def returned(server, key):
    return [row for response in server.responses for row in response.body["meta_info"][key]]


async def test_sampling_masks_are_aligned_with_sampled_tokens(rollout):
    server, model = rollout([call(expression="2 * 3"), "Six."], **MASKS)
    await make_agent(model, make_tools()[0]).invoke_async("2 times 3?")
    assert returned(server, "output_token_sampling_mask") == [
        row for turn in model.trajectory.turns for row in turn.generation.sampling_mask.rows()
    ]
    (sequence,) = model.trajectory.sequences()
    rows, logprobs = list(sequence.sampling_mask.rows()), sequence.sampling_logprobs
    assert len(rows) == len(logprobs) == len(sequence)
    assert [row for row, mask in zip(rows, sequence.loss_mask, strict=True) if mask] == returned(
        server, "output_token_sampling_mask"
    )
    assert [logprob for logprob in logprobs if logprob is not None] == returned(
        server, "output_token_sampling_logprobs"
    )
    for token, row, logprob in zip(sequence.tokens, rows, logprobs, strict=True):
        assert (token.token_id in row) is (logprob is not None) is token.loss_mask
    assert all("output_token_sampling_mask" not in turn.generation.meta_info for turn in model.trajectory.turns)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 1}, {"top_k": np.int32(7), "top_p": 0.5}])
async def test_greedy_sampling_has_masks_too(params, rollout):
    _, model = rollout(["Six."], **{**MASKS, "sampling_params": params})
    await make_agent(model).invoke_async("go")
    mask = model.trajectory.turns[0].generation.sampling_mask
    assert len(mask) == len(model.trajectory.turns[0].output_ids)
    assert max(mask.lengths) <= params.get("top_k", 1)


async def test_resumed_response_keeps_its_masks(rollout):
    parts = [ScriptedAnswer("The answer ", finish_reason="abort"), ScriptedAnswer("", finish_reason="abort"), "is 4."]
    server, model = rollout(parts, on_abort="resume", **MASKS)
    model.client.max_retries = 3
    await make_agent(model).invoke_async("2+2?")
    (turn,) = Trajectory.from_bytes(model.trajectory.to_bytes()).turns
    assert list(turn.generation.sampling_mask.rows()) == returned(server, "output_token_sampling_mask")
    assert turn.generation.sampling_logprobs.tolist() == returned(server, "output_token_sampling_logprobs")


async def test_sequence_forked_before_an_odd_stop_keeps_its_masks(chatml_tokenizer):
    stops = [chatml_tokenizer.convert_tokens_to_ids(stop) for stop in ("<|im_end|>", "<|endoftext|>")]
    answers = [ScriptedAnswer("One.", stop_token_id=stops[1]), "Two."]
    server = ScriptedSGLang(chatml_tokenizer, answers, stop_token_ids=stops)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client(), **MASKS)
    agent = make_agent(model)
    for question in "ab":
        await agent.invoke_async(question)
    first, second = model.trajectory.sequences()
    ids = [len(sequence) for sequence in (first, second)]
    assert [len(sequence.sampling_mask) for sequence in (first, second)] == ids
    for sequence in (first, second):
        for token, row in zip(sequence.tokens, sequence.sampling_mask.rows(), strict=True):
            assert token.token_id in row or (not row and not token.loss_mask)


async def test_server_that_returns_no_masks_is_an_error(rollout, monkeypatch):
    body_of = bodies.generation
    monkeypatch.setattr(
        bodies,
        "generation",
        lambda request, sampled, **kwargs: body_of(request, replace(sampled, sampling_masks=None), **kwargs),
    )
    _, model = rollout(["ok"], **MASKS)
    with pytest.raises(SGLangDecodingError, match="masks were requested and not returned.*too old"):
        await make_agent(model).invoke_async("go")
    assert not any(model.token_manager.loss_mask)


async def test_without_masks_a_sequence_has_none(rollout):
    _, model = rollout(["ok"])
    await make_agent(model).invoke_async("go")
    sequence = model.token_manager
    assert sequence.sampling_mask is None
    assert sequence.sampling_logprobs == [None] * len(sequence)


# --- User-supplied values become plain JSON, or are rejected before anything runs ---


class Level(enum.IntEnum):
    HIGH = 3


class Adapter(str, enum.Enum):
    MATH = "math"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array([1, 2]), [1, 2]),
        (np.array(0.5, dtype=np.float16), 0.5),
        (torch.tensor(2), 2),
        (torch.tensor([[0.5]]), [[0.5]]),
        (array("i", [1, 2]), [1, 2]),
        (Level.HIGH, 3),
        (Adapter.MATH, "math"),
        ({Adapter.MATH: 1}, {"math": 1}),
        ((1, "a", None, True), [1, "a", None, True]),
        ({5: -100.0, np.int32(6): 1, "x": {"y": (np.float32(2),)}}, {"5": -100.0, "6": 1, "x": {"y": [2.0]}}),
    ],
)
def test_numpy_and_torch_values_become_python_values(given, expected):
    value = plain(given, "x")
    assert value == expected and json.loads(json.dumps(value)) == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (float("nan"), "x is nan.*finite"),
        ({"a": [1, np.float32("inf")]}, r"x\['a'\]\[1\] is inf"),
        ({1, 2}, r"x is \{1, 2\} \(set\), which JSON cannot hold"),
        ({"a": object}, r"x\['a'\] is <class 'object'>"),
        (1 + 2j, "complex"),
        (b"bytes", "bytes"),
        ({None: 1}, "the key None"),
        ({True: 1}, "the key True"),
        (2**64, "64 bits"),
        ([10**5000], r"x\[0\] is an integer"),
        ("\ud800", "not Unicode text"),
        ({"\ud800": 1}, "a key of x"),
    ],
)
def test_value_that_json_lacks_is_rejected_with_its_path(given, message):
    with pytest.raises(ValueError, match=message):
        plain(given, "x")


def test_recursive_value_is_rejected():
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError, match="nested more than"):
        plain(endless, "x")
